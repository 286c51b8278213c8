"""The outcome of ``allhands data prepare`` on the screen."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from allhands.cli.verbs_data import DataPrepare
from allhands.data.lengths import bars
from allhands.data.outcome import PrepareOutcome, Reason
from allhands.data.prepare import PREFERENCE
from allhands.data.reading import file_type
from allhands.data.sources import LEFT_OUT
from allhands.io.formatting import counted
from allhands.io.terminal import table_of

_NUMBERS = ("rows", "left out", "preference")  # columns that are aligned to the right
_NAME_WIDTH = 31
_MANY = 12
_BARS_WIDTH = 76


class Screen:
    """Printer of the outcome, made for terminals of 80 columns or more."""

    def __init__(self, console: Console, outcome: PrepareOutcome, asked: DataPrepare) -> None:
        self._console, self._outcome, self._asked = console, outcome, asked
        self._folder = _common_folder([source.name for source in outcome.sources])

    def everything(self) -> None:
        """Print all sections, in order."""
        self._sources()
        self._splits()
        self._duplicates()
        self.left_out(written=True)
        if self._outcome.warnings:
            self._title("warnings")
            self._reasons(self._outcome.warnings)
        self._lengths()
        self._next()

    def _title(self, text: str) -> None:
        self._console.print()
        self._console.print(Text(text, style="bold"))

    def _say(self, text: str, indent: int = 2) -> None:
        self._console.print(Padding(Text(text), (0, 0, 0, indent), expand=False))

    def _table(self, columns: Mapping[str, Sequence[str]]) -> None:
        """Print a table, without columns in which nothing is told."""
        told = {name: cells for name, cells in columns.items() if any(cells)}
        left = [place for place, name in enumerate(told) if name not in _NUMBERS]
        table = table_of([*told], zip(*told.values(), strict=True), left=left)
        table.columns[0].min_width = max(map(len, next(iter(told.values()))))
        self._console.print(Padding(table, (0, 0, 0, 2), expand=False))

    def _short(self, name: str) -> str:
        """Return a name without the common folder; if it is long, only its end, which says most."""
        name = name.removeprefix(self._folder)
        return name if len(name) <= _NAME_WIDTH else "…" + name[-_NAME_WIDTH + 1 :]

    def _sources(self) -> None:
        outcome = self._outcome
        self._title(f"read: {counted(outcome.rows_read, 'row')}")
        if self._folder:
            self._say(f"names are those in {self._folder}")
        shown = outcome.sources[:_MANY]
        any_split = any(source.split for source in outcome.sources)
        shapes = (
            "\n".join(f"{shape} {count}" for shape, count in source.shapes.items()) or "-"
            for source in shown
        )
        self._table(
            {
                "source": [self._short(source.name) for source in shown],
                "rows": [f"{source.rows}" for source in shown],
                "left out": [f"{source.left_out}" for source in shown],
                "split": [source.split or "-" for source in shown if any_split],
                "recognised": [*shapes],
            }
        )
        if len(outcome.sources) > _MANY:
            self._say(f"and {len(outcome.sources) - _MANY} more, in report.json")

    def _splits(self) -> None:
        outcome = self._outcome
        self._title(f"kept: {counted(outcome.num_kept, 'row')}")
        preference = outcome.preference if any(outcome.preference.values()) else {}
        self._table(
            {
                "split": [*outcome.kept],
                "rows": [*map(str, outcome.kept.values())],
                "preference": [*map(str, preference.values())],
            }
        )
        for note in outcome.notes:
            self._say(note)

    def _duplicates(self) -> None:
        found = self._outcome.duplicates
        if not found.exact + found.near:
            return
        self._title(f"duplicates: {found.exact} exact, {found.near} near, {found.removed} removed")
        for pair, count in found.across.items():
            own, other = pair.split(", ")
            self._say(
                f"{counted(count, 'row')} of {own} {'is' if count == 1 else 'are'} also in {other}"
            )
        for twin in found.examples:
            like = "repeats" if twin.similarity >= 1 else f"is {twin.similarity:.0%} like"
            self._say(f"{self._short(twin.row)} {like} {self._short(twin.of)}")
        if not found.removed:
            self._say("--dedupe exact or --dedupe near drops them")

    def left_out(self, *, written: bool) -> None:
        """Print the rows that were left out, by reason; if ``written``, with the list of them."""
        outcome = self._outcome
        if not outcome.reasons:
            return
        unread = sum(source.unread for source in outcome.sources)
        files = f" and {counted(unread, 'file')}" if unread else ""
        self._title(f"left out: {counted(outcome.left_out, 'row')}{files}")
        self._reasons(outcome.reasons)
        if written:
            self._say(f"all of them: {self._asked.out / LEFT_OUT}")

    def _reasons(self, reasons: Sequence[Reason]) -> None:
        for reason in reasons[:_MANY]:
            self._say(f"{reason.count} x {reason.message}")
            more = ", ..." if reason.count > len(reason.places) else ""
            self._say(", ".join(map(self._short, reason.places)) + more, 6)
            if reason.hint:
                self._say(f"what to do: {reason.hint}", 6)
        if len(reasons) > _MANY:
            self._say(f"and {counted(len(reasons) - _MANY, 'more reason')}")

    def _lengths(self) -> None:
        lengths = self._outcome.lengths
        if lengths is None or not lengths.count:
            return
        self._title(f"lengths in {lengths.unit}")
        self._say(lengths.sentence())
        plain = not (self._console.encoding or "").lower().startswith("utf")
        for line in bars(self._outcome.row_lengths, lengths.limit, width=_BARS_WIDTH, ascii=plain):
            self._console.print(f"  {line}", no_wrap=True)
        if lengths.unit == "characters":
            self._say("--model MODEL counts tokens, the unit of --max-seq-length")
        elif lengths.over_limit and self._whole_texts():
            self._say(
                "a text file is one row: --documents blank-line makes one of each paragraph; or train with --packing, "
                "which loses nothing"
            )

    def _whole_texts(self) -> bool:
        """Return True if a text file may have become a single row."""
        return self._asked.documents in ("auto", "file") and any(
            source.rows == 1 and file_type(Path(source.name)) == "text"
            for source in self._outcome.sources
        )

    def _next(self) -> None:
        self._title("next")
        model, out = self._asked.model or "MODEL", str(self._asked.out)
        train = ["train", "--model", model, "--data", out]
        if (
            Path(model).is_dir() and not (Path(model) / "config.json").exists()
        ):  # only a tokenizer, for a new model
            train = ["pretrain", "--tokenizer", model, "--data", out]
        chat = self._asked.chat_template
        template = [] if chat is None else ["--chat-template", chat]
        if self._outcome.kept["train"]:
            for command in (["data", "check", out, "--model", model], train):
                line = shlex.join(["allhands", *command, *template])
                self._console.print(f"  {line}", soft_wrap=True)
        if any(self._outcome.preference.values()):
            self._say(
                f"preference data, for methods that learn from it: {self._asked.out / PREFERENCE}"
            )


def _common_folder(names: Sequence[str]) -> str:
    """Return the common folder of all files, with a slash at its end; empty if there is none, or if
    a source is no file.
    """
    if not all(os.path.exists(name) for name in names):
        return ""
    try:
        folder = os.path.commonpath([os.path.dirname(name) for name in names])
    except ValueError:  # absolute and relative names
        return ""
    return folder.rstrip(os.sep) + os.sep if folder.strip(os.sep) else ""
