"""``allhands chat``: talk with a model, turn by turn."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allhands.cli.options import ChatTemplate, System, chat_choice
from allhands.errors import AllhandsError
from allhands.io.paths import require_words
from allhands.io.terminal import tell

if TYPE_CHECKING:
    from allhands.infer.conversation import Conversation

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
) -> None:
    """Talk with a model, with or without a trained adapter.

    It remembers what was said. /reset forgets it, /exit or Ctrl-D leaves, Ctrl-C stops an answer. Each line of a pipe
    is a turn.
    """
    from allhands.cli.talk import tell_harm, tell_notes
    from allhands.infer.conversation import Conversation
    from allhands.infer.generate import Sampling, load_for_generation
    from allhands.model.beyond import answering, limits_told

    with limits_told(answering(model, adapter_path, trust_remote_code=trust_remote_code)):
        choice = chat_choice(chat_template, system)
        loaded = load_for_generation(model, adapter_path, trust_remote_code=trust_remote_code, chat=choice)
        tell_notes(loaded)
        tell_harm(adapter_path, model)
        sampling = Sampling(temp, top_p, seed)
        _talk(Conversation(loaded, sampling, max_tokens=max_tokens, system_prompt=system_prompt))


def _talk(conversation: Conversation) -> None:
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


def _answer(conversation: Conversation, line: str) -> None:
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
