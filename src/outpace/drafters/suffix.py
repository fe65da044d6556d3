"""Drafts from texts: what followed earlier occurrences of the ending, in this text and in earlier ones. Needs no model.

After prompt lookup (Saxena 2023), SAM-Decoding (arXiv 2411.10666) and SuffixDecoding (arXiv 2411.04975): the longest
match decides, several places with equal matches are counted, and where their continuations differ the draft branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import InputError
from ..session import Session
from ..tree import TokenTree
from .base import Budget
from .candidates import Candidates
from .memory import Memory
from .texts import GrowingText, Occurrence, TextStore

# A shorter match counts half as much per missing token, a place further back a little less than the one before.
_PER_TOKEN, _PER_PLACE = 0.5, 0.8
DEFAULT_LEAST_VALUE = 0.1
_PREDICTION_MATCH = 8  # how much the beginning of a prediction is trusted, in matched tokens


@dataclass(slots=True)
class _Texts:
    """What a session draws from. prediction: the text that its user expects back."""

    own: GrowingText
    prediction: GrowingText = field(default_factory=GrowingText)


class SuffixDrafter:
    """Trees of continuations.

    min_match: shortest ending worth a draft. least_value: paths that are less likely than this are not drafted; 0
    drafts as much as the budget allows, which with min_match 1 is classical prompt lookup. memory: where the outputs of
    ended requests go, and are found again by requests of the same tenant; None forgets them. corpus: texts that all
    tenants share.
    """

    def __init__(
        self,
        min_match: int = 2,
        least_value: float = DEFAULT_LEAST_VALUE,
        name: str = "suffix",
        memory: Memory | None = None,
        corpus: TextStore | None = None,
    ) -> None:
        if isinstance(min_match, bool) or not isinstance(min_match, int) or min_match < 1:
            raise InputError(f"min_match must be a whole number, 1 or larger, got {min_match!r}.")
        if not 0 <= least_value < 1:
            raise InputError(f"least_value must be at least 0 and below 1, got {least_value!r}.")
        self.name = name
        self._min_match, self._least_value = min_match, least_value
        self._memory = memory
        self._corpus = corpus
        self._texts: dict[int, _Texts] = {}

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        return [self._propose(session, budget) for session, budget in zip(sessions, budgets, strict=True)]

    def _propose(self, session: Session, budget: Budget) -> TokenTree:
        texts = self._texts.get(session.id)
        if texts is None:
            texts = self._texts[session.id] = _Texts(GrowingText())
            texts.prediction.extend(session.prediction)
        texts.own.extend(session.tokens[len(texts.own.tokens) :])
        found = Candidates(session.tokens[-1])
        self._grow(found, self._occurrences(session, texts), budget)
        return found.best(budget)

    def _occurrences(self, session: Session, texts: _Texts) -> list[tuple[Occurrence, float]]:
        """Earlier places of the ending, with their weights."""
        ending = texts.own.tokens
        found = texts.own.find(ending, self._min_match)
        remembered = None if self._memory is None else self._memory.of(session.params.tenant)
        for store in (remembered, self._corpus):
            if store is not None:
                found += store.find(ending, self._min_match)
        if texts.prediction.tokens:
            expected = texts.prediction.find(ending, self._min_match)
            if not expected and len(session.tokens) == session.num_prompt_tokens:
                expected = [Occurrence(texts.prediction.tokens, 0, _PREDICTION_MATCH, repeats=False)]
            found += expected
        longest = max((place.match for place in found), default=0)
        return [(p, _PER_TOKEN ** (longest - p.match) * _PER_PLACE**rank) for rank, p in enumerate(found)]

    def _grow(self, found: Candidates, places: list[tuple[Occurrence, float]], budget: Budget) -> None:
        """Every node gets the tokens that its places go on with, each with its share of their weight."""
        here = {0: places}

        def successors(node: int) -> Iterator[tuple[int, float, str]]:
            depth = found.depths[node]
            groups: dict[int, list[tuple[Occurrence, float]]] = {}
            for place, weight in here.pop(node):
                token = place.token(depth)
                if token is not None:
                    groups.setdefault(token, []).append((place, weight))
            weights = {token: sum(weight for _, weight in group) for token, group in groups.items()}
            total = sum(weights.values())
            for token in sorted(weights, key=lambda token: -weights[token]):
                share, group = weights[token] / total, groups[token]
                match = max(place.match for place, _ in group)
                # A copied token is right about as often as the match is long.
                chance = share * match / (match + 1)
                if found.values[node] * chance < self._least_value:
                    return
                here[len(found)] = group
                yield token, chance, f"{self.name} m{_bucket(match)} s{int(share * 4)}"

        found.grow(budget, successors)

    def release(self, session: Session) -> None:
        self._texts.pop(session.id, None)
        if self._memory is not None and session.new_tokens:
            self._memory.add(session.params.tenant, session.new_tokens)


def _bucket(match: int) -> int:
    """1, 2, 3, 4, then doubling: 4 to 7, 8 to 15, ..."""
    return match if match < 4 else 4 * (match // 4).bit_length() if match < 64 else 32
