"""What the numbers of hundreds of small runs have in common: nobody looks at their pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure


@pytest.fixture(scope="session", autouse=True)
def undrawn_pictures() -> Iterator[None]:
    """The curves of a run in this process are laid out as ever, but not painted: that takes longer than the run.

    Painted ones are in tests/unit/test_plots.py, and wherever a run has a process of its own.
    """

    def savefig(figure: Figure, file: Any, **_: Any) -> None:
        assert figure.axes
        Path(file).write_bytes(b"not painted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        yield
