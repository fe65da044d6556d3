"""outpace profile: what a pass over n tokens costs on this machine, as a table and a picture."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .. import profiling
from ..costs import CostCurve
from ..loading import KernelsName, load_model
from ..models import progress_bar
from ..probe import probe
from ..target import Target
from .options import Device, Dtype, Json, quiet_transformers, talk, to_json

_NODES = "1,2,4,8,12,16,24,32,48,64"
_WIDTH = 28  # characters of the longest bar


def profile(
    model: Annotated[
        str | None, typer.Argument(help="Folder, .gguf file or hub id. Default: the embedded SmolLM2-135M-Instruct.")
    ] = None,
    nodes: Annotated[str, typer.Option(help="Numbers of tokens per row, the drafted ones and one more.")] = _NODES,
    rows: Annotated[str, typer.Option(help="Numbers of rows, as in 1,2,4,8.")] = "1",
    repeats: Annotated[int, typer.Option(min=1, help="Passes per size; the median counts.")] = 5,
    kernels: Annotated[
        KernelsName,
        typer.Option(envvar="OUTPACE_KERNELS", help="auto: the fastest layers for few tokens. stock: torch's own."),
    ] = "auto",
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Measure what a pass costs, anew, print and draw it, and keep it for the planner.

    tokens are those of each row; of plain is against one row of one token. Beside it stand two floors: the time in
    which this machine reads all weights once (memory), and in which it multiplies that many numbers (compute). A pass
    can be faster than neither.
    """
    sizes = [(b, n) for b in _numbers(rows, "--rows") for n in _numbers(nodes, "--nodes")]
    quiet_transformers()
    with progress_bar() as progress:
        loaded, _ = load_model(model, None, dtype, device, progress)
        target = profiling.prepared(loaded, is_fresh=True) if kernels == "auto" else Target(loaded)
        target.can_tree = probe(target).can_tree
        cells = profiling.measure(target, sorted({(1, 1), *sizes}), repeats, progress)
        floors = profiling.floors(target)
    profiling.keep(target, CostCurve(cells))
    facts = profiling.facts(target) | {"kernels": "stock" if target.model is target.original else "for few rows"}
    report = {
        "facts": facts,
        "floors": {"bytes": floors.num_bytes, "bytes_per_second": floors.bandwidth, "flops_per_second": floors.rate},
        "passes": [
            {"rows": b, "nodes": n, "seconds": cells[b, n], "memory": floors.memory, "compute": floors.compute(b * n)}
            for b, n in sizes
        ],
    }
    if as_json:
        print(to_json(report))
    else:
        _print(report, cells)


def _numbers(text: str, option: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and 1 <= int(part) <= 4096 for part in parts):
        raise typer.BadParameter(f"{text!r} is no list of whole numbers from 1 to 4096, as in 1,2,4", param_hint=option)
    return sorted({int(part) for part in parts})


def _print(report: dict[str, Any], cells: dict[tuple[int, int], float]) -> None:
    facts, floors = report["facts"], report["floors"]
    talk.print(f"[dim]{facts['model']}, {facts['dtype']}, {facts['threads']} threads, kernels: {facts['kernels']}[/]")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("rows", "tokens", "ms", "of plain", "memory ms", "compute ms"):
        table.add_column(column, justify="right")
    table.add_column("")
    longest = max(passed["seconds"] for passed in report["passes"])
    for passed in report["passes"]:
        bar = "█" * max(1, round(_WIDTH * passed["seconds"] / longest))
        floor = min(len(bar), round(_WIDTH * max(passed["memory"], passed["compute"]) / longest))
        table.add_row(
            str(passed["rows"]),
            str(passed["nodes"]),
            f"{1000 * passed['seconds']:.1f}",
            f"{passed['seconds'] / cells[1, 1]:.2f}",
            f"{1000 * passed['memory']:.1f}",
            f"{1000 * passed['compute']:.1f}",
            f"[cyan]{bar[:floor]}[/][dim]{bar[floor:]}[/]",
        )
    Console().print(table)
    megabytes, bandwidth = floors["bytes"] / 1e6, floors["bytes_per_second"] / 1e9
    talk.print(f"[dim]memory: {megabytes:.0f} MB of weights at {bandwidth:.1f} GB/s")
    talk.print(f"[dim]compute: {floors['flops_per_second'] / 1e9:.0f} GFLOP/s; coloured: the larger floor[/]")
