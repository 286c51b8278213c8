"""One host of a sync: the probe there, kept alive by asking it how much has arrived."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from allhands.cluster.doctor.access import trouble_remedy
from allhands.cluster.doctor.facts import HostReport
from allhands.cluster.doctor.session import Session, SessionRefused, Untold
from allhands.cluster.hosts import Host
from allhands.cluster.sync.state import HostState
from allhands.errors import AllhandsError, DistributedError
from allhands.io.files import storage_error

RETRY = "sync again: what it has received is kept"
_CONNECT_S = 40.0
_SILENT_S = 12.0  # a probe that works on a request gives a sign of life twice a second
_KEEP_S = 1.0
# Runs the host's Python, or the first one on its path where that does not exist.
_PYTHON = 'p=$1; shift; command -v "$p" >/dev/null || p=python3; exec "$p" "$@"'


class Member:
    """The probe on one computer, and its part of a sync.

    Attributes:
        status: its progress.
        wanted: numbers of the files for it; ``lacking``: numbers of those that it lacks.
        told: its last answer about its files.
        arrived: received bytes of files that are not in place yet; ``before``: the same at the
            beginning of a transfer.
        counted: bytes of transfers that have ended.
    """

    def __init__(self, host: Host, wanted: Iterable[int] = ()) -> None:
        self.host = host
        self.status = HostState(host.name)
        self.wanted = frozenset(wanted)
        self.told: Mapping[str, Any] = {}
        self.lacking: frozenset[int] = frozenset()
        self.arrived = self.before = self.counted = 0
        self.session: Session | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()

    def start(self) -> None:
        """Start the probe and wait for it.

        Raises:
            DistributedError: it does not come up, with the reason.
        """
        name, words = (
            self.host.name,
            ["sh", "-c", _PYTHON, "sh", self.host.python or sys.executable],
        )
        try:
            self.session = Session(self.host, _CONNECT_S, words)
            if self._over.is_set():  # it has been closed before there was a session
                self.session.close()
                raise DistributedError(
                    f"host {name} is not needed any more", code="host-not-needed"
                )
            self.session.wait_until_ready()
        except SessionRefused as refused:
            trouble = refused.trouble
            way = (
                "cannot take part"
                if trouble.kind in ("no-python", "old-python", "login")
                else "cannot be reached"
            )
            raise DistributedError(
                f"host {name} {way}: {trouble.reason or 'no answer'}",
                code="host-unreachable",
                hint=trouble_remedy(
                    HostReport(name=name, ssh=self.host.ssh, addresses=self.host.ips), trouble
                ),
            ) from None
        threading.Thread(
            target=self._keep, args=(self.session,), name=f"sync-keep-{name}", daemon=True
        ).start()

    def ask(self, kind: str, silence_s: float = _SILENT_S, **request: Any) -> dict[str, Any]:
        """Return the answer to one request.

        Raises:
            AllhandsError: the host is lost, or reports an error of its disk.
        """
        assert self.session is not None
        try:
            with self._lock:
                answer = self.session.ask(kind, silence_s, **request)
        except Untold as untold:
            raise DistributedError(
                f"host {self.host.name} has been lost: {untold.reason}",
                code="host-lost",
                hint=f"look whether it is switched on and connected, then {RETRY}",
            ) from None
        if (error := answer.get("error")) is not None:
            raise self.storage_error(error["path"], error["number"], error["reason"])
        return answer

    def storage_error(self, path: str, number: int, reason: str) -> AllhandsError:
        """Return the error for a path of this host."""
        error = storage_error(Path(path or "/"), OSError(number, reason))
        error.where = f"{self.host.name}:{path}"
        return error

    def fail(self, error: AllhandsError) -> None:
        """Note the error that ends its part."""
        self.status.state, self.status.error = "failed", error

    def close(self) -> None:
        """End the probe."""
        self._over.set()
        if self.session is not None:
            self.session.close()

    def _keep(self, session: Session) -> None:
        while not self._over.wait(_KEEP_S):
            if self._lock.acquire(blocking=False):
                try:
                    roots = list(dict.fromkeys(self.told.get("roots", ())))
                    self.arrived = session.ask("staged", _SILENT_S, roots=roots)["bytes"]
                except Untold:
                    session.kill()  # the next request fails, and reports it
                    return
                finally:
                    self._lock.release()
