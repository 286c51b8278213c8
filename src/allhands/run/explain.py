"""Choices of a run and their reasons, in words, for ``--log-level verbose``."""

from __future__ import annotations

from typing import Any

from allhands.config.schema import TrainConfig
from allhands.distributed.backend import Communicator
from allhands.distributed.codecs import CODECS
from allhands.distributed.hierarchy import ByComputer
from allhands.distributed.packed import Packing
from allhands.distributed.reduce import bucket_bytes_for
from allhands.distributed.shards import Shards
from allhands.io.formatting import counted, format_count
from allhands.io.trees import flatten
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
    strategy: str,
    updates: tuple[int, int],
) -> list[str]:
    """Return a line for each choice that the options leave open, or that follows from the device.

    Args:
        strategy: the strategy's name.
        updates: count of the trained numbers that this rank updates, and of the whole model's.
    """
    status = preload_blas() if accelerator.kind == "cpu" else None
    lengths = (
        f"lengths rounded up to one of {len(sizing.ladder)}"
        if sizing.few_shapes
        else "no rounding of lengths"
    )
    step = (
        "compiled (lengths are few and each is compiled once)"
        if compiled
        else "one lazy graph, not compiled"
    )
    if accelerator.runs_natively(config.compile):
        step = "eager (best on this processor)"
    chunked = "chunked over the vocabulary, at the trained tokens only"
    found = {
        "device": f"{accelerator.kind} ({accelerator.name}), {counted(accelerator.cores, 'core')}",
        "matrix products": f"{status.state} ({status.reason})" if status else "on the GPU",
        "micro-batches": f"at most {sizing.max_tokens} tokens ({_how(config.micro_batch_tokens)}), {lengths}",
        "step": step,
        "loss": chunked
        if split(model)
        else "over all logits (this architecture scales, caps or shifts them)",
    }
    if communicator.size > 1:
        # In rounds the changes of weights are exchanged; they are packed like gradients.
        travels = "changes" if config.sync_every > 1 else "gradients"
        found |= {
            "backend": f"{communicator.backend}, {communicator.size} ranks ({_how(config.backend != 'auto')})",
            _TRAVELS.get(strategy, "all-reduce"): _calls(config, communicator, strategy),
            f"{travels} on the way": _carried(config, communicator, model),
            "optimizer": _updated(*updates, strategy),
        }
    return [f"chosen: {name}: {words}" for name, words in found.items()]


# Arrays that ranks exchange under strategies without an all-reduce of gradients.
_TRAVELS = {"fsdp": "weights and gradients", "pipeline": "hidden states"}
_UPDATES = {
    "zero1": "its part of each large array, and small arrays whole",
    "fsdp": "its part of each array",
    "pipeline": "those of its blocks",
    "tensor": "its part of each matrix of blocks, and all else whole",
    "expert": "its experts, and all else whole",
}


def _calls(config: TrainConfig, communicator: Communicator, strategy: str) -> str:
    """Return the size of one exchange, in words."""
    if strategy in _TRAVELS:
        return {"fsdp": "of one block at a time", "pipeline": "of one micro-batch at a time"}[
            strategy
        ]
    calls = (
        f"calls of about {bucket_bytes_for(communicator.backend, config.bucket_mb) / 1e6:.0f} MB"
    )
    return f"{calls}, {communicator.told}" if isinstance(communicator, ByComputer) else calls


def _updated(own: int, every: int, strategy: str) -> str:
    """Return the part of the trained numbers that this rank's optimizer updates, in words."""
    if own >= every:
        return f"every rank updates all {format_count(every)} trained numbers"
    return f"this rank updates {format_count(own)} of {format_count(every)} trained numbers: {_UPDATES[strategy]}"


def updated_numbers(trained: Any, shards: Shards | None) -> int:
    """Return the count of numbers that this rank updates.

    Args:
        trained: module with this rank's trained arrays or parts of arrays.
        shards: this rank's parts of flat arrays, if only the optimizer is divided.
    """
    if shards is None:
        return sum(array.size for _, array in flatten(trained.trainable_parameters()))
    return shards.num_own


def _how(asked: object) -> str:
    return "asked for" if asked else "by the device, the launcher, or what is here"


def kernel_choices(kernels: KernelForms, tokens: int, *, quantised: bool) -> list[str]:
    """Return a line for each operation that has several forms here: the chosen form and the reason.

    Args:
        tokens: most tokens of a micro-batch.
        quantised: whether the model has quantised weights.
    """
    names = [
        name
        for name in FORMS
        if kernels.kind in FORMS[name] and (quantised or name not in QUANTISED)
    ]
    told = [(name, *kernels.selection.explain(name, kernels.kind, tokens)) for name in names]
    return [f"chosen: {name}: {form} ({reason})" for name, form, reason in told]


def _carried(config: TrainConfig, communicator: Communicator, model: Any) -> str:
    """Return the form in which gradients or changes are sent, and the way, in words."""
    if config.compress == "none":
        return "as they are added up"
    codec, arrays = CODECS[config.compress], trained_weights(model).values()
    packing = Packing(communicator, codec)
    packed = [each for each in arrays if packing.packs(each)]
    route = packing.route(max((each.dtype.size for each in packed), default=4))
    more = ", what rounding leaves out is sent with the next ones" if codec.grouped else ""
    return f"{codec.name}, {len(packed)} of {counted(len(arrays), 'array')}{more}; {_ROUTES[route]}"


_ROUTES = {
    "gather": "each rank adds up what all have packed",
    "pass": "each rank packs the sum of its part and its neighbour's, and passes it on",
    "sum": "the back-end adds up numbers of two bytes",
}
