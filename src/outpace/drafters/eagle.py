"""Drafts from an EAGLE-3 head: level by level, each guess from the head's own output for the one before."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..heads.eagle import EagleCache, EagleLayer
from ..session import Session
from ..tree import TokenTree
from .base import Budget
from .candidates import Candidates, drawn

_NUM_CHOICES = 8  # behind one node
_WIDTH = 8  # nodes that are expanded together, per depth
_MOST_DEPTH = 8
_LEAST_VALUE = 0.02  # paths below it are not followed


@dataclass(slots=True)
class _Row:
    """states: mixed hidden states of the target for the tokens from `start` on that the head has not read yet."""

    cache: EagleCache = field(default_factory=EagleCache)
    start: int = 0
    states: list[Tensor] = field(default_factory=list)
    is_broken: bool = False  # tokens were never shown: the head cannot draft for this text


class EagleDrafter:
    """Dynamic trees (Li et al. 2024, arXiv 2406.16858): the likeliest paths of every depth are followed, the best nodes
    of all are kept."""

    name = "eagle"

    def __init__(self, head: EagleLayer) -> None:
        self.hidden_layers = head.layers
        self._head = head
        self._rows: dict[int, _Row] = {}

    @property
    @torch.no_grad()
    def level_seconds(self) -> float:
        """What drafting one token of depth takes, measured here and now."""
        token, times = torch.zeros(1, dtype=torch.int64, device=self._head.norm.weight.device), []
        states, visible = self._head.norm.weight[None], torch.ones(1, 1, dtype=torch.bool, device=token.device)
        for _ in range(4):
            begin = time.perf_counter()
            self._head(token, states, token, EagleCache(), visible)
            times.append(time.perf_counter() - begin)
        return min(times)

    @torch.no_grad()
    def read(self, session: Session, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Keep the mixed states until they are needed, together with the tokens behind them."""
        row = self._rows.setdefault(session.id, _Row())
        known = row.start + sum(len(states) for states in row.states)
        if start != known:
            row.is_broken = True
            return
        row.states.append(self._head.mixed(torch.cat([hidden[layer] for layer in self.hidden_layers], dim=-1)))

    @torch.no_grad()
    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        return [self._propose(session, budget) for session, budget in zip(sessions, budgets, strict=True)]

    def _propose(self, session: Session, budget: Budget) -> TokenTree:
        row = self._rows.get(session.id)
        found = Candidates(session.tokens[-1])
        if row is None or row.is_broken or not row.states:
            return found.best(budget)
        least = max(budget.least_value, _LEAST_VALUE)
        logits, states = self._catch_up(session, row)
        draft = row.cache.copy()  # of columns that are not kept
        frontier, seen = [0], {0: list[int]()}  # seen: the columns of each node and its ancestors, behind the text's
        depths = min(budget.depth, _MOST_DEPTH)
        for depth in range(depths):
            self._expand(session, found, frontier, logits)
            width = _WIDTH if budget.can_branch else 1
            level = [n for n in range(1, len(found)) if found.depths[n] == depth + 1 and found.values[n] > least]
            level = sorted(level, key=lambda node: -found.values[node])[:width]
            if not level or depth + 1 == depths:
                break
            parents = [frontier.index(found.parents[node]) for node in level]
            for place, node in enumerate(level):
                seen[node] = [*seen[found.parents[node]], draft.length + place]
            visible = torch.zeros(len(level), draft.length + len(level), dtype=torch.bool, device=logits.device)
            visible[:, : row.cache.length] = True
            for place, node in enumerate(level):
                visible[place, seen[node]] = True
            tokens = torch.tensor([found.tokens[node] for node in level], device=logits.device)
            positions = torch.full((len(level),), len(session.tokens) - 1 + depth, device=logits.device)
            logits, states, both = self._head(tokens, states[parents], positions, draft, visible)
            draft.keep(*both)
            frontier = level
        return found.best(budget)

    def _catch_up(self, session: Session, row: _Row) -> tuple[Tensor, Tensor]:
        """Read the tokens that were committed since; ([1, rows] logits, [1, hidden] state) behind the last one."""
        states = torch.cat(row.states)
        count = len(states)
        device = states.device
        tokens = torch.tensor(session.tokens[row.start + 1 : row.start + 1 + count], device=device)
        positions = torch.arange(row.start, row.start + count, device=device)
        visible = torch.ones(count, row.cache.length + count, dtype=torch.bool, device=device).tril(row.cache.length)
        logits, out, both = self._head(tokens, states, positions, row.cache, visible)
        row.cache.keep(*both)
        row.start, row.states = row.start + count, []
        return logits[-1:], out[-1:]

    def _expand(self, session: Session, found: Candidates, frontier: Sequence[int], logits: Tensor) -> None:
        values, rows = logits.float().topk(min(_NUM_CHOICES, logits.shape[-1]))
        chances = (values - logits.float().logsumexp(-1, keepdim=True)).exp().tolist()
        ids = self._head.token_map[rows].tolist()
        for place, node in enumerate(frontier):
            own, weights = ids[place], chances[place]
            if not session.params.is_greedy:
                own, weights = drawn(session, len(session.tokens) + found.depths[node], own, weights)
            depth = found.depths[node]
            for rank, (token, chance) in enumerate(zip(own, weights, strict=True)):
                found.add(node, token, chance, f"{self.name} d{depth} r{rank} p{int(chance * 8)}")

    def release(self, session: Session) -> None:
        self._rows.pop(session.id, None)
