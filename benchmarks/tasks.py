"""The prompts of benchmarks, by Spec-Bench's tasks: the categories of MT-bench are one of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from outpace.prompts import NamedPrompt, read_prompts

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def chosen(
    paths: Sequence[str], count: int, first: int = 0, categories: Collection[str] | None = None
) -> list[NamedPrompt]:
    """`count` prompts of each task from the `first` on, task by task; of all tasks, or of some categories."""
    by_task: dict[str, list[NamedPrompt]] = defaultdict(list)
    for prompt in [prompt for path in paths for prompt in read_prompts(path)]:
        task = "multi-turn chat" if prompt.category in MT_BENCH else prompt.category
        if not categories or task in categories:
            by_task[task].append(replace(prompt, category=task))
    return [prompt for prompts in by_task.values() for prompt in prompts[first : first + count]]
