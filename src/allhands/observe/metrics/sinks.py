"""Where events go: any number of sinks, one of them the file that is the record of the run."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, Self

from allhands.errors import StorageError
from allhands.io.files import make_directory, private_opener
from allhands.observe.metrics.events import Event, encode_event

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where events go. ``emit`` never ends a run because of a failing output; ``close`` may be repeated."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """Hands every event to every sink; a context manager that closes them all, whatever happens."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink.emit(event)

    def close(self) -> None:
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class JsonlSink:
    """Appends one JSON object a line to ``path``, each handed to the operating system at once.

    Args:
        path: the file; directories above it are made, and nobody else may read what is made. What is there already
            is kept.

    Raises:
        StorageError: the file cannot be opened or written to now. Once it is open, a line that cannot
            be written is lost with one warning: the training is worth more than its log.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._warned = False
        self._fd = -1
        try:
            make_directory(self._path.parent, private=True)
            self._fd = private_opener(str(self._path), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
            size = os.fstat(self._fd).st_size
            # A kill may have cut the last line off: the next one must not be glued to it.
            self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
            # Opening a file succeeds on a full disk; only a line written proves that there is room.
            self._append('{"event": "opened", "format": 1}')
        except OSError as error:
            self.close()
            raise StorageError(
                f"cannot write the training metrics: {error.strerror or error}",
                where=str(self._path),
                hint="free disk space or choose a directory that can be written to, then start again",
            ) from error

    def emit(self, event: Event, more: Mapping[str, float] | None = None, without: Collection[str] = ()) -> None:
        try:
            self._append(encode_event(event, more, without))
        except OSError as error:
            self._torn = True
            if not self._warned:
                self._warned = True
                reason = error.strerror or error
                _log.warning("%s: no metrics can be written (%s); the run goes on", self._path, reason)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1  # a later write fails as "bad file descriptor" and is warned about

    def _append(self, line: str) -> None:
        data = f"{chr(10) if self._torn else ''}{line}\n".encode()
        if os.write(self._fd, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False
