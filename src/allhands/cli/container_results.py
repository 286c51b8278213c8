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
from contextlib import suppress
from pathlib import Path

from allhands.checkpoints import BEST, CHECKPOINTS, MANIFEST, RUN_NAME, checkpoints_in
from allhands.cluster.logs import clear_logs
from allhands.data.templates import TEMPLATE_FILE
from allhands.errors import CheckpointError, StorageError
from allhands.io.files import make_directory, storage_error, sync
from allhands.observe.journal import EVENTS_FILE, read_events

# The configuration comes last: it makes a directory an adapter.
_MODEL = (TEMPLATE_FILE, "adapters.safetensors", "adapter_config.json")
_RECORDS = ("metrics.jsonl", "loss.png", "memory.png", EVENTS_FILE)
_LOGS = "logs"
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
    events = read_events(run_dir / EVENTS_FILE)
    for kinds in (("failed", "fault"), ("given up",)):
        for event in reversed(events):
            if event.get("kind") in kinds:
                with suppress(OSError, ValueError, KeyError, TypeError):
                    error = json.loads(
                        (run_dir / _LOGS / f"error-rank-{event['rank']}.json").read_text("utf-8")
                    )
                    if error["text"]:
                        return str(error["text"])
                return str(event["message"])
    return f"the training ended with exit code {code}"


# --- copies ---------------------------------------------------------------------------------------


def publish_model(run_dir: Path, target: Path) -> bool:
    """Copy the trained adapter and the best one to ``target``, all files or none; return False if
    there is no adapter.

    Raises:
        StorageError: a file cannot be copied.
    """
    if not all((run_dir / name).is_file() for name in _MODEL[1:]):
        return False
    _copy_all(
        run_dir, target, (Path(directory, name) for directory in (BEST, "") for name in _MODEL)
    )
    return True


def publish_records(run_dir: Path, target: Path) -> None:
    """Copy curves, metrics, events and logs to ``target``.

    Raises:
        StorageError: a file cannot be copied.
    """
    _copy_all(run_dir, target, (*map(Path, _RECORDS), *_logs_of(run_dir)))


def _copy_all(source: Path, target: Path, names: Iterable[Path]) -> None:
    """Copy the existing files among ``names``, in this order.

    If a copy cannot be written, the copies before it are removed.

    Raises:
        StorageError: a file cannot be copied.
        FileNotFoundError: a file has vanished meanwhile.
    """
    copied: list[Path] = []
    for name in names:
        if (source / name).is_file():
            try:
                _copy(source / name, target / name)
            except StorageError:
                for path in copied:
                    path.unlink(missing_ok=True)
                raise
            copied.append(target / name)


def _copy(source: Path, target: Path) -> None:
    """Copy a file under another name and rename it; buckets can rename files, but not directories.

    Raises:
        FileNotFoundError: ``source`` is gone.
        StorageError: the copy cannot be written.
    """
    make_directory(target.parent)
    draft = target.with_name(f".{target.name}.draft-{secrets.token_hex(4)}")
    try:
        shutil.copyfile(source, draft)
        with suppress(OSError):  # not every mounted bucket can sync
            sync(draft)
        if draft.stat().st_size != (size := source.stat().st_size):
            raise OSError(f"only {draft.stat().st_size} of {size} bytes were written")
        draft.replace(target)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not source.exists():
            raise
        raise storage_error(target, error) from None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _logs_of(run_dir: Path) -> list[Path]:
    return [
        path.relative_to(run_dir) for path in sorted((run_dir / _LOGS).rglob("*")) if path.is_file()
    ]


def _checkpoints_of(run_dir: Path) -> list[Path]:
    """Return a run's checkpoints that have a manifest, the last step first, and the best one."""
    return [
        path for path in (*checkpoints_in(run_dir), run_dir / BEST) if (path / MANIFEST).is_file()
    ]


class Mirror:
    """A copy of a run's checkpoints and logs in a bucket, where directories cannot be renamed.

    A checkpoint's manifest is copied last, and training ignores checkpoints without a manifest. So
    after a kill the last complete copy is used.

    Args:
        local: the run directory.
        remote: the copy.
        warn: called with the first failure of a series; training goes on.
        logs_only: True for a computer whose ranks do not write the run's checkpoints.
    """

    def __init__(
        self, local: Path, remote: Path, warn: Callable[[str], None], *, logs_only: bool = False
    ) -> None:
        self._local = local
        self._remote = remote
        self._warn = warn
        self._logs_only = logs_only
        self._logs_copied = time.monotonic()
        self._warned = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def restore(self) -> None:
        """Copy back the checkpoints of an earlier start of the job, and set its logs aside.

        Raises:
            StorageError: a file cannot be copied.
            CheckpointError: the directory of the copy cannot be read.
        """
        if self._logs_only:
            return
        if (self._remote / _LOGS).is_dir():
            try:
                clear_logs(self._remote / _LOGS)
            except StorageError as error:
                self._warn(f"the logs of an earlier start will be overwritten: {error.message}")
        if whole := _checkpoints_of(self._remote):
            files = [
                path.relative_to(self._remote) for one in whole for path in sorted(one.iterdir())
            ]
            _copy_all(
                self._remote, self._local, (*files, *map(Path, (RUN_NAME, *_RECORDS, *_MODEL)))
            )

    def start(self) -> None:
        """Copy new files every few seconds until :meth:`finish`."""
        self._thread.start()

    def finish(self) -> None:
        """Stop the thread, and copy the rest."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._try()

    def _run(self) -> None:
        while not self._ended.wait(_MIRROR_S):
            self._try()

    def _try(self) -> None:
        try:
            if not self._logs_only:
                self._copy_run()
            if self._ended.is_set() or time.monotonic() - self._logs_copied >= _MIRROR_LOGS_S:
                self._logs_copied = time.monotonic()
                self._copy_changed(_logs_of(self._local))
            self._warned = False
        except Exception as error:
            if not self._warned:
                what = "logs" if self._logs_only else "checkpoints and logs"
                self._warn(f"{what} could not be copied to {self._remote}: {error}")
            self._warned = True

    def _copy_run(self) -> None:
        whole = _checkpoints_of(self._local)
        for path in sorted(whole):
            with suppress(
                FileNotFoundError, CheckpointError
            ):  # it was pruned meanwhile: the next round copies a newer one
                self._copy_checkpoint(path, self._remote / path.relative_to(self._local))
        self._copy_changed(map(Path, (RUN_NAME, *_RECORDS, *_MODEL)))
        kept = {path.name for path in whole} - {BEST}
        for path in checkpoints_in(self._remote / CHECKPOINTS) if kept else []:
            if path.name not in kept:
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)

    def _copy_changed(self, names: Iterable[Path]) -> None:
        for name in names:
            source, target = self._local / name, self._remote / name
            with suppress(FileNotFoundError):
                found = source.stat()
                old = target.stat() if target.exists() else None
                if old is None or old.st_size != found.st_size or old.st_mtime < found.st_mtime:
                    _copy(source, target)

    def _copy_checkpoint(self, source: Path, target: Path) -> None:
        manifest = (source / MANIFEST).read_bytes()
        if (target / MANIFEST).is_file():
            if (target / MANIFEST).read_bytes() == manifest:
                return
            (target / MANIFEST).unlink()
        for file in sorted(source.iterdir(), key=lambda path: path.name == MANIFEST):
            _copy(file, target / file.name)
