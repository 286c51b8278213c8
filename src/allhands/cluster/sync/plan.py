"""The files to copy, and the places that they have on every host."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allhands.cluster.hosts import Host
from allhands.cluster.probes.trees import cache_place, hub_place
from allhands.errors import ConfigError, DataError
from allhands.io.paths import meant

_OURS = ".allhands-"  # begins the names of directories that a sync leaves for the next one
# Variables of the ranks that decide where their caches are.
_PLACES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "ALLHANDS_CACHE")


@dataclass(frozen=True)
class Root:
    """A directory with the same meaning on every host.

    Attributes:
        base: ``"absolute"``; ``"cwd"``, the host's working directory; ``"home"``; ``"hub"`` or
            ``"cache"``, the caches of the Hub and of allhands.
        at: the path below it, or the absolute one.
    """

    base: str
    at: str

    def on(self, host: Host) -> dict[str, Any]:
        """Return the root as it is sent to the host, which makes a path of it."""
        found: dict[str, Any] = {"base": self.base, "at": self.at}
        if self.base == "cwd":
            found |= {"cwd": host.cwd or os.getcwd(), "required": host.cwd is not None}
        return found


@dataclass(frozen=True)
class FoundFile:
    """A file here, and its name below a root elsewhere."""

    path: Path
    root: Root
    parts: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        """A key that is equal for equal places, whichever root names them."""
        return self.root.base, os.path.normpath(os.path.join(self.root.at, *self.parts))


@dataclass(frozen=True)
class SyncPlan:
    """The files to copy.

    Attributes:
        notes: files that were left out, and why.
        by_host: the files of a host by its name, if it does not get all.
    """

    files: tuple[FoundFile, ...]
    notes: tuple[str, ...]
    by_host: Mapping[str, Sequence[FoundFile]] = field(default_factory=dict[str, list[FoundFile]])


def make_plan(words: Sequence[str]) -> SyncPlan:
    """List the files of these paths, each a file or a directory.

    A path has the same meaning on every host: a relative one is in the host's working directory,
    one with ``~`` in its home directory, and an absolute one in the same place. A file in the cache
    of the Hub or of allhands belongs into that cache there. Links are followed, and their targets
    are copied in their place.

    Raises:
        ConfigError: there is no such path.
        DataError: something cannot be read.
    """
    notes: list[str] = []
    found: dict[tuple[str, str], FoundFile] = {}
    for word in words:
        for file in _found(word, notes):
            found.setdefault(file.key, file)
    if not found:
        raise ConfigError(
            "there is nothing to copy",
            code="nothing-to-do",
            hint="give --model, --data, --config, or paths with files",
        )
    files = tuple(sorted(found.values(), key=lambda file: file.key))
    notes += _alike(files)
    return SyncPlan(files, tuple(notes))


def _found(word: str, notes: list[str]) -> Iterator[FoundFile]:
    path = Path(os.path.abspath(Path(os.path.expanduser(word))))
    if not path.exists():
        raise ConfigError(
            "there is no such file or directory",
            code="path-missing",
            where=word,
            hint=meant(path, "check the path", Path.exists),
        )
    base, at = _place(word, path)
    first, *rest = Path(at).parts if base == "hub" else ("",)
    if rest[:1] == ["snapshots"] and len(rest) > 1:
        yield from _snapshot(path, Root("hub", first), tuple(rest), notes)
    elif path.is_dir():
        for inner, parts in _below(path, notes):
            yield FoundFile(inner, Root(base, at), parts)
    else:
        yield FoundFile(path, Root(base, os.path.dirname(at)), (path.name,))


def _place(word: str, path: Path) -> tuple[str, str]:
    if word.startswith("~/") or word == "~":
        return "home", word[2:]
    if not os.path.isabs(word):
        return "cwd", os.path.normpath(word)
    for base, directory in (("hub", Path(hub_place())), ("cache", Path(cache_place()))):
        if path != directory and path.is_relative_to(directory):
            return base, str(path.relative_to(directory))
    return "absolute", str(path)


def _snapshot(
    path: Path, root: Root, below: tuple[str, ...], notes: list[str]
) -> Iterator[FoundFile]:
    """Yield a snapshot in the Hub's cache as plain files, and the refs by which the Hub's client
    finds it.
    """
    inner = _below(path, notes) if path.is_dir() else iter([(path, ())])
    for file, parts in inner:
        yield FoundFile(file, root, (*below, *parts))
    refs = Path(hub_place()) / root.at / "refs"
    for ref, parts in _below(refs, notes) if refs.is_dir() else ():
        if ref.read_text(errors="replace").strip() == below[1]:
            yield FoundFile(ref, root, ("refs", *parts))


def _below(
    directory: Path, notes: list[str], above: tuple[tuple[int, int], ...] = ()
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the files below a directory, by name; links are followed, but not in circles."""
    try:
        status = directory.stat()
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror}",
            code="data-unreadable",
            where=str(directory),
            hint="check its rights",
        ) from None
    own = (status.st_dev, status.st_ino)
    if own in above:
        notes.append(f"{directory} leads back to a directory above it: left out")
        return
    for entry in entries:
        path = directory / entry.name
        if entry.name.startswith(_OURS):
            continue
        if entry.is_dir():
            for inner, parts in _below(path, notes, (*above, own)):
                yield inner, (entry.name, *parts)
        elif not entry.is_file():
            notes.append(
                f"{path} is {'a link to nothing' if entry.is_symlink() else 'no regular file'}: left out"
            )
        else:
            yield path, (entry.name,)


def _alike(files: Sequence[FoundFile]) -> list[str]:
    """Return notes about names that differ in case only, which a Mac's file system ignores."""
    seen: dict[tuple[str, str], FoundFile] = {}
    notes: list[str] = []
    for file in files:
        other = seen.setdefault((file.key[0], file.key[1].casefold()), file)
        if other is not file:
            notes.append(
                f"{other.path} and {file.path} differ in case only: on a Mac one replaces the other"
            )
    return notes


def environment_of(host: Host) -> dict[str, str]:
    """Return the variables that decide where the caches of this host's ranks are, as far as
    allhands sets them.
    """
    here = (
        {"ALLHANDS_CACHE": os.environ["ALLHANDS_CACHE"]} if os.environ.get("ALLHANDS_CACHE") else {}
    )
    chosen: Mapping[str, str] = host.envs
    return here | {name: chosen[name] for name in _PLACES if name in chosen}
