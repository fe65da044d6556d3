"""Linear layers that are fast for few rows: on CPUs a draft of 16 tokens then costs little more than one token.

Stock kernels make a pass of 8 tokens cost 2.6 plain passes, as they are made for one row or for hundreds. This one
reads every weight once for all rows. It is compiled on the user's machine in a second or two, once, and kept in the
cache folder; where there is no compiler, everything stays as it was. The user's model is not touched: its twin has
other linear layers and the same parameters.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import models
from .quantize import replace_linears

MOST_ROWS = 64  # beyond this, stock kernels are as good
_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp", "-c")
_TIMEOUT = 120  # seconds of a compilation

_log = logging.getLogger("outpace")

Kernel = Callable[..., None]


class FewRowsLinear(nn.Module):
    """A linear layer with the parameters of another one. It is that one where rows are many or not in float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        weight, run = self.weight, kernel()
        is_few = 0 < x.numel() <= MOST_ROWS * self.in_features
        is_single = x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu"
        if run is None or not (is_few and is_single and weight.is_contiguous()) or torch.is_grad_enabled():
            return nn.functional.linear(x, weight, self.bias)
        return _linear(run, x, weight, self.bias)


def _linear(run: Kernel, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [..., in], weight: [out, in] contiguous, bias: [out] or None, float32 on the CPU. Returns [..., out]."""
    outputs, width = weight.shape
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], outputs)
    pointer = None if bias is None else bias.data_ptr()
    run(x.data_ptr(), weight.data_ptr(), pointer, y.data_ptr(), x.numel() // width, outputs, width)
    return y


def twin(model: nn.Module) -> nn.Module | None:
    """A model with the same parameters, whose linear layers are fast for few rows; None where that cannot be had.

    Only plain transformers models on a CPU in float32: what wrappers, hooks and adapters change later would not reach
    the twin.
    """
    if not isinstance(model, PreTrainedModel) or model.dtype != torch.float32 or model.device.type != "cpu":
        return None
    if getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "hf_device_map", None):
        return None
    parts = list(model.modules())
    if any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in parts):
        return None
    if kernel() is None or any(type(part) is FewRowsLinear for part in parts):
        return None
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, shared)
    replace_linears(other, FewRowsLinear)
    return other


@functools.cache
def kernel() -> Kernel | None:
    """The compiled kernel, checked against torch's own linear; None where it cannot be made, which is logged."""
    try:
        function = ctypes.CDLL(str(_library())).few_rows_linear
    except Exception as error:
        _log.info("There is no kernel for few rows here: %s", error)
        return None
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3
    function.restype = None
    random = torch.Generator().manual_seed(0)
    for num_rows, width, outputs in ((1, 7, 2), (8, 64, 10), (19, 150, 31)):
        shapes = ((num_rows, width), (outputs, width), (outputs,))
        x, weight, bias = (torch.randn(shape, generator=random) for shape in shapes)
        if not torch.allclose(_linear(function, x, weight, bias), nn.functional.linear(x, weight, bias), atol=1e-4):
            _log.warning("The kernel for few rows gives wrong numbers on this machine and is not used.")
            return None
    return function


def obstacle() -> str | None:
    """Why there is no kernel here; None where there is one."""
    if kernel() is not None:
        return None
    try:
        _library()
    except Exception as error:
        return str(error)
    return "the kernel gives wrong numbers on this machine"


def _library() -> Path:
    """The path of the shared library, compiled if this machine has not done it yet."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or platform.system() != "Linux":
        raise RuntimeError("no C++ compiler was found (g++, clang++ or the environment variable CXX)")
    runtime = sorted(Path(torch.__file__).parent.glob("lib/libgomp*"))[:1]  # two OpenMP runtimes disturb each other
    facts = (_SOURCE.read_text(encoding="utf-8"), compiler, str(runtime), torch.__version__, _processor())
    path = models.cache_root() / "kernels" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            part, whole = Path(folder) / "part.o", Path(folder) / "whole.so"
            link = [str(file) for file in runtime] or ["-fopenmp"]
            for command in (
                [compiler, *_FLAGS, str(_SOURCE), "-o", str(part)],
                [compiler, "-shared", str(part), *link, "-o", str(whole)],
            ):
                done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
                if done.returncode != 0:
                    raise RuntimeError(f"{compiler} failed: {done.stderr.strip()[:500]}")
            whole.replace(path)
    return path


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by machines."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    lines = {line for line in facts.splitlines() if line.startswith(("model name", "flags", "Features"))}
    return platform.machine() + "".join(sorted(lines))
