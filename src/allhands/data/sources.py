"""Sources of rows that people name on the command line: files, directories, datasets of the Hugging
Face Hub.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from allhands.data.hub import HUB_NAME, load_hub
from allhands.data.reading import (
    TYPE_NAMES,
    FileType,
    file_type,
    notes_of,
    read_rows,
    require_type,
    splits_in,
    unpacked_name,
    unread_hint,
)
from allhands.data.rows import Item, ReadOptions, Row, RowProblem, with_rest
from allhands.data.saved import (
    saved_files,
    saved_split,
    split_called,
    split_of_directory,
    split_of_part,
    why_no_data,
)
from allhands.errors import ConfigError, DataError
from allhands.io.paths import meant

_HUB = re.compile(r"(?:hf://(?:datasets/)?|https://huggingface\.co/datasets/)")
# Stems of files that describe a Hub dataset and hold no data.
_ABOUT_DATA = {"readme", "license", "licence", "notice", "changelog"}
# Directories of a proposed directory that are searched for data.
_LOOKED = 100
# Files that `data prepare` writes beside the data.
REPORT, LEFT_OUT = "report.json", "left-out.jsonl"


@dataclass(frozen=True)
class SourceOptions:
    """Options of finding and reading sources.

    Attributes:
        documents: how a plain text file is cut into documents, see :class:`ReadOptions`.
        hub_split: the one split of a Hub dataset to read, as the Hub names it; None reads all.
        hub_config: the configuration (subset) of a Hub dataset.
        streaming: read a Hub dataset while it is downloaded, without keeping it.
        limit: read at most this many rows of each source, unreadable ones included.
    """

    documents: str = "auto"
    hub_split: str | None = None
    hub_config: str | None = None
    streaming: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(
                f"{self.limit} rows are none",
                code="value-out-of-range",
                where="--limit",
                hint="give a number of at least 1",
            )
        ReadOptions(documents=self.documents)  # checks it


@dataclass(frozen=True)
class Source:
    """One file, or one split of a Hub dataset.

    Attributes:
        name: the path as it was named, or ``OWNER/NAME[SPLIT]``; the ``source`` of its rows.
        split: "train", "valid" or "test" if the names of file, folder or Hub split say so.
        read: starts to read the source.
        limit: most rows and problems that are read; None: all.
        kind: the type of the file; None for a Hub dataset.
        skipped: notes as :class:`RowProblem`: on how this file is read, and on files that were
            passed over. The first source of a directory has the notes on passed-over files.
    """

    name: str
    split: str | None
    read: Callable[[], Iterator[Item]]
    limit: int | None = None
    kind: FileType | None = None
    skipped: tuple[RowProblem, ...] = ()

    def rows(self) -> Iterator[Item]:
        """Return an iterator over rows and problems, in order; each call starts again."""
        return islice(self.read(), self.limit)


def find_sources(names: Sequence[str], options: SourceOptions | None = None) -> list[Source]:
    """Return the sources that are named, in order.

    A name is a file; a directory, which is searched with its sub-directories in sorted order; or a
    Hub dataset, ``OWNER/NAME`` or ``hf://OWNER/NAME``. A name that exists on disk is not looked for
    on the Hub.

    A source has a split if its file is called train, valid, validation, val, dev or test, also with
    a number as in ``train-00000-of-00003.parquet``. Otherwise the nearest directory with such a
    name decides, up to the named directory; a file that was named itself has only its own
    directory. A Hub dataset has the Hub's splits.

    Raises:
        ConfigError: no source is named, a source is named twice, or an option concerns no source.
        DataError: a name is neither a file, a directory nor a Hub dataset; a directory holds
            nothing to read; or a Hub dataset cannot be loaded.
    """
    options = options or SourceOptions()
    if not names:
        raise ConfigError(
            "no source is named",
            code="option-missing",
            hint="name files, directories or Hub datasets (OWNER/NAME)",
        )
    hub = {name: hub_name for name in names if (hub_name := _hub_name(name))}
    # Local names come first, so that a misspelt file is reported before any download.
    _check_hub_options(options, bool(hub))
    local = {name: _local(name, options) for name in names if name not in hub}
    found = [
        source for name in names for source in local.get(name) or _hub_sources(hub[name], options)
    ]
    _check_found(found, options)
    return found


def _check_hub_options(options: SourceOptions, any_hub: bool) -> None:
    for flag in ("hub_split", "hub_config", "streaming"):
        if getattr(options, flag) and not any_hub:
            raise ConfigError(
                "no Hub dataset is named",
                code="option-without-effect",
                where=f"--{flag.replace('_', '-')}",
                hint="name a dataset as OWNER/NAME or hf://OWNER/NAME, or leave the option out",
            )


def _check_found(found: Sequence[Source], options: SourceOptions) -> None:
    if options.documents != "auto" and not any(source.kind == "text" for source in found):
        raise ConfigError(
            "no plain text file is named",
            code="option-without-effect",
            where="--documents",
            hint="it concerns .txt and .md files; leave it out",
        )
    seen: set[str] = set()
    for source in found:
        place = source.name if source.kind is None else os.path.realpath(source.name)
        if place in seen:
            raise ConfigError(
                "it is named twice",
                code="input-given-twice",
                where=source.name,
                hint="name each file once, directly or by its directory",
            )
        seen.add(place)


def _local(name: str, options: SourceOptions) -> list[Source]:
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):
        return _directory(path, options)
    if not name or not os.path.exists(path):
        hint = f"check the name: there is no {path.name} in {path.parent.absolute()}; a dataset of the Hub is OWNER/NAME"
        raise DataError(
            "no such file or directory",
            code="data-missing",
            where=name,
            hint=meant(path, hint, _is_readable),
        )
    require_type(path, name)
    return _file(path, (path.parent.name,), options)


def _is_readable(path: Path) -> bool:
    """Return True if a file, or one of the first files in a directory, has a type that is read."""
    files = (name for _, _, names in islice(os.walk(path), _LOOKED) for name in names)
    return any(
        file_type(Path(name)) is not None for name in ([path.name] if path.is_file() else files)
    )


def _file(path: Path, folders: Sequence[str], options: SourceOptions) -> list[Source]:
    """Return a file as a source; a file with several splits as one source for each."""
    kind = file_type(path)
    notes = tuple(RowProblem(str(path), 0, note, code="file-note") for note in notes_of(path))

    def source(name: str, split: str | None, only: str | None = None) -> Source:
        read = partial(
            read_rows, path, ReadOptions(documents=options.documents, only=only), name=name
        )
        return Source(name, split, read, options.limit, kind, notes)

    if keys := splits_in(path):
        return [source(f"{path}[{key}]", split_called(key), key) for key in keys]
    stem = unpacked_name(path).rpartition(".")[0]
    # Names in the cache of the datasets library begin with the type of the origin:
    # json-train.arrow.
    stems = [stem, re.sub(r"^.*?-(?=[a-z])", "", stem)] if kind == "arrow" else [stem]
    return [
        source(
            str(path),
            next(
                filter(None, [*map(split_called, stems), *map(split_of_directory, folders[::-1])]),
                None,
            ),
        )
    ]


def _directory(root: Path, options: SourceOptions) -> list[Source]:
    files, skipped = _walk(root)
    if any(file_type(path) != "text" for path in files):
        about = {
            path: "it describes the data" for path in files if path.stem.lower() in _ABOUT_DATA
        }
        files, skipped = [path for path in files if path not in about], skipped | about
    if not files:
        raise _nothing_to_read(root, skipped)
    sources: list[Source] = []
    for path in files:
        found = _file(path, (root.name, *path.relative_to(root).parts[:-1]), options)
        saved = saved_split(path.parent) if found[0].split is None else None
        sources += [replace(source, split=saved) for source in found] if saved else found
    problems = (
        RowProblem(str(path), 0, f"skipped: {why}", code="file-note")
        for path, why in skipped.items()
    )
    return [replace(sources[0], skipped=(*sources[0].skipped, *problems)), *sources[1:]]


def _nothing_to_read(root: Path, skipped: Iterable[Path]) -> DataError:
    there = ", ".join(path.name for path in islice(skipped, 10)) or "nothing"
    message = f"the directory has no file that can be read; it holds {there}"
    hints = {unread_hint(path) for path in skipped if path.suffix}
    hint = hints.pop() if len(hints) == 1 else f"files are recognised by their names: {TYPE_NAMES}"
    return DataError(message, code="data-missing", where=str(root), hint=hint)


def _walk(root: Path) -> tuple[list[Path], dict[Path, str]]:
    """Return the readable files below a directory, sorted, and the other entries with reasons."""
    files: list[Path] = []
    skipped: dict[Path, str] = {}

    def stop(error: OSError) -> None:
        raise DataError(
            f"cannot read the directory: {error.strerror}",
            code="data-unreadable",
            where=str(error.filename),
            hint="give yourself permission to read it: chmod u+rx DIRECTORY",
        )

    for folder, folders, names in os.walk(root, onerror=stop):
        for path in [Path(folder, name) for name in sorted(folders)]:
            if path.name.startswith(".") or path.is_symlink():
                folders.remove(path.name)
                skipped[path] = "hidden" if path.name.startswith(".") else "a link to a directory"
        saved = saved_files(Path(folder))
        for path in [Path(folder, name) for name in names if name not in (REPORT, LEFT_OUT)]:
            if why := _why_skipped(path, saved):
                skipped[path] = why
            else:
                files.append(path)
    return sorted(files, key=lambda path: path.parts), skipped


def _why_skipped(path: Path, saved: Sequence[Path] | None) -> str | None:
    """Return why a file is not read, or None.

    Args:
        saved: the files that a saved dataset in the same folder names; None: no saved dataset.
    """
    if path.name.startswith("."):
        return "hidden"
    if not path.is_file():
        return "not a file, or a link to nothing"
    kind = file_type(path)
    if kind is None:
        return "files of this type cannot be read"
    if why := why_no_data(path.name):
        return why
    if saved is not None and kind == "arrow" and path not in saved:
        return "state.json does not name it"
    return None


# The Hub


def _hub_name(name: str) -> str | None:
    """Return OWNER/NAME if a Hub dataset is meant, else None.

    Raises:
        ConfigError: the name has the Hub's prefix but is not a dataset's.
    """
    if scheme := _HUB.match(name):
        rest = name[scheme.end() :].strip("/")
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", rest):
            raise ConfigError(
                "this is no name of a Hub dataset",
                code="hub-name-invalid",
                where=name,
                hint="write hf://OWNER/NAME",
            )
        return rest
    is_local = (
        os.path.exists(name)
        or os.path.isdir(name.partition("/")[0])
        or file_type(Path(name)) is not None
    )
    return name if HUB_NAME.fullmatch(name) and not is_local else None


def _hub_sources(name: str, options: SourceOptions) -> list[Source]:
    try:
        loaded = load_hub(
            name, name=options.hub_config, split=options.hub_split, streaming=options.streaming
        )
    except DataError as error:
        error.hint = meant(name, error.hint or "check the name", _is_readable)
        raise
    parts = {options.hub_split: loaded} if options.hub_split else loaded
    return [
        Source(where, split_of_part(part), partial(_hub_rows, rows, where), options.limit)
        for part, rows in parts.items()
        for where in [f"{name}[{part}]"]
    ]


def _hub_rows(rows: Iterable[Any], name: str) -> Iterator[Item]:
    number = 0
    try:
        for number, value in enumerate(rows, start=1):
            yield Row(dict(value), name, number)
    except Exception as error:  # a download that breaks off, a file that is damaged, a picture that needs a library
        message = f"cannot be read: {type(error).__name__}: {error}"
        yield with_rest(
            RowProblem(
                name,
                number + 1,
                message,
                "check the network and start again",
                code="download-broken-off",
            )
        )
    else:
        if not number:
            yield RowProblem(
                name, 0, "the split is empty", "choose another: --hub-split", code="split-empty"
            )
