"""Vocabularies that differ: a draft never proposes what the target does not have, and the text stays the target's."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from reference import MIXED, REPEATED, guard, params, plain, tokenizer
from transformers import PreTrainedTokenizerFast

import outpace
from outpace import InputError, LoadError
from outpace.drafters.model import ModelDrafter
from outpace.session import Session
from outpace.testing.models import tiny_model
from outpace.testing.tokenizers import tiny_sentencepiece_tokenizer
from outpace.tree import TokenTree

NUM_TOKENS = len(tokenizer())
PROMPTS = ([token % NUM_TOKENS for token in MIXED], [token % NUM_TOKENS for token in REPEATED])


def fitted(target: Any, rows: int) -> Any:
    """The target as its own draft, with an embedding of another number of rows: shared ones equal, others loud."""
    draft = copy.deepcopy(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draft.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for weight in (draft.get_input_embeddings().weight, draft.get_output_embeddings().weight):
            weight[target.vocab_size :] = 5.0  # the draft's favourites, were they not kept out
    return draft


class Watched(ModelDrafter):
    """Notes the largest id that it ever drafted."""

    largest = 0

    def propose(self, sessions: Any, budgets: Any) -> Any:
        trees: list[TokenTree] = list(super().propose(sessions, budgets))
        self.largest = max([self.largest, *(token for tree in trees for token in tree.tokens[1:])])
        return trees

    def release(self, session: Session) -> None:
        super().release(session)


def watch(engine: outpace.Engine) -> Watched:
    """Swaps the engine's draft model drafter for one of the same settings that takes notes."""
    drafter: Any = engine.drafter
    assert type(drafter) is ModelDrafter
    drafter.__class__ = Watched
    return drafter  # type: ignore[no-any-return]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(("target_rows", "draft_rows"), [(512, 576), (512, 400), (400, 512), (512, NUM_TOKENS)])
def test_embeddings_of_different_sizes_go_together(target_rows: int, draft_rows: int, width: int) -> None:
    """T-G1: padded rows do not matter; nothing at or above the tokenizer's size is drafted, and drafts are accepted."""
    target = tiny_model("llama", vocab=target_rows)
    draft = fitted(target, draft_rows)
    assert draft.get_output_embeddings().out_features == draft_rows
    found = outpace.load(
        target, tokenizer=tokenizer(), draft_model=draft, draft_tokenizer=tokenizer(), k=6, width=width
    )
    watched = watch(found)
    for prompt in PROMPTS:
        wanted = plain(target, prompt, 40)
        guard(target, prompt, wanted)
        result = found.generate(prompt, params(40))
        assert result.tokens == wanted
        assert result.stats.num_accepted_tokens >= 5 and result.stats.num_draft_failures == 0
        sampled = found.generate(prompt, params(20, temperature=1.0, seed=1))
        plain_sampled = outpace.load(target, drafter="none").generate(prompt, params(20, temperature=1.0, seed=1))
        assert sampled.tokens == plain_sampled.tokens
    assert 0 < watched.largest < NUM_TOKENS


@pytest.mark.parametrize("rows", [512, 400])
def test_the_ratio_test_is_fed_with_whole_distributions(rows: int) -> None:
    """T-G1: a draft of another size has a q over the target's vocabulary; no draft breaks its contract."""
    target = tiny_model("llama")
    found = outpace.load(
        target,
        tokenizer=tokenizer(),
        draft_model=fitted(target, rows),
        draft_tokenizer=tokenizer(),
        acceptance="rejection",
        width=2,
    )
    for seed in range(3):
        result = found.generate(PROMPTS[0], params(20, temperature=1.0, seed=seed))
        assert result.stats.num_draft_failures == 0 and result.stats.num_drafted_tokens > 0


def swapped(count: int) -> PreTrainedTokenizerFast:
    """The tokenizer with `count` entries in another order: 20 -> 21 -> … -> 20 + count - 1 -> 20."""
    own = tokenizer()
    renamed = copy.deepcopy(own)
    vocab = own.get_vocab()
    names = sorted(vocab, key=lambda token: vocab[token])
    moved = names[20 : 20 + count]
    for index, name in zip(range(20, 20 + count), [*moved[1:], moved[0]], strict=True):
        vocab[name] = index
    renamed.get_vocab = lambda: vocab
    return renamed  # type: ignore[no-any-return]


def test_a_draft_tokenizer_with_three_other_entries_is_used_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """T-G2: one warning with the count and an example; the text is the same."""
    target = tiny_model("llama")
    with caplog.at_level(logging.WARNING, logger="outpace"):
        found = outpace.load(
            target,
            tokenizer=tokenizer(),
            draft_model=fitted(target, 512),
            draft_tokenizer=swapped(3),
        )
    (record,) = caplog.records
    assert f"3 of {NUM_TOKENS} tokens differ" in record.message and "the first is 20: " in record.message
    result = found.generate(PROMPTS[0], params(40))
    assert result.tokens == plain(target, PROMPTS[0], 40) and result.stats.num_accepted_tokens >= 5


def test_an_unrelated_tokenizer_is_refused_before_the_first_pass() -> None:
    """T-G3: with both sizes, how many entries differ and an example, and what to do instead."""
    target, draft = tiny_model("llama"), tiny_model("llama", seed=1)
    other = tiny_sentencepiece_tokenizer()
    for draft_tokenizer, size in ((other, len(other)), (swapped(40), NUM_TOKENS)):
        with pytest.raises(LoadError, match="does not match") as error:
            outpace.load(target, tokenizer=tokenizer(), draft_model=draft, draft_tokenizer=draft_tokenizer)
        for part in (f"target ({NUM_TOKENS} tokens)", f"draft ({size} tokens)", "vocabularies='text'"):
            assert part in str(error.value)
        assert "\n" not in str(error.value)


def test_sizes_that_differ_need_both_tokenizers() -> None:
    """T-G3: without them nobody can tell whether the ids mean the same; with one size they are taken to."""
    target = tiny_model("llama")
    with pytest.raises(LoadError, match="512 token ids and the draft 576"):
        outpace.load(target, draft_model=fitted(target, 576))
    with pytest.raises(LoadError, match="draft_tokenizer="):
        outpace.load(target, tokenizer=tokenizer(), draft_model=fitted(target, 576))
    assert outpace.load(target, draft_model=fitted(target, 512)).generate([1], params(4)).tokens


def test_tokens_that_were_added_to_the_target_only_do_not_matter() -> None:
    """T-G6: the target resized by eight after training, the draft not; the new tokens may be prompted and emitted."""
    added = copy.deepcopy(tokenizer())
    assert added.add_tokens([f"<new {index}>" for index in range(8)]) == 8
    draft = tiny_model("llama", vocab=NUM_TOKENS)
    target = fitted(draft, NUM_TOKENS + 8)
    with torch.no_grad():  # one of the new tokens takes the place of a token that the text would have
        head, embedding = target.get_output_embeddings().weight, target.get_input_embeddings().weight
        head[NUM_TOKENS:], embedding[NUM_TOKENS:] = 0, embedding[:8]
        head[NUM_TOKENS + 3] = head[plain(draft, PROMPTS[0], 40)[5]] * 1.2
    prompt = [*PROMPTS[0], NUM_TOKENS + 3, NUM_TOKENS + 7, 5]
    for width in (1, 3):
        found = outpace.load(target, tokenizer=added, draft_model=draft, draft_tokenizer=tokenizer(), width=width, k=6)
        num_accepted = num_new = 0
        for start in (prompt, PROMPTS[0], PROMPTS[1]):
            wanted = plain(target, start, 60)
            result = found.generate(start, params(60))
            assert result.tokens == wanted
            assert result.stats.num_draft_failures == 0
            num_accepted += result.stats.num_accepted_tokens
            num_new += sum(token >= NUM_TOKENS for token in wanted)
        assert num_accepted >= 5 and num_new >= 1


def test_a_draft_without_an_embedding_for_a_token_drafts_on() -> None:
    """T-G6: an id that the draft model does not know costs good drafts at most, never an error."""
    target = tiny_model("llama")
    draft = fitted(target, 400)
    found = outpace.load(target, tokenizer=tokenizer(), draft_model=draft, draft_tokenizer=tokenizer(), k=6)
    prompt = [*PROMPTS[0], 511, 450, 3]
    result = found.generate(prompt, params(40))
    assert result.tokens == plain(target, prompt, 40)
    assert result.stats.num_draft_failures == 0 and result.stats.num_drafted_tokens > 0


def test_a_prompt_beyond_the_embedding_is_refused() -> None:
    """T-G1: by the id and the size of the vocabulary, before the model fails on it."""
    with pytest.raises(InputError, match="token id 512, outside the vocabulary of 512"):
        outpace.load(tiny_model("llama")).generate([1, 512], params(4))
