"""Places and names of a run's checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

from allhands.errors import CheckpointError
from allhands.io.names import BEST, CHECKPOINTS

MANIFEST = "manifest.json"
STATE = "state.json"
# File with the name of the run to which the files in the directory belong.
RUN_NAME = ".run"

_NAME = re.compile(r"step-(\d+)")
# Leftovers of killed writers (see staging) and killed removals.
_LEFT = re.compile(r"\.(step-\d+|best)\.(partial|replaced|removed)-.+")


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Return the place of the checkpoint of ``step``."""
    return run_dir / CHECKPOINTS / f"step-{step:07d}"


def removal_path(path: Path, mark: str) -> Path:
    """Return the hidden name of a checkpoint while it is removed."""
    return path.with_name(f".{path.name}.removed-{mark}")


def run_of(path: Path) -> Path:
    """Return the run directory that a checkpoint belongs to."""
    return path.parent.parent if path.parent.name == CHECKPOINTS else path.parent


def run_name(run_dir: Path) -> str | None:
    """Return the name of the run to which the directory's files belong; ``None`` if unknown.

    Raises:
        OSError: the name cannot be read.
    """
    file = run_dir / RUN_NAME
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None


def is_step_name(name: str) -> bool:
    """Return True if ``name`` is that of a checkpoint of a step."""
    return _NAME.fullmatch(name) is not None


def is_plain(name: str) -> bool:
    """Return True if a checkpoint's file may have this name: visible, printable, and no path."""
    return (
        name != "" and Path(name).name == name and name.isprintable() and not name.startswith(".")
    )


def checkpoints_in(run_dir: Path) -> list[Path]:
    """Return the directories with names of steps' checkpoints, the last step first; unread.

    Args:
        run_dir: a run directory, or a directory of checkpoints, such as one that was set aside.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    found = [path for path in listed(holder(run_dir)) if is_step_name(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (-int(path.name.removeprefix("step-")), path.name))


def holder(run_dir: Path) -> Path:
    """Return the directory that holds the checkpoints of steps."""
    inner = run_dir / CHECKPOINTS
    return inner if inner.is_dir() else run_dir


def best_in(run_dir: Path) -> Path | None:
    """Return ``RUN/best`` if it is a checkpoint and not just an adapter; unread."""
    path = run_dir / BEST
    return path if (path / MANIFEST).exists() or (path / STATE).exists() else None


def leftovers(paths: list[Path]) -> list[tuple[Path, str, str]]:
    """Return the leftovers of killed writers and removals: path, the checkpoint's name, and kind
    ("partial", "replaced" or "removed").
    """
    found = [(path, _LEFT.fullmatch(path.name)) for path in paths]
    return [(path, match[1], match[2]) for path, match in found if match]


def entries(directory: Path) -> list[Path]:
    """Return the sorted content of a directory; [] if there is no directory.

    Raises:
        OSError: the directory cannot be read.
    """
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def listed(directory: Path) -> list[Path]:
    """Return :func:`entries`, with another error.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    try:
        return entries(directory)
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror}",
            code="checkpoint-unreadable",
            where=str(directory),
            hint="check the rights, and the disk",
        ) from None
