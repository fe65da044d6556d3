"""What a benchmark compares: ways to decode, behind one protocol. Those of other libraries are in `peers`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..engine import Engine
from ..sampling import SamplingParams
from ..session import Result

Tokens = list[int]


@dataclass(frozen=True, slots=True)
class Run:
    """One batch, decoded. tokens: the new ones of each row. seconds: of the whole call; first_seconds: until every row
    had its first token. results: of outpace."""

    tokens: list[Tokens]
    seconds: float
    first_seconds: float
    results: list[Result] = field(default_factory=list)


class Method(Protocol):
    """A way to decode a batch of prompts, given as token ids. samples_alike: whether it draws the text of outpace's
    plain decoding for the same seed, at any temperature."""

    name: str
    samples_alike: bool

    def run(self, prompts: Sequence[Tokens], params: Sequence[SamplingParams]) -> Run:
        """Decode every prompt to its end. params: of each row; equal but for their seeds."""
        ...


@dataclass(slots=True)
class Outpace:
    """An engine of ours."""

    name: str
    engine: Engine
    samples_alike: bool = True

    def run(self, prompts: Sequence[Tokens], params: Sequence[SamplingParams]) -> Run:
        begin = time.perf_counter()
        results = self.engine.generate(list(prompts), list(params))
        seconds = time.perf_counter() - begin
        return Run(
            [result.tokens for result in results],
            seconds,
            max(result.stats.prefill_seconds for result in results),
            results,
        )


@dataclass(frozen=True, slots=True)
class Models:
    """What peers decode with: transformers models and the target's tokenizer. draft, draft_tokenizer: None without a
    draft model."""

    target: Any
    tokenizer: Any
    draft: Any = None
    draft_tokenizer: Any = None
