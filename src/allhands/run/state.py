"""Progress of a training run, and its conversion to JSON values and back."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from allhands.errors import CheckpointError
from allhands.objectives.base import Objective
from allhands.train.result import StepResult, Totals


@dataclass
class ReportWindow:
    """Sums since the last report."""

    loss_sum: float = 0.0
    num_targets: int = 0
    num_tokens: int = 0
    steps: int = 0
    iterations: int = 0
    time_s: float = 0.0
    wait_s: float = 0.0
    comm_s: float = 0.0
    compute_s: float = 0.0
    grad_norm: float = 0.0
    further: tuple[float, ...] = ()
    sent_bytes: int = 0

    def add(self, result: StepResult, iterations: int, time_s: float, wait_s: float) -> None:
        """Count one update over ``iterations`` batches.

        The loss and tokens of an update that was left out are not counted.
        """
        self.time_s += time_s
        self.wait_s += wait_s
        self.comm_s += result.comm_s
        self.compute_s += result.compute_s
        self.steps += 1
        self.iterations += iterations
        self.sent_bytes += result.sent_bytes
        if result.skipped:
            return
        self.loss_sum += result.loss_sum
        self.num_targets += result.num_targets
        self.num_tokens += result.num_tokens
        self.grad_norm = result.grad_norm
        before = self.further or (0.0,) * len(result.further)
        self.further = tuple(map(sum, zip(before, result.further, strict=True)))

    def metrics(self, objective: Objective) -> dict[str, float]:
        """Return the further metrics of ``objective`` for these sums, besides the mean loss."""
        if len(self.further) != len(objective.further):  # nothing was counted
            return {}
        return Totals(self.loss_sum, self.num_targets, self.num_tokens, 0.0, self.further).metrics(
            objective
        )


@dataclass
class LoopState:
    """Progress of a run. Data order and dropout are functions of seed and ``iteration``, so no
    state of random numbers is needed.

    Attributes:
        step: number of completed optimizer updates, including those left out because a number was
            not finite.
        iteration: number of completed batches; an update takes one or several.
        trained_tokens: number of trained tokens so far.
        best_loss: lowest validation loss.
        best_step: the step of the lowest validation loss.
        stale_validations: number of validations since then.
        validation_due: True if a validation at ``step`` is still to be made.
        skipped_in_row: number of updates in a row that were left out because a number was not
            finite.
        window: sums since the last report.
        before_s: training seconds of earlier starts, up to the checkpoint from which this start
            went on.
        began: when this start began to train, in seconds of :func:`time.perf_counter`.
    """

    step: int = 0
    iteration: int = 0
    trained_tokens: int = 0
    best_loss: float = math.inf
    best_step: int | None = None
    stale_validations: int = 0
    validation_due: bool = True
    skipped_in_row: int = 0
    window: ReportWindow = field(default_factory=ReportWindow)
    before_s: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    def steps_in_all(self, total: int, accumulated: int) -> int:
        """Return the number of updates of the whole training on ``total`` batches.

        It is counted from ``step``, because past updates may have taken fewer batches than
        ``accumulated``.
        """
        return self.step + max(0, math.ceil((total - self.iteration) / accumulated))

    def without_validations(self) -> LoopState:
        """Return the state of a run that goes on with other validation examples: a loss on these is
        no better and no worse than one on the earlier examples.
        """
        anew = LoopState()
        return replace(
            self,
            best_loss=anew.best_loss,
            best_step=anew.best_step,
            stale_validations=anew.stale_validations,
            validation_due=anew.validation_due,
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, from which :meth:`from_json` makes the state of a later start."""
        values = asdict(self)
        before_s, began = values.pop("before_s"), values.pop("began")
        best_loss = self.best_loss if math.isfinite(self.best_loss) else None
        return {
            **values,
            "best_loss": best_loss,
            "elapsed_s": before_s + time.perf_counter() - began,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> LoopState:
        """Return the state from the values of :meth:`to_json`; other keys are ignored.

        Raises:
            CheckpointError: a key is missing.
        """
        plain = {entry.name for entry in fields(cls)} - {"best_loss", "window", "before_s", "began"}
        try:
            return cls(
                **{name: values[name] for name in plain},
                best_loss=math.inf if values["best_loss"] is None else values["best_loss"],
                window=ReportWindow(**values["window"]),
                before_s=values["elapsed_s"],
            )
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"it does not say where the training stood ({error})",
                code="checkpoint-incomplete",
                where="state.json",
                hint="give a checkpoint of allhands train",
            ) from None
