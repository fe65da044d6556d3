"""EAGLE-3 heads: caught up, rewound and branched right, which a fresh run of the layer over every path shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outpace import LoadError, SamplingParams, load
from outpace.drafters.base import Budget
from outpace.drafters.eagle import EagleDrafter
from outpace.heads.eagle import EagleCache, EagleLayer, EagleShape
from outpace.heads.eagle_files import from_checkpoint
from outpace.heads.files import save_heads
from outpace.testing.counter import VOCAB, counter_eagle, counter_model
from outpace.testing.models import PROMPTS, tiny_model
from outpace.train.unrolled import unrolled
from outpace.tree import TokenTree

SHAPE = EagleShape(64, 64, 3, 96, 4, 2, 16, 512)


def random_head(seed: int = 0, **fields: Any) -> EagleLayer:
    torch.manual_seed(seed)
    embedding = tiny_model("llama").get_input_embeddings().weight.detach()
    head = EagleLayer(replace(SHAPE, **fields), embedding, torch.arange(512), (0, 1, 2))
    return head.eval().requires_grad_(False)


def test_the_counters_head_is_accepted_to_the_last() -> None:
    counter = counter_model(4)
    for params in (SamplingParams(max_new_tokens=41), SamplingParams(max_new_tokens=41, temperature=0.7, seed=1)):
        engine = load(counter, drafter=EagleDrafter(counter_eagle()), k=4)
        for result in engine.generate([[5, 6], [40, 50, 60]], params):
            first = result.prompt_tokens[-1] + 1
            assert result.tokens == [(first + i) % VOCAB for i in range(41)]
            assert result.stats.num_verifications <= 10, result.stats


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_random_head_changes_nothing(temperature: float) -> None:
    model = tiny_model("llama")
    plain = load(model, drafter="none")
    engine = load(model, drafter=EagleDrafter(random_head()), k=8, prefill_chunk=4)
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=3)
    prompts = [list(prompt) for prompt in PROMPTS]
    wanted = [result.tokens for result in plain.generate(prompts, params)]
    results = engine.generate(prompts, params)
    assert [result.tokens for result in results] == wanted
    assert all(r.stats.num_draft_failures == 0 and r.stats.num_drafted_tokens > 100 for r in results)


class Watching(EagleDrafter):
    """Compares every tree with the head run anew over each whole path, without any cache."""

    num_checked = 0

    def propose(self, sessions: Any, budgets: Any) -> Any:
        trees = super().propose(sessions, budgets)
        for session, tree in zip(sessions, trees, strict=True):
            if len(tree) > 1:
                self._check(session.tokens, tree, self.all_states[session.id])
        return trees

    def read(self, session: Any, start: int, hidden: Any) -> None:
        super().read(session, start, hidden)
        states = torch.cat([hidden[layer] for layer in self.hidden_layers], dim=-1)
        self.all_states = getattr(self, "all_states", {})
        before = self.all_states.get(session.id)
        self.all_states[session.id] = states if before is None else torch.cat([before, states])

    @torch.no_grad()
    def _check(self, tokens: list[int], tree: TokenTree, states: Tensor) -> None:
        head = self._head
        for node in range(1, len(tree)):
            path = tree.path(node)
            fed = [*tokens[1:], *(tree.tokens[n] for n in path[1:-1])]
            known = head.mixed(states)
            logits = torch.empty(0)
            for count in range(len(known), len(fed) + 1):  # deeper steps see the head's own output
                visible = torch.ones(count, count, dtype=torch.bool).tril()
                logits, out, _ = head(torch.tensor(fed[:count]), known, torch.arange(count), EagleCache(), visible)
                known = torch.cat([known, out[-1:]])
            chance = float(logits[-1].softmax(-1)[tree.tokens[node]])
            parent = tree.value[tree.parents[node]]
            assert tree.value[node] / parent == pytest.approx(chance, rel=1e-3)
            self.num_checked += 1


@pytest.mark.parametrize("fields", [{}, {"norm_before_residual": True}, {"norm_output": True, "has_bias": True}])
def test_every_guess_is_that_of_a_fresh_run(fields: dict[str, Any]) -> None:
    """After acceptances and rejections, in trees and over chunks of a prompt."""
    model = tiny_model("llama")
    drafter = Watching(random_head(1, **fields))
    engine = load(model, drafter=drafter, k=8, prefill_chunk=4)
    engine.generate(list(PROMPTS[0]), SamplingParams(max_new_tokens=12))
    assert drafter.num_checked > 40


def checkpoint(head: EagleLayer, prefix: str = "midlayer.") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in head.state_dict().items():
        part = name.split(".")[0]
        if part == "token_map":
            found["d2t"] = tensor - torch.arange(len(tensor))
        elif part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"{prefix}self_attn.{name}"] = tensor
        elif part in ("gate_proj", "up_proj", "down_proj"):
            found[f"{prefix}mlp.{name}"] = tensor
        elif part in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            found[f"{prefix}{name}"] = tensor
        else:
            found[name] = tensor
    return found


CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


@pytest.mark.parametrize("layout", ["midlayer", "layers", "speculators"])
def test_published_layouts_are_read(layout: str) -> None:
    head, embedding = random_head(2), random_head(2)._embedding
    config: dict[str, Any] = dict(CONFIG)
    if layout == "speculators":
        layer = {name: config.pop(name) for name in list(config) if name not in ("eagle_aux_hidden_state_layer_ids",)}
        config |= {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    tensors = checkpoint(head, "midlayer." if layout == "midlayer" else "layers.0.")
    loaded = from_checkpoint(tensors | {"t2d": torch.ones(512, dtype=torch.bool)}, config, embedding, 2)
    assert loaded.layers == (0, 1, 2)
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"norm_before_fc": True}, {}, "norm_before_fc=True is a variant"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, {}, "must name 3 of the target's hidden states"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, {}, "hidden states 0 to 2"),
        ({"num_key_value_heads": 4}, {}, "k_proj.weight is of shape"),
        ({}, {"fc.weight": torch.zeros(64, 100)}, "no multiple of the target's hidden size"),
        ({}, {"d2t": torch.full((512,), 1000)}, "d2t leads to token 1511"),
        ({}, {"norm.weight": None}, "norm.weight is missing"),
        ({}, {"odd": torch.zeros(1)}, "does not have: odd"),
    ],
)
def test_wrong_checkpoints_are_refused_by_name(
    config: dict[str, Any], tensors: dict[str, Tensor | None], message: str
) -> None:
    head = random_head(2)
    found = {name: tensor for name, tensor in (checkpoint(head) | tensors).items() if tensor is not None}
    with pytest.raises(LoadError, match=message):
        from_checkpoint(found, CONFIG | config, head._embedding, 2)


def test_a_text_that_came_with_a_cache_gets_no_drafts() -> None:
    """The head was not shown its beginning."""
    head = EagleDrafter(random_head())
    session = load(tiny_model("llama"), drafter="none").submit([1, 2, 3], SamplingParams(max_new_tokens=2))
    head.read(session, 2, {layer: torch.zeros(1, 64) for layer in (0, 1, 2)})
    (tree,) = head.propose([session], [Budget(4, 4, True)])
    assert len(tree) == 1


def test_a_checkpoint_is_loaded_by_name(tmp_path: Path) -> None:
    """The same option as other heads; joined with what needs no training by default."""
    counter, head = counter_model(4), counter_eagle()
    shape = head.shape
    config = CONFIG | {
        "intermediate_size": shape.intermediate,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": shape.head_dim,
        "rope_theta": shape.rope_theta,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in checkpoint(head).items()}, tmp_path / "model.safetensors")
    result = load(counter, drafter="heads", heads=tmp_path, k=4).generate([5], SamplingParams(max_new_tokens=41))
    assert result.tokens == [(6 + i) % VOCAB for i in range(41)] and result.stats.num_verifications <= 10
    assert load(counter, heads=tmp_path).drafter.name == "suffix+recycle+eagle"


@pytest.mark.parametrize("fields", [{}, {"norm_before_residual": True}, {"norm_output": True}])
def test_unrolled_steps_are_those_of_drafting(fields: dict[str, Any]) -> None:
    """Step j of training, at every place, is what a chain of j + 1 drafts says there."""
    head = random_head(3, **fields)
    tokens = torch.randint(0, 512, (14,), generator=torch.Generator().manual_seed(0))
    mixed = torch.randn(14, 64, generator=torch.Generator().manual_seed(1))
    steps = unrolled(head, tokens, mixed, 4)
    assert [len(logits) for logits in steps] == [13, 12, 11, 10]
    for place in range(10):
        known = mixed[: place + 1]
        for step in range(4):
            count = place + 1 + step
            visible = torch.ones(count, count, dtype=torch.bool).tril()
            logits, out, _ = head(tokens[1 : 1 + count], known, torch.arange(count), EagleCache(), visible)
            known = torch.cat([known, out[-1:]])
            assert torch.allclose(steps[step][place], logits[-1], atol=1e-4)


def test_a_checkpoint_in_8_bits(tmp_path: Path) -> None:
    counter, head = counter_model(4), counter_eagle()
    save_heads(head, counter, tmp_path, {})
    engine = load(counter, drafter="heads", heads=tmp_path, k=4, draft_quantize="int8")
    result = engine.generate([5], SamplingParams(max_new_tokens=41))
    assert result.tokens == [(6 + i) % VOCAB for i in range(41)] and result.stats.num_verifications <= 10
