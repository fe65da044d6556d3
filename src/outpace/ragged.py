"""The ragged key/value cache: rows of their own lengths in preallocated buffers.

A forward writes the nodes of row r behind its committed columns and returns views of the buffers; `keep` moves the
columns of the accepted path to the front of that block and sets the length. No holes, no left padding, no copy of
the context.

    columns of a row:  | committed: length | open block: nodes of the tree | free ... capacity |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import CacheLayerMixin

_MIN_CAPACITY = 256

# Of one row: attention layer -> (keys, values), each [heads, columns, head dim].
Columns = dict[int, tuple[Tensor, Tensor]]


@dataclass(slots=True)
class Window:
    """The part of the buffers that the running forward reads and writes, shared by all layers of a cache."""

    num_rows: int = 0  # rows of the whole cache
    rows: slice | Tensor = field(default_factory=lambda: slice(0, 0))
    starts: tuple[int, ...] = ()
    num_nodes: int = 0
    end: int = 0  # columns that attention sees
    scatter: tuple[Tensor, Tensor] | None = None  # (rows [rows, 1], columns [rows, nodes]) when starts may differ

    @property
    def rows_key(self) -> tuple[int, ...]:
        """The rows, hashable."""
        rows = self.rows
        return (rows.start, rows.stop) if isinstance(rows, slice) else (-1, *rows.tolist())

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

    def __init__(self, window: Window) -> None:
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
        self.keys, self.values = (self._grown(buffer, window.end) for buffer in (self.keys, self.values))
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def reserve(self) -> None:
        """Make room for the open window, if there are buffers yet."""
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            self.keys, self.values = (self._grown(buffer, self.window.end) for buffer in (self.keys, self.values))

    def _grown(self, buffer: Tensor, end: int) -> Tensor:
        """The buffer, or a larger one, with room for every row and for the columns before `end`."""
        rows, heads, columns, dim = buffer.shape
        if self.window.num_rows <= rows and end <= columns:
            return buffer
        if self.window.num_rows > rows:
            rows = self.window.num_rows if rows == 0 else max(self.window.num_rows, 2 * rows)
        if end > columns:
            columns = max(_MIN_CAPACITY, end + end // 2)
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

    def set_row(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Write the first columns of a row, which may be larger than the buffers. keys: [heads, columns, head dim]."""
        if not self.is_initialized:
            self.lazy_initialization(keys[None], values[None])
        assert self.keys is not None and self.values is not None
        self.keys, self.values = (self._grown(buffer, keys.shape[1]) for buffer in (self.keys, self.values))
        self.keys[row, :, : keys.shape[1]] = keys
        self.values[row, :, : values.shape[1]] = values

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
    """Rows of different lengths for models whose layers all keep keys and values per token.

    keeps_buffers: they stay where they are when the last row leaves, for passes that were captured with them.
    """

    can_gather = can_crop = can_batch = can_copy = True
    keeps_buffers = False

    def __init__(self, num_layers: int, passive_layers: dict[int, Any]) -> None:
        """passive_layers: layer index -> transformers layer that holds nothing (shared or absent attention)."""
        self.lengths: list[int] = []
        self._window = Window()
        layers = [passive_layers.get(index) or RaggedLayer(self._window) for index in range(num_layers)]
        self._by_number = {i: layer for i, layer in enumerate(layers) if isinstance(layer, RaggedLayer)}
        self._ragged = list(self._by_number.values())
        self._hf = HFCache(layers=layers)

    def add_row(self) -> int:
        self.lengths.append(0)
        self._window.num_rows = len(self.lengths)
        for layer in self._ragged:
            layer.wipe_row(len(self.lengths) - 1)
        return len(self.lengths) - 1

    def drop_row(self, row: int) -> None:
        last = len(self.lengths) - 1
        if last == 0 and not self.keeps_buffers:
            for layer in self._ragged:
                layer.clear()
        elif row != last:
            for layer in self._ragged:
                layer.move_row(last, row, self.lengths[last])
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self._window.num_rows = last

    def open(self, rows: Sequence[int], starts: Sequence[int], num_nodes: int, columns: int = 0) -> HFCache:
        window = self._window
        first = rows[0]
        is_range = list(rows) == list(range(first, first + len(rows)))
        window.rows = slice(first, first + len(rows)) if is_range else torch.tensor(rows)
        window.starts, window.num_nodes = tuple(starts), num_nodes
        needed = max(starts) + num_nodes
        assert columns == 0 or columns >= needed, "the block ends beyond the columns"
        window.end = columns or needed
        window.scatter = None
        if len(set(starts)) > 1 or columns:
            places = torch.tensor(starts)[:, None] + torch.arange(num_nodes)
            window.scatter = (torch.tensor(rows)[:, None], places)
        return self._hf

    @property
    def scatter(self) -> tuple[Tensor, Tensor] | None:
        """(rows [rows, 1], columns [rows, nodes]) that the open forward writes; None where they are a slice."""
        return self._window.scatter

    @scatter.setter
    def scatter(self, value: tuple[Tensor, Tensor]) -> None:
        self._window.scatter = value

    def reserve(self) -> tuple[object, ...]:
        """Make room for the open forward. Returns where the buffers are: captured passes are void once that changes."""
        for layer in self._ragged:
            layer.reserve()
        buffers = [buffer for layer in self._ragged for buffer in (layer.keys, layer.values) if buffer is not None]
        return (self._window.rows_key, *((buffer.data_ptr(), *buffer.shape[::2]) for buffer in buffers))

    def keep(self, row: int, path: Sequence[int]) -> None:
        length = self.lengths[row]
        in_place = next((i for i, node in enumerate(path) if node != i), len(path))
        if in_place < len(path):
            source = torch.tensor(path[in_place:]) + length
            for layer in self._ragged:
                layer.move(row, source, length + in_place)
        self.lengths[row] = length + len(path)

    def columns(self, row: int) -> Columns:
        length = self.lengths[row]
        copies: Columns = {}
        for number, layer in self._by_number.items():
            assert layer.keys is not None and layer.values is not None, "a forward has written every layer"
            copies[number] = (layer.keys[row, :, :length].clone(), layer.values[row, :, :length].clone())
        return copies

    def set_columns(self, row: int, columns: Columns) -> None:
        for number, layer in self._by_number.items():
            layer.set_row(row, *columns[number])
            self.lengths[row] = columns[number][0].shape[1]
