"""Models in which a token's scores depend on the length of its forward: exact on one side of a switch, else refused.

With "longrope", a forward that reaches beyond the original length uses other frequencies for all its tokens; with
"dynamic", they go on changing. Drafts and batch neighbours must not move a token to the other side.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace import InputError, SamplingParams, accelerate, load
from outpace.testing.models import Family, noisy_copy, tiny_model

SWITCH = 32
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0 + i for i in range(8)],
    "original_max_position_embeddings": SWITCH,
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=SWITCH)


@pytest.fixture(scope="module")
def draft() -> Any:
    return noisy_copy(tiny_model("phi3"))


def prompt(length: int) -> list[int]:
    return [(31 * i + 7) % 500 for i in range(length)]


def plain(model: Any, ids: list[int], count: int) -> list[int]:
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return out[0, len(ids) :].tolist()  # type: ignore[no-any-return]


def test_the_switch_matters_here(model: Any) -> None:
    """Otherwise the tests below prove nothing: the first tokens' scores change when the forward grows past it."""
    ids = torch.tensor([prompt(SWITCH + 1)])
    with torch.no_grad():
        short, long = model(ids[:, :SWITCH]).logits, model(ids).logits[:, :SWITCH]
    assert float((short - long).abs().max()) > 0.1


@pytest.mark.parametrize(("length", "count"), [(8, 24), (20, 12), (33, 30), (60, 30)], ids=str)
def test_texts_on_one_side_are_those_of_transformers(model: Any, draft: Any, length: int, count: int) -> None:
    """Up to the last position before the switch, and a prompt beyond it that is read in one forward."""
    fast = accelerate(model, drafter=draft, k=8, prefill_chunk=16)
    ids = prompt(length)
    given = fast.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, length:].tolist()
    assert given == plain(model, ids, count)
    assert fast.last_stats[0].num_drafted_tokens > 0


def test_rows_on_both_sides_do_not_meet_in_a_forward(model: Any, draft: Any) -> None:
    engine = load(model, draft_model=draft, k=4)
    prompts = [prompt(60), prompt(8), prompt(33)]
    results = engine.generate(prompts, SamplingParams(max_new_tokens=20))
    assert [result.tokens for result in results] == [plain(model, ids, 20) for ids in prompts]


def test_a_text_that_crosses_the_switch_is_refused(model: Any) -> None:
    with pytest.raises(InputError, match=f"pass position {SWITCH}"):
        accelerate(model).generate(torch.tensor([prompt(20)]), max_new_tokens=13, do_sample=False)
    with pytest.raises(InputError, match="with 12 new tokens or fewer"):
        load(model).generate(prompt(20), SamplingParams(max_new_tokens=13))


def test_dynamic_frequencies_are_exact_below_and_refused_beyond() -> None:
    model = tiny_model(
        "llama",
        max_position_embeddings=SWITCH,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    )
    fast = accelerate(model, drafter="suffix")
    ids = prompt(6) * 2
    given = fast.generate(torch.tensor([ids]), max_new_tokens=SWITCH - 12, do_sample=False)[0, 12:].tolist()
    assert given == plain(model, ids, SWITCH - 12)
    with pytest.raises(InputError, match=f"pass position {SWITCH}"):
        fast.generate(torch.tensor([prompt(SWITCH + 4)]), max_new_tokens=4, do_sample=False)


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 512}
LLAMA4 = {
    **HEADS,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size_mlp": 128,
    "attention_chunk_size": 400,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "moe_layers": [1],
    "attn_temperature_tuning": True,
    "floor_scale": SWITCH,
    "attn_scale": 3.0,
}


def test_an_attention_temperature_by_cache_length_takes_chains_row_by_row() -> None:
    """Llama 4's temperature follows the cache's length: beyond the floor, trees and ragged batches would be wrong."""
    model = tiny_model(Family("llama4_text", LLAMA4))
    engine = load(model, draft_model=noisy_copy(model), k=4)
    assert not engine.capabilities.can_tree and any("temperature" in reason for reason in engine.capabilities.reasons)
    prompts = [prompt(5), prompt(30), prompt(60)]
    results = engine.generate(prompts, SamplingParams(max_new_tokens=60))
    assert [result.tokens for result in results] == [plain(model, ids, 60) for ids in prompts]
    assert sum(result.stats.num_accepted_tokens for result in results) >= 5


def test_a_model_that_chooses_the_keys_it_keeps_is_exact_below_and_refused_beyond() -> None:
    """Doge keeps `keep_window_size` keys, chosen by a mask of the whole block."""
    model = tiny_model(Family("doge", {**HEADS, "keep_window_size": 64}))
    fast = accelerate(model, drafter="suffix")
    ids = prompt(6) * 2
    given = fast.generate(torch.tensor([ids]), max_new_tokens=52, do_sample=False)[0, 12:].tolist()
    assert given == plain(model, ids, 52)
    with pytest.raises(InputError, match="pass position 64"):
        fast.generate(torch.tensor([ids]), max_new_tokens=53, do_sample=False)
