"""Tokens per pass of drafters, by category: what each finds alone, and what their union finds.

    python benchmarks/drafters.py PROMPTS.jsonl [--model M] [--drafters suffix,recycle,suffix+recycle] [--nodes 16,32]
        [--temperature 0,0.8] [--stores cold,warm] [--lookahead 5,3,3] [--per-category 10] [--rows 8] [--tokens 128]
        [--json OUT]

No times: passes are counted, so the machine does not matter. Every text is compared with the one without drafts.
Prompts are decoded a few rows at a time, task by task; drafters keep what they learn from prompt to prompt. cold: they
start knowing nothing; warm: after as many other prompts of each task, decoded greedily.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from typing import Any

import outpace
from outpace import SamplingParams
from outpace.bench.suites import chosen
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
    parser.add_argument("--nodes", default="16")
    parser.add_argument("--temperature", default="0")
    parser.add_argument("--stores", default="cold")
    parser.add_argument("--lookahead")
    parser.add_argument("--per-category", type=int, default=10)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json")
    args = parser.parse_args()
    quiet_transformers()
    with progress_bar() as progress:
        plain = outpace.load(args.model, drafter="none", progress=progress)
    prompts = chosen([args.prompts], args.per_category)
    others = chosen([args.prompts], args.per_category, first=args.per_category)
    sizes = [int(size) for size in args.nodes.split(",")]
    settings = {
        temperature: SamplingParams(max_new_tokens=args.tokens, temperature=float(temperature), seed=0)
        for temperature in args.temperature.split(",")
    }
    greedy = SamplingParams(max_new_tokens=args.tokens)
    wanted = {temperature: generate(plain, prompts, params, args.rows) for temperature, params in settings.items()}
    rows: list[dict[str, Any]] = []
    for store, name in itertools.product(args.stores.split(","), args.drafters.split(",")):
        options: dict[str, Any] = {"memory": 200_000} if store == "warm" and "suffix" in name else {}
        if name == "lookahead" and args.lookahead:
            options["lookahead"] = tuple(map(int, args.lookahead.split(",")))

        def load(nodes: int, drafter: Any, options: dict[str, Any] = options) -> outpace.Engine:
            model, tokenizer = plain.target.original, plain.tokenizer
            return outpace.load(model, tokenizer=tokenizer, drafter=drafter, k=nodes, planner="off", **options)

        taught = None
        if store == "warm":
            teacher = load(16, name)
            generate(teacher, others, greedy, args.rows)
            taught = teacher.drafter
        for nodes, temperature in itertools.product(sizes, settings):
            engine = load(nodes, name) if taught is None else load(nodes, copy.deepcopy(taught), {})
            results = generate(engine, prompts, settings[temperature], args.rows)
            label = {"drafter": name, "nodes": nodes, "temperature": temperature, "store": store}
            mine = [
                {
                    **label,
                    "category": prompt.category,
                    "same": result.tokens == base.tokens,
                    "tokens": result.stats.num_new_tokens,
                    "passes": result.stats.num_verifications,
                    "drafted": result.stats.num_drafted_tokens,
                    "accepted": result.stats.num_accepted_tokens,
                }
                for prompt, base, result in zip(prompts, wanted[temperature], results, strict=True)
            ]
            _print(label, mine, is_first=not rows)
            rows += mine
            if args.json:
                with open(args.json, "w", encoding="utf-8") as file:
                    json.dump(rows, file, indent=1)


def _print(label: dict[str, Any], rows: list[dict[str, Any]], is_first: bool) -> None:
    categories = sorted({row["category"] for row in rows})
    if is_first:
        heads = [*label, "identical", *categories, "all"]
        print("| " + " | ".join(heads) + " |\n" + "| --- " * len(heads) + "|")
    cells = [*map(str, label.values()), f"{sum(row['same'] for row in rows)}/{len(rows)}"]
    for category in [*categories, None]:
        group = [row for row in rows if category in (None, row["category"])]
        cells.append(f"{sum(row['tokens'] for row in group) / sum(row['passes'] for row in group):.2f}")
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
