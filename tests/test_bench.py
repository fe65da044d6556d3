"""The benchmark: numbers that follow from rows, turns that are taken, runs that go on, pages that stand alone."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outpace import InputError, SamplingParams, load
from outpace.bench import report, results, running, suites, summary, tables
from outpace.bench.memory import Peak
from outpace.bench.methods import Method, Models, Outpace, Run
from outpace.bench.peers import PEERS
from outpace.bench.running import PLAIN, Plan, Store
from outpace.cli import app
from outpace.prompts import NamedPrompt
from outpace.testing.models import PROMPTS, noisy_copy, tiny_model
from outpace.testing.tokenizers import tiny_tokenizer

# --------------------------------------------------------------------------------------------------
# Numbers


def row(method: str, prompt: str, seconds: float, tokens: int = 10, **more: Any) -> dict[str, Any]:
    return {
        "method": method,
        "prompts": [prompt],
        "category": "c",
        "temperature": 0.0,
        "repeat": 0,
        "tokens": tokens,
        "seconds": seconds,
        "first_seconds": 0.5,
        "peak_megabytes": 100.0,
        "verdicts": ["identical"],
        **more,
    }


def test_both_means_are_what_a_pencil_gives() -> None:
    """Prompts of 1 and 4 seconds become 0.5 and 4: the mean of ratios is 1.5, the ratio of totals 5 / 4.5."""
    rows = [row("base", "a", 1.0), row("base", "b", 4.0), row("fast", "a", 0.5), row("fast", "b", 4.0)]
    found = {(cell.method, cell.category): cell for cell in summary.cells(rows, "base")}
    fast = found["fast", "c"]
    assert fast.mean_ratio.value == pytest.approx(1.5)
    assert fast.total_ratio.value == pytest.approx(5 / 4.5)
    assert fast.decode_ratio is not None and fast.decode_ratio.value == pytest.approx(
        ((20 - 2) / 3.5) / ((20 - 2) / 4.0)
    )
    assert (fast.worst, fast.num_texts, fast.num_identical) == (1.0, 2, 2)
    assert found["base", "c"].mean_ratio == summary.Estimate(1.0, 1.0, 1.0)
    assert found["fast", summary.ALL].mean_ratio == fast.mean_ratio
    assert fast.mean_ratio.low == pytest.approx(1.0) and fast.mean_ratio.high == pytest.approx(2.0)


def test_a_method_that_writes_less_gains_nothing_by_it() -> None:
    """Speeds are per token: half the tokens in half the time is the same speed."""
    rows = [row("base", "a", 2.0, 20), row("short", "a", 1.0, 10)]
    (short,) = [c for c in summary.cells(rows, "base") if c.method == "short" and c.category == "c"]
    assert short.mean_ratio.value == pytest.approx(1.0) == pytest.approx(short.total_ratio.value)


def test_repeats_count_by_their_median_and_intervals_hold_the_value() -> None:
    times = [1.0, 9.0, 1.1]
    rows = [row("base", name, 2.0, repeat=r) for name in "abcdefgh" for r in range(3)]
    rows += [
        row("fast", name, times[r] * (1 + 0.1 * i), repeat=r) for i, name in enumerate("abcdefgh") for r in range(3)
    ]
    (fast,) = [c for c in summary.cells(rows, "base") if c.method == "fast" and c.category == "c"]
    wanted = statistics.mean(2.0 / (1.1 * (1 + 0.1 * i)) for i in range(8))
    assert fast.mean_ratio.value == pytest.approx(wanted)
    assert fast.mean_ratio.low < wanted < fast.mean_ratio.high < 1.15 * wanted
    assert fast.num_texts == 24


def test_counts_become_rates_and_verdicts_are_told_apart() -> None:
    counts = {"passes": 5, "drafted": 20, "accepted": 5, "off": 1, "predicted": 1.2}
    rows = [row("base", "a", 1.0), row("fast", "a", 0.5, verdicts=["tie"], **counts)]
    rows += [row("base", "b", 1.0), row("fast", "b", 0.5, verdicts=["bug"], **counts)]
    (fast,) = [c for c in summary.cells(rows, "base") if c.method == "fast" and c.category == "c"]
    assert (fast.tokens_per_pass, fast.acceptance, fast.off) == (2.0, 0.25, 0.2)
    assert (fast.num_identical, fast.num_ties, fast.num_bugs) == (0, 1, 1)
    assert "0/2 (1 ties, 1 bugs)" in tables.markdown([fast], "base")


# --------------------------------------------------------------------------------------------------
# Turns


class Scripted:
    """A method that notes when it was called."""

    samples_alike = True

    def __init__(self, name: str, calls: list[str], tokens: list[int]) -> None:
        self.name, self._calls, self._tokens = name, calls, tokens

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Run:
        self._calls.append(self.name)
        return Run([list(self._tokens) for _ in prompts], 1.0, 0.1)


@pytest.fixture(scope="module")
def plain() -> Any:
    return load(tiny_model("llama"), drafter="none")


def measured(plain: Any, store: Store, plan: Plan, calls: list[str], stop_after: int | None = None) -> None:
    wanted = plain.generate(list(PROMPTS[0]), SamplingParams(max_new_tokens=8)).tokens

    def make() -> list[Method]:
        same, other = Scripted("same", calls, wanted), Scripted("other", calls, [*wanted[:-1], wanted[-1] + 1])
        return [Outpace(PLAIN, plain), same, other]

    def progress(text: str, done: int, total: int) -> None:
        if stop_after is not None and done > stop_after:
            raise KeyboardInterrupt

    running.run(plan, lambda prompt: list(PROMPTS[0]), make, store, progress)


PLAN = Plan([NamedPrompt(str(i), "ab"[i // 2], "") for i in range(4)], 8, [0.0], repeats=2)


def test_methods_take_turns_and_none_is_always_first(
    plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_ids", lambda plain, prompt: list(PROMPTS[0]))
    calls: list[str] = []
    store = Store(tmp_path / "runs.jsonl", {})
    measured(plain, store, PLAN, calls)
    assert len(store.rows) == 3 * 4 * 2
    first = [call for index, call in enumerate(calls[4:12]) if index % 2 == 0]  # behind the warm-up
    assert set(first) == {"same", "other"}
    verdicts = {r["method"]: set(r["verdicts"]) for r in store.rows}
    assert verdicts == {PLAIN: {"identical"}, "same": {"identical"}, "other": {"bug"}}


def test_an_interrupted_run_goes_on_where_it_was(plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_ids", lambda plain, prompt: list(PROMPTS[0]))
    path, calls = tmp_path / "runs.jsonl", list[str]()
    with pytest.raises(KeyboardInterrupt):
        measured(plain, Store(path, {"n": 1}), PLAN, calls, stop_after=2)
    before = len(Store(path, {"n": 1}).rows)
    assert before == 9
    with path.open("a") as file:
        file.write('{"half a li')  # the process was killed while it wrote
    calls.clear()
    store = Store(path, {"n": 1})
    measured(plain, store, PLAN, calls)
    assert len(store.rows) == 24 == len({json.dumps([r["repeat"], r["prompts"], r["method"]]) for r in store.rows})
    assert calls.count("same") == 8 - 3 + 2 * 2, "what was done is not done again, but for two warm-ups"
    assert len(Store(path, {"n": 1}).rows) == 24
    with pytest.raises(InputError, match="holds a run with other settings"):
        Store(path, {"n": 2})


def test_batches_hold_prompts_of_one_category() -> None:
    plan = Plan([NamedPrompt(str(i), "aaabb"[i], "") for i in range(5)], 8, [0.0], batch=2)
    assert [[p.name for p in batch] for batch in plan.batches()] == [["0", "1"], ["2"], ["3", "4"]]
    assert [p.seed for p in plan.params(0.5, 3)] == [1, 2, 3]


def test_the_peak_of_memory_is_seen() -> None:
    with Peak() as before:
        pass
    with Peak() as peak:
        block = torch.ones(50_000_000)
        block.sum()
        import time

        time.sleep(0.1)
    if peak.megabytes is None or before.megabytes is None:
        pytest.skip("this system does not tell")
    assert 150 < peak.megabytes - before.megabytes < 400


# --------------------------------------------------------------------------------------------------
# Suites and peers


def test_shipped_suites_hold_what_they_say() -> None:
    code, edits = suites.read_suite("code"), suites.read_suite("edits")
    assert len(code) == 10 and {p.category for p in code} == {"code"} and len({p.name for p in code}) == 10
    assert len(edits) == 6 and len(suites.edited_file().splitlines()) == 146
    assert all(suites.edited_file() in p.prompt[0]["content"] for p in edits)  # type: ignore[index]


def test_the_categories_of_mt_bench_are_one_of_spec_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["writing", "math", "rag", "math_reasoning", "writing"]
    lines = [json.dumps({"question_id": i, "category": name, "turns": ["x"]}) for i, name in enumerate(names)]
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("OUTPACE_SPEC_BENCH", str(tmp_path / "q.jsonl"))
    found = suites.chosen(["spec-bench"], 2)
    assert [p.category for p in found] == [suites.CHAT, suites.CHAT, "rag", "math_reasoning"]
    assert [p.name for p in suites.chosen(["spec-bench"], 2, first=2)] == ["4"]
    (tmp_path / "own.jsonl").write_text(lines[1])
    assert suites.read_suite(str(tmp_path / "own.jsonl"))[0].category == "math", "a file of one's own keeps its names"


def test_a_suite_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTPACE_SPEC_BENCH", raising=False)
    with pytest.raises(InputError, match="suite must be code, edits, spec-bench or a file"):
        suites.read_suite("nothing")
    with pytest.raises(InputError, match="OUTPACE_SPEC_BENCH"):
        suites.read_suite("spec-bench")


def test_peers_give_the_text_of_generate_and_count_the_end() -> None:
    """Plain, lookup and assisted, alone; plain in a padded batch; the end-of-text token is counted, padding is not."""
    model = tiny_model("llama")
    engine = load(model, drafter="none")
    wanted = [engine.generate(list(p), SamplingParams(max_new_tokens=24)).tokens for p in PROMPTS]
    model.generation_config.eos_token_id = wanted[0][9]
    cut = [tokens[: tokens.index(wanted[0][9]) + 1] if wanted[0][9] in tokens else tokens for tokens in wanted]
    models = Models(model, None, noisy_copy(model), None)
    params = [SamplingParams(max_new_tokens=24)]
    for make in PEERS.values():
        peer = make(models)
        assert not isinstance(peer, str)
        for prompt, tokens in zip(PROMPTS, cut, strict=True):
            run = peer.run([list(prompt)], params)
            assert run.tokens == [tokens] and 0 < run.first_seconds < run.seconds
    together = PEERS["transformers"](models)
    assert not isinstance(together, str)
    assert together.run([list(p) for p in PROMPTS], params * len(PROMPTS)).tokens == cut
    assert "draft model" in str(PEERS["assisted"](Models(model, None)))


# --------------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(found)
    tiny_tokenizer().save_pretrained(found)
    return found


def bench(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_a_run_leaves_results_tables_and_a_page_that_stands_alone(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = (folder, "--suite", "code", "--limit", 3, "-n", 12, "--drafters", "suffix,suffix+recycle", "--out", out)
    found = bench(*options, "--temperature", "0,0.8")
    assert found.exit_code == 0, found.output
    data = json.loads((out / "results.json").read_text())
    assert data["baseline"] == "transformers" and len(data["rows"]) == 5 * 3 * 2
    assert data["provenance"]["settings"]["max_new_tokens"] == 12 and data["provenance"]["versions"]["torch"]
    greedy = [r for r in data["rows"] if r["temperature"] == 0]
    assert all(r["verdicts"] == ["identical"] for r in greedy)
    sampled = {r["method"]: r["verdicts"] for r in data["rows"] if r["temperature"] == 0.8}
    assert sampled["transformers"] is None and sampled["outpace suffix"] == ["identical"]
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 4 and "Temperature 0.8" in page and "outpace suffix+recycle" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\((?!#)""", page), "nothing is fetched"
    table = (out / "tables.md").read_text()
    assert table.count("| outpace suffix |") == 4 and "1.00" in table
    before = (out / "report.html").read_bytes(), table
    again = bench("--redraw", "--out", out)
    assert again.exit_code == 0
    assert (out / "report.html").read_bytes() == before[0] and (out / "tables.md").read_text() == before[1]


def test_json_is_the_cells(folder: Path, tmp_path: Path) -> None:
    options = ("--limit", 1, "-n", 8, "--peers", "none", "--no-report", "--json", "--batch", 2)
    found = bench(folder, "--out", tmp_path, *options)
    data = json.loads(found.stdout)
    assert {cell["method"] for cell in data["cells"]} == {PLAIN, "outpace auto"}
    assert not (tmp_path / "report.html").exists()
    assert results.Results.load(tmp_path / "results.json").baseline == PLAIN


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--suite", "nothing"), "suite must be"),
        (("--peers", "vllm"), "peers must be of transformers"),
        (("--peers", "assisted"), "assisted cannot run here"),
        (("--peers", "prompt-lookup", "--batch", 4), "one row at a time"),
        (("--temperature", "-1"), "temperature"),
        (("--drafters", "nothing"), "drafter must be"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: tuple[object, ...], message: str, folder: Path, tmp_path: Path
) -> None:
    found = bench(folder, "--limit", 1, "-n", 4, "--out", tmp_path, *options)
    assert found.exit_code != 0 and message in str(found.exception) + found.output


def test_a_results_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(InputError, match="no results file of outpace bench"):
        results.Results.load(tmp_path / "results.json")


def test_the_page_names_slow_numbers() -> None:
    rows = [row(PLAIN, "a", 1.0), row("outpace slow", "a", 2.0)]
    facts = {"settings": {"model": "m"}, "model": "m", "dtype": "d", "device": "cpu", "threads": "1"}
    facts |= {"processor": "p", "date": "today", "command": "outpace <bench>"}
    page = report.html(results.Results(facts, PLAIN, [(1, 0.1), (2, 0.2)], rows))
    assert "class=slow>0.50" in page and "outpace &lt;bench&gt;" in page
