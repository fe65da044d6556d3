"""Runs a draw, and compares what `outpace.accelerate` gives with what is right: the text, scores, callbacks, counts.

Greedy calls are compared with transformers' own `generate`. Sampled text, which transformers draws with other noise, is
compared with outpace's own without drafts, and each row with a call of its own. A token that differs where its score
is nearer than MOST_OF_A_TIE to that of the wanted one is a tie, which rounding decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from .. import noise
from ..arguments import CACHES
from ..dropin import Accelerated, accelerate
from ..errors import LoadError
from ..session import Stats
from . import drafters
from .draws import FAULTY, VOCAB, Draw, draft_of, model_of, padded, quiet

MOST_OF_A_TIE = 1e-3
# Scores of these models vary by 6 and more; over a cache or beside padding, rounding moves them by up to 1e-3
# (qwen3_next), in transformers' own loop as well. A wrong mask moves them by tenths.
SCORE_TOLERANCE = 2e-3
OUTCOMES = ("identical", "tie", "refused", "not possible", "mismatch")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a draw showed. outcome: one of OUTCOMES; detail: why, for people."""

    draw: Draw
    outcome: str
    detail: str = ""
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def num_rejected(self) -> int:
        return self.num_drafted - self.num_accepted


def examine(draw: Draw) -> Finding:
    """Load, run and compare. A family that outpace cannot load is "refused"."""
    model = model_of(draw.family, draw.attention)
    texts: list[list[int]] = []
    with quiet():
        try:
            undrafted = accelerate(model, drafter="none")
            width = draw.width if undrafted.engine.target.can_tree else 1
            how = _how_to_draft(draw, texts, width)
            fast = accelerate(model, **how, k=draw.k, prefill_chunk=draw.prefill_chunk)
        except LoadError as error:
            return Finding(draw, "refused", str(error))
        examination = _Examination(draw, fast, undrafted, texts)
        outcome, detail = examination.run()
    num_drafted = sum(stats.num_drafted_tokens for stats in examination.stats)
    return Finding(draw, outcome, detail, num_drafted, sum(stats.num_accepted_tokens for stats in examination.stats))


def _how_to_draft(draw: Draw, texts: Sequence[Sequence[int]], width: int) -> dict[str, Any]:
    """Arguments of `accelerate`. texts: filled before each call with what the rows will say."""
    end = draw.arguments.get("eos_token_id", 0)
    scripted: dict[str, Callable[[], Any]] = {
        "oracle": lambda: drafters.oracle(texts),
        "always wrong": lambda: drafters.always_wrong(texts, VOCAB),
        "empty": drafters.empty,
        "end spam": lambda: drafters.end_spam(end[0] if isinstance(end, list) else end),
        "duplicate siblings": lambda: drafters.duplicate_siblings(texts),
        "random trees": lambda: drafters.random_trees(VOCAB, texts, seed=draw.number),
    }
    if draw.drafter == "model":
        draft = draft_of(draw.family)
        return {"draft_model": draft, "width": width, "confidence_threshold": draw.confidence_threshold}
    made = (scripted | FAULTY).get(draw.drafter)
    return {"drafter": draw.drafter if made is None else made()}


@dataclass(slots=True)
class _Callbacks:
    """What a call is given of CALLBACKS, all of them new, deterministic, and not to be called once more or less.

    seen: callback -> what it was called with, in order.
    """

    names: Sequence[str]
    seen: dict[str, list[Any]] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        self.seen = {name: [] for name in self.names}
        possible = {
            "processor": ("logits_processor", transformers.LogitsProcessorList([self._process])),
            "criterion": ("stopping_criteria", transformers.StoppingCriteriaList([self._is_ended])),
            "prefix": ("prefix_allowed_tokens_fn", self._allowed),
            "streamer": ("streamer", self),
        }
        return dict(possible[name] for name in self.names)

    def _process(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Favours one token for all rows, by the number of calls and by what all rows wrote last."""
        self.seen["processor"].append(ids.tolist())
        scores = scores.clone()
        scores[:, (7 * len(self.seen["processor"]) + int(ids[:, -1].sum())) % VOCAB] += 5
        return scores

    def _is_ended(self, ids: Tensor, scores: Any, **options: Any) -> Tensor:
        self.seen["criterion"].append(ids.tolist())
        return ids[:, -1] % 13 == 5

    def _allowed(self, row: int, ids: Tensor) -> list[int]:
        self.seen["prefix"].append((row, ids.tolist()))
        return [token for token in range(VOCAB) if (token + int(ids[-1])) % 3]

    def put(self, tokens: Tensor) -> None:
        self.seen["streamer"].append(tokens.tolist())

    def end(self) -> None:
        self.seen["streamer"].append("end")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a call gave: its result or its error, and what its callbacks saw. num_new: tokens of each row."""

    result: Any = None
    error: Exception | None = None
    seen: dict[str, list[Any]] = field(default_factory=dict)
    num_new: Sequence[int] = ()

    @property
    def sequences(self) -> Tensor:
        found: Tensor = getattr(self.result, "sequences", self.result)
        return found

    def cache(self) -> dict[str, Any]:
        """The keyword argument that hands the cache on."""
        name = next(name for name in CACHES if hasattr(self.result, name))
        return {name: getattr(self.result, name)}


@dataclass(slots=True)
class _Examination:
    """A draw under examination. texts: every row's text, which drafters that know what comes look up."""

    draw: Draw
    fast: Accelerated
    undrafted: Accelerated
    texts: list[list[int]]
    stats: list[Stats] = field(default_factory=list)

    def ask(self, who: str, inputs: dict[str, Any], **changed: Any) -> _Answer:
        """One call. who: "plain" is transformers, "fast" and "undrafted" are outpace."""
        model: Any = self.fast.engine.target.model
        ours = {"fast": self.fast, "undrafted": self.undrafted}.get(who)
        arguments = self.draw.arguments | ({"seed": self.draw.seed} if ours and self.draw.seed is not None else {})
        call: Callable[..., Any] = model.generate
        if ours is not None:
            is_entry = self.draw.entry == "fast.generate"
            call = ours.generate if is_entry else partial(model.generate, custom_generate=ours)
        callbacks = _Callbacks(self.draw.callbacks)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                result = call(**inputs, **(arguments | callbacks.arguments() | changed))
        except Exception as error:
            return _Answer(error=error)
        stats = () if ours is None else ours.last_stats
        if who == "fast":
            self.stats += stats
        return _Answer(result, None, callbacks.seen, [one.num_new_tokens for one in stats])

    def run(self) -> tuple[str, str]:
        """(outcome, detail) of all turns."""
        oracle = "plain" if self.draw.seed is None else "undrafted"
        inputs: dict[str, Any] = padded(self.draw.prompts)
        wanted_cache: dict[str, Any] = {}
        found_cache: dict[str, Any] = {}
        has_cache = self.fast.engine.target.can_copy
        turns = self.draw.turns if has_cache else self.draw.turns[:1]
        for turn, who in enumerate(turns):
            paddings = (inputs["attention_mask"] == 0).sum(-1).repeat_interleave(self.draw.num_returned).tolist()
            recorded = {"return_dict_in_generate": True, "output_scores": True}
            wanted = self.ask(oracle, inputs, **wanted_cache, **recorded)
            # Of sampled calls, only where ours fails: transformers may fail in the middle of a text that only it draws.
            if wanted.error is not None and oracle != "plain" and self.ask("plain", inputs).error is None:
                return "mismatch", f"outpace raises {wanted.error!r}, and transformers does not"
            if wanted.error is None:
                rows = zip(wanted.sequences.tolist(), paddings, strict=True)
                self.texts += [row[padding:] for row, padding in rows]
            found = self.ask(who, inputs, **found_cache)
            outcome, detail = self._compared(inputs, paddings, wanted, found, is_ours=who == "fast")
            if outcome == "identical" and who == "fast" and self.draw.seed is not None and self.draw.has_rows_alone:
                outcome, detail = self._alone(inputs, wanted, found)
            if outcome != "identical":
                return outcome, f"turn {turn + 1}: {detail}"
            if turn + 1 < len(turns):
                wanted_cache, found_cache = wanted.cache(), found.cache()
                num_new = wanted.sequences.shape[1] - inputs["input_ids"].shape[1] + len(self.draw.more[0])
                inputs = {
                    "input_ids": torch.cat([wanted.sequences, torch.tensor(self.draw.more)], dim=-1),
                    "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, num_new), value=1),
                }
        return self._counted()

    def _counted(self) -> tuple[str, str]:
        for stats in self.stats:
            if stats.num_new_tokens != stats.num_accepted_tokens + stats.num_verifications:
                return "mismatch", f"the counts do not add up: {stats}"
            if stats.num_draft_failures and self.draw.drafter not in FAULTY:
                return "mismatch", f"drafts were thrown away: {stats}"
        return "identical", ""

    def _compared(
        self, inputs: dict[str, Any], paddings: Sequence[int], wanted: _Answer, found: _Answer, is_ours: bool
    ) -> tuple[str, str]:
        if wanted.error is not None:
            if found.error is None:
                return "mismatch", f"transformers raises {wanted.error!r}, outpace gives {found.sequences.tolist()}"
            return "not possible", f"{type(wanted.error).__name__}: {str(wanted.error)[:300]}"
        if found.error is not None:
            return "mismatch", f"outpace raises {found.error!r}"
        length = inputs["input_ids"].shape[1]
        new, theirs = found.sequences[:, length:].tolist(), wanted.sequences[:, length:].tolist()
        if found.sequences.shape[0] != wanted.sequences.shape[0]:
            return "mismatch", f"{found.sequences.shape[0]} rows instead of {wanted.sequences.shape[0]}"
        positions = [length - padding for padding in paddings]
        differing = [
            _difference(ours, other, [step[row] for step in wanted.result.scores], seed, position)
            for row, (ours, other, seed, position) in enumerate(
                zip(new, theirs, self.draw.seeds, positions, strict=True)
            )
        ]
        found_any = [difference for difference in differing if difference is not None]
        # Where one row goes on for longer, all get more columns: look at tokens first.
        found_any = [difference for difference in found_any if difference.wanted is not None] or found_any
        if "processor" in self.draw.callbacks:  # it couples the rows: what follows the first difference is its echo
            first = min((difference.step for difference in found_any), default=0)
            found_any = [difference for difference in found_any if difference.step == first]
        if found_any:
            worst = max(found_any, key=lambda difference: difference.gap)
            rows = [row for row, difference in enumerate(differing) if difference is not None]
            outcome = "tie" if worst.gap < MOST_OF_A_TIE else "mismatch"
            return outcome, f"rows {rows}: {worst}, wanted {theirs}, found {new}"
        if not is_ours:
            return "identical", ""
        return self._same_record(wanted, found)

    def _same_record(self, wanted: _Answer, found: _Answer) -> tuple[str, str]:
        """Compares what was recorded beside the text."""
        has_record = bool(self.draw.arguments.get("return_dict_in_generate"))
        if has_record != hasattr(found.result, "sequences"):
            return "mismatch", f"the result is a {type(found.result).__name__}"
        for name in wanted.seen:
            if wanted.seen[name] != found.seen[name]:
                return "mismatch", f"the {name} saw {found.seen[name]} instead of {wanted.seen[name]}"
        for name in ("scores", "logits"):
            if not (has_record and self.draw.arguments.get(f"output_{name}")):
                if getattr(found.result, name, None) is not None:
                    return "mismatch", f"{name} were recorded and not asked for"
                continue
            ours, theirs = getattr(found.result, name), getattr(wanted.result, name)
            if len(ours) != len(theirs):
                return "mismatch", f"{len(ours)} {name} instead of {len(theirs)}"
            for row, num_new in enumerate(found.num_new):  # rows that have ended are zeros here
                for step in range(num_new):
                    outcome = _nearness(ours[step][row], theirs[step][row])
                    if outcome != "identical":
                        return outcome, f"{name} of row {row} at step {step} differ"
        return "identical", ""

    def _alone(self, inputs: dict[str, Any], wanted: _Answer, found: _Answer) -> tuple[str, str]:
        """Compares each row with a call of its own, without padding."""
        length = inputs["input_ids"].shape[1]
        for row, seed in enumerate(self.draw.seeds):
            prompt = self.draw.prompts[row // self.draw.num_returned]
            alone = self.ask("fast", padded([prompt]), seed=seed, num_return_sequences=1)
            if alone.error is not None:
                return "mismatch", f"row {row} alone raises {alone.error!r}"
            theirs = found.sequences[row, length : length + found.num_new[row]].tolist()
            ours = alone.sequences[0, len(prompt) :].tolist()
            scores = [step[row] for step in wanted.result.scores]
            difference = _difference(ours, theirs, scores, seed, len(prompt))
            if difference is not None:
                outcome = "tie" if difference.gap < MOST_OF_A_TIE else "mismatch"
                return outcome, f"row {row} alone: {difference}, in the batch {theirs}, alone {ours}"
        return "identical", ""


@dataclass(frozen=True, slots=True)
class _Difference:
    """The first token of a row that differs. gap: by how much its score is below that of the wanted token."""

    step: int
    wanted: int | None
    found: int | None
    gap: float


def _difference(
    found: Sequence[int], wanted: Sequence[int], scores: Sequence[Tensor], seed: int | None, position: int
) -> _Difference | None:
    """Compares the new tokens of a row. scores: of each step [vocab]; position: of the first new token in its text."""
    if found == wanted:
        return None
    step = next(
        (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted))
    )
    if step >= min(len(found), len(wanted), len(scores)):
        return _Difference(step, None, None, float("inf"))
    values = scores[step].double()
    if seed is not None:
        values = noise.perturbed(values.log_softmax(-1), None, seed, position + step)
    gap = abs(float(values[wanted[step]] - values[found[step]]))
    return _Difference(step, wanted[step], found[step], gap if gap == gap else float("inf"))


def _nearness(found: Tensor, wanted: Tensor) -> str:
    """Compares scores of a step, [vocab]: "identical" up to rounding, or a "tie" at the edge of what was cut off."""
    if torch.allclose(found, wanted, rtol=1e-4, atol=SCORE_TOLERANCE, equal_nan=True):
        return "identical"
    is_kept, is_wanted = found.isfinite(), wanted.isfinite()
    both = is_kept & is_wanted
    ours, theirs = found[is_kept & ~is_wanted], wanted[is_wanted & ~is_kept]
    has_swapped = ours.shape == theirs.shape == (1,) and abs(float(ours - theirs)) < MOST_OF_A_TIE
    is_near = torch.allclose(found[both], wanted[both], rtol=1e-4, atol=SCORE_TOLERANCE)
    return "tie" if has_swapped and is_near else "mismatch"
