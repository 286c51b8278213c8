"""Start of ranks that generate answers together, each with some of the model's blocks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allhands.cluster.environment import LaunchPlace, recognise_here
from allhands.cluster.evaluating import run_on_ranks
from allhands.cluster.guard import exit_code_of
from allhands.cluster.hosts import hosts_named
from allhands.cluster.join import surroundings_of
from allhands.cluster.worker import WorkerContext
from allhands.config.eval_schema import EvalConfig
from allhands.errors import ConfigError
from allhands.infer.dialogue import VARIABLE, RanksEnded, RemoteConversation, Talks, Wire
from allhands.io.staging import Scratch

if TYPE_CHECKING:
    from allhands.infer.divided import AnsweringRanks

_LOOK_S = 0.1
# Seconds that ranks have to end after the conversation: they may be computing a token.
_END_S = 30.0


def run_divided(
    model: str,
    adapter_path: Path | None,
    ranks: Mapping[str, Any],
    work: Callable[[AnsweringRanks, bool], None],
    *,
    trust_remote_code: bool = False,
    env: Mapping[str, str] | None = None,
) -> int:
    """Start the ranks, or be one of them; return the exit code.

    Args:
        ranks: options of a training that describe the ranks and their blocks.
        work: work of a rank; its second argument is True on the rank that prints.
        env: further environment variables of the ranks.

    Raises:
        AllhandsError: the options do not match, or there is no such adapter.
    """

    def answer(config: EvalConfig, launch: LaunchPlace, worker: WorkerContext) -> None:
        from allhands.infer.divided import AnsweringRanks

        work(AnsweringRanks(config, surroundings_of(worker, launch, config)), launch.rank == 0)

    values = {"model": model, "trust_remote_code": trust_remote_code, **ranks}
    values |= {} if adapter_path is None else {"adapter_path": str(adapter_path)}
    return run_on_ranks(values, answer, "stopped before the answer", env)


def at_terminal(talk: Callable[[Talks], None]) -> int:
    """Run a chat with ranks under a supervisor process; return the exit code.

    This process has the terminal and Ctrl-C: it reads lines, and the ranks get only the questions.

    Args:
        talk: reads lines and prints answers.
    """
    with Scratch() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        path = folder / "chat"
        server.bind(str(path))
        server.listen(1)
        ranks = subprocess.Popen(
            [sys.executable, "-m", "allhands", *sys.argv[1:]],
            stdin=subprocess.DEVNULL,
            env={**os.environ, VARIABLE: str(path)},
            start_new_session=True,
        )
        try:
            wire = _accepted(server, ranks)
        except KeyboardInterrupt:
            ranks.send_signal(signal.SIGINT)
            return exit_code_of(ranks.wait())
        with suppress(RanksEnded), ExitStack() as stack:
            stack.callback(_end, wire, ranks)
            if wire is not None:
                conversation = RemoteConversation(wire)
                with _noticed(ranks, conversation):
                    talk(conversation)
        return exit_code_of(ranks.wait())


def _accepted(server: socket.socket, ranks: subprocess.Popen[bytes]) -> Wire | None:
    """Wait until rank 0 has loaded the model and connects; ``None`` if the ranks have ended."""
    server.settimeout(_LOOK_S)
    while ranks.poll() is None:
        with suppress(TimeoutError):
            connection, _ = server.accept()
            connection.settimeout(None)
            return Wire(connection)
    return None


def _end(wire: Wire | None, ranks: subprocess.Popen[bytes]) -> None:
    """End the conversation, and with it the ranks."""
    if wire is not None:
        wire.close()
    try:
        ranks.wait(_END_S)
    except subprocess.TimeoutExpired:
        ranks.terminate()


@contextmanager
def _noticed(ranks: subprocess.Popen[bytes], conversation: RemoteConversation) -> Generator[None]:
    """Raise :class:`RanksEnded` in the block as soon as the supervisor ends, also while a person
    types.
    """

    def ended(number: int, frame: object) -> None:
        # During an answer its reader notices the end.
        if not conversation.answering and ranks.poll() is not None:
            raise RanksEnded

    before = signal.signal(signal.SIGCHLD, ended)
    try:
        ended(0, None)
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def require_terminal_here(hosts: str | None, hostfile: str | None) -> None:
    """Refuse a chat under another launcher, which keeps the terminal, and a chat without a rank on
    this computer.

    Raises:
        ConfigError: a chat with these ranks is impossible.
    """
    launch = recognise_here()
    if launch.launcher not in ("single", "allhands"):
        raise ConfigError(
            f"{launch.launcher} keeps the terminal, so a chat is impossible",
            code="terminal-unreachable",
            where="allhands chat",
            hint="start it without another launcher: -n or --hosts starts the ranks",
        )
    if (hosts or hostfile) and all(host.ssh is not None for host in hosts_named(hosts, hostfile)):
        raise ConfigError(
            "no rank is on this computer, but a chat needs a rank here",
            code="terminal-unreachable",
            where=f"--hosts {hosts}" if hosts else f"--hostfile {hostfile}",
            hint="add this computer, or start the chat on one of the others; allhands generate --prompt works from "
            "anywhere",
        )
