"""Models that are not plain float32 objects: halved, quantised, adapted, resized, placed, compiled. Right or refused.

The oracle is transformers' own `generate` on the same object. In half precision two right programs may differ where
the two best scores are nearly equal: the first difference must be such a near-tie (the margin rule of T-A6).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outpace import DraftError, LoadError, accelerate
from outpace.testing.models import PROMPTS, noisy_copy, tiny_model

NUM_NEW = 40

# peft and torchao use what the newest transformers and torch deprecate.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def plain(model: Any, prompt: tuple[int, ...]) -> torch.Tensor:
    return model.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False)


def assert_equal_to_plain(model: Any, draft: Any, least_accepted: int = 5) -> None:
    """Both entries give the plain text of two prompts, with drafts that are right and drafts that are wrong."""
    fast = accelerate(model, drafter=draft, k=4)
    num_accepted = num_rejected = 0
    for prompt in PROMPTS[1:]:
        wanted = plain(model, prompt)
        ids = torch.tensor([prompt])
        assert torch.equal(fast.generate(ids, max_new_tokens=NUM_NEW, do_sample=False), wanted)
        (stats,) = fast.last_stats
        num_accepted += stats.num_accepted_tokens
        num_rejected += stats.num_rejected_tokens
        assert torch.equal(model.generate(ids, max_new_tokens=NUM_NEW, do_sample=False, custom_generate=fast), wanted)
        assert len(set(wanted[0, len(prompt) :].tolist())) >= 5
    assert num_accepted >= least_accepted and num_rejected >= 5


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def draft(llama: Any) -> Any:
    return noisy_copy(llama)


def quantised(model: Any) -> Any:
    """torch's dynamic int8: weights and, with one scale per call, activations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def test_a_dynamically_quantised_target_is_refused_with_the_cause(llama: Any) -> None:
    """T-L4: one scale for a whole block makes a token's scores depend on the drafts behind it."""
    with pytest.raises(LoadError, match="Quantisation of activations"):
        accelerate(quantised(tiny_model("llama")))


def test_a_dynamically_quantised_draft_is_inexact_and_useful(
    llama: Any, draft: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """T-L4, the reverse: a draft may be inexact, which is said."""
    assert_equal_to_plain(llama, quantised(noisy_copy(llama)))
    assert "inexact" in caplog.text


@pytest.fixture
def torchao_quantised(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A model quantised by a scheme of torchao, which the Makefile puts beside the packages: transformers imports it,
    and it prints warnings, in every process that can find it."""
    monkeypatch.syspath_prepend(str(Path(sys.prefix) / "torchao"))
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

    def quantise(scheme: str) -> Any:
        model = tiny_model("llama")
        quantization.quantize_(model, getattr(quantization, scheme)())
        return model

    return quantise


def test_a_target_with_quantised_weights_gives_its_own_plain_text(
    torchao_quantised: Callable[[str], Any], draft: Any
) -> None:
    """T-L4: weights of 8 bits, in torchao's form."""
    model = torchao_quantised("Int8WeightOnlyConfig")
    assert not torch.equal(model(torch.tensor([[1, 2]])).logits, tiny_model("llama")(torch.tensor([[1, 2]])).logits)
    assert_equal_to_plain(model, draft)


def test_a_target_with_quantised_activations_is_refused(torchao_quantised: Callable[[str], Any]) -> None:
    """T-L4: rounding an activation to 8 bits turns the smallest difference between two forwards into a large one."""
    with pytest.raises(LoadError, match="Quantisation"):
        accelerate(torchao_quantised("Int8DynamicActivationInt8WeightConfig"))


def test_an_active_lora_adapter_is_part_of_the_target(draft: Any) -> None:
    """The adapter changes the text, and the accelerated text with it; switched off, both are the base model's."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base_text = plain(tiny_model("llama"), PROMPTS[2])
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_alpha=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_model("llama"), config).eval()
    ids = torch.tensor([PROMPTS[2]])
    assert not torch.equal(model.generate(input_ids=ids, max_new_tokens=NUM_NEW, do_sample=False), base_text)
    fast = accelerate(model, drafter=draft, k=4)
    wanted = model.generate(input_ids=ids, max_new_tokens=NUM_NEW, do_sample=False)
    assert torch.equal(fast.generate(input_ids=ids, max_new_tokens=NUM_NEW, do_sample=False), wanted)
    assert torch.equal(
        model.generate(input_ids=ids, max_new_tokens=NUM_NEW, do_sample=False, custom_generate=fast), wanted
    )
    with model.disable_adapter():
        assert torch.equal(fast.generate(input_ids=ids, max_new_tokens=NUM_NEW, do_sample=False), base_text)
        assert fast.last_stats[0].num_accepted_tokens >= 5


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_adapters_that_add_virtual_tokens_are_refused(kind: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(LoadError, match="virtual tokens"):
        accelerate(peft.get_peft_model(tiny_model("llama"), config).eval())


def placed(folder: Path, device_map: Any) -> Any:
    tiny_model("llama").save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=folder / "offload")


def layers_on(**places: str) -> dict[str, str]:
    names = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
    return {name: places.get(name.rpartition(".")[2], "cpu") for name in names}


@pytest.mark.parametrize("device_map", ["auto", layers_on(**{"1": "disk"})], ids=["auto", "a layer on disk"])
def test_a_model_placed_by_a_device_map_works(tmp_path: Path, device_map: Any, draft: Any) -> None:
    assert_equal_to_plain(placed(tmp_path, device_map), draft)


def test_an_embedding_on_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="device_map"):
        accelerate(placed(tmp_path, layers_on(embed_tokens="disk")))


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_tied_and_untied_heads(is_tied: bool) -> None:
    model = tiny_model("llama", tie_word_embeddings=is_tied)
    shared = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert shared == is_tied
    assert_equal_to_plain(model, noisy_copy(model))


def test_resized_embeddings(draft: Any) -> None:
    """T-G6: eight more tokens in the target than in the draft."""
    model = tiny_model("llama")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.resize_token_embeddings(520)
    with pytest.raises((LoadError, DraftError), match="tokenizer"):
        accelerate(model, drafter=draft)  # without tokenizers it cannot be told which tokens are shared
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draft_too = noisy_copy(tiny_model("llama"))
        draft_too.resize_token_embeddings(520)
    assert_equal_to_plain(model, draft_too)


def test_a_compiled_target(draft: Any) -> None:
    """The compiled forward is what the engine calls; the graph is recompiled for new shapes."""
    model = torch.compile(tiny_model("llama"), backend="eager", dynamic=True)
    assert_equal_to_plain(model, draft)


def margin_at(model: Any, text: list[int]) -> tuple[float, float]:
    """(gap of the two best scores after a text, size of one unit in the last place there)."""
    with torch.no_grad():
        best = model(torch.tensor([text])).logits[0, -1].float().topk(2).values
    step = torch.finfo(model.dtype).eps * 2.0 ** float(best[0].abs().log2().floor())
    return float(best[0] - best[1]), step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_differs_only_at_near_ties(dtype: torch.dtype) -> None:
    """T-A6 through the drop-in: equal, or the first difference is where the best two scores are nearly the same."""
    model = tiny_model("llama").to(dtype)
    fast = accelerate(model, drafter=noisy_copy(tiny_model("llama")).to(dtype), k=4)
    num_equal = num_accepted = 0
    for start in range(12):
        prompt = tuple((37 * i + 11 * start) % 500 for i in range(8 + start))
        wanted = plain(model, prompt)[0].tolist()
        given = fast.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False)[0].tolist()
        num_accepted += fast.last_stats[0].num_accepted_tokens
        if given == wanted:
            num_equal += 1
            continue
        first = next(i for i, (a, b) in enumerate(zip(given, wanted, strict=True)) if a != b)
        gap, step = margin_at(model, wanted[:first])
        assert gap <= ROUNDING_STEPS * step, (
            f"position {first}: the best two scores differ by {gap}, one step is {step}"
        )
    assert num_equal >= 6 and num_accepted >= 20


# Two units in the last place of each of two programs.
ROUNDING_STEPS = 4
