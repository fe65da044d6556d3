"""What transformers' own `generate` emits, and whether comparing with it proves anything."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import transformers
from packaging.version import Version

import outpace
from outpace.drafters.model import ModelDrafter
from outpace.target import Target
from outpace.testing import drafters
from outpace.testing.models import MIN_DISTINCT, PROMPTS, noisy_copy, scores, tiny_model
from outpace.testing.tokenizers import tiny_tokenizer

ONE, REPEATED, MIXED = PROMPTS
MIN_MARGIN = 1e-4
# Chains only, with snapshots of their states. Older versions of transformers have no `cache` argument in Mamba2 and are
# wrong about several tokens over an LFM2 cache; both are refused there.
_IS_NEW = Version(transformers.__version__) >= Version("5.24")
STATE_FAMILIES = ("lfm2", "mamba2", "qwen3_next") if _IS_NEW else ("qwen3_next",)
TREE_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "opt", "mixtral", "qwen3_moe"),
    *("gpt-oss", "smollm3"),
)
FAMILIES = (*TREE_FAMILIES, "bloom", *STATE_FAMILIES)

EARLY_EXIT = ("llama", "mistral", "qwen3", "gemma3")  # of the others, many name their layers differently

Tokens = tuple[int, ...]  # hashable, for caches

model = cache(tiny_model)


@cache
def noisy(family: str) -> Any:
    """A draft model that is right about half of the time."""
    return noisy_copy(model(family))


@cache
def itself(family: str) -> Any:
    """A draft model that is always right: another object with the same weights."""
    return copy.deepcopy(model(family))


@cache
def other(family: str) -> Any:
    """A draft model that is hardly ever right: other weights."""
    return tiny_model(family, seed=99)


def sure(family: str, width: int = 1) -> ModelDrafter:
    """The model as its own draft, which goes on however unsure it is: all of its greedy drafts are right."""
    return ModelDrafter(Target(itself(family)), 512, 512, width, confidence_threshold=0.0)


def plain(model: Any, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
    """The new tokens of transformers' `generate`, greedy unless the options say otherwise."""
    ids = torch.tensor([list(prompt)])
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0} | options
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def guard(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """A reference is worth comparing with when it is varied, and the model's choice clear at every position."""
    assert len(set(tokens)) >= MIN_DISTINCT, "the guard: too few different tokens for a comparison to mean anything"
    best = scores(model, [*prompt, *tokens])[len(prompt) - 1 : -1].topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) >= MIN_MARGIN, "the guard: a near-tie, which rounding may decide"


@cache
def greedy(family: str, prompt: Tokens, count: int) -> list[int]:
    """The family's guarded reference text."""
    tokens = plain(model(family), prompt, count)
    assert len(tokens) == count
    guard(model(family), prompt, tokens)
    return tokens


def full_texts(family: str, prompts: Sequence[Tokens], count: int) -> list[Tokens]:
    """Prompts with their reference texts, for drafters that know what comes."""
    return [(*prompt, *greedy(family, prompt, count)) for prompt in prompts]


# How an engine can be made to draft: (family, texts that will come) -> arguments of `load`.
METHODS: dict[str, Callable[[str, Sequence[Tokens]], dict[str, Any]]] = {
    "none": lambda family, texts: {"drafter": "none"},
    "suffix": lambda family, texts: {"drafter": "suffix"},
    "lookup": lambda family, texts: {"drafter": "lookup"},
    "recycle": lambda family, texts: {"drafter": "recycle"},
    "union": lambda family, texts: {"drafter": "suffix+recycle"},
    "jacobi": lambda family, texts: {"drafter": "jacobi"},
    "lookahead": lambda family, texts: (
        {"drafter": "lookahead", "lookahead": (4, 3, 4)} if family in TREE_FAMILIES else {"drafter": "jacobi"}
    ),
    "self": lambda family, texts: {"drafter": "self"},
    "early-exit": lambda family, texts: {
        "drafter": "early-exit" if family in ("llama", "mistral", "qwen3", "gemma3") else "self"
    },
    "itself": lambda family, texts: {"draft_model": itself(family)},
    "sure": lambda family, texts: {"drafter": sure(family)},
    "noisy": lambda family, texts: {"draft_model": noisy(family)},
    "noisy trees": lambda family, texts: {"draft_model": noisy(family), "width": 3},
    "other": lambda family, texts: {"draft_model": other(family)},
    "other trees": lambda family, texts: {"draft_model": other(family), "width": 2},
    "oracle": lambda family, texts: {"drafter": drafters.oracle(texts)},
    "random trees": lambda family, texts: {"drafter": drafters.random_trees(512, texts)},
    "duplicates": lambda family, texts: {"drafter": drafters.duplicate_siblings(texts)},
    "wrong": lambda family, texts: {"drafter": drafters.always_wrong(texts, 512)},
    "empty": lambda family, texts: {"drafter": drafters.empty()},
}
DRAFTING = tuple(name for name in METHODS if name not in ("none", "empty"))
# What these find depends on the text: they may draft nothing.
COPYING = ("suffix", "lookup", "recycle", "union")


def engine(family: str, method: str, texts: Sequence[Tokens] = (), **options: Any) -> outpace.Engine:
    """The family's model with one of METHODS."""
    return outpace.load(model(family), **METHODS[method](family, texts), **options)


def params(count: int, **options: Any) -> outpace.SamplingParams:
    return outpace.SamplingParams(max_new_tokens=count, **options)


def assert_drafts_were_mixed(*all_stats: outpace.Stats) -> None:
    """The guard of tests whose drafts are to be right and wrong."""
    accepted = sum(stats.num_accepted_tokens for stats in all_stats)
    rejected = sum(stats.num_rejected_tokens for stats in all_stats)
    assert accepted >= 5 and rejected >= 5, f"the guard: {accepted} drafts accepted and {rejected} rejected"
    assert all(stats.num_draft_failures == 0 for stats in all_stats)


def with_ends(model: Any, *ends: int) -> Any:
    """A copy of the model for which these tokens end the text."""
    copied = copy.deepcopy(model)
    copied.generation_config.eos_token_id = list(ends)
    return copied


def first_seen_at(tokens: Sequence[int], index: int) -> int:
    """The token at an index, which must not occur before it: then the text ends there and not earlier."""
    assert tokens.index(tokens[index]) == index, "the guard: the token occurs earlier; take another prompt or index"
    return tokens[index]


@cache
def tokenizer() -> Any:
    return tiny_tokenizer()


@cache
def writer() -> Any:
    """A model of that tokenizer's size that writes printable characters and no special tokens."""
    found = tiny_model("llama", vocab=len(tokenizer()))
    with torch.no_grad():
        for token in range(len(tokenizer())):
            text = tokenizer().decode([token], skip_special_tokens=True)
            if not (text and text.isascii() and text.isprintable()):
                found.lm_head.weight[token] = 0  # its score is 0, far below the best of the others
    return found


def decoded(tokens: Sequence[int]) -> str:
    text: str = tokenizer().decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


class Recorder:
    """Keeps the scores from which every token was chosen."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(scores[0].clone())
        return scores
