"""Rows of one call to `generate`, decided by transformers' own callbacks: logits processors and stopping criteria.

A group sees what transformers' loop would see: the texts of its rows with their left padding, [rows, length], one
step at a time and each step once. Where every callback looks at one row alone, each row is a group of its own and
moves at its own pace; else the rows of the call are one group and move together, as in plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from . import sampling, verify
from .errors import InputError
from .sampling import LogitsProcessor
from .session import Session
from .tree import TokenTree
from .verify import Verdict

_ROW_WISE_CRITERIA = (MaxLengthCriteria, StopStringCriteria, EosTokenCriteria)


@dataclass(slots=True)
class RowGroup:
    """sessions: the rows. text: [rows, length] int64, their prompts, left-padded to one length.

    processors, criteria: as transformers calls them, with `text` and [rows, vocab] scores. pad_token: what an ended
    row goes on with; None when no end-of-text token is declared, and then the rows end together.
    keep_scores, keep_logits: whether to record the processed scores and the raw logits, [rows, vocab] a step.
    """

    sessions: Sequence[Session]
    text: Tensor
    processors: Sequence[LogitsProcessor]
    criteria: Callable[[Tensor, tuple[Tensor, ...] | None], Tensor]
    pad_token: int | None
    keep_scores: bool = False
    keep_logits: bool = False
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    _done: Tensor = field(init=False)
    _last: dict[int, Tensor] = field(default_factory=dict)
    _by_id: dict[int, Session] = field(init=False)

    def __post_init__(self) -> None:
        self._by_id = {session.id: session for session in self.sessions}
        self._done = torch.zeros(len(self.sessions), dtype=torch.bool, device=self.text.device)
        for session in self.sessions:
            session.group = self

    def accept(self, trees: Mapping[int, TokenTree], logits: Mapping[int, Tensor]) -> dict[int, Verdict]:
        """Walk the trees of the rows that go on, side by side, and commit what is emitted."""
        greedy: dict[int, list[int]] = {}
        if not self.processors and not self.keep_scores and not self.keep_logits:
            best = {i: sampling.greedy_tokens(logits[i]) for i in trees if self._by_id[i].params.is_greedy}
            greedy = {i: tokens for i, tokens in best.items() if tokens is not None}

        def choose(nodes: Mapping[int, int]) -> dict[int, int]:
            if len(greedy) == len(trees):
                return {i: greedy[i][node] for i, node in nodes.items()}
            return self._choose({i: logits[i][node] for i, node in nodes.items()})

        return verify.together(trees, choose, self._commit)

    def _choose(self, logits: Mapping[int, Tensor]) -> dict[int, int]:
        """The token of plain decoding for each row. logits: [vocab] of the rows that go on."""
        self._last.update(logits)
        # A row that has ended has no new scores; callbacks over all rows see its last ones again.
        raw = torch.stack([self._last[session.id] for session in self.sessions])
        raw = raw.to(self.text.device, torch.float32, copy=True)
        if self.keep_logits:
            self.logits.append(raw.clone() if self.processors else raw)
        scores = raw
        for processor in self.processors:
            scores = processor(self.text, scores)
        if self.keep_scores:
            self.scores.append(scores)
        return {
            session.id: sampling.choose(scores[row], session.params, session.seed, len(session.tokens))
            for row, session in enumerate(self.sessions)
            if session.id in logits
        }

    def _commit(self, tokens: Mapping[int, int]) -> Collection[int]:
        """Append one token to every row and ask the criteria once; the ids of the sessions that go on."""
        column = [tokens.get(session.id, self.pad_token) for session in self.sessions]
        self.text = torch.cat([self.text, torch.tensor(column, device=self.text.device)[:, None]], dim=-1)
        for session in self.sessions:
            if session.id in tokens:
                session.commit(tokens[session.id])
        done = self.criteria(self.text, tuple(self.scores) if self.keep_scores else None)
        self._done |= done.to(self._done.device, torch.bool)
        flags = self._done.tolist()
        if self.pad_token is None and not all(flags):  # nothing to pad with: an ended row goes on until all have ended
            flags = [False] * len(flags)
        for session, is_done in zip(self.sessions, flags, strict=True):
            if not is_done:
                session.finish_reason = None  # the criteria alone decide
            elif session.finish_reason is None:
                session.finish_reason = "stop"
        return [i for i in tokens if self._by_id[i].finish_reason is None]


def form_groups(
    sessions: Sequence[Session],
    input_ids: Tensor,
    processors: Sequence[Any],
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    has_streamer: bool,
) -> list[RowGroup]:
    """Each row alone where that changes nothing for any callback; else all rows of the call together."""
    pad = getattr(config, "_pad_token_tensor", None)
    has_end = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    if has_end and pad is None:
        raise InputError("An end-of-text token without pad_token_id: give one, to fill rows that have ended.")

    def group(rows: slice, callbacks: Sequence[Any]) -> RowGroup:
        return RowGroup(
            sessions[rows],
            input_ids[rows],
            callbacks,
            criteria,
            pad_token=int(pad) if has_end and pad is not None else None,
            keep_scores=bool(config.return_dict_in_generate and config.output_scores),
            keep_logits=bool(config.return_dict_in_generate and config.output_logits),
        )

    shared = [p for p in processors if not sampling.is_prefix_pure(p)]
    shared += [c for c in criteria if type(c) not in (_ROW_WISE_CRITERIA if has_end else (MaxLengthCriteria,))]
    if len(sessions) > 1 and (shared or has_streamer):
        cause = type(shared[0]).__name__ if shared else "the streamer"
        for session in sessions:
            session.stats.note(f"rows move together, because {cause} may look at all of them")
        return [group(slice(None), processors)]
    return [
        group(slice(row, row + 1), [sampling.for_row(processor, row) for processor in processors])
        for row in range(len(sessions))
    ]


def as_generate_gives(groups: Sequence[RowGroup], config: GenerationConfig, cache: Any) -> Any:
    """The rows of all groups in transformers' shapes; rows that have ended are filled with the pad token."""
    length = max(group.text.shape[1] for group in groups)
    sequences = torch.cat(
        [
            nn.functional.pad(group.text, (0, length - group.text.shape[1]), value=group.pad_token or 0)
            for group in groups
        ]
    )
    if not config.return_dict_in_generate:
        return sequences
    found: dict[str, Any] = {
        "sequences": sequences,
        "scores": _by_step([group.scores for group in groups]) if groups[0].keep_scores else None,
        "logits": _by_step([group.logits for group in groups]) if groups[0].keep_logits else None,
    }
    names = {part.name for part in fields(GenerateDecoderOnlyOutput)}
    found["cache" if "cache" in names else "past_key_values"] = cache
    return GenerateDecoderOnlyOutput(**found)


def _by_step(records: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Per step [rows, vocab] from the steps of every group; zeros for rows that have ended."""
    steps = max(len(record) for record in records)
    return tuple(
        torch.cat([record[step] if step < len(record) else torch.zeros_like(record[0]) for record in records])
        for step in range(steps)
    )
