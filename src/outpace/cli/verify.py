"""outpace verify: the promise, checked on the user's own model and machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import audit
from ..drafters.model import DEFAULT_CONFIDENCE_THRESHOLD
from ..engine import Engine
from ..prompts import BUILT_IN, NamedPrompt, read_prompts
from ..sampling import SamplingParams
from .options import (
    ConfidenceThreshold,
    Corpus,
    Device,
    DrafterOption,
    DraftModel,
    DraftQuantizeOption,
    Dtype,
    ExactnessOption,
    Heads,
    Json,
    K,
    Lookahead,
    VocabulariesOption,
    Width,
    counting_bar,
    load_engine,
    to_json,
    usable,
)


def verify(
    model: Annotated[
        str | None, typer.Argument(help="Folder, .gguf file or hub id. Default: the embedded SmolLM2-135M-Instruct.")
    ] = None,
    draft_model: DraftModel = None,
    drafter: DrafterOption = None,
    k: K = None,
    width: Width = 1,
    confidence_threshold: ConfidenceThreshold = DEFAULT_CONFIDENCE_THRESHOLD,
    vocabularies: VocabulariesOption = "equal",
    draft_quantize: DraftQuantizeOption = "auto",
    corpus: Corpus = None,
    lookahead: Lookahead = None,
    heads: Heads = None,
    exactness: ExactnessOption = "numerical",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Lines of text, or JSON lines (prompt, messages or turns). Default: ours."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts of the file.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Per run.")] = 64,
    temperature: Annotated[float, typer.Option(help="Of the sampled runs.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Of the sampled runs.")] = 0.95,
    seeds: Annotated[int, typer.Option(min=0, help="Sampled runs per prompt, beside the greedy one.")] = 2,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Decode with and without drafts, greedy and sampled, and judge the first difference: a tie or a bug.

    A tie is a difference between two choices whose scores are nearer to each other than the rounding error of a block
    of tokens on this model, precision and device, which is measured first. Where outpace decodes with layers of its
    own, the texts are compared with those of the stock model, too. Exit status 1 if there is a bug.
    """
    chosen = list(BUILT_IN) if prompts is None else read_prompts(prompts)
    chosen = chosen[:limit]
    base = SamplingParams(max_new_tokens=max_new_tokens)
    sampled = replace(base, temperature=temperature, top_p=top_p)
    settings = [("greedy", base), *((f"seed {seed}", replace(sampled, seed=seed)) for seed in range(seeds))]
    engine = load_engine(
        model,
        draft_model=draft_model,
        drafter=drafter,
        k=k,
        width=width,
        confidence_threshold=confidence_threshold,
        vocabularies=vocabularies,
        draft_quantize=draft_quantize,
        corpus=corpus,
        lookahead=lookahead,
        heads=heads,
        acceptance="coupled",
        exactness=exactness,
        planner="off",  # what is checked are drafts: make as many as possible
        dtype=dtype,
        device=device,
    )
    is_stock = engine.target.model is engine.target.original
    rounding, stock_rounding = _measure(engine, chosen[0], max_new_tokens)
    kept: list[dict[str, Any]] = []
    with counting_bar() as bar:
        task = bar.add_task("verifying", total=len(chosen) * len(settings))
        for prompt in chosen:
            for name, params in settings:
                comparison = audit.compare(engine, usable(engine, prompt), params, rounding)
                kept.append(_row(prompt.name, name, comparison))
                if not is_stock:
                    request, text = usable(engine, prompt), comparison.speculative
                    comparison = audit.compare_stock(engine, request, params, text, stock_rounding)
                    kept.append(_row(prompt.name, f"{name}, stock", comparison))
                bar.advance(task)
    num_bugs = sum(row["verdict"] == "bug" for row in kept)
    if as_json:
        print(to_json({"rounding": rounding, "rows": kept, "num_bugs": num_bugs}))
    else:
        _print(engine, rounding, kept)
    if num_bugs:
        raise typer.Exit(1)


def _measure(engine: Engine, prompt: NamedPrompt, max_new_tokens: int) -> tuple[float, float]:
    """The block rounding error on text that this model writes itself, and on the prompt where that is shorter; and the
    same against the stock model. Where bits are equal, nothing rounds."""
    params = SamplingParams(max_new_tokens=min(33, max_new_tokens))
    plain = engine.without_drafts().generate(usable(engine, prompt), params)
    text = plain.prompt_tokens + plain.tokens
    rounding, stock_rounding = audit.measure_roundings(engine, text)
    return (0.0 if engine.options.is_bitwise else rounding), stock_rounding


def _row(prompt: str, setting: str, comparison: audit.Comparison) -> dict[str, Any]:
    difference, stats = comparison.difference, comparison.speculative.stats
    row: dict[str, Any] = {
        "prompt": prompt,
        "setting": setting,
        "tokens": stats.num_new_tokens,
        "drafted": stats.num_drafted_tokens,
        "accepted": stats.num_accepted_tokens,
        "verdict": "identical",
    }
    if difference is not None:
        row |= {
            "verdict": "tie" if difference.is_tie else "bug",
            "index": difference.index,
            "plain": difference.plain,
            "speculative": difference.speculative,
            "gap": difference.gap,
            "threshold": difference.threshold,
        }
    return row


def _print(engine: Engine, rounding: float, rows: list[dict[str, Any]]) -> None:
    target = engine.target
    print(f"{target.dtype}, {target.device.type}, drafter {engine.drafter.name}, k {engine.options.k}")
    print(f"block rounding error of this model, dtype and device: {rounding:.2g} (largest difference of a logit)")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("prompt", "setting", "tokens", "drafted", "accepted", "verdict"):
        table.add_column(column, justify="right" if column in ("tokens", "drafted", "accepted") else "left")
    colours = {"identical": "green", "tie": "yellow", "bug": "bold red"}
    for row in rows:
        verdict = row["verdict"]
        detail = ""
        if "index" in row:
            (a, score_a), (b, score_b) = row["plain"], row["speculative"]
            detail = (
                f": token {row['index']}: plain {a} scores {score_a:.4f}, speculative {b} scores {score_b:.4f}; "
                f"gap {row['gap']:.2g}, rounding {row['threshold']:.2g}"
            )
        cells = [escape(str(row[name])) for name in ("prompt", "setting", "tokens", "drafted", "accepted")]
        table.add_row(*cells, f"[{colours[verdict]}]{verdict}[/]{detail}")
    Console(highlight=False).print(table)
    counts = {name: sum(row["verdict"] == name for row in rows) for name in ("identical", "tie", "bug")}
    print(f"{counts['identical']} identical, {counts['tie']} ties, {counts['bug']} bugs")
