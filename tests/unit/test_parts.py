"""Data in parts, ``train-00000-of-00002``: all of them, in order, or an error that names what is
missing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rows import load_split

from allhands.data.records import ColumnNames
from allhands.errors import DataError

DEFAULT = ColumnNames()


def write(folder: Path, text: str, name: str) -> None:
    (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["train-00000-of-00002.txt"], "missing: 1"),
        (["train-2-of-3.txt", "train-3-of-3.txt"], "missing: 1"),
        (["train/00001-of-00002-0a1b.txt.gz"], "missing: 0"),
        (["train-0-of-6.md"], "missing: 1, 2, 3 and 2 more"),
    ],
)
def test_a_part_that_is_missing_is_named(tmp_path: Path, names: list[str], missing: str) -> None:
    (tmp_path / "train").mkdir()
    for name in names:
        write(tmp_path, "a", name)
    if "/" not in names[0]:
        (tmp_path / "train").rmdir()
    with pytest.raises(DataError) as caught:
        load_split(tmp_path, "train", DEFAULT, required=True)
    assert caught.value.message.endswith(missing)
    ending = next(each for each in (".txt.gz", ".md", ".txt") if each in names[0])
    assert (caught.value.hint or "").endswith(f"train-1{ending}")


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00002.txt", "train-00001-of-00002-abc.txt"],
        ["train-1-of-2.txt", "train-2-of-2.txt"],
        ["train-1.txt", "train-7.txt"],
        ["train-a-0-of-1.txt", "train-b-00000-of-00001.txt"],
    ],
)
def test_whole_parts_are_read_in_order(tmp_path: Path, names: list[str]) -> None:
    for name in reversed(names):
        write(tmp_path, name, name)
    records = load_split(tmp_path, "train", DEFAULT, required=True)
    assert [(record.text, record.source) for record in records] == [(name, name) for name in names]
