"""The command line as users meet it: what goes to stdout, what to stderr, which exit status, and how it refuses.

Commands run in this process, through the same entry point as the console script; one test starts the script itself.
The help pages are kept in tests/golden. After a change that is meant, write them anew and look at the difference:

    OUTPACE_UPDATE_GOLDEN=1 python -m pytest tests/test_cli.py -k help && git diff tests/golden
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import inspect
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
import typer

import outpace
from outpace import audit, models, tuning
from outpace.cli import app, main
from outpace.drafters.suffix import SuffixDrafter
from outpace.prompts import BUILT_IN, read_prompts
from outpace.sampling import SamplingParams
from outpace.testing.models import noisy_copy, tiny_model
from outpace.testing.tokenizers import tiny_sentencepiece_tokenizer, tiny_tokenizer
from outpace.tree import TokenTree
from outpace.verify import Verdict, coupled

GOLDEN = Path(__file__).parent / "golden"
PROMPT = "the cat and the dog"
CHAT = [{"role": "user", "content": PROMPT}]

# --------------------------------------------------------------------------------------------------
# Running commands
# Older versions of transformers have no cache argument in Mamba at all.
MAMBA_REASON = (
    "forward of several tokens"
    if "cache" in inspect.signature(transformers.MambaForCausalLM.forward).parameters
    else "takes no key/value cache"
)


@dataclasses.dataclass(frozen=True)
class Run:
    """code: the exit status. out, err: what was written to stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def talk(self) -> str:
        """stderr as one line of words, without the frames that are drawn around errors."""
        return _words(self.err)


_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def _words(text: str) -> str:
    return " ".join(re.sub("[─│╭╮╰╯]", " ", _COLOUR.sub("", text)).split())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def _untouched_logging() -> Iterator[None]:
    """Commands set up logging for a process of their own: pytest's handlers and transformers' settings stay."""
    verbosity = transformers.logging.get_verbosity()
    has_bars = transformers.utils.logging.is_progress_bar_enabled()
    try:
        with mock.patch.object(logging.root, "handlers", []):
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if has_bars:
            transformers.logging.enable_progress_bar()


def run(*arguments: object, stdin: str | io.TextIOBase = "") -> Run:
    """`outpace` with these arguments. Exceptions that are not meant for users come out as they are."""
    out, err = io.StringIO(), io.StringIO()
    source = io.StringIO(stdin) if isinstance(stdin, str) else stdin
    environment = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    with (
        mock.patch.object(sys, "argv", ["outpace", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", source),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _untouched_logging(),
        pytest.raises(SystemExit) as end,
    ):
        main()
    return Run(int(end.value.code or 0), out.getvalue(), err.getvalue())


def read(found: Run) -> dict[str, Any]:
    """The one JSON object on stdout; NaN and Infinity, which are no JSON, are errors."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    value = json.loads(found.out, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def assert_refused(found: Run, *named: str) -> None:
    """A mistake of the user: status 2, nothing on stdout, a few lines on stderr that name what is wrong."""
    assert (found.code, found.out) == (2, "")
    assert 1 <= len(found.err.strip().splitlines()) <= 8
    assert "Traceback" not in found.err and "bug of ours" not in found.err
    for text in named:
        assert text in found.talk


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved models. target; noisy and rival: drafts that are right in part and never; no template; other tokenizer;
    ending: the target with an end-of-text token that it writes; mamba."""
    root = tmp_path_factory.mktemp("models")
    tokenizer, without_template = tiny_tokenizer(), tiny_tokenizer()
    without_template.chat_template = None
    model = tiny_model("llama")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    saved = {
        "target": (model, tokenizer),
        "noisy": (noisy_copy(model), tokenizer),
        "rival": (tiny_model("llama", seed=5), tokenizer),
        "no template": (model, without_template),
        "other tokenizer": (model, tiny_sentencepiece_tokenizer()),
        "mamba": (tiny_model("mamba"), tokenizer),
    }
    found = {name: root / name.replace(" ", "-") for name in (*saved, "ending")}
    with _untouched_logging():
        transformers.logging.disable_progress_bar()
        for name, parts in saved.items():
            for part in parts:
                part.save_pretrained(found[name])
        shutil.copytree(found["target"], found["ending"])
    end = outpace.load(found["target"]).generate(CHAT, SamplingParams(max_new_tokens=12)).tokens[9]
    config = json.loads((found["ending"] / "generation_config.json").read_text())
    (found["ending"] / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [end]}))
    return found


@pytest.fixture(scope="session")
def engine(folders: dict[str, Path]) -> outpace.Engine:
    return outpace.load(folders["target"])


@pytest.fixture(autouse=True)
def _no_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))


def accept_any_draft(tree: TokenTree, choose: Callable[[int], int], goes_on: Callable[[int], bool]) -> Verdict:
    """A wrong rule: the first drafted token is kept, whatever the target says."""
    if len(tree) == 1:
        return coupled(tree, choose, goes_on)
    drafted = tree.tokens[1]
    if not goes_on(drafted):
        return Verdict((0,), (drafted,))
    token = choose(1)
    goes_on(token)
    return Verdict((0, 1), (drafted, token))


@pytest.fixture
def broken_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.verify.coupled", accept_any_draft)


# --------------------------------------------------------------------------------------------------
# generate


def test_generate_writes_the_text_to_stdout_and_everything_else_to_stderr(
    folders: dict[str, Path], engine: outpace.Engine
) -> None:
    """stdout is data: the library's text and a newline. stderr is talk: counts, drafter, how it ended, the seed."""
    found = run("generate", PROMPT, "-m", folders["target"], "-n", 24)
    expected = engine.generate(CHAT, SamplingParams(max_new_tokens=24))
    assert (found.code, found.out) == (0, expected.text + "\n")
    for words in ("24 tokens in", "drafter suffix", "coupled", "finish: length", "seed "):
        assert words in found.talk


def test_the_console_script_takes_a_prompt_without_a_command(
    folders: dict[str, Path], engine: outpace.Engine, tmp_path: Path
) -> None:
    """`outpace "prompt"`, as a process of its own: the text is on stdout, one line of talk on stderr, status 0."""
    script = Path(sys.executable).with_name("outpace")
    command = [str(script)] if script.exists() else [sys.executable, "-c", "from outpace.cli import main; main()"]
    arguments = [PROMPT, "-m", str(folders["target"]), "-n", "24"]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8", "COLUMNS": "300", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([*command, *arguments], capture_output=True, env=environment, stdin=subprocess.DEVNULL)
    expected = engine.generate(CHAT, SamplingParams(max_new_tokens=24))
    assert (found.returncode, found.stdout.decode()) == (0, expected.text + "\n")
    assert len(found.stderr.decode().splitlines()) == 1


def test_the_short_form_is_generate(folders: dict[str, Path]) -> None:
    """`outpace "prompt"` and `outpace -` are `outpace generate` with the same arguments."""
    options = ("-m", folders["target"], "-n", 8)
    long = run("generate", PROMPT, *options)
    assert run(PROMPT, *options).out == long.out
    assert run("-", *options, stdin=PROMPT).out == long.out


def test_a_prompt_is_read_from_stdin(folders: dict[str, Path]) -> None:
    """With - or without any prompt, stdin is the prompt, every character of it."""
    options = ("-m", folders["target"], "-n", 8)
    text = "two lines\nand é\n"
    given = run("generate", text, *options)
    assert run("generate", "-", *options, stdin=text).out == given.out
    assert run("generate", *options, stdin=text).out == given.out


@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.8, "--top-p", 0.9, "--top-k", 40, "--seed", 5)])
def test_json_is_one_object_with_the_result_and_its_stats(
    sampling: tuple[object, ...], folders: dict[str, Path]
) -> None:
    """--json puts nothing but one object on stdout, and it says what the library's result says."""
    found = run("generate", PROMPT, "-m", folders["target"], "-n", 24, "--json", *sampling)
    params = SamplingParams(max_new_tokens=24)
    if sampling:
        params = dataclasses.replace(params, temperature=0.8, top_p=0.9, top_k=40, seed=5)
    expected = outpace.load(folders["target"]).generate(CHAT, params)  # which remembers nothing yet, as the command
    report = read(found)
    assert found.code == 0 and found.err.strip() == "" and list(report) == ["outpace"]
    result = report["outpace"]
    assert (result["text"], result["tokens"]) == (expected.text, expected.tokens)
    assert (result["finish_reason"], result["stop_reason"]) == ("length", None)
    if sampling:
        assert result["seed"] == 5
    stats = result["stats"]
    for name in outpace.Stats.__slots__:
        if not name.endswith("_seconds"):
            assert stats[name] == json.loads(json.dumps(getattr(expected.stats, name))), name
    assert stats["num_rejected_tokens"] == stats["num_drafted_tokens"] - stats["num_accepted_tokens"]
    assert stats["tokens_per_pass"] == pytest.approx(24 / stats["num_verifications"])
    assert stats["decode_tokens_per_second"] > 0 and stats["is_lossless"] is True


@pytest.mark.parametrize("k", [1, 5])
def test_k_from_the_command_line_is_k_of_the_library(k: int, folders: dict[str, Path]) -> None:
    """As many target passes as in the library."""
    drafts = ("--draft-model", folders["noisy"], "--k", k, "--draft-quantize", "none")  # auto goes by the clock
    result = read(run("generate", PROMPT, "-m", folders["target"], "-n", 30, "--json", *drafts))["outpace"]
    library = outpace.load(folders["target"], draft_model=folders["noisy"], k=k, draft_quantize="none")
    expected = library.generate(CHAT, SamplingParams(max_new_tokens=30))
    assert result["tokens"] == expected.tokens
    assert result["stats"]["num_verifications"] == expected.stats.num_verifications
    assert result["stats"]["drafter"] == "model"
    assert len(result["stats"]["drafted_by_depth"]) <= k
    assert result["stats"]["num_accepted_tokens"] >= 5 and result["stats"]["num_rejected_tokens"] >= 5


def test_texts_to_copy_from_save_passes_and_change_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    """--memory keeps what was written, --corpus reads files, --prediction says what is expected."""

    def passes(*options: Any) -> int:
        report = read(run("generate", PROMPT, "-m", folders["target"], "-n", 40, "--json", *options))["outpace"]
        assert report["tokens"] == plain["tokens"]
        return int(report["stats"]["num_verifications"])

    plain = read(run("generate", PROMPT, "-m", folders["target"], "-n", 40, "--json"))["outpace"]
    alone = plain["stats"]["num_verifications"]
    expected, memory = tmp_path / "expected.txt", tmp_path / "memory.safetensors"
    expected.write_text(plain["text"], encoding="utf-8")
    assert passes("--memory", memory) == alone
    assert passes("--memory", memory, "--drafter", "lookup") <= alone - 15
    assert passes("--corpus", memory) <= alone - 15
    assert passes("--memory", memory, "--compare") <= alone - 15
    assert passes("--prediction", expected) < alone
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_text("no texts", encoding="utf-8")
    found = run("generate", PROMPT, "-m", folders["target"], "--memory", damaged)
    assert found.code == 2 and "cannot be read" in found.talk and not found.out


@pytest.mark.parametrize("drafter", ["recycle", "lookahead", "jacobi", "self", "early-exit", "auto", "suffix+self"])
def test_every_drafter_can_be_named(drafter: str, folders: dict[str, Path]) -> None:
    plain = read(run("generate", PROMPT, "-m", folders["target"], "-n", 40, "--drafter", "none", "--json"))["outpace"]
    extra = ("--lookahead", "4,3,4") if drafter == "lookahead" else ()
    options = ("-m", folders["target"], "-n", 40, "--drafter", drafter, "--json", *extra)
    found = read(run("generate", PROMPT, *options))["outpace"]
    assert found["tokens"] == plain["tokens"] and found["stats"]["num_drafted_tokens"] > 0
    assert found["stats"]["drafter"] == {"auto": "suffix+recycle"}.get(drafter, drafter)


@pytest.mark.parametrize("lookahead", ["4,3", "4,x,2", "-1,3,2"])
def test_a_lookahead_that_is_no_three_numbers_is_refused(lookahead: str, folders: dict[str, Path]) -> None:
    found = run("generate", PROMPT, "-m", folders["target"], "--drafter", "lookahead", "--lookahead", lookahead)
    assert found.code == 2 and "W,N,G" in found.talk


@pytest.mark.parametrize("drafts", [(), ("--drafter", "lookup"), ("--drafter", "none"), ("--draft-model", "--width")])
def test_compare_shows_both_texts_the_ratio_and_that_they_are_identical(
    drafts: tuple[str, ...], folders: dict[str, Path], engine: outpace.Engine
) -> None:
    """--compare decodes again without drafts: the same text twice on stdout, the table and the verdict on stderr."""
    if "--draft-model" in drafts:
        drafts = ("--draft-model", str(folders["noisy"]), "--width", "3")
    options = ("-m", folders["target"], "-n", 20, "--temperature", 0.7, "--seed", 3, *drafts)
    found = run("generate", PROMPT, "--compare", *options)
    expected = engine.generate(CHAT, SamplingParams(temperature=0.7, seed=3, max_new_tokens=20)).text
    assert (found.code, found.out) == (0, f"{expected}\n{expected}\n")
    for words in ("without drafts", "speed ratio: ", "identical: yes", "seed: 3", "plain"):
        assert words in found.talk

    report = read(run("generate", PROMPT, "--compare", "--json", *options))
    assert sorted(report) == ["is_identical", "outpace", "plain", "speed_ratio"]
    assert report["is_identical"] is True and report["speed_ratio"] > 0
    assert report["plain"]["tokens"] == report["outpace"]["tokens"] and report["plain"]["seed"] == 3
    assert report["plain"]["stats"]["num_drafted_tokens"] == 0 and report["plain"]["stats"]["drafter"] == "none"


def test_compare_uses_the_seed_that_was_drawn(folders: dict[str, Path]) -> None:
    """Without --seed one is drawn for the first run, and plain decoding repeats it."""
    report = read(run("generate", PROMPT, "-m", folders["target"], "-n", 20, "--temperature", 1, "--compare", "--json"))
    assert report["is_identical"] is True and report["plain"]["seed"] == report["outpace"]["seed"]


@pytest.mark.usefixtures("broken_engine")
def test_compare_says_so_when_the_texts_differ(folders: dict[str, Path]) -> None:
    """With an engine that accepts wrong drafts, --compare names the token, the gap and that it is a bug."""
    options = ("generate", PROMPT, "-m", folders["target"], "-n", 20, "--draft-model", folders["rival"], "--compare")
    found = run(*options)
    assert re.search(r"identical: no, from token \d+ on: a BUG \(gap .*, rounding moves it by up to", found.talk)
    report = read(run(*options, "--json"))
    assert report["is_identical"] is False and report["difference"]["is_tie"] is False
    index, gap = report["difference"]["index"], report["difference"]["gap"]
    assert report["plain"]["tokens"][:index] == report["outpace"]["tokens"][:index] and gap > 0
    assert report["plain"]["tokens"][index] != report["outpace"]["tokens"][index]


def test_compare_does_not_call_it_a_bug_when_the_method_promises_no_identity(folders: dict[str, Path]) -> None:
    """acceptance=rejection is exact in distribution only: another text is expected, and is called so."""
    sampling = ("--temperature", 1, "--seed", 1, "--acceptance", "rejection")
    found = run(
        "generate", PROMPT, "-m", folders["target"], "-n", 24, "--draft-model", folders["noisy"], "--compare", *sampling
    )
    assert found.code == 0
    assert "expected: acceptance=rejection promises no seed-exactness" in found.talk and "BUG" not in found.talk


def test_a_seed_repeats_a_sampled_text_and_a_drawn_seed_is_reported(folders: dict[str, Path]) -> None:
    """--seed repeats; another seed gives another text; without --seed the reported one repeats the run."""
    options = ("generate", PROMPT, "-m", folders["target"], "-n", 24, "--temperature", 1, "--json")
    first, again, other = (read(run(*options, "--seed", seed))["outpace"] for seed in (7, 7, 8))
    assert first["tokens"] == again["tokens"] != other["tokens"]
    drawn = read(run(*options))["outpace"]
    assert read(run(*options, "--seed", drawn["seed"]))["outpace"]["tokens"] == drawn["tokens"]
    assert f"seed {drawn['seed']}" in run(*options[:-1], "--seed", drawn["seed"]).talk


def test_several_stop_strings_end_the_text_at_the_first(folders: dict[str, Path], engine: outpace.Engine) -> None:
    """--stop may be given several times; the text ends before whichever comes first, and is not part of it."""
    full = engine.generate(CHAT, SamplingParams(max_new_tokens=30)).text
    later, sooner = (next(word for word in re.findall(r"[a-z]{2,}", full[start:])) for start in (len(full) // 2, 0))
    options = ("generate", PROMPT, "-m", folders["target"], "-n", 30)
    stops = ("--stop", "never written", "--stop", later, "--stop", sooner)
    expected = full[: min(full.index(word) for word in (later, sooner))]
    result = read(run(*options, *stops, "--json"))["outpace"]
    assert (result["text"], result["finish_reason"]) == (expected, "stop")
    assert result["stop_reason"] in (later, sooner)
    assert run(*options, *stops).out == expected + "\n"


def test_the_end_of_text_token_of_the_generation_config_ends_the_text(
    folders: dict[str, Path], engine: outpace.Engine
) -> None:
    """The id in generation_config.json ends the text, in a drafted block too; it is the last token."""
    full = engine.generate(CHAT, SamplingParams(max_new_tokens=12)).tokens
    drafts = ("--draft-model", folders["noisy"])
    result = read(run("generate", PROMPT, "-m", folders["ending"], "-n", 30, "--json", *drafts))["outpace"]
    end = full.index(full[9]) + 1
    assert result["tokens"] == full[:end]
    assert (result["finish_reason"], result["stop_reason"]) == ("stop", full[9])


def test_the_chat_template_is_used_when_there_is_one_and_not_refused(
    folders: dict[str, Path], engine: outpace.Engine
) -> None:
    """Default: a chat if the tokenizer has a template. --no-chat: the bare text. --system: a message before it."""
    options = ("-m", folders["target"], "-n", 8, "--json")

    def prompt_and_text(prompt: Any) -> tuple[int, str]:
        expected = engine.generate(prompt, SamplingParams(max_new_tokens=8))
        return len(expected.prompt_tokens), expected.text

    for extra, prompt in (
        ((), CHAT),
        (("--chat",), CHAT),
        (("--no-chat",), PROMPT),
        (("--system", "Be brief."), [{"role": "system", "content": "Be brief."}, *CHAT]),
    ):
        result = read(run("generate", PROMPT, *options, *extra))["outpace"]
        assert (result["stats"]["num_prompt_tokens"], result["text"]) == prompt_and_text(prompt), extra


def test_without_a_chat_template_text_is_text_and_a_chat_is_refused(
    folders: dict[str, Path], engine: outpace.Engine
) -> None:
    """No template: the bare text by default; --chat and --system cannot be honoured and are refused by name."""
    options = ("generate", PROMPT, "-m", folders["no template"], "-n", 8)
    assert run(*options).out == engine.generate(PROMPT, SamplingParams(max_new_tokens=8)).text + "\n"
    assert_refused(run(*options, "--chat"), "chat template")
    assert_refused(run(*options, "--system", "Be brief."), "--system", "chat template")
    assert_refused(
        run("generate", PROMPT, "-m", folders["target"], "--no-chat", "--system", "Be brief."), "--system", "--no-chat"
    )


def test_typical_acceptance_says_that_it_is_not_lossless(folders: dict[str, Path]) -> None:
    """On stderr and in the stats when text is sampled; at temperature 0 it is lossless and nothing is said."""
    options = ("generate", PROMPT, "-m", folders["target"], "-n", 12, "--acceptance", "typical")
    sampled = ("--temperature", 1, "--seed", 2)
    assert "not lossless" in run(*options, *sampled).talk.lower()
    found = run(*options, *sampled, "--json")
    stats = read(found)["outpace"]["stats"]
    assert stats["is_lossless"] is False and stats["acceptance"] == "typical"
    assert any("not lossless" in note for note in stats["notes"])
    assert "not lossless" in found.talk.lower()
    greedy = run(*options, "--json")
    stats = read(greedy)["outpace"]["stats"]
    assert stats["is_lossless"] is True and stats["notes"] == [] and "lossless" not in greedy.talk.lower()


def test_failed_drafts_are_told_and_change_nothing(
    folders: dict[str, Path], engine: outpace.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that raises costs rounds without draft: one warning, a count at the end, the same text."""

    def fail(*_: object) -> None:
        raise RuntimeError("no idea")

    expected = engine.generate(CHAT, SamplingParams(max_new_tokens=8)).text
    monkeypatch.setattr(SuffixDrafter, "propose", fail)
    found = run("generate", PROMPT, "-m", folders["target"], "-n", 8)
    assert (found.code, found.out) == (0, expected + "\n")
    assert found.talk.count("no idea") == 1 and "7 drafts failed" in found.talk


# --------------------------------------------------------------------------------------------------
# Refusals

BAD_VALUES: list[tuple[tuple[object, ...], tuple[str, ...]]] = [
    (("--k", -1), ("k must be", "-1")),
    (("--k", 0), ("k must be", "drafter='none'")),
    (("--k", 10**6), ("k must be", "1000000", "4096")),
    (("--k", "abc"), ("--k",)),
    (("--k", "1.5"), ("--k",)),
    (("--width", 3), ("width=3", "auto")),
    (("--width", 3, "--drafter", "none"), ("width=3", "none")),
    (("--width", 0), ("width must be", "0")),
    (("--temperature", -1), ("temperature must be", "-1")),
    (("--temperature", "nan"), ("temperature must be", "nan")),
    (("--temperature", "inf"), ("temperature must be", "inf")),
    (("--temperature", "warm"), ("--temperature",)),
    (("--top-p", 0), ("top_p must be", "0.0")),
    (("--top-p", 2), ("top_p must be", "2.0")),
    (("--top-p", "nan"), ("top_p must be", "nan")),
    (("--top-k", -1), ("top_k must be", "-1")),
    (("--min-p", 2), ("min_p must be", "2.0")),
    (("--repetition-penalty", 0), ("repetition_penalty must be", "0.0")),
    (("--seed", -1), ("seed must be", "-1")),
    (("--max-new-tokens", 0), ("max_new_tokens must be", "0")),
    (("-n", -5), ("max_new_tokens must be", "-5")),
    (("-n", 10**6), ("max_new_tokens is 1000000", "512 positions")),
    (("--stop", ""), ("stop must hold", "''")),
    (("--drafter", "foo"), ("drafter must be", "foo", "suffix")),
    (("--drafter", "model"), ("draft_model",)),
    (("--acceptance", "foo"), ("--acceptance", "foo", "coupled")),
    (("--dtype", "int8"), ("--dtype", "int8")),
    (("--device", "abacus"), ("device 'abacus'",)),
    (("--device", "meta"), ("device 'meta'",)),
    (("--draft-model", "/no/such/draft"), ("no model '/no/such/draft'",)),
    (("--draft-model", ""), ("name is empty",)),
    (("--drafter", "none", "--draft-model", "/no/such/draft"), ("draft_model", "drafter='none'")),
    (("--drafter", "suffix", "--draft-model", "/no/such/draft"), ("draft_model", "drafter='suffix'")),
    (("--nonsense", 1), ("--nonsense",)),
    (("--temprature", 1), ("--temprature", "--temperature")),
    (("a second prompt",), ("a second prompt",)),
]


@pytest.mark.parametrize(("options", "named"), BAD_VALUES, ids=lambda part: " ".join(map(str, part))[:40])
def test_a_value_that_cannot_be_honoured_is_refused_by_name(
    options: tuple[object, ...], named: tuple[str, ...], folders: dict[str, Path]
) -> None:
    """T-C10: exit status 2, a few lines that name the argument and the value, no traceback, no text."""
    assert_refused(run("generate", PROMPT, "-m", folders["target"], *options), *named)


@pytest.mark.parametrize("name", ["/no/such/model", "no-such-model", "", "no/such-model-in-the-cache"])
def test_a_model_that_is_not_there_is_refused_by_name(name: str) -> None:
    """A path, a bare name, nothing, or a hub id that cannot be downloaded: one line that says what to pass instead."""
    for command in (("generate", PROMPT, "-m", name), ("verify", name)):
        found = run(*command)
        assert_refused(found, name or "name is empty", "folder", ".gguf")
        assert len(found.err.splitlines()) == 1


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    """A folder without config.json, and one whose weights are damaged."""
    assert_refused(run("generate", PROMPT, "-m", tmp_path), str(tmp_path), "config.json")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    assert_refused(run("generate", PROMPT, "-m", tmp_path), str(tmp_path), "could not be loaded")


def test_a_model_that_cannot_be_decoded_exactly_is_refused(folders: dict[str, Path]) -> None:
    """mamba gives wrong scores for several tokens over a state: refused before the first token, with the reason."""
    named = (MAMBA_REASON, "transformers' own generate")
    assert_refused(run("generate", PROMPT, "-m", folders["mamba"]), *named)
    assert_refused(run("verify", folders["mamba"]), *named)


def test_a_draft_that_is_the_target_itself_is_warned_about(folders: dict[str, Path]) -> None:
    """T-K4: it is exact and no faster; stderr says so, and the text is written."""
    found = run("generate", PROMPT, "-m", folders["target"], "-n", 4, "--draft-model", folders["target"])
    assert found.code == 0 and found.out != ""
    assert "outpace: The draft model is the target itself" in found.talk


def test_a_draft_with_another_tokenizer_is_refused_with_the_first_differing_token(folders: dict[str, Path]) -> None:
    """Token ids are compared, so one token that differs is named, with its text in both tokenizers."""
    ours, theirs = (
        {index: token for token, index in tokenizer.get_vocab().items()}
        for tokenizer in (tiny_tokenizer(), tiny_sentencepiece_tokenizer())
    )
    first = next(index for index in sorted(ours) if ours[index] != theirs.get(index))
    named = f"the first is {first}: {ours[first]!r} in the target and {theirs[first]!r} in the draft"
    for command in (("generate", PROMPT, "-m", folders["target"]), ("verify", folders["target"])):
        assert_refused(run(*command, "--draft-model", folders["other tokenizer"]), "tokenizer does not match", named)


def test_an_empty_or_unreadable_prompt_is_refused(folders: dict[str, Path]) -> None:
    """An empty argument, an empty stdin, a terminal with no prompt, and bytes that are no UTF-8."""
    options = ("-m", folders["target"], "-n", 4)
    assert_refused(run("generate", "", *options), "PROMPT", "empty")
    assert_refused(run("generate", *options, stdin=""), "PROMPT", "empty")
    assert_refused(run("generate", *options, stdin=Terminal()), "PROMPT", "pipe one in")
    assert_refused(run("generate", "the \udcff cat", *options), "PROMPT", "UTF-8")
    bytes_in = io.TextIOWrapper(io.BytesIO(b"the \xff cat"), encoding="utf-8")
    assert_refused(run("generate", "-", *options, stdin=bytes_in), "PROMPT", "UTF-8")


@pytest.mark.parametrize("command", ["generate", "verify", "doctor"])
def test_an_unknown_option_is_an_error_of_every_command(command: str) -> None:
    """Nothing is ever ignored silently: the option is named, and nothing runs."""
    assert_refused(run(command, "--not-an-option"), "--not-an-option")


def test_an_option_may_come_before_the_prompt_in_the_short_form(folders: dict[str, Path]) -> None:
    """Without a command, everything belongs to `generate`."""
    found = run("--json", "-n", 4, "-m", folders["target"], PROMPT)
    assert found.code == 0 and json.loads(found.out)["outpace"]["stats"]["num_new_tokens"] == 4


def test_the_version_is_the_packages() -> None:
    """`--version` prints it alone."""
    assert run("--version").out.strip() == importlib.metadata.version("outpace")


def test_our_own_bugs_keep_their_traceback_and_ask_for_a_report(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception that is no OutpaceError is ours: it is not swallowed, and stderr asks for a report."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("outpace.cli.options.load", fail)
    err = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["outpace", PROMPT, "-m", str(folders["target"])]),
        contextlib.redirect_stderr(err),
        _untouched_logging(),
        pytest.raises(ZeroDivisionError, match="a bug"),
    ):
        main()
    assert "bug of ours" in err.getvalue() and "report" in err.getvalue()


def test_control_c_ends_with_status_130_and_no_traceback(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell's convention for an interrupted command."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outpace.cli.options.load", interrupt)
    found = run(PROMPT, "-m", folders["target"])
    assert found.code == 130 and "Traceback" not in found.err and found.out == ""


# --------------------------------------------------------------------------------------------------
# verify


def test_verify_finds_no_bug_and_exits_with_0(folders: dict[str, Path]) -> None:
    """Greedy and sampled, our own prompts: every row identical, the rounding stated, "0 bugs" last."""
    found = run("verify", folders["target"], "--draft-model", folders["noisy"], "-n", 12, "--seeds", 1)
    assert found.code == 0
    assert "float32, cpu, drafter model, k 8" in found.out and "block rounding error" in found.out
    for prompt in BUILT_IN:
        assert len(re.findall(rf"^{prompt.name} .* identical$", found.out, re.M)) == 2
    assert found.out.splitlines()[-1] == "8 identical, 0 ties, 0 bugs"


def test_verify_as_json_is_one_object_with_every_row(folders: dict[str, Path]) -> None:
    """rounding, rows and num_bugs; a row says prompt, setting, counts and verdict; drafts were accepted and refused."""
    drafts = ("--draft-model", folders["noisy"], "--width", 2)
    report = read(run("verify", folders["target"], *drafts, "-n", 20, "--seeds", 2, "--limit", 2, "--json"))
    assert sorted(report) == ["num_bugs", "rounding", "rows"] and report["num_bugs"] == 0
    assert 0 < report["rounding"] < 1e-3
    rows = report["rows"]
    names = [(prompt.name, setting) for prompt in BUILT_IN[:2] for setting in ("greedy", "seed 0", "seed 1")]
    assert [(row["prompt"], row["setting"]) for row in rows] == names
    assert {row["verdict"] for row in rows} == {"identical"} and {row["tokens"] for row in rows} == {20}
    accepted = sum(row["accepted"] for row in rows)
    assert accepted >= 5 and sum(row["drafted"] for row in rows) >= accepted + 5


def test_verify_runs_greedy_and_then_sampled_with_the_settings_that_were_given(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per prompt: once at temperature 0, then with seeds 0, 1, … at --temperature and --top-p."""
    seen: list[SamplingParams] = []

    def spy(engine: outpace.Engine, prompt: Any, params: SamplingParams, rounding: float) -> audit.Comparison:
        seen.append(params)
        return compare(engine, prompt, params, rounding)

    compare = audit.compare
    monkeypatch.setattr("outpace.audit.compare", spy)
    options = ("-n", 5, "--seeds", 2, "--limit", 1, "--temperature", 1.3, "--top-p", 0.7)
    assert run("verify", folders["target"], *options).code == 0
    greedy = SamplingParams(max_new_tokens=5)
    sampled = [SamplingParams(max_new_tokens=5, temperature=1.3, top_p=0.7, seed=seed) for seed in (0, 1)]
    assert seen == [greedy, *sampled]


def test_verify_in_bfloat16_measures_a_larger_rounding_and_finds_no_bug(folders: dict[str, Path]) -> None:
    """--dtype is honoured and shown; differences, if any, are ties."""
    found = run("verify", folders["target"], "--dtype", "bfloat16", "-n", 16, "--seeds", 1, "--drafter", "lookup")
    assert found.code == 0 and found.out.startswith("torch.bfloat16, cpu, drafter lookup")
    rounding = re.search(r"dtype and device: ([\d.e-]+)", found.out)
    assert rounding and 0.05 < float(rounding.group(1)) < 1
    assert found.out.splitlines()[-1].endswith(" 0 bugs")


@pytest.mark.usefixtures("broken_engine")
def test_verify_finds_the_bug_of_a_broken_engine_and_exits_with_1(folders: dict[str, Path]) -> None:
    """An engine that accepts wrong drafts: the first differing token, both scores, the gap, and the word bug."""
    options = ("verify", folders["target"], "--draft-model", folders["rival"], "-n", 12, "--seeds", 1, "--limit", 1)
    found = run(*options)
    assert found.code == 1 and found.out.splitlines()[-1] == "0 identical, 0 ties, 2 bugs"
    table = _words(found.out)
    assert "bug: token" in table and "scores" in table and "rounding" in table
    found = run(*options, "--json")
    report = read(found)
    assert (found.code, report["num_bugs"]) == (1, 2)
    for row in report["rows"]:
        (plain, plain_score), (speculative, score) = row["plain"], row["speculative"]
        assert row["verdict"] == "bug" and plain != speculative
        assert 0 < row["threshold"] < row["gap"] <= abs(plain_score - score)


@pytest.mark.usefixtures("broken_engine")
def test_verify_calls_a_difference_within_the_rounding_a_tie_and_exits_with_0(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same difference, with a rounding error that could explain it, is a tie and not a failure."""
    monkeypatch.setattr("outpace.audit.measure_rounding", lambda target, text: 1e6)
    found = run("verify", folders["target"], "--draft-model", folders["rival"], "-n", 12, "--seeds", 0, "--limit", 1)
    assert found.code == 0 and found.out.splitlines()[-1] == "0 identical, 1 ties, 0 bugs"


def test_verify_writes_valid_json_when_one_text_ends_before_the_other(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a difference has no scores: null in JSON, which knows neither NaN nor Infinity; it is a bug."""

    def shorter(engine: object, plain: Any, speculative: Any, params: object, rounding: float) -> Any:
        cut = dataclasses.replace(speculative, tokens=speculative.tokens[:-1])
        return find_difference(engine, plain, cut, params, rounding)  # type: ignore[arg-type]

    find_difference = audit.find_difference
    monkeypatch.setattr("outpace.audit.find_difference", shorter)
    options = ("verify", folders["target"], "-n", 8, "--seeds", 0, "--limit", 1)
    found = run(*options, "--json")
    (row,) = read(found)["rows"]
    assert (found.code, row["verdict"], row["index"]) == (1, "bug", 7)
    assert (row["plain"], row["gap"]) == ([-1, None], None)
    assert run(*options).out.splitlines()[-1] == "0 identical, 0 ties, 1 bugs"


def test_verify_uses_chats_as_text_where_there_is_no_template(folders: dict[str, Path]) -> None:
    """A model without a chat template gets the last message's text."""
    found = run("verify", folders["no template"], "-n", 4, "--seeds", 0, "--limit", 1)
    assert found.code == 0 and found.out.splitlines()[-1] == "1 identical, 0 ties, 0 bugs"


def test_verify_takes_a_prompt_that_nearly_fills_the_model(folders: dict[str, Path], tmp_path: Path) -> None:
    """Measuring the rounding needs no more positions than the user's own -n: 500 tokens and 8 more fit in 512."""
    (tmp_path / "long.txt").write_text("x" * 500)
    options = ("--prompts", tmp_path / "long.txt", "--seeds", 0)
    assert run("verify", folders["target"], "-n", 8, *options).code == 0
    assert_refused(run("verify", folders["target"], "-n", 30, *options), "max_new_tokens is 30", "512 positions")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--limit", 0), "--limit"),
        (("--seeds", -1), "--seeds"),
        (("-n", 0), "--max-new-tokens"),
        (("--temperature", -1), "temperature must be"),
        (("--temperature", "nan"), "temperature must be"),
        (("--top-p", 0), "top_p must be"),
        (("--k", -1), "k must be"),
        (("--width", 3), "width=3"),
        (("--drafter", "foo"), "drafter must be"),
    ],
    ids=str,
)
def test_verify_refuses_bad_values_by_name(
    options: tuple[object, ...], named: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Status 2, which is neither of the two answers of verify."""
    assert_refused(run("verify", folders["target"], *options), named)


# --------------------------------------------------------------------------------------------------
# Files of prompts


def test_a_text_file_holds_one_prompt_a_line(folders: dict[str, Path], tmp_path: Path) -> None:
    """Names are line numbers, empty lines are skipped, and --limit takes the first prompts."""
    file = tmp_path / "prompts.txt"
    file.write_text("the cat\n\n  \nthe dog\r\nthe bird")
    assert [(p.name, p.prompt) for p in read_prompts(file)] == [("1", "the cat"), ("4", "the dog"), ("5", "the bird")]
    for limit, names in (((), ["1", "4", "5"]), (("--limit", 2), ["1", "4"]), (("--limit", 9), ["1", "4", "5"])):
        found = run("verify", folders["target"], "--prompts", file, "-n", 4, "--seeds", 0, "--json", *limit)
        assert [row["prompt"] for row in read(found)["rows"]] == names


def test_json_lines_hold_prompts_chats_or_turns(folders: dict[str, Path], tmp_path: Path) -> None:
    """A text, a chat, or Spec-Bench's turns, of which the first is asked; with a name and a category."""
    file = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "the cat", "category": "animals"},
        {"messages": [{"role": "system", "content": "Be brief."}, *CHAT], "name": "chat"},
        {"question_id": 81, "category": "writing", "turns": ["the first turn", "the second"]},
        {"prompt": "a\u2028line separator, \x85 and \x0b are text"},
    ]
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n", encoding="utf-8")
    prompts = read_prompts(file)
    assert [(p.name, p.category) for p in prompts] == [("1", "animals"), ("chat", ""), ("81", "writing"), ("4", "")]
    expected = [lines[0]["prompt"], lines[1]["messages"], [{"role": "user", "content": "the first turn"}]]
    assert [p.prompt for p in prompts] == [*expected, lines[3]["prompt"]]
    found = run("verify", folders["target"], "--prompts", file, "-n", 4, "--seeds", 0, "--json")
    assert [row["prompt"] for row in read(found)["rows"]] == ["1", "chat", "81", "4"]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "the dog"',
        "the dog",
        "[1, 2]",
        '"the dog"',
        "{}",
        '{"text": "the dog"}',
        '{"prompt": 5}',
        '{"prompt": ""}',
        '{"messages": []}',
        '{"messages": ["the dog"]}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"content": "the dog"}]}',
        '{"turns": []}',
        '{"turns": "the dog"}',
    ],
)
def test_a_line_that_holds_no_prompt_is_refused_with_its_file_and_number(
    line: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Broken JSON, another type, no known key, or nothing in it: found before the model is loaded."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "the cat"}}\n\n{line}\n')
    assert_refused(run("verify", folders["target"], "--prompts", file), "prompts.jsonl, line 3")


def test_a_file_of_prompts_that_cannot_be_read_is_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    """Missing, a folder, empty, or not UTF-8."""
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name, what in (
        ("missing.txt", "cannot be read"),
        (".", "cannot be read"),
        ("empty.txt", "holds no prompts"),
        ("latin.txt", "cannot be read"),
    ):
        assert_refused(run("verify", folders["target"], "--prompts", tmp_path / name), str(tmp_path / name), what)


# --------------------------------------------------------------------------------------------------
# doctor


def test_doctor_says_what_works_with_a_model(folders: dict[str, Path]) -> None:
    """Versions, devices, drafters; of the model its class, dtype and what each check found."""
    found = run("doctor", folders["target"])
    assert found.code == 0 and found.err.strip() == ""
    page = _words(found.out)
    for words in ("python", "transformers", "cpu", "LlamaForCausalLM", "float32", "trees and ragged batches", "sdpa"):
        assert words in page
    assert "chain of 12 tokens: right" in page and "tree of 5 tokens in a ragged batch: right" in page
    for name in ("suffix", "lookup", "model", "none"):
        assert name in page

    facts = read(run("doctor", folders["target"], "--json"))
    checked = facts["checked model"]
    assert facts["versions"]["torch"] == importlib.metadata.version("torch")
    assert (checked["model"], checked["vocabulary"], checked["positions"]) == (str(folders["target"]), 512, 512)
    assert checked["verdict"] == "trees and ragged batches" and 0 < checked["block rounding"] < 1e-3
    assert len(checked["reasons"]) == 2


def test_doctor_says_why_a_model_is_refused(folders: dict[str, Path]) -> None:
    """mamba: refused, with the reason that generate gives. A diagnosis is an answer: status 0."""
    found = run("doctor", folders["mamba"])
    page = _words(found.out)
    assert found.code == 0 and "refused" in page and MAMBA_REASON in page
    checked = read(run("doctor", folders["mamba"], "--json"))["checked model"]
    assert checked["verdict"] == "refused" and MAMBA_REASON in checked["reasons"][0]
    missing = read(run("doctor", "/no/such/model", "--json"))["checked model"]
    assert missing["verdict"] == "refused" and "/no/such/model" in missing["reasons"][0]


def test_doctor_checks_a_dtype_and_says_which(folders: dict[str, Path]) -> None:
    """--dtype is honoured: the check runs in that precision."""
    checked = read(run("doctor", folders["target"], "--dtype", "bfloat16", "--json"))["checked model"]
    assert checked["dtype"] == "bfloat16" and checked["verdict"] == "trees and ragged batches"


def test_names_with_square_brackets_are_shown_as_they_are(folders: dict[str, Path], tmp_path: Path) -> None:
    """Names of folders and prompts are text, not markup, in tables too."""
    folder = tmp_path / "odd[bold][" / "i]"
    shutil.copytree(folders["target"], folder)
    assert str(folder) in run("doctor", folder).out.replace("\n", "").replace(" ", "")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat", "name": "[bold]a[/i]"}')
    options = ("--prompts", tmp_path / "prompts.jsonl", "-n", 4, "--seeds", 0)
    assert "[bold]a[/i]" in run("verify", folder, *options).out


def test_doctor_without_any_model_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no model is named and none is embedded, nothing is downloaded, and it is said what installs one."""
    monkeypatch.setattr(models, "embedded_model", lambda: None)
    facts = read(run("doctor", "--json"))
    assert "checked model" not in facts and "pip install" in facts["embedded model"]
    assert facts["converted models"] == []


# --------------------------------------------------------------------------------------------------
# Profile and tune


def test_profile_measures_draws_and_keeps_what_a_pass_costs(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTPACE_CACHE", str(tmp_path))
        options = ("profile", folders["target"], "--nodes", "1,4,9", "--rows", "1,2", "--repeats", "2")
        report = read(run(*options, "--json"))
        assert [(row["rows"], row["nodes"]) for row in report["passes"]] == [(b, n) for b in (1, 2) for n in (1, 4, 9)]
        assert all(row["seconds"] > 0 and row["memory"] > 0 and row["compute"] > 0 for row in report["passes"])
        assert report["floors"]["bytes"] > 0 and report["facts"]["threads"] == str(torch.get_num_threads())
        found = run(*options)
        assert found.code == 0 and found.out.count("█") > 6 and "memory ms" in found.out
        (file,) = (tmp_path / "costs").glob("*.json")
        assert len(json.loads(file.read_text())["cells"]) == 6
    assert_refused(run("profile", folders["target"], "--nodes", "1,x"), "--nodes", "'1,x'")


def test_tune_ranks_the_drafters_and_its_profile_is_loaded(folders: dict[str, Path], tmp_path: Path) -> None:
    """Every drafter of the model is tried on the user's prompts; what it wrote, generate takes."""
    prompts, file = tmp_path / "prompts.txt", tmp_path / "folder" / "profile.json"
    prompts.write_text("the cat sat on the mat the cat sat\none two three one two three\n", encoding="utf-8")
    options = ("--prompts", prompts, "--draft-model", folders["noisy"], "-n", "16", "--out", file)
    report = read(run("tune", folders["target"], *options, "--json"))
    names = {trial["name"] for trial in report["trials"]}
    assert {"suffix", "recycle", "suffix+recycle", "lookahead", "self", "early-exit", "model"} <= names
    assert all(trial["is_identical"] and (trial["speed"] > 0 or trial["refusal"]) for trial in report["trials"])
    speeds = [trial["speed"] for trial in report["trials"]]
    assert speeds == sorted(speeds, reverse=True)
    is_worth_it = speeds[0] >= 1.03
    assert report["best"] == (report["trials"][0]["name"] if is_worth_it else "none")
    settings = json.loads(file.read_text())["settings"]
    assert settings["drafter"] == report["best"]
    result = read(run("generate", PROMPT, "-m", folders["target"], "--profile", file, "-n", 8, "--json"))["outpace"]
    assert result["stats"]["drafter"] == report["best"]
    found = run("tune", folders["target"], *options)
    assert found.code == 0 and "tokens per pass" in found.out and str(file) in found.talk
    assert_refused(run("generate", PROMPT, "--profile", file, "--drafter", "suffix"), "profile names a drafter")
    file.write_text("{}", encoding="utf-8")
    assert_refused(run("generate", PROMPT, "--profile", file), "cannot be read", "outpace tune")


def test_tune_says_when_nothing_pays(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MARGIN", 1e9)
    found = run("tune", folders["target"], "-n", "8", "--limit", "1", "--out", tmp_path / "p.json")
    assert found.code == 0 and "Do not speculate" in found.talk
    assert json.loads((tmp_path / "p.json").read_text())["settings"] == {"drafter": "none"}


# --------------------------------------------------------------------------------------------------
# Help


def _commands() -> dict[str, Any]:
    """Every page: the command, by the arguments in front of --help."""
    group: Any = typer.main.get_command(app)
    return {"": group, **group.commands}


@pytest.mark.parametrize("name", ["", "generate", "verify", "doctor"])
def test_the_help_page_is_the_one_that_was_agreed_on(name: str) -> None:
    """100 columns, no colour, exit status 0. The page is laid out by typer, so it is compared for that version only."""
    found = run(*([name] if name else []), "--help")
    assert found.code == 0 and found.err == ""
    versions = {package: importlib.metadata.version(package) for package in ("typer", "rich")}
    layout = ", ".join(f"{package} {version.rpartition('.')[0]}" for package, version in versions.items())
    lines = [line.rstrip() for line in _COLOUR.sub("", found.out).strip("\n").splitlines()]
    page = f"# laid out by {layout}\n" + "\n".join(lines) + "\n"
    file = GOLDEN / f"help{'-' if name else ''}{name}.txt"
    if os.environ.get("OUTPACE_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(page, encoding="utf-8")
    expected = file.read_text(encoding="utf-8")
    if expected.splitlines()[0] != page.splitlines()[0]:
        pytest.skip(f"{file.name} was laid out by other versions than {layout}")
    assert page == expected


def test_the_help_pages_have_every_option_and_every_command() -> None:
    """Whatever lays the page out: all commands and options are on it, and every option has every word of its help."""
    commands = _commands()
    assert sorted(commands) == ["", "bench", "doctor", "evaluate", "generate", "profile", "train", "tune", "verify"]
    for name, command in commands.items():
        words = set(_words(run(*([name] if name else []), "--help").out).split())
        assert set(command.help.split()) <= words
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert {*parameter.opts, *parameter.secondary_opts} <= words, (name, parameter.name)
            assert parameter.help, (name, parameter.name)
            assert set(parameter.help.split()) <= words, (name, parameter.name)
    assert set(commands) - {""} <= set(_words(run("--help").out).split())
    assert run().code == 2, "no arguments at all: the help page, and the status of a mistake"


def test_every_command_has_json() -> None:
    """What a person reads, a program can read."""
    for name, command in _commands().items():
        assert not name or "--json" in {option for parameter in command.params for option in parameter.opts}


def test_defaults_are_those_of_the_library() -> None:
    """The command line repeats no default: what `SamplingParams` and `load` say holds for both."""
    callbacks = [command.callback for command in app.registered_commands if command.callback]
    parameters = {callback.__name__: inspect.signature(callback).parameters for callback in callbacks}
    generate = parameters["generate"]
    load = inspect.signature(outpace.load).parameters
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_new_tokens")
    assert {name: generate[name].default for name in names} == {name: fields[name] for name in names}
    for command in parameters.values():
        for name in ("drafter", "draft_model", "k", "width", "acceptance", "dtype", "device", "profile"):
            if name in command:
                assert command[name].default == load[name].default, name
