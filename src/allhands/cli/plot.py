"""``allhands plot``: loss curves of runs, and the memory of a run's processes."""

from __future__ import annotations

from pathlib import Path

from allhands.cli.verbs_runs import Plot
from allhands.errors import DataError
from allhands.io.files import require_ours
from allhands.io.paths import output_file
from allhands.io.pictures import DRAWN_HERE, PICTURES
from allhands.io.terminal import console_for
from allhands.observe.metrics import read_metrics
from allhands.observe.monitor import Sample, read_samples
from allhands.observe.plots import can_be_drawn, plot_losses, plot_memory
from allhands.observe.times import times_table


def plot(asked: Plot) -> None:
    """Run the verb."""
    out = output_file(asked.out, PICTURES)
    histories = [read_metrics(run) for run in asked.runs]
    samples = _samples(asked.runs[0]) if len(asked.runs) == 1 else None
    for file in (out,) if samples is None else (out, _beside(out)):
        require_ours(file, [DRAWN_HERE], "picture of runs", force=asked.force)
    written = plot_losses(histories, out, title=asked.title)
    console = console_for()
    console.print(times_table(histories))
    console.print(f"graph: {written}", highlight=False, soft_wrap=True)
    if samples is not None:
        # A second picture shows the run's processes.
        memory = plot_memory(samples, _beside(out), title=asked.title)
        console.print(f"memory: {memory}", highlight=False, soft_wrap=True)


def _samples(run: Path) -> list[Sample] | None:
    """Return the samples of the run's processes; ``None`` if they are too few for a picture."""
    try:
        found = read_samples(run if run.is_dir() else run.parent)
    except DataError:
        return None
    return found if can_be_drawn(found) else None


def _beside(out: Path) -> Path:
    """Return the path of the second picture, in the directory of the first."""
    return out.with_name(f"memory{'-of-processes' * (out.stem == 'memory')}{out.suffix}")
