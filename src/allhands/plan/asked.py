"""Ways of dividing a training that options ask for, and those by experts: refused as training does,
then planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from allhands.config.combinations import is_sharded
from allhands.config.schema import TrainConfig
from allhands.distributed.mesh import Mesh
from allhands.model.divisible import split_given
from allhands.model.skeleton import skeleton
from allhands.model.stages import check_cut
from allhands.parallel.experts import check_experts
from allhands.parallel.matrices import check_matrices
from allhands.parallel.registry import TrainingNeeds
from allhands.plan.computers import Computer
from allhands.plan.divided import PlannedRanks
from allhands.plan.job import Job
from allhands.plan.links import ExchangeTimes
from allhands.plan.meshes import Means, MeshWay, asked_mesh
from allhands.plan.speed import predict
from allhands.plan.staged import StagedWay
from allhands.plan.strategies import Way
from allhands.run.contexts import check_context
from allhands.run.piping import piped, require_back_end
from allhands.run.strategy_choice import require_fit


def asks(config: TrainConfig) -> bool:
    """Return whether options ask for a way of dividing a model or its rows."""
    return (
        config.strategy == "pipeline"
        or is_sharded(config)
        or max(config.tp, config.cp, config.ep) > 1
    )


def require_asked(config: TrainConfig, values: Mapping[str, Any], ranks: int, backend: str) -> None:
    """Refuse a division that so many ranks cannot train with, for the reasons for which training
    does.

    Args:
        values: the model's config.json.
        backend: of the ranks; empty: not known.

    Raises:
        ConfigError: ranks, back-end, optimizer or sizes do not allow it.
        ModelError: the architecture does not.
    """
    mesh = piped(config, Mesh(0, ranks))
    require_fit(config, TrainingNeeds(config.optimizer, cpu_native=False))
    if backend:
        require_back_end(mesh, backend)
    model: Any = skeleton(values)
    if mesh.pipe > 1 or mesh.shard > 1:
        check_cut(model)
    if mesh.pipe > 1:
        split_given(config, len(model.layers), mesh.pipe)
    if mesh.tensor > 1:
        check_matrices(model, mesh.tensor, whole_experts=config.ep > 1)
    if mesh.expert > 1:
        check_experts(model, mesh.expert)
    check_context(model, mesh)


def asked_ways(
    job: Job, team: Sequence[Computer], link: ExchangeTimes, held: PlannedRanks
) -> Iterator[Way]:
    """Yield the way that the options ask for, if these computers can have it, and that by experts.

    None is judged by memory yet.
    """
    ranks = len(team)
    if job.blocks is None or job.work is None or ranks < 2 or job.rounds is not None:
        return
    for config in _wanted(job, ranks):
        mesh = asked_mesh(config, ranks)
        if mesh is not None and mesh.pipe <= job.blocks.layers:
            kind = StagedWay if mesh.pipe > 1 else MeshWay
            yield kind(job, team, link, _means(job, team, link, held), mesh, config).way()


def _wanted(job: Job, ranks: int) -> Iterator[TrainConfig]:
    """The options of the training, where they ask for a way, and those by which so many ranks
    divide experts.
    """
    if job.asked is not None:
        yield job.asked
    if (
        job.dividing is None
        or job.work is None
        or (job.asked is not None and job.asked.ep == ranks)
    ):
        return
    if "expert" in job.dividing.among(ranks, job.work.row_tokens):
        yield TrainConfig.model_validate({"ep": ranks})


def _means(job: Job, team: Sequence[Computer], link: ExchangeTimes, held: PlannedRanks) -> Means:
    speeds = [each.speed for each in team]
    found, step, ranks = predict(job.step, link, speeds, job.room), job.step, len(team)
    turns = max(1.0, ranks / job.room) if job.room else 1.0
    return Means(
        needed=held.needed,
        bucket_bytes=held.bucket_bytes,
        serial_s=found.step_s - found.compute_s - found.exposed_s,
        passes_s=turns * step.tokens * step.token_s / (ranks * min(speeds)),
    )
