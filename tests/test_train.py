"""Training heads: losses fall, the model stays as it was, bad data stops with a reason, killed runs go on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from outpace import InputError, LoadError, SamplingParams, TrainingError, load
from outpace.cli import app
from outpace.drafters.eagle import EagleDrafter
from outpace.drafters.heads import MarkovDrafter
from outpace.heads.eagle import EagleLayer, EagleShape
from outpace.heads.files import save_heads
from outpace.heads.markov import MarkovHeads
from outpace.target import Target
from outpace.testing.counter import VOCAB, counter_model
from outpace.testing.models import tiny_model
from outpace.testing.tokenizers import tiny_tokenizer
from outpace.train import selftalk
from outpace.train.fit import Recipe, Report, fit
from outpace.train.losses import eagle_batches, markov_batches, of_markov
from outpace.train.run import names
from outpace.train.samples import Samples, Text, collect

LETTERS = "".join(chr(0x4E00 + i) for i in range(VOCAB))


def tokenizer_of_letters() -> Any:
    """One character, one token."""
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, LETTERS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def counter() -> Any:
    return counter_model()


@pytest.fixture(scope="module")
def counted(counter: Any) -> Samples:
    """Texts in which the model counts behind prompts of three tokens."""
    engine = load(counter, drafter="none")
    texts = []
    for first in range(0, VOCAB, 3):
        result = engine.generate([9, 3, first], SamplingParams(max_new_tokens=24))
        texts.append(Text((*result.prompt_tokens, *result.tokens), 3))
    return collect(Target(counter), texts)


def heads_of(model: Any, samples: Samples, num_heads: int = 4, rows: int = 1000) -> MarkovHeads:
    torch.manual_seed(0)
    return MarkovHeads(
        model.get_input_embeddings().weight.detach(),
        model.get_output_embeddings().weight.detach(),
        samples.most_frequent(rows),
        num_heads,
        rank=16,
    )


def train(heads: MarkovHeads, samples: Samples, recipe: Recipe, *rest: Any, **more: Any) -> Report:
    return fit(heads, markov_batches(heads, samples, recipe.batch), recipe, *rest, **more)


def test_samples_are_what_the_model_thinks(counter: Any, counted: Samples) -> None:
    """Hidden states and distributions are those of a forward of the whole text; labels stay in a text's answer."""
    text = counted.text == 4
    tokens = counted.tokens[text]
    with torch.no_grad():
        output = counter(tokens[None], output_hidden_states=True)
    assert torch.allclose(counted.hidden[text].float(), output.hidden_states[-1][0], atol=1e-2)
    assert torch.equal(counted.top_ids[text][:, 0].long(), output.logits[0].argmax(-1))
    assert torch.allclose(counted.top_probs[text].sum(-1).float(), torch.ones(len(tokens)), atol=0.02)
    places = counted.anchors(4)
    assert len(places) == 22 * (27 - 5 - 1)
    for place in places.tolist():
        assert counted.is_answer[place + 2 : place + 6].all() and counted.text[place] == counted.text[place + 5]


def test_every_heads_loss_falls_and_the_model_stays_as_it_was(counter: Any, counted: Samples) -> None:
    """T-N1: by far more than a fifth; a model that counts is learned to the last token."""
    before = {name: parameter.clone() for name, parameter in counter.named_parameters()}
    reports: list[Report] = []
    last = train(heads_of(counter, counted), counted, Recipe(300, 128, 3e-3), report=reports.append)
    assert len(reports) == 300 and last == reports[-1]
    for first, end in zip(reports[0].losses, last.losses, strict=True):
        assert end < 0.5 * first
    assert min(last.accuracies) > 0.95 and last.tokens_per_pass > 4.8
    assert all(torch.equal(before[name], parameter) for name, parameter in counter.named_parameters())


def test_a_loss_by_hand(counter: Any, counted: Samples) -> None:
    """Untrained heads say what the target's output layer says: the root again. TV is then 1, and so is a."""
    heads = heads_of(counter, counted)
    each, accuracies = of_markov(heads, counted, counted.anchors(4)[2:7])
    assert accuracies.tolist() == [0.0] * 4
    assert each.tolist() == pytest.approx([8 * 8] * 4, rel=0.01), "the margin of the counter"


def test_a_killed_run_goes_on_as_if_nothing_had_been(counter: Any, counted: Samples, tmp_path: Path) -> None:
    """T-N6: the same numbers bit for bit, whether or not it was interrupted."""
    recipe = Recipe(30, 64, 3e-3)
    whole = heads_of(counter, counted)
    wanted = train(whole, counted, recipe)

    def stop(report: Report) -> None:
        if report.step == 17:
            raise KeyboardInterrupt

    path = tmp_path / "state.pt"
    with pytest.raises(KeyboardInterrupt):
        train(heads_of(counter, counted), counted, recipe, path, stop, save_every=10)
    reports: list[Report] = []
    again = heads_of(counter, counted)
    assert train(again, counted, recipe, path, reports.append, save_every=10) == wanted
    assert [report.step for report in reports] == list(range(11, 31))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    with pytest.raises(InputError, match="the state of another recipe"):
        train(again, counted, replace(recipe, batch=65), path)


def test_bad_data_and_bad_rates_stop_with_the_reason(counter: Any, counted: Samples, tmp_path: Path) -> None:
    """T-N2: a mask that hides every label, a text without answers, a learning rate of a million."""
    hidden = replace(counted, is_answer=torch.zeros_like(counted.is_answer))
    with pytest.raises(InputError, match="there is nothing to learn"):
        train(heads_of(counter, counted), hidden, Recipe(10, 8))
    with pytest.raises(InputError, match="nothing to learn from"):
        collect(Target(counter), [Text((1, 2, 3), 3)])
    path = tmp_path / "state.pt"
    broken = replace(counted, hidden=counted.hidden * float("nan"))
    with pytest.raises(TrainingError, match="does not converge"):
        train(heads_of(counter, counted), broken, Recipe(10, 8), path, save_every=1)
    with pytest.raises(TrainingError, match="learning_rate=1e"):
        train(heads_of(counter, counted), counted, Recipe(300, 64, 1e30), path, save_every=1000)
    assert not path.exists()


def test_samples_are_saved_and_split(counted: Samples, tmp_path: Path) -> None:
    counted.save(tmp_path / "samples.safetensors")
    again = Samples.load(tmp_path / "samples.safetensors")
    assert all(torch.equal(getattr(again, name), getattr(counted, name)) for name in Samples.__slots__)
    kept, held = counted.split(0.1)
    assert len(kept.tokens) + len(held.tokens) == len(counted.tokens) and set(held.text.tolist()) == {20, 21}
    assert counted.most_frequent(1000).tolist() == sorted(set(counted.tokens[counted.is_answer].tolist()))


def test_a_model_writes_its_own_prompts_and_answers() -> None:
    tokenizer = tiny_tokenizer()
    engine = load(tiny_model("llama"), tokenizer=tokenizer, drafter="none")
    begin = selftalk.message_start(tokenizer)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert rendered.startswith(tokenizer.decode(begin)) and "hello" not in tokenizer.decode(begin)
    with pytest.raises(InputError, match="no chat template"):
        selftalk.message_start(None)
    texts = selftalk.write(engine, 60, seed=5, max_new_tokens=10)
    assert texts == selftalk.write(engine, 60, seed=5, max_new_tokens=10) != selftalk.write(engine, 60, seed=99)
    assert sum(len(text.tokens) - text.num_prompt for text in texts) >= 60
    assert all(list(text.tokens[: len(begin)]) == begin for text in texts)


def test_trained_heads_are_saved_and_accepted(counter: Any, counted: Samples, tmp_path: Path) -> None:
    """What the heads learned holds online, from the file, in half precision, greedy and sampled, alone and batched."""
    heads = heads_of(counter, counted)
    last = train(heads, counted, Recipe(300, 128, 3e-3))
    save_heads(heads, counter, tmp_path / "heads", {"command": "test"})
    engine = load(counter, drafter="heads", heads=tmp_path / "heads", k=4)
    for temperature in (0.0, 0.7):
        params = SamplingParams(max_new_tokens=41, temperature=temperature, seed=1)
        for result in engine.generate([[1, 2, 20], [5, 30]], params):
            first = result.prompt_tokens[-1] + 1
            assert result.tokens == [(first + i) % VOCAB for i in range(41)]
            assert result.stats.tokens_per_pass > 0.8 * last.tokens_per_pass
            assert result.stats.num_draft_failures == 0
    with pytest.raises(LoadError, match="were trained for another model"):
        load(tiny_model("llama"), heads=tmp_path / "heads")
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert config["provenance"] == {"command": "test"} and config["draft_vocab_size"] == len(heads.token_map)


def test_a_bias_of_the_parent_is_used(counter: Any, counted: Samples, tmp_path: Path) -> None:
    """Heads that know nothing but what follows a token count as well: the tree is built along the bias."""
    heads = heads_of(counter, counted)
    rows = len(heads.token_map)
    with torch.no_grad():
        heads._rows.zero_()
        heads.markov_in.weight.zero_()
        heads.markov_in.weight[:, :16] = torch.randn(rows + 1, 16, generator=torch.Generator().manual_seed(0))
        follower = torch.tensor([int(heads.rows_of((heads.token_map[r] + 1) % VOCAB)) for r in range(rows)])
        wanted = torch.zeros(rows + 1, rows)
        keep = follower < rows
        wanted[torch.arange(rows)[keep], follower[keep]] = 50.0
        heads.markov_out.weight.copy_(torch.linalg.lstsq(heads.markov_in.weight, wanted).solution.T)
    drafter = MarkovDrafter(heads.eval(), 2)
    result = load(counter, drafter=drafter, k=4).generate([1, 2, 20], SamplingParams(max_new_tokens=30))
    assert result.tokens == list(range(21, 51)) and result.stats.tokens_per_pass > 1.5


def run_cli(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_train_and_evaluate_from_the_command_line(counter: Any, tmp_path: Path) -> None:
    """From a folder of text to heads, to what they are worth; a second call goes on, and another plan is refused."""
    model, text = tmp_path / "model", tmp_path / "text"
    counter.save_pretrained(model)
    tokenizer_of_letters().save_pretrained(model)
    text.mkdir()
    for first in range(30):
        (text / f"{first}.txt").write_text("".join(LETTERS[(first + i) % VOCAB] for i in range(40)))
    options = ("--data", text, "--out", tmp_path / "heads", "--steps", 200, "--batch", 64, "--learning-rate", 3e-3)
    found = run_cli("train", "medusa", model, *options, "--json")
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert min(report["accuracies"]) > 0.8
    assert run_cli("train", "medusa", model, *options).exit_code == 0
    refused = run_cli("train", "medusa", model, *options[:-2])
    assert isinstance(refused.exception, InputError) and "another recipe" in str(refused.exception)
    (tmp_path / "prompts.txt").write_text(LETTERS[3:9] + "\n" + LETTERS[20:24])
    seen = run_cli("evaluate", tmp_path / "heads", model, "--prompts", tmp_path / "prompts.txt", "-n", 40, "--json")
    assert seen.exit_code == 0, seen.output
    worth = json.loads(seen.stdout)
    assert worth["num_identical"] == worth["num_texts"] == 2
    assert abs(worth["accuracies"][0] - worth["acceptance"][0]) < 0.03
    assert worth["tokens_per_pass"] > 3
    profile = tmp_path / "profile.json"
    tuned = run_cli(
        "tune",
        model,
        "--heads",
        tmp_path / "heads",
        "--prompts",
        tmp_path / "prompts.txt",
        "-n",
        24,
        "--out",
        profile,
        "--json",
    )
    assert tuned.exit_code == 0, tuned.output
    trials = {trial["name"]: trial for trial in json.loads(tuned.stdout)["trials"]}
    assert trials["heads"]["is_identical"] and trials["suffix+recycle+heads"]["is_identical"]
    profile.write_text(json.dumps({"format": "outpace-profile", "settings": trials["heads"]["settings"]}))
    assert load(model, profile=profile).drafter.name == "heads"


def test_data_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="data must be 'self', a file or a folder, got '/no/such'"):
        names(["/no/such"])


def test_an_eagle_head_learns_and_is_accepted(counter: Any) -> None:
    """Every step's loss falls by more than a fifth, and what was learned holds online, in chains of its own outputs."""
    engine = load(counter, drafter="none")
    texts = []
    for first in range(0, VOCAB, 2):
        result = engine.generate([9, 3, first], SamplingParams(max_new_tokens=24))
        texts.append(Text((*result.prompt_tokens, *result.tokens), 3))
    layers = (0, 1, 2)
    samples = collect(Target(counter), texts, layers=layers)
    torch.manual_seed(0)
    shape = EagleShape(VOCAB, VOCAB, 3, 64, 2, 1, 32, VOCAB)
    embedding = counter.get_input_embeddings().weight.detach()
    head = EagleLayer(shape, embedding, torch.arange(VOCAB), layers)
    reports: list[Report] = []
    last = fit(head, eagle_batches(head, samples, 256, 3), Recipe(150, 256, 3e-3), report=reports.append)
    assert all(end < 0.8 * begin for begin, end in zip(reports[0].losses, last.losses, strict=True))
    assert min(last.accuracies) > 0.9
    head.requires_grad_(False)
    result = load(counter, drafter=EagleDrafter(head), k=4).generate([9, 3, 21], SamplingParams(max_new_tokens=41))
    assert result.tokens == [(22 + i) % VOCAB for i in range(41)]
    assert result.stats.tokens_per_pass > 2.5


def test_an_eagle_head_from_the_command_line(counter: Any, tmp_path: Path) -> None:
    """Trained, written in vLLM's names, and loaded again by the same option as other heads."""
    model, text = tmp_path / "model", tmp_path / "text.txt"
    counter.save_pretrained(model)
    tokenizer_of_letters().save_pretrained(model)
    text.write_text("".join(LETTERS[(i * 7 // 40 + i) % VOCAB] for i in range(4000)))
    out = tmp_path / "heads"
    options = ("--data", text, "--out", out, "--steps", 40, "--batch", 200, "--heads", 2, "--learning-rate", 3e-3)
    found = run_cli("train", "eagle", model, *options, "--json")
    assert found.exit_code == 0, found.output
    config = json.loads((out / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 1, 0] and config["draft_vocab_size"] == VOCAB
    engine = load(model, drafter="heads", heads=out, k=3)
    result = engine.generate([5, 6, 7], SamplingParams(max_new_tokens=30))
    assert result.tokens == [(8 + i) % VOCAB for i in range(30)] and result.stats.num_drafted_tokens > 20
    with pytest.raises(LoadError, match="were trained for another model"):
        load(tiny_model("llama"), heads=out)


@pytest.mark.parametrize("quantize", ["none", "int8", "auto"])
def test_heads_in_8_bits_guess_the_same(quantize: Any, counter: Any, counted: Samples, tmp_path: Path) -> None:
    heads = heads_of(counter, counted)
    train(heads, counted, Recipe(200, 128, 3e-3))
    save_heads(heads, counter, tmp_path, {})
    engine = load(counter, drafter="heads", heads=tmp_path, k=4, draft_quantize=quantize)
    result = engine.generate([1, 2, 20], SamplingParams(max_new_tokens=41))
    assert result.tokens == [(21 + i) % VOCAB for i in range(41)] and result.stats.tokens_per_pass > 3.5
