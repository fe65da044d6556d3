"""The judge of `verify`: rounding is measured, the first difference is found, and it is a tie exactly within rounding.

Results are constructed: a real plain one, and a copy with a token swapped. What the judge says of the swapped token
is compared with scores from a forward without any cache and with cuts computed here from the whole vocabulary.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import outpace
from outpace import Result, audit, noise
from outpace.audit import Difference
from outpace.drafters.suffix import SuffixDrafter
from outpace.engine import Engine
from outpace.sampling import SamplingParams
from outpace.target import Target
from outpace.testing.drafters import random_trees
from outpace.testing.models import PROMPTS, noisy_copy, scores, tiny_model

MIXED = list(PROMPTS[2])
ROUNDING = 1e-4
# A cached forward and one over the whole text differ by rounding only, which is below this here.
NEAR = 1e-3


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def engine(model: Any) -> Engine:
    return outpace.load(model, drafter="none")


def plain_result(engine: Engine, params: SamplingParams) -> Result:
    result = engine.generate(MIXED, params)
    assert isinstance(result, Result)
    return result


def swapped(result: Result, index: int, token: int) -> Result:
    """The result with another token at an index, and other ones behind it, as after a wrong decision."""
    assert result.tokens[index] != token
    return replace(result, tokens=[*result.tokens[:index], token, *(1 for _ in result.tokens[index + 1 :])])


def scores_before(model: Any, result: Result, index: int) -> Tensor:
    """[vocab] float64: what decides the token at an index, from a forward without a cache."""
    return scores(model, result.prompt_tokens + result.tokens[:index])[-1].double()


def judge(
    engine: Engine, plain: Result, other: Result, params: SamplingParams, rounding: float = ROUNDING
) -> Difference:
    found = audit.find_difference(engine, plain, other, params, rounding)
    assert found is not None
    return found


# --------------------------------------------------------------------------------------------------
# Rounding


@pytest.mark.parametrize("prompt", PROMPTS, ids=["one token", "repeated", "mixed"])
def test_rounding_grows_as_precision_shrinks(prompt: tuple[int, ...], model: Any) -> None:
    """Blocks and single tokens agree to some 1e-4 in float32, where scores vary by 6, and to some 0.1 in bfloat16."""
    engine = outpace.load(model, drafter="none")
    text = engine.generate(list(prompt), SamplingParams(max_new_tokens=33))
    tokens = text.prompt_tokens + text.tokens
    assert 1e-6 < audit.measure_rounding(engine.target, tokens) < 1e-3
    half, double = (outpace.load(tiny_model("llama").to(dtype)).target for dtype in (torch.bfloat16, torch.float64))
    assert 0.05 < audit.measure_rounding(half, tokens) < 1.0
    assert audit.measure_rounding(double, tokens) < 1e-10


def test_rounding_is_the_largest_difference_between_blocks_and_single_tokens(engine: Engine, model: Any) -> None:
    """The same text in the same blocks gives the same number; blocks of one token are no different from single ones."""
    tokens = [*MIXED, *plain_result(engine, SamplingParams(max_new_tokens=33)).tokens]
    first = audit.measure_rounding(engine.target, tokens)
    last_place = 2.0**-23 * float(scores(model, tokens)[-32:].abs().max())
    assert first == audit.measure_rounding(engine.target, tokens) > last_place
    assert audit.measure_rounding(engine.target, tokens, block=1, num_blocks=32) == pytest.approx(last_place, rel=1e-3)
    assert 0 < audit.measure_rounding(engine.target, tokens[:2]) < NEAR, "a text of two tokens can be measured, too"


def test_a_forward_that_is_wrong_in_blocks_has_a_large_rounding(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If several tokens at once got other scores than one at a time, measure_rounding would say so."""
    forward = type(engine.target).forward

    def wrong(self: Any, cache: Any, blocks: Any, *rest: Any) -> Any:
        outputs = forward(self, cache, blocks, *rest)
        shift = 0.5 if blocks[0].num_logits > 1 else 0.0
        return [replace(output, logits=output.logits + shift) for output in outputs]

    monkeypatch.setattr(type(engine.target), "forward", wrong)
    assert audit.measure_rounding(engine.target, MIXED) == pytest.approx(0.5, abs=NEAR)


# --------------------------------------------------------------------------------------------------
# Greedy differences


def test_equal_results_have_no_difference(engine: Engine) -> None:
    """The same tokens: None, whatever else the results say."""
    params = SamplingParams(max_new_tokens=12)
    plain = plain_result(engine, params)
    assert audit.find_difference(engine, plain, replace(plain, text="x", finish_reason="stop"), params, 0.0) is None


@pytest.mark.parametrize("index", [0, 1, 7, 19])
def test_a_swapped_token_is_a_bug_with_both_scores_and_their_gap(index: int, engine: Engine, model: Any) -> None:
    """The runner-up in place of the best token: its index, both logits, their difference, and no tie."""
    params = SamplingParams(max_new_tokens=20)
    plain = plain_result(engine, params)
    expected = scores_before(model, plain, index)
    best, second = expected.topk(2).indices.tolist()
    found = judge(engine, plain, swapped(plain, index, second), params)
    assert (found.index, found.plain[0], found.speculative[0]) == (index, best, second)
    assert found.plain[1] == pytest.approx(float(expected[best]), abs=NEAR)
    assert found.speculative[1] == pytest.approx(float(expected[second]), abs=NEAR)
    assert found.gap == pytest.approx(float(expected[best] - expected[second]), abs=NEAR)
    assert found.threshold == pytest.approx(2 * ROUNDING) and not found.is_tie


def test_a_gap_is_a_tie_exactly_up_to_twice_the_rounding(engine: Engine) -> None:
    """Each of the two scores may be off by the rounding: a gap of twice that is a tie, a larger one is a bug."""
    params = SamplingParams(max_new_tokens=6)
    plain = plain_result(engine, params)
    other = swapped(plain, 3, 1)
    gap = judge(engine, plain, other, params).gap
    assert judge(engine, plain, other, params, rounding=gap / 2 * 1.001).is_tie
    assert not judge(engine, plain, other, params, rounding=gap / 2 * 0.999).is_tie


def test_two_tokens_with_the_same_scores_are_a_tie() -> None:
    """A model with two equal rows in its output layer: neither token is more right than the other."""
    model = tiny_model("llama")
    params = SamplingParams(max_new_tokens=10)
    token = plain_result(outpace.load(model, drafter="none"), params).tokens[4]
    twin = (token + 100) % 512
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[token]
    engine = outpace.load(model, drafter="none")
    plain = plain_result(engine, params)
    index = next(i for i, chosen in enumerate(plain.tokens) if chosen in (token, twin))
    other = swapped(plain, index, twin if plain.tokens[index] == token else token)
    found = judge(engine, plain, other, params)
    assert found.is_tie and found.gap <= 1e-5 and found.index == index
    sampled = replace(params, temperature=0.7, seed=3)
    assert not judge(engine, plain, other, sampled).is_tie, "their noise differs: when sampled they are two tokens"


def test_scores_are_those_after_the_penalties(engine: Engine, model: Any) -> None:
    """Penalties and biases change what is decided, so the judge applies them before it compares."""
    token = plain_result(engine, SamplingParams(max_new_tokens=1)).tokens[0]
    params = SamplingParams(max_new_tokens=1, logit_bias={token: -3.0}, presence_penalty=0.5)
    plain = plain_result(engine, params)
    expected = scores_before(model, plain, 0)
    expected[token] -= 3.0
    assert plain.tokens == [int(expected.argmax())]
    found = judge(engine, plain, swapped(plain, 0, token), params)
    assert found.speculative[1] == pytest.approx(float(expected[token]), abs=NEAR)
    assert found.gap == pytest.approx(float(expected.max() - expected[token]), abs=NEAR)


@pytest.mark.parametrize("kept", [0, 1, 11])
def test_a_text_that_ends_before_the_other_is_a_bug(kept: int, engine: Engine) -> None:
    """No rounding makes a text go on behind its end, in either direction."""
    params = SamplingParams(max_new_tokens=12)
    plain = plain_result(engine, params)
    short = replace(plain, tokens=plain.tokens[:kept])
    for first, second in ((plain, short), (short, plain)):
        found = judge(engine, first, second, params, rounding=1e9)
        assert (found.index, found.is_tie, found.gap) == (kept, False, math.inf)


# --------------------------------------------------------------------------------------------------
# Sampled differences


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_sampled_tokens_are_judged_by_score_over_temperature_plus_noise(
    temperature: float, engine: Engine, model: Any
) -> None:
    """The choice is the argmax of that sum, so its gap decides, against a rounding that temperature scales, too."""
    params = SamplingParams(temperature=temperature, seed=11, max_new_tokens=8)
    plain = plain_result(engine, params)
    index = 5
    position = len(MIXED) + index
    decisive = scores_before(model, plain, index) / temperature + noise.gumbel(11, position, torch.arange(512))
    best, second = decisive.topk(2).indices.tolist()
    assert plain.tokens[index] == best
    found = judge(engine, plain, swapped(plain, index, second), params)
    assert found.plain[1] == pytest.approx(float(decisive[best]), abs=NEAR / temperature)
    assert found.gap == pytest.approx(float(decisive[best] - decisive[second]), abs=NEAR / temperature)
    assert found.threshold == pytest.approx(2 * ROUNDING / temperature) and not found.is_tie


def one_token_cut(model: Any, params: SamplingParams, rank: int) -> tuple[Tensor, int, int]:
    """([vocab] scores over temperature, the token of that rank, the likeliest one), after the prompt."""
    warped = scores(model, MIXED)[-1].double() / params.temperature
    order = warped.argsort(descending=True).tolist()
    return warped, order[rank], order[0]


def judged_cut(engine: Engine, params: SamplingParams, token: int, other: int) -> Difference:
    """A plain run that chose `token` first, and one that chose `other`."""
    start = plain_result(engine, replace(params, max_new_tokens=1))
    plain = replace(start, tokens=[token])
    return judge(engine, plain, replace(start, tokens=[other]), params)


BASE = SamplingParams(temperature=2.0, seed=4, max_new_tokens=1)


@pytest.mark.parametrize("side", [1, -1], ids=["kept by plain decoding", "cut by plain decoding"])
def test_a_token_at_the_edge_of_top_p_is_a_tie(side: int, engine: Engine, model: Any) -> None:
    """The mass of likelier tokens is within rounding of top-p: it may be in or out. In the middle it is a bug."""
    warped, token, best = one_token_cut(model, BASE, 3)
    probs = warped.softmax(0)
    before = float(probs[warped > warped[token]].sum())
    edge = judged_cut(engine, replace(BASE, top_p=before + side * 2e-5), token, best)
    assert edge.is_tie and edge.gap == pytest.approx(2e-5, abs=2e-5)
    assert edge.threshold == pytest.approx(2 * ROUNDING / 2.0)
    middle = judged_cut(engine, replace(BASE, top_p=before + float(probs[token]) / 2), token, best)
    assert not middle.is_tie
    assert middle.gap <= float(probs[token]) / 2 + NEAR


def test_a_token_at_the_edge_of_min_p_is_a_tie(engine: Engine, model: Any) -> None:
    """Its score is within rounding of the best one's plus log min-p; further away it is a bug."""
    warped, token, best = one_token_cut(model, BASE, 3)
    ratio = float((warped[token] - warped[best]).exp())
    assert judged_cut(engine, replace(BASE, min_p=ratio * (1 - 2e-5)), token, best).is_tie
    assert judged_cut(engine, replace(BASE, min_p=ratio * (1 + 2e-5)), token, best).is_tie
    far = judged_cut(engine, replace(BASE, min_p=ratio / 1.2), token, best)
    assert not far.is_tie and far.gap <= math.log(1.2) + NEAR


def test_a_token_at_the_edge_of_top_k_is_a_tie() -> None:
    """Equal scores on both sides of the k-th place: a tie, for the tokens there and for no other."""
    model = tiny_model("llama")
    order = scores(model, MIXED)[-1].argsort(descending=True).tolist()
    with torch.no_grad():
        model.lm_head.weight[order[4]] = model.lm_head.weight[order[3]]
    engine = outpace.load(model, drafter="none")
    tied = replace(BASE, top_k=4)
    for token in order[3:5]:
        found = judged_cut(engine, tied, token, order[0])
        assert found.is_tie and found.gap <= 1e-5
    assert not judged_cut(engine, tied, order[2], order[0]).is_tie
    assert not judged_cut(engine, replace(BASE, top_k=6), order[3], order[0]).is_tie
    for token in order[2:4]:
        assert not judged_cut(engine, replace(BASE, top_k=3), token, order[0]).is_tie, "the edge lies between these two"
    for top_k in (0, 512, 600):
        assert not judged_cut(engine, replace(BASE, top_k=top_k), order[3], order[0]).is_tie, "nothing is cut"


def test_top_p_is_counted_over_what_top_k_leaves(engine: Engine, model: Any) -> None:
    """Both cuts together: top-p's mass is that of the k likeliest tokens only, as in decoding."""
    warped, token, best = one_token_cut(model, BASE, 3)
    likeliest = warped.topk(6).values
    before = float(likeliest.softmax(0)[:3].sum())
    everywhere = float(warped.softmax(0)[warped > warped[token]].sum())
    assert abs(before - everywhere) > 1e-2
    assert judged_cut(engine, replace(BASE, top_k=6, top_p=before + 2e-5), token, best).is_tie
    assert not judged_cut(engine, replace(BASE, top_k=6, top_p=everywhere), token, best).is_tie


@pytest.mark.parametrize(
    "cuts", [{}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.05}, {"top_k": 30, "top_p": 0.9, "min_p": 0.01}], ids=str
)
def test_a_wrong_token_in_a_sampled_text_is_a_bug_with_every_cut(cuts: dict[str, Any], engine: Engine) -> None:
    """The least likely token is no tie, and neither is the runner-up of the noisy scores, unless a cut is near."""
    params = SamplingParams(temperature=0.8, seed=2, max_new_tokens=10, **cuts)
    plain = plain_result(engine, params)
    worst = int(audit._plain_logits(engine.target, plain.prompt_tokens + plain.tokens[:6], 1)[0].argmin())
    found = judge(engine, plain, swapped(plain, 6, worst), params, rounding=1e-6)
    assert not found.is_tie and found.index == 6
    assert found.gap <= abs(found.plain[1] - found.speculative[1])


# --------------------------------------------------------------------------------------------------
# Whole runs


def test_a_comparison_decodes_both_ways_under_one_seed(model: Any) -> None:
    """Without a seed one is drawn, and both runs use it; in float32 nothing differs."""
    engine = outpace.load(model, draft_model=noisy_copy(model), k=5)
    found = audit.compare(engine, MIXED, SamplingParams(temperature=1.0, max_new_tokens=20), ROUNDING)
    assert found.difference is None and found.plain.seed == found.speculative.seed
    assert found.plain.stats.drafter == "none" and found.plain.stats.num_drafted_tokens == 0
    assert found.speculative.stats.drafter == "model" and found.speculative.stats.num_drafted_tokens > 0


CUT = {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "seed": 6}


@pytest.mark.parametrize(("dtype", "sampling"), [("bfloat16", {}), ("bfloat16", CUT), ("float16", CUT)], ids=str)
def test_every_difference_of_a_half_precision_model_is_a_tie(dtype: str, sampling: dict[str, Any]) -> None:
    """20 prompts, 60 tokens each, right and wrong drafts: texts differ only where choices tie."""
    half = tiny_model("llama").to(getattr(torch, dtype))
    prompts = [[(37 * i + 11 * j * j + 5 * j) % 400 for j in range(3 + i)] for i in range(20)]
    params = SamplingParams(max_new_tokens=60, **sampling)
    engine = outpace.load(half, drafter="none")
    plain = [engine.generate(prompt, params) for prompt in prompts]
    texts = [result.prompt_tokens + result.tokens for result in plain]
    rounding = audit.measure_rounding(engine.target, texts[0])
    trees = outpace.load(half, drafter=random_trees(512, texts, share_right=0.7, num_nodes=6))
    accepted = rejected = 0
    for prompt, expected in zip(prompts, plain, strict=True):
        result = trees.generate(prompt, params)
        difference = audit.find_difference(engine, expected, result, params, rounding)
        assert difference is None or difference.is_tie, (difference, rounding)
        accepted += result.stats.num_accepted_tokens
        rejected += result.stats.num_rejected_tokens
    assert accepted >= 200 and rejected >= 200


def test_other_layers_are_judged_against_the_model_itself(model: Any) -> None:
    """A twin that computes something else agrees with itself, and is a bug against the stock model."""
    wrong = Target(noisy_copy(model), model)
    right = Target(copy.deepcopy(model), model)
    params = SamplingParams(max_new_tokens=30)
    for target, is_right in ((wrong, False), (right, True)):
        plain = outpace.load(model, drafter="none")
        engine = Engine(target, SuffixDrafter(), None, (), plain.capabilities)
        own = audit.compare(engine, MIXED, params, ROUNDING)
        assert own.difference is None
        stock = audit.compare_stock(engine, MIXED, params, own.speculative, ROUNDING)
        assert stock.plain.tokens == plain.generate(MIXED, params).tokens
        assert (stock.difference is None) == is_right
        assert is_right or not stock.difference.is_tie  # type: ignore[union-attr]
        rounding = audit.measure_rounding(target, MIXED, reference=Target(model))
        assert (rounding < NEAR) == is_right
