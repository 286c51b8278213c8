"""Time of a step on any number of computers, from its time on one: Amdahl's law and its neighbours.

A step has a serial part (the update, the program itself), a part that is divided among the ranks
(the passes), and the exchange. On one computer there are only the first two parts, and measurements
with two batch sizes separate them.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from allhands.parallel.costs import PackedGradients
from allhands.plan.links import ExchangeTimes

_WORTH = 0.05  # what another computer must save of a step's time
_NUMBERS_BYTES = 64
_SAME = 1e-9  # of logarithms


@dataclass(frozen=True)
class StepModel:
    """A step of the training that is planned.

    Attributes:
        serial_s: seconds of the serial part of each step, for any number of ranks.
        tokens: mean tokens of a global batch.
        token_s: seconds of one token on a computer of speed 1.
        rows: rows of a global batch, which cannot be cut further.
        gradient_bytes: bytes of the exchanged gradients.
        bucket_bytes: bytes of one call, at most.
        overlapped: True if the exchange overlaps the passes, except for one call.
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
    """A step on some computers.

    Attributes:
        compute_s: seconds of computation on the slowest rank.
        exchange_s: seconds of the whole exchange; ``exposed_s``: the part that ranks wait for.
        speed_up: against the fastest computer alone with the same batch.
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
    """Fit ``(serial_s, token_s)`` to the line through ``(tokens, seconds)`` of steps; neither is
    below 0.
    """
    if len({tokens for tokens, _ in points}) < 2:
        tokens, seconds = points[0]
        return 0.0, seconds / tokens
    seconds = [second for _, second in points]
    slope, base = statistics.linear_regression([tokens for tokens, _ in points], seconds)
    if slope <= 0:  # more is not slower: all of it is overhead, as far as can be seen
        return statistics.mean(seconds), 0.0
    return max(0.0, base), min(slope, min(second / tokens for tokens, second in points))


def exchange_s(model: StepModel, link: ExchangeTimes, ranks: int) -> float:
    """Return the time to exchange all gradients, call by call; with rare exchanges, the part of one
    step.
    """
    whole, rest = divmod(model.gradient_bytes, model.bucket_bytes)
    everything = whole * _call_s(model, link, ranks, model.bucket_bytes)
    everything += _call_s(model, link, ranks, rest) if rest else 0.0
    if model.every == 1:
        return everything
    return everything / model.every + link.seconds(_NUMBERS_BYTES, ranks)


def _call_s(model: StepModel, link: ExchangeTimes, ranks: int, gradient_bytes: int) -> float:
    """Return the time of one call, with so much of the gradients."""
    packed = model.packed
    return link.seconds(
        gradient_bytes if packed is None else packed.all_reduced(gradient_bytes, ranks), ranks
    )


def predict(
    model: StepModel, link: ExchangeTimes, speeds: Sequence[float], room: int = 0
) -> Prediction:
    """Predict a step on computers of these speeds; the measured computer has speed 1.

    Shares are in proportion to speeds, in whole rows, and a step waits for the rank with the
    longest share. More ranks than one computer has ``room`` for take turns on its cores in all
    computation; 0: each has cores of its own.
    """
    ranks, whole = len(speeds), sum(speeds)
    even, largest = model.rows / whole, _of_whole_rows(model.rows, speeds)
    # Rows are of unequal lengths, so that tokens are cut more evenly than rows are: between the
    # two. But no rank that computes at all has less than a row.
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
    """Rows by speed of the rank that takes longest, each row given to the one that is done with it
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
    """Return the speed-up of Amdahl (the same batch) and of Gustafson (a batch for each), with
    nothing exchanged.
    """
    amdahl = 1.0 / (serial_fraction + (1.0 - serial_fraction) / ranks)
    return {"amdahl": amdahl, "gustafson": ranks - serial_fraction * (ranks - 1)}


def enough(seconds: Mapping[int, float]) -> int:
    """Return the number of computers beyond which each further one saves less than 5 % of a step's
    seconds.

    If rows do not divide evenly, the next computer may save nothing although a later one does. So
    all larger numbers are checked.
    """
    # Each computer that is worth it takes log(1 - 5 %) off the logarithm at least.
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
