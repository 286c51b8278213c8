"""Supervised jobs of ``allhands train`` and ``allhands launch``: their options, checked."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from allhands.checkpoints import quick_step, run_name
from allhands.cluster.addresses import require_distinct
from allhands.cluster.hosts import Backend, Host, hostfile_backend, read_hostfile
from allhands.cluster.mpi import require_mpi
from allhands.cluster.ranks import RankSettings, require_cores
from allhands.errors import CheckpointError, ConfigError
from allhands.io.formatting import counted
from allhands.io.paths import written
from allhands.observe.journal import read_events
from allhands.runtime.blas import allowed_cores
from allhands.runtime.gpus import nvidia_gpus

if TYPE_CHECKING:
    from allhands.config.schema import TrainConfig

LOG_DIRECTORY = "logs"
# Enough restarts for a run to go on without its user, and few enough to show an error soon.
RESTARTS_OF_SEVERAL = 3
# Seconds for a rank that still closes trackers and draws curves after the others have ended.
_FINISH_GRACE_S = 600.0
_SHORT_OF_MEMORY = "add --grad-checkpoint or lower --max-seq-length"


@dataclass(frozen=True)
class TrainingJob(RankSettings):
    """A job that a person wants to start and keep running.

    Attributes:
        directory: directory for ``events.jsonl``. The job claims it, and ``checkpoints`` too.
        log_dir: directory for the logs of the ranks.
        num_ranks: number of ranks; ``None``: one. With a hostfile the highest number; ``None``: all
            of its slots.
        min_ranks: least number of ranks with which the job goes on; ``None``: all.
        checkpoints: run directory with the job's checkpoints, the same on all computers; ``None``:
            the job has none.
        resume: run directory or checkpoint from which the job goes on until it has a checkpoint of
            its own.
        earlier: True if there are traces here of an earlier run in the directory, and this job is
            to go on from it.
        there: the forms of ``directory`` and ``resume`` for other computers, if they differ.
        new_journal: True if ``events.jsonl`` of an earlier run is set aside; False: it is added to.
        memory_hint: remedy if a rank is killed because memory was short.
        resumes: True if the job goes on with ``--resume``, and rank 0 itself reports the end after
            a stop, as in ``allhands train``. A person's program goes on from what it finds.
        tag_output: True if the output of all ranks is shown, each line with its rank; ``None``: if
            there are several ranks, for a person's program or with a rank on another computer.
        sync: command that copies the job's files to a computer without them; ``None``: there is
            none.
        compared: True if the ranks compare what they have loaded before they start; then newcomers
            can be tried out.
        verbose: True if an error is shown with its code, and the chosen back-end is explained.
        expected_s: rough duration of the job in seconds; ``None``: not known.
    """

    directory: Path
    log_dir: Path
    num_ranks: int | None = None
    backend: Backend | Literal["auto"] = "auto"
    hostfile: str | None = None
    min_ranks: int | None = None
    max_restarts: int = 0
    checkpoints: Path | None = None
    resume: Path | None = None
    earlier: bool = False
    there: Mapping[Path, str] = field(default_factory=dict[Path, str])
    new_journal: bool = False
    memory_hint: str = "give each rank less to do at once, or start fewer with -n"
    resumes: bool = True
    tag_output: bool | None = None
    sync: str | None = None
    compared: bool = False
    verbose: bool = False
    expected_s: float | None = None

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The computers of the hostfile; empty if there is none."""
        return () if self.hostfile is None else read_hostfile(self.hostfile)

    @property
    def size(self) -> int:
        """Number of ranks of the first start, if all computers take part."""
        slots = sum(host.slots for host in self.hosts)
        return min(slots, self.num_ranks or slots) if slots else self.num_ranks or 1

    @property
    def tagged(self) -> bool:
        """True if the lines of all ranks are shown."""
        if self.tag_output is not None:
            return self.tag_output
        leaves_here = any(host.ssh is not None for host in self.hosts)
        return self.size > 1 and (leaves_here or not self.resumes)

    def told(self, path: Path) -> str:
        """Return the form of ``path`` for other computers."""
        return self.there.get(path, str(path))


def check(job: TrainingJob) -> None:
    """Check a job before it is started, because otherwise every rank would print the same error.

    Raises:
        ConfigError: an option cannot work, alone or with others.
        DistributedError: there is no usable Open MPI.
    """
    size = job.size
    if job.min_ranks is not None and job.min_ranks > size:
        raise ConfigError(
            f"at least {job.min_ranks} ranks are asked for, of {counted(size, 'rank')} in all",
            code="value-out-of-range",
            where="--min-ranks",
            hint="lower it, or give more ranks with -n or in the hostfile",
        )
    if hosts := job.hosts:
        require_distinct(hosts)
    else:
        require_cores(size)
        cores = allowed_cores()
        if job.cores_per_rank and job.cores_per_rank * size > cores:
            raise ConfigError(
                f"{counted(size, 'rank')} with {counted(job.cores_per_rank, 'core')} each, "
                f"of {counted(cores, 'core')} in all",
                code="cores-too-few",
                where="--cores-per-rank",
                hint="lower one of the two",
            )
    if size > 1:
        _check_backend(job, size)


def _check_backend(job: TrainingJob, size: int) -> None:
    if job.hostfile is not None:
        asked = hostfile_backend(job.hostfile) if job.backend == "auto" else job.backend
        if asked not in (None, "ring", "nccl", "jaccl"):
            raise ConfigError(
                f"{asked} cannot be started on the computers of a hostfile",
                code="backend-needs-one-computer",
                where=f"--backend {asked}" if job.backend != "auto" else job.hostfile,
                hint="use --backend ring, or nccl where every rank has a GPU",
            )
    elif job.backend == "jaccl":
        raise ConfigError(
            "JACCL joins several Macs with RDMA over Thunderbolt",
            code="backend-needs-hostfile",
            where="--backend jaccl",
            hint="name them with --hostfile, as mlx.distributed_config writes it",
        )
    elif job.backend == "mpi":
        require_mpi()
    elif job.backend == "nccl" and (gpus := nvidia_gpus()) < size:
        raise ConfigError(
            f"NCCL needs one NVIDIA GPU for each process: {gpus} for {size} processes",
            code="gpus-too-few",
            where="--backend nccl",
            hint="leave --backend out, or give --backend ring"
            + (f" or -n {gpus}" if gpus > 1 else ""),
        )


def job_of(config: TrainConfig) -> TrainingJob:
    """Return the job that ``config`` describes."""
    directory, auto = Path(config.adapter_path), config.resume == "auto"
    # One rank is the default. With a hostfile, 1 therefore means that no number was given.
    num_ranks = None if config.hostfile and config.num_ranks == 1 else config.num_ranks
    several = config.num_ranks > 1 or config.hostfile is not None
    # Without checkpoints there is nothing to go on from.
    restarts = RESTARTS_OF_SEVERAL * (several and config.keep_last > 0)
    resume = None if not config.resume else directory if auto else Path(config.resume)
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
        max_restarts=restarts if config.max_restarts is None else config.max_restarts,
        start_deadline_s=config.start_timeout_s,
        weights=tuple(config.given_weights) if config.given_weights else None,
        finish_grace_s=_FINISH_GRACE_S,
        checkpoints=directory,
        new_journal=config.resume is None,
        resume=resume,
        there=_paths_there(config),
        earlier=auto and _has_begun(directory),
        memory_hint=_SHORT_OF_MEMORY,
        sync=_sync_command(config),
        compared=config.hostfile is not None,
        verbose=config.log_level == "verbose",
        # A rough guess: one second for each batch.
        expected_s=float(config.iters or 1000),
        **options,
    )


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


def step_in(place: Path | None, run_id: str | None = None) -> int | None:
    """Return the newest step in a run directory, or the step of a checkpoint; ``None`` if there is
    none, or if it cannot be read, which the ranks will report.
    """
    try:
        return None if place is None else quick_step(place, run_id)
    except CheckpointError:
        return None


def way_on(job: TrainingJob, run_id: str | None) -> str | None:
    """Return words on how to go on with a job that has ended too early; ``None``: there is no
    checkpoint.

    Args:
        run_id: identifier of this run; ``None``: not known, so any checkpoint in the directory
            counts.
    """
    if job.checkpoints is None:
        return None
    # A person's program takes any checkpoint that it finds.
    own = step_in(job.checkpoints, run_id if job.resumes else None)
    if own is None and (earlier := step_in(job.resume)) is not None:
        return f"to go on from step {earlier}: the same command"
    where = "the last checkpoint, if there is one" if own is None else f"step {own}"
    if own is None and job.hostfile is None:
        return None
    return f"to go on from {where}: the same command{' with --resume' if job.resumes else ''}"
