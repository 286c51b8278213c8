"""What a process without a supervisor says when it is asked to stop, and when it is asked twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_PROGRAM = """
import os, pathlib, sys, time
from allhands.cluster.environment import recognise
from allhands.cluster.worker import install
with install(recognise({{}}), {{}}) as worker:
    said = lambda text: print(text, flush=True)
    worker.announce_stops(said, {way})
    {started}
    pathlib.Path("ready").touch()
    try:
        while True:
            time.sleep(0.05)
    except KeyboardInterrupt:
        time.sleep(60)
"""
_STARTED = "worker.mark_started()"
_WAY = 'lambda: "to go on from step 20: the same command with --resume"'
_LOST = "allhands: ended at once; what was not saved is lost\n"


def stopped(
    directory: Path,
    *numbers: int,
    way: str = _WAY,
    started: str = _STARTED,
    pause_s: float = 0.7,
) -> tuple[int, str, str, float]:
    """Exit code, output, errors, and the seconds from the last signal to the end."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ALLHANDS_", "OMPI_", "MLX_"))
    }
    command = [sys.executable, "-c", _PROGRAM.format(way=way, started=started)]
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 30
        while not (directory / "ready").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr
            time.sleep(0.02)
        for number in numbers:
            process.send_signal(number)
            time.sleep(pause_s)  # usually longer than the watch sleeps: each counts for itself
        began = time.monotonic()
        if len(numbers) < 2 or pause_s < 0.5:
            time.sleep(0.7 - pause_s)
            process.kill()
        out, err = process.communicate(timeout=20)
    return process.returncode, out, err, time.monotonic() - began


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGINT, "stopping after this step; press Ctrl-C again to stop at once\n"),
        (signal.SIGTERM, "stopping after this step\n"),
        (signal.SIGUSR1, "stopping after this step\n"),
    ],
)
def test_only_who_pressed_ctrl_c_is_told_to_press_it_again(
    tmp_path: Path, number: int, said: str
) -> None:
    code, out, err, _ = stopped(tmp_path, number)
    assert (code, out, err) == (-signal.SIGKILL, said, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_an_echo_of_one_request_is_no_second_request(tmp_path: Path, number: int) -> None:
    """``timeout`` sends its signal to the command, and at once again to the command's group."""
    code, out, err, _ = stopped(tmp_path, number, number, pause_s=0.05)
    assert (code, out.count("stopping"), err) == (-signal.SIGKILL, 1, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_second_one_ends_it_and_says_how_to_go_on(
    tmp_path: Path, number: int, code: int
) -> None:
    found, _, err, _ = stopped(tmp_path, signal.SIGTERM, number)
    assert found == code
    assert err == f"{_LOST}  to go on from step 20: the same command with --resume\n"


@pytest.mark.parametrize("way", ["None", "lambda: None", "lambda: 1 / 0", "lambda: time.sleep(60)"])
def test_the_end_does_not_hang_on_the_advice(tmp_path: Path, way: str) -> None:
    code, _, err, seconds = stopped(tmp_path, signal.SIGINT, signal.SIGINT, way=way)
    assert (code, err.startswith(_LOST)) == (130, True)
    assert "to go on" not in err
    assert "Traceback" not in err
    assert seconds < 5


def test_before_the_start_there_is_nothing_to_say_of_it(tmp_path: Path) -> None:
    code, _, err, _ = stopped(tmp_path, signal.SIGINT, signal.SIGINT, started="")
    assert code == 130
    assert "to go on" not in err
    assert err.startswith("allhands: ")
