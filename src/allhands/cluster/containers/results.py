"""Copies of a container's results for its platform: model, curves, logs, checkpoints, reason of a
failure.
"""

from __future__ import annotations

import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from allhands.checkpoints import BEST, CHECKPOINTS, MANIFEST, RUN_NAME, checkpoints_in
from allhands.cluster.logs import clear_logs
from allhands.data.templates import TEMPLATE_FILE
from allhands.errors import CheckpointError, StorageError
from allhands.io.files import make_directory, storage_error, sync
from allhands.observe.journal import EVENTS_FILE, LOGS, read_events
from allhands.runtime.threads import in_background

# The configuration comes last: it makes a directory an adapter.
_MODEL = (TEMPLATE_FILE, "adapters.safetensors", "adapter_config.json")
_ENDS = ("failed", "fault", "given up")  # kinds of events with the reason of a failure
_RECORDS = ("metrics.jsonl", "loss.png", "memory.png", EVENTS_FILE)
# Files besides checkpoints and logs with which an interrupted run goes on.
_STATE = (RUN_NAME, *_RECORDS, *_MODEL)
_REASON_BYTES = 1000  # SageMaker shows the first 1024 characters of the file, Kubernetes 4096 bytes
_MIRROR_S = 5.0
_MIRROR_LOGS_S = 60.0  # logs grow all the time, and are copied whole


def tell_failure(file: Path | None, reason: str, warn: Callable[[str], None]) -> None:
    """Write the reason of a failure to the platform's file, in place, because the file may be a
    mount of its own.
    """
    if file is None:
        return
    text = reason.strip().encode()[:_REASON_BYTES].decode(errors="ignore")
    try:
        make_directory(file.parent)
        file.write_text(text + "\n", encoding="utf-8")
    except Exception as error:
        warn(f"the reason of the failure could not be written to {file}: {error}")


def reason_of(run_dir: Path, code: int) -> str:
    """Return the reason why the supervised run in this directory failed, from its own records."""
    ends = [one for one in read_events(run_dir / EVENTS_FILE) if one["kind"] in _ENDS]
    if not ends:
        return f"the training ended with exit code {code}"
    # The last fault says more than the supervisor that has given up because of it.
    last = sorted(ends, key=lambda one: one["kind"] != "given up")[-1]
    with suppress(OSError, ValueError, KeyError, TypeError):
        file = run_dir / LOGS / f"error-rank-{last['rank']}.json"
        if text := json.loads(file.read_text("utf-8"))["text"]:
            return str(text)
    return str(last["message"])


# --- copies ---------------------------------------------------------------------------------------


def publish_model(run_dir: Path, target: Path) -> bool:
    """Copy the trained adapter and the best one to ``target``, all files or none; return False if
    there is no adapter.

    Raises:
        StorageError: a file cannot be copied.
    """
    if not all((run_dir / name).is_file() for name in _MODEL[1:]):
        return False
    paths = [Path(directory, name) for directory in (BEST, "") for name in _MODEL]
    names = [path for path in paths if (run_dir / path).is_file()]
    for place, name in enumerate(names):
        try:
            _copy(run_dir / name, target / name)
        except StorageError:
            for copied in names[:place]:
                (target / copied).unlink(missing_ok=True)
            raise
    return True


def publish_records(run_dir: Path, target: Path) -> None:
    """Copy curves, metrics, events and logs to ``target``.

    Raises:
        StorageError: a file cannot be copied.
    """
    _copy_files(run_dir, target, (*_RECORDS, *_logs_of(run_dir)))


def _copy_files(source: Path, target: Path, names: Iterable[str | Path]) -> None:
    """Copy the existing files among ``names``, in this order.

    Raises:
        StorageError: a file cannot be copied.
    """
    for name in names:
        with suppress(FileNotFoundError):  # it has vanished meanwhile
            if (source / name).is_file():
                _copy(source / name, target / name)


def _copy(source: Path, target: Path) -> None:
    """Copy a file under another name and rename it; buckets can rename files, but not directories.

    Raises:
        FileNotFoundError: ``source`` is gone.
        StorageError: the copy cannot be written.
    """
    try:
        _write(target, lambda draft: shutil.copyfile(source, draft), lambda: source.stat().st_size)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not source.exists():
            raise
        raise storage_error(target, error) from None


def _write(target: Path, fill: Callable[[Path], object], size: Callable[[], int]) -> None:
    make_directory(target.parent)
    draft = target.with_name(f".{target.name}.draft-{secrets.token_hex(4)}")
    try:
        fill(draft)
        with suppress(OSError):  # not every mounted bucket can sync
            sync(draft)
        if draft.stat().st_size != (wanted := size()):
            raise OSError(f"only {draft.stat().st_size} of {wanted} bytes were written")
        draft.replace(target)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _logs_of(run_dir: Path) -> list[Path]:
    return [
        path.relative_to(run_dir) for path in sorted((run_dir / LOGS).rglob("*")) if path.is_file()
    ]


def _checkpoints_of(run_dir: Path) -> list[Path]:
    """Return a run's checkpoints that have a manifest, the last step first, and the best one."""
    return [
        path for path in (*checkpoints_in(run_dir), run_dir / BEST) if (path / MANIFEST).is_file()
    ]


@dataclass
class Mirror:
    """A copy of a run's checkpoints and logs in a bucket, where directories cannot be renamed.

    A checkpoint's manifest is copied last, and training ignores checkpoints without a manifest. So
    after a kill the last complete copy is used. A checkpoint that is replaced, as the best one is,
    is copied beside its predecessor first.

    Attributes:
        local: the run directory.
        remote: the copy.
        warn: called with the first failure of a series; training goes on.
        logs_only: True for a computer whose ranks do not write the run's checkpoints.
    """

    local: Path
    remote: Path
    warn: Callable[[str], None]
    logs_only: bool = False
    _copying: Future[None] | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _logs_copied: float = field(default_factory=time.monotonic)
    _warned: bool = False

    def restore(self) -> None:
        """Copy back the checkpoints of an earlier start of the job, and set its logs aside.

        Raises:
            StorageError: a file cannot be copied.
            CheckpointError: the directory of the copy cannot be read.
        """
        if self.logs_only:
            return
        if (self.remote / LOGS).is_dir():
            try:
                clear_logs(self.remote / LOGS)
            except StorageError as error:
                self.warn(f"the logs of an earlier start will be overwritten: {error.message}")
        for path in (*checkpoints_in(self.remote), self.remote / BEST):
            _finish_exchange(path)
        if whole := _checkpoints_of(self.remote):
            files = (path.relative_to(self.remote) for one in whole for path in one.iterdir())
            _copy_files(self.remote, self.local, (*files, *_STATE))

    def start(self) -> None:
        """Copy new files every few seconds until :meth:`finish`."""
        self._copying = in_background(self._run)

    def finish(self) -> None:
        """Stop the thread, and copy the rest."""
        self._ended.set()
        if self._copying is not None:
            self._copying.result()
        self._try()

    def _run(self) -> None:
        while not self._ended.wait(_MIRROR_S):
            self._try()

    def _try(self) -> None:
        try:
            if not self.logs_only:
                self._copy_run()
            if self._ended.is_set() or time.monotonic() - self._logs_copied >= _MIRROR_LOGS_S:
                self._logs_copied = time.monotonic()
                self._copy_changed(_logs_of(self.local))
            self._warned = False
        except Exception as error:
            if not self._warned:
                what = "logs" if self.logs_only else "checkpoints and logs"
                self.warn(f"{what} could not be copied to {self.remote}: {error}")
            self._warned = True

    def _copy_run(self) -> None:
        whole, copied = _checkpoints_of(self.local), 0
        for path in sorted(whole):
            with suppress(
                FileNotFoundError, CheckpointError
            ):  # it was pruned meanwhile: the next round copies a newer one
                _copy_checkpoint(path, self.remote / path.relative_to(self.local))
                copied += path.name != BEST
        self._copy_changed(_STATE)
        kept = {path.name for path in whole} - {BEST}
        for path in checkpoints_in(self.remote / CHECKPOINTS) if copied else []:
            if path.name not in kept:
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)

    def _copy_changed(self, names: Iterable[str | Path]) -> None:
        _copy_files(self.local, self.remote, filter(self._has_changed, names))

    def _has_changed(self, name: str | Path) -> bool:
        with suppress(FileNotFoundError):
            new, old = (self.local / name).stat(), (self.remote / name).stat()
            return old.st_size != new.st_size or old.st_mtime < new.st_mtime
        return True


def _copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a checkpoint; at each moment one is whole in ``target``, or in the place of its
    successor.

    Raises:
        FileNotFoundError: ``source`` is gone, or was replaced meanwhile.
        StorageError: the copy cannot be written.
    """
    manifest, copied = (source / MANIFEST).read_bytes(), target / MANIFEST
    _finish_exchange(target)
    if copied.is_file() and copied.read_bytes() == manifest:
        return
    place = _successor(target) if copied.is_file() else target
    for file in source.iterdir():
        if file.name != MANIFEST:
            _copy(file, place / file.name)
    if (source / MANIFEST).read_bytes() != manifest:
        raise FileNotFoundError(f"{source} was replaced")
    try:
        _write(place / MANIFEST, lambda draft: draft.write_bytes(manifest), manifest.__len__)
    except OSError as error:
        raise storage_error(place / MANIFEST, error) from None
    _finish_exchange(target)


def _successor(target: Path) -> Path:
    return target.with_name(f".{target.name}.next")


def _finish_exchange(target: Path) -> None:
    """Move the files of a whole successor to the place of ``target``; remove one that is not whole.

    Raises:
        StorageError: a file cannot be moved.
    """
    successor = _successor(target)
    try:
        if (successor / MANIFEST).is_file():
            if (target / MANIFEST).is_file():
                (target / MANIFEST).unlink()
                for old in target.iterdir():
                    old.unlink()
            make_directory(target)
            for file in sorted(successor.iterdir(), key=lambda path: path.name == MANIFEST):
                file.replace(target / file.name)
    except OSError as error:
        raise storage_error(target, error) from None
    shutil.rmtree(successor, ignore_errors=True)
