"""Paths that a person gives in an option, a YAML key or an argument. Only this module expands
``~``.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from allhands.errors import AllhandsError, ConfigError

_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes
# Number of similar names that are looked at, and of paths that are proposed.
_TRIED, _NAMED = 10, 3
# Endings of files that people expect from commands that write a directory.
_FILES = frozenset(
    (
        *(".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md", ".html", ".png"),
        *(".safetensors", ".gguf", ".npz", ".bin", ".pt", ".zip", ".gz", ".tar", ".yaml", ".yml"),
    )
)
# Environment variables whose values are paths.
VARIABLES = (
    *(
        "ALLHANDS_CACHE",
        "ALLHANDS_TOKEN_CACHE",
        "ALLHANDS_KERNEL_CACHE",
        "ALLHANDS_CHECKPOINT_DIR",
        "ALLHANDS_FAULTS",
    ),
    "XDG_CACHE_HOME",
)


class HomePath(str):
    """A path that began with ``~``, with the home directory in its place.

    Attributes:
        written: the path as it was given. It has the same meaning on a computer with another home
            directory.
    """

    written: str

    def __new__(cls, expanded: str, written: str) -> HomePath:
        made = super().__new__(cls, expanded)
        made.written = written
        return made


def expanded(text: str | os.PathLike[str]) -> str:
    """Return ``text`` with the home directory in place of a ``~`` or ``~user`` at its beginning.

    Raises:
        ValueError: ``~user`` is neither a user here nor a file, or ``text`` cannot be a path: it is
            too long, is not UTF-8, or has a NUL byte.
    """
    text = os.fspath(text)
    require_words(text)
    if "\0" in text:
        raise ValueError("it has a NUL byte, which no path can have")
    if len(text.encode()) > _LONGEST_PATH or any(
        len(part.encode()) > _LONGEST_NAME for part in text.split("/")
    ):
        raise ValueError(f"it is too long for a path: names have up to {_LONGEST_NAME} bytes")
    if not text.startswith("~"):
        return text
    first = text.partition("/")[0]
    if (home := os.path.expanduser(first)) == first:
        if os.path.lexists(first):  # a file may be called so
            return text
        raise ValueError(
            f"there is no user {first[1:]!r} here, whose home directory {first} would be"
        )
    return HomePath(home + text[len(first) :], text)


# Returns False, or raises an error, for a path that a command would refuse.
Fits = Callable[[Path], object]


def near_paths(path: str | os.PathLike[str], fits: Fits) -> list[str]:
    """Return up to three existing paths that are spelled almost like ``path`` and fit, the likeliest
    first; none if ``path`` exists.
    """
    written = Path(path)
    if os.path.lexists(path) or not written.parts:
        return []
    *before, last = written.parts[bool(written.anchor) :] or (written.anchor,)
    places = [Path(written.anchor)]
    for part in before:
        found = (inner for place in places for inner in _like(place, part) if inner.is_dir())
        places = [*islice(found, _NAMED)]
    near = (inner for place in places for inner in _like(place, last) if _suits(inner, fits))
    return [str(one) for one in islice(near, _NAMED)]


def _suits(path: Path, fits: Fits) -> bool:
    try:
        return fits(path) is not False
    except (AllhandsError, OSError):
        return False


def _like(place: Path, name: str) -> list[Path]:
    if os.path.lexists(place / name):
        return [place / name]
    try:
        there = {other.lower(): other for other in os.listdir(place)}
    except OSError:
        return []
    return [
        place / there[near] for near in difflib.get_close_matches(name.lower(), there, n=_TRIED)
    ]


def meant(path: str | os.PathLike[str], hint: str, fits: Fits) -> str:
    """Return ``hint``, about a path that does not exist; existing paths that are spelled almost
    like it come first, if there are any.

    Args:
        fits: tells whether the command would take a path, by what it returns or raises.
    """
    near = near_paths(path, fits)
    return f"did you mean {' or '.join(near)}; or {hint}" if near else hint


def output_file(path: Path, forms: Sequence[str]) -> Path:
    """Return the path of a file to write; a name without a suffix gets the first of ``forms``.

    Args:
        forms: the suffixes of the forms in which it can be written, in lower case.

    Raises:
        ConfigError: ``path`` is a directory, or its suffix names another form.
    """
    if path.name in ("", "..") or path.is_dir():
        raise ConfigError(
            "this is a directory, not the name of a file",
            code="output-name-invalid",
            where=str(path),
            hint=f"name a file in it: {path / f'NAME{forms[0]}'}",
        )
    if not path.suffix:
        return path.with_name(path.name + forms[0])
    if path.suffix.lower() not in forms:
        raise ConfigError(
            f"the file cannot be written as {path.suffix}",
            code="output-name-invalid",
            where=str(path),
            hint=f"choose a name that ends in {', '.join(forms)}",
        )
    return path


def require_directory_name(path: Path) -> None:
    """Refuse the name of a file for a directory that will be made.

    Raises:
        ConfigError: nothing has this name yet, and its suffix is that of a file.
    """
    if path.suffix.lower() in _FILES and not os.path.lexists(path):
        raise ConfigError(
            f"a directory is written, but {path.suffix} is the ending of a file",
            code="output-name-invalid",
            where=str(path),
            hint=f"name a directory: {path.with_suffix('')}",
        )


def require_words(text: str) -> None:
    """Refuse a text that is not UTF-8, such as a terminal with another encoding sends.

    Raises:
        ValueError: the text is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it is not UTF-8 text") from None


def local_path(path: str | os.PathLike[str], where: str) -> str:
    """Return :func:`expanded` of ``path``.

    Args:
        where: the option, argument or variable that gives the path, for messages.

    Raises:
        ConfigError: there is no such user here, or no file can have this name.
    """
    try:
        return expanded(path)
    except ValueError as error:
        tilde = os.fspath(path).startswith("~")
        raise ConfigError(
            str(error),
            code="path-invalid",
            where=where,
            hint="correct the path" + "; ./~name is a file whose name begins with ~" * tilde,
        ) from None


def check_variables(environ: Mapping[str, str]) -> None:
    """Refuse environment variables with an invalid path, before a directory named ``~user`` is
    made.

    Raises:
        ConfigError: a variable of :data:`VARIABLES` names an unknown user, or cannot be a path.
    """
    for name in VARIABLES:
        local_path(environ.get(name, ""), name)


def written(path: str) -> str:
    """Return ``path`` for other computers: with its ``~``, if it was given with one."""
    return path.written if isinstance(path, HomePath) else path
