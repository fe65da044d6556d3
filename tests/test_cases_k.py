"""Settings do what they say, counts add up, and nothing of a call is left behind in the user's objects."""

from __future__ import annotations

import copy
import json
import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from reference import (
    METHODS,
    MIXED,
    ONE,
    REPEATED,
    engine,
    first_seen_at,
    full_texts,
    greedy,
    itself,
    model,
    noisy,
    params,
    plain,
    sure,
    tokenizer,
    with_ends,
    writer,
)
from torch import Tensor, nn

import outpace
from outpace import InputError, Stats
from outpace.drafters.base import NoDrafter
from outpace.drafters.model import ModelDrafter
from outpace.drafters.suffix import SuffixDrafter
from outpace.session import to_dict
from outpace.target import Target
from outpace.testing import drafters
from outpace.testing.models import scores, tiny_model, with_noise

# --------------------------------------------------------------------------------------------------
# K


class Passes:
    """Counts a model's forwards by a hook."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        model.register_forward_hook(self._note)

    def _note(self, *arguments: Any) -> None:
        self.count += 1


@pytest.mark.parametrize(("k", "num_passes"), [(1, 20), (5, 7), (20, 2), (39, 1)])
def test_forty_tokens_take_forty_over_k_plus_one_passes_of_the_target(k: int, num_passes: int) -> None:
    """T-K1: with drafts that are all right, of a model, of an oracle, alone and in a batch; the prompt costs none."""
    target = tiny_model("llama")
    passes = Passes(target)
    prompts_of_rows: list[list[tuple[int, ...]]] = [[MIXED], [MIXED, REPEATED[:30]]]
    for drafter in (sure("llama"), drafters.oracle(full_texts("llama", (MIXED, REPEATED[:30]), 40))):
        found = outpace.load(target, drafter=drafter, k=k)
        for prompts in prompts_of_rows:
            passes.count = 0
            results = found.generate([list(prompt) for prompt in prompts], params(40))
            assert passes.count == num_passes
            assert [result.stats.num_verifications for result in results] == [num_passes] * len(prompts)
            assert [result.tokens for result in results] == [greedy("llama", prompt, 40) for prompt in prompts]


def test_a_draft_model_is_asked_once_per_drafted_token() -> None:
    """T-K1: a round of K drafts costs the draft model K passes for all rows together, and no round an extra one."""
    target, draft = tiny_model("llama"), tiny_model("llama")
    found = outpace.load(target, drafter=ModelDrafter(Target(draft), 512, 512, 1, confidence_threshold=0.0), k=5)
    passes = Passes(draft)
    for prompts in ([MIXED], [MIXED, REPEATED]):
        passes.count = 0
        found.generate([list(prompt) for prompt in prompts], params(36))
        assert passes.count == 6 * 5


def test_a_drafter_object_of_any_name_is_the_one_that_drafts() -> None:
    """T-K1: also one whose name is that of a built-in one."""
    for name in ("model", "suffix", "lookup", "none", "mine"):
        drafter = drafters.oracle(full_texts("llama", (MIXED,), 40))
        drafter.name = name
        result = outpace.load(model("llama"), drafter=drafter).generate(list(MIXED), params(40))
        assert drafter.num_proposals > 0 and result.stats.drafter == name
    assert isinstance(outpace.load(model("llama"), drafter="suffix").drafter, SuffixDrafter)
    assert isinstance(outpace.load(model("llama"), drafter="none").drafter, NoDrafter)
    assert isinstance(outpace.load(model("llama"), draft_model=noisy("llama")).drafter, ModelDrafter)


def test_a_draft_model_that_is_the_target_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """T-K4: a warning, as it cannot be faster; the text is right. Other weights are no reason for one."""
    with caplog.at_level(logging.WARNING, logger="outpace"):
        found = outpace.load(model("llama"), draft_model=model("llama"))
    (record,) = caplog.records
    assert "The draft model is the target itself" in record.message
    assert found.generate(list(MIXED), params(40)).tokens == greedy("llama", MIXED, 40)
    caplog.clear()
    outpace.load(model("llama"), draft_model=noisy("llama"))
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "medium"}, "drafter must be auto, "),
        ({"drafter": "model"}, "needs draft_model"),
        ({"drafter": "suffix", "draft_model": 1}, "would not use it"),
        ({"drafter": object()}, "lacks"),
        ({"drafter": drafters.empty(), "draft_model": 1}, "would not use it"),
        ({"drafter": "suffix", "width": 2}, "would not use it"),
        ({"acceptance": "exact"}, "acceptance must be one of coupled, rejection, typical"),
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"dtype": "bfloat16"}, "move or cast the model object yourself"),
        ({"device": "cpu"}, "move or cast the model object yourself"),
        ({"prefill_chunk": 0}, "prefill_chunk must be a whole number"),
        ({"draft_model": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    """T-K4: right or refused, never ignored; in one line."""
    with pytest.raises(InputError, match=message) as error:
        outpace.load(model("llama"), **options)
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------
# No trace


def state_of(target: Any, tokens: Any) -> dict[str, Any]:
    """Copies of everything that a user could find changed."""
    modules = dict(target.named_modules())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        "config": copy.deepcopy(target.config.to_dict()),
        "attention": target.config._attn_implementation,
        "generation config": copy.deepcopy(target.generation_config.to_dict()),
        "weights": {name: weight.clone() for name, weight in target.state_dict().items()},
        "places": {name: weight.data_ptr() for name, weight in target.state_dict().items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "forwards": {name: module.forward.__func__ for name, module in modules.items()},
        "hooks": {name: [len(getattr(module, hook)) for hook in hooks] for name, module in modules.items()},
        "training": {name: module.training for name, module in modules.items()},
        "gradients": {name: (weight.requires_grad, weight.grad) for name, weight in target.named_parameters()},
        "vocabulary": dict(tokens.get_vocab()),
        "tokenizer": {name: repr(value) for name, value in sorted(vars(tokens).items())},
        "backend": tokens.backend_tokenizer.to_str(),
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        "torch": (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()),
    }


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, value in before.items():
        if name == "weights":
            assert value.keys() == after[name].keys()
            assert all(torch.equal(value[key], after[name][key]) for key in value)
        else:
            assert value == after[name], name


def _raising(input_ids: Tensor, scores: Tensor) -> Tensor:
    raise ArithmeticError("from a user's processor")


def _use(found: outpace.Engine, prompt: list[int]) -> None:
    found.generate([prompt, prompt[:3]], params(16, repetition_penalty=1.2, stop=["~~"], logprobs=1))
    found.generate("the people of", params(16, temperature=1.0, min_new_tokens=4))
    list(found.stream([{"role": "user", "content": "the"}], params(8)))


def _fail(found: outpace.Engine, prompt: list[int]) -> None:
    with pytest.raises(ArithmeticError):
        found.generate(prompt, params(16, logits_processors=[_raising]))
    with pytest.raises(InputError):
        found.generate([100000], params(16))


@pytest.mark.parametrize("what", [_use, _fail], ids=["after calls", "after exceptions"])
@pytest.mark.parametrize("method", ["suffix", "noisy trees", "random trees"])
def test_nothing_of_a_call_is_left_behind(method: str, what: Callable[..., None]) -> None:
    """T-K3: model, configs, tokenizers, random generators and torch's settings are as before; also after the end."""
    target, own = with_ends(writer(), 70), copy.deepcopy(tokenizer())
    prompt = own("the people of the")["input_ids"]
    text_before = plain(target, prompt, 24)
    draft = with_noise(target, 0.05)
    options: dict[str, dict[str, Any]] = {
        "suffix": {},
        "noisy trees": {"draft_model": draft, "draft_tokenizer": own, "width": 3},
        "random trees": {"drafter": drafters.random_trees(target.config.vocab_size)},
    }
    before, draft_before = state_of(target, own), state_of(draft, own)
    found = outpace.load(target, tokenizer=own, **options[method])
    assert_unchanged(before, state_of(target, own))
    what(found, prompt)
    assert_unchanged(before, state_of(target, own))
    assert plain(target, prompt, 24) == text_before
    del found
    assert_unchanged(before, state_of(target, own))
    assert_unchanged(draft_before, state_of(draft, own))
    assert plain(target, prompt, 24) == text_before


def test_a_refused_model_is_left_as_it_was() -> None:
    """T-K3: the probe's forwards change nothing either."""
    target = tiny_model("mamba")
    before = state_of(target, tokenizer())
    with pytest.raises(outpace.LoadError):
        outpace.load(target)
    assert_unchanged(before, state_of(target, tokenizer()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_models_are_left_alone_while_a_tree_is_being_checked(attention: str) -> None:
    """T-K3: a model in another thread, in the middle of our forward, masks as ever; so does plain generate after it."""
    prompts = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    target = tiny_model("gemma3", attn_implementation=attention)
    bystanders = [tiny_model(family, attn_implementation=attention) for family in ("mistral", "gemma3")]

    def texts() -> list[list[list[int]]]:
        options = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
        return [one.generate(prompts, attention_mask=mask, **options).tolist() for one in (*bystanders, target)]

    wanted = texts()
    found = outpace.load(target, drafter=drafters.random_trees(512, full_texts("gemma3", (MIXED, ONE), 32)), k=9)
    others: list[list[list[list[int]]]] = []

    def meanwhile(*arguments: Any) -> None:
        """Runs the bystanders in a thread of their own while the layer, and our forward around it, wait."""
        if threading.current_thread() is threading.main_thread() and len(others) < 3:
            thread = threading.Thread(target=lambda: others.append(texts()[:2]))
            thread.start()
            thread.join()

    handle = target.model.layers[1].register_forward_pre_hook(meanwhile)
    results = found.generate([list(MIXED), list(ONE)], params(32))
    handle.remove()
    assert [result.tokens for result in results] == [greedy("gemma3", prompt, 32) for prompt in (MIXED, ONE)]
    assert others == [wanted[:2]] * 3
    assert texts() == wanted


def test_the_models_own_generate_can_be_called_between_our_steps() -> None:
    """T-K3: on the very model that is being decoded; both texts are right."""
    texts = full_texts("mistral", (MIXED, ONE), 32)
    found = outpace.load(model("mistral"), drafter=drafters.random_trees(512, texts), k=6)
    sessions = [found.submit(list(prompt), params(32)) for prompt in (MIXED, ONE)]
    while any(not session.is_finished for session in sessions):
        found.step()
        assert plain(model("mistral"), REPEATED, 12) == greedy("mistral", REPEATED, 32)[:12]
    assert [session.new_tokens for session in sessions] == [list(text[-32:]) for text in texts]


def test_two_engines_share_a_model() -> None:
    """T-K3: with different drafters, used in turns; and a model that is target here and draft there."""
    first = engine("llama", "random trees", full_texts("llama", (MIXED,), 40), k=6)
    second = engine("llama", "noisy trees", k=6)
    third = outpace.load(noisy("llama"), draft_model=model("llama"), k=6)
    wanted = plain(noisy("llama"), MIXED, 40)
    streams = [found.stream(list(MIXED), params(40)) for found in (first, second, third)]
    tokens: list[list[int]] = [[], [], []]
    for _ in range(40):
        for index, stream in enumerate(streams):
            chunk = next(stream, None)
            tokens[index] += chunk.tokens if chunk is not None else []
    assert tokens == [greedy("llama", MIXED, 40), greedy("llama", MIXED, 40), wanted]


# --------------------------------------------------------------------------------------------------
# Statistics


def assert_counts_add_up(stats: Stats) -> None:
    """The identities of the documentation, for one finished request."""
    assert stats.num_new_tokens == stats.num_accepted_tokens + stats.num_verifications
    assert stats.num_drafted_tokens == stats.num_accepted_tokens + stats.num_rejected_tokens
    assert stats.num_rejected_tokens >= 0
    assert stats.num_rounds_without_draft <= stats.num_verifications
    assert len(stats.drafted_by_depth) == len(stats.accepted_by_depth)
    assert sum(stats.accepted_by_depth) == stats.num_accepted_tokens
    assert sum(stats.drafted_by_depth) <= stats.num_drafted_tokens
    for counts in (stats.drafted_by_depth, stats.accepted_by_depth):
        assert counts == sorted(counts, reverse=True)
    for accepted, drafted in zip(stats.accepted_by_depth, stats.drafted_by_depth, strict=True):
        assert 0 <= accepted <= drafted
    if stats.drafted_by_depth:
        assert stats.drafted_by_depth[0] == stats.num_verifications - stats.num_rounds_without_draft
    assert stats.tokens_per_pass == pytest.approx(stats.num_new_tokens / stats.num_verifications)
    assert stats.prefill_seconds > 0 and stats.decode_seconds >= 0 and stats.decode_tokens_per_second >= 0
    assert json.loads(json.dumps(to_dict(stats)))["num_rejected_tokens"] == stats.num_rejected_tokens


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "typical"])
@pytest.mark.parametrize("method", METHODS)
def test_the_counts_of_a_request_add_up(method: str, acceptance: Any) -> None:
    """T-K6: emitted = accepted + rounds, drafted = accepted + rejected, for every method and rule."""
    target = tiny_model("llama")
    options = METHODS[method]("llama", full_texts("llama", (MIXED,), 40))
    if method == "union" and acceptance != "coupled":
        with pytest.raises(outpace.InputError, match="needs acceptance='coupled'"):
            outpace.load(target, **options, acceptance=acceptance)
        return
    found = outpace.load(target, **options, k=6, acceptance=acceptance)
    passes = Passes(target)
    for temperature in (0.0, 1.0):
        passes.count = 0
        result = found.generate(list(MIXED), params(30, temperature=temperature, seed=5))
        assert_counts_add_up(result.stats)
        assert result.stats.num_new_tokens == len(result.tokens) == 30
        if method != "early-exit":  # which runs layers of the target itself
            assert result.stats.num_verifications + result.stats.num_prefill_passes == passes.count
        assert (result.stats.acceptance, result.stats.num_prompt_tokens) == (acceptance, 30)
        assert result.stats.is_lossless == (acceptance != "typical" or temperature == 0)
        assert result.stats.num_draft_failures == 0


ENDS: dict[str, dict[str, Any]] = {
    "end token": {"stop_token_ids": list(range(0, 360, 6))},
    "stop string": {"stop": ["a", "o", "th"]},
    "budget": {},
}


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "typical"])
@pytest.mark.parametrize("end", ENDS)
def test_the_counts_add_up_when_a_text_ends_inside_a_draft(end: str, acceptance: Any) -> None:
    """T-K6: what is behind the end does not exist, neither in the counts nor in the tokens and log-probabilities."""
    draft = with_noise(writer(), 0.02)
    found = outpace.load(
        writer(), tokenizer=tokenizer(), draft_model=draft, draft_tokenizer=tokenizer(), k=8, acceptance=acceptance
    )
    prompt = tokenizer()("the people of")["input_ids"]
    num_cut = 0
    for seed in range(40):
        settings = params(12, temperature=1.0, seed=seed, logprobs=0, **ENDS[end])
        result = found.generate(prompt, settings)
        assert len(result.logprobs) == len(result.tokens) == result.stats.num_new_tokens
        assert not set(result.tokens[:-1]) & set(settings.stop_token_ids)
        assert result.finish_reason == ("length" if end == "budget" else result.finish_reason)
        num_cut += result.finish_reason == "stop" and result.stats.num_drafted_tokens > 0
        assert_counts_add_up(result.stats)
    assert num_cut >= 5 or end == "budget"


def test_rounds_without_drafts_are_counted_as_such() -> None:
    """T-K6: and are no drafted tokens; plain decoding consists of them."""
    result = engine("llama", "none").generate(list(MIXED), params(20))
    assert (result.stats.num_rounds_without_draft, result.stats.num_verifications) == (20, 20)
    assert (result.stats.num_drafted_tokens, result.stats.tokens_per_pass) == (0, 1.0)
    result = engine("llama", "oracle", full_texts("llama", (MIXED,), 40), k=3).generate(list(MIXED), params(20))
    assert (result.stats.num_rounds_without_draft, result.stats.num_verifications) == (0, 5)
    assert result.stats.accepted_by_depth == result.stats.drafted_by_depth == [5, 5, 5]


def test_the_first_token_is_timed_apart_from_the_others() -> None:
    """T-K6: prefill until the first token, decoding from there; a longer prompt takes the longer prefill."""
    target = tiny_model("llama", max_position_embeddings=4096)
    found = outpace.load(target, drafter="none")
    short, long = (found.generate([5] * size, params(3)).stats for size in (4, 3000))
    assert 0 < short.prefill_seconds < long.prefill_seconds
    assert short.num_prompt_tokens == 4 and long.num_prompt_tokens == 3000


# --------------------------------------------------------------------------------------------------
# A guard of this file


def check_references(models: Sequence[Any]) -> None:
    """Reference models are shared by tests, so no test may have changed them."""
    for one in models:
        assert not one.training and not one._forward_hooks and not one._forward_pre_hooks


def test_the_shared_models_are_as_they_were_built() -> None:
    """The guard of all tests that share them: bit by bit those of a fresh one."""
    check_references([model("llama"), noisy("llama"), itself("llama")])
    fresh = tiny_model("llama")
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model("llama").parameters(), strict=True))
    assert torch.equal(scores(itself("llama"), MIXED), scores(fresh, MIXED))
    assert first_seen_at(greedy("llama", MIXED, 40), 0) == greedy("llama", MIXED, 40)[0]


def test_a_text_of_one_pass_has_a_speed() -> None:
    """All tokens came with the first: they took the time until it was there, not no time at all."""
    stats = Stats(num_new_tokens=8, num_verifications=1, prefill_seconds=0.5, decode_seconds=1e-7)
    assert stats.decode_tokens_per_second == 16
    stats = Stats(num_new_tokens=9, num_verifications=4, prefill_seconds=0.5, decode_seconds=2.0)
    assert stats.decode_tokens_per_second == 4
