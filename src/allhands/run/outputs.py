"""Destinations of a rank's lines, numbers and pictures, and the lock against other writers."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console

from allhands.checkpoints import quick_step
from allhands.checkpoints.copies import Copies
from allhands.checkpoints.rundir import MEMORY_FILE, PLOT_FILE, make_room, share_history
from allhands.config.combinations import dividing_flags
from allhands.config.pretrain_schema import model_name, pretraining
from allhands.data.loader import Largest
from allhands.errors import AllhandsError
from allhands.io.files import (
    ClaimedError,
    claimed,
    make_directory,
    private_opener,
    storage_error_of,
)
from allhands.observe.metrics import (
    METRICS_FILE,
    ConsoleSink,
    JsonlSink,
    RunStarted,
    Sink,
    Sinks,
    read_metrics,
)
from allhands.observe.monitor import read_samples
from allhands.observe.trackers import start_trackers, tracker_names
from allhands.parallel.registry import STRATEGIES
from allhands.run.context import RunContext
from allhands.run.preparing import LoadedRun, versions
from allhands.run.state import LoopState


def copies_of(directory: Path, surroundings: RunContext, ready: LoadedRun) -> Copies:
    """Return the state of the run's copied checkpoints; ``directory`` is this rank's."""
    return Copies(
        ready.communicator,
        keeps=ready.keeps_files and not surroundings.mesh.is_main,
        computer=surroundings.computer or socket.gethostname(),
        newest=lambda: quick_step(directory, ready.run_id) or 0,
    )


@dataclass(frozen=True)
class Outputs:
    """Outputs of one rank's run; failures of outputs that are only for a copy do not end it."""

    directory: Path
    surroundings: RunContext
    ready: LoadedRun
    copies: Copies

    def started(self, total: int, state: LoopState, largest: Largest, strategy: str) -> RunStarted:
        """Return the event for the start of a run of ``total`` batches.

        ``largest``: size of this rank's largest work. ``strategy``: its name in the registry.
        """
        ready, mesh = self.ready, self.surroundings.mesh
        config, windows, restored = ready.config, ready.data.train, ready.restored
        return RunStarted(
            name=self.directory.name,
            model=model_name(config),
            method="pre-training" if pretraining(config) else config.fine_tune_type,
            num_ranks=mesh.size,
            backend=ready.communicator.backend,
            batch_size=config.batch_size,
            total_steps=state.steps_in_all(total, config.grad_accumulation_steps),
            trainable_params=ready.trainable.parameters,
            total_params=ready.trainable.total_parameters,
            num_train_examples=len(windows) if windows else 0,
            cores_per_rank=self.surroundings.cores_per_rank,
            versions=versions(),
            time=time.time(),
            step=state.step,
            attempt=self.surroundings.attempt,
            elapsed_s=state.before_s,
            resumed_from=restored.place if restored and not restored.own else None,
            largest=(largest.tokens, largest.micro_batches),
            lengths=largest.lengths,
            longest=int(windows.work.max()) if windows else None,
            vocabulary=ready.loaded.vocabulary,
            iteration=state.iteration,
            total_iterations=max(total, state.iteration),
            grad_accumulation_steps=config.grad_accumulation_steps,
            seen=ready.data.seen,
            strategy=", ".join([STRATEGIES[strategy].title, *dividing_flags(config)])
            if mesh.size > 1
            else "",
            validated=ready.data.validated(config),
        )

    @contextmanager
    def claim(self) -> Generator[None, None, None]:
        """Lock this computer's directory against other runs, if rank 0 has another directory."""
        with ExitStack() as stack:
            if self.copies.keeps:
                with self._spared():
                    stack.enter_context(claimed(self.directory))
            yield

    @contextmanager
    def _spared(self) -> Generator[None, None, None]:
        """Note, and do not raise, an error in work that is only for a copy of the run.

        On other ranks errors are raised.

        Raises:
            ClaimedError: another run writes to the directory, which is a mistake in any case.
        """
        try:
            yield
        except (AllhandsError, OSError) as error:
            if not self.copies.keeps or isinstance(error, ClaimedError):
                raise
            self.copies.fail(
                storage_error_of(error, self.directory) if isinstance(error, OSError) else error
            )

    def plot(self) -> Path | None:
        """Draw the run's curves and memory, if this rank keeps files; return the curves' path.

        ``None`` if nothing was drawn; a failure is only a warning.
        """
        if not self.ready.keeps_files:
            return None
        from allhands.observe.plots import (
            plot_losses,
            plot_memory,
        )  # matplotlib, in memory only now

        with suppress(AllhandsError):  # the monitor has too few samples
            plot_memory(read_samples(self.directory), self.directory / MEMORY_FILE, private=True)
        try:
            return plot_losses(
                [read_metrics(self.directory)], self.directory / PLOT_FILE, private=True
            )
        except AllhandsError as error:  # the weights are saved: a picture is no reason to fail
            self.say([f"warning: the curves are not drawn ({error.where}: {error.message})"])
            return None

    @contextmanager
    def sinks(self) -> Generator[Sinks, None, None]:
        """Open the sinks for the run's events.

        Rank 0 shows progress; ranks that keep files write metrics; every rank keeps a log of its
        own lines, if it has a log file.
        """
        told = (self.ready.accelerator.warning, *self.ready.data.notes, *self.ready.notes)
        notes = [f"note: {note}" for note in told if note]
        sinks: list[Sink] = []
        short = self.surroundings.short_lines
        with ExitStack() as stack:
            log = _log_of(self.surroundings.log_file)
            if log is not None:
                stack.callback(_close_log, log)
                print(*notes, sep="\n", end="\n" if notes else "", file=log)
                sinks.append(
                    ConsoleSink(Console(file=log, width=200), is_terminal=False, short=short)
                )
            if self.ready.keeps_files:
                with self._spared():
                    notes += [f"note: {note}" for note in self.room()]
            newcomer = self.copies.keeps and not self.copies.trouble
            with self._spared():
                share_history(
                    self.ready.communicator,
                    self.directory,
                    self.ready.restored,
                    self.ready.run_id,
                    newcomer,
                )
            if self.ready.keeps_files:
                with self._spared():
                    sinks.append(JsonlSink(self.directory / METRICS_FILE))
            if self.surroundings.mesh.is_main and self.ready.config.train:
                names, values = (
                    tracker_names(self.ready.config.report_to),
                    self.ready.config.shared_values(),
                )
                sinks += start_trackers(
                    names, self.ready.config.project_name, self.directory, values
                )
            self.say(notes)
            if self.surroundings.console is not None:
                sinks.append(
                    ConsoleSink(
                        self.surroundings.console, profile=self.ready.config.profile, short=short
                    )
                )
            yield stack.enter_context(Sinks(sinks))

    def room(self) -> list[str]:
        """Move older files in the run's directory out of the way; return notes for the user."""
        return make_room(self.directory, self.ready.restored, self.ready.run_id)

    def say(self, lines: Sequence[str]) -> None:
        """Print ``lines`` where this rank has a console."""
        self.surroundings.say(*lines)


def _log_of(file: Path | None) -> TextIO | None:
    """Open the log for this rank's lines besides the console; ``None`` if it cannot be written:
    nothing depends on it.
    """
    if file is None:
        return None
    try:
        make_directory(file.parent, private=True)
        return open(file, "a", encoding="utf-8", opener=private_opener)
    except (AllhandsError, OSError):
        return None


def _close_log(log: TextIO) -> None:
    """Close the log and ignore errors: a full disk must not end the run or hide why it ends."""
    with suppress(OSError):
        log.close()
