"""Keep MLX on a GPU from making temporaries far ahead of their use.

MLX queues operations as fast as it can, and an array takes memory from then on. So a step may hold
twice the memory that it needs at any moment. With a limit the host sometimes waits for the device.
A lower limit costs more time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from allhands.runtime.memory import MLX_PEAK

# More memory does not help: on an H200, QLoRA of 7 billion parameters, LoRA and full training of
# 1.2 billion and full training of 135 million lose at most 1 % with this limit.
_ENOUGH = 17_500_000_000
# Work that is queued while the host waits comes on top of a limit.
_BELOW = 0.93
# The same for steps that are to hold no more than they need, with MLX's FREED_AT_ONCE.
_SPARED = 1.014
# A need that fits a card of 24 GB gets no more than the card; a larger need gets more by a factor.
_CARD, _MORE = 24_000_000_000, 1.2
# For ranks that exchange while they compute: a host at its limit waits for all queued work, and so
# for other ranks' messages, which makes these ranks wait in turn.
_EXCHANGING, _EXCHANGING_MOST = 2.0, 0.85
# Part of the device's memory; the rest is for other programs.
_MOST = 0.6
# The same for all memory of a process at any time.
_FULL = 0.9


def limit_for(
    need: int, device_bytes: int, *, exchanging: bool = False, spares: bool = False
) -> int:
    """Return the limit, in bytes, for steps that hold ``need`` bytes if nothing runs ahead.

    Args:
        exchanging: whether the queued work waits for other ranks' messages.
        spares: whether steps are to hold no more than their need.
    """
    if spares and need:
        return int(_SPARED * need)
    roomy = max(_ENOUGH, need) if need <= _CARD else _MORE * need
    most = _MOST * device_bytes
    if exchanging:
        roomy, most = max(roomy, _EXCHANGING * need), _EXCHANGING_MOST * device_bytes
    return int(max(_BELOW * need, min(roomy, most)))


@dataclass
class RunAhead:
    """Finds the limit by the first step of the largest micro-batch so far, with nothing queued
    ahead.

    Until then the limit is that of a need of 0.

    Attributes:
        device_bytes: memory of the device.
        exchanging, spares: see :func:`limit_for`.
        set_limit: takes bytes, returns the limit before.
        begin: resets the peak of used bytes, which ``peak`` returns.
        need: the most bytes of such a step.
    """

    device_bytes: int
    exchanging: bool = False
    spares: bool = False
    set_limit: Callable[[int], int] = mx.set_memory_limit
    begin: Callable[[], object] = MLX_PEAK.begin
    peak: Callable[[], int] = MLX_PEAK.part
    need: int = 0

    def __post_init__(self) -> None:
        self._most = 0
        self._measured = False
        self._own: int | None = self.set_limit(self._limit())  # MLX's, while ours is set

    def before(self, largest: int) -> None:
        """To be called before a step with the places of its largest micro-batch; more than ever are
        measured.
        """
        if largest > self._most:
            self._most, self._measured = largest, False
            self.set_limit(0)
            # What loading or measuring has held is no need of a step's.
            self.begin()

    def after(self) -> None:
        """To be called after it, when everything has been computed."""
        if not self._measured and self._most:
            self._measured = True
            self.need = max(self.need, self.peak())
            self.set_limit(self._limit())

    def spare(self) -> int:
        """Bytes of the device that can be held beside a step: then less runs ahead. 0 before one
        was measured.
        """
        return max(0, int(_FULL * self.device_bytes) - self.need) if self._measured else 0

    def close(self) -> None:
        """Give MLX its own limit back."""
        if self._own is not None:
            self.set_limit(self._own)
            self._own = None

    def _limit(self) -> int:
        return limit_for(
            self.need, self.device_bytes, exchanging=self.exchanging, spares=self.spares
        )
