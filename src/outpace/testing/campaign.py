"""A random campaign over `outpace.accelerate`: each of many draws must give what transformers' own `generate` gives.

    python -m outpace.testing.campaign --draws 300
    python -m outpace.testing.campaign --draw 17

A draw is a pure function of its number, so a line that names one repeats it. Exit status 1 when a draw differs, or
when the campaign proves too little: hardly a draft was accepted or refused, or too many draws could not be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..cli.options import Json, quiet_transformers, talk, to_json
from .draws import draw as drawn
from .examine import OUTCOMES, Finding, examine

LEAST_PER_DRAW, MOST_LEFT_OUT = 3, 0.25
_TOKENS = ("drafted", "accepted", "rejected")


def campaign(
    draws: Annotated[int, typer.Option(min=1, help="How many draws.")] = 300,
    first: Annotated[int, typer.Option(min=0, help="The number of the first one.")] = 0,
    draw: Annotated[int | None, typer.Option(min=0, help="Only the draw of this number.")] = None,
    as_json: Json = False,
) -> None:
    """Compare random calls of outpace's generate with transformers' own."""
    quiet_transformers()
    numbers = range(first, first + draws) if draw is None else range(draw, draw + 1)
    findings = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=talk, transient=True) as bar:
        task = bar.add_task("comparing", total=len(numbers))
        for number in numbers:
            findings.append(examine(drawn(number)))
            bar.advance(task)
    complaints = complain(findings) if draw is None else []
    if as_json:
        print(to_json(_as_data(findings, complaints)))
    else:
        _print(findings, complaints, is_single=draw is not None)
    if complaints or any(finding.outcome == "mismatch" for finding in findings):
        raise typer.Exit(1)


def complain(findings: Sequence[Finding]) -> list[str]:
    """Why a campaign proves too little; empty when it does not."""
    complaints = []
    for what in ("accepted", "rejected"):
        number = sum(getattr(finding, f"num_{what}") for finding in findings)
        if number < LEAST_PER_DRAW * len(findings):
            complaints.append(f"{number} drafted tokens were {what}, fewer than {LEAST_PER_DRAW} per draw")
    left_out = sum(finding.outcome in ("refused", "not possible") for finding in findings)
    if left_out > MOST_LEFT_OUT * len(findings):
        complaints.append(f"{left_out} of {len(findings)} draws could not be compared, more than {MOST_LEFT_OUT:.0%}")
    return complaints


def command_of(finding: Finding) -> str:
    """The line that repeats a draw."""
    return f"python -m outpace.testing.campaign --draw {finding.draw.number}"


def _totals(findings: Sequence[Finding]) -> dict[str, int]:
    counts = Counter(finding.outcome for finding in findings)
    tokens = {name: sum(getattr(finding, f"num_{name}") for finding in findings) for name in _TOKENS}
    return {"draws": len(findings)} | {outcome: counts[outcome] for outcome in OUTCOMES} | tokens


def _as_data(findings: Sequence[Finding], complaints: Sequence[str]) -> dict[str, Any]:
    shown = [
        {"outcome": found.outcome, "command": command_of(found), "detail": found.detail, "draw": asdict(found.draw)}
        for found in findings
        if found.outcome != "identical"
    ]
    return {**_totals(findings), "complaints": list(complaints), "findings": shown}


def _print(findings: Sequence[Finding], complaints: Sequence[str], is_single: bool) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    by_family: dict[str, list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: finding.draw.family):
        by_family.setdefault(finding.draw.family, []).append(finding)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("family")
    columns = ("draws", *OUTCOMES, "drafted", "accepted")
    for name in columns:
        table.add_column(name, justify="right")
    for family, group in by_family.items():
        totals = _totals(group)
        table.add_row(family, *(str(totals[name] or "") for name in columns))
    console.print(table)
    reasons = Counter((found.outcome, found.draw.family, found.detail) for found in findings)
    for (outcome, family, detail), number in sorted(reasons.items()):
        if outcome in ("refused", "not possible"):
            console.print(f"{outcome}: {family}, {number} times: {detail}")
    for finding in findings:
        if is_single or finding.outcome in ("tie", "mismatch"):
            console.print(f"{finding.outcome}: {command_of(finding)}\n    {finding.detail}\n    {finding.draw}")
    for complaint in complaints:
        console.print(f"This campaign proves too little: {complaint}.")
    console.print(", ".join(f"{number} {name}" for name, number in _totals(findings).items()))


if __name__ == "__main__":
    typer.run(campaign)
