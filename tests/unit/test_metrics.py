"""Events, their file, the terminal output and reading back."""

from __future__ import annotations

import io
import json
import logging
import math
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from allhands.errors import DataError, StorageError
from allhands.io.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_memory,
    format_rate,
    format_size,
)
from allhands.observe.metrics import (
    ConsoleSink,
    Event,
    JsonlSink,
    RunEnded,
    RunStarted,
    SavedReport,
    Sinks,
    StepSkipped,
    TrainReport,
    ValidReport,
    Warned,
    decode_event,
    encode_event,
    read_metrics,
)

STARTED = RunStarted(
    name="first",
    model="tiny-llama",
    method="lora",
    num_ranks=2,
    backend="ring",
    batch_size=8,
    total_steps=600,
    trainable_params=1_470_000,
    total_params=494_000_000,
    num_train_examples=1200,
    cores_per_rank=2,
    versions={"mlx": "0.32.4"},
    time=1.75e9,
)


def train(step: int, loss: float = 2.31, elapsed_s: float | None = None) -> TrainReport:
    return TrainReport(
        step=step,
        loss=loss,
        learning_rate=1e-4,
        grad_norm=0.5,
        tokens_per_s=213.4,
        trained_tokens_per_s=120.2,
        trained_tokens=step * 100,
        step_time_s=0.5,
        data_wait_s=0.01,
        comm_s=0.02,
        elapsed_s=step * 0.5 if elapsed_s is None else elapsed_s,
        peak_memory_bytes=(612_000_000, 640_000_000),
        epoch=step / 150,
    )


def valid(step: int, loss: float = 1.932, best: bool = True) -> ValidReport:
    return ValidReport(
        step=step, loss=loss, num_tokens=900, elapsed_s=step * 0.5, duration_s=4.13, best=best
    )


ENDED = RunEnded(600, "finished", 312.0, best_step=200, best_valid_loss=1.932, test_loss=1.95)


def write(path: Path, *events: Event) -> None:
    with closing(JsonlSink(path)) as sink:
        for event in events:
            sink.emit(event)


# --- the file


@given(st.floats(), st.integers(0, 2**60), st.text())
def test_every_event_survives_the_file_as_strict_json(number: float, count: int, text: str) -> None:
    events: list[Event] = [
        replace(STARTED, name=text, total_params=count, versions={text: text}),
        replace(train(3), loss=number, peak_memory_bytes=(count, 0)),
        replace(valid(4), loss=number),
        SavedReport(5, text, number, number),
        StepSkipped(6, text, (count, 3), (text,)),
        Warned(7, text),
        replace(ENDED, test_loss=number, best_step=None, best_valid_loss=None),
    ]
    for event in events:
        line = encode_event(event)
        assert "\n" not in line
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert repr(decode_event(line)) == repr(event)  # repr, because nan is not equal to itself


def test_numpy_scalars_are_written_as_numbers() -> None:
    report = replace(
        train(1), loss=np.float32(1.5), trained_tokens=np.int64(7), grad_norm=np.float32("nan")
    )
    record = json.loads(encode_event(report))
    assert (record["event"], record["loss"], record["trained_tokens"]) == ("train", 1.5, 7)
    assert record["grad_norm"] == "NaN"


@pytest.mark.parametrize(
    "line", ["", "{", "7", "[]", '{"event": "opened"}', '{"event": "train"}', '{"event": []}']
)
def test_lines_that_are_no_event(line: str) -> None:
    assert decode_event(line) is None


def test_fields_of_a_later_version_are_ignored() -> None:
    assert decode_event('{"event": "saved", "step": 3, "path": "a", "new": 1}') == SavedReport(
        3, "a"
    )


def test_each_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with closing(JsonlSink(path)) as sink:
        sink.emit(STARTED)
        sink.emit(train(10))
        kinds = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert kinds == ["opened", "started", "train"]


def test_nobody_else_may_read_what_is_made_and_what_is_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("")
    (tmp_path / "old").chmod(0o640)
    before = os.umask(0)
    try:
        for name in ("a/b/new", "old"):
            JsonlSink(tmp_path / name).close()
    finally:
        os.umask(before)
    modes = {
        name: (tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/new", "old")
    }
    assert modes == {"a": 0o700, "a/b": 0o700, "a/b/new": 0o600, "old": 0o640}


def test_a_disk_that_is_full_at_the_start_is_a_storage_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(StorageError) as caught:
        JsonlSink("/dev/full")
    assert caught.value.code == "disk-full"


def test_a_path_that_cannot_be_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as caught:
        JsonlSink(tmp_path / "file" / "metrics.jsonl")
    assert caught.value.code == "place-taken"


def test_a_disk_that_fills_up_later_warns_once_and_loses_only_what_did_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, room = os.write, [True]

    def limited(fd: int, data: bytes) -> int:
        return real(fd, data) if room[0] else real(fd, data[:20])

    with closing(JsonlSink(tmp_path / "metrics.jsonl")) as sink, caplog.at_level(logging.WARNING):
        sink.emit(train(10))
        monkeypatch.setattr(os, "write", limited)
        room[0] = False
        sink.emit(train(20))
        sink.emit(train(30))
        room[0] = True
        sink.emit(train(40))
    assert [report.step for report in read_metrics(tmp_path).train] == [10, 40]
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_closing_twice_and_emitting_after_it_do_no_harm(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.close()
    sink.close()
    sink.emit(train(1))
    assert kinds_in(tmp_path) == ["opened"]


def kinds_in(directory: Path) -> list[str]:
    return [
        json.loads(line)["event"] for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]


# --- reading back


def test_a_run_is_read_from_its_directory_or_its_file(tmp_path: Path) -> None:
    saved = SavedReport(20, "adapters.safetensors")
    write(
        tmp_path / "metrics.jsonl", STARTED, valid(0), train(10), train(20), valid(20), saved, ENDED
    )
    history = read_metrics(tmp_path)
    assert history == read_metrics(str(tmp_path / "metrics.jsonl"))
    assert (history.name, history.started, history.ended) == (tmp_path.name, STARTED, ENDED)
    assert history.train == [train(10), train(20)]
    assert history.valid == [valid(0), valid(20)]
    assert history.saved == [saved]


def test_a_run_without_a_name_has_that_of_its_directory(tmp_path: Path) -> None:
    write(tmp_path / "lora-7" / "metrics.jsonl", train(10))
    assert read_metrics(tmp_path / "lora-7").name == "lora-7"


@pytest.mark.parametrize(
    "content", [None, "", "not json\n", '{"event": "opened"}\n', '{"prompt": "a"}\n']
)
def test_no_metrics_is_a_data_error_that_says_what_to_give(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"metrics\.jsonl: ") as caught:
        read_metrics(tmp_path)
    assert "adapter path" in (caught.value.hint or "")


def test_every_cut_of_the_file_can_be_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, STARTED, train(10), train(20))
    whole = path.read_bytes()
    third = whole.rindex(b'{"event": "train"')
    for cut in range(third, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert read_metrics(path).train[:1] == [train(10)]
        write(path, train(30))
        assert read_metrics(path).train[0] == train(10)
        assert read_metrics(path).train[-1] == train(30)


def test_a_restart_replaces_what_it_trains_again_and_continues_the_clock(tmp_path: Path) -> None:
    write(
        tmp_path / "metrics.jsonl",
        *(STARTED, valid(0), train(10), SavedReport(10, "kept")),
        *(train(20, 5.0), valid(20, 5.0), SavedReport(20, "lost"), train(30, 5.0)),
        RunEnded(30, "failed", 15.0),
        # from the checkpoint of step 10, with three ranks; its clock starts at zero
        *(
            replace(STARTED, num_ranks=3, step=10, attempt=2),
            train(20, 1.5, elapsed_s=4.0),
            SavedReport(20, "new"),
        ),
        replace(valid(20, 1.4), elapsed_s=6.0),
    )
    history = read_metrics(tmp_path)
    assert [(r.step, r.loss, r.elapsed_s) for r in history.train] == [
        (10, 2.31, 5.0),
        (20, 1.5, 9.0),
    ]
    assert [(r.step, r.loss, r.elapsed_s) for r in history.valid] == [
        (0, 1.932, 0.0),
        (20, 1.4, 11.0),
    ]
    assert [r.path for r in history.saved] == ["kept", "new"]
    assert history.ended is None
    assert history.started is not None
    assert history.started.num_ranks == 3


def test_a_run_from_scratch_in_the_same_directory_replaces_the_old_one(tmp_path: Path) -> None:
    old = [STARTED, train(10), train(20), valid(20), ENDED]
    write(tmp_path / "metrics.jsonl", *old, STARTED, valid(0), train(10, 9.0))
    history = read_metrics(tmp_path)
    assert [(r.step, r.loss) for r in history.train] == [(10, 9.0)]
    assert [r.step for r in history.valid] == [0]


# --- the terminal


def console(terminal: bool, width: int = 80) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    # An explicit environment: the tests must not depend on that of whoever runs them.
    environ = {"TERM": "xterm"}
    return Console(file=out, width=width, force_terminal=terminal, _environ=environ), out


def test_plain_output_is_one_line_an_event_however_narrow_the_window() -> None:
    plain, out = console(terminal=False, width=20)
    with ConsoleSink(plain, 600) as sink:
        for event in (
            train(10),
            train(20),
            valid(200),
            SavedReport(200, "runs/[a]/b.safetensors"),
            ENDED,
        ):
            sink.emit(event)
    assert out.getvalue().splitlines() == [
        "step 10/600  loss 2.310  lr 1.0e-04  tokens/s 213 (trained 120)  peak 612 MB to 640 MB  left 4m55s",
        "step 20/600  loss 2.310  lr 1.0e-04  tokens/s 213 (trained 120)  peak 612 MB to 640 MB  left 4m50s",
        "step 200  validation loss 1.932 (best)  4.1 s",
        "step 200  saved runs/[a]/b.safetensors",
        "finished at step 600  total time 5m12s  best validation loss 1.932 at step 200  test loss 1.950",
    ]


def test_a_line_with_a_tag_before_it_fits_on_a_screen() -> None:
    plain, out = console(terminal=False)
    slow = replace(train(10_000, 12.31, 4e4), data_wait_s=0.4, tokens_per_s=12345.0)
    with ConsoleSink(plain, 10_000, short=True) as sink:
        for event in (train(10), slow):
            sink.emit(event)
    lines = out.getvalue().splitlines()
    assert lines == [
        "step 10/10000  loss 2.310  lr 1.0e-04  tokens/s 213  peak 640 MB  left 1h23m",
        "step 10000/10000  loss 12.310  lr 1.0e-04  tokens/s 12,345  left 0.0 s  data wait 80%",
    ]
    assert max(len(f"[rank 0 node0] {line}") for line in lines) <= 100


def test_the_banner_says_what_is_trained() -> None:
    plain, out = console(terminal=False)
    ConsoleSink(plain, 600).emit(STARTED)
    text = " ".join(out.getvalue().split())
    for part in (
        "model tiny-llama",
        "method lora",
        "1.47 M trained of 494 M (0.298 %)",
        "2 (ring), 2 cores each",
    ):
        assert part in text
    assert "batch size 8 samples a step over all ranks" in text
    assert "600 on 1,200 examples (4.0 epochs)" in text
    ConsoleSink(plain, 600).emit(replace(STARTED, total_steps=165, num_train_examples=258))
    assert "165 on 258 examples (5.0 epochs)" in " ".join(out.getvalue().split())


def test_a_start_that_goes_on_says_from_where() -> None:
    plain, out = console(terminal=False)
    with ConsoleSink(plain) as sink:
        sink.emit(replace(STARTED, step=40))
        resumed = out.getvalue().splitlines()
        sink.emit(replace(STARTED, step=40, attempt=2, num_ranks=3))
        sink.emit(replace(STARTED, attempt=3, num_ranks=1, backend="none"))
    assert resumed[0] == "run         first"
    assert resumed[-1] == "resumed     from step 40"
    assert out.getvalue().splitlines()[len(resumed) :] == [
        "attempt 2: going on from step 40 with 3 ranks (ring)",
        "attempt 3: starting from the beginning with 1 rank (none)",
    ]


def test_the_last_line_counts_the_time_of_all_starts() -> None:
    plain, out = console(terminal=False)
    with ConsoleSink(plain) as sink:
        sink.emit(replace(STARTED, step=300, attempt=2, elapsed_s=290.0))
        sink.emit(replace(ENDED, total_time_s=22.0))
    start = "finished at step 600  total time 5m12s (22 s since the last start)  best"
    assert out.getvalue().splitlines()[-1].startswith(start)


def test_a_profile_tells_where_the_time_of_a_step_went() -> None:
    plain, out = console(terminal=False)
    with ConsoleSink(plain, 600, profile=True) as sink:
        sink.emit(replace(train(300), compute_s=0.4))
    line = "  a step of 500.0 ms: compute 400.0 ms (80%), communication 20.0 ms (4%), data 10.0 ms (2%), "
    assert out.getvalue().splitlines()[1] == line + "update and the rest 70.0 ms (14%)"


def test_skipped_steps_and_warnings_are_one_line_each() -> None:
    plain, out = console(terminal=False, width=20)
    with ConsoleSink(plain) as sink:
        sink.emit(StepSkipped(40, "the gradient is nan", (17, 203)))
        sink.emit(StepSkipped(41, "the loss is inf", (17,), ("train.jsonl:18",)))
        sink.emit(StepSkipped(42, "the loss is nan", tuple(range(8))))
        sink.emit(StepSkipped(43, "the loss is nan", ()))
        sink.emit(Warned(43, "no checkpoint was written"))
    assert out.getvalue().splitlines() == [
        "step 40  skipped: the gradient is nan (training examples 17, 203)",
        "step 41  skipped: the loss is inf (training example 17 at train.jsonl:18)",
        "step 42  skipped: the loss is nan (training examples 0, 1, 2, 3, 4 and 3 more)",
        "step 43  skipped: the loss is nan",
        "warning: no checkpoint was written",
    ]


def test_the_board_of_a_restart_begins_where_it_goes_on() -> None:
    terminal, out = console(terminal=True, width=100)
    with ConsoleSink(terminal) as sink:
        sink.emit(replace(STARTED, step=40))
        terminal.print(sink._board.render())
    assert "step 40/600  before the first report" in out.getvalue()


def test_time_left_counts_what_happens_between_reports() -> None:
    plain, out = console(terminal=False)
    sink = ConsoleSink(plain, 100)
    sink.emit(train(10, elapsed_s=5.0))
    sink.emit(train(20, elapsed_s=25.0))  # 2 s a step, although a step takes 0.5 s: validation
    assert [line.split("left ")[1] for line in out.getvalue().splitlines()] == ["45 s", "2m40s"]


def test_the_board_shows_progress_best_validation_and_memory_of_every_rank() -> None:
    terminal, out = console(terminal=True, width=100)
    with ConsoleSink(terminal, 600) as sink:
        for event in (STARTED, train(10), valid(10, 1.5), valid(20, 1.75, best=False), train(300)):
            sink.emit(event)
        terminal.print(sink._board.render())
    board = out.getvalue()
    assert "step 300/600" in board
    assert "validation loss 1.750 (best 1.500 at step 10)" in board
    assert "tokens/s 213  peak memory per rank 612 MB to 640 MB" in board
    assert "step 10/600  loss 2.310" in board  # and the plain lines above it


def test_the_cursor_comes_back_when_the_run_raises() -> None:
    terminal, out = console(terminal=True)

    def run() -> None:
        with ConsoleSink(terminal, 600) as sink:
            sink.emit(train(10))
            assert out.getvalue().count("\x1b[?25l") == 1
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        run()
    assert out.getvalue().count("\x1b[?25h") == 1


def test_the_last_line_is_printed_after_the_board_is_gone() -> None:
    terminal, out = console(terminal=True)
    sink = ConsoleSink(terminal, 600)
    sink.emit(train(600))
    sink.emit(ENDED)
    after = out.getvalue().split("\x1b[?25h")[1]
    assert after.splitlines()[-1].startswith("\x1b[1A\x1b[2K")  # the board is erased
    assert after.splitlines()[-1].split("\x1b[2K")[-1].startswith("finished at step 600")


def test_no_control_codes_without_a_terminal_or_on_a_dumb_one() -> None:
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    for some in (console(terminal=False)[0], dumb):
        with ConsoleSink(some, 600) as sink:
            sink.emit(STARTED)
            sink.emit(train(10))
        assert isinstance(some.file, io.StringIO)
        assert "\x1b" not in some.file.getvalue()


def test_a_terminal_that_goes_away_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    some = Console(file=Gone(), force_terminal=False)
    with ConsoleSink(some, 600) as sink:
        sink.emit(train(10))
        sink.emit(train(20))
    assert some.quiet


def test_another_exit_passes_through() -> None:
    class Exits(io.StringIO):
        def write(self, text: str) -> int:
            raise SystemExit(3)

    with (
        pytest.raises(SystemExit),
        ConsoleSink(Console(file=Exits(), force_terminal=False), 600) as sink,
    ):
        sink.emit(train(10))


# --- all of them


def test_sinks_hand_on_every_event_and_close_all_even_if_one_fails() -> None:
    class Recorder:
        def __init__(self, fails: bool = False) -> None:
            self.events: list[Event] = []
            self.closed, self.fails = 0, fails

        def emit(self, event: Event) -> None:
            self.events.append(event)

        def close(self) -> None:
            self.closed += 1
            if self.fails:
                raise ValueError("close failed")

    first, second = Recorder(), Recorder(fails=True)
    sinks = Sinks([first, second])
    sinks.emit(STARTED)
    sinks.emit(train(1))
    with pytest.raises(ValueError, match="close failed"), sinks:
        pass
    assert first.events == second.events == [STARTED, train(1)]
    assert (first.closed, second.closed) == (1, 1)


# --- units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *(
            (0, "0.0 s"),
            (4.13, "4.1 s"),
            (9.96, "10 s"),
            (59.4, "59 s"),
            (59.7, "1m00s"),
            (200, "3m20s"),
        ),
        *(
            (3599.6, "1h00m"),
            (3900, "1h05m"),
            (86399.9, "1d00h"),
            (183_600, "2d03h"),
            (math.inf, "?"),
        ),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_other_units() -> None:
    assert [format_count(n) for n in (95_000, 1.47e6, 494e6, 7.62e9)] == [
        "95,000",
        "1.47 M",
        "494 M",
        "7.62 B",
    ]
    assert [format_bytes(n) for n in (0, 612e6, 999.6e6, 80e9)] == [
        "0 MB",
        "612 MB",
        "1 GB",
        "80 GB",
    ]
    sizes = (0, 999, 182_000, 999_949, 999_950, 9.94e6, 9.96e6, 80e9)
    assert [format_size(n) for n in sizes] == [
        "0 B",
        "999 B",
        "182.0 kB",
        "999.9 kB",
        "1.0 MB",
        "9.9 MB",
        "10 MB",
        "80 GB",
    ]
    assert [format_memory(m) for m in ((), (612_100_000, 612_000_000))] == ["?", "612 MB"]
    assert [format_rate(r) for r in (4.24, 9.96, 213.4, 12345.0)] == ["4.2", "10", "213", "12,345"]
