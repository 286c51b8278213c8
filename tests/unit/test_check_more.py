"""How ``allhands data check`` groups what it finds, names shares, and refuses what is not there."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import ZEPHYR, tiny
from rich.console import Console
from test_check import CLEAN, VALID, chat, chats, look, row, run, write
from tiny import run_allhands, with_positions, write_model

from allhands.cli.check import spread_table
from allhands.config.schema import build_config
from allhands.data.check import CheckOptions, Examiner, check
from allhands.data.findings import words_of
from allhands.data.lengths import LengthSummary
from allhands.data.outcome import NUM_REASONS
from allhands.data.records import ColumnNames
from allhands.data.shapes import (
    NO_LAST_ANSWER,
    STARTS_WITH_ANSWER,
    TWO_SYSTEM,
    parse_example,
    remedy_of_warning,
)
from allhands.errors import DataError
from allhands.io.formatting import counted
from allhands.run.datasets import load_data


def turns(*roles: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": role, "content": f"{role} {n}, matey"} for n, role in enumerate(roles)
        ]
    }


# --- groups ---------------------------------------------------------------------------------------


def test_bad_rows_are_grouped_by_what_is_wrong_and_not_by_the_remedy(
    tmp_path: Path, tiny_model: Path
) -> None:
    rows = [*CLEAN, row("Why?", ""), {"text": 7}, turns("user", "assistant", "user", "assistant")]
    rows[-1]["messages"][3]["content"] = ""
    _, out = run(
        write(tmp_path / "data", rows, VALID), "--model", tiny_model, "--mask-prompt", "--json"
    )
    findings = [f for f in json.loads(out)["findings"] if f["severity"] == "ruins"]
    places = {tuple(f["places"]): f["message"] for f in findings}
    assert set(places) == {("train.jsonl:7", "train.jsonl:9"), ("train.jsonl:8",)}
    assert places["train.jsonl:7", "train.jsonl:9"].startswith("2 rows: messages[…] ")
    assert '"text"' in places[("train.jsonl:8",)]


def test_numbers_and_excerpts_do_not_part_a_group() -> None:
    messages = ["bad at column 3, near 'abc'", "bad at column 14, near 'xyz'", "worse at column 3"]
    errors = [
        DataError(words, code="any-fault", where=f"train.jsonl:{n}", hint="repair it")
        for n, words in enumerate(messages)
    ]
    _, findings = check(
        {"train": [*chats(), *errors]}, Examiner(tiny(ZEPHYR), CheckOptions(mask_prompt=True))
    )
    bad = [finding for finding in findings if finding.code == "bad-rows"]
    assert [(words_of(f)[0], f.places) for f in bad] == [
        ("2 rows: bad at column …", ("train.jsonl:0", "train.jsonl:1")),
        ("1 row: worse at column 3", ("train.jsonl:2",)),
    ]


def test_too_many_reasons_do_not_point_to_a_file_that_is_not_written() -> None:
    # Words, since numbers make no difference.
    names = ["".join("abcdefghij"[int(digit)] for digit in str(n)) for n in range(NUM_REASONS + 2)]
    errors = [
        DataError(f"bad {name}", code="any-fault", where=f"train.jsonl:{n}")
        for n, name in enumerate(names)
    ]
    _, findings = check({"train": errors}, Examiner(tiny(ZEPHYR), CheckOptions(mask_prompt=True)))
    (rest,) = [finding for finding in findings if finding.code == "bad-rows" and finding.count == 2]
    assert words_of(rest)[0] == "2 rows: other reasons"
    assert words_of(rest)[1] == "repair the others first"


# --- warnings -------------------------------------------------------------------------------------


def test_what_looks_wrong_but_may_be_meant_is_noted() -> None:
    written = [
        turns("assistant", "user", "assistant"),
        turns("user", "assistant", "user"),
        turns("system", "system", "user", "assistant"),
        turns("assistant", "user", "assistant"),
    ]
    items = [
        parse_example(v, ColumnNames(), source="train.jsonl", line=n)
        for n, v in enumerate(written, start=20)
    ]
    examiner = Examiner(tiny(ZEPHYR), CheckOptions(mask_prompt=True))
    _, findings = check({"train": [*chats(), *items]}, examiner)
    noted = {words_of(f)[0]: f for f in findings if f.code == "suspicious-rows"}
    assert {message: f.places for message, f in noted.items()} == {
        f"2 rows: {STARTS_WITH_ANSWER}": ("train.jsonl:20", "train.jsonl:23"),
        f"1 row: {NO_LAST_ANSWER}": ("train.jsonl:21",),
        f"1 row: {TWO_SYSTEM}": ("train.jsonl:22",),
    }
    for message, finding in noted.items():
        assert finding.severity == "note"
        assert words_of(finding)[1] == remedy_of_warning(message.partition(": ")[2])


def test_warnings_are_printed_and_ruin_nothing(tmp_path: Path, tiny_model: Path) -> None:
    folder = write(tmp_path / "data", [*CLEAN, turns("user", "assistant", "user")], VALID)
    code, out = run(folder, "--model", tiny_model, "--mask-prompt", "--strict")
    assert code == 0
    assert (
        f"good to know\n  train: 1 row: {NO_LAST_ANSWER}\n      train.jsonl:7\n      what to do: "
        in out
    )


# --- the screen -----------------------------------------------------------------------------------


def test_shares_are_of_what_is_left_after_the_cut(tmp_path: Path, tiny_model: Path) -> None:
    # Tokens: 21 + 2 + 3 and 21 + 2 + 5000, of which 100 are left; each answer begins after 19 + 2,
    # before a line break.
    folder = write(tmp_path / "data", [row("qq", "aaa"), row("qq", "a" * 5000)], VALID)
    options = (
        folder,
        "--model",
        tiny_model,
        "--mask-prompt",
        "--split",
        "train",
        "--max-seq-length",
    )
    _, out = run(*options, 100)
    assert "  trained          83 of the 126 tokens that are left (65.9%)\n" in out
    assert "  masked           43 of the 126 tokens that are left\n" in out
    assert "of all" not in out
    _, out = run(*options, 6000)
    assert "  masked           44 of 5,049 tokens\n" in out
    assert "left" not in out


def test_where_everything_is_cut_the_lines_are_the_same(tmp_path: Path, tiny_model: Path) -> None:
    folder = write(tmp_path / "data", CLEAN, VALID)
    _, out = run(
        folder, "--model", tiny_model, "--mask-prompt", "--split", "train", "--max-seq-length", 8
    )
    assert "  trained          0 of the 0 tokens that are left (0%)\n" in out
    assert "  masked           0 of the 0 tokens that are left\n" in out


def test_large_numbers_keep_apart() -> None:
    huge = LengthSummary.of([3, 65_036, 1_234_567_890])
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(spread_table({"tokens": huge, "trained tokens": LengthSummary.of([1, 2])}))
    lines = console.export_text().splitlines()
    assert lines[0].split() == ["min", "median", "mean", "max", "total"]
    assert lines[1].split() == [
        "tokens",
        "3",
        "65,036.0",
        "411,544,309.7",
        "1,234,567,890",
        "1,234,632,929",
    ]
    assert lines[2].split() == ["trained", "tokens", "1", "1.5", "1.5", "2", "3"]


def test_one_is_singular(tmp_path: Path, tiny_model: Path) -> None:
    folder = write(tmp_path / "data", CLEAN[:1])
    _, out = run(folder, "--model", tiny_model, "--mask-prompt")
    assert "train: 1 example (chat 1)\n" in out
    assert "1 batch of 4; 1,000 iterations (--iters): 1,000 epochs\n" in out
    assert "1 example for batches of 4" in out
    _, found = look([chat("Hm?", "Ahoy, matey " * 20)], max_seq_length=60)
    assert words_of(found["answers-cut"])[0] == "1 of 1 example: the answer is cut off at 60 tokens"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "0 rows"),
        (1, "1 row"),
        (1.04, "1 row"),
        (0.5, "0.5 rows"),
        (1000.0, "1,000 rows"),
        (20500, "20,500 rows"),
    ],
)
def test_counted_things(number: float, words: str) -> None:
    assert counted(number, "row") == words
    assert counted(2, "batch", "batches") == "2 batches"


# --- what is not there ----------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_split_that_is_asked_for_must_be_there(tmp_path: Path, split: str) -> None:
    folder = write(tmp_path / "data", CLEAN)
    with pytest.raises(DataError) as error:
        run(folder, "--model", "no/such/model", "--split", split)
    assert split in error.value.message
    assert error.value.hint


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_split_that_is_asked_for_needs_no_other(
    tmp_path: Path, tiny_model: Path, split: str
) -> None:
    (write(tmp_path / "data", CLEAN) / "train.jsonl").rename(tmp_path / "data" / f"{split}.jsonl")
    code, out = run(
        tmp_path / "data", "--model", tiny_model, "--mask-prompt", "--split", split, "--json"
    )
    assert code == 0
    splits = json.loads(out)["splits"]
    assert set(splits) == {split}
    assert splits[split]["examples"] == len(CLEAN)


def test_a_part_of_the_test_set_that_is_missing_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", CLEAN)
    (folder / "test-00000-of-00002.jsonl").write_bytes((folder / "train.jsonl").read_bytes())
    with pytest.raises(DataError) as error:
        run(folder, "--model", "no/such/model")
    assert error.value.code == "data-part-missing"


def test_lines_of_which_none_can_be_shown_fail(tmp_path: Path, tiny_model: Path) -> None:
    folder = write(tmp_path / "data", [*CLEAN, "not json"], VALID)
    options = (folder, "--model", tiny_model, "--mask-prompt", "--row")
    for line in (99, 7):
        code, out = run(*options, line)
        assert code == DataError.exit_code
        assert f"no record that can be shown begins in line {line}\n" in out
    assert run(*options, 99, "--row", 2)[0] == 0
    assert run(*options, 99, "--show", 1)[0] == 0
    code, out = run(*options, 99, "--json")
    assert code == DataError.exit_code
    assert "no-row" in {finding["code"] for finding in json.loads(out)["findings"]}


# --- what is held out -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "valid", "told"), [(1, 1, True), (2, 1, True), (3, 1, False), (20, 5, False)]
)
def test_much_that_is_held_out_is_said(
    tmp_path: Path, tiny_model: Path, train: int, valid: int, told: bool
) -> None:
    rows = [row(f"Why {n}?", f"So it is, matey {n}.") for n in range(train + valid)]
    folder = write(tmp_path / "data", rows[:train], rows[train:])
    _, out = run(folder, "--model", tiny_model, "--mask-prompt", "--json")
    found = [finding for finding in json.loads(out)["findings"] if finding["code"] == "held-out"]
    assert [(one["count"], one["total"]) for one in found] == [(valid, train + valid)] * told
    config = build_config(
        {"train": True, "model": str(tiny_model), "data": str(folder), "batch_size": 1}
    )
    notes = " ".join(load_data(config).notes)
    assert ("never trained on" in notes) == told


# --- sizes ----------------------------------------------------------------------------------------


def codes(folder: Path, model: Path, *options: str) -> set[str]:
    _, out = run(folder, "--model", model, "--mask-prompt", "--json", *options)
    return {finding["code"] for finding in json.loads(out)["findings"]}


@pytest.mark.parametrize(
    ("train", "options", "told"),
    [
        (36, (), True),  # 1,000 batches of 4: 111 times
        (36, ("--epochs", "3"), False),
        (36, ("--iters", "90"), False),
        (36, ("--iters", "200"), True),
        (300, (), False),
    ],
)
def test_epochs_without_end_are_said(
    tmp_path: Path, tiny_model: Path, train: int, options: tuple[str, ...], told: bool
) -> None:
    rows = [row(f"Why {n}?", f"So it is, matey {n}.") for n in range(train + 20)]
    folder = write(tmp_path / "data", rows[:train], rows[train:])
    assert ("many-epochs" in codes(folder, tiny_model, *options)) == told


@pytest.mark.parametrize(
    ("batches", "size", "told"), [(2, 4, True), (3, 4, False), (-1, 1, False), (0, 1, False)]
)
def test_few_rows_that_are_validated_are_said_though_there_are_more(
    tmp_path: Path, tiny_model: Path, batches: int, size: int, told: bool
) -> None:
    rows = [row(f"Why {n}?", f"So it is, matey {n}.") for n in range(60)]
    folder = write(tmp_path / "data", rows[:40], rows[40:])
    given = {"train": True, "model": str(tiny_model), "data": str(folder)}
    config = build_config({**given, "val_batches": batches, "batch_size": size})
    assert any("--val-batches" in note for note in load_data(config).notes) == told


@pytest.mark.parametrize(
    ("valid", "told"), [(2, True), (9, True), (10, False), (20, False), (0, False)]
)
def test_a_validation_set_of_a_few_rows_is_said(
    tmp_path: Path, tiny_model: Path, valid: int, told: bool
) -> None:
    rows = [row(f"Why {n}?", f"So it is, matey {n}.") for n in range(100 + valid)]
    folder = (
        write(tmp_path / "data", rows[:100], rows[100:])
        if valid
        else write(tmp_path / "data", rows)
    )
    assert ("few-validation" in codes(folder, tiny_model)) == told
    config = build_config({"train": True, "model": str(tiny_model), "data": str(folder)})
    assert (
        any("too few" in note and note.startswith("valid: ") for note in load_data(config).notes)
        == told
    )


def test_rows_beyond_the_models_positions_are_said(tmp_path: Path) -> None:
    model = with_positions(write_model(tmp_path / "model"), 60)
    rows = [row("Why?", "x" * 100)] + [row(f"Why {n}?", "So.") for n in range(11)]
    folder = write(tmp_path / "data", rows, rows)
    assert "beyond-positions" in codes(folder, model)
    assert "beyond-positions" not in codes(folder, model, "--max-seq-length", "60")
    assert "beyond-positions" not in codes(folder, with_positions(model, 600))


@pytest.mark.slow
@pytest.mark.parametrize("healthy", [True, False])
def test_training_says_so_at_its_start(tmp_path: Path, healthy: bool) -> None:
    model = with_positions(write_model(tmp_path / "model"), 600 if healthy else 60)
    rows = [row(f"Why {n}?", "x" * 100) for n in range(24)]
    folder = write(tmp_path / "data", rows[:12], rows[12 if healthy else 22 :])
    done = run_allhands(
        *(
            "train",
            "--train",
            "--model",
            model,
            "--data",
            folder,
            "--adapter-path",
            tmp_path / "run",
        ),
        *(
            "--batch-size",
            "12",
            "--iters",
            "3" if healthy else "20",
            "--val-batches",
            "1",
            "--num-layers",
            "1",
        ),
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert [words in said for words in ("memorises", "too few", "positions")] == [not healthy] * 3
    assert "sequence length" not in said
