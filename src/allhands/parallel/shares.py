"""Shares of a batch in proportion to the ranks' measured speeds.

Each rank times its own passes; the numbers are sent with others that ranks add up in each step
anyway. Every rank puts the same numbers into the same functions of plain Python, and so computes
the same shares without further messages. New shares apply from a step that no rank has loaded or
queued yet.

A rank's passes take longer with more tokens, but its update does not. Shares are chosen so that
both together take the same time on every rank.

Shares change only if the slowest rank's time for the next batches, divided in whole rows, becomes
shorter by more than noise explains (:func:`better_weights`). So noise does not change shares, and
neither does a row that would only move the wait from one rank to another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from numpy.typing import NDArray

from allhands.data.loader import Cut
from allhands.data.order import GlobalOrder, divide

# Most and fewest steps by which a rank's speed is measured, and their number after a clear change.
_LONG, _ENOUGH, _SHORT = 48, 12, 5
# Measured steps take at least this long together, because a brief disturbance is no change; and the
# number of steps that are remembered.
_EVIDENCE_S, _KEPT = 2.0, 256
# Required gain of a step if many steps were measured, and if few; and the number of standard errors
# that are added to it.
_WORTH, _CLEARLY, _NOISE = 0.015, 0.08, 3.0
# Trials of a rank without rows are so rare that they cost at most this part of the time.
_TRIALS_COST = 0.005
_FIRST_TRIAL, _TRIAL_EVERY, _TRIAL_AT_LEAST = 10, 50, 2000
# Batches with more rows for each rank are divided as if rows could be cut.
_MANY_ROWS = 32
_ROUNDED = 1e-4  # of a share
# Number of future updates by which a division is judged.
_JUDGED = 4
# For normal deviations: the standard error of a median relative to that of a mean, and the standard
# deviation relative to the median difference of two.
_OF_MEDIAN, _OF_JUMPS = 1.2533, 1.4826 / math.sqrt(2)
_OF_ONE = 0.05  # least relative error of a speed by one step; by n steps an n-th of it
_NUMBERS = 3  # that a rank sends about its step


@dataclass(frozen=True)
class StepSample:
    """One step of one rank: tokens and seconds of its passes, seconds of its update, and its part
    of all ranks' speed.

    Parts are compared from step to step, not speeds: short rows are slower for every rank.
    """

    tokens: float
    seconds: float
    update_s: float = 0.0
    part: float = 1.0

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def update_tokens(self) -> float:
        """Tokens that its passes could compute in the time of its update."""
        return self.update_s * self.speed


@dataclass(frozen=True)
class Speed:
    """A rank's part of all ranks' speed, its relative standard error, and the tokens that take as
    long as an update.
    """

    part: float
    error: float = 0.0
    update: float = 0.0

    def seconds(self, tokens: float) -> float:
        """Seconds of a step of so many tokens, if all ranks together did one token a second."""
        return (tokens + self.update) / self.part


def speed_of(samples: Sequence[StepSample], noise: float) -> Speed:
    """Return a rank's speed by the medians of some steps, so that a disturbed step does not count;
    ``noise`` is that of one step.
    """
    part, update = (
        _median(sorted(each))
        for each in zip(*((s.part, s.update_tokens) for s in samples), strict=True)
    )
    return Speed(
        part, max(_OF_MEDIAN * noise / math.sqrt(len(samples)), _OF_ONE / len(samples)), update
    )


def noise_of(jumps: Sequence[float]) -> float:
    """Return the relative deviation of a step, by the jumps from each step to the next.

    A rank that becomes slower makes one jump, which is no noise.
    """
    return _OF_JUMPS * _median(sorted(jumps)) if jumps else 0.0


def _median(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


# Seconds of the next batches if they are divided by the weights and the ranks have the speeds.
StepSeconds = Callable[[Sequence[float], Sequence[Speed]], float]


def fluid_seconds(tokens: float) -> StepSeconds:
    """Return :data:`StepSeconds` of a step of so many tokens, if these could be divided freely."""

    def seconds(weights: Sequence[float], speeds: Sequence[Speed]) -> float:
        each = tokens / sum(weights)
        return max(
            speed.seconds(weight * each) for weight, speed in zip(weights, speeds, strict=True)
        )

    return seconds


def even_weights(speeds: Sequence[Speed], tokens: float) -> tuple[float, ...]:
    """Return weights with which all ranks need the same time for ``tokens``; 0 for a rank whose
    update alone takes longer.
    """
    some = list(range(len(speeds)))
    while True:
        updates, parts = (
            sum(getattr(speeds[rank], name) for rank in some) for name in ("update", "part")
        )
        shares = {
            rank: speeds[rank].part * (tokens + updates) / parts - speeds[rank].update
            for rank in some
        }
        if min(shares.values()) >= 0:
            return normalised([shares.get(rank, 0.0) for rank in range(len(speeds))])
        some = [rank for rank in some if shares[rank] >= 0]


def better_weights(
    weights: Sequence[float],
    speeds: Sequence[Speed],
    worth: float,
    tokens: float,
    seconds: StepSeconds,
) -> tuple[float, ...] | None:
    """Return weights that make a step of ``tokens`` faster by more than ``worth`` and noise; else
    ``None``.
    """
    wanted = 1.0 + worth + _NOISE * max(speed.error for speed in speeds)
    found, fluid = even_weights(speeds, tokens), fluid_seconds(tokens)
    # First a quick bound: dividing batches takes longer, and whole rows cannot be divided better.
    if fluid(weights, speeds) <= wanted * fluid(found, speeds):
        return None
    return found if seconds(weights, speeds) > wanted * seconds(found, speeds) else None


@dataclass(frozen=True)
class RowSeconds:
    """Maker of :data:`StepSeconds` of some batches whose rows are divided whole.

    Attributes:
        work: tokens of every row of the data set.
        accumulation: batches of an update, after which ranks wait for each other.
    """

    order: GlobalOrder
    work: NDArray[Any]
    accumulation: int = 1

    def __call__(self, begin: int, end: int) -> StepSeconds:
        """Return :data:`StepSeconds` of the batches from ``begin`` to before ``end``."""

        def seconds(weights: Sequence[float], speeds: Sequence[Speed]) -> float:
            total = 0.0
            for first in range(begin, end, self.accumulation):
                tokens = self.tokens(tuple(weights), first)
                total += max(
                    speed.seconds(each) for each, speed in zip(tokens, speeds, strict=True)
                )
            return total

        return seconds

    def tokens(self, weights: tuple[float, ...], first: int) -> list[float]:
        """Return each rank's tokens in the update that begins with batch ``first``."""
        tokens = [0.0] * len(weights)
        for batch in range(first, first + self.accumulation):
            shares = divide(self.order.batch(batch), self.work, weights, before=tokens)
            tokens = [
                old + float(self.work[share].sum())
                for old, share in zip(tokens, shares, strict=True)
            ]
        return tokens


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the same proportions with sum 1, rounded for reading; none becomes 0.

    A second call changes nothing, even if rounding has moved the sum away from 1.
    """
    whole = sum(weights)
    if abs(whole - 1.0) < _ROUNDED * len(weights) and all(
        round(weight, 4) == weight for weight in weights
    ):
        return tuple(weights)
    return tuple(max(round(weight / whole, 4), _ROUNDED) for weight in weights)


@dataclass(frozen=True)
class Moved:
    """Shares that have been agreed on.

    Attributes:
        begin: the first batch (from 0) with the new shares.
        weights: the new shares; ``before``: the old ones.
        speeds: tokens per second of each rank, from which the shares are computed.
        rows: for each rank True if it gets rows; a rank gets none if it needs longer for one row
            than the others for all.
    """

    begin: int
    weights: tuple[float, ...]
    before: tuple[float, ...]
    speeds: tuple[float, ...]
    rows: tuple[bool, ...] = ()


# First batch, weights, and ranks on trial.
_Entry = tuple[int, tuple[float, ...], tuple[int, ...]]


class Balance:
    """The shares of each batch, as all ranks agree on them.

    :meth:`cut` may be called from the thread that loads; everything else from the one that trains.
    """

    def __init__(
        self,
        weights: Sequence[float],
        *,
        begin: int = 0,
        accumulation: int = 1,
        loaded_ahead: int = 2,
        moves: bool = True,
        rows: RowSeconds | None = None,
    ) -> None:
        """Start with ``weights`` at batch ``begin``.

        Args:
            accumulation: batches of an update.
            loaded_ahead: batches that may be loaded already beyond those of the next update.
            moves: whether the shares follow the measured speeds.
            rows: returns the time of batches; default: as if tokens could be divided freely.
        """
        self.moves = moves and len(weights) > 1
        self._accumulation = accumulation
        self._begin = begin
        self._ahead = -(-(accumulation + loaded_ahead) // accumulation) * accumulation
        self._rows = rows
        self.own: tuple[float, ...] = (0.0,) * _NUMBERS  # of this rank's last step
        # Replaced as a whole, because another thread reads it.
        self._plan: tuple[_Entry, ...] = ((begin, tuple(weights), ()),)
        self._samples = [deque[StepSample](maxlen=_KEPT) for _ in weights]
        self._jumps = [deque[float](maxlen=_LONG) for _ in weights]
        self._longest = deque[float](
            maxlen=_KEPT
        )  # seconds of the slowest rank's passes in each step
        self._step_tokens = deque[float](maxlen=_LONG)  # of all ranks
        self._idle = [0] * len(weights)  # steps without rows
        self._trial_every = [_FIRST_TRIAL] * len(weights)
        self._heard = 0

    def to_json(self, iteration: int) -> dict[str, Any]:
        """Return the shares of batch ``iteration`` and later agreed ones, for :meth:`restore`."""
        _, weights, _ = self._entry(iteration)
        later = [
            [begin, list(each), list(some)] for begin, each, some in self._plan if begin > iteration
        ]
        return {"weights": list(weights), "later": later}

    def restore(self, values: Any) -> bool:
        """Go on with the shares of :meth:`to_json`, if the number of ranks is the same."""
        if (
            not self.moves
            or not isinstance(values, dict)
            or len(values.get("weights", ())) != self.size
        ):
            return False
        later = [
            (int(begin), tuple(each), tuple(some)) for begin, each, some in values.get("later", ())
        ]
        self._plan = ((self._begin, tuple(values["weights"]), ()), *later)
        return True

    @property
    def size(self) -> int:
        return len(self._samples)

    def cut(self, iteration: int) -> Cut:
        """Return the division of batch ``iteration``."""
        _, weights, some = self._entry(iteration)
        return Cut(weights, some, iteration - (iteration - self._begin) % self._accumulation)

    def _entry(self, iteration: int) -> _Entry:
        plan = self._plan
        return next((entry for entry in reversed(plan) if entry[0] <= iteration), plan[0])

    def weights(self, iteration: int) -> tuple[float, ...]:
        """Return the shares of batch ``iteration``, as weights."""
        return self.cut(iteration).weights

    def shares(self, iteration: int) -> tuple[float, ...]:
        """Return the ranks' parts of batch ``iteration``, which add up to 1; empty for one rank."""
        weights = self.weights(iteration)
        return normalised(weights) if len(weights) > 1 else ()

    def hear(self, numbers: Sequence[float], end: int) -> Moved | None:
        """Receive all ranks' measurements of the previous step, and change the shares if that pays.

        Called on all ranks with the same ``numbers``: for each rank the tokens and seconds of its
        passes, and the seconds of its update; all 0 if it had no passes or they were not timed.

        Args:
            end: batches done.
        """
        if len(numbers) != _NUMBERS * self.size:
            return None
        found = [
            StepSample(*numbers[at : at + _NUMBERS]) for at in range(0, len(numbers), _NUMBERS)
        ]
        if not self.moves or not any(_timed(sample) for sample in found):
            return None
        self._heard += 1
        if self._heard == 1:
            return None  # slower, because it builds what later steps reuse
        nexts = (*(entry[0] for entry in self._plan[1:]), math.inf)
        self._plan = tuple(
            entry for entry, after in zip(self._plan, nexts, strict=True) if after > end
        )
        self._take(found)
        if self._plan[-1][0] > end:
            return None  # a change is on its way
        moved = self._moved(end)
        if moved is None:
            self._try(end)
        return moved

    def _take(self, found: Sequence[StepSample]) -> None:
        """Remember a step's samples."""
        weights = self._plan[0][1]
        timed = [rank for rank, sample in enumerate(found) if _timed(sample)]
        whole = (
            sum(found[rank].speed for rank in timed)
            / sum(weights[rank] for rank in timed)
            * sum(weights)
        )
        longest = max(
            found[rank].seconds for rank in timed if not self._rests(rank) or len(timed) == 1
        )
        self._longest.append(longest)
        self._step_tokens.append(sum(found[rank].tokens for rank in timed))
        for rank in range(self.size):
            if rank not in timed:
                self._idle[rank] += 1
                continue
            if self._rests(rank):  # a trial: older samples are outdated
                self._samples[rank].clear()
                beyond = max(found[rank].seconds / longest - 1.0, 0.0)
                most = min(max(_TRIAL_EVERY, beyond / _TRIALS_COST), _TRIAL_AT_LEAST)
                self._trial_every[rank] = int(min(2 * self._trial_every[rank], most))
            part = found[rank].speed / whole
            if self._samples[rank]:
                last = self._samples[rank][-1].part
                self._jumps[rank].append(2 * abs(part - last) / (part + last))
            self._samples[rank].append(replace(found[rank], part=part))
            self._idle[rank] = 0

    def _rests(self, rank: int) -> bool:
        """Return true if a rank has had no rows for a while."""
        return self._idle[rank] >= _SHORT

    def _forget_before(self, last: int) -> None:
        for samples in self._samples:
            while len(samples) > last:
                samples.popleft()

    def _moved(self, end: int) -> Moved | None:
        """Change the shares, if many steps or the last few show a gain."""
        _, weights, _ = self._plan[-1]
        begin, steps = end + self._ahead, self._steps_in(_EVIDENCE_S)
        short = max(_SHORT, steps)
        for most, least, worth in (
            (max(_LONG, steps), max(_ENOUGH, steps), _WORTH),
            (short, short, _CLEARLY),
        ):
            speeds = self._measured(most, least)
            if speeds is None:
                continue
            tokens, rows = _median(sorted(list(self._step_tokens)[-most:])), self._rows
            if (
                rows is None or rows.order.batch_size > _MANY_ROWS * self.size
            ):  # these can be divided almost freely
                seconds = fluid_seconds(tokens)
            else:
                seconds = rows(begin, begin + _JUDGED * self._accumulation)
            new = better_weights(weights, speeds, worth, tokens, seconds)
            if new is None or new == weights:
                continue
            if worth == _CLEARLY:  # older samples are outdated
                self._forget_before(short)
            self._plan = (*self._plan, (begin, new, ()))
            self._trial_every = [_FIRST_TRIAL] * self.size
            per_s = tuple(self._per_s(rank, most) for rank in range(self.size))
            tokens_of_each = new if rows is None else rows.tokens(new, begin)
            return Moved(
                begin, new, normalised(weights), per_s, tuple(each > 0 for each in tokens_of_each)
            )
        return None

    def _steps_in(self, seconds: float) -> int:
        """Return the number of last steps that took this long together; all remembered steps if
        they took less.
        """
        for steps, taken in enumerate(accumulate(reversed(self._longest)), start=1):
            if taken >= seconds:
                return steps
        return _KEPT

    def _measured(self, most: int, least: int) -> list[Speed] | None:
        """Return each rank's speed by its last steps; ``None`` while a rank with rows has too few
        measurements.

        A rank without rows has the speed of its last trial; without a trial it has the speed of its
        share.
        """
        weights = self._plan[-1][1]
        speeds: list[Speed] = []
        for rank, samples in enumerate(self._samples):
            if len(samples) < least and not self._idle[rank]:
                return None
            some, noise = list(samples)[-most:], noise_of(self._jumps[rank])
            speeds.append(speed_of(some, noise) if some else Speed(weights[rank] / sum(weights)))
        return speeds

    def _per_s(self, rank: int, most: int) -> float:
        """Return a rank's median tokens a second; 0 if it was never measured."""
        speeds = sorted(sample.speed for sample in list(self._samples[rank])[-most:])
        return _median(speeds) if speeds else 0.0

    def _try(self, end: int) -> None:
        """Give a rank that has long had no rows the shortest of a batch: it may have recovered."""
        begin, (_, weights, _) = end + self._ahead, self._plan[-1]
        due = tuple(rank for rank, idle in enumerate(self._idle) if idle >= self._trial_every[rank])
        if due:
            self._plan = (
                *self._plan,
                (begin, weights, due),
                (begin + self._accumulation, weights, ()),
            )


def _timed(sample: StepSample) -> bool:
    return 0 < sample.tokens < math.inf and 0 < sample.seconds < math.inf
