"""Rows that are decided together: each keeps what it would keep alone, and none runs ahead of the others."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from outpace.tree import TokenTree
from outpace.verify import Verdict, coupled, together

TOKENS = st.integers(0, 2)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    size = draw(st.integers(1, 7))
    parents = (-1, *(draw(st.integers(0, node - 1)) for node in range(1, size)))
    tokens = tuple(draw(TOKENS) for _ in range(size))
    return TokenTree(tokens, parents, (1.0,) * size, ("",) * size, (None,) * size)


def alone(tree: TokenTree, text: list[int], length: int) -> Verdict:
    """The row by itself: `text` is what plain decoding emits, `length` where it ends."""
    count = 0

    def choose(node: int) -> int:
        return text[count]

    def goes_on(token: int) -> bool:
        nonlocal count
        count += 1
        return count < length

    return coupled(tree, choose, goes_on)


ROWS = st.lists(st.tuples(trees(), st.lists(TOKENS, min_size=8, max_size=8), st.integers(1, 8)), min_size=1, max_size=4)


@given(ROWS)
def test_rows_take_the_same_steps_and_stop_before_the_first_that_one_of_them_cannot_take(
    rows: list[tuple[TokenTree, list[int], int]],
) -> None:
    """Every step asks for all rows that go on, once; a row's verdict is the beginning of the one it has alone."""
    steps: list[set[int]] = []

    def choose(nodes: Mapping[int, int]) -> dict[int, int]:
        steps.append(set(nodes))
        return {row: rows[row][1][len(steps) - 1] for row in nodes}

    def going_on(tokens: Mapping[int, int]) -> list[int]:
        return [row for row in tokens if len(steps) < rows[row][2]]

    verdicts = together({row: tree for row, (tree, _, _) in enumerate(rows)}, choose, going_on)
    single = [alone(*row) for row in rows]
    # Alone, a row needs another forward after its last token, unless its text has ended there.
    needs_forward = [len(v.tokens) for v, (_, _, length) in zip(single, rows, strict=True) if len(v.tokens) < length]
    num_steps = min(needs_forward, default=max(len(v.tokens) for v in single))
    assert len(steps) == num_steps
    for row, verdict in enumerate(single):
        kept = min(num_steps, len(verdict.tokens))
        assert verdicts[row] == Verdict(verdict.path[:kept], verdict.tokens[:kept])
        assert [row in asked for asked in steps] == [True] * kept + [False] * (num_steps - kept)


@given(trees(), st.lists(TOKENS, min_size=8, max_size=8), st.integers(1, 8))
def test_one_row_together_is_that_row_alone(tree: TokenTree, text: list[int], length: int) -> None:
    count = 0

    def going_on(tokens: Mapping[int, int]) -> list[int]:
        nonlocal count
        count += 1
        return [5] if count < length else []

    (verdict,) = together({5: tree}, lambda nodes: {5: text[count]}, going_on).values()
    assert verdict == alone(tree, text, length)
