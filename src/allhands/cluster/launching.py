"""Start of a :class:`TrainingJob` on all ranks, under the supervisor."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

from allhands.checkpoints import find
from allhands.cluster.candidates import facts_here, facts_of
from allhands.cluster.choose import choose, explain
from allhands.cluster.hosts import Backend, hostfile_backend
from allhands.cluster.job import TrainingJob, check, step_in, way_on
from allhands.cluster.membership import HostfileMembers, LocalMembers, Members
from allhands.cluster.newcomers import Trial
from allhands.cluster.notices import Notices
from allhands.cluster.ranks import ATTEST_VARIABLE, LaunchSpec, RankSettings, fair_share
from allhands.cluster.remote import newest_checkpoint
from allhands.cluster.supervisor import SuperviseOptions, supervise
from allhands.distributed.blame import LAUNCHER_VARIABLE, OPTION_VARIABLE
from allhands.errors import CheckpointError
from allhands.io.files import CLAIMED, claim_mark, claimed, set_aside, storage_error
from allhands.io.terminal import is_screen, say
from allhands.observe.journal import EVENTS_FILE, Journal
from allhands.runtime.blas import allowed_cores
from allhands.runtime.gpus import nvidia_gpus


def run(job: TrainingJob, command: Sequence[str]) -> int:
    """Start ``command`` on all ranks, supervise them, and return the exit code to use.

    Raises:
        ConfigError: see :func:`allhands.cluster.job.check`.
        DistributedError: the ranks could not be started.
        StorageError: the directory cannot be made, or another run has claimed it.
    """
    check(job)
    _tell_slots(job)
    _tell_cores(job)
    run_id = secrets.token_hex(8)
    options = SuperviseOptions(
        job.max_restarts,
        job.min_ranks,
        run_id,
        resize=None if job.cores_per_rank else _share_cores,
        try_out=Trial if job.compared else None,
    )
    try:
        with ExitStack() as claims:
            directories = dict.fromkeys((job.directory, job.checkpoints or job.directory))
            for directory in directories:
                claims.enter_context(claimed(directory))
            marks = " ".join(map(claim_mark, directories))
            return supervise(
                _spec(replace(job, env={**_hosts_told(job), **job.env, CLAIMED: marks}), command),
                Notices(job, lambda: way_on(job, run_id)).show,
                options=options,
                members=_members(job, run_id),
                journal=claims.enter_context(closing(_journal(job))),
            )
    finally:
        if is_screen(sys.stdout):
            # A rank that was killed while it showed its progress has left the cursor hidden.
            print("\x1b[?25h", end="", flush=True)


def _tell_slots(job: TrainingJob) -> None:
    """Print a note if there are fewer slots than requested ranks; computers can be added later."""
    if job.hostfile and job.num_ranks and (slots := job.size) < job.num_ranks:
        count = f"{slots} slot{'s' * (slots != 1)}: {slots} rank{'s' * (slots != 1)} now"
        say(f"{job.hostfile} has {count}, up to {job.num_ranks} when computers are added to it")


def _tell_cores(job: TrainingJob) -> None:
    """Print a note if processes must take turns on CPU cores; a person may want to try many."""
    cores = allowed_cores()
    if not job.hostfile and job.size > cores and not nvidia_gpus():
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
    # The path of the logs on other computers, if it differs there.
    below = job.directory in job.there and job.log_dir.is_relative_to(job.directory)
    logs = job.log_dir.relative_to(job.directory) if below else None
    return LaunchSpec(
        command,
        job.size,
        _choose_backend(job),
        job.log_dir,
        tag_output=job.tagged,
        log_dir_there=None if logs is None else str(Path(job.told(job.directory)) / logs),
        examine=job.hostfile
        and shlex.join(["allhands", "cluster", "check", "--hostfile", job.hostfile]),
        **{each.name: getattr(job, each.name) for each in fields(RankSettings)},
    )


def _hosts_told(job: TrainingJob) -> dict[str, str]:
    """Return environment variables with the person's option for the computers, and with the name of
    this computer.
    """
    if job.hostfile is None:
        return {}
    told = {OPTION_VARIABLE: shlex.join(["--hostfile", job.hostfile])}
    told |= {ATTEST_VARIABLE: "1"} if job.compared else {}
    here = next((host.name for host in job.hosts if host.ssh is None), "")
    return {**told, LAUNCHER_VARIABLE: here} if here else told


def _choose_backend(job: TrainingJob) -> Backend:
    if job.backend != "auto":
        return job.backend
    if job.hostfile is not None and (asked := hostfile_backend(job.hostfile)):
        return asked

    facts = facts_here(job.size)
    if hosts := job.hosts:
        facts = replace(facts_of(hosts, job.size, ask=True), by_agents=True)
    choice = choose(facts, training_s=job.expected_s, cores_per_rank=job.cores_per_rank)
    before = _backend_before(job)
    if any(one.possible and one.backend == before != choice.backend for one in choice.candidates):
        # Another back-end would sum three ranks or more in another order, and change the last bits.
        choice = replace(choice, backend=cast(Backend, before), reason="the resumed run used it")
    if job.verbose:
        print(*explain(choice), sep="\n", file=sys.stderr)
    return choice.backend


def _backend_before(job: TrainingJob) -> str | None:
    """Return the back-end of the resumed run, if it is known here."""
    if job.resume is None:
        return None
    try:
        return find(str(job.resume), job.resume, verify=False).state.get("backend")
    except CheckpointError:
        return None  # the ranks will report what is wrong with the checkpoint


def _share_cores(spec: LaunchSpec) -> LaunchSpec:
    """Divide this computer's cores among its ranks."""
    return spec if spec.places else replace(spec, cores_per_rank=fair_share(spec.num_processes))


def _members(job: TrainingJob, run_id: str) -> Members:
    directory, resume = job.checkpoints, job.resume
    if job.hostfile is None:

        def newest_step() -> int | None:
            own = step_in(directory, run_id)
            return step_in(resume) if own is None else own

        return LocalMembers(job.size, None if directory is None else newest_step)
    if directory is None:
        return HostfileMembers(job.hostfile, job.num_ranks)

    before = None if resume is None else job.told(resume)
    return HostfileMembers(
        job.hostfile,
        job.num_ranks,
        checkpoints=lambda hosts: newest_checkpoint(hosts, job.told(directory), run_id, before),
        earlier=job.earlier,
    )
