"""Pictures at which nobody looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure


def leave_unpainted(patch: pytest.MonkeyPatch) -> None:
    """Have the curves of runs in this process laid out as ever, but not painted: that takes longer
    than a tiny run.

    Painted ones are in tests/unit/test_plots.py, and wherever a run has a process of its own.
    """

    def savefig(figure: Figure, file: Any, **_: Any) -> None:
        assert figure.axes
        Path(file).write_bytes(b"not painted")

    patch.setattr(Figure, "savefig", savefig)
