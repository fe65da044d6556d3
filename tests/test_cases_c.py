"""A text ends where plain decoding ends it, to the token and to the character, in the middle of a draft too."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from reference import (
    METHODS,
    MIXED,
    ONE,
    REPEATED,
    STATE_FAMILIES,
    decoded,
    engine,
    first_seen_at,
    full_texts,
    greedy,
    model,
    params,
    plain,
    sure,
    tokenizer,
    with_ends,
    writer,
)

import outpace
from outpace import InputError, Result, SamplingParams
from outpace.testing import drafters
from outpace.testing.models import tiny_model

# --------------------------------------------------------------------------------------------------
# End-of-text tokens


@pytest.mark.parametrize("index", [0, 1, 9, 10, 13])
def test_the_text_ends_at_the_models_end_token_in_the_middle_of_a_draft(index: int) -> None:
    """T-C1: for a draft that is always right, of 16 tokens, and for prompt lookup; the end token is the last one."""
    end = first_seen_at(greedy("llama", REPEATED, 40), index)
    ended = with_ends(model("llama"), end)
    wanted = plain(ended, REPEATED, 40)
    assert wanted[-1] == end and len(wanted) == index + 1
    texts = full_texts("llama", (REPEATED,), 40)
    for drafter in (sure("llama"), sure("llama", width=3), "lookup", "suffix", drafters.oracle(texts), "none"):
        result = outpace.load(ended, drafter=drafter, k=16).generate(list(REPEATED), params(40))
        assert result.tokens == wanted
        assert (result.finish_reason, result.stop_reason) == ("stop", end)
        assert result.stats.num_new_tokens == index + 1


@pytest.mark.parametrize("family", ["gemma3", "bloom", *STATE_FAMILIES])
def test_every_kind_of_model_ends_at_its_end_token(family: str) -> None:
    """T-C1: with random trees, or chains where there are no trees."""
    tokens = greedy(family, MIXED, 32)
    end = next(token for index, token in enumerate(tokens) if index >= 8 and token not in tokens[:index])
    ended = with_ends(model(family), end)
    texts = full_texts(family, (MIXED,), 32)
    for seed in range(3):
        trees = drafters.random_trees(512, texts, seed=seed, share_right=0.9)
        result = outpace.load(ended, drafter=trees, k=8).generate(list(MIXED), params(32))
        assert result.tokens == plain(ended, MIXED, 32) and result.stop_reason == end


def test_the_earliest_of_several_end_tokens_ends_the_text() -> None:
    """T-C1: the model's list of end tokens, and those of one request, count alike; what is behind does not exist."""
    tokens = greedy("llama", MIXED, 40)
    early, late = first_seen_at(tokens, 6), first_seen_at(tokens, 12)
    found = outpace.load(with_ends(model("llama"), late, early), drafter=sure("llama"), k=16)
    assert found.generate(list(MIXED), params(40)).tokens == tokens[:7]
    one = outpace.load(with_ends(model("llama"), late), drafter=sure("llama"), k=16)
    assert one.generate(list(MIXED), params(40)).tokens == tokens[:13]
    result = one.generate(list(MIXED), params(40, stop_token_ids=[early]))
    assert (result.tokens, result.stop_reason) == (tokens[:7], early)
    result = one.generate(list(MIXED), params(40, stop_token_ids=[early], ignore_eos=True))
    assert (result.tokens, result.stop_reason) == (tokens[:7], early)


def test_ignoring_the_end_token_goes_on_behind_it() -> None:
    """T-C1: as plain decoding of a model without one."""
    tokens = greedy("llama", MIXED, 40)
    found = outpace.load(with_ends(model("llama"), first_seen_at(tokens, 6)), drafter=sure("llama"), k=16)
    result = found.generate(list(MIXED), params(40, ignore_eos=True))
    assert (result.tokens, result.finish_reason, result.stop_reason) == (tokens, "length", None)


def test_an_end_token_at_the_last_wanted_place_is_a_stop() -> None:
    """T-C1: of two ends at the same token, the one that plain decoding would report as the text's own."""
    tokens = greedy("llama", MIXED, 40)
    found = outpace.load(with_ends(model("llama"), first_seen_at(tokens, 6)), drafter=sure("llama"), k=16)
    result = found.generate(list(MIXED), params(7))
    assert (result.tokens, result.finish_reason) == (tokens[:7], "stop")
    assert found.generate(list(MIXED), params(6)).finish_reason == "length"


@pytest.mark.parametrize("end_at", ["generation config", "config", "tokenizer"])
def test_the_end_token_is_found_where_the_model_states_it(end_at: str) -> None:
    """T-C1: in the generation config, else in the config, else in the tokenizer."""
    ended, own = copy.deepcopy(writer()), copy.deepcopy(tokenizer())
    prompt = tokenizer()("the people of")["input_ids"]
    end = first_seen_at(plain(writer(), prompt, 40), 9)
    if end_at == "generation config":
        ended.generation_config.eos_token_id = end
    elif end_at == "config":
        ended.config.eos_token_id = end
    else:
        own.eos_token = own.convert_ids_to_tokens(end)
    result = outpace.load(ended, tokenizer=own).generate(prompt, params(40))
    assert len(result.tokens) == 10 and result.stop_reason == end


def test_a_drafter_that_only_drafts_ends_does_not_end_the_text() -> None:
    """T-C1: a drafted end token counts only where it is the target's own."""
    tokens = greedy("llama", MIXED, 40)
    end = first_seen_at(tokens, 13)
    result = outpace.load(with_ends(model("llama"), end), drafter=drafters.end_spam(end)).generate(list(MIXED))
    assert result.tokens == tokens[:14]
    assert result.stats.num_rejected_tokens > 50


# --------------------------------------------------------------------------------------------------
# Budgets


@pytest.mark.parametrize("method", METHODS)
def test_max_new_tokens_is_exact(method: str) -> None:
    """T-C3: 1, 2, 3, 4, 5 and 6 tokens with K = 5, for every method."""
    texts = full_texts("llama", (MIXED, ONE), 40)
    found = engine("llama", method, texts, k=5)
    for count in range(1, 7):
        results = found.generate([list(MIXED), list(ONE)], params(count))
        assert [result.tokens for result in results] == [greedy("llama", p, 40)[:count] for p in (MIXED, ONE)]
        assert all(result.finish_reason == "length" and result.stop_reason is None for result in results)
        assert all(result.stats.num_draft_failures == 0 for result in results)


@pytest.mark.parametrize("family", ["mistral", "bloom", *STATE_FAMILIES])
def test_max_new_tokens_is_exact_for_every_kind_of_model(family: str) -> None:
    """T-C3: where the accepted drafts would reach past the last wanted token, none of them is drafted."""
    found = outpace.load(model(family), drafter=sure(family), k=5)
    for count in (1, 2, 3, 7):
        result = found.generate(list(MIXED), params(count))
        assert result.tokens == greedy(family, MIXED, 32)[:count]
        assert result.stats.num_drafted_tokens < count


@pytest.mark.parametrize("method", ["lookup", "noisy", "random trees"])
def test_a_model_without_end_and_padding_tokens_decodes(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """T-C7: nothing needs to be padded, so nothing is missing; no error and no warning."""
    bare = model("llama")
    assert bare.config.eos_token_id is None and bare.config.pad_token_id is None
    with caplog.at_level(logging.WARNING):
        found = engine("llama", method, full_texts("llama", (REPEATED,), 40), k=5)
        results = found.generate([list(REPEATED), list(ONE)], params(40))
    assert [result.tokens for result in results] == [greedy("llama", prompt, 40) for prompt in (REPEATED, ONE)]
    assert not caplog.records


@pytest.mark.parametrize("minimum", [3, 12, 40])
def test_min_new_tokens_holds_the_end_back_as_in_transformers(minimum: int) -> None:
    """T-C12: the end token comes at its first place after the minimum, or not at all."""
    tokens = greedy("llama", REPEATED, 40)
    ended = with_ends(model("llama"), first_seen_at(tokens, 3), first_seen_at(tokens, 9))
    wanted = plain(ended, REPEATED, 40, min_new_tokens=minimum)
    assert len(wanted) >= minimum
    for drafter in (sure("llama"), "lookup", "none"):
        result = outpace.load(ended, drafter=drafter, k=8).generate(list(REPEATED), params(40, min_new_tokens=minimum))
        assert result.tokens == wanted


def test_a_budget_beyond_any_memory_costs_nothing_before_it_is_used() -> None:
    """T-C12: a model without a limit of positions, a text that ends after a few tokens, and a processor."""
    end = first_seen_at(greedy("bloom", MIXED, 32), 2)
    found = outpace.load(with_ends(model("bloom"), end), drafter="lookup")
    assert len(found.generate(list(MIXED), params(10**12)).tokens) == 3
    assert len(found.generate(list(MIXED), params(10**12, min_new_tokens=2)).tokens) == 3


def test_the_context_ends_the_wishes_of_a_request_by_name() -> None:
    """T-C12: more tokens than the model has positions are refused before the first one, with the number that fits."""
    small = tiny_model("llama", max_position_embeddings=64)
    found = outpace.load(small)
    with pytest.raises(InputError, match="max_new_tokens to 24 or less"):
        found.generate(list(REPEATED), params(25))
    assert len(found.generate(list(REPEATED), params(24)).tokens) == 24


# --------------------------------------------------------------------------------------------------
# Stop strings

WORDS = "the people of"


def plain_until(stop: Sequence[str], count: int = 60) -> tuple[list[int], str]:
    """transformers' own tokens with these stop strings, and its text without them, cut where the first one begins."""
    prompt = tokenizer()(WORDS)["input_ids"]
    options: dict[str, Any] = {"stop_strings": list(stop), "tokenizer": tokenizer()} if stop else {}
    tokens = plain(writer(), prompt, count, **options)
    text = decoded(tokens)
    starts = [text.find(one) for one in stop if one in text]
    return tokens, text[: min(starts)] if starts else text


def text_engine(drafter: str = "oracle", k: int = 16) -> outpace.Engine:
    """The writer with a drafter that is always right, often right, or copies."""
    prompt = tokenizer()(WORDS)["input_ids"]
    text = [*prompt, *plain(writer(), prompt, 60)]
    chosen: Any = drafter
    if drafter == "oracle":
        chosen = drafters.oracle([text])
    elif drafter == "trees":
        chosen = drafters.random_trees(len(tokenizer()), [text], share_right=0.8)
    return outpace.load(writer(), tokenizer=tokenizer(), drafter=chosen, k=k)


def streamed(found: outpace.Engine, settings: SamplingParams) -> Result:
    """The stream's result, after a check that its pieces are the text and its tokens."""
    pieces = list(found.stream(WORDS, settings))
    result = pieces[-1].result
    assert result is not None and all(piece.result is None for piece in pieces[:-1])
    assert "".join(piece.text for piece in pieces) == result.text
    assert [token for piece in pieces for token in piece.tokens] == result.tokens
    return result


KINDS = (
    *("one token", "three tokens", "inside tokens", "over two rounds", "late first, early second"),
    *("one within the other", "the same beginning", "the first new token", "the last token", "never", "almost"),
)


@cache
def _stops() -> dict[str, list[str]]:
    """Stop strings taken from the plain text, by what makes them hard."""
    tokens, text = plain_until([])
    starts = [len(decoded(tokens[:index])) for index in range(len(tokens))]
    return {
        "one token": [decoded(tokens[9:10])],
        "three tokens": [text[starts[20] : starts[23]]],
        "inside tokens": [text[starts[30] - 2 : starts[33] - 1]],
        "over two rounds": [text[starts[15] : starts[20]]],
        "late first, early second": [text[starts[26] : starts[29]], text[starts[21] : starts[23]]],
        "one within the other": [text[starts[20] : starts[25]], text[starts[21] : starts[23]]],
        "the same beginning": [text[starts[20] : starts[23]], text[starts[20] : starts[23]] + "never"],
        "the first new token": [decoded(tokens[:1])],
        "the last token": [text[-3:]],
        "never": ["this does not occur"],
        "almost": [text[starts[20] : starts[23]] + "~~~", text[starts[31] : starts[33]]],
    }


@pytest.mark.parametrize("drafter", ["oracle", "trees", "suffix", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_ends_the_text_where_plain_decoding_ends_it(kind: str, drafter: str) -> None:
    """T-C5: tokens as transformers', text cut before the stop string, streamed and not, for short and long drafts."""
    stop = _stops()[kind]
    tokens, text = plain_until(stop)
    settings = params(60, stop=stop)
    for k in (3, 16):
        found = text_engine(drafter, k)
        for result in (found.generate(WORDS, settings), streamed(found, settings)):
            assert result.text == text and result.tokens == tokens
            is_met = kind != "never"
            assert result.finish_reason == ("stop" if is_met else "length")
            assert (result.stop_reason in stop) == is_met
            assert result.stats.num_new_tokens == len(tokens)


def test_the_first_of_two_stop_strings_is_reported() -> None:
    """T-C5: by its place in the text, not in the list."""
    stop = _stops()["late first, early second"]
    result = text_engine().generate(WORDS, params(60, stop=stop))
    assert result.stop_reason == stop[1] and stop[1] not in result.text


def test_an_end_token_before_the_stop_string_wins() -> None:
    """T-C5: and its text has no stop string and no special token."""
    stop = _stops()["three tokens"]
    prompt = tokenizer()(WORDS)["input_ids"]
    tokens = plain(writer(), prompt, 60)
    ended = with_ends(writer(), first_seen_at(tokens, 7))
    found = outpace.load(ended, tokenizer=tokenizer(), drafter=drafters.oracle([[*prompt, *tokens]]), k=16)
    result = found.generate(WORDS, params(60, stop=stop))
    assert result.tokens == tokens[:8] and result.stop_reason == tokens[7]
    assert result.text == decoded(tokens[:8])


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    """T-C5: they could not be found, and a stop that is ignored is worse than an error."""
    with pytest.raises(InputError, match="stop strings need a tokenizer"):
        engine("llama", "none").generate(list(ONE), params(4, stop=["x"]))


# --------------------------------------------------------------------------------------------------
# Arguments


@pytest.mark.parametrize("k", [-1, 10**6, "abc", 1.5, True, float("nan")])
def test_a_draft_length_that_makes_no_sense_is_refused(k: Any) -> None:
    """T-C10: in one line, with the argument, the value seen and what is wanted."""
    with pytest.raises(InputError, match="k must be a whole number from 1 to 4096") as error:
        outpace.load(model("llama"), k=k)
    assert repr(k) in str(error.value) and "\n" not in str(error.value)


def test_a_draft_length_of_zero_is_refused_with_the_way_to_plain_decoding() -> None:
    """T-C10: nobody who asks for no drafts should wonder why a drafter was loaded."""
    with pytest.raises(InputError, match="got 0. Use drafter='none' for plain decoding"):
        outpace.load(model("llama"), k=0)


@pytest.mark.parametrize("width", [0, -1, "2", 1.0, True])
def test_a_width_that_makes_no_sense_is_refused(width: Any) -> None:
    """T-C10: before any model is called."""
    with pytest.raises(InputError, match="width must be a whole number"):
        outpace.load(model("llama"), draft_model=model("llama"), width=width)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("max_new_tokens", "8"),
        ("max_new_tokens", 1.0),
        ("min_new_tokens", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("stop", [""]),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("seed", -1),
        ("logprobs", -1),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: float("nan")}),
        ("logits_processors", [3]),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_its_name(field: str, value: Any) -> None:
    """T-C10: each in one line that names it."""
    with pytest.raises(InputError, match=field) as error:
        SamplingParams(**{field: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused(field: str) -> None:
    """T-C10: by the engine, which knows the vocabulary."""
    value: Any = {512: 1.0} if field == "logit_bias" else [512]
    with pytest.raises(InputError, match="Token id 512 is not in the model's vocabulary of 512"):
        engine("llama", "none").generate(list(ONE), params(4, **{field: value}))


@pytest.mark.parametrize("prompt", [[], "", [[]], [512], [-1], [1.0], None, 5, [None], [[1], None], {"a": 1}])
def test_a_prompt_that_is_none_is_refused(prompt: Any) -> None:
    """T-C10: empty ones, ids outside the vocabulary and other types; nothing is decoded, and no row stays behind."""
    found = outpace.load(model("llama"), tokenizer=tokenizer())
    with pytest.raises(InputError):
        found.generate(prompt)
    assert not found._rows and not found._cache.lengths
