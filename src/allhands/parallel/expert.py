"""Expert parallelism: ranks have whole experts of their own, and compute rows of their own.

Ranks along the axis ``expert`` of the mesh have divided the experts
(:mod:`allhands.parallel.experts`), of which each sees the tokens of all of them: gradients of
experts are added up over the axis ``data`` alone. All else is whole on every rank, which has
computed it for its own rows: those gradients are added up over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Communicator
from allhands.distributed.packed import Left
from allhands.distributed.reduce import sum_over_ranks
from allhands.errors import ConfigError
from allhands.kernels.fused.flat_params import FlatParams
from allhands.objectives.base import Objective
from allhands.objectives.causal_lm import CausalLM
from allhands.parallel.base import Exchanging, Expected, OneByOne, Strategy
from allhands.parallel.engine import unheard, waited_for
from allhands.parallel.experts import ALIKE, Dispatch, Experts
from allhands.parallel.named import by_name, with_changed
from allhands.parallel.norms import sum_of_squares
from allhands.parallel.passes import Computed, Passes
from allhands.parallel.sums import Gradients, Named, Reduced

# A rank without rows computes one place that nobody is sent, and that counts nothing.
NOTHING = MicroBatch(
    inputs=np.zeros((1, 1), dtype=np.int32),
    positions=np.zeros(1, dtype=np.int32),
    targets=np.full(1, -1, dtype=np.int32),
    num_tokens=0,
    examples=np.zeros(1, dtype=np.int32),
)


def expert(exchanging: Exchanging, overlap: bool) -> ExpertParallel:
    """Make the strategy of ``--ep``."""
    return ExpertParallel(exchanging)


class ExpertParallel(Strategy):
    """:class:`~allhands.parallel.base.Strategy` of ranks that have divided the experts of mixtures."""

    name = "expert"
    passes_wait = True

    def __init__(self, exchanging: Exchanging) -> None:
        assert exchanging.experts is not None
        self.communicator = exchanging.communicator
        self._exchanging = exchanging
        self._experts = exchanging.experts
        self._leaves: FlatParams | None = None
        self._waited_s = 0.0
        self.left: list[Left] = []
        self.regions = self._experts.regions

    def prepare(self, passes: Passes, expected: Expected) -> None:
        if type(passes.objective) is not CausalLM:
            what = f"the objective {type(passes.objective).__name__} cannot compute a pass without rows"
            raise ConfigError(
                what,
                code="objective-unsupported",
                where="--ep",
                hint="leave it out, or take the loss of the next token",
            )
        self._leaves = None if passes.flat is None else passes.flat.leaves

    def gradients(self, passes: Passes, micro_batches: Sequence[MicroBatch]) -> Gradients:
        before = self._waited_s
        count = self._wait(lambda: self._experts.dispatch.most(len(micro_batches)))
        every = [*micro_batches, *[NOTHING] * (count - len(micro_batches))]
        mine = passes.accumulate(every, partial(self._run, passes), lazy_end=False)
        # Exchanges within passes come before those of gradients on all ranks.
        mx.eval(mine.sums, [grad for _, grad in mine.grads])
        return replace(mine, waited_s=self._waited_s - before)

    def _run(self, passes: Passes, batch: MicroBatch) -> Computed:
        def run(batch: MicroBatch) -> tuple[mx.array, Any]:
            done = passes.run(batch)
            return done.sums, done.grads

        kept = self._of_experts if self._leaves is None else self._of_experts_flat
        return Computed(*self._pass(run, kept, passes.objective, batch))

    def _pass(
        self,
        run: Callable[[MicroBatch], tuple[mx.array, Any]],
        kept: Callable[[Any], Any],
        objective: Objective,
        batch: MicroBatch,
    ) -> tuple[mx.array, Any]:
        """Compute a micro-batch with the other ranks; of :data:`NOTHING` the gradients that
        ``kept`` leaves.
        """
        tokens = 0 if batch is NOTHING else objective.places(batch.inputs).size
        with self._wait(lambda: in_step(self._experts.dispatch, objective, tokens)):
            sums, grads = run(batch)
        if batch is not NOTHING:
            return sums, grads
        # Also what is left out: other ranks wait for the exchanges on the way there.
        mx.eval(sums, grads)
        return mx.zeros_like(sums), kept(grads)

    def _wait(self, exchange: Callable[[], Any]) -> Any:
        """The result of an exchange that is waited for."""
        found, seconds = waited_for(exchange, self._exchanging.heartbeat)
        self._waited_s += seconds
        return found

    def _of_experts(self, grads: Any) -> Any:
        """A tree of gradients with zeros for what is whole on all ranks."""
        is_whole = self._experts.is_whole
        return tree_map_with_path(
            lambda name, array: mx.zeros_like(array) if is_whole(name) else array, grads
        )

    def _of_experts_flat(self, grads: list[mx.array]) -> list[mx.array]:
        """The same of flat arrays."""
        named = [("", grad) for grad in grads]
        return with_changed(
            self._leaves, named, self._of_experts(dict(by_name(self._leaves, named)))
        )

    def reduce(
        self, mine: Gradients, numbers: Sequence[float | mx.array], extra: Sequence[float] = ()
    ) -> Reduced:
        exchanging, experts, world = self._exchanging, self._experts, self._exchanging.communicator
        exchanging.heartbeat("reduce")
        named = by_name(self._leaves, mine.grads)
        whole = self._summed(world, [pair for pair in named if experts.is_whole(pair[0])])
        own = self._summed(experts.data, [pair for pair in named if not experts.is_whole(pair[0])])
        arrays = with_changed(self._leaves, mine.grads, dict([*whole, *own]))
        grads = [(name, array) for (name, _), array in zip(mine.grads, arrays, strict=True)]
        # Each number once: whole arrays are the first rank's, experts those of the first ranks that
        # have them.
        counted = [*([array for _, array in whole] if world.rank == 0 else [])]
        counted += [array for _, array in own] if experts.data.rank == 0 else []
        return exchanging.reduced(grads, numbers, sum_of_squares(counted), extra)

    def _summed(self, group: Communicator, named: Sequence[Named]) -> list[Named]:
        """Arrays by name, added up over a group."""
        if group.size == 1 or not named:
            return list(named)
        arrays = [array for _, array in named]
        sums, _ = sum_over_ranks(group, arrays, bucket_bytes=self._exchanging.bucket_bytes)
        mx.eval(sums)
        return [(name, array) for (name, _), array in zip(named, sums, strict=True)]

    def one_by_one(self, passes: Passes) -> OneByOne:
        alone = passes.one_by_one()

        def gradient(batch: MicroBatch | None) -> tuple[mx.array, Any]:
            given = NOTHING if batch is None else batch
            return self._pass(alone, self._of_experts, passes.objective, given)

        together = self._experts.together
        # Ranks that divide token positions have the same rows.
        return OneByOne(gradient, together, share=together.rank // self._exchanging.pieces)


def in_step(dispatch: Dispatch, objective: Objective, tokens: int) -> AbstractContextManager[None]:
    """Return a block for a pass of all ranks in step, in which this rank has so many tokens; of
    none it computes :data:`NOTHING`. Called on all of them together.
    """
    now = dispatch.agree(tokens, objective.places(NOTHING.inputs).size)
    assert now is not None
    return dispatch.passing(now)


class ExpertSums:
    """The sums of a batch by forward passes alone, of which all ranks in step do the same number
    together.
    """

    counts = True

    def __init__(self, experts: Experts, objective: Objective, *, cpu_native: bool) -> None:
        self.heartbeat: Callable[[str], None] = unheard
        self._dispatch, self._objective = experts.dispatch, objective
        self._sums = objective.sums(experts.model, cpu_native=cpu_native, with_grad=False)

    def __call__(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        return self._pass(arrays, self._agree(arrays[0].size))

    def finish(self) -> None:
        """Take part in the passes that others still have to do."""
        arrays = tuple(map(mx.array, self._objective.values(NOTHING)))
        while (now := self._agree(0)) is not None:
            self._pass(arrays, now)

    def _agree(self, tokens: int) -> Any:
        self.heartbeat("reduce")
        now = self._dispatch.agree(tokens)
        self.heartbeat("compute")
        return now

    def _pass(self, arrays: tuple[mx.array, ...], now: Any) -> tuple[mx.array, ...]:
        with self._dispatch.passing(now):
            found = self._sums(*arrays)
        mx.eval(found)
        return found


class AlikeModel:
    """A model whose experts are divided, called on all ranks together, with the same tokens.

    Attributes:
        model: what is called; what is not is looked up there.
        heartbeat: called with "reduce" before computing with other ranks, and with "compute"
            afterwards.
    """

    def __init__(self, experts: Experts) -> None:
        self.heartbeat: Callable[[str], None] = unheard
        self.model: nn.Module = experts.model
        self._dispatch = experts.dispatch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **more: Any) -> mx.array:
        """Return the model's output."""
        model: Any = self.model
        self.heartbeat("reduce")
        with self._dispatch.passing(ALIKE):
            output = model(*args, **more)
        mx.eval(output)
        self.heartbeat("compute")
        return output
