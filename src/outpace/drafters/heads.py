"""Drafts from Medusa heads: one look at the target's last hidden state guesses the next tokens, each on its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..heads.medusa import MedusaHeads
from ..session import Session
from ..tree import TokenTree
from .base import Budget
from .candidates import Candidates, drawn

_NUM_CHOICES = 8  # of every head


class HeadsDrafter:
    """Trees of the likeliest tokens of every head. last_layer: the number of the target's last hidden state.

    The heads guess without knowing each other's tokens, so a tree holds the likeliest combinations; what each rank at
    each depth is worth is counted by whoever calibrates.
    """

    def __init__(self, heads: MedusaHeads, last_layer: int, name: str = "medusa") -> None:
        self.name, self.hidden_layers = name, (last_layer,)
        self._heads, self._last = heads, last_layer
        self._states: dict[int, tuple[int, Tensor]] = {}  # session -> tokens before, hidden state of the last of them

    @property
    def level_seconds(self) -> float:
        """What drafting takes, measured here and now, for each of the heads."""
        weight = next(self._heads.parameters())
        hidden = torch.zeros(1, weight.shape[-1], dtype=weight.dtype, device=weight.device)
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            self._guesses(hidden)
            times.append(time.perf_counter() - begin)
        return min(times) / self._heads.num_heads

    def read(self, session: Session, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Only the last token matters."""
        states = hidden[self._last]
        self._states[session.id] = (start + len(states), states[-1])

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        trees = {session.id: TokenTree.chain(session.tokens[-1]) for session in sessions}
        known = [
            (session, budget, self._states[session.id][1])
            for session, budget in zip(sessions, budgets, strict=True)
            if session.id in self._states and self._states[session.id][0] == len(session.tokens) - 1
        ]
        if known:
            chances, ids = self._guesses(torch.stack([state for _, _, state in known]))
            for place, (session, budget, _) in enumerate(known):
                trees[session.id] = self._tree(session, budget, ids[place], chances[place])
        return list(trees.values())

    @torch.no_grad()
    def _guesses(self, hidden: Tensor) -> tuple[list[list[list[float]]], list[list[list[int]]]]:
        """[n][heads][choices] probabilities and token ids, best first."""
        weight = next(self._heads.parameters())
        scores = self._heads(hidden.to(weight)).float()
        values, rows = scores.topk(min(_NUM_CHOICES, scores.shape[-1]))
        chances = (values - scores.logsumexp(-1, keepdim=True)).exp()
        ids = self._heads.ids(rows)
        return chances.transpose(0, 1).tolist(), ids.transpose(0, 1).tolist()

    def _tree(
        self, session: Session, budget: Budget, ids: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]
    ) -> TokenTree:
        found = Candidates(session.tokens[-1])
        if not session.params.is_greedy:
            ranked = [
                drawn(session, len(session.tokens) + depth, own, weights)
                for depth, (own, weights) in enumerate(zip(ids, chances, strict=True))
            ]
            ids, chances = [own for own, _ in ranked], [weights for _, weights in ranked]

        def successors(node: int) -> Iterator[tuple[int, float, str]]:
            depth = found.depths[node]
            if depth < len(ids):
                for rank, (token, chance) in enumerate(zip(ids[depth], chances[depth], strict=True)):
                    yield token, chance, f"{self.name} d{depth} r{rank} p{int(chance * 8)}"

        found.grow(budget, successors)
        return found.best(budget)

    def release(self, session: Session) -> None:
        self._states.pop(session.id, None)
