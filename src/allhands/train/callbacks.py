"""What a person's own code can hook into a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allhands.metrics import TrainReport, ValidReport


class Callback:
    """Subclass it and override what you need; pass instances to :func:`allhands.finetune`.

    ``on_*`` methods run on rank 0 only; ``after_backward`` runs on every rank, and whatever it does to the
    world must be the same on all of them.
    """

    def after_backward(self, step: int, gradients: Any) -> None:
        """Called before each update with the tree of mean gradients over the global batch, unclipped."""

    def on_train_report(self, report: TrainReport) -> None:
        """Called every ``steps_per_report`` batches."""

    def on_valid_report(self, report: ValidReport) -> None:
        """Called after each validation."""

    def on_save(self, step: int, path: Path) -> None:
        """Called when weights lie complete at ``path``."""
