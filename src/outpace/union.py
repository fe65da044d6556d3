"""One tree from several drafters, cut to its most probable nodes by what was counted before.

Every source gives its own tree. Equal tokens under one parent become one node. How likely a node is accepted is not
what its source claims but what its kind of node was worth so far: each verification labels, for free, the children
of every accepted node of every source, whether they were verified or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from .cache import Cache
from .drafters.base import Budget, Drafter
from .drafters.candidates import Candidates
from .drafting import Drafting
from .session import Session
from .tree import TokenTree

_DEEPEST = 8  # deeper nodes are counted together
_DOUBT = 2.0  # promised tokens that the first trust in a drafter is worth


class Calibration:
    """How often nodes of a kind were the target's token, given that their parents were; older counts fade.

    A kind that was seldom seen is believed what its drafter says of it, as far as the drafter was right so far: a new
    kind of a drafter that promises too much is not hoped for again. The first word of a kind names its drafter.

    half_life: labels of a kind after which a count has half its weight. prior: how many labels the drafter's own
    estimate is worth. trust: in a drafter of which nothing is known.
    """

    def __init__(self, half_life: float = 200.0, prior: float = 4.0, trust: float = 0.7) -> None:
        self._fade, self._prior, self._trust = 0.5 ** (1 / half_life), prior, trust
        self._counts: dict[tuple[str, int], tuple[float, float]] = {}  # kind, depth -> hits, labels
        self._drafters: dict[str, tuple[float, float]] = {}  # drafter -> hits, hits that it promised

    def chance(self, kind: str, depth: int, own: float) -> float:
        """The probability that a node of this kind is accepted if its parent is. own: what its drafter says."""
        hits, labels = self._counts.get((kind, min(depth, _DEEPEST)), (0.0, 0.0))
        kept, promised = self._drafters.get(_drafter(kind), (0.0, 0.0))
        believed = min(1.0, own * (kept + self._trust * _DOUBT) / (promised + _DOUBT))
        return (hits + self._prior * believed) / (labels + self._prior)

    def count(self, kind: str, depth: int, is_hit: bool, own: float) -> None:
        """One label; own: what the drafter said."""
        key, name = (kind, min(depth, _DEEPEST)), _drafter(kind)
        hits, labels = self._counts.get(key, (0.0, 0.0))
        self._counts[key] = (hits * self._fade + is_hit, labels * self._fade + 1)
        kept, promised = self._drafters.get(name, (0.0, 0.0))
        self._drafters[name] = (kept * self._fade + is_hit, promised * self._fade + own)


def _drafter(kind: str) -> str:
    return kind.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class _Last:
    """What was proposed when a session had `length` tokens: one tree per source, with the children of its nodes."""

    length: int
    trees: list[tuple[TokenTree, list[list[int]]]]


class UnionDrafter:
    """The union of several drafters. vocab_size: of the target."""

    def __init__(self, sources: Sequence[Drafter], vocab_size: int) -> None:
        self.name = "+".join(source.name for source in sources)
        self.sources = tuple(sources)
        self.calibration = Calibration()
        self._sources = [Drafting(source, vocab_size) for source in sources]
        self._last: dict[int, _Last] = {}

    @property
    def level_seconds(self) -> float:
        return sum(getattr(source, "level_seconds", 0.0) for source in self.sources)

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        for session in sessions:
            self._learn(session)
        # What one source finds improbable may be better than it says, or likely by what another says.
        wide = [replace(budget, least_value=budget.least_value / 2) for budget in budgets]
        by_source = [source.trees(sessions, wide) for source in self._sources]
        unions = []
        for session, budget, trees in zip(sessions, budgets, zip(*by_source, strict=True), strict=True):
            last = self._last[session.id] = _Last(len(session.tokens), [(tree, _children(tree)) for tree in trees])
            unions.append(self._merged(session.tokens[-1], last).best(budget))
        return unions

    def _learn(self, session: Session) -> None:
        """Label what was proposed last by what was committed since."""
        last = self._last.pop(session.id, None)
        if last is None:
            return
        committed = session.tokens[last.length :]
        for tree, children in last.trees:
            node = 0
            for depth, token in enumerate(committed, 1):
                hit = 0
                for child in children[node]:
                    is_hit = tree.tokens[child] == token
                    own = _own(tree, node, child)
                    self.calibration.count(tree.source[child], depth, is_hit, own)
                    hit = child if is_hit else hit
                if hit == 0:
                    break
                node = hit

    def _merged(self, root: int, last: _Last) -> Candidates:
        """The trie of all trees; a node that several sources propose is wrong only if all of them are (noisy-or)."""
        found = Candidates(root)
        level = [(0, tree, children, 0) for tree, children in last.trees]
        depth = 0
        while level:
            depth += 1
            chances: dict[tuple[int, int], tuple[float, str]] = {}
            below = []
            for parent, tree, children, node in level:
                for child in children[node]:
                    own = _own(tree, node, child)
                    kind = tree.source[child]
                    chance = self.calibration.chance(kind, depth, own)
                    key = (parent, tree.tokens[child])
                    before, label = chances.get(key, (0.0, kind))
                    chances[key] = (1 - (1 - before) * (1 - chance), label)
                    below.append((key, tree, children, child))
            totals: dict[int, float] = {}
            for (parent, _), (chance, _) in chances.items():
                totals[parent] = totals.get(parent, 0.0) + chance
            place = {
                (parent, token): found.add(parent, token, chance / max(1.0, totals[parent]), label)
                for (parent, token), (chance, label) in chances.items()
            }
            level = [(place[key], tree, children, child) for key, tree, children, child in below]
        return found

    def attach(self, cache: Cache) -> None:
        for source in self.sources:
            if hasattr(source, "attach"):
                source.attach(cache)

    def observe(self, sessions: Sequence[Session], trees: Sequence[TokenTree], logits: Sequence[Tensor]) -> None:
        for source in self._sources:
            source.observe(sessions, trees, logits)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for source in self._sources for layer in source.hidden_layers}))

    def read(self, session: Session, start: int, hidden: Mapping[int, Tensor]) -> None:
        for source in self._sources:
            source.read(session, start, {layer: hidden[layer] for layer in source.hidden_layers})

    def release(self, session: Session) -> None:
        self._learn(session)
        for source in self._sources:
            source.release(session)


def _children(tree: TokenTree) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents[1:], 1):
        children[parent].append(node)
    return children


def _own(tree: TokenTree, node: int, child: int) -> float:
    """What a drafter says: the chance of a child, given its parent."""
    return tree.value[child] / tree.value[node] if tree.value[node] > 0 else 0.0
