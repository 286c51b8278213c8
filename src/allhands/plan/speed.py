"""Time of a step on any number of computers, from its time on one computer.

As in Amdahl's law, a step has a serial part (the update, the program itself) and a part that is
divided among the ranks (the passes). With several ranks it also has the exchange. On one computer
there are only the first two parts, and measurements with two batch sizes separate them.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from allhands.parallel.costs import PackedGradients
from allhands.plan.links import ExchangeTimes

_WORTH = 0.05  # part of a step's time that another computer must save
_NUMBERS_BYTES = 64  # of the few numbers that ranks exchange in each step
_SAME = 1e-9  # differences of logarithms up to this are rounding errors


@dataclass(frozen=True)
class StepModel:
    """A step of the training that is planned.

    Attributes:
        serial_s: seconds of the serial part of each step, for any number of ranks.
        tokens: mean tokens of a global batch.
        token_s: seconds of one token on a computer of speed 1.
        rows: rows of a global batch, which cannot be cut further.
        gradient_bytes: bytes of the exchanged gradients.
        bucket_bytes: most bytes of one bucket, which is one all-reduce call.
        overlapped: True if the exchange overlaps the passes, except for the last bucket.
        packed: form of the exchanged gradients; ``None``: not packed.
        every: steps from one exchange to the next; the steps between exchange only a few numbers.
        beside: number of steps whose computation hides an exchange.
        word: bytes of a number of the gradients.
    """

    serial_s: float
    tokens: float
    token_s: float
    rows: int
    gradient_bytes: int
    bucket_bytes: int
    overlapped: bool = False
    packed: PackedGradients | None = None
    every: int = 1
    beside: int = 0
    word: int = 4

    @property
    def alone_s(self) -> float:
        """Return the time of a step on one computer."""
        return self.serial_s + self.tokens * self.token_s

    @property
    def serial_fraction(self) -> float:
        """Amdahl's serial fraction of a step."""
        return self.serial_s / self.alone_s

    def times(self, factor: float) -> StepModel:
        """Return the model with ``factor`` times as many rows in a batch."""
        return replace(self, tokens=self.tokens * factor, rows=round(self.rows * factor))


@dataclass(frozen=True)
class Prediction:
    """Prediction of a step on ``ranks`` computers.

    Attributes:
        step_s: seconds of the step.
        compute_s: seconds of the passes on the slowest rank.
        exchange_s: seconds of the whole exchange.
        exposed_s: seconds in which ranks wait for the exchange.
        speed_up: speed-up against the fastest computer alone with the same batch.
        capacity: sum of the speeds, relative to the fastest computer: the number of computers if
            all are equal.
    """

    ranks: int
    step_s: float
    compute_s: float
    exchange_s: float
    exposed_s: float
    speed_up: float
    capacity: float

    @property
    def efficiency(self) -> float:
        return self.speed_up / self.capacity


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return ``(serial_s, token_s)`` of the line through ``(tokens, seconds)`` of steps.

    Neither is below 0. Steps of a single size have no serial part.
    """
    if len({tokens for tokens, _ in points}) < 2:
        tokens, seconds = points[0]
        return 0.0, seconds / tokens
    seconds = [second for _, second in points]
    slope, base = statistics.linear_regression([tokens for tokens, _ in points], seconds)
    if slope <= 0:  # more tokens are not slower: all of the time seems to be serial
        return statistics.mean(seconds), 0.0
    return max(0.0, base), min(slope, min(second / tokens for tokens, second in points))


def exchange_s(model: StepModel, link: ExchangeTimes, ranks: int) -> float:
    """Return the seconds to exchange all gradients, bucket by bucket.

    With :attr:`StepModel.every` above 1 it is the mean time in a step.
    """
    whole, rest = divmod(model.gradient_bytes, model.bucket_bytes)
    everything = whole * _call_s(model, link, ranks, model.bucket_bytes)
    everything += _call_s(model, link, ranks, rest) if rest else 0.0
    if model.every == 1:
        return everything
    return everything / model.every + link.seconds(_NUMBERS_BYTES, ranks)


def _call_s(model: StepModel, link: ExchangeTimes, ranks: int, gradient_bytes: int) -> float:
    """Return the seconds to exchange ``gradient_bytes`` of gradients in one call."""
    packed = model.packed
    return link.seconds(
        gradient_bytes if packed is None else packed.all_reduced(gradient_bytes, ranks), ranks
    )


def predict(
    model: StepModel, link: ExchangeTimes, speeds: Sequence[float], room: int = 0
) -> Prediction:
    """Predict a step on computers of these speeds; the measured computer has speed 1.

    Shares are in proportion to speeds, in whole rows, and a step waits for the rank with the
    longest share.

    Args:
        room: number of ranks for which the cores of one computer suffice; more ranks take turns.
            0: each rank has cores of its own.
    """
    ranks, whole = len(speeds), sum(speeds)
    even, largest = model.rows / whole, _of_whole_rows(model.rows, speeds)
    # Rows have unequal lengths, so tokens can be cut more evenly than rows: take the mean of both.
    # But no rank that computes has less than a row.
    longest = max((even + largest) / 2, 1 / max(speeds))
    turns = max(1.0, ranks / room) if room else 1.0
    compute = turns * model.tokens * model.token_s * longest / model.rows
    exchange = exchange_s(model, link, ranks)
    exposed = exchange
    if model.overlapped:
        last = _call_s(model, link, ranks, min(model.bucket_bytes, model.gradient_bytes))
        exposed = max(
            min(last, exchange), exchange - compute / 2
        )  # a backward pass is more than half of it
    if model.beside:
        hidden = (turns * model.serial_s + compute) * model.beside / model.every
        exposed = max(min(link.seconds(_NUMBERS_BYTES, ranks), exchange), exchange - hidden)
    step = turns * model.serial_s + compute + exposed
    alone = model.serial_s + model.tokens * model.token_s / max(speeds)
    return Prediction(
        ranks, step, compute, exchange, exposed, alone / step, whole / turns / max(speeds)
    )


def _of_whole_rows(rows: int, speeds: Sequence[float]) -> float:
    """Return the largest rows / speed of a rank, if each row goes to the rank that would finish it
    first.
    """
    if len(set(speeds)) == 1:
        return math.ceil(rows / len(speeds)) / speeds[0]
    done = [(1 / speed, place) for place, speed in enumerate(speeds)]
    heapq.heapify(done)
    last = 0.0
    for _ in range(rows):
        last, place = done[0]
        heapq.heapreplace(done, (last + 1 / speeds[place], place))
    return last


def laws(serial_fraction: float, ranks: float) -> dict[str, float]:
    """Return the speed-ups of Amdahl (the same batch for all) and of Gustafson (a batch for each
    rank), without an exchange.
    """
    amdahl = 1.0 / (serial_fraction + (1.0 - serial_fraction) / ranks)
    return {"amdahl": amdahl, "gustafson": ranks - serial_fraction * (ranks - 1)}


def enough(seconds: Mapping[int, float]) -> int:
    """Return the number of computers beyond which each further one saves less than 5 % of a step's
    time.

    If rows do not divide evenly, the next computer may save nothing although a later one does. So
    all larger numbers are checked.

    Args:
        seconds: time of a step by number of computers.
    """
    # Each computer that is worth it lowers the logarithm of the time by -log(1 - 5 %) or more.
    left = {
        ranks: math.log(time) - ranks * math.log(1.0 - _WORTH) for ranks, time in seconds.items()
    }
    least = math.inf
    found = max(left)
    for ranks in sorted(left, reverse=True):
        if left[ranks] < least - _SAME:
            found = ranks
        least = min(least, left[ranks])
    return found
