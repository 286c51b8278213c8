"""Hashes of the files that a run has read, to name the files that differ between computers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from allhands.data.rows import NAMES_OF_SPLITS
from allhands.data.store import input_hash
from allhands.data.tokenise import tokenizer_files_of

_MOST_FILES = 200


def files_behind_data(data: Path, splits: Collection[str], model: Path) -> dict[str, str]:
    """Return the SHA-256 of the data files of these splits and of the tokenizer's files.

    The keys are ``data/NAME`` and ``tokenizer/NAME``.
    """
    tokenizer = tokenizer_files_of(model) if model.is_dir() else []
    return {**hashes("data", _data_files(data, splits)), **hashes("tokenizer", tokenizer)}


def hashes(role: str, files: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of each readable file, by ``role/name``."""
    found: dict[str, str] = {}
    for file in files:
        try:
            found[f"{role}/{file.name}"] = input_hash(file)
        except OSError:
            continue  # the comparison reports it as missing
    return found


def _data_files(path: Path, wanted: Collection[str]) -> list[Path]:
    """Return the files named like these splits; none if there are more than 200."""
    if path.is_file():
        return [path]
    begin = [name for name, split in NAMES_OF_SPLITS.items() if split in wanted]
    found = {
        file
        for name in begin
        for file in (*path.glob(f"{name}*"), *path.glob(f"{name}/*"))
        if file.is_file()
    }
    return sorted(found) if len(found) <= _MOST_FILES else []
