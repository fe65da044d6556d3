"""What a reader sees of a token stream: whole characters, no part of a stop string, at last the decoded text."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from outpace.errors import InputError
from outpace.testing.tokenizers import tiny_sentencepiece_tokenizer, tiny_tokenizer
from outpace.text import Detokenizer

byte_level = cache(tiny_tokenizer)
sentencepiece = cache(tiny_sentencepiece_tokenizer)

REPLACEMENT = "\ufffd"
HARD_TEXTS = [
    "",
    " ",
    "the people that",
    "  two spaces,  and  more ",
    "你好，世界。这是中文。",
    "👩‍👩‍👧 👍🏽 🇫🇷 family, skin, flag",
    "e\u0301 combining a\u0308\u0323 marks",
    "Hello 你 the 👩 of é\n\n\ttab 'quoted' it's",
    "a real \ufffd replacement \ufffd\ufffd\ufffd\ufffd\ufffd character",
    "བོད་སྐད་ཡིན།",
    "don 't join , these . spaces !",
]
texts = st.lists(
    st.one_of(
        st.sampled_from(HARD_TEXTS),
        st.text(max_size=8),
        st.text("abc ", max_size=8),
        st.text("👩👧👍🏽\u200d\ufe0f你好世界é\u0301\ufffd", max_size=8),
    ),
    max_size=5,
).map("".join)
# Nothing is sampled anew from run to run, so these tests cannot fail by chance.
reproducible = settings(max_examples=300, deadline=None, derandomize=True, database=None)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def decode(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> str:
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def chunks(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    """What each push and the final flush return; `text` is checked along the way."""
    shown: list[str] = []
    for token in tokens:
        shown.append(detokenizer.push(token))
        assert detokenizer.text == "".join(shown)
    shown.append(detokenizer.finish())
    assert detokenizer.text == "".join(shown)
    return shown


def plain_text(
    tokenizer: PreTrainedTokenizerFast, tokens: list[int], stop: tuple[str, ...] = ()
) -> tuple[str, str | None]:
    """The reference: decode everything after every token, and cut at the first stop string that appears."""
    for length in range(1, len(tokens) + 1):
        text = decode(tokenizer, tokens[:length])
        found = [(text.find(string), len(string), string) for string in stop if string in text]
        if found:
            return text[: min(found)[0]], min(found)[2]
    return decode(tokenizer, tokens), None


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["byte-level", "sentencepiece"])
@given(text=texts, data=st.data())
@reproducible
def test_chunks_join_to_the_decoded_text_cut_before_the_first_stop_string(
    tokenizer: PreTrainedTokenizerFast, text: str, data: st.DataObject
) -> None:
    """For any text and stop strings, streaming gives what decoding everything at once and cutting gives."""
    tokens = encode(tokenizer, text)
    decoded = decode(tokenizer, tokens)
    pieces = st.tuples(st.integers(0, len(decoded)), st.integers(1, 6)).map(lambda at: decoded[at[0] :][: at[1]])
    strings = st.one_of(pieces, st.sampled_from(["the", " ", "\n\n", "END", "é", "abab"]))
    usable = strings.filter(lambda string: string != "" and REPLACEMENT not in string)
    stop = tuple(data.draw(st.lists(usable, max_size=3), label="stop"))
    detokenizer = Detokenizer(tokenizer, stop)
    shown = "".join(chunks(detokenizer, tokens))
    assert (shown, detokenizer.stopped) == plain_text(tokenizer, tokens, stop)


@given(tokens=st.lists(st.integers(0, len(byte_level()) + 3), max_size=60), special=st.booleans())
@reproducible
def test_any_token_sequence_of_a_byte_level_tokenizer_streams_to_its_decoded_text(
    tokens: list[int], special: bool
) -> None:
    """Broken bytes, special tokens and ids without a token change nothing about it."""
    tokenizer = byte_level()
    decoded = tokenizer.decode(tokens, skip_special_tokens=special, clean_up_tokenization_spaces=False)
    assert "".join(chunks(Detokenizer(tokenizer, (), special), tokens)) == decoded


@given(text=texts, data=st.data())
@reproducible
def test_special_tokens_between_sentencepiece_tokens_cost_no_space(text: str, data: st.DataObject) -> None:
    """A token without text is no context: the space of the word after it is kept."""
    tokenizer = sentencepiece()
    tokens = encode(tokenizer, text)
    for _ in range(data.draw(st.integers(0, 6), label="number of special tokens")):
        position = data.draw(st.integers(0, len(tokens)), label="position")
        tokens.insert(position, data.draw(st.sampled_from([1, 2, len(tokenizer) + 1]), label="token"))
    assert "".join(chunks(Detokenizer(tokenizer), tokens)) == decode(tokenizer, tokens)


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["byte-level", "sentencepiece"])
@given(text=texts.filter(lambda text: REPLACEMENT not in text))
@reproducible
def test_text_is_shown_as_soon_as_its_characters_are_whole(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """Without stop strings, what is held back after any token is one unfinished character and nothing else."""
    tokens = encode(tokenizer, text)
    detokenizer = Detokenizer(tokenizer)
    whole = ""
    for length, token in enumerate(tokens, 1):
        decoded = decode(tokenizer, tokens[:length]).rstrip(REPLACEMENT)
        if len(decoded) > len(whole):  # not while an unfinished character blots out its neighbours
            whole = decoded
        detokenizer.push(token)
        assert detokenizer.text == whole


def test_characters_that_tokens_cut_in_the_middle_are_shown_whole() -> None:
    """A token may end one character and begin the next, for longer than any window."""
    tokenizer = byte_level()
    cut, start, end = tokenizer.convert_tokens_to_ids(["łå", "å", "ł"])  # bytes A0 E5, E5, A0
    middle = tokenizer.convert_tokens_to_ids("¥")  # byte A5
    tokens = [start, middle] + [cut, middle] * 40 + [end]
    shown = chunks(Detokenizer(tokenizer), tokens)
    assert shown == ["", ""] + ["\u5960", ""] * 40 + ["\u5960", ""]
    assert "".join(shown) == decode(tokenizer, tokens)


@pytest.mark.parametrize("invalid", [b"\xff", b"\xe4\xbd", b"\xf0\x9f\x98", b"\x80"])
def test_bytes_that_are_no_character_come_out_as_the_tokenizer_decodes_them(invalid: bytes) -> None:
    """Replacement characters of the final text are shown, all but the last three at any time."""
    tokenizer = byte_level()
    data = b"a" + invalid * 50 + b"b"
    detokenizer = Detokenizer(tokenizer)
    for length, byte in enumerate(data, 1):
        detokenizer.push(5 + byte)
        decoded = data[:length].decode(errors="replace")
        assert decoded.startswith(detokenizer.text) and len(detokenizer.text) >= len(decoded) - 3
    assert detokenizer.text == data.decode(errors="replace")


def test_characters_shown_from_byte_tokens_stay_when_a_broken_byte_follows() -> None:
    """The one exception: a full decode of `<0xE4><0xBD><0xA0><0xFF>` blots out the character, a stream cannot."""
    tokenizer = sentencepiece()
    you = tokenizer.convert_tokens_to_ids(["<0xE4>", "<0xBD>", "<0xA0>"])
    broken, the = tokenizer.convert_tokens_to_ids(["<0xFF>", "▁the"])
    assert "".join(chunks(Detokenizer(tokenizer), [the, *you, broken, the])) == "the你\ufffd the"
    assert decode(tokenizer, [the, *you, broken, the]) == "the\ufffd\ufffd\ufffd\ufffd the"
    long = chunks(Detokenizer(tokenizer), [the, *[broken, *you] * 20, the, the])
    assert "".join(long).startswith("the\ufffd") and "".join(long).endswith(" the the")


def test_a_stop_string_is_never_shown_in_part() -> None:
    """Text that may still become a stop string is held back, and given out once it cannot."""
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, ("END", "EX"))
    tokens = encode(tokenizer, "café E EN ENEND x")
    assert [detokenizer.push(token) for token in tokens] == [
        *("c", "a", "f", "", "é", " ", "", "E ", "", "", "EN ", "", "", "EN", "", "", "", ""),
    ]
    assert (detokenizer.finish(), detokenizer.text, detokenizer.stopped) == ("", "café E EN EN", "END")


def test_held_back_text_is_given_out_at_the_end() -> None:
    """A text that ends with the beginning of a stop string is whole after `finish`; a second one adds nothing."""
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, ("END",))
    assert [detokenizer.push(token) for token in encode(tokenizer, "xEN")] == ["x", "", ""]
    assert [detokenizer.finish(), detokenizer.finish()] == ["EN", ""]
    assert (detokenizer.text, detokenizer.stopped) == ("xEN", None)


def test_of_several_stop_strings_in_one_token_the_earliest_start_wins() -> None:
    """Whatever the order in which they are given; of two with one start, the shorter is named."""
    tokenizer = byte_level()
    (token,) = encode(tokenizer, " which")
    for stop in [("ic", "hi"), ("hi", "ic"), ("hic", "ic", "hi"), ("hi", "hich", "ch")]:
        detokenizer = Detokenizer(tokenizer, stop)
        assert (detokenizer.push(token), detokenizer.stopped) == (" w", "hi")


def test_a_stop_string_may_be_the_very_first_text() -> None:
    """Then there is no text at all."""
    tokenizer = byte_level()
    (token,) = encode(tokenizer, " the")
    detokenizer = Detokenizer(tokenizer, (" t",))
    assert (detokenizer.push(token), detokenizer.finish()) == ("", "")
    assert (detokenizer.text, detokenizer.stopped) == ("", " t")


def test_nothing_is_shown_after_a_stop_string() -> None:
    """Neither the rest of the token that completed it, nor later tokens, nor a second stop string."""
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, ("he", "that"))
    shown = chunks(detokenizer, encode(tokenizer, "so the other that é"))
    assert ("".join(shown), detokenizer.stopped) == ("so t", "he")


def test_special_tokens_are_text_when_they_are_not_skipped() -> None:
    """So that a stop string may name one."""
    tokenizer = byte_level()
    tokens = encode(tokenizer, "the<|im_end|>\n")
    detokenizer = Detokenizer(tokenizer, ("<|im_end|>",), skip_special_tokens=False)
    assert "".join(chunks(detokenizer, tokens)) == "the"
    assert detokenizer.stopped == "<|im_end|>"
    assert "".join(chunks(Detokenizer(tokenizer), tokens)) == "the\n"


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.num_decoded_tokens = 0

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = False,
        *,
        clean_up_tokenization_spaces: bool = True,
    ) -> str | list[str]:
        self.num_decoded_tokens += len(token_ids)
        return self.tokenizer.decode(
            token_ids, skip_special_tokens, clean_up_tokenization_spaces=clean_up_tokenization_spaces
        )


@pytest.mark.parametrize("words", ["the people that", "你好", "👩‍👩‍👧", "\ufffd", "<0xFF>", "<s>"])
@pytest.mark.parametrize("make", [byte_level, sentencepiece], ids=["byte-level", "sentencepiece"])
def test_the_work_per_token_does_not_grow(make: type, words: str) -> None:
    """No push decodes more than 64 tokens, however long the text and whatever is in it."""
    tokenizer = make()
    tokens = encode(tokenizer, words) * 200
    if words == "<0xFF>":
        tokens = tokenizer.convert_tokens_to_ids(["<0xFF>" if make is sentencepiece else "ÿ"]) * 2000
    counting = Counting(tokenizer)
    detokenizer = Detokenizer(counting, ("END",))
    for token in tokens:
        before = counting.num_decoded_tokens
        detokenizer.push(token)
        assert counting.num_decoded_tokens - before <= 64


def test_an_empty_stop_string_is_refused() -> None:
    """It would stop every text before its first character; so would a string taken for a tuple of its characters."""
    with pytest.raises(InputError, match=r"stop contains '', which is not a non-empty string.*Remove it from"):
        Detokenizer(byte_level(), ("END", ""))
    with pytest.raises(InputError, match=r"Pass a tuple: \('END',\)"):
        Detokenizer(byte_level(), "END")  # type: ignore[arg-type]


def test_spaces_before_punctuation_are_kept() -> None:
    """A tokenizer that asks for clean-up does not get it: the model wrote these spaces."""
    tokenizer = tiny_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    shown = chunks(Detokenizer(tokenizer), encode(tokenizer, "don 't , . !"))
    assert "".join(shown) == "don 't , . !"


def test_the_tiny_tokenizer_formats_a_chat() -> None:
    """Its chat template, special tokens and eos are those of a ChatML model; ids are below its length."""
    tokenizer = tiny_tokenizer()
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    tokens = encode(tokenizer, text)
    assert tokenizer.convert_ids_to_tokens(tokens)[0] == "<|im_start|>"
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id in tokens
    assert tokenizer.pad_token == "<pad>" and max(tokens) < len(tokenizer)
    assert decode(tokenizer, tokens) == "user\nHi\nassistant\n"
