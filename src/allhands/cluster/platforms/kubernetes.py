"""Kubernetes: pods of an Indexed Job or a StatefulSet, and the launcher of Kubeflow's MPIJob."""

from __future__ import annotations

import re

from allhands.cluster.place import (
    LOOPBACK,
    USUAL_PORT,
    Given,
    LaunchPlace,
    Platform,
    below,
    contradiction,
    meeting_at,
    one_of_nodes,
)
from allhands.errors import DistributedError
from allhands.io.formatting import counted

_GRACE_S = 30.0
_MPI_HOSTFILE = "/etc/mpi/hostfile"
_MPI_DISCOVERY = "/etc/mpi/discover_hosts.sh"
# A line is "host slots=N" (Open MPI) or "host:N" (MPICH and Intel MPI).
_MPI_LINE = re.compile(
    r"^\s*[^#\s][^#\n]*?(?:(?:slots\s*=\s*|:)(\d+))?[^\S\n]*(?:#|$)", re.MULTILINE
)


def indexed_job(given: Given) -> LaunchPlace | None:
    """Recognise a pod of an Indexed Job or of a StatefulSet.

    Kubernetes tells neither kind of pod how many pods there are, so a variable must say it.
    """
    sized = given.first("ALLHANDS_NUM_NODES", "WORLD_SIZE", "NUM_NODES")
    indexed = "JOB_COMPLETION_INDEX" in given.env
    if not indexed and sized != "ALLHANDS_NUM_NODES":
        return None
    if sized is None:
        raise DistributedError(
            "JOB_COMPLETION_INDEX is set, but nothing says how many pods train together",
            code="world-size-unknown",
            hint="set ALLHANDS_NUM_NODES to the job's completions, or to 1 if each pod trains by itself",
        )
    size = given.number(sized)
    if size == 1:
        alone = LaunchPlace(reason=f"a process by itself: {sized}=1")
        return one_of_nodes(given, alone, meeting_at(LOOPBACK, USUAL_PORT, ""))
    source = "JOB_COMPLETION_INDEX" if indexed else "HOSTNAME"
    index = given.number(source) if indexed else _ordinal(given)
    reason = f"{given.shown(source)}, {sized}={size}"
    if not 0 <= index < size:
        raise contradiction("kubernetes", reason)
    first, hosts, fact = _peers(given, index, size)
    return one_of_nodes(
        given,
        LaunchPlace(
            "kubernetes",
            index,
            size,
            reason=f"computer {index} of {size}: {reason}",
            hosts=hosts,
            facts=(fact,),
        ),
        meeting_at(first, given.port("MASTER_PORT", USUAL_PORT), f"kubernetes {first}"),
    )


def _pod(given: Given) -> str:
    return given.env.get("HOSTNAME", "").partition(".")[0]


def _ordinal(given: Given) -> int:
    """Return the number at the end of the name of a StatefulSet's pod."""
    found = re.fullmatch(r".+-(\d+)", _pod(given))
    if found is None:
        raise DistributedError(
            f"ALLHANDS_NUM_NODES is set, but HOSTNAME ({given.env.get('HOSTNAME', 'not set')}) ends in no number",
            code="variables-incomplete",
            hint="use an Indexed Job or a StatefulSet; or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        )
    return int(found[1])


def _peers(given: Given, index: int, size: int) -> tuple[str, tuple[str, ...], str]:
    """Return the name of pod 0, the names of all pods if they are known, and the fact that shows
    them.
    """
    pod = _pod(given)
    base = pod.removesuffix(f"-{index}")
    service, source = given.env.get("ALLHANDS_PEERS_SERVICE"), "ALLHANDS_PEERS_SERVICE"
    if service is None and pod:
        # The kubelet writes the pod's name with its headless service into /etc/hosts.
        found = re.search(rf"\s{re.escape(pod)}\.(\S*\bsvc\b\S*)", given.read("/etc/hosts") or "")
        service, source = found[1] if found else None, "/etc/hosts"
    if not service or base == pod:
        if "MASTER_ADDR" in given.env:
            return given.env["MASTER_ADDR"], (), "computer 0: MASTER_ADDR"
        raise DistributedError(
            f"the names of the other pods are not known (HOSTNAME={pod or 'not set'}, "
            f"ALLHANDS_PEERS_SERVICE={service or 'not set'})",
            code="meeting-address-unknown",
            hint="make a headless service, name it in the pod's subdomain and in ALLHANDS_PEERS_SERVICE",
        )
    peers = tuple(f"{base}-{i}.{service}" for i in range(size))
    return peers[0], peers, f"computers {peers[0]} to {peers[-1]}: HOSTNAME and {source}"


def mpi_job_launcher(given: Given) -> LaunchPlace | None:
    """Recognise the launcher pod of an MPIJob, outside mpirun.

    It is a single process, and the ranks must still be started with mpirun.
    """
    hostfile = given.first(
        "OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE"
    )
    role = given.env.get("K_MPI_JOB_ROLE")
    if role != "launcher" and (hostfile is None or given.env[hostfile] != _MPI_HOSTFILE):
        return None
    slots = [int(number or 1) for number in _MPI_LINE.findall(given.read(_MPI_HOSTFILE) or "")]
    facts = (
        [f"{counted(len(slots), 'computer')} with {counted(sum(slots), 'slot')}: {_MPI_HOSTFILE}"]
        if slots
        else []
    )
    if (running := given.read(_MPI_DISCOVERY)) is not None:
        count = len(re.findall(r"^\s*echo\s+\S+", running, re.MULTILINE))
        facts.append(f"{count} of them run now: {_MPI_DISCOVERY}")
    note = f"this is the launcher of an MPIJob; start its ranks with: mpirun -np {sum(slots) or 'N'} allhands train ..."
    source = "K_MPI_JOB_ROLE=launcher" if role else f"{hostfile}={_MPI_HOSTFILE}"
    return LaunchPlace(
        reason=f"the launcher of an MPIJob: {source}", facts=tuple(facts), notes=(note,)
    )


def platform(given: Given) -> Platform | None:
    """Return Kubernetes' failure file and deadline; ``None`` elsewhere."""
    named = given.first("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "K_MPI_JOB_ROLE")
    if named is None:
        return None
    why = (
        f"Kubernetes: {named}",
        f"{_GRACE_S:g} s from SIGTERM to SIGKILL: terminationGracePeriodSeconds, unless changed",
    )
    return Platform("kubernetes", _GRACE_S, below(given.root, "/dev/termination-log"), why=why)
