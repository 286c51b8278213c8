"""Computers of little memory on one: a command that ALLHANDS_SSH names runs in the control group of
its host.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroups:
    """Control groups that may have so many bytes each.

    Attributes:
        names: of the hosts.
        ssh: what ALLHANDS_SSH has to be.
    """

    names: tuple[str, ...]
    directories: tuple[Path, ...]
    ssh: str

    def within(self, name: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` in a host's group."""
        return [*shlex.split(self.ssh), "--", name, shlex.join(argv)]

    def peaks(self) -> list[int]:
        """The most bytes that each group has had, files in the page cache included."""
        files = ("memory.max_usage_in_bytes", "memory.peak")
        return [
            int(next(each / name for name in files if (each / name).exists()).read_text())
            for each in self.directories
        ]

    def killed(self) -> int:
        """Processes that were ended because a group was full."""
        files = [
            each / name
            for each in self.directories
            for name in ("memory.oom_control", "memory.events")
        ]
        lines = [
            line.split()
            for file in files
            if file.exists()
            for line in file.read_text().splitlines()
        ]
        return sum(int(words[1]) for words in lines if words[0] == "oom_kill")


@contextmanager
def memory_groups(
    names: Sequence[str], limit_bytes: int | Sequence[int], directory: Path
) -> Generator[MemoryGroups]:
    """A group for each host, with one limit for all or one each; the test is skipped where none can
    be made.
    """
    limits = [limit_bytes] * len(names) if isinstance(limit_bytes, int) else limit_bytes
    first = _ROOT / "memory" if (_ROOT / "memory").is_dir() else _ROOT
    limit = "memory.limit_in_bytes" if first != _ROOT else "memory.max"
    places = tuple(
        first / f"allhands-test-{directory.name}-{number}" for number in range(len(names))
    )
    try:
        for place, most in zip(places, limits, strict=True):
            place.mkdir()
            (place / limit).write_text(str(most))
    except OSError as error:
        _remove(places)
        pytest.skip(f"no control group of memory can be made here: {error}")
    program = directory / "ssh.py"
    program.write_text(_program(dict(zip(names, places, strict=True))))
    try:
        yield MemoryGroups(tuple(names), places, shlex.join([sys.executable, str(program)]))
    finally:
        _remove(places)


def _program(places: dict[str, Path]) -> str:
    """What stands for ssh: the words behind ``--`` are a host and a command for a shell."""
    groups = {name: str(place / "cgroup.procs") for name, place in places.items()}
    return f"""import os, sys
host, command = sys.argv[sys.argv.index("--") + 1:]
with open({groups!r}[host], "w") as group:
    group.write(str(os.getpid()))
os.execv("/bin/sh", ["sh", "-c", command])
"""


def _remove(places: Sequence[Path]) -> None:
    until = time.monotonic() + 10
    for place in places:
        while place.is_dir() and time.monotonic() < until:
            with suppress(OSError):  # somebody is still on the way out
                place.rmdir()
                break
            time.sleep(0.1)
