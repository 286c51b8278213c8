"""A run that was killed and went on is read back as the run that was never disturbed, times aside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allhands.observe.judging import judge_run
from allhands.observe.metrics import (
    Event,
    JsonlSink,
    RunEnded,
    RunHistory,
    RunStarted,
    SavedReport,
    StepSkipped,
    TrainReport,
    ValidReport,
    Warned,
    encode_event,
    read_metrics,
)

STARTED = RunStarted("tea", "tiny", "lora", 2, "ring", 4, 60, 100, 1000, 240, None, {}, 1.75e9)
# Validation losses by step; the lowest is not the last.
VALID = {0: 3.0, 20: 2.0, 40: 1.5, 60: 1.75}
SKIPPED = {13: (2, 7), 47: (11,)}


def train(step: int, elapsed_s: float = 0.0) -> TrainReport:
    return TrainReport(
        step,
        4 / step,
        1e-4,
        0.5,
        90.0,
        60.0,
        100 * step,
        0.5,
        0.0,
        0.0,
        elapsed_s,
        (1, 2),
        step / 60,
    )


def life(start: int = 0, *, pace: float = 0.5, attempt: int = 1) -> Iterator[Event]:
    """What the training loop emits from ``start`` to step 60: it knows the best loss from its
    checkpoint.

    Reports every ten steps, validation and then a checkpoint every twenty. The one from which it
    goes on was validated, too, and is once more.
    """
    best = min(
        (loss for step, loss in VALID.items() if start and step <= start), default=float("inf")
    )
    yield replace(STARTED, step=start, attempt=attempt)
    for step in range(start, 61):
        elapsed = (step - start) * pace
        if step > start and step in SKIPPED:
            yield StepSkipped(step, "the gradient is nan", SKIPPED[step])
        if step > start and step % 10 == 0:
            yield train(step, elapsed)
        if step in VALID:
            yield ValidReport(step, VALID[step], 900, elapsed, 1.0, VALID[step] < best)
            best = min(best, VALID[step])
        if step > start and step % 20 == 0:
            yield SavedReport(step, f"step-{step}", pause_s=pace, write_s=pace)
    yield RunEnded(60, "finished", 60 * pace, best_step=40, best_valid_loss=1.5)


def append(file: Path, events: list[Event]) -> None:
    with closing(JsonlSink(file)) as sink:
        for event in events:
            sink.emit(event)


def last_checkpoint(events: list[Event]) -> int:
    return max((event.step for event in events if isinstance(event, SavedReport)), default=0)


def without_times(history: RunHistory) -> dict[str, Any]:
    def plain(entry: Any) -> Any:
        times = {"elapsed_s", "duration_s", "pause_s", "write_s", "total_time_s"}
        return {key: value for key, value in vars(entry).items() if key not in times}

    lists = {
        name: [plain(entry) for entry in getattr(history, name)]
        for name in ("train", "valid", "saved")
    }
    assert history.ended is not None
    return {**lists, "skipped": history.skipped, "ended": plain(history.ended)}


@pytest.fixture
def undisturbed(tmp_path: Path) -> RunHistory:
    append(tmp_path / "undisturbed" / "metrics.jsonl", list(life()))
    return read_metrics(tmp_path / "undisturbed")


def test_a_finished_run_that_is_started_again_has_not_gone_on(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    append(file, [*life(), replace(STARTED, step=60), RunEnded(60, "finished", 30.0)])
    assert read_metrics(file).restarts == []
    append(file, [replace(STARTED, step=60, attempt=2), RunEnded(60, "finished", 30.0)])
    assert [step for step, _ in read_metrics(file).restarts] == [60]


def test_the_undisturbed_run_is_what_the_loop_said(undisturbed: RunHistory) -> None:
    assert undisturbed.train == [train(step, step * 0.5) for step in range(10, 61, 10)]
    assert [(report.step, report.loss) for report in undisturbed.valid] == list(VALID.items())
    assert [report.best for report in undisturbed.valid] == [True, True, True, False]
    assert [report.path for report in undisturbed.saved] == ["step-20", "step-40", "step-60"]
    assert {entry.step: entry.examples for entry in undisturbed.skipped} == SKIPPED
    assert undisturbed.restarts == []


def test_killed_after_any_event_and_resumed_it_is_the_same_run(
    tmp_path: Path, undisturbed: RunHistory
) -> None:
    events = list(life())
    repeated = 0
    for kept in range(1, len(events)):
        file = tmp_path / str(kept) / "metrics.jsonl"
        start = last_checkpoint(events[:kept])
        append(file, events[:kept])
        with file.open("a") as stream:  # the line that the kill tore
            stream.write(encode_event(events[kept])[: 7 * kept % 60])
        append(file, list(life(start, pace=0.25, attempt=2)))
        history = read_metrics(file)
        history.name = undisturbed.name
        assert without_times(history) == without_times(undisturbed), f"killed after {kept} events"
        assert [step for step, _ in history.restarts] == [start]
        clock = [report.elapsed_s for report in history.train]
        assert clock == sorted(clock)
        repeated += any(
            isinstance(event, TrainReport) and event.step > start for event in events[:kept]
        )
    assert repeated >= 3  # kills between a report and the checkpoint after it


def test_validations_on_other_examples_are_not_compared(tmp_path: Path) -> None:
    """A run goes on from step 40 with other validation examples, whose losses are higher."""

    def validated(step: int, loss: float) -> ValidReport:
        return ValidReport(step, loss, 900, step * 0.5, 1.0, best=False)

    first = replace(STARTED, validated="a/9")
    before = [event for event in life() if not isinstance(event, RunStarted | RunEnded)]
    since = {40: 5.0, 60: 4.0}
    runs = {
        "more": replace(STARTED, step=40, validated="a/12"),
        "others": replace(STARTED, step=40, validated="b/9"),
        "the same": replace(STARTED, step=40, validated="a/9"),
        "an old file": replace(STARTED, step=40),
    }
    kinds: dict[str, list[str]] = {}
    for name, second in runs.items():
        after = [validated(*pair) for pair in since.items()]
        again = [replace(second, attempt=2), *after] if name == "others" else []
        append(tmp_path / name / "metrics.jsonl", [first, *before, second, *after, *again])
        history = read_metrics(tmp_path / name)
        changed = name in ("more", "others")
        told = [(report.step, report.loss) for report in history.comparable]
        expected = VALID | {60: 4.0}
        assert told == list((since if changed else expected).items()), name
        assert {one.step: one.loss for one in history.valid} == expected | (
            since if changed else {}
        )
        kinds[name] = [judgement.kind for judgement in judge_run(history, is_over=True)]
    assert "worse" in kinds["the same"]
    assert "worse" in kinds["an old file"]
    assert not {"worse", "overfitting"} & {*kinds["others"], *kinds["more"]}


def test_two_restarts_without_progress(tmp_path: Path, undisturbed: RunHistory) -> None:
    file = tmp_path / "metrics.jsonl"
    first = list(life())[:9]  # past the checkpoint of step 20
    assert last_checkpoint(first) == 20
    stuck = [[*life(20, attempt=attempt)][:1] for attempt in (2, 3)]
    append(file, [*first, *stuck[0], *stuck[1], *life(20, attempt=4)])
    history = read_metrics(file)
    assert without_times(history) == without_times(undisturbed)
    assert history.restarts == [(20, 10.0)] * 3
    assert history.ended is not None
    assert history.ended.total_time_s == 10.0 + 30.0


def test_stopped_by_hand_and_resumed(tmp_path: Path, undisturbed: RunHistory) -> None:
    file = tmp_path / "metrics.jsonl"
    append(file, [*list(life())[:9], RunEnded(20, "interrupted", 11.0)])
    assert read_metrics(file).ended == RunEnded(20, "interrupted", 11.0)
    append(file, [next(life(20))])
    assert read_metrics(file).ended is None
    assert read_metrics(file).trained_s == 10.0  # before the first report of the new start
    append(file, list(life(20))[1:])
    assert read_metrics(file).trained_s == 10.0 + 30.0
    assert without_times(read_metrics(file)) == without_times(undisturbed)
    assert read_metrics(file).restarts == [(20, 10.0)]


def test_a_damaged_checkpoint_sends_the_run_further_back(
    tmp_path: Path, undisturbed: RunHistory
) -> None:
    file = tmp_path / "metrics.jsonl"
    append(file, [*list(life())[:-1], *life(40, attempt=2), *life(20, attempt=3)])
    history = read_metrics(file)
    assert without_times(history) == without_times(undisturbed)
    assert [step for step, _ in history.restarts] == [40, 20]


def test_a_second_start_from_the_beginning_counts_as_a_restart_only_if_a_supervisor_made_it(
    tmp_path: Path,
) -> None:
    events = list(life())[:4]
    append(
        tmp_path / "supervised" / "metrics.jsonl",
        [*events, replace(STARTED, attempt=2), train(10, 5.0)],
    )
    append(
        tmp_path / "again" / "metrics.jsonl",
        [*events, replace(STARTED, step=20, attempt=2), STARTED],
    )
    assert read_metrics(tmp_path / "supervised").restarts == [(0, 0.0)]
    assert read_metrics(tmp_path / "supervised").train == [train(10, 5.0)]
    again = read_metrics(tmp_path / "again")
    assert (again.restarts, again.train, again.valid, again.skipped) == ([], [], [], [])


def test_the_clock_adds_up_over_restarts(tmp_path: Path) -> None:
    events: list[Event] = []
    for number, step in enumerate((0, 10, 20), start=1):
        events += [replace(STARTED, step=step, attempt=number), train(step + 10, 5.0)]
    append(tmp_path / "metrics.jsonl", [*events, RunEnded(30, "finished", 6.0)])
    history = read_metrics(tmp_path)
    assert [report.elapsed_s for report in history.train] == [5.0, 10.0, 15.0]
    assert history.restarts == [(10, 5.0), (20, 10.0)]
    assert history.ended is not None
    assert history.ended.total_time_s == 16.0


def test_the_checkpoint_knows_the_time_before_a_start_better_than_the_last_report(
    tmp_path: Path,
) -> None:
    """A validation and a save lie between them. Of another computer's clock no more is believed
    than is possible.
    """
    for name, told, before in (("later", 9.5, 9.5), ("earlier", 1.0, 5.0)):
        restarted = replace(STARTED, step=10, attempt=2, elapsed_s=told)
        append(
            tmp_path / name / "metrics.jsonl",
            [STARTED, train(10, 5.0), restarted, train(20, 5.0), RunEnded(20, "finished", 6.0)],
        )
        history = read_metrics(tmp_path / name)
        assert [report.elapsed_s for report in history.train] == [5.0, before + 5.0]
        assert history.restarts == [(10, before)]
        assert history.ended is not None
        assert history.ended.total_time_s == before + 6.0


def test_of_a_step_that_was_trained_twice_the_later_one_counts(tmp_path: Path) -> None:
    """With the line of the start between them, and without it, which a full disk may have cost."""
    twice = [train(10), train(20), replace(train(20, 7.0), loss=0.125)]
    append(
        tmp_path / "told" / "metrics.jsonl",
        [STARTED, *twice[:2], replace(STARTED, step=10, attempt=2), twice[2]],
    )
    append(tmp_path / "lost" / "metrics.jsonl", [STARTED, *twice])
    for name in ("told", "lost"):
        assert (tmp_path / name / "metrics.jsonl").read_text().count(
            '"event": "train", "step": 20'
        ) == 2
        assert [(report.step, report.loss) for report in read_metrics(tmp_path / name).train] == [
            (10, 0.4),
            (20, 0.125),
        ]


def test_saving_beside_the_training_may_report_late(tmp_path: Path) -> None:
    late = [
        STARTED,
        train(10),
        train(20),
        train(30),
        SavedReport(20, "a"),
        StepSkipped(25, "why", ()),
    ]
    append(tmp_path / "metrics.jsonl", [*late, replace(STARTED, step=20), train(30, 4.0)])
    history = read_metrics(tmp_path)
    assert history.saved == [SavedReport(20, "a")]
    assert [report.step for report in history.train] == [10, 20, 30]
    assert history.skipped == []


def test_files_of_the_first_version_can_be_read(tmp_path: Path) -> None:
    lines = [
        json.loads(encode_event(event)) for event in (STARTED, train(10), SavedReport(10, "a"))
    ]
    for line, later in zip(lines, (("step", "attempt"), (), ("pause_s", "write_s")), strict=True):
        for key in later:
            del line[key]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = read_metrics(tmp_path)
    assert (history.started, history.train, history.saved) == (
        STARTED,
        [train(10)],
        [SavedReport(10, "a")],
    )


def test_warnings_are_in_the_file_and_disturb_nothing(tmp_path: Path) -> None:
    append(
        tmp_path / "metrics.jsonl",
        [STARTED, train(10), Warned(10, "the disk is nearly full"), train(20)],
    )
    assert (
        '"warned", "step": 10, "message": "the disk is nearly full"'
        in (tmp_path / "metrics.jsonl").read_text()
    )
    assert [report.step for report in read_metrics(tmp_path).train] == [10, 20]


def test_lines_that_cannot_be_read_are_told_by_their_place(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    append(file, list(life()))
    lines = file.read_text().splitlines()
    whole = read_metrics(file)
    assert whole.unreadable == []
    torn, later = lines[-1][:-20], '{"event": "of a later version", "step": 3}'
    damaged = [
        lines[0],
        "garbage{",
        "",
        later,
        "7",
        '{"step": 3}',
        '{"event": "saved"}',
        "[" * 100_000,
        *lines[1:],
        torn,
    ]
    file.write_text("\n".join(damaged))
    found = read_metrics(file)
    assert found.unreadable == [2, 5, 6, 7, 8], (
        "not what is empty, of a later version, or torn at the very end"
    )
    assert without_times(found) == without_times(whole)
    file.write_text("\n".join(damaged) + "\n")
    assert read_metrics(file).unreadable[-1] == len(damaged), (
        "a line that was ended is not still being written"
    )
