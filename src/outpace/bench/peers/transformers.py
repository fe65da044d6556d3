"""transformers' own `generate`: plain, with prompt lookup, and assisted by a draft model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...sampling import SamplingParams
from ..methods import Method, Models, Run, Tokens

_LOOKUP_TOKENS = 10  # what transformers' documentation uses


def plain(models: Models) -> Method | str:
    """As it comes."""
    return TransformersMethod("transformers", models, {})


def prompt_lookup(models: Models) -> Method | str:
    """Drafts copied from the prompt."""
    return TransformersMethod("transformers prompt lookup", models, {"prompt_lookup_num_tokens": _LOOKUP_TOKENS})


def assisted(models: Models) -> Method | str:
    """Drafts of a smaller model, as many as its own schedule says."""
    if models.draft is None:
        return "assisted generation needs a draft model (--draft-model)"
    return TransformersMethod("transformers assisted", models, {"assistant_model": models.draft})


class _FirstScores:
    """Notes when the first scores were there."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.at is None:
            self.at = time.perf_counter()
        return scores


class TransformersMethod:
    """`model.generate` with arguments of its own. Its samples are other draws than ours."""

    samples_alike = False

    def __init__(self, name: str, models: Models, arguments: dict[str, Any]) -> None:
        self.name = name
        self._models, self._arguments = models, arguments

    def run(self, prompts: Sequence[Tokens], params: Sequence[SamplingParams]) -> Run:
        model, one = self._models.target, params[0]
        if len(prompts) > 1 and self._arguments:
            raise ValueError(f"{self.name} decodes one row at a time.")
        ends = model.generation_config.eos_token_id
        pad = ends[0] if isinstance(ends, list) else ends if ends is not None else 0
        longest = max(map(len, prompts))
        rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if not one.is_greedy:
            torch.manual_seed(one.seed or 0)
            sampling = {"do_sample": True, "temperature": one.temperature, "top_p": one.top_p, "top_k": one.top_k}
        first = _FirstScores()
        begin = time.perf_counter()
        output = model.generate(
            torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=one.max_new_tokens,
            pad_token_id=pad,
            logits_processor=[first],
            **sampling,
            **self._arguments,
        )
        seconds = time.perf_counter() - begin
        stops = {pad} if ends is None else set(ends) if isinstance(ends, list) else {ends}
        new = [_until_end(row[longest:].tolist(), stops if ends is not None else set()) for row in output]
        return Run(new, seconds, (first.at or begin) - begin)


def _until_end(tokens: Tokens, stops: set[int]) -> Tokens:
    """Up to the end-of-text token, which counts."""
    for place, token in enumerate(tokens):
        if token in stops:
            return tokens[: place + 1]
    return tokens
