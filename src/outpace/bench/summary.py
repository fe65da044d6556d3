"""From rows to numbers: ratios with intervals, per category. Pure functions; knows nothing about models."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .running import PLAIN, Row

ALL = "all"
_NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % interval, by bootstrap over prompts (percentiles)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Cell:
    """A method on a category at a temperature, over batches (mostly of one prompt).

    mean_ratio: mean over batches of the speed of the whole call over the baseline's; total_ratio: of all tokens over
    all seconds; decode_ratio: the same behind the first tokens, if there is anything; worst: the least ratio of a
    batch. first_seconds: median until the first token. tokens_per_pass, acceptance, off: of outpace, else None.
    predicted: mean of what the planner expected against our plain decoding. num_identical of num_texts, and the ties
    and bugs among the others.
    """

    temperature: float
    category: str
    method: str
    num_batches: int
    mean_ratio: Estimate
    total_ratio: Estimate
    decode_ratio: Estimate | None
    worst: float
    tokens_per_second: float
    first_seconds: float
    tokens_per_pass: float | None
    acceptance: float | None
    off: float | None
    predicted: float | None
    num_texts: int
    num_identical: int
    num_ties: int
    num_bugs: int
    peak_megabytes: float | None


def cells(rows: Sequence[Row], baseline: str = PLAIN) -> list[Cell]:
    """Every method, by temperature and category, all categories together last. Medians over repeats come first."""
    merged = _merge_repeats(rows)
    bases = {(row["temperature"], tuple(row["prompts"])): row for row in merged if row["method"] == baseline}
    groups: dict[tuple[float, str, str], list[Row]] = defaultdict(list)
    for category in (None, ALL):
        for row in merged:
            if (row["temperature"], tuple(row["prompts"])) in bases:
                groups[row["temperature"], category or row["category"], row["method"]].append(row)
    return [
        _cell(*key, group, [bases[row["temperature"], tuple(row["prompts"])] for row in group])
        for key, group in groups.items()
    ]


def _merge_repeats(rows: Sequence[Row]) -> list[Row]:
    """One row per method and batch: median times, and the counts and verdicts of all repeats."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["temperature"], tuple(row["prompts"]), row["method"]].append(row)
    merged = []
    for group in groups.values():
        row = dict(group[0])
        for name in ("seconds", "first_seconds"):
            row[name] = statistics.median(one[name] for one in group)
        for name in ("passes", "drafted", "accepted", "off"):
            if name in row:
                row[name] = sum(one[name] for one in group)
        row["counted_tokens"] = sum(one["tokens"] for one in group)
        verdicts = [verdict for one in group for verdict in one["verdicts"] or ()]
        row["verdicts"] = verdicts if row["verdicts"] is not None else None
        peaks = [one["peak_megabytes"] for one in group if one["peak_megabytes"] is not None]
        row["peak_megabytes"] = max(peaks) if peaks else None
        merged.append(row)
    return merged


def _cell(temperature: float, category: str, method: str, rows: Sequence[Row], bases: Sequence[Row]) -> Cell:
    ours = np.array([[row["tokens"], row["seconds"], row["first_seconds"]] for row in rows], dtype=float)
    theirs = np.array([[row["tokens"], row["seconds"], row["first_seconds"]] for row in bases], dtype=float)
    each = (ours[:, 0] / ours[:, 1]) / (theirs[:, 0] / theirs[:, 1])

    def total(chosen: Any) -> float:
        a, b = ours[chosen].sum(axis=0), theirs[chosen].sum(axis=0)
        return float((a[0] / a[1]) / (b[0] / b[1]))

    def decode(chosen: Any) -> float:
        a, b = ours[chosen].sum(axis=0), theirs[chosen].sum(axis=0)
        count = len(ours[chosen])
        before, after = (x[1] - x[2] for x in (b, a))
        if min(a[0], b[0]) <= count or min(before, after) <= 0:
            return float("nan")
        return float(((a[0] - count) / after) / ((b[0] - count) / before))

    has_counts = "passes" in rows[0]
    verdicts = [verdict for row in rows for verdict in row["verdicts"] or ()]
    peaks = [row["peak_megabytes"] for row in rows if row["peak_megabytes"] is not None]
    summed = {name: sum(row[name] for row in rows) for name in ("passes", "drafted", "accepted", "off") if has_counts}
    return Cell(
        temperature,
        category,
        method,
        len(rows),
        _bootstrap(lambda chosen: float(each[chosen].mean()), len(rows)),
        _bootstrap(total, len(rows)),
        None if math.isnan(decode(np.arange(len(rows)))) else _bootstrap(decode, len(rows)),
        float(each.min()),
        float(ours[:, 0].sum() / ours[:, 1].sum()),
        statistics.median(row["first_seconds"] for row in rows),
        sum(row["counted_tokens"] for row in rows) / summed["passes"] if has_counts else None,
        summed["accepted"] / max(1, summed["drafted"]) if has_counts else None,
        summed["off"] / max(1, summed["passes"]) if has_counts else None,
        statistics.mean(row["predicted"] for row in rows) if has_counts else None,
        len(verdicts),
        verdicts.count("identical"),
        verdicts.count("tie"),
        verdicts.count("bug"),
        max(peaks) if peaks else None,
    )


def _bootstrap(number: Callable[[Any], float], count: int) -> Estimate:
    """number: of chosen places. The interval is the number itself where there is one place only."""
    value = number(np.arange(count))
    if count == 1:
        return Estimate(value, value, value)
    generator = np.random.default_rng(0)
    found = [number(generator.integers(0, count, count)) for _ in range(_NUM_RESAMPLES)]
    low, high = np.nanpercentile(found, [2.5, 97.5])
    return Estimate(value, float(low), float(high))
