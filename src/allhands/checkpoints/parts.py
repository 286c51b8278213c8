"""Exchange of divided arrays, so that one checkpoint gets the parts of all ranks.

A slice is owned by the first rank that has it. Slices on all ranks need no exchange, because ranks
that keep files have them. If all ranks see rank 0's directory, each writes a file of its own slices
into rank 0's draft. Otherwise ranks send their files, block by block, to the ranks that keep files.
Divided weights are joined from these files, an array at a time. So no rank ever has all weights in
memory, and the checkpoint has its usual single file of weights.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from allhands.checkpoints.arrays import Held, snapshot
from allhands.checkpoints.format import (
    WEIGHTS_FILE,
    Groups,
    ShardedState,
    StoredArray,
    StoredFile,
    StoredSlice,
    array_name,
    file_of_rank,
    merged,
)
from allhands.checkpoints.resuming import sees_main
from allhands.checkpoints.slices import MappedFile, StoredNumbers
from allhands.checkpoints.writing import CheckpointDraft, WrittenPart, drafting, write_file
from allhands.distributed.backend import Communicator
from allhands.distributed.handout import all_equal, gather_bytes, gather_json, hand_out_json, votes
from allhands.errors import AllhandsError, StorageError
from allhands.io.files import storage_error, storage_error_of
from allhands.io.tensors import Tensor, safetensors_pieces, safetensors_size

_POLL_S = 0.02
# Seconds without any progress of a rank's file after which it is given up: during the run, and at
# its end.
_PATIENCE_S, _AT_THE_END_S = 600.0, 30.0
# Name of the draft for weights if no checkpoint is written; it is never published.
_NOWHERE = "weights"


@dataclass(frozen=True)
class Ownership:
    """The slices that each rank is to write.

    Attributes:
        by_rank: the slices that each rank owns, without slices that all ranks hold.
        rank: number of this rank.
    """

    by_rank: tuple[tuple[StoredArray, ...], ...]
    rank: int

    @classmethod
    def agreed(cls, communicator: Communicator, groups: Groups) -> Ownership | None:
        """Divide the slices that the ranks hold; ``None`` if all ranks hold the same slices.

        All ranks call this together.
        """
        mine = sorted(
            (
                StoredArray(
                    array_name(file, key),
                    each.shape,
                    each.dtype,
                    (StoredSlice(file, key, each.region),),
                )
                for file, state in groups.items()
                for key, each in state.items()
            ),
            key=lambda array: array.name,
        )
        if all_equal(
            communicator, json.dumps([[each.to_json() for each in array.slices] for array in mine])
        ):
            return None
        everyone = gather_json(communicator, [array.to_json() for array in mine])
        holders: dict[tuple[StoredSlice, ...], list[tuple[int, StoredArray]]] = {}
        for rank, held in enumerate(everyone):
            for array in map(StoredArray.from_json, held):
                holders.setdefault(array.slices, []).append((rank, array))
        owned: list[list[StoredArray]] = [[] for _ in everyone]
        for (rank, array), *others in holders.values():
            if len(others) + 1 < communicator.size:
                owned[rank].append(_in_file_of(array, rank))
        return cls(tuple(map(tuple, owned)), communicator.rank)

    def mine(self, groups: Groups) -> dict[str, ShardedState]:
        """Return the slices that this rank writes as its part, by file."""
        return _selected(groups, {array.name for array in self.by_rank[self.rank]})

    def common(self, groups: Groups) -> dict[str, ShardedState]:
        """Return the slices that all ranks hold, by file."""
        divided = {array.name for arrays in self.by_rank for array in arrays}
        found = _selected(
            groups, {array_name(f, key) for f, state in groups.items() for key in state} - divided
        )
        return {file: state for file, state in found.items() if state}

    @property
    def divides_weights(self) -> bool:
        """True if some weights are not on all ranks."""
        return any(_is_weight(array) for arrays in self.by_rank for array in arrays)

    def files(self, rank: int) -> list[str]:
        """Return the files of a rank's part."""
        return sorted({each.file for array in self.by_rank[rank] for each in array.slices})


def _is_weight(array: StoredArray) -> bool:
    return array.name.startswith(array_name(WEIGHTS_FILE, ""))


def _in_file_of(array: StoredArray, rank: int) -> StoredArray:
    (only,) = array.slices
    only = StoredSlice(file_of_rank(only.file, rank), only.key, only.region)
    return StoredArray(array.name, array.shape, array.dtype, (only,))


def _selected(groups: Groups, names: set[str]) -> dict[str, ShardedState]:
    return {
        file: {key: each for key, each in state.items() if array_name(file, key) in names}
        for file, state in groups.items()
    }


@dataclass
class Delivery:
    """A checkpoint in the making, to which ranks deliver their parts.

    Attributes:
        stack: removes the draft when it is closed.
        draft: the draft; ``None`` if it could not be made.
        problem: the error that prevents the checkpoint; ``None`` without one.
        collect: returns the parts of all ranks once they are written.
    """

    stack: ExitStack
    draft: CheckpointDraft | None
    problem: AllhandsError | None
    collect: Callable[[Callable[[], None]], list[WrittenPart]] = lambda progress: []
    _collected: list[WrittenPart] | None = None
    _weights: list[list[Tensor]] | None = None

    def parts(self, progress: Callable[[], None]) -> list[WrittenPart]:
        """Return the parts of all ranks, once they have written them.

        Raises:
            StorageError: a rank could not write its part. Later calls raise the same error at once.
        """
        if self._collected is None:
            if self.problem is not None:
                raise self.problem
            try:
                self._collected = self.collect(progress)
            except AllhandsError as error:
                self.problem = error  # the ranks tell it once
                raise
        return self._collected

    def weights(self, progress: Callable[[], None]) -> list[list[Tensor]]:
        """Return the whole weights, by the rank with an array's first slice; they are read when
        used.

        The ranks' files of weights are then no longer part of the checkpoint, which gets the joined
        weights instead.

        Raises:
            AllhandsError: there is no draft, or a rank could not write its part.
        """
        if self._weights is None:
            parts = self.parts(progress)
            assert self.draft is not None
            self._weights = _weights_of(parts, self.draft.directory)
            self._collected = [_without_weights(part) for part in parts]
        return self._weights

    @contextmanager
    def opened(self) -> Generator[CheckpointDraft]:
        """Open the draft in a ``with`` block; it is removed at the end unless it was published.

        Raises:
            AllhandsError: there is no draft, or it cannot be written.
        """
        if self.problem is not None:
            raise self.problem
        assert self.draft is not None
        try:
            with self.stack:
                yield self.draft
        except OSError as error:
            self.problem = storage_error_of(error, self.draft.target)
            raise
        except AllhandsError as error:
            self.problem = error  # the draft is gone, and with it parts that nobody has read
            raise


def _weights_of(parts: Sequence[WrittenPart], directory: Path) -> list[list[Tensor]]:
    """Return the whole weights from the parts of all ranks, and remove the parts' files.

    An array is listed with the rank that has its first slice. It is joined when it is used, and
    only the last array's pages of the files stay in memory.
    """
    pieces = [list(filter(_is_weight, part.arrays)) for part in parts]
    together = [array for arrays in pieces for array in arrays]
    files = {name: MappedFile(directory / name) for name in _files_of(together)}
    for name in files:
        (directory / name).unlink()  # the open file can still be read
    whole = {array.name: _tensor(array, files) for array in merged(together)}
    return [[whole.pop(array.name) for array in arrays if array.name in whole] for arrays in pieces]


def _files_of(arrays: Iterable[StoredArray]) -> set[str]:
    return {each.file for array in arrays for each in array.slices}


def _tensor(array: StoredArray, files: Mapping[str, MappedFile]) -> Tensor:
    """Return an array whose slices are in ``files`` as a tensor that is read when used."""
    numbers, key = StoredNumbers(array, files), array.slices[0].key

    def get() -> memoryview:
        return numbers.words().reshape(-1).view(np.uint8).data

    return Tensor(key, array.dtype, array.shape, get)


def _without_weights(part: WrittenPart) -> WrittenPart:
    names = _files_of(filter(_is_weight, part.arrays))
    arrays = [array for array in part.arrays if not _is_weight(array)]
    return WrittenPart(
        {name: file for name, file in part.files.items() if name not in names}, arrays
    )


@dataclass
class PartExchange:
    """This rank's side of the exchange; all ranks begin every checkpoint together.

    Attributes:
        ownership: the slices that each rank writes.
        directory: directory of the run.
        held: the state of this rank.
        keeps: whether this rank keeps files.
        shared: whether all ranks see rank 0's directory.
        busy: called now and then while this rank writes or receives.
    """

    communicator: Communicator
    ownership: Ownership
    directory: Path
    held: Held
    keeps: bool
    shared: bool
    busy: Callable[[], None] = lambda: None
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "allhands-part")
    )
    _pending: list[Future[None]] = field(default_factory=list[Future[None]])
    _ending: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def agreed(
        cls,
        communicator: Communicator,
        directory: Path,
        held: Held,
        keeps: bool,
        busy: Callable[[], None] = lambda: None,
    ) -> PartExchange | None:
        """Make the exchange; ``None`` if all ranks hold the same slices.

        All ranks call this together.
        """
        if (
            communicator.size == 1
            or (ownership := Ownership.agreed(communicator, held.groups())) is None
        ):
            return None
        shared = votes(communicator, sees_main(communicator, directory)) == communicator.size
        return cls(communicator, ownership, directory, held, keeps, shared, busy)

    def begin(
        self, target: Path | None, writes: Callable[[], object] = lambda: None
    ) -> Delivery | None:
        """Begin to deliver every rank's part of the checkpoint at ``target``.

        All ranks call this together.

        Args:
            target: place of the checkpoint. ``None``: no checkpoint is written, and only divided
                weights are delivered.
            writes: called before this rank writes a file into a directory that all ranks see.

        Returns:
            The delivery to finish, on ranks that keep files; else ``None``. Also ``None`` if there
            is nothing to deliver.

        Raises:
            RuntimeError: another rank has ended (from MLX).
        """
        if target is None and not self.ownership.divides_weights:
            return None
        tensors = partial(self._tensors, only_weights=target is None)
        target = target or self.directory / _NOWHERE
        delivery = self._opened(target) if self.keeps else None
        if self.shared:
            return self._begin_shared(target, delivery, tensors, writes)
        return self._begin_sent(delivery, tensors())

    def settle(self) -> None:
        """Wait until this rank has written its part.

        Call this before this rank waits for ranks that wait for its part: an exchange over NCCL
        keeps a GPU from copying out arrays that are still to be written.
        """
        wait(self._pending)

    def close(self) -> None:
        """Wait until this rank has written its part, and end its thread."""
        self.ends()
        self._thread.shutdown()

    def ends(self) -> None:
        """Note that the run is at its end: parts that do not come soon are then given up."""
        self._ending.set()

    def _opened(self, target: Path) -> Delivery:
        stack = ExitStack()
        try:
            return Delivery(stack, stack.enter_context(drafting(target)), None)
        except AllhandsError as error:
            return Delivery(stack, None, error)

    def _tensors(self, *, only_weights: bool) -> dict[str, list[Tensor]]:
        mine, rank = self.ownership.mine(self.held.groups()), self.communicator.rank
        mine = {
            file: state for file, state in mine.items() if file == WEIGHTS_FILE or not only_weights
        }
        tensors = snapshot(
            {file: state for file, state in mine.items() if state}, self.held.spare_bytes()
        )()
        return {file_of_rank(file, rank): of_file for file, of_file in tensors.items()}

    # --- into one directory ---

    def _begin_shared(
        self,
        target: Path,
        delivery: Delivery | None,
        tensors: Callable[[], dict[str, list[Tensor]]],
        writes: Callable[[], object],
    ) -> Delivery | None:
        wait(self._pending)
        draft = None if delivery is None else delivery.draft
        name: str | None = hand_out_json(
            self.communicator, None if draft is None else draft.directory.name
        )
        if name is None:
            return delivery
        directory = target.resolve().parent / name
        self._pending = [self._thread.submit(self._write, directory, tensors(), writes)]
        if self.held.waits():
            wait(self._pending)
        if delivery is not None:
            delivery.collect = lambda progress: self._collected(directory, progress)
        return delivery

    def _write(
        self, directory: Path, tensors: dict[str, list[Tensor]], writes: Callable[[], object]
    ) -> None:
        """Write this rank's part, then a note for rank 0 with its files or the problem."""
        files: dict[str, dict[str, Any]] = {}
        try:
            for name, each in tensors.items():
                writes()
                files[name] = vars(
                    write_file(directory / name, safetensors_pieces(each), self.busy)
                )
            said: dict[str, Any] = {"files": files}
        except (AllhandsError, OSError) as error:
            told = error if isinstance(error, AllhandsError) else storage_error_of(error, directory)
            said = {"problem": _problem(self.communicator.rank, told)}
            for name in tensors:  # makes room for the note on a full disk
                with suppress(OSError):
                    (directory / name).unlink(missing_ok=True)
        note = _note_of(directory, self.communicator.rank)
        # If the directory is gone, rank 0 has given up this checkpoint.
        draft = note.with_suffix(".draft")
        with suppress(OSError):
            try:
                draft.write_text(json.dumps(said), encoding="utf-8")
            except OSError:  # other ranks took the room: an empty note tells that
                draft.write_bytes(b"")
            os.replace(draft, note)

    def _collected(self, directory: Path, progress: Callable[[], None]) -> list[WrittenPart]:
        """Return the parts of all ranks, once they are written (StorageError if one fails)."""
        return [self._part(directory, rank, progress) for rank in range(self.communicator.size)]

    def _part(self, directory: Path, rank: int, progress: Callable[[], None]) -> WrittenPart:
        note, seen, since = _note_of(directory, rank), -1, time.monotonic()
        while not note.exists():
            progress()
            if (size := _size_of(directory, self.ownership.files(rank))) != seen:
                seen, since = size, time.monotonic()
            if time.monotonic() > since + (_AT_THE_END_S if self._ending.is_set() else _PATIENCE_S):
                raise StorageError(
                    f"rank {rank} does not write its part of the checkpoint",
                    code="checkpoint-part-missing",
                    where=str(directory),
                    hint="look at that rank's log",
                )
            time.sleep(_POLL_S)
        text = note.read_text(encoding="utf-8")
        note.unlink()
        said: dict[str, Any] = (
            json.loads(text) if text else {"problem": _problem(rank, _full(directory))}
        )
        if "problem" in said:
            message, hint, code = said["problem"]
            raise StorageError(message, code=code, where=str(directory), hint=hint)
        files = {name: StoredFile(**facts) for name, facts in said["files"].items()}
        return WrittenPart(files, self.ownership.by_rank[rank])

    # --- to other computers ---

    def _begin_sent(
        self, delivery: Delivery | None, tensors: dict[str, list[Tensor]]
    ) -> Delivery | None:
        """Send every rank's part to all ranks; those that keep files write them.

        The training waits for this.
        """
        mine = {name: safetensors_size(of_file) for name, of_file in tensors.items()}
        sizes: list[dict[str, int]] = gather_json(self.communicator, mine)
        parts = [WrittenPart({}, arrays) for arrays in self.ownership.by_rank]
        for index in range(max(map(len, sizes))):
            names = [sorted(files)[index] if index < len(files) else None for files in sizes]
            lengths = [
                0 if name is None else files[name] for name, files in zip(names, sizes, strict=True)
            ]
            own = names[self.communicator.rank]
            pieces = safetensors_pieces(tensors[own]) if own is not None else iter(())
            stored = self._received(
                delivery, names, gather_bytes(self.communicator, pieces, lengths)
            )
            for part, name, file in zip(parts, names, stored, strict=False):
                if name is not None:
                    part.files[name] = file
        if delivery is not None:
            delivery.collect = lambda progress: parts
        return delivery

    def _received(
        self,
        delivery: Delivery | None,
        names: Sequence[str | None],
        blocks: Iterable[list[memoryview]],
    ) -> list[StoredFile]:
        """Receive one file from every rank, and write the files if this rank keeps files.

        Returns the written files; [] if this rank keeps none or cannot write.
        """
        writers: list[_Writer] = []
        with ExitStack() as stack:
            for block in blocks:
                self.busy()
                if delivery is None or delivery.draft is None or delivery.problem is not None:
                    continue
                place = delivery.draft.directory
                try:
                    writers = writers or [
                        stack.enter_context(_Writer(name and place / name)) for name in names
                    ]
                    for writer, piece in zip(writers, block, strict=True):
                        writer.add(piece)
                except OSError as error:
                    delivery.problem = storage_error_of(error, delivery.draft.target)
        return [writer.stored() for writer in writers]


class _Writer:
    """A private file that is written block by block; a context manager.

    With the path ``None`` nothing is written.
    """

    def __init__(self, path: Path | str | None) -> None:
        self._file = -1 if not path else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._digest, self._size = hashlib.sha256(), 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def add(self, piece: memoryview) -> None:
        self._digest.update(piece)
        self._size += len(piece)
        while piece:
            piece = piece[os.write(self._file, piece) :]

    def stored(self) -> StoredFile:
        return StoredFile(self._size, self._digest.hexdigest())


def _problem(rank: int, error: AllhandsError) -> list[str | None]:
    """Return a rank's error as its note has it: message, hint and code."""
    return [f"rank {rank}: {error.message}", error.hint, error.code]


def _full(directory: Path) -> StorageError:
    """Return the error of a full disk, on which a rank's note is empty."""
    return storage_error(directory, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def _note_of(directory: Path, rank: int) -> Path:
    return directory / f".part-{rank}.json"


def _size_of(directory: Path, names: Sequence[str]) -> int:
    total = 0
    for name in names:
        with suppress(OSError):
            total += (directory / name).stat().st_size
    return total
