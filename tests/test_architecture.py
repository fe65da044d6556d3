"""The shape of the package: what docs/architecture.md promises about imports, who calls the model, and public names.

Everything is read from the source with `ast`; one test starts a fresh Python to see what `import outpace` brings along.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import outpace

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "outpace"
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 350
NOT_WITH_OUTPACE = ("outpace.cli", "outpace.audit", "outpace.testing", "gguf")


def module_name(file: Path) -> str:
    """src/outpace/cli/verify.py -> "cli.verify"; a package's own file is the package, the top one ""."""
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def imported_modules(file: Path) -> set[str]:
    """The package's own modules that a file imports, anywhere in it, as `module_name` gives them."""
    modules = {module_name(other) for other in FILES}
    package = ["outpace", *file.relative_to(SOURCE).parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(parsed(file)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            # `from . import masks` names modules, `from .tree import TokenTree` a module's content.
            names = [".".join([*base, alias.name]) for alias in node.names]
            names = [name if name.partition(".")[2] in modules else ".".join(base) for name in names]
        found |= {name.partition(".")[2] for name in names if name.partition(".")[0] == "outpace"}
    return found & modules


def table_order() -> list[str]:
    """The modules of the table in docs/architecture.md, from the top row to the bottom one."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("## Modules")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name.rstrip("/") for cell in cells for name in re.findall(r"`([\w/]+)`", cell)]


def row_of(module: str) -> int:
    """The place of a module in the table: that of its folder, if it is in one."""
    return table_order().index(module.partition(".")[0])


def test_the_table_of_modules_has_every_module_once() -> None:
    """docs/architecture.md lists each file and folder; the test doubles stand beside the package, not in it."""
    names = {module_name(file).partition(".")[0] for file in FILES} - {"", "testing"}
    order = table_order()
    assert sorted(order) == sorted(names)


@pytest.mark.parametrize("file", [f for f in FILES if module_name(f) not in ("", "testing")], ids=module_name)
def test_imports_point_downwards_in_the_table_only(file: Path) -> None:
    """A module imports what stands above it. Nothing imports the test doubles, which may import anything."""
    name = module_name(file)
    if name.startswith("testing."):
        return
    for other in imported_modules(file) - {name, ""}:
        assert not other.startswith("testing"), f"{name} imports the test double {other}"
        is_in_one_folder = "." in name and other.partition(".")[0] == name.partition(".")[0]
        is_of_the_folder = "." not in name and other.startswith(f"{name}.")
        if not (is_in_one_folder or is_of_the_folder):
            assert row_of(other) < row_of(name), f"{name} imports {other}, which stands below it in the table"


def test_the_imports_that_are_checked_are_the_real_ones() -> None:
    """The reading above sees every form of import that the package uses."""
    assert imported_modules(SOURCE / "accept.py") == {"noise", "sampling", "session", "tree", "verify"}
    assert {"drafters.base", "drafters.suffix", "models"} <= imported_modules(SOURCE / "choosing.py")
    assert imported_modules(SOURCE / "text.py") == {"errors"}, "absolute imports count, too"
    assert {"audit", "session", "engine", "cli.options"} <= imported_modules(SOURCE / "cli" / "generate.py")


def test_modules_within_a_folder_do_not_import_each_other_in_a_circle() -> None:
    """Without the folders' own files, imports have an order: every module can be loaded first."""
    waiting = {module_name(f): imported_modules(f) - {module_name(f)} for f in FILES if f.name != "__init__.py"}
    while waiting:
        free = {name for name, needed in waiting.items() if not needed & waiting.keys()}
        assert free, f"a circle among {sorted(waiting)}"
        waiting = {name: needed for name, needed in waiting.items() if name not in free}


def test_importing_outpace_imports_neither_the_command_line_nor_the_audit() -> None:
    """In a fresh Python: no cli, audit or test doubles, and no optional package."""
    code = f"import json, sys, outpace; print(json.dumps([m for m in {NOT_WITH_OUTPACE!r} if m in sys.modules]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == [] and found.stderr == ""


# --------------------------------------------------------------------------------------------------
# Who may do what


def calls_of_a_model(file: Path) -> list[int]:
    """Lines on which something named model, draft or loaded is called, or its forward or generate."""
    lines = []
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr in ("forward", "generate", "__call__"):
                called = called.value
            name = getattr(called, "attr", getattr(called, "id", ""))
            if name in ("model", "draft_model", "target_model", "loaded", "_model"):
                lines.append(node.lineno)
    return lines


def test_only_target_calls_the_model() -> None:
    """One file knows keyword names, masks and positions, and calls the model in one place."""
    found = {module_name(f): calls_of_a_model(f) for f in FILES if not module_name(f).startswith("testing")}
    # The drop-in asks the model's own `generate` to prepare a call; transformers then calls back and never forwards.
    # A benchmark compares with that `generate`.
    assert {name for name, lines in found.items() if lines} == {"target", "dropin", "bench.peers.transformers"}
    assert len(found["dropin"]) == 1
    assert len(found["target"]) == 1
    for word in ("logits_to_keep", "past_key_values", "position_ids"):
        users = {module_name(f) for f in FILES if f'"{word}"' in f.read_text(encoding="utf-8")}
        assert users <= {"target", "arguments", "dropin", "group", "testing.models"}, word


def test_only_cache_knows_the_cache_classes_of_transformers() -> None:
    """A change in them is met in one file."""
    for file in FILES:
        for node in ast.walk(parsed(file)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                if name.startswith("transformers") and "cache" in name.lower():
                    assert module_name(file) in ("cache", "ragged"), f"{file.name} imports {name}"


def test_only_sampling_knows_temperature_and_cuts() -> None:
    """Besides it, only what checks, explains or compares choices reads these settings."""
    allowed = {"sampling", "audit", "cli.generate", "cli.verify", "cli.bench"}
    for file in FILES:
        read = {n.attr for n in ast.walk(parsed(file)) if isinstance(n, ast.Attribute)}
        if read & {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}:
            assert module_name(file) in allowed or module_name(file).startswith("bench."), file.name


# --------------------------------------------------------------------------------------------------
# Public names, size, words


def test_the_public_names_are_those_of_all() -> None:
    """`outpace.__all__` is sorted, complete, and has nothing that is not there; what it names is documented."""
    exposed = {
        name for name, value in vars(outpace).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert sorted(exposed) == outpace.__all__ == sorted(outpace.__all__)
    for name in outpace.__all__:
        assert inspect.getdoc(getattr(outpace, name)), name
    assert callable(outpace.load), "the function, which no module of that name may hide"


def test_every_error_is_an_outpace_error_and_drawn_in_the_tree() -> None:
    """One `except outpace.OutpaceError` catches what outpace raises on purpose; errors.py opens with all of them."""
    tree = ast.get_docstring(parsed(SOURCE / "errors.py")) or ""
    names = [name for name in outpace.__all__ if name.endswith("Error")]
    defined = [node.name for node in parsed(SOURCE / "errors.py").body if isinstance(node, ast.ClassDef)]
    assert sorted(defined) == sorted(names)
    for name in names:
        assert issubclass(getattr(outpace, name), outpace.OutpaceError) and name in tree
    assert issubclass(outpace.InputError, ValueError)


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_a_module_is_short_and_says_what_it_is_for(file: Path) -> None:
    """At most 350 lines; a docstring for the module and for every public function and class of it."""
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES, "one file, one idea: split it"
    if not text:
        return
    tree = parsed(file)
    assert ast.get_docstring(tree), "the module's own docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name}, line {node.lineno}"


def test_the_architecture_fits_on_a_page() -> None:
    """If a change makes it longer than a page, the change is wrong."""
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 75


def test_no_file_speaks_of_how_it_was_made() -> None:
    """No paths of one machine, no numbers of tickets, no notes to oneself: a reader has none of these."""
    patterns = {
        "a path of one machine": r"(?<![\w.])/(work|home|root|tmp|Users)/",
        "the number of a ticket": r"\b[Ii]ssues? ?(#|no\.? ?)?\d",
        "a working session": r"\b([Ss]ession|[Tt]ask|[Ss]tep) ?#?\d+\b",
        "a note to oneself": r"\b(TODO|FIXME|XXX|HACK)\b",
    }
    files = [*FILES, ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml", *(ROOT / "docs").rglob("*.md")]
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for what, pattern in patterns.items():
                assert not re.search(pattern, line), f"{file.relative_to(ROOT)}, line {number} holds {what}: {line}"
