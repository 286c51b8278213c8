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

from allhands.checkpoints import Checkpoint, open_checkpoint, write_checkpoint
from allhands.checkpoints.arrays import held, local_arrays, owned_tree, shared_arrays, tensors_of
from allhands.distributed import handout
from allhands.distributed.backend import SingleProcess
from allhands.distributed.handout import gather_json, hand_out_json
from allhands.errors import PeerLostError
from allhands.io.regions import Box, Flat

DTYPES = ["bool_", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
DTYPES += ["float16", "bfloat16", "float32", "complex64"]


def every_type() -> dict[str, mx.array]:
    """Arrays of all types with bit patterns that arithmetic would change: minus zero, NaN, the
    largest integers.
    """
    random = np.random.default_rng(0)
    result: dict[str, mx.array] = {}
    for name in DTYPES:
        dtype: mx.Dtype = getattr(mx, name)
        raw = random.integers(
            0, 2 if name == "bool_" else 256, size=(3, 5, dtype.size), dtype=np.uint8
        )
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


def written(path: Path, tensors: Any) -> Checkpoint:
    return write_checkpoint(path / "c", 1, "run", {}, {"tree.safetensors": tensors})


def read(checkpoint: Checkpoint) -> dict[str, mx.array]:
    return {
        name: stored.read() for name, stored in local_arrays(checkpoint, "tree.safetensors").items()
    }


def test_through_a_checkpoint(tmp_path: Path) -> None:
    tree = {"layers": [{"weights": every_type()}, {"other": mx.ones((2,))}]}
    checkpoint = written(tmp_path, tensors_of(tree))
    back = read(open_checkpoint(checkpoint.path))
    flat = {f"layers.0.weights.{name}": array for name, array in every_type().items()}
    assert same(back, {**flat, "layers.1.other": mx.ones((2,))})
    with safe_open(checkpoint.path / "tree.safetensors", framework="np") as opened:
        assert (
            opened.get_tensor("layers.0.weights.turned").tolist()
            == np.arange(12).reshape(3, 4).T.tolist()
        )


@pytest.mark.parametrize("own", [False, True])
def test_what_is_held_stays_while_training_goes_on(own: bool) -> None:
    """Asked for in another thread, as it is when it is written."""
    weight = mx.ones((1000,))
    (tensor,) = held(owned_tree({"weight": weight}), on_device=own)
    for _ in range(5):
        weight = weight * 2
        mx.eval(weight)
    with ThreadPoolExecutor(1) as thread:
        content = thread.submit(tensor.content).result()
    assert np.frombuffer(content, dtype=np.float32).tolist() == [1.0] * 1000
    assert weight[0].item() == 32


@pytest.mark.parametrize("own", [False, True])
def test_what_is_held_is_the_same_bit_for_bit(own: bool, tmp_path: Path) -> None:
    tree = every_type()
    assert same(read(written(tmp_path, held(owned_tree(tree), on_device=own))), tree)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("piece", [8, 100, 1 << 20])
def test_rank_0_hands_out(
    size: int, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handout, "_PIECE_BYTES", piece)
    mine = every_type()
    checkpoint = written(tmp_path, tensors_of(mine))

    def work(communicator: ThreadCommunicator) -> bool:
        rank = communicator.rank
        value = hand_out_json(communicator, {"rank": rank, "text": "grüß"})
        stored = shared_arrays(communicator, checkpoint if rank == 0 else None, "tree.safetensors")
        whole = {name: each.read() for name, each in stored.items()}
        # Each takes what it needs, and nothing where it needs nothing.
        part = stored["float32"].read(Flat(4 * rank, 4 * rank + 3) if rank else Flat(7, 7))
        box = stored["int16"].read(Box((1, rank), (2, 2)))
        parts = raw(part) == raw(
            mine["float32"].reshape(-1)[4 * rank : 4 * rank + (3 if rank else 0)]
        )
        boxes = raw(box) == raw(mine["int16"][1:3, rank : rank + 2])
        return same(whole, mine) and parts and boxes and value == {"rank": 0, "text": "grüß"}

    assert run_ranks(size, work) == [True] * size


@pytest.mark.parametrize("piece", [8, 1 << 20])
def test_everybody_says_something(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handout, "_PIECE_BYTES", piece)
    said = ["", ["a" * 50, None], {"grüß": 1.5}]
    assert (
        run_ranks(3, lambda communicator: gather_json(communicator, said[communicator.rank]))
        == [said] * 3
    )


def test_alone_it_is_the_same(tmp_path: Path) -> None:
    mine = every_type()
    stored = shared_arrays(SingleProcess(), written(tmp_path, tensors_of(mine)), "tree.safetensors")
    assert same({name: each.read() for name, each in stored.items()}, mine)
    assert hand_out_json(SingleProcess(), [1, None]) == [1, None]


class _Zeros(SingleProcess):
    """A ring that has lost a peer: MLX gives zeros for what would have come."""

    size = 2

    def all_sum(self, array: mx.array) -> mx.array:
        return mx.zeros_like(array)

    def all_gather(self, array: mx.array) -> mx.array:
        return mx.zeros((2 * array.shape[0], *array.shape[1:]), dtype=array.dtype)


@pytest.mark.parametrize("exchange", [hand_out_json, gather_json])
def test_a_value_that_has_not_come_is_a_lost_peer(exchange: Any) -> None:
    with pytest.raises(PeerLostError):
        exchange(_Zeros(), {"a": 1})
