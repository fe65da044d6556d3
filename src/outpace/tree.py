"""A tree of drafted tokens. Knows nothing about models, drafters or acceptance rules.

Node 0 is the last committed token; every other node is a guess at what follows its parent. Siblings keep the
order in which they were proposed. `ancestors` is the mask of tree attention: a node sees itself and its path.

    tokens  (7, 3, 5, 9)        7 ─┬─ 3 ── 9
    parents (-1, 0, 0, 1)          └─ 5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .errors import DraftError


def depths(parents: Sequence[int]) -> list[int]:
    """[nodes] number of ancestors of each node; a parent of -1 means none. (-1, 0, 0, 1) gives [0, 1, 1, 2]."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def ancestors(parents: Sequence[int]) -> NDArray[np.bool_]:
    """[nodes, nodes] bool: row i is True at node i and at each of its ancestors."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every node's parent is the node before it."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A drafted tree.

    tokens:  [nodes] token ids; node 0 is the last committed token
    parents: [nodes] index of each node's parent, smaller than its own; parents[0] = -1
    value:   [nodes] estimated probability that the whole path to the node is accepted; 1 at the root
    source:  [nodes] which drafter proposed the node; "" at the root
    q:       [nodes] for `acceptance="rejection"`: the distribution ([vocab], sums to 1) from which the node's
             token was drawn given its earlier siblings, or None where the proposal was deterministic
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    value: tuple[float, ...]
    source: tuple[str, ...]
    q: tuple[Tensor | None, ...]

    @staticmethod
    def chain(
        root: int,
        drafts: Sequence[int] = (),
        source: str = "",
        value: Sequence[float] | None = None,
        q: Sequence[Tensor | None] | None = None,
    ) -> TokenTree:
        """A width-1 tree; without drafts the one-node tree of plain decoding."""
        num_drafts = len(drafts)
        return TokenTree(
            tokens=(root, *drafts),
            parents=tuple(range(-1, num_drafts)),
            value=(1.0, *(value if value is not None else [1.0] * num_drafts)),
            source=("", *([source] * num_drafts)),
            q=(None, *(q if q is not None else [None] * num_drafts)),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node's parent is the node before it."""
        return is_chain(self.parents)

    def children(self, node: int) -> list[int]:
        """The node's children in the order in which they were proposed."""
        return [child for child in range(node + 1, len(self.parents)) if self.parents[child] == node]

    def child(self, node: int, token: int) -> int | None:
        """The first child of `node` that carries `token`, or None."""
        for child in range(node + 1, len(self.parents)):
            if self.parents[child] == node and self.tokens[child] == token:
                return child
        return None

    def depths(self) -> list[int]:
        """[nodes] distance of each node from the root: (0, 1, 1, 2) for the tree above."""
        return depths(self.parents)

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included: [0, 1, 3] for node 3 above."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def ancestors(self) -> NDArray[np.bool_]:
        """[nodes, nodes] bool: row i is True at node i and at each of its ancestors. For the tree above:

        T . . .
        T T . .
        T . T .
        T T . T
        """
        return ancestors(self.parents)

    def after(self, prefix: Sequence[int]) -> TokenTree:
        """This tree hung under a chain of already committed tokens, which become its first nodes."""
        if not prefix:
            return self
        shift = len(prefix)
        return TokenTree(
            tokens=(*prefix, *self.tokens),
            parents=(*range(-1, shift), *(parent + shift for parent in self.parents[1:])),
            value=(1.0,) * shift + self.value,
            source=("",) * shift + self.source,
            q=(None,) * shift + self.q,
        )

    def best(self, count: int) -> TokenTree:
        """The `count` drafted nodes with the largest values, and no more; values must not grow downwards."""
        if count >= len(self) - 1:
            return self
        ranked = sorted(range(1, len(self)), key=lambda node: -self.value[node])  # stable: parents stay first
        chosen = [0, *sorted(ranked[:count])]
        place = {node: index for index, node in enumerate(chosen)}
        return TokenTree(
            tokens=tuple(self.tokens[node] for node in chosen),
            parents=(-1, *(place[self.parents[node]] for node in chosen[1:])),
            value=tuple(self.value[node] for node in chosen),
            source=tuple(self.source[node] for node in chosen),
            q=tuple(self.q[node] for node in chosen),
        )

    def check(self, root: int, vocab_size: int, max_drafts: int, max_depth: int, can_branch: bool = True) -> None:
        """Raise DraftError unless this is a tree under `root` that a target with `vocab_size` ids can verify."""
        num_nodes = len(self.tokens)
        fields = (self.tokens, self.parents, self.value, self.source, self.q)
        if not all(isinstance(field, tuple) for field in fields):
            raise DraftError("The fields of a draft must be tuples.")
        lengths = {len(field) for field in fields}
        if len(lengths) != 1 or num_nodes == 0:
            raise DraftError(f"The fields of a draft must have one entry per node, got lengths {sorted(lengths)}.")
        if self.tokens[0] != root:
            raise DraftError(f"Node 0 must be the last committed token {root}, got {self.tokens[0]!r}.")
        if self.parents[0] != -1:
            raise DraftError(f"Node 0 is the root and must have parent -1, got {self.parents[0]!r}.")
        if num_nodes - 1 > max_drafts:
            raise DraftError(f"The draft has {num_nodes - 1} nodes, more than the {max_drafts} asked for.")
        for node in range(1, num_nodes):
            token, parent, value = self.tokens[node], self.parents[node], self.value[node]
            if type(token) is not int or not 0 <= token < vocab_size:
                raise DraftError(f"Drafted token {token!r} is not an id below {vocab_size}.")
            if not isinstance(parent, int) or not 0 <= parent < node:
                raise DraftError(f"Node {node} has parent {parent!r}; a parent must come before its child.")
            if not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
                raise DraftError(f"Node {node} has value {value!r}; a value is a probability.")
            q = self.q[node]
            if q is not None and not (isinstance(q, Tensor) and q.shape == (vocab_size,)):
                shape = f"of shape {tuple(q.shape)}" if isinstance(q, Tensor) else f"that is a {type(q).__name__}"
                raise DraftError(f"Node {node} has a q {shape} instead of ({vocab_size},).")
            # Written so that NaN fails too. A token that q excludes cannot have been drawn from it.
            if q is not None and not (abs(float(q.sum()) - 1) < 1e-3 and float(q[token]) > 0):
                raise DraftError(
                    f"Node {node} has a q that sums to {float(q.sum())} and gives {float(q[token])} to its "
                    f"token {token}; q must be the distribution from which the token was drawn."
                )
        if max(self.depths()) > max_depth:
            raise DraftError(f"The draft is {max(self.depths())} tokens deep, more than the {max_depth} asked for.")
        if not can_branch and not self.is_chain:
            raise DraftError("The draft branches, and this model can only verify chains.")
