"""``allhands data check``: the options, and the output on the screen."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from allhands.cli.verbs_training import DataCheck, Split
from allhands.config.schema import TrainConfig, build_config
from allhands.data.check import DataFinding, SplitReport
from allhands.data.explained import Kind
from allhands.data.findings import words_of
from allhands.data.lengths import LengthSummary
from allhands.errors import AllhandsError, DataError
from allhands.io.formatting import counted
from allhands.io.terminal import console_for, print_json, table_of
from allhands.run.checking import CheckedData, ShownSample, check_data, told_of

# Number of characters that are shown at the beginning and at the end of a long stretch.
_SHOWN_CHARACTERS = 600

# Title and colour of the findings of each severity.
_TITLES = {
    "ruins": ("ruins the run", "bold red"),
    "harms": ("harms the run", "yellow"),
    "note": ("good to know", "cyan"),
}
STYLES: dict[Kind, str] = {"trained": "bold green", "masked": "", "cut": "dim strike"}
# Signs in place of colours, as in wdiff.
SIGNS: dict[Kind, tuple[str, str]] = {
    "trained": ("{+", "+}"),
    "masked": ("", ""),
    "cut": ("[-", "-]"),
}


def check(asked: DataCheck) -> None:
    """Run the verb."""
    data = {} if asked.data is None else {"data": asked.data}
    config = build_config({**data, **asked.flags}, asked.flags.get("config"))
    sample = ShownSample(asked.show, asked.row or ())
    found = check_data(config, [*Split] if asked.split is None else [asked.split], sample)
    if asked.as_json:
        print_json(found.to_json(), ensure_ascii=False, indent=2)
    else:
        _print_all(found, config)
    if (asked.row and not found.shown) or (asked.strict and found.ruined):
        raise typer.Exit(DataError.exit_code)


def _print_all(found: CheckedData, config: TrainConfig) -> None:
    console = console_for()
    for report in found.reports:
        if report.lengths.max or report.bad_rows or report.name == "train":
            _print_split(console, report, config)
    if found.shown:
        _print_shown(console, found)
    _print_findings(console, found.findings)


def _print_split(console: Console, report: SplitReport, config: TrainConfig) -> None:
    shapes = ", ".join(f"{shape} {number:,}" for shape, number in report.shapes.items())
    more = f" ({shapes})" if shapes else ""
    console.print(f"{report.name}: {counted(report.examples, 'example')}{more}", style="bold")
    if report.lengths.count:
        console.print(spread_table({"tokens": report.lengths, "trained tokens": report.trained}))
    for name, words in told_of(report, config):
        console.print(f"  {name:15}  {words}")
    console.print()


def spread_table(spreads: Mapping[str, LengthSummary]) -> Table:
    """Return a table with a line for each of ``spreads``."""
    rows = [
        (
            f"  {name:15}",
            f"{s.min:,}",
            f"{s.median:,.1f}",
            f"{s.mean:,.1f}",
            f"{s.max:,}",
            f"{s.total:,}",
        )
        for name, s in spreads.items()
    ]
    return table_of(("", "min", "median", "mean", "max", "total"), rows)


def _print_findings(console: Console, findings: Sequence[DataFinding]) -> None:
    if not findings:
        console.print("no problems found", style="green")
    for severity, group in groupby(findings, attrgetter("severity")):
        title, colour = _TITLES[severity]
        console.print(title, style=colour)
        for finding in group:
            split = f"{finding.split}: " if finding.split else ""
            message, remedy = words_of(finding)
            _say(console, split + message, 2)
            if finding.places:
                more = ", ..." if finding.count > len(finding.places) else ""
                _say(console, ", ".join(finding.places) + more, 6, "dim")
            if remedy:
                _say(console, f"what to do: {remedy}", 6)


def _say(console: Console, words: str, indent: int, style: str = "") -> None:
    """Print a paragraph; its further lines are indented by six."""
    wrapper = textwrap.TextWrapper(console.width - 1, " " * indent, " " * 6, break_on_hyphens=False)
    console.print(wrapper.fill(words), style=style, soft_wrap=True)


def _print_shown(console: Console, found: CheckedData) -> None:
    coloured = console.color_system is not None and not console.no_color

    def styled(kind: Kind, words: str) -> Text:
        return run_text(kind, words, found.special, coloured=coloured)

    legend = Text("legend: ")
    for kind in STYLES:
        legend.append_text(styled(kind, "cut off" if kind == "cut" else kind)).append("  ")
    console.print(legend)
    for record, explained in found.shown:
        console.print()
        if isinstance(explained, AllhandsError):
            console.print(f"--- {explained}", style="dim")
            continue
        total = len(explained.tokens) + explained.truncated
        trained = int(explained.mask.sum())
        console.print(
            f"--- {record.where}: {counted(total, 'token')}, {trained:,} trained", style="dim"
        )
        text = Text().join(styled(*run) for run in explained.runs())
        console.print(text, soft_wrap=True, end="" if text.plain.endswith("\n") else "\n")
    console.print()


def run_text(kind: Kind, words: str, special: Sequence[str], *, coloured: bool) -> Text:
    """Return a stretch of an example for the screen; special tokens stand out, and the middle of a
    long stretch is left out.
    """
    if len(words) > 3 * _SHOWN_CHARACTERS:
        left_out = f" [... {len(words) - 2 * _SHOWN_CHARACTERS:,} characters ...] "
        words = words[:_SHOWN_CHARACTERS] + left_out + words[-_SHOWN_CHARACTERS:]
    if not coloured:
        opening, closing = SIGNS[kind]
        return Text(f"{opening}{words}{closing}")
    text = Text(words, style=STYLES[kind])
    if special:
        text.highlight_regex(
            "|".join(map(re.escape, special)), "underline" if kind == "trained" else "magenta"
        )
    return text
