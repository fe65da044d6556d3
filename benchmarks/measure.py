"""Identity and speed of one model, against transformers' generate and against our own plain decoding.

    python benchmarks/measure.py PROMPTS.jsonl [--model M] [--draft-model D | --draft-noise S] [--per-category 2]
        [--categories a,b] [--tokens 128] [--k 1,4,16] [--seeds 5] [--batch 8] [--parts greedy,sampled,batch]
        [--json OUT]

greedy:  every prompt with transformers' generate, without drafts, and with every drafter and k; identity and speed
sampled: T 0.8, top-p 0.95, several seeds: with drafts against without
batch:   rows of a mixed batch against their solo runs

Methods take turns on each prompt; times are decode seconds (after the first token), ratios of totals per category.
`--draft-noise S` drafts with a noisy copy of the target: as slow as the target, often right; for identity only.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers

import outpace
from outpace import SamplingParams, audit
from outpace.bench import suites
from outpace.cli.options import quiet_transformers
from outpace.models import progress_bar
from outpace.prompts import NamedPrompt


def noisy_copy(model: Any, size: float) -> Any:
    """The model with Gaussian noise on its matrices, `size` times each matrix's standard deviation: a fair draft."""
    noisy, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for parameter in noisy.parameters():
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.data += size * parameter.data.std() * noise
    return noisy


def hf_greedy(engine: outpace.Engine, ids: Sequence[int], tokens: int) -> tuple[list[int], float]:
    """(new tokens, seconds) of transformers' own greedy generate."""
    inputs = torch.tensor([list(ids)], device=engine.target.device)
    begin = time.perf_counter()
    output = engine.target.original.generate(  # type: ignore[operator]
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, do_sample=False
    )
    return output[0, len(ids) :].tolist(), time.perf_counter() - begin


def engines(args: argparse.Namespace) -> tuple[dict[str, outpace.Engine], outpace.Engine]:
    """Every engine to measure, by name, and the plain one; all share one target."""
    with progress_bar() as progress:
        first = outpace.load(args.model, dtype=args.dtype, planner="off", progress=progress)
        model, tokenizer = first.target.original, first.tokenizer
        found = {
            f"suffix k={k}": outpace.load(model, tokenizer=tokenizer, drafter="suffix", k=k, planner="off")
            for k in args.k
        }
        draft: Any = noisy_copy(model, args.draft_noise) if args.draft_noise else None
        draft_tokenizer = tokenizer
        if args.draft_model:
            loaded = outpace.load(args.draft_model, dtype=args.dtype, planner="off", progress=progress)
            draft, draft_tokenizer = loaded.target.original, loaded.tokenizer
        if draft is not None:
            for k in args.k:
                found[f"model k={k}"] = outpace.load(
                    model, tokenizer=tokenizer, draft_model=draft, draft_tokenizer=draft_tokenizer, k=k, planner="off"
                )
    return found, first.without_drafts()


def greedy(found: dict[str, outpace.Engine], plain: outpace.Engine, chosen: Iterable[NamedPrompt], tokens: int) -> Any:
    """Per method: identity with transformers, tokens per pass and time ratio by category."""
    rows: list[dict[str, Any]] = []
    params = SamplingParams(max_new_tokens=tokens)
    for prompt in chosen:
        ids = plain.encode(prompt.prompt)
        reference, seconds = hf_greedy(plain, ids, tokens)
        base = plain.generate(ids, params)
        rounding = 0.0
        for name, engine in {"none": plain, **found}.items():
            result = base if engine is plain else engine.generate(ids, params)
            verdict = "identical"
            if result.tokens != reference:
                rounding = rounding or audit.measure_rounding(engine.target, base.prompt_tokens + base.tokens)
                difference = audit.find_difference(engine, _with_tokens(base, reference), result, params, rounding)
                verdict = "tie" if difference is not None and difference.is_tie else "BUG"
            rows.append(
                {
                    "category": prompt.category,
                    "prompt": prompt.name,
                    "method": name,
                    "verdict": verdict,
                    "tokens": len(result.tokens),
                    "passes": result.stats.num_verifications,
                    "drafted": result.stats.num_drafted_tokens,
                    "accepted": result.stats.num_accepted_tokens,
                    "decode_seconds": result.stats.decode_seconds,
                    "plain_decode_seconds": base.stats.decode_seconds,
                    "hf_seconds": seconds,
                    "seconds": result.stats.decode_seconds + result.stats.prefill_seconds,
                }
            )
            print(f"{prompt.category:14s} {prompt.name:>5s} {name:14s} {verdict}", file=sys.stderr)
    _table(rows)
    return rows


def _with_tokens(result: outpace.Result, tokens: list[int]) -> outpace.Result:
    changed = copy.copy(result)
    object.__setattr__(changed, "tokens", tokens)
    return changed


def _table(rows: list[dict[str, Any]]) -> None:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["category"], row["method"]].append(row)
        groups["all", row["method"]].append(row)
    print("| category | method | identical | tokens per pass | accepted / drafted | speed vs plain | vs transformers |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (category, method), group in sorted(groups.items(), key=lambda item: (item[0][0] == "all", item[0])):
        total = {name: sum(row[name] for row in group) for name in group[0] if isinstance(group[0][name], int | float)}
        same = sum(row["verdict"] == "identical" for row in group)
        ties = sum(row["verdict"] == "tie" for row in group)
        print(
            f"| {category} | {method} | {same}/{len(group)}{f' ({ties} ties)' if ties else ''} "
            f"| {total['tokens'] / total['passes']:.2f} | {total['accepted']}/{total['drafted']} "
            f"| {total['plain_decode_seconds'] / total['decode_seconds']:.2f} "
            f"| {total['hf_seconds'] / total['seconds']:.2f} |"
        )


def sampled(found: dict[str, outpace.Engine], plain: outpace.Engine, chosen: Iterable[NamedPrompt], args: Any) -> Any:
    """With drafts against without, same seeds."""
    rows = []
    for prompt in chosen:
        ids = plain.encode(prompt.prompt)
        for seed in range(args.seeds):
            params = SamplingParams(max_new_tokens=args.tokens, temperature=0.8, top_p=0.95, seed=seed)
            base = plain.generate(ids, params)
            for name, engine in found.items():
                result = engine.generate(ids, params)
                rows.append({"method": name, "prompt": prompt.name, "seed": seed, "same": result.tokens == base.tokens})
                rows[-1]["accepted"] = result.stats.num_accepted_tokens
    for name in found:
        mine = [row for row in rows if row["method"] == name]
        print(f"sampled, {name}: {sum(row['same'] for row in mine)}/{len(mine)} identical, "
              f"{sum(row['accepted'] for row in mine)} drafts accepted")  # fmt: skip
    return rows


def batch(found: dict[str, outpace.Engine], plain: outpace.Engine, chosen: Sequence[NamedPrompt], args: Any) -> Any:
    """Every row of a mixed batch against its solo run, greedy and sampled rows together."""
    prompts = [plain.encode(prompt.prompt) for prompt in chosen[: args.batch]]
    params = [
        SamplingParams(max_new_tokens=args.tokens, temperature=0.8 * (i % 2), top_p=0.95, seed=i)
        for i in range(len(prompts))
    ]
    solo = [plain.generate(ids, one).tokens for ids, one in zip(prompts, params, strict=True)]
    same = {}
    for name, engine in found.items():
        rows = engine.generate(prompts, params)
        same[name] = sum(row.tokens == wanted for row, wanted in zip(rows, solo, strict=True))
        print(f"batch of {len(prompts)}, {name}: {same[name]}/{len(prompts)} rows equal their solo runs without drafts")
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("--model")
    parser.add_argument("--draft-model")
    parser.add_argument("--draft-noise", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--categories", default="")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--k", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--parts", default="greedy,sampled,batch")
    parser.add_argument("--json")
    args = parser.parse_args()
    quiet_transformers()
    if args.threads:
        torch.set_num_threads(args.threads)
    categories = args.categories.split(",") if args.categories else None
    chosen = suites.chosen([args.prompts], args.per_category, categories=categories)
    found, plain = engines(args)
    plain.generate(plain.encode(chosen[0].prompt), SamplingParams(max_new_tokens=8))  # warm-up
    report: dict[str, Any] = {
        "command": sys.argv,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(),
        "dtype": str(plain.target.dtype),
        "categories": Counter(prompt.category for prompt in chosen),
    }
    parts = args.parts.split(",")
    if "greedy" in parts:
        report["greedy"] = greedy(found, plain, chosen, args.tokens)
    if "sampled" in parts:
        report["sampled"] = sampled(found, plain, chosen, args)
    if "batch" in parts:
        report["batch"] = batch(found, plain, chosen, args)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
