"""Which drafter, on the user's own prompts: every one that the model allows is tried, and what was measured is written.

A profile is a small JSON file with the winner's arguments of `load`, which `load(profile=...)` takes again.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .engine import Engine
from .errors import InputError, LoadError
from .loading import PROFILE_FORMAT, load
from .planner import MARGIN
from .request import Prompt
from .sampling import SamplingParams


@dataclass(slots=True)
class Trial:
    """What one drafter did. speed: of decoding, against plain decoding in the same run; predicted: what its planner
    expected; megabytes: memory that it took beside the model; refusal: why it could not be tried."""

    name: str
    settings: dict[str, Any]
    speed: float = 0.0
    predicted: float = 0.0
    tokens_per_pass: float = 0.0
    acceptance: float = 0.0
    switched_off: float = 0.0
    megabytes: float = 0.0
    is_identical: bool = True
    refusal: str = ""


def candidates(draft_model: Any, heads: str | None = None) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments of `load`) of everything worth trying."""
    names = ["suffix", "recycle", "suffix+recycle", "lookahead", "self", "early-exit"]
    found: list[tuple[str, dict[str, Any]]] = [(name, {"drafter": name}) for name in names]
    if draft_model is not None:
        for name in ("model", "suffix+model"):
            found.append((name, {"drafter": name, "draft_model": draft_model}))
    if heads is not None:
        for name in ("heads", "suffix+recycle+heads"):
            found.append((name, {"drafter": name, "heads": heads}))
    return found


def tune(
    plain: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    draft_model: Any = None,
    progress: Callable[[str, int, int], None] | None = None,
    heads: str | None = None,
) -> list[Trial]:
    """Decode every prompt with every candidate, in turns with plain decoding; the fastest first.

    plain: an engine without drafts. params: of all prompts; a seed is needed where the temperature is not 0.
    """
    trials, engines = [], []
    for name, settings in candidates(draft_model, heads):
        before = _megabytes()
        try:
            engine = load(plain.target.original, tokenizer=plain.tokenizer, planner="auto", **settings)
        except (InputError, LoadError) as error:
            trials.append(Trial(name, settings, refusal=str(error)))
            continue
        trials.append(Trial(name, settings, megabytes=max(0.0, _megabytes() - before)))
        engines.append((trials[-1], engine))
    seconds = {id(trial): 0.0 for trial, _ in engines}
    counts = {id(trial): [0, 0, 0, 0, 0] for trial, _ in engines}
    plain_seconds, done, total = 0.0, 0, len(prompts) * (1 + len(engines))
    short = replace(params, max_new_tokens=min(8, params.max_new_tokens))
    for engine in (plain, *(engine for _, engine in engines)):
        engine.generate(prompts[0], short)
    for prompt in prompts:
        wanted, spent = _timed(plain, prompt, params)
        plain_seconds += spent
        for trial, engine in engines:
            if progress is not None:
                progress(f"Trying {trial.name}", done, total)
            result, spent = _timed(engine, prompt, params)
            seconds[id(trial)] += spent
            stats = result.stats
            new = (stats.num_new_tokens, stats.num_verifications, stats.num_drafted_tokens, stats.num_accepted_tokens)
            for place, count in enumerate((*new, stats.num_rounds_switched_off)):
                counts[id(trial)][place] += count
            trial.is_identical = trial.is_identical and result.tokens == wanted.tokens
            done += 1
        done += 1
    for trial, engine in engines:
        tokens, passes, drafted, accepted, off = counts[id(trial)]
        trial.speed = plain_seconds / seconds[id(trial)]
        trial.predicted = engine.planner.gain(1) if engine.planner is not None else 1.0
        trial.tokens_per_pass, trial.acceptance = tokens / passes, accepted / max(1, drafted)
        trial.switched_off = off / passes
    return sorted(trials, key=lambda trial: -trial.speed)


def best(trials: Sequence[Trial]) -> Trial | None:
    """The one to use; None where plain decoding is as good."""
    return next((trial for trial in trials if not trial.refusal and trial.speed >= MARGIN), None)


def _timed(engine: Engine, prompt: Prompt, params: SamplingParams) -> tuple[Any, float]:
    begin = time.perf_counter()
    result = engine.generate(prompt, params)
    return result, time.perf_counter() - begin


def _megabytes() -> float:
    """Of memory that this process has held at most."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def save_profile(path: Path, trials: Sequence[Trial], facts: dict[str, str]) -> None:
    """Write the winner's settings, with everything that was measured."""
    winner = best(trials)
    settings = {"drafter": "none"} if winner is None else winner.settings
    bad = [name for name, value in settings.items() if not isinstance(value, str | int)]
    if bad:
        raise InputError(f"A profile holds names and numbers only; {bad[0]} is an object. Give it by name or path.")
    data = {
        "format": PROFILE_FORMAT,
        "settings": settings,
        "facts": facts,
        "trials": [asdict(trial) for trial in trials],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2, default=str), encoding="utf-8")
