"""Drafters from names: what `drafter=` may say, and whether target, draft model and tokenizers go together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from . import models
from .corpus import read_corpus
from .drafters.base import Drafter, NoDrafter
from .drafters.eagle import EagleDrafter
from .drafters.early_exit import EarlyExitDrafter, best_count, first_layers
from .drafters.heads import MarkovDrafter, MedusaDrafter
from .drafters.lookahead import JacobiDrafter, LookaheadDrafter
from .drafters.memory import Memory
from .drafters.model import DEFAULT_CONFIDENCE_THRESHOLD, ModelDrafter, SharedTokens
from .drafters.recycle import RecycleDrafter
from .drafters.suffix import DEFAULT_LEAST_VALUE, SuffixDrafter
from .drafters.texts import TextStore
from .drafters.translated import TranslatedDrafter
from .errors import InputError, LoadError
from .heads.eagle import EagleLayer
from .heads.files import load_heads
from .heads.markov import MarkovHeads
from .probe import probe
from .prompts import QUESTIONS
from .quantize import CLEARLY, DraftQuantize, Int8Linear, faster, quantized, replace_linears
from .ragged import RaggedCache
from .target import Target
from .union import UnionDrafter

DrafterName = Literal[
    "suffix", "lookup", "recycle", "lookahead", "jacobi", "model", "heads", "self", "early-exit", "none"
]
DRAFTERS: dict[DrafterName, str] = {
    "suffix": "copies what followed earlier occurrences of the text's ending; needs no model",
    "lookup": "classical prompt lookup: as suffix, but always drafts as much as allowed",
    "recycle": "what the target found likely before, for every token it has seen; needs no model",
    "lookahead": "the target's own parallel guesses, kept as n-grams; wants many nodes",
    "jacobi": "the target's own choices behind a guess; a baseline",
    "model": "a smaller model with the same vocabulary, given by draft_model",
    "heads": "trained heads on the model's hidden states (Medusa, EAGLE-3, our own), given by heads",
    "self": "the model itself with weights of 8 bits; needs no other model",
    "early-exit": "the model's own first layers and its head; needs no other model",
    "none": "plain decoding",
}
# Tokenizers may differ in this share of their entries (renamed special tokens); beyond it a draft is noise.
_MAX_DIFFERING_SHARE = 0.01
# The share of the target's tokens that the draft must know to be asked in its own ids.
_LEAST_SHARED = 0.5

_log = logging.getLogger("outpace")

Vocabularies = Literal["equal", "shared", "text"]
VOCABULARIES: tuple[Vocabularies, ...] = get_args(Vocabularies)

LoadModel = Callable[[Any, Any], tuple[Any, Any]]
"""(model or name, tokenizer or None) -> (model, tokenizer)"""


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """What drafters are made of; each of these is refused where no chosen drafter uses it. See `outpace.load`."""

    draft_model: Any = None
    draft_tokenizer: Any = None
    vocabularies: Vocabularies = "equal"
    draft_quantize: DraftQuantize = "auto"
    width: int = 1
    confidence_threshold: float = DEFAULT_CONFIDENCE_THRESHOLD
    corpus: str | Path | TextStore | None = None
    memory: int | Memory = 0
    lookahead: tuple[int, int, int] | None = None
    heads: str | Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("memory", 0)):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not is_count and not (name == "memory" and isinstance(value, Memory)):
                raise InputError(f"{name} must be a whole number, {least} or larger, got {value!r}.")
        if self.vocabularies not in VOCABULARIES:
            raise InputError(f"vocabularies must be one of {', '.join(VOCABULARIES)}, got {self.vocabularies!r}.")
        if self.draft_quantize not in get_args(DraftQuantize):
            allowed = ", ".join(get_args(DraftQuantize))
            raise InputError(
                f"draft_quantize must be one of {allowed}, got {self.draft_quantize!r}. (4 bits are no faster than 8 "
                "on a CPU; a draft_model that another library has quantised is taken as it is.)"
            )
        if self.lookahead is not None and len(self.lookahead) != 3:
            raise InputError(f"lookahead must be (window, ngram, guesses), got {self.lookahead!r}.")


def names_of(drafter: Any, options: DraftOptions) -> list[str | Drafter]:
    """The sources that `drafter` asks for, checked against the options; "auto" is still to be decided."""
    if drafter is None:
        drafter = "auto" if options.draft_model is None else "model"
    parts: Sequence[Any]
    if isinstance(drafter, str):
        parts = drafter.split("+")
    else:
        parts = drafter if isinstance(drafter, list | tuple) else [drafter]
    for part in parts:
        if not isinstance(part, str):
            missing = [name for name in ("name", "propose", "release") if not hasattr(part, name)]
            if missing:
                raise InputError(f"drafter must be a name or have name, propose and release; {part!r} lacks {missing}.")
        elif part not in DRAFTERS and part != "auto":
            raise InputError(
                f"drafter must be auto, {', '.join(DRAFTERS)}, several of them joined by +, or an object, got "
                f"{drafter!r}."
            )
    if len(parts) != len(set(map(str, parts))) or (len(parts) > 1 and {"none", "auto"} & set(map(str, parts))):
        raise InputError(f"drafter={drafter!r} names one twice, or joins none or auto with others.")
    named = {part for part in parts if isinstance(part, str)}
    if "auto" in named:
        named |= {"suffix", *(["model"] if options.draft_model is not None else [])}
        named |= {"heads"} if options.heads is not None else set()
    for option, users in _USERS.items():
        value, default = getattr(options, option), getattr(DraftOptions(), option)
        if value != default and not set(users) & named:
            raise InputError(
                f"{option}{_seen(value)} was given, and drafter={drafter!r} would not use it ({users[0]} would). "
                "Leave one of them out."
            )
    if "model" in parts and options.draft_model is None:
        raise InputError("drafter='model' needs draft_model: the folder, .gguf file or hub id of a smaller model.")
    if "heads" in parts and options.heads is None:
        raise InputError("drafter='heads' needs heads: the folder with trained heads for this model.")
    return list(parts)


def _seen(value: Any) -> str:
    return f"={value!r}" if isinstance(value, int | str | tuple) else ""


_USERS: dict[str, tuple[str, ...]] = {
    "draft_model": ("model",),
    "vocabularies": ("model",),
    "draft_quantize": ("model", "heads"),
    "width": ("model", "early-exit"),
    "corpus": ("suffix", "lookup"),
    "memory": ("suffix", "lookup"),
    "lookahead": ("lookahead",),
    "heads": ("heads",),
}


def choose(
    parts: Sequence[str | Drafter],
    target: Target,
    tokenizer: Any,
    options: DraftOptions,
    load_model: LoadModel,
    progress: models.Progress | None,
) -> Drafter:
    """The drafter for a target; the union of several. Raises LoadError for one that the target cannot verify."""
    if list(parts) == ["auto"]:
        parts = [
            "suffix",
            *(["recycle"] if target.can_tree else []),
            *(["heads"] if options.heads is not None else []),
            *(["model"] if options.draft_model else []),
        ]

    def suffix(**settings: Any) -> SuffixDrafter:
        corpus = options.corpus
        if corpus is not None and not isinstance(corpus, TextStore):
            corpus = read_corpus(corpus, tokenizer, progress=progress)
        memory: Memory | None
        if isinstance(options.memory, Memory):
            memory = options.memory
        else:
            memory = Memory(options.memory) if options.memory else None
        return SuffixDrafter(corpus=corpus, memory=memory, **settings)

    # In a union, what is improbable competes with other sources' nodes instead of costing alone.
    least_value = DEFAULT_LEAST_VALUE if len(parts) == 1 else DEFAULT_LEAST_VALUE / 5
    makers: dict[str, Callable[[], Drafter]] = {
        "suffix": lambda: suffix(least_value=least_value),
        "lookup": lambda: suffix(min_match=1, least_value=0.0, name="lookup"),
        "recycle": lambda: RecycleDrafter(target.vocab_size),
        "lookahead": lambda: LookaheadDrafter(*(options.lookahead or ())),
        "jacobi": JacobiDrafter,
        "model": lambda: _model_drafter(target, tokenizer, options, load_model),
        "heads": lambda: _heads_drafter(target, options),
        "self": lambda: _self_drafter(target, options),
        "early-exit": lambda: _early_exit(target, tokenizer, options),
        "none": NoDrafter,
    }
    found = [makers[part]() if isinstance(part, str) else part for part in parts]
    for drafter in found:
        if getattr(drafter, "needs_trees", False) and not target.can_tree:
            raise LoadError(
                f"The drafter {drafter.name!r} needs trees, and this model can only be given chains. Use another one, "
                "such as suffix or jacobi."
            )
        if len(found) > 1 and getattr(drafter, "is_whole", False):
            raise InputError(f"The drafter {drafter.name!r} cannot be joined with others: name it alone.")
    return found[0] if len(found) == 1 else UnionDrafter(found, target.vocab_size)


def _model_drafter(target: Target, tokenizer: Any, options: DraftOptions, load_model: LoadModel) -> Drafter:
    draft, draft_tokenizer = load_model(options.draft_model, options.draft_tokenizer)
    width = options.width
    draft_target = Target(draft)
    is_quantized = False
    if options.draft_quantize == "int8":
        is_quantized, draft_target = True, Target(quantized(draft))
    elif options.draft_quantize == "auto":
        small = faster(draft_target)
        is_quantized, draft_target = small is not None, small or draft_target
    found = probe(draft_target, is_draft=True)
    draft_target.can_tree = found.can_tree
    if not found.is_exact and not is_quantized:
        _log.warning("The draft model is inexact over its cache (%s). Its drafts are worse for it.", found.reasons[0])
    if draft is target.original or _origin(draft) == _origin(target.original):
        _log.warning("The draft model is the target itself: exact, and no faster. Give a smaller model to gain time.")
    if width > 1 and not (target.can_tree and draft_target.can_tree):
        raise InputError(f"width={width} asks for trees, and one of the models can only take chains. Leave width at 1.")
    threshold = options.confidence_threshold
    if options.vocabularies == "equal":
        num_tokens = check_vocabulary(tokenizer, draft_tokenizer, target.vocab_size, draft_target.vocab_size)
        return ModelDrafter(draft_target, target.vocab_size, num_tokens, width, threshold)
    if tokenizer is None or draft_tokenizer is None:
        raise InputError(
            f"vocabularies={options.vocabularies!r} needs both tokenizers. Pass tokenizer= and draft_tokenizer=."
        )
    if options.vocabularies == "text":
        own = ModelDrafter(draft_target, draft_target.vocab_size, draft_target.vocab_size, 1, threshold)
        return TranslatedDrafter(own, tokenizer, draft_tokenizer)
    shared = SharedTokens(tokenizer, draft_tokenizer)
    if len(shared) < _LEAST_SHARED * len(tokenizer.get_vocab()):
        raise LoadError(
            f"Target and draft share {len(shared)} of the target's {len(tokenizer.get_vocab())} tokens, too few for "
            "vocabularies='shared'. Use vocabularies='text', which goes through text."
        )
    return ModelDrafter(draft_target, target.vocab_size, target.vocab_size, width, threshold, shared)


def _heads_drafter(target: Target, options: DraftOptions) -> Drafter:
    """With weights in int8 where that measures faster; heads only guess."""
    if options.draft_quantize == "int8":
        return _with_heads(target, options, is_coarse=True)
    exact = _with_heads(target, options, is_coarse=False)
    if options.draft_quantize == "none" or target.device.type != "cpu":
        return exact
    coarse = _with_heads(target, options, is_coarse=True)
    return coarse if coarse.level_seconds < CLEARLY * exact.level_seconds else exact


def _with_heads(target: Target, options: DraftOptions, is_coarse: bool) -> MedusaDrafter | MarkovDrafter | EagleDrafter:
    assert options.heads is not None, "names_of asks for heads"
    heads, last_layer = load_heads(options.heads, target.original), int(target.config.num_hidden_layers)
    if isinstance(heads, MarkovHeads):
        heads.to(target.device)
        if is_coarse:
            heads.replace_output(Int8Linear)
        return MarkovDrafter(heads, last_layer)
    heads.to(target.device, target.dtype)
    if is_coarse:
        replace_linears(heads, Int8Linear)
    return EagleDrafter(heads) if isinstance(heads, EagleLayer) else MedusaDrafter(heads, last_layer)


def _self_drafter(target: Target, options: DraftOptions) -> ModelDrafter:
    """The target in int8 drafts for itself."""
    draft = Target(quantized(target.original))
    draft.can_tree = False
    drafter = ModelDrafter(draft, target.vocab_size, target.vocab_size, 1, options.confidence_threshold)
    drafter.name = "self"
    return drafter


def _early_exit(target: Target, tokenizer: Any, options: DraftOptions) -> EarlyExitDrafter:
    """The number of layers is measured on a few texts, or on random tokens where there is no tokenizer."""
    if not isinstance(target.new_cache(), RaggedCache):
        raise LoadError("early-exit needs a model whose layers all keep keys and values. Use another drafter.")
    if tokenizer is None:
        texts = [[(37 * i + 11 * row) % target.vocab_size for i in range(32)] for row in range(3)]
    else:
        texts = [tokenizer(question)["input_ids"][:64] for question in QUESTIONS]
    count = best_count(target, texts)
    probe(Target(first_layers(target.model, count)), is_draft=True)
    return EarlyExitDrafter(target, count, options.width, options.confidence_threshold)


def _origin(model: Any) -> object:
    """Something equal for two loads of one model: its name and size; the object itself when it has no name."""
    name = str(getattr(model, "name_or_path", ""))
    return (name, sum(p.numel() for p in model.parameters())) if name else model


def check_vocabulary(tokenizer: Any, draft_tokenizer: Any, vocab_size: int, draft_vocab_size: int) -> int:
    """The number of leading token ids that target and draft share; raises LoadError when their tokens differ.

    Without both tokenizers only the sizes can be compared, and must be equal. Rows beyond the tokenizer (padding of the
    embedding) do not matter, and a few differing tokens only make drafts worse: they are named in a warning.
    """
    if tokenizer is None or draft_tokenizer is None:
        if vocab_size != draft_vocab_size:
            raise LoadError(
                f"The target has {vocab_size} token ids and the draft {draft_vocab_size}, and without both tokenizers "
                "it cannot be told whether they agree. Pass tokenizer= and draft_tokenizer=."
            )
        return vocab_size
    ours = {index: token for token, index in tokenizer.get_vocab().items()}
    theirs = {index: token for token, index in draft_tokenizer.get_vocab().items()}
    shared: int = min(max(ours), max(theirs)) + 1
    differing = [i for i in range(shared) if ours.get(i) != theirs.get(i)]
    added = abs(len(ours) - len(theirs))
    if differing:
        first = differing[0]
        what = (
            f"{len(differing)} of {shared} tokens differ between target ({len(ours)} tokens) and draft ({len(theirs)} "
            f"tokens); the first is {first}: {ours.get(first)!r} in the target and {theirs.get(first)!r} in the draft"
        )
        if len(differing) > _MAX_DIFFERING_SHARE * shared:
            raise LoadError(
                f"The draft's tokenizer does not match: {what}. A draft in other token ids would only ever be refused. "
                "Use a draft model of the same family, or vocabularies='text' (or 'shared'), which translates."
            )
        _log.warning("%s. Drafts are a little worse for it; the output is the same.", what)
    if added > shared:
        raise LoadError(
            f"The target has {len(ours)} tokens and the draft {len(theirs)}: they are not of one family. Use a draft "
            "model of the same family, or vocabularies='text' (or 'shared'), which translates."
        )
    return shared
