"""Saving of checkpoints and adapters in a thread, while the training goes on.

The training waits only until its present state is held in memory.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from allhands.checkpoints.arrays import Held, snapshot
from allhands.checkpoints.format import WEIGHTS_FILE
from allhands.checkpoints.layout import BEST, checkpoint_path
from allhands.checkpoints.parts import Delivery, PartExchange
from allhands.checkpoints.pruning import prune
from allhands.checkpoints.reading import Checkpoint, open_checkpoint, sum_of
from allhands.checkpoints.writing import drafting
from allhands.data.templates import TEMPLATE_FILE
from allhands.distributed.backend import Communicator
from allhands.errors import AllhandsError, CheckpointError, StorageError
from allhands.io.files import make_directory, storage_error, storage_error_of, write_whole
from allhands.io.tensors import Tensor, safetensors_pieces
from allhands.model.adapters import (
    CONFIG_FILE,
    adapter_config_text,
    save_adapter_config,
    save_template,
)
from allhands.model.fresh import ModelFiles
from allhands.model.load import BEST_MODEL, MODEL
from allhands.observe.metrics import SavedReport, Warned
from allhands.runtime.faults import inject_fault

# "last" also becomes the adapter to use. "best" goes into the directory of the best. "suspect"
# weights, after which a number was not finite, become only a numbered file. "same" is "last" of a
# resumed run that has not changed: only missing files are written.
SaveKind = Literal["last", "best", "suspect", "same"]
_Tensors = Callable[[], dict[str, list[Tensor]]]
Save = Callable[[Any, SaveKind], None]
Saved = Callable[[bool], list[SavedReport | Warned | AllhandsError]]


class Progress(Protocol):
    """The part of a run's progress that saving needs."""

    step: int
    iteration: int
    best_step: int | None


class CopyError(StorageError):
    """Raised if the checkpoint is whole but the adapter beside it could not be written."""


def not_saved(failure: AllhandsError) -> str:
    """Return the warning about a checkpoint that could not be written; the training goes on."""
    adapter_alone = isinstance(failure, CopyError)
    what = (
        "the checkpoint is there, but not its adapter"
        if adapter_alone
        else "no checkpoint was written"
    )
    return f"{what} ({failure.where}: {failure.message}); training goes on"


@dataclass(frozen=True)
class SavePlan:
    """The files that are kept, and their places and contents.

    Attributes:
        directory: the run's directory (the adapter path).
        run_id: identifier of the run.
        rank: number of this rank.
        keep_last: number of checkpoints to keep; 0: none are written.
        keep_every: also keep checkpoints whose iteration is a multiple of this number.
        numbered: whether adapters are also written under their iteration's number, as mlx_lm does.
        adapter_config: content of ``adapter_config.json``.
        chat_template: text of the chat template beside it; ``None``: the model's own is used.
        constants: returns the facts that every checkpoint of the run records; called in the writing
            thread, because hashes take long.
        model: writes the weights as a complete model, in place of an adapter; ``None``: an adapter
            is written.
        busy: called as the writing proceeds.
        room: makes way for the run's files; called before each save until it has succeeded.
    """

    directory: Path
    run_id: str
    rank: int
    keep_last: int
    keep_every: int | None
    numbered: bool
    adapter_config: dict[str, Any]
    constants: Callable[[], dict[str, Any]]
    chat_template: str | None = None
    model: ModelFiles | None = None
    busy: Callable[[], None] = lambda: None
    room: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class _Request:
    kind: SaveKind
    step: int
    iteration: int
    best_step: int | None
    state: dict[str, Any]
    tensors: _Tensors
    delivery: Delivery | None
    pause_s: float
    waits: bool


def checkpoint_of(directory: Path, step: int, kind: SaveKind, keep_last: int) -> Path | None:
    """Return the place of the checkpoint of a save of this kind; ``None`` if it writes none."""
    if kind == "best":
        return directory / BEST
    return checkpoint_path(directory, step) if keep_last and kind != "suspect" else None


class Saver:
    """Writes checkpoints in a thread, one request after the other.

    Args:
        plan: the files to keep.
        hold: holds the present arrays while training goes on; returns a function that returns them,
            by file, in the writing thread.
        describe: returns the state of the run as JSON values.
        parts: exchange of arrays that ranks have divided; with it all ranks save together.
        waits: returns whether training must wait until all is written, see :class:`Held`.
    """

    def __init__(
        self,
        plan: SavePlan,
        hold: Callable[[], _Tensors],
        describe: Callable[[Any], dict[str, Any]],
        parts: PartExchange | None = None,
        waits: Callable[[], bool] = lambda: False,
    ) -> None:
        self._plan = plan
        self._waits = waits
        self._hold = hold
        self._describe = describe
        self._parts = parts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="allhands-save")
        self._pending: list[tuple[int, Future[SavedReport | None]]] = []
        self._troubles: deque[Warned] = deque()
        self._has_room = False
        self._held: tuple[int, weakref.ref[_Tensors]] | None = None

    def save(self, state: Progress, kind: SaveKind) -> None:
        """Begin to write the present state of the run.

        It first waits until earlier steps are written, so that at most two versions of all weights
        are in memory.
        """
        begun, plan = time.perf_counter(), self._plan
        wait([future for step, future in self._pending if step < state.step])
        target = checkpoint_of(plan.directory, state.step, kind, plan.keep_last)
        delivery = None if self._parts is None else self._parts.begin(target)
        tensors, described, waits = self._tensors(state.step), self._describe(state), self._waits()
        pause_s = time.perf_counter() - begun
        facts = (kind, state.step, state.iteration, state.best_step, described, tensors)
        future = self._thread.submit(self._write, _Request(*facts, delivery, pause_s, waits))
        self._pending.append((state.step, future))
        if waits:
            wait([future])

    def _tensors(self, step: int) -> _Tensors:
        """Return the held tensors of a step, shared by all its saves that are not written yet."""
        held = self._held[1]() if self._held is not None and self._held[0] == step else None
        if held is None:
            held = self._hold()
            self._held = (step, weakref.ref(held))
        return held

    def saved(self, wait_for_all: bool) -> list[SavedReport | Warned | AllhandsError]:
        """Return the outcomes of saves since the last call, failures included."""
        if wait_for_all:
            wait([future for _, future in self._pending])
        # Each future is looked at once: one that ends meanwhile is reported the next time.
        waiting: list[tuple[int, Future[SavedReport | None]]] = []
        done: list[Future[SavedReport | None]] = []
        for entry in self._pending:
            if entry[1].done():
                done.append(entry[1])
            else:
                waiting.append(entry)
        self._pending = waiting
        troubles = [self._troubles.popleft() for _ in range(len(self._troubles))]
        outcomes = (_outcome(future) for future in done)
        return [*troubles, *(outcome for outcome in outcomes if outcome is not None)]

    def close(self) -> None:
        """Wait until all requests are written, and end the thread."""
        if self._parts is not None:
            self._parts.ends()
        self._thread.shutdown()

    def _write(self, request: _Request) -> SavedReport | None:
        """Write a request; return the report, or ``None`` if nothing had to be written."""
        begun = time.perf_counter()
        try:
            path = self._written(request)
        finally:
            if request.delivery is not None:
                request.delivery.stack.close()
        took_s = time.perf_counter() - begun
        pause_s = request.pause_s + (took_s if request.waits else 0.0)
        return None if path is None else SavedReport(request.step, str(path), pause_s, took_s)

    def _written(self, request: _Request) -> Path | None:
        try:
            if not self._has_room:
                self._plan.room()
                self._has_room = True
            there = self._there(request) if request.kind == "same" else frozenset[Path]()
            if there == self._wanted(request):
                return None
            return (
                self._write_best(request)
                if request.kind == "best"
                else self._write_last(request, there)
            )
        except OSError as error:
            raise storage_error_of(error, self._plan.directory) from error

    def _weights(self, request: _Request) -> list[list[Tensor]]:
        """Return the weights to write, by the rank that has them; one list if all ranks have all.

        Raises:
            StorageError: the weights of a rank could not be received.
        """
        common = request.tensors().get(WEIGHTS_FILE, [])
        if (
            request.delivery is None
            or self._parts is None
            or not self._parts.ownership.divides_weights
        ):
            return [common]
        return [list(common), *request.delivery.weights(self._plan.busy)]

    def _all_weights(self, request: _Request) -> list[Tensor]:
        return [tensor for part in self._weights(request) for tensor in part]

    def _numbered(self, request: _Request) -> Path:
        return self._plan.directory / f"{request.iteration:07d}_{WEIGHTS_FILE}"

    def _wanted(self, request: _Request) -> frozenset[Path]:
        """Return the files that must exist after a save of the last weights: the checkpoint and the
        files beside it.
        """
        plan = self._plan
        checkpoint = [checkpoint_path(plan.directory, request.step)] if plan.keep_last else []
        numbered = [self._numbered(request)] if plan.numbered else []
        if plan.model is not None:
            return frozenset([*checkpoint, *numbered, plan.directory / MODEL])
        template = [plan.directory / TEMPLATE_FILE] if plan.chat_template is not None else []
        own = plan.directory / CONFIG_FILE, plan.directory / WEIGHTS_FILE
        return frozenset([*checkpoint, *numbered, *template, *own])

    def _there(self, request: _Request) -> frozenset[Path]:
        """Return the wanted files that exist already, whole and with these weights."""
        digest = hashlib.sha256()
        for piece in safetensors_pieces(self._all_weights(request)):
            digest.update(piece)
        weights = digest.hexdigest()

        def same(path: Path) -> bool:
            self._plan.busy()
            try:
                if path.is_dir():
                    return open_checkpoint(path).files[WEIGHTS_FILE].sha256 == weights
                return (
                    path.exists()
                    if path.name in (CONFIG_FILE, TEMPLATE_FILE)
                    else sum_of(path) == weights
                )
            except (CheckpointError, KeyError):  # it is missing, damaged, or something else
                return False

        return frozenset(path for path in self._wanted(request) if same(path))

    def _write_best(self, request: _Request) -> Path:
        target = self._plan.directory / BEST
        self._checkpoint(target, request)
        if self._plan.model is not None:
            self._plan.model.write(self._plan.directory / BEST_MODEL, self._weights(request))
            return self._plan.directory / BEST_MODEL
        return target / WEIGHTS_FILE

    def _write_last(self, request: _Request, there: frozenset[Path]) -> Path:
        """Write the checkpoint, remove old ones, then write the files for mlx_lm and people."""
        plan = self._plan
        inject_fault("save", request.step, plan.rank)
        make_directory(plan.directory, private=True)
        written, target = None, checkpoint_path(plan.directory, request.step)
        if request.kind != "suspect" and plan.keep_last and target not in there:
            failure: StorageError | OSError | None = None
            try:
                written = self._checkpoint(target, request)
            except (StorageError, OSError) as error:
                failure = error
            finally:
                # Also after a failure: old checkpoints may be the reason for a full disk.
                self._prune(request, written)
            if failure is not None:
                raise self._without_checkpoint(request, there, failure) from failure
        inject_fault("save", request.step, plan.rank)
        try:
            return self._write_copies(request, there)
        except (AllhandsError, OSError) as error:
            if written is None and target not in there:
                raise
            told = (
                error if isinstance(error, AllhandsError) else storage_error(plan.directory, error)
            )
            raise CopyError(
                told.message, code=told.code, where=told.where, hint=told.hint
            ) from error

    def _without_checkpoint(
        self, request: _Request, there: frozenset[Path], error: StorageError | OSError
    ) -> StorageError:
        """Return the error of a failed checkpoint; try to write at least the weights, and say so.

        The weights need only a part of a checkpoint's space.
        """
        told = (
            error
            if isinstance(error, StorageError)
            else storage_error_of(error, self._plan.directory)
        )
        try:
            path = self._write_copies(request, there | {self._numbered(request)})
        except (AllhandsError, OSError):
            return told
        hint = f"{told.hint}; the weights of step {request.step} are in {path}, without what is needed to go on"
        return StorageError(told.message, code=told.code, where=told.where, hint=hint)

    def _write_copies(self, request: _Request, there: frozenset[Path]) -> Path:
        """Write the weights under their iteration's number and, unless they are suspect, as the
        adapter or model to use; return the path of the latter.
        """
        plan, weights = self._plan, self._all_weights(request)
        numbered = self._numbered(request)
        if request.kind == "suspect" or (plan.numbered and numbered not in there):
            write_whole(numbered, lambda draft: _write_tensors(draft, weights), private=True)
        if request.kind == "suspect":
            return numbered
        inject_fault("save", request.step, plan.rank)
        if plan.model is not None:
            plan.model.write(plan.directory / MODEL, self._weights(request))
            inject_fault("save", request.step, plan.rank)
            return plan.directory / MODEL
        adapter, config = plan.directory / WEIGHTS_FILE, plan.directory / CONFIG_FILE
        if not there >= {adapter, config}:
            # The configuration is written only now, with the weights: until now the adapter there
            # may be another run's.
            save_adapter_config(plan.adapter_config, plan.directory)
            save_template(plan.chat_template, plan.directory)
            write_whole(adapter, lambda draft: _write_tensors(draft, weights), private=True)
        inject_fault("save", request.step, plan.rank)
        return adapter

    def _prune(self, request: _Request, written: Checkpoint | None) -> None:
        plan = self._plan
        protected = () if request.best_step is None else (request.best_step,)
        try:
            prune(plan.directory, plan.keep_last, plan.keep_every, protected, written)
        except AllhandsError as error:
            text = f"an old checkpoint could not be removed ({error.where}: {error.message})"
            self._troubles.append(Warned(request.step, text))

    def _checkpoint(self, target: Path, request: _Request) -> Checkpoint:
        plan, delivery = self._plan, request.delivery
        texts = {CONFIG_FILE: adapter_config_text(plan.adapter_config)}
        if plan.chat_template is not None and plan.model is None:
            texts[TEMPLATE_FILE] = plan.chat_template
        with drafting(target) if delivery is None else delivery.opened() as draft:
            return draft.publish(
                step=request.step,
                run_id=plan.run_id,
                state={**request.state, **plan.constants()},
                tensors={**request.tensors(), WEIGHTS_FILE: self._all_weights(request)},
                texts=texts,
                progress=plan.busy,
                parts=tuple if delivery is None else partial(delivery.parts, plan.busy),
            )


@contextmanager
def saving(
    communicator: Communicator,
    plan: SavePlan,
    held: Held,
    describe: Callable[[Any], dict[str, Any]],
    *,
    keeps: bool,
) -> Generator[tuple[Save, Saved]]:
    """Yield two functions for this rank: one begins a save, the other returns the outcomes.

    All ranks enter this context together, and save together.

    Args:
        keeps: whether this rank keeps files; other ranks only deliver slices that they alone hold.
    """
    parts = PartExchange.agreed(communicator, plan.directory, held, keeps, plan.busy)

    def hold() -> _Tensors:
        groups = held.groups()
        return snapshot(
            groups if parts is None else parts.ownership.common(groups), held.spare_bytes()
        )

    def offer(state: Progress, kind: SaveKind) -> None:
        target = checkpoint_of(plan.directory, state.step, kind, plan.keep_last)
        if parts is not None:
            parts.begin(target, lambda: inject_fault("save", state.step, plan.rank))

    def nothing(wait_for_all: bool) -> list[SavedReport | Warned | AllhandsError]:
        if parts is not None and wait_for_all:
            parts.settle()
        return []

    with ExitStack() as stack:
        if parts is not None:
            stack.callback(parts.close)
        if not keeps:
            yield offer, nothing
            return
        saver = Saver(plan, hold, describe, parts, held.waits)
        stack.callback(saver.close)
        yield saver.save, saver.saved


def _write_tensors(path: Path, tensors: list[Tensor]) -> None:
    with path.open("wb") as stream:
        stream.writelines(safetensors_pieces(tensors))


def _outcome(future: Future[SavedReport | None]) -> SavedReport | AllhandsError | None:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, AllhandsError):
        return error
    raise error
