"""Facts of real computers for a plan: their memory, the link between them, and its back-end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from allhands.cluster.candidates import facts_here
from allhands.cluster.choose import choose
from allhands.cluster.doctor.facts import HostFacts
from allhands.cluster.doctor.run import ask_facts
from allhands.cluster.doctor.storage import device_memory as memory_of
from allhands.cluster.guard import die_with_parent
from allhands.cluster.hosts import Host, hosts_named
from allhands.cluster.netbench import BenchOptions, measure
from allhands.cluster.probes.computer import memory_facts
from allhands.config.schema import TrainConfig
from allhands.errors import DistributedError
from allhands.io.formatting import format_bytes
from allhands.plan.computers import Computer
from allhands.plan.devices import DRIVER_TAKES, MAC_KEEPS, USABLE
from allhands.plan.links import Measured
from allhands.plan.site import Site
from allhands.runtime.accelerator import device_memory, working_set_bytes

_ASK_S = 10.0
_OTHERS = "other programs have the rest now"


def site_of(config: TrainConfig) -> Site:
    """Return the named computers; without names, this computer with all ranks.

    Raises:
        ConfigError: the computers are named twice, or their names cannot be read.
    """
    hosts = hosts_named(config.hosts, config.hostfile) or (
        Host("this computer", slots=config.num_ranks),
    )
    slots = tuple(host.slots for host in hosts)
    return Site(
        slots=slots,
        here=next((sum(slots[:place]) for place, host in enumerate(hosts) if host.ssh is None), 0),
        backend=lambda: (
            choose(facts_here(config.num_ranks), cores_per_rank=config.cores_per_rank).backend
        ),
        computers=partial(_computers, hosts),
        link=partial(_link, hosts, config),
        in_child=die_with_parent,
    )


def _computers(hosts: Sequence[Host], kind: str) -> list[Computer]:
    """Return each computer with its memory; others report it over ssh."""
    far = [host for host in hosts if host.ssh is not None]
    told = ask_facts(far, _ASK_S) if far else {}
    return [
        replace(_here(kind), name=host.name)
        if host.ssh is None
        else _told(host.name, told.get(host.name))
        for host in hosts
    ]


def _here(kind: str) -> Computer:
    """Return this computer with its usable memory: on a CPU the memory that is free now, on a GPU
    the part that arrays may take.
    """
    if kind == "cpu":
        memory = memory_facts()
        return Computer("", 1.0, memory["free"], memory["total"], _OTHERS)
    whole = device_memory()
    why = MAC_KEEPS if kind == "metal" else DRIVER_TAKES
    return Computer("", 1.0, working_set_bytes() or int(USABLE * whole), whole, why)


def _told(name: str, facts: HostFacts | None) -> Computer:
    if facts is None or not facts.memory.total:
        return Computer(name)
    usable, free, _ = memory_of(facts)
    if not facts.gpus:
        return Computer(name, 1.0, free, facts.memory.total, _OTHERS)
    gpu = facts.gpus[0]
    if gpu.kind == "cuda":
        return Computer(name, 1.0, int(USABLE * usable), usable, DRIVER_TAKES)
    return Computer(name, 1.0, usable, gpu.memory, MAC_KEEPS)


def _link(hosts: Sequence[Host], config: TrainConfig, notes: list[str]) -> Measured:
    """Measure the link between all ranks, and note its figures.

    Raises:
        DistributedError: it cannot be measured.
    """
    options = BenchOptions(links=False, cores_per_rank=config.cores_per_rank)
    found = measure(hosts, config.backend, options)
    if (whole := found.whole) is None:
        why = (
            "; ".join(failure.message for failure in found.failures)
            or "the ranks could not connect"
        )
        raise DistributedError(
            f"the link cannot be measured: {why}",
            code="measurement-failed",
            hint="allhands cluster check tells more",
        )
    notes.append(
        f"link as measured over {whole.backend} between {whole.num_ranks} ranks: "
        f"{format_bytes(whole.bytes_per_s)}/s of all-reduces, {1e3 * whole.latency_s:.2g} ms"
    )
    return Measured(whole.num_ranks, whole.seconds, name=whole.backend, speeds=whole.speeds)
