"""The measured network, and the time that a step's gradients take on it.

The options of training are not known here, so two ends are reported: LoRA with the default rank on the default layers,
and all weights; both at four bytes a parameter.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from allhands.cluster.doctor.facts import Cluster, LinkSpeed, Network, NetworkFailure
from allhands.cluster.figures import Figures
from allhands.cluster.hosts import Host
from allhands.cluster.probes.trees import located
from allhands.errors import AllhandsError

LORA_RANK, LORA_LAYERS = 8, 16  # the defaults of training
BYTES_A_PARAMETER = 4
_MEASURE_S = 90.0
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# The back-ends of a group that allhands starts on several computers.
_STARTED = ("auto", "ring", "nccl")
Shapes = dict[str, tuple[int, ...]]


def measured(hosts: Sequence[Host], cluster: Cluster, progress: Callable[[str], None]) -> Network:
    """Measure a group on ``hosts``; never raises: a failure is a result like any other."""
    from allhands.cluster.netbench import BenchOptions, measure

    backend = cluster.backend if cluster.backend in _STARTED or len(hosts) == 1 else "auto"
    try:
        found = measure(hosts, backend, BenchOptions(timeout_s=_MEASURE_S, progress=progress))
    except AllhandsError as error:
        names = tuple(host.name for host in hosts)
        return Network(backend=backend, failures=(NetworkFailure(hosts=names, message=error.message, hint=error.hint),))
    exchanges = {
        what: found.seconds_per_step(BYTES_A_PARAMETER * parameters)
        for what, parameters in trained_parameters(cluster).items()
    }
    return Network(
        backend=found.backend,
        whole=_link(found.whole) if found.whole else None,
        links=tuple(map(_link, found.links)),
        slowest=found.slowest_link.hosts if found.slowest_link else (),
        failures=tuple(NetworkFailure.model_validate(vars(failure)) for failure in found.failures),
        seconds={what: taken for what, taken in exchanges.items() if taken is not None},
        speeds=_by_host(hosts, found.whole) if found.whole else {},
    )


def _link(figures: Figures) -> LinkSpeed:
    # The largest arrays tell the speed: smaller ones may fit into buffers on the way.
    speed = figures.bus_bytes_per_s(figures.timings[-1])
    return LinkSpeed(hosts=figures.hosts, latency_s=figures.timings[0].median_s, bus_bytes_per_s=speed)


def _by_host(hosts: Sequence[Host], whole: Figures) -> dict[str, float]:
    """Return the speed of each computer of the group; the ranks are in the order of their computers."""
    slots = {host.name: host.slots for host in hosts}
    names = [name for name in whole.hosts for _ in range(slots.get(name, 1))]
    if len(names) != len(whole.speeds):
        return {}
    return {name: sum(s for own, s in zip(names, whole.speeds, strict=True) if own == name) for name in whole.hosts}


def trained_parameters(cluster: Cluster) -> dict[str, int]:
    """Return the parameters that LoRA and full training train, of the model on this computer; empty if it has none."""
    path = located("model", cluster.model) if cluster.model else None
    for host in cluster.hosts:
        if host.ssh is None and (tree := host.tree("model")) is not None:
            path = tree.path
    shapes = shapes_of(Path(path)) if path else {}
    return {"LoRA": lora_parameters(shapes), "full": full_parameters(shapes)} if shapes else {}


def shapes_of(directory: Path) -> Shapes:
    """Return the shapes of a model's weights, from the heads of its files.

    A packed weight has its unpacked shape; its scales and biases are left out. The result is empty if a file cannot
    be read.
    """
    shapes: Shapes = {}
    packed: set[str] = set()
    try:
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "numpy") as weights:
                for name in weights.keys():  # noqa: SIM118 - it is no mapping
                    array: Any = weights.get_slice(name)
                    shapes[name] = tuple(array.get_shape())
                    packed |= {name} if array.get_dtype() == "U32" else set()
        config = cast("dict[str, Any]", json.loads((directory / "config.json").read_bytes()))
    except (OSError, ValueError, SafetensorError):
        return {}
    settings = cast("dict[str, Any]", config.get("quantization") or config.get("quantization_config") or {})
    for name in packed:
        own = settings.get(name.removesuffix(".weight"))
        bits: int = (own if isinstance(own, dict) else settings).get("bits", settings.get("bits", 4))
        shapes[name] = (*shapes[name][:-1], shapes[name][-1] * 32 // bits)
        for part in ("scales", "biases"):
            shapes.pop(f"{name.removesuffix('weight')}{part}", None)
    return shapes


def lora_parameters(shapes: Shapes, rank: int = LORA_RANK, num_layers: int = LORA_LAYERS) -> int:
    """Count the parameters of adapters on every linear layer of the last blocks; each expert has its own."""
    numbers = {name: int(found.group(1)) for name in shapes if (found := _LAYER.search(name))}
    first = max(numbers.values(), default=0) + 1 - num_layers
    adapted = [shapes[name] for name, number in numbers.items() if number >= first and name.endswith(".weight")]
    return sum(math.prod(s[:-2]) * rank * (s[-1] + s[-2]) for s in adapted if len(s) in (2, 3))


def full_parameters(shapes: Shapes) -> int:
    """Count the parameters of all weights."""
    return sum(map(math.prod, shapes.values()))
