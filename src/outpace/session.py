"""One request: its tokens, its settings, how it ends, and what was counted. Knows no model and no drafter."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .noise import COUPLED, DRAFT
from .sampling import LogitsProcessor, SamplingParams
from .text import Detokenizer
from .tree import TokenTree
from .verify import Verdict


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of one generated token under the target's raw logits.

    token, logprob: the token itself. top: the likeliest alternatives as (token, logprob), best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Stats:
    """Counts of one request. committed tokens = accepted + verifications.

    num_verifications: forwards of the target that emitted a token for this request; num_prefill_passes: forwards that
    only read prompt. num_drafted_tokens: nodes verified; num_accepted_tokens: those that were kept.
    num_rounds_without_draft: verifications of a single node; num_rounds_switched_off: those of them in which nothing
    was asked for, as drafting did not pay. num_draft_failures: drafts thrown away because the
    drafter raised or broke its contract. drafted_by_depth, accepted_by_depth: [depth] rounds in which a node of that
    depth was drafted / kept. drafted_by_source, accepted_by_source: nodes, by the drafter that proposed them.
    passes_by_nodes: verifications, by the nodes of their trees. prefill_seconds: until the first token; decode_seconds:
    from there to the end.
    """

    acceptance: str = "coupled"
    is_lossless: bool = True
    drafter: str = "none"
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_prefill_passes: int = 0
    num_verifications: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rounds_without_draft: int = 0
    num_rounds_switched_off: int = 0
    num_draft_failures: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    passes_by_nodes: dict[int, int] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def num_rejected_tokens(self) -> int:
        return self.num_drafted_tokens - self.num_accepted_tokens

    @property
    def tokens_per_pass(self) -> float:
        return self.num_new_tokens / max(1, self.num_verifications)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first over the time they took; all over the time to the first where one pass gave all."""
        if self.num_verifications == 1 and self.prefill_seconds > 0:
            return self.num_new_tokens / self.prefill_seconds
        return (self.num_new_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def count_round(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Count one verification. path: the nodes that were kept, the root first."""
        depths, num_accepted = tree.depths(), len(path) - 1
        self.passes_by_nodes[len(tree)] = self.passes_by_nodes.get(len(tree), 0) + 1
        for counts, nodes in ((self.drafted_by_source, range(1, len(tree))), (self.accepted_by_source, path[1:])):
            for node in nodes:
                source = tree.source[node].partition(" ")[0] or self.drafter
                counts[source] = counts.get(source, 0) + 1
        self.num_verifications += 1
        self.num_drafted_tokens += len(depths) - 1
        self.num_accepted_tokens += num_accepted
        self.num_rounds_without_draft += len(depths) == 1
        for _ in range(len(self.drafted_by_depth), max(depths)):
            self.drafted_by_depth.append(0)
            self.accepted_by_depth.append(0)
        for depth in range(max(depths)):
            self.drafted_by_depth[depth] += 1
            self.accepted_by_depth[depth] += depth < num_accepted

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class Group(Protocol):
    """Rows that are decided together, by callbacks that may look at all of them. They join and step together."""

    @property
    def sessions(self) -> Sequence[Session]:
        """Every row of the group, ended ones included."""
        ...

    def accept(self, trees: Mapping[int, TokenTree], logits: Mapping[int, Tensor]) -> dict[int, Verdict]:
        """Decide and commit one round of the rows that go on, by session id. logits: [nodes, vocab] of each tree."""
        ...


_ids = itertools.count(1)  # unique in the process: a drafter may serve several engines


@dataclass(slots=True)
class Session:
    """The state of one request. Drafters read `tokens`, `params`, `seed` and `noise_stream`, and change nothing.

    tokens: prompt and committed tokens. row: index in the target's cache, None when it has none.
    finish_reason: "stop" (end-of-text token or stop string) or "length"; None while the text goes on.
    stop_reason: the token id or string that stopped it. error: an exception that ended it.
    is_cancelled: its row is, or will be, given to others. group: the rows it is decided with, when not alone.
    prediction: token ids that are expected as output, for drafters to copy from.
    columns: attention layer -> (keys, values), each [heads, length, head dim], of the tokens that the target's cache
    shall hold when the session joins; and those that it held when the session left, if `keeps_columns`.
    """

    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]
    processors: list[LogitsProcessor]
    detokenizer: Detokenizer | None
    stats: Stats
    id: int = field(default_factory=_ids.__next__)
    row: int | None = None
    is_cancelled: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: BaseException | None = None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    group: Group | None = None
    prediction: tuple[int, ...] = ()
    columns: dict[int, tuple[Tensor, Tensor]] | None = None
    keeps_columns: bool = False
    _text: Tensor | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None or self.is_cancelled

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_remaining_tokens(self) -> int:
        return self.params.max_new_tokens - (len(self.tokens) - self.num_prompt_tokens)

    @property
    def noise_stream(self) -> int:
        """The noise that drafts of this round may use: the target's own under coupled acceptance, else fresh noise.

        A ratio test is only exact when each round's drafts are independent of everything that was decided before.
        """
        return COUPLED if self.stats.acceptance == "coupled" else DRAFT + 2 + self.stats.num_verifications

    def commit(self, token: int) -> bool:
        """Append one token; says whether the text goes on. The earliest end wins."""
        now = time.perf_counter()
        if self.first_token_at is None:
            self.first_token_at = now
            self.stats.prefill_seconds = now - self.started
        self.stats.decode_seconds = now - self.first_token_at
        self.tokens.append(token)
        self.stats.num_new_tokens += 1
        if self._text is not None:
            self._reserve(len(self.tokens))
            self._text[0, len(self.tokens) - 1] = token
        if token in self.end_ids:
            self.finish_reason, self.stop_reason = "stop", token
        if self.detokenizer is not None:
            self.pieces.append(self.detokenizer.push(token))
            if self.detokenizer.stopped is not None:
                self.finish_reason, self.stop_reason = "stop", self.detokenizer.stopped
        if self.finish_reason is None and self.num_remaining_tokens <= 0:
            self.finish_reason = "length"
        if self.finish_reason is not None and self.detokenizer is not None:
            self.pieces.append(self.detokenizer.finish())
        return self.finish_reason is None

    def text_ids(self, device: torch.device, drafts: Sequence[int] = ()) -> Tensor:
        """[1, length] int64: the text so far, followed by drafts that are not committed, for logits processors."""
        if self._text is None:
            self._text = torch.tensor([self.tokens], device=device)
        length = len(self.tokens) + len(drafts)
        self._reserve(length)
        if drafts:
            self._text[0, len(self.tokens) : length] = torch.tensor(drafts)
        return self._text[:, :length]

    def _reserve(self, length: int) -> None:
        """Room for `length` ids in the tensor of the text."""
        if self._text is not None and self._text.shape[1] < length:
            self._text = torch.nn.functional.pad(self._text, (0, length))

    def take_pieces(self) -> str:
        """The text that became final since the last call."""
        text = "".join(self.pieces)
        self.pieces.clear()
        return text


@dataclass(frozen=True, slots=True)
class Result:
    """What one request gave.

    text: without special tokens and without the stop string. tokens: generated ids, an end-of-text token included.
    finish_reason: "stop" or "length"; stop_reason: the token id or string that stopped it. seed: repeats the run.
    logprobs: one entry per token when asked for.
    """

    text: str
    tokens: list[int]
    prompt_tokens: list[int]
    finish_reason: str
    stop_reason: int | str | None
    seed: int
    logprobs: list[TokenLogprob] | None
    stats: Stats


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream. text: newly final text; tokens: newly committed ids; result: set on the last piece."""

    text: str
    tokens: list[int]
    result: Result | None = None


def to_dict(stats: Stats) -> dict[str, Any]:
    """Plain data for JSON, derived figures included."""
    fields = {name: getattr(stats, name) for name in Stats.__slots__}
    derived = ("num_rejected_tokens", "tokens_per_pass", "decode_tokens_per_second")
    return fields | {name: getattr(stats, name) for name in derived}
