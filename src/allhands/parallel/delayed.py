"""Delayed gradients: data parallelism whose exchange runs while the next step's passes are
computed.

Step k updates by the summed gradients of step k - 1, which were exchanged meanwhile: w(k+1) = w(k)
- U(g(k-1)). No rank waits for an exchange that is shorter than the passes, and all ranks always
have the same weights. The first step updates nothing, and the gradients of the last step are not
used: n steps make n - 1 updates.

Gradients should fit the weights that they will change. So a rank computes its passes with predicted
weights: those after one more update by its own part of the gradients that are being exchanged. If
the sum has arrived already, as after a checkpoint, the rank still takes its own part, so that a
checkpoint changes nothing; without its own part it takes the sum. The errors of the ranks'
predictions cancel. The weights themselves are updated by sums alone, and are the same on all ranks.
A prediction by the last update, as for pipelines (SpecTrain, arXiv 1809.02839), cost a small story
model 2 % after 2,000 steps.

Each step checks whether its gradient is finite, before it is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import exchanging_beside, expect_bulk
from allhands.distributed.packed import Begun, Packing
from allhands.distributed.reduce import buckets, count_parts, whole_count
from allhands.io.trees import flatten, number
from allhands.io.trees import numbers as values_of
from allhands.parallel.base import Exchanging, Expected, Strategy
from allhands.parallel.data import DataParallel
from allhands.parallel.norms import sum_of_squares
from allhands.parallel.passes import Passes
from allhands.parallel.sums import Gradients, Named, Reduced

# Names of the state between steps: summed gradients; whether there are any, with their number of
# tokens; the same for each rank's own part; and the last norm.
_SUM, _TOKENS = "late/sum/", "late/tokens"
_PART, _PART_TOKENS, _LAST_NORM = "late/part/", "late/part_tokens", "late/last_norm"


@dataclass(frozen=True)
class _Late:
    """Gradients of a step, of this rank or summed, and the trained tokens of the whole batch.

    Attributes:
        part: this rank's trained tokens, and the sum of its gradients' squares; ``None`` for summed
            gradients.
    """

    grads: list[Named]
    tokens: int
    part: tuple[int, mx.array] | None = None


def delayed(exchanging: Exchanging, overlap: bool) -> Strategy:
    """Make the strategy of ``--sync-delay 1`` with an exchange in each step."""
    return DelayedGradients(exchanging)


class DelayedGradients(DataParallel):
    """:class:`~allhands.parallel.base.Strategy`: each update is by the gradients of the step
    before.
    """

    name = "delayed"

    def __init__(self, exchanging: Exchanging) -> None:
        communicator = exchanging_beside(exchanging.communicator)
        # Gradients are packed here, as they are sent; within a step only a few numbers are summed.
        super().__init__(replace(exchanging, communicator=communicator, codec=None))
        self._sends = Packing(communicator, exchanging.codec if exchanging.size > 1 else None)
        self._own: _Late | None = None  # of the present step, not being sent yet
        self._sent: _Late | None = None
        self._begun: list[tuple[list[int], Begun]] = []
        self._late: _Late | None = None  # received, and not yet applied
        self._part: _Late | None = (
            None  # this rank's own part of those, until the next passes are computed
        )

    def prepare(self, passes: Passes, expected: Expected) -> None:
        super().prepare(passes, expected)
        self._passes, self._expected = passes, expected
        self.left = self._sends.nothing_left(passes.trained())

    def _weights(self) -> list[Named]:
        return flatten(self._passes.model.trainable_parameters())

    def gradients(self, passes: Passes, micro_batches: Sequence[MicroBatch]) -> Gradients:
        if (known := self._sent or self._part or self._late) is None:
            return super().gradients(passes, micro_batches)
        tokens, squares = known.part or (known.tokens, None)
        if not tokens:
            return super().gradients(passes, micro_batches)
        present = passes.model.trainable_parameters()
        update = Reduced(
            list(known.grads), mx.zeros((1,)), squares, divisor=mx.array(float(tokens))
        )
        passes.model.update(self._expected(update, known.part is not None, self.last_norm))
        try:
            return super().gradients(passes, micro_batches)
        finally:
            passes.model.update(present)

    def reduce(
        self, mine: Gradients, numbers: Sequence[float | mx.array], extra: Sequence[float] = ()
    ) -> Reduced:
        self._receive()
        self._part = None  # the passes are computed
        squares = sum_of_squares([grad for _, grad in mine.grads])
        totals, tokens, squares_of_all, num_gathered = self.reduce_numbers(
            mine, numbers, squares, extra
        )
        self._own = _Late(list(mine.grads), tokens, (mine.num_targets, squares))
        how: dict[str, Any] = {"num_gathered": num_gathered}
        if not math.isfinite(squares_of_all):
            how["norm"] = mx.array(squares_of_all)
        if (late := self._late) is None:
            return Reduced([], totals, idle=True, **how)
        return Reduced(list(late.grads), totals, divisor=mx.array(float(late.tokens)), **how)

    def after_update(self, step: int) -> None:
        self._late = None
        own, self._own = self._own, None
        if own is not None:
            self._send(own)

    def start_next(self, passes: Passes, upcoming: Callable[[], Sequence[MicroBatch]]) -> None:
        """Do nothing, because the next pass uses other weights than the model's."""
        upcoming()

    def _send(self, own: _Late) -> None:
        arrays = [grad for _, grad in own.grads]
        mx.eval(arrays)
        self._sent = own
        for bucket in buckets(arrays, range(len(arrays)), self._exchanging.bucket_bytes):
            self._exchanging.inject_fault("round")
            begun = self._sends.begin([arrays[i] for i in bucket], [self.left[i] for i in bucket])
            mx.async_eval(begun.arrays)
            self._begun.append((bucket, begun))
        expect_bulk(self._exchanging.communicator, True)

    def _receive(self) -> None:
        """Wait for the running exchange."""
        if (sent := self._sent) is None:
            return
        self._exchanging.heartbeat("reduce")
        expect_bulk(self._exchanging.communicator, False)
        sums = list(sent.grads)
        for bucket, begun in self._begun:
            found = begun.finish()
            mx.eval(found.sums, [each for each in found.left if each is not None])
            for i, total, left in zip(bucket, found.sums, found.left, strict=True):
                sums[i], self.left[i] = (sums[i][0], total), left
        self._late, self._part, self._sent, self._begun = _Late(sums, sent.tokens), sent, None, []

    def close_round(self) -> None:
        self._receive()

    def forget(self) -> None:
        super().forget()
        self._own = None
        # In half precision finite parts may have a sum that is not finite.
        if self._late is not None and not math.isfinite(
            number(sum_of_squares([g for _, g in self._late.grads]))
        ):
            self._late = None

    @property
    def outer_state(self) -> Mapping[str, mx.array]:
        """The sums that are not applied yet, if there are any."""
        self._receive()
        tokens = 0 if self._late is None else self._late.tokens
        return self._kept(self._late, tokens, _SUM, _TOKENS)

    def load_outer_state(self, state: Mapping[str, mx.array]) -> None:
        if (found := self._found(state, _SUM, _TOKENS)) is not None:
            self._late = _Late(*found)

    @property
    def own_state(self) -> Mapping[str, mx.array]:
        """This rank's own part of those sums and the last norm, for the prediction of weights in
        the next passes.
        """
        self._receive()
        tokens = 0 if self._part is None or self._part.part is None else self._part.part[0]
        return {
            **self._kept(self._part, tokens, _PART, _PART_TOKENS),
            _LAST_NORM: mx.array([self.last_norm]),
        }

    def load_own_state(self, state: Mapping[str, mx.array]) -> None:
        self.last_norm = number(state[_LAST_NORM])
        if (
            self._late is not None
            and (found := self._found(state, _PART, _PART_TOKENS)) is not None
        ):
            grads, tokens = found
            squares = sum_of_squares([grad for _, grad in grads])
            self._part = _Late(grads, self._late.tokens, (tokens, squares))

    def _kept(
        self, late: _Late | None, tokens: int, name: str, name_of_tokens: str
    ) -> Mapping[str, mx.array]:
        """Return gradients by the names of the trained arrays, or zeros; and whether there are any,
        with their tokens.
        """
        zeros = ((each, mx.zeros_like(array)) for each, array in self._weights())
        grads = zeros if late is None else self._named(late.grads)
        told = mx.array([float(late is not None), *count_parts(tokens)])
        return {name + each: array for each, array in grads} | {name_of_tokens: told}

    def _found(
        self, state: Mapping[str, mx.array], name: str, name_of_tokens: str
    ) -> tuple[list[Named], int] | None:
        """Reverse :meth:`_kept`; ``None``: there were no gradients."""
        present, units, rest = values_of(state[name_of_tokens])
        if not present:
            return None
        return self._joined(
            [(each, state[name + each]) for each, _ in self._weights()]
        ), whole_count(units, rest)

    def _named(self, grads: list[Named]) -> list[Named]:
        """Return gradients by the names of the trained arrays."""
        flat = self._passes.flat
        if flat is None:
            return grads
        return list(flat.leaves.named([array for _, array in grads]))

    def _joined(self, named: list[Named]) -> list[Named]:
        """Reverse :meth:`_named`."""
        flat = self._passes.flat
        if flat is None:
            return named
        return [(str(place), array) for place, array in enumerate(flat.leaves.joined(dict(named)))]
