"""A report as one file of HTML that needs nothing else: style, script and chart library are in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader
from markupsafe import Markup, escape

from allhands.io.pictures import RUNS, luminance, palettes, phase_colour
from allhands.report.charts import Bars
from allhands.report.page import Page

MARK = '<meta name="generator" content="allhands report">'
# On colours of a higher luminance than this, black text stands out more than white text.
_BRIGHT = 0.18
_FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z0-9-]*")
_NARROW = 4.0  # percent of a bar that has no room for a name, on any screen


def to_html(page: Page) -> str:
    """Return the page as HTML; texts of a run are escaped, and a policy in the file lets no script
    but ours run.
    """
    style = asset("uplot/uPlot.min.css") + asset("report.css") + colour_sheet()
    licence = f"/*! uPlot\n{asset('uplot/LICENSE')}\n*/\n"
    script = licence + asset("uplot/uPlot.iife.min.js") + "\n" + asset("charts.js")
    # Only this is not escaped: files of the package, and JSON that holds no character of HTML.
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            page=page,
            mark=Markup(MARK),
            policy=f"default-src 'none'; img-src data:; style-src {_sum(style)}; script-src {_sum(script)}",
            style=Markup(style),
            script=Markup(script),
            charts=Markup(in_script(_charts(page))),
        )
    )


def page_parts(page: Page) -> tuple[str, dict[str, Any]]:
    """Return the HTML between the header and the footer of a page, and its charts; for a page that
    is updated.
    """
    return _environment().get_template("report_body.html.j2").render(page=page), _charts(page)


def _charts(page: Page) -> dict[str, Any]:
    return {chart.key: chart.to_json() for section in page.sections for chart in section.charts}


def _environment() -> Environment:
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(asset)
    )
    environment.filters["flags"] = _flags
    environment.globals.update(bar_parts=_bar_parts, part_class=_part_class, run_class=_run_class)  # pyright: ignore[reportArgumentType]
    return environment


def _flags(text: str) -> Markup:
    """Return the text as HTML in which no line breaks within the name of an option."""
    return Markup(_FLAG.sub(r'<span class="flag">\g<0></span>', str(escape(text))))


def in_script(value: object) -> str:
    """Return JSON for a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def asset(name: str) -> str:
    """Return the text of one of the package's files for the browser."""
    return files("allhands.report").joinpath("web", *name.split("/")).read_text(encoding="utf-8")


def _sum(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def colour_sheet() -> str:
    """Return the colours of runs, ranks and phases as styles: those of the pictures, in light and
    dark pages alike.
    """
    named = [
        (f"{kind}-{place}", colour)
        for kind, some in palettes().items()
        for place, colour in enumerate(some)
    ]
    values = "".join(f" --{name}: {colour.lower()};" for name, colour in named)
    classes = "".join(
        f".c-{name} {{ --ink: var(--{name}); --on: {'#000' if luminance(colour) > _BRIGHT else '#fff'}; }}\n"
        for name, colour in named
    )
    return f"\n:root {{{values} --ink-0: var(--muted); }}\n{classes}.c-ink-0 {{ --ink: var(--muted); }}\n"


def _part_class(name: str) -> str:
    return f"c-phase-{phase_colour(name)}"


def _run_class(place: int) -> str:
    return f"c-run-{place % len(RUNS)}"


def _bar_parts(bars: Bars, row: int) -> list[tuple[str, str, str, str, str]]:
    """Return for each part of a bar: name with share, class, place and width in percent, text."""
    parts = bars.rows[row][1]
    whole = sum(seconds for _, seconds in parts) or 1.0
    placed: list[tuple[str, str, str, str, str]] = []
    place = 0.0
    for name, seconds in parts:
        share = 100 * seconds / whole
        told = name if share >= _NARROW else ""
        placed.append(
            (f"{name}: {share:.0f} %", _part_class(name), f"{place:.3f}", f"{share:.3f}", told)
        )
        place += share
    return placed
