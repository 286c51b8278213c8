"""What all pictures have in common: their look, and the formats in which they can be written."""

from __future__ import annotations

import os
from pathlib import Path

from allhands.errors import ConfigError

GREY = "#595959"
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
    "legend.frameon": False,
    "legend.fontsize": 10,
}
_FORMATS = (".png", ".svg", ".pdf")


def picture_suffix(path: Path) -> str:
    """``.png``, ``.svg`` or ``.pdf``, as the name of a picture says; PNG without a suffix.

    Raises:
        ConfigError: the suffix names another format, or this is a directory.
    """
    if not path.name or path.name == ".." or os.path.isdir(path):
        raise ConfigError(
            "this is a directory, not a picture's name", where=str(path), hint="as in DIRECTORY/chart.png"
        )
    suffix = path.suffix.lower() or ".png"
    if suffix not in _FORMATS:
        hint = f"choose a name that ends in {', '.join(_FORMATS)}"
        raise ConfigError(f"cannot draw a picture as {suffix!r}", where=str(path), hint=hint)
    return suffix
