"""Sampled text follows the target's own law, and under coupled acceptance it is the plain text of the same seed.

The exact laws are computed with transformers' own logits processors and warpers. 4,000 samples and a threshold of
1e-4 catch every wrong acceptance rule that is known; the seeds are fixed, so a right build does not fail by chance.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from reference import DRAFTING, METHODS, MIXED, ONE, REPEATED, engine, greedy, model, noisy, params
from scipy.stats import chi2_contingency, chisquare
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import outpace
from outpace import InputError, SamplingParams
from outpace.drafters.base import Budget
from outpace.drafters.model import ModelDrafter
from outpace.noise import choose
from outpace.session import Session
from outpace.target import Target
from outpace.testing import drafters
from outpace.testing.models import scores, tiny_model, with_noise
from outpace.tree import TokenTree

# --------------------------------------------------------------------------------------------------
# Goodness of fit

VOCAB, PROMPT, NUM_SAMPLES = 8, (1, 2, 3, 1, 2), 4000
_TINY = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


@cache
def small(seed: int = 0) -> Any:
    """One layer and eight tokens: every text of three tokens has a probability that can be counted."""
    return tiny_model("llama", seed, vocab=VOCAB, sharpness=1.5, intermediate_size=32, **_TINY)


def processors_of(settings: SamplingParams) -> LogitsProcessorList:
    """transformers' own, in the order of its `generate`."""
    found: list[Any] = []
    if settings.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.temperature != 1:
        found.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        found.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        found.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        found.append(MinPLogitsWarper(settings.min_p))
    return LogitsProcessorList(found)


def law(target: Any, settings: SamplingParams, length: int) -> Tensor:
    """[vocab, …, vocab] float64, `length` times: the probability of every beginning of the text."""
    processors = processors_of(settings)
    prefixes = torch.tensor([PROMPT])
    probs = torch.ones(1, dtype=torch.float64)
    for _ in range(length):
        with torch.no_grad():
            logits = target(input_ids=prefixes, attention_mask=torch.ones_like(prefixes), use_cache=False).logits[:, -1]
        step = processors(prefixes, logits).double().softmax(-1)
        probs = (probs[:, None] * step).flatten()
        following = torch.arange(VOCAB).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(VOCAB, 0), following], 1)
    return probs.reshape([VOCAB] * length)


def p_value(samples: Sequence[tuple[int, ...]], probs: Tensor) -> float:
    """Of a chi-square test; cells with fewer than five expected samples are pooled."""
    expected = probs.flatten() * len(samples)
    cells = list(itertools.product(range(VOCAB), repeat=probs.dim()))
    counts = Counter(samples)
    found = torch.tensor([counts[cell] for cell in cells], dtype=torch.float64)
    assert float(found[expected == 0].sum()) == 0, "a text that plain sampling cannot give"
    large = expected >= 5
    pooled = [torch.cat([part[large], part[~large].sum()[None]]) for part in (found, expected)]
    keep = pooled[1] > 0
    return float(chisquare(pooled[0][keep].numpy(), pooled[1][keep].numpy()).pvalue)


def run(found: outpace.Engine, settings: SamplingParams, count: int = NUM_SAMPLES) -> list[outpace.Result]:
    """Requests with the seeds 0, 1, 2, …, 500 rows at a time."""
    results: list[outpace.Result] = []
    for start in range(0, count, 500):
        seeded = [_with_seed(settings, seed) for seed in range(start, start + 500)]
        results += found.generate([list(PROMPT)] * 500, seeded)
    return results


def _with_seed(settings: SamplingParams, seed: int) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
    return SamplingParams(seed=seed, **{name: getattr(settings, name) for name in names})


def assert_law(results: Sequence[outpace.Result], target: Any, settings: SamplingParams) -> None:
    """The joint law of the first two tokens, and that of the second and third where there are so many."""
    length = min(3, settings.max_new_tokens)
    probs = law(target, settings, length)
    first = probs.sum(2) if length == 3 else probs
    assert p_value([tuple(result.tokens[:2]) for result in results], first) > 1e-4
    if length == 3:
        assert p_value([tuple(result.tokens[1:3]) for result in results], probs.sum(0)) > 1e-4
    assert len(results) >= 2000
    assert all(result.stats.num_draft_failures == 0 for result in results)


def guard_drafts(results: Sequence[outpace.Result], accepted: float) -> None:
    """The guard: at least this many drafts per request were accepted, and half a draft was refused."""
    assert sum(result.stats.num_accepted_tokens for result in results) >= accepted * len(results)
    assert sum(result.stats.num_rejected_tokens for result in results) >= 0.5 * len(results)


@pytest.mark.parametrize(("width", "k", "count"), [(1, 3, 4), (3, 6, 3)])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_samples_follow_the_targets_law_with_a_noisy_draft_model(
    acceptance: Any, width: int, k: int, count: int
) -> None:
    """T-B1: temperature 1, chains of three and trees of three branches, all of it in the first round; p > 1e-4."""
    found = outpace.load(small(), draft_model=with_noise(small(), 0.4), k=k, width=width, acceptance=acceptance)
    settings = params(count, temperature=1.0)
    results = run(found, settings)
    assert_law(results, small(), settings)
    guard_drafts(results, accepted=0.5)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_samples_follow_the_targets_law_with_an_unrelated_draft_model(acceptance: Any, width: int) -> None:
    """T-B4: K = 1 (or one level of three), other weights, so that most drafts are refused; p > 1e-4."""
    found = outpace.load(small(), draft_model=small(seed=5), k=width, width=width, acceptance=acceptance)
    settings = params(2, temperature=1.0)
    results = run(found, settings)
    assert_law(results, small(), settings)
    guard_drafts(results, accepted=0.05)


def test_samples_follow_the_law_of_penalties_and_truncation() -> None:
    """T-B1: the ratio test with a repetition penalty, a temperature, top-k and top-p, in transformers' order."""
    settings = params(3, temperature=0.8, top_k=6, top_p=0.9, repetition_penalty=1.3)
    found = outpace.load(small(), draft_model=with_noise(small(), 0.2), k=2, acceptance="rejection")
    results = run(found, settings, 2000)
    assert_law(results, small(), settings)
    guard_drafts(results, accepted=0.3)


def test_samples_follow_the_targets_law_with_trees_that_are_drafted_without_chance() -> None:
    """T-B1: under the ratio test a drafter without a distribution is exact too; branches and duplicates included."""
    trees = drafters.random_trees(VOCAB, num_nodes=5)
    found = outpace.load(small(), drafter=trees, k=5, acceptance="rejection")
    settings = params(3, temperature=1.0)
    results = run(found, settings, 2000)
    assert_law(results, small(), settings)
    guard_drafts(results, accepted=0.1)


class Noting(ModelDrafter):
    """Keeps the trees that it drafted."""

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> Sequence[TokenTree]:
        self.trees = list(super().propose(sessions, budgets))
        return self.trees


def test_drafts_in_different_branches_are_independent_under_the_ratio_test() -> None:
    """T-B1: what follows one sibling says nothing of what follows the other, which the rule relies on; p > 1e-4."""
    draft = small()
    indifferent = tiny_model("llama", vocab=VOCAB, sharpness=1.5, intermediate_size=32, **_TINY)
    with torch.no_grad():  # every token is the same to it, so both branches draw from one distribution
        indifferent.get_input_embeddings().weight[:] = 1.0
    drafter = Noting(Target(indifferent), VOCAB, VOCAB, width=2, confidence_threshold=0.0)
    found = outpace.load(draft, drafter=drafter, k=4, acceptance="rejection")
    sessions = [found.submit(list(PROMPT), params(3, temperature=1.0, seed=seed)) for seed in range(1500)]
    found.step()
    assert len(drafter.trees) == len(sessions) and {tree.parents for tree in drafter.trees} == {(-1, 0, 0, 1, 2)}
    table = torch.zeros(VOCAB, VOCAB)
    for tree in drafter.trees:
        table[tree.tokens[3], tree.tokens[4]] += 1
    common = table.sum(1).topk(4).indices
    assert float(chi2_contingency(table[common][:, common].numpy()).pvalue) > 1e-4


def test_a_wrong_law_is_found_with_so_many_samples() -> None:
    """The test's own guard: samples of the draft model are not taken for the target's, nor are lossy ones."""
    settings = params(4, temperature=1.0)
    probs = law(small(), settings, 2)
    draft = with_noise(small(), 0.4)
    plain = run(outpace.load(draft, drafter="none"), settings, 1000)
    assert p_value([tuple(result.tokens[:2]) for result in plain], probs) < 1e-8
    lossy = run(outpace.load(small(), draft_model=draft, k=3, acceptance="typical"), settings, 1000)
    assert p_value([tuple(result.tokens[:2]) for result in lossy], probs) < 1e-8
    assert not lossy[0].stats.is_lossless and "not lossless" in lossy[0].stats.notes[0]


# --------------------------------------------------------------------------------------------------
# Seeds


def sampled(target: Any, prompt: Sequence[int], settings: SamplingParams) -> list[int]:
    """The text of a seed by the definition: argmax of log p + noise, with transformers' own warpers."""
    processors = processors_of(settings)
    text = list(prompt)
    assert settings.seed is not None
    for _ in range(settings.max_new_tokens):
        warped = processors(torch.tensor([text]), scores(target, text)[-1:])[0]
        text.append(choose(warped.log_softmax(-1), None, settings.seed, len(text)))
    return text[len(prompt) :]


SETTINGS = [
    params(20, temperature=1.0, seed=3),
    params(20, temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.2, seed=11),
    params(20, temperature=1.5, min_p=0.02, seed=2**40 + 7),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "truncated", "hot"])
def test_the_text_of_a_seed_is_the_same_for_every_way_of_drafting(settings: SamplingParams) -> None:
    """T-B7: every drafter and K = 1, 5, 16 give the text that the definition gives without any engine."""
    prompts = (MIXED, REPEATED)
    wanted = [sampled(model("llama"), prompt, settings) for prompt in prompts]
    assert all(len(set(tokens)) >= 5 for tokens in wanted)
    texts = [(*prompt, *tokens) for prompt, tokens in zip(prompts, wanted, strict=True)]
    accepted = rejected = 0
    for method in METHODS:
        for k in (1, 5, 16) if settings is SETTINGS[0] else (5,):
            results = engine("llama", method, texts, k=k).generate([list(prompt) for prompt in prompts], settings)
            assert [result.tokens for result in results] == wanted, (method, k)
            assert all(result.seed == settings.seed and result.stats.num_draft_failures == 0 for result in results)
            accepted += sum(result.stats.num_accepted_tokens for result in results)
            rejected += sum(result.stats.num_rejected_tokens for result in results)
    assert accepted >= 100 and rejected >= 100


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "bloom", "qwen3_next"])
def test_the_text_of_a_seed_is_the_same_for_every_kind_of_model(family: str) -> None:
    """T-B7: for windows, sinks, alibi and recurrent states; drafts of a noisy model, partly right."""
    settings = params(24, temperature=1.0, seed=5)
    found = outpace.load(model(family), draft_model=noisy(family), k=5).generate(list(MIXED), settings)
    assert found.tokens == sampled(model(family), MIXED, settings)
    assert found.stats.num_accepted_tokens >= 3 and found.stats.num_rejected_tokens >= 3


def test_the_text_of_a_seed_does_not_depend_on_the_other_rows() -> None:
    """T-B7: alone, in a batch, and in a batch in another order."""
    prompts = [list(ONE), list(MIXED), list(REPEATED), list(MIXED)]
    settings = [params(20, temperature=1.0, seed=seed) for seed in (4, 4, 4, 5)]
    found = engine("llama", "noisy trees", k=6)
    alone = [found.generate(prompt, one).tokens for prompt, one in zip(prompts, settings, strict=True)]
    assert [result.tokens for result in found.generate(prompts, settings)] == alone
    assert [result.tokens for result in found.generate(prompts[::-1], settings[::-1])] == alone[::-1]
    assert alone[1] != alone[3]


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "typical"])
def test_a_seed_repeats_its_text_and_other_seeds_give_others(acceptance: Any) -> None:
    """T-B7: the same seed twice is equal, ten seeds give at least eight texts, and a drawn seed is reported."""
    found = engine("llama", "noisy", k=5, acceptance=acceptance)
    texts = [tuple(found.generate(list(MIXED), params(16, temperature=1.0, seed=s)).tokens) for s in (*range(10), 0)]
    assert texts[0] == texts[10] and len(set(texts)) >= 8
    free = found.generate(list(MIXED), params(16, temperature=1.0))
    assert found.generate(list(MIXED), params(16, temperature=1.0, seed=free.seed)).tokens == free.tokens


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**70])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    """T-B7: however large, as the definition has it, and under the ratio test too."""
    settings = params(8, temperature=1.0, seed=seed)
    assert engine("llama", "noisy", k=4).generate(list(MIXED), settings).tokens == sampled(
        model("llama"), MIXED, settings
    )
    assert engine("llama", "noisy", k=4, acceptance="rejection").generate(list(MIXED), settings).seed == seed


# --------------------------------------------------------------------------------------------------
# Temperatures


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "typical"])
@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 1e-30])
def test_temperature_zero_and_next_to_zero_are_greedy(temperature: float, acceptance: Any) -> None:
    """T-B8: no division by zero, no NaN, no warning, and no draft that breaks its contract."""
    for method in ("none", "noisy", "noisy trees", "lookup"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = engine("llama", method, k=5, acceptance=acceptance)
            result = found.generate(list(MIXED), params(24, temperature=temperature, seed=1))
        assert result.tokens == greedy("llama", MIXED, 24), method
        assert result.stats.num_draft_failures == 0


@pytest.mark.parametrize("temperature", [-1.0, 5e-324, float("nan"), float("inf"), "1", None, True])
def test_a_temperature_that_is_none_is_refused(temperature: Any) -> None:
    """T-B8: before the first token, with its name and what is wanted, in one line."""
    with pytest.raises(InputError, match="temperature must be a number") as error:
        params(4, temperature=temperature)
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------
# Several texts for one prompt


def test_copies_of_a_prompt_are_independent_samples() -> None:
    """T-B11: four rows with four seeds are the four texts of these seeds; without seeds each row draws its own."""
    found = engine("llama", "noisy trees", k=6)
    settings = [params(16, temperature=1.0, seed=seed) for seed in range(4)]
    rows = [result.tokens for result in found.generate([list(MIXED)] * 4, settings)]
    assert rows == [sampled(model("llama"), MIXED, one) for one in settings]
    free = found.generate([list(MIXED)] * 4, params(16, temperature=1.0))
    assert len({result.seed for result in free}) == 4
    assert len({tuple(result.tokens) for result in free}) >= 3
    assert len(DRAFTING) > 5
