"""outpace evaluate: what trained heads are worth on a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..errors import InputError
from ..heads.files import load_heads
from ..heads.markov import MarkovHeads
from ..loading import load
from ..prompts import BUILT_IN, read_prompts
from ..sampling import SamplingParams
from ..train import evaluation
from .options import Device, Dtype, Json, counting_bar, load_engine, to_json, usable


def evaluate(
    heads: Annotated[str, typer.Argument(help="The folder that outpace train wrote.")],
    model: Annotated[
        str | None, typer.Argument(help="Folder, .gguf file or hub id. Default: the embedded SmolLM2-135M-Instruct.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Lines of text, or JSON lines (prompt, messages or turns). Default: ours."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts of the file.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=8, help="Per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Accuracy by depth and rank along the model's own texts, calibration, and speed against plain decoding.

    Accuracies are of heads that are asked behind the right tokens; online, a chain of their likeliest tokens is made,
    and a draft is kept if all before it were.
    """
    plain = load_engine(model, drafter="none", dtype=dtype, device=device)
    loaded = load_heads(heads, plain.target.original)
    if not isinstance(loaded, MarkovHeads):
        raise InputError(f"{heads!r} holds Medusa heads of another library; outpace tune says what they are worth.")
    drafting = load(plain.target.original, tokenizer=plain.tokenizer, drafter="heads", heads=heads)
    chosen = (list(BUILT_IN) if prompts is None else read_prompts(prompts))[:limit]
    with counting_bar() as bar:
        task = bar.add_task("evaluating", total=len(chosen))
        found = evaluation.measure(
            plain,
            drafting,
            loaded,
            [usable(plain, prompt) for prompt in chosen],
            SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=1),
            lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print(to_json(asdict(found)))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    ranks = [f"rank {rank + 1}" for rank in range(len(found.by_rank[0]))]
    for column in ("depth", "accuracy", *ranks, "calibration gap", "kept online"):
        table.add_column(column, justify="right")
    for depth, *numbers in evaluation.as_rows(found):
        table.add_row(str(depth), *(f"{number:.3f}" for number in numbers))
    Console(highlight=False).print(table)
    print(
        f"{found.tokens_per_pass:.2f} tokens per pass, {found.speed:.2f} times plain decoding, "
        f"{found.num_identical}/{found.num_texts} texts identical"
    )
