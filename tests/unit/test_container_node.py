"""One computer's ranks of several: failures, deadlines while other computers are not seen, and
stops.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from allhands.cluster import attempt, node, processes
from allhands.cluster.node import run_node
from allhands.cluster.place import MeetingPoint
from allhands.cluster.ranks import Beat, LaunchSpec, Marks, RankExit, RankProcesses
from allhands.cluster.watch import Limits, ProgressWatch
from allhands.errors import DistributedError

TRAINING = Marks(True, True, None, Beat(5, "compute", 1, 0.0))


@dataclass
class Ranks(RankProcesses):
    """Ranks 2 and 3 of four, as the test wants them."""

    ends: list[RankExit] = field(default_factory=list)
    errors: dict[int, dict[str, Any]] = field(default_factory=dict)
    memory: bool = False
    mark: Marks = TRAINING
    codes: tuple[int, ...] = ()  # of both ranks, when they are told to stop
    stop: int = 0  # sent to this process when the ranks are looked at first
    again: bool = False
    signals: list[tuple[int, int]] = field(default_factory=list)

    def exits(self) -> list[RankExit]:
        return self.ends

    def marks(self, rank: int) -> Marks:
        for number in range((1 + self.again) * bool(self.stop)):
            time.sleep(0.6 * number)  # at once it would be an echo of the first
            os.kill(os.getpid(), self.stop)
        self.stop = 0
        return self.mark

    def signal(self, rank: int, number: int) -> bool:
        self.signals.append((rank, number))
        if self.codes:
            self.ends.append(RankExit(rank, self.codes[rank - 2], time.monotonic()))
        return True

    def tell(self, word: str) -> None:
        assert word == "failed"

    def host(self, rank: int) -> str:
        return "here"

    def lost_hosts(self) -> list[str]:
        return []

    def error(self, rank: int) -> dict[str, Any] | None:
        return self.errors.get(rank)

    def log_path(self, rank: int) -> Path:
        return Path(f"rank-{rank}.log")

    def log_tail(self, rank: int) -> tuple[str, ...]:
        return ("one", "two", "three", f"last of {rank}")

    def out_of_memory(self, rank: int) -> bool:
        return self.memory

    def kill(self) -> None:
        pass


class NodeEnd(NamedTuple):
    code: int
    reason: str | None


MEETING = MeetingPoint("127.0.0.1", (1,), "job")
Run = Callable[..., tuple[NodeEnd, list[str]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``Ranks`` to their end; the reason and what was said meanwhile."""

    def run(ranks: Ranks, **options: Any) -> tuple[NodeEnd, list[str]]:
        said: list[str] = []
        monkeypatch.setattr(node, "meet", lambda *_: ("127.0.0.1:1",) * 4)
        monkeypatch.setattr(processes, "start", lambda *_: ranks)
        spec = LaunchSpec(["true"], 4, "ring", tmp_path / "logs", **options)
        return NodeEnd(*run_node(spec, range(2, 4), MEETING, said.append)), said

    return run


def ended(*codes: int) -> list[RankExit]:
    return [RankExit(2 + i, code, time.monotonic() - 50 + i) for i, code in enumerate(codes)]


@pytest.mark.parametrize(
    ("elsewhere", "silence", "told"), [(900.0, 899.0, False), (900.0, 901.0, True), (0, 31, True)]
)
def test_ranks_that_wait_for_other_computers_get_time(
    elsewhere: float, silence: float, told: bool
) -> None:
    spec = LaunchSpec(["true"], 4, "ring", Path("/nowhere"), hang_timeout_s=30.0)
    watch = ProgressWatch(Limits.of(spec, 1.0, elsewhere))
    marks = {rank: Marks(True, True, None, Beat(5, "reduce", 1, 10.0)) for rank in (2, 3)}
    for second in range(10, int(10 + silence), 1):  # nobody slept meanwhile
        assert watch.check(float(second), marks, [2, 3]) is None
    assert (watch.check(10.0 + silence, marks, [2, 3]) is not None) is told


def test_a_rank_that_stands_still_is_named(run: Run) -> None:
    ranks = Ranks(mark=Marks(True, True, None, Beat(5, "compute", 1, time.monotonic() - 40)))
    end, _ = run(ranks, hang_timeout_s=30.0)
    assert end.code == 7
    assert end.reason is not None
    assert end.reason.startswith("rank 2 on here made no progress for 40")
    assert end.reason.endswith("at step 5, compute\n  two\n  three\n  last of 2")


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (Marks(), "did not finish starting"),
        (Marks(ready=True), "waited for ranks on other computers"),
    ],
)
def test_starting_has_a_deadline(
    run: Run, monkeypatch: pytest.MonkeyPatch, mark: Marks, words: str
) -> None:
    monkeypatch.setattr(attempt, "_ELSEWHERE_S", 3.0)
    begun = time.monotonic()
    end, _ = run(Ranks(mark=mark), start_deadline_s=0.1)
    assert end.code == 7
    assert words in (end.reason or "")
    assert (time.monotonic() - begun > 3.0) is mark.ready


def test_the_cause_is_named_and_not_its_consequence(run: Run) -> None:
    end, _ = run(
        Ranks(
            ended(8, 4),
            {3: {"type": "ModelError", "message": "not found", "text": "model: not found"}},
        )
    )
    assert (end.code, end.reason) == (4, "rank 3: model: not found")
    end, _ = run(Ranks(ended(-9), memory=True))
    assert end.code == 137
    assert end.reason is not None
    assert end.reason.startswith("rank 2 was killed by SIGKILL (out of memory)")
    assert end.reason.endswith("\n  two\n  three\n  last of 2")


@pytest.mark.parametrize(("codes", "code"), [((0, 0), 0), ((143, 143), 143), ((130, 130), 130)])
def test_a_stop_elsewhere_is_no_failure(run: Run, codes: tuple[int, int], code: int) -> None:
    end, _ = run(Ranks(ended(*codes)))
    assert (end.code, end.reason) == (code, None)


def test_a_lost_peer_is_a_failure(run: Run) -> None:
    end, _ = run(Ranks(ended(8, 8)))
    assert end.code == 8
    assert end.reason is not None


@pytest.mark.parametrize(
    ("number", "codes", "code"),
    [
        (signal.SIGTERM, (143, 143), 143),
        (signal.SIGINT, (130, 8), 130),
        (signal.SIGUSR1, (143, -signal.SIGTERM), 143),
    ],
)
def test_a_stop_is_passed_on_once_and_is_no_failure(
    run: Run, number: int, codes: tuple[int, ...], code: int
) -> None:
    ranks = Ranks(codes=codes, stop=number)
    end, said = run(ranks)
    assert (end.code, end.reason) == (code, None)
    assert [rank for rank, _ in ranks.signals] == [2, 3]
    assert len(said) == 1


def test_a_second_stop_ends_at_once(run: Run) -> None:
    begun = time.monotonic()
    end, said = run(Ranks(stop=signal.SIGTERM, again=True))
    assert (end.code, end.reason) == (143, None)
    assert "ended at once" in said[-1]
    assert time.monotonic() - begun < 3


def test_a_stop_before_the_start_waits_for_little(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "_START_GRACE_S", 0.2)
    end, _ = run(Ranks(mark=Marks(), stop=signal.SIGTERM))
    assert end.code == 143


def test_a_meeting_that_fails_is_the_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(*_: object) -> tuple[str, ...]:
        raise DistributedError("rank 1 was started for 3 ranks", code="world-size-mismatch")

    monkeypatch.setattr(node, "meet", meet)
    spec = LaunchSpec(["true"], 4, "ring", tmp_path / "logs")
    begun = time.monotonic()
    with pytest.raises(DistributedError, match="for 3 ranks"):
        run_node(spec, range(2, 4), MEETING, print)
    assert time.monotonic() - begun < 5
