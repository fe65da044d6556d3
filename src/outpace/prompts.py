"""Prompts from files, and a few of our own. Knows nothing about models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InputError


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """prompt: text or chat messages. category: a label for tables, "" when the file has none."""

    name: str
    category: str
    prompt: str | list[dict[str, str]]


def _chat(name: str, category: str, question: str) -> NamedPrompt:
    return NamedPrompt(name, category, [{"role": "user", "content": question}])


BUILT_IN = (
    _chat(
        "rewrite",
        "edit",
        "Fix the spelling and repeat the text: 'The quik brown fox jumps ovr the lazy dog. The lazy dog does not mind "
        "the quik brown fox. They play in the gardn.'",
    ),
    _chat("code", "code", "Write a Python class Stack with push, pop, peek and is_empty, with a docstring on each."),
    _chat("explain", "chat", "Why does bread rise? Explain it to a child."),
    _chat("list", "data", "List the months of the year as JSON objects with the keys name and days."),
)

QUESTIONS = tuple(chat.prompt[-1]["content"] for chat in BUILT_IN if not isinstance(chat.prompt, str))


def read_prompts(path: str | Path) -> list[NamedPrompt]:
    """The prompts of a file: one per line of text, or JSON lines.

    A JSON line holds "prompt" (text), "messages" (a chat) or "turns" (Spec-Bench: the first turn is asked), and
    optionally "question_id" or "name", and "category".
    """
    file = Path(path).expanduser()
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # splitlines would cut at U+2028, which JSON may hold
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The prompts file {str(path)!r} cannot be read: {error}") from error
    is_json = file.suffix in (".jsonl", ".json")
    found = [
        _from_json(line, number, file.name) if is_json else NamedPrompt(str(number), "", line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise InputError(f"The prompts file {str(path)!r} holds no prompts. Give one per line.")
    return found


def _from_json(line: str, number: int, file: str) -> NamedPrompt:
    where = f"{file}, line {number}"
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON: {error}. Each line must be one JSON object.") from error
    if not isinstance(entry, dict):
        raise InputError(f"{where} is not a JSON object, got {line[:60]!r}.")
    name, category = str(entry.get("question_id", entry.get("name", number))), str(entry.get("category", ""))
    if isinstance(entry.get("prompt"), str) and entry["prompt"]:
        return NamedPrompt(name, category, entry["prompt"])
    if _is_chat(entry.get("messages")):
        return NamedPrompt(name, category, entry["messages"])
    if isinstance(entry.get("turns"), list) and entry["turns"]:
        return NamedPrompt(name, category, [{"role": "user", "content": str(entry["turns"][0])}])
    raise InputError(
        f"{where} has no prompt: it needs 'prompt' (a text), 'messages' (objects with role and content) or 'turns' (a "
        f"list), and none may be empty; its keys are {sorted(entry)}."
    )


def _is_chat(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(message, dict) and "role" in message for message in messages)
        and "content" in messages[-1]
    )
