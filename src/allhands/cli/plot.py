"""``allhands plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from allhands.errors import DataError
from allhands.metrics import read_metrics
from allhands.monitor import read_samples
from allhands.monitor.picture import plot_memory
from allhands.plots import plot_losses, times_table


def run_plot(runs: Sequence[Path], out: Path, title: str | None) -> None:
    """Draw the runs' loss curves on one graph and print their times side by side."""
    histories = [read_metrics(run) for run in runs]
    written = plot_losses(histories, out, title=title)
    console = Console()
    console.print(times_table(histories))
    console.print(f"graph: {written}", highlight=False, soft_wrap=True)
    if len(runs) == 1 and (memory := _plot_memory(runs[0], _beside(out), title)):
        console.print(f"memory: {memory}", highlight=False, soft_wrap=True)


def _plot_memory(run: Path, out: Path, title: str | None) -> Path | None:
    """The picture of the run's processes beside its curves; ``None`` where too little is known of them."""
    try:
        return plot_memory(read_samples(run if run.is_dir() else run.parent), out, title=title)
    except DataError:
        return None


def _beside(out: Path) -> Path:
    """Where the second picture goes; never where the first one is."""
    return out.with_name(f"memory{'-of-processes' * (out.stem == 'memory')}{out.suffix}")
