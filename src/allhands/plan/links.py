"""Time of an exchange over a link that is known by its name, by its rate, or by measurements."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from allhands.errors import ConfigError

_GUESSED = "typical of its kind, not measured"


class ExchangeTimes(Protocol):
    """Source of the times of all-reduces."""

    def seconds(self, num_bytes: float, ranks: int) -> float:
        """Return the seconds of one all-reduce of ``num_bytes`` over ``ranks`` ranks."""
        ...


@dataclass(frozen=True)
class Link:
    """A link between neighbours of a ring, in which all ranks are alike.

    Attributes:
        name: name for people.
        bytes_per_s: bytes a second that programs get in each direction.
        latency_s: seconds of an empty message.
        source: source of the figures, in words.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    source: str = _GUESSED

    def seconds(self, num_bytes: float, ranks: int) -> float:
        """Return the seconds of a ring all-reduce: each of n ranks sends 2 (n - 1) messages of one
        n-th of the bytes.
        """
        if ranks < 2:
            return 0.0
        return 2 * (ranks - 1) * (self.latency_s + num_bytes / ranks / self.bytes_per_s)


@dataclass(frozen=True)
class Measured:
    """All-reduces that were measured between some ranks.

    Attributes:
        ranks: number of these ranks, 2 or more.
        at: function that returns the seconds for a number of bytes.
        name: name for people.
        source: source of the figures, in words.
        speeds: speed of each rank while all compute; empty if not measured.
    """

    ranks: int
    at: Callable[[float], float]
    name: str = "as measured"
    source: str = "measured"
    speeds: tuple[float, ...] = ()

    def seconds(self, num_bytes: float, ranks: int) -> float:
        """Return the measured time; for other numbers of ranks it is scaled as on a ring."""
        if ranks < 2:
            return 0.0
        smallest = self.at(0)
        latency = smallest * (ranks - 1) / (self.ranks - 1)
        beyond = max(0.0, self.at(num_bytes) - smallest)
        factor = ((ranks - 1) / ranks) / ((self.ranks - 1) / self.ranks)
        return latency + beyond * factor


def _of(name: str, gigabits: float, latency_us: float) -> Link:
    return Link(name, gigabits * 1e9 / 8, latency_us * 1e-6)


# Rates that TCP sockets reach; a Thunderbolt cable can do far more.
_LINKS = {
    link.name.lower(): link
    for link in (
        _of("thunderbolt4", 18.0, 60),
        _of("thunderbolt5", 35.0, 60),
        _of("10GbE", 9.4, 50),
        _of("2.5GbE", 2.35, 100),
        _of("1GbE", 0.94, 150),
        _of("100MbE", 0.094, 300),
        _of("wifi", 0.3, 3000),
        _of("wifi6", 0.6, 2500),
        _of("wifi7", 1.5, 2000),
        _of("infiniband", 180.0, 5),
        _of("nvlink", 1600.0, 5),
        _of("pcie", 160.0, 8),
    )
}
_ALIASES = {
    "tb4": "thunderbolt4",
    "tb5": "thunderbolt5",
    "thunderbolt": "thunderbolt4",
    "wi-fi": "wifi",
}
_RATE = re.compile(r"(-?\d+(?:\.\d+)?)\s*([kmg]?)(?:bit/s|bps|b/s|bit)", re.I)
_DELAY = re.compile(r"(-?\d+(?:\.\d+)?)\s*(s|ms|us)", re.I)


def link_of(text: str) -> Link:
    """Return the link that ``text`` describes: a name (``10GbE``, ``wifi``) or a rate
    (``400Mbit/s``), perhaps with a delay (``100Mbit/s,5ms``).

    Raises:
        ConfigError: the text is neither, or its rate is 0.
    """
    asked = text.strip()
    head, comma, rest = (part.strip() for part in asked.replace("+", ",").partition(","))
    name = _ALIASES.get(head.lower(), head.lower())
    found = _LINKS.get(name) or _rated(head, asked)
    if found is None:
        near = difflib.get_close_matches(head.lower(), _LINKS, n=1, cutoff=0.5)
        known = ", ".join(link.name for link in _LINKS.values())
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"{text!r} is not a link that is known",
            code="value-unknown",
            where="--link",
            hint=f"{meant}one of {known}; or a rate, as 400Mbit/s or 100Mbit/s,5ms",
        )
    if not comma:
        return found
    delay = _DELAY.fullmatch(rest)
    if delay is None or delay[1].startswith("-"):
        raise ConfigError(
            f"{rest!r} is no delay",
            code="value-out-of-range",
            where="--link",
            hint=f"give one from 0 on, as {head},5ms",
        )
    seconds = float(delay[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[delay[2].lower()]
    return Link(asked, found.bytes_per_s, seconds, "as described")


def _rated(head: str, asked: str) -> Link | None:
    """Return the link of a rate, named ``asked``; ``None`` if ``head`` is no rate."""
    if not (match := _RATE.fullmatch(head)):
        return None
    rate = float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[match[2].lower()]
    if not 0 < rate < float("inf"):
        raise ConfigError(
            f"a link of {head} sends nothing",
            code="value-out-of-range",
            where="--link",
            hint="give a rate above 0, as 400Mbit/s",
        )
    return Link(asked, rate / 8, 150e-6, "as described")


def faster_than(link: ExchangeTimes) -> str:
    """Return in words what is faster than a link that is too slow; empty if nothing is."""
    if not isinstance(link, Link):
        return "a cable in place of wifi, Thunderbolt in place of Ethernet"
    if link.name.lower().startswith("wifi"):
        return f"a cable in place of {link.name}: 10GbE, or Thunderbolt"
    faster = {
        "10gbe": "10GbE or Thunderbolt",
        "thunderbolt4": "Thunderbolt",
        "infiniband": "InfiniBand or NVLink",
    }
    told = (told for name, told in faster.items() if link.bytes_per_s < _LINKS[name].bytes_per_s)
    return next((f"{each} in place of {link.name}" for each in told), "")
