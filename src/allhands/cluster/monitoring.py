"""Samples of a run's processes that are stored on other computers, read over ssh.

The other end is this module as a program: ``python -P -m allhands.cluster.monitoring RUN FOLLOW CWD
BELOW_HOME``. It prints the lines of the run's files. If FOLLOW is 1, it also prints lines that are
added later, until its standard input is closed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from allhands.cluster import ssh
from allhands.cluster.agent import enter_directory
from allhands.cluster.hosts import Host, below_home
from allhands.errors import AllhandsError, DataError
from allhands.observe.monitor import Follower, Sample, decode_sample

_PATIENCE_S = 20.0
_LOOK_S = 0.5
_END_S = 2.0


class RemoteSamples:
    """Samples from the other computers of a run; a context manager that ends its connections.

    Args:
        hosts: the computers of the run; those that need no ssh are left out.
        run: the run's directory, the same on all computers.
        follow: whether to wait for more samples after the present ones.
    """

    def __init__(self, hosts: Sequence[Host], run: Path, *, follow: bool = True) -> None:
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._streams: list[_MonitorStream] = []
        self._hosts = [host for host in hosts if host.ssh is not None]
        self._run = run
        self._follow = follow

    def __enter__(self) -> Self:
        try:
            for host in self._hosts:
                self._streams.append(_MonitorStream(host, self._run, self._follow, self._lines))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def samples(self) -> list[Sample]:
        """Return the samples that are new since the last call; without ``follow``, wait for all."""
        if not self._follow:
            for stream in self._streams:
                stream.wait(_PATIENCE_S)
        found: list[Sample] = []
        with contextlib.suppress(queue.Empty):
            while True:
                sample = decode_sample(self._lines.get_nowait().decode("utf-8", errors="replace"))
                found += [sample] if sample else []
        return found

    def pending(self) -> bool:
        """Return whether there is a computer that has neither sent anything yet nor failed."""
        return any(stream.pending() for stream in self._streams)

    def complaints(self) -> list[str]:
        """Return a line for each computer that has failed to answer, with the reason."""
        return [reason for stream in self._streams if (reason := stream.complaint())]

    def close(self) -> None:
        """End every connection."""
        for stream in self._streams:
            stream.close()


class _MonitorStream:
    """The connection to one computer, and a thread that reads its lines."""

    def __init__(
        self, host: Host, run: Path, follow: bool, lines: queue.SimpleQueue[bytes]
    ) -> None:
        assert host.ssh is not None
        self._name = host.name
        self._told = False
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the connection
        cwd, home = host.cwd or os.getcwd(), "" if host.cwd else below_home(Path.cwd())
        words = ["-P", "-m", "allhands.cluster.monitoring", str(run), str(int(follow)), cwd, home]
        try:
            self._process = subprocess.Popen(
                ssh.command(host.ssh, [host.python or sys.executable, *words]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                start_new_session=True,
            )
        except OSError as error:
            raise ssh.missing(error) from None
        self._reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._reader.start()

    def wait(self, seconds: float) -> None:
        """Wait until all lines have been read, at most for ``seconds``."""
        self._reader.join(seconds)

    def pending(self) -> bool:
        """Return whether the computer has neither sent anything nor ended the connection."""
        return not self._told and self._process.poll() is None

    def complaint(self) -> str | None:
        """Return why the computer has failed to answer, or ``None``."""
        code = self._process.poll()
        if not code:
            return None
        self._said.seek(0)
        words = ssh.printable_lines(self._said.read().decode(errors="replace"))
        return f"{self._name}: {words[-1] if words else f'ssh ended with code {code}'}"

    def close(self) -> None:
        """End the connection; the program on the other computer notices this and ends."""
        with contextlib.suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_END_S)
        if self._process.stdout:
            self._process.stdout.close()
        self._said.close()

    def _read(self, lines: queue.SimpleQueue[bytes]) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                lines.put(line)
                self._told = True


def main(arguments: Sequence[str]) -> int:
    """Print lines until nobody reads them any more; return the exit code."""
    run, follow, cwd, home = arguments
    try:
        enter_directory(cwd, home or None)
    except AllhandsError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    follower = Follower(Path(run).expanduser())
    lines = follower.lines()
    if not lines:
        print(f"no process of a run has left samples in {Path(run).absolute()}", file=sys.stderr)
        return DataError.exit_code
    with contextlib.suppress(BrokenPipeError):
        while True:
            sys.stdout.writelines(f"{line}\n" for line in lines)
            sys.stdout.flush()
            lines = follower.lines()
            if follow != "1" or (
                not lines and select.select([0], [], [], _LOOK_S)[0] and not os.read(0, 1)
            ):
                return 0
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)  # without flushing standard output, which may be gone
