"""Asks a drafter and trusts nothing it says. Whatever it does wrong costs its rows one round without draft."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from .drafters.base import Budget, Drafter, Observer, Reader
from .errors import InputError
from .planner import Planner
from .session import Session
from .tree import TokenTree

_log = logging.getLogger("outpace")


class Drafting:
    """One drafter as the engine sees it. vocab_size: ids at or above it are refused. planner: says how much to draft;
    without one, drafts are as large as their budgets."""

    def __init__(self, drafter: Drafter, vocab_size: int, planner: Planner | None = None) -> None:
        self.drafter, self.vocab_size, self.planner = drafter, vocab_size, planner
        self._is_whole = getattr(drafter, "is_whole", False)
        self._seconds = 0.0  # of the last drafts
        self._depth = 0  # of the deepest of them
        self._is_idle = False  # whether nothing was asked for in this round
        self._shown = 0.0  # seconds that the drafter took to look at the last scores
        self._observer = drafter if isinstance(drafter, Observer) else None
        self._reader = drafter if isinstance(drafter, Reader) else None
        self._warned: set[str] = set()

    def trees(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[TokenTree]:
        """One checked tree per session; a single node where the budget is empty or the draft is bad."""
        if self.planner is None or not sessions:
            return self._trees(sessions, budgets)
        is_off = not self.planner.is_on(len(sessions))
        planned = self.planner.budgets(budgets)
        if self._is_whole:
            planned = [replace(budget, least_value=0.0) for budget in planned]
        begin = time.perf_counter()
        trees = self._trees(sessions, planned)
        is_drafted = any(budget.nodes for budget in planned)
        self._seconds = time.perf_counter() - begin if is_drafted else 0.0
        self._depth = max(max(tree.depths()) for tree in trees)
        self._is_idle = not is_drafted
        if is_off:
            for session, budget in zip(sessions, budgets, strict=True):
                session.stats.num_rounds_switched_off += budget.nodes > 0
        return self.planner.cut(trees, self._seconds) if is_drafted and not self._is_whole else trees

    def learn(self, trees: Sequence[TokenTree], num_tokens: int, seconds: float) -> None:
        """The round of these trees has ended. num_tokens: emitted by all rows; seconds: of the pass and the choice."""
        if self.planner is not None and trees:
            drafting = self._seconds + self._shown if self._seconds else 0.0
            self.planner.observe(trees, num_tokens, self._depth, drafting, seconds - self._shown, not self._is_whole)

    def _trees(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[TokenTree]:
        trees = {session.id: TokenTree.chain(session.tokens[-1]) for session in sessions}
        asked = [(session, budget) for session, budget in zip(sessions, budgets, strict=True) if budget.nodes > 0]
        if not asked:
            return list(trees.values())
        try:
            drafts = self.drafter.propose([session for session, _ in asked], [budget for _, budget in asked])
            if len(drafts) != len(asked):
                raise InputError(f"{len(drafts)} drafts came back for {len(asked)} rows.")
        except Exception as error:
            self._failed([session for session, _ in asked], error)
            return list(trees.values())
        for (session, budget), draft in zip(asked, drafts, strict=True):
            try:
                draft.check(session.tokens[-1], self.vocab_size, budget.nodes, budget.depth, budget.can_branch)
                trees[session.id] = draft
            except Exception as error:
                self._failed([session], error)
        return list(trees.values())

    def observe(self, sessions: Sequence[Session], trees: Sequence[TokenTree], logits: Sequence[Tensor]) -> None:
        """Show a drafter that wants to see them the target's scores, [nodes, vocab] of each verified tree; not in
        rounds that the planner leaves without drafts, as looking takes time."""
        self._shown = 0.0
        if self._observer is not None and not self._is_idle:
            begin = time.perf_counter()
            try:
                self._observer.observe(sessions, trees, logits)
            except Exception as error:
                self._failed(sessions, error)
            self._shown = time.perf_counter() - begin

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's hidden states that the drafter reads."""
        return self._reader.hidden_layers if self._reader is not None else ()

    def read(self, session: Session, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Show the hidden states of tokens that were kept to a drafter that reads them. See `Reader`."""
        if self._reader is None or not hidden:
            return
        try:
            self._reader.read(session, start, hidden)
        except Exception as error:
            self._failed([session], error)

    def release(self, session: Session) -> None:
        """The session has ended: the drafter may forget it."""
        try:
            self.drafter.release(session)
        except Exception as error:
            self._failed([session], error)

    def _failed(self, sessions: Sequence[Session], error: Exception) -> None:
        for session in sessions:
            session.stats.num_draft_failures += 1
        text = f"{type(error).__name__}: {error}"
        kind = re.sub(r"\d+", "", text)  # the same message about other numbers is not news
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("Drafter %r failed and costs a round without draft. %s", self.drafter.name, text)
