"""The same thing in an older or padded spelling is read as that; what may mean two things is
refused by name.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from allhands.data.reading import read_records
from allhands.data.records import ColumnNames, Record, parse_record
from allhands.data.shapes import parse_example
from allhands.errors import DataError

ASK = {"role": "user", "content": "Is the ferry to Skye running?"}
END = {"role": "assistant", "content": "Yes, it runs."}
ARGUMENTS = {"route": "Skye"}
CALL = {"type": "function", "function": {"name": "ferry_status", "arguments": ARGUMENTS}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "ferry_status", "content": "running"}
FUNCTION = {
    "name": "ferry_status",
    "description": "State of a ferry",
    "parameters": {"type": "object"},
}
TOOL = {"type": "function", "function": FUNCTION}


def parse(row: Any, **columns: str) -> Record:
    return parse_record(row, ColumnNames(**columns), source="f", line=1)


def refusal(row: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        parse(row)
    assert caught.value.where == "f:1"
    assert caught.value.hint
    return caught.value


def calls_of(message: dict[str, Any]) -> list[Any]:
    """Names and arguments of the calls of an answer that is the second message."""
    read = parse(
        {"messages": [ASK, {"role": "assistant", "content": None, **message}, RESULT, END]}
    ).turns[1]
    assert not set(read) - {"role", "content", "tool_calls"}, read
    functions = [call["function"] for call in read["tool_calls"]]
    decoded = [
        f["arguments"] if isinstance(f["arguments"], dict) else json.loads(f["arguments"])
        for f in functions
    ]
    return [(f["name"], arguments) for f, arguments in zip(functions, decoded, strict=True)]


# OpenAI's older form


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": "Let me look."}])
@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)])
def test_function_call_role_function_and_functions(content: dict[str, Any], arguments: Any) -> None:
    call = {"name": "ferry_status", "arguments": arguments}
    old = {"role": "assistant", **content, "function_call": call}
    record = parse(
        {"messages": [ASK, old, {**RESULT, "role": "function"}, END], "functions": [FUNCTION]}
    )
    now = {**CALLING, "content": content.get("content") or ""}
    now["tool_calls"] = [{"type": "function", "function": call}]
    assert record.turns == [ASK, now, RESULT, END]
    assert record.tools == [TOOL]


@pytest.mark.parametrize(
    "functions", [[FUNCTION], json.dumps([FUNCTION]), [json.dumps(FUNCTION)], [TOOL]]
)
def test_functions_are_tools_in_every_shape(functions: Any) -> None:
    shapes = [
        {"messages": [ASK, END]},
        {"prompt": "p", "completion": "c"},
        {"instruction": "i", "output": "o"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ]
    assert [parse({**row, "functions": functions}).tools for row in shapes] == [[TOOL]] * 4
    pair = {"prompt": "p", "chosen": "a", "rejected": "b", "functions": functions}
    found = parse_example(pair, ColumnNames(), source="f", line=1).preference
    assert found is not None
    assert found["tools"] == [TOOL]


def test_functions_beside_tools() -> None:
    chat = {"messages": [ASK, END]}
    assert parse({**chat, "tools": [TOOL], "functions": [FUNCTION]}).tools == [TOOL]
    assert parse({**chat, "tools": [], "functions": [FUNCTION]}).tools == [TOOL]
    assert parse({**chat, "tools": [TOOL], "functions": None}).tools == [TOOL]
    other = {**FUNCTION, "name": "train_status"}
    assert '"functions"' in refusal({**chat, "tools": [TOOL], "functions": [other]}).message
    # Other people's columns of that name are none of this.
    for value in ("f(x) = 2x", ["sin", "cos"], 3, [], "", "[1, 2]"):
        assert parse({**chat, "functions": value}).tools is None


# Calls


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": json.dumps([CALL])},
        {"tool_calls": [json.dumps(CALL)]},
        {"tool_calls": CALL},
        {"tool_call": CALL},
        {"tool_calls": [{"name": "ferry_status", "arguments": ARGUMENTS}]},
        {"tool_calls": [{"name": "ferry_status", "parameters": ARGUMENTS}]},
        {
            "tool_calls": [
                {"id": "1", "type": "tool_call", "name": "ferry_status", "args": ARGUMENTS}
            ]
        },
        {
            "tool_calls": [
                {
                    "function": {
                        "name": "ferry_status",
                        "arguments": json.dumps(json.dumps(ARGUMENTS)),
                    }
                }
            ]
        },
        {
            "tool_calls": [
                {"function": json.dumps({"name": "ferry_status", "arguments": ARGUMENTS})}
            ]
        },
        {"function_call": json.dumps({"name": "ferry_status", "arguments": json.dumps(ARGUMENTS)})},
        {"tool_calls": [CALL], "function_call": None},
        {"tool_calls": [CALL], "function_call": {"name": None, "arguments": None}},
        {
            "tool_calls": [CALL],
            "function_call": {"name": "ferry_status", "arguments": json.dumps(ARGUMENTS)},
        },
        {"tool_calls": [], "function_call": {"name": "ferry_status", "arguments": ARGUMENTS}},
        {
            "content": [
                {"type": "tool_use", "id": "toolu_1", "name": "ferry_status", "input": ARGUMENTS}
            ]
        },
    ],
)
def test_spellings_of_a_call(message: dict[str, Any]) -> None:
    assert calls_of(message) == [("ferry_status", ARGUMENTS)]


def test_a_call_in_a_role_of_its_own() -> None:
    for role in ("function_call", "tool_call"):
        words = json.dumps({"name": "ferry_status", "arguments": ARGUMENTS})
        assert (
            parse({"messages": [ASK, {"role": role, "content": words}, RESULT, END]}).turns[1]
            == CALLING
        )


def test_a_call_without_arguments_has_none() -> None:
    for call in (
        {"name": "now"},
        {"name": "now", "arguments": None},
        {"function": {"name": "now", "arguments": {}}},
    ):
        assert calls_of({"tool_calls": [call]}) == [("now", {})]


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        (
            [ASK, {**CALLING, "function_call": {"name": "other", "arguments": "{}"}}],
            '"function_call"',
        ),
        ([{**ASK, "function_call": {"name": "f", "arguments": "{}"}}, END], '"function_call"'),
        ([ASK, {"role": "assistant", "function_call": "auto"}], "function_call"),
        ([ASK, {"role": "assistant", "function_call": {"arguments": "{}"}}], "no name"),
        (
            [ASK, {**CALLING, "content": [{"type": "tool_use", "name": "f", "input": {}}]}],
            '"tool_use"',
        ),
        ([{**ASK, "content": [{"type": "tool_result", "content": "4"}]}, END], '"tool_result"'),
        ([ASK, {**END, "reasoning": "one", "reasoning_content": "two"}], '"reasoning"'),
    ],
)
def test_what_may_mean_two_things_is_refused_by_name(messages: list[Any], word: str) -> None:
    assert word in refusal({"messages": messages}).message


# Roles and reasoning


def test_other_names_of_roles() -> None:
    names = {
        "human": "user",
        "User": "user",
        "model": "assistant",
        "gpt": "assistant",
        "Assistant ": "assistant",
    }
    for name, role in names.items():
        chat = [ASK, END, {"role": name, "content": "x"}, END]
        assert parse({"messages": chat}).turns[2] == {"role": role, "content": "x"}
    assert [
        m["role"]
        for m in parse({"messages": [ASK, CALLING, {**RESULT, "role": "observation"}]}).turns
    ][2] == "tool"


@pytest.mark.parametrize(
    ("message", "reasoning"),
    [
        ({"reasoning_content": "It is winter."}, {"reasoning_content": "It is winter."}),
        ({"reasoning": "It is winter.", "thinking": ""}, {"reasoning": "It is winter."}),
        (
            {"reasoning": "It is winter.", "reasoning_content": "It is winter.\n"},
            {"reasoning_content": "It is winter.\n"},
        ),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": "It is winter."},
                    {"type": "text", "text": "Yes, it runs."},
                ]
            },
            {"reasoning_content": "It is winter."},
        ),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "It is winter."}]},
                    {"type": "text", "text": "Yes, it runs."},
                ]
            },
            {"reasoning_content": "It is winter."},
        ),
        ({"reasoning_content": " ", "thinking": True}, {"thinking": True}),
    ],
)
def test_reasoning_stands_under_one_key(message: dict[str, Any], reasoning: dict[str, Any]) -> None:
    assert parse({"messages": [ASK, {**END, **message}]}).turns[1] == {**END, **reasoning}


def test_an_answer_may_be_nothing_but_reasoning() -> None:
    for content in ("", None):
        record = parse(
            {
                "messages": [
                    ASK,
                    {"role": "assistant", "content": content, "reasoning_content": "Hm."},
                ]
            }
        )
        assert record.turns[1]["content"] == ""


# Lists in strings


def test_lists_in_strings_are_those_lists() -> None:
    chat = [ASK, CALLING, RESULT, END]
    sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "It's [a] list"}]
    twice = json.dumps(json.dumps(chat))
    assert parse({"messages": twice}).turns == chat
    for write in (json.dumps, repr, lambda value: json.dumps(value, indent=2)):
        assert parse({"messages": write(chat), "tools": write([TOOL])}).turns == chat
        assert parse({"conversations": write(sharegpt)}).turns[1]["content"] == "It's [a] list"
        assert parse({"messages": write(sharegpt)}).turns[1]["content"] == "It's [a] list"
        assert parse({"talk": write(chat)}, chat_feature="talk").turns == chat
        assert parse({"prompt": write([ASK]), "completion": write([END])}).turns == [ASK, END]
        history = {"instruction": "i", "output": "o", "history": write([["q", "a"]])}
        assert [m["content"] for m in parse(history).turns] == ["q", "a", "i", "o"]
        pair = {
            "prompt": write([ASK]),
            "chosen": write([END]),
            "rejected": write([{**END, "content": "No."}]),
        }
        found = parse_example(pair, ColumnNames(), source="f", line=1).preference
        assert found is not None
        assert (found["prompt"], found["chosen"]) == ([ASK], [END])
    # Each message a string of its own.
    assert parse({"messages": [json.dumps(one) for one in chat]}).turns == chat
    # An empty cell is no chat.
    assert parse({"messages": "", "text": "t"}).text == "t"


def test_a_text_about_lists_stays_a_text() -> None:
    listed = json.dumps([ASK, END])
    for row in (
        {"prompt": "Write a chat as JSON.", "completion": listed},
        {"prompt": listed, "completion": "A chat about a ferry."},
        {"prompt": "[1, 2]", "completion": "[3]"},
    ):
        record = parse(row)
        assert (record.prompt, record.completion) == (row["prompt"], row["completion"])


def test_a_string_that_is_no_list_names_its_key() -> None:
    for value in ("[{'role': 'user'}\n {'role': 'user'}]", "[not a list]"):
        assert '"messages"' in refusal({"messages": value}).message


def test_a_csv_and_a_parquet_file_of_chats(tmp_path: Path) -> None:
    rows = [
        {"messages": json.dumps([ASK, END]), "tools": json.dumps([TOOL])},
        {"messages": repr([ASK, END]), "tools": ""},
    ]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["messages", "tools"])
        writer.writeheader()
        writer.writerows(rows)
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        records = list(read_records(tmp_path / name, ColumnNames()))
        assert [(record.turns, record.tools) for record in records] == [
            ([ASK, END], [TOOL]),
            ([ASK, END], None),
        ]


# Nulls of tables


def test_what_arrow_fills_up_is_as_if_absent(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    other = {
        "type": "function",
        "function": {"name": "tide", "arguments": {"hours": [1, None], "place": {"id": 3}}},
    }
    schema = {
        "type": "object",
        "properties": {"route": {"type": "string", "enum": ["Skye"]}},
        "required": ["route"],
    }
    other_schema = {
        "type": "object",
        "properties": {"hours": {"type": "array", "description": "Hours"}},
    }
    tools = [
        {"type": "function", "function": {"name": "ferry_status", "parameters": schema}},
        {
            "type": "function",
            "function": {"name": "tide", "parameters": other_schema, "strict": True},
        },
    ]
    rows = [
        {"messages": [ASK, {**CALLING, "tool_calls": [CALL, other]}, RESULT, END], "tools": tools},
        {"messages": [ASK, {**END, "reasoning_content": "Hm."}], "tools": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    # The file does hold nulls everywhere.
    padded = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert padded[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {
        **ARGUMENTS,
        "hours": None,
        "place": None,
    }
    read = list(read_records(tmp_path / "a.parquet", ColumnNames()))
    assert [(record.turns, record.tools) for record in read] == [
        (row["messages"], row["tools"]) for row in rows
    ]
    # And so where the rows were written out as JSON Lines.
    assert [parse(row) for row in padded] == [parse(row) for row in rows]


def test_a_null_for_something_that_the_tool_does_not_have_is_filling() -> None:
    tool = {
        "type": "function",
        "function": {**FUNCTION, "parameters": {"properties": {"route": {}, "day": {}}}},
    }
    filled = {
        "type": "function",
        "function": {"name": "ferry_status", "arguments": {"day": None, "hours": None, "route": 1}},
    }
    kept = {
        "type": "function",
        "function": {"name": "ferry_status", "arguments": {"day": None, "route": 1}},
    }
    calling = {"role": "assistant", "content": None, "tool_calls": [filled]}
    for row in ({"messages": [ASK, calling]}, {"prompt": [ASK], "completion": [calling]}):
        assert parse({**row, "tools": [tool]}).turns[1]["tool_calls"] == [kept]
        assert parse(row).turns[1]["tool_calls"] == [filled]


def test_a_null_that_somebody_wrote_stays() -> None:
    meant = {"type": "function", "function": {"name": "f", "arguments": {"route": None}}}
    assert parse({"messages": [ASK, {**CALLING, "tool_calls": [meant]}]}).turns[1][
        "tool_calls"
    ] == [meant]
    tool = {
        "type": "function",
        "function": {**FUNCTION, "parameters": {"properties": {"a": {"default": None}}}},
    }
    assert parse({"messages": [ASK, END], "tools": [tool]}).tools == [tool]
    assert parse({"messages": [ASK, END], "tools": [{**tool, "strict": None}]}).tools != [tool]


def test_what_stands_beside_a_record_and_is_not_trained_is_named() -> None:
    chat = {"messages": [ASK, END]}
    assert parse({**chat, "images": ["a.png"], "audio": None, "video": []}).unread == ("images",)
    assert parse(chat).unread == ()
    alpaca = {"instruction": "i", "output": "o", "system": "s"}
    assert parse({**chat, "system": "s", "reasoning": "r"}).unread == ("reasoning", "system")
    assert parse({**chat, "system": " ", "reasoning": 3}).unread == ()
    assert (parse({**alpaca, "thinking": "t"}).unread, parse(alpaca).unread) == (("thinking",), ())
    assert parse({**chat, "rules": "s"}, system_feature="rules").unread == ()
    assert parse({"text": "t", "reasoning": "r", "system": "s", "image": "i"}).unread == ("image",)
    (warning,) = parse_example(
        {**chat, "reasoning": "r"}, ColumnNames(), source="f", line=1
    ).warnings
    assert '"reasoning"' in warning
