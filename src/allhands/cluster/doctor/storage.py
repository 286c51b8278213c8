"""Checks of memory, disks, the model and the data."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch

from allhands.cluster.doctor.facts import Cluster, Disk, HostFacts, HostReport, Mac, Tree
from allhands.cluster.doctor.findings import Check, Found, Severity, listed, on, on_mac
from allhands.io.formatting import format_bytes
from allhands.model.weight_files import LIST_FILE, PATTERN
from allhands.runtime.memory import usual_working_set

LEAST_FREE_MEMORY = 2 * 10**9
LEAST_DISK, LITTLE_DISK = 10**8, 2 * 10**9
# LoRA training needs the weights, and as a rule of thumb a third again for activations and
# optimizer.
WORKING_SHARE = 4 / 3


def check_memory(cluster: Cluster) -> Iterator[Found]:
    """Check that the model fits into the memory of each device, and into the free part of it."""
    for host, facts in cluster.answered():
        if found := _memory_fault(cluster, host, facts):
            yield host.name, *found


def _memory_fault(
    cluster: Cluster, host: HostReport, facts: HostFacts
) -> tuple[Severity, str, str] | None:
    total, free, where = device_memory(facts)
    # GPUs of a host get a rank each; a device that ranks share holds a copy for each.
    copies = 1 if any(gpu.kind == "cuda" for gpu in facts.gpus) else host.slots
    needed = _weights(cluster, host) * copies if total else 0
    size = f"{copies} copies of the model" if copies > 1 else "the model"
    if needed > total:
        smaller = f"allhands model get {shlex.quote(cluster.model or 'MODEL')} --quantize 4 --out models/smaller"
        return (
            "stop",
            f"{size}, {format_bytes(needed)}, cannot fit into {where} of {format_bytes(total)}",
            smaller,
        )
    if needed and needed * WORKING_SHARE > free:
        message = (
            f"{size}, {format_bytes(needed)}, may not fit: {format_bytes(free)} of {where} is free"
        )
    elif facts.memory.total and facts.memory.free < LEAST_FREE_MEMORY:
        message = f"only {format_bytes(facts.memory.free)} of memory is free"
    else:
        return None
    largest = "ps -Amo rss,pid,comm" if on_mac(host) else "ps -eo rss,pid,comm --sort=-rss"
    return "warn", message, on(host, f"{largest} | head -n 12")


def _weights(cluster: Cluster, host: HostReport) -> int:
    """Return the bytes of the weights that a host needs: the whole model's, or those of its stages."""
    own = host.tree("model")
    if own is not None and _is_partial(own):
        return own.weights
    trees = [tree for each in cluster.hosts if (tree := each.tree("model")) is not None]
    whole = max((tree.weights for tree in trees), default=0)
    # A computer with all files of a divided model needs no larger part of it than the others.
    return whole // len(cluster.hosts) if any(map(_is_partial, trees)) else whole


def device_memory(facts: HostFacts) -> tuple[int, int, str]:
    """Return total and free memory of the device that computes, and its name."""
    if not facts.gpus:
        return facts.memory.total, facts.memory.free, "memory"
    gpu = min(facts.gpus, key=lambda gpu: gpu.memory)
    if gpu.kind == "cuda":
        return gpu.memory, gpu.free, "GPU memory"
    told = facts.mac or Mac()
    total = told.working_set or (told.wired_limit_mb or 0) * 2**20 or usual_working_set(gpu.memory)
    return total, min(total, gpu.free), "memory for the GPU"


def check_disk(cluster: Cluster) -> Iterator[Found]:
    """Check that the directories that a run writes to have space and can be written."""
    for host, facts in cluster.answered():
        seen: set[tuple[object, str]] = set()
        for disk in facts.disks:
            # Directories on one full disk have the same fault: report it once.
            found = _disk_fault(host, disk)
            if found is not None and (key := (disk.device, found[1])) not in seen:
                seen.add(key)
                yield found
        # The model and data that are not there yet have to fit.
        lacking = [tree.role for tree in host.trees if tree.path is None]
        sizes = [
            max((tree.size for other in cluster.hosts if (tree := other.tree(role))), default=0)
            for role in lacking
        ]
        work = host.disk("work")
        if work is not None and not work.error and work.free < sum(sizes):
            message = f"the model and data need {format_bytes(sum(sizes))}, but {work.place} has {format_bytes(work.free)}"
            yield host.name, "stop", message, on(host, f"df -h {shlex.quote(work.place)}")


def _disk_fault(host: HostReport, disk: Disk) -> Found | None:
    place = shlex.quote(disk.place or "/")
    usage = on(host, f"df -h {place}; du -xh -d 1 {place} 2>/dev/null | sort -h | tail")
    names = {
        "temporary": "temporary files",
        "adapter": "checkpoints",
        "work": "the working directory",
    }
    files = names.get(disk.role, disk.role)
    severity: Severity = "stop" if disk.free < LEAST_DISK else "warn"
    if disk.error is not None and disk.role != "work":
        remedy = usage if disk.total and severity == "stop" else on(host, f"ls -ld {place}; id")
        where = f" in {disk.place}" if disk.place else ""
        return host.name, "stop", f"nothing can be written{where} ({files}): {disk.error}", remedy
    if disk.total and disk.free < LITTLE_DISK:
        return (
            host.name,
            severity,
            f"the disk of {disk.place} ({files}) has {format_bytes(disk.free)} left",
            usage,
        )
    return None


def check_model(cluster: Cluster) -> Iterator[Found]:
    """Check that every computer has the same model."""
    found = list(_check_trees(cluster, "model", cluster.model or ""))
    yield from found
    reported = {
        name for hosts, *_ in found for name in ((hosts,) if isinstance(hosts, str) else hosts)
    }
    for host, tree in _copies(cluster, "model"):
        readable = tree.path is not None and tree.error is None
        if (
            readable
            and host.name not in reported
            and not any(file.name == "config.json" for file in tree.files)
        ):
            message = f"{tree.path} is no model directory: it has no config.json"
            yield host.name, "stop", message, _sync(cluster, "model")


def check_data(cluster: Cluster) -> Iterator[Found]:
    """Check that every computer has the same data."""
    return _check_trees(cluster, "data", cluster.data or "")


def _copies(cluster: Cluster, role: str) -> list[tuple[HostReport, Tree]]:
    return [(host, tree) for host in cluster.hosts if (tree := host.tree(role)) is not None]


def _check_trees(cluster: Cluster, role: str, source: str) -> Iterator[Found]:
    readable: list[tuple[HostReport, Tree]] = []
    for host, tree in _copies(cluster, role):
        if tree.error is not None:
            show = on(host, f"ls -la {shlex.quote(tree.path or tree.source)}")
            yield host.name, "stop", f"the {role} cannot be read: {tree.error}", show
        elif tree.path is not None:
            readable.append((host, tree))
    yield from _absent(cluster, role, source)
    yield from _differences(readable, role, _sync(cluster, role))


def _absent(cluster: Cluster, role: str, source: str) -> Iterator[Found]:
    """Yield the computers without a copy."""
    copies, sync = _copies(cluster, role), _sync(cluster, role)
    fetched = _is_fetched(copies, source)
    severity: Severity = "warn" if fetched else "stop"
    absent = [host.name for host, tree in copies if tree.error is None and tree.path is None]
    if len(absent) < len(copies):
        later = " yet, and would fetch it when training starts" if fetched else ""
        for name in absent:
            yield name, severity, f"it does not have the {role} {source}{later}", sync
        return
    message, remedy = f"no computer has the {role} {source}", f"ls -ld {shlex.quote(source)}"
    if fetched:
        message += " yet: each would fetch it when training starts"
        remedy = f"allhands model get {shlex.quote(source)} && {sync}" if role == "model" else sync
    yield tuple(absent), severity, message, remedy


def _is_fetched(copies: Sequence[tuple[HostReport, Tree]], source: str) -> bool:
    """Tell if training fetches a missing source: the demo, or a repository of the Hub that no
    computer has as a directory of that name.
    """
    snapshot = f"--{source.replace('/', '--')}"
    named = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    return source == "demo" or (
        named and all(snapshot in tree.path for _, tree in copies if tree.path is not None)
    )


def _sync(cluster: Cluster, role: str) -> str:
    source = cluster.model if role == "model" else cluster.data
    return f"allhands cluster sync {cluster.option} --{role} {shlex.quote(source or role.upper())}"


def _differences(
    copies: Sequence[tuple[HostReport, Tree]], role: str, sync: str
) -> Iterator[Found]:
    """Yield the computers whose copy is not the usual one, with the files that differ."""
    contents = [
        {file.name: (file.size, file.sha256 or "") for file in tree.files} for _, tree in copies
    ]
    if len(contents) < 2:
        return
    # A copy of some stages lacks the files of the others: all these copies make a whole one.
    whole = [content for content in contents if LIST_FILE not in content] or [_united(contents)]
    right = max(whole, key=lambda content: sum(not _changes(own, content) for own in contents))
    alike = [
        host.name
        for (host, _), own in zip(copies, contents, strict=True)
        if not _changes(own, right)
    ]
    for (host, tree), own in zip(copies, contents, strict=True):
        if changes := _changes(own, right):
            message = f"the {role} {tree.path} differs from that of {listed(alike) or 'the others'}: {'; '.join(changes)}"
            yield host.name, "stop", message, sync + (" --stages" if _is_partial(tree) else "")


_Content = Mapping[str, tuple[int, str]]


def _united(contents: Sequence[_Content]) -> _Content:
    """Return the files of all copies, each with its most frequent size and hash."""
    found: defaultdict[str, Counter[tuple[int, str]]] = defaultdict(Counter)
    for content in contents:
        for name, value in content.items():
            found[name][value] += 1
    return {name: values.most_common(1)[0][0] for name, values in found.items()}


def _is_partial(tree: Tree) -> bool:
    """Tell if the copy has the weights of some stages alone (``cluster sync --stages``)."""
    return any(file.name == LIST_FILE for file in tree.files)


def _changes(own: _Content, right: _Content) -> list[str]:
    partial = LIST_FILE in own
    groups = {
        "missing": [
            name for name in right if name not in own and not (partial and fnmatch(name, PATTERN))
        ],
        "different": [name for name in own if name in right and own[name] != right[name]],
        "only there": [name for name in own if name not in right and name != LIST_FILE],
    }
    return [
        f"{listed((name or 'the file') for name in names)} {word}"
        for word, names in groups.items()
        if names
    ]


CHECKS = (
    Check("memory", "memory", check_memory),
    Check("disk", "disks", check_disk),
    Check(
        "model",
        "model",
        check_model,
        lambda cluster: bool(_copies(cluster, "model")),
    ),
    Check("data", "data", check_data, lambda cluster: bool(_copies(cluster, "data"))),
)
