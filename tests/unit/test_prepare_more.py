"""``allhands data prepare``: sizes that cannot be, advice that can be pasted, and tables that are
not quite tables.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rows import report_of, rows_of, sentence, texts, write
from test_cli_prepare import invoke

from allhands.data.outcome import Reasons, as_flags
from allhands.data.rows import ReadOptions, RowProblem
from allhands.data.tables import rows_of_table, separator_of


def run(folder: Path, rows: list[Any], *flags: str) -> tuple[int, str]:
    """Exit code and screen, on one line, of rows in a.jsonl prepared into ``folder/out``."""
    code, screen = invoke(
        *write(folder / "raw", {"a.jsonl": rows}), "--out", str(folder / "out"), *flags
    )
    return code, " ".join(screen.split())


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--valid", "1000"),
            "--valid 1000: valid is 1000 of 60 rows: nothing is left to train on",
        ),
        (("--test", "60"), "--test 60: test is 60 of 60 rows: nothing is left to train on"),
        (
            ("--valid", "50", "--test", "10"),
            "valid and test together are 60 of 60 rows: nothing is left to train on",
        ),
        (
            ("--valid", "0.9", "--test", "6"),
            "valid and test together are 60 of 60 rows: nothing is left to train on",
        ),
        (
            ("--valid", "0.7", "--test", "0.3"),
            "valid and test together are 1 of the rows: nothing is left to train on",
        ),
    ],
)
def test_sizes_that_leave_nothing_to_train_on_are_refused(
    tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    code, screen = run(tmp_path, texts(range(60)), *flags)
    assert (code, words in screen, "what to do: ask for fewer rows" in screen) == (2, True, True), (
        screen
    )
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_fractions_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    assert run(tmp_path, ["{"], "--valid", "0.5", "--test", "0.5")[0] == 2
    assert run(tmp_path, ["{"], "--valid", "0.5", "--test", "0.4")[0] == 3


def test_rows_that_the_sources_hold_out_are_not_there_to_take(tmp_path: Path) -> None:
    names = write(tmp_path, {"train.jsonl": texts(range(10)), "valid.jsonl": texts(range(10, 30))})
    code, screen = invoke(*names, "--out", str(tmp_path / "out"), "--test", "10")
    assert (code, "test is 10 of 10 rows that the sources do not hold out" in screen) == (
        2,
        True,
    ), screen
    assert invoke(*names, "--out", str(tmp_path / "out"), "--test", "9")[0] == 0


def test_what_was_asked_for_comes_before_what_is_usual(tmp_path: Path) -> None:
    code, screen = run(tmp_path, texts(range(60)), "--valid", "59")
    assert code == 0
    assert report_of(tmp_path / "out")["kept"] == {"train": 1, "valid": 59, "test": 0}
    assert "test has 0 rows where 3 were wanted: there are too few rows" in screen
    assert "59 rows are kept for valid (--valid; seed 0)" in screen
    assert "5%" not in screen


@pytest.mark.parametrize(("count", "kept"), [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1])])
def test_tiny_sets_go_on_and_the_reason_is_true(
    tmp_path: Path, count: int, kept: list[int]
) -> None:
    code, screen = run(tmp_path, texts(range(count)))
    assert code == 0
    assert list(report_of(tmp_path / "out")["kept"].values()) == kept
    assert screen.count("where 1 were wanted: there are too few rows") == kept.count(0)
    assert ("5% of the rows, at least one, are kept for valid (" in screen) == (kept[1] > 0)
    assert ("5% of the rows, at least one, are kept for test (" in screen) == (kept[2] > 0)
    assert "belong together" not in screen


def test_where_rows_belong_together_that_is_the_reason(tmp_path: Path) -> None:
    near = [{"text": sentence(1, 40)}, {"text": sentence(1, 40) + " indeed"}]
    _, screen = run(tmp_path, near)
    assert screen.count("rows that belong together stay together") == 2
    assert "too few" not in screen


def test_one_size_that_was_asked_for_is_said(tmp_path: Path) -> None:
    _, screen = run(tmp_path, texts(range(60)), "--valid", "0.1")
    assert "0.1 of the rows are kept for valid (--valid; seed 0)" in screen
    assert "5% of the rows, at least one, are kept for test (--test; seed 0)" in screen
    assert "are valid" not in screen


# --- columns --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (
            'name the columns: prompt_feature: "q", completion_feature: "the answer"',
            "name the columns: --column prompt=q --column 'completion=the answer'",
        ),
        (
            'name the columns: prompt_feature: "a", completion_feature: "b"; join "input" to it first',
            'name the columns: --column prompt=a --column completion=b; join "input" to it first',
        ),
        ('name the column: text_feature: "body"', "name the column: --column text=body"),
        (
            'the nearest: prompt_feature: "meta.q", completion_feature: "an a"',
            "the nearest: --column prompt=meta.q --column 'completion=an a'",
        ),
        (
            "other names: prompt_feature, text_feature",
            "other names: --column prompt=NAME, --column text=NAME",
        ),
        ("delete the record", "delete the record"),
    ],
)
def test_advice_about_columns_is_in_flags(hint: str, expected: str) -> None:
    assert as_flags(hint) == expected


def test_the_advice_on_the_screen_works_when_pasted(tmp_path: Path) -> None:
    rows = [{"text": "fine"}, {"question": sentence(1), "answer": "x", "context": "y"}]
    flags = ["--column", "prompt=question", "--column", "completion=answer"]
    _, screen = run(tmp_path, rows)
    assert " ".join(flags) in screen
    assert "_feature" not in screen
    (left,) = rows_of(tmp_path / "out" / "left-out.jsonl")
    assert left["hint"].startswith("name the columns: " + " ".join(flags))
    code, screen = run(tmp_path, rows, "--strict", "--force")
    assert (code, " ".join(flags) in screen) == (3, True)
    code, screen = run(tmp_path, rows, "--force", *flags)
    assert (code, "left out:" in screen) == (0, False)


def test_a_wrong_column_is_named_as_it_was_typed(tmp_path: Path) -> None:
    code, screen = run(tmp_path, texts(range(3)), "--column", "text=nope")
    assert (code, '--column text=nope: no row has a column "nope"' in screen) == (2, True), screen
    code, screen = run(tmp_path, texts(range(3)), "--text-feature", "nope")
    assert (code, "--text-feature: no row" in screen) == (2, True), screen


@pytest.mark.parametrize(
    "other", [("--prompt-feature", "q"), ("--prompt-feature", "text"), ("--column", "prompt=text")]
)
def test_a_part_that_is_mapped_twice_is_refused(tmp_path: Path, other: tuple[str, str]) -> None:
    code, screen = run(tmp_path, texts(range(3)), "--column", "prompt=q", *other)
    assert code == 2
    assert "--column prompt=q" in screen
    assert " ".join(other) in screen


def test_the_same_mapping_twice_is_one(tmp_path: Path) -> None:
    assert run(tmp_path, [{"body": sentence(1)}], *["--column", "text=body"] * 2)[0] == 0


# --- tables ---------------------------------------------------------------------------------------


def table(content: str, delimiter: str = ",") -> list[Any]:
    data = content.encode()
    return list(
        rows_of_table(
            io.BytesIO(data), "f.csv", ReadOptions(), separator_of(data, delimiter, whole=True)
        )
    )


@pytest.mark.parametrize(
    ("content", "delimiter", "rows"),
    [
        ("q;a\n1;2\n3,4;5\n6;7\n", ",", [("1", "2"), ("3,4", "5"), ("6", "7")]),
        ('"q";"a"\n"1";"2\nb;c"\n', ",", [("1", "2\nb;c")]),
        ("\ufeffq;a\r\n1;2\r\n", ",", [("1", "2")]),
        ("q\ta\n1\t2, or 3\n", ",", [("1", "2, or 3")]),
        ("q|a\n1|2;3\n", ",", [("1", "2;3")]),
        ("q,a\n1,2\t\n", "\t", [("1", "2\t")]),
        ("q;a\n1;2\n", "\t", [("1", "2")]),
        ("sep=;\nq;a\n1;2\n", ",", [("1", "2")]),
        ('\ufeff"sep=|"\r\nq|a\n1|2\n', ",", [("1", "2")]),
    ],
)
def test_another_separator_that_is_certain_is_used(
    content: str, delimiter: str, rows: list[tuple[str, str]]
) -> None:
    found = table(content, delimiter)
    assert [tuple(row.value.values()) for row in found] == rows
    assert all(list(row.value) == ["q", "a"] for row in found)


@pytest.mark.parametrize(
    "content",
    ["q;a\n1;2\n3;4;5\n", '"q, or so";a\n1;"2\n', "q;a|b\n1;2|3\n", "q;a\n", "sep=~\nq~a\n1~2\n"],
)
def test_a_separator_that_is_not_certain_is_refused_once(content: str) -> None:
    (problem,) = table(content)
    assert isinstance(problem, RowProblem)
    assert "separator" in problem.message


@pytest.mark.parametrize("content", ['"q;a"\n1\n', "q;a,b\n1,2\n"])
def test_semicolons_in_a_name_are_no_separators(content: str) -> None:
    (row,) = table(content)
    assert not isinstance(row, RowProblem)
    assert "q;a" in row.value


@pytest.mark.parametrize("content", ["q,a\n", "q,a", "text\n\n\n"])
def test_a_header_without_rows_is_said(content: str) -> None:
    (problem,) = table(content)
    assert (problem.where, problem.message) == ("f.csv", "the file has a header and no rows")
    assert table("q,a\n1\n")[0].message.startswith("ragged row")


def test_what_is_said_of_ragged_rows_holds_for_all(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,b\nx,y\n1\n1,2,3\n1,2,3\n", encoding="utf-8")
    code, screen = invoke(str(tmp_path / "a.csv"), "--out", str(tmp_path / "out"))
    assert (code, "3 x ragged row: … fields where the header has …" in screen) == (0, True), screen
    left = rows_of(tmp_path / "out" / "left-out.jsonl")
    assert [entry["reason"].split()[2] for entry in left] == ["1", "3", "3"]


def test_reasons_are_told_without_numbers_that_differ() -> None:
    reasons = Reasons()
    for message in (
        "byte 0xe9 at 7 of 9, near 'x'",
        "byte 0xe9 at 8 of 9, near 'y'",
        "byte 0xe9 at 7 of 9, near 'x'",
    ):
        reasons.add(message, None, "f:1")
    reasons.add("1,234 bytes", None, "f:1")
    assert [(reason.message, reason.count) for reason in reasons.listed()] == [
        ("byte … at … of …", 3),
        ("1,234 bytes", 1),
    ]


# --- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "told"), [(2, True), (3, True), (4, True), (20, False)])
def test_few_texts_of_which_many_are_held_out(tmp_path: Path, count: int, told: bool) -> None:
    code, screen = run(tmp_path, texts(range(count)))
    assert (code, "never trained on" in screen) == (0, told), screen
    assert not told or "--valid 0 --test 0 trains on all" in screen
    code, screen = run(tmp_path, texts(range(count)), "--valid", "0", "--test", "0", "--force")
    assert (code, "never trained on" in screen) == (0, False), screen
    assert len((tmp_path / "out" / "train.jsonl").read_text().splitlines()) == count


@pytest.mark.parametrize(("beside", "told"), [("context", True), ("passage", True), ("url", False)])
def test_words_beside_a_question_that_are_left_out_are_told(
    tmp_path: Path, beside: str, told: bool
) -> None:
    rows = [{"question": sentence(n), beside: sentence(n + 40), "answer": "x"} for n in range(9)]
    code, screen = run(
        tmp_path, rows, "--column", "prompt=question", "--column", "completion=answer"
    )
    assert (code, f'"{beside}" is not used' in screen) == (0, told)
    code, screen = run(tmp_path, rows, "--force")
    assert (code, f'join "{beside}" to it first' in " ".join(screen.split())) == (3, told)
