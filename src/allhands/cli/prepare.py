"""``allhands data prepare``: the options, and the output on the screen."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from allhands.cli.answering import chat_choice
from allhands.cli.parser import refuse_idle
from allhands.cli.verbs_data import DataDemo, DataPrepare
from allhands.data.demo import write_demo_data
from allhands.data.intake import Measure, PrepareOptions
from allhands.data.lengths import bars
from allhands.data.outcome import PrepareOutcome, Reason
from allhands.data.prepare import NothingLeft, check_output
from allhands.data.prepare import prepare as run_prepare
from allhands.data.reading import file_type
from allhands.data.records import ColumnNames
from allhands.data.render import Renderer
from allhands.data.sources import SourceOptions, find_sources
from allhands.data.splitting import SplitShare
from allhands.data.templates import ChatChoice
from allhands.errors import ConfigError
from allhands.io.formatting import counted
from allhands.io.terminal import console_for, counting, table_of

_MAX_SEQ_LENGTH = 2048
_NAME_WIDTH = 31
_MANY = 12
_UPDATE_EVERY = 100
_BARS_WIDTH = 76


def prepare(asked: DataPrepare) -> None:
    """Run the verb."""
    options = _options(asked)
    check_output(asked.out, asked.sources, options.force)
    console = console_for()
    wanted = SourceOptions(
        asked.documents, asked.hub_split, asked.hub_config, asked.streaming, asked.limit
    )
    sources = find_sources(asked.sources, wanted)
    chat = chat_choice(asked.chat_template, asked.system)
    measure = _measure(asked.model, asked.trust_remote_code, chat) if asked.model else None
    try:
        with counting(_UPDATE_EVERY) as count:

            def progress(what: str, done: int, total: int | None) -> None:
                count(done, f"{what}: {done:,}" + (f" of {total:,}" if total else ""))

            outcome = run_prepare(sources, asked.out, options, measure=measure, progress=progress)
    except NothingLeft as error:
        _Screen(console, error.outcome).left_out(None)
        raise
    _Screen(console, outcome).everything(asked)


def data_demo(asked: DataDemo) -> None:
    """Run the verb."""
    counts = write_demo_data(asked.out)
    typer.echo(f"{asked.out}: " + ", ".join(f"{name} {number}" for name, number in counts.items()))


# --- from flags to options ------------------------------------------------------------------------


def _options(flags: DataPrepare) -> PrepareOptions:
    features = flags.features
    if flags.model is None:
        idle = {"--max-seq-length": flags.max_seq_length, "--chat-template": flags.chat_template}
        refuse_idle(idle, "without a model", "add --model, whose tokens are counted")
    columns, typed = _short_columns(flags.column or (), features)
    return PrepareOptions(
        columns={**columns, **features},
        column_flags=typed,
        valid=SplitShare.parse(flags.valid, "--valid") if flags.valid is not None else None,
        test=SplitShare.parse(flags.test, "--test") if flags.test is not None else None,
        split_by=flags.split_by,
        resplit=flags.resplit,
        seed=flags.seed,
        shuffle=flags.shuffle,
        dedupe=cast("Any", flags.dedupe.value),
        near_threshold=flags.near_threshold,
        max_seq_length=flags.max_seq_length or _MAX_SEQ_LENGTH,
        strict=flags.strict,
        force=flags.force,
        merge_system=flags.system == "merge",
    )


def _short_columns(
    given: Sequence[str], features: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the columns of ``--column``, and the flag that named each of them.

    ``["prompt=question"]`` gives ``{"prompt_feature": "question"}`` and ``{"prompt_feature":
    "--column prompt=question"}``.

    Args:
        given: values of ``--column``.
        features: columns from the long flags, ``{"prompt_feature": "question"}``.

    Raises:
        ConfigError: a part is not known, or is mapped twice.
    """
    known = {field.name.removesuffix("_feature"): field.name for field in fields(ColumnNames)}
    known["messages"] = "chat_feature"
    columns: dict[str, str] = {}
    typed: dict[str, str] = {}
    for text in given:
        part, equals, name = text.partition("=")
        if not equals or not name or part.strip() not in known:
            raise ConfigError(
                f"{text!r} is not PART=NAME with a known part",
                code="value-invalid",
                where="--column",
                hint=f"for example --column prompt=question; parts: {', '.join(known)}",
            )
        key, flag = known[part.strip()], f"--column {text}"
        other = typed.get(key) if columns.get(key, name) != name else None
        if key in features:
            other = f"--{key.replace('_', '-')} {features[key]}"
        if other is not None:
            raise ConfigError(
                f"the column of one part is named twice, also by {other}",
                code="option-given-twice",
                where=flag,
                hint="a part has only one column: keep one of the two",
            )
        columns[key], typed[key] = name, flag
    return columns, typed


def _measure(model: str, trust_remote_code: bool, chat: ChatChoice) -> Measure:
    """Return a function that counts the tokens of records with the tokenizer of ``model``."""
    from allhands.model.load import load_tokenizer

    # If system messages are to be merged, the rows are merged already.
    chat = replace(chat, system="template")
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code, chat=chat).tokenizer
    return Renderer(cast("Any", tokenizer), mask_prompt=False, max_seq_length=None).render


# --- the screen -----------------------------------------------------------------------------------


class _Screen:
    """Printer of the outcome, made for terminals of 80 columns or more."""

    def __init__(self, console: Console, outcome: PrepareOutcome) -> None:
        self._console = console
        self._outcome = outcome
        self._folder = _common_folder([source.name for source in outcome.sources])

    def everything(self, flags: DataPrepare) -> None:
        """Print all sections, in order."""
        self._sources()
        self._splits()
        self._duplicates()
        self.left_out(flags.out)
        self._warnings()
        self._lengths(flags)
        self._next(flags)

    def _title(self, text: str) -> None:
        self._console.print()
        self._console.print(Text(text, style="bold"))

    def _say(self, text: str, indent: int = 2) -> None:
        self._console.print(Padding(Text(text), (0, 0, 0, indent), expand=False))

    def _table(
        self, names: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]
    ) -> None:
        table = table_of(
            names, rows, left=[place for place in range(len(names)) if place not in right]
        )
        table.columns[0].min_width = max(len(row[0]) for row in rows)
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
        any_split = any(source.split for source in outcome.sources)
        shown = [
            (
                self._short(source.name),
                f"{source.rows}",
                f"{source.left_out}",
                *([source.split or "-"] if any_split else []),
                "\n".join(f"{shape} {count}" for shape, count in source.shapes.items()) or "-",
            )
            for source in outcome.sources[:_MANY]
        ]
        self._table(
            ("source", "rows", "left out", *(["split"] if any_split else []), "recognised"),
            shown,
            (1, 2),
        )
        if len(outcome.sources) > _MANY:
            self._say(f"and {len(outcome.sources) - _MANY} more, in report.json")

    def _splits(self) -> None:
        outcome = self._outcome
        self._title(f"kept: {counted(outcome.num_kept, 'row')}")
        rows = [
            (name, f"{outcome.kept[name]}", f"{outcome.preference[name]}") for name in outcome.kept
        ]
        with_preference = any(outcome.preference.values())
        names = ("split", "rows", "preference") if with_preference else ("split", "rows")
        self._table(names, [row[: len(names)] for row in rows], (1, 2))
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

    def left_out(self, out: Path | None) -> None:
        """Print the rows that were left out, by reason.

        ``out``: the directory with a list of all of them; ``None``: there is none.
        """
        if not self._outcome.reasons:
            return
        unread = sum(source.unread for source in self._outcome.sources)
        files = f" and {counted(unread, 'file')}" if unread else ""
        self._title(f"left out: {counted(self._outcome.left_out, 'row')}{files}")
        self._reasons(self._outcome.reasons)
        if out is not None:
            self._say(f"all of them: {out / 'left-out.jsonl'}")

    def _warnings(self) -> None:
        if self._outcome.warnings:
            self._title("warnings")
            self._reasons(self._outcome.warnings)

    def _reasons(self, reasons: Sequence[Reason]) -> None:
        for reason in reasons[:_MANY]:
            self._say(f"{reason.count} x {reason.message}")
            more = ", ..." if reason.count > len(reason.places) else ""
            self._say(", ".join(map(self._short, reason.places)) + more, 6)
            if reason.hint:
                self._say(f"what to do: {reason.hint}", 6)
        if len(reasons) > _MANY:
            self._say(f"and {counted(len(reasons) - _MANY, 'more reason')}")

    def _lengths(self, flags: DataPrepare) -> None:
        lengths = self._outcome.lengths
        if lengths is None or not lengths.count:
            return
        self._title(f"lengths in {lengths.unit}")
        self._say(lengths.sentence())
        unicode = (self._console.encoding or "").lower().startswith("utf")
        for line in bars(
            self._outcome.row_lengths, lengths.limit, width=_BARS_WIDTH, ascii=not unicode
        ):
            self._console.print(f"  {line}", no_wrap=True)
        if lengths.unit == "characters":
            self._say("--model MODEL counts tokens, the unit of --max-seq-length")
        elif lengths.over_limit and self._whole_texts(flags):
            self._say(
                "a text file is one row: --documents blank-line makes one of each paragraph; or train with --packing, "
                "which loses nothing"
            )

    def _whole_texts(self, flags: DataPrepare) -> bool:
        """Return True if a text file may have become a single row."""
        files = (Path(source.name) for source in self._outcome.sources if source.rows == 1)
        return flags.documents in ("auto", "file") and any(
            file_type(file) == "text" for file in files
        )

    def _next(self, flags: DataPrepare) -> None:
        self._title("next")
        model, out = flags.model or "MODEL", str(flags.out)
        check = ["allhands", "data", "check", out, "--model", model]
        train = ["allhands", "train", "--model", model, "--data", out]
        if (
            Path(model).is_dir() and not (Path(model) / "config.json").exists()
        ):  # only a tokenizer, for a new model
            train = ["allhands", "pretrain", "--tokenizer", model, "--data", out]
        template = (
            ["--chat-template", flags.chat_template] if flags.chat_template is not None else []
        )
        for command in (
            ([*check, *template], [*train, *template]) if self._outcome.kept["train"] else ()
        ):
            self._console.print(Text(f"  {shlex.join(command)}"), soft_wrap=True)
        if any(self._outcome.preference.values()):
            self._say(
                f"preference data, for methods that learn from it: {flags.out / 'preference'}"
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
