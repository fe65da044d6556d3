"""Drafts from heads: one look at the target's last hidden state guesses the next few tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..heads.markov import MarkovHeads
from ..heads.medusa import MedusaHeads
from ..session import Session
from ..tree import TokenTree
from .base import Budget
from .candidates import Candidates, drawn

_NUM_CHOICES = 8  # of every head, behind one node
_NUM_CANDIDATES = 256  # of every head, among which the bias of a parent decides


@dataclass(slots=True)
class LastStates:
    """The target's last hidden state of every session: of the last token but one."""

    layer: int
    _states: dict[int, tuple[int, Tensor]] = field(default_factory=dict)  # session -> (tokens up to it, state)

    def read(self, session: Session, start: int, hidden: Mapping[int, Tensor]) -> None:
        states = hidden[self.layer]
        self._states[session.id] = (start + len(states), states[-1])

    def of(self, session: Session) -> Tensor | None:
        """None where the last token but one was not shown, as behind a prompt that came with a cache."""
        length, state = self._states.get(session.id, (-1, None))
        return state if length == len(session.tokens) - 1 else None

    def forget(self, session: Session) -> None:
        self._states.pop(session.id, None)


class _HeadsDrafter:
    """What drafters with heads share: states come in, trees go out for the sessions whose state is known."""

    name: str

    def __init__(self, last_layer: int) -> None:
        self.hidden_layers = (last_layer,)
        self._last = LastStates(last_layer)

    def read(self, session: Session, start: int, hidden: Mapping[int, Tensor]) -> None:
        self._last.read(session, start, hidden)

    def release(self, session: Session) -> None:
        self._last.forget(session)

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        trees = {session.id: TokenTree.chain(session.tokens[-1]) for session in sessions}
        states = [(s, b, self._last.of(s)) for s, b in zip(sessions, budgets, strict=True)]
        known = [(session, budget, state) for session, budget, state in states if state is not None]
        if known:
            hidden = torch.stack([state for _, _, state in known])
            guesses = self._guess(hidden, [session.tokens[-1] for session, _, _ in known])
            for (session, budget, _), guess in zip(known, guesses, strict=True):
                trees[session.id] = self._tree(session, budget, guess)
        return list(trees.values())

    def _guess(self, hidden: Tensor, roots: Sequence[int]) -> list[Any]:
        """hidden: [n, H] -> what `_choices` needs, for each row."""
        raise NotImplementedError

    def _choices(self, guess: Any, depth: int, parent: int) -> tuple[list[int], list[float]]:
        """The likeliest tokens behind a node of this depth and token, best first, and their probabilities."""
        raise NotImplementedError

    def _tree(self, session: Session, budget: Budget, guess: Any) -> TokenTree:
        found = Candidates(session.tokens[-1])

        def successors(node: int) -> Iterator[tuple[int, float, str]]:
            depth = found.depths[node]
            ids, chances = self._choices(guess, depth, found.tokens[node])
            if ids and not session.params.is_greedy:
                ids, chances = drawn(session, len(session.tokens) + depth, ids, chances)
            for rank, (token, chance) in enumerate(zip(ids, chances, strict=True)):
                yield token, chance, f"{self.name} d{depth} r{rank} p{int(chance * 8)}"

        found.grow(budget, successors)
        return found.best(budget)

    def _seconds_of_guess(self, width: int, sample: Tensor) -> float:
        """What one guess takes, measured here and now."""
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            self._guess(sample.new_zeros(1, width), [0])
            times.append(time.perf_counter() - begin)
        return min(times)


class MedusaDrafter(_HeadsDrafter):
    """Trees of the likeliest tokens of every Medusa head. last_layer: the number of the target's last hidden state.

    The heads guess without knowing each other's tokens, so a tree holds the likeliest combinations; what each rank at
    each depth is worth is counted by whoever calibrates.
    """

    name = "medusa"

    def __init__(self, heads: MedusaHeads, last_layer: int) -> None:
        super().__init__(last_layer)
        self._heads = heads

    @property
    def level_seconds(self) -> float:
        """What a guess takes, for each of its tokens."""
        weight = next(self._heads.parameters())
        return self._seconds_of_guess(weight.shape[-1], weight) / self._heads.num_heads

    @torch.no_grad()
    def _guess(self, hidden: Tensor, roots: Sequence[int]) -> list[Any]:
        scores = self._heads(hidden.to(next(self._heads.parameters()))).float()
        values, rows = scores.topk(min(_NUM_CHOICES, scores.shape[-1]))
        chances = (values - scores.logsumexp(-1, keepdim=True)).exp()
        ids = self._heads.ids(rows)
        return list(zip(ids.transpose(0, 1).tolist(), chances.transpose(0, 1).tolist(), strict=True))

    def _choices(self, guess: Any, depth: int, parent: int) -> tuple[list[int], list[float]]:
        ids, chances = guess
        return (ids[depth], chances[depth]) if depth < len(ids) else ([], [])


class MarkovDrafter(_HeadsDrafter):
    """Trees of our own heads: behind every node, what its token makes likely among a head's likeliest tokens."""

    name = "heads"

    def __init__(self, heads: MarkovHeads, last_layer: int) -> None:
        super().__init__(last_layer)
        self._heads = heads
        self._before: NDArray[np.float32] = heads.markov_in.weight.detach().float().cpu().numpy()
        self._after: NDArray[np.float32] = heads.markov_out.weight.detach().float().cpu().numpy()
        self._row_of: NDArray[np.int64] = heads.rows_of(torch.arange(heads.vocab_size)).cpu().numpy()
        self._ids: NDArray[np.int64] = heads.token_map.cpu().numpy()

    @property
    def level_seconds(self) -> float:
        """What a guess takes, for each of its tokens."""
        weight = self._heads.fuse.weight
        return self._seconds_of_guess(weight.shape[0], weight) / self._heads.num_heads

    @torch.no_grad()
    def _guess(self, hidden: Tensor, roots: Sequence[int]) -> list[Any]:
        features = self._heads.features(hidden.to(self._heads.fuse.weight), torch.tensor(roots, device=hidden.device))
        values, rows = self._heads.scores(features).topk(min(_NUM_CANDIDATES, len(self._ids)))
        both = zip(values.transpose(0, 1).cpu().numpy(), rows.transpose(0, 1).cpu().numpy(), strict=True)
        return [(scores, places, [self._after[of_head] for of_head in places]) for scores, places in both]

    def _choices(self, guess: Any, depth: int, parent: int) -> tuple[list[int], list[float]]:
        values, rows, after = guess
        if depth >= len(values):
            return [], []
        scores = values[depth] + after[depth] @ self._before[self._row_of[parent]]
        weights = np.exp(scores - scores.max())
        best = np.argsort(-weights)[:_NUM_CHOICES]
        return self._ids[rows[depth][best]].tolist(), (weights[best] / weights.sum()).tolist()
