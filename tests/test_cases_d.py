"""Logits processors see what they see in plain decoding: every committed token once, in order, with the exact text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from reference import (
    COPYING,
    DRAFTING,
    METHODS,
    MIXED,
    ONE,
    REPEATED,
    engine,
    first_seen_at,
    full_texts,
    greedy,
    model,
    noisy,
    params,
    plain,
    sure,
    with_ends,
)
from torch import Tensor
from transformers import MinLengthLogitsProcessor, NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor

import outpace
from outpace import InputError, SamplingParams
from outpace.testing import drafters
from outpace.testing.models import scores


def all_texts(settings: SamplingParams, prompt: Sequence[int] = MIXED, k: int = 6) -> list[int]:
    """The text under these settings, after a check that every method gives it and that drafting stayed on."""
    tokens = engine("llama", "none").generate(list(prompt), settings).tokens
    texts = [(*prompt, *tokens)]
    for method in METHODS:
        result = engine("llama", method, texts, k=k).generate(list(prompt), settings)
        assert result.tokens == tokens, method
        assert result.stats.num_draft_failures == 0
        if method in DRAFTING and method not in COPYING:
            assert result.stats.num_drafted_tokens > 0, method
    return tokens


def by_hand(prompt: Sequence[int], count: int, change: Callable[[list[int], Tensor], None]) -> list[int]:
    """Greedy decoding from fresh forwards, where `change` alters the scores in view of the new tokens so far."""
    new: list[int] = []
    for _ in range(count):
        row = scores(model("llama"), [*prompt, *new])[-1].clone()
        change(new, row)
        new.append(int(row.argmax()))
    return new


# --------------------------------------------------------------------------------------------------
# transformers' processors


@pytest.mark.parametrize("prompt", [MIXED, REPEATED, ONE], ids=["mixed", "repeated", "one"])
def test_the_repetition_penalty_is_that_of_transformers(prompt: tuple[int, ...]) -> None:
    """T-D1: over prompt and output, for every way of drafting."""
    tokens = all_texts(params(40, repetition_penalty=1.3), prompt)
    assert tokens == plain(model("llama"), prompt, 40, repetition_penalty=1.3)
    assert tokens != greedy("llama", prompt, 40) or prompt == ONE


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_a_forbidden_token_never_appears(family: str) -> None:
    """T-D2: a bias of -100 on the token that plain decoding emits most often, passed as a processor and by hand."""
    tokens = plain(model(family), REPEATED, 60)
    (often, count), *_ = Counter(tokens).most_common()
    assert count >= 3
    wanted = plain(model(family), REPEATED, 60, sequence_bias={(often,): -100.0})
    assert often not in wanted and wanted != tokens
    processor = SequenceBiasLogitsProcessor({(often,): -100.0})
    for drafter in ("lookup", sure(family), drafters.random_trees(512, [(*REPEATED, *wanted)])):
        found = outpace.load(model(family), drafter=drafter, k=6)
        assert found.generate(list(REPEATED), params(60, logits_processors=[processor])).tokens == wanted
        assert found.generate(list(REPEATED), params(60, logit_bias={often: -100.0})).tokens == wanted


def test_a_forbidden_word_of_two_tokens_never_appears() -> None:
    """T-D2: the second token is forbidden only behind the first, so the processor must see each draft's own text."""
    tokens = greedy("llama", MIXED, 40)
    words = [tokens[3:5], tokens[11:13], [tokens[7]]]
    wanted = plain(model("llama"), MIXED, 40, bad_words_ids=words)
    assert wanted[:4] == tokens[:4] and wanted[4] != tokens[4]
    processor = NoBadWordsLogitsProcessor(words, eos_token_id=None)
    assert all_texts(params(40, logits_processors=[processor])) == wanted


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_the_end_is_held_back_and_drafting_goes_on(acceptance: Any) -> None:
    """T-D7: min_new_tokens = 12 with an end token at index 3, as a setting and as transformers' processor by hand."""
    end = first_seen_at(greedy("llama", REPEATED, 40), 3)
    ended = with_ends(model("llama"), end)
    wanted = plain(ended, REPEATED, 40, min_new_tokens=12)
    assert len(wanted) >= 12 and end not in wanted[:12]
    by_hand = MinLengthLogitsProcessor(len(REPEATED) + 12, end, device="cpu")
    found = outpace.load(ended, drafter=sure("llama"), k=5, acceptance=acceptance)
    for settings in (params(40, min_new_tokens=12), params(40, logits_processors=[by_hand])):
        result = found.generate(list(REPEATED), settings)
        assert result.tokens == wanted
        assert result.stats.num_drafted_tokens > 0 and result.stats.num_accepted_tokens > 0


# --------------------------------------------------------------------------------------------------
# Our own settings


@pytest.mark.parametrize("presence", [-2.0, 0.5, 2.0])
@pytest.mark.parametrize("frequency", [-2.0, 0.5, 2.0])
def test_presence_and_frequency_penalties_are_those_of_openai(presence: float, frequency: float) -> None:
    """T-D3: score - presence - frequency * count for every token of the output, drafted or not, not of the prompt."""

    def penalised(new: list[int], row: Tensor) -> None:
        for token, count in Counter(new).items():
            row[token] -= presence + frequency * count

    settings = params(24, presence_penalty=presence, frequency_penalty=frequency)
    wanted = by_hand(REPEATED, 24, penalised)
    texts = [(*REPEATED, *wanted)]
    for method in ("none", "lookup", "noisy trees", "random trees"):
        assert engine("llama", method, texts, k=6).generate(list(REPEATED), settings).tokens == wanted, method


def test_penalties_change_this_text() -> None:
    """The guard of the test above: a penalty that changes nothing would prove nothing."""
    tokens = greedy("llama", REPEATED, 40)
    assert len(set(tokens)) < 40
    for name in ("presence_penalty", "frequency_penalty"):
        assert engine("llama", "none").generate(list(REPEATED), params(40, **{name: 2.0})).tokens != tokens


def test_a_bias_is_added_to_a_tokens_score() -> None:
    """T-D3: +100 is always chosen, -100 never, and small ones add up by hand; the same with drafts and without."""
    tokens = greedy("llama", MIXED, 40)
    assert all_texts(params(12, logit_bias={77: 100.0})) == [77] * 12
    without = all_texts(params(24, logit_bias={tokens[5]: -100.0, tokens[9]: -100.0}))
    assert not {tokens[5], tokens[9]} & set(without)
    bias = {token: 1.5 for token in range(0, 512, 3)}

    def biased(new: list[int], row: Tensor) -> None:
        row[list(bias)] += 1.5

    wanted = by_hand(MIXED, 24, biased)
    assert wanted != tokens[:24]
    assert all_texts(params(24, logit_bias=bias)) == wanted


# --------------------------------------------------------------------------------------------------
# Users' own processors


class Recorder:
    """Notes the text at every call, and leaves the scores alone."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1 and scores.dtype == torch.float32
        self.seen.append(input_ids[0].tolist())
        return scores


class Counting:
    """Stateful: what it does depends on how often it was called. The n-th token is multiplied, so to speak, by n."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.num_calls += 1
        return scores.roll(self.num_calls * 7, dims=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_a_processor_is_called_once_per_committed_token_with_the_exact_text(method: str, temperature: float) -> None:
    """T-D1: in order, for every drafter, whatever was drafted, accepted and refused, and in a batch."""
    settings = [params(20, temperature=temperature, seed=1, logits_processors=[Recorder()]) for _ in range(2)]
    prompts = (MIXED, ONE)
    found = engine("llama", method, full_texts("llama", prompts, 40), k=6)
    results = found.generate([list(prompt) for prompt in prompts], settings)
    for prompt, one, result in zip(prompts, settings, results, strict=True):
        text = [*prompt, *result.tokens]
        (recorder,) = one.logits_processors
        assert isinstance(recorder, Recorder)
        assert recorder.seen == [text[: len(prompt) + index] for index in range(20)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stateful_processor_gives_the_same_text_with_drafts(temperature: float) -> None:
    """T-D1: a fresh one per request, as its owner would use it in plain decoding."""
    texts: list[list[int]] = []
    for method in METHODS:
        settings = params(24, temperature=temperature, seed=2, logits_processors=[Counting()])
        texts.append(
            engine("llama", method, [(*MIXED, *texts[0])] if texts else [], k=6).generate(list(MIXED), settings).tokens
        )
    assert all(text == texts[0] for text in texts) and len(set(texts[0])) >= 5


class InPlace:
    """Forbids a token by writing into the scores it was given, as many processors do."""

    is_prefix_pure = True

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self.token] = -torch.inf
        return scores


def test_a_processor_may_write_into_its_scores() -> None:
    """T-D2: the text is that of a processor which copies them first."""
    token = greedy("llama", MIXED, 40)[5]
    wanted = plain(model("llama"), MIXED, 40, suppress_tokens=[token])
    assert all_texts(params(40, logits_processors=[InPlace(token)])) == wanted


def test_the_ratio_test_refuses_a_processor_that_may_have_a_state() -> None:
    """T-D1: by its name, before the first token; greedy decoding and pure processors go through."""
    found = outpace.load(model("llama"), draft_model=noisy("llama"), acceptance="rejection")
    recorder = Recorder()
    with pytest.raises(InputError, match="Recorder is not known to be a pure function of the text"):
        found.generate(list(MIXED), params(8, temperature=1.0, logits_processors=[recorder]))
    assert recorder.seen == []
    found.generate(list(MIXED), params(8, logits_processors=[recorder]))
    assert len(recorder.seen) == 8
    result = found.generate(list(MIXED), params(8, temperature=1.0, seed=1, logits_processors=[InPlace(3)]))
    assert len(result.tokens) == 8


class Failing:
    """Raises at its tenth call."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.error = KeyError("the tenth call")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 10:
            raise self.error
        return scores


@pytest.mark.parametrize("method", ["none", "sure", "noisy trees", "random trees"])
def test_a_processors_exception_reaches_the_caller_once(method: str) -> None:
    """T-D9: that very exception; no row stays behind, and the engine is usable afterwards."""
    found = engine("llama", method, full_texts("llama", (MIXED,), 40), k=6)
    failing = Failing()
    with pytest.raises(KeyError) as caught:
        found.generate(list(MIXED), params(40, logits_processors=[failing]))
    assert caught.value is failing.error and failing.num_calls == 10
    assert not found._rows and not found._cache.lengths
    assert found.generate(list(MIXED), params(40)).tokens == greedy("llama", MIXED, 40)


def test_a_processors_exception_ends_its_own_row_only() -> None:
    """T-D9: rows beside it go on to their text; in a stream the exception comes out of the iterator."""
    found = engine("llama", "random trees", full_texts("llama", (MIXED, ONE), 40), k=6)
    failing = Failing()
    bad = found.submit(list(MIXED), params(40, logits_processors=[failing]))
    good = found.submit(list(ONE), params(40))
    while not good.is_finished:
        found.step()
    assert bad.error is failing.error and bad.row is None and bad.new_tokens == greedy("llama", MIXED, 40)[:9]
    assert good.new_tokens == greedy("llama", ONE, 40)
    with pytest.raises(KeyError):
        list(found.stream(list(MIXED), params(40, logits_processors=[Failing()])))
    assert not found._rows
