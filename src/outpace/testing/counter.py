"""A model that counts: after token t it says t + 1, for certain. Heads for it can be written by hand and must be right.

Attention and feed-forward layers are silent, embeddings are the unit vectors, so the last hidden state names the last
token, and any head that reads it right reaches full acceptance. What a file, a name or an index gets wrong shows.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..heads.eagle import EagleLayer, EagleShape
from ..heads.medusa import MedusaHeads

VOCAB = 64


def counter_model(num_layers: int = 2) -> Any:
    """A Llama of VOCAB tokens that counts, and begins again after the last one."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=VOCAB,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        model.lm_head.weight.copy_(shift(1))
    return model


def shift(steps: int) -> torch.Tensor:
    """[VOCAB, VOCAB]: an output layer that says t + steps where the hidden state names t, with a margin of 8 * 8."""
    return 8 * torch.eye(VOCAB).roll(steps, 0)


def counter_heads(num_heads: int = 4) -> MedusaHeads:
    """Medusa heads of the counter: head i says t + 2 + i."""
    heads = MedusaHeads(VOCAB, VOCAB, num_heads)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.zero_()
        for place, output in enumerate(heads.outputs):
            output.get_parameter("weight").copy_(shift(2 + place))
    return heads.eval().requires_grad_(False)


def counter_eagle() -> EagleLayer:
    """An EAGLE-3 head of the counter, which ignores the target's states.

    Its attention looks for the token itself (queries and keys are the embedding, scaled), and so copies the embedding
    of the token it follows, louder than what came before; the output layer then says the next one.
    """
    shape = EagleShape(VOCAB, VOCAB, 3, 16, 1, 1, VOCAB, VOCAB, rope_theta=1e6, norm_output=True)
    head = EagleLayer(shape, torch.eye(VOCAB), torch.arange(VOCAB), (1, 2, 3))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        copied = torch.cat([torch.eye(VOCAB), torch.zeros(VOCAB, VOCAB)], dim=1)
        head.q_proj.weight.copy_(8 * copied)
        head.k_proj.weight.copy_(8 * copied)
        head.v_proj.weight.copy_(copied)
        head.o_proj.weight.copy_(100 * torch.eye(VOCAB))
        head.lm_head.weight.copy_(shift(1))
    return head.eval().requires_grad_(False)
