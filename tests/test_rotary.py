"""Rotary embeddings whose frequencies depend on the length of a forward: exact on one side of the switch, else refused.

With "longrope", a forward that reaches beyond the original length uses other frequencies for all its tokens; with
"dynamic", they go on changing. Drafts and batch neighbours must not move a token to the other side.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace import InputError, SamplingParams, accelerate, load
from outpace.testing.models import noisy_copy, tiny_model

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
