"""Code edits: a model returns a file of 150 lines with one function changed. Tokens per pass, with a prediction or not.

    python benchmarks/edits.py [--model M] [--drafter suffix,suffix+recycle] [--nodes 16,32] [--tokens 1600]
        [--temperature 0] [--plain] [--json OUT]

"prompt" copies from the file in the prompt; "prediction" is also told the old file as the expected output. --plain
decodes without drafts, too, compares the texts and gives the time ratio.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import outpace
from outpace import SamplingParams
from outpace.bench.suites import edit_prompt, edited_file
from outpace.cli.options import quiet_transformers
from outpace.models import progress_bar

NAME, TASK = "sort", "change the method low_stock: it shall return the items sorted by quantity, the smallest first"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--drafter", default="suffix,suffix+recycle")
    parser.add_argument("--nodes", default="16,32")
    parser.add_argument("--tokens", type=int, default=1600)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    quiet_transformers()
    with progress_bar() as progress:
        plain = outpace.load(args.model, drafter="none", progress=progress)
    source, prompt = edited_file(), edit_prompt(NAME, TASK).prompt
    params = SamplingParams(max_new_tokens=args.tokens, temperature=args.temperature, seed=1)
    base = plain.generate(prompt, params) if args.plain else None
    rows: list[dict[str, Any]] = []
    print("| drafter | nodes | told | tokens | tokens per pass | accepted / drafted | identical | speed vs plain |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, nodes, told in itertools.product(
        args.drafter.split(","), map(int, args.nodes.split(",")), ("prompt", "prediction")
    ):
        engine = outpace.load(plain.target.original, tokenizer=plain.tokenizer, drafter=name, k=nodes, planner="off")
        prediction = f"```python\n{source}```" if told == "prediction" else ""
        told_params = SamplingParams(
            max_new_tokens=args.tokens, temperature=args.temperature, seed=1, prediction=prediction
        )
        result = engine.generate(prompt, told_params)
        stats = result.stats
        same = "" if base is None else "yes" if result.tokens == base.tokens else "no"
        ratio = "" if base is None else f"{base.stats.decode_seconds / stats.decode_seconds:.2f}"
        print(
            f"| {name} | {nodes} | {told} | {stats.num_new_tokens} | {stats.tokens_per_pass:.2f} "
            f"| {stats.num_accepted_tokens}/{stats.num_drafted_tokens} | {same} | {ratio} |",
            flush=True,
        )
        rows.append(
            {"drafter": name, "nodes": nodes, "told": told, "text": result.text, "stats": stats.tokens_per_pass}
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
