"""Log-probabilities are the target's own, one entry per token, whatever was drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import METHODS, MIXED, ONE, params, plain
from test_cases_d import InPlace
from torch import Tensor

import outpace
from outpace import InputError, TokenLogprob
from outpace.testing import drafters
from outpace.testing.models import noisy_copy, scores, tiny_model

# In float64, so that 1e-5 is well above the rounding that weights of this size amplify.
CALM = tiny_model("llama", sharpness=2.0).double()
NOISY = noisy_copy(CALM)


def load(method: str, text: list[int], **options: Any) -> outpace.Engine:
    """The calm model with a way of drafting that is partly right."""
    ways: dict[str, dict[str, Any]] = {
        "none": {"drafter": "none"},
        "lookup": {"drafter": "lookup"},
        "noisy": {"draft_model": NOISY},
        "noisy trees": {"draft_model": NOISY, "width": 3},
        "random trees": {"drafter": drafters.random_trees(512, [text])},
        "oracle": {"drafter": drafters.oracle([text])},
    }
    return outpace.load(CALM, **ways[method], k=6, **options)


METHODS_HERE = ("none", "lookup", "noisy", "noisy trees", "random trees", "oracle")


def fresh_log_probs(tokens: list[int]) -> Tensor:
    """[new tokens, vocab]: of every new token after MIXED, from a fresh forward over the whole text."""
    return scores(CALM, [*MIXED, *tokens]).log_softmax(-1)[len(MIXED) - 1 : -1]


def assert_fresh(found: list[TokenLogprob] | None, tokens: list[int], count: int) -> None:
    """One entry per token, equal to the fresh forward's to 1e-5, with the likeliest alternatives in order."""
    assert found is not None and [entry.token for entry in found] == tokens
    for entry, row in zip(found, fresh_log_probs(tokens), strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-5)
        best = row.topk(count)
        assert len(entry.top) == count and entry.logprob < 0
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert [float(row[token]) for token, _ in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "typical"])
@pytest.mark.parametrize("method", METHODS_HERE)
def test_logprobs_are_those_of_a_fresh_forward(method: str, acceptance: Any) -> None:
    """T-F1: greedy and sampled, with and without drafts, under every acceptance rule, to 1e-5."""
    text = [*MIXED, *plain(CALM, MIXED, 24)]
    assert set(METHODS_HERE) <= set(METHODS)
    for temperature in (0.0, 1.0):
        found = load(method, text, acceptance=acceptance)
        result = found.generate(list(MIXED), params(24, temperature=temperature, seed=1, logprobs=3))
        assert_fresh(result.logprobs, result.tokens, 3)
        if temperature == 0:
            assert result.tokens == text[len(MIXED) :]


def test_logprobs_are_the_same_with_and_without_drafts() -> None:
    """T-F1: entry by entry, in a batch too."""
    text = [*MIXED, *plain(CALM, MIXED, 24)]
    wanted = load("none", text).generate(list(MIXED), params(24, logprobs=2)).logprobs
    assert wanted is not None
    for method in METHODS_HERE[1:]:
        result, _ = load(method, text).generate([list(MIXED), list(ONE)], params(24, logprobs=2))
        for ours, theirs in zip(result.logprobs, wanted, strict=True):
            assert ours.token == theirs.token and ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_a_stream_has_the_same_logprobs() -> None:
    """T-F2: with its last chunk, every token's own alternatives, none of them exactly 0."""
    text = [*MIXED, *plain(CALM, MIXED, 24)]
    found = load("random trees", text)
    *_, last = found.stream(list(MIXED), params(24, logprobs=3))
    assert last.result is not None
    assert last.result.logprobs == found.generate(list(MIXED), params(24, logprobs=3)).logprobs
    assert_fresh(last.result.logprobs, last.result.tokens, 3)


def test_logprobs_are_off_unless_asked_for() -> None:
    """T-F4: None when off; 0 gives each token's own and no alternatives; more than the vocabulary gives all of it."""
    found = load("noisy", [])
    assert found.generate(list(MIXED), params(6)).logprobs is None
    for entry in found.generate(list(MIXED), params(6, logprobs=0)).logprobs:
        assert entry.top == () and entry.logprob < 0
    assert all(len(entry.top) == 512 for entry in found.generate(list(MIXED), params(3, logprobs=600)).logprobs)
    with pytest.raises(InputError, match="logprobs"):
        params(6, logprobs=-1)


def test_a_text_that_ends_early_has_no_logprobs_behind_its_end() -> None:
    """T-F1: one entry per token, the end token included, for drafts that reached further."""
    tokens = plain(CALM, MIXED, 24)
    found = load("oracle", [*MIXED, *tokens])
    for acceptance in ("coupled", "rejection"):
        found = load("oracle", [*MIXED, *tokens], acceptance=acceptance)
        result = found.generate(list(MIXED), params(24, stop_token_ids=[tokens[4]], logprobs=1))
        assert_fresh(result.logprobs, tokens[: tokens.index(tokens[4]) + 1], 1)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_raw_when_a_processor_writes_into_its_scores(temperature: float, acceptance: Any) -> None:
    """T-F1: of the target's own scores, before penalties, temperature and processors."""
    tokens = plain(CALM, MIXED, 24)
    settings = params(16, temperature=temperature, seed=1, logprobs=3, logits_processors=[InPlace(tokens[2])])
    result = load("oracle", [*MIXED, *tokens], acceptance=acceptance).generate(list(MIXED), settings)
    assert tokens[2] not in result.tokens
    assert_fresh(result.logprobs, result.tokens, 3)


def test_logprobs_are_raw_under_penalties_and_temperature() -> None:
    """T-F1: as documented, the same numbers with every setting that changes what is sampled."""
    settings = params(16, temperature=0.7, top_p=0.8, repetition_penalty=1.5, logit_bias={5: 3.0}, seed=1, logprobs=3)
    result = load("noisy trees", []).generate(list(MIXED), settings)
    assert_fresh(result.logprobs, result.tokens, 3)
    assert torch.isfinite(fresh_log_probs(result.tokens)).all()
