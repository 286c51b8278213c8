"""Ways of dividing a model or its rows among several computers: memory of each rank, traffic, and
time of a step.

The time has the parts of :mod:`allhands.plan.speed`: what no number of ranks makes shorter, the
passes, and the part of the exchange that ranks wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from allhands.parallel.costs import ContextCosts, Memory, ShardedCosts, TensorCosts, Work
from allhands.parallel.registry import STRATEGIES
from allhands.plan.computers import Computer
from allhands.plan.job import Job
from allhands.plan.links import ExchangeTimes
from allhands.plan.pipelines import model_of
from allhands.plan.speed import Prediction, exchange_s, predict
from allhands.plan.strategies import Way, launch_flags
from allhands.run.divided_costs import Divided, context_costs, sharded_costs, tensor_costs
from allhands.run.model_sizes import block_weights
from allhands.run.piping import shares_by_memory
from allhands.run.training_memory import DecoderShape

_Costs = ShardedCosts | TensorCosts | ContextCosts
_Way = Literal["fsdp", "tensor", "context"]
_TITLES: dict[_Way, str] = {
    "fsdp": STRATEGIES["fsdp"].title,
    "tensor": STRATEGIES["tensor"].title,
    "context": "rows divided",
}


# What a GPU waits for a sum of hidden states beyond the time on the link: nothing else is handed
# out meanwhile, and the parts of matrices are slow to multiply. Of 1.24 billion weights on four
# H200, 64 sums of 33 MB took 37 ms more.
WAIT_OF_GPU_S = 0.6e-3


@dataclass(frozen=True)
class PlannedRanks:
    """Means of telling what a rank needs.

    Attributes:
        needed: function that returns the bytes of a rank with such arrays, of so many ranks.
        bucket_bytes: bytes of the exchange of gradients between ranks that all have the model.
        shares: part of a batch, in whole rows, of each rank.
    """

    needed: Callable[[Memory, int], int]
    bucket_bytes: int
    shares: Sequence[float]


def divided_ways(
    job: Job, team: Sequence[Computer], link: ExchangeTimes, held: PlannedRanks
) -> Iterator[Way]:
    """Yield the ways that the model, the options and the number of computers allow; none is judged
    by memory yet.
    """
    ranks = len(team)
    if (
        job.dividing is None
        or job.blocks is None
        or job.work is None
        or ranks < 2
        or job.rounds is not None
    ):
        return
    for name in job.dividing.among(ranks, job.work.row_tokens):
        if name == "expert":  # see allhands.plan.asked
            continue
        yield _DividedWay(job, job.blocks, job.work, team, link, held).way(name)


class _DividedWay:
    def __init__(
        self,
        job: Job,
        blocks: DecoderShape,
        work: Work,
        team: Sequence[Computer],
        link: ExchangeTimes,
        held: PlannedRanks,
    ) -> None:
        self.job, self.blocks, self.work, self.team = job, blocks, work, team
        self.link, self.held, self.ranks = link, held, len(team)
        self.speeds = [each.speed for each in team]
        self.scatters = job.step.overlapped

    def way(self, name: _Way) -> Way:
        """Return one way, with the bytes of each rank."""
        # Ranks that compute the same rows have all of them, in micro-batches as one process cuts
        # them.
        shares = self.held.shares if name == "fsdp" else [1.0] * self.ranks
        parts = self._parts(name)
        found = {share: self._divided(name, share) for share in {*shares}}
        memories = [
            self._memory(name, found[share], part)
            for share, part in zip(shares, parts, strict=True)
        ]
        # Gradients end to end, and their sum.
        buckets = 2 * self.held.bucket_bytes if name == "context" else 0
        needed = [self.held.needed(each, self.ranks) + buckets for each in memories]
        memory, divided = memories[needed.index(max(needed))], found[max(shares)]
        costs = _costs(name, divided)
        gradients, step_s = self.job.step.gradient_bytes, self._step_s(costs, divided)
        validations_s = (
            self.job.validations * self.job.validation_s * step_s / self.job.step.alone_s
        )
        return Way(
            name=_TITLES[name],
            ranks=self.ranks,
            parts={
                "weights": memory.weights,
                "optimizer": memory.optimizer,
                "gradients": memory.trained * (2 if divided.work.accumulated else 1),
                "activations": memory.activations,
                "logits": memory.logits,
                "buckets": buckets,
            },
            rank_bytes=max(needed),
            by_rank=tuple(needed),
            flags=f"{launch_flags(self.ranks, together=self.job.together)} {self._flag(name)}",
            more=self._flag(name),
            # Parts travel as long as the largest.
            sent_bytes=int(
                self.ranks
                * max(parts)
                * costs.traffic(gradients, gradients, scatters=self.scatters).sent(self.ranks)
            ),
            strategy=name,
            step_s=step_s,
            training_s=self.job.start_of(self.ranks)
            + self.job.first_s
            + self.job.steps * step_s
            + validations_s,
        )

    def _parts(self, name: _Way) -> list[float]:
        """Return the part of every array that each rank has; those of fully sharded ranks follow
        their memory.
        """
        rooms = [each.usable_bytes for each in self.team]
        known = [room for room in rooms if room]
        unlike = shares_by_memory(known) if name == "fsdp" and len(known) == self.ranks else ()
        return [part / sum(unlike) for part in unlike] or [1 / self.ranks] * self.ranks

    def _memory(self, name: _Way, divided: Divided, part: float) -> Memory:
        costs, whole = _costs(name, divided), divided.memory(divided.work)
        return (
            costs.memory_of(whole, part)
            if isinstance(costs, ShardedCosts)
            else costs.memory(whole, self.ranks)
        )

    def _flag(self, name: _Way) -> str:
        return {
            "fsdp": STRATEGIES["fsdp"].flags,
            "tensor": f"--tp {self.ranks}",
            "context": f"--cp {self.ranks}",
        }[name]

    def _divided(self, name: _Way, share: float) -> Divided:
        """Return the training of a rank with a share of the rows."""
        job, work = self.job, self.work if share == 1.0 else self.work.share(share)
        # What travels stays packed.
        form = None if not job.forms else job.forms[-1 if name == "fsdp" else 0]
        model = model_of(self.blocks, work, tied=job.tied, form=form)
        return Divided(model, self.blocks, work, job.of, job.tied, on_cpu=job.kind == "cpu")

    # --- seconds ----------------------------------------------------------------------------------

    def _step_s(self, costs: _Costs, divided: Divided) -> float:
        found = predict(self.job.step, self.link, self.speeds, self.job.room)
        if isinstance(costs, ShardedCosts):
            return self._of_shards(costs, divided, found)
        if isinstance(costs, TensorCosts):
            return self._of_matrices(costs, divided, found)
        return self._of_rows(costs, divided, found)

    def _serial_s(self, found: Prediction) -> float:
        """Seconds of a step that no number of ranks makes shorter."""
        return found.step_s - found.compute_s - found.exposed_s

    def _passes_s(self) -> float:
        """Seconds of all passes of a step on the slowest rank, if each has an equal part of them."""
        step, turns = self.job.step, max(1.0, self.ranks / self.job.room) if self.job.room else 1.0
        return turns * step.tokens * step.token_s / (self.ranks * min(self.speeds))

    def _of_shards(self, costs: ShardedCosts, divided: Divided, found: Prediction) -> float:
        """Weights travel beside the passes, but for those of the first block."""
        trained = divided.work.trained_layers
        fetches = divided.blocks.layers - 1 + trained
        fetch_s = self._gather_s(costs.fetched_bytes / fetches)
        push_s = self.link.seconds(costs.pushed_bytes / trained, self.ranks) * (
            0.5 if self.scatters else 1.0
        )
        exchange = costs.micro_batches * (fetches * fetch_s + trained * push_s)
        compute = found.compute_s * self.job.fetched_s
        return self._serial_s(found) + compute + max(fetch_s, exchange - compute)

    def _of_matrices(self, costs: TensorCosts, divided: Divided, found: Prediction) -> float:
        """Every sum is waited for. What is not in blocks is computed by all ranks."""
        passes = self._passes_s()
        compute = passes + (self.ranks - 1) * passes * outside_share(self.blocks)
        each = self.link.seconds(costs.hidden_bytes / divided.micro_batches, self.ranks)
        each += 0.0 if divided.on_cpu else WAIT_OF_GPU_S
        sums = costs.sums * divided.micro_batches * each
        return (
            self._serial_s(found)
            + compute
            + sums
            + self.link.seconds(costs.partial_bytes, self.ranks)
        )

    def _of_rows(self, costs: ContextCosts, divided: Divided, found: Prediction) -> float:
        """Keys and values of a layer, and their gradients, are waited for, and the gradients of
        weights as usual.
        """
        layers, times = self.blocks.layers, divided.micro_batches
        fetched = times * layers * self._gather_s(costs.fetched_bytes / (times * layers))
        factor = 0.5 if self.scatters else 1.0
        pushed = (
            factor
            * times
            * layers
            * self.link.seconds(costs.pushed_bytes / (times * layers), self.ranks)
        )
        compute = self._passes_s()
        gradients = exchange_s(self.job.step, self.link, self.ranks)
        if self.job.step.overlapped:
            gradients = max(min(gradients, found.exposed_s), gradients - compute / 2)
        return self._serial_s(found) + compute + fetched + pushed + gradients

    def _gather_s(self, num_bytes: float) -> float:
        """Seconds in which all ranks get so many bytes of which each has a part: half of a sum of
        them.
        """
        return self.link.seconds(num_bytes, self.ranks) / 2


def outside_share(blocks: DecoderShape) -> float:
    """Return the part of a pass that is outside of the blocks."""
    head = blocks.vocabulary * blocks.dims
    return head / (head + blocks.layers * block_weights(blocks, blocks.active or 1))


def _costs(name: _Way, divided: Divided) -> _Costs:
    return {"fsdp": sharded_costs, "tensor": tensor_costs, "context": context_costs}[name](divided)


def best_divided(ways: Sequence[Way], worth: float) -> Way | None:
    """Return the way that fits and takes the least time; one with more computers only if that is
    ``worth`` it.

    Args:
        worth: the most that more computers may take of the time of fewer ones.
    """
    best: Way | None = None
    able = [way for way in ways if way.fits is not False]
    for number in sorted({way.ranks for way in able}):
        found = min((way for way in able if way.ranks == number), key=lambda way: way.training_s)
        if best is None or found.training_s < worth * best.training_s:
            best = found
    return best
