"""Tokens per pass of drafters, by category: what each finds alone, and what their union finds.

    python benchmarks/drafters.py PROMPTS.jsonl [--model M] [--drafters suffix,recycle,suffix+recycle] [--nodes 16]
        [--lookahead 5,3,3] [--per-category 10] [--rows 8] [--tokens 128] [--temperature 0] [--warm] [--json OUT]

No times: passes are counted, so the machine does not matter. Every text is compared with the one without drafts.
Prompts are decoded a few rows at a time, task by task; drafters keep what they learn from prompt to prompt. --warm goes
through as many other prompts of each task before it counts.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from tasks import chosen

import outpace
from outpace import SamplingParams
from outpace.cli.options import quiet_transformers
from outpace.models import progress_bar
from outpace.prompts import NamedPrompt


def generate(engine: outpace.Engine, prompts: list[NamedPrompt], params: SamplingParams, rows: int) -> list[Any]:
    """The results, in order, `rows` prompts at a time."""
    results: list[Any] = []
    for start in range(0, len(prompts), rows):
        results += engine.generate([prompt.prompt for prompt in prompts[start : start + rows]], params)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("--model")
    parser.add_argument("--drafters", default="suffix,recycle,suffix+recycle")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--per-category", type=int, default=10)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--lookahead")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    quiet_transformers()
    with progress_bar() as progress:
        plain = outpace.load(args.model, drafter="none", progress=progress)
    model, tokenizer = plain.target.original, plain.tokenizer
    prompts = chosen([args.prompts], args.per_category)
    others = chosen([args.prompts], args.per_category, first=args.per_category)
    params = SamplingParams(max_new_tokens=args.tokens, temperature=args.temperature, seed=0)
    wanted = generate(plain, prompts, params, args.rows)
    rows: list[dict[str, Any]] = []
    for name in args.drafters.split(","):
        options: dict[str, Any] = {"memory": 200_000} if args.warm and "suffix" in name else {}
        if "lookahead" in name and args.lookahead:
            options["lookahead"] = tuple(map(int, args.lookahead.split(",")))
        engine = outpace.load(model, tokenizer=tokenizer, drafter=name, k=args.nodes, planner="off", **options)
        if args.warm:
            generate(engine, others, params, args.rows)
        for prompt, base, result in zip(prompts, wanted, generate(engine, prompts, params, args.rows), strict=True):
            stats = result.stats
            rows.append(
                {
                    "drafter": name,
                    "category": prompt.category,
                    "same": result.tokens == base.tokens,
                    "tokens": stats.num_new_tokens,
                    "passes": stats.num_verifications,
                    "drafted": stats.num_drafted_tokens,
                    "accepted": stats.num_accepted_tokens,
                }
            )
        _print(rows, name)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


def _print(rows: list[dict[str, Any]], name: str) -> None:
    mine = [row for row in rows if row["drafter"] == name]
    categories = sorted({row["category"] for row in mine})
    cells = []
    for category in [*categories, None]:
        group = [row for row in mine if category in (None, row["category"])]
        cells.append(f"{sum(r['tokens'] for r in group) / sum(r['passes'] for r in group):.2f}")
    if name == rows[0]["drafter"]:
        print("| drafter | identical | " + " | ".join([*categories, "all"]) + " |")
        print("| --- " * (len(categories) + 3) + "|")
    print(f"| {name} | {sum(row['same'] for row in mine)}/{len(mine)} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
