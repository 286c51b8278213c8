"""Costs of ranks that divide arrays, matrices, experts or rows, computed from a model's widths and
weights before anything is loaded.

Memory is counted as in :mod:`allhands.run.training_memory`; its multiples hold for single blocks,
too. The costs that division adds were measured on CPUs, with two and three ranks of a ring:
``tests/distributed/test_divided_planned.py`` compares them with real runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from allhands.distributed.reduce import BUCKET_BYTES
from allhands.parallel.costs import (
    ContextCosts,
    ExpertCosts,
    Memory,
    ShardedCosts,
    TensorCosts,
    Work,
)
from allhands.run.model_sizes import block_weights
from allhands.run.stage_costs import Model, Weights
from allhands.run.training_memory import KEPT_BYTES, DecoderShape

# Further activations, as multiples of tokens * hidden size, on a rank with a part of each matrix:
# in each block the sums of attention and feed-forward; for a short time a gradient before and after
# its sum, and two messages.
_SUMS_KEPT, _SUMS_PASSING = 2.0, 4.0
# Further keys and values of whole rows, for a short time: gradients before and after their sum.
_ROWS_PASSING = 2.0
# Copies of a block's gradients while they are added up: the gradients, the same joined into one
# row, and the sums of all ranks. The gradient of a token table needs no joining.
_ROW_COPIES, _TABLE_COPIES = 3.0, 2.0
# Memory that MLX keeps for later use on a CPU, as multiples for one block of a divided model:
# weights joined into rows and gradients come and go with each block; four tenths of the
# activations reuse memory that is there.
_ROWS_KEPT, _GRADIENTS_KEPT, _ACTIVATIONS_KEPT = 4.0, 2.0, 0.6
_ROWS_KEPT_ONCE = 2.0
# Bytes of buffers of varying sizes that MLX keeps on a rank with some of the experts; the key is
# True if the ranks compute the same rows.
_PLACES_KEPT = {False: 50_000_000, True: 33_000_000}
_FLOAT, _HALF = 4, 2


_NOTHING = Weights(0.0, 0)


@dataclass(frozen=True)
class Divided:
    """A training whose model or rows are to be divided.

    Attributes:
        model: weights as a rank would hold them.
        blocks: widths of the model.
        work: work of a rank that has all rows of its micro-batch: the largest micro-batch, and the
            number of tokens of a step.
        of: function that returns the arrays for a rank's work, on a CPU or on a GPU.
        tied: True if the embedding is also the head.
        on_cpu: True if ranks compute on a CPU, in float32.
        kept: weights besides ``model`` that only this rank has; they are not fetched.
    """

    model: Model
    blocks: DecoderShape
    work: Work
    of: Callable[[DecoderShape, Work], Memory]
    tied: bool
    on_cpu: bool
    kept: Weights = _NOTHING

    @property
    def word(self) -> int:
        """Bytes of one value of the activations."""
        return _FLOAT if self.on_cpu else _HALF

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step."""
        return math.ceil(self.step_tokens / self.work.tokens)

    @property
    def step_tokens(self) -> int:
        """Number of tokens of a step."""
        return max(self.work.tokens, self.work.batch_tokens)

    @property
    def outside(self) -> list[Weights]:
        """Weights outside the blocks; a tied embedding counts once."""
        return [self.model.embedding] if self.tied else [self.model.embedding, self.model.head]

    def memory(self, work: Work) -> Memory:
        """Return the arrays of a rank for other work."""
        return self.of(self.blocks, work)


# --- fully sharded --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Unit:
    """A block and the tables that are fetched with it; ``tables`` are not joined to the block's
    row.
    """

    block: Weights
    tables: tuple[Weights, ...] = ()
    head: Weights | None = None

    @property
    def _parts(self) -> tuple[Weights, ...]:
        return (self.block, *self.tables, *([] if self.head is None else [self.head]))

    @property
    def held(self) -> int:
        return sum(part.held_bytes for part in self._parts)

    @property
    def trained(self) -> int:
        return sum(part.trained_bytes for part in self._parts)

    @property
    def copies(self) -> float:
        """Bytes of all copies of the gradients while they are added up."""
        tables = sum(part.trained_bytes for part in self.tables)
        return _ROW_COPIES * (self.trained - tables) + _TABLE_COPIES * tables


@dataclass(frozen=True)
class Fetching:
    """How fully sharded ranks fetch arrays and add up gradients.

    Attributes:
        keeps: True if fetched weights stay until the step ends.
        boxed: True if a rank's part is a box of each array, so that whole arrays are copied out of
            the fetched rows.
        copies: number of ranks with the same part; they add up their gradients at the end of a
            step.
        slots: number of groups, if the back-end has none and all ranks exchange for all groups at
            once; else 1.
        turns: True if the backward pass follows at once and uses the last fetched block again;
            False in all stages of a pipeline but the last.
        pieces: number of ranks that divide the token positions of each row.
    """

    keeps: bool = False
    boxed: bool = False
    copies: int = 1
    slots: int = 1
    turns: bool = True
    pieces: int = 1


def sharded_costs(divided: Divided, fetching: Fetching | None = None) -> ShardedCosts:
    """Return the costs of fully sharded ranks: each has a part of every array."""
    fetching = fetching or Fetching()
    units = _units(divided)
    last = len(units) - 1
    first = next((place for place, unit in enumerate(units) if unit.trained), last)
    there, back = units[:-1] if fetching.turns else units, units[first:]
    every = [*divided.model.blocks, *divided.outside] if fetching.keeps else []
    return ShardedCosts(
        part=lambda share: _part_of_shards(divided, units, first, share, fetching),
        fetched_bytes=sum(each.held_bytes for each in every)
        or sum(unit.held for unit in (*there, *back)),
        pushed_bytes=sum(unit.trained for unit in back),
        micro_batches=divided.micro_batches,
        keeps=fetching.keeps,
    )


def _units(divided: Divided) -> list[_Unit]:
    model, last = divided.model, len(divided.model.blocks) - 1
    units: list[_Unit] = []
    for place, block in enumerate(model.blocks):
        tables = [model.embedding] if place == 0 or (place == last and divided.tied) else []
        head = model.head if place == last and not divided.tied else None
        units.append(_Unit(block, tuple(tables), head))
    return units


def _part_of_shards(
    divided: Divided, units: Sequence[_Unit], first: int, share: float, fetching: Fetching
) -> Memory:
    work, counted = divided.work, [*divided.model.blocks, *divided.outside]
    weights, trained = (
        sum(each.held_bytes for each in counted),
        sum(each.trained_bytes for each in counted),
    )
    kept = divided.kept
    every = replace(
        work,
        weights_bytes=weights + kept.held_bytes,
        trained_bytes=trained + kept.trained_bytes,
    )
    whole, own = divided.memory(every), trained * share + kept.trained_bytes
    updated = own / max(1, trained + kept.trained_bytes)
    one = divided.memory(replace(work, trained_layers=1, trained_bytes=0, alive=1.0))
    passes = _Passes(divided, units, first, one, share, fetching).peak(trained)
    largest = max((unit for unit in units), key=lambda unit: unit.block.held_bytes)
    later = 0.0
    if divided.on_cpu:
        # Rows that a stage fetches once a step are not kept twice.
        rows = _ROWS_KEPT_ONCE if fetching.keeps and not fetching.turns else _ROWS_KEPT
        rows += (
            2.0 * fetching.boxed
        )  # whole arrays, copied out of the fetched rows, come and go as well
        later = rows * largest.block.held_bytes + _ACTIVATIONS_KEPT * one.activations
        if work.method == "full":
            later += _GRADIENTS_KEPT * largest.block.trained_bytes
        # The allocator keeps pages for one row of gradients that MLX's cache does not keep.
        more = largest.block.trained_bytes if later > KEPT_BYTES else 0
        later = min(KEPT_BYTES, later) + more
    return Memory(
        weights=int(weights * share + kept.held_bytes),
        optimizer=int(whole.optimizer * updated),
        backward=int(passes),
        loss=0,
        update=int(whole.update * updated),
        renewed=int(whole.renewed * updated),
        trained=int(own),
        activations=int(
            one.activations + _inputs(divided, first, len(units) - 1) / fetching.pieces
        ),
        logits=one.logits,
        beside=one.beside + int(later),
    )


def _inputs(divided: Divided, first: int, place: int) -> float:
    """Return the bytes of the inputs of the blocks from ``first``, the first trained one, up to
    ``place``.

    The input of block 0 counts nothing: it is made from tokens.
    """
    work = divided.work
    return (
        work.alive
        * (place - first + (first > 0))
        * work.tokens
        * divided.blocks.dims
        * divided.word
    )


@dataclass(frozen=True)
class _Passes:
    """The passes of a fully sharded rank's micro-batch.

    Attributes:
        first: place of the first unit with a backward pass.
        one: the arrays of one block's passes.
        share: part of every array that the rank has.
    """

    divided: Divided
    units: Sequence[_Unit]
    first: int
    one: Memory
    share: float
    fetching: Fetching

    def peak(self, trained: int) -> float:
        """Return the bytes at the peak of a backward pass, block by block.

        Args:
            trained: bytes of all gradients.
        """
        # Bytes of the step's sums of gradients so far. In a first micro-batch these are only the
        # sums of the blocks that are done.
        accumulated, own = self.divided.work.accumulated, trained * self.share + self._kept
        parts, peak = (own if accumulated else 0.0), 0.0
        for place in range(len(self.units) - 1, self.first - 1, -1):
            peak = max(peak, self._at(place) + parts)
            if not accumulated:
                parts += self.units[place].trained * self.share + self._kept / len(self.units)
        if self.fetching.copies == 1:
            return peak
        # The parts' sums over the ranks with the same parts, and the messages in buckets, with
        # slots for the other groups.
        slots = self.fetching.slots
        slotted = slots * own if slots > 1 else 0
        return max(peak, 2 * own + slots * 2 * min(BUCKET_BYTES, own) + slotted)

    def _at(self, place: int) -> float:
        """Return the bytes in the backward pass of a unit, without the sums of gradients."""
        divided, unit, slots = self.divided, self.units[place], self.fetching.slots
        summing = unit.copies + unit.trained * self.share + 2.0 * (slots - 1) * unit.trained
        if self.fetching.boxed:  # columns of parts, filled up and put together
            summing += 2.0 * unit.trained
        inputs = _inputs(divided, self.first, place) / self.fetching.pieces
        there = self._fetched(place) + inputs
        there += self._kept / len(self.units)
        return there + max(unit.trained + max(self.one.activations, self._loss(place)), summing)

    @property
    def _kept(self) -> int:
        """Bytes of the gradients of weights that only this rank has."""
        return self.divided.kept.trained_bytes

    def _fetched(self, place: int) -> float:
        """Return the bytes of whole weights while a unit is computed."""
        fetching, unit = self.fetching, self.units[place]
        copied = unit.held if fetching.boxed else 0
        if fetching.keeps:
            every = (*self.divided.model.blocks, *self.divided.outside)
            return sum(each.held_bytes for each in every) + copied
        ahead = self.units[place - 1].held if place > self.first else 0
        return unit.held + ahead * (fetching.slots if fetching.slots > 1 else 1) + copied

    def _loss(self, place: int) -> float:
        """Return the bytes of the loss in the last unit, with the trained head's copy on a CPU."""
        if place != len(self.units) - 1:
            return 0.0
        unit = self.units[place]
        head = sum(
            each.trained_bytes for each in (*unit.tables, *([unit.head] if unit.head else []))
        )
        return self.one.logits + (head if self.divided.on_cpu else 0)


# --- matrices -------------------------------------------------------------------------------------


def tensor_costs(divided: Divided, *, fetched: bool = False) -> TensorCosts:
    """Return the costs of ranks with a part of each matrix.

    Args:
        fetched: True if ranks fetch arrays, and so compute the forward pass of each block but the
            last one again.
    """
    work, blocks = divided.work, divided.blocks
    sums = 2 * blocks.layers + 2 * work.trained_layers * (2 if work.recomputed or fetched else 1)
    if not (divided.model.embedding.trained_bytes or (work.recomputed and not fetched)):
        sums -= 1  # the gradient of the first trained block's input is not needed
    sums -= 2 * fetched
    adapters = (
        0 if work.method == "full" else sum(each.trained_bytes for each in divided.model.blocks)
    )
    return TensorCosts(
        part=lambda ranks: _part_of_matrices(divided, ranks),
        hidden_bytes=divided.step_tokens * blocks.dims * divided.word,
        sums=sums,
        partial_bytes=int(adapters * _whole_of_adapters(blocks)),
    )


def _whole_of_adapters(blocks: DecoderShape) -> float:
    """Return the part of LoRA's factors that stays whole: one factor of each pair, at the undivided
    side of the matrix.
    """
    experts = blocks.experts or 1
    whole = (4 + 3 * experts) * blocks.dims
    return whole / (whole + 2 * blocks.queries + 2 * blocks.keys + 3 * experts * blocks.mlp_dims)


def _part_of_matrices(divided: Divided, ranks: int) -> Memory:
    blocks, work = divided.blocks, divided.work
    counted = [*part_of_matrices(divided.model, blocks, work, ranks).blocks, *divided.outside]
    own = replace(
        work,
        weights_bytes=sum(each.held_bytes for each in counted),
        trained_bytes=sum(each.trained_bytes for each in counted),
    )
    return memory_of_matrices(divided.of, blocks, own, ranks, divided.word)


def part_of_matrices(model: Model, blocks: DecoderShape, work: Work, ranks: int) -> Model:
    """Return the weights of one of ``ranks`` ranks that divide the matrices of a model's blocks."""
    whole = 0.0 if work.method == "full" else _whole_of_adapters(blocks)

    def of(block: Weights) -> Weights:
        trained = block.trained_bytes * (whole + (1.0 - whole) / ranks)
        held = (block.held_bytes - block.trained_bytes) / ranks + trained
        return Weights(block.numbers, round(held), round(trained))

    return replace(model, blocks=tuple(map(of, model.blocks)))


def memory_of_matrices(
    of: Callable[[DecoderShape, Work], Memory],
    blocks: DecoderShape,
    work: Work,
    ranks: int,
    word: int,
) -> Memory:
    """Return the arrays of one of ``ranks`` ranks that divide matrices.

    Args:
        work: the rank's work, with the bytes of its own weights.
        word: bytes of one value of the activations.
    """
    part = replace(
        blocks,
        mlp_dims=blocks.mlp_dims // ranks,
        queries=blocks.queries // ranks,
        keys=blocks.keys // ranks,
        heads=blocks.heads // ranks,
    )
    kept = _SUMS_KEPT * (1 if work.recomputed else work.trained_layers) + _SUMS_PASSING
    return _with_more(of(part, work), int(kept * work.tokens * blocks.dims * word))


# --- experts --------------------------------------------------------------------------------------


def expert_costs(divided: Divided, ranks: int, *, fetched: bool = False) -> ExpertCosts:
    """Return the costs of ranks with some of the experts, and rows of their own.

    Args:
        divided: the training, with all experts.
        ranks: number of ranks that divide the experts.
        fetched: see :func:`context_costs`.
    """
    blocks, work = divided.blocks, divided.work
    # The routers' choices travel with the hidden states: for each choice a weight and two digits of
    # the expert's number. The gradients of the weights travel with the gradients of hidden states.
    # So of four exchanges one has three more values a choice and one has one more: on average one.
    width = blocks.dims + blocks.active
    return ExpertCosts(
        expert_share=_in_experts(blocks, work),
        hidden_bytes=int(ranks * divided.step_tokens * width * divided.word),
        mixtures=blocks.layers,
        again=_computed_again(work, fetched=fetched),
    )


def _computed_again(work: Work, *, fetched: bool) -> int:
    """Return the number of blocks whose forward pass is computed again in the backward pass."""
    return work.trained_layers - fetched if work.recomputed or fetched else 0


def _in_experts(blocks: DecoderShape, work: Work) -> float:
    """Return the part of a block's trained weights, or of its adapters, that is in its experts."""
    if work.method == "full":
        inside, outside = (
            3 * blocks.experts * blocks.dims * blocks.mlp_dims,
            block_weights(blocks, 0),
        )
    else:
        inside = 3 * blocks.experts * (blocks.dims + blocks.mlp_dims)
        outside = 5 * blocks.dims + 2 * blocks.queries + 2 * blocks.keys + blocks.experts
    return inside / (inside + outside)


def _frozen_in_experts(blocks: DecoderShape) -> float:
    """Return the part of a block's frozen weights that is in its experts."""
    frozen = 3 * blocks.experts * blocks.dims * blocks.mlp_dims
    return frozen / (frozen + block_weights(blocks, 0))


def part_of_experts(model: Model, blocks: DecoderShape, work: Work, ranks: int) -> Model:
    """Return the weights of one of ``ranks`` ranks that divide the experts of a model."""
    share, frozen_share = _in_experts(blocks, work), _frozen_in_experts(blocks)

    def of(block: Weights) -> Weights:
        trained = block.trained_bytes * (1.0 - share + share / ranks)
        held = (block.held_bytes - block.trained_bytes) * (
            1.0 - frozen_share + frozen_share / ranks
        ) + trained
        return Weights(block.numbers, round(held), round(trained))

    return replace(model, blocks=tuple(map(of, model.blocks)))


def without_experts(
    model: Model, blocks: DecoderShape, work: Work, ranks: int
) -> tuple[Model, Weights]:
    """Return a rank's weights without its experts, and the weights of its experts.

    Args:
        model: weights of the rank, with one of ``ranks`` parts of the experts.
    """
    share, frozen_share = _in_experts(blocks, work), _frozen_in_experts(blocks)
    own, rest = list[Weights](), list[Weights]()
    for block in model.blocks:
        trained = round(block.trained_bytes * _inside(share, ranks))
        frozen = (block.held_bytes - block.trained_bytes) * _inside(frozen_share, ranks)
        own.append(Weights(0.0, round(frozen) + trained, trained))
        rest.append(
            replace(
                block,
                held_bytes=block.held_bytes - own[-1].held_bytes,
                trained_bytes=block.trained_bytes - trained,
            )
        )
    kept = Weights(
        0.0, sum(each.held_bytes for each in own), sum(each.trained_bytes for each in own)
    )
    return replace(model, blocks=tuple(rest)), kept


def _inside(share: float, ranks: int) -> float:
    """Return the part of a rank's block in its experts; ``share`` is that of a whole block."""
    return share / ranks / (1.0 - share + share / ranks)


def outside_experts(
    trained: int, own: Sequence[Weights], blocks: DecoderShape, work: Work, ranks: int
) -> int:
    """Return the bytes of a rank's trained weights outside experts; all ranks add up the gradients
    of these.

    Args:
        trained: bytes of all trained weights of the rank.
        own: weights of the rank's blocks, with one of ``ranks`` parts of the experts.
    """
    inside = _inside(_in_experts(blocks, work), ranks)
    return trained - int(inside * sum(each.trained_bytes for each in own))


def memory_of_experts(
    of: Callable[[DecoderShape, Work], Memory],
    blocks: DecoderShape,
    work: Work,
    word: int,
    *,
    alike: bool,
) -> Memory:
    """Return the arrays of a rank with some of the experts.

    Args:
        work: the rank's work, with the bytes of its own weights.
        word: bytes of one value of the activations.
        alike: True if the ranks compute the same rows, and each takes the tokens for its own
            experts.
    """
    whole = of(blocks, work)
    inner, places = blocks.active * blocks.mlp_dims, blocks.active * blocks.dims
    factors = (0.5, 0.0) if alike else (2.0, 1.0) if work.method == "full" else (4.0, 2.0)
    layers = 1 if work.recomputed else work.trained_layers
    more = layers * (factors[0] * inner + factors[1] * places) * work.tokens * word
    memory = _with_more(whole, int(more))
    if word == _HALF:
        return memory
    # The number of tokens for a rank's experts differs in each pass, so MLX keeps buffers of many
    # sizes.
    kept = min(_PLACES_KEPT[alike], whole.arrays // 2)
    return replace(memory, beside=memory.beside + kept)


# --- rows -----------------------------------------------------------------------------------------


def context_costs(divided: Divided, *, fetched: bool = False) -> ContextCosts:
    """Return the costs of ranks with a part of each row.

    Args:
        fetched: True if ranks fetch arrays, and so compute the forward pass of each block but the
            last one again.
    """
    work, blocks = divided.work, divided.blocks
    of_layer = _keys_and_values(divided, divided.step_tokens)
    again = _computed_again(work, fetched=fetched)
    return ContextCosts(
        part=lambda ranks: _part_of_rows(divided, ranks),
        fetched_bytes=of_layer * (blocks.layers + again),
        pushed_bytes=of_layer * work.trained_layers,
    )


def _keys_and_values(divided: Divided, tokens: int) -> int:
    """Return the bytes of the keys and values of ``tokens`` tokens in one layer."""
    return 2 * tokens * divided.blocks.keys * divided.word


def _part_of_rows(divided: Divided, ranks: int) -> Memory:
    work = replace(divided.work, batch_tokens=divided.step_tokens)
    return memory_of_rows(divided.of, divided.blocks, work, ranks, divided.word)


def memory_of_rows(
    of: Callable[[DecoderShape, Work], Memory],
    blocks: DecoderShape,
    work: Work,
    ranks: int,
    word: int,
    heads: int = 1,
) -> Memory:
    """Return the arrays of one of ``ranks`` ranks that divide rows.

    Args:
        work: work for whole rows.
        word: bytes of one value of the activations.
        heads: number of ranks that also divide the heads of attention.
    """
    own = replace(
        work,
        tokens=math.ceil(work.tokens / ranks),
        batch_tokens=math.ceil(work.batch_tokens / ranks),
    )
    layers = (1 if work.recomputed else work.trained_layers) + _ROWS_PASSING
    whole = layers * 2 * work.tokens * blocks.keys * word
    return _with_more(of(blocks, own), int(whole / heads))


def _with_more(memory: Memory, activations: int) -> Memory:
    """Return the memory of a step with further activations."""
    return replace(
        memory,
        backward=memory.backward + activations,
        loss=memory.loss + activations,
        activations=memory.activations + activations,
    )
