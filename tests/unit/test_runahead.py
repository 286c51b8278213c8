"""The limit of memory: found by the largest step, lifted for a larger one."""

from __future__ import annotations

from allhands.train.runahead import RunAhead

OWN = 10_000


class Device:
    """Memory with a limit, as MLX keeps it."""

    def __init__(self) -> None:
        self.limit = OWN
        self.stays, self.most = 100, 0

    def set_limit(self, limit: int) -> int:
        before, self.limit = self.limit, limit
        return before

    def run(self, ahead: RunAhead, *sizes: int) -> int:
        """A step whose micro-batches have so many tokens and need ten bytes for each; the limit while it ran."""
        ahead.before(max(sizes, default=0))
        during = self.limit
        self.most = max(self.most, self.stays + 10 * max(sizes, default=0))
        ahead.after()
        return during


def made(memory: int = 60) -> tuple[Device, RunAhead]:
    device = Device()
    return device, RunAhead(memory, device.set_limit, lambda: device.stays, lambda: device.most)


def test_the_first_step_is_free_and_gives_the_limit() -> None:
    device, ahead = made()
    assert device.run(ahead, 50, 20) == OWN
    assert device.limit == 100 + 300
    assert [device.run(ahead, 50), device.run(ahead, 10, 30)] == [400, 400]


def test_where_there_is_plenty_nothing_is_limited() -> None:
    device, ahead = made(memory=1000)
    assert [device.run(ahead, 50), device.run(ahead, 50)] == [OWN, OWN]
    # 100 and 510 of 1000: no longer plenty.
    assert [device.run(ahead, 51), device.run(ahead, 51)] == [OWN, 100 + 306]


def test_a_larger_step_is_free_again() -> None:
    device, ahead = made()
    device.run(ahead, 50)
    assert device.run(ahead, 100) == OWN
    assert device.limit == 100 + 600
    assert device.run(ahead, 99) == 700


def test_a_rank_without_samples_has_no_limit_yet() -> None:
    device, ahead = made()
    assert device.run(ahead) == OWN
    assert device.limit == OWN
    assert device.run(ahead, 5) == OWN
    assert device.limit == 130


def test_the_limit_is_given_back() -> None:
    device, ahead = made()
    device.run(ahead, 50)
    ahead.close()
    assert device.limit == OWN
    ahead.close()
    assert device.limit == OWN
