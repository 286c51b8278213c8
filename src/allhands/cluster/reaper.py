"""The reaper: a small helper process that survives when its owner is killed with ``kill -9``, and
then ends all processes that the owner has started.

It is run by path, as ``python -I reaper.py``. It reads lines from its standard input, a pipe to
which only its owner writes: ``group PID``, ``forget PID``, ``mark "PATH"``, ``directory "PATH"``,
``done``. If the pipe closes without ``done``, the owner has ended without cleaning up, for whatever
reason. Then the reaper kills every process in these groups, in the sessions that their leaders
lead, or with one of these marks in its environment. After that it removes the directories. It
imports no other module of allhands, so that it starts in a few hundredths of a second.
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

_WAIT_S = 60.0  # until killed processes are gone: one may hang because a file system hangs
_REMOVE_S = 5.0
_CLOSE_S = 10.0
_POLL_S = 0.02
_CONFIRM_S = 0.005  # before the list of processes is read again
MARK = "ALLHANDS_RUN_DIR"  # the variable that all processes of an attempt inherit


class Reaper:
    """The owner's side of the reaper, a context manager.

    If this process is killed, or an exception leaves the block, the registered processes are ended,
    and the registered directories are removed. If the block ends without an exception, everything
    stays as it is. A process to be registered must lead a group of its own or, better, a session.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-I", __file__]
        quiet = subprocess.DEVNULL
        # Block signals here: the helper inherits this, until it can ignore them itself.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _deaf_to())
        try:
            # Its working directory is "/", so that other directories can be removed.
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
        """The process id of the helper."""
        return self._process.pid

    def group(self, pid: int) -> None:
        """Register the process that leads a group and, if it does, a session."""
        self._send(f"group {pid}")

    def forget(self, pid: int) -> None:
        """Remove a group that has ended: its process id may be given to another process."""
        self._send(f"forget {pid}")

    def mark(self, run_dir: Path) -> None:
        """Register all processes whose ``ALLHANDS_RUN_DIR`` is this absolute path or below it."""
        self._send(f"mark {json.dumps(str(run_dir))}")

    def directory(self, path: Path) -> None:
        """Register a directory that is to be removed, with everything in it."""
        self._send(f"directory {json.dumps(str(path.absolute()))}")

    def close(self, done: bool = True) -> None:
        """End the helper, and wait for its end for a limited time.

        Args:
            done: if false, the helper first ends and removes what is registered.
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
        # If somebody has killed the helper, that matters only if this process is killed, too.
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def end_group(leader: subprocess.Popen[bytes]) -> None:
    """Kill the group that ``leader`` leads, and wait for ``leader``, unless that has ended.

    ``leader`` must be a child of this process.
    """
    if leader.poll() is None:
        signal_group(leader.pid)
        leader.wait()


def signal_group(leader: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the group that a process leads, if that exists and may be signalled."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def end_processes(
    leaders: Collection[int], marks: Collection[str] = (), wait_s: float = _WAIT_S
) -> bool:
    """Kill all processes of ``leaders`` or with one of ``marks``, and wait until they are gone.

    Stopped processes are killed too. A process belongs to a leader if it is in the group or the
    session that the leader leads. A mark is the absolute path of an attempt's private directory. A
    process of this user has the mark if it was started with this path, or one below it, as
    ``ALLHANDS_RUN_DIR``. So daemons, which leave group and session, are found. A process that was
    started without the variable, or has overwritten its environment, is not found.

    Returns:
        False if a process was still there after ``wait_s``.
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
        # With marks look twice: once may miss a process that is just executing another program, or
        # that was forked by a process which has ended meanwhile.
        if looks == (2 if marks else 1):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S if left else _CONFIRM_S)


def _left(leaders: Collection[int], marks: Collection[str]) -> Iterator[psutil.Process]:
    """Return the living processes of ``leaders``, or of this user with one of ``marks``, without
    this process.
    """
    assert all(map(_is_below_root, marks)), marks
    user = os.geteuid()
    # The highest ids come first: a new process must be seen before it starts another one and ends.
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
    """True if the process has one of the marks, or a path below it.

    On macOS the environment of the system's programs cannot be read.
    """
    value = process.environ().get(MARK, "")
    return any(value == mark or value.startswith(f"{mark}/") for mark in marks)


def _unmarked() -> dict[str, str]:
    """Return the environment for the helper, without the mark.

    If its owner is part of another job, the end of that job must not end the helper.
    """
    return {name: value for name, value in os.environ.items() if name != MARK}


def _living(pid: int) -> psutil.Process | None:
    """Return the process with this id; ``None`` if it has ended.

    The result is not equal to a later process with the same id.
    """
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


class _Register:
    """What the helper has been told to end and to remove."""

    def __init__(self) -> None:
        self._leaders: dict[int, psutil.Process | None] = {}
        self._marks: list[str] = []
        self._directories: list[str] = []

    def read(self, stream: BinaryIO) -> bool:
        """Read lines until the pipe closes or says ``done``; return whether it said ``done``."""
        for line in stream:
            if not line.endswith(b"\n"):
                break  # the writer was killed in the middle of a line
            word, _, rest = line.decode(errors="replace").strip().partition(" ")
            if word == "done":
                return True
            with contextlib.suppress(
                ValueError, RecursionError
            ):  # skip a line that is not valid, and read the others
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
        """End the processes, then remove the directories, into which they might still write."""
        # If a leader has ended, its group and session still have its id, so search for them. But
        # skip an id that a later process has now.
        end_processes(
            [pid for pid, one in self._leaders.items() if _living(pid) in (None, one)], self._marks
        )
        deadline = time.monotonic() + _REMOVE_S
        while (
            left := [path for path in self._directories if os.path.lexists(path)]
        ) and time.monotonic() < deadline:
            for path in left:
                shutil.rmtree(path, ignore_errors=True)
            time.sleep(_POLL_S)  # try again: perhaps a file came or went during the removal


def _deaf_to() -> set[signal.Signals]:
    """Return the signals that may be sent to all processes at once, and that can be ignored."""
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
