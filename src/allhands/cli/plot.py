"""``allhands plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from allhands.errors import DataError
from allhands.io.files import require_ours
from allhands.io.pictures import DRAWN_HERE
from allhands.io.terminal import console_for
from allhands.observe.metrics import read_metrics
from allhands.observe.monitor import Sample, read_samples
from allhands.observe.plots import can_be_drawn, plot_losses, plot_memory
from allhands.observe.times import times_table


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run directories or metrics.jsonl files.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="PNG to write.")] = Path("loss.png"),
    title: Annotated[str | None, typer.Option("--title", help="Title of the graph.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is no such picture.")] = False,
) -> None:
    """Draw the loss curves of runs on one graph; print their times.

    Of a single run the memory of its processes is drawn, too, beside it.
    """
    histories = [read_metrics(run) for run in runs]
    samples = _samples(runs[0]) if len(runs) == 1 else None
    for file in (out,) if samples is None else (out, _beside(out)):
        require_ours(file, [DRAWN_HERE], "picture of runs", force=force)
    written = plot_losses(histories, out, title=title)
    console = console_for()
    console.print(times_table(histories))
    console.print(f"graph: {written}", highlight=False, soft_wrap=True)
    if samples is not None:
        # The run's processes beside its curves.
        memory = plot_memory(samples, _beside(out), title=title)
        console.print(f"memory: {memory}", highlight=False, soft_wrap=True)


def _samples(run: Path) -> list[Sample] | None:
    """What the run's processes held; ``None`` where it is too little for a picture."""
    try:
        found = read_samples(run if run.is_dir() else run.parent)
    except DataError:
        return None
    return found if can_be_drawn(found) else None


def _beside(out: Path) -> Path:
    """Where the second picture goes; never where the first one is."""
    return out.with_name(f"memory{'-of-processes' * (out.stem == 'memory')}{out.suffix}")
