"""Applies an acceptance rule to one row: from the target's logits over a tree to committed tokens.

Knows sessions, sampling and the rules; no model, cache or drafter. Logits processors run here: under coupled
acceptance once per committed token, in order, on the exact text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from . import noise, sampling, verify
from .session import Session, TokenLogprob
from .tree import TokenTree

Acceptance = Literal["coupled", "rejection", "typical"]
ACCEPTANCES: tuple[Acceptance, ...] = ("coupled", "rejection", "typical")


def accept(session: Session, tree: TokenTree, logits: Tensor, acceptance: Acceptance) -> verify.Verdict:
    """Decide what is kept and commit what is emitted. logits: [nodes, vocab] of the target, any float dtype.

    Greedy decoding is the same under every rule: the walk of the target's own choices.
    """
    if acceptance == "coupled" or session.params.is_greedy:
        return verify.coupled(tree, _chooser(session, logits), session.commit)
    probs = _target_probs(session, tree, logits)
    position = len(session.tokens)
    flips = iter(range(1 << 30))

    def coin(probability: float) -> bool:
        return noise.coin(session.seed, position, next(flips)) < probability

    def draw(p: Tensor) -> int:
        return noise.choose(p.log(), None, session.seed, position)

    verdict = (
        verify.rejection(tree, probs, coin, draw) if acceptance == "rejection" else verify.typical(tree, probs, draw)
    )
    num_committed = 0
    for node, token in zip(verdict.path, verdict.tokens, strict=True):
        _report(session, logits[node], token)
        num_committed += 1
        if not session.commit(token):
            break
    # Nothing behind the end of the text was accepted.
    return verify.Verdict(verdict.path[:num_committed], verdict.tokens[:num_committed])


def _chooser(session: Session, logits: Tensor) -> Callable[[int], int]:
    """node -> the token of plain decoding there; asked in order, once per committed token."""
    params, processors = session.params, session.processors
    if params.is_greedy and not processors and params.logprobs is None:
        tokens = sampling.greedy_tokens(logits)
        if tokens is not None:
            return tokens.__getitem__

    def choose(node: int) -> int:
        text = session.text_ids(logits.device) if processors else None
        scores = sampling.process(logits[node], processors, text)
        token = sampling.choose(scores, params, session.seed, len(session.tokens))
        _report(session, logits[node], token)
        return token

    return choose


def _target_probs(session: Session, tree: TokenTree, logits: Tensor) -> Callable[[int], Tensor]:
    known: dict[int, Tensor] = {}

    def probs(node: int) -> Tensor:
        if node not in known:
            text = None
            if session.processors:
                drafts = [tree.tokens[step] for step in tree.path(node)[1:]]
                text = session.text_ids(logits.device, drafts)
            scores = sampling.process(logits[node], session.processors, text)
            known[node] = sampling.probabilities(scores, session.params)
        return known[node]

    return probs


def _report(session: Session, logits: Tensor, token: int) -> None:
    """Add the token's log-probability to the session, when the request asked for it."""
    count = session.params.logprobs
    if count is None:
        return
    log_probs = logits.to(torch.float32).log_softmax(-1)
    values, ids = log_probs.topk(min(count, log_probs.shape[0]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    session.logprobs.append(TokenLogprob(token, float(log_probs[token]), top))
