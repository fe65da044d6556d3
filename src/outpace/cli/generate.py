"""outpace generate: write text, and on request show that plain decoding writes the same, only slower."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .. import audit, session
from ..drafters.memory import Memory
from ..drafters.model import DEFAULT_CONFIDENCE_THRESHOLD
from ..engine import Engine
from ..request import Prompt
from ..sampling import SamplingParams
from ..session import Result
from .options import (
    AcceptanceOption,
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
    Model,
    PlannerOption,
    VocabulariesOption,
    Width,
    as_prompt,
    load_engine,
    talk,
    to_json,
)

_DEFAULTS = SamplingParams()


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads it from stdin.")] = None,
    model: Model = None,
    draft_model: DraftModel = None,
    drafter: DrafterOption = None,
    profile: Annotated[
        Path | None, typer.Option(help="A file that outpace tune wrote; names the drafter in place of --drafter.")
    ] = None,
    k: K = None,
    width: Width = 1,
    confidence_threshold: ConfidenceThreshold = DEFAULT_CONFIDENCE_THRESHOLD,
    vocabularies: VocabulariesOption = "equal",
    draft_quantize: DraftQuantizeOption = "auto",
    corpus: Corpus = None,
    memory: Annotated[
        Path | None,
        typer.Option(help="A file that keeps what was written, to draft later texts from; made if it is not there."),
    ] = None,
    lookahead: Lookahead = None,
    heads: Heads = None,
    planner: PlannerOption = "auto",
    acceptance: AcceptanceOption = "coupled",
    exactness: ExactnessOption = "numerical",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = _DEFAULTS.temperature,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = _DEFAULTS.top_p,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = _DEFAULTS.top_k,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = _DEFAULTS.min_p,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = _DEFAULTS.repetition_penalty,
    seed: Annotated[int | None, typer.Option(help="Repeats a sampled run. [default: drawn and reported]")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Most tokens to write.")
    ] = _DEFAULTS.max_new_tokens,
    prediction: Annotated[
        Path | None, typer.Option(help="A file with the text that is expected back; drafts copy from it.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; may be given several times.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template. [default: if there is one]")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Run plain decoding too and print the ratio.")] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write text after a prompt, exactly as plain decoding would.

    Example: outpace generate "Write a haiku about rain" --temperature 0.8 --seed 7 --compare
    """
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=tuple(stop or ()),
        prediction="" if prediction is None else _read_file(prediction),
    )
    text = _read_prompt(prompt)
    remembered = Memory()
    engine = load_engine(
        model,
        draft_model=draft_model,
        drafter=drafter,
        profile=profile,
        k=k,
        width=width,
        confidence_threshold=confidence_threshold,
        vocabularies=vocabularies,
        draft_quantize=draft_quantize,
        corpus=corpus,
        memory=0 if memory is None else remembered,
        lookahead=lookahead,
        heads=heads,
        planner=planner,
        acceptance=acceptance,
        exactness=exactness,
        dtype=dtype,
        device=device,
    )
    request = as_prompt(engine, text, chat, system)
    if compare:  # neither run should pay for the process's first forwards
        for warm in (engine, engine.without_drafts()):
            warm.generate(request, replace(params, max_new_tokens=min(8, max_new_tokens), stop=()))
            remembered.forget(params.tenant)
    if memory is not None and memory.exists():
        remembered.load(memory, engine.tokenizer)
    result = _run(engine, request, params, show=not as_json)
    if memory is not None:
        remembered.save(memory, engine.tokenizer)
    if not result.stats.is_lossless:
        talk.print("[bold red]Not lossless[/]: typical acceptance changes the distribution of the text.")
    report: dict[str, Any] = {"outpace": _to_dict(result)}
    if compare:
        report |= _compare(engine, request, params, result, show=not as_json)
    elif not as_json:
        talk.print(f"[dim]{_summary(result)}[/]")
    if as_json:
        print(to_json(report))


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read as UTF-8 text: {error}", param_hint="--prediction") from error


def _read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, or pipe one in", param_hint="PROMPT")
    try:
        text = sys.stdin.read() if prompt in (None, "-") else prompt
        text.encode()
    except UnicodeError as error:
        raise typer.BadParameter(f"the prompt is not UTF-8 text: {error}", param_hint="PROMPT") from error
    if not text:
        raise typer.BadParameter("the prompt is empty", param_hint="PROMPT")
    return text


def _run(engine: Engine, prompt: Prompt, params: SamplingParams, show: bool) -> Result:
    """Decode, writing text to stdout as it becomes final."""
    result = None
    for chunk in engine.stream(prompt, params):
        if show:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        result = chunk.result
    if show:
        sys.stdout.write("\n")
        sys.stdout.flush()
    assert result is not None, "a stream ends with its result"
    return result


def _compare(engine: Engine, prompt: Prompt, params: SamplingParams, fast: Result, show: bool) -> dict[str, Any]:
    """Run plain decoding with the same seed; print the table; return what --json adds."""
    if show:
        talk.print("\n[dim]The same prompt and seed without drafts:[/]")
    plain = _run(engine.without_drafts(), prompt, replace(params, seed=fast.seed), show)
    is_identical = plain.tokens == fast.tokens
    ratio = fast.stats.decode_tokens_per_second / max(plain.stats.decode_tokens_per_second, 1e-9)
    found: dict[str, Any] = {"plain": _to_dict(plain), "is_identical": is_identical, "speed_ratio": ratio}
    verdict = "[bold green]yes[/]"
    if not is_identical:
        rounding = audit.measure_rounding(engine.target, plain.prompt_tokens + plain.tokens)
        difference = audit.find_difference(engine, plain, fast, params, rounding)
        assert difference is not None
        judged = "a tie" if difference.is_tie else "a BUG"
        if fast.stats.acceptance != "coupled":
            judged = f"expected: acceptance={fast.stats.acceptance} promises no seed-exactness"
        verdict = (
            f"[bold yellow]no[/], from token {difference.index} on: {judged} "
            f"(gap {difference.gap:.2g}, rounding moves it by up to {difference.threshold:.2g})"
        )
        found["difference"] = {"index": difference.index, "gap": difference.gap, "is_tie": difference.is_tie}
    if show:
        talk.print(_table(fast, plain))
        talk.print(f"speed ratio: [bold]{ratio:.2f}[/]   identical: {verdict}   seed: {fast.seed}")
    return found


def _table(fast: Result, plain: Result) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "tokens", "target passes", "tokens per pass", "first token", "tokens/s"):
        table.add_column(column, justify="left" if not column else "right")
    for name, result in ((f"outpace ({fast.stats.drafter})", fast), ("plain", plain)):
        stats = result.stats
        table.add_row(
            name,
            str(stats.num_new_tokens),
            str(stats.num_verifications),
            f"{stats.tokens_per_pass:.2f}",
            f"{stats.prefill_seconds:.2f} s",
            f"{stats.decode_tokens_per_second:.1f}",
        )
    return table


def _summary(result: Result) -> str:
    stats = result.stats
    off = (
        f", {stats.num_rounds_switched_off} passes without, as drafts did not pay"
        if stats.num_rounds_switched_off
        else ""
    )
    failures = f", {stats.num_draft_failures} drafts failed" if stats.num_draft_failures else ""
    return (
        f"{stats.num_new_tokens} tokens in {stats.num_verifications} passes ({stats.tokens_per_pass:.2f} per pass, "
        f"{stats.num_accepted_tokens} of {stats.num_drafted_tokens} drafted tokens accepted{failures}{off}), "
        f"{stats.decode_tokens_per_second:.1f} tokens/s, drafter {stats.drafter}, {stats.acceptance}, "
        f"finish: {result.finish_reason}, seed {result.seed}"
    )


def _to_dict(result: Result) -> dict[str, Any]:
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "seed": result.seed,
        "stats": session.to_dict(result.stats),
    }
