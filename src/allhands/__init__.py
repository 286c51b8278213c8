"""Fine-tune and pre-train language models on MLX, on one computer or on every computer you own.

The public names are imported when they are first used, so that ``import allhands`` is quick. On Linux it also loads a
fast BLAS, which MLX finds if it is imported afterwards; a command loads that only if it computes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from allhands.blas import is_command, preload_blas
from allhands.versions import __version__

if TYPE_CHECKING:
    from allhands.api import finetune, pretrain
    from allhands.checkpointer import Checkpointer
    from allhands.config import TrainConfig
    from allhands.errors import AllhandsError
    from allhands.recorder import Metrics
    from allhands.sharding import DistributedLoader, shard
    from allhands.starting import launch
    from allhands.supervised import last_checkpoint, progress, save_checkpoint
    from allhands.train.callbacks import Callback
    from allhands.world import World, average_gradients, init

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
    "TrainConfig": "allhands.config",
    "Checkpointer": "allhands.checkpointer",
    "DistributedLoader": "allhands.sharding",
    "Metrics": "allhands.recorder",
    "World": "allhands.world",
    "average_gradients": "allhands.world",
    "finetune": "allhands.api",
    "init": "allhands.world",
    "last_checkpoint": "allhands.supervised",
    "launch": "allhands.starting",
    "pretrain": "allhands.api",
    "progress": "allhands.supervised",
    "save_checkpoint": "allhands.supervised",
    "shard": "allhands.sharding",
}

if not is_command():
    preload_blas()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'allhands' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
