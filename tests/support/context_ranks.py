"""A rank that computes its token positions of rows, beside the others, and compares with mlx_lm's
model of one process.

Started once for each rank: back-end, number of ranks, file, architectures. Writes the errors of
each as JSON; instead of an architecture's name, ``memory=T`` measures a row of T tokens, and
``seconds=T`` the time of its attention.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from architectures import architecture
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from allhands.data.loader import MicroBatch
from allhands.data.pieces import Pieces
from allhands.distributed.backend import Communicator, connect
from allhands.kernels.fastmath import use_fast_mlp
from allhands.kernels.native import attention, use_native
from allhands.model.context import check_rows
from allhands.objectives.base import Objective
from allhands.objectives.causal_lm import CAUSAL_LM

WIDTH = 43


def model_of(name: str) -> tuple[Any, int]:
    """A new model of that configuration and the number of its tokens; the same numbers each time."""
    config = architecture(name).config
    mx.random.seed(7)
    module, args = _get_classes(config)
    model: Any = module(args.from_dict(config))
    model.train()
    drawn = [
        (key, 0.1 * mx.random.normal(value.shape) + (value.ndim == 1))
        for key, value in tree_flatten(model.parameters())
        if mx.issubdtype(value.dtype, mx.floating)
    ]
    model.load_weights(drawn, strict=False)
    mx.eval(model.parameters())
    return model, config.get("vocab_size") or config["text_config"]["vocab_size"]


def batch_of(size: int, *, documents: bool) -> MicroBatch:
    """Two rows, the second of which is shorter, that no number of pieces divides."""
    random = np.random.default_rng(0)
    inputs = random.integers(0, min(size, 60), (2, WIDTH)).astype(np.int32)
    positions = np.concatenate([np.arange(WIDTH - 1), WIDTH + np.arange(30)]).astype(np.int32)
    targets = random.integers(0, min(size, 60), len(positions)).astype(np.int32)
    numbers = np.repeat(np.arange(3, dtype=np.int32), [15, 13, 15])[None].repeat(2, axis=0)
    parts = (inputs, positions, targets, WIDTH + 30, np.arange(2, dtype=np.int32))
    return MicroBatch(*parts, documents=numbers if documents else None)


def gradient(
    model: Any, objective: Objective, batch: MicroBatch
) -> tuple[mx.array, dict[str, mx.array]]:
    sums = objective.sums(model, cpu_native=False)
    arrays = map(mx.array, objective.values(batch))
    loss, grads = nn.value_and_grad(model, lambda *arrays: sums(*arrays)[0])(*arrays)
    found = dict(tree_flatten(grads))
    mx.eval(loss, found)
    return loss, found


def apart(one: Mapping[str, mx.array], other: Mapping[str, mx.array]) -> float:
    """The largest relative difference of an array's gradient; what is little beside the others'
    counts less.
    """
    largest = max(mx.linalg.norm(each).item() for each in one.values())
    return max(
        (mx.linalg.norm(array - other[key]) / (mx.linalg.norm(array) + 1e-2 * largest)).item()
        for key, array in one.items()
    )


def rounded(model: Any, batch: MicroBatch) -> dict[str, mx.array]:
    """The gradient where each weight is changed by half a unit of its last place, as rounding may
    change it.
    """
    before = tree_flatten(model.parameters())
    mx.random.seed(11)
    signs = [2.0 * mx.random.bernoulli(0.5, value.shape) - 1.0 for _, value in before]
    changed = [
        (key, value * (1 + 6e-8 * sign) if value.dtype == mx.float32 else value)
        for (key, value), sign in zip(before, signs, strict=True)
    ]
    model.load_weights(changed, strict=False)
    _, found = gradient(model, CAUSAL_LM, batch)
    model.load_weights(before, strict=False)
    return found


def errors(communicator: Communicator, name: str, *, documents: bool) -> dict[str, float]:
    """Relative errors of loss and gradients, and what rounding alone may change: see
    :func:`rounded`.
    """
    model, size = model_of(name)
    check_rows(model)
    batch = batch_of(size, documents=documents)
    loss, whole = gradient(model, CAUSAL_LM, batch)
    noise = apart(whole, rounded(model, batch))
    own_loss, own = gradient(model, CAUSAL_LM.across(communicator), batch)
    summed = {key: communicator.all_sum(array) for key, array in own.items()}
    off = abs(communicator.all_sum(own_loss).item() / loss.item() - 1)
    return {"loss": off, "gradient": apart(whole, summed), "noise": noise}


def memory(communicator: Communicator, width: int) -> dict[str, float]:
    """Bytes that a pass over one row of this width takes at most, beside model and gradients."""
    sizes = {
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "num_attention_heads": 6,
    }
    config = {**architecture("llama").config, **sizes, "num_key_value_heads": 2, "head_dim": 32}
    module, args = _get_classes(config)
    model: Any = module(args.from_dict(config))
    use_fast_mlp(model)
    assert use_native(model) > 0
    objective = CAUSAL_LM.across(communicator)
    compute = objective.cpu_gradient(model)
    assert compute is not None
    row = np.arange(width, dtype=np.int32)
    batch = MicroBatch(row[None] % 200, row, row % 200, width, np.zeros(1, np.int32))
    taken = list[int]()
    for _ in range(2):
        arrays = list(map(mx.array, objective.values(batch)))
        mx.eval(model.parameters(), arrays)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        loss, grads = compute(*arrays)
        mx.eval(loss, grads)
        held = sum(array.nbytes for _, array in tree_flatten(grads))
        taken.append(mx.get_peak_memory() - before - held)
        del loss, grads
    return {"bytes": float(taken[-1])}


def seconds(size: int, width: int) -> dict[str, float]:
    """Processor time of attention for each rank's pieces, which no other process is asked for."""
    random = np.random.default_rng(0)
    q, k = (
        mx.array(random.normal(size=(1, width, heads * 64)).astype(np.float32)) for heads in (4, 2)
    )
    cosines, sines = (np.asarray(turn(mx.random.normal((width, 32)))) for turn in (mx.cos, mx.sin))
    found: dict[str, float] = {}
    for rank in range(size):
        pieces = Pieces(rank, size)
        length, best = pieces.length(width), np.inf
        for _ in range(5):
            begun = time.process_time()
            for number in pieces.numbers:
                first, stop = number * length, (number + 1) * length
                keys, own = k[:, :stop], q[:, first:stop]
                mx.eval(attention(own, keys, keys, (cosines, sines), 0.125, before=first))
            best = min(best, time.process_time() - begun)
        found[str(rank)] = best
    return found


def main() -> None:
    """Join the others and write what was found."""
    backend, size, out, *names = sys.argv[1:]
    rank = int(os.environ.get("MLX_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
    communicator = connect(backend, int(size), rank)
    found: dict[str, Any] = {}
    for name in names:
        what, _, width = name.partition("=")
        if what == "memory":
            found[name] = memory(communicator, int(width))
            continue
        if what == "seconds":
            found[name] = seconds(4, int(width))
            continue
        for documents in (False, True):
            label = name + ", documents" * documents
            try:
                found[label] = errors(communicator, name, documents=documents)
            except (TypeError, ValueError, AttributeError, IndexError) as error:
                found[label] = {"failed": f"{type(error).__name__}: {error}"}
    Path(f"{out}-{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
