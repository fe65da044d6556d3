"""What comes back beside the text: scores, logits and a cache to go on from, as transformers gives them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from dropin_reference import (
    CACHE,
    ENTRIES,
    PAD,
    PLAIN,
    WAYS,
    assert_mixed,
    batch,
    call,
    calm,
    calm_fast,
    fast,
    plain,
)
from reference import MIXED, ONE, REPEATED, STATE_FAMILIES, first_seen_at, model
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput

import outpace
from outpace import InputError

DICT = {"return_dict_in_generate": True}
RECORDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "scores": {"output_scores": True},
    "logits": {"output_logits": True},
    "both": {"output_scores": True, "output_logits": True},
}

# --------------------------------------------------------------------------------------------------
# Scores and logits


def assert_close_where_going_on(found: Any, wanted: Any, going_on: Tensor) -> None:
    """One [rows, vocab] float32 entry per step, equal to 1e-5. going_on: [rows, steps] bool."""
    assert isinstance(found, tuple) and len(found) == len(wanted) == going_on.shape[1]
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.float32
        rows = going_on[:, step]
        torch.testing.assert_close(ours[rows], theirs[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_end", [False, True], ids=["to the budget", "to end tokens"])
@pytest.mark.parametrize("what", RECORDS)
def test_scores_and_logits_are_those_of_transformers(what: str, has_end: bool, way: str, entry: str) -> None:
    """T-F1: one entry per new token, to 1e-5 for rows that have not ended, with a penalty between logits and scores."""
    inputs, options = batch(MIXED, ONE, REPEATED), {"repetition_penalty": 1.2} | DICT | RECORDS[what]
    length = inputs["input_ids"].shape[1]
    tokens = plain(calm(), inputs, {"repetition_penalty": 1.2})[:, length:].tolist()
    if has_end:
        options["eos_token_id"] = [first_seen_at(row, at) for row, at in zip(tokens, (12, 5, 2), strict=True)]
    wanted = calm().generate(**inputs, **PLAIN, **options)
    found = call(entry, calm_fast(way), **inputs, **PLAIN, **options)
    assert isinstance(found, GenerateDecoderOnlyOutput) and found.keys() == wanted.keys()
    assert found.sequences.tolist() == wanted.sequences.tolist()
    new = wanted.sequences[:, length:]
    is_end = torch.isin(new, torch.tensor(options.get("eos_token_id", [-1])))
    going_on = is_end.int().cumsum(1) - is_end.int() == 0
    assert bool(going_on.all()) != has_end
    for name in ("scores", "logits"):
        assert (getattr(found, name) is None) == (getattr(wanted, name) is None)
        if getattr(wanted, name) is not None:
            assert_close_where_going_on(getattr(found, name), getattr(wanted, name), going_on)
    if what == "both":
        assert not torch.equal(found.scores[0], found.logits[0])
    if way != "suffix" and not has_end:
        assert_mixed(calm_fast(way).last_stats)


@pytest.mark.parametrize("entry", ENTRIES)
def test_scores_are_only_recorded_where_a_dict_is_returned(entry: str) -> None:
    """As in transformers: without return_dict_in_generate a tensor comes back, whatever else is asked for."""
    found = call(entry, calm_fast("tree"), **batch(MIXED), **PLAIN, **RECORDS["both"])
    assert found.tolist() == calm().generate(**batch(MIXED), **PLAIN, **RECORDS["both"]).tolist()


@pytest.mark.parametrize("way", WAYS)
def test_transition_scores_are_computed_from_the_result(way: str) -> None:
    """T-F1: model.compute_transition_scores gives the log-probabilities of the tokens, as for transformers' result."""
    inputs, options = batch(MIXED, ONE), DICT | RECORDS["scores"]
    wanted = calm().generate(**inputs, **PLAIN, **options)
    found = calm_fast(way).generate(**inputs, **PLAIN, **options)
    for normalised in (False, True):
        theirs, ours = (
            calm().compute_transition_scores(result.sequences, result.scores, normalize_logits=normalised)
            for result in (wanted, found)
        )
        assert ours.shape == (2, 24) and len(set(ours.flatten().tolist())) >= 5
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


# --------------------------------------------------------------------------------------------------
# Caches


def assert_same_cache(found: Any, wanted: Any, paddings: tuple[int, ...] = (0,)) -> None:
    """Layers of the same kinds and lengths, whose columns are equal but for those of padding."""
    assert type(found) is type(wanted) and int(found.get_seq_length()) == int(wanted.get_seq_length())
    for ours, theirs in zip(found.layers, wanted.layers, strict=True):
        assert type(ours) is type(theirs)
        for mine, right in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert mine.shape == right.shape and mine.dtype == right.dtype
            for row, padding in enumerate(paddings):
                torch.testing.assert_close(mine[row, :, padding:], right[row, :, padding:], rtol=0, atol=2e-4)


class FirstLength:
    """How many tokens the first forward is given after `reset`."""

    def __init__(self, model: Any) -> None:
        self.length: int | None = None
        self.handle = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, arguments: Any, options: Any) -> None:
        ids = options.get("input_ids", arguments[0] if arguments else None)
        self.length = ids.shape[1] if self.length is None else self.length


FOLLOW_UP = ((71, 72, 73, 74, 75), (301, 302, 303, 304, 305))


def turns(generate: Any, prompts: tuple[tuple[int, ...], ...], makes_cache: Any) -> tuple[list[Tensor], Any, list[Any]]:
    """Two turns of a chat: (both texts, the cache after them, a copy of the cache after each)."""
    inputs, texts, copies = batch(*prompts), [], []
    cache = makes_cache()
    for _ in range(2):
        given = {} if cache is None else {CACHE: cache}
        result = generate(**inputs, **(PLAIN | {"max_new_tokens": 14}), **DICT, **given)
        cache = result[CACHE]
        texts.append(result.sequences)
        copies.append(copy.deepcopy(cache))
        more = torch.tensor(FOLLOW_UP[: len(prompts)])
        ids = torch.cat([result.sequences, more], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, inputs["attention_mask"].shape[1] :])], 1)
        inputs = {"input_ids": ids, "attention_mask": mask}
    return texts, cache, copies


MAKERS: dict[str, Any] = {
    "returned": lambda model: None,
    "user's, configured": lambda model: DynamicCache(config=model.config),
    "user's, plain": lambda model: DynamicCache(),
}


@pytest.mark.parametrize("prompts", [(MIXED, REPEATED[:30]), (MIXED, ONE)], ids=["equal lengths", "padded"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_chat_of_two_turns_goes_on_from_its_cache(family: str, maker: str, prompts: Any) -> None:
    """The second turn reads only what is new, its text is transformers', and so are the caches after both turns."""
    target, stats = model(family), []
    paddings = tuple(len(prompts[0]) - len(prompt) for prompt in prompts)
    texts, _, caches = turns(target.generate, prompts, lambda: MAKERS[maker](target))
    assert len(set(texts[1][:, -14:].flatten().tolist())) >= 5
    for way, entry in zip(("chain", "tree"), ENTRIES, strict=True):
        accelerated, made = fast(target, way, family), MAKERS[maker](target)

        def generate(accelerated: Any = accelerated, entry: str = entry, **arguments: Any) -> Any:
            return call(entry, accelerated, **arguments)

        found, cache, copies = turns(generate, prompts, lambda made=made: made)
        stats += accelerated.last_stats
        assert [text.tolist() for text in found] == [text.tolist() for text in texts]
        assert made is None or cache is made
        for ours, theirs in zip(copies, caches, strict=True):
            assert_same_cache(ours, theirs, paddings)
    assert_mixed(stats)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_cached_part_of_a_text_is_not_read_again(family: str, entry: str) -> None:
    """The first forward of the second turn gets what is new and the drafts behind it, and nothing else."""
    target, accelerated = model(family), fast(model(family), "tree", family)
    first = target.generate(**batch(MIXED), **PLAIN, **DICT)
    ids = torch.cat([first.sequences, torch.tensor([FOLLOW_UP[0]])], 1)
    watch = FirstLength(target)
    call(entry, accelerated, ids, **PLAIN, **{CACHE: first[CACHE]})
    watch.handle.remove()
    assert watch.length is not None and 6 <= watch.length <= 6 + 6


@pytest.mark.parametrize("entry", ENTRIES)
def test_caches_may_pass_from_transformers_to_us_and_back(entry: str) -> None:
    """And a cache that was filled by a forward over a common prefix serves several prompts, from copies."""
    target, ids = model("llama"), torch.tensor([MIXED])
    prefix = DynamicCache(config=target.config)
    with torch.no_grad():
        target(input_ids=ids[:, :20], **{CACHE: prefix})
    wanted = plain(target, batch(MIXED), {})
    more = torch.tensor([FOLLOW_UP[0]])
    second = plain(target, {"input_ids": torch.cat([wanted, more], 1)}, {})
    for way in WAYS:
        accelerated = fast(target, way)
        for others in (MIXED, (*MIXED[:20], 5, 6)):
            found = call(entry, accelerated, torch.tensor([others]), **PLAIN, **{CACHE: copy.deepcopy(prefix)})
            assert found.tolist() == plain(target, batch(others), {}).tolist()
        theirs = target.generate(ids, **PLAIN, **DICT)[CACHE]
        ours = call(entry, accelerated, ids, **PLAIN, **DICT)[CACHE]
        follow_up = torch.cat([wanted, more], 1)
        assert call(entry, accelerated, follow_up, **PLAIN, **{CACHE: theirs}).tolist() == second.tolist()
        assert target.generate(follow_up, **PLAIN, **{CACHE: ours}).tolist() == second.tolist()


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_cache_goes_on_after_an_end_token_and_with_sampling(entry: str) -> None:
    """It holds the text up to its last token, wherever drafts reached."""
    target, wanted = model("llama"), plain(model("llama"), batch(MIXED), {})
    end = first_seen_at(wanted[0, 30:].tolist(), 9)
    for way in WAYS:
        cache = DynamicCache(config=target.config)
        text = call(entry, fast(target, way), **batch(MIXED), **PLAIN, eos_token_id=end, **{CACHE: cache})
        assert text.shape[1] == 40 and cache.get_seq_length() == 39
        found = call(entry, fast(target, way), text, **PLAIN, **{CACHE: cache})
        assert found[:, : wanted.shape[1]].tolist() == wanted.tolist() and found.shape[1] == 64
        options = PLAIN | {"do_sample": True, "seed": 3}
        alone = call(entry, fast(target, way), found, **options).tolist()
        assert call(entry, fast(target, way), found, **options, **{CACHE: cache}).tolist() == alone


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_cache_of_rows_that_end_early_holds_what_is_text_in_all_of_them(entry: str) -> None:
    """Up to where the first row ended it is transformers'; behind that, a row would have to be fed its pad tokens."""
    target, inputs = model("llama"), batch(MIXED, ONE)
    texts = plain(target, inputs, {})[:, 30:].tolist()
    ends = [first_seen_at(text, at) for text, at in zip(texts, (12, 5), strict=True)]
    theirs = target.generate(**inputs, **PLAIN, **DICT, eos_token_id=ends)[CACHE]
    for way in WAYS:
        result = call(entry, fast(target, way), **inputs, **PLAIN, **DICT, eos_token_id=ends)
        assert result.sequences.shape[1] == 30 + 13 and result[CACHE].get_seq_length() == 30 + 5
        for ours, layer in zip(result[CACHE].layers, theirs.layers, strict=True):
            for row, padding in enumerate((0, 29)):
                for mine, right in ((ours.keys, layer.keys), (ours.values, layer.values)):
                    torch.testing.assert_close(mine[row, :, padding:], right[row, :, padding:35], rtol=0, atol=2e-4)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_exception_leaves_a_users_cache_as_it_was(entry: str) -> None:
    """Nothing of a text that failed is written into it."""

    def failing(input_ids: Tensor, scores: Tensor) -> Tensor:
        raise ArithmeticError("from a user's processor")

    target, cache = model("llama"), DynamicCache(config=model("llama").config)
    with torch.no_grad():
        target(input_ids=torch.tensor([MIXED[:20]]), **{CACHE: cache})
    before = copy.deepcopy(cache)
    with pytest.raises(ArithmeticError):
        call(entry, fast(target), **batch(MIXED), **PLAIN, logits_processor=[failing], **{CACHE: cache})
    assert_same_cache(cache, before)


def test_an_empty_static_cache_is_filled_as_transformers_fills_it() -> None:
    """Nothing has to be read from it."""
    target, caches = model("llama"), [StaticCache(config=model("llama").config, max_cache_len=80) for _ in range(2)]
    texts = [
        generate(**batch(MIXED), **PLAIN, **{CACHE: cache}).tolist()
        for generate, cache in zip((target.generate, fast(target).generate), caches, strict=True)
    ]
    assert texts[0] == texts[1]
    assert_same_cache(caches[1], caches[0])


# --------------------------------------------------------------------------------------------------
# Caches that are refused


def _filled(cache: Any, length: int = 20) -> Any:
    with torch.no_grad():
        model("llama")(input_ids=torch.tensor([MIXED[:length]]), **{CACHE: cache})
    return cache


class _OddLayer(DynamicLayer):
    """A layer that may keep anything, as a quantised one does."""


def _odd() -> Any:
    cache = _filled(DynamicCache(config=model("llama").config))
    cache.layers[1].__class__ = _OddLayer
    return cache


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", ["static", "odd"])
def test_a_cache_of_another_kind_is_refused_by_its_name(kind: str, entry: str) -> None:
    """A static one that holds text, and one whose layers are not known: before the first token."""
    config = model("llama").config
    cache = _odd() if kind == "odd" else _filled(StaticCache(config=config, max_cache_len=80))
    with pytest.raises(InputError, match=f"past_key_values is a {type(cache).__name__} that cannot be gone on from"):
        call(entry, fast(model("llama")), **batch(MIXED), **PLAIN, **{CACHE: cache})


@pytest.mark.parametrize("entry", ENTRIES)
def test_new_tokens_without_the_text_before_them_are_refused(entry: str) -> None:
    """transformers takes them beside a mask of the whole text; drafts are made from the text, so it must be given."""
    mask = torch.ones(1, 23, dtype=torch.int64)
    cache = _filled(DynamicCache(config=model("llama").config))
    with pytest.raises(InputError, match="give the whole text as input_ids"):
        call(entry, fast(model("llama")), torch.tensor([[5, 6, 7]]), attention_mask=mask, **PLAIN, **{CACHE: cache})


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("length", [3, 19, 20])
def test_a_cache_that_is_not_shorter_than_the_text_is_refused(length: int, entry: str) -> None:
    """Only new tokens without a mask, a text that was cut, and a cache of the very text: no token is left to feed."""
    cache = _filled(DynamicCache(config=model("llama").config))
    with pytest.raises(InputError):
        call(entry, fast(model("llama")), torch.tensor([MIXED[:length]]), **PLAIN, **{CACHE: cache})


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_models_with_recurrent_state_take_no_cache(family: str, entry: str) -> None:
    """T-H7: refused by name."""
    accelerated = outpace.accelerate(model(family), drafter="suffix")
    cache = DynamicCache(config=model(family).config)
    with pytest.raises(InputError, match="recurrent state"):
        call(entry, accelerated, **batch(MIXED), **PLAIN, **{CACHE: cache})


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_models_with_recurrent_state_give_no_cache(family: str, entry: str) -> None:
    """T-H7: the text is transformers', as a tensor and in a dict, where the cache is None."""
    accelerated, wanted = outpace.accelerate(model(family), drafter="suffix"), plain(model(family), batch(MIXED), {})
    found = call(entry, accelerated, **batch(MIXED), **PLAIN, **DICT)
    assert getattr(found, CACHE) is None and found.sequences.tolist() == wanted.tolist()
    assert call(entry, accelerated, **batch(MIXED), **PLAIN).tolist() == wanted.tolist()


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_cache_that_does_not_fit_is_an_error_and_nothing_stays_behind(entry: str) -> None:
    """Of another model, and of fewer rows; as in transformers no text is given."""
    accelerated, others = fast(model("llama")), DynamicCache(config=model("gpt2").config)
    with torch.no_grad():
        model("gpt2")(input_ids=torch.tensor([MIXED[:20]]), **{CACHE: others})
    for inputs, cache in ((batch(MIXED), others), (batch(MIXED, MIXED), _filled(DynamicCache()))):
        with pytest.raises((RuntimeError, IndexError, InputError)):
            call(entry, accelerated, **inputs, **PLAIN, **{CACHE: cache})
        assert not accelerated.engine._rows and not accelerated.engine._cache.lengths
        assert PAD not in call(entry, accelerated, **batch(MIXED), **PLAIN)
