"""Checkpoints that cannot be written, are torn or are damaged: training goes on, only whole ones
are gone on from.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty import ITERS, LORA, Bench, Result, Trial, fill, small_disk
from ranked_tasks import finetune

from allhands.checkpoints import checkpoints_in, latest, survey
from allhands.config.schema import build_config

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("storage"))


@pytest.fixture(scope="module")
def undisturbed(bench: Bench) -> Result:
    with bench.trial("undisturbed") as trial:
        trial.run(ranks=2)
        return trial.result()


@pytest.fixture
def trial(bench: Bench, request: pytest.FixtureRequest) -> Iterator[Trial]:
    with bench.trial(request.node.name.split("[")[0]) as trial:
        yield trial


def _records(trial: Trial) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trial.out / "metrics.jsonl").read_text().splitlines()]


def _drafts(directory: Path) -> list[Path]:
    """Hidden files and directories, as writers leave that did not come to their end."""
    # ".run" is the name of the run.
    return [path for path in directory.rglob(".*") if path.name not in (".", "..", ".run")]


def _restarted_from(trial: Trial) -> list[int]:
    """From which step each start but the first went on."""
    return [record["step"] for record in _records(trial) if record["event"] == "started"][1:]


def test_killed_at_every_point_of_a_save(trial: Trial, undisturbed: Result) -> None:
    """Before and after the checkpoint, between the files beside it, and before old ones are
    removed.
    """
    trial.plan(
        *(
            {"rank": 0, "step": 5 * write, "kind": "kill", "at": "save", "write": write}
            for write in (1, 2, 3, 4)
        ),
        {"rank": 0, "step": 25, "kind": "kill", "at": "save", "write": 1},
    )
    trial.run(ranks=2)
    assert [(fault.index, fault.step) for fault in trial.fired()] == [
        (0, 5),
        (1, 10),
        (2, 15),
        (3, 20),
        (4, 25),
    ]
    assert [event["rank"] for event in trial.events("fault")] == [0] * 5
    # Before a checkpoint is there: from the one before it. Afterwards: from it.
    assert _restarted_from(trial) == [0, 10, 15, 20, 20]
    assert trial.result() == undisturbed
    assert _drafts(trial.out) == []
    assert [found.error for found in survey(trial.out)] == [None] * len(survey(trial.out))


def test_a_disk_that_is_full_for_a_while(trial: Trial, undisturbed: Result) -> None:
    trial.plan(
        # Not at step 10, of which there is also the best adapter, a checkpoint like the others.
        {"rank": 0, "step": 15, "kind": "disk-full", "write": 1},
        {"rank": 1, "step": 18, "kind": "kill"},
    )
    job = trial.run(ranks=2)
    assert [fault.kind for fault in trial.fired()] == ["disk-full", "kill"]
    assert _restarted_from(trial) == [10]  # the one before is as it was
    assert trial.result() == undisturbed
    warnings = [record for record in _records(trial) if record["event"] == "warned"]
    assert len(warnings) == 1
    assert "no checkpoint was written" in warnings[0]["message"]
    assert "No space left on device" in warnings[0]["message"]
    assert "training goes on" in job.out + job.err


def test_a_save_that_failed_does_not_spoil_the_next(trial: Trial) -> None:
    """The save of step 10 fails when the one of step 11, after which the run is to stop, has been
    asked for.
    """
    trial.plan(
        {"rank": 0, "step": 10, "kind": "slow", "seconds": 1, "at": "save", "write": 1},
        {"rank": 0, "step": 10, "kind": "disk-full", "write": 2},
        {"rank": 1, "step": 10, "kind": "term"},
    )
    job = trial.run(code=143, ranks=2)
    assert sorted(fault.kind for fault in trial.fired()) == ["disk-full", "slow", "term"]
    assert checkpoints_in(trial.out)[0].name == "step-0000011"
    assert "stopped after step 11" in job.err


def test_a_disk_that_is_really_full(trial: Trial, undisturbed: Result) -> None:
    trial.plan(
        {"rank": 1, "step": 9, "kind": "hang"},
        {"rank": 1, "step": 18, "kind": "slow", "seconds": 2},
    )
    with small_disk(trial.out, megabytes=8) as disk:
        if disk is None:
            pytest.skip("no file system can be mounted here: that needs root and Linux")
        trial.start("--hang-timeout-s", "2", ranks=2)
        trial.wait_for_fired()
        filler = fill(disk)
        trial.wait_for_fired(
            2
        )  # it has been started again, and has passed the saves of steps 10 and 15
        assert [path.name for path in checkpoints_in(trial.out)] == ["step-0000005"]
        assert [
            found.error for found in survey(trial.out) if found.path.name.startswith("step")
        ] == [None]
        filler.unlink()
        assert trial.jobs[-1].finish() == 0, trial.jobs[-1].err
        assert trial.jobs[-1].out.count("no checkpoint was written") >= 2
        found = latest(trial.out)
        assert found is not None
        assert found.step == ITERS
        assert found.files["adapters.safetensors"]
        assert _drafts(trial.out) == []
        ended = trial.result()
    # The lines of the time in which nothing could be written are lost, the numbers are not.
    assert (ended.weights, ended.optimizer) == (undisturbed.weights, undisturbed.optimizer)


def test_a_slow_disk_does_not_hold_up_the_training(trial: Trial, undisturbed: Result) -> None:
    trial.plan({"rank": 0, "step": 10, "kind": "slow", "seconds": 1.5, "at": "save"})
    trial.run(ranks=2)
    assert len(trial.fired()) == 1
    order = [
        (record["event"], record["step"])
        for record in _records(trial)
        if record["event"] in ("train", "saved")
    ]
    saved = [place for place, entry in enumerate(order) if entry == ("saved", 10)][-1]
    assert order.index(("train", 14)) < saved
    assert trial.result() == undisturbed


def test_a_damaged_checkpoint_is_passed_over_and_named(trial: Trial, undisturbed: Result) -> None:
    trial.plan({"rank": 1, "step": 12, "kind": "slow", "seconds": 2})
    job = trial.start(ranks=2)
    trial.wait_for_fired()
    job.signal(15)
    assert job.finish() == 143, job.err
    newest, before = checkpoints_in(trial.out)[:2]
    assert (newest.name, before.name) == ("step-0000013", "step-0000010")
    chance = random.Random(4)
    for file in sorted(newest.iterdir()):  # each of them matters
        content = file.read_bytes()
        place = chance.randrange(len(content))
        file.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        found = latest(trial.out)
        assert found is not None
        assert found.step == 10, file
        file.write_bytes(content)
    victim = chance.choice(sorted(newest.iterdir()))
    content = victim.read_bytes()
    victim.write_bytes(content[:-1])
    job = trial.run("--resume", ranks=2)
    assert _restarted_from(trial) == [10]
    assert "a damaged checkpoint is left out" in job.out + job.err
    assert newest.name in job.out + job.err
    assert trial.result() == undisturbed


def test_no_thread_is_left(bench: Bench, tmp_path: Path, undisturbed: Result) -> None:
    before = set(threading.enumerate())
    flags = {
        "train": True,
        "model": str(bench.model),
        "data": str(bench.data),
        "adapter_path": str(tmp_path / "out"),
        "iters": ITERS,
        "save_every": 5,
        "steps_per_eval": 10,
        "val_batches": 1,
        "learning_rate": 1e-3,
        "lora_parameters": LORA,
    }
    finetune(build_config(flags))
    # The pool of the softmax belongs to the process.
    left = [
        one.name
        for one in set(threading.enumerate()) - before
        if not one.name.startswith("allhands-softmax")
    ]
    assert left == []
    assert [path.name for path in checkpoints_in(tmp_path / "out")] == [
        "step-0000030",
        "step-0000025",
    ]
