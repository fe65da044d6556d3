"""Trains heads on samples: the loss, the steps, and a state that a killed run goes on from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, TrainingError
from ..heads.markov import MarkovHeads
from .samples import Samples

_DEPTH_WEIGHT = 0.8  # of head k: 0.8 ** k
_WARM_UP = 0.04
_CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """num_steps steps of `batch` places each, AdamW with a cosine from `learning_rate`. seed: of order and start."""

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


def losses(heads: MarkovHeads, samples: Samples, places: Tensor) -> tuple[Tensor, Tensor]:
    """([heads] losses, [heads] accuracies) at places t. Head k sees the hidden state of t and the token t + 1 + k, and
    guesses the target's distribution of token t + 2 + k.

    loss = a KL(p, q) + (1 - a) TV(p, q) with a = exp(-3 sum min(p, q)) (LK losses, arXiv 2602.23881), over the target's
    likeliest tokens; plus the cross-entropy of the confidence with 1 - TV.
    """
    steps = torch.arange(heads.num_heads)
    parents = samples.tokens[places[:, None] + 1 + steps]
    logits, sureness = heads(samples.hidden[places].float(), parents)
    log_q = logits.log_softmax(-1)
    before = places + 1 + steps[:, None]  # [heads, n]: where the target says what head k shall guess
    rows = heads.rows_of(samples.top_ids[before].long())
    can = rows < logits.shape[-1]
    p = samples.top_probs[before].float() * can
    own = log_q.gather(-1, rows.clamp_max(logits.shape[-1] - 1))
    q = own.exp() * can
    common = torch.minimum(p, q).sum(-1)
    mass = p.sum(-1).clamp_min(1e-6)
    divergence = (p * (p.clamp_min(1e-9).log() - own) * can).sum(-1) / mass
    share = torch.exp(-3 * common).detach()
    sure = nn.functional.binary_cross_entropy_with_logits(sureness, common.detach().clamp(0, 1), reduction="none")
    loss = share * divergence + (1 - share) * (1 - common) + 0.1 * sure
    labels = samples.tokens[places + 2 + steps[:, None]]
    hits = heads.token_map[logits.argmax(-1)] == labels
    return loss.mean(-1), hits.float().mean(-1)


def fit(
    heads: MarkovHeads,
    samples: Samples,
    recipe: Recipe,
    state_path: Path | None = None,
    report: Callable[[Report], None] | None = None,
    save_every: int = 200,
) -> Report:
    """Train in place; the last report. state_path: where the state is kept, and gone on from if it is there.

    Raises InputError where no place has labels, and TrainingError where a loss is no number.
    """
    anchors = samples.anchors(heads.num_heads)
    if len(anchors) == 0:
        raise InputError(
            f"No token of the texts has {heads.num_heads + 1} tokens of an answer behind it: there is nothing to learn."
        )
    optimizer = torch.optim.AdamW(heads.parameters(), recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe.num_steps))
    weights = _DEPTH_WEIGHT ** torch.arange(heads.num_heads)
    first = _resume(state_path, heads, optimizer, schedule, recipe) if state_path is not None else 0
    last = Report(first, (), ())
    heads.train()
    for step in range(first, recipe.num_steps):
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        places = anchors[torch.randint(len(anchors), (recipe.batch,), generator=generator)]
        each, accuracies = losses(heads, samples, places)
        if not bool(each.isfinite().all()):
            raise TrainingError(
                f"The loss of step {step} is {each.tolist()}: training with learning_rate={recipe.learning_rate:g} "
                "does not converge. Lower it. Nothing was written."
            )
        optimizer.zero_grad()
        (each * weights).sum().backward()
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
