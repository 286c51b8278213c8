"""Costs of a strategy for each rank, in memory and traffic: for ``allhands plan``, before anything
is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from allhands.distributed.codecs import Codec
from allhands.parallel.rounds import Rounds

Method = Literal["lora", "dora", "full"]

_FLOAT = 4


@dataclass(frozen=True)
class Work:
    """The work of a rank.

    Attributes:
        method: method of training.
        tokens: tokens of its largest micro-batch, padding included.
        trained_layers: blocks in the backward pass.
        weights_bytes: bytes of all weights as stored; ``trained_bytes``: those of the trained
            weights.
        optimizer: name of the optimizer.
        recomputed: True if blocks recompute their activations.
        accumulated: True if a batch is more than one micro-batch.
        masters: True if the optimizer has float32 copies of weights in half precision.
        by_adam_bytes: bytes of the trained weights that muon leaves to adamw, which keeps twice as
            much.
        batch_tokens: tokens of its share of a batch, which may be several micro-batches; 0: the
            same as ``tokens``.
        row_tokens: tokens of the longest row; no micro-batch can be smaller.
        packed: form of the exchanged gradients; ``None``: not packed.
        alive: number of micro-batches whose activations exist at the same time: several in a
            pipeline.
        has_head: True if the rank computes the loss; in a pipeline only the last stage does.
        lengths: number of lengths that rows have.
        with_scores: True if a GPU holds the matrices of attention's scores for rows of any length
            (``--deterministic``).
    """

    method: Method
    tokens: int
    trained_layers: int
    weights_bytes: int
    trained_bytes: int
    optimizer: str
    recomputed: bool = False
    accumulated: bool = False
    masters: bool = False
    batch_tokens: int = 0
    by_adam_bytes: int = 0
    row_tokens: int = 1
    packed: PackedGradients | None = None
    alive: float = 1.0
    has_head: bool = True
    lengths: int = 1
    with_scores: bool = False

    def divided(self, ranks: int) -> Work:
        """Return the work of each of so many ranks with an equal share of the batch."""
        return self.share(1 / ranks)

    def share(self, part_of_batch: float) -> Work:
        """Return the work of a rank with such a part of the batch."""
        whole = self.batch_tokens or self.tokens
        part = max(1, int(whole * part_of_batch + 1e-6))
        # What is summed for another reason than the size of the batch still is.
        summed = self.accumulated and (whole <= self.tokens or part > self.tokens)
        return replace(self, tokens=min(self.tokens, part), batch_tokens=part, accumulated=summed)

    def cut(self, tokens: int) -> Work:
        """Return the work with micro-batches of so many tokens, whose gradients are summed."""
        return replace(
            self,
            tokens=tokens,
            accumulated=self.accumulated or tokens < (self.batch_tokens or self.tokens),
        )


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a step; the three phases do not occur at the same time.

    Attributes:
        weights: bytes of all weights.
        optimizer: bytes of the optimizer's state.
        backward: further bytes in the backward pass; ``loss`` and ``update``: the same for these
            phases.
        activations: part of ``backward`` and ``loss``: activations; ``logits``: the part that the
            loss adds.
        beside: bytes of the process outside of arrays: buffers of the products with the head.
        buffers: further ones, which are kept for rows of other lengths; they count in a pipeline,
            whose ranks have little else.
        renewed: part of ``update``: new values of the arrays that a rank updates.
        trained: part of ``weights``: the trained ones.
    """

    weights: int
    optimizer: int
    backward: int
    loss: int
    update: int
    activations: int = 0
    logits: int = 0
    beside: int = 0
    buffers: int = 0
    renewed: int = 0
    trained: int = 0

    @property
    def arrays(self) -> int:
        """The peak of all arrays."""
        return self.weights + self.optimizer + max(self.backward, self.loss, self.update)


# Function of the number of ranks.
PartOf = Callable[[int], Memory]


def memory_of_stages(memory: Memory, ranks: int) -> Memory:
    """Return the memory of each of so many ranks with an equal part of the weights, and all
    activations.
    """
    parts = {
        name: getattr(memory, name) // ranks
        for name in ("weights", "optimizer", "update", "renewed", "trained")
    }
    return replace(memory, **parts)


def with_left_out(memory: Memory, work: Work) -> Memory:
    """Return the work of one of several ranks, with the rest that it keeps because packing has left
    it out of gradients.
    """
    if work.packed is None:
        return memory
    return replace(memory, optimizer=memory.optimizer + work.packed.left_bytes(work.trained_bytes))


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in a step, and receives.

    Attributes:
        all_reduced: bytes of arrays in all-reduces: each rank has the whole sum afterwards.
        gathered: bytes of arrays in all-gathers: each rank has a part before, and the whole
            afterwards.
        scattered: bytes of arrays in reduce-scatters: each rank has a part of the sum afterwards.
        handed_on: bytes of hidden states that a stage sends to the next one; the same number comes
            back as gradients.
    """

    all_reduced: int = 0
    gathered: int = 0
    scattered: int = 0
    handed_on: int = 0

    def sent(self, ranks: int) -> int:
        """Bytes that each of so many ranks sends, by rings: (N-1)/N of what is gathered or
        scattered, twice that of what is all-reduced; of what is handed on the most that any rank
        sends.
        """
        handed_on = self.handed_on * min(2, ranks - 1)
        return (
            handed_on
            + (2 * self.all_reduced + self.gathered + self.scattered) * (ranks - 1) // ranks
        )


@dataclass(frozen=True)
class PackedGradients:
    """Gradients that are exchanged packed (``--compress``).

    Attributes:
        item_bytes: bytes of a number in the sum.
    """

    codec: Codec
    backend: str
    item_bytes: int = _FLOAT

    def traffic(self, gradient_bytes: int, ranks: int) -> Traffic:
        """Return the traffic of a step of so many ranks, whose gradients would be so many bytes as
        they are.
        """
        packed = self.codec.packed_bytes(gradient_bytes // self.item_bytes)
        if self.codec.route(self.backend, ranks, self.item_bytes) == "gather":
            return Traffic(gathered=ranks * packed)
        return Traffic(all_reduced=packed)

    def all_reduced(self, gradient_bytes: int, ranks: int) -> int:
        """Bytes of a sum over ranks that takes as long."""
        return (
            self.traffic(gradient_bytes, ranks).sent(ranks) * ranks // (2 * (ranks - 1))
            if ranks > 1
            else 0
        )

    def left_bytes(self, gradient_bytes: int) -> int:
        """Bytes of the rest that a rank keeps because packing has left it out."""
        return gradient_bytes // self.item_bytes * _FLOAT if self.codec.grouped else 0


class Costs(Protocol):
    """The costs of a strategy, without loading anything."""

    def memory(self, memory: Memory, ranks: int) -> Memory:
        """Return a rank's, of what it would hold if it had everything."""
        ...

    def traffic(
        self,
        gradient_bytes: int,
        weight_bytes: int,
        *,
        scatters: bool,
        packed: Traffic | None = None,
    ) -> Traffic:
        """Return the traffic of a step.

        Args:
            gradient_bytes: bytes of all gradients in the exchange; ``weight_bytes``: of the trained
                weights as stored.
            scatters: True if the back-end has a reduce-scatter.
            packed: packed gradients in place of ``gradient_bytes``, if this strategy can exchange
                them.
        """
        ...


class DataCosts:
    """Costs of plain data parallelism: every rank has all arrays."""

    def memory(self, memory: Memory, ranks: int) -> Memory:
        return memory

    def traffic(
        self,
        gradient_bytes: int,
        weight_bytes: int,
        *,
        scatters: bool,
        packed: Traffic | None = None,
    ) -> Traffic:
        return packed or Traffic(all_reduced=gradient_bytes)


@dataclass(frozen=True)
class ShardedCosts:
    """Costs of fully sharded ranks: each has one of ``ranks`` parts of every array, and whole
    blocks for a while.

    :func:`allhands.run.divided_costs.sharded_costs` fills in the attributes for a model.

    Attributes:
        part: function that returns the arrays of a rank with such a part of every array, 0 to 1;
            ``None``: without blocks that are whole for a while, which is the least.
        fetched_bytes: bytes of all weights that the passes of a micro-batch fetch; 0: trained
            weights alone, twice.
        pushed_bytes: bytes of all gradients that they add up; 0: each once.
        micro_batches: number of micro-batches of a step, each of which fetches weights anew.
        keeps: True if fetched weights stay until the step ends, so that each is fetched once in it.
    """

    part: Callable[[float], Memory] | None = None
    fetched_bytes: int = 0
    pushed_bytes: int = 0
    micro_batches: int = 1
    keeps: bool = False

    def memory(self, memory: Memory, ranks: int) -> Memory:
        return self.memory_of(memory, 1 / ranks)

    def memory_of(self, memory: Memory, share: float) -> Memory:
        """Return the memory of a rank with such a part of every array: ranks of unlike memory have
        unlike parts.
        """
        if self.part is not None:
            return self.part(share)
        names = ("weights", "trained", "optimizer", "update", "renewed")
        parts = {name: int(getattr(memory, name) * share) for name in names}
        gradients = memory.backward - memory.activations
        return replace(memory, **parts, backward=memory.activations + int(gradients * share))

    def traffic(
        self,
        gradient_bytes: int,
        weight_bytes: int,
        *,
        scatters: bool,
        packed: Traffic | None = None,
    ) -> Traffic:
        fetched = (1 if self.keeps else self.micro_batches) * (
            self.fetched_bytes or 2 * weight_bytes
        )
        pushed = self.micro_batches * (self.pushed_bytes or gradient_bytes)
        if scatters:
            return Traffic(gathered=fetched, scattered=pushed)
        return Traffic(gathered=fetched, all_reduced=pushed)


@dataclass(frozen=True)
class TensorCosts:
    """Costs of divided matrices: each rank has one of ``ranks`` parts of the blocks, and computes
    all rows.

    :func:`allhands.run.divided_costs.tensor_costs` fills in the attributes for a model.

    Attributes:
        part: function that returns the arrays of each of so many ranks; ``None``: as if everything
            were in blocks.
        hidden_bytes: bytes of the hidden states of a step, which are added up ``sums`` times: twice
            a block in the forward pass, and twice in the backward pass.
        partial_bytes: bytes of gradients of whole arrays in blocks, of which each rank has a part.
    """

    part: PartOf | None = None
    hidden_bytes: int = 0
    sums: int = 0
    partial_bytes: int = 0

    def memory(self, memory: Memory, ranks: int) -> Memory:
        return memory_of_stages(memory, ranks) if self.part is None else self.part(ranks)

    def traffic(
        self,
        gradient_bytes: int,
        weight_bytes: int,
        *,
        scatters: bool,
        packed: Traffic | None = None,
    ) -> Traffic:
        return Traffic(all_reduced=self.sums * self.hidden_bytes + self.partial_bytes)


@dataclass(frozen=True)
class ContextCosts:
    """Costs of divided rows: each rank has all weights, and computes one of ``ranks`` parts of each
    row.

    :func:`allhands.run.divided_costs.context_costs` fills in the attributes for a model.

    Attributes:
        part: function that returns the arrays of each of so many ranks; ``None``: without
            activations.
        fetched_bytes: bytes of the keys and values of whole rows that all layers fetch in a step,
            with those that are fetched again where blocks are recomputed; ``pushed_bytes``: of
            their gradients, which are added up.
    """

    part: PartOf | None = None
    fetched_bytes: int = 0
    pushed_bytes: int = 0

    def memory(self, memory: Memory, ranks: int) -> Memory:
        return memory if self.part is None else self.part(ranks)

    def traffic(
        self,
        gradient_bytes: int,
        weight_bytes: int,
        *,
        scatters: bool,
        packed: Traffic | None = None,
    ) -> Traffic:
        gradients = packed or Traffic(all_reduced=gradient_bytes)
        summed, scattered = (0, self.pushed_bytes) if scatters else (self.pushed_bytes, 0)
        return replace(
            gradients,
            gathered=gradients.gathered + self.fetched_bytes,
            scattered=gradients.scattered + scattered,
            all_reduced=gradients.all_reduced + summed,
        )


@dataclass(frozen=True)
class ExpertCosts:
    """Costs of divided experts: each rank has one of ``ranks`` parts of them, all else whole, and
    rows of its own.

    Attributes:
        expert_share: part of the weights, and of the trained ones, that is in experts.
        hidden_bytes: bytes of the hidden states of all ranks' tokens of a step.
        mixtures: number of blocks with experts; each gathers hidden states and scatters sums, in
            both passes.
        again: number of those whose forward pass is computed again in the backward pass.
    """

    expert_share: float = 0.0
    hidden_bytes: int = 0
    mixtures: int = 0
    again: int = 0

    def memory(self, memory: Memory, ranks: int) -> Memory:
        """Activations within experts stay as they are: a rank computes as many places, of all
        ranks' tokens.
        """
        part = 1 - self.expert_share * (ranks - 1) / ranks
        parts = {
            name: round(getattr(memory, name) * part)
            for name in ("weights", "optimizer", "update", "renewed", "trained")
        }
        gradients = memory.backward - memory.activations
        return replace(memory, **parts, backward=memory.activations + round(gradients * part))

    def traffic(
        self,
        gradient_bytes: int,
        weight_bytes: int,
        *,
        scatters: bool,
        packed: Traffic | None = None,
    ) -> Traffic:
        exchanged = (2 * self.mixtures + self.again) * self.hidden_bytes
        rest = round(gradient_bytes * (1 - self.expert_share))
        if scatters:
            return Traffic(all_reduced=rest, gathered=exchanged, scattered=exchanged)
        return Traffic(all_reduced=rest + exchanged, gathered=exchanged)


class DividedOptimizerCosts:
    """Costs of a sharded optimizer: each rank has one of ``ranks`` parts of its state and of the
    updated arrays.
    """

    def memory(self, memory: Memory, ranks: int) -> Memory:
        update = memory.update - memory.renewed * (ranks - 1) // ranks
        return replace(memory, optimizer=memory.optimizer // ranks, update=update)

    def traffic(
        self,
        gradient_bytes: int,
        weight_bytes: int,
        *,
        scatters: bool,
        packed: Traffic | None = None,
    ) -> Traffic:
        if packed is not None:  # every rank adds up all of them
            return replace(packed, gathered=packed.gathered + weight_bytes)
        if scatters:
            return Traffic(gathered=weight_bytes, scattered=gradient_bytes)
        return Traffic(all_reduced=gradient_bytes, gathered=weight_bytes)


@dataclass(frozen=True)
class LocalCosts:
    """Costs of rounds: every rank also has the weights of the round's start, and they are exchanged
    once per round.
    """

    rounds: Rounds = field(default_factory=Rounds)

    def memory(self, memory: Memory, ranks: int) -> Memory:
        # What the outer optimizer keeps is in float32, as long as there is no half precision here.
        kept = memory.trained * (2 if self.rounds.momentum else 1)
        if self.rounds.delay:  # what has been sent of a fragment, and what has come
            kept += 2 * memory.trained // self.rounds.fragments
        alone = ranks == 1 and self.rounds.is_mean
        return memory if alone else replace(memory, optimizer=memory.optimizer + kept)

    def traffic(
        self,
        gradient_bytes: int,
        weight_bytes: int,
        *,
        scatters: bool,
        packed: Traffic | None = None,
    ) -> Traffic:
        every = self.rounds.every
        if packed is not None:  # changes of weights are packed as gradients are
            return Traffic(
                all_reduced=packed.all_reduced // every, gathered=packed.gathered // every
            )
        return Traffic(all_reduced=weight_bytes // every)


class DelayedCosts(DataCosts):
    """Data parallelism with three further copies: sums on their way, a rank's part of them,
    expected weights.
    """

    def memory(self, memory: Memory, ranks: int) -> Memory:
        return replace(memory, optimizer=memory.optimizer + 3 * memory.trained)


@dataclass(frozen=True)
class PipelineCosts:
    """Costs of a pipeline: each rank has some of the blocks and sends hidden states; no gradient of
    weights is sent.

    Attributes:
        micro_batches: number of micro-batches of a step.
        hidden_bytes: bytes that a stage sends on for each of them; the gradient that comes back has
            the same size.
    """

    micro_batches: int = 1
    hidden_bytes: int = 0

    def memory(self, memory: Memory, ranks: int) -> Memory:
        """With an equal part of the blocks; :mod:`allhands.parallel.splitting` has what unequal
        ones take.
        """
        return memory_of_stages(memory, ranks)

    def traffic(
        self,
        gradient_bytes: int,
        weight_bytes: int,
        *,
        scatters: bool,
        packed: Traffic | None = None,
    ) -> Traffic:
        return Traffic(handed_on=self.micro_batches * self.hidden_bytes)

    def bubble(self, ranks: int) -> float:
        """Return the part of a step in which a rank waits, if stages take equally long."""
        return (ranks - 1) / (self.micro_batches + ranks - 1)

    def step_s(self, stage_s: Sequence[float], message_s: float) -> float:
        """Seconds of a step without the update.

        Args:
            stage_s: of both passes of a micro-batch, for each stage.
            message_s: of a message between neighbours.
        """
        # The first micro-batch passes through all stages and back; then one is done whenever the
        # slowest stage, or the link, is done with one.
        there_and_back = sum(stage_s) + 2 * (len(stage_s) - 1) * message_s
        return there_and_back + (self.micro_batches - 1) * max(*stage_s, message_s)
