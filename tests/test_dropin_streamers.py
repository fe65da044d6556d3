"""A streamer gets the prompt once, then every token in order as it is decided, and one end, whatever happens."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from dropin_reference import ENTRIES, PAD, PLAIN, WAYS, Passes, assert_mixed, batch, call, fast, plain
from reference import MIXED, ONE, REPEATED, first_seen_at, greedy, model, tokenizer, writer
from torch import Tensor
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

import outpace
from outpace import InputError
from outpace.testing.models import tiny_model, with_noise


class Recorder(BaseStreamer):
    """What was put, and how often the end came; raises at the given put."""

    def __init__(self, raises_at: int | None = None) -> None:
        self.values: list[tuple[tuple[int, ...], list[Any]]] = []
        self.num_ends, self.raises_at = 0, raises_at

    def put(self, value: Tensor) -> None:
        assert self.num_ends == 0 and value.device.type == "cpu"
        if len(self.values) == self.raises_at:
            raise BrokenPipeError("the reader is gone")
        self.values.append((tuple(value.shape), value.tolist()))

    def end(self) -> None:
        self.num_ends += 1


# --------------------------------------------------------------------------------------------------
# What is put


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompts", [(MIXED,), (MIXED, ONE, REPEATED)], ids=["one row", "three rows"])
def test_a_streamer_gets_what_transformers_gives_it(prompts: Any, way: str, entry: str) -> None:
    """Prompt, then one token per row and step, pad tokens of ended rows included; one end."""
    inputs, stats = batch(*prompts), []
    ends = [first_seen_at(greedy("llama", prompt, 40), at) for prompt, at in zip(prompts, (9, 4, 19), strict=False)]
    for options in ({}, {"eos_token_id": ends}, {"max_new_tokens": 1}, {"repetition_penalty": 1.2}):
        theirs, ours = Recorder(), Recorder()
        wanted = model("llama").generate(**inputs, **(PLAIN | options), streamer=theirs)
        found = call(entry, fast(model("llama"), way), **inputs, **(PLAIN | options), streamer=ours)
        assert found.tolist() == wanted.tolist()
        assert ours.values == theirs.values and ours.num_ends == theirs.num_ends == 1
        assert ours.values[0] == (tuple(inputs["input_ids"].shape), inputs["input_ids"].tolist())
        columns = [values for _, values in ours.values[1:]]
        assert [list(row) for row in zip(*columns, strict=True)] == wanted[:, inputs["input_ids"].shape[1] :].tolist()
        assert options.keys() != {"eos_token_id"} or (PAD in wanted[:, -1:]) == (len(prompts) > 1)
        stats += fast(model("llama"), way).last_stats
    if way != "suffix":
        assert_mixed(stats)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_streamer_gets_sampled_texts_and_several_of_one_prompt(entry: str) -> None:
    """The tokens that were put are those of the result."""
    recorder = Recorder()
    options = {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 3, "pad_token_id": PAD, "seed": 1}
    found = call(entry, fast(model("llama")), **batch(MIXED), **options, streamer=recorder)
    assert recorder.values[0] == ((3, 30), [list(MIXED)] * 3) and recorder.num_ends == 1
    columns = [values for _, values in recorder.values[1:]]
    assert [list(row) for row in zip(*columns, strict=True)] == found[:, 30:].tolist()
    assert len({tuple(row) for row in found.tolist()}) == 3


@pytest.mark.parametrize("entry", ENTRIES)
def test_tokens_are_put_as_soon_as_they_are_decided(entry: str) -> None:
    """Between forwards, not at the end: no put comes more than one forward late."""
    target = tiny_model("llama")
    accelerated = outpace.accelerate(target, drafter="none")
    counts: list[int] = []
    with Passes(target) as passes:

        class Watching(Recorder):
            def put(self, value: Tensor) -> None:
                super().put(value)
                counts.append(passes.count)

        call(entry, accelerated, **batch(MIXED), **PLAIN, streamer=Watching())
    assert counts == list(range(25))


# --------------------------------------------------------------------------------------------------
# transformers' streamers


def _texts() -> dict[str, Tensor]:
    return batch(tokenizer()("the people of the")["input_ids"])


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("skip_prompt", [False, True])
def test_a_text_streamer_prints_what_it_prints_in_transformers(
    skip_prompt: bool, entry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Character by character, with and without the prompt."""
    target, printed = writer(), []
    accelerated = outpace.accelerate(target, drafter=with_noise(target, 0.02), k=5)
    for generate in (target.generate, lambda **arguments: call(entry, accelerated, **arguments)):
        generate(**_texts(), **PLAIN, streamer=TextStreamer(tokenizer(), skip_prompt=skip_prompt))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and len(printed[0]) > 40
    assert printed[0].startswith("the people of the") != skip_prompt
    assert_mixed(accelerated.last_stats)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("way", ["suffix", "noisy"])
def test_a_text_can_be_iterated_while_a_thread_writes_it(way: str, entry: str) -> None:
    """TextIteratorStreamer gives the text of the result; and it ends, instead of waiting for ever, on an error."""
    target = writer()
    drafter = "suffix" if way == "suffix" else with_noise(target, 0.02)
    accelerated = outpace.accelerate(target, drafter=drafter, k=5)
    wanted = tokenizer().decode(target.generate(**_texts(), **PLAIN)[0])

    def run(**options: Any) -> tuple[str, list[BaseException]]:
        streamer = TextIteratorStreamer(tokenizer(), timeout=20)
        errors: list[BaseException] = []

        def write() -> None:
            try:
                call(entry, accelerated, **_texts(), **PLAIN, streamer=streamer, **options)
            except ArithmeticError as error:
                errors.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        text = "".join(streamer)
        thread.join(timeout=20)
        assert not thread.is_alive()
        return text, errors

    assert run() == (wanted, [])

    def failing(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == _texts()["input_ids"].shape[1] + 12:
            raise ArithmeticError("from a user's processor")
        return scores

    text, errors = run(logits_processor=[failing])
    assert wanted.startswith(text.strip()) and len(errors) == 1


@pytest.mark.parametrize("entry", ENTRIES)
def test_transformers_text_streamer_refuses_batches_as_ever(entry: str) -> None:
    """Its own error, and the object is usable afterwards."""
    with pytest.raises(ValueError, match="TextStreamer only supports batch size 1"):
        call(entry, fast(model("llama")), **batch(MIXED, ONE), **PLAIN, streamer=TextStreamer(tokenizer()))
    found = call(entry, fast(model("llama")), **batch(MIXED), **PLAIN)
    assert found.tolist() == plain(model("llama"), batch(MIXED), {}).tolist()


# --------------------------------------------------------------------------------------------------
# Errors


def _raising(input_ids: Tensor, scores: Tensor) -> Tensor:
    if input_ids.shape[1] == 37:
        raise ArithmeticError("from a user's processor")
    return scores


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("way", WAYS)
def test_an_error_in_the_middle_ends_the_stream_once(way: str, entry: str) -> None:
    """After the tokens that were decided in the steps before, all of them right."""
    wanted, recorder = plain(model("llama"), batch(MIXED), {}), Recorder()
    with pytest.raises(ArithmeticError):
        arguments = {"streamer": recorder, "logits_processor": [_raising]}
        call(entry, fast(model("llama"), way), **batch(MIXED), **PLAIN, **arguments)
    assert recorder.num_ends == 1 and recorder.values[0][1] == [list(MIXED)]
    tokens = [token for _, (token,) in recorder.values[1:]]
    assert tokens == wanted[0, 30 : 30 + len(tokens)].tolist() and len(tokens) <= 7
    assert tokens or way != "suffix"


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "seed": {"seed": -1},
    "output_attentions": {"output_attentions": True},
    "assistant_model": {"assistant_model": 1},
    "synced_gpus": {"synced_gpus": True},
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_refusal_ends_the_stream_once(entry: str, name: str) -> None:
    """Nothing but the prompt has been put, which transformers does before it asks custom_generate."""
    recorder = Recorder()
    with pytest.raises(InputError, match=name):
        call(entry, fast(model("llama")), **batch(MIXED), **PLAIN, streamer=recorder, **REFUSED[name])
    assert len(recorder.values) == (entry == "custom_generate")
    assert recorder.num_ends == 1


def test_transformers_own_refusals_end_the_stream_too() -> None:
    """A misspelt argument, no prompt, and an object that was closed."""
    accelerated = outpace.accelerate(model("llama"), drafter="suffix")
    for arguments in ({**batch(MIXED), "max_new_token": 3}, {}):
        recorder = Recorder()
        with pytest.raises(ValueError):
            accelerated.generate(**arguments, streamer=recorder)
        assert recorder.num_ends == 1 and not recorder.values
    accelerated.close()
    recorder = Recorder()
    with pytest.raises(outpace.EngineError):
        accelerated.generate(**batch(MIXED), streamer=recorder)
    assert recorder.num_ends == 1 and not recorder.values


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("at", [1, 2, 9])
def test_a_streamer_that_raises_stops_the_text_and_leaves_nothing_behind(at: int, entry: str) -> None:
    """Its exception reaches the caller, one end comes, no row stays, and the next call is right."""
    for way in WAYS:
        accelerated, recorder = fast(model("llama"), way), Recorder(raises_at=at)
        with pytest.raises(BrokenPipeError):
            call(entry, accelerated, **batch(MIXED, ONE), **PLAIN, streamer=recorder)
        assert recorder.num_ends == 1 and len(recorder.values) == at
        assert not accelerated.engine._rows and not accelerated.engine._cache.lengths
        wanted = plain(model("llama"), batch(MIXED, ONE), {})
        assert call(entry, accelerated, **batch(MIXED, ONE), **PLAIN).tolist() == wanted.tolist()


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("in_thread", [False, True], ids=["in the streamer", "in a thread"])
def test_a_stream_is_complete_while_others_decode_with_the_same_object(in_thread: bool, entry: str) -> None:
    """T-I9: rows share steps, so a text may end in a step of another caller; its tokens are put all the same."""
    accelerated, found = fast(model("llama")), []
    wanted = plain(model("llama"), batch(ONE), {}).tolist()

    def decode() -> None:
        found.append(accelerated.generate(**batch(ONE), **PLAIN).tolist())

    class Slow(Recorder):
        """Takes so long with its third value that another caller can decode a whole text."""

        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.values) == 3 and not in_thread:
                decode()
            elif len(self.values) == 3:
                thread = threading.Thread(target=decode)
                thread.start()
                thread.join(timeout=20)

    recorder = Slow()
    text = call(entry, accelerated, **batch(MIXED), **PLAIN, streamer=recorder)
    assert text.tolist() == plain(model("llama"), batch(MIXED), {}).tolist() and found == [wanted]
    assert [token for _, (token,) in recorder.values[1:]] == text[0, len(MIXED) :].tolist()
    assert recorder.num_ends == 1
