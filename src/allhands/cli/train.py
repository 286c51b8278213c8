"""``allhands train``: one process, several local ones, or a rank of another launcher."""

from __future__ import annotations

import gc
import logging
import os
import shlex
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allhands.checkpoints import find, find_latest, run_name
from allhands.checkpoints.place import require_place_of_run
from allhands.cli.launching import TrainingJob, check, run, way_on
from allhands.cluster.choose import slower_than_ours
from allhands.cluster.environment import LaunchPlace, recognise_here
from allhands.cluster.guard import TAG_VARIABLE, pin_cores
from allhands.cluster.hosts import read_hostfile, write_hosts
from allhands.cluster.join import surroundings_of
from allhands.cluster.supervisor import SupervisorEvent
from allhands.cluster.worker import SPEAK_AFTER_S, WorkerContext, install
from allhands.config.combinations import require_stages
from allhands.config.schema import TrainConfig, build_config
from allhands.distributed.mesh import check_weights
from allhands.errors import AllhandsError, ConfigError, Regroup
from allhands.io.paths import written
from allhands.io.terminal import print_line, progress_console, tell, tell_lost_words
from allhands.model.divisible import require_divisible
from allhands.observe.journal import EVENTS_FILE, Journal, read_events
from allhands.runtime import faults
from allhands.runtime.blas import available_cores, limit_cores, preload_blas
from allhands.runtime.jit_cache import publish
from allhands.runtime.without_torch import leave_torch_out

if TYPE_CHECKING:
    from rich.console import Console

LOG_DIRECTORY = "logs"
HOSTS_FILE = "hosts.txt"
# Enough restarts for a run to go on without its user, and few enough to show an error soon.
RESTARTS_OF_SEVERAL = 3
# Seconds for a rank that still closes trackers and draws curves after the others have ended.
_FINISH_GRACE_S = 600.0
_LOG_WIDTH = 200
# Hints for launchers, which decide the number of ranks themselves.
_LAUNCHED_WITH = {
    "slurm": "leave -n out under another launcher: srun -n {} starts as many",
    "openmpi": "leave -n out under another launcher: mpirun -np {} starts as many",
}
_SHORT_OF_MEMORY = "add --grad-checkpoint or lower --max-seq-length"


def train(flags: dict[str, Any], kind: type[TrainConfig] = TrainConfig) -> int:
    """Run the training that ``flags`` and their YAML file describe; return the exit code.

    Args:
        kind: class of the options.

    Raises:
        AllhandsError: an option is invalid, or the training failed in this process.
    """
    launch = recognise_here()
    alone = launch.launcher == "single"
    with rank_0_speaks_first(launch):
        config = _config_of(flags, kind)
        require_place_of_run(config)
        check_launch(config, launch)
        if alone:
            config = with_hostfile(config, Path(config.adapter_path))
        _check_rehearsal(config, launch)
    if not alone:
        if launch.rank == 0 and (
            note := slower_than_ours(launch, f"-n {launch.size} in its place")
        ):
            print(f"allhands: note: {note}", file=sys.stderr)
        return work(config, launch)
    for note in launch.notes:
        tell(f"allhands: note: {note}")
    _check_resume(config)
    if config.num_ranks > 1 or config.hostfile or config.max_restarts:
        code = supervise_training(config, [sys.executable, "-m", "allhands", *sys.argv[1:]])
    else:
        if config.cores_per_rank:
            check(job_of(config))
        code = work(config, launch)
    # Each computer notes its own injected faults.
    if not config.hostfile and (line := faults.outstanding()):
        tell(f"allhands: {line}")
    return code


def _config_of(flags: dict[str, Any], kind: type[TrainConfig]) -> TrainConfig:
    """Build the configuration; it trains by default unless it asks for a test.

    Raises:
        ConfigError: the configuration is invalid, or there is nothing to do.
    """
    config = build_config(flags, flags.get("config"), kind)
    if config.train or config.test:
        return config
    if "train" in config.model_fields_set:
        raise ConfigError(
            "there is nothing to do",
            code="nothing-to-do",
            where="--no-train",
            hint="leave it out to train, or add --test to evaluate what was trained",
        )
    return config.model_copy(update={"train": True})  # the default of this command


@contextmanager
def rank_0_speaks_first(launch: LaunchPlace) -> Generator[None]:
    """Delay an error of another rank, because rank 0 usually has the same error and prints it."""
    try:
        yield
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
    if not (config.hostfile or config.hosts):
        check_weights(
            config.given_weights, config.num_ranks if launch.launcher == "single" else launch.size
        )
    if launch.launcher == "single":
        return
    if config.num_ranks not in (1, launch.size):
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
    num_ranks = launch.size if launch.launcher != "single" else config.num_ranks
    if config.hostfile and config.num_ranks == 1:
        num_ranks = sum(host.slots for host in read_hostfile(config.hostfile))
    steps = None if config.iters is None else -(-config.iters // config.grad_accumulation_steps)
    faults.check(num_ranks, steps)
    if launch.rank == 0 and (line := faults.already_fired()):
        tell(f"allhands: {line}")


def with_hostfile(config: TrainConfig, directory: Path) -> TrainConfig:
    """Return the configuration with a hostfile in ``directory`` in place of ``--hosts``, if given.

    Raises:
        ConfigError: the names of the hosts are not understood.
        StorageError: the file cannot be written.
    """
    if config.hosts is None:
        return config
    path = write_hosts(config.hosts, directory / HOSTS_FILE)
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


def supervise_training(config: TrainConfig, command: list[str]) -> int:
    """Start the processes of ``command``, here or on the computers of a hostfile, and supervise
    them; return the exit code.

    Raises:
        AllhandsError: the options do not fit, or the processes cannot be started.
    """
    job = job_of(config)
    if job.size > 1 or config.min_ranks != 1:  # one rank may go on with the whole model
        require_stages(config, job.size)
        require_divisible(config, job.size)
    return run(job, command)


def job_of(config: TrainConfig) -> TrainingJob:
    """Return the job that ``config`` describes."""
    directory = Path(config.adapter_path)
    # One rank is the default. With a hostfile, 1 therefore means that no number was given.
    num_ranks = None if config.hostfile and config.num_ranks == 1 else config.num_ranks
    resume = Path(config.resume) if config.resume and config.resume != "auto" else None
    same = (
        "backend",
        "cores_per_rank",
        "hostfile",
        "min_ranks",
        "hang_timeout_s",
        "stop_grace_s",
        "tag_output",
    )
    options: dict[str, Any] = {name: getattr(config, name) for name in same}
    return TrainingJob(
        directory=directory,
        log_dir=directory / LOG_DIRECTORY,
        num_ranks=num_ranks,
        max_restarts=_restarts(config),
        start_deadline_s=config.start_timeout_s,
        weights=tuple(config.given_weights) if config.given_weights else None,
        finish_grace_s=_FINISH_GRACE_S,
        checkpoints=directory,
        new_journal=config.resume is None,
        resume=directory if config.resume == "auto" else resume,
        there=_paths_there(config),
        earlier=config.resume == "auto" and _has_begun(directory),
        memory_hint=_SHORT_OF_MEMORY,
        tag_here=False,
        sync=_sync_command(config),
        compared=config.hostfile is not None,
        codes=config.log_level == "verbose",
        # A rough guess: one second for each batch.
        expected_s=float(config.iters or 1000),
        explain=lambda lines: (
            print(*lines, sep="\n", file=sys.stderr) if config.log_level == "verbose" else None
        ),
        **options,
    )


def _restarts(config: TrainConfig) -> int:
    if config.max_restarts is not None:
        return config.max_restarts
    # Without checkpoints there is nothing to go on from.
    several = (config.num_ranks > 1 or config.hostfile is not None) and config.keep_last > 0
    return RESTARTS_OF_SEVERAL if several else 0


def _paths_there(config: TrainConfig) -> dict[Path, str]:
    """Return the paths that were given with ``~``, each with its form for other computers."""
    given = (config.adapter_path, config.resume)
    return {
        Path(path): written(path) for path in given if path is not None and written(path) != path
    }


def _sync_command(config: TrainConfig) -> str | None:
    """Return the command that copies the local model and data to the computers of the hostfile;
    ``None`` if there is no hostfile, or nothing to copy.
    """
    if config.hostfile is None:
        return None
    found = {"--model": config.model, "--data": config.data}
    words = [
        word
        for flag, path in found.items()
        if Path(path).exists()
        for word in (flag, written(path))
    ]
    if words:
        return shlex.join(["allhands", "cluster", "sync", "--hostfile", config.hostfile, *words])
    return None


def _has_begun(directory: Path) -> bool:
    """True if ranks have been started for this directory before, here or on other computers."""
    return run_name(directory) is not None or any(
        event["kind"] == "started" for event in read_events(directory)
    )


def work(config: TrainConfig, launch: LaunchPlace) -> int:
    """Train as one rank: alone, or in the group of a launcher; return the exit code 0."""
    with install(launch, os.environ) as worker:
        worker.stop_grace_s = min(worker.stop_grace_s, config.stop_grace_s)
        try:
            _train_as_rank(config, launch, worker)
        except Regroup:
            worker.end_for_regroup()
        if launch.size > 1:
            leave(launch)
    return 0


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


def leave(launch: LaunchPlace) -> None:
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
    cores = share_cores(config, launch)
    # Only now, because importing MLX fixes its BLAS threads and device.
    preload_blas()
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
    result = run_finetune(config, surroundings)
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


def share_cores(config: TrainConfig, launch: LaunchPlace) -> int | None:
    """Divide this host's cores among its ranks, unless that is done already; return the number of
    this rank's cores, if it is known.
    """
    if launch.launcher == "allhands" or os.environ.get("OPENBLAS_NUM_THREADS"):
        return int(os.environ.get("ALLHANDS_CORES", 0)) or config.cores_per_rank
    cores = config.cores_per_rank or max(1, available_cores() // launch.local_size)
    if cores < available_cores():
        pin_cores(launch.local_rank, cores)
        limit_cores(cores)
    return cores
