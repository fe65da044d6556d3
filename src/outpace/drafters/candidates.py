"""A growing tree of guesses, cut to the best of them. What drafters that branch are built from."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from .. import noise, sampling
from ..session import Session
from ..tree import TokenTree
from .base import Budget


class Candidates:
    """Guesses under one root. Equal tokens under one parent are one node.

    tokens, parents, values, sources: [nodes]; values are the estimated probabilities that the whole path to a node is
    accepted, so they do not grow downwards.
    """

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.values, self.sources = [root], [-1], [1.0], [""]
        self.depths = [0]
        self._known: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, chance: float, source: str) -> int:
        """A child of node `parent`, or the one that is there. chance: that it is accepted if its parent is."""
        node = self._known.get((parent, token))
        value = self.values[parent] * min(1.0, max(0.0, chance))
        if node is None:
            node = self._known[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.values.append(value)
            self.sources.append(source)
            self.depths.append(self.depths[parent] + 1)
        elif value > self.values[node]:
            self.values[node], self.sources[node] = value, source
        return node

    def grow(self, budget: Budget, successors: Callable[[int], Iterable[tuple[int, float, str]]]) -> None:
        """Best-first: the likeliest node that has no children yet gets its successors, while they can still be among
        the best that the budget has room for. successors(node): (token, chance, source), best first."""
        heap = [(-1.0, 0)]
        kept = [budget.least_value] * budget.nodes  # the values of the best nodes so far, smallest first
        while heap:
            value, node = heapq.heappop(heap)
            if -value <= kept[0]:
                return
            if self.depths[node] >= budget.depth:
                continue
            for token, chance, source in successors(node):
                if -value * chance <= kept[0]:
                    break
                child = self.add(node, token, chance, source)
                heapq.heappushpop(kept, self.values[child])
                heapq.heappush(heap, (-self.values[child], child))

    def best(self, budget: Budget) -> TokenTree:
        """The most probable nodes that the budget has room for: a tree, or one path where it may not branch."""
        inside = [node for node in range(1, len(self.tokens)) if self.depths[node] <= budget.depth]
        if budget.can_branch:
            inside.sort(key=lambda node: -self.values[node])  # stable: a parent stays before its equal child
            chosen = sorted(inside[: budget.nodes])
        else:
            chosen, tip = [], 0
            for node in inside:  # parents come before their children
                if self.parents[node] == tip and node == self._best_child(tip) and len(chosen) < budget.nodes:
                    chosen.append(node)
                    tip = node
        place = {0: 0} | {node: index + 1 for index, node in enumerate(chosen)}
        return TokenTree(
            tokens=(self.tokens[0], *(self.tokens[node] for node in chosen)),
            parents=(-1, *(place[self.parents[node]] for node in chosen)),
            value=(1.0, *(self.values[node] for node in chosen)),
            source=("", *(self.sources[node] for node in chosen)),
            q=(None,) * (len(chosen) + 1),
        )

    def _best_child(self, node: int) -> int:
        children = [child for child in range(node + 1, len(self.tokens)) if self.parents[child] == node]
        return max(children, key=lambda child: (self.values[child], -child))


def drawn(
    session: Session, position: int, ids: Sequence[int], chances: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Successors in the order in which the target's own noise at a position prefers them: it is known before."""
    noisy = noise.rough(session.seed, position, ids, session.noise_stream)
    weights = sampling.preferences(chances, noisy, session.params)
    order = sorted(range(len(ids)), key=lambda i: -weights[i])
    return [ids[i] for i in order], [weights[i] for i in order]
