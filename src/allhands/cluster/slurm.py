"""Slurm: a rank of a step started by srun, and what the workload manager offers to its jobs."""

from __future__ import annotations

import re
from dataclasses import replace

from allhands.cluster.place import (
    LOOPBACK,
    Given,
    Launch,
    MeetingPoint,
    Platform,
    contradiction,
    over_network,
    ports_from,
)
from allhands.errors import DistributedError

# Steps that are no steps: a batch script's, and a shell's in an allocation (slurm.h counts them down from 2**32).
_FIRST_SPECIAL_STEP = 2**32 - 16
_SHELLS = ("bash", "interactive", "sh", "zsh", "fish")
_USUAL_KILL_WAIT_S = 30.0
_CONFIGURATION = "/etc/slurm/slurm.conf"


def slurm(given: Given) -> Launch | None:
    """Started by srun. In a batch script or an interactive shell ``SLURM_PROCID`` is 0 for everything."""
    if not given.has("SLURM_PROCID", "SLURM_STEP_ID"):
        return None
    rank, step = given.number("SLURM_PROCID"), given.number("SLURM_STEP_ID")
    counted = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in given.env else "SLURM_NTASKS"
    size = given.number(counted)
    if step >= _FIRST_SPECIAL_STEP or (size == 1 and given.env.get("SLURM_JOB_NAME") in _SHELLS):
        return None
    reason = f"SLURM_PROCID={rank} of {size} in step {step}"
    facts = [f"rank {rank} of {size}: {given.shown('SLURM_PROCID', counted)} in step {step}"]
    if size == 1:
        return Launch("slurm", rank, size, 0, 1, "none", reason, facts=tuple(facts))
    nodes = _layout(given, size)
    if not 0 <= rank < size:
        raise contradiction("slurm", f"rank {rank} of a world of {size}")
    local_rank, local_size = _local(given, nodes, rank)
    names = list(dict.fromkeys(nodes))
    facts.append(f"computer {nodes[rank]} of {', '.join(names)}: {_nodelist(given)}")
    launch = Launch(
        *("slurm", rank, size, local_rank, local_size, "ring", reason, tuple(nodes)),
        node=names.index(nodes[rank]),
        num_nodes=len(names),
        facts=tuple(facts),
    )
    if "PMIX_RANK" in given.env:
        if given.number("PMIX_RANK") != rank:
            raise contradiction("slurm", f"SLURM_PROCID={rank} but PMIX_RANK={given.env['PMIX_RANK']}")
        if given.has_mpi and not given.has_cuda:
            fact = "back-end mpi: PMIX_RANK is set, and Open MPI is here"
            return replace(launch, backend="mpi", reason=reason + ", with PMIx", facts=(*launch.facts, fact))
    return over_network(given, launch, _meeting(given, nodes))


def _local(given: Given, nodes: list[str], rank: int) -> tuple[int, int]:
    """The rank's number on its node, and how many there are, if ranks are in blocks a node."""
    local_rank, local_size = nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank])
    if local_rank != given.number("SLURM_LOCALID", local_rank):
        raise DistributedError(
            f"Slurm placed rank {rank} as local task {given.env['SLURM_LOCALID']}, not in blocks of ranks a node",
            hint="start with `srun --distribution=block`",
        )
    return local_rank, local_size


def _meeting(given: Given, nodes: list[str]) -> MeetingPoint:
    """At rank 0's node, on ports that follow from the job."""
    job, step = given.number("SLURM_JOB_ID", 0), given.number("SLURM_STEP_ID")
    host = LOOPBACK if len(set(nodes)) == 1 else nodes[0]
    name = f"slurm {job}.{step} {given.env.get('SLURM_RESTART_COUNT', '0')}"
    return MeetingPoint(host, ports_from(20000 + (7 * job + 61 * step) % 10000), name)


def _nodelist(given: Given) -> str:
    return given.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") or ""


def _layout(given: Given, size: int) -> list[str]:
    """The node of each rank, from the node list and ``SLURM_STEP_TASKS_PER_NODE`` (``"2(x3),1"``)."""
    nodelist = given.env.get(_nodelist(given), "localhost")
    names = expand_nodelist(nodelist)
    counts: list[int] = []
    per_node = given.env.get("SLURM_STEP_TASKS_PER_NODE") or given.env.get("SLURM_TASKS_PER_NODE", "")
    if not per_node:
        per_node = _tasks_per_node(given, len(names), size)
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node):
        counts += [int(count)] * int(times or 1)
    layout = [name for name, count in zip(names, counts, strict=False) for _ in range(count)]
    if len(counts) != len(names) or len(layout) != size:
        raise contradiction("slurm", f"{size} tasks, but nodes {nodelist!r} with tasks {per_node!r}")
    return layout


def _tasks_per_node(given: Given, num_nodes: int, size: int) -> str:
    """Where an environment has lost the usual variables: what follows from others.

    Raises:
        DistributedError: nothing does.
    """
    asked = given.env.get("SLURM_NTASKS_PER_NODE", "")
    if num_nodes == 1:
        return str(size)
    if asked.isdigit() and int(asked) * num_nodes == size:
        return f"{asked}(x{num_nodes})"
    raise DistributedError(
        f"{size} tasks on {num_nodes} nodes, and nothing says how many each node has: neither SLURM_TASKS_PER_NODE nor "
        "SLURM_STEP_TASKS_PER_NODE is set",
        hint="start it with srun, which sets them, and pass them on (--export=ALL); or give srun --ntasks-per-node",
    )


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the host names of Slurm's compressed form: ``"n[1,08-10],gpu1"`` -> n1 n08 n09 n10 gpu1.

    Raises:
        DistributedError: the text is not such a list.
    """
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        names += _expand_item(item)
    return names


def _expand_item(item: str) -> list[str]:
    opening = item.find("[")
    if opening < 0:
        return [item]
    closing = item.find("]", opening)
    prefix, inside, rest = item[:opening], item[opening + 1 : closing], _expand_item(item[closing + 1 :])
    numbers: list[str] = []
    for part in inside.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if closing < 0 or not first.isdigit() or not last.isdigit():
            raise DistributedError(
                f"SLURM_STEP_NODELIST has {item!r}, which is not a list of nodes",
                hint="check the job's node list with `scontrol show hostnames`",
            )
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return [prefix + number + tail for number in numbers for tail in rest]


def slurm_platform(given: Given) -> Platform | None:
    """What a job of Slurm can count on, whoever has started its ranks."""
    if "SLURM_JOB_ID" not in given.env:
        return None
    job = given.env["SLURM_JOB_ID"]
    grace_s, source = _kill_wait(given)
    why = [f"job {job} of Slurm: SLURM_JOB_ID", f"{grace_s:g} s from SIGTERM to SIGKILL: {source}"]
    if warning := given.first("SBATCH_SIGNAL", "SLURM_SIGNAL"):
        number, _, seconds = given.env[warning].rpartition(":")[2].partition("@")
        why.append(f"signal {number} comes {seconds or '60'} s before the time limit: {warning}")
    restarts = given.number("SLURM_RESTART_COUNT", 0)
    if restarts:
        why.append(f"requeued {restarts} time{'s' * (restarts != 1)}: SLURM_RESTART_COUNT")
    if (launch_node := given.env.get("SLURM_LAUNCH_NODE_IPADDR")) is not None:
        why.append(f"srun was called at {launch_node}: SLURM_LAUNCH_NODE_IPADDR")
    requeue = ("scontrol", "requeue", job)
    return Platform("slurm", grace_s, requeue=requeue, restarts=restarts, why=tuple(why), notes=_outside_a_step(given))


def _kill_wait(given: Given) -> tuple[float, str]:
    """Seconds, and where they are from."""
    path = given.env.get("SLURM_CONF", _CONFIGURATION)
    try:
        text = given.read(path) or ""
    except DistributedError:  # the administrator's file, which a job does not need
        text = ""
    found = re.search(r"^\s*KillWait\s*=\s*(\d+)", text, re.MULTILINE | re.IGNORECASE)
    return (float(found[1]), f"KillWait in {path}") if found else (_USUAL_KILL_WAIT_S, "KillWait, unless changed")


def _outside_a_step(given: Given) -> tuple[str, ...]:
    """For one who has asked for several tasks, and has not started them."""
    tasks = given.env.get("SLURM_NTASKS", "1")
    if not tasks.isdigit() or int(tasks) == 1:
        return ()
    return (f"the job has {tasks} tasks, and this is a shell or a script, not one of them: srun allhands train ...",)
