"""Rows of a batch: each has its solo text, ends by itself, is padded as in transformers, and is counted by itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from dropin_reference import (
    ENTRIES,
    EVERY_WAY,
    PAD,
    PLAIN,
    WAYS,
    Passes,
    assert_mixed,
    assert_same,
    batch,
    call,
    fast,
    knowing,
    plain,
)
from reference import METHODS, MIXED, ONE, REPEATED, first_seen_at, greedy, itself, model
from test_cases_k import assert_counts_add_up

import outpace
from outpace import Accelerated, Stats
from outpace.testing import drafters
from outpace.testing.models import tiny_model

LENGTHS = (MIXED[:5], REPEATED[:17], MIXED)


def method(name: str, sequences: torch.Tensor, family: str = "llama", **options: Any) -> Accelerated:
    """One of METHODS. sequences: [rows, length] the padded texts that will come, for drafters that know them."""
    texts = [tuple(token for token in row if token != PAD) for row in sequences.tolist()]
    return outpace.accelerate(model(family), **METHODS[name](family, texts), **options)


@cache
def sure(k: int) -> Accelerated:
    """The model as its own draft, which goes on however unsure it is."""
    return outpace.accelerate(model("llama"), drafter=itself("llama"), confidence_threshold=0.0, k=k)


# --------------------------------------------------------------------------------------------------
# Rows and their solo runs


@pytest.mark.parametrize("name", METHODS)
def test_a_row_of_a_batch_is_what_it_is_alone(name: str) -> None:
    """T-I1: prompts of 5, 17 and 30 tokens with left padding; the batch is transformers' batch, a row its solo run."""
    inputs = batch(*LENGTHS)
    wanted = plain(model("llama"), inputs, {})
    accelerated = method(name, wanted, k=6)
    for entry in ENTRIES:
        assert call(entry, accelerated, **inputs, **PLAIN).tolist() == wanted.tolist()
    if name in ("noisy", "noisy trees", "random trees"):
        assert_mixed(accelerated.last_stats)
    for row, prompt in enumerate(LENGTHS):
        alone = call(ENTRIES[row % 2], accelerated, **batch(prompt), **PLAIN)
        assert alone[0, -24:].tolist() == wanted[row, -24:].tolist()
        assert alone.tolist() == plain(model("llama"), batch(prompt), {}).tolist()


@pytest.mark.parametrize("family", ["mistral", "gpt2", "gemma3"])
def test_padded_batches_of_other_families_are_those_of_transformers(family: str) -> None:
    """T-I1: a sliding window, learned positions, and both kinds of layer; also with a processor over all rows."""
    inputs = batch(*LENGTHS, ONE)
    stats = assert_same(model(family), inputs, {}, family=family)
    stats += assert_same(model(family), inputs, {"encoder_repetition_penalty": 1.3}, family=family)
    assert_mixed(stats)


def test_many_rows_of_many_lengths_are_those_of_transformers() -> None:
    """T-I1: forty rows, far more than any buffer starts with."""
    numbers = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 490, (1 + size % 23,), generator=numbers).tolist() for size in range(40)]
    wanted = plain(model("mistral"), batch(*prompts), {"max_new_tokens": 12})
    accelerated = knowing(model("mistral"), wanted)
    for entry in ENTRIES:
        found = call(entry, accelerated, **batch(*prompts), **(PLAIN | {"max_new_tokens": 12}))
        assert found.tolist() == wanted.tolist()
    assert_mixed(accelerated.last_stats)


# --------------------------------------------------------------------------------------------------
# Ends

SIX = (MIXED, ONE, REPEATED, MIXED[:5], REPEATED[:17], MIXED[:12])


def six_ends() -> list[int]:
    """End tokens with which the six rows end after 1, 3, 36 tokens, and the others when they do."""
    texts = [greedy("llama", prompt, 40) for prompt in SIX[:3]]
    return [first_seen_at(text, at) for text, at in zip(texts, (0, 2, 35), strict=True)]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("name", ["none", "lookup", "noisy", "noisy trees", "random trees", "oracle", "wrong"])
def test_rows_that_end_at_very_different_times_are_padded(name: str, together: bool) -> None:
    """T-I2: rows that move alone and rows that a processor holds together; the pad token fills what follows an end."""
    inputs = batch(*SIX)
    options: dict[str, Any] = {"eos_token_id": six_ends(), "max_new_tokens": 40}
    options |= {"logits_processor": [lambda ids, scores: scores]} if together else {}
    wanted = plain(model("llama"), inputs, options)
    new = wanted[:, inputs["input_ids"].shape[1] :]
    lengths = (new != PAD).sum(1).tolist()
    assert lengths[:3] == [1, 3, 36] and len(set(lengths)) >= 4 and max(lengths) == new.shape[1]
    for entry in ENTRIES:
        accelerated = method(name, wanted, k=6)
        found = call(entry, accelerated, **inputs, **(PLAIN | options))
        assert found.tolist() == wanted.tolist()
        stats = accelerated.last_stats
        assert [one.num_new_tokens for one in stats] == lengths
        assert all(bool(one.notes) == together for one in stats)
    if name in ("noisy", "noisy trees", "random trees"):
        assert_mixed(stats)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("index", [9, 10, 13])
def test_the_text_ends_at_its_end_token_in_the_middle_of_a_draft(index: int, entry: str) -> None:
    """T-C1: the model as its own draft with K = 16, and lookup; the last id is the end token."""
    for prompt, drafter in ((REPEATED, sure(16)), (REPEATED, None), (MIXED, sure(16))):
        end = first_seen_at(greedy("llama", prompt, 40), index)
        wanted = plain(model("llama"), batch(prompt), {"eos_token_id": end})
        assert wanted.shape[1] == len(prompt) + index + 1 and int(wanted[0, -1]) == end
        accelerated = drafter or outpace.accelerate(model("llama"), drafter="lookup", k=16)
        assert call(entry, accelerated, **batch(prompt), **PLAIN, eos_token_id=end).tolist() == wanted.tolist()
        if drafter is not None:
            assert accelerated.last_stats[0].num_accepted_tokens >= index - 2


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_max_new_tokens_is_exact(count: int, entry: str) -> None:
    """T-C3: with K = 5 and every kind of drafting; and no token is drafted past the last wanted one."""
    options = PLAIN | {"max_new_tokens": count}
    wanted = plain(model("llama"), batch(REPEATED, MIXED), options, distinct=2)
    for name in ("none", "suffix", "lookup", "sure", "noisy trees", "random trees", "oracle", "wrong"):
        found = call(entry, method(name, wanted, k=5), **batch(REPEATED, MIXED), **options)
        assert found.shape == (2, 40 + count) and found.tolist() == wanted.tolist(), name
    for budget in (options, PLAIN | {"max_new_tokens": None, "max_length": 40 + count}):
        call(entry, sure(16), **batch(REPEATED), **budget)
        assert sure(16).last_stats[0].num_drafted_tokens == count - 1


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "budget",
    [
        {"max_new_tokens": 20, "max_length": 45},
        {"max_new_tokens": 7, "max_time": 1e6},
        {"max_new_tokens": 30, "max_time": 1e-9},
        {"max_new_tokens": 16, "min_new_tokens": 12},
        {"max_new_tokens": None, "max_length": 60, "min_length": 52},
    ],
)
def test_several_budgets_together_are_as_in_transformers(budget: dict[str, Any], entry: str) -> None:
    """T-C12: with an end token at index 3 that the least length holds back."""
    end = first_seen_at(greedy("llama", REPEATED, 40), 3)
    inputs, options = batch(REPEATED, MIXED), budget | {"eos_token_id": end}
    if "min_new_tokens" in budget or "min_length" in budget:
        unheld = plain(model("llama"), inputs, {**options, "min_new_tokens": None, "min_length": None})
        assert plain(model("llama"), inputs, options).tolist() != unheld.tolist()
    ways = dict.fromkeys(WAYS, entry)
    assert_same(model("llama"), inputs, options, ways=ways, distinct=2 if "max_time" in budget else 5)


def test_rows_without_an_end_token_end_together() -> None:
    """T-I2: nothing pads them; a pad token that is not needed does not matter, nor does one that is missing."""
    inputs = batch(*LENGTHS)
    assert_mixed(assert_same(model("llama"), inputs, {"pad_token_id": None}))
    wanted = plain(model("llama"), inputs, {"pad_token_id": None})
    assert wanted.tolist() == plain(model("llama"), inputs, {}).tolist() and PAD not in wanted[:, 30:]


# --------------------------------------------------------------------------------------------------
# Counts


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("k", "passes"), [(1, 20), (5, 7), (20, 2)])
def test_forty_tokens_take_forty_over_k_plus_one_passes_of_the_target(k: int, passes: int, entry: str) -> None:
    """T-K1: the model as its own draft, counted by a hook on the target; alone, and as two rows of one length."""
    options = PLAIN | {"max_new_tokens": 40}
    for prompts in ((MIXED,), (MIXED, REPEATED[:30])):
        wanted = plain(model("llama"), batch(*prompts), options)
        accelerated = sure(k)
        with Passes(model("llama")) as watched:
            found = call(entry, accelerated, **batch(*prompts), **options)
        assert found.tolist() == wanted.tolist() and watched.count == passes
        assert [stats.num_verifications for stats in accelerated.last_stats] == [passes] * len(prompts)


def lengths_of(found: torch.Tensor, length: int, ends: Sequence[int]) -> list[int]:
    """How many new tokens each row has up to its end token, and that nothing but padding follows."""
    lengths = []
    for row in found[:, length:].tolist():
        size = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
        assert all(token == PAD for token in row[size:])
        lengths.append(size)
    return lengths


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("other", "other trees", "itself")])
def test_the_counts_of_each_row_add_up(name: str, do_sample: bool) -> None:
    """T-K6: emitted = accepted + rounds and drafted = accepted + rejected, for rows that end inside drafts too."""
    inputs = batch(*SIX)
    options = PLAIN | {"do_sample": do_sample, "max_new_tokens": 16}
    accelerated = method(name, model("llama").generate(**inputs, **PLAIN), k=6)
    for ends, entry in zip(([], six_ends()), ENTRIES, strict=True):
        found = call(entry, accelerated, **inputs, **options, seed=5, eos_token_id=ends or None)
        stats = accelerated.last_stats
        assert [one.num_new_tokens for one in stats] == lengths_of(found, inputs["input_ids"].shape[1], ends)
        assert [one.num_prompt_tokens for one in stats] == [len(prompt) for prompt in SIX]
        for one in stats:
            assert_counts_add_up(one)
            assert (one.acceptance, one.is_lossless, one.num_draft_failures) == ("coupled", True, 0)
            assert one.drafter == accelerated.engine.drafter.name


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_passes_of_a_row_are_its_rounds(entry: str) -> None:
    """T-K6: verifications and prompt chunks of one row are the forwards that a hook counts."""
    target = tiny_model("llama")
    drafter = drafters.random_trees(512, [(*MIXED, *greedy("llama", MIXED, 40))])
    accelerated = outpace.accelerate(target, drafter=drafter, k=5, prefill_chunk=8)
    with Passes(target) as passes:
        found = call(entry, accelerated, **batch(MIXED), **PLAIN)
    assert found.tolist() == plain(model("llama"), batch(MIXED), {}).tolist()
    (stats,) = accelerated.last_stats
    assert isinstance(stats, Stats) and stats.num_prefill_passes == 3
    assert stats.num_verifications + stats.num_prefill_passes == passes.count
    assert_mixed([stats])


@pytest.mark.parametrize("entry", ENTRIES)
def test_prompts_of_several_chunks_wait_for_each_other_where_rows_move_together(entry: str) -> None:
    """T-I1: a short row has been read long before a long one; a processor over both still sees them side by side."""
    inputs = batch(MIXED * 3, ONE, REPEATED)
    options = {"encoder_repetition_penalty": 1.2}
    wanted = plain(model("llama"), inputs, options).tolist()
    for way in EVERY_WAY:
        ways = {"suffix": {"drafter": "suffix"}, "chain": {"drafter": itself("llama")}, "tree": {"drafter": "lookup"}}
        accelerated = outpace.accelerate(model("llama"), **ways[way], k=5, prefill_chunk=7)
        assert call(entry, accelerated, **inputs, **PLAIN, **options).tolist() == wanted
        assert call(entry, accelerated, **inputs, **PLAIN).tolist() == plain(model("llama"), inputs, {}).tolist()
    assert fast(model("llama")).engine.options.prefill_chunk == 512
