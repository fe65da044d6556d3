"""Drafts from the target's own parallel guesses: Jacobi iteration, and lookahead decoding on top of it.

Lookahead (Fu et al., arXiv 2402.02057): a window of W columns and N - 1 rows holds a Jacobi iteration over future
positions. Every forward gives a new last row, the columns become n-grams, and n-grams that begin with the last
token are verified as guesses. The window is a token tree like any other draft: row 0 is a chain under the root, and
below its token j hangs column j. So one forward holds window and guesses, under ordinary tree attention.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..errors import InputError
from ..session import Session
from ..tree import TokenTree
from .base import Budget
from .candidates import Candidates


class JacobiDrafter:
    """A chain of the target's own choices behind the last accepted token, each made after a guess that may be wrong."""

    name = "jacobi"
    is_whole = True

    def __init__(self) -> None:
        self._guesses: dict[int, tuple[int, list[int]]] = {}  # session -> (length of its text, what follows)

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        return [self._propose(session, budget) for session, budget in zip(sessions, budgets, strict=True)]

    def _propose(self, session: Session, budget: Budget) -> TokenTree:
        count = min(budget.nodes, budget.depth)
        length, guess = self._guesses.get(session.id, (len(session.tokens), []))
        guess = guess[len(session.tokens) - length :][:count]
        # Nothing is known of the last places: any token starts their iteration.
        filler = random.Random(f"{session.seed} {len(session.tokens)}").choices(session.tokens, k=count - len(guess))
        return TokenTree.chain(session.tokens[-1], guess + filler, self.name, [0.5**i for i in range(1, count + 1)])

    def observe(self, sessions: Sequence[Session], trees: Sequence[TokenTree], logits: Sequence[Tensor]) -> None:
        for session, tree, scores in zip(sessions, trees, logits, strict=True):
            if tree.is_chain:  # node i says what follows the i-th guess
                self._guesses[session.id] = (len(session.tokens), scores.argmax(-1).tolist())

    def release(self, session: Session) -> None:
        self._guesses.pop(session.id, None)


@dataclass(slots=True)
class _Window:
    """The Jacobi iteration of one session. rows: oldest first, W tokens each, up to N - 1 of them.

    pool: token -> the n-grams seen behind it, newest last. last_row: nodes of the newest row in the last draft.
    """

    rows: list[list[int]]
    pool: dict[int, OrderedDict[tuple[int, ...], None]] = field(default_factory=dict)
    last_row: list[int] = field(default_factory=list)


class LookaheadDrafter:
    """Lookahead decoding. window: W, columns; ngram: N, tokens of an n-gram, its key included; guesses: G, n-grams
    verified per step. A step verifies (W + G) (N - 1) tokens, which is the k that this drafter wants."""

    name = "lookahead"
    needs_trees = True
    is_whole = True

    def __init__(self, window: int = 15, ngram: int = 5, guesses: int = 15) -> None:
        for name, value, least in (("window", window, 1), ("ngram", ngram, 2), ("guesses", guesses, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} must be a whole number, {least} or larger, got {value!r}.")
        self._window, self._depth, self._guesses = window, ngram - 1, guesses
        self.num_nodes = (window + guesses) * (ngram - 1)
        self._states: dict[int, _Window] = {}

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        return [self._propose(session, budget) for session, budget in zip(sessions, budgets, strict=True)]

    def _propose(self, session: Session, budget: Budget) -> TokenTree:
        state = self._states.get(session.id)
        if state is None:
            start = random.Random(session.seed).choices(session.tokens, k=self._window)
            state = self._states[session.id] = _Window([start])
        found = Candidates(session.tokens[-1])
        grams = list(state.pool.get(session.tokens[-1], ()))[::-1]
        for rank, gram in enumerate(grams):
            node = 0
            for token in gram:
                node = found.add(node, token, 0.5, f"lookahead r{rank}")
        state.last_row = self._add_window(found, state.rows)
        tree = found.best(budget)
        if len(tree) < len(found):  # the end of the text, or a small budget, cut the window: it waits
            state.last_row = []
        return tree

    def _add_window(self, found: Candidates, rows: Sequence[Sequence[int]]) -> list[int]:
        """Row 0 as a chain under the root, column j below its token j; the nodes of the newest row."""
        newest, node = [], 0
        for column, token in enumerate(rows[0]):
            node = below = found.add(node, token, 0.1, "lookahead window")
            for row in rows[1:]:
                below = found.add(below, row[column], 0.1, "lookahead window")
            newest.append(below)
        return newest

    def observe(self, sessions: Sequence[Session], trees: Sequence[TokenTree], logits: Sequence[Tensor]) -> None:
        for session, scores in zip(sessions, logits, strict=True):
            state = self._states.get(session.id)
            if state is None or not state.last_row:
                continue
            new = scores[state.last_row].argmax(-1).tolist()
            state.last_row = []
            if len(state.rows) == self._depth:
                self._collect(state, new)
                state.rows.pop(0)
            # An end of the text inside the window would make everything behind it pointless.
            spare = session.tokens[-1]
            state.rows.append([token if token not in session.end_ids else spare for token in new])

    def _collect(self, state: _Window, new: Sequence[int]) -> None:
        """Every column is an n-gram now: its key in the oldest row, its last token in the new one."""
        for column, last in enumerate(new):
            known = state.pool.setdefault(state.rows[0][column], OrderedDict())
            gram = (*(row[column] for row in state.rows[1:]), last)
            known[gram] = None
            known.move_to_end(gram)
            if len(known) > self._guesses:
                known.popitem(last=False)

    def release(self, session: Session) -> None:
        self._states.pop(session.id, None)
