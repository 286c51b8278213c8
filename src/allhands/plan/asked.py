"""Requested ways of dividing a training: checked as in training, then planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from allhands.config.combinations import is_sharded
from allhands.config.schema import TrainConfig
from allhands.distributed.mesh import Mesh
from allhands.model.divisible import require_divisible, split_given
from allhands.model.skeleton import skeleton
from allhands.model.stages import check_cut
from allhands.parallel.costs import Work
from allhands.parallel.experts import check_experts
from allhands.parallel.matrices import check_matrices
from allhands.parallel.registry import TrainingNeeds
from allhands.plan.computers import Computer
from allhands.plan.dividing import options_for
from allhands.plan.job import Job
from allhands.plan.links import ExchangeTimes
from allhands.plan.meshes import MeshWay, PlannedRanks, asked_mesh, flags_of
from allhands.plan.pipelines import FEWER
from allhands.plan.staged import StagedWay
from allhands.plan.strategies import Way
from allhands.run.contexts import check_context
from allhands.run.piping import piped, require_back_end
from allhands.run.strategy_choice import require_fit


def asks(config: TrainConfig) -> bool:
    """Return whether options ask for a way of dividing a model or its rows by token positions."""
    return (
        config.strategy == "pipeline"
        or is_sharded(config)
        or max(config.tp, config.cp, config.ep) > 1
    )


def require_asked(config: TrainConfig, values: Mapping[str, Any], ranks: int, backend: str) -> None:
    """Refuse a division that a training with ``ranks`` ranks would refuse.

    Args:
        values: the model's config.json.
        backend: the communication back-end; empty: not known.

    Raises:
        ConfigError: the ranks, back-end, optimizer or sizes do not allow the division.
        ModelError: the architecture does not allow the division.
    """
    require_divisible(config, ranks, values)
    mesh = piped(config, Mesh(0, ranks))
    require_fit(config, TrainingNeeds(config.optimizer, cpu_native=False))
    if backend:
        require_back_end(mesh, backend)
    model: Any = skeleton(values)
    if mesh.pipe > 1 or mesh.parts > 1:
        check_cut(model)
    if mesh.pipe > 1:
        split_given(config, len(model.layers), mesh.pipe)
    if mesh.tensor > 1:
        check_matrices(model, mesh.tensor, whole_experts=config.ep > 1)
    if mesh.expert > 1:
        check_experts(model, mesh.expert)
    check_context(model, mesh)


def divided_ways(
    job: Job,
    team: Sequence[Computer],
    link: ExchangeTimes,
    held: PlannedRanks,
    *,
    together: bool = False,
) -> Iterator[Way]:
    """Yield the requested way of dividing, and all ways that the model, the other options and the
    number of computers allow.

    Their memory is not checked yet.

    Args:
        together: True: only the ways in which ranks divide arrays, and also experts or rows.
    """
    ranks = len(team)
    if job.blocks is None or job.work is None or ranks < 2 or job.rounds is not None:
        return
    told = set[str]()
    for config in _wanted(job, job.work, ranks, together=together):
        mesh, flags = asked_mesh(config, ranks), flags_of(config)
        if mesh is not None and mesh.pipe <= job.blocks.layers and flags not in told:
            told.add(flags)
            kind = StagedWay if mesh.pipe > 1 else MeshWay
            yield kind(job, team, link, held, mesh, config).way()


def _wanted(job: Job, work: Work, ranks: int, *, together: bool) -> Iterator[TrainConfig]:
    """Yield the requested options, and the options for each possible way of dividing arrays,
    matrices, experts or rows; ``together``: as in :func:`divided_ways`.
    """
    if job.asked is not None and not together:
        yield job.asked
    plain = TrainConfig.model_validate({})
    names = job.dividing.among(ranks, work.row_tokens) if job.dividing else ()
    for name in names:
        options = options_for(name, ranks)
        if not together:
            yield plain.model_copy(update=options)
        elif "fsdp" in names and name in ("expert", "context"):
            yield plain.model_copy(update={**options, **options_for("fsdp", ranks)})


def best_divided(ways: Sequence[Way]) -> Way | None:
    """Return the fastest way that fits; one with more computers only if it takes less than
    :data:`FEWER` of the time. ``None`` if none fits.
    """
    able = sorted(
        (way for way in ways if way.fits is not False), key=lambda way: (way.ranks, way.training_s)
    )
    best = next(iter(able), None)
    for way in able:
        if best is not None and way.ranks > best.ranks:
            best = way if way.training_s < FEWER * best.training_s else best
    return best
