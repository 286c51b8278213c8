"""Injected faults: rehearse a kill, a hang or a full disk before a long run meets one.

``ALLHANDS_FAULTS`` names a JSON file with a list of planned faults, a schedule::

    [{"rank": 1, "step": 40, "kind": "kill"},
     {"rank": 0, "step": 100, "kind": "disk-full", "at": "save", "write": 2}]

Each fault happens once in the life of a job, over all its restarts: at the first time that the rank
comes to the point ``at`` with at least ``step`` optimizer updates done. Just before, its computer
notes it in ``FILE.fired/INDEX``; :func:`fired` reads these notes. Remove that directory to let the
faults happen again.

The process that starts a run calls :func:`check`, which refuses faults that cannot happen in the
run, and at the run's end :func:`outstanding`.

Kinds: ``kill``, ``term`` and ``stop`` (the rank sends itself SIGKILL, SIGTERM or SIGSTOP),
``raise`` (an exception with ``text``), ``exit`` (at once, with ``code``), ``hang`` (sleeps for
ever), ``spin`` (computes for ever), ``slow`` (sleeps ``seconds``), ``oom`` (takes memory until
killed; without a memory limit, a MemoryError), ``nan`` (the gradient becomes NaN) and ``disk-full``
(a write fails).

Points: ``step`` (before the step waits for its batches), ``load`` (where a batch is made, in
another thread), ``message`` (with ``--strategy pipeline`` or ``fsdp``, before an exchange during
the passes), ``reduce`` (before gradients are exchanged), ``update``, ``round`` (with
``--sync-every``, before ranks' weights are averaged), ``validate``, and ``save`` (before a file
operation of a save: the first, or the one numbered ``write``).
``attempt`` restricts a fault to that start of the job (1, 2, ...).
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from allhands.errors import ConfigError, in_our_words
from allhands.io.formatting import counted
from allhands.io.strict_json import without_repeats
from allhands.runtime.memory import memory_limit

VARIABLE = "ALLHANDS_FAULTS"
FaultKind = Literal[
    "kill", "term", "stop", "raise", "exit", "hang", "spin", "slow", "oom", "nan", "disk-full"
]
Point = Literal["step", "load", "message", "reduce", "update", "round", "save", "validate"]

# Kinds that make sense at one point only, and this point.
_ONLY_AT: dict[str, Point] = {"nan": "reduce", "disk-full": "save"}
# Keys that belong to one kind or point.
_BELONGS: dict[str, tuple[str, str]] = {
    "seconds": ("kind", "slow"),
    "text": ("kind", "raise"),
    "code": ("kind", "exit"),
    "write": ("at", "save"),
}
_HINT = 'see "Inject faults" in docs/reliability.md; unset ALLHANDS_FAULTS to train without injected faults'
# Points that come after the last step, too.
_AFTER_ALL: tuple[Point, ...] = ("save", "validate")
_CHUNK_BYTES = 8 << 20


class PlannedFault(BaseModel):
    """One entry of a schedule.

    Attributes:
        step: least number of optimizer updates done.
        at: the point; default: "step", or the only point of this kind.
        write: number of the file operation of a save, from 1.
        attempt: the only start of the job in which it happens; ``None``: any.
        seconds: duration of "slow".
        text: message of "raise".
        code: exit code of "exit".
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    rank: int = Field(ge=0)
    step: int = Field(ge=0)
    kind: FaultKind
    at: Point = "step"
    write: int = Field(1, ge=1)
    attempt: int | None = Field(None, ge=1)
    seconds: float = Field(1.0, ge=0)
    text: str = "an exception on purpose"
    code: int = Field(1, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _where_its_kind_happens(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = cast("dict[str, Any]", values)
        return {"at": _ONLY_AT.get(str(given.get("kind")), "step"), **given}

    @model_validator(mode="after")
    def _goes_together(self) -> PlannedFault:
        if (only := _ONLY_AT.get(self.kind, self.at)) != self.at:
            raise ValueError(f"{self.kind} happens at {only} only, not at {self.at}")
        for name, (key, wanted) in _BELONGS.items():
            if name in self.model_fields_set and getattr(self, key) != wanted:
                raise ValueError(f"{name} goes with {key} {wanted} only")
        return self


@dataclass(frozen=True)
class FiredFault:
    """A fault that has happened.

    Attributes:
        index: its entry in the schedule, from 0.
        time: Unix time in seconds.
        step: optimizer updates done.
    """

    index: int
    time: float
    kind: str
    rank: int
    step: int
    pid: int


def inject_fault(point: Point, step: int, rank: int) -> FaultKind | None:
    """Let the fault happen that is due at this point, if there is one; without a schedule this
    costs next to nothing.

    Returns:
        The kind of the fault, if the process goes on after it: ``"nan"``, which the caller has to
        carry out, ``"slow"``, ``"term"`` or ``"stop"``; else ``None``.

    Raises:
        RuntimeError: "raise" is due.
        MemoryError: "oom" is due, and nothing limits this process's memory.
        OSError: "disk-full" is due.
        ConfigError: the schedule cannot be read, or does not make sense.
    """
    schedule = _schedule()
    return None if schedule is None else schedule.inject_fault(point, step, rank)


def active() -> bool:
    """True if there is a schedule.

    Raises:
        ConfigError: the schedule cannot be read, or does not make sense.
    """
    return _schedule() is not None


def check(num_ranks: int, num_steps: int | None = None) -> None:
    """Refuse a schedule with faults that cannot happen in this run; call it before a run starts.

    Args:
        num_ranks: number of ranks at the start of the run.
        num_steps: optimizer updates in all; ``None``: not known yet.

    Raises:
        ConfigError: the schedule cannot be read, does not make sense, or names a rank or a step
            that the run does not have; or the notes beside it belong to another schedule.
    """
    path = _path()
    if path is None:
        return
    planned = read_schedule(path)
    for index, fault in enumerate(planned):
        if fault.rank >= num_ranks:
            there = "rank 0 alone" if num_ranks == 1 else f"ranks 0 to {num_ranks - 1}"
            raise _wrong(
                path, f"entry {index}: rank {fault.rank} is none of this run, which has {there}"
            )
        # Most points come before a step is done.
        last = None if num_steps is None else num_steps - (fault.at not in _AFTER_ALL)
        if last is not None and fault.step > last:
            where = f"{fault.at} comes last with {last} of {num_steps} steps done"
            raise _wrong(path, f"entry {index}: step {fault.step} is never reached, {where}")
    for note in fired(path):
        if note.index >= len(planned) or (note.kind, note.rank) != (
            planned[note.index].kind,
            planned[note.index].rank,
        ):
            raise ConfigError(
                f"the notes of what has happened are of another schedule (entry {note.index})",
                code="fault-schedule-invalid",
                where=str(_notes(path)),
                hint="remove that directory, so that the failures of this schedule can happen",
            )


def already_fired() -> str | None:
    """Return a line for the start of a run, about faults that have happened before and will not
    happen again; ``None`` if there are none.

    Raises:
        ConfigError: the schedule cannot be read, or does not make sense.
    """
    path = _path()
    if path is None:
        return None
    if not (before := fired(path)):
        return None
    count = f"{len(before)} of {counted(len(read_schedule(path)), 'failure')} on purpose"
    return (
        f"{count} happened before and will not again: remove {_notes(path)} to rehearse once more"
    )


def outstanding(ranks: Collection[int] | None = None) -> str | None:
    """Return a line for the end of a run, about planned faults that have not happened; ``None`` if
    there are none.

    Args:
        ranks: the ranks on this computer, because the notes of others are elsewhere; ``None``: all.

    Raises:
        ConfigError: the schedule cannot be read, or does not make sense.
    """
    path = _path()
    if path is None:
        return None
    happened = {note.index for note in fired(path)}
    left = [
        f"entry {index} ({fault.kind} of rank {fault.rank} at {fault.at}, from step {fault.step})"
        for index, fault in enumerate(read_schedule(path))
        if index not in happened and (ranks is None or fault.rank in ranks)
    ]
    what = "a failure on purpose has" if len(left) == 1 else f"{len(left)} failures on purpose have"
    return f"{what} not happened: {', '.join(left)} of {path}" if left else None


def read_schedule(path: Path) -> tuple[PlannedFault, ...]:
    """Return the faults that a file plans.

    Raises:
        ConfigError: the file cannot be read, or does not make sense.
    """
    try:
        return tuple(
            _SCHEDULE.validate_python(
                json.loads(path.read_text("utf-8"), object_pairs_hook=without_repeats)
            )
        )
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(
            f"entry {part}: " if isinstance(part, int) else f"{part} " for part in first["loc"]
        )
        raise _wrong(path, f"{place}{in_our_words(first['msg'])}") from None
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"is no JSON: {error}") from None


def fired(path: Path) -> list[FiredFault]:
    """Return the faults of the schedule at ``path`` that have happened, in the order of time."""
    found: list[FiredFault] = []
    for note in _notes(path).glob("*"):
        with suppress(ValueError, TypeError):  # the process was killed while it wrote this note
            found.append(
                FiredFault(index=int(note.name), **json.loads(note.read_text(encoding="utf-8")))
            )
    return sorted(found, key=lambda fault: fault.time)


class _Schedule:
    """The planned faults, and the number of calls at each point within the present step."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._path = path
        self._planned = [
            (index, fault)
            for index, fault in enumerate(read_schedule(path))
            if fault.attempt in (None, attempt)
        ]
        self._here: dict[str, tuple[int, int]] = {}

    def inject_fault(self, point: Point, step: int, rank: int) -> FaultKind | None:
        # No locks are needed: each point belongs to one thread.
        last, calls = self._here.get(point, (step, 0))
        calls = calls + 1 if last == step else 1
        self._here[point] = (step, calls)
        for index, fault in self._planned:
            due = fault.at == point and fault.rank == rank and fault.step <= step
            if (
                due
                and (point != "save" or fault.write == calls)
                and self._claim(index, fault, step)
            ):
                return _act(fault)
        return None

    def _claim(self, index: int, fault: PlannedFault, step: int) -> bool:
        """Note that the fault happens now; return False if it has happened before."""
        note = _notes(self._path) / str(index)
        note.parent.mkdir(exist_ok=True)
        facts = {
            "time": time.time(),
            "kind": fault.kind,
            "rank": fault.rank,
            "step": step,
            "pid": os.getpid(),
        }
        try:
            with note.open("x", encoding="utf-8") as file:
                json.dump(facts, file)
        except FileExistsError:
            return False
        return True


_SCHEDULE = TypeAdapter(list[PlannedFault])


@cache
def _schedule() -> _Schedule | None:
    """Return the schedule that the environment of this process names; it is read once."""
    path = _path()
    if path is None:
        return None
    attempt = os.environ.get("ALLHANDS_ATTEMPT", "1")
    return _Schedule(path, int(attempt) if attempt.isdecimal() else 1)


def _path() -> Path | None:
    name = os.environ.get(VARIABLE)
    return Path(os.path.expanduser(name)) if name else None


def _notes(path: Path) -> Path:
    return path.with_name(f"{path.name}.fired")


def _wrong(path: Path, problem: str) -> ConfigError:
    joint = ", " if problem.startswith("entry") else " "
    return ConfigError(
        f"the schedule of failures{joint}{problem}",
        code="fault-schedule-invalid",
        where=f"{VARIABLE}={path}",
        hint=_HINT,
    )


# --- the faults -----------------------------------------------------------------------------------


def _act(fault: PlannedFault) -> FaultKind | None:
    match fault.kind:
        case "kill" | "term" | "stop":
            numbers = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
            os.kill(os.getpid(), numbers[fault.kind])
        case "raise":
            raise RuntimeError(fault.text)
        case "exit":
            os._exit(fault.code)
        case "hang":
            while True:
                time.sleep(3600)
        case "spin":
            while True:
                pass
        case "slow":
            time.sleep(fault.seconds)
        case "oom":
            _exhaust_memory(memory_limit())
        case "disk-full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "nan":
            pass
    return fault.kind


def _exhaust_memory(limit: int | None) -> None:
    """Take memory until the kernel kills this process: twice its ``limit`` of bytes, because there
    may be swap.

    Raises:
        MemoryError: there is no limit, or the kernel did not kill the process.
    """
    # Filled with ones, because a page of zeros takes no memory.
    held = [b"\1" * _CHUNK_BYTES for _ in range(2 * (limit or 0) // _CHUNK_BYTES)]
    raise MemoryError(f"out of memory on purpose, with {len(held) * _CHUNK_BYTES} bytes taken")
