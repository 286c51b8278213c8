"""From which checkpoint a run goes on, how it reaches every rank, and who keeps the new ones."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from allhands.arrays import hand_out, hand_out_json, load_arrays
from allhands.checkpoints import (
    BEST,
    CHECKPOINTS,
    Checkpoint,
    checkpoint_path,
    find,
    latest,
    open_checkpoint,
    survey,
)
from allhands.config import TrainConfig
from allhands.distributed.backend import Communicator
from allhands.distributed.mesh import Mesh
from allhands.distributed.reduce import barrier
from allhands.errors import CheckpointError
from allhands.files import make_directory, set_aside, storage_error, write_whole
from allhands.metrics import METRICS_FILE
from allhands.staging import publish, staging
from allhands.train.state import OPTIMIZER_FILE, WEIGHTS_FILE
from allhands.trees import numbers

AUTO = "auto"


@dataclass(frozen=True)
class Restored:
    """A checkpoint's content in this rank's memory.

    Attributes:
        state: what ``state.json`` says.
        place: the checkpoint's directory, as rank 0 sees it.
        run_id: of the run that wrote it.
    """

    state: dict[str, Any]
    weights: dict[str, mx.array]
    optimizer: dict[str, mx.array]
    place: str
    run_id: str = ""


def find_checkpoint(
    config: TrainConfig, directory: Path, run_id: str, attempt: int
) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that this start goes on from, if any, and what a person should know of others.

    A restart goes on from its own run's latest; if there is none yet it begins as the first attempt did.

    Raises:
        CheckpointError: the one that was asked for is missing or damaged.
    """
    rejected: list[CheckpointError] = []
    found = latest(directory, run_id=run_id, rejected=rejected) if attempt > 1 else None
    if found is None and config.resume is not None:
        found = latest(directory, rejected=rejected) if config.resume == AUTO else find(config.resume, directory)
    return found, [f"a damaged checkpoint is left out: {one.where}: {one.message}" for one in rejected]


def receive(
    communicator: Communicator,
    checkpoint: Checkpoint | None,
    busy: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Restored | None:
    """The checkpoint that rank 0 has found, on every rank; called on all of them together.

    Where all ranks find the same one at the same path it is read there; otherwise rank 0 hands it out.

    Args:
        busy: a context for what may take long and waits for no other rank.

    Raises:
        CheckpointError: it is damaged.
    """
    mine = None if checkpoint is None else _described(checkpoint)
    told: dict[str, str] | None = hand_out_json(communicator, mine)
    if told is None:
        return None
    with busy():
        own = checkpoint or _same_here(told["path"], told["digest"])
    everywhere = numbers(communicator.all_sum(mx.array([float(own is not None)])))[0] == communicator.size
    leads = communicator.rank == 0
    state: Any = {}
    weights: dict[str, mx.array] = {}
    optimizer: dict[str, mx.array] = {}
    if own is not None and (everywhere or leads):
        state = own.state
        with busy():
            weights, optimizer = (load_arrays(own.path / file) for file in (WEIGHTS_FILE, OPTIMIZER_FILE))
    if not everywhere:
        state = hand_out_json(communicator, state)
        weights, optimizer = hand_out(communicator, weights), hand_out(communicator, optimizer)
    return Restored(state, weights, optimizer, told["path"], told["run_id"])


def _described(checkpoint: Checkpoint) -> dict[str, str]:
    return {"path": str(checkpoint.path.resolve()), "digest": checkpoint.digest, "run_id": checkpoint.run_id}


def _same_here(path: str, digest: str) -> Checkpoint | None:
    """The checkpoint at ``path`` if this computer has it too, whole."""
    try:
        found = open_checkpoint(Path(path))
    except CheckpointError:
        return None
    return found if found.digest == digest else None


def keeps_files(communicator: Communicator, mesh: Mesh, directory: Path, copies: int) -> bool:
    """Whether this rank writes the run's files: rank 0, and one rank on each of a few hosts that cannot see them.

    Any rank could, because all hold the same weights: so the loss of rank 0's computer loses nothing. Called on all
    ranks together.
    """
    if copies < 2 or mesh.local_size == mesh.size:
        return mesh.is_main
    mark: str = hand_out_json(communicator, f".seen-{secrets.token_hex(8)}")
    probe = directory / mark
    if mesh.is_main:
        make_directory(directory, private=True)
        probe.touch()
    barrier(communicator)
    blind = mesh.local_rank == 0 and not mesh.is_main and not probe.exists()
    flags = numbers(communicator.all_gather(mx.array([float(blind)])))
    if mesh.is_main:
        probe.unlink(missing_ok=True)
    chosen = [rank for rank, flag in enumerate(flags) if flag][: copies - 1]
    return mesh.is_main or mesh.rank in chosen


def share_history(
    communicator: Communicator, directory: Path, restored: Restored | None, run_id: str, newcomer: bool
) -> None:
    """Give ranks that begin to keep the files of a run which has begun without them its curve and its best adapter.

    So whoever keeps files can lose all others. What lies there of another run is set aside. Called on all ranks
    together, before one of them adds to its curve.

    Args:
        newcomer: whether this rank keeps files, and is not rank 0.

    Raises:
        StorageError: they cannot be written.
    """
    if restored is None or communicator.size == 1:
        return
    lacks = newcomer and not _has_kept(directory, restored)
    if not numbers(communicator.all_sum(mx.array([float(lacks)])))[0]:
        return
    try:
        if lacks:
            _make_way(directory, {run_id, restored.run_id})
        curve = _handed_out(communicator, directory, [METRICS_FILE])
        best = _handed_out(communicator, directory / BEST, _names(directory / BEST))
        if lacks:
            _write(directory, curve, best)
    except OSError as error:
        raise storage_error(Path(error.filename or directory), error) from error


def _has_kept(directory: Path, restored: Restored) -> bool:
    """Whether this rank wrote the checkpoint itself: then it was given, or wrote, what was before it."""
    kept = checkpoint_path(directory, int(restored.state["iteration"]))
    found = [one.checkpoint for one in survey(directory, verify=False) if one.path == kept and one.error is None]
    return (directory / METRICS_FILE).exists() and any(one and one.run_id == restored.run_id for one in found)


def _make_way(directory: Path, runs: set[str]) -> None:
    there = {found.checkpoint.run_id for found in survey(directory, verify=False) if found.checkpoint}
    if there and there.isdisjoint(runs):
        for name in (METRICS_FILE, BEST, CHECKPOINTS):
            set_aside(directory / name)


def _names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir() if file.is_file()) if directory.is_dir() else []


def _handed_out(communicator: Communicator, directory: Path, names: list[str]) -> dict[str, bytes]:
    """Rank 0's files of these names, as far as there are any; called on all ranks together."""
    names = hand_out_json(communicator, [name for name in names if (directory / name).is_file()])
    contents: dict[str, bytes] = {}
    for name in names:
        own = {name: mx.array(np.fromfile(directory / name, np.uint8))} if communicator.rank == 0 else None
        contents[name] = np.asarray(hand_out(communicator, own)[name]).tobytes()
    return contents


def _write(directory: Path, curve: Mapping[str, bytes], best: Mapping[str, bytes]) -> None:
    make_directory(directory, private=True)
    for name, content in curve.items():
        write_whole(directory / name, lambda draft, content=content: draft.write_bytes(content), private=True)
    if best:
        with staging(directory / BEST, private=True) as staged:
            for name, content in best.items():
                (staged / name).write_bytes(content)
            publish(staged, directory / BEST, private=True)
