"""Context: the model's own limits hold, of the smaller of target and draft; windows, states and long prompts too."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from reference import (
    FAMILIES,
    METHODS,
    MIXED,
    ONE,
    REPEATED,
    STATE_FAMILIES,
    assert_drafts_were_mixed,
    engine,
    full_texts,
    greedy,
    guard,
    model,
    noisy,
    params,
    plain,
    sure,
)
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, T5Config

import outpace
from outpace import InputError, LoadError
from outpace.drafters.model import ModelDrafter
from outpace.target import Target
from outpace.testing import drafters
from outpace.testing.models import tiny_model, with_noise

# --------------------------------------------------------------------------------------------------
# Positions


def short_draft(target: Any, positions: int) -> Any:
    """A GPT-2 with the target's weights and fewer positions."""
    draft = tiny_model("gpt2", n_positions=positions)
    weights = target.state_dict()
    draft.load_state_dict({name: weights[name][: len(own)] for name, own in draft.state_dict().items()})
    return draft


class Positions:
    """The positions that a model was asked about, by a hook on its forward."""

    def __init__(self, model: nn.Module) -> None:
        self.largest = -1
        self.num_forwards = 0
        self.handle = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.num_forwards += 1
        self.largest = max(self.largest, int(options["position_ids"].max()))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("width", [1, 3])
def test_a_draft_model_with_fewer_positions_drafts_as_far_as_it_can(
    width: int, acceptance: Any, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    """T-H1: 64 and 48 positions, a prompt of 40, 20 new tokens; one warning, and no position at or above 48."""
    target = tiny_model("gpt2", n_positions=64)
    draft = short_draft(target, 48)
    found = outpace.load(target, draft_model=draft, width=width, k=6, acceptance=acceptance)
    positions = Positions(draft)
    settings = params(20, temperature=temperature, seed=1)
    with caplog.at_level(logging.WARNING, logger="outpace"):
        for _ in range(2):
            result = found.generate(list(REPEATED), settings)
            assert len(result.tokens) == 20
            assert result.stats.num_draft_failures == 0 and result.stats.num_accepted_tokens >= 3
            if temperature == 0 or acceptance == "coupled":
                assert result.tokens == outpace.load(target, drafter="none").generate(list(REPEATED), settings).tokens
    (record,) = caplog.records
    assert "The draft model has 48 positions" in record.message
    assert 40 < positions.largest < 48
    assert plain(target, REPEATED, 20) == found.generate(list(REPEATED), params(20)).tokens


def test_rows_beyond_the_draft_models_positions_go_on_beside_others() -> None:
    """T-H1: a prompt that is longer than the draft model's context is decoded plainly, in a batch with shorter ones."""
    target = tiny_model("gpt2", n_positions=64)
    draft = short_draft(target, 30)
    found = outpace.load(target, draft_model=draft, k=6)
    positions = Positions(draft)
    prompts = [list(REPEATED), list(MIXED), list(MIXED[:29]), list(ONE)]
    results = found.generate(prompts, params(24))
    assert [result.tokens for result in results] == [plain(target, prompt, 24) for prompt in prompts]
    drafted = [result.stats.num_drafted_tokens for result in results]
    assert drafted[0] == 0 and drafted[3] > 0 and positions.largest < 30
    assert all(result.stats.num_draft_failures == 0 for result in results)


@pytest.mark.parametrize("method", METHODS)
def test_the_last_positions_can_be_used_to_the_end(method: str) -> None:
    """T-H3: a prompt of 60 of 64 positions and 4 new tokens, K = 16; no draft reaches over the end."""
    prompt = (*REPEATED, *MIXED[:20])
    for family, option in (("gpt2", "n_positions"), ("llama", "max_position_embeddings"), ("opt", None)):
        target = tiny_model(family, **{option or "max_position_embeddings": 64})
        if method in ("itself", "noisy", "noisy trees", "other", "other trees"):
            draft: dict[str, Any] = {"draft_model": with_noise(target, 0.05), "width": 3 if "trees" in method else 1}
        elif method == "sure":
            draft = {"drafter": ModelDrafter(Target(target), 512, 512, 1, confidence_threshold=0.0)}
        else:
            draft = METHODS[method](family, [(*prompt, *plain(target, prompt, 4))])
        found = outpace.load(target, **draft, k=16)
        result = found.generate(list(prompt), params(4))
        assert result.tokens == plain(target, prompt, 4) and result.stats.num_draft_failures == 0
        with pytest.raises(InputError, match="max_new_tokens to 4 or less"):
            found.generate(list(prompt), params(5))


# --------------------------------------------------------------------------------------------------
# Windows


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("mistral", "sdpa"),
        ("mistral", "eager"),
        ("gemma3", "sdpa"),
        ("gemma3", "eager"),
        ("gemma2", "eager"),
        ("gpt-oss", "eager"),
    ],
)
def test_texts_that_grow_over_the_window_are_those_of_plain_decoding(family: str, attention: str) -> None:
    """T-H5: window 16, prompts of 5, 15, 16, 17 and 60 tokens, 100 new ones, alone and in one batch."""
    target = tiny_model(family, attn_implementation=attention)
    numbers = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 512, (size,), generator=numbers).tolist() for size in (5, 15, 16, 17, 60)]
    wanted = [plain(target, prompt, 100) for prompt in prompts]
    for prompt, tokens in zip(prompts, wanted, strict=True):
        guard(target, prompt, tokens)
    texts = [(*prompt, *tokens) for prompt, tokens in zip(prompts, wanted, strict=True)]
    ways: list[dict[str, Any]] = [
        {"draft_model": noisy(family), "width": 3, "k": 6},
        {"drafter": drafters.random_trees(512, texts, share_right=0.8), "k": 20},
        {"drafter": drafters.random_trees(512, texts, share_right=0.8), "k": 3, "prefill_chunk": 7},
    ]
    for way in ways:
        results = outpace.load(target, **way).generate(prompts, params(100))
        assert [result.tokens for result in results] == wanted
        assert_drafts_were_mixed(*(result.stats for result in results))
    alone = outpace.load(target, drafter=drafters.oracle(texts), k=20)
    assert [alone.generate(prompt, params(100)).tokens for prompt in prompts] == wanted


# --------------------------------------------------------------------------------------------------
# Models with states


def test_a_model_whose_state_cannot_be_checked_in_one_pass_is_refused() -> None:
    """T-H7: Mamba's several tokens over a state are silently wrong; the refusal is at load and says what to use."""
    for draft in (False, True):
        with pytest.raises(LoadError) as error:
            if draft:
                outpace.load(tiny_model("llama"), draft_model=tiny_model("mamba"))
            else:
                outpace.load(tiny_model("mamba"))
        assert "transformers' own generate" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("family", STATE_FAMILIES)
@pytest.mark.parametrize("k", [1, 2, 5, 16])
def test_models_with_states_give_the_plain_text(family: str, k: int) -> None:
    """T-H7: drafts that are all right, partly right and all wrong, for a batch of rows; and trees are refused."""
    prompts = (MIXED, ONE, REPEATED)
    texts = full_texts(family, prompts, 32)
    wanted = [greedy(family, prompt, 32) for prompt in prompts]
    for drafter in (drafters.oracle(texts), drafters.random_trees(512, texts), drafters.always_wrong(texts, 512)):
        found = outpace.load(model(family), drafter=drafter, k=k)
        assert not found.capabilities.can_tree
        results = found.generate([list(prompt) for prompt in prompts], params(32))
        assert [result.tokens for result in results] == wanted
    with pytest.raises(InputError, match="one of the models can only take chains"):
        outpace.load(model(family), draft_model=noisy(family), width=2)


@pytest.mark.parametrize("family", ["llama", "bloom", *STATE_FAMILIES])
def test_a_draft_model_that_is_the_target_is_never_refused(family: str) -> None:
    """T-H7: its cache or state is rewound exactly; rows leave at different times. A refused draft would be a bug."""
    for target, draft_family in ((family, family), (family, "llama"), ("llama", family)):
        found = outpace.load(model(target), drafter=sure(draft_family), k=4)
        prompts = (ONE, MIXED, REPEATED)
        settings = [params(count) for count in (3, 9, 32)]
        results = found.generate([list(prompt) for prompt in prompts], settings)
        for prompt, result in zip(prompts, results, strict=True):
            assert result.tokens == greedy(target, prompt, 32)[: len(result.tokens)]
            assert result.stats.num_draft_failures == 0
            if draft_family == target:
                assert result.stats.num_rejected_tokens == 0
        assert results[2].stats.num_drafted_tokens > 8


def test_models_that_are_no_decoders_are_refused() -> None:
    """T-H7: encoder-decoder models, models in training mode, and what is no model at all, each with what to do."""
    shape = {"d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16, "vocab_size": 64}
    config = T5Config(**shape, decoder_start_token_id=0)
    assert isinstance(AutoConfig.for_model("t5"), T5Config)
    with pytest.raises(LoadError, match="encoder-decoder"):
        outpace.load(AutoModelForSeq2SeqLM.from_config(config).eval())
    with pytest.raises(LoadError, match=r"model.eval\(\)"):
        outpace.load(tiny_model("llama").train())
    with pytest.raises(LoadError, match="transformers causal language model is needed, got Linear"):
        outpace.load(nn.Linear(2, 2))


# --------------------------------------------------------------------------------------------------
# Long prompts


class LogitRows:
    """For how many positions a model's output layer computed scores, call by call."""

    def __init__(self, model: Any) -> None:
        self.counts: list[int] = []
        model.get_output_embeddings().register_forward_hook(self._note)

    def _note(self, module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        self.counts.append(output.shape[-2])


def test_a_prompt_of_3000_tokens_is_read_in_chunks_without_its_scores() -> None:
    """T-H5: as in one pass, in bounded memory; scores are computed for a few positions only."""
    target = tiny_model("llama", max_position_embeddings=4096)
    prompt = torch.randint(0, 512, (3000,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = plain(target, prompt, 24)
    guard(target, prompt, wanted)
    texts = [(*prompt, *wanted)]
    rows = LogitRows(target)
    for chunk, num_passes in ((512, 5), (4096, 0), (1000, 2)):
        found = outpace.load(target, drafter=drafters.random_trees(512, texts), k=6, prefill_chunk=chunk)
        rows.counts.clear()
        result = found.generate(prompt, params(24))
        assert result.tokens == wanted and result.stats.num_prefill_passes == num_passes
        assert max(rows.counts) <= 7
        assert len(rows.counts) == num_passes + result.stats.num_verifications
    draft = tiny_model("llama", max_position_embeddings=4096)
    rows = LogitRows(draft)
    found = outpace.load(target, draft_model=draft, k=6)
    rows.counts.clear()
    result = found.generate(prompt, params(24))
    assert result.tokens == wanted and result.stats.num_rejected_tokens == 0
    assert max(rows.counts) == 1


def test_a_long_prompt_joins_rows_that_are_being_decoded() -> None:
    """T-H5: its chunks and their trees share steps; every row gets its own text."""
    target = tiny_model("mistral", max_position_embeddings=4096)
    prompt = torch.randint(0, 512, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [list(MIXED), prompt, list(ONE)]
    wanted = [plain(target, one, 40) for one in prompts]
    texts = [(*one, *tokens) for one, tokens in zip(prompts, wanted, strict=True)]
    rows = LogitRows(target)
    found = outpace.load(target, drafter=drafters.random_trees(512, texts), k=6, prefill_chunk=64)
    rows.counts.clear()
    sessions = [found.submit(prompts[0], params(40))]
    for _ in range(3):
        found.step()
    sessions += [found.submit(one, params(40)) for one in prompts[1:]]
    while any(not session.is_finished for session in sessions):
        found.step()
    assert [session.new_tokens for session in sessions] == wanted
    assert max(rows.counts) <= 64


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_model_reads_its_prompt_in_chunks(family: str) -> None:
    """T-H5: chunks of 11 tokens, which cut windows and states in the middle; never scores of a whole chunk."""
    prompt = (*REPEATED, *MIXED)
    wanted = greedy(family, prompt, 16)
    target = tiny_model(family)
    rows = LogitRows(target)
    found = outpace.load(target, drafter="none", prefill_chunk=11)
    rows.counts.clear()
    result = found.generate(list(prompt), params(16))
    assert result.tokens == wanted and result.stats.num_prefill_passes == 6
    assert set(rows.counts) == {1}
    texts = [(*prompt, *wanted)]
    assert (
        engine(family, "random trees", texts, k=5, prefill_chunk=11).generate(list(prompt), params(16)).tokens == wanted
    )
