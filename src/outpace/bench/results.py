"""What a finished run leaves: results.json with everything that it depends on."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import profiling
from ..costs import CostCurve
from ..engine import Engine
from ..errors import InputError
from .running import Row
from .summary import cells

FORMAT = "outpace-bench 1"
_PACKAGES = ("outpace", "torch", "transformers", "tokenizers", "numpy")


@dataclass(frozen=True, slots=True)
class Results:
    """provenance: command, versions, machine, settings. baseline: what speeds are against. curve: [nodes, seconds] of a
    pass of one row. rows: see `running`."""

    provenance: dict[str, Any]
    baseline: str
    curve: list[tuple[int, float]]
    rows: list[Row]

    def save(self, path: Path) -> None:
        """Rows, and the numbers that follow from them, for readers without this package."""
        data = {
            "format": FORMAT,
            **asdict(self),
            "summary": [asdict(cell) for cell in cells(self.rows, self.baseline)],
        }
        path.write_text(json.dumps(data, indent=1, default=str, allow_nan=False), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Results:
        """Raises InputError for another kind of file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}")
            curve = [(int(nodes), float(seconds)) for nodes, seconds in data["curve"]]
            return Results(data["provenance"], data["baseline"], curve, data["rows"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{str(path)!r} is no results file of outpace bench: {error}") from error


def provenance(engine: Engine, command: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that a number of this run depends on."""
    return {
        "command": command,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **profiling.facts(engine.target),
        "kernels": "stock" if engine.target.model is engine.target.original else "for few rows",
        "settings": settings,
    }


def curve_of(curve: CostCurve) -> list[tuple[int, float]]:
    """The measured cells of one row."""
    return [(nodes, seconds) for (rows, nodes), seconds in sorted(curve.cells.items()) if rows == 1]


def _commit() -> str:
    """Of this package's own repository; "" for an installed package."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
