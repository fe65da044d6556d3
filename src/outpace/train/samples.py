"""What heads are trained on: texts, and what the target thought while it read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import InputError
from ..target import Block, Target

_NUM_TOP = 32  # of the target's distribution
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Text:
    """tokens, of which those from `num_prompt` on are the model's own words: only they are learned."""

    tokens: tuple[int, ...]
    num_prompt: int


@dataclass(frozen=True, slots=True)
class Samples:
    """All tokens of many texts, one behind the other.

    tokens: [n] int64. is_answer: [n] bool. text: [n] int64, which text. hidden: [n, layers * H] float16, the target's
    hidden states at each token. top_ids, top_probs: [n, top] int32 and float16, the target's distribution behind it.
    """

    tokens: Tensor
    is_answer: Tensor
    text: Tensor
    hidden: Tensor
    top_ids: Tensor
    top_probs: Tensor

    def anchors(self, num_heads: int) -> Tensor:
        """[m] places t from which every head has a label: t + 2 to t + 1 + num_heads, all answers of one text."""
        last = len(self.tokens) - 1 - num_heads
        places = torch.arange(max(0, last))
        if len(places) == 0:
            return places
        ends = places + 1 + num_heads
        return places[self.is_answer[places + 2] & (self.text[places] == self.text[ends])]

    def most_frequent(self, count: int) -> Tensor:
        """[count] sorted ids of the most frequent answers, the smaller id first among equals."""
        counts = torch.bincount(self.tokens[self.is_answer])
        order = torch.argsort(counts, descending=True, stable=True)
        return torch.sort(order[counts[order] > 0][:count]).values

    def save(self, path: Path) -> None:
        """One safetensors file, written whole or not at all."""
        partial = path.with_name(path.name + ".partial")
        save_file({name: getattr(self, name).contiguous() for name in self.__slots__}, partial)
        partial.replace(path)

    @staticmethod
    def load(path: Path) -> Samples:
        return Samples(**load_file(path))

    def split(self, share: float) -> tuple[Samples, Samples]:
        """(to learn from, held out): the last texts are held out, at least one."""
        num_texts = int(self.text.max()) + 1
        first = num_texts - max(1, round(share * num_texts))
        kept = self.text < first
        return self._where(kept), self._where(~kept)

    def _where(self, mask: Tensor) -> Samples:
        return Samples(**{name: getattr(self, name)[mask] for name in self.__slots__})


@torch.no_grad()
def collect(
    target: Target,
    texts: Sequence[Text],
    progress: Callable[[int, int], None] | None = None,
    layers: Sequence[int] = (),
) -> Samples:
    """Let the target read texts. layers: the hidden states to keep, side by side; by default the last one.

    Raises InputError where there is nothing to learn.
    """
    if not any(len(text.tokens) > text.num_prompt for text in texts):
        raise InputError("The texts hold no token of the model's own words: there is nothing to learn from.")
    layers = layers or (int(target.config.num_hidden_layers),)
    parts: list[dict[str, Tensor]] = []
    for index, text in enumerate(texts):
        if progress is not None:
            progress(index, len(texts))
        cache = target.new_cache()
        row = cache.add_row()
        for start in range(0, len(text.tokens), _CHUNK):
            chunk = text.tokens[start : start + _CHUNK]
            (output,) = target.forward(cache, [Block.chain(row, chunk, num_logits=len(chunk))], layers)
            cache.keep(row, range(len(chunk)))
            values, ids = output.logits.float().topk(min(_NUM_TOP, output.logits.shape[-1]))
            probs = (values - output.logits.float().logsumexp(-1, keepdim=True)).exp()
            places = torch.arange(start, start + len(chunk))
            parts.append(
                {
                    "tokens": torch.tensor(chunk),
                    "is_answer": places >= text.num_prompt,
                    "text": torch.full((len(chunk),), index),
                    "hidden": torch.cat([output.hidden[layer] for layer in layers], -1).to(torch.float16).cpu(),
                    "top_ids": ids.to(torch.int32).cpu(),
                    "top_probs": probs.to(torch.float16).cpu(),
                }
            )
    return Samples(**{name: torch.cat([part[name] for part in parts]) for name in Samples.__slots__})
