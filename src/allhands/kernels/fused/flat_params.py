"""Flat buffers for trainable parameters: a few arrays to differentiate in, reduce and update.

Adapters are hundreds of small arrays, and a kernel for a small array takes longer to start than to
compute. Here they are one float32 array, from which one pass makes the factors of all products.
Dense layers with the same input are one array as well, so that nothing has to be joined for their
product. The model holds views, by the same names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.lora import LoRALinear
from numpy.typing import NDArray

from allhands.io.trees import flatten, part_of
from allhands.kernels.fastmath import with_vjp
from allhands.kernels.fused import kernels
from allhands.kernels.fused.linear import Product, drops, products_of

_ALIGNED = 64  # values, so that arrays begin where vectors may
# Up to so many numbers are one array. If there are more, each group is one, because old and new
# arrays exist at the same time.
_ONE_MOST = 1 << 28
_SMALL = 1 << 16  # groups of fewer numbers are one array nevertheless
# Layers that make queries, by the names that architectures give them.
_ATTENTION_INPUTS = {"q_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "wq", "wqkv"}
# Least numbers of an array where ranks exchange gradients while others are computed.
_TRAVELLING = 1 << 24


@dataclass(frozen=True)
class _Place:
    """The place of a trained array in the model."""

    name: str
    module: Any
    key: str

    @property
    def array(self) -> mx.array:
        return self.module[self.key]


@dataclass(frozen=True)
class Laid:
    """Arrays that lie in one array already: their names, where each begins there, and how many
    numbers it has.
    """

    names: tuple[str, ...]
    starts: tuple[int, ...]
    size: int


class _Layout:
    """Arrays one after the other, each beginning at a multiple of :data:`_ALIGNED`, with zeros
    between.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], spare: int) -> None:
        """Take the arrays' ``shapes``; at least ``spare`` zeros follow them."""
        self.shapes = list(shapes)
        self.starts = [0]
        for shape in shapes:
            self.starts.append(self.starts[-1] + _aligned(math.prod(shape)))
        self.size = self.starts[-1] + _aligned(spare)

    def joined(self, arrays: Sequence[mx.array]) -> mx.array:
        """Join ``arrays``, in the order of the shapes."""
        return _joined(arrays, [*self.starts[:-1], self.size])

    def parts(self, whole: mx.array) -> list[mx.array]:
        """Return views of ``whole`` in the arrays' shapes."""
        whole = whole.reshape(-1)
        return [
            _part(whole, start, shape)
            for start, shape in zip(self.starts, self.shapes, strict=False)
        ]


class FlatBuffer(_Layout):
    """Trained arrays of one type as one."""

    def __init__(self, places: Sequence[_Place], spare: int = 0, *, apart: bool = False) -> None:
        """Lay out ``places``, followed by at least ``spare`` zeros. ``apart``: see
        :class:`FlatParams`.
        """
        super().__init__([place.array.shape for place in places], spare)
        self.places = list(places)
        self.dtype = places[0].array.dtype
        matrices = apart and places[0].array.ndim > 1
        self.shape = (self.size // _ALIGNED, _ALIGNED) if matrices else (self.size,)

    def lay(self, laid: Laid) -> None:
        """Take over the layout of arrays that lie in one array already."""
        self.starts, self.size, self.shape = [*laid.starts, laid.size], laid.size, (laid.size,)

    @property
    def is_one(self) -> bool:
        """True if the buffer is one array, with nothing after it."""
        return len(self.shapes) == 1 and math.prod(self.shapes[0]) == self.size

    def joined(self, arrays: Sequence[mx.array]) -> mx.array:
        """Join ``arrays``, in the order of the places."""
        return super().joined(arrays).reshape(self.shape)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def _joined(arrays: Sequence[mx.array], ends: Sequence[int]) -> mx.array:
    """Join ``arrays``, which begin at ``ends[:-1]``, with zeros between them and up to
    ``ends[-1]``.
    """
    pieces: list[mx.array] = [mx.zeros((ends[0],), dtype=arrays[0].dtype)] if ends[0] else []
    for array, (start, end) in zip(arrays, itertools.pairwise(ends), strict=True):
        pieces.append(array.reshape(-1))
        if array.size < end - start:
            pieces.append(mx.zeros((end - start - array.size,), dtype=array.dtype))
    return mx.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def _part(whole: mx.array, start: int, shape: Sequence[int]) -> mx.array:
    return whole[start : start + math.prod(shape)].reshape(shape)


class FlatParams:
    """The trained arrays of a model as flat chunks; made after the choice of trained weights."""

    def __init__(self, model: nn.Module, *, apart: bool = False, travelling: bool = False) -> None:
        """Divide the trained arrays of ``model`` into buffers.

        Args:
            apart: True if arrays of one dimension are separate chunks, and chunks of matrices have
                two dimensions: for an optimizer that treats them differently.
            travelling: True if ranks add up finished chunks while others are computed; an array can
                only be sent when all of it is computed. A table of embeddings is then a separate
                chunk.
        """
        modules: dict[str, Any] = dict(model.named_modules())
        trained = [name for name, _ in flatten(model.trainable_parameters())]
        self._places = [
            _Place(name, modules[name.rpartition(".")[0]], name.rpartition(".")[2])
            for name in trained
        ]
        # A layer that computes its forward pass again gets its own arrays only, not a product's.
        again = any(hasattr(module, "_recomputes") for module in modules.values())
        products = [] if again else products_of(modules.values())
        packed = _Packed.of(self._places, products, apart=apart)
        self._spreads: list[_Packed | _Views | _AsTheyLie] = (
            [packed]
            if packed
            else [*_views(self._places, products, apart=apart, travelling=travelling)]
        )

    @staticmethod
    def laid(tree: Any, rows: Sequence[Laid]) -> FlatParams:
        """Return the trained arrays of ``tree`` as chunks; all of them lie in ``rows`` already."""
        found = FlatParams.__new__(FlatParams)
        found._spreads = []
        for row in rows:
            owners = ((name, *name.rpartition(".")[::2]) for name in row.names)
            places = [
                _Place(name, part_of(tree, owner) if owner else tree, key)
                for name, owner, key in owners
            ]
            chunk = FlatBuffer(places)
            chunk.lay(row)
            found._spreads.append(_AsTheyLie(chunk))
        found._places = [place for chunk in found.chunks for place in chunk.places]
        return found

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Return true if every trained array is a module's own, not one in a list or a dictionary
        of it.
        """
        modules = dict(model.named_modules())
        names = [name.rpartition(".") for name, _ in flatten(model.trainable_parameters())]
        return bool(names) and all(
            module in modules and key in modules[module] for module, _, key in names
        )

    @property
    def chunks(self) -> list[FlatBuffer]:
        return [spread.chunk for spread in self._spreads]

    def index_of(self, module: nn.Module) -> int | None:
        """Return the number of the chunk with nothing but the table of ``module``, an embedding;
        ``None`` if there is none.
        """
        return next(
            (number for number in self.tables if self.chunks[number].places[0].module is module),
            None,
        )

    @property
    def tables(self) -> dict[int, int]:
        """The row length of each chunk that is a table of embeddings, by the chunk's number."""
        return {
            number: chunk.shapes[0][-1]
            for number, chunk in enumerate(self.chunks)
            if chunk.is_one
            and isinstance(chunk.places[0].module, nn.Embedding)
            and chunk.places[0].key == "weight"
        }

    @property
    def before_attention(self) -> set[int]:
        """The numbers of chunks that begin with the projection of queries.

        A backward pass comes to these after attention, whose kernels leave the most room for an
        exchange that begins with it: a product whose blocks fill a GPU takes another round while an
        exchange holds any multiprocessor.
        """
        names = [chunk.places[0].name for chunk in self.chunks]
        return {
            number for number, name in enumerate(names) if _ATTENTION_INPUTS & set(name.split("."))
        }

    @contextmanager
    def installed(self, wholes: Sequence[mx.array]) -> Generator[None]:
        """Let the model compute with ``wholes``, an array for each chunk, differentiably."""
        try:
            with self.kept():
                for spread, whole in zip(self._spreads, wholes, strict=True):
                    spread.install(whole)
                yield
        finally:
            for spread in self._spreads:
                spread.clear()

    @contextmanager
    def kept(self) -> Generator[None]:
        """After the block, give the model back the trained arrays that it has now."""
        present = [(place.module, place.key, place.array) for place in self._places]
        try:
            yield
        finally:
            for module, key, array in present:
                module[key] = array

    def named(self, wholes: Sequence[mx.array]) -> list[tuple[str, mx.array]]:
        """Split an array for each chunk into parts, with the names of the trained arrays."""
        return [
            (place.name, part)
            for chunk, whole in zip(self.chunks, wholes, strict=True)
            for place, part in zip(chunk.places, chunk.parts(whole), strict=True)
        ]

    def joined(self, named: Mapping[str, mx.array]) -> list[mx.array]:
        """Return the reverse of :meth:`named`."""
        return [
            chunk.joined([named[place.name] for place in chunk.places]) for chunk in self.chunks
        ]


@dataclass(frozen=True)
class _AsTheyLie:
    """Arrays of a chunk that are used one by one."""

    chunk: FlatBuffer

    def install(self, whole: mx.array) -> None:
        for place, part in zip(self.chunk.places, self.chunk.parts(whole), strict=True):
            place.module[place.key] = part

    def clear(self) -> None:
        """Do nothing, because no product was given arrays."""


class _Views:
    """Trained arrays that are used as they are, or with their neighbours as the weight of one
    product.
    """

    def __init__(
        self, places: Sequence[_Place], products: Sequence[Product], *, apart: bool
    ) -> None:
        owners = {id(layer): product for product in products for layer in product.layers}
        self.chunk = FlatBuffer(places, apart=apart)
        self._targets: list[tuple[int, tuple[int, ...], Callable[[mx.array], None]]] = []
        self._products: list[Product] = []
        at = 0
        while at < len(places):
            product = owners.get(id(places[at].module)) if places[at].key == "weight" else None
            several = [] if product is None else _weights_of(product, places[at:])
            if product is not None and several:
                shape = (sum(place.array.shape[0] for place in several), places[at].array.shape[1])
                self._targets.append((self.chunk.starts[at], shape, product.give))
                self._products.append(product)
            else:
                several = [places[at]]
                self._targets.append(
                    (self.chunk.starts[at], places[at].array.shape, _setter(places[at]))
                )
            at += len(several)
        self._split = with_vjp(self._forward, self._backward)

    def _forward(self, whole: mx.array) -> tuple[mx.array, ...]:
        flat = whole.reshape(-1)
        return tuple(_part(flat, start, shape) for start, shape, _ in self._targets)

    def _backward(self, whole: mx.array, cotangents: Any, _parts: Any) -> mx.array:
        ends = [start for start, _, _ in self._targets] + [self.chunk.size]
        return _joined(
            [cotangent.astype(self.chunk.dtype) for cotangent in cotangents], ends
        ).reshape(whole.shape)

    def install(self, whole: mx.array) -> None:
        if len(self._targets) == 1:
            start, shape, put = self._targets[0]
            put(
                _part(whole.reshape(-1), start, shape)
                if math.prod(shape) < self.chunk.size
                else whole.reshape(shape)
            )
            return
        for part, (_, _, put) in zip(self._split(whole), self._targets, strict=True):
            put(part)

    def clear(self) -> None:
        for product in self._products:
            product.give(None)


def _setter(place: _Place) -> Callable[[mx.array], None]:
    def put(array: mx.array) -> None:
        place.module[place.key] = array

    return put


def _weights_of(product: Product, places: Sequence[_Place]) -> list[_Place]:
    """Return the first ``places`` if they are the weights of all layers of ``product``, without
    gaps; else none.
    """
    found = list(places[: len(product.layers)])
    fits = [place.module for place in found] == product.layers and {
        place.key for place in found
    } == {"weight"}
    return found if fits and all(place.array.size % _ALIGNED == 0 for place in found) else []


def _views(
    places: Sequence[_Place], products: Sequence[Product], *, apart: bool, travelling: bool
) -> list[_Packed | _Views]:
    """Return one chunk for each type of number; if the arrays are too large, one for each product
    and each other array.

    With ``travelling`` there are several in the model's order instead of one.
    """
    groups = _product_groups(places, products)
    if sum(place.array.size for place in places) > _ONE_MOST:
        parts = _large_parts(groups, apart=apart)
    else:
        together = [[place for group in groups for place in group]]
        several = _in_order(groups) if travelling else together
        parts = [part for some in several for part in _by_kind(some, apart=apart)]
    return [_Views(part, products, apart=apart) for part in parts]


def _product_groups(places: Sequence[_Place], products: Sequence[Product]) -> list[list[_Place]]:
    """Group the weights of each product, wherever they are in the model; every other array is a
    group of its own.
    """
    owners = {id(layer): product for product in products for layer in product.layers}
    groups: dict[int, list[_Place]] = {}
    for place in places:
        owner = owners.get(id(place.module)) if place.key == "weight" else None
        groups.setdefault(id(owner or place), []).append(place)
    return list(groups.values())


def _by_kind(places: Sequence[_Place], *, apart: bool) -> list[list[_Place]]:
    """Divide arrays by type of number, and with ``apart`` into matrices and other arrays."""
    kinds: dict[Any, list[_Place]] = {}
    for place in places:
        kinds.setdefault((place.array.dtype, apart and place.array.ndim > 1), []).append(place)
    return list(kinds.values())


def _large_parts(groups: Sequence[list[_Place]], *, apart: bool) -> list[list[_Place]]:
    """Return each large group, or its arrays if they are of several kinds; small groups come first,
    together.
    """
    # Norms and biases together: each would cost launches of its own for a few thousand numbers.
    small: list[_Place] = []
    parts: list[list[_Place]] = []
    for group in groups:
        if sum(place.array.size for place in group) < _SMALL:
            small += group
        else:
            parts += (
                [group] if len(_by_kind(group, apart=apart)) == 1 else [[place] for place in group]
            )
    # Small groups come first, and are exchanged last: some are of the first layers, whose gradients
    # are computed last.
    return [*_by_kind(small, apart=apart), *parts]


def _in_order(groups: Sequence[list[_Place]]) -> list[list[_Place]]:
    """Join groups in order until they have :data:`_TRAVELLING` numbers or more, or an embedding
    follows, which stays by itself.
    """
    found: list[list[_Place]] = []
    open_ = False
    for group in groups:
        alone = isinstance(group[0].module, nn.Embedding)
        if open_ and not alone:
            found[-1] += group
        else:
            found.append(list(group))
        open_ = not alone and sum(place.array.size for place in found[-1]) < _TRAVELLING
    return found


class _Packed:
    """Adapters: one float32 array of all first factors, then all second ones, from which the
    products' factors are gathered.

    In a product of several layers, first factors stand side by side, and second ones along a
    diagonal. One gather does this in one pass, and another one reverses it.
    """

    @staticmethod
    def of(places: Sequence[_Place], products: Sequence[Product], *, apart: bool) -> _Packed | None:
        """Return ``None`` if something else is trained than float32 adapters of one scale and
        compute type, or an adapter has dropout.
        """
        layers = [
            layer
            for product in products
            for layer in product.layers
            if isinstance(layer, LoRALinear)
        ]
        known = {*itertools.product(map(id, layers), ("lora_a", "lora_b"))}
        if {(id(place.module), place.key) for place in places} != known or any(map(drops, layers)):
            return None
        types = {product.dtype for product in products if product.adapted}
        if (
            len({layer.scale for layer in layers}) != 1
            or len(types) != 1
            or not _all_float32(places)
        ):
            return None
        return _Packed(places, products, apart=apart)

    def __init__(
        self, places: Sequence[_Place], products: Sequence[Product], *, apart: bool
    ) -> None:
        ordered = sorted(places, key=lambda place: place.key)
        self.chunk = FlatBuffer(ordered, spare=1, apart=apart)
        self._first = next(
            s for s, p in zip(self.chunk.starts, ordered, strict=False) if p.key == "lora_b"
        )
        starts = {
            (id(p.module), p.key): s for p, s in zip(ordered, self.chunk.starts, strict=False)
        }
        self._products = [product for product in products if product.adapted]
        self._dtype = self._products[0].dtype
        self._scale = float(ordered[0].module.scale)
        nothing = self.chunk.size - 1
        tables = [_tables(product, starts, nothing) for product in self._products]
        self._halves = [_Half([table[i] for table in tables], nothing) for i in (0, 1)]
        # The place of the gradient of each number of the chunk; numbers between arrays have none.
        self._back = [
            self._halves[0].reverse(0, self._first),
            self._halves[1].reverse(self._first, self.chunk.size),
        ]
        mx.eval(self._back, [half.index for half in self._halves])
        self._gather = with_vjp(self._forward, self._backward)

    def _forward(self, whole: mx.array) -> tuple[mx.array, ...]:
        take = kernels.spread if kernels.available() else _spread
        ready = (
            take(whole.reshape(-1), half.index, scale, self._dtype)
            for half, scale in zip(self._halves, (1.0, self._scale), strict=True)
        )
        return tuple(
            part
            for half, packed in zip(self._halves, ready, strict=True)
            for part in half.parts(packed)
        )

    def _backward(self, whole: mx.array, cotangents: Any, _parts: Any) -> mx.array:
        count = len(self._products)
        sides = (cotangents[:count], cotangents[count:])
        collect = kernels.collect if kernels.available() else _collect
        wide = [
            collect(half.joined(side), back, scale)
            for half, side, back, scale in zip(
                self._halves, sides, self._back, (1.0, self._scale), strict=True
            )
        ]
        return mx.concatenate(wide).reshape(whole.shape)

    def install(self, whole: mx.array) -> None:
        factors = self._gather(whole)
        count = len(self._products)
        for product, first, second in zip(
            self._products, factors[:count], factors[count:], strict=True
        ):
            product.give((first, second))

    def clear(self) -> None:
        for product in self._products:
            product.give(None)


def _spread(x: mx.array, index: mx.array, scale: float, dtype: mx.Dtype) -> mx.array:
    return (scale * mx.take(x, index)).astype(dtype)


def _collect(x: mx.array, index: mx.array, scale: float) -> mx.array:
    return scale * mx.take(x, index).astype(mx.float32)


def _tables(
    product: Product, starts: dict[tuple[int, str], int], nothing: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the chunk's indices of a product's factors, (K, R), (R, N); zeros: ``nothing``."""
    adapters = [layer if isinstance(layer, LoRALinear) else None for layer in product.layers]
    rank = sum(layer.lora_a.shape[1] for layer in adapters if layer is not None)
    features = next(layer.lora_a.shape[0] for layer in adapters if layer is not None)
    first = np.full((features, rank), nothing, dtype=np.int32)
    second = np.full((rank, sum(product.widths)), nothing, dtype=np.int32)
    row = column = 0
    for layer, width in zip(adapters, product.widths, strict=True):
        if layer is not None:
            a, b = layer.lora_a, layer.lora_b
            rows, columns = slice(row, row + b.shape[0]), slice(column, column + width)
            first[:, rows] = starts[id(layer), "lora_a"] + np.arange(a.size).reshape(a.shape)
            second[rows, columns] = starts[id(layer), "lora_b"] + np.arange(b.size).reshape(b.shape)
            row += b.shape[0]
        column += width
    return first, second


def _all_float32(places: Sequence[_Place]) -> bool:
    return all(place.array.dtype == mx.float32 for place in places)


class _Half(_Layout):
    """The first or the second factors of all products, one after the other."""

    def __init__(self, tables: Sequence[NDArray[np.int32]], nothing: int) -> None:
        """Take for each product a table of its numbers' places in the chunk; at ``nothing`` the
        chunk has a zero.
        """
        super().__init__([table.shape for table in tables], spare=1)
        self._numbers = np.full(self.size, nothing, dtype=np.int32)
        self._nothing = nothing
        for table, start in zip(tables, self.starts, strict=False):
            self._numbers[start : start + table.size] = table.reshape(-1)
        self.index = mx.array(self._numbers)

    def reverse(self, start: int, end: int) -> mx.array:
        """Return for each of the chunk's places from ``start`` to ``end`` its index here; the last
        index if it has none.
        """
        places = np.full(end - start, self.size - 1, dtype=np.int32)
        mine = np.flatnonzero(self._numbers != self._nothing)
        places[self._numbers[mine] - start] = mine
        return mx.array(places)
