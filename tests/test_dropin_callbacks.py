"""A user's processors and criteria are called as by transformers: each step once, in order, with the exact text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from dropin_reference import ENTRIES, PAD, PLAIN, WAYS, assert_mixed, batch, call, calm, calm_fast, fast, plain
from reference import MIXED, ONE, REPEATED, first_seen_at, greedy, itself, model
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
)

import outpace

BATCHES = {"one row": (MIXED,), "three rows": (MIXED, ONE, REPEATED)}


class Noting(LogitsProcessor):
    """Forbids the best token of every third step: its state is the number of calls. Keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, Tensor]] = []
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.given.append((input_ids, scores))
        self.copies.append((input_ids.clone(), scores.clone()))
        if len(self.given) % 3:
            return scores
        return scores.scatter(1, scores.argmax(-1, keepdim=True), -torch.inf)


class Asking(StoppingCriteria):
    """Ends row i at its step `at[i]`, and says so at that step only. Keeps what it was asked."""

    def __init__(self, length: int, at: Sequence[int]) -> None:
        self.length, self.at = length, torch.tensor(at)
        self.asked: list[tuple[list[list[int]], list[Tensor] | None]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.asked.append((input_ids.tolist(), None if scores is None else [step.clone() for step in scores]))
        return self.at == input_ids.shape[1] - self.length


def has_ended(text: Tensor, length: int, ends: Sequence[int]) -> Tensor:
    """[rows] bool: whether one of the end tokens is among the new tokens."""
    return torch.isin(text[:, length:], torch.tensor(ends)).any(1)


# --------------------------------------------------------------------------------------------------
# Logits processors


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("has_end", [False, True], ids=["to the budget", "to end tokens"])
def test_a_processor_with_a_state_is_called_as_transformers_calls_it(
    has_end: bool, rows: str, way: str, entry: str
) -> None:
    """T-D1: the same calls in the same order, with the padded texts of all rows; scores to 1e-4."""
    inputs = batch(*BATCHES[rows])
    length, first = inputs["input_ids"].shape[1], Noting()
    wanted = plain(calm(), inputs, {"logits_processor": [first]})
    ends = [first_seen_at(row[length:], at) for row, at in zip(wanted.tolist(), (8, 3, 15), strict=False)]
    options = {"eos_token_id": ends} if has_end else {}
    theirs, ours = Noting(), Noting()
    wanted = plain(calm(), inputs, options | {"logits_processor": [theirs]})
    processors = LogitsProcessorList([ours]) if has_end else [ours]
    found = call(entry, calm_fast(way), **inputs, **PLAIN, **options, logits_processor=processors)
    assert found.tolist() == wanted.tolist()
    assert len(ours.copies) == len(theirs.copies) == wanted.shape[1] - length
    for (text, scores), (their_text, their_scores) in zip(ours.copies, theirs.copies, strict=True):
        assert text.dtype == their_text.dtype and text.tolist() == their_text.tolist()
        assert scores.dtype == their_scores.dtype and scores.shape == their_scores.shape
        going_on = ~has_ended(text, length, ends if has_end else [])
        torch.testing.assert_close(scores[going_on], their_scores[going_on], rtol=0, atol=1e-4)
    for (text, scores), (text_then, scores_then) in zip(ours.given, ours.copies, strict=True):
        assert torch.equal(text, text_then) and torch.equal(scores, scores_then)  # nothing is written into them later
    if way != "suffix" and not has_end:
        assert sum(stats.num_accepted_tokens for stats in calm_fast(way).last_stats) >= 3
    if rows == "three rows":
        notes = [note for stats in calm_fast(way).last_stats for note in stats.notes]
        assert notes == ["rows move together, because Noting may look at all of them"] * 3


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_processor_may_write_into_its_scores(entry: str) -> None:
    """T-D2: the text is transformers', and the recorded logits are the model's."""

    def writing(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, :256] += 3.0
        scores[:, input_ids[:, -1]] = -torch.inf
        return scores

    inputs = batch(MIXED, REPEATED)
    wanted = plain(calm(), inputs, {"logits_processor": [writing]})
    assert wanted.tolist() != plain(calm(), inputs, {}).tolist()
    for way in WAYS:
        records = {"return_dict_in_generate": True, "output_logits": True}
        found = call(entry, calm_fast(way), **inputs, **PLAIN, **records, logits_processor=[writing])
        assert found.sequences.tolist() == wanted.tolist()
        with torch.no_grad():
            logits = calm()(input_ids=wanted[1:, :-1], use_cache=False).logits[0, -24:].float()
        torch.testing.assert_close(torch.stack(found.logits)[:, 1], logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_processor_by_hand_that_looks_at_rows_alone_lets_them_move_alone(entry: str) -> None:
    """T-D7: MinLengthLogitsProcessor holds the end back, drafting stays on, and rows do not wait for each other."""
    end = first_seen_at(greedy("llama", REPEATED, 40), 3)
    inputs = batch(REPEATED, MIXED)
    processor = MinLengthLogitsProcessor(inputs["input_ids"].shape[1] + 12, end, device="cpu")
    options = {"eos_token_id": end, "logits_processor": [processor, TopKLogitsWarper(50)]}
    wanted = plain(model("llama"), inputs, options)
    assert wanted.tolist() == plain(model("llama"), inputs, {"eos_token_id": end, "min_new_tokens": 12}).tolist()
    assert end not in wanted[0, 40:52].tolist()
    accelerated = outpace.accelerate(model("llama"), drafter=itself("llama"), confidence_threshold=0.0, k=5)
    assert call(entry, accelerated, **inputs, **PLAIN, **options).tolist() == wanted.tolist()
    for stats in accelerated.last_stats:
        assert stats.num_drafted_tokens > 0 and stats.num_accepted_tokens > 0 and not stats.notes


class Pure:
    """Says that it looks at each row alone: the best token of every third length is forbidden."""

    is_prefix_pure = True

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.shapes.add((len(input_ids), len(scores)))
        if input_ids.shape[1] % 3:
            return scores
        return scores.scatter(1, scores.argmax(-1, keepdim=True), -torch.inf)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_processor_that_says_so_is_asked_about_each_row_alone(entry: str) -> None:
    """T-D7: is_prefix_pure = True; its text has the row's padding, as in transformers."""
    inputs = batch(*BATCHES["three rows"])
    wanted = plain(calm(), inputs, {"logits_processor": [Pure()]})
    assert wanted.tolist() != plain(calm(), inputs, {}).tolist()
    for way in WAYS:
        processor = Pure()
        found = call(entry, calm_fast(way), **inputs, **PLAIN, logits_processor=[processor])
        assert found.tolist() == wanted.tolist() and processor.shapes == {(1, 1)}
        assert not any(stats.notes for stats in calm_fast(way).last_stats)


class Failing:
    """A processor, and a criterion, that raises at its tenth call."""

    def __init__(self) -> None:
        self.num_calls, self.error = 0, ArithmeticError("from a user's callback")

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == 10:
            raise self.error
        return scores if isinstance(scores, Tensor) else torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["logits_processor", "stopping_criteria"])
def test_an_exception_of_a_callback_reaches_the_caller_once(kind: str, way: str, entry: str) -> None:
    """T-D9: that very exception, at the tenth call and no call after it; the object is usable afterwards."""
    inputs, accelerated = batch(MIXED, ONE), fast(model("llama"), way)
    for rows in (inputs, {name: value[:1] for name, value in inputs.items()}):
        failing = Failing()
        with pytest.raises(ArithmeticError) as caught:
            call(entry, accelerated, **rows, **PLAIN, **{kind: [failing]})
        assert caught.value is failing.error and failing.num_calls == 10
        assert not accelerated.engine._rows and not accelerated.engine._cache.lengths
        assert call(entry, accelerated, **inputs, **PLAIN).tolist() == plain(model("llama"), inputs, {}).tolist()


# --------------------------------------------------------------------------------------------------
# Stopping criteria


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("has_scores", [False, True], ids=["ids", "scores"])
@pytest.mark.parametrize("has_end", [False, True], ids=["no end token", "end token"])
def test_a_criterion_is_asked_once_per_committed_token_and_ends_rows_one_by_one(
    has_end: bool, has_scores: bool, rows: str, way: str, entry: str
) -> None:
    """T-I2: with an end token ended rows are padded; without one they go on until all have ended."""
    inputs, at = batch(*BATCHES[rows]), (6, 2, 11)[: len(BATCHES[rows])]
    length = inputs["input_ids"].shape[1]
    options: dict[str, Any] = {"eos_token_id": 511} if has_end else {}
    options |= {"output_scores": True, "return_dict_in_generate": True} if has_scores else {}
    theirs, ours = Asking(length, at), Asking(length, at)
    wanted = calm().generate(**inputs, **PLAIN, **options, stopping_criteria=[theirs])
    found = call(entry, calm_fast(way), **inputs, **PLAIN, **options, stopping_criteria=StoppingCriteriaList([ours]))
    if has_scores:
        wanted, found = wanted.sequences, found.sequences
    assert found.tolist() == wanted.tolist() and wanted.shape[1] == length + max(at)
    assert len(set(wanted[:, length:].flatten().tolist())) >= 5
    assert (PAD in wanted[:, length:]) == (has_end and rows == "three rows")
    assert [ids for ids, _ in ours.asked] == [ids for ids, _ in theirs.asked]
    for step, ((ids, scores), (_, their_scores)) in enumerate(zip(ours.asked, theirs.asked, strict=True)):
        assert (scores is None) == (their_scores is None) == (not has_scores)
        if scores is not None and their_scores is not None:
            assert len(scores) == len(their_scores) == step + 1 and len(ids) == len(at)
            going_on = torch.tensor([not has_end or step < end for end in at])
            torch.testing.assert_close(scores[-1][going_on], their_scores[-1][going_on], rtol=0, atol=1e-4)
    assert [stats.num_new_tokens for stats in calm_fast(way).last_stats] == [e if has_end else max(at) for e in at]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "criterion",
    [
        lambda ids, scores: ids.shape[1] >= 49,
        lambda ids, scores: torch.full((len(ids),), ids.shape[1] >= 49),
        lambda ids, scores: (ids[:, 40:] % 7 == 0).sum(1) >= 2,
        lambda ids, scores: ((ids[:, 40:] % 7 == 0).sum(1) >= 2).long(),
    ],
    ids=["a bool", "a flag per row", "by the text", "whole numbers"],
)
def test_a_criterion_may_be_any_function(criterion: Callable[..., Any], entry: str) -> None:
    """T-I2: as in transformers, and beside end tokens."""
    inputs = batch(MIXED, ONE, REPEATED)
    for options in ({}, {"eos_token_id": greedy("llama", ONE, 40)[5]}):
        wanted = plain(model("llama"), inputs, options | {"stopping_criteria": [criterion]})
        assert wanted.shape[1] < 64
        stats = []
        for way in WAYS:
            accelerated = fast(model("llama"), way)
            found = call(entry, accelerated, **inputs, **PLAIN, **options, stopping_criteria=[criterion])
            assert found.tolist() == wanted.tolist()
            stats += accelerated.last_stats
        assert_mixed(stats)


@pytest.mark.parametrize("entry", ENTRIES)
def test_processors_and_criteria_are_called_in_turns(entry: str) -> None:
    """Choose, commit, ask: a criterion sees the token of the processor's call before it, and nothing comes between."""
    journals: list[list[tuple[str, list[list[int]]]]] = []
    inputs = batch(MIXED, ONE)
    for generate in (calm().generate, lambda **arguments: call(entry, calm_fast("tree"), **arguments)):
        journal: list[tuple[str, list[list[int]]]] = []

        def process(ids: Tensor, scores: Tensor, journal: Any = journal) -> Tensor:
            journal.append(("process", ids.tolist()))
            return scores

        def stop(ids: Tensor, scores: Any, journal: Any = journal) -> Tensor:
            journal.append(("stop", ids.tolist()))
            return torch.zeros(len(ids), dtype=torch.bool)

        generate(**inputs, **PLAIN, logits_processor=[process], stopping_criteria=[stop])
        journals.append(journal)
    assert journals[0] == journals[1] and len(journals[0]) == 48
    assert_mixed(calm_fast("tree").last_stats)
