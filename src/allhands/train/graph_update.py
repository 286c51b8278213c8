"""Update of the weights by the summed gradients: one division, the norm, clipping and the
optimizer, as one graph.

On a GPU each of these is a pass over all weights that reads much and computes little, so they are
compiled into one. The GPU also decides whether all numbers are finite, so that the host need not
read them first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from allhands.distributed.shards import Shards
from allhands.io.trees import flatten, part_of, with_arrays
from allhands.kernels.fused import kernels
from allhands.kernels.fused.flat_params import FlatParams
from allhands.kernels.selection import PLAIN, selection_of
from allhands.parallel.norms import sum_of_squares
from allhands.train.optim import clip
from allhands.train.optimizers import KernelAdam, Optimizer

_HIDDEN = mx.array(0.0)
# Optimizers that update each number of an array by itself.
_ELEMENTWISE = (optim.Adam, optim.AdamW, optim.SGD)
# Number of parts of an update, and number of parts with old and new values in memory at once; these
# are more if the passes needed as much memory. Of only eight parts, two would take more memory than
# passes that recompute all blocks.
_PIECES, _AT_ONCE = 64, 2


class GraphUpdate:
    """Update ``model`` by ``optimizer``, lazily, or leave both as they are if a number is not
    finite.

    Attributes:
        flat: flat buffers of all weights, in which the gradients must be; ``None``: each weight is
            an array of its own.
        pieces: parts of the last update that are computed one after the other, because memory is
            short.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        max_norm: float | None,
        *,
        compiled: bool,
        place: Callable[[FlatParams | None], Shards | None] = lambda leaves: None,
        laid: FlatParams | None = None,
        travelling: bool = False,
    ) -> None:
        """Prepare; the optimizer's state may be new or restored.

        Args:
            place: decides which parts of the optimizer's state this rank keeps and updates.
            laid: flat buffers of the trained arrays, if the strategy has fixed their layout.
            travelling: True if ranks add up gradients while others are computed.
        """
        self.pieces = UpdatePieces()
        self._model = model
        self._selection = selection_of(model)
        self._optimizer = optimizer
        self._max_norm = max_norm
        initialise(optimizer, model)
        leaves = _buffers(model, optimizer, laid, travelling=travelling)
        # Ranks that keep parts of weights have no room for two copies of all of their weights and
        # optimizer state.
        self._one_by_one = leaves is not None and leaves is laid
        shards = place(leaves)
        self.flat = None if leaves is None else FlatState(leaves, optimizer, shards)
        if self.flat is None:
            # Lists of a restored state end with the last block that has a weight.
            optimizer.init(model.trainable_parameters())
        # Our own kernels need no compiling. For the few scalars beside them MLX would compile many
        # kernels, which takes seconds. But in an update by parts the host waits for the device, and
        # has no time to launch hundreds of kernels.
        joins_kernels = self.flat is not None and self._by_kernels()
        compiles = compiled and (not joins_kernels or self._one_by_one)
        self._function: Any = mx.compile(self._compute) if compiles else self._compute
        self._squares_first = travelling and joins_kernels

    def _by_kernels(self) -> bool:
        """True if kernels of allhands update the weights."""
        fits = isinstance(self._optimizer, KernelAdam) and kernels.available()
        return fits and self._selection.select("adamw", "cuda") != PLAIN

    def named(self, sums: Sequence[tuple[str, mx.array]]) -> list[tuple[str, mx.array]]:
        """Return the gradients by the names of the trained arrays."""
        return (
            list(sums)
            if self.flat is None
            else self.flat.leaves.named([array for _, array in sums])
        )

    def joined(self, gradients: Any) -> list[tuple[str, mx.array]]:
        """Return a tree of gradients as names and arrays for an update; the reverse of
        :meth:`named`.
        """
        found = flatten(gradients)
        if self.flat is None:
            return found
        return [
            (str(place), whole) for place, whole in enumerate(self.flat.leaves.joined(dict(found)))
        ]

    def __call__(
        self,
        sums: list[tuple[str, mx.array]],
        loss: mx.array,
        num_targets: mx.array,
        *,
        squares: mx.array | None = None,
        exchange: Callable[[list[mx.array]], list[mx.array]] | None = None,
    ) -> mx.array:
        """Queue the update of the global batch, without waiting.

        Args:
            sums: names and summed gradients, or this rank's part of sharded arrays. The list is
                emptied, because an array that is still referenced cannot be updated in place.
            loss: summed loss.
            num_targets: divisor of all sums.
            squares: sum of squares of all sums over all ranks, if ranks have parts of them.
            exchange: gathers whole weights from the ranks' parts.

        Returns:
            The norm of the mean gradient before clipping.
        """
        if (joined := self.flat) is not None:
            gradients = {str(i): array for i, (_, array) in enumerate(sums)}
            sums.clear()
            weights, state = (
                {str(i): array for i, array in enumerate(joined.parts())},
                joined.state(),
            )
            joined.forget(everywhere=self._one_by_one)
            if squares is None and self._squares_first:
                # Outside of the graph, so that only the last array waits for the last sums.
                squares = sum_of_squares(list(reversed(gradients.values())))
                mx.async_eval(squares)
            new, state, norm = self._function(gradients, weights, state, loss, num_targets, squares)
            del gradients, weights
            wholes = list(new.values())
            del new
            if exchange is not None:
                wholes = exchange(wholes)
            # The device begins while the views are made.
            self.pieces = UpdatePieces(_pieces(wholes, state) if self._one_by_one else [])
            if self.pieces:
                self.pieces.begin()
            mx.async_eval(norm if self.pieces else [wholes, state, norm])
            joined.put(state, wholes)
            if self.pieces:
                # Arrays outside of pieces. MLX waits for all queued work if one array is not
                # queued.
                mx.async_eval(joined.others())
            return norm
        weights = self._model.trainable_parameters()
        gradients = with_arrays(weights, dict(sums))
        sums.clear()
        new, state, norm = self._function(
            gradients, weights, self._optimizer.state, loss, num_targets, squares
        )
        # Only the graph still references the old arrays, so it writes the new ones in their place.
        self._model.update(new)
        self._optimizer.state = state
        return norm

    def arrays(self) -> Any:
        """Return the arrays that an update has to wait for."""
        if self.flat is not None:
            return [self.flat.weights(), self.flat.state()]
        return [self._model.trainable_parameters(), self._optimizer.state]

    def _compute(
        self,
        gradients: Any,
        weights: Any,
        state: Any,
        loss: mx.array,
        num_targets: mx.array,
        squares: mx.array | None,
    ) -> tuple[Any, Any, mx.array]:
        optimizer = self._optimizer
        # A copy of the tree, because the optimizer changes it.
        with _computing_with(optimizer, tree_map(lambda x: x, state)):
            if isinstance(optimizer, KernelAdam) and self._by_kernels():
                if squares is None:
                    # From the last gradient to the first: the last are exchanged first.
                    squares = sum_of_squares(
                        [gradient for _, gradient in reversed(flatten(gradients))]
                    )
                sums = (squares, loss, num_targets)
                new, norm = optimizer.apply_where(sums, self._max_norm, gradients, weights)
                return new, optimizer.state, norm
            divisor = mx.maximum(num_targets, 1.0)
            # In float32, because a token count can be too large for half precision.
            mean = tree_map(lambda g: (g.astype(mx.float32) / divisor).astype(g.dtype), gradients)
            mean, norm = clip(
                mean, self._max_norm, None if squares is None else mx.sqrt(squares) / divisor
            )
            finite = mx.isfinite(norm) & mx.isfinite(loss)
            new = optimizer.apply_gradients(mean, weights)
            return _chosen(finite, new, weights), _chosen(finite, optimizer.state, state), norm


def _buffers(
    model: nn.Module, optimizer: optim.Optimizer, laid: FlatParams | None, *, travelling: bool
) -> FlatParams | None:
    """Return flat buffers of the weights, ``laid`` if they fit; ``None`` if there can be none."""
    apart = getattr(optimizer, "matrices_only", False)
    if not isinstance(optimizer, _ELEMENTWISE):
        return None
    if laid is not None and not apart:
        return laid
    fits = FlatParams.fits(model)
    return FlatParams(model, apart=apart, travelling=travelling) if fits else None


def initialise(optimizer: optim.Optimizer, model: nn.Module) -> None:
    """Initialise the optimizer's state from the model's weights, if it has none."""
    if not optimizer.state.keys() - {"step", "learning_rate"}:
        optimizer.init(model.trainable_parameters())


@contextmanager
def _computing_with(optimizer: optim.Optimizer, state: Any) -> Generator[None]:
    """Use ``state`` as the optimizer's state within the block."""
    if isinstance(optimizer, Optimizer):
        with optimizer.computing_with(state):
            yield
        return
    kept = optimizer.state
    optimizer.state = state
    try:
        yield
    finally:
        optimizer.state = kept


def _pieces(weights: list[mx.array], state: Any) -> list[Any]:
    """Divide the weights and their state into pieces."""
    each, found = sum(weight.size for weight in weights) / _PIECES, list[Any]()
    for place, weight in enumerate(weights):
        if not found or sum(one.size for one, _ in found[-1]) >= each:
            found.append([])
        found[-1].append((weight, state[str(place)]))
    return found


def _chosen(finite: mx.array, after: Any, before: Any) -> Any:
    return tree_map(lambda new, old: mx.where(finite, new, old), after, before)


class UpdatePieces:
    """Parts of an update that are computed one after the other, because memory is short."""

    def __init__(self, pieces: Sequence[Any] = ()) -> None:
        self._pieces = pieces
        self._begun = self._computed = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def begin(self) -> None:
        """Queue parts until two are on their way, and more if the passes or finished parts have
        left room.
        """
        room, first = mx.get_peak_memory() - mx.get_active_memory(), self._begun
        while self._begun < len(self._pieces):
            room -= sum(array.nbytes for _, array in flatten(self._pieces[self._begun]))
            if room < 0 and self._begun >= self._computed + _AT_ONCE:
                break
            self._begun += 1
        mx.async_eval(self._pieces[first : self._begun])

    def finish(self) -> None:
        """Compute all parts that are not computed yet, and forget them."""
        while self._begun < len(self._pieces):
            mx.eval(self._pieces[self._computed])
            self._computed += 1
            self.begin()
        # A remaining reference would keep the next update from writing in their place.
        self._pieces, self._begun, self._computed = (), 0, 0


class FlatState:
    """Flat buffers of the weights and of the optimizer's state; model and optimizer hold views of
    them.

    Attributes:
        leaves: the place of each weight in the flat buffers.
        shards: the parts that each rank keeps and updates; ``None``: each rank keeps everything.
    """

    def __init__(
        self, leaves: FlatParams, optimizer: optim.Optimizer, shards: Shards | None = None
    ) -> None:
        self.leaves = leaves
        self._optimizer = optimizer
        self.shards = shards
        self._places = [place for chunk in leaves.chunks for place in chunk.places]
        self._homes = [part_of(optimizer.state, place.name) for place in self._places]
        self._views: list[mx.array] = []
        self._weights: list[mx.array] = []
        weights = self._join([place.array for place in self._places])
        self._names = list(self._homes[0])
        self._shown = True
        state: dict[str, Any] = {}
        homes = iter(self._homes)
        for i, chunk in enumerate(leaves.chunks):
            mine = [next(homes) for _ in chunk.places]
            state[str(i)] = {
                name: self._kept(i, chunk.joined([h[name] for h in mine])) for name in self._names
            }
            # One after the other, so that only one buffer exists twice. A rank that keeps a part
            # makes a whole buffer first.
            mx.eval(state[str(i)])
            for home in mine:
                home.update(dict.fromkeys(self._names, _HIDDEN))
        self._state: dict[str, Any] = {}
        # Views from the first step on, because the last bits of products may depend on the address
        # of their factors.
        self.put({**state, **self.others()}, weights)
        mx.eval(self._weights, self._state)

    def _kept(self, index: int, whole: mx.array) -> mx.array:
        """Return this rank's part of a flat buffer's array."""
        # Contiguous: in memory of its own.
        return whole if self.shards is None else mx.contiguous(self.shards.part(index, whole))

    def others(self) -> dict[str, mx.array]:
        """Return the optimizer's state that belongs to no weight."""
        return {
            name: value for name, value in self._present().items() if isinstance(value, mx.array)
        }

    def _present(self) -> Any:
        """The optimizer's state; the views of single weights may be out of date."""
        optimizer = self._optimizer
        return optimizer.present_state if isinstance(optimizer, Optimizer) else optimizer.state

    def _join(self, arrays: list[mx.array]) -> list[mx.array]:
        return self.leaves.joined(
            {place.name: array for place, array in zip(self._places, arrays, strict=True)}
        )

    def weights(self) -> list[mx.array]:
        """Return all trained weights, including those that other code has set since the update."""
        present = [place.array for place in self._places]
        if any(one is not other for one, other in zip(present, self._views, strict=True)):
            self._weights, self._views = self._join(present), present
        return self._weights

    def parts(self) -> list[mx.array]:
        """Return the parts of :meth:`weights` that this rank updates."""
        weights, shards = self.weights(), self.shards
        return (
            weights
            if shards is None
            else [shards.part(i, whole) for i, whole in enumerate(weights)]
        )

    def state(self) -> dict[str, Any]:
        """Return the optimizer's state; its keys are numbers of flat buffers instead of names of
        weights.
        """
        return {**self._state, **self.others()}

    def forget(self, *, everywhere: bool = False) -> None:
        """Drop the references to arrays that the next :meth:`put` replaces, so that it can write in
        place. ``everywhere``: also those of the model.
        """
        self._weights, self._state, self._views = [], {}, []
        for place in self._places if everywhere else ():
            place.module[place.key] = _HIDDEN

    def put(self, state: dict[str, Any], weights: list[mx.array] | None = None) -> None:
        """Give the arrays to the model and the optimizer; weights change only if they are given."""
        weights = self.weights() if weights is None else weights
        self._weights = weights
        self._state = {str(i): state[str(i)] for i in range(len(weights))}
        self._views = [array for _, array in self.leaves.named(weights)]
        for place, view in zip(self._places, self._views, strict=True):
            place.module[place.key] = view
        present = self._present()
        for name, value in state.items():
            if name not in self._state:
                present[name] = value
        optimizer = self._optimizer
        if isinstance(optimizer, Optimizer):
            self._hide()
            optimizer.show_later(self._show)
        else:
            self._show()

    def _show(self) -> None:
        """Give the optimizer a view of its state for each weight.

        Not done in each step: thousands of views take too much time.
        """
        if self.shards is not None:
            raise RuntimeError(
                "this rank has a part of the optimizer's state: see FlatState.state()"
            )
        self._shown = True
        for name in self._names:
            arrays = [self._state[str(i)][name] for i in range(len(self._weights))]
            for home, (_, array) in zip(self._homes, self.leaves.named(arrays), strict=True):
                home[name] = array

    def _hide(self) -> None:
        """Drop outdated views, which would keep their arrays in memory."""
        if self._shown:
            self._shown = False
            for home in self._homes:
                home.update(dict.fromkeys(self._names, _HIDDEN))
