"""Check of a run's data: its splits as training would read them, with the run's model and options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from allhands.config.schema import TrainConfig
from allhands.data.check import (
    CheckOptions,
    DataFinding,
    Examiner,
    Severity,
    SplitReport,
    check,
    template_findings,
)
from allhands.data.explained import Explained
from allhands.data.findings import words_of
from allhands.data.lengths import percent
from allhands.data.reading import read_rows
from allhands.data.records import ColumnNames, Record, parse_record
from allhands.data.render import Renderer
from allhands.data.rows import RowProblem
from allhands.data.shapes import Example, parse_example, suspicions_of
from allhands.data.splits import RecordSource
from allhands.data.splitting import ENOUGH_VALIDATION, LARGE_PART, MANY_EPOCHS
from allhands.errors import AllhandsError, DataError
from allhands.io.formatting import counted
from allhands.io.terminal import counting
from allhands.model.load import load_tokenizer
from allhands.model.tokenizer import config_in, positions_of, vocabulary_of
from allhands.run.datasets import chat_of, find_named
from allhands.runtime.accelerator import detect

# Number of texts of each split that are searched for near duplicates: this takes some seconds, and
# at most 70 MB.
_NEAR_LIMIT = 20_000
_SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True)
class CheckedData:
    """The result of :func:`check_data`.

    Attributes:
        reports: the numbers of each split.
        findings: the findings, the worst first.
        shown: records of the sample, each as training sees it or with the error of its rendering.
        special: texts of the tokenizer's special tokens.
    """

    reports: Sequence[SplitReport]
    findings: Sequence[DataFinding]
    shown: Sequence[tuple[Record, Explained | AllhandsError]]
    special: Sequence[str]

    @property
    def ruined(self) -> bool:
        """True if there is a serious problem."""
        return any(finding.severity == "ruins" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return all results as plain JSON values."""
        return {
            "splits": {
                report.name: asdict(report) | {"trained_share": report.trained_share}
                for report in self.reports
            },
            "findings": [
                asdict(finding) | dict(zip(("message", "remedy"), words_of(finding), strict=True))
                for finding in self.findings
            ],
            "ruined": self.ruined,
            "shown": [
                {
                    "where": record.where,
                    "runs": [{"kind": kind, "text": text} for kind, text in explained.runs()],
                }
                for record, explained in self.shown
                if not isinstance(explained, AllhandsError)
            ],
        }


def check_data(config: TrainConfig, names: Sequence[str], sample: ShownSample) -> CheckedData:
    """Check the splits ``names`` as training would see them; the rows are counted on a terminal.

    Args:
        sample: choice of records of the first split that are shown.

    Raises:
        DataError: the data or the requested split are missing.
        ModelError: the tokenizer is missing or torn.
    """
    # Missing data are found before the model is fetched.
    splits, notes = _sources(config, names)
    loaded = load_tokenizer(
        config.model, trust_remote_code=config.trust_remote_code, chat=chat_of(config)
    )
    described = config_in(loaded.path)
    options = CheckOptions(
        max_seq_length=config.max_seq_length,
        mask_prompt=config.mask_prompt,
        train_on=config.train_on,
        batch_size=config.batch_size,
        seed=config.seed,
        packing=config.packing,
        vocab_size=vocabulary_of(described),
        trains_embedding=_trains_embedding(config),
        sizing=detect().sizing(config.micro_batch_tokens, compiled=config.compile != "off"),
        near_limit=_NEAR_LIMIT,
    )
    examiner = Examiner(loaded.tokenizer, options)
    splits[names[0]] = sample.watch(splits[names[0]])
    with counting(100) as count:
        reports, found = check(
            splits,
            examiner,
            report=lambda split, done: count(done, f"{split}: {counted(done, 'row')}"),
        )
    found += [_read_as(note) for note in loaded.notes] + notes
    if any(set(report.shapes) - {"text"} for report in reports):
        found += template_findings(loaded.tokenizer, reports)
    found += _size_findings(
        config, {report.name: report for report in reports}, positions_of(described)
    )
    tokenizer: Any = loaded.tokenizer
    renderer = Renderer(
        tokenizer,
        mask_prompt=config.mask_prompt,
        max_seq_length=options.limit,
        train_on=config.train_on,
    )
    shown = [(record, _explained(renderer, record)) for record in sample.chosen()]
    if missing := sorted(set(sample.lines) - {record.line for record, _ in shown}):
        details = {"rows": [*map(str, missing)]}
        found.append(DataFinding("no-row", "note", names[0], details=details))
    found.sort(key=lambda finding: _SEVERITIES.index(finding.severity))
    return CheckedData(reports, found, shown, [*examiner.special.values()])


def _read_as(note: str, split: str | None = None) -> DataFinding:
    return DataFinding("read-as", "note", split, details={"note": note})


def _explained(renderer: Renderer, record: Record) -> Explained | AllhandsError:
    try:
        return renderer.explain(record)
    except AllhandsError as error:
        return error


def _trains_embedding(config: TrainConfig) -> bool:
    if config.fine_tune_type == "full":
        return config.num_layers in (None, -1)
    # Embeddings have such names in mlx_lm's models: model.embed_tokens, transformer.wte,
    # model.tok_embeddings and so on.
    return any(
        re.search(r"(embed|wte|embedding)[^.]*$", key) for key in config.lora_parameters.keys or ()
    )


def _size_findings(
    config: TrainConfig, reports: Mapping[str, SplitReport], positions: int | None
) -> Iterator[DataFinding]:
    """Yield findings about sizes: of the splits, of the training, and of the model."""
    train, valid = reports.get("train"), reports.get("valid")
    held = valid.examples if valid is not None else 0
    if 0 < held < ENOUGH_VALIDATION:
        details = {"examples": held, "enough": ENOUGH_VALIDATION}
        yield DataFinding("few-validation", "harms", "valid", details=details)
    # The last token of a row is only a target, so it takes no position.
    rows = [
        min(report.lengths.max, config.max_seq_length) - 1
        for report in reports.values()
        if report.examples
    ]
    longest = config.max_seq_length if config.packing else max(rows, default=0)
    if positions is not None and longest > positions:
        details = {"tokens": longest, "positions": positions}
        yield DataFinding("beyond-positions", "harms", None, details=details)
    if train is None or not train.examples:
        return
    total = held + train.examples
    if held >= LARGE_PART * total:
        yield DataFinding("held-out", "note", "valid", held, total)
    each = train.padding.batches_per_epoch
    epochs = config.batches(each) / each
    if epochs >= MANY_EPOCHS and config.early_stopping_patience is None:
        details = {"epochs": epochs, "iters": config.batches(each), "batch_size": config.batch_size}
        yield DataFinding("many-epochs", "harms", "train", details=details)


# --- the rows -------------------------------------------------------------------------------------


def _sources(
    config: TrainConfig, names: Sequence[str]
) -> tuple[dict[str, Iterator[Example | DataError]], list[DataFinding]]:
    """Return the rows of the splits ``names`` as training would read them, the errors at which it
    would stop, and notes on the reading.
    """
    alone = len(names) == 1
    there = find_named(config, {name: alone or name == "train" for name in names})
    rows = {name: _items(config, name, there.get(name)) for name in names}
    return rows, [_read_as(note, name) for name in there for note in there[name].notes()]


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
        try:
            if isinstance(row, RowProblem):
                raise row.error()
            place: Any = {"source": row.source, "line": row.line}
            example = parse_example(row.value, columns, empty_texts=True, **place)
            if example.record is None:
                # This raises the error with which training refuses preference data.
                parse_record(row.value, columns, **place)
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
            if not isinstance(item, DataError) and (record := item.record) is not None:
                if record.line in self.lines:
                    self._asked.append(record)
                if self._number and self._seen % self._stride == 0:
                    self._spread.append(record)
                    if len(self._spread) > 2 * self._number:
                        self._spread, self._stride = self._spread[::2], 2 * self._stride
                self._seen += 1
            yield item

    def chosen(self) -> list[Record]:
        """Return the requested records, then the spread ones, in order."""
        last = len(self._spread) - 1
        steps = max(1, self._number - 1)
        places = {round(i * last / steps) for i in range(self._number)} if self._spread else ()
        return self._asked + [self._spread[i] for i in sorted(places)]


# --- the numbers of a split in words --------------------------------------------------------------


def told_of(report: SplitReport, config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield further lines about a split: name and words."""
    examples, limit = counted(report.lengths.count, "example"), config.max_seq_length
    if report.lengths.count:
        yield from _trained(report, config)
    if over := report.lengths.over_limit:
        lost = counted(report.lengths.lost_tokens, "token")
        yield "cut off", f"{lost} beyond {limit:,}, in {over:,} of {examples}"
        if set(report.shapes) != {"text"}:
            part, whole = (report.counts.get(f"answers-{how}", 0) for how in ("cut", "lost"))
            yield "", f"answers: {part:,} lose a part, {whole:,} all"
    elif report.examples and not config.packing:
        yield "cut off", f"nothing, at {counted(limit, 'token')}"
    if report.left_out:
        yield "left out", f"{report.left_out:,} of {examples}, without a trained token"
    if report.bad_rows:
        yield "bad rows", f"{report.bad_rows:,}; training stops at the first"
    if report.name == "train" and report.examples:
        yield from _epoch(report, config)


def _trained(report: SplitReport, config: TrainConfig) -> Iterator[tuple[str, str]]:
    total, trained = report.tokens, report.trained.total
    the, left = ("", "") if total == report.lengths.total else ("the ", " that are left")
    whole = f"of {the}{counted(total, 'token')}{left}"
    yield "trained", f"{trained:,} {whole} ({percent(trained, total)})"
    first = "" if config.mask_prompt else ": the first of each (no --mask-prompt)"
    yield "masked", f"{total - trained:,} {whole}{first}"


def _epoch(report: SplitReport, config: TrainConfig) -> Iterator[tuple[str, str]]:
    padding, size = report.padding, counted(config.max_seq_length, "token")
    words = (
        f"{padding.share:.0%} of what is computed (in random batches: {padding.random_share:.0%})"
        if padding.rows is None
        else f"none: {counted(padding.rows, 'row')} of {size}"
    )
    yield "padding", words
    batches = padding.batches_per_epoch
    iters = None if config.iters is None and config.epochs else config.batches(batches)
    passes = (
        f"; {counted(iters, 'iteration')} (--iters): {counted(iters / batches, 'epoch')}"
        if iters
        else ""
    )
    yield "an epoch", f"{counted(batches, 'batch', 'batches')} of {config.batch_size}{passes}"
