"""Acceptance rules: which drafted nodes are kept, and which token of the target's own follows them.

Knows nothing about models, caches, seeds or text. Every rule is a short function of the tree and of callbacks
that give the target's choice or distribution at a node, so that the exact law of its output can be enumerated.

    coupled    exact for every seed: the target's own choice is walked through the tree. Drafts never touch it.
    rejection  exact in distribution: the ratio test of speculative sampling, generalised to trees.
    typical    NOT lossless: accepts what is likely enough.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .tree import TokenTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verification decided.

    path:   [accepted + 1] nodes that are kept, root first
    tokens: [accepted + 1] tokens that are emitted: the accepted drafts, then one of the target's own
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def coupled(tree: TokenTree, choose: Callable[[int], int], goes_on: Callable[[int], bool]) -> Verdict:
    """Walk the target's own choices through the tree: keep a child while it carries the target's choice.

    choose(node) is the token that plain decoding emits after the node's path; goes_on(token) commits it and says
    whether the text goes on. With a root 7 that has children 3 and 5, and choose(0) = 5: node 2 is kept, then
    choose(2) is emitted and, as node 2 has no children, the walk ends: path (0, 2), tokens (5, choose(2)).

    `choose` runs once per emitted token, in order, and for no other node.
    """
    node = 0
    path, tokens = [0], []
    while True:
        token = choose(node)
        tokens.append(token)
        if not goes_on(token):
            break
        child = tree.child(node, token)
        if child is None:
            break
        path.append(child)
        node = child
    return Verdict(tuple(path), tuple(tokens))


def together(
    trees: Mapping[int, TokenTree],
    choose: Callable[[Mapping[int, int]], Mapping[int, int]],
    going_on: Callable[[Mapping[int, int]], Collection[int]],
) -> dict[int, Verdict]:
    """`coupled` for rows whose callbacks look at all of them: they move one token at a time, side by side.

    choose(row -> node) gives each row's token; going_on(row -> token) commits them and names the rows whose text goes
    on. The walk ends as soon as one of these has no child with its token: the next token of that row, and with it the
    next call for all rows, needs another forward. So every row sees each step once, in order.
    """
    nodes = dict.fromkeys(trees, 0)
    paths: dict[int, list[int]] = {row: [0] for row in trees}
    tokens: dict[int, list[int]] = {row: [] for row in trees}
    while True:
        chosen = choose(nodes)
        for row in nodes:
            tokens[row].append(chosen[row])
        children = {row: trees[row].child(nodes[row], chosen[row]) for row in going_on(chosen)}
        nodes = {row: child for row, child in children.items() if child is not None}
        if not nodes or len(nodes) < len(children):
            return {row: Verdict(tuple(paths[row]), tuple(tokens[row])) for row in trees}
        for row, node in nodes.items():
            paths[row].append(node)


def rejection(
    tree: TokenTree,
    target_probs: Callable[[int], Tensor],
    coin: Callable[[float], bool],
    draw: Callable[[Tensor], int],
) -> Verdict:
    """Traversal verification (Weng et al. 2025, arXiv 2505.12398) with a proposal distribution per child.

    target_probs(node): [vocab] float64, the target's distribution after the node's path
    coin(a): True with probability a; draw(p): a token drawn from [vocab] float64 p
    tree.q[child]: [vocab], what the child's token was drawn from given its earlier siblings; None = proposed as is

    Bottom-up. `weight` is the probability with which the prefix ending at a node may be kept. On one path this is
    block verification (Sun et al. 2024, arXiv 2403.10444); with one drafted token it is the rule of Leviathan et
    al. 2023 (arXiv 2211.17192): accept with min(1, p/q), else draw from the residual [p - q]+.
    """

    def traverse(node: int, weight: float) -> tuple[int, Tensor] | None:
        p = target_probs(node)
        for child in tree.children(node):
            token, q = tree.tokens[child], tree.q[child]
            q_token = 1.0 if q is None else float(q[token])
            # A token that its own proposal excludes can only come from a broken drafter: never accept it.
            kept = min(1.0, weight * float(p[token]) / q_token) if q_token > 0 else 0.0
            found = traverse(child, kept)
            if found is not None:
                return found
            residual = weight * p
            if q is None:
                residual[token] = 0.0
            else:
                residual = (residual - q.to(residual)).clamp_min(0.0)
            mass = float(residual.sum())
            room = mass + (1.0 - weight)  # in this order the weight of the root stays exactly 1
            weight = mass / room if room > 0 else 1.0
            p = residual / mass if mass > 0 else p
        return (node, p) if coin(weight) else None

    found = traverse(0, 1.0)
    assert found is not None, "the root is kept with probability 1"
    node, p = found
    path = tree.path(node)
    return Verdict(tuple(path), (*(tree.tokens[kept] for kept in path[1:]), draw(p)))


def typical(
    tree: TokenTree,
    target_probs: Callable[[int], Tensor],
    draw: Callable[[Tensor], int],
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Verdict:
    """Typical acceptance (Cai et al. 2024, arXiv 2401.10774, section 3.3.1). NOT lossless.

    Keeps a drafted token x when p(x) > min(epsilon, delta exp(-H(p))), H in nats; the longest kept path wins,
    the likelier one where two are equally long. Callbacks as in `rejection`.
    """
    best, best_score = 0, (0, 0.0)
    reached = {0: (0, 0.0)}  # node -> (depth, log-probability of the path)
    for node in range(len(tree)):
        if node not in reached:
            continue
        depth, log_prob = reached[node]
        if (depth, log_prob) > best_score:
            best, best_score = node, (depth, log_prob)
        children = tree.children(node)
        if not children:
            continue
        p = target_probs(node)
        threshold = min(epsilon, delta * math.exp(-float(torch.special.entr(p).sum())))
        for child in children:
            prob = float(p[tree.tokens[child]])
            if prob > threshold:
                reached[child] = (depth + 1, log_prob + math.log(prob))
    path = tree.path(best)
    return Verdict(tuple(path), (*(tree.tokens[kept] for kept in path[1:]), draw(target_probs(best))))
