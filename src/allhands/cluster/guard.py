"""The guard: a small program that the supervisor starts instead of a rank's command.

``python -I -S guard.py run <command>`` prepares the process and then becomes the command. With
``mpi-rank`` instead of ``run`` it stays as the parent of the command, because the ranks of an MPI
job are not children of the supervisor. It then takes the rank from Open MPI's variables, sends the
output where it belongs, and records how the command ended.

The guard uses only the standard library, so that it starts in a few hundredths of a second. Its
settings are ``ALLHANDS_*`` variables, which :mod:`allhands.cluster.processes` sets.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
TAG_VARIABLE = "ALLHANDS_TAG_OUTPUT"  # if set, rank 0's output goes to a log, as that of others
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends.

    On other systems only the worker's watchdog does this. The request stays after ``exec``, but a
    child made by ``fork`` does not inherit it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def pin_cores(local_rank: int, cores: int) -> None:
    """Restrict this process to ``cores`` of the cores that it may use, so that ranks share none.

    If there are fewer cores than the ranks need, ranks share some after all. Only on Linux: macOS
    has no such call.
    """
    if sys.platform == "linux":
        allowed = sorted(os.sched_getaffinity(0))
        # All cores, for work that one rank does for all while the others wait.
        os.environ.setdefault("ALLHANDS_HOST_CORES", ",".join(map(str, allowed)))
        own = {allowed[(local_rank * cores + i) % len(allowed)] for i in range(cores)}
        os.sched_setaffinity(0, own)


def write_whole(path: Path, content: str) -> None:
    """Write a file so that other processes see it complete or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(content, encoding="utf-8")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def receive_output(path: str) -> None:
    """Use the supervisor's own standard output and error, received over the socket at ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
    for target, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)


def _become(command: list[str]) -> NoReturn:
    if "ALLHANDS_CORES" in os.environ and "ALLHANDS_LOCAL_RANK" in os.environ:
        pin_cores(int(os.environ["ALLHANDS_LOCAL_RANK"]), int(os.environ["ALLHANDS_CORES"]))
    _take_gpu()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(
            f"allhands: cannot start {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True
        )
        os._exit(127)


def _count_gpus() -> int:
    if sys.platform == "darwin":  # one GPU, which all ranks share
        return 0
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return listed.stdout.count("GPU ")


def _take_gpu() -> None:
    """Let this rank see only one of several GPUs of its computer: the local rank decides which.

    A rank that is alone on its computer, or sees a single GPU already, keeps what it has.
    """
    if int(os.environ.get("ALLHANDS_LOCAL_SIZE", "1")) == 1:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = visible.split(",") if visible else [str(number) for number in range(_count_gpus())]
    if len(devices) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[
            int(os.environ["ALLHANDS_LOCAL_RANK"]) % len(devices)
        ]


def _redirect(rank: str) -> None:
    if rank == "0" and TAG_VARIABLE not in os.environ:
        receive_output(os.path.join(os.environ["ALLHANDS_RUN_DIR"], "output.socket"))
        return
    log = Path(os.environ["ALLHANDS_LOG_DIR"], f"rank-{rank}.log")
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _run_mpi_rank(command: list[str]) -> NoReturn:
    """Start the command, record its process id and its end, and end in the same way."""
    for name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE"):
        os.environ[f"ALLHANDS_{name}"] = os.environ[f"OMPI_COMM_WORLD_{name}"]
    rank, run_dir = os.environ["ALLHANDS_RANK"], Path(os.environ["ALLHANDS_RUN_DIR"])
    _redirect(rank)
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)  # a signal to the group is meant for the command
    child = os.fork()
    if child == 0:
        for number in _STOPS:
            signal.signal(number, signal.SIG_DFL)
        die_with_parent()
        _become(command)
    write_whole(run_dir / f"rank-{rank}.pid", json.dumps({"guard": os.getpid(), "command": child}))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    write_whole(run_dir / f"rank-{rank}.exit", json.dumps({"code": code, "time": time.monotonic()}))
    os._exit(exit_code_of(code))


def exit_code_of(code: int) -> int:
    """Return the exit code for a process that ended with ``code``: 128 + n after signal n."""
    return code if code >= 0 else 128 - code


def main(arguments: list[str]) -> NoReturn:
    """Entry point: ``run COMMAND...`` or ``mpi-rank COMMAND...``."""
    mode, *command = arguments
    die_with_parent()
    supervisor, parent = int(os.environ["ALLHANDS_SUPERVISOR_PID"]), os.getppid()
    if parent != supervisor and (mode == "run" or parent == 1):
        os._exit(143)  # the parent ended before we could ask
    if mode == "mpi-rank":
        _run_mpi_rank(command)
    _become(command)


if __name__ == "__main__":
    main(sys.argv[1:])
