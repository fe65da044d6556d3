"""Rows of a batch and threads on one engine share steps, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from reference import (
    METHODS,
    MIXED,
    ONE,
    REPEATED,
    STATE_FAMILIES,
    assert_drafts_were_mixed,
    engine,
    first_seen_at,
    full_texts,
    greedy,
    model,
    params,
    plain,
    with_ends,
)
from torch import nn

import outpace
from outpace import InputError, Result
from outpace.testing import drafters
from outpace.testing.models import tiny_model

# --------------------------------------------------------------------------------------------------
# Batches


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_a_row_of_a_batch_is_what_it_is_alone(method: str, temperature: float) -> None:
    """T-I1: prompts of 5, 17 and 30 tokens, for every method, greedy and sampled."""
    prompts = (MIXED[:5], REPEATED[:17], MIXED)
    texts = full_texts("llama", prompts, 40)
    settings = params(30, temperature=temperature, seed=7)
    alone = [engine("llama", method, texts, k=6).generate(list(prompt), settings) for prompt in prompts]
    together = engine("llama", method, texts, k=6).generate([list(prompt) for prompt in prompts], settings)
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    if temperature == 0:
        assert [result.tokens for result in together] == [greedy("llama", prompt, 40)[:30] for prompt in prompts]
    if method in ("noisy", "noisy trees", "random trees") and temperature == 0:
        assert_drafts_were_mixed(*(result.stats for result in together))
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.stats.num_draft_failures == theirs.stats.num_draft_failures == 0


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "gpt-oss", "bloom", *STATE_FAMILIES])
def test_rows_that_end_at_very_different_times_keep_their_texts(family: str) -> None:
    """T-I2: six rows whose ends are at 1, 3, 8, 20, 32 and 32 tokens, with drafts of their own luck."""
    prompts = (MIXED, ONE, REPEATED, MIXED, REPEATED, ONE)
    texts = full_texts(family, (MIXED, ONE, REPEATED), 32)
    counts = (1, 3, 8, 20, 32, 32)
    trees = drafters.random_trees(512, texts, share_right=0.7)
    results = outpace.load(model(family), drafter=trees, k=5).generate(
        [list(prompt) for prompt in prompts], [params(count) for count in counts]
    )
    for prompt, count, result in zip(prompts, counts, results, strict=True):
        assert result.tokens == greedy(family, prompt, 32)[:count]


def test_rows_that_end_by_the_same_end_token_end_each_at_its_own_place() -> None:
    """T-I2: end-of-text tokens at index 0, 2 and 35, and rows without any; what is returned is not padded."""
    prompts = (MIXED, ONE, REPEATED, MIXED[:5], REPEATED[:17], MIXED[:12])
    texts = full_texts("llama", prompts, 40)
    wanted = [list(text[-40:]) for text in texts]
    ends = (first_seen_at(wanted[0], 0), first_seen_at(wanted[1], 2), first_seen_at(wanted[2], 35))
    ended = with_ends(model("llama"), *ends)
    for drafter in (drafters.random_trees(512, texts), drafters.oracle(texts), "lookup"):
        results = outpace.load(ended, drafter=drafter, k=8).generate([list(prompt) for prompt in prompts], params(40))
        assert [result.tokens for result in results] == [plain(ended, prompt, 40) for prompt in prompts]
        assert len({len(result.tokens) for result in results}) >= 3


def test_every_prompt_may_have_settings_of_its_own() -> None:
    """T-I2: temperatures, seeds, budgets and penalties differ from row to row."""
    prompts = [list(MIXED), list(ONE), list(REPEATED), list(MIXED)]
    settings = [
        params(12),
        params(20, temperature=1.0, seed=3),
        params(5, repetition_penalty=1.4),
        params(16, temperature=0.5, top_k=5, seed=1, logprobs=1),
    ]
    found = engine("llama", "noisy trees", k=6)
    results = found.generate(prompts, settings)
    assert [result.tokens for result in results] == [
        found.generate(prompt, one).tokens for prompt, one in zip(prompts, settings, strict=True)
    ]
    assert [result.logprobs is None for result in results] == [True, True, True, False]
    with pytest.raises(InputError, match="3 params were given for 4 prompt"):
        found.generate(prompts, settings[:3])
    with pytest.raises(InputError, match="for 1 prompt"):
        found.generate(list(MIXED), settings[:1])


def test_many_rows_of_many_lengths_are_decoded_together() -> None:
    """T-I1: forty rows, far more than any buffer starts with; and the same again with the buffers that are left."""
    numbers = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 512, (1 + size % 23,), generator=numbers).tolist() for size in range(40)]
    wanted = [plain(model("mistral"), prompt, 12) for prompt in prompts]
    texts = [(*prompt, *tokens) for prompt, tokens in zip(prompts, wanted, strict=True)]
    found = outpace.load(model("mistral"), drafter=drafters.random_trees(512, texts), k=4)
    for order in (1, -1):
        results = found.generate(prompts[::order], params(12))
        assert [result.tokens for result in results] == wanted[::order]


@pytest.mark.parametrize("method", ["noisy trees", "sure", "suffix", "random trees"])
def test_rows_may_join_and_leave_between_any_two_steps(method: str) -> None:
    """T-I2: submitted, cancelled and submitted again; drafters forget every row that has left."""
    prompts = (MIXED, ONE, REPEATED, MIXED[:5], REPEATED[:17], MIXED[:12])
    texts = full_texts("llama", prompts, 40)
    found = engine("llama", method, texts, k=5)
    active: list[Any] = []
    seen: list[Any] = []
    submitted: list[int] = []
    waiting = [*range(6), *range(6)]
    for step in range(200):
        if step % 3 == 0 and waiting:
            index = waiting.pop(0)
            session = found.submit(list(prompts[index]), params(5 + 7 * index % 33))
            submitted.append(session.id)
            active.append((index, session))
        if step % 7 == 6 and len(active) > 2:
            found.cancel(active.pop(1)[1])
        found.step()
        seen += active
        active = [(index, session) for index, session in active if not session.is_finished]
        if not active and not waiting:
            break
    assert not waiting and not active and not found._rows and not found._cache.lengths
    for index, session in seen:
        assert session.error is None and session.stats.num_draft_failures == 0
        assert session.new_tokens == list(texts[index][-40:])[: len(session.new_tokens)]
    for memory in ("_drafts", "_texts"):
        assert not getattr(found.drafter, memory, None)
    if isinstance(found.drafter, drafters.Scripted):
        assert sorted(found.drafter.released) == submitted


def test_a_stream_that_is_dropped_leaves_nothing_behind() -> None:
    """T-I6: fifty streams closed after their first chunk, or never begun; the next request is served."""
    found = engine("llama", "noisy trees", k=5)
    for index in range(50):
        stream = found.stream(list(MIXED), params(40))
        if index % 2:
            assert next(stream).tokens
        stream.close()  # type: ignore[attr-defined]
        assert not found._rows and not found._cache.lengths
    drafter: Any = found.drafter
    assert not drafter._drafts and not drafter._cache.lengths
    assert found.generate(list(MIXED), params(40)).tokens == greedy("llama", MIXED, 40)


# --------------------------------------------------------------------------------------------------
# Failures


class Fragile(nn.Module):
    """Raises in the given forward of the model that it hooks."""

    def __init__(self, model: nn.Module, at: int) -> None:
        super().__init__()
        self.num_forwards, self.at = 0, at
        self.error = MemoryError("no room for this forward")
        self.handle = model.register_forward_pre_hook(self._count)

    def _count(self, *arguments: Any) -> None:
        self.num_forwards += 1
        if self.num_forwards == self.at:
            raise self.error


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_failure_of_the_model_reaches_every_caller_and_the_engine_goes_on(family: str) -> None:
    """T-I9: in the middle of a text; no row stays behind, and the same request then succeeds."""
    target = tiny_model(family)
    texts = full_texts(family, (MIXED, ONE), 32)
    found = outpace.load(target, drafter=drafters.random_trees(512, texts), k=5)
    fragile = Fragile(target, at=4)
    with pytest.raises(MemoryError) as caught:
        found.generate([list(MIXED), list(ONE)], params(32))
    assert caught.value is fragile.error and not found._rows and not found._cache.lengths
    results = found.generate([list(MIXED), list(ONE)], params(32))
    assert [result.tokens for result in results] == [greedy(family, prompt, 32) for prompt in (MIXED, ONE)]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_an_interrupt_in_the_middle_of_a_step_spoils_no_row(family: str) -> None:
    """T-I9: Ctrl-C while one row's processor runs; every row can be decoded to its own text afterwards."""
    num_calls = 0

    def interrupting(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            raise KeyboardInterrupt
        return scores

    texts = full_texts(family, (MIXED, ONE), 32)
    found = outpace.load(model(family), drafter=drafters.random_trees(512, texts), k=4)
    sessions = [
        found.submit(list(ONE), params(32, logits_processors=[interrupting])),
        found.submit(list(MIXED), params(32)),
    ]
    with pytest.raises(KeyboardInterrupt):
        while True:
            found.step()
    while any(not session.is_finished for session in sessions):
        found.step()
    assert [session.new_tokens for session in sessions] == [greedy(family, prompt, 32) for prompt in (ONE, MIXED)]


def test_a_row_of_scores_that_are_no_numbers_harms_no_row_after_it() -> None:
    """T-I2: what it left in the buffers is masked, and a masked column must not be NaN for others."""
    target = tiny_model("llama")
    with torch.no_grad():
        target.get_input_embeddings().weight[7] = torch.nan
    prompts = [[10, 11, 12], [*range(20, 60)], [*range(100, 130)]]
    wanted = [plain(target, prompt, 12) for prompt in prompts]
    assert all(7 not in tokens for tokens in wanted)
    found = outpace.load(target, drafter="none")
    for _ in range(3):  # once in every row of the buffer
        found.submit([*range(60, 100), 7, 7, 7, *range(60, 100)], params(8))
    for _ in range(8):
        found.step()
    assert not found._rows
    assert [result.tokens for result in found.generate(prompts, params(12))] == wanted


def test_a_row_of_scores_that_are_no_numbers_harms_no_row_that_takes_its_place() -> None:
    """T-I2: also while another row lives on, so that the buffers stay."""
    target = tiny_model("llama")
    with torch.no_grad():
        target.get_input_embeddings().weight[7] = torch.nan
    prompts = [[10, 11, 12], [*range(20, 60)], [*range(100, 130)]]
    wanted = [plain(target, prompt, 24) for prompt in prompts]
    found = outpace.load(target, drafter="none")
    living = found.submit(prompts[1], params(24))
    for _ in range(2):
        found.submit([*range(60, 100), 7, 7, 7, *range(60, 100)], params(8))
    for _ in range(8):
        found.step()
    others = [found.submit(prompt, params(24)) for prompt in (prompts[0], prompts[2])]
    while found._rows:
        found.step()
    assert [session.error for session in (living, *others)] == [None] * 3
    assert [session.new_tokens for session in (others[0], living, others[1])] == wanted


def test_a_row_of_scores_that_are_no_numbers_harms_no_row_beside_it() -> None:
    """T-I2: a prompt that the model answers with NaN is in the same batch as others."""
    target = tiny_model("llama")
    with torch.no_grad():
        target.get_input_embeddings().weight[7] = torch.nan
    prompts = [[10, 11, 12], [*range(20, 60)]]
    wanted = [plain(target, prompt, 12) for prompt in prompts]
    found = outpace.load(target, drafter="none")
    bad = found.submit([1, 2, 7], params(12, temperature=1.0))
    results = found.generate(prompts, params(12))
    assert [result.tokens for result in results] == wanted
    assert isinstance(bad.error, outpace.EngineError) and "not numbers" in str(bad.error)


@pytest.mark.parametrize("settings", [{}, {"logprobs": 0}, {"temperature": 1.0}], ids=["greedy", "logprobs", "sampled"])
def test_scores_that_are_no_numbers_are_an_error(settings: dict[str, Any]) -> None:
    """T-I2: with a message that names the position, instead of a text of token 0."""
    target = tiny_model("llama")
    with torch.no_grad():
        target.get_input_embeddings().weight[7] = torch.nan
    with pytest.raises(outpace.EngineError, match="at position 3 are not numbers"):
        outpace.load(target, drafter="none").generate([1, 2, 7], params(4, **settings))


# --------------------------------------------------------------------------------------------------
# Threads


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that start together, one thread each."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait(timeout=30)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(run, call) for call in calls]]


@pytest.mark.parametrize("method", ["noisy trees", "random trees", "suffix"])
def test_threads_on_one_engine_get_their_own_texts(method: str) -> None:
    """T-I9: four threads with different prompts, settings and ways of calling, several times each."""
    prompts = (MIXED, ONE, REPEATED, MIXED[:5])
    found = engine("llama", method, full_texts("llama", prompts, 40), k=5)

    def generated(prompt: tuple[int, ...]) -> list[list[int]]:
        return [found.generate(list(prompt), params(40)).tokens for _ in range(3)]

    def streamed(prompt: tuple[int, ...]) -> list[list[int]]:
        texts = []
        for _ in range(3):
            pieces = list(found.stream(list(prompt), params(40)))
            assert isinstance(pieces[-1].result, Result)
            texts.append([token for piece in pieces for token in piece.tokens])
        return texts

    calls = [lambda: generated(MIXED), lambda: streamed(ONE), lambda: generated(REPEATED), lambda: streamed(MIXED[:5])]
    texts = in_threads(*calls)
    assert texts == [[greedy("llama", prompt, 40)] * 3 for prompt in prompts]
    assert not found._rows and not found._cache.lengths


def test_an_exception_in_one_thread_does_not_reach_another() -> None:
    """T-I9: a processor that raises ends its own request only."""
    found = engine("llama", "noisy trees", k=5)

    def failing() -> str:
        def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] > len(MIXED) + 5:
                raise ZeroDivisionError
            return scores

        with pytest.raises(ZeroDivisionError):
            found.generate(list(MIXED), params(40, logits_processors=[processor]))
        return "raised"

    def good() -> list[int]:
        tokens: list[int] = found.generate(list(REPEATED), params(40)).tokens
        return tokens

    for _ in range(3):
        assert in_threads(failing, good, failing) == ["raised", greedy("llama", REPEATED, 40), "raised"]
    assert not found._rows
