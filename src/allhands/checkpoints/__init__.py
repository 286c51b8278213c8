"""Checkpoints on disk: directories that are whole or absent, and are recognised by their content,
not only by name.

A checkpoint is a directory of safetensors and JSON files. ``manifest.json``, written last, has the
size and the SHA-256 sum of each file, and a sum of itself. A run keeps checkpoints as
``RUN/checkpoints/step-0000100`` and ``RUN/best``.
"""

from allhands.checkpoints.finding import (
    FoundCheckpoint,
    damage,
    find,
    find_latest,
    is_checkpoint,
    kept_aside,
    latest,
    look_at,
    quick_step,
    survey,
)
from allhands.checkpoints.format import StoredFile
from allhands.checkpoints.layout import (
    BEST,
    CHECKPOINTS,
    MANIFEST,
    RUN_NAME,
    STATE,
    best_in,
    checkpoint_path,
    checkpoints_in,
    run_name,
)
from allhands.checkpoints.pruning import prune
from allhands.checkpoints.reading import Checkpoint, open_checkpoint
from allhands.checkpoints.writing import write_checkpoint
from allhands.io.tensors import Tensor

__all__ = [
    "BEST",
    "CHECKPOINTS",
    "MANIFEST",
    "RUN_NAME",
    "STATE",
    "Checkpoint",
    "FoundCheckpoint",
    "StoredFile",
    "Tensor",
    "best_in",
    "checkpoint_path",
    "checkpoints_in",
    "damage",
    "find",
    "find_latest",
    "is_checkpoint",
    "kept_aside",
    "latest",
    "look_at",
    "open_checkpoint",
    "prune",
    "quick_step",
    "run_name",
    "survey",
    "write_checkpoint",
]
