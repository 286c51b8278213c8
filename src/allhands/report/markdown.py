"""A report as Markdown: its words and tables; curves as tables, because Markdown draws none."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from allhands.io.terminal import one_line
from allhands.observe.charts import NONE, Grid
from allhands.report.page import Page, RunPart, Section

MARK = "<!-- allhands report -->"
_NUMBER = re.compile(r"[-+<]?\d")
_SPECIAL = re.compile(r"([\\`*_\[\]|~#])")


def to_markdown(page: Page) -> str:
    """Return the page as Markdown; texts of a run are escaped."""
    return "\n".join([MARK, *_lines(page)]) + "\n"


def _lines(page: Page) -> Iterator[str]:
    yield f"# {plain(page.title)}\n"
    for run in page.runs:
        yield from _run(run)
    for section in page.sections:
        yield from _section(section)
    yield f"Made by `allhands report`{f' on {page.made}' if page.made else ''}."


def _run(run: RunPart) -> Iterator[str]:
    yield f"## {plain(run.label)}: {run.status}\n"
    if run.reason:
        yield f"{plain(run.reason)}\n"
    yield from (f"- **{one.level}**: {plain(one.text)}" for one in run.judgements)
    yield from (f"- {plain(note)}" for note in run.notes)
    yield ""


def _section(section: Section) -> Iterator[str]:
    yield f"## {plain(section.title)}\n"
    if section.told and section.key == "times":  # in others it says how a chart is read
        yield f"{plain(section.told)}\n"
    for chart in section.charts:
        yield f"**{plain(chart.title)}.** {plain(chart.described)}\n"
        if chart.key in ("loss-steps",):
            yield from _grid(chart.table)
    for bars in section.bars:
        yield f"**{plain(bars.title)}.** {plain(bars.described)}\n"
        yield from _grid(bars.table)
    for grid in section.grids:
        yield f"**{plain(grid.caption)}**\n"
        yield from _grid(grid)


def _grid(grid: Grid) -> Iterator[str]:
    yield _row(grid.head)
    columns = list(zip(*grid.rows, strict=True))[1:]
    yield "| --- |" + "".join(" ---: |" if _numeric(cells) else " --- |" for cells in columns)
    yield from map(_row, grid.rows)
    yield ""


def _numeric(cells: tuple[str, ...]) -> bool:
    """Return true if all filled cells of a column begin as numbers; units may follow."""
    return all(_NUMBER.match(cell) for cell in cells if cell not in ("", NONE))


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(map(plain, cells))} |"


def plain(text: str) -> str:
    """Return the text on one line, escaped for Markdown, the HTML in it and a terminal."""
    return _SPECIAL.sub(r"\\\1", html.escape(one_line(text), quote=False))
