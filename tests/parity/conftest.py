"""What the numbers of hundreds of small runs have in common: nobody looks at their pictures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from unpainted import leave_unpainted


@pytest.fixture(scope="module", autouse=True)
def unpainted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        leave_unpainted(patch)
        yield
