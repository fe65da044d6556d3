"""The loop: draft, verify, keep, commit. Rows join and leave between steps; plain decoding is a one-node tree.

Invariant of every row between steps: its cache holds at most `len(tokens) - 1` columns, all of committed tokens. The
last committed token is node 0 of the next tree, so the forward that verifies a tree also writes its key and value.
Committed tokens that the cache does not hold yet (a prompt, tokens after a rewound state) go in front of the tree.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .accept import accept
from .cache import Cache
from .drafters.base import Budget, Drafter, NoDrafter
from .drafting import Drafting
from .errors import EngineError, InputError
from .options import EngineOptions
from .planner import Planner
from .probe import Capabilities
from .request import Prompt, Requests, is_batch_of_prompts, per_prompt
from .sampling import SamplingParams
from .session import Chunk, Result, Session
from .target import Block, Target
from .tree import TokenTree
from .union import UnionDrafter
from .verify import Verdict

_COLUMN_STEP = 64  # passes that are padded see a multiple of so many keys


@dataclass(slots=True)
class Engine:
    """A model, a drafter and the rows being decoded. Thread-safe: threads share steps, never rows.

    tokenizer: transformers' tokenizer, or None for token ids only. end_ids: the model's end-of-text tokens.
    planner: says how much to draft; without one, drafts are always k long.
    """

    target: Target
    drafter: Drafter
    tokenizer: Any
    end_ids: tuple[int, ...]
    capabilities: Capabilities
    options: EngineOptions = field(default_factory=EngineOptions)
    planner: Planner | None = None
    requests: Requests = field(init=False)
    _cache: Cache = field(init=False)
    _rows: list[Session] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.RLock)
    _is_stepping: bool = False
    _drafting: Drafting = field(init=False)

    def __post_init__(self) -> None:
        self._cache = self.target.new_cache()
        source = self.drafter
        if self.planner is not None and not getattr(source, "is_whole", isinstance(source, UnionDrafter)):
            source = UnionDrafter([source], self.target.vocab_size)  # what a guess is worth is counted there
        self._drafting = Drafting(source, self.target.vocab_size, self.planner)
        if hasattr(self.drafter, "attach"):
            self.drafter.attach(self._cache)
        self.requests = Requests(self.target, self.tokenizer, self.end_ids, self.options.acceptance, self.drafter.name)

    # ---------------------------------------------------------------- for users

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Any:
        """Decode to the end. prompt: text, token ids or chat messages, or a list of those.

        Returns a Result, or a list of them for a list of prompts. params: one for all prompts, or one per prompt.
        Chat messages go through the tokenizer's template; text is taken as it is. Rows are independent: equal prompts
        with one seed give equal texts, and without a seed every row draws its own. A row's error is raised for all.
        """
        is_batch = is_batch_of_prompts(prompt)
        prompts: Sequence[Any] = prompt if is_batch else [prompt]
        settings = per_prompt(params, len(prompts), is_batch)
        sessions = [self.requests.session(p, s, with_text=False) for p, s in zip(prompts, settings, strict=True)]
        for _ in self.run(sessions):
            pass
        results = [self.result(session) for session in sessions]
        return results if is_batch else results[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Decode one prompt, giving text as it becomes final; the last chunk carries the Result."""
        if is_batch_of_prompts(prompt):
            raise InputError("stream takes one prompt, got a list of them. Call it once per prompt, or use generate.")
        return self._stream(self.requests.session(prompt, params or SamplingParams(), with_text=True))

    def _stream(self, session: Session) -> Iterator[Chunk]:
        num_seen = session.num_prompt_tokens
        try:
            self._join([session])
            result = None
            while result is None:
                self.step()
                with self._lock:  # another thread's step may be committing to this session
                    tokens, text = session.tokens[num_seen:], session.take_pieces()
                    result = self.result(session) if session.is_finished else None
                num_seen += len(tokens)
                if tokens or result is not None:
                    yield Chunk(text, tokens, result)
        finally:
            self.cancel(session)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt: text as it is, chat messages through the tokenizer's template."""
        return self.requests.encode(prompt)

    def without_drafts(self, is_stock: bool = False) -> Engine:
        """An engine of the same model that decodes plainly: the baseline of comparisons. is_stock: with the user's
        model itself, where this engine decodes with other layers."""
        target = self.target
        if is_stock and target.model is not target.original:
            target = Target(target.original)
            target.can_tree = self.target.can_tree
        return Engine(target, NoDrafter(), self.tokenizer, self.end_ids, self.capabilities, self.options)

    # ---------------------------------------------------------------- rows

    def submit(self, prompt: Prompt, params: SamplingParams, with_text: bool = True) -> Session:
        """A new row, decoded by the following steps. with_text: whether to detokenise while decoding."""
        session = self.requests.session(prompt, params, with_text)
        self._join([session])
        return session

    def run(self, sessions: Sequence[Session]) -> Generator[None]:
        """Decode sessions to their ends, giving control back after every step; raises the first error of any."""
        try:
            self._join(sessions)
            while any(not session.is_finished for session in sessions):
                self.step()
                for session in sessions:
                    if session.error is not None:
                        raise session.error
                yield
            for session in sessions:  # the last of them may have ended in another thread's step
                if session.error is not None:
                    raise session.error
            yield
        finally:
            for session in sessions:
                self.cancel(session)

    def _join(self, sessions: Sequence[Session]) -> None:
        with self._lock:
            self._sweep()
            for session in sessions:
                session.row = self._cache.add_row()
                self._rows.append(session)
                if session.columns is not None:
                    self._cache.set_columns(session.row, session.columns)
                    session.columns = None

    def cancel(self, session: Session) -> None:
        """Give the session's row to others, at the next moment between two steps. Safe to call twice, and anywhere."""
        session.is_cancelled = session.is_cancelled or session.finish_reason is None
        # Never wait here: a generator that is garbage-collected cancels its session in the middle of anything.
        if self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def _sweep(self) -> None:
        """Free the rows of sessions that have ended; not in the middle of a step, which counts on its rows."""
        if self._is_stepping:
            return
        for session in [session for session in self._rows if session.is_finished]:
            row, last = session.row, self._rows.pop()
            assert row is not None, "a session in the batch has a row"
            if session.keeps_columns and session.finish_reason is not None:
                session.columns = self._cache.columns(row)
            self._cache.drop_row(row)
            if last is not session:
                self._rows[row], last.row = last, row
            session.row = None
            self._drafting.release(session)

    def result(self, session: Session) -> Result:
        """What a finished session gave; raises the error that ended it."""
        if session.error is not None:
            raise session.error
        if session.finish_reason is None:
            state = "was cancelled" if session.is_cancelled else "has not finished: call step() until it has"
            raise EngineError(f"There is no result: the session {state}.")
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
            if self._is_stepping:
                raise EngineError(
                    "A logits processor or stopping criterion called back into the engine that is asking it. Use a "
                    "second engine inside callbacks."
                )
            active = [session for session in self._rows if not session.is_finished]
            if not active:
                return
            self._is_stepping = True
            try:
                self._step(active)
            except Exception as error:  # the model itself failed: no row can go on
                for session in active:
                    session.error = session.error or error
            finally:
                self._is_stepping = False
                self._sweep()

    def _step(self, active: Sequence[Session]) -> None:
        behind = {session.id: self._uncached(session) for session in active}
        ready = self._ready(active, behind)
        budgets = [self._budget(session) for session in ready]
        trees = {session.id: tree for session, tree in zip(ready, self._drafting.trees(ready, budgets), strict=True)}
        fed, blocks = [], []
        for session in active:
            assert session.row is not None
            uncached = behind[session.id]
            if session.id in trees:
                tree = trees[session.id]
                both = tree.after(uncached)
                shape = self._shape(session, self.options.k + 1)
                blocks.append(Block(session.row, both.tokens, both.parents, num_logits=len(tree), shape=shape))
            elif uncached:
                chunk = uncached[: self._chunk(session)]
                blocks.append(Block.chain(session.row, chunk, num_logits=0, shape=self._shape(session, len(chunk))))
            else:  # waits for the other rows of its group
                continue
            fed.append(session)
        begin = time.perf_counter()
        outputs = self.target.forward(self._cache, blocks, self._drafting.hidden_layers)
        logits = {session.id: output.logits for session, output in zip(fed, outputs, strict=True)}
        self._drafting.observe(ready, [trees[s.id] for s in ready], [logits[s.id] for s in ready])
        verdicts = self._accept(ready, trees, logits)
        if len(fed) == len(ready) == len(verdicts) and not any(behind.values()):  # no prompt was read beside
            num_tokens = sum(len(verdict.path) for verdict in verdicts.values())
            self._drafting.learn([trees[s.id] for s in ready], num_tokens, time.perf_counter() - begin)
        for session, block, output in zip(fed, blocks, outputs, strict=True):
            if session.id not in trees:
                kept = list(range(len(block.tokens)))
                session.stats.num_prefill_passes += 1
            elif session.id in verdicts:
                tree, path = trees[session.id], verdicts[session.id].path
                shift = len(block.tokens) - len(tree)
                session.stats.count_round(tree, path)
                kept = [*range(shift), *(node + shift for node in path)]
            else:
                continue
            start = self._cache.lengths[block.row]
            self._cache.keep(block.row, kept)
            self._drafting.read(session, start, {layer: states[kept] for layer, states in output.hidden.items()})

    def _chunk(self, session: Session) -> int:
        """Most prompt tokens per forward: all, where the frequencies of a long text must be those of its end."""
        switch = self.target.switch_position
        return len(session.tokens) if switch and len(session.tokens) > switch else self.options.prefill_chunk

    def _ready(self, active: Sequence[Session], behind: dict[int, list[int]]) -> list[Session]:
        """The rows that can be decided in this step: their prompts are read, and so are those of their groups."""
        late = {
            session.id
            for session in active
            if len(behind[session.id]) > (0 if self.options.is_bitwise else self._chunk(session))
        }
        return [
            session
            for session in active
            if not late.intersection([session.id] if session.group is None else [s.id for s in session.group.sessions])
        ]

    def _accept(
        self, ready: Sequence[Session], trees: dict[int, TokenTree], logits: dict[int, Tensor]
    ) -> dict[int, Verdict]:
        """Decide and commit, by session id. A row whose own processors or callbacks fail ends, with its group."""
        verdicts: dict[int, Verdict] = {}
        parties = {id(session.group or session): session.group or session for session in ready}
        for party in parties.values():
            members = [party] if isinstance(party, Session) else [s for s in party.sessions if s.id in trees]
            try:
                if isinstance(party, Session):
                    verdict = accept(party, trees[party.id], logits[party.id], self.options.acceptance)
                    verdicts[party.id] = verdict
                else:
                    ids = [session.id for session in members]
                    verdicts |= party.accept({i: trees[i] for i in ids}, {i: logits[i] for i in ids})
            except Exception as error:
                for session in members:
                    session.error = error
        return verdicts

    def _uncached(self, session: Session) -> list[int]:
        """Committed tokens before the last one whose keys and values the cache does not hold."""
        assert session.row is not None, "the session has left the batch"
        return session.tokens[self._cache.lengths[session.row] : -1]

    def _budget(self, session: Session) -> Budget:
        """At most k nodes, not past the last wanted token, and only where the cache can drop what is refused."""
        depth = min(self.options.k, session.num_remaining_tokens - 1)
        if self.target.max_positions is not None:
            depth = max(0, min(depth, self.target.max_positions - len(session.tokens)))
        if not self._cache.can_crop and self._uncached(session):
            depth = 0
        can_branch = self.target.can_tree and not self.options.is_bitwise
        return Budget(nodes=self.options.k if depth else 0, depth=depth, can_branch=can_branch)

    def _shape(self, session: Session, num_nodes: int) -> tuple[int, int] | None:
        """What a pass is padded to where bits must be equal: the same with and without drafts."""
        if not self.options.is_bitwise:
            return None
        columns = session.num_prompt_tokens + session.params.max_new_tokens + self.options.k + 1
        return num_nodes, -(-columns // _COLUMN_STEP) * _COLUMN_STEP
