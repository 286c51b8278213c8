"""Computers that do not fit, from the start or as newcomers: what becomes of a job, with attempts
of the test's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_restart_loop import _DONE, _KILLED, Members, Script, Stage, failed, hosts

from allhands.cluster.connection import UnfitHosts
from allhands.cluster.outcome import Fault, NewcomerRefusal, Outcome
from allhands.cluster.ranks import LaunchSpec, Place
from allhands.distributed.blame import TRUSTED_VARIABLE


@pytest.fixture
def stage(tmp_path: Path) -> Callable[..., Stage]:
    def build(*scripts: Script) -> Stage:
        return Stage(tmp_path, list(scripts), LaunchSpec(["train"], 3, "ring", tmp_path / "logs"))

    return build


def test_a_computer_that_does_not_fit_is_left_out_before_anything_has_started(
    stage: Callable[..., Stage],
) -> None:
    unfit = UnfitHosts(
        ["b"],
        "b does not match a and c: b has mlx 1, a 2",
        code="versions-differ",
        hint="allhands cluster init --hosts b",
    )
    job = stage(unfit, _DONE)
    members = Members(hosts("a", "b", "c"), hosts("a", "c"))
    assert job.run(members, max_restarts=0, min_ranks=2) == 0
    assert members.left_out == ["b"]
    (event,) = job.told_of("left out")
    assert (event.host, event.message) == (
        "b",
        "b is left out: b does not match a and c: b has mlx 1, a 2",
    )
    assert "what to do: allhands cluster init" in (event.explanation or "")
    assert job.clock == 1000.0
    assert not job.told_of("fault")


def test_it_is_an_error_at_once_where_all_are_needed(stage: Callable[..., Stage]) -> None:
    with pytest.raises(UnfitHosts):
        stage(UnfitHosts(["b"], "b does not fit", code="versions-differ")).run(
            Members(hosts("a", "b", "c")), max_restarts=5
        )
    fault = Fault("misfit", -1, "", "b does not fit", 7, explanation="b does not fit", misfits=(1,))
    job = stage(Outcome(fault))
    assert job.run(Members(hosts("a", "b", "c")), max_restarts=5) == 7
    assert job.kinds() == "launched, failed"


def test_ranks_are_told_who_has_trained_together(stage: Callable[..., Stage]) -> None:
    job = stage(failed(_KILLED, 3), _DONE)
    assert job.run(Members(hosts("a", "b"), hosts("a", "b", "c")), max_restarts=1, min_ranks=2) == 0
    assert [spec.env.get(TRUSTED_VARIABLE) for spec in job.specs] == [None, "a,b"]


@dataclass
class Look:
    """A look at newcomers that ends as it is told."""

    names: frozenset[str]
    fit: set[str]
    unfit: dict[str, NewcomerRefusal]
    done: bool = True
    stopped: int = 0

    def stop(self) -> None:
        self.stopped += 1


class Growing(Members):
    """``a`` and ``b``, to which ``c`` could come until it is left out."""

    def __init__(self) -> None:
        super().__init__(hosts("a", "b"))

    def newcomers(self, current: Sequence[Place]) -> tuple[Place, ...]:
        return () if "c" in self.left_out else (Place("c", 1),)

    def changed(self, current: Sequence[Place]) -> str | None:
        return "c can take part now" if self.newcomers(current) else None


@pytest.mark.parametrize(
    ("fit", "unfit", "regroups", "left_out"),
    [
        ({"c"}, {}, 1, []),
        (
            set[str](),
            {
                "c": NewcomerRefusal(
                    "c's train.jsonl differs", "c's train.jsonl differs\n  what to do: sync"
                )
            },
            0,
            ["c"],
        ),
        (set[str](), {}, 0, []),  # it has not answered
    ],
)
def test_newcomers_are_looked_at_while_the_others_go_on(
    stage: Callable[..., Stage],
    fit: set[str],
    unfit: dict[str, NewcomerRefusal],
    regroups: int,
    left_out: list[str],
) -> None:
    looks: list[Look] = []

    def look(spec: LaunchSpec, newcomers: Sequence[Place], attested: object, known: str) -> Look:
        assert ([place.name for place in newcomers], attested, known) == (["c"], {"facts": {}}, "a")
        looks.append(Look(frozenset({"c"}), fit, unfit))
        return looks[-1]

    job = stage(_DONE)
    job.polls, job.attests = 5, {"facts": {}}
    members = Growing()
    assert job.run(members, try_out=look, min_ranks=2) == 0
    assert (job.regroups, members.left_out) == (regroups, left_out)
    assert [one.stopped for one in looks] == [1]
    assert [event.host for event in job.told_of("left out")] == left_out
    # Nobody is looked at before the ranks have agreed on anything.
    looks.clear()
    job = stage(_DONE)
    job.polls = 5
    assert job.run(Growing(), try_out=look, min_ranks=2) == 0
    assert looks == []
