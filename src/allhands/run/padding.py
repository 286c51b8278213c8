"""Models whose results depend on how rows are padded."""

from __future__ import annotations

from typing import Any

from allhands.data.loader import num_lengths
from allhands.kernels.known import length_that_counts, sees_ahead
from allhands.model.balance import has_balance
from allhands.run.datasets import Datasets

# Packed rows have at most two lengths.
_MANY_LENGTHS = 16
_APART = (
    "rows of {} lengths are computed apart, because routers that learn to keep experts busy would count padding: "
    "--packing makes nearly all rows equally long, which is faster"
)


def padding_told(model: Any, data: Datasets) -> list[str]:
    """Return a note if results depend on the padding of rows, and so on the other rows of a
    micro-batch, or if rows are computed apart for this reason.
    """
    if (block := sees_ahead(model)) is not None:
        return [
            "mlx_lm's own model of this architecture lets a token see later ones, up to the end of its block of "
            f"{block}: losses are lower than a causal model's, and other ranks or micro-batches give slightly other "
            "numbers"
        ]
    limit, windows = length_that_counts(model), data.train
    if has_balance(model) and windows is not None:
        lengths = num_lengths(windows.work)
        return [_APART.format(lengths)] if lengths > _MANY_LENGTHS else []
    if limit is None or windows is None or int(windows.work.max()) <= limit:
        return []
    return [
        f"this model's rotary angles follow the length of a row beyond {limit} tokens, its padding included: other "
        f"ranks or micro-batches give slightly other numbers; --max-seq-length {limit} avoids it"
    ]
