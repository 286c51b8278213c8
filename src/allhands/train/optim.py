"""Optimizers and learning-rate schedules by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map
from mlx_lm.tuner.utils import build_schedule

from allhands.config.pretrain_schema import pretraining
from allhands.config.schema import LrSchedule, TrainConfig
from allhands.errors import ConfigError
from allhands.io.formatting import counted
from allhands.io.trees import flatten
from allhands.parallel.norms import squares_of
from allhands.train.optimizers import (
    SGD,
    Adafactor,
    HiddenMuon,
    KernelAdam,
    KernelAdamW,
    Muon,
    Optimizer,
)

Schedule = Callable[[mx.array], mx.array] | float


_CLASSES: dict[str, Callable[..., Optimizer]] = {
    "adam": KernelAdam,
    "adamw": KernelAdamW,
    "muon": Muon,
    "hidden-muon": HiddenMuon,
    "sgd": SGD,
    "adafactor": Adafactor,
}


def make_optimizer(
    config: TrainConfig, total_updates: int, *, half: bool = False
) -> optim.Optimizer:
    """Return the optimizer that ``config`` names, with its schedule over ``total_updates``
    optimizer updates.

    Args:
        half: True if any trained weight is in half precision.

    Raises:
        ConfigError: the optimizer or the schedule does not take its arguments, or the warm-up is
            not shorter than the training.
    """
    arguments: dict[str, Any] = {}
    if pretraining(config) and config.optimizer in ("adam", "adamw"):
        # Usual in pre-training. MLX's default has no bias correction, nor has mlx_lm.
        arguments = {"betas": (0.9, 0.95), "bias_correction": True}
    arguments |= config.optimizer_config.get(config.optimizer, {})
    if config.weight_decay is not None:
        arguments["weight_decay"] = config.weight_decay
    if config.optimizer == "adafactor" and "relative_step" not in arguments:
        # mlx's Adafactor ignores the learning rate otherwise.
        arguments["relative_step"] = False
    # mlx_lm's muon is for all arrays, which is fine where all are matrices, as in adapters.
    kind = "hidden-muon" if config.optimizer == "muon" and pretraining(config) else config.optimizer
    try:
        made = _CLASSES[kind](learning_rate=make_schedule(config, total_updates), **arguments)
        made.masters = half and config.master_weights
        made.matrices_only = config.weight_decay_on == "matrices"
        return made
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{config.optimizer} does not take these arguments: {error}",
            code="optimizer-arguments-invalid",
            where="--optimizer-config",
            hint=f"see mlx.optimizers, {config.optimizer}",
        ) from None


def make_schedule(config: TrainConfig, total_updates: int) -> Schedule:
    """Return the learning rate as a function of the update number (from 0), or a constant.

    Raises:
        ConfigError: the warm-up is not shorter than the training, or the schedule does not take its
            arguments.
    """
    peak, given = config.learning_rate, config.warmup_steps
    automatic = min(total_updates // 20, 1000) if given is None else 0
    chosen = config.lr_schedule or LrSchedule.model_validate({"name": "constant"})
    if chosen.arguments is not None:
        return _given(chosen, chosen.warmup or given or automatic, total_updates)
    warmup = given or chosen.warmup or automatic
    if warmup >= total_updates and warmup:
        raise ConfigError(
            f"the warm-up of {counted(warmup, 'update')} is not shorter than the training of {total_updates}",
            code="warmup-too-long",
            where="--warmup-steps",
            hint="shorten it or train longer",
        )
    main = _named(chosen.name, peak, total_updates - warmup)
    if not warmup:
        return main
    start = max(chosen.warmup_init, peak / (warmup + 1))
    rest = main if callable(main) else lambda _: mx.array(peak)
    return optim.join_schedules([optim.linear_schedule(start, peak, warmup), rest], [warmup])


def _given(chosen: LrSchedule, warmup: int, total_updates: int) -> Schedule:
    """Return MLX's schedule with its own arguments, checked at its beginning, middle and end.

    Raises:
        ConfigError: the schedule does not take them, or gives a negative or infinite rate.
    """
    where, hint = "--lr-schedule", f"see mlx.optimizers.{chosen.name}"
    try:
        made = build_schedule({**chosen.model_dump(), "warmup": warmup})
        rates = {
            at: float(made(mx.array(at)))
            for at in (0, warmup, total_updates // 2, max(total_updates - 1, 0))
        }
    except (TypeError, ValueError, ArithmeticError) as error:
        message = f"{chosen.name} does not take the arguments {chosen.arguments}: {error}"
        raise ConfigError(
            message, code="schedule-arguments-invalid", where=where, hint=hint
        ) from None
    for at, rate in rates.items():
        if not (math.isfinite(rate) and rate >= 0):
            message = f"{chosen.name} with the arguments {chosen.arguments} gives update {at} a rate of {rate:g}"
            raise ConfigError(message, code="schedule-arguments-invalid", where=where, hint=hint)
    return made


def num_batches(config: TrainConfig, batches_per_epoch: int) -> int:
    """Return the number of batches of the whole training.

    Raises:
        ConfigError: the learning rate's schedule does not fit into them, or the optimizer cannot be
            made.
    """
    total = config.batches(batches_per_epoch)
    make_optimizer(config, math.ceil(total / config.grad_accumulation_steps))
    return total


def has_schedule(config: TrainConfig) -> bool:
    """True if the learning rate follows the number of updates; a constant one may change when a run
    is resumed.
    """
    chosen = config.lr_schedule
    named = chosen is not None and (chosen.name != "constant" or chosen.warmup > 0)
    given = config.warmup_steps
    return named or given is None or given > 0


def _named(name: str, peak: float, updates: int) -> Schedule:
    if name == "cosine":
        return optim.cosine_decay(peak, updates)
    if name == "linear":
        return optim.linear_schedule(peak, 0.0, updates)
    return peak


def clip(grads: Any, max_norm: float | None, norm: mx.array | None = None) -> tuple[Any, mx.array]:
    """Scale ``grads`` so that their global norm is at most ``max_norm``.

    Args:
        max_norm: ``None``: the gradients are not scaled.
        norm: the global norm, if ``grads`` are only a part of all gradients.

    Returns:
        The scaled gradients, and the global norm before scaling.
    """
    if norm is None:
        norm = mx.sqrt(sum((squares_of(g) for _, g in flatten(grads)), mx.zeros(())))
    if max_norm is None:
        return grads, norm
    factor = mx.minimum(max_norm / (norm + 1e-6), 1.0)
    return tree_map(lambda g: g * factor.astype(g.dtype), grads), norm
