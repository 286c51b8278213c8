"""Platforms that start one process a computer: Vertex AI, SageMaker, Kubernetes; and what each offers and expects.

As in :mod:`allhands.cluster.launchers`, a function returns ``None`` where it is not its platform.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from allhands.cluster.place import (
    LOOPBACK,
    USUAL_PORT,
    Given,
    Launch,
    MeetingPoint,
    Paths,
    Platform,
    contradiction,
    one_of_nodes,
    parse_object,
    port_number,
    ports_from,
)
from allhands.cluster.slurm import slurm_platform
from allhands.errors import DistributedError

_SAGEMAKER = "/opt/ml"
_RESOURCES = f"{_SAGEMAKER}/input/config/resourceconfig.json"
_CHANNELS = f"{_SAGEMAKER}/input/config/inputdataconfig.json"
_SAGEMAKER_PORT = 7777  # as its own torchrun uses
_SAGEMAKER_GRACE_S = 120.0
_KUBERNETES_GRACE_S = 30.0
_TERMINATION_LOG = "/dev/termination-log"
_MPI_HOSTFILE = "/etc/mpi/hostfile"
_MPI_DISCOVERY = "/etc/mpi/discover_hosts.sh"
_VERTEX_DATA = {"train": "AIP_TRAINING_DATA_URI", "valid": "AIP_VALIDATION_DATA_URI", "test": "AIP_TEST_DATA_URI"}


# --- Vertex AI, and TF_CONFIG ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cluster:
    """What ``CLUSTER_SPEC`` and ``TF_CONFIG`` have in common.

    Attributes:
        launcher: whose variable it is.
        variable: its name.
        training: the pools or roles that train, rank 0's first.
        others: what the rest is called.
    """

    launcher: str
    variable: str
    training: tuple[str, ...]
    others: str

    def launch(self, given: Given) -> Launch | None:
        """The place of this process.

        Raises:
            DistributedError: it has none among those that train, or the variable is not understood.
        """
        if self.variable not in given.env:
            return None
        content = parse_object(given.env[self.variable], self.variable)
        cluster, task = content.get("cluster"), content.get("task")
        if not isinstance(cluster, dict) or not isinstance(task, dict):
            if self.variable == "TF_CONFIG" and not cluster:
                return None  # as some tools set it for one process
            raise self._odd("it has no cluster and task")
        pools, mine = cast(dict[str, Any], cluster), cast(dict[str, Any], task)
        hosts, place = self._members(pools), (str(mine.get("type")), mine.get("index", 0))
        if place[0] not in self.training:
            raise DistributedError(
                f"this is {place[0]} {place[1]}, not one of those that train: {self.others}",
                where=self.variable,
                hint=f"start allhands only in {' and '.join(self.training)}",
            )
        members = list(hosts)
        if place not in members:
            raise self._odd(f"there is no {place[0]} {place[1]} in its cluster")
        return self._placed(given, members.index(place), place, list(hosts.values()))

    def _placed(self, given: Given, rank: int, place: tuple[str, int], addresses: list[str]) -> Launch:
        facts = (f"computer {rank} of {len(addresses)}: {place[0]} {place[1]} in {self.variable}",)
        reason = f"{place[0]} {place[1]} in {self.variable}"
        names = tuple(address.rpartition(":")[0] or address for address in addresses)
        launch = Launch(self.launcher, rank, len(names), 0, 1, "none", reason, names, facts=facts)
        port = addresses[0].rpartition(":")[2]
        first = int(port) if port.isdigit() and 0 < int(port) < 65536 else USUAL_PORT
        job = f"{self.launcher} {given.env.get('CLOUD_ML_JOB_ID', '')} {addresses}"
        return one_of_nodes(given, launch, MeetingPoint(names[0], ports_from(first), job))

    def _members(self, pools: Mapping[str, Any]) -> dict[tuple[str, int], str]:
        """The address of each member that trains, in the order of ranks."""
        found: dict[tuple[str, int], str] = {}
        for pool in self.training:
            addresses = pools.get(pool) or []
            if not isinstance(addresses, list) or not all(isinstance(one, str) for one in addresses):
                raise self._odd(f"{pool} is not a list of addresses")
            found |= {(pool, index): address for index, address in enumerate(cast(list[str], addresses))}
        return found

    def _odd(self, what: str) -> DistributedError:
        return DistributedError(f"{self.variable} makes no sense: {what}", hint=f"correct or unset {self.variable}")


_VERTEX = _Cluster(
    *("vertex", "CLUSTER_SPEC", ("workerpool0", "workerpool1")),
    "worker pools 2 and 3 are for Vertex's reduction servers and evaluators",
)
_TF_CONFIG = _Cluster(
    *("tf_config", "TF_CONFIG", ("chief", "master", "worker")), "there are no parameter servers and evaluators here"
)


def vertex(given: Given) -> Launch | None:
    """A replica of a Vertex AI custom job."""
    return _VERTEX.launch(given)


def tf_config(given: Given) -> Launch | None:
    """A replica of whatever speaks TensorFlow's ``TF_CONFIG`` only."""
    return _TF_CONFIG.launch(given)


def _vertex_platform(given: Given) -> Platform | None:
    named = given.first("CLUSTER_SPEC", "CLOUD_ML_JOB_ID", "AIP_MODEL_DIR", "AIP_CHECKPOINT_DIR")
    if named is None:
        return None
    why, notes = [f"Vertex AI: {named}"], list[str]()

    def place(name: str) -> Path | None:
        if name not in given.env:
            return None
        path = from_bucket(given.env[name])
        if path is None:
            notes.append(f"{name} is {given.env[name]}, which is not mounted as files")
        else:
            why.append(f"{path}: {name}")
        return path

    data = {channel: path for channel, name in _VERTEX_DATA.items() if (path := place(name)) is not None}
    model, checkpoints = place("AIP_MODEL_DIR"), place("AIP_CHECKPOINT_DIR")
    paths = Paths(data, model, checkpoints, tensorboard=place("AIP_TENSORBOARD_LOG_DIR"))
    return Platform("vertex", paths=paths, why=tuple(why), notes=tuple(notes))


def from_bucket(uri: str) -> Path | None:
    """Where Vertex mounts what ``uri`` names: ``gs://bucket/path`` -> ``/gcs/bucket/path``; ``None``: nowhere."""
    if uri.startswith("gs://"):
        return Path("/gcs", uri.removeprefix("gs://").strip("/"))
    return Path(uri) if uri.startswith("/") else None


# --- SageMaker ---------------------------------------------------------------------------------------


def sagemaker(given: Given) -> Launch | None:
    """The one process that SageMaker starts on each host of a training job."""
    hosts, current, source = _sagemaker_hosts(given)
    if not hosts:
        return None
    ordered = sorted(hosts)
    if current not in ordered:
        raise contradiction("sagemaker", f"this host is {current!r}, the hosts are {', '.join(ordered)} ({source})")
    node, reason = ordered.index(current), f"{current} of {', '.join(ordered)} in {source}"
    gpus, fact, notes = _sagemaker_gpus(given)
    facts = (f"computer {node} of {len(ordered)}: {reason}", *fact)
    launch = Launch(
        *("sagemaker", node, len(ordered), 0, 1, "none", reason, tuple(ordered)),
        ranks_per_node=gpus,
        facts=facts,
        notes=notes,
    )
    job = given.shown("TRAINING_JOB_NAME", "TRAINING_JOB_ARN") or " ".join(ordered)
    return one_of_nodes(given, launch, MeetingPoint(ordered[0], ports_from(_SAGEMAKER_PORT), f"sagemaker {job}"))


def _sagemaker_hosts(given: Given) -> tuple[list[str], str, str]:
    """All hosts, this one, and where that is from; the variables come from a toolkit, the file from SageMaker."""
    text = given.read(_RESOURCES)
    file = parse_object(text, _RESOURCES) if text is not None else {}
    hosts, current = _names(file.get("hosts")), str(file.get("current_host", ""))
    if text is not None and (not hosts or not current):
        hint = "without them this host cannot know its place"
        raise DistributedError("hosts or current_host is missing", where=_RESOURCES, hint=hint)
    if not given.first("SM_HOSTS", "SM_CURRENT_HOST"):
        return hosts, current, _RESOURCES
    if not given.has("SM_HOSTS", "SM_CURRENT_HOST"):
        missing = "SM_HOSTS" if "SM_CURRENT_HOST" in given.env else "SM_CURRENT_HOST"
        if hosts:
            return hosts, current, _RESOURCES
        raise DistributedError(f"{missing} is not set, unlike its companion", hint=f"set {missing}, or neither")
    told, here = _json_names("SM_HOSTS", given.env["SM_HOSTS"]), given.env["SM_CURRENT_HOST"]
    if text is not None and (sorted(told), here) != (sorted(hosts), current):
        raise contradiction("sagemaker", f"SM_HOSTS and SM_CURRENT_HOST say {here} of {told}, {_RESOURCES} does not")
    return told, here, "SM_HOSTS and SM_CURRENT_HOST"


def _sagemaker_gpus(given: Given) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """Ranks a host, the fact that says so, and what a person should know."""
    gpus = given.number("SM_NUM_GPUS", 0)
    if gpus < 2:
        return 1, (), ()
    if not given.has_cuda:
        return 1, (), (f"SM_NUM_GPUS={gpus}, but MLX here is a build without CUDA: pip install 'allhands[cuda13]'",)
    return gpus, (f"{gpus} ranks a computer: SM_NUM_GPUS",), ()


def _sagemaker_platform(given: Given) -> Platform | None:
    named = given.first("SM_CURRENT_HOST", "SM_HOSTS", "SM_MODEL_DIR")
    if named is None and given.read(_RESOURCES) is None:
        return None
    root = Path(_SAGEMAKER)
    data = {name: _channel(given, name) for name in _channels(given)}
    why = [f"SageMaker: {named or _RESOURCES}", f"{_SAGEMAKER_GRACE_S:g} s from SIGTERM to SIGKILL: SageMaker's rule"]
    if data:
        why.append(f"data channels {', '.join(data)}: {'SM_CHANNELS' if 'SM_CHANNELS' in given.env else _CHANNELS}")
    paths = Paths(
        data,
        model=Path(given.env.get("SM_MODEL_DIR", root / "model")),
        checkpoints=root / "checkpoints",
        output=Path(given.env.get("SM_OUTPUT_DATA_DIR", root / "output/data")),
        config=Path(given.env.get("SM_INPUT_CONFIG_DIR", root / "input/config")),
    )
    return Platform("sagemaker", _SAGEMAKER_GRACE_S, root / "output/failure", paths, why=tuple(why))


def _channels(given: Given) -> list[str]:
    if "SM_CHANNELS" in given.env:
        return _json_names("SM_CHANNELS", given.env["SM_CHANNELS"])
    text = given.read(_CHANNELS)
    return sorted(parse_object(text, _CHANNELS)) if text is not None else []


def _channel(given: Given, name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name in (".", ".."):
        raise DistributedError(f"{name!r} is not the name of a data channel", hint="rename the channel of the job")
    return Path(given.env.get(f"SM_CHANNEL_{name.upper()}", f"{_SAGEMAKER}/input/data/{name}"))


def _names(content: object) -> list[str]:
    return [str(one) for one in cast(list[object], content)] if isinstance(content, list) else []


def _json_names(variable: str, text: str) -> list[str]:
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, list):
        raise DistributedError(f"{variable} is {text!r}, not a JSON list of names", hint=f"unset {variable}")
    return _names(cast(object, content))


# --- Kubernetes --------------------------------------------------------------------------------------


def indexed_job(given: Given) -> Launch | None:
    """A pod of an Indexed Job, or of a StatefulSet; neither says how many there are."""
    sized = given.first("ALLHANDS_NUM_NODES", "WORLD_SIZE", "NUM_NODES")
    if "JOB_COMPLETION_INDEX" in given.env:
        index, source = given.number("JOB_COMPLETION_INDEX"), "JOB_COMPLETION_INDEX"
        if sized is None:
            raise DistributedError(
                "JOB_COMPLETION_INDEX is set, but nothing says how many pods train together",
                hint="set ALLHANDS_NUM_NODES to the job's completions, or to 1 if each pod trains by itself",
            )
    elif "ALLHANDS_NUM_NODES" in given.env:
        sized, source = "ALLHANDS_NUM_NODES", "HOSTNAME"
        index = _ordinal(given, given.number(sized))
    else:
        return None
    size = given.number(sized)
    if size == 1:
        facts = (f"a process by itself: {sized}=1",)
        return one_of_nodes(
            given, Launch("kubernetes", 0, 1, 0, 1, "none", facts[0], facts=facts), MeetingPoint(LOOPBACK, (), "")
        )
    reason = f"{source}={given.env.get(source, '')}, {sized}={size}"
    if not 0 <= index < size:
        raise contradiction("kubernetes", reason)
    first, hosts, fact = _peers(given, index, size)
    facts = (f"computer {index} of {size}: {reason}", fact)
    launch = Launch("kubernetes", index, size, 0, 1, "none", reason, hosts, facts=facts)
    meeting = MeetingPoint(first, ports_from(port_number(given, "MASTER_PORT", USUAL_PORT)), f"kubernetes {first}")
    return one_of_nodes(given, launch, meeting)


def _ordinal(given: Given, size: int) -> int:
    """The number at the end of a StatefulSet's pod name."""
    if size == 1:
        return 0
    found = re.fullmatch(r".+-(\d+)", given.env.get("HOSTNAME", "").partition(".")[0])
    if found is None:
        raise DistributedError(
            f"ALLHANDS_NUM_NODES is set, but HOSTNAME ({given.env.get('HOSTNAME', 'not set')}) ends in no number",
            hint="use an Indexed Job or a StatefulSet; or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        )
    return int(found[1])


def _peers(given: Given, index: int, size: int) -> tuple[str, tuple[str, ...], str]:
    """The name of pod 0, those of all pods if they are known, and where they are from."""
    own = given.env.get("HOSTNAME", "").partition(".")[0]
    base = own.removesuffix(f"-{index}")
    service, source = given.env.get("ALLHANDS_PEERS_SERVICE"), "ALLHANDS_PEERS_SERVICE"
    if service is None:
        service, source = _service_of(given, own), "/etc/hosts"
    if not service or base == own or not own:
        if "MASTER_ADDR" in given.env:
            return given.env["MASTER_ADDR"], (), "computer 0: MASTER_ADDR"
        raise DistributedError(
            f"the names of the other pods are not known (HOSTNAME={own or 'not set'}, "
            f"ALLHANDS_PEERS_SERVICE={service or 'not set'})",
            hint="make a headless service, name it in the pod's subdomain and in ALLHANDS_PEERS_SERVICE",
        )
    peers = tuple(f"{base}-{i}.{service}" for i in range(size))
    return peers[0], peers, f"computers {peers[0]} to {peers[-1]}: HOSTNAME and {source}"


def _service_of(given: Given, own: str) -> str | None:
    """The headless service that the kubelet writes into the pod's own line of ``/etc/hosts``."""
    for line in (given.read("/etc/hosts") or "").splitlines():
        for name in line.partition("#")[0].split()[1:]:
            first, _, rest = name.partition(".")
            if own and first == own and ".svc" in f".{rest}":
                return rest
    return None


def mpi_job_launcher(given: Given) -> Launch | None:
    """The launcher pod of an MPIJob outside mpirun: one process, which has its ranks still to start."""
    hostfile = given.first("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE")
    role = given.env.get("K_MPI_JOB_ROLE")
    if role != "launcher" and (hostfile is None or given.env[hostfile] != _MPI_HOSTFILE):
        return None
    source = "K_MPI_JOB_ROLE=launcher" if role else f"{hostfile}={_MPI_HOSTFILE}"
    slots = _slots(given.read(_MPI_HOSTFILE) or "")
    facts = [f"the launcher of an MPIJob: {source}"]
    if slots:
        facts.append(f"{len(slots)} computers with {sum(slots)} slots: {_MPI_HOSTFILE}")
    if (running := given.read(_MPI_DISCOVERY)) is not None:
        count = len(re.findall(r"^\s*echo\s+\S+", running, re.MULTILINE))
        facts.append(f"{count} of them run now: {_MPI_DISCOVERY}")
    note = f"this is the launcher of an MPIJob; start its ranks with: mpirun -np {sum(slots) or 'N'} allhands train ..."
    return Launch("single", 0, 1, 0, 1, "none", source, facts=tuple(facts), notes=(note,))


def _slots(hostfile: str) -> list[int]:
    """Of each host, from ``host slots=N`` (Open MPI) or ``host:N`` (MPICH, Intel)."""
    lines = [line.partition("#")[0].strip() for line in hostfile.splitlines()]
    found = [re.search(r"(?:slots\s*=\s*|:)(\d+)\s*$", line) for line in lines if line]
    return [int(match[1]) if match else 1 for match in found]


def _kubernetes_platform(given: Given) -> Platform | None:
    named = given.first("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "K_MPI_JOB_ROLE")
    if named is None:
        return None
    why = (
        f"Kubernetes: {named}",
        f"{_KUBERNETES_GRACE_S:g} s from SIGTERM to SIGKILL: terminationGracePeriodSeconds, unless changed",
    )
    return Platform("kubernetes", _KUBERNETES_GRACE_S, Path(_TERMINATION_LOG), why=why)


# --- all of them -------------------------------------------------------------------------------------


def platform_of(given: Given) -> Platform:
    """Who runs this machine. ``ALLHANDS_GRACE_S`` corrects the time that it gives to end.

    Raises:
        DistributedError: a variable or file of the platform is not understood.
    """
    makers = (_sagemaker_platform, _vertex_platform, slurm_platform, _kubernetes_platform)
    found = _first([platform for make in makers if (platform := make(given)) is not None])
    if "ALLHANDS_GRACE_S" not in given.env:
        return _with_torch_restarts(given, found)
    try:
        grace_s = float(given.env["ALLHANDS_GRACE_S"])
    except ValueError:
        grace_s = -1.0
    if not 0 <= grace_s < float("inf"):
        raise DistributedError(f"{given.shown('ALLHANDS_GRACE_S')} is no time", hint="give seconds")
    why = (*(fact for fact in found.why if "SIGKILL" not in fact), f"{grace_s:g} s to SIGKILL: ALLHANDS_GRACE_S")
    return _with_torch_restarts(given, replace(found, grace_s=grace_s, why=why))


def _first(platforms: Sequence[Platform]) -> Platform:
    return platforms[0] if platforms else Platform()


def _with_torch_restarts(given: Given, platform: Platform) -> Platform:
    """torchrun starts all ranks again when one fails."""
    restarts = given.number("TORCHELASTIC_RESTART_COUNT", 0)
    if not restarts:
        return platform
    fact = f"torchrun has restarted the ranks {restarts} time{'s' * (restarts != 1)}: TORCHELASTIC_RESTART_COUNT"
    return replace(platform, restarts=platform.restarts + restarts, why=(*platform.why, fact))
