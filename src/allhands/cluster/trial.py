"""Whether computers that could join would fit, found out on them while the running ranks go on undisturbed.

An agent there starts the job's command as if it were one more rank; instead of joining the group it tells what it has
loaded, which is compared with what the running ranks have agreed on.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from allhands.blame import Statement, Verdict, circumstances_in, judge
from allhands.cluster.addresses import addresses
from allhands.cluster.connection import Connection, HostError, UnfitHosts
from allhands.cluster.frames import Frame
from allhands.cluster.newcomers import Refusal
from allhands.cluster.ranks import TRIAL_VARIABLE, LaunchSpec, Place
from allhands.cluster.remote import READY_S, orders
from allhands.errors import AllhandsError
from allhands.versions import TOKEN_MAKERS, unequal

_TICK_S = 0.2
_END_S = 2.0
_RANKS = range(1, 2)  # the second of two: it leads nothing, and writes into its log alone


class Trial:
    """All newcomers looked at side by side, in threads of their own; :meth:`stop` ends what is left of it.

    Args:
        spec: of the running attempt.
        attested: what its ranks have agreed on, as rank 0 tells it.
        known: the computer of rank 0.
    """

    def __init__(self, spec: LaunchSpec, newcomers: Sequence[Place], attested: Mapping[str, Any], known: str) -> None:
        self.names = frozenset(place.name for place in newcomers)
        self.fit: set[str] = set()
        self.unfit: dict[str, Refusal] = {}
        self._over = threading.Event()
        self._spec, self._attested, self._known = spec, attested, known
        self._threads = [
            threading.Thread(target=self._look_at, args=(place,), name=f"trial-{place.name}", daemon=True)
            for place in newcomers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def done(self) -> bool:
        """Whether all is known that will be; a computer that is in neither list has not answered."""
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """End it: the attempt is over."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _look_at(self, place: Place) -> None:
        try:
            if self._has_the_same(place):
                self.fit.add(place.name)
                return
            found = _One(self._spec, place, self._attested, self._over).run()
        except _Failed as failed:
            self.unfit[place.name] = failed.refusal
            return
        except AllhandsError as error:
            # Another error of a computer's is that it has gone again, or not come yet.
            if isinstance(error, UnfitHosts) or not isinstance(error, HostError):
                self.unfit[place.name] = Refusal(error.message, str(error))
            return
        if found is None or self._over.is_set():
            return
        verdict = self._compared(place.name, found)
        if verdict is None:
            self.fit.add(place.name)
        else:
            self.unfit[place.name] = Refusal(verdict.message, f"{verdict.message}\n  what to do: {verdict.hint}")

    def _has_the_same(self, place: Place) -> bool:
        """Whether its files and software are those of rank 0's computer; if not, it may make the same of them still."""
        if not self._attested["exam"]:
            return False
        command = [self._spec.command[0], "-P", "-m", "allhands.cluster.exam", json.dumps(self._attested["exam"])]
        try:
            found = _One(replace(self._spec, command=command), place, self._attested, self._over).run()
        except _Failed:
            return False
        if found is None:
            return False
        have, theirs = found["software"], self._attested["software"]
        alike = all(have.get(name) == theirs.get(name) for name in TOKEN_MAKERS) and not unequal(have, theirs)
        return alike and found["files"] == self._attested["files"]

    def _compared(self, name: str, found: Mapping[str, Any]) -> Verdict | None:
        told = circumstances_in(self._spec.env)
        given = replace(told, **self._attested["options"], trusted=frozenset({self._known}))
        return judge([_statement(self._known, self._attested), _statement(name, found)], given)


def _statement(name: str, attested: Mapping[str, Any]) -> Statement:
    parts = (attested[part] for part in ("facts", "files", "places", "software"))
    return Statement(name, *parts)


class _Failed(Exception):
    """The rank there has failed with an error that it foresaw."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass
class _One:
    """One computer's part of it."""

    spec: LaunchSpec
    place: Place
    attested: Mapping[str, Any]
    over: threading.Event
    _found: dict[str, Any] | None = None
    _error: dict[str, Any] | None = None
    _ended: int | None = None
    _lost: bool = False
    _busy: float = field(default_factory=time.monotonic)

    def run(self) -> Mapping[str, Any] | None:
        """What the computer would bring into the group; ``None``: it has been stopped.

        Raises:
            AllhandsError: it cannot take part, with the reason.
        """
        place = replace(self.place, num_ranks=1)
        spec = self._trial_spec()
        log = self.spec.log_dir / f"host-{re.sub(r'[^A-Za-z0-9._-]', '_', place.name)}.log"
        (address,) = addresses([place])
        hello = {**orders(spec, place, _RANKS, address), "relay": False}
        connection = Connection(place.host, place.name, hello, log, self._listen)
        try:
            connection.wait_until_ready(time.monotonic() + READY_S)
            connection.send("start", peers=[f"{address}:0", f"{address}:0"])
            while self._ended is None and not (self._lost or self.over.wait(_TICK_S)):
                connection.check()
                if time.monotonic() > self._busy + spec.start_deadline_s:
                    what = f"it did not come to the point of joining within {spec.start_deadline_s:g} s"
                    raise UnfitHosts([place.name], what, hint=f"see the logs in {spec.log_dir_there} there")
        finally:
            connection.send("end")
            connection.finish(time.monotonic() + _END_S)
        return self._result()

    def _result(self) -> Mapping[str, Any] | None:
        if self._lost:
            raise HostError([self.place.name], f"{self.place.name} does not answer any more")
        if self._ended is None or (self._ended == 0 and self._found is not None):
            return self._found
        error = self._error or {}
        if not error.get("text"):
            what = error.get("message") or f"a rank on trial ended with code {self._ended}"
            raise _Failed(Refusal(what, f"{what}\n  what to do: see the logs of {self.place.name}"))
        kind = f"{error['type']}: {error['message']}"
        raise _Failed(Refusal(str(error["text"]).partition("\n")[0], str(error["text"]), kind))

    def _trial_spec(self) -> LaunchSpec:
        there = self.spec.log_dir_there
        return replace(
            self.spec,
            num_processes=2,
            backend="ring",
            weights=None,
            tag_output=False,
            keep_logs=False,
            places=(),
            log_dir=self.spec.log_dir / "trial",
            log_dir_there=f"{there}/trial" if there else None,
            env={**self.spec.env, TRIAL_VARIABLE: self.attested["dated"] or "1"},
        )

    def _listen(self, frame: Frame | None) -> None:
        if frame is None:
            self._lost = self._ended is None
        elif frame["kind"] == "attested":
            self._found = frame["content"]
        elif frame["kind"] == "marks":
            self._busy = time.monotonic() if frame["busy_age"] is not None else self._busy
        elif frame["kind"] == "exit":
            self._error, self._ended = frame["report"].get("error"), frame["code"]
