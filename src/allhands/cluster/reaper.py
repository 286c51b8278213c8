"""A small process that outlives its owner's ``kill -9`` and then ends what the owner had started.

Run by path with ``python -I -S reaper.py`` it reads lines from its standard input, a pipe that nobody else holds:
``group PID``, ``forget PID``, ``mark "PATH"``, ``directory "PATH"``, ``done``. When the pipe closes without ``done``,
its owner has ended without clearing up, however that came: every process of those groups, of the sessions that they
lead, and with those marks in its environment is killed, and the directories are removed. The standard library only, so
that it starts in a few hundredths of a second.
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
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

_WAIT_S = 60.0  # for killed processes to be gone: one may hang in a dead file system
_REMOVE_S = 5.0
_CLOSE_S = 10.0
_POLL_S = 0.02
_CONFIRM_S = 0.005  # before a second look
MARK = "ALLHANDS_RUN_DIR"  # the variable that all processes of an attempt inherit


class Reaper:
    """The owner's side, a context manager: what is registered is ended and removed if this process is killed.

    Leaving the block in the ordinary way leaves everything as it is; leaving it by an exception ends and removes it
    too. Processes to be registered must lead a group, or better a session, of their own.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", __file__]
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
        """End the helper; unless ``done``, have it clear up first. Waits for its end, but not for ever."""
        if done:
            self._send("done")
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(done=kind is None)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        # A helper that somebody has killed is missed only if we are killed too.
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def end_processes(leaders: Collection[int], marks: Collection[str] = (), wait_s: float = _WAIT_S) -> bool:
    """Kill what belongs to ``leaders`` or bears one of ``marks``, stopped processes too, and wait until all are gone.

    To a leader belong the group and the session that it leads. A mark is the absolute path of an attempt's private
    directory: processes of this user that were started with it, or a path below it, as ``ALLHANDS_RUN_DIR`` bear it,
    also when they have left group and session, as daemons do. One that was started without it, or has written over
    its environment, is not found. Returns false if something was still there after ``wait_s``.
    """
    deadline = time.monotonic() + wait_s
    looks = 0
    while True:
        left = _left(leaders, marks)
        looks = 0 if left else looks + 1
        # One look misses who was becoming another program just then, and whom a process forked that ended meanwhile.
        if looks == (2 if marks else 1):
            return True
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S if left else _CONFIRM_S)


def _left(leaders: Collection[int], marks: Collection[str]) -> list[int]:
    marked = _marked(marks) if marks else set[int]()
    return [pid for pid, group, session in _processes() if group in leaders or session in leaders or pid in marked]


def _marked(marks: Collection[str]) -> set[int]:
    """Processes of this user that bear one of ``marks``; whatever else has the variable is another job's."""
    assert all(os.path.isabs(mark) and mark.strip("/") for mark in marks), marks
    return _marked_in_proc(marks) if sys.platform == "linux" else _marked_in_ps(marks)


def _marked_in_proc(marks: Collection[str]) -> set[int]:
    found, user, start = set[int](), os.geteuid(), f"{MARK}=".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid != user:
                continue
            with open(f"/proc/{name}/environ", "rb") as stream:
                content = stream.read()
            entries = content.split(b"\0") if start in content else ()
            values = [os.fsdecode(entry.removeprefix(start)) for entry in entries if entry.startswith(start)]
            if any(value == mark or value.startswith(f"{mark}/") for value in values for mark in marks):
                found.add(int(name))
    return found


def _marked_in_ps(marks: Collection[str]) -> set[int]:
    """As on macOS, which shows the environment behind the command; not that of programs of the system itself."""
    found, user = set[int](), str(os.geteuid())
    command = ["ps", "-axEww", "-o", "pid=,uid=,command="]
    answer = subprocess.run(command, capture_output=True, text=True, errors="surrogateescape", check=False)
    for line in answer.stdout.splitlines():
        pid, owner, text = (*line.split(None, 2), "", "", "")[:3]
        if owner == user and any(f" {MARK}={mark}{end}" in f"{text} " for mark in marks for end in (" ", "/")):
            found.add(int(pid))
    return found


def _unmarked() -> dict[str, str]:
    """The environment for a helper, which is to outlive also the job that its owner may be part of."""
    return {name: value for name, value in os.environ.items() if name != MARK}


def _processes() -> Iterator[tuple[int, int, int]]:
    """All living processes but this one: number, group, session."""
    own = os.getpid()
    for pid, zombie in _from_proc() if sys.platform == "linux" else _from_ps():
        if pid != own and not zombie:
            with contextlib.suppress(OSError):
                yield pid, os.getpgid(pid), os.getsid(pid)


def _from_proc() -> Iterable[tuple[int, bool]]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            yield int(name), _stat(int(name))[0] in ("Z", "X")


def _from_ps() -> Iterable[tuple[int, bool]]:
    answer = subprocess.run(["ps", "-axo", "pid=,stat="], capture_output=True, text=True, check=False)
    for pid, state in (line.split()[:2] for line in answer.stdout.splitlines()):
        yield int(pid), state.startswith("Z")


def _stat(pid: int) -> list[str]:
    """The fields of Linux's ``/proc/PID/stat`` from the state on: the name before it may contain anything."""
    with open(f"/proc/{pid}/stat", "rb") as stream:
        return stream.read().rpartition(b")")[2].decode().split()


def _birth(pid: int) -> str | None:
    """What tells a process from a later one with its number; ``None`` if that is not known."""
    try:
        return _stat(pid)[19] if sys.platform == "linux" else None
    except OSError:
        return None


class _Register:
    """What the helper has been told."""

    def __init__(self) -> None:
        self._births: dict[int, str | None] = {}
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
            self._births[int(rest)] = _birth(int(rest))
        elif word == "forget":
            self._births.pop(int(rest), None)
        elif word in ("mark", "directory"):
            path = json.loads(rest)
            if isinstance(path, str) and os.path.isabs(path) and path.strip("/"):
                (self._marks if word == "mark" else self._directories).append(path)

    def clear_up(self) -> None:
        """End the processes, then remove the directories, which they might fill again."""
        leaders = [pid for pid, birth in self._births.items() if self._is_the_same(pid, birth)]
        end_processes(leaders, self._marks)
        deadline = time.monotonic() + _REMOVE_S
        while (left := [path for path in self._directories if os.path.lexists(path)]) and time.monotonic() < deadline:
            for path in left:
                shutil.rmtree(path, ignore_errors=True)
            time.sleep(_POLL_S)  # something was in the way, as a file that came or went meanwhile

    @staticmethod
    def _is_the_same(pid: int, birth: str | None) -> bool:
        """Not a later process with that number; one that has ended still gives its group and session their name."""
        now = _birth(pid)
        return birth is None or now is None or now == birth


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
