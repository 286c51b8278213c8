"""Conversations and comparisons over a pipeline: the words of one process, and clean ends."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from tiny import run_allhands, write_chat_data, write_model

PIPELINE = ("--strategy", "pipeline", "-n", "2", "--backend", "ring")
LINES = "What is dew?\n\nAnd fog?\n/reset\n/what\nWhat is dew?\n/exit\nnever asked\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("talk")
    write_model(folder / "model", layers=4, hidden=64)
    write_chat_data(folder / "data")
    where = (
        "--model",
        folder / "model",
        "--data",
        folder / "data",
        "--adapter-path",
        folder / "run",
    )
    how = "--train --iters 60 --batch-size 8 --num-layers -1 --learning-rate 0.003 --val-batches 0 --seed 3 --mask-prompt"
    done = run_allhands("train", *where, *how.split())
    assert done.returncode == 0, done.stderr
    return folder


class Session:
    """``allhands chat`` at a terminal of its own."""

    def __init__(self, place: Path, *more: str) -> None:
        self.screen, inside = pty.openpty()
        command = [sys.executable, "-m", "allhands", "chat", "--model", str(place / "model"), *more]
        self.process = subprocess.Popen(
            command,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "TERM": "dumb"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(inside)
        self.heard = ""
        self.all = list[psutil.Process]()

    def until(self, words: str, timeout_s: float = 60) -> str:
        """What is on the screen up to ``words``, which are taken away."""
        deadline = time.monotonic() + timeout_s
        while words not in self.heard:
            ready, _, _ = select.select(
                [self.screen], [], [], max(0.0, deadline - time.monotonic())
            )
            assert ready, self.heard
            try:
                self.heard += os.read(self.screen, 65536).decode(errors="replace")
            except OSError:  # Linux says so where nobody has the terminal any more
                raise AssertionError(self.heard) from None
        before, _, self.heard = self.heard.partition(words)
        return before

    def type(self, words: str) -> None:
        os.write(self.screen, words.encode())

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks."""
        found: dict[int, psutil.Process] = {}
        self.all = psutil.Process(self.process.pid).children(recursive=True)
        for each in self.all:
            with suppress(psutil.Error, KeyError):
                if "allhands" in each.cmdline():  # and no compiler that a rank has started
                    found[int(each.environ()["ALLHANDS_RANK"])] = each
        return found

    def end(self, timeout_s: float = 30) -> tuple[int, str]:
        """The exit code, and the rest of the screen; no process is left."""
        code, told = self.process.wait(timeout_s), self.heard
        with suppress(OSError):
            while piece := os.read(self.screen, 65536):
                told += piece.decode(errors="replace")
        _, left = psutil.wait_procs(self.all, timeout=10)
        assert not left
        return code, told


@contextmanager
def talking(place: Path, *more: str) -> Generator[Session]:
    session = Session(place, *more)
    try:
        session.until(">> ")
        session.ranks()
        yield session
    finally:
        session.process.kill()
        session.process.wait()
        for each in session.all:
            with suppress(psutil.Error):
                each.kill()
        os.close(session.screen)


def piped(place: Path, *more: str | Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "allhands",
        "chat",
        "--model",
        place / "model",
        "--max-tokens",
        "12",
        *more,
    ]
    return subprocess.run(
        command, input=LINES, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("--temp", "0"),
        ("--temp", "0.9", "--top-p", "0.95", "--seed", "5", "--system-prompt", "Be kind."),
    ],
)
def test_ranks_say_what_one_process_says(place: Path, more: tuple[str, ...]) -> None:
    adapter = ("--adapter-path", place / "run")
    one, two = piped(place, *adapter, *more), piped(place, *adapter, *more, *PIPELINE)
    assert one.returncode == two.returncode == 0, two.stderr
    assert two.stdout == one.stdout
    assert len(one.stdout) > 20
    for words in ("(forgotten)", "no command /what"):
        assert words in two.stderr


@pytest.mark.slow
def test_a_comparison_is_that_of_one_process(place: Path, tmp_path: Path) -> None:
    where = ("--model", place / "model", "--data", place / "data", "--adapter-path", place / "run")
    how = ("--num-prompts", "5", "--max-tokens", "16")
    found: list[str] = []
    three = ("--strategy", "pipeline", "-n", "3", "--pp-split", "1,2,1")
    for name, more in (("one", ()), ("two", PIPELINE), ("three", three)):
        out = tmp_path / f"{name}.json"
        done = run_allhands("compare", *where, *how, "--out", out, *more)
        assert done.returncode == 0, done.stderr
        found.append(out.read_text())
    assert found[0] == found[1] == found[2]
    answers = json.loads(found[0])
    assert any(answers["after"])
    assert answers["before"] != answers["after"]


@pytest.mark.slow
def test_keys_at_a_terminal_mean_what_they_mean_in_one_process(place: Path) -> None:
    with talking(place, "--max-tokens", "1000000", *PIPELINE) as session:
        for _ in range(2):
            session.type("What is dew?\n")
            session.until("dew?")  # as the terminal echoes it
            session.until("\n")
            session.until("\x1c")  # the answer, which does not end by itself, has begun
            session.type("\x03")
            session.until("(stopped)")
            session.until(">> ")
        session.type("half a line")
        session.until("half a line")
        time.sleep(
            0.5
        )  # Python's own input() misses a signal that comes just before it waits for a key
        session.type("\x03")
        session.until("Ctrl-C stops an answer")
        session.until(">> ")
        session.type("/reset\n")
        session.until("(forgotten)")
        session.type("\x04")
        assert session.end()[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.4, 0.8])
def test_ctrl_c_while_ranks_start_is_told_once(place: Path, after_s: float) -> None:
    session = Session(place, *PIPELINE)
    try:
        time.sleep(after_s)
        session.type("\x03")
        code, told = session.end()
        assert code in (130, -signal.SIGINT)  # the latter before allhands has begun
        assert told.count("allhands: interrupted") == 1 or code != 130, told
        assert "Traceback" not in told
    finally:
        session.process.kill()
        os.close(session.screen)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("answering", [False, True], ids=["at the prompt", "in an answer"])
def test_a_rank_that_dies_ends_the_session(place: Path, rank: int, answering: bool) -> None:
    with talking(place, "--max-tokens", "1000000", *PIPELINE) as session:
        if answering:
            session.type("What is dew?\n")
            session.until("dew?")
            time.sleep(0.5)
        session.ranks()[rank].kill()
        code, told = session.end()
        assert code == 128 + signal.SIGKILL
        assert told.count("allhands: error:") == 1
        assert f"rank {rank}" in told
        assert "Traceback" not in told
        assert "--grad-checkpoint" not in told  # an option of training


@pytest.mark.slow
def test_a_terminal_that_is_gone_ends_all_ranks(place: Path) -> None:
    with talking(place, "--max-tokens", "1000000", *PIPELINE) as session:
        session.type("What is dew?\n")
        session.until("dew?")
        session.process.kill()
        _, left = psutil.wait_procs(session.all, timeout=20)
        assert not left


@pytest.mark.parametrize(
    ("verb", "more", "code", "words"),
    [
        (
            "generate",
            (*PIPELINE, "-p", "x", "--chat-template", "chatml", "--ignore-chat-template"),
            2,
            "--chat-temp",
        ),
        ("generate", (*PIPELINE, "-p", "x", "--adapter-path", "none"), 4, "none"),
        ("generate", (*PIPELINE, "-p", " "), 2, "--prompt"),
        ("chat", ("--pp-split", "1,3"), 2, "--pp-split"),
        ("chat", (*PIPELINE, "--pp-split", "3,3"), 2, "--pp-split"),
        ("chat", (*PIPELINE, "--adapter-path", "none"), 4, "none"),
        ("compare", ("-n", "2", "--adapter-path", "none"), 2, "--num-ranks"),
        ("compare", PIPELINE, 2, "--adapter-path"),
    ],
)
def test_what_cannot_be_asked_is_one_message(
    place: Path, verb: str, more: tuple[str, ...], code: int, words: str
) -> None:
    done = run_allhands(verb, "--model", place / "model", *more, cwd=place)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
