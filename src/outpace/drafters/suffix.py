"""Drafts from the text itself: what followed the longest earlier occurrence of its ending. Needs no model.

The text is kept as a suffix automaton (Blumer et al. 1985; used for drafting by SAM-Decoding, arXiv 2411.10666):
appending a token costs amortised O(1), and the longest ending that occurred before is known at every moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import InputError
from ..session import Session
from ..tree import TokenTree
from .base import Budget


class SuffixAutomaton:
    """All substrings of a token sequence, with an end position of each.

    State 0 is the empty string. `match` is the length of the longest suffix that occurred earlier in the sequence,
    `matched_end` the index of that occurrence's last token: after 5 6 7 5 6 the match is 2 and it ended at index 1.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._edges: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [-1]
        self._last = 0
        self._state = 0
        self.match = 0
        self.matched_end = -1

    def append(self, token: int) -> None:
        """Add one token and move the match to the longest suffix that ends in it."""
        self._advance(token)
        index = len(self.tokens)
        self.tokens.append(token)
        self.matched_end = self._end[self._state]
        self._insert(token, index)
        # The next time this suffix is met, its latest continuation is the likelier one.
        self._end[self._state] = index

    def _advance(self, token: int) -> None:
        state, match = self._state, self.match
        while state and token not in self._edges[state]:
            state = self._link[state]
            match = self._length[state]
        if token in self._edges[state]:
            state = self._edges[state][token]
            match += 1
        # A state holds suffixes of several lengths; splits may have moved the shorter ones to its link.
        while match <= self._length[self._link[state]] and state:
            state = self._link[state]
        self._state, self.match = state, match

    def _insert(self, token: int, index: int) -> None:
        new = self._new_state({}, 0, self._length[self._last] + 1, index)
        state = self._last
        self._last = new
        while state >= 0 and token not in self._edges[state]:
            self._edges[state][token] = new
            state = self._link[state]
        if state < 0:
            return
        follower = self._edges[state][token]
        if self._length[follower] == self._length[state] + 1:
            self._link[new] = follower
            return
        clone = self._new_state(
            dict(self._edges[follower]), self._link[follower], self._length[state] + 1, self._end[follower]
        )
        self._link[follower] = self._link[new] = clone
        if self._state == follower and self.match <= self._length[clone]:
            self._state = clone
        while state >= 0 and self._edges[state].get(token) == follower:
            self._edges[state][token] = clone
            state = self._link[state]

    def _new_state(self, edges: dict[int, int], link: int, length: int, end: int) -> int:
        self._edges.append(edges)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._link) - 1

    def continuation(self, count: int) -> list[int]:
        """The `count` tokens after the matched occurrence; a copy that reaches the end goes on with itself."""
        if self.match == 0:
            return []
        copied: list[int] = []
        start, size = self.matched_end + 1, len(self.tokens)
        for index in range(start, start + count):
            copied.append(self.tokens[index] if index < size else copied[index - size])
        return copied


class SuffixDrafter:
    """Chains copied from the text. The longer the match, the longer the chain.

    min_match: shortest ending worth a draft. growth: drafted tokens per matched token; None always drafts as much as
    the budget allows, which with min_match 1 is classical prompt lookup.
    """

    def __init__(self, min_match: int = 2, growth: float | None = 2.0, name: str = "suffix") -> None:
        if min_match < 1:
            raise InputError(f"min_match must be 1 or larger, got {min_match!r}.")
        if growth is not None and growth <= 0:
            raise InputError(f"growth must be above 0, or None to draft as much as allowed, got {growth!r}.")
        self.name = name
        self._min_match = min_match
        self._growth = growth
        self._texts: dict[int, SuffixAutomaton] = {}

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        return [self._propose(session, budget) for session, budget in zip(sessions, budgets, strict=True)]

    def _propose(self, session: Session, budget: Budget) -> TokenTree:
        text = self._texts.setdefault(session.id, SuffixAutomaton())
        for token in session.tokens[len(text.tokens) :]:
            text.append(token)
        limit = min(budget.nodes, budget.depth)
        if text.match < self._min_match:
            return TokenTree.chain(session.tokens[-1])
        if self._growth is not None:
            limit = min(limit, math.ceil(self._growth * text.match))
        drafts = text.continuation(limit)
        # A copied token is right about as often as the match is long; the chain must be right up to it.
        step = text.match / (text.match + 1)
        value = [step ** (depth + 1) for depth in range(len(drafts))]
        return TokenTree.chain(session.tokens[-1], drafts, self.name, value)

    def release(self, session: Session) -> None:
        self._texts.pop(session.id, None)
