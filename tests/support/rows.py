"""Rows of training data that are unlike each other, and files of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from allhands.data.records import ColumnNames, Record
from allhands.data.splits import split_of_folder

WORDS = (
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heron",
    "inlet",
    "jetty",
    "knoll",
    "ledge",
    "mango",
    "north",
    "ochre",
    "plume",
    "quartz",
    "reef",
)


def sentence(number: int, words: int = 12) -> str:
    """Words that are the same for the same number, and unlike those of any other."""
    source = random.Random(number)
    return " ".join(source.choice(WORDS) + str(source.randrange(100)) for _ in range(words))


def texts(numbers: Iterable[int]) -> list[dict[str, Any]]:
    """A row of plain text for each number."""
    return [{"text": sentence(number)} for number in numbers]


def write(folder: Path, files: Mapping[str, Iterable[Any]]) -> list[str]:
    """Files of JSON lines; a string is a line as it stands."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [str(folder / name) for name in files]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none if it is not there."""
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.exists()
        else []
    )


def report_of(out: Path) -> dict[str, Any]:
    """What ``data prepare`` reported."""
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def load_split(data_dir: Path, split: str, columns: ColumnNames, *, required: bool) -> list[Record]:
    """All records of a split of a folder; [] if it is absent and not required."""
    source = split_of_folder(data_dir, split, columns, required=required)
    return [] if source is None else list(source.records())
