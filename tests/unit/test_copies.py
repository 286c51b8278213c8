"""What rank 0 tells of the copies of checkpoints on other computers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from twins import Table, ThreadCommunicator

from allhands.checkpoints import rundir
from allhands.checkpoints.copies import NUMBERS, Copies
from allhands.checkpoints.resuming import Restored
from allhands.checkpoints.rundir import share_history
from allhands.errors import AllhandsError, StorageError
from allhands.observe.metrics import METRICS_FILE, SavedReport, Warned

FULL = StorageError("cannot be written: No space left on device", code="disk-full", where="/out")


class Ranks:
    """Three computers; the second and third keep copies."""

    def __init__(self) -> None:
        self.steps = [0, 0, 0]
        table = Table(3)
        self.copies = [
            Copies(
                ThreadCommunicator(rank, 3, table),
                keeps=rank > 0,
                computer=f"nodé{rank}",
                newest=lambda rank=rank: self.steps[rank],
            )
            for rank in range(3)
        ]

    def saves(self, rank: int, step: int) -> list[Warned]:
        self.steps[rank] = step
        return self.copies[rank].note([SavedReport(step, "path", 0.0, 0.0)], step)

    def fails(self, rank: int, step: int) -> list[Warned]:
        return self.copies[rank].note([FULL], step)

    def together(self, call: Callable[[Copies], list[Warned]]) -> list[Warned]:
        """What rank 0 is to tell; the others tell nothing."""
        with ThreadPoolExecutor(3) as pool:
            first, *others = pool.map(call, self.copies)
        assert others == [[], []]
        return first

    def report(self, step: int) -> list[Warned]:
        told = [number for one in self.copies for number in one.told]
        assert len(told) == 3 * NUMBERS
        return self.together(lambda one: one.hear(told, step))

    def end(self, step: int) -> list[Warned]:
        return self.together(lambda one: one.settle(step))


def test_copies_that_are_kept_are_not_spoken_of() -> None:
    ranks = Ranks()
    for rank in (1, 2):
        assert ranks.saves(rank, 10) == []
    assert ranks.report(10) == []
    assert ranks.end(20) == []


def test_a_copy_that_is_not_kept_is_told_when_it_begins_and_at_the_end() -> None:
    ranks = Ranks()
    ranks.saves(1, 10)
    ranks.saves(2, 10)
    (own,) = ranks.fails(2, 20)
    assert "No space left" in own.message
    assert ranks.fails(2, 30) == []  # told already
    (told,) = ranks.report(30)
    assert (told.step, told.about, told.over) == (30, "copy on nodé2", False)
    assert "nodé2 is of step 10: /out: cannot be written: No space left on device" in told.message
    assert ranks.report(40) == []
    ranks.saves(1, 40)
    (last,) = ranks.end(40)
    assert "nodé2 is of step 10" in last.message
    assert last.about == told.about


def test_a_copy_that_is_kept_again_takes_the_warning_back() -> None:
    ranks = Ranks()
    ranks.fails(1, 10)
    (told,) = ranks.report(10)
    assert "there is no copy of the checkpoint on nodé1" in told.message
    ranks.saves(1, 20)
    (over,) = ranks.report(20)
    assert over.over
    assert over.about == told.about
    assert "of step 20" in over.message
    assert ranks.end(30) == []


def test_what_began_and_was_over_between_two_reports_is_not_told() -> None:
    ranks = Ranks()
    ranks.fails(1, 10)
    ranks.saves(1, 20)
    assert ranks.report(20) == []
    ranks.fails(1, 30)
    assert len(ranks.end(30)) == 1


@pytest.mark.parametrize("where", ["_make_way", "_write"])
def test_a_newcomer_that_cannot_write_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """All ranks take part in handing out, whatever one of them cannot do with it."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / METRICS_FILE).write_text("curve")
    real = getattr(rundir, where)

    def failing(directory: Path, *rest: object) -> None:
        if directory.name == "1":
            raise OSError(28, "No space left on device", str(directory))
        real(directory, *rest)

    monkeypatch.setattr(rundir, where, failing)
    table = Table(3)

    def share(rank: int) -> AllhandsError | None:
        restored = Restored({"step": 5, "iteration": 5}, {}, {}, "checkpoints/step-0000005", "one")
        try:
            share_history(
                ThreadCommunicator(rank, 3, table), tmp_path / str(rank), restored, "next", rank > 0
            )
        except AllhandsError as error:
            return error
        return None

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(share, range(3))
    assert first is third is None
    assert isinstance(second, StorageError)
    assert (tmp_path / "2" / METRICS_FILE).read_text() == "curve"
