"""One measurement of ``gpu.py`` on MLX: a training step of ours, or that of ``mlx_lm.lora``, on
random tokens.

    python benchmarks/gpu_mlx.py '{"peer": "allhands", "work": {...}, "steps": 20}'

Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from functools import partial
from importlib import import_module
from typing import Any

from allhands.runtime.jit_cache import launch_directly  # allhands before MLX, for its BLAS

# isort: split
import gpu_profile
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from rounds import ROUND, WARM_UP, in_rounds, rounds_of


def build(work: dict[str, Any]) -> Any:
    """The model in the work's ``dtype`` (bfloat16) or 4 bits, with random weights."""
    mx.random.seed(0)
    dtype = getattr(mx, work.get("dtype", "bfloat16"))
    shape = {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        **work["shape"],
    }
    module: Any = import_module(f"mlx_lm.models.{shape['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(shape))
    # A layer at a time, so that the float32 of the whole is never there.
    for module in [*model.layers, model]:
        module.set_dtype(dtype)
        mx.eval(module.parameters())
    if work["bits"]:
        nn.quantize(model, group_size=64, bits=work["bits"])
    model.freeze()
    if work["rank"]:
        linear_to_lora_layers(
            model, work["layers"], {"rank": work["rank"], "scale": 20.0, "dropout": 0.0}
        )
    else:
        model.unfreeze()
    mx.eval(model.parameters())
    return model


def theirs(model: Any, optimizer: optim.Optimizer, ids: mx.array) -> Any:
    """The step of mlx_lm.tuner.trainer.train: its loss, and one compiled function."""
    lengths = mx.array([[0, ids.shape[1] - 1]] * ids.shape[0])

    def loss_of(model: Any, batch: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        logits = model(inputs)
        steps = mx.arange(1, targets.shape[1] + 1)
        mask = mx.logical_and(steps >= lengths[:, 0:1], steps <= lengths[:, 1:])
        ce = nn.losses.cross_entropy(logits, targets) * mask
        ntoks = mask.sum()
        return ce.astype(mx.float32).sum() / ntoks, ntoks

    state = [model.state, optimizer.state, mx.random.state]
    gradient = nn.value_and_grad(model, loss_of)

    @partial(mx.compile, inputs=state, outputs=state)
    def step(batch: mx.array) -> mx.array:
        (loss, _), grads = gradient(model, batch, lengths)
        optimizer.update(model, grads)
        return loss

    def run(_more: bool) -> float:
        loss = step(ids)
        mx.eval(state, loss)
        return float(loss.item())

    return run


def our_step(
    model: Any, length: int, *, compiled: bool, communicator: Any = None, **more: Any
) -> Any:
    """The step of ``allhands train`` with its preparation; ``more`` as its options have it."""
    from allhands.distributed.backend import SingleProcess
    from allhands.kernels.fused.blocks import fuse, keep_dense
    from allhands.kernels.fused.embedding import make_deterministic
    from allhands.runtime.accelerator import detect
    from allhands.train.optimizers import KernelAdamW
    from allhands.train.step import StepOptions, make_step

    accelerator = detect()
    optimizer = KernelAdamW(learning_rate=1e-5)
    make_deterministic(model)
    if accelerator.kind == "cuda":
        fuse(model, length)
        keep_dense(model)
    model.train()
    group = communicator or SingleProcess()
    return make_step(
        model,
        optimizer,
        group,
        StepOptions(cpu_native=accelerator.cpu_native, compiled=compiled, **more),
    )


def micro_batch(values: np.ndarray) -> Any:
    """All places of ``values`` (rows, length + 1) but the last as inputs, all but the first
    trained.
    """
    from allhands.data.loader import MicroBatch

    rows, length = values.shape[0], values.shape[1] - 1
    return MicroBatch(
        inputs=values[:, :-1],
        positions=np.arange(rows * length, dtype=np.int32),
        targets=values[:, 1:].reshape(-1),
        num_tokens=rows * length,
        examples=np.arange(rows, dtype=np.int32),
    )


def ours(model: Any, ids: mx.array, *, compiled: bool) -> Any:
    """One step of allhands after the other on the same tokens."""
    step = our_step(model, ids.shape[1], compiled=compiled)
    batch = micro_batch(np.array(ids, dtype=np.int32))

    def run(more: bool) -> float:
        result = step([batch], upcoming=lambda: [batch] if more else [])
        return result.loss_sum / result.num_targets

    return run


def main() -> None:
    """Measure what the first argument describes."""
    asked = json.loads(sys.argv[1])
    work = asked["work"]
    if asked["peer"] != "mlx_lm":
        launch_directly(os.environ, untouched=True)  # as training does
    model = build(work)
    ids = mx.random.randint(
        0, work["shape"]["vocab_size"], (work["batch"], work["length"] + 1), key=mx.random.key(1)
    )
    mx.eval(ids)
    if asked["peer"] == "mlx_lm":
        run = theirs(model, optim.AdamW(learning_rate=1e-5), ids)
    else:
        run = ours(model, ids, compiled=asked["peer"] == "allhands")
    profiler: Any = None

    def before(number: int) -> None:
        nonlocal profiler
        if number == 1:
            mx.reset_peak_memory()
        if number == len(WARM_UP) and asked.get("profile"):
            profiler = gpu_profile.begin()

    times, losses = in_rounds(run, asked["steps"], before=before)
    if profiler is not None:
        lines = gpu_profile.described(gpu_profile.end(profiler), ROUND * rounds_of(asked["steps"]))
        print("\n".join(lines), file=sys.stderr)
    steady = sorted(times[len(WARM_UP) :])
    tokens = work["batch"] * work["length"]
    result = {
        "tokens_per_s": tokens / statistics.median(steady),
        "step_s": {"median": statistics.median(steady), "best": steady[0], "worst": steady[-1]},
        "repeats": len(steady),
        "peak_bytes": mx.get_peak_memory(),
        "first_step_s": times[0],
        "losses": [losses[0], losses[-1]],
        "trained": sum(v.size for _, v in tree_flatten(model.trainable_parameters())),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
