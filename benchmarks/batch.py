"""A ragged batch through `generate`: tokens per second against transformers' batch, and against one row at a time.

    python benchmarks/batch.py PROMPTS.jsonl [--model M] [--batch 8] [--tokens 64] [--k 8] [--repeats 3] [--json OUT]

Prompts of all categories take turns, so their lengths differ. The methods take turns, every method once per repeat
after a warm-up; times are medians of the whole calls, prompts included. Every row is compared with its solo run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import outpace
from outpace.cli.options import quiet_transformers
from outpace.models import progress_bar
from outpace.prompts import read_prompts


def mixed(path: str, count: int) -> list[Any]:
    """Prompts of every category in turn."""
    by_category: dict[str, list[Any]] = {}
    for prompt in read_prompts(path):
        by_category.setdefault(prompt.category, []).append(prompt)
    turns = itertools.zip_longest(*by_category.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("--model")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--longest", type=int, default=512, help="longest prompt, in tokens; longer ones lose their front"
    )
    parser.add_argument("--json")
    args = parser.parse_args()
    quiet_transformers()
    with progress_bar() as progress:
        engine = outpace.load(args.model, planner="off", progress=progress)
    model: Any = engine.target.original
    rows = [engine.encode(prompt.prompt)[-args.longest :] for prompt in mixed(args.prompts, args.batch)]
    longest = max(map(len, rows))
    pad = engine.end_ids[0]
    inputs = {
        "input_ids": torch.tensor([[pad] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }
    settings = {"max_new_tokens": args.tokens, "do_sample": False}
    fast = outpace.accelerate(model, tokenizer=engine.tokenizer, drafter="suffix", k=args.k, planner="off")
    plain = outpace.accelerate(model, tokenizer=engine.tokenizer, drafter="none")

    def solo(accelerated: Any) -> list[list[int]]:
        return [accelerated.generate(torch.tensor([row]), **settings)[0, len(row) :].tolist() for row in rows]

    def batch(generate: Callable[..., Any]) -> list[list[int]]:
        found: list[list[int]] = generate(**inputs, **settings)[:, longest:].tolist()
        return found

    methods: dict[str, Callable[[], list[list[int]]]] = {
        "transformers, batch": lambda: batch(model.generate),
        "outpace plain, batch": lambda: batch(plain.generate),
        f"outpace suffix k={args.k}, batch": lambda: batch(fast.generate),
        "outpace plain, one by one": lambda: solo(plain),
        f"outpace suffix k={args.k}, one by one": lambda: solo(fast),
    }
    texts = {name: run() for name, run in methods.items()}  # the warm-up
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(args.repeats):
        for name, run in methods.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    wanted = [list(row) for row in texts["outpace plain, one by one"]]
    num_tokens = sum(map(len, wanted))
    lengths = [len(row) for row in rows]
    print(f"{args.batch} rows, prompts of {min(lengths)} to {max(lengths)} tokens, {num_tokens} new tokens\n")
    print("| method | rows as alone | tokens/s | vs transformers, batch | vs outpace suffix, one by one |")
    print("| --- | --- | --- | --- | --- |")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    first, last = list(methods)[0], list(methods)[-1]
    table = []
    for name, median in medians.items():
        same = sum(given[: len(row)] == row for given, row in zip(texts[name], wanted, strict=True))
        ratios = [medians[first] / median, medians[last] / median]
        table.append({"method": name, "same": same, "seconds": seconds[name], "tokens": num_tokens})
        print(f"| {name} | {same}/{len(rows)} | {num_tokens / median:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
