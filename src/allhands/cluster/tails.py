"""The output of all ranks on one screen: each line that is added to their logs, with the rank
before it.

The lines are read from the logs, not through pipes. So a rank never waits for the screen, and
nothing is lost when the reader ends.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from allhands.cluster.frames import write_all
from allhands.io.terminal import fitted_to, is_read_live

_POLL_S = 0.1
_PARTIAL_POLLS = 10  # after which a line that does not end, such as a question, is shown anyway
_PIECE_BYTES = 1 << 16


class Tails:
    """Passes on the lines that are added to some logs; a context manager with a thread of its own.

    Args:
        logs: the logs by rank; a log need not exist yet. What they already contain is skipped.
        tell: called in the thread with the rank and a line, without its line break. A line of more
            than 64 KiB comes in pieces. A line that has not ended after a second comes as far as it
            goes.
    """

    def __init__(self, logs: Mapping[int, Path], tell: Callable[[int, bytes], None]) -> None:
        self._logs = dict(logs)
        self._tell = tell
        self._places = {rank: _size(path) for rank, path in self._logs.items()}
        self._rests = dict.fromkeys(self._logs, b"")
        self._waited = dict.fromkeys(self._logs, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="tails", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Pass on the lines that are left, and end the thread."""
        self._over.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self) -> None:
        while not self._over.wait(_POLL_S):
            self._look()
        self._look()
        for rank, rest in self._rests.items():
            if rest:
                self._tell(rank, rest)

    def _look(self) -> None:
        for rank, path in self._logs.items():
            with contextlib.suppress(OSError), path.open("rb") as stream:
                stream.seek(self._places[rank])
                while piece := stream.read(_PIECE_BYTES):
                    self._places[rank] += len(piece)
                    self._take(rank, piece)
            self._wait_for_the_end(rank)

    def _take(self, rank: int, piece: bytes) -> None:
        *lines, rest = (self._rests[rank] + piece).split(b"\n")
        for line in lines:
            self._tell(rank, line)
        if len(rest) >= _PIECE_BYTES:
            self._tell(rank, rest)
            rest = b""
        self._rests[rank], self._waited[rank] = rest, 0

    def _wait_for_the_end(self, rank: int) -> None:
        if not self._rests[rank]:
            return
        self._waited[rank] += 1
        if self._waited[rank] >= _PARTIAL_POLLS:
            self._tell(rank, self._rests[rank])
            self._rests[rank], self._waited[rank] = b"", 0


def tagged(rank: int, line: bytes, host: str | None = None) -> bytes:
    """Return a line for the screen, with its rank and perhaps its host before it.

    Of a progress bar, which overwrites itself, only the last state is shown.
    """
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    place = "" if host is None else f" {host}"
    return f"[rank {rank}{place}] ".encode() + shown + b"\n"


def for_screen(rank: int, line: bytes, host: str | None = None) -> bytes:
    """Return a line as :func:`tagged`; for a terminal it is wrapped to the terminal's width."""
    data = tagged(rank, line, host)
    if b"\x1b" in data or not is_read_live(sys.stdout):
        return data
    return fitted_to(1, data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def to_screen(rank: int, line: bytes) -> None:
    """Write a line of a rank of this computer to our standard output."""
    write_all(1, for_screen(rank, line))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
