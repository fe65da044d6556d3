"""Every error that outpace raises on purpose. Knows nothing about the rest of the package.

    OutpaceError
    ├── InputError (ValueError)      an argument is wrong: named, with the value seen and what to do
    ├── LoadError                    a model, tokenizer or draft cannot be loaded or is not supported
    │   └── MissingExtraError        an optional dependency is missing; the message has the pip command
    ├── DraftError                   a drafter proposed something impossible (costs one plain round)
    ├── TrainingError                heads cannot be trained: a loss is no number
    └── EngineError                  the engine cannot go on; a bug of ours unless the message says otherwise

A message has four parts: what failed, the value seen, why it matters, what to do.
"""


class OutpaceError(Exception):
    """Base of all errors raised by outpace."""


class InputError(OutpaceError, ValueError):
    """An argument that cannot be honoured. Raised before the first token."""


class LoadError(OutpaceError):
    """A model, tokenizer or drafter that cannot be used."""


class MissingExtraError(LoadError):
    """An optional dependency is not installed."""


class DraftError(OutpaceError):
    """A draft that breaks the drafter's contract: wrong ids, too many nodes, not a tree."""


class TrainingError(OutpaceError):
    """Training cannot go on. Nothing was written that looks trained."""


class EngineError(OutpaceError):
    """The engine met a state it cannot decode from."""
