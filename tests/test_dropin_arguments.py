"""Greedy text under every argument of `generate` is transformers' own, by both entries and however it is drafted."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from dropin_reference import ENTRIES, PAD, PLAIN, WAYS, assert_mixed, assert_same, batch, call, fast, plain
from reference import MIXED, ONE, REPEATED, decoded, greedy, model, tokenizer, writer
from torch import Tensor
from transformers import GenerationConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation.utils import GenerationMixin

import outpace
from outpace import arguments
from outpace.testing.models import with_noise

MIXED_TEXT, REPEATED_TEXT = greedy("llama", MIXED, 40), greedy("llama", REPEATED, 40)
ONE_TEXT = greedy("llama", ONE, 40)


@dataclass(frozen=True)
class Case:
    """arguments: of `generate`. changes: whether they change the text, which then proves that they were applied.

    distinct: the guard of varied text, where the texts are short. is_mixed: whether enough is drafted for the other.
    """

    arguments: dict[str, Any]
    prompts: tuple[tuple[int, ...], ...] = (MIXED, REPEATED, ONE)
    changes: bool = True
    distinct: int = 5
    is_mixed: bool = True


def allowed(row: int, text: Tensor) -> list[int]:
    """Tokens that depend on the row and on the length of its text."""
    return list(range((row + len(text)) % 3, 512, 3))


_END = {"eos_token_id": [MIXED_TEXT[9], REPEATED_TEXT[3], ONE_TEXT[15]]}
_NEGATIVE = batch((33, 44, 55), (66, 77), (88,))
_OFTEN = REPEATED_TEXT[14]

CASES: dict[str, Case] = {
    # length and ends
    "max_new_tokens": Case({"max_new_tokens": 36}),
    "max_new_tokens 1": Case({"max_new_tokens": 1}, distinct=1, is_mixed=False),
    "max_new_tokens 2": Case({"max_new_tokens": 2}, distinct=2, is_mixed=False),
    "max_new_tokens 3": Case({"max_new_tokens": 3}, distinct=3, is_mixed=False),
    "max_length": Case({"max_new_tokens": None, "max_length": 55}),
    "max_length and max_new_tokens": Case({"max_new_tokens": 20, "max_length": 25}),
    "min_new_tokens": Case({"min_new_tokens": 12, **_END}),
    "min_length": Case({"min_length": 50, **_END}),
    "max_time tiny": Case({"max_time": 1e-9}, distinct=1, is_mixed=False),
    "max_time huge": Case({"max_time": 1e9}, changes=False),
    "eos_token_id": Case({"eos_token_id": MIXED_TEXT[9]}),
    "eos_token_id list": Case(_END),
    "pad_token_id": Case({"pad_token_id": 3, **_END}),
    # choosing tokens
    "repetition_penalty": Case({"repetition_penalty": 1.3}),
    "encoder_repetition_penalty": Case({"encoder_repetition_penalty": 1.5}),
    "no_repeat_ngram_size": Case({"no_repeat_ngram_size": 2}),
    "encoder_no_repeat_ngram_size": Case(
        {"encoder_no_repeat_ngram_size": 1}, prompts=((*MIXED, *MIXED_TEXT[:8]), REPEATED, ONE)
    ),
    "bad_words_ids": Case({"bad_words_ids": [MIXED_TEXT[3:5], [MIXED_TEXT[11]], REPEATED_TEXT[2:4]]}),
    "sequence_bias": Case({"sequence_bias": {(_OFTEN,): -100.0, tuple(MIXED_TEXT[4:6]): -100.0}}),
    "suppress_tokens": Case({"suppress_tokens": [MIXED_TEXT[2], _OFTEN]}),
    "begin_suppress_tokens": Case({"begin_suppress_tokens": [MIXED_TEXT[0], REPEATED_TEXT[0], REPEATED_TEXT[1]]}),
    "forced_bos_token_id": Case({"forced_bos_token_id": 77}, prompts=((10,), (20,), (30,))),
    "forced_eos_token_id": Case({"forced_eos_token_id": [77]}),
    "exponential_decay_length_penalty": Case({"exponential_decay_length_penalty": (6, 1.3), "eos_token_id": 77}),
    "remove_invalid_values": Case({"sequence_bias": {(_OFTEN,): torch.nan}, "remove_invalid_values": True}),
    "renormalize_logits": Case({"renormalize_logits": True}, changes=False),
    "prefix_allowed_tokens_fn": Case({"prefix_allowed_tokens_fn": allowed}),
    "watermarking_config": Case({"watermarking_config": WatermarkingConfig(bias=6.0)}),
    "watermarking_config selfhash": Case(
        {"watermarking_config": WatermarkingConfig(bias=6.0, seeding_scheme="selfhash"), "max_new_tokens": 8},
        is_mixed=False,
    ),
    "watermarking_config SynthID": Case(
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 1, 4, 1, 5, 9], ngram_len=3)}
    ),
    "guidance_scale": Case({"guidance_scale": 1.5}),
    "guidance_scale without cache": Case({"guidance_scale": 1.5, "use_cache": False}),
    "negative_prompt_ids": Case({"guidance_scale": 2.0, "negative_prompt_ids": _NEGATIVE["input_ids"]}),
    "negative_prompt_attention_mask": Case(
        {
            "guidance_scale": 2.0,
            "negative_prompt_ids": _NEGATIVE["input_ids"],
            "negative_prompt_attention_mask": _NEGATIVE["attention_mask"],
        }
    ),
    # where settings come from
    "generation_config": Case({"generation_config": GenerationConfig(repetition_penalty=1.2, pad_token_id=3, **_END)}),
    "generation_config overridden": Case(
        {"generation_config": GenerationConfig(repetition_penalty=9.0, **_END), "repetition_penalty": 1.2}
    ),
    # how it is computed
    "use_cache": Case({"use_cache": False}, changes=False),
    "logits_to_keep": Case({"logits_to_keep": 1}, changes=False),
    # together
    "penalties together": Case(
        {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3,
            "bad_words_ids": [MIXED_TEXT[3:5]],
            "min_new_tokens": 6,
            "forced_eos_token_id": 77,
            **_END,
        }
    ),
    "guidance and penalties": Case(
        {"guidance_scale": 1.4, "encoder_repetition_penalty": 1.2, "prefix_allowed_tokens_fn": allowed, **_END}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_greedy_text_under_an_argument_is_that_of_transformers(name: str) -> None:
    """T-C3, T-C12, T-D1, T-D2: one row, and three rows with left padding; the argument shows in the text."""
    case = CASES[name]
    stats = []
    alone = {"suffix": "fast.generate", "chain": "custom_generate"}
    together = {"tree": "fast.generate", "known": "custom_generate"}
    for prompts, ways in ((case.prompts[:1], alone), (case.prompts, together)):
        inputs = batch(*prompts)
        options = dict(case.arguments)
        options |= {key: value[: len(prompts)] for key, value in options.items() if key.startswith("negative")}
        distinct = case.distinct if len(prompts) > 1 else min(case.distinct, 3)
        stats += assert_same(model("llama"), inputs, options, ways=ways, distinct=distinct)
    if case.is_mixed:
        assert_mixed(stats)
    if case.changes:
        without = model("llama").generate(**inputs, **PLAIN)
        assert plain(model("llama"), inputs, options, case.distinct).tolist() != without.tolist()


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("drafter", ["suffix", "lookup"])
def test_a_text_that_repeats_is_copied_from_itself(drafter: str, entry: str) -> None:
    """T-D2: a bias leads each row through a circle of seven tokens, and most of them need no pass of their own."""
    circle = (400, 17, 333, 90, 255, 61, 128)
    bias = {(a, b): 80.0 for a, b in zip(circle, (*circle[1:], circle[0]), strict=True)}
    inputs, options = batch((*MIXED, 400), (*REPEATED, 90), (61,)), PLAIN | {"sequence_bias": bias}
    wanted = plain(model("llama"), inputs, options)
    accelerated = outpace.accelerate(model("llama"), drafter=drafter)
    assert call(entry, accelerated, **inputs, **options).tolist() == wanted.tolist()
    assert all(stats.num_accepted_tokens >= 8 for stats in accelerated.last_stats)


# --------------------------------------------------------------------------------------------------
# Where settings come from


def test_defaults_of_the_models_generation_config_are_applied() -> None:
    """As transformers does, and a keyword overrides each of them."""
    target = copy.copy(model("llama"))
    target.generation_config = GenerationConfig(
        repetition_penalty=1.2, eos_token_id=[ONE_TEXT[4], 77], pad_token_id=3, min_new_tokens=3, suppress_tokens=[5]
    )
    inputs = batch(MIXED, REPEATED, ONE)
    stats = assert_same(target, inputs, {"pad_token_id": None})
    assert_mixed(stats)
    first = plain(target, inputs, {"pad_token_id": None})
    for override in ({"repetition_penalty": 1.0}, {"eos_token_id": REPEATED_TEXT[3]}, {"min_new_tokens": 9}):
        assert_same(target, inputs, override)
        assert plain(target, inputs, override).tolist() != first.tolist()


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_prompt_and_the_config_may_be_given_by_place(entry: str) -> None:
    """`inputs` and `generation_config` are the first two; `inputs=` and `input_ids=` are the same."""
    inputs, config = batch(MIXED), GenerationConfig(**PLAIN, repetition_penalty=1.2)
    wanted = plain(model("llama"), inputs, {"repetition_penalty": 1.2}).tolist()
    accelerated = fast(model("llama"))
    assert call(entry, accelerated, inputs["input_ids"], config).tolist() == wanted
    assert call(entry, accelerated, inputs=inputs["input_ids"], generation_config=config).tolist() == wanted
    assert call(entry, accelerated, input_ids=inputs["input_ids"], generation_config=config).tolist() == wanted


@pytest.mark.parametrize("entry", ENTRIES)
def test_without_any_input_the_text_begins_with_its_first_token(entry: str) -> None:
    """bos_token_id, from the call or from the model's generation config; without one, transformers' error."""
    for way in WAYS:
        wanted = model("llama").generate(**PLAIN, bos_token_id=17)
        assert len(set(wanted[0].tolist())) >= 5 and wanted.shape == (1, 25)
        assert call(entry, fast(model("llama"), way), **PLAIN, bos_token_id=17).tolist() == wanted.tolist()
    for generate in (model("llama").generate, fast(model("llama")).generate):
        with pytest.raises(ValueError, match="bos_token_id"):
            generate(**PLAIN)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_mask_may_be_absent_full_or_inferred_from_the_padding(entry: str) -> None:
    """Without a mask transformers takes pad tokens for padding, unless they also end a text."""
    target = model("llama")
    alone, padded = batch(MIXED), batch(MIXED, ONE, REPEATED)
    ids = {name: inputs["input_ids"] for name, inputs in (("alone", alone), ("padded", padded))}
    for way in WAYS:
        wanted = plain(target, alone, {}).tolist()
        for mask in ({}, {"attention_mask": None}, {"attention_mask": alone["attention_mask"].bool()}):
            assert call(entry, fast(target, way), ids["alone"], **mask, **PLAIN).tolist() == wanted
        wanted = plain(target, padded, {}).tolist()
        assert target.generate(ids["padded"], **PLAIN).tolist() == wanted
        assert call(entry, fast(target, way), ids["padded"], **PLAIN).tolist() == wanted
        as_text = target.generate(ids["padded"], **PLAIN, eos_token_id=PAD).tolist()
        assert as_text != wanted
        assert call(entry, fast(target, way), ids["padded"], **PLAIN, eos_token_id=PAD).tolist() == as_text


# --------------------------------------------------------------------------------------------------
# Stop strings


def test_stop_strings_end_the_text_where_transformers_ends_it() -> None:
    """T-C5: over several tokens, in a batch, with and without an end token, as argument, config or default."""
    target, texts = copy.copy(writer()), ["the people of the", "a cat"]
    draft = with_noise(target, 0.02)
    inputs = batch(*(tokenizer()(text)["input_ids"] for text in texts), pad=2)
    base = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 2}
    written = [decoded(row[inputs["input_ids"].shape[1] :]) for row in target.generate(**inputs, **base).tolist()]
    stops = [written[0][20:24], written[1][31:33]]
    lengths = set()
    for options in (
        {"stop_strings": stops[0]},
        {"stop_strings": stops},
        {"stop_strings": stops, "eos_token_id": 368},
        {"generation_config": GenerationConfig(stop_strings=stops)},
        {},
    ):
        target.generation_config = GenerationConfig(stop_strings=None if options else stops)
        wanted = target.generate(**inputs, **base, **options, tokenizer=tokenizer())
        lengths.add(wanted.shape[1])
        for drafting in ({"drafter": "suffix"}, {"drafter": draft, "k": 5}):
            accelerated = outpace.accelerate(target, **drafting)
            found = accelerated.generate(**inputs, **base, **options, tokenizer=tokenizer())
            assert found.tolist() == wanted.tolist()
    assert accelerated.last_stats[0].num_accepted_tokens > 0
    assert len(lengths) == 2 and min(lengths) < inputs["input_ids"].shape[1] + 15


def test_a_criterion_of_the_users_is_asked_beside_stop_strings() -> None:
    """T-C5: whichever comes first ends the text."""
    prompt = batch(tokenizer()("the people of the")["input_ids"])
    base, length = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 2}, prompt["input_ids"].shape[1]
    written = decoded(writer().generate(**prompt, **base)[0, length:].tolist())
    accelerated, ends = outpace.accelerate(writer(), drafter="suffix"), []
    for limit in (4, 25):

        def is_long(ids: Tensor, scores: Any, limit: int = length + limit) -> bool:
            return ids.shape[1] >= limit

        options = {"stop_strings": [written[18:22]], "stopping_criteria": [is_long]}
        wanted = writer().generate(**prompt, **base, **options, tokenizer=tokenizer())
        assert accelerated.generate(**prompt, **base, **options, tokenizer=tokenizer()).tolist() == wanted.tolist()
        ends.append(wanted.shape[1] - length)
    assert ends[0] == 4 and 4 < ends[1] < 25


def test_stop_strings_without_a_tokenizer_are_refused_before_the_first_token() -> None:
    """T-C5: by us, and beside custom_generate by transformers, which drops the tokenizer there."""
    inputs = batch(MIXED)
    accelerated = fast(model("llama"))
    with pytest.raises(outpace.InputError, match=r"stop_strings=…\) needs tokenizer="):
        accelerated.generate(**inputs, **PLAIN, stop_strings=["a"])
    with pytest.raises(ValueError, match="tokenizer"):
        model("llama").generate(
            **inputs, **PLAIN, stop_strings=["a"], tokenizer=tokenizer(), custom_generate=accelerated
        )


# --------------------------------------------------------------------------------------------------
# The table of arguments

# Honoured arguments that other tests than the cases above are about.
ELSEWHERE = {
    *("inputs", "input_ids", "attention_mask", "position_ids", "past_key_values", "cache", "tokenizer"),
    *("seed", "stop_strings", "bos_token_id", "stopping_criteria", "logits_processor", "do_sample", "temperature"),
    *("top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "num_return_sequences"),
    *("return_dict_in_generate", "output_scores", "output_logits", "streamer"),
}
# Names that transformers has in some of the supported versions only, and inputs of models.
EXTRA = {
    *("input_ids", "attention_mask", "position_ids", "inputs_embeds", "token_type_ids", "past_key_values", "cache"),
    *("tokenizer", "assistant_tokenizer", "logits_to_keep", "trust_remote_code", "seed"),
}
NOT_IN_EVERY_VERSION = {"speculation_type"}


def test_every_argument_of_transformers_has_its_place_in_the_table() -> None:
    """A version of transformers that adds an argument makes this fail, so that someone decides what becomes of it."""
    parameters = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    attributes = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    table = set(arguments.ARGUMENTS)
    assert (parameters | attributes | EXTRA) - table == set(), "arguments without a place in outpace.arguments"
    assert table - (parameters | attributes | EXTRA) <= NOT_IN_EVERY_VERSION
    assert len(parameters) >= 11 and len(attributes) >= 60


def test_arguments_by_place_have_the_order_of_transformers() -> None:
    """So that a call needs no change."""
    theirs, ours = (list(inspect.signature(one.generate).parameters) for one in (GenerationMixin, outpace.Accelerated))
    assert ours[:12] == theirs[:12] and "kwargs" in ours and len(theirs) >= 12


def test_every_honoured_argument_is_tested() -> None:
    """By a case that bears its name, or by one of the tests elsewhere."""
    honoured = {name for name, argument in arguments.ARGUMENTS.items() if argument.fate == "honoured"}
    assert honoured == {name.split()[0] for name in CASES} & honoured | ELSEWHERE


def test_the_table_can_be_printed() -> None:
    """One line per argument, for the documentation."""
    lines = arguments.as_markdown().splitlines()
    assert len(lines) == len(arguments.ARGUMENTS) + 2
    assert all(line.startswith("| ") and line.endswith(" |") for line in lines)


IDLE = {
    "logits_to_keep": 3,
    "disable_compile": True,
    "early_stopping": True,
    "length_penalty": 2.0,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.5,
    "assistant_ensemble_weight": None,
    "assistant_lookbehind": 5,
    "target_lookbehind": 5,
    "max_matching_ngram_size": 2,
    "decoder_start_token_id": 7,
    "assistant_tokenizer": None,
    "continuous_batching_config": None,
}


@pytest.mark.parametrize("name", IDLE)
def test_an_argument_without_effect_in_transformers_has_none_here(name: str) -> None:
    """The text is the same with and without it."""
    if not hasattr(GenerationConfig(), name) and name not in EXTRA:
        pytest.skip("not in this version of transformers")
    inputs = batch(MIXED, ONE)
    wanted = plain(model("llama"), inputs, {}).tolist()
    found = fast(model("llama")).generate(**inputs, **PLAIN, **{name: IDLE[name]})
    assert found.tolist() == wanted


def test_the_arguments_without_effect_are_those_of_the_table() -> None:
    """The guard of the test above."""
    assert set(IDLE) == {name for name, argument in arguments.ARGUMENTS.items() if argument.fate == "no effect"}


@pytest.mark.parametrize("entry", ENTRIES)
def test_several_greedy_texts_of_one_prompt_are_refused_as_by_transformers(entry: str) -> None:
    """They would all be the same; the error is transformers' own."""
    inputs = batch(MIXED)
    with pytest.raises(ValueError) as theirs:
        model("llama").generate(**inputs, **PLAIN, num_return_sequences=3)
    with pytest.raises(ValueError) as ours:
        call(entry, fast(model("llama")), **inputs, **PLAIN, num_return_sequences=3)
    assert str(ours.value) == str(theirs.value)
