"""Sums over ranks of which each rank's part travels packed, in one of the forms of
:mod:`allhands.distributed.codecs`.

Every rank unpacks the same bytes, its own among them, and adds them up in the order of the ranks,
by operations that round alike on every processor: the sums have the same bits everywhere. What
packing has left out of a rank's part is added to its next one (error feedback, arXiv 1901.09847),
so that it comes late and is not lost.
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

# MLX takes no scale below 1e-7, which gradients of adapters may be far below. Nothing is rounded by
# a power of two.
_RAISED = 2.0**60
# A processor packs so many numbers after the other, which its cache holds: of a large array that
# takes less time.
_BLOCK = 1 << 18
_FOUR = 4

Left = mx.array | None


@dataclass(frozen=True)
class Packed:
    """Sums over ranks, and what is left for later.

    Attributes:
        sums: in the order, the shapes and the types of the arrays.
        left: of each array what packing has left out of this rank's part, in float32; ``None``
            where nothing is.
        scalars: sums of what travelled beside them, if something did.
    """

    sums: list[mx.array]
    left: list[Left]
    scalars: mx.array | None = None


@dataclass(frozen=True)
class Begun:
    """A sum that has been begun: the ``arrays`` that travel, lazy, and what makes the sum of them."""

    arrays: list[mx.array]
    finish: Callable[[], Packed]


# The sum of rows, what is left out of this rank's, and the sum of what travelled beside.
_Exchanged = tuple[mx.array, Left, mx.array]


class Packing:
    """The form in which one rank's part of a sum is packed, exchanged and added up."""

    def __init__(self, communicator: Communicator, codec: Codec | None) -> None:
        """``codec``: ``None`` for arrays that travel as they are."""
        self.communicator = communicator
        self.codec = codec

    def route(self, item_bytes: int) -> Route:
        """By which way arrays of numbers of ``item_bytes`` travel."""
        found = "sum" if self.codec is None else self.codec.route(*self._group, item_bytes)
        return (
            "gather" if found == "pass" and not isinstance(self.communicator, MlxGroup) else found
        )

    def packs(self, array: mx.array) -> bool:
        """True if an array travels packed: one of half precision may gain nothing where others do."""
        codec, size = self.codec, array.dtype.size
        return (
            codec is not None and codec.packs(array.shape, size) and codec.gains(*self._group, size)
        )

    @property
    def _group(self) -> tuple[str, int]:
        return self.communicator.backend, self.communicator.size

    def nothing_left(self, arrays: Sequence[mx.array]) -> list[Left]:
        """Return the rest that is left out of ``arrays`` before the first exchange."""
        feeds = self.codec is not None and self.codec.grouped
        return [mx.zeros(each.shape) if feeds and self.packs(each) else None for each in arrays]

    def sum(
        self, arrays: Sequence[mx.array], left: Sequence[Left], scalars: mx.array | None = None
    ) -> Packed:
        """Sums of ``arrays``, lazily, in one exchange, or in two where some of them are not packed.

        Args:
            arrays: of one type.
            left: as of :meth:`nothing_left`, or of the last exchange.
            scalars: (n,) float32, which travel as they are.
        """
        return self.begin(arrays, left, scalars).finish()

    def begin(
        self, arrays: Sequence[mx.array], left: Sequence[Left], scalars: mx.array | None = None
    ) -> Begun:
        """Begin :meth:`sum`, so that other things can be computed while it travels.

        What is passed on from neighbour to neighbour is there when this returns.
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
        """The same where nothing is packed: in the arrays' own type, the scalars in another call if
        that is another.
        """
        flat = [each.reshape(-1) for each in arrays]
        beside = scalars is not None and all(each.dtype == scalars.dtype for each in arrays)
        if scalars is not None and not beside:
            scalars = self.communicator.all_sum(scalars)
            mx.async_eval(scalars)  # by itself, so that what follows it does so on every rank
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
        """The numbers to send, end to end in float32, each array filled up to whole groups."""
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
        """The arrays that travel, and the function that makes the sum of rows and that of ``plain``
        of them.
        """
        if route == "gather":
            return self._begin_to_gather(row, plain)
        total = self.communicator.all_sum(plain) if plain.size else plain
        mx.async_eval(total)  # by itself, so that what follows it does so on every rank
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
    """The sum in the order of ``parts``: the same bits on every rank."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _library() -> ctypes.CDLL | None:
    """Code that packs and unpacks with the same bits in a pass over the memory; ``None``: by MLX's
    operations.
    """
    return native_library() if mx.default_device().type == mx.DeviceType.cpu else None


def _added_natively(
    library: ctypes.CDLL, codec: Codec, everyone: mx.array, row: mx.array, mine: int
) -> tuple[mx.array, mx.array]:
    """The sum of what all have packed, at the beginning of their rows, and what is left out of this
    rank's ``row``.
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
    """(m,) int32, of a (n,) float32 row of whole groups. A number that is not finite spoils all
    those around it.
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
    """Codes, scales and offsets of a row of whole groups, as int32."""
    codes, scales, offsets = mx.quantize(row.reshape(-1, GROUP) * _RAISED, GROUP, codec.bits)
    # Quantising would hide a NaN: offsets tell of it.
    total = row.sum()
    fine = mx.isfinite(total)
    scales = mx.where(fine, scales / _RAISED, mx.zeros(()))
    offsets = mx.where(fine, offsets / _RAISED, mx.abs(total))
    return tuple(each.reshape(-1).view(mx.int32) for each in (codes, scales, offsets))


def unpack(codec: Codec, words: mx.array, size: int) -> mx.array:
    """(size,) float32, of what :func:`pack` made.

    A product, then a sum: one operation for both would round once on some processors and twice on
    others.
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
    """Return the sum of rows, and what is left out of this rank's: by neighbours of a ring, each of
    whom adds its part.

    A rank packs each part once, the one sum that it has finished among them, so that what it leaves
    out is one row. To send and to receive take turns: where all sent first, nobody would get rid of
    a large part.
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
    # Rank r has finished the part that is one further.
    wholes = [unpack(codec, everyone[(place - 1) % ranks], each) for place in range(ranks)]
    size = row.size - missing
    return mx.concatenate(wholes)[:size], mx.concatenate(left)[:size]


def _swapped(communicator: MlxGroup, words: mx.array, right: int, before: int) -> mx.array:
    """The array that the rank before has sent, once ``words`` are on their way to the rank on the
    right.
    """

    def send() -> None:
        mx.eval(communicator.send(words, right))

    if communicator.rank % 2 == 0:
        send()
    got = communicator.receive(words.shape, words.dtype, before)
    mx.eval(got)
    if communicator.rank % 2:
        send()
    return got
