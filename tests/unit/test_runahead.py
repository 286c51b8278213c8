"""The limit of memory: found by the largest step, in which nothing runs ahead."""

from __future__ import annotations

import pytest

from allhands.parallel.runahead import RunAhead, limit_for

OWN = 10_000
GB = 10**9


class Device:
    """Memory with a limit, as MLX keeps it."""

    def __init__(self) -> None:
        self.limit = OWN
        self.stays, self.most = 100, 0

    def set_limit(self, limit: int) -> int:
        before, self.limit = self.limit, limit
        return before

    def begin(self) -> None:
        self.most = self.stays

    def run(self, ahead: RunAhead, *sizes: int) -> int:
        """A step whose micro-batches have so many tokens and need ten bytes for each; the limit
        while it ran.
        """
        ahead.before(max(sizes, default=0))
        during = self.limit
        self.most = max(self.most, self.stays + 10 * max(sizes, default=0))
        ahead.after()
        return during


def made(memory: int = 600) -> tuple[Device, RunAhead]:
    device = Device()
    return device, RunAhead(
        memory, set_limit=device.set_limit, begin=device.begin, peak=lambda: device.most
    )


def test_in_the_first_step_nothing_runs_ahead_and_it_gives_the_limit() -> None:
    device, ahead = made()
    assert device.run(ahead, 50, 20) == 0
    assert device.limit == 558  # of 600 bytes that the step needs, on a device that has no more
    assert [device.run(ahead, 50), device.run(ahead, 10, 30)] == [558, 558]


def test_a_larger_step_is_measured_again() -> None:
    device, ahead = made()
    device.run(ahead, 50)
    assert device.run(ahead, 100) == 0
    assert device.limit == 1023
    assert device.run(ahead, 99) == 1023


def test_what_was_there_before_is_no_need() -> None:
    device, ahead = made()
    device.most = 5_000  # as loading has held
    device.run(ahead, 50)
    assert (ahead.need, device.limit) == (600, 558)


def test_a_rank_without_samples_has_the_limit_of_those_that_need_nothing() -> None:
    device, ahead = made()
    assert device.limit == 360
    assert device.run(ahead) == 360
    assert (device.limit, ahead.need) == (360, 0)
    assert device.run(ahead, 5) == 0
    assert (
        device.limit == 360
    )  # 0.6 of the device: there is room for more than the 150 bytes needed


def test_the_limit_is_given_back() -> None:
    device, ahead = made()
    device.run(ahead, 50)
    ahead.close()
    assert device.limit == OWN
    ahead.close()
    assert device.limit == OWN


@pytest.mark.parametrize(
    ("need", "device", "limit"),
    [
        (8, 141, 17.5),  # more is of no use
        (20, 141, 20),
        (23, 141, 23),  # within a card of 24 GB, though the device has more
        (50, 141, 60),  # more than such a card: a fifth ahead
        (80, 141, 84.6),
        (110, 141, 102.3),  # no room to run ahead
        (8, 24, 14.4),
        (20, 24, 18.6),
    ],
)
def test_the_limit_for_a_need(need: float, device: int, limit: float) -> None:
    assert limit_for(int(need * GB), device * GB) == pytest.approx(limit * GB, rel=1e-6)


@pytest.mark.parametrize(
    ("need", "memory", "limit"), [(20, 141, 40), (5, 141, 17.5), (20, 24, 20.4), (23, 24, 21.39)]
)
def test_where_ranks_exchange_there_is_room_for_twice_the_need(
    need: float, memory: float, limit: float
) -> None:
    assert limit_for(int(need * GB), int(memory * GB), exchanging=True) == pytest.approx(
        limit * GB, abs=2
    )
    assert limit_for(int(need * GB), int(memory * GB)) <= limit * GB


def test_who_spares_memory_gets_hardly_more_than_the_need() -> None:
    for exchanging in (False, True):
        limit = limit_for(55 * GB, 141 * GB, exchanging=exchanging, spares=True)
        assert 55 * GB <= limit <= 1.015 * 55 * GB
        # Before a step has been measured, others' limit: validation comes first.
        assert limit_for(0, 141 * GB, spares=True) == limit_for(0, 141 * GB) > 0


def test_what_is_spare_beside_a_step() -> None:
    device, ahead = made(memory=1000)
    assert ahead.spare() == 0  # nothing is known yet
    device.run(ahead, 10)
    assert ahead.spare() == 900 - 200
    ahead.before(20)
    assert ahead.spare() == 0  # it may need more
    ahead.after()
    device.run(ahead, 200)
    assert ahead.spare() == 0  # more than there is
