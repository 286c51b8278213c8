"""Passes over blocks whose arrays are fetched, as one graph that a device computes block by block.

Forward and backward pass of a micro-batch are built together, and computed one after the other. A
block is computed once: its products keep their inputs for the backward pass, which multiplies by
weights that are fetched anew (:mod:`allhands.kernels.fused.again`). If a block multiplies in
another way, or if memory is short, only its input is kept, and the block is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.dora import DoRALinear

from allhands.distributed.backend import Collective
from allhands.kernels.fastmath import with_vjp
from allhands.kernels.fused.again import FrozenLinear, FrozenQuantizedLinear, give_again
from allhands.kernels.fused.linear import DenseQuantizedLinear, Product, TrainedLinear, products_of
from allhands.kernels.instances import give_form
from allhands.objectives.base import Objective
from allhands.parallel.engine import StageCompute
from allhands.parallel.gradient import Computing
from allhands.parallel.rows import DividedRow, Slot
from allhands.parallel.sharding import Sharding, Unit

_FETCHED_AGAIN = (FrozenLinear, FrozenQuantizedLinear, DenseQuantizedLinear, TrainedLinear)
# Largest part of a block's bytes that may stay in memory from the forward to the backward pass.
_MAY_STAY = 1 / 16
# Bytes that a block keeps, relative to the outputs of its products: with fused attention and
# feed-forward part, measured on an H200 (benchmarks/gpu_sharded.py: 7b), and with MLX's own
# operations, measured on a CPU for six architectures.
_KEPT_FUSED, _KEPT = 1.25, 3.5
# Number of first blocks that are computed while the host ends a step.
_FIRST = 2
# Most blocks at the end of a backward pass that the host does not wait for, if others have left
# room: meanwhile it hands out the update and the next passes.
_AHEAD = 3


@dataclass
class _Segment:
    """Arrays end to end in a row that are used as one: one array, or the weights of all layers of a
    product.

    Attributes:
        again: true if the backward pass uses another array for it.
    """

    places: tuple[Slot, ...]
    again: bool
    product: Product | None = None

    @property
    def looked_up(self) -> bool:
        """True for a table of embeddings, whose numbers no backward pass needs."""
        return _is_table(self)

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.places[0].shape
        return (
            first
            if self.product is None
            else (sum(place.shape[0] for place in self.places), *first[1:])
        )

    def part(self, row: mx.array) -> mx.array:
        """Cut the segment out of a row whose arrays lie end to end."""
        start, last = self.places[0].start, self.places[-1]
        return row[start : last.start + last.size].reshape(self.shape)


def _is_table(arrays: _Segment | DividedRow) -> bool:
    return isinstance(arrays.places[0].module, nn.Embedding | nn.QuantizedEmbedding)


class _Block:
    """A unit whose arrays are given for the forward pass, and again for the backward pass.

    Attributes:
        segments: segments of each of the unit's rows, in order.
        once: True if the unit can be computed once, and nothing large stays in memory for the
            backward pass.
        again: the rows that the backward pass needs once more.
    """

    def __init__(
        self,
        unit: Unit,
        compute: StageCompute,
        able: set[int],
        products: Sequence[Product],
        *,
        twice: bool,
    ) -> None:
        """``twice``: the unit is to be computed twice in any case."""
        self.unit = unit
        self._compute = compute
        self.segments = [_segments(row, able, products) for row in unit.rows]
        sizes = {True: 0, False: 0}
        for segment in self.every:
            if not segment.looked_up:
                sizes[segment.again] += sum(
                    place.size * place.module[place.key].dtype.size for place in segment.places
                )
        self.once = not twice and sizes[False] <= _MAY_STAY * sum(sizes.values())
        rows = zip(unit.rows, self.segments, strict=True)
        self.again = [
            row for row, parts in rows if not self.once or any(each.again for each in parts)
        ]

    @property
    def every(self) -> list[_Segment]:
        """All segments of the unit."""
        return [segment for segments in self.segments for segment in segments]

    @property
    def trained(self) -> list[bool]:
        """True for each of :attr:`every` that is trained."""
        rows = zip(self.unit.rows, self.segments, strict=True)
        return [row.trained for row, segments in rows for _ in segments]

    def bytes_kept(self, tokens: int) -> float:
        """Estimate the bytes that stay between the passes of so many tokens if the block is
        computed once.
        """
        outputs = sum(
            segment.shape[-2] for segment in self.every if segment.again and len(segment.shape) > 1
        )
        stage: Any = self.unit.stage
        block: nn.Module = stage.model.layers[stage.blocks.first]
        fused = sum(hasattr(module, "_group") for module in block.modules()) > 1
        return (_KEPT_FUSED if fused else _KEPT) * tokens * outputs * stage.dtype.size

    def values(self, wholes: Sequence[mx.array], *, alone: bool) -> list[mx.array]:
        """Return the arrays of :attr:`every`, from whole rows; ``alone``: arrays that are not
        fetched again get memory of their own.
        """
        found: list[mx.array] = []
        for row, segments, whole in zip(self.unit.rows, self.segments, wholes, strict=True):
            arrays = _arrays_of(row, segments, whole)
            if alone and row in self.again:
                arrays = [
                    a if each.again else mx.contiguous(a)
                    for a, each in zip(arrays, segments, strict=True)
                ]
            found += arrays
        return found

    def values_again(self, wholes: Sequence[mx.array], first: Sequence[mx.array]) -> list[mx.array]:
        """Return the arrays of :attr:`every` for the backward pass: from ``wholes``, the rows
        :attr:`again`, or else from ``first``.
        """
        rows, at, found = iter(wholes), 0, list[mx.array]()
        for row, segments in zip(self.unit.rows, self.segments, strict=True):
            own = first[at : at + len(segments)]
            at += len(segments)
            if row not in self.again:
                found += own
                continue
            whole = next(rows)
            arrays = _arrays_of(row, segments, whole)
            once = self.once
            found += [
                o if once and not s.again else a
                for o, s, a in zip(own, segments, arrays, strict=True)
            ]
        return found

    def outputs(
        self,
        received: mx.array | None,
        arrays: Sequence[mx.array],
        again: Sequence[mx.array] | None,
        arguments: tuple[mx.array, ...],
    ) -> list[mx.array]:
        """Return the unit's outputs, computed with ``arrays``; the backward pass uses ``again``."""
        with self._installed(arrays, again):
            return self._compute.computed(received, arguments)

    def outputs_of_input(
        self,
        received: mx.array | None,
        arrays: Sequence[mx.array],
        again: Sequence[mx.array],
        arguments: tuple[mx.array, ...],
    ) -> list[mx.array]:
        """Return :meth:`outputs`, but keep only the input: the backward pass computes the unit once
        more.
        """
        trained = self.trained
        before = [] if received is None else [received]

        def run(primals: Sequence[mx.array], base: Sequence[mx.array]) -> mx.array:
            given = iter(primals[len(before) :])
            mine = [next(given) if own else array for own, array in zip(trained, base, strict=True)]
            return self.outputs(primals[0] if before else None, mine, None, arguments)[0]

        def backward(primals: Any, cotangent: mx.array, _: Any) -> Any:
            primals = [primals] if isinstance(primals, mx.array) else list(primals)
            mine = [array for own, array in zip(trained, again, strict=True) if own]
            _, found = mx.vjp(
                lambda *p: run(p, again), [*primals[: len(before)], *mine], [cotangent]
            )
            return tuple(found) if len(found) > 1 else found[0]

        mine = [array for own, array in zip(trained, arrays, strict=True) if own]
        return [with_vjp(lambda *primals: run(primals, arrays), backward)(*before, *mine)]

    def gradients(self, found: Sequence[mx.array]) -> list[mx.array]:
        """Join the gradients of segments to those of the trained rows."""
        rest, rows = list(found), list[mx.array]()
        for row, segments in zip(self.unit.rows, self.segments, strict=True):
            if row.trained:
                rows.append(row.joined(rest[: len(segments)]))
                del rest[: len(segments)]
        return rows

    @contextmanager
    def _installed(
        self, arrays: Sequence[mx.array], again: Sequence[mx.array] | None
    ) -> Generator[None]:
        others: dict[int, tuple[nn.Module, dict[str, mx.array]]] = {}
        try:
            for at, (segment, array) in enumerate(zip(self.every, arrays, strict=True)):
                other = again[at] if again is not None and segment.again else None
                if segment.product is not None:
                    segment.product.give(array, other)
                    continue
                (place,) = segment.places
                place.module[place.key] = array
                if other is not None:
                    others.setdefault(id(place.module), (place.module, {}))[1][place.key] = other
            for module, mine in others.values():
                give_again(module, mine)
            yield
        finally:
            for segment in self.every:
                if segment.product is not None:
                    segment.product.give(None)
            for module, mine in others.values():
                give_again(module, None)
                # For backward passes that read their module's arrays when they are built.
                module.update(mine)


def _arrays(fetched: Sequence[Sequence[Collective]]) -> list[list[mx.array]]:
    """Return the arrays of each block's exchanges: its rows."""
    return [[each.array for each in rows] for rows in fetched]


def _arrays_of(row: DividedRow, segments: Sequence[_Segment], whole: mx.array) -> list[mx.array]:
    """The arrays of a row's segments."""
    if not row.end_to_end:
        return row.arrays(whole)
    joined = row.row(whole)
    return [segment.part(joined) for segment in segments]


def _able(model: nn.Module) -> set[int]:
    """Give linear layers a form whose backward pass may use other arrays; return the identities of
    the layers that have one.
    """
    modules = model.modules()
    # DoRA looks at the weights of the layer below.
    below = {id(module["linear"]) for module in modules if isinstance(module, DoRALinear)}
    for module in modules:
        if type(module) is nn.Linear:
            give_form(
                module, TrainedLinear if "weight" in module.trainable_parameters() else FrozenLinear
            )
        elif type(module) is nn.QuantizedLinear:
            give_form(module, FrozenQuantizedLinear)
    return {id(module) for module in modules if isinstance(module, _FETCHED_AGAIN)} - below


def _segments(row: DividedRow, able: set[int], products: Sequence[Product]) -> list[_Segment]:
    """Divide a row: the trained weights of one product's layers are a segment, and so is each other
    array.
    """
    rest, found = list(row.places), list[_Segment]()
    while rest:
        again = id(rest[0].module) in able and rest[0].key in ("weight", "scales", "biases")
        product = _product_at(rest, products) if row.trained and row.end_to_end and again else None
        found.append(
            _Segment(tuple(rest[: 1 if product is None else len(product.layers)]), again, product)
        )
        del rest[: len(found[-1].places)]
    return found


def _product_at(places: Sequence[Slot], products: Sequence[Product]) -> Product | None:
    """The product of several layers whose weights are the first of ``places``, if there is one."""
    for product in products:
        several = places[: len(product.layers)]
        same = len(several) == len(product.layers) > 1 and all(
            map(_is_weight_of, several, product.layers)
        )
        if same:
            return product
    return None


def _is_weight_of(place: Slot, layer: nn.Module) -> bool:
    return place.module is layer and place.key == "weight"


class _Graph:
    """A micro-batch's passes, still to be computed; empty without ``found``.

    Attributes:
        sums: sums of the objective.
        hidden: outputs of each block but the last one.
        gradients: gradients of each block's rows, from the block ``first`` on.
    """

    def __init__(self, first: int, found: tuple[Any, Any, Any] | None) -> None:
        self._first = first
        self.sums: list[mx.array] = [] if found is None else found[0]
        self.hidden: list[list[mx.array]] = [] if found is None else [[a] for a in found[1]]
        self.gradients: list[list[mx.array]] = [] if found is None else found[2]

    def forward(self, at: int) -> list[mx.array]:
        """Return a block's output; for the last block, the sums and its gradients."""
        if not self.sums:
            return []
        return self.hidden[at] if at < len(self.hidden) else [*self.sums, *self.backward(at)]

    def backward(self, at: int) -> list[mx.array]:
        """The gradients of a block's rows."""
        return self.gradients[at - self._first] if self.sums else []

    def drop_output(self, at: int) -> None:
        """Forget a block's output, which stays as long as a backward pass needs it."""
        if at < len(self.hidden):
            self.hidden[at] = []

    def drop(self, at: int) -> None:
        """Forget the gradients of a block's rows."""
        if self.sums:
            self.gradients[at - self._first] = []


@dataclass
class FetchedPasses:
    """A micro-batch's passes, and each block's rows: ``wholes`` for the forward pass, ``again`` for
    the backward pass.

    Attributes:
        begun: number of first blocks whose rows are on their way.
        ahead: number of blocks at the end that the host does not wait for.
    """

    wholes: list[list[Collective]]
    again: list[list[Collective]]
    graph: _Graph
    begun: int = 0
    ahead: int = 0


class FetchedGraph:
    """The passes of a whole model whose arrays are fetched for one block at a time.

    Args:
        wait: waits for arrays that other ranks send.
        computed: waits for results of the device, which may itself wait for other ranks.
        pushes: called before gradients are added up over ranks.
        room: returns the bytes available for what blocks keep between the passes; ``None``: enough.

    Attributes:
        rows: the trained rows, in the order of their gradients.
    """

    def __init__(
        self,
        sharding: Sharding,
        objective: Objective,
        computing: Computing,
        *,
        wait: Callable[[list[mx.array]], None] = mx.eval,
        computed: Callable[[list[mx.array]], None] = mx.eval,
        pushes: Callable[[], object] = lambda: None,
        room: Callable[[], float] | None = None,
    ) -> None:
        self._sharding, self._pushes, self._room = sharding, pushes, room
        self._wait, self._computed = wait, computed
        self._compiled = computing.compiled
        self._units, self._first = sharding.units, sharding.first_trained
        facts = _able(sharding.model), products_of(sharding.model.modules())
        self._blocks = [
            _Block(
                unit,
                StageCompute(unit.stage, objective, computing, unit, modules=unit.modules),
                *facts,
                twice=sharding.fetching.twice,
            )
            for unit in sharding.units
        ]
        self._functions: dict[frozenset[int], Any] = {}
        self._twice: dict[int, frozenset[int]] = {}
        self._aheads: dict[int, int] = {}
        self.rows = list(
            {id(row): row for unit in self._units for row in unit.trained_rows}.values()
        )

    def computed_twice(self, tokens: int) -> frozenset[int]:
        """Return the blocks that are computed once more in the backward pass of a micro-batch of so
        many tokens.

        The choice for a number of tokens stays, because each choice is a graph of its own.
        """
        if tokens not in self._twice:
            self._twice[tokens] = frozenset(self._chosen(tokens))
        return self._twice[tokens]

    def _chosen(self, tokens: int) -> set[int]:
        last, fetching = len(self._units) - 1, self._sharding.fetching
        found = {
            at
            for at in range(self._first, last)
            if fetching.twice or not (self._blocks[at].once or fetching.keeps)
        }
        if self._room is None or fetching.twice:
            return found
        # Not the first block, whose input is looked up. Of the others, the first ones keep their
        # arrays the longest.
        others = [at for at in range(max(self._first, 1), last) if at not in found]
        missing = sum(self._blocks[at].bytes_kept(tokens) for at in others) - self._room()
        for at in others:
            if missing <= 0:
                break
            missing -= self._blocks[at].bytes_kept(tokens)
            found.add(at)
        return found

    def first_rows(self) -> list[list[Collective]]:
        """Return the first blocks' rows, which are still to be fetched by :meth:`begin_first`."""
        return [self._sharding.wholes(unit.rows) for unit in self._units[:-1][:_FIRST]]

    def begin_first(self, rows: list[list[Collective]], prepared: FetchedPasses | None) -> None:
        """Begin to fetch the first blocks' rows, and to compute these blocks if their passes are
        ``prepared``; called on all ranks together.
        """
        for place, each in enumerate(rows):
            self._sharding.begin(each)
            if prepared is not None:
                mx.async_eval(prepared.graph.forward(place))

    def prepare(
        self,
        arguments: tuple[mx.array, ...] | None,
        tokens: int,
        first_rows: Sequence[list[Collective]] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> FetchedPasses:
        """Build the passes of a micro-batch of so many tokens, without computing anything yet.

        Args:
            arguments: the micro-batch; ``None``: there is none.
            first_rows: rows with which :meth:`begin_first` is called before :meth:`begin`; default:
                :meth:`begin` fetches them.
            meanwhile: called between the parts of the host's work.
        """
        sharding, begun = self._sharding, len(first_rows)
        rest = [sharding.wholes(unit.rows) for unit in self._units[begun:]]
        # Copies of these lists, because the caller may still use them.
        wholes = [*map(list, first_rows), *rest]
        meanwhile()
        again = [sharding.wholes(self._again(at)) for at in range(len(self._units))]
        if arguments is None:
            return FetchedPasses(wholes, again, _Graph(self._first, None), begun)
        function, ahead = self._function(self.computed_twice(tokens)), self._ahead(tokens)
        meanwhile()
        graph = _Graph(self._first, function(_arrays(wholes), _arrays(again), list(arguments)))
        return FetchedPasses(wholes, again, graph, begun, ahead)

    def _ahead(self, tokens: int) -> int:
        """Return the number of blocks at the end of a backward pass that the host need not wait
        for: they fit into the memory that other blocks have given back.
        """
        if tokens in self._aheads:
            return self._aheads[tokens]
        twice, stop = self.computed_twice(tokens), self._first + _AHEAD
        given_back = sum(
            self._blocks[at].bytes_kept(tokens)
            for at in range(stop, len(self._units) - 1)
            if at not in twice
        )
        # Rows and their gradients.
        needed = 2 * sum(row.size * row.dtype.size for row in self._units[self._first].rows)
        self._aheads[tokens] = int(min(_AHEAD, given_back // needed))
        return self._aheads[tokens]

    def begin(self, prepared: FetchedPasses) -> tuple[list[mx.array], list[mx.array]]:
        """Return the sums of a micro-batch, and this rank's parts of the gradients of :attr:`rows`,
        summed over ranks.

        Called on all ranks together; a rank without a micro-batch only takes part in what others
        exchange.
        """
        last, first = len(self._units) - 1, self._first
        wholes, again, graph = prepared.wholes, prepared.again, prepared.graph
        before, parts = list[mx.array](), dict[int, mx.array]()
        if not prepared.begun:
            self._sharding.begin(wholes[0])
        for at in range(last + 1):
            before = self._next(
                wholes,
                at,
                graph.forward(at),
                before,
                wholes[at + 1] if at < last else again[at - 1],
            )
            graph.drop_output(at)

        def push(at: int) -> None:
            self._push(self._units[at], graph.backward(at) if graph.sums else None, parts)
            graph.drop(at)

        tables = self._tables(again)

        def following(at: int) -> list[Collective]:
            if at == 0:
                return tables
            return again[at - 1] if at > 1 else again[0][len(tables) :]

        # The last block's passes are computed together; the others' backward passes follow. A
        # block's gradients are sent after the next rows, for which the computation waits.
        for at in range(last - 1, first - 1, -1):
            wanted, late = graph.backward(at), at - first < prepared.ahead
            if at == last - 1 and not self._sharding.fetching.twice:  # memory is fullest
                self._computed(before)
                before = []
            before = self._next(
                again, at, wanted, before, following(at), partial(push, at + 1), waits=not late
            )
        push(first)
        return graph.sums, [parts[id(row)] for row in self.rows]

    def _next(
        self,
        fetched: list[list[Collective]],
        at: int,
        wanted: list[mx.array],
        before: list[mx.array],
        following: list[Collective],
        push: Callable[[], None] = lambda: None,
        *,
        waits: bool = True,
    ) -> list[mx.array]:
        """Compute ``wanted`` with a block's rows, while the ``following`` rows are fetched; return
        ``wanted``.

        If it ``waits``, the host waits for what was wanted ``before``: so at most two blocks are on
        the way, with the rows of three.
        """
        sharding = self._sharding
        if not sharding.scatters:  # else the device waits by itself, without the host
            self._wait([each.array for each in fetched[at]])
        fetched[at] = []
        sharding.begin(following)
        push()
        mx.async_eval(wanted)
        if waits:
            self._computed(before)
        return wanted

    def _tables(self, again: list[list[Collective]]) -> list[Collective]:
        """Return the embedding tables that the first block needs once more, if they are fetched
        only when it is computed: they are large, and would be there when memory is fullest.
        """
        if not (self._sharding.fetching.twice and self._sharding.scatters):
            return []
        return again[0][: sum(map(_is_table, self._again(0)))]

    def _again(self, at: int) -> list[DividedRow]:
        """The rows of a block that are fetched once more."""
        between = self._first <= at < len(self._units) - 1
        return self._blocks[at].again if between and not self._sharding.fetching.keeps else []

    def _push(
        self, unit: Unit, gradients: list[mx.array] | None, parts: dict[int, mx.array]
    ) -> None:
        rows = unit.trained_rows
        given = [row.joined(None) for row in rows] if gradients is None else gradients
        for _ in rows:
            self._pushes()
        # The gradient of a table of embeddings is computed last.
        order = sorted(range(len(rows)), key=lambda at: _is_table(rows[at]))
        rows, given = [rows[at] for at in order], [given[at] for at in order]
        for row, new in zip(rows, self._sharding.push_rows(rows, given), strict=True):
            before = parts.get(id(row))
            parts[id(row)] = new if before is None else before + new

    def _function(self, twice: frozenset[int]) -> Any:
        """Return the function of whole rows and a micro-batch that gives the parts of a
        :class:`_Graph`.
        """
        if twice not in self._functions:

            def function(wholes: Any, again: Any, arguments: Any) -> Any:
                return self._traced(wholes, again, tuple(arguments), twice)

            state = [mx.random.state]
            self._functions[twice] = (
                mx.compile(function, inputs=state, outputs=state) if self._compiled else function
            )
        return self._functions[twice]

    def _traced(
        self,
        wholes: list[list[mx.array]],
        again: list[list[mx.array]],
        arguments: tuple[mx.array, ...],
        twice: frozenset[int],
    ) -> tuple[list[mx.array], list[mx.array], list[list[mx.array]]]:
        blocks, first = self._blocks, self._first
        values = [
            block.values(whole, alone=bool(again[at]))
            for at, (block, whole) in enumerate(zip(blocks, wholes, strict=True))
        ]

        def run(trained: list[list[mx.array]]) -> tuple[mx.array, list[mx.array]]:
            hidden: list[mx.array] = []
            for at, block in enumerate(blocks):
                given = iter(trained[at - first] if at >= first else ())
                arrays = [
                    next(given) if own and at >= first else array
                    for own, array in zip(block.trained, values[at], strict=True)
                ]
                other = block.values_again(again[at], arrays) if again[at] else None
                received = hidden[-1] if hidden else None
                if at in twice:
                    found = block.outputs_of_input(received, arrays, other or arrays, arguments)
                else:
                    found = block.outputs(received, arrays, other, arguments)
                hidden += found
            count = len(blocks) - 1
            return hidden[count], [*hidden[:count], *hidden[count + 1 :]]

        trained = [
            [array for own, array in zip(block.trained, arrays, strict=True) if own]
            for block, arrays in zip(blocks[first:], values[first:], strict=True)
        ]
        try:
            (loss, rest), found = mx.value_and_grad(run)(trained)
        finally:
            for block in blocks:
                block.unit.remove()
        count = len(blocks) - 1
        gradients = [
            block.gradients(each) for block, each in zip(blocks[first:], found, strict=True)
        ]
        return [loss, *rest[count:]], rest[:count], gradients
