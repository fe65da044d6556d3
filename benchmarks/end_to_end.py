"""outpace as it comes against transformers' generate, its prompt lookup and its assisted generation, prompt by prompt.

    python benchmarks/end_to_end.py PROMPTS.jsonl [MORE.jsonl] [--model M] [--draft-model D] [--per-category 10]
        [--categories a,b] [--tokens 128] [--temperature 0] [--drafters auto] [--json OUT]

All methods take turns on each prompt, after a warm-up; seconds are those of the whole call, prompt included. Two ratios
against transformers' plain generate: the mean over prompts, and total by total. "vs own plain" is against outpace
without drafts. "predicted" is what the planner expected of its drafts against plain decoding, at the end of the text.
At temperature 0 every text is compared with transformers'; else with outpace's own without drafts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import outpace
from outpace import SamplingParams
from outpace.bench.suites import chosen
from outpace.cli.options import quiet_transformers
from outpace.models import progress_bar


class Methods:
    """Every way to decode a prompt, by name: -> (new tokens, seconds, statistics or None)."""

    def __init__(self, args: argparse.Namespace) -> None:
        with progress_bar() as progress:
            self.plain = outpace.load(args.model, drafter="none", progress=progress)
            draft = outpace.load(args.draft_model, drafter="none", progress=progress) if args.draft_model else None
        self.model: Any = self.plain.target.original
        self.draft: Any = draft.target.original if draft is not None else None
        self.engines = {"outpace none": self.plain}
        for name in args.drafters.split(","):
            options: dict[str, Any] = {"tokenizer": self.plain.tokenizer, "drafter": name}
            if "model" in name and draft is not None:
                options |= {"draft_model": self.draft, "draft_tokenizer": draft.tokenizer}
            self.engines[f"outpace {name}"] = outpace.load(self.model, **options)
        self.others: dict[str, dict[str, Any]] = {"transformers": {}}
        if args.temperature == 0:
            self.others["transformers prompt lookup"] = {"prompt_lookup_num_tokens": 10}
            if self.draft is not None:
                self.others["transformers assisted"] = {"assistant_model": self.draft}

    def run(self, name: str, ids: list[int], params: SamplingParams) -> tuple[list[int], float, Any]:
        begin = time.perf_counter()
        if name in self.engines:
            result = self.engines[name].generate(ids, params)
            return result.tokens, time.perf_counter() - begin, result.stats
        inputs = torch.tensor([ids])
        sampling = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if params.temperature:
            torch.manual_seed(params.seed or 0)
            sampling = {"do_sample": True, "temperature": params.temperature, "top_p": 1.0, "top_k": 0}
        output = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=params.max_new_tokens,
            **sampling,
            **self.others[name],
        )
        return output[0, len(ids) :].tolist(), time.perf_counter() - begin, None

    @property
    def names(self) -> list[str]:
        return [*self.others, *self.engines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model")
    parser.add_argument("--draft-model")
    parser.add_argument("--drafters", default="auto")
    parser.add_argument("--categories", type=lambda text: text.split(","))
    parser.add_argument("--per-category", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    quiet_transformers()
    methods = Methods(args)
    params = SamplingParams(max_new_tokens=args.tokens, temperature=args.temperature, seed=1)
    prompts = chosen(args.prompts, args.per_category, categories=args.categories)
    for name in methods.names:
        methods.run(name, methods.plain.encode(prompts[0].prompt), SamplingParams(max_new_tokens=8))
    rows: list[dict[str, Any]] = []
    for index, prompt in enumerate(prompts):
        ids = methods.plain.encode(prompt.prompt)
        names = methods.names[index % len(methods.names) :] + methods.names[: index % len(methods.names)]
        found = {name: methods.run(name, ids, params) for name in names}
        reference = found["transformers" if args.temperature == 0 else "outpace none"][0]
        for name in methods.names:
            tokens, seconds, stats = found[name]
            planner = methods.engines[name].planner if name in methods.engines else None
            rows.append(
                {
                    "prompt": prompt.name,
                    "category": prompt.category,
                    "method": name,
                    "same": tokens == reference,
                    "tokens": len(tokens),
                    "seconds": seconds,
                    "base": found["transformers"][1] / max(1, len(found["transformers"][0])) * len(tokens),
                    "own": found["outpace none"][1] / max(1, len(found["outpace none"][0])) * len(tokens),
                    "passes": stats.num_verifications if stats else 0,
                    "off": stats.num_rounds_switched_off if stats else 0,
                    "predicted": planner.gain(1) if planner else 1.0,
                }
            )
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    columns = (
        *("category", "method", "identical", "tokens per pass", "mean of ratios", "ratio of totals", "worst prompt"),
        *("vs own plain", "predicted"),
    )
    print(f"| {' | '.join(columns)} |\n" + "| --- " * len(columns) + "|")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["category"], row["method"]].append(row)
    for row in rows:
        groups["all", row["method"]].append(row)
    for (category, method), group in groups.items():
        if method == "transformers":
            continue
        ratios = [row["base"] / row["seconds"] for row in group]
        names = ("tokens", "passes", "seconds", "base", "own", "same")
        total = {name: sum(row[name] for row in group) for name in names}
        cells = [
            category,
            method,
            f"{total['same']}/{len(group)}",
            f"{total['tokens'] / total['passes']:.2f}" if total["passes"] else "",
            f"{sum(ratios) / len(ratios):.2f}",
            f"{total['base'] / total['seconds']:.2f}",
            f"{min(ratios):.2f}",
            f"{total['own'] / total['seconds']:.2f}",
            f"{sum(row['predicted'] for row in group) / len(group):.2f}" if "outpace" in method else "",
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
