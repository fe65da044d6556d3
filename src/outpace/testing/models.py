"""Small random models built in code, one per model family: nothing is downloaded. They know nothing of outpace.

Two layers, hidden size 64, float32, no end-of-text token. A random model often repeats one token for ever, and a test
on such text proves nothing: for each family a seed was searched with which greedy decoding of 120 tokens after
each of `PROMPTS` gives at least 5 different tokens, and a clear winner (`MIN_MARGIN`) at every position. Weights this
large amplify rounding: scores from a cache differ by up to 7e-4 from those of a fresh forward.

    model = tiny_model("mistral")
    draft = noisy_copy(model)  # the same weights with noise: some of its drafts are right and some are wrong
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

MIN_DISTINCT, MIN_MARGIN, NUM_CHECKED = 5, 1e-3, 120
_NUM_COMPARED = 40  # tokens per prompt that measure a noisy copy

_REPEATED = (17, 301, 44, 260, 95, 128, 7, 333, 210, 66)
_MIXED = tuple((73 * i + 11 * (i // 5) ** 2) % 380 for i in range(20))
# One token; ten tokens four times; thirty of which five come twice.
PROMPTS: tuple[tuple[int, ...], ...] = ((10,), _REPEATED * 4, (*_MIXED, *_MIXED[3:8], *_MIXED[10:15]))


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's tiny model is built.

    sharpness: the standard deviation of its scores, about. attention: the implementation that is used unless another
    one is asked for; None leaves it to transformers.
    """

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    scale: float = 3.0
    sharpness: float = 6.0
    attention: str | None = "sdpa"


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_ROPE = {**_HEADS, "intermediate_size": 128, "max_position_embeddings": 512}
_GEMMA = {**_ROPE, "head_dim": 16}
_GEMMA_WINDOW = {**_GEMMA, "query_pre_attn_scalar": 16, "sliding_window": 16}
_WINDOW_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_FOUR_HEADS = {"num_attention_heads": 4, "max_position_embeddings": 512}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4}
_MULTIPLIERS = {"embedding_multiplier": 2.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
}

FAMILIES: dict[str, Family] = {
    # sdpa computes neither soft caps (gemma2) nor sinks (gpt-oss); bloom, mpt and the mambas do not offer it, and gptj
    # only in newer versions of transformers.
    "llama": Family("llama", _ROPE),
    "mistral": Family("mistral", {**_ROPE, "head_dim": 16, "sliding_window": 16}),
    "qwen2": Family("qwen2", _ROPE, seed=1),
    "qwen3": Family("qwen3", {**_ROPE, "head_dim": 16}),
    "gemma": Family("gemma", _GEMMA, seed=2),
    "gemma2": Family("gemma2", {**_GEMMA_WINDOW, **_WINDOW_AND_FULL}, attention="eager"),
    "gemma3": Family("gemma3_text", {**_GEMMA_WINDOW, **_WINDOW_AND_FULL}),
    "phi": Family("phi", _ROPE, seed=2),
    "phi3": Family("phi3", _ROPE, seed=1),
    "gpt2": Family("gpt2", {**_GPT, "n_positions": 512}),
    "gpt_neox": Family("gpt_neox", {**_FOUR_HEADS, "intermediate_size": 128}, seed=3),
    "gptj": Family("gptj", {**_GPT, "n_positions": 512, "rotary_dim": 8}, seed=1, attention=None),
    "opt": Family("opt", {**_FOUR_HEADS, "ffn_dim": 128, "word_embed_proj_dim": 64}, seed=1),
    "bloom": Family("bloom", {"n_layer": 2, "n_head": 4}, seed=4, attention="eager"),
    "falcon": Family("falcon", _FOUR_HEADS),
    "mpt": Family("mpt", {"n_heads": 4, "max_seq_len": 512}, seed=3, attention="eager"),
    "starcoder2": Family("starcoder2", {**_ROPE, "sliding_window": 16}, seed=2),
    "stablelm": Family("stablelm", _ROPE, seed=3),
    "olmo2": Family("olmo2", _ROPE),
    # Both halve their scores, hence the doubled sharpness.
    "granite": Family("granite", {**_ROPE, **_MULTIPLIERS, "logits_scaling": 2.0}, seed=2, sharpness=12.0),
    "cohere": Family("cohere", {**_ROPE, "logit_scale": 0.5}, sharpness=12.0),
    "mixtral": Family("mixtral", {**_ROPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": Family("qwen3_moe", {**_ROPE, **_MIXTURE, "head_dim": 16, "decoder_sparse_step": 1}),
    "gpt-oss": Family(
        "gpt_oss",
        {
            **_ROPE,
            **_WINDOW_AND_FULL,
            "head_dim": 16,
            "sliding_window": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        attention="eager",
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            **_ROPE,
            **_LATENT,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
        },
        seed=3,
    ),
    "lfm2": Family("lfm2", {**_ROPE, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "mamba": Family("mamba", {"state_size": 8}, attention="eager"),
    "mamba2": Family(
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 16},
        seed=1,
        attention="eager",
    ),
    "qwen3_next": Family("qwen3_next", {**_ROPE, **_MIXTURE, **_DELTA, "head_dim": 16}),
    "smollm3": Family("smollm3", {**_ROPE, "no_rope_layers": [1, 0]}),
}


def attentions(family: str | Family) -> tuple[str, ...]:
    """Which of "eager" and "sdpa" a family accepts as `attn_implementation`: transformers takes sdpa where it can."""
    chosen = tiny_model(family, attn_implementation=None).config._attn_implementation
    return ("eager", "sdpa") if chosen == "sdpa" else ("eager",)


def tiny_model(
    family: str | Family, seed: int | None = None, vocab: int = 512, sharpness: float | None = None, **config: Any
) -> Any:
    """A random model in eval mode, the same one for the same arguments; torch's own generator is left alone.

    family: one of FAMILIES, or how to build another one. seed: None takes the one whose text was found varied enough.
    sharpness: the standard deviation of its scores, about; None takes the family's. config: fields that replace the
    family's own, and `attn_implementation`.
    """
    if isinstance(family, str) and family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}.")
    kind = FAMILIES[family] if isinstance(family, str) else family
    attention = config.pop("attn_implementation", kind.attention)
    common: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": vocab}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    options = common | ends | {"tie_word_embeddings": False} | kind.options | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind.model_type, **options), attn_implementation=attention
        )
    _fill(model, kind.seed if seed is None else seed, kind.scale, kind.sharpness if sharpness is None else sharpness)
    return model.float().eval()


def _fill(model: nn.Module, seed: int, scale: float, sharpness: float) -> None:
    """Draws every weight matrix anew, so that they do not depend on transformers' own initialisation."""
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if name.endswith("A_log"):  # the decay of a state space, which is a matrix in some models
                continue
            if weight.dim() >= 2:
                size = (sharpness if weight is head else scale) / math.sqrt(_fan_in(weight))
                weight.copy_(torch.randn(weight.shape, generator=generator) * size)
            elif name.endswith((".bias", ".sinks")):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)


def _fan_in(weight: Tensor) -> int:
    return math.prod(weight.shape[1:]) if weight.dim() > 2 and weight.shape[1] == 1 else weight.shape[-1]


def scores(model: Any, tokens: Sequence[int]) -> Tensor:
    """[tokens, vocab] float32: the scores after each token, from one fresh forward without any cache."""
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        result = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    logits: Tensor = result.logits[0].float()
    return logits


def with_noise(model: Any, size: float, seed: int = 0) -> Any:
    """A copy of the model with Gaussian noise on its weights. size: in standard deviations of each matrix."""
    noisy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in noisy.parameters():
            if weight.dim() >= 2:
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                weight += noise * (size * weight.std())
    return noisy


def noisy_copy(model: Any, accept: tuple[float, float] = (0.3, 0.7), seed: int = 0) -> Any:
    """The model with noise on its weights: the share of its greedy drafts that are right is within `accept`.

    The share is measured along the model's own greedy text after each of PROMPTS, and the size of the noise is found
    by bisection.
    """
    texts = [_greedy(model, prompt, _NUM_COMPARED) for prompt in PROMPTS]
    wanted = torch.cat([_choices(model, text) for text in texts])
    share, low, high = 0.0, 0.0, 2.0
    for _ in range(24):
        size = (low + high) / 2
        noisy = with_noise(model, size, seed)
        share = float((torch.cat([_choices(noisy, text) for text in texts]) == wanted).float().mean())
        if accept[0] < share < accept[1]:
            return noisy
        low, high = (size, high) if share >= accept[1] else (low, size)
    raise ValueError(f"No noise gives a share of right drafts within {accept}; the last share was {share:.2f}.")


def _choices(model: Any, text: Sequence[int]) -> Tensor:
    """[_NUM_COMPARED] int64: the model's greedy choices along the end of a text."""
    return scores(model, text).argmax(-1)[-_NUM_COMPARED:]


def _greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The prompt and `count` greedy tokens, each from a fresh forward: slow, and as plain as can be."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(scores(model, text)[-1].argmax()))
    return text
