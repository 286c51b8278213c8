"""``allhands plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from allhands.errors import ConfigError, DataError
from allhands.metrics import read_metrics
from allhands.monitor import read_samples
from allhands.monitor.picture import plot_memory
from allhands.plots import plot_losses, times_table

# What is in every picture that we draw, near its beginning or its end, whatever its format.
_DRAWN = b"Matplotlib"
_LOOK = 8192


def run_plot(runs: Sequence[Path], out: Path, title: str | None, *, force: bool = False) -> None:
    """Draw the runs' loss curves on one graph and print their times side by side.

    Raises:
        ConfigError: a file of that name is no such picture, and is not to be replaced by ``force``.
    """
    histories = [read_metrics(run) for run in runs]
    for file in (out, _beside(out)) if len(runs) == 1 else (out,):
        _require_room(file, force=force)
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


def _require_room(file: Path, *, force: bool) -> None:
    """Refuse to write over anything but an earlier picture, unless asked to."""
    if force or not file.is_file():
        return
    try:
        with file.open("rb") as stream:
            content = stream.read(_LOOK)
            stream.seek(max(0, file.stat().st_size - _LOOK))
            content += stream.read()
    except OSError:  # drawing over it will fail in its own words, if it does
        return
    if _DRAWN not in content:
        hint = "choose another file with --out, or add --force to replace it"
        raise ConfigError("a file is there already that is no picture of runs", where=str(file), hint=hint)
