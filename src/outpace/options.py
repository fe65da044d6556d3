"""How an engine decodes: draft length, acceptance rule, exactness, and how prompts are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .accept import ACCEPTANCES, Acceptance
from .drafters.base import DEFAULT_K
from .errors import InputError

Exactness = Literal["numerical", "bitwise"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """k: most drafted tokens per round. acceptance: "coupled" (seed-exact), "rejection" (exact in distribution) or
    "typical" (NOT lossless). prefill_chunk: prompt tokens per forward, which bounds the memory of long prompts.

    exactness: "numerical": passes of different sizes round differently, so texts with and without drafts are equal up
    to ties. "bitwise": drafts are chains and every pass, plain ones too, is one row of k + 1 nodes over as many keys as
    the request can come to, so that equal texts have equal bits in every dtype.
    """

    k: int = DEFAULT_K
    acceptance: Acceptance = "coupled"
    prefill_chunk: int = 512
    exactness: Exactness = "numerical"

    def __post_init__(self) -> None:
        for name in ("k", "prefill_chunk"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 4096:
                remedy = " Use drafter='none' for plain decoding." if name == "k" else ""
                raise InputError(f"{name} must be a whole number from 1 to 4096, got {value!r}.{remedy}")
        if self.acceptance not in ACCEPTANCES:
            raise InputError(f"acceptance must be one of {', '.join(ACCEPTANCES)}, got {self.acceptance!r}.")
        if self.exactness not in get_args(Exactness):
            raise InputError(f"exactness must be one of {', '.join(get_args(Exactness))}, got {self.exactness!r}.")

    @property
    def is_bitwise(self) -> bool:
        return self.exactness == "bitwise"
