"""Measures what a pass of a target costs, once per model and machine, and keeps it in the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn

from . import fewrows, models
from .costs import CostCurve
from .graphs import FixedPasses
from .target import Block, Target

_CONTEXT = 256  # tokens before the measured ones
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_FEW_SIZES = (1, 4, 8, 16, 32)  # where a pass is slow
_SLOW = 0.1  # seconds of a pass of one token
_MOST_SECONDS = 3.0  # of a comparison of two kinds of layers
_ALLOWED, _WANTED = 1.05, 0.9  # of the stock model's time, for 1 and for 8 tokens, that other layers may take
_NUM_REPEATS, _FEW_REPEATS = 5, 2


def costs(target: Target, most_nodes: int, progress: models.Progress | None = None) -> CostCurve:
    """The curve of one row, up to about `most_nodes` nodes: from the cache folder, or measured in a few seconds."""
    found = CostCurve.load(_path(target))
    if found is not None and max(nodes for _, nodes in found.cells) >= most_nodes:
        return found
    sizes, repeats = (_SIZES, _NUM_REPEATS) if _is_quick(target) else (_FEW_SIZES, _FEW_REPEATS)
    last = next((size for size in sizes if size >= most_nodes), sizes[-1])
    found = CostCurve(measure(target, [(1, size) for size in sizes if size <= last], repeats, progress))
    keep(target, found)
    return found


def prepared(model: nn.Module, is_fresh: bool = False) -> Target:
    """A model to decode: its twin with faster linear layers, if that is faster here, or the model itself; on a GPU,
    with passes of fixed shapes.

    The decision is kept in the cache folder, as part of the twin's curve. is_fresh: decide anew.
    """
    stock = Target(model)
    if stock.device.type == "cuda":
        stock.passes = FixedPasses(is_captured=True)
    twin = fewrows.twin(model)
    if twin is None:
        return stock
    fast = Target(twin, model)
    if not is_fresh and CostCurve.load(_path(fast)) is not None:
        return fast
    benches, sizes = [_Bench(fast, 1), _Bench(stock, 1)], (1, 8)
    best = [[math.inf, math.inf], [math.inf, math.inf]]
    end = time.perf_counter() + _MOST_SECONDS
    for turn in range(_NUM_REPEATS + 1):
        for bench, times in zip(benches, best, strict=True):  # both take turns; what disturbs them only adds time
            for place, nodes in enumerate(sizes):
                seconds = bench.seconds(nodes)
                times[place] = min(times[place], seconds if turn > 0 else math.inf)
        if time.perf_counter() > end and turn > 0:
            break
    (ours, ours_8), (theirs, theirs_8) = best
    if ours > _ALLOWED * theirs or ours_8 > _WANTED * theirs_8:
        return stock
    keep(fast, CostCurve({(1, 1): ours, (1, 8): ours_8}))
    return fast


def measure(
    target: Target, sizes: Sequence[tuple[int, int]], repeats: int, progress: models.Progress | None = None
) -> dict[tuple[int, int], float]:
    """(rows, nodes per row) -> median seconds of a pass. All sizes take turns, after rounds that do not count."""
    times: dict[tuple[int, int], list[float]] = {size: [] for size in sizes}
    benches = {rows: _Bench(target, rows) for rows in {rows for rows, _ in sizes}}
    warm_up = 1 if target.passes is None else 3  # the second pass of a shape is captured
    total = (repeats + warm_up) * len(sizes)
    for repeat in range(repeats + warm_up):
        for index, (rows, nodes) in enumerate(sizes):
            if progress is not None:
                progress("Measuring what a pass costs", repeat * len(sizes) + index, total)
            seconds = benches[rows].seconds(nodes)
            if repeat >= warm_up:
                times[rows, nodes].append(seconds)
    return {size: statistics.median(found) for size, found in times.items()}


class _Bench:
    """Rows of a short context, behind which passes are timed."""

    def __init__(self, target: Target, num_rows: int) -> None:
        self._target, self._cache = target, target.new_cache()
        self._rows = [self._cache.add_row() for _ in range(num_rows)]
        for row in self._rows:
            target.forward(self._cache, [Block.chain(row, self._ids(_CONTEXT))])
            self._cache.keep(row, range(_CONTEXT))

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple((7919 * place + 13) % self._target.vocab_size for place in range(count))

    def seconds(self, num_nodes: int) -> float:
        """One pass: a tree where the target takes trees, else a chain. Nothing of it is kept."""
        parents = [(node - 1) // 2 if self._target.can_tree else node - 1 for node in range(1, num_nodes)]
        blocks = [Block(row, self._ids(num_nodes), (-1, *parents), num_logits=num_nodes) for row in self._rows]
        _wait(self._target)
        begin = time.perf_counter()
        self._target.forward(self._cache, blocks)
        _wait(self._target)
        seconds = time.perf_counter() - begin
        for row in self._rows:
            self._cache.keep(row, [])
        return seconds


def _is_quick(target: Target) -> bool:
    bench = _Bench(target, 1)
    return min(bench.seconds(1) for _ in range(2)) < _SLOW


def _wait(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def facts(target: Target) -> dict[str, str]:
    """Everything that a curve depends on."""
    device = target.device
    config = target.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    shape = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]
    layers = sorted({type(module).__name__ for module in target.model.modules()})
    return {
        "model": f"{type(target.model).__name__} {shape}",
        "layers": hashlib.sha256(" ".join(layers).encode()).hexdigest()[:8],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "processor": _processor(),
        "machine": f"{platform.node()} {platform.machine()}",
        "dtype": str(target.dtype),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def keep(target: Target, curve: CostCurve) -> None:
    """Write the curve of a target to the cache folder."""
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        curve.save(_path(target), facts(target))


def _path(target: Target) -> Path:
    name = hashlib.sha256(json.dumps(facts(target), sort_keys=True).encode()).hexdigest()[:16]
    return models.cache_root() / "costs" / f"{name}.json"


@dataclass(frozen=True, slots=True)
class Floors:
    """What no pass can be faster than. num_bytes: of weights that every pass reads; num_weights: that every token is
    multiplied with; bandwidth: bytes per second; rate: floating-point operations per second."""

    num_bytes: int
    num_weights: int
    bandwidth: float
    rate: float

    @property
    def memory(self) -> float:
        """Seconds to read all weights once."""
        return self.num_bytes / self.bandwidth

    def compute(self, num_tokens: int) -> float:
        """Seconds to multiply that many tokens with all weights."""
        return 2 * self.num_weights * num_tokens / self.rate


def floors(target: Target) -> Floors:
    """Counts a model's matrices (of a mixture of experts, all), and measures the machine in under a second."""
    embedding = target.original.get_input_embeddings()  # type: ignore[operator]
    output = getattr(target.original, "get_output_embeddings", lambda: None)()
    is_tied = output is not None and output.weight is embedding.weight
    unread = None if is_tied else embedding.weight
    weights = [weight for weight in target.original.parameters() if weight.ndim > 1 and weight is not unread]
    device, dtype = target.device, target.dtype
    long = torch.ones(1 << 26, device=device, dtype=dtype)
    square = torch.ones(1024, 1024, device=device, dtype=dtype)
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    reading, multiplying = _best(target, lambda: long.sum()), _best(target, lambda: square @ square)
    bandwidth = long.numel() * long.element_size() / reading
    return Floors(num_bytes, sum(weight.numel() for weight in weights), bandwidth, 2 * 1024**3 / multiplying)


def _best(target: Target, work: Callable[[], object]) -> float:
    """The least seconds of a few runs."""
    found = math.inf
    for _ in range(5):
        _wait(target)
        begin = time.perf_counter()
        work()
        _wait(target)
        found = min(found, time.perf_counter() - begin)
    return found
