"""The exceptions a user can meet, each with its exit code and the line that says what to do.

Everything that wrong input or a failing machine can cause is an :class:`AllhandsError`. The command
line prints it without a traceback and exits with ``exit_code``; library users catch the class.
"""

from __future__ import annotations

from typing import ClassVar


class AllhandsError(Exception):
    """Base class: one clear message, where it happened, and what to do about it.

    Args:
        message: what is wrong, in one sentence.
        where: file and line (``"train.jsonl:12"``), flag (``"--num-layers"``) or rank, if known.
        hint: what the person can do now.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\n  what to do: {self.hint}" if self.hint else text


class ConfigError(AllhandsError):
    """A flag, YAML key or combination of them that cannot work, or an output whose place is taken."""

    exit_code = 2


class DataError(AllhandsError):
    """Missing, unreadable or malformed training data."""

    exit_code = 3


class ModelError(AllhandsError):
    """Missing or unreadable model, tokenizer or adapter, or a model that lacks what was asked for."""

    exit_code = 4


class StorageError(AllhandsError):
    """Something could not be written: disk full, read-only, no permission."""

    exit_code = 5


class TakenError(StorageError):
    """The place of an output is taken: by what is not ours, or by an earlier result that may not be replaced."""

    exit_code = ConfigError.exit_code


class NumericsError(AllhandsError):
    """A loss or gradient that is not a finite number."""

    exit_code = 6


class DistributedError(AllhandsError):
    """The processes could not be started, could not connect, or do not agree."""

    exit_code = 7


class PeerLostError(DistributedError):
    """Another rank of the group ended; this rank is the consequence, not the cause."""

    exit_code = 8


class CheckpointError(AllhandsError):
    """A checkpoint that is missing or damaged."""

    exit_code = 9


class Interrupted(AllhandsError):
    """Stopped by Ctrl-C, after what was trained had been saved."""

    exit_code = 130


class Regroup(AllhandsError):
    """Ended at a checkpoint, because the supervisor asked for it, to go on with other ranks; not an error."""

    exit_code = 75


def without_import(error: BaseException) -> BaseException:
    """Return the interrupt for the ImportError that a C extension makes of it; any other error as it is."""
    cause = error.__cause__
    return cause if isinstance(error, ImportError) and isinstance(cause, KeyboardInterrupt) else error


def error_named(name: str) -> type[AllhandsError] | None:
    """The class of errors of that name; ``None``: there is none."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, AllhandsError) else None


def in_our_words(message: str) -> str:
    """Pydantic's message, shorter: "Input should be a valid integer, unable ..." -> "must be a valid integer"."""
    message = message.removeprefix("Value error, ").replace("Input should be", "must be")
    message = message.replace("Field required", "is missing").replace("Extra inputs are not permitted", "is unknown")
    return message.partition(", unable to parse")[0]
