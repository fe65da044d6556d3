"""`model.generate(...)` as people call it, faster: transformers prepares the call, the engine decodes it.

transformers reads the arguments, builds the logits processors and stopping criteria, and hands them to a callable
(`custom_generate`). That callable is here. It refuses what cannot be honoured, makes rows of the prompts, and puts
what they give into the shape that transformers' own loop returns.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from . import arguments, loading
from .cache import num_cached_tokens, read_columns, write_columns
from .choosing import Vocabularies
from .drafters.memory import Memory
from .drafters.model import DEFAULT_CONFIDENCE_THRESHOLD
from .drafters.texts import TextStore
from .engine import Engine
from .errors import EngineError, InputError
from .group import RowGroup, as_generate_gives, form_groups
from .loading import KernelsName, PlannerName
from .options import Exactness
from .quantize import DraftQuantize
from .sampling import SamplingParams
from .session import Session, Stats


def accelerate(
    model: Any,
    *,
    drafter: Any = None,
    draft_model: Any = None,
    tokenizer: Any = None,
    draft_tokenizer: Any = None,
    vocabularies: Vocabularies = "equal",
    draft_quantize: DraftQuantize = "auto",
    k: int | None = None,
    width: int = 1,
    confidence_threshold: float = DEFAULT_CONFIDENCE_THRESHOLD,
    corpus: str | Path | TextStore | None = None,
    memory: int | Memory = 0,
    lookahead: tuple[int, int, int] | None = None,
    heads: str | Path | None = None,
    planner: PlannerName | None = None,
    kernels: KernelsName | None = None,
    prefill_chunk: int = 512,
    exactness: Exactness = "numerical",
) -> Accelerated:
    """An object whose `generate` takes and gives what `model.generate` does, in fewer passes over the model.

    model: a loaded causal language model of transformers, which is used as it is and never changed.
    drafter: as in `outpace.load`, or a draft model that is loaded already. The other arguments are those of
    `outpace.load`.

    Raises LoadError for a model that cannot be decoded exactly, and InputError for bad arguments.
    """
    if callable(getattr(drafter, "get_input_embeddings", None)):
        if draft_model is not None:
            raise InputError("Two draft models were given, as drafter and as draft_model. Leave one of them out.")
        drafter, draft_model = "model", drafter
    engine = loading.load(
        model,
        tokenizer=tokenizer,
        drafter=drafter,
        draft_model=draft_model,
        draft_tokenizer=draft_tokenizer,
        vocabularies=vocabularies,
        draft_quantize=draft_quantize,
        k=k,
        width=width,
        confidence_threshold=confidence_threshold,
        corpus=corpus,
        memory=memory,
        lookahead=lookahead,
        heads=heads,
        planner=planner,
        kernels=kernels,
        prefill_chunk=prefill_chunk,
        exactness=exactness,
        applies_generation_config=True,
    )
    return Accelerated(engine)


class Accelerated:
    """A model with a faster `generate`. Also a `custom_generate`: `model.generate(**inputs, custom_generate=fast)`.

    Threads may share it: their rows go through common steps, and a thread gets only its own. Logits processors and
    stopping criteria may then be called from another thread's step, never two at a time.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._local = threading.local()

    @property
    def engine(self) -> Engine:
        """The engine underneath; raises EngineError after `close`."""
        if self._engine is None:
            raise EngineError("This accelerated model was closed. Call accelerate() again.")
        return self._engine

    @property
    def last_stats(self) -> tuple[Stats, ...]:
        """Counts of each row of this thread's last call; empty before the first."""
        return getattr(self._local, "stats", ())

    def close(self) -> None:
        """Let go of the model and of all memory; further calls raise EngineError. Safe to call twice."""
        self._engine = None

    def __enter__(self) -> Accelerated:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        synced_gpus: bool | None = None,
        assistant_model: Any = None,
        streamer: Any = None,
        negative_prompt_ids: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        custom_generate: Any = None,
        *,
        tokenizer: Any = None,
        seed: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `model.generate`, with the same arguments and results; docs/dropin.md says what becomes of each.

        seed: makes sampling exact across drafters, draft lengths and batches; without it, torch's generator is asked,
        so that `torch.manual_seed` makes runs repeatable. Raises InputError, before the first token, for an argument
        that cannot be honoured.
        """
        call = _Call(self, streamer=streamer, seed=seed)
        try:
            model: Any = self.engine.target.original
            named = {"synced_gpus": synced_gpus, "assistant_model": assistant_model, "custom_generate": custom_generate}
            configs = (generation_config, getattr(model, "generation_config", None))
            for config in reversed([config for config in configs if config is not None]):
                named |= {name: value for name, value in config.to_dict().items() if value is not None}
            arguments.refuse(named | kwargs)
            stop_strings = (named | kwargs).get("stop_strings")
            if stop_strings is not None:
                # transformers gives the tokenizer to its own loop only, so the criterion is made here.
                if tokenizer is None:
                    raise InputError("generate(stop_strings=…) needs tokenizer=, to know how strings are spelt.")
                kwargs["stop_strings"] = None
                criterion = StopStringCriteria(tokenizer, stop_strings)
                stopping_criteria = StoppingCriteriaList([criterion, *(stopping_criteria or ())])
            return model.generate(
                inputs,
                generation_config=generation_config,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
                negative_prompt_ids=negative_prompt_ids,
                negative_prompt_attention_mask=negative_prompt_attention_mask,
                custom_generate=call,
                **kwargs,
            )
        finally:
            if streamer is not None:
                streamer.end()

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: int | Sequence[int] | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """What transformers calls for `model.generate(..., custom_generate=fast)`."""
        dropped = _dropped_by_transformers()
        streamer = dropped.get("streamer")
        call = _Call(self, streamer, seed, has_put_prompt=True)
        try:
            arguments.refuse({name: dropped.get(name) for name in ("assistant_model", "synced_gpus")})
            return call(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)
        finally:
            if streamer is not None:
                streamer.end()


def _dropped_by_transformers() -> dict[str, Any]:
    """The arguments of the running `model.generate`, some of which it keeps from the callable that it calls.

    Ignoring a streamer in silence would be worse than looking into the caller.
    """
    own = inspect.currentframe()
    caller = own.f_back.f_back if own is not None and own.f_back is not None else None
    is_generate = caller is not None and caller.f_code is inspect.unwrap(GenerationMixin.generate).__code__
    return dict(caller.f_locals) if caller is not None and is_generate else {}


@dataclass(slots=True)
class _Call:
    """One call of `generate`, from transformers' preparation to its result."""

    fast: Accelerated
    streamer: Any = None
    seed: int | Sequence[int] | None = None
    has_put_prompt: bool = False

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        engine = self.fast.engine
        if not any(part is model for part in engine.target.original.modules()):
            raise InputError(
                f"custom_generate was made for another model than this {type(model).__name__}. Call accelerate() with "
                "the model whose generate you call."
            )
        arguments.check(generation_config, model_kwargs)
        cache: Any = next((model_kwargs[name] for name in arguments.CACHES if model_kwargs.get(name) is not None), None)
        paddings = arguments.paddings(input_ids, generation_config, model_kwargs)
        sessions = self._sessions(engine, input_ids, paddings, stopping_criteria, generation_config)
        num_cached = num_cached_tokens(cache)
        is_users = num_cached > 0 or getattr(cache, "_is_user_defined", False)
        if num_cached >= input_ids.shape[1]:
            raise InputError(
                f"past_key_values holds {num_cached} tokens and input_ids {input_ids.shape[1]}. Give the whole text as "
                "input_ids, the cached part and at least one token more: drafts are made from it."
            )
        if is_users and not engine.target.can_copy:
            raise InputError(
                "generate(past_key_values=…) cannot be honoured: this model keeps a recurrent state, which cannot be "
                "taken up. Leave it out: the whole text is in input_ids and is read again."
            )
        fills_cache = engine.target.can_copy and cache is not None
        # Older versions of transformers do not say whether an empty cache is the user's.
        is_wanted = is_users or bool(generation_config.return_dict_in_generate) or "past_key_values" in model_kwargs
        fills_cache = fills_cache and is_wanted
        for row, session in enumerate(sessions):
            session.keeps_columns = fills_cache
            if num_cached > 0:
                session.columns = read_columns(cache, engine.target.config, row, paddings[row])
        groups = form_groups(
            sessions, input_ids, logits_processor, stopping_criteria, generation_config, self.streamer is not None
        )
        self._run(engine, sessions, groups, input_ids)
        if fills_cache:
            write_columns(cache, [session.columns or {} for session in sessions], paddings)
        return as_generate_gives(groups, generation_config, cache if fills_cache else None)

    def _sessions(
        self,
        engine: Engine,
        input_ids: Tensor,
        paddings: Sequence[int],
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ) -> list[Session]:
        """One session per row. Ends are left to the criteria; the longest length bounds the drafts."""
        ends = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
        num_new = max(1, min(ends, default=sys.maxsize) - input_ids.shape[1])
        params = SamplingParams(temperature=1.0 if config.do_sample else 0.0, max_new_tokens=num_new)
        seeds = self._seeds(len(paddings), config)
        sessions = []
        for ids, padding, seed in zip(input_ids.tolist(), paddings, seeds, strict=True):
            tokens = engine.encode(ids[padding:])
            engine.target.check_span(len(tokens), num_new)
            stats = Stats(drafter=engine.drafter.name, num_prompt_tokens=len(tokens))
            sessions.append(Session(tokens, len(tokens), params, seed, frozenset(), [], None, stats))
        return sessions

    def _seeds(self, num_rows: int, config: GenerationConfig) -> list[int]:
        """A seed per row, from `seed` or from torch's generator, which greedy decoding leaves alone."""
        seed = self.seed
        if seed is None:
            if not config.do_sample:
                return [0] * num_rows
            drawn: list[int] = torch.randint(0, 1 << 48, (num_rows,)).tolist()
            return drawn
        is_one = not isinstance(seed, list | tuple)
        given: Sequence[Any] = [seed] if is_one else seed  # type: ignore[assignment]
        if any(isinstance(one, bool) or not isinstance(one, Integral) or one < 0 for one in given):
            raise InputError(f"seed must be a whole number, 0 or larger, or a list of one per row, got {seed!r}.")
        given = [int(one) for one in given]
        if is_one:
            return [given[0] + row % (config.num_return_sequences or 1) for row in range(num_rows)]
        if len(given) != num_rows:
            raise InputError(f"seed has {len(given)} numbers for {num_rows} rows. Give one number, or one per row.")
        return list(given)

    def _run(self, engine: Engine, sessions: Sequence[Session], groups: Sequence[RowGroup], input_ids: Tensor) -> None:
        """Decode to the ends, and hand tokens to the streamer between steps, where it may take its time."""
        if self.streamer is not None and not self.has_put_prompt:
            self.streamer.put(input_ids.cpu())
        num_put = input_ids.shape[1]
        with closing(engine.run(sessions)) as steps:
            for _ in steps:
                if self.streamer is not None:
                    text = groups[0].text
                    for column in text[:, num_put:].unbind(-1):
                        self.streamer.put(column.cpu())
                    num_put = text.shape[1]
        self.fast._local.stats = tuple(session.stats for session in sessions)
