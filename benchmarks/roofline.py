"""How much of what the machine can do a training step uses: FLOPs of the model against the fastest
matrix product.

The count is that of the model, whatever a program really computes: recomputation does not raise it,
and a frozen weight needs no gradient of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from records import Row, device_of, is_ours, rows_in

_SCALES = {"GFLOP/s": 1e9, "TFLOP/s": 1e12}
_MATMUL = re.compile(r"matmul (\w+), ")


def weights_of(shape: Mapping[str, Any]) -> tuple[int, int]:
    """Weights that are multiplied: of one layer, and of the head. The embedding is a look-up."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head_size = shape.get("head_dim") or hidden // shape["num_attention_heads"]
    queries, keys = (
        shape["num_attention_heads"] * head_size,
        shape["num_key_value_heads"] * head_size,
    )
    return 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner, hidden * shape[
        "vocab_size"
    ]


def adapter_weights(shape: Mapping[str, Any], rank: int) -> int:
    """Weights of the adapters of one layer, on all seven linear layers."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head_size = shape.get("head_dim") or hidden // shape["num_attention_heads"]
    queries, keys = (
        shape["num_attention_heads"] * head_size,
        shape["num_key_value_heads"] * head_size,
    )
    return rank * (2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + inner))


def flops_per_token(work: Mapping[str, Any]) -> float:
    """FLOPs of the model for one trained token: forward, gradients of what comes before, gradients
    of weights.

    2 for each multiplied weight in each of the three; attention is causal, so half of its square.
    ``rank`` 0 trains everything; otherwise gradients go back through the head and the last
    ``layers`` layers, and only adapters have any.
    """
    shape, rank = work["shape"], work["rank"]
    layer, head = weights_of(shape)
    count, trained = shape["num_hidden_layers"], work["layers"]
    length = work.get("length") or work["mean_length"]
    head_size = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    # Scores and sums: 2 products of 2 FLOPs for each place before, half of them masked.
    attention = 2.0 * length * shape["num_attention_heads"] * head_size
    forward = count * (2.0 * layer + attention) + 2.0 * head
    if rank == 0:
        return 3.0 * forward
    # Twice: both factors of a score have a gradient.
    backward = trained * (2.0 * layer + 2.0 * attention) + 2.0 * head
    return forward + backward + 6.0 * trained * adapter_weights(shape, rank)


def ceiling(records: Iterable[Mapping[str, Any]], device: str, dtype: str) -> float | None:
    """The fastest matrix product of the type, FLOP/s, that a record of ``ceilings`` has of the
    device, by anybody.
    """
    best: float | None = None
    for record in records:
        if record["name"] != "ceilings" or device_of(record) != device:
            continue
        rows = [
            row
            for row in rows_in(record)
            if (found := _MATMUL.match(row.name)) and found[1] == dtype
        ]
        best = max([row.median * _SCALES[row.unit] for row in rows], default=best)
    return best


def utilisation(
    record: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> list[tuple[Row, float, float]]:
    """Of each speed that says what was computed: FLOP/s of the model on one device, and the part of
    the ceiling.
    """
    found: list[tuple[Row, float, float]] = []
    device = device_of(record)
    for row in rows_in(record):
        if row.unit != "tokens/s" or not row.work:
            continue
        best = ceiling(records, device, row.work.get("dtype", "bfloat16"))
        if best is not None:
            rate = row.median * flops_per_token(row.work) / row.work.get("gpus", 1)
            found.append((row, rate, rate / best))
    # Ours first, then as recorded.
    return sorted(found, key=lambda one: (one[0].name, not is_ours(one[0].who)))
