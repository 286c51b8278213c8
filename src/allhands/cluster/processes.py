"""Starting the ranks of one job on this computer, noticing their ends, and ending them.

There are two ways. The ranks are children of this process (ring, NCCL, JACCL) or of mpirun (MPI).
Both are a :class:`RankProcesses`, which only reports facts. :mod:`allhands.cluster.attempt` judges
them.
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

# Variables of another launcher, or of a job to which this process belongs. Ranks must not get them.
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
    """The ranks of a job that run on one computer.

    Attributes:
        first: first of these ranks.
        count: number of these ranks.
        peers: ``address:port`` of every rank of the job, for the ring; for NCCL and JACCL only of
            rank 0.
        name: name of the computer in messages.
        output: descriptors for rank 0's standard output and error; ``None``: our own.
        tell: called with the rank and a line, for each line of a rank, if the output is tagged.
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
    """Start the ranks, or a share of them.

    Args:
        run_dir: a directory that is private to this attempt and exists longer than its processes.
        reaper: ends the processes if this process is killed.
        share: the ranks to start; the caller has reserved their ports. ``None``: all ranks.

    Raises:
        AllhandsError: there is no usable Open MPI, the system refuses another process, or a log
            cannot be written.
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
    """Bind ``count`` different free ports of this computer's ``address``; return their sockets and
    numbers.

    A shareable socket may stay open, without listening. MLX's ring also binds with SO_REUSEPORT, so
    it can use the port, while programs of other users cannot. Only Linux guarantees that
    connections then go to the socket that listens.

    Raises:
        DistributedError: the ports cannot be bound.
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
    """The common part of both ways: the files of the ranks are on this computer."""

    def __init__(self, spec: LaunchSpec, run_dir: Path, reaper: Reaper) -> None:
        super().__init__(run_dir.absolute(), spec.log_dir)
        self._spec = spec
        self._reaper = reaper
        reaper.mark(self.run_dir)  # ranks, and all processes that they start, have it as their mark
        self._ended = False
        self._name = socket.gethostname()
        self._tails: Tails | None = None

    def _show_all(self, ranks: range, tell: Callable[[int, bytes], None]) -> None:
        """Begin to show the lines of all ranks, if the output is tagged.

        Call this before the first rank starts.
        """

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
        """Return the process id of the rank's command, if it is known and has not ended."""
        raise NotImplementedError

    def _end_sessions(self, leaders: Sequence[int]) -> None:
        """Also end processes that ranks have started and left behind.

        Only the first call does this: later the process ids may belong to other processes.
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
    """Ranks that are our own children, each in its own session so that Ctrl-C reaches only us."""

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
        ):  # with a share, the one who starts the ranks of all computers has made the key
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
        """Return all ranks, with loopback ports, which other computers cannot reach.

        On Linux other programs cannot take the ports of a ring, because they stay reserved.
        """
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
                # Append, because the rank opens the log too, and neither must overwrite the other's
                # lines.
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
        # One thread for each child, so that the order of the ends is known exactly.
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
    """Ranks started by mpirun; the guard of each writes its process id and its end to
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
        # Look at mpirun first: each rank that ended before mpirun has left its file by now.
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

    def stopped(self, rank: int) -> bool:
        """Return whether the rank's command is stopped.

        A guard that is stopped is continued once its command has ended: only the guard can say how.
        """
        guard, command = self._process(rank, "guard"), self._command(rank)
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if guard is not None and command is not None:
                states = [psutil.Process(pid).status() for pid in (guard, command)]
                if states == [psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE]:
                    os.kill(guard, signal.SIGCONT)
        return super().stopped(rank)

    def log_path(self, rank: int) -> Path:
        began = self._process(rank, "guard") is not None
        return super().log_path(rank) if began else self.log_dir / "mpirun.log"

    def kill(self) -> None:
        for rank in range(self._spec.num_processes):
            if (process := self._process(rank, "guard")) is not None:
                signal_group(process)
        # Give mpirun a moment to notice the ends of its ranks and to clean up.
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
        "PYTHONUNBUFFERED": "1",  # the last lines before a kill matter most, so none may be lost
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
    """Return the variables with which MLX's back-end finds its peers; empty for a single rank."""
    if spec.num_processes == 1:
        return {}
    if spec.backend == "jaccl":
        assert spec.rdma is not None
        devices = run_dir / "rdma-devices.json"
        devices.write_text(json.dumps(spec.rdma), encoding="utf-8")
        # Without fast synchronisation the GPU waits longer than an exchange takes.
        found = {
            "MLX_IBV_DEVICES": str(devices),
            "MLX_JACCL_COORDINATOR": peers[0],
            "MLX_METAL_FAST_SYNCH": "1",
        }
        return found if _is_mesh(spec.rdma) else {**found, "MLX_JACCL_RING": "1"}
    return peer_variables(spec.backend, spec.num_processes, peers, run_dir / "ring-hosts.json")


def peer_variables(backend: str, size: int, peers: Sequence[str], hostfile: Path) -> dict[str, str]:
    """Return MLX's variables for the peers of NCCL or of the ring.

    NCCL needs the address of rank 0. The ring reads the addresses of all ranks from ``hostfile``,
    which is written here; it accepts no names.
    """
    if backend == "nccl":
        address, _, port = peers[0].rpartition(":")
        return {"MLX_WORLD_SIZE": str(size), "NCCL_HOST_IP": address, "NCCL_PORT": port}
    hostfile.write_text(json.dumps([[peer] for peer in peers]), encoding="utf-8")
    return {"MLX_HOSTFILE": str(hostfile)}


def _is_mesh(rdma: Sequence[Sequence[Any]]) -> bool:
    """Return whether each computer has a device to each other one; otherwise they form a ring."""
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
    """Offer our own standard output and error to rank 0 over a socket at ``path``.

    So rank 0 has a terminal under mpirun if we have one.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen(16)

    def serve() -> None:
        """Serve until the socket is shut down: the first one to connect need not be the rank."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(_OFFER_S)
                    socket.send_fds(connection, [b"o"], [1, 2])

    threading.Thread(target=serve, name="offer-output", daemon=True).start()
    return server
