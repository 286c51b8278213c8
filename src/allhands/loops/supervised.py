"""Reports of progress, requests to stop, and checkpoints for an MLX program of your own.

Under ``allhands launch`` two lines let a program go on after faults: :func:`last_checkpoint` before
the loop and ``if allhands.progress(step): break`` in it. Both also work under other launchers and
without a launcher, but then there are no restarts.
"""

from __future__ import annotations

import atexit
import logging
import operator
import os
import secrets
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from allhands.checkpoints import (
    checkpoint_path,
    checkpoints_in,
    latest,
    prune,
    quick_step,
    write_checkpoint,
)
from allhands.cluster.environment import LaunchPlace, launch_here
from allhands.cluster.join import join_here
from allhands.cluster.outcome import REGROUP_CODE
from allhands.cluster.worker import WorkerContext, contact
from allhands.errors import CheckpointError, ConfigError
from allhands.io.paths import local_path

if TYPE_CHECKING:
    import mlx.core as mx

    from allhands.checkpoints import Checkpoint
    from allhands.checkpoints.arrays import StoredArrayReader
    from allhands.distributed.backend import Communicator

DIRECTORY_VARIABLE = "ALLHANDS_CHECKPOINT_DIR"
_ARRAYS = "arrays.safetensors"
_log = logging.getLogger("allhands")


@dataclass(frozen=True)
class Saved:
    """The content that :func:`save_checkpoint` was given.

    Attributes:
        step: number of completed steps.
        arrays: the arrays in the same nesting, with the same types and bits; a module is now the
            dictionary of its parameters.
        values: JSON values.
    """

    step: int
    arrays: Any
    values: dict[str, Any]


def progress(step: int, *, together: bool = True) -> bool:
    """Tell the supervisor that ``step`` steps are done; return whether to save and end now.

    Call it on every rank, after each step, in the thread that trains. The first call ends the
    start-up. From then on Ctrl-C and SIGTERM do not end the program. Instead this function returns
    ``True``, on all ranks at the same step. It also does so if the supervisor wants to go on with
    other computers. The program's exit code is then that of a stop (130, 143, or 75 to the
    supervisor), and the program counts as unfinished. A second Ctrl-C ends it at once.

    It may be called again for the same step, as a heartbeat within a long validation.

    Args:
        step: number of steps done so far.
        together: ranks agree, by a sum of one number over the group. ``False``: each rank gets its
            own answer, for programs whose ranks do not take the same steps.

    Raises:
        ConfigError: ``step`` is not a whole number from 0.
        RuntimeError: from MLX: another rank has ended.
    """
    return this_session().progress(whole_step(step, "progress"), together)


def save_checkpoint(
    step: int,
    arrays: Any,
    values: Mapping[str, Any] | None = None,
    *,
    directory: str | Path | None = None,
    keep_last: int = 2,
) -> None:
    """Write a checkpoint that is whole or absent; call it on every rank.

    Rank 0 returns when the checkpoint is on the disk, the others as soon as the arrays are
    computed.

    Args:
        step: number of completed steps.
        arrays: dictionaries, lists and tuples of MLX arrays, plain values and modules (whose
            parameters are saved), such as ``{"model": model, "optimizer": optimizer.state,
            "random": mx.random.state}``.
        values: further state, as JSON values.
        directory: directory for ``checkpoints/``; ``None``: the directory of ``allhands launch``
            (``--checkpoints``, or else its log directory), or of the variable
            ``ALLHANDS_CHECKPOINT_DIR``.
        keep_last: number of checkpoints to keep; older ones are removed.

    Raises:
        ConfigError: there is no directory, ``step`` or ``keep_last`` is no such number, or a value
            cannot be kept.
        StorageError: the checkpoint cannot be written; earlier checkpoints are unchanged.
        CheckpointError: the directory has later checkpoints, and this program has not restored one.
    """
    if keep_last < 1:
        raise ConfigError(
            f"keep_last={keep_last} keeps no checkpoint",
            code="value-out-of-range",
            where="save_checkpoint",
            hint="give 1 or more",
        )
    from allhands.io.nested import check_plain, take_apart

    plain = dict(values or {})
    check_plain(plain, "values")
    shape, named = take_apart(arrays, "arrays")
    contents = _Contents(whole_step(step, "save_checkpoint"), named, shape, plain)
    session = this_session()
    session.take_over()  # a missing directory then gives a message without a traceback
    session.save(contents, _directory(directory), keep_last)


def last_checkpoint(*, directory: str | Path | None = None, together: bool = True) -> Saved | None:
    """Return the content of the latest whole checkpoint, or ``None`` if there is none; call it on
    every rank.

    If ranks are on several computers, a rank with the latest checkpoint reads it and sends it to
    the others over MLX's group, so they need not share files.

    Args:
        directory: directory for ``checkpoints/``; ``None``: the directory of ``allhands launch``
            (``--checkpoints``, or else its log directory), or of the variable
            ``ALLHANDS_CHECKPOINT_DIR``.
        together: ``False``: every rank looks for a checkpoint and reads it alone.

    Raises:
        ConfigError: there is no directory.
        CheckpointError: the checkpoint cannot be read, or was not written by
            :func:`save_checkpoint`.
        DistributedError: the ranks cannot connect.
    """
    session = this_session()
    session.take_over()  # a missing directory then gives a message without a traceback
    return session.load(_directory(directory), together)


@dataclass(frozen=True)
class _Contents:
    """A checkpoint's content: arrays by name, the shape of their nesting, and values."""

    step: int
    arrays: dict[str, mx.array]
    shape: Any
    values: dict[str, Any]

    def described(self) -> dict[str, Any]:
        """Return everything except the arrays, as JSON values."""
        return {"step": self.step, "shape": self.shape, "values": self.values}


class _LedBy:
    """A view of a group in which rank ``leader``, which sends the checkpoint, counts as rank 0."""

    def __init__(self, group: Communicator, leader: int) -> None:
        self._group = group
        self.rank = (group.rank - leader) % group.size
        self.size = group.size
        self.backend = group.backend

    def all_sum(self, array: mx.array) -> mx.array:
        return self._group.all_sum(array)

    def all_gather(self, array: mx.array) -> mx.array:
        return self._group.all_gather(array)


@cache
def this_session() -> _Session:
    """Return the session of this process, made at the first call."""
    launch = launch_here()
    run_dir, log_dir = os.environ.get("ALLHANDS_RUN_DIR"), os.environ.get("ALLHANDS_LOG_DIR")
    context = WorkerContext(
        launch, Path(run_dir) if run_dir else None, Path(log_dir) if log_dir else None
    )
    return _Session(launch, context, os.environ.get("ALLHANDS_RUN_ID") or secrets.token_hex(8))


@dataclass
class _Session:
    """State of this process in its job.

    Attributes:
        launch: facts from the launcher.
        context: contact with the supervisor.
        run_id: identifier of this run, which its checkpoints have.
        installed: True after signals and uncaught errors are handled.
        begun: True after the first call of :func:`progress`.
        ends_with: exit code after a request to end; 0: there was none.
        group: the group of all ranks, once they have joined.
        seen: directories in which this rank has looked for checkpoints.
        inherited: directories with a checkpoint of an earlier run that this run has restored.
    """

    launch: LaunchPlace
    context: WorkerContext
    run_id: str
    installed: bool = False
    begun: bool = False
    ends_with: int = 0
    group: Communicator | None = None
    seen: set[Path] = field(default_factory=set[Path])
    inherited: set[Path] = field(default_factory=set[Path])

    def progress(self, step: int, together: bool) -> bool:
        worker = self.take_over()
        # From here this rank waits for the others, so it does not hang itself.
        worker.beat("reduce" if self.begun and together else "compute", step)
        wish = self._wish(worker)
        if together and not self.ends_with:
            wish = self._most(wish)
        if not self.begun:
            self.begun = True
            worker.mark_started()
        worker.beat("compute", step)
        self.ends_with = self.ends_with or wish
        if self.ends_with:
            self._leave_at_end()
        return bool(self.ends_with)

    def save(self, contents: _Contents, directory: Path, keep_last: int) -> None:
        import mlx.core as mx

        worker = self.take_over()
        worker.beat("save", contents.step)
        # On all ranks: an array that is not computed yet may need all of them, so rank 0 cannot
        # compute it alone.
        mx.eval(list(contents.arrays.values()))
        if self.launch.rank == 0:
            self._write(contents, directory, keep_last)
            worker.beat("compute", contents.step)
        if self.ends_with and self.group is not None and self.launch.launcher != "allhands":
            # Other launchers kill all ranks as soon as one rank ends with a code other than 0.
            mx.eval(self.group.all_sum(mx.ones((1,))))
        if self.ends_with:
            self._leave_at_end()

    def load(self, directory: Path, together: bool) -> Saved | None:
        from allhands.checkpoints.arrays import local_arrays, shared_arrays
        from allhands.distributed.handout import hand_out_json

        worker = self.take_over()
        group = self._communicator(worker) if together else None
        if group is None or group.size == 1:
            found = self._found(directory)
            return (
                None
                if found is None
                else _saved(found.state["program"], local_arrays(found, _ARRAYS))
            )
        leader = self._leader(group, directory)
        if leader is None:
            return None
        led = _LedBy(group, leader)
        found = self._found(directory) if led.rank == 0 else None
        described = hand_out_json(led, None if found is None else found.state["program"])
        return None if described is None else _saved(described, shared_arrays(led, found, _ARRAYS))

    def _leader(self, group: Communicator, directory: Path) -> int | None:
        """Return the first rank whose computer has the latest checkpoint, the same on all ranks;
        ``None`` without a checkpoint.
        """
        import mlx.core as mx

        # Only sizes are checked here; the rank that reads the checkpoint checks its sums.
        step = -1 if self.launch.local_rank else quick_step(directory)
        step = -1 if step is None else step
        self.seen.add(directory)
        steps = cast("list[int]", group.all_gather(mx.array([step], dtype=mx.int32)).tolist())
        return steps.index(max(steps)) if max(steps) >= 0 else None

    def take_over(self) -> WorkerContext:
        """Return the contact with the supervisor; the first call also installs handlers of signals
        and uncaught errors.

        Handlers can be installed in the main thread only. In other threads, and at a prompt, Ctrl-C
        keeps its usual effect.
        """
        if (
            not self.installed
            and threading.current_thread() is threading.main_thread()
            and not hasattr(sys, "ps1")
        ):
            self.installed = True
            self.context = contact()
        return self.context

    def _communicator(self, worker: WorkerContext) -> Communicator:
        if self.group is None:
            worker.mark_ready()
            self.group = join_here()
        return self.group

    def _wish(self, worker: WorkerContext) -> int:
        """Return the exit code of a requested end of this rank; 0 without a request."""
        if number := worker.stop_requested():
            return 128 + number
        return REGROUP_CODE if worker.regroup_requested() else 0

    def _most(self, wish: int) -> int:
        """Return the most urgent request of all ranks, because signals reach them at different
        moments.
        """
        group = self._communicator(self.context)
        if group.size == 1:
            return wish
        import mlx.core as mx

        wishes = group.all_gather(mx.array([wish], dtype=mx.int32))
        return int(cast("int", mx.max(wishes).item()))

    def _write(self, contents: _Contents, directory: Path, keep_last: int) -> None:
        from allhands.checkpoints.arrays import tensors_of

        step = contents.step
        if directory not in self.seen:
            _refuse_later(directory, step)
            self.seen.add(directory)
        state, tensors = {"program": contents.described()}, {_ARRAYS: tensors_of(contents.arrays)}
        written = write_checkpoint(
            checkpoint_path(directory, step), step, self.run_id, state, tensors
        )
        removed = prune(directory, keep_last, None, (), written)
        if removed and directory in self.inherited:
            # This run has written enough checkpoints, and all of them are later than the earlier
            # run's.
            self.inherited.discard(directory)
            prune(directory, keep_last, None, ())

    def _found(self, directory: Path) -> Checkpoint | None:
        damaged: list[CheckpointError] = []
        found = latest(directory, rejected=damaged)
        for error in damaged:
            _log.warning("a damaged checkpoint is left out: %s: %s", error.where, error.message)
        self.seen.add(directory)
        if found is None:
            return None
        if found.run_id != self.run_id:
            self.inherited.add(directory)
        if not isinstance(found.state.get("program"), dict) or _ARRAYS not in found.files:
            raise CheckpointError(
                "this checkpoint is not one of allhands.save_checkpoint",
                code="checkpoint-of-other-run",
                where=str(found.path),
                hint="give the program a directory of its own: allhands launch --checkpoints DIR",
            )
        return found

    def _leave_at_end(self) -> None:
        """Make the code of the stop the program's exit code, also if the program ends normally."""
        atexit.unregister(self._leave)
        atexit.register(self._leave)

    def _leave(self) -> NoReturn:
        """Run the exit handlers that were registered before, then end with the stop's exit code.

        Python calls handlers in reverse order, and this one ends the process. Handlers that the
        program has registered later would be called twice. So each of our calls registers this
        handler again, to be among the first.
        """
        atexit.unregister(self._leave)
        try:
            atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(self.ends_with)


def _saved(described: Mapping[str, Any], arrays: Mapping[str, StoredArrayReader]) -> Saved:
    """Return the saved content in the user's form; its arrays are read one after the other."""
    from allhands.io.nested import put_together

    read = {name: stored.read() for name, stored in arrays.items()}
    return Saved(described["step"], put_together(described["shape"], read), described["values"])


def _refuse_later(directory: Path, step: int) -> None:
    """Refuse to write beside later checkpoints of another run: a restart would go on from those.

    Raises:
        CheckpointError: there are checkpoints of later steps than ``step``.
    """
    later = [path for path in checkpoints_in(directory) if int(path.name.rpartition("-")[2]) > step]
    if later:
        raise CheckpointError(
            f"{later[0].name} belongs to another run, which this program has not restored",
            code="checkpoint-of-other-run",
            where=str(directory),
            hint="call allhands.last_checkpoint() first and go on from it, or choose another directory "
            "(allhands launch --checkpoints DIR)",
        )


def whole_step(step: int, where: str) -> int:
    """Return ``step`` as an integer.

    Args:
        where: the called function, for messages.

    Raises:
        ConfigError: ``step`` is not a whole number from 0.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(
            f"step is {step!r}",
            code="value-out-of-range",
            where=where,
            hint="give the number of steps done: 0, 1, 2, ...",
        )
    return number


def _directory(chosen: str | Path | None) -> Path:
    directory = chosen or os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        raise ConfigError(
            "there is no directory for checkpoints",
            code="checkpoint-directory-missing",
            where=DIRECTORY_VARIABLE,
            hint=f"start the program with allhands launch, set {DIRECTORY_VARIABLE}, or give directory=...",
        )
    return Path(local_path(directory, "directory" if chosen else DIRECTORY_VARIABLE)).resolve()
