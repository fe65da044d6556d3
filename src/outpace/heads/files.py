"""Heads on disk: a folder with config.json and one file of tensors, as published or as written here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import LoadError
from .eagle import EagleLayer
from .eagle_files import from_checkpoint, is_eagle, to_checkpoint
from .markov import MarkovHeads
from .medusa import MedusaHeads, from_tensors

MARKOV = "outpace_heads"  # the model_type of our own heads
FINGERPRINT = "outpace_base_fingerprint"  # in config.json: of the model that the heads were trained for
_NUM_SAMPLES = 64


def load_heads(path: str | Path, target: nn.Module) -> MedusaHeads | MarkovHeads | EagleLayer:
    """The heads in a folder, for a target model. Raises LoadError naming the field or tensor that does not fit."""
    folder = Path(path).expanduser()
    config = _config(folder)
    text = target.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    known = config.get(FINGERPRINT)
    if known is not None and known != fingerprint(target):
        raise LoadError(
            f"The heads in {str(folder)!r} were trained for another model: {FINGERPRINT} is {known!r}, and this "
            f"model's is {fingerprint(target)!r}. Use the heads of this model, or train some."
        )
    if is_eagle(config):
        embedding = target.get_input_embeddings().weight.detach()  # type: ignore[operator]
        return from_checkpoint(_tensors(folder), config, embedding, int(text.num_hidden_layers))
    kind = str(config.get("model_type", "medusa"))
    if kind not in ("medusa", MARKOV):
        raise LoadError(
            f"{str(folder / 'config.json')!r} says model_type={kind!r}; only 'medusa', {MARKOV!r} and EAGLE-3 heads "
            "can be loaded."
        )
    for name, value in (("hidden_size", text.hidden_size), ("vocab_size", text.vocab_size)):
        if config.get(name) not in (None, value):
            raise LoadError(f"The heads in {str(folder)!r} have {name}={config[name]}, and the model {name}={value}.")
    output = getattr(target, "get_output_embeddings", lambda: None)()
    if kind == MARKOV:
        return _markov(_tensors(folder), target)
    return from_tensors(
        _tensors(folder),
        text.hidden_size,
        text.vocab_size if output is None else output.weight.shape[0],
        _count(config, "heads"),
        None if output is None else output.weight.detach(),
    )


def new_heads(target: nn.Module, token_map: Tensor, num_heads: int, rank: int) -> MarkovHeads:
    """Untrained heads on a target's own embedding and output layer."""
    output = target.get_output_embeddings()  # type: ignore[operator]
    embedding = target.get_input_embeddings().weight.detach()  # type: ignore[operator]
    return MarkovHeads(embedding, output.weight.detach(), token_map, num_heads, rank)


def save_heads(heads: MarkovHeads | EagleLayer, target: nn.Module, folder: Path, provenance: dict[str, Any]) -> None:
    """config.json and model.safetensors (float16), each written whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any]
    if isinstance(heads, EagleLayer):
        found, config = to_checkpoint(heads, target)
    else:
        found = heads.state_dict()
        config = {
            "model_type": MARKOV,
            "num_heads": heads.num_heads,
            "rank": heads.markov_in.embedding_dim,
            "hidden_size": heads.fuse.out_features,
            "draft_vocab_size": len(heads.token_map),
        }
    tensors = {
        name: (tensor.to(torch.float16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in found.items()
    }
    config |= {FINGERPRINT: fingerprint(target), "provenance": provenance}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial)
    partial.replace(folder / "model.safetensors")
    partial = folder / "config.json.partial"
    partial.write_text(json.dumps(config, indent=1), encoding="utf-8")
    partial.replace(folder / "config.json")


def _markov(tensors: dict[str, Tensor], target: nn.Module) -> MarkovHeads:
    missing = {"token_map", "markov_in.weight", "fuse.weight"} - set(tensors)
    if missing:
        raise LoadError(f"The checkpoint lacks {', '.join(sorted(missing))}: it holds no heads of this kind.")
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    token_map = tensors["token_map"].to(torch.int64)
    heads = new_heads(target, token_map, len(blocks), tensors["markov_in.weight"].shape[1])
    try:
        heads.load_state_dict(tensors)
    except RuntimeError as error:
        raise LoadError(f"The heads do not fit: {str(error).splitlines()[-1].strip()}") from error
    return heads.eval().requires_grad_(False)


def fingerprint(model: nn.Module) -> str:
    """Of a model's shapes and some of its numbers, to bfloat16: the same for every copy of its weights.

    Tied and untied copies of one model, and its adapters, differ.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        places = torch.linspace(0, parameter.numel() - 1, min(_NUM_SAMPLES, parameter.numel()), dtype=torch.float64)
        sample = parameter.detach().reshape(-1)[places.long().to(parameter.device)].to(torch.bfloat16)
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(sample.cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{str(folder)!r} is no folder with heads: config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise LoadError(f"{str(folder / 'config.json')!r} is not a JSON object.")
    return config


def _count(config: dict[str, Any], what: str) -> int | None:
    """Configurations say num_heads or medusa_num_heads."""
    for name in (f"num_{what}", f"medusa_num_{what}"):
        if name in config:
            return int(config[name])
    return None


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Of the only .safetensors file, else of the only .pt file, which may hold nothing but tensors."""
    for pattern in ("*.safetensors", "*.pt"):
        files = sorted(folder.glob(pattern))
        if len(files) > 1:
            raise LoadError(f"{str(folder)!r} holds {len(files)} {pattern} files; heads come in one.")
        if files:
            try:
                if pattern == "*.safetensors":
                    return load_file(files[0])
                loaded: dict[str, Tensor] = torch.load(files[0], map_location="cpu", weights_only=True)
                return loaded
            except Exception as error:
                raise LoadError(f"{str(files[0])!r} cannot be read: {type(error).__name__}: {error}") from error
    raise LoadError(f"{str(folder)!r} holds no .safetensors and no .pt file.")
