"""The most memory that this process holds while something runs."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

import torch

_STATM = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_EVERY = 0.02  # seconds


class Peak:
    """With it around a call, `megabytes` is the peak within: of the GPU where there is one, else resident memory.

    None on systems that do not tell.
    """

    def __init__(self) -> None:
        self.megabytes: float | None = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Peak:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        elif _STATM.is_file():
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        elif torch.cuda.is_available():
            self.megabytes = torch.cuda.max_memory_allocated() / 1e6

    def _watch(self) -> None:
        while True:
            now = int(_STATM.read_text().split()[1]) * _PAGE / 1e6
            self.megabytes = max(now, self.megabytes or 0.0)
            if self._done.wait(_EVERY):
                return
