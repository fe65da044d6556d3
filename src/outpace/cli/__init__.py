"""The command line. Each command file parses, calls the library, and prints; stdout is data, stderr is talk."""

from __future__ import annotations

import sys

import typer

from ..errors import OutpaceError
from .doctor import doctor
from .generate import generate
from .verify import verify

app = typer.Typer(
    name="outpace",
    help="Decode Hugging Face language models faster, with exactly the text they would have written.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(verify)
app.command()(doctor)
_COMMANDS = ("generate", "verify", "doctor")


def main() -> None:
    """Entry point. `outpace "prompt"` is short for `outpace generate "prompt"`, and `outpace -` for its `-`."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] not in _COMMANDS and (arguments[0] == "-" or not arguments[0].startswith("-")):
        arguments = ["generate", *arguments]
    try:
        app(arguments, prog_name="outpace")
    except OutpaceError as error:
        print(f"outpace: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\noutpace: stopped", file=sys.stderr)
        sys.exit(130)
    except Exception:
        print("outpace: this is a bug of ours. Please report it with the lines below.", file=sys.stderr)
        raise
