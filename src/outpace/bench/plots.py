"""The pictures of a report, each an SVG text. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import MissingExtraError
from .results import Results
from .running import PLAIN
from .summary import ALL, Cell, cells

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")  # for the colour-blind, too
GREY = "#888888"


def check_matplotlib() -> None:
    """Raises MissingExtraError where there is none."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "The report's plots need matplotlib. Install it with: pip install 'outpace[bench]', or give --no-report."
        ) from error


def all_plots(results: Results) -> dict[str, str]:
    """Title -> SVG, of everything that these results can show."""
    found = cells(results.rows, results.baseline)
    makers: dict[str, Callable[[Any], bool]] = {
        f"Speed against {results.baseline}, whole calls": lambda axis: _speeds(axis, found, results.baseline),
        "Tokens per pass": lambda axis: _tokens_per_pass(axis, found),
        "Acceptance by position": lambda axis: _positions(axis, results),
        "Acceptance by source": lambda axis: _sources(axis, results),
        "What a pass costs, and how large passes were": lambda axis: _curve(axis, results),
        "Expected and measured speed, prompt by prompt": lambda axis: _expected(axis, results),
        "Acceptance by temperature": lambda axis: _temperatures(axis, found),
    }
    drawn = {title: _drawn(maker) for title, maker in makers.items()}
    return {title: svg for title, svg in drawn.items() if svg}


def _drawn(make: Callable[[Any], bool]) -> str:
    """An SVG, or "" where there was nothing to draw."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "font.size": 10, "font.family": "sans-serif", "svg.hashsalt": "outpace"}):
        figure = Figure(figsize=(8.6, 3.6), layout="constrained")
        axis = figure.add_subplot()
        if not make(axis):
            return ""
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def _methods(found: Sequence[Cell], without: Sequence[str] = ()) -> list[str]:
    return [name for name in dict.fromkeys(cell.method for cell in found) if name not in without]


def _bars(axis: Any, found: Sequence[Cell], methods: Sequence[str], number: Callable[[Cell], Any], label: str) -> bool:
    """Groups of bars by category, a colour per method; number gives (value, low, high) or None."""
    categories = [name for name in dict.fromkeys(cell.category for cell in found) if name != ALL] + [ALL]
    by_key = {(cell.category, cell.method): number(cell) for cell in found}
    width, drawn = 0.8 / max(1, len(methods)), False
    for place, method in enumerate(methods):
        points = [(i, by_key.get((name, method))) for i, name in enumerate(categories)]
        kept = [(i, value) for i, value in points if value is not None]
        if not kept:
            continue
        drawn = True
        at = [i - 0.4 + width * (place + 0.5) for i, _ in kept]
        values = [value[0] for _, value in kept]
        errors = [[max(0.0, v[0] - v[1]) for _, v in kept], [max(0.0, v[2] - v[0]) for _, v in kept]]
        axis.bar(at, values, width * 0.9, color=COLOURS[place % len(COLOURS)], label=method)
        if any(map(any, errors)):
            axis.errorbar(at, values, errors, fmt="none", ecolor="#333333", elinewidth=0.8, capsize=1.5)
    axis.set_xticks(range(len(categories)), [name or ALL for name in categories], rotation=20, ha="right")
    axis.axhline(1, color=GREY, linewidth=0.8)
    axis.set_ylabel(label)
    if drawn:
        axis.legend(frameon=False, fontsize=8, ncols=min(4, len(methods)), loc="upper left", bbox_to_anchor=(0, 1.22))
    return drawn


def _first(found: Sequence[Cell]) -> list[Cell]:
    """Those of the lowest temperature."""
    lowest = min(cell.temperature for cell in found)
    return [cell for cell in found if cell.temperature == lowest]


def _speeds(axis: Any, found: Sequence[Cell], baseline: str) -> bool:
    mine = _first(found)
    return _bars(
        axis,
        mine,
        _methods(mine, [baseline]),
        lambda cell: (cell.mean_ratio.value, cell.mean_ratio.low, cell.mean_ratio.high),
        "mean of ratios",
    )


def _tokens_per_pass(axis: Any, found: Sequence[Cell]) -> bool:
    mine = _first(found)
    methods = [name for name in _methods(mine, [PLAIN]) if name.startswith("outpace")]
    return _bars(
        axis,
        mine,
        methods,
        lambda cell: None if cell.tokens_per_pass is None else (cell.tokens_per_pass,) * 3,
        "tokens per pass",
    )


def _drafted(results: Results) -> dict[str, list[dict[str, Any]]]:
    """Rows with drafts at the lowest temperature, by method."""
    lowest = min(row["temperature"] for row in results.rows)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in results.rows:
        if row["temperature"] == lowest and row.get("drafted"):
            found[row["method"]].append(row)
    return found


def _positions(axis: Any, results: Results) -> bool:
    for place, (method, rows) in enumerate(_drafted(results).items()):
        depth = max(len(row["drafted_by_depth"]) for row in rows)
        counts = [
            [sum(row[name][d] for row in rows if d < len(row[name])) for d in range(depth)]
            for name in ("drafted_by_depth", "accepted_by_depth")
        ]
        points = [(d + 1, kept / asked) for d, (asked, kept) in enumerate(zip(*counts, strict=True)) if asked >= 10]
        axis.plot(*zip(*points, strict=True), marker="o", ms=3, color=COLOURS[place % len(COLOURS)], label=method)
    axis.set_xlabel("depth of the draft (at least 10 rounds)")
    axis.set_ylabel("rounds in which it was kept")
    axis.set_ylim(0, 1)
    return _with_legend(axis)


def _sources(axis: Any, results: Results) -> bool:
    labels, values, totals = [], [], []
    for method, rows in _drafted(results).items():
        for source in dict.fromkeys(name for row in rows for name in row["drafted_by_source"]):
            asked, kept = (
                sum(row[name].get(source, 0) for row in rows) for name in ("drafted_by_source", "accepted_by_source")
            )
            labels.append(f"{method.removeprefix('outpace ')}: {source}")
            values.append(kept / asked)
            totals.append(asked)
    if not labels:
        return False
    bars = axis.barh(range(len(labels)), values, color=COLOURS[0])
    axis.bar_label(bars, [f"{value:.0%} of {total:,}" for value, total in zip(values, totals, strict=True)], padding=3)
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.set_xlim(0, max(values) * 1.25)
    axis.set_xlabel("accepted of drafted nodes")
    return True


def _curve(axis: Any, results: Results) -> bool:
    if not results.curve:
        return False
    sizes, seconds = zip(*results.curve, strict=True)
    axis.plot(sizes, [1e3 * second for second in seconds], color=GREY, marker=".", label="measured cost")
    for place, (method, rows) in enumerate(_drafted(results).items()):
        passes: dict[int, int] = defaultdict(int)
        for row in rows:
            for nodes, count in row["passes_by_nodes"].items():
                passes[int(nodes)] += count
        total = sum(passes.values())
        shown = {nodes: count for nodes, count in passes.items() if nodes <= sizes[-1]}
        heights = [1e3 * _between(results.curve, nodes) for nodes in shown]
        areas = [600 * count / total + 2 for count in shown.values()]
        axis.scatter(list(shown), heights, areas, color=COLOURS[place % len(COLOURS)], alpha=0.45, label=method)
    axis.set_xlabel("nodes of a pass (area: share of the passes)")
    axis.set_ylabel("milliseconds")
    axis.set_ylim(bottom=0)
    return _with_legend(axis)


def _between(curve: Sequence[tuple[int, float]], nodes: int) -> float:
    for (low, before), (high, after) in zip(curve, curve[1:], strict=False):
        if low <= nodes <= high:
            return before + (after - before) * (nodes - low) / (high - low)
    return curve[-1][1]


def _expected(axis: Any, results: Results) -> bool:
    """Of the planner's own question: decoding with drafts against decoding without."""
    plain = {
        (row["temperature"], row["repeat"], tuple(row["prompts"])): row
        for row in results.rows
        if row["method"] == PLAIN
    }
    largest = 1.0
    for place, (method, rows) in enumerate(_drafted(results).items()):
        points = []
        for row in rows:
            base = plain.get((row["temperature"], row["repeat"], tuple(row["prompts"])))
            if base is not None and row["seconds"] > row["first_seconds"]:
                before, after = (one["seconds"] - one["first_seconds"] for one in (base, row))
                points.append((row["predicted"], before / base["tokens"] * row["tokens"] / after))
        if points:
            largest = max(largest, *(max(point) for point in points))
            axis.scatter(*zip(*points, strict=True), s=14, color=COLOURS[place % len(COLOURS)], alpha=0.7, label=method)
    axis.plot([0.8, largest], [0.8, largest], color=GREY, linewidth=0.8)
    axis.set_xlabel("expected by the planner, against plain decoding")
    axis.set_ylabel("measured")
    return _with_legend(axis)


def _temperatures(axis: Any, found: Sequence[Cell]) -> bool:
    mine = [cell for cell in found if cell.category == ALL and cell.acceptance is not None and cell.method != PLAIN]
    if len({cell.temperature for cell in mine}) < 2:
        return False
    for place, method in enumerate(_methods(mine)):
        points = sorted((cell.temperature, cell.acceptance) for cell in mine if cell.method == method)
        axis.plot(*zip(*points, strict=True), marker="o", color=COLOURS[place % len(COLOURS)], label=method)
    axis.set_xlabel("temperature")
    axis.set_ylabel("accepted of drafted nodes")
    axis.set_ylim(bottom=0)
    return _with_legend(axis)


def _with_legend(axis: Any) -> bool:
    drawn = [label for label in axis.get_legend_handles_labels()[1] if label != "measured cost"]
    if drawn:
        legend = axis.legend(frameon=False, fontsize=8)
        for handle in legend.legend_handles:
            if hasattr(handle, "set_sizes"):
                handle.set_sizes([30])
    return bool(drawn)
