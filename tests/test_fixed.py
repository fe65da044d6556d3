"""Passes of fixed shapes: the same bits with and without drafts, and few enough shapes for a GPU to capture."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from reference import Recorder

from outpace import Engine, InputError, LoadError, SamplingParams, accelerate, graphs, load
from outpace.testing.drafters import always_wrong, oracle, random_trees
from outpace.testing.models import PROMPTS, tiny_model

NUM_NEW = 40


def decode(engine: Engine, prompt: tuple[int, ...], **settings: Any) -> tuple[list[int], torch.Tensor, Any]:
    recorder = Recorder()
    params = SamplingParams(max_new_tokens=NUM_NEW, seed=3, logits_processors=[recorder], **settings)
    result = engine.generate(list(prompt), params)
    return result.tokens, torch.stack(recorder.seen), result.stats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
def test_bitwise_scores_are_the_same_bits_with_and_without_drafts(family: str, dtype: torch.dtype) -> None:
    """Every score of every token, whether drafts are right, wrong or copied; greedy and sampled."""
    model = tiny_model(family).to(dtype)
    plain = load(model, drafter="none", k=5, exactness="bitwise")
    for temperature in (0.0, 0.8):
        for prompt in (PROMPTS[0], PROMPTS[-1]):
            tokens, scores, _ = decode(plain, prompt, temperature=temperature)
            assert len(set(tokens)) > 5
            texts = [[*prompt, *tokens]]
            for drafter in (
                oracle(texts),
                always_wrong(texts, plain.target.vocab_size),
                random_trees(plain.target.vocab_size, texts),
                "lookup",
            ):
                engine = load(model, drafter=drafter, k=5, exactness="bitwise")
                found, bits, stats = decode(engine, prompt, temperature=temperature)
                assert found == tokens and torch.equal(bits, scores)
                assert getattr(drafter, "name", "") != "oracle" or stats.num_verifications < NUM_NEW / 4


def test_without_it_bits_differ() -> None:
    """The guard of the test above: the same comparison fails where passes have the sizes they need."""
    model = tiny_model("llama").to(torch.bfloat16)
    tokens, scores, _ = decode(load(model, drafter="none", kernels="stock"), PROMPTS[0])
    engine = load(model, drafter=oracle([[*PROMPTS[0], *tokens]]), k=5, kernels="stock")
    _, bits, stats = decode(engine, PROMPTS[0])
    assert stats.num_accepted_tokens > 0
    assert not torch.equal(bits[: len(scores)], scores[: len(bits)])


def test_bitwise_rows_do_not_depend_on_the_batch() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    engine = load(model, drafter="lookup", k=4, exactness="bitwise")
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.7, seed=1)
    prompts = [list(prompt) for prompt in PROMPTS]
    alone = [engine.generate(prompt, params).tokens for prompt in prompts]
    assert [result.tokens for result in engine.generate(prompts, params)] == alone


def test_bitwise_reads_long_prompts_in_chunks() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    prompt = [(5 * i * i + i) % 90 for i in range(75)]
    found = []
    for drafter in ("none", "lookup"):
        engine = load(model, drafter=drafter, k=4, prefill_chunk=16, exactness="bitwise")
        found.append(decode(engine, tuple(prompt)))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_bitwise_through_generate() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    prompt = torch.tensor([PROMPTS[0]])
    with (
        accelerate(model, drafter="none", exactness="bitwise") as plain,
        accelerate(model, exactness="bitwise") as fast,
    ):
        assert torch.equal(plain.generate(prompt, max_new_tokens=30), fast.generate(prompt, max_new_tokens=30))


def test_bitwise_refuses_what_it_cannot_keep() -> None:
    with pytest.raises(LoadError, match="exactness='bitwise' pads every pass.*recurrent"):
        load(tiny_model("lfm2"), exactness="bitwise")
    with pytest.raises(LoadError, match="takes no position_ids"):
        load(tiny_model("bloom"), exactness="bitwise")
    with pytest.raises(LoadError, match="depend on the tokens beside it, as in a mixture of experts"):
        load(tiny_model("gpt-oss"), exactness="bitwise")
    with pytest.raises(InputError, match="verifies chains, and the drafter 'lookahead' needs trees"):
        load(tiny_model("llama"), drafter="lookahead", exactness="bitwise")
    with pytest.raises(InputError, match="exactness must be one of numerical, bitwise, got 'bits'"):
        load(tiny_model("llama"), exactness="bits")  # type: ignore[arg-type]


def test_padding_is_bounded() -> None:
    for nodes in range(1, graphs.NODES[-1] + 1):
        for columns in range(nodes, 20_000, 997):
            shape = graphs.padded(nodes, columns)
            assert shape is not None
            assert nodes <= shape[0] < 2 * nodes and columns - nodes + shape[0] <= shape[1]
            assert shape[1] <= max(256, 1.26 * (columns + nodes) + 256)
    assert graphs.padded(graphs.NODES[-1] + 1, 100) is None
    assert len({graphs.padded(1, columns) for columns in range(1, 20_000)}) < 20


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "gpt-oss"])
def test_fixed_passes_give_the_same_texts(family: str, is_captured: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Trees, rows of all lengths that come and go, long contexts. Capturing fails here; then nothing is captured."""
    if is_captured and torch.cuda.is_available():
        pytest.skip("capturing works here")
    model = tiny_model(family)
    prompts = [list(prompt) for prompt in PROMPTS] + [[(7 * i * i + i) % 90 for i in range(300)]]
    plain = load(model, drafter="none", kernels="stock")
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_new_tokens=NUM_NEW, temperature=temperature, seed=6)
        wanted = [result.tokens for result in plain.generate(prompts, params)]
        texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, wanted, strict=True)]
        engine = load(model, drafter=random_trees(plain.target.vocab_size, texts), k=9, kernels="stock")
        engine.target.passes = graphs.FixedPasses(is_captured)
        with caplog.at_level(logging.WARNING, "outpace"):
            alone = [engine.generate(prompt, params) for prompt in prompts]
            together = engine.generate(prompts, params)
        assert [result.tokens for result in alone] == wanted
        assert [result.tokens for result in together] == wanted
        assert sum(result.stats.num_accepted_tokens for result in together) > 20
        assert not engine.target.passes.is_captured
        assert is_captured == ("are not captured" in caplog.text)


def test_a_replayed_pass_reads_what_it_is_given() -> None:
    """Inputs are copied to tensors that stay; what comes out is a copy; old passes are let go."""
    passes = graphs.FixedPasses(is_captured=False)
    seen: list[int] = []

    def forward(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        seen.append(inputs[0].data_ptr())
        return inputs[0] * 2

    for value in (1.0, 2.0, 3.0):
        assert passes.run("key", (torch.full((2,), value),), forward).tolist() == [2 * value] * 2
    assert len(set(seen)) == 1
    for key in range(1000):
        passes.run(key, (torch.zeros(1),), forward)
    assert len(passes._passes) <= 64
