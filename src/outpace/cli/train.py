"""outpace train: heads for a model, from texts that it writes itself."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .. import profiling
from ..train import run
from ..train.fit import Recipe
from ..train.run import Kind, Plan
from .options import Device, Dtype, Json, load_engine, talk, to_json


def train(
    kind: Annotated[
        Kind,
        typer.Argument(
            help="medusa: heads that guess the next tokens at once, fast to train. eagle: a layer that guesses them "
            "one by one, better and dearer."
        ),
    ],
    model: Annotated[
        str | None, typer.Argument(help="Folder, .gguf file or hub id. Default: the embedded SmolLM2-135M-Instruct.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="self: texts that the model writes from its own chat template. Or a file or folder of text, read as "
            "if the model had written it. May be given several times. [default: self]"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the heads; a killed training there goes on.")] = Path("heads"),
    tokens: Annotated[int, typer.Option(min=1, help="To write, and at most to read of each file or folder.")] = 400_000,
    steps: Annotated[int, typer.Option(min=1, help="Of training.")] = 2000,
    batch: Annotated[int, typer.Option(min=1, help="Places of a step.")] = 1024,
    learning_rate: Annotated[float, typer.Option(help="At first; it falls along a cosine.")] = 1e-3,
    heads: Annotated[int, typer.Option(min=1, max=8, help="Tokens that are guessed; of eagle, steps in training.")] = 4,
    vocabulary: Annotated[int, typer.Option(min=16, help="The most frequent tokens, which can be guessed.")] = 8192,
    rank: Annotated[int, typer.Option(min=1, help="Of the bias by the token before.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the texts, the start and the order.")] = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train small networks that guess the model's next tokens from its last hidden state. The model is not changed.

    Use them with outpace generate --heads FOLDER, or heads="FOLDER" in the library; look at them with outpace evaluate.
    """
    plan = Plan(
        kind=kind,
        data=run.names(data or [run.SELF]),
        num_tokens=tokens,
        num_heads=heads,
        rank=rank,
        num_rows=vocabulary,
        recipe=Recipe(steps, batch, learning_rate, seed),
    )
    engine = load_engine(model, drafter="none", dtype=dtype, device=device)
    provenance = {
        "command": shlex.join(["outpace", *sys.argv[1:]]),
        "versions": {name: importlib.metadata.version(name) for name in ("outpace", "torch", "transformers")},
        "base": profiling.facts(engine.target),
    }
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %")),
        *(TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[more]}")),
    )
    with Progress(*columns, console=talk) as bar:
        task = bar.add_task("Loading", total=None, more="")
        found = run.train(
            engine,
            plan,
            out,
            lambda what, done, total, more: bar.update(task, description=what, completed=done, total=total, more=more),
            provenance,
        )
    if as_json:
        print(to_json(asdict(found) | {"heads": str(out)}))
        return
    accuracies = ", ".join(f"{accuracy:.2f}" for accuracy in found.accuracies)
    print(f"Written to {out}. On texts that were held out, guesses are right in {accuracies} of the cases, by depth.")
