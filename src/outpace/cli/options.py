"""Options that several commands share, and the loading that goes with them."""

from __future__ import annotations

import json
import logging
import math
from typing import Annotated, Any

import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..accept import Acceptance
from ..choosing import DRAFTERS, Vocabularies
from ..engine import Engine
from ..loading import DtypeName, PlannerName, load
from ..models import progress_bar
from ..options import Exactness
from ..prompts import NamedPrompt
from ..quantize import DraftQuantize
from ..request import Prompt

talk = Console(stderr=True, highlight=False)


_DRAFTER_HELP = "; ".join(f"{name}: {text}" for name, text in DRAFTERS.items())

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Folder, .gguf file or hub id. Default: the embedded SmolLM2-135M-Instruct."),
]
DraftModel = Annotated[
    str | None,
    typer.Option(help="A smaller model with the same vocabulary that drafts (path or hub id)."),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help=f"Who guesses. {_DRAFTER_HELP}. auto: the best union that the model allows. Join several with +, as in "
        "suffix+recycle. [default: auto, or model]",
    ),
]
K = Annotated[int | None, typer.Option("--k", help="Most drafted tokens per pass. [default: what the drafter wants]")]
Width = Annotated[int, typer.Option(help="Branches of a draft model's tree; 1 drafts chains.")]
ConfidenceThreshold = Annotated[
    float, typer.Option(help="A draft model goes no deeper where it expects acceptance below this.")
]
VocabulariesOption = Annotated[
    Vocabularies,
    typer.Option(
        "--vocabularies",
        help="How the tokens of target and draft model meet. equal: the same ids. shared: the same words under other "
        "ids. text: any two tokenizers, through text.",
    ),
]
DraftQuantizeOption = Annotated[
    DraftQuantize,
    typer.Option(
        "--draft-quantize",
        help="Weights of the draft model or heads: int8, none for their own, or auto: int8 where that measures faster.",
    ),
]
Corpus = Annotated[str | None, typer.Option(help="A file or folder of text or code to copy drafts from.")]
Lookahead = Annotated[
    str | None,
    typer.Option(metavar="W,N,G", help="Of --drafter lookahead: window, n-gram and guesses. [default: 15,5,15]"),
]
Heads = Annotated[str | None, typer.Option(help="A folder with trained heads (Medusa) for the model.")]
PlannerOption = Annotated[
    PlannerName,
    typer.Option(
        "--planner",
        envvar="OUTPACE_PLANNER",
        help="auto: draft as much as pays on this machine and text, measured, and at most k. off: always draft k.",
    ),
]
AcceptanceOption = Annotated[
    Acceptance,
    typer.Option(
        "--acceptance",
        help="coupled: the same text as without drafts, for every seed. rejection: exact in distribution. "
        "typical: NOT lossless.",
    ),
]
ExactnessOption = Annotated[
    Exactness,
    typer.Option(
        "--exactness",
        help="numerical: texts equal up to ties, where two choices are nearer than rounding. bitwise: passes of one "
        "fixed shape, so that they are equal bit by bit; plain passes then cost as much as those with drafts.",
    ),
]
Dtype = Annotated[DtypeName, typer.Option(help="Precision of the weights; auto: float32 on CPU, as stored elsewhere.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 … [default: a GPU where there is one]")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of text.")]


def load_engine(model: str | None, *, lookahead: str | None = None, **arguments: Any) -> Engine:
    """`outpace.load` with a progress bar on stderr and without transformers' own chatter."""
    quiet_transformers()
    with progress_bar() as progress:
        return load(model, lookahead=_three_numbers(lookahead), progress=progress, **arguments)


def _three_numbers(text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
        raise typer.BadParameter(f"{text!r} is not of the form W,N,G, as in 15,5,15", param_hint="--lookahead")
    window, ngram, guesses = (int(part) for part in parts)
    return window, ngram, guesses


def quiet_transformers() -> None:
    """Only outpace's own warnings reach the terminal, one line each."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.basicConfig(format="outpace: %(message)s", level=logging.WARNING)


def to_json(value: Any) -> str:
    """Indented JSON that every reader takes: a score that is no finite number is null."""
    return json.dumps(_finite(value), ensure_ascii=False, indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def counting_bar() -> Progress:
    """A bar on stderr for a known number of decoding runs."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=talk, transient=True)


def usable(engine: Engine, prompt: NamedPrompt) -> Prompt:
    """A prompt of a file; chats for models without a template become their last message's text."""
    if isinstance(prompt.prompt, str) or engine.tokenizer.chat_template:
        return prompt.prompt
    return prompt.prompt[-1]["content"]


def as_prompt(engine: Engine, text: str, chat: bool | None, system: str | None) -> Any:
    """The text as it is, or as chat messages when asked for or when the tokenizer has a template."""
    has_template = bool(engine.tokenizer.chat_template)
    if chat is False or (chat is None and not has_template):
        if system is not None:
            raise typer.BadParameter(
                "a system message needs a chat, and this model has no chat template or --no-chat was given",
                param_hint="--system",
            )
        return text
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text}]
