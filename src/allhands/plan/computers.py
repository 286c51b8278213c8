"""The computers of a plan: their speeds, their memory for a training, and their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from allhands.io.formatting import format_bytes

_ALL_SHOWN = 16  # lines of a table; for more computers there are only lines for powers of two


@dataclass(frozen=True)
class Computer:
    """A computer, or a rank's part of a computer.

    Attributes:
        name: its usual name.
        speed: speed relative to the computer on which a step was measured or estimated.
        usable_bytes: memory that a training may take; ``None`` if unknown.
        memory_bytes: all of its memory.
        why: why a training may take less than all memory, in words.
        watts: power during training.
        part: the rank's part, if several ranks share the computer.
    """

    name: str
    speed: float = 1.0
    usable_bytes: int | None = None
    memory_bytes: int | None = None
    why: str = ""
    watts: float | None = None
    part: float = 1.0

    @property
    def memory_told(self) -> str:
        """The computer's memory, and the usable part of it, in words."""
        if self.usable_bytes is None:
            return "memory not known"
        if self.memory_bytes is None or self.memory_bytes <= self.usable_bytes:
            return f"{format_bytes(self.usable_bytes)} for training"
        why = f" ({self.why})" if self.why else ""
        return f"{format_bytes(self.usable_bytes)} of {format_bytes(self.memory_bytes)} for training{why}"

    def holds(self, num_bytes: int) -> bool | None:
        """Return whether a rank that needs ``num_bytes`` fits; ``None`` if that is not known."""
        return None if self.usable_bytes is None else num_bytes <= self.usable_bytes


Team = tuple[Computer, ...]


def all_hold(team: Sequence[Computer], num_bytes: Sequence[int]) -> bool | None:
    """Return whether each computer holds its bytes; ``None`` if that is not known."""
    found = {each.holds(needed) for each, needed in zip(team, num_bytes, strict=True)}
    return False if False in found else None if None in found else True


def fractions(team: Sequence[Computer]) -> tuple[float, ...]:
    """Return the part of each batch that each computer gets, in proportion to its speed."""
    whole = sum(each.speed for each in team)
    return tuple(each.speed / whole for each in team)


def largest(computers: Sequence[Computer]) -> Computer:
    """Return the computer with the most memory; if several have as much, the fastest of these."""
    return max(computers, key=lambda each: (each.usable_bytes or 0, each.speed))


def alone(computers: Sequence[Computer], num_bytes: int | None) -> Computer:
    """Return the best single computer for a training that needs ``num_bytes``: the fastest that
    holds it, else the one with the most memory.
    """
    able = [each for each in computers if num_bytes is None or each.holds(num_bytes) is not False]
    if able:
        return max(able, key=lambda each: (each.speed, each.usable_bytes or 0))
    return largest(computers)


def ordered(
    computers: Sequence[Computer], first: Computer, able: Callable[[Computer], bool]
) -> Team:
    """Return the computers in the order in which they are added.

    ``first`` comes first, then computers that are ``able`` to take part, then all others; in each
    group the fastest come first.
    """
    others = list(computers)
    others.remove(first)
    return (first, *sorted(others, key=lambda each: (not able(each), -each.speed)))


def shown(most: int) -> list[int]:
    """Return the numbers of computers, up to ``most``, that have a line in tables."""
    if most <= _ALL_SHOWN:
        return list(range(1, most + 1))
    powers = [2**power for power in range(most.bit_length())]
    return sorted({*powers, most})


def listed(computers: Sequence[Computer]) -> list[str]:
    """Return a line for each kind of computer, with its number, memory and speed."""
    first = computers[0]
    told: list[str] = []
    for each, number in Counter(replace(one, watts=None) for one in computers).items():
        speed = (
            ""
            if each.speed == first.speed
            else f", {each.speed:.2g} times the speed of {first.name}"
        )
        told.append(f"{_times(each.name, number)}: {each.memory_told}{speed}")
    return told


def names(computers: Sequence[Computer]) -> str:
    """Return the names of all computers in a few words: ``2 x M1 Pro 32GB, M1 16GB``."""
    counted = Counter(each.name for each in computers)
    return ", ".join(_times(name, number) for name, number in counted.items())


def _times(name: str, number: int) -> str:
    return name if number == 1 else f"{number} x {name}"
