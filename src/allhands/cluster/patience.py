"""Time limits for waiting for other ranks, and messages during the wait."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from allhands.io.formatting import format_duration


def _silent(text: str) -> None:
    """Show no messages."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for other ranks and for the name server.

    Attributes:
        total_s: seconds until the rank gives up.
        tell: called from time to time with a line that says what the rank waits for.
        tell_every_s: seconds between two such lines.
        first_pause_s: pause before the second try; each further pause is twice as long.
        longest_pause_s: the longest pause.
        resolve: returns the IPv4 address of a name; raises OSError if it is not known (yet).
    """

    total_s: float = 900.0
    tell: Callable[[str], None] = _silent
    tell_every_s: float = 15.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    resolve: Callable[[str], str] = socket.gethostbyname


class Waiting:
    """A wait that has begun: it has a deadline, and shows a line from time to time."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._begin = self._told = time.monotonic()

    @property
    def passed_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._begin

    @property
    def left_s(self) -> float:
        """Seconds until the rank gives up; negative after that."""
        return self.patience.total_s - self.passed_s

    def tell(self, what: str) -> None:
        """Show a line that says what the rank waits for, unless the last line is too recent."""
        now = time.monotonic()
        if now - self._told >= self.patience.tell_every_s:
            self._told = now
            self.patience.tell(f"{what} ({format_duration(now - self._begin)})")
