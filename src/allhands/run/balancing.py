"""The ranks' shares of each batch in a run: as they were given, or by the ranks' speeds."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from allhands.config.schema import TrainConfig
from allhands.data.order import GlobalOrder
from allhands.data.tokens import Windows
from allhands.distributed.backend import Communicator
from allhands.distributed.capabilities import can
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError
from allhands.io.formatting import format_shares
from allhands.io.trees import numbers
from allhands.observe.metrics import SharesChanged
from allhands.parallel.base import Strategy
from allhands.parallel.shares import Balance, RowSeconds
from allhands.run.state import LoopState
from allhands.runtime.sizing import Sizing
from allhands.train.result import StepResult

SHARES = "shares"  # key in the state of a checkpoint


def make_balance(
    config: TrainConfig,
    mesh: Mesh,
    windows: Windows,
    order: GlobalOrder,
    begin: int,
    saved: Mapping[str, Any],
) -> tuple[Balance, list[str]]:
    """Return the ranks' shares from batch ``begin`` on, and notes for the user.

    The shares follow the ranks' speeds if that was requested, and by default with several
    computers.

    Args:
        saved: state in the checkpoint from which the run is resumed; empty in a new run.
    """
    several = mesh.local_size < mesh.size
    by_speed = config.rank_weights == "auto" or (config.rank_weights is None and several)
    accumulation = config.grad_accumulation_steps
    balance = Balance(
        mesh.weights,
        begin=begin,
        accumulation=accumulation,
        moves=by_speed and mesh.data_size == mesh.size,
        rows=RowSeconds(order, windows.work, accumulation),
    )
    if not balance.restore(saved.get(SHARES)):
        return balance, []
    return balance, [
        f"shares of a batch as in the checkpoint: {format_shares(balance.shares(begin))}"
    ]


def require_timed(balance: Balance, config: TrainConfig, strategy: Strategy) -> None:
    """Keep the shares fixed if the ranks' passes cannot be timed.

    Raises:
        ConfigError: they cannot be timed, and shares by speed were requested.
    """
    if not balance.moves or strategy.sees_passes:
        return
    balance.moves = False
    if config.rank_weights == "auto":
        raise ConfigError(
            "on these GPUs passes overlap each other and NCCL's exchange, so that the speed of a rank cannot be "
            "measured without slowing it down",
            code="option-unsuited-to-device",
            where="--rank-weights auto",
            hint="give numbers, for example --rank-weights '[2, 1]', or leave it out",
        )


def cut_alike(communicator: Communicator, sizing: Sizing) -> bool:
    """Return True if all ranks cut their shares into micro-batches by the same ``sizing``.

    All ranks call this together. It is False where the back-end cannot overlap exchanges and
    passes, since the answer is then of no use.
    """
    if not can(communicator.backend, "overlap"):
        return False
    # Float32, which every back-end can gather, is exact to 2**24.
    mine = float(zlib.crc32(repr(sizing).encode()) % 2**24)
    return len(set(numbers(communicator.all_gather(mx.array([mine]))))) == 1


def rebalanced(
    balance: Balance, result: StepResult, num_ranks: int, state: LoopState, accumulation: int
) -> SharesChanged | None:
    """Update ``balance`` with the timings that all ranks sent with this step.

    The timings are of the step before. Returns the event to record if they change the shares.
    """
    moved = balance.hear(result.of_each(num_ranks, slice(0, len(balance.own))), state.iteration)
    balance.own = result.pace
    if moved is None:
        return None
    from_step = state.step + (moved.begin - state.iteration) // accumulation
    return SharesChanged(
        state.step, from_step, moved.weights, moved.before, moved.speeds, moved.rows
    )
