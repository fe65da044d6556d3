"""Drafts from a second, smaller causal language model with the same vocabulary.

The draft model runs through the same `Target` and ragged cache as the model it drafts for, so its rows have their
own lengths and rewind by keeping the accepted path. Under coupled acceptance candidates are ranked by
log q + noise with the noise of the target's own choice: the draft guesses the target's sample, not its mode.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .. import noise, sampling
from ..cache import Cache
from ..errors import InputError
from ..probe import token_seconds
from ..session import Session
from ..target import Block, Target
from ..tree import TokenTree
from .base import Budget

DEFAULT_CONFIDENCE_THRESHOLD = 0.2
_PREFILL_CHUNK = 512
_log = logging.getLogger("outpace")


@dataclass(slots=True)
class _Node:
    """A drafted token. parent: its index in `RowDraft.nodes`, -1 for the root. column: its place in the draft cache's
    open block, None while it has not been fed. q: what it was drawn from, for ratio tests."""

    token: int
    parent: int
    depth: int
    value: float
    q: Tensor | None
    column: int | None = None


@dataclass(slots=True)
class RowDraft:
    """The draft state of one session between rounds."""

    row: int
    nodes: list[_Node] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)  # node of each column of the open block

    def block_parents(self) -> list[int]:
        return [self._column(self.nodes[node].parent) for node in self.fed]

    def _column(self, node: int) -> int:
        column = self.nodes[node].column if node >= 0 else -1
        assert column is not None, "a node is fed after its parent"
        return column


class SharedTokens:
    """Tokens that target and draft spell alike, under different ids (Timor et al., arXiv 2502.05202, "TLI").

    target_ids, draft_ids: [shared] int64, the same token at the same place.
    """

    def __init__(self, tokenizer: Any, draft_tokenizer: Any) -> None:
        theirs = draft_tokenizer.get_vocab()
        pairs = sorted((index, theirs[word]) for word, index in tokenizer.get_vocab().items() if word in theirs)
        self.to_draft = dict(pairs)
        self.target_ids = torch.tensor([ours for ours, _ in pairs], dtype=torch.int64)
        self.draft_ids = torch.tensor([other for _, other in pairs], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.to_draft)


class ModelDrafter:
    """A chain (width 1) or a tree from a draft model.

    vocab_size: of the target. num_tokens: drafted ids stay below it (the tokens that both models share). shared: the
    tokens that both have, where their ids differ. width:
    branches per expanded node and nodes expanded per depth. confidence_threshold: a path is not drafted further once
    the estimated probability that all of it is accepted falls below this.
    """

    name = "model"

    def __init__(
        self,
        draft: Target,
        vocab_size: int,
        num_tokens: int,
        width: int = 1,
        confidence_threshold: float = DEFAULT_CONFIDENCE_THRESHOLD,
        shared: SharedTokens | None = None,
    ) -> None:
        if width < 1:
            raise InputError(f"width must be 1 (chains) or larger, got {width!r}.")
        if not 0 <= confidence_threshold < 1:
            raise InputError(f"confidence_threshold must be at least 0 and below 1, got {confidence_threshold!r}.")
        self._draft = draft
        self._vocab_size = vocab_size
        self._num_tokens = min(num_tokens, vocab_size, draft.vocab_size)
        self._width = width
        self._threshold = confidence_threshold
        self._shared = shared
        self._cache: Cache = draft.new_cache()
        self._drafts: dict[int, RowDraft] = {}
        self._warned = False

    @property
    def level_seconds(self) -> float:
        """What drafting one token takes, measured here and now."""
        return min(token_seconds(self._draft) for _ in range(3))

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        try:
            return self._propose(sessions, budgets)
        except Exception:
            for session in sessions:  # their rows may hold half a draft
                self.release(session)
            raise

    def _propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[TokenTree]:
        work = [(s, self._clip(s, b)) for s, b in zip(sessions, budgets, strict=True)]
        drafting = [(session, budget) for session, budget in work if budget.depth > 0]
        logits = self._catch_up([session for session, _ in drafting])
        for session, budget in drafting:
            self._expand(session, budget, [-1], [logits[session.id]])
        for depth in range(1, max((budget.depth for _, budget in drafting), default=0)):
            frontiers = [(s, b, self._frontier(s, b, depth)) for s, b in drafting if depth < b.depth]
            self._deepen([(session, budget, nodes) for session, budget, nodes in frontiers if nodes])
        return [
            self._tree(session, budget) if budget.depth > 0 else TokenTree.chain(session.tokens[-1])
            for session, budget in work
        ]

    def rewind(self, session: Session, length: int) -> None:
        """Only the first `length` tokens of the session are still what they were."""
        draft = self._drafts.get(session.id)
        if draft is None or self._cache.lengths[draft.row] <= length:
            return
        if self._cache.can_crop:
            self._cache.keep(draft.row, [])
            self._cache.lengths[draft.row] = length
            draft.nodes, draft.fed = [], []
        else:
            self.release(session)

    def release(self, session: Session) -> None:
        gone = self._drafts.pop(session.id, None)
        if gone is not None:
            last = len(self._cache.lengths) - 1
            moved = next((draft for draft in self._drafts.values() if draft.row == last), None)
            if moved is not None:  # committed columns move along, an open block does not
                self._cache.keep(moved.row, [])
                moved.row, moved.nodes, moved.fed = gone.row, [], []
            self._cache.drop_row(gone.row)

    def _clip(self, session: Session, budget: Budget) -> Budget:
        """The budget without what would exceed the draft model's own positions."""
        limit, depth = self._draft.max_positions, budget.depth
        if limit is not None and limit - len(session.tokens) + 1 < depth:
            depth = limit - len(session.tokens) + 1
            if not self._warned:
                self._warned = True
                _log.warning("The draft model has %d positions; texts are not drafted beyond them.", limit)
        return replace(budget, depth=max(0, depth), can_branch=budget.can_branch and self._draft.can_tree)

    # ---------------------------------------------------------------- catching up

    def _catch_up(self, sessions: Sequence[Session]) -> dict[int, Tensor]:
        """Rewind every row to its committed tokens and feed the new ones. session id -> [vocab] logits at the last."""
        for session in sessions:
            self._rewind(session)
        logits: dict[int, Tensor] = {}
        while waiting := [session for session in sessions if session.id not in logits]:
            blocks, ends = [], []
            for session in waiting:
                row = self._drafts[session.id].row
                start = self._cache.lengths[row]
                chunk = session.tokens[start : start + _PREFILL_CHUNK]
                ends.append(start + len(chunk) == len(session.tokens))
                blocks.append(Block.chain(row, self._known(chunk)))
            outputs = self._draft.forward(self._cache, blocks)
            for session, block, output, is_end in zip(waiting, blocks, outputs, ends, strict=True):
                self._cache.keep(block.row, range(len(block.tokens)))
                if is_end:
                    logits[session.id] = output.logits[-1]
        return logits

    def _known(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The tokens in the draft's ids, with 0 for those that it has no embedding for (a draft may be wrong)."""
        if self._shared is not None:
            return tuple(self._shared.to_draft.get(token, 0) for token in tokens)
        return tuple(token if token < self._draft.vocab_size else 0 for token in tokens)

    def _rewind(self, session: Session) -> None:
        """Keep what was drafted and then committed; the rest of the open block is dropped."""
        draft = self._drafts.get(session.id)
        if draft is None:
            draft = self._drafts[session.id] = RowDraft(self._cache.add_row())
        length = self._cache.lengths[draft.row]
        path: list[int] = []
        if draft.fed:
            parent = -1
            for token in session.tokens[length:-1]:
                parent = next(
                    (n for n in draft.fed if draft.nodes[n].parent == parent and draft.nodes[n].token == token),
                    -2,
                )
                if parent == -2:
                    break
                column = draft.nodes[parent].column
                assert column is not None
                path.append(column)
            self._cache.keep(draft.row, path)
        draft.nodes, draft.fed = [], []

    # ---------------------------------------------------------------- growing the tree

    def _frontier(self, session: Session, budget: Budget, depth: int) -> list[int]:
        """The nodes of a depth whose children are worth a forward, best first."""
        draft = self._drafts[session.id]
        found = [i for i, node in enumerate(draft.nodes) if node.depth == depth]
        least = max(self._threshold, budget.least_value)
        if self._is_ratio_test(session):
            # Which nodes exist must not depend on the values of sampled siblings: only a chain may stop early.
            if len(draft.nodes) + len(found) > budget.nodes:
                return []
            return found if len(found) > 1 else [i for i in found if draft.nodes[i].value >= least]
        best = sorted((node.value for node in draft.nodes), reverse=True)
        worst_kept = best[budget.nodes - 1] if len(best) >= budget.nodes else 0.0
        worth = [i for i in found if draft.nodes[i].value >= max(least, worst_kept)]
        return sorted(worth, key=lambda i: -draft.nodes[i].value)[: self._width if budget.can_branch else 1]

    def _deepen(self, work: Sequence[tuple[Session, Budget, list[int]]]) -> None:
        """One forward of the draft model over the frontiers of all rows, then their children."""
        if not work:
            return
        blocks = []
        for session, _, frontier in work:
            draft = self._drafts[session.id]
            first = len(draft.fed)
            for node in frontier:
                draft.nodes[node].column = len(draft.fed)
                draft.fed.append(node)
            tokens = self._known([draft.nodes[node].token for node in draft.fed])
            blocks.append(Block(draft.row, tokens, tuple(draft.block_parents()), first, len(frontier)))
        outputs = self._draft.forward(self._cache, blocks)
        for (session, budget, frontier), output in zip(work, outputs, strict=True):
            self._expand(session, budget, frontier, list(output.logits))

    def _expand(self, session: Session, budget: Budget, parents: Sequence[int], logits: Sequence[Tensor]) -> None:
        """Add the candidate children of each parent (-1: the root)."""
        draft = self._drafts[session.id]
        width = self._width if budget.can_branch else 1
        for parent, scores in zip(parents, logits, strict=True):
            value, depth = (draft.nodes[parent].value, draft.nodes[parent].depth) if parent >= 0 else (1.0, 0)
            if self._is_ratio_test(session) and depth > 0:
                width = 1  # a fixed shape: branches at the root, each a chain
            position = len(session.tokens) + depth
            for token, confidence, q in self._candidates(session, scores, position, width, parent):
                draft.nodes.append(_Node(token, parent, depth + 1, value * confidence, q))

    def _scores(self, logits: Tensor) -> Tensor:
        """[n] float32: the draft's scores of target ids 0, 1, …; -inf for those that it does not know."""
        if self._shared is None:
            return logits[: self._num_tokens].to(torch.float32)
        scores = torch.full((self._vocab_size,), -torch.inf, device=logits.device)
        scores[self._shared.target_ids.to(logits.device)] = logits[self._shared.draft_ids.to(logits.device)].float()
        return scores

    def _candidates(
        self, session: Session, logits: Tensor, position: int, width: int, parent: int
    ) -> list[tuple[int, float, Tensor | None]]:
        """Up to `width` tokens as (token, confidence, q). Confidence is the softmax of log q + noise: how clear the
        draft's own choice is, which says how likely a slightly different distribution chooses the same."""
        scores = self._scores(logits)
        params = session.params
        if params.is_greedy:
            values, ids = scores.topk(min(width, scores.shape[0]))
            confidence = (values - scores.logsumexp(0)).exp().clamp_max(1.0)
            return [(token, sure, None) for token, sure in zip(ids.tolist(), confidence.tolist(), strict=True)]
        kept, log_q = sampling.warp(scores, params)
        stream = session.noise_stream
        if self._is_ratio_test(session):
            stream += (parent + 1) << 32  # draws in different branches must be independent
        noisy = noise.perturbed(log_q, kept, session.seed, position, stream)
        values, places = noisy.topk(min(width, noisy.shape[0]))
        ids = places if kept is None else kept[places]
        confidence = (values - noisy.logsumexp(0)).exp().clamp_max(1.0)
        proposals: list[Tensor | None] = [None] * ids.shape[0]
        if self._is_ratio_test(session):
            q = sampling.probabilities(scores, params)
            proposals = list(self._without_replacement(q, ids.tolist()))
        return list(zip(ids.tolist(), confidence.tolist(), proposals, strict=False))

    def _without_replacement(self, q: Tensor, ids: Sequence[int]) -> Iterator[Tensor]:
        """[vocab] float64 per id: what it was drawn from, q without the ids before it (Gumbel top-k does just that).

        Ends early when they leave nothing to draw from, as near temperature 0.
        """
        for token in ids:
            if float(q.sum()) < 1e-3:
                return
            yield torch.nn.functional.pad(q, (0, self._vocab_size - q.shape[0]))
            q = q.clone()
            q[token] = 0.0
            mass = q.sum()
            q = q / mass if mass > 1e-30 else torch.zeros_like(q)

    def _eighths(self, draft: RowDraft, node: _Node) -> int:
        """How sure the draft was of a node, after its parent: by this its chances are counted."""
        above = draft.nodes[node.parent].value if node.parent >= 0 else 1.0
        return int(8 * node.value / above) if 0 <= node.value <= above and above > 0 else 0  # no number is none

    def _is_ratio_test(self, session: Session) -> bool:
        return session.stats.acceptance == "rejection" and not session.params.is_greedy

    def _tree(self, session: Session, budget: Budget) -> TokenTree:
        """The best nodes of the draft by path value, at most as many as the budget has."""
        draft = self._drafts[session.id]
        order = range(len(draft.nodes))
        if not self._is_ratio_test(session):
            order = sorted(order, key=lambda i: -draft.nodes[i].value)  # type: ignore[assignment]
        chosen = sorted(list(order)[: budget.nodes])
        place = {-1: 0} | {node: index + 1 for index, node in enumerate(chosen)}
        nodes = [draft.nodes[node] for node in chosen]
        return TokenTree(
            tokens=(session.tokens[-1], *(node.token for node in nodes)),
            parents=(-1, *(place[node.parent] for node in nodes)),
            value=(1.0, *(node.value for node in nodes)),
            source=("", *(f"{self.name} p{self._eighths(draft, node)}" for node in nodes)),
            q=(None, *(node.q for node in nodes)),
        )
