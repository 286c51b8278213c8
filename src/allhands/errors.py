"""Exceptions for users, each with an exit code and a hint that says what to do.

Every error that wrong input or a failing machine can cause is an :class:`AllhandsError`. The
command line prints it without a traceback and exits with ``exit_code``; library users catch the
class.
"""

from __future__ import annotations

import copyreg
import sys
from typing import Any, ClassVar


class AllhandsError(Exception):
    """Base class: one clear message, where it happened, and what to do about it.

    Args:
        message: what is wrong, in one sentence.
        code: the fault, in at most five words with hyphens (``"file-missing"``). It is the same in
            every version, and belongs to one exit code.
        where: file and line (``"train.jsonl:12"``), flag (``"--num-layers"``) or rank, if known.
        hint: what the user can do now.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self, message: str, *, code: str, where: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.where = where
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        # Other processes send errors: unpickling sets the attributes, and does not call __init__.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\n  what to do: {self.hint}" if self.hint else text


class ConfigError(AllhandsError):
    """A flag, a YAML key or a combination of them cannot work, or the place of an output is taken."""

    exit_code = 2


class DataError(AllhandsError):
    """Missing, unreadable or malformed training data."""

    exit_code = 3


class ModelError(AllhandsError):
    """Missing or unreadable model, tokenizer or adapter, or a model without the requested part."""

    exit_code = 4


class StorageError(AllhandsError):
    """A file could not be written: disk full, read-only, no permission, or another run writes into
    the directory.
    """

    exit_code = 5


class TakenError(StorageError):
    """The place of an output is taken by a foreign file, or by an earlier result that may not be
    replaced.
    """

    exit_code = ConfigError.exit_code


class NumericsError(AllhandsError):
    """A loss or gradient is not a finite number."""

    exit_code = 6


class DistributedError(AllhandsError):
    """The processes could not be started, could not connect, or do not agree."""

    exit_code = 7


class PeerLostError(DistributedError):
    """This rank ended because another rank had ended; that rank has the cause."""

    exit_code = 8


class CheckpointError(AllhandsError):
    """A checkpoint is missing or damaged."""

    exit_code = 9


class Interrupted(AllhandsError):
    """Stopped by Ctrl-C, after the trained weights were saved."""

    exit_code = 130


class Regroup(AllhandsError):
    """Ended at a checkpoint at the supervisor's request, to go on with other ranks; not an error."""

    exit_code = 75


def peer_lost() -> PeerLostError:
    """Return the error of a rank whose connection to another one has ended."""
    return PeerLostError(
        "the connection to another rank was lost",
        code="peer-lost",
        hint="look for the rank that ended first",
    )


def behind_import(error: BaseException) -> BaseException:
    """Return what an error of an import means: Ctrl-C, or an MLX that is not there; return any other
    error unchanged.

    For a KeyboardInterrupt Python gives an ImportError of a C extension, and a RuntimeError of a
    class that is being made.
    """
    if isinstance(error.__cause__, KeyboardInterrupt):
        return error.__cause__
    if not isinstance(error, ImportError) or (error.name or "").partition(".")[0] != "mlx":
        return error
    hint = "pip install 'allhands[cpu]', or 'allhands[cuda13]' with an NVIDIA GPU"
    hint = "pip install mlx" if sys.platform == "darwin" else hint
    if isinstance(error, ModuleNotFoundError):
        return ConfigError("MLX is not installed", code="package-missing", hint=hint)
    return ConfigError(f"MLX cannot be loaded: {error}", code="package-unusable", hint=hint)


def error_named(name: str) -> type[AllhandsError] | None:
    """Return the error class with this name, or ``None`` if there is none."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, AllhandsError) else None


def in_our_words(message: str) -> str:
    """Shorten pydantic's message: "Input should be a valid integer, unable ..." -> "must be a valid
    integer".
    """
    message = message.removeprefix("Value error, ").replace("Input should be", "must be")
    message = message.replace("Field required", "is missing").replace(
        "Extra inputs are not permitted", "is unknown"
    )
    # The name of a class of ours says nothing to a person.
    kind, _, _ = message.partition(" or instance of ")
    message = (
        message
        if kind == message
        else kind.replace("a valid dictionary", "keys and values in braces")
    )
    return message.partition(", unable to parse")[0]
