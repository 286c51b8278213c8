"""Any JSON at all is an example of one shape or a clear error, and what is written is read as the
same.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_tokenizers import CHATML, THINKING, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from allhands.data.heard import WORDS as UNHEARD
from allhands.data.records import ColumnNames, parse_record
from allhands.data.render import Renderer
from allhands.data.shapes import Example, parse_example
from allhands.errors import AllhandsError, DataError

DEFAULT = ColumnNames()


def example_or_error(
    row: Any, columns: ColumnNames = DEFAULT, *, empty_texts: bool = True
) -> Example | DataError:
    try:
        return parse_example(row, columns, source="f", line=7, empty_texts=empty_texts)
    except DataError as error:
        return error


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


# Half surrogates too: JSON can carry them.
TEXTS = st.text(st.characters(exclude_categories=()), max_size=4) | st.sampled_from(
    ["x", "", " ", "true", "[]", "{}"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3), max_leaves=6
)
ROLES = [
    "system",
    "user",
    "assistant",
    "tool",
    "human",
    "gpt",
    "function_call",
    "observation",
    "nobody",
]
CALLS = st.lists(
    st.fixed_dictionaries({}, optional={"name": TEXTS, "arguments": VALUES, "function": VALUES}),
    max_size=2,
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(ROLES) | VALUES,
        "from": st.sampled_from(ROLES) | VALUES,
        "content": TEXTS | VALUES,
        "value": TEXTS | VALUES,
        **dict.fromkeys(("tool_calls", "function_call", "tool_call"), CALLS | VALUES),
        **dict.fromkeys(
            ("reasoning", "reasoning_content", "thinking", "name", "images", "note"), VALUES
        ),
    },
)
GOOD_MESSAGE = st.builds(
    say, st.sampled_from(["user", "assistant", "tool"]), TEXTS.map(lambda text: text + ".")
)
MESSAGES = st.lists(GOOD_MESSAGE, min_size=1, max_size=4) | st.lists(
    MESSAGE | GOOD_MESSAGE, max_size=3
)
KEYS = [name.removesuffix("_feature") for name in ColumnNames.__dataclass_fields__]
KEYS += [
    "messages",
    "conversations",
    "conversation",
    "kto_tag",
    "input_ids",
    "functions",
    "images",
    "reasoning",
]
PART = (
    st.just("words")
    | TEXTS
    | MESSAGES
    | MESSAGE
    | VALUES
    | st.lists(st.lists(TEXTS, max_size=2), max_size=2)
)
# Rows that are almost right, so that what comes after the first check is met as well.
WORDS = TEXTS.map(lambda text: text + "!") | st.lists(GOOD_MESSAGE, min_size=1, max_size=3)
MORE: dict[str, st.SearchStrategy[Any]] = {
    "label": st.booleans() | TEXTS,
    "system": TEXTS,
    "tools": st.just([{"name": "f"}]) | VALUES,
    "functions": st.just([{"name": "f", "parameters": {"properties": {"x": {}}}}]) | VALUES,
    "history": st.lists(st.lists(TEXTS, min_size=2, max_size=2), max_size=2),
}


def shaped(*keys: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(dict.fromkeys(keys, WORDS), optional=MORE)


ROWS = (
    st.dictionaries(st.sampled_from(KEYS), PART, max_size=6)
    | VALUES
    | shaped("prompt", "completion")
    | shaped("prompt", "chosen", "rejected")
    | shaped("chosen", "rejected")
    | shaped("instruction", "input", "output")
    | shaped("messages")
    | shaped("conversations")
)
COLUMNS = st.just(DEFAULT) | st.builds(
    ColumnNames,
    chat_feature=st.sampled_from(["messages", "conversations", "a.b"]),
    system_feature=st.sampled_from(KEYS),
)


@settings(max_examples=500, deadline=None)
@given(ROWS, COLUMNS)
def test_anything_is_an_example_or_a_data_error(row: Any, columns: ColumnNames) -> None:
    example = example_or_error(row, columns)
    if isinstance(example, DataError):
        assert example.where == "f:7"
        assert example.hint
        str(example).encode()
        with pytest.raises(DataError):
            parse_record(row, columns, source="f", line=7)
        return
    example.texts().encode()
    written = json.dumps(example.to_json(), ensure_ascii=False, allow_nan=False).encode()
    again = example_or_error(json.loads(written))
    assert isinstance(again, Example)
    assert (again.record, again.preference) == (example.record, example.preference)
    assert again.texts() == example.texts()
    # From there on nothing changes any more.
    assert example_or_error(again.to_json()) == again
    blank = example.record is not None and example.record.is_blank
    strict = example_or_error(row, columns, empty_texts=False)
    assert isinstance(strict, DataError) if blank else strict == example
    if example.record is not None:
        assert parse_record(row, columns, source="f", line=7) == example.record
    else:
        with pytest.raises(DataError, match="data prepare"):
            parse_record(row, columns, source="f", line=7)


@settings(max_examples=300, deadline=None)
@given(ROWS)
def test_whatever_is_read_is_rendered_or_refused(row: Any) -> None:
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + CHATML.replace(
        "message['content'] +",
        "message['content'] + message.tool_calls | default('', true) | string +",
    )
    record = getattr(example_or_error(row), "record", None)
    for tokenizer in (tiny(template), tiny(THINKING)):
        for mask in (False, True) if record is not None else ():
            (found,) = Renderer(tokenizer, mask_prompt=mask, max_seq_length=99).render_many(
                [record]
            )
            if isinstance(found, AllhandsError):
                str(found).encode()
                continue
            assert {code for code, _ in found.unheard} <= set(UNHEARD)


@given(st.lists(GOOD_MESSAGE, min_size=1, max_size=6), st.booleans())
def test_sharegpt_is_the_same_conversation(messages: list[dict[str, Any]], tools: bool) -> None:
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    more = {"tools": [{"name": "f"}]} if tools else {}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in messages]
    expected = example_or_error({"messages": messages, **more})
    example = example_or_error({"conversations": turns, **more})
    if isinstance(expected, DataError) or isinstance(example, DataError):
        assert str(example) == str(expected).replace("messages", "conversations")
    else:
        assert (example.record, example.warnings) == (expected.record, expected.warnings)
