"""Small tokenizers built in code: nothing is downloaded. They know nothing about models.

tiny_tokenizer                byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have: any text, any bytes
tiny_sentencepiece_tokenizer  as Llama 2 and Mistral have: prefix spaces, unknown characters as byte tokens
"""

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SPECIAL_TOKENS = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
# Words that become tokens, each built up letter by letter, so that every beginning of one is a token too.
_WORDS = (
    "the and of to in is that it was for as with on be at by this have from or had not are but what all were"
    " when we there can an your which their said if do will each about how up out them then so user assistant"
)
# Pieces of characters, as large vocabularies have them: space and first byte, first bytes of emoji and CJK.
_BYTE_PIECES = [
    b" \xe4",
    b" \xf0",
    b"\xf0\x9f",
    b"\xf0\x9f\x98",
    b"\xe4\xbd",
    b"\xe4\xb8",
    b"\xa0\xe5",
    b"\xe2\x80",
    b"\xcc",
]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with 5 special tokens, 256 bytes, some 120 merges and a chat template.

    Its end of sequence is `<|im_end|>`, its padding `<pad>`; it adds no token to a text.
    """
    letters = _byte_letters()
    vocab = [*_SPECIAL_TOKENS, *letters]
    merges: list[tuple[str, str]] = []
    for piece in [f" {word}".encode() for word in _WORDS.split()] + _BYTE_PIECES:
        _add_merges([letters[byte] for byte in piece], vocab, merges)
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(vocab)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """A BPE tokenizer in sentencepiece's way: `▁` for a space, one before every text; `<0xE4>` for a byte."""
    special = ["<unk>", "<s>", "</s>"]
    vocab = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    merges: list[tuple[str, str]] = []
    for word in _WORDS.split():
        _add_merges(list(f"▁{word}"), vocab, merges)
    tokenizer = Tokenizer(
        BPE(
            {token: i for i, token in enumerate(vocab)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def _add_merges(pieces: list[str], vocab: list[str], merges: list[tuple[str, str]]) -> None:
    """Lets the pieces be joined from the left, one at a time."""
    joined = pieces[0]
    for piece in pieces[1:]:
        if joined + piece not in vocab:
            vocab.append(joined + piece)
            merges.append((joined, piece))
        joined += piece


def _byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: printable Latin-1 as is, others from U+0100 on.

    `_byte_letters()[0x20]` is "Ġ".
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
