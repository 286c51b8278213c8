"""The files that stand behind what a run has loaded, by their content: to say which of them differs
on a computer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from allhands.data.rows import NAMES_OF_SPLITS
from allhands.data.store import input_hash
from allhands.data.tokenise import tokenizer_files_of

_MOST_FILES = 200


def files_behind_data(data: Path, splits: Collection[str], model: Path) -> dict[str, str]:
    """SHA-256 of the data's files of these splits and of the tokenizer's, by ``role/name``."""
    tokenizer = tokenizer_files_of(model) if model.is_dir() else []
    return {**hashes("data", _data_files(data, splits)), **hashes("tokenizer", tokenizer)}


def hashes(role: str, files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of those files that can be read, by ``role/name``."""
    found: dict[str, str] = {}
    for file in files:
        try:
            found[f"{role}/{file.name}"] = input_hash(file)
        except OSError:
            continue  # it is told as missing
    return found


def _data_files(path: Path, wanted: Collection[str]) -> list[Path]:
    """The files of these splits by their names, unless there are very many."""
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
