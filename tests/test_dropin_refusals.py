"""Right or refused by name before the first token, never ignored: arguments, masks, positions, seeds and models."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from dropin_reference import ENTRIES, IS_NEW, PLAIN, WAYS, Passes, assert_same, batch, call, fast, plain
from reference import MIXED, ONE, REPEATED, model, noisy, other
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    CompileConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import outpace
from outpace import EngineError, InputError, LoadError, arguments
from outpace.testing.models import tiny_model

# A value of each argument that is refused.
REFUSED: dict[str, Any] = {
    "inputs_embeds": torch.zeros(1, 3, 64),
    "token_type_ids": torch.zeros(1, 30, dtype=torch.int64),
    "output_attentions": True,
    "output_hidden_states": True,
    "cache_implementation": "static",
    "cache_config": {"backend": "quanto"},
    "max_cache_len": 99,
    "prefill_chunk_size": 8,
    "compile_config": CompileConfig(),
    "synced_gpus": True,
    "trust_remote_code": True,
    "custom_generate": lambda *arguments, **options: None,
    "token_healing": True,
    "low_memory": True,
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": [object()],
    "force_words_ids": [[1]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "assistant_model": "noisy",
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "use_mtp": True,
    "speculation_type": "mtp",
    "is_assistant": True,
}
# Older versions choose a cache for assisted decoding before we are asked, and that is named instead.
_ALIAS = "no alias" if IS_NEW else "cache_implementation"
# Beside custom_generate, transformers drops the first two (there they mean nothing) and refuses the others itself.
_NOT_OURS = {"custom_generate", "trust_remote_code"}
_THEIR_ERROR = {"token_type_ids": "not used by the model", "token_healing": "token healing"}


def assert_refused(
    entry: str,
    accelerated: Any,
    match: str | None,
    inputs: dict[str, Any],
    kind: type[Exception] = InputError,
    **options: Any,
) -> str:
    """The message of the error, which comes without any forward of the model."""
    with Passes(accelerated.engine.target.model) as passes, pytest.raises(kind, match=match) as error:
        call(entry, accelerated, **inputs, **(PLAIN | options))
    assert passes.count == 0
    return str(error.value)


def test_every_refused_argument_is_tested() -> None:
    """The guard of the tests below."""
    assert set(REFUSED) == {name for name, argument in arguments.ARGUMENTS.items() if argument.fate == "refused"}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_cannot_be_honoured_is_refused_by_name(name: str, entry: str) -> None:
    """T-L8, T-K4: in one line that names it, without any forward of the model."""
    if entry == "custom_generate" and name in _NOT_OURS:
        pytest.skip("transformers itself takes it away")
    if name == "speculation_type" and not hasattr(GenerationConfig(), name) and entry == "custom_generate":
        pytest.skip("not in this version of transformers")
    value = noisy("llama") if name == "assistant_model" else REFUSED[name]
    message = rf"generate\(({name}|{_ALIAS})=.*\) cannot be honoured: "
    wanted: type[Exception] = InputError
    if entry == "custom_generate" and name in _THEIR_ERROR:
        wanted, message = ValueError, _THEIR_ERROR[name]
    seen = assert_refused(entry, fast(model("llama")), message, batch(MIXED), wanted, **{name: value})
    assert wanted is ValueError or "\n" not in seen


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("setting", [{"num_beams": 3}, {"penalty_alpha": 0.5, "top_k": 4}, {"use_mtp": True}])
def test_a_config_is_refused_as_arguments_are(setting: dict[str, Any], entry: str) -> None:
    """T-K4: given with the call or a default of the model; an argument that takes the setting back is honoured."""
    with_default = copy.copy(model("llama"))
    with_default.generation_config = GenerationConfig(**setting)
    (name, *_), ours = setting, fast(model("llama"))
    with pytest.raises(InputError, match=f"{name}|{_ALIAS}"):
        call(entry, ours, **batch(MIXED), generation_config=GenerationConfig(**setting), **PLAIN)
    accelerated = outpace.accelerate(with_default, drafter="suffix")
    with pytest.raises(InputError, match=f"{name}|{_ALIAS}"):
        call(entry, accelerated, **batch(MIXED), **PLAIN)
    if name == "num_beams":
        found = call(entry, accelerated, **batch(MIXED), **PLAIN, num_beams=1)
        assert found.tolist() == plain(model("llama"), batch(MIXED), {}).tolist()


@pytest.mark.parametrize(
    "harmless",
    [
        {"num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "low_memory": False},
        {"output_attentions": False, "output_hidden_states": False, "use_mtp": False, "is_assistant": False},
        {"cache_implementation": "dynamic", "token_healing": False, "synced_gpus": False, "penalty_alpha": None},
        {"assistant_model": None, "prompt_lookup_num_tokens": None, "streamer": None, "seed": None},
    ],
)
def test_an_argument_that_asks_for_nothing_is_not_refused(harmless: dict[str, Any]) -> None:
    """Its neutral values are those that transformers has by default."""
    found = fast(model("llama")).generate(**batch(MIXED), **PLAIN, **harmless)
    assert found.tolist() == plain(model("llama"), batch(MIXED), {}).tolist()


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("unknown", [{"max_new_token": 4}, {"temprature": 0.3}, {"pixel_values": torch.zeros(1, 3)}])
def test_an_unknown_argument_is_the_error_that_transformers_has_for_it(unknown: dict[str, Any], entry: str) -> None:
    """T-K4: typos are never ignored."""
    with pytest.raises(ValueError) as theirs:
        model("llama").generate(**batch(MIXED), **PLAIN, **unknown)
    assert assert_refused(entry, fast(model("llama")), None, batch(MIXED), ValueError, **unknown) == str(theirs.value)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_input_that_drafts_cannot_carry_is_refused(entry: str) -> None:
    """T-L8: one that the model's forward would take, and that is not in the table."""
    for name, value in (("encoder_hidden_states", torch.zeros(1)), ("token_type_ids", torch.zeros(1, 30).long())):
        assert_refused(entry, fast(model("gpt2"), "tree", "gpt2"), name, batch(MIXED), **{name: value})


# --------------------------------------------------------------------------------------------------
# Prompts, masks and positions


def _mask(*zeros: tuple[int, slice]) -> torch.Tensor:
    mask = torch.ones(2, 30, dtype=torch.int64)
    for row, part in zeros:
        mask[row, part] = 0
    return mask


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "mask",
    [
        _mask((0, slice(5, 6))),
        _mask((0, slice(2)), (0, slice(9, 11))),
        _mask((1, slice(-3, None))),
        _mask((1, slice(30))),
    ],
    ids=["a hole", "padding and a hole", "right padding", "nothing but padding"],
)
def test_a_mask_that_is_not_left_padding_is_refused(mask: torch.Tensor, entry: str) -> None:
    """T-I1: a forward per row has no place for holes; the message says what to do."""
    inputs = batch(MIXED, MIXED) | {"attention_mask": mask}
    assert_refused(entry, fast(model("llama")), "zeros that are not left padding", inputs)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", ["mask", "positions"])
def test_positions_are_those_of_the_text_or_refused(kind: str, entry: str) -> None:
    """Those that transformers would count are honoured, with and without padding; others are not."""
    inputs = batch(MIXED, ONE, REPEATED)
    counted = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    wanted = plain(model("llama"), inputs, {}).tolist()
    if kind == "mask":
        for filler in (0, 1, 7):
            positions = torch.where(inputs["attention_mask"] == 1, counted, filler)
            assert call(entry, fast(model("llama")), **inputs, position_ids=positions, **PLAIN).tolist() == wanted
        one_row = torch.arange(30)[None]
        found = call(entry, fast(model("llama")), **batch(MIXED, MIXED), position_ids=one_row, **PLAIN)
        assert found[0].tolist() == found[1].tolist() == plain(model("llama"), batch(MIXED), {})[0].tolist()
        return
    for foreign in (counted + 1, counted * 2, torch.arange(40)[None], counted[None].expand(3, -1, -1)):
        message = "position_ids are not those of the text"
        assert_refused(entry, fast(model("llama")), message, inputs, position_ids=foreign)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([[1, 2, 512]]), "token id 512, outside the vocabulary of 512"),
        (torch.tensor([[1, -2, 5]]), "token id -2, outside the vocabulary"),
        (torch.zeros(1, 0, dtype=torch.int64), "The prompt is empty"),
    ],
)
def test_a_prompt_that_the_model_cannot_read_is_refused(ids: torch.Tensor, message: str, entry: str) -> None:
    """T-K4: before the first token, with what is wrong."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert_refused(entry, fast(model("llama")), message, inputs)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("length", [{"max_new_tokens": 0}, {"max_new_tokens": None, "max_length": 20}])
def test_a_text_without_room_is_the_error_that_transformers_has_for_it(length: dict[str, Any], entry: str) -> None:
    """T-C3: no new token may be written."""
    with pytest.raises(ValueError) as theirs:
        model("llama").generate(**batch(MIXED), **(PLAIN | length))
    with pytest.raises(ValueError) as ours:
        call(entry, fast(model("llama")), **batch(MIXED), **(PLAIN | length))
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("way", WAYS)
def test_a_text_may_reach_the_last_position_and_not_pass_it(way: str) -> None:
    """T-H3: as in transformers, drafts or not."""
    target = model("gpt2")
    inputs = batch((MIXED * 20)[:500])
    for room in (5, 12, 13):
        assert_same(target, inputs, {"max_new_tokens": room}, ways={way: "fast.generate"}, family="gpt2")
    for generate in (target.generate, fast(target, way, "gpt2").generate):
        with pytest.raises(IndexError):
            generate(**inputs, **(PLAIN | {"max_new_tokens": 14}))


# --------------------------------------------------------------------------------------------------
# Seeds


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("seed", [True, -1, "abc", "7", [1.5], [True], {"a": 1}, [-1], ["1"]])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_seed_that_is_no_whole_number_is_refused(do_sample: bool, seed: Any, entry: str) -> None:
    """T-B7: also where it would not be used."""
    message = "seed must be a whole number, 0 or larger"
    assert_refused(entry, fast(model("llama")), message, batch(MIXED), do_sample=do_sample, seed=seed)


@pytest.mark.parametrize("seed", [1.5, torch.tensor(3), object()], ids=["float", "tensor", "object"])
def test_a_seed_of_an_odd_type_is_refused(seed: Any) -> None:
    """T-B7: with the same message."""
    with pytest.raises(InputError, match="seed must be a whole number"):
        fast(model("llama")).generate(**batch(MIXED), **PLAIN, seed=seed)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("seed", "rows"), [([1], 2), ([1, 2, 3], 2), ([], 1), ([1, 2], 1)])
def test_seeds_that_are_not_one_per_row_are_refused(seed: Any, rows: int, entry: str) -> None:
    """T-B7: the message has both numbers."""
    message, inputs = f"seed has {len(seed)} numbers for {rows} rows", batch(*[MIXED] * rows)
    assert_refused(entry, fast(model("llama")), message, inputs, do_sample=True, seed=seed)


# --------------------------------------------------------------------------------------------------
# Objects and models


def test_a_closed_object_says_so() -> None:
    """By both entries; closing twice is safe, and leaving a `with` closes."""
    accelerated = outpace.accelerate(model("llama"), drafter="suffix")
    with accelerated as entered:
        assert entered is accelerated and entered.generate(**batch(MIXED), **PLAIN).shape == (1, 54)
    accelerated.close()
    for given in ({"custom_generate": accelerated}, {}):
        generate = model("llama").generate if given else accelerated.generate
        with pytest.raises(EngineError, match="was closed. Call accelerate"):
            generate(**batch(MIXED), **PLAIN, **given)


def test_custom_generate_for_another_model_is_refused() -> None:
    """It would give the text of the wrong model."""
    accelerated = fast(model("llama"))
    for another in (model("gemma3"), tiny_model("llama")):
        message = f"was made for another model than this {type(another).__name__}"
        for watched in (another, model("llama")):
            with Passes(watched) as passes, pytest.raises(InputError, match=message):
                another.generate(**batch(MIXED), **PLAIN, custom_generate=accelerated)
            assert passes.count == 0


def test_before_the_first_call_there_are_no_counts() -> None:
    """And a call that was refused leaves those of the call before."""
    accelerated = outpace.accelerate(model("llama"), drafter="suffix")
    assert accelerated.last_stats == ()
    accelerated.generate(**batch(MIXED, ONE), **PLAIN)
    counts = accelerated.last_stats
    assert len(counts) == 2 and [stats.num_new_tokens for stats in counts] == [24, 24]
    with pytest.raises(InputError):
        accelerated.generate(**batch(MIXED), **PLAIN, num_beams=2)
    assert accelerated.last_stats is counts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "medium"}, "drafter must be auto, suffix, lookup, "),
        ({"drafter": "model"}, "needs draft_model"),
        ({"drafter": "suffix", "width": 2}, "would not use it"),
        ({"drafter": "suffix", "k": 0}, "k must be a whole number from 1 to 4096"),
        ({"drafter": object()}, "lacks"),
        ({"prefill_chunk": 0}, "prefill_chunk must be"),
    ],
)
def test_an_option_of_accelerate_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    """T-C10, T-K4: by name; and an unknown one is Python's own error."""
    with pytest.raises(InputError, match=message):
        outpace.accelerate(model("llama"), **options)
    with pytest.raises(TypeError, match="kk"):
        outpace.accelerate(model("llama"), **{"kk": 3})


def test_two_draft_models_are_refused() -> None:
    """T-K4: one of them would be ignored."""
    with pytest.raises(InputError):
        outpace.accelerate(model("llama"), drafter=noisy("llama"), draft_model=other("llama"))


def test_auto_takes_the_draft_model_where_there_is_one() -> None:
    """T-K4: else the text itself; an object of either kind may be given as `drafter`."""
    names = []
    for options in ({}, {"draft_model": noisy("llama")}, {"drafter": noisy("llama")}, {"drafter": "none"}):
        accelerated = outpace.accelerate(model("llama"), **options)
        found = accelerated.generate(**batch(MIXED), **PLAIN)
        assert found.tolist() == plain(model("llama"), batch(MIXED), {}).tolist()
        names.append(accelerated.last_stats[0].drafter)
    assert names == ["suffix+recycle", "model", "model", "none"]


_SMALL = {"d_model": 32, "vocab_size": 64, "num_heads": 2, "d_kv": 16, "d_ff": 32, "num_layers": 1}
_SMALL_WHISPER = {
    **{"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2},
    **{"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
    **{"suppress_tokens": None, "begin_suppress_tokens": None},
}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (T5ForConditionalGeneration, T5Config(**_SMALL)),
        (WhisperForConditionalGeneration, WhisperConfig(**_SMALL_WHISPER)),
    ],
    ids=["T5", "Whisper"],
)
def test_encoder_decoder_models_are_refused_at_load(kind: Any, config: Any) -> None:
    """T-L5: by the name of the class, with what to use instead."""
    with pytest.raises(LoadError, match=f"{kind.__name__} is an encoder-decoder model.*transformers' own generate"):
        outpace.accelerate(kind(config).eval(), drafter="suffix")


def test_no_model_at_all_is_refused() -> None:
    """T-K4: a module that is no language model, and a model in training mode."""
    with pytest.raises(LoadError, match="causal language model is needed, got Linear"):
        outpace.accelerate(torch.nn.Linear(2, 2), drafter="suffix")
    with pytest.raises(LoadError, match="training mode"):
        outpace.accelerate(tiny_model("llama").train(), drafter="suffix")


@cache
def seeing() -> Any:
    """A tiny vision-language model."""
    text = LlamaConfig(
        **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
        **{"vocab_size": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    )
    vision = CLIPVisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=511)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for weight in found.parameters():
            if weight.dim() >= 2:
                weight *= 8
    return found


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_vision_language_model_writes_text_as_ever(entry: str) -> None:
    """T-L8: with text only, alone and in a padded batch."""
    accelerated = outpace.accelerate(seeing(), drafter="lookup", k=5)
    for inputs in (batch(MIXED), batch(REPEATED, ONE)):
        wanted = plain(seeing(), inputs, {}).tolist()
        assert call(entry, accelerated, **inputs, **PLAIN).tolist() == wanted


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_image_is_refused_by_its_name(entry: str) -> None:
    """T-L8: it is an input that drafts do not carry, also in the form that newer versions of transformers give it."""
    accelerated = outpace.accelerate(seeing(), drafter="lookup", k=5)
    options = {"pixel_values": torch.zeros(1, 3, 8, 8)}
    assert_refused(entry, accelerated, "pixel_values|mm_encoder_outputs", batch((*MIXED, *[511] * 4)), **options)
