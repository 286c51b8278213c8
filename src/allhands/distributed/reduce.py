"""Sums of gradients over ranks in few, large calls, and exact means over ranks and tokens."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

import mlx.core as mx

from allhands.distributed.backend import Communicator, on_stream, sum_scatter
from allhands.distributed.packed import Left, Packing
from allhands.distributed.shards import Shards
from allhands.io.trees import flatten, unflatten

BUCKET_BYTES = 32_000_000
_TAPER = 4  # parts into which the last bucket is cut
# A smaller bucket is one call: several calls would only add latency.
_ONE_CALL_BYTES = 4_000_000
# Arrays of this size are not copied into a bucket: the copy takes longer than a call of their own.
_ALONE_BYTES = 8_000_000
# The fastest of 8, 32 and 128 MB on four H200s (benchmarks/results/gpu_many-2026-11-22.md): a host
# can be only a few calls ahead of its GPU.
_NCCL_BUCKET_BYTES = 128_000_000
# A count is sent as its quotient by this number, and the remainder, because float32 holds whole
# numbers only up to 2**24.
_COUNT_UNIT = 1 << 12


def bucket_bytes_for(backend: str, megabytes: float | None) -> int:
    """Return the bytes of an all-reduce call: as requested, else the best size for the back-end."""
    if megabytes is not None:
        return int(megabytes * 1e6)
    return _NCCL_BUCKET_BYTES if backend == "nccl" else BUCKET_BYTES


def sum_over_ranks(
    communicator: Communicator,
    arrays: Sequence[mx.array],
    scalars: Sequence[float | mx.array] = (),
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[list[mx.array], mx.array]:
    """Add ``arrays`` and ``scalars`` element-wise over all ranks.

    Arrays of one dtype are joined in buckets of about ``bucket_bytes``, because each call costs a
    round of latency. The scalars (loss, token count, flags) are part of the first float32 bucket,
    at no cost.

    Args:
        arrays: the same shapes and dtypes in the same order on every rank.
        scalars: numbers that are exact as float32; counts may be larger than 2**24, so pass their
            :func:`count_parts`.

    Returns:
        The summed arrays in their order and shapes, and the (len(scalars),) float32 sums.
    """
    everything = [_as_array(scalars), *arrays]
    if communicator.size == 1:
        return list(arrays), everything[0]
    sums: list[mx.array] = list(everything)
    for bucket in buckets(everything, range(len(everything)), bucket_bytes):
        # Scalars come last: arrays after a few numbers would not be aligned, and GPUs would read
        # them value by value.
        bucket.sort(key=lambda place: place == 0)
        total = communicator.all_sum(_end_to_end(everything, bucket)).reshape(-1)
        _take_apart(total, everything, bucket, sums)
    return sums[1:], sums[0]


def packed_sum_over_ranks(
    packing: Packing,
    arrays: Sequence[mx.array],
    left: Sequence[Left],
    scalars: Sequence[float | mx.array] = (),
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[list[mx.array], mx.array, list[Left]]:
    """Sum packed arrays like :func:`sum_over_ranks`.

    A bucket is computed before the next one is begun.

    Args:
        left: rounding error of each array in the last exchange.

    Returns:
        The summed arrays, the sums of scalars, and the rounding errors of this exchange.
    """
    sums, new, totals = list(arrays), list(left), _as_array(scalars)
    beside: mx.array | None = totals
    for bucket in buckets(arrays, range(len(arrays)), bucket_bytes):
        done = packing.sum([arrays[i] for i in bucket], [left[i] for i in bucket], beside)
        mx.eval(done.sums, [each for each in done.left if each is not None])
        for i, total, more in zip(bucket, done.sums, done.left, strict=True):
            sums[i], new[i] = total, more
        totals, beside = totals if done.scalars is None else done.scalars, None
    return sums, totals if beside is None else packing.communicator.all_sum(totals), new


def count_parts(count: float | mx.array) -> tuple[float | mx.array, float | mx.array]:
    """Split a count, which may be lazy, into two numbers with exact float32 sums.

    The sums are exact for up to 4096 ranks and a total of up to 2**36.
    """
    if isinstance(count, mx.array) and mx.issubdtype(count.dtype, mx.floating):
        count = count.astype(mx.float32)
    units = count // _COUNT_UNIT
    return units, count - units * _COUNT_UNIT


def whole_count(units: float, rest: float) -> int:
    """Return the count for two sums of :func:`count_parts`."""
    return int(units) * _COUNT_UNIT + int(rest)


def lazy_count(parts: mx.array) -> mx.array:
    """Return the () float32 count for two sums of :func:`count_parts`; it is rounded only once."""
    return parts[0] * _COUNT_UNIT + parts[1]


@dataclass(frozen=True)
class Lookups:
    """The sparse part of an embedding's gradient, from the look-ups of tokens.

    Attributes:
        index: index of the table among the arrays.
        rows: (N, D) gradients; N is the same on every rank. After the exchange those of all ranks.
        ids: (N,) int32, the rows of the table to which the gradients belong.
        besides: True if the table's array has a dense gradient as well; else it is not read.
    """

    index: int
    rows: mx.array
    ids: mx.array
    besides: bool


@dataclass(frozen=True)
class PendingReduce:
    """Sums over ranks that are being computed.

    Attributes:
        arrays: the result of :func:`sum_over_ranks`; this rank's part of sharded arrays.
        computed: arrays that are ready only when all passes of this rank are done.
        lookups: the look-ups of all ranks, not yet added to their table.
        left: this rank's rounding error of each array, if arrays are packed.
    """

    arrays: list[mx.array]
    computed: list[mx.array]
    lookups: Lookups | None = None
    left: list[Left] = field(default_factory=list[Left])


def start_all_reduce(
    communicator: Communicator,
    arrays: Sequence[mx.array],
    *,
    bucket_bytes: int,
    stream: Any,
    shards: Shards | None = None,
    lookups: Lookups | None = None,
    cuts: Collection[int] = (),
    packed: tuple[Packing, Sequence[Left]] | None = None,
) -> PendingReduce:
    """Start :func:`sum_over_ranks` during computation: a bucket is sent while the next one is still
    being computed.

    The last arrays go first, because a backward pass reaches them first. Each bucket is queued by
    itself, so that all ranks exchange buckets in the same order for any graph. A bucket is queued
    before the arrays of the next bucket, because another stream waits for all work that was queued
    together with its input. The bucket's input is queued before the bucket: if streams meet within
    one call of MLX, its CUDA back-end frees memory by ``cudaFree``, which waits for the device and
    blocks the host.

    Args:
        arrays: at least one.
        stream: MLX stream without any computation.
        shards: the divided ones of ``arrays``, of which each rank needs a part. They go first.
        lookups: look-ups that belong to one of ``arrays``; this array goes first, and the look-ups'
            rows go last.
        cuts: indices of ``arrays`` before which a bucket should end.
        packed: the compressed form, and the rounding error of each of ``arrays`` in the last
            exchange. Divided arrays are then summed whole on every rank.
    """
    packing, left = packed or (None, ())
    sums, new = list(arrays), list(left)
    computed: list[mx.array] = []
    order = _order(len(arrays), lookups)
    if lookups is not None:
        # The ids are known before any computation.
        lookups = replace(lookups, ids=_gathered(communicator, lookups.ids, stream))
        sums[lookups.index] = _own_zeros(shards, lookups.index, sums[lookups.index])
    if shards is not None and packing is None:
        divided, order = shards.split(order)
        computed = _scatter(
            communicator,
            arrays,
            buckets(arrays, divided, bucket_bytes, cuts=cuts),
            stream,
            shards,
            sums,
        )
    for bucket in buckets(arrays, order, bucket_bytes, tapering=True, cuts=cuts):
        if packing is None:
            _sum_bucket(communicator, arrays, bucket, stream, sums)
        else:
            _sum_packed_bucket(packing, arrays, bucket, stream, sums, new)
        # The bucket's last array is used, since joined arrays wait for the sums before them.
        computed = [*computed[-1:], arrays[bucket[-1]]]
    if shards is not None and packing is not None:
        for i in order:
            sums[i] = mx.contiguous(shards.part(i, sums[i]))
    if lookups is not None:
        computed = [*computed[-1:], lookups.rows]
        lookups = replace(lookups, rows=_gathered(communicator, lookups.rows, stream))
    return PendingReduce(sums, computed, lookups, new)


def _gathered(communicator: Communicator, array: mx.array, stream: Any) -> mx.array:
    """Begin to gather an array of every rank."""
    with beside([array], stream) as made:
        made.append(communicator.all_gather(array))
    return made[0]


def _own_zeros(shards: Shards | None, index: int, array: mx.array) -> mx.array:
    """Return zeros for this rank's part of a divided array; return any other array itself."""
    return (
        array if shards is None or not shards.divided[index] else shards.zeros(index, array.dtype)
    )


def _order(num_arrays: int, lookups: Lookups | None) -> list[int]:
    """Return the order of arrays: the last arrays first.

    A table with look-ups is first, or is left out if it has no dense gradient.
    """
    order = list(range(num_arrays - 1, -1, -1))
    if lookups is not None:
        order.remove(lookups.index)
        order[:0] = [lookups.index] if lookups.besides else []
    return order


def _scatter(
    communicator: Communicator,
    arrays: Sequence[mx.array],
    order: Iterable[list[int]],
    stream: Any,
    shards: Shards,
    into: list[mx.array],
) -> list[mx.array]:
    """Begin a reduce-scatter of arrays; return the array that is computed last."""
    computed: list[mx.array] = []
    for bucket in order:
        with together([arrays[i] for i in bucket], stream, communicator) as totals:
            # One call for each array: divided arrays are large, and joining would copy them.
            totals += [sum_scatter(communicator, shards.padded(i, arrays[i])) for i in bucket]
        for i, total in zip(bucket, totals, strict=True):
            into[i] = shards.shaped(i, total)
        computed = [arrays[bucket[-1]]]
    return computed


def _sum_bucket(
    communicator: Communicator,
    arrays: Sequence[mx.array],
    bucket: list[int],
    stream: Any,
    into: list[mx.array],
) -> None:
    """Begin to add up a bucket's arrays over ranks."""
    # The largest arrays first: FlatParams.before_attention explains what is computed beside them.
    large = sorted(
        (i for i in bucket if arrays[i].nbytes >= _ALONE_BYTES), key=lambda i: -arrays[i].nbytes
    )
    calls = [
        call for call in (*([i] for i in large), [i for i in bucket if i not in large]) if call
    ]
    with together([arrays[i] for i in bucket], stream, communicator) as totals:
        # Small arrays are joined on the same stream, so that this does not delay the backward pass.
        totals += [communicator.all_sum(_end_to_end(arrays, call)).reshape(-1) for call in calls]
    for call, total in zip(calls, totals, strict=True):
        _take_apart(total, arrays, call, into)


def _sum_packed_bucket(
    packing: Packing,
    arrays: Sequence[mx.array],
    bucket: list[int],
    stream: Any,
    into: list[mx.array],
    left: list[Left],
) -> None:
    """Begin to add up a compressed bucket's arrays over ranks.

    Its rounding errors are computed on the same stream, and put into ``left``.
    """
    with together([arrays[i] for i in bucket], stream, packing.communicator) as totals:
        done = packing.sum([arrays[i] for i in bucket], [left[i] for i in bucket])
        totals += [*done.sums, *(each for each in done.left if each is not None)]
    for i, total, more in zip(bucket, done.sums, done.left, strict=True):
        into[i], left[i] = total, more


@contextmanager
def beside(arrays: Sequence[mx.array], stream: Any) -> Generator[list[mx.array]]:
    """Queue ``arrays``, then, in a second call of MLX, arrays that are made on ``stream``.

    The ``with`` block makes the latter and appends them to the yielded list. They are computed in
    the order of the list.
    """
    # MLX begins with the last given array, so the list is reversed below.
    if arrays:
        mx.async_eval(arrays)
    made: list[mx.array] = []
    with mx.stream(stream):
        yield made
    mx.async_eval(made[::-1])


@contextmanager
def together(
    arrays: Sequence[mx.array], stream: Any, communicator: Communicator
) -> Generator[list[mx.array]]:
    """Do the same as :func:`beside`, with a barrier of the ranks in between; later computations
    wait for the barrier.

    A call of an exchange holds multiprocessors until every rank has begun the same call, which is
    after some kernel of that rank. Without the barrier, ranks at different places of their passes
    would wait for each other in turn. On two H100s, with 1.24 billion numbers, the barrier saves
    1.6 % of the time of a step of 32 x 1024 tokens a GPU, nothing of a step of 8 x 1024, and 8 % of
    the memory in both cases (benchmarks/results/gpu_many-2026-11-25.md).
    """
    zero = mx.zeros((1,))
    here = mx.depends([zero], arrays)[0]
    with beside([*arrays, here], stream) as met:
        met.append(communicator.all_sum(here))
    with beside([], stream) as made:
        yield made
    mx.async_eval(mx.depends([zero], met))


def start_all_gather(
    communicator: Communicator,
    parts: Sequence[mx.array],
    shards: Shards,
    *,
    bucket_bytes: int,
    stream: Any,
) -> list[mx.array]:
    """Gather arrays from all ranks' parts beside the computation, in the order of a forward pass.

    Args:
        parts: this rank's parts; arrays that are not divided are returned unchanged.
        stream: MLX stream for the exchange; ``None``: all is computed when this returns.
    """
    wholes = list(parts)
    divided = [i for i in range(len(parts)) if shards.divided[i]]
    for bucket in buckets(parts, divided, max(bucket_bytes // communicator.size, 1)):
        if stream is None:
            mx.eval([parts[i] for i in bucket])
            wholes_of = [shards.whole(i, communicator, parts[i]) for i in bucket]
            mx.eval(wholes_of)
        else:
            with beside([parts[i] for i in bucket], stream) as wholes_of:
                wholes_of += [shards.whole(i, communicator, parts[i]) for i in bucket]
        for i, whole in zip(bucket, wholes_of, strict=True):
            wholes[i] = whole
    return wholes


def start_sum(
    communicator: Communicator, scalars: Sequence[float | mx.array], *, stream: Any
) -> mx.array:
    """Return (len(scalars),) float32 sums over all ranks, computed after earlier work on
    ``stream``.
    """
    with beside([value for value in scalars if isinstance(value, mx.array)], stream) as totals:
        totals.append(communicator.all_sum(_as_array(scalars)))
    return totals[0]


def _as_array(scalars: Sequence[float | mx.array]) -> mx.array:
    """Return the scalars as a (len(scalars),) float32 array.

    Consecutive Python numbers become one array, because each array costs an operation.
    """
    if not scalars:
        return mx.zeros((0,))
    parts: list[mx.array] = []
    for lazy, values in groupby(scalars, key=lambda value: isinstance(value, mx.array)):
        if lazy:
            parts += [mx.array(value, dtype=mx.float32).reshape(1) for value in values]
        else:
            parts.append(mx.array(list(values), dtype=mx.float32))
    return mx.concatenate(parts) if len(parts) > 1 else parts[0]


def _end_to_end(arrays: Sequence[mx.array], bucket: Sequence[int]) -> mx.array:
    """Join the arrays of a bucket."""
    return (
        mx.concatenate([arrays[i].reshape(-1) for i in bucket])
        if len(bucket) > 1
        else arrays[bucket[0]]
    )


def _take_apart(
    total: mx.array, arrays: Sequence[mx.array], bucket: Sequence[int], into: list[mx.array]
) -> None:
    """Cut a bucket's sums into arrays."""
    at = 0
    for i in bucket:
        into[i] = total[at : at + arrays[i].size].reshape(arrays[i].shape)
        at += arrays[i].size


def barrier(communicator: Communicator) -> None:
    """Wait until every rank has called this function."""
    mx.eval(communicator.all_sum(mx.zeros((1,))))


def buckets(
    arrays: Sequence[mx.array],
    order: Sequence[int],
    bucket_bytes: int,
    *,
    tapering: bool = False,
    cuts: Collection[int] = (),
) -> Iterator[list[int]]:
    """Yield the buckets of indices in ``order``, each of one dtype; empty arrays are left out.

    With ``tapering`` the last bucket of a dtype is cut into several, so that the last call, beside
    which nothing is computed, is small. Before an index of ``cuts`` a half-full bucket counts as
    full.
    """
    for dtype in dict.fromkeys(arrays[index].dtype for index in order):
        some = [index for index in order if arrays[index].dtype == dtype and arrays[index].size]
        yield from _cut_where_full(arrays, some, bucket_bytes, tapering=tapering, cuts=cuts)


def _cut_where_full(
    arrays: Sequence[mx.array],
    order: Sequence[int],
    bucket_bytes: int,
    *,
    tapering: bool,
    cuts: Collection[int],
) -> Iterator[list[int]]:
    bucket: list[int] = []
    filled, left = 0, sum(arrays[index].nbytes for index in order)
    last = min(bucket_bytes, max(left, _TAPER * _ONE_CALL_BYTES)) // _TAPER
    for index in order:
        more = arrays[index].nbytes
        room = last if tapering and left <= bucket_bytes else bucket_bytes
        left -= more
        if bucket and (filled + more > room or (index in cuts and 2 * filled >= room)):
            yield bucket
            bucket, filled = [], 0
        bucket.append(index)
        filled += more
    if bucket:
        yield bucket


@dataclass(frozen=True)
class Exchange:
    """Options of an exchange of gradients.

    Attributes:
        bucket_bytes: approximate bytes of a call, in which arrays are joined; 0 or less: one array
            per call.
        dtype: type of the exchanged gradients; ``None``: unchanged.
        stream: MLX stream of the sums; ``None``: the back-end's.
    """

    bucket_bytes: int = BUCKET_BYTES
    dtype: mx.Dtype | None = None
    stream: Any = None


def mean_of_ranks(communicator: Communicator, grads: Any, exchange: Exchange) -> Any:
    """Return the tree of plain means over ranks, as ``mlx.nn.average_gradients`` does."""
    flat = flatten(grads)
    if communicator.size == 1 or not flat:
        return grads
    sums, _ = sum_over_ranks(
        on_stream(communicator, exchange.stream),
        [_cast(g, exchange.dtype) for _, g in flat],
        bucket_bytes=max(exchange.bucket_bytes, 1),
    )
    size = communicator.size
    return unflatten(
        [(name, s.astype(g.dtype) / size) for (name, g), s in zip(flat, sums, strict=True)]
    )


def mean_of_tokens(
    communicator: Communicator,
    grads: Any,
    num_tokens: float | mx.array,
    reduction: Literal["mean", "sum"],
    exchange: Exchange,
) -> Any:
    """Return the tree of gradients of the mean over all ranks' tokens.

    Args:
        grads: gradients of this rank's loss.
        num_tokens: number of trained tokens on this rank; with 0, ``grads`` are ignored.
        reduction: ``"mean"`` or ``"sum"``: this rank's loss is the mean or the sum over its tokens.
    """
    communicator = on_stream(communicator, exchange.stream)
    parts = count_parts(num_tokens)
    own = _as_array(parts)
    count = lazy_count(own)
    flat = flatten(grads)
    # Whole sums could overflow a short type: in that case the total is exchanged first, and then
    # parts of the mean are sent.
    early = exchange.dtype is not None and communicator.size > 1
    total = mx.maximum(lazy_count(communicator.all_sum(own)), 1.0) if early else mx.ones(())
    scale = (count if reduction == "mean" else mx.ones(())) / total
    # In float32, because a token count does not fit into bfloat16. A rank without tokens has no
    # mean, and its NaN must not reach other ranks.
    weighted = [
        mx.where(count > 0, g.astype(mx.float32) * scale, mx.zeros(g.shape, dtype=mx.float32))
        for _, g in flat
    ]
    sums, counted = sum_over_ranks(
        communicator,
        [_cast(g, exchange.dtype) for g in weighted] if early else weighted,
        parts,
        bucket_bytes=max(exchange.bucket_bytes, 1),
    )
    divisor = mx.ones(()) if early else mx.maximum(lazy_count(counted), 1.0)
    return unflatten(
        [
            (name, (s.astype(mx.float32) / divisor).astype(g.dtype))
            for (name, g), s in zip(flat, sums, strict=True)
        ]
    )


def _cast(array: mx.array, dtype: mx.Dtype | None) -> mx.array:
    return array if dtype is None else array.astype(dtype)
