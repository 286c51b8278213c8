"""The computers of a plan and the link between them: described, or real and asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from allhands.config.schema import TrainConfig
from allhands.distributed.mesh import check_weights
from allhands.errors import ConfigError
from allhands.io.formatting import format_bytes
from allhands.plan.computers import Computer, listed
from allhands.plan.devices import PlannedDevice, devices_of
from allhands.plan.job import Prices
from allhands.plan.links import ExchangeTimes, Measured, link_of

_DEFAULT_LINK = "1GbE"
_ALIKE = 1.1  # speeds whose ratio is smaller count as equal

Say = Callable[[str], object]


@dataclass(frozen=True)
class Site:
    """The real computers of a plan, and functions that ask them.

    Attributes:
        slots: number of ranks of each computer.
        here: the first rank of this computer.
        backend: returns the back-end that ranks on this computer alone would take.
        computers: returns each computer with its memory, for a kind of processor.
        link: measures the link between all ranks; adds a note with its figures to a list.
        in_child: called in the process of a short training before its program starts.
    """

    slots: tuple[int, ...]
    here: int
    backend: Callable[[], str]
    computers: Callable[[str], Sequence[Computer]]
    link: Callable[[list[str]], Measured]
    in_child: Callable[[], None]


@dataclass(frozen=True)
class AskedComputers:
    """The options of ``allhands plan`` about computers.

    Attributes:
        device: text of ``--device``; ``None``: the computers are real.
        link: text of ``--link``.
        machines: numbers of imagined equal computers.
        once: True if the training is needed only once.
        timeout_s: seconds for each measurement.
        prices: prices of an hour.
        site: the real computers; ``None`` if they are only described.
    """

    device: str | None
    link: str | None
    machines: tuple[int, ...]
    once: bool
    timeout_s: float
    prices: Prices
    site: Site | None = None

    @cached_property
    def devices(self) -> list[PlannedDevice]:
        """The described computers."""
        return devices_of(self.device)

    @property
    def most(self) -> int:
        """The largest number of ranks that is planned."""
        named = len(self.devices) if self.site is None else sum(self.site.slots)
        return max(named, *(self.machines or (1,)))


def on_hosts(config: TrainConfig) -> bool:
    """Return whether the plan is for computers over ssh."""
    return bool(config.hosts or config.hostfile)


def check_computers(config: TrainConfig, asked: AskedComputers) -> None:
    """Refuse options that name computers in two ways; called before any long work.

    Raises:
        ConfigError: options contradict each other, or the number of rank weights is wrong.
    """
    devices = asked.devices  # first, so that unknown ones are refused
    if asked.site is not None:
        check_weights(config.given_weights, sum(asked.site.slots))
    several = config.num_ranks > 1
    values = {
        "--link": asked.link,
        "--hosts": config.hosts,
        "--hostfile": config.hostfile,
        "-n": several and not config.hostfile,
    }
    given = [flag for flag, value in values.items() if value]
    if len(given) > 1:
        raise ConfigError(
            f"{' and '.join(given)} exclude each other",
            code="options-conflict",
            where=given[-1],
            hint="give one of them; a configuration file (-c) may have named the other one",
        )
    if devices and given and given != ["--link"]:
        raise ConfigError(
            "computers that are only described cannot be measured",
            code="options-conflict",
            where="--device",
            hint="leave --device out to plan with this computer's speed, or describe the link: --link 10GbE",
        )
    if asked.machines and (several or on_hosts(config) or len(devices) > 1):
        raise ConfigError(
            "the computers are named one by one",
            code="options-conflict",
            where="--machines",
            hint="leave it out",
        )


# --- computers ------------------------------------------------------------------------------------


def computers_of(
    config: TrainConfig,
    asked: AskedComputers,
    kind: str,
    link: ExchangeTimes | None,
    say: Say,
    notes: list[str],
) -> tuple[Computer, ...]:
    """Return the computers in the order in which they were named; without names, only this one.

    Args:
        kind: kind of this computer's processor.
        link: link between the computers; if it was measured, their speeds may be measured, too.
        say: called with a line about the current work.
        notes: gets lines about the computers.
    """
    site = asked.site
    if site is None:
        watts = asked.prices.watts is None and asked.prices.per_kwh is not None
        first = asked.devices[0].flops
        found = [_described(each, first, watts=watts) for each in asked.devices]
    elif on_hosts(config):
        say("asking the computers for their memory ...")
        parts = [
            part
            for each, slots in zip(site.computers(kind), site.slots, strict=True)
            for part in [_part(each, slots, kind)] * slots
        ]
        speeds = _speeds(config, site, link.speeds if isinstance(link, Measured) else (), notes)
        found = [replace(each, speed=speed) for each, speed in zip(parts, speeds, strict=True)]
    else:
        return tuple(site.computers(kind))
    notes += listed(found)
    return tuple(found)


def _described(device: PlannedDevice, flops: float, *, watts: bool) -> Computer:
    return Computer(
        name=device.name,
        speed=device.flops / flops,
        usable_bytes=device.usable_bytes,
        memory_bytes=device.memory_bytes,
        why=device.why,
        watts=device.watts if watts else None,
    )


def _part(whole: Computer, slots: int, kind: str) -> Computer:
    """Return the part of a computer that each of its ``slots`` ranks has."""
    if slots == 1:
        return whole
    if kind == "cuda":  # each rank has a GPU of its own
        return replace(whole, part=1.0 / slots)
    usable = None if whole.usable_bytes is None else whole.usable_bytes // slots
    why = f"{whole.why}; its {slots} ranks share it".removeprefix("; ")
    return replace(whole, usable_bytes=usable, why=why, part=1.0 / slots)


def _speeds(
    config: TrainConfig, site: Site, measured: Sequence[float], notes: list[str]
) -> Sequence[float]:
    """Return the speed of each rank relative to this computer: from ``--rank-weights`` or
    ``measured``.
    """
    ranks = sum(site.slots)
    if weights := config.given_weights:
        return [weight / weights[site.here] for weight in weights]
    if len(measured) == ranks:
        notes.append(
            "speeds as measured, by products of matrices on all ranks at once; a step may differ"
        )
        if max(measured) <= _ALIKE * min(measured):
            return [1.0] * ranks
        return [max(round(speed / measured[site.here], 2), 0.01) for speed in measured]
    notes.append(
        "only this computer was measured, and all ranks count as equally fast; if they are not, give --rank-weights, "
        "such as '[2, 1]'"
    )
    return [1.0] * ranks


def prices_of(asked: AskedComputers, notes: list[str]) -> Prices:
    """Return the prices, and note the assumed power if only energy has a price.

    Raises:
        ConfigError: the power of a computer is unknown.
    """
    if asked.prices.watts is not None or asked.prices.per_kwh is None:
        return asked.prices
    if not asked.devices:
        raise ConfigError(
            "the price of energy needs a power",
            code="option-missing",
            where="--price-per-kwh",
            hint="give the power of a computer while it trains: --watts 60",
        )
    told = ", ".join(dict.fromkeys(f"{each.watts:g} for {each.name}" for each in asked.devices))
    notes.append(f"no --watts are given: assumed during training are, in watts, {told}")
    return asked.prices


# --- the link -------------------------------------------------------------------------------------


def link_between(
    config: TrainConfig, asked: AskedComputers, say: Say, notes: list[str]
) -> ExchangeTimes | None:
    """Return the link: measured between existing ranks, else as described; ``None`` if the plan is
    for one computer.

    Raises:
        AllhandsError: the link is unknown, or cannot be measured.
    """
    if asked.site is not None and (on_hosts(config) or config.num_ranks > 1):
        say("measuring the link ...")
        return asked.site.link(notes)
    if asked.most < 2:
        if asked.link:
            link_of(asked.link)
            named = "--device '2 x M1 Pro 32GB'" if asked.devices else "--hosts, or --device"
            notes.append(
                f"--link {asked.link} is not used: the plan is for one computer. Name the others ({named}), or give "
                "numbers of imagined computers: --machines 1,2,4"
            )
        if config.compress != "none":
            notes.append(
                f"--compress {config.compress} has no effect: one computer exchanges nothing"
            )
        return None
    found = link_of(asked.link or _DEFAULT_LINK)
    if not asked.link:
        notes.append(f"no --link is given: {_DEFAULT_LINK} is assumed")
    notes.append(
        f"link {found.name}: {format_bytes(found.bytes_per_s)}/s, {1e3 * found.latency_s:.2g} ms ({found.source})"
    )
    return found
