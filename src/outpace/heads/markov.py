"""Our own heads: Medusa heads that see the token they follow, with a confidence, over a trimmed vocabulary.

Medusa's heads (Cai et al. 2024, arXiv 2401.10774) guess each of the next tokens without knowing the ones between. These
know the first of them, which is committed when they are asked, and each knows its parent by a low-rank bias, as in
DSpark (arXiv 2607.05147): p(v) ~ exp(U_k(v) + W1[parent] . W2[:, v]). Their output layer is rows of the target's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class MarkovHeads(nn.Module):
    """K heads. embedding: [vocab, E] of the target. output: [vocab, H], the target's output layer. token_map: [rows]
    int64, the tokens that can be guessed. rank: of the bias. The target's tensors are used as they are, and never
    trained."""

    def __init__(
        self, embedding: Tensor, output: Tensor, token_map: Tensor, num_heads: int = 4, rank: int = 64
    ) -> None:
        super().__init__()
        hidden = output.shape[1]
        self.fuse = nn.Linear(hidden + embedding.shape[1], hidden)
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(num_heads))
        self.markov_in = nn.Embedding(len(token_map) + 1, rank)  # the last row is for tokens that cannot be guessed
        self.markov_out = nn.Linear(rank, len(token_map), bias=False)
        self.confidence = nn.Linear(hidden + rank, 1)
        self.token_map: Tensor
        self.register_buffer("token_map", token_map)
        row_of = torch.full((output.shape[0],), len(token_map), dtype=torch.int64, device=output.device)
        row_of[token_map] = torch.arange(len(token_map), device=output.device)
        self._rows: Tensor
        self._row_of: Tensor
        self.register_buffer("_rows", output[token_map], persistent=False)
        self.register_buffer("_row_of", row_of, persistent=False)
        self._embedding = embedding
        self._output: nn.Module | None = None  # what stands in for the rows, once training is over
        for layer in (self.fuse, *self.blocks):  # at first, every head says what the target's own output layer says
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.markov_out.weight)
        nn.init.normal_(self.markov_in.weight, std=0.02)

    @property
    def num_heads(self) -> int:
        return len(self.blocks)

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return len(self._row_of)

    def rows_of(self, tokens: Tensor) -> Tensor:
        """The row of each token id; len(token_map) for those that cannot be guessed."""
        return self._row_of[tokens]

    def features(self, hidden: Tensor, roots: Tensor) -> Tensor:
        """hidden: [n, H] of the last token but one, normalised; roots: [n] the last token -> [heads, n, H]."""
        both = torch.cat([hidden, self._embedding[roots].to(hidden)], dim=-1)
        fused = hidden + nn.functional.silu(self.fuse(both))
        return torch.stack([fused + nn.functional.silu(block(fused)) for block in self.blocks])

    def scores(self, features: Tensor) -> Tensor:
        """[..., H] -> [..., rows]: the logits before the bias."""
        if self._output is not None:
            found: Tensor = self._output(features)
            return found
        return nn.functional.linear(features, self._rows.to(features))

    def replace_output(self, make: Callable[[nn.Linear], nn.Module]) -> None:
        """Let what `make` returns, a faster layer with the same weights, do the work of the output layer."""
        linear = nn.Linear(self._rows.shape[1], self._rows.shape[0], bias=False)
        linear.weight = nn.Parameter(self._rows, requires_grad=False)
        self._output = make(linear)

    def bias(self, parents: Tensor) -> Tensor:
        """[...] token ids -> [..., rows], what follows them."""
        found: Tensor = self.markov_out(self.markov_in(self.rows_of(parents)))
        return found

    def sureness(self, features: Tensor, parents: Tensor) -> Tensor:
        """[..., H] and [...] token ids -> [...] logits of the confidence."""
        found: Tensor = self.confidence(torch.cat([features, self.markov_in(self.rows_of(parents))], dim=-1))
        return found.squeeze(-1)

    def forward(self, hidden: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """hidden: [n, H]; parents: [n, heads] the token before each guess, the first of them the root.

        Returns [heads, n, rows] logits and [heads, n] logits of the confidence.
        """
        features = self.features(hidden, parents[:, 0])
        return self.scores(features) + self.bias(parents.T), self.sureness(features, parents.T)
