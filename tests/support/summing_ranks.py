"""A rank that adds up arrays as ranks of several computers do: ``summing_ranks.py LOCAL_RANK
LOCAL_SIZE [FIRSTS]``.

Prints one line of JSON. With FIRSTS, such as ``0,2``, computers are divided so without measuring.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import allhands

# isort: split
import mlx.core as mx
import numpy as np

from allhands.distributed.backend import MlxGroup, connect
from allhands.distributed.hierarchy import ByComputer, by_computer

del allhands
SIZES = (40_000, 100_003, 1_000_000)


def main() -> None:
    rank, hostfile = int(os.environ["MLX_RANK"]), os.environ["MLX_HOSTFILE"]
    with open(hostfile, encoding="utf-8") as file:
        size = len(json.load(file))
    ring = connect("ring", size, rank)
    assert isinstance(ring, MlxGroup)
    local_rank, local_size, *firsts = sys.argv[1:]
    group = by_computer(ring, int(local_rank), int(local_size))
    if firsts:
        group = ByComputer(ring, [int(first) for first in firsts[0].split(",")])
    found: list[dict[str, object]] = []
    for dtype in (mx.float32, mx.bfloat16):
        for count in SIZES:
            draw = np.random.default_rng(rank)
            array = mx.array(draw.standard_normal(count).astype(np.float32)).astype(dtype)
            before = ring.exchange.sent_bytes
            total = group.all_sum(array)
            mx.eval(total)
            sent = ring.exchange.sent_bytes - before
            wanted = ring.all_sum(array.astype(mx.float32))
            off = mx.abs(total.astype(mx.float32) - wanted).max().item()
            bits = hashlib.sha256(np.array(total.astype(mx.float32)).tobytes()).hexdigest()
            found.append(
                {
                    "bits": bits,
                    "off": off,
                    "sent": sent,
                    "bytes": array.nbytes,
                    "dtype": str(total.dtype),
                }
            )
    told = group.told if isinstance(group, ByComputer) else ""
    print(
        json.dumps(
            {
                "rank": rank,
                "sums": found,
                "told": told,
                "by_computer": isinstance(group, ByComputer),
            }
        )
    )


if __name__ == "__main__":
    main()
