"""What drafting costs: milliseconds per step of drafters that run no model, by length of the context.

    python benchmarks/drafting.py [TEXT ...] [--model M] [--drafters suffix,recycle,suffix+recycle] [--nodes 16]
        [--contexts 512,2048,8192,32768] [--steps 200] [--temperature 0.8] [--threads 1] [--json OUT]

A text (by default outpace's own sources) is replayed behind a context; nothing is decoded. Every node of a draft gets
scores in which the text's true next token is the likeliest two times of three. `propose` makes the draft, `observe`
reads the scores of all nodes. Times are medians and 90 % quantiles over the steps, after as many to fill the memories.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import outpace
from outpace import SamplingParams
from outpace.cli.options import quiet_transformers
from outpace.drafters.base import Budget

SOURCES = sorted(Path(outpace.__file__).parent.rglob("*.py"))


def replay(engine: outpace.Engine, tokens: list[int], context: int, steps: int, nodes: int, temperature: float) -> Any:
    """[steps, 2] milliseconds of propose and observe; drafted nodes and committed tokens per step."""
    drafter, vocab_size = engine.drafter, engine.target.vocab_size
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(nodes + 1, vocab_size, generator=random)
    params = SamplingParams(max_new_tokens=steps * (nodes + 1), temperature=temperature, seed=1)
    session = engine.requests.session(tokens[:context], params, with_text=False)
    budget = Budget(nodes, nodes, engine.target.can_tree)
    times: list[tuple[float, float]] = []
    num_committed = num_drafted = 0
    while len(times) < steps and len(session.tokens) + nodes + 1 < len(tokens):
        start = time.perf_counter()
        (tree,) = drafter.propose([session], [budget])
        proposed = time.perf_counter()
        place, node, accepted = len(session.tokens), 0, 0
        truth = tokens[place : place + nodes + 1]
        logits = noise[: len(tree)].roll(len(times), 1)
        at = torch.tensor([truth[min(depth, nodes)] for depth in tree.depths()])
        is_sure = torch.rand(len(tree), generator=random) < 2 / 3
        logits[torch.arange(len(tree)), at] += torch.where(is_sure, 12.0, 3.0)
        observed = time.perf_counter()
        if hasattr(drafter, "observe"):
            drafter.observe([session], [tree], [logits])
        times.append((proposed - start, time.perf_counter() - observed))
        while (child := tree.child(node, truth[accepted])) is not None:
            node, accepted = child, accepted + 1
        session.tokens.extend(truth[: accepted + 1])
        num_committed += accepted + 1
        num_drafted += len(tree) - 1
    drafter.release(session)
    return 1000 * np.array(times), num_drafted / len(times), num_committed / len(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--drafters", default="suffix,lookup,recycle,suffix+recycle")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--contexts", default="512,2048,8192,32768")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    quiet_transformers()
    plain = outpace.load(args.model, drafter="none")
    text = "\n".join(path.read_text(encoding="utf-8") for path in args.texts or SOURCES)
    tokens = plain.tokenizer(text, verbose=False)["input_ids"]
    rows: list[dict[str, Any]] = []
    print("| drafter | context | propose ms (median, 90 %) | observe ms (median, 90 %) | nodes | tokens per pass |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in args.drafters.split(","):
        for context in map(int, args.contexts.split(",")):
            engine = outpace.load(
                plain.target.original, tokenizer=plain.tokenizer, drafter=name, k=args.nodes, planner="off"
            )
            engine.target.max_positions = None  # nothing is decoded, so the context may be longer than the model's
            replay(engine, tokens, 16, args.steps, args.nodes, args.temperature)
            times, drafted, per_pass = replay(engine, tokens, context, args.steps, args.nodes, args.temperature)
            median, most = np.median(times[1:], 0), np.quantile(times[1:], 0.9, 0)  # the first one reads the context
            cells = [f"{m:.2f}, {q:.2f}" for m, q in zip(median, most, strict=True)]
            print(f"| {name} | {context} | {cells[0]} | {cells[1]} | {drafted:.1f} | {per_pass:.2f} |", flush=True)
            rows.append(
                {"drafter": name, "context": context, "propose": median[0], "observe": median[1], "nodes": drafted}
            )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
