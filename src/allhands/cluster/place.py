"""A process's place in its group, whoever has given it, and what the platform under it offers and expects.

The one description into which every launcher's variables are translated; :mod:`allhands.cluster.launchers`,
:mod:`allhands.cluster.slurm` and :mod:`allhands.cluster.platforms` do that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from allhands.errors import DistributedError

Backend = Literal["none", "ring", "mpi", "nccl", "jaccl"]

LOOPBACK = "127.0.0.1"
# Where ranks meet if nothing else says so. Not MLX's 32323, on which every other job of this computer may be.
USUAL_PORT = 29400
_NUM_PORTS = 4


@dataclass(frozen=True)
class Paths:
    """Directories that a platform has prepared; what it does not prepare is ``None``.

    Attributes:
        data: by channel, such as ``"train"``.
        model: where the finished model is expected.
        checkpoints: what outlives this machine.
        output: for everything else that is to be kept.
        tensorboard: where the platform's TensorBoard looks.
        config: settings of the job, such as hyperparameters.
    """

    data: Mapping[str, Path] = field(default_factory=dict[str, Path])
    model: Path | None = None
    checkpoints: Path | None = None
    output: Path | None = None
    tensorboard: Path | None = None
    config: Path | None = None


@dataclass(frozen=True)
class Platform:
    """Who runs the machine, and its side of the contract.

    Attributes:
        name: ``"slurm"``, ``"sagemaker"``, ``"vertex"``, ``"kubernetes"``, or empty.
        grace_s: seconds between its SIGTERM and its SIGKILL; ``None``: not known.
        failure_file: where it looks for the reason of a failure.
        paths: the directories that it has prepared.
        requeue: the command that puts this job back into the queue.
        restarts: how often the job was started before.
        why: each fact with the variable or file it comes from.
        notes: what a person should know or do.
    """

    name: str = ""
    grace_s: float | None = None
    failure_file: Path | None = None
    paths: Paths = field(default_factory=Paths)
    requeue: tuple[str, ...] = ()
    restarts: int = 0
    why: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeetingPoint:
    """Where the ranks of a job find each other.

    Attributes:
        host: name or address of rank 0's computer.
        ports: rank 0 listens on the first of these that is free.
        job: what the ranks of this job have in common with nobody else.
    """

    host: str
    ports: tuple[int, ...]
    job: str

    @property
    def is_local(self) -> bool:
        """Whether only ranks of the same computer can come."""
        return self.host == LOOPBACK


@dataclass(frozen=True)
class Launch:
    """This process's place in the group, and why we think so.

    Attributes:
        launcher: ``"allhands"``, ``"mlx.launch"``, ``"openmpi"``, ``"mpich"``, ``"torchrun"``, ``"slurm"``,
            ``"vertex"``, ``"tf_config"``, ``"sagemaker"``, ``"kubernetes"``; or ``"single"``: nobody has started
            this process as one of several.
        rank: number of this process, or of this host where ``ranks_per_node`` is more than 1.
        size: how many of them there are.
        local_rank: number on this computer.
        local_size: how many of them are on this computer.
        backend: what the group communicates over.
        reason: the variables that decided, in one line.
        hosts: the computer of every rank, where the launcher says so.
        exports: variables that the ranks still lack.
        node: number of this computer, where known.
        num_nodes: how many computers there are, where known.
        ranks_per_node: more than 1: this process was started to stand for that many ranks on its computer, which
            are still to be started, see :mod:`allhands.cluster.node`.
        meeting: where the ranks tell each other their addresses; ``None``: the launcher has told them.
        platform: who runs the machine; ``grace_s``, ``failure_file``, ``paths`` and ``requeue`` are taken from there.
        facts: where each fact about the group comes from.
        ignored: variables of other launchers, which come later in the order of precedence.
        notes: what a person should know or do about this launch.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    backend: Backend
    reason: str
    hosts: tuple[str, ...] = ()
    exports: Mapping[str, str] = field(default_factory=dict[str, str])
    node: int | None = None
    num_nodes: int | None = None
    ranks_per_node: int = 1
    meeting: MeetingPoint | None = None
    platform: Platform = field(default_factory=Platform)
    facts: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise contradiction(self.launcher, f"rank {self.rank} of a world of {self.size}")
        if self.local_size < 1 or not 0 <= self.local_rank < self.local_size:
            raise contradiction(self.launcher, f"local rank {self.local_rank} of {self.local_size}")
        if self.local_size > self.size:
            raise contradiction(self.launcher, f"{self.local_size} processes here, {self.size} in all")
        if self.node is not None and self.num_nodes is not None and not 0 <= self.node < self.num_nodes:
            raise contradiction(self.launcher, f"computer {self.node} of {self.num_nodes}")

    @property
    def grace_s(self) -> float | None:
        """Seconds between the platform's SIGTERM and its SIGKILL; ``None``: not known."""
        return self.platform.grace_s

    @property
    def failure_file(self) -> Path | None:
        """Where the platform looks for the reason of a failure."""
        return self.platform.failure_file

    @property
    def paths(self) -> Paths:
        """The directories that the platform has prepared."""
        return self.platform.paths

    @property
    def requeue(self) -> tuple[str, ...]:
        """The command that puts this job back into the queue; empty: there is none."""
        return self.platform.requeue

    @property
    def why(self) -> tuple[str, ...]:
        """Each fact with the variable or file it comes from."""
        return (*self.facts, *self.platform.why)


@dataclass(frozen=True)
class Given:
    """All that recognising a launcher may look at.

    Attributes:
        env: the variables that are not empty.
        has_cuda: whether MLX here computes with CUDA.
        has_mpi: whether an Open MPI is here that MLX can load.
        read: the text of a file; ``None`` if there is no such file.
        launcher_process: number of the process that has started all ranks of this computer.
    """

    env: Mapping[str, str]
    has_cuda: bool
    has_mpi: bool
    read: Callable[[str], str | None]
    launcher_process: Callable[[], int]

    def has(self, *names: str) -> bool:
        """Whether all of these variables are set."""
        return all(name in self.env for name in names)

    def first(self, *names: str) -> str | None:
        """The first of these variables that is set, by name."""
        return next((name for name in names if name in self.env), None)

    def number(self, name: str, default: int | None = None) -> int:
        """The variable as an integer.

        Raises:
            DistributedError: it is none, or not set and there is no default.
        """
        return integer(self.env, name, default)

    def shown(self, *names: str) -> str:
        """``RANK=1, WORLD_SIZE=2``, of those that are set."""
        return ", ".join(f"{name}={self.env[name]}" for name in names if name in self.env)


def integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The variable as an integer.

    Raises:
        DistributedError: it is none, or not set and there is no default.
    """
    if name not in env and default is not None:
        return default
    try:
        return int(env[name])
    except (KeyError, ValueError):
        found = f"is {env[name]!r}, not an integer" if name in env else "is not set, unlike its companions"
        raise DistributedError(
            f"the launcher's variable {name} {found}",
            hint="set all of the launcher's variables or none; `allhands train -n N` sets its own",
        ) from None


def port_number(given: Given, name: str, default: int | None = None) -> int:
    """The variable as a TCP port.

    Raises:
        DistributedError: it is none.
    """
    port = given.number(name, default)
    if not 0 < port < 65536:
        raise DistributedError(f"{name} is {port}, which is no port", hint=f"set {name} to a number from 1024 to 65535")
    return port


def contradiction(launcher: str, what: str) -> DistributedError:
    """The error that a launcher's variables contradict each other."""
    return DistributedError(
        f"the variables of {launcher} contradict each other: {what}",
        hint="unset the stale ones, or start with `allhands train -n N`",
    )


def parse_object(text: str, source: str) -> dict[str, Any]:
    """The JSON object in ``text``, which comes from the variable or file ``source``.

    Raises:
        DistributedError: it is none.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DistributedError(f"{source} is not JSON: {error}", hint=f"correct or remove {source}") from error
    if not isinstance(content, dict):
        raise DistributedError(f"{source} is not a JSON object", hint=f"correct or remove {source}")
    return cast(dict[str, Any], content)


def ports_from(first: int) -> tuple[int, ...]:
    """``first`` and a few ports next to it, the same on every rank."""
    step = 1 if first + _NUM_PORTS <= 65536 else -1
    return tuple(first + step * i for i in range(_NUM_PORTS))


def over_network(given: Given, launch: Launch, meeting: MeetingPoint) -> Launch:
    """``launch`` over NCCL where MLX has CUDA, else over the ring; its ranks meet at ``meeting``.

    Raises:
        DistributedError: more ranks here than GPUs.
    """
    if not given.has_cuda:
        fact = "back-end ring: MLX here is a build without CUDA"
        return replace(launch, backend="ring", meeting=meeting, facts=(*launch.facts, fact))
    fact = "back-end nccl: MLX here is the CUDA build"
    exports = {} if launch.ranks_per_node > 1 else _own_gpu(given, launch)
    return replace(launch, backend="nccl", meeting=meeting, exports=exports, facts=(*launch.facts, fact))


def _own_gpu(given: Given, launch: Launch) -> dict[str, str]:
    """The GPU of this rank among those that are visible; a single one was chosen by the launcher."""
    visible = given.env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if visible == [""]:
        return {"CUDA_VISIBLE_DEVICES": str(launch.local_rank)}
    if len(visible) == 1:
        return {}
    if launch.local_rank >= len(visible):
        raise DistributedError(
            f"{launch.local_size} processes here for {len(visible)} GPUs ({given.shown('CUDA_VISIBLE_DEVICES')})",
            hint="start a process a GPU: NCCL needs a GPU each",
        )
    return {"CUDA_VISIBLE_DEVICES": visible[launch.local_rank]}


def one_of_nodes(given: Given, launch: Launch, meeting: MeetingPoint) -> Launch:
    """A launch by a platform that starts one process a computer; one computer alone is no group.

    ``ALLHANDS_RANKS_PER_NODE`` says how many ranks each computer gets, if that is not known otherwise.
    """
    if "ALLHANDS_RANKS_PER_NODE" in given.env:
        count = given.number("ALLHANDS_RANKS_PER_NODE")
        if count < 1:
            raise DistributedError(f"ALLHANDS_RANKS_PER_NODE is {count}", hint="set it to 1 or more")
        fact = f"{count} rank{'s' * (count != 1)} a computer: ALLHANDS_RANKS_PER_NODE"
        launch = replace(launch, ranks_per_node=count, facts=(*launch.facts, fact))
    if launch.size == 1:
        n = launch.ranks_per_node
        notes = (f"{n} ranks are meant for this computer: allhands train -n {n}",) if n > 1 else ()
        return replace(launch, launcher="single", backend="none", notes=launch.notes + notes)
    return over_network(given, replace(launch, node=launch.rank, num_nodes=launch.size), meeting)
