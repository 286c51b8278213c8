"""Connection of ranks, checks of the connection, and communicators; only this module uses
``mx.distributed``.

MLX's back-ends often fail without an error, or too late. ``init()`` returns a group of one when it
finds no peers. The ring waits for ever for a peer that never comes. A missing operation fails in
the middle of a run. Two collectives on two streams mix their bytes.

So the group's size is compared with the number that the launcher has given. One table has the
capabilities of each back-end (:mod:`allhands.distributed.capabilities`). And a process has one
stream for all exchanges.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import mlx.core as mx

from allhands.distributed.capabilities import can, require_way
from allhands.distributed.ring import Watch, reach_first, receive_in_bulk, take_turns, wait_asleep
from allhands.errors import ConfigError, DistributedError
from allhands.runtime.accelerator import nothing_computed
from allhands.runtime.jit_cache import launch_directly, launches_directly

_NEIGHBOURS_S = 60.0  # MLX itself waits for half a minute
_LATER_S = 1.0  # added to a timeout, so that a supervisor with the same deadline acts first
DeviceKind = Literal["cpu", "gpu"]
_PERSONS = "a person's"  # name for the unknown back-end of a group that the user has made with MLX


class Communicator(Protocol):
    """A group of processes with collectives; tests have implementations in memory."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def backend(self) -> str: ...

    def all_sum(self, array: mx.array) -> mx.array:
        """Return the element-wise sum over ranks; every rank must pass the same shape and dtype."""
        ...

    def all_gather(self, array: mx.array) -> mx.array:
        """Return the arrays of all ranks joined along the first axis."""
        ...


class SingleProcess:
    """The communicator of a single process: every collective is the identity."""

    rank = 0
    size = 1
    backend = "none"

    def all_sum(self, array: mx.array) -> mx.array:
        return array

    def all_gather(self, array: mx.array) -> mx.array:
        return array


class TwoStreamsError(DistributedError):
    """Raised for a collective on another stream than the process's exchange stream."""


class ExchangeStream:
    """The only stream of a device for all exchanges of this process, with any group.

    Two collectives on two streams of a ring run at once and read each other's bytes: the sums are
    wrong, without an error. MPI, as MLX starts it, allows only one thread, and a stream of the CPU
    is a thread. So the first stream stays in use until :meth:`release`, even if MLX's default
    changes.

    Attributes:
        home: stream to use in place of the thread's default; ``None``: the default.
        sent_bytes: bytes that this process had to send so far, over all groups.
        asleep: descriptors of sockets whose threads sleep until data arrive.
    """

    def __init__(self, device: DeviceKind) -> None:
        self.home: mx.Stream | None = None
        self._device = device
        self._used: mx.Stream | None = None
        self._thread = 0
        self.sent_bytes = 0
        self.asleep: list[int] = []

    def restart(self, *, apart: bool) -> None:
        """Start again in this thread; ``apart``: on a stream apart from the computations'."""
        if not apart or self._thread not in (0, threading.get_ident()):
            self.home = None
        if apart and self.home is None:
            self.home = mx.new_stream(mx.default_device())
        self._used, self._thread = None, threading.get_ident()

    @property
    def used(self) -> mx.Stream | None:
        """The stream in use; ``None``: the next collective chooses it."""
        return self._used

    def take(self, wanted: Any = None) -> mx.Stream:
        """Return the stream for the next collective, which is then in use.

        Args:
            wanted: the stream to use; ``None``: the stream in use, or the default.

        Raises:
            TwoStreamsError: another stream, or a stream of another thread, is in use.
        """
        thread = threading.get_ident()
        if wanted is not None:
            stream = resolved(wanted)
        elif self._used is not None and self._thread == thread:
            stream = self._used
        else:
            stream = self.home or mx.default_stream(getattr(mx, self._device))
        if self._used is not None and stream != self._used:
            raise TwoStreamsError(
                f"a collective over {stream}, while this process exchanges over {self._used}: their bytes would mix",
                code="two-streams",
                hint="exchange in one thread and over one stream; after world.barrier() it may be another",
            )
        self._used, self._thread = stream, thread
        return stream

    def release(self) -> None:
        """Wait for all queued work on the stream in use; then another stream may be used."""
        if self._used is not None:
            mx.synchronize(self._used)
        self._used = None

    @contextmanager
    def lent(self) -> Generator[None]:
        """Allow another stream in a ``with`` block, for work that is computed before its end."""
        before, thread = self._used, self._thread
        self.release()
        try:
            yield
        finally:
            self.release()
            self._used, self._thread = before, thread


def resolved(stream: Any) -> mx.Stream:
    """Return MLX's stream for a device, for a thread-local stream, or for a stream itself."""
    with mx.stream(stream):
        return mx.default_stream(getattr(stream, "device", stream))


@cache
def exchange_stream(device: DeviceKind) -> ExchangeStream:
    """Return the exchange stream of this process."""
    return ExchangeStream(device)


class MlxGroup:
    """A communicator over ``mx.distributed``.

    All groups of a process share one :class:`ExchangeStream` for each device.

    Attributes:
        nccl: NCCL's library, by which :func:`start` joins several exchanges into one kernel;
            ``None``: exchanges are not joined.
    """

    def __init__(self, group: Any, backend: str, stream: Any = None) -> None:
        """``stream``: MLX stream for exchanges; ``None``: the stream in use, or the back-end's."""
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.backend = backend
        self.scatters = can(backend, "sum_scatter")
        self.nccl = _loaded_nccl() if backend == "nccl" and launches_directly() else None
        self.exchange = exchange_stream(device_of(backend))
        on_cuda = mx.cuda.is_available() and mx.default_device().type == mx.DeviceType.gpu
        self._fetches = on_cuda and device_of(backend) == "cpu"
        self.stream = self.exchange.home if stream is None else stream
        if self.stream is not None:
            self.exchange.take(self.stream)

    def all_sum(self, array: mx.array) -> mx.array:
        self._count(array, 2 / self.size)
        return mx.distributed.all_sum(
            self._taken(array), group=self.group, stream=self.exchange.take(self.stream)
        )

    def all_gather(self, array: mx.array) -> mx.array:
        self._count(array)
        return mx.distributed.all_gather(
            self._taken(array), group=self.group, stream=self.exchange.take(self.stream)
        )

    def all_max(self, array: mx.array) -> mx.array:
        self._count(array, 2 / self.size)
        return mx.distributed.all_max(
            self._taken(array), group=self.group, stream=self.exchange.take(self.stream)
        )

    def sum_scatter(self, array: mx.array) -> mx.array:
        """Do :func:`sum_scatter`; only for back-ends that have it."""
        self._count(array, 1 / self.size)
        return mx.distributed.sum_scatter(
            self._taken(array), group=self.group, stream=self.exchange.take(self.stream)
        )

    def send(self, array: mx.array, peer: int) -> mx.array:
        """Return ``array``, which is sent to a rank when the result is computed.

        Raises:
            ConfigError: the back-end cannot send to that rank.
        """
        require_way(self.backend, self.rank, peer, self.size)
        self.exchange.sent_bytes += array.nbytes
        return mx.distributed.send(
            self._taken(array), peer, group=self.group, stream=self.exchange.take(self.stream)
        )

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, peer: int) -> mx.array:
        """Return the array that a rank sends.

        Raises:
            ConfigError: the back-end cannot receive from that rank.
        """
        require_way(self.backend, self.rank, peer, self.size)
        return mx.distributed.recv(
            shape, dtype, peer, group=self.group, stream=self.exchange.take(self.stream)
        )

    def _taken(self, array: mx.array) -> mx.array:
        """Return ``array`` in a form that the host may send, also while a GPU computes it.

        MLX's CUDA back-end copies an array to the host when the host takes it. It waits for the
        computation of the array only if that is part of the same evaluation, as the array made here
        is. The memory is shared.
        """
        return mx.contiguous(array, stream=mx.gpu) if self._fetches else array

    def _count(self, array: mx.array, part: float = 1.0) -> None:
        """Count the bytes that a ring sends for ``array``: ``part`` of it for each other rank."""
        self.exchange.sent_bytes += round((self.size - 1) * part * array.nbytes)

    def split(self, members: Sequence[int]) -> MlxGroup:
        """Return the group of the ranks ``members``, in this order.

        All ranks call this together, each with the members of its own group.

        Raises:
            DistributedError: MLX has made another group.
        """
        place = members.index(self.rank)
        group: Any = self.group.split(members[0], place)
        if self.backend == "mpi":
            # MLX may destroy a group after it has finalised MPI, which then aborts the process. One
            # more reference keeps it; MPI's finaliser frees what is left.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        part = MlxGroup(group, self.backend, self.stream)
        if (part.rank, part.size) != (place, len(members)):
            told = f"rank {self.rank} is to be {place} of {len(members)}, and is {part.rank} of {part.size}"
            raise DistributedError(
                f"the {self.backend} back-end has made another group of {list(members)}: {told}",
                code="group-mismatch",
            )
        return part


class Collective(NamedTuple):
    """A lazy collective that :func:`start` will hand out to MLX.

    Attributes:
        given: this rank's input.
        sent: the lazy result of the collective.
        array: the same result, for computations with it.
    """

    given: mx.array
    sent: mx.array
    array: mx.array


def collective(
    communicator: Communicator, call: Callable[[mx.array], mx.array], array: mx.array
) -> Collective:
    """Return a lazy collective of ``array``; ``call`` is a method of the communicator."""
    sent = call(array)
    if getattr(communicator, "nccl", None) is None:
        return Collective(array, sent, sent)
    # The result depends on the exchange and keeps its input alive until the exchange is done.
    return Collective(array, sent, mx.depends([sent], [array])[0])


def start(communicator: Communicator, exchanges: Sequence[Collective]) -> list[mx.array]:
    """Hand out collectives to MLX, in the same order on all ranks; return their results.

    Over NCCL they may become one kernel. A matrix product takes all multiprocessors of a GPU. So
    each kernel of an exchange waits for the end of a product, and then delays the next product.

    Raises:
        DistributedError: NCCL cannot start them together.
    """
    arrays, nccl = [each.array for each in exchanges], getattr(communicator, "nccl", None)
    if nccl is not None and len(exchanges) > 1:
        # Inputs come before the group: an exchange that an input needs, such as that of a norm,
        # would otherwise be launched with the others, after computations with its result.
        mx.async_eval([each.given for each in exchanges])
        nccl.ncclGroupStart()
        try:
            # MLX takes the exchanges for done here, before NCCL launches them. So only work after
            # them on the same stream may wait for them.
            mx.async_eval([each.sent for each in exchanges])
        finally:
            failed = nccl.ncclGroupEnd()
        if failed:
            raise DistributedError(
                f"NCCL cannot start {len(exchanges)} exchanges together: its error {failed}",
                code="exchange-not-started",
                hint="NCCL_DEBUG=WARN has it print the reason",
            )
    mx.async_eval(arrays)
    return arrays


def _loaded_nccl() -> Any:
    """Return the NCCL library that MLX has loaded; ``None`` if it has another name."""
    try:
        return ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return None


def device_of(backend: str) -> DeviceKind:
    """Return the device from which a back-end sends.

    A user's own group is taken for NCCL's if MLX would have chosen NCCL.
    """
    chosen = (
        backend == _PERSONS
        and mx.cuda.is_available()
        and {"NCCL_HOST_IP", "NCCL_PORT"} <= os.environ.keys()
    )
    return "gpu" if backend == "nccl" or chosen else "cpu"


def of_group(group: Any) -> Communicator:
    """Return the communicator over a group of ``mx.distributed`` that the user has made."""
    return MlxGroup(group, _PERSONS) if group.size() > 1 else SingleProcess()


def on_stream(communicator: Communicator, stream: Any) -> Communicator:
    """Return a communicator for the same ranks that exchanges on ``stream``.

    The communicator itself is returned if ``stream`` is ``None`` or it is not MLX's.

    Raises:
        TwoStreamsError: another stream is in use; see :func:`moved_to`.
    """
    if stream is None or not isinstance(communicator, MlxGroup):
        return communicator
    return MlxGroup(communicator.group, communicator.backend, stream)


def sent_bytes(communicator: Communicator) -> int:
    """Return the bytes that this process had to send so far, counted as a ring sends them.

    A sum of an array over N ranks counts 2 (N - 1) / N of the array's bytes.
    """
    world = getattr(communicator, "world", communicator)  # the world that exchanges for a group
    return world.exchange.sent_bytes if isinstance(world, MlxGroup) else 0


def finish_exchanges(communicator: Communicator) -> None:
    """Wait for all queued exchanges; then another stream, or thread, may exchange.

    The caller must have evaluated every earlier collective, and must not call compiled functions
    with a collective in them: these stay on the earlier stream, and their bytes would mix with
    those of the new one.
    """
    if isinstance(communicator, MlxGroup):
        communicator.exchange.release()


def moved_to(communicator: Communicator, stream: Any) -> Communicator:
    """Finish all exchanges, then move them to ``stream``; ``None``: nothing is done.

    Returns the communicator on that stream, see :func:`on_stream`.
    """
    if stream is None:
        return communicator
    finish_exchanges(communicator)
    return on_stream(communicator, stream)


def exchanging_beside(communicator: Communicator) -> Communicator:
    """Return a communicator that exchanges beside a CPU's computations, on a stream of its own.

    Only the ring allows this; other communicators are returned unchanged.
    """
    if not isinstance(communicator, MlxGroup) or communicator.backend != "ring":
        return communicator
    if hostfile := os.environ.get("MLX_HOSTFILE"):
        communicator.exchange.asleep = wait_asleep(Path(hostfile))
    return moved_to(communicator, communicator.stream or mx.new_stream(mx.cpu))


def expect_bulk(communicator: Communicator, bulk: bool) -> None:
    """Tell the ring's sleeping threads whether a large array is coming, beside computations.

    They are then woken less often, see :func:`receive_in_bulk`.
    """
    world = getattr(communicator, "world", communicator)  # the world that exchanges for a group
    if isinstance(world, MlxGroup):
        receive_in_bulk(world.exchange.asleep, bulk)


def lent_stream(communicator: Communicator, stream: Any) -> AbstractContextManager[None] | None:
    """Return a context in which ``stream`` may be used, for work that is computed before its end.

    ``None`` if no context is needed: ``stream`` is, or will be, the one in use.
    """
    if stream is None or not isinstance(communicator, MlxGroup):
        return None
    used = communicator.exchange.used
    return None if used is None or used == resolved(stream) else communicator.exchange.lent()


def sum_scatter(communicator: Communicator, array: mx.array) -> mx.array:
    """Return this rank's equal part, along the first axis, of the sum of ``array`` over ranks.

    Back-ends without this operation sum the whole array.

    Raises:
        ValueError: the number of ranks does not divide the first axis.
    """
    if communicator.size > 1 and array.shape[0] % communicator.size:
        raise ValueError(
            f"{communicator.size} ranks cannot have equal parts of an array of shape {array.shape}"
        )
    if isinstance(communicator, MlxGroup) and communicator.scatters:
        return communicator.sum_scatter(array)
    each = array.shape[0] // communicator.size
    return communicator.all_sum(array)[communicator.rank * each : (communicator.rank + 1) * each]


def connect(
    backend: str,
    size: int,
    rank: int,
    timeout_s: float = _NEIGHBOURS_S,
    watch: Watch | None = None,
    *,
    tried: bool = False,
) -> Communicator:
    """Join the group that the launcher has prepared, and check its size and first collectives.

    MLX may wait for ever for a peer that never comes, and lets no Python thread run meanwhile. So
    the caller must keep a deadline from outside this process.

    Args:
        backend: ``"ring"``, ``"mpi"``, ``"nccl"``, ``"jaccl"`` or ``"none"``.
        size: number of processes that the launcher promised.
        rank: this process's number as the launcher has it.
        timeout_s: seconds to wait for a ring's neighbours, or for the first rank; without a
            ``watch`` a minute at most.
        watch: knows when all ranks listen; ``None``: nobody knows.
        tried: True if all ranks are known to reach the first one.

    Raises:
        ConfigError: this MLX is built without the back-end.
        DistributedError: there is no connection, the group has the wrong size, or a collective
            gives wrong numbers.
    """
    if backend == "none":
        if size != 1:
            raise DistributedError(
                f"{size} processes were promised, but no back-end to connect them",
                code="variables-incomplete",
            )
        return SingleProcess()
    check_build(backend)
    wait_s = timeout_s + _LATER_S if watch is not None else min(timeout_s + _LATER_S, _NEIGHBOURS_S)
    if backend == "ring" and size > 1 and (hostfile := os.environ.get("MLX_HOSTFILE")):
        take_turns(Path(hostfile), rank, wait_s, watch)
    elif size > 1 and not tried and (first := _first_rank(backend, os.environ)):
        reach_first(first, rank, size, wait_s, watch)
    if backend == "nccl":  # its first sum is computed on the GPU; afterwards this is too late
        launch_directly(os.environ, untouched=nothing_computed())
    group = initialise_group(backend, size)
    _check_size(group, backend, size, rank)
    exchange_stream(device_of(backend)).restart(apart=can(backend, "overlap"))
    communicator = MlxGroup(group, backend)
    check_first_sum(communicator)
    check_first_gathering(communicator)
    communicator.exchange.release()  # the checks are computed: the next user chooses the stream
    return communicator


def check_first_sum(communicator: Communicator) -> None:
    """Check that a first sum has every rank's own part, and nothing else.

    A sum of ones would not suffice: on computers with the same host name Open MPI gives each rank
    its own part twice.

    Raises:
        DistributedError: the sum is wrong.
    """
    ranks = mx.repeat(mx.arange(1, communicator.size + 1)[:, None], _CHECKED, axis=1)
    total = communicator.all_sum(mx.where(ranks == communicator.rank + 1, ranks, 0))
    if not mx.array_equal(total, ranks):
        hint = _SAME_NAME if communicator.backend == "mpi" else _HINTS[communicator.backend]
        raise DistributedError(
            f"the first sum over {communicator.size} processes is wrong",
            code="collective-wrong",
            hint=hint,
        )


def check_first_gathering(communicator: Communicator) -> None:
    """Check that a first all-gather has every rank's part at its place.

    Over a ring of JACCL, versions of MLX have sent a wrong half.

    Raises:
        DistributedError: the gathered array is wrong.
    """
    own = mx.arange(communicator.rank * _GATHERED, (communicator.rank + 1) * _GATHERED)
    if not mx.array_equal(communicator.all_gather(own), mx.arange(communicator.size * _GATHERED)):
        problem = f"the first gathering over {communicator.size} processes is wrong"
        raise DistributedError(
            problem,
            code="collective-wrong",
            hint="update MLX on every computer, or use another --backend",
        )


def _first_rank(backend: str, environ: Mapping[str, str]) -> str | None:
    """Return the address and port at which NCCL or JACCL calls the first rank; ``None`` for other
    back-ends, or if that is this computer.
    """
    if backend == "nccl":
        address, port = environ.get("NCCL_HOST_IP", ""), environ.get("NCCL_PORT", "")
    elif backend == "jaccl":
        address, _, port = environ.get("MLX_JACCL_COORDINATOR", "").rpartition(":")
    else:
        return None
    here = address.startswith("127.") or address in ("", "localhost", "::1", "0.0.0.0")
    return None if here or not port.isdecimal() else f"{address}:{port}"


def check_build(backend: str) -> None:
    """Refuse a back-end that the installed MLX lacks (ConfigError)."""
    if backend in _BUILDS and not mx.distributed.is_available(backend):
        raise ConfigError(
            f"MLX on {socket.gethostname()} is a build without {backend}",
            code="backend-not-built",
            where=f"--backend {backend}",
            hint=f"leave --backend out, so that a working one is chosen; {backend} is in {_BUILDS[backend]}",
        )


def initialise_group(backend: str, size: int) -> Any:
    """Return MLX's group of all ranks (DistributedError if it cannot be made)."""
    try:
        return mx.distributed.init(strict=True, backend=backend)
    except (RuntimeError, ValueError) as error:
        text = f"the launcher promised {size} processes, but the {backend} back-end could not connect: {error}"
        raise DistributedError(text, code="backend-not-connected", hint=_HINTS[backend]) from None


_BUILDS = {"nccl": "MLX for NVIDIA GPUs (pip install 'mlx[cuda13]')", "jaccl": "MLX for macOS"}
_CHECKED = 256  # numbers a rank
_GATHERED = 1 << 15
_SAME_NAME = "give every computer a host name of its own (see `hostname`): Open MPI takes equal names for one computer"
_HINTS = {
    "ring": "check that every host of the hostfile answers at its address and that the ports are free",
    "mpi": "install Open MPI (pip install 'allhands[mpi]'), or use --backend ring",
    "nccl": "check that MLX is the CUDA build and that every rank sees its GPU (nvidia-smi)",
    "jaccl": "check that RDMA over Thunderbolt is enabled on every Mac",
}


def _check_size(group: Any, backend: str, size: int, rank: int) -> None:
    if group.size() != size:
        raise DistributedError(
            f"the launcher promised {size} processes, but the {backend} group has {group.size()}: "
            "refusing to train alone",
            code="world-size-mismatch",
            where=f"rank {rank}",
            hint=_HINTS[backend],
        )
    if group.rank() != rank:
        raise DistributedError(
            f"the launcher says this is rank {rank}, the {backend} group says {group.rank()}",
            code="rank-mismatch",
            hint="two launchers are mixed: start with only one of mpirun, mlx.launch or allhands -n",
        )
