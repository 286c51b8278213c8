"""Check a written GGUF file: read it back and compare it with its model weight by weight."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from allhands.errors import ModelError
from allhands.model.gguf import llama_weights, read_gguf
from allhands.model.reading import opened

# Bounds of rounding to float16: half a unit in the last place, and half of the smallest number
# above zero.
_PART, _LEAST = 2.0**-11, 2.0**-25
# Modules of a block that a plain Llama does not have.
_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{
        f"ffn_{name}_exps": f"block_sparse_moe.switch_mlp.{name}_proj"
        for name in ("gate", "up", "down")
    },
}


def check_gguf(model: Path, file: Path) -> None:
    """Compare the tensors of ``file`` with the dense weights in the directory ``model``.

    Names and the order of rows are found on the way back, by what reads GGUF files of others, not
    by what wrote this one. A matrix in float16 may be rounded; what is kept in float32 has to be
    the same.

    Raises:
        ModelError: a weight is missing, is one too many, or is another.
    """
    tensors, metadata = read_gguf(file)
    heads, pairs = (int(metadata[f"llama.attention.head_count{kind}"]) for kind in ("", "_kv"))
    found: dict[str, mx.array] = {}
    while tensors:
        name, tensor = tensors.popitem()
        ours = _of_experts(name)
        found |= {ours: tensor} if ours else llama_weights({name: tensor}, heads, pairs)
    for wanted, _ in opened(model):
        while wanted:
            name, value = wanted.popitem()
            held = found.pop(name, None)
            if held is None:
                raise _differs(f"{name} is missing", file)
            if held.shape != value.shape:
                raise _differs(f"{name} has the shape {held.shape}, not {value.shape}", file)
            if not _same(held, value):
                raise _differs(f"{name} has other values", file)
    if found:
        raise _differs(f"{min(found)} is none of the model's", file)


def _of_experts(name: str) -> str | None:
    """The name in mlx_lm of a tensor of experts; ``None`` for others."""
    block, _, inner = name.removesuffix(".weight").rpartition(".")
    if inner in _EXPERTS:
        return f"model.layers.{block.removeprefix('blk.')}.{_EXPERTS[inner]}.weight"
    return None


def _same(held: mx.array, value: mx.array) -> bool:
    exact = value.astype(mx.float32)
    room = mx.abs(exact) * _PART + _LEAST if held.dtype == mx.float16 else mx.array(0.0)
    return bool(mx.all(mx.abs(held.astype(mx.float32) - exact) <= room).item())


def _differs(what: str, file: Path) -> ModelError:
    return ModelError(
        f"the GGUF file differs from the model, and was not kept: {what}",
        code="written-files-differ",
        where=str(file.parent),
        hint="free disk space and try again; if it happens again this is a defect: report it",
    )
