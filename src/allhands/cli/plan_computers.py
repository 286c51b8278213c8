"""The computers of a plan, their memory and speed, and the link between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from allhands.cli.plan_asked import AskedComputers, hosts_of, on_hosts
from allhands.cluster.doctor.facts import HostFacts
from allhands.cluster.doctor.run import ask_facts
from allhands.cluster.doctor.storage import device_memory as memory_of
from allhands.cluster.hosts import Host
from allhands.cluster.netbench import BenchOptions, measure
from allhands.cluster.probes.computer import memory_facts
from allhands.config.schema import TrainConfig
from allhands.errors import ConfigError, DistributedError
from allhands.io.formatting import format_bytes
from allhands.plan.computers import Computer, listed
from allhands.plan.devices import DRIVER_TAKES, MAC_KEEPS, USABLE, PlannedDevice
from allhands.plan.job import Prices
from allhands.plan.links import ExchangeTimes, Measured, link_of
from allhands.runtime.accelerator import device_memory, working_set_bytes

_DEFAULT_LINK = "1GbE"
_ASK_S = 10.0
_ALIKE = 1.1  # speeds whose ratio is smaller count as equal
_HERE = "this computer"

Say = Callable[[str], object]


# --- computers ------------------------------------------------------------------------------------


def computers_of(
    config: TrainConfig,
    asked: AskedComputers,
    devices: Sequence[PlannedDevice],
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
    if devices:
        watts = asked.prices.watts is None and asked.prices.per_kwh is not None
        found = tuple(_described(each, devices[0], watts=watts) for each in devices)
    elif on_hosts(config):
        found = _answering(
            config, kind, link.speeds if isinstance(link, Measured) else (), say, notes
        )
    else:
        return (_here(kind),)
    notes += listed(found)
    return found


def _described(device: PlannedDevice, first: PlannedDevice, *, watts: bool) -> Computer:
    return Computer(
        name=device.name,
        speed=device.flops / first.flops,
        usable_bytes=device.usable_bytes,
        memory_bytes=device.memory_bytes,
        why=device.why,
        watts=device.watts if watts else None,
    )


def _here(kind: str) -> Computer:
    """Return this computer with its usable memory: on a CPU the memory that is free now, on a GPU
    the part that arrays may take.
    """
    if kind == "cpu":
        memory = memory_facts()
        return Computer(
            _HERE, 1.0, memory["free"], memory["total"], "other programs have the rest now"
        )
    whole = device_memory()
    why = MAC_KEEPS if kind == "metal" else DRIVER_TAKES
    usable = working_set_bytes() or int(USABLE[kind] * whole)
    return Computer(_HERE, 1.0, usable, whole, why)


def _answering(
    config: TrainConfig, kind: str, measured: Sequence[float], say: Say, notes: list[str]
) -> tuple[Computer, ...]:
    """Return one computer for each slot of the hosts; other hosts report their memory over ssh."""
    hosts = hosts_of(config)
    say("asking the computers for their memory ...")
    told = ask_facts([host for host in hosts if host.ssh is not None], _ASK_S)
    found: list[Computer] = []
    for host in hosts:
        one = (
            replace(_here(kind), name=host.name)
            if host.ssh is None
            else _told(host, told.get(host.name))
        )
        if host.slots > 1:
            usable = (
                one.usable_bytes
                if kind == "cuda" or one.usable_bytes is None
                else one.usable_bytes // host.slots
            )
            why = f"{one.why}; its {host.slots} ranks share it" if kind != "cuda" else one.why
            one = replace(
                one, usable_bytes=usable, why=why.removeprefix("; "), part=1.0 / host.slots
            )
        found += [one] * host.slots
    speeds = _speeds(config, hosts, measured, notes)
    return tuple(replace(each, speed=speed) for each, speed in zip(found, speeds, strict=True))


def _told(host: Host, facts: HostFacts | None) -> Computer:
    if facts is None or not facts.memory.total:
        return Computer(host.name)
    usable, free, _ = memory_of(facts)
    if not facts.gpus:
        return Computer(
            host.name, 1.0, free, facts.memory.total, "other programs have the rest now"
        )
    gpu = facts.gpus[0]
    if gpu.kind == "cuda":
        return Computer(host.name, 1.0, int(USABLE["cuda"] * usable), usable, DRIVER_TAKES)
    return Computer(host.name, 1.0, usable, gpu.memory, MAC_KEEPS)


def _speeds(
    config: TrainConfig, hosts: Sequence[Host], measured: Sequence[float], notes: list[str]
) -> list[float]:
    """Return the speed of each rank relative to this computer: from ``--rank-weights`` or
    ``measured``.
    """
    slots = [host.slots for host in hosts]
    mine = next((sum(slots[:place]) for place, host in enumerate(hosts) if host.ssh is None), 0)
    if config.given_weights:
        return [weight / config.given_weights[mine] for weight in config.given_weights]
    if len(measured) == sum(slots):
        notes.append(
            "speeds as measured, by products of matrices on all ranks at once; a step may differ"
        )
        if max(measured) <= _ALIKE * min(measured):
            return [1.0] * len(measured)
        return [max(round(speed / measured[mine], 2), 0.01) for speed in measured]
    notes.append(
        "only this computer was measured, and all ranks count as equally fast; if they are not, give --rank-weights, "
        "such as '[2, 1]'"
    )
    return [1.0] * sum(slots)


def prices_of(asked: AskedComputers, devices: Sequence[PlannedDevice], notes: list[str]) -> Prices:
    """Return the prices, and note the assumed power if only energy has a price.

    Raises:
        ConfigError: the power of a computer is unknown.
    """
    if asked.prices.watts is not None or asked.prices.per_kwh is None:
        return asked.prices
    if not devices:
        raise ConfigError(
            "the price of energy needs a power",
            code="option-missing",
            where="--price-per-kwh",
            hint="give the power of a computer while it trains: --watts 60",
        )
    told = ", ".join(dict.fromkeys(f"{each.watts:g} for {each.name}" for each in devices))
    notes.append(f"no --watts are given: assumed during training are, in watts, {told}")
    return asked.prices


# --- the link -------------------------------------------------------------------------------------


def link_between(
    config: TrainConfig, asked: AskedComputers, devices: int, say: Say, notes: list[str]
) -> ExchangeTimes | None:
    """Return the link: measured between existing ranks, else as described; ``None`` if the plan is
    for one computer.

    Raises:
        AllhandsError: the link is unknown, or cannot be measured.
    """
    if on_hosts(config) or config.num_ranks > 1:
        return _measured_link(config, say, notes)
    if devices < 2 and asked.machines in ((), (1,)):
        if asked.link:
            link_of(asked.link)
            named = "--device '2 x M1 Pro 32GB'" if devices else "--hosts, or --device"
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


def _measured_link(config: TrainConfig, say: Say, notes: list[str]) -> ExchangeTimes:
    say("measuring the link ...")
    options = BenchOptions(links=False, cores_per_rank=config.cores_per_rank)
    found = measure(hosts_of(config), config.backend, options)
    if found.whole is None:
        why = (
            "; ".join(failure.message for failure in found.failures)
            or "the ranks could not connect"
        )
        raise DistributedError(
            f"the link cannot be measured: {why}",
            code="measurement-failed",
            hint="allhands cluster check tells more",
        )
    whole = found.whole
    notes.append(
        f"link as measured over {whole.backend} between {whole.num_ranks} ranks: "
        f"{format_bytes(whole.bytes_per_s)}/s of all-reduces, {1e3 * whole.latency_s:.2g} ms"
    )
    return Measured(whole.num_ranks, whole.seconds, name=whole.backend, speeds=whole.speeds)
