"""The contract of drafters, and the plain one. A drafter guesses; it cannot change what is emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..session import Session
from ..tree import TokenTree


@dataclass(frozen=True, slots=True)
class Budget:
    """What a draft may have. nodes: drafted nodes; depth: of the tree; can_branch: False asks for a chain."""

    nodes: int
    depth: int
    can_branch: bool


class Drafter(Protocol):
    """Guesses what follows the committed tokens of each row.

    All rows come in one call, so that a drafter with a network can batch them. There is no feedback call: a drafter
    compares with `session.tokens` what it proposed before, and catches up. Whatever it returns is checked; an
    exception, wrong ids or too many nodes cost the round its draft and are counted.
    """

    name: str

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        """One tree per session; its root is the session's last token, its size at most the budget's."""
        ...

    def release(self, session: Session) -> None:
        """Forget a session that has ended; also called for one that was never seen."""
        ...


class NoDrafter:
    """Plain decoding: every tree is a single node."""

    name = "none"

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        return [TokenTree.chain(session.tokens[-1]) for session in sessions]

    def release(self, session: Session) -> None:
        pass
