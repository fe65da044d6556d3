"""From what a user passes to a session: prompts, chats, ids and settings are checked here, before the first token."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from . import sampling
from .accept import Acceptance
from .errors import InputError
from .sampling import SamplingParams
from .session import Session, Stats
from .target import Target
from .text import Detokenizer

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages


@dataclass(frozen=True, slots=True)
class Requests:
    """Makes sessions for one target. end_ids: the model's end-of-text tokens; tokenizer: None for ids only."""

    target: Target
    tokenizer: Any
    end_ids: tuple[int, ...]
    acceptance: Acceptance
    drafter_name: str

    def session(self, prompt: Prompt, params: SamplingParams, with_text: bool) -> Session:
        """A session that is ready to decode, or InputError. with_text: whether to detokenise while decoding."""
        if not isinstance(params, SamplingParams):
            raise InputError(f"params must be SamplingParams, got {params!r}.")
        tokens = self.encode(prompt)
        limit = self.target.max_positions
        if limit is not None and len(tokens) + params.max_new_tokens > limit:
            raise InputError(
                f"The prompt has {len(tokens)} tokens and max_new_tokens is {params.max_new_tokens}, together more "
                f"than the {limit} positions of this model. Set max_new_tokens to {max(0, limit - len(tokens))} or "
                "less, or shorten the prompt."
            )
        self.target.check_unchanged()
        self.target.check_span(len(tokens), params.max_new_tokens)
        bad = [token for token in (*params.logit_bias, *params.stop_token_ids) if token >= self.target.vocab_size]
        if bad:
            raise InputError(f"Token id {bad[0]} is not in the model's vocabulary of {self.target.vocab_size}.")
        if self.tokenizer is None and params.stop:
            raise InputError("stop strings need a tokenizer, and this engine has none. Pass tokenizer= to load().")
        end_ids = params.ends(self.end_ids)
        processors = sampling.build_processors(params, len(tokens), end_ids, self.target.device)
        if self.acceptance != "coupled" and not params.is_greedy:
            for processor in processors:
                if not sampling.is_prefix_pure(processor):
                    raise InputError(
                        f"acceptance={self.acceptance!r} asks logits processors about drafts that may be "
                        f"refused, and {type(processor).__name__} is not known to be a pure function of the text. Use "
                        "acceptance='coupled', or give the processor the attribute is_prefix_pure = True if it is one."
                    )
        needs_text = self.tokenizer is not None and (with_text or params.stop)
        stats = Stats(
            acceptance=self.acceptance,
            is_lossless=self.acceptance != "typical" or params.is_greedy,
            drafter=self.drafter_name,
            num_prompt_tokens=len(tokens),
        )
        if not stats.is_lossless:
            stats.note("typical acceptance is not lossless: the text does not follow the target's distribution")
        return Session(
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(48),
            end_ids=frozenset(end_ids),
            processors=processors,
            detokenizer=Detokenizer(self.tokenizer, tuple(params.stop)) if needs_text else None,
            stats=stats,
            prediction=self._prediction(params),
        )

    def _prediction(self, params: SamplingParams) -> tuple[int, ...]:
        """The token ids of what the user expects back."""
        if not isinstance(params.prediction, str):
            return tuple(params.prediction)
        if not params.prediction:
            return ()
        if self.tokenizer is None:
            raise InputError("A prediction in words needs a tokenizer, and this engine has none. Give token ids.")
        return tuple(self.tokenizer(_encodable(params.prediction), add_special_tokens=False)["input_ids"])

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids; raises InputError for what is not a prompt."""
        if isinstance(prompt, Tensor | np.ndarray):
            prompt = prompt.tolist()
        if not isinstance(prompt, str) and all(_is_id(token) for token in prompt):
            tokens = [int(token) for token in prompt]  # type: ignore[arg-type]
        elif self.tokenizer is None:
            raise InputError("A prompt in words needs a tokenizer, and this engine has none: pass tokenizer= or ids.")
        elif isinstance(prompt, str):
            tokens = list(self.tokenizer(_encodable(prompt))["input_ids"])
        elif all(isinstance(message, Mapping) and "role" in message for message in prompt):
            if not self.tokenizer.chat_template:
                raise InputError("Chat messages need a chat template, and this tokenizer has none. Pass plain text.")
            tokens = list(
                self.tokenizer.apply_chat_template(
                    list(prompt), add_generation_prompt=True, tokenize=True, return_dict=True
                )["input_ids"]
            )
        else:
            raise InputError(
                f"A prompt is text, a list of token ids, or a list of chat messages, got {str(prompt)[:80]!r}."
            )
        if not tokens:
            raise InputError("The prompt is empty: there is no token to go on from. Give at least one.")
        bad = [token for token in tokens if not 0 <= token < self.target.vocab_size]
        if bad:
            raise InputError(f"The prompt holds token id {bad[0]}, outside the vocabulary of {self.target.vocab_size}.")
        return tokens


def _encodable(text: str) -> str:
    """The text, if it is Unicode; half characters come from decoding bytes that are no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"The prompt holds {text[error.start]!r}, which is no character. Decode it as UTF-8."
        ) from error
    return text


def _is_id(token: object) -> bool:
    return isinstance(token, Integral) and not isinstance(token, bool)


def is_batch_of_prompts(prompt: object) -> bool:
    """Whether a prompt argument is a list of prompts: of texts, of id lists, or of chats."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        if not isinstance(prompt, str | Sequence):
            raise InputError(f"prompt must be text, token ids, chat messages or a list of those, got {prompt!r}.")
        return False
    return len(prompt) > 0 and all(isinstance(item, str | list | tuple) for item in prompt)


def per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, is_batch: bool
) -> Sequence[SamplingParams]:
    """One SamplingParams per prompt, from one for all or one for each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not is_batch or len(params) != count:
        raise InputError(f"{len(params)} params were given for {count} prompt(s). Give one for all, or one per prompt.")
    return params
