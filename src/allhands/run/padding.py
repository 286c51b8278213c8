"""Models whose results depend on how rows are padded."""

from __future__ import annotations

from typing import Any

from allhands.kernels.known import length_that_counts, sees_ahead
from allhands.run.datasets import Datasets


def padding_told(model: Any, data: Datasets) -> list[str]:
    """Return a note if results depend on the padding of rows, and so on the other rows of a
    micro-batch.
    """
    if (block := sees_ahead(model)) is not None:
        return [
            "mlx_lm's own model of this architecture lets a token see later ones, up to the end of its block of "
            f"{block}: losses are lower than a causal model's, and other ranks or micro-batches give slightly other "
            "numbers"
        ]
    limit, windows = length_that_counts(model), data.train
    if limit is None or windows is None or int(windows.work.max()) <= limit:
        return []
    return [
        f"this model's rotary angles follow the length of a row beyond {limit} tokens, its padding included: other "
        f"ranks or micro-batches give slightly other numbers; --max-seq-length {limit} avoids it"
    ]
