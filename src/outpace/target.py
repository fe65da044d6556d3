"""The only file that calls the user's model: keyword names, masks, positions, batching, logits, hidden states.

A forward takes one block of new nodes per row. A block that is a chain goes through the model's own mask code, as
in plain decoding; a tree, or rows of different lengths, go through a mask layout. The model is never changed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import masks, tree
from .cache import Cache, build_cache
from .errors import EngineError, InputError, LoadError


@dataclass(frozen=True, slots=True)
class Block:
    """What one row feeds to a forward.

    row: index in the cache. tokens, parents: [nodes] the row's whole open block; a parent of -1 is the context.
    first: nodes before this one are already in the cache and only attended to. num_logits: for how many of the last
    nodes logits are wanted.
    """

    row: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    first: int = 0
    num_logits: int = 1

    @staticmethod
    def chain(row: int, tokens: Sequence[int], num_logits: int = 1) -> Block:
        """A block in which every token follows the one before: committed text that the cache does not hold yet."""
        return Block(row, tuple(tokens), tuple(range(-1, len(tokens) - 1)), num_logits=num_logits)

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.first


@dataclass(frozen=True, slots=True)
class Output:
    """What a forward gives back for one row.

    logits: [num_logits, vocab] in the model's dtype, for the last `num_logits` nodes of the block
    hidden: layer -> [num_new, hidden] of the layers that were asked for
    """

    logits: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)


class Target:
    """A causal language model with everything known about how to call it.

    can_tree: tree-shaped and ragged blocks may be given (else chains, one row a pass); cleared when a probe finds
    them wrong. tree_obstacle: why they cannot even be tried.
    max_positions: the number of positions the model was built for, or None when it states none.
    model: what is called. original: the user's model, where `model` is a twin with the same parameters.
    """

    def __init__(self, model: nn.Module, original: nn.Module | None = None) -> None:
        config: Any = getattr(model, "config", None)
        if config is None or not callable(getattr(model, "get_input_embeddings", None)):
            raise LoadError(
                f"A transformers causal language model is needed, got {type(model).__name__}. "
                "Load one with AutoModelForCausalLM.from_pretrained."
            )
        if getattr(config, "is_encoder_decoder", False):
            raise LoadError(
                f"{type(model).__name__} is an encoder-decoder model; its decoder reads a second input that a token "
                "tree does not carry. Use a decoder-only (causal) model, or transformers' own generate."
            )
        # Wrappers (torch.compile, adapters) forward any argument; the transformers model inside says what it takes.
        inner = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), model)
        accepted = inspect.signature(inner.forward).parameters
        keyword = next((name for name in ("cache", "past_key_values") if name in accepted), None)
        if keyword is None:
            raise LoadError(
                f"{type(model).__name__}.forward takes no key/value cache (`cache` or `past_key_values`), so decoding "
                "step by step would recompute the whole text. Use transformers' own generate."
            )
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise LoadError(
                "The active adapter adds virtual tokens to the text (prompt or prefix tuning), which the cache of "
                "drafts does not carry. Use an adapter of the weights (LoRA), or transformers' own generate."
            )
        if model.get_input_embeddings().weight.is_meta:  # type: ignore[operator]
            raise LoadError(
                "The model's embedding has no data here: it is offloaded by its device_map. Keep the embedding on a "
                "device; other layers may be offloaded."
            )
        if model.training:
            raise LoadError("The model is in training mode: dropout would change its text. Call model.eval() first.")
        self.model = model
        self.original = model if original is None else original
        self._parts = _parts(self.original)
        self.config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        output = getattr(model, "get_output_embeddings", lambda: None)()
        self.vocab_size = int(getattr(output, "out_features", None) or self.config.vocab_size)
        limit = getattr(self.config, "max_position_embeddings", getattr(self.config, "max_seq_len", None))
        self.max_positions: int | None = limit if isinstance(limit, int) and limit > 0 else None
        self._cache_keyword = keyword
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = "logits_to_keep" in accepted
        self.tree_obstacle = self._tree_obstacle()
        self.can_tree = self.tree_obstacle is None
        self.can_copy = self.new_cache().can_copy
        self.switch_position, self._grows = _switch(self.config)

    def check_unchanged(self) -> None:
        """Raises EngineError where layers of the user's model were replaced since, which its twin would not have."""
        if self.model is not self.original and _parts(self.original) != self._parts:
            raise EngineError(
                "Layers of the model were replaced or added after it was loaded (an adapter?), which would be ignored. "
                "Load it again."
            )

    def check_span(self, num_prompt: int, num_new: int) -> None:
        """Raises InputError for a text whose scores would depend on how its tokens are grouped into forwards.

        Some rotary embeddings change all their frequencies when a forward reaches beyond a position, and some models
        choose the keys that they keep. Texts on one side of it are exact; a text that crosses it, or goes on changing
        beyond it, is not.
        """
        end = num_prompt + num_new
        if self.switch_position is None or end <= self.switch_position:
            return
        if self._grows or num_prompt <= self.switch_position:
            raise InputError(
                f"A prompt of {num_prompt} tokens and {num_new} new ones pass position {self.switch_position}, where "
                "this model changes its rotary frequencies or the keys that it keeps: drafts could not be verified. "
                f"Keep the text below it, with {max(0, self.switch_position - num_prompt)} new tokens or fewer."
            )

    @property
    def _implementation(self) -> str:
        return str(getattr(self.config, "_attn_implementation", None))

    def _tree_obstacle(self) -> str | None:
        """Why this model cannot be given a tree at all; None when it can be tried."""
        if not self.new_cache().can_gather:
            return "layers with recurrent or convolution state can only take chains"
        if not self._takes_positions:
            return "its forward takes no position_ids, so siblings cannot share a position"
        if getattr(self.config, "attn_temperature_tuning", False):
            return "its attention temperature follows the length of the cache, not the positions"
        name = self._implementation
        if not masks.can_mask_trees(name):
            return f"attention implementation {name!r} takes no mask that can carry a tree (sdpa and eager do)"
        return None

    def new_cache(self) -> Cache:
        """An empty cache for this model, which may hold many rows."""
        return build_cache(self.config)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device  # type: ignore[operator, no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype  # type: ignore[operator, no-any-return]

    def forward(self, cache: Cache, blocks: Sequence[Block], hidden_layers: Sequence[int] = ()) -> list[Output]:
        """One pass over every block, in as few model calls as the model and the block sizes allow.

        Nodes are written behind the committed columns of their rows; the caller then calls `cache.keep`.
        """
        outputs: dict[int, Output] = {}
        for group in self._groups(cache, blocks):
            together = self._call(cache, [blocks[index] for index in group], hidden_layers)
            outputs.update(zip(group, together, strict=True))
        return [outputs[index] for index in range(len(blocks))]

    def _groups(self, cache: Cache, blocks: Sequence[Block]) -> list[list[int]]:
        """Which blocks share a call: those of similar size, as every block is padded to the longest of its call."""
        switch = self.switch_position or sys.maxsize
        is_beyond = [cache.lengths[block.row] + len(block.tokens) > switch for block in blocks]
        by_size = sorted(range(len(blocks)), key=lambda index: (is_beyond[index], blocks[index].num_new))
        groups: list[list[int]] = []
        for index in by_size:
            can_join = bool(groups) and self.can_tree and cache.can_batch
            can_join = can_join and is_beyond[groups[-1][0]] == is_beyond[index]
            if can_join and blocks[index].num_new <= max(8, 2 * blocks[groups[-1][0]].num_new):
                groups[-1].append(index)
            else:
                groups.append([index])
        return [sorted(group, key=lambda index: blocks[index].row) for group in groups]

    def _call(self, cache: Cache, blocks: Sequence[Block], hidden_layers: Sequence[int]) -> list[Output]:
        num_nodes = max(block.num_new for block in blocks)
        lengths = [cache.lengths[block.row] for block in blocks]
        starts = [length + block.first for length, block in zip(lengths, blocks, strict=True)]
        tokens = [block.tokens[block.first :] + (block.tokens[-1],) * (num_nodes - block.num_new) for block in blocks]
        depths = [tree.depths(block.parents) for block in blocks]
        positions = [
            [length + depth for depth in depth_of[block.first :]] + [start] * (num_nodes - block.num_new)
            for length, start, depth_of, block in zip(lengths, starts, depths, blocks, strict=True)
        ]
        hf_cache = cache.open([block.row for block in blocks], starts, num_nodes)
        is_plain = len(set(starts)) == 1 and all(
            block.num_new == num_nodes and tree.is_chain(block.parents) for block in blocks
        )
        assert is_plain or self.can_tree, "only chains may reach a model without tree masks"
        num_logits = max(1, num_nodes - min(block.num_new - block.num_logits for block in blocks))
        query_positions = torch.tensor(positions, device=self.device)
        if self.model.training or self.original.training:
            raise EngineError("The model was put into training mode: dropout changes its text. Call model.eval().")
        if not is_plain and not masks.can_mask_trees(self._implementation):
            raise EngineError(
                f"The attention implementation was changed to {self._implementation!r}, which takes no mask that "
                "can carry a tree. Set it back to sdpa or eager, or load the model again."
            )
        layout = None if is_plain else self._layout(blocks, lengths, starts, depths, query_positions)
        arguments: dict[str, Any] = {self._cache_keyword: hf_cache, "use_cache": True, "return_dict": True}
        if self._takes_positions:
            arguments["position_ids"] = query_positions
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = num_logits
        if hidden_layers:
            arguments["output_hidden_states"] = list(hidden_layers)  # older versions read it as "all layers"
        with torch.no_grad(), masks.active(layout):
            result = self.model(input_ids=torch.tensor(tokens, device=self.device), **arguments)
        logits = result.logits[:, -num_logits:]
        outputs = []
        for index, block in enumerate(blocks):
            end = num_logits - (num_nodes - block.num_new)
            hidden = {layer: result.hidden_states[layer][index, : block.num_new] for layer in hidden_layers}
            outputs.append(Output(logits[index, end - block.num_logits : end], hidden))
        return outputs

    def _layout(
        self,
        blocks: Sequence[Block],
        lengths: Sequence[int],
        starts: Sequence[int],
        depths: Sequence[Sequence[int]],
        query_positions: Tensor,
    ) -> masks.Layout:
        """Positions and visibility of a ragged or tree-shaped call. A padding node sees the context and itself."""
        num_rows, num_nodes = query_positions.shape
        columns = max(starts) + num_nodes
        keys = torch.arange(columns).repeat(num_rows, 1)
        visible = keys[:, None, :] < torch.tensor(lengths)[:, None, None]
        visible = visible.repeat(1, num_nodes, 1)
        for row, (block, length, start) in enumerate(zip(blocks, lengths, starts, strict=True)):
            size = len(block.tokens)
            keys[row, length : length + size] = length + torch.tensor(depths[row])
            seen = torch.from_numpy(tree.ancestors(block.parents)[block.first :])
            visible[row, : block.num_new, length : length + size] = seen
            for padding in range(block.num_new, num_nodes):
                visible[row, padding, start + padding] = True
                keys[row, start + padding] = start
        device = query_positions.device
        return masks.Layout(query_positions, keys.to(device), visible.to(device))


def _parts(model: nn.Module) -> list[int]:
    return [id(part) for part in (*model.modules(), *model.parameters())]


def _switch(config: Any) -> tuple[int | None, bool]:
    """(last position before a token's scores depend on the other tokens of its forward, whether they go on to)."""
    kept = getattr(config, "keep_window_size", None)  # beyond it, the keys to attend to are chosen per forward
    if isinstance(kept, int) and kept > 0:
        return kept, True
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in (parameters, *parameters.values()) if isinstance(kind, dict)]
    types = {kind.get("rope_type"): kind for kind in kinds}
    if "longrope" in types:
        original = types["longrope"].get("original_max_position_embeddings")
        return int(
            original or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
        ), False
    return (int(config.max_position_embeddings), True) if "dynamic" in types else (None, False)
