"""Plan of a pipeline whose stages are divided once more, or of several copies of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from allhands.parallel.costs import ContextCosts, PipelineCosts, ShardedCosts, Traffic
from allhands.plan.computers import Computer
from allhands.plan.job import Job
from allhands.plan.meshes import MeshWay
from allhands.plan.pipelines import PipelineStep, cut_step, largest_update, message_s, split_model
from allhands.plan.strategies import Way
from allhands.run.divided_costs import Divided, context_costs, sharded_costs
from allhands.run.piping import keeps_fetched
from allhands.run.stage_costs import Model, Weights, alive, on_the_way


class StagedWay(MeshWay):
    """Plan of ranks of a mesh with stages."""

    def way(self) -> Way:
        """Return the way, with the bytes of each rank."""
        mesh, job, cut, hidden_bytes = self.mesh, self._job_of_a_copy, self.cut, self.hidden_bytes
        team = self._team()
        models = [self.model_in(form, cut.work) for form in job.forms or (None,)]
        keeps = keeps_fetched(self.config)
        shared = [each.divided(1, mesh.shard, keeps=keeps) for each in models]
        buckets = self._buckets()
        beside = buckets + shared[0].fetched_bytes(mesh.shard, keeps=keeps)
        form, layers, found, slower = split_model(
            job,
            team,
            cut,
            shared,
            lambda work: self.of(self.blocks, work),
            hidden_bytes,
            beside,
            self._given(),
        )
        stages = [_Stage(self, models[form], found.sizes, place) for place in range(mesh.pipe)]
        needed = list(found.num_bytes)
        if mesh.shard > 1:
            needed = [stage.num_bytes for stage in stages]
        whole = sum(part.cost for part in layers.blocks) + layers.head.cost
        stage_s = [
            slower * self.turns * cut.pass_s * each / whole / mesh.tensor / mesh.context
            + stage.exchange_s
            for each, stage in zip(found.seconds, stages, strict=True)
        ]
        step_s = cut.rest_s * largest_update(shared[form], found.sizes, team)
        step_s += PipelineCosts(cut.batches, hidden_bytes).step_s(
            stage_s, message_s(job.link, hidden_bytes)
        )
        by_rank = [needed[mesh.coordinates(rank).pipe] for rank in range(self.ranks)]
        largest = needed.index(max(needed))
        shown = _Stage(self, shared[form], found.sizes, largest).divided
        sent_bytes = max(stage.sent_bytes for stage in stages)
        return self.told(shown.memory(shown.work), by_rank, buckets, step_s, sent_bytes)

    @cached_property
    def cut(self) -> PipelineStep:
        """A step of one copy of the pipeline, in micro-batches."""
        return cut_step(self._job_of_a_copy, self.mesh.pipe)

    @cached_property
    def hidden_bytes(self) -> int:
        """Bytes of a micro-batch's hidden states on a rank."""
        return self.cut.work.tokens // self.mesh.context * self.blocks.dims * self.word

    def _given(self) -> list[int]:
        """Return the requested number of blocks of each rank of a pipeline; if a rank has several
        stages, their sum. Empty if there was no request.
        """
        if self.config.pp_split == "auto":
            return []
        sizes = [int(each) for each in self.config.pp_split.split(",")]
        return [sum(sizes[place :: self.mesh.pipe]) for place in range(self.mesh.pipe)]

    @cached_property
    def _job_of_a_copy(self) -> Job:
        """The training of one copy of the pipeline, with its part of the rows."""
        job = self.job
        part = max(self.rows)
        rows = max(1, round(job.batch_rows * part))
        step = replace(job.step, tokens=job.step.tokens * part, rows=rows)
        return replace(job, work=self.work, batch_rows=rows if job.batch_rows else 0, step=step)

    def _team(self) -> list[Computer]:
        """Return a computer for each stage, with the lowest speed and the least memory of its
        ranks.
        """
        own: list[list[Computer]] = [[] for _ in range(self.mesh.pipe)]
        for rank, each in enumerate(self.team):
            own[self.mesh.coordinates(rank).pipe].append(each)
        found: list[Computer] = []
        for ranks in own:
            rooms = [each.usable_bytes for each in ranks if each.usable_bytes is not None]
            least = min(rooms) if len(rooms) == len(ranks) else None
            speed = min(each.speed for each in ranks)
            found.append(replace(ranks[0], speed=speed, usable_bytes=least))
        return found


class _Stage:
    """A stage whose arrays, matrices or rows may be divided among several ranks.

    Attributes:
        divided: the stage as if it were not divided.
    """

    def __init__(self, way: StagedWay, model: Model, sizes: Sequence[int], place: int) -> None:
        self.way, self.cut, self.size, mesh = way, way.cut, sizes[place], way.mesh
        self.first, self.last = place == 0, place == len(sizes) - 1
        start, nothing = sum(sizes[:place]), Weights(0.0, 0)
        own = Model(
            model.blocks[start : start + self.size],
            model.embedding if self.first else nothing,
            model.head if self.last else nothing,
        )
        counted = [*own.blocks, own.embedding, own.head]
        work = replace(
            self.cut.work,
            weights_bytes=sum(each.held_bytes for each in counted),
            trained_bytes=sum(each.trained_bytes for each in counted),
            trained_layers=sum(block.trained_bytes > 0 for block in own.blocks) or self.size,
            alive=alive("1f1b", mesh.pipe, self.cut.batches, 1, native=False)[place],
            has_head=self.last,
        )
        blocks = replace(way.blocks, layers=self.size)
        self.divided = Divided(own, blocks, work, way.of, tied=False, on_cpu=way.on_cpu)
        # A CPU computes forward passes twice, except those of the last stage.
        self.again = way.on_cpu and not self.last

    @property
    def num_bytes(self) -> int:
        """Bytes of a rank that fetches the arrays of the stage from other ranks."""
        divided, mesh = self.divided, self.way.mesh
        memory = self._shards.memory_of(divided.memory(divided.work), 1 / mesh.shard)
        waiting = on_the_way(self.way.hidden_bytes, mesh.pipe, divided.work.alive)
        return self.way.held.needed(memory, self.way.ranks) + waiting

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank of the stage sends in a step."""
        way, mesh, scatters = self.way, self.way.mesh, self.way.scatters
        hidden = self.cut.batches * way.hidden_bytes
        sent = hidden * ((not self.first) + (not self.last))
        trained = self.divided.work.trained_bytes
        if mesh.shard > 1:
            shards = self._shards.traffic(trained, trained, scatters=scatters)
            sent += way.group(mesh.shard).sent(shards)
        if mesh.tensor > 1:
            sent += way.group(mesh.tensor).sent(Traffic(all_reduced=self._sums * hidden))
        if mesh.context > 1:
            sent += way.group(mesh.context).sent(self._rows.traffic(0, 0, scatters=scatters))
        return sent + way.group(mesh.copies).sent(Traffic(all_reduced=trained // mesh.shard))

    @property
    def exchange_s(self) -> float:
        """Seconds in which the stage's ranks exchange with each other, for a micro-batch."""
        way, mesh, seconds = self.way, self.way.mesh, 0.0
        if mesh.tensor > 1:
            seconds += self._sums * way.sum_s(mesh.tensor, way.hidden_bytes)
        if mesh.shard > 1:
            costs = self._shards
            times = 1 / self.cut.batches if costs.keeps else 1.0
            seconds += times * way.gather_s(mesh.shard, costs.fetched_bytes)
            seconds += way.scatter_s(mesh.shard, costs.pushed_bytes)
        if mesh.context > 1:
            batches = self.cut.batches
            seconds += way.rows_exchange_s(self._rows, batches * self.size) / batches
        return seconds

    @property
    def _shards(self) -> ShardedCosts:
        costs = sharded_costs(self.divided, self.way.fetching(last=self.last))
        return replace(costs, micro_batches=self.cut.batches)

    @property
    def _rows(self) -> ContextCosts:
        """Costs of exchanging the stage's keys and values in a step."""
        divided, work = self.divided, self.cut.work
        work = replace(
            divided.work,
            batch_tokens=self.cut.batches * work.tokens,
            recomputed=work.recomputed or self.again,
        )
        blocks = replace(divided.blocks, keys=divided.blocks.keys // self.way.mesh.tensor)
        return context_costs(replace(divided, blocks=blocks, work=work))

    @property
    def _sums(self) -> int:
        """Number of sums of hidden states: two for each block in each pass."""
        return (6 if self.cut.work.recomputed or self.again else 4) * self.size
