"""What a container leaves for its platform: the model, curves and logs, checkpoints, the reason of a failure."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from allhands.checkpoints import BEST, CHECKPOINTS, MANIFEST, RUN_NAME, checkpoints_in
from allhands.cluster.logs import clear_logs
from allhands.data.templates import TEMPLATE_FILE
from allhands.errors import CheckpointError, StorageError
from allhands.io.files import make_directory, make_unused, storage_error, sync
from allhands.observe.journal import EVENTS_FILE

_MODEL = ("adapters.safetensors", "adapter_config.json")
# Of the run directory, beside its checkpoints.
_RECORDS = (RUN_NAME, "metrics.jsonl", "loss.png", "memory.png", EVENTS_FILE)
_LOGS = "logs"
# SageMaker shows the first 1024 characters of the file, Kubernetes 4096 bytes.
_REASON_BYTES = 1000
_MIRROR_S = 5.0
_MIRROR_LOGS_S = 60.0  # they grow all the time, and are copied whole


def tell_failure(file: Path | None, reason: str, warn: Callable[[str], None]) -> None:
    """Write the reason of a failure where the platform looks for it; what cannot be written is said.

    The file may be a mount of its own, so it is written in place.
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
    """Why the supervised run in this directory failed, by its own records."""
    events = _events(run_dir / EVENTS_FILE)
    for kinds in (("failed", "fault"), ("given up",)):
        if event := next((one for one in reversed(events) if one.get("kind") in kinds), None):
            return _text_of(run_dir / _LOGS / f"error-rank-{event.get('rank')}.json") or str(event["message"])
    return f"the training ended with exit code {code}"


def _events(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with suppress(OSError, UnicodeDecodeError):
        for line in file.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                if isinstance(event := json.loads(line), dict):
                    found.append(cast(dict[str, Any], event))
    return found


def _text_of(file: Path) -> str | None:
    with suppress(OSError, ValueError):
        content: Any = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and (text := cast(dict[str, Any], content).get("text")):
            return str(text)
    return None


# --- the model -----------------------------------------------------------------------------------------


def publish_model(run_dir: Path, target: Path) -> bool:
    """Copy the trained adapter, and the best one beside it, to ``target``: all files or none.

    What makes a directory an adapter, its configuration, comes last. ``False``: there is nothing to copy.

    Raises:
        StorageError: they cannot be copied; ``target`` has none of them then.
    """
    if not all((run_dir / name).is_file() for name in _MODEL):
        return False
    template = [TEMPLATE_FILE] if (run_dir / TEMPLATE_FILE).is_file() else []
    names = [f"{BEST}/{name}" for name in (*_MODEL, *template) if (run_dir / BEST / name).is_file()]
    copy_whole([(run_dir / name, target / name) for name in (*names, *template, *_MODEL)])
    return True


def copy_whole(pairs: Sequence[tuple[Path, Path]]) -> None:
    """Copy files, each with its place: every one beside its place first, and only then all into it, in this order.

    Directories are not renamed, because buckets that are mounted as files cannot do that.

    Raises:
        StorageError: something cannot be written; none of the places has its file then.
    """
    drafts, placed = list[tuple[Path, Path]](), list[Path]()
    target = pairs[0][1] if pairs else Path()
    try:
        for source, target in pairs:
            make_directory(target.parent)
            draft = make_unused(target.parent, f".{target.name}.draft-") / target.name
            drafts.append((draft, target))
            _copy(source, draft)
        for draft, target in drafts:
            draft.replace(target)
            placed.append(target)
    except OSError as error:
        for path in placed:
            path.unlink(missing_ok=True)
        raise storage_error(target, error) from None
    finally:
        for draft, _ in drafts:
            shutil.rmtree(draft.parent, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    """Raises OSError, also if what was read is not what was written."""
    shutil.copyfile(source, target)
    with suppress(OSError):  # not every mounted bucket can
        sync(target)
    if target.stat().st_size != source.stat().st_size:
        raise OSError(f"only {target.stat().st_size} of {source.stat().st_size} bytes were written")


def publish_records(run_dir: Path, target: Path) -> None:
    """Copy curves, metrics, events and logs to ``target``.

    Raises:
        StorageError: they cannot be copied.
    """
    files = [Path(name) for name in _RECORDS if (run_dir / name).is_file() and not name.startswith(".")]
    copy_whole([(run_dir / name, target / name) for name in (*files, *_logs_of(run_dir))])


def _logs_of(run_dir: Path) -> list[Path]:
    """The files in its directory of logs, seen from the run's."""
    return [path.relative_to(run_dir) for path in sorted((run_dir / _LOGS).rglob("*")) if path.is_file()]


# --- checkpoints in a bucket -----------------------------------------------------------------------------


class Mirror:
    """Keeps checkpoints and logs of a run where files can be written but directories not be renamed, as in buckets.

    A checkpoint's manifest is copied last, and training passes over checkpoints without one: whoever is killed
    leaves the one before.

    Args:
        local: the run directory.
        remote: where everything is kept too.
        warn: is told once what cannot be copied; the training goes on.
        logs_only: of a computer whose ranks do not write the run's checkpoints.
    """

    def __init__(self, local: Path, remote: Path, warn: Callable[[str], None], *, logs_only: bool = False) -> None:
        self._logs_only = logs_only
        self._logs_copied = time.monotonic()
        self._local = local
        self._remote = remote
        self._warn = warn
        self._warned = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def restore(self) -> None:
        """Bring back what an earlier start of the job has left; its logs make way for new ones.

        Raises:
            StorageError: it cannot be copied.
            CheckpointError: it cannot be read.
        """
        if self._logs_only:
            return
        if (self._remote / _LOGS).is_dir():
            try:
                clear_logs(self._remote / _LOGS)
            except StorageError as error:
                self._warn(f"the logs of an earlier start will be written over: {error.message}")
        whole = [path for path in checkpoints_in(self._remote) if (path / MANIFEST).is_file()]
        if not whole:
            return
        best = self._remote / BEST
        directories = [*whole, *([best] if (best / MANIFEST).is_file() else [])]
        files = [file for path in directories for file in sorted(path.iterdir()) if file.is_file()]
        files += [file for name in (*_RECORDS, *_MODEL, TEMPLATE_FILE) if (file := self._remote / name).is_file()]
        copy_whole([(file, self._local / file.relative_to(self._remote)) for file in files])

    def start(self) -> None:
        """Copy every few seconds what is new, until :meth:`finish`."""
        self._thread.start()

    def finish(self) -> None:
        """Copy what is left."""
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
                self._copy_new()
            if self._ended.is_set() or time.monotonic() - self._logs_copied >= _MIRROR_LOGS_S:
                self._logs_copied = time.monotonic()
                self._copy_changed(_logs_of(self._local))
            self._warned = False
        except Exception as error:
            if not self._warned:
                what = "logs" if self._logs_only else "checkpoints and logs"
                self._warn(f"{what} could not be copied to {self._remote}: {error}")
            self._warned = True

    def _copy_new(self) -> None:
        own = {path.name: path for path in checkpoints_in(self._local) if (path / MANIFEST).is_file()}
        best = self._local / BEST
        for path in [*reversed(own.values()), *([best] if (best / MANIFEST).is_file() else [])]:
            self._copy_checkpoint(path, self._remote / path.relative_to(self._local))
        self._copy_changed([Path(name) for name in (*_RECORDS, *_MODEL, TEMPLATE_FILE)])
        if own:
            for path in checkpoints_in(self._remote / CHECKPOINTS):
                if path.name not in own:
                    (path / MANIFEST).unlink(missing_ok=True)
                    shutil.rmtree(path, ignore_errors=True)

    def _copy_changed(self, names: Sequence[Path]) -> None:
        for name in names:
            if (self._local / name).is_file() and not _same(self._local / name, self._remote / name):
                copy_whole([(self._local / name, self._remote / name)])

    def _copy_checkpoint(self, source: Path, target: Path) -> None:
        with suppress(FileNotFoundError, CheckpointError):  # pruned meanwhile: the next round has the newer one
            manifest = (source / MANIFEST).read_bytes()
            if (target / MANIFEST).is_file() and (target / MANIFEST).read_bytes() == manifest:
                return
            (target / MANIFEST).unlink(missing_ok=True)
            make_directory(target)
            for file in sorted(source.iterdir()):
                if file.name != MANIFEST:
                    _copy(file, target / file.name)
            (target / MANIFEST).write_bytes(manifest)


def _same(one: Path, other: Path) -> bool:
    """Whether a copy is as long as, and no older than, what it is a copy of."""
    with suppress(OSError):
        first, second = os.stat(one), os.stat(other)
        return first.st_size == second.st_size and first.st_mtime <= second.st_mtime
    return False
