"""One self-contained HTML page of a run: what was asked, the tables, the pictures, and what it all depends on."""

from __future__ import annotations

from html import escape
from typing import Any

from .plots import all_plots
from .results import Results
from .summary import ALL, Cell, cells
from .tables import COLUMNS, line

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; max-width: 62rem;
  padding: 2rem 1.5rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.6rem 0 .6rem; }
p.lead { color: #444; margin: 0 0 1.5rem; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.5rem 0; }
.figures div { border: 1px solid #ddd; border-radius: .5rem; padding: .7rem 1rem; min-width: 9rem; }
.figures b { display: block; font-size: 1.6rem; font-weight: 650; } .figures span { color: #555; font-size: .85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .28rem .5rem; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
th { vertical-align: bottom; white-space: normal; font-weight: 600; border-bottom: 1px solid #999; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
tr.all td { font-weight: 600; background: #f6f6f6; } td.slow { color: #b00020; }
tr.first td { border-top: 1px solid #999; }
figure { margin: 1.2rem 0 2rem; } figure svg { width: 100%; height: auto; } figcaption { font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .85rem; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
code { font-size: .85em; overflow-wrap: anywhere; }
@media print { body { max-width: none; padding: 0; font-size: 11px; } figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; } table { font-size: 8px; } }
"""
_NOTES = """
Methods took turns on every prompt, after a warm-up on another one. Speeds are of whole calls, prompt included, unless
they say decode; tokens are counted alike for all. In brackets: the 95 % interval, by bootstrap over prompts.
<b>mean of ratios</b> averages prompts, <b>totals</b> divides all tokens by all seconds. <b>identical</b> compares with
outpace's plain decoding: a tie is a difference within rounding, a bug is one that is not. <b>expected</b> is what the
planner foresaw of its drafts, against plain decoding; <b>off</b>, the share of passes in which it drafted nothing on
purpose. Speeds below 1 are red.
"""


def html(results: Results) -> str:
    """The page."""
    found = cells(results.rows, results.baseline)
    facts = results.provenance
    plots = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in all_plots(results).items()
    )
    title = f"outpace bench: {_name(facts)}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><body>"
        f"<h1>{escape(title)}</h1><p class='lead'>{escape(_lead(results))}</p>{_figures(found)}"
        f"<p>{_NOTES}</p>{plots}{_tables(found, results.baseline)}"
        f"<h2>What this depends on</h2>{_provenance(facts)}</body></html>\n"
    )


def _name(facts: dict[str, Any]) -> str:
    return str(facts["settings"].get("model") or facts["model"])


def _lead(results: Results) -> str:
    facts, settings = results.provenance, results.provenance["settings"]
    count = len({tuple(row["prompts"]) for row in results.rows})
    return (
        f"{count} prompts or batches, {settings.get('max_new_tokens')} new tokens, {facts['dtype']}, "
        f"{facts['device']}, {facts['threads']} threads, {facts['processor']}; {facts['date']}"
    )


def _figures(found: list[Cell]) -> str:
    """The headline: every outpace method over all prompts."""
    boxes = [
        f"<div><b>{cell.mean_ratio.value:.2f} ×</b><span>{escape(cell.method)}, temperature {cell.temperature:g}<br>"
        f"worst prompt {cell.worst:.2f}</span></div>"
        for cell in found
        if cell.category == ALL and cell.method.startswith("outpace")
    ]
    return f"<div class='figures'>{''.join(boxes)}</div>"


def _tables(found: list[Cell], baseline: str) -> str:
    parts = []
    for temperature in sorted({cell.temperature for cell in found}):
        head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
        body, last = [], ""
        for cell in (cell for cell in found if cell.temperature == temperature):
            kinds = ["all"] if cell.category == ALL else []
            kinds += ["first"] if cell.category != last else []
            last = cell.category
            decode = cell.decode_ratio.value if cell.decode_ratio else 1.0
            ratios = {4: cell.mean_ratio.value, 5: cell.total_ratio.value, 6: decode, 7: cell.worst}
            row = "".join(
                f"<td{' class=slow' if ratios.get(place, 1.0) < 0.995 else ''}>{escape(text)}</td>"
                for place, text in enumerate(line(cell))
            )
            body.append(f"<tr class='{' '.join(kinds)}'>{row}</tr>")
        parts.append(
            f"<h2>Temperature {temperature:g}, speed against {escape(baseline)}</h2><div class='wide'>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        )
    return "".join(parts)


def _provenance(facts: dict[str, Any]) -> str:
    rows = []
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items() if item not in (None, [], ""))
        text = f"<code>{escape(str(value))}</code>" if name == "command" else escape(str(value))
        rows.append(f"<dt>{escape(name)}</dt><dd>{text}</dd>")
    return f"<dl>{''.join(rows)}</dl>"
