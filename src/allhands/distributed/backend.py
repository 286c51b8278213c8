"""The only module that touches ``mx.distributed``: connect, check, communicate.

MLX's back-ends fail silently: ``init()`` returns a group of one when it finds no peers, the ring
waits for ever for a peer that never comes, a missing operation throws in the middle of a run, and
two collectives on two streams mix their bytes. So the group's size is compared with the launcher's
number, one table has the capabilities of each back-end (:mod:`allhands.distributed.capabilities`),
and a process has one stream for all exchanges.
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
_LATER_S = 1.0  # whoever keeps a deadline from outside has the first word
DeviceKind = Literal["cpu", "gpu"]
_PERSONS = (
    "a person's"  # back-end of a group that MLX has made for a person: which one is not known
)


class Communicator(Protocol):
    """A group of processes, as training needs it; the tests' twins implement it too."""

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
    """A collective was asked for on another stream than the one that the process exchanges on."""


class ExchangeStream:
    """The only stream of a device for all exchanges of this process, with any group.

    Two collectives on two streams of a ring run at once and read each other's bytes: the sums are
    wrong, without an error. MPI, as MLX starts it, allows only one thread, and a stream of the CPU
    is a thread. So the first stream stays in use until :meth:`release`, even if MLX's default
    changes.

    Attributes:
        sent_bytes: bytes that this process had to send so far, over all groups.
        asleep: sockets whose threads sleep until data arrive.
    """

    def __init__(self, device: DeviceKind) -> None:
        # Instead of the thread's default.
        self.home: mx.Stream | None = None
        self._device = device
        self._used: mx.Stream | None = None
        self._thread = 0
        self.sent_bytes = 0
        self.asleep: list[int] = []

    def restart(self, *, apart: bool) -> None:
        """Start again in this thread; ``apart``: on another stream than the device's computations."""
        if not apart or self._thread not in (0, threading.get_ident()):
            self.home = None
        if apart and self.home is None:
            self.home = mx.new_stream(mx.default_device())
        self._used, self._thread = None, threading.get_ident()

    @property
    def used(self) -> mx.Stream | None:
        """The stream in use; ``None``: the next one will be."""
        return self._used

    def take(self, wanted: Any = None) -> mx.Stream:
        """Return the stream for the next collective; ``wanted``: by name, else the one in use.

        Raises:
            TwoStreamsError: another one is in use, or the one in use is another thread's.
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
        """Allow another stream within the block, for work that is computed before the block ends."""
        before, thread = self._used, self._thread
        self.release()
        try:
            yield
        finally:
            self.release()
            self._used, self._thread = before, thread


def resolved(stream: Any) -> mx.Stream:
    """Return the stream that MLX takes for a device, for a stream of every thread, or for a stream
    itself.
    """
    with mx.stream(stream):
        return mx.default_stream(getattr(stream, "device", stream))


@cache
def exchange_stream(device: DeviceKind) -> ExchangeStream:
    """Return the exchange stream of this process."""
    return ExchangeStream(device)


class MlxGroup:
    """A communicator over ``mx.distributed``; all of a process share one :class:`ExchangeStream` a
    device.

    Attributes:
        nccl: library by which :func:`start` makes several exchanges one kernel; ``None``: by none.
    """

    def __init__(self, group: Any, backend: str, stream: Any = None) -> None:
        """``stream``: of MLX, for what is exchanged; ``None``: the one in use, or the one that the
        back-end prefers.
        """
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
        """See :func:`sum_scatter`; where the back-end has it."""
        self._count(array, 1 / self.size)
        return mx.distributed.sum_scatter(
            self._taken(array), group=self.group, stream=self.exchange.take(self.stream)
        )

    def send(self, array: mx.array, peer: int) -> mx.array:
        """``array``, sent to a rank when it is computed; where the back-end has it."""
        require_way(self.backend, self.rank, peer, self.size)
        self.exchange.sent_bytes += array.nbytes
        return mx.distributed.send(
            self._taken(array), peer, group=self.group, stream=self.exchange.take(self.stream)
        )

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, peer: int) -> mx.array:
        """Return the array that a rank sends; where the back-end has it."""
        require_way(self.backend, self.rank, peer, self.size)
        return mx.distributed.recv(
            shape, dtype, peer, group=self.group, stream=self.exchange.take(self.stream)
        )

    def _taken(self, array: mx.array) -> mx.array:
        """``array`` as the host may send it, also while a GPU computes it.

        MLX's CUDA back-end copies an array to the host when the host takes it. It waits until the
        array has been computed only if that is handed out in the same evaluation, as what is made
        here is. It shares its memory.
        """
        return mx.contiguous(array, stream=mx.gpu) if self._fetches else array

    def _count(self, array: mx.array, part: float = 1.0) -> None:
        """Note what a ring sends for ``array``: a part of it to each of the others."""
        self.exchange.sent_bytes += round((self.size - 1) * part * array.nbytes)

    def split(self, members: Sequence[int]) -> MlxGroup:
        """Return the group of some ranks, in this order; called by all ranks together, each with
        those that it is among.

        Raises:
            DistributedError: MLX's group is another one.
        """
        place = members.index(self.rank)
        part = MlxGroup(self.group.split(members[0], place), self.backend, self.stream)
        if (part.rank, part.size) != (place, len(members)):
            told = f"rank {self.rank} is to be {place} of {len(members)}, and is {part.rank} of {part.size}"
            raise DistributedError(
                f"the {self.backend} back-end has made another group of {list(members)}: {told}",
                code="group-mismatch",
            )
        return part


class Collective(NamedTuple):
    """A collective that is still to be handed out, by :func:`start`.

    Attributes:
        given: what this rank gives.
        sent: the collective itself.
        array: its result for those that compute with it.
    """

    given: mx.array
    sent: mx.array
    array: mx.array


def collective(
    communicator: Communicator, call: Callable[[mx.array], mx.array], array: mx.array
) -> Collective:
    """Return a collective of ``array`` that is not handed out; ``call`` is the communicator's."""
    sent = call(array)
    if getattr(communicator, "nccl", None) is None:
        return Collective(array, sent, sent)
    # On the stream of the exchange, behind it; it keeps what is sent until then.
    return Collective(array, sent, mx.depends([sent], [array])[0])


def start(communicator: Communicator, exchanges: Sequence[Collective]) -> list[mx.array]:
    """Hand out collectives, in the same order on all ranks; returns their results.

    Over NCCL they may become one kernel. A product takes all multiprocessors of a GPU, so that each
    kernel of an exchange waits for the end of one, and is then in the way of the next one.

    Raises:
        DistributedError: NCCL cannot start them.
    """
    arrays, nccl = [each.array for each in exchanges], getattr(communicator, "nccl", None)
    if nccl is not None and len(exchanges) > 1:
        # Before the group: an exchange that this needs, of a norm say, would only be launched with
        # the others, after it was computed with.
        mx.async_eval([each.given for each in exchanges])
        nccl.ncclGroupStart()
        try:
            # MLX notes here that they are done, before NCCL launches them: only what comes behind
            # them on their stream may be waited for.
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
    """The NCCL that MLX has loaded; ``None``, if it has another name."""
    try:
        return ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return None


def device_of(backend: str) -> DeviceKind:
    """Return the device from which a back-end sends. A person's own group is NCCL's if MLX would
    have chosen NCCL.
    """
    chosen = (
        backend == _PERSONS
        and mx.cuda.is_available()
        and {"NCCL_HOST_IP", "NCCL_PORT"} <= os.environ.keys()
    )
    return "gpu" if backend == "nccl" or chosen else "cpu"


def of_group(group: Any) -> Communicator:
    """Return the communicator over a group of ``mx.distributed`` that a person has made."""
    return MlxGroup(group, _PERSONS) if group.size() > 1 else SingleProcess()


def on_stream(communicator: Communicator, stream: Any) -> Communicator:
    """Return the same ranks, exchanging on another stream; as it is, if there is no stream or no
    group of MLX's.

    Raises:
        TwoStreamsError: another one is in use: see :func:`moved_to`.
    """
    if stream is None or not isinstance(communicator, MlxGroup):
        return communicator
    return MlxGroup(communicator.group, communicator.backend, stream)


def sent_bytes(communicator: Communicator) -> int:
    """Bytes that this process was asked to send so far: of a sum 2 (N - 1) / N of its bytes, as a
    ring sends them.
    """
    world = getattr(communicator, "world", communicator)  # that exchanges for a group
    return world.exchange.sent_bytes if isinstance(world, MlxGroup) else 0


def finish_exchanges(communicator: Communicator) -> None:
    """Wait for all queued exchanges; then another stream, or thread, may exchange.

    The caller has evaluated every earlier collective, and calls no compiled function with a
    collective in it: on the earlier stream they would mix with those of the new one.
    """
    if isinstance(communicator, MlxGroup):
        communicator.exchange.release()


def moved_to(communicator: Communicator, stream: Any) -> Communicator:
    """Move all exchanges to a stream: :func:`on_stream` for every group from now on, after
    :func:`finish_exchanges`.
    """
    if stream is None:
        return communicator
    finish_exchanges(communicator)
    return on_stream(communicator, stream)


def exchanging_beside(communicator: Communicator) -> Communicator:
    """Return the same ranks, exchanging beside what a CPU computes; as it is, where only one thread
    may exchange.
    """
    if not isinstance(communicator, MlxGroup) or communicator.backend != "ring":
        return communicator
    if hostfile := os.environ.get("MLX_HOSTFILE"):
        communicator.exchange.asleep = wait_asleep(Path(hostfile))
    return moved_to(communicator, communicator.stream or mx.new_stream(mx.cpu))


def expect_bulk(communicator: Communicator, bulk: bool) -> None:
    """Expect a large array during other computations, or while waiting: sleeping threads are then
    woken less often.
    """
    world = getattr(communicator, "world", communicator)  # that exchanges for a group
    if isinstance(world, MlxGroup):
        receive_in_bulk(world.exchange.asleep, bulk)


def lent_stream(communicator: Communicator, stream: Any) -> AbstractContextManager[None] | None:
    """A block for what is computed on ``stream`` before it ends; ``None`` where that is, or
    becomes, the one in use.
    """
    if stream is None or not isinstance(communicator, MlxGroup):
        return None
    used = communicator.exchange.used
    return None if used is None or used == resolved(stream) else communicator.exchange.lent()


def sum_scatter(communicator: Communicator, array: mx.array) -> mx.array:
    """Return this rank's equal part of the sum of ``array`` over ranks; the number of ranks divides
    its first axis.
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
    """Join the group that the launcher has prepared and prove that it has the promised size.

    May wait for ever for a peer that never comes, without letting any Python thread run: the caller
    keeps a deadline from outside this process.

    Args:
        backend: ``"ring"``, ``"mpi"``, ``"nccl"``, ``"jaccl"`` or ``"none"``.
        size: processes that the launcher promised.
        rank: this process's number as the launcher has it.
        timeout_s: seconds to wait for a ring's neighbours, or for the first rank; without a
            ``watch`` a minute at most.
        watch: knows when all ranks listen, and waits for them.
        tried: True if all ranks are known to reach the first one.

    Raises:
        ConfigError: this MLX is built without the back-end.
        DistributedError: no connection, or a group of the wrong size.
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
    if backend == "nccl":  # whose first sum is computed on the GPU: afterwards it is too late
        launch_directly(os.environ, untouched=nothing_computed())
    group = initialise_group(backend, size)
    _check_size(group, backend, size, rank)
    exchange_stream(device_of(backend)).restart(apart=can(backend, "overlap"))
    communicator = MlxGroup(group, backend)
    check_first_sum(communicator)
    check_first_gathering(communicator)
    communicator.exchange.release()  # what was summed is here: whoever is first may choose
    return communicator


def check_first_sum(communicator: Communicator) -> None:
    """Every rank's own part must be in the sum, and nothing else.

    A sum of ones would not do: on computers with the same host name Open MPI gives each rank its
    own part twice.
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
    """Every rank's own part must be at its place: over a ring of JACCL, MLX has sent a wrong half."""
    own = mx.arange(communicator.rank * _GATHERED, (communicator.rank + 1) * _GATHERED)
    if not mx.array_equal(communicator.all_gather(own), mx.arange(communicator.size * _GATHERED)):
        problem = f"the first gathering over {communicator.size} processes is wrong"
        raise DistributedError(
            problem,
            code="collective-wrong",
            hint="update MLX on every computer, or use another --backend",
        )


def _first_rank(backend: str, environ: Mapping[str, str]) -> str | None:
    """Return the place where NCCL and JACCL call the first rank; ``None``: nowhere, or on this very
    computer.
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
    """Refuse a back-end that the installed MLX lacks, by a ConfigError."""
    if backend in _BUILDS and not mx.distributed.is_available(backend):
        raise ConfigError(
            f"MLX on {socket.gethostname()} is a build without {backend}",
            code="backend-not-built",
            where=f"--backend {backend}",
            hint=f"leave --backend out, so that a working one is chosen; {backend} is in {_BUILDS[backend]}",
        )


def initialise_group(backend: str, size: int) -> Any:
    """Return MLX's group; a DistributedError says why there is none."""
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
