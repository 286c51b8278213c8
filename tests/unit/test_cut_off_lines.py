"""Lines of JSON that are cut off anywhere."""

from __future__ import annotations

import io

import pytest

from allhands.data.jsontext import rows_of_lines
from allhands.data.rows import ReadOptions, RowProblem

_ROW = r'{"messages": [{"role": "user", "content": "h\u00e9\n\"x"}], "n": -1.5e+3, "t": true, "z": null}'


def code_of_last(text: str) -> str:
    *_, last = rows_of_lines(io.BytesIO(text.encode()), "train.jsonl", ReadOptions())
    assert isinstance(last, RowProblem)
    return last.code


@pytest.mark.parametrize("end", ["", "\n"])
def test_the_last_line_may_be_cut_off_anywhere(end: str) -> None:
    codes = {at: code_of_last(f"{_ROW}\n{_ROW[:at]}{end}") for at in range(1, len(_ROW))}
    assert {at: _ROW[:at] for at, code in codes.items() if code != "record-cut-off"} == {}


@pytest.mark.parametrize("line", ["{'a': 1}", '{"a": tru}', '{"a": 1} 12', '{"a" 1}', "text"])
def test_a_last_line_with_a_mistake_is_not_called_cut_off(line: str) -> None:
    assert code_of_last(f"{_ROW}\n{line}") == "json-invalid"


def test_a_line_in_the_middle_is_not_called_cut_off() -> None:
    first, _ = rows_of_lines(io.BytesIO(f"{_ROW[:30]}\n{_ROW}\n".encode()), "f", ReadOptions())
    assert isinstance(first, RowProblem)
    assert first.code == "json-invalid"
