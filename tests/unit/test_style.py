"""Data sets in another style: what is changed, counted, left out and written; and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from allhands.cli.style import style
from allhands.data.records import ColumnNames
from allhands.data.shapes import parse_example
from allhands.data.sources import find_sources
from allhands.data.style import StyleOptions, StyleReport, style_data
from allhands.data.styles import parse_rules
from allhands.errors import AllhandsError, ConfigError, DataError

SMALL = """
name: small
words: {hello: ahoy, you: ye, friend: [matey, shipmate], is: be}
phrases: {"thank you": thank ye, "it is": "'tis"}
suffixes: [{suffix: ing, to: "in'", stem: "[a-z]*[aeiou][a-z]*"}]
"""

CHAT = {
    "messages": [
        {"role": "system", "content": "hello you"},
        {"role": "user", "content": "hello, is it you?"},
        {
            "role": "assistant",
            "content": "It is you.",
            "tool_calls": [{"type": "function", "function": {"name": "hello", "arguments": {"you": "is"}}}],
        },
        {"role": "tool", "content": "hello you", "name": "hello"},
        {"role": "assistant", "content": "Thank you, friend."},
    ],
    "tools": [{"type": "function", "function": {"name": "hello", "description": "hello you"}}],
}
COMPLETION = {"prompt": "hello you", "completion": "hello you"}
ALPACA = {"instruction": "hello you", "input": "is it", "output": "running `you`"}
SHAREGPT = {"conversations": [{"from": "human", "value": "is you"}, {"from": "gpt", "value": "you is"}]}
TEXT = {"text": "hello you"}
PREFERENCE = {"prompt": "hello", "chosen": "you", "rejected": "me"}


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(source: Path, out: Path, yaml: str = SMALL, **options: Any) -> StyleReport:
    return style_data(parse_rules(yaml, "r.yaml"), find_sources([str(source)]), out, StyleOptions(**options))


def canonical(row: Any) -> Any:
    return parse_example(row, ColumnNames(), source="x", line=1).to_json()


def test_only_answers_change_and_everything_is_counted(tmp_path: Path) -> None:
    write(tmp_path / "in" / "train.jsonl", CHAT, COMPLETION, ALPACA, SHAREGPT, TEXT, PREFERENCE, "{broken")
    write(
        tmp_path / "in" / "valid.jsonl", {"messages": [*CHAT["messages"][1:2], {"role": "assistant", "content": "No."}]}
    )
    report = run(tmp_path / "in", tmp_path / "out")
    rows = read(tmp_path / "out" / "train.jsonl")
    chat, alpaca, sharegpt = canonical(CHAT), canonical(ALPACA), canonical(SHAREGPT)
    chat["messages"][2]["content"] = "'Tis ye."
    assert rows[0]["messages"][4].pop("content") in ("Thank ye, matey.", "Thank ye, shipmate.")
    del chat["messages"][4]["content"]
    assert rows[0] == chat
    assert rows[1] == {"prompt": "hello you", "completion": "ahoy ye"}
    assert json.dumps(rows[2]) == json.dumps(alpaca).replace("running", "runnin'")
    assert json.dumps(rows[3]) == json.dumps(sharegpt).replace("you is", "ye be")
    assert len(read(tmp_path / "out" / "valid.jsonl")) == 1
    assert report.records == {"train": 4, "valid": 1}
    assert (report.answers, report.changed, report.num_left_out, report.unmixed) == (6, 5, 3, 0)
    # It is you / Thank you friend / hello you / running you / you is / No
    assert (report.words, report.words_changed) == (13, 3 + 3 + 2 + 1 + 2)
    assert report.rules == {
        "it is -> 'tis": 1,
        "you -> ye": 3,
        "thank you -> thank ye": 1,
        "friend -> matey": 1,
        "hello -> ahoy": 1,
        "-ing -> -in'": 1,
        "is -> be": 1,
    }
    left = read(tmp_path / "out" / "left-out.jsonl")
    assert [row["where"].rpartition("/")[2] for row in left] == [f"train.jsonl:{line}" for line in (5, 6, 7)]
    assert sum(reason.count for reason in report.reasons) == 3
    assert all(sample.before != sample.after for sample in report.samples)


def test_mix_keeps_its_share_of_the_records_as_they_are(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {number}", "completion": "hello you"} for number in range(1000)]
    source = write(tmp_path / "train.jsonl", *rows)
    first = run(source, tmp_path / "one.jsonl", mix=0.2)
    run(source, tmp_path / "two.jsonl", mix=0.2)
    done = read(tmp_path / "one.jsonl")
    kept = sum(row["completion"] == "hello you" for row in done)
    assert kept == first.unmixed == 1000 - first.answers
    assert abs(kept - 200) < 5 * (1000 * 0.2 * 0.8) ** 0.5
    assert done == read(tmp_path / "two.jsonl")
    run(source, tmp_path / "three.jsonl", mix=0.2, seed=1)
    assert done != read(tmp_path / "three.jsonl")


def test_system_asks_for_the_style_in_styled_records_only(tmp_path: Path) -> None:
    rows = [COMPLETION | {"prompt": f"{number}"} for number in range(40)]
    source = write(tmp_path / "train.jsonl", CHAT, *rows)
    run(source, tmp_path / "out.jsonl", system="Be a pirate.", mix=0.5, seed=2)
    for before, row in zip([CHAT, *rows], read(tmp_path / "out.jsonl"), strict=True):
        messages = row.get("messages")
        if row == canonical(before):
            continue
        assert messages[0]["role"] == "system"
        assert messages[0]["content"] == ("hello you\n\nBe a pirate." if len(messages) > 3 else "Be a pirate.")
        if len(messages) == 3:
            assert [m["content"] for m in messages[1:]] == [before["prompt"], "ahoy ye"]
    assert 5 < sum("messages" in row for row in read(tmp_path / "out.jsonl")) < 36


@pytest.mark.parametrize(
    ("rows", "options", "kind", "message"),
    [
        ([COMPLETION, TEXT], {"strict": True}, DataError, "a text has no answer"),
        ([TEXT, PREFERENCE], {}, DataError, "none of the 2 rows"),
        ([COMPLETION], {"mix": 1.0}, ConfigError, "out of bounds"),
        ([COMPLETION], {"system": " "}, ConfigError, "empty"),
    ],
)
@pytest.mark.parametrize("out", ["out", "out.jsonl"])
def test_whole_or_absent(
    tmp_path: Path, rows: list[Any], options: dict[str, Any], kind: type[AllhandsError], message: str, out: str
) -> None:
    source = write(tmp_path / "train.jsonl", *rows)
    with pytest.raises(kind, match=message):
        run(source, tmp_path / out, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    source = write(tmp_path / "in" / "train.jsonl", COMPLETION)
    for out in (source, tmp_path / "in"):
        with pytest.raises(ConfigError, match="source"):
            run(source, out, force=True)
    for out in (tmp_path / "out", tmp_path / "out.jsonl"):
        run(source, out)
        with pytest.raises(ConfigError, match=r"exists|not empty"):
            run(source, out)
        run(source, out, force=True)
    write(tmp_path / "in" / "test.jsonl", COMPLETION)
    with pytest.raises(ConfigError, match="one file cannot hold train and test"):
        run(tmp_path / "in", tmp_path / "both.jsonl")


# --- the command -------------------------------------------------------------------------------------


def command(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(style)
    return CliRunner().invoke(app, arguments)


def test_the_command_says_what_it_did(tmp_path: Path) -> None:
    source = write(tmp_path / "train.jsonl", {"prompt": "q", "completion": "You and your friend."}, TEXT)
    done = command("pirate", str(source), "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.exception
    assert "answers changed: 1 of 1; words changed: 4 of 4 (100.0%)" in done.output
    assert re.search(r"pirate words: 0\.0% before, \d\d+\.\d% after", done.output)
    assert "1 x a text has no answer to restyle" in done.output


def test_rules_can_be_shown_saved_edited_checked_and_tried(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    assert command("pirate", "--save-rules", str(mine)).exit_code == 0
    assert command("--show", "pirate").output == mine.read_text(encoding="utf-8")
    mine.write_text(mine.read_text(encoding="utf-8").replace("hello: ahoy", "hello: oi"), encoding="utf-8")
    assert command(str(mine), "--try", "Hello!").output == "Oi!\n"
    failed = command(str(mine), "--check")
    assert isinstance(failed.exception, ConfigError)
    assert "got:    Oi, me matey! How be ye?" in failed.output
    assert "examples as they should be" in command("pirate", "--check").output


@pytest.mark.parametrize("arguments", [("pirate",), ("pirate", "x.jsonl"), ("pirate", "--out", "x"), ("nothing",)])
def test_a_command_that_cannot_work_says_so(arguments: tuple[str, ...]) -> None:
    error = command(*arguments).exception
    assert isinstance(error, ConfigError)
    assert error.hint
