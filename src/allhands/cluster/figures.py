"""Results of measuring the network: times of all-reduces, and quantities computed from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SIZES = tuple(4096 * 4**power for power in range(8))  # 4 KiB to 64 MiB
_LARGE_BYTES = 1 << 20
_TIMED = ("num_bytes", "rounds", "median_s", "low_s", "high_s")
_TYPICAL_BYTES = 4 << 20  # size at which links are compared: the gradient of a LoRA adapter


@dataclass(frozen=True)
class Timing:
    """Times of all-reduces of one size; the time of a round is that of its slowest rank.

    Attributes:
        median_s: median over the rounds.
        low_s: lower quartile.
        high_s: upper quartile.
    """

    num_bytes: int
    rounds: int
    median_s: float
    low_s: float
    high_s: float

    @property
    def bytes_per_s(self) -> float:
        """Algorithm bandwidth: bytes of the array divided by the median time."""
        return self.num_bytes / self.median_s


@dataclass(frozen=True)
class Figures:
    """The measurement of one group of ranks.

    Attributes:
        hosts: their computers.
        timings: one for each size, smallest first; at least one. The largest sizes are missing if
            time was short.
        speeds: for each rank its multiplications and additions in a second, while all ranks
            compute; empty if not measured.
    """

    hosts: tuple[str, ...]
    num_ranks: int
    backend: str
    timings: tuple[Timing, ...]
    speeds: tuple[float, ...] = ()

    @property
    def latency_s(self) -> float:
        """Seconds that the smallest all-reduce takes."""
        return self.timings[0].median_s

    @property
    def bytes_per_s(self) -> float:
        """Algorithm bandwidth of the largest all-reduce.

        Smaller arrays may fit into buffers on the way, so their bandwidth says less.
        """
        return self.timings[-1].bytes_per_s

    def bus_bytes_per_s(self, timing: Timing | None = None) -> float:
        """Return the bus bandwidth, by default of the largest all-reduce.

        It can be compared with the speed of the cable: for each byte of the array each link carries
        2 (n - 1) / n bytes.
        """
        return 2 * (self.num_ranks - 1) / self.num_ranks * (timing or self.timings[-1]).bytes_per_s

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of an all-reduce of ``num_bytes``.

        Between two measured sizes, and above the largest, the time grows linearly. Below the
        smallest size it is constant.
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
        """Return the figures for JSON, in SI units, with both bandwidths added."""
        content = asdict(self)
        for entry, timing in zip(content["timings"], self.timings, strict=True):
            entry |= {
                "bytes_per_s": timing.bytes_per_s,
                "bus_bytes_per_s": self.bus_bytes_per_s(timing),
            }
        line = {"latency_s": self.latency_s, "bytes_per_s": self.bytes_per_s}
        return {**content, **line, "bus_bytes_per_s": self.bus_bytes_per_s()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Figures:
        """Read the content that :meth:`as_json` or a rank has written.

        Raises:
            KeyError, TypeError, ValueError: the content is something else.
        """
        timings = tuple(
            Timing(**{name: entry[name] for name in _TIMED}) for entry in content["timings"]
        )
        if not timings or not all(0 < timing.median_s < math.inf for timing in timings):
            raise ValueError("no times")
        num_ranks, speeds = int(content["num_ranks"]), tuple(map(float, content.get("speeds", ())))
        known = len(speeds) == num_ranks and all(0 < speed < math.inf for speed in speeds)
        return cls(
            tuple(content["hosts"]),
            num_ranks,
            str(content["backend"]),
            timings,
            speeds if known else (),
        )


@dataclass(frozen=True)
class Failure:
    """A group that could not be measured.

    Attributes:
        hosts: the computers that caused the failure, if that is known; otherwise the whole group.
        group: all computers of the group.
        message: why it failed.
        hint: what the user can do.
        log_tail: the last lines of the log of the rank that is the cause.
        code: code of the error, if there was one.
    """

    hosts: tuple[str, ...]
    group: tuple[str, ...]
    message: str
    hint: str | None = None
    log_tail: tuple[str, ...] = ()
    code: str | None = None


@dataclass(frozen=True)
class Measurement:
    """Result of :func:`allhands.cluster.netbench.measure`.

    Attributes:
        whole: figures of the group of all computers that could take part; ``None`` if it failed.
        links: figures of pairs of computers, with one rank on each.
        failures: the groups that could not be measured.
        not_measured: groups for which there was no time left.
        seconds_taken: seconds that the whole measurement took.
    """

    backend: str
    whole: Figures | None
    links: tuple[Figures, ...] = ()
    failures: tuple[Failure, ...] = ()
    not_measured: tuple[tuple[str, ...], ...] = ()
    seconds_taken: float = 0.0

    @property
    def slowest_link(self) -> Figures | None:
        """The pair of computers whose all-reduce of 4 MiB takes longest; ``None`` with fewer than
        two links.
        """
        return (
            max(self.links, key=lambda link: link.seconds(_TYPICAL_BYTES))
            if len(self.links) > 1
            else None
        )

    @property
    def slow_host(self) -> str | None:
        """The computer whose links are all at least twice as slow as every other link, or ``None``.

        The cause is then its cable or its Wi-Fi. This must be so at every large size, and for the
        quartiles: on a busy computer a single median may be high by chance.
        """
        for name in dict.fromkeys(host for link in self.links for host in link.hosts):
            own = [link for link in self.links if name in link.hosts]
            others = [link for link in self.links if name not in link.hosts]
            if len(own) > 1 and others and _all_slower(own, others):
                return name
        return None

    def seconds_per_step(self, num_bytes: float) -> float | None:
        """Return the seconds of communication in a training step whose gradient has ``num_bytes``.

        ``None`` if the group could not be measured.
        """
        return None if self.whole is None else self.whole.seconds(num_bytes)

    def as_json(self) -> dict[str, Any]:
        """Return the measurement for JSON.

        The names are those of the attributes. The bandwidths, the slowest link and the slow
        computer are added.
        """
        slowest = self.slowest_link
        return {
            **asdict(self),
            "whole": self.whole.as_json() if self.whole else None,
            "links": [link.as_json() for link in self.links],
            "slowest_link": slowest.hosts if slowest else None,
            "slow_host": self.slow_host,
        }


def _all_slower(links: Sequence[Figures], others: Sequence[Figures]) -> bool:
    """Return whether each of ``links`` takes at least twice as long as each of ``others``, at every
    large size that all have.
    """
    tables = [{timing.num_bytes: timing for timing in link.timings} for link in (*links, *others)]
    common = set[int].intersection(*(set(table) for table in tables))
    sizes = sorted(size for size in common if size >= _LARGE_BYTES)
    slow, fast = tables[: len(links)], tables[len(links) :]
    return bool(sizes) and all(
        min(table[size].low_s for table in slow) >= 2 * max(table[size].high_s for table in fast)
        for size in sizes
    )
