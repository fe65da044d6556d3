"""From token ids to text that may be shown, one token at a time. Knows nothing about models.

A token is not a piece of text: a character may span several tokens, the first token of a text may lose its
space, and a stop string may begin in the middle of a token. `Detokenizer` decodes the latest tokens together and
gives out the part of the text that can no longer change.
"""

from typing import Protocol

from outpace.errors import InputError

_REPLACEMENT = "\ufffd"  # what a byte that is not yet, or never will be, part of a character decodes to
# An unfinished UTF-8 character has at most three bytes: so many replacement characters may still change.
_MAX_UNFINISHED_CHARS = 3
# A window that never ends on a whole character (tokens cut across characters, garbage) keeps its last tokens.
_MAX_WINDOW_TOKENS = 16
_KEPT_WINDOW_TOKENS = 8


class TokenDecoder(Protocol):
    """The part of a tokenizer that is used here."""

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = ...,
        *,
        clean_up_tokenization_spaces: bool = ...,
    ) -> str | list[str]: ...


class Detokenizer:
    """The text of one growing token sequence: given out once final, cut before the first stop string.

    What `push` and `finish` return, joined, is `tokenizer.decode(tokens)` cut before the stop string. When a
    token completes several stop strings, the one that starts first counts. The work per token does not grow.

        >>> detokenizer = Detokenizer(tokenizer, stop=("END",))
        >>> [detokenizer.push(token) for token in tokenizer.encode("café E END x")]    # one token per byte
        ['c', 'a', 'f', '', 'é', ' ', '', 'E ', '', '', '', '', '']
        >>> detokenizer.text, detokenizer.stopped
        ('café E ', 'END')

    One exception, for tokenizers that spell bytes as tokens of their own (`<0xE4>`): where some of a row of such
    tokens are no character, a full decode blots out the whole row. Here its characters may have been shown by then,
    and stay.
    """

    def __init__(self, tokenizer: TokenDecoder, stop: tuple[str, ...] = (), skip_special_tokens: bool = True) -> None:
        check_stop(stop)
        self.stopped: str | None = None  # the stop string that ended the text
        self._tokenizer = tokenizer
        self._stop = stop
        self._skip_special_tokens = skip_special_tokens
        self._anchor: list[int] = []  # tokens from the start, decoded before others: only a text's start is special
        self._anchor_text = ""
        self._window: list[int] = []  # tokens since the last whole character: `_settled` + `_unfinished` after it
        self._settled = ""  # the window's text that can no longer change
        self._unfinished = ""  # the replacement characters at its end, which the next token may change
        self._held = ""  # settled text that may still become a stop string
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._shown)

    def push(self, token: int) -> str:
        """The text that became final with this token, often empty. Always empty once `stopped` is set."""
        if self.stopped is not None:
            return ""
        return self._show(self._settle(token), is_last=False)

    def finish(self) -> str:
        """The text that was held back, given out because no token follows."""
        if self.stopped is not None:
            return ""
        rest, self._unfinished = self._unfinished, ""
        return self._show(rest, is_last=True)

    def _settle(self, token: int) -> str:
        """The text that can no longer change since this token, stop strings not yet considered."""
        self._window.append(token)
        text = self._window_text()
        if text == self._settled + self._unfinished and self._is_skipped(token):
            self._window.pop()
            return ""
        if len(text) < len(self._settled + self._unfinished):
            num_unfinished = 0  # byte tokens, a replacement character each, have just become a character
        else:
            num_unfinished = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_UNFINISHED_CHARS)
        settled = text[: max(len(self._settled), len(text) - num_unfinished)]
        new, unfinished = settled[len(self._settled) :], text[len(settled) :]
        if not unfinished:
            settled = self._start_window(settled)
        elif len(self._window) > _MAX_WINDOW_TOKENS:
            del self._window[:-_KEPT_WINDOW_TOKENS]
            text = self._window_text()
            if not text.endswith(unfinished):  # the exception above: fewer tokens, fewer characters blotted out
                new, unfinished = new + unfinished, ""
            settled = text.removesuffix(unfinished)
        self._settled, self._unfinished = settled, unfinished
        return new

    def _start_window(self, settled: str) -> str:
        """What remains settled text of the window when it ends on a whole character: none, unless it is the anchor."""
        if not self._anchor_text or _REPLACEMENT in self._anchor_text:
            text = self._decode(self._window)
            if text and not (self._anchor_text and _REPLACEMENT in text):
                self._anchor, self._anchor_text = self._window, text
        if not self._anchor_text:
            return settled  # a lone space that was lost, and must go on being the first token
        self._window = []
        return ""

    def _window_text(self) -> str:
        """The text of the window's tokens where they stand."""
        text = self._decode(self._anchor + self._window)
        rest = text[len(self._anchor_text) :]
        if text.startswith(self._anchor_text) and not (_REPLACEMENT in self._anchor_text and _REPLACEMENT in rest):
            return rest
        return self._decode(self._window)  # byte tokens on both sides: decoded together, one may spoil the other

    def _show(self, new: str, is_last: bool) -> str:
        """The part of held-back and new text that is before any stop string and cannot become part of one."""
        text = self._held + new
        found = [(start, len(stop), stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            start, _, self.stopped = min(found)
            shown, self._held = text[:start], ""
        else:
            num_held = 0 if is_last else self._num_held(text)
            shown, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        if shown:
            self._shown.append(shown)
        return shown

    def _num_held(self, text: str) -> int:
        """The length of the longest end of the text that some stop string begins with."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

    def _is_skipped(self, token: int) -> bool:
        """Whether the token has no text anywhere: a special token, or an id without a token.

        It is asked for twice because a lone space may lose its text at the start, and only there.
        """
        return not self._decode([token, token])

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, self._skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), f"decoding one sequence gave {type(text).__name__}"
        return text


def check_stop(stop: tuple[str, ...]) -> None:
    """Raises InputError for stop strings that cannot be honoured."""
    if isinstance(stop, str):
        raise InputError(
            f"stop is the single string {stop!r}: each of its characters would end the text. Pass a tuple: ({stop!r},)."
        )
    for text in stop:
        if not isinstance(text, str) or not text:
            raise InputError(
                f"stop contains {text!r}, which is not a non-empty string; an empty stop string would end "
                f"every text before its first character. Remove it from {tuple(stop)!r}."
            )
