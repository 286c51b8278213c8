"""The first start over several computers: who is waited for, who is not, and what a person is told
of it.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from allhands.cluster.membership import Roster
from allhands.cluster.outcome import Outcome
from allhands.cluster.ranks import LaunchSpec, Place
from allhands.cluster.reaper import Reaper
from allhands.cluster.ssh import SshTrouble
from allhands.cluster.supervisor import (
    SuperviseOptions,
    SupervisorEvent,
    SupervisorSeams,
    supervise,
)
from allhands.observe.journal import Journal, read_events

UNKNOWN = SshTrouble(
    "ssh: Could not resolve hostname b: Name or service not known", "correct the name", lasting=True
)
REFUSED = SshTrouble(
    "ssh: connect to host c port 22: Connection refused", "start the ssh server there"
)
SILENT = SshTrouble(None, "look whether it is switched on")


def roster(*names: str, possible: int = 3, **troubles: SshTrouble) -> Roster:
    places, every = tuple(Place(name, 1) for name in names), ("a", "b", "c")
    absent = tuple(name for name in every if name not in names)
    return Roster(
        names, places, every, apart=True, absent=absent, troubles=troubles, possible=possible
    )


class Members:
    """Rosters in a row, the last one for ever."""

    def __init__(self, *rosters: Roster) -> None:
        self._rosters = deque(rosters)

    def roster(self) -> Roster:
        return self._rosters.popleft() if len(self._rosters) > 1 else self._rosters[0]

    def leave_out(self, seats: Iterable[str]) -> None:
        raise AssertionError("nobody is to blame")

    def changed(self, current: Sequence[Place]) -> str | None:
        return None


@dataclass
class Finished:
    """An attempt that has nothing to do."""

    def run(self, poll: Callable[[], None]) -> Outcome:
        return Outcome(started=True, step=1)

    def request_regroup(self) -> None:
        raise AssertionError("nobody came")


@dataclass
class Stage:
    """Starts jobs on a clock that only pauses move."""

    directory: Path
    clock: float = 0.0
    interrupt_at: float = float("inf")
    started: list[int] = field(default_factory=list[int])
    told: list[SupervisorEvent] = field(default_factory=list[SupervisorEvent])

    def run(self, *rosters: Roster, min_ranks: int | None = None, max_restarts: int = 3) -> int:
        spec = LaunchSpec(["train"], 3, "ring", self.directory / "logs")
        options = SuperviseOptions(max_restarts, min_ranks)
        seams = SupervisorSeams(self._make, lambda: self.clock, self._sleep)
        journal = Journal(self.directory / "events.jsonl")
        try:
            return supervise(
                spec,
                self.told.append,
                options=options,
                members=Members(*rosters),
                journal=journal,
                seams=seams,
            )
        finally:
            journal.close()

    def _make(
        self,
        spec: LaunchSpec,
        run_dir: Path,
        signals: deque[int],
        events: Callable[[SupervisorEvent], None],
        reaper: Reaper,
        slack: float,
    ) -> Finished:
        self.started.append(spec.num_processes)
        return Finished()

    def _sleep(self, seconds: float) -> None:
        self.clock += seconds
        if self.clock >= self.interrupt_at:
            self.interrupt_at = float("inf")
            signal.raise_signal(signal.SIGTERM)

    def messages(self, kind: str) -> list[str]:
        return [event.message for event in self.told if event.kind == kind]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_name_that_nobody_knows_ends_it_at_once(stage: Stage) -> None:
    assert stage.run(roster("a", "c", possible=2, b=UNKNOWN)) == 7
    assert (stage.clock, stage.started) == (0.0, [])
    (event,) = stage.told
    problem = "2 of at least 3 ranks are there, b does not answer (ssh: Could not resolve hostname b: Name or service"
    assert event.kind == "given up"
    assert event.message == f"not started: {problem} not known)"
    assert event.explanation == f"{event.message}\n  what to do: correct the name"
    (record,) = read_events(stage.directory)
    assert (record["message"], record["exit_code"]) == (event.message, 7)


def test_who_may_still_come_is_waited_for_with_the_reason(stage: Stage) -> None:
    assert stage.run(roster("a", "b", c=REFUSED)) == 7
    assert stage.clock == pytest.approx(30.0)
    waiting = "2 of at least 3 ranks are there, c does not answer (ssh: connect to host c port 22: Connection refused)"
    assert stage.messages("waiting") == [f"waiting: {waiting}"]
    assert (
        stage.told[-1].explanation
        == f"not started: {waiting}\n  what to do: start the ssh server there"
    )


def test_it_begins_as_soon_as_they_have_come(stage: Stage) -> None:
    assert (
        stage.run(roster("a", "b", c=SILENT), roster("a", "b", c=REFUSED), roster("a", "b", "c"))
        == 0
    )
    assert (stage.started, stage.clock) == ([3], pytest.approx(4.0))
    texts = (
        "c does not answer",
        "c does not answer (ssh: connect to host c port 22: Connection refused)",
    )
    assert stage.messages("waiting") == [
        f"waiting: 2 of at least 3 ranks are there, {text}" for text in texts
    ]


def test_reasons_that_alternate_are_told_once_each(stage: Stage) -> None:
    stage.run(
        *[roster("a", "b", c=trouble) for trouble in (SILENT, REFUSED) * 4], roster("a", "b", "c")
    )
    assert len(stage.messages("waiting")) == 2


def test_others_may_still_make_up_for_one_that_cannot_come(stage: Stage) -> None:
    here = roster("a", possible=2, b=UNKNOWN, c=SILENT)
    assert stage.run(here, here, roster("a", "c", possible=2, b=UNKNOWN), min_ranks=2) == 0
    assert (stage.started, stage.clock) == ([2], pytest.approx(4.0))
    assert (
        stage.messages("waiting")[-1]
        == f"starting without a computer that may come later: {_absent_b()}"
    )


def test_what_will_not_mend_itself_comes_first(stage: Stage) -> None:
    stage.run(roster("a", possible=2, c=SILENT, b=UNKNOWN))
    assert (stage.told[-1].explanation or "").endswith("what to do: correct the name")


def test_without_restarts_nobody_is_waited_for(stage: Stage) -> None:
    assert stage.run(roster("a", "b", c=SILENT), max_restarts=0) == 7
    assert stage.clock == 0.0


def test_a_stop_while_computers_are_waited_for_at_first(stage: Stage) -> None:
    stage.interrupt_at = 3.0
    assert stage.run(roster("a", "b", c=REFUSED)) == 143
    assert stage.messages("cancelling") == ["stopped before the first start"]
    assert stage.told[-1].exit_code == 143


def _absent_b() -> str:
    return f"b does not answer ({UNKNOWN.reason})"
