"""The judgement over one computer's ranks of several: what is a failure, what is patience, what is a stop."""

from __future__ import annotations

import signal
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from allhands.cluster.meeting import Patience
from allhands.cluster.node import NodeJob, _Node
from allhands.cluster.place import MeetingPoint
from allhands.cluster.ranks import Beat, LaunchSpec, Marks, Phase, RankExit
from allhands.cluster.reaper import Reaper
from allhands.cluster.watch import Limits, ProgressWatch


@dataclass
class Ranks:
    """Ranks 2 and 3 of four, as the test wants them."""

    ends: list[RankExit] = field(default_factory=list)
    errors: dict[int, dict[str, Any]] = field(default_factory=dict)
    signals: list[tuple[int, int]] = field(default_factory=list)
    memory: bool = False

    def exits(self) -> list[RankExit]:
        return self.ends

    def signal(self, rank: int, number: int) -> bool:
        self.signals.append((rank, number))
        return True

    def error(self, rank: int) -> dict[str, Any] | None:
        return self.errors.get(rank)

    def log_tail(self, rank: int) -> tuple[str, ...]:
        return ("one", "two", "three", f"last of {rank}")

    def out_of_memory(self, rank: int) -> bool:
        return self.memory


def node(ranks: Ranks, **options: Any) -> tuple[_Node, list[str]]:
    said: list[str] = []
    spec = LaunchSpec(["true"], 4, "ring", Path("/nowhere"), start_deadline_s=100.0, stop_grace_s=20.0, **options)
    job = NodeJob(spec, 1, 2, MeetingPoint("127.0.0.1", (1,), "job"), Patience(), said.append)
    made = _Node(job, deque(), cast(Reaper, None), Path("/nowhere"))
    made.ranks, made.began = cast(Any, ranks), 0.0
    return made, said


def at(phase: Phase, since: float, step: int = 5, count: int = 1) -> Marks:
    return Marks(True, True, None, Beat(step, phase, count, since))


def test_its_ranks_are_a_block() -> None:
    made, _ = node(Ranks())
    assert list(made.job.own) == [2, 3]


@pytest.mark.parametrize(
    ("timeout", "silence", "told"), [(None, 899.0, False), (None, 901.0, True), (30.0, 31.0, True)]
)
def test_who_waits_for_other_computers_gets_time(timeout: float | None, silence: float, told: bool) -> None:
    made, _ = node(Ranks(), hang_timeout_s=timeout)
    watch = ProgressWatch(Limits.of(made.job.spec, 1.0))
    marks = {rank: at("reduce", 10.0) for rank in (2, 3)}
    for second in range(10, int(10 + silence), 1):  # nobody slept meanwhile
        assert made._stalled(float(second), watch, marks, [2, 3]) is None
    found = made._stalled(10.0 + silence, watch, marks, [2, 3])
    assert (found is not None) is told
    assert found is None or "it waits for ranks on other computers" in found


def test_who_stands_still_by_itself_does_not() -> None:
    made, _ = node(Ranks(), hang_timeout_s=30.0)
    watch = ProgressWatch(Limits.of(made.job.spec, 1.0))
    marks = {2: at("compute", 10.0), 3: at("reduce", 10.0)}
    found = [made._stalled(float(second), watch, marks, [2, 3]) for second in range(10, 42)]
    assert found[:30] == [None] * 30
    assert found[31] is not None
    assert "rank 2 made no progress for 31 s at step 5, compute" in found[31]
    assert "last of 2" in found[31]
    assert "one" not in found[31]


def test_starting_has_a_deadline_and_waiting_for_others_a_longer_one() -> None:
    made, _ = node(Ranks())
    slow, ready, busy = Marks(), Marks(ready=True), Marks(busy_time=150.0)
    assert made._not_started(99.0, {2: slow, 3: ready}, [2, 3]) is None
    assert "rank 2 did not finish starting" in (made._not_started(101.0, {2: slow, 3: ready}, [2, 3]) or "")
    assert made._not_started(899.0, {2: ready, 3: ready}, [2, 3]) is None
    assert "waited for ranks on other computers" in (made._not_started(901.0, {2: ready, 3: ready}, [2, 3]) or "")
    assert made._not_started(249.0, {2: slow, 3: busy}, [2, 3]) is None  # one at work excuses the other


def test_the_cause_is_named_and_not_its_consequence() -> None:
    ends = [RankExit(2, 8, 1.0), RankExit(3, 4, 1.5)]
    made, _ = node(Ranks(ends, {3: {"text": "model: not found"}}))
    end = made._judge()
    assert (end.code, end.reason) == (4, "rank 3: model: not found")
    killed, _ = node(Ranks([RankExit(2, -9, 1.0)], memory=True))
    end = killed._judge()
    assert end.code == 137
    assert end.reason is not None
    assert end.reason.startswith("rank 2 was killed by SIGKILL (out of memory)\n  two\n  three\n  last of 2")


@pytest.mark.parametrize(
    ("stop", "codes", "code"),
    [
        (0, (0, 0), 0),
        (0, (143, 143), 143),  # somebody has stopped a rank elsewhere
        (0, (0, 130), 130),
        (signal.SIGTERM, (143, 143), 143),
        (signal.SIGINT, (130, 8), 130),
        (signal.SIGUSR1, (143, -signal.SIGTERM), 143),
    ],
)
def test_a_stop_is_no_failure(stop: int, codes: tuple[int, int], code: int) -> None:
    made, _ = node(Ranks([RankExit(2 + i, one, 1.0) for i, one in enumerate(codes)]))
    made.stop = stop
    end = made._judge()
    assert (end.code, end.reason) == (code, None)


def test_a_lost_peer_is_a_failure_unless_it_was_a_stop() -> None:
    made, _ = node(Ranks([RankExit(2, 8, 1.0), RankExit(3, 8, 1.0)]))
    assert made._judge().code == 8


def test_a_stop_is_passed_on_once_and_waited_for() -> None:
    ranks = Ranks()
    made, said = node(ranks)
    marks = {2: at("compute", 0.0), 3: at("compute", 0.0)}
    made.signals.append(signal.SIGTERM)
    assert made._pass_on(100.0, [2, 3], marks)
    assert made._pass_on(119.0, [2, 3], marks)
    assert sorted(ranks.signals) == [(2, signal.SIGTERM), (3, signal.SIGTERM)]
    assert not made._pass_on(120.5, [2, 3], marks)
    assert said == ["the ranks are told to save and to end"]


def test_a_second_stop_ends_at_once_and_before_the_start_there_is_little_to_wait_for() -> None:
    made, _ = node(Ranks())
    made.signals.extend([signal.SIGTERM, signal.SIGINT])
    assert not made._pass_on(0.0, [2, 3], {2: at("compute", 0.0), 3: at("compute", 0.0)})
    early, _ = node(Ranks())
    early.signals.append(signal.SIGTERM)
    assert early._pass_on(0.0, [2, 3], {2: Marks(), 3: Marks()})
    assert not early._pass_on(4.0, [2, 3], {2: Marks(), 3: Marks()})


def test_a_meeting_that_fails_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from allhands.cluster import node as module
    from allhands.errors import DistributedError

    def meet(*_: object) -> tuple[str, ...]:
        raise DistributedError("rank 1 was started for 3 ranks")

    monkeypatch.setattr(module, "meet", meet)
    made, _ = node(Ranks())
    begun = time.monotonic()
    with pytest.raises(DistributedError, match="for 3 ranks"):
        made._meet([1, 2])
    assert time.monotonic() - begun < 5
