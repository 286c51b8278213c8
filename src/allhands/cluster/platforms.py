"""Platforms that start one process on each computer: Vertex AI, SageMaker, Kubernetes.

A function returns ``None`` if its platform has not started this process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from allhands.cluster.place import (
    LOOPBACK,
    USUAL_PORT,
    Given,
    LaunchPlace,
    Paths,
    Platform,
    below,
    contradiction,
    meeting_at,
    one_of_nodes,
    parse_object,
)
from allhands.cluster.slurm import slurm_platform
from allhands.errors import DistributedError
from allhands.io.formatting import counted

_SAGEMAKER = "/opt/ml"
_RESOURCES = f"{_SAGEMAKER}/input/config/resourceconfig.json"
_CHANNELS = f"{_SAGEMAKER}/input/config/inputdataconfig.json"
_SAGEMAKER_PORT = 7777  # the port that SageMaker's own torchrun uses
_SAGEMAKER_GRACE_S = 120.0
_KUBERNETES_GRACE_S = 30.0
_MPI_HOSTFILE = "/etc/mpi/hostfile"
_MPI_DISCOVERY = "/etc/mpi/discover_hosts.sh"
_VERTEX_DATA = {
    "train": "AIP_TRAINING_DATA_URI",
    "valid": "AIP_VALIDATION_DATA_URI",
    "test": "AIP_TEST_DATA_URI",
}


# --- Vertex AI, and TF_CONFIG ---------------------------------------------------------------------


def vertex(given: Given) -> LaunchPlace | None:
    """Recognise a replica of a Vertex AI custom job."""
    others = "worker pools 2 and 3 are for Vertex's reduction servers and evaluators"
    return _replica(given, "vertex", "CLUSTER_SPEC", ("workerpool0", "workerpool1"), others)


def tf_config(given: Given) -> LaunchPlace | None:
    """Recognise a replica of an operator that sets only TensorFlow's ``TF_CONFIG``."""
    others = "there are no parameter servers and evaluators here"
    return _replica(given, "tf_config", "TF_CONFIG", ("chief", "master", "worker"), others)


def _replica(
    given: Given, launcher: str, variable: str, training: Sequence[str], others: str
) -> LaunchPlace | None:
    """Return the place of this process among the replicas that train.

    Args:
        training: the roles that train; rank 0 is a replica of the first one that has replicas.
        others: says in an error what the other roles are for.

    Raises:
        DistributedError: this process has another role, or the variable is not understood.
    """
    if variable not in given.env:
        return None
    content = parse_object(given.env[variable], variable)
    cluster, task = content.get("cluster"), content.get("task")
    if variable == "TF_CONFIG" and not cluster:
        return None  # some tools set it like this for a single process
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise _odd(variable, "it has no cluster and task")
    addresses = _addresses(variable, cast(dict[str, Any], cluster), training)
    mine = cast(dict[str, Any], task)
    role, index = str(mine.get("type")), mine.get("index", 0)
    if role not in training:
        raise DistributedError(
            f"this is {role} {index}, not one of those that train: {others}",
            code="replica-not-training",
            where=variable,
            hint=f"start allhands only in {' and '.join(training)}",
        )
    if (role, index) not in addresses:
        raise _odd(variable, f"there is no {role} {index} in its cluster")
    rank, size = list(addresses).index((role, index)), len(addresses)
    hosts = tuple(address.rpartition(":")[0] or address for address in addresses.values())
    port = next(iter(addresses.values())).rpartition(":")[2]
    first = int(port) if port.isdigit() and 0 < int(port) < 65536 else USUAL_PORT
    reason = f"computer {rank} of {size}: {role} {index} in {variable}"
    job = f"{launcher} {given.env.get('CLOUD_ML_JOB_ID', '')} {list(addresses.values())}"
    return one_of_nodes(
        given,
        LaunchPlace(launcher, rank, size, reason=reason, hosts=hosts),
        meeting_at(hosts[0], first, job),
    )


def _addresses(
    variable: str, cluster: dict[str, Any], training: Sequence[str]
) -> dict[tuple[str, int], str]:
    """Return the address of each replica that trains, in the order of ranks."""
    found: dict[tuple[str, int], str] = {}
    for role in training:
        addresses = cluster.get(role) or []
        if not isinstance(addresses, list) or not all(
            isinstance(one, str) for one in cast(list[Any], addresses)
        ):
            raise _odd(variable, f"{role} is not a list of addresses")
        found |= {
            (role, index): address for index, address in enumerate(cast(list[str], addresses))
        }
    return found


def _odd(variable: str, what: str) -> DistributedError:
    return DistributedError(
        f"{variable} is not valid: {what}",
        code="variable-invalid",
        hint=f"correct or unset {variable}",
    )


def _vertex_platform(given: Given) -> Platform | None:
    named = given.first("CLUSTER_SPEC", "CLOUD_ML_JOB_ID", "AIP_MODEL_DIR", "AIP_CHECKPOINT_DIR")
    if named is None:
        return None
    why, notes = [f"Vertex AI: {named}"], list[str]()

    def mounted(name: str) -> Path | None:
        path = from_bucket(given.env.get(name, ""), given.root)
        if path is not None:
            why.append(f"{path}: {name}")
        elif name in given.env:
            notes.append(f"{name} is {given.env[name]}, which is not mounted as files")
        return path

    data = {
        channel: path
        for channel, name in _VERTEX_DATA.items()
        if (path := mounted(name)) is not None
    }
    model, checkpoints = mounted("AIP_MODEL_DIR"), mounted("AIP_CHECKPOINT_DIR")
    paths = Paths(data, model, checkpoints, tensorboard=mounted("AIP_TENSORBOARD_LOG_DIR"))
    return Platform("vertex", paths=paths, why=tuple(why), notes=tuple(notes))


def from_bucket(uri: str, root: Path = Path("/")) -> Path | None:
    """Return the path at which Vertex mounts ``uri``; ``None`` if it is not mounted.

    ``gs://bucket/path`` is mounted at ``/gcs/bucket/path``.
    """
    bucket = uri.removeprefix("gs://").strip("/")
    path = f"/gcs/{bucket}" if uri.startswith("gs://") else uri
    return below(root, path) if path.startswith("/") else None


# --- SageMaker ------------------------------------------------------------------------------------


def sagemaker(given: Given) -> LaunchPlace | None:
    """Recognise the one process that SageMaker starts on each computer of a training job.

    If MLX has CUDA, ``SM_NUM_GPUS`` of SageMaker's toolkit sets the number of ranks on each.
    """
    if (found := _sagemaker_hosts(given)) is None:
        return None
    hosts, current, source = found
    names = ", ".join(hosts)
    if current not in hosts:
        raise contradiction(
            "sagemaker", f"this host is {current!r}, the hosts are {names} ({source})"
        )
    node, gpus = hosts.index(current), given.number("SM_NUM_GPUS", 0)
    reason = f"computer {node} of {len(hosts)}: {current} of {names} in {source}"
    launch = LaunchPlace("sagemaker", node, len(hosts), reason=reason, hosts=tuple(hosts))
    if gpus > 1 and given.has_cuda:
        launch = replace(
            launch, ranks_per_node=gpus, facts=(f"{gpus} ranks a computer: SM_NUM_GPUS",)
        )
    elif gpus > 1:
        note = f"SM_NUM_GPUS={gpus}, but MLX here is a build without CUDA: pip install 'allhands[cuda13]'"
        launch = replace(launch, notes=(note,))
    job = given.shown("TRAINING_JOB_NAME", "TRAINING_JOB_ARN") or " ".join(hosts)
    return one_of_nodes(given, launch, meeting_at(hosts[0], _SAGEMAKER_PORT, f"sagemaker {job}"))


def _sagemaker_hosts(given: Given) -> tuple[list[str], str, str] | None:
    """Return all hosts, the name of this one, and the source of both.

    The source is SageMaker's file or the variables of its toolkit. If there are both, they must
    agree.
    """
    found, text = list[tuple[list[str], str, str]](), given.read(_RESOURCES)
    if text is not None:
        content = parse_object(text, _RESOURCES)
        hosts = _names(_RESOURCES, content.get("hosts"))
        found.append((hosts, str(content.get("current_host", "")), _RESOURCES))
    variables = ("SM_HOSTS", "SM_CURRENT_HOST")
    if given.has(*variables) or (text is None and given.first(*variables)):
        hosts = _names("SM_HOSTS", _json(given.env.get("SM_HOSTS", "")))
        found.append((hosts, given.env.get("SM_CURRENT_HOST", ""), " and ".join(variables)))
    if len(found) > 1 and found[0][:2] != found[1][:2]:
        raise contradiction(
            "sagemaker", f"{given.shown(*variables)}, and {_RESOURCES} says something else"
        )
    return found[0] if found else None


def _names(source: str, content: object) -> list[str]:
    if not isinstance(content, list):
        raise DistributedError(
            "there is no list of names",
            code="launcher-file-invalid",
            where=source,
            hint="correct or remove it",
        )
    return sorted(map(str, cast(list[Any], content)))


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _sagemaker_platform(given: Given) -> Platform | None:
    named = given.first("SM_CURRENT_HOST", "SM_HOSTS", "SM_MODEL_DIR")
    if named is None and given.read(_RESOURCES) is None:
        return None
    source = given.first("SM_CHANNELS") or _CHANNELS
    if source == _CHANNELS:
        channels = sorted(parse_object(given.read(_CHANNELS) or "{}", _CHANNELS))
    else:
        channels = _names(source, _json(given.env[source]))
    for name in channels:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name in (".", ".."):
            raise DistributedError(
                f"{name!r} is not the name of a data channel",
                code="variable-invalid",
                hint="rename the channel of the job",
            )
    why = [
        f"SageMaker: {named or _RESOURCES}",
        f"{_SAGEMAKER_GRACE_S:g} s from SIGTERM to SIGKILL: SageMaker's rule",
    ]
    if channels:
        why.append(f"data channels {', '.join(channels)}: {source}")

    def place(path: str, variable: str = "") -> Path:
        return below(given.root, given.env.get(variable, f"{_SAGEMAKER}/{path}"))

    paths = Paths(
        {name: place(f"input/data/{name}", f"SM_CHANNEL_{name.upper()}") for name in channels},
        model=place("model", "SM_MODEL_DIR"),
        checkpoints=place("checkpoints"),
        output=place("output/data", "SM_OUTPUT_DATA_DIR"),
        config=place("input/config", "SM_INPUT_CONFIG_DIR"),
    )
    return Platform("sagemaker", _SAGEMAKER_GRACE_S, place("output/failure"), paths, why=tuple(why))


# --- Kubernetes -----------------------------------------------------------------------------------


def indexed_job(given: Given) -> LaunchPlace | None:
    """Recognise a pod of an Indexed Job or of a StatefulSet.

    Kubernetes tells neither kind of pod how many pods there are, so a variable must say it.
    """
    sized = given.first("ALLHANDS_NUM_NODES", "WORLD_SIZE", "NUM_NODES")
    if "JOB_COMPLETION_INDEX" in given.env:
        index, source = given.number("JOB_COMPLETION_INDEX"), "JOB_COMPLETION_INDEX"
        if sized is None:
            raise DistributedError(
                "JOB_COMPLETION_INDEX is set, but nothing says how many pods train together",
                code="world-size-unknown",
                hint="set ALLHANDS_NUM_NODES to the job's completions, or to 1 if each pod trains by itself",
            )
    elif "ALLHANDS_NUM_NODES" in given.env:
        sized, source = "ALLHANDS_NUM_NODES", "HOSTNAME"
        index = _ordinal(given) if given.number(sized) != 1 else 0
    else:
        return None
    size = given.number(sized)
    if size == 1:
        return one_of_nodes(
            given,
            LaunchPlace(reason=f"a process by itself: {sized}=1"),
            meeting_at(LOOPBACK, USUAL_PORT, ""),
        )
    reason = f"{source}={given.env.get(source, '')}, {sized}={size}"
    if not 0 <= index < size:
        raise contradiction("kubernetes", reason)
    first, hosts, fact = _peers(given, index, size)
    launch = LaunchPlace(
        *("kubernetes", index, size),
        reason=f"computer {index} of {size}: {reason}",
        hosts=hosts,
        facts=(fact,),
    )
    return one_of_nodes(
        given,
        launch,
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
    # A line is "host slots=N" (Open MPI) or "host:N" (MPICH and Intel MPI).
    lines = re.findall(r"^\s*([^#\s][^#\n]*)", given.read(_MPI_HOSTFILE) or "", re.MULTILINE)
    slots = [
        int(n[1]) if (n := re.search(r"(?:slots\s*=\s*|:)(\d+)\s*$", line)) else 1 for line in lines
    ]
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


def _kubernetes_platform(given: Given) -> Platform | None:
    named = given.first("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "K_MPI_JOB_ROLE")
    if named is None:
        return None
    why = (
        f"Kubernetes: {named}",
        f"{_KUBERNETES_GRACE_S:g} s from SIGTERM to SIGKILL: terminationGracePeriodSeconds, unless changed",
    )
    return Platform(
        "kubernetes", _KUBERNETES_GRACE_S, below(given.root, "/dev/termination-log"), why=why
    )


# --- all of them ----------------------------------------------------------------------------------


def platform_of(given: Given) -> Platform:
    """Return the platform that manages this machine; one without a name if none is known.

    ``ALLHANDS_GRACE_S`` replaces its time between SIGTERM and SIGKILL.

    Raises:
        DistributedError: a variable or file of the platform is not understood.
    """
    makers = (_sagemaker_platform, _vertex_platform, slurm_platform, _kubernetes_platform)
    found = next((platform for make in makers if (platform := make(given)) is not None), Platform())
    if "ALLHANDS_GRACE_S" in given.env:
        try:
            grace_s = float(given.env["ALLHANDS_GRACE_S"])
        except ValueError:
            grace_s = -1.0
        if not 0 <= grace_s < float("inf"):
            raise DistributedError(
                f"{given.shown('ALLHANDS_GRACE_S')} is no time",
                code="variable-invalid",
                hint="give seconds",
            )
        why = (
            *(fact for fact in found.why if "SIGKILL" not in fact),
            f"{grace_s:g} s to SIGKILL: ALLHANDS_GRACE_S",
        )
        found = replace(found, grace_s=grace_s, why=why)
    if restarts := given.number("TORCHELASTIC_RESTART_COUNT", 0):
        fact = f"torchrun has restarted the ranks {restarts} time{'s' * (restarts != 1)}: TORCHELASTIC_RESTART_COUNT"
        found = replace(found, restarts=found.restarts + restarts, why=(*found.why, fact))
    return found
