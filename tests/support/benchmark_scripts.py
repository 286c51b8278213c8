"""The scripts in ``benchmarks``, which import each other by name."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@contextmanager
def scripts_on_the_path() -> Generator[None]:
    """Inside, they can be imported as they import each other."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield
    finally:
        sys.path.remove(str(BENCHMARKS))
