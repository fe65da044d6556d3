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

MOST_ROWS = 64  # beyond this, stock kernels are as good
_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp", "-c")
_TIMEOUT = 120  # seconds of a compilation

_log = logging.getLogger("outpace")

Kernel = Callable[..., None]


class FewRowsLinear(nn.Module):
    """A linear layer with the parameters of another one. It is that one where rows are many or not in float32."""

    def __init__(self, linear: nn.Linear, kernel: Kernel) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        weight, bias = self.weight, self.bias
        num_rows = x.numel() // self.in_features
        is_single = x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu"
        if not is_single or not 0 < num_rows <= MOST_ROWS or not weight.is_contiguous() or torch.is_grad_enabled():
            return nn.functional.linear(x, weight, bias)
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.out_features)
        pointer = None if bias is None else bias.data_ptr()
        self._kernel(
            x.data_ptr(), weight.data_ptr(), pointer, y.data_ptr(), num_rows, self.out_features, self.in_features
        )
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
    built = kernel()
    if built is None:
        return None
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, shared)
    for name, part in list(other.named_modules()):
        if type(part) is nn.Linear:
            above, _, child = name.rpartition(".")
            setattr(other.get_submodule(above), child, FewRowsLinear(part, built))
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
    for num_rows, width, outputs in ((1, 7, 2), (8, 64, 10), (19, 150, 31)):
        linear = nn.Linear(width, outputs)
        x = torch.randn(num_rows, width)
        with torch.no_grad():
            if not torch.allclose(FewRowsLinear(linear, function)(x), linear(x), atol=1e-5):
                _log.warning("The kernel for few rows gives wrong numbers on this machine and is not used.")
                return None
    return function


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
