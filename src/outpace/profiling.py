"""Measures what a pass of a target costs, once per model and machine, and keeps it in the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from . import models
from .costs import CostCurve
from .target import Block, Target

_CONTEXT = 64  # tokens before the measured ones
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_FEW_SIZES = (1, 4, 8, 16, 32)  # where a pass is slow
_SLOW = 0.1  # seconds of a pass of one token
_NUM_REPEATS, _FEW_REPEATS = 5, 3


def costs(target: Target, most_nodes: int, progress: models.Progress | None = None) -> CostCurve:
    """The curve of one row, up to about `most_nodes` nodes: from the cache folder, or measured in a few seconds."""
    facts = _facts(target)
    path = _path(facts)
    found = CostCurve.load(path)
    if found is not None and max(nodes for _, nodes in found.cells) >= most_nodes:
        return found
    once = min(_seconds(target, 1, 1) for _ in range(2))
    sizes, repeats = (_SIZES, _NUM_REPEATS) if once < _SLOW else (_FEW_SIZES, _FEW_REPEATS)
    last = next((size for size in sizes if size >= most_nodes), sizes[-1])
    found = CostCurve(measure(target, [(1, size) for size in sizes if size <= last], repeats, progress))
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        found.save(path, facts)
    return found


def measure(
    target: Target, sizes: Sequence[tuple[int, int]], repeats: int, progress: models.Progress | None = None
) -> dict[tuple[int, int], float]:
    """(rows, nodes per row) -> median seconds of a pass. All sizes take turns, after a round that does not count."""
    times: dict[tuple[int, int], list[float]] = {size: [] for size in sizes}
    for repeat in range(repeats + 1):
        for index, (rows, nodes) in enumerate(sizes):
            if progress is not None:
                progress("Measuring what a pass costs", repeat * len(sizes) + index, (repeats + 1) * len(sizes))
            seconds = _seconds(target, rows, nodes)
            if repeat > 0:
                times[rows, nodes].append(seconds)
    return {size: statistics.median(found) for size, found in times.items()}


def _seconds(target: Target, num_rows: int, num_nodes: int) -> float:
    """One pass over rows of a short context: a tree of `num_nodes` where the target takes trees, else a chain."""
    cache = target.new_cache()
    rows = [cache.add_row() for _ in range(num_rows)]
    ids = [(7919 * place + 13) % target.vocab_size for place in range(max(_CONTEXT, num_nodes))]
    for row in rows:
        target.forward(cache, [Block.chain(row, ids[:_CONTEXT])])
        cache.keep(row, range(_CONTEXT))
    parents = tuple((node - 1) // 2 if target.can_tree else node - 1 for node in range(num_nodes))
    blocks = [Block(row, tuple(ids[:num_nodes]), (-1, *parents[1:]), num_logits=num_nodes) for row in rows]
    _wait(target)
    begin = time.perf_counter()
    target.forward(cache, blocks)
    _wait(target)
    return time.perf_counter() - begin


def _wait(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def _facts(target: Target) -> dict[str, str]:
    """Everything that the curve depends on."""
    device = target.device
    config = target.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    shape = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]
    layers = sorted({type(module).__name__ for module in target.model.modules()})
    return {
        "model": f"{type(target.model).__name__} {shape}",
        "layers": hashlib.sha256(" ".join(layers).encode()).hexdigest()[:8],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} {platform.processor()}",
        "machine": f"{platform.node()} {platform.machine()}",
        "dtype": str(target.dtype),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _path(facts: dict[str, str]) -> Path:
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return models.cache_root() / "costs" / f"{name}.json"
