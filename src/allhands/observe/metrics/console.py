"""Display of a run for a person while it goes on."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from allhands.io.formatting import (
    counted,
    format_count,
    format_duration,
    format_memory,
    format_rate,
    format_shares,
    format_size,
)
from allhands.io.notebook import NotebookOutput
from allhands.io.terminal import one_line, print_line, row_width
from allhands.observe.metrics.events import (
    Event,
    RunEnded,
    RunStarted,
    Sampled,
    SavedReport,
    SharesChanged,
    StepSkipped,
    TrainReport,
    ValidReport,
    Warned,
)

# Share of a step that waiting for data may take before a person is told.
WAIT_SHOWN_FROM = 0.05
_SHOWN_EXAMPLES = 5


class ConsoleSink:
    """Shows a run to a person: a live board on a terminal, one output that changes in a notebook,
    plain single lines anywhere else.

    Args:
        console: where to print, as :func:`allhands.io.terminal.progress_console` makes it.
        total_steps: the step at which the run is complete, until :class:`RunStarted` says so.
        is_terminal: overrides what ``console`` finds out.
        profile: True to show the parts of the time of a step.
        short: True if lines of progress get a prefix, so that they leave out the least important
            figures.

    Use it as a context manager, or close it: a board left open hides the cursor. When the terminal
    goes away during the run, the console is set to quiet and the run goes on.
    """

    def __init__(
        self,
        console: Console,
        total_steps: int = 0,
        is_terminal: bool | None = None,
        *,
        profile: bool = False,
        short: bool = False,
    ) -> None:
        self._console = console
        self._short = short
        self._profile = profile
        terminal = console.is_terminal and not console.is_dumb_terminal
        self._live_wanted = terminal if is_terminal is None else is_terminal
        self._live: Live | None = None
        file: object = console.file
        self._page = file if isinstance(file, NotebookOutput) else None
        self._board = _Board(total_steps)
        self._before_s = 0.0
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
        except (
            SystemExit
        ):  # so rich answers a broken pipe, after setting quiet; other exits are not ours
            if not self._console.quiet:
                raise

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError):
                live.stop()

    def _show(self, event: Event) -> None:
        board = self._board
        match event:
            case RunStarted():
                board.total, board.start = event.total_steps, event.step
                self._before_s = event.elapsed_s
                self._pace.clear()
                self._print(*started_lines(event))
            case TrainReport():
                board.train, board.left_s = event, self._left_s(event)
                board.profile = [profile_line(event)] if self._profile else []
                width = None if self._page else row_width(self._console)
                line = train_line(event, board.total, board.left_s, width, short=self._short)
                self._tell(line, *board.profile)
            case ValidReport():
                board.valid, board.best = event, event if event.best else board.best or event
                self._tell(valid_line(event))
            case RunEnded():
                self.close()
                self._tell(ended_line(event, self._before_s), is_event=True)
                return
            case Warned():
                self._print(*_lines_of(event))
            case _:
                self._tell(*_lines_of(event), is_event=True)
        if self._live_wanted and self._live is None:
            self._live = Live(
                console=self._console, get_renderable=self._board.render, transient=True
            )
            self._live.start()

    def _tell(self, *lines: str, is_event: bool = False) -> None:
        """Print lines of which a notebook shows the present state, or the latest events."""
        if self._page is None:
            self._print(*lines)
            return
        for line in lines if is_event else ():
            self._page.add_event(line)
        self._page.show(self._board.step, self._board.total, self._board.lines())

    def _print(self, *lines: str) -> None:
        for line in lines:
            print_line(self._console, line)

    def _left_s(self, report: TrainReport) -> float:
        """Time left at the pace of the last reports; validation and saving between them are
        counted.
        """
        pace = self._pace
        pace.append((report.step, report.elapsed_s))
        (first, first_s), (last, last_s) = pace[0], pace[-1]
        per_step = (last_s - first_s) / (last - first) if last > first else report.step_time_s
        return max(0, self._board.total - last) * per_step


@dataclass
class _Board:
    """The live part of the terminal: progress, latest figures, memory."""

    total: int
    start: int = 0  # the step that this start of the run goes on from
    train: TrainReport | None = None
    left_s: float = math.nan
    valid: ValidReport | None = None
    best: ValidReport | None = None
    profile: list[str] = field(default_factory=list[str])
    spinner: Spinner = field(
        default_factory=lambda: Spinner("line")
    )  # shows that the process lives

    @property
    def step(self) -> int:
        """The last step that was reported."""
        return self.train.step if self.train else self.start

    def lines(self) -> list[str]:
        """Return progress, latest figures and memory, as plain lines."""
        return [self._progress(), *self._lines(), *self.profile]

    def render(self) -> RenderableType:
        """Return progress, latest figures and memory."""
        bar = Table.grid(
            Column(),
            Column(ratio=1, min_width=8),
            Column(no_wrap=True),
            padding=(0, 1),
            expand=True,
        )
        progress = ProgressBar(total=max(self.total, 1), completed=self.step)
        bar.add_row(self.spinner, progress, self._progress())
        return Group(
            bar, *(Text(line, no_wrap=True, overflow="ellipsis") for line in self._lines())
        )

    def _progress(self) -> str:
        left = f"left {format_duration(self.left_s)}" if self.train else "before the first report"
        return f"step {self.step}/{self.total}  {left}"

    def _lines(self) -> Iterator[str]:
        report, valid, best = self.train, self.valid, self.best
        if report:
            yield f"loss {report.loss:.3f}  learning rate {report.learning_rate:.1e}"
        if valid and best:
            mark = "best" if valid is best else f"best {best.loss:.3f} at step {best.step}"
            yield f"validation loss {valid.loss:.3f} ({mark})"
        if report:
            memory = format_memory(report.peak_memory_bytes)
            yield f"tokens/s {format_rate(report.tokens_per_s)}  peak memory per rank {memory}"


def started_lines(started: RunStarted) -> list[str]:
    """Return the lines that open a run; one line where a supervisor has started it again."""
    if started.attempt == 1:
        return banner(started)
    ranks = f"{started.num_ranks} rank{'s' * (started.num_ranks > 1)} ({started.backend})"
    going_on = (
        f"going on from step {started.step}" if started.step else "starting from the beginning"
    )
    return [f"attempt {started.attempt}: {going_on} with {ranks}"]


def banner(started: RunStarted) -> list[str]:
    """Return the lines that open a run."""
    share = 100 * started.trainable_params / max(started.total_params, 1)
    cores = (
        f", {started.cores_per_rank} core{'s' * (started.cores_per_rank > 1)} each"
        if started.cores_per_rank
        else ""
    )
    backend = f" ({started.backend})" if started.num_ranks > 1 else ""
    batches = started.total_iterations or started.total_steps
    accumulated = started.grad_accumulation_steps
    epochs = batches / max(1, math.ceil(started.num_train_examples / started.batch_size))
    of_step = (
        "a step over all ranks"
        if accumulated == 1
        else f"over all ranks, {accumulated} batches a step"
    )
    iterations = "" if batches == started.total_steps else f" ({counted(batches, 'iteration')})"
    trained, total = format_count(started.trainable_params), format_count(started.total_params)
    noun = "row" if started.method == "pre-training" else "example"
    place = f": {started.resumed_from}" if started.resumed_from else ""
    resumed = [f"resumed     from step {started.step}{place}"] if started.step else []
    return [
        f"run         {started.name}",
        f"model       {started.model}",
        f"method      {started.method}",
        f"parameters  {trained} trained of {total} ({share:.3g} %)",
        f"ranks       {started.num_ranks}{backend}{cores}",
        *(
            [f"strategy    {started.strategy}"]
            if started.num_ranks > 1 and started.strategy
            else []
        ),
        f"batch size  {counted(started.batch_size, 'sample')} {of_step}",
        f"steps       {started.total_steps}{iterations} on {counted(started.num_train_examples, noun)}"
        f" ({epochs:{'.1f' if epochs >= 0.095 else '.1g'}} epochs)",
        *resumed,
    ]


def train_line(
    report: TrainReport,
    total_steps: int,
    left_s: float,
    width: int | None = None,
    *,
    short: bool = False,
) -> str:
    """One line a report; with several ranks, ``peak`` is the range over them.

    Args:
        width: of the terminal, for the fullest line that is one row of it; ``None``: the fullest.
        short: whether something stands before the line: it has the highest peak alone, or the wait
            for data.
    """
    rate, trained = format_rate(report.tokens_per_s), format_rate(report.trained_tokens_per_s)
    waiting, peaks = _waiting(report), report.peak_memory_bytes
    brief = waiting.replace("waits for data", "data wait").removesuffix(" of the time")
    loss = f"loss {report.loss:.3f}{_further(report.metrics)}  lr {report.learning_rate:.1e}"
    head = f"step {report.step}/{total_steps}  {loss}  tokens/s {rate}"
    peak, left = f"  peak {format_memory(peaks)}", f"  left {format_duration(left_s)}"
    more = "" if trained == rate else f" (trained {trained})"
    lines = [f"{head}{more}{peak}{left}{waiting}", f"{head}{peak}{left}{brief}"]
    lines += [
        f"{head}  peak {format_memory(peaks and (max(peaks),))}{left}{brief}",
        f"{head}{left}{brief}",
    ]
    lines = lines[3 if waiting else 2 :] if short else lines
    return next((line for line in lines if width is None or len(line) < width), lines[-1])


def _further(metrics: Mapping[str, float]) -> str:
    return "".join(f"  {name} {value:.3f}" for name, value in metrics.items())


def profile_line(report: TrainReport) -> str:
    """Return the parts of the time of a step of rank 0, over all its batches."""
    parts = {
        "compute": report.compute_s,
        "communication": report.comm_s,
        "data": report.data_wait_s,
    }
    parts["update and the rest"] = max(0.0, report.step_time_s - sum(parts.values()))
    whole = report.step_time_s or 1.0
    told = ", ".join(
        f"{name} {1e3 * seconds:.1f} ms ({seconds / whole:.0%})" for name, seconds in parts.items()
    )
    sent = f"; sent {format_size(report.sent_bytes)}" if report.sent_bytes else ""
    return f"  a step of {1e3 * report.step_time_s:.1f} ms: {told}{sent}"


def _waiting(report: TrainReport) -> str:
    """The share of time in which steps wait for data, if it is large."""
    share = report.data_wait_s / report.step_time_s if report.step_time_s else 0.0
    return f"  waits for data {share:.0%} of the time" if share >= WAIT_SHOWN_FROM else ""


def valid_line(report: ValidReport) -> str:
    """One line a validation."""
    loss = f"validation loss {report.loss:.3f}{' (best)' if report.best else ''}{_further(report.metrics)}"
    if report.bits_per_byte is not None:
        loss += f"  {report.bits_per_byte:.3f} bits per byte"
    return f"step {report.step}  {loss}  {format_duration(report.duration_s)}"


def sampled_line(sampled: Sampled) -> str:
    """Prompt and continuation on one line; what a terminal would take for orders is left out."""
    return f"step {sampled.step}  sample: {one_line(sampled.prompt)} | {one_line(sampled.text)}"


def skipped_line(skipped: StepSkipped) -> str:
    """Return a step that changed nothing, the reason, and the first of the examples that may be the
    cause.
    """
    text = f"step {skipped.step}  skipped: {skipped.reason}"
    found = list(
        zip_longest(skipped.examples, (f" at {where}" for where in skipped.where), fillvalue="")
    )
    shown = ", ".join(f"{example}{place}" for example, place in found[:_SHOWN_EXAMPLES])
    more = f" and {len(found) - _SHOWN_EXAMPLES} more" if len(found) > _SHOWN_EXAMPLES else ""
    return f"{text} (training example{'s' * (len(found) > 1)} {shown}{more})" if found else text


def shares_line(changed: SharesChanged) -> str:
    """New shares of the ranks, and why."""
    speeds = [f"{speed:,.0f}" if speed else "unknown" for speed in changed.speeds]
    told = (
        ", ".join(speeds)
        if len(speeds) <= 8
        else f"{min(changed.speeds):,.0f} to {max(changed.speeds):,.0f}"
    )
    before, now = format_shares(changed.before), format_shares(changed.shares)
    line = f"step {changed.step}  shares of a batch {before} -> {now} from step {changed.from_step + 1}"
    line += f": the ranks compute {told} tokens/s"
    idle = [str(rank) for rank, gets in enumerate(changed.rows) if not gets]
    if idle:
        line += f"; rank{'s' * (len(idle) > 1)} {', '.join(idle)} would need longer for one row than the others for all"
    return line


def ended_line(ended: RunEnded, before_s: float = 0.0) -> str:
    """Return the end of the run in one line; ``before_s`` is the time of earlier starts."""
    text = f"{ended.reason} at step {ended.step}  total time {format_duration(before_s + ended.total_time_s)}"
    if before_s:
        text += f" ({format_duration(ended.total_time_s)} since the last start)"
    if ended.best_valid_loss is not None:
        text += f"  best validation loss {ended.best_valid_loss:.3f} at step {ended.best_step}"
        text += " (before training)" if ended.best_step == 0 else ""
    if ended.test_loss is not None:
        text += f"  test loss {ended.test_loss:.3f}"
    return text


# What a person's own program logs it shows as it likes.
_LINES: dict[type, Callable[[Any], str]] = {
    SavedReport: lambda saved: f"step {saved.step}  saved {saved.path}",
    StepSkipped: skipped_line,
    SharesChanged: shares_line,
    Sampled: sampled_line,
    Warned: lambda warned: f"{'note' if warned.over else 'warning'}: {warned.message}",
}


def _lines_of(event: Event) -> list[str]:
    return [line(event) for kind, line in _LINES.items() if isinstance(event, kind)]
