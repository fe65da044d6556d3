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

from . import graphs, masks, tree
from .cache import Cache, build_cache
from .errors import EngineError, InputError, LoadError
from .graphs import FixedPasses
from .ragged import RaggedCache


@dataclass(frozen=True, slots=True)
class Block:
    """What one row feeds to a forward.

    row: index in the cache. tokens, parents: [nodes] the row's whole open block; a parent of -1 is the context.
    first: nodes before this one are already in the cache and only attended to. num_logits: for how many of the last
    nodes logits are wanted. shape: (new nodes, key columns) to pad to, in a forward of its own; only where the target
    can take trees.
    """

    row: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    first: int = 0
    num_logits: int = 1
    shape: tuple[int, int] | None = None

    @staticmethod
    def chain(row: int, tokens: Sequence[int], num_logits: int = 1, shape: tuple[int, int] | None = None) -> Block:
        """A block in which every token follows the one before: committed text that the cache does not hold yet."""
        return Block(row, tuple(tokens), tuple(range(-1, len(tokens) - 1)), num_logits=num_logits, shape=shape)

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
    passes: runs small passes in a few fixed shapes, for machines where that is faster.
    """

    passes: FixedPasses | None = None

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
        cache = build_cache(self.config)
        if self.passes is not None and isinstance(cache, RaggedCache):
            cache.keeps_buffers = self.passes.is_captured
        return cache

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
            can_join = can_join and blocks[index].shape is None and blocks[groups[-1][0]].shape is None
            if can_join and blocks[index].num_new <= max(8, 2 * blocks[groups[-1][0]].num_new):
                groups[-1].append(index)
            else:
                groups.append([index])
        return [sorted(group, key=lambda index: blocks[index].row) for group in groups]

    def _call(self, cache: Cache, blocks: Sequence[Block], hidden_layers: Sequence[int]) -> list[Output]:
        lengths = [cache.lengths[block.row] for block in blocks]
        starts = [length + block.first for length, block in zip(lengths, blocks, strict=True)]
        num_nodes, columns = self._shape(cache, blocks, starts, hidden_layers)
        tokens = [block.tokens[block.first :] + (block.tokens[-1],) * (num_nodes - block.num_new) for block in blocks]
        trees = [tree.depths(block.parents) for block in blocks]
        positions = [
            [length + depth for depth in depths[block.first :]] + [start] * (num_nodes - block.num_new)
            for length, start, depths, block in zip(lengths, starts, trees, blocks, strict=True)
        ]
        hf_cache = cache.open([block.row for block in blocks], starts, num_nodes, columns)
        is_plain = (
            not columns
            and len(set(starts)) == 1
            and all(block.num_new == num_nodes and tree.is_chain(block.parents) for block in blocks)
        )
        assert is_plain or self.can_tree, "only chains may reach a model without tree masks"
        num_logits = max(1, num_nodes - min(block.num_new - block.num_logits for block in blocks))
        if self.model.training or self.original.training:
            raise EngineError("The model was put into training mode: dropout changes its text. Call model.eval().")
        if not is_plain and not masks.can_mask_trees(self._implementation):
            raise EngineError(
                f"The attention implementation was changed to {self._implementation!r}, which takes no mask that "
                "can carry a tree. Set it back to sdpa or eager, or load the model again."
            )
        arguments: dict[str, Any] = {self._cache_keyword: hf_cache, "use_cache": True, "return_dict": True}
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = num_logits
        if hidden_layers:
            arguments["output_hidden_states"] = list(hidden_layers)  # older versions read it as "all layers"
        input_ids, position_ids = (torch.tensor(rows, device=self.device) for rows in (tokens, positions))
        layout = None
        if not is_plain:
            end = columns or max(starts) + num_nodes
            forest = [(block.parents, block.first) for block in blocks]
            layout = masks.layout(position_ids, lengths, forest, end)

        def forward(input_ids: Tensor, position_ids: Tensor, layout: masks.Layout | None) -> Any:
            if self._takes_positions:
                arguments["position_ids"] = position_ids
            with torch.no_grad(), masks.active(layout):
                return self.model(input_ids=input_ids, **arguments)

        if columns and self.passes is not None and isinstance(cache, RaggedCache) and layout is not None:
            hidden_states: Any = ()
            logits = self._run_fixed(cache, num_logits, input_ids, layout, forward)
        else:
            result = forward(input_ids, position_ids, layout)
            logits, hidden_states = result.logits[:, -num_logits:], result.hidden_states
        outputs = []
        for index, block in enumerate(blocks):
            end = num_logits - (num_nodes - block.num_new)
            hidden = {layer: hidden_states[layer][index, : block.num_new] for layer in hidden_layers}
            outputs.append(Output(logits[index, end - block.num_logits : end], hidden))
        return outputs

    def _shape(
        self, cache: Cache, blocks: Sequence[Block], starts: Sequence[int], hidden_layers: Sequence[int]
    ) -> tuple[int, int]:
        """(nodes of each row, columns that attention sees or 0 for as many as there are)."""
        num_nodes = max(block.num_new for block in blocks)
        if blocks[0].shape is not None:
            return blocks[0].shape
        if self.passes is None or not self.can_tree or hidden_layers or not isinstance(cache, RaggedCache):
            return num_nodes, 0
        return graphs.padded(num_nodes, max(starts) + num_nodes) or (num_nodes, 0)

    def _run_fixed(
        self, cache: RaggedCache, num_logits: int, input_ids: Tensor, layout: masks.Layout, forward: Any
    ) -> Tensor:
        """[rows, num_logits, vocab] of a pass whose inputs are tensors that stay in place."""
        assert self.passes is not None and cache.scatter is not None, "passes of fixed shapes scatter"
        places = [index.to(self.device) for index in cache.scatter]
        key = (cache.reserve(), tuple(layout.visible.shape), num_logits)

        def run(inputs: tuple[Tensor, ...]) -> Tensor:
            cache.scatter = (inputs[4], inputs[5])
            result = forward(inputs[0], inputs[1], masks.Layout(inputs[1], inputs[2], inputs[3]))
            logits: Tensor = result.logits[:, -num_logits:]
            return logits

        inputs = (input_ids, layout.query_positions, layout.key_positions, layout.visible, *places)
        return self.passes.run(key, inputs, run)


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
