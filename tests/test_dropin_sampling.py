"""Sampled text: the processors are transformers' own, the choice is made by the seed, and drafts change nothing.

There is no token of transformers' to compare with: its noise is another. So the text is compared with its definition,
computed here without any engine, and its law with the exact one.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from dropin_reference import ENTRIES, IS_NEW, PAD, PLAIN, assert_mixed, batch, call, calm, calm_noisy, fast, plain
from reference import MIXED, ONE, REPEATED, greedy, model
from test_cases_b import PROMPT, law, p_value, small
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    set_seed,
)

import outpace
from outpace import Accelerated, SamplingParams
from outpace.noise import choose
from outpace.testing import drafters
from outpace.testing.models import scores, with_noise

PROMPTS = (MIXED, REPEATED, ONE)
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 16, "pad_token_id": PAD}


@cache
def drafting(name: str) -> Accelerated:
    """The calm model with a way of drafting; the number in a name is k."""
    kind, _, k = name.partition(" ")
    ways: dict[str, dict[str, Any]] = {
        "none": {"drafter": "none"},
        "suffix": {"drafter": "suffix"},
        "lookup": {"drafter": "lookup"},
        "chain": {"drafter": calm_noisy(), "confidence_threshold": 0.0},
        "tree": {"drafter": calm_noisy(), "width": 3},
        "random": {"drafter": drafters.random_trees(512)},
    }
    return outpace.accelerate(calm(), **ways[kind], k=int(k or 6))


DRAFTING = ("none", "suffix", "lookup", "chain 1", "chain 5", "chain 16", "tree 6", "tree 12", "random 6")

# Arguments, and the processors that transformers makes of them, in its order.
WARPERS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "nothing": ({}, []),
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "top_k": ({"top_k": 5}, [TopKLogitsWarper(5)]),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "top_h": ({"top_h": 0.4}, [TopHLogitsWarper(0.4)]),
    "min_p": ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    "typical_p": ({"typical_p": 0.7}, [TypicalLogitsWarper(0.7)]),
    "epsilon_cutoff": ({"epsilon_cutoff": 0.01}, [EpsilonLogitsWarper(0.01)]),
    "eta_cutoff": ({"eta_cutoff": 0.02}, [EtaLogitsWarper(0.02)]),
    "renormalize_logits": (
        {"renormalize_logits": True, "temperature": 1.3},
        [TemperatureLogitsWarper(1.3), LogitNormalization()],
    ),
    "as in a chat": (
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        [TemperatureLogitsWarper(0.8), TopKLogitsWarper(40), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)],
    ),
    "penalties": (
        {"bad_words_ids": [[3]], "temperature": 1.2, "top_p": 0.95, "typical_p": 0.9, "renormalize_logits": True},
        [
            NoBadWordsLogitsProcessor([[3]]),
            TemperatureLogitsWarper(1.2),
            TopPLogitsWarper(0.95),
            TypicalLogitsWarper(0.9),
            LogitNormalization(),
        ],
    ),
}
_TRUNCATING = {"top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "as in a chat"}


def by_definition(prompt: Sequence[int], count: int, seed: int, processors: Sequence[Any] = ()) -> list[int]:
    """The new tokens of a seed: argmax of processed log p + noise at the token's place in its own text."""
    text = list(prompt)
    for _ in range(count):
        row = LogitsProcessorList(processors)(torch.tensor([text]), scores(calm(), text)[-1:])[0]
        text.append(choose(row.log_softmax(-1), None, seed, len(text)))
    return text[len(prompt) :]


# --------------------------------------------------------------------------------------------------
# Processors


@pytest.mark.parametrize("name", WARPERS)
def test_a_sampled_token_is_chosen_from_scores_that_transformers_processors_give(name: str) -> None:
    """T-B7, T-F1: recorded logits, processed by hand, are the recorded scores; scores and seed give the token."""
    arguments, processors = WARPERS[name]
    inputs = batch(*PROMPTS)
    length = inputs["input_ids"].shape[1]
    records = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "seed": 11}
    seen = []
    for way, entry in zip(("chain 5", "tree 6"), ENTRIES, strict=True):
        found = call(entry, drafting(way), **inputs, **(SAMPLED | arguments), **records)
        assert len(found.scores) == len(found.logits) == 16
        for step, (logits, given) in enumerate(zip(found.logits, found.scores, strict=True)):
            text = found.sequences[:, : length + step]
            for row, prompt in enumerate(PROMPTS):
                own = text[row : row + 1, length - len(prompt) :]
                wanted = LogitsProcessorList(processors)(own, logits[row : row + 1].clone())[0]
                torch.testing.assert_close(given[row], wanted, rtol=0, atol=1e-5)
                token = choose(given[row].log_softmax(-1), None, 11, own.shape[1])
                assert token == int(found.sequences[row, length + step])
        seen.append(found.sequences.tolist())
        assert_mixed(drafting(way).last_stats)
    assert seen[0] == seen[1] and len(set(found.sequences[:, length:].flatten().tolist())) >= 5
    num_kept = [int(step.isfinite().sum(-1).max()) for step in found.scores]
    assert (min(num_kept) < 512 * 0.9) == (name in _TRUNCATING or name == "penalties")


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_repetition_penalty_looks_at_the_text_and_not_at_the_padding(entry: str) -> None:
    """T-D1: greedy and sampled, where the pad token is one that the padded row would write."""
    target, penalty = model("llama"), {"repetition_penalty": 5.0}
    pad = greedy("llama", ONE, 40)[0]
    inputs = batch(MIXED, ONE, pad=pad)
    wanted = plain(target, inputs, penalty)
    blind = plain(target, inputs, {"logits_processor": [RepetitionPenaltyLogitsProcessor(5.0)]})
    skips_padding = blind.tolist() != wanted.tolist()  # older versions do not
    assert skips_padding or not IS_NEW
    for way in ("suffix", "chain", "tree"):
        assert call(entry, fast(target, way), **inputs, **PLAIN, **penalty).tolist() == wanted.tolist()
    if not skips_padding:
        return
    inputs, seen = batch(*PROMPTS, pad=by_definition(ONE, 1, 4)[0]), [RepetitionPenaltyLogitsProcessor(1.8)]
    texts = [by_definition(prompt, 16, 4, seen) for prompt in PROMPTS]
    for way in ("chain 5", "tree 6"):
        found = call(entry, drafting(way), **inputs, **SAMPLED, repetition_penalty=1.8, seed=4)
        assert found[:, -16:].tolist() == texts


# --------------------------------------------------------------------------------------------------
# Seeds


@pytest.mark.parametrize("name", ["nothing", "as in a chat", "penalties"])
def test_the_text_of_a_seed_is_the_same_for_every_drafter_batch_and_padding(name: str) -> None:
    """T-B7: by the definition, alone and in batches of any order and padding, for every k."""
    arguments, processors = WARPERS[name]
    wanted = {prompt: by_definition(prompt, 16, 5, processors) for prompt in PROMPTS}
    assert all(len(set(tokens)) >= 5 for tokens in wanted.values())
    stats = []
    for index, way in enumerate(DRAFTING):
        others = (PROMPTS[::-1], (ONE,), (MIXED,), (MIXED, ONE), (ONE, ONE, ONE))[index % 5]
        for prompts in (PROMPTS, others):
            entry = ENTRIES[(index + len(prompts)) % 2]
            found = call(entry, drafting(way), **batch(*prompts), **(SAMPLED | arguments), seed=5)
            assert found[:, -16:].tolist() == [wanted[prompt] for prompt in prompts], (way, prompts)
            stats += drafting(way).last_stats if "none" not in way else ()
    assert_mixed(stats)


@pytest.mark.parametrize("entry", ENTRIES)
def test_several_texts_of_a_prompt_have_the_seeds_that_follow(entry: str) -> None:
    """T-B7, T-B11: seed=7 with num_return_sequences=3 gives the texts of the seeds 7, 8 and 9, prompt by prompt."""
    arguments = SAMPLED | {"temperature": 0.9}
    alone = {
        prompt: [by_definition(prompt, 16, seed, [TemperatureLogitsWarper(0.9)]) for seed in (7, 8, 9)]
        for prompt in (MIXED, ONE)
    }
    assert len({tuple(tokens) for texts in alone.values() for tokens in texts}) == 6
    for way in ("suffix", "chain 5", "tree 6"):
        found = call(entry, drafting(way), **batch(MIXED), **arguments, num_return_sequences=3, seed=7)
        assert found.shape == (3, len(MIXED) + 16) and found[:, -16:].tolist() == alone[MIXED]
        found = call(entry, drafting(way), **batch(MIXED, ONE), **arguments, num_return_sequences=3, seed=7)
        assert found[:, -16:].tolist() == [*alone[MIXED], *alone[ONE]]
        found = call(entry, drafting(way), **batch(MIXED, ONE), **arguments, seed=[9, 8])
        assert found[:, -16:].tolist() == [alone[MIXED][2], alone[ONE][1]]
        many = call(entry, drafting(way), **batch(ONE), **arguments, num_return_sequences=2, seed=[8, 7])
        assert many[:, -16:].tolist() == [alone[ONE][1], alone[ONE][0]]


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_seed_repeats_its_text_and_other_seeds_give_others(entry: str) -> None:
    """T-B7: the same seed twice is equal; ten seeds give at least eight texts."""
    accelerated, inputs = drafting("tree 6"), batch(MIXED)
    texts = [tuple(call(entry, accelerated, **inputs, **SAMPLED, seed=seed)[0].tolist()) for seed in (*range(10), 0)]
    assert texts[0] == texts[10] and len(set(texts)) >= 8


@pytest.mark.parametrize("entry", ENTRIES)
def test_torchs_seed_repeats_texts_that_have_no_seed_of_their_own(entry: str) -> None:
    """T-B7: torch.manual_seed and transformers' set_seed; without them each call and each row draws its own."""
    accelerated, inputs = drafting("chain 5"), batch(MIXED, MIXED)

    def texts() -> list[list[int]]:
        found = call(entry, accelerated, **inputs, **SAMPLED, num_return_sequences=2)
        rows: list[list[int]] = found.tolist()
        return rows

    for seeded in (torch.manual_seed, set_seed):
        seeded(3)
        first, second = texts(), texts()
        seeded(3)
        assert texts() == first and texts() == second and first != second
        assert len({tuple(row) for row in (*first, *second)}) == 8
        seeded(4)
        assert texts() != first


@pytest.mark.parametrize("entry", ENTRIES)
def test_only_sampling_without_a_seed_asks_torchs_generator(entry: str) -> None:
    """T-B7: greedy text and text of a given seed leave every generator where it was."""

    def generators() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    inputs, before = batch(MIXED, ONE), generators()
    for way in ("suffix", "chain 5", "tree 6"):
        call(entry, drafting(way), **inputs, **(SAMPLED | {"do_sample": False, "top_k": None}))
        call(entry, drafting(way), **inputs, **SAMPLED, seed=1)
        assert generators() == before
    call(entry, drafting("suffix"), **inputs, **SAMPLED)
    assert generators()[0] != before[0] and generators()[1:] == before[1:]


def test_sampling_may_be_a_default_of_the_model() -> None:
    """With its temperature and truncation, as most chat models have them."""
    target = copy.copy(calm())
    target.generation_config = GenerationConfig(do_sample=True, temperature=0.8, top_k=40, top_p=0.9, min_p=0.02)
    accelerated = outpace.accelerate(target, drafter=calm_noisy(), k=5)
    wanted = by_definition(MIXED, 16, 2, WARPERS["as in a chat"][1])
    assert accelerated.generate(**batch(MIXED), max_new_tokens=16, seed=2)[0, -16:].tolist() == wanted
    greedy_text = calm().generate(**batch(MIXED), max_new_tokens=16, do_sample=False).tolist()
    found = accelerated.generate(**batch(MIXED), max_new_tokens=16, do_sample=False, temperature=None, top_k=None)
    assert found.tolist() == greedy_text


# --------------------------------------------------------------------------------------------------
# Temperatures


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_temperature_of_zero_is_the_error_that_transformers_has_for_it(entry: str) -> None:
    """T-B8: before the first token; and next to zero the text is greedy, without a warning."""
    inputs = batch(MIXED)
    with pytest.raises(ValueError) as theirs:
        model("llama").generate(**inputs, **SAMPLED, temperature=0.0)
    for way in ("suffix", "chain", "tree"):
        with pytest.raises(ValueError) as ours:
            call(entry, fast(model("llama"), way), **inputs, **SAMPLED, temperature=0.0, seed=1)
        assert str(ours.value) == str(theirs.value)
        for temperature in (1e-6, 1e-20):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = call(entry, fast(model("llama"), way), **inputs, **SAMPLED, temperature=temperature, seed=1)
            assert found[0, -16:].tolist() == greedy("llama", MIXED, 40)[:16]


# --------------------------------------------------------------------------------------------------
# Goodness of fit


@pytest.mark.parametrize(
    ("entry", "is_seeded", "options", "arguments"),
    [
        ("fast.generate", True, {"k": 3}, {}),
        ("custom_generate", False, {"k": 6, "width": 3}, {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.3}),
    ],
    ids=["plain", "warped"],
)
def test_several_texts_of_a_prompt_follow_the_models_law(
    entry: str, is_seeded: bool, options: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """T-B1, T-B11: 4,000 return sequences of one prompt; the joint of their first two tokens has p > 1e-4."""
    settings = SamplingParams(**({"temperature": 1.0} | arguments), max_new_tokens=3)
    accelerated = outpace.accelerate(small(), drafter=with_noise(small(), 0.4), confidence_threshold=0.0, **options)
    ids = torch.tensor([PROMPT])
    torch.manual_seed(1)
    samples: list[tuple[int, ...]] = []
    accepted = rejected = 0
    for start in range(0, 4000, 500):
        seed = {"seed": start} if is_seeded else {}
        base = {"do_sample": True, "top_k": 0, "max_new_tokens": 3, "num_return_sequences": 500}
        found: Tensor = call(entry, accelerated, ids, **(base | arguments), **seed)
        assert found.shape == (500, len(PROMPT) + 3) and bool((found[:, : len(PROMPT)] == ids).all())
        samples += [(first, second) for first, second, _ in found[:, len(PROMPT) :].tolist()]
        accepted += sum(stats.num_accepted_tokens for stats in accelerated.last_stats)
        rejected += sum(stats.num_rejected_tokens for stats in accelerated.last_stats)
    assert p_value(samples, law(small(), settings, 2)) > 1e-4
    assert len(samples) == 4000 and accepted >= 1500 and rejected >= 1500
    others = SamplingParams(temperature=1.25, max_new_tokens=3)
    assert p_value(samples, law(small(), others, 2)) < 1e-6  # the guard: another law would be noticed
