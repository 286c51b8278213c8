"""Linear layers for training on a GPU: quantised ones multiplied densely, adapters in the compute
type, several as one.

MLX multiplies by quantised weights at a sixth of the dense rate when there are many tokens, and
computes LoRA in the float32 of its weights. Here the dense weight is made at each use and never
kept, adapters are computed in the type of their input with their float32 weights as masters, and
layers that share an input are one product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear

from allhands.kernels.fastmath import with_vjp
from allhands.kernels.fused import kernels, ops
from allhands.kernels.fused.again import again_of, for_backward, other_weight, quantised_product
from allhands.kernels.instances import give_form
from allhands.kernels.selection import (
    BY_RULE,
    DENSE_FROM_TOKENS,
    PLAIN,
    SELECTION,
    KernelSelection,
    selection_of,
)

# Makes a dense weight, after the array that it is given has been computed.
Dense = Callable[[mx.array], mx.array]


class DenseQuantizedLinear(nn.QuantizedLinear):
    """A frozen quantised layer that multiplies by its dequantised weight when there are many
    tokens.
    """

    def __call__(self, x: mx.array) -> mx.array:
        selection, again = selection_of(self), again_of(self)
        if x.dtype != self.scales.dtype or not makes_dense(x, selection):
            if again is self:
                return super().__call__(x)
            y = quantised_product([self], [again])(x)
        else:
            back = for_backward(self)
            y = ops.product_with(
                lambda after: dequantized(self, selection, after),
                lambda after: dequantized(back, selection, after),
            )(x)
        return y + self.bias if "bias" in self else y


def makes_dense(x: mx.array, selection: KernelSelection, *, least: int = 0) -> bool:
    """True if a quantised weight is made dense before ``x`` is multiplied by it.

    Args:
        least: number of tokens to decide for if there are fewer.
    """
    kind = "metal" if mx.metal.is_available() else "cuda"
    tokens = max(least, x.size // x.shape[-1])
    return selection.select("quantized_linear", kind, tokens) == "dense"


def use_dense(model: nn.Module, selection: KernelSelection = BY_RULE) -> int:
    """Let the frozen quantised layers of ``model`` choose between MLX's product and the dense one;
    return their number.

    :func:`allhands.kernels.fused.blocks.fuse` does so, too. It works on every device: without a
    kernel, MLX's own operations make the weight dense.
    """
    found = [module for module in model.modules() if type(module) is nn.QuantizedLinear]
    for module in found:
        give_form(module, DenseQuantizedLinear, **{SELECTION: selection})
    return len(found)


def dequantized(
    layer: Any, selection: KernelSelection = BY_RULE, after: mx.array | None = None
) -> mx.array:
    """Return the dense weight of a quantised linear or embedding module.

    Args:
        after: array to compute before the weight. Without it MLX makes the weights of all layers
            first, and all are in memory at once (with MLX_BFS_MAX_WIDTH=1, operations without
            inputs come first).
    """
    words: mx.array = layer.weight if after is None else mx.depends(layer.weight, after)
    biases: mx.array | None = layer.get("biases")
    fits = layer.mode == "affine" and layer.bits == 4 and layer.scales.dtype != mx.float32
    if (
        fits
        and biases is not None
        and kernels.available()
        and selection.select("dequantize", "cuda") != PLAIN
    ):
        return kernels.dequantize(words, layer.scales, biases, layer.group_size)
    return dequantized_by_mlx(layer, words)


def dequantized_by_mlx(layer: Any, words: mx.array | None = None) -> mx.array:
    """Unpack a layer by MLX's own operation, in the type of its scales; ``words`` replace its
    packed weight.
    """
    how: dict[str, Any] = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    return mx.dequantize(
        layer.weight if words is None else words, layer.scales, layer.get("biases"), **how
    )


class TrainedLinear(nn.Linear):
    """A trained dense layer, with :func:`ops.trained_product`."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.dtype != self.weight.dtype:
            return super().__call__(x)
        y = ops.trained_product(
            x.reshape(-1, x.shape[-1]), self.weight, other_weight(self)
        ).reshape(*x.shape[:-1], -1)
        return y + self.bias if "bias" in self else y

    def of_swiglu(self, x: mx.array) -> mx.array:
        """Return this layer's output for ``ops.swiglu(x)``, which is not kept for the backward
        pass: (N, 2 F) -> (N, M).
        """
        selection = selection_of(self)
        if "bias" in self or x.dtype != self.weight.dtype or not ops.fuses_swiglu(x, selection):
            return self(ops.swiglu(x, selection))
        return ops.swiglu_product(x, self.weight, other_weight(self))


class TypedLoRALinear(LoRALinear):
    """A LoRA layer that is computed in the type of its input; its own weights stay float32."""

    def __call__(self, x: mx.array) -> mx.array:
        rows = x.reshape(-1, x.shape[-1])
        if drops(self):
            return self.linear(x) + _update(self, self.dropout(x))
        return self.product(rows).reshape(*x.shape[:-1], -1)

    def prepare(self) -> None:
        """Make the product, once this class has been given to a layer."""
        self.product = Product([self], selection_of(self))


def _update(layer: Any, x: mx.array) -> mx.array:
    return (x @ layer.lora_a.astype(x.dtype)) @ (layer.scale * layer.lora_b).astype(x.dtype)


def drops(layer: Any) -> bool:
    """Return true if ``layer`` drops some of its input now."""
    return layer.training and _may_drop(layer)


def _may_drop(layer: Any) -> bool:
    return isinstance(layer, LoRALinear) and type(layer.dropout) is not nn.Dropout


def base_of(layer: Any) -> Any:
    """Return the layer below an adapter, or the layer itself."""
    return layer.linear if isinstance(layer, LoRALinear) else layer


def _is_trained(base: Any) -> bool:
    return "weight" in base.trainable_parameters()


class Product:
    """Layers of one input as one product: (N, K) -> (N, sum of their outputs).

    Their adapters are one as well: the first factors side by side, the second ones along a
    diagonal.
    """

    def __init__(
        self, layers: Sequence[Any], selection: KernelSelection, frozen: Any = None
    ) -> None:
        """Join ``layers``; ``frozen`` holds their joined weights, as :func:`_join` makes them.

        Without it several frozen layers are multiplied one by one, or their dense weights are
        concatenated.
        """
        self.layers = list(layers)
        self._selection = selection
        self._frozen = frozen
        self._given: tuple[mx.array, ...] | None = None
        self._given_again: mx.array | None = None
        self._kept: mx.array | None = None

    def keep_dense(self, most_bytes: int) -> int:
        """Make the dense weight once, for good, if a step would make it twice; return its bytes.

        A step does so in an adapted quantised product, because the backward pass needs it again.
        The result is 0 for other products, and if the weight takes more than ``most_bytes``.
        """
        weight = self._weight
        if len(self._weights) > 1:
            return 0
        # With dropout, layers compute one by one.
        if not (self.adapted and isinstance(weight, nn.QuantizedLinear)) or any(
            map(_may_drop, self.layers)
        ):
            return 0
        rows, words = weight.weight.shape
        columns, dtype = words * 32 // weight.bits, weight.scales.dtype
        size = rows * columns * dtype.size
        # One row is enough to ask with.
        if size > most_bytes or not self._is_dense(mx.zeros((1, columns), dtype=dtype)):
            return 0
        self._kept = dequantized(weight, self._selection)
        mx.eval(self._kept)
        return size

    @property
    def kept_bytes(self) -> int:
        """The bytes of the dense weight that is kept."""
        return 0 if self._kept is None else self._kept.nbytes

    def give(
        self, arrays: mx.array | tuple[mx.array, ...] | None, again: mx.array | None = None
    ) -> None:
        """Compute with ``arrays`` instead of the layers' own: the joined weight, or (K, R) and
        (R, N) factors; ``None``: with their own.

        ``again``: the joined weight for the backward pass, if that has another one; see
        :func:`again_of`.
        """
        self._given = (arrays,) if isinstance(arrays, mx.array) else arrays
        self._given_again = again

    @property
    def is_given(self) -> bool:
        """True while it computes with other arrays than those of its layers: see :meth:`give`."""
        return self._given is not None

    @property
    def widths(self) -> list[int]:
        """Outputs of each layer."""
        return [base_of(layer).weight.shape[0] for layer in self.layers]

    @property
    def adapted(self) -> bool:
        """True if a layer has an adapter."""
        return any(isinstance(layer, LoRALinear) for layer in self.layers)

    @property
    def dtype(self) -> mx.Dtype:
        """The type that the frozen weights compute in."""
        base = base_of(self.layers[0])
        return base.scales.dtype if isinstance(base, nn.QuantizedLinear) else base.weight.dtype

    def __call__(self, x: mx.array) -> mx.array:
        bases = [base_of(layer) for layer in self.layers]
        if any(map(_is_trained, bases)):
            weight = self._given[0] if self._given else _together([base.weight for base in bases])
            y = ops.trained_product(x, weight, self._again(bases))
        elif self.adapted:
            a, b = self._factors(x.dtype)
            y = (
                _adapted(x, self._dense(), a, b)
                if self._is_dense(x)
                else self._quantised(x) + (x @ a) @ b
            )
        else:
            y = ops.product_with(*self._dense())(x) if self._is_dense(x) else self._quantised(x)
        return _with_biases(y, bases)

    def _again(self, bases: Sequence[Any]) -> mx.array | None:
        """The joined trained weights for the backward pass, if that has other ones."""
        if self._given is None and any(again_of(base) is not base for base in bases):
            return _together([again_of(base).weight for base in bases])
        return self._given_again

    def adapted_mlp(self, x: mx.array, down: Product) -> mx.array | None:
        """Compute gate and up by this product, then SwiGLU and ``down``, all adapted; ``None`` if
        there is no such form.

        SwiGLU and the products of the adapters' factors are not kept. Two of these products are
        never in memory, because kernels compute them on the way.
        """
        layers = [*self.layers, *down.layers]
        if not all(isinstance(layer, LoRALinear) for layer in layers):
            return None
        ranks = [layer.lora_a.shape[1] for layer in layers]
        features = sum(self.widths)
        # Only to ask with: it is not computed.
        wide = mx.zeros((x.shape[0], features), dtype=x.dtype)
        fits = (
            kernels.available()
            and ops.fuses_swiglu(wide, self._selection)
            and kernels.fits_adapted(features // 2, x.dtype, ranks)
            and all(_is_plain(base_of(layer)) for layer in layers)
            and self._is_dense(x)
            and down._is_dense(wide[:, : features // 2])
        )
        if not fits:
            return None
        factors = self._factors(x.dtype) + down._factors(x.dtype)
        return _adapted_mlp(x, self._dense(), down._dense(), (ranks[0], ranks[1]), *factors)

    def of_swiglu(self, x: mx.array) -> mx.array:
        """Return an adapted layer's product with ``ops.swiglu(x)``, which is not kept: (N, 2 F) ->
        (N, M).
        """
        fits = _is_plain(base_of(self.layers[0])) and ops.fuses_swiglu(x, self._selection)
        if not (fits and self._is_dense(x[:, : x.shape[1] // 2])):
            return self(ops.swiglu(x, self._selection))
        a, b = self._factors(x.dtype)
        return _adapted(x, self._dense(), a, b, of_swiglu=True)

    @property
    def _weights(self) -> list[Any]:
        """The layers that hold the frozen weights."""
        return (
            [self._frozen]
            if self._frozen is not None
            else [base_of(layer) for layer in self.layers]
        )

    @property
    def _weight(self) -> Any:
        """The first of them; all are alike."""
        return self._weights[0]

    def _is_dense(self, x: mx.array) -> bool:
        """Return true to multiply by a dense weight, unpacked if needed; by rule even for few
        tokens.
        """
        is_quantised = isinstance(self._weight, nn.QuantizedLinear)
        return not is_quantised or makes_dense(x, self._selection, least=DENSE_FROM_TOKENS)

    def _quantised(self, x: mx.array) -> mx.array:
        weights = self._weights
        return quantised_product(weights, [again_of(each) for each in weights])(x)

    def _dense(self) -> tuple[Dense, Dense]:
        """Return functions that make the dense weight, for the forward and the backward pass."""
        if (kept := self._kept) is not None:
            return (lambda _: kept), (lambda _: kept)
        return self._dense_of(self._weights), self._dense_of(
            [for_backward(each) for each in self._weights]
        )

    def _dense_of(self, weights: Sequence[Any]) -> Dense:
        if isinstance(self._weight, nn.QuantizedLinear):
            return lambda after: _together(
                [dequantized(each, self._selection, after) for each in weights]
            )
        return lambda _: _together([each.weight for each in weights])

    def _factors(self, dtype: mx.Dtype) -> tuple[mx.array, ...]:
        """Join all adapters' factors to those of one adapter, (K, R) and (R, N)."""
        factors = self._given or _factors(self.layers, self.widths)
        return tuple(factor.astype(dtype) for factor in factors)


def products_of(modules: Iterable[Any]) -> list[Product]:
    """Return all products of linear layers: groups, and adapted layers that are in none."""
    modules = list(modules)
    groups = [module._group.product for module in modules if hasattr(module, "_group")]
    grouped = {id(layer) for product in groups for layer in product.layers}
    alone = [m.product for m in modules if isinstance(m, TypedLoRALinear) and id(m) not in grouped]
    return groups + alone


def _is_plain(base: Any) -> bool:
    """True for a frozen layer without a bias."""
    return "bias" not in base and not _is_trained(base)


def _with_biases(y: mx.array, bases: Sequence[Any]) -> mx.array:
    if not any("bias" in base for base in bases):
        return y
    return y + _together(
        [base.get("bias", mx.zeros(base.weight.shape[0], dtype=y.dtype)) for base in bases]
    )


def _together(arrays: Sequence[mx.array]) -> mx.array:
    return mx.concatenate(list(arrays)) if len(arrays) > 1 else arrays[0]


def _factors(layers: Sequence[Any], widths: Sequence[int]) -> tuple[mx.array, mx.array]:
    """Join all adapters' factors to those of one adapter, (K, R) and (R, N)."""
    adapters = [layer if isinstance(layer, LoRALinear) else None for layer in layers]
    first = [adapter.lora_a for adapter in adapters if adapter is not None]
    second: list[mx.array] = []
    at = 0
    for adapter, width in zip(adapters, widths, strict=True):
        if adapter is not None:
            second.append(
                mx.pad(adapter.scale * adapter.lora_b, [(0, 0), (at, sum(widths) - at - width)])
            )
        at += width
    a = mx.concatenate(first, axis=1) if len(first) > 1 else first[0]
    return a, _together(second)


def _adapted(
    x: mx.array, dense: tuple[Dense, Dense], a: mx.array, b: mx.array, *, of_swiglu: bool = False
) -> mx.array:
    """``x @ (dense(x).T + a @ b)``, with gradients in ``x``, ``a`` and ``b``; ``dense`` comes from
    :class:`Product`.

    With ``of_swiglu``, ``swiglu(x)`` replaces ``x``; the backward pass computes it again instead of
    keeping it.
    """

    def forward(x: mx.array, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        y = kernels.swiglu(x) if of_swiglu else x
        inner = y @ a
        # The small product comes first: the large one then adds it as it ends, without a further
        # pass.
        return mx.addmm(inner @ b, y, dense[0](y).T), inner

    def backward(
        primals: Any, cotangents: Any, outputs: Any
    ) -> tuple[mx.array, mx.array, mx.array]:
        (x, a, b), cotangent = primals, cotangents[0]
        inner = cotangent @ b.T
        dy = mx.addmm(inner @ a.T, cotangent, dense[1](cotangent))
        dx, y = kernels.swiglu_vjp(x, dy, again=True) if of_swiglu else (dy, x)
        return dx, y.T @ inner, outputs[1].T @ cotangent

    return with_vjp(forward, backward)(x, a, b)[0]


def _adapted_mlp(
    x: mx.array,
    dense: tuple[Dense, Dense],
    dense_down: tuple[Dense, Dense],
    ranks: tuple[int, int],
    *factors: mx.array,
) -> mx.array:
    """``z @ (W2.T + a2 @ b2)`` for ``z = swiglu(x @ (W1.T + a1 @ b1))``; factors a1, b1, a2, b2."""

    def forward(
        x: mx.array, a: mx.array, b: mx.array, a_down: mx.array, b_down: mx.array
    ) -> tuple[mx.array, ...]:
        inner = x @ a
        wide = x @ dense[0](x).T
        y = kernels.swiglu_adapted(wide, inner, b, ranks)
        inner_down = y @ a_down
        return mx.addmm(inner_down @ b_down, y, dense_down[0](y).T), wide, inner, inner_down

    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        (x, a, b, a_down, b_down), (_, wide, inner, inner_down), cotangent = (
            primals,
            outputs,
            cotangents[0],
        )
        back_down = cotangent @ b_down.T
        of_y = cotangent @ dense_down[1](cotangent)
        dwide, y = kernels.swiglu_adapted_vjp(wide, inner, b, ranks, of_y, back_down, a_down)
        back = dwide @ b.T
        dx = mx.addmm(back @ a.T, dwide, dense[1](dwide))
        return dx, x.T @ back, inner.T @ dwide, y.T @ back_down, inner_down.T @ cotangent

    return with_vjp(forward, backward)(x, *factors)[0]


class Group:
    """Layers of one input that are computed as one; see :class:`Product`."""

    def __init__(
        self, layers: Sequence[Any], selection: KernelSelection, *, joins: bool = True
    ) -> None:
        """Join the weights of ``layers`` if they are frozen; each layer's own become views of them.

        ``joins``: False to leave each layer's own as they are, because others take their place from
        time to time.
        """
        self.product = Product(
            layers, selection, _join([base_of(layer) for layer in layers]) if joins else None
        )

    @staticmethod
    def fits(layers: Sequence[Any]) -> bool:
        """Return true if ``layers`` can be one: of one kind, and all trained or all frozen."""
        bases = [base_of(layer) for layer in layers]
        kinds = {type(base) for base in bases}
        if not all(
            type(layer) in (TypedLoRALinear, type(base))
            for layer, base in zip(layers, bases, strict=True)
        ):
            return False
        if kinds == {DenseQuantizedLinear}:
            forms = {(base.bits, base.group_size, base.mode, base.scales.dtype) for base in bases}
            return len(forms) == 1 and bases[0].mode == "affine"
        trained = set(map(_is_trained, bases))
        return (
            kinds <= {nn.Linear, TrainedLinear}
            and len(trained) == 1
            and len({b.weight.dtype for b in bases}) == 1
        )

    @property
    def usable(self) -> bool:
        """True if no layer drops anything now: dropout is each layer's own."""
        return not any(drops(layer) for layer in self.product.layers)

    def require_own_arrays(self) -> None:
        """Check that the group was given no arrays, before layers compute one by one."""
        assert not self.product.is_given, "layers would compute with other arrays than their group"

    def __call__(self, x: mx.array) -> mx.array:
        return self.product(x)


def _join(bases: Sequence[Any]) -> Any:
    """Return a layer with the concatenated weights of frozen ``bases``, whose own become views;
    ``None`` if any is trained.
    """
    if any(map(_is_trained, bases)):
        return None
    joined: Any = nn.Module()
    if isinstance(bases[0], nn.QuantizedLinear):
        joined = nn.QuantizedLinear(
            64, 1, bias=False, group_size=bases[0].group_size, bits=bases[0].bits
        )
    for name in ("weight", "scales", "biases"):
        if name not in bases[0]:
            continue
        whole = mx.concatenate([base[name] for base in bases])
        mx.eval(whole)
        at = 0
        for base in bases:
            rows = base[name].shape[0]
            base[name] = whole[at : at + rows]
            mx.eval(base[name])
            at += rows
        joined[name] = whole
    return joined
