"""The network as training will use it, and how long a step's gradients are under way.

What is trained is not known here, so two ends are told: LoRA with the default rank on the default layers, and all
weights; both at four bytes a parameter.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from allhands.cluster.doctor.facts import Cluster, LinkSpeed, Network, NetworkFailure
from allhands.cluster.figures import Figures
from allhands.cluster.hosts import Host
from allhands.errors import AllhandsError

LORA_RANK, LORA_LAYERS = 8, 16  # the defaults of training
BYTES_A_PARAMETER = 4
_MEASURE_S = 90.0
_MOST_HEADER = 100 << 20
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# What a group that allhands starts on several computers can use.
_STARTED = ("auto", "ring", "nccl")


def measured(hosts: Sequence[Host], cluster: Cluster, progress: Callable[[str], None]) -> Network:
    """Measure a group on ``hosts``; never raises: a failure is part of what is found."""
    from allhands.cluster.netbench import BenchOptions, measure

    def link(figures: Figures) -> LinkSpeed:
        # By the largest arrays: smaller ones may fit into buffers on the way.
        speed = figures.bus_bytes_per_s(figures.timings[-1])
        return LinkSpeed(hosts=figures.hosts, latency_s=figures.timings[0].median_s, bus_bytes_per_s=speed)

    backend = cluster.backend if cluster.backend in _STARTED or len(hosts) == 1 else "auto"
    names = tuple(host.name for host in hosts)
    try:
        found = measure(hosts, backend, BenchOptions(timeout_s=_MEASURE_S, progress=progress))
    except AllhandsError as error:
        return Network(backend=backend, failures=(NetworkFailure(hosts=names, message=error.message, hint=error.hint),))
    seconds = {
        what: taken
        for what, parameters in trained_parameters(cluster).items()
        if (taken := found.seconds_per_step(BYTES_A_PARAMETER * parameters)) is not None
    }
    return Network(
        backend=found.backend,
        whole=link(found.whole) if found.whole else None,
        links=tuple(link(figures) for figures in found.links),
        slowest=found.slowest_link.hosts if found.slowest_link else (),
        failures=tuple(
            NetworkFailure(hosts=failure.hosts, message=failure.message, hint=failure.hint)
            for failure in found.failures
        ),
        seconds=seconds,
        speeds=_by_host(hosts, found.whole) if found.whole else {},
    )


def _by_host(hosts: Sequence[Host], whole: Figures) -> dict[str, float]:
    """The speed of each computer that took part: the ranks are in the order of their computers."""
    slots = {host.name: host.slots for host in hosts}
    names = [name for name in whole.hosts for _ in range(slots.get(name, 1))]
    if len(names) != len(whole.speeds):
        return {}
    return {name: sum(s for own, s in zip(names, whole.speeds, strict=True) if own == name) for name in whole.hosts}


def trained_parameters(cluster: Cluster) -> dict[str, int]:
    """Parameters trained by LoRA and in full, of the model as this computer has it; empty if it has none."""
    here = [host for host in cluster.hosts if host.ssh is None]
    tree = next((tree for host in here if (tree := host.tree("model")) is not None and tree.path), None)
    if tree is None and cluster.model:
        from allhands.cluster.probes.trees import located

        path = located("model", cluster.model)
    else:
        path = tree.path if tree else None
    shapes = shapes_of(Path(path)) if path else {}
    if not shapes:
        return {}
    return {"LoRA": lora_parameters(shapes), "full": full_parameters(shapes)}


Shapes = dict[str, tuple[int, ...]]


def shapes_of(directory: Path) -> Shapes:
    """Shapes of all weights of a model, from the heads of its files; a packed weight has its unpacked shape.

    Scales and biases of packed weights are left out. A file that cannot be read gives an empty result.
    """
    shapes: Shapes = {}
    packed: set[str] = set()
    try:
        for path in sorted(directory.glob("*.safetensors")):
            for name, entry in _header(path).items():
                if name != "__metadata__":
                    shapes[name] = tuple(entry["shape"])
                    packed |= {name} if entry["dtype"] == "U32" else set()
        bits, settings = _bits(directory)
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return {}
    for name in packed:
        own = settings.get(name.removesuffix(".weight"))
        used: int = own.get("bits", bits) if isinstance(own, dict) else bits
        shapes[name] = (*shapes[name][:-1], shapes[name][-1] * 32 // used)
        for part in ("scales", "biases"):
            shapes.pop(f"{name.removesuffix('weight')}{part}", None)
    return shapes


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _MOST_HEADER:
            raise ValueError("the head of the file is too long")
        return cast("dict[str, Any]", json.loads(stream.read(length)))


def _bits(directory: Path) -> tuple[int, dict[str, Any]]:
    """Bits of a packed weight, and settings of single layers."""
    config = cast("dict[str, Any]", json.loads((directory / "config.json").read_bytes()))
    settings = cast("dict[str, Any]", config.get("quantization") or config.get("quantization_config") or {})
    return int(settings.get("bits", 4)), settings


def lora_parameters(shapes: Shapes, rank: int = LORA_RANK, num_layers: int = LORA_LAYERS) -> int:
    """Of adapters on every linear layer, experts included, of the last blocks."""
    numbers = {name: int(found.group(1)) for name in shapes if (found := _LAYER.search(name))}
    first = max(numbers.values(), default=0) + 1 - num_layers
    total = 0
    for name, number in numbers.items():
        shape = shapes[name]
        if number >= first and len(shape) in (2, 3) and name.endswith(".weight"):
            copies = shape[0] if len(shape) == 3 else 1
            total += copies * rank * (shape[-1] + shape[-2])
    return total


def full_parameters(shapes: Shapes) -> int:
    """Of all weights."""
    total = 0
    for shape in shapes.values():
        size = 1
        for length in shape:
            size *= length
        total += size
    return total
