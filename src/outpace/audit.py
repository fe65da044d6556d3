"""The promise, executable: decode with and without drafts, find the first difference, and say tie or bug.

Two forwards of different shapes round differently. Where the two best choices are nearer to each other than that
rounding can move them, either is right: a tie. A difference anywhere else is a bug of ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import noise, sampling
from .cache import Cache
from .engine import Engine
from .request import Prompt
from .sampling import SamplingParams
from .session import Result
from .target import Block, Target


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which two runs differ.

    index: among the generated tokens. plain, speculative: (token, score), the score that decides under the plain
    forward: the logit over temperature, plus the position's noise. gap: how far the plain forward is from choosing the
    other token; threshold: how far rounding can move that. is_tie: gap <= threshold.
    """

    index: int
    plain: tuple[int, float]
    speculative: tuple[int, float]
    gap: float
    threshold: float

    @property
    def is_tie(self) -> bool:
        return self.gap <= self.threshold


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prompt decoded twice with the same settings. difference: None when all tokens are the same."""

    plain: Result
    speculative: Result
    difference: Difference | None


def compare(engine: Engine, prompt: Prompt, params: SamplingParams, rounding: float) -> Comparison:
    """Decode with and without drafts under one seed. rounding: see `measure_rounding`."""
    speculative = engine.generate(prompt, params)
    plain = engine.without_drafts().generate(prompt, replace(params, seed=speculative.seed))
    return Comparison(plain, speculative, find_difference(engine, plain, speculative, params, rounding))


def compare_stock(
    engine: Engine, prompt: Prompt, params: SamplingParams, speculative: Result, rounding: float
) -> Comparison:
    """The same against the user's model itself, where the engine decodes with other layers. speculative: what the
    engine gave for this prompt. rounding: against the stock model."""
    stock = engine.without_drafts(is_stock=True)
    plain = stock.generate(prompt, replace(params, seed=speculative.seed))
    return Comparison(plain, speculative, find_difference(stock, plain, speculative, params, rounding))


def find_difference(
    engine: Engine, plain: Result, speculative: Result, params: SamplingParams, rounding: float
) -> Difference | None:
    """The first token that differs between two results of one prompt and seed, judged; None when there is none."""
    pairs = zip(plain.tokens, speculative.tokens, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        return None if len(plain.tokens) == len(speculative.tokens) else _end_difference(plain, speculative)
    text = plain.prompt_tokens + plain.tokens[:index]
    scores = _scores(engine, text, params, len(plain.prompt_tokens))
    position, tokens = len(text), (plain.tokens[index], speculative.tokens[index])
    first, second = (_decisive_score(scores, params, plain.seed, position, token) for token in tokens)
    gap, scale = abs(first - second), 1.0
    if not params.is_greedy:
        scale = params.temperature
        cuts = [_distance_to_cut(scores, params, token) for token in tokens]
        gap = min(gap, *cuts)
    # Each of the two scores may be off by the rounding.
    return Difference(index, (tokens[0], first), (tokens[1], second), gap, 2 * rounding / scale)


def _end_difference(plain: Result, speculative: Result) -> Difference:
    """One text goes on where the other ended: no score can excuse that."""
    index = min(len(plain.tokens), len(speculative.tokens))
    return Difference(index, (-1, math.nan), (-1, math.nan), math.inf, 0.0)


def _scores(engine: Engine, text: Sequence[int], params: SamplingParams, prompt_length: int) -> Tensor:
    """[vocab] processed logits after `text`, from a plain forward. Stateful processors are not asked again."""
    logits = _plain_logits(engine.target, text, 1)[0]
    own = sampling.build_processors(params, prompt_length, params.ends(engine.end_ids), logits.device)
    pure = [processor for processor in own if sampling.is_prefix_pure(processor)]
    return sampling.process(logits, pure, torch.tensor([list(text)], device=logits.device))


def _decisive_score(scores: Tensor, params: SamplingParams, seed: int, position: int, token: int) -> float:
    if params.is_greedy:
        return float(scores[token])
    noise_of_token = noise.gumbel(seed, position, torch.tensor([token], device=scores.device))
    return float(scores[token]) / params.temperature + float(noise_of_token)


def _distance_to_cut(scores: Tensor, params: SamplingParams, token: int) -> float:
    """How near a token is to being cut off (or kept) by top-k, top-p or min-p, in units of score."""
    scores = scores / params.temperature
    own = scores[token]
    distances = [math.inf]
    if 0 < params.top_k < scores.shape[0]:
        last_kept, first_cut = scores.topk(params.top_k + 1).values[-2:]
        distances.append(abs(float(own - (first_cut if own >= last_kept else last_kept))))
        scores = scores.masked_fill(scores < last_kept, -math.inf)  # top-p counts the mass of what top-k leaves
    if params.top_p < 1:
        mass_before = float(scores.softmax(0)[scores > own].sum())
        distances.append(abs(mass_before - params.top_p))
    if params.min_p > 0:
        distances.append(abs(float(own - scores.max()) - math.log(params.min_p)))
    return min(distances)


def measure_rounding(
    target: Target, text: Sequence[int], block: int = 8, num_blocks: int = 4, reference: Target | None = None
) -> float:
    """The largest difference in logits between a block of tokens and the same tokens one at a time, on this text.

    This is what "block rounding error" means: of this model, dtype and device, in blocks of `block` tokens. It is at
    least one unit in the last place of the largest logit: the smallest difference before can move one that far.
    reference: a target with other layers, whose single tokens are taken.
    """
    total = min(len(text) - 1, block * num_blocks)
    single = _plain_logits(reference or target, text, total)
    worst = torch.finfo(target.dtype).eps * float(single.abs().max())
    cache = target.new_cache()
    row = cache.add_row()
    start = len(text) - total
    _feed(target, cache, row, text[:start])
    for begin in range(0, total, block):
        part = text[start + begin : start + min(begin + block, total)]
        found = _feed(target, cache, row, part, num_logits=len(part))
        worst = max(worst, float((found - single[begin : begin + len(part)]).abs().max()))
    return worst


def measure_roundings(engine: Engine, text: Sequence[int]) -> tuple[float, float]:
    """(of the engine's own layers, against the user's model itself), see `measure_rounding`; equal if both are one."""
    own = measure_rounding(engine.target, text)
    stock = engine.without_drafts(is_stock=True).target
    if stock is engine.target:
        return own, own
    return own, max(own, measure_rounding(engine.target, text, reference=stock))


def _plain_logits(target: Target, text: Sequence[int], count: int) -> Tensor:
    """[count, vocab] float32: the logits after each of the last `count` tokens, decoded one at a time."""
    cache = target.new_cache()
    row = cache.add_row()
    if len(text) > count:
        _feed(target, cache, row, text[:-count])
    return torch.cat([_feed(target, cache, row, [token], num_logits=1) for token in text[-count:]])


def _feed(target: Target, cache: Cache, row: int, tokens: Sequence[int], num_logits: int = 0) -> Tensor:
    """Commit tokens to a row, in chunks; the logits of the last `num_logits` of them."""
    logits = torch.empty(0)
    for begin in range(0, len(tokens), 512):
        part = tokens[begin : begin + 512]
        (output,) = target.forward(cache, [Block.chain(row, part, num_logits=min(num_logits, len(part)))])
        cache.keep(row, range(len(part)))
        logits = output.logits
    return logits.to(torch.float32)
