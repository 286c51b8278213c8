"""Processes of a run side by side: present values, highest values, and sums."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import psutil

from allhands.observe.monitor.samples import Sample

State = Literal["lives", "ended", "silent"]
Key: TypeAlias = tuple[str, int | None, str]
_ORDER = {"orchestrator": 0, "agent": 1, "rank": 2}
_PATIENCE_S = 5.0
_PATIENCE = 3.0  # times the interval between samples


@dataclass
class BoardRow:
    """One process of the run; for a rank that was started again, the latest process.

    Attributes:
        last: its latest sample, ``before`` the one before that.
        peak_pss_bytes: the highest proportional memory of a sample. Peaks are those of all starts.
        peak_rss_bytes: the highest peak that the process reported; ``peak_mlx_bytes``: that MLX
            reported.
    """

    last: Sample
    before: Sample | None = None
    peak_pss_bytes: int = 0
    peak_rss_bytes: int = 0
    peak_mlx_bytes: int = 0

    def take(self, sample: Sample) -> None:
        """Take the next sample in."""
        self.before = self.last if self.last.pid == sample.pid and self.last is not sample else None
        self.last = sample
        self.peak_pss_bytes = max(self.peak_pss_bytes, sample.pss_bytes)
        self.peak_rss_bytes = max(self.peak_rss_bytes, sample.peak_rss_bytes)
        self.peak_mlx_bytes = max(self.peak_mlx_bytes, sample.mlx_peak_bytes or 0)

    def doing(self, now: float, gone: Collection[tuple[str, int]] = ()) -> str:
        """Return the longest phase of the last sample, with its share; the state if the process is
        over.
        """
        phases, state = self.last.phases, self.state(now, gone)
        if state != "lives":
            return state
        if not sum(phases.values()):
            return self.last.phase or "watches"
        longest = max(phases, key=lambda phase: phases[phase])
        return f"{longest} {phases[longest] / sum(phases.values()):.0%}"

    def net_per_s(self) -> tuple[float, float] | None:
        """Return the bytes a second that the computer sends and receives, over all interfaces."""
        if self.before is None or (seconds := self.last.time - self.before.time) <= 0:
            return None
        (sent, received), (sent_before, received_before) = _moved(self.last), _moved(self.before)
        return (sent - sent_before) / seconds, (received - received_before) / seconds

    def state(self, now: float, gone: Collection[tuple[str, int]] = ()) -> State:
        """Return whether the process lives at ``now``, has ended, or was silent for too long.

        Args:
            gone: host name and process id of processes that are known to be gone.
        """
        if self.last.ended:
            return "ended"
        silent = (
            now > self.last.time + _patience_s(self.last) or (self.last.host, self.last.pid) in gone
        )
        return "silent" if silent else "lives"


def _moved(sample: Sample) -> tuple[int, int]:
    return sum(sent for sent, _ in sample.net.values()), sum(
        received for _, received in sample.net.values()
    )


def _patience_s(sample: Sample) -> float:
    return _PATIENCE_S + _PATIENCE * sample.every_s


class Board:
    """The processes of the latest run, from samples in the order of their times."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._rows: dict[Key, BoardRow] = {}
        self._counted: dict[Key, Sample] = {}  # latest samples of processes that live
        self._looked = 0.0
        self.run: str | None = None
        self.began = 0.0  # time of the run's first sample, in Unix time
        self.peak_together_bytes = self.peak_ranks_bytes = 0
        for sample in samples:
            self.add(sample)

    def add(self, sample: Sample) -> None:
        """Take a sample in; the first of another run discards the run before."""
        if sample.run != self.run:
            self._rows, self._counted, self.run, self.began = {}, {}, sample.run, sample.time
            self.peak_together_bytes = self.peak_ranks_bytes = 0
        key = key_of(sample)
        row = self._rows.setdefault(key, BoardRow(sample))
        row.take(sample)
        self._counted[key] = sample
        if sample.time > self._looked + sample.every_s:
            self._looked = sample.time
            self._counted = {
                key: last
                for key, last in self._counted.items()
                if self._rows[key].state(sample.time) == "lives"
            }
        self._count(sample)
        if sample.ended:  # counted above: until its end it held memory beside the others
            self._counted.pop(key, None)

    def _count(self, sample: Sample) -> None:
        """Raise the peaks to the present sums, or to the process's own peak between samples."""
        told = sample.peak_rss_bytes
        counted = self._counted.values()
        self.peak_together_bytes = max(self.peak_together_bytes, told, together(counted))
        if sample.role == "rank":
            ranks = together(one for one in counted if one.role == "rank")
            self.peak_ranks_bytes = max(self.peak_ranks_bytes, told, ranks)

    def rows(self) -> list[BoardRow]:
        """Return the processes in the order: orchestrator, agents, ranks."""
        return sorted(
            self._rows.values(),
            key=lambda row: (_ORDER[row.last.role], row.last.rank or 0, row.last.host),
        )

    def together_bytes(self, now: float, gone: Collection[tuple[str, int]] = ()) -> int:
        """Return the memory of all processes that live at ``now``, in bytes; see :func:`together`."""
        return together(row.last for row in self._rows.values() if row.state(now, gone) == "lives")

    def over(self, now: float, gone: Collection[tuple[str, int]] = ()) -> bool:
        """Return whether there are processes, and none of them lives."""
        return bool(self._rows) and all(
            row.state(now, gone) != "lives" for row in self._rows.values()
        )


def gone_here(board: Board) -> set[tuple[str, int]]:
    """Return this computer's host name with the id of each of its processes that is gone."""
    here = socket.gethostname()
    return {
        (here, row.last.pid) for row in board.rows() if row.last.host == here and _is_gone(row.last)
    }


def _is_gone(sample: Sample) -> bool:
    try:
        process = psutil.Process(sample.pid)
        # Another process may have got its id since.
        return process.status() == psutil.STATUS_ZOMBIE or process.create_time() > sample.time + 1.0
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def together(samples: Iterable[Sample]) -> int:
    """Return the memory of processes at the same time, in bytes; shared pages count once.

    It is the sum of their proportional memory, and on each computer at least the resident memory of
    its largest process, because pages shared with programs outside of the run take their full size.
    """
    by_host: dict[str, list[Sample]] = {}
    for sample in samples:
        by_host.setdefault(sample.host, []).append(sample)
    return sum(
        max(sum(one.pss_bytes for one in some), max(one.rss_bytes for one in some))
        for some in by_host.values()
    )


def key_of(sample: Sample) -> Key:
    """Return the process's place in its run: a rank may be started again, and on another computer."""
    return sample.role, sample.rank, sample.host if sample.role == "agent" else ""
