"""Data as other programs save them: Arrow, by ``save_to_disk``, compressed, under a key, written by
columns.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import feather
from rows import load_split

from allhands.config.schema import TrainConfig
from allhands.data.reading import notes_of, read_rows
from allhands.data.records import ColumnNames, Record, parse_record
from allhands.data.rows import Item, Row, RowProblem
from allhands.data.sources import find_sources
from allhands.data.splits import split_of_folder
from allhands.errors import AllhandsError, DataError
from allhands.run.datasets import find_splits

DEFAULT = ColumnNames()
ROWS = [{"prompt": f"What is {number}?", "completion": f"It is {number}."} for number in range(5)]


def rows_of(items: list[Item]) -> list[Any]:
    assert all(isinstance(item, Row) for item in items), items
    return [item.value for item in items if isinstance(item, Row)]


def saved(folder: Path, parts: dict[str, int], shards: int = 1) -> Path:
    """A DatasetDict with parts of so many rows, as ``save_to_disk`` writes it."""
    import datasets  # pyright: ignore[reportMissingImports]

    made = {name: datasets.Dataset.from_list(ROWS[:count]) for name, count in parts.items()}
    datasets.DatasetDict(made).save_to_disk(folder, num_shards=dict.fromkeys(parts, shards))
    return folder


# --- save_to_disk ---------------------------------------------------------------------------------


def test_a_saved_dataset_dict_is_read_with_its_splits(tmp_path: Path) -> None:
    folder = saved(tmp_path / "data", {"train": 5, "validation": 2, "test": 1}, shards=1)
    found = {source.split: rows_of(list(source.rows())) for source in find_sources([str(folder)])}
    assert found == {"train": ROWS, "valid": ROWS[:2], "test": ROWS[:1]}
    for split, count in (("train", 5), ("valid", 2), ("test", 1)):
        records = load_split(folder, split, DEFAULT, required=True)
        assert [record.prompt for record in records] == [row["prompt"] for row in ROWS[:count]]
    config = TrainConfig(train=True, test=True, data=str(folder))
    assert set(find_splits(config)) == {"train", "valid", "test"}


def test_shards_follow_each_other_and_none_may_be_missing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "data", {"train": 5}, shards=3)
    assert len(load_split(folder, "train", DEFAULT, required=True)) == 5
    next((folder / "train").glob("data-00001*")).unlink()
    for read in (
        lambda: load_split(folder, "train", DEFAULT, required=True),
        lambda: find_sources([str(folder)]),
    ):
        with pytest.raises(DataError) as caught:
            read()
        assert "data-00001-of-00003.arrow" in caught.value.message


def test_one_saved_split_is_what_it_was(tmp_path: Path) -> None:
    import datasets  # pyright: ignore[reportMissingImports]

    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "whole")
    assert len(load_split(tmp_path / "whole", "train", DEFAULT, required=True)) == 5
    assert split_of_folder(tmp_path / "whole", "test", DEFAULT, required=False) is None
    datasets.Dataset.from_list(ROWS[:2], split="test").save_to_disk(tmp_path / "part")
    assert len(load_split(tmp_path / "part", "test", DEFAULT, required=True)) == 2
    assert split_of_folder(tmp_path / "part", "train", DEFAULT, required=False) is None
    assert [source.split for source in find_sources([str(tmp_path / "part")])] == ["test"]


def test_copies_that_the_library_keeps_are_no_rows(tmp_path: Path) -> None:
    folder = saved(tmp_path / "data", {"train": 5})
    arrow = next((folder / "train").glob("*.arrow"))
    (folder / "train" / "cache-0123456789abcdef.arrow").write_bytes(arrow.read_bytes())
    (source,) = find_sources([str(folder)])
    assert (
        len(rows_of(list(source.rows())))
        == len(load_split(folder, "train", DEFAULT, required=True))
        == 5
    )
    assert any("cache-" in problem.source for problem in source.skipped)


def test_a_selection_that_only_the_library_can_make_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "data", {"train": 5}) / "train"
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(
        json.dumps({**state, "_indices_data_files": [{"filename": "indices.arrow"}]})
    )
    with pytest.raises(DataError) as caught:
        load_split(folder.parent, "train", DEFAULT, required=True)
    assert "load_from_disk" in (caught.value.hint or "")


def test_splits_of_alignment_data_are_known_by_their_folders(tmp_path: Path) -> None:
    folder = saved(tmp_path / "data", {"train_sft": 5, "test_sft": 1})
    assert {source.split for source in find_sources([str(folder)])} == {"train", "test"}


# --- arrow ----------------------------------------------------------------------------------------


def _stream(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def _file(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def _feather(path: Path, table: pa.Table) -> None:
    feather.write_feather(table, str(path), compression="zstd")


def _packed(path: Path, table: pa.Table) -> None:
    bare = path.with_suffix("")
    _stream(bare, table)
    path.write_bytes(gzip.compress(bare.read_bytes()))
    bare.unlink()


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.arrow", _stream), ("a.arrow", _file), ("a.feather", _feather), ("a.arrow.gz", _packed)],
)
def test_arrow_files_of_every_kind_are_read(
    tmp_path: Path, name: str, write: Callable[[Path, pa.Table], None]
) -> None:
    write(tmp_path / name, pa.Table.from_pylist(ROWS))
    items = list(read_rows(tmp_path / name))
    assert rows_of(items) == ROWS
    assert [item.line for item in items] == [1, 2, 3, 4, 5]


def test_a_torn_arrow_file_is_a_problem(tmp_path: Path) -> None:
    _stream(tmp_path / "a.arrow", pa.Table.from_pylist(ROWS))
    (tmp_path / "a.arrow").write_bytes((tmp_path / "a.arrow").read_bytes()[:-200])
    *rows, problem = read_rows(tmp_path / "a.arrow")
    assert isinstance(problem, RowProblem)
    assert rows_of(rows) == ROWS[: len(rows)]
    (tmp_path / "b.arrow").write_text("no arrow at all\n")
    assert isinstance(next(iter(read_rows(tmp_path / "b.arrow"))), RowProblem)


# --- compressed -----------------------------------------------------------------------------------


def _zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": _zstd,
}


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files_are_read(tmp_path: Path, suffix: str) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (tmp_path / f"train.jsonl.{suffix}").write_bytes(PACKERS[suffix](lines))
    assert rows_of(list(read_rows(tmp_path / f"train.jsonl.{suffix}"))) == ROWS
    assert len(load_split(tmp_path, "train", DEFAULT, required=True)) == 5
    assert find_sources([str(tmp_path)])[0].split == "train"


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files_that_are_cut_or_something_else_are_said(
    tmp_path: Path, suffix: str
) -> None:
    lines = "".join(
        json.dumps({"text": f"{number} {'x' * (number % 97)}"}) + "\n" for number in range(20000)
    ).encode()
    whole = PACKERS[suffix](lines)
    (tmp_path / f"cut.jsonl.{suffix}").write_bytes(whole[: len(whole) // 2])
    last = list(read_rows(tmp_path / f"cut.jsonl.{suffix}"))[-1]
    assert isinstance(last, RowProblem)
    (tmp_path / f"plain.jsonl.{suffix}").write_bytes(lines)
    (problem,) = read_rows(tmp_path / f"plain.jsonl.{suffix}")
    assert isinstance(problem, RowProblem)
    assert "content is not" in problem.message, problem


@pytest.mark.parametrize("name", ["a.zip", "a.xlsx", "a.pdf", "a.sqlite", "a.pkl", "a.yaml"])
def test_files_of_other_types_say_the_way(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"whatever")
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(DataError) as caught:
            find_sources([str(path)])
        assert "let the name end" not in (caught.value.hint or ".")


@pytest.mark.parametrize("where", ["train.xlsx", ""])
def test_training_says_the_way_too(tmp_path: Path, where: str) -> None:
    (tmp_path / "train.xlsx").write_bytes(b"PK")
    with pytest.raises(DataError) as caught:
        load_split(tmp_path / where, "train", DEFAULT, required=True)
    assert "CSV" in (caught.value.hint or "")


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda rows: {"data": rows},
        lambda rows: {
            "version": "1.1",
            "meta": {"rows": 5, "by": ["a"]},
            "data": rows,
            "end": [1, 2],
        },
        lambda rows: {"train": rows},
        lambda rows: {
            "features": [{"name": "prompt"}],
            "rows": [{"row_idx": 0, "row": row} for row in rows],
        },
    ],
)
def test_rows_under_a_key_are_read(
    tmp_path: Path, wrap: Callable[[Any], Any], indent: int | None
) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps(wrap(ROWS), indent=indent), encoding="utf-8")
    records = load_split(tmp_path, "train", DEFAULT, required=True)
    assert [(record.prompt, record.completion) for record in records] == [
        tuple(row.values()) for row in ROWS
    ]
    assert len(notes_of(path)) == 1


@pytest.mark.parametrize(
    "record",
    [
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "data": [{"text": "x"}],
        },
        {"text": "a", "data": [{"text": "x"}]},
        {"data": [1, 2], "text": "a"},
        {"prompt": "a", "completion": "b", "rows": [{"text": "x"}]},
        {"input_ids": [1, 2], "labels": [1, 2]},
    ],
)
def test_a_record_is_no_container(tmp_path: Path, record: Any) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    assert rows_of(list(read_rows(path))) == [record]
    assert notes_of(path) == ()


def test_long_documents_with_rows_under_a_key_are_streamed(tmp_path: Path) -> None:
    rows = [{"text": f"{number} " + "x" * 500} for number in range(1000)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"about": "y" * 1000, "data": rows}), encoding="utf-8")
    assert rows_of(list(read_rows(path))) == rows
    path.write_text(json.dumps({"data": rows}, indent=1)[:-3000], encoding="utf-8")
    *most, problem = read_rows(path)
    assert isinstance(problem, RowProblem)
    assert rows_of(most) == rows[: len(most)]


def test_broken_rows_under_a_key_are_told_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(
        '{"data": [\n {"text": "a"},\n {"text" "b"},\n {"text": "c"}\n]}\n', encoding="utf-8"
    )
    first, problem, last = read_rows(path)
    assert (rows_of([first, last]), isinstance(problem, RowProblem)) == (
        [{"text": "a"}, {"text": "c"}],
        True,
    )
    assert problem.line == 3


def test_splits_under_keys_are_splits(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.write_text(
        json.dumps({"train": ROWS, "validation": ROWS[:2], "test": ROWS[:1]}), encoding="utf-8"
    )
    found = {source.split: rows_of(list(source.rows())) for source in find_sources([str(path)])}
    assert found == {"train": ROWS, "valid": ROWS[:2], "test": ROWS[:1]}
    # As a training set it would be trained on its own test.
    path.rename(tmp_path / "train.json")
    with pytest.raises(DataError) as caught:
        load_split(tmp_path, "train", DEFAULT, required=True)
    assert "data prepare" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "table",
    [
        {"prompt": {"0": "a", "1": "b"}, "completion": {"0": "c", "1": "d"}},
        {"prompt": ["a", "b"], "completion": ["c", "d"]},
        {"columns": ["text"], "index": [0, 1], "data": [["a"], ["b"]]},
    ],
)
def test_a_table_by_columns_says_how_to_write_it_by_rows(tmp_path: Path, table: Any) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    (problem,) = read_rows(path)
    assert isinstance(problem, RowProblem)
    assert "orient='records'" in (problem.hint or "")


# --- records one level down -----------------------------------------------------------------------


def _record(value: Any, columns: ColumnNames = DEFAULT) -> Record:
    return parse_record(value, columns, source="f.jsonl", line=1)


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize(
    "value",
    [
        {"conversation": CHAT},
        {"row_idx": 3, "row": CHAT, "truncated_cells": []},
        {"id": 1, "json": CHAT},
    ],
)
def test_a_record_under_a_key_is_read(value: Any) -> None:
    assert [message["content"] for message in _record(value).messages or ()] == ["a", "b"]


def test_what_stands_beside_a_record_under_a_key_belongs_to_it() -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
    assert _record({"sample": CHAT, "tools": [tool]}).tools == [tool]


def test_two_records_under_keys_are_none_and_cut_ones_are_said() -> None:
    for value in (
        {"a": CHAT, "b": CHAT},
        {"row": CHAT, "truncated_cells": ["messages"]},
        {"a": {"b": CHAT}},
    ):
        with pytest.raises(AllhandsError):
            _record(value)


def test_a_mapped_column_is_looked_for_first() -> None:
    columns = ColumnNames(text_feature="body")
    assert _record({"body": "x", "row": CHAT}, columns).text == "x"
    assert _record({"row": {"body": "x"}}, columns).text == "x"
