"""Drafts from what the target said before: the likeliest successors of every token that it has seen.

Token Recycling (Luo et al., arXiv 2408.08696): each forward scores every node of the verified tree, and the best
successors of each node's token are remembered, for all later requests. A draft follows them from the last token.
Beyond the paper, successors are remembered by the last two tokens where they were seen together, their probabilities
are kept, and the tree takes the likeliest paths instead of a fixed shape.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..session import Session
from ..tree import TokenTree
from .base import Budget
from .candidates import Candidates, drawn

NUM_SUCCESSORS = 8
_LANES = 64
# The probability of a successor was measured after another text; how far it holds here.
_TRUST = {"pair": 0.9, "token": 0.6}


def best_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(scores, ids), both [nodes, count], best first: topk, which on CPU is several times slower in one piece."""
    nodes, vocab = logits.shape
    groups = -(-vocab // _LANES)
    if groups < 2 * count or logits.device.type != "cpu":
        return logits.topk(min(count, vocab))
    if groups * _LANES > vocab:
        logits = torch.nn.functional.pad(logits, (0, groups * _LANES - vocab), value=-torch.inf)
    # Group g holds the tokens g, g + groups, ...; the best `count` lie in the `count` groups with the largest maxima.
    lanes = logits.view(nodes, _LANES, groups)
    best = lanes.amax(1).topk(count).indices
    members = lanes.gather(2, best[:, None].expand(-1, _LANES, -1)).flatten(1)
    scores, places = members.topk(count)
    return scores, places // count * groups + best.gather(1, places % count)


# The kind of a draft, by which a union calibrates it: what it was remembered by, its rank, its probability in eighths.
_KINDS = {
    by: [[f"recycle {by} r{rank} p{eighth}" for eighth in range(9)] for rank in range(NUM_SUCCESSORS)]
    for by in ("pair", "token")
}


class RecycleDrafter:
    """Trees of remembered successors. vocab_size: of the target. One memory serves all requests.

    Successors are remembered by the last two tokens, for the latest `max_pairs` pairs, and by the last one.
    """

    name = "recycle"

    def __init__(self, vocab_size: int, max_pairs: int = 200_000) -> None:
        self._ids = np.full((vocab_size, NUM_SUCCESSORS), -1, dtype=np.int32)
        self._chances = np.zeros((vocab_size, NUM_SUCCESSORS), dtype=np.float32)
        self._pairs: OrderedDict[tuple[int, int], tuple[list[int], list[float]]] = OrderedDict()
        self._max_pairs = max_pairs

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        return [self._propose(session, budget) for session, budget in zip(sessions, budgets, strict=True)]

    def _propose(self, session: Session, budget: Budget) -> TokenTree:
        found = Candidates(session.tokens[-1])
        before = _before_root(session)

        def successors(node: int) -> Iterator[tuple[int, float, str]]:
            token = found.tokens[node]
            known = self._pairs.get((found.tokens[found.parents[node]] if node else before, token))
            by = "pair" if known is not None else "token"
            ids, chances = known or (self._ids[token].tolist(), self._chances[token].tolist())
            if not session.params.is_greedy and ids[-1] >= 0:
                ids, chances = drawn(session, len(session.tokens) + found.depths[node], ids, chances)
            for rank, (successor, chance) in enumerate(zip(ids, chances, strict=True)):
                if successor < 0:
                    return
                yield successor, _TRUST[by] * chance, _KINDS[by][rank][int(chance * 8)]

        found.grow(budget, successors)
        return found.best(budget)

    def observe(self, sessions: Sequence[Session], trees: Sequence[TokenTree], logits: Sequence[Tensor]) -> None:
        for session, tree, scores in zip(sessions, trees, logits, strict=True):
            values, ids = best_tokens(scores, NUM_SUCCESSORS)
            chances = values.float().softmax(-1)
            tokens = list(tree.tokens)
            self._ids[tokens, : ids.shape[1]] = ids.cpu().numpy()
            self._chances[tokens, : ids.shape[1]] = chances.cpu().numpy()
            before = _before_root(session)
            for node, known in enumerate(zip(ids.tolist(), chances.tolist(), strict=True)):
                pair = (tokens[tree.parents[node]] if node else before, tokens[node])
                self._pairs[pair] = known
                self._pairs.move_to_end(pair)
            while len(self._pairs) > self._max_pairs:
                self._pairs.popitem(last=False)

    def release(self, session: Session) -> None:
        pass


def _before_root(session: Session) -> int:
    return session.tokens[-2] if len(session.tokens) > 1 else -1
