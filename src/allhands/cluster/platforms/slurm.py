"""Slurm: the place of a rank that srun has started, and the paths and deadlines of a job."""

from __future__ import annotations

import re
from dataclasses import replace

from allhands.cluster.place import (
    LOOPBACK,
    Given,
    LaunchPlace,
    Platform,
    contradiction,
    meeting_at,
    over_network,
)
from allhands.errors import DistributedError

# Numbers from here on are not real steps, but a batch script, or a shell in an allocation (slurm.h
# counts them down from 2**32).
_FIRST_SPECIAL_STEP = 2**32 - 16
_SHELLS = ("bash", "interactive", "sh", "zsh", "fish")
_USUAL_KILL_WAIT_S = 30.0
_CONFIGURATION = "/etc/slurm/slurm.conf"


def launch(given: Given) -> LaunchPlace | None:
    """Recognise a rank started by srun.

    A batch script or an interactive shell is not a rank, although ``SLURM_PROCID`` is set there: it
    is always 0.
    """
    if not given.has("SLURM_PROCID", "SLURM_STEP_ID"):
        return None
    rank, step = given.number("SLURM_PROCID"), given.number("SLURM_STEP_ID")
    counted = given.first("SLURM_STEP_NUM_TASKS") or "SLURM_NTASKS"
    size = given.number(counted)
    if step >= _FIRST_SPECIAL_STEP or (size == 1 and given.env.get("SLURM_JOB_NAME") in _SHELLS):
        return None
    reason = f"rank {rank} of {size}: {given.shown('SLURM_PROCID', counted)} in step {step}"
    return (
        LaunchPlace("slurm", rank, reason=reason)
        if size == 1
        else _task(given, rank, size, step, reason)
    )


def _task(given: Given, rank: int, size: int, step: int, reason: str) -> LaunchPlace:
    """Return the place of one of several tasks.

    Raises:
        DistributedError: srun has not given each node a block of successive ranks, or the variables
            are incomplete or contradict each other.
    """
    listed = given.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") or ""
    nodes = _layout(given, given.env.get(listed, "localhost"), size)
    if not 0 <= rank < size:
        raise contradiction("slurm", f"rank {rank} of a world of {size}")
    names, name = list(dict.fromkeys(nodes)), nodes[rank]
    local_rank = nodes[:rank].count(name)
    if local_rank != given.number("SLURM_LOCALID", local_rank):
        raise DistributedError(
            f"Slurm placed rank {rank} as local task {given.env['SLURM_LOCALID']}, not in blocks of ranks a node",
            code="slurm-layout-unsupported",
            hint="start with `srun --distribution=block`",
        )
    launch = LaunchPlace(
        "slurm",
        rank,
        size,
        local_rank,
        nodes.count(name),
        "ring",
        reason,
        tuple(nodes),
        node=names.index(name),
        num_nodes=len(names),
        facts=(f"computer {name} of {', '.join(names)}: {listed}",),
    )
    if "PMIX_RANK" in given.env:
        if given.number("PMIX_RANK") != rank:
            raise contradiction(
                "slurm", f"SLURM_PROCID={rank} but PMIX_RANK={given.env['PMIX_RANK']}"
            )
        if given.has_mpi and not given.has_cuda:
            fact = "back-end mpi: PMIX_RANK is set, and Open MPI is here"
            return replace(launch, backend="mpi", facts=(*launch.facts, fact))
    job = given.number("SLURM_JOB_ID", 0)
    host, port = LOOPBACK if len(names) == 1 else nodes[0], 20000 + (7 * job + 61 * step) % 10000
    meeting = meeting_at(
        host, port, f"slurm {job}.{step} {given.env.get('SLURM_RESTART_COUNT', '0')}"
    )
    return over_network(given, launch, meeting)


def _layout(given: Given, nodelist: str, size: int) -> list[str]:
    """Return the node of each rank, from the node list and ``SLURM_STEP_TASKS_PER_NODE``.

    That variable looks like ``"2(x3),1"``: three nodes with two tasks each, then one with one.

    Raises:
        DistributedError: the number of tasks of each node is not known, or contradicts the node
            list.
    """
    names = expand_nodelist(nodelist)
    per_node = given.env.get("SLURM_STEP_TASKS_PER_NODE") or given.env.get(
        "SLURM_TASKS_PER_NODE", ""
    )
    if not per_node:  # these variables may not have been passed on
        asked = given.env.get("SLURM_NTASKS_PER_NODE", "")
        if len(names) == 1:
            asked = str(size)
        elif not asked.isdigit() or int(asked) * len(names) != size:
            raise DistributedError(
                f"{size} tasks on {len(names)} nodes, and nothing says how many each node has: neither "
                "SLURM_TASKS_PER_NODE nor SLURM_STEP_TASKS_PER_NODE is set",
                code="slurm-layout-unsupported",
                hint="start it with srun, which sets them, and pass them on (--export=ALL); "
                "or give srun --ntasks-per-node",
            )
        per_node = f"{asked}(x{len(names)})"
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node):
        counts += [int(count)] * int(times or 1)
    layout = [name for name, count in zip(names, counts, strict=False) for _ in range(count)]
    if len(counts) != len(names) or len(layout) != size:
        raise contradiction(
            "slurm", f"{size} tasks, but nodes {nodelist!r} with tasks {per_node!r}"
        )
    return layout


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the host names of a list in Slurm's short form: ``"n[1,08-10],gpu1"`` gives n1, n08,
    n09, n10 and gpu1.

    Raises:
        DistributedError: the text is not such a list.
    """
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        names += _expand_item(item)
    return names


def _expand_item(item: str) -> list[str]:
    prefix, opened, following = item.partition("[")
    if not opened:
        return [item]
    inside, _, rest = following.partition("]")
    numbers: list[str] = []
    for part in inside.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not first.isdigit() or not last.isdigit():
            raise DistributedError(
                f"SLURM_STEP_NODELIST has {item!r}, which is not a list of nodes",
                code="variable-invalid",
                hint="check the job's node list with `scontrol show hostnames`",
            )
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return [prefix + number + tail for number in numbers for tail in _expand_item(rest)]


def platform(given: Given) -> Platform | None:
    """Return the deadlines and the requeue command of a Slurm job; ``None`` outside one.

    This is for ranks of any launcher.
    """
    if "SLURM_JOB_ID" not in given.env:
        return None
    job, path = given.env["SLURM_JOB_ID"], given.env.get("SLURM_CONF", _CONFIGURATION)
    try:
        text = given.read(path) or ""
    except DistributedError:  # the file belongs to the administrator, and the job can do without
        text = ""
    found = re.search(r"^\s*KillWait\s*=\s*(\d+)", text, re.MULTILINE | re.IGNORECASE)
    grace_s, source = (
        (float(found[1]), f"KillWait in {path}")
        if found
        else (_USUAL_KILL_WAIT_S, "KillWait, unless changed")
    )
    why = [f"job {job} of Slurm: SLURM_JOB_ID", f"{grace_s:g} s from SIGTERM to SIGKILL: {source}"]
    if warning := given.first("SBATCH_SIGNAL", "SLURM_SIGNAL"):
        number, _, seconds = given.env[warning].rpartition(":")[2].partition("@")
        why.append(f"signal {number} comes {seconds or '60'} s before the time limit: {warning}")
    restarts = given.number("SLURM_RESTART_COUNT", 0)
    if restarts:
        why.append(f"requeued {restarts} time{'s' * (restarts != 1)}: SLURM_RESTART_COUNT")
    if (launch_node := given.env.get("SLURM_LAUNCH_NODE_IPADDR")) is not None:
        why.append(f"srun was called at {launch_node}: SLURM_LAUNCH_NODE_IPADDR")
    tasks, notes = given.env.get("SLURM_NTASKS", "1"), tuple[str, ...]()
    if tasks.isdigit() and int(tasks) != 1:
        notes = (
            f"the job has {tasks} tasks, and this shell or script is not one of them: srun allhands train ...",
        )
    requeue = ("scontrol", "requeue", job)
    return Platform(
        "slurm", grace_s, requeue=requeue, restarts=restarts, why=tuple(why), notes=notes
    )
