"""Whether each rank keeps, and updates, only a part of what the optimizer has."""

from __future__ import annotations

import mlx.nn as nn

from allhands.config import TrainConfig
from allhands.distributed.backend import Communicator
from allhands.distributed.capabilities import can
from allhands.errors import ConfigError
from allhands.model.adapters import trained_weights
from allhands.plan.strategies import ELEMENTWISE

# Trained numbers from which on the update takes a GPU longer than 0.5 ms.
_WORTH_IT = 1 << 26


def divides(
    config: TrainConfig,
    communicator: Communicator,
    model: nn.Module,
    *,
    masters: bool,
    eager: bool,
    wants_gradients: bool,
) -> bool:
    """Whether ranks divide the optimizer's state among them.

    Over NCCL that costs nothing, since a sum over ranks is made of its parts anyway. Over the other back-ends weights
    travel besides, which only who has too little memory will want.

    Args:
        masters: whether the optimizer has float32 copies of them.
        eager: whether operations are computed when they are called.
        wants_gradients: whether somebody looks at whole gradients.

    Raises:
        ConfigError: it is asked for and cannot be.
    """
    if communicator.size == 1 or config.shard_optimizer == "off":
        return False
    problems = {
        f"{config.optimizer} updates an array as a whole": config.optimizer not in ELEMENTWISE,
        "a callback looks at whole gradients": wants_gradients,
        "operations are computed one by one on this processor": eager,
    }
    found = next((problem for problem, here in problems.items() if here), None)
    if config.shard_optimizer == "auto":
        if found is not None:
            return False
        trained = sum(array.size for array in trained_weights(model).values())
        return worth_dividing(communicator, trained, masters)
    if found is not None:
        hint = "add --compile on" if eager else f"leave it out, or take one of {', '.join(ELEMENTWISE)}"
        raise ConfigError(f"the optimizer cannot be divided: {found}", where="--shard-optimizer on", hint=hint)
    return True


def worth_dividing(communicator: Communicator, trained: int, masters: bool) -> bool:
    """Whether ranks are faster if each updates a part of so many trained numbers.

    Without copies in float32 an update moves half as many bytes, and what a rank need not do takes no longer than what
    its exchange does besides (benchmarks/results/gpu_many-2026-11-22.md).
    """
    return communicator.size > 1 and can(communicator.backend, "overlap") and masters and trained >= _WORTH_IT
