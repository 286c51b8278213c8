"""The work of one rank in this process, and the end of the process."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from allhands.cluster.environment import LaunchPlace
from allhands.cluster.guard import TAG_VARIABLE, pin_cores
from allhands.cluster.job import LOG_DIRECTORY, job_of, way_on
from allhands.cluster.join import surroundings_of
from allhands.cluster.worker import WorkerContext, install
from allhands.errors import AllhandsError, Regroup
from allhands.io.terminal import print_line, progress_console, tell, tell_lost_words
from allhands.observe.journal import EVENTS_FILE, Journal, SupervisorEvent
from allhands.runtime.blas import available_cores, limit_cores, preload_blas
from allhands.runtime.jit_cache import publish
from allhands.runtime.without_torch import leave_torch_out

if TYPE_CHECKING:
    from rich.console import Console

    from allhands.config.schema import TrainConfig

_LOG_WIDTH = 200


def work(config: TrainConfig, launch: LaunchPlace) -> int:
    """Train as one rank: alone, or in the group of a launcher; return the exit code 0."""
    return as_rank(launch, partial(_train_as_rank, config, launch))


def as_rank(
    launch: LaunchPlace, work: Callable[[WorkerContext], None], unstarted: str | None = None
) -> int:
    """Do ``work`` as one rank of ``launch``, and end the process if there are others; return 0.

    Args:
        unstarted: message if the rank is stopped before it begins; ``None``: that of a training.
    """
    with install(launch, os.environ) as worker:
        worker.unstarted = unstarted or worker.unstarted
        work(worker)
        if launch.size > 1:
            _leave(launch)
    return 0


def prepare_rank(config: TrainConfig, launch: LaunchPlace) -> int | None:
    """Prepare this process for MLX, whose import fixes its BLAS threads and device: divide the
    computer's cores among its ranks, unless that is done already.

    Returns:
        The number of this rank's cores, if it is known.
    """
    if launch.launcher == "allhands" or os.environ.get("OPENBLAS_NUM_THREADS"):
        cores = int(os.environ.get("ALLHANDS_CORES", 0)) or config.cores_per_rank
    else:
        cores = config.cores_per_rank or max(1, available_cores() // launch.local_size)
        if cores < available_cores():
            pin_cores(launch.local_rank, cores)
            limit_cores(cores)
    preload_blas()
    return cores


@contextmanager
def collector_paused() -> Generator[None]:
    """Pause garbage collection during imports, of whose time it takes a tenth: they free no
    objects.
    """
    gc.disable()
    try:
        yield
    finally:
        # Later collections need not look at these objects again.
        gc.freeze()
        gc.enable()


def _leave(launch: LaunchPlace) -> None:
    """End a rank without errors at once, because Python's clean-up can hang if ranks end at
    different times.

    If another program has started MPI (mpirun, or srun with PMIx), the rank ends in the ordinary
    way: that program takes a rank without MPI's finalizer for a failure, and kills the other ranks.
    """
    publish(os.environ)
    logging.shutdown()
    tell_lost_words()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk with its log is full, but the work is done
            stream.flush()
    if launch.backend != "mpi" or launch.launcher == "allhands":
        os._exit(0)


def _stopped_at_once(config: TrainConfig, worker: WorkerContext) -> str | None:
    """Record that a run without a supervisor was stopped, not lost.

    Returns:
        Words on how to go on; ``None`` if there is no checkpoint.
    """
    code = 128 + worker.stop_requested()
    journal = Journal(Path(config.adapter_path) / EVENTS_FILE)
    journal.write(
        SupervisorEvent("finished", f"stopped (exit code {code})", exit_code=code), worker.attempt
    )
    journal.close()
    return way_on(job_of(config), None)


def _train_as_rank(config: TrainConfig, launch: LaunchPlace, worker: WorkerContext) -> None:
    worker.stop_grace_s = min(worker.stop_grace_s, config.stop_grace_s)
    cores = prepare_rank(config, launch)
    with collector_paused():
        leave_torch_out()
        from allhands.run.session import run_finetune

    # If the lines of all ranks are shown, they come from the logs. Then rank 0's console is in its
    # log, too.
    tagged = TAG_VARIABLE in os.environ
    console = _console(tagged) if launch.rank == 0 else None
    if console is not None:
        worker.announce_stops(
            partial(print_line, console), partial(_stopped_at_once, config, worker)
        )
    log_file = Path(config.adapter_path) / LOG_DIRECTORY / f"rank-{launch.rank}.log"

    surroundings = replace(
        surroundings_of(worker, launch, config),
        console=console,
        cores_per_rank=cores,
        log_file=None if console is not None and tagged else log_file,
        short_lines=tagged,
    )
    try:
        result = run_finetune(config, surroundings)
    except Regroup:
        worker.end_for_regroup()
    if launch.rank == 0 and config.train:
        where = [str(result.adapter_path)] + ([f"curves in {result.plot}"] if result.plot else [])
        print(f"saved in {', '.join(where)}", flush=True)
        tell_troubles(Path(config.adapter_path))


def tell_troubles(directory: Path) -> None:
    """Print warnings if training has made the model worse; its other output does not show it."""
    # A supervisor does not need these imports, and starts sooner without them.
    from allhands.observe.judging import harm
    from allhands.observe.metrics.history import read_metrics

    with suppress(AllhandsError, OSError):
        for one in harm(read_metrics(directory)):
            tell(f"allhands: warning: {one.text}")


def _console(tagged: bool) -> Console:
    """Return the console for progress."""
    if tagged:
        from rich.console import Console

        return Console(highlight=False, force_terminal=False, width=_LOG_WIDTH)
    return progress_console(sys.stdout, highlight=False)
