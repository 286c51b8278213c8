"""Lines of several logs, told as they come, each with its rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from allhands.cluster.tails import Tails, tagged

LONG_S = 20.0


class Told:
    """What was told, in order."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, bytes]] = []

    def __call__(self, rank: int, line: bytes) -> None:
        self.lines.append((rank, line))

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_S
        while not until():
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.01)


def _add(path: Path, text: bytes) -> None:
    with path.open("ab") as stream:
        stream.write(text)


def test_lines_come_whole_and_in_order_from_logs_that_come_later(tmp_path: Path) -> None:
    logs = {rank: tmp_path / f"rank-{rank}.log" for rank in range(2)}
    _add(logs[0], b"of an earlier run\n")
    told = Told()
    with Tails(logs, told):
        _add(logs[0], b"one\ntw")
        told.wait(lambda: (0, b"one") in told.lines)
        _add(logs[1], b"\xff other\n")  # not text in UTF-8: passed on as it is
        _add(logs[0], b"o\n\n")
        told.wait(lambda: len(told.lines) == 4)
        _add(logs[1], b"the last, without an end")
    assert [line for rank, line in told.lines if rank == 0] == [b"one", b"two", b""]
    assert [line for rank, line in told.lines if rank == 1] == [
        b"\xff other",
        b"the last, without an end",
    ]


def test_a_question_is_shown_before_its_line_ends(tmp_path: Path) -> None:
    log, told = tmp_path / "log", Told()
    with Tails({3: log}, told):
        _add(log, b"Continue? ")
        told.wait(lambda: told.lines == [(3, b"Continue? ")])
        _add(log, b"yes\n")
        told.wait(lambda: len(told.lines) == 2)
    assert told.lines == [(3, b"Continue? "), (3, b"yes")]


def test_endless_lines_take_no_endless_memory(tmp_path: Path) -> None:
    log, told = tmp_path / "log", Told()
    with Tails({0: log}, told):
        _add(log, b"x" * 200_000 + b"\n")
    assert b"".join(line for _, line in told.lines) == b"x" * 200_000
    assert max(len(line) for _, line in told.lines) <= 1 << 17


@pytest.mark.parametrize(
    ("line", "host", "shown"),
    [
        (b"loss 1.5", None, b"[rank 1] loss 1.5\n"),
        (b"loss 1.5", "node1", b"[rank 1 node1] loss 1.5\n"),
        (b"\r10 %\r50 %\r100 %\r", None, b"[rank 1] 100 %\n"),
        (b"", None, b"[rank 1] \n"),
    ],
)
def test_each_line_says_whose_it_is(line: bytes, host: str | None, shown: bytes) -> None:
    assert tagged(1, line, host) == shown
