"""Checkpoints written by a process that is killed, or whose disk fails, at every single step of the
writing.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file

from allhands.checkpoints import (
    Tensor,
    checkpoint_path,
    latest,
    prune,
    quick_step,
    survey,
    write_checkpoint,
)
from allhands.errors import StorageError

RUN_ID = "5eed"
# What changes a file system, or promises to have done so.
CALLS = (
    "open",
    "write",
    "fsync",
    "rename",
    "replace",
    "mkdir",
    "rmdir",
    "unlink",
    "chmod",
    "fchmod",
)
Fault = Literal["kill", "half", "fail"]
Operation = Callable[[Path], object]


def values(mark: int) -> np.ndarray[Any, Any]:
    return np.arange(600, dtype=np.float32) + mark


def write(target: Path, step: int, mark: int) -> None:
    tensor = Tensor("w", "F32", (600,), memoryview(values(mark)))
    files = {"adapters.safetensors": [tensor], "optimizer.safetensors": [tensor]}
    write_checkpoint(target, step, RUN_ID, {"mark": mark}, files, {"adapter_config.json": "{}"})


# --- in a process of its own, which has no threads and may be forked ------------------------------

OLD, NEW, NEXT = 1, 2, 3


def old_step(run: Path) -> None:
    write(checkpoint_path(run, 100), 100, OLD)


def old_best(run: Path) -> None:
    write(run / "best", 100, OLD)


def four_steps(run: Path) -> None:
    for step in (100, 200, 300):
        write(checkpoint_path(run, step), step, NEXT)
    write(checkpoint_path(run, 400), 400, OLD)


SCENARIOS: dict[str, tuple[Operation, Operation]] = {
    "first": (lambda run: run.mkdir(), lambda run: write(checkpoint_path(run, 100), 100, NEW)),
    "step": (old_step, lambda run: write(checkpoint_path(run, 200), 200, NEW)),
    "same": (old_step, lambda run: write(checkpoint_path(run, 100), 100, NEW)),
    "best": (old_best, lambda run: write(run / "best", 200, NEW)),
    "prune": (four_steps, lambda run: prune(run, 1, None, ())),
}


class Faulty:
    """Counts the calls that change the file system; at the last of ``limit`` the fault happens."""

    def __init__(self, fault: Fault, limit: int) -> None:
        self.fault, self.left = fault, limit
        self.name = ""
        for name in CALLS:
            setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.name = name
                self.strike(real, arguments)
            return real(*arguments, **more)

        return call

    def strike(self, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self.fault == "fail":
            raise OSError(errno.EIO, "Input/output error")
        if self.fault == "half" and self.name == "write":
            descriptor, data = arguments
            real(descriptor, memoryview(data)[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)


def attempt(operation: Operation, run: Path, fault: Fault, limit: int) -> dict[str, Any]:
    """Run ``operation`` in a fork with a fault at its ``limit``-th call; how that ended."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        faulty = Faulty(fault, limit)
        outcome: dict[str, Any] = {"error": None}
        try:
            operation(run)
        except StorageError as error:
            outcome["error"] = [error.where, error.message]
        outcome["fired"] = faulty.name
        faulty.left = 0
        os.write(tell, json.dumps(outcome).encode())
        os._exit(0)
    os.close(tell)
    with os.fdopen(told) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"killed": os.WTERMSIG(status)}
    return json.loads(text) if text else {"exit": status}


def mark_of(run: Path) -> int | None:
    """Which version ``latest`` finds, by its state and, read by another library, its weights."""
    found = latest(run, run_id=RUN_ID)
    if found is None:
        return None
    for name in ("adapters.safetensors", "optimizer.safetensors"):
        np.testing.assert_array_equal(
            load_file(found.path / name)["w"], values(found.state["mark"])
        )
    assert quick_step(run, RUN_ID) == found.step
    return found.state["mark"]


def litter(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob(".*"))


def every_fault(scenario: str, fault: Fault, scratch: Path) -> Iterator[dict[str, Any]]:
    """A record for the fault at each call until it comes too late to happen."""
    prepare, operation = SCENARIOS[scenario]
    template, run = scratch / "template", scratch / "run"
    prepare(template)
    for limit in count(1):
        shutil.copytree(template, run)
        record = attempt(operation, run, fault, limit) | {
            "found": mark_of(run),
            "litter": litter(run),
        }
        record["damaged"] = [str(look.path) for look in survey(run) if look.error is not None]
        # Whatever has happened, the run goes on.
        write(run / "best" if scenario == "best" else checkpoint_path(run, 500), 500, NEXT)
        prune(run, 1, None, ())
        record |= {
            "next": mark_of(run),
            "next_litter": litter(run),
            "left": [look.path.name for look in survey(run)],
        }
        shutil.rmtree(run)
        yield record
        if "killed" not in record and not record.get("fired"):
            return


def main(scenario: str, fault: Any, scratch: str) -> None:
    print(json.dumps(list(every_fault(scenario, fault, Path(scratch)))))


# --- the tests ------------------------------------------------------------------------------------


def records_of(scenario: str, fault: Fault, scratch: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, __file__, scenario, fault, str(scratch)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_the_run_goes_on(scenario: str, records: list[dict[str, Any]]) -> None:
    left = {"best": ["best"], "prune": ["step-0000500"]}.get(scenario, ["step-0000500"])
    for record in records:
        assert record["damaged"] == [], record
        assert (record["next"], record["next_litter"], record["left"]) == (NEXT, [], left), record


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "half"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_call_it_leaves_the_old_or_the_new(
    scenario: str, fault: Fault, tmp_path: Path
) -> None:
    records = records_of(scenario, fault, tmp_path)
    *killed, whole = records
    assert all(record["killed"] == signal.SIGKILL for record in killed), killed
    assert len(killed) > (8 if scenario == "prune" else 40)
    assert (whole["error"], whole["fired"], whole["litter"]) == (None, "", [])
    old = None if scenario == "first" else OLD
    new = OLD if scenario == "prune" else NEW
    found = [record["found"] for record in records]
    # First the old one, from some call on the new one.
    assert found == [old] * found.index(new) + [new] * (len(found) - found.index(new))
    assert len(set(found)) == (1 if scenario == "prune" else 2)
    # Something was lying about, so its removal is tested.
    assert any(record["litter"] for record in killed)
    assert_the_run_goes_on(scenario, records)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_error_of_the_disk_at_every_call_is_told_and_loses_nothing(
    scenario: str, tmp_path: Path
) -> None:
    records = records_of(scenario, "fail", tmp_path)
    *struck, whole = records
    assert {record["fired"] for record in struck} >= (
        {"rename"} if scenario == "prune" else {"open", "write", "fsync"}
    )
    assert whole["fired"] == ""
    old = None if scenario == "first" else OLD
    new = OLD if scenario == "prune" else NEW
    for record in records:
        if record["error"] is None:
            # Only what is left of the removed one, and of a lock that was held, may lie about.
            assert record["found"] == new
            kinds = (".replaced-", ".removed-", ".allhands-publishing")
            assert all(any(kind in name for kind in kinds) for name in record["litter"]), record
        else:
            assert record["found"] in (old, new)
            assert record["litter"] == []
            assert record["error"][1] == "cannot be written: Input/output error"
            assert ".partial-" not in record["error"][0]
    assert sum(record["error"] is not None for record in struck) >= (
        1 if scenario == "prune" else 30
    )
    assert_the_run_goes_on(scenario, records)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if (
        not sys.platform.startswith("linux")
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting a small file system needs Linux and root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def big(target: Path, step: int, kilobytes: int) -> None:
    tensor = Tensor("w", "U8", (kilobytes << 10,), bytes(kilobytes << 10))
    write_checkpoint(target, step, RUN_ID, {"mark": step}, {"adapters.safetensors": [tensor]})


def test_a_full_disk_is_told_and_loses_nothing(small_disk: Path) -> None:
    run = small_disk / "run"
    big(checkpoint_path(run, 100), 100, 50)
    big(run / "best", 100, 50)
    for target in (checkpoint_path(run, 200), run / "best"):
        with pytest.raises(StorageError, match="No space left") as caught:
            big(target, 200, 500)
        assert caught.value.where == str(target)
        assert "free some space" in (caught.value.hint or "")
    assert litter(run) == []
    assert [(look.path.name, look.error) for look in survey(run)] == [
        ("step-0000100", None),
        ("best", None),
    ]
    big(checkpoint_path(run, 200), 200, 50)
    found = latest(run)
    assert found is not None
    assert found.step == 200


def test_a_read_only_disk_is_told_and_loses_nothing(small_disk: Path) -> None:
    run = small_disk / "run"
    big(checkpoint_path(run, 100), 100, 5)
    big(checkpoint_path(run, 200), 200, 5)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match="Read-only file system") as caught:
        big(checkpoint_path(run, 300), 300, 5)
    assert "choose another directory" in (caught.value.hint or "")
    with pytest.raises(StorageError, match="Read-only file system"):
        prune(run, 1, None, ())
    assert [(look.path.name, look.error) for look in survey(run)] == [
        ("step-0000200", None),
        ("step-0000100", None),
    ]


def test_a_file_above_the_limit_of_the_shell_is_told_and_loses_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    big(checkpoint_path(tmp_path, 100), 100, 50)
    target = checkpoint_path(tmp_path, 200)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40 << 10, before[1]))
    try:
        with pytest.raises(StorageError, match="File too large") as caught:
            big(target, 200, 50)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.where == str(target)
    assert "ulimit -f" in (caught.value.hint or "")
    assert litter(tmp_path) == []
    assert mark_of_step(tmp_path) == 100


def mark_of_step(run: Path) -> int:
    found = latest(run)
    assert found is not None
    return found.state["mark"]


if __name__ == "__main__":
    main(*sys.argv[1:])
