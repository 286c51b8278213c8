"""Starting the ranks of one job on this computer, seeing them end, and ending them.

Two ways: the ranks are our children (ring, NCCL), or mpirun's (MPI). Both answer the same four
questions for :mod:`allhands.cluster.supervisor`, which holds all the judgement.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from allhands.cluster import guard
from allhands.cluster.guard import TAG_VARIABLE
from allhands.cluster.mpi import (
    MEMORY_VARIABLE,
    mpi_variables,
    mpirun_command,
    require_mpi,
    shared_memory,
)
from allhands.cluster.ranks import (
    ATTEST_VARIABLE,
    TRIAL_VARIABLE,
    LaunchSpec,
    RankExit,
    RankProcesses,
)
from allhands.cluster.reaper import MARK, Reaper, end_processes, signal_group
from allhands.cluster.runfiles import RunFiles, read_file, tail
from allhands.cluster.tails import Tails, to_screen
from allhands.distributed.blame import COMPUTER_VARIABLE, LAUNCHER_VARIABLE, TRUSTED_VARIABLE
from allhands.errors import DistributedError
from allhands.io.files import private_opener, storage_error_of
from allhands.io.formatting import counted
from allhands.runtime.callers import RING_KEY
from allhands.runtime.ports import PortSettings, cannot_listen

# Of another launcher, or of the job that we are part of: a rank must not see them next to its own.
_FOREIGN = (
    "MLX_RANK",
    "MLX_HOSTFILE",
    "MLX_WORLD_SIZE",
    "MLX_IBV_DEVICES",
    "MLX_JACCL_",
    "NCCL_HOST_IP",
    "NCCL_PORT",
    "OMPI_COMM_WORLD_",
    "PMI_",
    "PMIX_RANK",
    "PMIX_NAMESPACE",
    "PMIX_SERVER_",
    "PRTE_LAUNCHED",
    "MV2_COMM_WORLD_",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "ALLHANDS_RANK",
    "ALLHANDS_WORLD_SIZE",
    "ALLHANDS_LOCAL_",
    "ALLHANDS_BACKEND",
    "ALLHANDS_CORES",
    "ALLHANDS_HOST",
    "ALLHANDS_RUN_ID",
    "ALLHANDS_RUN_BEGAN",
    "ALLHANDS_ATTEMPT",
    RING_KEY,
    LAUNCHER_VARIABLE,
    TRUSTED_VARIABLE,
    ATTEST_VARIABLE,
    TRIAL_VARIABLE,
)
_OFFER_S = 5.0
_SETTINGS = PortSettings(
    address='the address that the other computers reach it by, as "ips" in the hostfile'
)
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Share:
    """The part of a job's ranks that one computer has.

    Attributes:
        first: its first rank.
        count: how many it has.
        peers: ``address:port`` of every rank of the job for the ring; of rank 0 alone for NCCL.
        name: the computer's, in messages.
        output: descriptors for rank 0's standard output and error; ``None``: our own.
        tell: takes the lines of all ranks, if they are to be tagged, with the rank.
    """

    first: int
    count: int
    peers: tuple[str, ...]
    name: str
    output: tuple[int, int] | None = None
    tell: Callable[[int, bytes], None] = to_screen


def start(
    spec: LaunchSpec, run_dir: Path, reaper: Reaper, share: Share | None = None
) -> RankProcesses:
    """Start the ranks, or a share of them whose ports somebody else holds.

    ``run_dir`` is private to this attempt and outlives its processes; ``reaper`` ends them if we
    are killed.

    Raises:
        AllhandsError: no usable Open MPI, the system refuses another process, or a log cannot be
            written.
    """
    try:
        if spec.backend == "mpi":
            return _MpirunsChildren(spec, run_dir, reaper)
        return _OwnChildren(spec, run_dir, reaper, share)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise storage_error_of(error, "a file") from error
        short = error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
        raise DistributedError(
            f"the processes could not be started: {error.strerror if short else error}",
            code="processes-not-started",
            hint="start fewer with -n" if short else None,
        ) from error


def reserve_ports(
    count: int, shareable: bool, address: str = "127.0.0.1"
) -> tuple[list[socket.socket], list[int]]:
    """Bind ``count`` free ports of this computer's ``address`` at once and return their sockets and
    numbers.

    A shareable socket may stay open (never listening): MLX's ring binds with SO_REUSEPORT too, so
    it gets in and strangers do not. Only Linux promises that connections then go to the one that
    listens.

    Raises:
        DistributedError: that cannot be.
    """
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            one = socket.socket()
            sockets.append(one)
            if shareable:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind((address, 0))
    except OSError as error:
        for one in sockets:
            one.close()
        trouble = cannot_listen(error, address, 0, _SETTINGS)
        place = address or "this computer"
        raise DistributedError(
            f"no port of {place} can be had: {trouble.message}",
            code="port-unavailable",
            hint=trouble.hint,
        ) from None
    return sockets, [one.getsockname()[1] for one in sockets]


class _Local(RunFiles, RankProcesses):
    """Common part of both ways: the files of the ranks are on this computer."""

    def __init__(self, spec: LaunchSpec, run_dir: Path, reaper: Reaper) -> None:
        super().__init__(run_dir.absolute(), spec.log_dir)
        self._spec = spec
        self._reaper = reaper
        reaper.mark(self.run_dir)  # ranks and whatever they start bear it
        self._ended = False
        self._name = socket.gethostname()
        self._tails: Tails | None = None

    def _show_all(self, ranks: range, tell: Callable[[int, bytes], None]) -> None:
        """Show the lines of all ranks, if that is wanted; before the first of them starts."""

        def show(rank: int, line: bytes) -> None:
            if not self.tells_error(rank, line):
                tell(rank, line)

        if self._spec.tag_output:
            self._tails = Tails({rank: RunFiles.log_path(self, rank) for rank in ranks}, show)

    def host(self, rank: int) -> str:
        return self._name

    def log_tail(self, rank: int) -> tuple[str, ...]:
        return tail(self.log_path(rank))

    def stopped(self, rank: int) -> bool:
        """Return whether the rank's command is stopped, as by SIGSTOP."""
        pid = self._command(rank)
        try:
            return pid is not None and psutil.Process(pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def _command(self, rank: int) -> int | None:
        """The process of the rank's command, if it is known and has not ended."""
        raise NotImplementedError

    def _end_sessions(self, leaders: Sequence[int]) -> None:
        """End also what ranks have started and left behind; once, for the numbers may come to mean
        others.
        """
        if self._ended:
            return
        self._ended = True
        end_processes(leaders, [str(self.run_dir)])
        if self._tails:
            self._tails.close()
        for leader in leaders:
            self._reaper.forget(leader)


class _OwnChildren(_Local):
    """Ranks that are our own children, each in a session of its own so that Ctrl-C reaches only us."""

    def __init__(
        self, spec: LaunchSpec, run_dir: Path, reaper: Reaper, share: Share | None = None
    ) -> None:
        super().__init__(spec, run_dir, reaper)
        self._exits: list[RankExit] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._waiters: list[threading.Thread] = []
        self._ports: list[socket.socket] = []
        self._share = share or self._everything(spec)
        self._name = self._share.name
        shared = _shared_environment(spec, run_dir) | _rendezvous(spec, run_dir, self._share.peers)
        if (
            share is None
        ):  # otherwise whoever starts the other computers' ranks has made one for all
            shared[RING_KEY] = secrets.token_hex(32)
        environments = [shared | _rank_environment(spec, self._share, rank) for rank in self._own()]
        self._show_all(self._own(), self._share.tell)
        try:
            for rank, env in zip(self._own(), environments, strict=True):
                self._start(rank, spec, env)
        except OSError:
            self.kill()
            raise

    def _everything(self, spec: LaunchSpec) -> Share:
        """All ranks, on ports of this computer that nobody else can reach or, on Linux, take."""
        ring = spec.backend == "ring"
        self._ports, numbers = reserve_ports(spec.num_processes if ring else 1, shareable=ring)
        if not ring or sys.platform != "linux":
            self._release_ports()
        peers = tuple(f"127.0.0.1:{number}" for number in numbers)
        return Share(0, spec.num_processes, peers, self._name)

    def _own(self) -> range:
        return range(self._share.first, self._share.first + self._share.count)

    def _start(self, rank: int, spec: LaunchSpec, env: dict[str, str]) -> None:
        with contextlib.ExitStack() as stack:
            output, error_output = self._share.output or (None, None)
            if rank or spec.tag_output:
                # Appending, because the rank also opens it: what it writes itself and its output
                # must not overlap.
                output = stack.enter_context(
                    open(self.log_path(rank), "ab", opener=private_opener)
                ).fileno()
                error_output = subprocess.STDOUT
            child = subprocess.Popen(
                _guarded("run", spec.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=error_output,
                env=env,
                start_new_session=True,
            )
        self._reaper.group(child.pid)
        self._children.append(child)
        # A thread a child, so that the order of ends is known exactly and not by polling.
        waiter = threading.Thread(
            target=self._wait, args=(rank, child), name=f"wait-rank-{rank}", daemon=True
        )
        self._waiters.append(waiter)
        waiter.start()

    def _wait(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        self.note_end(rank)
        self._exits.append(RankExit(rank, code, time.monotonic()))

    def exits(self) -> list[RankExit]:
        self.look_at_kills()
        return sorted(self._exits, key=lambda end: end.time)

    def _command(self, rank: int) -> int | None:
        child = self._children[rank - self._share.first]
        return child.pid if child.returncode is None else None

    def signal(self, rank: int, number: int) -> bool:
        child = self._children[rank - self._share.first]
        child.send_signal(number)
        return child.returncode is None

    def kill(self) -> None:
        for child in self._children:
            signal_group(child.pid)
        for waiter in self._waiters:
            waiter.join()
        self._end_sessions([child.pid for child in self._children])
        self._release_ports()

    def _release_ports(self) -> None:
        for one in self._ports:
            one.close()


class _MpirunsChildren(_Local):
    """Ranks started by mpirun; each one's guard writes the process number and the end to
    ``run_dir``.
    """

    def __init__(self, spec: LaunchSpec, run_dir: Path, reaper: Reaper) -> None:
        super().__init__(spec, run_dir, reaper)
        self._ends: dict[int, RankExit] = {}
        installation = require_mpi()
        self._memory = shared_memory(reaper)
        env = _shared_environment(spec, run_dir) | mpi_variables(installation, run_dir)
        if self._memory is not None:
            env[MEMORY_VARIABLE] = str(self._memory.path)
        ranks = mpirun_command(installation, spec.num_processes, _guarded("mpi-rank", spec.command))
        self._output = _offer_output(run_dir / "output.socket")
        self._show_all(range(spec.num_processes), to_screen)
        with open(spec.log_dir / "mpirun.log", "wb", opener=private_opener) as log:
            self._mpirun = subprocess.Popen(
                _guarded("run", ranks),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        reaper.group(self._mpirun.pid)

    def exits(self) -> list[RankExit]:
        self.look_at_kills()
        # mpirun first: a rank that has ended before mpirun did has left its file by then.
        code = self._mpirun.poll()
        for rank in range(self._spec.num_processes):
            if rank not in self._ends and (end := self._exit_of(rank, code)):
                self.note_end(rank)
                self._ends[rank] = end
        return sorted(self._ends.values(), key=lambda end: end.time)

    def _exit_of(self, rank: int, mpirun_code: int | None) -> RankExit | None:
        guard = self._process(rank, "guard")
        guard_is_gone = guard is not None and not psutil.pid_exists(guard)
        if end := read_file(self.run_dir / f"rank-{rank}.exit"):
            return RankExit(rank, int(end["code"]), end["time"])
        if mpirun_code is not None:
            return RankExit(rank, mpirun_code or DistributedError.exit_code, time.monotonic())
        return RankExit(rank, -signal.SIGKILL, time.monotonic()) if guard_is_gone else None

    def _process(self, rank: int, which: str) -> int | None:
        numbers = read_file(self.run_dir / f"rank-{rank}.pid")
        return int(numbers[which]) if numbers else None

    def signal(self, rank: int, number: int) -> bool:
        process = self._command(rank)
        if process is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
            return True
        return False

    def _command(self, rank: int) -> int | None:
        return (
            None
            if (self.run_dir / f"rank-{rank}.exit").exists()
            else self._process(rank, "command")
        )

    def log_path(self, rank: int) -> Path:
        began = self._process(rank, "guard") is not None
        return super().log_path(rank) if began else self.log_dir / "mpirun.log"

    def kill(self) -> None:
        for rank in range(self._spec.num_processes):
            if (process := self._process(rank, "guard")) is not None:
                signal_group(process)
        # mpirun sees the ends of its ranks, reaps them and clears up; it gets a moment for that.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._mpirun.wait(timeout=1.0)
        signal_group(self._mpirun.pid)
        self._mpirun.wait()
        self._end_sessions([self._mpirun.pid])
        if self._memory is not None:
            self._memory.close()
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
        MARK: str(run_dir.absolute()),
        "ALLHANDS_LOG_DIR": str(spec.log_dir),
        "ALLHANDS_STOP_GRACE_S": str(spec.stop_grace_s),
    }
    env.pop(TAG_VARIABLE, None)
    if spec.tag_output:
        env[TAG_VARIABLE] = "1"
    if spec.weights is not None:
        env["ALLHANDS_RANK_WEIGHTS"] = json.dumps(spec.weights)
    if spec.cores_per_rank is not None:
        env |= dict.fromkeys((*_THREADS, "ALLHANDS_CORES"), str(spec.cores_per_rank))
    return env


def _rendezvous(spec: LaunchSpec, run_dir: Path, peers: Sequence[str]) -> dict[str, str]:
    """The variables by which MLX's ring or NCCL back-end finds its peers; one rank alone must not
    look for any.
    """
    if spec.num_processes == 1:
        return {}
    if spec.backend == "jaccl":
        assert spec.rdma is not None
        devices = run_dir / "rdma-devices.json"
        devices.write_text(json.dumps(spec.rdma), encoding="utf-8")
        # Without fast synchronisation the GPU waits longer for an exchange than that takes.
        found = {
            "MLX_IBV_DEVICES": str(devices),
            "MLX_JACCL_COORDINATOR": peers[0],
            "MLX_METAL_FAST_SYNCH": "1",
        }
        return found if _is_mesh(spec.rdma) else {**found, "MLX_JACCL_RING": "1"}
    return peer_variables(spec.backend, spec.num_processes, peers, run_dir / "ring-hosts.json")


def peer_variables(backend: str, size: int, peers: Sequence[str], hostfile: Path) -> dict[str, str]:
    """MLX's variables for its peers: NCCL takes rank 0's address, the ring all addresses, not
    names, from a file.
    """
    if backend == "nccl":
        address, _, port = peers[0].rpartition(":")
        return {"MLX_WORLD_SIZE": str(size), "NCCL_HOST_IP": address, "NCCL_PORT": port}
    hostfile.write_text(json.dumps([[peer] for peer in peers]), encoding="utf-8")
    return {"MLX_HOSTFILE": str(hostfile)}


def _is_mesh(rdma: Sequence[Sequence[Any]]) -> bool:
    """Return whether every computer has a cable to every other one; otherwise they form a ring."""
    return all(
        device is not None for i, row in enumerate(rdma) for j, device in enumerate(row) if i != j
    )


def _rank_environment(spec: LaunchSpec, share: Share, rank: int) -> dict[str, str]:
    env = {
        "ALLHANDS_RANK": str(rank),
        "ALLHANDS_LOCAL_RANK": str(rank - share.first),
        "ALLHANDS_LOCAL_SIZE": str(share.count),
        COMPUTER_VARIABLE: share.name,
    }
    if spec.num_processes > 1:
        env["MLX_RANK"] = str(rank)
    if spec.backend == "nccl":
        visible = (
            spec.env.get("CUDA_VISIBLE_DEVICES") or os.environ.get("CUDA_VISIBLE_DEVICES") or ""
        )
        devices = visible.split(",") if visible else [str(n) for n in range(share.count)]
        if share.count > len(devices):
            raise DistributedError(
                f"{share.count} processes for {counted(len(devices), 'GPU')} (CUDA_VISIBLE_DEVICES={visible})",
                code="ranks-exceed-gpus",
                hint=f"use -n {len(devices)}: NCCL needs a GPU a process",
            )
        env["CUDA_VISIBLE_DEVICES"] = devices[rank - share.first]
    return env


def _offer_output(path: Path) -> socket.socket:
    """Serve our own standard output and error to rank 0, so that a terminal stays one under mpirun."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen(16)

    def serve() -> None:
        """Until the socket is shut: whoever came first need not be the rank."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(_OFFER_S)
                    socket.send_fds(connection, [b"o"], [1, 2])

    threading.Thread(target=serve, name="offer-output", daemon=True).start()
    return server
