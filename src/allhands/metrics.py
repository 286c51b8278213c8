"""Events of a training run: what they hold, where they go (file, terminal) and how they are read back.

The training loop emits events on rank 0 into :class:`Sinks`. ``metrics.jsonl`` in the run directory is
the record; ``plots`` and ``report`` read it with :func:`read_metrics`. Nothing here needs a device.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeAlias, cast

from pydantic import TypeAdapter
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from allhands.errors import DataError, StorageError
from allhands.formatting import format_bytes, format_count, format_duration, format_memory, format_rate

METRICS_FILE = "metrics.jsonl"
# Share of a step that waiting for data may take before a person is told.
WAIT_SHOWN_FROM = 0.05
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunStarted:
    """A run, or the restart of one, begins. ``time`` is Unix time in seconds."""

    name: str
    model: str
    method: str
    num_ranks: int
    backend: str
    batch_size: int
    total_steps: int
    trainable_params: int
    total_params: int
    num_train_examples: int
    cores_per_rank: int | None
    versions: dict[str, str]
    time: float


@dataclass(frozen=True)
class TrainReport:
    """Training since the last report; times are seconds, ``comm_s`` and ``data_wait_s`` are per step.

    ``loss`` is the mean over the tokens trained since the last report, ``tokens_per_s`` counts all
    tokens of all ranks (prompt included), ``trained_tokens`` is the sum since step 0, ``elapsed_s`` counts
    from the latest start of the run (:func:`read_metrics` adds the time before a restart), and
    ``peak_memory_bytes`` has one entry a rank.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_s: float
    trained_tokens_per_s: float
    trained_tokens: int
    step_time_s: float
    data_wait_s: float
    comm_s: float
    elapsed_s: float
    peak_memory_bytes: tuple[int, ...]
    epoch: float


@dataclass(frozen=True)
class ValidReport:
    """Mean validation loss a token after ``step`` updates; ``best`` if no earlier one was lower."""

    step: int
    loss: float
    num_tokens: int
    elapsed_s: float
    duration_s: float
    best: bool


@dataclass(frozen=True)
class SavedReport:
    """A checkpoint or adapter lies complete at ``path``."""

    step: int
    path: str


@dataclass(frozen=True)
class RunEnded:
    """The run is over; ``total_time_s`` counts from its latest start, like ``elapsed_s``."""

    step: int
    reason: Literal["finished", "stopped early", "interrupted", "failed"]
    total_time_s: float
    best_step: int | None = None
    best_valid_loss: float | None = None
    test_loss: float | None = None


StepReport: TypeAlias = TrainReport | ValidReport | SavedReport
Event: TypeAlias = RunStarted | StepReport | RunEnded

_KINDS: dict[str, type[Event]] = {
    "started": RunStarted,
    "train": TrainReport,
    "valid": ValidReport,
    "saved": SavedReport,
    "ended": RunEnded,
}
_KIND_NAMES = {kind: name for name, kind in _KINDS.items()}
_READERS: dict[str, TypeAdapter[Any]] = {name: TypeAdapter(kind) for name, kind in _KINDS.items()}


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
        path: the file; directories above it are made. What is there already is kept.

    Raises:
        StorageError: the file cannot be opened or written to now. Once it is open, a line that cannot
            be written is lost with one warning: the training is worth more than its log.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._warned = False
        self._fd = -1
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
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

    def emit(self, event: Event) -> None:
        try:
            self._append(encode_event(event))
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


def encode_event(event: Event) -> str:
    """The event as one line of strict JSON; non-finite numbers become "NaN", "Infinity", "-Infinity"."""
    record = {entry.name: _plain(getattr(event, entry.name)) for entry in fields(event)}
    return json.dumps({"event": _KIND_NAMES[type(event)], **record}, allow_nan=False)


def _plain(value: object) -> object:
    """What ``json`` can write: numpy scalars become numbers, anything unknown its text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else json.dumps(number)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in cast("Sequence[object]", value)]
    return str(value)


def decode_event(line: str) -> Event | None:
    """The event of one line, or None if the line is torn, malformed or of an unknown kind."""
    try:
        record = json.loads(line)
        return _READERS[record.pop("event")].validate_python(record)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


@dataclass
class RunHistory:
    """A run as its file tells it, in order of steps, without what a restart made obsolete."""

    name: str
    started: RunStarted | None = None
    train: list[TrainReport] = field(default_factory=list)
    valid: list[ValidReport] = field(default_factory=list)
    saved: list[SavedReport] = field(default_factory=list)
    ended: RunEnded | None = None


def read_metrics(path: Path | str) -> RunHistory:
    """Read the history of a run.

    Torn and unknown lines are skipped: a kill leaves one, and a later version may add kinds. A restarted
    run appends to its file: where its steps go back, its entries replace the earlier ones of the same
    or a greater step, and its times go on from the last entry kept.

    Args:
        path: a run directory (the adapter path, holding ``metrics.jsonl``) or the file itself.

    Raises:
        DataError: there is no such file or directory, it cannot be read, or it holds no metrics.
    """
    file = Path(path)
    file = file / METRICS_FILE if file.is_dir() else file
    hint = f"give the adapter path of a run, the directory with its {METRICS_FILE}"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"no metrics: {error.strerror or error}", where=str(file), hint=hint) from error
    events = [event for line in text.split("\n") if (event := decode_event(line)) is not None]
    if not events:
        raise DataError("this file holds no training metrics", where=str(file), hint=hint)
    return _replay(events, name=file.resolve().parent.name)


def _replay(events: Iterable[Event], name: str) -> RunHistory:
    history, kept = RunHistory(name), list[StepReport]()
    before_s, restarted = 0.0, False
    for event in events:
        if isinstance(event, RunStarted):
            restarted = history.started is not None
            history.name, history.started, history.ended = event.name or name, event, None
            continue
        if restarted and isinstance(event, TrainReport):  # it trains from before this step
            kept = [entry for entry in kept if entry.step < event.step]
        elif not isinstance(event, RunEnded):
            kept = _without_replaced(kept, event)
        if restarted:  # only now is it known how much of the earlier part is kept
            restarted = False
            before_s = max((getattr(entry, "elapsed_s", 0.0) for entry in kept), default=0.0)
        if isinstance(event, RunEnded):
            history.ended = replace(event, total_time_s=event.total_time_s + before_s)
        elif isinstance(event, SavedReport):
            kept.append(event)
        else:
            kept.append(replace(event, elapsed_s=event.elapsed_s + before_s))
    history.train = [entry for entry in kept if isinstance(entry, TrainReport)]
    history.valid = [entry for entry in kept if isinstance(entry, ValidReport)]
    history.saved = [entry for entry in kept if isinstance(entry, SavedReport)]
    return history


def _without_replaced(kept: list[StepReport], event: StepReport) -> list[StepReport]:
    """``kept`` less what ``event`` replaces: if its kind goes back, all later steps and its own twin.

    Entries of another kind at the same step stay, since training and validation report in either order;
    so do two files saved at one step.
    """
    last = next((entry.step for entry in reversed(kept) if type(entry) is type(event)), -1)
    if event.step > last:
        return kept
    twin = (type(event), event.step, getattr(event, "path", None))
    earlier = [entry for entry in kept if entry.step <= event.step]
    return [entry for entry in earlier if (type(entry), entry.step, getattr(entry, "path", None)) != twin]


class ConsoleSink:
    """Shows a run to a person: a live board on a terminal, plain single lines anywhere else.

    Args:
        console: where to print; rich handles ``NO_COLOR`` and the width.
        total_steps: the step at which the run is complete, until :class:`RunStarted` says so.
        is_terminal: overrides what ``console`` finds out.

    Use it as a context manager, or close it: a board left open hides the cursor. When the terminal goes
    away during the run, the console is set to quiet and the run goes on.
    """

    def __init__(self, console: Console, total_steps: int = 0, is_terminal: bool | None = None) -> None:
        self._console = console
        terminal = console.is_terminal and not console.is_dumb_terminal
        self._live_wanted = terminal if is_terminal is None else is_terminal
        self._live: Live | None = None
        self._board = _Board(total_steps)
        self._pace: deque[tuple[int, float]] = deque(maxlen=20)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def emit(self, event: Event) -> None:
        try:
            self._show(event)
        except OSError:
            self._console.quiet = True
        except SystemExit:  # so rich answers a broken pipe, after setting quiet; other exits are not ours
            if not self._console.quiet:
                raise

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError):
                live.stop()

    def _show(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._board.total = event.total_steps
                self._print(*banner(event))
            case TrainReport():
                self._board.train, self._board.left_s = event, self._left_s(event)
                self._print(train_line(event, self._board.total, self._board.left_s))
            case ValidReport():
                self._board.valid = event
                self._board.best = event if event.best else self._board.best or event
                self._print(valid_line(event))
            case SavedReport():
                self._print(f"step {event.step}  saved {event.path}")
            case RunEnded():
                self.close()
                self._print(ended_line(event))
        if self._live_wanted and self._live is None and not isinstance(event, RunEnded):
            self._live = Live(console=self._console, get_renderable=self._board.render, transient=True)
            self._live.start()

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _left_s(self, report: TrainReport) -> float:
        """Time left at the pace of the last reports; validation and saving between them are counted."""
        pace = self._pace
        pace.append((report.step, report.elapsed_s))
        (first, first_s), (last, last_s) = pace[0], pace[-1]
        per_step = (last_s - first_s) / (last - first) if last > first else report.step_time_s
        return max(0, self._board.total - last) * per_step


@dataclass
class _Board:
    """The live part of the terminal: progress, latest figures, memory."""

    total: int
    train: TrainReport | None = None
    left_s: float = math.nan
    valid: ValidReport | None = None
    best: ValidReport | None = None
    spinner: Spinner = field(default_factory=lambda: Spinner("line"))  # shows that the process lives

    def render(self) -> RenderableType:
        step = self.train.step if self.train else 0
        left = f"left {format_duration(self.left_s)}" if self.train else "before the first report"
        columns = Column(), Column(ratio=1, min_width=8), Column(no_wrap=True)
        bar = Table.grid(*columns, padding=(0, 1), expand=True)
        progress = ProgressBar(total=max(self.total, 1), completed=step)
        bar.add_row(self.spinner, progress, f"step {step}/{self.total}  {left}")
        lines = (Text(line, no_wrap=True, overflow="ellipsis") for line in self._lines())
        return Group(bar, *lines)

    def _lines(self) -> Iterator[str]:
        report, valid, best = self.train, self.valid, self.best
        if report:
            yield f"loss {report.loss:.3f}  learning rate {report.learning_rate:.1e}"
        if valid and best:
            mark = "best" if valid is best else f"best {best.loss:.3f} at step {best.step}"
            yield f"validation loss {valid.loss:.3f} ({mark})"
        if report:
            memory = ", ".join(format_bytes(peak) for peak in report.peak_memory_bytes)
            yield f"tokens/s {format_rate(report.tokens_per_s)}  peak memory per rank {memory}"


def banner(started: RunStarted) -> list[str]:
    """The lines that open a run."""
    share = 100 * started.trainable_params / max(started.total_params, 1)
    cores = (
        f", {started.cores_per_rank} core{'s' * (started.cores_per_rank > 1)} each" if started.cores_per_rank else ""
    )
    epochs = started.total_steps * started.batch_size / max(started.num_train_examples, 1)
    trained, total = format_count(started.trainable_params), format_count(started.total_params)
    return [
        f"run         {started.name}",
        f"model       {started.model}",
        f"method      {started.method}",
        f"parameters  {trained} trained of {total} ({share:.3g} %)",
        f"ranks       {started.num_ranks} ({started.backend}){cores}",
        f"batch size  {started.batch_size} samples a step over all ranks",
        f"steps       {started.total_steps} on {started.num_train_examples} examples ({epochs:.1f} epochs)",
    ]


def train_line(report: TrainReport, total_steps: int, left_s: float) -> str:
    """One line a report; with several ranks, ``peak`` is the range over them."""
    rate = f"{format_rate(report.tokens_per_s)} (trained {format_rate(report.trained_tokens_per_s)})"
    peak, left = format_memory(report.peak_memory_bytes), format_duration(left_s)
    loss = f"loss {report.loss:.3f}  lr {report.learning_rate:.1e}"
    return f"step {report.step}/{total_steps}  {loss}  tokens/s {rate}  peak {peak}  left {left}{_waiting(report)}"


def _waiting(report: TrainReport) -> str:
    """That the steps wait for data, if it is worth a word."""
    share = report.data_wait_s / report.step_time_s if report.step_time_s else 0.0
    return f"  waits for data {share:.0%} of the time" if share >= WAIT_SHOWN_FROM else ""


def valid_line(report: ValidReport) -> str:
    """One line a validation."""
    loss = f"validation loss {report.loss:.3f}{' (best)' if report.best else ''}"
    return f"step {report.step}  {loss}  {format_duration(report.duration_s)}"


def ended_line(ended: RunEnded) -> str:
    """How the run ended, in one line."""
    text = f"{ended.reason} at step {ended.step}  total time {format_duration(ended.total_time_s)}"
    if ended.best_valid_loss is not None:
        text += f"  best validation loss {ended.best_valid_loss:.3f} at step {ended.best_step}"
    if ended.test_loss is not None:
        text += f"  test loss {ended.test_loss:.3f}"
    return text
