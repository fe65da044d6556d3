"""Heads on disk: a folder with config.json and one file of tensors, as published or as written here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import LoadError
from .medusa import MedusaHeads, from_tensors

FINGERPRINT = "outpace_base_fingerprint"  # in config.json: of the model that the heads were trained for
_NUM_SAMPLES = 64


def load_heads(path: str | Path, target: nn.Module) -> MedusaHeads:
    """The heads in a folder, for a target model. Raises LoadError naming the field or tensor that does not fit."""
    folder = Path(path).expanduser()
    config = _config(folder)
    kind = str(config.get("model_type", "medusa"))
    if kind != "medusa":
        raise LoadError(f"{str(folder / 'config.json')!r} says model_type={kind!r}; only 'medusa' can be loaded.")
    known = config.get(FINGERPRINT)
    if known is not None and known != fingerprint(target):
        raise LoadError(
            f"The heads in {str(folder)!r} were trained for another model: {FINGERPRINT} is {known!r}, and this "
            f"model's is {fingerprint(target)!r}. Use the heads of this model, or train some."
        )
    text = target.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    for name, value in (("hidden_size", text.hidden_size), ("vocab_size", text.vocab_size)):
        if config.get(name) not in (None, value):
            raise LoadError(f"The heads in {str(folder)!r} have {name}={config[name]}, and the model {name}={value}.")
    output = getattr(target, "get_output_embeddings", lambda: None)()
    return from_tensors(
        _tensors(folder),
        text.hidden_size,
        text.vocab_size if output is None else output.weight.shape[0],
        _count(config, "heads"),
        None if output is None else output.weight.detach(),
    )


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
