"""outpace: Hugging Face causal language models, decoded faster, with exactly the text they would have written."""

from .drafters.memory import Memory
from .dropin import Accelerated, accelerate
from .engine import Engine
from .errors import DraftError, EngineError, InputError, LoadError, MissingExtraError, OutpaceError, TrainingError
from .loading import load
from .options import EngineOptions
from .sampling import SamplingParams
from .session import Chunk, Result, Stats, TokenLogprob

__all__ = [
    "Accelerated",
    "Chunk",
    "DraftError",
    "Engine",
    "EngineError",
    "EngineOptions",
    "InputError",
    "LoadError",
    "Memory",
    "MissingExtraError",
    "OutpaceError",
    "Result",
    "SamplingParams",
    "Stats",
    "TokenLogprob",
    "TrainingError",
    "accelerate",
    "load",
]
