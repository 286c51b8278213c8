"""Colours, style and file formats of all pictures."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from allhands.io.files import make_directory, write_whole
from allhands.io.paths import output_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GREY = "#595959"
# Each colour means one thing, in pictures and on pages: a run, a rank, a process that directs the
# ranks, or a phase of a step. Pages are light or dark, so each colour has a contrast of at least 3
# with white and with the background of dark pages. No colour is the only sign: lines have MARKERS
# as well, and bars have words. The first two runs' blue and orange are from Okabe & Ito (2008).
RUNS = ("#0072B2", "#D55E00", "#DC2864", "#00A0A0", "#96965A", "#AA4632")
RANKS = ("#BE1E8C", "#5082FA", "#D27878", "#466E50", "#8C5A78", "#DC6EA0")
DIRECTORS = ("#6B6B6B", "#949494")
# Phases by the monitor's names: label, colour, and pattern of areas in pictures. They are in the
# order of a step; computing is green, waiting for others purple. Phases that are drawn only as
# areas may be paler.
PHASES = {
    "start": ("starting", "#E3D3B4", ""),
    "first": ("first step", "#CBE3C0", ""),
    "load": ("data wait", "#A08400", "..."),
    "compute": ("compute", "#2E8540", ""),
    "reduce": ("reduce", "#8E4CAB", "///"),
    "update": ("update", "#6A9F2A", ""),
    "validate": ("validate", "#AC80C6", "xxx"),
    "save": ("save", "#98601A", "---"),
    "end": ("end", "#C9B7AE", ""),
}
OTHER = "#444444"  # a phase without a name here
# Markers of the first, second, ... run or rank, by Matplotlib's names; pages draw the same shapes.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def palettes() -> dict[str, tuple[str, ...]]:
    """Return the colours of runs, ranks, directors and phases, in their order; the last colour of
    phases is for a phase without a name here.
    """
    phases = (*(colour for _, colour, _ in PHASES.values()), OTHER)
    return {"run": RUNS, "rank": RANKS, "director": DIRECTORS, "phase": phases}


def phase_colour(label: str) -> int:
    """Return the index of the colour of the phase with this label; "update and rest" has the colour
    of updates.
    """
    labels = [one for one, _, _ in PHASES.values()]
    label = "update" if label == "update and rest" else label
    return labels.index(label) if label in labels else len(labels)


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb``, from 0 to 1 (WCAG 2.2)."""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


# Dashes of a line with another meaning than a solid line.
DASHED = (0, (4, 2))
STYLE: dict[str, object] = {
    "font.size": 11,
    "text.parse_math": False,  # a name may hold dollar signs
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "figure.titlesize": 15,
    "figure.titleweight": "bold",
    "legend.frameon": False,
    "legend.fontsize": 10,
}
PICTURES = (".png", ".svg", ".pdf")
# A mark near the beginning or end of every picture that is drawn here, and of no other picture.
DRAWN_HERE = b"allhands, with Matplotlib"


@contextmanager
def picture(
    out: Path, inches: tuple[float, float], *, dpi: int = 100, private: bool = False
) -> Generator[Figure, None, None]:
    """Yield a figure to draw on, and write it to ``out`` at the end of the block, whole or not at
    all.

    It is made without pyplot. The caller's Matplotlib settings have no effect and do not change.

    Args:
        out: the file; ``.png``, ``.svg`` or ``.pdf``; without a suffix it gets ``.png``.
        inches: width and height of the figure.
        private: True if the picture, and directories that are made for it, are for their owner
            alone.

    Raises:
        ConfigError: the suffix names another format, or ``out`` is a directory.
        StorageError: ``out`` cannot be written.
    """
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    out = output_file(out, PICTURES)
    suffix = out.suffix.lower()
    maker = {"Software" if suffix == ".png" else "Creator": DRAWN_HERE.decode()}
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(
            figsize=inches, dpi=dpi, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
        )
        FigureCanvasAgg(figure)
        yield figure
        make_directory(out.parent, private=private)
        kind = suffix.removeprefix(".")
        with warnings.catch_warnings():
            # A name in a script that the font lacks is drawn as boxes.
            warnings.filterwarnings("ignore", "Glyph ")
            write_whole(
                out,
                lambda draft: figure.savefig(draft, format=kind, metadata=maker),
                private=private,
            )
