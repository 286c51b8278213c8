"""Other people's shapes of data: what they become, what is refused, what is only warned of."""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import qwen25

from allhands.data import shapes
from allhands.data.records import ColumnNames, Record, parse_record
from allhands.data.render import Renderer
from allhands.data.shapes import Example, parse_example, remedy_of_warning
from allhands.errors import DataError

DATA = Path(
    os.environ.get("ALLHANDS_TEST_DATA", Path(__file__).parents[2].parent / "shared" / "data")
)
DEFAULT = ColumnNames()


def parse(row: Any, **columns: str) -> Example:
    return parse_example(row, ColumnNames(**columns), source="f", line=7)


def rows_of(name: str) -> list[Any]:
    path = DATA / "formats" / name
    if not path.exists():
        pytest.skip("no test data: set ALLHANDS_TEST_DATA")
    text = path.read_text()
    value = (
        [json.loads(line) for line in text.splitlines()]
        if path.suffix == ".jsonl"
        else json.loads(text)
    )
    return value if isinstance(value, list) else [value]


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def user(content: str = "Hi") -> dict[str, Any]:
    return say("user", content)


def answer(content: str = "Ahoy!", **more: Any) -> dict[str, Any]:
    return say("assistant", content, **more)


def human(value: Any = "Hi") -> dict[str, Any]:
    return {"from": "human", "value": value}


def gpt(value: Any = "Ahoy!") -> dict[str, Any]:
    return {"from": "gpt", "value": value}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# Real files


@pytest.mark.parametrize(
    ("name", "shape", "kind", "count"),
    [
        ("alpaca.json", "alpaca", "completion", 2),
        ("alpaca_en_demo.json", "alpaca", "completion", 999),
        ("conversation.json", "sharegpt", "chat", 1),
        ("dpo_en_demo.json", "preference", None, 300),
        ("glaive_toolcall_en_demo.json", "sharegpt", "chat", 300),
        ("kto_en_demo.json", "rated", None, 300),
        ("v1_sft_demo.jsonl", "chat", "chat", 500),
    ],
)
def test_real_files(name: str, shape: str, kind: str | None, count: int) -> None:
    examples = [parse(row) for row in rows_of(name)]
    assert Counter(example.shape for example in examples) == {shape: count}
    assert {example.record.kind if example.record else None for example in examples} == {kind}
    assert {example.preference is None for example in examples} == {kind is not None}
    assert {example.warnings for example in examples} == {()}
    for example in examples:
        again = parse(json.loads(json.dumps(example.to_json())))
        assert (again.record, again.preference) == (example.record, example.preference)


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("conversation.missingturns.json", r"conversations\[1\] is an empty answer", "delete"),
        ("conversation.tokenized.json", "input_ids", "already tokenized"),
        ("conversation.tokenized_llama2chat.json", "input_ids", "already tokenized"),
    ],
)
def test_real_files_that_are_refused(name: str, message: str, hint: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        parse(rows_of(name)[0])
    assert hint in (caught.value.hint or "")


def test_real_alpaca() -> None:
    rows = rows_of("alpaca_en_demo.json")
    made = [parse(row).to_json() for row in rows]
    for row, one in zip(rows, made, strict=True):
        question = row["instruction"] + ("\n\n" + row["input"] if row["input"] else "")
        assert one == {"prompt": question, "completion": row["output"]}
    assert (
        made[-1]["prompt"]
        == "Paraphrase the sentence to remove the cliche.\n\nTime waits for no one."
    )
    assert made[0]["prompt"] == "Describe a process of making crepes."


def test_real_sharegpt() -> None:
    (row,) = rows_of("conversation.json")
    messages = parse(row).to_json()["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 6
    assert [m["content"] for m in messages] == [m["value"] for m in row["conversations"]]


def test_real_tool_calls() -> None:
    roles = {
        "human": "user",
        "gpt": "assistant",
        "function_call": "assistant",
        "observation": "tool",
    }
    num_calls = num_with_tools = 0
    for row in rows_of("glaive_toolcall_en_demo.json"):
        example = parse(row)
        assert example.record is not None
        assert (example.record.tools or []) == json.loads(row["tools"])
        num_with_tools += example.record.tools is not None
        for given_message, message in zip(row["conversations"], example.record.turns, strict=True):
            assert message["role"] == roles[given_message["from"]]
            if given_message["from"] == "function_call":
                assert message == answer(
                    "",
                    tool_calls=[
                        {"type": "function", "function": json.loads(given_message["value"])}
                    ],
                )
                num_calls += 1
            else:
                assert message["content"] == given_message["value"]
    assert num_calls == 211
    assert num_with_tools == sum(
        bool(json.loads(row["tools"])) for row in rows_of("glaive_toolcall_en_demo.json")
    )
    first = parse(rows_of("glaive_toolcall_en_demo.json")[0])
    arguments = {"ingredients": ["chicken", "bell peppers", "rice"]}
    assert first.to_json()["messages"][3] == answer(
        "", tool_calls=[call("search_recipes", arguments)]
    )
    assert first.to_json()["tools"][0]["name"] == "search_recipes"


def test_real_preferences() -> None:
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    for row in rows_of("dpo_en_demo.json"):
        assert parse(row).preference == {
            "prompt": [say(roles[m["from"]], m["value"]) for m in row["conversations"]],
            "chosen": [answer(row["chosen"]["value"])],
            "rejected": [answer(row["rejected"]["value"])],
        }


def test_real_ratings_never_become_training_data() -> None:
    rows = rows_of("kto_en_demo.json")
    for row in rows:
        *prompt, last = [say(m["role"], m["content"]) for m in row["messages"]]
        assert parse(row).preference == {
            "prompt": prompt,
            "completion": [last],
            "label": row["label"],
        }
        with pytest.raises(DataError, match="rated answers"):
            parse_record(row, DEFAULT, source="f", line=1)
    assert Counter(row["label"] for row in rows)[False] > 100


# Training data


def test_shapes_of_mlx_lm() -> None:
    chat = {"messages": [user(), answer()]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    for row, shape in (
        (chat, "chat"),
        ({**chat, "tools": tools}, "chat with tools"),
        ({"messages": [user(), answer("", tool_calls=[call("f", {})])]}, "chat with tools"),
        ({"prompt": "p", "completion": "c"}, "completion"),
        ({"prompt": "p", "completion": "c", "tools": tools}, "completion"),
        ({"text": "t"}, "text"),
    ):
        example = parse(row)
        assert (example.shape, example.to_json(), example.warnings) == (shape, row, ())
        assert example.record == parse_record(row, DEFAULT, source="f", line=7)
        assert (example.record.source, example.record.line) == ("f", 7)


def test_alpaca_with_history_or_system_is_a_chat() -> None:
    row = {
        "instruction": "Three?",
        "input": "",
        "output": "3",
        "history": [["One?", "1"], ["Two?", "2"]],
    }
    before = [user("One?"), answer("1"), user("Two?"), answer("2")]
    assert parse(row).to_json() == {"messages": [*before, user("Three?"), answer("3")]}
    row["system"] = "Count."
    assert parse(row).to_json() == {
        "messages": [say("system", "Count."), *before, user("Three?"), answer("3")]
    }
    plain = {"prompt": "Three?", "completion": "3"}
    assert parse({**row, "history": [], "system": " "}).to_json() == plain
    assert parse({**row, "history": None, "system": None, "input": None}).to_json() == plain
    tools = [{"name": "f"}]
    assert parse({**row, "history": "", "system": "", "tools": tools}).to_json() == {
        **plain,
        "tools": tools,
    }


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"history": "x"}, '"history" must be a list of pairs'),
        ({"history": ["ab"]}, '"history" must be a list of pairs'),
        ({"history": [["a"]]}, '"history" must be a list of pairs'),
        ({"history": [["a", " "]]}, r"history\[0\]\[1\] is an empty answer"),
        ({"history": [[1, "b"]]}, r"the content of history\[0\]\[0\] is a number"),
        ({"system": 1}, '"system" is a number'),
        ({"input": 1}, '"input" is a number'),
        ({"output": ["a", "b"]}, '"output" is a list'),
        ({"output": None}, '"output" is null'),
        ({"output": ""}, '"output" is empty'),
        ({"instruction": {"a": 1}}, '"instruction" is an object'),
        ({"tools": 1}, '"tools" must be a list'),
    ],
)
def test_broken_alpaca(more: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        parse({"instruction": "i", "output": "o", **more})
    assert (caught.value.where, bool(caught.value.hint)) == ("f:7", True)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *[(name, "user") for name in ("human", "user", "Human")],
        *[(name, "assistant") for name in ("gpt", "assistant", "model", "chatgpt", "bot")],
        ("system", "system"),
        *[(name, "tool") for name in ("observation", "tool", "function_response")],
    ],
)
def test_roles_of_sharegpt(name: str, role: str) -> None:
    for row in (
        {"conversations": [human(), gpt(), {"from": name, "value": "x"}]},
        {"conversation": [user(), answer(), say(name, "x")]},
        {"messages": [human(), gpt(), {"from": name, "value": "x"}]},
    ):
        example = parse(row)
        assert example.shape == "sharegpt"
        assert example.to_json() == {"messages": [user(), answer(), say(role, "x")]}


def test_sharegpt_keeps_other_keys_and_takes_the_system_column() -> None:
    row = {
        "conversations": [human(), {**gpt(), "weight": 0.5, "note": None}],
        "system": "Be brief.",
    }
    messages = [say("system", "Be brief."), user(), answer(weight=0.5)]
    assert parse(row).to_json() == {"messages": messages}
    # The same once more in the conversation is no second one.
    row["conversations"].insert(0, {"from": "system", "value": "Be brief."})
    example = parse(row)
    assert (example.to_json(), example.warnings) == ({"messages": messages}, ())
    row["system"] = "Be long."
    assert parse(row).warnings == (shapes.TWO_SYSTEM,)
    # Tables date their messages.
    row = {"messages": [user(), {**answer(), "at": datetime(2024, 5, 1, 12, 30)}]}
    assert parse(row).to_json()["messages"][1] == answer(at="2024-05-01T12:30:00")
    with pytest.raises(DataError) as caught:
        parse({"messages": [user(), {**answer(), "at": b"x"}]})
    assert caught.value.code == "field-of-wrong-type"
    # Who has role and content may have any other key.
    row = {"messages": [{**user(), "from": "Ann"}, answer()]}
    assert parse(row).to_json() == row


def test_function_calls_of_sharegpt() -> None:
    one, two = {"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": '{"y": [2]}'}
    calls = [call("f", {"x": 1}), call("g", {"y": [2]}), call("h", {})]
    for value in (
        [one, two, {"name": "h"}],
        [call("f", {"x": 1}), two, {"name": "h", "arguments": None}],
    ):
        for written in (value, json.dumps(value)):
            turns = [
                human(),
                {"from": "function_call", "value": written},
                {"from": "observation", "value": "4"},
                gpt(),
            ]
            messages = parse({"conversations": turns}).to_json()["messages"]
            assert messages == [user(), answer("", tool_calls=calls), say("tool", "4"), answer()]
    single = parse(
        {"conversations": [human(), {"from": "function_call", "value": json.dumps(one)}]}
    )
    assert single.to_json()["messages"][1]["tool_calls"] == calls[:1]
    assert single.warnings == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("f(x)", "is a string that is not JSON"),
        ("[" * 100_000, "is a string that is not JSON"),
        ("[]", "is a list without a call"),
        ("3", "is a number without a call"),
        (None, "is null or missing without a call"),
        ('["f"]', "is a list without a call"),
        ('{"arguments": {}}', "tool call 1 has no name"),
        ('{"name": " "}', "tool call 1 has no name"),
        ('[{"name": "f"}, {"name": 3}]', "tool call 2 has no name"),
        ('{"name": "f", "arguments": [1]}', "the arguments of the call are a list"),
        (
            '{"name": "f", "arguments": "x"}',
            "the arguments of the call is a string that is not JSON",
        ),
        ('{"name": "f", "arguments": {"x": NaN}}', "holds something that JSON cannot write"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "half a surrogate pair"),
    ],
)
def test_broken_function_calls(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        parse({"conversations": [human(), {"from": "function_call", "value": value}, gpt()]})
    assert caught.value.message.startswith("conversations[1]")
    assert (caught.value.where, bool(caught.value.hint)) == ("f:7", True)


# Preferences and ratings

PAIR = {"prompt": [user()], "chosen": [answer("Ahoy!")], "rejected": [answer("Hello.")]}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "Ahoy!", "rejected": "Hello."},
        {"prompt": [user()], "chosen": [answer("Ahoy!")], "rejected": [answer("Hello.")]},
        {"prompt": "Hi", "chosen": answer("Ahoy!"), "rejected": gpt("Hello.")},
        {"conversations": [human()], "chosen": gpt("Ahoy!"), "rejected": gpt("Hello.")},
        {"messages": [user()], "chosen": answer("Ahoy!"), "rejected": answer("Hello.")},
        {"messages": [human()], "chosen": "Ahoy!", "rejected": "Hello."},
        {"instruction": "Hi", "input": "", "chosen": "Ahoy!", "rejected": "Hello."},
        {"chosen": [user(), answer("Ahoy!")], "rejected": [user(), answer("Hello.")]},
        {"prompt": "Hi", "chosen": [human(), gpt("Ahoy!")], "rejected": [human(), gpt("Hello.")]},
    ],
)
def test_preferences(row: dict[str, Any]) -> None:
    example = parse(row)
    assert (example.shape, example.record, example.preference) == ("preference", None, PAIR)
    assert example.warnings == ()
    assert example.texts() == "Hi\nAhoy!\nHello."


def test_preferences_split_where_the_answers_begin_to_differ() -> None:
    head = [say("system", "s"), user("1"), answer("a"), user("2")]
    row = {"chosen": [*head, answer("b")], "rejected": [*head, answer("c"), user("3"), answer("d")]}
    found = parse(row).preference
    assert found == {"prompt": head, "chosen": [answer("b")], "rejected": row["rejected"][4:]}
    # One ends within what both share: it goes on from the last question that both answer.
    row = {
        "chosen": [user("1"), answer("a"), user("2"), answer("b")],
        "rejected": [user("1"), answer("a")],
    }
    found = parse(row).preference
    assert found == {"prompt": [user("1")], "chosen": row["chosen"][1:], "rejected": [answer("a")]}


def test_preferences_with_more_columns() -> None:
    row = {
        "prompt": "Hi",
        "chosen": "Ahoy!",
        "rejected": "Hello.",
        "system": "s",
        "tools": '[{"name": "f"}]',
    }
    tools = [{"name": "f"}]
    assert parse(row).preference == {**PAIR, "prompt": [say("system", "s"), user()], "tools": tools}
    row = {"q": "Hi", "good": "Ahoy!", "bad": "Hello.", "text": "t"}
    mapped = parse(row, prompt_feature="q", chosen_feature="good", rejected_feature="bad")
    assert mapped.preference == PAIR
    whole = {
        "prompt": "Bye",
        "chosen": [user(), answer("Ahoy!")],
        "rejected": [user(), answer("Hello.")],
    }
    assert (parse(whole).preference, parse(whole).warnings) == (PAIR, (shapes.PROMPT_DIFFERS,))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "the same: there is nothing to prefer"),
        ({"prompt": "p", "chosen": "a", "rejected": " "}, r"rejected\[0\] is an empty answer"),
        ({"prompt": "p", "chosen": None, "rejected": "a"}, '"chosen" is null'),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, '"prompt" is a number'),
        ({"prompt": "p", "chosen": 3, "rejected": "b"}, '"chosen" is a number'),
        ({"prompt": "p", "chosen": [user()], "rejected": "b"}, '"chosen" has no assistant message'),
        ({"prompt": [], "chosen": "a", "rejected": "b"}, '"prompt" has no message'),
        ({"chosen": "a", "rejected": "b"}, "have no question before them"),
        (
            {"chosen": [user("1"), answer("a")], "rejected": [user("2"), answer("b")]},
            "do not answer the same question",
        ),
        (
            {
                "prompt": "p",
                "chosen": [answer("a")],
                "rejected": [answer("b"), user(), say("tool", "t")],
            },
            '"rejected" has a tool\'s answer that no assistant message asked for',
        ),
    ],
)
def test_broken_preferences(row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        parse(row)
    assert (caught.value.where, bool(caught.value.hint)) == ("f:7", True)


@pytest.mark.parametrize("label", [True, False])
def test_ratings(label: bool) -> None:
    rated = {"prompt": [user()], "completion": [answer()], "label": label}
    for row in (
        {"messages": [user(), answer()], "label": label},
        {"prompt": "Hi", "completion": "Ahoy!", "label": label},
        {"prompt": "Hi", "completion": "Ahoy!", "label": str(label)},
        {"instruction": "Hi", "output": "Ahoy!", "kto_tag": label},
        {"conversations": [human(), gpt()], "label": "some class", "kto_tag": label},
        rated,
    ):
        example = parse(row)
        assert (example.shape, example.record, example.preference) == ("rated", None, rated)
    for number in (int(label), str(int(label))):
        row = {"prompt": "Hi", "completion": "Ahoy!", "good": number}
        assert parse(row, label_feature="good").preference == rated
    tools = [{"name": "f"}]
    assert parse({**rated, "tools": tools}).preference == {**rated, "tools": tools}


def test_labels_that_rate_nothing() -> None:
    for label in (None, 0, 1, 2.5, "positive", ["x"]):
        example = parse({"messages": [user(), answer()], "label": label})
        assert example.shape == "chat"
        assert bool(example.warnings) == (label is not None)
    assert parse({"text": "t", "label": True}).shape == "text"
    with pytest.raises(DataError) as caught:
        parse({"text": "t", "label": False})
    assert caught.value.code == "preference-not-trainable"
    with pytest.raises(DataError) as caught:
        parse({"messages": [user(), answer(), user()], "label": True})
    assert caught.value.code == "preference-invalid"
    with pytest.raises(DataError) as caught:
        parse({"messages": [answer()], "label": True})
    assert caught.value.code == "preference-invalid"


# Warnings

CALLED = answer("", tool_calls=[call("f", {})])


@pytest.mark.parametrize(
    ("messages", "warnings"),
    [
        ([say("system", "s"), user(), CALLED, say("tool", "4"), answer()], ()),
        ([user(), CALLED], ()),
        ([say("system", "s"), say("developer", "d"), user(), answer()], (shapes.TWO_SYSTEM,)),
        ([user(), say("system", "s"), answer()], (shapes.LATE_SYSTEM,)),
        ([answer(), user(), answer()], (shapes.STARTS_WITH_ANSWER,)),
        ([user(), answer(), user("And?")], (shapes.NO_LAST_ANSWER,)),
        ([user(), CALLED, say("tool", "4")], (shapes.NO_LAST_ANSWER,)),
        ([user(), user(), answer()], (shapes.SAME_ROLE,)),
        ([user(" "), answer()], (shapes.EMPTY_QUESTION,)),
        ([user(), CALLED, user(), answer()], (shapes.UNANSWERED_CALL,)),
        # Calls may be written in the words, as Hermes does.
        (
            [user(), answer("<tool_call>f</tool_call>"), say("tool", "4"), answer()],
            (shapes.UNCALLED_TOOL,),
        ),
        ([user(), answer("", tool_calls=[call("f", "no JSON")])], (shapes.ARGUMENTS_NOT_JSON,)),
        ([user(), answer("", tool_calls=[call("f", '{"x": 1}')])], ()),
        (
            [answer(), answer(), user(), user(), user()],
            (shapes.STARTS_WITH_ANSWER, shapes.NO_LAST_ANSWER, shapes.SAME_ROLE),
        ),
    ],
)
def test_what_is_suspicious_is_kept_and_said(
    messages: list[Any], warnings: tuple[str, ...]
) -> None:
    example = parse({"messages": messages})
    assert example.to_json() == {"messages": messages}
    assert example.warnings == warnings


@pytest.mark.parametrize(
    ("row", "columns", "warning"),
    [
        (
            {"instruction": "i", "output": "o", "text": "t"},
            {},
            "read as text, so its columns of the shape alpaca",
        ),
        (
            {"messages": [user(), answer()], "chosen": "a", "rejected": "b"},
            {},
            "of the shape preference are not used",
        ),
        (
            {"messages": [user(), answer()], "system": "s"},
            {},
            '"system" is not used in the shape chat',
        ),
        ({"text": "t", "tools": [{}]}, {}, '"tools" is not used in the shape text'),
        ({"text": "t", "label": "class 1"}, {}, '"label" is not used'),
        (
            {"prompt": "p", "completion": "c"},
            {"system_feature": "sys"},
            'the mapped column "sys" is not there',
        ),
        (
            {"instruction": "i", "input": "lost", "output": "o"},
            {"prompt_feature": "instruction", "completion_feature": "output"},
            '"input" is not used in the shape completion',
        ),
    ],
)
def test_columns_that_are_not_used_are_named(
    row: Any, columns: dict[str, str], warning: str
) -> None:
    (said,) = parse(row, **columns).warnings
    assert warning in said


def test_all_words_of_an_example() -> None:
    assert parse({"text": "a\nb"}).texts() == "a\nb"
    assert parse({"prompt": "p", "completion": "c"}).texts() == "p\nc"
    row = {
        "messages": [
            user("é"),
            answer("", tool_calls=[call("f", {"x": "ü"}), call("g", "{}")]),
            say("tool", "4"),
        ]
    }
    assert parse({**row, "tools": [{"name": "unsaid"}]}).texts() == 'é\nf {"x": "ü"}\ng {}\n4'


# A real chat template


def test_a_real_template_takes_what_the_shapes_become() -> None:
    tokenizer = qwen25()

    def rendered(record: Record | None, mask_prompt: bool = True) -> tuple[str, str]:
        assert record is not None
        result = Renderer(tokenizer, mask_prompt=mask_prompt, max_seq_length=10_000).render(record)
        return tokenizer.decode(result.tokens), tokenizer.decode(result.tokens[result.mask])

    row = rows_of("alpaca_en_demo.json")[-1]
    assert rendered(parse(row).record)[1] == row["output"] + "<|im_end|>"
    row = rows_of("conversation.json")[0]
    said = [m["value"] for m in row["conversations"] if m["from"] == "gpt"]
    assert rendered(parse(row).record)[1] == "".join(answer + "<|im_end|>" for answer in said)
    text, trained = rendered(parse(rows_of("glaive_toolcall_en_demo.json")[0]).record)
    assert (
        '<tool_call>\n{"name": "search_recipes", "arguments": {"ingredients": ["chicken", '
        in trained
    )
    assert '"description": "Search for recipes based on ingredients"' in text
    assert "<tool_response>" in text.replace(trained, "")
    assert rendered(parse({"text": "Once upon a time"}).record, mask_prompt=False)[0].startswith(
        "Once upon a time"
    )
    for row, key in (
        (rows_of("dpo_en_demo.json")[0], "chosen"),
        (rows_of("kto_en_demo.json")[0], "completion"),
    ):
        found = parse(row).preference or {}
        record = Record("completion", prompt=found["prompt"], completion=found[key])
        assert rendered(record)[1] == found[key][0]["content"] + "<|im_end|>"


def test_an_empty_text_is_an_error_or_a_warning() -> None:
    columns = ColumnNames.from_options({})
    with pytest.raises(DataError, match='"text" is empty'):
        parse_example({"text": " "}, columns, source="f", line=1)
    example = parse_example({"text": " "}, columns, source="f", line=1, empty_texts=True)
    assert example.warnings == ("the text is empty: training leaves it out",)
    assert "nothing is needed" in remedy_of_warning(example.warnings[0])
