"""Plan of a pipeline: how several computers divide the model's blocks, in what memory and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from allhands.io.formatting import format_bytes
from allhands.parallel.costs import Memory, PipelineCosts, Work
from allhands.parallel.registry import STRATEGIES
from allhands.parallel.splitting import Layers, Seat, Split, divide, split_as
from allhands.plan.computers import Computer, all_hold
from allhands.plan.job import Job
from allhands.plan.links import ExchangeTimes
from allhands.plan.strategies import launch_flags
from allhands.run.model_sizes import all_weights, block_weights
from allhands.run.stage_costs import (
    MICRO_BATCHES,
    ON_CPU,
    ROOM_OF_PRODUCTS,
    Model,
    Weights,
    alive,
    layers_of,
    on_the_way,
    small_enough,
)
from allhands.run.training_memory import DecoderShape

_FLOAT, _HALF = 4, 2
# Bytes of a process on a CPU before it trains: Python, its libraries and MLX.
PROGRAM_BYTES = 120_000_000
_ROUNDED = 0.01  # part of a micro-batch that may be an error of rounding to whole tokens
FEWER = 0.85  # more computers must take less than this part of the time of fewer computers


@dataclass(frozen=True)
class Pipelined:
    """A pipeline of some computers, with one stage on each, in their order.

    Attributes:
        machines: number of computers.
        computers: names of the computers.
        sizes: number of blocks on each computer.
        num_bytes: bytes that each computer needs at its peak.
        usable_bytes: bytes that a training may take on each computer; ``None`` if unknown.
        missing: bytes that each computer lacks; all 0 if the model fits.
        fits: True if each computer holds its stage; ``None`` if a memory is not known.
        micro_batches: number of micro-batches of a step.
        step_s: seconds of a step.
        compute_s: seconds of the slowest stage's passes in a step.
        messages_s: seconds of a step in which stages wait for the link.
        bubble: the part of a step in which stages wait for the first and the last micro-batch.
        sent_bytes: most bytes that a rank sends in a step.
        training_s: seconds of the whole training.
        flags: flags that start the pipeline.
    """

    machines: int
    computers: tuple[str, ...]
    sizes: tuple[int, ...]
    num_bytes: tuple[int, ...]
    usable_bytes: tuple[int | None, ...]
    missing: tuple[int, ...]
    fits: bool | None
    micro_batches: int
    step_s: float
    compute_s: float
    messages_s: float
    bubble: float
    sent_bytes: int
    training_s: float
    flags: str

    @property
    def told(self) -> str:
        """A line for people with computers, split, memory, and the time of a step."""
        blocks = (" and " if len(self.sizes) == 2 else " + ").join(map(str, self.sizes))
        memory = ", ".join(
            format_bytes(needed) + ("" if usable is None else f" of {format_bytes(usable)}")
            for needed, usable in zip(self.num_bytes, self.usable_bytes, strict=True)
        )
        short = ", ".join(
            f"{name} lacks {format_bytes(missing)}"
            for name, missing in zip(self.computers, self.missing, strict=True)
            if missing
        )
        seconds = f"{1e3 * self.step_s:,.0f} ms" if self.step_s < 10 else f"{self.step_s:,.0f} s"
        fits = f"{seconds} a step, bubble {100 * self.bubble:.0f} %"
        end = f"does not fit: {short}" if short else fits
        which = (
            f"{len(self.sizes)} x {self.computers[0]}"
            if len(set(self.computers)) == 1
            else " + ".join(self.computers)
        )
        return f"{which}: split {blocks} blocks, {memory}; {end}"


def pipelined(job: Job, team: Sequence[Computer]) -> Pipelined | None:
    """Return the pipeline of these computers; ``None`` if they cannot be one, or if the model's
    blocks are not known.
    """
    if (
        job.blocks is None
        or job.work is None
        or not job.takes_stages
        or not 1 < len(team) <= job.blocks.layers
    ):
        return None
    blocks, ranks, cut = job.blocks, len(team), cut_step(job, len(team))
    costs = PipelineCosts(
        cut.batches, cut.work.tokens * job.blocks.dims * (_FLOAT if job.present_bytes else _HALF)
    )
    models = [model_of(blocks, cut.work, tied=job.tied, form=form) for form in job.forms or (None,)]
    form, layers, found, slower = split_model(
        job, team, cut, models, lambda work: job.of(blocks, work), costs.hidden_bytes
    )
    whole = sum(part.cost for part in layers.blocks) + layers.head.cost
    stage_s = [slower * cut.pass_s * each / whole for each in found.seconds]
    update_s = cut.rest_s * largest_update(models[form], found.sizes, team)
    step_s = update_s + costs.step_s(stage_s, message_s(job.link, costs.hidden_bytes))
    validations_s = job.validations * job.validation_s * step_s / job.step.alone_s
    return Pipelined(
        machines=ranks,
        computers=tuple(each.name for each in team),
        sizes=found.sizes,
        num_bytes=found.num_bytes,
        usable_bytes=tuple(each.usable_bytes for each in team),
        missing=found.missing,
        fits=all_hold(team, found.num_bytes),
        micro_batches=cut.batches,
        step_s=step_s,
        compute_s=cut.batches * max(stage_s),
        messages_s=step_s - update_s - costs.step_s(stage_s, 0.0),
        bubble=costs.bubble(ranks),
        sent_bytes=costs.traffic(0, 0, scatters=False).sent(ranks),
        training_s=job.start_of(ranks) + job.first_s + job.steps * step_s + validations_s,
        flags=f"{launch_flags(ranks, together=job.together)} {STRATEGIES['pipeline'].flags}",
    )


def split_model(
    job: Job,
    team: Sequence[Computer],
    cut: PipelineStep,
    models: Sequence[Model],
    of: Callable[[Work], Memory],
    hidden_bytes: int,
    beside_bytes: int = 0,
    given: Sequence[int] = (),
) -> tuple[int, Layers, Split, float]:
    """Split a model into stages, in the fastest form of its weights that fits.

    Args:
        team: computers of the stages.
        models: weights of the model in each form, the fastest first.
        of: function that returns the arrays of work with the whole model.
        hidden_bytes: bytes of a micro-batch's hidden states.
        beside_bytes: further bytes of a rank: fetched weights of its stage, if ranks divide them,
            and buckets of gradients between copies of a stage.
        given: number of blocks of each stage; empty: it is found.

    Returns:
        The index of the form (the last if none fits), its layers, their split, and the factor by
        which passes in this form are slower.
    """
    on_gpu, ranks = not job.present_bytes, len(team)
    more = 1.0 if on_gpu else ON_CPU
    parts = [layers_of(each, cut.work, of, more=more, again=not on_gpu) for each in models]
    once = parts[0][1]
    taken = once + beside_bytes + _process_bytes(job)
    begun = alive("1f1b", ranks, cut.batches, 1, native=False)
    # A CPU recomputes forward passes in the backward pass, so it holds the activations of only one
    # micro-batch.
    held = alive("1f1b", ranks, cut.batches, 1, native=not on_gpu)
    seats = [
        Seat(each.speed, each.usable_bytes, taken + on_the_way(hidden_bytes, ranks, has), most)
        for each, has, most in zip(team, begun, held, strict=True)
    ]
    splits = [
        split_as(layers, seats, given) if given else divide(layers, seats) for layers, _ in parts
    ]
    form = next((place for place, each in enumerate(splits) if each.fits), len(splits) - 1)
    # Passes with packed weights take 1.1 times as long with 500 tokens at once, 1.33 with 30.
    slower = 1.09 + 7.2 / cut.work.tokens if form else 1.0
    return form, parts[form][0], splits[form], slower


def _process_bytes(job: Job) -> int:
    """Return the bytes of a process on a CPU besides its stage's arrays; 0 on a GPU."""
    if not job.present_bytes:
        return 0
    # At least a program: the measured process may count less, because its memory already had the
    # model's weights.
    return max(job.present_bytes, PROGRAM_BYTES) + job.backend_bytes + ROOM_OF_PRODUCTS


def best_pipeline(found: Sequence[Pipelined]) -> Pipelined | None:
    """Return the fitting pipeline with the fewest computers; one with more computers if it takes
    less than :data:`FEWER` of the time. ``None`` if none fits.
    """
    best: Pipelined | None = None
    for each in found:
        if each.fits is not False and (best is None or each.training_s < FEWER * best.training_s):
            best = each
    return best


@dataclass(frozen=True)
class PipelineStep:
    """A step that is cut into micro-batches for a pipeline.

    Attributes:
        work: work of one micro-batch.
        batches: number of micro-batches of a step.
        pass_s: seconds of a micro-batch's passes through the whole model, on a computer of speed 1.
        rest_s: seconds of a step besides passes, above all of the update.
    """

    work: Work
    batches: int
    pass_s: float
    rest_s: float


def cut_step(job: Job, ranks: int) -> PipelineStep:
    """Return a step as training cuts it for a pipeline of ``ranks`` stages."""
    assert job.work is not None
    work, rows, once_s, usual = job.work, job.batch_rows, 0.0, 0
    whole = work.batch_tokens or work.tokens
    if (small := job.small) is None:
        row = work.row_tokens
        rows = rows or max(1, whole // row)
        each = max(1, min(rows // (MICRO_BATCHES * ranks), max(1, work.tokens // row)))
        tokens, batches = min(work.tokens, max(1, whole * each // rows)), math.ceil(rows / each)
    else:
        # Each pass takes some time even with few tokens. The measured micro-batches may be for
        # another number of stages.
        times = (small_enough(small.longest, rows, ranks) or small.limit) / small.limit
        tokens, batches = round(times * small.tokens), math.ceil(small.batches / times - _ROUNDED)
        once_s = max(0.0, small.seconds - job.step.alone_s) / max(1, small.batches - small.usual)
        usual = small.usual
    work = replace(
        work, tokens=tokens, batch_tokens=whole, accumulated=work.accumulated or batches > 1
    )
    pass_s = once_s + job.step.tokens * job.step.token_s / batches
    return PipelineStep(work, batches, pass_s, max(0.0, job.step.serial_s - usual * once_s))


def largest_update(model: Model, sizes: Sequence[int], team: Sequence[Computer]) -> float:
    """Return the relative time of the update on the slowest rank: its part of the trained weights,
    divided by its speed.
    """
    trained = [block.trained_bytes for block in model.blocks]
    stops = list(accumulate(sizes))
    own = [float(sum(trained[stop - size : stop])) for size, stop in zip(sizes, stops, strict=True)]
    own[0] += model.embedding.trained_bytes
    own[-1] += model.head.trained_bytes
    whole = sum(trained) + model.embedding.trained_bytes + model.head.trained_bytes
    return max(each / computer.speed for each, computer in zip(own, team, strict=True)) / max(
        1, whole
    )


def model_of(
    blocks: DecoderShape, work: Work, *, tied: bool, form: tuple[float, float] | None = None
) -> Model:
    """Return the weights of the blocks, the embedding and the head.

    Args:
        form: bytes of a block, and of the embedding; ``None``: all weights have the same size.
    """
    table = blocks.vocabulary * blocks.dims
    numbers = block_weights(blocks, blocks.experts or 1) + blocks.experts * blocks.dims
    full = work.method == "full"
    adapters = 0 if full else work.trained_bytes
    each = max(0, work.weights_bytes - adapters) / all_weights(blocks, tied=tied)
    of_block, of_table = form or (each * numbers, each * table)
    computed = block_weights(blocks, blocks.active or 1)
    all_trained = full and work.trained_bytes > 0.99 * work.weights_bytes
    first = 0 if all_trained else blocks.layers - work.trained_layers

    def block(place: int) -> Weights:
        has = place >= first
        trained = (of_block if full else adapters / max(1, work.trained_layers)) if has else 0.0
        return Weights(computed, round(of_block + (0.0 if full else trained)), round(trained))

    outside = Weights(table, round(of_table), round(of_table) if all_trained else 0)
    return Model(tuple(map(block, range(blocks.layers))), outside, outside)


def message_s(link: ExchangeTimes | None, num_bytes: float) -> float:
    """Return the seconds of a message between two neighbours, from the time of a sum over two
    ranks.

    The sum sends as many bytes, in two messages.
    """
    return 0.0 if link is None else max(0.0, link.seconds(num_bytes, 2) - link.seconds(0, 2) / 2)
