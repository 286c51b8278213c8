"""Writing checkpoints and adapters beside the training, which stands still only until its state is held."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from allhands.checkpoints import BEST, Checkpoint, Tensor, checkpoint_path, prune, write_checkpoint
from allhands.checkpoints.tensors import safetensors_pieces
from allhands.errors import AllhandsError, StorageError
from allhands.faults import fire
from allhands.files import make_directory, storage_error, write_whole
from allhands.metrics import SavedReport, Warned
from allhands.model.adapters import CONFIG_FILE, adapter_config_text, save_adapter_config
from allhands.train.state import WEIGHTS_FILE, LoopState

# "last" and "best" become the adapter to use; "suspect" weights, after which a loss was NaN, only a numbered file.
SaveKind = Literal["last", "best", "suspect"]


class CopyError(StorageError):
    """The checkpoint is whole; the adapter beside it could not be written."""


@dataclass(frozen=True)
class SavePlan:
    """What is kept, where.

    Attributes:
        directory: the adapter path.
        keep_last: checkpoints to keep; 0 writes none.
        keep_every: also keep those of every so many batches.
        numbered: whether adapters are also written under their batch's number, as mlx_lm does.
        adapter_config: content of ``adapter_config.json``.
        constants: what every checkpoint of the run says; called in the writing thread, because hashes take long.
        busy: called as the writing gets on.
    """

    directory: Path
    run_id: str
    rank: int
    keep_last: int
    keep_every: int | None
    numbered: bool
    adapter_config: dict[str, Any]
    constants: Callable[[], dict[str, Any]]
    busy: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class _Request:
    kind: SaveKind
    iteration: int
    best_iteration: int | None
    state: dict[str, Any]
    tensors: dict[str, list[Tensor]]
    pause_s: float


class Saver:
    """Writes in a thread of its own, one request after the other.

    Args:
        plan: what goes where.
        hold: the arrays to write by file, which stay as they are while training goes on.
        describe: the state of the run as JSON values.
    """

    def __init__(
        self,
        plan: SavePlan,
        hold: Callable[[], dict[str, list[Tensor]]],
        describe: Callable[[LoopState], dict[str, Any]],
    ) -> None:
        self._plan = plan
        self._hold = hold
        self._describe = describe
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="allhands-save")
        self._pending: list[tuple[int, Future[SavedReport]]] = []
        self._troubles: deque[Warned] = deque()

    def save(self, state: LoopState, kind: SaveKind) -> None:
        """Begin to write what the run is now.

        What an earlier batch left to write is waited for: two versions of all weights are enough in memory.
        """
        begun = time.perf_counter()
        wait([future for iteration, future in self._pending if iteration < state.iteration])
        tensors, described = self._hold(), self._describe(state)
        pause_s = time.perf_counter() - begun
        request = _Request(kind, state.iteration, state.best_iteration, described, tensors, pause_s)
        self._pending.append((state.iteration, self._thread.submit(self._write, request)))

    def saved(self, wait_for_all: bool) -> list[SavedReport | Warned | AllhandsError]:
        """What has been written, or could not be, since the last call."""
        if wait_for_all:
            wait([future for _, future in self._pending])
        # Each is looked at once: one that ends meanwhile is told the next time.
        waiting: list[tuple[int, Future[SavedReport]]] = []
        done: list[Future[SavedReport]] = []
        for entry in self._pending:
            if entry[1].done():
                done.append(entry[1])
            else:
                waiting.append(entry)
        self._pending = waiting
        troubles = [self._troubles.popleft() for _ in range(len(self._troubles))]
        return [*troubles, *(_outcome(future) for future in done)]

    def close(self) -> None:
        """Wait for what is being written."""
        self._thread.shutdown()

    def _write(self, request: _Request) -> SavedReport:
        begun = time.perf_counter()
        try:
            path = self._write_best(request) if request.kind == "best" else self._write_last(request)
        except OSError as error:
            raise storage_error(Path(error.filename or self._plan.directory), error) from error
        return SavedReport(request.iteration, str(path), request.pause_s, time.perf_counter() - begun)

    def _write_best(self, request: _Request) -> Path:
        target = self._plan.directory / BEST
        self._checkpoint(target, request)
        return target / WEIGHTS_FILE

    def _write_last(self, request: _Request) -> Path:
        """The checkpoint, room for the next one, then the copies that mlx_lm and people look for."""
        plan = self._plan
        fire("save", request.iteration, plan.rank)
        make_directory(plan.directory, private=True)
        written = None
        if request.kind == "last" and plan.keep_last:
            try:
                written = self._checkpoint(checkpoint_path(plan.directory, request.iteration), request)
            finally:
                # Also where it could not be written: what need not be kept may be what fills the disk.
                self._prune(request, written)
        fire("save", request.iteration, plan.rank)
        try:
            return self._write_copies(request)
        except (AllhandsError, OSError) as error:
            if written is None:
                raise
            told = error if isinstance(error, AllhandsError) else storage_error(plan.directory, error)
            raise CopyError(told.message, where=told.where, hint=told.hint) from error

    def _write_copies(self, request: _Request) -> Path:
        """The weights under their batch's number and, unless they are suspect, as the adapter to use."""
        plan, weights = self._plan, request.tensors[WEIGHTS_FILE]
        numbered = plan.directory / f"{request.iteration:07d}_{WEIGHTS_FILE}"
        if plan.numbered or request.kind == "suspect":
            write_whole(numbered, lambda draft: _write_tensors(draft, weights), private=True)
        if request.kind == "suspect":
            return numbered
        fire("save", request.iteration, plan.rank)
        # The configuration is written with the weights, not before: until then what lies there may be another run's.
        save_adapter_config(plan.adapter_config, plan.directory)
        write_whole(plan.directory / WEIGHTS_FILE, lambda draft: _write_tensors(draft, weights), private=True)
        fire("save", request.iteration, plan.rank)
        return plan.directory / WEIGHTS_FILE

    def _prune(self, request: _Request, written: Checkpoint | None) -> None:
        plan = self._plan
        protected = () if request.best_iteration is None else (request.best_iteration,)
        try:
            prune(plan.directory, plan.keep_last, plan.keep_every, protected, written)
        except AllhandsError as error:
            text = f"a checkpoint that need not be kept is still there ({error.where}: {error.message})"
            self._troubles.append(Warned(request.iteration, text))

    def _checkpoint(self, target: Path, request: _Request) -> Checkpoint:
        texts = {CONFIG_FILE: adapter_config_text(self._plan.adapter_config)}
        return write_checkpoint(
            target,
            step=request.iteration,
            run_id=self._plan.run_id,
            state={**request.state, **self._plan.constants()},
            tensors=request.tensors,
            texts=texts,
            progress=self._plan.busy,
        )


def _write_tensors(path: Path, tensors: list[Tensor]) -> None:
    with path.open("wb") as stream:
        stream.writelines(safetensors_pieces(tensors))


def _outcome(future: Future[SavedReport]) -> SavedReport | AllhandsError:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, AllhandsError):
        return error
    raise error
