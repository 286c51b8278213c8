"""Splits of a training set: from a folder with train, valid and test files, or a Hub dataset."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allhands.data.hub import load_hub, split_names
from allhands.data.reading import (
    file_type,
    notes_of,
    read_hint,
    read_records,
    require_type,
    unread_hint,
)
from allhands.data.records import ColumnNames, Record, parse_record
from allhands.data.saved import saved_files, saved_split, why_no_data
from allhands.data.store import input_hash
from allhands.errors import AllhandsError, ConfigError, DataError
from allhands.io.paths import Fits, meant

_PART = re.compile(
    r"(?P<before>.*?)(?P<number>\d+)-of-(?P<count>\d+)(?:-[0-9a-f]+)?(?P<after>\..*)?$"
)


@dataclass(frozen=True)
class RecordSource:
    """The records of one split, not yet read.

    Attributes:
        identity: JSON values that change whenever the records do; cheap to compute.
        records: reads them, from the beginning at each call.
        notes: sentences for the user about how the files are read.
    """

    identity: Callable[[], Any]
    records: Callable[[], Iterator[Record]]
    notes: Callable[[], tuple[str, ...]] = tuple


# Names of a split in a folder; the first one that is there counts.
_CALLED = {"valid": ("valid", "validation", "val", "dev")}


def split_of_folder(
    data_dir: Path, split: str, columns: ColumnNames, *, required: bool, alone: bool = False
) -> RecordSource | None:
    """Return the records of ``data_dir/{split}.jsonl`` (or ``.json``); None if the split is absent
    and not required.

    Without such a file, the records come from all files of readable types that are named
    ``{split}.*`` or ``{split}-*``, or from the files in the folder ``{split}``, in order of their
    names. "valid" may also be called validation, val or dev. A folder that ``save_to_disk`` wrote
    is one split, "train" if its name is no other.

    Args:
        split: "train", "valid" or "test".
        alone: whether a file of rows can be named in place of a folder; for advice.

    Raises:
        DataError: the folder, a required file, or one of several parts (``train-00001-of-00002``)
            is missing or unreadable. Reading the records raises it for a malformed record.
    """
    names = _entries(data_dir, lambda near: has_split(near, split, alone=alone))
    if files := _found(data_dir, split, names):
        return _source_of_files(files, [str(path.relative_to(data_dir)) for path in files], columns)
    if not required:
        return None
    there = ", ".join(names[:10]) + ", ..." * (len(names) > 10) if names else "nothing"
    hint = f"name the file {split}.jsonl ({split}.txt, {split}.parquet, {split}-1.txt do as well), or check --data; "
    hint += "`allhands data prepare` makes such a folder"
    unread = [unread_hint(data_dir / name) for name in names if name.split(".")[0] == split]
    raise DataError(
        f"{split}.jsonl is missing; the folder holds {there}",
        code="split-missing",
        where=str(data_dir),
        hint=unread[0] if unread else hint,
    )


def has_split(path: Path, split: str, *, alone: bool = False) -> bool:
    """Return True if a folder has this split.

    Args:
        alone: whether a file of rows also counts.

    Raises:
        DataError: the folder cannot be read, or a part of the split is missing.
    """
    if path.is_file():
        return alone and file_type(path) is not None
    return bool(_found(path, split, _entries(path)))


def _found(data_dir: Path, split: str, names: Sequence[str]) -> Sequence[Path] | None:
    """Return the files of a split, by the first of its names that is there; or the files of a saved
    dataset that is this split.
    """
    for called in _CALLED.get(split, (split,)):
        for name in (f"{called}.jsonl", f"{called}.json"):
            if name in names:
                return [data_dir / name]
        if files := _files_of(data_dir, called, names):
            return files
    saved = saved_files(data_dir)
    return saved if (saved_split(data_dir) or "train") == split else None


def _files_of(data_dir: Path, split: str, names: Sequence[str]) -> list[Path]:
    """Return the files that are named like a split, or lie in a folder of its name."""
    found = [
        data_dir / name
        for name in names
        if name.split(".")[0] == split or name.startswith(f"{split}-")
    ]
    folder = data_dir / split
    if folder.is_dir():
        if (saved := saved_files(folder)) is not None:
            return saved
        found = [folder / name for name in _entries(folder)]
    files = [
        path
        for path in found
        if file_type(path) is not None and path.is_file() and not why_no_data(path.name)
    ]
    _check_parts(files)
    return files


def _check_parts(files: Sequence[Path]) -> None:
    # All parts of a series such as train-00000-of-00002.parquet must be there: training on half of
    # the data would go unnoticed.
    series: defaultdict[tuple[str, str, str], set[int]] = defaultdict(set)
    for part in filter(None, (_PART.match(path.name) for path in files)):
        series[part["before"], part["count"], part["after"] or ""].add(int(part["number"]))
    for (before, total, after), there in series.items():
        count = int(total)
        first = 1 if count in there and 0 not in there else 0
        missing = [str(number) for number in range(first, first + count) if number not in there]
        if missing:
            numbers = ", ".join(missing[:3]) + (
                f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            )
            message = f"of the {count} parts {before}...-of-{count}{after} these numbers are missing: {numbers}"
            hint = (
                "fetch what is missing; or, if the rest is enough, rename the files, without -of-: "
            )
            raise DataError(
                message,
                code="data-part-missing",
                where=str(files[0].parent),
                hint=f"{hint}{before or 'train-'}1{after}",
            )


def source_of_one_file(path: Path, columns: ColumnNames) -> RecordSource:
    """Return the records of a file that was named itself.

    Raises:
        DataError: its name does not end in a type that can be read.
    """
    require_type(path, str(path))
    return _source_of_files([path], [str(path)], columns)


def _source_of_files(
    files: Sequence[Path], names: Sequence[str], columns: ColumnNames
) -> RecordSource:
    """Return the records of files, one file after the other; ``names`` are for errors."""
    pairs = list(zip(files, names, strict=True))
    return RecordSource(
        lambda: {"files": [[path.name, _hash(path)] for path in files], "columns": asdict(columns)},
        lambda: (
            record for path, name in pairs for record in read_records(path, columns, name=name)
        ),
        lambda: tuple(f"{path.name}: {note}" for path in files for note in notes_of(path)),
    )


def _entries(data_dir: Path, fits: Fits = Path.is_dir) -> list[str]:
    try:
        if data_dir.is_file():
            hint = (
                f"make a folder of it: allhands data prepare {data_dir} --out DIR, then --data DIR"
            )
            require_type(data_dir, str(data_dir))
            if data_dir.name.split(".")[0] == "train":
                hint = f"give the folder that holds {data_dir.name}: --data {data_dir.parent}"
            raise DataError(
                "this is a file, a folder is needed",
                code="data-not-directory",
                where=str(data_dir),
                hint=hint,
            )
        if not data_dir.exists():
            hint = "check --data; it takes a folder with train.jsonl and perhaps valid.jsonl, test.jsonl"
            raise DataError(
                "the data folder does not exist",
                code="data-missing",
                where=str(data_dir),
                hint=meant(data_dir, hint, fits),
            )
        return sorted(entry.name for entry in data_dir.iterdir())
    except OSError as error:
        hint = "give yourself permission to read the folder: chmod u+rx FOLDER"
        raise DataError(
            f"cannot read the folder: {error.strerror}",
            code="data-unreadable",
            where=str(data_dir),
            hint=hint,
        ) from error


def _hash(path: Path) -> str:
    try:
        return input_hash(path)
    except OSError as error:
        raise DataError(
            f"cannot read the file: {error.strerror}",
            code="data-unreadable",
            where=str(path),
            hint=read_hint(error),
        ) from error


@contextmanager
def full_places(data_dir: Path) -> Generator[None]:
    """Put the folder before the file's name in an error's place (``train.jsonl:12``)."""
    try:
        yield
    except AllhandsError as error:
        file = Path(re.sub(r":\d+$", "", error.where or ""))
        if error.where and not file.is_absolute() and (data_dir / file).is_file():
            error.where = str(data_dir / error.where)
        raise


# mlx_lm's defaults for the keys of `hf_dataset`.
_DEFAULT_SPLITS = {"train": "train[:80%]", "valid": "train[-10%:]", "test": None}
_VALIDATION = ("validation", "valid", "val", "dev", "eval")
_HF_KEYS = {
    "path",
    "config",
    *ColumnNames.__dataclass_fields__,
    *(f"{name}_split" for name in _DEFAULT_SPLITS),
}


def own_splits(path: str) -> dict[str, str]:
    """Return the options of :func:`split_of_hub` for the splits that a Hub dataset has itself.

    Without a validation split, only a test split is named. The defaults then cut training and
    validation rows from ``train``.

    Raises:
        DataError: the dataset cannot be found.
    """
    names = split_names(path)
    found = {"test_split": "test"} if "test" in names else {}
    valid = next((name for name in _VALIDATION if name in names), None)
    if valid and "train" in names:
        return {"train_split": "train", "valid_split": valid, **found}
    return found


def split_of_hub(
    spec: Mapping[str, Any] | Sequence[Mapping[str, Any]], split: str
) -> RecordSource | None:
    """Return one split ("train", "valid" or "test") of the datasets in the option ``hf_dataset``.

    The rows of several datasets follow each other. None if no dataset has this split: it is set to
    None, or is "test" and not named.

    Raises:
        ConfigError: a key is unknown, or ``path`` is missing.
        DataError: the dataset cannot be loaded. Reading the records raises it for a malformed one.
    """
    specs = [spec] if isinstance(spec, Mapping) else spec
    parts = [part for one in specs if (part := _hub_part(one, split)) is not None]
    if not parts:
        return None
    return RecordSource(
        lambda: [part.identity() for part in parts],
        lambda: (record for part in parts for record in part.records()),
    )


def _hub_part(spec: Mapping[str, Any], split: str) -> RecordSource | None:
    if unknown := sorted(set(spec) - _HF_KEYS):
        raise ConfigError(
            f"unknown keys {', '.join(unknown)}",
            code="option-unknown",
            where="hf_dataset",
            hint=f"known keys: {', '.join(sorted(_HF_KEYS))}",
        )
    path = spec.get("path")
    if not isinstance(path, str) or not path:
        raise ConfigError(
            "path is missing",
            code="option-missing",
            where="hf_dataset",
            hint="name the dataset: path: OWNER/NAME",
        )
    part = spec.get(f"{split}_split", _DEFAULT_SPLITS[split])
    if part is None:
        return None
    columns = ColumnNames.from_options(spec)
    rows = load_hub(path, split=part, **dict(spec.get("config") or {}))
    # The library's own hash of the rows and of all operations on them.
    known = getattr(rows, "_fingerprint", None)
    return RecordSource(
        lambda: [known if isinstance(known, str) else _hash_of_rows(rows), asdict(columns)],
        lambda: (
            parse_record(dict(row), columns, source=f"{path}[{part}]", line=n)
            for n, row in enumerate(rows, 1)
        ),
    )


def _hash_of_rows(rows: Any) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(dict(row), sort_keys=True, default=repr).encode())
    return digest.hexdigest()
