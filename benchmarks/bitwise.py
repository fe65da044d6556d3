"""How often texts with drafts differ from those without in half precision, as passes come and in bitwise mode.

    python benchmarks/bitwise.py PROMPTS.jsonl [--model M] [--dtype bfloat16] [--count 20] [--tokens 160] [--k 4]

Greedy. Every text is decoded four times: with and without drafts, in both modes. No times.
"""

from __future__ import annotations

import argparse

import outpace
from outpace import SamplingParams
from outpace.bench.suites import chosen
from outpace.cli.options import counting_bar, quiet_transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--k", type=int, default=4)
    args = parser.parse_args()
    quiet_transformers()
    prompts = chosen([args.prompts], -(-args.count // 6))[: args.count]
    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    print("| exactness | texts | differing | drafted | accepted | first differences at |\n" + "| --- " * 6 + "|")
    for exactness in ("numerical", "bitwise"):
        plain, fast = (
            outpace.load(args.model, drafter=drafter, k=args.k, planner="off", dtype=args.dtype, exactness=exactness)
            for drafter in ("none", "lookup")
        )
        places, drafted, accepted = [], 0, 0
        with counting_bar() as bar:
            task = bar.add_task(exactness, total=len(prompts))
            for prompt in prompts:
                ours, theirs = (engine.generate(prompt.prompt, params) for engine in (fast, plain))
                drafted += ours.stats.num_drafted_tokens
                accepted += ours.stats.num_accepted_tokens
                pairs = enumerate(zip(ours.tokens, theirs.tokens, strict=True))
                places += [index for index, (a, b) in pairs if a != b][:1]
                bar.advance(task)
        print(f"| {exactness} | {len(prompts)} | {len(places)} | {drafted} | {accepted} | {places} |", flush=True)


if __name__ == "__main__":
    main()
