"""The contract of drafters, and the plain one. A drafter guesses; it cannot change what is emitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..session import Session
from ..tree import TokenTree

DEFAULT_K = 8  # drafted tokens per round, where neither the user nor the drafter says more


@dataclass(frozen=True, slots=True)
class Budget:
    """What a draft may have. nodes: drafted nodes; depth: of the tree; can_branch: False asks for a chain.

    least_value: a path that is accepted with less than this probability is not worth its costs. A hint.
    """

    nodes: int
    depth: int
    can_branch: bool
    least_value: float = 0.0


class Drafter(Protocol):
    """Guesses what follows the committed tokens of each row.

    All rows come in one call, so that a drafter with a network can batch them. A drafter learns what was accepted by
    comparing with `session.tokens` what it proposed before. Whatever it returns is checked; an exception, wrong ids or
    too many nodes cost the round its draft and are counted.

    Optional: `observe` (see `Observer`); `read` (see `Reader`); `needs_trees = True` for a drafter that is useless
    where only chains can be verified; `num_nodes`, the drafted nodes per round that it wants by default; `is_whole =
    True` for one whose trees only make sense whole, so that they are neither cut nor joined with those of others;
    `level_seconds`, what a token of depth costs to draft, where that is known before; `attach(cache)`, called once with
    the target's cache by a drafter's engine.
    """

    name: str

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        """One tree per session; its root is the session's last token, its size at most the budget's."""
        ...

    def release(self, session: Session) -> None:
        """Forget a session that has ended; also called for one that was never seen."""
        ...


@runtime_checkable
class Observer(Protocol):
    """A drafter that learns from the target's scores, which every verification has for all nodes of the tree."""

    def observe(self, sessions: Sequence[Session], trees: Sequence[TokenTree], logits: Sequence[Tensor]) -> None:
        """Called after a forward and before anything of it is committed. logits: [nodes, vocab] per session, raw."""
        ...


@runtime_checkable
class Reader(Protocol):
    """A drafter that reads the target's hidden states.

    hidden_layers: which ones, in the numbering of transformers: 0 is the embedding, i what layer i (counted from 1)
    puts out; the last of them is normalised, as the target's head gets it.
    """

    hidden_layers: tuple[int, ...]

    def read(self, session: Session, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Called after a forward, for the tokens of it that were kept: `session.tokens[start : start + n]`.

        hidden: layer -> [n, hidden], in the target's dtype. Tokens that came with a cache are never shown, and those
        that a recurrent state had to give up are shown again.
        """
        ...


class NoDrafter:
    """Plain decoding: every tree is a single node."""

    name = "none"

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        return [TokenTree.chain(session.tokens[-1]) for session in sessions]

    def release(self, session: Session) -> None:
        pass
