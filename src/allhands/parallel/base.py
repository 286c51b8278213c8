"""The contract of a strategy, which divides the work of a step among ranks.

A step is: the strategy computes this rank's sums (:meth:`Strategy.gradients`), adds them up over ranks
(:meth:`Strategy.reduce`), the updater divides once and updates, and the strategy does what follows
(:meth:`Strategy.after_update`). Everything else that one way needs is private to its strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import mlx.core as mx

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Communicator
from allhands.distributed.capabilities import can
from allhands.distributed.codecs import Codec
from allhands.distributed.packed import Left
from allhands.distributed.reduce import BUCKET_BYTES
from allhands.distributed.shards import Shards
from allhands.kernels.fused.flat_params import FlatParams
from allhands.parallel.passes import Passes
from allhands.parallel.piping import Piping
from allhands.parallel.registry import STRATEGIES
from allhands.parallel.rounds import Rounds
from allhands.parallel.sums import Gradients, Reduced, Times


@dataclass(frozen=True)
class Exchanging:
    """The means by which a strategy exchanges gradients.

    Attributes:
        communicator: the ranks that divide the batch.
        bucket_bytes: arrays travel together up to about so many.
        cpu_native: whether operations compute when they are called.
        heartbeat: is told "reduce" before other ranks are waited for, and "update" before the update is.
        codec: how gradients are packed on the way; ``None``: they are not.
        rounds: of local steps, for a strategy that makes such.
        inject_fault: is asked before each message, and before each exchange at the end of a round or beside a step,
            whether to fail on purpose.
        piping: this rank's part of the model, for a strategy that divides its blocks.
    """

    communicator: Communicator
    bucket_bytes: int = BUCKET_BYTES
    cpu_native: bool = False
    heartbeat: Callable[[str], None] = lambda phase: None
    codec: Codec | None = None
    rounds: Rounds = field(default_factory=Rounds)
    inject_fault: Callable[[Literal["message", "round"]], object] = lambda point: None
    piping: Piping | None = None

    @property
    def size(self) -> int:
        return self.communicator.size


Expected = Callable[[Reduced, bool, float], Any]


class Strategy:
    """One way of dividing the work of a step.

    Attributes:
        name: of ``--strategy``.
        communicator: the ranks that it divides the work over.
        left: of each trained array, in the passes' order, what packing has left out of this rank's gradients after the
            last update: every rank's own, and part of a checkpoint. Empty where nothing is packed.
        shards: the parts that each rank keeps and updates of the flat weights; ``None``: everything.
        overlaps: whether gradients travel while others are computed.
        passes_wait: whether passes wait for what other ranks send.
        sees_passes: whether this rank's passes are computed when :meth:`gradients` returns, and not only handed out.
        keeps_own_optimizer: whether the optimizer's state is another one on each rank.
    """

    name: str
    communicator: Communicator
    left: list[Left]
    shards: Shards | None = None
    overlaps = False
    passes_wait = False
    sees_passes = False
    keeps_own_optimizer = False

    @property
    def in_round(self) -> bool:
        """True if the weights are this rank's own for now, and no result: not to be validated or saved."""
        return False

    @property
    def steps_left(self) -> int:
        """Steps until the weights are those of all ranks again; 0 where they are."""
        return 0

    def close_round(self) -> None:
        """Make the weights those of all ranks, if they are not; called on all ranks together, after a step."""

    @property
    def outer_state(self) -> Mapping[str, mx.array]:
        """State that is kept from round to round besides the weights, by names; the same on all ranks."""
        return {}

    def load_outer_state(self, state: Mapping[str, mx.array]) -> None:
        """Take what :attr:`outer_state` was, with the same names."""

    @property
    def own_state(self) -> Mapping[str, mx.array]:
        """State of this rank alone, by names; the shapes are the same on all ranks."""
        return {}

    def load_own_state(self, state: Mapping[str, mx.array]) -> None:
        """Take what :attr:`own_state` was on as many ranks, after :meth:`load_outer_state`."""

    def place(self, leaves: FlatParams | None) -> Shards | None:
        """Decide once, before the optimizer's state is laid out, what this rank owns; ``None``: everything.

        Not called where the optimizer's state cannot be divided.
        """
        return None

    def prepare(self, passes: Passes, expected: Expected) -> None:
        """Called once, before the first step, with the passes that it will be given.

        Args:
            expected: gives the weights that an update by some sums, or by this rank's part of them, would make; for a
                part it needs the norm of the last update's mean gradient (NaN: there was none).
        """
        raise NotImplementedError

    def gradients(self, passes: Passes, micro_batches: Sequence[MicroBatch]) -> Gradients:
        """This rank's sums over ``micro_batches`` (zeros for none)."""
        raise NotImplementedError

    def begin_next(self, passes: Passes, upcoming: Callable[[], Sequence[MicroBatch]]) -> None:
        """Begin with what no update changes of the next step, before this step's exchange, if this strategy can."""

    def reduce(self, mine: Gradients, numbers: Sequence[float | mx.array], extra: Sequence[float] = ()) -> Reduced:
        """Sum gradients and ``numbers`` over ranks.

        Args:
            extra: numbers of this rank for all others, as many on each rank. A strategy that exchanges no sums in this
                step leaves them to whoever asks (:attr:`Reduced.num_gathered` is 0).
        """
        raise NotImplementedError

    def whole(self, parts: list[mx.array]) -> list[mx.array]:
        """The updated flat weights, of what each rank has updated."""
        return parts

    def after_update(self, step: int, norm: float) -> None:
        """Called on every rank when the model has the weights of ``step`` updates.

        Args:
            norm: of the last one's mean gradient.
        """

    def start_next(self, passes: Passes, upcoming: Callable[[], Sequence[MicroBatch]]) -> None:
        """Hand out the next step's first pass, of weights that are still being computed, if this strategy can."""

    def wait(self, reduced: Reduced, arrays: Any, handed_out: Times, started: float) -> Times:
        """Wait for the step's lazy ``arrays``.

        Args:
            handed_out: the times until the update was handed out.
            started: when it was, by ``time.perf_counter``.
        """
        mx.eval(arrays)
        return handed_out

    def one_by_one(self, passes: Passes) -> tuple[Callable[[MicroBatch], tuple[mx.array, Any]], Communicator]:
        """The loss sum and the gradients of examples alone, and the ranks that compute each of them together.

        All of these have to ask for the same ones; each has its own part of the gradients.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Throw away what was handed out ahead: its weights will not be those of the next step."""


def make_strategy(name: str, exchanging: Exchanging, *, overlap: bool | None = None) -> Strategy:
    """The strategy of that name in the registry.

    Args:
        overlap: whether gradients travel while others are computed, where they are graphs; default: with NCCL.
    """
    communicator = exchanging.communicator
    wanted = can(communicator.backend, "overlap") if overlap is None else overlap
    beside = wanted and communicator.size > 1 and not exchanging.cpu_native
    module, _, function = STRATEGIES[name].maker.partition(":")
    return getattr(import_module(module), function)(exchanging, beside)
