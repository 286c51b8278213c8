"""The members of the next attempt, and computers that could join the running one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from allhands.cluster import ssh
from allhands.cluster.hosts import Host, read_hostfile
from allhands.cluster.ranks import Place
from allhands.cluster.ssh import SshTrouble
from allhands.errors import AllhandsError
from allhands.runtime.threads import side_by_side

_ROUND_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Roster:
    """The ranks of the next attempt.

    Attributes:
        seats: for each rank its seat, to which its faults are attributed: the rank's computer or,
            if there is only one computer, the rank's slot.
        places: the computers in the order of their ranks; empty if all ranks run on this one.
        every: the seats of all ranks that there would be if every computer took part.
        apart: True if seats are computers.
        absent: computers that do not answer.
        left_out: seats that are left out.
        obstacle: reason not to start with these ranks; ``None``: there is none.
        note: note for the user about this choice.
        step: step of the checkpoint that the ranks resume from, if known.
        edition: how often the list of computers has been changed.
        troubles: known reasons why computers do not answer, by their names.
        possible: highest number of ranks that can be reached by waiting; ``None``: not known.
    """

    seats: tuple[str, ...]
    places: tuple[Place, ...] = ()
    every: tuple[str, ...] = ()
    apart: bool = False
    absent: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    obstacle: str | None = None
    note: str | None = None
    step: int | None = None
    edition: int = 0
    troubles: Mapping[str, SshTrouble] = field(default_factory=dict[str, SshTrouble], hash=False)
    possible: int | None = None


class Members(Protocol):
    """The computers of a job."""

    def roster(self) -> Roster:
        """Find the members that can take part now.

        It takes seconds if other computers must be asked.
        """
        ...

    def leave_out(self, seats: Iterable[str]) -> None:
        """Leave these seats out from now on, until the hostfile changes."""
        ...

    def changed(self, current: Sequence[Place]) -> str | None:
        """Return why the ranks should regroup, or ``None``.

        They should if more ranks could take part than those of ``current``. Returns at once.
        """
        return None

    def newcomers(self, current: Sequence[Place]) -> tuple[Place, ...]:
        """Return the computers that could be added to those of ``current``."""
        return ()


class LocalMembers(Members):
    """Only this computer; its slots can be left out one by one.

    Args:
        num_ranks: number of slots.
        checkpoint: returns the step of the newest checkpoint, for messages.
    """

    def __init__(self, num_ranks: int, checkpoint: Callable[[], int | None] | None = None) -> None:
        self._every = tuple(f"slot {slot}" for slot in range(num_ranks))
        self._left_out: set[str] = set()
        self._checkpoint = checkpoint

    def roster(self) -> Roster:
        """Return all slots that are not left out."""
        seats = tuple(seat for seat in self._every if seat not in self._left_out)
        step = self._checkpoint() if self._checkpoint else None
        return Roster(seats, every=self._every, left_out=tuple(sorted(self._left_out)), step=step)

    def leave_out(self, seats: Iterable[str]) -> None:
        """Leave these slots out from now on."""
        self._left_out.update(seats)


class HostfileMembers(Members):
    """The computers of a hostfile that answer, with all their slots, in the order of the file.

    A computer with the newest checkpoint comes first, because rank 0 reads the checkpoint. When the
    file has been changed or touched, it is read again, and computers that were left out may take
    part again. If the changed file has an error, there is a warning, and the last good version
    stays in use.

    Args:
        path: the hostfile.
        limit: highest number of ranks; ``None``: all slots.
        trouble: takes the ssh argument of a host and a number of seconds; returns the reason why no
            command can be run there within that time, or ``None``.
        checkpoints: takes hosts; returns the step of the newest checkpoint, by name of the host,
            for those that have one.
        probe_timeout_s: a computer that needs more seconds to answer does not take part.
        earlier: True if an earlier run, which this one should resume, has left traces. If no
            computer that answers has a checkpoint, an absent one may have it.

    Raises:
        ConfigError: the file cannot be read, or something in it is not understood.
    """

    def __init__(
        self,
        path: Path | str,
        limit: int | None = None,
        *,
        trouble: Callable[[str, float], SshTrouble | None] = ssh.trouble,
        checkpoints: Callable[[Sequence[Host]], Mapping[str, int]] | None = None,
        probe_timeout_s: float = 5.0,
        earlier: bool = False,
    ) -> None:
        self._earlier = earlier
        self._path = Path(path)
        self._limit = limit
        self._trouble = trouble
        self._checkpoints = checkpoints
        self._timeout_s = probe_timeout_s
        self._lock = threading.Lock()
        self._left_out: set[str] = set()
        self._heard: dict[str, int] = {}  # step of the newest known checkpoint, by host
        self._looked_at: set[str] = set()  # hosts that were asked for checkpoints, with any answer
        self._took_part: set[str] = set()
        self._back: frozenset[str] = frozenset()  # hosts of the last answers
        self._round: threading.Thread | None = None
        self._next_round = 0.0
        self._rosters = 0
        self._edition = 0
        self._stamp = self._look()
        self._hosts = read_hostfile(self._path)

    def roster(self) -> Roster:
        """Ask every computer, and put one with the newest checkpoint first."""
        self._read_again()
        wanted = [host for host in self._hosts if host.name not in self._left_out]
        troubles = self._ask(wanted)
        here = [host for host in wanted if host.name not in troubles]
        self._rosters += 1  # results of a round that began before this are outdated
        self._back = frozenset(host.name for host in here)
        steps = self._newest(here)
        newest = max(steps.values(), default=0)
        # Sorting keeps the file's order of all the others.
        first = next((host for host in here if newest and steps.get(host.name) == newest), None)
        places = self._places(sorted(here, key=lambda host: host is not first))
        self._took_part.update(place.name for place in places)
        obstacle, note = self._judge_steps(newest)
        if not newest and obstacle is None:
            obstacle = self._judge_start(troubles)
        return Roster(
            _seats(places),
            places,
            every=_seats(self._places(self._hosts)),
            apart=True,
            absent=tuple(host.name for host in wanted if host.name in troubles),
            left_out=tuple(sorted(self._left_out)),
            obstacle=obstacle,
            note=note,
            step=newest or None,
            edition=self._edition,
            troubles=troubles,
            possible=self._possible(wanted, troubles),
        )

    def _possible(self, wanted: Iterable[Host], troubles: Mapping[str, SshTrouble]) -> int:
        """Return the number of ranks if all troubles end that can end without the user's help."""
        lasting = {name for name, trouble in troubles.items() if trouble.lasting}
        return len(_seats(self._places(host for host in wanted if host.name not in lasting)))

    def leave_out(self, seats: Iterable[str]) -> None:
        """Leave these computers out until the hostfile is changed or touched."""
        self._left_out.update(seats)

    def changed(self, current: Sequence[Place]) -> str | None:
        """Return why more ranks could take part, or ``None``.

        The reason is that a missing computer answers now, or that the file has more slots.
        """
        edited = self._read_again()
        names = {place.name for place in current}
        self._keep_asking(names, at_once=edited)
        able = self._able(current)
        if sum(place.num_ranks for place in self._places(able)) <= sum(
            place.num_ranks for place in current
        ):
            return None
        new = [host.name for host in able if host.name not in names]
        if not new:
            return "the hostfile gives more ranks"
        known = all(name in self._took_part for name in new)
        return f"{', '.join(new)} {'can take part again' if known else 'can take part now'}"

    def newcomers(self, current: Sequence[Place]) -> tuple[Place, ...]:
        """Return the computers that answer, are not left out, and are not among those of
        ``current``.
        """
        names = {place.name for place in current}
        return tuple(
            place for place in self._places(self._able(current)) if place.name not in names
        )

    def _able(self, current: Sequence[Place]) -> list[Host]:
        names = {place.name for place in current} | self._back
        return [
            host for host in self._hosts if host.name in names and host.name not in self._left_out
        ]

    def _places(self, hosts: Iterable[Host]) -> tuple[Place, ...]:
        """Return these hosts with their slots, up to the limit of ranks."""
        left = self._limit if self._limit is not None else sum(host.slots for host in self._hosts)
        places: list[Place] = []
        for host in hosts:
            if count := min(host.slots, left):
                places.append(Place(host.name, count, host))
                left -= count
        return self._with_devices(places)

    def _with_devices(self, places: Sequence[Place]) -> tuple[Place, ...]:
        """Return the places, each with its RDMA devices to the others of ``places`` only.

        In the hostfile each computer has a device for every computer of the file, in its order.
        """
        order = {host.name: index for index, host in enumerate(self._hosts)}
        chosen = [order[place.name] for place in places]
        if any(len(place.host.rdma) != len(order) for place in places):
            return tuple(places)
        return tuple(
            replace(place, host=replace(host, rdma=tuple(host.rdma[index] for index in chosen)))
            for place in places
            for host in [place.host]
        )

    def _judge_steps(self, newest: int) -> tuple[str | None, str | None]:
        """Return an obstacle, a note or neither: what to do if the newest known checkpoint is
        absent.
        """
        with self._lock:
            heard = dict(self._heard)
        latest = max(heard.values(), default=0)
        if newest >= latest:
            return None, None
        names = ", ".join(sorted(name for name, step in heard.items() if step == latest))
        where = (
            f"the checkpoint of step {latest} was last seen on {names}, which does not offer it now"
        )
        # From an older checkpoint the run reaches the same weights, only later. Without any
        # checkpoint the whole run would start from the beginning, so wait.
        return (None, f"{where}: going on from step {newest}") if newest else (where, None)

    def _judge_start(self, absent: Iterable[str]) -> str | None:
        """Return why the run should not start from the beginning, or ``None``.

        A checkpoint may be on a computer that does not answer and was never asked.
        """
        unknown = sorted(set(absent) - self._looked_at)
        if not self._earlier or not unknown:
            return None
        return (
            f"there was a run before, and no computer that answers has a checkpoint of it: it may be on "
            f"{', '.join(unknown)}, which does not answer (leave --resume out to begin anew)"
        )

    # --- the hostfile -----------------------------------------------------------------------------

    def _look(self) -> tuple[int, ...] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None  # an editor may be about to write it again
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read_again(self) -> bool:
        """Read the file again if it has been changed; return whether a new version is in use."""
        stamp = self._look()
        if stamp is None or stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self._hosts = read_hostfile(self._path)
        except AllhandsError as error:
            _log.warning("%s (the hostfile as it was is kept)", error)
            return False
        self._edition += 1
        self._left_out.clear()
        return True

    # --- asking -----------------------------------------------------------------------------------

    def _ask(self, hosts: Sequence[Host]) -> dict[str, SshTrouble]:
        """Ask all ``hosts`` at the same time; return the troubles of those that do not answer.

        Raises:
            ConfigError: the hosts cannot be asked over ssh at all.
        """
        names = {host.name: host.ssh for host in hosts if host.ssh is not None}
        troubles = side_by_side(lambda ssh: self._trouble(ssh, self._timeout_s), [*names.values()])
        found = zip(names, troubles, strict=True)
        return {name: trouble for name, trouble in found if trouble is not None}

    def _newest(self, hosts: Sequence[Host]) -> Mapping[str, int]:
        if self._checkpoints is None or not hosts:
            return {}
        try:
            steps = self._checkpoints(hosts)
        except (AllhandsError, OSError) as error:
            _log.warning("the newest checkpoint could not be asked for: %s", error)
            return {}
        with self._lock:
            self._looked_at.update(host.name for host in hosts)
            # Keep older answers: a host that does not answer may still have its checkpoint.
            self._heard.update(steps)
        return steps

    def _keep_asking(self, present: set[str], at_once: bool) -> None:
        """In the background, ask missing computers whether they are back, and the others for their
        checkpoints.

        It does nothing while an earlier round runs or the next one is not due yet.
        """
        now = time.monotonic()
        if (self._round is not None and self._round.is_alive()) or (
            now < self._next_round and not at_once
        ):
            return
        self._next_round = now + _ROUND_S
        missing = [h for h in self._hosts if h.name not in present and h.name not in self._left_out]
        others = [h for h in self._hosts if h.name in present]

        began = self._rosters

        def ask() -> None:
            back = frozenset(host.name for host in missing) - set(self._ask(missing))
            if began == self._rosters:
                self._back = back
            self._newest(others)

        self._round = threading.Thread(target=ask, name="ask-hosts", daemon=True)
        self._round.start()


def _seats(places: Iterable[Place]) -> tuple[str, ...]:
    return tuple(place.name for place in places for _ in range(place.num_ranks))
