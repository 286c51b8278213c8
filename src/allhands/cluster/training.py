"""Trainings as jobs: their options are checked, and they are started here, on the computers of a
hostfile, or as one rank of another launcher.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from allhands.checkpoints import find, find_latest
from allhands.checkpoints.place import require_place_of_run
from allhands.cluster.choose import slower_than_ours
from allhands.cluster.environment import LaunchPlace, recognise_here
from allhands.cluster.guard import TAG_VARIABLE, pin_cores
from allhands.cluster.hosts import read_hostfile, write_hosts
from allhands.cluster.job import LOG_DIRECTORY, TrainingJob, check, job_of, way_on
from allhands.cluster.join import surroundings_of
from allhands.cluster.launching import run
from allhands.cluster.worker import SPEAK_AFTER_S, WorkerContext, install
from allhands.config.combinations import require_stages
from allhands.distributed.mesh import check_weights
from allhands.errors import AllhandsError, ConfigError, Regroup
from allhands.io.terminal import print_line, progress_console, say, tell, tell_lost_words
from allhands.model.divisible import require_divisible
from allhands.observe.journal import EVENTS_FILE, Journal, SupervisorEvent
from allhands.runtime import faults
from allhands.runtime.blas import available_cores, limit_cores, preload_blas
from allhands.runtime.jit_cache import publish
from allhands.runtime.libraries import leave_torch_out

if TYPE_CHECKING:
    from rich.console import Console

    from allhands.config.schema import TrainConfig

_LOG_WIDTH = 200
# Hints for launchers, which decide the number of ranks themselves.
_LAUNCHED_WITH = {
    "slurm": "leave -n out under another launcher: srun -n {} starts as many",
    "openmpi": "leave -n out under another launcher: mpirun -np {} starts as many",
}


def checked(config: TrainConfig, launch: LaunchPlace) -> TrainConfig:
    """Check a training before anything is started; return it with a hostfile in place of ``--hosts``.

    Raises:
        ConfigError: an option cannot work here.
        StorageError: the run's directory is taken, or the hostfile cannot be written.
    """
    require_place_of_run(config)
    check_launch(config, launch)
    if launch.launcher == "single":
        config = with_hostfile(config, Path(config.adapter_path))
    _check_rehearsal(config, launch)
    return config


def start(config: TrainConfig, launch: LaunchPlace) -> int:
    """Train in this process, or start several and supervise them; return the exit code.

    Raises:
        AllhandsError: the processes cannot be started, or the training failed in this process.
    """
    if launch.launcher != "single":
        if launch.rank == 0 and (
            note := slower_than_ours(launch, f"-n {launch.size} in its place")
        ):
            print(f"allhands: note: {note}", file=sys.stderr)
        return work(config, launch)
    for note in launch.notes:
        say(f"note: {note}")
    _check_resume(config)
    if config.num_ranks > 1 or config.hostfile or config.max_restarts:
        code = supervise_training(config)
    else:
        if config.cores_per_rank:
            check(job_of(config))
        code = work(config, launch)
    # Each computer notes its own injected faults.
    if not config.hostfile and (line := faults.outstanding()):
        say(line)
    return code


@contextmanager
def recognised() -> Generator[LaunchPlace]:
    """Yield how this process was launched; delay an error of another rank in the block, because rank
    0 usually has the same error and prints it.

    Raises:
        DistributedError: the launcher's variables are wrong.
    """
    launch = recognise_here()
    try:
        yield launch
    except AllhandsError:
        if launch.rank > 0:
            time.sleep(SPEAK_AFTER_S)
        raise


def check_launch(config: TrainConfig, launch: LaunchPlace) -> None:
    """Refuse options that contradict the number of ranks or another launcher.

    Raises:
        ConfigError: an option contradicts them.
    """
    if launch.launcher == "allhands":
        return  # after a fault the job may have fewer ranks than requested
    alone = launch.launcher == "single"
    if not (config.hostfile or config.hosts):
        check_weights(config.given_weights, config.num_ranks if alone else launch.size)
    if not alone and config.num_ranks not in (1, launch.size):
        raise ConfigError(
            f"{config.num_ranks} processes are asked for, but {launch.launcher} has started {launch.size}",
            code="launcher-conflict",
            where="-n",
            hint=_LAUNCHED_WITH.get(launch.launcher, "leave -n out under another launcher").format(
                config.num_ranks
            ),
        )
    if launch.size > 1 and config.backend not in ("auto", launch.backend):
        raise ConfigError(
            f"{launch.launcher} has started a group over {launch.backend}",
            code="launcher-conflict",
            where=f"--backend {config.backend}",
            hint="leave --backend out under another launcher",
        )


def _check_rehearsal(config: TrainConfig, launch: LaunchPlace) -> None:
    """Refuse injected faults that cannot happen in this run, and print a note on faults that will
    not happen again.

    Raises:
        ConfigError: see :func:`allhands.runtime.faults.check`.
    """
    if not faults.active() or launch.launcher == "allhands":
        return  # the run may have fewer ranks than at the first start
    num_ranks = max(config.num_ranks, launch.size)
    if config.hostfile and config.num_ranks == 1:
        num_ranks = sum(host.slots for host in read_hostfile(config.hostfile))
    steps = None if config.iters is None else -(-config.iters // config.grad_accumulation_steps)
    faults.check(num_ranks, steps)
    if launch.rank == 0 and (line := faults.already_fired()):
        say(line)


def with_hostfile(config: TrainConfig, directory: Path) -> TrainConfig:
    """Return the configuration with a hostfile in ``directory`` in place of ``--hosts``, if given.

    Raises:
        ConfigError: the names of the hosts are not understood.
        StorageError: the file cannot be written.
    """
    if config.hosts is None:
        return config
    path = write_hosts(config.hosts, directory / "hosts.txt")
    return config.model_copy(update={"hosts": None, "hostfile": str(path)})


def _check_resume(config: TrainConfig) -> None:
    """Check the checkpoint to resume from before anything is started.

    Only names and sizes are checked, which takes milliseconds; the ranks compare the checksums.
    With a hostfile nothing is checked, because the checkpoint may be on another computer.

    Raises:
        CheckpointError: the checkpoint to resume from is missing or damaged.
    """
    if not config.train or config.resume is None or config.hostfile is not None:
        return

    directory = Path(config.adapter_path)
    if config.resume == "auto":
        find_latest(directory, verify=False)
    else:
        find(config.resume, directory, verify=False)


def supervise_training(
    config: TrainConfig, command: list[str] | None = None, job: TrainingJob | None = None
) -> int:
    """Start processes, here or on the computers of a hostfile, and supervise them; return the exit
    code.

    Args:
        command: command of each process; ``None``: that of this process.
        job: the job; ``None``: as ``config`` describes it.

    Raises:
        AllhandsError: the options do not fit, or the processes cannot be started.
    """
    job = job or job_of(config)
    if job.size > 1 or config.min_ranks != 1:  # one rank may go on with the whole model
        require_stages(config, job.size)
        require_divisible(config, job.size)
    return run(job, command or [sys.executable, "-m", "allhands", *sys.argv[1:]])


# --- one rank ------------------------------------------------------------------------------------


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
