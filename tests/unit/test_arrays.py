"""Arrays as bytes and back, and rank 0's state on every rank: every bit of every type."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from safetensors import safe_open
from twins import ThreadCommunicator, run_ranks

from allhands import arrays as arrays_module
from allhands.arrays import hand_out, hand_out_json, hold, load_arrays, load_tree, tensors_of
from allhands.checkpoints.tensors import safetensors_pieces
from allhands.distributed.backend import SingleProcess

DTYPES = ["bool_", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
DTYPES += ["float16", "bfloat16", "float32", "complex64"]


def every_type() -> dict[str, mx.array]:
    """Arrays of all types with bit patterns that arithmetic would change: minus zero, NaN, the largest integers."""
    random = np.random.default_rng(0)
    result: dict[str, mx.array] = {}
    for name in DTYPES:
        dtype: mx.Dtype = getattr(mx, name)
        raw = random.integers(0, 2 if name == "bool_" else 256, size=(3, 5, dtype.size), dtype=np.uint8)
        result[name] = mx.array(raw).view(dtype).reshape(3, 5)
    result["special"] = mx.array([-0.0, float("nan"), float("-inf"), 1e-42], dtype=mx.float32)
    result["scalar"] = mx.array(np.array(2**64 - 1, dtype=np.uint64))
    result["empty"] = mx.zeros((0, 4))
    result["turned"] = mx.arange(12, dtype=mx.float32).reshape(3, 4).T
    mx.eval(list(result.values()))
    return result


def raw(array: mx.array) -> tuple[mx.Dtype, tuple[int, ...], bytes]:
    flat = mx.contiguous(array).reshape(-1)
    return array.dtype, array.shape, np.array(flat.view(mx.uint8)).tobytes() if array.size else b""


def same(one: dict[str, mx.array], other: dict[str, mx.array]) -> bool:
    return {n: raw(a) for n, a in one.items()} == {n: raw(a) for n, a in other.items()}


def test_through_a_file(tmp_path: Path) -> None:
    tree = {"layers": [{"weights": every_type()}, {"other": mx.ones((2,))}]}
    file = tmp_path / "tree.safetensors"
    with file.open("wb") as stream:
        stream.writelines(safetensors_pieces(tensors_of(tree)))
    back: Any = load_tree(file)
    assert same(back["layers"][0]["weights"], tree["layers"][0]["weights"])
    assert same(back["layers"][1], tree["layers"][1])
    with safe_open(file, framework="np") as opened:
        assert opened.get_tensor("layers.0.weights.turned").tolist() == np.arange(12).reshape(3, 4).T.tolist()
    assert sorted(load_arrays(file)) == sorted(t.name for t in tensors_of(tree))


@pytest.mark.parametrize("own", [False, True])
def test_what_is_held_stays_while_training_goes_on(own: bool) -> None:
    """Asked for in another thread, as it is when it is written."""
    weight = mx.ones((1000,))
    get = hold({"weight": weight}, on_device=own)
    for _ in range(5):
        weight = weight * 2
        mx.eval(weight)
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(get).result()[0]
    assert np.frombuffer(held.data, dtype=np.float32).tolist() == [1.0] * 1000
    assert weight[0].item() == 32


@pytest.mark.parametrize("own", [False, True])
def test_what_is_held_is_the_same_bit_for_bit(own: bool, tmp_path: Path) -> None:
    tree = every_type()
    with (tmp_path / "tree").open("wb") as stream:
        stream.writelines(safetensors_pieces(hold(tree, on_device=own)()))
    assert same(load_arrays(tmp_path / "tree"), tree)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("chunk", [8, 100, 1 << 20])
def test_rank_0_hands_out(size: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays_module, "_CHUNK_BYTES", chunk)
    mine = every_type()

    def work(communicator: ThreadCommunicator) -> bool:
        # What the others bring does not matter.
        brought = mine if communicator.rank == 0 else {"junk": mx.ones((7,))}
        value = hand_out_json(communicator, {"rank": communicator.rank, "text": "grüß"})
        return same(hand_out(communicator, brought), mine) and value == {"rank": 0, "text": "grüß"}

    assert run_ranks(size, work) == [True] * size


def test_alone_it_is_the_same() -> None:
    mine = every_type()
    assert same(hand_out(SingleProcess(), mine), mine)
    assert hand_out_json(SingleProcess(), [1, None]) == [1, None]
