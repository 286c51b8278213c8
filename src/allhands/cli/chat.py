"""``allhands chat``: talk with a model, turn by turn."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from allhands.cli.answering import chat_choice, ranks_asked, tell_harm, tell_notes
from allhands.cli.divided import at_terminal, require_terminal_here, run_divided
from allhands.cli.verbs_models import Chat
from allhands.errors import AllhandsError
from allhands.infer.dialogue import VARIABLE, Talks
from allhands.io.paths import require_words
from allhands.io.terminal import tell

if TYPE_CHECKING:
    from allhands.infer.conversation import Conversation
    from allhands.infer.divided import AnsweringRanks
    from allhands.model.load import LoadedModel

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(asked: Chat) -> None:
    """Run the verb."""
    ranks = ranks_asked(asked)
    choice = chat_choice(asked.chat_template, asked.system)
    if ranks is not None and VARIABLE not in os.environ:
        require_terminal_here(asked.hosts, asked.hostfile)
        raise typer.Exit(at_terminal(_talk))
    from allhands.infer.conversation import Conversation
    from allhands.infer.generate import Sampling, load_for_generation
    from allhands.model.beyond import answering, limits_told

    def conversation(loaded: LoadedModel, *, speaks: bool = True) -> Conversation:
        if speaks:
            tell_notes(loaded)
            tell_harm(asked.adapter_path, asked.model)
        how = Sampling(asked.temp, asked.top_p, asked.seed)
        return Conversation(loaded, how, max_tokens=asked.max_tokens, system_prompt=asked.system_prompt)

    if ranks is None:
        with limits_told(answering(asked.model, asked.adapter_path, trust_remote_code=asked.trust_remote_code)):
            loaded = load_for_generation(
                asked.model, asked.adapter_path, trust_remote_code=asked.trust_remote_code, chat=choice
            )
            _talk(conversation(loaded))
        return
    path = os.environ[VARIABLE]

    def work(answering: AnsweringRanks, speaks: bool) -> None:
        talks = conversation(answering.load(asked.adapter_path, choice), speaks=speaks)
        answering.converse(talks, path)

    env = {VARIABLE: path}
    raise typer.Exit(
        run_divided(asked.model, asked.adapter_path, ranks, work, trust_remote_code=asked.trust_remote_code, env=env)
    )


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
        tell(f"allhands: error: this line cannot be asked: {error}")
        return False
    return True


def _lines() -> Generator[str]:
    """What the person types, or the lines of a pipe, until the end or Ctrl-D."""
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
        # The conversation is as it was before: another line may do.
        tell(f"allhands: error: {error}")
    finally:
        pieces.close()
