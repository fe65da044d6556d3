"""Further families, built as those of `models.py`: the second table of docs/families.md. Tests only load them."""

from __future__ import annotations

from typing import Any

from .models import Family

_ROPE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
}
_HEADS_OF_16 = {**_ROPE, "head_dim": 16}
_WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = {**_HEADS_OF_16, **_WINDOW, "query_pre_attn_scalar": 16}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
# The number of experts has a name in each family; what a family does not know is kept and not used.
_MIXTURE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
}
_GROUPS = {**_MIXTURE, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
_LATENT = {
    **_ROPE,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_LINEAR: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = {
    **_LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
_PER_LAYER = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512}
_DECODER = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128}
_ENCODER = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128}

MORE: dict[str, Family] = {
    "apertus": Family("apertus", _ROPE),
    "arcee": Family("arcee", _HEADS_OF_16),
    "bailing_hybrid": Family("bailing_hybrid", {**_LATENT, **_MIXTURE, **_LINEAR, "head_dim": 16}),
    "bamba": Family("bamba", {**_ROPE, **_MAMBA, "attn_layer_indices": [1]}),
    "bart (decoder)": Family("bart", {**_DECODER, **_ENCODER, "max_position_embeddings": 512}),
    "bert (decoder)": Family("bert", {**_ROPE, "is_decoder": True}),
    "biogpt": Family("biogpt", _ROPE),
    "bitnet": Family("bitnet", _ROPE),
    "codegen": Family("codegen", {**_GPT, "n_ctx": 512, "rotary_dim": 8}),
    "cohere2": Family("cohere2", {**_ROPE, **_WINDOW, "logit_scale": 0.5}, sharpness=12.0),
    "ctrl": Family("ctrl", {**_GPT, "dff": 128}),
    "dbrx": Family(
        "dbrx",
        {
            **{"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "deepseek_v2": Family("deepseek_v2", {**_LATENT, **_GROUPS, "topk_method": "greedy"}),
    "deepseek_v32": Family(
        "deepseek_v32", {**_LATENT, **_GROUPS, "index_topk": 16, "index_n_heads": 2, "index_head_dim": 16}
    ),
    "diffllama": Family("diffllama", _ROPE),
    "dots1": Family("dots1", {**_HEADS_OF_16, **_GROUPS}),
    "ernie4_5": Family("ernie4_5", _HEADS_OF_16),
    "exaone4": Family("exaone4", {**_ROPE, **_WINDOW}),
    "falcon_h1": Family("falcon_h1", {**_HEADS_OF_16, **_MAMBA, "mamba_d_ssm": 128}),
    "falcon_mamba": Family("falcon_mamba", {"state_size": 8}),
    "gemma3n": Family(
        "gemma3n_text",
        {**_GEMMA, **_PER_LAYER, "laurel_rank": 8, "activation_sparsity_pattern": [0.0, 0.0], "altup_num_inputs": 2},
    ),
    "gemma4": Family("gemma4_text", {**_GEMMA, **_PER_LAYER, "global_head_dim": 16}),
    "glm": Family("glm", _HEADS_OF_16),
    "glm4": Family("glm4", _HEADS_OF_16),
    "glm4_moe": Family("glm4_moe", {**_HEADS_OF_16, **_GROUPS}),
    "gpt_bigcode": Family("gpt_bigcode", _GPT),
    "gpt_neo": Family(
        "gpt_neo",
        {
            **{"num_layers": 2, "num_heads": 4, "window_size": 16, "max_position_embeddings": 512},
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "granitemoe": Family("granitemoe", {**_ROPE, **_MIXTURE}),
    "granitemoehybrid": Family(
        "granitemoehybrid", {**_ROPE, **_MAMBA, **_MIXTURE, "layer_types": ["mamba", "attention"]}
    ),
    "helium": Family("helium", _HEADS_OF_16),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense", _HEADS_OF_16),
    "jamba": Family(
        "jamba",
        {
            **_ROPE,
            **_MIXTURE,
            **{"mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False},
            **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        },
    ),
    "jetmoe": Family("jetmoe", {**_ROPE, **_MIXTURE, "kv_channels": 16}),
    "kimi_linear": Family(
        "kimi_linear", {**_LATENT, **_MIXTURE, **_LINEAR, "linear_num_heads": 4, "linear_head_dim": 16}
    ),
    "lfm2_moe": Family(
        "lfm2_moe", {**_ROPE, **_MIXTURE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
    ),
    "minimax": Family("minimax", {**_HEADS_OF_16, **_MIXTURE, **_LINEAR, "block_size": 16}),
    "minimax_m2": Family("minimax_m2", {**_HEADS_OF_16, **_MIXTURE}),
    "ministral": Family("ministral", {**_HEADS_OF_16, **_WINDOW}),
    "nanochat": Family("nanochat", _ROPE),
    "nemotron": Family("nemotron", _HEADS_OF_16),
    "nemotron_h": Family(
        "nemotron_h",
        {
            **_HEADS_OF_16,
            **{"hybrid_override_pattern": "M*", "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16},
            **{"n_groups": 1, "chunk_size": 16},
        },
    ),
    "olmo": Family("olmo", _ROPE),
    "olmo3": Family("olmo3", {**_ROPE, **_WINDOW}),
    "olmo_hybrid": Family("olmo_hybrid", {**_ROPE, **_DELTA}),
    "olmoe": Family("olmoe", {**_ROPE, "num_experts": 4, "num_experts_per_tok": 2}),
    "openai-gpt": Family("openai-gpt", _GPT),
    "persimmon": Family("persimmon", _ROPE),
    "phimoe": Family("phimoe", {**_ROPE, **_MIXTURE}),
    "qwen2_moe": Family("qwen2_moe", {**_ROPE, **_MIXTURE}),
    "qwen3_5": Family("qwen3_5_text", {**_HEADS_OF_16, **_DELTA}),
    "qwen3_5_moe": Family("qwen3_5_moe_text", {**_HEADS_OF_16, **_MIXTURE, **_DELTA}, seed=1),
    "recurrent_gemma": Family(
        "recurrent_gemma",
        {
            **_HEADS_OF_16,
            **{"lru_width": 64, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
        },
    ),
    "rwkv": Family("rwkv", {"attention_hidden_size": 64, "context_length": 512}),
    "seed_oss": Family("seed_oss", _HEADS_OF_16),
    "vaultgemma": Family("vaultgemma", _GEMMA),
    "whisper (decoder)": Family("whisper", {**_DECODER, **_ENCODER}),
    "xglm": Family(
        "xglm",
        {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 128, "max_position_embeddings": 512},
    ),
    "zamba": Family(
        "zamba",
        {
            **_ROPE,
            **{"mamba_d_state": 8, "n_mamba_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
            "layers_block_type": ["mamba", "hybrid"],
        },
    ),
    "zamba2": Family(
        "zamba2",
        {
            **{**_ROPE, "num_key_value_heads": 4, "attention_head_dim": 32, "attention_hidden_size": 128},
            **{"mamba_d_state": 16, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 16, "chunk_size": 16},
            **{"num_mem_blocks": 1, "adapter_rank": 8, "hybrid_layer_ids": [1]},
            "layers_block_type": ["mamba", "hybrid"],
        },
    ),
}
