"""``allhands chat``: talk with a model, turn by turn."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allhands.cli.options import ChatTemplate, System, chat_choice
from allhands.cli.rank_options import BackendName, DividedBy, Hostfile, Hosts, NumRanks, Split, ranks_asked
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
    model: Annotated[
        str, typer.Option("--model", help="Model directory, Hugging Face repository, or 'demo'.")
    ] = "demo",
    adapter_path: Annotated[Path | None, typer.Option("--adapter-path", help="Directory of a training run.")] = None,
    system_prompt: Annotated[str | None, typer.Option("--system-prompt", help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Tokens of an answer at most.")] = 512,
    temp: Annotated[float, typer.Option("--temp", min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="Nucleus sampling; 1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampling.")] = 0,
    chat_template: ChatTemplate = None,
    system: System = "template",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow a model's own Python code.")
    ] = False,
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
    ranks = ranks_asked(
        strategy, num_ranks=num_ranks, hosts=hosts, hostfile=hostfile, backend=backend, pp_split=pp_split
    )
    choice = chat_choice(chat_template, system)
    if ranks is not None and VARIABLE not in os.environ:
        from allhands.cli.divided import at_terminal, require_terminal_here

        require_terminal_here(hosts, hostfile)
        raise typer.Exit(at_terminal(_talk))
    from allhands.cli.talk import tell_harm, tell_notes
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
    from allhands.cli.divided import run_divided

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
