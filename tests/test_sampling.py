"""From logits to a token: transformers' distribution, a choice inside it, and bad arguments refused.

Seeds are fixed, so a test passes always or never. "False alarm" is the probability that a faultless sampler
would have failed it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outpace.errors import EngineError, InputError
from outpace.sampling import (
    SamplingParams,
    build_processors,
    choose,
    is_prefix_pure,
    probabilities,
    process,
    warp,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Splitting rows of this size over the threads of a busy machine takes much longer than computing them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def transformers_probabilities(scores: Tensor, params: SamplingParams) -> Tensor:
    """[vocab] float64: what transformers' `generate` samples from, by its own warpers in its own order."""
    warpers = LogitsProcessorList()
    if params.temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    text: Any = torch.zeros(1, 1, dtype=torch.int64)
    warped = warpers(text, scores.unsqueeze(0))
    return warped[0].to(torch.float64).softmax(0)


def check_against_transformers(scores: Tensor, params: SamplingParams) -> Tensor:
    found = probabilities(scores, params)
    assert found.dtype == torch.float64 and found.sum().item() == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(found, transformers_probabilities(scores, params), atol=1e-6, rtol=0)
    return found


def random_scores(vocab_size: int, seed: int, spread: float) -> Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


SETTINGS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.6, 1.0, 1.7), (0, 1, 5, 300), (1.0, 0.9, 0.4), (0.0, 0.05, 0.5)
    )
]


# --------------------------------------------------------------------------------------------------
# The distribution is transformers'


@pytest.mark.parametrize("spread", [0.3, 1.5, 6.0], ids=["flat", "random", "peaked"])
@pytest.mark.parametrize("vocab_size", [8, 100, 256, 257, 1000, 5000])
def test_probabilities_are_those_of_transformers(vocab_size: int, spread: float) -> None:
    """Temperature, top-k, top-p and min-p, alone and in all combinations: equal to 1e-6 for every token.

    The flat ones keep more tokens than the short list holds, so the whole vocabulary is sorted for them.
    """
    for number, params in enumerate(SETTINGS):
        check_against_transformers(random_scores(vocab_size, number, spread), params)


@pytest.mark.parametrize("vocab_size", [20, 1000])
def test_ties_with_the_last_of_the_top_k_all_stay(vocab_size: int) -> None:
    """As in transformers, more than k tokens are kept then; scores of half precision tie often."""
    scores = (random_scores(vocab_size, 3, 2.0) * 2).round() / 2
    for top_k, top_p, min_p in itertools.product((1, 2, 5, 10, 19), (1.0, 0.999), (0.0, 0.01)):
        # No nucleus cut inside a tie: which of the equal tokens stay is up to the order of the sort.
        params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
        if top_p == 1:
            found = check_against_transformers(scores, params)
            if min_p == 0:
                assert (found > 0).sum() == (scores >= scores.sort(descending=True).values[top_k - 1]).sum()
        else:
            wanted = (transformers_probabilities(scores, params) > 0).sum()
            assert (probabilities(scores, params) > 0).sum() == wanted
    four = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0])
    assert (probabilities(four, SamplingParams(temperature=1.0, top_k=2)) > 0).tolist() == [
        False,
        True,
        True,
        True,
        True,
    ]


def test_ties_that_go_on_after_the_short_list_count_in_the_nucleus() -> None:
    """200 different scores, then 4800 equal ones: top-k keeps all, top-p is a share of all their mass."""
    scores = torch.zeros(5000)
    scores[:200] = torch.linspace(3, 0.5, 200)
    for top_k, top_p in itertools.product((201, 210, 255, 256, 300), (0.02, 0.1, 0.2)):
        check_against_transformers(scores, SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p))


def test_a_cut_that_the_short_list_cannot_settle_is_made_on_the_whole_vocabulary() -> None:
    """A nucleus of exactly 255, 256, 257 and more tokens, and a tie that spans the end of the short list."""
    scores = torch.linspace(1, 0, 3000)
    total = scores.double().exp().sum()
    shares = (scores.double().exp().cumsum(0) / total).tolist()
    for kept in (254, 255, 256, 257, 258, 1000, 2999):
        params = SamplingParams(temperature=1.0, top_p=(shares[kept - 1] + shares[kept - 2]) / 2)
        assert (check_against_transformers(scores, params) > 0).sum() == kept
    tied = torch.zeros(3000)
    tied[:250] = 2.0
    params = SamplingParams(temperature=1.0, min_p=0.9)
    assert (check_against_transformers(tied, params) > 0).sum() == 250
    tied[:600] = 2.0
    assert (check_against_transformers(tied, params) > 0).sum() == 600


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    scores=st.lists(st.floats(-20, 20, width=16), min_size=1, max_size=12),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    forbidden=st.lists(st.integers(0, 11), max_size=6),
)
def test_warp_cuts_a_sorted_list_and_nothing_else(
    scores: list[float], temperature: float, top_k: int, top_p: float, min_p: float, forbidden: list[int]
) -> None:
    """What is kept is at least as likely as what is cut, keeps its proportions and holds the best token.

    Forbidden tokens (-inf) have probability 0 whatever is cut, and the rule of each cut holds on its own.
    """
    row = torch.tensor(scores)
    row[[token for token in forbidden if token < len(scores)]] = -torch.inf
    if bool(row.isneginf().all()):
        row[0] = 0.0
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, log_probs = warp(row, params)
    tokens = torch.arange(len(scores)) if ids is None else ids
    assert len(tokens.unique()) == len(tokens) == len(log_probs) >= 1
    assert log_probs.exp().sum().item() == pytest.approx(1, abs=1e-5)
    probs = probabilities(row, params)
    assert (probs[row.isneginf()] == 0).all()
    full = (row.double() / temperature).softmax(0)
    kept, cut = probs > 0, probs == 0
    assert kept[row.argmax()]
    if bool(cut.any()):
        assert full[kept].min() >= full[cut].max() * (1 - 1e-5)
    torch.testing.assert_close(probs[kept], full[kept] / full[kept].sum(), atol=1e-6, rtol=1e-5)
    if 0 < top_k < len(scores):
        assert bool((row[kept] >= row.sort(descending=True).values[top_k - 1]).all())
    assert bool((full[kept] >= min_p * full.max() * (1 - 1e-5)).all())


def test_nothing_is_cut_when_every_cut_is_off() -> None:
    """Then `warp` sorts nothing and names no ids: the whole row is the log-softmax at the temperature."""
    scores = random_scores(1000, 1, 2.0)
    ids, log_probs = warp(scores, SamplingParams(temperature=0.5))
    assert ids is None
    torch.testing.assert_close(log_probs, (scores / 0.5).log_softmax(0))


# --------------------------------------------------------------------------------------------------
# The choice


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.5, top_p=0.7),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=0.9, top_k=6, top_p=0.8, min_p=0.05),
    ],
    ids=["all", "top-k", "top-p", "min-p", "mixed"],
)
def test_choices_stay_in_the_kept_set_and_follow_its_law(params: SamplingParams) -> None:
    """3,000 positions: none outside the kept set, chi-square against `probabilities`. False alarm: 1e-6."""
    scores = random_scores(10, 6, 0.8)
    scores[3] = -torch.inf
    probs = probabilities(scores, params)
    chosen = [choose(scores, params, seed=11, position=position) for position in range(3000)]
    counts = torch.bincount(torch.tensor(chosen), minlength=10)
    assert counts[probs == 0].sum() == 0
    kept = probs > 0
    assert 1 < kept.sum() < 10
    assert stats.chisquare(counts[kept].numpy(), (probs[kept] * len(chosen)).numpy()).pvalue > 1e-6


def test_a_choice_is_a_function_of_scores_seed_and_position() -> None:
    """Asked again it is the same; other seeds and other positions choose otherwise."""
    scores, params = random_scores(1000, 1, 1.0), SamplingParams(temperature=1.0)
    first = [choose(scores, params, 1, position) for position in range(30)]
    assert first == [choose(scores, params, 1, position) for position in range(30)]
    assert len(set(first)) > 20
    assert first != [choose(scores, params, 2, position) for position in range(30)]


def test_cutting_tokens_that_lose_anyway_changes_no_choice() -> None:
    """Noise belongs to token ids: when the choice without a cut is kept by a cut, the cut chooses it too."""
    full, cut = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=20, top_p=0.9)
    same = 0
    for position in range(300):
        scores = random_scores(600, position, 2.5)
        token = choose(scores, full, 8, position)
        if probabilities(scores, cut)[token] > 0:
            assert choose(scores, cut, 8, position) == token
            same += 1
    assert 50 < same < 300


def test_temperature_0_is_the_argmax_without_noise_or_cuts() -> None:
    """The first of equal scores, for every seed; as a distribution, all on that token."""
    for number in range(20):
        scores = random_scores(500, number, 1.0)
        params = SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.5)
        best = int(scores.argmax())
        assert {choose(scores, params, seed, position=3) for seed in range(5)} == {best}
        probs = probabilities(scores, params)
        assert probs[best] == 1 and probs.sum() == 1
    assert choose(torch.tensor([1.0, 4.0, 4.0]), SamplingParams(), 1, 1) == 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-12])
def test_a_tiny_temperature_is_greedy_when_there_is_a_clear_winner(temperature: float) -> None:
    """No overflow to NaN, with and without cuts, for logits of either sign."""
    for number, shift in itertools.product(range(10), (-50.0, 0.0, 50.0)):
        scores = random_scores(500, number, 3.0) + shift
        scores[number * 7] = scores.max() + 0.5
        for params in (
            SamplingParams(temperature=temperature),
            SamplingParams(temperature=temperature, top_p=0.9),
        ):
            assert choose(scores, params, seed=number, position=4) == number * 7


def test_a_huge_temperature_is_uniform() -> None:
    probs = probabilities(random_scores(50, 1, 5.0), SamplingParams(temperature=1e30))
    torch.testing.assert_close(probs, torch.full((50,), 0.02, dtype=torch.float64))


CUTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.999999},
    "min-p": {"temperature": 1.0, "min_p": 1e-9},
    "mixed": {"temperature": 2.0, "top_k": 400, "top_p": 0.99, "min_p": 1e-9},
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("vocab_size", [10, 1000])
def test_a_forbidden_token_is_never_chosen(vocab_size: int, cut: str) -> None:
    """All but two tokens at -inf, as a grammar leaves them: no cut brings a forbidden one back."""
    scores = torch.full((vocab_size,), -torch.inf)
    scores[3], scores[7] = 1.0, 0.5
    params = SamplingParams(**CUTS[cut])
    check = probabilities(scores, params)
    assert check.nonzero().flatten().tolist() == ([3] if params.is_greedy else [3, 7])
    assert {choose(scores, params, 1, position) for position in range(60)} == ({3} if params.is_greedy else {3, 7})


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("bad", ["all forbidden", "all nan", "one nan"])
def test_scores_that_allow_no_token_are_an_error_that_says_where(bad: str, cut: str) -> None:
    """All at -inf, or not a number: an EngineError with the position and a remedy, never token 0."""
    scores = {
        "all forbidden": torch.full((10,), -torch.inf),
        "all nan": torch.full((10,), torch.nan),
        "one nan": torch.tensor([1.0, 2.0, torch.nan, 3.0]),
    }[bad]
    params = SamplingParams(**CUTS[cut])
    with pytest.raises(EngineError, match="position 41 .*no token can be chosen.*float32"):
        choose(scores, params, seed=1, position=41)
    if not params.is_greedy:
        with pytest.raises(EngineError, match="no token can be chosen"):
            probabilities(scores, params)


# --------------------------------------------------------------------------------------------------
# Processors


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=None, eos_token_id=[5, 6], pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.eval()
    return model


class Halved(transformers.LogitsProcessor):
    """A user's processor that gives another result before a bias or penalty than after it."""

    is_prefix_pure = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores / 2


def test_processors_run_in_transformers_order() -> None:
    """Logit bias, repetition penalty, minimum of new tokens, then the user's own: the scores of `generate`.

    Bias before penalty is not penalty before bias, and no penalty on an end-of-text token undoes its ban.
    """
    model = tiny_model()
    prompt = torch.tensor([[7, 8, 7, 9, 5]])
    bias = {7: 2.5, 11: -3.0, 5: 8.0, 30: 1.0}
    mine = [Halved(), NoRepeatNGramLogitsProcessor(2)]
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=8,
        min_new_tokens=4,
        repetition_penalty=1.7,
        sequence_bias=[[[token], value] for token, value in bias.items()],
        logits_processor=LogitsProcessorList(mine),
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    params = SamplingParams(
        repetition_penalty=1.7, logit_bias=bias, min_new_tokens=4, max_new_tokens=8, logits_processors=mine
    )
    processors = build_processors(params, prompt.shape[1], [5, 6], CPU)
    assert len(processors) == 5 and all(is_prefix_pure(processor) for processor in processors)
    assert len(output.scores) >= 5, "the ban on the end ran out within the text"
    for step, (logits, scores) in enumerate(zip(output.logits, output.scores, strict=True)):
        text = output.sequences[:, : prompt.shape[1] + step]
        found = process(logits[0], processors, text)
        torch.testing.assert_close(found, scores[0], rtol=0, atol=1e-6)
        assert bool(found[[5, 6]].isneginf().all()) == (step < 4)
        assert choose(found, params, 1, step) == int(output.sequences[0, prompt.shape[1] + step])


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    """By hand: the output 2, 3, 2 costs token 2 presence + 2 frequency and token 3 presence + frequency."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    processors = build_processors(params, prompt_length=2, eos_token_ids=[], device=CPU)
    logits = torch.tensor([1.0, 1.0, 1.0, 1.0])
    text = torch.tensor([[0, 1, 2, 3, 2]])
    assert process(logits, processors, text).tolist() == [1.0, 1.0, 0.0, 0.25]
    assert process(logits, processors, text[:, :2]).tolist() == [1.0] * 4, "the prompt costs nothing"
    assert logits.tolist() == [1.0] * 4, "the target's logits are not changed in place"


def test_penalties_and_bias_combine_in_order() -> None:
    """By hand: bias makes 1 into 3, repetition penalty 2 halves it to 1.5, presence takes 1: 0.5 is left."""
    params = SamplingParams(logit_bias={2: 2.0}, repetition_penalty=2, presence_penalty=1.0)
    processors = build_processors(params, prompt_length=1, eos_token_ids=[], device=CPU)
    found = process(torch.tensor([1.0, -1.0, 1.0]), processors, torch.tensor([[0, 2, 1]]))
    assert found.tolist() == [0.5, -3.0, 0.5]


def test_processed_scores_are_single_precision_whatever_the_target_computes_in() -> None:
    """Half-precision logits are widened before anything is done to them."""
    logits = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert process(logits, [], None).dtype == torch.float32
    biased = process(
        logits, build_processors(SamplingParams(logit_bias={1: 0.001}), 0, [], CPU), torch.zeros(1, 1).long()
    )
    assert biased.tolist() == pytest.approx([1.0, 2.001])


def test_no_processor_is_built_for_what_is_off() -> None:
    """Plain requests run none; a minimum of new tokens needs an end-of-text token to ban."""
    assert build_processors(SamplingParams(), 3, [5], CPU) == []
    assert build_processors(SamplingParams(min_new_tokens=4), 3, [], CPU) == []
    assert len(build_processors(SamplingParams(min_new_tokens=4), 3, [5], CPU)) == 1


def test_a_processor_is_asked_about_drafts_only_when_it_says_that_it_may() -> None:
    """A user's own callable keeps state for all we know, unless it has `is_prefix_pure = True`."""

    class Mine:
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores

    class Pure(Mine):
        is_prefix_pure = True

    class Odd(Mine):
        is_prefix_pure = "yes"

    assert not is_prefix_pure(Mine())
    assert is_prefix_pure(Pure())
    assert not is_prefix_pure(Odd())
    assert not is_prefix_pure(lambda input_ids, scores: scores)


# --------------------------------------------------------------------------------------------------
# Arguments


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-0.1, -1, math.nan, math.inf, True, "0.5", None, [1.0], 10**400)],
        *[("top_p", value) for value in (0, 0.0, -0.5, 1.5, 90, math.nan, True, "0.9", None)],
        *[("top_k", value) for value in (-1, 5.0, 0.5, True, "5", None, math.nan)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan, False, "0", None)],
        *[("repetition_penalty", value) for value in (0, -1.0, math.nan, math.inf, True, "1.2", None)],
        *[("presence_penalty", value) for value in (math.nan, math.inf, -math.inf, True, "0", None)],
        *[("frequency_penalty", value) for value in (math.nan, math.inf, -math.inf, True, "0", None)],
        *[("max_new_tokens", value) for value in (0, -1, "abc", 1.0, True, None, math.inf)],
        *[("min_new_tokens", value) for value in (-1, "abc", 1.0, True, None)],
        *[("seed", value) for value in (-1, 1.5, "7", True)],
        *[("logprobs", value) for value in (-1, 1.5, "all", True)],
        *[("ignore_eos", value) for value in (None, 1, "no")],
        *[("stop", value) for value in (None, 5, b"end")],
        *[("stop_token_ids", value) for value in (None, 5, "12")],
        *[("logit_bias", value) for value in (None, 5, [5], "5", [(5, 1.0)])],
        *[("logits_processors", value) for value in (None, 5, "none")],
    ],
    ids=lambda value: repr(value)[:12],
)
def test_a_bad_argument_is_refused_by_name(name: str, value: Any) -> None:
    """One InputError, which is a ValueError too, with the argument's name and the value that was seen."""
    with pytest.raises(InputError, match=rf"^{name} .*got {re.escape(repr(value))}\.") as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stop", "", r"stop must hold non-empty strings, got ''"),
        ("stop", [""], r"stop must hold non-empty strings, got ''"),
        ("stop", ["end", ""], r"stop must hold non-empty strings, got ''"),
        ("stop", ["end", 5], r"stop must hold non-empty strings, got 5"),
        ("stop", [None], r"stop must hold non-empty strings, got None"),
        ("stop_token_ids", [-1], r"stop_token_ids.* got -1"),
        ("stop_token_ids", [2, "</s>"], r"stop_token_ids.* got '</s>'"),
        ("stop_token_ids", [2.0], r"stop_token_ids.* got 2\.0"),
        ("stop_token_ids", [True], r"stop_token_ids.* got True"),
        ("logit_bias", {-1: 1.0}, r"logit_bias.* got -1"),
        ("logit_bias", {"5": 1.0}, r"logit_bias.* got '5'"),
        ("logit_bias", {5.0: 1.0}, r"logit_bias.* got 5\.0"),
        ("logit_bias", {True: 1.0}, r"logit_bias.* got True"),
        ("logit_bias", {(5,): 1.0}, r"logit_bias.* got \(5,\)"),
        ("logit_bias", {5: math.nan}, r"logit_bias\[5\].* got nan"),
        ("logit_bias", {5: -math.inf}, r"logit_bias\[5\].* got -inf"),
        ("logit_bias", {5: "1"}, r"logit_bias\[5\].* got '1'"),
        ("logit_bias", {5: None}, r"logit_bias\[5\].* got None"),
        ("logit_bias", {5: True}, r"logit_bias\[5\].* got True"),
        ("logits_processors", [5], r"logits_processors must hold callables, got 5"),
        ("logits_processors", [None], r"logits_processors must hold callables, got None"),
    ],
)
def test_a_bad_entry_is_refused_by_the_name_of_its_argument(name: str, value: Any, message: str) -> None:
    """Lists and mappings are looked into before the first token, not when an entry is first used."""
    with pytest.raises(InputError, match=message):
        SamplingParams(**{name: value})


def test_an_unknown_argument_is_refused() -> None:
    """Nothing is ever ignored silently."""
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_good_arguments_are_taken_as_they_are() -> None:
    """The ends of every range, whole numbers for real ones, one stop string for a list of one."""
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ["a", "b"]
    assert SamplingParams().is_greedy and SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1).is_greedy
    SamplingParams(
        temperature=2, top_p=1, top_k=10**6, min_p=1, repetition_penalty=1, presence_penalty=-2,
        frequency_penalty=2, logit_bias={0: -100}, seed=2**64 + 5, max_new_tokens=1, min_new_tokens=0,
        stop=(), stop_token_ids=(2,), ignore_eos=True, logprobs=0,
        logits_processors=(lambda input_ids, scores: scores,),
    )  # fmt: skip
    SamplingParams(top_p=1e-9, min_p=0.0, temperature=1e-9)
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]
