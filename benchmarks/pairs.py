"""A target and its draft model: how often they agree, and what drafts give at several lengths.

    python benchmarks/pairs.py PROMPTS.jsonl TARGET DRAFT [--categories code,writing] [--per-category 3] [--tokens 48]
        [--k 4,8,12] [--quantize none,int8] [--temperatures 0,0.8] [--confidence 0.2] [--json OUT]

First table, along the target's own texts: 1 - TV(p, q), the mean over positions of the share that both distributions
have in common, and the share of positions at which the draft, with the target's noise, makes the target's choice (at
temperature 0 both are the same number). Second table: tokens per pass, accepted of drafted tokens, and decode time
against plain decoding in the same run; methods take turns on each prompt, after a warm-up.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import outpace
from outpace import SamplingParams, noise
from outpace.cli.options import quiet_transformers
from outpace.models import progress_bar
from outpace.prompts import NamedPrompt, read_prompts
from outpace.quantize import quantized

Engines = dict[tuple[str, int], outpace.Engine]


def log_probs(model: Any, result: outpace.Result, temperature: float, vocab: int) -> torch.Tensor:
    """[new tokens, vocab] of each generated position; one-hot at temperature 0."""
    ids = torch.tensor([result.prompt_tokens + result.tokens[:-1]])
    logits = model(ids, logits_to_keep=len(result.tokens)).logits[0, :, :vocab].double()
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0).log()
    return (logits / temperature).log_softmax(-1)


@torch.inference_mode()
def agreement(target: Any, draft: Any, result: outpace.Result, params: SamplingParams, vocab: int) -> tuple[float, ...]:
    """Sums over positions: (1 - TV, agreements of the noisy choices, positions)."""
    p, q = (log_probs(model, result, params.temperature, vocab) for model in (target, draft))
    common = torch.minimum(p.exp(), q.exp()).sum()
    start, same = len(result.prompt_tokens), 0
    for place in range(len(result.tokens)):
        ours, theirs = (
            noise.choose(scores[place], None, result.seed, start + place)
            if params.temperature
            else int(scores[place].argmax())
            for scores in (p, q)
        )
        same += ours == theirs
    return float(common), float(same), float(len(result.tokens))


def loaded(args: argparse.Namespace) -> tuple[outpace.Engine, dict[str, Any], Engines]:
    """The plain engine, the draft models by precision, and an engine for each of them and k."""
    with progress_bar() as progress:
        plain = outpace.load(args.target, drafter="none", progress=progress)
        draft = outpace.load(args.draft, drafter="none", progress=progress)
    model, tokenizer = plain.target.original, plain.tokenizer
    drafts = {
        name: draft.target.original if name == "none" else quantized(draft.target.original) for name in args.quantize
    }
    engines = {
        (name, k): outpace.load(
            model,
            tokenizer=tokenizer,
            draft_model=draft.target.original,
            draft_tokenizer=draft.tokenizer,
            draft_quantize=name,  # type: ignore[arg-type]
            confidence_threshold=args.confidence,
            k=k,
            planner="off",
        )
        for name, k in itertools.product(args.quantize, args.k)
    }
    return plain, drafts, engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--categories", type=lambda text: text.split(","), default=["code"])
    parser.add_argument("--per-category", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--k", type=lambda text: [int(part) for part in text.split(",")], default=[4, 8, 12])
    parser.add_argument("--quantize", type=lambda text: text.split(","), default=["none", "int8"])
    parser.add_argument("--temperatures", type=lambda text: [float(part) for part in text.split(",")], default=[0, 0.8])
    parser.add_argument("--confidence", type=float, default=0.2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    quiet_transformers()
    plain, drafts, engines = loaded(args)
    prompts: list[NamedPrompt] = []
    for category in args.categories:
        prompts += [p for p in read_prompts(args.prompts) if p.category == category][: args.per_category]
    for engine in (plain, *engines.values()):
        engine.generate(prompts[0].prompt, SamplingParams(max_new_tokens=8))
    vocab = min(plain.target.vocab_size, drafts[args.quantize[0]].config.vocab_size)
    rows: list[dict[str, Any]] = []
    for temperature, prompt in itertools.product(args.temperatures, prompts):
        params = SamplingParams(max_new_tokens=args.tokens, temperature=temperature, seed=1)
        base = plain.generate(prompt.prompt, params)
        common: dict[str, Any] = {"temperature": temperature, "category": prompt.category}
        for name, draft in drafts.items():
            found = agreement(plain.target.original, draft, base, params, vocab)
            rows.append(common | {"draft": name, "k": 0, "prompt": prompt.name, "agreement": found})
        for (name, k), engine in engines.items():
            result = engine.generate(prompt.prompt, params)
            stats = result.stats
            rows.append(
                common
                | {
                    "draft": name,
                    "k": k,
                    "prompt": prompt.name,
                    "same": result.tokens == base.tokens,
                    "tokens": stats.num_new_tokens,
                    "passes": stats.num_verifications,
                    "drafted": stats.num_drafted_tokens,
                    "accepted": stats.num_accepted_tokens,
                    "seconds": stats.decode_seconds,
                    "plain_seconds": base.stats.decode_seconds,
                }
            )
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["category"], row["temperature"], row["draft"], row["k"]].append(row)
    print(
        "| category | temperature | draft | 1 - TV | same choice | per prompt |\n| --- | --- | --- | --- | --- | --- |"
    )
    for (category, temperature, draft, k), group in groups.items():
        if k == 0:
            common, same, count = (sum(part) for part in zip(*(row["agreement"] for row in group), strict=True))
            each = ", ".join(f"{row['agreement'][1] / row['agreement'][2]:.2f}" for row in group)
            print(f"| {category} | {temperature} | {draft} | {common / count:.3f} | {same / count:.3f} | {each} |")
    print(
        "\n| category | temperature | draft | k | identical | tokens per pass | accepted / drafted | speed vs plain |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for (category, temperature, draft, k), group in groups.items():
        if k:
            total = {
                name: sum(row[name] for row in group)
                for name in group[0]
                if name not in ("category", "draft", "prompt")
            }
            print(
                f"| {category} | {temperature} | {draft} | {k} | {total['same']}/{len(group)} "
                f"| {total['tokens'] / total['passes']:.2f} | {total['accepted']}/{total['drafted']} "
                f"| {total['plain_seconds'] / total['seconds']:.2f} |"
            )


if __name__ == "__main__":
    main()
