"""Costs of each block of a model for its stage, in work and memory: for the split of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from allhands.distributed.mesh import Mesh
from allhands.parallel.costs import Memory, Work
from allhands.parallel.schedules import ScheduleName, make_schedule
from allhands.parallel.splitting import Layers, Part

# Micro-batches of a step for each stage: with so many a rank waits for a fifth of the time at most.
MICRO_BATCHES = 4
# Of each trained byte where the optimizer is not known: what it keeps, and the gradients, summed
# and new.
_STATES, _GRADIENTS = 2.0, 2.0
_FETCHED = 2  # blocks: one that is computed and the next one, which is on its way
# A process on a CPU takes as much more than its arrays, as in
# allhands.run.training_memory.of_process.
ON_CPU, ROOM_OF_PRODUCTS = 1.05, 16_000_000


@dataclass(frozen=True)
class Weights:
    """Weights of a block, or of the parts outside of the blocks.

    Attributes:
        numbers: number of weights that each token is multiplied by.
        held_bytes: bytes while they are in use; ``trained_bytes``: those of the trained weights.
    """

    numbers: float
    held_bytes: int
    trained_bytes: int = 0

    def divided(self, work: int, held: int, trained: int) -> Weights:
        """Return a rank's part of the work, of the bytes in use, and of the trained ones."""
        return Weights(
            self.numbers / work, -(-self.held_bytes // held), -(-self.trained_bytes // trained)
        )


@dataclass(frozen=True)
class Model:
    """All of a model's weights; what is beside the blocks is the embedding's, or the head's with
    the final norm.
    """

    blocks: tuple[Weights, ...]
    embedding: Weights
    head: Weights

    def divided(self, tensor: int, shard: int, *, keeps: bool) -> Model:
        """Return what is left of it for each rank.

        Args:
            tensor: ranks that have divided the matrices of blocks, and compute with their parts.
            shard: ranks that have divided everything, and compute with whole blocks.
            keeps: whether these stay whole until a step ends.
        """
        held = 1 if keeps else shard
        blocks = tuple(each.divided(tensor, tensor * held, tensor * shard) for each in self.blocks)
        embedding, head = (each.divided(1, held, shard) for each in (self.embedding, self.head))
        return Model(blocks, embedding, head)

    def fetched_bytes(self, shard: int, *, keeps: bool) -> int:
        """Bytes of the blocks that are whole at once, if ``shard`` ranks have divided them, with
        new gradients.
        """
        largest = max(self.blocks, key=lambda block: block.held_bytes, default=None)
        if shard == 1 or largest is None:
            return 0
        weights = 0 if keeps else _FETCHED * shard * largest.held_bytes
        return weights + shard * largest.trained_bytes


def layers_of(
    model: Model,
    work: Work | None,
    of: Callable[[Work], Memory] | None,
    *,
    more: float = 1.0,
    again: bool = False,
) -> tuple[Layers, int]:
    """Return the parts that a split is made of, and the bytes that every rank has besides: for a
    while in a pass, and in buffers for rows of other lengths.

    Args:
        work: of a rank with a micro-batch of the step; ``None``: nothing is trained.
        of: the arrays of such work for the whole model; ``None``: not known, and activations are
            not counted.
        more: bytes that are taken for each byte of arrays.
        again: whether a stage computes its forward pass twice, as CPUs do without a graph; the last
            one never does.
    """
    kept = once = logits = 0.0
    for_trained = 0.0 if work is None else _STATES + _GRADIENTS
    if work is not None and of is not None:
        one, two = (of(replace(work, trained_layers=layers)) for layers in (1, 2))
        kept = two.activations - one.activations
        buffers = of(replace(work, has_head=False)).buffers
        once = max(0.0, one.activations - kept) + buffers
        logits = one.logits + one.beside + one.buffers - buffers
        if work.trained_bytes:
            for_trained = one.optimizer / work.trained_bytes + _GRADIENTS
    trained = [place for place, block in enumerate(model.blocks) if block.trained_bytes]
    first_trained = 0 if model.embedding.trained_bytes else min(trained, default=len(model.blocks))

    def part(
        weights: Weights, kept_bytes: float = 0.0, *, through: bool, beside: float = 0.0
    ) -> Part:
        passes = 1.0
        if work is not None and through:
            passes += 1.0 + (work.method == "full" and weights.trained_bytes > 0) + work.recomputed
        held = weights.held_bytes + for_trained * weights.trained_bytes + beside
        twice = weights.numbers if again and work is not None else 0.0
        return Part(
            passes * weights.numbers,
            round(more * held),
            more * kept_bytes if through else 0.0,
            twice,
        )

    blocks = tuple(
        part(block, kept, through=place >= first_trained)
        for place, block in enumerate(model.blocks)
    )
    embedding = replace(part(model.embedding, through=False), cost=0.0)
    head = part(model.head, through=True, beside=logits)
    return Layers(blocks, embedding, head, first_trained), round(more * once)


def summing_bytes(mesh: Mesh, trained: int, shared: int, bucket_bytes: int) -> int:
    """Bytes of gradients end to end, and of their sum, where several ranks have the same stage or
    the same experts, or all ranks what is in no expert.

    Args:
        trained: bytes of a rank's trained weights; ``bucket_bytes``: of a call, at most.
        shared: bytes of those that ranks with other experts have, too.
    """
    if mesh.pipe == 1 and mesh.expert == 1:
        return 0
    summed = trained if mesh.copies > 1 else shared if mesh.expert > 1 else 0
    return 2 * min(bucket_bytes, summed)


def on_the_way(hidden_bytes: int, ranks: int, alive: float) -> int:
    """Bytes of a rank's messages: what micro-batches have brought that are alive, and what is being
    sent and received.

    Args:
        hidden_bytes: of the hidden states of one micro-batch.
        alive: micro-batches that have begun on this rank and not ended.
    """
    return int((alive + ranks + 1) * hidden_bytes)


def of_stage(memory: Memory, present_bytes: int, present_arrays: int) -> int:
    """Return the peak of a process on a CPU that has a stage, as
    :func:`allhands.run.training_memory.of_process` does for one that has the whole model.
    """
    new = memory.arrays - present_arrays
    more = ROOM_OF_PRODUCTS + memory.buffers + memory.beside
    return int(present_bytes + ON_CPU * new + more)


def small_enough(longest: int, rows: int, stages: int) -> int:
    """Tokens of a micro-batch of which a step of so many rows has several for each stage, if it
    can.
    """
    return max(longest, longest * rows // (MICRO_BATCHES * stages))


def alive(
    schedule: ScheduleName, ranks: int, micro_batches: int, stages_per_rank: int, *, native: bool
) -> list[float]:
    """Micro-batches whose activations each rank holds at once, of all its blocks.

    Args:
        native: whether a stage keeps its input alone, and computes its forward pass again on the
            way back.
    """
    if native:
        return [1.0] * ranks
    made = make_schedule(schedule, ranks, micro_batches, stages_per_rank)
    return [most / stages_per_rank for most in made.most_alive]
