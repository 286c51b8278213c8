"""The checked group of processes for a training loop of your own, and gradients averaged over it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from allhands.cluster.environment import LaunchPlace, launch_here
from allhands.cluster.join import join_here
from allhands.errors import ConfigError, DistributedError
from allhands.io.formatting import counted

if TYPE_CHECKING:
    import mlx.core as mx

    from allhands.distributed.backend import Communicator

G = TypeVar("G")
_BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class World:
    """The processes that train together, and this process's place among them; :func:`init` returns
    it.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes on all computers.
        local_rank: number of this process among those of this computer.
        local_size: number of processes on this computer.
        backend: library that connects them: ``"ring"``, ``"mpi"``, ``"nccl"``, ``"jaccl"``, or
            ``"none"`` for one.
        launcher: program that started them: ``"allhands"``, ``"mlx.launch"``, ``"openmpi"``, ...,
            or ``"single"``.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    backend: str
    launcher: str
    communicator: Communicator = field(repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """True if this is rank 0, which prints and writes files for all."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """True if there is no other process."""
        return self.size == 1

    @property
    def group(self) -> Any:
        """The group of ``mx.distributed`` for MLX's own functions; ``None`` if this process is
        alone.
        """
        return getattr(self.communicator, "group", None)

    def by_itself(self) -> World:
        """Return a world with this process only, for work without the other processes."""
        from allhands.distributed.backend import SingleProcess

        return World(0, 1, 0, 1, "none", self.launcher, SingleProcess())

    def all_sum(self, value: mx.array | float) -> mx.array:
        """Return the element-wise sum over ranks; every rank must call it, with the same shape and
        dtype.
        """
        return self.communicator.all_sum(_array(value))

    def all_gather(self, value: mx.array | float) -> mx.array:
        """Return the arrays of all ranks joined along the first axis; a number counts as an array
        of one.
        """
        array = _array(value)
        return self.communicator.all_gather(array.reshape(1) if array.ndim == 0 else array)

    def mean(self, value: mx.array | float, weight: mx.array | float = 1.0) -> mx.array:
        """Return the weighted mean over ranks in float32; every rank must call it.

        ``weight`` is for example the rank's number of tokens. The value of a rank with weight 0
        does not matter. If all weights are 0, the mean is 0.
        """
        import mlx.core as mx

        share = _array(weight).astype(mx.float32)
        array = _array(value).astype(mx.float32)
        total = self.all_sum(mx.where(share > 0, array * share, mx.zeros_like(array)))
        weights = self.all_sum(share)
        return mx.where(
            weights > 0, total / mx.where(weights > 0, weights, 1.0), mx.zeros_like(total)
        )

    def barrier(self) -> None:
        """Wait until every rank has called this method.

        Afterwards another thread may use the group, if all earlier arrays are computed.
        """
        from allhands.distributed.backend import finish_exchanges
        from allhands.distributed.reduce import barrier

        barrier(self.communicator)
        finish_exchanges(self.communicator)


def init(size: int | None = None) -> World:
    """Return the world of this process. The first call joins the ranks and checks the group; every
    rank must make it.

    ``allhands launch``, ``mpirun``, ``mlx.launch``, ``srun``, ``torchrun`` and cloud platforms are
    recognised by the variables that they set. The group is accepted only after a correct sum over
    all ranks, so a program that was started with four processes never trains alone by mistake.
    Without a launcher the world has one process.

    Args:
        size: the required number of processes; ``None``: any.

    Raises:
        ConfigError: there are more or fewer than ``size`` processes.
        DistributedError: the launcher's variables contradict each other, the ranks cannot connect,
            or the group has another size than the launcher has promised.
    """
    launch = launch_here()
    if size is not None and size != launch.size:
        raise ConfigError(
            f"this program wants {size} process{'es' * (size != 1)}, but there {_are(launch)}",
            code="launcher-conflict",
            where="allhands.init",
            hint=f"start it with allhands launch -n {size} -- python SCRIPT, or leave size out",
        )
    return world_of(launch, join_here())


def world_of(launch: LaunchPlace, communicator: Communicator) -> World:
    """Return the world of a group that this process has joined.

    Raises:
        DistributedError: the group has another size than ``launch``.
    """
    if communicator.size != launch.size:
        raise DistributedError(
            f"{launch.launcher} promised {counted(launch.size, 'process', 'processes')}, but the group has "
            f"{communicator.size}",
            code="world-size-mismatch",
            where=f"rank {launch.rank}",
            hint="start with one launcher only, and call allhands.init() before anything of mx.distributed",
        )
    return World(
        launch.rank,
        launch.size,
        launch.local_rank,
        launch.local_size,
        communicator.backend,
        launch.launcher,
        communicator,
    )


def _check_tokens(num_tokens: object, reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise _wrong(
            f"reduction={reduction!r}",
            "use 'mean' or 'sum', as the loss is over this rank's tokens",
            code="value-unknown",
        )
    if num_tokens is None and reduction == "sum":
        raise _wrong(
            "a sum over tokens needs their number", "give num_tokens=...", code="argument-missing"
        )
    if isinstance(num_tokens, int | float) and not 0 <= num_tokens < math.inf:
        raise _wrong(
            f"num_tokens={num_tokens}",
            "give the number of this rank's tokens: 0 or more",
            code="value-out-of-range",
        )


def average_gradients(
    gradients: G,
    group: Any = None,
    all_reduce_size: int = _BUCKET_BYTES,
    communication_stream: Any = None,
    *,
    communication_type: mx.Dtype | None = None,
    num_tokens: float | mx.array | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> G:
    """Average gradients over ranks; a replacement of ``mlx.nn.average_gradients`` with the same arguments.

    Without ``num_tokens`` it returns the plain mean of the ranks, as MLX does: correct if all ranks have the same
    number of samples. With ``num_tokens`` every *token* has the same weight, as if one process had computed the batch.

    Args:
        gradients: tree of arrays, the gradients of this rank's loss; the same structure on every
            rank.
        group: a group of ``mx.distributed``, or a :class:`World`; ``None``: the world of
            :func:`init`.
        all_reduce_size: approximate bytes of a bucket, in which arrays are exchanged together; 0 or
            less: each array is exchanged alone.
        communication_stream: MLX stream of the sums; ``None``: the stream in use, or the one that
            the back-end prefers. With another stream than the one in use the call waits, because
            two exchanges at once would mix their bytes.
        communication_type: dtype of the exchanged gradients, such as ``mx.bfloat16`` for half the bytes of float32;
            ``None``: their own dtype (with ``num_tokens`` float32).
        num_tokens: trained tokens (or samples) on this rank; with 0 its gradients do not matter. It
            may be an array that is not computed yet.
        reduction: with ``num_tokens``: ``"mean"`` if this rank's loss is the mean over its tokens
            (as in most loops), or ``"sum"`` if it is their sum.

    Returns:
        Tree of the same type, structure and dtypes.

    Raises:
        ConfigError: an argument has a wrong type or value.
        DistributedError: as :func:`init`.

    Examples:
        >>> (loss, ntoks), grads = loss_and_grad(model, batch)
        >>> grads = allhands.average_gradients(grads, num_tokens=ntoks)
        >>> optimizer.update(model, grads)
    """
    import mlx.core as mx

    from allhands.distributed.backend import lent_stream, of_group
    from allhands.distributed.reduce import Exchange, mean_of_ranks, mean_of_tokens

    if isinstance(communication_stream, mx.Dtype):  # earlier versions of MLX have the dtype here
        hint = "write communication_type=... before it"
        raise _wrong("communication_stream is a dtype", hint, code="argument-invalid")
    if communication_type is not None and not mx.issubdtype(communication_type, mx.floating):
        what = f"{communication_type} cannot hold gradients"
        raise _wrong(what, "use mx.float32, mx.bfloat16 or mx.float16", code="value-unknown")
    _check_tokens(num_tokens, reduction)
    if isinstance(group, World):
        communicator = group.communicator
    else:
        communicator = init().communicator if group is None else of_group(group)
    exchange = Exchange(all_reduce_size, communication_type, communication_stream)

    def averaged() -> G:
        if num_tokens is None:
            return mean_of_ranks(communicator, gradients, exchange)
        return mean_of_tokens(communicator, gradients, num_tokens, reduction, exchange)

    lent = lent_stream(communicator, communication_stream)
    if lent is None:
        return averaged()
    with lent:  # computed at once, so that no other exchange runs at the same time
        try:
            mx.eval(gradients, num_tokens)
        except ValueError:  # MLX raises it for arrays that are only traced
            hint = "leave communication_stream out, or give the stream that the first call gave"
            what = "another stream than the one in use, within mx.compile"
            raise _wrong(what, hint, code="stream-in-compile") from None
        found = averaged()
        mx.eval(found)
        return found


def _wrong(what: str, hint: str, *, code: str) -> ConfigError:
    return ConfigError(what, code=code, where="average_gradients", hint=hint)


def _are(launch: LaunchPlace) -> str:
    count = f"{'is' if launch.size == 1 else 'are'} {launch.size}"
    return f"{count} ({launch.reason})" if launch.reason else count


def _array(value: mx.array | float) -> mx.array:
    import mlx.core as mx

    return value if isinstance(value, mx.array) else mx.array(value, dtype=mx.float32)
