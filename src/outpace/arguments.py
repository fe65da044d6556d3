"""What becomes of every argument of transformers' `generate`: honoured, without effect, or refused by name.

The table is the only place that knows; the documentation is printed from it (`python -m outpace.arguments`), and a
test compares its names with those of the installed transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig

from .errors import InputError

# Of the model's inputs, those that mean something here.
CACHES = ("cache", "past_key_values")
_INPUTS = (*CACHES, "attention_mask", "position_ids", "use_cache", "logits_to_keep")

_METADATA = ("transformers_version",)

Fate = Literal["honoured", "no effect", "refused"]


def _is_set(value: Any) -> bool:
    return value is not None and value is not False


def _is_above_one(value: Any) -> bool:
    return value is not None and value > 1


@dataclass(frozen=True, slots=True)
class Argument:
    """What happens to an argument, in words. is_refused: which of its values are refused; the others do nothing."""

    fate: Fate
    note: str
    is_refused: Callable[[Any], bool] = _is_set


def _honoured(note: str) -> Argument:
    return Argument("honoured", note, lambda value: False)


def _idle(note: str) -> Argument:
    return Argument("no effect", note, lambda value: False)


_BEAMS = "it belongs to beam search, which keeps several texts; use transformers' own generate"
_OURS = "outpace drafts itself: choose how with accelerate(model, drafter=…, draft_model=…)"
_CACHE = "outpace keeps keys and values in its own cache; leave it out, or use transformers' own generate"
_NO_BEAMS = "only matters with beams, as in transformers"
_NO_ASSISTANT = "only matters with an assistant, as in transformers"

ARGUMENTS: Mapping[str, Argument] = {
    # the prompt
    "inputs": _honoured("token ids [rows, length]; without any, the begin-of-text token"),
    "input_ids": _honoured("as `inputs`"),
    "attention_mask": _honoured("left padding; zeros elsewhere are refused"),
    "position_ids": Argument("honoured", "as transformers prepares them; others are refused", lambda value: False),
    "inputs_embeds": Argument("refused", "drafts are token ids, and so must the prompt be"),
    "token_type_ids": Argument("refused", "drafts carry no token types"),
    "past_key_values": _honoured(
        "a DynamicCache of a prefix of input_ids is taken up and, at the end, holds the text up to where the first row "
        "ended; other caches, and models with recurrent state, are refused"
    ),
    "cache": _honoured("as `past_key_values`, its older name"),
    "tokenizer": _honoured("for stop_strings; beside `custom_generate=fast` transformers drops it: use fast.generate"),
    # where settings come from
    "generation_config": _honoured("with keyword overrides and the model's own defaults, as in transformers"),
    "seed": _honoured("outpace's own: an int (return sequence j of a prompt is drawn with seed + j), or one per row"),
    # length and ends
    "max_new_tokens": _honoured(""),
    "max_length": _honoured("padding included"),
    "min_new_tokens": _honoured(""),
    "min_length": _honoured("padding included"),
    "max_time": _honoured("seconds; asked once per committed token"),
    "stop_strings": _honoured("beside `custom_generate=fast` transformers refuses it: use fast.generate"),
    "eos_token_id": _honoured("one or several"),
    "pad_token_id": _honoured("what ended rows are filled with"),
    "bos_token_id": _honoured("begins a text without prompt"),
    "stopping_criteria": _honoured("asked once per committed token, with the exact text"),
    # choosing tokens
    "do_sample": _honoured("drawn with counter-based noise: other draws than transformers', of the same distribution"),
    "temperature": _honoured(""),
    "top_k": _honoured(""),
    "top_p": _honoured(""),
    "top_h": _honoured(""),
    "min_p": _honoured(""),
    "typical_p": _honoured(""),
    "epsilon_cutoff": _honoured(""),
    "eta_cutoff": _honoured(""),
    "repetition_penalty": _honoured(""),
    "encoder_repetition_penalty": _honoured(""),
    "no_repeat_ngram_size": _honoured(""),
    "encoder_no_repeat_ngram_size": _honoured(""),
    "bad_words_ids": _honoured(""),
    "sequence_bias": _honoured(""),
    "suppress_tokens": _honoured(""),
    "begin_suppress_tokens": _honoured(""),
    "forced_bos_token_id": _honoured(""),
    "forced_eos_token_id": _honoured(""),
    "exponential_decay_length_penalty": _honoured(""),
    "remove_invalid_values": _honoured(""),
    "renormalize_logits": _honoured(""),
    "prefix_allowed_tokens_fn": _honoured(""),
    "watermarking_config": _honoured(""),
    "guidance_scale": _honoured("runs the model once more per token, as in transformers"),
    "negative_prompt_ids": _honoured("with guidance_scale"),
    "negative_prompt_attention_mask": _honoured("with guidance_scale"),
    "logits_processor": _honoured("called once per committed token, in order, with the exact text"),
    # what comes back
    "num_return_sequences": _honoured(""),
    "return_dict_in_generate": _honoured("`cache` is None for models with recurrent state"),
    "output_scores": _honoured("zeros for rows that have ended"),
    "output_logits": _honoured("zeros for rows that have ended"),
    "output_attentions": Argument("refused", "a tree's attention is not that of its text"),
    "output_hidden_states": Argument("refused", "hidden states of drafts are not kept"),
    "streamer": _honoured("the prompt once, then each token in order; ended once, also on an error"),
    # how it is computed
    "use_cache": _honoured("False gives the same text; outpace always uses its cache"),
    "logits_to_keep": _idle("outpace asks for the scores that it needs"),
    "cache_implementation": Argument("refused", _CACHE, lambda value: value not in (None, "dynamic", "hybrid")),
    "cache_config": Argument("refused", _CACHE),
    "max_cache_len": Argument("refused", _CACHE),
    "prefill_chunk_size": Argument("refused", "give prefill_chunk to accelerate()"),
    "disable_compile": _idle("nothing is compiled here"),
    "compile_config": Argument("refused", "compile the model before accelerate(): torch.compile(model)"),
    "synced_gpus": Argument("refused", "models sharded over processes are not supported"),
    "trust_remote_code": Argument("refused", "it belongs to custom_generate"),
    "custom_generate": Argument("refused", "fast.generate is one itself"),
    "token_healing": Argument("refused", "transformers needs its own loop for it; heal the prompt before"),
    "continuous_batching_config": _idle("only matters for generate_batch, as in transformers"),
    "low_memory": Argument("refused", _BEAMS),
    # other ways of decoding
    "num_beams": Argument("refused", _BEAMS, _is_above_one),
    "num_beam_groups": Argument("refused", _BEAMS, _is_above_one),
    "diversity_penalty": Argument("refused", _BEAMS, bool),
    "constraints": Argument("refused", _BEAMS),
    "force_words_ids": Argument("refused", _BEAMS),
    "penalty_alpha": Argument("refused", "contrastive search is not supported; use transformers' own generate", bool),
    "dola_layers": Argument("refused", "DoLa decoding is not supported; use transformers' own generate"),
    "early_stopping": _idle(_NO_BEAMS),
    "length_penalty": _idle(_NO_BEAMS),
    "assistant_model": Argument("refused", _OURS),
    "prompt_lookup_num_tokens": Argument("refused", _OURS),
    "assistant_early_exit": Argument("refused", _OURS),
    "use_mtp": Argument("refused", _OURS),
    "speculation_type": Argument("refused", _OURS),
    "is_assistant": Argument("refused", _OURS),
    "assistant_tokenizer": _idle(_NO_ASSISTANT),
    "num_assistant_tokens": _idle(_NO_ASSISTANT),
    "num_assistant_tokens_schedule": _idle(_NO_ASSISTANT),
    "assistant_confidence_threshold": _idle(_NO_ASSISTANT),
    "assistant_ensemble_weight": _idle(_NO_ASSISTANT),
    "assistant_lookbehind": _idle(_NO_ASSISTANT),
    "target_lookbehind": _idle(_NO_ASSISTANT),
    "max_matching_ngram_size": _idle("only matters with prompt_lookup_num_tokens, as in transformers"),
    "decoder_start_token_id": _idle("only matters for encoder-decoder models, as in transformers"),
}


def refuse(values: Mapping[str, Any]) -> None:
    """Raises InputError for the first argument that cannot be honoured. values: argument -> value seen."""
    for name, value in values.items():
        argument = ARGUMENTS.get(name)
        if argument is not None and argument.is_refused(value):
            is_plain = isinstance(value, str | int | float | list | tuple | dict)
            seen = repr(value)[:80] if is_plain else f"<{type(value).__name__}>"
            raise InputError(f"generate({name}={seen}) cannot be honoured: {argument.note}.")


def check(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Raises InputError for what was asked for and cannot be honoured."""
    refuse({name: getattr(config, name, None) for name in ARGUMENTS} | model_kwargs)
    for name, value in vars(GenerationConfig()).items():  # not of the config, which may hold anything from the hub
        seen = getattr(config, name, None)
        if name not in ARGUMENTS and name not in _METADATA and not name.startswith("_") and seen not in (None, value):
            raise InputError(f"generate({name}={seen!r}) is not known to this version of outpace. Leave it out.")
    given = {name: value for name, value in model_kwargs.items() if value is not None}
    # transformers adds an empty dictionary of its own for models that could take images.
    unknown = [
        name for name, value in given.items() if name not in _INPUTS and not (isinstance(value, dict) and not value)
    ]
    if unknown:
        raise InputError(
            f"generate({unknown[0]}=…) is an input of the model that drafted tokens do not carry. Leave it out, or use "
            "transformers' own generate."
        )


def paddings(input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> list[int]:
    """How many columns of left padding each row has. Raises InputError for masks and positions of another kind."""
    rows, length = input_ids.shape
    if length == 0:
        raise InputError("The prompt is empty: there is no token to go on from. Give at least one.")
    mask = model_kwargs.get("attention_mask")
    mask_length = getattr(config, "_mask_length", length) if mask is None else mask.shape[1]
    if mask_length != length:
        raise InputError(
            f"attention_mask has {mask_length} columns and input_ids {length}. With past_key_values, give the whole "
            "text as input_ids, not only what is new: drafts are made from it."
        )
    columns = torch.arange(length, device=input_ids.device)
    paddings = torch.zeros(rows, dtype=torch.int64) if mask is None else (mask != 0).int().argmax(-1)
    is_text = columns >= paddings.to(columns.device)[:, None]
    if mask is not None and not torch.equal(mask.to(columns.device) != 0, is_text):
        raise InputError(
            "attention_mask has zeros that are not left padding. Pad on the left (tokenizer.padding_side='left'), and "
            "give every row at least one token."
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        wanted = (is_text.long().cumsum(-1) - 1)[is_text]
        fits = positions.dim() == 2 and positions.shape[0] in (1, rows) and positions.shape[1] >= length
        if not fits or not torch.equal(positions.to(columns.device)[:, :length].expand(rows, -1)[is_text], wanted):
            raise InputError("position_ids are not those of the text (0, 1, 2, … after the padding). Leave them out.")
    return paddings.tolist()


def as_markdown() -> str:
    """The table of the documentation."""
    lines = ["| argument | | |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {argument.fate} | {argument.note} |" for name, argument in ARGUMENTS.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown())
