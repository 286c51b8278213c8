"""Several tasks in one group of ranks, because starting a process costs more than training a tiny
model.

Run as a program on every rank (see ``ring_ranks.run_ring``): ``ranked_tasks.py TASKS.json``. The
file holds ``{"tasks": [{"kind": ..., ...}]}``; the kinds are the functions in ``KINDS``. A task
named ``runs`` calls the very function that the command line calls, with the group already joined.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import allhands  # before MLX, for its BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_map
from unpainted import leave_unpainted

from allhands.config.schema import TrainConfig, build_config
from allhands.data.loader import Loader
from allhands.data.order import GlobalOrder
from allhands.distributed.backend import Communicator, connect
from allhands.distributed.mesh import Mesh
from allhands.errors import DistributedError
from allhands.kernels.fused.flat_params import FlatParams
from allhands.model.adapters import make_trainable, trained_weights
from allhands.model.load import load_model
from allhands.objectives.causal_lm import make_loss
from allhands.run.datasets import load_data
from allhands.run.session import RunContext, run_finetune
from allhands.runtime.sizing import Sizing
from allhands.train.step import TrainStep


def finetune(config: TrainConfig, communicator: Communicator | None = None) -> Path:
    """Train as one rank of ``communicator`` (alone without one); the run's directory."""
    if communicator is None:
        return run_finetune(config, RunContext()).adapter_path
    rank, size = communicator.rank, communicator.size
    mesh = Mesh(rank, size, rank, size, tuple(config.given_weights or ()))
    return run_finetune(config, RunContext(mesh=mesh, connect=lambda: communicator)).adapter_path


def _finetune(communicator: Communicator, flags: dict[str, Any]) -> None:
    finetune(build_config(flags), communicator)


class Beside:
    """``communicator``, taken for one whose exchange goes on beside the passes, as NCCL's does."""

    backend = "nccl"

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self.streams: set[str] = set()

    def all_sum(self, array: mx.array) -> mx.array:
        self.streams.add(str(mx.default_stream(mx.cpu)))
        return self._communicator.all_sum(array)

    def all_gather(self, array: mx.array) -> mx.array:
        return self._communicator.all_gather(array)


def _finetune_beside(communicator: Communicator, flags: dict[str, Any], joined: bool) -> None:
    """Trained in lazy graphs, the weights as one array or each by itself."""
    beside = Beside(communicator)
    fits = FlatParams.fits
    if not joined:
        FlatParams.fits = staticmethod(lambda model: False)  # type: ignore[method-assign]
    try:
        finetune(build_config({**flags, "compile": "on"}), beside)
    finally:
        FlatParams.fits = fits  # type: ignore[method-assign]
    # What is agreed on goes where everything else is computed, the gradients do not.
    assert len(beside.streams) == 2, beside.streams


def _finetune_paced(
    communicator: Communicator, flags: dict[str, Any], speeds: list[tuple[int, list[float]]]
) -> None:
    """Trained as if each rank had another speed, in tokens a second, after so many of its steps."""
    taken, steps = TrainStep.pace, 0

    def paced(
        step: TrainStep, num_tokens: int, passes_s: float, update_s: float
    ) -> tuple[float, float, float]:
        nonlocal steps
        steps += 1
        assert (passes_s > 0 and update_s > 0) or step.options.compiled, (
            "the passes and the update are timed"
        )
        now = next(each for since, each in reversed(speeds) if steps > since)
        return taken(step, num_tokens, num_tokens / now[communicator.rank], 0.0)

    TrainStep.pace = paced  # type: ignore[method-assign]
    try:
        finetune(build_config({**flags, "rank_weights": "auto"}), communicator)
    finally:
        TrainStep.pace = taken  # type: ignore[method-assign]


def _mean_of_means(communicator: Communicator, flags: dict[str, Any]) -> None:
    """The same model, data, shares and optimizer, but each rank's *mean* loss, averaged by MLX's
    own function.
    """
    config = build_config(flags)
    loaded = load_model(config.model)
    tokens = load_data(config).train
    assert tokens is not None
    model: Any = loaded.model
    make_trainable(model, config)
    order = GlobalOrder(tokens.work, config.batch_size, config.seed)
    sizing = Sizing(max_tokens=2048)
    loader = Loader(tokens, order, sizing, communicator.rank, (1.0,) * communicator.size)
    optimizer = optim.Adam(config.learning_rate, **config.optimizer_config.get("adam", {}))
    function = nn.value_and_grad(model, make_loss(model, cpu_native=False))
    assert config.iters is not None
    for iteration in range(config.iters):
        grads = tree_map(mx.zeros_like, model.trainable_parameters())
        count = 0
        for batch in loader.load(iteration):
            _, new = function(*map(mx.array, (batch.inputs, batch.positions, batch.targets)))
            grads = tree_map(mx.add, grads, new)
            count += batch.num_targets
        optimizer.update(
            model, nn.average_gradients(tree_map(partial(_divide, max(count, 1)), grads))
        )
        mx.eval(model.parameters(), optimizer.state)
    if communicator.rank == 0:
        directory = Path(config.adapter_path)
        directory.mkdir(parents=True)
        mx.save_safetensors(str(directory / "adapters.safetensors"), trained_weights(model))


def _divide(divisor: int, array: mx.array) -> mx.array:
    return array / divisor


def gradient_case(rank: int, dtype: str, num_tokens: int) -> dict[str, Any]:
    """Gradients of ``rank``, the mean over its tokens; without tokens 0 / 0, as a careless loop has
    it.
    """
    random = np.random.default_rng(rank)
    arrays = {
        "weight": random.normal(size=(5, 3)),
        "bias": random.normal(size=(3,)),
        "empty": np.zeros((0, 2)),
    }
    scale = 1.0 if num_tokens else float("nan")
    return {
        name: mx.array(scale * value, dtype=getattr(mx, dtype)) for name, value in arrays.items()
    }


def _average(
    communicator: Communicator, path: str, num_tokens: list[int], dtype: str, reduction: Any
) -> None:
    count = num_tokens[communicator.rank]
    grads = {"layer": gradient_case(communicator.rank, dtype, count)}
    if reduction == "sum":
        grads = tree_map(lambda g: g * count, grads)
    averaged = allhands.average_gradients(grads, num_tokens=mx.array(count), reduction=reduction)[
        "layer"
    ]
    assert all(averaged[name].dtype == grads["layer"][name].dtype for name in averaged)
    values = {name: np.array(value.astype(mx.float32)) for name, value in averaged.items()}
    np.savez(f"{path}-{communicator.rank}.npz", **values)


def _disagree(communicator: Communicator, path: str, ranks: list[dict[str, Any]]) -> None:
    """Each rank has flags, and a working directory, of its own; what it was told is written down."""
    flags = dict(ranks[communicator.rank])
    os.chdir(flags.pop("cwd"))
    try:
        finetune(build_config(flags), communicator)
        told = "agreed"
    except DistributedError as error:
        told = str(error)
    Path(f"{path}-{communicator.rank}.txt").write_text(told)


KINDS: dict[str, Callable[..., None]] = {
    "finetune": _finetune,
    "finetune_beside": _finetune_beside,
    "finetune_paced": _finetune_paced,
    "mean_of_means": _mean_of_means,
    "average": _average,
    "disagree": _disagree,
}


def main() -> None:
    """Join the ring and do every task in order."""
    leave_unpainted(pytest.MonkeyPatch())
    size = len(json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text()))
    communicator = connect("ring", size, int(os.environ["MLX_RANK"]))
    for task in json.loads(Path(sys.argv[1]).read_text())["tasks"]:
        KINDS[task.pop("kind")](communicator, **task)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
