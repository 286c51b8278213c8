"""What the writer of checkpoints tells the loop: every outcome, once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from allhands.checkpoints import Tensor, checkpoint_path, open_checkpoint
from allhands.checkpoints.format import WEIGHTS_FILE
from allhands.checkpoints.saving import SaveKind, SavePlan, Saver
from allhands.errors import StorageError
from allhands.observe.metrics import SavedReport
from allhands.run.state import LoopState


class JustDone(Future[SavedReport]):
    """Ends between the first look at it and the second."""

    looks = 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks > 1


def test_a_save_that_ends_while_it_is_asked_for_is_told_the_next_time(tmp_path: Path) -> None:
    plan = SavePlan(tmp_path, "run", 0, 1, None, True, {}, dict)
    saver = Saver(plan, lambda: dict, lambda state: {})
    failed = JustDone()
    error = StorageError("the disk is full", code="disk-full")
    failed.set_exception(error)
    saver._pending.append((5, failed))
    assert [*saver.saved(False), *saver.saved(False), *saver.saved(True)] == [error]
    saver.close()


# --- a run that is resumed and has not changed ----------------------------------------------------


def tensors(first: int) -> dict[str, list[Tensor]]:
    return {
        name: [Tensor("w", "U8", (3,), bytes([first, 1, 2]))]
        for name in (WEIGHTS_FILE, "optimizer.safetensors")
    }


def save(directory: Path, kind: SaveKind, first: int = 0, keep_last: int = 2) -> list[SavedReport]:
    """What one save of step 5, of two batches each, says it has written."""
    plan = SavePlan(directory, "run", 0, keep_last, None, True, {"rank": 8}, dict)
    saver = Saver(
        plan, lambda: lambda: tensors(first), lambda state: {"iteration": state.iteration}
    )
    saver.save(LoopState(step=5, iteration=10), kind)
    reports = saver.saved(True)
    saver.close()
    assert all(isinstance(report, SavedReport) for report in reports), reports
    return [report for report in reports if isinstance(report, SavedReport)]


def stamps(directory: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {
        str(file.relative_to(directory)): (file.stat().st_ino, file.stat().st_mtime_ns)
        for file in files
    }


@pytest.mark.parametrize("keep_last", [0, 2])
def test_what_is_there_with_the_same_weights_stays(keep_last: int, tmp_path: Path) -> None:
    assert len(save(tmp_path, "last", keep_last=keep_last)) == 1
    before = stamps(tmp_path)
    assert save(tmp_path, "same", keep_last=keep_last) == []
    assert stamps(tmp_path) == before
    assert len(save(tmp_path, "last", keep_last=keep_last)) == 1
    assert all(stamps(tmp_path)[name] != before[name] for name in before)


LOST = {
    "checkpoints/step-0000005/optimizer.safetensors": {"checkpoints/step-0000005"},
    "0000010_adapters.safetensors": {"0000010_adapters.safetensors"},
    "adapters.safetensors": {"adapters.safetensors", "adapter_config.json"},
    "adapter_config.json": {"adapters.safetensors", "adapter_config.json"},
}


@pytest.mark.parametrize("lost", LOST)
def test_what_is_missing_is_written_and_nothing_else(lost: str, tmp_path: Path) -> None:
    save(tmp_path, "last")
    before = stamps(tmp_path)
    (tmp_path / lost).unlink()
    assert len(save(tmp_path, "same")) == 1
    after = stamps(tmp_path)
    assert after.keys() == before.keys()
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {name for name in before if any(name.startswith(one) for one in LOST[lost])}
    found = open_checkpoint(checkpoint_path(tmp_path, 5))
    assert (found.step, found.iteration) == (5, 10)


def test_other_weights_are_written_everywhere(tmp_path: Path) -> None:
    """As where the checkpoint of the same step is another run's."""
    save(tmp_path, "last")
    before = stamps(tmp_path)
    assert len(save(tmp_path, "same", first=9)) == 1
    assert all(stamp != before[name] for name, stamp in stamps(tmp_path).items())
    assert (tmp_path / WEIGHTS_FILE).read_bytes()[-3:] == bytes([9, 1, 2])


def test_what_is_written_of_one_step_is_held_once_and_not_for_longer(tmp_path: Path) -> None:
    held: list[weakref.ref[Callable[[], dict[str, list[Tensor]]]]] = []
    go_on = threading.Event()

    def hold() -> Callable[[], dict[str, list[Tensor]]]:
        def get() -> dict[str, list[Tensor]]:
            go_on.wait(60)
            return tensors(0)

        held.append(weakref.ref(get))
        return get

    saver = Saver(SavePlan(tmp_path, "run", 0, 2, None, True, {}, dict), hold, lambda state: {})
    saver.save(LoopState(step=5), "best")
    saver.save(LoopState(step=5), "last")
    assert len(held) == 1
    go_on.set()
    saver.save(LoopState(step=6), "last")  # waits for the others
    assert len(held) == 2
    reports = saver.saved(True)
    saver.close()  # the thread has let go of the last one, too
    assert [each() for each in held] == [None, None]
    assert [report.step for report in reports if isinstance(report, SavedReport)] == [5, 5, 6]


def test_where_there_is_no_room_for_two_versions_training_waits(tmp_path: Path) -> None:
    plan = SavePlan(tmp_path, "run", 0, 2, None, True, {}, dict)
    saver = Saver(plan, lambda: lambda: tensors(0), lambda state: {}, waits=lambda: True)
    saver.save(LoopState(step=5), "last")
    (report,) = saver.saved(False)
    assert isinstance(report, SavedReport)
    assert report.pause_s >= report.write_s
    saver.close()
