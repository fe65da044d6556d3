"""What passes and drafts cost on a GPU: the curve with and without captured passes, and decoding with drafts that are
right with a known probability.

    python benchmarks/gpu.py [--shapes 1b,7b] [--device cuda] [--rows 1,4,16,64] [--tokens 128] [--k 8]

The models have the shapes of real ones and random weights in bfloat16, so nothing has to be downloaded. Drafts are the
model's own plain text, of which every token is replaced with probability 1 - a. `--shapes tiny --device cpu` shows that
the script runs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import outpace
from outpace import SamplingParams, profiling
from outpace.cli.options import quiet_transformers
from outpace.drafters.base import Budget
from outpace.graphs import FixedPasses
from outpace.session import Session
from outpace.testing.drafters import Scripted
from outpace.tree import TokenTree

SHAPES: dict[str, dict[str, int]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
SIZES = (1, 2, 4, 8, 16, 32, 64)


def model_of(shape: str, device: str) -> Any:
    config = AutoConfig.for_model("llama", max_position_embeddings=4096, **SHAPES[shape])
    config.eos_token_id = None
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def drafter_of(texts: dict[int, list[int]], right: float, vocab_size: int) -> Scripted:
    """Drafts of the known text at the same place. texts: first token of the prompt -> whole text."""

    def draft(session: Session, budget: Budget) -> TokenTree:
        numbers = random.Random(f"{session.tokens[0]} {len(session.tokens)}")
        start = len(session.tokens)
        coming = texts[session.tokens[0]][start : start + min(budget.depth, budget.nodes)]
        tokens = [token if numbers.random() < right else numbers.randrange(vocab_size) for token in coming]
        return TokenTree.chain(session.tokens[-1], tokens)

    return Scripted("synthetic", draft)


def print_curves(model: Any, rows: list[int]) -> None:
    print("| passes | rows | " + " | ".join(map(str, SIZES)) + " |\n" + "| --- " * (len(SIZES) + 2) + "|")
    for label in ("as they come", "fixed"):
        target = outpace.load(model, drafter="none", kernels="stock").target
        target.passes = FixedPasses(target.device.type == "cuda") if label == "fixed" else None
        for count in rows:
            found = profiling.measure(target, [(count, size) for size in SIZES], repeats=5)
            cells = [f"{1e3 * found[count, size]:.2f}" for size in SIZES]
            print(f"| {label} | {count} | " + " | ".join(cells) + " |", flush=True)
        if target.passes is not None:
            print(f"captured: {target.passes.is_captured}, replays: {target.passes.num_replays}")


def print_speeds(model: Any, device: str, num_tokens: int, k: int, repeats: int) -> None:
    params = SamplingParams(max_new_tokens=num_tokens)
    prompts = [[place + 1, *((7919 * i + place) % 500 for i in range(127))] for place in range(3)]
    plain = outpace.load(model, drafter="none")
    texts = {prompt[0]: prompt + plain.generate(prompt, params).tokens for prompt in prompts}
    inputs = torch.tensor([prompts[0]], device=device)
    print("| right | tokens per pass | identical | speed vs own plain | vs transformers |\n" + "| --- " * 5 + "|")
    for right in (0.6, 0.7, 0.8, 0.9):
        engine = outpace.load(model, drafter=drafter_of(texts, right, plain.target.vocab_size), k=k, planner="off")
        ratios, against, same, tokens, passes = [], [], 0, 0, 0
        for repeat in range(repeats + 1):
            for prompt in prompts:
                seconds = []
                for run in (plain, engine):
                    begin = time.perf_counter()
                    result = run.generate(prompt, params)
                    seconds.append(time.perf_counter() - begin)
                begin = time.perf_counter()
                model.generate(inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
                seconds.append(time.perf_counter() - begin)
                if repeat > 0:
                    ratios.append(seconds[0] / seconds[1])
                    against.append(seconds[2] / seconds[1])
                    same += prompt + result.tokens == texts[prompt[0]]
                    tokens += result.stats.num_new_tokens
                    passes += result.stats.num_verifications
        print(
            f"| {right} | {tokens / passes:.2f} | {same}/{repeats * len(prompts)} | {statistics.median(ratios):.2f} | "
            f"{statistics.median(against):.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1b,7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    quiet_transformers()
    for shape in args.shapes.split(","):
        model = model_of(shape, args.device)
        print(
            f"\n{shape}: {sum(weight.numel() for weight in model.parameters()) / 1e9:.2f} G parameters, {args.device}\n"
        )
        print_curves(model, [int(count) for count in args.rows.split(",")])
        print()
        print_speeds(model, args.device, args.tokens, args.k, args.repeats)
        del model


if __name__ == "__main__":
    main()
