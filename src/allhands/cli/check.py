"""``allhands data check``: the options, and the output on the screen."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from allhands.cli.findings import size_findings, words_of
from allhands.cli.verbs_training import DataCheck, Split
from allhands.config.schema import TrainConfig, build_config
from allhands.data.check import CheckOptions, DataFinding, Examiner, SplitReport, template_findings
from allhands.data.check import check as look
from allhands.data.explained import Explained
from allhands.data.lengths import LengthSummary, percent
from allhands.data.reading import read_rows
from allhands.data.records import ColumnNames, Record, parse_record
from allhands.data.render import Renderer
from allhands.data.rows import RowProblem
from allhands.data.shapes import Example, parse_example, suspicions_of
from allhands.data.splits import RecordSource
from allhands.errors import AllhandsError, DataError
from allhands.io.formatting import counted
from allhands.io.terminal import console_for, counting, print_json, table_of
from allhands.model.load import load_tokenizer
from allhands.model.tokenizer import positions_in
from allhands.run.datasets import chat_of, find_splits
from allhands.runtime.accelerator import detect

# Number of texts of each split that are searched for near duplicates: this takes some seconds, and
# at most 70 MB.
NEAR_LIMIT = 20_000
# Number of characters that are shown at the beginning and at the end of a long stretch.
_SHOWN_CHARACTERS = 600

_SEVERITIES = {"ruins": "ruins the run", "harms": "harms the run", "note": "good to know"}
_COLOURS = {"ruins": "bold red", "harms": "yellow", "note": "cyan"}


def check(asked: DataCheck) -> None:
    """Run the verb."""
    data = {} if asked.data is None else {"data": asked.data}
    config = build_config({**data, **asked.flags}, asked.flags.get("config"))
    sample = ShownSample(asked.show, asked.row or ())
    names = [*Split] if asked.split is None else [asked.split]
    if run_check(config, names, sample, as_json=asked.as_json) and asked.strict:
        raise typer.Exit(DataError.exit_code)


def run_check(
    config: TrainConfig, names: Sequence[str], sample: ShownSample, *, as_json: bool = False
) -> bool:
    """Check the splits ``names``; print the findings, and the examples of ``sample``.

    Returns:
        True if there is a serious problem.

    Raises:
        DataError: the data or the requested split are missing.
        typer.Exit: after the output, with the exit code of :class:`DataError`: lines were
            requested, and none of them was found.
    """
    # Missing data are found before the model is fetched.
    splits, notes = _sources(config, names)
    loaded = load_tokenizer(
        config.model, trust_remote_code=config.trust_remote_code, chat=chat_of(config)
    )
    examiner = Examiner(loaded.tokenizer, _options(config, loaded.path))
    splits[names[0]] = sample.watch(splits[names[0]])
    with counting(100) as count:
        reports, found = look(
            splits,
            examiner,
            report=lambda split, done: count(done, f"{split}: {counted(done, 'row')}"),
        )
    found += [DataFinding("read-as", "note", None, details={"note": note}) for note in loaded.notes]
    found += [DataFinding("read-as", "note", name, details={"note": note}) for name, note in notes]
    if any(set(report.shapes) - {"text"} for report in reports):
        found += template_findings(loaded.tokenizer, reports)
    found += size_findings(
        config, {report.name: report for report in reports}, positions_in(loaded.path)
    )
    shown = [(record, _explained(config, loaded.tokenizer, record)) for record in sample.chosen()]
    found += _missing(names[0], set(sample.lines) - {record.line for record, _ in shown})
    order = list(_SEVERITIES)
    found.sort(key=lambda finding: order.index(finding.severity))
    if as_json:
        print_json(to_json(reports, found, shown), ensure_ascii=False, indent=2)
    else:
        _print_all(config, reports, found, shown, list(examiner.special.values()))
    if sample.lines and not shown:
        raise typer.Exit(DataError.exit_code)
    return any(finding.severity == "ruins" for finding in found)


def _missing(split: str, lines: set[int]) -> list[DataFinding]:
    """Return a finding about requested rows that do not exist, if there are any."""
    rows = [str(line) for line in sorted(lines)]
    return [DataFinding("no-row", "note", split, details={"rows": rows})] if rows else []


def _options(config: TrainConfig, model: Path) -> CheckOptions:
    return CheckOptions(
        max_seq_length=config.max_seq_length,
        mask_prompt=config.mask_prompt,
        train_on=config.train_on,
        batch_size=config.batch_size,
        seed=config.seed,
        packing=config.packing,
        vocab_size=vocabulary_of(model),
        trains_embedding=_trains_embedding(config),
        sizing=detect().sizing(config.micro_batch_tokens, compiled=config.compile != "off"),
        near_limit=NEAR_LIMIT,
    )


def _trains_embedding(config: TrainConfig) -> bool:
    if config.fine_tune_type == "full":
        return config.num_layers in (None, -1)
    # Embeddings have such names in mlx_lm's models: model.embed_tokens, transformer.wte,
    # model.tok_embeddings and so on.
    return any(
        re.search(r"(embed|wte|embedding)[^.]*$", key) for key in config.lora_parameters.keys or ()
    )


def vocabulary_of(model: Path) -> int | None:
    """Return the number of rows in the embedding of the model in this directory; ``None`` if
    config.json does not say, or if there is only a tokenizer.
    """
    file = model / "config.json"
    values = json.loads(file.read_bytes()) if file.is_file() else {}
    for place in (values, values.get("text_config")):
        if isinstance(place, dict) and isinstance(
            size := cast("dict[str, Any]", place).get("vocab_size"), int
        ):
            return size
    return None


# --- the rows -------------------------------------------------------------------------------------


def _sources(
    config: TrainConfig, names: Sequence[str]
) -> tuple[dict[str, Iterator[Example | DataError]], list[tuple[str, str]]]:
    """Return the rows of the splits ``names`` as training would read them, the errors at which it
    would stop, and notes on the reading, each with its split.
    """
    wanted: dict[str, Any] = {
        "train": names != ("test",),
        "test": "test" in names,
        "early_stopping_patience": None,
    }
    chosen = config.model_copy(update={**wanted, "val_batches": -1})
    try:
        found = find_splits(chosen)
    except DataError:
        if len(names) == 1:
            raise
        found = find_splits(chosen.model_copy(update={"test": False}))
    if len(names) == 1 and names[0] not in found:
        raise DataError(
            f"there is no {names[0]} set",
            code="split-missing",
            where="--split",
            hint="leave --split out to check what is there; allhands data prepare makes all three",
        )
    splits = {name: _items(config, name, found.get(name)) for name in names}
    return splits, [(name, note) for name in names if name in found for note in found[name].notes()]


def _items(
    config: TrainConfig, name: str, split: RecordSource | None
) -> Iterator[Example | DataError]:
    if split is None:
        return iter(())
    files = [
        file for end in ("jsonl", "json") if (file := Path(config.data) / f"{name}.{end}").is_file()
    ]
    if files and config.hf_dataset is None and config.data != "demo":
        return _of_file(files[0], ColumnNames.from_options(config.model_dump()))
    return _of_records(split.records())


def _of_records(records: Iterable[Record]) -> Iterator[Example | DataError]:
    try:
        for record in records:
            yield Example(record.kind, record, None, suspicions_of(record))
    except DataError as error:
        yield error


def _of_file(file: Path, columns: ColumnNames) -> Iterator[Example | DataError]:
    for row in read_rows(file):
        if isinstance(row, RowProblem):
            yield row.error()
            continue
        try:
            example = parse_example(
                row.value, columns, source=row.source, line=row.line, empty_texts=True
            )
            if example.record is None:
                # This raises the error with which training refuses preference data.
                parse_record(row.value, columns, source=row.source, line=row.line)
        except DataError as error:
            yield error
        else:
            yield example


class ShownSample:
    """Records spread evenly over a stream of unknown length, and the records of chosen lines."""

    def __init__(self, number: int, lines: Sequence[int]) -> None:
        self._number, self.lines = number, lines
        self._seen, self._stride = 0, 1
        self._spread: list[Record] = []
        self._asked: list[Record] = []

    def watch(self, items: Iterable[Example | DataError]) -> Iterator[Example | DataError]:
        """Yield the same items, and keep some of them."""
        for item in items:
            if not isinstance(item, DataError) and item.record is not None:
                self._add(item.record)
            yield item

    def _add(self, record: Record) -> None:
        if record.line in self.lines:
            self._asked.append(record)
        if self._number and self._seen % self._stride == 0:
            self._spread.append(record)
            if len(self._spread) > 2 * self._number:
                self._spread, self._stride = self._spread[::2], 2 * self._stride
        self._seen += 1

    def chosen(self) -> list[Record]:
        """Return the requested records, then the spread ones, in order."""
        last = len(self._spread) - 1
        steps = max(1, self._number - 1)
        places = (
            sorted({round(i * last / steps) for i in range(self._number)}) if self._spread else []
        )
        return self._asked + [self._spread[i] for i in places]


def _explained(config: TrainConfig, tokenizer: Any, record: Record) -> Explained | AllhandsError:
    limit = None if config.packing else config.max_seq_length
    renderer = Renderer(
        tokenizer, mask_prompt=config.mask_prompt, max_seq_length=limit, train_on=config.train_on
    )
    try:
        return renderer.explain(record)
    except AllhandsError as error:
        return error


# --- the screen -----------------------------------------------------------------------------------

ShownRecord = tuple["Record", "Explained | AllhandsError"]
Kind = Literal["trained", "masked", "cut"]
STYLES: dict[Kind, str] = {"trained": "bold green", "masked": "", "cut": "dim strike"}
# Signs in place of colours, as in wdiff.
SIGNS: dict[Kind, tuple[str, str]] = {
    "trained": ("{+", "+}"),
    "masked": ("", ""),
    "cut": ("[-", "-]"),
}


def to_json(
    reports: Sequence[SplitReport], findings: Sequence[DataFinding], shown: Sequence[ShownRecord]
) -> dict[str, Any]:
    """Return all results as plain JSON values."""
    return {
        "splits": {
            report.name: asdict(report) | {"trained_share": report.trained_share}
            for report in reports
        },
        "findings": [
            asdict(finding) | dict(zip(("message", "remedy"), words_of(finding), strict=True))
            for finding in findings
        ],
        "ruined": any(finding.severity == "ruins" for finding in findings),
        "shown": [
            {
                "where": record.where,
                "runs": [{"kind": kind, "text": text} for kind, text in runs_of(explained)],
            }
            for record, explained in shown
            if not isinstance(explained, AllhandsError)
        ],
    }


def runs_of(explained: Explained) -> list[tuple[Kind, str]]:
    """Return the rendered example in stretches that are trained, masked or cut off, in order."""
    runs: list[tuple[Kind, str]] = [
        ("trained" if trained else "masked", text) for text, trained in explained.runs()
    ]
    runs.append(("cut", explained.cut))
    return [run for run in runs if run[1]]


def _print_all(
    config: TrainConfig,
    reports: Sequence[SplitReport],
    findings: Sequence[DataFinding],
    shown: Sequence[ShownRecord],
    special: Sequence[str],
) -> None:
    console = console_for()
    for report in reports:
        if report.lengths.max or report.bad_rows or report.name == "train":
            _print_split(console, report, config)
    if shown:
        _print_shown(console, shown, special)
    _print_findings(console, findings)


def _print_split(console: Console, report: SplitReport, config: TrainConfig) -> None:
    shapes = ", ".join(f"{shape} {number:,}" for shape, number in report.shapes.items())
    title = f"{report.name}: {counted(report.examples, 'example')}" + (
        f" ({shapes})" if shapes else ""
    )
    console.print(title, style="bold")
    if report.lengths.count:
        console.print(spread_table({"tokens": report.lengths, "trained tokens": report.trained}))
    for name, words in _lines(report, config):
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


def _lines(report: SplitReport, config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield the other lines about a split: name and words."""
    if report.lengths.count:
        yield from _trained(report, config)
    if over := report.lengths.over_limit:
        lost, limit = report.lengths.lost_tokens, config.max_seq_length
        total = counted(report.lengths.count, "example")
        yield "cut off", f"{counted(lost, 'token')} beyond {limit:,}, in {over:,} of {total}"
        if set(report.shapes) != {"text"}:
            part, whole = (report.counts.get(f"answers-{how}", 0) for how in ("cut", "lost"))
            yield "", f"answers: {part:,} lose a part, {whole:,} all"
    elif report.examples and not config.packing:
        yield "cut off", f"nothing, at {counted(config.max_seq_length, 'token')}"
    if report.left_out:
        yield (
            "left out",
            f"{report.left_out:,} of {counted(report.lengths.count, 'example')}, without a trained token",
        )
    if report.bad_rows:
        yield "bad rows", f"{report.bad_rows:,}; training stops at the first"
    if report.name == "train" and report.examples:
        yield from _epoch(report, config)


def _trained(report: SplitReport, config: TrainConfig) -> Iterator[tuple[str, str]]:
    left = " that are left" if report.tokens != report.lengths.total else ""
    whole = f"of {'the ' if left else ''}{counted(report.tokens, 'token')}{left}"
    masked = f"{report.tokens - report.trained.total:,} {whole}"
    yield (
        "trained",
        f"{report.trained.total:,} {whole} ({percent(report.trained.total, report.tokens)})",
    )
    yield (
        "masked",
        masked + ("" if config.mask_prompt else ": the first of each (no --mask-prompt)"),
    )


def _epoch(report: SplitReport, config: TrainConfig) -> Iterator[tuple[str, str]]:
    padding = report.padding
    if padding.rows is None:
        yield (
            "padding",
            f"{padding.share:.0%} of what is computed (in random batches: {padding.random_share:.0%})",
        )
    else:
        yield (
            "padding",
            f"none: {counted(padding.rows, 'row')} of {counted(config.max_seq_length, 'token')}",
        )
    batches = padding.batches_per_epoch
    iters = None if config.iters is None and config.epochs else config.batches(batches)
    passes = (
        f"; {counted(iters, 'iteration')} (--iters): {counted(iters / batches, 'epoch')}"
        if iters
        else ""
    )
    yield "an epoch", f"{counted(batches, 'batch', 'batches')} of {config.batch_size}{passes}"


def _print_findings(console: Console, findings: Sequence[DataFinding]) -> None:
    if not findings:
        console.print("no problems found", style="green")
    for severity, title in _SEVERITIES.items():
        group = [finding for finding in findings if finding.severity == severity]
        if group:
            console.print(title, style=_COLOURS[severity])
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


def _print_shown(console: Console, shown: Sequence[ShownRecord], special: Sequence[str]) -> None:
    coloured = console.color_system is not None and not console.no_color
    legend = Text("legend: ")
    for kind in STYLES:
        legend.append_text(
            run_text(kind, {"cut": "cut off"}.get(kind, kind), special, coloured=coloured)
        ).append("  ")
    console.print(legend)
    for record, explained in shown:
        console.print()
        if isinstance(explained, AllhandsError):
            console.print(f"--- {explained}", style="dim")
            continue
        total = len(explained.tokens) + explained.truncated
        trained = int(explained.mask.sum())
        console.print(
            f"--- {record.where}: {counted(total, 'token')}, {trained:,} trained", style="dim"
        )
        text = Text()
        for kind, words in runs_of(explained):
            text.append_text(run_text(kind, words, special, coloured=coloured))
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
