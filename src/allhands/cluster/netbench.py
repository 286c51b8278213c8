"""Measurement of the network in the way training uses it: all-reduces of growing sizes in a real
MLX group of all computers, then on each link alone.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from allhands.cluster.attempt import Attempt
from allhands.cluster.candidates import candidates, facts_of, table_choice
from allhands.cluster.connection import HostError
from allhands.cluster.figures import SIZES, Failure, Figures, Measurement
from allhands.cluster.hosts import Backend, Host, hosts_named
from allhands.cluster.mpi import require_mpi
from allhands.cluster.outcome import Fault
from allhands.cluster.ranks import LaunchSpec, Place, fair_share, require_cores
from allhands.cluster.supervisor import Workroom, workroom
from allhands.errors import AllhandsError, ConfigError, DistributedError
from allhands.io.files import make_directory

_EVERY_PAIR = 6  # up to this number of hosts every pair is measured; with more only neighbours are
_RANGE = (4, 1 << 30)
_SHARE = 0.6  # part of the time for the group of all computers; the links share the rest
_LEAST_S = 4.0  # for a start and one size; with less time a group is not begun
_LEAST_BUDGET_S = 1.0


@dataclass(frozen=True)
class BenchOptions:
    """Options of a measurement of the network.

    Attributes:
        sizes: bytes of the arrays, smallest first; the largest are left out if they would take too
            long.
        timeout_s: seconds for the whole measurement.
        links: whether pairs of computers are measured, too.
        seconds: seconds of timed rounds for each size.
        connect_s: seconds in which a group must form.
        cores_per_rank: cores of each rank, as in training; ``None``: the cores of a computer
            divided among its ranks.
        progress: called with a line about each group that begins.
    """

    sizes: Sequence[int] = SIZES
    timeout_s: float = 120.0
    links: bool = True
    seconds: float = 0.2
    connect_s: float = 20.0
    cores_per_rank: int | None = None
    progress: Callable[[str], None] | None = field(default=None, compare=False)


def measured_hosts(
    hostfile: str | None, hosts: str | None, num_ranks: int | None
) -> tuple[Host, ...]:
    """Return the computers that the options name; without any, this one with two ranks.

    Raises:
        ConfigError: options contradict each other, name no computer, or ask for too many processes
            on this computer.
    """
    named = hosts_named(hosts, hostfile)
    if named and num_ranks:
        raise ConfigError(
            "-n is for this computer alone",
            code="options-conflict",
            where="-n",
            hint="write slots: --hosts node1:2,node2:2",
        )
    if named:
        return named
    require_cores(num_ranks or 2)
    return (Host("this computer", slots=num_ranks or 2),)


def measure_each(
    hosts: Sequence[Host], backend: str, options: BenchOptions, tell: Callable[[str], None]
) -> list[Measurement]:
    """Measure a back-end; for ``"all"`` each possible one, in the order of preference.

    Args:
        tell: called with the error of one back-end of several.

    Raises:
        AllhandsError: as :func:`measure`, if there is only one back-end.
    """
    names = [backend]
    if backend == "all":
        names = [one.backend for one in candidates(facts_of(hosts, ask=True)) if one.possible]
    found: list[Measurement] = []
    for name in names:
        try:
            found.append(measure(hosts, name, options))
        except AllhandsError as error:
            if len(names) == 1:
                raise
            tell(f"allhands: {name}: {error}")
    return found


def measure(
    hosts: Sequence[Host], backend: str = "auto", options: BenchOptions | None = None
) -> Measurement:
    """Form a real group on ``hosts``, time its all-reduces, then those of pairs of hosts.

    Computers that cannot be reached are named in ``failures``, and the others are measured without
    them. A group that does not form is a :class:`Failure`, not an exception. The pairs then show
    which link is the cause. What a rank prints goes to a log.

    Args:
        hosts: computers with at least two slots in total. A single host gets several ranks and has
            no links.
        backend: name of a back-end; ``"auto"``: the one that the table of back-ends chooses.

    Raises:
        ConfigError: there are fewer than two ranks, or a size or the back-end cannot be used.
        AllhandsError: something that the back-end needs is not installed here.
        KeyboardInterrupt: a signal has ended the measurement.
    """
    options = options or BenchOptions()
    if backend == "auto":
        backend = table_choice(facts_of(hosts)).backend
    _check(hosts, backend, options)
    with workroom() as room:
        return _Bench(hosts, cast(Backend, backend), options, room).run()


def _check(hosts: Sequence[Host], backend: str, options: BenchOptions) -> None:
    if sum(host.slots for host in hosts) < 2:
        raise ConfigError(
            "one rank exchanges nothing",
            code="ranks-too-few",
            where="-n",
            hint="give -n 2, or a hostfile with two computers",
        )
    sizes = list(options.sizes)
    if (
        not sizes
        or sizes != sorted(set(sizes))
        or not all(_RANGE[0] <= size <= _RANGE[1] for size in sizes)
    ):
        raise ConfigError(
            f"sizes must ascend from {_RANGE[0]} to {_RANGE[1]} bytes: {sizes}",
            code="value-out-of-range",
        )
    if backend not in ("ring", "mpi", "nccl"):
        raise ConfigError(
            f"{backend} groups cannot be started by allhands",
            code="value-unknown",
            where="--backend",
            hint="use ring, mpi or nccl",
        )
    if backend == "mpi":
        require_mpi()
        if len(hosts) > 1 or hosts[0].ssh is not None:
            raise ConfigError(
                "MPI is for this computer alone; those of a hostfile are joined by the ring",
                code="backend-needs-one-computer",
                where="--backend mpi",
                hint="use --backend ring, or leave --backend out",
            )


@dataclass(frozen=True)
class _Group:
    """Computers that are measured together, each with its number of ranks."""

    members: tuple[tuple[Host, int], ...]
    is_whole: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host, _ in self.members)

    @property
    def num_ranks(self) -> int:
        return sum(ranks for _, ranks in self.members)

    def without(self, names: Iterable[str]) -> _Group:
        return _Group(tuple(one for one in self.members if one[0].name not in names), self.is_whole)


def _groups(hosts: Sequence[Host], links: bool) -> list[_Group]:
    """Return the group of all computers, then the pairs.

    Up to six computers these are all pairs; with more, the neighbours in the ring.
    """
    whole = _Group(tuple((host, host.slots) for host in hosts), is_whole=True)
    if len(hosts) < 2 or not links or (len(hosts) == whole.num_ranks == 2):
        return [whole]
    if len(hosts) <= _EVERY_PAIR:
        pairs = list(itertools.combinations(hosts, 2))
    else:
        pairs = [*itertools.pairwise(hosts), (hosts[0], hosts[-1])]
    return [whole, *(_Group(((one, 1), (other, 1))) for one, other in pairs)]


@dataclass
class _Bench:
    """One measurement: its groups are measured one after the other, each by an :class:`Attempt`."""

    hosts: Sequence[Host]
    backend: Backend
    options: BenchOptions
    room: Workroom
    began: float = field(default_factory=time.monotonic)
    missing: set[str] = field(default_factory=set[str])
    failures: list[Failure] = field(default_factory=list[Failure])
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def run(self) -> Measurement:
        """Measure every group for which there is enough time."""
        groups = _groups(self.hosts, self.options.links)
        whole: Figures | None = None
        links: list[Figures] = []
        not_measured: list[_Group] = []
        for number, group in enumerate(groups):
            left = self.began + self.options.timeout_s - time.monotonic()
            if left < _LEAST_S:
                not_measured = groups[number:]
                break
            share = (
                _SHARE if number == 0 and len(groups) > 1 else min(1.0, 2 / (len(groups) - number))
            )
            if found := self._measured(group, left * share):
                whole = found if group.is_whole else whole
                links += [] if group.is_whole else [found]
        # With two computers and one rank on each, the group is the only link.
        if whole and len(whole.hosts) == whole.num_ranks == 2 and not links:
            links = [whole]
        left_out = tuple(group.names for group in not_measured)
        taken_s = time.monotonic() - self.began
        return Measurement(
            self.backend, whole, tuple(links), tuple(self.failures), left_out, taken_s
        )

    def _measured(self, group: _Group, limit_s: float) -> Figures | None:
        """Measure those computers of a group that are not missing; a link needs both of its two."""
        present = group.without(self.missing)
        if present.num_ranks < 2:
            return None
        if self.options.progress:
            self.options.progress(f"measuring {', '.join(present.names)}")
        began = time.monotonic()
        try:
            found = self._attempt(present, limit_s)
        except HostError as error:
            self._fail(group, error.hosts, error.message, error.hint, code=error.code)
            self.missing.update(error.hosts)
            if group.is_whole and set(error.hosts) & set(present.names):
                return self._measured(group, limit_s - (time.monotonic() - began))
            return None
        except AllhandsError as error:
            named = [name for name in present.names if f"host {name}" in str(error)]
            self._fail(group, named, error.message, error.hint, code=error.code)
            return None
        if isinstance(found, Figures):
            return found
        self._explain(group, present, found)
        return None

    def _attempt(self, group: _Group, limit_s: float) -> Figures | Fault:
        """Run the ranks of a group; if their ports were taken, run them again with other ports.

        The ranks choose their sizes so that they need less than ``limit_s``.
        """
        deadline = self.began + self.options.timeout_s

        def heed_the_deadline() -> None:
            if time.monotonic() > deadline:
                raise DistributedError(
                    "there was no time for it",
                    code="deadline-passed",
                    hint="give more time: --timeout-s",
                )

        while True:
            place = make_directory(self.room.private / f"group-{next(self._numbers)}")
            spec = self._spec(group, limit_s, place / "logs")
            make_directory(spec.log_dir)
            attempt = Attempt(
                spec, place / "ranks", self.room.signals, lambda event: None, self.room.reaper
            )
            outcome = attempt.run(heed_the_deadline)
            if outcome.stopped:
                raise KeyboardInterrupt
            if not outcome.ports_taken or time.monotonic() > deadline:
                break
        if outcome.fault is not None:
            return outcome.fault
        # The content comes from a rank, perhaps on another computer, so it may be anything.
        with suppress(KeyError, TypeError, ValueError):
            return Figures.from_json({**(attempt.attested() or {}), "hosts": group.names})
        raise DistributedError("its ranks have reported no times", code="measurement-failed")

    def _spec(self, group: _Group, limit_s: float, log_dir: Path) -> LaunchSpec:
        first, _ = group.members[0]
        alone = len(group.members) == 1 and first.ssh is None
        task = {
            "sizes": list(self.options.sizes),
            "seconds": self.options.seconds,
            "budget_s": max(limit_s / 2, _LEAST_BUDGET_S),
            "connect_s": self.options.connect_s,
            "products": group.is_whole,  # measure products only when all computers take part
        }
        return LaunchSpec(
            [sys.executable, "-P", "-m", "allhands.cluster.bench_rank", json.dumps(task)],
            group.num_ranks,
            self.backend,
            log_dir,
            cores_per_rank=self.options.cores_per_rank
            or (fair_share(group.num_ranks) if alone else None),
            env=first.envs if alone else {},
            start_deadline_s=min(limit_s, self.options.connect_s),
            stop_grace_s=1.0,
            finish_grace_s=max(limit_s, _LEAST_S),
            places=()
            if alone
            else tuple(Place(host.name, ranks, host) for host, ranks in group.members),
            log_dir_there="",
        )

    def _explain(self, group: _Group, present: _Group, fault: Fault) -> None:
        blocked = fault.kind == "blocked"
        hosts = [
            name for name in present.names if name == fault.host and fault.kind != "not started"
        ]
        message, hint = fault.message, None
        if blocked or fault.kind == "not started":
            computers, within = " and ".join(present.names), f"within {self.options.connect_s:g} s"
            message = f"{computers} did not form a {self.backend} group {within}"
            message += f": {fault.message}" if blocked else ""
            hint = "look for a firewall, and whether each reaches the other at the address of the hostfile"
        elif fault.explanation:
            message, _, hint = fault.explanation.partition("\n  what to do: ")
        self._fail(group, hosts, message, hint or None, log_tail=fault.log_tail, code=fault.code)

    def _fail(
        self,
        group: _Group,
        hosts: Sequence[str],
        message: str,
        hint: str | None,
        *,
        log_tail: Sequence[str] = (),
        code: str | None,
    ) -> None:
        hosts = tuple(hosts) or group.names
        self.failures.append(Failure(hosts, group.names, message, hint, tuple(log_tail), code))
