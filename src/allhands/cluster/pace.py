"""How long a rank's steps take, measured by its own heartbeats.

A user who stops the run is told how long the running step will still take.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from allhands.cluster.place import LaunchPlace
from allhands.io.formatting import format_duration

_RECENT = 20
_BETWEEN = ("validate", "save", "start", "end")  # phases outside a step
# By platform: the setting that gives more time to end.
_SETTINGS = {
    "kubernetes": "terminationGracePeriodSeconds of the pod, and ALLHANDS_GRACE_S as much",
    "slurm": "--signal=USR1@SECONDS of sbatch, or KillWait",
    "sagemaker": "SageMaker's time is fixed: save more often, with --save-every",
    "vertex": "Vertex AI's time is fixed: save more often, with --save-every",
}


class Pace:
    """The times of the last steps.

    The training thread reports every beat; any thread may ask.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=_RECENT)
        self._step: int | None = None
        self._began: float | None = None  # when the running step began; ``None`` between two steps
        self._first = True
        self.phase = "start"

    def beat(self, phase: str, step: int) -> None:
        """Record that the rank is in ``phase`` after ``step`` updates."""
        now = self._clock()
        if self._began is not None and step != self._step:
            # The first step compiles, so its time is dropped once there is another.
            if self._first and self._times:
                self._times.clear()
                self._first = False
            self._times.append(now - self._began)
            self._began = None
        if self._began is None and phase not in _BETWEEN:
            self._began = now
        elif phase in _BETWEEN:
            self._began = None
        self._step, self.phase = step, phase

    @property
    def step_s(self) -> float | None:
        """The median time of the last steps; ``None``: not known yet."""
        times = list(self._times)
        return statistics.median(times) if times else None

    @property
    def is_steady(self) -> bool:
        """True if a step after the first one, which compiles, has been measured."""
        return not self._first

    @property
    def longest_s(self) -> float:
        """The longest time of the last steps; 0 if none is known."""
        return max(list(self._times), default=0.0)

    def left_s(self) -> float | None:
        """Return the time that the running step still needs if it takes the usual time.

        0 between two steps; ``None`` if the usual time is not known.
        """
        began, usual = self._began, self.step_s
        if began is None:
            return 0.0
        return None if usual is None else max(0.0, usual - (self._clock() - began))

    def told(self) -> str:
        """Return a line that says after which work the run stops, and about when."""
        if self.phase == "validate":
            return "stopping after this batch of the validation"
        if self.phase in ("save", "end"):
            return "stopping after the current save"
        if self._step is None:  # a program that reports no beats
            return "stopping after this step"
        left = self.left_s()
        if left is None:
            return "stopping after this step (the first, whose time is not known)"
        return f"stopping after this step (in about {format_duration(max(left, 0.1))})"


def too_short(pace: Pace, launch: LaunchPlace) -> str | None:
    """Return a warning if a step takes longer than the platform waits after SIGTERM, or ``None``.

    It says what may be lost, and which setting gives more time.
    """
    usual, given = pace.step_s, launch.grace_s
    if usual is None or not pace.is_steady or given is None or usual <= given:
        return None
    name = launch.platform.name or "the platform"
    setting = _SETTINGS.get(launch.platform.name, "its time between SIGTERM and SIGKILL")
    return (
        f"a step takes about {format_duration(usual)}, and {name} kills {format_duration(given)} after SIGTERM: what "
        f"was trained since the last checkpoint may be lost then; to give it more: {setting}"
    )
