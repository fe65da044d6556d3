"""Greedy text with speculation is greedy text without it, and the caches hold exactly the emitted text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from reference import (
    DRAFTING,
    FAMILIES,
    METHODS,
    MIXED,
    ONE,
    REPEATED,
    STATE_FAMILIES,
    TREE_FAMILIES,
    assert_drafts_were_mixed,
    engine,
    full_texts,
    greedy,
    itself,
    model,
    noisy,
    params,
)
from torch import Tensor
from transformers import DynamicCache

import outpace
from outpace.drafters.model import ModelDrafter
from outpace.session import Session
from outpace.target import Target
from outpace.testing import drafters
from outpace.testing.models import scores, tiny_model

# --------------------------------------------------------------------------------------------------
# Losslessness


@pytest.mark.parametrize("k", [1, 2, 5, 16])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_that_of_transformers_with_every_way_of_drafting(method: str, k: int) -> None:
    """T-A1: 40 tokens after one token, ten repeated tokens and thirty mixed ones, for every method and K."""
    texts = full_texts("llama", (ONE, REPEATED, MIXED), 40)
    found = engine("llama", method, texts, k=k)
    for prompt in (ONE, REPEATED, MIXED):
        result = found.generate(list(prompt), params(40))
        assert result.tokens == greedy("llama", prompt, 40)
        assert result.finish_reason == "length" and result.stats.num_draft_failures == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers_for_every_family(family: str) -> None:
    """T-A1: sliding windows, soft caps, sinks, experts, learned positions, alibi, convolutions and recurrent states."""
    prompts = (ONE, REPEATED, MIXED)
    texts = full_texts(family, prompts, 32)
    wanted = [greedy(family, prompt, 32) for prompt in prompts]
    assert engine(family, "lookup", k=6).generate(list(MIXED), params(32)).tokens == wanted[2]
    for method in ("noisy", "noisy trees", "random trees"):
        if method != "noisy trees" or family in TREE_FAMILIES:
            results = engine(family, method, texts, k=6).generate([list(prompt) for prompt in prompts], params(32))
            assert [result.tokens for result in results] == wanted, method
            assert_drafts_were_mixed(*(result.stats for result in results))


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("width", [1, 4, 16])
def test_trees_of_any_width_and_depth_do_not_change_the_text(width: int, depth: int) -> None:
    """T-A2: random trees of up to 80 nodes, right and wrong branches in any order; nothing needs to be accepted."""
    texts = full_texts("llama", (MIXED,), 40)
    trees = drafters.random_trees(512, texts, seed=depth, share_right=0.5 if depth > 1 else 0.0)
    result = outpace.load(model("llama"), drafter=trees, k=width * depth).generate(list(MIXED), params(40))
    assert result.tokens == greedy("llama", MIXED, 40)
    assert result.stats.num_drafted_tokens >= 20 and result.stats.num_draft_failures == 0


@pytest.mark.parametrize("seed", range(8))
def test_random_trees_on_a_windowed_model_do_not_change_the_text(seed: int) -> None:
    """T-A2: the tree reaches over the edge of the window, so context falls out of sight in the middle of it."""
    texts = full_texts("gemma3", (REPEATED, MIXED), 40)
    found = outpace.load(model("gemma3"), drafter=drafters.random_trees(512, texts, seed=seed), k=20)
    results = found.generate([list(REPEATED), list(MIXED)], params(40))
    assert [result.tokens for result in results] == [greedy("gemma3", prompt, 40) for prompt in (REPEATED, MIXED)]
    assert_drafts_were_mixed(*(result.stats for result in results))


def _top_two_gap(scores: Tensor) -> tuple[float, float]:
    """(gap, largest allowed gap): two units in the last place of bfloat16 at the scores' magnitude."""
    best = scores.topk(2).values.float()
    unit = torch.finfo(torch.bfloat16).eps * 2.0 ** float(best.abs().max().log2().floor())
    return float(best[0] - best[1]), 2 * unit


@pytest.mark.parametrize("method", ["noisy", "random trees"])
def test_bfloat16_text_differs_from_transformers_only_at_near_ties(method: str, record_property: Any) -> None:
    """T-A6: at the first different token the two best scores are within two units in the last place."""
    half = tiny_model("llama").to(torch.bfloat16)
    num_equal = num_ties = 0
    all_stats = []
    numbers = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 512, (6, 12), generator=numbers)
    for ids in prompts:
        wanted = half.generate(
            ids[None], attention_mask=torch.ones_like(ids)[None], do_sample=False, max_new_tokens=100
        )[0].tolist()
        assert len(set(wanted[12:])) >= 5
        options = METHODS[method]("llama", [wanted])
        result = outpace.load(half, **options, k=6).generate(ids.tolist(), params(100))
        all_stats.append(result.stats)
        differing = [i for i in range(100) if result.tokens[i] != wanted[12 + i]]
        if not differing:
            num_equal += 1
            continue
        gap, allowed = _top_two_gap(scores(half, wanted[: 12 + differing[0]])[-1])
        assert gap <= allowed, f"token {differing[0]} differs with a gap of {gap}, which is no tie ({allowed})"
        num_ties += 1
    assert_drafts_were_mixed(*all_stats)
    record_property("equal", num_equal)
    record_property("ties", num_ties)
    assert num_equal + num_ties == 6


# --------------------------------------------------------------------------------------------------
# Caches


def fresh_cache(model: Any, tokens: Sequence[int], has_states: bool = False) -> DynamicCache:
    """transformers' own cache after one forward over the tokens; without windows, so that every column is there."""
    found = DynamicCache(config=model.config) if has_states else DynamicCache()
    target = Target(model)
    with torch.no_grad():
        model(input_ids=torch.tensor([list(tokens)]), use_cache=True, **{target._cache_keyword: found})
    return found


def assert_same_numbers(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    """Equal to a small part of the largest number."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * max(1.0, float(wanted.abs().max())))


def assert_columns(layers: Sequence[Any], row: int, model: Any, tokens: Sequence[int]) -> None:
    """The row's first columns are the keys and values of the tokens, in every layer, to 1e-5."""
    for layer, wanted in zip(layers, fresh_cache(model, tokens).layers, strict=True):
        for ours, theirs in ((layer.keys, wanted.keys), (layer.values, wanted.values)):
            assert_same_numbers(ours[row, :, : len(tokens)], theirs[0])


def assert_target_cache(engine: outpace.Engine, session: Session) -> None:
    """The row holds all but the last committed token, and nothing else."""
    cache: Any = engine._cache
    assert session.row is not None
    assert cache.lengths[session.row] == len(session.tokens) - 1
    assert_columns(cache._ragged, session.row, engine.target.model, session.tokens[:-1])


class WatchedDrafter(ModelDrafter):
    """Compares its cache with the text of every row, whenever a draft is about to begin."""

    num_checks = 0

    def _catch_up(self, sessions: Sequence[Session]) -> dict[int, Tensor]:
        logits = super()._catch_up(sessions)
        cache: Any = self._cache
        for session in sessions:
            row = self._drafts[session.id].row
            assert cache.lengths[row] == len(session.tokens)
            assert_columns(cache._ragged, row, self._draft.model, session.tokens)
            wanted = scores(self._draft.model, session.tokens)[-1]
            assert_same_numbers(logits[session.id], wanted)
            self.num_checks += 1
        return logits


def watched(draft: Any, width: int, confidence_threshold: float = 0.0) -> WatchedDrafter:
    return WatchedDrafter(Target(draft), 512, 512, width, confidence_threshold)


def run_watched(engine: outpace.Engine, sessions: Sequence[Session]) -> None:
    """Steps to the end and compares the target's cache after every round."""
    while any(not session.is_finished for session in sessions):
        engine.step()
        for session in sessions:
            assert session.error is None, session.error
            if not session.is_finished:
                assert_target_cache(engine, session)


@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_the_cache_equals_a_fresh_forward_after_every_round_of_trees(family: str) -> None:
    """T-A8: lengths and values, for random trees with branches; rejected nodes leave no trace."""
    texts = full_texts(family, (MIXED, ONE), 24)
    found = outpace.load(model(family), drafter=drafters.random_trees(512, texts), k=9)
    sessions = [found.submit(list(prompt), params(24)) for prompt in (MIXED, ONE)]
    run_watched(found, sessions)
    assert [session.new_tokens for session in sessions] == [list(text[-24:]) for text in texts]
    assert_drafts_were_mixed(*(session.stats for session in sessions))


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_the_draft_models_cache_equals_a_fresh_forward_in_every_round(family: str, width: int) -> None:
    """T-A8: of accepted and of rejected drafts alike, for chains and for trees of a draft model."""
    drafter = watched(noisy(family), width)
    found = outpace.load(model(family), drafter=drafter, k=6)
    sessions = [found.submit(list(prompt), params(24)) for prompt in (MIXED, REPEATED)]
    run_watched(found, sessions)
    assert [session.new_tokens for session in sessions] == [greedy(family, p, 24) for p in (MIXED, REPEATED)]
    assert drafter.num_checks >= 10
    assert_drafts_were_mixed(*(session.stats for session in sessions))


@pytest.mark.parametrize("width", [1, 3])
def test_the_draft_models_cache_equals_the_text_after_other_rows_have_left(width: int) -> None:
    """T-A8: a row that moves to the place of one that left takes along what was drafted and then accepted."""
    drafter = watched(itself("llama"), width)
    found = outpace.load(model("llama"), drafter=drafter, k=4)
    prompts = (ONE, MIXED, REPEATED)
    sessions = [found.submit(list(p), params(count)) for p, count in zip(prompts, (3, 9, 40), strict=True)]
    run_watched(found, sessions)
    for session, prompt in zip(sessions, prompts, strict=True):
        assert session.stats.num_draft_failures == 0
        assert session.new_tokens == greedy("llama", prompt, 40)[: len(session.new_tokens)]
    assert drafter.num_checks >= 8


def test_the_cache_equals_a_fresh_forward_while_rows_join_and_leave() -> None:
    """T-A8: rows of different lengths move in the buffers when others end, are cancelled or come in."""
    prompts = (ONE, MIXED, REPEATED, MIXED[:5], REPEATED[:17])
    texts = full_texts("mistral", prompts, 40)
    found = outpace.load(model("mistral"), drafter=drafters.random_trees(512, texts), k=5)
    sessions = [found.submit(list(p), params(count)) for p, count in zip(prompts[:3], (4, 40, 12), strict=True)]
    run_until = [(3, 3), (5, 4)]  # after how many steps which prompt joins
    for step in range(60):
        found.step()
        for session in sessions:
            assert session.error is None
            if session.row is not None:
                assert_target_cache(found, session)
        for at, index in run_until:
            if step == at:
                sessions.append(found.submit(list(prompts[index]), params(40)))
        if step == 6:
            found.cancel(sessions[1])
    assert len(sessions) == 5 and not found._rows and not found._cache.lengths
    for index, session in enumerate(sessions):
        wanted = list(texts[index][len(prompts[index]) :])
        assert session.new_tokens == wanted[: len(session.new_tokens)]
        assert session.is_finished or index == 1


STATES = ("conv_states", "recurrent_states")


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_recurrent_states_equal_a_fresh_forward_after_every_round(family: str) -> None:
    """T-A8: a state that took in rejected drafts goes back to where it was; keys and values beside it too."""
    texts = full_texts(family, (MIXED, ONE), 24)
    found = outpace.load(model(family), drafter=drafters.random_trees(512, texts, share_right=0.8), k=4)
    sessions = [found.submit(list(prompt), params(24)) for prompt in (MIXED, ONE)]
    cache: Any = found._cache
    num_states = 0
    while any(not session.is_finished for session in sessions):
        found.step()
        for session in sessions:
            assert session.error is None, session.error
            if session.row is None:
                continue
            length = cache.lengths[session.row]
            assert length <= len(session.tokens) - 1
            if length == 0:
                continue
            wanted = fresh_cache(model(family), session.tokens[:length], has_states=True)
            for ours, theirs in zip(cache._rows[session.row].hf.layers, wanted.layers, strict=True):
                for name in STATES:
                    mine, right = getattr(ours, name, None), getattr(theirs, name, None)
                    for key, numbers in (right or {}).items():
                        if numbers is not None:
                            assert_same_numbers(mine[key], numbers, tolerance=1e-4)
                            num_states += 1
                if getattr(theirs, "keys", None) is not None:
                    assert_same_numbers(ours.keys[0, :, :length], theirs.keys[0], tolerance=1e-4)
                    assert_same_numbers(ours.values[0, :, :length], theirs.values[0], tolerance=1e-4)
    assert num_states > 10
    assert [session.new_tokens for session in sessions] == [list(text[-24:]) for text in texts]
    assert_drafts_were_mixed(*(session.stats for session in sessions))


# --------------------------------------------------------------------------------------------------
# Repeatability

_RUN = """
import json, torch
torch.set_num_threads(1)
from reference import MIXED, engine, params
found = engine("llama", "noisy trees", k=6)
runs = [found.generate(list(MIXED), params(40, temperature=t, seed=3)) for t in (0.0, 1.0)]
print(json.dumps([[r.tokens, r.stats.num_accepted_tokens, r.stats.num_rejected_tokens] for r in runs]))
"""


def test_a_call_repeats_in_the_same_process_and_in_another() -> None:
    """T-A10: equal tokens and equal counts of accepted and rejected drafts, greedy and sampled."""
    runs = []
    for _ in range(2):
        found = engine("llama", "noisy trees", k=6)
        results = [found.generate(list(MIXED), params(40, temperature=t, seed=3)) for t in (0.0, 1.0)]
        runs.append([[r.tokens, r.stats.num_accepted_tokens, r.stats.num_rejected_tokens] for r in results])
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    child = subprocess.run(
        [sys.executable, "-c", _RUN], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert runs[0] == runs[1] == json.loads(child.stdout)
    assert len(DRAFTING) > 5
