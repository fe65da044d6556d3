"""Drafts from the target's own first layers and its head. No second model, and no second cache.

LayerSkip (Elhoushi et al., arXiv 2404.16710) without its training: what the first layers say is often what all say.
Their keys and values are those that the target computes anyway, so the draft reads the target's cache and writes its
own nodes behind the committed columns, where the target's next forward overwrites them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache import Cache, FirstLayers
from ..errors import LoadError
from ..session import Session
from ..target import Block, Target
from .base import DEFAULT_K, Budget
from .model import ModelDrafter, RowDraft


def first_layers(model: Any, count: int) -> Any:
    """A model of the first `count` decoder layers and the head; every tensor is shared, the model is left alone.

    Raises LoadError for a model whose forward does not take the number of layers from its configuration.
    """
    prefix = getattr(model, "base_model_prefix", "")
    body = getattr(model, prefix, None)
    if body is None or not hasattr(body, "layers"):
        raise LoadError("early-exit needs a model whose decoder layers are in `layers`. Use another drafter.")
    twin, inner = copy.copy(model), copy.copy(body)
    twin._modules, inner._modules = dict(model._modules), dict(body._modules)
    twin.config = inner.config = config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    inner.layers = body.layers[:count]
    twin._modules[prefix] = inner
    return twin


class EarlyExitDrafter(ModelDrafter):
    """Chains or trees of the target's first `count` layers. The engine gives it the target's cache by `attach`."""

    name = "early-exit"

    def __init__(self, target: Target, count: int, width: int, confidence_threshold: float) -> None:
        draft = Target(first_layers(target.model, count))
        draft.can_tree = target.can_tree
        super().__init__(draft, target.vocab_size, target.vocab_size, width, confidence_threshold)
        self.count = count
        self._target_cache: Cache | None = None

    def attach(self, cache: Cache) -> None:
        self._target_cache = cache
        self._cache = FirstLayers(cache, self.count)

    def _clip(self, session: Session, budget: Budget) -> Budget:
        """No draft before the target has read the prompt: the draft would read it first. None outside an engine."""
        cache, row = self._target_cache, session.row
        if cache is None or row is None or cache.lengths[row] < len(session.tokens) - 1:
            return Budget(0, 0, budget.can_branch)
        return super()._clip(session, budget)

    def _rewind(self, session: Session) -> None:
        assert session.row is not None and isinstance(self._cache, FirstLayers)
        self._drafts[session.id] = RowDraft(session.row)
        self._cache.follow(session.row)

    def release(self, session: Session) -> None:
        self._drafts.pop(session.id, None)


def best_count(target: Target, texts: Sequence[Sequence[int]]) -> int:
    """The number of first layers that promises the most speed on these texts, by agreement with the whole model."""
    num_layers = int(target.config.num_hidden_layers)
    sizes = [sum(p.numel() for p in part.parameters()) for part in (target.model, first_layers(target.model, 1))]
    per_layer = max(1, (sizes[0] - sizes[1]) // max(1, num_layers - 1))
    head = target.vocab_size * int(target.config.hidden_size)
    wanted = [_choices(target, text) for text in texts]

    def speed(count: int) -> float:
        draft = Target(first_layers(target.model, count))
        pairs = zip(wanted, (_choices(draft, text) for text in texts), strict=True)
        agreement = torch.cat([(ours == theirs).float() for ours, theirs in pairs]).mean().item()
        cost = (count * per_layer + head) / (num_layers * per_layer + head)
        depths = range(1, DEFAULT_K + 1)
        return max(sum(agreement**i for i in range(depth + 1)) / (1 + depth * cost) for depth in depths)

    counts = sorted({max(1, round(num_layers * share / 8)) for share in range(1, 8)})
    return max(counts, key=speed)


def _choices(target: Target, text: Sequence[int]) -> Tensor:
    """[tokens]: what a model says after each token of a text."""
    cache = target.new_cache()
    (output,) = target.forward(cache, [Block.chain(cache.add_row(), text, num_logits=len(text))])
    return output.logits.argmax(-1)
