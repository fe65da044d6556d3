"""outpace bench: what drafts give on a model and machine, measured so that a sceptic can repeat it."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .. import profiling
from ..bench import plots, report, results, running, suites, summary, tables
from ..bench.methods import Method, Models, Outpace
from ..bench.peers import PEERS
from ..engine import Engine
from ..errors import InputError
from ..loading import load
from ..prompts import NamedPrompt
from .options import Device, DraftModel, Dtype, Json, counting_bar, load_engine, talk, to_json, usable

_SUITE_HELP = ". ".join(f"{name}: {text}" for name, text in suites.SUITES.items())


def bench(
    model: Annotated[
        str | None, typer.Argument(help="Folder, .gguf file or hub id. Default: the embedded SmolLM2-135M-Instruct.")
    ] = None,
    draft_model: DraftModel = None,
    drafters: Annotated[
        str, typer.Option(help="Drafters to compare, separated by commas. With a draft model, model is one of them.")
    ] = "auto",
    suite: Annotated[
        list[str] | None,
        typer.Option(help=f"Prompts; may be given several times. {_SUITE_HELP}. Or a file. [default: code]"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each category.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=2, help="Per prompt.")] = 128,
    temperature: Annotated[str, typer.Option(help="One or several, separated by commas; 0 is greedy.")] = "0",
    batch: Annotated[int, typer.Option(min=1, help="Prompts that are decoded together.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Times everything is done; medians count.")] = 1,
    peers: Annotated[
        str | None,
        typer.Option(
            help=f"Other methods in the same run: {', '.join(PEERS)}, or none. [default: transformers and "
            "prompt-lookup, and assisted with a draft model]"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results; an interrupted run there goes on.")] = Path(
        "outpace-bench"
    ),
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Measure nothing: make the report and the tables of --out anew.")
    ] = False,
    with_report: Annotated[bool, typer.Option("--report/--no-report", help="Whether to write report.html.")] = True,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Compare drafters with plain decoding and with transformers, prompt by prompt, methods taking turns.

    Writes results.json (every run, with all that it depends on), tables.md and report.html, a page with pictures.
    Nothing else should run on the machine meanwhile.
    """
    if with_report:
        plots.check_matplotlib()
    if redraw:
        found = results.Results.load(out / "results.json")
    else:
        settings = {
            "model": model,
            "draft_model": draft_model,
            "drafters": drafters,
            "suites": suite or ["code"],
            "limit": limit,
            "max_new_tokens": max_new_tokens,
            "temperatures": _numbers(temperature),
            "batch": batch,
            "repeats": repeats,
            "peers": peers,
            "dtype": dtype,
        }
        found = _measure(settings, out, device)
        found.save(out / "results.json")
    cells = summary.cells(found.rows, found.baseline)
    (out / "tables.md").write_text(tables.markdown(cells, found.baseline), encoding="utf-8")
    if with_report:
        (out / "report.html").write_text(report.html(found), encoding="utf-8")
    if as_json:
        print(to_json({"provenance": found.provenance, "cells": [asdict(cell) for cell in cells]}))
        return
    _print(cells, found.baseline)
    written = ["results.json", "tables.md", *(["report.html"] if with_report else [])]
    talk.print(f"Written to {out}: {', '.join(written)}.", soft_wrap=True)


def _measure(settings: dict[str, Any], out: Path, device: str | None) -> results.Results:
    prompts = suites.chosen(settings["suites"], settings["limit"])
    names = _peer_names(settings)
    plan = running.Plan(
        prompts, settings["max_new_tokens"], settings["temperatures"], settings["batch"], settings["repeats"]
    )
    plan.params(plan.temperatures[0], 1)  # a bad number is refused before anything is loaded
    store = running.Store(out / "runs.jsonl", settings)
    plain = load_engine(settings["model"], drafter="none", dtype=settings["dtype"], device=device)
    draft = None
    if settings["draft_model"] is not None:
        draft = load_engine(settings["draft_model"], drafter="none", dtype=settings["dtype"], device=device)
    engines: list[Engine] = []

    def make() -> list[Method]:
        made = _methods(plain, draft, settings["drafters"].split(","), names)
        engines[:] = [method.engine for method in made if isinstance(method, Outpace)]
        return made

    def encode(prompt: NamedPrompt) -> Any:
        return usable(plain, prompt)

    with counting_bar() as bar:
        task = bar.add_task("Loading", total=None)
        running.run(
            plan,
            encode,
            make,
            store,
            lambda text, done, total: bar.update(task, description=text, completed=done, total=total),
        )
    baseline = "transformers" if "transformers" in names else running.PLAIN
    command = shlex.join(["outpace", *sys.argv[1:]])
    facts = results.provenance(plain, command, settings)
    curve = profiling.costs(plain.target, 64)
    return results.Results(facts, baseline, results.curve_of(curve), store.rows)


def _peer_names(settings: dict[str, Any]) -> list[str]:
    given: str | None = settings["peers"]
    if given == "none" or (given is None and settings["batch"] > 1):
        return [] if given == "none" else ["transformers"]
    if given is None:
        return ["transformers", "prompt-lookup", *(["assisted"] if settings["draft_model"] is not None else [])]
    names = given.split(",")
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise InputError(f"peers must be of {', '.join(PEERS)}, or none, got {unknown[0]!r}.")
    if settings["batch"] > 1 and names != ["transformers"]:
        raise InputError(
            f"batch={settings['batch']} with peers={given!r}: transformers speculates for one row at a time. Leave "
            "batch at 1, or give --peers transformers."
        )
    return names


def _methods(plain: Engine, draft: Engine | None, drafters: list[str], peers: list[str]) -> list[Method]:
    """Our plain decoding first, then our drafters, then the peers. Raises InputError for a method that cannot run."""
    target, tokenizer = plain.target.original, plain.tokenizer
    found: list[Method] = [Outpace(running.PLAIN, plain)]
    if draft is not None and not any("model" in name for name in drafters):
        drafters = [*drafters, "model"]
    for name in drafters:
        options: dict[str, Any] = {}
        if draft is not None and (name == "auto" or "model" in name.split("+")):
            options = {"draft_model": draft.target.original, "draft_tokenizer": draft.tokenizer}
        found.append(Outpace(f"outpace {name}", load(target, tokenizer=tokenizer, drafter=name, **options)))
    models = Models(target, tokenizer, *((None, None) if draft is None else (draft.target.original, draft.tokenizer)))
    for name in peers:
        peer = PEERS[name](models)
        if isinstance(peer, str):
            raise InputError(f"peers: {name} cannot run here: {peer}.")
        found.append(peer)
    return found


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers, as in 0,0.8", param_hint="--temperature"
        ) from error


def _print(cells: list[summary.Cell], baseline: str) -> None:
    for temperature in sorted({cell.temperature for cell in cells}):
        table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
        table.title = f"Temperature {temperature:g}, speed against {baseline}"
        for column in tables.SHORT:
            table.add_column(column, justify="left" if column in ("category", "method") else "right")
        last = ""
        for cell in (cell for cell in cells if cell.temperature == temperature):
            if cell.category != last and last:
                table.add_section()
            texts = tables.line(cell, tables.SHORT)
            style = "bold" if cell.category == summary.ALL else None
            table.add_row(*(texts if cell.category != last else ["", *texts[1:]]), style=style)
            last = cell.category
        Console(highlight=False).print(table)
