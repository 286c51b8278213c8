"""Options of a sync, its progress, and the report at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from allhands.errors import AllhandsError, DataError, DistributedError

Topology = Literal["tree", "chain", "star"]


@dataclass(frozen=True)
class SyncOptions:
    """Options for copying files.

    Attributes:
        topology: ``tree``: every host that has all files sends to one that waits; ``chain``: each
            host gets them from the one before it; ``star``: this computer sends to all at once.
        dry_run: only find the files that each host lacks.
        cache: file with hashes of the files here; ``None``: all are read.
    """

    topology: Topology = "tree"
    dry_run: bool = False
    cache: Path | None = None


@dataclass
class HostState:
    """Progress of one host.

    Attributes:
        state: ``connecting``, ``looking``, ``waiting``, ``receiving``, ``done`` or ``failed``.
        read: bytes of its own files that it has read.
        needed: bytes of the files that it lacks, without those received by an earlier sync.
        lacking: numbers of these files; ``paths``: their places there.
        received: received bytes, at the end as rsync counts them.
        parent: the latest sender.
        done_s: seconds from the start until it had all files.
    """

    name: str
    state: str = "connecting"
    read: int = 0
    needed: int = 0
    lacking: tuple[int, ...] = ()
    paths: tuple[str, ...] = ()
    received: int = 0
    sent: int = 0
    parent: str | None = None
    error: AllhandsError | None = None
    done_s: float | None = None


@dataclass
class SyncState:
    """Progress of the sync, and its report at the end.

    Attributes:
        hashed: bytes of the files here that have been read, or whose hashes are known.
        sent: bytes that this computer has sent.
        withdrawn: files that have changed while they were sent.
    """

    hosts: list[HostState]
    names: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    total: int = 0
    hashed: int = 0
    sent: int = 0
    notes: list[str] = field(default_factory=list[str])
    withdrawn: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    @property
    def errors(self) -> list[AllhandsError]:
        """All errors of the sync."""
        found = [host.error for host in self.hosts if host.error is not None]
        hint = "sync again when nothing writes to it"
        return found + [
            DataError("it changed while it was sent", code="data-changed", where=name, hint=hint)
            for name in self.withdrawn
        ]

    @property
    def exit_code(self) -> int:
        """0, or the most important of the errors' codes: a lost host before a full disk."""
        codes = {error.exit_code for error in self.errors}
        return next(
            (code for code in (DistributedError.exit_code, *sorted(codes)) if code in codes), 0
        )
