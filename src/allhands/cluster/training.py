"""Trainings as jobs: their options are checked, and they are started here, on the computers of a
hostfile, or as one rank of another launcher.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from allhands.checkpoints import find, find_latest
from allhands.checkpoints.place import require_place_of_run
from allhands.cluster.choose import slower_than_ours
from allhands.cluster.environment import LaunchPlace
from allhands.cluster.hosts import read_hostfile, write_hosts
from allhands.cluster.job import TrainingJob, check, job_of
from allhands.cluster.launching import run
from allhands.cluster.notices import say
from allhands.cluster.rank import work
from allhands.cluster.worker import SPEAK_AFTER_S
from allhands.config.combinations import require_stages
from allhands.distributed.mesh import check_weights
from allhands.errors import AllhandsError, ConfigError
from allhands.model.divisible import require_divisible
from allhands.runtime import faults

if TYPE_CHECKING:
    from allhands.config.schema import TrainConfig

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
