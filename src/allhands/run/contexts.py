"""The ranks that compute the same rows together, and what they have to agree on."""

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
    """Return the ranks that have this one's rows; called on all ranks together.

    Raises:
        ConfigError: the back-end has no groups of some ranks.
    """
    # Groups have rows of their own, of other lengths and at other times.
    return (
        SingleProcess() if mesh.context == 1 else along(communicator, mesh, "context", alike=False)
    )


def check_context(model: nn.Module, mesh: Mesh) -> None:
    """Refuse a model whose rows cannot be divided, where they are to be.

    Raises:
        ModelError: see :func:`check_rows`.
        ConfigError: its routers learn from all tokens of a row.
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
    """Return the ranks that compute the same rows as this one; called on all ranks together.

    They have other blocks, parts of matrices, or token positions.

    Raises:
        ConfigError: the back-end has no groups of some ranks.
    """
    return along(communicator, mesh, "pipe", "tensor", "context", alike=False)


def agreed(sizing: Sizing, group: Communicator) -> Sizing:
    """Return the sizing by which all ranks of ``group`` cut their rows alike; called on all of them
    together.

    Memory and processors may differ: micro-batches are as small as the least of them needs.
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
