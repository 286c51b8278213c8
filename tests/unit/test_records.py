"""Reading training data: every tolerated shape, and one clear error with file and line for every
bad one.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import load_split

from allhands.data.reading import read_records
from allhands.data.records import ColumnNames, Record, parse_record
from allhands.data.splits import split_of_hub
from allhands.errors import ConfigError, DataError

DATA = Path(
    os.environ.get("ALLHANDS_TEST_DATA", Path(__file__).parents[2].parent / "shared" / "data")
)
DEFAULT = ColumnNames()
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ahoy!"}]}


def write(folder: Path, content: bytes | str, name: str = "train.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path: Path, **columns: str) -> list[Record]:
    return list(read_records(path, ColumnNames(**columns)))


def failure(path: Path, **columns: str) -> DataError:
    with pytest.raises(DataError) as caught:
        read(path, **columns)
    assert caught.value.hint, "every error says what to do"
    return caught.value


def parse(row: Any) -> Record:
    return parse_record(row, DEFAULT, source="f", line=1)


def shared(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip("no test data: set ALLHANDS_TEST_DATA")
    return path


# Files


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_lines_blank_lines_bom_and_crlf(tmp_path: Path, end: str, bom: bytes) -> None:
    lines = [
        json.dumps(CHAT),
        "",
        "  ",
        '{"text": "Ærø\u2028é"}',
        '{"prompt": "p", "completion": "c"}',
    ]
    records = read(write(tmp_path, bom + end.join(lines).encode()))
    assert [(r.kind, r.where) for r in records] == [
        ("chat", "train.jsonl:1"),
        ("text", "train.jsonl:4"),
        ("completion", "train.jsonl:5"),
    ]
    assert records[0].messages == tuple(CHAT["messages"])
    assert records[1].text == "Ærø\u2028é"
    assert (records[2].prompt, records[2].completion) == ("p", "c")


@given(
    st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], as_array: bool, ascii_only: bool
) -> None:
    rows = [{"text": text} for text in texts]
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    content = json.dumps(rows, ensure_ascii=ascii_only, indent=1) if as_array else "\n".join(lines)
    path = write(tmp_path_factory.mktemp("rows"), content)
    assert [record.text for record in read(path)] == texts


@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_a_json_array_is_read_with_line_numbers(tmp_path: Path, name: str) -> None:
    records = read(write(tmp_path, json.dumps([CHAT, {"text": "t"}], indent=1), name))
    assert [(r.kind, r.line) for r in records] == [("chat", 2), ("text", 14)]


def test_json_values_one_after_the_other_in_a_json_file(tmp_path: Path) -> None:
    assert [
        r.line for r in read(write(tmp_path, '{"text":\n "a"}\n{"text": "b"}', "train.json"))
    ] == [1, 3]


def test_reading_is_streamed(tmp_path: Path) -> None:
    records = read_records(write(tmp_path, '{"text": "a"}\nnot json\n'), DEFAULT)
    assert next(records).text == "a"
    with pytest.raises(DataError) as caught:
        next(records)
    assert caught.value.code == "json-invalid"


@pytest.mark.parametrize(
    ("content", "where", "message", "hint"),
    [
        ("", "train.jsonl", "empty", "one JSON object"),
        ("\n \n", "train.jsonl", "empty", "one JSON object"),
        ("[]", "train.jsonl", "empty", "one JSON object"),
        (
            '{"text": "a"}\n{"text": b"}\n',
            "train.jsonl:2",
            'at column 10, near \'{"text": b"}\'',
            "JSON object",
        ),
        ("{'text': 'a'}\n", "train.jsonl:1", "column 2", "JSON object"),
        ('{"text": "a"}\n{"text": "b', "train.jsonl:2", "ends in the middle", "cut off"),
        (
            '{"text": "a"}\n{"text":\n "b"}\n',
            "train.jsonl:2",
            "does not end on its line",
            "one line",
        ),
        (
            '{"text": "a"} {"text": "b"}\n',
            "train.jsonl:1",
            "Extra data at column 15",
            "JSON object",
        ),
        (b'{"text": "a"}\n{"text": "caf\xe9"}\n', "train.jsonl:2", "byte 0xe9 at byte 14", "iconv"),
        (
            b'[{"text": "a"},\n{"text": "caf\xe9"}]',
            "train.jsonl:2",
            "byte 0xe9 at byte 14",
            "iconv",
        ),
        ('"words"\n', "train.jsonl:1", "this is a string", "messages"),
        ("3\n", "train.jsonl:1", "this is a number", "messages"),
        ('[{"text": "a"},\n {"text": "b"', "train.jsonl:2", "not JSON", "repair"),
        ('[{"text": "a"},\n {"text": "b"}\n', "train.jsonl:3", "not closed", "repair"),
        ('[{"text": "a"}\n {"text": "b"}]', "train.jsonl:2", "expected ','", "repair"),
        ('[{"text": "a"}]\n[{"text": "b"}]\n', "train.jsonl:2", "end of the list", "repair"),
        ('[["a"]]', "train.jsonl:1", "this is a list", "messages"),
        ("[" * 100_000, "train.jsonl:1", "not usable JSON", "nesting"),
        ('{"text": ' + "9" * 5000 + "}\n", "train.jsonl:1", "not usable JSON", "number"),
        (gzip.compress(b'{"text": "a"}', mtime=0), "train.jsonl", "gzip", ".gz"),
        ('{"text": "a"}'.encode("utf-16"), "train.jsonl", "UTF-16", "iconv"),
        (b"PAR1\x15\x04", "train.jsonl", "Parquet", "hf_dataset"),
        (b"PK\x03\x04\x14", "train.jsonl", "zip", "unpack"),
        (b"\x00" * 20, "train.jsonl:1", "not JSON", "JSON object"),
    ],
)
def test_bad_files(
    tmp_path: Path, content: bytes | str, where: str, message: str, hint: str
) -> None:
    error = failure(write(tmp_path, content))
    assert error.where == where
    assert message in error.message
    assert hint in (error.hint or "")


# Records


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}, fields]}


@pytest.mark.parametrize(
    ("row", "problem", "hint"),
    [
        ({"messages": "hi"}, '"messages" is a string', "role"),
        ({"messages": []}, "no message", "delete"),
        ({"messages": None}, "null", "role"),
        ({"messages": ["hi"]}, "messages[0] is a string", "role"),
        ({"messages": [{"role": "user", "content": "u"}]}, "no assistant message", "delete"),
        (message(role="assistant", content=None), "messages[1] is null", "fill it in"),
        (message(role="assistant"), "messages[1] is null or missing", "fill it in"),
        (message(role="assistant", content=" \n"), "messages[1] is an empty answer", "delete"),
        (message(role="assistant", content=3), "messages[1] is a number", "quotes"),
        (message(role="assistant", content=True), "messages[1] is a boolean", "quotes"),
        (message(role="assistant", content={"text": "a"}), "an object", "quotes"),
        (message(content="a"), 'messages[1] has no role; its keys are "content"', '"role"'),
        (
            {"messages": [{"value": "a"}]},
            'has no role; its keys are "content"',
            '"role" and "content"',
        ),
        (message(role="narrator", content="a"), "unknown role 'narrator'", "user, assistant"),
        (message(role=["x"], content="a"), "unknown role ['x']", "user, assistant"),
        (
            message(role="assistant", content=[{"type": "image_url"}]),
            'type "image_url"',
            "only text",
        ),
        (
            message(role="assistant", content=[{"type": "text"}]),
            "a part of the content",
            "fill it in",
        ),
        (message(role="assistant", content="a", tool_calls="x"), "tool_calls", "tools"),
        (
            message(role="assistant", content="a", tool_calls=[{"id": "1"}]),
            "tool call 1 has no name",
            "function",
        ),
        (
            message(role="assistant", tool_calls=[{"name": "f", "arguments": 1}]),
            "tool call 1 are a number",
            "write",
        ),
        (
            message(role="assistant", content="a", name="\ud800"),
            "half a surrogate pair (\\ud800)",
            "remove",
        ),
        (
            message(role="assistant", content="a", weight=float("nan")),
            "JSON cannot write",
            "remove",
        ),
        (
            {"messages": [{"role": "tool", "content": "4"}, CHAT["messages"][1]]},
            "no assistant message asked",
            "before",
        ),
        ({**CHAT, "tools": "x"}, "not JSON", "JSON list"),
        ({**CHAT, "tools": {"a": 1}}, '"tools" must be a list', "JSON list"),
        ({"prompt": "p", "completion": ""}, '"completion" is empty', "delete"),
        ({"prompt": "p", "completion": None}, '"completion" is null', "fill it in"),
        ({"prompt": 1, "completion": "c"}, '"prompt" is a number', "quotes"),
        ({"text": 5}, '"text" is a number', "quotes"),
        ({"text": "\ud800"}, "half a surrogate pair (\\ud800)", "remove"),
        ({}, "the keys are none", "prompt_feature"),
        ({"prompt": "p"}, 'the keys are "prompt"', "completion"),
        (
            {"question": "q", "answer": "a", "context": "c"},
            '"question", "answer", "context"',
            'prompt_feature: "question", completion',
        ),
        ({"prompt": "q", "answer": "a"}, '"prompt", "answer"', 'completion_feature: "answer"'),
        ({"instruction": "i", "context": "x", "response": "o"}, "no known shape", 'join "context"'),
        ({"instruction": "i", "output": " "}, '"output" is empty', "delete"),
        ({"instruction": None, "output": "o"}, '"instruction" is null', "fill it in"),
        ({"conversations": []}, '"conversations" has no message', "delete"),
        ({"chat": []}, "no known shape", 'chat_feature: "chat"'),
        ({"story": "s"}, "no known shape", 'text_feature: "story"'),
        ({"chosen": 1, "rejected": 2}, "preference data", "`allhands data prepare`"),
        ({**CHAT, "label": True}, "rated answers", "`allhands data prepare`"),
        (
            {"prompt": "p", "completion": "c", "label": False},
            "rated answers",
            "`allhands data prepare`",
        ),
        ({"input_ids": [1]}, "no known shape", "already tokenized"),
    ],
)
def test_bad_records(row: Any, problem: str, hint: str) -> None:
    with pytest.raises(DataError) as caught:
        parse(row)
    assert caught.value.where == "f:1"
    assert problem in caught.value.message
    assert hint in (caught.value.hint or "")


def test_content_parts_are_joined_and_nulls_dropped() -> None:
    parts = [{"type": "text", "text": "Ahoy "}, {"type": "text", "value": "matey"}, "!"]
    record = parse(message(role="assistant", content=parts, tool_calls=None))
    assert record.messages is not None
    assert record.messages[1] == {"role": "assistant", "content": "Ahoy matey!"}


def test_tool_calls_need_no_words_and_tools_may_be_a_string() -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    record = parse(
        message(role="assistant", content=None, tool_calls=calls) | {"tools": '[{"name": "f"}]'}
    )
    assert record.messages is not None
    assert record.messages[1] == {"role": "assistant", "content": "", "tool_calls": calls}
    assert record.tools == [{"name": "f"}]
    assert parse({**CHAT, "tools": None}).tools is None


def test_completion_of_messages() -> None:
    record = parse({"prompt": "p", "completion": [{"role": "assistant", "content": "c"}]})
    assert record.prompt == [{"role": "user", "content": "p"}]
    with pytest.raises(DataError, match='"completion" has no assistant'):
        parse({"prompt": "p", "completion": [{"role": "user", "content": "c"}]})


def test_precedence_is_mlx_lms_and_names_can_be_mapped() -> None:
    row = {"text": "t", "prompt": "p", "completion": "c", **CHAT}
    assert parse(row).kind == "completion"
    assert parse({"text": "t", **CHAT}).kind == "chat"
    columns = ColumnNames.from_options(
        {"prompt_feature": "q", "completion_feature": "a", "text_feature": None}
    )
    assert columns == ColumnNames(prompt_feature="q", completion_feature="a")
    record = parse_record({"q": "1+1", "a": "2", "text": "t"}, columns, source="f", line=1)
    assert (record.kind, record.prompt, record.completion) == ("completion", "1+1", "2")


def test_alpaca_and_sharegpt_are_trained_on() -> None:
    record = parse({"instruction": "Add.", "input": "1 and 1", "output": "2"})
    assert (record.kind, record.prompt, record.completion) == ("completion", "Add.\n\n1 and 1", "2")
    record = parse(
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ahoy!"}]}
    )
    assert (record.kind, record.messages) == ("chat", tuple(CHAT["messages"]))


def test_turns_are_the_whole_conversation() -> None:
    user, answer = CHAT["messages"]
    assert parse(CHAT).turns == [user, answer]
    assert parse({"prompt": "Hi", "completion": "Ahoy!"}).turns == [user, answer]
    assert parse({"prompt": [user, answer, user], "completion": "Ahoy!"}).turns == [
        user,
        answer,
        user,
        answer,
    ]
    assert parse({"text": "Hi"}).turns == []


def test_a_null_counts_only_where_nothing_else_is_there() -> None:
    # As tables have it, where every row has every column.
    assert parse({"messages": None, "prompt": None, "completion": None, "text": "t"}).text == "t"
    with pytest.raises(DataError, match='"messages" is null'):
        parse({"messages": None, "text": None})


# Names of columns


def test_a_mapped_column_wins_over_the_default_names() -> None:
    row = {
        "prompt": "p",
        "completion": "c",
        "text": "t",
        **CHAT,
        "meta": {"body": "b", "a.b": {"c": "deep"}},
    }
    for name, text in (("meta.body", "b"), ("meta.a.b.c", "deep")):
        record = parse_record(row, ColumnNames(text_feature=name), source="f", line=1)
        assert (record.kind, record.text) == ("text", text)
    # The key itself comes before the path.
    record = parse_record(
        {**row, "meta.body": "key"}, ColumnNames(text_feature="meta.body"), source="f", line=1
    )
    assert record.text == "key"
    columns = ColumnNames(
        instruction_feature="text", output_feature="meta.body", system_feature="prompt"
    )
    record = parse_record(row, columns, source="f", line=1)
    assert [m["content"] for m in record.turns] == ["p", "t", "b"]


def test_a_mapped_system_column_goes_before_every_shape() -> None:
    columns = ColumnNames(system_feature="rules")
    for row in ({"prompt": "Hi", "completion": "Ahoy!"}, CHAT):
        record = parse_record({**row, "rules": "Be brief."}, columns, source="f", line=1)
        assert record.turns == [{"role": "system", "content": "Be brief."}, *CHAT["messages"]]
        assert (
            parse_record({**row, "rules": None}, columns, source="f", line=1).turns
            == CHAT["messages"]
        )


@pytest.mark.parametrize(
    ("names", "row", "problem", "hint"),
    [
        (
            {"prompt_feature": "qestion", "completion_feature": "Anser"},
            {"question": "q", "answer": "a"},
            '"Anser" (completion_feature), "qestion" (prompt_feature) are not there; the keys are "question", "answer"',
            'the nearest: completion_feature: "answer", prompt_feature: "question"',
        ),
        (
            {"text_feature": "meta.bdy"},
            {"meta": {"body": "b"}},
            "is not there",
            'text_feature: "meta.body"',
        ),
        # What the default names would give is not taken instead.
        (
            {"text_feature": "body"},
            CHAT,
            '"body" (text_feature) is not there; the keys are "messages"',
            "messages",
        ),
        (
            {"prompt_feature": "q"},
            {"q": "1", "answer": "2", "text": "t"},
            '"q" (prompt_feature) alone',
            "answer",
        ),
        ({"text_feature": "zzz"}, {}, "the keys are none", "text_feature"),
        ({"label_feature": "good"}, CHAT, '"good" is null or missing', "true or false"),
        ({"label_feature": "good"}, {**CHAT, "good": 7}, '"good" is a number', "true or false"),
    ],
)
def test_a_mapping_that_fits_nothing(
    names: dict[str, str], row: Any, problem: str, hint: str
) -> None:
    with pytest.raises(DataError) as caught:
        parse_record(row, ColumnNames(**names), source="f", line=1)
    assert caught.value.where == "f:1"
    assert problem in caught.value.message
    assert hint in (caught.value.hint or "")


# The folder


def test_splits_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path, '{"text": "a"}\n')
    write(tmp_path, '[{"text": "b"}]', "valid.json")
    assert [r.text for r in load_split(tmp_path, "train", DEFAULT, required=True)] == ["a"]
    assert [r.where for r in load_split(tmp_path, "valid", DEFAULT, required=True)] == [
        "valid.json:1"
    ]
    assert load_split(tmp_path, "test", DEFAULT, required=False) == []


@pytest.mark.parametrize(
    "names",
    [
        ["validation-1-of-2.txt", "validation-2-of-2.txt"],
        ["val.jsonl"],
        ["dev.json"],
        ["validation/a.txt"],
    ],
)
def test_a_validation_split_may_be_called_as_on_the_hub(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path, '{"text": "a"}\n')
    assert load_split(tmp_path, "valid", DEFAULT, required=False) == []
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path, '{"text": "b"}\n', name)
    assert len(load_split(tmp_path, "valid", DEFAULT, required=True)) == len(names)
    write(tmp_path, '{"text": "c"}\n', "valid.jsonl")
    assert [r.text for r in load_split(tmp_path, "valid", DEFAULT, required=True)] == ["c"], (
        "its own name comes first"
    )


def test_missing_folders_and_files_say_what_is_there(tmp_path: Path) -> None:
    def fail(path: Path) -> DataError:
        with pytest.raises(DataError) as caught:
            load_split(path, "train", DEFAULT, required=True)
        assert caught.value.hint
        return caught.value

    assert "does not exist" in fail(tmp_path / "none").message
    assert "holds nothing" in fail(tmp_path).message
    path = write(tmp_path, '{"text": "a"}', "training.jsonl")
    assert "holds training.jsonl" in fail(tmp_path).message
    assert f"allhands data prepare {path} --out" in (fail(path).hint or "")
    (tmp_path / "folder").mkdir()
    file = write(tmp_path / "folder", '{"text": "a"}')
    assert f"--data {tmp_path / 'folder'}" in (fail(file).hint or "")
    (tmp_path / "train.jsonl").mkdir()
    assert "cannot read the file" in fail(tmp_path).message
    assert "this is a folder" in (fail(tmp_path).hint or "")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything"
)
def test_unreadable_file(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": "a"}')
    path.chmod(0)
    assert "chmod" in (failure(path).hint or "")


# Hub datasets, with a stand-in for the library


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def load_dataset(path: str, split: str, **options: Any) -> list[dict[str, Any]]:
        calls.append((path, split, options))
        if path == "missing":
            raise FileNotFoundError("no such dataset")
        return [{"question": "q", "answer": path}]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")  # nobody is asked whether the Hub answers
    return calls


def hub_records(spec: Any, split: str) -> list[Record]:
    source = split_of_hub(spec, split)
    return [] if source is None else list(source.records())


def test_hub_datasets_follow_each_other(hub: list[tuple[Any, ...]]) -> None:
    names = {"prompt_feature": "question", "completion_feature": "answer", "text_feature": None}
    spec = [
        {"path": "one", "config": {"name": "main"}, **names},
        {"path": "two", "train_split": "all", **names},
    ]
    records = hub_records(spec, "train")
    assert [(r.completion, r.where) for r in records] == [
        ("one", "one[train[:80%]]:1"),
        ("two", "two[all]:1"),
    ]
    assert hub == [("one", "train[:80%]", {"name": "main"}), ("two", "all", {})]
    assert hub_records(spec, "test") == []


def test_hub_errors(hub: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as unknown:
        hub_records({"path": "a", "prompt_column": "q"}, "train")
    assert unknown.value.code == "option-unknown"
    assert "prompt_feature" in (unknown.value.hint or "")
    with pytest.raises(ConfigError) as caught:
        hub_records({}, "train")
    assert caught.value.code == "option-missing"
    with pytest.raises(DataError) as caught:
        hub_records({"path": "missing"}, "train")
    assert caught.value.code == "dataset-missing"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError) as absent:
        hub_records({"path": "a"}, "train")
    assert absent.value.code == "data-package-missing"
    assert absent.value.hint == "pip install datasets"


# Real files


@pytest.mark.parametrize(
    ("name", "kinds", "last_line"),
    [
        ("bad-inputs/blank-lines.jsonl", {"chat": 2}, 4),
        ("bad-inputs/bom-utf8.jsonl", {"chat": 1}, 1),
        ("bad-inputs/mixed-formats.jsonl", {"chat": 1, "text": 1, "completion": 1}, 3),
        ("bad-inputs/prompt-longer-than-max-seq.jsonl", {"completion": 1}, 1),
        ("bad-inputs/single-json-array.jsonl", {"chat": 2}, 14),
        ("formats/alpaca.json", {"completion": 2}, 7),
        ("formats/alpaca_en_demo.json", {"completion": 999}, 4992),
        ("formats/conversation.json", {"chat": 1}, 1),
        ("formats/glaive_toolcall_en_demo.json", {"chat": 300}, 9137),
        ("formats/v1_sft_demo.jsonl", {"chat": 500}, 500),
        ("pirate-dolly/train.jsonl", {"chat": 5328}, 5328),
        ("tinystories/valid.jsonl", {"text": 105}, 105),
        ("wikisql/test.jsonl", {"text": 100}, 100),
    ],
)
def test_real_files_that_are_read(name: str, kinds: dict[str, int], last_line: int) -> None:
    records = read(shared(name))
    assert {kind: sum(r.kind == kind for r in records) for kind in kinds} == kinds
    assert len(records) == sum(kinds.values())
    assert records[-1].where == f"{Path(name).name}:{last_line}"


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("bad-inputs/empty.jsonl", None, "empty"),
        ("bad-inputs/latin1.jsonl", 1, "not UTF-8"),
        ("bad-inputs/messages-not-list.jsonl", 1, "must be a list"),
        ("bad-inputs/null-content.jsonl", 1, "null"),
        ("bad-inputs/only-user.jsonl", 1, "no assistant message"),
        ("bad-inputs/truncated-last-line.jsonl", 3, "ends in the middle"),
        ("bad-inputs/unknown-keys.jsonl", 1, '"question", "answer"'),
        ("formats/conversation.missingturns.json", 1, "conversations[1] is an empty answer"),
        ("formats/conversation.tokenized.json", 1, '"input_ids"'),
        ("formats/conversation.tokenized_llama2chat.json", 1, '"input_ids"'),
        ("formats/dpo_en_demo.json", 2, '"chosen"'),
        ("formats/kto_en_demo.json", 2, '"label" is true or false'),
    ],
)
def test_real_files_that_are_refused(name: str, line: int | None, message: str) -> None:
    error = failure(shared(name))
    file = Path(name).name
    assert error.where == (f"{file}:{line}" if line else file)
    assert message in error.message


def test_real_file_with_a_missing_comma() -> None:
    # Its keys are unknown too; with a mapping, the broken line is what is reported.
    path = shared("bad-inputs/real-malformed-json-missing-comma.json")
    error = failure(path, prompt_feature="en", completion_feature="pr")
    assert error.where is not None
    line = int(error.where.rpartition(":")[2])
    with pytest.raises(json.JSONDecodeError) as reference:
        json.loads(path.read_text())
    assert abs(line - reference.value.lineno) <= 1
    assert "not JSON" in error.message


def test_mapped_real_file() -> None:
    records = read(
        shared("gsm8k/test.jsonl"), prompt_feature="question", completion_feature="answer"
    )
    assert len(records) == 1319
    assert str(records[0].completion).endswith("#### 18")


def test_a_text_may_be_empty() -> None:
    assert parse({"text": "  "}).is_blank
    assert not parse({"text": " a"}).is_blank
    assert not parse(CHAT).is_blank
