"""Loss against time for each row of records of ``slow_links.py``: what a row costs in loss, and
what it gains in time.

    python benchmarks/slow_links_picture.py docs/images/slow-links.png
    benchmarks/results/slow_links-*.json

Losses are of runs without a limit. A row's step takes the same tokens over every link, so that its
curve over a link is drawn at the speed that was measured there; a row needs a curve and a speed in
the records to be drawn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slow_links import LINKS, NAMES, ROWS

WORK = "pretrain"
# Okabe & Ito (2008), in the order of ROWS; each seven rows have a style of line of their own.
COLOURS = ("#000000", "#56B4E9", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#D55E00")
STYLES = ("-", "--", ":")


def collect(
    records: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Curves by row, and tokens a second by link and row; of several the last one that was given."""
    curves: dict[str, Any] = {}
    speeds: dict[str, dict[str, float]] = {}
    for record in records:
        found = record["details"]
        curves |= {row: run["curve"] for row, run in found["losses"].get(WORK, {}).items()}
        for link, by_row in found["speeds"].get(WORK, {}).items():
            for row, runs in by_row.items():
                if (
                    runs and record["settings"]["iters"] == 0
                ):  # speeds of their own, not those beside a loss
                    speeds.setdefault(link, {})[row] = sorted(run["tokens_per_s"] for run in runs)[
                        len(runs) // 2
                    ]
    return curves, speeds


def draw(records: Sequence[Mapping[str, Any]], out: Path, links: Sequence[str]) -> Path:
    """Write the picture, 1400 pixels wide; returns ``out``."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    from allhands.io.pictures import STYLE

    curves, speeds = collect(records)
    tokens = records[0]["settings"]["batch_size"] * records[0]["settings"]["block_size"]
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(14, 6.4), dpi=100, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        for axes, link in zip(
            figure.subplots(1, len(links), sharey=True, squeeze=False)[0], links, strict=True
        ):
            for number, row in enumerate(ROWS):
                if row in curves and row in speeds.get(link, {}):
                    step_s = tokens / speeds[link][row]
                    points = [(step * step_s / 60, loss) for step, loss, *_ in curves[row] if step]
                    look = {
                        "color": COLOURS[number % len(COLOURS)],
                        "linestyle": STYLES[number // len(COLOURS)],
                    }
                    name = (
                        " ".join(ROWS[row]) or row
                    )  # the options, as the tables of the page have them
                    axes.plot(
                        *zip(*points, strict=True), **look, marker="o", markersize=4, label=name
                    )
            axes.set_title(NAMES[link], fontweight="bold", pad=12)
            axes.set_xlabel("minutes (logarithmic)")
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda minutes, _: f"{minutes:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        figure.axes[0].set_ylabel("validation loss")
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=3,
            fontsize=11,
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out)
    return out


def main() -> None:
    """Draw the records that are named."""
    parser = argparse.ArgumentParser(
        description="Loss against time for each row of records of slow_links.py."
    )
    parser.add_argument("picture", type=Path)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument(
        "--links", nargs="+", choices=tuple(LINKS), default=("none", "100mbit", "20mbit")
    )
    options = parser.parse_args()
    records = [json.loads(path.read_text(encoding="utf-8")) for path in options.records]
    print(draw(records, options.picture, options.links))


if __name__ == "__main__":
    main()
