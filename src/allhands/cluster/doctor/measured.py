"""The measured network, and the time that a step's gradients take on it.

The options of training are not known here, so two extremes are reported: LoRA with the default rank
on the default layers, and all weights; both at four bytes a parameter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from allhands.cluster.doctor.facts import Cluster, LinkSpeed, Network, NetworkFailure
from allhands.cluster.figures import Figures
from allhands.cluster.hosts import Host
from allhands.cluster.netbench import BenchOptions, measure
from allhands.cluster.probes.trees import located
from allhands.errors import AllhandsError
from allhands.run.model_sizes import adapter_weights, all_weights
from allhands.run.training_memory import blocks_of

LORA_RANK, LORA_LAYERS = 8, 16  # the defaults of training
BYTES_A_PARAMETER = 4
_MEASURE_S = 90.0
# The back-ends of a group that allhands starts on several computers.
_STARTED = ("auto", "ring", "nccl")


def measured(hosts: Sequence[Host], cluster: Cluster, progress: Callable[[str], None]) -> Network:
    """Measure a group on ``hosts``; never raises: a failure is a result like any other."""
    backend = cluster.backend if cluster.backend in _STARTED or len(hosts) == 1 else "auto"
    try:
        found = measure(hosts, backend, BenchOptions(timeout_s=_MEASURE_S, progress=progress))
    except AllhandsError as error:
        names = tuple(host.name for host in hosts)
        return Network(
            backend=backend,
            failures=(
                NetworkFailure(
                    hosts=names, message=error.message, hint=error.hint, code=error.code
                ),
            ),
        )
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
    return LinkSpeed(
        hosts=figures.hosts, latency_s=figures.latency_s, bus_bytes_per_s=figures.bus_bytes_per_s()
    )


def _by_host(hosts: Sequence[Host], whole: Figures) -> dict[str, float]:
    """Return the speed of each computer of the group; the ranks are in the order of their
    computers.
    """
    slots = {host.name: host.slots for host in hosts}
    names = [name for name in whole.hosts for _ in range(slots.get(name, 1))]
    if len(names) != len(whole.speeds):
        return {}
    return {
        name: sum(s for own, s in zip(names, whole.speeds, strict=True) if own == name)
        for name in whole.hosts
    }


def trained_parameters(cluster: Cluster) -> dict[str, int]:
    """Return how many parameters of the model on this computer LoRA and full training train; empty
    if not known.
    """
    path = located("model", cluster.model) if cluster.model else None
    for host in cluster.hosts:
        if host.ssh is None and (tree := host.tree("model")) is not None:
            path = tree.path
    if not path:
        return {}
    try:
        config: dict[str, Any] = json.loads((Path(path) / "config.json").read_bytes())
        blocks = blocks_of(config)
    except (OSError, ValueError, AttributeError):
        return {}
    if blocks is None:
        return {}
    layers = min(LORA_LAYERS, blocks.layers)
    whole = all_weights(blocks, tied=bool(config.get("tie_word_embeddings")))
    return {"LoRA": adapter_weights(blocks, layers, LORA_RANK, None), "full": whole}
