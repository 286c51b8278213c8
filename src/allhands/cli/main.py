"""The command ``allhands``: one verb a module, imported only when it is used."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from allhands.errors import AllhandsError

app = typer.Typer(
    name="allhands",
    help="Fine-tune language models on MLX, on one computer or on every computer you own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with a documented code; only a defect of allhands shows a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    from allhands.cli import commands

    commands.register(app)
    try:
        result: Any = app(args=arguments, prog_name="allhands", standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except AllhandsError as error:
        print_error(error)
        code = error.exit_code
    except KeyboardInterrupt:
        print("allhands: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # The reader of our output has gone (a pager, head): nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        code = _exit_of(error)
        if code is None:
            raise
    sys.exit(code)


def _exit_of(error: Exception) -> int | None:
    """Exit code of the command-line parser's own exceptions, whose message is shown; ``None`` for others."""
    show = getattr(error, "show", None)
    if callable(show):
        show()
        return int(getattr(error, "exit_code", 2))
    if type(error).__name__ in ("Exit", "Abort"):
        return int(getattr(error, "exit_code", 1))
    return None


def print_error(error: AllhandsError) -> None:
    """One clear message on standard error: what, where, what to do."""
    print(f"allhands: error: {error}", file=sys.stderr, flush=True)
