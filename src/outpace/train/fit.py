"""Trains heads on batches: the steps, and a state that a killed run goes on from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import InputError, TrainingError
from .losses import Draw

_DEPTH_WEIGHT = 0.8  # of head k: 0.8 ** k
_WARM_UP = 0.04
_CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """num_steps steps of `batch` places (or answered tokens) each, AdamW with a cosine from `learning_rate`. seed: of
    order and start."""

    num_steps: int = 2000
    batch: int = 1024
    learning_rate: float = 1e-3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """One step. losses, accuracies: of each head; accuracy: how often its likeliest token was the text's."""

    step: int
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]

    @property
    def tokens_per_pass(self) -> float:
        """Of a chain of the heads' likeliest tokens, if their accuracies were independent."""
        expected, path = 1.0, 1.0
        for accuracy in self.accuracies:
            path *= accuracy
            expected += path
        return expected


def fit(
    heads: nn.Module,
    draw: Draw,
    recipe: Recipe,
    state_path: Path | None = None,
    report: Callable[[Report], None] | None = None,
    save_every: int = 200,
) -> Report:
    """Train in place on batches; the last report. state_path: where the state is kept, and gone on from if it is there.

    Raises TrainingError where a loss is no number.
    """
    optimizer = torch.optim.AdamW(heads.parameters(), recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe.num_steps))
    first = _resume(state_path, heads, optimizer, schedule, recipe) if state_path is not None else 0
    last = Report(first, (), ())
    heads.train()
    for step in range(first, recipe.num_steps):
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        each, accuracies = draw(generator)
        if not bool(each.isfinite().all()):
            raise TrainingError(
                f"The loss of step {step} is {each.tolist()}: training with learning_rate={recipe.learning_rate:g} "
                "does not converge. Lower it. Nothing was written."
            )
        optimizer.zero_grad()
        (each * _DEPTH_WEIGHT ** torch.arange(len(each))).sum().backward()
        nn.utils.clip_grad_norm_(heads.parameters(), _CLIP)
        optimizer.step()
        schedule.step()
        last = Report(step + 1, tuple(each.tolist()), tuple(accuracies.tolist()))
        if report is not None:
            report(last)
        if state_path is not None and ((step + 1) % save_every == 0 or step + 1 == recipe.num_steps):
            _save(state_path, step + 1, heads, optimizer, schedule, recipe)
    heads.eval()
    return last


def _rate(step: int, num_steps: int) -> float:
    """Warm-up, then a cosine to a hundredth."""
    warm_up = max(1, round(_WARM_UP * num_steps))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, num_steps - warm_up)))


def _save(path: Path, step: int, heads: nn.Module, optimizer: Any, schedule: Any, recipe: Recipe) -> None:
    """Written whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    state = {
        "step": step,
        "heads": heads.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "recipe": asdict(recipe),
    }
    torch.save(state, partial)
    partial.replace(path)


def _resume(path: Path, heads: nn.Module, optimizer: Any, schedule: Any, recipe: Recipe) -> int:
    """The step to go on from; 0 where there is no state. Raises InputError for a state of another recipe."""
    if not path.is_file():
        return 0
    state = torch.load(path, weights_only=True)
    if state["recipe"] != asdict(recipe):
        raise InputError(
            f"{str(path)!r} is the state of another recipe, {state['recipe']}. Remove it, or ask for the same recipe."
        )
    heads.load_state_dict(state["heads"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    return int(state["step"])
