"""Where speculation stops paying: the speed of drafted batches against plain ones, by the number of rows.

    python benchmarks/sweep.py PROMPTS.jsonl [--model M] [--rows 1,2,4,8,16,32] [--tokens 48] [--repeats 3]
        [--drafter auto] [--temperature 0] [--json OUT]

Both kinds decode the same rows in turns, prompts of all categories mixed, other ones in each repeat; whole calls,
medians. "off" is the share of passes in which the planner asked for no drafts; rows are compared with plain decoding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import outpace
from outpace import SamplingParams
from outpace.cli.options import quiet_transformers
from outpace.models import progress_bar
from outpace.prompts import read_prompts


def timed(engine: outpace.Engine, prompts: list[Any], params: list[SamplingParams]) -> tuple[list[Any], float]:
    begin = time.perf_counter()
    return engine.generate(prompts, params), time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("--model")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--rows", default="1,2,4,8,16,32")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = [int(part) for part in args.rows.split(",")]
    quiet_transformers()
    with progress_bar() as progress:
        plain = outpace.load(args.model, drafter="none", progress=progress)
    prompts = read_prompts(args.prompts)
    spread = [prompts[(index * 37) % len(prompts)].prompt for index in range(max(sizes) * args.repeats)]
    short = [ids for ids in map(plain.encode, spread) if len(ids) <= 256]
    rows: list[dict[str, Any]] = []
    print("| rows | tokens/s, plain | tokens/s | ratio | tokens per pass | drafted per pass | off | identical |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for count in sizes:
        engine = outpace.load(plain.target.original, tokenizer=plain.tokenizer, drafter=args.drafter)
        times: dict[str, list[float]] = {"plain": [], "drafted": []}
        for repeat in range(args.repeats):
            batch = [short[(repeat * count + index) % len(short)] for index in range(count)]
            base = SamplingParams(max_new_tokens=args.tokens, temperature=args.temperature, ignore_eos=True)
            params = [replace(base, seed=repeat * count + row) for row in range(count)]
            wanted, seconds = timed(plain, batch, params)
            times["plain"].append(seconds)
            found, seconds = timed(engine, batch, params)
            times["drafted"].append(seconds)
        stats = [result.stats for result in found]
        passes = sum(s.num_verifications for s in stats)
        before, after = (statistics.median(times[name]) for name in ("plain", "drafted"))
        same = sum(a.tokens == b.tokens for a, b in zip(found, wanted, strict=True))
        total = count * args.tokens
        row = {
            "rows": count,
            "plain": total / before,
            "drafted": total / after,
            "ratio": before / after,
            "per_pass": total / passes,
            "nodes": sum(s.num_drafted_tokens for s in stats) / passes,
            "off": sum(s.num_rounds_switched_off for s in stats) / passes,
            "same": same,
        }
        rows.append(row)
        print(
            f"| {count} | {row['plain']:.1f} | {row['drafted']:.1f} | {row['ratio']:.2f} | {row['per_pass']:.2f} "
            f"| {row['nodes']:.1f} | {100 * row['off']:.0f} % | {same}/{count} |",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
