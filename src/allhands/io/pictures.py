"""Look and formats of all pictures."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from allhands.errors import ConfigError
from allhands.io.files import make_directory, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GREY = "#595959"
# A colour means one thing: a run, a rank, who directs the ranks, or a phase of a step; in pictures
# and on pages, light or dark. So each has a contrast of at least 3 with white and with the dark
# pages' background. None is the only sign: lines have MARKERS as well, and bars have words. The
# blue and orange of the first runs: Okabe & Ito (2008).
RUNS = ("#0072B2", "#D55E00", "#DC2864", "#00A0A0", "#96965A", "#AA4632")
RANKS = ("#BE1E8C", "#5082FA", "#D27878", "#466E50", "#8C5A78", "#DC6EA0")
DIRECTORS = ("#6B6B6B", "#949494")
# As the monitor calls them: what they are called, their colours, and the pattern of their areas in
# pictures. In the order of a step; computing is green, waiting for others purple. Those that are
# drawn as areas alone may be paler.
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
# Of the first, second, ... run or rank: matplotlib's names; the pages draw the same.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def palettes() -> dict[str, tuple[str, ...]]:
    """Return the colours of each kind of thing on a page, in their order; the last phase is any
    without a name here.
    """
    phases = (*(colour for _, colour, _ in PHASES.values()), OTHER)
    return {"run": RUNS, "rank": RANKS, "director": DIRECTORS, "phase": phases}


def phase_colour(label: str) -> int:
    """Return the index of the colour of the phase with this label; updates are also shown together
    with all else.
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


# Dashes of a line that says something else than a solid one.
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
_FORMATS = (".png", ".svg", ".pdf")
# In every picture that is drawn here, near its beginning or its end, and in nobody else's.
DRAWN_HERE = b"allhands, with Matplotlib"


def picture_suffix(path: Path) -> str:
    """``.png``, ``.svg`` or ``.pdf``, as the name of a picture says; PNG without a suffix.

    Raises:
        ConfigError: the suffix names another format, or this is a directory.
    """
    if not path.name or path.name == ".." or os.path.isdir(path):
        raise ConfigError(
            "this is a directory, not a picture's name",
            code="output-name-invalid",
            where=str(path),
            hint="as in DIRECTORY/chart.png",
        )
    suffix = path.suffix.lower() or ".png"
    if suffix not in _FORMATS:
        raise ConfigError(
            f"cannot draw a picture as {suffix!r}",
            code="output-name-invalid",
            where=str(path),
            hint=f"choose a name that ends in {', '.join(_FORMATS)}",
        )
    return suffix


@contextmanager
def picture(
    out: Path, inches: tuple[float, float], *, dpi: int = 100, private: bool = False
) -> Generator[Figure, None, None]:
    """A figure to draw on, which is written to ``out`` at the end of the block, whole or not at
    all.

    It is made without pyplot; Matplotlib's settings of the caller neither count nor change.

    Args:
        out: the file; ``.png``, ``.svg`` or ``.pdf``; PNG without a suffix.
        private: whether the picture, and directories that are made for it, are for their owner
            alone.

    Raises:
        ConfigError: the suffix names another format.
        StorageError: ``out`` cannot be written.
    """
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    suffix = picture_suffix(out)
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
