"""What a pass of the target costs: a measured curve over rows and nodes. Knows nothing about models.

T(B, n) is the time of one pass over B rows of n nodes each. It is jagged (kernels change with the size of a matrix), so
it is measured and not modelled; between measured sizes it is interpolated. Reality keeps correcting it.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping
from pathlib import Path

# How fast an observation moves the whole curve (contexts grow, machines are shared) and its own size.
_DRIFT, _LEARNING = 0.05, 0.1


class CostCurve:
    """Seconds of a pass. cells: (rows, nodes per row) -> seconds; (1, 1) must be there.

    A number of rows that was never measured takes the time of one row with as many nodes in all.
    """

    def __init__(self, cells: Mapping[tuple[int, int], float]) -> None:
        if (1, 1) not in cells or not all(seconds > 0 for seconds in cells.values()):
            raise ValueError("A cost curve needs a positive time for every size, and one of (1, 1).")
        self._cells = dict(cells)
        self.drift = 1.0  # of all passes at present, against the measured ones
        self._sizes: dict[int, list[int]] = {}
        for rows, nodes in sorted(cells):
            self._sizes.setdefault(rows, []).append(nodes)

    @property
    def cells(self) -> dict[tuple[int, int], float]:
        return dict(self._cells)

    def seconds(self, rows: int, nodes: int) -> float:
        """T(rows, nodes)."""
        return self.drift * self._measured(rows, nodes)

    def _measured(self, rows: int, nodes: int) -> float:
        known = self._cells.get((rows, nodes))
        if known is not None:
            return known
        sizes = self._sizes.get(rows)
        if sizes is None or (len(sizes) == 1 and rows > 1):
            alone = self._along(1, rows * nodes)
            # One measured size of this number of rows says how far off the guess from one row is.
            return alone if sizes is None else alone * self._cells[rows, sizes[0]] / self._along(1, rows * sizes[0])
        return self._along(rows, nodes)

    def _along(self, rows: int, nodes: int) -> float:
        """Between the measured sizes of `rows` rows, a straight line; beyond the last, proportional growth."""
        sizes = self._sizes[rows]
        place = bisect.bisect(sizes, nodes)
        if place == len(sizes):
            last = self._cells[rows, sizes[-1]]
            if len(sizes) == 1:
                return last * nodes / sizes[-1]
            slope = max(0.0, (last - self._cells[rows, sizes[-2]]) / (sizes[-1] - sizes[-2]))
            return last + slope * (nodes - sizes[-1])
        if place == 0:
            return self._cells[rows, sizes[0]]
        low, high = sizes[place - 1], sizes[place]
        share = (nodes - low) / (high - low)
        return (1 - share) * self._cells[rows, low] + share * self._cells[rows, high]

    def observe(self, rows: int, nodes: int, seconds: float) -> None:
        """A pass took this long: the curve moves a little towards it, and this size a little more."""
        measured = self._measured(rows, nodes)
        ratio = min(2.0, max(0.5, seconds / (self.drift * measured)))  # a pass that was disturbed counts as less
        self.drift *= ratio**_DRIFT
        if (rows, nodes) not in self._cells:
            bisect.insort(self._sizes.setdefault(rows, []), nodes)
        self._cells[rows, nodes] = measured * ratio**_LEARNING

    def save(self, path: Path, facts: Mapping[str, str]) -> None:
        """Write a JSON file. facts: what the curve was measured for, for people."""
        path.parent.mkdir(parents=True, exist_ok=True)
        cells = [[rows, nodes, seconds] for (rows, nodes), seconds in sorted(self._cells.items())]
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps({"facts": dict(facts), "cells": cells}, indent=1), encoding="utf-8")
        partial.replace(path)

    @staticmethod
    def load(path: Path) -> CostCurve | None:
        """Read what `save` wrote; None where there is nothing that can be used."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return CostCurve({(int(rows), int(nodes)): float(seconds) for rows, nodes, seconds in data["cells"]})
        except (OSError, ValueError, KeyError, TypeError):
            return None
