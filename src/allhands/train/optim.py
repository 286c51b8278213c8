"""Optimizers and learning-rate schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map
from mlx_lm.tuner.utils import build_schedule

from allhands.config import TrainConfig
from allhands.errors import ConfigError
from allhands.model.fused import kernels
from allhands.trees import flatten

Schedule = Callable[[mx.array], mx.array] | float


class KernelAdam(optim.Adam):
    """Adam whose update of an array is one kernel on an NVIDIA GPU, computed in float32 whatever the array's type."""

    _decay = 0.0

    def apply_where(self, finite: mx.array, factor: mx.array, gradients: Any, weights: Any) -> Any:
        """The weights after the update by ``factor`` times ``gradients``, or as they are if not ``finite``.

        The optimizer's state follows. Where the kernel does not fit, MLX's own operations compute the same.
        """
        before = tree_map(lambda x: x, self.state)
        for name, schedule in self._schedulers.items():
            self.state[name] = schedule(self.step)
        self.state["step"] = self.step + 1
        rate = self.learning_rate.astype(mx.float32)
        (b1, b2), step = self.betas, self.step.astype(mx.float32)
        shrunk = 1.0 - rate * self._decay
        root = mx.array(1.0)
        if self.bias_correction:
            rate, root = rate / (1.0 - b1**step), mx.rsqrt(1.0 - b2**step)
        values = [factor, finite, rate, b1, b2, self.eps, shrunk, root, 1 - b1, 1 - b2]
        scalars = mx.stack([mx.array(value).astype(mx.float32) for value in values])

        def update(gradient: mx.array, weight: mx.array, state: Any) -> mx.array:
            types = {gradient.dtype, weight.dtype, state["m"].dtype}
            if len(types) == 1 and weight.size % kernels.width(weight.dtype) == 0:
                new, state["m"], state["v"] = kernels.adam(gradient, weight, (state["m"], state["v"]), scalars)
                return new
            scaled = (gradient.astype(mx.float32) * factor).astype(gradient.dtype)
            old = dict(state)
            new = self.apply_single(scaled, weight, state)
            for name in old:
                state[name] = mx.where(finite, state[name], old[name])
            return mx.where(finite, new, weight)

        new = tree_map(update, gradients, weights, self.state)
        for name in ("step", *self._schedulers):
            self.state[name] = mx.where(finite, self.state[name], before[name])
        return new


class KernelAdamW(KernelAdam, optim.AdamW):
    """:class:`KernelAdam` with decoupled weight decay."""

    @property
    def _decay(self) -> float:
        return self.weight_decay


_CLASSES: dict[str, Callable[..., optim.Optimizer]] = {
    "adam": KernelAdam,
    "adamw": KernelAdamW,
    "muon": optim.Muon,
    "sgd": optim.SGD,
    "adafactor": optim.Adafactor,
}


def make_optimizer(config: TrainConfig, total_updates: int) -> optim.Optimizer:
    """The optimizer that ``config`` names, with its schedule over ``total_updates`` optimizer updates.

    Raises:
        ConfigError: arguments that the optimizer or schedule does not take.
    """
    arguments: dict[str, Any] = dict(config.optimizer_config.get(config.optimizer, {}))
    if config.weight_decay is not None:
        arguments["weight_decay"] = config.weight_decay
    if config.optimizer == "adafactor" and "relative_step" not in arguments:
        # mlx's Adafactor ignores the learning rate otherwise.
        arguments["relative_step"] = False
    try:
        return _CLASSES[config.optimizer](learning_rate=make_schedule(config, total_updates), **arguments)
    except TypeError as error:
        raise ConfigError(
            f"{config.optimizer} does not take these arguments: {error}",
            where="--optimizer-config",
            hint=f"see mlx.optimizers, {config.optimizer}",
        ) from None


def make_schedule(config: TrainConfig, total_updates: int) -> Schedule:
    """Learning rate as a function of the update number (from 0), or a constant.

    Raises:
        ConfigError: a warm-up as long as the training, or arguments that the schedule does not take.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    chosen = config.lr_schedule
    if chosen is not None and chosen.arguments is not None:
        try:
            return build_schedule({**chosen.model_dump(), "warmup": chosen.warmup or warmup})
        except TypeError as error:
            raise ConfigError(
                f"{chosen.name} does not take these arguments: {error}",
                where="--lr-schedule",
                hint=f"see mlx.optimizers.{chosen.name}",
            ) from None
    warmup = warmup or (chosen.warmup if chosen else 0)
    if warmup >= total_updates and warmup:
        raise ConfigError(
            f"the warm-up of {warmup} updates is not shorter than the training of {total_updates}",
            where="--warmup-steps",
            hint="shorten it or train longer",
        )
    main = _named(chosen.name if chosen else "constant", peak, total_updates - warmup)
    if not warmup:
        return main
    start = max(chosen.warmup_init if chosen else 0.0, peak / (warmup + 1))
    rest = main if callable(main) else lambda _: mx.array(peak)
    return optim.join_schedules([optim.linear_schedule(start, peak, warmup), rest], [warmup])


def has_schedule(config: TrainConfig) -> bool:
    """Whether the learning rate follows the number of updates; a constant one may change when a run is resumed."""
    chosen = config.lr_schedule
    named = chosen is not None and (chosen.name != "constant" or chosen.warmup > 0)
    return named or config.warmup_steps > 0


def _named(name: str, peak: float, updates: int) -> Schedule:
    if name == "cosine":
        return optim.cosine_decay(peak, updates)
    if name == "linear":
        return optim.linear_schedule(peak, 0.0, updates)
    return peak


def clip(grads: Any, max_norm: float | None) -> tuple[Any, mx.array]:
    """Scale ``grads`` so that their global norm is at most ``max_norm``; also returns the norm before."""
    norm = mx.sqrt(sum((mx.square(g.astype(mx.float32)).sum() for _, g in flatten(grads)), mx.zeros(())))
    if max_norm is None:
        return grads, norm
    factor = mx.minimum(max_norm / (norm + 1e-6), 1.0)
    return tree_map(lambda g: g * factor.astype(g.dtype), grads), norm
