"""Acceptance by content and temperature, as a table and a plot.

    python benchmarks/acceptance.py PROMPTS.jsonl CODE.jsonl [--model M] [--draft-model D] [--drafter NAME] [--k 16]
        [--temperatures 0,0.3,0.7,1.0,1.5] [--per-category 5] [--tokens 96] [--rows 5] [--plot OUT.svg] [--json OUT]

No times and no planner: every round drafts k tokens. The plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

from drafters import generate

import outpace
from outpace import SamplingParams
from outpace.cli.options import counting_bar, quiet_transformers
from outpace.prompts import NamedPrompt, read_prompts

CONTENTS: dict[str, tuple[str, ...]] = {
    "code": ("code",),
    "math": ("math_reasoning",),
    "chat": ("humanities", "stem"),
    "creative": ("writing", "roleplay"),
}


def prompts_of(paths: list[str], content: str, count: int) -> list[NamedPrompt]:
    found = [prompt for path in paths for prompt in read_prompts(path) if prompt.category in CONTENTS[content]]
    return found[:count]


def plot(rows: list[dict[str, Any]], title: str, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharex=True)
    for content, marker in zip(CONTENTS, "osD^", strict=True):
        mine = [row for row in rows if row["content"] == content]
        temperatures = [row["temperature"] for row in mine]
        for axis, name in zip(axes, ("acceptance", "tokens_per_pass"), strict=True):
            axis.plot(temperatures, [row[name] for row in mine], marker=marker, label=content)
    for axis, label in zip(axes, ("accepted / drafted", "tokens per pass"), strict=True):
        axis.set_xlabel("temperature")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0 if label != "tokens per pass" else 1)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model")
    parser.add_argument("--draft-model")
    parser.add_argument("--drafter")
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--temperatures", default="0,0.3,0.7,1.0,1.5")
    parser.add_argument("--per-category", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--plot")
    parser.add_argument("--json")
    args = parser.parse_args()
    quiet_transformers()
    temperatures = [float(text) for text in args.temperatures.split(",")]
    options = {"draft_model": args.draft_model, "drafter": args.drafter, "k": args.k}
    plain = outpace.load(args.model, drafter="none")
    rows: list[dict[str, Any]] = []
    cells = list(itertools.product(CONTENTS, temperatures))
    print("| content | temperature | accepted / drafted | acceptance | tokens per pass |\n" + "| --- " * 5 + "|")
    with counting_bar() as bar:
        task = bar.add_task("decoding", total=len(cells))
        for content, temperature in cells:
            model, tokenizer = plain.target.original, plain.tokenizer
            engine = outpace.load(model, tokenizer=tokenizer, planner="off", **options)  # knows nothing yet
            params = SamplingParams(max_new_tokens=args.tokens, temperature=temperature, seed=0)
            results = generate(engine, prompts_of(args.prompts, content, args.per_category), params, args.rows)
            drafted, accepted, tokens, passes = (
                sum(getattr(result.stats, name) for result in results)
                for name in ("num_drafted_tokens", "num_accepted_tokens", "num_new_tokens", "num_verifications")
            )
            row = {
                "content": content,
                "temperature": temperature,
                "acceptance": accepted / max(1, drafted),
                "tokens_per_pass": tokens / passes,
            }
            rows.append(row)
            print(
                f"| {content} | {temperature} | {accepted}/{drafted} | {row['acceptance']:.2f} | "
                f"{row['tokens_per_pass']:.2f} |",
                flush=True,
            )
            bar.advance(task)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    if args.plot:
        plot(rows, f"{engine.drafter.name}, k {args.k}", args.plot)


if __name__ == "__main__":
    main()
