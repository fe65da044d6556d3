"""Tree attention on unpatched models. Knows transformers' mask registry and nothing about caches or engines.

transformers builds every attention mask through one public registry, which receives the model's own rule
(causal, sliding window, chunks, ...) as a function of query and key *positions*. While a `Layout` is active, the
function registered here evaluates that rule on the logical positions of a ragged, tree-shaped block and ANDs the
block's visibility. Without one, which is the case for every other model and thread, it calls what was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from . import tree

# Attention implementations whose masks are tensors, which is what a tree needs. True: additive floats, False: bool.
_ADDITIVE = {"sdpa": False, "eager": True}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the nodes of one forward stand and what they may see.

    query_positions: [rows, nodes] int64    absolute position of each new node
    key_positions:   [rows, columns] int64  absolute position of what each cache column holds
    visible:         [rows, nodes, columns] bool  context of the row, ancestors of the node, and the node itself
    """

    query_positions: Tensor
    key_positions: Tensor
    visible: Tensor


def layout(
    query_positions: Tensor, lengths: Sequence[int], forest: Sequence[tuple[Sequence[int], int]], columns: int
) -> Layout:
    """The layout of rows whose blocks may be trees and are padded. A padding node sees the context and itself.

    query_positions: [rows, nodes]. lengths: committed columns of each row. forest: (parents, first new node) of each
    row's block. columns: how many attention sees.
    """
    num_rows, num_nodes = query_positions.shape
    keys = torch.arange(columns).repeat(num_rows, 1)
    visible = keys[:, None, :] < torch.tensor(lengths)[:, None, None]
    visible = visible.repeat(1, num_nodes, 1)
    for row, (length, (parents, first)) in enumerate(zip(lengths, forest, strict=True)):
        size, start = len(parents), length + first
        keys[row, length : length + size] = length + torch.tensor(tree.depths(parents))
        visible[row, : size - first, length : length + size] = torch.from_numpy(tree.ancestors(parents)[first:])
        padding = torch.arange(size - first, num_nodes)
        visible[row, padding, start + padding] = True
        keys[row, start + padding] = start
    device = query_positions.device
    return Layout(query_positions, keys.to(device), visible.to(device))


_active: ContextVar[Layout | None] = ContextVar("outpace_tree_layout", default=None)
# Forwards with a layout that run now, in any thread. At 0 the wrapper is a plain call, which torch.compile can trace.
_num_active = 0
_counting = Lock()


@contextmanager
def active(layout: Layout | None) -> Iterator[None]:
    """Within this context (and this thread only) masks are built for `layout`; None builds the usual ones."""
    global _num_active
    if layout is None:
        yield
        return
    token = _active.set(layout)
    with _counting:
        _num_active += 1
    try:
        yield
    finally:
        with _counting:
            _num_active -= 1
        _active.reset(token)


def can_mask_trees(implementation: str) -> bool:
    """Whether masks of this attention implementation can carry a tree; installs the mask function if so."""
    if implementation not in _ADDITIVE:
        return False
    current = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    if not getattr(current, "knows_outpace_layouts", False):
        AttentionMaskInterface.register(implementation, _wrap(current, _ADDITIVE[implementation]))
    return True


def _wrap(original: Callable[..., Any], is_additive: bool) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        layout = _active.get() if _num_active else None
        if layout is None:
            return original(*args, **kwargs)
        return _tree_mask(layout, kwargs["mask_function"], kwargs.get("dtype", torch.float32), is_additive)

    mask.knows_outpace_layouts = True  # type: ignore[attr-defined]
    return mask


def _tree_mask(layout: Layout, rule: Callable[..., Tensor], dtype: torch.dtype, is_additive: bool) -> Tensor:
    """[rows, 1, nodes, columns] bool, or additive 0 / most negative number of `dtype`."""
    rows, device = layout.query_positions.shape[0], layout.query_positions.device
    allowed = rule(
        torch.arange(rows, device=device)[:, None, None, None],
        torch.zeros(1, dtype=torch.int64, device=device)[:, None, None, None],
        layout.query_positions[:, None, :, None],
        layout.key_positions[:, None, None, :],
    )
    allowed = allowed & layout.visible[:, None]
    if not is_additive:
        return allowed
    return torch.where(allowed, torch.zeros((), dtype=dtype, device=device), torch.finfo(dtype).min)
