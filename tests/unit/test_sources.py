"""What is named on the command line: files, directories and Hub datasets; and plain text, document
by document.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allhands.data import tables
from allhands.data.reading import read_rows
from allhands.data.rows import ReadOptions, Row, RowProblem
from allhands.data.sources import Source, SourceOptions, find_sources
from allhands.errors import AllhandsError, ConfigError, DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


def write(root: Path, *names: str, content: str = '{"text": "a"}\n') -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def find(*names: Path | str, **options: Any) -> list[Source]:
    return find_sources([str(name) for name in names], SourceOptions(**options))


def failure(kind: type[AllhandsError], *names: Path | str, **options: Any) -> AllhandsError:
    with pytest.raises(kind) as caught:
        find(*names, **options)
    assert caught.value.hint, "every error says what to do"
    return caught.value


# Files and directories


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"),
        ("TRAIN.CSV", "train"),
        ("valid.json", "valid"),
        ("validation.parquet", "valid"),
        ("val.txt", "valid"),
        ("dev.tsv.gz", "valid"),
        ("test.jsonl", "test"),
        ("train-00000-of-00003.parquet", "train"),
        ("validation-00000-of-00001-a09b74b3ef9c3b56.parquet", "valid"),
        ("test_sft-00000-of-00001.parquet", "test"),
        ("train_2.jsonl", "train"),
        ("data.jsonl", None),
        ("training-day.txt", None),
        ("test-driven.md", None),
        ("latest.jsonl", None),
        ("val/x.jsonl", "valid"),
        ("test/train.jsonl", "train"),
        ("train/test/part-0.jsonl", "test"),
        ("train/more/x.jsonl", "train"),
        ("trains/x.jsonl", None),
    ],
)
def test_splits_by_name(tmp_path: Path, name: str, split: str | None) -> None:
    write(tmp_path / "data", name)
    assert [(s.name, s.split) for s in find(tmp_path / "data")] == [
        (str(tmp_path / "data" / name), split)
    ]


def test_a_named_file_or_directory_counts_its_own_directory(tmp_path: Path) -> None:
    write(tmp_path, "test/deep/a.jsonl", "test/b.jsonl")
    assert [source.split for source in find(tmp_path / "test")] == ["test", "test"]
    assert [source.split for source in find(tmp_path / "test" / "b.jsonl")] == ["test"]
    assert [source.split for source in find(tmp_path / "test" / "deep" / "a.jsonl")] == [None]
    assert [source.split for source in find(tmp_path / "test" / "deep")] == [None]


def test_directories_are_sorted_and_say_what_they_skip(tmp_path: Path) -> None:
    write(
        tmp_path,
        "b.jsonl",
        "a/z.csv",
        "a/y.txt",
        ".hidden.jsonl",
        ".git/x.json",
        "p.pdf",
        "README.md",
        "LICENSE.txt",
    )
    write(tmp_path, "dataset_info.json", "report.json", "left-out.jsonl")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path)
    first, *others = find(tmp_path)
    assert [Path(s.name).relative_to(tmp_path).as_posix() for s in (first, *others)] == [
        "a/y.txt",
        "a/z.csv",
        "b.jsonl",
    ]
    skipped = {Path(problem.source).name: problem.message for problem in first.skipped}
    assert skipped == {
        ".hidden.jsonl": "skipped: hidden",
        ".git": "skipped: hidden",
        "p.pdf": "skipped: files of this type cannot be read",
        "loop": "skipped: a link to a directory",
        "gone.jsonl": "skipped: not a file, or a link to nothing",
        **dict.fromkeys(
            ("README.md", "LICENSE.txt", "dataset_info.json"),
            "skipped: it describes the data",
        ),
    }
    assert all(problem.line == 0 for problem in first.skipped)
    assert [source.skipped for source in others] == [(), ()]


def test_a_directory_of_texts_keeps_its_readme(tmp_path: Path) -> None:
    write(tmp_path, "README.md", "more.md")
    assert [Path(source.name).name for source in find(tmp_path)] == ["README.md", "more.md"]


def test_rows_carry_the_name_and_stop_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"n": 1}\nbad\n{"n": 3}\n{"n": 4}\n')
    (source,) = find(path, limit=3)
    for _ in range(2):
        items = list(source.rows())
        assert [item.where if isinstance(item, RowProblem) else item.value for item in items] == [
            {"n": 1},
            f"{path}:2",
            {"n": 3},
        ]
        assert {item.source for item in items} == {str(path)}
    assert len(list(find(path)[0].rows())) == 4


def test_errors_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "data/training.jsonl", "data/notes.pdf", "empty/deep/.x")
    monkeypatch.chdir(tmp_path)
    missing = failure(DataError, "data/trainin.jsonl")
    assert missing.message == "no such file or directory"
    assert "did you mean data/training.jsonl; or" in str(missing.hint)
    assert "did you mean data" in str(failure(DataError, "dat/training.jsonl").hint)
    assert "did you mean data" in str(failure(DataError, "dta").hint)
    assert "there is no words" in str(failure(DataError, "words").hint)
    # A directory that is there shows that no Hub dataset is meant.
    assert "no such file" in failure(DataError, "data/nothing").message
    for name in ("", "a\0b", "x" * 5000, "../../nothing.csv", "~nobody/x.json"):
        failure(DataError, name)
    assert "this type" in failure(DataError, "data/notes.pdf").message
    nothing = failure(DataError, "empty")
    assert (nothing.where, "holds nothing" in nothing.message) == ("empty", False)
    assert "holds .x" in nothing.message
    (tmp_path / "empty" / "deep" / ".x").unlink()
    assert "it holds nothing" in failure(DataError, "empty").message
    assert "no source" in failure(ConfigError).message
    assert "twice" in failure(ConfigError, "data", "data/training.jsonl").message


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"hub_split": "train"}, "--hub-split"),
        ({"hub_config": "main"}, "--hub-config"),
        ({"streaming": True}, "--streaming"),
        ({"documents": "line"}, "--documents"),
        ({"documents": ""}, "--documents"),
        ({"limit": 0}, "--limit"),
    ],
)
def test_options_without_effect_are_refused(
    tmp_path: Path, options: dict[str, Any], flag: str
) -> None:
    write(tmp_path, "a.jsonl")
    assert failure(ConfigError, tmp_path / "a.jsonl", **options).where == flag


def test_documents_reach_the_reader(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", content="one\ntwo\n")
    write(tmp_path, "b.jsonl")
    rows = [item.value for source in find(tmp_path, documents="line") for item in source.rows()]
    assert rows == [{"text": "one"}, {"text": "two"}, {"text": "a"}]


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything"
)
def test_unreadable_directory(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", "deep/b.jsonl")
    (tmp_path / "deep").chmod(0)
    assert "chmod" in str(failure(DataError, tmp_path).hint)
    (tmp_path / "deep").chmod(0o700)


# The Hub, with a stand-in for the library


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Any]]:
    """Sets what ``datasets.load_dataset`` returns or raises; gives the list of its calls."""

    def install(result: Any) -> list[Any]:
        calls: list[Any] = []

        def load_dataset(
            path: str, name: str | None = None, *, split: str | None, streaming: bool
        ) -> Any:
            calls.append((path, name, split, streaming))
            if isinstance(result, Exception):
                raise result
            return result if split is None else result[split]

        module = types.ModuleType("datasets")
        module.load_dataset = load_dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", module)
        monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")  # nobody is asked whether the Hub answers
        return calls

    return install


def test_hub_splits(hub: Callable[[Any], list[Any]], tmp_path: Path) -> None:
    names = {
        "train_sft": "train",
        "validation": "valid",
        "test": "test",
        "unsupervised": None,
        "training_2": "train",
    }
    calls = hub({part: [{"part": part}, {"n": 2}, {"n": 3}] for part in names})
    write(tmp_path, "a.jsonl")
    _, *found = find(tmp_path / "a.jsonl", "some/one", limit=2)
    assert [(source.name, source.split) for source in found] == [
        (f"some/one[{part}]", names[part]) for part in names
    ]
    assert list(found[0].rows()) == [Row({"part": "train_sft"}, "some/one[train_sft]", 1), Row({"n": 2}, "some/one[train_sft]", 2)]  # noqa: E501  # fmt: skip
    (one,) = find("hf://datasets/some/one", hub_split="test", hub_config="main", streaming=True)
    assert (one.name, one.split) == ("some/one[test]", "test")
    (old,) = find("hf://squad", hub_split="validation")
    assert old.split == "valid"
    assert calls == [
        ("some/one", None, None, False),
        ("some/one", "main", "test", True),
        ("squad", None, "validation", False),
    ]


def test_a_directory_is_taken_before_the_hub(
    hub: Callable[[Any], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = hub({"train": []})
    write(tmp_path, "some/one/a.jsonl")
    monkeypatch.chdir(tmp_path)
    assert [source.name for source in find("some/one")] == ["some/one/a.jsonl"]
    # What is misspelt on disk is told before anything is downloaded.
    failure(DataError, "other/one", "none.jsonl")
    assert calls == []
    assert [source.name for source in find("hf://some/one")] == ["some/one[train]"]
    failure(ConfigError, "hf://a/b/c")
    assert [p.message for p in find("other/one")[0].rows() if isinstance(p, RowProblem)] == [
        "the split is empty"
    ]


class Gated(FileNotFoundError):
    """As the library's DatasetNotFoundError is."""


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (
            ConnectionError("Couldn't reach 'a/b' on the Hub (LocalEntryNotFoundError)"),
            "cannot be reached",
            "network",
        ),
        (
            ConnectionError("Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)"),
            "switched off",
            "HF_HUB_OFFLINE",
        ),
        (type("ConnectTimeout", (Exception,), {})("slow"), "cannot be reached", "network"),
        (
            Gated("Dataset 'a/b' doesn't exist on the Hub or cannot be accessed."),
            "no such dataset",
            "hf auth login",
        ),
        (
            Gated("Dataset 'a/b' is a gated dataset on the Hub."),
            "requested",
            "huggingface.co/datasets/a/b",
        ),
        (
            ValueError("Unknown split \"x\". Should be one of ['train', 'test']."),
            "no such split",
            "train, test",
        ),
        (ValueError("Bad split: x. Available splits: ['train']"), "no such split", "one of: train"),
        (
            ValueError("BuilderConfig 'x' not found. Available: ['main', 'b']"),
            "configurations",
            "of: main, b",
        ),
        (
            ValueError(
                "Config name is missing.\nPlease pick one among the available configs: ['main', 'b']\nExample"
            ),
            "configurations",
            "--hub-config is one of: main, b",
        ),
        (
            RuntimeError("Dataset scripts are no longer supported, but found b.py\nmore"),
            "found b.py",
            "fetch",
        ),
    ],
)
def test_hub_errors(
    hub: Callable[[Any], list[Any]], error: Exception, message: str, hint: str
) -> None:
    hub(error)
    caught = failure(DataError, "a/b")
    assert message in caught.message
    assert hint in str(caught.hint)
    assert caught.where == "a/b"
    assert "\n" not in caught.message


def test_a_download_that_breaks_off(hub: Callable[[Any], list[Any]]) -> None:
    def rows() -> Iterator[dict[str, int]]:
        yield {"n": 1}
        raise ConnectionError("reset by peer")

    hub({"train": rows()})
    first, second = find("a/b", streaming=True)[0].rows()
    assert first == Row({"n": 1}, "a/b[train]", 1)
    assert isinstance(second, RowProblem)
    assert (second.line, "reset by peer" in second.message) == (2, True)
    assert "the rest" in second.message


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert failure(DataError, "a/b").hint == "pip install datasets"


REAL = """
import json, sys
import datasets
from allhands.data.sources import SourceOptions, find_sources
from allhands.errors import DataError
results = []
try:
    find_sources(["some/one"])
except DataError as error:
    results.append(str(error))
real, file = datasets.load_dataset, sys.argv[1]
def local(path, name, split, streaming):
    return real("json", data_files={"train": file, "validation": file}, split=split, streaming=streaming)
datasets.load_dataset = local
for streaming in (False, True):
    for options in ({}, {"hub_split": "train"}, {"hub_split": "nope"}):
        try:
            sources = find_sources(["some/one"], SourceOptions(streaming=streaming, **options))
            results.append([(s.name, s.split, [(row.line, row.value) for row in s.rows()]) for s in sources])
        except DataError as error:
            results.append(str(error))
print(json.dumps(results))
"""


def test_the_real_library(tmp_path: Path) -> None:
    """Offline: what it raises without a network, and the rows of a local file, whole and streamed."""
    write(tmp_path, "rows.jsonl", content='{"text": "a"}\n{"text": "b"}\n')
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    command = [sys.executable, "-c", REAL, str(tmp_path / "rows.jsonl")]
    done = subprocess.run(
        command, env=os.environ | quiet, capture_output=True, text=True, check=True
    )
    offline, *results = json.loads(done.stdout)
    assert "downloads are switched off" in offline
    rows = [[1, {"text": "a"}], [2, {"text": "b"}]]
    train = ["some/one[train]", "train", rows]
    for everything, one, unknown in (results[:3], results[3:]):
        assert everything == [train, ["some/one[validation]", "valid", rows]]
        assert one == [train]
        assert "--hub-split is one of: train, validation" in unknown


# Plain text


def read(folder: Path, content: bytes | str, **options: Any) -> list[Row | RowProblem]:
    path = folder / "f.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_rows(path, ReadOptions(**options)))


def texts_of(items: list[Row | RowProblem]) -> list[str]:
    assert not [item for item in items if isinstance(item, RowProblem)]
    return [item.value["text"] for item in items if isinstance(item, Row)]


@given(
    st.lists(
        st.text(
            st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\ufeff"), min_size=1
        ),
        min_size=1,
    )
)
@settings(deadline=None)
def test_text_by_document(folder: Path, texts: list[str]) -> None:
    kept = [text.strip("\n") for text in texts if text.strip()]
    for mark in ("<|endoftext|>", "\n-8<-\n"):
        joined = mark.join(text.replace(mark, "") for text in texts)
        documents = "auto" if mark == "<|endoftext|>" else mark.replace("\n", "\\n")
        items = read(folder, joined, documents=documents)
        assert texts_of(items) == kept if kept else [type(item) for item in items] == [RowProblem]


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("auto", [(2, "one\ntwo\n\nthree\n "), (9, "four")]),
        ("file", [(2, "one\ntwo\n\nthree\n \n\n<|endoftext|>\nfour")]),
        ("line", [(2, "one"), (3, "two"), (5, "three"), (8, "<|endoftext|>"), (9, "four")]),
        ("blank-line", [(2, "one\ntwo"), (5, "three"), (8, "<|endoftext|>\nfour")]),
        ("ee", [(2, "one\ntwo\n\nthr"), (6, " \n\n<|endoftext|>\nfour")]),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_text_documents(
    tmp_path: Path, documents: str, expected: list[tuple[int, str]], end: str
) -> None:
    text = "\ufeff\none\ntwo\n\nthree\n \n\n<|endoftext|>\nfour\n".replace("\n", end)
    items = read(tmp_path, text, documents=documents)
    assert list(zip([item.line for item in items], texts_of(items), strict=True)) == expected


@given(
    st.text("ab \n", min_size=1, max_size=300),
    st.integers(2, 40),
    st.sampled_from(["file", "line", "blank-line"]),
)
@settings(deadline=None)
def test_long_documents_are_cut_without_loss(
    folder: Path, text: str, size: int, documents: str
) -> None:
    with mock.patch.object(tables, "_PIECE", 8):
        items = read(folder, text, documents=documents, max_document_chars=size)
    if text.strip():
        parts = texts_of(items)
        assert max(map(len, parts)) <= 2 * size
        assert "".join("".join(parts).split()) == "".join(text.split())
        # Each part stands where its line number says.
        for part, item in zip(parts, items, strict=True):
            there = text.split("\n")[item.line - 1 :]
            assert 0 <= "\n".join(there).find(part) <= len(there[0])


def test_cuts_are_at_paragraph_ends(tmp_path: Path) -> None:
    paragraphs = [f"{n} " + "word " * 10 + "end." for n in range(40)]
    parts = texts_of(read(tmp_path, "\n\n".join(paragraphs), max_document_chars=500))
    assert len(parts) > 3
    assert "\n\n".join(parts) == "\n\n".join(paragraphs)
