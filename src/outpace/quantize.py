"""Draft models in 8 bits: a draft only guesses, so its weights may be coarse. The user's model is never changed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .errors import LoadError
from .probe import token_seconds
from .target import Target

DraftQuantize = Literal["auto", "int8", "none"]
_NUM_TIMED = 3
CLEARLY = 0.9  # a coarse draft is right a little less often: it must be this much faster

_log = logging.getLogger("outpace")


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and one scale per output, weight = int8 * scale. Activations go in bfloat16.

    Activations in 8 bits would be a little faster and much worse: a few large ones make the others vanish.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1).clamp_min(1e-9) / 127
        self.register_buffer("rows", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(torch.bfloat16))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] float32. Returns [..., out] float32."""
        flat = x.flatten(0, -2).to(torch.bfloat16)
        y: Tensor = torch.ops.aten._weight_int8pack_mm(flat, self.rows, self.scale).to(x.dtype)
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], -1)


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put what `make` returns in the place of every plain linear layer; subclasses do other things and stay."""
    for name, part in list(model.named_modules()):
        if type(part) is nn.Linear:
            above, _, child = name.rpartition(".")
            setattr(model.get_submodule(above), child, make(part))


def quantized(model: Any) -> Any:
    """A copy of a model whose linear layers have int8 weights.

    Everything else is shared with a float32 model, so the copy takes a quarter of its linear layers' memory; of another
    precision it is a copy, as casting would change the model's own tensors. Raises LoadError without such kernels.
    """
    if model.get_input_embeddings().weight.device.type != "cpu":
        raise LoadError("int8 drafts are for models on the CPU; here, draft in the model's own precision.")
    is_single = model.dtype == torch.float32
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())} if is_single else {}
    try:
        twin = copy.deepcopy(model, shared).float()
        replace_linears(twin, Int8Linear)
        for layer in twin.modules():
            if isinstance(layer, Int8Linear):
                layer(torch.zeros(1, layer.in_features))  # a torch without this kernel fails here
    except Exception as error:
        raise LoadError(f"The draft model cannot be quantised here: {error}. Use draft_quantize='none'.") from error
    return twin


def faster(target: Target) -> Target | None:
    """The model in int8, if that decodes a token in clearly less time, measured here and now; else None."""
    if target.device.type != "cpu":
        return None
    try:
        small = Target(quantized(target.original))
        token_seconds(small), token_seconds(target)  # warm-up
        turns = [(token_seconds(small), token_seconds(target)) for _ in range(_NUM_TIMED)]
    except Exception as error:  # kernels that are not there, a model that is quantised already
        _log.info("The draft model stays as it is: %s", error)
        return None
    ours, theirs = (min(times) for times in zip(*turns, strict=True))
    return small if ours < CLEARLY * theirs else None
