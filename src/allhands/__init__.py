"""Fine-tune and pre-train language models on MLX, on one computer or on every computer you own.

The public names are imported when they are first used, so that ``import allhands`` is quick. On
Linux it also loads a fast BLAS, which MLX finds if it is imported afterwards; a command loads that
only if it computes.
"""

from __future__ import annotations

from allhands.runtime.command import end_by_interrupt, is_command

end_by_interrupt()

import importlib  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from allhands.runtime.blas import preload_blas  # noqa: E402

if TYPE_CHECKING:
    __version__: str
    from allhands.api import finetune, pretrain
    from allhands.config.schema import TrainConfig
    from allhands.errors import AllhandsError
    from allhands.loops.checkpointer import Checkpointer
    from allhands.loops.loader import DistributedLoader, shard
    from allhands.loops.recorder import Metrics
    from allhands.loops.starting import launch
    from allhands.loops.supervised import last_checkpoint, progress, save_checkpoint
    from allhands.loops.world import World, average_gradients, init
    from allhands.train.callbacks import Callback

__all__ = [
    "AllhandsError",
    "Callback",
    "Checkpointer",
    "DistributedLoader",
    "Metrics",
    "TrainConfig",
    "World",
    "__version__",
    "average_gradients",
    "finetune",
    "init",
    "last_checkpoint",
    "launch",
    "pretrain",
    "progress",
    "save_checkpoint",
    "shard",
]

_HOMES = {
    "AllhandsError": "allhands.errors",
    "Callback": "allhands.train.callbacks",
    "TrainConfig": "allhands.config.schema",
    "Checkpointer": "allhands.loops.checkpointer",
    "DistributedLoader": "allhands.loops.loader",
    "Metrics": "allhands.loops.recorder",
    "World": "allhands.loops.world",
    "average_gradients": "allhands.loops.world",
    "finetune": "allhands.api",
    "init": "allhands.loops.world",
    "last_checkpoint": "allhands.loops.supervised",
    "launch": "allhands.loops.starting",
    "pretrain": "allhands.api",
    "progress": "allhands.loops.supervised",
    "save_checkpoint": "allhands.loops.supervised",
    "shard": "allhands.loops.loader",
}

if not is_command():
    preload_blas()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from allhands.runtime.versions import version_of

        return version_of("allhands")
    if name not in _HOMES:
        raise AttributeError(f"module 'allhands' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
