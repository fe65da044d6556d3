"""The command line. Each command file parses, calls the library, and prints; stdout is data, stderr is talk."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer

from ..errors import OutpaceError
from .bench import bench
from .doctor import doctor
from .evaluate import evaluate
from .generate import generate
from .profile import profile
from .train import train
from .tune import tune
from .verify import verify

app = typer.Typer(
    name="outpace",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(verify)
app.command()(doctor)
app.command()(profile)
app.command()(tune)
app.command()(bench)
app.command()(train)
app.command()(evaluate)
_COMMANDS = ("generate", "verify", "doctor", "profile", "tune", "bench", "train", "evaluate")


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    """Decode Hugging Face language models faster, with exactly the text they would have written."""
    if version:
        print(importlib.metadata.version("outpace"))
        raise typer.Exit()


def main() -> None:
    """Entry point. Without a command it is `generate`: `outpace "prompt"`, `outpace -`, `outpace --seed 1 "prompt"`."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] not in (*_COMMANDS, "--help", "--version"):
        arguments = ["generate", *arguments]
    try:
        app(arguments, prog_name="outpace")
    except OutpaceError as error:
        print(f"outpace: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception:
        print("outpace: this is a bug of ours. Please report it with the lines below.", file=sys.stderr)
        raise
