"""What ``allhands train`` and ``allhands launch`` share: from options to supervised ranks, and what is told of them."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from allhands.cluster.hosts import hostfile_backend, read_hostfile
from allhands.cluster.journal import EVENTS_FILE, Journal
from allhands.cluster.membership import HostfileMembers, LocalMembers, Members
from allhands.cluster.mpi import require_mpi, usable_mpi
from allhands.cluster.supervisor import LaunchSpec, SuperviseOptions, SupervisorEvent, supervise
from allhands.errors import ConfigError
from allhands.files import CLAIMED, claim_mark, claimed, set_aside, storage_error

Backend = Literal["ring", "mpi", "nccl"]


@dataclass(frozen=True)
class Job:
    """What a person wants to have started and kept going.

    Attributes:
        directory: gets ``events.jsonl``; claimed, as ``checkpoints`` is, for the time of the job.
        num_ranks: with a hostfile the most ranks, ``None``: all its slots; without one ``None`` is one.
        min_ranks: go on with no fewer; ``None``: all.
        checkpoints: a run directory with the job's checkpoints, if it has any, the same on all computers.
        resume: the run directory or checkpoint from which the job goes on until it has one of its own.
        new_journal: whether ``events.jsonl`` of an earlier run is set aside, not added to.
        memory_hint: what to do if a rank is killed for want of memory.
    """

    directory: Path
    log_dir: Path
    num_ranks: int | None = None
    backend: Literal["auto", "ring", "mpi", "nccl"] = "auto"
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
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    new_journal: bool = False
    memory_hint: str = "give each rank less to do at once, or start fewer with -n"

    @property
    def size(self) -> int:
        """The ranks of the first start, if everybody takes part."""
        if self.hostfile is None:
            return self.num_ranks or 1
        slots = sum(host.slots for host in read_hostfile(self.hostfile))
        return min(slots, self.num_ranks or slots)


def check(job: Job) -> None:
    """Find in the launcher, once, what every rank would find: cheaper and clearer than N messages.

    Raises:
        ConfigError: an option cannot work, on its own or with the others.
        DistributedError: there is no usable Open MPI.
    """
    size = job.size
    if job.min_ranks is not None and job.min_ranks > size:
        raise ConfigError(
            f"at least {job.min_ranks} ranks are asked for, but there are {size}",
            where="--min-ranks",
            hint="lower it, or give more ranks with -n or in the hostfile",
        )
    if job.hostfile is None:
        _check_cores(job.cores_per_rank, size)
    if size > 1:
        _check_backend(job, size)


def _check_cores(cores_per_rank: int | None, size: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores_per_rank and cores_per_rank * size > cores:
        raise ConfigError(
            f"{size} ranks with {cores_per_rank} cores each, but there are {cores} cores",
            where="--cores-per-rank",
            hint="lower one of the two",
        )


def _check_backend(job: Job, size: int) -> None:
    from allhands.accelerator import nvidia_gpus

    if job.hostfile is not None:
        asked = hostfile_backend(job.hostfile) if job.backend == "auto" else job.backend
        if asked not in (None, "ring", "nccl"):
            raise ConfigError(
                f"{asked} cannot be started on the computers of a hostfile",
                where=f"--backend {asked}" if job.backend != "auto" else job.hostfile,
                hint="use --backend ring, or nccl where every rank has a GPU",
            )
    elif job.backend == "mpi":
        require_mpi()
    elif job.backend == "nccl" and (gpus := nvidia_gpus()) < size:
        raise ConfigError(
            f"NCCL needs an NVIDIA GPU a process: {gpus} for {size} processes",
            where="--backend nccl",
            hint="leave --backend out, or give --backend ring" + (f" or -n {gpus}" if gpus > 1 else ""),
        )


def run(job: Job, command: Sequence[str]) -> int:
    """Start the ranks of ``command``, keep them going, and return the exit code to use.

    Raises:
        ConfigError: see :func:`check`.
        DistributedError: the ranks could not be started.
        StorageError: the directory cannot be had.
    """
    check(job)
    run_id = secrets.token_hex(8)
    options = SuperviseOptions(job.max_restarts, job.min_ranks, run_id, resize=_resizer(job))
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
                    lambda event: show_event(event, job.memory_hint),
                    options=options,
                    members=_members(job, run_id),
                    journal=journal,
                )
            finally:
                journal.close()
    finally:
        if sys.stdout.isatty():
            # A rank that was killed while it showed its progress has left the cursor hidden.
            print("\x1b[?25h", end="", flush=True)


def _journal(job: Job) -> Journal:
    """The record of what the supervisor sees; a new run sets an earlier one's aside."""
    path = job.directory / EVENTS_FILE
    try:
        if job.new_journal:
            set_aside(path)
    except OSError as error:
        raise storage_error(path, error) from None
    return Journal(path)


def _spec(job: Job, command: Sequence[str]) -> LaunchSpec:
    return LaunchSpec(
        command,
        job.size,
        _choose_backend(job),
        job.log_dir,
        cores_per_rank=job.cores_per_rank,
        env=job.env,
        start_deadline_s=job.start_deadline_s,
        stop_grace_s=job.stop_grace_s,
        finish_grace_s=job.finish_grace_s,
        hang_timeout_s=job.hang_timeout_s,
        weights=job.weights,
    )


def _choose_backend(job: Job) -> Backend:
    if job.backend != "auto":
        return job.backend
    if job.hostfile is not None:
        # The person's own choice among those that work; without one the back-end that needs nothing.
        return cast(Backend, hostfile_backend(job.hostfile) or "ring")
    from allhands.accelerator import default_backend

    chosen = default_backend(job.size, usable_mpi())
    # One supervised process joins nothing; the ring's way of starting it is the plainest.
    return "ring" if chosen == "none" else chosen


def _resizer(job: Job) -> Callable[[LaunchSpec], LaunchSpec]:
    """Before each start: this computer's cores divided among the ranks that it has then."""

    def resize(spec: LaunchSpec) -> LaunchSpec:
        if job.cores_per_rank or spec.places:
            return spec
        return replace(spec, cores_per_rank=_fair_share(spec.num_processes))

    return resize


def _fair_share(num_ranks: int) -> int | None:
    """Cores of each local process when the person has not said: all of them, divided."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def _members(job: Job, run_id: str) -> Members:
    directory = job.checkpoints
    if job.hostfile is None:
        return LocalMembers(job.size, None if directory is None else lambda: _newest_step(job, run_id))
    if directory is None:
        return HostfileMembers(job.hostfile, job.num_ranks)
    from allhands.cluster.remote import newest_checkpoint

    return HostfileMembers(
        job.hostfile, job.num_ranks, checkpoints=lambda hosts: newest_checkpoint(hosts, directory, run_id, job.resume)
    )


def _newest_step(job: Job, run_id: str) -> int | None:
    from allhands.checkpoints import quick_step
    from allhands.errors import CheckpointError

    try:
        own = quick_step(job.checkpoints, run_id) if job.checkpoints else None
        return quick_step(job.resume.expanduser()) if own is None and job.resume else own
    except CheckpointError:
        return None  # for a message only: the ranks will say what is wrong


# --- what a person is told ----------------------------------------------------------------------------

_PLAIN = ("retrying", "cancelling", "killing", "waiting", "restarting", "left out", "regrouping", "given up")


def show_event(event: SupervisorEvent, memory_hint: str) -> None:
    """Tell the person, on standard error, what the supervisor sees."""
    if event.kind not in (*_PLAIN, "fault", "failed"):
        return
    if sys.stderr.isatty():
        # Off the line on which a progress display may have been left.
        print(file=sys.stderr)
    if event.kind in _PLAIN:
        print(f"allhands: {event.message}", file=sys.stderr, flush=True)
        return
    _show_cause(event, memory_hint)
    if event.rank is not None and event.log_path is not None:
        print(f"  log of rank {event.rank}: {event.log_path}", file=sys.stderr, flush=True)


def _show_cause(event: SupervisorEvent, memory_hint: str) -> None:
    """The job goes on after a "fault"; "failed" is the last word."""
    title = "error: " if event.kind == "failed" else ""
    if event.explanation:
        print(f"allhands: {title}{event.explanation}", file=sys.stderr)
        return
    killed = event.exit_code == 128 + signal.SIGKILL
    # Rank 0's output is on the screen already.
    if event.log_tail and event.rank:
        # Who is killed says nothing about it: of such a log only the place matters.
        tail = event.log_tail[-3:] if killed else event.log_tail
        print(f"last lines of rank {event.rank}:", *tail, sep="\n  ", file=sys.stderr)
    print(f"allhands: {title}{event.message}", file=sys.stderr)
    if killed and event.kind == "failed":
        print(f"  what to do: {memory_hint}", file=sys.stderr)
