"""Supervised jobs of ``allhands train`` and ``allhands launch``: from options to running ranks."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from allhands.checkpoints import find, quick_step
from allhands.cli.notices import Notices, say
from allhands.cluster.addresses import require_distinct
from allhands.cluster.candidates import facts_here, facts_of
from allhands.cluster.choose import choose, explain
from allhands.cluster.hosts import hostfile_backend, read_hostfile
from allhands.cluster.membership import HostfileMembers, LocalMembers, Members
from allhands.cluster.mpi import require_mpi
from allhands.cluster.newcomers import Trial
from allhands.cluster.ranks import ATTEST_VARIABLE, fair_share
from allhands.cluster.remote import newest_checkpoint
from allhands.cluster.supervisor import LaunchSpec, SuperviseOptions, supervise
from allhands.distributed.blame import LAUNCHER_VARIABLE, OPTION_VARIABLE
from allhands.errors import CheckpointError, ConfigError
from allhands.io.files import CLAIMED, claim_mark, claimed, set_aside, storage_error
from allhands.io.formatting import counted
from allhands.io.terminal import is_screen
from allhands.observe.journal import EVENTS_FILE, Journal
from allhands.runtime.blas import allowed_cores
from allhands.runtime.gpus import nvidia_gpus

RANKS_A_CORE = 8  # most ranks for each core, for trying many ranks on a small computer

Backend = Literal["ring", "mpi", "nccl", "jaccl"]


@dataclass(frozen=True)
class TrainingJob:
    """A job that a person wants to start and keep running.

    Attributes:
        directory: directory for ``events.jsonl``. The job claims it, and ``checkpoints`` too.
        log_dir: directory for the logs of the ranks.
        num_ranks: number of ranks; ``None``: one. With a hostfile the highest number; ``None``: all
            of its slots.
        min_ranks: least number of ranks with which the job goes on; ``None``: all.
        start_deadline_s: seconds until every rank must have started.
        stop_grace_s: seconds that ranks have to save and end after a stop.
        finish_grace_s: seconds that ranks have to end after the first rank has ended.
        weights: speeds of the ranks, if they were given.
        checkpoints: run directory with the job's checkpoints, the same on all computers; ``None``:
            the job has none.
        resume: run directory or checkpoint from which the job goes on until it has a checkpoint of
            its own.
        earlier: True if there are traces here of an earlier run in the directory, and this job is
            to go on from it.
        env: further environment variables of the ranks.
        there: the forms of ``directory`` and ``resume`` for other computers, if they differ.
        new_journal: True if ``events.jsonl`` of an earlier run is set aside; False: it is added to.
        memory_hint: remedy if a rank is killed because memory was short.
        resumes: True if the job goes on with ``--resume``, and rank 0 itself reports the end after
            a stop, as in ``allhands train``. A person's program goes on from what it finds.
        tag_output: True if the output of all ranks is shown, each line with its rank; ``None``: if
            there are several ranks, and ``tag_here`` is true or a rank is on another computer.
        tag_here: see ``tag_output``.
        keep_logs: True if other computers keep ``log_dir`` even if all goes well there.
        sync: command that copies the job's files to a computer without them; ``None``: there is
            none.
        compared: True if the ranks compare what they have loaded before they start; then newcomers
            can be tried out.
        codes: True if an error is shown with its code.
        expected_s: rough duration of the job in seconds; ``None``: not known.
        explain: called with lines that explain the chosen back-end.
    """

    directory: Path
    log_dir: Path
    num_ranks: int | None = None
    backend: Literal["auto", "ring", "mpi", "nccl", "jaccl"] = "auto"
    cores_per_rank: int | None = None
    hostfile: str | None = None
    min_ranks: int | None = None
    max_restarts: int = 0
    hang_timeout_s: float | None = None
    start_deadline_s: float = 300.0
    stop_grace_s: float = 60.0
    finish_grace_s: float = 60.0
    weights: tuple[float, ...] | None = None
    checkpoints: Path | None = None
    resume: Path | None = None
    earlier: bool = False
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    there: Mapping[Path, str] = field(default_factory=dict[Path, str])
    new_journal: bool = False
    memory_hint: str = "give each rank less to do at once, or start fewer with -n"
    resumes: bool = True
    tag_output: bool | None = None
    tag_here: bool = True
    keep_logs: bool = True
    sync: str | None = None
    compared: bool = False
    codes: bool = False
    expected_s: float | None = None
    explain: Callable[[list[str]], None] = lambda lines: None

    @property
    def size(self) -> int:
        """Number of ranks of the first start, if all computers take part."""
        if self.hostfile is None:
            return self.num_ranks or 1
        slots = sum(host.slots for host in read_hostfile(self.hostfile))
        return min(slots, self.num_ranks or slots)

    @property
    def tagged(self) -> bool:
        """Return whether the lines of all ranks are shown."""
        if self.tag_output is not None:
            return self.tag_output
        return self.size > 1 and (self.tag_here or self._leaves_here)

    def told(self, path: Path) -> str:
        """Return the form of ``path`` for other computers."""
        return self.there.get(path, str(path))

    @property
    def _leaves_here(self) -> bool:
        return self.hostfile is not None and any(
            host.ssh is not None for host in read_hostfile(self.hostfile)
        )


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
    if job.hostfile is None:
        _check_cores(job.cores_per_rank, size)
    else:
        require_distinct(read_hostfile(job.hostfile))
    if size > 1:
        _check_backend(job, size)


def require_cores(num_ranks: int) -> None:
    """Refuse more processes than this computer can run in reasonable time.

    Raises:
        ConfigError: there are more than :data:`RANKS_A_CORE` processes for each core.
    """
    cores = allowed_cores()
    if num_ranks > RANKS_A_CORE * cores:
        raise ConfigError(
            f"{num_ranks} processes on {cores} core{'s' * (cores > 1)}: they would only wait for each other",
            code="cores-too-few",
            where="-n",
            hint=f"-n {cores} gives each a core of its own; {RANKS_A_CORE * cores} at most are started here",
        )


def _check_cores(cores_per_rank: int | None, size: int) -> None:
    require_cores(size)
    cores = allowed_cores()
    if cores_per_rank and cores_per_rank * size > cores:
        raise ConfigError(
            f"{counted(size, 'rank')} with {counted(cores_per_rank, 'core')} each, of {counted(cores, 'core')} in all",
            code="cores-too-few",
            where="--cores-per-rank",
            hint="lower one of the two",
        )


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


def run(job: TrainingJob, command: Sequence[str]) -> int:
    """Start ``command`` on all ranks, supervise them, and return the exit code to use.

    Raises:
        ConfigError: see :func:`check`.
        DistributedError: the ranks could not be started.
        StorageError: the directory cannot be made, or another run has claimed it.
    """
    check(job)
    _tell_slots(job)
    _tell_cores(job)
    run_id = secrets.token_hex(8)
    notices = Notices(
        job.memory_hint,
        lambda: way_on(job, run_id),
        job.stop_grace_s,
        ranks_tell=job.resumes,
        tagged=job.tagged,
        places=job.hostfile is not None,
        sync=job.sync,
        codes=job.codes,
    )
    options = SuperviseOptions(
        job.max_restarts,
        job.min_ranks,
        run_id,
        resize=_resizer(job),
        try_out=Trial if job.compared else None,
    )
    try:
        with ExitStack() as claims:
            directories = dict.fromkeys((job.directory, job.checkpoints or job.directory))
            for directory in directories:
                claims.enter_context(claimed(directory))
            marks = " ".join(map(claim_mark, directories))
            journal = _journal(job)
            try:
                return supervise(
                    _spec(replace(job, env={**job.env, CLAIMED: marks}), command),
                    notices.show,
                    options=options,
                    members=_members(job, run_id),
                    journal=journal,
                )
            finally:
                journal.close()
    finally:
        if is_screen(sys.stdout):
            # A rank that was killed while it showed its progress has left the cursor hidden.
            print("\x1b[?25h", end="", flush=True)


def _tell_slots(job: TrainingJob) -> None:
    """Print a note if there are fewer slots than requested ranks; computers can be added later."""
    if job.hostfile is None or job.num_ranks is None or (slots := job.size) >= job.num_ranks:
        return
    count = f"{slots} slot{'s' * (slots != 1)}: {slots} rank{'s' * (slots != 1)} now"
    say(f"{job.hostfile} has {count}, up to {job.num_ranks} when computers are added to it")


def _tell_cores(job: TrainingJob) -> None:
    """Print a note if processes must take turns on CPU cores; a person may want to try many."""
    cores = allowed_cores()
    if job.hostfile is None and job.size > cores and not nvidia_gpus():
        turns = f"{job.size} processes on {cores} core{'s' * (cores > 1)} take turns"
        say(f"{turns}: with -n {cores} each has a core of its own")


def _journal(job: TrainingJob) -> Journal:
    """Return the journal for the supervisor's events; a new run sets that of an earlier run aside.

    Raises:
        StorageError: it cannot be renamed or written.
    """
    path = job.directory / EVENTS_FILE
    try:
        if job.new_journal:
            set_aside(path)
    except OSError as error:
        raise storage_error(path, error) from None
    return Journal(path)


def _spec(job: TrainingJob, command: Sequence[str]) -> LaunchSpec:
    return LaunchSpec(
        command,
        job.size,
        _choose_backend(job),
        job.log_dir,
        cores_per_rank=job.cores_per_rank,
        env={**_hosts_told(job), **job.env},
        start_deadline_s=job.start_deadline_s,
        stop_grace_s=job.stop_grace_s,
        finish_grace_s=job.finish_grace_s,
        hang_timeout_s=job.hang_timeout_s,
        weights=job.weights,
        tag_output=job.tagged,
        log_dir_there=_log_dir_there(job),
        keep_logs=job.keep_logs,
        examine=job.hostfile
        and shlex.join(["allhands", "cluster", "check", "--hostfile", job.hostfile]),
    )


def _hosts_told(job: TrainingJob) -> dict[str, str]:
    """Return environment variables with the person's option for the computers, and with the name of
    this computer.
    """
    if job.hostfile is None:
        return {}
    here = next((host.name for host in read_hostfile(job.hostfile) if host.ssh is None), "")
    told = {OPTION_VARIABLE: shlex.join(["--hostfile", job.hostfile])}
    told |= {ATTEST_VARIABLE: "1"} if job.compared else {}
    return {**told, LAUNCHER_VARIABLE: here} if here else told


def _log_dir_there(job: TrainingJob) -> str | None:
    """Return the log directory on other computers; ``None``: the path is the same there."""
    below = job.directory in job.there and job.log_dir.is_relative_to(job.directory)
    if below:
        return str(Path(job.told(job.directory)) / job.log_dir.relative_to(job.directory))
    return None


def _choose_backend(job: TrainingJob) -> Backend:
    if job.backend != "auto":
        return job.backend
    if job.hostfile is not None and (asked := hostfile_backend(job.hostfile)):
        return cast(Backend, asked)

    facts = facts_here(job.size)
    if job.hostfile is not None:
        facts = replace(facts_of(read_hostfile(job.hostfile), job.size, ask=True), by_agents=True)
    choice = choose(facts, training_s=job.expected_s, cores_per_rank=job.cores_per_rank)
    before = _backend_before(job)
    if any(one.possible and one.backend == before != choice.backend for one in choice.candidates):
        # Another back-end would sum three ranks or more in another order, and change the last bits.
        choice = replace(choice, backend=cast(Backend, before), reason="the resumed run used it")
    job.explain(explain(choice))
    return choice.backend


def _backend_before(job: TrainingJob) -> str | None:
    """Return the back-end of the resumed run, if it is known here."""
    if job.resume is None:
        return None
    try:
        return find(str(job.resume), job.resume, verify=False).state.get("backend")
    except CheckpointError:
        return None  # the ranks will report what is wrong with the checkpoint


def _resizer(job: TrainingJob) -> Callable[[LaunchSpec], LaunchSpec]:
    """Return a function that divides this computer's cores among its ranks before each start."""

    def resize(spec: LaunchSpec) -> LaunchSpec:
        if job.cores_per_rank or spec.places:
            return spec
        return replace(spec, cores_per_rank=fair_share(spec.num_processes))

    return resize


def _members(job: TrainingJob, run_id: str) -> Members:
    directory = job.checkpoints
    if job.hostfile is None:
        return LocalMembers(
            job.size, None if directory is None else lambda: _newest_step(job, run_id)
        )
    if directory is None:
        return HostfileMembers(job.hostfile, job.num_ranks)

    resume = None if job.resume is None else job.told(job.resume)
    return HostfileMembers(
        job.hostfile,
        job.num_ranks,
        checkpoints=lambda hosts: newest_checkpoint(hosts, job.told(directory), run_id, resume),
        earlier=job.earlier,
    )


def _newest_step(job: TrainingJob, run_id: str) -> int | None:
    own = step_in(job.checkpoints, run_id) if job.checkpoints else None
    return step_in(job.resume) if own is None and job.resume else own


def step_in(place: Path, run_id: str | None = None) -> int | None:
    """Return the newest step in a run directory, or the step of a checkpoint; ``None`` if there is
    none, or if it cannot be read, which the ranks will report.
    """
    try:
        return quick_step(place, run_id)
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
    if own is None and job.resume is not None and (earlier := step_in(job.resume)) is not None:
        return f"to go on from step {earlier}: the same command"
    where = "the last checkpoint, if there is one" if own is None else f"step {own}"
    if own is None and job.hostfile is None:
        return None
    return f"to go on from {where}: the same command{' with --resume' if job.resumes else ''}"
