"""Starting the ranks of one job on this computer, seeing them end, and ending them.

Two ways: the ranks are our children (ring, NCCL), or mpirun's (MPI). Both answer the same four questions
for :mod:`allhands.cluster.supervisor`, which holds all the judgement.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from allhands.cluster import guard
from allhands.cluster.mpi import mpi_variables, mpirun_command, require_mpi
from allhands.errors import DistributedError

# Of another launcher, or of the job that we are part of: a rank must not see them next to its own.
_FOREIGN = (
    *("MLX_RANK", "MLX_HOSTFILE", "MLX_WORLD_SIZE", "MLX_IBV_DEVICES", "MLX_JACCL_", "NCCL_HOST_IP"),
    *(
        "NCCL_PORT",
        "OMPI_COMM_WORLD_",
        "PMI_",
        "PMIX_RANK",
        "PMIX_NAMESPACE",
        "PMIX_SERVER_",
        "PRTE_LAUNCHED",
    ),
    *("ALLHANDS_RANK", "ALLHANDS_WORLD_SIZE", "ALLHANDS_LOCAL_", "ALLHANDS_BACKEND", "ALLHANDS_CORES"),
)
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class LaunchSpec:
    """What to start: ``num_processes`` copies of ``command`` on this computer.

    Output of rank 0 goes to the supervisor's own, that of rank N to ``log_dir/rank-N.log``. ``env`` is added
    to the supervisor's environment. A rank that has not marked itself started after ``start_deadline_s``
    fails the job; after the first Ctrl-C ranks have ``stop_grace_s`` to save and end; and when one rank has
    ended without an error the others have ``finish_grace_s`` to follow.
    """

    command: Sequence[str]
    num_processes: int
    backend: Literal["ring", "mpi", "nccl"]
    log_dir: Path
    cores_per_rank: int | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    start_deadline_s: float = 600.0
    stop_grace_s: float = 60.0
    finish_grace_s: float = 60.0


@dataclass(frozen=True)
class RankExit:
    """The end of one rank: exit code, or minus the signal's number, and when (``time.monotonic``)."""

    rank: int
    code: int
    time: float


class RankProcesses(Protocol):
    """The processes of one attempt."""

    def exits(self) -> list[RankExit]:
        """Return the ranks that have ended, in the order of their ends."""
        ...

    def signal(self, rank: int, number: int) -> bool:
        """Send a signal to the rank's command; false if it is not running yet, or any more."""
        ...

    def log_path(self, rank: int) -> Path:
        """Return the file with the rank's output."""
        ...

    def kill(self) -> None:
        """End every process that is left, at once, and wait for it. May be called again."""
        ...


def start(spec: LaunchSpec, run_dir: Path) -> RankProcesses:
    """Start the ranks; ``run_dir`` is private to this attempt and outlives its processes.

    Raises:
        DistributedError: there is no usable Open MPI, or the system refuses another process.
    """
    try:
        return _MpirunsChildren(spec, run_dir) if spec.backend == "mpi" else _OwnChildren(spec, run_dir)
    except OSError as error:
        raise DistributedError(f"the processes could not be started: {error}", hint="start fewer with -n") from error


def reserve_ports(count: int, shareable: bool) -> tuple[list[socket.socket], list[int]]:
    """Bind ``count`` free ports of 127.0.0.1 at once and return their sockets and numbers.

    A shareable socket may stay open (never listening): MLX's ring binds with SO_REUSEPORT too, so it gets in
    and strangers do not. Only Linux promises that connections then go to the one that listens.
    """
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        if shareable:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(("127.0.0.1", 0))
    return sockets, [one.getsockname()[1] for one in sockets]


class _OwnChildren:
    """Ranks that are our own children, each in a session of its own so that Ctrl-C reaches only us."""

    def __init__(self, spec: LaunchSpec, run_dir: Path) -> None:
        self._log_dir = spec.log_dir
        self._exits: list[RankExit] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._waiters: list[threading.Thread] = []
        ring = spec.backend == "ring"
        self._ports, numbers = reserve_ports(spec.num_processes if ring else 1, shareable=ring)
        if not ring or sys.platform != "linux":
            self._release_ports()
        shared = _shared_environment(spec, run_dir) | _rendezvous(spec, run_dir, numbers)
        environments = [shared | _rank_environment(spec, rank) for rank in range(spec.num_processes)]
        try:
            for rank, env in enumerate(environments):
                self._start(rank, spec, env)
        except OSError:
            self.kill()
            raise

    def _start(self, rank: int, spec: LaunchSpec, env: dict[str, str]) -> None:
        command = _guarded("run", spec.command)
        with contextlib.ExitStack() as stack:
            # Appending, because the rank also opens it: what it writes itself and its output must not overlap.
            log = stack.enter_context(self.log_path(rank).open("ab")) if rank else None
            error_log = subprocess.STDOUT if log else None
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=error_log,
                env=env,
                start_new_session=True,
            )
        self._children.append(child)
        # A thread a child, so that the order of ends is known exactly and not by polling.
        waiter = threading.Thread(target=self._wait, args=(rank, child), name=f"wait-rank-{rank}", daemon=True)
        self._waiters.append(waiter)
        waiter.start()

    def _wait(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        self._exits.append(RankExit(rank, code, time.monotonic()))

    def exits(self) -> list[RankExit]:
        return sorted(self._exits, key=lambda end: end.time)

    def signal(self, rank: int, number: int) -> bool:
        child = self._children[rank]
        child.send_signal(number)
        return child.returncode is None

    def log_path(self, rank: int) -> Path:
        return self._log_dir / f"rank-{rank}.log"

    def kill(self) -> None:
        for child in self._children:
            _kill_group(child.pid)
        for waiter in self._waiters:
            waiter.join()
        self._release_ports()

    def _release_ports(self) -> None:
        for one in self._ports:
            one.close()


class _MpirunsChildren:
    """Ranks started by mpirun; each one's guard writes the process number and the end to ``run_dir``."""

    def __init__(self, spec: LaunchSpec, run_dir: Path) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._ends: dict[int, RankExit] = {}
        installation = require_mpi()
        env = _shared_environment(spec, run_dir) | mpi_variables(installation, run_dir)
        ranks = mpirun_command(installation, spec.num_processes, _guarded("mpi-rank", spec.command))
        self._output = _offer_output(run_dir / "output.socket")
        with (spec.log_dir / "mpirun.log").open("wb") as log:
            self._mpirun = subprocess.Popen(
                _guarded("run", ranks),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )

    def exits(self) -> list[RankExit]:
        # mpirun first: a rank that has ended before mpirun did has left its file by then.
        code = self._mpirun.poll()
        for rank in range(self._spec.num_processes):
            if rank not in self._ends and (end := self._exit_of(rank, code)):
                self._ends[rank] = end
        return sorted(self._ends.values(), key=lambda end: end.time)

    def _exit_of(self, rank: int, mpirun_code: int | None) -> RankExit | None:
        guard_alive = _exists(self._process(rank, "guard"))
        if end := _read_json(self._run_dir / f"rank-{rank}.exit"):
            return RankExit(rank, int(end["code"]), end["time"])
        if mpirun_code is not None:
            return RankExit(rank, mpirun_code or DistributedError.exit_code, time.monotonic())
        return RankExit(rank, -signal.SIGKILL, time.monotonic()) if guard_alive is False else None

    def _process(self, rank: int, which: str) -> int | None:
        numbers = _read_json(self._run_dir / f"rank-{rank}.pid")
        return int(numbers[which]) if numbers else None

    def signal(self, rank: int, number: int) -> bool:
        process = self._process(rank, "command")
        if process is None or (self._run_dir / f"rank-{rank}.exit").exists():
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
            return True
        return False

    def log_path(self, rank: int) -> Path:
        began = self._process(rank, "guard") is not None
        return self._spec.log_dir / (f"rank-{rank}.log" if began else "mpirun.log")

    def kill(self) -> None:
        for rank in range(self._spec.num_processes):
            if (process := self._process(rank, "guard")) is not None:
                _kill_group(process)
        # mpirun sees the ends of its ranks, reaps them and clears up; it gets a moment for that.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._mpirun.wait(timeout=1.0)
        _kill_group(self._mpirun.pid)
        self._mpirun.wait()
        with contextlib.suppress(OSError):
            self._output.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._output.close()


def _guarded(mode: str, command: Sequence[str]) -> list[str]:
    return [sys.executable, "-I", "-S", guard.__file__, mode, *command]


def _shared_environment(spec: LaunchSpec, run_dir: Path) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    env |= {
        "PYTHONUNBUFFERED": "1",  # the last lines before a kill are the ones that matter
        **spec.env,
        "ALLHANDS_WORLD_SIZE": str(spec.num_processes),
        "ALLHANDS_BACKEND": spec.backend if spec.num_processes > 1 else "none",
        "ALLHANDS_SUPERVISOR_PID": str(os.getpid()),
        "ALLHANDS_RUN_DIR": str(run_dir),
        "ALLHANDS_LOG_DIR": str(spec.log_dir),
        "ALLHANDS_STOP_GRACE_S": str(spec.stop_grace_s),
    }
    if spec.cores_per_rank is not None:
        env |= dict.fromkeys((*_THREADS, "ALLHANDS_CORES"), str(spec.cores_per_rank))
    return env


def _rendezvous(spec: LaunchSpec, run_dir: Path, ports: Sequence[int]) -> dict[str, str]:
    """The variables by which MLX's ring or NCCL back-end finds its peers."""
    if spec.backend == "nccl":
        return {
            "MLX_WORLD_SIZE": str(spec.num_processes),
            "NCCL_HOST_IP": "127.0.0.1",
            "NCCL_PORT": str(ports[0]),
        }
    hostfile = run_dir / "ring-hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]), encoding="utf-8")
    return {"MLX_HOSTFILE": str(hostfile)}


def _rank_environment(spec: LaunchSpec, rank: int) -> dict[str, str]:
    env = {
        "MLX_RANK": str(rank),
        "ALLHANDS_RANK": str(rank),
        "ALLHANDS_LOCAL_RANK": str(rank),
        "ALLHANDS_LOCAL_SIZE": str(spec.num_processes),
    }
    if spec.backend == "nccl":
        visible = spec.env.get("CUDA_VISIBLE_DEVICES") or os.environ.get("CUDA_VISIBLE_DEVICES") or ""
        devices = visible.split(",") if visible else [str(n) for n in range(spec.num_processes)]
        if spec.num_processes > len(devices):
            raise DistributedError(
                f"{spec.num_processes} processes for {len(devices)} GPUs (CUDA_VISIBLE_DEVICES={visible})",
                hint=f"use -n {len(devices)}: NCCL needs a GPU a process",
            )
        env["CUDA_VISIBLE_DEVICES"] = devices[rank]
    return env


def _offer_output(path: Path) -> socket.socket:
    """Serve our own standard output and error to rank 0, so that a terminal stays one under mpirun."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen(1)

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            with connection:
                socket.send_fds(connection, [b"o"], [1, 2])

    threading.Thread(target=serve, name="offer-output", daemon=True).start()
    return server


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def _exists(process: int | None) -> bool | None:
    if process is None:
        return None
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _read_json(path: Path) -> dict[str, float] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
