"""Dropout by sample: the same features are dropped on any number of ranks, for any division of
batches.

A place of the batch has the name (seed, batch number, example number, position in its window). The
name is hashed to a key of 64 bits, the layer mixes in its own name, and the bits for the features
come from Threefry, MLX's own generator. So a mask does not depend on the rank, on micro-batches, on
padding or on earlier random numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from mlx_lm.tuner.lora import LoRASwitchLinear
from numpy.typing import NDArray

from allhands.data.order import mix
from allhands.errors import ConfigError
from allhands.io.trees import unflatten
from allhands.kernels.instances import give_form

# 16 bits decide about a feature, which costs less than a 32-bit number and errs by 1/131,072 at
# most.
_LEVELS = 1 << 16
# 2**64 divided by the golden ratio, an odd number without pattern: it separates neighbouring
# places.
_STRIDE = np.uint64(0x9E3779B97F4A7C15)


class DropoutKeys:
    """Random keys of the present micro-batch; all dropout layers of a model share one object."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._keys: mx.array | None = None
        self._routed: mx.array | None = None

    def of(self, examples: NDArray[Any], width: int, iteration: int) -> mx.array:
        """Return :meth:`values` as an MLX array."""
        return mx.array(self.values(examples, width, iteration))

    def values(self, examples: NDArray[Any], width: int, iteration: int) -> NDArray[np.uint32]:
        """Return the key of each place of a micro-batch: (B, width, 2).

        Args:
            examples: (B,) number of the window in each row.
            width: padded length of the rows.
            iteration: number of the global batch.
        """
        batch = np.random.SeedSequence([self._seed, iteration]).generate_state(1, np.uint64)
        rows = mix(batch + examples.astype(np.uint64) * _STRIDE)
        places = mix(rows[:, None] + np.arange(1, width + 1, dtype=np.uint64) * _STRIDE)
        return places.astype("<u8").view("<u4").reshape(*places.shape, 2)

    @contextmanager
    def using(self, keys: mx.array) -> Generator[None]:
        """Let the layers draw from ``keys`` in a ``with`` block, in forward and backward pass."""
        before, self._keys = self._keys, keys
        try:
            yield
        finally:
            self._keys = before

    @contextmanager
    def routed(self, indices: mx.array) -> Generator[None]:
        """Let layers in a ``with`` block also take rows sorted by expert; see :func:`_routing`.

        Args:
            indices: (..., E) the chosen experts of each place.
        """
        order = mx.argsort(indices.flatten())
        self._routed = self.present.reshape(-1, 2)[order // indices.shape[-1]]
        try:
            yield
        finally:
            self._routed = None

    @contextmanager
    def at_places(self, places: mx.array, among: mx.array | None = None) -> Generator[None]:
        """Let layers in a ``with`` block take (N, ...) rows that belong to these places.

        Args:
            places: (N,) numbers of places among ``among``.
            among: (M, 2) keys of places; default: those of the batch.
        """
        before = self._keys
        self._keys = (self.present if among is None else among).reshape(-1, 2)[places][:, None]
        try:
            yield
        finally:
            self._keys = before

    def for_input(self, x: mx.array, layer: str) -> tuple[mx.array, tuple[int, ...]]:
        """Return the keys (N, 2) of the places of ``x``, and the shape that broadcasts a mask
        (N, features) over ``x``.

        Raises:
            ConfigError: the axes of ``x`` are not those of the batch.
        """
        keys, rows, axes = self.present, 0, x.shape
        if self._routed is not None and x.ndim == 3:
            keys, rows = self._routed, 1
        elif x.shape[:2] == keys.shape[:2]:
            rows = 2
        elif x.shape[0] == keys.shape[0] * keys.shape[1]:
            rows = 1
        if rows == 0 or x.shape[0] != (len(keys.reshape(-1, 2)) if rows == 1 else len(keys)):
            raise ConfigError(
                f"dropout cannot tell which example is where in {layer}, whose input has the shape {tuple(x.shape)}",
                code="option-unsuited-to-model",
                where="--lora-parameters",
                hint='leave that layer out ("keys"), or set "dropout" to 0',
            )
        if self._routed is not None:
            # Copies of a place, one for each of its experts, lose the same features.
            axes = (*x.shape[:rows], *[1] * (x.ndim - rows - 1), x.shape[-1])
        return keys.reshape(-1, 2), axes

    @property
    def present(self) -> mx.array:
        """Keys of the present micro-batch, (B, T, 2)."""
        assert self._keys is not None, "dropout was asked for outside of a training step"
        return self._keys


class SampleDropout(nn.Module):
    """Replacement of :class:`mlx.nn.Dropout` with the same probability; see the module's text.

    The input's axes after those of the batch are features; each feature is dropped independently.
    Copies of a place, one for each expert, lose the same features. A layer that a model calls twice
    in a pass drops the same features both times.
    """

    def __init__(self, p: float, name: str, keys: DropoutKeys) -> None:
        super().__init__()
        self._kept = min(max(round((1 - p) * _LEVELS), 1), _LEVELS - 1)
        self._name = name
        self._keys = keys
        # A NumPy array, because MLX's would count among the model's parameters.
        digest = hashlib.sha256(name.encode()).digest()
        self._own = np.frombuffer(digest[:8], dtype="<u4")
        self._part = (0, 1)

    @property
    def shared_keys(self) -> DropoutKeys:
        """The keys that all dropout layers of the model share."""
        return self._keys

    def draw_part(self, part: int, count: int) -> None:
        """Drop as part ``part`` of ``count`` equal parts of features that ranks have divided."""
        self._part = part, count

    def _extra_repr(self) -> str:
        return f"p={1 - self._kept / _LEVELS:.4g}"

    def __call__(self, x: mx.array) -> mx.array:
        if not self.training:
            return x
        keys, shape = self._keys.for_input(x, self._name)
        part, count = self._part
        *rows, features = shape
        whole = (*rows, count * features)
        kept = self._mask(keys, math.prod(whole) // len(keys)).reshape(whole)
        if count > 1:
            kept = kept[..., part * features : (part + 1) * features]
        return (kept * x) * (_LEVELS / self._kept)

    def _mask(self, keys: mx.array, features: int) -> mx.array:
        """Return the mask of kept features, (N, features) bool, for (N, 2) keys of the places."""
        pairs = -(-features // 4)
        # "Splitting" a key is MLX's way to its generator's raw bits: (pairs, 2) words, each good
        # for two features.
        words = mx.vmap(lambda key: mx.random.split(key, pairs))(keys ^ mx.array(self._own))
        bits = words.reshape(len(keys), -1).view(mx.uint16)[:, :features]
        return bits < mx.array(self._kept, dtype=mx.uint16)


def install_dropout(model: nn.Module, seed: int) -> DropoutKeys | None:
    """Replace every :class:`mlx.nn.Dropout` that drops features; call it after adapters are made.

    Returns:
        The keys that a training step sets for each micro-batch; ``None`` if nothing is ever
        dropped.
    """
    keys = DropoutKeys(seed)
    modules = list(model.named_modules())
    found = [(name, p) for name, module in modules if (p := _probability(module)) > 0]
    if not found:
        return None
    for name, p in found:
        new = SampleDropout(p, name, keys)
        # New modules begin in training mode, even in a model in evaluation mode; probes of the
        # model must not meet dropout.
        new.train(model.training)
        model.update_modules(unflatten([(name, new)]))
    for _, module in modules:
        if isinstance(module, SwitchGLU | SwitchMLP) and any(
            _drops(child) for child in module.children().values()
        ):
            give_form(module, _routing(type(module), keys))
    return keys


def dropout_keys_of(model: nn.Module) -> DropoutKeys | None:
    """Return the keys that :func:`install_dropout` made; ``None`` if nothing is ever dropped."""
    found = next((module for module in model.modules() if isinstance(module, SampleDropout)), None)
    return None if found is None else found.shared_keys


def _probability(module: nn.Module) -> float:
    """Return the probability that a plain dropout layer drops a feature; 0 for other modules."""
    return 1 - vars(module)["_p_1"] if type(module) is nn.Dropout else 0.0


def _drops(child: Any) -> bool:
    return isinstance(child, LoRASwitchLinear) and isinstance(child.dropout, SampleDropout)


def _routing(base: Any, keys: DropoutKeys) -> Any:
    """Return a subclass of an experts class that tells ``keys`` the order of its sorted rows.

    Rows are sorted by expert, as mlx_lm's ``_gather_sort`` does.
    """

    def call(self: nn.Module, x: mx.array, indices: mx.array) -> Any:
        if not self.training:
            return base.__call__(self, x, indices)
        with keys.routed(indices):
            return base.__call__(self, x, indices)

    return type(base.__name__, (base,), {"__call__": call})
