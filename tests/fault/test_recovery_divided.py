"""Ranks that divide the work, and die in every phase of a step: the run ends as if nothing had
happened.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from faulty import ITERS, Bench, Result

pytestmark = pytest.mark.long

WAYS = {
    "pipeline": ("--strategy", "pipeline"),
    "fsdp": ("--strategy", "fsdp"),
    "tensor": ("--tp", "2"),
    "context": ("--cp", "2"),
    "pipe x shard": ("--backend", "mpi", "--strategy", "pipeline", "--dp-shard", "2"),
    "shard x tensor": ("--backend", "mpi", "--strategy", "fsdp", "--tp", "2"),
    "expert": ("--ep", "2"),
    "shard and context": ("--cp", "2", "--strategy", "fsdp"),
    "shard and expert": ("--ep", "2", "--strategy", "fsdp"),
}
HAVE_PARTS = [name for name in WAYS if name != "context"]
HAVE_MESSAGES = tuple(name for name, flags in WAYS.items() if "--strategy" in flags)


class Way(NamedTuple):
    """A way of dividing, and what it gives where nothing happens."""

    name: str
    flags: tuple[str, ...]
    bench: Bench
    undisturbed: Result
    ranks: int


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Way:
    name, flags = request.param, WAYS[request.param]
    bench = Bench(tmp_path_factory.mktemp(name), experts=4 if "expert" in name else 0)
    ranks = 4 if " x " in name else 2
    with bench.trial("undisturbed") as trial:
        trial.run(*flags, ranks=ranks)
        assert trial.steps() == list(range(1, ITERS + 1))
        return Way(name, flags, bench, trial.result(), ranks)


@pytest.mark.timeout(300)
def test_ranks_that_die_in_every_phase(way: Way) -> None:
    """Before a batch, between messages, before sums and the update, in a validation and in a save."""
    between = "message" if way.name in HAVE_MESSAGES else "reduce"
    with way.bench.trial("disturbed") as trial:
        trial.plan(
            {"rank": 1, "step": 3, "kind": "kill"},
            {"rank": 0, "step": 7, "kind": "kill", "at": between},
            {"rank": 1, "step": 11, "kind": "exit", "code": 7, "at": between},
            {"rank": 0, "step": 14, "kind": "kill", "at": "reduce"},
            {"rank": 1, "step": 16, "kind": "raise", "at": "update"},
            {"rank": 1, "step": 20, "kind": "kill", "at": "validate"},
            {"rank": 0, "step": 25, "kind": "kill", "at": "save", "write": 3},
            # Its part of the arrays, which rank 0 waits for.
            *(
                [{"rank": 1, "step": 27, "kind": "kill", "at": "save"}]
                if way.name in HAVE_PARTS
                else []
            ),
        )
        count = 7 + (way.name in HAVE_PARTS)
        job = trial.start(*way.flags, ranks=way.ranks)
        assert job.finish(280) == 0, (job.out, job.err)
        # A checkpoint is written beside the steps: a later one's part may come first.
        assert sorted(fault.index for fault in trial.fired()) == list(range(count))
        assert len(trial.events("restarting")) == count
        assert trial.result() == way.undisturbed


@pytest.mark.timeout(300)
def test_a_rank_that_stands_still_in_an_exchange_is_found(way: Way) -> None:
    between = "message" if way.name in HAVE_MESSAGES else "reduce"
    with way.bench.trial("stopped") as trial:
        trial.plan({"rank": 1, "step": 8, "kind": "stop", "at": between})
        job = trial.start(*way.flags, "--hang-timeout-s", "5", ranks=way.ranks)
        assert job.finish(200) == 0, (job.out, job.err)
        assert len(trial.events("restarting")) == 1
        assert trial.result() == way.undisturbed


@pytest.mark.timeout(300)
def test_a_rank_that_is_asked_to_stop_in_a_validation_leaves_it_with_the_others(way: Way) -> None:
    with way.bench.trial("asked") as trial:
        trial.plan({"rank": 1, "step": 8, "kind": "term", "at": "validate"})
        job = trial.start(*way.flags, ranks=way.ranks)
        assert job.finish(60) == 143, (job.out, job.err)
        assert max(trial.steps()) < ITERS
        trial.run(*way.flags, "--resume", ranks=way.ranks)
        assert trial.result() == way.undisturbed


@pytest.mark.timeout(300)
def test_ranks_that_are_left_go_on_with_everything(way: Way) -> None:
    if way.name == "pipe x shard":
        pytest.skip("three ranks have no stages of two blocks")
    told = {
        "pipeline": "one rank is left of the pipeline",
        "fsdp": "slot 1 is left out",
        "shard x tensor": "--tp is 1",
    }
    with way.bench.trial("left") as trial:
        entry = {"rank": 1, "step": 7, "kind": "kill"}
        trial.plan(entry, entry, entry)
        job = trial.run(*way.flags, "--min-ranks", "1", ranks=way.ranks)
        assert [event["num_ranks"] for event in trial.events("restarting")] == [
            way.ranks,
            way.ranks,
            way.ranks - 1,
        ]
        assert told.get(way.name, f"{way.flags[0]} is 1 now") in job.out + job.err
        found = trial.result()
        assert [step for step, _ in found.losses] == list(range(1, ITERS + 1))
        # Another order of sums, which grows with each step.
        losses = [[loss for _, loss in each.losses] for each in (found, way.undisturbed)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-4)


def test_a_gradient_that_is_not_finite_ends_all_ranks_alike(way: Way) -> None:
    with way.bench.trial("nan") as trial:
        trial.plan({"rank": 1, "step": 4, "kind": "nan"})
        job = trial.start(*way.flags, ranks=way.ranks)
        assert job.finish(120) == 6, (job.out, job.err)
        assert trial.steps() == [1, 2, 3, 4]
    with way.bench.trial("nan-left-out") as trial:
        trial.plan({"rank": 1, "step": 4, "kind": "nan"})
        job = trial.start(*way.flags, "--non-finite", "skip", ranks=way.ranks)
        assert job.finish(120) == 0, (job.out, job.err)
