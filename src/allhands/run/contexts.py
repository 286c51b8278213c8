"""Ranks that compute the same rows together (context parallelism), and checks for them."""

from __future__ import annotations

from dataclasses import replace

import mlx.nn as nn

from allhands.distributed.backend import Communicator, SingleProcess
from allhands.distributed.groups import along
from allhands.distributed.handout import gather_json
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError
from allhands.model.balance import has_balance
from allhands.model.context import check_rows
from allhands.runtime.sizing import Sizing


def context_of(communicator: Communicator, mesh: Mesh) -> Communicator:
    """Return the group of ranks that divide the token positions of this rank's rows.

    All ranks call this together.

    Raises:
        ConfigError: the back-end cannot form groups of some ranks.
    """
    # Groups are not alike: each has rows of its own, of other lengths and at other times.
    return (
        SingleProcess() if mesh.context == 1 else along(communicator, mesh, "context", alike=False)
    )


def check_context(model: nn.Module, mesh: Mesh) -> None:
    """Refuse a model whose rows cannot be divided, if the mesh divides rows.

    Raises:
        ModelError: see :func:`check_rows`.
        ConfigError: the routers' balance loss needs all tokens of a row.
    """
    if mesh.context == 1:
        return
    check_rows(model)
    if has_balance(model):
        raise ConfigError(
            f"--router-aux-loss needs all tokens of a row, and with --cp {mesh.context} a rank has only some",
            code="options-conflict",
            where=f"--cp {mesh.context}",
            hint="add --router-aux-loss 0, or leave --cp out",
        )


def same_rows(communicator: Communicator, mesh: Mesh) -> Communicator:
    """Return the group of ranks that compute the same rows as this one.

    These ranks have other blocks (pipeline), other parts of matrices (tensor) or other token
    positions (context) of the rows. All ranks call this together.

    Raises:
        ConfigError: the back-end cannot form groups of some ranks.
    """
    return along(communicator, mesh, "pipe", "tensor", "context", alike=False)


def agreed(sizing: Sizing, group: Communicator) -> Sizing:
    """Return the sizing with the smallest micro-batches of all ranks of ``group``.

    With it all of them cut their rows alike, though memory and processors may differ. All ranks of
    the group call this together.
    """
    if group.size == 1:
        return sizing
    told = gather_json(
        group, [sizing.max_tokens, sizing.overhead_tokens, sizing.few_shapes, sizing.ladder]
    )
    most, overhead, few, ladder = min(told)
    return replace(
        sizing, max_tokens=most, overhead_tokens=overhead, few_shapes=few, ladder=tuple(ladder)
    )
