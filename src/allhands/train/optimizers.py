"""MLX's optimizers, optionally with float32 copies of half-precision weights, and with weight decay
of matrices alone.

The update of an array depends on that array alone (its shape included), so that arrays may be laid
end to end: see :class:`allhands.kernels.fused.flat_params.FlatParams`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map

from allhands.io.trees import flatten, part_of
from allhands.kernels.fused import kernels

MASTER = "master"  # the name of a float32 copy in an array's state


class Optimizer(optim.Optimizer):
    """The properties of every optimizer here.

    Attributes:
        masters: True if each weight has a float32 copy, which is updated and rounded to the weight:
            in half precision an update smaller than a 256th of a weight would be lost. Set it
            before the first update.
        matrices_only: True if weight decay leaves out arrays of one dimension: norms and biases.
    """

    masters = False
    matrices_only = False
    _show: Callable[[], None] | None = None

    @property
    def state(self) -> Any:
        """Return the state as in MLX, after a postponed update of it."""
        show, self._show = self._show, None
        if show is not None:
            show()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._show = None
        # MLX's own class does this when its property `state` is set.
        self._initialized, self._state = False, state

    @property
    def present_state(self) -> Any:
        """Return :attr:`state` without a postponed update."""
        return self._state

    # Step and learning rate are always up to date, so they need no postponed update.
    @property
    def step(self) -> Any:
        return self._state["step"]

    @property
    def learning_rate(self) -> Any:
        return self._state["learning_rate"]

    @learning_rate.setter
    def learning_rate(self, learning_rate: float | mx.array) -> None:
        self._state["learning_rate"] = mx.array(learning_rate)

    def show_later(self, show: Callable[[], None]) -> None:
        """Postpone ``show`` until :attr:`state` is read: it costs time, and the state is rarely
        read.
        """
        self._show = show

    @contextmanager
    def computing_with(self, state: Any) -> Generator[None]:
        """Use ``state`` as this optimizer's state within the block."""
        kept, show, begun = self._state, self._show, self._initialized
        self.state = state
        try:
            yield
        finally:
            self._state, self._show, self._initialized = kept, show, begun

    def decays(self, weight: mx.array) -> bool:
        """True if ``weight`` has weight decay."""
        return weight.ndim > 1 or not self.matrices_only


class _Exact(Optimizer):
    """Base class in front of MLX's optimizer: compute with the float32 copies, and decay only the
    chosen weights.
    """

    weight_decay: float = 0.0

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        if self.masters:
            state[MASTER] = parameter = parameter.astype(mx.float32)
        self._begin(parameter, state)

    def _begin(self, parameter: mx.array, state: dict[str, Any]) -> None:
        super().init_single(parameter, state)

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]
    ) -> mx.array:
        if MASTER not in state:
            return self._decayed(gradient, parameter, state)
        state[MASTER] = self._decayed(gradient.astype(mx.float32), state[MASTER], state)
        return state[MASTER].astype(parameter.dtype)

    def _decayed(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        if self.decays(parameter):
            return super().apply_single(gradient, parameter, state)
        kept, self.weight_decay = self.weight_decay, 0.0
        try:
            return super().apply_single(gradient, parameter, state)
        finally:
            self.weight_decay = kept


class KernelAdam(_Exact, optim.Adam):
    """Adam whose update of an array is one kernel on an NVIDIA GPU, computed in float32 whatever
    the array's type.
    """

    decay = 0.0  # decoupled weight decay

    def advance(self) -> None:
        """Count the update that is computed next, and set its scheduled values."""
        for name, schedule in self._schedulers.items():
            self.state[name] = schedule(self.step)
        self.state["step"] = self.step + 1

    def apply_where(
        self,
        sums: tuple[mx.array, mx.array, mx.array],
        max_norm: float | None,
        gradients: Any,
        weights: Any,
    ) -> tuple[Any, mx.array]:
        """Update ``weights`` and the state by the mean of ``gradients``.

        If the norm or the loss is not finite, weights and state stay unchanged. If the kernel does
        not fit an array, MLX's own operations compute the same.

        Args:
            sums: three scalars: the sum of the gradients' squares, the loss sum, and the number of
                trained tokens, which is the divisor.
            max_norm: the norm to which the mean gradient is clipped; ``None``: not clipped.
            gradients: tree of summed gradients.

        Returns:
            The new weights, and the norm of the mean gradient before clipping.
        """
        before = tree_map(lambda x: x, self.state)
        self.advance()
        limit = -1.0 if max_norm is None else max_norm
        b1, b2 = self.betas
        options = _told((b1, b2, 1 - b1, 1 - b2, self.eps, self.decay, limit))
        numbers = (*sums, self.learning_rate, self.step)
        scalars, norm, finite = kernels.adam_scalars(
            numbers, options, bias_correction=self.bias_correction
        )
        sides, factor = (scalars[0], scalars[1]), scalars[0, 0]

        def update(gradient: mx.array, weight: mx.array, state: Any) -> mx.array:
            types = {gradient.dtype, weight.dtype, state["m"].dtype}
            scalars = sides[self.decays(weight)]
            if len(types) == 1 and weight.size % kernels.width(weight.dtype) == 0:
                new, state["m"], state["v"] = kernels.adam(
                    gradient, weight, (state["m"], state["v"]), scalars
                )
                return new
            if MASTER in state and gradient.dtype == weight.dtype and weight.size % 4 == 0:
                updated = kernels.adam_master(
                    gradient, state[MASTER], (state["m"], state["v"]), scalars
                )
                new, state[MASTER], state["m"], state["v"] = updated
                return new
            scaled = gradient.astype(mx.float32) * factor
            if MASTER not in state:
                scaled = scaled.astype(gradient.dtype)
            old = dict(state)
            new = self.apply_single(scaled, weight, state)
            for name in old:
                state[name] = mx.where(finite, state[name], old[name])
            return mx.where(finite, new, weight)

        new = tree_map(update, gradients, weights, self.state)
        for name in ("step", *self._schedulers):
            self.state[name] = mx.where(finite, self.state[name], before[name])
        return new, norm


@cache
def _told(options: tuple[float, ...]) -> mx.array:
    """Return ``options`` as an array, made once because the copy to the device takes time."""
    return mx.array(options, dtype=mx.float32)


class KernelAdamW(KernelAdam, optim.AdamW):
    """:class:`KernelAdam` with decoupled weight decay."""

    @property
    def decay(self) -> float:
        return self.weight_decay


class SGD(_Exact, optim.SGD):
    """MLX's SGD."""


class Adafactor(_Exact, optim.Adafactor):
    """MLX's Adafactor."""


class Muon(_Exact, optim.Muon):
    """MLX's Muon."""


class HiddenMuon(_Exact):
    """Muon for the matrices of a model's blocks, AdamW for everything else: embeddings, head,
    norms, biases.

    Muon gives a matrix an update whose singular values are all about one, which does not suit a
    table of embeddings. Its updates are scaled to the size of AdamW's (0.2 root mean square, arXiv
    2502.16982), so that both use the same learning rate and weight decay.
    """

    def __init__(
        self,
        learning_rate: Any,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        """Take the learning rate or its schedule; ``betas`` and ``eps`` are AdamW's, ``ns_steps``
        those of Muon.
        """
        super().__init__()
        self._maybe_schedule("learning_rate", learning_rate)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.ns_steps = ns_steps
        self.betas = betas
        self.eps = eps

    def init(self, parameters: Any) -> None:
        super().init(parameters)
        for name, parameter in flatten(parameters):
            state = part_of(self.state, name)
            if not _hidden(name, parameter) and "m" not in state:
                state["m"] = mx.zeros_like(state["v"])

    def _begin(self, parameter: mx.array, state: dict[str, Any]) -> None:
        state["v"] = mx.zeros_like(parameter)

    def _decayed(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        rate = self.learning_rate.astype(gradient.dtype)
        update = self._adam(gradient, state) if "m" in state else self._muon(gradient, state)
        decay = self.weight_decay if self.decays(parameter) else 0.0
        return parameter * (1 - rate * decay) - rate * update

    def _adam(self, gradient: mx.array, state: dict[str, Any]) -> mx.array:
        (b1, b2), step = self.betas, self.step.astype(mx.float32)
        state["m"] = b1 * state["m"] + (1 - b1) * gradient
        state["v"] = b2 * state["v"] + (1 - b2) * mx.square(gradient)
        first = state["m"] / (1 - b1**step).astype(gradient.dtype)
        second = state["v"] / (1 - b2**step).astype(gradient.dtype)
        return first / (mx.sqrt(second) + self.eps)

    def _muon(self, gradient: mx.array, state: dict[str, Any]) -> mx.array:
        state["v"] = self.momentum * state["v"] + (1 - self.momentum) * gradient
        ahead = (1 - self.momentum) * gradient + self.momentum * state["v"]
        return 0.2 * max(gradient.shape[-2:]) ** 0.5 * orthogonalised(ahead, self.ns_steps)


def _hidden(name: str, parameter: mx.array) -> bool:
    return parameter.ndim > 1 and ".layers." in f".{name}"


def orthogonalised(matrices: mx.array, steps: int = 5) -> mx.array:
    """Return ``matrices``, (..., M, N), with singular values brought near one by Newton and
    Schulz's iteration, each matrix by itself.

    Coefficients of Keller Jordan's Muon (kellerjordan.github.io/posts/muon), whose result has
    singular values between 0.7 and 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.swapaxes(-1, -2) if tall else matrices
    x = x / (mx.sqrt(mx.square(x).sum(axis=(-2, -1), keepdims=True)) + 1e-7)
    for _ in range(steps):
        gram = x @ x.swapaxes(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.swapaxes(-1, -2) if tall else x
