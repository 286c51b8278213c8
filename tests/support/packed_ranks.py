"""Sums of packed arrays as every rank of a group finds them, beside numpy's own quantising,
feedback and sum.

Run as a program on every rank, in a ring (see ``ring_ranks.run_ring``) or under mpirun:
``packed_ranks.py ring 2``. Prints a JSON object: for each case what was found.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import allhands  # before MLX, for its BLAS  # noqa: F401

# isort: split
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from allhands.distributed.backend import MlxGroup, connect, sent_bytes
from allhands.distributed.codecs import CODECS, Codec
from allhands.distributed.packed import Packing, passed_on
from allhands.distributed.reduce import packed_sum_over_ranks

Floats = NDArray[Any]
STEPS = 6
# Arrays of whole groups and not, such as are too small, and numbers as small as adapters' first
# gradients.
SHAPES = ((96, 64), (7, 13), (63,), (), (40, 65), (2, 3))
SIZES = (1.0, 1e-3, 1.0, 1.0, 1e-12, 1.0)


def gradients(rank: int, step: int) -> list[Floats]:
    """Of a rank in a step."""
    rng = np.random.default_rng(100 * step + rank)
    return [
        (size * rng.standard_normal(shape)).astype(np.float32)
        for shape, size in zip(SHAPES, SIZES, strict=True)
    ]


@dataclass
class Numpy:
    """One rank's packing, by numpy: groups of 64 with the value of largest size met exactly, 0 as
    well.
    """

    bits: int

    def packed(self, array: Floats) -> Floats:
        """What is left of an array."""
        if self.bits == 16:
            words = array.view(np.uint32)
            return ((words + 0x7FFF + ((words >> 16) & 1)) & 0xFFFF0000).view(np.float32)
        flat = np.zeros(-(-array.size // 64) * 64)
        flat[: array.size] = array.reshape(-1)
        groups = flat.reshape(-1, 64)
        low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
        bins = 2**self.bits - 1
        edge = np.where(np.abs(low) > np.abs(high), low, high)
        step = (high - low) / bins * np.where(edge == low, 1, -1)
        step[step == 0] = 1
        places = np.round(edge / step)
        step = np.where(places == 0, step, edge / np.where(places == 0, 1, places))
        codes = np.clip(np.round((groups - np.where(places == 0, 0, edge)) / step), 0, bins)
        found = codes * step + np.where(places == 0, 0, edge)
        return found.reshape(-1)[: array.size].reshape(array.shape).astype(np.float32)


def right(codec: Codec, size: int) -> list[list[Floats]]:
    """The sums of every step, by numpy."""
    by_numpy, found = Numpy(codec.bits), list[list[Floats]]()
    left = [[np.zeros(shape, np.float32) for shape in SHAPES] for _ in range(size)]
    for step in range(STEPS):
        sums = [np.zeros(shape, np.float32) for shape in SHAPES]
        for rank in range(size):
            for place, gradient in enumerate(gradients(rank, step)):
                given = gradient + left[rank][place]
                packs = codec.packs(given.shape)
                sent = by_numpy.packed(given) if packs else gradient
                if packs and codec.grouped:
                    left[rank][place] = given - sent
                sums[place] = sums[place] + sent
        found.append(sums)
    return found


def sums_of(group: MlxGroup, codec: Codec) -> dict[str, Any]:
    """Of several steps: bits, distance from numpy, what is lost, bytes sent."""
    packing = Packing(group, codec)
    given = [[mx.array(each) for each in gradients(group.rank, step)] for step in range(STEPS)]
    left, digest, apart, typical = packing.nothing_left(given[0]), hashlib.sha256(), 0.0, 0.0
    whole = [np.zeros(shape) for shape in SHAPES]
    numpys, before, sent = right(codec, group.size), 0, 0
    for step, arrays in enumerate(given):
        before = sent_bytes(group)
        numbers = [1.0, float(group.rank)]
        sums, scalars, left = packed_sum_over_ranks(
            packing, arrays, left, numbers, bucket_bytes=20_000
        )
        sent = sent_bytes(group) - before
        assert np.array_equal(scalars, [group.size, sum(range(group.size))])
        for place, (found, theirs) in enumerate(zip(sums, numpys[step], strict=True)):
            digest.update(np.asarray(found).tobytes())
            difference = np.abs(np.asarray(found) - theirs)
            apart = max(apart, float(difference.max()) / SIZES[place])
            typical = max(typical, float(np.median(difference)) / SIZES[place])
            whole[place] += np.asarray(found, dtype=np.float64)
    lost = 0.0
    for place in range(len(SHAPES)):
        exact = sum(
            gradients(rank, step)[place].astype(np.float64)
            for rank in range(group.size)
            for step in range(STEPS)
        )
        mine = left[place]
        kept = np.asarray(
            group.all_sum(mx.zeros(SHAPES[place]) if mine is None else mine), dtype=np.float64
        )
        lost = max(lost, float(np.abs(whole[place] + kept - exact).max()) / SIZES[place])
    return {
        "digest": digest.hexdigest(),
        "apart": apart,
        "typical": typical,
        "lost": lost,
        "sent": sent,
    }


def passed(group: MlxGroup, codec: Codec) -> dict[str, Any]:
    """As :func:`sums_of`, of rows that neighbours pass on."""
    rng = [np.random.default_rng(rank) for rank in range(group.size)]
    left, digest, worst, total, exact = (
        mx.zeros((6400,)),
        hashlib.sha256(),
        0.0,
        np.zeros(6400),
        np.zeros(6400),
    )
    sent = 0
    for _ in range(STEPS):
        every = [one.standard_normal(6400).astype(np.float32) for one in rng]
        before = sent_bytes(group)
        found, left = passed_on(group, codec, mx.array(every[group.rank]) + left)
        mx.eval(found, left)
        sent = sent_bytes(group) - before
        digest.update(np.asarray(found).tobytes())
        total += np.asarray(found, dtype=np.float64)
        exact += sum(each.astype(np.float64) for each in every)
        worst = max(worst, float(np.abs(np.asarray(found) - sum(every)).max()))
    kept = np.asarray(group.all_sum(left), dtype=np.float64)
    lost = float(np.abs(total + kept - exact).max())
    return {"digest": digest.hexdigest(), "apart": worst, "lost": lost, "sent": sent}


def spoilt(group: MlxGroup, codec: Codec, value: float) -> list[bool]:
    """Which sums are finite where one number of the last rank's is not."""
    packing = Packing(group, codec)
    arrays = [mx.ones((64, 2)), mx.ones((32,)), mx.ones((128, 2))]
    if group.rank == group.size - 1:
        arrays[0] = mx.where(mx.arange(128).reshape(64, 2) == 70, value, arrays[0])
    sums, _, _ = packed_sum_over_ranks(
        packing, arrays, packing.nothing_left(arrays), bucket_bytes=1
    )
    return [bool(mx.isfinite(each).all().item()) for each in sums]


def mixed(group: MlxGroup) -> dict[str, Any]:
    """Half precision beside float32: what gains nothing travels as it is, in its own type."""
    packing = Packing(group, CODECS["bf16"])
    rng = np.random.default_rng(group.rank)
    arrays = [mx.array(rng.standard_normal((96, 64)).astype(np.float32)) for _ in range(2)]
    arrays[0] = arrays[0].astype(mx.bfloat16)
    plain = group.all_sum(arrays[0])
    mx.eval(plain)
    before = sent_bytes(group)
    sums, scalars, _ = packed_sum_over_ranks(packing, arrays, packing.nothing_left(arrays), [1.0])
    sent = sent_bytes(group) - before
    assert scalars.tolist() == [group.size]
    assert [each.dtype for each in sums] == [mx.bfloat16, mx.float32]
    return {"same": bool(mx.array_equal(sums[0], plain)), "sent": sent}


def main(backend: str, size: int) -> None:
    """Join, find everything, tell."""
    rank = int(os.environ.get("MLX_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    group = connect(backend, size, rank)
    assert isinstance(group, MlxGroup)
    found: dict[str, Any] = {"mixed": mixed(group)}
    for name, codec in CODECS.items():
        found[name] = sums_of(group, codec)
        found[f"spoilt {name}"] = [
            spoilt(group, codec, value) for value in (float("nan"), float("inf"), -float("inf"))
        ]
        if codec.grouped:
            found[f"passed {name}"] = passed(group, codec)
    print(json.dumps(found), flush=True)
    if backend == "ring":
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
