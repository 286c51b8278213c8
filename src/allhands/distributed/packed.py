"""Sums over ranks with compressed parts, in the forms of :mod:`allhands.distributed.codecs`.

Every rank unpacks the same bytes, its own included, and adds them up in the order of the ranks, by
operations that round alike on every processor. So the sums have the same bits everywhere. The
rounding error of a rank's part is added to its next part (error feedback, arXiv 1901.09847), so it
comes late but is not lost.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from allhands.distributed.backend import Communicator, MlxGroup
from allhands.distributed.codecs import GROUP, Codec, Route
from allhands.runtime.blas import native_library
from allhands.runtime.native_calls import at

# MLX allows no scale below 1e-7, but gradients of adapters may need far smaller ones. So numbers
# are multiplied by this power of two, which rounds nothing.
_RAISED = 2.0**60
# Count of numbers that a CPU packs at a time: they fit into its cache, which is faster for large
# arrays.
_BLOCK = 1 << 18
_FOUR = 4

# Rounding error of an array in the last exchange, in float32; None: there is none.
Left = mx.array | None


@dataclass(frozen=True)
class Packed:
    """Sums over ranks, and rounding errors for the next exchange.

    Attributes:
        sums: sums in the order, shapes and types of the arrays.
        left: for each array the rounding error of this rank's part, in float32; ``None`` without
            one.
        scalars: sums of the scalars that were sent with the arrays, if any.
    """

    sums: list[mx.array]
    left: list[Left]
    scalars: mx.array | None = None


@dataclass(frozen=True)
class Begun:
    """A sum in progress: the lazy ``arrays`` that are exchanged, and the function that returns the
    sums.
    """

    arrays: list[mx.array]
    finish: Callable[[], Packed]


# The sum of rows, the rounding error of this rank's row, and the sum of the unpacked numbers.
_Exchanged = tuple[mx.array, Left, mx.array]


class Packing:
    """The form in which one rank's part of a sum is packed, exchanged and added up."""

    def __init__(self, communicator: Communicator, codec: Codec | None) -> None:
        """``codec``: ``None`` to send arrays as they are."""
        self.communicator = communicator
        self.codec = codec

    def route(self, item_bytes: int) -> Route:
        """Return the way in which arrays of numbers of ``item_bytes`` are exchanged."""
        found = "sum" if self.codec is None else self.codec.route(*self._group, item_bytes)
        return (
            "gather" if found == "pass" and not isinstance(self.communicator, MlxGroup) else found
        )

    def packs(self, array: mx.array) -> bool:
        """Return True if an array is sent packed: not if that saves nothing (half precision)."""
        codec, size = self.codec, array.dtype.size
        return (
            codec is not None and codec.packs(array.shape, size) and codec.gains(*self._group, size)
        )

    @property
    def _group(self) -> tuple[str, int]:
        return self.communicator.backend, self.communicator.size

    def nothing_left(self, arrays: Sequence[mx.array]) -> list[Left]:
        """Return rounding errors of ``arrays`` before the first exchange: zeros, or ``None``."""
        feeds = self.codec is not None and self.codec.grouped
        return [mx.zeros(each.shape) if feeds and self.packs(each) else None for each in arrays]

    def sum(
        self, arrays: Sequence[mx.array], left: Sequence[Left], scalars: mx.array | None = None
    ) -> Packed:
        """Return the lazy sums of ``arrays`` and ``scalars``.

        One exchange is made, or two if some numbers are not packed.

        Args:
            arrays: arrays of one type.
            left: rounding errors of :meth:`nothing_left` or of the last exchange.
            scalars: (n,) float32, which are sent unpacked.
        """
        return self.begin(arrays, left, scalars).finish()

    def begin(
        self, arrays: Sequence[mx.array], left: Sequence[Left], scalars: mx.array | None = None
    ) -> Begun:
        """Begin :meth:`sum`, so that other arrays can be computed during the exchange.

        On the route "pass" the exchange is done when this returns.
        """
        packs = [self.packs(each) for each in arrays]
        if not any(packs):
            return self._begin_as_they_are(arrays, scalars)
        plain = [
            each.reshape(-1).astype(mx.float32)
            for each, packed in zip(arrays, packs, strict=True)
            if not packed
        ]
        beside = [*plain, *([] if scalars is None else [scalars])]
        row = self._row(
            [(a, e) for a, e, packed in zip(arrays, left, packs, strict=True) if packed]
        )
        unpacked = mx.concatenate(beside) if beside else mx.zeros((0,))
        travelling, exchanged = self._begin(row, unpacked, self.route(arrays[0].dtype.size))

        def finish() -> Packed:
            row, left_of_row, unpacked = exchanged()
            sums, new, at, place = list[mx.array](), list[Left](), 0, 0
            for each, packed in zip(arrays, packs, strict=True):
                if packed:
                    sums.append(row[at : at + each.size].reshape(each.shape).astype(each.dtype))
                    new.append(
                        None
                        if left_of_row is None
                        else left_of_row[at : at + each.size].reshape(each.shape)
                    )
                    at += _whole_groups(each.size)
                else:
                    sums.append(
                        unpacked[place : place + each.size].reshape(each.shape).astype(each.dtype)
                    )
                    new.append(None)
                    place += each.size
            return Packed(sums, new, None if scalars is None else unpacked[place:])

        return Begun(travelling, finish)

    def _begin_as_they_are(self, arrays: Sequence[mx.array], scalars: mx.array | None) -> Begun:
        """Begin a sum in which nothing is packed, in the arrays' own type.

        If this is not the scalars' type, these are summed in a call of their own.
        """
        flat = [each.reshape(-1) for each in arrays]
        beside = scalars is not None and all(each.dtype == scalars.dtype for each in arrays)
        if scalars is not None and not beside:
            scalars = self.communicator.all_sum(scalars)
            mx.async_eval(scalars)  # queued by itself, so that the order is equal on all ranks
        elif scalars is not None:
            flat.append(scalars)
        total = self.communicator.all_sum(mx.concatenate(flat)) if flat else mx.zeros((0,))

        def finish() -> Packed:
            sums, at = list[mx.array](), 0
            for each in arrays:
                sums.append(total[at : at + each.size].reshape(each.shape))
                at += each.size
            return Packed(sums, [None] * len(sums), total[at:] if beside else scalars)

        return Begun([total], finish)

    def _row(self, arrays: Sequence[tuple[mx.array, Left]]) -> mx.array:
        """Join the numbers to send in one float32 row; each array is filled up to whole groups."""
        pieces: list[mx.array] = []
        for array, left in arrays:
            flat = array.reshape(-1).astype(mx.float32)
            pieces.append(flat if left is None else flat + left.reshape(-1))
            if missing := _whole_groups(array.size) - array.size:
                pieces.append(mx.zeros((missing,)))
        return mx.concatenate(pieces) if len(pieces) > 1 else pieces[0]

    def _begin(
        self, row: mx.array, plain: mx.array, route: Route
    ) -> tuple[list[mx.array], Callable[[], _Exchanged]]:
        """Begin the exchange of ``row`` (packed) and ``plain`` (not packed).

        Returns the arrays that are exchanged, and the function that returns the sums.
        """
        if route == "gather":
            return self._begin_to_gather(row, plain)
        total = self.communicator.all_sum(plain) if plain.size else plain
        mx.async_eval(total)  # queued by itself, so that the order is equal on all ranks
        if route == "sum":
            short = self.communicator.all_sum(row.astype(mx.bfloat16))
            return [short], lambda: (short.astype(mx.float32), None, total)
        assert isinstance(self.communicator, MlxGroup)
        assert self.codec is not None
        whole, left = passed_on(self.communicator, self.codec, row)
        return [whole], lambda: (whole, left, total)

    def _begin_to_gather(
        self, row: mx.array, plain: mx.array
    ) -> tuple[list[mx.array], Callable[[], _Exchanged]]:
        codec, ranks, mine = self.codec, self.communicator.size, self.communicator.rank
        assert codec is not None
        words = pack(codec, row)
        num_words, size, num_plain = words.size, row.size, plain.size
        sent = mx.concatenate([words, plain.view(mx.int32)]) if num_plain else words
        gathered = self.communicator.all_gather(sent)

        def added() -> _Exchanged:
            everyone, beside = gathered.reshape(ranks, -1), plain
            if num_plain:
                beside = _added(
                    [everyone[rank, num_words:].view(mx.float32) for rank in range(ranks)]
                )
            if codec.grouped and (library := _library()) is not None:
                return *_added_natively(library, codec, everyone, row, mine), beside
            parts = [unpack(codec, everyone[rank, :num_words], size) for rank in range(ranks)]
            return _added(parts), row - parts[mine] if codec.grouped else None, beside

        return [gathered], added


def _added(parts: Sequence[mx.array]) -> mx.array:
    """Add up in the order of ``parts``, which gives the same bits on every rank."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _library() -> ctypes.CDLL | None:
    """Return the native code that packs and unpacks, with the same bits, in one pass over memory.

    ``None`` if MLX's operations must be used.
    """
    return native_library() if mx.default_device().type == mx.DeviceType.cpu else None


def _added_natively(
    library: ctypes.CDLL, codec: Codec, everyone: mx.array, row: mx.array, mine: int
) -> tuple[mx.array, mx.array]:
    """Return the sum of all ranks' packed numbers, and the rounding error of this rank's ``row``.

    Args:
        everyone: (ranks, words); the packed numbers are at the beginning of each row.
        mine: number of this rank.
    """
    ranks, stride = everyone.shape
    total, left = mx.zeros(row.shape), mx.zeros(row.shape)
    everyone, row = mx.contiguous(everyone), mx.contiguous(row)
    mx.eval(everyone, row, total, left)
    sizes = ctypes.c_ssize_t(row.size // GROUP), ctypes.c_int(ranks), ctypes.c_ssize_t(stride)
    places = at(everyone), ctypes.c_int(mine), at(row), at(total), at(left)
    library.allhands_unpack(ctypes.c_int(codec.bits), *sizes, *places)
    return total, left


def _whole_groups(size: int) -> int:
    return -(-size // GROUP) * GROUP


def pack(codec: Codec, row: mx.array) -> mx.array:
    """Pack a (n,) float32 row of whole groups; return (m,) int32.

    A number that is not finite makes other numbers not finite, too, and so stays visible.
    """
    if not codec.grouped:
        return row.astype(mx.bfloat16).view(mx.int32)
    if (library := _library()) is not None:
        groups, row = row.size // GROUP, mx.contiguous(row)
        words = mx.zeros((groups * (GROUP * codec.bits // 32 + 2),), dtype=mx.int32)
        mx.eval(row, words)
        library.allhands_pack(
            ctypes.c_int(codec.bits), ctypes.c_ssize_t(groups), at(row), at(words)
        )
        return words
    step = _BLOCK if mx.default_device().type == mx.DeviceType.cpu else row.size
    blocks: list[tuple[mx.array, ...]] = []
    for start in range(0, row.size, step):
        blocks.append(_quantised(codec, row[start : start + step]))
        if step < row.size:
            mx.eval(blocks[-1])
    return mx.concatenate([each for kind in zip(*blocks, strict=True) for each in kind])


def _quantised(codec: Codec, row: mx.array) -> tuple[mx.array, ...]:
    """Return codes, scales and offsets of a row of whole groups, as int32."""
    codes, scales, offsets = mx.quantize(row.reshape(-1, GROUP) * _RAISED, GROUP, codec.bits)
    # Quantisation would hide a NaN, so it is put into the offsets.
    total = row.sum()
    fine = mx.isfinite(total)
    scales = mx.where(fine, scales / _RAISED, mx.zeros(()))
    offsets = mx.where(fine, offsets / _RAISED, mx.abs(total))
    return tuple(each.reshape(-1).view(mx.int32) for each in (codes, scales, offsets))


def unpack(codec: Codec, words: mx.array, size: int) -> mx.array:
    """Unpack the result of :func:`pack`; return (size,) float32.

    A product and a sum are separate operations: a fused operation would round once on some
    processors and twice on others.
    """
    if not codec.grouped:
        return words.view(mx.bfloat16).astype(mx.float32)
    groups = size // GROUP
    coded = size * codec.bits // 32
    numbers = words[:coded].view(mx.uint8)
    if codec.bits == _FOUR:
        numbers = mx.stack([numbers & 15, numbers >> _FOUR], axis=-1)
    scales, offsets = (
        words[at : at + groups].view(mx.float32)[:, None] for at in (coded, coded + groups)
    )
    return (numbers.reshape(groups, GROUP).astype(mx.float32) * scales + offsets).reshape(-1)


def passed_on(communicator: MlxGroup, codec: Codec, row: mx.array) -> tuple[mx.array, mx.array]:
    """Return the sum of rows, and this rank's rounding error, by passing parts around a ring.

    Each rank adds its numbers to a part, packs the sum and sends it to its neighbour. A rank packs
    each part once, the finished one included, so its rounding errors are one row. Ranks take turns
    in sending and receiving: if all sent first, large parts would block all of them.
    """
    ranks, rank = communicator.size, communicator.rank
    right, before = (rank + 1) % ranks, (rank - 1) % ranks
    each = -(-row.size // (ranks * GROUP)) * GROUP
    if missing := ranks * each - row.size:
        row = mx.concatenate([row, mx.zeros((missing,))])
    parts = list(row.reshape(ranks, each))
    left = list(parts)
    value = parts[rank]
    words = pack(codec, value)
    for hop in range(1, ranks):
        left[(rank - hop + 1) % ranks] = value - unpack(codec, words, each)
        mx.eval(words, left)
        got = _swapped(communicator, words, right, before)
        value = parts[(rank - hop) % ranks] + unpack(codec, got, each)
        words = pack(codec, value)
    left[right] = value - unpack(codec, words, each)
    everyone = communicator.all_gather(words).reshape(ranks, -1)
    # Rank r has finished part r + 1.
    wholes = [unpack(codec, everyone[(place - 1) % ranks], each) for place in range(ranks)]
    size = row.size - missing
    return mx.concatenate(wholes)[:size], mx.concatenate(left)[:size]


def _swapped(communicator: MlxGroup, words: mx.array, right: int, before: int) -> mx.array:
    """Send ``words`` to the rank on the right, and return the array from the rank before."""

    def send() -> None:
        mx.eval(communicator.send(words, right))

    if communicator.rank % 2 == 0:
        send()
    got = communicator.receive(words.shape, words.dtype, before)
    mx.eval(got)
    if communicator.rank % 2:
        send()
    return got
