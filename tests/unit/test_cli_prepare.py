"""``allhands data prepare`` as people type it: the screen, the flags, the exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import typer
from command_line import call_allhands
from rows import report_of, rows_of, sentence, texts, write
from typer.testing import CliRunner

from allhands.cli.commands import function_of
from allhands.data.heard import words_of
from allhands.errors import AllhandsError


def invoke(*arguments: str) -> tuple[int, str]:
    """Exit code and screen of the command at 80 columns."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command("prepare")(function_of("data.DataPrepare prepare:prepare"))
    result = CliRunner().invoke(
        app, list(arguments), env={"COLUMNS": "80", "TERMINAL_WIDTH": "80", "NO_COLOR": "1"}
    )
    if isinstance(result.exception, AllhandsError):
        return result.exception.exit_code, result.output + str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_screen_says_what_became_of_the_rows(tmp_path: Path) -> None:
    rows = [*texts(range(30)), {"text": sentence(1)}, {"text": ""}, "{"]
    names = write(
        tmp_path / "raw", {"a-file-with-a-name-that-is-far-too-long-for-any-table.jsonl": rows}
    )
    code, screen = invoke(*names, "--out", str(tmp_path / "out"))
    assert code == 0
    for words in (
        "read: 33 rows",
        "kept: 31 rows",
        "1 exact",
        "left out: 2 rows",
        "what to do",
        "text 31",
        "--model",
    ):
        assert words in screen, words
    assert "allhands data check" in screen
    commands = [line for line in screen.splitlines() if line.startswith("  allhands ")]
    assert len(commands) == 2
    assert all(
        len(line) <= 80
        for line in screen.splitlines()
        if line not in commands and str(tmp_path) not in line
    )


def test_columns_on_the_command_line(tmp_path: Path) -> None:
    names = write(
        tmp_path / "raw",
        {"a.jsonl": [{"question": sentence(i), "answer": "x", "b": "y"} for i in range(9)]},
    )
    code, _ = invoke(
        *names,
        "--out",
        str(tmp_path / "1"),
        "--column",
        "prompt=question",
        "--column",
        "completion=answer",
    )
    assert code == 0
    flags = ("--prompt-feature", "question", "--completion-feature", "b")
    code, _ = invoke(*names, "--out", str(tmp_path / "2"), *flags)
    assert code == 0
    assert rows_of(tmp_path / "1" / "train.jsonl")[0]["completion"] == "x"
    assert rows_of(tmp_path / "2" / "train.jsonl")[0]["completion"] == "y"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--column", "prompt"), 2, "--column"),
        (("--column", "prmpt=question"), 2, "parts: prompt"),
        (("--dedupe", "some"), 2, "'off', 'exact', 'near'"),
        (("--valid", "2.5"), 2, "--valid"),
        (("--near-threshold", "7"), 2, "0.5 and 1"),
        (("--max-seq-length", "512"), 2, "--model"),
        ((), 3, "none of the 2 rows"),
    ],
)
def test_wrong_use_and_useless_data_have_their_codes(
    tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    names = write(tmp_path / "raw", {"a.jsonl": [{"colour": "blue"}, "{"]})
    found, screen = invoke(*names, "--out", str(tmp_path / "out"), *arguments)
    assert (found, words in screen) == (code, True), screen
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_what_is_lost_of_a_text_file_is_told_with_the_remedy(
    tmp_path: Path, tiny_model: Path
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(sentence(number) for number in range(40)))
    remedy = "--documents blank-line makes one of each paragraph; or train with --packing"
    short = ["--model", str(tiny_model), "--max-seq-length", "32"]
    for more, rows, told in (([], 1, True), (["--documents", "blank-line"], 40, False)):
        code, screen = invoke(str(book), "--out", str(tmp_path / f"out-{rows}"), *short, *more)
        assert code == 0, screen
        assert report_of(tmp_path / f"out-{rows}")["rows_read"] == rows
        assert (remedy in " ".join(screen.split())) == told


def test_with_a_tokenizer_alone_the_next_step_is_pre_training(
    tmp_path: Path, tiny_model: Path
) -> None:
    alone = tmp_path / "tokenizer"
    alone.mkdir()
    for file in tiny_model.glob("token*"):
        shutil.copy(file, alone)
    (tmp_path / "raw.jsonl").write_text(
        "".join(json.dumps({"text": f"a text of row {n}"}) + "\n" for n in range(20))
    )
    for model, told in (
        (alone, f"allhands pretrain --tokenizer {alone}"),
        (tiny_model, "allhands train --model"),
    ):
        flags = (str(tmp_path / "raw.jsonl"), "--out", str(tmp_path / "out"), "--force")
        code, screen = invoke(*flags, "--model", str(model))
        assert (code, told in screen) == (0, True), screen
        checked = call_allhands("data", "check", tmp_path / "out", "--model", model)
        assert checked.returncode == 0, checked.stderr


def test_tokens_of_a_model(tmp_path: Path, tiny_model: Path, tiny_data: Path) -> None:
    code, screen = invoke(
        str(tiny_data), "--out", str(tmp_path / "out"), "--model", str(tiny_model)
    )
    assert code == 0, screen
    assert report_of(tmp_path / "out")["lengths"]["unit"] == "tokens"
    assert "tokens" in screen


def test_what_the_models_template_leaves_out_is_said(tmp_path: Path, tiny_model: Path) -> None:
    """The template of the tiny model writes words and nothing else."""
    call = {"type": "function", "function": {"name": "tide", "arguments": {"place": "Skye"}}}
    ask, answer = {"role": "user", "content": "When?"}, {"role": "assistant", "content": "At noon."}
    calling = [ask, {"role": "assistant", "content": None, "tool_calls": [call]}]
    rows = [
        {"messages": [ask, answer]},
        {"messages": calling},
        {"messages": [ask, answer], "images": ["a.png"]},
    ]
    names = write(tmp_path / "raw", {"a.jsonl": rows})
    for model in ([], ["--model", str(tiny_model)]):
        out = tmp_path / f"out{len(model)}"
        code, _ = invoke(*names, "--out", str(out), "--valid", "0", "--test", "0", *model)
        assert code == 0
        warned = {warning["message"]: warning["places"] for warning in report_of(out)["warnings"]}
        calls, media = words_of("calls-dropped")[0], words_of("media-dropped")[0]
        assert warned[media] == [f"{names[0]}:3"]
        assert warned.get(calls) == ([f"{names[0]}:2"] if model else None)
