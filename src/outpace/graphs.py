"""Passes of a few fixed shapes. On a GPU each is captured once and replayed: no launch of single kernels, no Python.

A pass over a handful of tokens takes a GPU less time than Python takes to ask for it. So blocks are padded to one of
few sizes, keys to one of few lengths, and what goes in is copied to tensors that stay where they are. Without a GPU
the same passes run uncaptured, which is how they are tested.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NODES = (1, 2, 4, 8, 16, 32, 64)  # sizes of a block; larger ones are not captured
_LEAST_COLUMNS = 256
_MOST_GRAPHS = 64
_ALLOWED_ERROR = 0.01  # of the largest score, between a captured pass and the same one run

_log = logging.getLogger("outpace")

Inputs = tuple[Tensor, ...]
Forward = Callable[[Inputs], Tensor]


def padded(num_nodes: int, num_columns: int) -> tuple[int, int] | None:
    """(nodes, columns) to pad a pass to; None for one that is too large to gain."""
    nodes = next((size for size in NODES if size >= num_nodes), None)
    if nodes is None:
        return None
    needed, columns = num_columns - num_nodes + nodes, _LEAST_COLUMNS
    while columns < needed:
        columns += max(_LEAST_COLUMNS, columns // 4)  # at most a quarter of what attention reads is padding
    return nodes, columns


@dataclass(slots=True)
class _Pass:
    """inputs: the tensors that the pass reads. graph: what replays it; None while it was only run once. output: what it
    writes when replayed."""

    inputs: Inputs
    graph: Any = None
    output: Tensor | None = None


class FixedPasses:
    """The passes of one target. is_captured: False runs every pass anew, as on a CPU."""

    def __init__(self, is_captured: bool) -> None:
        self.is_captured = is_captured
        self.num_replays = 0
        self._passes: OrderedDict[Hashable, _Pass] = OrderedDict()

    def run(self, key: Hashable, inputs: Inputs, forward: Forward) -> Tensor:
        """The output of forward(inputs), a copy. key: equal for passes that differ in the values of `inputs` alone."""
        known = self._passes.get(key)
        if known is None:
            known = self._passes[key] = _Pass(tuple(tensor.clone() for tensor in inputs))
            if len(self._passes) > _MOST_GRAPHS:
                self._passes.popitem(last=False)
            return forward(known.inputs)  # the first time also allocates what a capture must not
        self._passes.move_to_end(key)
        for kept, tensor in zip(known.inputs, inputs, strict=True):
            kept.copy_(tensor)
        if self.is_captured and known.graph is None:
            self._capture(known, forward)
        if known.graph is None or known.output is None:
            return forward(known.inputs)
        known.graph.replay()
        self.num_replays += 1
        return known.output.clone()

    def _capture(self, found: _Pass, forward: Forward) -> None:
        """Where the model cannot be captured, or comes out different, no pass of it is captured any more."""
        wanted = forward(found.inputs)
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found.output = forward(found.inputs)
            graph.replay()
            error = float((found.output - wanted).abs().max())
            if not error <= _ALLOWED_ERROR * float(wanted.abs().max()):
                raise RuntimeError(f"a replayed pass is off by {error:.2g}")
            found.graph = graph
        except Exception as error:  # whatever the model's code does that a capture forbids
            self.is_captured = False
            _log.warning("Passes of this model are not captured: %s: %s", type(error).__name__, error)
