"""Costs of ranks that divide arrays, matrices or rows, from a model's widths and weights, before anything is loaded.

Memory is counted as in :mod:`allhands.run.training_memory`, whose multiples hold inside of a block, too. What dividing
adds was measured on CPUs, over two and three ranks of a ring: ``tests/distributed/test_divided_planned.py`` compares
it with real runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from allhands.parallel.costs import ContextCosts, Memory, ShardedCosts, TensorCosts, Work
from allhands.run.stage_costs import Model, Weights
from allhands.run.training_memory import KEPT_BYTES, DecoderShape

# Values for each token of a block's width that a rank with a part of matrices keeps besides: in each block the sums of
# attention and feed-forward part; for a while a gradient before and after its sum, and two messages.
_SUMS_KEPT, _SUMS_PASSING = 2.0, 4.0
# Keys and values of whole rows that are there for a while besides: gradients before and after their sum.
_ROWS_PASSING = 2.0
# Of a block's trained weights as they are added up: gradients, end to end in a row, and the sums of all ranks. A table
# of tokens is a row by itself.
_ROW_COPIES, _TABLE_COPIES = 3.0, 2.0
# Of what a CPU has for one block of a divided model and its rows, that MLX keeps for later: rows and gradients come and
# go with each block, and four tenths of the activations find a place that is there.
_ROWS_KEPT, _GRADIENTS_KEPT, _ACTIVATIONS_KEPT = 4.0, 2.0, 0.6
_FLOAT, _HALF = 4, 2


@dataclass(frozen=True)
class Divided:
    """A training whose model or rows are to be divided.

    Attributes:
        model: weights as a rank would hold them.
        blocks: widths of the model.
        work: of a rank that has all rows of its micro-batch: the largest one, and the number of tokens of a step.
        of: function that returns the arrays of a rank's work: of a CPU or of a GPU.
        tied: True if the embedding is also the head.
        on_cpu: True if ranks compute on a CPU, in float32.
    """

    model: Model
    blocks: DecoderShape
    work: Work
    of: Callable[[DecoderShape, Work], Memory]
    tied: bool
    on_cpu: bool

    @property
    def word(self) -> int:
        """Bytes of a number of activations."""
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
        """Weights outside of the blocks, each once."""
        return [self.model.embedding] if self.tied else [self.model.embedding, self.model.head]

    def memory(self, work: Work) -> Memory:
        """Return the arrays of some other work."""
        return self.of(self.blocks, work)


# --- fully sharded ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Unit:
    """A block and the tables that are fetched with it; ``tables`` are rows by themselves."""

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
        """Bytes of gradients as they are added up."""
        tables = sum(part.trained_bytes for part in self.tables)
        return _ROW_COPIES * (self.trained - tables) + _TABLE_COPIES * tables


def sharded_costs(divided: Divided) -> ShardedCosts:
    """Return the costs of ranks with a part of every array."""
    units = _units(divided)
    last = len(units) - 1
    first = next((place for place, unit in enumerate(units) if unit.trained), last)
    there, back = units[:-1], units[first:]
    return ShardedCosts(
        part=lambda share: _part_of_shards(divided, units, first, share),
        fetched_bytes=sum(unit.held for unit in (*there, *back)),
        pushed_bytes=sum(unit.trained for unit in back),
        micro_batches=divided.micro_batches,
    )


def _units(divided: Divided) -> list[_Unit]:
    model, last = divided.model, len(divided.model.blocks) - 1
    units: list[_Unit] = []
    for place, block in enumerate(model.blocks):
        tables = [model.embedding] if place == 0 or (place == last and divided.tied) else []
        head = model.head if place == last and not divided.tied else None
        units.append(_Unit(block, tuple(tables), head))
    return units


def _part_of_shards(divided: Divided, units: Sequence[_Unit], first: int, share: float) -> Memory:
    work, counted = divided.work, [*divided.model.blocks, *divided.outside]
    weights, trained = sum(each.held_bytes for each in counted), sum(each.trained_bytes for each in counted)
    whole = divided.memory(replace(work, weights_bytes=weights, trained_bytes=trained))
    one = divided.memory(replace(work, trained_layers=1, trained_bytes=0))
    passes = _peak_of_passes(divided, units, first, one, trained, share)
    largest = max((unit for unit in units), key=lambda unit: unit.block.held_bytes)
    kept = 0.0
    if divided.on_cpu:
        kept = _ROWS_KEPT * largest.block.held_bytes + _ACTIVATIONS_KEPT * one.activations
        if work.method == "full":
            kept += _GRADIENTS_KEPT * largest.block.trained_bytes
    return Memory(
        weights=int(weights * share),
        optimizer=int(whole.optimizer * share),
        backward=int(passes),
        loss=0,
        update=int(whole.update * share),
        renewed=int(whole.renewed * share),
        trained=int(trained * share),
        activations=int(one.activations + _inputs(divided, first, len(units) - 1)),
        logits=one.logits,
        beside=one.beside + int(min(KEPT_BYTES, kept)),
    )


def _inputs(divided: Divided, first: int, place: int) -> float:
    """Bytes of the inputs of blocks from the first trained one up to ``place``; the first of all has tokens."""
    return (place - first + (first > 0)) * divided.work.tokens * divided.blocks.dims * divided.word


def _peak_of_passes(
    divided: Divided, units: Sequence[_Unit], first: int, one: Memory, trained: int, share: float
) -> float:
    """Bytes at the peak of a micro-batch's backward pass, block by block.

    Args:
        one: the arrays of one block's passes; ``trained``: bytes of all gradients.
        share: part of every array that the rank has.
    """
    # A step's sums so far; of a first micro-batch only those of the blocks that are done.
    parts, peak = (trained * share if divided.work.accumulated else 0.0), 0.0
    for place in range(len(units) - 1, first - 1, -1):
        unit = units[place]
        ahead = units[place - 1].held if place > first else 0
        there = unit.held + ahead + _inputs(divided, first, place) + parts
        begun = 0.0
        if place == len(units) - 1:  # where the loss is, and on a CPU a copy of the head as it is trained
            head = sum(each.trained_bytes for each in (*unit.tables, *([unit.head] if unit.head else [])))
            begun = one.logits + (head if divided.on_cpu else 0)
        computing = unit.trained + max(one.activations, begun)
        summing = unit.copies + unit.trained * share
        peak = max(peak, there + computing, there + summing)
        if not divided.work.accumulated:
            parts += unit.trained * share
    return peak


# --- matrices -----------------------------------------------------------------------------------------


def tensor_costs(divided: Divided) -> TensorCosts:
    """Return the costs of ranks with a part of each matrix."""
    work, blocks = divided.work, divided.blocks
    sums = 2 * blocks.layers + 2 * work.trained_layers * (2 if work.recomputed else 1)
    if not (divided.model.embedding.trained_bytes or work.recomputed):
        sums -= 1  # nobody asks for the gradient of what the first trained block is given
    adapters = 0 if work.method == "full" else sum(each.trained_bytes for each in divided.model.blocks)
    return TensorCosts(
        part=lambda ranks: _part_of_matrices(divided, ranks),
        hidden_bytes=divided.step_tokens * blocks.dims * divided.word,
        sums=sums,
        partial_bytes=int(adapters * _whole_of_adapters(blocks)),
    )


def _whole_of_adapters(blocks: DecoderShape) -> float:
    """Return the part of LoRA's factors that stays whole: of each pair of them the one at the undivided side."""
    experts = blocks.experts or 1
    whole = (4 + 3 * experts) * blocks.dims
    return whole / (whole + 2 * blocks.queries + 2 * blocks.keys + 3 * experts * blocks.mlp_dims)


def _part_of_matrices(divided: Divided, ranks: int) -> Memory:
    blocks, work = divided.blocks, divided.work
    trained = sum(each.trained_bytes for each in divided.model.blocks)
    frozen = sum(each.held_bytes for each in divided.model.blocks) - trained
    whole = 0.0 if work.method == "full" else _whole_of_adapters(blocks)
    own_trained = trained * (whole + (1.0 - whole) / ranks)
    outside = divided.outside
    own = replace(
        work,
        weights_bytes=int(frozen / ranks + own_trained) + sum(each.held_bytes for each in outside),
        trained_bytes=int(own_trained) + sum(each.trained_bytes for each in outside),
    )
    return memory_of_matrices(divided.of, blocks, own, ranks, divided.word)


def memory_of_matrices(
    of: Callable[[DecoderShape, Work], Memory], blocks: DecoderShape, work: Work, ranks: int, word: int
) -> Memory:
    """Return the arrays of one of so many ranks with parts of matrices, whose weights ``work`` has.

    Args:
        word: bytes of a number of activations.
    """
    part = replace(
        blocks, mlp_dims=blocks.mlp_dims // ranks, queries=blocks.queries // ranks, keys=blocks.keys // ranks
    )
    kept = _SUMS_KEPT * (1 if work.recomputed else work.trained_layers) + _SUMS_PASSING
    return _with_more(of(part, work), int(kept * work.tokens * blocks.dims * word))


# --- rows ---------------------------------------------------------------------------------------------


def context_costs(divided: Divided) -> ContextCosts:
    """Return the costs of ranks with a part of each row."""
    work, blocks = divided.work, divided.blocks
    of_layer = _keys_and_values(divided, divided.step_tokens)
    return ContextCosts(
        part=lambda ranks: _part_of_rows(divided, ranks),
        fetched_bytes=of_layer * (blocks.layers + (work.trained_layers if work.recomputed else 0)),
        pushed_bytes=of_layer * work.trained_layers,
    )


def _keys_and_values(divided: Divided, tokens: int) -> int:
    """Bytes of the keys and values of so many tokens in one layer."""
    return 2 * tokens * divided.blocks.keys * divided.word


def _part_of_rows(divided: Divided, ranks: int) -> Memory:
    work = replace(divided.work, batch_tokens=divided.step_tokens)
    return memory_of_rows(divided.of, divided.blocks, work, ranks, divided.word)


def memory_of_rows(
    of: Callable[[DecoderShape, Work], Memory], blocks: DecoderShape, work: Work, ranks: int, word: int
) -> Memory:
    """Return the arrays of one of so many ranks with parts of rows; ``work`` is of whole rows.

    Args:
        word: bytes of a number of activations.
    """
    own = replace(work, tokens=math.ceil(work.tokens / ranks), batch_tokens=math.ceil(work.batch_tokens / ranks))
    layers = (1 if work.recomputed else work.trained_layers) + _ROWS_PASSING
    return _with_more(of(blocks, own), int(layers * 2 * work.tokens * blocks.keys * word))


def _with_more(memory: Memory, activations: int) -> Memory:
    """Return the memory of a step with further activations."""
    return replace(
        memory,
        backward=memory.backward + activations,
        loss=memory.loss + activations,
        activations=memory.activations + activations,
    )
