"""Detection of ranks that make no progress, from their heartbeats alone.

The module itself uses no clock, no file and no process. A rank that waits for others in a
collective is not the cause as long as another rank does something else. The limit for a phase
follows from the measured time of steps, so it suits steps of a minute as well as steps of a
millisecond.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from allhands.cluster.ranks import Beat, LaunchSpec, Marks

_LEAST_S = 4.0
_LEAST_VALIDATE_S = 10.0
# The first exchange may have to make connections and kernels; and before a step is measured, nothing
# is known of how busy the computer is.
_LEAST_FIRST_S = 30.0
_SAVE_S = 600.0
_RECENT_STEPS = 50
_FACTOR = 2.0  # the limit is this many times the longest recent step
_EVER_FACTOR = (
    1.2  # and this many times the longest step of all: a long batch may come after many short ones
)
# Instead of _EVER_FACTOR while fewer steps are known: it is not known yet how much steps differ.
_FEW_STEPS, _FEW_FACTOR = 3, 2.0
_LATE_S = 1.0  # between two looks; if it was longer, this process or the computer was asleep


@dataclass(frozen=True)
class Limits:
    """Limits for the phases, in seconds.

    Attributes:
        start_s: limit for the start and for a first step.
        finish_s: limit for the phase "end".
        hang_timeout_s: limit for the phases of a step; ``None``: it follows from the measured
            steps.
        slack: factor on all limits except ``start_s`` and ``elsewhere_s``.
        elsewhere_s: lowest limit for an exchange in which all watched ranks wait, perhaps for ranks
            that are not watched.
    """

    start_s: float = 600.0
    finish_s: float = 60.0
    hang_timeout_s: float | None = None
    slack: float = 1.0
    elsewhere_s: float = 0.0

    @classmethod
    def of(cls, spec: LaunchSpec, slack: float, elsewhere_s: float = 0.0) -> Limits:
        """Return the limits of a job with this spec."""
        return cls(
            spec.start_deadline_s, spec.finish_grace_s, spec.hang_timeout_s, slack, elsewhere_s
        )


@dataclass(frozen=True)
class Stall:
    """A rank that makes no progress.

    Attributes:
        seconds: time since its last heartbeat.
        mutual: all ranks wait for each other, so ``rank`` is only a guess: the one with the lowest
            step.
    """

    rank: int
    seconds: float
    phase: str
    step: int
    mutual: bool = False


class Pauses:
    """Times in which nothing watched the ranks: this process was stopped, or the computer slept."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._gaps: list[tuple[float, float]] = []

    def look(self, now: float) -> None:
        """Record a look at the ranks at the time ``now``; if it comes late, there was a pause."""
        if self._last is not None and now > self._last + _LATE_S:
            self._gaps.append((self._last, now))
        self._last = now

    def age(self, now: float, since: float) -> float:
        """Return the seconds from ``since`` to ``now`` without the pauses."""
        asleep = (min(ended, now) - max(began, since) for began, ended in self._gaps)
        return now - since - sum(seconds for seconds in asleep if seconds > 0.0)


class StepTimes:
    """Times of steps: each rank's own work, and the exchange.

    The time in which a rank waits for another does not count. Otherwise one rank's long save would
    allow every rank to be silent for as long. The exchange counts from the time at which the last
    rank has begun it.
    """

    def __init__(self) -> None:
        self._recent: dict[int, float] = {}  # by step: the time of the slowest rank
        self._own: dict[int, tuple[int, float]] = {}  # by rank: its step, and the seconds in it
        self._longest = 0.0

    def add(self, rank: int, step: int, seconds: float) -> None:
        """Add ``seconds`` to a rank's time in the step that follows after ``step`` updates."""
        at, so_far = self._own.get(rank, (step, 0.0))
        total = seconds + (so_far if at == step else 0.0)
        self._own[rank] = step, total
        self._recent[step] = max(self._recent.get(step, 0.0), total)
        if len(self._recent) > _RECENT_STEPS:
            del self._recent[min(self._recent)]
        self.add_first(total)

    def add_first(self, seconds: float) -> None:
        """Count a step that had to compile.

        It is only a measure for the longest step of all, not for recent steps.
        """
        self._longest = max(self._longest, seconds)

    @property
    def longest_recent(self) -> float:
        """The longest time of the last steps; 0 before any is known."""
        return max(self._recent.values(), default=0.0)

    def limit(self) -> float | None:
        """Return the time that a step may take; ``None`` before any time is known."""
        if not self._longest:
            return None
        recent = self.longest_recent
        ever = _FEW_FACTOR if len(self._recent) < _FEW_STEPS else _EVER_FACTOR
        return max(_LEAST_S, _FACTOR * recent, ever * self._longest)


class ProgressWatch:
    """Detects ranks without progress from the marks that it gets at every look."""

    def __init__(self, limits: Limits) -> None:
        self.pauses = Pauses()
        self._limits = limits
        self._times = StepTimes()
        self._validating = 0.0  # the longest time between two beats of a validation
        self._beats: dict[int, Beat] = {}
        self._together: float | None = None  # since when all living ranks have been in "reduce"
        self._exchanged = False  # whether a rank has ever finished an exchange

    def check(
        self, now: float, marks: Mapping[int, Marks], living: Collection[int]
    ) -> Stall | None:
        """Look at the marks at the time ``now``; return the rank that hangs, or ``None``.

        Args:
            marks: the marks of every rank; a rank without a heartbeat is not judged.
            living: the ranks that have not ended.
        """
        self.pauses.look(now)
        for rank, mark in marks.items():
            if mark.beat is not None:
                self._take(rank, mark.beat)
        beats = {rank: self._beats[rank] for rank in living if rank in self._beats}
        waiting = [rank for rank, beat in beats.items() if beat.phase == "reduce"]
        if beats and len(waiting) == len(set(living)):
            return self._judge_mutual(now, beats)
        self._together = None
        busy = {
            rank: marks[rank].busy_time or 0.0
            for rank in beats
            if rank not in waiting and marks[rank].started
        }
        stalls = [self._judge(now, rank, beats[rank], busy[rank]) for rank in busy]
        # The rank with the lowest step is the one for which the others wait.
        return min(
            (s for s in stalls if s is not None), key=lambda s: (s.step, -s.seconds), default=None
        )

    @property
    def longest_step_s(self) -> float:
        """The longest of the last steps, in seconds; 0 before any is known."""
        return self._times.longest_recent

    def _take(self, rank: int, beat: Beat) -> None:
        """If the beat is new, measure the phase that it has ended."""
        last = self._beats.get(rank)
        if last is not None and last.count == beat.count:
            return
        self._beats[rank] = beat
        if last is None:
            return
        self._exchanged = self._exchanged or last.phase == "reduce" or beat.step > last.step
        seconds = self.pauses.age(beat.time, last.time)
        if last.phase == "validate":
            self._validating = max(self._validating, seconds)
        elif last.phase == "first":
            self._times.add_first(seconds)
        elif last.phase in ("load", "compute", "update"):
            self._times.add(rank, last.step, seconds)
        elif last.phase == "reduce" and self._together is not None:
            self._times.add(
                rank, last.step, self.pauses.age(beat.time, max(self._together, last.time))
            )

    def _judge_mutual(self, now: float, beats: Mapping[int, Beat]) -> Stall | None:
        latest = max(beat.time for beat in beats.values())
        if self._together is None:
            self._together = latest
        seconds = self.pauses.age(now, latest)
        limit = max(self._limit("reduce"), self._limits.elsewhere_s)
        if seconds <= (limit if self._exchanged else max(limit, _LEAST_FIRST_S)):
            return None
        rank = min(beats, key=lambda rank: (beats[rank].step, rank))
        return Stall(rank, seconds, "reduce", beats[rank].step, mutual=len(beats) > 1)

    def _judge(self, now: float, rank: int, beat: Beat, busy: float) -> Stall | None:
        # The data are loaded in the background, so the loading may hang for some time before the
        # rank has to wait for it. ``waited_s`` is that time.
        waited = beat.waited_s if busy < beat.time else 0.0
        seconds = waited + self.pauses.age(now, max(beat.time, busy))
        return (
            Stall(rank, seconds, beat.phase, beat.step)
            if seconds > self._limit(beat.phase)
            else None
        )

    def _limit(self, phase: str) -> float:
        """Return the seconds that a phase may last without a heartbeat."""
        if phase in ("start", "first"):
            return self._limits.start_s
        fixed = {"save": _SAVE_S, "end": self._limits.finish_s}
        return self._limits.slack * (fixed[phase] if phase in fixed else self._step_limit(phase))

    def _step_limit(self, phase: str) -> float:
        known = self._limits.hang_timeout_s
        limit = self._times.limit() if known is None else known
        if phase != "validate":
            # The time of a start if nothing has been measured yet.
            return self._limits.start_s if limit is None else limit
        if known is None and self._validating:
            least = _LEAST_FIRST_S if limit is None else limit
            limit = max(least, _FACTOR * self._validating)
        return max(self._limits.start_s if limit is None else limit, _LEAST_VALIDATE_S)
