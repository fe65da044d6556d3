"""Other libraries' ways to decode, for a comparison in the same run. One file per library.

A peer is a function from `Models` to a `Method`, or to a text that says why it cannot run here. A new one is a file in
this folder and a line in `PEERS`.
"""

from __future__ import annotations

from collections.abc import Callable

from ..methods import Method, Models
from .transformers import assisted, plain, prompt_lookup

PEERS: dict[str, Callable[[Models], Method | str]] = {
    "transformers": plain,
    "prompt-lookup": prompt_lookup,
    "assisted": assisted,
}
