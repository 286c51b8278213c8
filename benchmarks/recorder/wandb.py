"""Stands in for the ``wandb`` package, so that ``mlx_lm lora --report-to wandb`` reports its full
figures.

The command's own terminal lines round the speed to whole tokens a second and the loss to three
places. Put this directory on ``PYTHONPATH`` and name a file in ``BENCHMARK_RECORD``: each report
becomes a line of it.
"""

from __future__ import annotations

import json
import os
from typing import Any


def init(**_: Any) -> None:
    """Nothing to set up."""


def log(values: dict[str, Any], step: int | None = None) -> None:
    """Append one report."""
    with open(os.environ["BENCHMARK_RECORD"], "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **values}) + "\n")
