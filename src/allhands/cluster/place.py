"""Description of a launch: a process's place in its group, and its platform's paths and deadlines.

:mod:`allhands.cluster.launchers` and :mod:`allhands.cluster.platforms` make it from the variables
and files of each launcher.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from allhands.errors import DistributedError
from allhands.io.formatting import counted

Backend = Literal["none", "ring", "mpi", "nccl", "jaccl"]

LOOPBACK = "127.0.0.1"
# The usual port of a meeting. It is not 32323, MLX's default, which another job here may use.
USUAL_PORT = 29400
_NUM_PORTS = 4


@dataclass(frozen=True)
class Paths:
    """Directories that a platform has prepared; ``None`` for each that it has not.

    Attributes:
        data: directories of data, by channel, such as ``"train"``.
        model: directory for the finished model.
        checkpoints: directory for files that are kept when this machine is gone.
        output: directory for other results.
        tensorboard: directory for the platform's TensorBoard.
        config: directory with settings of the job, such as hyperparameters.
    """

    data: Mapping[str, Path] = field(default_factory=dict[str, Path])
    model: Path | None = None
    checkpoints: Path | None = None
    output: Path | None = None
    tensorboard: Path | None = None
    config: Path | None = None


@dataclass(frozen=True)
class Platform:
    """The service or scheduler that manages this machine, with its paths and deadlines.

    Attributes:
        name: ``"slurm"``, ``"sagemaker"``, ``"vertex"``, ``"kubernetes"``, or empty.
        grace_s: seconds between its SIGTERM and its SIGKILL; ``None``: not known.
        failure_file: file into which the reason of a failure is written, or ``None``.
        paths: the directories that it has prepared.
        requeue: the command that puts this job back into the queue; empty if there is none.
        restarts: number of earlier starts of the job.
        why: facts, each with the variable or file that shows it.
        notes: advice for the user.
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
    """The address at which the ranks of a job find each other.

    Attributes:
        host: name or address of rank 0's computer.
        ports: rank 0 listens on the first of these that is free.
        job: a name that all ranks of this job know, and that no other job has.
    """

    host: str
    ports: tuple[int, ...]
    job: str

    @property
    def is_local(self) -> bool:
        """True if only ranks of the same computer can come."""
        return self.host == LOOPBACK


@dataclass(frozen=True)
class LaunchPlace:
    """This process's place in the group.

    Attributes:
        launcher: ``"allhands"``, ``"mlx.launch"``, ``"openmpi"``, ``"mpich"``, ``"torchrun"``,
            ``"slurm"``, ``"vertex"``, ``"tf_config"``, ``"sagemaker"``, ``"kubernetes"``; or
            ``"single"`` for a process that no launcher has started as one of several.
        rank: number of this process or, if ``ranks_per_node`` is more than 1, of this computer.
        size: number of processes or, if ``ranks_per_node`` is more than 1, of computers.
        local_rank: number of this process among those on this computer.
        local_size: number of processes on this computer.
        backend: back-end of the group.
        reason: the place in words, with the variables or files that show it.
        hosts: the computer of every rank, if the launcher names them.
        exports: variables that the ranks need and the launcher has not set.
        node: number of this computer, if known.
        num_nodes: number of computers, if known.
        ranks_per_node: if it is more than 1, this process stands for that many ranks of its
            computer, which :mod:`allhands.cluster.node` starts.
        meeting: where the ranks exchange their addresses; ``None``: the launcher provides the
            addresses.
        platform: the service or scheduler that manages the machine.
        facts: further facts, each with the variable or file that shows it.
        ignored: variables of other launchers, which have not been used.
        notes: advice for the user.
    """

    launcher: str = "single"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    backend: Backend = "none"
    reason: str = ""
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
        if not 0 <= self.rank < self.size:
            raise contradiction(self.launcher, f"rank {self.rank} of a world of {self.size}")
        if not 0 <= self.local_rank < self.local_size:
            raise contradiction(self.launcher, f"local rank {self.local_rank} of {self.local_size}")
        if self.local_size > self.size:
            raise contradiction(
                self.launcher,
                f"{counted(self.local_size, 'process', 'processes')} here, {self.size} in all",
            )
        if (
            self.node is not None
            and self.num_nodes is not None
            and not 0 <= self.node < self.num_nodes
        ):
            raise contradiction(self.launcher, f"computer {self.node} of {self.num_nodes}")

    @property
    def grace_s(self) -> float | None:
        """Seconds between the platform's SIGTERM and its SIGKILL; ``None``: not known."""
        return self.platform.grace_s

    @property
    def failure_file(self) -> Path | None:
        """File of the platform for the reason of a failure, or ``None``."""
        return self.platform.failure_file

    @property
    def paths(self) -> Paths:
        """The directories that the platform has prepared."""
        return self.platform.paths

    @property
    def requeue(self) -> tuple[str, ...]:
        """The command that puts this job back into the queue; empty if there is none."""
        return self.platform.requeue

    @property
    def why(self) -> tuple[str, ...]:
        """All facts, each with the variable or file that shows it."""
        return tuple(fact for fact in (self.reason, *self.facts, *self.platform.why) if fact)


@dataclass(frozen=True)
class Given:
    """What the recognition of a launcher may look at.

    Attributes:
        env: the environment variables that are not empty.
        has_cuda: whether this MLX computes with CUDA.
        has_mpi: whether MLX can load an Open MPI here.
        launcher_process: returns the id of the process that has started all ranks of this computer.
        root: the directory that stands for ``/``; tests use another one.
    """

    env: Mapping[str, str]
    has_cuda: bool
    has_mpi: bool
    launcher_process: Callable[[], int]
    root: Path = Path("/")

    def read(self, path: str) -> str | None:
        """Return the text of a platform's file; ``None`` if there is no such file.

        Raises:
            DistributedError: the file cannot be read.
        """
        try:
            return below(self.root, path).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise DistributedError(
                f"it cannot be read: {error}",
                code="launcher-file-invalid",
                where=path,
                hint="make it readable",
            ) from error

    def has(self, *names: str) -> bool:
        """True if all of these variables are set."""
        return all(name in self.env for name in names)

    def first(self, *names: str) -> str | None:
        """Return the name of the first of these variables that is set, or ``None``."""
        return next((name for name in names if name in self.env), None)

    def number(self, name: str, default: int | None = None) -> int:
        """Return the variable as an integer.

        Raises:
            DistributedError: the variable is not an integer, or is not set and has no default.
        """
        text = self.env.get(name)
        if text is None and default is not None:
            return default
        try:
            return int(text or "")
        except ValueError:
            found = (
                "is not set, unlike its companions"
                if text is None
                else f"is {text!r}, not an integer"
            )
            raise DistributedError(
                f"the launcher's variable {name} {found}",
                code="variable-invalid",
                hint="set all of the launcher's variables or none; `allhands train -n N` sets its own",
            ) from None

    def port(self, name: str, default: int | None = None) -> int:
        """Return the variable as a TCP port.

        Raises:
            DistributedError: the variable is not a port, or is not set and has no default.
        """
        port = self.number(name, default)
        if not 0 < port < 65536:
            raise DistributedError(
                f"{name} is {port}, which is no port",
                code="variable-invalid",
                hint=f"set {name} to a number from 1024 to 65535",
            )
        return port

    def shown(self, *names: str) -> str:
        """Return those of the variables that are set, as in ``RANK=1, WORLD_SIZE=2``."""
        return ", ".join(f"{name}={self.env[name]}" for name in names if name in self.env)


def below(root: Path, path: str | Path) -> Path:
    """Return a platform's path; an absolute one is taken as a path below ``root``."""
    return root / str(path).lstrip("/") if Path(path).is_absolute() else Path(path)


def contradiction(launcher: str, what: str) -> DistributedError:
    """Return the error for variables of a launcher that contradict each other."""
    return DistributedError(
        f"the variables of {launcher} contradict each other: {what}",
        code="variables-contradict",
        hint="unset the stale ones, or start with `allhands train -n N`",
    )


def parse_object(text: str, source: str) -> dict[str, Any]:
    """Return the JSON object in ``text``, which comes from the variable or file ``source``.

    Raises:
        DistributedError: the text is not a JSON object.
    """
    try:
        content, problem = json.loads(text), "not a JSON object"
    except (ValueError, RecursionError) as error:
        content, problem = None, f"not JSON: {error}"
    if isinstance(content, dict):
        return cast("dict[str, Any]", content)
    raise DistributedError(
        f"{source} is {problem}", code="variable-invalid", hint=f"correct or remove {source}"
    )


def meeting_at(host: str, port: int, job: str) -> MeetingPoint:
    """Return a meeting point with ``port`` and a few ports next to it, the same on every rank."""
    step = 1 if port + _NUM_PORTS <= 65536 else -1
    return MeetingPoint(host, tuple(port + step * i for i in range(_NUM_PORTS)), job)


def over_network(given: Given, launch: LaunchPlace, meeting: MeetingPoint) -> LaunchPlace:
    """Return ``launch`` with the back-end NCCL if MLX has CUDA, otherwise with the ring.

    Raises:
        DistributedError: this computer has more ranks than GPUs.
    """
    if not given.has_cuda:
        fact = "back-end ring: MLX here is a build without CUDA"
        return replace(launch, backend="ring", meeting=meeting, facts=(*launch.facts, fact))
    fact = "back-end nccl: MLX here is the CUDA build"
    exports = {} if launch.ranks_per_node > 1 else _own_gpu(given, launch)
    return replace(
        launch, backend="nccl", meeting=meeting, exports=exports, facts=(*launch.facts, fact)
    )


def _own_gpu(given: Given, launch: LaunchPlace) -> dict[str, str]:
    """Return the variable that gives this rank one of the visible GPUs.

    If only one is visible, the launcher has chosen it, and no variable is needed.
    """
    visible = given.env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if visible == [""]:
        return {"CUDA_VISIBLE_DEVICES": str(launch.local_rank)}
    if len(visible) == 1:
        return {}
    if launch.local_rank >= len(visible):
        raise DistributedError(
            f"{launch.local_size} processes here for {len(visible)} GPUs ({given.shown('CUDA_VISIBLE_DEVICES')})",
            code="ranks-exceed-gpus",
            hint="start a process a GPU: NCCL needs a GPU each",
        )
    return {"CUDA_VISIBLE_DEVICES": visible[launch.local_rank]}


def one_of_nodes(given: Given, launch: LaunchPlace, meeting: MeetingPoint) -> LaunchPlace:
    """Complete the launch of a platform that starts one process on each computer.

    ``ALLHANDS_RANKS_PER_NODE`` sets the number of ranks on each computer. With one computer there
    is no group, so the launcher becomes ``"single"``.

    Raises:
        DistributedError: the variable is not a number from 1, or there are more ranks than GPUs.
    """
    if "ALLHANDS_RANKS_PER_NODE" in given.env:
        count = given.number("ALLHANDS_RANKS_PER_NODE")
        if count < 1:
            raise DistributedError(
                f"ALLHANDS_RANKS_PER_NODE is {count}",
                code="variable-invalid",
                hint="set it to 1 or more",
            )
        fact = f"{count} rank{'s' * (count != 1)} a computer: ALLHANDS_RANKS_PER_NODE"
        launch = replace(launch, ranks_per_node=count, facts=(*launch.facts, fact))
    if launch.size == 1:
        n = launch.ranks_per_node
        notes = (f"{n} ranks are meant for this computer: allhands train -n {n}",) if n > 1 else ()
        return replace(launch, launcher="single", notes=launch.notes + notes)
    return over_network(given, replace(launch, node=launch.rank, num_nodes=launch.size), meeting)
