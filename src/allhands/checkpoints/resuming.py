"""Resuming of a run: the checkpoint, its way to all ranks, and the ranks that keep files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from allhands.checkpoints.arrays import StoredArrayReader, local_arrays, require_same, shared_arrays
from allhands.checkpoints.finding import find, find_latest, kept_aside, latest, survey
from allhands.checkpoints.format import LEFT_FILE, OPTIMIZER_FILE, WEIGHTS_FILE
from allhands.checkpoints.layout import BEST, CHECKPOINTS, run_name
from allhands.checkpoints.reading import Checkpoint, OtherFormatError, open_checkpoint
from allhands.checkpoints.writing import sweep
from allhands.config.schema import TrainConfig
from allhands.data.dates import DATE_KEY
from allhands.distributed.backend import Communicator
from allhands.distributed.handout import gather_rows, hand_out_json, votes
from allhands.distributed.mesh import Mesh
from allhands.distributed.reduce import barrier
from allhands.errors import CheckpointError
from allhands.io.files import make_directory
from allhands.io.trees import unflatten
from allhands.model.adapters import trained_weights

AUTO = "auto"
_SEEN = ".seen-"
_FILES = (WEIGHTS_FILE, OPTIMIZER_FILE, LEFT_FILE)


@dataclass(frozen=True)
class Restored:
    """A checkpoint that a run goes on from.

    Attributes:
        state: content of ``state.json``.
        weights: readers of the trained weights, by name.
        optimizer: readers of the optimizer's state, by name.
        place: the checkpoint's directory, as rank 0 sees it.
        run_id: identifier of the run that wrote the checkpoint.
        own: whether the checkpoint is in this run's directory on rank 0, and not set aside there.
            Other computers cannot tell this from the path, because directories may differ.
        left: readers of the rounding errors that compression has kept for each rank's gradients.
    """

    state: dict[str, Any]
    weights: dict[str, StoredArrayReader]
    optimizer: dict[str, StoredArrayReader]
    place: str
    run_id: str = ""
    own: bool = False
    left: dict[str, StoredArrayReader] = field(default_factory=dict[str, StoredArrayReader])

    @property
    def step(self) -> int:
        """Number of updates that the run has made."""
        return int(self.state["step"])


def find_checkpoint(
    config: TrainConfig, directory: Path, run_id: str, attempt: int
) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that this start goes on from (``None`` without one), and notes.

    A restart (``attempt`` above 1) goes on from its own run's latest checkpoint. If none is whole,
    it begins as the first attempt did, because no person is there to decide otherwise.

    Raises:
        CheckpointError: the requested checkpoint is missing or damaged, or all checkpoints are
            damaged.
    """
    rejected: list[CheckpointError] = []
    found = latest(directory, run_id=run_id, rejected=rejected) if attempt > 1 else None
    own_lost = found is None and bool(rejected)
    if found is None and config.resume is not None:
        found = _asked_for(config.resume, directory, run_id if attempt > 1 else None, rejected)
    notes = _left_out(rejected)
    if own_lost:
        start = "the beginning" if found is None else str(found.path)
        notes.append(
            f"no checkpoint of this run is whole, so it starts again like the first time: from {start}"
        )
    elif found is None and config.resume == AUTO and attempt == 1:
        kept = kept_aside(directory)
        aside = (
            f"; to go on from an earlier run's, up to step {kept[1]}: --resume {kept[0]}"
            if kept
            else ""
        )
        notes.append(
            f"there is no checkpoint in {directory} to go on from: a new run begins{aside}"
        )
    return found, notes


def _left_out(rejected: Sequence[CheckpointError]) -> list[str]:
    """Return a note on each checkpoint that was passed over."""
    errors = {one.where: one for one in rejected}.values()
    kinds = {one: "foreign" if isinstance(one, OtherFormatError) else "damaged" for one in errors}
    return [
        f"a {kind} checkpoint is left out: {one.where}: {one.message}"
        for one, kind in kinds.items()
    ]


def date_of(checkpoint: Checkpoint) -> datetime | None:
    """Return the moment whose date the chat template writes in the checkpoint's run; ``None`` if
    it writes no date.
    """
    told = checkpoint.state["data"][DATE_KEY]
    return datetime.fromisoformat(told) if told else None


def _asked_for(
    resume: str, directory: Path, run_id: str | None, rejected: list[CheckpointError]
) -> Checkpoint | None:
    """Return the checkpoint for ``--resume``.

    Args:
        run_id: the run, in a restart without whole checkpoints of its own; ``None`` in a first
            start.
    """
    if resume != AUTO:
        return find(resume, directory)
    if run_id is not None and _began_without(directory, run_id):
        return latest(directory, rejected=rejected)
    return find_latest(directory, rejected=rejected)


def _began_without(directory: Path, run_id: str) -> bool:
    """Return True if the run's first attempt found no checkpoint: all checkpoints are its own."""
    runs = {
        found.checkpoint.run_id for found in survey(directory, verify=False) if found.checkpoint
    }
    try:
        return run_name(directory) == run_id and runs <= {run_id}
    except OSError:
        return False


def receive(
    communicator: Communicator,
    checkpoint: Checkpoint | None,
    directory: Path,
    busy: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Restored | None:
    """Return rank 0's checkpoint on every rank; all ranks call this together.

    If all ranks find the same checkpoint at the same path, each reads the arrays that it needs.
    Otherwise rank 0 hands out the arrays, one at a time, when they are read.

    Args:
        checkpoint: the checkpoint that rank 0 has found; ``None`` on other ranks.
        directory: directory of this run on this rank's computer.
        busy: context for work that may take long and waits for no other rank.

    Returns:
        ``None`` if rank 0 has no checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    mine = None if checkpoint is None else _described(checkpoint, directory)
    told: dict[str, Any] | None = hand_out_json(communicator, mine)
    if told is None:
        return None
    with busy():
        own = checkpoint or _same_here(told["path"], told["digest"])
    everywhere = votes(communicator, own is not None) == communicator.size
    if everywhere and own is not None:
        state: Any = own.state
        weights, optimizer, left = (local_arrays(own, file) for file in _FILES)
    else:
        state = hand_out_json(communicator, None if checkpoint is None else dict(checkpoint.state))
        weights, optimizer, left = (
            shared_arrays(communicator, checkpoint, file) for file in _FILES
        )
    return Restored(
        dict(state), weights, optimizer, told["path"], told["run_id"], told["own"], left
    )


def restore_weights(
    model: nn.Module, restored: Restored, progress: Callable[[], None] = lambda: None
) -> None:
    """Put a checkpoint's weights into the model's trained arrays, one after the other.

    Args:
        progress: called after each array.

    Raises:
        CheckpointError: names, shapes or types differ from the model's.
    """
    wanted = [(name, array.shape, array.dtype) for name, array in trained_weights(model).items()]
    require_same(restored.weights, wanted, restored.place)
    for name, stored in restored.weights.items():
        model.update(unflatten([(name, stored.read())]))
        progress()


def restore_optimizer(
    optimizer: optim.Optimizer, restored: Restored, progress: Callable[[], None] = lambda: None
) -> None:
    """Give the optimizer the checkpoint's state; ``progress``: see :func:`restore_weights`."""
    state: list[tuple[str, mx.array]] = []
    for name, stored in restored.optimizer.items():
        state.append((name, stored.read()))
        progress()
    optimizer.state = unflatten(state)


def _described(checkpoint: Checkpoint, directory: Path) -> dict[str, Any]:
    path, run = checkpoint.path.resolve(), directory.resolve()
    return {
        "path": str(path),
        "digest": checkpoint.digest,
        "run_id": checkpoint.run_id,
        "own": path in (run / CHECKPOINTS / path.name, run / BEST),
    }


def _same_here(path: str, digest: str) -> Checkpoint | None:
    """Return the checkpoint at ``path`` if this computer has the same one, whole; else ``None``."""
    try:
        found = open_checkpoint(Path(path))
    except CheckpointError:
        return None
    return found if found.digest == digest else None


def keeps_files(communicator: Communicator, mesh: Mesh, directory: Path, copies: int) -> bool:
    """Return True if this rank writes the run's files.

    These are rank 0, and one rank on each of ``copies`` - 1 hosts that cannot see rank 0's files.
    So no file is lost with rank 0's computer. All ranks call this together.
    """
    if copies < 2 or mesh.local_size == mesh.size:
        return mesh.is_main
    seen = sees_main(communicator, directory)
    blind = mesh.local_rank == 0 and not seen
    if blind:
        # Removes leftovers of a computer that lost power; later only ranks that write look for
        # them.
        with suppress(OSError):
            sweep(directory / CHECKPOINTS)
        with suppress(OSError):
            sweep(directory)
    chosen = np.flatnonzero(gather_rows(communicator, [float(blind)]))[: copies - 1]
    return mesh.is_main or mesh.rank in chosen


def sees_main(communicator: Communicator, directory: Path) -> bool:
    """Return True if this rank's ``directory`` is rank 0's; all ranks call this together."""
    probe = directory / hand_out_json(communicator, f"{_SEEN}{secrets.token_hex(8)}")
    leads = communicator.rank == 0
    if leads:
        make_directory(directory, private=True)
        for old in directory.glob(f"{_SEEN}*"):  # left by a start that was killed here
            old.unlink(missing_ok=True)
        probe.touch()
    barrier(communicator)
    seen = os.path.exists(probe)
    barrier(communicator)
    if leads:
        probe.unlink(missing_ok=True)
    return seen
