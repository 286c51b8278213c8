"""Logs of ranks, from one attempt to the next and from one job to the next: kept under other names,
the latest few.
"""

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
    """Make way for a new job: put the logs and error files of the one before into a private
    ``earlier-N``.

    N counts up; the last five such directories are kept. Return the new one; ``None`` if there was
    nothing to move.

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
    """Call ``rank-N.log`` of the attempt that has ended ``rank-N.attempt-K.log``; return the new
    path by the old one.

    Those of the last three attempts are kept. Error files are removed, so that none is taken for a
    later one's.
    """
    moved: dict[Path, Path] = {}
    for path in _files(log_dir):
        if found := _CURRENT.fullmatch(path.name):
            moved[path] = path.with_name(f"{found[1]}.attempt-{attempt}.log")
            with suppress(
                OSError
            ):  # a directory that has become read-only: the next attempt will say so
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
    """Return entries with the names of earlier jobs' directories, by number; an entry may be
    something else.
    """
    return {
        int(found[1]): path
        for path in _files(log_dir)
        if (found := _EARLIER_JOB.fullmatch(path.name))
    }


def _move(path: Path, place: Path) -> None:
    path.rename(place)
    if not place.is_symlink():
        with suppress(OSError):  # another person's file, in a directory that is ours alone now
            place.chmod(0o600)


def _remove(job: Path) -> None:
    """Remove an earlier job's directory, but nothing that a person has put there; what cannot be
    removed stays.
    """
    if job.is_symlink() or not job.is_dir():
        return
    with suppress(OSError):
        for path in _files(job):
            if _is_ours(path):
                path.unlink()
        job.rmdir()
