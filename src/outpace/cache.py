"""The ragged key/value cache. The only file that touches transformers' cache classes.

Every row has its own length. A forward writes the nodes of row r behind its committed columns and returns views of
preallocated buffers; `keep` moves the columns of the accepted path to the front of that block and sets the length.
No holes, no left padding, no copy of the context.

    columns of a row:  | committed: length | open block: nodes of the tree | free ... capacity |

Layers with recurrent or convolution state cannot give up a tail. `StateCache` snapshots their state before a block
and, when only a part of it is kept, goes back to the snapshot: the row's length then stays where it was and the
engine feeds the kept tokens again with the next block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from .errors import LoadError

_MIN_CAPACITY = 256


class Cache(Protocol):
    """What the engine and the target need of a cache.

    lengths: committed columns of each row. can_gather: any path of a tree may be kept. can_crop: a block may be kept
    in part. can_batch: several rows may go through one forward.
    """

    lengths: list[int]
    can_gather: bool
    can_crop: bool
    can_batch: bool

    def add_row(self) -> int:
        """A new empty row; its index is the number of rows before."""
        ...

    def drop_row(self, row: int) -> None:
        """Free a row. The last row takes its index."""
        ...

    def open(self, rows: Sequence[int], starts: Sequence[int], num_nodes: int) -> HFCache:
        """The transformers cache for a forward that writes `num_nodes` columns of `rows`, from `starts` on."""
        ...

    def keep(self, row: int, path: Sequence[int]) -> None:
        """Keep the given nodes of the row's block (increasing indices) and drop its other nodes."""
        ...


@dataclass(slots=True)
class _Window:
    """The part of the buffers that the running forward reads and writes, shared by all layers of a cache."""

    num_rows: int = 0  # rows of the whole cache
    rows: slice | Tensor = field(default_factory=lambda: slice(0, 0))
    starts: tuple[int, ...] = ()
    num_nodes: int = 0
    end: int = 0  # columns that attention sees
    scatter: tuple[Tensor, Tensor] | None = None  # (rows [rows, 1], columns [rows, nodes]) when starts differ

    def scatter_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The scatter indices on a device; copied there once per forward."""
        assert self.scatter is not None, "the rows start at one column"
        if self.scatter[0].device != device:
            self.scatter = (self.scatter[0].to(device), self.scatter[1].to(device))
        return self.scatter


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one attention layer: [rows, heads, capacity, head dim] buffers that grow by doubling."""

    is_sliding = False  # windows are enforced by the mask; the buffer keeps everything
    is_croppable = False  # rows are cropped by `RaggedCache.keep`, not by transformers

    def __init__(self, window: _Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states.new_zeros(0, key_states.shape[1], 0, key_states.shape[3])
        self.values = value_states.new_zeros(0, value_states.shape[1], 0, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the block of the open window; returns keys and values [rows, heads, end, head dim]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        assert self.keys is not None and self.values is not None
        assert key_states.shape[2] == window.num_nodes, "the model changed the number of tokens"
        if window.end > self.keys.shape[2] or window.num_rows > self.keys.shape[0]:
            self.keys, self.values = (self._grown(buffer) for buffer in (self.keys, self.values))
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _grown(self, buffer: Tensor) -> Tensor:
        rows, heads, columns, dim = buffer.shape
        if self.window.num_rows > rows:
            rows = self.window.num_rows if rows == 0 else max(self.window.num_rows, 2 * rows)
        if self.window.end > columns:
            columns = max(_MIN_CAPACITY, self.window.end + self.window.end // 2)
        # Zeros, not uninitialised memory: a masked column must still be a number.
        grown = buffer.new_zeros(rows, heads, columns, dim)
        grown[: buffer.shape[0], :, : buffer.shape[2]] = buffer
        return grown

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        window = self.window
        if window.scatter is None:
            start = window.starts[0]
            buffer[window.rows, :, start : start + window.num_nodes] = states
        else:
            rows, columns = window.scatter_on(buffer.device)
            buffer[rows, :, columns] = states.transpose(1, 2)
        return buffer[window.rows, :, : window.end]

    def move(self, row: int, source: Tensor, target: int) -> None:
        """Copy the columns `source` of a row to the columns from `target` on."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[row, :, target : target + source.shape[0]] = buffer[row, :, source.to(buffer.device)]

    def wipe_row(self, row: int) -> None:
        """What an earlier row left in this place must not stay: a masked column that is not a number spreads."""
        for buffer in (self.keys, self.values):
            if buffer is not None and row < buffer.shape[0]:
                buffer[row] = 0

    def move_row(self, source: int, target: int, columns: int) -> None:
        self.wipe_row(target)
        for buffer in (self.keys, self.values):
            if buffer is not None and source < buffer.shape[0]:
                buffer[target, :, :columns] = buffer[source, :, :columns]

    def clear(self) -> None:
        """Free the buffers; the next update makes new ones."""
        self.keys = self.values = None
        self.is_initialized = False

    def get_seq_length(self, *args: Any) -> int:
        return self.window.starts[0] if self.window.starts else 0

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.window.end, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name in older versions


class RaggedCache:
    """Rows of different lengths for models whose layers all keep keys and values per token."""

    can_gather = can_crop = can_batch = True

    def __init__(self, num_layers: int, passive_layers: dict[int, Any]) -> None:
        """passive_layers: layer index -> transformers layer that holds nothing (shared or absent attention)."""
        self.lengths: list[int] = []
        self._window = _Window()
        layers = [passive_layers.get(index) or RaggedLayer(self._window) for index in range(num_layers)]
        self._ragged = [layer for layer in layers if isinstance(layer, RaggedLayer)]
        self._hf = HFCache(layers=layers)

    def add_row(self) -> int:
        self.lengths.append(0)
        self._window.num_rows = len(self.lengths)
        for layer in self._ragged:
            layer.wipe_row(len(self.lengths) - 1)
        return len(self.lengths) - 1

    def drop_row(self, row: int) -> None:
        last = len(self.lengths) - 1
        if last == 0:
            for layer in self._ragged:
                layer.clear()
        elif row != last:
            for layer in self._ragged:
                layer.move_row(last, row, self.lengths[last])
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self._window.num_rows = last

    def open(self, rows: Sequence[int], starts: Sequence[int], num_nodes: int) -> HFCache:
        window = self._window
        first = rows[0]
        is_range = list(rows) == list(range(first, first + len(rows)))
        window.rows = slice(first, first + len(rows)) if is_range else torch.tensor(rows)
        window.starts, window.num_nodes = tuple(starts), num_nodes
        window.end = max(starts) + num_nodes
        window.scatter = None
        if len(set(starts)) > 1:
            columns = torch.tensor(starts)[:, None] + torch.arange(num_nodes)
            window.scatter = (torch.tensor(rows)[:, None], columns)
        return self._hf

    def keep(self, row: int, path: Sequence[int]) -> None:
        length = self.lengths[row]
        in_place = next((i for i, node in enumerate(path) if node != i), len(path))
        if in_place < len(path):
            source = torch.tensor(path[in_place:]) + length
            for layer in self._ragged:
                layer.move(row, source, length + in_place)
        self.lengths[row] = length + len(path)


class StateCache:
    """One transformers cache per row, for models with recurrent or convolution state. Chains only, one row a pass."""

    can_gather = can_crop = can_batch = False

    def __init__(self, config: Any) -> None:
        self.lengths: list[int] = []
        self._config = config
        self._rows: list[_StateRow] = []

    def add_row(self) -> int:
        window = _Window(num_rows=1, rows=slice(0, 1))
        layers = [
            layer if _has_state(layer) or not isinstance(layer, DynamicLayer) else RaggedLayer(window)
            for layer in _layers(self._config)
        ]
        stateful = [layer for layer in layers if _has_state(layer)]
        self._rows.append(_StateRow(HFCache(layers=layers), window, stateful))
        self.lengths.append(0)
        return len(self.lengths) - 1

    def drop_row(self, row: int) -> None:
        self._rows[row], self.lengths[row] = self._rows[-1], self.lengths[-1]
        self._rows.pop()
        self.lengths.pop()

    def open(self, rows: Sequence[int], starts: Sequence[int], num_nodes: int) -> HFCache:
        (row,), (start,) = rows, starts
        state = self._rows[row]
        state.window.starts, state.window.num_nodes = (start,), num_nodes
        state.window.end = start + num_nodes
        if start == self.lengths[row]:
            if state.is_open:  # the last forward was interrupted before its `keep`
                state.restore()
            state.snapshot = [_snapshot(layer) for layer in state.stateful]
        state.is_open = True
        return state.hf

    def keep(self, row: int, path: Sequence[int]) -> None:
        state = self._rows[row]
        assert list(path) == list(range(len(path))), "a state cache can only keep the beginning of a chain"
        if len(path) == state.window.end - self.lengths[row]:
            self.lengths[row] += len(path)
        else:
            state.restore()
        state.is_open = False


@dataclass(slots=True)
class _StateRow:
    hf: HFCache
    window: _Window
    stateful: list[Any]
    snapshot: list[dict[str, Any]] = field(default_factory=list)
    is_open: bool = False

    def restore(self) -> None:
        """Put the states back as they were before the open block."""
        for layer, snapshot in zip(self.stateful, self.snapshot, strict=True):
            for name, value in snapshot.items():
                setattr(layer, name, _copied(value))


def _layers(config: Any) -> list[Any]:
    """transformers' own choice of cache layers for a model."""
    return list(DynamicCache(config=config).layers)


def _has_state(layer: Any) -> bool:
    return hasattr(layer, "conv_states") or hasattr(layer, "recurrent_states")


_STATE_FIELDS = (
    "conv_states",
    "recurrent_states",
    "has_previous_state",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def _snapshot(layer: Any) -> dict[str, Any]:
    return {name: _copied(getattr(layer, name)) for name in _STATE_FIELDS if hasattr(layer, name)}


def build_cache(config: Any) -> Cache:
    """The cache that a model's layers allow. config: the text configuration of the model.

    Raises LoadError naming the layers that hold something this package cannot take back.
    """
    layers = _layers(config)
    if not layers:
        raise LoadError(
            "The model's configuration names no layers to cache, so its text cannot be decoded step by step."
        )
    mixed = [i for i, layer in enumerate(layers) if _has_state(layer) and isinstance(layer, DynamicLayer)]
    indexed = [i for i, layer in enumerate(layers) if hasattr(layer, "update_indexer")]
    for found, what in (
        (mixed, "attention and recurrent state in one layer"),
        (indexed, "an index of its keys"),
    ):
        if found:
            raise LoadError(
                f"Layers {_numbers(found)} keep {what}, which cannot be rewound to the accepted tokens. Continuing "
                "would corrupt the cache. Use this model with transformers' own generate."
            )
    if any(_has_state(layer) for layer in layers):
        return StateCache(config)
    passive = {i: layer for i, layer in enumerate(layers) if not isinstance(layer, DynamicLayer)}
    return RaggedCache(len(layers), passive)


def _numbers(items: Sequence[int]) -> str:
    shown = ", ".join(str(item) for item in items[:6])
    return shown if len(items) <= 6 else f"{shown}, … ({len(items)} in all)"
