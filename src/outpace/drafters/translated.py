"""Drafts from a model with another tokenizer: its tokens become text, and the text tokens of the target.

String-level matching (Timor et al., arXiv 2502.05202, "SLEM"): the draft model reads the text so far in its own
tokens and goes on; what it writes is encoded with the target's tokenizer and proposed. Any pair of tokenizers works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..sampling import SamplingParams
from ..session import Session, Stats
from ..tree import TokenTree
from .base import Budget
from .model import ModelDrafter

_LOOKBEHIND = 16  # tokens that are encoded again with new text, as tokens may merge over a boundary
_LONGEST_TAIL = 64
_BROKEN = "�"  # what a decoder gives for half a character


@dataclass(slots=True)
class _Twin:
    """The text of a session in the draft model's tokens. settled: (target tokens, draft tokens) of the same text."""

    session: Session
    settled: tuple[int, int] = (0, 0)


class TranslatedDrafter:
    """Chains of a draft model with another tokenizer. drafter: of that model, in its own ids."""

    name = "model"

    def __init__(self, drafter: ModelDrafter, tokenizer: Any, draft_tokenizer: Any) -> None:
        self._drafter = drafter
        self._tokenizer, self._draft_tokenizer = tokenizer, draft_tokenizer
        self._twins: dict[int, _Twin] = {}

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        trees = [TokenTree.chain(session.tokens[-1]) for session in sessions]
        asked = [row for row, session in enumerate(sessions) if self._follow(session)]
        twins = [self._twins[sessions[row].id].session for row in asked]
        limits = [Budget(budgets[row].depth + 2, budgets[row].depth + 2, can_branch=False) for row in asked]
        if twins:
            for row, tree in zip(asked, self._drafter.propose(twins, limits), strict=True):
                trees[row] = self._translated(sessions[row], tree, budgets[row])
        return trees

    def release(self, session: Session) -> None:
        twin = self._twins.pop(session.id, None)
        if twin is not None:
            self._drafter.release(twin.session)

    def _follow(self, session: Session) -> bool:
        """Bring the twin up to the session's text; False where that ends inside a character."""
        twin = self._twins.get(session.id)
        if twin is None:
            twin = self._twins[session.id] = _Twin(self._new_twin(session))
        ours, theirs = twin.settled
        tail = self._text(session.tokens[ours:])
        if tail.endswith(_BROKEN):
            return False
        ids = self._draft_tokenizer(tail, add_special_tokens=False)["input_ids"]
        tokens = twin.session.tokens
        known = len(tokens)
        same = theirs
        while same < known and same - theirs < len(ids) and tokens[same] == ids[same - theirs]:
            same += 1
        twin.session.tokens[theirs:] = ids
        # The last token is fed again, for its scores.
        self._drafter.rewind(twin.session, min(same, len(twin.session.tokens) - 1))
        self._settle(session, twin)
        return len(twin.session.tokens) > 0

    def _settle(self, session: Session, twin: _Twin) -> None:
        """Move the settled part forward, so that long texts are not encoded again and again."""
        ours, theirs = twin.settled
        end = len(session.tokens) - _LOOKBEHIND
        if end - ours < _LONGEST_TAIL:
            return
        head = self._draft_tokenizer(self._text(session.tokens[ours:end]), add_special_tokens=False)["input_ids"]
        if twin.session.tokens[theirs : theirs + len(head)] == head:
            twin.settled = (end, theirs + len(head))

    def _new_twin(self, session: Session) -> Session:
        params = SamplingParams(max_new_tokens=session.params.max_new_tokens)
        return Session([], 0, params, session.seed, frozenset(), [], None, Stats(drafter=self.name))

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _draft_text(self, tokens: Sequence[int]) -> str:
        text: str = self._draft_tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _translated(self, session: Session, tree: TokenTree, budget: Budget) -> TokenTree:
        """The draft in the target's tokens. Its last token is held back: more text could have changed it."""
        before = self._twins[session.id].session.tokens[-_LOOKBEHIND:]
        old, whole = self._draft_text(before), self._draft_text([*before, *tree.tokens[1:]])
        new = whole[len(old) :].rstrip(_BROKEN) if whole.startswith(old) else ""
        if not new:
            return TokenTree.chain(session.tokens[-1])
        behind = self._text(session.tokens[-_LOOKBEHIND:])
        encoded = self._tokenizer(behind + new, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in encoded["offset_mapping"]]
        if len(behind) in starts:
            ids = encoded["input_ids"][starts.index(len(behind)) :]
        else:  # the tokens of both would merge, and the target has not merged them
            ids = self._tokenizer(new, add_special_tokens=False)["input_ids"]
        drafts = ids[: max(1, len(ids) - 1)][: min(budget.depth, budget.nodes)]
        step = tree.value[-1] ** (1 / max(1, len(drafts)))
        return TokenTree.chain(
            session.tokens[-1], drafts, f"{self.name} text", [step**depth for depth in range(1, len(drafts) + 1)]
        )
