"""What a measurement of the network has found: times of all-reduces, and what follows from them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SIZES = tuple(4096 * 4**power for power in range(8))  # 4 KiB to 64 MiB
_FIT_ROUNDS = 20
_LARGE_BYTES = 1 << 20
_TYPICAL_BYTES = 4 << 20  # by which links are compared: a LoRA adapter's gradient


@dataclass(frozen=True)
class Timing:
    """All-reduces of one size; each round took as long as on its slowest rank.

    Attributes:
        median_s: over the rounds; ``low_s`` and ``high_s`` are the quartiles.
    """

    num_bytes: int
    rounds: int
    median_s: float
    low_s: float
    high_s: float

    @property
    def bytes_per_s(self) -> float:
        """Algorithm bandwidth: bytes of the array by the time."""
        return self.num_bytes / self.median_s


@dataclass(frozen=True)
class Figures:
    """One group of ranks, measured.

    Attributes:
        hosts: their computers.
        timings: by size, ascending; the largest may be missing where time was short.
        latency_s: of the line that fits the times best: ``seconds = latency_s + num_bytes / bytes_per_s``.
        bytes_per_s: of that line, algorithm bandwidth.
        speeds: products and sums a second of each rank, all at work at the same time; empty where not measured.
    """

    hosts: tuple[str, ...]
    num_ranks: int
    backend: str
    timings: tuple[Timing, ...]
    latency_s: float
    bytes_per_s: float
    speeds: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        hosts: Sequence[str],
        num_ranks: int,
        backend: str,
        timings: Sequence[Timing],
        speeds: Sequence[float] = (),
    ) -> Figures:
        """Fit the line to at least one timing."""
        latency_s, bytes_per_s = fit([(timing.num_bytes, timing.median_s) for timing in timings])
        known = len(speeds) == num_ranks and all(0 < speed < math.inf for speed in speeds)
        told = tuple(map(float, speeds)) if known else ()
        return cls(tuple(hosts), num_ranks, backend, tuple(timings), latency_s, bytes_per_s, told)

    def bus_factor(self) -> float:
        """Bytes that each link carries for a byte of the array, whatever the number of ranks: 2 (n - 1) / n."""
        return 2 * (self.num_ranks - 1) / self.num_ranks

    def bus_bytes_per_s(self, timing: Timing | None = None) -> float:
        """Bus bandwidth: comparable between groups of different sizes and with the speed of the cable."""
        return self.bus_factor() * (timing.bytes_per_s if timing else self.bytes_per_s)

    def seconds(self, num_bytes: float) -> float:
        """What an all-reduce of so many bytes takes: as measured, linear between two sizes and beyond the largest.

        Not by the line: caches, packets and protocols have sizes of their own, at which the bandwidth changes.
        """
        smallest, largest = self.timings[0], self.timings[-1]
        if num_bytes <= smallest.num_bytes:
            return smallest.median_s
        for low, high in itertools.pairwise(self.timings):
            if num_bytes <= high.num_bytes:
                part = (num_bytes - low.num_bytes) / (high.num_bytes - low.num_bytes)
                return low.median_s + part * (high.median_s - low.median_s)
        return largest.median_s * num_bytes / largest.num_bytes

    def as_json(self) -> dict[str, Any]:
        """For machines: SI units, bandwidth of the bus beside the algorithm's."""
        content = asdict(self)
        for entry, timing in zip(content["timings"], self.timings, strict=True):
            entry |= {"bytes_per_s": timing.bytes_per_s, "bus_bytes_per_s": self.bus_bytes_per_s(timing)}
        return {**content, "bus_bytes_per_s": self.bus_bytes_per_s()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Figures:
        """What :meth:`as_json` has written; raises KeyError, TypeError or ValueError if it has not."""
        names = ("num_bytes", "rounds", "median_s", "low_s", "high_s")
        timings = [Timing(*(entry[name] for name in names)) for entry in content["timings"]]
        speeds = content.get("speeds", ())
        return cls.of(content["hosts"], int(content["num_ranks"]), str(content["backend"]), timings, speeds)


@dataclass(frozen=True)
class Failure:
    """A group that could not be measured.

    Attributes:
        hosts: the computers that are to blame as far as it is known, else all of the group.
        group: all of it.
        message: why.
        hint: what to do.
        log_tail: the last lines of the rank that is the cause.
    """

    hosts: tuple[str, ...]
    group: tuple[str, ...]
    message: str
    hint: str | None = None
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """What :func:`allhands.cluster.netbench.measure` has found.

    Attributes:
        whole: the group of all computers that could take part; ``None`` if it did not work.
        links: two computers each, one rank on each.
        failures: what did not work.
        not_measured: groups for which there was no time left.
        seconds_taken: in all.
    """

    backend: str
    whole: Figures | None
    links: tuple[Figures, ...] = ()
    failures: tuple[Failure, ...] = ()
    not_measured: tuple[tuple[str, ...], ...] = ()
    seconds_taken: float = 0.0

    @property
    def slowest_link(self) -> Figures | None:
        """The pair of computers whose all-reduce of 4 MiB takes longest; ``None`` with fewer than two links."""
        return max(self.links, key=lambda link: link.seconds(_TYPICAL_BYTES)) if len(self.links) > 1 else None

    @property
    def slow_host(self) -> str | None:
        """The computer all of whose links are at least twice as slow as every other link: its cable, or its Wi-Fi.

        So they must be at every large size, and by the quartiles: on a busy computer one median is an accident.
        """
        for name in dict.fromkeys(host for link in self.links for host in link.hosts):
            own = [link for link in self.links if name in link.hosts]
            others = [link for link in self.links if name not in link.hosts]
            if len(own) > 1 and others and _all_slower(own, others):
                return name
        return None

    def seconds_per_step(self, num_bytes: float) -> float | None:
        """Communication of a training step whose gradient has so many bytes; ``None`` if the group did not work."""
        return None if self.whole is None else self.whole.seconds(num_bytes)

    def as_json(self) -> dict[str, Any]:
        """For machines; the names are those of the attributes, bandwidth of the bus and the slowest link added."""
        slowest = self.slowest_link
        return {
            "backend": self.backend,
            "whole": self.whole.as_json() if self.whole else None,
            "links": [link.as_json() for link in self.links],
            "slowest_link": list(slowest.hosts) if slowest else None,
            "slow_host": self.slow_host,
            "failures": [asdict(failure) for failure in self.failures],
            "not_measured": [list(group) for group in self.not_measured],
            "seconds_taken": self.seconds_taken,
        }


def _all_slower(links: Sequence[Figures], others: Sequence[Figures]) -> bool:
    """Whether all of ``links`` take twice as long as any of ``others``, at each large size that all have."""
    tables = [{timing.num_bytes: timing for timing in link.timings} for link in (*links, *others)]
    common = set[int].intersection(*(set(table) for table in tables))
    sizes = sorted(size for size in common if size >= _LARGE_BYTES)
    slow, fast = tables[: len(links)], tables[len(links) :]
    return bool(sizes) and all(
        min(table[size].low_s for table in slow) >= 2 * max(table[size].high_s for table in fast) for size in sizes
    )


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return latency (s) and bandwidth (bytes/s) of the line ``seconds = latency + bytes / bandwidth``.

    Least squares of the errors relative to the line, so that small sizes count as much as large ones; neither is
    negative, and where times do not grow with the size the largest one gives the bandwidth.

    Args:
        points: bytes and seconds, at least one; all above 0.
    """
    num_bytes, seconds = max(points)
    latency, slope = 0.0, seconds / num_bytes
    if len(points) == 1:
        return latency, 1 / slope
    expected = [t for _, t in points]
    for _ in range(_FIT_ROUNDS):
        latency, slope = _line(points, [1 / t**2 for t in expected])
        if slope <= 0:
            return statistics.median_high(t for _, t in points), num_bytes / seconds
        expected = [latency + slope * size for size, _ in points]
    return latency, 1 / slope


def _line(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Latency, at least 0, and seconds a byte by weighted least squares; by hand, for numpy takes long to load."""
    both = [*zip(weights, points, strict=True)]
    w, s, t = sum(weights), sum(w * s for w, (s, _) in both), sum(w * t for w, (_, t) in both)
    ss, st = sum(w * s * s for w, (s, _) in both), sum(w * s * t for w, (s, t) in both)
    slope = (w * st - s * t) / (w * ss - s * s)
    latency = (t - slope * s) / w
    return (latency, slope) if latency >= 0 else (0.0, st / ss)
