"""``allhands chat``: talk with a model, turn by turn."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from allhands.cli.answering import (
    Adapter,
    BackendName,
    DividedBy,
    Hostfile,
    Hosts,
    MaxTokens,
    ModelName,
    NumRanks,
    Seed,
    Split,
    SystemPrompt,
    Temperature,
    TopP,
    TrustCode,
    ranks_asked,
    tell_harm,
    tell_notes,
)
from allhands.cli.divided import at_terminal, require_terminal_here, run_divided
from allhands.cli.options import ChatTemplate, System, chat_choice
from allhands.errors import AllhandsError
from allhands.infer.dialogue import VARIABLE, Talks
from allhands.io.paths import require_words
from allhands.io.terminal import tell

if TYPE_CHECKING:
    from allhands.infer.conversation import Conversation
    from allhands.infer.divided import AnsweringRanks
    from allhands.model.load import LoadedModel

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(
    model: ModelName = "demo",
    adapter_path: Adapter = None,
    system_prompt: SystemPrompt = None,
    max_tokens: MaxTokens = 512,
    temp: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    chat_template: ChatTemplate = None,
    system: System = "template",
    trust_remote_code: TrustCode = False,
    strategy: DividedBy = None,
    num_ranks: NumRanks = None,
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    backend: BackendName = None,
    pp_split: Split = None,
) -> None:
    """Talk with a model, with or without a trained adapter.

    It remembers what was said. /reset forgets it, /exit or Ctrl-D leaves, Ctrl-C stops an answer. Each line of a pipe
    is a turn. A model larger than one computer talks with --strategy pipeline.
    """
    ranks = ranks_asked(locals())
    choice = chat_choice(chat_template, system)
    if ranks is not None and VARIABLE not in os.environ:
        require_terminal_here(hosts, hostfile)
        raise typer.Exit(at_terminal(_talk))
    from allhands.infer.conversation import Conversation
    from allhands.infer.generate import Sampling, load_for_generation
    from allhands.model.beyond import answering, limits_told

    def conversation(loaded: LoadedModel, *, speaks: bool = True) -> Conversation:
        if speaks:
            tell_notes(loaded)
            tell_harm(adapter_path, model)
        how = Sampling(temp, top_p, seed)
        return Conversation(loaded, how, max_tokens=max_tokens, system_prompt=system_prompt)

    if ranks is None:
        with limits_told(answering(model, adapter_path, trust_remote_code=trust_remote_code)):
            loaded = load_for_generation(model, adapter_path, trust_remote_code=trust_remote_code, chat=choice)
            _talk(conversation(loaded))
        return
    path = os.environ[VARIABLE]

    def work(answering: AnsweringRanks, speaks: bool) -> None:
        talks = conversation(answering.load(adapter_path, choice), speaks=speaks)
        answering.converse(talks, path)

    env = {VARIABLE: path}
    raise typer.Exit(run_divided(model, adapter_path, ranks, work, trust_remote_code=trust_remote_code, env=env))


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
