"""An EAGLE-3 head: one decoder layer on the target's hidden states, which drafts token by token with its own cache.

Li et al. 2025, arXiv 2503.01840. At position t the layer sees the token t + 1 and a mix of the target's hidden states
of token t (low, middle and high layers), and says what token t + 2 is. Deeper in a draft, where the target has not
been yet, its own output stands in for those states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class EagleShape:
    """hidden, target_hidden: sizes of the layer and of the target. num_states: hidden states that are mixed. rows: of
    the draft vocabulary. norm_before_residual: whether the residual path takes the normalised state. norm_output:
    whether deeper steps see the normalised output."""

    hidden: int
    target_hidden: int
    num_states: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rows: int
    rope_theta: float = 10000.0
    eps: float = 1e-6
    has_bias: bool = False  # of the query, key and value projections
    norm_before_residual: bool = False
    norm_output: bool = False


class EagleCache:
    """Keys and values of one session: [kv heads, columns, head dim]."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[1]

    def copy(self) -> EagleCache:
        """Another one with the same content, which may go on differently."""
        other = EagleCache()
        other.keys, other.values = self.keys, self.values
        return other

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What is kept, and these behind it; keeps nothing."""
        if self.keys is None or self.values is None:
            return keys, values
        return torch.cat([self.keys, keys], 1), torch.cat([self.values, values], 1)

    def keep(self, keys: Tensor, values: Tensor) -> None:
        """Keep what `extended` gave."""
        self.keys, self.values = keys, values


class EagleLayer(nn.Module):
    """The head. embedding: [vocab, H] of the target, or its own. token_map: [rows] int64, the target's ids of rows.
    layers: the target's hidden states that it mixes, in its order; 0 is the embedding, i what layer i puts out."""

    def __init__(self, shape: EagleShape, embedding: Tensor, token_map: Tensor, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.layers = shape, layers
        width, inner = 2 * shape.hidden, shape.num_heads * shape.head_dim
        inner_kv = shape.num_kv_heads * shape.head_dim
        self.fc = nn.Linear(shape.num_states * shape.target_hidden, shape.hidden, bias=False)
        self.input_layernorm = _Norm(shape.hidden, shape.eps)
        self.hidden_norm = _Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = _Norm(shape.hidden, shape.eps)
        self.norm = _Norm(shape.hidden, shape.eps)
        self.q_proj = nn.Linear(width, inner, bias=shape.has_bias)
        self.k_proj = nn.Linear(width, inner_kv, bias=shape.has_bias)
        self.v_proj = nn.Linear(width, inner_kv, bias=shape.has_bias)
        self.o_proj = nn.Linear(inner, shape.hidden, bias=False)
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)
        self.lm_head = nn.Linear(shape.hidden, shape.rows, bias=False)
        self.token_map: Tensor
        self.register_buffer("token_map", token_map)
        self._embedding = embedding

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return self._embedding.shape[0]

    def mixed(self, states: Tensor) -> Tensor:
        """[n, num_states * target_hidden] -> [n, hidden]."""
        found: Tensor = self.fc(states.to(self.norm.weight))
        return found

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, cache: EagleCache, visible: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """tokens, positions: [n]; states: [n, hidden], mixed or of the step before; visible: [n, cached + n] bool.

        Returns [n, rows] logits, [n, hidden] states for a deeper step, and (keys, values) of the cache with these n.
        """
        queries, keys, values, residual = self.projected(tokens, states, positions)
        keys, values = cache.extended(keys, values)
        attended = nn.functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=visible[None, None], enable_gqa=True
        )
        logits, deeper = self.finished(residual, attended[0])
        return logits, deeper, (keys, values)

    def projected(self, tokens: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(queries [heads, n, head dim], keys and values [kv heads, n, head dim], residual [n, hidden])."""
        shape = self.shape
        embedded = self.input_layernorm(self._embedding[tokens].to(states))
        normed = self.hidden_norm(states)
        both = torch.cat([embedded, normed], dim=-1)
        queries, keys, values = (
            projection(both).view(len(tokens), heads, shape.head_dim).transpose(0, 1)
            for projection, heads in (
                (self.q_proj, shape.num_heads),
                (self.k_proj, shape.num_kv_heads),
                (self.v_proj, shape.num_kv_heads),
            )
        )
        queries, keys = _rotated(queries, positions, shape.rope_theta), _rotated(keys, positions, shape.rope_theta)
        return queries, keys, values, normed if shape.norm_before_residual else states

    def finished(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """attended: [heads, n, head dim] -> ([n, rows] logits, [n, hidden] states for a deeper step)."""
        hidden = residual + self.o_proj(attended.transpose(0, 1).reshape(len(residual), -1))
        normed = self.post_attention_layernorm(hidden)
        hidden = hidden + self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
        output = self.norm(hidden)
        return self.lm_head(output), output if self.shape.norm_output else hidden


class _Norm(nn.Module):
    """Root mean square normalisation, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)).to(x.dtype) * self.weight


def _rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [heads, n, head dim], in halves as Llama and Qwen do."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
