"""Methods take turns on each prompt; what each did is kept as one row, and a run that was interrupted goes on.

A row is a method on a batch of prompts at one temperature. Engines are loaded anew for every repeat, so that drafters
know nothing at its start; within a repeat they keep what they learn from prompt to prompt, as in use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import audit
from ..engine import Engine
from ..errors import InputError
from ..prompts import BUILT_IN, NamedPrompt
from ..request import Prompt
from ..sampling import SamplingParams
from ..session import Result, Stats
from .memory import Peak
from .methods import Method, Outpace, Run, Tokens

Row = dict[str, Any]
PLAIN = "outpace none"  # our own plain decoding: every run has it
_WARM_UP_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Plan:
    """What is decoded: prompts in batches, at every temperature, `repeats` times."""

    prompts: Sequence[NamedPrompt]
    max_new_tokens: int
    temperatures: Sequence[float]
    batch: int = 1
    repeats: int = 1

    def batches(self) -> list[list[NamedPrompt]]:
        """Prompts of one category, `batch` at a time."""
        found: list[list[NamedPrompt]] = []
        for prompt in self.prompts:
            if not found or len(found[-1]) == self.batch or found[-1][0].category != prompt.category:
                found.append([])
            found[-1].append(prompt)
        return found

    def params(self, temperature: float, count: int) -> list[SamplingParams]:
        base = SamplingParams(max_new_tokens=self.max_new_tokens, temperature=temperature)
        return [replace(base, seed=row + 1) for row in range(count)]


class Store:
    """Rows in a file, one JSON line each, behind a line with what they belong to."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Goes on with a file of the same settings. Raises InputError for one of others."""
        self.path = path
        self.rows: list[Row] = []
        settings = json.loads(json.dumps(settings))
        if path.is_file() and path.stat().st_size:
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rindex("\n") + 1]  # a process that was ended may have left half a line
            lines = [json.loads(line) for line in whole.splitlines()]
            if lines[0].get("settings") != settings:
                raise InputError(
                    f"{str(path)!r} holds a run with other settings. Give another folder for the results (--out), or "
                    "remove that one."
                )
            self.rows = lines[1:]
            if whole != text:
                path.write_text(whole, encoding="utf-8")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
        self._done = {_key(row) for row in self.rows}

    def has(self, row: Row) -> bool:
        return _key(row) in self._done

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._done.add(_key(row))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _key(row: Row) -> tuple[Any, ...]:
    return row["repeat"], row["temperature"], tuple(row["prompts"]), row["method"]


def run(
    plan: Plan,
    encode: Callable[[NamedPrompt], Prompt],
    make_methods: Callable[[], list[Method]],
    store: Store,
    progress: Callable[[str, int, int], None],
) -> None:
    """Fill the store. make_methods: loads every method anew, `PLAIN` among them, which must be first."""
    batches = plan.batches()
    total = plan.repeats * len(plan.temperatures) * len(batches)
    done = 0
    for repeat in range(plan.repeats):
        methods: list[Method] = []
        for temperature in plan.temperatures:
            for index, batch in enumerate(batches):
                label = {
                    "repeat": repeat,
                    "temperature": temperature,
                    "category": batch[0].category,
                    "prompts": [prompt.name for prompt in batch],
                }
                progress("Loading" if not methods else batch[0].category or "decoding", done, total)
                done += 1
                if methods and all(store.has({**label, "method": method.name}) for method in methods):
                    continue
                if not methods:
                    methods = make_methods()
                    _warm_up(methods, encode)
                    if all(store.has({**label, "method": method.name}) for method in methods):
                        continue
                turn = index % len(methods)
                order = methods[turn:] + methods[:turn]
                rows = [encode(prompt) for prompt in batch]
                for row in _turn(plan, temperature, rows, methods, order):
                    if not store.has({**label, **row}):
                        store.add({**label, **row})
    progress("Done", total, total)


def _warm_up(methods: Sequence[Method], encode: Callable[[NamedPrompt], Prompt]) -> None:
    """With a prompt that is not measured: drafters remember what they see."""
    ids = _ids(methods[0], encode(BUILT_IN[0]))
    for method in methods:
        for _ in range(2):
            method.run([ids], [SamplingParams(max_new_tokens=_WARM_UP_TOKENS)])


def _ids(plain: Method, prompt: Prompt) -> Tokens:
    assert isinstance(plain, Outpace), "our own plain decoding comes first"
    return plain.engine.encode(prompt)


def _turn(
    plan: Plan, temperature: float, prompts: Sequence[Prompt], methods: Sequence[Method], order: Sequence[Method]
) -> Iterator[Row]:
    """One row per method, after all have had their turn on a batch."""
    ids = [_ids(methods[0], prompt) for prompt in prompts]
    params = plan.params(temperature, len(ids))
    runs: dict[str, tuple[Run, float | None]] = {}
    for method in order:
        with Peak() as peak:
            found = method.run(ids, params)
        runs[method.name] = (found, peak.megabytes)
    plain = methods[0]
    assert isinstance(plain, Outpace), "our own plain decoding comes first"
    wanted = runs[PLAIN][0].results
    for method in methods:
        found, megabytes = runs[method.name]
        row: Row = {
            "method": method.name,
            "tokens": sum(map(len, found.tokens)),
            "seconds": found.seconds,
            "first_seconds": found.first_seconds,
            "peak_megabytes": megabytes,
            "verdicts": None,
        }
        if temperature == 0 or method.samples_alike:
            pairs = zip(wanted, found.tokens, params, strict=True)
            row["verdicts"] = [_verdict(plain.engine, base, tokens, one) for base, tokens, one in pairs]
        if isinstance(method, Outpace):
            row |= _counts([result.stats for result in found.results])
            planner = method.engine.planner
            row["predicted"] = planner.gain(len(ids)) if planner is not None else 1.0
        yield row


def _verdict(engine: Engine, plain: Result, tokens: Tokens, params: SamplingParams) -> str:
    """identical, tie or bug, against our plain decoding."""
    if tokens == plain.tokens:
        return "identical"
    _, rounding = audit.measure_roundings(engine, plain.prompt_tokens + plain.tokens)
    difference = audit.find_difference(engine, plain, replace(plain, tokens=tokens), params, rounding)
    assert difference is not None, "the texts differ"
    return "tie" if difference.is_tie else "bug"


def _counts(stats: Sequence[Stats]) -> Row:
    """Sums over the rows of a batch."""
    depth = max(len(one.drafted_by_depth) for one in stats)
    sums: Row = {
        "passes": sum(one.num_verifications for one in stats),
        "drafted": sum(one.num_drafted_tokens for one in stats),
        "accepted": sum(one.num_accepted_tokens for one in stats),
        "off": sum(one.num_rounds_switched_off for one in stats),
    }
    for name in ("drafted_by_depth", "accepted_by_depth"):
        lists = [getattr(one, name) for one in stats]
        sums[name] = [sum(values[place] for values in lists if place < len(values)) for place in range(depth)]
    for name in ("drafted_by_source", "accepted_by_source", "passes_by_nodes"):
        total: dict[str, int] = {}
        for one in stats:
            for key, count in getattr(one, name).items():
                total[str(key)] = total.get(str(key), 0) + count
        sums[name] = total
    return sums
