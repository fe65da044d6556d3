"""Where an ending occurred before: in one growing text, and in a bounded store of other texts.

Both find endings by their last few tokens, longest first, and then compare backwards. A growing text keeps them in a
dictionary. A store sorts the hashes of large pieces once, so that millions of tokens cost a few binary searches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

MAX_MATCH = 64  # longer matches say no more
MAX_OCCURRENCES = 16  # the latest ones
_SEPARATOR = -1
_OPEN_TOKENS = 1 << 14  # texts are indexed one by one up to here, then sorted
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An earlier place of the ending. match: how many tokens agree; what followed begins at tokens[start].

    repeats: the place runs into the ending itself, and a copy goes on with what it has copied.
    """

    tokens: Sequence[int] | NDArray[np.int32]
    start: int
    match: int
    repeats: bool

    def token(self, index: int) -> int | None:
        """The token `index` places behind the match, or None where the text ended there."""
        if self.repeats:
            return self.tokens[self.start + index % (len(self.tokens) - self.start)]
        if self.start + index >= len(self.tokens):
            return None
        token = int(self.tokens[self.start + index])
        return None if token == _SEPARATOR else token


def _match_length(tokens: Sequence[int] | NDArray[np.int32], end: int, ending: Sequence[int]) -> int:
    """How many of the last tokens of `ending` stand in `tokens` up to index `end`, included."""
    limit = min(MAX_MATCH, end + 1, len(ending))
    length = 0
    while length < limit and tokens[end - length] == ending[-1 - length]:
        length += 1
    return length


class GrowingText:
    """One text and the places of its short pieces. orders: lengths of the pieces, increasing."""

    def __init__(self, orders: Sequence[int] = (1, 2, 4, 8)) -> None:
        self.tokens: list[int] = []
        self._orders = tuple(orders)
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens) - 1
            for order in self._orders:
                if order <= end + 1:
                    ends = self._ends.setdefault(tuple(self.tokens[-order:]), [])
                    ends.append(end)
                    if len(ends) > MAX_OCCURRENCES + 1:
                        del ends[0]

    def find(self, ending: Sequence[int], least: int) -> list[Occurrence]:
        """Where `ending` occurred, latest first, with at least `least` tokens; its own last place is left out."""
        is_own = ending is self.tokens
        for order in reversed(self._orders):
            if order > len(ending):
                continue
            found = []
            for end in reversed(self._ends.get(tuple(ending[-order:]), ())):
                if is_own and end == len(self.tokens) - 1:
                    continue
                match = _match_length(self.tokens, end, ending)
                if match >= least:
                    found.append(Occurrence(self.tokens, end + 1, match, repeats=is_own))
            if found:
                return found
        return []


@dataclass(frozen=True, slots=True)
class _Sorted:
    """A piece of a store. orders: length -> (sorted hashes, the index at which each ends)."""

    tokens: NDArray[np.int32]
    orders: dict[int, tuple[NDArray[np.uint64], NDArray[np.int64]]]


def _hashes(tokens: NDArray[np.int32], order: int) -> NDArray[np.uint64]:
    """[len - order + 1] a hash of every piece of `order` tokens."""
    values = tokens.astype(np.uint64) + np.uint64(1)
    count = max(0, len(tokens) - order + 1)
    total = np.zeros(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for place in range(order):
            total = (total + values[place : place + count]) * _MULTIPLIER
            total ^= total >> np.uint64(29)
    return total


def _sorted(tokens: NDArray[np.int32], orders: Sequence[int]) -> _Sorted:
    found = {}
    for order in orders:
        hashes = _hashes(tokens, order)
        places = np.argsort(hashes, kind="stable")
        found[order] = (hashes[places], places + order - 1)
    return _Sorted(tokens, found)


@dataclass(slots=True)
class TextStore:
    """Texts of earlier requests or of files, at most about `max_tokens` of them; the oldest go first.

    orders: lengths of the pieces by which endings are found.
    """

    max_tokens: int = 1_000_000
    orders: tuple[int, ...] = (3, 6, 12)
    _pieces: list[_Sorted] = field(default_factory=list)
    _open: GrowingText = field(init=False)

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max_tokens of a text store must be 1 or larger, got {self.max_tokens!r}.")
        self._open = GrowingText(self.orders)

    def __len__(self) -> int:
        return len(self._open.tokens) + sum(len(piece.tokens) for piece in self._pieces)

    def add(self, tokens: Sequence[int]) -> None:
        """Remember a text; the oldest texts are forgotten beyond the limit."""
        self._open.extend([*tokens[-self.max_tokens :], _SEPARATOR])
        if len(self._open.tokens) >= min(_OPEN_TOKENS, self.max_tokens):
            self._close()
        while len(self) > self.max_tokens and self._pieces:
            self._pieces.pop(0)

    def _close(self) -> None:
        """Sort the open texts. Neighbours of one size are joined, so that there are few pieces to search."""
        tokens = np.array(self._open.tokens, dtype=np.int32)
        self._open = GrowingText(self.orders)
        while self._pieces and len(self._pieces[-1].tokens) <= min(len(tokens), self.max_tokens // 16):
            tokens = np.concatenate([self._pieces.pop().tokens, tokens])
        self._pieces.append(_sorted(tokens, self.orders))

    def find(self, ending: Sequence[int], least: int) -> list[Occurrence]:
        """Where `ending` occurred, latest first, with at least `least` tokens and the longest order that is found."""
        for order in reversed(self.orders):
            if order > len(ending):
                continue
            found = [o for o in self._open.find(ending, max(least, order)) if o.match >= order]
            tail = np.array(ending[-order:], dtype=np.int32)
            key = _hashes(tail, order)[0]
            for piece in reversed(self._pieces):
                hashes, ends = piece.orders[order]
                first, last = np.searchsorted(hashes, key, "left"), np.searchsorted(hashes, key, "right")
                for end in ends[max(first, last - MAX_OCCURRENCES) : last][::-1].tolist():
                    match = _match_length(piece.tokens, end, ending)
                    if match >= max(least, order):
                        found.append(Occurrence(piece.tokens, end + 1, match, repeats=False))
                if len(found) >= MAX_OCCURRENCES:
                    break
            if found:
                return found[:MAX_OCCURRENCES]
        return []

    def tokens(self) -> NDArray[np.int32]:
        """[len(self)] all texts, oldest first, each with a separator behind it."""
        return np.concatenate([*(piece.tokens for piece in self._pieces), np.array(self._open.tokens, dtype=np.int32)])

    @staticmethod
    def of_tokens(tokens: NDArray[np.int32], max_tokens: int = 1_000_000) -> TextStore:
        """The store of which `tokens` came, or its newest part."""
        store = TextStore(max_tokens)
        store._pieces.append(_sorted(tokens[-max_tokens:], store.orders))
        return store
