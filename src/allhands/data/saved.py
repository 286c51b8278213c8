"""Folders that the ``datasets`` library writes (``save_to_disk`` and its cache), and names of
splits.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from allhands.data.rows import NAMES_OF_SPLITS
from allhands.errors import DataError
from allhands.io.formatting import counted

STATE = "state.json"
# Files that describe the data; files in which the library caches results of computations.
_ABOUT = re.compile(r"(dataset_infos?|dataset_dict|state)\.json")
_CACHED = re.compile(r"(cache-[0-9a-f]+|tmp\w+)(_\d+_of_\d+)?\.arrow|indices\.arrow")
_SHARD = re.compile(r"(_(sft|gen|prefs))?([-_.]?\d+(-of-\d+)?(-[0-9a-f]+)?)?$")


def why_no_data(name: str) -> str | None:
    """Return why a file of the library holds no rows of the data; None if it may hold some."""
    if _ABOUT.fullmatch(name):
        return "it describes the data"
    return "a copy that the datasets library keeps for itself" if _CACHED.fullmatch(name) else None


def split_called(name: str) -> str | None:
    """Return the split in the name of a file (without ending), such as ``train-00000-of-00003``."""
    return NAMES_OF_SPLITS.get(_SHARD.sub("", name.lower()))


def split_of_directory(name: str) -> str | None:
    """Return the split in the name of a folder: a usual name, also in the form ``train_sft``."""
    return NAMES_OF_SPLITS.get(re.sub(r"_(sft|gen|prefs)$", "", name.lower()))


def split_of_part(part: str) -> str | None:
    """Return the split in the library's name of a part: train of ``train_sft``, ``train[:10%]``."""
    return NAMES_OF_SPLITS.get(re.split(r"[^a-z]", part.lower(), maxsplit=1)[0])


def saved_files(folder: Path) -> list[Path] | None:
    """Return the files of the data set that ``save_to_disk`` wrote into ``folder``, in order.

    None if there is no such data set.

    Raises:
        DataError: the folder lacks a file, or its rows are a selection that only the library can
            make.
    """
    if not (state := _state(folder)):
        return None
    if state.get("_indices_data_files"):
        way = "import datasets; datasets.load_from_disk('FOLDER').to_parquet('NEW.parquet')"
        raise DataError(
            "the rows of this data set are a selection of those in its files",
            code="saved-dataset-indexed",
            where=str(folder),
            hint=f'write it out: python -c "{way}"',
        )
    files = [folder / str(entry["filename"]) for entry in state["_data_files"]]
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(
            f"{', '.join(missing[:3])} of {counted(len(files), 'file')} {'is' if len(missing) == 1 else 'are'} missing",
            code="data-part-missing",
            where=str(folder),
            hint=f"copy the whole folder; {STATE} names all of its files",
        )
    return files


def saved_split(folder: Path) -> str | None:
    """Return the split of a saved folder: by its name, or else by the split's name when saved."""
    return split_of_directory(folder.name) or split_of_part(str(_state(folder).get("_split") or ""))


def _state(folder: Path) -> dict[str, Any]:
    """Return the content of ``state.json``; {} if there is none of the library's."""
    try:
        state: Any = json.loads((folder / STATE).read_bytes())
        return state if all("filename" in entry for entry in state["_data_files"]) else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
