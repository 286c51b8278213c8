"""Time limits for waiting for other ranks, and messages during the wait."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from allhands.io.formatting import format_duration


def _silent(text: str) -> None:
    """For who wants to hear nothing."""


@dataclass(frozen=True)
class Patience:
    """Time limit for the other ranks and for the name server.

    Attributes:
        total_s: seconds until it is given up.
        tell: is given a line about what is waited for, now and then.
        tell_every_s: how often.
        first_pause_s: before the second try; pauses double.
        longest_pause_s: up to this.
        resolve: the IPv4 address of a name; OSError: not known (yet).
    """

    total_s: float = 900.0
    tell: Callable[[str], None] = _silent
    tell_every_s: float = 15.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    resolve: Callable[[str], str] = socket.gethostbyname


class Waiting:
    """A deadline, and a line about it now and then."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._begin = self._told = time.monotonic()

    @property
    def passed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begin

    @property
    def left_s(self) -> float:
        """Seconds until it is given up."""
        return self.patience.total_s - self.passed_s

    def tell(self, what: str) -> None:
        """Say what is waited for, unless something was said a moment ago."""
        now = time.monotonic()
        if now - self._told >= self.patience.tell_every_s:
            self._told = now
            self.patience.tell(f"{what} ({format_duration(now - self._begin)})")
