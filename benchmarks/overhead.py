"""Where the time of a decoding step goes: the model's forward, and everything around it.

    python benchmarks/overhead.py [MODEL] [--tokens 96] [--threads 1] [--temperature 0.8]

Prints milliseconds per step for plain decoding and for suffix drafts, split into the model's forward, the target's
bookkeeping around it (positions, masks), drafting, accepting and cache moves, and the share that is not the model.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

import outpace
from outpace import engine as engine_module
from outpace.cli.options import quiet_transformers
from outpace.models import progress_bar

PROMPT = [
    {
        "role": "user",
        "content": "Repeat this list three times, then explain it: red apples, green pears, yellow lemons, blue plums.",
    }
]


class Clock:
    """Adds up the time spent in wrapped calls, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - begin

        return timed


def measure(engine: outpace.Engine, params: outpace.SamplingParams) -> tuple[dict[str, float], int]:
    """(milliseconds per step by phase, steps). The first step, which reads the prompt, is left out."""
    clock = Clock()
    target, cache, drafter, model = engine.target, engine._cache, engine.drafter, engine.target.model
    patched: list[tuple[Any, str, Any]] = [
        (model, "forward", clock.wrap("model", model.forward)),
        (drafter, "propose", clock.wrap("drafting", drafter.propose)),
        (cache, "keep", clock.wrap("cache", cache.keep)),
        (engine_module, "accept", clock.wrap("accepting", engine_module.accept)),
    ]
    session = engine.submit(PROMPT, params)
    engine.step()
    originals = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in patched]
    target_forward = target.forward
    try:
        for owner, name, wrapped in patched:
            setattr(owner, name, wrapped)
        target.forward = clock.wrap("target", target_forward)  # type: ignore[method-assign]
        begin, steps = time.perf_counter(), 0
        while not session.is_finished:
            engine.step()
            steps += 1
        total = time.perf_counter() - begin
    finally:
        del target.forward
        for owner, name, original in originals:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
    seconds = dict(clock.seconds)
    seconds["masks and positions"] = seconds.pop("target") - seconds["model"]
    seconds["rest of the loop"] = total - sum(seconds.values())
    return {name: 1000 * value / steps for name, value in seconds.items()}, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quiet_transformers()
    with progress_bar() as progress:
        suffix = outpace.load(arguments.model, k=8, planner="off", progress=progress)
    params = outpace.SamplingParams(
        max_new_tokens=arguments.tokens, temperature=arguments.temperature, top_p=0.95, seed=1, ignore_eos=True
    )
    plain = suffix.without_drafts()
    plain.generate(PROMPT, params)  # warm-up
    plain_step = 0.0
    for name, engine in (("plain", plain), ("suffix", suffix)):
        split, steps = measure(engine, params)
        outside = sum(value for phase, value in split.items() if phase != "model")
        plain_step = plain_step or sum(split.values())
        print(f"{name}: {steps} steps, {sum(split.values()):.2f} ms each, {arguments.threads} thread(s)")
        for phase, value in split.items():
            print(f"    {phase:22s}{value:9.3f} ms")
        print(f"    outside the model     {outside:9.3f} ms = {100 * outside / plain_step:.1f} % of a plain step")


if __name__ == "__main__":
    main()
