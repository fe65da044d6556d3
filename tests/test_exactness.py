"""What "lossless" means, executable: exact laws by enumeration, and wrong rules that the check must catch."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outpace import sampling, verify
from outpace.sampling import SamplingParams
from outpace.testing.enumerate import (
    Chances,
    Draft,
    Kind,
    Model,
    Path,
    RandomModel,
    Rule,
    Shape,
    TargetProbs,
    branches,
    distance,
    draft,
    emission_law,
    every_node,
    expected_accepted,
    largest_error,
    target_law,
    target_probs,
    verdicts,
)
from outpace.tree import TokenTree
from outpace.verify import Verdict

EXACT = 1e-12

# --------------------------------------------------------------------------------------------------
# The rules, as the enumerator calls them


def check_verdict(tree: TokenTree, verdict: Verdict) -> Verdict:
    """The kept nodes are a path from the root, and the emitted tokens are theirs and one more."""
    assert verdict.path == tuple(tree.path(verdict.path[-1]))
    assert verdict.tokens[:-1] == tuple(tree.tokens[node] for node in verdict.path[1:])
    return verdict


def rejection(tree: TokenTree, probs: TargetProbs, chances: Chances) -> Verdict:
    return check_verdict(tree, verify.rejection(tree, probs, chances.coin, chances.draw))


def coupled(tree: TokenTree, probs: TargetProbs, chances: Chances) -> Verdict:
    visited: list[int] = []

    def choose(node: int) -> int:
        visited.append(node)
        return chances.draw(probs(node))

    verdict = check_verdict(tree, verify.coupled(tree, choose, lambda token: True))
    assert visited == list(verdict.path), "one choice per emitted token, in order, and no other"
    return verdict


def typical(tree: TokenTree, probs: TargetProbs, chances: Chances) -> Verdict:
    return check_verdict(tree, verify.typical(tree, probs, chances.draw))


# --------------------------------------------------------------------------------------------------
# Independent references, written from the papers in the plainest way


def proposal(tree: TokenTree, child: int, like: Tensor) -> Tensor:
    """What the child's token was drawn from; all mass on the token where it was proposed as is."""
    q = tree.q[child]
    if q is None:
        q = torch.zeros_like(like)
        q[tree.tokens[child]] = 1.0
    return q


def ratio(p: Tensor, q: Tensor, token: int) -> float:
    return min(1.0, float(p[token] / q[token]))


def residual(p: Tensor, q: Tensor, token: int) -> Tensor:
    rest = (p - q).clamp_min(0.0)
    return rest / rest.sum() if float(rest.sum()) > 0 else p


def emit(tree: TokenTree, node: int, token: int) -> Verdict:
    path = tree.path(node)
    return Verdict(tuple(path), (*(tree.tokens[kept] for kept in path[1:]), token))


def top_down(
    tree: TokenTree,
    probs: TargetProbs,
    chances: Chances,
    accept: Callable[[Tensor, Tensor, int], float] = ratio,
    correct: Callable[[Tensor, Tensor, int], Tensor] = residual,
) -> Verdict:
    """Token-wise speculative sampling (Leviathan et al. 2023), with several children as in SpecInfer.

    Accept a child with min(1, p/q), else go on to the next with p replaced by the residual. Wrong rules are
    made by another `accept` or `correct`.
    """
    node = 0
    while True:
        p = probs(node)
        for child in tree.children(node):
            token, q = tree.tokens[child], proposal(tree, child, p)
            if chances.coin(accept(p, q, token)):
                node = child
                break
            p = correct(p, q, token)
        else:
            return emit(tree, node, chances.draw(p))


def block(tree: TokenTree, probs: TargetProbs, chances: Chances, cap: float = 1.0) -> Verdict:
    """Block verification of a chain (Sun et al. 2024, algorithm 2), in plain floats."""
    num_drafts = len(tree) - 1
    p = [probs(node).tolist() for node in range(num_drafts + 1)]
    q = [proposal(tree, node, probs(0)).tolist() for node in range(1, num_drafts + 1)]
    weight = [1.0]
    for step in range(num_drafts):
        token = tree.tokens[step + 1]
        weight.append(min(cap, weight[step] * p[step][token] / q[step][token]))
    rest = [
        [max(weight[step] * p_token - q_token, 0.0) for p_token, q_token in zip(p[step], q[step], strict=True)]
        for step in range(num_drafts)
    ]
    for step in range(num_drafts, 0, -1):
        if step == num_drafts:
            keep = min(1.0, weight[step])
        else:
            room = sum(rest[step]) + 1 - weight[step]
            keep = min(1.0, sum(rest[step]) / room) if room > 0 else 1.0
        if chances.coin(keep):
            break
    else:
        step = 0
    last = rest[step] if step < num_drafts and sum(rest[step]) > 0 else p[step]
    return emit(tree, step, chances.pick([share / sum(last) for share in last]))


# --------------------------------------------------------------------------------------------------
# Trees and models

CHAINS: list[Kind] = ["sampled", "likeliest"]
STARS: list[list[Kind]] = [
    ["sampled", "sampled"],
    ["sampled", "sampled", "sampled"],
    ["iid", "iid"],
    ["iid", "iid", "iid"],
    ["likeliest", "likeliest", "likeliest"],
    ["sampled", "likeliest"],
    ["likeliest", "sampled"],
    ["likeliest", "sampled", "iid"],
    ["iid", "likeliest", "sampled"],
]
BUSHES: list[list[Kind]] = [
    ["sampled", "sampled"],
    ["iid", "iid"],
    ["likeliest", "likeliest"],
    ["sampled", "likeliest"],
    ["likeliest", "iid"],
]

SHAPES: dict[str, tuple[int, Shape]] = {  # name -> (vocabulary that keeps the enumeration small, shape)
    **{f"chain of {depth}, {kind}": (6 - depth, every_node([kind], depth)) for kind in CHAINS for depth in (1, 2, 3)},
    **{f"star of {', '.join(kinds)}": (4, every_node(kinds, 1)) for kinds in STARS},
    **{f"2x2 of {', '.join(kinds)}": (3, every_node(kinds, 2)) for kinds in BUSHES},
}


def shape_mixed(path: Path, siblings: Path) -> Kind | None:
    """Sampled and deterministic children on two levels, and under some of them a third level."""
    kinds: dict[int, list[Kind]] = {0: ["sampled", "likeliest"], 1: ["iid", "likeliest"], 2: ["sampled"]}
    row = [] if path and path[-1] == 0 and len(path) == 2 else kinds.get(len(path), [])
    return row[len(siblings)] if len(siblings) < len(row) else None


def shape_depth_follows_prefix(path: Path, siblings: Path) -> Kind | None:
    """Stop after token 0, go on to depth 3 after token 1, to depth 2 after any other."""
    if siblings or (path and path[-1] == 0):
        return None
    return "sampled" if len(path) < (3 if path and path[0] == 1 else 2) else None


def shape_width_follows_prefix(path: Path, siblings: Path) -> Kind | None:
    """As many children as the last token says, alternately sampled and deterministic."""
    width = path[-1] if path else 2
    if len(path) >= 2 or len(siblings) >= width:
        return None
    return "likeliest" if len(siblings) % 2 else "sampled"


def shape_sibling_follows_sibling(path: Path, siblings: Path) -> Kind | None:
    """A second child only where the first one is token 0 or 1, a third only where the second is token 1."""
    if len(path) >= 2 or (siblings and siblings[-1] > 2 - len(siblings)):
        return None
    return "iid" if len(siblings) < 3 - 2 * len(path) else None


SHAPES["mixed, three levels"] = (3, shape_mixed)
SHAPES["depth depends on the drafted prefix"] = (3, shape_depth_follows_prefix)
SHAPES["width depends on the drafted prefix"] = (3, shape_width_follows_prefix)
SHAPES["siblings depend on earlier siblings"] = (3, shape_sibling_follows_sibling)


def near(model: Model, vocab_size: int, seed: int) -> Model:
    """A drafter that knows most of the model."""
    noise = RandomModel(vocab_size, seed)
    return lambda path: 0.7 * model(path) + 0.3 * noise(path)


def pair(vocab_size: int, seed: int) -> tuple[Model, Model]:
    """Target and drafter, in turn: unrelated, related, sharp, truncated, equal."""
    target: Model = RandomModel(vocab_size, seed)
    drafter: Model = RandomModel(vocab_size, seed + 1000)
    match seed % 5:
        case 1:
            drafter = near(target, vocab_size, seed + 1000)
        case 2:
            target, drafter = RandomModel(vocab_size, seed, 3.0), RandomModel(vocab_size, seed + 1000, 0.5)
        case 3:
            target = RandomModel(vocab_size, seed, zeros=0.4)
            drafter = RandomModel(vocab_size, seed + 1000, zeros=0.4)
        case 4:
            drafter = target
    return target, drafter


def setting(name: str, seed: int) -> tuple[Model, Draft]:
    vocab_size, shape = SHAPES[name]
    target, drafter = pair(vocab_size, seed)
    return target, partial(draft, drafter, shape)


# --------------------------------------------------------------------------------------------------
# The enumerator itself


def test_branches_are_all_outcomes_and_their_probabilities_sum_to_one() -> None:
    """The example of the docstring, and a choice that is made only on one branch."""
    coins = [((first, second), chance) for (first, second), chance in branches(lambda c: (c.coin(0.9), c.coin(0.5)))]
    assert [result for result, _ in coins] == [(True, True), (True, False), (False, True), (False, False)]
    assert [chance for _, chance in coins] == pytest.approx([0.45, 0.45, 0.05, 0.05])

    def lopsided(chances: Chances) -> int:
        return chances.pick([0.2, 0.0, 0.8]) if chances.coin(0.25) else -1

    assert list(branches(lopsided)) == [(0, 0.05), (2, 0.2), (-1, 0.75)]
    assert list(branches(lambda chances: chances.coin(1.0))) == [(True, 1.0)]


def test_plain_decoding_is_a_tree_of_one_node() -> None:
    """Without drafts every rule emits one token of the target's own, exactly."""
    target = RandomModel(4, seed=1)
    for rule in (rejection, coupled, typical):
        assert emission_law(lambda chances: TokenTree.chain(0), rule, target) == target_law(target, 1)


# --------------------------------------------------------------------------------------------------
# The rules are exact


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", SHAPES)
def test_rejection_emits_the_law_of_the_target(name: str, seed: int) -> None:
    """Sampled, deterministic and mixed children, any shape fixed before a token is drawn: no error."""
    target, drafts = setting(name, seed)
    assert largest_error(drafts, rejection, target) <= EXACT


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", SHAPES)
def test_coupled_emits_the_law_of_the_target(name: str, seed: int) -> None:
    """The same trees under the coupled walk: no error."""
    target, drafts = setting(name, seed)
    assert largest_error(drafts, coupled, target) <= EXACT


def pruned(drafts: Draft, keep: Callable[[TokenTree, int], bool]) -> Draft:
    """Drafts without the nodes that `keep` refuses after it saw the whole tree, nor what hangs under them."""

    def run(chances: Chances) -> TokenTree:
        tree = drafts(chances)
        place = {0: 0}
        for node in range(1, len(tree)):
            if tree.parents[node] in place and keep(tree, node):
                place[node] = len(place)
        return TokenTree(
            tuple(tree.tokens[node] for node in place),
            tuple(place[tree.parents[node]] if node else -1 for node in place),
            tuple(tree.value[node] for node in place),
            tuple(tree.source[node] for node in place),
            tuple(tree.q[node] for node in place),
        )

    return run


def is_likely(tree: TokenTree, node: int) -> bool:
    """Whether a node's own token is likely by its own q: a rule that looks at what was drawn."""
    q = tree.q[node]
    return q is None or float(q[tree.tokens[node]]) >= 0.35


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["chain of 3, sampled", "2x2 of sampled, sampled", "star of iid, iid, iid"])
def test_pruning_by_the_drawn_tokens_biases_rejection_but_never_coupled(name: str, seed: int) -> None:
    """The non-anticipating rule binds ratio tests only: the coupled walk stays exact under any pruning."""
    target, drafts = setting(name, seed)
    assert largest_error(pruned(drafts, is_likely), coupled, target) <= EXACT
    if seed in (0, 2):  # where target and drafter differ enough
        assert largest_error(pruned(drafts, is_likely), rejection, target) > 1e-3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("helpful", [True, False])
def test_coupled_is_exact_for_a_drafter_that_sees_the_targets_choices(seed: int, helpful: bool) -> None:
    """Shared noise tells a drafter what the target will choose. Used well or badly, it biases nothing.

    Two rounds and more: choices are fixed by the text so far, as noise fixes them, and rounds go on until
    five tokens are out.
    """
    length, vocab_size = 5, 2
    target = RandomModel(vocab_size, seed)

    def run(chances: Chances) -> Path:
        chosen: dict[Path, int] = {}

        def choose(path: Path) -> int:
            if path not in chosen:
                chosen[path] = chances.draw(target(path))
            return chosen[path]

        text: Path = ()
        while len(text) < length:
            first = choose(text) if helpful else 1 - choose(text)
            second = choose((*text, first))
            tree = TokenTree.chain(0, [first, second if helpful == (second == 0) else 1 - second])

            def choose_at(node: int, text: Path = text, tree: TokenTree = tree) -> int:
                return choose(text + tuple(tree.tokens[kept] for kept in tree.path(node)[1:]))

            text += verify.coupled(tree, choose_at, lambda token: True).tokens
        return text[:length]

    law: dict[Path, float] = defaultdict(float)
    for text, chance in branches(run):
        law[text] += chance
    assert distance(law, target_law(target, length)) <= EXACT


@pytest.mark.parametrize("rule", [rejection, coupled])
def test_several_rounds_in_a_row_are_as_exact_as_one(rule: Rule) -> None:
    """Every round starts a new draft where the last one ended; the text has the target's law."""
    length = 4
    target, drafter = RandomModel(2, seed=5), RandomModel(2, seed=6)

    def run(chances: Chances) -> Path:
        text: Path = ()
        while len(text) < length:

            def target_here(path: Path, text: Path = text) -> Tensor:
                return target(text + path)

            def drafter_here(path: Path, text: Path = text) -> Tensor:
                return drafter(text + path)

            tree = draft(drafter_here, every_node(["sampled"], 2), chances)
            text += rule(tree, target_probs(target_here, tree), chances).tokens
        return text[:length]

    law: dict[Path, float] = defaultdict(float)
    for text, chance in branches(run):
        law[text] += chance
    assert distance(law, target_law(target, length)) <= EXACT


# --------------------------------------------------------------------------------------------------
# What rejection accepts


def verdict_law(drafts: Draft, rule: Rule, target: Model) -> dict[tuple[int, ...], float]:
    """The joint law of how much is accepted and what is emitted."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for verdict, chance in verdicts(drafts, rule, target):
        law[len(verdict.path) - 1, *verdict.tokens] += chance
    return law


@pytest.mark.parametrize("seed", range(10))
def test_rejection_of_one_drafted_token_is_leviathans_formula(seed: int) -> None:
    """Token x is accepted with probability min(p, q), and y replaces a rejected one with [p - q]+."""
    target, drafter = pair(4, seed)
    law = verdict_law(partial(draft, drafter, every_node(["sampled"], 1)), rejection, target)
    p, q = target(()), drafter(())
    for token in range(4):
        accepted = float(torch.minimum(p, q)[token])
        for bonus in range(4):
            assert law.get((1, token, bonus), 0.0) == pytest.approx(
                accepted * float(target((token,))[bonus]), abs=EXACT
            )
        assert law.get((0, token), 0.0) == pytest.approx(float((p - q).clamp_min(0)[token]), abs=EXACT)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "name", [*(name for name in SHAPES if name.startswith("chain")), "depth depends on the drafted prefix"]
)
def test_rejection_of_a_chain_is_block_verification(name: str, seed: int) -> None:
    """Not only as many accepted tokens on average: the same joint law of how many and which."""
    target, drafts = setting(name, seed)
    assert largest_error(drafts, block, target) <= EXACT
    assert distance(verdict_law(drafts, rejection, target), verdict_law(drafts, block, target)) <= EXACT


@pytest.mark.parametrize("name", SHAPES)
def test_rejection_never_accepts_less_than_the_token_wise_rule(name: str) -> None:
    """On every model at least as many accepted tokens; on some, where a sampled path has two tokens, more."""
    gains = []
    for seed in range(5):
        target, drafts = setting(name, seed)
        assert largest_error(drafts, top_down, target) <= EXACT
        gains.append(expected_accepted(drafts, rejection, target) - expected_accepted(drafts, top_down, target))
    assert min(gains) >= -EXACT
    if "sampled" in name and ("chain of 2" in name or "chain of 3" in name or "2x2" in name):
        assert max(gains) > 1e-3


@pytest.mark.parametrize("name", ["chain of 3, sampled", "2x2 of sampled, sampled", "star of iid, iid, iid"])
def test_a_drafter_that_equals_the_target_is_always_accepted(name: str) -> None:
    """With q = p every path to a leaf is kept."""
    vocab_size, shape = SHAPES[name]
    target = RandomModel(vocab_size, seed=4)
    drafts = partial(draft, target, shape)
    depth = max(max(tree.depths()) for tree, _ in branches(drafts))
    assert expected_accepted(drafts, rejection, target) == pytest.approx(depth, abs=EXACT)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "name",
    ["chain of 3, likeliest", "star of likeliest, likeliest, likeliest", "2x2 of likeliest, likeliest"],
)
def test_deterministic_trees_accept_the_sum_of_their_path_probabilities(name: str, seed: int) -> None:
    """Walk and ratio test are one law there: a node is kept with the target's probability of its path."""
    target, drafts = setting(name, seed)
    tree = drafts(Chances())
    probs = target_probs(target, tree)
    mass = [1.0]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        mass.append(mass[parent] * float(probs(parent)[tree.tokens[node]]))
    assert expected_accepted(drafts, rejection, target) == pytest.approx(sum(mass[1:]), abs=EXACT)
    assert distance(verdict_law(drafts, rejection, target), verdict_law(drafts, coupled, target)) <= EXACT


def test_sampled_children_before_deterministic_ones_accept_more() -> None:
    """Both orders are exact; the sampled child first is worth more on average over models."""
    gain = 0.0
    for seed in range(10):
        target, drafter = RandomModel(4, seed), near(RandomModel(4, seed), 4, seed + 1000)
        sampled_first = partial(draft, drafter, every_node(["sampled", "likeliest"], 1))
        sampled_last = partial(draft, drafter, every_node(["likeliest", "sampled"], 1))
        gain += expected_accepted(sampled_first, rejection, target)
        gain -= expected_accepted(sampled_last, rejection, target)
    assert gain / 10 > 0.01


def test_rejection_never_accepts_a_token_that_its_own_proposal_excludes() -> None:
    """Only a broken drafter reports such a q; the target's own token comes instead; nothing divides by 0."""
    q = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    tree = TokenTree.chain(0, [2], q=[q])
    assert all(verdict.path == (0,) for verdict, _ in verdicts(lambda c: tree, rejection, RandomModel(3, 1)))


def test_rejection_takes_proposals_in_single_precision() -> None:
    """A float32 q is as exact as what was drawn from it: its numbers here are exact in both precisions."""
    q = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float32)

    def drafts(chances: Chances) -> TokenTree:
        return TokenTree.chain(0, [chances.draw(q)], q=[q])

    assert largest_error(drafts, rejection, RandomModel(3, seed=1)) <= EXACT


# --------------------------------------------------------------------------------------------------
# Coupled with the real noise: the text does not depend on the drafts


class ToyTarget:
    """An autoregressive model without weights: the scores after a text are a fixed function of the text."""

    vocab_size = 11

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self.params, self.seed = params, seed

    def choose(self, text: Path) -> int:
        """The token of plain decoding after a text."""
        numbers = random.Random(f"scores {text}")
        scores = torch.tensor([numbers.gauss(0, 2) for _ in range(self.vocab_size)])
        return sampling.choose(scores, self.params, self.seed, position=len(text))

    def plain(self, prompt: Path, length: int) -> Path:
        text = prompt
        while len(text) < length:
            text = (*text, self.choose(text))
        return text


# A drafted node: (which earlier node is its parent, its token, or None for what plain decoding emits there).
NODES = st.lists(st.tuples(st.integers(0, 11), st.none() | st.integers(0, ToyTarget.vocab_size - 1)), max_size=11)


def grow(target: ToyTarget, text: Path, nodes: Sequence[tuple[int, int | None]]) -> TokenTree:
    """A tree under the last token of a text, from numbers; duplicate siblings are allowed."""
    tokens, parents, texts = [text[-1]], [-1], [text]
    for place, guess in nodes:
        parent = place % len(tokens)
        token = target.choose(texts[parent]) if guess is None else guess
        tokens.append(token)
        parents.append(parent)
        texts.append((*texts[parent], token))
    ones, sources = (1.0,) * len(tokens), ("",) * len(tokens)
    return TokenTree(tuple(tokens), tuple(parents), ones, sources, (None,) * len(tokens))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=4),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=0.9, top_k=8, top_p=0.9, min_p=0.02),
    ],
    ids=["greedy", "sampled", "top-k", "top-p", "min-p", "all"],
)
def test_coupled_text_is_plain_text_whatever_is_drafted(params: SamplingParams) -> None:
    """Round after round of arbitrary trees, right and wrong and duplicate: token by token the plain text.

    A text also ends where plain decoding ends it, in the middle of an accepted path too.
    """
    counts = {"accepted": 0, "rejected": 0, "cut short": 0}

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        rounds=st.lists(NODES, min_size=1, max_size=4),
        seed=st.integers(0, 2**70),
        prompt=st.lists(st.integers(0, ToyTarget.vocab_size - 1), min_size=1, max_size=3).map(tuple),
        num_tokens=st.integers(1, 10),
    )
    def check(rounds: list[list[tuple[int, int | None]]], seed: int, prompt: Path, num_tokens: int) -> None:
        target = ToyTarget(params, seed)
        wanted = target.plain(prompt, len(prompt) + num_tokens)
        text = prompt
        number = 0
        while len(text) < len(wanted):
            tree = grow(target, text, rounds[number % len(rounds)])
            emitted: list[int] = []

            def choose(node: int, text: Path = text, tree: TokenTree = tree) -> int:
                return target.choose(text + tuple(tree.tokens[kept] for kept in tree.path(node)[1:]))

            def goes_on(token: int, emitted: list[int] = emitted, text: Path = text) -> bool:
                emitted.append(token)
                return len(text) + len(emitted) < len(wanted)

            verdict = check_verdict(tree, verify.coupled(tree, choose, goes_on))
            assert verdict.tokens == tuple(emitted)
            counts["accepted"] += len(verdict.path) - 1
            if len(text) + len(emitted) < len(wanted):
                counts["rejected"] += bool(tree.children(verdict.path[-1]))
            else:
                counts["cut short"] += tree.child(verdict.path[-1], verdict.tokens[-1]) is not None
            text += verdict.tokens
            number += 1
        assert text == wanted

    check()
    assert min(counts.values()) >= 20, f"the trees did not exercise the walk: {counts}"


def test_the_token_at_a_position_does_not_depend_on_the_drafts_sibling_order() -> None:
    """The docstring's example: with children 3 and 5, choice 5 keeps node 2 and emits one more token."""
    tree = TokenTree((7, 3, 5), (-1, 0, 0), (1.0, 0.5, 0.5), ("", "a", "a"), (None, None, None))
    choices = {0: 5, 2: 9}
    assert verify.coupled(tree, choices.__getitem__, lambda token: True) == Verdict((0, 2), (5, 9))
    swapped = replace(tree, tokens=(7, 5, 3))
    assert verify.coupled(swapped, {0: 5, 1: 9}.__getitem__, lambda token: True) == Verdict((0, 1), (5, 9))


def test_the_walk_keeps_no_node_for_the_token_that_ends_the_text() -> None:
    """A token that ends the text is emitted, and neither kept as a node nor followed by another."""
    tree = TokenTree.chain(7, [3, 5])
    assert verify.coupled(tree, {0: 3, 1: 5}.__getitem__, lambda token: token != 5) == Verdict((0, 1), (3, 5))
    assert verify.coupled(tree, {0: 3}.__getitem__, lambda token: False) == Verdict((0,), (3,))


# --------------------------------------------------------------------------------------------------
# Typical acceptance is lossy, and says so


def test_typical_acceptance_is_not_lossless() -> None:
    """On some model a text's probability is off by more than 0.01; nobody may call it exact."""
    errors = []
    for seed in range(3):
        target, drafts = setting("2x2 of likeliest, likeliest", seed)
        errors.append(largest_error(drafts, typical, target))
    assert max(errors) > 0.01


def test_typical_acceptance_is_exact_when_the_target_is_certain() -> None:
    """At temperature 0 the entropy is 0 and only the target's own token passes."""
    sharp = RandomModel(3, seed=2)

    def target(path: Path) -> Tensor:
        return torch.nn.functional.one_hot(sharp(path).argmax(), 3).to(torch.float64)

    assert largest_error(partial(draft, sharp, every_node(["likeliest"] * 2, 2)), typical, target) == 0
    assert largest_error(partial(draft, RandomModel(3, 7), every_node(["iid"] * 2, 1)), typical, target) == 0


def test_typical_acceptance_follows_its_formula() -> None:
    """By hand: p = (0.6, 0.3, 0.1) has H = 0.898 nats, and 0.3 exp(-H) = 0.1222 is between 0.3 and 0.1.

    With epsilon 0.2 or 0.5 that is the threshold: 0.3 passes and 0.1 does not. With epsilon 0.09 both do. Of the
    kept paths the longest wins, then the likelier; the last token comes from the target after that path.
    """
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    threshold = 0.3 * math.exp(-0.6 * math.log(1 / 0.6) - 0.3 * math.log(1 / 0.3) - 0.1 * math.log(10))
    assert threshold == pytest.approx(0.1222, abs=1e-4)

    def decide(tree: TokenTree, epsilon: float, delta: float = 0.3) -> tuple[int, ...]:
        return verify.typical(tree, lambda node: p, lambda probs: int(probs.argmin()), epsilon, delta).path

    def star(*tokens: int) -> TokenTree:
        rest = len(tokens)
        return TokenTree((0, *tokens), (-1, *[0] * rest), (1.0,) * (rest + 1), ("",) * (rest + 1), (None,) * (rest + 1))

    assert decide(star(2), epsilon=0.2) == (0,)
    assert decide(star(1), epsilon=0.2) == (0, 1)
    assert decide(star(2), epsilon=0.09) == (0, 1)
    assert decide(star(1), epsilon=0.5) == (0, 1)
    assert decide(star(2), epsilon=0.5) == (0,)
    assert decide(star(1), epsilon=0.3, delta=1.0) == (0,), "0.3 is not above min(0.3, 0.407)"
    assert decide(star(2, 1, 0), epsilon=0.2) == (0, 3), "the likelier of two kept tokens"
    longer = TokenTree((0, 0, 1, 1), (-1, 0, 0, 2), (1.0,) * 4, ("",) * 4, (None,) * 4)
    assert decide(longer, epsilon=0.2) == (0, 2, 3), "0.3 x 0.3 is longer than 0.6"
    assert verify.typical(longer, lambda node: p, lambda probs: int(probs.argmin())).tokens == (1, 1, 2)


# --------------------------------------------------------------------------------------------------
# Mutants: rules and drafts that look right and are not. The same check must catch every one.


def claiming(drafts: Draft, claim: Callable[[TokenTree, int], Tensor | None]) -> Draft:
    """Drafts that report another q than the one their tokens were drawn from."""

    def run(chances: Chances) -> TokenTree:
        tree = drafts(chances)
        return replace(tree, q=(None, *(claim(tree, node) for node in range(1, len(tree)))))

    return run


def claiming_q_of(drafter: Model, drafts: Draft) -> Draft:
    """Drafts that report the drafter's plain distribution for every child, whatever it was drawn from."""

    def claim(tree: TokenTree, node: int) -> Tensor:
        return drafter(tuple(tree.tokens[kept] for kept in tree.path(tree.parents[node])[1:]))

    return claiming(drafts, claim)


def claiming_without_replacement(drafts: Draft) -> Draft:
    """Drafts that report q without the earlier siblings, although every child was drawn from the whole q."""

    def claim(tree: TokenTree, node: int) -> Tensor | None:
        q = tree.q[node]
        assert q is not None
        for sibling in tree.children(tree.parents[node]):
            if sibling < node and tree.tokens[sibling] != tree.tokens[node]:
                q = q.index_fill(0, torch.tensor(tree.tokens[sibling]), 0.0)
        return q / q.sum()

    return claiming(drafts, claim)


def tempered(drafter: Model, temperature: float) -> Model:
    def run(path: Path) -> Tensor:
        weights = drafter(path) ** (1 / temperature)
        return weights / weights.sum()

    return run


def last_sibling_first(drafts: Draft) -> Draft:
    """Drafts whose leaves under the root come in the reverse order of their creation."""

    def run(chances: Chances) -> TokenTree:
        tree = drafts(chances)
        return replace(tree, tokens=(0, *tree.tokens[:0:-1]), q=(None, *tree.q[:0:-1]))

    return run


def second_follows_first(path: Path, siblings: Path) -> Kind | None:
    """A second child, drawn from the same q, only where the first one is token 0."""
    if path or len(siblings) == 2 or (siblings and siblings[0] != 0):
        return None
    return "iid"


def longest_of_several(tree: TokenTree, probs: TargetProbs, chances: Chances) -> Verdict:
    """Verifies every path on its own and keeps the longest."""
    leaves = [node for node in range(len(tree)) if not tree.children(node)]
    best = 0
    for leaf in leaves:
        path = tree.path(leaf)
        kept = 0
        for parent, child in zip(path, path[1:], strict=False):
            p = probs(parent)
            if not chances.coin(ratio(p, proposal(tree, child, p), tree.tokens[child])):
                break
            kept = child
        if len(tree.path(kept)) > len(tree.path(best)):
            best = kept
    p = probs(best)
    for child in tree.children(best)[:1]:
        p = residual(p, proposal(tree, child, p), tree.tokens[child])
    return emit(tree, best, chances.draw(p))


def corrected_from_the_next_node(tree: TokenTree, probs: TargetProbs, chances: Chances) -> Verdict:
    """Draws the replacement of a rejected token from the distribution after that token."""
    for node in range(1, len(tree)):
        p = probs(node - 1)
        q = proposal(tree, node, p)
        if not chances.coin(ratio(p, q, tree.tokens[node])):
            return emit(tree, node - 1, chances.draw(residual(probs(node), q, tree.tokens[node])))
    return emit(tree, len(tree) - 1, chances.draw(probs(len(tree) - 1)))


def bonus_from_the_parent(tree: TokenTree, probs: TargetProbs, chances: Chances) -> Verdict:
    """Draws the token after a fully accepted chain from the last row but one."""
    for node in range(1, len(tree)):
        p = probs(node - 1)
        q = proposal(tree, node, p)
        if not chances.coin(ratio(p, q, tree.tokens[node])):
            return emit(tree, node - 1, chances.draw(residual(p, q, tree.tokens[node])))
    return emit(tree, len(tree) - 1, chances.draw(probs(len(tree) - 2)))


def draft_noise_as_coin(tree: TokenTree, probs: TargetProbs, chances: Chances) -> Verdict:
    """Tests a drafted token with the uniform number by which it was drawn.

    Given that inverting q's cumulative sum at u gave token x, u is uniform on the piece of [0, 1] of x.
    """
    for node in range(1, len(tree)):
        p, token = probs(node - 1), tree.tokens[node]
        q = proposal(tree, node, p)
        start = float(q[:token].sum())
        accept = (ratio(p, q, token) - start) / float(q[token])
        if not chances.coin(min(1.0, max(0.0, accept))):
            return emit(tree, node - 1, chances.draw(residual(p, q, token)))
    return emit(tree, len(tree) - 1, chances.draw(probs(len(tree) - 1)))


def token_wise_with_block_residual(tree: TokenTree, probs: TargetProbs, chances: Chances) -> Verdict:
    """Accepts token by token but replaces from block verification's residual."""
    weight = 1.0
    for node in range(1, len(tree)):
        p, token = probs(node - 1), tree.tokens[node]
        q = proposal(tree, node, p)
        if not chances.coin(ratio(p, q, token)):
            rest = (weight * p - q).clamp_min(0.0)
            return emit(tree, node - 1, chances.draw(rest / rest.sum() if float(rest.sum()) > 0 else p))
        weight = min(1.0, weight * float(p[token] / q[token]))
    return emit(tree, len(tree) - 1, chances.draw(probs(len(tree) - 1)))


def siblings_against_the_first_p(tree: TokenTree, probs: TargetProbs, chances: Chances) -> Verdict:
    """Tests every sibling against p itself, and takes the residual only when all are rejected."""
    p = probs(0)
    rest = p
    for child in tree.children(0):
        token, q = tree.tokens[child], proposal(tree, child, p)
        if chances.coin(ratio(p, q, token)):
            return emit(tree, child, chances.draw(probs(child)))
        rest = residual(rest, q, token)
    return emit(tree, 0, chances.draw(rest))


def paths_padded_with_token_0(tree: TokenTree, probs: TargetProbs, chances: Chances) -> Verdict:
    """Medusa's retrieval table: paths are padded with token 0, whose scores are those of the last node."""
    chosen: dict[int, int] = {}

    def choose(node: int) -> int:
        if node not in chosen:
            chosen[node] = chances.draw(probs(node))
        return chosen[node]

    longest = max(tree.depths()) + 1
    best: tuple[int, ...] = ()
    for leaf in (node for node in range(len(tree)) if not tree.children(node)):
        path = tree.path(leaf)
        tokens = [tree.tokens[node] for node in path] + [0] * (longest - len(path))
        nodes = path + [len(tree) - 1] * (longest - len(path))
        kept = 0
        while kept + 1 < longest and tokens[kept + 1] == choose(nodes[kept]):
            kept += 1
        if kept + 1 > len(best):
            best = (*tokens[1 : kept + 1], choose(nodes[kept]))
    return Verdict(tuple(range(len(best))), best)


def two_chains(path: Path, siblings: Path) -> Kind | None:
    """Two independent chains of two tokens."""
    if not path:
        return "iid" if len(siblings) < 2 else None
    return "sampled" if len(path) < 2 and not siblings else None


def two_chains_of_unequal_length(path: Path, siblings: Path) -> Kind | None:
    """The first child of the root is a leaf, the second has a child."""
    if not path:
        return "likeliest" if len(siblings) < 2 else None
    return "likeliest" if len(path) < 3 and path[0] == 1 and not siblings else None


@dataclass(frozen=True)
class Mutant:
    """A wrong rule or draft, and the largest error that the check finds over a family of models."""

    name: str
    drafts: Callable[[Model], Draft]
    rule: Rule
    error: float


def of(kinds: Sequence[Kind], depth: int) -> Callable[[Model], Draft]:
    return lambda drafter: partial(draft, drafter, every_node(kinds, depth))


def shaped(shape: Shape) -> Callable[[Model], Draft]:
    return lambda drafter: partial(draft, drafter, shape)


chain_1, chain_2, pair_iid = of(["sampled"], 1), of(["sampled"], 2), of(["iid", "iid"], 1)
three_iid, three_sampled = of(["iid"] * 3, 1), of(["sampled"] * 3, 1)
pair_likeliest = of(["likeliest", "likeliest"], 1)

MUTANTS = [
    Mutant("the longest of several candidates wins", shaped(two_chains), longest_of_several, 0.049),
    Mutant(
        "likeliest children reported with a soft q",
        lambda drafter: claiming_q_of(drafter, pair_likeliest(drafter)),
        rejection,
        0.19,
    ),
    Mutant("correction from p", chain_2, partial(top_down, correct=lambda p, q, token: p), 0.051),
    Mutant(
        "q not renormalised between siblings",
        lambda drafter: claiming_q_of(drafter, three_sampled(drafter)),
        rejection,
        0.061,
    ),
    Mutant(
        "q renormalised between independent siblings",
        lambda drafter: claiming_without_replacement(three_iid(drafter)),
        rejection,
        0.035,
    ),
    Mutant(
        "leniency exponent 0.98",
        chain_2,
        partial(top_down, accept=lambda p, q, token: ratio(p, q, token) ** 0.98),
        0.0014,
    ),
    Mutant(
        "q without the temperature of the draft",
        lambda drafter: claiming_q_of(drafter, chain_2(tempered(drafter, 0.7))),
        rejection,
        0.022,
    ),
    Mutant("replacement from the next node", chain_2, corrected_from_the_next_node, 0.17),
    Mutant(
        "a sampled token dropped for its low q",
        lambda drafter: pruned(chain_2(drafter), is_likely),
        rejection,
        0.086,
    ),
    Mutant(
        "a child that depends on another is verified first",
        lambda drafter: last_sibling_first(shaped(second_follows_first)(drafter)),
        rejection,
        0.1,
    ),
    Mutant("the draft's noise is the coin", chain_1, draft_noise_as_coin, 0.15),
    Mutant(
        "softmax of the residual",
        chain_2,
        partial(top_down, correct=lambda p, q, token: (p - q).clamp_min(0.0).softmax(0)),
        0.11,
    ),
    Mutant("bonus token from the parent", chain_2, bonus_from_the_parent, 0.11),
    Mutant("everything is accepted", chain_2, partial(top_down, accept=lambda p, q, token: 1.0), 0.18),
    Mutant(
        "a rejected deterministic child stays in p",
        pair_likeliest,
        partial(top_down, correct=lambda p, q, token: p),
        0.1,
    ),
    Mutant("paths padded with token 0", shaped(two_chains_of_unequal_length), paths_padded_with_token_0, 0.012),
    Mutant("token-wise acceptance, block residual", chain_2, token_wise_with_block_residual, 0.007),
    Mutant("block verification without its cap", chain_2, partial(block, cap=math.inf), 0.027),
    Mutant("siblings tested against the first p", pair_iid, siblings_against_the_first_p, 0.088),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_rule_is_caught(mutant: Mutant) -> None:
    """The check that finds no error in our rules finds this one, and how large it is for these models."""
    errors = []
    for seed in range(4):
        target, drafter = RandomModel(4, seed), RandomModel(4, seed + 1000)
        errors.append(largest_error(mutant.drafts(drafter), mutant.rule, target))
    assert max(errors) > 1e-6
    assert max(errors) == pytest.approx(mutant.error, rel=0.05)  # errors are written with two digits


@pytest.mark.parametrize(
    "drafts",
    [
        chain_2,
        pair_iid,
        three_iid,
        three_sampled,
        pair_likeliest,
        shaped(second_follows_first),
        shaped(two_chains),
    ],
)
def test_the_right_rule_passes_on_the_drafts_of_the_mutants(drafts: Callable[[Model], Draft]) -> None:
    """So what catches a mutant is what is wrong with it."""
    for seed in range(4):
        target, drafter = RandomModel(3, seed), RandomModel(3, seed + 1000)
        for rule in (rejection, coupled, top_down):
            assert largest_error(drafts(drafter), rule, target) <= EXACT
