"""What each process of a tree holds, mapping by mapping, while it runs (Linux): models apart from
the corpus.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from data_memory import PROC, Repeatedly, tree

# "7f00-7f10 r--s 00000000 fe:00 1234   /path", the first line of a mapping.
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s*(.*)$")
_PIECE = 1 << 22


@dataclass(frozen=True)
class Held:
    """Resident bytes of one process, or of several together.

    Attributes:
        pss: each shared page divided by how many map it.
        private: of pages that no other process maps.
        corpus_pss: the part of ``pss`` that is mapped from files of the corpus.
        corpus_rss: the same with shared pages in full.
    """

    pss: int = 0
    private: int = 0
    corpus_pss: int = 0
    corpus_rss: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(
            *(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__)
        )


def held_in(smaps: str, corpus: Collection[Path]) -> Held:
    """The sum over the mappings in the text of ``/proc/PID/smaps``; ``corpus`` are directories."""
    places = tuple(f"{place}/" for place in corpus)
    sums = {"Pss": 0, "Rss": 0, "Private_Clean": 0, "Private_Dirty": 0}
    corpus_pss = corpus_rss = 0
    inside = False
    for line in smaps.splitlines():
        name, _, rest = line.partition(":")
        if name in sums:
            size = int(rest.split()[0]) * 1024
            sums[name] += size
            corpus_pss += size if inside and name == "Pss" else 0
            corpus_rss += size if inside and name == "Rss" else 0
        elif mapping := _MAPPING.match(line):
            inside = mapping[3].startswith(places)
    return Held(sums["Pss"], sums["Private_Clean"] + sums["Private_Dirty"], corpus_pss, corpus_rss)


@dataclass(frozen=True)
class Moment:
    """Processes of a tree, by process id, looked at one after the other from ``time`` to ``until``
    (Unix seconds).
    """

    time: float
    held: dict[int, Held] = field(default_factory=dict)
    until: float = 0.0

    def of(self, pids: Iterable[int]) -> Held:
        """What those of ``pids`` that lived held together."""
        return sum((self.held[pid] for pid in pids if pid in self.held), Held())


def highest(moments: Iterable[Moment], pids: Collection[int]) -> Held:
    """What ``pids`` held together when that was most."""
    return max((moment.of(pids) for moment in moments), key=lambda held: held.pss, default=Held())


class Watch(Repeatedly):
    """Looks at the tree below ``root`` again and again while the block runs: peaks are lower
    bounds.
    """

    def __init__(self, root: int, corpus: Collection[Path], interval_s: float = 0.25) -> None:
        super().__init__(self._measure, interval_s)
        self.moments: list[Moment] = []
        self._root, self._corpus = root, corpus

    def _measure(self) -> None:
        at, held = time.time(), dict[int, Held]()
        for pid in tree(self._root):
            with suppress(OSError):  # it may have ended since
                held[pid] = held_in((PROC / str(pid) / "smaps").read_text(), self._corpus)
        self.moments.append(Moment(at, held, time.time()))


def read_through(pid: int, corpus: Collection[Path]) -> int:
    """Make another process hold all that it has mapped of the corpus, as it would after an epoch;
    returns the bytes.

    A page that is read through ``/proc/PID/mem`` comes into that process's own page table.

    Raises:
        OSError: the system does not let this process read the other's memory.
    """
    places = tuple(f"{place}/" for place in corpus)
    done = 0
    with (PROC / str(pid) / "mem").open("rb", buffering=0) as memory:
        for line in (PROC / str(pid) / "maps").read_text().splitlines():
            mapping = _MAPPING.match(line)
            if mapping is None or not mapping[3].startswith(places):
                continue
            at, end = int(mapping[1], 16), int(mapping[2], 16)
            memory.seek(at)
            while at < end and (piece := len(memory.read(min(_PIECE, end - at)))):
                at, done = at + piece, done + piece
    return done
