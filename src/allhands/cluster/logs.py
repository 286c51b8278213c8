"""Logs of ranks from one attempt to the next: kept under another name, the latest few."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from allhands.files import storage_error

_KEPT = 3
_CURRENT = re.compile(r"(rank-\d+|mpirun)\.log")
_EARLIER = re.compile(r"(?:rank-\d+|mpirun)\.attempt-(\d+)\.log")


def clear_logs(log_dir: Path) -> None:
    """Remove the logs and error files of an earlier job.

    Raises:
        StorageError: one cannot be removed.
    """
    for path in _files(log_dir):
        if _CURRENT.fullmatch(path.name) or _EARLIER.fullmatch(path.name) or _is_error(path):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise storage_error(path, error) from None


def archive_logs(log_dir: Path, attempt: int) -> dict[Path, Path]:
    """Call ``rank-N.log`` of the attempt that has ended ``rank-N.attempt-K.log``; return the new path by the old one.

    Those of the last three attempts are kept. Error files are removed, so that none is taken for a later one's.
    """
    moved: dict[Path, Path] = {}
    for path in _files(log_dir):
        if found := _CURRENT.fullmatch(path.name):
            moved[path] = path.with_name(f"{found[1]}.attempt-{attempt}.log")
            with suppress(OSError):  # a directory that has become read-only: the next attempt will say so
                path.rename(moved[path])
        elif _is_error(path) or ((found := _EARLIER.fullmatch(path.name)) and int(found[1]) <= attempt - _KEPT):
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return moved


def _files(log_dir: Path) -> Iterator[Path]:
    return iter(sorted(log_dir.iterdir()))


def _is_error(path: Path) -> bool:
    return re.fullmatch(r"error-rank-\d+\.json", path.name) is not None
