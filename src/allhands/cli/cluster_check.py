"""``allhands cluster check``: faults that keep computers from training together, with remedies."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from allhands.cli.verbs_cluster import ClusterCheck
from allhands.cli.verbs_models import Backend
from allhands.cluster.doctor.facts import Cluster, HostReport, LinkSpeed, Network
from allhands.cluster.doctor.findings import Check, Finding
from allhands.cluster.doctor.run import ClusterCheckOptions, diagnose, well
from allhands.cluster.hosts import chosen_hosts, hostfile_backend
from allhands.errors import DistributedError
from allhands.io.formatting import counted, format_bytes, format_duration
from allhands.io.terminal import console_for, print_json, printable, progress_console

_WIDTH = 80
_STYLES = {"stop": "bold red", "warn": "yellow", "note": "dim"}


def cluster_check(asked: ClusterCheck) -> None:
    """Run the verb."""
    computers = chosen_hosts(asked.hosts, asked.hostfile)
    backend = str(asked.backend)
    if asked.backend is Backend.auto and asked.hostfile is not None:
        backend = hostfile_backend(asked.hostfile) or backend
    words = ["--hostfile", str(asked.hostfile)] if asked.hostfile else ["--hosts", str(asked.hosts)]
    with progress_console().status("") as status:
        options = ClusterCheckOptions(
            option=shlex.join(words),
            backend=backend,
            model=asked.model,
            data=asked.data,
            adapter_path=asked.adapter_path,
            hashed=not asked.quick,
            bench=asked.bench,
            timeout_s=asked.timeout_s,
            progress=status.update,
        )
        cluster, findings = diagnose(computers, options)
    if asked.as_json:
        print_json(as_content(cluster, findings), indent=2)
    else:
        show(console_for(widest=_WIDTH), cluster, findings)
    if any(finding.severity == "stop" for finding in findings):
        raise typer.Exit(DistributedError.exit_code)


# --- for people -----------------------------------------------------------------------------------


def show(console: Console, cluster: Cluster, findings: Sequence[Finding]) -> None:
    """Print all results: the computers, the faults, the remedies, and the passed checks."""
    for host in cluster.hosts:
        console.print(printable(host_line(host)), soft_wrap=True)
    console.print()
    if findings:
        console.print(findings_table(findings))
        for number, finding in enumerate(findings, 1):
            if finding.remedy:
                # Not wrapped, so that it can be copied.
                console.print(printable(f"{number:3d}. {finding.remedy}"), soft_wrap=True)
        console.print()
    if cluster.network is not None:
        for line in network_lines(cluster.network):
            console.print(printable(line))
    titles = [_with_detail(check, cluster) for check in well(cluster)]
    if titles:
        console.print(printable(f"well: {', '.join(titles)}"))
    if left := not_asked(cluster):
        console.print(f"not checked: {', '.join(left)}", style="dim")
    console.print(verdict(findings), style="bold")


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return a table with a row for each finding."""
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, collapse_padding=True)
    for name, ratio in (("", None), ("check", None), ("hosts", 2), ("what is wrong", 7)):
        table.add_column(name, ratio=ratio, no_wrap=ratio is None, overflow="fold")
    for number, finding in enumerate(findings, 1):
        style = _STYLES[finding.severity]
        words = (
            f"{number:2d} {finding.severity}",
            finding.check,
            ", ".join(finding.hosts),
            finding.message,
        )
        table.add_row(
            *(
                Text(printable(word), style=style if place < 1 else "")
                for place, word in enumerate(words)
            )
        )
    return table


def host_line(host: HostReport) -> str:
    """Return a line such as ``node1  10.0.0.2  Linux x86_64, 2 cores, 25.3 GB``."""
    parts = [host.name, ", ".join(host.addresses) or "no address"]
    if host.facts is None:
        return "  ".join([*parts, "not asked"])
    facts = host.facts
    names = [gpu.name for gpu in facts.gpus]
    devices = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    cores = counted(facts.processor.usable, "core")
    system = f"{facts.system.system} {facts.system.machine}"
    parts.append(", ".join([system, cores, format_bytes(facts.memory.total), *devices]))
    return "  ".join(parts)


def network_lines(network: Network) -> list[str]:
    """Return lines with the measurements of the network, and their meaning for a step."""
    lines: list[str] = []
    if network.whole is not None:
        lines.append(f"all-reduce ({network.backend}), all together: {_speed(network.whole)}")
    if len(network.links) > 1:
        for link in network.links:
            slowest = "  <- slowest" if link.hosts == network.slowest else ""
            lines.append(f"  {' - '.join(link.hosts)}: {_speed(link)}{slowest}")
    if network.seconds:
        words = {"LoRA": "LoRA (rank 8, last 16 layers)", "full": "all weights"}
        parts = [
            f"{words.get(what, what)} {_seconds(taken)}" for what, taken in network.seconds.items()
        ]
        lines.append(f"communication a step, at 4 bytes a parameter: {', '.join(parts)}")
    if len(network.speeds) > 1:
        whole = sum(network.speeds.values())
        each = [f"{name} {speed / 1e9:,.0f} GFLOP/s" for name, speed in network.speeds.items()]
        shares = " : ".join(f"{100 * speed / whole:.0f}" for speed in network.speeds.values())
        lines.append(
            f"products of matrices, all at once: {', '.join(each)}: by that, shares of a batch of {shares} %"
        )
    return lines


def _speed(link: LinkSpeed) -> str:
    rate = link.bus_bytes_per_s
    carried = f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.1f} MB/s"
    return f"latency {1000 * link.latency_s:.2f} ms (4 KiB), {carried} over each link"


def _seconds(taken: float) -> str:
    return f"{1000 * taken:.1f} ms" if taken < 1 else format_duration(taken)


def _with_detail(check: Check, cluster: Cluster) -> str:
    """Return the title of a passed check, with its main figure."""
    if check.name == "versions":
        told = (facts.python.versions for _, facts in cluster.answered())
        versions = next(filter(None, told), dict[str, str]())
        words = [
            f"{name} {versions[name]}" for name in ("allhands", "mlx", "mlx-lm") if name in versions
        ]
        return f"versions ({', '.join(words)})" if words else "versions"
    if check.name == "ports":
        return f"ports ({counted(len(cluster.reached), 'way')})"
    if check.name in ("model", "data"):
        tree = next(
            (tree for host in cluster.hosts if (tree := host.tree(check.name)) is not None), None
        )
        how = "read and compared" if cluster.hashed and len(cluster.hosts) > 1 else "sizes compared"
        return f"{check.title} ({counted(len(tree.files) if tree else 0, 'file')}, {how})"
    return check.title


def not_asked(cluster: Cluster) -> list[str]:
    """Return the checks that other options would have added."""
    found: list[str] = []
    if cluster.model is None:
        found.append("the model (--model)")
    if cluster.data is None:
        found.append("the data (--data)")
    if cluster.network is None:
        found.append("the network's speed")
    return found


def verdict(findings: Sequence[Finding]) -> str:
    """Return the last line of the output, with the numbers of faults."""
    stops = sum(finding.severity == "stop" for finding in findings)
    warnings = sum(finding.severity == "warn" for finding in findings)
    more = f", {counted(warnings, 'warning')}" if warnings else ""
    if stops:
        return f"{counted(stops, 'thing')} would stop training{more}"
    return f"nothing stops training{more}"


# --- for machines ---------------------------------------------------------------------------------


def as_content(cluster: Cluster, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return plain values: findings, names of the checks that found nothing, and all facts."""
    return {
        "stops": any(finding.severity == "stop" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "well": [check.name for check in well(cluster)],
        **cluster.model_dump(mode="json"),
    }
