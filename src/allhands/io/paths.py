"""The one place that knows what ``~`` means in a path that a person gives: an option, a YAML key,
an argument.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from allhands.errors import ConfigError

_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes
# Variables of the environment that are paths.
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
        written: as it was given. On another computer, with another home directory, this is what is
            meant.
    """

    written: str

    def __new__(cls, expanded: str, written: str) -> HomePath:
        made = super().__new__(cls, expanded)
        made.written = written
        return made


def expanded(text: str | os.PathLike[str]) -> str:
    """``text`` with the home directory for a ``~`` or ``~user`` at its beginning; all else stays as
    it is.

    Raises:
        ValueError: there is no such user here, nor a file of that name; or no file can be called
            so.
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


def near_paths(path: str | os.PathLike[str]) -> list[str]:
    """Up to three paths that exist and are spelled almost like ``path``, which does not, the
    likeliest first.
    """
    written = Path(path)
    found = [Path(written.anchor)]
    for part in written.parts[1:] if written.anchor else written.parts:
        found = [inner for place in found for inner in _like(place, part)][:3]
    return [] if os.path.lexists(path) else [str(one) for one in found]


def _like(place: Path, name: str) -> list[Path]:
    if os.path.lexists(place / name):
        return [place / name]
    try:
        there = {other.lower(): other for other in os.listdir(place)}
    except OSError:
        return []
    return [place / there[near] for near in difflib.get_close_matches(name.lower(), there, n=3)]


def meant(path: str | os.PathLike[str], hint: str) -> str:
    """``hint`` about a path that must exist; if there is only one that is spelled almost like it,
    that one first.
    """
    near = near_paths(path)
    return f"did you mean {' or '.join(near)}; or {hint}" if near else hint


def require_words(text: str) -> None:
    """
    Raises:
        ValueError: bytes of it are no UTF-8, as what a terminal of another encoding has sent.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it is not UTF-8 text") from None


def local_path(path: str | os.PathLike[str], where: str) -> str:
    """:func:`expanded`, of what ``where`` gives: an option, an argument or a variable.

    Raises:
        ConfigError: there is no such user here, or no file can be called so.
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
    """Refuse a ``~user`` that is nobody before a directory of that name is made.

    Raises:
        ConfigError: a variable names one.
    """
    for name in VARIABLES:
        local_path(environ.get(name, ""), name)


def written(path: str) -> str:
    """``path`` as other computers are told of it: with the ``~`` that it was given with."""
    return path.written if isinstance(path, HomePath) else path
