"""First pass of ``data prepare``: reads sources, checks rows, writes usable rows to a spool and the
others to left-out.jsonl.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from allhands.data.duplicates import normalise
from allhands.data.heard import COLUMN_UNREAD, unread, words_of
from allhands.data.messages import weight_of
from allhands.data.outcome import LeftOut, Reasons, SourceTally, as_flags
from allhands.data.parts import MISSING, ColumnNames, reach
from allhands.data.records import Record
from allhands.data.rows import Row, RowProblem
from allhands.data.shapes import Example, parse_example, remedy_of_warning, with_merged_system
from allhands.data.sources import Source
from allhands.data.splitting import NONE, SPLITS, SplitShare, hash64
from allhands.data.spool import Spool
from allhands.errors import ConfigError, DataError

if TYPE_CHECKING:
    from allhands.data.render import Rendered

Dedupe = Literal["off", "exact", "near"]
# Renders a record into the tokens that are counted.
Measure = Callable[[Record], "Rendered"]
# Called with the activity ("reading"), the rows done, and the rows in all (None: unknown).
Progress = Callable[[str, int, "int | None"], None]

BY_SOURCE = "source"
# Column names, nested ones too, are remembered for advice up to this number.
_MANY_COLUMNS = 500


@dataclass(frozen=True)
class PrepareOptions:
    """Options of ``allhands data prepare``, by flag name.

    Attributes:
        columns: the column mapping as it was given: {"prompt_feature": "question"}.
        column_flags: the flags that the user typed, where they differ from --prompt-feature:
            {"prompt_feature": "--column prompt=q"}.
        valid, test: sizes of the held-out splits; None: the sources' own splits, or else the
            default sizes.
        split_by: rows with the same value of this column stay together; "source": rows of one file.
        resplit: ignore the sources' own splits.
        merge_system: put system messages into the questions that follow them, for chat templates
            without a place for one.
        near_threshold: similarity from which rows are near duplicates; 1 searches exact ones only.

    Raises:
        ConfigError: two options contradict each other, or a value is out of range.
    """

    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    column_flags: Mapping[str, str] = field(default_factory=dict[str, str])
    valid: SplitShare | None = None
    test: SplitShare | None = None
    split_by: str | None = None
    resplit: bool = False
    seed: int = 0
    shuffle: bool = True
    dedupe: Dedupe = "off"
    near_threshold: float = 0.8
    max_seq_length: int = 2048
    strict: bool = False
    force: bool = False
    merge_system: bool = False

    def __post_init__(self) -> None:
        if not 0.5 <= self.near_threshold <= 1:
            raise ConfigError(
                f"{self.near_threshold:g} is not between 0.5 and 1",
                code="value-out-of-range",
                where="--near-threshold",
                hint="0.8 finds texts with a few words changed; 1 looks for exact duplicates only",
            )
        if self.dedupe == "near" and self.near_threshold == 1:
            raise ConfigError(
                "there are no near duplicates with --near-threshold 1",
                code="options-conflict",
                where="--dedupe near",
                hint="--dedupe exact",
            )

    def to_json(self) -> dict[str, Any]:
        """Return the options in the form of report.json."""
        given = asdict(self) | {"columns": dict(self.columns)}
        del given["column_flags"]
        return given | {
            name: share and str(share)
            for name, share in (("valid", self.valid), ("test", self.test))
        }


def carried_splits(sources: Sequence[Source], options: PrepareOptions) -> set[str]:
    """Return the held-out splits that the sources have; empty with ``resplit``."""
    if options.resplit:
        return set()
    return {source.split for source in sources if source.split} - {"train"}


class Intake:
    """Reads sources: every row becomes an entry of the spool, or of the rows left out."""

    def __init__(
        self,
        sources: Sequence[Source],
        options: PrepareOptions,
        spool: Spool,
        left_out: LeftOut,
        measure: Measure | None,
        progress: Progress,
    ) -> None:
        self.options, self.spool, self.left_out = options, spool, left_out
        self.sources = sources
        self.tallies = [SourceTally(source.name, source.split) for source in sources]
        self.warnings = Reasons()
        self._columns = ColumnNames.from_options(options.columns)
        self._measure, self._progress = measure, progress
        self._key_column = options.split_by if options.split_by != BY_SOURCE else None
        self._wanted = [
            *options.columns.values(),
            *([self._key_column] if self._key_column else []),
        ]
        self._found: set[str] = set()
        # Hashes: about 60 bytes a row that has an id.
        self._ids: set[int] = set()
        # Names in rows, in order.
        self.columns: dict[str, None] = {}
        # Problems of files that could only be read in part.
        self.torn: list[RowProblem] = []
        self._done = 0

    def read(self) -> None:
        """Read every source to its end.

        Raises:
            DataError: with ``strict``, the first row that cannot be used.
            ConfigError: a column that was named is in no row.
        """
        for number, source in enumerate(self.sources):
            for problem in source.skipped:
                self.warnings.add(problem.message, problem.hint, problem.where)
            for item in source.rows():
                self._take(number, item)
                self._done += 1
                self._progress("reading", self._done, None)
        self.spool.finish()
        self._check_columns()

    def _take(self, number: int, item: Row | RowProblem) -> None:
        tally = self.tallies[number]
        if isinstance(item, RowProblem):
            tally.rows += item.line > 0
            tally.left_out += item.line > 0
            tally.unread += item.line == 0
            if item.is_rest:
                self.torn.append(item)
            self._leave_out(item.error(), None)
            return
        tally.rows += 1
        self._look_at_columns(item.value)
        try:
            self._accept(number, item)
        except DataError as error:
            tally.left_out += 1
            self._leave_out(error, item.value)

    def _leave_out(self, error: DataError, value: Any) -> None:
        error.hint = as_flags(error.hint) if error.hint else None
        if self.options.strict:
            raise error
        self.left_out.add(error, value)

    def _accept(self, number: int, row: Row) -> None:
        example = self._parsed(row)
        where = f"{row.source}:{row.line}"
        line = json.dumps(example.to_json(), ensure_ascii=False).encode() + b"\n"
        text = example.texts()
        content, length, unheard = hash64(line), len(text), ()
        if self._measure is not None:
            rendered = self._measure(_measured(example, row))
            length, unheard = len(rendered.tokens), rendered.unheard
        elif example.record is not None:
            unheard = unread(example.record.unread)
        for code, _ in unheard:
            if code != COLUMN_UNREAD:
                self.warnings.add(*words_of(code), where)
        split = None if self.options.resplit else self.sources[number].split
        is_preference = example.preference is not None
        words, key = hash64(str(is_preference), normalise(text)), self._key(row, content, where)
        given = NONE if split is None else SPLITS.index(split)
        self.spool.add(
            line, text, row.source, row.line, content, words, key, length, given, is_preference
        )
        self.tallies[number].accepted += 1
        shapes = self.tallies[number].shapes
        shapes[example.shape] = shapes.get(example.shape, 0) + 1
        for warning in example.warnings:
            self.warnings.add(warning, remedy_of_warning(warning), where)
        # A repeated id is no reason to leave a row out, but a sign that data were joined twice.
        own = row.value.get("id")
        if isinstance(own, str | int) and not isinstance(own, bool):
            key = hash64("id", str(own))
            if key in self._ids:
                self.warnings.add(
                    "the id of an earlier row",
                    "if they are the same, --dedupe exact or near keeps one; if not, --split-by id keeps them together",
                    where,
                )
            self._ids.add(key)

    def _parsed(self, row: Row) -> Example:
        columns = self._columns_of(row.value)
        example = parse_example(row.value, columns, source=row.source, line=row.line)
        messages = None if example.record is None else example.record.messages
        for index, message in enumerate(messages or ()):
            if message["role"] == "assistant":
                weight_of(message, index)
        return with_merged_system(example) if self.options.merge_system else example

    def _columns_of(self, value: Any) -> ColumnNames:
        """Return the column mapping if the row has one of its columns, else the default names.

        Sources may be mixed, and only some of them may need the mapping.
        """
        mapped = any(reach(value, name) is not MISSING for name in self.options.columns.values())
        return self._columns if mapped else ColumnNames()

    def _key(self, row: Row, content: int, where: str) -> int:
        by = self.options.split_by
        if by is None:
            return content
        if by == BY_SOURCE:
            return hash64("key", row.source)
        value = reach(row.value, by)
        if value is not None and value is not MISSING:
            return hash64("key", json.dumps(value, sort_keys=True, default=str))
        self.warnings.add(
            f'no "{by}" to split by: such a row is split by its content',
            "fill the column in",
            where,
        )
        return content

    def _look_at_columns(self, value: Any) -> None:
        self._found.update(
            name
            for name in self._wanted
            if name not in self._found and reach(value, name) is not MISSING
        )
        if isinstance(value, dict) and len(self.columns) < _MANY_COLUMNS:
            for name, inner in value.items():
                self.columns.setdefault(name)
                if isinstance(inner, dict):
                    self.columns.update(dict.fromkeys(f"{name}.{key}" for key in inner))

    def _check_columns(self) -> None:
        typed = self.options.column_flags
        named = {
            typed.get(key, f"--{key.replace('_', '-')}"): name
            for key, name in self.options.columns.items()
        }
        if self._key_column:
            named["--split-by"] = self._key_column
        for flag, column in named.items():
            if column not in self._found and self.columns:
                near = difflib.get_close_matches(column, self.columns, n=1)
                more = f" and {len(self.columns) - 8} more" if len(self.columns) > 8 else ""
                hint = f"did you mean {near[0]}? " if near else ""
                hint += f"the columns are {', '.join([*self.columns][:8])}{more}"
                raise ConfigError(
                    f'no row has a column "{column}"', code="column-missing", where=flag, hint=hint
                )


def _measured(example: Example, row: Row) -> Record:
    """Return the record whose tokens are counted.

    For a preference, this is the conversation with the preferred or rated answer.
    """
    if example.record is not None:
        return example.record
    fields = example.preference or {}
    answer = fields["chosen"] if "chosen" in fields else fields["completion"]
    messages = (*fields["prompt"], *answer)
    return Record(
        "chat", messages=messages, tools=fields.get("tools"), source=row.source, line=row.line
    )
