"""outpace tune: tries every drafter on your own prompts, and writes down which one pays."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .. import profiling, tuning
from ..prompts import BUILT_IN, read_prompts
from ..sampling import SamplingParams
from .options import Device, DraftModel, Dtype, Heads, Json, counting_bar, load_engine, talk, to_json, usable


def tune(
    model: Annotated[
        str | None, typer.Argument(help="Folder, .gguf file or hub id. Default: the embedded SmolLM2-135M-Instruct.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Your prompts: lines of text, or JSON lines (prompt, messages or turns). Default: ours."),
    ] = None,
    draft_model: DraftModel = None,
    heads: Heads = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts to use, from the beginning of the file.")] = 8,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=8, help="Per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy. Use what you will use.")] = 0.0,
    out: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("outpace-profile.json"),
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Decode your prompts with every drafter that the model allows, rank them by measured speed, write a profile.

    The profile is for outpace generate --profile and for the argument profile of outpace.load. Where nothing is 3 %
    faster than plain decoding, it says so and drafts nothing.
    """
    chosen = (list(BUILT_IN) if prompts is None else read_prompts(prompts))[:limit]
    plain = load_engine(model, drafter="none", dtype=dtype, device=device)
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=1)
    with counting_bar() as bar:
        task = bar.add_task("Loading drafters", total=None)
        trials = tuning.tune(
            plain,
            [usable(plain, prompt) for prompt in chosen],
            params,
            draft_model,
            lambda text, done, total: bar.update(task, description=text, completed=done, total=total),
            heads,
        )
    facts = profiling.facts(plain.target)
    tuning.save_profile(out, trials, facts)
    winner = tuning.best(trials)
    if as_json:
        print(
            to_json(
                {
                    "facts": facts,
                    "trials": [asdict(trial) for trial in trials],
                    "best": winner.name if winner else "none",
                }
            )
        )
        return
    Console().print(_table(trials))
    if winner is None:
        talk.print("Do not speculate: nothing is clearly faster than plain decoding here. The profile says so.")
    else:
        talk.print(f"Best: [bold]{winner.name}[/], {winner.speed:.2f} times plain decoding.")
    talk.print(f"Written to {out}. Use it with: outpace generate --profile {out}", soft_wrap=True)
    wrong = [trial.name for trial in trials if not trial.is_identical]
    if wrong:
        talk.print(f"[bold red]{', '.join(wrong)} gave another text than plain decoding[/]: run outpace verify.")


def _table(trials: list[tuning.Trial]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("drafter", "speed", "expected", "tokens per pass", "accepted", "switched off", "memory", ""):
        table.add_column(column, justify="left" if column in ("drafter", "") else "right")
    for trial in trials:
        if trial.refusal:
            table.add_row(trial.name, *[""] * 6, f"[dim]{trial.refusal.partition('.')[0]}[/]")
            continue
        table.add_row(
            trial.name,
            f"{trial.speed:.2f}",
            f"{trial.predicted:.2f}",
            f"{trial.tokens_per_pass:.2f}",
            f"{trial.acceptance:.2f}",
            f"{100 * trial.switched_off:.0f} %",
            f"{trial.megabytes:.0f} MB",
            "" if trial.is_identical else "[red]another text[/]",
        )
    return table
