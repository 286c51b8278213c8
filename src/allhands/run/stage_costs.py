"""Costs of a model's blocks in work and memory, for the division of a pipeline into stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from allhands.distributed.mesh import Mesh
from allhands.parallel.costs import Memory, Work
from allhands.parallel.schedules import ScheduleName, make_schedule
from allhands.parallel.splitting import Layers, Part

# Micro-batches of a step for each stage: with four, a rank waits for a fifth of the time at most.
MICRO_BATCHES = 4
# Bytes for each trained byte if nothing is known: the optimizer's state, and gradients, both summed
# and new.
_STATES, _GRADIENTS = 2.0, 2.0
_FETCHED = 2  # fetched blocks in memory: the one that is computed and the next one
# Factor and bytes by which a process on a CPU takes more than its arrays, as in
# allhands.run.training_memory.of_process.
ON_CPU, ROOM_OF_PRODUCTS = 1.05, 16_000_000


@dataclass(frozen=True)
class Weights:
    """Weights of a block, or of the parts outside the blocks.

    Attributes:
        numbers: number of weights that each token is multiplied by.
        held_bytes: bytes of the weights in the form in which they are used.
        trained_bytes: bytes of the trained ones of them.
    """

    numbers: float
    held_bytes: int
    trained_bytes: int = 0

    def divided(self, work: int, held: int, trained: int) -> Weights:
        """Return a rank's part: work, held bytes and trained bytes divided by these numbers."""
        return Weights(
            self.numbers / work, -(-self.held_bytes // held), -(-self.trained_bytes // trained)
        )


@dataclass(frozen=True)
class Model:
    """All weights of a model: the blocks, the embedding, and the head with the final norm."""

    blocks: tuple[Weights, ...]
    embedding: Weights
    head: Weights

    def divided(self, tensor: int, shard: int, *, keeps: bool) -> Model:
        """Return each rank's part of the model.

        Args:
            tensor: number of ranks that divide the matrices of blocks and compute with their parts.
            shard: number of ranks that divide all arrays and compute with whole, fetched blocks.
            keeps: whether fetched blocks stay whole until a step ends.
        """
        held = 1 if keeps else shard
        blocks = tuple(each.divided(tensor, tensor * held, tensor * shard) for each in self.blocks)
        embedding, head = (each.divided(1, held, shard) for each in (self.embedding, self.head))
        return Model(blocks, embedding, head)

    def fetched_bytes(self, shard: int, *, keeps: bool) -> int:
        """Return the bytes of fetched blocks that are whole at once, and of a block's new
        gradients.

        0 if ``shard`` is 1; the model has one rank's part.
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
    """Return the parts that a split is made of, and the further bytes that every rank needs.

    The further bytes are for arrays that live for a short time in a pass, and for buffers for rows
    of other lengths.

    Args:
        work: work of a rank with one micro-batch; ``None``: nothing is trained.
        of: returns the arrays for such work with the whole model; ``None``: not known, and
            activations are not counted.
        more: bytes of memory for each byte of arrays.
        again: whether a stage computes its forward pass twice, as CPUs do without a graph; the last
            stage never does.
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
    """Return the bytes of a bucket of gradients and of its sum, if ranks with equal weights add
    up gradients; else 0.

    These are ranks with the same stage or the same experts; weights in no expert are on all ranks.
    Only pipelines and divided experts are counted here.

    Args:
        trained: bytes of a rank's trained weights.
        shared: bytes of those weights that ranks with other experts also have.
        bucket_bytes: most bytes of one call.
    """
    if mesh.pipe == 1 and mesh.expert == 1:
        return 0
    summed = trained if mesh.copies > 1 else shared if mesh.expert > 1 else 0
    return 2 * min(bucket_bytes, summed)


def on_the_way(hidden_bytes: int, ranks: int, alive: float) -> int:
    """Return the bytes of a rank's messages: inputs of micro-batches that are alive, and messages
    being sent and received.

    Args:
        hidden_bytes: bytes of the hidden states of one micro-batch.
        ranks: number of ranks of the pipeline.
        alive: micro-batches that have begun on this rank and not ended.
    """
    return int((alive + ranks + 1) * hidden_bytes)


def of_stage(memory: Memory, present_bytes: int, present_arrays: int) -> int:
    """Return the peak memory of a CPU process with a stage.

    :func:`allhands.run.training_memory.of_process` does the same for the whole model, and has the
    arguments.
    """
    new = memory.arrays - present_arrays
    more = ROOM_OF_PRODUCTS + memory.buffers + memory.beside
    return int(present_bytes + ON_CPU * new + more)


def small_enough(longest: int, rows: int, stages: int) -> int:
    """Return the tokens of a micro-batch so that a step has :data:`MICRO_BATCHES` for each stage.

    They are at least ``longest``, the tokens of the longest row; ``rows`` are those of a step.
    """
    return max(longest, longest * rows // (MICRO_BATCHES * stages))


def alive(
    schedule: ScheduleName, ranks: int, micro_batches: int, stages_per_rank: int, *, native: bool
) -> list[float]:
    """Return for each rank the number of micro-batches whose activations it holds at once.

    With several stages on a rank, a micro-batch in one of them counts as a fraction.

    Args:
        native: whether a stage keeps only its input, and computes its forward pass again in the
            backward pass; the number is then 1.
    """
    if native:
        return [1.0] * ranks
    made = make_schedule(schedule, ranks, micro_batches, stages_per_rank)
    return [most / stages_per_rank for most in made.most_alive]
