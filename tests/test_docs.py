"""What README.md and docs/ show can be run: the Python as written, every command line, every link."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import outpace
from outpace import arguments
from outpace.cli import app
from outpace.testing.models import PROMPTS, tiny_model
from outpace.testing.tokenizers import tiny_tokenizer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.M | re.S)


def command_lines(page: Path) -> list[str]:
    """Lines that run outpace: in indented or fenced code, or as inline code with an argument."""
    text = read(page).replace("\\\n", " ")
    fenced = "\n".join(re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```$", text, re.M | re.S))
    found = re.findall(r"^(?: {4,}|\t)(?:\$ )?(outpace [\"'a-z-].*)$", text, re.M)
    found += re.findall(r"^ *(?:\$ )?(outpace [\"'a-z-].*)$", fenced, re.M)
    return found + re.findall(r"`(outpace [^`\n]+)`", text)


def arguments_of(line: str) -> list[str]:
    """The words after `outpace`, without comments and what the shell does with the files."""
    words = shlex.split(line, comments=True)
    redirects = [index for index, word in enumerate(words) if word in ("<", ">", "|", "2>", ">>", "&&")]
    return words[1 : min(redirects, default=len(words))]


def parse(arguments: list[str]) -> dict[str, Any]:
    """The values that the command line would get; raises what it would show. Nothing runs."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    name, rest = arguments[0], arguments[1:]
    if name not in commands and not name.startswith("-"):
        name, rest = "generate", arguments
    values: dict[str, Any] = commands[name].make_context(name, list(rest)).params
    return values


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", read(page))


# --------------------------------------------------------------------------------------------------
# Python


def test_the_python_of_the_readme_runs_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tiny model in place of the default one: text and tokens per pass, a streamed chat, a batch of two."""
    engine = outpace.load(tiny_model("llama"), tokenizer=tiny_tokenizer())
    monkeypatch.setattr(outpace, "load", lambda: engine)
    code, drop_in = blocks(ROOT / "README.md", "python")
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    result, results = names["result"], names["results"]
    params = outpace.SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_new_tokens=32)
    streamed = engine.generate(names["chat"], params)
    assert capsys.readouterr().out == f"{result.text} {result.stats.tokens_per_pass}\n{streamed.text}"
    assert len(result.tokens) == 16 and len(streamed.tokens) == 32 and result.stats.tokens_per_pass >= 1
    assert [len(each.tokens) for each in results] == [8, 8]
    names |= what_a_user_has()
    exec(compile(drop_in, "README.md", "exec"), names)
    assert names["output"].shape == (1, names["inputs"]["input_ids"].shape[1] + 64)


def what_a_user_has() -> dict[str, Any]:
    """The names that code of the docs takes for granted: a model, its tokenizer, tokenized inputs."""
    tokenizer = tiny_tokenizer()
    return {
        "model": tiny_model("llama", vocab=len(tokenizer)),
        "tokenizer": tokenizer,
        "inputs": tokenizer("The capital of France is", return_tensors="pt", return_token_type_ids=False),
    }


def test_the_python_of_the_drop_in_page_runs_as_it_is_written() -> None:
    """Both entries give the text of `model.generate`; the pipeline gives a text."""
    names = what_a_user_has()
    first, second = blocks(ROOT / "docs" / "dropin.md", "python")
    exec(compile(first, "dropin.md", "exec"), names)
    assert torch.equal(names["out"], names["model"].generate(**names["inputs"], max_new_tokens=64))
    exec(compile(second.replace("pipe(", "output = pipe(", 1), "dropin.md", "exec"), names)
    assert names["fast"].last_stats[0].num_new_tokens == 16


def test_the_drafter_of_the_docs_runs_as_it_is_written() -> None:
    """docs/write-a-drafter.md: the class, both ways to use it, and the contract; it finds something, too."""
    names: dict[str, Any] = {"outpace": outpace, "model": tiny_model("llama")}
    code = "\n".join(blocks(ROOT / "docs" / "write-a-drafter.md", "python"))
    exec(compile(code, "write-a-drafter.md", "exec"), names)
    assert len(blocks(ROOT / "docs" / "write-a-drafter.md", "python")[0].splitlines()) <= 45
    engine = outpace.load(names["model"], drafter=names["BigramDrafter"](), k=4)
    result = engine.generate(list(PROMPTS[1]), outpace.SamplingParams(max_new_tokens=40))
    assert result.stats.num_drafted_tokens >= 20


def test_the_table_of_arguments_is_the_one_that_is_enforced() -> None:
    """docs/dropin.md holds what `python -m outpace.arguments` prints."""
    assert arguments.as_markdown() in read(ROOT / "docs" / "dropin.md")


def test_inline_calls_of_load_have_arguments_that_load_takes() -> None:
    """Every `outpace.load(...)` and `keyword="value"` in running text names a parameter that there is."""
    parameters = inspect.signature(outpace.load).parameters
    num_calls = 0
    for page in PAGES:
        for code in re.findall(r"`(outpace\.load\([^`]*\))`", read(page)):
            call = ast.parse(code, mode="eval").body
            assert isinstance(call, ast.Call)
            assert {keyword.arg for keyword in call.keywords} <= set(parameters), code
            num_calls += 1
        for name in re.findall(r'`(\w+)="\w+"`', read(page)):
            assert name in parameters, name
        for name in re.findall(r"`(?:\w+\.)?stats\.(\w+)`", read(page)):
            assert hasattr(outpace.Stats, name), name
    assert num_calls > 0


# --------------------------------------------------------------------------------------------------
# Command lines


def test_every_command_line_can_be_parsed() -> None:
    """Each `outpace …` in README.md and docs/: the command exists, and its options and their values are accepted."""
    lines = {page.name: command_lines(page) for page in PAGES}
    assert len(lines["README.md"]) >= 4
    for page, found in lines.items():
        for line in found:
            try:
                parse(arguments_of(line))
            except Exception as error:
                pytest.fail(f"{page}: {line}\n{error}")


def test_a_wrong_command_line_would_be_found() -> None:
    """The check above is not blind: an option that there is not, and a value of another kind."""
    assert parse(arguments_of('outpace generate "a b" --temperature 0.8 --seed 7 # comment'))["temperature"] == 0.8
    assert parse(arguments_of("outpace generate - --model x < task.txt"))["model"] == "x"
    for wrong in ("outpace generate x --nonsense", "outpace verify --k many", "outpace doctor a b"):
        with pytest.raises(Exception, match="(?i)no such option|invalid value|unexpected extra|valid integer"):
            parse(arguments_of(wrong))


def test_options_that_are_mentioned_exist() -> None:
    """`--compare` and the like, in running text: some command has it."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {
        option
        for command in commands.values()
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    for page in PAGES:
        for option in re.findall(r"`(--[\w-]+)", read(page)):
            assert option in options, f"{page.name}: {option}"


def test_make_targets_that_are_mentioned_exist() -> None:
    """`make demo`, `make test` and others, in README.md and at the top of the Makefile itself."""
    makefile = read(ROOT / "Makefile")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.M))
    mentioned = [*re.findall(r"(?:^ +|`)make ([a-z][\w-]*)", "\n".join(map(read, PAGES)), re.M)]
    mentioned += re.findall(r"^# make ([a-z][\w-]*)", makefile, re.M)
    assert {"demo", "test"} <= set(mentioned) <= targets
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.M)
    assert phony and set(phony.group(1).split()) == targets


def test_the_command_of_the_demo_can_be_parsed() -> None:
    """What `make demo` runs is a command line of today."""
    (line,) = re.findall(r"\.venv/bin/(outpace .*)$", read(ROOT / "Makefile"), re.M)
    assert parse(arguments_of(line))["compare"] is True


# --------------------------------------------------------------------------------------------------
# Links


@pytest.mark.parametrize(
    ("page", "target"),
    [pytest.param(page, target, id=f"{page.name} {target}") for page in PAGES for target in links(page)],
)
def test_a_link_leads_to_a_file_and_a_heading_that_exist(page: Path, target: str) -> None:
    """Links within the repository; those to the web are only looked at for their form."""
    if re.match(r"[a-z]+:", target):
        assert target.startswith("https://")
        return
    name, _, heading = target.partition("#")
    file = (page.parent / name) if name else page
    assert file.exists()
    if heading:
        titles = re.findall(r"^#+ (.*)$", read(file), re.M)
        assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_files_that_are_mentioned_exist() -> None:
    """`tests/test_exactness.py`, `engine.py` and other names of files in running text."""
    for page in PAGES:
        for name in re.findall(r"`([\w/-]+\.(?:py|md|toml|txt))`", read(page)):
            if "/" in name:
                assert (ROOT / name).exists(), f"{page.name}: {name}"
            elif name.endswith(".py"):
                assert list((ROOT / "src").rglob(name)), f"{page.name}: {name}"


def test_every_page_of_the_docs_is_linked_from_the_readme() -> None:
    """A page that nobody can find is not documentation."""
    linked = set(links(ROOT / "README.md"))
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= linked
