"""The curves of a record of ``pretrain.py``.

python benchmarks/pretrain_picture.py benchmarks/results/pretrain-DATE.json
docs/images/pretraining-gpu.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain import TITLES

COLOURS = {
    "allhands": "#0072B2",
    "torch": "#E69F00",
    "torch-compiled": "#009E73",
}  # Okabe & Ito (2008)


def draw(record: Mapping[str, Any], out: Path) -> Path:
    """Write the picture, 1200 pixels wide; returns ``out``."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from allhands.io.pictures import STYLE

    settings, found = record["settings"], record["details"]["found"]
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(12, 5.4), dpi=100, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for peer, one in found.items():
            if "error" in one:
                continue
            colour = COLOURS[peer]
            axes.plot(
                *zip(*one["curve"], strict=True),
                color=colour,
                linewidth=1,
                alpha=0.6,
                linestyle="--",
            )
            label = f"{TITLES[peer]}: {one['valid_loss']:.2f} at the end"
            axes.plot(
                *zip(*one["valid_curve"], strict=True),
                color=colour,
                linewidth=2,
                marker="o",
                label=label,
            )
        axes.set_xlabel("batch")
        axes.set_ylabel("loss (validation; dashed: training)")
        gpus = record["environment"]["machine"]["gpus"]
        where = gpus[0].partition(",")[0] if gpus else "processes of a CPU"
        batch = f"batches of {settings['batch_size']} x {settings['block_size']} tokens"
        title = f"{settings['shape']} on {settings['ranks']} x {where}, {batch}"
        axes.set_title(title, fontweight="bold", pad=12)
        axes.legend(loc="upper right", fontsize=11)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out)
    return out


def main() -> None:
    """Draw the record that is named."""
    parser = argparse.ArgumentParser(description="The curves of a record of pretrain.py.")
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    print(draw(json.loads(options.record.read_text(encoding="utf-8")), options.picture))


if __name__ == "__main__":
    main()
