"""The answers of a data set in another style: for teaching a model a manner of speaking.

Only what the assistant says is changed, by the rules of :mod:`allhands.data.styles`; questions, system messages,
tool calls and tools' answers stay as they are. The result is a training folder, or one file, whole or absent.
"""

from __future__ import annotations

import os
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from allhands.data.outcome import LeftOut, Reason
from allhands.data.prepare import check_output
from allhands.data.records import ColumnNames, Record
from allhands.data.rows import Row, RowProblem
from allhands.data.shapes import Example, json_line, parse_example
from allhands.data.styles import RuleSet
from allhands.data.styles.engine import Styler, keyed_number
from allhands.errors import ConfigError, DataError
from allhands.io.files import make_directory, write_whole
from allhands.io.staging import publish, publishing, staging

if TYPE_CHECKING:
    from allhands.data.sources import Source

SPLITS = ("train", "valid", "test")
NUM_SAMPLES = 3
NUM_TEXTS = 2000


@dataclass(frozen=True)
class StyleOptions:
    """Options of ``allhands data style``, by flag name.

    Attributes:
        mix: share of the records, 0 to 1, that stay as they are.
        system: added to the system message of every record that is styled, so that the style comes on request.
        columns: a column mapping, as {"prompt_feature": "question"}.
    """

    seed: int = 0
    mix: float = 0.0
    system: str | None = None
    strict: bool = False
    force: bool = False
    columns: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, order=True)
class Shown:
    """An answer before and after. ``rank`` orders them at random, but always alike."""

    rank: int
    question: str
    before: str
    after: str


@dataclass
class StyleReport:
    """What was done.

    Attributes:
        records: written, by split; ``unmixed`` of them stay as they are because of ``mix``.
        answers: of the records that were styled; ``changed`` of them differ now.
        words: of those answers; ``words_changed`` of them a rule replaced.
        rules: how often each rule applied; ``opening`` and ``closing`` are among them.
        skipped: files of a directory that are no data, each with the reason.
        num_left_out: rows that have no answer or cannot be read, by ``reasons``.
        samples: some answers before and after.
        texts: up to ``NUM_TEXTS`` answers before and after, for scores.
    """

    records: dict[str, int] = field(default_factory=dict[str, int])
    unmixed: int = 0
    answers: int = 0
    changed: int = 0
    words: int = 0
    words_changed: int = 0
    rules: Counter[str] = field(default_factory=Counter[str])
    skipped: list[str] = field(default_factory=list[str])
    num_left_out: int = 0
    reasons: list[Reason] = field(default_factory=list[Reason])
    samples: list[Shown] = field(default_factory=list[Shown])
    texts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def style_data(rules: RuleSet, sources: Sequence[Source], out: Path, options: StyleOptions) -> StyleReport:
    """Write the records of ``sources`` with their answers restyled.

    Args:
        out: a directory for train.jsonl, valid.jsonl and test.jsonl (a source without a split is training
            data) and left-out.jsonl, or one file whose name ends in .jsonl.

    Raises:
        ConfigError: ``out`` is in use, holds a source, or is one file for several splits.
        DataError: no record has an answer; with ``strict``, the first row that cannot be styled.
        StorageError: it cannot be written.
    """
    _check_options(options)
    if out.suffix != ".jsonl":
        return _style_folder(_StyleJob(rules, sources, options), out)
    check_output_file(out, sources, options.force)
    job = _StyleJob(rules, sources, options)
    if len(job.splits) > 1:
        hint = "name a directory (without .jsonl), or style one of the files"
        raise ConfigError(f"one file cannot hold {' and '.join(job.splits)}", where=f"--out {out}", hint=hint)
    make_directory(out.parent)
    write_whole(out, job.write_file)
    return job.report


def _style_folder(job: _StyleJob, out: Path) -> StyleReport:
    check_output(out, [source.name for source in job.sources], job.options.force)
    with staging(out) as staged:
        with (staged / "left-out.jsonl").open("wb") as file:
            left_out = LeftOut(file)
            for split in job.splits:
                path = staged / f"{split}.jsonl"
                if not job.write(split, path, left_out):
                    path.unlink()
        job.finish(left_out)
        if not job.report.num_left_out:
            (staged / "left-out.jsonl").unlink()
        with publishing(out):
            # Another run may have written there meanwhile.
            check_output(out, [source.name for source in job.sources], job.options.force)
            publish(staged, out)
    return job.report


def check_output_file(out: Path, sources: Sequence[Source], force: bool) -> None:
    """Refuse to replace a source, or another file unless ``force``.

    Raises:
        ConfigError: with the remedy.
    """
    where = f"--out {out}"
    if any(_lies_at(source.name, out) for source in sources):
        raise ConfigError("this is the source", where=where, hint="choose another name: what is read is never replaced")
    if out.is_dir():
        raise ConfigError("this is a directory", where=where, hint="name a file, or a directory without .jsonl")
    if out.exists() and not force:
        raise ConfigError("the file exists", where=where, hint="choose another name, or replace it with --force")


def _lies_at(name: str, out: Path) -> bool:
    source = Path(os.path.expanduser(name))
    return source.exists() and source.resolve() == out.resolve()


def _check_options(options: StyleOptions) -> None:
    if not 0 <= options.mix < 1:
        hint = "give the share of records that stay unchanged, from 0 to below 1: --mix 0.2"
        raise ConfigError(f"{options.mix} is out of bounds", where="--mix", hint=hint)
    if options.system is not None and not options.system.strip():
        raise ConfigError("the text is empty", where="--system", hint="say what asks for the style, or leave it out")


class _StyleJob:
    """One pass over the sources; ``report`` grows with it."""

    def __init__(self, rules: RuleSet, sources: Sequence[Source], options: StyleOptions) -> None:
        self.sources, self.options = sources, options
        notes = [note for source in sources for note in source.skipped]
        self.report = StyleReport(skipped=[f"{note.where}: {note.message}" for note in notes])
        found = {source.split or "train" for source in sources}
        self.splits = [split for split in SPLITS if split in found]
        self._styler = Styler(rules, options.seed)
        self._columns = ColumnNames.from_options(options.columns)

    def write(self, split: str, path: Path, left_out: LeftOut) -> int:
        """Write all records of one split; returns how many."""
        count = 0
        with path.open("wb") as file:
            for source in self.sources:
                if (source.split or "train") == split:
                    for line in self._lines(source, left_out):
                        file.write(line)
                        count += 1
        if count:
            self.report.records[split] = count
        return count

    def write_file(self, path: Path) -> None:
        """Write the only split; what is left out is counted but not written anywhere."""
        with open(os.devnull, "wb") as nowhere:
            left_out = LeftOut(nowhere)
            self.write(self.splits[0], path, left_out)
            self.finish(left_out)

    def finish(self, left_out: LeftOut) -> None:
        """Close the report.

        Raises:
            DataError: nothing was written.
        """
        self.report.reasons = left_out.reasons.listed()
        if self.report.records:
            return
        if not self.report.reasons:
            raise DataError("there is no row", where=self.sources[0].name, hint="name files that hold rows")
        first = self.report.reasons[0]
        message = f"none of the {self.report.num_left_out} rows can be styled; most often: {first.message}"
        raise DataError(message, where=first.places[0], hint=first.hint)

    def _lines(self, source: Source, left_out: LeftOut) -> Iterator[bytes]:
        for item in source.rows():
            value = item.value if isinstance(item, Row) else None
            try:
                if isinstance(item, RowProblem):
                    raise item.error()
                yield self._line(item)
            except DataError as error:
                if self.options.strict:
                    raise
                self.report.num_left_out += 1
                left_out.add(error, value)

    def _line(self, row: Row) -> bytes:
        where = f"{row.source}:{row.line}"
        example = parse_example(row.value, self._columns, source=row.source, line=row.line)
        record = example.record
        if record is None or record.kind == "text":
            _no_answer(example, where)
        # Everything that can fail comes before anything is counted.
        key = json_line(example, where)
        if self.options.mix and keyed_number(self.options.seed, "mix", key.decode()) < self.options.mix * 2**64:
            self.report.unmixed += 1
            return key
        styled = self._restyled(record)
        if self.options.system:
            styled = with_system(styled, self.options.system)
        return json_line(replace(example, record=styled), where)

    def _restyled(self, record: Record) -> Record:
        if record.kind == "chat":
            return replace(record, messages=tuple(self._messages(record.messages or (), "")))
        head = replace(record, completion=None).turns
        question = _last_question(head)
        if isinstance(record.completion, str):
            return replace(record, completion=self._answer(question, record.completion))
        return replace(record, completion=self._messages(record.completion or (), question))

    def _messages(self, messages: Sequence[dict[str, Any]], question: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = []
        for message in messages:
            if message["role"] == "user":
                question = message["content"]
            if message["role"] == "assistant" and message["content"].strip():
                message = {**message, "content": self._answer(question, message["content"])}
            result.append(message)
        return result

    def _answer(self, question: str, answer: str) -> str:
        styled, report = self._styler.answer(question, answer), self.report
        report.answers += 1
        report.changed += styled.text != answer
        report.words += styled.words
        report.words_changed += styled.words_changed
        report.rules.update(styled.rules)
        if len(report.texts) < NUM_TEXTS:
            report.texts.append((answer, styled.text))
        if styled.text != answer:
            rank = keyed_number(self.options.seed, "sample", question, answer)
            insort(report.samples, Shown(rank, question, answer, styled.text))
            del report.samples[NUM_SAMPLES:]
        return styled.text


def with_system(record: Record, text: str) -> Record:
    """The record as a chat whose system message says ``text``, after what it says already."""
    messages = record.turns
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        messages = [first, *messages[1:]]
    else:
        messages = [{"role": "system", "content": text}, *messages]
    return replace(record, kind="chat", messages=tuple(messages), prompt=None, completion=None)


def _last_question(messages: Sequence[dict[str, Any]]) -> str:
    return next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")


def _no_answer(example: Example, where: str) -> NoReturn:
    if example.shape == "text":
        raise DataError(
            "a text has no answer to restyle", where=where, hint="give questions with answers, as messages or prompt"
        )
    hint = "keep the good answers as messages: only those can be restyled"
    raise DataError(f"this is {example.shape} data, which is left as it is", where=where, hint=hint)
