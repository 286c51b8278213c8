"""Ways of dividing a training along the axes of a mesh, one or several at once: memory of each
rank, traffic, time of a step.

The time has the same parts as in :mod:`allhands.plan.speed`: the serial part, the passes, and the
part of the exchange that ranks wait for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from allhands.config.combinations import dividing_flags
from allhands.config.schema import TrainConfig
from allhands.distributed.capabilities import can
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError
from allhands.parallel.costs import (
    ContextCosts,
    DividedOptimizerCosts,
    ExpertCosts,
    Memory,
    TensorCosts,
    Traffic,
    Work,
)
from allhands.plan.computers import Computer
from allhands.plan.dividing import strategy_name
from allhands.plan.job import Job
from allhands.plan.links import ExchangeTimes
from allhands.plan.pipelines import model_of
from allhands.plan.speed import exchange_s, predict
from allhands.plan.strategies import Way, launch_flags
from allhands.run.divided_costs import (
    Divided,
    Fetching,
    context_costs,
    expert_costs,
    memory_of_experts,
    memory_of_matrices,
    memory_of_rows,
    outside_experts,
    part_of_experts,
    part_of_matrices,
    tensor_costs,
    without_experts,
)
from allhands.run.divided_costs import sharded_costs as costs_of_shards
from allhands.run.model_sizes import block_weights
from allhands.run.piping import keeps_fetched, piped, shares_by_memory
from allhands.run.stage_costs import Model, Weights
from allhands.run.training_memory import DecoderShape

_FLOAT, _HALF = 4, 2
# Seconds that a GPU loses in each sum of hidden states, beyond the time on the link: nothing else
# is launched meanwhile, and products of parts of matrices are slow. With 1.24 billion weights on
# four H200, 64 sums of 33 MB took 37 ms more.
_WAIT_OF_GPU_S = 0.6e-3
_TITLES = {
    "pipeline": "pipeline",
    "fsdp": "fully sharded",
    "zero2": "fully sharded, weights kept",
    "tensor": "matrices divided",
    "expert": "experts divided",
    "context": "rows divided",
    "zero1": "optimizer divided",
}


def asked_mesh(config: TrainConfig, ranks: int) -> Mesh | None:
    """Return the mesh of ``ranks`` ranks with these options; ``None``: the ranks only divide the
    rows of a batch, or the options do not fit them.
    """
    try:
        mesh = piped(config, Mesh(0, ranks))
    except ConfigError:
        return None
    return None if mesh.size_of("data") == ranks else mesh


def flags_of(config: TrainConfig) -> str:
    """Return the options that ask for a way of dividing, as flags."""
    flags = [f"--strategy {config.strategy}"] if config.strategy != "auto" else []
    flags += [f"--pp {config.pp}"] if config.pp is not None else []
    flags += dividing_flags(config)
    flags += [f"--reshard {config.reshard}"] if config.reshard != "auto" else []
    return " ".join(flags)


@dataclass(frozen=True)
class ExchangeGroup:
    """A group of ranks that exchange with each other.

    Attributes:
        size: number of ranks of the group.
        slots: 1 if the back-end has groups. Otherwise the number of groups: all ranks then exchange
            the arrays of all groups together.
    """

    size: int
    slots: int = 1

    def sent(self, traffic: Traffic) -> int:
        """Return the bytes that a rank sends for ``traffic``."""
        if self.size == 1:
            return 0
        world = self.size * self.slots
        summed = (2 * traffic.all_reduced + traffic.scattered) * self.slots * (world - 1) / world
        return int(summed + traffic.gathered * (world - 1) / self.size)


@dataclass(frozen=True)
class PlannedRanks:
    """Facts from which the memory of a rank follows.

    Attributes:
        needed: function that returns the bytes of a rank, by its arrays and the number of ranks.
        bucket_bytes: bytes of a bucket of gradients, if all ranks have the whole model.
        shares: part of a batch, in whole rows, of each rank.
    """

    needed: Callable[[Memory, int], int]
    bucket_bytes: int
    shares: Sequence[float]


class MeshWay:
    """Plan of ranks that divide arrays, matrices, experts or token positions, without stages."""

    def __init__(
        self,
        job: Job,
        team: Sequence[Computer],
        link: ExchangeTimes,
        held: PlannedRanks,
        mesh: Mesh,
        config: TrainConfig,
    ) -> None:
        assert job.blocks is not None
        assert job.work is not None
        self.job, self.team, self.link, self.held = job, team, link, held
        self.mesh, self.config, self.blocks, self.whole = mesh, config, job.blocks, job.work
        self.on_cpu, self.ranks = job.kind == "cpu", len(team)
        self.word = _FLOAT if self.on_cpu else _HALF
        self.scatters = job.step.overlapped
        # Prediction as if all ranks had the whole model and rows of their own.
        self.speeds = [each.speed for each in team]
        self.plain = predict(job.step, link, self.speeds, job.room)
        # Factor on the time of passes if ranks take turns on the cores of one computer.
        self.turns = max(1.0, self.ranks / job.room) if job.room else 1.0

    def way(self) -> Way:
        """Return the way, with the bytes of each rank."""
        each_has = [*zip(self.parts(), self.rows, strict=True)]
        memories = {has: self.memory(*has) for has in {*each_has}}
        buckets = self._buckets()
        needed = {
            has: self.held.needed(memory, self.ranks) + buckets for has, memory in memories.items()
        }
        largest = max(each_has, key=lambda has: needed[has])
        return self.told(
            memories[largest],
            [needed[has] for has in each_has],
            buckets,
            self.step_s(),
            self.sent(),
        )

    def told(
        self, memory: Memory, by_rank: Sequence[int], buckets: int, step_s: float, sent_bytes: int
    ) -> Way:
        """Return the way as an entry of the plan's table.

        Args:
            memory: arrays of the rank with the most bytes.
            by_rank: bytes of each rank.
            buckets: bytes of buckets of gradients on a rank.
        """
        job = self.job
        more = flags_of(self.config)
        name = strategy_name(partial(getattr, self.config))
        validations_s = job.validations * job.validation_s * step_s / job.step.alone_s
        copies, kept = self.mesh.size_of("data"), name.startswith("zero2")
        title = " and ".join(_TITLES[each] for each in name.split("+"))
        return Way(
            name=f"{title}, {copies} copies" if copies > 1 else title,
            ranks=self.ranks,
            parts={
                "weights": self.divided.work.weights_bytes if kept else memory.weights,
                "optimizer": memory.optimizer,
                "gradients": memory.trained * (2 if self.work.accumulated else 1),
                "activations": memory.activations,
                "logits": memory.logits,
                "buckets": buckets,
            },
            rank_bytes=max(by_rank),
            by_rank=tuple(by_rank),
            flags=f"{launch_flags(self.ranks, together=job.together)} {more}",
            more=more,
            sent_bytes=sent_bytes,
            strategy=name,
            step_s=step_s,
            training_s=job.start_of(self.ranks) + job.first_s + job.steps * step_s + validations_s,
        )

    # --- parts and memory of a rank ---------------------------------------------------------------

    @cached_property
    def rows(self) -> list[float]:
        """The part of a batch, in whole rows, of each rank: by speed if no two ranks have the same
        rows, else equal.
        """
        rows, shares = self.job.batch_rows, self.mesh.data_size
        if shares == self.ranks:
            return [*self.held.shares]
        return [math.ceil(rows / shares) / rows if rows else 1.0 / shares] * self.ranks

    @cached_property
    def work(self) -> Work:
        """The work of the ranks with the most rows, as if each had the whole model."""
        return self._work(max(self.rows))

    def _work(self, rows: float) -> Work:
        return self.whole if rows == 1.0 else self.whole.share(rows)

    def model_in(self, form: tuple[float, float] | None, work: Work) -> Model:
        """Return the weights of a rank as if arrays were not divided; matrices and experts are.

        ``form``: a form of quantised weights, see :attr:`Job.forms`.
        """
        model = model_of(self.blocks, work, tied=self.job.tied, form=form)
        if self.mesh.tensor > 1:
            model = part_of_matrices(model, self.blocks, work, self.mesh.tensor)
        if self.mesh.expert > 1:
            model = part_of_experts(model, self.blocks, work, self.mesh.expert)
        return model

    @property
    def form(self) -> tuple[float, float] | None:
        """The form of quantised weights: the smallest if arrays are divided, because these are
        fetched, else the fastest.
        """
        forms = self.job.forms
        return None if not forms else forms[-1 if self.mesh.parts > 1 else 0]

    @cached_property
    def of(self) -> Callable[[DecoderShape, Work], Memory]:
        """The function that returns a rank's arrays with divided matrices, experts or token
        positions.
        """
        of: Callable[[DecoderShape, Work], Memory] = self.job.of
        if self.mesh.tensor > 1:
            of = partial(memory_of_matrices, of, ranks=self.mesh.tensor, word=self.word)
        if self.config.ep > 1:
            of = partial(memory_of_experts, of, word=self.word, alike=self.mesh.expert == 1)
        if self.mesh.context > 1:
            of = partial(
                memory_of_rows,
                of,
                ranks=self.mesh.context,
                word=self.word,
                heads=self.mesh.tensor,
            )
        return of

    @cached_property
    def divided(self) -> Divided:
        """The training of a rank with the most rows, as if arrays were not divided."""
        return self._divided(self.work)

    def _divided(self, work: Work) -> Divided:
        model, kept = self.model_in(self.form, work), Weights(0.0, 0)
        outside = [model.embedding] if self.job.tied else [model.embedding, model.head]
        counted = [*model.blocks, *outside]
        work = replace(
            work,
            weights_bytes=sum(each.held_bytes for each in counted),
            trained_bytes=sum(each.trained_bytes for each in counted),
            batch_tokens=max(work.tokens, work.batch_tokens),
        )
        if self.mesh.parts > 1 and self.mesh.expert > 1:
            model, kept = without_experts(model, self.blocks, work, self.mesh.expert)
        return Divided(model, self.blocks, work, self.of, self.job.tied, self.on_cpu, kept)

    def parts(self) -> list[float]:
        """Return for each rank the part of every array that it has; the parts follow the memory of
        the ranks, if they may differ.
        """
        places = [self.mesh.part_of(rank) for rank in range(self.ranks)]
        rooms: dict[int, list[int]] = {}
        for each, place in zip(self.team, places, strict=True):
            rooms.setdefault(place, []).append(each.usable_bytes or 0)
        least = [min(rooms[place]) for place in range(self.mesh.parts)]
        even = max(self.mesh.tensor, self.mesh.expert) > 1
        unlike = shares_by_memory(least) if min(least) and not even else ()
        parts = [part / sum(unlike) for part in unlike] or [1.0 / self.mesh.parts] * self.mesh.parts
        return [parts[place] for place in places]

    def memory(self, part: float, rows: float) -> Memory:
        """Return the arrays of a rank with this part of every array, and this part of the rows."""
        divided = self._divided(self._work(rows))
        whole = divided.memory(divided.work)
        if self.config.strategy == "zero1":
            return DividedOptimizerCosts().memory(whole, self.ranks)
        if self.mesh.parts > 1:
            return costs_of_shards(divided, self.fetching()).memory_of(whole, part)
        return whole

    def fetching(self, *, last: bool = True) -> Fetching:
        """Return how ranks fetch arrays.

        ``last``: True for the stage with the loss, or for a whole model.
        """
        return Fetching(
            keeps=keeps_fetched(self.config),
            boxed=self.mesh.tensor > 1,
            copies=self.mesh.copies,
            slots=self.group(self.mesh.parts).slots,
            turns=last,
            pieces=self.mesh.context,
        )

    def group(self, size: int) -> ExchangeGroup:
        """Return a group of ``size`` ranks on this back-end."""
        imitated = 1 < size < self.ranks and not can(self.job.backend or "ring", "split")
        return ExchangeGroup(size, self.ranks // size if imitated else 1)

    def sum_s(self, size: int, num_bytes: float) -> float:
        """Return the seconds of a sum of ``num_bytes`` over a group of ``size`` ranks."""
        slots = self.group(size).slots
        return 0.0 if size == 1 else self.link.seconds(num_bytes * slots, size * slots)

    def gather_s(self, size: int, num_bytes: float) -> float:
        """Return the seconds of an all-gather whose result has ``num_bytes``."""
        return self.sum_s(size, num_bytes) / 2

    def scatter_s(self, size: int, num_bytes: float) -> float:
        """Return the seconds of a sum of which each rank needs a part."""
        return (0.5 if self.scatters else 1.0) * self.sum_s(size, num_bytes)

    def _buckets(self) -> int:
        """Return the bytes of a bucket of gradients and of its sum; 0 if gradients are not
        exchanged in buckets.
        """
        alone = self.mesh.copies * self.mesh.expert == 1
        if self.mesh.parts > 1 or alone:
            return 0
        trained = self.divided.work.trained_bytes // self.mesh.pipe
        if self.mesh.expert > 1 and self.mesh.copies == 1:
            own = self.divided.model.blocks
            trained = outside_experts(trained, own, self.blocks, self.work, self.mesh.expert)
        return 2 * min(self.held.bucket_bytes, trained)

    # --- traffic ----------------------------------------------------------------------------------

    def sent(self) -> int:
        """Return the bytes that a rank sends in a step."""
        return sum(group.sent(traffic) for group, traffic in self._traffic())

    def _traffic(self) -> Iterable[tuple[ExchangeGroup, Traffic]]:
        """Yield the exchanges of a rank in a step: group and traffic."""
        mesh, divided, scatters = self.mesh, self.divided, self.scatters
        trained, data = divided.work.trained_bytes, self.group(mesh.copies)
        if mesh.parts > 1:
            # All parts are as long as the largest when they are exchanged.
            times = mesh.parts * max(self.parts())
            found = costs_of_shards(divided, self.fetching()).traffic(
                trained, trained, scatters=scatters
            )
            yield self.group(mesh.parts), _times(found, times)
            own = (trained - divided.kept.trained_bytes) / mesh.parts * times
            yield data, Traffic(all_reduced=int(own) + divided.kept.trained_bytes)
        elif mesh.expert > 1:
            inside = int(self.work.trained_bytes * self._experts_costs().expert_share / mesh.expert)
            yield data, Traffic(all_reduced=inside)
            yield ExchangeGroup(self.ranks), Traffic(all_reduced=trained - inside)
        elif mesh.context > 1 and self.config.strategy == "zero1":
            yield data, DividedOptimizerCosts().traffic(trained, trained, scatters=scatters)
        else:
            yield data, Traffic(all_reduced=trained)
        if mesh.expert > 1:
            yield (
                self.group(mesh.expert),
                self._experts_costs().traffic(0, 0, scatters=scatters),
            )
        if mesh.context > 1:
            yield self.group(mesh.context), self._rows_costs().traffic(0, 0, scatters=scatters)
        if mesh.tensor > 1:
            yield self.group(mesh.tensor), self._sums().traffic(0, 0, scatters=scatters)

    def _rows_costs(self) -> ContextCosts:
        blocks = replace(self.blocks, keys=self.blocks.keys // self.mesh.tensor)
        divided = replace(self.divided, blocks=blocks, of=self.job.of)
        # A GPU does not recompute a block if there is room.
        return context_costs(divided, fetched=self.mesh.parts > 1 and self.on_cpu)

    def _of_all_experts(self) -> Divided:
        """Return the training with whole blocks, as if nothing were divided."""
        model = model_of(self.blocks, self.work, tied=self.job.tied, form=self.form)
        work = replace(self.work, batch_tokens=max(self.work.tokens, self.work.batch_tokens))
        return Divided(model, self.blocks, work, self.job.of, self.job.tied, self.on_cpu)

    def _experts_costs(self) -> ExpertCosts:
        fetched = self.mesh.parts > 1
        costs = expert_costs(self._of_all_experts(), self.mesh.expert, fetched=fetched)
        return replace(costs, hidden_bytes=costs.hidden_bytes // self.mesh.context)

    def _sums(self) -> TensorCosts:
        costs = tensor_costs(self._of_all_experts(), fetched=self.mesh.parts > 1)
        return replace(costs, hidden_bytes=costs.hidden_bytes // self.mesh.context)

    # --- seconds ----------------------------------------------------------------------------------

    def step_s(self) -> float:
        """Return the seconds of a step."""
        compute = self.compute_s()
        serial_s = self.plain.step_s - self.plain.compute_s - self.plain.exposed_s
        waited = self.link_s(compute) + self.experts_s() + self.rows_s() + self.sums_s()
        return serial_s + compute + waited + self.gradients_s(compute)

    def compute_s(self) -> float:
        """Return the seconds of the passes."""
        again = self.job.fetched_s if self.mesh.parts > 1 else 1.0
        if self.mesh.data_size == self.ranks:
            return again * self.plain.compute_s
        step, mesh = self.job.step, self.mesh
        # Each rank has an equal part of the passes, so the slowest rank decides.
        passes = self.turns * step.tokens * step.token_s / (self.ranks * min(self.speeds))
        passes *= mesh.data_size * max(self.rows)
        return again * (passes + (mesh.tensor - 1) * passes * _outside_share(self.blocks))

    def sums_s(self) -> float:
        """Return the seconds in which ranks with parts of matrices sum hidden states."""
        tensor = self.mesh.tensor
        if tensor == 1:
            return 0.0
        costs, batches = self._sums(), self.divided.micro_batches
        each = self.sum_s(tensor, costs.hidden_bytes / batches)
        each += 0.0 if self.on_cpu else _WAIT_OF_GPU_S
        return costs.sums * batches * each + self.sum_s(tensor, costs.partial_bytes)

    def link_s(self, compute: float) -> float:
        """Return the seconds in which ranks wait for divided arrays and for sums of their
        gradients.

        ``compute``: seconds of the passes. Weights are fetched during the passes, except those of
        the first block.
        """
        parts, divided = self.mesh.parts, self.divided
        if parts == 1:
            return 0.0
        costs, batches = costs_of_shards(divided, self.fetching()), divided.micro_batches
        fetches = divided.blocks.layers - 1 + divided.work.trained_layers
        units = max(1, divided.work.trained_layers)
        times = 1 if costs.keeps else batches
        exchanged = times * fetches * self.gather_s(parts, costs.fetched_bytes / fetches)
        exchanged += batches * units * self.scatter_s(parts, costs.pushed_bytes / units)
        least = 1 / max(1, fetches * batches)
        # If ranks share a computer's cores, one core of each rank sends and receives meanwhile.
        if self.job.shares:
            least = max(least, min(1.0, self.ranks / max(1, self.job.room)))
        return max(exchanged * least, exchanged - compute)

    def experts_s(self) -> float:
        """Return the seconds in which ranks with parts of the experts exchange tokens."""
        expert, batches = self.mesh.expert, self.divided.micro_batches
        if expert == 1:
            return 0.0
        costs = self._experts_costs()
        each = costs.hidden_bytes / batches
        both = self.gather_s(expert, each) + self.scatter_s(expert, each)
        return (2 * costs.mixtures + costs.again) * batches * both

    def rows_s(self) -> float:
        """Return the seconds in which ranks with parts of rows exchange keys and values."""
        if self.mesh.context == 1:
            return 0.0
        times = self.divided.micro_batches * self.blocks.layers
        return self.rows_exchange_s(self._rows_costs(), times)

    def rows_exchange_s(self, costs: ContextCosts, times: int) -> float:
        """Return the seconds of ``times`` exchanges of keys and values."""
        context = self.mesh.context
        fetched = times * self.gather_s(context, costs.fetched_bytes / times)
        return fetched + times * self.scatter_s(context, costs.pushed_bytes / times)

    def gradients_s(self, compute: float) -> float:
        """Return the seconds in which ranks wait for the exchange of gradients at the end of a
        step.

        ``compute``: seconds of the passes, which may hide a part of the exchange.
        """
        mesh, trained = self.mesh, self.divided.work.trained_bytes
        if mesh.parts > 1:
            kept = self.divided.kept.trained_bytes
            own = (trained - kept) / mesh.parts + kept
            return self.sum_s(mesh.copies, own)
        whole = self.sum_s(mesh.copies * mesh.expert, trained)
        least = 0.0
        if mesh.context > 1 and mesh.tensor == 1:  # bucket by bucket, and packed if requested
            whole = exchange_s(self.job.step, self.link, self.ranks)
            least = min(whole, self.plain.exposed_s)  # the last bucket's exchange is not hidden
        return max(least, whole - compute / 2) if self.job.step.overlapped else whole


def _times(traffic: Traffic, factor: float) -> Traffic:
    return Traffic(
        int(traffic.all_reduced * factor),
        int(traffic.gathered * factor),
        int(traffic.scattered * factor),
    )


def _outside_share(blocks: DecoderShape) -> float:
    """Return the part of a pass's computation outside of the blocks: the head."""
    head = blocks.vocabulary * blocks.dims
    return head / (head + blocks.layers * block_weights(blocks, blocks.active or 1))
