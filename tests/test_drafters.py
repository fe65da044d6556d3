"""Drafters that need no training: the contract, and what each of them finds."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from outpace import DraftError, InputError, LoadError, SamplingParams, load
from outpace.corpus import read_corpus
from outpace.drafters.base import Budget, Drafter
from outpace.drafters.candidates import Candidates
from outpace.drafters.early_exit import EarlyExitDrafter
from outpace.drafters.lookahead import JacobiDrafter, LookaheadDrafter
from outpace.drafters.memory import Memory
from outpace.drafters.recycle import RecycleDrafter, best_tokens
from outpace.drafters.suffix import SuffixDrafter
from outpace.drafters.texts import GrowingText, TextStore
from outpace.engine import Engine
from outpace.testing.contract import check_drafter
from outpace.testing.models import PROMPTS, noisy_copy, tiny_model
from outpace.testing.tokenizers import tiny_sentencepiece_tokenizer, tiny_tokenizer
from outpace.union import Calibration, UnionDrafter

MAKERS: dict[str, Callable[[Engine], Drafter]] = {
    "suffix": lambda engine: SuffixDrafter(),
    "lookup": lambda engine: SuffixDrafter(min_match=1, least_value=0.0, name="lookup"),
    "suffix with memory": lambda engine: SuffixDrafter(memory=Memory(1000)),
    "recycle": lambda engine: RecycleDrafter(engine.target.vocab_size),
    "jacobi": lambda engine: JacobiDrafter(),
    "lookahead": lambda engine: LookaheadDrafter(4, 3, 4),
    "early-exit": lambda engine: EarlyExitDrafter(engine.target, 1, 1, 0.0),
    "early-exit as a tree": lambda engine: EarlyExitDrafter(engine.target, 1, 2, 0.0),
    "union with early-exit": lambda engine: UnionDrafter(
        [SuffixDrafter(), EarlyExitDrafter(engine.target, 1, 1, 0.0)], engine.target.vocab_size
    ),
    "union": lambda engine: UnionDrafter(
        [SuffixDrafter(), RecycleDrafter(engine.target.vocab_size)], engine.target.vocab_size
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_drafter_keeps_the_contract(name: str) -> None:
    """T-A1: exact texts greedy and sampled, budgets, batches, catching up."""
    check_drafter(MAKERS[name])


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "lookahead" and "early-exit" not in name])
def test_every_drafter_keeps_the_contract_on_a_model_that_takes_chains(name: str) -> None:
    check_drafter(MAKERS[name], tiny_model("qwen3_next"))


def test_the_contract_finds_a_broken_drafter() -> None:
    class Greedy(SuffixDrafter):
        def propose(self, sessions: Any, budgets: Any) -> Any:
            return super().propose(sessions, [Budget(b.nodes + 1, b.depth + 1, b.can_branch) for b in budgets])

    class Sticky(RecycleDrafter):
        def release(self, session: Any) -> None:
            raise RuntimeError("never lets go")

    class Changing(JacobiDrafter):
        def propose(self, sessions: Any, budgets: Any) -> Any:
            found = super().propose(sessions, budgets)
            sessions[-1].tokens[0] += 1
            return found

    with pytest.raises(DraftError, match="more than the 1 asked for"):
        check_drafter(lambda engine: Greedy(min_match=1, least_value=0.0))
    with pytest.raises(RuntimeError, match="never lets go"):
        check_drafter(lambda engine: Sticky(512))
    with pytest.raises((AssertionError, DraftError), match="changes nothing of a session"):
        check_drafter(lambda engine: Changing())


# --------------------------------------------------------------------------------------------------
# Candidates


def test_candidates_grow_best_first_and_are_cut_to_the_budget() -> None:
    """Of a full binary tree with chances 0.7 and 0.3 the five likeliest nodes are kept."""
    found = Candidates(0)
    found.grow(Budget(5, 3, True), lambda node: [(1, 0.7, "a"), (2, 0.3, "b")])
    tree = found.best(Budget(5, 3, True))
    assert sorted(tree.value[1:], reverse=True) == pytest.approx([0.7, 0.49, 0.343, 0.3, 0.21])
    assert max(tree.depths()) == 3
    chain = found.best(Budget(5, 3, False))
    assert chain.is_chain and chain.tokens == (0, 1, 1, 1)


def test_equal_tokens_under_one_parent_are_one_node() -> None:
    found = Candidates(9)
    first = found.add(0, 4, 0.2, "a")
    assert found.add(0, 4, 0.5, "b") == first and found.values[first] == 0.5 and found.sources[first] == "b"


# --------------------------------------------------------------------------------------------------
# Texts


def test_a_growing_text_finds_its_ending_latest_first() -> None:
    text = GrowingText()
    text.extend([5, 6, 7, 1, 6, 7, 2, 5, 6, 7])
    found = text.find(text.tokens, least=2)
    # The place after 1 ends in 6 7 only; the first one has 5 6 7.
    assert [(place.start, place.match) for place in found] == [(6, 2), (3, 3)]
    assert [found[1].token(i) for i in range(8)] == [1, 6, 7, 2, 5, 6, 7, 1], "a copy goes on with itself"


def test_a_store_finds_endings_in_open_and_sorted_texts_and_forgets_the_oldest() -> None:
    store = TextStore(max_tokens=60_000)
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 1000, 3000).tolist() for _ in range(30)]
    for text in texts:
        store.add(text)
    assert len(store) <= 60_000
    for text in texts[-10:]:
        (place,) = store.find(text[100:120], least=3)
        assert [place.token(i) for i in range(5)] == text[120:125] and place.match >= 12
    assert store.find(texts[0][100:120], least=12) == []
    (end,) = store.find(texts[-1][-20:], least=3)
    assert end.token(0) is None, "nothing is copied over the end of a text"


class _Words:
    """A tokenizer as far as a memory asks: its words."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self._words)}


def test_a_memory_is_saved_and_loaded_with_its_tenants(tmp_path: Any) -> None:
    file, tokenizer = tmp_path / "new folder" / "memory.safetensors", _Words("a", "b")
    memory = Memory()
    memory.add("one", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    memory.add("two", [3, 4, 5, 6, 11])
    memory.save(file, tokenizer)
    again = Memory()
    again.load(file, tokenizer)
    assert len(again) == len(memory) == 16
    for tenant, follows in (("one", 7), ("two", 11)):
        store = again.of(tenant)
        assert store is not None
        assert [place.token(0) for place in store.find([3, 4, 5, 6], least=3)] == [follows]
    assert again.of("three") is None
    with pytest.raises(LoadError, match="another tokenizer"):
        again.load(file, _Words("b", "a"))
    file.write_bytes(b"no texts")
    with pytest.raises(LoadError, match="cannot be read"):
        again.load(file, tokenizer)
    save_file({"0": np.zeros(3)}, str(file))
    with pytest.raises(LoadError, match="no texts of outpace"):
        again.load(file, tokenizer)
    assert len(again) == 16, "what was there is still there"
    again.forget("one")
    assert len(again) == 6


def test_a_memory_is_bounded_over_all_its_tenants() -> None:
    memory = Memory(max_tokens=100)
    memory.add("old", [1] * 40)
    memory.add("busy", [2] * 40)
    memory.add("old", [3] * 15)
    memory.add("new", [4] * 20)
    assert len(memory) <= 100
    assert memory.of("busy") is None, "the tenant that wrote least recently goes first"
    assert memory.of("old") is not None and memory.of("new") is not None


# --------------------------------------------------------------------------------------------------
# Suffix


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def test_an_earlier_output_is_copied_within_its_tenant_only(model: Any) -> None:
    engine = load(model, drafter="suffix", memory=10_000, k=8)
    params = SamplingParams(max_new_tokens=40)
    first = engine.generate(list(PROMPTS[2]), params)
    again = engine.generate(list(PROMPTS[2]), params)
    other = engine.generate(list(PROMPTS[2]), SamplingParams(max_new_tokens=40, tenant="other"))
    assert first.tokens == again.tokens == other.tokens
    assert again.stats.num_accepted_tokens >= first.stats.num_accepted_tokens + 20
    assert other.stats.num_accepted_tokens == first.stats.num_accepted_tokens


def test_a_prediction_is_copied_and_does_not_change_the_text(model: Any) -> None:
    """T-O1: right, wrong in the middle, wrong, empty: the same text, in fewer passes where it is right."""
    engine = load(model, drafter="suffix", k=8)

    def run(prediction: Any) -> Any:
        return engine.generate(list(PROMPTS[0]), SamplingParams(max_new_tokens=40, prediction=prediction))

    plain = run(())
    right, wrong = run(plain.tokens), run([7, 8, 9] * 10)
    edited = run([*plain.tokens[:15], 499, *plain.tokens[16:]])
    assert right.tokens == wrong.tokens == edited.tokens == plain.tokens
    assert right.stats.num_verifications <= 6
    assert edited.stats.num_verifications <= 12 < plain.stats.num_verifications


def test_a_corpus_is_copied_from(model: Any) -> None:
    text = load(model, drafter="none").generate(list(PROMPTS[2]), SamplingParams(max_new_tokens=40)).tokens
    store = TextStore()
    store.add(text)
    engine = load(model, drafter="suffix", corpus=store, k=8)
    result = engine.generate(list(PROMPTS[2]), SamplingParams(max_new_tokens=40))
    assert result.tokens == text and result.stats.num_accepted_tokens >= 20


# --------------------------------------------------------------------------------------------------
# Recycle, lookahead, union


@pytest.mark.parametrize("vocab", [40, 1000, 50_000])
def test_the_best_tokens_are_those_of_topk(vocab: int) -> None:
    scores = torch.randn(5, vocab, generator=torch.Generator().manual_seed(0))
    values, ids = best_tokens(scores, 8)
    wanted = scores.topk(8)
    assert torch.equal(values, wanted.values) and torch.equal(ids, wanted.indices)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recycling_knows_a_text_that_the_target_has_written(model: Any, temperature: float) -> None:
    engine = load(model, drafter="recycle", k=16)
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=1)
    cold, warm = (engine.generate(list(PROMPTS[0]), params) for _ in range(2))
    assert cold.tokens == warm.tokens
    assert warm.stats.num_accepted_tokens >= cold.stats.num_accepted_tokens + 15


def test_lookahead_collects_n_grams_of_the_targets_own_choices() -> None:
    """On a model that repeats itself, the window finds the period and guesses are accepted."""
    model = tiny_model("gpt2", seed=1, sharpness=1.0)
    engine = load(model, drafter="lookahead", lookahead=(5, 3, 5))
    assert engine.options.k == (5 + 5) * (3 - 1)
    result = engine.generate(list(PROMPTS[1]), SamplingParams(max_new_tokens=60))
    plain = load(model, drafter="none").generate(list(PROMPTS[1]), SamplingParams(max_new_tokens=60))
    assert result.tokens == plain.tokens
    assert result.stats.num_accepted_tokens >= 10


def test_lookahead_is_refused_where_only_chains_can_be_verified() -> None:
    with pytest.raises(LoadError, match="needs trees"):
        load(tiny_model("qwen3_next"), drafter="lookahead")


def test_a_union_accepts_at_least_nearly_what_its_best_source_does(model: Any) -> None:
    """Per prompt, warm: with the tree cut to the budget, the right source's nodes are the ones that stay."""
    params = SamplingParams(max_new_tokens=60)

    def accepted(drafter: Any) -> list[int]:
        engine = load(model, drafter=drafter, k=6)
        for prompt in PROMPTS:
            engine.generate(list(prompt), params)
        return [engine.generate(list(prompt), params).stats.num_accepted_tokens for prompt in PROMPTS]

    best = [max(pair) for pair in zip(accepted("suffix"), accepted("recycle"), strict=True)]
    union = accepted("suffix+recycle")
    assert sum(union) >= 0.95 * sum(best) and sum(best) > 40


def test_a_union_with_a_draft_model(model: Any) -> None:
    engine = load(model, drafter="suffix+model", draft_model=noisy_copy(model), k=6)
    plain = load(model, drafter="none")
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=2)
        result = engine.generate(list(PROMPTS[1]), params)
        assert result.tokens == plain.generate(list(PROMPTS[1]), params).tokens
        assert result.stats.num_accepted_tokens >= 5 and result.stats.num_draft_failures == 0


def test_counts_pull_a_claim_to_what_was_seen() -> None:
    calibration = Calibration(trust=1.0)
    assert calibration.chance("suffix m2", 1, 0.9) == pytest.approx(0.9)
    for index in range(100):
        calibration.count("suffix m2", 1, is_hit=False, own=0.9)
        calibration.count("suffix m9", 1, is_hit=index % 10 > 0, own=0.9)
    assert calibration.chance("suffix m2", 1, 0.9) < 0.06
    assert calibration.chance("suffix m9", 1, 0.5) == pytest.approx(0.9, abs=0.05)
    assert calibration.chance("suffix m2", 2, 0.9) > 5 * calibration.chance("suffix m2", 1, 0.9), "by depth"


def test_a_new_kind_of_a_drafter_that_promises_too_much_is_not_hoped_for() -> None:
    calibration = Calibration(trust=0.7)
    assert calibration.chance("suffix m2", 1, 0.9) == pytest.approx(0.63)
    for _ in range(50):
        calibration.count("suffix m2", 1, is_hit=False, own=0.8)
        calibration.count("recycle r0", 1, is_hit=True, own=0.5)
    assert calibration.chance("suffix m8", 1, 0.9) < 0.05
    assert calibration.chance("recycle r1", 1, 0.4) == pytest.approx(0.8, abs=0.05)
    assert calibration.chance("other", 1, 0.9) == pytest.approx(0.63)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "suffix+nothing"}, "drafter must be auto"),
        ({"drafter": "suffix+suffix"}, "names one twice"),
        ({"drafter": "none+suffix"}, "joins none"),
        ({"drafter": "recycle", "memory": 5}, "memory=5 was given"),
        ({"drafter": "suffix", "lookahead": (1, 2, 3)}, r"lookahead=\(1, 2, 3\) was given"),
        ({"drafter": "lookahead", "lookahead": (0, 2, 3)}, "window must be"),
        ({"drafter": "suffix+recycle", "acceptance": "rejection"}, "coupled"),
        ({"corpus": "/nowhere/at/all"}, "tokenizer"),
        ({"memory": -1}, "memory must be"),
        ({"draft_model": "x", "draft_quantize": "int4"}, "no faster than 8"),
    ],
    ids=str,
)
def test_bad_wishes_are_refused_by_name(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(model, **options)


# --------------------------------------------------------------------------------------------------
# Two tokenizers


def moved(tokenizer: Any, count: int) -> Any:
    """The tokenizer with its last `count` entries in another order."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = state["model"]["vocab"]
    size = len(vocab)
    state["model"]["vocab"] = {
        word: index if index < size - count else size - count + (index - (size - count) + 7) % count
        for word, index in vocab.items()
    }
    other = copy.deepcopy(tokenizer)
    other._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
    return other


def in_other_ids(model: Any, tokenizer: Any, other: Any) -> Any:
    """The model with the rows of its embedding and head where the other tokenizer has the same tokens."""
    twin, words = copy.deepcopy(model), other.get_vocab()
    order = [index for _, index in sorted((words[word], index) for word, index in tokenizer.get_vocab().items())]
    with torch.no_grad():
        for layer in (twin.get_input_embeddings(), twin.get_output_embeddings()):
            layer.weight[: len(order)] = layer.weight[order].clone()
    return twin


@pytest.mark.parametrize("vocabularies", ["text", "shared"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_with_the_same_words_under_other_ids(vocabularies: Any, temperature: float) -> None:
    """The draft is the target in other ids: what it drafts is right whenever the translation is."""
    ours = tiny_tokenizer()
    theirs = moved(ours, 100)
    target = tiny_model("llama", vocab=len(ours))
    draft = in_other_ids(target, ours, theirs)
    options = {"tokenizer": ours, "draft_model": draft, "draft_tokenizer": theirs, "k": 5, "confidence_threshold": 0.0}
    with pytest.raises(LoadError, match="vocabularies="):
        load(target, **options)
    engine = load(target, vocabularies=vocabularies, **options)
    plain = load(target, tokenizer=ours, drafter="none")
    num_drafted = num_accepted = 0
    for seed, prompt in enumerate(["The cat sat on the mat and", "x = x + 1\n", "one two three four"]):
        params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=seed)
        result = engine.generate(prompt, params)
        assert result.tokens == plain.generate(prompt, params).tokens
        assert result.stats.num_draft_failures == 0
        num_drafted += result.stats.num_drafted_tokens
        num_accepted += result.stats.num_accepted_tokens
    if vocabularies == "shared":
        assert num_accepted == num_drafted >= 80, "the noise is that of the target's ids"
    else:  # random bytes are mostly no text; and a text does not know the target's noise
        assert num_drafted >= 10 and num_accepted >= (1 if temperature == 0 else 0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_of_an_unrelated_tokenizer(temperature: float) -> None:
    """T-G3, asked for: the plain text; the draft model is a stranger, so little is accepted."""
    ours, theirs = tiny_tokenizer(), tiny_sentencepiece_tokenizer()
    target, draft = tiny_model("llama", vocab=len(ours)), tiny_model("llama", vocab=len(theirs), seed=3)
    engine = load(target, tokenizer=ours, draft_model=draft, draft_tokenizer=theirs, vocabularies="text", k=5)
    plain = load(target, tokenizer=ours, drafter="none")
    num_drafted = 0
    for seed, prompt in enumerate(["The cat sat on the mat and", "x = x + 1\n", "ünïcödé 漢字 🙂"]):
        params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=seed)
        result = engine.generate(prompt, params)
        assert result.tokens == plain.generate(prompt, params).tokens
        assert result.stats.num_draft_failures == 0
        num_drafted += result.stats.num_drafted_tokens
    assert num_drafted >= 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafting_for_itself_in_8_bits_leaves_the_model_as_it_is(dtype: torch.dtype) -> None:
    """T-K3: weights, in their own precision, bit for bit."""
    model = tiny_model("llama").to(dtype)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    load(model, drafter="self").generate(list(PROMPTS[1]), SamplingParams(max_new_tokens=4))
    after = model.state_dict()
    assert all(
        weight.dtype == before[name].dtype and torch.equal(weight, before[name]) for name, weight in after.items()
    )


# --------------------------------------------------------------------------------------------------
# Files of a user


def test_a_corpus_is_read_from_a_folder_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    tokenizer = tiny_tokenizer()
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    (folder / "a.txt").write_text("the lazy dog sleeps under the old tree", encoding="utf-8")
    (folder / "below" / "b.py").write_text("def fox(): return 'quick'", encoding="utf-8")
    (folder / "image.bin").write_bytes(b"\0\1\2")
    (folder / ".hidden").write_text("nobody reads this", encoding="utf-8")
    read: list[str] = []

    def progress(text: str, _done: int, _total: int | None) -> None:
        read.append(text)

    store = read_corpus(folder, tokenizer, progress=progress)
    assert len(read) == 3 and "Reading .hidden" not in read
    ending = tokenizer("the lazy dog", add_special_tokens=False)["input_ids"]
    follows = tokenizer("the lazy dog sleeps", add_special_tokens=False)["input_ids"][len(ending)]
    assert [place.token(0) for place in store.find(ending, 2)] == [follows]
    again = read_corpus(folder, tokenizer, progress=progress)
    assert len(read) == 3 and len(again) == len(store), "found in the cache folder"
    for cached in (tmp_path / "cache").rglob("*.safetensors"):
        cached.write_bytes(b"damaged")
    read_corpus(folder, tokenizer, progress=progress)
    assert len(read) == 6
    (folder / "c.txt").write_text("and one more", encoding="utf-8")
    assert len(read_corpus(folder, tokenizer, progress=progress)) > len(store)


def test_a_corpus_without_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "image.bin").write_bytes(b"\0\1\2")
    for path, message in (
        (tmp_path / "nothing", "no such file"),
        (tmp_path / "image.bin", "holds no UTF-8 text"),
    ):
        with pytest.raises(InputError, match=message):
            read_corpus(path, tiny_tokenizer())
    with pytest.raises(InputError, match="needs the model's tokenizer"):
        read_corpus(tmp_path, None)


def test_a_corpus_of_tenants_is_not_shared(tmp_path: Path) -> None:
    tokenizer, file = tiny_tokenizer(), tmp_path / "memory.safetensors"
    memory = Memory()
    memory.add("a tenant", [1, 2, 3, 4])
    memory.save(file, tokenizer)
    with pytest.raises(InputError, match="only texts of tenants"):
        read_corpus(file, tokenizer)
    memory.add("", [1, 2, 3, 5])
    memory.save(file, tokenizer)
    assert [place.token(0) for place in read_corpus(file, tokenizer).find([1, 2, 3], 2)] == [5]
