"""Who takes part: hosts that answer, those with the newest checkpoint first, and those that come
back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from allhands.cluster import membership
from allhands.cluster.hosts import Host
from allhands.cluster.membership import HostfileMembers, LocalMembers, Roster
from allhands.cluster.ssh import SshTrouble
from allhands.errors import ConfigError, DistributedError


class World:
    """Three computers with two slots each, some of them away, some with checkpoints."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "hosts"
        self.up = {"a", "b", "c"}
        self.steps: dict[str, int] = {}
        self.asked: list[str] = []
        self.troubles: dict[str, SshTrouble] = {}
        self.fails: Exception | None = None
        self.write("a", "b", "c")

    def write(self, *names: str) -> None:
        """Another hostfile, certainly with another time."""
        self.path.write_text("".join(f"{name} slots=2\n" for name in names))
        stamp = 10**18 + 10**9 * len(list(self.path.parent.glob("edit-*")))
        os.utime(self.path, ns=(stamp, stamp))
        (self.path.parent / f"edit-{stamp}").touch()

    def trouble(self, host: str, timeout_s: float) -> SshTrouble | None:
        assert timeout_s == 0.5
        self.asked.append(host)
        return (
            None if host in self.up else self.troubles.get(host, SshTrouble(None, "switch it on"))
        )

    def checkpoints(self, hosts: Sequence[Host]) -> dict[str, int]:
        if self.fails:
            raise self.fails
        return {host.name: self.steps[host.name] for host in hosts if host.name in self.steps}

    def members(self, limit: int | None = None, earlier: bool = False) -> HostfileMembers:
        checkpoints = self.checkpoints
        return HostfileMembers(
            self.path,
            limit,
            trouble=self.trouble,
            checkpoints=checkpoints,
            probe_timeout_s=0.5,
            earlier=earlier,
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def _who(roster: Roster) -> str:
    return " ".join(f"{place.name}{place.num_ranks}" for place in roster.places)


def _soon(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


# --- this computer --------------------------------------------------------------------------------


def test_slots_of_this_computer() -> None:
    members = LocalMembers(3, checkpoint=lambda: 40)
    every = ("slot 0", "slot 1", "slot 2")
    assert members.roster() == Roster(every, every=every, step=40)
    members.leave_out({"slot 1"})
    assert members.roster() == Roster(
        ("slot 0", "slot 2"), every=every, left_out=("slot 1",), step=40
    )
    assert members.changed(()) is None


# --- who answers ----------------------------------------------------------------------------------


def test_all_slots_of_all_hosts_in_the_order_of_the_file(world: World) -> None:
    roster = world.members().roster()
    assert _who(roster) == "a2 b2 c2"
    assert roster.seats == roster.every == ("a", "a", "b", "b", "c", "c")
    assert (roster.apart, roster.absent, roster.obstacle, roster.step) == (True, (), None, None)
    host = roster.places[1].host
    assert host is not None
    assert (host.ssh, host.slots) == ("b", 2)


def test_who_does_not_answer_is_absent(world: World) -> None:
    world.up.remove("b")
    roster = world.members().roster()
    assert _who(roster) == "a2 c2"
    assert (roster.absent, len(roster.every)) == (("b",), 6)


def test_why_they_are_absent_and_what_waiting_can_lead_to(world: World) -> None:
    assert world.members().roster().troubles == {}
    assert world.members().roster().possible == 6
    silent, unknown = (
        SshTrouble(None, "switch it on"),
        SshTrouble("no such name", "correct it", lasting=True),
    )
    world.up = {"a"}
    world.troubles = {"b": silent, "c": unknown}
    roster = world.members().roster()
    assert (roster.absent, roster.troubles) == (("b", "c"), {"b": silent, "c": unknown})
    assert roster.possible == 4, "b may come"
    # Where there are more computers than are wanted, another one may take the place of one that
    # cannot come.
    assert world.members(limit=4).roster().possible == 4
    assert world.members(limit=5).roster().possible == 4
    world.troubles["b"] = unknown
    assert world.members().roster().possible == 2


def test_a_mistake_in_asking_is_an_error_of_the_roster(world: World) -> None:
    def refuse(host: str, timeout_s: float) -> None:
        raise ConfigError("not understood", code="ssh-command-invalid", where="ALLHANDS_SSH")

    with pytest.raises(ConfigError) as caught:
        HostfileMembers(world.path, trouble=refuse).roster()
    assert caught.value.code == "ssh-command-invalid"


def test_hosts_are_asked_at_the_same_time(world: World) -> None:
    all_asked = threading.Barrier(3, timeout=20)

    def wait(host: str, timeout_s: float) -> None:
        all_asked.wait()

    members = HostfileMembers(world.path, trouble=wait)
    assert _who(members.roster()) == "a2 b2 c2"
    assert not all_asked.broken


def test_this_computer_is_not_asked(world: World) -> None:
    world.write("localhost", "b")
    roster = world.members().roster()
    assert _who(roster) == "localhost2 b2"
    assert world.asked == ["b"]


@pytest.mark.parametrize(
    ("limit", "who"), [(6, "a2 b2 c2"), (3, "a2 b1"), (2, "a2"), (1, "a1"), (9, "a2 b2 c2")]
)
def test_no_more_ranks_than_asked_for(world: World, limit: int, who: str) -> None:
    roster = world.members(limit).roster()
    assert _who(roster) == who
    assert len(roster.every) == min(limit, 6)


def test_another_host_takes_the_place_of_one_that_is_away(world: World) -> None:
    world.up.remove("a")
    assert _who(world.members(limit=4).roster()) == "b2 c2"


def test_a_bad_hostfile_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        HostfileMembers(tmp_path / "none")


# --- checkpoints ----------------------------------------------------------------------------------


def test_the_newest_checkpoint_comes_first(world: World) -> None:
    world.steps = {"a": 20, "b": 40, "c": 40}
    roster = world.members().roster()
    assert _who(roster) == "b2 a2 c2"
    assert roster.seats == ("b", "b", "a", "a", "c", "c")
    assert (roster.step, roster.obstacle, roster.note) == (40, None, None)
    # Also where not everybody has room.
    world.steps = {"c": 10}
    assert _who(world.members(limit=3).roster()) == "c2 a1"
    world.steps = {"a": 40, "b": 40}
    assert _who(world.members().roster()) == "a2 b2 c2"


def test_the_only_checkpoint_is_waited_for(world: World) -> None:
    members = world.members()
    world.steps = {"b": 40}
    assert members.roster().obstacle is None
    world.up.remove("b")
    roster = members.roster()
    assert _who(roster) == "a2 c2"
    assert (
        roster.obstacle
        == "the checkpoint of step 40 was last seen on b, which does not offer it now"
    )
    world.up.add("b")
    roster = members.roster()
    assert (_who(roster), roster.obstacle, roster.step) == ("b2 a2 c2", None, 40)


def test_an_older_checkpoint_is_better_than_waiting(world: World) -> None:
    members = world.members()
    world.steps = {"b": 40, "c": 30}
    members.roster()
    world.up.remove("b")
    roster = members.roster()
    assert (_who(roster), roster.step, roster.obstacle) == ("c2 a2", 30, None)
    assert (
        roster.note
        == "the checkpoint of step 40 was last seen on b, which does not offer it now: going on from step 30"
    )


def test_the_latest_word_of_a_host_counts(world: World) -> None:
    members = world.members()
    world.steps = {"b": 40}
    members.roster()
    world.steps = {"b": 30}  # the newer one was damaged
    roster = members.roster()
    assert (roster.step, roster.obstacle, roster.note) == (30, None, None)
    world.steps = {}  # it answers, but says nothing of it: to start over would be rash
    assert "step 30 was last seen on b" in (members.roster().obstacle or "")


def test_checkpoints_that_cannot_be_asked_for_are_not_forgotten(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    members = world.members()
    world.steps = {"b": 40}
    members.roster()
    world.fails = DistributedError("ssh broke off", code="host-unreachable")
    with caplog.at_level(logging.WARNING):
        assert "was last seen on b" in (members.roster().obstacle or "")
    assert "ssh broke off" in caplog.text


def test_checkpoints_are_heard_of_while_ranks_train(world: World) -> None:
    members = world.members()
    current = members.roster().places
    world.steps = {"a": 40}
    members.changed(current)
    _soon(lambda: members._heard)  # pyright: ignore[reportPrivateUsage]
    world.up.remove("a")
    assert "step 40 was last seen on a" in (members.roster().obstacle or "")


# --- left out, and back again ---------------------------------------------------------------------


def test_who_is_left_out_comes_back_only_with_another_hostfile(world: World) -> None:
    members = world.members()
    members.leave_out({"b"})
    roster = members.roster()
    assert (_who(roster), roster.left_out, roster.absent, roster.edition) == (
        "a2 c2",
        ("b",),
        (),
        0,
    )
    world.write("a", "b", "c")  # the same words, written again
    roster = members.roster()
    assert (_who(roster), roster.left_out, roster.edition) == ("a2 b2 c2", (), 1)


def test_a_host_that_answers_again_is_a_reason_to_regroup(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_ROUND_S", 0.02)
    world.up.remove("b")
    members = world.members()
    current = members.roster().places
    asked = len(world.asked)
    assert members.changed(current) is None
    _soon(lambda: members.changed(current) is None and len(world.asked) > asked + 2)
    world.up.add("b")
    _soon(lambda: members.changed(current) == "b can take part now")
    current = members.roster().places
    assert _who_places(current) == "a2 b2 c2"
    assert members.changed(current) is None
    # Now it is known.
    world.up.remove("b")
    current = members.roster().places
    assert all(members.changed(current) is None for _ in range(50)), (
        "what was known before is forgotten"
    )
    world.up.add("b")
    _soon(lambda: members.changed(current) == "b can take part again")


def _who_places(places: Sequence[membership.Place]) -> str:
    return _who(Roster((), tuple(places)))


def test_a_host_added_to_the_file_is_a_reason_to_regroup(world: World) -> None:
    members = world.members()
    current = members.roster().places
    assert members.changed(current) is None
    world.up.add("d")
    world.write("a", "b", "c", "d", "e")
    _soon(lambda: members.changed(current) == "d can take part now")
    assert "a" not in world.asked[3:], "only who is missing is asked"
    assert _who(members.roster()) == "a2 b2 c2 d2"


def test_more_slots_are_a_reason_to_regroup(world: World) -> None:
    members = world.members()
    current = members.roster().places
    world.path.write_text("a slots=3\nb slots=2\nc slots=2\n")
    assert members.changed(current) == "the hostfile gives more ranks"
    assert _who(members.roster()) == "a3 b2 c2"


def test_no_reason_where_no_more_ranks_are_wanted_or_allowed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_ROUND_S", 0.0)
    world.up.remove("c")
    members = world.members(limit=4)
    current = members.roster().places
    world.up.add("c")
    assert _who_places(current) == "a2 b2"
    before = len(world.asked)
    _soon(lambda: members.changed(current) is None and len(world.asked) > before + 3)
    assert members.changed(current) is None
    # Neither if it is left out for good, nor if hosts are removed.
    free = world.members()
    free.leave_out({"c"})
    assert free.changed(free.roster().places) is None
    world.write("a")
    assert members.changed(current) is None


def test_a_hostfile_broken_by_its_editor_is_kept_as_it_was(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    members = world.members()
    current = members.roster().places
    with caplog.at_level(logging.WARNING):
        world.path.unlink()
        assert members.changed(current) is None
        world.path.write_text("a slots=many\n")
        assert members.changed(current) is None
        assert members.changed(current) is None
    assert len(caplog.records) == 1, caplog.text
    assert "hosts:1" in caplog.text
    roster = members.roster()
    assert (_who(roster), roster.edition) == ("a2 b2 c2", 0)


def test_changed_never_waits(world: World) -> None:
    def slow(host: str, timeout_s: float) -> SshTrouble:
        time.sleep(0.5)
        return SshTrouble(None, "wait")

    members = HostfileMembers(world.path, trouble=slow)
    began = time.monotonic()
    for _ in range(20):
        assert members.changed(()) is None
    assert time.monotonic() - began < 0.4


# --- a run that there was before ------------------------------------------------------------------


def test_what_may_be_on_a_computer_that_is_away_is_not_begun_anew(world: World) -> None:
    world.up -= {"b"}
    assert world.members().roster().obstacle is None
    members = world.members(earlier=True)
    obstacle = members.roster().obstacle
    assert obstacle is not None
    assert "may be on b, which does not answer" in obstacle
    assert "--resume" in obstacle
    # It comes, and has one, or has none either: then there is nothing to wait for.
    world.up |= {"b"}
    roster = members.roster()
    assert (roster.obstacle, roster.step) == (None, None)
    # Who was asked once and had none may go away before there is one.
    world.up -= {"b"}
    assert members.roster().obstacle is None


def test_a_checkpoint_at_hand_is_enough(world: World) -> None:
    world.up -= {"b"}
    world.steps = {"c": 40}
    roster = world.members(earlier=True).roster()
    assert (roster.obstacle, roster.step, roster.places[0].name) == (None, 40, "c")
