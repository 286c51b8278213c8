"""Interface of a strategy, which divides the work of a step among ranks.

In a step the strategy computes this rank's sums (:meth:`Strategy.gradients`) and adds them up over
ranks (:meth:`Strategy.reduce`). The updater divides once and updates. Then the strategy does the
work after an update (:meth:`Strategy.after_update`). All other parts are private to each strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal

import mlx.core as mx

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Communicator, MlxGroup, SingleProcess, moved_to
from allhands.distributed.capabilities import can
from allhands.distributed.codecs import Codec
from allhands.distributed.packed import Left
from allhands.distributed.reduce import BUCKET_BYTES, sum_over_ranks
from allhands.distributed.shards import Shards
from allhands.io.regions import Region, Shape
from allhands.kernels.fused.flat_params import FlatParams
from allhands.parallel.experts import Experts
from allhands.parallel.matrices import Matrices
from allhands.parallel.passes import Passes
from allhands.parallel.piping import Piping
from allhands.parallel.registry import STRATEGIES
from allhands.parallel.rounds import Rounds
from allhands.parallel.sharding import Sharding
from allhands.parallel.sums import Gradients, Named, Reduced, Times, places_of_all


@dataclass(frozen=True)
class Exchanging:
    """The means by which a strategy exchanges gradients.

    Attributes:
        communicator: the ranks that divide the batch.
        bucket_bytes: approximate bytes of arrays that are exchanged together.
        cpu_native: True if operations compute at once.
        heartbeat: called with "reduce" before waiting for other ranks, and with "update" before
            waiting for the update.
        codec: form of packed gradients in the exchange; ``None``: not packed.
        rounds: of local steps, for a strategy with rounds.
        inject_fault: called before each message, and before each exchange at the end of a round or
            during a step; it may inject a fault.
        piping: this rank's part of the model, for a strategy that divides its blocks.
        sharding: the same for a strategy that divides its arrays; ``matrices``: for one that
            divides its matrices.
        experts: the same for one that divides experts alone.
        same_rows: the ranks that compute the same rows together.
        pieces: number of ranks that divide the token positions of each row.
    """

    communicator: Communicator
    bucket_bytes: int = BUCKET_BYTES
    cpu_native: bool = False
    heartbeat: Callable[[str], None] = lambda phase: None
    codec: Codec | None = None
    rounds: Rounds = field(default_factory=Rounds)
    inject_fault: Callable[[Literal["message", "round"]], object] = lambda point: None
    piping: Piping | None = None
    sharding: Sharding | None = None
    matrices: Matrices | None = None
    experts: Experts | None = None
    same_rows: Communicator = field(default_factory=SingleProcess)
    pieces: int = 1

    @property
    def size(self) -> int:
        return self.communicator.size

    def apart(self) -> tuple[Exchanging, Any]:
        """Return the same with its own stream, beside computations, and that stream, which all
        groups use.

        NCCL's groups already have one; ``None``: one process.
        """
        if not isinstance(self.communicator, MlxGroup):
            return self, None
        stream = self.communicator.stream or mx.new_stream(mx.cpu)
        return replace(self, communicator=moved_to(self.communicator, stream)), stream

    def reduced(
        self,
        grads: list[Named],
        numbers: Sequence[float | mx.array],
        squares: mx.array,
        extra: Sequence[float],
        *,
        lazy: bool = False,
    ) -> Reduced:
        """Return the summed gradients with the sums of all other numbers over ranks; they are
        computed, unless they may be ``lazy``.

        Args:
            squares: sum of squares of the gradients that this rank counts; all ranks together count
                each gradient once.
        """
        every = [*numbers, squares, *places_of_all(extra, self.communicator)]
        _, totals = sum_over_ranks(self.communicator, [], every)
        # Queued together with the update: alone, the host would wait for the exchange.
        if not lazy:
            mx.eval([array for _, array in grads], totals)
        self.heartbeat("update")
        return Reduced(grads, totals, totals[len(numbers)], num_gathered=self.size * len(extra))


Expected = Callable[[Reduced, bool, float], Any]


@dataclass(frozen=True)
class OneByOne:
    """The passes of examples alone.

    Attributes:
        gradient: returns loss sum and gradients of a micro-batch of one example; each rank of
            ``together`` has its part of the gradients. If they have different shares, it takes
            ``None`` for a rank without further rows.
        together: the ranks that compute each example together; all of them have to call.
        share: number of this rank's share of the rows among those of ``together``; several ranks may
            have the same share. ``None``: all have the same.
    """

    gradient: Callable[..., tuple[mx.array, Any]]
    together: Communicator
    share: int | None = None


class Strategy:
    """One way of dividing the work of a step.

    Attributes:
        name: of ``--strategy``.
        communicator: the ranks that it divides the work over.
        left: rounding error of packing for each trained array, in the passes' order, after the last
            update. It differs between ranks and is part of a checkpoint. Empty if nothing is
            packed.
        shards: the parts of the flat weights that each rank keeps and updates; ``None``:
            everything.
        laid: the trained arrays, if their layout in the gradients is fixed; ``None``: the updater
            decides.
        overlaps: True if gradients are exchanged while others are computed.
        passes_wait: True if passes wait for data from other ranks.
        spares_memory: True if the host is not to queue work that takes more memory than a step
            needs.
        sees_passes: True if this rank's passes are computed when :meth:`gradients` returns, and not
            only queued.
        keeps_own_optimizer: True if each rank has an optimizer state of its own.
        last_norm: norm of the last update's mean gradient; NaN before the first update. The step
            sets it.
        regions: shape of each divided trained array, and this rank's place in it.
    """

    name: str
    communicator: Communicator
    left: list[Left]
    shards: Shards | None = None
    laid: FlatParams | None = None
    overlaps = False
    passes_wait = False
    spares_memory = False
    sees_passes = False
    keeps_own_optimizer = False
    last_norm: float = math.nan
    regions: Mapping[str, tuple[Shape, Region]] = MappingProxyType({})

    @property
    def in_round(self) -> bool:
        """True if weights differ between ranks at present; they must not be validated or saved
        then.
        """
        return False

    @property
    def steps_left(self) -> int:
        """Number of steps until all ranks have the same weights again; 0 if they do now."""
        return 0

    def close_round(self) -> None:
        """Give all ranks the same weights, if they differ; called on all ranks together, after a
        step.
        """

    @property
    def outer_state(self) -> Mapping[str, mx.array]:
        """State besides the weights that continues over rounds, by name; it is the same on all
        ranks.
        """
        return {}

    def load_outer_state(self, state: Mapping[str, mx.array]) -> None:
        """Restore a value of :attr:`outer_state`, with the same names."""

    @property
    def own_state(self) -> Mapping[str, mx.array]:
        """This rank's own state, by name; the shapes are the same on all ranks."""
        return {}

    def load_own_state(self, state: Mapping[str, mx.array]) -> None:
        """Restore a value of :attr:`own_state` from the same number of ranks, after
        :meth:`load_outer_state`.
        """

    def place(self, leaves: FlatParams | None) -> Shards | None:
        """Decide once, before the optimizer's state exists, which part this rank owns; ``None``:
        all.

        It is not called if the optimizer's state cannot be divided.
        """
        return None

    def prepare(self, passes: Passes, expected: Expected) -> None:
        """Prepare once, before the first step, for the passes of all steps.

        Args:
            expected: returns the weights after an update by some sums, or by this rank's part of
                them. For a part it needs the norm of the last update's mean gradient (NaN: there
                was none).
        """
        raise NotImplementedError

    def gradients(self, passes: Passes, micro_batches: Sequence[MicroBatch]) -> Gradients:
        """Compute this rank's sums over ``micro_batches`` (zeros for none)."""
        raise NotImplementedError

    def begin_next(self, passes: Passes, upcoming: Callable[[], Sequence[MicroBatch]]) -> None:
        """Begin the part of the next step that does not depend on the update, before this step's
        exchange, if this strategy can.
        """

    def reduce(
        self, mine: Gradients, numbers: Sequence[float | mx.array], extra: Sequence[float] = ()
    ) -> Reduced:
        """Sum gradients and ``numbers`` over ranks.

        Args:
            extra: numbers of this rank for all others, the same number on each rank. A strategy
                that exchanges no sums in this step leaves them to the caller
                (:attr:`Reduced.num_gathered` is 0).
        """
        raise NotImplementedError

    def whole(self, parts: list[mx.array]) -> list[mx.array]:
        """Return the updated flat weights, gathered from the parts of all ranks."""
        return parts

    def after_update(self, step: int) -> None:
        """Do this strategy's work after update number ``step``; called on every rank."""

    def start_next(self, passes: Passes, upcoming: Callable[[], Sequence[MicroBatch]]) -> None:
        """Queue the next step's first pass, with weights that are still being computed, if this
        strategy can.
        """

    def wait(self, reduced: Reduced, arrays: Any, handed_out: Times, started: float) -> Times:
        """Wait for the step's lazy ``arrays``.

        Args:
            handed_out: the times until the update was queued.
            started: time of queueing, by ``time.perf_counter``.
        """
        mx.eval(arrays)
        return handed_out

    def one_by_one(self, passes: Passes) -> OneByOne:
        """Return the passes of examples alone."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop the queued pass: its weights will not be those of the next step."""


def make_strategy(name: str, exchanging: Exchanging, *, overlap: bool | None = None) -> Strategy:
    """Return the strategy of that name in the registry.

    Args:
        overlap: exchange gradients while others are computed, if they are graphs; default: with
            NCCL.
    """
    communicator = exchanging.communicator
    wanted = can(communicator.backend, "overlap") if overlap is None else overlap
    beside = wanted and communicator.size > 1 and not exchanging.cpu_native
    module, _, function = STRATEGIES[name].maker.partition(":")
    return getattr(import_module(module), function)(exchanging, beside)
