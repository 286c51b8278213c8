"""Mixtures of experts whose products are computed at once: for training on Linux CPUs.

MLX computes a separate product for each token on a CPU, and keeps every intermediate result for the
backward pass. Here the tokens are sorted by expert, each expert is one product, and only the two
halves of SwiGLU are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear

from allhands.kernels import native_arrays
from allhands.kernels.fastmath import with_vjp
from allhands.kernels.instances import give_form
from allhands.kernels.native_arrays import Array, floats, forward_only, multiply, new, rows
from allhands.kernels.packed import rows_of
from allhands.kernels.selection import BY_RULE, PLAIN, SELECTION, KernelSelection, selection_of


class _Layer:
    """A linear layer of all experts, dense or quantised; a quantised weight is made dense for one
    expert at a time.

    Attributes:
        outputs: number of output features.
        trained: its arrays that need a gradient.
    """

    def __init__(self, layer: Any) -> None:
        self._layer, self.outputs = layer, int(layer.output_dims)
        dense, frozen = isinstance(layer, SwitchLinear), vars(layer)["_no_grad"]
        self._whole = floats(layer.weight) if dense else None
        self.trained: list[mx.array] = [layer.weight] if dense and "weight" not in frozen else []

    def _weight(self, expert: int) -> Array:
        return (
            floats(rows_of(self._layer, expert).dense())
            if self._whole is None
            else self._whole[expert]
        )

    def run(self, x: Array, expert: int, into: Array) -> None:
        """Write ``x @ w.T`` to ``into``, for (n, in) rows and one expert's (out, in) weight."""
        multiply(x, self._weight(expert), right=True, into=into, add=False)

    def back(self, x: Array, cotangent: Array, expert: int, grads: Sequence[Array]) -> Array:
        """Return the gradient in ``x``; write those in ``trained`` to this expert's ``grads``."""
        if grads:
            multiply(cotangent, x, left=True, into=grads[0][expert], add=False)
        return multiply(cotangent, self._weight(expert))


class _AdaptedExperts(_Layer):
    """A linear layer of each expert with a LoRA adapter."""

    def __init__(self, layer: LoRASwitchLinear) -> None:
        super().__init__(layer.linear)
        self._scale, self.trained = float(layer.scale), [layer.lora_a, layer.lora_b]
        self._a, self._b = map(floats, self.trained)

    def run(self, x: Array, expert: int, into: Array) -> None:
        super().run(x, expert, into)
        inner = multiply(x, self._a[expert], right=True)
        multiply(inner, self._b[expert], right=True, into=into, scale=self._scale)

    def back(self, x: Array, cotangent: Array, expert: int, grads: Sequence[Array]) -> Array:
        in_x = super().back(x, cotangent, expert, ())
        towards = multiply(cotangent, self._b[expert], scale=self._scale)
        multiply(towards, self._a[expert], into=in_x)
        multiply(towards, x, left=True, into=grads[0][expert], add=False)
        inner = multiply(x, self._a[expert], right=True)
        multiply(cotangent, inner, left=True, into=grads[1][expert], add=False, scale=self._scale)
        return in_x


def _layer_of(layer: Any) -> _Layer | None:
    """Return the layer in this form; ``None`` if it has none."""
    if "bias" in layer:
        return None
    if type(layer) is SwitchLinear:
        return _Layer(layer) if layer.weight.dtype == mx.float32 else None
    if type(layer) is QuantizedSwitchLinear:
        return _Layer(layer) if layer.mode == "affine" else None
    # With dropout, allhands.model.dropout has put a class of its own there.
    if type(layer) is not LoRASwitchLinear or type(layer.dropout) is not nn.Dropout:
        return None
    if (
        not layer.lora_a.dtype == layer.lora_b.dtype == mx.float32
        or (below := _layer_of(layer.linear)) is None
    ):
        return None
    # Weights that are trained together with an adapter above them have no native form.
    return None if below.trained else _AdaptedExperts(layer)


class NativeExperts(SwitchGLU):
    """A mixture of experts with :func:`experts`."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        layers = [_layer_of(each) for each in (self.gate_proj, self.up_proj, self.down_proj)]
        known = [each for each in layers if each is not None]
        if (
            x.dtype != mx.float32
            or len(known) < len(layers)
            or selection_of(self).select("swiglu", "cpu") == PLAIN
        ):
            return super().__call__(x, indices)
        return experts(x, indices, known, self.gate_proj.num_experts, frozen=forward_only(self))


def substitute(module: Any, selection: KernelSelection = BY_RULE) -> bool:
    """Give a mixture of experts the native form; return true if ``module`` is one."""
    if type(module) is not SwitchGLU or type(module.activation) is not SwiGLU:
        return False
    give_form(module, NativeExperts, **{SELECTION: selection})
    return True


def experts(
    x: mx.array, indices: mx.array, layers: Sequence[_Layer], count: int, *, frozen: bool
) -> mx.array:
    """(..., k, D) outputs of the experts that each token goes to, not yet weighted.

    Args:
        x: (..., D).
        indices: (..., k) experts of each token.
        layers: gate, up and down.
        count: number of experts.
        frozen: true if no gradient is wanted.
    """
    gate, up, down = layers
    chosen = indices.shape[-1]
    numbers = np.asarray(indices).reshape(-1)
    order = np.argsort(numbers, kind="stable")
    ends = np.searchsorted(numbers[order], np.arange(count + 1))
    idle = np.flatnonzero(np.diff(ends) == 0)  # experts that no token goes to
    places = order // chosen
    halves: list[Array] = []  # not MLX arrays: MLX would hold on to their memory

    def parts() -> Iterator[tuple[int, slice]]:
        for expert in range(count):
            if ends[expert] < ends[expert + 1]:
                yield expert, slice(ends[expert], ends[expert + 1])

    def forward(x: mx.array, *_: mx.array) -> mx.array:
        values = rows(x)
        out, room = new(*indices.shape, x.shape[-1])
        lines = room.reshape(-1, x.shape[-1])
        halves[:] = [np.empty((len(order), each.outputs), dtype=np.float32) for each in (gate, up)]
        for expert, part in parts():
            mine = values[places[part]]
            gate.run(mine, expert, halves[0][part])
            up.run(mine, expert, halves[1][part])
            made = np.empty_like(mine)
            down.run(_gated(halves[0][part], halves[1][part]), expert, made)
            lines[order[part]] = made
        if frozen:
            halves.clear()
        return out

    def backward(primals: Any, cotangent: mx.array, _: mx.array) -> tuple[mx.array, ...]:
        given = (
            [primals] if isinstance(primals, mx.array) else primals
        )  # MLX passes one without a list
        values, towards = rows(given[0]), rows(cotangent)
        made = [new(*array.shape) for array in given[1:]]
        wanted = [view for _, view in made]
        for view in wanted:
            view[idle] = 0.0
        first, second = len(gate.trained), len(gate.trained) + len(up.trained)
        each = np.empty_like(towards)
        for expert, part in parts():
            mine, theirs = values[places[part]], towards[order[part]]
            one, other = halves[0][part], halves[1][part]
            inner = down.back(_gated(one, other), theirs, expert, wanted[second:])
            in_one, in_other = np.empty_like(one), np.empty_like(other)
            native_arrays.gate_back(one, other, inner, in_one, in_other)
            in_mine = gate.back(mine, in_one, expert, wanted[:first])
            in_mine += up.back(mine, in_other, expert, wanted[first:second])
            each[order[part]] = in_mine
        in_x, room = new(*given[0].shape)
        np.sum(
            each.reshape(-1, chosen, each.shape[-1]), axis=1, out=room.reshape(-1, each.shape[-1])
        )
        halves.clear()
        return in_x, *(array for array, _ in made)

    if frozen:
        return forward(x)
    return with_vjp(forward, backward)(x, *gate.trained, *up.trained, *down.trained)


def _gated(gate: Array, up: Array) -> Array:
    out = np.empty_like(gate)
    native_arrays.gate(gate, up, out)
    return out
