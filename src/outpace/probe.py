"""Asks a loaded model, not a list of names, what it can verify. Knows the target and nothing of drafters.

Some models ignore a tree mask (positions by buffer index, convolutions over slots), and some give silently wrong
results for several tokens on top of a cached state. Both are found by running the model: every token of a small
tree must get the scores that decoding its path one token at a time gives.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import Cache
from .errors import LoadError
from .target import Block, Target

# Of the scores' standard deviation: wrong masks are off by tenths of it in the mean over a token's scores, rounding by
# 1e-5 of it in float32 and 0.05 in bfloat16. (The largest of a million scores says less: 0.2 in bfloat16.)
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}
_CONTEXT = 7
_CHAIN = 12  # noise of quantised activations shows in some tokens only
_LONGEST_WINDOW = 320
_TREE = (-1, 0, 0, 1, 2)  # two branches of two tokens under one root:
_LEFT, _RIGHT = (0, 1, 3), (0, 2, 4)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a model can verify, and how well a block of nodes agrees with one token at a time.

    can_tree: whether trees and ragged batches give the right scores. is_exact: whether chains do; a target whose chains
    are wrong is refused, a draft model is not.
    rounding: the largest score difference seen between a block and single tokens, in logits.
    reasons: one line per check, for people.
    """

    can_tree: bool
    rounding: float
    reasons: tuple[str, ...]
    is_exact: bool = True


def probe(target: Target, is_draft: bool = False) -> Capabilities:
    """Run the checks. Raises LoadError when not even a chain of tokens gives the scores of single steps.

    is_draft: a draft model may be a little inexact (quantised activations), and then takes chains only.
    """
    try:
        return _probe(target, is_draft)
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(
            f"{type(target.model).__name__} cannot be decoded step by step over our cache: {type(error).__name__}: "
            f"{error}. Use transformers' own generate for this model."
        ) from error


def _probe(target: Target, is_draft: bool) -> Capabilities:
    generator = torch.Generator().manual_seed(0)
    length = _context_length(target)
    ids = torch.randint(0, target.vocab_size, (length + _CHAIN,), generator=generator).tolist()
    context, drafts = tuple(ids[:length]), tuple(ids[length:])
    tolerance = _TOLERANCE.get(target.dtype, _TOLERANCE[torch.bfloat16])
    reasons = []

    steps = _single_steps(target, context, drafts)
    scale = float(steps.std())
    (found,) = _block(target, [context], drafts, tuple(range(-1, len(drafts) - 1)))
    chain_error = _difference(found, steps)
    can_chain = _mean_difference(found, steps) <= tolerance * scale
    reasons.append(_line(f"chain of {len(drafts)} tokens", chain_error, scale, can_chain))
    if not can_chain and is_draft and chain_error < scale:
        return Capabilities(False, chain_error, tuple(reasons), is_exact=False)
    if not can_chain:
        raise LoadError(
            f"A forward of several tokens over this model's cache is off by {chain_error:.2g} (scores have a standard "
            f"deviation of {scale:.2g}) from the same tokens one at a time, so drafts cannot be verified in one pass. "
            "Quantisation of activations does this (quantised weights alone do not), and so do some recurrent layers. "
            "Use transformers' own generate for this model."
        )
    if target.tree_obstacle is not None:
        return Capabilities(False, chain_error, (*reasons, f"tree: {target.tree_obstacle}"))
    # A second, shorter row beside it: the same mask code serves ragged batches.
    contexts = (context, context[:3])
    errors, means = [], []
    for start, scores in zip(contexts, _block(target, contexts, drafts[: len(_TREE)], _TREE), strict=True):
        for nodes in (_LEFT, _RIGHT):
            wanted = _single_steps(target, start, [drafts[node] for node in nodes])
            errors.append(_difference(scores[list(nodes)], wanted))
            means.append(_mean_difference(scores[list(nodes)], wanted))
    tree_error = max(errors)
    can_tree = max(means) <= tolerance * scale
    reasons.append(_line("tree of 5 tokens in a ragged batch", tree_error, scale, can_tree))
    return Capabilities(can_tree, max(chain_error, tree_error) if can_tree else chain_error, tuple(reasons))


def has_equal_bits(target: Target, num_nodes: int) -> bool:
    """Whether a chain's scores are, bit for bit, those of its tokens one at a time, in passes padded to one shape.

    They are not where rows meet: in a mixture of experts, the tokens of one expert share a multiplication.
    """
    context, num_blocks = 5, 3
    shape = (num_nodes, context + (num_blocks + 1) * num_nodes)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, target.vocab_size, (context + num_blocks * num_nodes,), generator=generator).tolist()
    found = []
    for size in (num_nodes, 1):
        cache = target.new_cache()
        row = cache.add_row()
        _feed(target, cache, row, ids[:context])
        scores = []
        for start in range(context, len(ids), size):
            part = ids[start : start + size]
            (output,) = target.forward(cache, [Block.chain(row, part, num_logits=size, shape=shape)])
            cache.keep(row, range(size))
            scores.append(output.logits)
        found.append(torch.cat(scores))
    return torch.equal(*found)


def _context_length(target: Target) -> int:
    """A few tokens, or just over the model's attention window where that is cheap: windows are where masks go wrong."""
    names = ("sliding_window", "window_size", "attention_chunk_size")
    windows = [w for w in (getattr(target.config, name, None) for name in names) if isinstance(w, int) and w > 0]
    fitting = [w + 3 for w in windows if w <= _LONGEST_WINDOW]
    longest = (target.max_positions or _LONGEST_WINDOW + _CHAIN) - _CHAIN
    return max(1, min(max([_CONTEXT, *fitting]), longest))


def _line(what: str, error: float, scale: float, is_right: bool) -> str:
    return f"{what}: {'right' if is_right else 'WRONG'}, largest difference {error:.1e} (scores vary by {scale:.1f})"


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest |a - b|; infinite where either is not a number."""
    return float((a - b).abs().nan_to_num(nan=float("inf")).max())


def _mean_difference(a: Tensor, b: Tensor) -> float:
    """The root mean square of a - b over the scores of the worst token; infinite where either is not a number."""
    return float((a - b).pow(2).mean(dim=-1).sqrt().nan_to_num(nan=float("inf")).max())


def _single_steps(target: Target, context: Sequence[int], path: Sequence[int]) -> Tensor:
    """[path, vocab] float64: the scores after each token of a path that is decoded one token at a time."""
    cache = target.new_cache()
    row = cache.add_row()
    _feed(target, cache, row, context)
    return torch.cat([_feed(target, cache, row, (token,)) for token in path]).to(torch.float64)


def _feed(target: Target, cache: Cache, row: int, tokens: Sequence[int]) -> Tensor:
    """Commit tokens to a row; [1, vocab] the scores after the last one."""
    (output,) = target.forward(cache, [Block.chain(row, tokens)])
    cache.keep(row, range(len(tokens)))
    return output.logits


def _block(
    target: Target, contexts: Sequence[Sequence[int]], drafts: Sequence[int], parents: Sequence[int]
) -> list[Tensor]:
    """[nodes, vocab] float64 per context: the scores of all nodes, from one forward over every context."""
    cache = target.new_cache()
    blocks = []
    for context in contexts:
        row = cache.add_row()
        _feed(target, cache, row, context)
        blocks.append(Block(row, tuple(drafts), tuple(parents), num_logits=len(parents)))
    return [output.logits.to(torch.float64) for output in target.forward(cache, blocks)]


def token_seconds(target: Target) -> float:
    """The time of one token behind a short text."""
    cache = target.new_cache()
    row = cache.add_row()
    target.forward(cache, [Block.chain(row, [0] * 16)])
    cache.keep(row, range(16))
    begin = time.perf_counter()
    target.forward(cache, [Block.chain(row, [0])])
    return time.perf_counter() - begin
