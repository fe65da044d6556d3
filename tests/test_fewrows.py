"""Linear layers for few rows: the numbers of torch's own, row by row, and a model that stays as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outpace import EngineError, SamplingParams, fewrows, load
from outpace.target import Target
from outpace.testing.models import PROMPTS, tiny_model


@pytest.fixture(scope="module")
def kernel() -> Any:
    found = fewrows.kernel()
    if found is None:
        pytest.skip("there is no compiler, or no OpenMP, for the kernel")
    return found


@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 150, 576])
@pytest.mark.parametrize("outputs", [1, 2, 5, 6, 7, 48, 97, 150])
@pytest.mark.parametrize("has_bias", [False, True])
def test_any_shape_gives_what_torch_gives(kernel: Any, width: int, outputs: int, has_bias: bool) -> None:
    torch.manual_seed(width * outputs)
    linear = nn.Linear(width, outputs, bias=has_bias)
    fast = fewrows.FewRowsLinear(linear)
    with torch.no_grad():
        for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 33, fewrows.MOST_ROWS, fewrows.MOST_ROWS + 1):
            x = torch.randn(rows, width)
            exact = x.double() @ linear.weight.double().T + (linear.bias.double() if has_bias else 0)
            assert (fast(x) - exact).abs().max() <= 1e-6 * width**0.5 * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize(("width", "outputs"), [(576, 150), (70, 49), (16, 6)])
def test_a_row_does_not_depend_on_the_rows_beside_it(kernel: Any, width: int, outputs: int) -> None:
    """Bit for bit, for every number of rows."""
    fast = fewrows.FewRowsLinear(nn.Linear(width, outputs))
    x = torch.randn(fewrows.MOST_ROWS, width)
    with torch.no_grad():
        alone = torch.cat([fast(row[None]) for row in x])
        for rows in (2, 3, 4, 5, 8, 13, 16, 63, 64):
            assert torch.equal(fast(x[:rows]), alone[:rows])


def test_other_inputs_go_to_torch(kernel: Any) -> None:
    """Other precisions, leading dimensions, strided rows, gradients, nothing at all."""
    linear = nn.Linear(24, 10)
    fast = fewrows.FewRowsLinear(linear)
    with torch.no_grad():
        for x in (torch.randn(2, 3, 24), torch.randn(24), torch.randn(24, 5).T, torch.randn(0, 24)):
            assert torch.allclose(fast(x), linear(x), atol=1e-6) and fast(x).shape == linear(x).shape
        half = copy.deepcopy(linear).to(torch.bfloat16)
        x = torch.randn(3, 24, dtype=torch.bfloat16)
        assert torch.equal(fewrows.FewRowsLinear(half)(x), half(x))
    fast(torch.randn(2, 24)).sum().backward()
    assert linear.weight.grad is not None


def test_the_twin_shares_all_parameters_and_the_model_is_untouched(kernel: Any) -> None:
    """T-K3: the same tensors, the same modules as before; a change of a weight is seen by both."""
    model = tiny_model("llama")
    before = {name: (id(part), type(part)) for name, part in model.named_modules()}
    twin = fewrows.twin(model)
    assert twin is not None
    assert {name: (id(part), type(part)) for name, part in model.named_modules()} == before
    assert [id(p) for p in twin.parameters()] == [id(p) for p in model.parameters()]
    assert any(type(part) is fewrows.FewRowsLinear for part in twin.modules())
    assert not any(type(part) is nn.Linear for part in twin.modules())


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral", "bloom", "gpt-oss"])
def test_texts_of_the_twin_are_those_of_the_model(kernel: Any, family: str) -> None:
    """T-A1: greedy and sampled, alone and in a batch, with drafts."""
    model = tiny_model(family)
    twin = fewrows.twin(model)
    assert twin is not None
    plain, fast = load(model, drafter="none"), load(twin, drafter="lookup", k=6)
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=4)
        prompts = [list(prompt) for prompt in PROMPTS]
        wanted = [result.tokens for result in plain.generate(prompts, params)]
        assert [result.tokens for result in fast.generate(prompts, params)] == wanted
        assert [fast.generate(prompt, params).tokens for prompt in prompts] == wanted


def test_models_that_may_change_have_no_twin(kernel: Any) -> None:
    """Other precisions, hooks, replaced forwards, what is no transformers model."""
    hooked, replaced = tiny_model("llama"), tiny_model("llama")
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    replaced.lm_head.forward = replaced.lm_head.forward
    for model in (tiny_model("llama").to(torch.bfloat16), hooked, replaced, nn.Linear(3, 3)):
        assert fewrows.twin(model) is None


def test_a_layer_that_is_replaced_later_is_not_ignored(kernel: Any) -> None:
    """And one that is only trained further is seen."""
    model = tiny_model("llama")
    twin = fewrows.twin(model)
    assert twin is not None
    target = Target(twin, model)
    target.check_unchanged()
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    assert torch.equal(twin.lm_head.weight, model.lm_head.weight)  # type: ignore[union-attr]
    target.check_unchanged()
    model.model.layers[0].mlp.up_proj = nn.Sequential(model.model.layers[0].mlp.up_proj)
    with pytest.raises(EngineError, match="were replaced or added"):
        target.check_unchanged()


def test_without_a_compiler_everything_stays_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    fewrows.kernel.cache_clear()
    try:
        for compiler in ("/nothing/here", "false"):
            monkeypatch.setenv("CXX", compiler)
            assert fewrows.kernel() is None and fewrows.twin(tiny_model("llama")) is None
            assert compiler in str(fewrows.obstacle())
            fewrows.kernel.cache_clear()
            engine = load(tiny_model("llama"), kernels="auto")
            assert engine.generate(list(PROMPTS[0]), SamplingParams(max_new_tokens=4)).tokens
            fewrows.kernel.cache_clear()
    finally:
        monkeypatch.undo()
        fewrows.kernel.cache_clear()
