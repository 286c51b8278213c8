"""Checks of what a computer holds: memory, disks, the model and the data."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch

from allhands.cluster.doctor.facts import Cluster, Disk, HostFacts, HostReport, Tree
from allhands.cluster.doctor.findings import Check, Finding, Severity, listed, on, on_mac
from allhands.io.formatting import format_bytes
from allhands.model.weight_files import LIST_FILE, PATTERN

LEAST_FREE_MEMORY = 2 * 10**9
LEAST_DISK, LITTLE_DISK = 10**8, 2 * 10**9
# LoRA training needs the weights, and as a rule of thumb a third again for activations and optimiser.
WORKING_SHARE = 4 / 3
# Of a Mac's memory the GPU may wire so much unless iogpu.wired_limit_mb says otherwise.
_METAL_SHARE = 0.75
_FETCHED = ("demo",)


def check_memory(cluster: Cluster) -> list[Finding]:
    """The model fits into the memory of each device, and into what is free of it."""
    findings: list[Finding] = []
    for host, facts in cluster.answered():
        weights = _weights(cluster, host)
        total, free, where = device_memory(facts)
        # GPUs of a host get a rank each; a device that ranks share holds a copy for each.
        copies = 1 if any(gpu.kind == "cuda" for gpu in facts.gpus) else host.slots
        needed = weights * copies
        for_ranks = f"{copies} copies of the model" if copies > 1 else "the model"
        if total and needed > total:
            message = f"{for_ranks}, {format_bytes(needed)}, cannot fit into {where} of {format_bytes(total)}"
            findings.append(Finding("memory", (host.name,), "stop", message, _smaller(cluster)))
        elif total and weights and needed * WORKING_SHARE > free:
            message = f"{for_ranks} is {format_bytes(needed)}, but only {format_bytes(free)} of {where} are free"
            findings.append(Finding("memory", (host.name,), "warn", message, on(host, _largest(host))))
        elif facts.memory.total and facts.memory.free < LEAST_FREE_MEMORY:
            message = f"only {format_bytes(facts.memory.free)} of memory are free"
            findings.append(Finding("memory", (host.name,), "warn", message, on(host, _largest(host))))
    return findings


def _weights(cluster: Cluster, host: HostReport) -> int:
    """Bytes of the weights that this host needs: all of the model's, from whoever has it, or those of its stages."""
    own = host.tree("model")
    trees = [tree for each in cluster.hosts if (tree := each.tree("model")) is not None]
    if own is not None and _is_partial(own):
        return _size_of_weights(own)
    whole = max(map(_size_of_weights, trees), default=0)
    # A computer that has all files of a model that is divided has no larger part of it than the others.
    return whole // len(cluster.hosts) if any(map(_is_partial, trees)) else whole


def _size_of_weights(tree: Tree) -> int:
    return sum(file.size for file in tree.files if file.name.endswith(".safetensors"))


def device_memory(facts: HostFacts) -> tuple[int, int, str]:
    """Total and free memory of the device that computes, and its name."""
    if not facts.gpus:
        return facts.memory.total, facts.memory.free, "memory"
    gpu = min(facts.gpus, key=lambda gpu: gpu.memory)
    if gpu.kind == "cuda":
        return gpu.memory, gpu.free, "GPU memory"
    limit = facts.mac.wired_limit_mb if facts.mac and facts.mac.wired_limit_mb else 0
    total = limit * 2**20 or round(gpu.memory * _METAL_SHARE)
    return total, min(total, gpu.free), "memory for the GPU"


def _smaller(cluster: Cluster) -> str:
    model = shlex.quote(cluster.model or "MODEL")
    return f"allhands model get {model} --quantize 4 --out models/smaller"


def _largest(host: HostReport) -> str:
    return "ps -Amo rss,pid,comm | head -n 12" if on_mac(host) else "ps -eo rss,pid,comm --sort=-rss | head -n 12"


def check_disk(cluster: Cluster) -> list[Finding]:
    """There is room, and the right to write, where a run writes."""
    findings: list[Finding] = []
    for host, facts in cluster.answered():
        seen: set[tuple[object, str]] = set()
        for disk in facts.disks:
            finding = _disk_finding(host, disk)
            # Directories on one full disk have one and the same trouble.
            if finding is not None and (key := (disk.device, finding.severity)) not in seen:
                seen.add(key)
                findings.append(finding)
        findings += _room_for_copies(cluster, host)
    return findings


def _disk_finding(host: HostReport, disk: Disk) -> Finding | None:
    place = shlex.quote(disk.place or "/")
    command = on(host, f"df -h {place}; du -xh -d 1 {place} 2>/dev/null | sort -h | tail")
    what = {"temporary": "temporary files", "adapter": "checkpoints", "work": "the working directory"}.get(
        disk.role, disk.role
    )
    if disk.error is not None and disk.role != "work":
        full = disk.total and disk.free < LEAST_DISK
        fix = command if full else on(host, f"ls -ld {place}; id")
        where = f" in {disk.place}" if disk.place else ""
        message = f"nothing can be written{where} ({what}): {disk.error}"
        return Finding("disk", (host.name,), "stop", message, fix)
    if disk.total and disk.free < LITTLE_DISK:
        severity: Severity = "stop" if disk.free < LEAST_DISK else "warn"
        message = f"the disk of {disk.place} ({what}) has {format_bytes(disk.free)} left"
        return Finding("disk", (host.name,), severity, message, command)
    return None


def _room_for_copies(cluster: Cluster, host: HostReport) -> list[Finding]:
    """What is not here yet has to fit."""
    needed = 0
    for role in ("model", "data"):
        own = host.tree(role)
        if own is not None and own.path is None:
            needed += max((tree.size for other in cluster.hosts if (tree := other.tree(role)) is not None), default=0)
    disk = host.disk("work")
    if disk is None or disk.error or not needed or disk.free >= needed:
        return []
    message = f"the model and data need {format_bytes(needed)}, but {disk.place} has {format_bytes(disk.free)}"
    return [Finding("disk", (host.name,), "stop", message, on(host, f"df -h {shlex.quote(disk.place)}"))]


def check_model(cluster: Cluster) -> list[Finding]:
    """Every computer has the same model."""
    findings = _check_trees(cluster, "model", cluster.model)
    told = {name for finding in findings for name in finding.hosts}
    for host, tree in _copies(cluster, "model"):
        if host.name in told or tree.path is None or tree.error is not None:
            continue
        if not any(file.name == "config.json" for file in tree.files):
            message = f"{tree.path} is no model directory: it has no config.json"
            findings.append(Finding("model", (host.name,), "stop", message, _sync(cluster, "model")))
    return findings


def check_data(cluster: Cluster) -> list[Finding]:
    """Every computer has the same data."""
    return _check_trees(cluster, "data", cluster.data)


def _copies(cluster: Cluster, role: str) -> list[tuple[HostReport, Tree]]:
    return [(host, tree) for host in cluster.hosts if (tree := host.tree(role)) is not None]


def _check_trees(cluster: Cluster, role: str, source: str | None) -> list[Finding]:
    copies = _copies(cluster, role)
    there = [(host, tree) for host, tree in copies if tree.path is not None and tree.error is None]
    findings = [
        Finding(role, (host.name,), "stop", f"the {role} cannot be read: {tree.error}", _readable(host, tree))
        for host, tree in copies
        if tree.error is not None
    ]
    absent = [host for host, tree in copies if tree.path is None and tree.error is None]
    if copies and len(absent) == len(copies):
        return [*findings, _nobody_has(cluster, role, source or "", [host.name for host in absent])]
    findings += [_absent(cluster, host, role, source or "") for host in absent]
    return findings + _differences(cluster, role, there)


def _readable(host: HostReport, tree: Tree) -> str:
    return on(host, f"ls -la {shlex.quote(tree.path or tree.source)}")


def _fetched(cluster: Cluster, role: str, source: str) -> bool:
    """Whether training fetches it by itself where it is missing: no computer has it as a directory of that name."""
    if source in _FETCHED:
        return True
    snapshot = f"--{source.replace('/', '--')}"
    paths = [tree.path for _, tree in _copies(cluster, role) if tree.path is not None]
    named = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    return named and all(snapshot in path for path in paths)


def _nobody_has(cluster: Cluster, role: str, source: str, names: Sequence[str]) -> Finding:
    if _fetched(cluster, role, source):
        message = f"no computer has the {role} {source} yet: each would fetch it when training starts"
        fetch = f"allhands model get {shlex.quote(source)} && " if role == "model" else ""
        return Finding(role, tuple(names), "warn", message, fetch + _sync(cluster, role))
    message = f"no computer has the {role} {source}"
    return Finding(role, tuple(names), "stop", message, f"ls -ld {shlex.quote(source)}")


def _absent(cluster: Cluster, host: HostReport, role: str, source: str) -> Finding:
    if _fetched(cluster, role, source):
        message = f"it does not have the {role} {source} yet, and would fetch it when training starts"
        return Finding(role, (host.name,), "warn", message, _sync(cluster, role))
    return Finding(role, (host.name,), "stop", f"it does not have the {role} {source}", _sync(cluster, role))


def _sync(cluster: Cluster, role: str) -> str:
    source = cluster.model if role == "model" else cluster.data
    return f"allhands cluster sync {cluster.option} --{role} {shlex.quote(source or role.upper())}"


def _differences(cluster: Cluster, role: str, there: Sequence[tuple[HostReport, Tree]]) -> list[Finding]:
    """Whose copy is not as most have it, and in which files."""
    if len(there) < 2:
        return []
    contents = [_content(tree) for _, tree in there]
    # A copy of some files proves nothing of the others: together they are one.
    whole = [content for content in contents if LIST_FILE not in content] or [_united(contents)]
    right = max(whole, key=lambda content: sum(not _changes(own, content) for own in contents))
    alike = [host.name for (host, _), own in zip(there, contents, strict=True) if not _changes(own, right)]
    findings: list[Finding] = []
    for (host, tree), own in zip(there, contents, strict=True):
        if changes := _changes(own, right):
            message = f"the {role} {tree.path} is not the one of {listed(alike) or 'the others'}: {'; '.join(changes)}"
            findings.append(Finding(role, (host.name,), "stop", message, _sync(cluster, role) + _stages_of(tree)))
    return findings


_Content = Mapping[str, tuple[int, str]]


def _content(tree: Tree) -> _Content:
    return {file.name: (file.size, file.sha256 or "") for file in tree.files}


def _united(contents: Sequence[_Content]) -> _Content:
    """All files of all copies, each as most have it."""
    found: defaultdict[str, Counter[tuple[int, str]]] = defaultdict(Counter)
    for content in contents:
        for name, value in content.items():
            found[name][value] += 1
    return {name: values.most_common(1)[0][0] for name, values in found.items()}


def _is_partial(tree: Tree) -> bool:
    """Whether it has the weights of some stages alone (``cluster sync --stages``)."""
    return any(file.name == LIST_FILE for file in tree.files)


def _stages_of(tree: Tree) -> str:
    return " --stages" if _is_partial(tree) else ""


def _changes(own: _Content, right: _Content) -> list[str]:
    partial = LIST_FILE in own
    groups = {
        "missing": [name for name in right if name not in own and not (partial and fnmatch(name, PATTERN))],
        "different": [name for name in own if name in right and own[name] != right[name]],
        "only there": [name for name in own if name not in right and name != LIST_FILE],
    }
    return [f"{listed((name or 'the file') for name in names)} {word}" for word, names in groups.items() if names]


CHECKS = (
    Check("memory", "memory", check_memory),
    Check("disk", "disks", check_disk),
    Check("model", "model", check_model, lambda cluster: any(host.tree("model") for host in cluster.hosts)),
    Check("data", "data", check_data, lambda cluster: any(host.tree("data") for host in cluster.hosts)),
)
