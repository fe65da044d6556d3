"""docs/benchmarks.md and its pictures, from the results that are kept in docs/bench.

    python benchmarks/pages.py

Every folder docs/bench/NAME holds the results.json of a run of `outpace bench`. Nothing is measured here.
"""

from __future__ import annotations

from pathlib import Path

from outpace.bench import plots, summary, tables
from outpace.bench.results import Results

DOCS = Path(__file__).parents[1] / "docs"
_INTRO = """# Benchmarks

Measured with `outpace bench` on one machine, with losing rows left in: speeds below 1 are slower. Methods take
turns on every prompt, after a warm-up on another one; speeds are of whole calls, prompt included; tokens are
counted alike for all; brackets are 95 % intervals by bootstrap over prompts. *mean of ratios* averages prompts,
*totals* divides all tokens by all seconds, *decode only* leaves the time to the first token out. *identical*
compares with outpace's plain decoding. *expected* is what the planner foresaw of its drafts, against plain
decoding; *off*, the share of passes in which it drafted nothing on purpose. `spec-bench` is Spec-Bench's
`question.jsonl`, named by the environment variable `OUTPACE_SPEC_BENCH`.

This page is written by `python benchmarks/pages.py` from the results in `docs/bench`, each of which names its
versions, its machine and its settings.
"""


def page(runs: dict[str, Results]) -> str:
    """The text of docs/benchmarks.md. runs: by the name of their folder."""
    parts = [_INTRO]
    for name, results in runs.items():
        facts = results.provenance
        cells = summary.cells(results.rows, results.baseline)
        slow = [c for c in cells if c.method.startswith("outpace") and c.mean_ratio.value < 1]
        versions = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
        parts.append(
            f"## {name.replace('-', ' ')}\n\n"
            f"    {facts['command']}\n\n"
            f"{facts['processor']}, {facts['threads']} threads, {facts['dtype']}, layers {facts['kernels']}; "
            f"{versions}; {facts['date'][:10]}.\n\n"
            f"![Speed by category and method](bench/{name}/speed.svg)\n\n"
            f"{tables.markdown(cells, results.baseline)}\n"
            f"Rows of ours that are slower than {results.baseline}: "
            + (", ".join(f"{c.method} on {c.category} ({c.mean_ratio.value:.2f})" for c in slow) or "none")
            + ".\n"
        )
    return "\n".join(parts)


def kept() -> dict[str, Results]:
    """The runs in docs/bench, by folder."""
    return {file.parent.name: Results.load(file) for file in sorted(DOCS.glob("bench/*/results.json"))}


def main() -> None:
    runs = kept()
    (DOCS / "benchmarks.md").write_text(page(runs), encoding="utf-8")
    for name, results in runs.items():
        pictures = plots.all_plots(results)
        speed = next(svg for title, svg in pictures.items() if title.startswith("Speed"))
        (DOCS / "bench" / name / "speed.svg").write_text(speed, encoding="utf-8")
    print(f"{len(runs)} runs: {', '.join(runs)}")


if __name__ == "__main__":
    main()
