"""Files of every type: what was written is read, and whatever is broken is one Problem with its
place.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from allhands.data import jsontext
from allhands.data.reading import file_type, read_rows
from allhands.data.rows import ReadOptions, Row, RowProblem
from allhands.errors import ConfigError, DataError

SUFFIXES = ("jsonl", "json", "csv", "tsv", "parquet", "txt")
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.lists(st.dictionaries(WORDS, VALUES, max_size=4), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reading")


def read(
    folder: Path, content: bytes | str, name: str = "f.jsonl", **options: Any
) -> list[Row | RowProblem]:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    items = list(read_rows(path, ReadOptions(**options)))
    for item in items:
        assert isinstance(item, Row | RowProblem)
        if isinstance(item, RowProblem):
            assert item.message
            assert isinstance(item.error(), DataError)
    return items


def values(items: list[Row | RowProblem]) -> list[Any]:
    assert [item for item in items if isinstance(item, RowProblem)] == []
    return rows_of(items)


def rows_of(items: list[Row | RowProblem]) -> list[Any]:
    return [item.value for item in items if isinstance(item, Row)]


def outline(items: list[Row | RowProblem]) -> list[Any]:
    """Values of rows, and (line, first words) of problems."""
    return [
        item.value if isinstance(item, Row) else (item.line, item.message.partition(":")[0])
        for item in items
    ]


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    return sink.getvalue()


def table(rows: list[list[str]], delimiter: str = ",", end: str = "\r\n") -> str:
    sink = io.StringIO()
    csv.writer(sink, delimiter=delimiter, lineterminator=end).writerows(rows)
    return sink.getvalue()


# What was written is read


@given(OBJECTS, st.booleans(), st.sampled_from([None, 0, 2]), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_json_of_any_layout(
    folder: Path, rows: list[Any], ascii_only: bool, indent: int | None, piece: int
) -> None:
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    assert values(read(folder, "\n".join(lines))) == rows
    assert values(read(folder, "\r\n\r\n".join(["\ufeff", *lines]))) == rows
    with mock.patch.object(jsontext, "PIECE", piece):
        array = json.dumps(rows, ensure_ascii=ascii_only, indent=indent)
        assert values(read(folder, array, "f.json")) == rows
        assert values(read(folder, "\ufeff" + array, "f.json")) == rows
        assert (
            values(read(folder, " ".join(json.dumps(row, indent=indent) for row in rows), "f.json"))
            == rows
        )
    assert values(read(folder, array)) == rows


@given(st.lists(VALUES, min_size=1, max_size=5), st.integers(1, 10))
@settings(max_examples=50, deadline=None)
def test_json_values_that_are_no_objects(folder: Path, rows: list[Any], piece: int) -> None:
    with mock.patch.object(jsontext, "PIECE", piece):
        assert values(read(folder, json.dumps(rows), "f.json")) == rows


def test_line_numbers_of_json(tmp_path: Path) -> None:
    text = '[\n {"a": 1},\n\n {"b":\n 2}, {"c": 3}\n]\n'
    for piece in range(1, len(text)):
        with mock.patch.object(jsontext, "PIECE", piece):
            items = read(tmp_path, text, "f.json")
            assert [(item.source, item.line) for item in items] == [
                ("f.json", 2),
                ("f.json", 4),
                ("f.json", 5),
            ]


@given(
    st.lists(st.lists(WORDS, min_size=2, max_size=2), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_tables(folder: Path, cells: list[list[str]], tabs: bool, crlf: bool) -> None:
    # The writer quotes a lone CR only if lines end in CRLF.
    cells = [[re.sub("\0" if crlf else "[\0\r]", "", cell) for cell in row] for row in cells]
    content = table(
        [["prompt", "completion"], *cells], "\t" if tabs else ",", "\r\n" if crlf else "\n"
    )
    rows = values(read(folder, "\ufeff" + content, "f.tsv" if tabs else "f.csv"))
    assert rows == [{"prompt": prompt, "completion": completion} for prompt, completion in cells]


def test_tables_keep_strings_lines_and_long_fields(tmp_path: Path) -> None:
    long = "x" * 300_000
    rows = [['{"a": 1}', "two\nlines"], ["1", "NA"], [long, ""]]
    items = read(tmp_path, table([["", "text "], *rows], end="\n"), "f.csv")
    assert values(items) == [{"column 1": first, "text": second} for first, second in rows]
    assert [item.line for item in items] == [2, 4, 5]


@given(
    st.lists(
        st.fixed_dictionaries({"text": WORDS, "n": st.none() | st.integers(-9, 9)}),
        min_size=1,
        max_size=9,
    )
)
@settings(max_examples=30, deadline=None)
def test_parquet(folder: Path, rows: list[dict[str, Any]]) -> None:
    items = read(folder, parquet(rows, row_group_size=2), "f.parquet")
    assert values(items) == rows
    assert [item.line for item in items] == list(range(1, len(rows) + 1))


def test_parquet_with_nested_nulls(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [{"role": "user", "content": None}, {"role": None, "content": "b"}, None],
            "meta": {"a": None},
        },
        {"messages": None, "meta": None},
        {"messages": [], "meta": {"a": [1, None]}},
    ]
    assert values(read(tmp_path, parquet(rows), "f.parquet")) == rows
    assert values(read(tmp_path, gzip.compress(parquet(rows)), "f.parquet.gz")) == rows


def test_gz_of_every_type(tmp_path: Path) -> None:
    row = {"text": "Ahoy"}
    contents = {
        "jsonl": b'{"text": "Ahoy"}',
        "json": b'[{"text": "Ahoy"}]',
        "csv": b"text\nAhoy\n",
        "txt": b"Ahoy",
    }
    for suffix, content in (contents | {"tsv": contents["csv"], "parquet": parquet([row])}).items():
        assert values(read(tmp_path, gzip.compress(content), f"f.{suffix}.gz")) == [row]
        assert values(read(tmp_path, gzip.compress(content), f"F.{suffix.upper()}.GZ")) == [row]


def test_nan_infinity_and_floats(tmp_path: Path) -> None:
    row = values(read(tmp_path, '{"a": NaN, "b": -Infinity, "c": 1e999, "d": null}'))[0]
    assert math.isnan(row["a"])
    assert (row["b"], row["c"], row["d"]) == (-math.inf, math.inf, None)


# What is broken


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("f.jsonl", b'1\n{"a": "caf\xe9"}\n{bad}\n\n{"a": 2}', [1, (2, "not UTF-8"), (3, "not JSON"), {"a": 2}]),
        ("f.jsonl", b"1\n" + b"[" * 9999 + b"\n2", [1, (2, "not usable JSON"), 2]),
        ("f.jsonl", b"1\n" + b"9" * 5000 + b"\n2", [1, (2, "not usable JSON"), 2]),
        ("f.jsonl", b"0\n" + b'{"a":' * 201 + b"1" + b"}" * 201 + b"\n1", [0, (2, "not usable JSON"), 1]),
        ("f.jsonl", b"0\n" + b"[" * 99 + b"]" * 99 + b"\n1", [0, json.loads("[" * 99 + "]" * 99), 1]),
        ("f.json", b'[{"a": 1},\n {"a": 2 3},\n {"a": 4}]', [{"a": 1}, (2, "not JSON"), {"a": 4}]),
        ("f.json", b'[\n{"a": 1},\n{\n"a": 2 3\n},\n{"b": 2}]', [{"a": 1}, (4, "not JSON"), {"b": 2}]),
        ("f.json", b'[\n{"a": "caf\xe9"},\n{"a": 1}]', [(2, "not UTF-8"), {"a": 1}]),
        ("f.json", b'[\n{"a": 1}\n{"a": 2},\n{"a": 3}]', [{"a": 1}, (3, "not JSON"), {"a": 3}]),
        ("f.json", b'{"a": 1}\n{"a": "2}\n{"a": 3}\n', [{"a": 1}, (2, "not JSON"), {"a": 3}]),
        ("f.csv", b"a,b\n1\n1,2,3\n\n3,4\n", [(2, "ragged row"), (3, "ragged row"), {"a": "3", "b": "4"}]),
        ("f.csv", b'a,b\n1,"x "y" z"\n3,4\n', [(2, "not a row of a table"), {"a": "3", "b": "4"}]),
        ("f.csv", b"a\ncaf\xe9\nx\0y\nok\n", [(2, "not UTF-8"), (3, "the row has a NUL byte"), {"a": "ok"}]),
        ("f.txt", b"caf\xc3\xa9\ncaf\xe9\nx\0y\n", [{"text": "café"}, (2, "not UTF-8"), (3, "a NUL byte in the text")]),
    ],
)  # fmt: skip
def test_the_rest_goes_on(tmp_path: Path, name: str, content: bytes, expected: list[Any]) -> None:
    items = read(tmp_path, content, name, documents="line")
    assert outline(items) == expected
    assert not any("the rest" in item.message for item in items if isinstance(item, RowProblem))
    assert all(item.hint for item in items if isinstance(item, RowProblem))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("f.json", '[{"a": 1}, {"a": 2 3}, {"a": 4}]', [{"a": 1}, (1, "not JSON")]),
        ("f.json", '[1, 2]\n[3]', [1, 2, (2, "not JSON")]),
        ("f.csv", 'a,b\n1,"x\n3,"4"\n5,6\n', [(2, "not a row of a table")]),
        ("f.csv", 'a,b\n1,2\n3,"4\n5,6\n', [{"a": "1", "b": "2"}, (3, "not a row of a table")]),
        ("f.csv", "a,b,a\n1,2,3\n", [(1, "unusable columns")]),
    ],
)  # fmt: skip
def test_the_rest_is_not_read_where_its_rows_are_uncertain(
    tmp_path: Path, name: str, content: str, expected: list[Any]
) -> None:
    items = read(tmp_path, content, name)
    assert [
        item.value if isinstance(item, Row) else (item.line, item.message.partition(",")[0])
        for item in items
    ] == expected
    last = items[-1]
    assert isinstance(last, RowProblem)
    assert "the rest of the file from here was not read" in last.message


@given(
    st.lists(st.dictionaries(WORDS, VALUES, min_size=1, max_size=3), min_size=2, max_size=6),
    st.data(),
)
@settings(max_examples=50, deadline=None)
def test_a_broken_element_costs_no_other(
    folder: Path, rows: list[Any], data: st.DataObject
) -> None:
    """In an indented array: whatever one character less breaks, rows that are whole are read as
    they were.
    """
    lines = json.dumps(rows, indent=1).split("\n")
    starts = [number for number, line in enumerate(lines) if line == " {"]
    broken = data.draw(st.integers(0, len(rows) - 1))
    end = [*starts, len(lines) - 1][broken + 1]
    number = data.draw(st.integers(starts[broken], end - 1))
    line = lines[number]
    # Any character but the comma behind the element: without that, the element after it is left
    # out.
    cut = data.draw(st.integers(0, len(line.removesuffix(",") if number == end - 1 else line) - 1))
    lines[number] = line[:cut] + line[cut + 1 :]
    items = read(folder, "\n".join(lines), "f.json")
    got = rows_of(items)
    assert len([value for value in got if value not in rows]) <= 1
    is_stopped = any("the rest" in item.message for item in items if isinstance(item, RowProblem))
    following = iter(got)
    for row in rows[:broken] + ([] if is_stopped else rows[broken + 1 :]):
        assert any(value == row for value in following)


def test_gigantic_lines(tmp_path: Path) -> None:
    long = b'{"a": "' + b"x" * 3_000_000 + b'"}'
    items = read(tmp_path, b"1\n" + long + b"\n2\n" + long, max_row_bytes=2_000_000)
    assert outline(items) == [
        1,
        (2, "the line is too long to be read"),
        2,
        (4, "the line is too long to be read"),
    ]
    assert f"{len(long) + 1:,} bytes" in items[1].message  # type: ignore[union-attr]
    rows = b"a,b\n1,2\n" + b'"' + b"x" * 3_000_000 + b'",3\n4,5\n'
    items = read(tmp_path, rows, "f.csv", max_row_bytes=2_000_000)
    assert outline(items) == [
        {"a": "1", "b": "2"},
        (3, "not a row of a table"),
        {"a": "4", "b": "5"},
    ]
    array = b"[\n1,\n" + long + b",\n2]"
    items = read(tmp_path, array, "f.json", max_row_bytes=2_000_000)
    assert isinstance(items[1], RowProblem)
    assert (items[1].line, "too long" in items[1].message) == (3, True)
    parts = values(read(tmp_path, b"x" * 3_000_000, "f.txt"))
    assert "".join(part["text"] for part in parts) == "x" * 3_000_000


def test_a_damaged_parquet_file(tmp_path: Path) -> None:
    whole = parquet([{"text": f"row {n}"} for n in range(20)], row_group_size=5)
    assert outline(read(tmp_path, whole[:-1], "f.parquet"))[0][0] == 0
    twice = io.BytesIO()
    pq.write_table(pa.table([[1], [2]], names=["a", "a"]), twice)
    assert "two are called 'a'" in read(tmp_path, twice.getvalue(), "f.parquet")[0].message  # type: ignore[union-attr]
    late = pa.table({"t": pa.array([0, 2**62, 1], pa.timestamp("us"))})
    pq.write_table(late, tmp_path / "late.parquet")
    items = list(read_rows(tmp_path / "late.parquet"))
    assert [(type(item), item.line) for item in items] == [(Row, 1), (RowProblem, 2), (Row, 3)]
    with mock.patch.dict(sys.modules, {"pyarrow.parquet": None, "pyarrow": None}):
        assert "need pyarrow" in read(tmp_path, whole, "f.parquet")[0].message  # type: ignore[union-attr]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_empty_files_and_wrong_ones(tmp_path: Path, suffix: str) -> None:
    name = f"f.{suffix}"
    assert outline(read(tmp_path, b"", name))[0][0] == 0
    path = tmp_path / "none" / name
    for bad in (path, tmp_path):
        found = list(
            read_rows(bad if bad is path else tmp_path.rename(tmp_path.with_suffix(f".{suffix}")))
        )
        assert [(type(item), item.line, item.source) for item in found] == [
            (RowProblem, 0, str(found[0].source))
        ]
        assert found[0].message.startswith("cannot read the file")  # type: ignore[union-attr]


def test_compressed_and_foreign_content(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"a": 1}')
    for name in ("f.jsonl", "f.json", "f.csv", "f.txt"):
        for content, words in (
            (packed, "gzip"),
            (b"PK\x03\x04", "zip"),
            ("a".encode("utf-16"), "UTF-16"),
        ):
            (item,) = read(tmp_path, content, name)
            assert isinstance(item, RowProblem)
            assert words in item.message
            assert item.where == name
    (item,) = read(tmp_path, b'{"a": 1}', "f.jsonl.gz")
    assert isinstance(item, RowProblem)
    assert "not gzip" in item.message
    assert outline(read(tmp_path, b"", "f.pdf")) == [(0, "files of this type cannot be read")]


def test_a_torn_gzip_gives_the_rows_before_the_tear(tmp_path: Path) -> None:
    rows = [{"n": n, "text": f"{n * 7919 % 1000003}"} for n in range(200)]
    for name, content in (
        ("f.jsonl.gz", "\n".join(json.dumps(row) for row in rows)),
        ("f.json.gz", json.dumps(rows)),
    ):
        packed = gzip.compress(content.encode())
        counts: list[int] = []
        for size in range(20, len(packed), 37):
            items = read(tmp_path, packed[:size], name)
            whole = rows_of(items)
            assert whole == rows[: len(whole)]
            assert isinstance(items[-1], RowProblem)
            assert "to its end" in items[-1].message
            counts.append(len(whole))
        assert counts == sorted(counts)
        assert counts[-1] > 150


def test_options() -> None:
    with pytest.raises(ConfigError) as caught:
        ReadOptions(documents="")
    assert caught.value.where == "--documents"
    assert RowProblem("f", 3, "m", code="json-invalid").where == "f:3"
    assert RowProblem("f", 0, "m", code="json-invalid").where == "f"
    assert [file_type(Path(name)) for name in ("a.JSONL.gz", "a.pq", "a.tar.gz", "jsonl", "a.md")] == [
        "jsonl", "parquet", None, None, "text",
    ]  # fmt: skip


# Fuzzing


def blank(line: bytes) -> bool:
    line = line.removeprefix(b"\xef\xbb\xbf")
    return line.decode("utf-8", "replace").strip() == ""


@given(
    st.binary(max_size=60)
    | st.lists(st.sampled_from([b'{"a": 1}', b"\n", b"\r\n", b"\xff", b'"', b" "])).map(b"".join)
)
@example(b"\xef\xbb\xbf\n1")
@settings(deadline=None)
def test_jsonl_rows_and_problems_are_the_lines_that_are_not_blank(
    folder: Path, content: bytes
) -> None:
    items = read(folder, b"0\n" + content)
    lines = [line for line in content.split(b"\n") if not blank(line)]
    assert len(items) == 1 + len(lines)
    assert len({item.line for item in items}) == len(items)


@pytest.fixture(scope="module")
def samples() -> dict[str, bytes]:
    rows = [{"prompt": f"p{n}", "completion": 'é, "quoted"\nand more'} for n in range(3)]
    cells = [["prompt", "completion"], *([row["prompt"], row["completion"]] for row in rows)]
    return {
        "jsonl": "\n".join(json.dumps(row) for row in rows).encode(),
        "json": json.dumps(rows, indent=1, ensure_ascii=False).encode(),
        "csv": table(cells).encode(),
        "tsv": table(cells, "\t").encode(),
        "txt": "one\n\ntwo é<|endoftext|>\nthree".encode(),
        "parquet": parquet(rows, compression="none"),
    }


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_files_cut_anywhere(tmp_path: Path, samples: dict[str, bytes], suffix: str) -> None:
    whole = samples[suffix]
    rows = values(read(tmp_path, whole, f"f.{suffix}"))
    for size in range(0, len(whole), 7 if suffix == "parquet" else 1):
        items = read(tmp_path, whole[:size], f"f.{suffix}")
        # A cut within the last field of a table, if it has no quotes, cannot be seen.
        got = rows_of(items)[: -1 if suffix in ("csv", "tsv") else None]
        assert got == rows[: len(got)]
        if suffix == "jsonl":
            assert len(items) == max(1, len(whole[:size].splitlines()))
        elif suffix in ("json", "parquet"):
            assert isinstance(items[-1], RowProblem)


@given(st.sampled_from(SUFFIXES), st.binary(max_size=300), st.booleans())
@settings(deadline=None)
def test_any_bytes(folder: Path, suffix: str, content: bytes, packed: bool) -> None:
    items = read(folder, content, f"f.{suffix}" + (".gz" if packed else ""))
    assert items


@given(st.data(), st.sampled_from(SUFFIXES))
@settings(max_examples=200, deadline=None)
def test_any_damage(
    folder: Path, samples: dict[str, bytes], data: st.DataObject, suffix: str
) -> None:
    content = bytearray(samples[suffix])
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        stop = start + data.draw(st.integers(0, 5))
        content[start:stop] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b'"', b"{", b"]", b"\n", b",", b"\0"])
        )
    items = read(folder, bytes(content), f"f.{suffix}")
    assert items
    if suffix == "json":
        with mock.patch.object(jsontext, "PIECE", data.draw(st.integers(4, 50))):
            assert outline(read(folder, bytes(content), "f.json")) == outline(items)


# Real files


def expected_of(path: Path) -> list[Any]:
    text = path.read_text("utf-8-sig")
    try:
        whole = json.loads(text)
        return whole if isinstance(whole, list) else [whole]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def test_real_files_of_other_projects(shared_data: Path) -> None:
    paths = sorted((shared_data / "formats").glob("*.json*"))
    assert len(paths) >= 10
    for path in paths:
        assert values(list(read_rows(path))) == expected_of(path), path.name


def test_bad_inputs(shared_data: Path) -> None:
    problems = {
        "empty.jsonl": [(0, "the file is empty")],
        "latin1.jsonl": [(1, "not UTF-8")],
        "truncated-last-line.jsonl": [(3, "the file ends in the middle of a record")],
    }
    paths = sorted((shared_data / "bad-inputs").iterdir())
    assert len(paths) >= 13
    for path in paths:
        if path.name == "real-malformed-json-missing-comma.json":
            continue
        items = list(read_rows(path))
        assert [
            (i.line, re.split("[:,]", i.message)[0]) for i in items if isinstance(i, RowProblem)
        ] == problems.pop(path.name, [])
        if len(rows_of(items)) == len(items):
            assert rows_of(items) == expected_of(path), path.name
    assert problems == {}


def test_of_a_real_malformed_file_only_the_broken_elements_are_missing(shared_data: Path) -> None:
    path = shared_data / "bad-inputs" / "real-malformed-json-missing-comma.json"
    items = list(read_rows(path))
    problems = [item for item in items if isinstance(item, RowProblem)]
    whole = path.read_text().count('"en":')
    assert 0 < len(problems) < 10
    assert not any("the rest" in problem.message for problem in problems)
    assert len(items) == whole


# Memory

MEASURE = """
import resource, sys
from pathlib import Path
from allhands.data.reading import read_rows
import pyarrow.parquet
list(read_rows(Path(sys.argv[2])))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(1 for _ in read_rows(Path(sys.argv[1])))
kib = 1024 if sys.platform == "darwin" else 1  # macOS counts bytes
print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // kib)
"""


def write_big(path: Path) -> Iterator[int]:
    """A file of about 100 MB; gives its number of rows."""
    row = {"text": "yo ho ho and a bottle " * 400}
    if path.suffix == ".parquet":
        batch = pa.Table.from_pylist([{"text": f"{n} {row['text']}"} for n in range(1000)])
        with pq.ParquetWriter(
            path, batch.schema, compression="none", use_dictionary=False
        ) as writer:
            writer.write_table(pa.concat_tables([batch] * 11), row_group_size=11_000)
        yield 11_000
    elif path.suffix == ".json":
        element = json.dumps(row)
        path.write_text("[" + ", ".join([element] * 11_000) + "]")
        yield 11_000
    else:
        path.write_bytes(b"y" * 100_000_000)
        yield 1 if path.suffix == ".jsonl" else -1


@pytest.mark.parametrize("suffix", ["json", "parquet", "txt", "jsonl"])
def test_big_files_take_little_memory(tmp_path: Path, suffix: str) -> None:
    big, small = tmp_path / f"big.{suffix}", tmp_path / f"small.{suffix}"
    (expected,) = write_big(big)
    small.write_bytes(parquet([{"text": "a"}]) if suffix == "parquet" else b'[{"text": "a"}]')
    command = [sys.executable, "-c", MEASURE, str(big), str(small)]
    count, kib = map(
        int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    )
    assert count == expected or expected < 0 < count
    # One line of 100 MB is given up after the 64 MiB that a row may have.
    assert kib < (170 if suffix == "jsonl" else 60) * 1024
