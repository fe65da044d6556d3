"""Drafts that cannot pay, with the planner: what they cost against plain decoding, prompt by prompt in turns.

    python benchmarks/hopeless.py PROMPTS.jsonl [--model M] [--per-category 4] [--tokens 128]

A drafter as large as the target (a copy of it, in its own precision), one that guesses at random, and creative text at
temperature 1.5 with the drafter that is the default. Batches are in sweep.py.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import outpace
from outpace import SamplingParams
from outpace.cli.options import quiet_transformers
from outpace.prompts import read_prompts
from outpace.testing.drafters import random_trees

CREATIVE = ("writing", "roleplay")


def timed(engine: outpace.Engine, prompt: Any, params: SamplingParams) -> tuple[Any, float]:
    begin = time.perf_counter()
    result = engine.generate(prompt, params)
    return result, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("--model")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    quiet_transformers()
    plain = outpace.load(args.model, drafter="none")
    model, vocab_size = plain.target.original, plain.target.vocab_size
    as_large = {"draft_model": copy.deepcopy(model), "draft_tokenizer": plain.tokenizer, "draft_quantize": "none"}
    cases: list[tuple[str, dict[str, Any], float]] = [
        ("as large as the target", as_large, 0.0),
        ("random", {"drafter": random_trees(vocab_size)}, 0.0),
        ("auto, temperature 1.5", {}, 1.5),
    ]
    prompts = [prompt for prompt in read_prompts(args.prompts) if prompt.category in CREATIVE][: args.count]
    plain.generate(prompts[0].prompt, SamplingParams(max_new_tokens=8))
    columns = ("drafter", "identical", "ratio of totals", "per prompt", "median", "drafted per pass", "off")
    print(f"| {' | '.join(columns)} |\n" + "| --- " * len(columns) + "|")
    for name, options, temperature in cases:
        engine = outpace.load(model, tokenizer=plain.tokenizer, planner="auto", **options)
        params = SamplingParams(max_new_tokens=args.tokens, temperature=temperature, seed=1, ignore_eos=True)
        totals, ratios, same, drafted, off, passes = [0.0, 0.0], [], 0, 0, 0, 0
        for index, prompt in enumerate(prompts):
            found = {}
            for key in ("plain", "fast") if index % 2 else ("fast", "plain"):
                found[key] = timed(plain if key == "plain" else engine, prompt.prompt, params)
            (wanted, before), (result, after) = found["plain"], found["fast"]
            totals = [totals[0] + before, totals[1] + after]
            ratios.append(before / after)
            same += result.tokens == wanted.tokens
            drafted += result.stats.num_drafted_tokens
            off += result.stats.num_rounds_switched_off
            passes += result.stats.num_verifications
        cells = (
            name,
            f"{same}/{len(prompts)}",
            f"{totals[0] / totals[1]:.2f}",
            ", ".join(f"{ratio:.2f}" for ratio in ratios),
            f"{statistics.median(ratios):.2f}",
            f"{drafted / passes:.1f}",
            f"{100 * off / passes:.0f} %",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
