"""``allhands plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from allhands.metrics import read_metrics
from allhands.plots import plot_losses, times_table


def run_plot(runs: Sequence[Path], out: Path, title: str | None) -> None:
    """Draw the runs' loss curves on one graph and print their times side by side."""
    histories = [read_metrics(run) for run in runs]
    written = plot_losses(histories, out, title=title)
    console = Console()
    console.print(times_table(histories))
    console.print(f"graph: {written}", highlight=False, soft_wrap=True)
