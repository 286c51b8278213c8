"""Work with a trained model on this process or on several ranks: no training, and no files left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allhands.cluster.environment import LaunchPlace, recognise_here
from allhands.cluster.guard import exit_code_of
from allhands.cluster.hosts import hosts_named
from allhands.cluster.job import job_of
from allhands.cluster.join import surroundings_of
from allhands.cluster.reaper import Reaper
from allhands.cluster.training import (
    as_rank,
    check_launch,
    collector_paused,
    prepare_rank,
    recognised,
    supervise_training,
    with_hostfile,
)
from allhands.cluster.worker import WorkerContext
from allhands.config.eval_schema import EvalConfig
from allhands.config.schema import build_config
from allhands.errors import ConfigError, Interrupted, ModelError
from allhands.infer.dialogue import VARIABLE, RanksEnded, RemoteConversation, Talks, Wire
from allhands.io.staging import Scratch
from allhands.io.terminal import progress_console
from allhands.run.adapter_files import what_is

if TYPE_CHECKING:
    from allhands.infer.divided import AnsweringRanks
    from allhands.run.evaluating import Evaluation

_LOOK_S = 0.1
# Seconds that ranks have to end after the conversation: they may be computing a token.
_END_S = 30.0
_SHORT_OF_MEMORY = "divide the model among more computers (--strategy pipeline)"


def evaluate_on_ranks(flags: dict[str, Any], show: Callable[[EvalConfig, Evaluation], None]) -> int:
    """Measure loss and perplexity of a split; return the exit code.

    Args:
        flags: the given options of a test, by name.
        show: called on rank 0 with the result.

    Raises:
        AllhandsError: an option is invalid, or the evaluation failed in this process.
    """

    def work(config: EvalConfig, launch: LaunchPlace, worker: WorkerContext) -> None:
        cores = prepare_rank(config, launch)
        with collector_paused():
            from allhands.run.evaluating import run_evaluation

        console = progress_console(highlight=False) if launch.rank == 0 else None
        surroundings = replace(
            surroundings_of(worker, launch, config), console=console, cores_per_rank=cores
        )
        found = run_evaluation(config, surroundings)
        if launch.rank == 0:
            show(config, found)

    return run_on_ranks(flags, work, "stopped before the evaluation: there is no result")


def run_on_ranks(
    flags: dict[str, Any],
    work: Callable[[EvalConfig, LaunchPlace, WorkerContext], None],
    unstarted: str,
    env: Mapping[str, str] | None = None,
) -> int:
    """Work on this process, on several, or as a rank of another launcher; return the exit code.

    Args:
        flags: the given options of a test, by name.
        work: work of a rank.
        unstarted: message if a rank is stopped before it begins.
        env: further environment variables of started processes.

    Raises:
        AllhandsError: an option is invalid, or the work failed in this process.
    """
    with recognised() as launch:
        config = build_config({**flags, "test": True}, flags.get("config"), EvalConfig)
        assert isinstance(config, EvalConfig)
        check_launch(config, launch)
        elsewhere = launch.launcher == "single" and (config.hostfile or config.hosts)
        if not elsewhere:  # other computers have files of their own
            _check_adapter(config.adapter_path)
    if elsewhere or (launch.launcher == "single" and config.num_ranks > 1):
        return _supervise(config, env or {})
    return as_rank(launch, partial(work, config, launch), unstarted)


def _supervise(config: EvalConfig, env: Mapping[str, str]) -> int:
    """Start the processes, here or on several computers, and wait for them; return the exit code.

    If they fail, their logs are kept. ``env``: further environment variables of all of them.
    """
    # Not in the run's directory, because the events there belong to the training.
    scratch = Path(tempfile.mkdtemp(prefix="allhands-eval-"))
    kept = False
    try:
        with Reaper() as reaper:
            reaper.directory(scratch)
            job = replace(
                job_of(with_hostfile(config, scratch)),
                directory=scratch,
                log_dir=scratch / "logs",
                checkpoints=None,
                resume=None,
                max_restarts=0,
                resumes=False,
                # Only rank 0 has output, and programs read it.
                tag_output=bool(config.tag_output),
                keep_logs=False,
                memory_hint=_SHORT_OF_MEMORY,
                env=env,
            )
            code = supervise_training(config, job=job)
        kept = code not in (0, Interrupted.exit_code, 128 + signal.SIGTERM)
        return code
    finally:
        if not kept:
            shutil.rmtree(scratch, ignore_errors=True)


def _check_adapter(path: str) -> None:
    """Check that the adapter exists, before anything is started or loaded.

    Raises:
        ModelError: there is no adapter.
    """
    if path and not (Path(path) / "adapters.safetensors").is_file():
        found, hint = what_is(Path(path))
        raise ModelError(
            f"there is no adapter (adapters.safetensors): {found}",
            code="adapter-missing",
            where=path,
            hint=hint,
        )


# --- answers ---------------------------------------------------------------------------------------


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
