"""For a person's own loop: who takes part in the training, checked, and gradients averaged over them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from allhands.cluster.environment import Launch, launch_here
from allhands.cluster.join import join_here
from allhands.errors import ConfigError, DistributedError

if TYPE_CHECKING:
    import mlx.core as mx

    from allhands.distributed.backend import Communicator

_BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class World:
    """The processes that train together, and this one's place among them; :func:`init` gives it.

    Attributes:
        rank: number of this process, from 0.
        size: processes of all computers.
        local_rank: number of this process among those of this computer.
        local_size: processes of this computer.
        backend: what connects them: ``"ring"``, ``"mpi"``, ``"nccl"``, ``"jaccl"``, or ``"none"`` for one process.
        launcher: who has started them: ``"allhands"``, ``"mlx.launch"``, ``"openmpi"``, ..., or ``"single"``.
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
        """The group of ``mx.distributed`` for MLX's own functions; ``None`` if alone, which they take for no group."""
        return getattr(self.communicator, "group", None)

    def by_itself(self) -> World:
        """A world of this process alone, for what it is to do without the others."""
        from allhands.distributed.backend import SingleProcess

        return World(0, 1, 0, 1, "none", self.launcher, SingleProcess())

    def all_sum(self, value: mx.array | float) -> mx.array:
        """Element-wise sum over ranks; every rank must call it, with the same shape and dtype."""
        return self.communicator.all_sum(_array(value))

    def all_gather(self, value: mx.array | float) -> mx.array:
        """Ranks' arrays joined along the first axis; a number counts as an array of one."""
        array = _array(value)
        return self.communicator.all_gather(array.reshape(1) if array.ndim == 0 else array)

    def mean(self, value: mx.array | float, weight: mx.array | float = 1.0) -> mx.array:
        """Mean over ranks in float32, each counting by its ``weight``, such as its number of tokens; all call it.

        The value of a rank of weight 0 does not matter. 0 if all weights are.
        """
        import mlx.core as mx

        share = _array(weight).astype(mx.float32)
        array = _array(value).astype(mx.float32)
        total = self.all_sum(mx.where(share > 0, array * share, mx.zeros_like(array)))
        weights = self.all_sum(share)
        return mx.where(weights > 0, total / mx.where(weights > 0, weights, 1.0), mx.zeros_like(total))

    def barrier(self) -> None:
        """Return when every rank has come here. Then another thread may exchange, if everything before is computed."""
        from allhands.distributed.backend import finish_exchanges
        from allhands.distributed.reduce import barrier

        barrier(self.communicator)
        finish_exchanges(self.communicator)


def init(size: int | None = None) -> World:
    """The world of this process: joined and checked at the first call, which every rank must make; then the same.

    ``allhands launch``, ``mpirun``, ``mlx.launch``, ``srun``, ``torchrun`` and cloud platforms are recognised by the
    variables that they set. The group counts only after a sum over all ranks was right: a program that was promised
    four processes never trains alone by mistake. Without a launcher it is a world of one.

    Args:
        size: the number of processes that there must be; ``None``: any.

    Raises:
        ConfigError: there are more or fewer than ``size``.
        DistributedError: the launcher's variables contradict each other, the ranks cannot connect, or the group has
            another size than the launcher has promised.
    """
    launch = launch_here()
    if size is not None and size != launch.size:
        raise ConfigError(
            f"this program wants {size} process{'es' * (size != 1)}, but there {_are(launch)}",
            where="allhands.init",
            hint=f"start it with allhands launch -n {size} -- python SCRIPT, or leave size out",
        )
    return world_of(launch, join_here())


def world_of(launch: Launch, communicator: Communicator) -> World:
    """The world of a group that was joined as ``launch`` says.

    Raises:
        DistributedError: the group has another size.
    """
    if communicator.size != launch.size:
        raise DistributedError(
            f"{launch.launcher} promised {launch.size} processes, but the group has {communicator.size}",
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
        raise _wrong(f"reduction={reduction!r}", "use 'mean' or 'sum', as the loss is over this rank's tokens")
    if num_tokens is None and reduction == "sum":
        raise _wrong("a sum over tokens, but not of how many", "give num_tokens=...")
    if isinstance(num_tokens, int | float) and not 0 <= num_tokens < math.inf:
        raise _wrong(f"num_tokens={num_tokens}", "give the number of this rank's tokens: 0 or more")


def average_gradients(
    gradients: Any,
    group: Any = None,
    all_reduce_size: int = _BUCKET_BYTES,
    communication_stream: Any = None,
    *,
    communication_type: mx.Dtype | None = None,
    num_tokens: float | mx.array | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Any:
    """Average gradients over ranks: in place of ``mlx.nn.average_gradients``, whose arguments it takes.

    Without ``num_tokens`` it is the plain mean of the ranks, as there: right where every rank has as many samples.
    With it every *token* counts the same, whatever the ranks hold, as if one process had computed the whole batch.

    Args:
        gradients: tree of arrays, the gradients of this rank's loss; the same structure on every rank.
        group: of ``mx.distributed``; ``None``: the world of :func:`init`, checked.
        all_reduce_size: bytes of a bucket: arrays travel together up to about so many. 0 or less: each by itself.
        communication_stream: of MLX, for the sums; ``None``: the one that the process exchanges on already, or that the
            back-end prefers. Another than the one in use is waited for: two at once would mix their bytes.
        communication_type: dtype of the gradients on the way, such as ``mx.bfloat16`` for half the bytes of float32;
            ``None``: their own (with ``num_tokens`` float32).
        num_tokens: trained tokens (or samples) on this rank; may be 0, then its gradients do not matter. An array is
            not looked at, so that it need not be computed yet.
        reduction: with ``num_tokens``: whether this rank's loss is the mean over its tokens (as in most loops) or
            their sum.

    Returns:
        Tree of the same structure and dtypes.

    Raises:
        ConfigError: an argument is not what it should be.
        DistributedError: as :func:`init`.

    Example:
        >>> (loss, ntoks), grads = loss_and_grad(model, batch)
        >>> grads = allhands.average_gradients(grads, num_tokens=ntoks)
        >>> optimizer.update(model, grads)
    """
    import mlx.core as mx

    from allhands.distributed.backend import lent_stream, of_group
    from allhands.distributed.reduce import Exchange, mean_of_ranks, mean_of_tokens

    if isinstance(communication_stream, mx.Dtype):  # its place in earlier versions of MLX
        raise _wrong("communication_stream is a dtype", "write communication_type=... before it")
    if communication_type is not None and not mx.issubdtype(communication_type, mx.floating):
        raise _wrong(f"{communication_type} cannot hold gradients", "use mx.float32, mx.bfloat16 or mx.float16")
    _check_tokens(num_tokens, reduction)
    if isinstance(group, World):
        communicator = group.communicator
    else:
        communicator = init().communicator if group is None else of_group(group)
    exchange = Exchange(all_reduce_size, communication_type, communication_stream)

    def averaged() -> Any:
        if num_tokens is None:
            return mean_of_ranks(communicator, gradients, exchange)
        return mean_of_tokens(communicator, gradients, num_tokens, reduction, exchange)

    lent = lent_stream(communicator, communication_stream)
    if lent is None:
        return averaged()
    with lent:  # computed here and now, so that nothing else is exchanged meanwhile
        try:
            mx.eval(gradients, num_tokens)
        except ValueError:  # MLX's, of what is only traced
            hint = "leave communication_stream out, or give the stream that the first call gave"
            raise _wrong("another stream than the one in use, within mx.compile", hint) from None
        found = averaged()
        mx.eval(found)
        return found


def _wrong(what: str, hint: str) -> ConfigError:
    return ConfigError(what, where="average_gradients", hint=hint)


def _are(launch: Launch) -> str:
    count = f"{'is' if launch.size == 1 else 'are'} {launch.size}"
    return f"{count} ({launch.reason})" if launch.reason else count


def _array(value: mx.array | float) -> mx.array:
    import mlx.core as mx

    return value if isinstance(value, mx.array) else mx.array(value, dtype=mx.float32)
