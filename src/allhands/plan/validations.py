"""The time of validations for a plan; numbers of validations and rows are those of the training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allhands.config.schema import TrainConfig
from allhands.data.order import Shuffle
from allhands.errors import AllhandsError
from allhands.plan.speed import StepModel
from allhands.run.datasets import find_splits, load_data
from allhands.run.model_sizes import forward_share
from allhands.run.training_memory import DecoderShape


@dataclass(frozen=True)
class ValidRows:
    """The rows of one validation.

    Attributes:
        number: number of rows.
        tokens: computed tokens of all rows, without padding.
    """

    number: int
    tokens: int


def number_of(batches: int, every: int, accumulated: int) -> int:
    """Return the number of validations: one before the first batch, one at each multiple of
    ``every``, and one after the last batch.

    Args:
        batches: batches of the whole training.
        every: batches between validations.
        accumulated: batches of an update; there is no validation within them.
    """
    updates = math.ceil(batches / accumulated)
    if every <= accumulated:
        return 1 + updates
    reached = batches // every
    return 1 + reached + (math.ceil(reached * every / accumulated) < updates)


def valid_rows(
    config: TrainConfig, *, counted: bool, say: Callable[[str], object], notes: list[str]
) -> ValidRows:
    """Return the rows of a validation; 0 rows if there are no validations or no validation data.

    Args:
        counted: True if the training's rows were read. Otherwise validations are left out if the
            data cannot be read.
        say: called with a line about the current work.
        notes: gets the reason why validations are left out.

    Raises:
        AllhandsError: the data cannot be read, and ``counted`` is true.
    """
    nothing = ValidRows(0, 0)
    if config.val_batches == 0:
        return nothing
    local = config.data == "demo" or Path(config.data).exists()
    if not counted and not ("data" in config.model_fields_set and local):
        notes.append("validations are not in these times: there are no data here to validate on")
        return nothing
    try:
        chosen = config.model_copy(update={"test": False})
        if "valid" not in find_splits(chosen):
            notes.append("no validations: the data have no validation set")
            return nothing
        say("reading the validation data ...")
        rows = load_data(chosen, "valid").valid
    except AllhandsError as error:
        if counted:
            raise
        notes.append(f"validations are not in these times: {error.message}")
        return nothing
    assert rows is not None
    # The same rows as in allhands.train.evaluation.
    number = (
        len(rows)
        if config.val_batches < 0
        else min(len(rows), config.val_batches * config.batch_size)
    )
    return ValidRows(number, int(rows.work[Shuffle(len(rows), 0).at(np.arange(number))].sum()))


def seconds_of(
    rows: ValidRows, step: StepModel, config: TrainConfig, blocks: DecoderShape | None, layers: int
) -> float:
    """Return the seconds of one validation on one computer: forward passes, as a part of the time
    of training steps.

    Args:
        layers: number of blocks with a backward pass.
    """
    if blocks is None:  # a third of a step's passes, or half of them if most weights are frozen
        share = 1 / 3 if config.fine_tune_type == "full" else 1 / 2
    else:
        share = forward_share(
            blocks, config.fine_tune_type, layers, recomputed=config.grad_checkpoint
        )
    # Full training also has an update. For adapters the update is negligible, but each pass has its
    # overhead.
    token_s = step.token_s if config.fine_tune_type == "full" else step.alone_s / step.tokens
    return rows.tokens * token_s * share
