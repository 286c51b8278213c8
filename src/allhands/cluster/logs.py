"""Logs of earlier attempts and earlier jobs: they get other names, and the latest few are kept."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from allhands.io.files import storage_error_of

_KEPT = 3
_KEPT_JOBS = 5
_CURRENT = re.compile(r"(rank-\d+|mpirun)\.log")
_EARLIER = re.compile(r"(?:rank-\d+|mpirun)\.attempt-(\d+)\.log")
_MONITOR = re.compile(r"monitor-[A-Za-z0-9._-]+\.jsonl")  # of all attempts of a job
_ERROR = re.compile(r"error-rank-\d+\.json")
_EARLIER_JOB = re.compile(r"earlier-(\d+)")


def clear_logs(log_dir: Path) -> Path | None:
    """Before a new job, move the logs and error files of the previous job into a private directory
    ``earlier-N``.

    N counts up. The last five such directories are kept. Return the new directory; ``None`` if
    there was nothing to move.

    Raises:
        StorageError: they cannot be moved.
    """
    found = [path for path in _files(log_dir) if _is_ours(path)]
    if not found:
        return None
    jobs = _earlier_jobs(log_dir)
    for number in sorted(jobs)[: 1 - _KEPT_JOBS]:
        _remove(jobs[number])
    place = log_dir / f"earlier-{max(jobs, default=0) + 1}"
    try:
        place.mkdir(0o700)
        place.chmod(0o700)  # the umask may take rights even from the owner
        for path in found:
            _move(path, place / path.name)
    except OSError as error:
        raise storage_error_of(error, place) from None
    return place


def archive_logs(log_dir: Path, attempt: int) -> dict[Path, Path]:
    """Rename each ``rank-N.log`` of the attempt that has ended to ``rank-N.attempt-K.log``.

    The logs of the last three attempts are kept. Error files are removed, so that no later attempt
    seems to have written them. Return a mapping from the old paths to the new ones.
    """
    moved: dict[Path, Path] = {}
    for path in _files(log_dir):
        if found := _CURRENT.fullmatch(path.name):
            moved[path] = path.with_name(f"{found[1]}.attempt-{attempt}.log")
            with suppress(
                OSError
            ):  # if the directory has become read-only, the next attempt reports it
                path.rename(moved[path])
        elif _ERROR.fullmatch(path.name) or (
            (found := _EARLIER.fullmatch(path.name)) and int(found[1]) <= attempt - _KEPT
        ):
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return moved


def _files(log_dir: Path) -> list[Path]:
    return sorted(log_dir.iterdir())


def _is_ours(path: Path) -> bool:
    known = any(one.fullmatch(path.name) for one in (_CURRENT, _EARLIER, _MONITOR, _ERROR))
    return known and (path.is_symlink() or not path.is_dir())


def _earlier_jobs(log_dir: Path) -> dict[int, Path]:
    """Return the entries named ``earlier-N``, by number; an entry need not be a directory."""
    return {
        int(found[1]): path
        for path in _files(log_dir)
        if (found := _EARLIER_JOB.fullmatch(path.name))
    }


def _move(path: Path, place: Path) -> None:
    path.rename(place)
    if not place.is_symlink():
        with suppress(OSError):  # it may belong to another user; the directory is private now
            place.chmod(0o600)


def _remove(job: Path) -> None:
    """Remove the directory of an earlier job, but no files that a user has put there.

    What cannot be removed stays.
    """
    if job.is_symlink() or not job.is_dir():
        return
    with suppress(OSError):
        for path in _files(job):
            if _is_ours(path):
                path.unlink()
        job.rmdir()
