"""Options that several commands share, and the loading that goes with them."""

from __future__ import annotations

import json
import logging
import math
from typing import Annotated, Any

import transformers
import typer
from rich.console import Console

from ..accept import Acceptance
from ..engine import Engine
from ..loading import DRAFTERS, DrafterName, DtypeName, load
from ..models import progress_bar

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
    DrafterName | None, typer.Option("--drafter", help=f"Who guesses. {_DRAFTER_HELP}. [default: suffix, or model]")
]
K = Annotated[int, typer.Option("--k", help="Most drafted tokens per pass.")]
Width = Annotated[int, typer.Option(help="Branches of a draft model's tree; 1 drafts chains.")]
ConfidenceThreshold = Annotated[
    float, typer.Option(help="A draft model goes no deeper where it expects acceptance below this.")
]
AcceptanceOption = Annotated[
    Acceptance,
    typer.Option(
        "--acceptance",
        help="coupled: the same text as without drafts, for every seed. rejection: exact in distribution. "
        "typical: NOT lossless.",
    ),
]
Dtype = Annotated[DtypeName, typer.Option(help="Precision of the weights; auto: float32 on CPU, as stored elsewhere.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 … [default: a GPU where there is one]")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of text.")]


def load_engine(
    model: str | None,
    draft_model: str | None,
    drafter: DrafterName | None,
    k: int,
    width: int,
    confidence_threshold: float,
    acceptance: Acceptance,
    dtype: DtypeName,
    device: str | None,
) -> Engine:
    """`outpace.load` with a progress bar on stderr and without transformers' own chatter."""
    quiet_transformers()
    with progress_bar() as progress:
        return load(
            model,
            drafter=drafter,
            draft_model=draft_model,
            k=k,
            width=width,
            confidence_threshold=confidence_threshold,
            acceptance=acceptance,
            dtype=dtype,
            device=device,
            progress=progress,
        )


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
