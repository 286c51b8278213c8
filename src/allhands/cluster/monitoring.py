"""Samples of a run's processes, here and on other computers, which are read over ssh.

The other end is this module as a program: ``python -P -m allhands.cluster.monitoring RUN FOLLOW CWD
BELOW_HOME``. It prints the lines of the run's files. If FOLLOW is 1, it also prints lines that are
added later, until its standard input is closed.
"""

from __future__ import annotations

import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO

from allhands.cluster import ssh
from allhands.cluster.agent import enter_directory
from allhands.cluster.hosts import Host, below_home
from allhands.errors import AllhandsError, DataError
from allhands.io.terminal import say
from allhands.observe.monitor import Follower, Sample, decode_sample
from allhands.observe.monitor.samples import in_order, no_samples, require_run

_PATIENCE_S = 20.0  # seconds that computers have to answer
_WAIT_S = 0.1
_LOOK_S = 0.5
_END_S = 2.0
NewSamples = Callable[[], list[Sample]]


@contextmanager
def run_samples(
    hosts: Sequence[Host], run: Path, *, follow: bool = True
) -> Generator[tuple[list[Sample], NewSamples]]:
    """Yield the first samples of a run, here and on other computers, and a function that returns
    new ones in order; end the connections afterwards.

    The first samples are there when every computer has answered, or the time for it is over.
    Computers that have not answered are told in a warning.

    Args:
        hosts: the computers of the run; empty: only this one.
        run: the run's directory, the same on all computers.
        follow: whether to wait for more samples after the present ones.

    Raises:
        DataError: there are no samples, or there is no run.
    """
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    follower = Follower(run)
    with ExitStack() as stack:
        streams = [
            stack.enter_context(closing(_MonitorStream(host, run, follow, lines)))
            for host in hosts
            if host.ssh is not None
        ]

        def new() -> list[Sample]:
            found = follower.samples()
            for stream in () if follow else streams:
                stream.wait(_PATIENCE_S)
            with suppress(queue.Empty):
                while True:
                    line = lines.get_nowait().decode("utf-8", errors="replace")
                    found += [sample] if (sample := decode_sample(line)) else []
            return in_order(found)

        if not hosts:
            require_run(run)
        yield _first(run, streams, new), new


def _first(run: Path, streams: Sequence[_MonitorStream], new: NewSamples) -> list[Sample]:
    samples = new()
    deadline = time.monotonic() + _PATIENCE_S
    while any(stream.pending() for stream in streams) and time.monotonic() < deadline:
        time.sleep(_WAIT_S)
        samples += new()
    samples = in_order([*samples, *new()])
    reasons = [reason for stream in streams if (reason := stream.complaint())]
    if not samples:
        raise no_samples(run, "".join(f"; {reason}" for reason in reasons))
    for reason in reasons:
        say(f"warning: not asked: {reason}")
    return samples


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
        with suppress(OSError):
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
        with suppress(OSError, ValueError):
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
    with suppress(BrokenPipeError):
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
