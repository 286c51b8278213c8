"""Computers that could join a running job: looked at before its ranks are stopped for them, and
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allhands.cluster.membership import Members, Roster
from allhands.cluster.ranks import LaunchSpec, Place
from allhands.cluster.trial import Trial
from allhands.observe.journal import SupervisorEvent

_TRY_AGAIN_S = 60.0  # with a newcomer that has not answered


# What to start, who, what the running ranks have agreed on, and rank 0's computer.
TryOut = Callable[[LaunchSpec, Sequence[Place], Mapping[str, Any], str], Trial]


@dataclass
class Newcomers:
    """Those of one job.

    Attributes:
        try_out: begins to look at some; ``None``: all are believed to fit.
        tell: is told who is looked at, and who is left out.
        now: the time in seconds.
        proven: who is known to fit.
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
        """Return at once whether all computers that could join the ranks of ``roster`` are known to
        fit.

        Who does not is left out, and nobody else is disturbed.
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
        """End what is looked at: the attempt is over."""
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
