"""Logits -> the distribution that is sampled. The only place that knows temperature, top-p and penalties.

The order is that of transformers' `generate`: processors that look at the text, then temperature, top-k, top-p,
min-p. Greedy is temperature 0: no noise and no truncation, the argmax of the processed logits.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkLogitsProcessor,
)

from . import noise
from .errors import EngineError, InputError

# Truncation looks at this many of the likeliest tokens before it sorts the whole vocabulary.
_NUCLEUS_GUESS = 256


class LogitsProcessor(Protocol):
    """transformers' processor interface."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: [1, length] int64 the exact text so far; scores: [1, vocab] float32. Returns [1, vocab]."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded.

    temperature: 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. seed None draws one and returns it in the result.
    repetition_penalty: over prompt and output, as in transformers. presence_penalty, frequency_penalty: over the
    output, as in OpenAI's API. logit_bias: token id -> number added to its logit.
    max_new_tokens, min_new_tokens: tokens generated, the end-of-text token included.
    stop: strings that end the text; they are not part of it. stop_token_ids: ids that end it beside the model's own.
    ignore_eos: go on past the model's end-of-text tokens. logprobs: how many alternatives to report per token
    (0: only the token itself; None: off), from the raw logits of the target.
    logits_processors: transformers' processors, called once per committed token, in order, on the exact text.
    prediction: the text that is expected back, as text or token ids, for instance a file of which a part shall change:
    drafters may copy from it; it does not change the output. tenant: drafts are copied from this request's own text
    and from earlier outputs of the same tenant only.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    prediction: str | Sequence[int] = ()
    tenant: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _number("temperature", self.temperature, lambda x: x == 0 or x >= 1e-30, "0 (greedy), or 1e-30 or larger")
        _number("top_p", self.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1 (1 = off)")
        _integer("top_k", self.top_k, 0, "0 (off) or larger")
        _number("min_p", self.min_p, lambda x: 0 <= x <= 1, "between 0 (off) and 1")
        _number("repetition_penalty", self.repetition_penalty, lambda x: x > 0, "above 0 (1 = off)")
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), lambda x: True, "a finite number (0 = off)")
        _integer("max_new_tokens", self.max_new_tokens, 1, "1 or larger")
        _integer("min_new_tokens", self.min_new_tokens, 0, "0 or larger")
        if self.seed is not None:
            _integer("seed", self.seed, 0, "0 or larger, or None to have one drawn")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, "0 or larger, or None for no logprobs")
        for name in ("stop", "stop_token_ids", "logits_processors"):
            _list(name, getattr(self, name))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InputError(f"stop must hold non-empty strings, got {text!r}. Remove it or give its text.")
        for token in self.stop_token_ids:
            _integer("stop_token_ids: token id", token, 0, "0 or larger")
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos must be True or False, got {self.ignore_eos!r}.")
        if not isinstance(self.logit_bias, Mapping):
            raise InputError(f"logit_bias must map token ids to numbers, as in {{42: -5.0}}, got {self.logit_bias!r}.")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias: token id", token, 0, "0 or larger")
            _number(f"logit_bias[{token}]", bias, lambda x: True, "a finite number")
        if not isinstance(self.prediction, str):
            _list("prediction", self.prediction)
            for token in self.prediction:
                _integer("prediction: token id", token, 0, "0 or larger")
        if not isinstance(self.tenant, str):
            raise InputError(f"tenant must be a string, got {self.tenant!r}.")
        for processor in self.logits_processors:
            if not callable(processor):
                raise InputError(f"logits_processors must hold callables, got {processor!r}.")

    def ends(self, model_end_ids: Sequence[int]) -> tuple[int, ...]:
        """The token ids that end this request's text: the model's, unless ignored, and its own."""
        return (*(() if self.ignore_eos else model_end_ids), *self.stop_token_ids)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _number(name: str, value: object, is_good: Callable[[float], bool], wanted: str) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= sys.float_info.max  # NaN, infinity and integers beyond any float
        or not is_good(value)
    ):
        raise InputError(f"{name} must be a number, {wanted}, got {value!r}.")


def _integer(name: str, value: object, least: int, wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number, {wanted}, got {value!r}.")


def _list(name: str, value: object) -> None:
    if not isinstance(value, Collection) or isinstance(value, str | bytes):
        raise InputError(f"{name} must be a list, got {value!r}.")


class _OutputPenalty:
    """Presence and frequency penalties over the generated tokens: logit -= presence + frequency * count."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        seen, counts = input_ids[0, self.prompt_length :].unique(return_counts=True)
        scores = scores.clone()
        scores[0, seen] -= self.presence + self.frequency * counts.to(scores.dtype)
        return scores


class _LogitBias:
    def __init__(self, bias: Mapping[int, float], device: torch.device) -> None:
        self.ids = torch.tensor(list(bias), device=device)
        self.values = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_add(1, self.ids, self.values.unsqueeze(0).to(scores.dtype))


# Processors whose result for a row depends on its text and scores alone: they may be asked about drafts that are then
# refused, and about one row of a batch. Exact types: a subclass may remember something.
_PREFIX_PURE = frozenset(
    (
        _OutputPenalty,
        _LogitBias,
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        ExponentialDecayLengthPenalty,
        ForcedBOSTokenLogitsProcessor,
        ForcedEOSTokenLogitsProcessor,
        InfNanRemoveLogitsProcessor,
        LogitNormalization,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        MinPLogitsWarper,
        NoBadWordsLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopHLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
        WatermarkLogitsProcessor,
    )
)


def is_prefix_pure(processor: LogitsProcessor) -> bool:
    """Whether a processor is known to be a pure function of a row's text (or says so by `is_prefix_pure = True`)."""
    return type(processor) in _PREFIX_PURE or getattr(processor, "is_prefix_pure", False) is True


def for_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """The processor of one row of a batch, from a prefix-pure one that was made for the batch."""
    lengths = getattr(processor, "prompt_ignore_length", None)  # a repetition penalty skips each row's left padding
    if type(processor) is not RepetitionPenaltyLogitsProcessor or not isinstance(lengths, Tensor):
        return processor
    single = copy.copy(processor)
    single.prompt_ignore_length = lengths[row : row + 1]
    return single


def build_processors(
    params: SamplingParams, prompt_length: int, eos_token_ids: Sequence[int], device: torch.device
) -> list[LogitsProcessor]:
    """The processors of one request in transformers' order; the user's own come last."""
    found: list[LogitsProcessor] = []
    if params.logit_bias:
        found.append(_LogitBias(params.logit_bias, device))
    if params.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.presence_penalty or params.frequency_penalty:
        found.append(_OutputPenalty(prompt_length, params.presence_penalty, params.frequency_penalty))
    if params.min_new_tokens and eos_token_ids:
        ends = list(eos_token_ids)
        found.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_new_tokens, ends, device=str(device)))
    return [*found, *params.logits_processors]


def process(logits: Tensor, processors: Sequence[LogitsProcessor], text: Tensor | None) -> Tensor:
    """[vocab] float32: the logits after every processor. text: [1, length] int64, None when there is none to run."""
    scores = logits.to(torch.float32, copy=bool(processors))  # processors may write into what they are given
    if processors:
        assert text is not None, "processors need the text"
        scores = scores.unsqueeze(0)
        for processor in processors:
            scores = processor(text, scores)
        scores = scores[0]
    return scores


def _count_kept(scores: Tensor, log_total: float, params: SamplingParams) -> int:
    """How many of the likeliest tokens survive. scores: [n] sorted, largest first; exp(log_total): all their mass."""
    kept = scores.shape[0]
    if 0 < params.top_k < kept:
        kept = int((scores >= scores[params.top_k - 1]).sum())  # ties with the last one stay, as in transformers
        log_total = float(scores[:kept].logsumexp(0))
    if params.top_p < 1:
        mass_before = (scores[: kept - 1] - log_total).exp().cumsum(0)
        kept = 1 + int((mass_before < params.top_p).sum())
    if params.min_p > 0:
        kept = min(kept, int((scores >= scores[0] + math.log(params.min_p)).sum()))
    return max(kept, 1)


def warp(scores: Tensor, params: SamplingParams) -> tuple[Tensor | None, Tensor]:
    """The distribution that is sampled, for temperature > 0: (ids, log-probabilities of those ids).

    scores: [vocab] float32 processed logits. ids: [kept] int64, likeliest first, or None when nothing is cut off;
    then the second part has [vocab] entries. Cutting a sorted list is all that top-k, top-p and min-p do, so the
    whole vocabulary is sorted only when a short list of its likeliest tokens does not settle the cut.
    """
    scores = scores / params.temperature
    if params.top_k == 0 and params.top_p >= 1 and params.min_p == 0:
        return None, scores.log_softmax(0)
    log_total = float(scores.logsumexp(0))
    guess = min(max(_NUCLEUS_GUESS, params.top_k + 1), scores.shape[0])
    values, ids = scores.topk(guess)
    kept = _count_kept(values, log_total, params)
    settled = kept < guess and values[kept - 1] > values[kept]
    if 0 < params.top_k < guess and values[params.top_k - 1] == values[-1] > -math.inf:
        settled = False  # ties with the last of the top-k go on after the short list, and have mass too
    if not settled:
        values, ids = scores.sort(descending=True, stable=True)
        kept = _count_kept(values, log_total, params)
    return ids[:kept], values[:kept].log_softmax(0)


def _check_scores(is_bad: Tensor, where: str = "") -> None:
    if is_bad:
        raise EngineError(
            f"The target's scores{where} are not numbers or forbid every token, so no token can be chosen. "
            "Its weights or a logits processor produced NaN or infinity; try dtype='float32'."
        )


def choose(scores: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The token of plain decoding at a position: argmax of log p + noise. scores: [vocab] processed logits."""
    if params.is_greedy:
        best = scores.argmax()
        _check_scores(scores[best].isnan() | scores[best].isneginf(), f" at position {position}")
        return int(best)
    ids, log_probs = warp(scores, params)
    _check_scores(log_probs.isnan().any(), f" at position {position}")
    return noise.choose(log_probs, ids, seed, position)


def preferences(chances: Sequence[float], noise: Sequence[float], params: SamplingParams) -> list[float]:
    """Shares, summing to 1, of a few tokens by their noisy scores log p / temperature + g; for drafts, which guess."""
    scores = [math.log(p) / params.temperature + g if p > 0 else -math.inf for p, g in zip(chances, noise, strict=True)]
    most = max(scores)
    weights = [math.exp(score - most) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def greedy_tokens(logits: Tensor) -> list[int] | None:
    """The argmax of each row of [nodes, vocab] raw logits; None when one of them has no number to choose."""
    scores, tokens = logits.max(-1)
    return tokens.tolist() if bool(scores.isfinite().all()) else None


def probabilities(scores: Tensor, params: SamplingParams) -> Tensor:
    """[vocab] float64: the distribution that is sampled, as a dense vector; one-hot when greedy."""
    probs = torch.zeros(scores.shape[0], dtype=torch.float64, device=scores.device)
    if params.is_greedy:
        probs[scores.argmax()] = 1.0
        return probs
    ids, log_probs = warp(scores, params)
    _check_scores(log_probs.isnan().any())
    exact = log_probs.to(torch.float64).exp()
    exact /= exact.sum()
    return exact if ids is None else probs.index_copy(0, ids, exact)
