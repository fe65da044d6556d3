"""What every drafter must keep to, as one function that any package can call in its own tests.

    from outpace.testing.contract import check_drafter

    def test_my_drafter():
        check_drafter(lambda engine: MyDrafter(engine.target.vocab_size))

A drafter cannot change the text, so most of this is about what it costs: drafts that are thrown away because they
break the budget, rows that disturb each other, memory that is not given back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..drafters.base import Budget, Drafter, Observer
from ..engine import Engine
from ..loading import load
from ..sampling import SamplingParams
from ..session import Result, Session
from .models import PROMPTS, scores, tiny_model

MakeDrafter = Callable[[Engine], Drafter]

_NUM_NEW = 24


def check_drafter(make: MakeDrafter, model: Any = None) -> None:
    """Raises AssertionError, naming the clause, if the drafter that `make` returns breaks the contract.

    make: from an engine without drafts (which has the target and its vocabulary) to a new drafter. model: the model to
    decode; a tiny one by default.
    """
    model = tiny_model("llama") if model is None else model
    _check_form(make, model)
    _check_budgets(make, model)
    _check_texts(make, model)
    _check_batches(make, model)
    _check_catching_up(make, model)


def _plain(model: Any) -> Engine:
    return load(model, drafter="none")


def _engine(make: MakeDrafter, model: Any, k: int) -> Engine:
    return load(model, drafter=make(_plain(model)), k=k)


def _session(engine: Engine, tokens: Sequence[int], **settings: Any) -> Session:
    params = SamplingParams(max_new_tokens=_NUM_NEW, **settings)
    return engine.requests.session(list(tokens), params, with_text=False)


def _check_form(make: MakeDrafter, model: Any) -> None:
    drafter = make(_plain(model))
    assert isinstance(drafter.name, str) and drafter.name, "a drafter has a name"
    assert callable(drafter.propose) and callable(drafter.release), "a drafter has propose and release"
    drafter.release(_session(_plain(model), PROMPTS[0]))  # may be called for a session that was never seen


def _check_budgets(make: MakeDrafter, model: Any) -> None:
    """Nodes, depth and branching stay within the budget, the root is the last token, and sessions are left alone."""
    engine = _plain(model)
    drafter = make(engine)
    for nodes, depth, can_branch in ((1, 1, True), (8, 2, True), (3, 8, False), (16, 16, True), (16, 16, False)):
        sessions = [_session(engine, prompt) for prompt in PROMPTS]
        before = [(list(session.tokens), session.params, session.seed) for session in sessions]
        budget = Budget(nodes, depth, can_branch)
        trees = drafter.propose(sessions, [budget] * len(sessions))
        assert len(trees) == len(sessions), "propose returns one tree per session"
        for session, tree in zip(sessions, trees, strict=True):
            tree.check(session.tokens[-1], engine.target.vocab_size, nodes, depth, can_branch)
        after = [(session.tokens, session.params, session.seed) for session in sessions]
        assert after == before, "a drafter changes nothing of a session"
        for session in sessions:
            drafter.release(session)


def _check_texts(make: MakeDrafter, model: Any) -> None:
    """The text is that of plain decoding, greedy and sampled, and no draft is thrown away; one drafter for all."""
    plain = _plain(model)
    for k in (1, 4, 16):
        engine = _engine(make, model, k)
        for seed, prompt in enumerate(PROMPTS):
            for temperature in (0.0, 0.8):
                params = SamplingParams(max_new_tokens=_NUM_NEW, temperature=temperature, seed=seed)
                _compare(engine.generate(list(prompt), params), plain.generate(list(prompt), params), f"k={k}")


def _compare(result: Result, wanted: Result, where: str) -> None:
    assert result.tokens == wanted.tokens, f"the text is that of plain decoding ({where})"
    assert result.stats.num_draft_failures == 0, f"no draft breaks its budget or raises ({where})"


def _check_batches(make: MakeDrafter, model: Any) -> None:
    """Rows of different lengths and settings, which end at different times and whose places are taken by others."""
    plain, engine = _plain(model), _engine(make, model, 6)
    prompts = [list(prompt) for prompt in (*PROMPTS, *PROMPTS)]
    base = SamplingParams(max_new_tokens=_NUM_NEW, seed=3)
    settings = [
        replace(base, temperature=0.7 * (row % 2), max_new_tokens=_NUM_NEW - 3 * row) for row in range(len(prompts))
    ]
    for _ in range(2):
        together = engine.generate(prompts, settings)
        for row, result in enumerate(together):
            _compare(result, plain.generate(prompts[row], settings[row]), f"row {row} of a batch")


def _check_catching_up(make: MakeDrafter, model: Any) -> None:
    """Several tokens may be committed between two calls, by other means than this drafter's drafts."""
    engine = _plain(model)
    drafter = make(engine)
    text = engine.generate(list(PROMPTS[1]), SamplingParams(max_new_tokens=_NUM_NEW)).tokens
    session, budget = _session(engine, PROMPTS[1]), Budget(8, 8, True)
    for step in (1, 5, 2, 9):
        (tree,) = drafter.propose([session], [budget])
        tree.check(session.tokens[-1], engine.target.vocab_size, budget.nodes, budget.depth)
        if isinstance(drafter, Observer):
            copied = copy.copy(session)
            drafter.observe([copied], [tree], [_scores(engine, session.tokens, len(tree))])
        for _ in range(step):
            session.commit(text[session.stats.num_new_tokens])
    drafter.release(session)


def _scores(engine: Engine, tokens: Sequence[int], nodes: int) -> Any:
    """[nodes, vocab]: some scores, as many as the tree has nodes."""
    last = scores(engine.target.model, tokens)[-1]
    return last.expand(nodes, -1).clone()
