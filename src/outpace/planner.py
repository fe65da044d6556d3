"""How much to draft, and whether at all: what the guesses are worth against what the nodes cost.

speed = E / (T_draft + T(B, n)): the expected tokens of a step over its time. T comes from the measured cost curve, E
from acceptance that was counted, drafting is timed. The same quotient decides the size of a tree, how deep a draft
model goes and whether to draft at all. Nothing here can change a text. Knows nothing about models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .costs import CostCurve
from .drafters.base import Budget
from .tree import TokenTree

PLANNED_K = 32  # the most nodes to choose from, where neither the user nor the drafter says more
MARGIN = 1.03  # drafting goes on only where it is this much faster
_FADE = 0.95  # weight of the past in running means, per round
_SLOW_FADE, _PROMISED = 0.98, 4.0  # of kept and promised tokens; how many are believed in beforehand
_FIRST_DEPTH = 4  # of the first draft, whose cost is not known
_PATIENCE, _MOST_SKIPPED = 4, 7  # drafts in a row that were cut to nothing until one is skipped; skipped at most
_CHEAP = 0.03  # drafting below this share of a plain pass needs no switch: its trees are cut where they do not pay
_DEPTHS = (1, 2, 4, 8, 16, 32)  # of drafts, at which the best case is looked at
_MOST_LOST = 1.0  # plain passes that may be lost to drafts before they are switched off
_PLAIN_EVERY = 64  # rounds, at most, without a look at what a plain pass costs now: contexts grow
_LOST_SHARE = 0.015  # of the time in which they are off, until they are tried again
_LONGEST_PAUSE = 400  # rounds: one draft that took very long, reading a prompt, says little about the next


@dataclass(slots=True)
class _State:
    """What is known of batches of about one size. Times are in plain passes where not said otherwise.

    expected, spent: tokens per row and time of drafted rounds, fading; draft_seconds, draft_depth: means of drafting
    alone. kept, promised: drafted tokens that were accepted, and that should have been by their values, fading. lost:
    time lost to drafts, against plain decoding, since they last paid; pause: rounds until they are tried again.
    since_plain: rounds since the last plain one. idle: drafts in a row of which nothing was worth verifying; skip:
    rounds until the next draft.
    """

    kept: float
    expected: float = 0.0
    spent: float = 0.0
    draft_seconds: float = 0.0
    draft_depth: float = 0.0
    promised: float = _PROMISED
    lost: float = 0.0
    pause: int = 0
    since_plain: int = 0
    idle: int = 0
    skip: int = 0


class Planner:
    """Plans the rounds of one engine. costs: of its target. honest: the share of promised tokens that is expected to be
    kept before any were counted. level_seconds: what a token of depth costs to draft, where that is known before."""

    def __init__(self, costs: CostCurve, honest: float = 0.5, level_seconds: float = 0.0) -> None:
        self.costs, self._honest, self._level_seconds = costs, honest, level_seconds
        self._states: dict[int, _State] = {}

    def is_on(self, num_rows: int) -> bool:
        """Whether rounds of this many rows are drafted at present."""
        return self._state(num_rows).pause == 0 and self._best_case(num_rows) >= MARGIN

    def _best_case(self, num_rows: int) -> float:
        """The speed against plain decoding if every guess was right: what is too dear then is not even tried.

        By what drafting was known to cost: what it took since may hold the reading of a prompt.
        """
        level, plain = self._level_seconds, self.costs.seconds(num_rows, 1)
        if level < _CHEAP * plain:
            return math.inf
        return max((d + 1) * plain / (d * level + self.costs.seconds(num_rows, d + 1)) for d in _DEPTHS)

    def _per_level(self, num_rows: int) -> float:
        state = self._state(num_rows)
        return state.draft_seconds / max(1.0, state.draft_depth)

    def budgets(self, budgets: Sequence[Budget]) -> list[Budget]:
        """What each row may draft: nothing while drafting does not pay, and nothing that is too improbable to pay."""
        num_rows, state = len(budgets), self._state(len(budgets))
        nothing = [replace(budget, nodes=0, depth=0) for budget in budgets]
        if state.pause > 0:
            state.pause -= 1
            if state.pause == 0:
                state.expected = state.spent = state.lost = 0.0
            return nothing
        if not self.is_on(num_rows):
            return nothing
        if state.skip > 0 or state.since_plain >= _PLAIN_EVERY:
            state.skip = max(0, state.skip - 1)
            return nothing
        if state.draft_depth == 0:
            return [replace(budget, depth=min(budget.depth, _FIRST_DEPTH)) for budget in budgets]
        least = self._least_value(num_rows, max(budget.nodes for budget in budgets))
        return [replace(budget, least_value=least) for budget in budgets]

    def _least_value(self, num_rows: int, nodes: int) -> float:
        """A node pays where its chance of acceptance, over its own cost, exceeds the speed without it."""
        plain = self.costs.seconds(num_rows, 1)
        per_node = max(0.0, self.costs.seconds(num_rows, nodes + 1) - plain) / max(1, nodes)
        return max(1.0, self.gain(num_rows)) * (self._per_level(num_rows) + per_node) / plain

    def cut(self, trees: Sequence[TokenTree], draft_seconds: float) -> list[TokenTree]:
        """The trees without the nodes that cost more than they promise: each keeps its n best, one n for all rows.

        Rows are padded to the largest tree, so a smaller tree in one row alone saves nothing.
        """
        num_rows, honesty = len(trees), self._honesty(len(trees))
        best, chosen = num_rows / (draft_seconds + self.costs.seconds(num_rows, 1)), 0
        ranked = [sorted(tree.value[1:], reverse=True) for tree in trees]
        expected = float(num_rows)
        for size in range(1, max(len(values) for values in ranked) + 1):
            expected += honesty * sum(values[size - 1] for values in ranked if len(values) >= size)
            speed = expected / (draft_seconds + self.costs.seconds(num_rows, size + 1))
            if speed > best:
                best, chosen = speed, size
        state = self._state(num_rows)
        is_cheap = draft_seconds < _CHEAP * self.costs.seconds(num_rows, 1)  # dear ones are switched off altogether
        state.idle = state.idle + 1 if chosen == 0 and is_cheap else 0
        state.skip = min(_MOST_SKIPPED, state.idle // _PATIENCE)
        return [tree.best(chosen) for tree in trees]

    def observe(
        self,
        trees: Sequence[TokenTree],
        num_tokens: int,
        depth: int,
        draft_seconds: float,
        pass_seconds: float,
        is_cut: bool = True,
    ) -> None:
        """A round of these trees has ended. num_tokens: emitted by all rows; depth: of what was drafted before the
        cut. draft_seconds: 0 where nothing was asked for. is_cut: False where trees are verified whole."""
        num_rows, num_nodes = len(trees), max(len(tree) for tree in trees)
        self.costs.observe(num_rows, num_nodes, pass_seconds)
        state, plain = self._state(num_rows), self.costs.seconds(num_rows, 1)
        state.since_plain = state.since_plain + 1 if num_nodes > 1 else 0
        if draft_seconds == 0:
            return
        promised = sum(sum(tree.value[1:]) for tree in trees)
        expected = 1 + self._honesty(num_rows) * promised / num_rows
        state.kept = _SLOW_FADE * state.kept + (1 - _SLOW_FADE) * self._honest * _PROMISED + num_tokens - num_rows
        state.promised = _SLOW_FADE * state.promised + (1 - _SLOW_FADE) * _PROMISED + promised
        state.draft_seconds = _faded(state.draft_seconds, draft_seconds)
        state.draft_depth = _faded(state.draft_depth, depth)
        spent = (draft_seconds + self.costs.seconds(num_rows, num_nodes)) / plain
        state.expected = _FADE * state.expected + expected
        state.spent = _FADE * state.spent + spent
        if is_cut and state.draft_seconds < _CHEAP * plain:
            state.lost = 0.0
            return
        state.lost = max(0.0, state.lost + MARGIN * spent - expected)
        if state.lost > _MOST_LOST and self.gain(num_rows) < MARGIN:
            state.pause = min(_LONGEST_PAUSE, max(1, int(state.lost / _LOST_SHARE)))

    def _honesty(self, num_rows: int) -> float:
        """How many of the promised tokens were kept."""
        state = self._state(num_rows)
        return state.kept / state.promised

    def gain(self, num_rows: int) -> float:
        """The expected speed of drafted rounds over that of plain ones."""
        state = self._state(num_rows)
        return state.expected / state.spent if state.spent > 0 else 1.0

    def _state(self, num_rows: int) -> _State:
        """Batches of 1, 2 to 3, 4 to 7, ... rows are judged together."""
        key = num_rows.bit_length()
        if key not in self._states:
            known = self._level_seconds > 0
            self._states[key] = _State(
                self._honest * _PROMISED, draft_seconds=self._level_seconds, draft_depth=float(known)
            )
        return self._states[key]


def _faded(mean: float, value: float) -> float:
    return value if mean == 0 else _FADE * mean + (1 - _FADE) * value
