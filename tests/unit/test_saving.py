"""What the writer of checkpoints tells the loop: every outcome, once."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

from allhands.errors import StorageError
from allhands.metrics import SavedReport
from allhands.train.saving import SavePlan, Saver


class JustDone(Future[SavedReport]):
    """Ends between the first look at it and the second."""

    looks = 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks > 1


def test_a_save_that_ends_while_it_is_asked_for_is_told_the_next_time(tmp_path: Path) -> None:
    plan = SavePlan(tmp_path, "run", 0, 1, None, True, {}, dict)
    saver = Saver(plan, dict, lambda state: {})
    failed = JustDone()
    error = StorageError("the disk is full")
    failed.set_exception(error)
    saver._pending.append((5, failed))
    assert [*saver.saved(False), *saver.saved(False), *saver.saved(True)] == [error]
    saver.close()
