"""EAGLE-3 checkpoints: those of the paper's authors and vLLM, and those of `speculators`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LoadError
from .eagle import EagleLayer, EagleShape

_REFUSED = ("fc_norm", "norm_before_fc")  # variants with other layers


def from_checkpoint(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], embedding: Tensor, num_layers: int
) -> EagleLayer:
    """The head of a checkpoint.

    config: that of the checkpoint. embedding: [vocab, H] of the target, used where the checkpoint has none. num_layers:
    of the target. Raises LoadError naming the field or tensor that does not fit.
    """
    layer = dict(config.get("transformer_layer_config") or config)
    for name in _REFUSED:
        if config.get(name):
            raise LoadError(f"{name}={config[name]!r} is a variant of EAGLE-3 that is not known here.")
    if layer.get("rope_scaling") not in (None, {}) and (layer.get("rope_scaling") or {}).get("rope_type") != "default":
        raise LoadError(f"rope_scaling={layer['rope_scaling']!r} of an EAGLE-3 head is not known here.")
    found = _in_our_names(tensors)
    for name in ("fc.weight", "q_proj.weight", "lm_head.weight"):
        if name not in found:
            raise LoadError(f"The checkpoint has no {name}: it holds no EAGLE-3 head. It has {sorted(tensors)[:5]}.")
    hidden, mixed = found["fc.weight"].shape
    target_hidden = int(config.get("target_hidden_size") or embedding.shape[1])
    if mixed % target_hidden:
        raise LoadError(
            f"fc.weight has {mixed} inputs, which is no multiple of the target's hidden size {target_hidden}: the head "
            "was trained for another model."
        )
    own = found.pop("embed_tokens.weight", None)
    if own is None and embedding.shape[1] != hidden:
        raise LoadError(f"The head is {hidden} wide and the target's embedding {embedding.shape[1]}, and it has none.")
    rows = found["lm_head.weight"].shape[0]
    offsets = found.pop("d2t", None)
    if offsets is None and rows != embedding.shape[0]:
        raise LoadError(f"lm_head.weight has {rows} rows, the target {embedding.shape[0]} ids, and d2t is missing.")
    token_map = torch.arange(rows) if offsets is None else torch.arange(rows) + offsets.to(torch.int64)
    if int(token_map.max()) >= embedding.shape[0] or int(token_map.min()) < 0:
        raise LoadError(f"d2t leads to token {int(token_map.max())}, and the target has {embedding.shape[0]}.")
    num_states = mixed // target_hidden
    layers = config.get("eagle_aux_hidden_state_layer_ids") or (2, num_layers // 2, num_layers - 3)
    if len(layers) != num_states or not all(0 <= number <= num_layers for number in layers):
        raise LoadError(
            f"eagle_aux_hidden_state_layer_ids={list(layers)} must name {num_states} of the target's hidden states 0 "
            f"to {num_layers}."
        )
    heads = int(layer["num_attention_heads"])
    shape = EagleShape(
        hidden,
        target_hidden,
        num_states,
        int(layer["intermediate_size"]),
        heads,
        int(layer.get("num_key_value_heads") or heads),
        int(layer.get("head_dim") or found["q_proj.weight"].shape[0] // heads),
        rows,
        float(layer.get("rope_theta") or (layer.get("rope_parameters") or {}).get("rope_theta") or 10000.0),
        float(layer.get("rms_norm_eps", 1e-6)),
        "q_proj.bias" in found,
        bool(config.get("norm_before_residual", False)),
        bool(config.get("norm_output", False)),
    )
    numbers = tuple(int(number) for number in layers)
    head = EagleLayer(shape, embedding if own is None else own, token_map, numbers)
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items() if name != "token_map"}
    for name, size in wanted.items():
        if name not in found or tuple(found[name].shape) != size:
            seen = "missing" if name not in found else f"of shape {tuple(found[name].shape)}"
            raise LoadError(f"{name} is {seen} in the checkpoint, and should have shape {size}.")
    unknown = sorted(set(found) - set(wanted))
    if unknown:
        raise LoadError(f"The checkpoint has tensors that an EAGLE-3 head does not have: {', '.join(unknown[:4])}.")
    head.load_state_dict({**found, "token_map": token_map})
    return head.eval().requires_grad_(False)


def eagle_layers(num_layers: int) -> tuple[int, ...]:
    """The hidden states of a target that a new head mixes: low, middle, high."""
    return (min(2, num_layers), num_layers // 2, max(0, num_layers - 3))


def new_eagle(model: nn.Module, token_map: Tensor) -> EagleLayer:
    """An untrained head of a target's own sizes, whose output layer begins as rows of the target's."""
    config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    num_layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
    layers = eagle_layers(num_layers)
    hidden = int(config.hidden_size)
    shape = EagleShape(
        hidden,
        hidden,
        len(layers),
        int(config.intermediate_size),
        heads,
        int(getattr(config, "num_key_value_heads", heads)),
        int(getattr(config, "head_dim", None) or hidden // heads),
        len(token_map),
    )
    embedding = model.get_input_embeddings().weight.detach()  # type: ignore[operator]
    head = EagleLayer(shape, embedding, token_map, layers)
    with torch.no_grad():
        rows = model.get_output_embeddings().weight.detach()[token_map]  # type: ignore[operator]
        head.lm_head.weight.copy_(rows)
    return head


def to_checkpoint(head: EagleLayer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors in vLLM's names, config.json) of a head for a target of the Llama or Qwen family."""
    shape, tensors = head.shape, dict[str, Tensor]()
    for name, tensor in head.state_dict().items():
        part = name.split(".")[0]
        if part == "token_map":
            tensors["d2t"] = tensor - torch.arange(len(tensor), device=tensor.device)
            tensors["t2d"] = torch.zeros(head.vocab_size, dtype=torch.bool).index_fill_(0, tensor.cpu(), True)
        elif part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"midlayer.self_attn.{name}"] = tensor
        elif part in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"midlayer.mlp.{name}"] = tensor
        elif part in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            tensors[f"midlayer.{name}"] = tensor
        else:
            tensors[name] = tensor
    return tensors, {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden,
        "target_hidden_size": shape.target_hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "vocab_size": head.vocab_size,
        "draft_vocab_size": shape.rows,
        "max_position_embeddings": getattr(model.config, "max_position_embeddings", 2048),
        "norm_before_residual": shape.norm_before_residual,
        "norm_output": shape.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(head.layers),
    }


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is of an EAGLE-3 head."""
    names = (str(config.get("speculators_model_type", "")), *map(str, config.get("architectures") or ()))
    return any("eagle3" in name.lower() for name in names)


def _in_our_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the layer's own prefixes, and without what is not needed."""
    found = {}
    for name, tensor in tensors.items():
        for prefix in ("model.", "midlayer.", "layers.0.", "self_attn.", "mlp."):
            name = name.removeprefix(prefix)
        if name != "t2d":
            found[name] = tensor
    return found
