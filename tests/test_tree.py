"""Token trees: what every operation promises, on trees that hypothesis invents, and what `check` refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outpace.errors import DraftError
from outpace.tree import TokenTree

T, F = True, False
VOCAB_SIZE = 6

# The tree of the module's docstring:  7 ─┬─ 3 ── 9
#                                         └─ 5
EXAMPLE = TokenTree((7, 3, 5, 9), (-1, 0, 0, 1), (1.0, 0.8, 0.1, 0.4), ("", "a", "b", "a"), (None,) * 4)


def make(tokens: Sequence[int], parents: Sequence[int], values: Sequence[float] | None = None) -> TokenTree:
    count = len(tokens)
    return TokenTree(
        tuple(tokens),
        tuple(parents),
        tuple(values or [1.0] * count),
        ("", *["d"] * (count - 1)),
        (None,) * count,
    )


@st.composite
def trees(draw: st.DrawFn, max_drafts: int = 10, may_repeat: bool = True) -> TokenTree:
    """Any tree under root 0; without `may_repeat`, siblings carry different tokens."""
    tokens, parents = [0], [-1]
    for _ in range(draw(st.integers(0, max_drafts))):
        parent = draw(st.integers(0, len(tokens) - 1))
        taken = {tokens[node] for node in range(1, len(tokens)) if parents[node] == parent}
        choices = [token for token in range(VOCAB_SIZE) if may_repeat or token not in taken]
        if choices:
            tokens.append(draw(st.sampled_from(choices)))
            parents.append(parent)
    values = [1.0] + [draw(st.integers(0, 100)) / 100 for _ in tokens[1:]]
    return make(tokens, parents, values)


def texts(tree: TokenTree) -> list[tuple[int, ...]]:
    """[nodes] the tokens on the way to each node, found by following the parents."""
    found: list[tuple[int, ...]] = []
    for node in range(len(tree)):
        text: tuple[int, ...] = ()
        while node != -1:
            text = (tree.tokens[node], *text)
            node = tree.parents[node]
        found.append(text)
    return found


fixed = settings(max_examples=150, deadline=None, derandomize=True)


# --------------------------------------------------------------------------------------------------
# The examples of the docstrings


def test_the_example_of_the_docstrings() -> None:
    """Every number that the docstrings show."""
    assert len(EXAMPLE) == 4
    assert EXAMPLE.depths() == [0, 1, 1, 2]
    assert EXAMPLE.path(3) == [0, 1, 3]
    assert EXAMPLE.path(0) == [0]
    assert EXAMPLE.children(0) == [1, 2]
    assert EXAMPLE.child(0, 5) == 2
    assert EXAMPLE.child(0, 9) is None
    assert EXAMPLE.ancestors().tolist() == [
        [T, F, F, F],
        [T, T, F, F],
        [T, F, T, F],
        [T, T, F, T],
    ]
    assert not EXAMPLE.is_chain


def test_a_chain_is_a_tree_of_width_one_and_plain_decoding_a_chain_without_drafts() -> None:
    """`chain` fills every field, with a value, a source and a q per draft where they are given."""
    plain = TokenTree.chain(7)
    assert plain == TokenTree((7,), (-1,), (1.0,), ("",), (None,))
    assert plain.is_chain and plain.depths() == [0] and plain.children(0) == []
    chain = TokenTree.chain(7, [3, 3, 9], "ngram", [0.9, 0.5, 0.25])
    assert chain.tokens == (7, 3, 3, 9)
    assert chain.parents == (-1, 0, 1, 2)
    assert chain.value == (1.0, 0.9, 0.5, 0.25)
    assert chain.source == ("", "ngram", "ngram", "ngram")
    assert chain.is_chain and chain.depths() == [0, 1, 2, 3]
    q = torch.tensor([0.5, 0.5])
    assert TokenTree.chain(7, [1], q=[q]).q == (None, q)
    assert TokenTree.chain(7, [1, 2]).value == (1.0, 1.0, 1.0)


# --------------------------------------------------------------------------------------------------
# Structure


@fixed
@given(trees())
def test_the_attention_mask_is_reachability(tree: TokenTree) -> None:
    """A node sees another if and only if following parents leads there; depths and paths say the same."""
    mask, depths = tree.ancestors(), tree.depths()
    reach = np.eye(len(tree), dtype=bool)  # reachability by repeated steps to the parent
    step = np.zeros_like(reach)
    for node in range(1, len(tree)):
        step[node, tree.parents[node]] = True
    for _ in range(len(tree)):
        reach |= reach @ step
    assert mask.dtype == np.bool_ and np.array_equal(mask, reach)
    for node in range(len(tree)):
        path = tree.path(node)
        assert path == np.flatnonzero(mask[node]).tolist()
        assert path[0] == 0 and path[-1] == node and len(path) == depths[node] + 1
        assert tuple(tree.tokens[step] for step in path) == texts(tree)[node]


@fixed
@given(trees())
def test_children_are_the_inverse_of_parents(tree: TokenTree) -> None:
    """In order of proposal, each node under exactly one parent; `child` is the first with its token."""
    seen = [child for node in range(len(tree)) for child in tree.children(node)]
    assert sorted(seen) == list(range(1, len(tree)))
    for node in range(len(tree)):
        children = tree.children(node)
        assert children == sorted(children) and all(tree.parents[child] == node for child in children)
        for token in range(VOCAB_SIZE):
            carriers = [child for child in children if tree.tokens[child] == token]
            assert tree.child(node, token) == (carriers[0] if carriers else None)
    assert tree.is_chain == (tree.parents == tuple(range(-1, len(tree) - 1)))


# --------------------------------------------------------------------------------------------------
# after, merge


@fixed
@given(trees(), st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4))
def test_a_tree_after_a_prefix_is_the_same_tree_under_a_chain(tree: TokenTree, prefix: list[int]) -> None:
    """Every node's text gets the prefix in front; the prefix is certain and no drafter's work."""
    moved = tree.after(prefix)
    shift = len(prefix)
    assert len(moved) == len(tree) + shift
    assert texts(moved)[shift:] == [(*prefix, *text) for text in texts(tree)]
    assert moved.value == (1.0,) * shift + tree.value
    assert moved.source == ("",) * shift + tree.source
    assert moved.depths()[shift:] == [depth + shift for depth in tree.depths()]
    moved.check(moved.tokens[0], VOCAB_SIZE, len(moved), len(moved))


def test_a_tree_after_a_prefix_by_hand() -> None:
    """The example tree after the tokens 1 and 2."""
    moved = EXAMPLE.after([1, 2])
    assert moved.tokens == (1, 2, 7, 3, 5, 9)
    assert moved.parents == (-1, 0, 1, 2, 2, 3)
    assert moved.value == (1.0, 1.0, 1.0, 0.8, 0.1, 0.4)
    assert EXAMPLE.after([]) is EXAMPLE


@fixed
@given(trees(), st.integers(0, 12))
def test_the_best_nodes_are_a_tree_with_the_largest_values(tree: TokenTree, count: int) -> None:
    falling = list(tree.value)
    for node, parent in enumerate(tree.parents[1:], 1):
        falling[node] = min(falling[node], falling[parent])
    tree = replace(tree, value=tuple(falling))
    best = tree.best(count)
    best.check(0, VOCAB_SIZE, count, 20)
    assert len(best) == min(count, len(tree) - 1) + 1
    assert sorted(best.value[1:], reverse=True) == sorted(tree.value[1:], reverse=True)[:count]
    assert set(texts(best)) <= set(texts(tree))


def test_the_best_nodes_by_hand() -> None:
    """Of 3 (0.8), 5 (0.1) and 9 below 3 (0.4), the best two are 3 and 9."""
    best = EXAMPLE.best(2)
    assert (best.tokens, best.parents, best.value) == ((7, 3, 9), (-1, 0, 1), (1.0, 0.8, 0.4))
    assert EXAMPLE.best(3) is EXAMPLE and EXAMPLE.best(0).tokens == (7,)


# --------------------------------------------------------------------------------------------------
# check


@fixed
@given(trees(), st.integers(0, 12), st.integers(0, 12), st.booleans())
def test_check_accepts_trees_within_the_budget_and_no_others(
    tree: TokenTree, max_drafts: int, max_depth: int, can_branch: bool
) -> None:
    """Those with few enough nodes, shallow enough, and unbranched where only chains can be verified."""
    fits = len(tree) - 1 <= max_drafts and max(tree.depths()) <= max_depth and (can_branch or tree.is_chain)
    if fits:
        tree.check(0, VOCAB_SIZE, max_drafts, max_depth, can_branch)
    else:
        with pytest.raises(DraftError):
            tree.check(0, VOCAB_SIZE, max_drafts, max_depth, can_branch)


def broken(**fields: Any) -> TokenTree:
    """The example tree with other fields, of types that only an untyped drafter would give."""
    return replace(EXAMPLE, **fields)


GOOD_Q = torch.tensor([0.0] * 3 + [0.75] + [0.0] * 5 + [0.25])  # [10], allows tokens 3 and 9


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (broken(tokens=(7, 3, 5)), r"lengths \[3, 4\]"),
        (broken(parents=(-1, 0, 0)), r"lengths \[3, 4\]"),
        (broken(value=(1.0,)), r"lengths \[1, 4\]"),
        (broken(source=("",) * 5), r"lengths \[4, 5\]"),
        (broken(q=()), r"lengths \[0, 4\]"),
        (TokenTree((), (), (), (), ()), r"lengths \[0\]"),
        (broken(tokens=(6, 3, 5, 9)), "last committed token 7, got 6"),
        (broken(parents=(0, 0, 0, 1)), "parent -1, got 0"),
        (broken(tokens=(7, 3, 10, 9)), "token 10 .*below 10"),
        (broken(tokens=(7, 3, -1, 9)), "token -1 "),
        (broken(tokens=(7, 3, 5.0, 9)), r"token 5\.0 "),
        (broken(tokens=(7, 3, None, 9)), "token None "),
        (broken(tokens=(7, "3", 5, 9)), "token '3' "),
        (broken(tokens=(7, np.int64(3), 5, 9)), r"token np.int64\(3\) "),
        (broken(parents=(-1, 0, 0, 3)), "Node 3 has parent 3"),
        (broken(parents=(-1, 0, 3, 0)), "Node 2 has parent 3"),
        (broken(parents=(-1, 0, -1, 1)), "Node 2 has parent -1"),
        (broken(parents=(-1, 0, 0.0, 1)), r"Node 2 has parent 0\.0"),
        (broken(parents=(-1, None, 0, 1)), "Node 1 has parent None"),
        (broken(value=(1.0, 0.8, 1.01, 0.4)), r"Node 2 has value 1\.01"),
        (broken(value=(1.0, 0.8, -0.1, 0.4)), r"Node 2 has value -0\.1"),
        (broken(value=(1.0, 0.8, float("nan"), 0.4)), "Node 2 has value nan"),
        (broken(value=(1.0, float("inf"), 0.1, 0.4)), "Node 1 has value inf"),
        (broken(value=(1.0, None, 0.1, 0.4)), "Node 1 has value None"),
        (broken(value=(1.0, "0.8", 0.1, 0.4)), r"Node 1 has value '0\.8'"),
        (broken(q=(None, GOOD_Q[:9], None, None)), r"Node 1 .*shape \(9,\) instead of \(10,\)"),
        (broken(q=(None, GOOD_Q.unsqueeze(0), None, None)), r"Node 1 .*shape \(1, 10\)"),
        (broken(q=(None, None, GOOD_Q, None)), r"Node 2 .*gives 0\.0 to its token 5"),
        (broken(q=(None, GOOD_Q * 2, None, None)), r"Node 1 .*sums to 2\.0"),
        (broken(q=(None, GOOD_Q / 2, None, None)), r"Node 1 .*sums to 0\.5"),
        (broken(q=(None, GOOD_Q * float("nan"), None, None)), "Node 1 .*sums to nan"),
        (broken(q=(None, GOOD_Q.log(), None, None)), "Node 1 .*sums to -inf"),
    ],
)
def test_check_names_what_is_broken(tree: TokenTree, message: str) -> None:
    """A drafter is not trusted: each field is looked at, and the message has the value that was seen."""
    with pytest.raises(DraftError, match=message):
        tree.check(7, 10, 8, 8)


def test_check_names_the_budget_that_is_exceeded() -> None:
    """Too many nodes, too deep, a branch where only chains can be verified."""
    with pytest.raises(DraftError, match="3 nodes, more than the 2"):
        EXAMPLE.check(7, 10, 2, 8)
    with pytest.raises(DraftError, match="2 tokens deep, more than the 1"):
        EXAMPLE.check(7, 10, 8, 1)
    with pytest.raises(DraftError, match="only verify chains"):
        EXAMPLE.check(7, 10, 8, 8, can_branch=False)
    EXAMPLE.check(7, 10, 3, 2)
    TokenTree.chain(7, [1, 2]).check(7, 10, 2, 2, can_branch=False)
    replace(EXAMPLE, q=(None, GOOD_Q, None, GOOD_Q.double())).check(7, 10, 3, 2)


@fixed
@given(trees(), st.integers(0, 3), st.data())
def test_check_refuses_any_parent_that_does_not_come_first(tree: TokenTree, ahead: int, data: st.DataObject) -> None:
    """A node's parent may not be itself or a later node, wherever in the tree."""
    assume(len(tree) > 1)
    node = data.draw(st.integers(1, len(tree) - 1))
    parents = [*tree.parents]
    parents[node] = node + ahead
    with pytest.raises(DraftError, match=f"Node {node} has parent {node + ahead}"):
        replace(tree, parents=tuple(parents)).check(0, VOCAB_SIZE, 20, 20)
