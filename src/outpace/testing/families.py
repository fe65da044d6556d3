"""Decodes with a family's tiny model beside transformers, and says what works: the tables of docs/families.md.

python -m outpace.testing.families  # prints the tables; takes minutes
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from ..dropin import Accelerated, accelerate
from ..errors import LoadError
from ..models import progress_bar
from . import drafters
from .models import FAMILIES, MIN_DISTINCT, MIN_MARGIN, Family, attentions, noisy_copy, tiny_model
from .more_families import MORE

NUM_NEW = 120
WINDOW = 16  # of the tiny models that have one; prompts are shorter than it, as long, and longer
LENGTHS = (5, WINDOW, WINDOW + 1, 60)
_BATCH = (0, 2, 3)  # which of these prompts are the rows of the batch
_MOST_ATTEMPTS = 40
_PAD = 0
_ARGUMENTS: dict[str, Any] = {
    "do_sample": False,
    "max_new_tokens": NUM_NEW,
    "pad_token_id": _PAD,
    "use_cache": True,  # not every family's default
    "return_dict_in_generate": True,
    "output_scores": True,
}
TREES, CHAINS, REFUSED = "trees and ragged batches", "chains", "refused"
HEADER = """\
| family | model type | attention | layers | works with | largest difference |
| --- | --- | --- | --- | --- | --- |"""


@dataclass(frozen=True, slots=True)
class Text:
    """What a `generate` wrote.

    new: [rows, NUM_NEW] int64  the new tokens
    scores: [rows, NUM_NEW, vocab] float32  the scores they were chosen by
    """

    new: Tensor
    scores: Tensor

    @property
    def num_distinct(self) -> int:
        """Different tokens in the row that has the fewest."""
        return min(len(set(row)) for row in self.new.tolist())

    @property
    def margin(self) -> float:
        """The smallest gap between the best two scores."""
        best = self.scores.topk(2).values
        return float((best[..., 0] - best[..., 1]).min())


@dataclass(frozen=True, slots=True)
class Run:
    """One call with drafts, beside what transformers wrote.

    way: how was drafted. inputs: for which prompts. difference: the largest one between two scores of a token.
    num_failures: how often the drafter failed.
    """

    way: str
    inputs: str
    is_equal: bool
    difference: float
    num_accepted: int
    num_rejected: int
    num_failures: int


@dataclass(frozen=True, slots=True)
class Finding:
    """What a family does with one attention implementation.

    verdict: TREES, CHAINS or REFUSED. reason: why not TREES. layers: the kinds of its layers. num_distinct, margin: the
    smallest of all texts that were compared with. is_padding_exact: whether transformers writes the same text in a
    padded batch as alone; where it does not, batches are compared with the texts alone.
    """

    attention: str
    verdict: str
    reason: str
    layers: str
    runs: tuple[Run, ...] = ()
    num_distinct: int = 0
    margin: float = 0.0
    is_padding_exact: bool = True


def examine(family: str | Family, tried: Sequence[str] = ()) -> tuple[Finding, ...]:
    """One finding for each attention implementation of `tried`, by default all that the family takes.

    The runs of all of them together draft for every prompt in every way.
    """
    tried = tried or attentions(family)
    draft, findings = None, []
    for turn, attention in enumerate(tried):
        model = tiny_model(family, attn_implementation=attention)
        finding = judge(model)
        if finding.verdict != REFUSED:
            draft = draft or noisy_copy(model, accept=(0.65, 0.85))
            finding = _compared(model, draft, finding, turns=(turn,) if len(tried) > 1 else (0, 1))
        findings.append(finding)
    return tuple(findings)


def judge(model: Any) -> Finding:
    """What `accelerate` finds out about a model at load. Nothing is decoded; numbers are left out of the reason."""
    reason = ""
    try:
        capabilities = accelerate(model, drafter="none").engine.capabilities
        verdict = TREES if capabilities.can_tree else CHAINS
        if verdict == CHAINS:
            reason = re.sub(r": WRONG, .*", " is wrong", capabilities.reasons[-1]).removeprefix("tree: ")
    except LoadError as error:
        verdict = REFUSED
        first = re.sub(r" by \S+ \([^)]*\)|, so .*|: \w+Error: .*", "", str(error).partition(". ")[0])
        reason = re.sub(r"^[AL](?=[a-z ])", lambda letter: letter[0].lower(), first)
    return Finding(model.config._attn_implementation, verdict, reason, _layers(model.config, verdict))


def _layers(config: Any, verdict: str) -> str:
    """The kinds of layers that the config names, in order. One that names none and works has attention."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if not kinds and verdict != REFUSED:
        kinds = ["sliding" if getattr(config, "sliding_window", None) else "full"]
    kinds = kinds or ()
    return ", ".join(dict.fromkeys(kind.removesuffix("_attention").replace("_", " ") for kind in kinds))


def _compared(model: Any, draft: Any, finding: Finding, turns: Sequence[int]) -> Finding:
    """The finding with its runs. turns: 0 and 1 share out prompts and ways; both together are all of them."""
    prompts, alone = zip(*(_reference(model, length) for length in LENGTHS), strict=True)
    batch = [prompts[row] for row in _BATCH]
    padded, together = _generate(model, batch), _stacked([alone[row] for row in _BATCH])
    is_padding_exact = torch.equal(padded.new, together.new)
    wanted = [*alone, padded if is_padding_exact else together]
    inputs = [*([prompt] for prompt in prompts), batch]

    texts = [[*prompt, *text.new[0].tolist()] for prompt, text in zip(prompts, alone, strict=True)]
    guesses = drafters.random_trees(alone[0].scores.shape[-1], texts)
    plans = [("random drafts", accelerate(model, drafter=guesses, k=5), [*range(len(inputs))])]
    second: dict[str, Any] = {"k": 6, "width": 2} if finding.verdict == TREES else {"k": 6}
    for turn, options in enumerate(({"k": 4}, second)):
        # A draft model that goes on however unsure it is.
        fast = accelerate(model, drafter=draft, confidence_threshold=0.0, **options)
        rows = [row for row in range(len(LENGTHS)) if (row + turn) % 2 in turns]
        way = f"{'trees' if 'width' in options else 'chains'} of {options['k']}"
        plans.append((way, fast, [*rows, len(LENGTHS)] if turn in turns else rows))
    runs = [_run(way, fast, inputs[index], wanted[index]) for way, fast, indices in plans for index in indices]
    return replace(
        finding,
        runs=tuple(runs),
        num_distinct=min(text.num_distinct for text in wanted),
        margin=min(text.margin for text in wanted),
        is_padding_exact=is_padding_exact,
    )


def _reference(model: Any, length: int) -> tuple[list[int], Text]:
    """A prompt after which transformers writes a text that is worth comparing with, and that text.

    The margin is twice the least one: a padded batch rounds in its own way.
    """
    for attempt in range(_MOST_ATTEMPTS):
        numbers = random.Random(f"{length} {attempt}")
        prompt = [numbers.randrange(1, 512) for _ in range(length)]
        text = _generate(model, [prompt])
        if text.num_distinct >= MIN_DISTINCT and text.margin >= 2 * MIN_MARGIN:
            return prompt, text
    raise ValueError(f"No prompt of {length} tokens leads to a varied text with clear choices. Build another model.")


def _generate(model: Any, prompts: Sequence[Sequence[int]]) -> Text:
    """What transformers, or an accelerated model, writes after prompts, which are padded on the left."""
    length = max(map(len, prompts))
    ids = torch.tensor([[_PAD] * (length - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    found = model.generate(ids, attention_mask=mask, **_ARGUMENTS)
    return Text(found.sequences[:, length:], torch.stack(found.scores, dim=1))


def _stacked(texts: Sequence[Text]) -> Text:
    return Text(torch.cat([text.new for text in texts]), torch.cat([text.scores for text in texts]))


def _run(way: str, fast: Accelerated, prompts: Sequence[Sequence[int]], wanted: Text) -> Run:
    found = _generate(fast, prompts)
    return Run(
        way,
        f"a prompt of {len(prompts[0])}" if len(prompts) == 1 else f"a batch of {len(prompts)}",
        torch.equal(found.new, wanted.new),
        _difference(found.scores, wanted.scores) if found.new.shape == wanted.new.shape else math.inf,
        sum(stats.num_accepted_tokens for stats in fast.last_stats),
        sum(stats.num_rejected_tokens for stats in fast.last_stats),
        sum(stats.num_draft_failures for stats in fast.last_stats),
    )


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest |a - b|; equal infinities, as of a forced token, do not differ."""
    return float(torch.where(a == b, 0.0, (a - b).abs()).max())


# ---------------------------------------------------------------- the tables


def as_row(name: str, family: Family, findings: Sequence[Finding]) -> str:
    """A line of a table. Attention implementations that differ in what works are told apart."""
    results = {finding.attention: _result(finding) for finding in findings}
    both = list(dict.fromkeys(results.values()))
    result = both[0] if len(both) == 1 else "; ".join(f"{attention}: {text}" for attention, text in results.items())
    differences = [run.difference for finding in findings for run in finding.runs]
    cells = (
        name,
        family.model_type,
        ", ".join(results),
        findings[0].layers,
        result,
        rounded_up(max(differences)) if differences else "",
    )
    return f"| {' | '.join(cells)} |"


def _result(finding: Finding) -> str:
    wrong = [f"{run.way}, {run.inputs}" for run in finding.runs if not run.is_equal]
    if wrong:
        return f"WRONG TEXT: {'; '.join(wrong)}"
    result = f"{finding.verdict}: {finding.reason}" if finding.reason else finding.verdict
    return result if finding.is_padding_exact else f"{result}; transformers' padded batch differs from single texts"


def rounded_up(number: float) -> str:
    """One significant digit, not less than the number: 0.00021 -> "3e-04"."""
    if number == 0 or not math.isfinite(number):
        return str(number)
    step = 10.0 ** math.floor(math.log10(number))
    return f"{math.ceil(number / step - 1e-9) * step:.0e}"


def main() -> None:
    """Print both tables. A wrong text is shown in its row, and ends with an error."""
    rows: list[str] = []
    with progress_bar() as progress:
        for name, family in (FAMILIES | MORE).items():
            progress(name, len(rows), len(FAMILIES | MORE))
            tried = () if name in FAMILIES else attentions(family)[-1:]
            rows.append(as_row(name, family, examine(family, tried)))
    print(f"Made with transformers {version('transformers')} and torch {version('torch')}:\n")
    print("\n".join([HEADER, *rows[: len(FAMILIES)]]))
    print("\n## Also tried\n")
    print("\n".join([HEADER, *rows[len(FAMILIES) :]]))
    if "WRONG TEXT" in "".join(rows):
        sys.exit("outpace wrote another text than transformers: please report the rows that say so.")


if __name__ == "__main__":
    main()
