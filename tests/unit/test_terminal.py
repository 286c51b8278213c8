"""Lines on terminals of any width, and streams that are none."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
from command_line import call_allhands
from rich.console import Console
from test_metrics import ENDED, STARTED, train, valid

from allhands.cluster.mpi import find_mpi, usable_mpi
from allhands.io.terminal import (
    broken,
    console_for,
    fitted,
    is_read_live,
    is_screen,
    print_table,
    progress_console,
)
from allhands.observe.metrics import ConsoleSink
from allhands.observe.metrics.console import train_line

WIDTHS = (*range(60, 131), 150, 177, 200)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def rows(text: str, width: int) -> list[str]:
    """What a terminal of this width shows: it goes on below where a row is full."""
    return [
        line[place : place + width]
        for line in text.split("\n")
        for place in range(0, max(len(line), 1), width)
    ]


def parted(shown: list[str], width: int) -> list[tuple[str, str]]:
    """Rows of which the end and the beginning of the next are one word."""
    found: list[tuple[str, str]] = []
    for one, other in itertools.pairwise(shown):
        whole_word = len(one) == width and not one.endswith(" ") and not other.startswith(" ")
        if whole_word:
            found.append((one, other))
    return found


def lines_of(num_ranks: int) -> Iterator[str]:
    """A run's lines as they are shown where nothing limits them."""
    out = io.StringIO()
    peaks = tuple(612_000_000 + 7_000_000 * rank for rank in range(num_ranks))
    slow = replace(
        train(20_000), data_wait_s=0.4, tokens_per_s=1234567.0, trained_tokens_per_s=654321.0
    )
    with ConsoleSink(
        Console(file=out, force_terminal=False, width=80), 100_000, profile=True
    ) as sink:
        for event in (replace(STARTED, num_ranks=num_ranks), train(10), slow, valid(200), ENDED):
            sink.emit(
                replace(event, peak_memory_bytes=peaks)
                if hasattr(event, "peak_memory_bytes")
                else event
            )
    yield from out.getvalue().splitlines()


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_no_width_parts_a_word(num_ranks: int) -> None:
    for line in lines_of(num_ranks):
        for width in WIDTHS:
            text = fitted(line, width)
            assert parted(rows(text, width), width) == [], (width, line)
            # Nothing is lost, and what is copied is one line.
            assert text.split() == line.split()
            assert "\n" not in text


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_a_report_is_one_row_of_eighty_columns(num_ranks: int) -> None:
    report = replace(
        train(10),
        peak_memory_bytes=tuple(612_000_000 + 7_000_000 * rank for rank in range(num_ranks)),
    )
    for width in WIDTHS:
        line = train_line(report, 600, 295.0, width)
        assert len(line) < width or width < 70
        fields = [field.split(" (")[0] for field in re.split(" {2,}", line)]
        assert {"step 10/600", "loss 2.310", "lr 1.0e-04", "tokens/s 213", "left 4m55s"} <= set(
            fields
        )
    assert "peak" in train_line(report, 600, 295.0, 80)


def test_trained_tokens_are_told_where_they_differ() -> None:
    assert "(trained 120)" in train_line(train(10), 600, 1.0)
    assert "trained" not in train_line(
        replace(train(10), trained_tokens_per_s=213.0, tokens_per_s=213.0), 600, 1.0
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_the_board_cuts_no_number(num_ranks: int) -> None:
    peaks = tuple(612_000_000 + 7_000_000 * rank for rank in range(num_ranks))
    for width in WIDTHS:
        out = io.StringIO()
        with ConsoleSink(
            Console(file=out, width=width, force_terminal=True, _environ={"TERM": "xterm"}), 600
        ) as sink:
            sink.emit(replace(train(10), peak_memory_bytes=peaks))
            shown = Console(file=io.StringIO(), width=width, record=True)
            shown.print(sink._board.render())
        text = shown.export_text()
        assert "…" not in text
        assert "612 MB" in text
        assert max(map(len, text.splitlines())) <= width


def test_what_is_copied_from_a_terminal_is_the_command() -> None:
    hint = "  what to do: run allhands cluster sync --hostfile hosts.json --model models/tiny --data data/mine again"
    text = fitted(hint, 60)
    assert len(text) > len(hint)
    assert " ".join(text.split()) == " ".join(hint.split())
    assert broken(hint, 60).split() == hint.split()
    assert max(map(len, broken(hint, 60).splitlines())) <= 60


def test_a_word_longer_than_a_row_is_whole_again_when_joined() -> None:
    path = "/very/long" * 30
    for width in WIDTHS:
        assert path in fitted(f"saved {path} at step 20", width)


# --- streams that are no screen -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "screen", "live"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "dumb"}, False, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"TERM": "xterm", "CI": "true"}, False, False),
        ({"TERM": "xterm", "CI": "false"}, True, True),
        ({"TERM": "xterm", "OMPI_COMM_WORLD_SIZE": "2"}, False, False),
        ({"TERM": "xterm", "PMI_SIZE": "2"}, False, False),
        # Our own launcher goes through mpirun, too, and hands its terminal over.
        ({"TERM": "xterm", "OMPI_COMM_WORLD_SIZE": "2", "ALLHANDS_RANK": "0"}, True, True),
    ],
)
def test_each_stream_is_judged_by_itself(environ: dict[str, str], screen: bool, live: bool) -> None:
    assert is_screen(Terminal(), environ) == screen
    assert is_read_live(Terminal(), environ) == live
    forced = {**environ, "FORCE_COLOR": "1"}
    assert not is_screen(io.StringIO(), forced)
    assert not is_read_live(io.StringIO(), forced)
    assert progress_console(io.StringIO(), forced).is_terminal is False
    closed = io.StringIO()
    closed.close()
    assert not is_screen(closed, environ)


def test_colours_in_a_file_only_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def printed(stream: io.StringIO, **environ: str) -> str:
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            console_for(stream).print("loss 2.5", style="bold red")
        return stream.getvalue()

    assert printed(io.StringIO()) == "loss 2.5\n"
    assert "\x1b[" in printed(io.StringIO(), FORCE_COLOR="1")
    assert "\x1b[" in printed(Terminal())
    for environ in (
        {"NO_COLOR": "1"},
        {"TERM": "dumb"},
        {"CI": "1"},
        {"NO_COLOR": "1", "FORCE_COLOR": "1"},
    ):
        assert printed(Terminal(), **environ) == "loss 2.5\n", environ


def test_a_file_is_as_wide_as_any_file_whatever_window_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((33, 10)))
    assert console_for(io.StringIO()).width == 80
    monkeypatch.setenv("COLUMNS", "120")
    assert console_for(io.StringIO()).width == 120


def test_a_table_loses_columns_and_no_figures() -> None:
    heads, row = (
        ("run", "loss", "tokens/s", "memory"),
        ("first of them", "2.345", "123456", "612 MB"),
    )
    for width in range(25, 60):
        out = io.StringIO()
        print_table(console_for(out, {}, width=width), heads, [row], ("memory", "tokens/s"))
        assert "2.345" in out.getvalue(), width
        assert "…" not in out.getvalue(), width


# --- the command in a terminal --------------------------------------------------------------------


def seen_at(width: int, *arguments: str | Path, env: dict[str, str]) -> tuple[list[str], bytes]:
    """The lines of a real terminal after ``allhands ARGUMENTS``, and what was written to it."""
    pyte = pytest.importorskip("pyte", reason="pyte is not installed: pip install '.[dev]'")
    master, inside = pty.openpty()
    ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 100, width, 0, 0))
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CI", "NO_COLOR", "COLUMNS")
    }
    command = [sys.executable, "-m", "allhands", *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, env={**environ, **env}
    ) as process:
        os.close(inside)
        written = b""
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:  # the last one who had it open has ended
                break
            if not piece:
                break
            written += piece
        assert process.wait(60) == 0, written.decode()
    os.close(master)
    screen: Any = pyte.Screen(width, 100)
    pyte.ByteStream(screen).feed(written)
    return [line for line in screen.display if line.strip()], written


@pytest.mark.slow
@pytest.mark.parametrize(("width", "num_ranks"), [(60, 1), (80, 2)])
def test_a_training_in_a_narrow_terminal(
    width: int, num_ranks: int, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    options = (
        "--iters",
        20,
        "--batch-size",
        4,
        "--num-layers",
        1,
        "--steps-per-report",
        5,
        "--steps-per-eval",
        10,
    )
    where = (
        "--model",
        tiny_model,
        "--data",
        tiny_data,
        "--adapter-path",
        tmp_path / "run",
        "-n",
        num_ranks,
    )
    call = ("train", *where, *map(str, options))
    shown, written = seen_at(
        width, *call, env={"TERM": "xterm-256color", "OPENBLAS_NUM_THREADS": "1"}
    )
    assert b"\x1b[" in written, "the board was shown"
    own = [
        line for line in shown if not line.startswith(("model ", "saved "))
    ]  # long names of directories
    assert any(line.startswith("step 20/20  loss ") for line in own)
    assert [pair for pair in parted(own, width) if "/" not in pair[0].split()[-1]] == []


@pytest.mark.slow
@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"NO_COLOR": "1"}, {"CI": "true"}])
def test_a_terminal_that_is_no_screen_gets_plain_lines(
    env: dict[str, str], tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    options = ("--iters", 4, "--batch-size", 4, "--num-layers", 1, "--steps-per-report", 2)
    call = (
        "train",
        "--model",
        tiny_model,
        "--data",
        tiny_data,
        "--adapter-path",
        tmp_path / "run",
        "-n",
        2,
    )
    _, written = seen_at(
        80, *call, *map(str, options), env={"TERM": "xterm", **env, "OPENBLAS_NUM_THREADS": "1"}
    )
    assert b"\x1b" not in written
    assert b"\r" not in written.replace(b"\r\n", b"")


@pytest.mark.slow
def test_a_script_under_mpirun_writes_plain_lines_to_a_file(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    mpi = find_mpi()
    if mpi is None or not usable_mpi():
        pytest.skip("no Open MPI here: pip install '.[mpi]'")
    script = tmp_path / "script.py"
    script.write_text(
        "import allhands\n"
        f"allhands.finetune(model={str(tiny_model)!r}, data={str(tiny_data)!r}, iters=4, batch_size=4, num_layers=1, "
        f"steps_per_report=2, adapter_path={str(tmp_path / 'run')!r})\n"
    )
    environ = {
        **os.environ,
        "TERM": "xterm-256color",
        "FORCE_COLOR": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environ |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [str(mpi.mpirun), "--oversubscribe", "-np", "2", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, env=environ, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert b"step 4/4  loss " in done.stdout
    assert b"\x1b" not in done.stdout + done.stderr
    assert b"\r" not in done.stdout.replace(b"\r\n", b"")


@pytest.mark.parametrize(
    "words",
    [
        "plan --device M1 --machines 1,2 --model demo --data demo --iters 2000",
        "plan --device M9 --model demo",
        "data prepare rows.jsonl --out out",
        "env",
    ],
)
def test_what_goes_into_a_pipe_has_no_blanks_at_the_ends_and_no_broken_sentence(
    words: str, tmp_path: Path
) -> None:
    rows = [
        {"prompt": f"What is {n}?", "completion": f"A number, and its name is {n}."}
        for n in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = call_allhands(*words.split(), cwd=tmp_path, env={"COLUMNS": ""})
    said = (done.stdout + done.stderr).splitlines()
    assert [line for line in said if line != line.rstrip()] == []
    assert [
        line for line in said if line.endswith((" the", " a", " of", " and", " for", ","))
    ] == []


@pytest.mark.parametrize("number", [1, 2])
def test_a_line_of_a_service_is_written_at_once_where_python_is_asked_for_that(number: int) -> None:
    """As images for containers do; what lies in a buffer is lost with the process, and threads may
    garble it.
    """
    code = (
        "import os, sys; from allhands.io.terminal import keep_going\n"
        f"stream = keep_going((sys.stdout, sys.stderr)[{number - 1}]); print('said', file=stream); os._exit(0)"
    )
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=60
    )
    assert (done.stdout, done.stderr)[number - 1] == "said\n"
