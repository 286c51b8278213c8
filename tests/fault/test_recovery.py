"""Ranks and launchers that fail in every way we know: the run goes on by itself, and ends as if
nothing had happened.

Each run is compared, bit for bit, with one that was never disturbed: weights, optimizer state,
every step's loss.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import ITERS, SAVE_EVERY, Bench, Footprint, Result, Trial, files_left, memory_group
from hostile import Job, until
from safetensors.numpy import load_file

pytestmark = pytest.mark.long

# For as long as it takes to be killed, asked to stop, or looked at.
_PAUSE_S = 2.0


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("recovery"))


@pytest.fixture(scope="module")
def undisturbed(bench: Bench) -> Result:
    """The run on three ranks that nothing happens to."""
    with bench.trial("undisturbed") as trial:
        trial.run()
        assert trial.steps() == list(range(1, ITERS + 1))
        assert trial.events("fault") == []
        return trial.result()


@pytest.fixture
def trial(bench: Bench, request: pytest.FixtureRequest) -> Iterator[Trial]:
    with bench.trial(request.node.name.split("[")[0]) as trial:
        yield trial


def _restart_steps(trial: Trial) -> list[int]:
    """From which step each restart went on: one below the first that was trained after it."""
    steps = trial.steps()
    return [after - 1 for before, after in pairwise(steps) if after <= before]


# --- ranks that end -------------------------------------------------------------------------------


def test_ranks_that_die_in_every_way(trial: Trial, undisturbed: Result) -> None:
    """One after the other: before anything is saved, in the data, at the exchange, and after it."""
    trial.plan(
        {"rank": 2, "step": 3, "kind": "raise", "at": "update", "text": "no such luck"},
        {"rank": 1, "step": 7, "kind": "kill"},
        {"rank": 0, "step": 13, "kind": "exit", "code": 7, "at": "reduce"},
        {"rank": 2, "step": 18, "kind": "raise", "at": "load", "text": "the disk has gone"},
        {"rank": 0, "step": 20, "kind": "kill", "at": "validate"},
    )
    job = trial.start()
    until(lambda: bool(trial.events("started")), 60.0, "it has not started")
    before = Footprint.of(job)
    assert len(before.processes) >= 4
    assert before.directories
    assert job.finish(120) == 0, (job.out, job.err)
    assert [(fault.index, fault.step) for fault in trial.fired()] == [
        (0, 3),
        (1, 7),
        (2, 13),
        (3, 18),
        (4, 20),
    ]
    faults = trial.events("fault")
    assert [event["rank"] for event in faults] == [2, 1, 0, 2, 0]
    for event, words in zip(
        faults,
        ("no such luck", "killed by SIGKILL", "exited with code 7", "the disk has gone", "SIGKILL"),
        strict=True,
    ):
        assert words in event["message"]
    assert [event["exit_code"] for event in faults] == [1, 137, 7, 1, 137]
    assert all(event["detected_s"] < 5 for event in faults)
    assert len(trial.events("restarting")) == 5
    assert len(trial.events("finished")) == 1
    # Each goes on from the last checkpoint, or one before it if that was not yet complete.
    for at, step in zip((3, 7, 13, 18, 20), _restart_steps(trial), strict=True):
        assert step % SAVE_EVERY == 0
        assert at - 2 * SAVE_EVERY < step <= at
    assert trial.result() == undisturbed
    before.assert_gone()


def test_a_failure_that_comes_again_is_not_tried_for_ever(trial: Trial) -> None:
    entry = {"rank": 1, "step": 7, "kind": "raise", "text": "this sample is unreadable"}
    trial.plan(entry, entry, entry)
    job = trial.run(code=1)
    assert job.err.count("allhands: error: rank 1 exited with code 1 at step 7") == 1
    assert "RuntimeError: this sample is unreadable" in job.err
    assert [(fault.index, fault.step) for fault in trial.fired()] == [(0, 7), (1, 7)]
    assert len(trial.events("restarting")) == 1
    (given_up,) = trial.events("given up")
    assert "failed at step 7 in the same way" in given_up["message"]
    # What was saved is there to go on from.
    assert max(trial.steps()) == 7


# --- ranks that hang ------------------------------------------------------------------------------


def test_ranks_that_hang_in_every_way(trial: Trial, undisturbed: Result) -> None:
    """Stopped, asleep where its peers wait for it in the exchange, busy for ever, and without its
    data.
    """
    trial.plan(
        {"rank": 2, "step": 6, "kind": "stop"},
        {"rank": 1, "step": 12, "kind": "hang", "at": "reduce"},
        {"rank": 0, "step": 18, "kind": "spin"},
        {"rank": 1, "step": 24, "kind": "hang", "at": "load"},
    )
    trial.run("--hang-timeout-s", "2")
    assert [fault.index for fault in trial.fired()] == [0, 1, 2, 3]
    faults = trial.events("fault")
    assert [event["rank"] for event in faults] == [2, 1, 0, 1]
    assert [event["step"] for event in faults] == [6, 12, 18, 24]
    assert "the process is stopped" in faults[0]["message"]
    assert all("made no progress" in event["message"] for event in faults)
    assert 2 <= faults[0]["detected_s"] < 4
    # After a hang the next start is given more time: it may have been a step that takes long.
    assert all(2 <= event["detected_s"] < 6 for event in faults)
    assert trial.result() == undisturbed


def test_a_hang_is_found_without_being_told_how_long_a_step_takes(
    trial: Trial, undisturbed: Result
) -> None:
    trial.plan({"rank": 1, "step": 14, "kind": "stop", "at": "reduce"})
    trial.run()
    (fired,) = trial.fired()
    (fault,) = trial.events("fault")
    assert (fault["rank"], fault["step"]) == (1, 14)
    assert (
        fault["time"] - fired.time < 7
    )  # five seconds, and the moment to write down where it hangs
    assert trial.result() == undisturbed


def test_a_pause_is_no_hang(trial: Trial, undisturbed: Result) -> None:
    trial.plan(
        {"rank": 1, "step": 8, "kind": "slow", "seconds": 3},
        {"rank": 0, "step": 9, "kind": "slow", "at": "load"},
    )
    trial.run()
    assert len(trial.fired()) == 2
    assert trial.events("fault") == []
    assert trial.result() == undisturbed


# --- memory ---------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_for_want_of_memory(trial: Trial, undisturbed: Result) -> None:
    trial.plan({"rank": 1, "step": 8, "kind": "oom"})
    with memory_group(1 << 30) as prefix:
        if prefix is None:
            pytest.skip("no memory group can be made here: that needs root and Linux")
        trial.run(prefix=prefix)
    assert [(fault.kind, fault.step) for fault in trial.fired()] == [("oom", 8)]
    (fault,) = trial.events("fault")
    assert fault["rank"] == 1
    assert "out of memory" in fault["message"]
    assert trial.result() == undisturbed


# --- the launcher ---------------------------------------------------------------------------------


def _stop(trial: Trial, job: Job, code: int) -> None:
    """The command has been asked to stop: it has saved what is done, and says how to go on."""
    assert job.finish(30) == code, job.err
    at = max(trial.steps())
    assert at < ITERS
    assert f"stopped after step {at} of {ITERS}" in job.err
    assert "--resume" in job.err


def test_asked_to_stop_it_saves_and_goes_on_when_told_to(trial: Trial, undisturbed: Result) -> None:
    """By SIGTERM, by a scheduler that wants one rank's computer, and by Ctrl-C: one after the
    other.
    """
    trial.plan(
        {"rank": 1, "step": 4, "kind": "slow", "seconds": _PAUSE_S},
        {"rank": 2, "step": 10, "kind": "term"},
        {"rank": 0, "step": 16, "kind": "slow", "seconds": _PAUSE_S},
    )
    job = trial.start()
    trial.wait_for_fired(1)
    job.signal(signal.SIGTERM)
    _stop(trial, job, 143)
    _stop(trial, trial.start("--resume"), 143)
    assert len(trial.fired()) == 2
    job = trial.start("--resume")
    trial.wait_for_fired(3)
    job.signal(signal.SIGINT)
    _stop(trial, job, 130)
    trial.run("--resume")
    assert trial.steps() == list(range(1, ITERS + 1))  # nothing was lost, nothing done twice
    assert trial.result() == undisturbed


def test_a_launcher_that_ends_at_once_leaves_nothing_and_the_next_one_goes_on(
    trial: Trial, undisturbed: Result
) -> None:
    """Ctrl-C twice while a rank hangs; killed while one is stopped, and cannot see it, and another
    one spins.
    """
    trial.plan(
        {"rank": 1, "step": 7, "kind": "hang"},
        {"rank": 2, "step": 13, "kind": "stop"},
        {"rank": 0, "step": 13, "kind": "spin"},
    )
    job = trial.start()
    trial.wait_for_fired(1)
    began = time.monotonic()
    job.signal(signal.SIGINT, signal.SIGINT)
    assert job.finish(30) == 130, job.err
    assert time.monotonic() - began < 5
    job = trial.start("--resume")
    trial.wait_for_fired(3)
    before = Footprint.of(job)
    assert len(before.processes) >= 4
    job.process.kill()
    job.process.wait()
    until(lambda: not job.processes(), 5.0, "some process is left")
    job.finish()
    until(lambda: not files_left(trial.temporary), 5.0, "a temporary directory is left")
    before.assert_gone()
    trial.run("--resume")
    assert _restart_steps(trial) == [5, 10]
    assert trial.result() == undisturbed


# --- fewer and more ranks -------------------------------------------------------------------------


def _assert_close(mine: Result, theirs: Result) -> None:
    """Equal but for the order of sums."""
    assert [step for step, _ in mine.losses] == [step for step, _ in theirs.losses]
    np.testing.assert_allclose(
        *([loss for _, loss in run.losses] for run in (mine, theirs)), rtol=2e-5
    )
    np.testing.assert_allclose(
        *([loss for _, loss in run.valid_losses] for run in (mine, theirs)), rtol=2e-5
    )
    assert mine.trained_tokens == theirs.trained_tokens
    weights = [load_file(run.directory / "adapters.safetensors") for run in (mine, theirs)]
    for name in weights[0]:
        np.testing.assert_allclose(weights[0][name], weights[1][name], rtol=1e-3, atol=2e-5)


def test_three_ranks_then_two_then_three(trial: Trial, undisturbed: Result) -> None:
    for ranks, more in (
        (3, ("--iters", "10")),
        (2, ("--iters", "20", "--resume")),
        (3, ("--resume",)),
    ):
        trial.run(*more, ranks=ranks)
    assert trial.steps() == list(range(1, ITERS + 1))
    _assert_close(trial.result(), undisturbed)


def test_a_rank_that_fails_again_and_again_is_done_without(
    trial: Trial, undisturbed: Result
) -> None:
    entry = {"rank": 2, "step": 7, "kind": "kill"}
    trial.plan(entry, entry, entry, entry)
    job = trial.run("--min-ranks", "2")
    assert len(trial.fired()) == 3  # there is no rank 2 for the fourth
    (left_out,) = trial.events("left out")
    assert left_out["host"] == "slot 2"
    assert [event["num_ranks"] for event in trial.events("restarting")] == [3, 3, 2]
    assert "slot 2 is left out" in job.out + job.err
    _assert_close(trial.result(), undisturbed)


# --- chance ---------------------------------------------------------------------------------------


def _chosen_at_random(seed: int, count: int) -> list[dict[str, Any]]:
    """Failures that are found at once, at random ranks, points and steps."""
    choose = random.Random(seed)
    entries: list[dict[str, Any]] = []
    for step in sorted(choose.sample(range(1, ITERS - 1), count)):
        rank = choose.randrange(3)
        # What rank 0 says goes to the terminal; a trace there would be taken for one of the
        # launcher's.
        kind = choose.choice(("kill", "exit", "raise") if rank else ("kill", "exit"))
        at = choose.choice(("step", "load", "reduce", "update"))
        entries.append({"rank": rank, "step": step, "kind": kind, "at": at})
    return entries


def test_failures_at_random(trial: Trial, undisturbed: Result) -> None:
    """A few of many more: see scripts/soak.py."""
    trial.plan(*_chosen_at_random(seed=1, count=4))
    trial.run()
    assert len(trial.fired()) == 4
    assert len(trial.events("fault")) == 4
    assert trial.result() == undisturbed


# --- poisoned numbers -----------------------------------------------------------------------------


def test_a_poisoned_gradient_stops_the_run(trial: Trial) -> None:
    trial.plan({"rank": 1, "step": 6, "kind": "nan"})
    job = trial.start()
    job.fails(6, "step 6")
    assert len(trial.fired()) == 1
    assert trial.events("restarting") == []


def test_or_is_left_out_on_all_ranks(trial: Trial, undisturbed: Result) -> None:
    trial.plan({"rank": 1, "step": 6, "kind": "nan"})
    trial.run("--non-finite", "skip")
    assert len(trial.fired()) == 1
    text = (trial.out / "metrics.jsonl").read_text()
    (skipped,) = [json.loads(line) for line in text.splitlines() if '"event": "skipped"' in line]
    assert skipped["step"] == 7
    found = trial.result()
    assert found.losses[:6] == undisturbed.losses[:6]
    assert all(np.isfinite(loss) for _, loss in found.losses)
    assert found.weights != undisturbed.weights


def test_without_a_fault_the_file_of_events_says_so(undisturbed: Result, bench: Bench) -> None:
    assert len(undisturbed.losses) == ITERS
    (out,) = [path for path in Path(bench.directory).glob("undisturbed-*") if path.is_dir()]
    kinds = [json.loads(line)["kind"] for line in (out / "events.jsonl").read_text().splitlines()]
    assert kinds == ["launched", "started", "finished"]
