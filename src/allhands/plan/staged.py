"""Plan of a pipeline whose stages are divided once more, or of several copies of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from allhands.parallel.costs import ContextCosts, Memory, PipelineCosts, Traffic
from allhands.parallel.splitting import Split
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
        mesh, stages = self.mesh, self._stages()
        job = self._job_of_a_copy()
        cut = cut_step(job, mesh.pipe)
        hidden_bytes = self._hidden_bytes(cut)
        models = [self.model_in(form, cut.work) for form in job.forms or (None,)]
        keeps = keeps_fetched(self.config)
        shared = [each.divided(1, mesh.shard, keeps=keeps) for each in models]
        buckets = self._buckets()
        beside = buckets + shared[0].fetched_bytes(mesh.shard, keeps=keeps)
        form, layers, found, slower = split_model(
            job,
            stages,
            cut,
            shared,
            lambda work: self.of(self.blocks, work),
            hidden_bytes,
            beside,
            self._given(),
        )
        model, costs = models[form], PipelineCosts(cut.batches, hidden_bytes)
        needed = list(found.num_bytes)
        if mesh.shard > 1:
            needed = [
                self._of_fetching(cut, model, found, place, hidden_bytes)
                for place in range(mesh.pipe)
            ]
        whole = sum(part.cost for part in layers.blocks) + layers.head.cost
        stage_s = [
            slower * self.turns * cut.pass_s * each / whole / mesh.tensor / mesh.context + extra
            for each, extra in zip(
                found.seconds, self._extra_s(cut, model, found.sizes), strict=True
            )
        ]
        step_s = cut.rest_s * largest_update(shared[form], found.sizes, stages)
        step_s += costs.step_s(stage_s, message_s(job.link, hidden_bytes))
        sent_bytes = max(self._sent(cut, model, found.sizes, place) for place in range(mesh.pipe))
        by_rank = [needed[mesh.coordinates(rank).pipe] for rank in range(self.ranks)]
        largest = needed.index(max(needed))
        shown = self._shown(cut, shared[form], found.sizes, largest)
        return self.told(shown, by_rank, buckets, step_s, sent_bytes)

    def _hidden_bytes(self, cut: PipelineStep) -> int:
        """Return the bytes of a micro-batch's hidden states on a rank."""
        return cut.work.tokens // self.mesh.context * self.blocks.dims * self.word

    def _given(self) -> list[int]:
        """Return the requested number of blocks of each rank of a pipeline; if a rank has several
        stages, their sum. Empty if there was no request.
        """
        if self.config.pp_split == "auto":
            return []
        sizes = [int(each) for each in self.config.pp_split.split(",")]
        return [sum(sizes[place :: self.mesh.pipe]) for place in range(self.mesh.pipe)]

    def _job_of_a_copy(self) -> Job:
        """Return the training of one copy of the pipeline, with its part of the rows."""
        job = self.job
        part = max(self.rows)
        rows = max(1, round(job.batch_rows * part))
        step = replace(job.step, tokens=job.step.tokens * part, rows=rows)
        return replace(job, work=self.work, batch_rows=rows if job.batch_rows else 0, step=step)

    def _stages(self) -> list[Computer]:
        """Return a computer for each stage, with the lowest speed and the least memory of its
        ranks.
        """
        found: list[Computer] = []
        for place in range(self.mesh.pipe):
            own = [
                each
                for rank, each in enumerate(self.team)
                if self.mesh.coordinates(rank).pipe == place
            ]
            rooms = [each.usable_bytes for each in own if each.usable_bytes is not None]
            least = min(rooms) if len(rooms) == len(own) else None
            found.append(replace(own[0], speed=min(each.speed for each in own), usable_bytes=least))
        return found

    # --- a stage whose arrays are divided ---------------------------------------------------------

    def _stage(self, model: Model, sizes: Sequence[int], place: int) -> Model:
        """Return the weights of a stage."""
        start = sum(sizes[:place])
        own, nothing = model.blocks[start : start + sizes[place]], Weights(0.0, 0)
        first, last = place == 0, place == len(sizes) - 1
        return Model(own, model.embedding if first else nothing, model.head if last else nothing)

    def _divided_stage(
        self, cut: PipelineStep, model: Model, sizes: Sequence[int], place: int
    ) -> Divided:
        stage, last = self._stage(model, sizes, place), place == len(sizes) - 1
        counted = [*stage.blocks, stage.embedding, stage.head]
        held = alive("1f1b", len(sizes), cut.batches, 1, native=False)
        work = replace(
            cut.work,
            weights_bytes=sum(each.held_bytes for each in counted),
            trained_bytes=sum(each.trained_bytes for each in counted),
            trained_layers=sum(block.trained_bytes > 0 for block in stage.blocks) or sizes[place],
            alive=held[place],
            has_head=last,
        )
        blocks = replace(self.blocks, layers=sizes[place])
        return Divided(stage, blocks, work, self.of, tied=False, on_cpu=self.on_cpu)

    def _of_fetching(
        self, cut: PipelineStep, model: Model, found: Split, place: int, hidden_bytes: int
    ) -> int:
        """Return the bytes of a rank that fetches the arrays of its stage from other ranks."""
        divided = self._divided_stage(cut, model, found.sizes, place)
        fetching = self.fetching(last=place == len(found.sizes) - 1)
        memory = sharded_costs(divided, fetching).memory_of(
            divided.memory(divided.work), 1 / self.mesh.shard
        )
        begun = alive("1f1b", self.mesh.pipe, cut.batches, 1, native=False)[place]
        return self.held.needed(memory, self.ranks) + on_the_way(
            hidden_bytes, self.mesh.pipe, begun
        )

    def _shown(self, cut: PipelineStep, model: Model, sizes: Sequence[int], place: int) -> Memory:
        """Return the memory of a stage's rank by purpose, for the table."""
        divided = self._divided_stage(cut, model, sizes, place)
        return divided.memory(divided.work)

    # --- traffic and seconds ----------------------------------------------------------------------

    def _sent(self, cut: PipelineStep, model: Model, sizes: Sequence[int], place: int) -> int:
        """Return the bytes that a rank of a stage sends in a step."""
        mesh, pipe = self.mesh, self.mesh.pipe
        hidden = cut.batches * self._hidden_bytes(cut)
        sent = hidden * (min(place, 1) + min(pipe - 1 - place, 1))
        divided = self._divided_stage(cut, model, sizes, place)
        trained = divided.work.trained_bytes
        data = self.group(mesh.copies)
        if mesh.shard > 1:
            costs = replace(
                sharded_costs(divided, self.fetching(last=place == pipe - 1)),
                micro_batches=cut.batches,
            )
            sent += self.group(mesh.shard).sent(
                costs.traffic(trained, trained, scatters=self.scatters)
            )
        if mesh.tensor > 1:
            sums = self._sums_of(cut, sizes, place)
            sent += self.group(mesh.tensor).sent(Traffic(all_reduced=sums * hidden))
        if mesh.context > 1:
            rows = self._rows_of(cut, divided, last=place == pipe - 1)
            sent += self.group(mesh.context).sent(rows.traffic(0, 0, scatters=self.scatters))
        return sent + data.sent(Traffic(all_reduced=trained // mesh.shard))

    def _rows_of(self, cut: PipelineStep, divided: Divided, *, last: bool) -> ContextCosts:
        """Return the costs of exchanging a stage's keys and values in a step.

        A CPU computes forward passes twice, except those of the last stage.
        """
        work = replace(divided.work, batch_tokens=cut.batches * cut.work.tokens)
        if self.on_cpu and not last:
            work = replace(work, recomputed=True)
        blocks = replace(divided.blocks, keys=divided.blocks.keys // self.mesh.tensor)
        return context_costs(replace(divided, blocks=blocks, work=work))

    def _sums_of(self, cut: PipelineStep, sizes: Sequence[int], place: int) -> int:
        """Return the number of sums of hidden states of a stage: two for each block in each pass.

        A CPU computes forward passes twice, except those of the last stage.
        """
        again = cut.work.recomputed or (self.on_cpu and place < len(sizes) - 1)
        return (6 if again else 4) * sizes[place]

    def _extra_s(self, cut: PipelineStep, model: Model, sizes: Sequence[int]) -> list[float]:
        """Return for each stage the seconds in which its ranks exchange with each other, for a
        micro-batch.
        """
        mesh, extra = self.mesh, list[float]()
        hidden = self._hidden_bytes(cut)
        for place in range(len(sizes)):
            seconds = 0.0
            if mesh.tensor > 1:
                seconds += self._sums_of(cut, sizes, place) * self.group(mesh.tensor).sum_s(
                    self.link, hidden
                )
            if mesh.shard > 1:
                divided = self._divided_stage(cut, model, sizes, place)
                group = self.group(mesh.shard)
                costs = sharded_costs(divided, self.fetching(last=place == len(sizes) - 1))
                times = 1 / cut.batches if costs.keeps else 1.0
                seconds += times * group.gather_s(self.link, costs.fetched_bytes)
                seconds += (0.5 if self.scatters else 1.0) * group.sum_s(
                    self.link, costs.pushed_bytes
                )
            if mesh.context > 1:
                divided = self._divided_stage(cut, model, sizes, place)
                rows = self._rows_of(cut, divided, last=place == len(sizes) - 1)
                seconds += self._exchange_s(rows, cut.batches * sizes[place]) / cut.batches
            extra.append(seconds)
        return extra
