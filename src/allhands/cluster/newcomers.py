"""Newcomers: computers that could join a running job.

Before the ranks are stopped so that a newcomer can join, it is tried, while the ranks go on
undisturbed. A newcomer that does not fit is refused by name. For the trial an agent there starts
the job's command as if it were one more rank. Instead of joining the group, that rank reports what
it has loaded, and this is compared with what the running ranks have agreed on.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from allhands.cluster.addresses import addresses
from allhands.cluster.connection import Connection, HostError, UnfitHosts
from allhands.cluster.frames import Frame
from allhands.cluster.membership import Members, Roster
from allhands.cluster.outcome import NewcomerRefusal
from allhands.cluster.ranks import TRIAL_VARIABLE, LaunchSpec, Place
from allhands.cluster.remote import READY_S, orders
from allhands.distributed.blame import SOFTWARE, Statement, circumstances_in, judge
from allhands.errors import AllhandsError
from allhands.observe.journal import SupervisorEvent
from allhands.runtime.versions import required, unequal

_TICK_S = 0.2
_END_S = 2.0
_STOP_S = 3.0  # a computer that does not answer must not delay the end of the others
_RANKS = range(1, 2)  # the second of two ranks: unlike rank 0, it writes only its log


class Trial:
    """The trial of all newcomers at the same time, each in a thread of its own.

    Args:
        spec: the spec of the running attempt.
        attested: what its ranks have agreed on, as rank 0 reports it.
        known: the computer of rank 0.

    Attributes:
        names: all newcomers of this trial.
        fit: those that fit.
        unfit: those that do not fit, with the reason.
    """

    def __init__(
        self, spec: LaunchSpec, newcomers: Sequence[Place], attested: Mapping[str, Any], known: str
    ) -> None:
        self.names = frozenset(place.name for place in newcomers)
        self.fit: set[str] = set()
        self.unfit: dict[str, NewcomerRefusal] = {}
        self._over = threading.Event()
        self._spec, self._attested, self._known = spec, attested, known
        self._threads = [
            threading.Thread(
                target=self._look_at, args=(place,), name=f"trial-{place.name}", daemon=True
            )
            for place in newcomers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def done(self) -> bool:
        """Return whether the trial is over.

        A computer that is then in neither ``fit`` nor ``unfit`` has not answered.
        """
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """End the trial, because the attempt is over."""
        self._over.set()
        deadline = time.monotonic() + _STOP_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _look_at(self, place: Place) -> None:
        try:
            found = _One(self._spec, place, self._attested, self._over).run()
        except AllhandsError as error:
            # Any other HostError means that the computer does not answer; it is tried again later.
            if isinstance(error, UnfitHosts) or not isinstance(error, HostError):
                self.unfit[place.name] = NewcomerRefusal(error.message, str(error))
            return
        if isinstance(found, NewcomerRefusal):
            self.unfit[place.name] = found
        elif found is not None:
            stated = _statement if "facts" in found else _of_software
            self._compare(stated(self._known, self._attested), stated(place.name, found))

    def _compare(self, known: Statement, new: Statement) -> None:
        told = circumstances_in(self._spec.env)
        given = replace(told, **self._attested["options"], trusted=frozenset({self._known}))
        verdict = judge([known, new], given)
        if verdict is None:
            self.fit.add(new.name)
        else:
            self.unfit[new.name] = NewcomerRefusal(
                verdict.message, f"{verdict.message}\n  what to do: {verdict.hint}"
            )


def _statement(name: str, attested: Mapping[str, Any]) -> Statement:
    parts = (attested[part] for part in ("facts", "files", "places", "software"))
    return Statement(name, *parts)


def _of_software(name: str, attested: Mapping[str, Any]) -> Statement:
    have = attested["software"]
    return Statement(name, {SOFTWARE: required(have)}, software=have)


@dataclass
class _One:
    """The trial of one computer."""

    spec: LaunchSpec
    place: Place
    attested: Mapping[str, Any]
    over: threading.Event
    _found: dict[str, Any] | None = None
    _error: dict[str, Any] | None = None
    _ended: int | None = None
    _lost: bool = False
    _busy: float = field(default_factory=time.monotonic)

    def run(self) -> Mapping[str, Any] | NewcomerRefusal | None:
        """Run the trial and return the facts that the computer would bring into the group.

        If its software has versions that do not fit, nothing is started there, and the result has
        only ``software``. If the rank there ends with an error, the result is the refusal. ``None``
        if the trial has been stopped.

        Raises:
            AllhandsError: the computer cannot take part; the error says why.
        """
        place = replace(self.place, num_ranks=1)
        spec = self._trial_spec()
        log = self.spec.log_dir / f"host-{re.sub(r'[^A-Za-z0-9._-]', '_', place.name)}.log"
        (address,) = addresses([place])
        hello = {**orders(spec, place, _RANKS, address), "relay": False}
        connection = Connection(place.host, place.name, hello, log, self._listen)
        try:
            versions = connection.wait_until_ready(time.monotonic() + READY_S)["versions"]
            if unequal(versions, self.attested["software"]):
                return {"software": versions}
            connection.send("start", peers=[f"{address}:0", f"{address}:0"])
            while self._ended is None and not (self._lost or self.over.wait(_TICK_S)):
                connection.check()
                if time.monotonic() > self._busy + spec.start_deadline_s:
                    raise UnfitHosts(
                        [place.name],
                        f"it was not ready to join within {spec.start_deadline_s:g} s",
                        code="rank-not-started",
                        hint=f"see the logs in {spec.log_dir_there} there",
                    )
        finally:
            connection.send("end")
            connection.finish(time.monotonic() + _END_S)
        return self._result()

    def _result(self) -> Mapping[str, Any] | NewcomerRefusal | None:
        if self._lost:
            raise HostError(
                [self.place.name], f"{self.place.name} does not answer any more", code="host-lost"
            )
        if self._ended is None or (self._ended == 0 and self._found is not None):
            return self._found
        error = self._error or {}
        if text := error.get("text"):
            kind = f"{error['type']}: {error['message']}"
            return NewcomerRefusal(text.partition("\n")[0], text, kind)
        what = error.get("message") or f"a rank on trial ended with code {self._ended}"
        return NewcomerRefusal(what, f"{what}\n  what to do: see the logs of {self.place.name}")

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


_TRY_AGAIN_S = 60.0  # until a newcomer that has not answered is tried again


# Takes the spec to start, the newcomers, what the running ranks have agreed on, and the computer of
# rank 0.
TryOut = Callable[[LaunchSpec, Sequence[Place], Mapping[str, Any], str], Trial]


@dataclass
class Newcomers:
    """The newcomers of one job.

    Attributes:
        members: the computers of the job.
        try_out: begins a trial; ``None``: all newcomers count as fit without one.
        tell: called with an event about who is tried and who is left out.
        now: returns the time in seconds.
        proven: the computers that are known to fit.
    """

    members: Members
    try_out: TryOut | None
    tell: Callable[[SupervisorEvent], None]
    now: Callable[[], float]
    proven: set[str] = field(default_factory=set[str])
    _trial: Trial | None = None
    _again_at: float = float("-inf")

    def all_fit(
        self, spec: LaunchSpec, roster: Roster, attested: Callable[[], Mapping[str, Any] | None]
    ) -> bool:
        """Return whether all computers that could join the ranks of ``roster`` are known to fit.

        It returns at once. If some are not known yet, it begins their trial. A computer that does
        not fit is left out, without disturbing the others.
        """
        if self.try_out is None:
            return True
        if self._trial is not None:
            if self._trial.done:
                self._judge(self._trial)
            return False
        unknown = [
            place
            for place in self.members.newcomers(roster.places)
            if place.name not in self.proven
        ]
        if not unknown:
            return True
        agreed = attested()
        if agreed is not None and self.now() >= self._again_at:
            names = ", ".join(place.name for place in unknown)
            self.tell(SupervisorEvent("waiting", f"checking {names} while the others go on"))
            self._trial = self.try_out(spec, unknown, agreed, roster.seats[0])
        return False

    def stop(self) -> None:
        """End the trial, if there is one, because the attempt is over."""
        if self._trial is not None:
            self._trial.stop()
            self._trial = None

    def _judge(self, trial: Trial) -> None:
        self.proven |= trial.fit
        for name, refusal in sorted(trial.unfit.items()):
            self.members.leave_out([name])
            text, more = (
                f"{name} is left out: {words}" for words in (refusal.message, refusal.explanation)
            )
            self.tell(
                SupervisorEvent("left out", text, host=name, error=refusal.error, explanation=more)
            )
        if trial.names - trial.fit - trial.unfit.keys():
            self._again_at = self.now() + _TRY_AGAIN_S
        self.stop()
