"""A small process that outlives its owner's ``kill -9`` and then ends what the owner had started.

Run by path with ``python -I reaper.py`` it reads lines from its standard input, a pipe that nobody
else holds: ``group PID``, ``forget PID``, ``mark "PATH"``, ``directory "PATH"``, ``done``. When the
pipe closes without ``done``, its owner has ended without clearing up, however that came: every
process of those groups, of the sessions that they lead, and with those marks in its environment is
killed, and the directories are removed. It imports no other module of ours, so that it starts in a
few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, Self

import psutil

_WAIT_S = 60.0  # for killed processes to be gone: one may hang in a dead file system
_REMOVE_S = 5.0
_CLOSE_S = 10.0
_POLL_S = 0.02
_CONFIRM_S = 0.005  # before a second look
MARK = "ALLHANDS_RUN_DIR"  # the variable that all processes of an attempt inherit


class Reaper:
    """The owner's side, a context manager: what is registered is ended and removed if this process
    is killed.

    Leaving the block in the ordinary way leaves everything as it is; leaving it by an exception
    ends and removes it too. Processes to be registered must lead a group, or better a session, of
    their own.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-I", __file__]
        quiet = subprocess.DEVNULL
        # It inherits what is blocked here, so that it is deaf before it can say so itself.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _deaf_to())
        try:
            # In no directory that somebody may want to remove.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=quiet,
                stderr=quiet,
                cwd="/",
                start_new_session=True,
                env=_unmarked(),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def pid(self) -> int:
        """The number of the helper process."""
        return self._process.pid

    def group(self, pid: int) -> None:
        """Register the process that leads a group and, if it does, a session."""
        self._send(f"group {pid}")

    def forget(self, pid: int) -> None:
        """Take a group back that has ended: its number may come to mean another one."""
        self._send(f"forget {pid}")

    def mark(self, run_dir: Path) -> None:
        """Register all processes whose ``ALLHANDS_RUN_DIR`` is this absolute path or one below it."""
        self._send(f"mark {json.dumps(str(run_dir))}")

    def directory(self, path: Path) -> None:
        """Register a directory to be removed with all that is in it."""
        self._send(f"directory {json.dumps(str(path.absolute()))}")

    def close(self, done: bool = True) -> None:
        """End the helper; unless ``done``, have it clear up first. Waits for its end, but not for
        ever.
        """
        if done:
            self._send("done")
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(done=kind is None)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        # A helper that somebody has killed is missed only if we are killed too.
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def end_group(leader: subprocess.Popen[bytes]) -> None:
    """Kill the group that a child of this process leads, unless that has ended, and wait for it."""
    if leader.poll() is None:
        signal_group(leader.pid)
        leader.wait()


def signal_group(leader: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the group that a process leads, if it is still there and ours."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def end_processes(
    leaders: Collection[int], marks: Collection[str] = (), wait_s: float = _WAIT_S
) -> bool:
    """Kill what belongs to ``leaders`` or bears one of ``marks``, stopped processes too, and wait
    until all are gone.

    To a leader belong the group and the session that it leads. A mark is the absolute path of an
    attempt's private directory: processes of this user that were started with it, or a path below
    it, as ``ALLHANDS_RUN_DIR`` bear it, also when they have left group and session, as daemons do.
    One that was started without it, or has written over its environment, is not found. Returns
    false if something was still there after ``wait_s``.
    """
    deadline = time.monotonic() + wait_s
    looks = 0
    while True:
        left = False
        for process in _left(leaders, marks):
            left = True
            with contextlib.suppress(psutil.Error):
                process.kill()
        looks = 0 if left else looks + 1
        # One look misses who was becoming another program just then, and whom a process forked that
        # ended meanwhile.
        if looks == (2 if marks else 1):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S if left else _CONFIRM_S)


def _left(leaders: Collection[int], marks: Collection[str]) -> Iterator[psutil.Process]:
    """Living processes, but this one, of these leaders or of this user and with one of ``marks``."""
    assert all(map(_is_below_root, marks)), marks
    user = os.geteuid()
    # The youngest first: one that is about to start another and to end must be seen before that.
    for process in map(_living, sorted(psutil.pids(), reverse=True)):
        with contextlib.suppress(psutil.Error, OSError):
            if process is None or (pid := process.pid) == os.getpid():
                continue
            leads = os.getpgid(pid) in leaders or os.getsid(pid) in leaders
            ours = leads or (marks and _bears(process, marks) and process.uids().effective == user)
            if ours and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                yield process


def _is_below_root(path: str) -> bool:
    """True if the path is absolute, and not the root itself."""
    return os.path.isabs(path) and path.strip("/") != ""


def _bears(process: psutil.Process, marks: Collection[str]) -> bool:
    """True if the process has a mark, or a path below one; macOS hides the environment of the
    system's programs.
    """
    value = process.environ().get(MARK, "")
    return any(value == mark or value.startswith(f"{mark}/") for mark in marks)


def _unmarked() -> dict[str, str]:
    """The environment for a helper, which is to outlive also the job that its owner may be part of."""
    return {name: value for name, value in os.environ.items() if name != MARK}


def _living(pid: int) -> psutil.Process | None:
    """The process with that number, which equals no later one; ``None``: it has ended."""
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


class _Register:
    """Register of the facts that the helper has received."""

    def __init__(self) -> None:
        self._leaders: dict[int, psutil.Process | None] = {}
        self._marks: list[str] = []
        self._directories: list[str] = []

    def read(self, stream: BinaryIO) -> bool:
        """Take in lines until the pipe closes; whether the owner said that it was done."""
        for line in stream:
            if not line.endswith(b"\n"):
                break  # cut off with its writer
            word, _, rest = line.decode(errors="replace").strip().partition(" ")
            if word == "done":
                return True
            with contextlib.suppress(
                ValueError, RecursionError
            ):  # a line that is none must not keep the others from being heeded
                self._take(word, rest)
        return False

    def _take(self, word: str, rest: str) -> None:
        if word == "group":
            self._leaders[int(rest)] = _living(int(rest))
        elif word == "forget":
            self._leaders.pop(int(rest), None)
        elif word in ("mark", "directory"):
            path = json.loads(rest)
            if isinstance(path, str) and _is_below_root(path):
                (self._marks if word == "mark" else self._directories).append(path)

    def clear_up(self) -> None:
        """End the processes, then remove the directories, which they might fill again."""
        # One that has ended still gives its group and session their name; a later process with its
        # number does not.
        end_processes(
            [pid for pid, one in self._leaders.items() if _living(pid) in (None, one)], self._marks
        )
        deadline = time.monotonic() + _REMOVE_S
        while (
            left := [path for path in self._directories if os.path.lexists(path)]
        ) and time.monotonic() < deadline:
            for path in left:
                shutil.rmtree(path, ignore_errors=True)
            time.sleep(_POLL_S)  # something was in the way, as a file that came or went meanwhile


def _deaf_to() -> set[signal.Signals]:
    """Everything that somebody may send to all processes at once, but for what cannot be refused."""
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP")
    return {signal.Signals[name] for name in names}


def main() -> None:
    """Entry point of the helper process."""
    for number in _deaf_to():
        signal.signal(number, signal.SIG_IGN)
    register = _Register()
    if not register.read(sys.stdin.buffer):
        register.clear_up()


if __name__ == "__main__":
    main()
