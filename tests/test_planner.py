"""The cost curve and the planner: by hand, against brute force, and in simulated worlds where the clock is ours."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace import InputError, SamplingParams, load
from outpace.costs import CostCurve
from outpace.drafters.base import Budget
from outpace.engine import Engine
from outpace.planner import Planner
from outpace.session import Session
from outpace.testing.drafters import Scripted, oracle
from outpace.testing.models import PROMPTS, tiny_model
from outpace.tree import TokenTree

# --------------------------------------------------------------------------------------------------
# The curve


def test_the_curve_is_what_was_measured_and_straight_lines_between() -> None:
    curve = CostCurve({(1, 1): 1.0, (1, 4): 2.5, (1, 8): 2.0})
    assert [curve.seconds(1, n) for n in (1, 2, 4, 6, 8)] == pytest.approx([1.0, 1.5, 2.5, 2.25, 2.0])
    assert curve.seconds(1, 100) == pytest.approx(2.0), "beyond a falling end it does not fall on"
    assert CostCurve({(1, 1): 1.0, (1, 4): 4.0}).seconds(1, 8) == pytest.approx(8.0)


def test_rows_that_were_not_measured_cost_what_as_many_nodes_cost_in_one() -> None:
    curve = CostCurve({(1, 1): 1.0, (1, 8): 3.0, (1, 16): 4.0})
    assert curve.seconds(4, 2) == pytest.approx(3.0)
    curve = CostCurve({(1, 1): 1.0, (1, 8): 3.0, (1, 16): 4.0, (4, 2): 6.0})
    assert curve.seconds(4, 4) == pytest.approx(8.0), "twice as dear as guessed, as at the size that was measured"


def test_the_curve_follows_what_passes_take() -> None:
    curve = CostCurve({(1, 1): 1.0, (1, 8): 2.0})
    for _ in range(100):
        curve.observe(1, 8, 3.0)
    assert curve.seconds(1, 8) == pytest.approx(3.0, rel=0.02)
    assert 1.0 < curve.seconds(1, 1) <= 1.5, "what slows one size down slows the others down"
    before = curve.seconds(1, 8)
    curve.observe(1, 8, 1000.0)
    assert curve.seconds(1, 8) < 1.15 * before, "one disturbed pass says little"
    curve.observe(1, 5, 2.0)
    assert (1, 5) in curve.cells


def test_the_curve_is_saved_and_a_damaged_file_is_none(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "curve.json"
    curve = CostCurve({(1, 1): 0.25, (4, 2): 0.5})
    curve.save(file, {"model": "a model"})
    again = CostCurve.load(file)
    assert again is not None and again.cells == curve.cells
    for text in ("", "{}", '{"cells": [[1, 2]]}', '{"cells": [[1, 2, 0.5]]}', '{"cells": [[1, 1, -0.5]]}'):
        file.write_text(text, encoding="utf-8")
        assert CostCurve.load(file) is None
    assert CostCurve.load(tmp_path / "nothing") is None


# --------------------------------------------------------------------------------------------------
# The size of a tree


def _chain(*values: float) -> TokenTree:
    return TokenTree.chain(0, list(range(1, len(values) + 1)), "x", values)


def test_a_tree_is_cut_where_nodes_stop_paying() -> None:
    """T = 1 + 0.1 per node. Speeds by size: 1, 1.9 / 1.1, 2.4 / 1.2 = 2, 2.45 / 1.3: two nodes are best."""
    planner = Planner(CostCurve({(1, 1): 1.0, (1, 11): 2.0}), honest=1.0)
    (tree,) = planner.cut([_chain(0.9, 0.5, 0.05)], draft_seconds=0.0)
    assert tree.tokens == (0, 1, 2)


def test_a_step_in_the_curve_is_used_up_or_not_climbed() -> None:
    planner = Planner(CostCurve({(1, 1): 1.0, (1, 2): 2.0, (1, 9): 2.0}), honest=1.0)
    values = [0.9**depth for depth in range(1, 9)]
    assert len(planner.cut([_chain(*values)], 0.0)[0]) == 9, "where one node costs as much as eight, take eight"
    assert len(planner.cut([_chain(0.6, 0.3)], 0.0)[0]) == 1, "0.9 tokens for a second pass are not worth it"


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=6), min_size=1, max_size=4),
    st.lists(st.floats(0.1, 5), min_size=8, max_size=8),
    st.floats(0, 1),
)
def test_the_cut_has_the_best_quotient_of_all(rows: list[list[float]], costs: list[float], draft: float) -> None:
    trees = [_chain(*sorted(values, reverse=True)) for values in rows]
    curve = CostCurve({(1, 1): 1.0} | {(len(rows), n + 1): cost for n, cost in enumerate(costs)})
    cut = Planner(curve, honest=1.0).cut(trees, draft)

    def speed(size: int) -> float:
        expected = sum(1 + sum(tree.value[1 : size + 1]) for tree in trees)
        return expected / (draft + curve.seconds(len(rows), size + 1))

    sizes = range(max(len(values) for values in rows) + 1)
    chosen = max(len(tree) for tree in cut) - 1
    assert speed(chosen) == pytest.approx(max(map(speed, sizes)))
    assert [len(tree) - 1 for tree in cut] == [min(chosen, len(values)) for values in rows]


# --------------------------------------------------------------------------------------------------
# Simulated worlds


class _World:
    """A target whose pass takes seconds(n), a drafter that takes `level` seconds per token and is right with
    probability chance(round); its claims are right, too."""

    def __init__(self, seconds: Callable[[int], float], level: float, chance: Callable[[int], float]) -> None:
        self.seconds, self.level, self.chance = seconds, level, chance
        self.planner = Planner(CostCurve({(1, n): seconds(n) for n in (1, 2, 4, 8, 16, 17)}))
        self.random = random.Random(0)

    def run(self, rounds: int, first: int = 0) -> float:
        """The speed against plain decoding."""
        tokens, spent = 0, 0.0
        for index in range(first, first + rounds):
            chance = self.chance(index)
            (budget,) = self.planner.budgets([Budget(16, 16, True)])
            values: list[float] = []
            while len(values) < budget.depth and (not values or values[-1] >= budget.least_value):
                values.append(chance ** (len(values) + 1))
            drafting = self.level * len(values)
            (tree,) = self.planner.cut([_chain(*values)], drafting) if values else [_chain()]
            accepted = 0
            while accepted < len(tree) - 1 and self.random.random() < chance:
                accepted += 1
            noisy = self.seconds(len(tree)) * self.random.uniform(0.9, 1.1)
            self.planner.observe([tree], accepted + 1, len(values), drafting, noisy)
            tokens += accepted + 1
            spent += drafting + noisy
        return tokens / spent * self.seconds(1)


def test_cheap_drafts_that_never_pay_are_made_less_often() -> None:
    """Copying from the text costs a few percent of a pass of a small model: not in every round of a text without."""
    world = _World(_line(0.3), 0.02, lambda _: 0.0)
    assert world.run(1500) >= 0.99
    assert world.planner.is_on(1)


def test_what_is_too_dear_even_if_every_guess_was_right_is_never_tried() -> None:
    """A drafter as large as the target: its first draft alone would cost several passes."""
    costs = CostCurve({(1, n): _line(0.1)(n) for n in (1, 2, 4, 8, 16, 17)})
    for level, is_on in ((1.0, False), (0.9, False), (0.3, True), (0.001, True)):
        planner = Planner(costs, level_seconds=level)
        assert planner.is_on(1) == is_on
        (budget,) = planner.budgets([Budget(16, 16, True)])
        assert (budget.nodes > 0) == is_on


def test_a_first_draft_that_took_long_is_not_the_last() -> None:
    """It reads the prompt, or the machine was busy: drafts are paused, and tried again."""
    planner = Planner(CostCurve({(1, n): _line(0.1)(n) for n in (1, 2, 4, 8, 16, 17)}))
    asked = 0
    for _ in range(600):
        (budget,) = planner.budgets([Budget(16, 16, True)])
        tree = _chain(*[0.9] * (4 if budget.nodes else 0))
        drafting = 0.0 if not budget.nodes else 50.0 if asked == 0 else 0.2
        asked += budget.nodes > 0
        planner.observe([tree], len(tree), len(tree) - 1, drafting, _line(0.1)(len(tree)))
    assert asked > 50


def test_drafts_that_are_skipped_are_taken_up_within_a_few_rounds() -> None:
    world = _World(_line(0.1), 0.02, lambda index: 0.0 if index < 100 else 0.9)
    world.run(100)
    assert world.run(60, 100) >= 0.7 * _World(_line(0.1), 0.02, lambda _: 0.9).run(60)


def _line(slope: float) -> Callable[[int], float]:
    return lambda nodes: 1 + slope * (nodes - 1)


@pytest.mark.parametrize(
    ("level", "chance"), [(0.3, 0.05), (1.0, 0.9), (0.1, 0.0), (0.5, 0.5), (0.002, 0.0), (0.001, 0.3), (2.0, 1.0)]
)
def test_drafting_that_does_not_pay_costs_next_to_nothing(level: float, chance: float) -> None:
    """A drafter as large as the target, a random one, one that is often right and too dear."""
    world = _World(_line(0.3), level, lambda _: chance)
    assert world.run(1500) >= 0.97
    assert level < 0.01 or not world.planner.is_on(1) or world.planner.gain(1) > 0.97


@pytest.mark.parametrize(
    ("slope", "level", "chance"),
    [(0.0, 0.001, 0.8), (0.1, 0.001, 0.7), (0.05, 0.1, 0.9), (0.3, 0.001, 0.9)],
)
def test_drafting_that_pays_is_nearly_as_fast_as_the_best_fixed_length(
    slope: float, level: float, chance: float
) -> None:
    world = _World(_line(slope), level, lambda _: chance)
    best = max(
        sum(chance**i for i in range(length + 1)) / (level * length + 1 + slope * length) for length in range(17)
    )
    assert best > 1.5
    assert world.run(1500) >= 0.93 * best
    assert world.planner.is_on(1)


def test_it_is_switched_on_again_when_the_text_changes() -> None:
    """Chat, then code: after 600 useless rounds it is found within a few hundred that drafts pay."""
    world = _World(_line(0.1), 0.1, lambda index: 0.0 if index < 600 else 0.95)
    assert world.run(600) >= 0.97 and not world.planner.is_on(1)
    world.run(300, 600)
    assert world.run(300, 900) >= 2.0


def test_every_number_of_rows_is_judged_alone() -> None:
    world = _World(_line(0.1), 0.3, lambda _: 0.0)
    world.run(600)
    assert not world.planner.is_on(1) and world.planner.is_on(2)


# --------------------------------------------------------------------------------------------------
# In the engine


class _Frozen(CostCurve):
    """A curve that the clock of a busy machine does not correct."""

    def observe(self, rows: int, nodes: int, seconds: float) -> None:
        pass


def _engine(model: Any, costs: dict[tuple[int, int], float], **options: Any) -> Engine:
    plain = load(model, k=16, **options)
    return Engine(
        plain.target, plain.drafter, None, plain.end_ids, plain.capabilities, plain.options, Planner(_Frozen(costs))
    )


@pytest.mark.parametrize("drafter", ["suffix", "lookup", "recycle", "suffix+recycle", "self", "jacobi", "lookahead"])
@pytest.mark.parametrize("dear", [False, True])
def test_no_plan_changes_a_text(drafter: str, dear: bool) -> None:
    """T-A1, T-B7: whatever is measured, cut or switched off, greedy and sampled, alone and in a batch."""
    model = tiny_model("llama")
    plain = load(model, drafter="none")
    # Nodes that cost nothing, or so much that none pays.
    costs = {(1, 1): 1.0, (1, 2): 1e9 if dear else 1.0, (1, 64): 1e9 if dear else 1.0}
    engine = _engine(model, costs, drafter=drafter)
    settings = [SamplingParams(max_new_tokens=40, temperature=t, seed=3) for t in (0.0, 0.8)]
    drafted = 0
    for params in settings:
        for prompt in PROMPTS:
            result = engine.generate(list(prompt), params)
            assert result.tokens == plain.generate(list(prompt), params).tokens
            drafted += result.stats.num_drafted_tokens
        together = engine.generate([list(prompt) for prompt in PROMPTS], params)
        assert [r.tokens for r in together] == [r.tokens for r in plain.generate([list(p) for p in PROMPTS], params)]
    if not dear:
        assert drafted > 0 or drafter == "suffix"  # which finds little to copy in these texts
    elif drafter in ("suffix", "lookup", "recycle", "suffix+recycle", "self"):
        assert drafted == 0, "every node was cut"


def test_a_drafter_that_is_too_slow_is_switched_off_and_the_stats_say_so() -> None:
    """T-M1: one that is always right, and takes ten passes for it."""
    model, params = tiny_model("llama"), SamplingParams(max_new_tokens=200)
    wanted = load(model, drafter="none").generate(list(PROMPTS[0]), params).tokens
    quick = oracle([[*PROMPTS[0], *wanted]])

    def slow(session: Session, budget: Budget) -> TokenTree:
        time.sleep(0.01)
        tree: TokenTree = quick.draft(session, budget)
        return tree

    engine = _engine(model, {(1, 1): 1e-3, (1, 64): 2e-3}, drafter=Scripted("slow", slow))
    result = engine.generate(list(PROMPTS[0]), params)
    assert result.tokens == wanted
    assert result.stats.num_rounds_switched_off > 50 and result.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("drafter", ["lookahead", "jacobi"])
def test_a_drafter_whose_trees_are_not_cut_is_switched_off_where_they_are_too_dear(drafter: str) -> None:
    """It drafts in no time at all, and what it drafts costs a hundred passes."""
    costs = {(1, 1): 1e-3} | {(1, nodes): 0.1 for nodes in range(2, 130)}
    engine = _engine(tiny_model("llama"), costs, drafter=drafter)
    result = engine.generate(list(PROMPTS[0]), SamplingParams(max_new_tokens=60))
    assert result.stats.num_rounds_switched_off > 40


def test_a_planner_that_is_none_of_two_is_refused() -> None:
    with pytest.raises(InputError, match="planner must be one of auto, off, got 'fast'"):
        load(tiny_model("llama"), planner="fast")  # type: ignore[arg-type]
