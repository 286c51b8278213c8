"""The state of training as a checkpoint holds it, and back: bit for bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from allhands.arrays import hold
from allhands.checkpoints import Tensor
from allhands.errors import CheckpointError
from allhands.model.adapters import trained_weights
from allhands.objectives.base import Objective
from allhands.train.result import StepResult
from allhands.trees import flatten, unflatten

WEIGHTS_FILE = "adapters.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass
class Window:
    """Sums since the last report."""

    loss_sum: float = 0.0
    num_targets: int = 0
    num_tokens: int = 0
    steps: int = 0
    time_s: float = 0.0
    wait_s: float = 0.0
    comm_s: float = 0.0
    compute_s: float = 0.0
    grad_norm: float = 0.0
    further: tuple[float, ...] = ()

    def add(self, result: StepResult, time_s: float, wait_s: float) -> None:
        """Count one update; of one that was left out only its time."""
        self.time_s += time_s
        self.wait_s += wait_s
        self.comm_s += result.comm_s
        self.compute_s += result.compute_s
        self.steps += 1
        if result.skipped:
            return
        self.loss_sum += result.loss_sum
        self.num_targets += result.num_targets
        self.num_tokens += result.num_tokens
        self.grad_norm = result.grad_norm
        before = self.further or (0.0,) * len(result.further)
        self.further = tuple(map(sum, zip(before, result.further, strict=True)))

    def metrics(self, objective: Objective) -> dict[str, float]:
        """What ``objective`` reports of these sums besides the mean loss."""
        counted = {"loss": self.loss_sum, "targets": self.num_targets, "tokens": self.num_tokens}
        further = dict(zip(objective.further, self.further, strict=False))
        return objective.metrics({**counted, **further}) if len(further) == len(objective.further) else {}


@dataclass
class LoopState:
    """Where a run stands. Data order and dropout are functions of ``iteration``, so nothing else is random.

    Attributes:
        iteration: batches done.
        validation_due: the validation that belongs to ``iteration`` has not been made.
        skipped_in_row: updates left out for not being finite, one after the other.
        window: sums since the last report.
        before_s: seconds that earlier starts took up to where this one went on; what was lost is not counted.
        began: when this start began to train, in seconds of :func:`time.perf_counter`.
    """

    iteration: int = 0
    trained_tokens: int = 0
    best_loss: float = math.inf
    best_iteration: int | None = None
    stale_validations: int = 0
    validation_due: bool = True
    skipped_in_row: int = 0
    window: Window = field(default_factory=Window)
    before_s: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which :meth:`from_json` makes the same state, one start later."""
        values = asdict(self)
        before_s, began = values.pop("before_s"), values.pop("began")
        best_loss = self.best_loss if math.isfinite(self.best_loss) else None
        return {**values, "best_loss": best_loss, "elapsed_s": before_s + time.perf_counter() - began}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> LoopState:
        """The state that :meth:`to_json` wrote, among other keys.

        Raises:
            CheckpointError: a key is missing.
        """
        try:
            return cls(
                iteration=values["iteration"],
                trained_tokens=values["trained_tokens"],
                best_loss=math.inf if values["best_loss"] is None else values["best_loss"],
                best_iteration=values["best_iteration"],
                stale_validations=values["stale_validations"],
                validation_due=values["validation_due"],
                skipped_in_row=values["skipped_in_row"],
                window=Window(**values["window"]),
                before_s=values.get("elapsed_s", 0.0),  # earlier versions did not write it
            )
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"it does not say where the training stood ({error})",
                where="state.json",
                hint="give a checkpoint of allhands train",
            ) from None


def snapshot(model: nn.Module, optimizer: optim.Optimizer, spare_bytes: int) -> Callable[[], dict[str, list[Tensor]]]:
    """Hold trained weights and optimizer state as they are now, see :func:`hold`; call the result for them, by file.

    Args:
        spare_bytes: what a GPU's own memory has beside a step. Copies are made there only where it has twice their
            room: parts of the optimizer that other ranks keep have come for the occasion, too.
    """
    trees = {WEIGHTS_FILE: model.trainable_parameters(), OPTIMIZER_FILE: optimizer.state}
    size = sum(array.nbytes for tree in trees.values() for _, array in flatten(tree))
    held = {name: hold(tree, on_device=2 * size < spare_bytes) for name, tree in trees.items()}
    return cache(lambda: {name: get() for name, get in held.items()})


def restore_weights(model: nn.Module, weights: dict[str, mx.array], place: str) -> None:
    """Put ``weights`` in place of the trained ones: the same names, shapes and types.

    Raises:
        CheckpointError: they do not fit this model.
    """
    wanted = trained_weights(model)
    for name in sorted(wanted.keys() | weights.keys()):
        here, there = wanted.get(name), weights.get(name)
        if here is None or there is None or here.shape != there.shape or here.dtype != there.dtype:
            raise CheckpointError(
                f"{name} is {_described(there)} in the checkpoint, {_described(here)} here",
                where=place,
                hint="resume with the model and the settings that the checkpoint was made with",
            )
    model.update(unflatten(list(weights.items())))
    mx.eval(model.trainable_parameters())


def restore_optimizer(optimizer: optim.Optimizer, state: dict[str, mx.array], learning_rate: float | None) -> None:
    """Give the optimizer the state that :func:`snapshot` took.

    Args:
        learning_rate: where it is constant; a schedule computes it from the step.
    """
    optimizer.state = unflatten(list(state.items()))
    if learning_rate is not None:
        optimizer.learning_rate = learning_rate
    mx.eval(optimizer.state)


def _described(array: mx.array | None) -> str:
    return "not trained" if array is None else f"{tuple(array.shape)} {str(array.dtype).removeprefix('mlx.core.')}"
