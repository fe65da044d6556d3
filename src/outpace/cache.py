"""The cache of a model: key/value rows for attention, states for recurrence. What a model's layers allow decides.

Layers with recurrent or convolution state cannot give up a tail. `StateCache` snapshots their state before a block
and, when only a part of it is kept, goes back to the snapshot: the row's length then stays where it was and the
engine feeds the kept tokens again with the next block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .errors import InputError, LoadError
from .ragged import Columns, RaggedCache, RaggedLayer, Window

_PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


class Cache(Protocol):
    """What the engine and the target need of a cache.

    lengths: committed columns of each row. can_gather: any path of a tree may be kept. can_crop: a block may be kept
    in part. can_batch: several rows may go through one forward. can_copy: rows can be read and set from outside.
    """

    lengths: list[int]
    can_gather: bool
    can_crop: bool
    can_batch: bool
    can_copy: bool

    def add_row(self) -> int:
        """A new empty row; its index is the number of rows before."""
        ...

    def drop_row(self, row: int) -> None:
        """Free a row. The last row takes its index."""
        ...

    def open(self, rows: Sequence[int], starts: Sequence[int], num_nodes: int, columns: int = 0) -> HFCache:
        """The transformers cache for a forward that writes `num_nodes` columns of `rows`, from `starts` on.

        columns: how many columns attention sees, where that is more than those of the longest row; only where
        `can_gather`.
        """
        ...

    def keep(self, row: int, path: Sequence[int]) -> None:
        """Keep the given nodes of the row's block (increasing indices) and drop its other nodes."""
        ...

    def columns(self, row: int) -> Columns:
        """A copy of the row's keys and values; only where `can_copy`."""
        ...

    def set_columns(self, row: int, columns: Columns) -> None:
        """Make an empty row hold these keys and values; only where `can_copy`."""
        ...


class StateCache:
    """One transformers cache per row, for models with recurrent or convolution state. Chains only, one row a pass."""

    can_gather = can_crop = can_batch = can_copy = False

    def __init__(self, config: Any) -> None:
        self.lengths: list[int] = []
        self._config = config
        self._rows: list[_StateRow] = []

    def add_row(self) -> int:
        window = Window(num_rows=1, rows=slice(0, 1))
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

    def open(self, rows: Sequence[int], starts: Sequence[int], num_nodes: int, columns: int = 0) -> HFCache:
        (row,), (start,) = rows, starts
        assert columns in (0, start + num_nodes), "a state has no columns to pad"
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

    def columns(self, row: int) -> Columns:
        raise NotImplementedError("a state cannot be copied out as columns")

    def set_columns(self, row: int, columns: Columns) -> None:
        raise NotImplementedError("a state cannot be set from columns")


class FirstLayers:
    """The first layers of the target's cache, with lengths of its own for what the draft has written."""

    can_gather = can_crop = can_batch = True
    can_copy = False

    def __init__(self, cache: Cache, count: int) -> None:
        self._cache, self._count = cache, count
        self.lengths: list[int] = []

    def follow(self, row: int) -> None:
        """Take the row's length from the target: what the draft wrote beyond it is gone."""
        self.lengths.extend([0] * (row + 1 - len(self.lengths)))
        self.lengths[row] = self._cache.lengths[row]

    def open(self, rows: Sequence[int], starts: Sequence[int], num_nodes: int, columns: int = 0) -> HFCache:
        whole = self._cache.open(rows, starts, num_nodes, columns)
        return HFCache(layers=whole.layers[: self._count])

    def keep(self, row: int, path: Sequence[int]) -> None:
        assert list(path) == list(range(len(path))), "the draft keeps committed tokens only"
        self.lengths[row] += len(path)

    def add_row(self) -> int:
        raise NotImplementedError("rows are the target's")

    def drop_row(self, row: int) -> None:
        raise NotImplementedError("rows are the target's")

    def columns(self, row: int) -> Columns:
        raise NotImplementedError("the target's cache can be copied")

    def set_columns(self, row: int, columns: Columns) -> None:
        raise NotImplementedError("the target's cache can be set")


@dataclass(slots=True)
class _StateRow:
    hf: HFCache
    window: Window
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


def num_cached_tokens(cache: Any) -> int:
    """How many tokens a user's cache holds; 0 for None and for one that only has states, which does not say."""
    try:
        return 0 if cache is None else int(cache.get_seq_length())
    except ValueError:
        return 0


def read_columns(cache: Any, config: Any, row: int, padding: int) -> Columns:
    """One row of a user's cache, without the columns of its left padding.

    Layers with a sliding window have let go of old columns; zeros stand there, which no later token looks at.
    Raises InputError for a cache whose layers keep something else than keys and values.
    """
    numbers = [i for i, layer in enumerate(_layers(config)) if isinstance(layer, DynamicLayer)]
    layers = {i: layer for i, layer in enumerate(getattr(cache, "layers", ())) if i in numbers}
    if len(layers) < len(numbers) or any(type(layer) not in _PLAIN_LAYERS for layer in layers.values()):
        raise InputError(
            f"past_key_values is a {type(cache).__name__} that cannot be gone on from: only a DynamicCache that this "
            "model has filled can. Leave it out: the whole text is in input_ids and is read again."
        )
    length = cache.get_seq_length()
    columns: Columns = {}
    for number, layer in layers.items():
        if row >= layer.keys.shape[0]:
            raise InputError(
                f"past_key_values holds {layer.keys.shape[0]} rows, and the batch has more. Give one per row."
            )
        first = length - layer.keys.shape[2]  # above 0 where a window has let go
        keys, values = (nn.functional.pad(x[row], (0, 0, first, 0)) for x in (layer.keys, layer.values))
        columns[number] = (keys[:, padding:], values[:, padding:])
    return columns


def write_columns(cache: HFCache, rows: Sequence[Columns], paddings: Sequence[int]) -> None:
    """Append to a cache what it does not hold yet of the rows, left padding included, up to the end of the shortest.

    A row that ended early was not fed its pad tokens. What the cache lacks of a text is read again by whoever goes on.
    """
    start = cache.get_seq_length()
    for number in rows[0]:
        both = []
        for part in (0, 1):
            padded = [
                nn.functional.pad(columns[number][part], (0, 0, padding, 0))
                for columns, padding in zip(rows, paddings, strict=True)
            ]
            end = min(x.shape[1] for x in padded)
            both.append(torch.stack([x[:, start:end] for x in padded]))
        cache.update(both[0], both[1], number)


def _numbers(items: Sequence[int]) -> str:
    shown = ", ".join(str(item) for item in items[:6])
    return shown if len(items) <= 6 else f"{shown}, … ({len(items)} in all)"
