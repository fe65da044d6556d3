"""Every family of tiny models, with every attention implementation it takes: the greedy text is transformers' own.

And docs/families.md says what was found. Which families take trees, chains or nothing is written out here, so that a
check at load that changes its mind is seen.
"""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from outpace import LoadError, accelerate
from outpace.testing.families import (
    CHAINS,
    HEADER,
    LENGTHS,
    REFUSED,
    TREES,
    Finding,
    as_row,
    examine,
    judge,
    rounded_up,
)
from outpace.testing.models import FAMILIES, MIN_DISTINCT, MIN_MARGIN, attentions, tiny_model
from outpace.testing.more_families import MORE

PAGE = (Path(__file__).parents[1] / "docs" / "families.md").read_text(encoding="utf-8")
# The page is made with a new version of transformers; older ones can do less, and lack some families.
IS_OF_THE_PAGE = Version(transformers.__version__) >= Version("5.24")
needs_the_version_of_the_page = pytest.mark.skipif(not IS_OF_THE_PAGE, reason="docs/families.md is of newer versions")

TAKE_TREES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "phi3", "gpt2", "gpt_neox", "gptj"),
    *("opt", "falcon", "starcoder2", "stablelm", "olmo2", "granite", "cohere", "mixtral", "qwen3_moe", "gpt-oss"),
    *("deepseek_v3", "smollm3"),
)
LARGEST_ROUNDING = 1e-2  # a wrong mask is off by tenths
NO_POSITIONS, STATE, WRONG = "takes no position_ids", "recurrent or convolution state", "over this model's cache is off"
TAKE_CHAINS = {"bloom": NO_POSITIONS, "mpt": NO_POSITIONS, "qwen3_next": STATE}
if IS_OF_THE_PAGE:
    TAKE_CHAINS |= {"lfm2": STATE, "mamba2": STATE}
    ARE_REFUSED = {"mamba": WRONG}
else:
    NO_CACHE = "takes no key/value cache"
    ARE_REFUSED = {"lfm2": WRONG, "mamba": NO_CACHE, "mamba2": NO_CACHE}

findings = cache(examine)


def test_the_lists_above_name_every_family_once() -> None:
    """A new family has to be put into one of them."""
    assert sorted([*TAKE_TREES, *TAKE_CHAINS, *ARE_REFUSED]) == sorted(FAMILIES)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ARE_REFUSED])
def test_the_greedy_text_of_every_family_is_that_of_transformers(family: str) -> None:
    """120 tokens after prompts shorter than the window, as long, and longer, alone and in a ragged batch.

    A draft model that is often wrong drafts chains and, where they are taken, trees; random trees know half of the
    text. Every text is varied, every choice in it is clear, and drafts are accepted and refused.
    """
    assert [finding.attention for finding in findings(family)] == list(attentions(family))
    is_covered = set()
    for finding in findings(family):
        assert finding.is_padding_exact, "transformers' padded batch writes other texts than its rows alone"
        assert finding.num_distinct >= MIN_DISTINCT and finding.margin >= MIN_MARGIN, "the guard of the texts"
        counts = defaultdict(lambda: [0, 0])
        for run in finding.runs:
            assert run.is_equal, run
            assert run.difference < LARGEST_ROUNDING and run.num_failures == 0, run
            counts[run.way][0] += run.num_accepted
            counts[run.way][1] += run.num_rejected
            is_covered.add((run.way, run.inputs))
        assert min(min(pair) for pair in counts.values()) >= 5, f"the guard of the drafts: {dict(counts)}"
    ways = {"chains of 4", "random drafts", "trees of 6" if family in TAKE_TREES else "chains of 6"}
    inputs = [*(f"a prompt of {length}" for length in LENGTHS), "a batch of 3"]
    assert is_covered == {(way, each) for way in ways for each in inputs}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_takes_trees_or_chains_or_is_refused_as_expected(family: str) -> None:
    """With every attention implementation; what does not take trees says why."""
    verdict = TREES if family in TAKE_TREES else CHAINS if family in TAKE_CHAINS else REFUSED
    reason = (TAKE_CHAINS | ARE_REFUSED).get(family, "")
    for attention in attentions(family):
        finding = judge(tiny_model(family, attn_implementation=attention))
        assert finding.verdict == verdict, f"{attention}: {finding}"
        assert reason in finding.reason and bool(reason) == bool(finding.reason)


@pytest.mark.parametrize("family", ARE_REFUSED)
def test_a_family_that_is_refused_is_refused_with_the_reason_and_a_remedy(family: str) -> None:
    """At load, in one sentence that a user understands, and one that says what to do."""
    with pytest.raises(LoadError, match=re.escape(ARE_REFUSED[family])) as caught:
        accelerate(tiny_model(family))
    assert "Use transformers' own generate" in str(caught.value)


# --------------------------------------------------------------------------------------------------
# docs/families.md


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def rows(part: str) -> dict[str, list[str]]:
    """Name -> cells of the lines of a table in a part of the page."""
    return {cells(line)[0]: cells(line) for line in part.splitlines() if line.startswith("| ")}


_, FIRST, SECOND = map(rows, PAGE.split(HEADER))


def assert_same_row(given: str, wanted: list[str]) -> None:
    """Everything but the difference is equal, and the difference within a factor of ten: machines round differently."""
    *facts, difference = cells(given)
    *wanted_facts, wanted_difference = wanted
    assert facts == wanted_facts
    assert bool(difference) == bool(wanted_difference)
    if difference:
        assert 0.1 <= float(difference) / float(wanted_difference) <= 10


def test_the_page_has_every_family_and_no_other() -> None:
    """In two tables, in their order."""
    assert list(FIRST) == list(FAMILIES) and list(SECOND) == list(MORE)


@needs_the_version_of_the_page
@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_says_what_a_family_was_found_to_do(family: str) -> None:
    """`python -m outpace.testing.families` prints the row that is there."""
    assert_same_row(as_row(family, FAMILIES[family], findings(family)), FIRST[family])


@needs_the_version_of_the_page
@pytest.mark.parametrize("family", MORE)
def test_the_page_says_what_loading_another_family_says(family: str) -> None:
    """Of the second table the texts are not compared here, only what is found at load."""
    kind = MORE[family]
    (attention,) = attentions(kind)[-1:]
    finding = judge(tiny_model(kind, attn_implementation=attention))
    *facts, _ = cells(as_row(family, kind, [finding]))
    *wanted, difference = SECOND[family]
    wanted[-1] = wanted[-1].partition("; transformers")[0]
    assert facts == wanted
    assert bool(difference) == (finding.verdict != REFUSED), "every family that is taken was decoded with"


def test_the_command_that_the_page_names_exists() -> None:
    """And nothing runs when it is imported."""
    (name,) = re.findall(r"python -m ([\w.]+)", PAGE)
    assert callable(importlib.import_module(name).main)


def test_a_difference_is_rounded_up_to_one_digit() -> None:
    """Never down; a whole digit stays; 9.5 becomes the next power of ten."""
    wanted = {0.00021: "3e-04", 0.0003: "3e-04", 0.000301: "4e-04", 0.00095: "1e-03", 0.0: "0.0"}
    assert {number: rounded_up(number) for number in wanted} == wanted


def test_a_wrong_text_and_implementations_that_differ_are_shown_in_the_row() -> None:
    """What must never be seen is easy to see."""
    good = Finding("eager", TREES, "", "full")
    chains = Finding("sdpa", CHAINS, "a tree is wrong", "full", is_padding_exact=False)
    row = as_row("llama", FAMILIES["llama"], [good, chains])
    assert row == (
        "| llama | llama | eager, sdpa | full | eager: trees and ragged batches; sdpa: chains: a tree is wrong; "
        "transformers' padded batch differs from single texts |  |"
    )
