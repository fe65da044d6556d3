"""Several steps of an EAGLE-3 head over a whole text at once: training as it is used ("training-time test").

Li et al. 2025, arXiv 2503.01840, section 3.2. At place t, the first step sees the target's states up to t. The steps
behind it see, in their place, their own outputs: they attend to the first one's keys up to t and to their own chain's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..heads.eagle import EagleLayer


def unrolled(head: EagleLayer, tokens: Tensor, mixed: Tensor, num_steps: int) -> list[Tensor]:
    """tokens: [n]; mixed: [n, hidden] of the same tokens. Step j gives [n - 1 - j, rows] logits, whose row t is of the
    token t + 2 + j."""
    num_places = len(tokens) - 1
    group = head.shape.num_heads // head.shape.num_kv_heads
    states, logits = mixed[:num_places], []
    first: tuple[Tensor, Tensor] | None = None
    chain: list[tuple[Tensor, Tensor]] = []  # keys and values of the steps behind the first, [heads, places, head dim]
    for step in range(num_steps):
        count = num_places - step
        if count < 1:
            break
        positions = torch.arange(count, device=tokens.device) + step
        queries, keys, values, residual = head.projected(tokens[1 + step :], states[:count], positions)
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        if first is None:
            first = keys, values
        else:
            chain.append((keys, values))
        scale = head.shape.head_dim**-0.5
        causal = torch.ones(count, num_places, dtype=torch.bool, device=tokens.device).tril()
        scores = (queries @ first[0].transpose(1, 2) * scale).masked_fill(~causal, -torch.inf)
        own = [(queries * k[:, :count]).sum(-1, keepdim=True) * scale for k, _ in chain]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        attended = weights[..., :num_places] @ first[1]
        for place, (_, v) in enumerate(chain):
            attended = attended + weights[..., num_places + place, None] * v[:, :count]
        found, states = head.finished(residual, attended)
        logits.append(found)
    return logits
