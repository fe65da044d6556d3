"""Enumerates the exact law of what an acceptance rule emits, without sampling: no bias is too small to see.

Knows nothing about models, caches or seeds. Target and drafter are functions from the drafted path to a
distribution, the rule gets its coins and draws from `Chances`, and every branch of chance is run once and
weighed with its probability. A round of drafting and verifying is lossless if and only if its law of the
first tokens, where a shorter emission goes on with the target's own conditionals, is the target's law:

    target, drafter = RandomModel(3, seed=1), RandomModel(3, seed=2)
    drafts = partial(draft, drafter, every_node(["sampled", "likeliest"], depth=2))
    rule = lambda tree, probs, chances: verify.rejection(tree, probs, chances.coin, chances.draw)
    assert largest_error(drafts, rule, target) < 1e-12
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor

from ..tree import TokenTree
from ..verify import Verdict

Path = tuple[int, ...]  # the tokens that follow the root
Model = Callable[[Path], Tensor]  # the distribution after a path: [vocab] float64
TargetProbs = Callable[[int], Tensor]  # the target's distribution after a node's path: [vocab] float64
Law = dict[Path, float]  # token sequence -> probability

# How a child is proposed. "sampled": drawn from what its earlier siblings leave of q (without replacement);
# "iid": drawn from q itself, so that siblings may carry equal tokens; "likeliest": the best token by q that
# no sibling has.
Kind = Literal["sampled", "iid", "likeliest"]
# (path of a node, tokens of its earlier children) -> how its next child is proposed; None when it has enough.
Shape = Callable[[Path, Path], Kind | None]

Draft = Callable[["Chances"], TokenTree]
Rule = Callable[[TokenTree, TargetProbs, "Chances"], Verdict]

_T = TypeVar("_T")


class Chances:
    """Chance by script: repeats the script's outcomes, then takes the first possible one of each choice."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        self._script = script
        self.taken: list[int] = []  # the outcome of each choice so far
        self.weights: list[Sequence[float]] = []  # the probabilities of each choice so far

    @property
    def probability(self) -> float:
        """The probability of everything that happened so far."""
        return math.prod(weights[taken] for weights, taken in zip(self.weights, self.taken, strict=True))

    def pick(self, weights: Sequence[float]) -> int:
        """An index, each with its probability."""
        assert abs(sum(weights) - 1) < 1e-9 and min(weights) >= 0, f"not probabilities: {weights}"
        choice = len(self.taken)
        if choice < len(self._script):
            self.taken.append(self._script[choice])
        else:
            self.taken.append(_next_possible(weights, 0))
        self.weights.append(weights)
        return self.taken[-1]

    def coin(self, probability: float) -> bool:
        """True with the given probability."""
        assert -1e-12 < probability < 1 + 1e-12, f"not a probability: {probability}"
        probability = min(1.0, max(0.0, probability))
        return self.pick([probability, 1 - probability]) == 0

    def draw(self, probs: Tensor) -> int:
        """A token drawn from probs: [vocab] float64."""
        return self.pick(probs.tolist())


def _next_possible(weights: Sequence[float], start: int) -> int:
    """The first index from `start` on that has a positive probability, or the number of weights."""
    return next((index for index in range(start, len(weights)) if weights[index] > 0), len(weights))


def branches(run: Callable[[Chances], _T]) -> Iterator[tuple[_T, float]]:
    """Every result that `run` can have, one per branch of chance, with the branch's probability; depth first.

    `run` is called anew for every branch and must depend on nothing but the `Chances` that it gets. For two
    coins that come up with 0.9 and 0.5 there are four branches: 0.45, 0.45, 0.05 and 0.05.
    """
    script: list[int] = []
    while True:
        chances = Chances(script)
        yield run(chances), chances.probability
        script = chances.taken
        while script:
            weights = chances.weights[len(script) - 1]
            script[-1] = _next_possible(weights, script[-1] + 1)
            if script[-1] < len(weights):
                break
            script.pop()
        if not script:
            return


class RandomModel:
    """A random table: after every path another distribution, always the same one for the same seed.

    sharpness: 0 gives uniform distributions, 1 any distribution alike, more gives peaked ones.
    zeros: share of the tokens that are impossible, as after a truncation.
    """

    def __init__(self, vocab_size: int, seed: int, sharpness: float = 1.0, zeros: float = 0.0) -> None:
        self.vocab_size, self.seed, self.sharpness, self.zeros = vocab_size, seed, sharpness, zeros
        self._known: dict[Path, Tensor] = {}

    def __call__(self, path: Path) -> Tensor:
        if path not in self._known:
            # Python promises that this stream never changes, so the errors that tests pin do not either.
            numbers = random.Random(f"{self.seed} {path}")
            weights = [(-math.log(1 - numbers.random())) ** self.sharpness for _ in range(self.vocab_size)]
            possible = [numbers.random() >= self.zeros for _ in range(self.vocab_size)]
            possible[int(numbers.random() * self.vocab_size)] = True
            table = torch.tensor(weights, dtype=torch.float64) * torch.tensor(possible)
            self._known[path] = table / table.sum()
        return self._known[path].clone()


def every_node(kinds: Sequence[Kind], depth: int) -> Shape:
    """The shape in which every node above `depth` gets the same children."""

    def shape(path: Path, siblings: Path) -> Kind | None:
        return kinds[len(siblings)] if len(path) < depth and len(siblings) < len(kinds) else None

    return shape


def draft(drafter: Model, shape: Shape, chances: Chances, root: int = 0) -> TokenTree:
    """A tree of the given shape, drafted level by level; a node ends early when q has no token left."""
    tokens, parents = [root], [-1]
    proposals: list[Tensor | None] = [None]
    paths: list[Path] = [()]
    node = 0
    while node < len(tokens):
        path = paths[node]
        siblings: Path = ()
        while (kind := shape(path, siblings)) is not None:
            q = drafter(path)
            if kind != "iid":
                q[list(siblings)] = 0.0
                if float(q.sum()) <= 0:
                    break
                q = q / q.sum()
            token = int(q.argmax()) if kind == "likeliest" else chances.draw(q)
            tokens.append(token)
            parents.append(node)
            proposals.append(None if kind == "likeliest" else q)
            paths.append((*path, token))
            siblings = (*siblings, token)
        node += 1
    ones = (1.0,) * len(tokens)
    sources = ("", *("draft",) * (len(tokens) - 1))
    return TokenTree(tuple(tokens), tuple(parents), ones, sources, tuple(proposals))


def target_probs(target: Model, tree: TokenTree) -> TargetProbs:
    """The callback that acceptance rules want: the target's distribution after each node's path."""
    paths: list[Path] = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return lambda node: target(paths[node])


def verdicts(drafts: Draft, rule: Rule, target: Model) -> Iterator[tuple[Verdict, float]]:
    """Everything that one round can decide, with its probability; equal verdicts come from many branches."""
    for tree, reached in branches(drafts):
        for verdict, chance in branches(partial(rule, tree, target_probs(target, tree))):
            yield verdict, reached * chance


def emission_law(drafts: Draft, rule: Rule, target: Model) -> Law:
    """The law of the tokens that one round emits, accepted drafts and the target's own token together."""
    law: dict[Path, float] = defaultdict(float)
    for verdict, chance in verdicts(drafts, rule, target):
        law[verdict.tokens] += chance
    return dict(law)


def expected_accepted(drafts: Draft, rule: Rule, target: Model) -> float:
    """How many drafted tokens one round accepts on average."""
    return math.fsum((len(verdict.path) - 1) * chance for verdict, chance in verdicts(drafts, rule, target))


def first_tokens(law: Law, target: Model, length: int) -> Law:
    """The law of the first `length` tokens when what a round leaves open is drawn from the target itself."""
    complete: dict[Path, float] = defaultdict(float)
    open_ends = [(path[:length], chance) for path, chance in law.items()]
    while open_ends:
        path, chance = open_ends.pop()
        if len(path) == length:
            complete[path] += chance
        else:
            probs = target(path).tolist()
            open_ends += [((*path, token), chance * prob) for token, prob in enumerate(probs) if prob > 0]
    return dict(complete)


def target_law(target: Model, length: int) -> Law:
    """The law of the first `length` tokens in plain decoding."""
    return first_tokens({(): 1.0}, target, length)


def distance(law: Law, other: Law) -> float:
    """The largest difference between the probabilities that two laws give to one sequence."""
    return max(abs(law.get(path, 0.0) - other.get(path, 0.0)) for path in law.keys() | other.keys())


def largest_error(drafts: Draft, rule: Rule, target: Model) -> float:
    """How far one round of drafting and verifying is from the target's law: below 1e-12 when it is lossless.

    The joint law is compared over as many tokens as the round can emit; after them both are the target's.
    """
    law = emission_law(drafts, rule, target)
    length = max(len(path) for path in law)
    return distance(first_tokens(law, target, length), target_law(target, length))
