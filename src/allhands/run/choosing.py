"""Choice of the strategy for ``--strategy auto`` by the ranks' memory, before weights are read.

If every rank can hold the whole training, with micro-batches as small as its rows allow, nothing is
decided here. Otherwise all ranks agree on a strategy that fits each of them: a divided optimizer if
it fits, else fully sharded or a pipeline, whichever takes less time by the measured link and
speeds. Every strategy gives the result of one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from allhands.config.combinations import refuse_combinations
from allhands.config.pretrain_schema import model_name
from allhands.config.schema import TrainConfig
from allhands.distributed.backend import Communicator, finish_exchanges
from allhands.distributed.bench import BenchPlan, time_all_sum, time_products
from allhands.distributed.capabilities import can
from allhands.distributed.handout import gather_json, hand_out_json
from allhands.distributed.mesh import Mesh
from allhands.errors import ModelError
from allhands.io.formatting import format_bytes
from allhands.kernels import native
from allhands.model.load import LoadedModel
from allhands.model.quantized import Form, is_quantized
from allhands.model.stages import CAN_BE_CUT, kind_of
from allhands.model.weight_files import all_bytes
from allhands.parallel.costs import DividedOptimizerCosts, Memory, PipelineCosts, ShardedCosts, Work
from allhands.parallel.registry import STRATEGIES, TrainingNeeds
from allhands.run.divided_costs import Divided, sharded_costs
from allhands.run.dividing import DividedModel, PipedSplit, split_that_fits, weights_of
from allhands.run.expecting import Device, has_masters
from allhands.run.facts import RankFacts
from allhands.run.model_sizes import flops_per_token
from allhands.run.piping import piped, shares_by_memory
from allhands.run.stage_costs import ROOM_OF_PRODUCTS, Model
from allhands.run.training_memory import blocks_of, of_process, on_cpu, on_gpu
from allhands.runtime.accelerator import Accelerator

_MOST_RANKS = 1024
_MEASURED_S = 0.1
_MEASURED_BYTES = (1 << 20, 8 << 20)
_STATES = 2  # arrays that most optimizers keep for each weight


def is_open(config: TrainConfig, mesh: Mesh) -> bool:
    """Return whether memory may decide by which strategy ranks divide the work.

    Args:
        mesh: axes that the options ask for; with an axis besides data, the person has decided.
    """
    whole = math.prod((mesh.shard, mesh.pipe, mesh.tensor, mesh.expert, mesh.context)) == 1
    free = config.strategy == "auto" and config.sync_every == 1 and not config.sync_delay
    return config.train and free and whole and mesh.size > 1


def reads_later(config: TrainConfig, path: Path, accelerator: Accelerator, mesh: Mesh) -> bool:
    """Return whether a model is to be read only after the ranks have agreed on a strategy.

    A GPU reads weights that fit at once, with several threads; they may be divided afterwards.
    """
    roomy = accelerator.kind != "cpu" and Device(accelerator, mesh, 0).holds(all_bytes(path))
    return is_open(config, mesh) and not roomy


def may_choose(config: TrainConfig, mesh: Mesh, loaded: LoadedModel) -> bool:
    """Return :func:`is_open` for an opened model; False if the model has no list of layers."""
    return hasattr(loaded.model, "layers") and is_open(config, mesh)


def chosen_by_memory(
    facts: RankFacts,
    mesh: Mesh,
    accelerator: Accelerator,
    communicator: Communicator,
    *,
    hooked: bool,
) -> tuple[RankFacts, list[str]]:
    """Return the facts with the strategy of :func:`strategy_by_memory`, and the reason as a note.

    The facts are unchanged if memory may not decide. All ranks call this together.

    Args:
        hooked: whether a callback looks at whole gradients.

    Raises:
        ModelError: see :func:`strategy_by_memory`.
    """
    if not may_choose(facts.config, mesh, facts.loaded):
        return facts, []
    assert facts.data.train is not None
    divided = DividedModel(facts.loaded.model, facts.loaded.config, facts.data.train.work)
    present = 0
    if accelerator.kind == "cpu":
        present = (
            psutil.Process().memory_info().rss - mx.get_active_memory() - mx.get_cache_memory()
        )
    choosing = Choosing(facts.config, divided, mesh, accelerator, present, hooked)
    config, told = strategy_by_memory(choosing, communicator)
    return replace(facts, config=config), told


@dataclass(frozen=True)
class Choosing:
    """A training whose strategy is to be found.

    Attributes:
        divided: model, its configuration and the rows of its data.
        present_bytes: memory of the process besides arrays.
        hooked: whether a callback looks at whole gradients.
    """

    config: TrainConfig
    divided: DividedModel
    mesh: Mesh
    accelerator: Accelerator
    present_bytes: int
    hooked: bool = False


def strategy_by_memory(
    choosing: Choosing, communicator: Communicator
) -> tuple[TrainConfig, list[str]]:
    """Return the configuration with the strategy that memory asks for, and the reason as a note.

    All ranks call this together.

    Raises:
        ModelError: no strategy fits the ranks' memory. On GPUs, where needs are only estimated,
            this is raised only if a rank cannot hold its weights alone.
    """
    mesh, rank = choosing.mesh, _Rank(choosing)
    room = Device(choosing.accelerator, mesh, 0).room
    facts = {"needs": rank.needs(mesh.size), "weights": rank.weights(mesh.size)}
    own: dict[str, Any] = {"room": room, "present": rank.present, **facts}
    told: list[dict[str, Any]] = gather_json(communicator, own)
    if len(told) < mesh.size:  # a rank on trial, alone: it stands for all
        told = [own] * mesh.size
    told = rank.by_memory(told)
    able = [name for name in own["needs"] if all(name in each["needs"] for each in told)]
    fits = [name for name in able if all(_holds(each, name) for each in told)]
    if "data" in fits:
        return choosing.config, []
    stages = rank.stages(told)
    names = [
        name for name, here in (("fsdp", "fsdp" in fits), ("pipeline", stages is not None)) if here
    ]
    if "zero1" in fits:
        names = ["zero1"]
    elif len(names) > 1 and communicator.size == mesh.size:
        names = [hand_out_json(communicator, _quicker(rank, communicator, stages))]
    if not names:
        return _least(rank, told, able)
    why = f"{STRATEGIES[names[0]].title} (--strategy {names[0]}): for a whole model {_short_of(told, 'data')}"
    return choosing.config.model_copy(update={"strategy": names[0]}), [why]


def _least(
    rank: _Rank, told: Sequence[Mapping[str, Any]], able: Sequence[str]
) -> tuple[TrainConfig, list[str]]:
    """Return the configuration with the strategy that needs least memory, and a warning.

    Called when no strategy fits by its estimated needs.

    Raises:
        ModelError: the strategy certainly does not fit.
    """
    name = min(able, key=lambda name: max(each["needs"][name] for each in told))
    if rank.is_sure or any(each["room"] and each["weights"][name] > each["room"] for each in told):
        raise _nothing_fits(rank, told)
    doubt = f"{STRATEGIES[name].title} (--strategy {name}): memory may not suffice, {_short_of(told, name)}"
    return rank.choosing.config.model_copy(update={"strategy": name}), [doubt]


def _holds(told: Mapping[str, Any], name: str) -> bool:
    return not told["room"] or told["needs"][name] <= told["room"]


def _short_of(told: Sequence[Mapping[str, Any]], name: str) -> str:
    """Say what a strategy would need on the rank that lacks memory for it, and what the rank has.

    Of several such ranks, the one with the least memory is named.
    """
    short = [place for place, each in enumerate(told) if not _holds(each, name)]
    least = min(short, key=lambda place: told[place]["room"])
    needed, room = format_bytes(told[least]["needs"][name]), format_bytes(told[least]["room"])
    others = f" ({len(short)} of {len(told)} ranks have too little)" if len(short) > 1 else ""
    return f"rank {least} would need {needed} and may have {room}{others}"


class _Rank:
    """This rank's needs under each strategy, computed from the model's files alone.

    Attributes:
        present: memory of the rank's process besides arrays, in bytes.
        blocks: widths of the model; ``None`` if its activations are not known.
        work: a micro-batch of the longest row, and this rank's share of a batch.
    """

    def __init__(self, choosing: Choosing) -> None:
        self.choosing = choosing
        config, accelerator, divided = choosing.config, choosing.accelerator, choosing.divided
        self._on_cpu = accelerator.kind == "cpu"
        self.present = choosing.present_bytes
        form: Form = "packed" if is_quantized(divided.model) else "dense"
        self._model = weights_of(divided, form, accelerator)
        # Activations are known for native operations and for GPUs.
        known = not self._on_cpu or (
            accelerator.runs_natively(config.compile) and native.available()
        )
        self.blocks = blocks_of(divided.config) if known else None
        parts = [*self._model.blocks, self._model.embedding, self._model.head]
        table = self._model.embedding.held_bytes
        self._tied = bool(table) and _is_tied(self._model)
        own = [*self._model.blocks, self._model.head] if self._tied else parts
        self._weights = sum(each.held_bytes for each in own)
        self._trained = sum(each.trained_bytes for each in own)
        self.work = self._work()

    def _work(self) -> Work:
        choosing = self.choosing
        config, lengths = choosing.config, choosing.divided.work
        assert lengths is not None
        longest, rows = int(lengths.max()), math.ceil(config.batch_size / choosing.mesh.size)
        trained = [place for place, block in enumerate(self._model.blocks) if block.trained_bytes]
        first = 0 if self._model.embedding.trained_bytes else min(trained, default=0)
        return Work(
            method=config.fine_tune_type,
            tokens=longest,
            row_tokens=longest,
            trained_layers=len(self._model.blocks) - first,
            weights_bytes=self._weights,
            trained_bytes=self._trained,
            optimizer=config.optimizer,
            recomputed=config.grad_checkpoint,
            accumulated=rows > 1 or config.grad_accumulation_steps > 1,
            masters=has_masters(config, choosing.divided.model, choosing.accelerator),
            batch_tokens=longest * rows,
        )

    def needs(self, ranks: int) -> dict[str, int]:
        """Return the bytes that one of ``ranks`` ranks needs, by each strategy that is possible."""
        whole = self._whole()
        found = {"data": self._of_process(whole)}
        if self._can("zero1"):
            found["zero1"] = self._of_process(DividedOptimizerCosts().memory(whole, ranks))
        if self._can("fsdp"):
            found["fsdp"] = self.sharded(1 / ranks)
        return found

    @property
    def is_sure(self) -> bool:
        """True if the estimates were compared with the memory of real processes: on a CPU."""
        return self._on_cpu

    def weights(self, ranks: int) -> dict[str, int]:
        """Return the bytes of the weights alone on one of ``ranks`` ranks, by strategy."""
        whole = dict.fromkeys(("data", "zero1"), self._weights)
        return {**whole, "fsdp": self._weights // ranks}

    def sharded(self, share: float) -> int:
        """Return the bytes that a fully sharded rank with the part ``share`` of arrays needs."""
        return self._of_process(self.shards(self.work).memory_of(self._whole(), share))

    def by_memory(self, told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the ranks' facts; the needs of fully sharded ranks now follow their memory.

        Fully sharded ranks have parts in proportion to their memory, not equal ones.

        Args:
            told: room, present bytes, needs and weights of each rank.
        """
        rooms = [each["room"] for each in told]
        parts = shares_by_memory(rooms) if min(rooms) and self._can("fsdp") else ()
        if not parts:
            return [dict(each) for each in told]
        besides = [each["present"] - self.present for each in told]
        needs = [
            self.sharded(part / sum(parts)) + more
            for part, more in zip(parts, besides, strict=True)
        ]
        return [
            {**each, "needs": {**each["needs"], "fsdp": need}}
            for each, need in zip(told, needs, strict=True)
        ]

    @property
    def largest(self) -> Work:
        """The work in micro-batches of the size that is used when memory is not short."""
        sizing = self.choosing.accelerator.sizing(
            self.choosing.config.micro_batch_tokens, compiled=False
        )
        return replace(
            self.work, tokens=max(self.work.tokens, min(self.work.batch_tokens, sizing.max_tokens))
        )

    def shards(self, work: Work) -> ShardedCosts:
        """Return the costs of fully sharded ranks."""
        if self.blocks is None:
            return ShardedCosts()
        of = on_cpu if self._on_cpu else on_gpu
        return sharded_costs(Divided(self._model, self.blocks, work, of, self._tied, self._on_cpu))

    def _whole(self) -> Memory:
        """Return the arrays of a rank with the whole training; without activations if these are not
        known.
        """
        # The estimates for Macs have not been compared with real processes.
        if self.blocks is not None and self.choosing.accelerator.kind != "metal":
            return (on_cpu if self._on_cpu else on_gpu)(self.blocks, self.work)
        gradients = self._trained
        return Memory(
            self._weights, _STATES * gradients, gradients, 0, gradients, trained=gradients
        )

    def _of_process(self, memory: Memory) -> int:
        return of_process(memory, self.present, 0) if self._on_cpu else memory.arrays

    def _can(self, name: str) -> bool:
        """Return whether this training can use a strategy."""
        choosing, config = self.choosing, self.choosing.config
        by_blocks = name in ("fsdp", "pipeline")
        if by_blocks and kind_of(choosing.divided.model) not in CAN_BE_CUT:
            return False
        native_way = choosing.accelerator.runs_natively(config.compile)
        if STRATEGIES[name].unfit(
            TrainingNeeds(config.optimizer, native_way, choosing.hooked, self.work.masters)
        ):
            return False
        try:
            refuse_combinations(config.model_copy(update={"strategy": name}))
        except ValueError:
            return False
        return True

    def stages(self, told: Sequence[Mapping[str, Any]]) -> PipedSplit | None:
        """Return the stages of a pipeline of all ranks that fit their memory; ``None`` if no
        division fits.
        """
        if not self._can("pipeline"):
            return None
        config = self.choosing.config.model_copy(update={"strategy": "pipeline"})
        mesh = piped(config, self.choosing.mesh)
        taken = [each["present"] + ROOM_OF_PRODUCTS * self._on_cpu for each in told]
        rooms = [each["room"] for each in told]
        return split_that_fits(
            config, self.choosing.divided, mesh, self.choosing.accelerator, rooms, taken
        )


def _is_tied(model: Model) -> bool:
    return (
        model.head.numbers == model.embedding.numbers
        and model.head.held_bytes >= model.embedding.held_bytes
    )


def _quicker(rank: _Rank, communicator: Communicator, stages: PipedSplit | None) -> str:
    """Return "fsdp" or "pipeline", whichever takes less time; all ranks call this together."""
    blocks, work, config = rank.blocks, rank.work, rank.choosing.config
    rates = time_products(communicator, _MEASURED_S)
    sums = time_all_sum(communicator, BenchPlan(_MEASURED_BYTES, _MEASURED_S, 5.0))
    finish_exchanges(communicator)
    if blocks is None or stages is None:
        return "fsdp"
    ranks, trained = communicator.size, work.trained_bytes
    latency = sums[0]["median_s"] / (2 * (ranks - 1))
    sent_per_s = 2 * (ranks - 1) / ranks * sums[-1]["num_bytes"] / sums[-1]["median_s"]
    lengths: Any = rank.choosing.divided.work
    tokens = float(lengths.mean()) * config.batch_size
    per_token = partial(flops_per_token, blocks, config.fine_tune_type, work.trained_layers)
    again_s, once_s = (
        tokens * per_token(recomputed=each) / min(rates) for each in (True, work.recomputed)
    )
    shards = rank.shards(rank.largest)
    sent = shards.traffic(trained, trained, scatters=can(communicator.backend, "sum_scatter")).sent(
        ranks
    )
    # A CPU computes the forward pass of fetched blocks again; a GPU does so for blocks with
    # experts.
    each_s = again_s if stages.again or blocks.experts else once_s
    sharded_s = max(each_s / ranks, sent / sent_per_s)
    whole = sum(stages.seconds)
    # A CPU also computes the forward passes of all stages but the last again.
    parts_s = [
        (again_s if stages.again else once_s) * part / whole / stages.micro_batches
        for part in stages.seconds
    ]
    message_s = latency + stages.hidden_bytes / sent_per_s
    piped_s = PipelineCosts(stages.micro_batches, stages.hidden_bytes).step_s(parts_s, message_s)
    return "pipeline" if piped_s < sharded_s else "fsdp"


def _nothing_fits(rank: _Rank, told: Sequence[Mapping[str, Any]]) -> ModelError:
    """Return the error for a training that no strategy fits, with the number of ranks that would
    hold it.
    """
    config = rank.choosing.config
    least = min((name for name in told[0]["needs"]), key=lambda name: told[0]["needs"][name])
    hints = ["a computer with more memory, a quantised model, or shorter rows (--max-seq-length)"]
    if not config.grad_checkpoint:
        hints.append("--grad-checkpoint takes less memory and more time")
    if len(told) > 1:
        hints.append("`allhands plan` shows the memory with --cp or --ep beside --strategy fsdp")
    if "fsdp" in told[0]["needs"]:
        # On a CPU more ranks of the same computer get less memory each: more computers are needed.
        shared = rank.choosing.mesh.local_size if rank.choosing.accelerator.kind != "cuda" else 1
        apart, one = shared > 1, min(each["room"] for each in told)
        room = one * shared
        counts = range(2 if apart else len(told) + 1, _MOST_RANKS + 1)
        enough = next((count for count in counts if rank.sharded(1 / count) <= room), None)
        if enough is not None:
            who = "computers with this memory and one rank each" if apart else "such ranks"
            hints.insert(0, f"{enough} {who} would hold it (--strategy fsdp)")
    return ModelError(
        f"no strategy fits this training into the ranks' memory: with --strategy {least} {_short_of(told, least)}",
        code="memory-too-small",
        where=model_name(config),
        hint="; or ".join(hints),
    )
