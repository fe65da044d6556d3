"""Random calls of `generate`, each a pure function of one number: model, prompts, drafter, arguments and callbacks.

    draw(7).arguments  # {'max_new_tokens': 31, 'eos_token_id': [44, 10], ...}

Tokens in arguments are mostly such as the model really writes, from a first plain run: a forbidden token that would
never have come, or an end that is never met, tests nothing. What is done with a draw is in `campaign`.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from . import drafters
from .models import FAMILIES, attentions, noisy_copy, tiny_model

VOCAB = 512
PAD = VOCAB - 1  # stands left of short prompts, and is no token of a prompt or of an argument

Tokens = tuple[int, ...]
SCRIPTED = ("oracle", "always wrong", "empty", "end spam", "duplicate siblings", "random trees")
FAULTY: dict[str, Callable[[], Any]] = {**drafters.BROKEN, **drafters.ODD, "branches": drafters.BRANCHING}
CALLBACKS = ("processor", "criterion", "prefix", "streamer")
# Arguments whose effect on a row depends on its padding or on the rows beside it.
NOT_OF_A_ROW_ALONE = (
    *("max_length", "min_length", "forced_bos_token_id", "no_repeat_ngram_size"),
    *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size"),
)


@dataclass(frozen=True, slots=True)
class Draw:
    """One call of `generate`, or two that share a cache, in plain data.

    drafter: a name of `outpace.load`, of SCRIPTED or of FAULTY; "model" drafts with a noisy copy. width: of its tree,
    where the family takes trees. entry: "fast.generate" or "custom_generate". arguments: of generate. callbacks: those
    of CALLBACKS that are given. seed: None is greedy. more: what a second turn adds to each row; () for one turn.
    turns: who is asked in each turn, "fast" or "plain".
    """

    number: int
    family: str
    attention: str
    prompts: tuple[Tokens, ...]
    drafter: str
    width: int
    k: int
    confidence_threshold: float
    prefill_chunk: int
    entry: str
    arguments: dict[str, Any]
    callbacks: tuple[str, ...]
    seed: int | list[int] | None
    more: tuple[Tokens, ...]
    turns: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        return len(self.prompts) * self.num_returned

    @property
    def num_returned(self) -> int:
        return int(self.arguments.get("num_return_sequences", 1))

    @property
    def seeds(self) -> list[int | None]:
        """Of each row; None when greedy."""
        if isinstance(self.seed, list):
            return list(self.seed)
        return [None if self.seed is None else self.seed + row % self.num_returned for row in range(self.num_rows)]

    @property
    def has_rows_alone(self) -> bool:
        """Whether each row's text is that of a call with this row alone and without padding."""
        return not self.callbacks and not self.more and not set(self.arguments) & set(NOT_OF_A_ROW_ALONE)


@cache
def model_of(family: str, attention: str) -> Any:
    """The family's tiny model; the same object each time."""
    return tiny_model(family, attn_implementation=attention)


@cache
def draft_of(family: str) -> Any:
    """A noisy copy of the family's model, which is right about half of the time."""
    return noisy_copy(tiny_model(family))


@cache
def _attentions(family: str) -> tuple[str, ...]:
    return attentions(family)


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings: drafters that are broken on purpose, and arguments without effect, cause them."""
    logger = logging.getLogger("outpace")
    level, verbosity = logger.level, transformers.logging.get_verbosity()
    logger.setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        transformers.logging.set_verbosity(verbosity)


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """input_ids and attention_mask [rows, length] int64 of prompts, padded on the left."""
    length = max(len(prompt) for prompt in prompts)
    ids = [[PAD] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def draw(number: int) -> Draw:
    """The draw of a number: always the same one, while the families and the options below are the same."""
    rng = random.Random(number)
    # Another family among them takes over some draws, and leaves the others as they were.
    family = max(FAMILIES, key=lambda name: random.Random(f"{number} {name}").random())
    attention = rng.choice(_attentions(family))
    prompts = tuple(_prompt(rng) for _ in range(rng.choice((1, 2, 2, 3, 4))))
    num_new = rng.randint(1, 40)
    is_greedy = rng.random() < 0.6
    has_two_turns = rng.random() < 0.25
    given = _arguments(
        rng, _written(family, attention, prompts, num_new), padded(prompts)["input_ids"].shape[1], num_new
    )
    if has_two_turns:
        for name in ("max_length", "use_cache", "num_return_sequences"):
            given.pop(name, None)
        given |= {"max_new_tokens": num_new, "return_dict_in_generate": True}
    seed: int | list[int] | None = None
    if not is_greedy:
        given |= _sampling(rng)
        if has_two_turns:
            given.pop("num_return_sequences", None)
        num_rows = len(prompts) * given.get("num_return_sequences", 1)
        seed = rng.randrange(10**6) if rng.random() < 0.5 else [rng.randrange(10**6) for _ in range(num_rows)]
    added = rng.randint(1, 20)
    has_callbacks = rng.random() < 0.5
    turns = rng.choice((("fast", "fast"), ("plain", "fast"), ("fast", "plain"))) if is_greedy else ("fast", "fast")
    return Draw(
        number=number,
        family=family,
        attention=attention,
        prompts=prompts,
        drafter=_drafter(rng),
        width=rng.randint(1, 3),
        k=rng.randint(1, rng.choice((6, 16))),
        confidence_threshold=rng.choice((0.0, 0.3)),
        prefill_chunk=rng.choice((1, 3, 16, 512, 512)),
        entry=rng.choice(("fast.generate", "custom_generate")),
        arguments={"do_sample": not is_greedy, **given},
        callbacks=tuple(name for name in CALLBACKS if has_callbacks and rng.random() < 0.3),
        seed=seed,
        more=tuple(_random_tokens(rng, added) for _ in prompts) if has_two_turns else (),
        turns=turns if has_two_turns else ("fast",),
    )


def _random_tokens(rng: random.Random, length: int) -> Tokens:
    return tuple(rng.randrange(PAD) for _ in range(length))


def _prompt(rng: random.Random) -> Tokens:
    """1 to 60 tokens, shorter and longer than windows of 16, half of the time a few tokens over and over."""
    length = rng.randint(*rng.choice(((1, 4), (5, 14), (15, 18), (19, 60))))
    if rng.random() < 0.5:
        return _random_tokens(rng, length)
    return (_random_tokens(rng, rng.randint(2, 9)) * length)[:length]


def _drafter(rng: random.Random) -> str:
    plain = ["suffix"] * 3 + ["lookup"] * 2 + ["none"]
    knowing = ["oracle", "random trees", "duplicate siblings"]
    kinds = (plain, plain, ["model"], ["model"], ["model"], knowing, list(SCRIPTED), list(FAULTY))
    return rng.choice(rng.choice(kinds))


def _written(family: str, attention: str, prompts: Sequence[Tokens], num_new: int) -> Tokens:
    """What the model writes after the prompts, row after row; made up where transformers cannot run it."""
    try:
        with quiet():
            found = model_of(family, attention).generate(**padded(prompts), do_sample=False, max_new_tokens=num_new)
    except Exception:  # the campaign finds out, too, and says so
        return tuple(range(1, 40))
    new = found[:, padded(prompts)["input_ids"].shape[1] :].flatten().tolist()
    return tuple(token for token in new if token != PAD) or (0,)


def _arguments(rng: random.Random, written: Tokens, length: int, num_new: int) -> dict[str, Any]:
    """A random subset of the arguments that greedy decoding heeds. length: of the padded prompts."""

    def token() -> int:
        return rng.choice(written) if rng.random() < 0.8 else rng.randrange(PAD)

    def tokens(most: int = 3) -> list[int]:
        return [token() for _ in range(rng.randint(1, most))]

    def phrase() -> list[int]:
        """One to three tokens as they follow each other in the text."""
        start = rng.randrange(len(written))
        return list(written[start : start + rng.randint(1, 3)])

    makers: dict[str, tuple[float, Callable[[], Any]]] = {
        "repetition_penalty": (0.2, lambda: rng.choice((0.5, 0.8, 1.1, 1.4))),
        "encoder_repetition_penalty": (0.08, lambda: rng.choice((0.7, 1.3))),
        "no_repeat_ngram_size": (0.12, lambda: rng.randint(1, 4)),
        "encoder_no_repeat_ngram_size": (0.06, lambda: rng.randint(2, 3)),
        "bad_words_ids": (0.12, lambda: [phrase() for _ in range(rng.randint(1, 3))]),
        "sequence_bias": (0.12, lambda: [[phrase(), rng.choice((-8.0, 4.0))]]),
        "suppress_tokens": (0.12, tokens),
        "begin_suppress_tokens": (0.12, tokens),
        "forced_bos_token_id": (0.05, token),
        "forced_eos_token_id": (0.1, token),
        "min_new_tokens": (0.12, lambda: rng.randint(1, num_new)),
        "min_length": (0.1, lambda: length + rng.randint(0, num_new)),
        "renormalize_logits": (0.1, lambda: True),
        "remove_invalid_values": (0.05, lambda: True),
        "return_dict_in_generate": (0.4, lambda: True),
        "output_scores": (0.25, lambda: True),
        "output_logits": (0.25, lambda: True),
        "pad_token_id": (0.5, lambda: rng.choice((PAD, token()))),
        "use_cache": (0.06, lambda: False),
        "num_return_sequences": (0.02, lambda: 2),  # transformers refuses it without sampling
        "eos_token_id": (0.55, lambda: tokens() if rng.random() < 0.8 else token()),
    }
    found = {name: make() for name, (chance, make) in makers.items() if rng.random() < chance}
    if rng.random() < (0.25 if "eos_token_id" in found else 0.03):  # transformers refuses it without an end
        found["exponential_decay_length_penalty"] = (rng.randint(0, num_new), rng.choice((1.01, 1.05)))
    end, value = ("max_length", length + num_new) if rng.random() < 0.15 else ("max_new_tokens", num_new)
    return {end: value, **found}


def _sampling(rng: random.Random) -> dict[str, Any]:
    """A random subset of the arguments of sampling."""
    makers: dict[str, tuple[float, Callable[[], Any]]] = {
        "temperature": (0.8, lambda: rng.choice((0.5, 1.0, 1.5, 3.0))),
        "top_k": (0.5, lambda: rng.choice((0, 2, 20, 50))),
        "top_p": (0.4, lambda: rng.choice((0.5, 0.9, 0.99))),
        "min_p": (0.2, lambda: rng.choice((0.02, 0.2))),
        "typical_p": (0.2, lambda: rng.choice((0.5, 0.95))),
        "epsilon_cutoff": (0.1, lambda: 3e-4),
        "eta_cutoff": (0.1, lambda: 1e-3),
        "top_h": (0.1, lambda: 0.4),
        "num_return_sequences": (0.25, lambda: rng.randint(2, 3)),
    }
    return {name: make() for name, (chance, make) in makers.items() if rng.random() < chance}
