"""What heads are worth: offline, along texts that the model writes, and online, as drafts of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..drafters.base import Budget
from ..engine import Engine
from ..heads.markov import MarkovHeads
from ..request import Prompt
from ..sampling import SamplingParams
from ..session import Session
from ..tree import TokenTree
from .run import evaluate
from .samples import Samples, Text, collect

_NUM_RANKS = 4
_NUM_BINS = 10


@dataclass(frozen=True, slots=True)
class Evaluation:
    """accuracies: of each head, given the right tokens before. by_rank: [head][rank] how often the text's token had
    this rank. calibration: [head] the mean gap between a probability and how often it came true, over tenths.
    acceptance: [depth] how often a draft was kept online, of the rounds whose drafts were kept up to there, in chains.
    tokens_per_pass, speed against plain decoding (of decoding alone): with trees, as large as pays. num_identical of
    num_texts."""

    accuracies: tuple[float, ...]
    by_rank: tuple[tuple[float, ...], ...]
    calibration: tuple[float, ...]
    acceptance: tuple[float, ...]
    tokens_per_pass: float
    speed: float
    num_identical: int
    num_texts: int


class _Chains:
    """A drafter of heads that may not branch."""

    def __init__(self, drafter: Any) -> None:
        self.name, self.hidden_layers, self._drafter = drafter.name, drafter.hidden_layers, drafter
        self.read, self.release = drafter.read, drafter.release

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        trees: Sequence[TokenTree] = self._drafter.propose(
            sessions, [replace(budget, can_branch=False) for budget in budgets]
        )
        return trees


def measure(
    plain: Engine,
    drafting: Engine,
    heads: MarkovHeads,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    progress: Callable[[int, int], None],
) -> Evaluation:
    """plain, drafting: engines of one model without and with these heads."""
    chains = Engine(
        plain.target,
        _Chains(drafting.drafter),
        plain.tokenizer,
        plain.end_ids,
        plain.capabilities,
        replace(plain.options, k=heads.num_heads),
    )
    texts, totals, same = [], [0.0, 0.0], 0
    drafted, accepted, tokens, passes = [0] * heads.num_heads, [0] * heads.num_heads, 0, 0
    drafting.generate(prompts[0], replace(params, max_new_tokens=8))
    for index, prompt in enumerate(prompts):
        progress(index, len(prompts))
        wanted = plain.generate(prompt, params)
        found, chained = drafting.generate(prompt, params), chains.generate(prompt, params)
        texts.append(Text((*wanted.prompt_tokens, *wanted.tokens), len(wanted.prompt_tokens)))
        totals = [totals[0] + wanted.stats.decode_seconds, totals[1] + found.stats.decode_seconds]
        same += found.tokens == wanted.tokens == chained.tokens
        tokens, passes = tokens + found.stats.num_new_tokens, passes + found.stats.num_verifications
        for counts, ours in (
            (drafted, chained.stats.drafted_by_depth),
            (accepted, chained.stats.accepted_by_depth),
        ):
            for depth, count in enumerate(ours[: heads.num_heads]):
                counts[depth] += count
    samples = collect(plain.target, texts)
    by_rank, calibration = _ranks(heads, samples)
    reached = [drafted[0], *accepted[:-1]]
    return Evaluation(
        evaluate(heads, samples, heads.num_heads),
        by_rank,
        calibration,
        tuple(kept / max(1, asked) for kept, asked in zip(accepted, reached, strict=True)),
        tokens / passes,
        totals[0] / totals[1],
        same,
        len(prompts),
    )


@torch.no_grad()
def _ranks(heads: MarkovHeads, samples: Samples) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]:
    """(by_rank, calibration) of an Evaluation."""
    places, steps = samples.anchors(heads.num_heads), torch.arange(heads.num_heads)
    logits, _ = heads(samples.hidden[places].float(), samples.tokens[places[:, None] + 1 + steps])
    values, rows = logits.softmax(-1).topk(min(_NUM_RANKS, logits.shape[-1]))
    labels = samples.tokens[places + 2 + steps[:, None]]
    hits = (heads.token_map[rows] == labels[..., None]).float()
    best, is_hit = values[..., 0], hits[..., 0]
    bins = (best * _NUM_BINS).long().clamp_max(_NUM_BINS - 1)
    gaps = []
    for head in range(heads.num_heads):
        gap = 0.0
        for tenth in range(_NUM_BINS):
            mine = bins[head] == tenth
            if mine.any():
                gap += float((best[head][mine].mean() - is_hit[head][mine].mean()).abs() * mine.float().mean())
        gaps.append(gap)
    return tuple(tuple(row) for row in hits.mean(1).tolist()), tuple(gaps)


def as_rows(found: Evaluation) -> list[list[Any]]:
    """One row per head: depth, accuracy, ranks, calibration, acceptance online."""
    return [
        [depth + 1, accuracy, *ranks, gap, kept]
        for depth, (accuracy, ranks, gap, kept) in enumerate(
            zip(found.accuracies, found.by_rank, found.calibration, found.acceptance, strict=True)
        )
    ]
