"""The whole training of heads: texts, what the target thinks of them, the fit, and a look at what it is worth."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ..corpus import texts_of
from ..engine import Engine
from ..errors import InputError
from ..heads.eagle import EagleLayer
from ..heads.eagle_files import eagle_layers, new_eagle
from ..heads.files import new_heads, save_heads
from ..heads.markov import MarkovHeads
from . import selftalk
from .fit import Recipe, Report, fit
from .losses import eagle_accuracies, eagle_batches, markov_batches, of_markov
from .samples import Samples, Text, collect

Kind = Literal["medusa", "eagle"]
Progress = Callable[[str, int, int, str], None]
"""(what, done, total, more): more is what a person would like to see beside the bar."""

_HELD_OUT = 0.05  # of the texts
_MOST_BYTES_PER_TOKEN = 16
_LONGEST = 1024  # tokens of a text from files; longer ones are cut into several
SELF = "self"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained on what. kind: "medusa", our own heads, or "eagle". data: "self", files or folders. num_tokens:
    of self-written answers, and at most so many from files. num_rows: of the draft vocabulary."""

    kind: Kind = "medusa"
    data: tuple[str, ...] = (SELF,)
    num_tokens: int = 400_000
    max_new_tokens: int = 256
    num_heads: int = 4
    rank: int = 64
    num_rows: int = 8192
    recipe: Recipe = Recipe()


@dataclass(frozen=True, slots=True)
class Trained:
    """accuracies: of each head on texts that were held out, given the right tokens before."""

    report: Report
    accuracies: tuple[float, ...]
    num_samples: int


def train(engine: Engine, plan: Plan, out: Path, progress: Progress, provenance: dict[str, Any]) -> Trained:
    """Train heads for the engine's model and write them to `out`; goes on with what a killed run left there.

    engine: without drafts. Raises InputError for data without anything to learn, TrainingError where it diverges; then
    nothing is written that looks trained.
    """
    work = out / "training"  # what a killed run goes on from; the heads themselves are beside it
    work.mkdir(parents=True, exist_ok=True)
    _check_same(work / "plan.json", {"data": list(plan.data), **{k: v for k, v in asdict(plan).items() if k != "data"}})
    samples = _samples(engine, plan, work / "samples.safetensors", progress)
    learned, held_out = samples.split(_HELD_OUT)
    target = engine.target.original
    torch.manual_seed(plan.recipe.seed)
    token_map = learned.most_frequent(plan.num_rows)
    heads: MarkovHeads | EagleLayer
    if plan.kind == "medusa":
        heads = new_heads(target, token_map, plan.num_heads, plan.rank)
        draw = markov_batches(heads, learned, plan.recipe.batch)
    else:
        heads = new_eagle(target, token_map)
        draw = eagle_batches(heads, learned, plan.recipe.batch, plan.num_heads)

    def report(last: Report) -> None:
        accuracies = " ".join(f"{accuracy:.2f}" for accuracy in last.accuracies)
        more = f"accuracy {accuracies}, about {last.tokens_per_pass:.2f} tokens per pass"
        progress("Training", last.step, plan.recipe.num_steps, more)

    last = fit(heads, draw, plan.recipe, work / "state.pt", report)
    accuracies = evaluate(heads, held_out, plan.num_heads)
    found = Trained(last, accuracies, len(learned.tokens))
    save_heads(heads, target, out, provenance | {"plan": asdict(plan), "result": asdict(found)})
    return found


@torch.no_grad()
def evaluate(heads: MarkovHeads | EagleLayer, samples: Samples, depth: int) -> tuple[float, ...]:
    """How often the likeliest token of each depth is the text's, given the right tokens before it."""
    if isinstance(heads, EagleLayer):
        return eagle_accuracies(heads, samples, depth)
    anchors = samples.anchors(heads.num_heads)
    if len(anchors) == 0:
        raise InputError("The texts that were held out are too short to look at. Give more or longer ones.")
    total = torch.zeros(heads.num_heads)
    for start in range(0, len(anchors), 1024):
        places = anchors[start : start + 1024]
        total += of_markov(heads, samples, places)[1] * len(places)
    return tuple((total / len(anchors)).tolist())


def _samples(engine: Engine, plan: Plan, path: Path, progress: Progress) -> Samples:
    if path.is_file():
        return Samples.load(path)
    texts: list[Text] = []
    for name in plan.data:
        if name == SELF:
            texts += selftalk.write(
                engine,
                plan.num_tokens,
                plan.recipe.seed,
                plan.max_new_tokens,
                lambda done, total: progress("Writing texts", done, total, "tokens"),
            )
        else:
            texts += from_files(engine, name, plan.num_tokens)
    num_layers = int(engine.target.config.num_hidden_layers)
    layers = (num_layers,) if plan.kind == "medusa" else eagle_layers(num_layers)
    samples = collect(engine.target, texts, lambda done, total: progress("Reading texts", done, total, ""), layers)
    samples.save(path)
    return samples


def from_files(engine: Engine, path: str, num_tokens: int) -> list[Text]:
    """The text of a file or folder, as if the model had written it: at most `num_tokens` tokens of it."""
    if engine.tokenizer is None:
        raise InputError("data from files needs the model's tokenizer.")
    texts: list[Text] = []
    left = num_tokens
    for text in texts_of(path, num_tokens * _MOST_BYTES_PER_TOKEN):
        ids = engine.tokenizer(text)["input_ids"][:left]
        texts += [Text(tuple(ids[i : i + _LONGEST]), 0) for i in range(0, len(ids), _LONGEST)]
        left -= len(ids)
        if left <= 0:
            break
    return texts


def _check_same(path: Path, plan: dict[str, Any]) -> None:
    """A folder belongs to one plan."""
    plan = json.loads(json.dumps(plan))
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        if before != plan:
            differing = [name for name in plan if before.get(name) != plan[name]]
            raise InputError(
                f"{str(path.parent)!r} holds a training with another {', '.join(differing)}. Give another folder "
                "(--out), or remove that one."
            )
    path.write_text(json.dumps(plan, indent=1), encoding="utf-8")


def names(data: Sequence[str]) -> tuple[str, ...]:
    """The sources, checked: "self", or files and folders that are there."""
    for name in data:
        if name != SELF and not Path(name).expanduser().exists():
            raise InputError(f"data must be {SELF!r}, a file or a folder, got {name!r}, which is not there.")
    return tuple(data)
