"""Medusa heads: small networks on the target's last hidden state, each of which guesses one of the next tokens.

Cai et al. 2024, arXiv 2401.10774, section 2.1: head i (from 0) sees the hidden state h of the token at position t and
guesses the token at t + 2 + i, as softmax(W (x + SiLU(A x + b))) over one or more residual blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..errors import LoadError


class MedusaHeads(nn.Module):
    """K heads.

    blocks: [heads][layers] linear layers H -> H of the residual blocks. outputs: [heads] or [1] linear layers H ->
    rows, without bias; one is shared by all heads. token_map: [rows] int64, the target's id of each row, or None where
    rows are ids.
    """

    def __init__(
        self,
        hidden_size: int,
        num_rows: int,
        num_heads: int,
        num_layers: int = 1,
        has_bias: bool = True,
        is_shared: bool = False,
        token_map: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=has_bias) for _ in range(num_layers))
            for _ in range(num_heads)
        )
        self.outputs = nn.ModuleList(
            nn.Linear(hidden_size, num_rows, bias=False) for _ in range(1 if is_shared else num_heads)
        )
        self.token_map: Tensor | None
        self.register_buffer("token_map", token_map)

    @property
    def num_heads(self) -> int:
        return len(self.blocks)

    def features(self, hidden: Tensor) -> Tensor:
        """hidden: [n, H] -> [heads, n, H], what the output layers get."""
        found = []
        for layers in self.blocks:
            x = hidden
            for layer in layers:  # type: ignore[attr-defined]
                x = x + nn.functional.silu(layer(x))
            found.append(x)
        return torch.stack(found)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [n, H] of the target's last layer, normalised -> [heads, n, rows] logits."""
        features = self.features(hidden)
        if len(self.outputs) == 1:
            scores: Tensor = self.outputs[0](features)
            return scores
        return torch.stack([output(x) for output, x in zip(self.outputs, features, strict=True)])

    def ids(self, rows: Tensor) -> Tensor:
        """The target's token ids of rows of the output layers."""
        return rows if self.token_map is None else self.token_map[rows]


def from_tensors(
    tensors: Mapping[str, Tensor],
    hidden_size: int,
    vocab_size: int,
    num_heads: int | None = None,
    head_of_target: Tensor | None = None,
) -> MedusaHeads:
    """Heads from a checkpoint, in the names of vLLM or in those of FasterDecoding and TGI.

    vLLM: blocks.{i}.layers.{l}.weight and .bias, lm_heads.{i}.weight or one lm_head.weight, token_map.
    FasterDecoding, TGI: {i}.{l}.linear.weight and .bias, {i}.{layers}.weight. A leading "medusa_heads." is dropped.
    hidden_size, vocab_size: of the target. num_heads: as the configuration says, which must be so. head_of_target:
    [vocab, H], shared by all heads where the checkpoint has no output layer.

    Raises LoadError naming the tensor that is missing, unknown or of another shape.
    """
    found = _in_our_names({name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()})
    counts = sorted({int(name.split(".")[1]) for name in found if name.startswith("blocks.")})
    if not counts or counts != list(range(len(counts))):
        raise LoadError(
            f"The checkpoint has no residual blocks of heads 0, 1, ...; its tensors are {sorted(tensors)[:6]}."
        )
    if num_heads is not None and num_heads != len(counts):
        raise LoadError(f"The configuration says num_heads={num_heads}, and the checkpoint has {len(counts)} heads.")
    layers = 1 + max(int(name.split(".")[2]) for name in found if name.startswith("blocks."))
    outputs = sorted(name for name in found if name.startswith("outputs."))
    token_map = found.pop("token_map", None)
    if not outputs:
        if head_of_target is None:
            raise LoadError("The checkpoint has no output layer (lm_heads.0.weight), and the target has none to share.")
        found["outputs.0.weight"], outputs = head_of_target, ["outputs.0.weight"]
    num_rows = found["outputs.0.weight"].shape[0]
    if token_map is None and num_rows != vocab_size:
        raise LoadError(
            f"The heads' output layer has {num_rows} rows and the target {vocab_size} token ids. They were trained for "
            "another model, or token_map is missing."
        )
    if token_map is not None and (
        token_map.shape != (num_rows,) or int(token_map.min()) < 0 or int(token_map.max()) >= vocab_size
    ):
        raise LoadError(
            f"token_map must hold {num_rows} token ids below {vocab_size}; it has shape {tuple(token_map.shape)} and "
            f"ids up to {int(token_map.max())}."
        )
    heads = MedusaHeads(
        hidden_size,
        num_rows,
        len(counts),
        layers,
        has_bias="blocks.0.0.bias" in found,
        is_shared=len(outputs) == 1,
        token_map=None if token_map is None else token_map.to(torch.int64),
    )
    wanted = {name: tuple(tensor.shape) for name, tensor in heads.state_dict().items() if name != "token_map"}
    for name, shape in wanted.items():
        if name not in found:
            raise LoadError(f"The checkpoint has no tensor for {name}, of shape {shape}.")
        if tuple(found[name].shape) != shape:
            raise LoadError(
                f"{name} has shape {tuple(found[name].shape)} and should have {shape}: the heads were trained for a "
                "model of another size."
            )
    unknown = sorted(set(found) - set(wanted))
    if unknown:
        raise LoadError(f"The checkpoint has tensors that Medusa heads do not have: {', '.join(unknown[:4])}.")
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            parameter.copy_(found[name])
    if found["outputs.0.weight"] is head_of_target and head_of_target is not None:
        heads.outputs[0].weight = nn.Parameter(head_of_target, requires_grad=False)  # no second copy
    return heads.eval().requires_grad_(False)


def _in_our_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """blocks.{i}.{l}.weight, outputs.{i}.weight, token_map."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] == "blocks" and len(parts) == 5 and parts[2] == "layers":
            found[f"blocks.{parts[1]}.{parts[3]}.{parts[4]}"] = tensor
        elif parts[0] == "lm_heads" and len(parts) == 3:
            found[f"outputs.{parts[1]}.{parts[2]}"] = tensor
        elif name == "lm_head.weight":
            found["outputs.0.weight"] = tensor
        elif len(parts) == 4 and parts[2] == "linear":
            found[f"blocks.{parts[0]}.{parts[1]}.{parts[3]}"] = tensor
        elif len(parts) == 3 and parts[0].isdigit():
            found[f"outputs.{parts[0]}.{parts[2]}"] = tensor
        else:
            found[name] = tensor
    return found


def to_tensors(heads: MedusaHeads) -> dict[str, Tensor]:
    """The checkpoint in vLLM's names."""
    found = {}
    for name, tensor in heads.state_dict().items():
        parts = name.split(".")
        if parts[0] == "blocks":
            found[f"blocks.{parts[1]}.layers.{parts[2]}.{parts[3]}"] = tensor
        elif parts[0] == "outputs":
            found["lm_head.weight" if len(heads.outputs) == 1 else f"lm_heads.{parts[1]}.weight"] = tensor
        else:
            found[name] = tensor
    return found
