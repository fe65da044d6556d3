"""Draft models in 8 bits: a draft only guesses, so its weights may be coarse. The user's model is never changed."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from typing import Any, Literal

import torch
from torch import nn

from .errors import LoadError
from .target import Block, Target

DraftQuantize = Literal["auto", "int8", "none"]
_NUM_TIMED = 3
_CLEARLY = 0.9  # a coarse draft is right a little less often: it must be this much faster

_log = logging.getLogger("outpace")


def quantized(model: Any) -> Any:
    """A copy of a model whose linear layers have int8 weights, one scale per row, and int8 activations.

    Everything else is shared with a float32 model, so the copy takes a quarter of its linear layers' memory; of another
    precision it is a copy, as casting would change the model's own tensors. Raises LoadError without such kernels.
    """
    if model.get_input_embeddings().weight.device.type != "cpu":
        raise LoadError("int8 drafts are for models on the CPU; here, draft in the model's own precision.")
    is_single = model.dtype == torch.float32
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())} if is_single else {}
    twin = copy.deepcopy(model, shared).float()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch recommends torchao, whose eager CPU kernels are slower than float32
            from torch.ao import quantization

            scheme = {nn.Linear: quantization.per_channel_dynamic_qconfig}
            quantization.quantize_dynamic(twin, scheme, inplace=True)
    except Exception as error:  # a torch without these kernels, or a layer that they do not take
        raise LoadError(f"The draft model cannot be quantised here: {error}. Use draft_quantize='none'.") from error
    return twin


def faster(target: Target) -> Target | None:
    """The model in int8, if that decodes a token in clearly less time, measured here and now; else None."""
    if target.device.type != "cpu":
        return None
    try:
        small = Target(quantized(target.model))
        _seconds(small), _seconds(target)  # warm-up
        turns = [(_seconds(small), _seconds(target)) for _ in range(_NUM_TIMED)]
    except Exception as error:  # kernels that are not there, a model that is quantised already
        _log.info("The draft model stays as it is: %s", error)
        return None
    ours, theirs = (min(times) for times in zip(*turns, strict=True))
    return small if ours < _CLEARLY * theirs else None


def _seconds(target: Target) -> float:
    """The time of one token behind a short text."""
    cache = target.new_cache()
    row = cache.add_row()
    target.forward(cache, [Block.chain(row, [0] * 16)])
    cache.keep(row, range(16))
    begin = time.perf_counter()
    target.forward(cache, [Block.chain(row, [0])])
    return time.perf_counter() - begin
