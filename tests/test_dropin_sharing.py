"""Threads share an accelerated model and get their own texts; callbacks may not call back; nothing is left behind."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dropin_reference import CACHE, ENTRIES, PAD, PLAIN, WAYS, assert_mixed, batch, call, fast, plain
from reference import MIXED, ONE, REPEATED, model, noisy, tokenizer, with_ends, writer
from test_cases_i import in_threads
from test_cases_k import assert_unchanged, state_of
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList

import outpace
from outpace import EngineError, InputError
from outpace.testing.models import with_noise

# --------------------------------------------------------------------------------------------------
# Threads


def _bans_multiples(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Every token that divides by three is forbidden at odd lengths."""
    scores = scores.clone()
    scores[:, :: 3 if input_ids.shape[1] % 2 else 512] = -torch.inf
    return scores


@pytest.mark.parametrize("way", WAYS)
def test_threads_with_one_object_get_their_own_texts_and_counts(way: str) -> None:
    """T-I9: two threads, many rounds: batches and rows, seeds, processors, scores and caches."""
    target, accelerated = model("llama"), fast(model("llama"), way)
    seeded = {"do_sample": True, "top_k": 40, "seed": 3, "max_new_tokens": 16, "pad_token_id": PAD}

    def texts(kind: str, entry: str) -> Any:
        """One call of a kind, and the number of tokens that it is said to have taken."""
        options: dict[str, Any] = PLAIN | {"max_new_tokens": 16}
        prompts: tuple[tuple[int, ...], ...] = (MIXED,)
        if kind == "batch":
            prompts = (ONE, REPEATED, MIXED)
        elif kind == "seed":
            options = seeded
        elif kind == "processor":
            options, prompts = options | {"logits_processor": [_bans_multiples]}, (REPEATED, ONE)
        elif kind == "scores":
            options = options | {"return_dict_in_generate": True, "output_scores": True}
        elif kind == "cache":
            options = options | {CACHE: DynamicCache(config=target.config)}
        if entry == "transformers":
            found = target.generate(**batch(*prompts), **options)
        else:
            found = call(entry, accelerated, **batch(*prompts), **options)
            assert len(accelerated.last_stats) == len(prompts)
            assert [stats.num_prompt_tokens for stats in accelerated.last_stats] == [len(prompt) for prompt in prompts]
            assert all(stats.num_new_tokens == 16 for stats in accelerated.last_stats)
        return found.sequences.tolist() if kind == "scores" else found.tolist()

    kinds = ("batch", "seed", "processor", "scores", "cache", "one")
    wanted = {kind: texts(kind, ENTRIES[0] if kind == "seed" else "transformers") for kind in kinds}
    assert wanted["seed"] != wanted["one"] and wanted["processor"][0] != wanted["batch"][1]

    def rounds(order: tuple[str, ...], entry: str) -> list[Any]:
        return [texts(kind, entry) for _ in range(2) for kind in order]

    for _ in range(2):
        found = in_threads(lambda: rounds(kinds, ENTRIES[0]), lambda: rounds(kinds[::-1], ENTRIES[1]))
        assert found[0] == [wanted[kind] for kind in kinds] * 2
        assert found[1] == [wanted[kind] for kind in kinds[::-1]] * 2
    assert not accelerated.engine._rows and not accelerated.engine._cache.lengths


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_exception_in_one_thread_does_not_reach_another(entry: str) -> None:
    """T-I9, T-D9: each thread has its own processors, and its own errors."""
    accelerated, wanted = fast(model("llama")), plain(model("llama"), batch(REPEATED), {}).tolist()

    def raising(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == 36:
            raise ZeroDivisionError
        return scores

    def failing() -> str:
        for _ in range(4):
            with pytest.raises(ZeroDivisionError):
                call(entry, accelerated, **batch(MIXED, ONE), **PLAIN, logits_processor=[raising])
        return "raised"

    def good() -> list[Any]:
        return [call(entry, accelerated, **batch(REPEATED), **PLAIN).tolist() for _ in range(4)]

    assert in_threads(failing, good) == ["raised", [wanted] * 4]
    assert not accelerated.engine._rows


# --------------------------------------------------------------------------------------------------
# Callbacks that call back


CALLBACKS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")


def _calling(kind: str, action: Callable[[], Any], at: int = 4) -> dict[str, Any]:
    """Arguments with a callback that acts at the given call, and changes nothing."""
    calls: list[int] = []

    def act() -> None:
        calls.append(1)
        if len(calls) == at:
            action()

    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        act()
        return scores

    def criterion(input_ids: Tensor, scores: Any) -> Tensor:
        act()
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def allowed(row: int, text: Tensor) -> list[int]:
        act()
        return list(range(512))

    if kind == "logits_processor":
        return {kind: [processor]}
    return {kind: [criterion]} if kind == "stopping_criteria" else {kind: allowed}


@pytest.mark.parametrize("inner", ENTRIES)
@pytest.mark.parametrize("kind", CALLBACKS)
@pytest.mark.parametrize("way", ["suffix", "tree"])
def test_a_callback_that_calls_back_gets_a_clear_error(way: str, kind: str, inner: str) -> None:
    """T-I9: and where it catches the error, the text that it was asked about is right."""
    accelerated, inputs = fast(model("llama"), way), batch(MIXED, ONE)
    wanted = plain(model("llama"), inputs, {}).tolist()

    def back() -> None:
        call(inner, accelerated, **batch(ONE), **PLAIN)

    def back_and_forth() -> None:
        with pytest.raises(EngineError, match="called back into the engine"):
            back()

    for entry in ENTRIES:
        with pytest.raises(EngineError, match="logits processor or stopping criterion called back into the engine"):
            call(entry, accelerated, **inputs, **PLAIN, **_calling(kind, back))
        assert not accelerated.engine._rows and not accelerated.engine._cache.lengths
        found = call(entry, accelerated, **inputs, **PLAIN, **_calling(kind, back_and_forth))
        assert found.tolist() == wanted and len(accelerated.last_stats) == 2


@pytest.mark.parametrize("kind", CALLBACKS)
def test_a_callback_may_use_the_model_and_other_objects(kind: str) -> None:
    """T-I9: transformers' own generate on the same model, and a second object of it."""
    inputs, second = batch(MIXED, ONE), outpace.accelerate(model("llama"), drafter="lookup")
    wanted, seen = plain(model("llama"), batch(ONE), {}).tolist(), []

    def use() -> None:
        seen.append(model("llama").generate(**batch(ONE), **PLAIN).tolist())
        seen.append(second.generate(**batch(ONE), **PLAIN).tolist())

    found = fast(model("llama")).generate(**inputs, **PLAIN, **_calling(kind, use))
    assert seen == [wanted, wanted] and found.tolist() == plain(model("llama"), inputs, {}).tolist()


# --------------------------------------------------------------------------------------------------
# No trace


def _prompts() -> dict[str, Tensor]:
    return batch(*(tokenizer()(text)["input_ids"] for text in ("the people of the", "a")), pad=2)


def _use(accelerated: Any, target: Any, own: Any) -> None:
    common = {"max_new_tokens": 12, "pad_token_id": 2}
    for entry in ENTRIES:
        call(entry, accelerated, **_prompts(), **common, repetition_penalty=1.2, eos_token_id=[70, 71])
        call(entry, accelerated, **_prompts(), **common, do_sample=True, seed=3, num_return_sequences=2)
        call(entry, accelerated, **_prompts(), **common, output_scores=True, return_dict_in_generate=True)
        config = GenerationConfig(max_new_tokens=8, no_repeat_ngram_size=2, pad_token_id=2)
        call(entry, accelerated, **_prompts(), generation_config=config, logits_processor=[_bans_multiples])
    accelerated.generate(**_prompts(), **common, stop_strings=["th", "a"], tokenizer=own)


def _fail(accelerated: Any, target: Any, own: Any) -> None:
    def raising(input_ids: Tensor, scores: Tensor) -> Tensor:
        raise ArithmeticError("from a user's processor")

    for entry in ENTRIES:
        with pytest.raises(ArithmeticError):
            call(entry, accelerated, **_prompts(), max_new_tokens=8, pad_token_id=2, logits_processor=[raising])
        with pytest.raises(InputError):
            call(entry, accelerated, **_prompts(), max_new_tokens=8, pad_token_id=2, num_beams=2)
        with pytest.raises(ValueError):
            call(entry, accelerated, **_prompts(), max_new_token=8)


def _close(accelerated: Any, target: Any, own: Any) -> None:
    _use(accelerated, target, own)
    accelerated.close()


@pytest.mark.parametrize("what", [_use, _fail, _close], ids=["after calls", "after exceptions", "after close"])
@pytest.mark.parametrize("way", ["suffix", "tree"])
def test_nothing_of_a_call_is_left_behind(way: str, what: Callable[..., None]) -> None:
    """T-K3: configs, weights, hooks, forwards, tokenizers and random generators; plain generate is as before."""
    target, own = with_ends(writer(), 70), copy.deepcopy(tokenizer())
    draft = with_noise(target, 0.05)
    target.generation_config.repetition_penalty = 1.1
    greedy_before = target.generate(**_prompts(), max_new_tokens=24, pad_token_id=2, do_sample=False).tolist()
    before, draft_before = state_of(target, own), state_of(draft, own)
    accelerated = outpace.accelerate(target, **({"drafter": draft} | WAYS[way]))
    assert_unchanged(before, state_of(target, own))
    what(accelerated, target, own)
    assert_unchanged(before, state_of(target, own))
    assert_unchanged(draft_before, state_of(draft, own))
    greedy_after = target.generate(**_prompts(), max_new_tokens=24, pad_token_id=2, do_sample=False).tolist()
    assert greedy_after == greedy_before and len(set(greedy_before[0])) >= 5


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_a_call_is_given_is_left_as_it_was(entry: str) -> None:
    """T-K3: tensors, lists, processors and configs of the user, and the result is the user's own."""
    inputs, processors, criteria = batch(MIXED, ONE), LogitsProcessorList([_bans_multiples]), StoppingCriteriaList()
    config = GenerationConfig(**PLAIN, bad_words_ids=[[3], [4, 5]], eos_token_id=[511])
    given = [copy.deepcopy(value) for value in (inputs["input_ids"], inputs["attention_mask"], config.to_dict())]
    options = {"generation_config": config, "logits_processor": processors, "stopping_criteria": criteria}
    first = call(entry, fast(model("llama")), **inputs, **options, seed=2)
    assert torch.equal(inputs["input_ids"], given[0]) and torch.equal(inputs["attention_mask"], given[1])
    assert config.to_dict() == given[2] and processors == [_bans_multiples] and criteria == []
    kept = first.clone()
    second = call(entry, fast(model("llama")), **inputs, **options)
    first.zero_()
    assert torch.equal(second, kept) and inputs["input_ids"].sum() > 0
    assert_mixed(fast(model("llama")).last_stats)


def test_closing_lets_go_of_the_models() -> None:
    """T-K3: the draft model and the caches can be freed while the object is still there."""
    draft = copy.deepcopy(noisy("llama"))
    accelerated = outpace.accelerate(model("llama"), drafter=draft)
    accelerated.generate(**batch(MIXED), **PLAIN)
    engine, dead = weakref.ref(accelerated.engine.target), weakref.ref(draft)
    del draft
    gc.collect()
    assert dead() is not None and engine() is not None
    accelerated.close()
    gc.collect()
    assert dead() is None and engine() is None
    with pytest.raises(EngineError, match="was closed"):
        accelerated.engine.encode([1])
