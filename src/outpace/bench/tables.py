"""Tables in Markdown, and the cells of the terminal's."""

from __future__ import annotations

from collections.abc import Sequence

from .summary import Cell, Estimate

COLUMNS = (
    *("category", "method", "identical", "tokens per pass", "speed (mean of ratios)", "speed (totals)"),
    *("decode only", "worst prompt", "first token, s", "tokens/s", "expected", "off", "peak MB"),
)
SHORT = ("category", "method", "identical", "tokens per pass", "speed (mean of ratios)", "worst prompt")  # a terminal's


def line(cell: Cell, columns: Sequence[str] = COLUMNS) -> list[str]:
    """One cell's numbers, in the order of the columns."""
    identical = "" if cell.num_texts == 0 else f"{cell.num_identical}/{cell.num_texts}"
    if cell.num_ties or cell.num_bugs:
        identical += f" ({cell.num_ties} ties, {cell.num_bugs} bugs)"
    texts = [
        cell.category or "-",
        cell.method,
        identical,
        _number(cell.tokens_per_pass),
        _interval(cell.mean_ratio),
        _interval(cell.total_ratio),
        _number(cell.decode_ratio.value if cell.decode_ratio else None),
        f"{cell.worst:.2f}",
        f"{cell.first_seconds:.3f}",
        f"{cell.tokens_per_second:.1f}",
        _number(cell.predicted),
        "" if cell.off is None else f"{100 * cell.off:.0f} %",
        "" if cell.peak_megabytes is None else f"{cell.peak_megabytes:.0f}",
    ]
    return [text for name, text in zip(COLUMNS, texts, strict=True) if name in columns]


def markdown(cells: Sequence[Cell], baseline: str) -> str:
    """A table per temperature. The baseline's own rows, which are 1.00, are left in: they have its speed."""
    parts = []
    for temperature in sorted({cell.temperature for cell in cells}):
        mine = [cell for cell in cells if cell.temperature == temperature]
        lines = [line(cell) for cell in mine]
        head = f"| {' | '.join(COLUMNS)} |\n" + "| --- " * len(COLUMNS) + "|\n"
        body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        parts.append(f"Temperature {temperature:g}; speed against {baseline}.\n\n{head}{body}\n")
    return "\n".join(parts)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _interval(estimate: Estimate) -> str:
    if estimate.low == estimate.high:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"
