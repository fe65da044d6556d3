"""The prompts of a benchmark, by name or from a file."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import InputError
from ..prompts import NamedPrompt, read_prompts

SUITES = {
    "code": "ten tasks of writing, mending and explaining code",
    "edits": "six changes of one method in a file of 146 lines, which is returned whole (wants 1600 new tokens)",
    "spec-bench": "Spec-Bench's questions, from the file that OUTPACE_SPEC_BENCH names",
}
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
CHAT = "multi-turn chat"  # Spec-Bench's name for the categories of MT-bench
_FOLDER = Path(__file__).parent / "prompts"
_EDIT = (
    "In the file below, {}. Return the whole file and nothing else, with everything else unchanged.\n\n```python\n{}```"
)


def read_suite(name: str) -> list[NamedPrompt]:
    """The prompts of a suite or of a file (see `read_prompts`). Raises InputError for neither."""
    if name == "code":
        return read_prompts(_FOLDER / "code.jsonl")
    if name == "edits":
        return [edit_prompt(entry["name"], entry["task"]) for entry in _entries("edits.jsonl")]
    if name == "spec-bench":
        path = os.environ.get("OUTPACE_SPEC_BENCH")
        if not path:
            raise InputError(
                "suite 'spec-bench' reads the file that the environment variable OUTPACE_SPEC_BENCH names, and it is "
                "not set. Set it to Spec-Bench's question.jsonl, or give that file's path as the suite."
            )
        return read_suite(path)
    if not Path(name).expanduser().is_file():
        raise InputError(f"suite must be {', '.join(SUITES)} or a file of prompts, got {name!r}.")
    found = read_prompts(name)
    if {"writing", "math_reasoning", "rag"} <= {prompt.category for prompt in found}:  # Spec-Bench
        return [replace(p, category=CHAT) if p.category in MT_BENCH else p for p in found]
    return found


def chosen(
    names: Sequence[str], count: int | None, first: int = 0, categories: Collection[str] | None = None
) -> list[NamedPrompt]:
    """`count` prompts of each category from the `first` on, category by category; of all, or of some categories."""
    by_category: dict[str, list[NamedPrompt]] = defaultdict(list)
    for prompt in [prompt for name in names for prompt in read_suite(name)]:
        if not categories or prompt.category in categories:
            by_category[prompt.category].append(prompt)
    end = None if count is None else first + count
    found = [prompt for prompts in by_category.values() for prompt in prompts[first:end]]
    if not found:
        raise InputError(f"The suites {', '.join(names)} hold no prompts of these categories.")
    return found


def edit_prompt(name: str, task: str) -> NamedPrompt:
    """One change of the shipped file."""
    content = _EDIT.format(task, edited_file())
    return NamedPrompt(name, "code edits", [{"role": "user", "content": content}])


def edited_file() -> str:
    """The text that the edits change."""
    return (_FOLDER / "inventory.txt").read_text(encoding="utf-8")


def _entries(name: str) -> list[dict[str, str]]:
    lines = (_FOLDER / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]
