"""The command ``allhands``: the work behind a verb is imported only when it is used."""

from __future__ import annotations

import errno
import os
import sys
from itertools import pairwise
from typing import Any

from allhands.cli import commands
from allhands.cli.parser import App, UnknownCommand, with_auto_resume
from allhands.config.aliases import canonical_flag, instead_of_command
from allhands.errors import AllhandsError, behind_import
from allhands.io.paths import check_variables
from allhands.io.terminal import tell

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_INTERRUPTED = 130
_NOTHING = "nothing was written"
# Words on the state after Ctrl-C, for commands that print no message of their own. Files are
# written whole at the end.
_LEFT = {
    **dict.fromkeys(
        ("fuse", "export", "import", "model get", "tokenizer train", "data prepare"), _NOTHING
    ),
    "generate": "the answer is not complete",
    "compare": "no answers were compared, and none were written",
    "eval": "there is no result",
    "plan": "no plan was made, and none was kept",
    "data check": "the data were not checked to their end",
    **dict.fromkeys(("cluster bench", "cluster check"), "there is no result"),
}
_TRAINING = {"train", "pretrain", "plan"}  # verbs with the options of a training


def make_app(*called: str) -> App:
    """Return the parser with every verb; ``called``: first words of the command line, so that
    modules of other verbs are not imported.
    """
    app = App(
        name="allhands",
        help="Fine-tune language models on MLX, on one computer or on every computer you own.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        # Plain help: the rich one cuts long flags off at 80 columns and takes [brackets] for
        # markup.
        rich_markup_mode=None,
        context_settings={
            "token_normalize_func": canonical_flag,
            "help_option_names": ["-h", "--help"],
        },
    )
    commands.register(app, called)
    return app


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with a documented code.

    Only a defect of allhands shows a traceback.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        arguments = ["version"]
    if _TRAINING.intersection(arguments[:1]):
        arguments = with_auto_resume(arguments)
    try:
        code = _call(arguments)
    except KeyboardInterrupt:
        _tell_interrupted(arguments)
        code = _INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # The reader of our output has gone (a pager, head), so nothing needs to be printed. rich
        # and the parser turn the BrokenPipeError into a SystemExit of their own.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _silence_output()
        code = 0
    except Exception as error:
        known = behind_import(error)
        if isinstance(known, KeyboardInterrupt):
            _tell_interrupted(arguments)
            code = _INTERRUPTED
        elif (code := _exit_of(known, with_code=_is_verbose(arguments))) is None:
            raise
    sys.exit(code)


def _call(arguments: list[str]) -> int:
    """Call the verb, and return its exit code."""
    check_variables(os.environ)
    called = [canonical_flag(word) for word in arguments[:2]] or [""]
    result: Any = make_app(*called)(args=arguments, prog_name="allhands", standalone_mode=False)
    code = result if isinstance(result, int) else 0
    sys.stdout.flush()  # here its error can still be reported
    if code == _INTERRUPTED and not {"train", "pretrain", "launch"}.intersection(arguments[:1]):
        # The parser passes Ctrl-C on as this code; training has said more about it already.
        _tell_interrupted(arguments)
    return code


def _tell_interrupted(arguments: list[str]) -> None:
    """Print that Ctrl-C ended the command, and the state that is left."""
    from allhands.infer.dialogue import VARIABLE

    if VARIABLE in os.environ:
        return  # the process with the terminal prints this
    verbs = (" ".join(arguments[:count]) for count in (1, 2))
    left = next((_LEFT[verb] for verb in verbs if verb in _LEFT), None)
    tell(f"allhands: interrupted{': ' + left if left else ''}")


def _silence_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_of(error: BaseException, *, with_code: bool) -> int | None:
    """Print an error; return its exit code, or ``None`` for a defect of allhands."""
    if isinstance(error, UnknownCommand):
        error.hint = instead_of_command(error.where or "", error.siblings, _all_commands)
    if isinstance(error, AllhandsError):
        print_error(error, with_code=with_code)
        return error.exit_code
    show = getattr(error, "show", None)
    if callable(show):
        show()  # the help of a group of verbs that is called alone
        return int(getattr(error, "exit_code", 2))
    if type(error).__name__ in ("Exit", "Abort"):
        return int(getattr(error, "exit_code", 1))
    if isinstance(error, OSError) and error.errno in _NO_ROOM and error.filename is None:
        # Our functions that write files name the file in their errors. So this error is about
        # standard output.
        from allhands.io.files import storage_error_of

        _silence_output()
        told = storage_error_of(error, "standard output")
        print_error(told)
        return told.exit_code
    return None


def _all_commands() -> list[str]:
    """Return the names of all commands, each with its group."""
    import typer.main

    found: list[str] = []
    groups: dict[str, Any] = {"": typer.main.get_command(make_app())}
    while groups:
        path, group = groups.popitem()
        for name, command in group.commands.items():
            inner = f"{path} {name}".strip()
            groups |= {inner: command} if hasattr(command, "commands") else {}
            found += [] if hasattr(command, "commands") else [inner]
    return found


def print_error(error: AllhandsError, *, with_code: bool = False) -> None:
    """Print one clear message on standard error: what, where, what to do."""
    tell(f"allhands: error: {f'[{error.code}] ' if with_code else ''}{error}")


def _is_verbose(arguments: list[str]) -> bool:
    """Return whether the words of a command ask for verbose output; the words may be invalid."""
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    flags = {word.replace("_", "-") for word in words}
    pairs = pairwise(words)
    return (
        not flags.isdisjoint(("-v", "--verbose", "--log-level=verbose"))
        or ("--log-level", "verbose") in pairs
    )
