"""Texts that a model writes itself: a user's message from its own chat template, and its answer to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..engine import Engine
from ..errors import InputError
from ..sampling import SamplingParams
from .samples import Text

_MARK = "\u241eMARK\u241e"  # a place in the rendered template
_ROWS = 32  # decoded together
_MOST_PROMPT = 96  # tokens of a message
_LEAST_PROMPT = 3


def write(
    engine: Engine,
    num_tokens: int,
    seed: int = 0,
    max_new_tokens: int = 256,
    progress: Callable[[int, int], None] | None = None,
) -> list[Text]:
    """Texts with at least `num_tokens` answered tokens in all; half of the answers greedy, half sampled at 0.7 to 1.

    engine: of the model, without drafts, with a tokenizer that has a chat template. The same seed writes the same
    texts. Raises InputError without a template, or where the model writes nothing.
    """
    begin = message_start(engine.tokenizer)
    texts: list[Text] = []
    done, batch, idle = 0, 0, 0
    while done < num_tokens:
        first = seed + 1 + batch * _ROWS
        asking = SamplingParams(max_new_tokens=_MOST_PROMPT, temperature=1.0, top_p=0.95)
        questions = engine.generate([begin] * _ROWS, [replace(asking, seed=first + row) for row in range(_ROWS)])
        prompts = [q.text.strip() for q in questions if q.finish_reason == "stop" and len(q.tokens) > _LEAST_PROMPT]
        prompts = [text for text in dict.fromkeys(prompts) if text]
        if prompts:
            answers = engine.generate(
                [[{"role": "user", "content": text}] for text in prompts],
                [_answering(max_new_tokens, first + row) for row in range(len(prompts))],
            )
            for answer in answers:
                texts.append(Text((*answer.prompt_tokens, *answer.tokens), len(answer.prompt_tokens)))
                done += len(answer.tokens)
        batch += 1
        idle = 0 if prompts else idle + 1
        if idle == 5:
            raise InputError("The model writes no messages of its own from its chat template. Give texts with data.")
        if progress is not None:
            progress(min(done, num_tokens), num_tokens)
    return texts


def _answering(max_new_tokens: int, number: int) -> SamplingParams:
    """Every second answer is greedy; the others take turns between three temperatures."""
    temperature = 0.0 if number % 2 == 0 else (0.7, 0.85, 1.0)[number // 2 % 3]
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=number)


def message_start(tokenizer: Any) -> list[int]:
    """The token ids with which a user's message begins, after everything that the template puts before it."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InputError("The model has no chat template, so it cannot write its own prompts. Give texts with data.")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    before, mark, _ = str(rendered).partition(_MARK)
    if not mark:
        raise InputError("The chat template does not show the user's message. Give texts with data.")
    ids: list[int] = tokenizer(before, add_special_tokens=False)["input_ids"]
    return ids
