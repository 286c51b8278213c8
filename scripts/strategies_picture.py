"""What each of four ranks holds and computes under every way of dividing a training, as one
picture.

    python scripts/strategies_picture.py docs/images/who-holds-what.png

Blocks A to D are squares: a part of a matrix's rows is a band, a part of its columns a strip.
Weights, gradients and the optimizer's state are three columns; below are the rows of a batch, from
left to right their tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.patches import Rectangle

from allhands.io.pictures import GREY, RANKS, picture

NUM_RANKS, BLOCKS = 4, "ABCD"
# Left, right, top and bottom of what a rank has of a square: 0 to 1.
Part = tuple[float, float, float, float]
WHOLE: Part = (0.0, 1.0, 0.0, 1.0)
_ATTENTION = 0.3  # of a block of a mixture: what is not in experts


@dataclass(frozen=True)
class Way:
    """A way of dividing.

    Attributes:
        flags: what asks for it; ``name``: what it is called.
        weights: function of rank and block that returns the parts that the rank has, also of the
            gradients.
        states: the same for the optimizer's state; ``None``: as the weights.
        batch: function of rank and row that returns the part of the row that the rank computes.
    """

    name: str
    flags: str
    weights: Callable[[int, int], list[Part]]
    batch: Callable[[int, int], list[Part]]
    states: Callable[[int, int], list[Part]] | None = None


def band(place: int, count: int) -> Part:
    """Return one of so many parts of a square's rows."""
    return 0.0, 1.0, place / count, (place + 1) / count


def strip(place: int, count: int) -> Part:
    """Return one of so many parts of a square's columns."""
    return place / count, (place + 1) / count, 0.0, 1.0


def only(here: bool, part: Part = WHOLE) -> list[Part]:
    return [part] if here else []


def whole(rank: int, block: int) -> list[Part]:
    return [WHOLE]


def own_row(rank: int, row: int) -> list[Part]:
    return only(row == rank)


def every_row(rank: int, row: int) -> list[Part]:
    return [WHOLE]


def some_experts(rank: int, block: int) -> list[Part]:
    top, bottom = rank / NUM_RANKS, (rank + 1) / NUM_RANKS
    return [(0.0, _ATTENTION, 0.0, 1.0), (_ATTENTION, 1.0, top, bottom)]


WAYS = (
    Way("data parallel", "--strategy data", whole, own_row),
    Way(
        "optimizer divided",
        "--strategy zero1",
        whole,
        own_row,
        lambda rank, block: [band(rank, NUM_RANKS)],
    ),
    Way("fully sharded", "--strategy fsdp", lambda rank, block: [band(rank, NUM_RANKS)], own_row),
    Way("pipeline", "--strategy pipeline", lambda rank, block: only(block == rank), every_row),
    Way("tensor parallel", "--tp 4", lambda rank, block: [strip(rank, NUM_RANKS)], every_row),
    Way("expert parallel", "--ep 4", some_experts, own_row),
    Way("context parallel", "--cp 4", whole, lambda rank, row: [strip(rank, NUM_RANKS)]),
    Way(
        "fully sharded, tensor parallel",
        "--strategy fsdp --tp 2",
        lambda rank, block: [
            (rank % 2 / 2, rank % 2 / 2 + 0.5, rank // 2 / 2, rank // 2 / 2 + 0.5)
        ],
        lambda rank, row: only(row // 2 == rank // 2),
    ),
    Way(
        "pipeline, tensor parallel",
        "--strategy pipeline --tp 2",
        lambda rank, block: only(block // 2 == rank // 2, strip(rank % 2, 2)),
        every_row,
    ),
    Way(
        "pipeline, arrays divided",
        "--strategy pipeline --dp-shard 2",
        lambda rank, block: only(block // 2 == rank % 2, band(rank // 2, 2)),
        lambda rank, row: only(row // 2 == rank // 2),
    ),
)

_SIDE, _GAP, _RANK = 1.0, 0.16, 4.3


def draw(out: Path) -> Path:
    """Write the picture; its path."""
    with picture(out, (11.0, 14.5), dpi=100) as figure:
        axes: Any = figure.subplots(-(-len(WAYS) // 2), 2)
        for way, place in zip(WAYS, axes.flat, strict=True):
            _panel(place, way)
    return out


def _panel(axes: Any, way: Way) -> None:
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.set(xlim=(-0.7, NUM_RANKS * _RANK), ylim=(7.6, -1.0))
    axes.set_title(f"{way.name}: {way.flags}", fontsize=11.5, loc="left", fontweight="bold")
    for rank in range(NUM_RANKS):
        left = rank * _RANK
        axes.text(
            left + 1.66,
            -0.55,
            f"rank {rank}",
            ha="center",
            fontsize=9.5,
            color=RANKS[rank],
            fontweight="bold",
        )
        for column, (letter, parts) in enumerate(
            (("W", way.weights), ("G", way.weights), ("O", way.states or way.weights))
        ):
            at = left + column * (_SIDE + _GAP)
            for block, name in enumerate(BLOCKS):
                _square(axes, at, block * (_SIDE + _GAP), 1.0, parts(rank, block), RANKS[rank])
                if rank == 0 and column == 0:
                    axes.text(
                        -0.2,
                        block * (_SIDE + _GAP) + 0.5,
                        name,
                        ha="right",
                        va="center",
                        fontsize=9,
                        color=GREY,
                    )
            axes.text(at + 0.5, 4.95, letter, ha="center", va="center", fontsize=8.5, color=GREY)
        for row in range(NUM_RANKS):
            _square(
                axes,
                left,
                5.45 + row * 0.5,
                0.36,
                way.batch(rank, row),
                RANKS[rank],
                wide=3 * _SIDE + 2 * _GAP,
            )
    axes.text(-0.2, 6.4, "batch", ha="right", va="center", fontsize=8, color=GREY, rotation=90)


def _square(
    axes: Any,
    left: float,
    top: float,
    high: float,
    parts: list[Part],
    colour: str,
    *,
    wide: float = _SIDE,
) -> None:
    axes.add_patch(
        Rectangle((left, top), wide, high, facecolor="#F4F4F4", edgecolor="#BDBDBD", linewidth=0.7)
    )
    for start, stop, above, below in parts:
        size = (stop - start) * wide, (below - above) * high
        axes.add_patch(
            Rectangle(
                (left + start * wide, top + above * high), *size, facecolor=colour, linewidth=0
            )
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    print(draw(parser.parse_args().out))
