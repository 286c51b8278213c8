"""The only module that touches ``mx.distributed``: connect, check, communicate.

MLX's back-ends fail quietly: ``init()`` gives a group of one when it finds no peers, the ring waits for
ever for a peer that never comes, and an operation that a back-end lacks throws in the middle of a run.
So the group's size is compared with what the launcher promised, and what each back-end can do is one table.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from allhands.accelerator import nothing_computed
from allhands.distributed.ring import Watch, take_turns
from allhands.errors import ConfigError, DistributedError
from allhands.kernels import launch_directly

_NEIGHBOURS_S = 60.0  # MLX itself waits for half a minute
_LATER_S = 1.0  # whoever keeps a deadline from outside has the first word

# Operations that each of MLX 0.32's back-ends really has (the others throw when called).
CAPABILITIES: dict[str, frozenset[str]] = {
    "none": frozenset({"all_sum", "all_max", "all_min", "all_gather"}),
    "ring": frozenset({"all_sum", "all_max", "all_min", "all_gather", "send_recv_neighbours"}),
    "mpi": frozenset({"all_sum", "all_max", "all_min", "all_gather", "send_recv", "split"}),
    "nccl": frozenset({"all_sum", "all_max", "all_min", "all_gather", "sum_scatter", "split"}),
    "jaccl": frozenset({"all_sum", "all_max", "all_min", "all_gather", "send_recv"}),
}


class Communicator(Protocol):
    """What training needs from a group of processes; :class:`Alone` and the tests' twins implement it too."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def backend(self) -> str: ...

    def all_sum(self, array: mx.array) -> mx.array:
        """Element-wise sum over ranks; every rank must pass the same shape and dtype."""
        ...

    def all_gather(self, array: mx.array) -> mx.array:
        """Ranks' arrays joined along the first axis."""
        ...


class Alone:
    """The communicator of a single process: every collective is the identity."""

    rank = 0
    size = 1
    backend = "none"

    def all_sum(self, array: mx.array) -> mx.array:
        return array

    def all_gather(self, array: mx.array) -> mx.array:
        return array


class MlxGroup:
    """A communicator over ``mx.distributed``."""

    def __init__(self, group: Any, backend: str, stream: Any = None) -> None:
        """``stream``: of MLX, for what is exchanged; ``None``: the one that the back-end prefers."""
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.backend = backend
        self.stream = stream

    def all_sum(self, array: mx.array) -> mx.array:
        return mx.distributed.all_sum(array, group=self.group, stream=self.stream)

    def all_gather(self, array: mx.array) -> mx.array:
        return mx.distributed.all_gather(array, group=self.group, stream=self.stream)


def of_group(group: Any) -> Communicator:
    """The communicator over a group of ``mx.distributed`` that a person has made."""
    return MlxGroup(group, "none") if group.size() > 1 else Alone()


def on_stream(communicator: Communicator, stream: Any) -> Communicator:
    """The same ranks, exchanging on another stream; as it is, if there is no stream or no group of MLX's."""
    if stream is None or not isinstance(communicator, MlxGroup):
        return communicator
    return MlxGroup(communicator.group, communicator.backend, stream)


def sum_scatter(communicator: Communicator, row: mx.array) -> mx.array:
    """This rank's equal part of the sum over ranks of ``row``, of one dimension that the number of ranks divides."""
    if isinstance(communicator, MlxGroup) and "sum_scatter" in CAPABILITIES[communicator.backend]:
        return mx.distributed.sum_scatter(row, group=communicator.group, stream=communicator.stream)
    each = row.size // communicator.size
    return communicator.all_sum(row)[communicator.rank * each : (communicator.rank + 1) * each]


def connect(
    backend: str, size: int, rank: int, timeout_s: float = _NEIGHBOURS_S, watch: Watch | None = None
) -> Communicator:
    """Join the group that the launcher has prepared and prove that it has the promised size.

    May wait for ever for a peer that never comes, without letting any Python thread run: the caller keeps
    a deadline from outside this process.

    Args:
        backend: ``"ring"``, ``"mpi"``, ``"nccl"``, ``"jaccl"`` or ``"none"``.
        size: processes that the launcher promised.
        rank: this process's number as the launcher has it.
        timeout_s: seconds for which a ring's neighbours are waited for; without a ``watch`` a minute at most.
        watch: knows when all ranks of a ring listen, and sees to it that they come.

    Raises:
        ConfigError: this MLX is built without the back-end.
        DistributedError: no connection, or a group of the wrong size.
    """
    if backend == "none":
        if size != 1:
            raise DistributedError(f"{size} processes were promised, but no back-end to connect them")
        return Alone()
    if backend == "ring" and size > 1 and (hostfile := os.environ.get("MLX_HOSTFILE")):
        longest_s = _NEIGHBOURS_S if watch is None else timeout_s + _LATER_S
        take_turns(Path(hostfile), rank, min(timeout_s + _LATER_S, longest_s), watch)
    if backend == "nccl":  # whose first sum is computed on the GPU: afterwards it is too late
        launch_directly(os.environ, untouched=nothing_computed())
    group = _initialise(backend, size)
    _check_size(group, backend, size, rank)
    # NCCL sends from the GPU: on a stream of its own, beside what is computed, and all of it in one order.
    communicator = MlxGroup(group, backend, mx.new_stream(mx.default_device()) if backend == "nccl" else None)
    _check_first_sum(communicator)
    return communicator


def _check_first_sum(communicator: Communicator) -> None:
    """Every rank's own part must be in the sum, and nothing else.

    A sum of ones would not do: on computers with the same host name Open MPI gives each rank its own part twice.
    """
    ranks = mx.repeat(mx.arange(1, communicator.size + 1)[:, None], _CHECKED, axis=1)
    total = communicator.all_sum(mx.where(ranks == communicator.rank + 1, ranks, 0))
    if not mx.array_equal(total, ranks):
        hint = _SAME_NAME if communicator.backend == "mpi" else _HINTS[communicator.backend]
        raise DistributedError(f"the first sum over {communicator.size} processes is wrong", hint=hint)


def _initialise(backend: str, size: int) -> Any:
    if backend in _BUILDS and not mx.distributed.is_available(backend):
        raise ConfigError(
            f"MLX on {socket.gethostname()} is a build without {backend}",
            where=f"--backend {backend}",
            hint=f"leave --backend out, so that one is chosen that works; {backend} is in {_BUILDS[backend]}",
        )
    try:
        return mx.distributed.init(strict=True, backend=backend)
    except (RuntimeError, ValueError) as error:
        problem = f"the launcher promised {size} processes, but the {backend} back-end could not connect: {error}"
        raise DistributedError(problem, hint=_HINTS[backend]) from None


_BUILDS = {"nccl": "MLX for NVIDIA GPUs (pip install 'mlx[cuda13]')", "jaccl": "MLX for macOS"}
_CHECKED = 256  # numbers a rank
_SAME_NAME = "give every computer a host name of its own (see `hostname`): Open MPI takes equal names for one computer"
_HINTS = {
    "ring": "check that every host of the hostfile answers at its address and that the ports are free",
    "mpi": "install Open MPI (pip install 'allhands[mpi]') and start with mpirun, or use --backend ring",
    "nccl": "check that MLX is the CUDA build and that every rank sees its GPU (nvidia-smi)",
    "jaccl": "check that RDMA over Thunderbolt is enabled on every Mac",
}


def _check_size(group: Any, backend: str, size: int, rank: int) -> None:
    if group.size() != size:
        raise DistributedError(
            f"the launcher promised {size} processes, but the {backend} group has {group.size()}: "
            "refusing to train alone",
            where=f"rank {rank}",
            hint=_HINTS[backend],
        )
    if group.rank() != rank:
        raise DistributedError(
            f"the launcher says this is rank {rank}, the {backend} group says {group.rank()}",
            hint="two launchers are mixed: start with only one of mpirun, mlx.launch or allhands -n",
        )
