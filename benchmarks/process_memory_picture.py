"""The bars of ``process_memory.py``: models and training below, the corpus on top."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODELS, CORPUS = "#0072B2", "#E69F00"  # Okabe & Ito (2008)
SHORT = {
    "allhands": "allhands",
    "datasets": "datasets",
    "every_rank_loads_all": "every rank\nloads all",
}
WIDTH, STEP, GROUP = 0.82, 1.0, 0.7
LEAST_NAMED = 0.04  # of the highest bar: a part that has room for its number


def draw(found: Mapping[str, Any], titles: Mapping[str, str], out: Path) -> Path:
    """Write the picture, 1200 pixels wide; returns ``out``."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from allhands.io.pictures import STYLE

    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(12, 5.8), dpi=100, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        places = draw_bars(axes, found)
        ways = list(found["found"])
        axes.set_xticks(
            list(places.values()), [SHORT.get(way, titles[way]) for _, way in places], fontsize=9.5
        )
        axes.tick_params(axis="x", length=0)
        for count in found["settings"]["processes"]:
            middle = sum(places[str(count), way] for way in ways) / len(ways)
            words = f"{count} process" + ("es" if count > 1 else "")
            axes.annotate(
                words,
                (middle, 0),
                (0, -44),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=12,
                fontweight="bold",
                annotation_clip=False,
            )
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("memory of all ranks (MiB), each page counted once")
        axes.margins(y=0.1)
        tokens = found["corpus"]["tokens"] / 1e6
        axes.set_title(
            f"Ranks that train together on {tokens:.0f} M tokens", fontweight="bold", pad=12
        )
        handles = [
            Patch(color=CORPUS, label="corpus"),
            Patch(color=MODELS, label="models and training"),
        ]
        axes.legend(handles=handles, loc="upper left", fontsize=11)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out)
    return out


def draw_bars(axes: Any, found: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """A bar for each number of processes and way; returns where they stand."""
    places: dict[tuple[str, str], float] = {}
    x = 0.0
    most = (
        max(one["pss_bytes"] for counts in found["found"].values() for one in counts.values())
        / 2**20
    )
    for count in map(str, found["settings"]["processes"]):
        for way, counts in found["found"].items():
            one = counts[count]
            models, corpus = one["models_bytes"] / 2**20, one["corpus_bytes"] / 2**20
            axes.bar(x, models, WIDTH, color=MODELS)
            axes.bar(x, corpus, WIDTH, bottom=models, color=CORPUS)
            for size, middle, colour in (
                (models, models / 2, "white"),
                (corpus, models + corpus / 2, "#222222"),
            ):
                if size > LEAST_NAMED * most:
                    axes.text(
                        x,
                        middle,
                        f"{size:,.0f}",
                        ha="center",
                        va="center",
                        color=colour,
                        fontsize=9,
                    )
            axes.annotate(
                f"{models + corpus:,.0f}",
                (x, models + corpus),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontweight="bold",
            )
            places[count, way] = x
            x += STEP
        x += GROUP
    return places
