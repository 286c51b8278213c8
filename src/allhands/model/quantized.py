"""Quantised layers on a CPU: they multiply dequantised weights, because BLAS can do that fast.

On a CPU MLX multiplies quantised weights at 3 GFLOP/s, and dequantises packed ones slowly. Three
forms hold the same values:

- The dense weight is fastest. It has 4 bytes a value.
- Codes of one byte: the dense weight is made from them at each use. They are 7 % slower at 350
  tokens, and have 1.25 bytes a value.
- The packed weight: blocks of its rows are decoded while they are multiplied. It has 0.56 bytes a
  value with 4 bits, and is used if memory is short.
"""

from __future__ import annotations

from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.dora import DoRALinear

from allhands.io.trees import unflatten
from allhands.kernels import native_products
from allhands.kernels.fused.ops import product_with
from allhands.kernels.instances import give_form
from allhands.kernels.native_arrays import FORWARD_ONLY, available
from allhands.kernels.packed import PACKED, PackedDoRALinear, PackedEmbedding, PackedLinear
from allhands.kernels.selection import KernelSelection, give_selection
from allhands.model.adapters import count_parameters
from allhands.model.split import dense_weight
from allhands.runtime.accelerator import Accelerator

# Largest share of the device's memory for a dense copy of a quantised model on a GPU.
_SMALL_SHARE = 0.025
# Forms of quantised layers' weights in memory, see the module's text.
Form = Literal["dense", "codes", "packed"]


class UnpackedLinear(native_products.CodedLayer, nn.Module):
    """A frozen quantised linear layer that keeps one code a byte and is dense only while it
    multiplies.

    Made from an affine :class:`mlx.nn.QuantizedLinear`, whose dequantised weight it has bit for
    bit.
    """

    def __init__(self, source: nn.QuantizedLinear) -> None:
        super().__init__()
        self.codes, self.scales, self.biases = native_products.coded(source)
        if "bias" in source:
            self.bias = source.bias.astype(mx.float32)
        self._multiply = product_with(self._dense)
        self.freeze()

    def _dense(self, after: mx.array) -> mx.array:
        """Return the (out, in) float32 weight, made only after ``after`` has been computed."""
        codes = mx.depends(self.codes, after)
        return (codes.astype(mx.float32) * self.scales + self.biases).reshape(
            self.codes.shape[0], -1
        )

    def multiply_at_once(self) -> None:
        """Compute natively from now on, if possible: at each call, not in a graph."""
        if native_products.CodedProduct.fits(self.codes.shape[2]):
            self.coded = native_products.CodedProduct(self.codes, self.scales, self.biases)

    def __call__(self, x: mx.array) -> mx.array:
        product = self.native_product(x)
        y = self._multiply(x) if product is None else native_products.applied(self, product, x)
        return y + self.bias if "bias" in self else y


def replace_quantized(model: nn.Module, accelerator: Accelerator, form: Form) -> int:
    """Replace the quantised layers of a frozen model by a form that is fast on this device.

    Layers with adapters are replaced, too. The values are those of the quantised model, so adapters
    come out the same. A CPU always needs this. With CUDA it is done for models that are small
    beside the device's memory, because the kernels for quantised products take a minute and more to
    build at their first use; the dense weights then have the type that the model computes in.

    Args:
        form: form on a CPU. "codes" is for the blocks' layers in training, with many tokens at a
            time; "dense" is for generation, where making the weight for one token would cost more
            than using it; "packed" is for little memory. With "packed", a GPU changes nothing.

    Returns:
        Number of layers replaced.
    """
    if form == "packed":
        return _keep_packed(model) if accelerator.kind == "cpu" else 0
    if accelerator.kind == "cpu":
        return _substitute_all(model, compact=form == "codes", dtype=mx.float32)
    if accelerator.kind == "cuda" and held_dense(count_parameters(model), accelerator.memory_bytes):
        return _substitute_all(model, compact=False, dtype=None)
    return 0


def _keep_packed(model: nn.Module) -> int:
    """Give every quantised layer its packed form; return the number of layers."""
    found = [module for module in model.modules() if _is_quantized(module)]
    for module in found:
        give_form(
            module, PackedLinear if isinstance(module, nn.QuantizedLinear) else PackedEmbedding
        )
    for module in model.modules():
        if type(module) is DoRALinear and isinstance(module.linear, PackedLinear):
            give_form(module, PackedDoRALinear)
    return len(found)


def is_quantized(model: nn.Module) -> bool:
    """Return True if ``model`` has a layer of MLX's quantised types."""
    return any(_is_quantized(module) for module in model.modules())


def bytes_of_form(model: nn.Module, form: Form) -> int:
    """Return the bytes that ``model`` will have on a CPU with its quantised layers in ``form``.

    The layers must not be replaced yet.
    """
    return sum(own_bytes(model, form).values())


def own_bytes(model: nn.Module, form: Form, *, on_cpu: bool = True) -> dict[int, int]:
    """Return the bytes that each module's own arrays will have, by the module's ``id``.

    Quantised layers, which must not be replaced yet, are counted in ``form``.

    Args:
        on_cpu: True to count four bytes for each floating-point value. On a GPU dense weights have
            two, and other arrays stay unchanged.
    """
    adapted = _under_dora(model)
    return {
        id(module): _own_bytes(name, module, form, adapted, on_cpu)
        for name, module in model.named_modules()
    }


def _own_bytes(name: str, module: Any, form: Form, adapted: set[str], on_cpu: bool) -> int:
    word, arrays = (
        4 if on_cpu else 2,
        [value for value in module.values() if isinstance(value, mx.array)],
    )
    if _is_quantized(module):
        numbers = module.scales.size * module.group_size
        if form == "codes" and _becomes_codes(name, module, adapted):
            return numbers + 8 * module.scales.size
        return sum(array.nbytes for array in arrays) if form == "packed" else word * numbers
    if not on_cpu:
        return sum(array.nbytes for array in arrays)
    return sum(
        word * array.size if mx.issubdtype(array.dtype, mx.floating) else array.nbytes
        for array in arrays
    )


def _under_dora(model: nn.Module) -> set[str]:
    """Return the names of the layers that DoRA adapts."""
    return {name for name, module in model.named_modules() if isinstance(module, DoRALinear)}


def _becomes_codes(name: str, module: Any, adapted: set[str]) -> bool:
    """Return True if a quantised layer can be held as codes.

    It must be a layer of a block without DoRA: DoRA and the head need the dense weight itself.
    """
    in_block = ".layers." in f".{name}" and name.rpartition(".")[0] not in adapted
    return in_block and isinstance(module, nn.QuantizedLinear) and module.mode == "affine"


def held_dense(parameters: int, memory_bytes: int) -> bool:
    """Return True if a quantised model with ``parameters`` values is made dense on CUDA, in half
    precision.
    """
    return 2 * parameters < _SMALL_SHARE * memory_bytes


def _substitute_all(model: nn.Module, *, compact: bool, dtype: mx.Dtype | None) -> int:
    """Replace every quantised layer by a dense one; with ``compact``, by codes where possible.

    Args:
        dtype: type of dense weights; ``None``: the type that the layer computes in.

    Returns:
        Number of layers replaced.
    """
    adapted = _under_dora(model)
    found = [(name, module) for name, module in model.named_modules() if _is_quantized(module)]
    count = len(found)
    while found:
        # Layers are replaced and freed one by one, so that memory never holds both forms of the
        # whole model.
        name, module = found.pop()
        new = _substitute(
            module, compact=compact and _becomes_codes(name, module, adapted), dtype=dtype
        )
        mx.eval(new.parameters())
        model.update_modules(unflatten([(name, new)]))
        del module
    return count


def hold_in_float32(model: nn.Module) -> None:
    """Let a CPU compute ``model`` in float32, which is several times as fast as any other type.

    Packed layers keep their scales and biases; they compute in float32 anyway.
    """
    packed = [module for module in model.modules() if isinstance(module, PACKED)]
    stored = [
        {name: module[name] for name in ("scales", "biases") if name in module} for module in packed
    ]
    model.set_dtype(mx.float32)
    for module, values in zip(packed, stored, strict=True):
        module.update(values)
    mx.eval(model.parameters())


def multiply_at_once(model: nn.Module, selection: KernelSelection) -> None:
    """Let the packed layers of a model that only generates compute natively where possible."""
    for module in model.modules():
        if isinstance(module, PACKED):
            give_selection(module, selection)
            object.__setattr__(module, FORWARD_ONLY, True)
            module.multiply_at_once()


def _is_quantized(module: Any) -> bool:
    # Exact types: a class derived from one of them may compute in its own way.
    return type(module) in (nn.QuantizedLinear, nn.QuantizedEmbedding)


def _substitute(module: Any, *, compact: bool, dtype: mx.Dtype | None) -> nn.Module:
    if compact:
        return UnpackedLinear(module)
    new: nn.Module = nn.Linear(1, 1, bias="bias" in module)
    if isinstance(module, nn.QuantizedEmbedding):
        new = nn.Embedding(1, 1)
    elif "bias" in module:
        new.bias = module.bias.astype(dtype or module.bias.dtype)
    if dtype is not None and dtype == mx.float32 and module.mode == "affine" and available():
        new.weight = native_products.decoded(*native_products.coded(module))
    else:
        weight = dense_weight(module)
        new.weight = weight.astype(dtype or weight.dtype)
    new.freeze()
    return new
