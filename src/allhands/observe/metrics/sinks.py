"""Sinks of events, among them the file that is the record of the run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, Self

from allhands.io.files import storage_error
from allhands.observe.lines import LineFile
from allhands.observe.metrics.events import OPENED, Event, encode_event


class Sink(Protocol):
    """Receiver of events. ``emit`` never ends a run because of a failing output; ``close`` may be
    repeated.
    """

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
        path: the file; directories above it are made, and nobody else may read what is made. What
            is there already is kept.

    Raises:
        StorageError: the file cannot be opened or written to now. Once it is open, a line that
            cannot be written is lost with one warning: the training is worth more than its log.
    """

    def __init__(self, path: Path | str) -> None:
        lines: LineFile | None = None
        try:
            self._lines = lines = LineFile(Path(path), "metrics")
            # Opening a file succeeds on a full disk; only a line written proves that there is room.
            lines.append(OPENED)
        except OSError as error:
            if lines is not None:
                lines.close()
            told = storage_error(Path(path), error)
            told.message = f"cannot write the training metrics: {error.strerror or error}"
            told.hint = (
                "free disk space or choose a directory that can be written to, then start again"
            )
            raise told from error

    def close(self) -> None:
        self._lines.close()  # a later write fails as "bad file descriptor" and is warned about

    def emit(
        self, event: Event, more: Mapping[str, float] | None = None, without: Collection[str] = ()
    ) -> None:
        self._lines.try_append(encode_event(event, more, without))
