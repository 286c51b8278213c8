"""This rank's part of a divided model: its mesh and groups, its part of arrays, and its part of a
checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from numpy.typing import NDArray

from allhands.checkpoints.arrays import (
    CODES,
    DTYPES,
    ReadArray,
    SharedArray,
    StoredArrayReader,
    require_same,
)
from allhands.checkpoints.resuming import Restored, restore_weights
from allhands.config.combinations import is_sharded, require_stages, unfit_stages
from allhands.config.schema import TrainConfig
from allhands.distributed.backend import Communicator
from allhands.distributed.capabilities import can, require_groups, require_neighbours
from allhands.distributed.groups import along
from allhands.distributed.handout import gather_json
from allhands.distributed.mesh import Axis, Mesh
from allhands.errors import ConfigError
from allhands.io.formatting import counted
from allhands.io.regions import Flat, Region, Shape
from allhands.model.adapters import trained_weights
from allhands.model.stages import Stage
from allhands.objectives.base import Objective
from allhands.parallel.expert import ExpertSums
from allhands.parallel.experts import Experts, divide_experts
from allhands.parallel.fsdp import FetchedSums, regions_within
from allhands.parallel.matrices import Matrices, divide
from allhands.parallel.parts import OwnedParts
from allhands.parallel.pipeline import PipedSums
from allhands.parallel.piping import Piping
from allhands.parallel.sharding import BetweenPasses, Layout, Sharding, shard
from allhands.run.stage_costs import small_enough
from allhands.runtime.accelerator import Accelerator
from allhands.train.evaluation import SumsTogether

_UNLIKE = 1.1  # ratio of the most to the least memory of a rank, from which on parts follow memory


def _never(mesh: Mesh) -> bool:
    return False


def _of_whole_arrays(mesh: Mesh) -> bool:
    # Ranks with other blocks or other parts of matrices fetch other arrays. Ranks with parts of
    # rows have exchanges of their own between the exchanges of arrays.
    return mesh.pipe == mesh.tensor == mesh.context == 1


def _of_whole_rows(mesh: Mesh) -> bool:
    # Ranks with parts of rows have exchanges of their own in between.
    return mesh.context == 1


# Groups in which ranks exchange, by name: the axes along which the ranks of a group differ; and a
# function that returns whether all groups exchange the same shapes at the same time. If they do, an
# exchange of the whole world can replace those of the groups.
_Groups = Mapping[str, tuple[tuple[Axis, ...], Callable[[Mesh], bool]]]
_STAGES: _Groups = {
    "pipe": (("pipe",), _never),
    "data": (("data", "context"), _never),
}
# Ranks with other rows exchange other shapes at the same time.
_MATRICES: _Groups = {
    "tensor": (("tensor",), _never),
    "data": (("data", "context"), lambda mesh: mesh.pipe == 1),
}
# Ranks agree on the shapes, and on the number of passes.
_EXPERTS: _Groups = {
    "expert": (("expert",), _of_whole_rows),
    "data": (("data", "context"), _of_whole_rows),
    "together": (("expert", "context"), _of_whole_rows),
}
_ROWS: _Groups = {
    "context": (("context",), _never),
    "same": (("pipe", "tensor", "context"), _never),
}


def require_back_end(mesh: Mesh, backend: str) -> None:
    """Require a back-end that has the groups in which the ranks of a mesh exchange.

    Raises:
        ConfigError: the back-end lacks them.
    """
    together = mesh.pipe * mesh.tensor * mesh.context
    for divided, groups in (
        (mesh.tensor, _MATRICES),
        (mesh.expert, _EXPERTS),
        (mesh.parts, _arrays(mesh)),
        (mesh.pipe, _STAGES),
        (together, _ROWS),
    ):
        for axes, alike in groups.values() if divided > 1 else ():
            require_groups(backend, mesh, *axes, alike=alike(mesh))
    if mesh.pipe > 1 and not can(backend, "split"):
        require_neighbours(backend, mesh, "pipe")


def _arrays(mesh: Mesh) -> _Groups:
    """Return the groups of ranks that divide arrays."""
    return {"shard": (mesh.storing, _of_whole_arrays), "data": (("data",), _of_whole_arrays)}


def _group(communicator: Communicator, mesh: Mesh, groups: _Groups, name: str) -> Communicator:
    axes, alike = groups[name]
    return along(communicator, mesh, *axes, alike=alike(mesh))


def divides(config: TrainConfig) -> bool:
    """Return True if the ranks divide the model's blocks into stages."""
    return config.strategy == "pipeline"


def has_parts(config: TrainConfig, mesh: Mesh) -> bool:
    """Return True if each rank reads only a part of the model."""
    return divides(config) or mesh.parts > 1 or mesh.tensor > 1 or mesh.expert > 1


def as_left(config: TrainConfig, mesh: Mesh) -> TrainConfig:
    """Return ``config`` changed for fewer ranks than its stages or groups need.

    Without ``--min-ranks``, or with fewer ranks than that, it is unchanged. A pipeline becomes one
    pipeline of all remaining ranks, with a new division of the blocks; a single rank has the whole
    model. Other groups of ranks become as large as divides the number of ranks.
    """
    if config.min_ranks is None or mesh.size < config.min_ranks:
        return config
    if config.strategy != "pipeline":
        return _in_smaller_groups(config, mesh)
    problem = unfit_stages(config, mesh.size)
    if problem is None:
        return config
    changed: dict[str, Any] = {
        "pp": None,
        "pp_split": "auto",
        "tp": 1,
        "cp": 1,
        "ep": 1,
        "dp_shard": None,
    }
    told = f"{problem.message} ({problem.where}): the remaining ranks are one pipeline with a new division of the blocks"
    if mesh.size == 1:
        changed |= {"strategy": "auto", "pp_schedule": "1f1b"}
        told = "one rank is left of the pipeline: it trains the whole model"
    return config.model_copy(update=changed).noted((*config.notes, told))


def _in_smaller_groups(config: TrainConfig, mesh: Mesh) -> TrainConfig:
    """Return ``config`` with group sizes that divide the number of ranks."""
    changed: dict[str, Any] = {}
    ranks = mesh.size
    # The same ranks divide matrices and experts, where both are divided.
    for option in ("tp", "cp", "dp_shard") if config.tp > 1 else ("cp", "ep", "dp_shard"):
        size = getattr(config, option) or 1
        if (left := math.gcd(ranks, size)) != size:
            changed[option] = (None if left == 1 else left) if option == "dp_shard" else left
        ranks //= left
    if "tp" in changed and config.ep > 1:
        changed["ep"] = changed["tp"]
    if not changed:
        return config
    told = ", ".join(
        f"--{option.replace('_', '-')} is {left or 'left out'} now"
        for option, left in changed.items()
    )
    return config.model_copy(update=changed).noted(
        (*config.notes, f"{counted(mesh.size, 'rank')} left: {told}")
    )


def piped(config: TrainConfig, mesh: Mesh) -> Mesh:
    """Return the mesh with the axes that ``config`` asks for: stages, and parts of arrays,
    matrices, experts or rows.

    Raises:
        ConfigError: the ranks do not make up whole pipelines, or whole groups.
    """
    require_stages(config, mesh.size)
    # Ranks that have divided matrices divide experts too, for the same rows.
    sizes: dict[str, int] = {
        "tensor": config.tp,
        "context": config.cp,
        "expert": config.ep if config.tp == 1 else 1,
    }
    together = mesh.size // (config.tp * config.cp)
    if divides(config):
        shards = config.dp_shard or 1
        sizes |= {"pipe": config.pp or together // shards, "shard": shards}
    elif is_sharded(config):
        # Ranks that divide experts divide all other arrays, too; groups of them are copies.
        sizes["shard"] = 1 if sizes["expert"] > 1 else config.dp_shard or together
    storing = list[Axis](["shard"])
    if is_sharded(config):
        storing += [axis for axis in ("expert", "context") if sizes[axis] > 1]
    divided = math.prod(sizes.values())
    if divided == 1:
        return mesh
    # A batch is divided by speeds only if each rank computes whole rows of its own with the whole
    # model.
    weights = mesh.weights if divided in (sizes.get("shard"), sizes["expert"]) else ()
    data = mesh.size // divided
    return replace(mesh, data=data, weights=weights, storing=tuple(storing), **sizes)


def require_pipelines(
    config: TrainConfig, mesh: Mesh, communicator: Communicator, accelerator: Accelerator
) -> None:
    """Refuse a pipeline that is impossible here, before the model is divided.

    Raises:
        ConfigError: the back-end has no groups for pipelines, or the device cannot follow
            ``--pp-schedule zb``.
    """
    if communicator.size > 1:
        require_groups(communicator.backend, mesh, "pipe", alike=False)
    if config.train and config.pp_schedule == "zb" and accelerator.runs_natively(config.compile):
        raise ConfigError(
            "on a CPU one pass computes the gradients of inputs and of weights, so that none of them can wait",
            code="option-unsuited-to-device",
            where="--pp-schedule zb",
            hint="add --compile on, or leave it out",
        )


def piping_of(
    config: TrainConfig, stages: tuple[Stage, ...], communicator: Communicator, mesh: Mesh
) -> Piping:
    """Return this rank's stages with their connections; all ranks call this together.

    Raises:
        ConfigError: the back-end cannot connect the stages.
    """
    if communicator.size > 1 and not can(communicator.backend, "split"):
        require_neighbours(communicator.backend, mesh, "pipe")
    pipe, data = (_group(communicator, mesh, _STAGES, name) for name in ("pipe", "data"))
    # The type that the first stage computes in, not the stored type: a CPU computes in float32.
    own = stages[0].type_of_hidden()
    told = gather_json(pipe, None if own is None else CODES[own])
    dtype = DTYPES[next(code for code in told if code is not None)]
    return Piping(
        tuple(replace(stage, dtype=dtype) for stage in stages), pipe, data, config.pp_schedule
    )


def keeps_fetched(config: TrainConfig) -> bool:
    """Return whether fetched weights stay until a step ends.

    By default they stay in a pipeline, where they would otherwise be fetched very often.
    """
    if config.reshard == "auto":
        return config.strategy == "zero2" or divides(config)
    return config.reshard == "off"


def parts_by_memory(
    communicator: Communicator, mesh: Mesh, room: int
) -> tuple[tuple[float, ...], list[str]]:
    """Return the sizes of the ranks' parts of every array, by their memory, and notes.

    No sizes means equal parts. Ranks at the same place of several groups have the same part. All
    ranks call this together.

    Args:
        room: bytes that this rank may have; 0: not known.
    """
    if mesh.parts == 1 or max(mesh.tensor, mesh.expert) > 1:
        return (), []
    rooms: list[int] = gather_json(communicator, room)
    if len(rooms) < mesh.size or not min(rooms):  # a rank on trial, alone
        return (), []
    places = [mesh.part_of(rank) for rank in range(mesh.size)]
    least = [
        min(room for room, at in zip(rooms, places, strict=True) if at == place)
        for place in range(mesh.parts)
    ]
    shares = shares_by_memory(least)
    told = ", ".join(f"{part / sum(least):.0%}" for part in least)
    return shares, [f"each array is divided by the ranks' memory: {told}"] if shares else []


def shares_by_memory(rooms: Sequence[int]) -> tuple[float, ...]:
    """Return the sizes of the parts of every array for ranks with this memory; empty: equal parts.

    ``rooms``: bytes that each rank may have.
    """
    return tuple(map(float, rooms)) if max(rooms) > _UNLIKE * min(rooms) else ()


def sharded(
    config: TrainConfig,
    model: nn.Module,
    communicator: Communicator,
    mesh: Mesh,
    stages: Sequence[Stage],
    shares: Sequence[float] = (),
    experts: Experts | None = None,
) -> Sharding | None:
    """Leave this rank with its part of every array of ``model``; ``None`` if arrays are not
    divided.

    All ranks call this together.

    Args:
        stages: this rank's stages; empty if it has all blocks.
        shares: sizes of the parts, see :func:`parts_by_memory`.
        experts: the experts that this rank keeps.

    Raises:
        ConfigError: the back-end cannot form groups of some ranks.
        ModelError: the architecture cannot be divided.
    """
    if mesh.parts == 1:
        return None
    groups = _arrays(mesh)
    together, copies = (_group(communicator, mesh, groups, name) for name in ("shard", "data"))
    fetching = BetweenPasses(keeps_fetched(config), twice=config.grad_checkpoint)
    kept = frozenset[int]() if experts is None else experts.modules
    layout = Layout(boxed=mesh.tensor > 1, shares=shares, kept=kept)
    return shard(
        model, together, copies, communicator, fetching=fetching, stages=stages, layout=layout
    )


def experts_divided(
    model: nn.Module, communicator: Communicator | None, mesh: Mesh
) -> Experts | None:
    """Leave this rank with its part of the experts of ``model``; ``None`` if experts are not
    divided.

    All ranks call this together.

    Raises:
        ConfigError: this number of ranks cannot divide the experts.
        ModelError: the architecture has no experts that can be divided.
    """
    if mesh.expert == 1:
        return None
    assert communicator is not None
    expert, data = (_group(communicator, mesh, _EXPERTS, name) for name in ("expert", "data"))
    if mesh.context == 1:
        return divide_experts(model, expert, data)
    return divide_experts(model, expert, data, _group(communicator, mesh, _EXPERTS, "together"))


def divided(
    model: nn.Module, communicator: Communicator | None, mesh: Mesh, *, whole_experts: bool
) -> Matrices | None:
    """Leave this rank with its part of the matrices of ``model``; ``None`` if matrices are not
    divided.

    All ranks call this together.

    Raises:
        ConfigError: the back-end cannot form groups of some ranks, or this number of ranks cannot
            divide the model.
        ModelError: the architecture cannot be divided.
    """
    if mesh.tensor == 1:
        return None
    assert communicator is not None
    together, copies = (_group(communicator, mesh, _MATRICES, name) for name in ("tensor", "data"))
    return divide(model, together, copies, lazy=mesh.shard > 1, whole_experts=whole_experts)


class _Divided(Protocol):
    """Attributes of :class:`allhands.run.preparing.LoadedRun` that tell a rank's part of the
    model.
    """

    @property
    def accelerator(self) -> Accelerator: ...

    @property
    def sharding(self) -> Sharding | None: ...

    @property
    def experts(self) -> Experts | None: ...


def sums_together(
    piping: Piping | None, ready: _Divided, objective: Objective
) -> SumsTogether | None:
    """Return the function for an evaluation's sums if each rank has a part of the model; ``None``
    if each has all of it.
    """
    if piping is not None:
        return PipedSums(piping, objective, ready.sharding)
    if ready.sharding is not None:
        return FetchedSums(ready.sharding, objective, ready.experts)
    if ready.experts is not None:
        return ExpertSums(ready.experts, objective, cpu_native=ready.accelerator.cpu_native)
    return None


def parts_of(
    restored: Restored,
    whole: Mapping[str, tuple[Shape, mx.Dtype]],
    regions: Mapping[str, Region],
    progress: Callable[[], None],
) -> Restored:
    """Return the part of a checkpoint that belongs to this rank's parts of arrays.

    All ranks call this together.

    Args:
        whole: shape and type of every trained array, by name.
        regions: this rank's region of each array that it has a part of.
        progress: called after each array.

    Raises:
        CheckpointError: the checkpoint's arrays are not those of ``whole``.
    """
    require_same(
        restored.weights, ((name, *facts) for name, facts in whole.items()), restored.place
    )

    def kept(stored: dict[str, StoredArrayReader], *, state: bool) -> dict[str, StoredArrayReader]:
        found: dict[str, StoredArrayReader] = {}
        for name, reader in stored.items():
            array = name.rpartition(".")[0] if state else name
            if array not in whole:
                found[name] = reader
                continue
            # All ranks read all arrays in the same order: if rank 0 hands them out, each rank also
            # receives those that it does not need.
            region = regions.get(array, Flat(0, 0))
            numbers = reader.read(region)
            progress()
            if region.size:
                in_range = isinstance(region, Flat) and len(whole[array][0]) > 1
                found[name] = ReadArray(
                    numbers.reshape(-1, 1) if in_range else numbers, reader.dtype
                )
        return found

    weights = kept(restored.weights, state=False)
    return replace(restored, weights=weights, optimizer=kept(restored.optimizer, state=True))


def part_of_division(
    restored: Restored,
    model: nn.Module,
    sharding: Sharding | None,
    matrices: OwnedParts | None,
    progress: Callable[[], None],
) -> Restored:
    """Return :func:`parts_of` of a checkpoint for a rank with divided arrays, matrices or experts.

    Args:
        matrices: this rank's part of matrices or experts.
    """
    here = {name: array.dtype for name, array in trained_weights(model).items()}
    if matrices is None:
        assert sharding is not None
        whole = {
            name: (tuple(array.shape), here[name]) for name, array in trained_weights(model).items()
        }
        return parts_of(restored, whole, _places(sharding.regions), progress)
    stored = {name: DTYPES[each.dtype] for name, each in restored.weights.items()}
    # Arrays that only other ranks have are missing in `here`.
    whole = {
        name: (shape, here.get(name) or stored.get(name, mx.float32))
        for name, shape in matrices.shapes.items()
    }
    places = matrices.places if sharding is None else _places(regions_within(sharding, matrices))
    return parts_of(restored, whole, places, progress)


def _places(regions: Mapping[str, tuple[Shape, Region]]) -> dict[str, Region]:
    return {name: region for name, (_, region) in regions.items()}


def micro_batch_tokens(config: TrainConfig, work: NDArray[Any], mesh: Mesh) -> int | None:
    """Return the most tokens of a micro-batch, as given or, in a pipeline, so that a step has
    several for each stage.

    ``None``: the device decides.
    """
    if config.micro_batch_tokens is not None or not divides(config):
        return config.micro_batch_tokens
    return small_enough(int(work.max()), config.batch_size // mesh.data_size, mesh.pipe)


def kept_of(restored: Restored, own: Collection[str], progress: Callable[[], None]) -> Restored:
    """Return the part of a checkpoint for a rank that trains the arrays ``own``.

    All ranks call this together. If ranks read files by themselves, nothing is read yet. If rank 0
    hands out arrays, all ranks receive all of them in the same order and keep their own.
    """
    foreign = tuple(f"{name}." for name in restored.weights if name not in own)

    def kept(stored: dict[str, StoredArrayReader]) -> dict[str, StoredArrayReader]:
        found: dict[str, StoredArrayReader] = {}
        for name, reader in stored.items():
            mine = not f"{name}.".startswith(foreign or ("\0",))
            if isinstance(reader, SharedArray):
                array = reader.read(None if mine else Flat(0, 0))
                reader = ReadArray(array, reader.dtype)
                progress()
            if mine:
                found[name] = reader
        return found

    return replace(restored, weights=kept(restored.weights), optimizer=kept(restored.optimizer))


def put_back(
    received: Restored | None,
    model: nn.Module,
    sharding: Sharding | None,
    parts: tuple[OwnedParts | None, ...],
    progress: Callable[[], None],
    *,
    in_stages: bool,
) -> Restored | None:
    """Put a checkpoint's weights into the model; return this rank's part of the checkpoint.

    Args:
        received: the checkpoint; ``None``: nothing is done, and ``None`` is returned.
        parts: this rank's part of matrices, and of experts; at most one is not ``None``.
        in_stages: whether this rank has only some blocks.
    """
    if received is None:
        return None
    own, matrices = received, next((each for each in parts if each is not None), None)
    if in_stages:
        trained = trained_weights(model) if matrices is None else matrices.shapes
        own = kept_of(received, trained.keys(), progress)
    if sharding is not None or matrices is not None:
        own = part_of_division(own, model, sharding, matrices, progress)
    restore_weights(model if sharding is None else sharding.parts, own, progress)
    return own
