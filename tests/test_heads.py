"""Medusa heads: the counter model's must be accepted to the last, from every layout; wrong files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outpace import InputError, LoadError, SamplingParams, load
from outpace.drafters.heads import MedusaDrafter
from outpace.heads.files import FINGERPRINT, fingerprint, load_heads
from outpace.heads.medusa import MedusaHeads, from_tensors, to_tensors
from outpace.testing.counter import VOCAB, counter_heads, counter_model, shift
from outpace.testing.models import PROMPTS, tiny_model
from outpace.union import UnionDrafter


@pytest.fixture(scope="module")
def counter() -> Any:
    return counter_model()


def names_of_fasterdecoding(heads: MedusaHeads) -> dict[str, Tensor]:
    found = {}
    for name, tensor in to_tensors(heads).items():
        parts = name.split(".")
        if parts[0] == "blocks":
            found[f"{parts[1]}.{parts[3]}.linear.{parts[4]}"] = tensor
        else:
            found[f"{parts[1]}.{len(heads.blocks[0])}.weight"] = tensor  # type: ignore[arg-type]
    return found


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], as_pt: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if as_pt:
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_counter_counts(counter: Any) -> None:
    text = load(counter, drafter="none").generate([60], SamplingParams(max_new_tokens=8)).tokens
    assert text == [61, 62, 63, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("layout", ["vllm", "prefixed", "fasterdecoding", "pt"])
def test_every_layout_is_accepted_to_the_last(layout: str, counter: Any, tmp_path: Path) -> None:
    heads = counter_heads(4)
    config: dict[str, Any] = {"model_type": "medusa", "num_heads": 4, "hidden_size": VOCAB, "vocab_size": VOCAB}
    tensors = to_tensors(heads)
    if layout == "prefixed":
        tensors = {f"medusa_heads.{name}": tensor for name, tensor in tensors.items()}
    if layout in ("fasterdecoding", "pt"):
        tensors, config = names_of_fasterdecoding(heads), {"medusa_num_heads": 4, "medusa_num_layers": 1}
    loaded = load_heads(write(tmp_path / "heads", tensors, config, layout == "pt"), counter)
    for params in (SamplingParams(max_new_tokens=41), SamplingParams(max_new_tokens=41, temperature=0.7, seed=1)):
        engine = load(counter, drafter=MedusaDrafter(loaded, 2), k=4)
        result = engine.generate([5, 6], params)
        assert result.tokens == [(7 + i) % VOCAB for i in range(41)]
        stats = result.stats
        # The first token has no hidden state before it; from then on every pass keeps all four drafts.
        assert stats.num_accepted_tokens == stats.num_drafted_tokens == 32
        assert stats.num_verifications == 9


def test_one_output_layer_may_be_shared_or_the_targets_own(counter: Any, tmp_path: Path) -> None:
    """Blocks that turn the state around, before one matrix for all heads: the target's."""
    own = MedusaHeads(VOCAB, VOCAB, 2, is_shared=True)
    tensors = to_tensors(own)
    assert set(tensors) >= {"lm_head.weight", "blocks.0.layers.0.weight"}
    del tensors["lm_head.weight"]
    loaded = load_heads(write(tmp_path / "heads", tensors, {"model_type": "medusa"}), counter)
    assert len(loaded.outputs) == 1 and torch.equal(loaded.outputs[0].weight, counter.lm_head.weight)
    assert loaded.outputs[0].weight.data_ptr() == counter.lm_head.weight.data_ptr(), "no second copy"
    hidden = torch.randn(3, VOCAB)
    for place in range(2):
        block = own.blocks[place][0]  # type: ignore[index]
        wanted = (hidden + torch.nn.functional.silu(block(hidden))) @ shift(1).T
        assert torch.allclose(loaded(hidden)[place], wanted, atol=1e-4)


def test_a_trimmed_vocabulary_is_mapped(counter: Any, tmp_path: Path) -> None:
    heads, kept = counter_heads(2), torch.arange(10, 40)
    tensors = to_tensors(heads) | {
        f"lm_heads.{i}.weight": heads.outputs[i].weight[kept]
        for i in range(2)  # type: ignore[index]
    }
    tensors["token_map"] = kept
    loaded = load_heads(write(tmp_path / "heads", tensors, {"model_type": "medusa"}), counter)
    engine = load(counter, drafter=MedusaDrafter(loaded, 2), k=2)
    result = engine.generate([12], SamplingParams(max_new_tokens=13))
    assert result.tokens == list(range(13, 26)) and result.stats.num_accepted_tokens >= 8


def test_heads_in_a_union_and_in_a_batch(counter: Any) -> None:
    drafter = UnionDrafter([MedusaDrafter(counter_heads(3), 2), load(counter, drafter="suffix").drafter], VOCAB)
    engine = load(counter, drafter=drafter, k=3)
    results = engine.generate([[1], [30, 31], [62]], SamplingParams(max_new_tokens=20))
    for first, result in zip((2, 32, 63), results, strict=True):
        assert result.tokens == [(first + i) % VOCAB for i in range(20)]
        assert result.stats.accepted_by_source.get("medusa", 0) >= 10


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_heads_that_guess_badly_change_nothing(temperature: float) -> None:
    """Random heads on a random model: the text is that without drafts, alone and in a batch, in chunks."""
    model = tiny_model("llama")
    torch.manual_seed(0)
    heads = MedusaHeads(64, 512, 3, num_layers=2).eval()
    plain = load(model, drafter="none")
    engine = load(model, drafter=MedusaDrafter(heads, 2), k=6, prefill_chunk=4)
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=3)
    prompts = [list(prompt) for prompt in PROMPTS]
    wanted = [result.tokens for result in plain.generate(prompts, params)]
    results = engine.generate(prompts, params)
    assert [result.tokens for result in results] == wanted
    assert [engine.generate(prompt, params).tokens for prompt in prompts] == wanted
    assert all(r.stats.num_draft_failures == 0 and r.stats.num_drafted_tokens > 20 for r in results)


def test_a_fingerprint_is_of_the_weights(counter: Any) -> None:
    model, other = tiny_model("llama"), tiny_model("llama", seed=9)
    assert fingerprint(model) == fingerprint(tiny_model("llama")) == fingerprint(model.to(torch.bfloat16))
    assert len({fingerprint(m) for m in (model, other, counter)}) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"hidden_size": 32}}, "hidden_size=32, and the model hidden_size=64"),
        ({"config": {"vocab_size": 100}}, "vocab_size=100"),
        ({"config": {"num_heads": 5}}, "num_heads=5, and the checkpoint has 4 heads"),
        ({"config": {"model_type": "eagle"}}, "model_type='eagle'; only 'medusa', 'outpace_heads' and EAGLE-3"),
        ({"config": {FINGERPRINT: "0123"}}, f"trained for another model: {FINGERPRINT} is '0123'"),
        ({"tensors": {"lm_heads.1.weight": torch.zeros(64, 32)}}, "outputs.1.weight has shape"),
        ({"tensors": {"lm_heads.0.weight": torch.zeros(99, 64)}}, "99 rows and the target 64 token ids"),
        ({"tensors": {"blocks.1.layers.0.weight": None}}, "no tensor for blocks.1.0.weight"),
        (
            {"tensors": {"blocks.2.layers.0.weight": None, "blocks.2.layers.0.bias": None}},
            "no residual blocks of heads",
        ),
        ({"tensors": {"surprise": torch.zeros(3)}}, "do not have: surprise"),
        ({"tensors": {"token_map": torch.full((64,), 99)}}, "token_map must hold 64 token ids below 64"),
    ],
)
def test_wrong_files_are_refused_by_name(change: dict[str, Any], message: str, counter: Any, tmp_path: Path) -> None:
    tensors = {
        name: tensor
        for name, tensor in (to_tensors(counter_heads(4)) | change.get("tensors", {})).items()
        if tensor is not None
    }
    folder = write(tmp_path / "heads", tensors, {"model_type": "medusa"} | change.get("config", {}))
    with pytest.raises(LoadError, match=message):
        load_heads(folder, counter)


def test_folders_without_heads_are_refused(counter: Any, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="config.json cannot be read"):
        load_heads(tmp_path / "nothing", counter)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match=r"no .safetensors and no .pt file"):
        load_heads(tmp_path, counter)
    (tmp_path / "model.safetensors").write_text("nonsense")
    with pytest.raises(LoadError, match="cannot be read"):
        load_heads(tmp_path, counter)


def test_the_right_fingerprint_is_taken(counter: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "heads", to_tensors(counter_heads(2)), {FINGERPRINT: fingerprint(counter)})
    assert load_heads(folder, counter).num_heads == 2
    assert set(to_tensors(from_tensors(to_tensors(counter_heads(2)), VOCAB, VOCAB))) == set(
        to_tensors(counter_heads(2))
    )


def test_heads_by_name(counter: Any, tmp_path: Path) -> None:
    """Alone, and by default in one tree with what needs no training; refused where nothing would use them."""
    folder = write(tmp_path / "heads", to_tensors(counter_heads(3)), {"model_type": "medusa"})
    alone = load(counter, drafter="heads", heads=folder)
    assert alone.generate([3], SamplingParams(max_new_tokens=21)).stats.num_accepted_tokens == 15
    together = load(counter, heads=folder)
    assert together.drafter.name == "suffix+recycle+medusa"
    result = together.generate([3], SamplingParams(max_new_tokens=20))
    assert result.tokens == list(range(4, 24)) and result.stats.accepted_by_source["medusa"] > 5
    with pytest.raises(InputError, match="drafter='heads' needs heads"):
        load(counter, drafter="heads")
    with pytest.raises(InputError, match="heads.* was given, and drafter='suffix' would not use it"):
        load(counter, drafter="suffix", heads=folder)
