"""What was chosen for a run and why, in words: ``--log-level verbose``."""

from __future__ import annotations

from typing import Any

from allhands.config.schema import TrainConfig
from allhands.distributed.backend import Communicator
from allhands.distributed.codecs import CODECS
from allhands.distributed.hierarchy import ByComputer
from allhands.distributed.packed import Packing
from allhands.distributed.reduce import bucket_bytes_for
from allhands.kernels.selection import FORMS, QUANTISED
from allhands.model.adapters import trained_weights
from allhands.model.split import split
from allhands.run.kernel_forms import KernelForms
from allhands.runtime.accelerator import Accelerator
from allhands.runtime.blas import preload_blas
from allhands.runtime.sizing import Sizing


def choices(
    config: TrainConfig,
    model: Any,
    accelerator: Accelerator,
    communicator: Communicator,
    sizing: Sizing,
    *,
    compiled: bool,
    divided: bool,
) -> list[str]:
    """One line for each thing that the options leave open, or that follows from the device."""
    found = {
        "device": f"{accelerator.kind} ({accelerator.name}), {accelerator.cores} cores",
        "matrix products": _products(accelerator),
        "backend": _backend(config, communicator),
        "micro-batches": _sizing(config, sizing),
        "step": _step(accelerator, config, compiled),
        "loss": _loss(model),
        "all-reduce": _all_reduce(config, communicator),
        "gradients on the way": _carried(config, communicator, model),
        "optimizer": _optimizer(communicator, divided),
    }
    if config.sync_every > 1:
        # In rounds the changes of weights travel, which are packed as gradients are.
        found["changes on the way"] = found.pop("gradients on the way")
        found["rounds"] = _rounds(config)
    return [f"chosen: {name}: {words}" for name, words in found.items()]


def kernel_choices(kernels: KernelForms, tokens: int, *, quantised: bool) -> list[str]:
    """One line for each operation that can be computed in several forms here: in which, and why.

    Args:
        tokens: of a micro-batch, at most.
        quantised: whether the model has quantised weights.
    """
    names = [name for name in FORMS if kernels.kind in FORMS[name] and (quantised or name not in QUANTISED)]
    told = [(name, *kernels.selection.explain(name, kernels.kind, tokens)) for name in names]
    return [f"chosen: {name}: {form} ({reason})" for name, form, reason in told]


def _optimizer(communicator: Communicator, divided: bool) -> str:
    if divided:
        return f"each rank keeps and updates about 1/{communicator.size} of its state"
    return "on every rank whole" if communicator.size > 1 else "whole"


def _products(accelerator: Accelerator) -> str:
    if accelerator.kind != "cpu":
        return "on the GPU"
    status = preload_blas()
    return f"{status.state} ({status.reason})"


def _all_reduce(config: TrainConfig, communicator: Communicator) -> str:
    told = f"calls of about {bucket_bytes_for(communicator.backend, config.bucket_mb) / 1e6:.0f} MB"
    return f"{told}, {communicator.told}" if isinstance(communicator, ByComputer) else told


def _rounds(config: TrainConfig) -> str:
    told = f"of {config.sync_every} steps, then the mean of the ranks' changes"
    if config.outer_lr != 1.0 or config.outer_momentum:
        told += f" times {config.outer_lr:g}, with momentum {config.outer_momentum:g}"
    if config.sync_fragments > 1:
        told += f"; in {config.sync_fragments} parts, in turn"
    return told + (f"; on their way for {config.sync_delay} steps, which do not wait" if config.sync_delay else "")


def _carried(config: TrainConfig, communicator: Communicator, model: Any) -> str:
    """In which form, and by which way."""
    if communicator.size == 1:
        return "none (one process)"
    if config.compress == "none":
        return "as they are added up"
    codec, arrays = CODECS[config.compress], trained_weights(model).values()
    packing = Packing(communicator, codec)
    packed = [each for each in arrays if packing.packs(each)]
    route = packing.route(max((each.dtype.size for each in packed), default=4))
    more = ", what rounding leaves out is sent with the next ones" if codec.grouped else ""
    return f"{codec.name}, {len(packed)} of {len(arrays)} arrays{more}; {_ROUTES[route]}"


_ROUTES = {
    "gather": "each rank adds up what all have packed",
    "pass": "each rank packs the sum of its part and its neighbour's, and passes it on",
    "sum": "the back-end adds up numbers of two bytes",
}


def _backend(config: TrainConfig, communicator: Communicator) -> str:
    if communicator.size == 1:
        return "none (one process)"
    how = "asked for" if config.backend != "auto" else "best of those here, or the launcher's"
    return f"{communicator.backend}, {communicator.size} ranks ({how})"


def _sizing(config: TrainConfig, sizing: Sizing) -> str:
    how = "asked for" if config.micro_batch_tokens else "by the device"
    lengths = f"lengths rounded up to one of {len(sizing.ladder)}" if sizing.few_shapes else "no rounding of lengths"
    return f"at most {sizing.max_tokens} tokens ({how}), {lengths}"


def _step(accelerator: Accelerator, config: TrainConfig, compiled: bool) -> str:
    if accelerator.runs_natively(config.compile):
        return "eager (best on this processor)"
    return "compiled (lengths are few and each is compiled once)" if compiled else "one lazy graph, not compiled"


def _loss(model: Any) -> str:
    if split(model) is None:
        return "over all logits (this architecture scales, caps or shifts them)"
    return "chunked over the vocabulary, at the trained tokens only"
