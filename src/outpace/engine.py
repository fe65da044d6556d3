"""The loop: draft, verify, keep, commit. Rows join and leave between steps; plain decoding is a one-node tree.

Invariant of every row between steps: its cache holds at most `len(tokens) - 1` columns, all of committed tokens. The
last committed token is node 0 of the next tree, so the forward that verifies a tree also writes its key and value.
Committed tokens that the cache does not hold yet (a prompt, tokens after a rewound state) go in front of the tree.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from . import noise, sampling, verify
from .drafters.base import Budget, Drafter
from .errors import InputError
from .probe import Capabilities
from .sampling import SamplingParams
from .session import Session, Stats, TokenLogprob
from .target import Block, Output, Target
from .text import Detokenizer
from .tree import TokenTree

Acceptance = Literal["coupled", "rejection", "typical"]
ACCEPTANCES: tuple[Acceptance, ...] = ("coupled", "rejection", "typical")
Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages

_log = logging.getLogger("outpace")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """k: most drafted tokens per round. acceptance: "coupled" (seed-exact), "rejection" (exact in distribution) or
    "typical" (NOT lossless). prefill_chunk: prompt tokens per forward, which bounds the memory of long prompts."""

    k: int = 8
    acceptance: Acceptance = "coupled"
    prefill_chunk: int = 512

    def __post_init__(self) -> None:
        for name, least in (("k", 0), ("prefill_chunk", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 4096:
                raise InputError(f"{name} must be a whole number from {least} to 4096, got {value!r}.")
        if self.acceptance not in ACCEPTANCES:
            raise InputError(f"acceptance must be one of {', '.join(ACCEPTANCES)}, got {self.acceptance!r}.")


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


@dataclass(slots=True)
class Engine:
    """A model, a drafter and the rows being decoded. Thread-safe: threads share steps, never rows.

    tokenizer: transformers' tokenizer, or None for token ids only. end_ids: the model's end-of-text tokens.
    """

    target: Target
    drafter: Drafter
    tokenizer: Any
    end_ids: tuple[int, ...]
    capabilities: Capabilities
    options: EngineOptions = field(default_factory=EngineOptions)
    _cache: Any = None
    _rows: list[Session] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.RLock)
    _num_sessions: int = 0
    _warned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._cache = self.target.new_cache()

    # ---------------------------------------------------------------- for users

    def generate(
        self, prompt: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Any:
        """Decode to the end. prompt: text, token ids or chat messages, or a list of those.

        Returns a Result, or a list of them for a list of prompts. params: one for all prompts, or one per prompt.
        Chat messages go through the tokenizer's template; text is taken as it is.
        """
        is_batch = _is_batch(prompt)
        prompts: Sequence[Any] = prompt if is_batch else [prompt]  # type: ignore[assignment]
        settings = _per_prompt(params, len(prompts), is_batch)
        sessions = self._submit_all(prompts, settings, with_text=False)
        try:
            while any(not session.is_finished for session in sessions):
                self.step()
            for session in sessions:
                if session.error is not None:
                    raise session.error
        finally:
            for session in sessions:
                self.cancel(session)
        results = [self.result(session) for session in sessions]
        return results if is_batch else results[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Decode one prompt, giving text as it becomes final; the last chunk carries the Result."""
        if _is_batch(prompt):
            raise InputError("stream takes one prompt, got a list of them. Call it once per prompt, or use generate.")
        (session,) = self._submit_all([prompt], [params or SamplingParams()], with_text=True)
        return self._stream(session)

    def _stream(self, session: Session) -> Iterator[Chunk]:
        num_seen = session.num_prompt_tokens
        try:
            while not session.is_finished:
                self.step()
                if session.error is not None:
                    raise session.error
                tokens = session.tokens[num_seen:]
                num_seen = len(session.tokens)
                text = session.take_pieces()
                if (tokens or text) and not session.is_finished:
                    yield Chunk(text, tokens)
                elif session.is_finished:
                    yield Chunk(text, tokens, self.result(session))
        finally:
            self.cancel(session)

    # ---------------------------------------------------------------- rows

    def submit(self, prompt: Prompt, params: SamplingParams, with_text: bool = True) -> Session:
        """A new row, decoded by the following steps. with_text: whether to detokenise while decoding."""
        return self._submit_all([prompt], [params], with_text)[0]

    def _submit_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], with_text: bool
    ) -> list[Session]:
        """All sessions, or an error before any of them has begun."""
        sessions = [self._new_session(p, s, with_text) for p, s in zip(prompts, params, strict=True)]
        with self._lock:
            for session in sessions:
                self._num_sessions += 1
                session.id = self._num_sessions
                session.row = self._cache.add_row()
                self._rows.append(session)
        return sessions

    def _new_session(self, prompt: Prompt, params: SamplingParams, with_text: bool) -> Session:
        if not isinstance(params, SamplingParams):
            raise InputError(f"params must be SamplingParams, got {params!r}.")
        tokens = self.encode(prompt)
        limit = self.target.max_positions
        if limit is not None and len(tokens) + params.max_new_tokens > limit:
            raise InputError(
                f"The prompt has {len(tokens)} tokens and max_new_tokens is {params.max_new_tokens}, together more than "
                f"the {limit} positions of this model. Set max_new_tokens to {max(0, limit - len(tokens))} or less, "
                "or shorten the prompt."
            )
        bad = [token for token in (*params.logit_bias, *params.stop_token_ids) if token >= self.target.vocab_size]
        if bad:
            raise InputError(f"Token id {bad[0]} is not in the model's vocabulary of {self.target.vocab_size}.")
        if self.tokenizer is None and params.stop:
            raise InputError("stop strings need a tokenizer, and this engine has none. Pass tokenizer= to load().")
        end_ids = () if params.ignore_eos else self.end_ids
        processors = sampling.build_processors(params, len(tokens), end_ids, self.target.device)
        if self.options.acceptance != "coupled" and not params.is_greedy:
            for processor in processors:
                if not sampling.is_prefix_pure(processor):
                    raise InputError(
                        f"acceptance={self.options.acceptance!r} asks logits processors about drafts that may be "
                        f"refused, and {type(processor).__name__} is not known to be a pure function of the text. Use "
                        "acceptance='coupled', or give the processor the attribute is_prefix_pure = True if it is one."
                    )
        needs_text = self.tokenizer is not None and (with_text or params.stop)
        stats = Stats(
            acceptance=self.options.acceptance,
            is_lossless=self.options.acceptance != "typical" or params.is_greedy,
            drafter=self.drafter.name,
            num_prompt_tokens=len(tokens),
        )
        if not stats.is_lossless:
            stats.note("typical acceptance is not lossless: the text does not follow the target's distribution")
        return Session(
            id=0,
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(48),
            end_ids=frozenset((*end_ids, *params.stop_token_ids)),
            processors=processors,
            detokenizer=Detokenizer(self.tokenizer, tuple(params.stop)) if needs_text else None,
            stats=stats,
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids; raises InputError for what is not a prompt."""
        if not isinstance(prompt, str) and all(type(token) is int for token in prompt):
            tokens = [int(token) for token in prompt]  # type: ignore[call-overload]
        elif self.tokenizer is None:
            raise InputError("A prompt in words needs a tokenizer, and this engine has none: pass tokenizer= or ids.")
        elif isinstance(prompt, str):
            tokens = list(self.tokenizer(prompt)["input_ids"])
        elif all(isinstance(message, Mapping) and "role" in message for message in prompt):
            if not self.tokenizer.chat_template:
                raise InputError("Chat messages need a chat template, and this tokenizer has none. Pass plain text.")
            tokens = list(
                self.tokenizer.apply_chat_template(
                    list(prompt), add_generation_prompt=True, tokenize=True, return_dict=True
                )["input_ids"]
            )
        else:
            raise InputError(
                f"A prompt is text, a list of token ids, or a list of chat messages, got {str(prompt)[:80]!r}."
            )
        if not tokens:
            raise InputError("The prompt is empty: there is no token to go on from. Give at least one.")
        bad = [token for token in tokens if not 0 <= token < self.target.vocab_size]
        if bad:
            raise InputError(f"The prompt holds token id {bad[0]}, outside the vocabulary of {self.target.vocab_size}.")
        return tokens

    def cancel(self, session: Session) -> None:
        """Free the session's row, finished or not. Does nothing for one that has none."""
        with self._lock:
            if session.row is None:
                return
            self._cache.drop_row(session.row)
            last = self._rows.pop()
            if last is not session:
                self._rows[session.row] = last
                last.row = session.row
            session.row = None
            self.drafter.release(session)

    def result(self, session: Session) -> Result:
        """What a finished session gave."""
        assert session.finish_reason is not None, "the session has not finished"
        tokens = session.new_tokens
        if session.detokenizer is not None:
            text = session.detokenizer.text
        elif self.tokenizer is not None:
            text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        else:
            text = ""
        return Result(
            text=text,
            tokens=tokens,
            prompt_tokens=session.tokens[: session.num_prompt_tokens],
            finish_reason=session.finish_reason,
            stop_reason=session.stop_reason,
            seed=session.seed,
            logprobs=session.logprobs if session.params.logprobs is not None else None,
            stats=session.stats,
        )

    # ---------------------------------------------------------------- the loop

    def step(self) -> None:
        """One pass of the target over every row: a chunk of a long prompt, or a drafted tree.

        An exception from a row's own callbacks ends that row; one from the model ends all rows. Owners find it in
        `session.error`.
        """
        with self._lock:
            active = [session for session in self._rows if not session.is_finished]
            if not active:
                return
            try:
                self._step(active)
            except Exception as error:  # the model itself failed: no row can go on
                for session in active:
                    session.error = session.error or error
            for session in active:
                if session.is_finished:
                    self.cancel(session)

    def _step(self, active: Sequence[Session]) -> None:
        behind = [self._uncached(session) for session in active]
        ready = [s for s, uncached in zip(active, behind, strict=True) if len(uncached) <= self.options.prefill_chunk]
        blocks, trees = [], {session.id: tree for session, tree in zip(ready, self._draft(ready), strict=True)}
        for session, uncached in zip(active, behind, strict=True):
            assert session.row is not None
            if session.id in trees:
                tree = trees[session.id]
                fed = tree.after(uncached)
                blocks.append(Block(session.row, fed.tokens, fed.parents, num_logits=len(tree)))
            else:
                chunk = tuple(uncached[: self.options.prefill_chunk])
                blocks.append(Block(session.row, chunk, tuple(range(-1, len(chunk) - 1)), num_logits=0))
        outputs = self.target.forward(self._cache, blocks)
        for session, block, output in zip(active, blocks, outputs, strict=True):
            if session.id not in trees:
                self._cache.keep(session.row, range(len(block.tokens)))
                session.stats.num_prefill_passes += 1
                continue
            tree = trees[session.id]
            shift = len(block.tokens) - len(tree)
            try:
                verdict = self._verify(session, tree, output)
            except Exception as error:  # the row's own processors or callbacks
                session.error = error
                continue
            session.stats.count_round(tree.depths(), len(verdict.path) - 1)
            self._cache.keep(session.row, [*range(shift), *(node + shift for node in verdict.path)])

    def _uncached(self, session: Session) -> list[int]:
        """Committed tokens before the last one whose keys and values the cache does not hold."""
        return session.tokens[self._cache.lengths[session.row] : -1]

    # ---------------------------------------------------------------- drafting

    def _budget(self, session: Session) -> Budget:
        """At most k nodes, not past the last wanted token, and only where the cache can drop what is refused."""
        depth = min(self.options.k, session.num_remaining_tokens - 1)
        if not self._cache.can_crop and self._uncached(session):
            depth = 0
        return Budget(nodes=self.options.k if depth else 0, depth=depth, can_branch=self.target.can_tree)

    def _draft(self, sessions: Sequence[Session]) -> list[TokenTree]:
        """One checked tree per session. Whatever a drafter does wrong costs its rows one round without draft."""
        trees = {session.id: TokenTree.chain(session.tokens[-1]) for session in sessions}
        budgets = {session.id: self._budget(session) for session in sessions}
        asked = [session for session in sessions if budgets[session.id].nodes > 0]
        if asked:
            try:
                drafts = self.drafter.propose(asked, [budgets[session.id] for session in asked])
                if len(drafts) != len(asked):
                    raise InputError(f"{len(drafts)} drafts came back for {len(asked)} rows.")
            except Exception as error:
                self._draft_failed(asked, error)
                drafts = []
            for session, draft in zip(asked, drafts, strict=False):
                budget = budgets[session.id]
                try:
                    draft.check(session.tokens[-1], self.target.vocab_size, budget.nodes, budget.depth, budget.can_branch)
                    trees[session.id] = draft
                except Exception as error:
                    self._draft_failed([session], error)
        return list(trees.values())

    def _draft_failed(self, sessions: Sequence[Session], error: Exception) -> None:
        for session in sessions:
            session.stats.num_draft_failures += 1
        text = f"{type(error).__name__}: {error}"
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("Drafter %r failed and costs a round without draft. %s", self.drafter.name, text)

    # ---------------------------------------------------------------- verifying

    def _verify(self, session: Session, tree: TokenTree, output: Output) -> verify.Verdict:
        """Apply the acceptance rule and commit what it emits."""
        params = session.params
        if self.options.acceptance == "coupled" or params.is_greedy:
            return verify.coupled(tree, self._chooser(session, output.logits), session.commit)
        probs = self._target_probs(session, tree, output.logits)
        position = len(session.tokens)
        flips = iter(range(1 << 30))

        def draw(p: Tensor) -> int:
            return noise.choose(p.log(), None, session.seed, position)

        if self.options.acceptance == "rejection":
            verdict = verify.rejection(
                tree, probs, lambda a: noise.coin(session.seed, position, next(flips)) < a, draw
            )
        else:
            verdict = verify.typical(tree, probs, draw)
        for node, token in zip(verdict.path, verdict.tokens, strict=True):
            self._report(session, output.logits[node], token)
            if not session.commit(token):
                break
        return verdict

    def _chooser(self, session: Session, logits: Tensor) -> Callable[[int], int]:
        """node -> the token of plain decoding there; asked in order, once per committed token."""
        params, processors = session.params, session.processors
        if params.is_greedy and not processors and params.logprobs is None:
            return logits.argmax(-1).tolist().__getitem__  # type: ignore[no-any-return]

        def choose(node: int) -> int:
            text = session.text_ids(logits.device) if processors else None
            scores = sampling.process(logits[node], processors, text)
            token = sampling.choose(scores, params, session.seed, len(session.tokens))
            self._report(session, logits[node], token)
            return token

        return choose

    def _target_probs(self, session: Session, tree: TokenTree, logits: Tensor) -> Callable[[int], Tensor]:
        known: dict[int, Tensor] = {}

        def probs(node: int) -> Tensor:
            if node not in known:
                text = None
                if session.processors:
                    drafts = [tree.tokens[step] for step in tree.path(node)[1:]]
                    text = session.text_ids(logits.device, drafts)
                scores = sampling.process(logits[node], session.processors, text)
                known[node] = sampling.probabilities(scores, session.params)
            return known[node]

        return probs

    def _report(self, session: Session, logits: Tensor, token: int) -> None:
        """Add the token's log-probability to the session, when the request asked for it."""
        count = session.params.logprobs
        if count is None:
            return
        log_probs = logits.to(torch.float32).log_softmax(-1)
        values, ids = log_probs.topk(min(count, log_probs.shape[0]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        session.logprobs.append(TokenLogprob(token, float(log_probs[token]), top))


def _is_batch(prompt: object) -> bool:
    """Whether a prompt argument is a list of prompts: of texts, of id lists, or of chats."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        if not isinstance(prompt, str | Sequence):
            raise InputError(f"prompt must be text, token ids, chat messages or a list of those, got {prompt!r}.")
        return False
    return len(prompt) > 0 and all(isinstance(item, str | list | tuple) for item in prompt)


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, is_batch: bool
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not is_batch or len(params) != count:
        raise InputError(f"{len(params)} params were given for {count} prompt(s). Give one for all, or one per prompt.")
    return params
