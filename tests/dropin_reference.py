"""What transformers' own `generate` gives, the guards of comparing with it, and `outpace.accelerate` in some ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import torch
import transformers
from packaging.version import Version
from reference import assert_drafts_were_mixed, noisy
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

import outpace
from outpace import Accelerated, Stats
from outpace.testing import drafters
from outpace.testing.models import MIN_DISTINCT, noisy_copy, tiny_model

PAD = 500
# A processed score is at most this much off when it comes from a block instead of a step.
MIN_MARGIN = 1e-3
PLAIN = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": PAD}
ENTRIES = ("fast.generate", "custom_generate")
# How texts are drafted: copied from the text; by a model that is right about half of the time, in chains and in trees.
WAYS: dict[str, dict[str, Any]] = {
    "suffix": {"drafter": "suffix"},
    "chain": {"k": 5, "confidence_threshold": 0.0},
    "tree": {"k": 6, "width": 3},
}
# A way of drafting -> the entry to take.
EVERY_WAY = {"suffix": "custom_generate", "chain": "fast.generate", "tree": "custom_generate"}
IS_NEW = Version(transformers.__version__) >= Version("5.24")
# The name under which this version of transformers takes and gives a cache.
CACHE = "cache" if "cache" in {field.name for field in fields(GenerateDecoderOnlyOutput)} else "past_key_values"


@cache
def fast(model: Any, way: str = "tree", family: str = "llama") -> Accelerated:
    """The model, accelerated. family: whose noisy copy drafts."""
    options = WAYS[way]
    return outpace.accelerate(model, **({"drafter": noisy(family)} | options))


def call(entry: str, accelerated: Accelerated, *inputs: Any, **arguments: Any) -> Any:
    """A call of `generate` by one of ENTRIES."""
    if entry == "fast.generate":
        return accelerated.generate(*inputs, **arguments)
    model: Any = accelerated.engine.target.model
    return model.generate(*inputs, custom_generate=accelerated, **arguments)


def batch(*prompts: Sequence[int], pad: int = PAD) -> dict[str, Tensor]:
    """input_ids and attention_mask of prompts, padded on the left."""
    length = max(len(prompt) for prompt in prompts)
    ids = [[pad] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def plain(model: Any, inputs: dict[str, Any], arguments: dict[str, Any], distinct: int = MIN_DISTINCT) -> Tensor:
    """transformers' own greedy text, [rows, length], after the guards: it is varied, and the choices are clear."""
    recorded = {"return_dict_in_generate": True, "output_scores": True}
    found = model.generate(**inputs, **(PLAIN | arguments | recorded))
    new = found.sequences[:, -len(found.scores) :]
    assert len(set(new.flatten().tolist())) >= distinct, "the guard: too few different tokens to mean anything"
    for tokens, scores in zip(new.unbind(1), found.scores, strict=True):
        best = scores.topk(2)
        is_chosen = best.indices[:, 0] == tokens  # not so in rows that have ended
        margins = (best.values[:, 0] - best.values[:, 1])[is_chosen]
        assert bool((margins >= MIN_MARGIN).all()), "the guard: a near-tie, which rounding may decide"
    sequences: Tensor = found.sequences
    return sequences


def assert_same(
    model: Any,
    inputs: dict[str, Any],
    arguments: dict[str, Any],
    *,
    ways: Mapping[str, str] = EVERY_WAY,
    distinct: int = MIN_DISTINCT,
    family: str = "llama",
) -> list[Stats]:
    """Each way of drafting, by its entry, gives transformers' text; returns the counts of all but "suffix"."""
    wanted = plain(model, inputs, arguments, distinct)
    drafted: list[Stats] = []
    for way, entry in ways.items():
        accelerated = knowing(model, wanted) if way == "known" else fast(model, way, family)
        found = call(entry, accelerated, **inputs, **(PLAIN | arguments))
        assert found.dtype == wanted.dtype and found.tolist() == wanted.tolist(), (way, entry)
        assert len(accelerated.last_stats) == len(wanted)
        assert all(stats.num_draft_failures == 0 for stats in accelerated.last_stats)
        drafted += accelerated.last_stats if way != "suffix" else ()
    return drafted


def knowing(model: Any, sequences: Tensor) -> Accelerated:
    """The model, accelerated by random trees that are often right. sequences: [rows, length], padded texts."""
    texts = [[token for token in row if token != PAD] for row in sequences.tolist()]
    return outpace.accelerate(model, drafter=drafters.random_trees(512, texts, share_right=0.7), k=6)


def assert_mixed(stats: Sequence[Stats]) -> None:
    """The guard: enough drafts were accepted, and enough refused, for the test to mean anything."""
    assert_drafts_were_mixed(*stats)


class Passes:
    """Counts the forwards of a model while it is watched."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        self._handle = model.register_forward_pre_hook(self._add)

    def _add(self, *arguments: Any) -> None:
        self.count += 1

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()


@cache
def calm() -> Any:
    """A model in float64 whose scores are the same to 1e-6 however its tokens are grouped into forwards."""
    return tiny_model("llama", sharpness=2.0).double()


@cache
def calm_fast(way: str) -> Accelerated:
    """The calm model, accelerated as in WAYS, with a noisy copy of its own."""
    return outpace.accelerate(calm(), **({"drafter": calm_noisy()} | WAYS[way]))


@cache
def calm_noisy() -> Any:
    return noisy_copy(calm())
