"""Fully sharded ranks that die in every phase of a step: the run ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import pytest
from faulty import ITERS, Bench, Result

pytestmark = [pytest.mark.long, pytest.mark.slow]

SHARDED = ("--strategy", "fsdp")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("fsdp"))


@pytest.fixture(scope="module")
def undisturbed(bench: Bench) -> Result:
    with bench.trial("undisturbed") as trial:
        trial.run(*SHARDED, ranks=2)
        assert trial.steps() == list(range(1, ITERS + 1))
        return trial.result()


@pytest.mark.timeout(300)
def test_ranks_that_die_in_every_phase(bench: Bench, undisturbed: Result) -> None:
    """Before a batch, between fetches, before parts are added up, before the update, in a validation and in a save."""
    with bench.trial("disturbed") as trial:
        trial.plan(
            {"rank": 1, "step": 3, "kind": "kill"},
            {"rank": 0, "step": 7, "kind": "kill", "at": "message"},
            {"rank": 1, "step": 11, "kind": "exit", "code": 7, "at": "message"},
            {"rank": 0, "step": 14, "kind": "kill", "at": "reduce"},
            {"rank": 1, "step": 16, "kind": "raise", "at": "update"},
            {"rank": 1, "step": 20, "kind": "kill", "at": "validate"},
            {"rank": 0, "step": 25, "kind": "kill", "at": "save", "write": 3},
        )
        job = trial.start(*SHARDED, ranks=2)
        assert job.finish(280) == 0, (job.out, job.err)
        assert [fault.index for fault in trial.fired()] == list(range(7))
        assert len(trial.events("restarting")) == 7
        assert trial.result() == undisturbed


@pytest.mark.timeout(300)
def test_a_rank_that_stands_still_between_two_fetches_is_found(bench: Bench, undisturbed: Result) -> None:
    with bench.trial("stopped") as trial:
        trial.plan({"rank": 1, "step": 8, "kind": "stop", "at": "message"})
        job = trial.start(*SHARDED, "--hang-timeout-s", "5", ranks=2)
        assert job.finish(200) == 0, (job.out, job.err)
        assert len(trial.events("restarting")) == 1
        assert trial.result() == undisturbed
