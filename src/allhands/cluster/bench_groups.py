"""The program behind :func:`allhands.cluster.netbench.measure`: one group after the other, under the supervisor.

It takes its orders as JSON on standard input and answers on standard output, each line after the caller's mark; rank 0
of a group inherits that and writes its result there. It can be killed at any time: what it has started ends then.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allhands.cluster.connection import HostError
from allhands.cluster.hosts import Host
from allhands.cluster.membership import LocalMembers, Members, Roster
from allhands.cluster.ranks import LaunchSpec, Place
from allhands.cluster.supervisor import SuperviseOptions, SupervisorEvent, supervise
from allhands.errors import AllhandsError

_SHARE = 0.6  # of the time that is left for the group of all computers; links share what is left after it
_LEAST_S = 4.0  # for a start and one size; a group with less is not begun
_LEAST_BUDGET_S = 1.0


@dataclass
class Bench:
    """The groups of one measurement."""

    request: Mapping[str, Any]
    hosts: Sequence[Host]
    deadline: float
    missing: set[str] = field(default_factory=set[str])

    def run(self) -> None:
        """Measure every group for which there is time."""
        groups = self.request["groups"]
        for number, group in enumerate(groups):
            left = self.deadline - time.monotonic()
            limit = left * _SHARE if number == 0 and len(groups) > 1 else left / max(1, len(groups) - number) * 2
            if left < _LEAST_S:
                return
            self._measure(number, group, min(limit, left))

    def _measure(self, number: int, group: Mapping[str, Any], limit: float) -> None:
        pairs = [(self.hosts[i], n) for i, n in zip(group["members"], group["ranks"], strict=True)]
        present = [(host, n) for host, n in pairs if host.name not in self.missing]
        if len(present) < len(pairs) and (number or sum(n for _, n in present) < 2):
            self._say("left out", number)
            return
        self._say("begins", number)
        began, names = time.monotonic(), [host.name for host, _ in present]
        try:
            event = self._supervise(number, present, limit)
        except HostError as error:
            self._failed(number, error.hosts, error.message, error.hint)
            self.missing.update(error.hosts)
            if set(error.hosts) & set(names) and number == 0:
                self._measure(number, group, limit - (time.monotonic() - began))
            return
        except AllhandsError as error:
            self._failed(number, [name for name in names if _names(error, name)], error.message, error.hint)
            return
        if event is not None:
            self._explain(number, event, names)

    def _supervise(self, number: int, present: Sequence[tuple[Host, int]], limit: float) -> SupervisorEvent | None:
        """Run the ranks; return the event that says why they failed, if they did."""
        told: list[SupervisorEvent] = []
        ranks = sum(n for _, n in present)
        alone = len(present) == 1 and present[0][0].ssh is None
        places = () if alone else tuple(Place(host.name, n, host) for host, n in present)
        spec = LaunchSpec(
            self._command(number, [host.name for host, _ in present], limit),
            ranks,
            self.request["backend"],
            Path(self.request["log_dir"]) / str(number),
            cores_per_rank=self._cores(ranks, alone),
            env=present[0][0].envs if alone else {},
            start_deadline_s=min(limit, self.request["connect_s"]),
            stop_grace_s=1.0,
            finish_grace_s=max(limit, _LEAST_S),
        )
        members: Members = LocalMembers(ranks) if alone else Fixed(places)
        supervise(spec, told.append, options=SuperviseOptions(), members=members)
        return next((event for event in told if event.kind == "failed"), None)

    def _command(self, number: int, names: Sequence[str], limit: float) -> list[str]:
        task = {
            "mark": self.request["mark"],
            "about": {"kind": "measured", "group": number, "hosts": list(names)},
            "sizes": self.request["sizes"],
            "seconds": self.request["seconds"],
            "budget_s": max(limit / 2, _LEAST_BUDGET_S),
            "connect_s": self.request["connect_s"],
            "products": number == 0,  # of all computers together
        }
        return [sys.executable, "-P", "-m", "allhands.cluster.bench_rank", json.dumps(task)]

    def _cores(self, ranks: int, alone: bool) -> int | None:
        """As training: all cores, divided; on several computers their agents do that."""
        chosen = self.request["cores_per_rank"]
        if chosen or not alone or not hasattr(os, "sched_getaffinity"):
            return chosen
        return max(1, len(os.sched_getaffinity(0)) // ranks)

    def _explain(self, number: int, event: SupervisorEvent, names: Sequence[str]) -> None:
        connect_s = self.request["connect_s"]
        hosts = [name for name in names if name == event.host]
        message, hint = event.message, None
        blocked = "listens, but connections" in event.message
        if blocked or "did not finish starting" in event.message:
            hosts = hosts if blocked else []
            message = f"{' and '.join(names)} did not form a {self.request['backend']} group within {connect_s:g} s"
            message += f": {event.message}" if blocked else ""
            hint = "look for a firewall, and whether each reaches the other at the address of the hostfile"
        elif event.explanation:
            message, _, hint = event.explanation.partition("\n  what to do: ")
        self._failed(number, hosts, message, hint or None, event.log_tail)

    def _failed(
        self, number: int, hosts: Iterable[str], message: str, hint: str | None, log_tail: Sequence[str] = ()
    ) -> None:
        self._say("failed", number, hosts=list(hosts), message=message, hint=hint, log_tail=list(log_tail))

    def _say(self, kind: str, number: int, **more: Any) -> None:
        line = f"{self.request['mark']}{json.dumps({'kind': kind, 'group': number, **more})}\n"
        sys.stdout.write(line)
        sys.stdout.flush()


class Fixed:
    """Computers that all have to take part, once."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = tuple(places)

    def roster(self) -> Roster:
        """All of them."""
        seats = tuple(place.name for place in self._places for _ in range(place.num_ranks))
        return Roster(seats, self._places, every=seats, apart=True)

    def leave_out(self, seats: Iterable[str]) -> None:
        """There is no second attempt."""

    def newcomers(self, current: Sequence[Place]) -> tuple[Place, ...]:
        """Nobody else can come."""
        return ()

    def changed(self, current: Sequence[Place]) -> str | None:
        """Nobody else comes."""
        return None


def _names(error: AllhandsError, name: str) -> bool:
    return f"host {name}" in str(error)


def _host(content: dict[str, Any]) -> Host:
    more: dict[str, Any] = {"ips": tuple(content["ips"]), "rdma": ()}  # the latter is JACCL's alone
    return Host(**(content | more))


def main() -> None:
    """Entry point of the process."""
    request = json.loads(sys.stdin.buffer.read())
    hosts = [_host(content) for content in request["hosts"]]
    Bench(request, hosts, time.monotonic() + request["timeout_s"]).run()


if __name__ == "__main__":
    main()
