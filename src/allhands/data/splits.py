"""The splits of a training set: a folder with train, valid and test files, or a dataset of the Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allhands.data.reading import read_records
from allhands.data.records import ColumnNames, Record, parse_record
from allhands.errors import ConfigError, DataError


def load_split(data_dir: Path, split: str, columns: ColumnNames, *, required: bool) -> list[Record]:
    """All records of ``data_dir/{split}.jsonl`` (or ``.json``); [] if it is absent and not required.

    Args:
        split: "train", "valid" or "test".

    Raises:
        DataError: the folder, or a required file, is missing or unreadable, or a record is malformed.
    """
    try:
        if data_dir.is_file():
            hint = f"give the folder that holds train.jsonl: --data {data_dir.parent}"
            raise DataError("this is a file, a folder is needed", where=str(data_dir), hint=hint)
        if not data_dir.exists():
            hint = "check --data; it takes a folder with train.jsonl and perhaps valid.jsonl, test.jsonl"
            raise DataError("the data folder does not exist", where=str(data_dir), hint=hint)
        names = sorted(entry.name for entry in data_dir.iterdir())
    except OSError as error:
        hint = "give yourself permission to read the folder: chmod u+rx FOLDER"
        raise DataError(f"cannot read the folder: {error.strerror}", where=str(data_dir), hint=hint) from error
    for name in (f"{split}.jsonl", f"{split}.json"):
        if name in names:
            return list(read_records(data_dir / name, columns))
    if not required:
        return []
    there = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") if names else "nothing"
    raise DataError(
        f"{split}.jsonl is missing; the folder holds {there}",
        where=str(data_dir),
        hint=f"name the file {split}.jsonl, or check --data",
    )


# mlx_lm's defaults for the keys of `hf_dataset`.
_DEFAULT_SPLITS = {"train": "train[:80%]", "valid": "train[-10%:]", "test": None}
_HF_KEYS = {
    "path",
    "config",
    *ColumnNames.__dataclass_fields__,
    *(f"{name}_split" for name in _DEFAULT_SPLITS),
}


def load_hf_dataset(spec: Mapping[str, Any] | Sequence[Mapping[str, Any]], split: str) -> list[Record]:
    """One split ("train", "valid" or "test") of the dataset or datasets that ``hf_dataset`` describes.

    Several datasets follow each other. A split set to None gives no records.

    Raises:
        ConfigError: a key is unknown, or ``path`` is missing.
        DataError: the library is not installed, the dataset cannot be loaded, or a record is malformed.
    """
    specs = [spec] if isinstance(spec, Mapping) else spec
    return [record for one in specs for record in _load_one_hf(one, split)]


def _load_one_hf(spec: Mapping[str, Any], split: str) -> list[Record]:
    if unknown := sorted(set(spec) - set(_HF_KEYS)):
        raise ConfigError(
            f"unknown keys {', '.join(unknown)}",
            where="hf_dataset",
            hint=f"known keys: {', '.join(_HF_KEYS)}",
        )
    path = spec.get("path")
    if not isinstance(path, str) or not path:
        raise ConfigError("path is missing", where="hf_dataset", hint="name the dataset: path: OWNER/NAME")
    part = spec.get(f"{split}_split", _DEFAULT_SPLITS[split])
    if part is None:
        return []
    columns = ColumnNames.from_options(spec)
    rows = _hf_rows(path, part, dict(spec.get("config") or {}))
    source = f"{path}[{part}]"
    return [parse_record(dict(row), columns, source=source, line=n) for n, row in enumerate(rows, start=1)]


def _hf_rows(path: str, part: str, options: dict[str, Any]) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]  # optional, and slow to import
    except ImportError as error:
        raise DataError(
            "the datasets library is not installed", where="hf_dataset", hint="pip install datasets"
        ) from error
    try:
        return datasets.load_dataset(path, split=part, **options)
    except Exception as error:  # the library raises many kinds: network, missing name, bad split, parsing
        raise DataError(
            f"cannot load the split {part!r}: {type(error).__name__}: {error}",
            where=path,
            hint="check the name, the split and the network; `huggingface-cli login` for a private dataset",
        ) from error
