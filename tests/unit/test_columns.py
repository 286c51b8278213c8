"""Records whose columns have other names than those that mlx_lm gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import call_allhands

from allhands.data.records import ColumnNames, Record, parse_record
from allhands.errors import DataError


def parse(row: dict[str, Any]) -> Record:
    return parse_record(row, ColumnNames(), source="f.csv", line=1)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "answer": "a"},
        {"Question": "q", "Answer": "a", "id": 7, "topic": "herring in the sea and on the table"},
        {"query": "q", "response": "a", "context": None},
        {"input": "q", "output": "a"},
        {"user": "q", "assistant": "a"},
        {"q": "q", "a": "a", "": 3},
    ],
)
def test_a_question_and_its_answer_by_their_usual_names(row: dict[str, Any]) -> None:
    record = parse(row)
    with pytest.raises(DataError) as caught:
        parse_record(row, ColumnNames(), source="f.jsonl", line=1)
    assert caught.value.code == "record-without-shape"
    assert (record.kind, record.prompt, record.completion) == ("completion", "q", "a")


@pytest.mark.parametrize(
    "more",
    [
        {"context": "In the sea."},
        {"choices": ["a", "b"]},
        {"solution": "another"},
        {"query": "other"},
        {"hint": "b"},
    ],
)
def test_what_stands_beside_a_question_is_not_passed_over(more: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        parse({"question": "q", "answer": "a", **more})
    assert caught.value.code == "record-without-shape"


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ("What is tea?,A drink of leaves.", "prompt,completion"),
        ("A drink of leaves that is hot", "text"),
        ("topic,reply_text", ""),
        ("Full Name,Date of birth", ""),
    ],
)
def test_a_table_without_a_header_is_told_which_one_to_write(
    tmp_path: Path, first: str, told: str
) -> None:
    """And one whose columns only have other names is told how to name them."""
    (tmp_path / "rows.csv").write_text(f"{first}\n{','.join('xy'[: first.count(',') + 1])}\n")
    done = call_allhands("data", "prepare", "rows.csv", "--out", "out", cwd=tmp_path)
    assert done.returncode == 3
    assert ("a line above it" in done.stderr) == bool(told)
    assert f"above it, {told} (" in done.stderr or not told
    assert ("--column" in done.stderr) == (not told)
