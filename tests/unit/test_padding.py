"""The estimate of padding, against batches counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from allhands.data.check import CheckOptions
from allhands.data.order import GlobalOrder
from allhands.data.padding import estimate_padding
from allhands.runtime.sizing import Sizing


def test_padding_is_that_of_the_batches() -> None:
    work = np.array([3, 50, 4, 48, 5, 49, 6, 51], dtype=np.int64)
    options = CheckOptions(batch_size=4, sizing=Sizing(10_000, overhead_tokens=1_000_000))
    # No micro-batches at such a price: the batch as a whole is padded to its longest.
    order = GlobalOrder(work, 4, 0)
    batches = [order.batch(i) for i in range(2)]
    places = sum(int(work[batch].max()) * 4 for batch in batches)
    found = estimate_padding(work, 0, options)
    assert found.share == pytest.approx(1 - work.sum() / places)
    assert found.batches_per_epoch == 2
    # Sorted by length: 3 to 6 in one batch, 48 to 51 in the other.
    assert found.share == pytest.approx(1 - 216 / (4 * 6 + 4 * 51))
    assert found.random_share > found.share
    # Each on its own: nothing is padded.
    alone = estimate_padding(work, 0, CheckOptions(batch_size=1))
    assert (alone.share, alone.random_share, alone.batches_per_epoch) == (0.0, 0.0, 8)
    assert estimate_padding(work[:0], 0, CheckOptions()).share == 0.0
