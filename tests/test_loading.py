"""What loading says and what a target gives besides scores."""

from __future__ import annotations

import logging

import pytest
import torch

import outpace
from outpace.target import Block, Target
from outpace.testing.models import PROMPTS, tiny_model


def test_defaults_of_the_generation_config_that_are_not_applied_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is ignored silently: a penalty that transformers would apply is named with its value."""
    model = tiny_model("llama")
    with caplog.at_level(logging.WARNING, "outpace"):
        outpace.load(model)
        assert not caplog.records
        model.generation_config.repetition_penalty = 1.3
        outpace.load(model)
    assert "repetition_penalty=1.3" in caplog.text and "SamplingParams" in caplog.text


def test_hidden_states_are_those_of_the_model_itself() -> None:
    """Of the layers that are asked for, one row per new node, over a cached context and in a ragged batch."""
    model = tiny_model("llama")
    target = Target(model)
    cache = target.new_cache()
    texts = [tuple(PROMPTS[1][:12]), tuple(PROMPTS[2][:7])]
    for text in texts:
        row = cache.add_row()
        target.forward(cache, [Block(row, text[:-3], tuple(range(-1, len(text) - 4)))])
        cache.keep(row, range(len(text) - 3))
    blocks = [Block(row, text[-3:], (-1, 0, 1)) for row, text in enumerate(texts)]
    outputs = target.forward(cache, blocks, hidden_layers=(1, -1))
    for text, output in zip(texts, outputs, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        for layer in (1, -1):
            assert output.hidden[layer].shape == (3, 64)
            torch.testing.assert_close(output.hidden[layer], wanted[layer][0, -3:], atol=1e-4, rtol=1e-4)
