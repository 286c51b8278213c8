"""How a rank joins its group, whatever launcher has started it, and with a time limit."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from allhands.cluster.environment import LaunchPlace, launch_here, rendezvous
from allhands.cluster.guard import write_whole
from allhands.cluster.mpi import prepare_mpi_environment
from allhands.cluster.outcome import ALL_LISTEN
from allhands.cluster.patience import Patience
from allhands.cluster.ranks import ATTEST_VARIABLE, TRIAL_VARIABLE
from allhands.cluster.worker import end_at_errors
from allhands.distributed.blame import COMPUTER_VARIABLE, circumstances_in
from allhands.distributed.mesh import Mesh
from allhands.errors import DistributedError
from allhands.io.staging import Scratch
from allhands.runtime.jit_cache import prepare_process

if TYPE_CHECKING:
    from allhands.cluster.worker import WorkerContext
    from allhands.config.schema import TrainConfig
    from allhands.distributed.backend import Communicator
    from allhands.run.context import RunContext

_log = logging.getLogger(__name__)

# For ranks of a user's own program: until all of them must be there.
_JOIN_TIMEOUT_S = 300.0
_AS_LONG_S = 7 * 86_400.0
_PATIENCE = "ALLHANDS_PEERS_TIMEOUT_S"
# Machines of a cloud start minutes apart, and their names can be looked up even later.
_CLOUDS = ("sagemaker", "vertex", "kubernetes")
_CLOUD_PATIENCE_S = 900.0

# The program that keeps the time. It prints each text after its time and then kills the rank. It
# ends silently when its standard input closes: then the group has formed, or the rank is gone.
_TIMER = f"""
import os, select, sys
for seconds, text in zip(sys.argv[2::2], sys.argv[3::2]):
    if select.select([0], [], [], float(seconds))[0]:
        break
    sys.stderr.write(text)
    sys.stderr.flush()
else:
    os.kill(int(sys.argv[1]), {int(signal.SIGKILL)})
"""
_UNCONNECTED_S = 30.0  # after this time a line says that the group has not formed yet


def mesh_of(launch: LaunchPlace, weights: Sequence[float] | None = None) -> Mesh:
    """Return this rank's place among the others; without ``weights`` all count as equally fast.

    Raises:
        ConfigError: there is not exactly one weight for each data rank.
    """
    return Mesh(
        launch.rank, launch.size, launch.local_rank, launch.local_size, tuple(weights or ())
    )


def surroundings_of(worker: WorkerContext, launch: LaunchPlace, config: TrainConfig) -> RunContext:
    """Return the :class:`RunContext` of a training run in which this process is one rank of
    ``launch``.

    If there is a supervisor, the context is connected to it.

    Raises:
        ConfigError: there is not exactly one weight for each rank.
    """
    from allhands.run.context import RunContext

    take_device(launch)

    on_trial = os.environ.get(TRIAL_VARIABLE)

    def join() -> Communicator:
        if on_trial:
            from allhands.distributed.backend import SingleProcess

            return SingleProcess()
        worker.mark_ready()
        return join_group(launch, config.start_timeout_s, deadline_outside=True)

    # If the supervisor has left ranks out, it passes the weights of the others.
    weights = os.environ.get("ALLHANDS_RANK_WEIGHTS")
    return RunContext(
        mesh=mesh_of(launch, json.loads(weights) if weights else config.given_weights),
        connect=join,
        started=worker.mark_started,
        busy=worker.mark_busy,
        beat=worker.beat,
        waits=lambda step, seconds: worker.beat("load", step, seconds),
        stop_requested=worker.stop_requested,
        regroup_requested=worker.regroup_requested,
        run_id=worker.run_id or secrets.token_hex(8),
        attempt=worker.attempt,
        moment=_began(
            on_trial if on_trial not in (None, "1") else os.environ.get("ALLHANDS_RUN_BEGAN", "")
        ),
        computer=os.environ.get(COMPUTER_VARIABLE) or socket.gethostname(),
        given=circumstances_in(os.environ),
        attest=worker.attest if ATTEST_VARIABLE in os.environ else None,
        trial=on_trial is not None,
    )


def _began(text: str) -> datetime:
    """Return the time at which the run began, as its supervisor says; without one, now."""
    with suppress(ValueError):
        return datetime.fromisoformat(text).replace(tzinfo=None)
    return datetime.now()


def take_device(launch: LaunchPlace) -> None:
    """Restrict this process to its own GPU, if the launcher has not done so.

    This must be done before MLX asks for a device.
    """
    os.environ.update(launch.exports)


def join_group(
    launch: LaunchPlace, timeout_s: float, *, deadline_outside: bool = False
) -> Communicator:
    """Connect this rank to its group, or end this process with a message after ``timeout_s``.

    If the ranks have to find each other first, that has its own time limit, see
    :func:`patience_for`. The group counts as formed when a first sum over all ranks is right.

    Args:
        deadline_outside: True if our supervisor, if there is one, ends ranks that do not start. It
            does not end ranks that wait for others which are still working. So under our supervisor
            this rank then waits for its neighbours almost without a limit.

    Raises:
        DistributedError: the ranks cannot connect, or the group has another size than the launcher
            has said.
    """
    if launch.size > 1 and launch.ranks_per_node > 1:
        raise DistributedError(
            f"{launch.launcher} has started one process for the {launch.ranks_per_node} ranks of this computer",
            code="world-size-mismatch",
            where=launch.reason,
            hint="start `allhands container` in its place, which starts them; or set ALLHANDS_RANKS_PER_NODE=1",
        )
    if launch.backend == "mpi":
        prepare_mpi_environment(os.environ)
    with (
        Scratch() as scratch,
        rendezvous(launch, scratch, patience_for(launch, timeout_s)) as variables,
        connect_deadline(launch, timeout_s),
    ):
        os.environ.update(variables)
        # Import only now, after the variables are set: MLX looks for its MPI library, and CUDA for
        # its devices, at the first use.
        from allhands.distributed.backend import connect

        run_dir = os.environ.get("ALLHANDS_RUN_DIR")
        watch = (
            _Supervisor(Path(run_dir), launch.rank)
            if run_dir and launch.launcher == "allhands"
            else None
        )
        neighbours_s = _AS_LONG_S if watch and deadline_outside else timeout_s
        tried = launch.meeting is not None
        return connect(launch.backend, launch.size, launch.rank, neighbours_s, watch, tried=tried)


@dataclass(frozen=True)
class _Supervisor:
    """Our supervisor, in the form of an :class:`allhands.distributed.ring.Watch` for a rank."""

    run_dir: Path
    rank: int

    def listening(self) -> None:
        with suppress(OSError):
            write_whole(self.run_dir / f"rank-{self.rank}.listening", "")

    def all_listen(self) -> bool:
        return (self.run_dir / ALL_LISTEN).exists()


@cache
def join_here() -> Communicator:
    """Return this process's only connection to its group, made at the first call.

    Raises:
        DistributedError: as in :func:`join_group`.
    """
    launch = launch_here()
    prepare_process()
    take_device(launch)
    communicator = join_group(launch, _JOIN_TIMEOUT_S)
    from allhands.runtime.accelerator import slow_products

    if launch.local_rank == 0 and (warning := slow_products()):
        _log.warning("allhands: %s", warning)
    if communicator.size > 1:
        end_at_errors(launch, os.environ)
    return communicator


def joined_here() -> Communicator | None:
    """Return the result of :func:`join_here` if it has been called, otherwise ``None``."""
    return join_here() if join_here.cache_info().currsize else None


def patience_for(launch: LaunchPlace, timeout_s: float) -> Patience:
    """Return the time limit for waiting for other ranks and for their names.

    It is ``ALLHANDS_PEERS_TIMEOUT_S`` if that is set, otherwise ``timeout_s``, but on a cloud at
    least 15 minutes. During the wait, warnings in the log say what the rank waits for.

    Raises:
        DistributedError: the variable is not a positive number of seconds.
    """

    def tell(what: str) -> None:
        _log.warning("rank %d of %d: %s", launch.rank, launch.size, what)

    text = os.environ.get(_PATIENCE)
    if not text:
        return Patience(
            max(timeout_s, _CLOUD_PATIENCE_S) if launch.platform.name in _CLOUDS else timeout_s,
            tell,
        )
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise DistributedError(
            f"{_PATIENCE} is {text!r}, not a time to wait",
            code="variable-invalid",
            hint=f"set {_PATIENCE} to seconds",
        )
    return Patience(seconds, tell)


@contextmanager
def connect_deadline(launch: LaunchPlace, seconds: float) -> Generator[None, None, None]:
    """End this process with a message unless the block is left within ``seconds``.

    While MLX's ring waits for its peers, it holds Python's global lock, so no other thread and no
    signal handler of this process runs. So another process keeps the time. Under our supervisor
    this is the supervisor, and nothing is done here.
    """
    if launch.size == 1 or "ALLHANDS_SUPERVISOR_PID" in os.environ:
        yield
        return
    group = f"rank {launch.rank}: the {launch.backend} group of {launch.size}"
    check = f"`allhands cluster check --backend {launch.backend}`"
    # The connections that can be tried in advance have been tried, but a back-end makes more.
    wall = (
        ""
        if launch.local_size == launch.size
        else f", or whether a firewall is between the computers: {check}"
    )
    look = f"look at the other ranks' output; raise --start-timeout-s if they are slow{wall}\n"
    times = [
        (
            seconds,
            f"allhands: error: {group} did not come together within {seconds:.0f} s\n  what to do: {look}",
        )
    ]
    if wall and seconds > 2 * _UNCONNECTED_S:
        told = f"allhands: {group} has not come together for {_UNCONNECTED_S:.0f} s: see whether others are slow{wall}\n"
        times = [(_UNCONNECTED_S, told), (seconds - _UNCONNECTED_S, times[0][1])]
    words = [word for after_s, text in times for word in (str(after_s), text)]
    command = [sys.executable, "-I", "-S", "-c", _TIMER, str(os.getpid()), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as timer:
        try:
            yield
        finally:
            assert timer.stdin is not None
            timer.stdin.close()
