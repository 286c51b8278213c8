"""``allhands chat``: talk with a model, turn by turn."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from allhands.cli.answering import chat_choice, ranks_asked
from allhands.cli.generate import with_model
from allhands.cli.verbs_models import Chat
from allhands.cluster.answering import at_terminal, require_terminal_here
from allhands.errors import AllhandsError
from allhands.infer.dialogue import VARIABLE, Talks
from allhands.io.paths import require_words
from allhands.io.terminal import tell

if TYPE_CHECKING:
    from allhands.infer.divided import AnsweringRanks
    from allhands.model.load import LoadedModel

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(asked: Chat) -> None:
    """Run the verb."""
    ranks = ranks_asked(asked)
    chat_choice(asked)  # refuses wrong values early
    path = os.environ.get(VARIABLE)
    if ranks is not None and path is None:
        require_terminal_here(asked.hosts, asked.hostfile)
        raise typer.Exit(at_terminal(_talk))

    def answer(loaded: LoadedModel, _: bool, answering: AnsweringRanks | None) -> None:
        from allhands.infer.conversation import Conversation
        from allhands.infer.generate import Sampling

        how = Sampling(asked.temp, asked.top_p, asked.seed)
        talks = Conversation(
            loaded, how, max_tokens=asked.max_tokens, system_prompt=asked.system_prompt
        )
        if answering is None:
            _talk(talks)
        else:
            answering.converse(talks, os.environ[VARIABLE])

    with_model(asked, ranks, answer, None if path is None else {VARIABLE: path})


def _talk(conversation: Talks) -> None:
    if sys.stdin.isatty():
        print(_HELP, file=sys.stderr)
    for line in _lines():
        if line == "/exit":
            break
        if line == "/reset":
            conversation.reset()
            print("(forgotten)", file=sys.stderr)
        elif line.startswith("/"):
            print(f"no command {line.split()[0]}: {_HELP}", file=sys.stderr)
        elif line and _is_text(line):
            _answer(conversation, line)


def _is_text(line: str) -> bool:
    try:
        require_words(line)
    except ValueError as error:
        tell(f"allhands: error: this line cannot be used: {error}")
        return False
    return True


def _lines() -> Generator[str]:
    """Yield lines of the terminal or of a pipe, until the end or Ctrl-D."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.strip()
        return
    with suppress(ImportError):
        importlib.import_module("readline")  # makes arrow keys and the history work
    while True:
        try:
            line = input(">> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n({_HELP})", file=sys.stderr)
            continue
        yield line.strip()


def _answer(conversation: Talks, line: str) -> None:
    pieces = conversation.ask(line)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
    except KeyboardInterrupt:
        print("\n(stopped)", flush=True)
    except AllhandsError as error:
        # The conversation is unchanged, so the next line may work.
        tell(f"allhands: error: {error}")
    finally:
        pieces.close()
