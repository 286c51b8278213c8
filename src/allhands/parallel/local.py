"""Local steps: each rank updates by its own gradients, and every so many steps the ranks' weights become one.

After a round each rank has changed the weights x of its beginning to x_r. What they have in common from then on is an
outer step along the mean change: d = sum_r (n_r / n) (x_r - x), where n_r are the tokens that rank r trained on in the
round; m = momentum * m + d; x + learning_rate * (d + momentum * m). By default that is the mean of the weights (local
SGD, arXiv 1805.09767); with Nesterov's momentum it is DiLoCo (arXiv 2311.08105).

A rank divides its gradients by its own tokens. Weighting its change by them again makes a round of one step of plain
SGD the step of data parallelism, whatever the lengths of the ranks' rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from allhands.data.loader import MicroBatch
from allhands.distributed.packed import Packing
from allhands.distributed.reduce import buckets, count_parts, packed_sum_over_ranks, sum_over_ranks, whole_count
from allhands.io.trees import flatten, unflatten
from allhands.io.trees import numbers as values_of
from allhands.parallel.base import Exchanging, Strategy
from allhands.parallel.data import DataParallel
from allhands.parallel.norms import sum_of_squares
from allhands.parallel.passes import Passes
from allhands.parallel.sums import Gradients, Reduced

# Weights travel in pieces of up to so many bytes, so that over a slow link a rank is heard of now and then.
_PIECE_BYTES = 8_000_000


def local_steps(exchanging: Exchanging, overlap: bool) -> Strategy:
    """``--sync-every``."""
    return LocalSteps(exchanging)


class LocalSteps(DataParallel):
    """:class:`~allhands.parallel.base.Strategy`: local steps, and an outer step at the end of each round.

    In each step ranks exchange a few numbers: the loss, counts, whether somebody is to stop, and whether the gradient
    of one of them is not finite, for then none updates.
    """

    keeps_own_optimizer = True

    def __init__(self, exchanging: Exchanging) -> None:
        # Gradients do not travel: what is packed is how weights have changed in a round.
        super().__init__(replace(exchanging, codec=None))
        codec = exchanging.codec if exchanging.size > 1 else None
        self._outer_packing = None if codec is None else Packing(exchanging.communicator, codec)
        self._rounds = exchanging.rounds
        self._steps = 0
        # Trained tokens of the round, and of the step that is being made: this rank's, and all ranks'.
        self._tokens = (0, 0)
        self._of_step = (0, 0)
        self._before: dict[str, mx.array] = {}  # the weights at the round's beginning
        self._momentum: dict[str, mx.array] = {}

    @property
    def name(self) -> str:
        return "local"

    @property
    def in_round(self) -> bool:
        return self._steps > 0

    @property
    def steps_left(self) -> int:
        return self._rounds.every - self._steps if self.in_round else 0

    def prepare(self, passes: Passes) -> None:
        super().prepare(passes)
        self._model = passes.model
        if self._outer_packing is not None:
            self.left = self._outer_packing.nothing_left([array for _, array in self._trained()])
        if self._rounds.momentum:
            self._momentum = {name: mx.zeros(array.shape) for name, array in self._trained()}

    def _trained(self) -> list[tuple[str, mx.array]]:
        return flatten(self._model.trainable_parameters())

    def gradients(self, passes: Passes, micro_batches: Sequence[MicroBatch]) -> Gradients:
        if not self._before and not self._is_alone:
            self._before = dict(self._trained())
        return super().gradients(passes, micro_batches)

    @property
    def _is_alone(self) -> bool:
        """Whether the weights at the end of a round are what they are anyway."""
        return self._exchanging.size == 1 and self._rounds.is_mean

    def reduce(self, mine: Gradients, numbers: Sequence[float | mx.array], extra: Sequence[float] = ()) -> Reduced:
        own = mine.num_targets
        # Of means, weighted by their tokens: what is not finite on one rank is not in the sum.
        squares = sum_of_squares([grad for _, grad in mine.grads]) / max(own, 1)
        reduced = super().reduce(replace(mine, grads=[]), [*numbers, *count_parts(own), squares], extra)
        at, values = len(numbers), values_of(reduced.totals)
        units, rest, squares_of_all = values[at : at + 3]
        totals = mx.concatenate([reduced.totals[:at], reduced.totals[at + 3 :]])
        tokens = whole_count(units, rest)
        self._of_step = (own, tokens)
        norm = mx.sqrt(mx.array(squares_of_all) / max(tokens, 1))
        how: dict[str, Any] = {"divisor": mx.array(float(own)), "norm": norm, "num_gathered": reduced.num_gathered}
        return Reduced(mine.grads, totals, **how)

    def after_update(self, step: int) -> None:
        self._steps += 1
        self._tokens = (self._tokens[0] + self._of_step[0], self._tokens[1] + self._of_step[1])
        if self._steps >= self._rounds.every:
            self.close_round()

    def start_next(self, passes: Passes, upcoming: Callable[[], Sequence[MicroBatch]]) -> None:
        if self._steps + 1 < self._rounds.every:  # else the weights will be others
            super().start_next(passes, upcoming)

    def close_round(self) -> None:
        if self._steps == 0:
            return
        if self._before:
            self.forget()
            self._step_outwards()
        self._steps, self._tokens, self._before = 0, (0, 0), {}

    def _step_outwards(self) -> None:
        """Make the weights those of all ranks, a piece after the other."""
        exchanging, present = self._exchanging, dict(self._trained())
        own, tokens = self._tokens
        share, every = own / tokens if tokens else 1.0 / exchanging.size, list(present)
        most = min(_PIECE_BYTES, exchanging.bucket_bytes)
        for places in list(buckets(list(present.values()), range(len(every)), most)):
            names = [every[place] for place in places]
            exchanging.heartbeat("reduce")
            exchanging.inject_fault("round")
            changes = [
                (share * (present[name].astype(mx.float32) - self._before[name])).astype(present[name].dtype)
                for name in names
            ]
            means = self._summed(changes, places)
            mx.eval(means)
            new = [self._stepped(name, mean) for name, mean in zip(names, means, strict=True)]
            mx.eval(new, [self._momentum[name] for name in names if name in self._momentum])
            self._model.update(unflatten(zip(names, new, strict=True)))
            for name in names:
                del present[name], self._before[name]

    def _summed(self, changes: list[mx.array], places: list[int]) -> list[mx.array]:
        """Sums over ranks; ``places`` of the arrays among all, where something may be left out of them."""
        exchanging, packing = self._exchanging, self._outer_packing
        size = exchanging.bucket_bytes
        if packing is None:
            return sum_over_ranks(exchanging.communicator, changes, bucket_bytes=size)[0]
        left = [self.left[place] for place in places]
        sums, _, left = packed_sum_over_ranks(packing, changes, left, bucket_bytes=size)
        for place, kept in zip(places, left, strict=True):
            self.left[place] = kept
        return sums

    def _stepped(self, name: str, mean: mx.array) -> mx.array:
        """An array after the outer step along the ranks' mean change of it."""
        rounds, before = self._rounds, self._before[name]
        change = mean.astype(mx.float32)
        if rounds.momentum:
            self._momentum[name] = rounds.momentum * self._momentum[name] + change
            change = change + rounds.momentum * self._momentum[name]
        return (before.astype(mx.float32) + rounds.learning_rate * change).astype(before.dtype)

    @property
    def outer_state(self) -> Mapping[str, mx.array]:
        return self._momentum

    def load_outer_state(self, state: Mapping[str, mx.array]) -> None:
        self._momentum = dict(state)
