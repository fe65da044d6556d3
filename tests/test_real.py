"""The drop-in and the drafters on a real model, SmolLM2-135M-Instruct, against transformers' own `generate`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Recorder
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from outpace import SamplingParams, accelerate, load
from outpace.fewrows import FewRowsLinear, twin
from outpace.models import resolve

pytestmark = pytest.mark.real


QUESTIONS = (
    "Repeat this sentence twice: The quick brown fox jumps over the lazy dog near the old river bank.",
    "Name three rivers.",
    "Write a Python function that adds two numbers, with a docstring.",
)


@pytest.fixture(scope="module")
def real(real_gguf: Path) -> tuple[Any, Any]:
    folder = resolve(real_gguf)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def chats(tokenizer: Any, questions: tuple[str, ...]) -> Any:
    return tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in questions],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        padding=True,
    )


def test_a_padded_batch_is_that_of_transformers(real: tuple[Any, Any]) -> None:
    """T-I1: three chats, greedy, with a repetition penalty, and a stop string."""
    model, tokenizer = real
    fast = accelerate(model, drafter="suffix+recycle", tokenizer=tokenizer)
    inputs = chats(tokenizer, QUESTIONS)
    settings = {"max_new_tokens": 32, "do_sample": False}
    for more in ({}, {"repetition_penalty": 1.1}, {"stop_strings": ["river"], "tokenizer": tokenizer}):
        wanted = model.generate(**inputs, **settings, **more)
        assert torch.equal(fast.generate(**inputs, **settings, **more), wanted)
    assert sum(stats.num_accepted_tokens for stats in fast.last_stats) >= 5


def test_a_pipeline_gives_the_same_text_in_fewer_passes(real: tuple[Any, Any]) -> None:
    model, tokenizer = real
    fast = accelerate(model, drafter="suffix")
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    chat = [{"role": "user", "content": QUESTIONS[0]}]
    settings = {"max_new_tokens": 40, "do_sample": False}
    assert pipe(chat, **settings, custom_generate=fast) == pipe(chat, **settings)
    assert fast.last_stats[0].tokens_per_pass > 1.5


@pytest.mark.parametrize(
    "drafter", ["suffix", "recycle", "suffix+recycle", "lookahead", "jacobi", "self", "early-exit"]
)
def test_every_drafter_gives_the_plain_text(real: tuple[Any, Any], drafter: str) -> None:
    """T-A1, T-B7: greedy and sampled."""
    model, tokenizer = real
    options = {"lookahead": (4, 3, 4)} if drafter == "lookahead" else {}
    engine = load(model, tokenizer=tokenizer, drafter=drafter, **options)
    plain = load(model, tokenizer=tokenizer, drafter="none")
    num_accepted = 0
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=1)
        chat = [{"role": "user", "content": QUESTIONS[0]}]
        result = engine.generate(chat, params)
        assert result.tokens == plain.generate(chat, params).tokens
        assert result.stats.num_draft_failures == 0 and result.stats.num_drafted_tokens > 0
        num_accepted += result.stats.num_accepted_tokens
    if drafter in ("suffix", "suffix+recycle", "self"):
        assert num_accepted >= 10


def test_a_copy_takes_a_third_of_the_passes(real: tuple[Any, Any]) -> None:
    """T-M4: prompt lookup on a text that the model repeats."""
    model, tokenizer = real
    engine = load(model, tokenizer=tokenizer, drafter="lookup", k=16)
    line = (
        "The red fox, the old owl and the small mouse went to the market to buy bread, cheese and a bottle of milk.\n"
    )
    result = engine.generate(line * 3, SamplingParams(max_new_tokens=64))
    assert result.tokens == engine.without_drafts().generate(line * 3, SamplingParams(max_new_tokens=64)).tokens
    assert result.text.startswith(line.strip()) and result.stats.num_verifications <= 64 / 3


def test_layers_for_few_rows_give_the_text_of_the_stock_model(real: tuple[Any, Any]) -> None:
    """The same parameters, other kernels: greedy text of transformers, with drafts and without; the model unchanged."""
    model, tokenizer = real
    other = twin(model)
    if other is None:
        pytest.skip("there is no compiler, or no OpenMP, for the kernel")
    assert {name: id(p) for name, p in other.named_parameters()} == {
        name: id(p) for name, p in model.named_parameters()
    }
    assert type(model.lm_head) is torch.nn.Linear and type(other.lm_head) is FewRowsLinear
    ids = tokenizer.apply_chat_template([{"role": "user", "content": QUESTIONS[2]}], add_generation_prompt=True)
    ids = list(ids["input_ids"] if not isinstance(ids, list) else ids)
    inputs = torch.tensor([ids])
    wanted = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=48, do_sample=False)
    for drafter in ("none", "suffix+recycle"):
        result = load(other, tokenizer=tokenizer, drafter=drafter).generate(ids, SamplingParams(max_new_tokens=48))
        assert result.tokens == wanted[0, len(ids) :].tolist()


def test_bitwise_in_half_precision(real: tuple[Any, Any]) -> None:
    """Drafts and the lack of them choose from the same bits, in a precision in which passes usually round apart."""
    model, tokenizer = real
    half = copy.deepcopy(model).to(torch.bfloat16)
    found = []
    for drafter in ("none", "lookup"):
        recorder = Recorder()
        params = SamplingParams(max_new_tokens=32, logits_processors=[recorder])
        engine = load(half, tokenizer=tokenizer, drafter=drafter, k=4, exactness="bitwise")
        result = engine.generate([{"role": "user", "content": QUESTIONS[0]}], params)
        found.append((result, torch.stack(recorder.seen)))
    (plain, bits), (fast, fast_bits) = found
    assert fast.tokens == plain.tokens and torch.equal(bits, fast_bits)
    assert len(set(plain.tokens)) > 10 and fast.stats.num_accepted_tokens > 5
