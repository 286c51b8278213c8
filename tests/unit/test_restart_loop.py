"""Attempt after attempt, with attempts and a clock of the test's own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from allhands.cluster.connection import HostError
from allhands.cluster.membership import Roster
from allhands.cluster.outcome import Fault, Outcome
from allhands.cluster.ranks import LaunchSpec, Place
from allhands.cluster.reaper import Reaper
from allhands.cluster.supervisor import (
    SuperviseOptions,
    SupervisorEvent,
    SupervisorSeams,
    supervise,
)
from allhands.errors import DistributedError
from allhands.observe.journal import Journal, read_events

Script = Outcome | Exception | Callable[[], Outcome]
_KILLED = Fault("killed", 1, "here", "rank 1 was killed by SIGKILL", 137, step=7)
_ERROR = Fault("error", 1, "here", "rank 1 exited with code 1", 1, step=7, error="ValueError: no")
_DONE = Outcome(started=True, step=10)


def failed(fault: Fault, step: int | None = None) -> Outcome:
    return Outcome(replace(fault, step=step), started=True, step=step)


class Members:
    """Rosters in a row, the last one for ever; ``reasons`` to regroup likewise."""

    def __init__(self, *rosters: Roster, reasons: Sequence[str | None] = (None,)) -> None:
        self._rosters = deque(rosters)
        self._reasons = deque(reasons)
        self.left_out: list[str] = []
        self.currents: list[tuple[str, ...]] = []

    def roster(self) -> Roster:
        return self._rosters.popleft() if len(self._rosters) > 1 else self._rosters[0]

    def leave_out(self, seats: Iterable[str]) -> None:
        self.left_out.extend(seats)

    def changed(self, current: Sequence[Place]) -> str | None:
        self.currents.append(tuple(place.name for place in current))
        return self._reasons.popleft() if len(self._reasons) > 1 else self._reasons[0]


def hosts(
    *names: str, every: Sequence[str] = ("a", "b", "c"), absent: Sequence[str] = ()
) -> Roster:
    places = tuple(Place(name, 1) for name in names)
    return Roster(names, places, tuple(every), apart=True, absent=tuple(absent))


@dataclass
class FakeAttempt:
    """What the supervisor sees of an attempt."""

    run: Callable[[Callable[[], None]], Outcome]
    request_regroup: Callable[[], None]
    attested: Callable[[], dict[str, Any] | None]


@dataclass
class Stage:
    """One job with attempts that end as they are told, on a clock that only its pauses move."""

    directory: Path
    scripts: list[Script]
    spec: LaunchSpec
    clock: float = 1000.0
    specs: list[LaunchSpec] = field(default_factory=list[LaunchSpec])
    slacks: list[float] = field(default_factory=list[float])
    told: list[SupervisorEvent] = field(default_factory=list[SupervisorEvent])
    polls: int = 1
    regroups: int = 0
    attests: dict[str, Any] | None = None
    interrupt_at: float = float("inf")
    number: int = signal.SIGINT

    def run(self, members: Members | None = None, **options: object) -> int:
        journal = Journal(self.directory / "events.jsonl")
        seams = SupervisorSeams(self.make, lambda: self.clock, self.sleep)
        chosen = SuperviseOptions(**options)  # type: ignore[arg-type]
        try:
            return supervise(
                self.spec,
                self.told.append,
                options=chosen,
                members=members,
                journal=journal,
                seams=seams,
            )
        finally:
            journal.close()
            assert self.interrupt_at == float("inf"), "it was not interrupted"

    def make(
        self,
        spec: LaunchSpec,
        run_dir: Path,
        signals: deque[int],
        events: Callable[[SupervisorEvent], None],
        reaper: Reaper,
        slack: float,
    ) -> FakeAttempt:
        assert run_dir.parent.is_dir()
        assert not run_dir.exists()
        run_dir.mkdir()
        assert not signals
        self.specs.append(spec)
        self.slacks.append(slack)
        self.events = events
        return FakeAttempt(self.run_attempt, self.request_regroup, lambda: self.attests)

    def run_attempt(self, poll: Callable[[], None]) -> Outcome:
        (self.spec.log_dir / "rank-1.log").write_text(f"of {len(self.specs)}")
        self.events(SupervisorEvent("launched", f"{self.specs[-1].num_processes} processes"))
        for _ in range(self.polls):
            poll()
        script = self.scripts[len(self.specs) - 1]
        if isinstance(script, Exception):
            raise script
        return script if isinstance(script, Outcome) else script()

    def request_regroup(self) -> None:
        self.regroups += 1

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 0.05, "a signal would have to wait"
        self.clock += seconds
        if self.clock >= self.interrupt_at:
            self.interrupt_at = float("inf")
            signal.raise_signal(self.number)

    def kinds(self) -> str:
        return ", ".join(event.kind for event in self.told)

    def told_of(self, kind: str) -> list[SupervisorEvent]:
        return [event for event in self.told if event.kind == kind]


@pytest.fixture
def stage(tmp_path: Path) -> Callable[..., Stage]:
    def build(*scripts: Script, ranks: int = 3, **fields: object) -> Stage:
        spec = LaunchSpec(
            ["train"], ranks, "ring", tmp_path / "logs", env={"A": "secret"}, **fields
        )  # type: ignore[arg-type]
        return Stage(tmp_path, list(scripts), spec)

    return build


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "code", "kinds"),
    [
        (_DONE, 0, "launched, finished"),
        (Outcome(stopped=15, started=True), 143, "launched, finished"),
        (failed(_KILLED, 7), 137, "launched, failed"),
    ],
)
def test_one_attempt_without_restarts(
    stage: Callable[..., Stage], outcome: Outcome, code: int, kinds: str
) -> None:
    job = stage(outcome)
    assert job.run() == code
    assert (job.kinds(), job.clock, len(job.specs)) == (kinds, 1000.0, 1)


def test_a_fault_is_told_with_its_facts_and_tried_again(stage: Callable[..., Stage]) -> None:
    job = stage(failed(_KILLED, 7), _DONE)
    assert job.run(max_restarts=3) == 0
    assert job.kinds() == "launched, fault, restarting, launched, finished"
    (fault,) = job.told_of("fault")
    assert (fault.rank, fault.exit_code, fault.step, fault.host) == (1, 137, 7, "here")
    (again,) = job.told_of("restarting")
    assert again.message == (
        "starting again with 3 ranks from the last checkpoint, if there is one (restart 1 of at most 3)"
    )
    assert (again.pause_s, again.num_ranks, again.exit_code) == (0.0, 3, None)


def test_pauses_grow_and_the_budget_ends_it(stage: Callable[..., Stage]) -> None:
    faults = [failed(replace(_KILLED, rank=n % 3), 7 - n) for n in range(5)]
    job = stage(*faults)
    assert job.run(max_restarts=4) == 137
    assert job.clock == pytest.approx(1000 + 0 + 1 + 2 + 4)
    assert [event.pause_s for event in job.told_of("restarting")] == [0.0, 1.0, 2.0, 4.0]
    assert [event.message for event in job.told_of("waiting")] == [
        f"the next start is in {n} s" for n in (1, 2, 4)
    ]
    assert job.kinds().endswith("launched, failed, given up")
    assert "4 times, which is what --max-restarts allows" in job.told[-1].message


def test_the_same_failure_twice_is_the_last(stage: Callable[..., Stage]) -> None:
    job = stage(failed(_ERROR, 7), failed(_ERROR, 7))
    assert job.run(max_restarts=9) == 1
    assert job.kinds() == "launched, fault, restarting, launched, failed, given up"
    assert "twice in a row: ValueError: no" in job.told[-1].message
    assert job.told[-1].exit_code == 1


def test_hangs_lengthen_the_deadlines(stage: Callable[..., Stage]) -> None:
    hang = replace(_KILLED, kind="hang", exit_code=7)
    job = stage(failed(hang, 7), failed(hang, 7), failed(hang, 9), failed(_ERROR, 12), _DONE)
    assert job.run(max_restarts=9) == 0
    assert job.slacks == [1.0, 1.0, 4.0, 1.0, 1.0]


def test_taken_ports_need_no_restarts(stage: Callable[..., Stage]) -> None:
    ports = Outcome(ports_taken=True)
    job = stage(ports, ports, _DONE)
    assert job.run() == 0
    assert [event.message for event in job.told_of("retrying")] == [
        "a port was taken by another program; starting again"
    ] * 2


# --- what ranks are given -------------------------------------------------------------------------


def test_every_attempt_has_its_number_and_all_the_same_run(stage: Callable[..., Stage]) -> None:
    job = stage(failed(_KILLED, 1), failed(_KILLED, 2), _DONE)
    assert job.run(max_restarts=2) == 0
    assert [spec.env["ALLHANDS_ATTEMPT"] for spec in job.specs] == ["1", "2", "3"]
    runs = {spec.env["ALLHANDS_RUN_ID"] for spec in job.specs}
    assert len(runs) == 1
    assert len(bytes.fromhex(runs.pop())) == 8
    (began,) = {spec.env["ALLHANDS_RUN_BEGAN"] for spec in job.specs}
    assert abs(datetime.now() - datetime.fromisoformat(began)).total_seconds() < 600
    assert all(spec.env["A"] == "secret" for spec in job.specs)
    named = stage(_DONE)
    named.run(run_id="abc")
    assert named.specs[0].env["ALLHANDS_RUN_ID"] == "abc"


def test_logs_of_earlier_attempts_are_kept(stage: Callable[..., Stage]) -> None:
    job = stage(failed(_KILLED, 1), failed(_KILLED, 2), _DONE)
    logs = job.spec.log_dir
    logs.mkdir()
    (logs / "rank-7.log").write_text("of an earlier job")
    (logs / "rank-7.attempt-1.log").write_text("of an earlier job")
    job.scripts[0] = failed(replace(_KILLED, log_path=logs / "rank-1.log"), 1)
    assert job.run(max_restarts=2) == 0
    names = ("rank-1.attempt-1.log", "rank-1.attempt-2.log", "rank-1.log")
    there = {path.name: path.read_text() for path in logs.iterdir() if path.is_file()}
    assert '"role": "orchestrator"' in there.pop("monitor-orchestrator.jsonl")
    assert there == {name: f"of {i + 1}" for i, name in enumerate(names)}
    before = {path.name: path.read_text() for path in (logs / "earlier-1").iterdir()}
    assert before == dict.fromkeys(("rank-7.log", "rank-7.attempt-1.log"), "of an earlier job")
    assert job.told_of("fault")[0].log_path == logs / "rank-1.attempt-1.log"


def test_a_slot_is_left_out_and_its_weight_with_it(stage: Callable[..., Stage]) -> None:
    resized: list[int] = []

    def resize(spec: LaunchSpec) -> LaunchSpec:
        resized.append(spec.num_processes)
        return replace(spec, cores_per_rank=6 // spec.num_processes)

    job = stage(*(failed(_KILLED, step) for step in (7, 6, 5)), _DONE, weights=(1.0, 2.0, 3.0))
    assert job.run(max_restarts=5, min_ranks=2, resize=resize) == 0
    assert [spec.num_processes for spec in job.specs] == resized == [3, 3, 3, 2]
    assert [spec.cores_per_rank for spec in job.specs] == [2, 2, 2, 3]
    assert [spec.weights for spec in job.specs[2:]] == [(1.0, 2.0, 3.0), (1.0, 3.0)]
    (left_out,) = job.told_of("left out")
    assert left_out.host == "slot 1"
    assert "restarting" in job.kinds().partition("left out")[2]


def test_weights_follow_their_computers(stage: Callable[..., Stage]) -> None:
    every = ("a", "a", "b")
    first = Roster(every, (Place("a", 2), Place("b", 1)), every, apart=True)
    second = Roster(("b", "a", "a"), (Place("b", 1), Place("a", 2)), every, apart=True)
    grown = (*every, "d")
    third = Roster(grown, (Place("a", 2), Place("b", 1), Place("d", 1)), grown, apart=True)
    job = stage(failed(_KILLED, 1), failed(_KILLED, 2), _DONE, weights=(1.0, 2.0, 6.0))
    assert job.run(Members(first, second, third), max_restarts=3) == 0
    assert [spec.weights for spec in job.specs] == [
        (1.0, 2.0, 6.0),
        (6.0, 1.0, 2.0),
        (1.0, 2.0, 6.0, 3.0),
    ]
    assert [tuple(place.name for place in spec.places) for spec in job.specs] == [
        ("a", "b"),
        ("b", "a"),
        ("a", "b", "d"),
    ]


# --- who takes part -------------------------------------------------------------------------------


def test_more_ranks_come_at_the_next_checkpoint(stage: Callable[..., Stage]) -> None:
    job = stage(Outcome(regroup=True, started=True, step=5), _DONE)
    job.polls = 4
    members = Members(
        hosts("a", "b"), hosts("a", "b", "c"), reasons=(None, "c can take part again", None)
    )
    assert job.run(members, min_ranks=2) == 0
    assert job.kinds() == "launched, regrouping, restarting, launched, finished"
    assert job.regroups == 1
    assert job.told[1].message == "c can take part again: the ranks regroup at the next checkpoint"
    assert [spec.num_processes for spec in job.specs] == [2, 3]
    assert members.currents[0] == ("a", "b")
    assert members.currents[-1] == ("a", "b", "c")


def test_with_fewer_ranks_if_that_is_allowed(stage: Callable[..., Stage]) -> None:
    lost = failed(replace(_KILLED, kind="lost host", exit_code=7, host="b"), 7)
    members = Members(
        hosts("a", "b", "c"), replace(hosts("a", "c", absent=["b"]), step=5, note="b had step 6")
    )
    job = stage(lost, _DONE)
    assert job.run(members, max_restarts=1, min_ranks=2) == 0
    assert [spec.num_processes for spec in job.specs] == [3, 2]
    assert job.told_of("restarting")[0].message == (
        "starting again with 2 ranks from step 5 (restart 1 of at most 1); b had step 6"
    )
    assert job.told_of("restarting")[0].step == 5
    assert job.clock == 1000.0


def test_otherwise_they_are_waited_for(stage: Callable[..., Stage]) -> None:
    missing = hosts("a", "c", absent=["b"])
    members = Members(hosts("a", "b", "c"), missing, missing, missing, hosts("a", "b", "c"))
    job = stage(failed(_KILLED, 7), _DONE)
    assert job.run(members, max_restarts=1) == 0
    assert [event.message for event in job.told_of("waiting")] == [
        "waiting: 2 of at least 3 ranks are there, b does not answer"
    ]
    assert job.clock == pytest.approx(1006.0)
    assert [spec.num_processes for spec in job.specs] == [3, 3]


def test_but_not_for_ever(stage: Callable[..., Stage]) -> None:
    members = Members(hosts("a", "b", "c"), hosts("a", "c", absent=["b"]))
    job = stage(failed(_KILLED, 7))
    assert job.run(members, max_restarts=1, wait_s=20.0) == 137
    assert job.clock == pytest.approx(1020.0)
    assert job.kinds() == "launched, fault, waiting, given up"
    assert (
        job.told[-1].message
        == "not started again: 2 of at least 3 ranks are there, b does not answer"
    )


@pytest.mark.parametrize(("max_restarts", "waited"), [(0, 0.0), (1, 30.0)])
def test_at_the_start_only_for_a_moment(
    stage: Callable[..., Stage], max_restarts: int, waited: float
) -> None:
    job = stage()
    members = Members(hosts("a", absent=["b", "c"]))
    assert job.run(members, max_restarts=max_restarts) == 7
    assert job.clock == pytest.approx(1000 + waited)
    assert job.kinds() == ("waiting, given up" if waited else "given up")


def test_the_newest_checkpoint_is_waited_for(stage: Callable[..., Stage]) -> None:
    obstacle = "the checkpoint of step 40 is on b, which cannot be reached"
    behind = replace(hosts("a", "c", absent=["b"]), obstacle=obstacle)
    job = stage(failed(_KILLED, 7), _DONE)
    assert (
        job.run(Members(hosts("a", "b", "c"), behind, hosts("a", "b")), max_restarts=1, min_ranks=1)
        == 0
    )
    assert [event.message for event in job.told_of("waiting")] == [f"waiting: {obstacle}"]
    job = stage(failed(_KILLED, 7))
    assert job.run(Members(hosts("a", "b", "c"), behind), max_restarts=1, min_ranks=1) == 137
    assert obstacle in job.told[-1].message
    assert job.clock == pytest.approx(1600.0)


def test_a_host_that_a_person_has_taken_out_is_not_needed(stage: Callable[..., Stage]) -> None:
    members = Members(
        hosts("a", "b", "c"), hosts("a", "c", every=["a", "c"]), hosts("a", every=["a", "d"])
    )
    job = stage(failed(_KILLED, 7), _DONE)
    assert job.run(members, max_restarts=1) == 0
    assert [spec.num_processes for spec in job.specs] == [3, 2]


def test_a_computer_that_fails_again_and_again_is_left_out(stage: Callable[..., Stage]) -> None:
    members = Members(hosts("a", "b", "c"))
    job = stage(*(failed(_KILLED, step) for step in (7, 6, 5)), _DONE)
    assert job.run(members, max_restarts=5, min_ranks=2) == 0
    assert members.left_out == ["b"]


def test_ranks_that_cannot_be_started_count_as_a_fault_later_on(
    stage: Callable[..., Stage],
) -> None:
    error = DistributedError("ssh: no route to host", code="host-unreachable", hint="look at it")
    with pytest.raises(DistributedError) as caught:
        stage(error).run(max_restarts=3)
    assert caught.value.code == "host-unreachable"
    job = stage(failed(_KILLED, 7), error, _DONE)
    assert job.run(max_restarts=3) == 0
    later = job.told_of("fault")[1]
    assert (later.rank, later.exit_code, later.message) == (None, 7, "ssh: no route to host")
    assert "look at it" in (later.explanation or "")
    assert job.clock == pytest.approx(1001.0)


def test_a_new_computer_that_cannot_be_started_is_left_out(stage: Callable[..., Stage]) -> None:
    error = HostError(["d"], "host d has mlx 0.1, this computer 0.32", code="versions-differ")
    every = ("a", "b", "c", "d")
    members = Members(hosts("a", "b", "c"), hosts(*every, every=every))
    job = stage(failed(_KILLED, 7), error, error, error, _DONE)
    assert job.run(members, max_restarts=9) == 0
    assert [event.host for event in job.told_of("fault")] == ["here", "d", "d", "d"]
    assert members.left_out == ["d"], "not that of a computer which the job began with"
    begun = stage(
        failed(_KILLED, 7),
        *[HostError(["b"], "host b has no allhands", code="host-without-agent")] * 3,
    )
    assert begun.run(Members(hosts("a", "b", "c")), max_restarts=9) == 7
    assert "were due to b, and 3 ranks are needed" in begun.told[-1].message


def test_an_error_of_the_members_is_not_swallowed(stage: Callable[..., Stage]) -> None:
    class Broken(Members):
        def roster(self) -> Roster:
            raise DistributedError("no such file", code="any-fault")

    with pytest.raises(DistributedError) as caught:
        stage().run(Broken())
    assert caught.value.code == "any-fault"


# --- stops ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)]
)
def test_a_signal_during_a_pause_ends_it_at_once(
    stage: Callable[..., Stage], number: int, code: int
) -> None:
    before = signal.getsignal(number)
    job = stage(*(failed(replace(_KILLED, rank=n % 3), 7 - n) for n in range(4)))
    job.number, job.interrupt_at = number, 1004.0  # in the third pause, of 4 s
    assert job.run(max_restarts=9) == code
    assert job.clock == pytest.approx(1004.0, abs=0.1)
    assert job.kinds().endswith("waiting, cancelling, finished")
    assert job.told[-1].exit_code == code
    assert len(job.specs) == 4
    assert signal.getsignal(number) is before


def test_a_signal_while_computers_are_waited_for(stage: Callable[..., Stage]) -> None:
    job = stage(failed(_KILLED, 7))
    job.interrupt_at = 1003.0
    assert job.run(Members(hosts("a", "b", "c"), hosts("a")), max_restarts=1) == 130
    assert job.clock == pytest.approx(1003.0, abs=0.1)


def test_a_signal_does_not_wait_for_computers_that_do_not_answer(
    stage: Callable[..., Stage],
) -> None:
    released = threading.Event()

    class Slow(Members):
        def roster(self) -> Roster:
            os.kill(os.getpid(), signal.SIGINT)
            released.wait(20)
            return super().roster()

    began = time.monotonic()
    assert stage().run(Slow(hosts("a"))) == 130
    assert time.monotonic() - began < 5
    released.set()


def test_a_signal_as_an_attempt_fails_is_heeded(stage: Callable[..., Stage]) -> None:
    def interrupted() -> Outcome:
        signal.raise_signal(signal.SIGTERM)
        return failed(_KILLED, 7)

    job = stage(interrupted)
    assert job.run(max_restarts=1) == 143
    assert job.kinds() == "launched, fault, cancelling, finished"


# --- the record -----------------------------------------------------------------------------------


def test_the_journal_has_every_event_with_its_attempt(stage: Callable[..., Stage]) -> None:
    job = stage(failed(_KILLED, 7), failed(_ERROR, 6), _DONE)
    assert job.run(max_restarts=2) == 0
    records = read_events(job.directory)
    assert [(record["kind"], record["attempt"]) for record in records] == [
        *(("launched", 1), ("fault", 1)),
        *(("restarting", 2), ("launched", 2), ("fault", 2), ("waiting", 2)),
        *(("restarting", 3), ("launched", 3), ("finished", 3)),
    ]
    assert records[1]["step"] == 7
    assert records[1]["exit_code"] == 137
    assert "secret" not in (job.directory / "events.jsonl").read_text()
