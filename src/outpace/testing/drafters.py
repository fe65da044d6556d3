"""Drafters that are right, wrong, useless or broken on purpose: none of them may change what an engine emits.

They follow the `Drafter` protocol and are deterministic: what they propose depends on the committed tokens alone, so a
run can be repeated in any batch. Those that take `texts`, whole texts from the prompt on, look up what comes next.

    oracle, always_wrong, empty, end_spam, duplicate_siblings, random_trees    keep the contract
    BROKEN[name]()     breaks it, each in one way, whenever it is asked
    BRANCHING()        breaks it for models that can only take chains
    ODD[name]()        is outside the types of the contract: it may be refused or understood, and must do no harm
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..drafters.base import Budget
from ..session import Session
from ..tree import TokenTree

Texts = Sequence[Sequence[int]]


@dataclass(slots=True)
class Scripted:
    """One tree per session, from a function of the session and its budget.

    num_proposals: how many drafts were asked for. released: the sessions that were forgotten, by id.
    """

    name: str
    draft: Callable[[Session, Budget], Any]
    num_proposals: int = 0
    released: tuple[int, ...] = ()

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        self.num_proposals += len(sessions)
        return [self.draft(session, budget) for session, budget in zip(sessions, budgets, strict=True)]

    def release(self, session: Session) -> None:
        self.released += (session.id,)


def upcoming(texts: Texts, tokens: Sequence[int], count: int) -> list[int]:
    """Up to `count` tokens that follow `tokens` in the first of the texts that begins with them; [] in none of them."""
    for text in texts:
        if list(text[: len(tokens)]) == list(tokens):
            return list(text[len(tokens) : len(tokens) + count])
    return []


def oracle(texts: Texts) -> Scripted:
    """Drafts exactly what comes next, as much as it may."""

    def draft(session: Session, budget: Budget) -> TokenTree:
        return _chain(session, upcoming(texts, session.tokens, min(budget.nodes, budget.depth)))

    return Scripted("oracle", draft)


def always_wrong(texts: Texts, vocab_size: int) -> Scripted:
    """Drafts full chains; the first token is never what comes next."""

    def draft(session: Session, budget: Budget) -> TokenTree:
        count = min(budget.nodes, budget.depth)
        right = upcoming(texts, session.tokens, count)
        right += [0] * (count - len(right))
        return _chain(session, [(token + 1) % vocab_size for token in right])

    return Scripted("always wrong", draft)


def empty() -> Scripted:
    """Never drafts a token."""
    return Scripted("empty", lambda session, budget: _chain(session, []))


def end_spam(end: int) -> Scripted:
    """Drafts nothing but an end-of-text token, in full chains."""
    return Scripted("end spam", lambda session, budget: _chain(session, [end] * min(budget.nodes, budget.depth)))


def duplicate_siblings(texts: Texts) -> Scripted:
    """Drafts the right token again and again as siblings, and what follows it below the last of them."""

    def draft(session: Session, budget: Budget) -> TokenTree:
        right = upcoming(texts, session.tokens, 2) or [0]
        siblings = max(1, budget.nodes - 1) if budget.can_branch else 1
        tokens, parents = [right[0]] * siblings, [0] * siblings
        if len(right) == 2 and budget.depth >= 2 and budget.nodes >= 2:
            tokens.append(right[1])
            parents.append(siblings)
        return _tree(session, tokens, parents)

    return Scripted("duplicate siblings", draft)


def random_trees(
    vocab_size: int, texts: Texts = (), seed: int = 0, share_right: float = 0.6, num_nodes: int | None = None
) -> Scripted:
    """Seeded trees of any shape; a node below a right path is right with probability `share_right`.

    num_nodes: drafted nodes, if the budget has so many; None fills the budget. Where only chains are allowed, chains.
    """

    def draft(session: Session, budget: Budget) -> TokenTree:
        numbers = random.Random(f"{seed} {session.tokens}")
        right = upcoming(texts, session.tokens, budget.depth)
        tokens: list[int] = []
        parents: list[int] = []
        depths, is_right = [0], [True]  # of each node, the root included; right: its whole path comes next
        for node in range(1, 1 + min(budget.nodes, num_nodes or budget.nodes)):
            parent = node - 1
            if budget.can_branch:
                parent = numbers.choice([other for other in range(node) if depths[other] < budget.depth])
            elif depths[parent] == budget.depth:
                break
            depth = depths[parent]
            can_be_right = is_right[parent] and depth < len(right)
            token = numbers.randrange(vocab_size)
            if can_be_right and numbers.random() < share_right:
                token = right[depth]
            tokens.append(token)
            parents.append(parent)
            depths.append(depth + 1)
            is_right.append(can_be_right and token == right[depth])
        return _tree(session, tokens, parents)

    return Scripted("random trees", draft)


def _chain(session: Session, drafts: Sequence[int]) -> TokenTree:
    return TokenTree.chain(session.tokens[-1], drafts, "test")


def _tree(session: Session, tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    """Drafted tokens with their parents' node numbers; the root is node 0."""
    chain = _chain(session, tokens)
    return replace(chain, parents=(-1, *parents))


# ---------------------------------------------------------------- broken on purpose


@dataclass(slots=True)
class _Shapeless:
    """Answers with something else than one tree per session."""

    answer: Callable[[Sequence[TokenTree]], Any]
    name: str = "shapeless"

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Any:
        return self.answer([_chain(session, []) for session in sessions])

    def release(self, session: Session) -> None:
        pass


@dataclass(slots=True)
class _Clinging:
    """Drafts nothing, and raises when it is told to forget a session."""

    name: str = "clinging"

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        return [_chain(session, []) for session in sessions]

    def release(self, session: Session) -> None:
        raise RuntimeError("the drafter does not let go")


def _scripted(draft: Callable[[Session, Budget], Any]) -> Callable[[], Scripted]:
    return lambda: Scripted("broken", draft)


def _raise(session: Session, budget: Budget) -> TokenTree:
    raise RuntimeError("the drafter fell over")


def _one(session: Session, **fields: Any) -> TokenTree:
    """A root and one drafted token, with some fields replaced."""
    return replace(_chain(session, [1]), **fields)


def _with_token(token: Any) -> Callable[[], Scripted]:
    return _scripted(lambda session, budget: _chain(session, [token]))


_NAN = float("nan")

BROKEN: dict[str, Callable[[], Any]] = {
    "an id out of range": _with_token(10**9),
    "a negative id": _with_token(-1),
    "an id that is no integer": _with_token(1.0),
    "another bad id every round": _scripted(lambda s, b: _chain(s, [10**9 + len(s.tokens)])),
    "a value that is not a number": _scripted(lambda s, b: _one(s, value=(1.0, _NAN))),
    "a value above one": _scripted(lambda s, b: _one(s, value=(1.0, 1.5))),
    "a q that is not a number": _scripted(lambda s, b: _one(s, q=(None, torch.full((512,), _NAN)))),
    "a q of another size": _scripted(lambda s, b: _one(s, q=(None, torch.ones(1)))),
    "a q that is a list": _scripted(lambda s, b: _one(s, q=(None, [1.0]))),
    "too many nodes": _scripted(lambda s, b: _tree(s, [1] * (b.nodes + 1), [0] * (b.nodes + 1))),
    "too deep a tree": _scripted(lambda s, b: _chain(s, [1] * (b.depth + 1))),
    "another root": _scripted(lambda s, b: TokenTree.chain(s.tokens[-1] ^ 1, [1])),
    "a parent after its child": _scripted(lambda s, b: _tree(s, [1, 1], [2, 0])),
    "a node that is its own parent": _scripted(lambda s, b: _tree(s, [1], [1])),
    "fields of different lengths": _scripted(lambda s, b: _one(s, parents=(-1,))),
    "no node at all": _scripted(lambda s, b: TokenTree((), (), (), (), ())),
    "text": _scripted(lambda s, b: "the"),
    "None for a tree": _scripted(lambda s, b: None),
    "None for the trees": lambda: _Shapeless(lambda trees: None),
    "a tree too few": lambda: _Shapeless(lambda trees: trees[:-1]),
    "a tree too many": lambda: _Shapeless(lambda trees: [*trees, trees[0]]),
    "an exception": _scripted(_raise),
}

BRANCHING: Callable[[], Scripted] = _scripted(lambda s, b: _tree(s, [1, 2], [0, 0]))

ODD: dict[str, Callable[[], Any]] = {
    "lists instead of tuples": _scripted(lambda s, b: _one(s, tokens=[s.tokens[-1], 1], parents=[-1, 0])),
    "ids from numpy": _with_token(np.int64(1)),
    "ids that are booleans": _with_token(True),
    "a q from numpy": _scripted(lambda s, b: _one(s, q=(None, np.full(512, 1 / 512)))),
    "a q of integers": _scripted(lambda s, b: _one(s, q=(None, torch.nn.functional.one_hot(torch.tensor(1), 512)))),
    "a generator": lambda: _Shapeless(lambda trees: (tree for tree in trees)),
    "an exception when a session ends": _Clinging,
}
