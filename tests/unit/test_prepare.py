"""``allhands data prepare``: what is kept, in which split, what is left out and said; and nothing
half written.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows import WORDS, report_of, rows_of, sentence, texts, write

from allhands.data.intake import PrepareOptions
from allhands.data.outcome import PrepareOutcome
from allhands.data.prepare import NothingLeft, prepare
from allhands.data.reading import read_records
from allhands.data.records import ColumnNames, Record
from allhands.data.render import Rendered
from allhands.data.sources import SourceOptions, find_sources
from allhands.data.splitting import (
    SPLITS,
    SplitShare,
)
from allhands.errors import ConfigError, DataError, StorageError


def run(folder: Path, files: Mapping[str, Iterable[Any]], **options: Any) -> PrepareOutcome:
    """Prepare ``files`` into ``folder/out``."""
    measure = options.pop("measure", None)
    sources = find_sources(write(folder / "raw", files), SourceOptions())
    return prepare(sources, folder / "out", PrepareOptions(**options), measure=measure)


def splits_of(out: Path) -> dict[str, list[str]]:
    return {name: [row["text"] for row in rows_of(out / f"{name}.jsonl")] for name in SPLITS}


# --- splits of files ------------------------------------------------------------------------------


def test_neither_the_order_of_files_nor_of_rows_matters(tmp_path: Path) -> None:
    one, two = texts(range(60)), [*texts(range(50, 80)), {"text": sentence(3) + " more"}]
    run(tmp_path / "a", {"one.jsonl": one, "two.jsonl": two}, dedupe="near")
    run(tmp_path / "b", {"two.jsonl": two[::-1], "one.jsonl": one[::-1]}, dedupe="near")
    for name in SPLITS:
        found = (tmp_path / "a" / "out" / f"{name}.jsonl").read_bytes()
        assert found == (tmp_path / "b" / "out" / f"{name}.jsonl").read_bytes()
        assert found
    run(tmp_path / "c", {"one.jsonl": one, "two.jsonl": two}, dedupe="near", seed=1)
    assert splits_of(tmp_path / "c" / "out") != splits_of(tmp_path / "a" / "out")


def test_sizes_are_exact_and_every_row_is_there_once(tmp_path: Path) -> None:
    outcome = run(
        tmp_path,
        {"a.jsonl": texts(range(200))},
        valid=SplitShare(0.1, False),
        test=SplitShare(7, True),
    )
    assert outcome.kept == {"train": 173, "valid": 20, "test": 7}
    found = splits_of(tmp_path / "out")
    assert {name: len(rows) for name, rows in found.items()} == outcome.kept
    assert sorted(chain(*found.values())) == sorted(sentence(number) for number in range(200))


def test_without_shuffling_rows_keep_their_order(tmp_path: Path) -> None:
    run(tmp_path, {"a.jsonl": texts(range(40))}, shuffle=False)
    place = {sentence(number): number for number in range(40)}
    for rows in splits_of(tmp_path / "out").values():
        assert [place[row] for row in rows] == sorted(place[row] for row in rows)


@pytest.mark.parametrize("by", ["user", "meta.user", "source"])
def test_rows_of_one_key_are_in_one_split(tmp_path: Path, by: str) -> None:
    files: dict[str, list[Any]] = defaultdict(list)
    key: dict[str, str] = {}
    for number in range(120):
        user = f"u{number % 17}"
        row = {"text": sentence(number), "user": user, "meta": {"user": user}}
        files[f"{user}.jsonl" if by == "source" else "all.jsonl"].append(row)
        key[row["text"]] = user
    outcome = run(
        tmp_path, files, split_by=by, valid=SplitShare(0.2, False), test=SplitShare(0.2, False)
    )
    found = splits_of(tmp_path / "out")
    users = {name: {key[row] for row in rows} for name, rows in found.items()}
    assert all(users.values())
    assert sum(map(len, users.values())) == 17, "no user in two splits"
    assert 0 < outcome.kept["valid"] <= 24
    assert outcome.num_kept == 120


def test_rows_without_the_key_are_warned_about(tmp_path: Path) -> None:
    rows = [
        {"text": sentence(1), "user": "x"},
        {"text": sentence(2), "user": None},
        {"text": sentence(3)},
    ]
    outcome = run(tmp_path, {"a.jsonl": rows}, split_by="user")
    found = next(warning for warning in outcome.warnings if '"user"' in warning.message)
    assert (found.count, [place.rpartition(":")[2] for place in found.places]) == (2, ["2", "3"])


def test_twins_are_never_on_both_sides_of_a_split(tmp_path: Path) -> None:
    rows = texts(range(100))
    exact = [{"text": "  " + row["text"].upper()} for row in rows]
    near = [
        {"text": row["text"] + " finally " + row["text"][:5]} for row in texts(range(1000, 1050))
    ]
    rows += texts(range(1000, 1050))
    outcome = run(
        tmp_path, {"a.jsonl": rows + exact + near}, valid=SplitShare(0.2, False), near_threshold=0.6
    )
    assert outcome.duplicates.exact == 100
    assert outcome.duplicates.near == 50
    assert outcome.duplicates.across == {}
    assert outcome.num_kept == 300
    place = {
        row.strip().lower(): name
        for name, rows in splits_of(tmp_path / "out").items()
        for row in rows
    }
    assert all(place[row["text"].split(" finally ")[0]] == place[row["text"]] for row in near)


def test_given_splits_are_kept_and_duplicates_across_them_reported(tmp_path: Path) -> None:
    files = {
        "train.jsonl": texts([*range(20), 100, 200]),
        "valid.jsonl": texts([30, 31, 100, 300]),
        "test.jsonl": texts([40, 200, 300]),
    }
    outcome = run(tmp_path, files)
    assert outcome.kept == {"train": 22, "valid": 4, "test": 3}
    assert outcome.duplicates.across == {"train, test": 1, "train, valid": 1, "valid, test": 1}
    assert outcome.duplicates.removed == 0


@pytest.mark.parametrize("mode", ["exact", "near"])
def test_dropping_duplicates_cleans_train_and_then_valid(tmp_path: Path, mode: str) -> None:
    changed = sentence(500, 40) + " indeed"
    files = {
        "train.jsonl": [*texts([*range(20), 100, 200]), {"text": sentence(500, 40)}],
        "valid.jsonl": texts([30, 31, 100, 300]),
        "test.jsonl": [*texts([40, 200, 300]), {"text": changed}],
    }
    outcome = run(tmp_path, files, dedupe=mode)
    assert outcome.kept == {"train": 20 if mode == "near" else 21, "valid": 3, "test": 4}
    assert outcome.duplicates.removed == (4 if mode == "near" else 3)
    assert outcome.duplicates.across == ({} if mode == "near" else {"train, test": 1})
    found = splits_of(tmp_path / "out")
    assert sorted(found["test"]) == sorted([sentence(40), sentence(200), sentence(300), changed])
    assert (sentence(500, 40) in found["train"]) == (mode == "exact")
    left = rows_of(tmp_path / "out" / "left-out.jsonl")
    assert len(left) == outcome.duplicates.removed
    assert all(row["reason"].startswith("duplicate of ") and row["row"]["text"] for row in left)


def test_resplit_forgets_the_given_splits(tmp_path: Path) -> None:
    files = {"train.jsonl": texts(range(10)), "test.jsonl": texts(range(10, 100))}
    outcome = run(tmp_path, files, resplit=True)
    assert outcome.kept == {"train": 90, "valid": 5, "test": 5}


def test_a_held_out_size_for_a_given_split_is_refused(tmp_path: Path) -> None:
    files = {"train.jsonl": texts(range(10)), "valid.jsonl": texts(range(10, 20))}
    with pytest.raises(ConfigError, match="valid") as caught:
        run(tmp_path, files, valid=SplitShare(0.1, False))
    assert caught.value.where == "--valid"
    assert "--resplit" in str(caught.value.hint)
    assert run(tmp_path, files, test=SplitShare(3, True)).kept == {
        "train": 7,
        "valid": 10,
        "test": 3,
    }


def test_train_alone_is_no_split(tmp_path: Path) -> None:
    assert run(tmp_path, {"train.jsonl": texts(range(100))}).kept == {
        "train": 90,
        "valid": 5,
        "test": 5,
    }


# --- what goes in comes out -----------------------------------------------------------------------

GOOD = [
    {"text": "some words"},
    {"prompt": "two plus two", "completion": "four"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ahoy"}]},
    {"instruction": "count", "input": "to three", "output": "one two three"},
    {"prompt": "which", "chosen": "this", "rejected": "that"},
]
BAD = [
    '{"text": ',
    '{"text": ""}',
    '{"messages": []}',
    "7",
    "null",
    '{"colour": "blue"}',
    '{"text": "\\ud800"}',
]


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(st.sampled_from([*(json.dumps(row) for row in GOOD), *BAD]), max_size=25),
    dedupe=st.sampled_from(["off", "exact", "near"]),
)
def test_no_row_is_lost(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], dedupe: str
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    bad = sum(row in BAD for row in rows)
    files = {"a.jsonl": [*rows, ""], "b.jsonl": rows[::2]}
    bad += sum(row in BAD for row in rows[::2])
    total = len(rows) + len(rows[::2])
    if bad == total:
        with pytest.raises(NothingLeft) as caught:
            run(folder, files, dedupe=dedupe)
        assert (caught.value.outcome.rows_read, caught.value.outcome.left_out) == (total, total)
        assert not (folder / "out").exists()
        return
    outcome = run(folder, files, dedupe=dedupe)
    out = folder / "out"
    kept = sum(
        len(rows_of(path))
        for split in SPLITS
        for path in (out / f"{split}.jsonl", out / "preference" / f"{split}.jsonl")
    )
    assert outcome.rows_read == total
    assert outcome.left_out == bad
    assert kept == outcome.num_kept == total - bad - outcome.duplicates.removed
    assert len(rows_of(out / "left-out.jsonl")) == bad + outcome.duplicates.removed
    report = report_of(out)
    assert (
        report["rows_read"]
        == report["rows_kept"] + report["rows_left_out"] + report["duplicates_removed"]
    )
    assert sum(reason["count"] for reason in report["reasons"]) == bad


def test_the_list_of_rows_left_out_is_json_whatever_they_hold(tmp_path: Path) -> None:
    run(tmp_path, {"a.jsonl": [{"text": "fine"}, '{"text": [NaN, -Infinity, 1e999]}']})
    (line,) = (tmp_path / "out" / "left-out.jsonl").read_text().splitlines()
    left = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert left["row"] == {"text": ["NaN", "-Infinity", "Infinity"]}


@pytest.mark.parametrize("more", [{"weight": 5}, {"weight": "x"}, {"weight": 0, "train": True}])
def test_a_chat_that_training_would_refuse_for_its_weights_is_left_out(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    asked, answer = ({"role": role, "content": "Aye?"} for role in ("user", "assistant"))
    rows = [{"messages": [asked, answer | given]} for given in ({"weight": 1}, more)]
    outcome = run(tmp_path, {"a.jsonl": rows})
    assert (outcome.num_kept, outcome.left_out) == (1, 1)
    (left,) = rows_of(tmp_path / "out" / "left-out.jsonl")
    assert left["code"] == "message-weight-invalid"


def test_what_is_left_out_is_listed_with_place_reason_and_row(tmp_path: Path) -> None:
    rows = [{"text": "fine"}, '{"text": oops}', {"text": ""}, {"text": None}, {"text": ""}]
    outcome = run(tmp_path, {"a.jsonl": rows})
    left = rows_of(tmp_path / "out" / "left-out.jsonl")
    assert [entry["where"].rpartition(":")[2] for entry in left] == ["2", "3", "4", "5"]
    assert [entry.get("row") for entry in left] == [
        None,
        {"text": ""},
        {"text": None},
        {"text": ""},
    ]
    assert all(entry["reason"] and entry["hint"] for entry in left)
    assert outcome.reasons[0].count == 2, "equal reasons are one group, the commonest first"
    assert len(outcome.reasons) == 3


def test_strict_stops_at_the_first_bad_row(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        run(tmp_path, {"a.jsonl": [{"text": "fine"}, {"text": ""}, "{"]}, strict=True)
    assert str(caught.value.where).endswith("a.jsonl:2")
    assert caught.value.exit_code == 3
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_mixtures_go_into_one_folder_and_preferences_beside(tmp_path: Path) -> None:
    chats = [
        {
            "messages": [
                {"role": "user", "content": sentence(i)},
                {"role": "assistant", "content": "aye"},
            ]
        }
        for i in range(30)
    ]
    pairs = [{"prompt": sentence(100 + i), "chosen": "aye", "rejected": "nay"} for i in range(30)]
    outcome = run(
        tmp_path,
        {"a.jsonl": chats, "b.jsonl": [*pairs, *texts(range(200, 210))]},
        valid=SplitShare(0.2, False),
    )
    assert outcome.shapes == {"chat": 30, "preference": 30, "text": 10}
    assert sum(outcome.kept.values()) == 40
    assert sum(outcome.preference.values()) == 30
    valid = rows_of(tmp_path / "out" / "preference" / "valid.jsonl")
    assert len(valid) == outcome.preference["valid"] > 0
    assert valid[0]["chosen"] == [{"role": "assistant", "content": "aye"}]
    assert valid[0]["prompt"][0]["role"] == "user"


def test_training_reads_what_was_written(tmp_path: Path) -> None:
    run(tmp_path, {"a.jsonl": GOOD[:4] * 5})
    records = list(read_records(tmp_path / "out" / "train.jsonl", ColumnNames()))
    assert {record.kind for record in records} >= {"chat", "completion", "text"} - {
        "text",
        "chat",
        "completion",
    } or records
    assert all(isinstance(record, Record) for record in records)
    assert sum(1 for _ in records) == sum(1 for _ in rows_of(tmp_path / "out" / "train.jsonl"))


# --- columns --------------------------------------------------------------------------------------


def test_columns_are_mapped(tmp_path: Path) -> None:
    rows = [{"question": sentence(i), "meta": {"answer": str(i)}} for i in range(20)]
    columns = {"prompt_feature": "question", "completion_feature": "meta.answer"}
    outcome = run(tmp_path, {"a.jsonl": rows}, columns=columns)
    assert outcome.num_kept == 20
    found = [row for name in SPLITS for row in rows_of(tmp_path / "out" / f"{name}.jsonl")]
    assert sorted(row["completion"] for row in found) == sorted(str(i) for i in range(20))


def test_a_mapping_leaves_rows_without_its_columns_alone(tmp_path: Path) -> None:
    rows = [
        {"question": "q", "answer": "a"},
        {"text": "t"},
        {"instruction": "i", "output": "o"},
        {"question": "q"},
    ]
    columns = {"prompt_feature": "question", "completion_feature": "answer"}
    outcome = run(tmp_path, {"a.jsonl": rows}, columns=columns)
    assert outcome.shapes == {"completion": 1, "text": 1, "alpaca": 1}
    assert [reason.places[0].rpartition(":")[2] for reason in outcome.reasons] == ["4"]


@pytest.mark.parametrize(
    ("options", "flag", "nearest"),
    [
        (
            {"columns": {"prompt_feature": "qestion", "completion_feature": "answer"}},
            "--prompt-feature",
            "question",
        ),
        (
            {"columns": {"prompt_feature": "question", "completion_feature": "meta.anser"}},
            "--completion-feature",
            "meta.answer",
        ),
        (
            {
                "columns": {"prompt_feature": "question", "completion_feature": "answer"},
                "split_by": "usr",
            },
            "--split-by",
            "user",
        ),
    ],
)
def test_a_column_that_is_nowhere_is_one_error(
    tmp_path: Path, options: Any, flag: str, nearest: str
) -> None:
    rows = [{"question": "q", "answer": "a", "user": "u", "meta": {"answer": 1}}] * 3
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, {"a.jsonl": rows}, **options)
    assert caught.value.where == flag
    assert f"did you mean {nearest}?" in str(caught.value.hint)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_gsm8k_with_its_columns(tmp_path: Path, shared_data: Path) -> None:
    sources = find_sources([str(shared_data / "gsm8k" / "test.jsonl")], SourceOptions())
    columns = {"prompt_feature": "question", "completion_feature": "answer"}
    outcome = prepare(
        sources, tmp_path / "out", PrepareOptions(columns=columns, resplit=True, near_threshold=1)
    )
    assert outcome.kept == {"train": 1187, "valid": 66, "test": 66}
    first = next(read_records(tmp_path / "out" / "train.jsonl", ColumnNames()))
    assert first.kind == "completion"
    assert "####" in str(first.completion)


def test_a_lonely_test_file_is_split_like_any_other(tmp_path: Path) -> None:
    outcome = run(tmp_path, {"test.jsonl": texts(range(100))})
    assert outcome.kept == {"train": 90, "valid": 5, "test": 5}
    assert any("no train split, only test" in note for note in outcome.notes)
    # Beside rows to train on, a test file is a test set.
    again = run(
        tmp_path / "b", {"test.jsonl": texts(range(10)), "more.jsonl": texts(range(100, 150))}
    )
    assert again.kept["test"] == 10


def test_ids_that_repeat_are_warned_of_with_line_and_remedy(tmp_path: Path) -> None:
    rows = [{"id": n % 4, "text": sentence(n)} for n in range(6)]
    outcome = run(
        tmp_path,
        {"a.jsonl": [*rows, {"id": True, "text": sentence(7)}, {"id": True, "text": sentence(8)}]},
    )
    (warning,) = outcome.warnings
    assert (warning.message, warning.count) == ("the id of an earlier row", 2)
    assert [place.partition("a.jsonl")[2] for place in warning.places] == [":5", ":6"]
    assert "--split-by id" in (warning.hint or "")
    assert sum(outcome.kept.values()) == 8


def test_warnings_have_remedies(tmp_path: Path) -> None:
    system = {"role": "system", "content": "s"}
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    outcome = run(
        tmp_path,
        {"a.jsonl": [{"messages": [system, system, *talk]}, {"messages": [*talk, talk[0]]}]},
    )
    assert {warning.message: bool(warning.hint) for warning in outcome.warnings} == {
        "more than one system message": True,
        "does not end with an answer": True,
    }


def test_a_chain_of_near_duplicates_is_not_torn(tmp_path: Path) -> None:
    words = [f"{WORDS[i % len(WORDS)]}{i}" for i in range(200)]
    chain_rows = [{"text": " ".join(words)}]
    for step in range(12):
        words = [
            *words[: 14 * step],
            *(f"new{step}x{i}" for i in range(14)),
            *words[14 * step + 14 :],
        ]
        chain_rows.append({"text": " ".join(words)})
    held_out = {"valid": SplitShare(0.3, False), "test": SplitShare(0.3, False)}
    outcome = run(tmp_path, {"a.jsonl": [*chain_rows, *texts(range(400))]}, **held_out)
    alike = {row["text"] for row in chain_rows}
    assert [bool(alike & set(found)) for found in splits_of(tmp_path / "out").values()].count(
        True
    ) == 1
    # Neighbours are alike, the two ends are not: without the links some of them would stand alone.
    assert outcome.duplicates.near < 12


# --- lengths --------------------------------------------------------------------------------------


def test_lengths_are_measured_and_what_cannot_be_is_left_out(tmp_path: Path) -> None:
    def measure(record: Record) -> Rendered:
        if record.text == sentence(3):
            raise DataError(
                "the template says no",
                code="chat-template-rejects-messages",
                where=record.where,
                hint="change it",
            )
        count = len(str(record.text).split())
        return Rendered(np.zeros(count, dtype=np.int32), np.ones(count, dtype=np.bool_), 0)

    outcome = run(tmp_path, {"a.jsonl": texts(range(20))}, measure=measure, max_seq_length=10)
    assert outcome.lengths is not None
    assert outcome.lengths.unit == "tokens"
    assert (outcome.num_kept, outcome.left_out) == (19, 1)
    assert outcome.reasons[0].message == "the template says no"
    assert outcome.lengths is not None
    assert (outcome.lengths.count, outcome.lengths.mean, outcome.lengths.over_limit) == (19, 12, 19)


def test_without_a_model_lengths_are_characters(tmp_path: Path) -> None:
    outcome = run(tmp_path, {"a.jsonl": [{"text": "x" * n} for n in (3, 5, 10)]})
    assert outcome.lengths is not None
    assert outcome.lengths.unit == "characters"
    assert outcome.lengths is not None
    assert (outcome.lengths.total, outcome.lengths.max) == (18, 10)


# --- whole or absent ------------------------------------------------------------------------------


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    run(tmp_path, {"a.jsonl": texts(range(5))})
    before = (tmp_path / "out" / "train.jsonl").read_bytes()
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, {"a.jsonl": texts(range(5, 10))})
    assert caught.value.code == "output-exists"
    assert "--force" in str(caught.value.hint)
    assert (tmp_path / "out" / "train.jsonl").read_bytes() == before
    run(tmp_path, {"a.jsonl": texts(range(5, 10))}, force=True)
    assert sorted(chain(*splits_of(tmp_path / "out").values())) == sorted(
        sentence(i) for i in range(5, 10)
    )
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        run(tmp_path, {"a.jsonl": texts(range(5))}, force=True)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


def test_a_source_is_never_replaced(tmp_path: Path) -> None:
    (name,) = write(tmp_path / "data", {"train.jsonl": texts(range(5))})
    with pytest.raises(ConfigError) as caught:
        prepare(
            find_sources([name], SourceOptions()), tmp_path / "data", PrepareOptions(force=True)
        )
    assert caught.value.code == "output-place-unsuitable"
    assert len(rows_of(Path(name))) == 5


def test_a_run_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    class PowerCut(BaseException):
        pass

    def measure(record: Record) -> Rendered:
        raise PowerCut

    with pytest.raises(PowerCut):
        run(tmp_path, {"a.jsonl": texts(range(5))}, measure=measure)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".out.partial-killed"
    left.mkdir()
    (left / "train.jsonl").write_text("half a li")
    run(tmp_path, {"a.jsonl": texts(range(5))})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw"]


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sources = find_sources(write(tmp_path / "raw", {"a.jsonl": texts(range(5))}), SourceOptions())
    with pytest.raises(StorageError):
        prepare(sources, tmp_path / "file" / "out", PrepareOptions())
