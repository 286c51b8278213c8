"""Outcome of ``data prepare`` for all rows: counts, reasons and places, for people and programs."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

import numpy as np

from allhands.data.arrays import Ints
from allhands.data.lengths import LengthSummary
from allhands.errors import AllhandsError

NUM_PLACES = 5
NUM_REASONS = 200

# Parts of a message that differ between rows of one reason: excerpts at the end, positions,
# hexadecimal bytes.
_PARTICULARS = re.compile(r"(?:,? (?:near|after) ['\"].*$)|0x[0-9a-f]{2}|\d+(?:,\d{3})*", re.DOTALL)
_OTHER = "other reasons"
# Columns in advice that is written for training: by YAML keys.
_NAMED = re.compile(r'\b([a-z]+)_feature: "((?:[^"\\]|\\.)*)",?')
_PART = re.compile(r"\b([a-z]+)_feature\b")


def as_flags(hint: str) -> str:
    """Return advice with YAML keys of columns replaced by flags of ``data prepare``, quoted for a
    shell.
    """
    if _NAMED.search(hint):
        return _NAMED.sub(lambda match: f"--column {shlex.quote(f'{match[1]}={match[2]}')}", hint)
    return _PART.sub(r"--column \1=NAME", hint)


@dataclass
class Reason:
    """One kind of problem: message and remedy of the first row, number of rows, and first places.

    If the messages of the rows differ in numbers or excerpts, ``message`` has none of these.
    """

    message: str
    hint: str | None
    count: int = 0
    places: list[str] = field(default_factory=list[str])


class Reasons:
    """Problems grouped by reason: messages that differ only in numbers and excerpts have one."""

    def __init__(self) -> None:
        self._groups: dict[str, Reason] = {}

    def add(self, message: str, hint: str | None, where: str) -> None:
        """Count a row under its reason; past ``NUM_REASONS`` reasons, under "other reasons"."""
        key = _PARTICULARS.sub(lambda found: "…" if found[0][0].isdigit() else "", message)
        if key not in self._groups and len(self._groups) >= NUM_REASONS:
            key, message, hint = _OTHER, _OTHER, "left-out.jsonl has each"
        group = self._groups.setdefault(key, Reason(message, hint))
        group.message = message if message == group.message else key
        group.count += 1
        if len(group.places) < NUM_PLACES:
            group.places.append(where)

    def listed(self) -> list[Reason]:
        """Return the reasons, the commonest first."""
        return sorted(self._groups.values(), key=lambda reason: -reason.count)


class LeftOut:
    """Writes each row that is left out, with its place, reason and remedy, and counts reasons."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.reasons = Reasons()

    def add(self, error: AllhandsError, value: Any = None) -> None:
        """Write and count one row; ``value`` is the row, if it could be read at all."""
        where = error.where or ""
        self.reasons.add(error.message, error.hint, where)
        told = {"where": where, "code": error.code, "reason": error.message, "hint": error.hint}
        self.write(told, value)

    def write(self, entry: dict[str, Any], value: Any) -> None:
        """Append one line of ASCII: a row may have been left out for characters that UTF-8 cannot
        hold. Numbers that JSON cannot hold become strings.
        """
        if value is not None:
            entry["row"] = value
        try:
            line = json.dumps(entry, default=str, allow_nan=False)
        except ValueError:
            words = json.dumps(entry, default=str)
            line = json.dumps(json.loads(words, parse_constant=str))
        self._file.write(line.encode("ascii") + b"\n")


@dataclass
class SourceTally:
    """Rows of one source: ``rows`` = ``accepted`` + ``left_out``.

    ``unread`` counts problems of the whole file; ``shapes`` counts accepted rows by shape.
    """

    name: str
    split: str | None
    rows: int = 0
    accepted: int = 0
    left_out: int = 0
    unread: int = 0
    shapes: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class Twin:
    """Two rows with the same words: exactly (similarity 1) or nearly."""

    row: str
    of: str
    similarity: float


@dataclass(frozen=True)
class Duplicates:
    """Repeated rows.

    Attributes:
        exact: rows that repeat another row after normalisation.
        near: rows that nearly repeat another row.
        removed: duplicates that were dropped.
        across: by pair of splits (``"train, test"``): kept rows of the first split with a twin in
            the second.
        examples: a few pairs of twins.
    """

    exact: int = 0
    near: int = 0
    removed: int = 0
    across: dict[str, int] = field(default_factory=dict[str, int])
    examples: list[Twin] = field(default_factory=list[Twin])


@dataclass
class PrepareOutcome:
    """Everything that ``data prepare`` has to say.

    Attributes:
        kept: rows in each split, for training and (``preference``) for preference methods.
        rows_read: rows that the sources held = kept + left_out + duplicates.removed.
        reasons: why rows were left out; ``warnings``: why kept rows are suspicious.
        lengths: of the kept rows, in tokens or characters; ``row_lengths`` has each.
        notes: sentences about decisions and their reasons.
        options: the options of ``data prepare``.
    """

    sources: list[SourceTally]
    kept: dict[str, int] = field(default_factory=dict[str, int])
    preference: dict[str, int] = field(default_factory=dict[str, int])
    reasons: list[Reason] = field(default_factory=list[Reason])
    warnings: list[Reason] = field(default_factory=list[Reason])
    duplicates: Duplicates = field(default_factory=Duplicates)
    lengths: LengthSummary | None = None
    row_lengths: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    notes: list[str] = field(default_factory=list[str])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def rows_read(self) -> int:
        """Rows that the sources held, readable or not."""
        return sum(source.rows for source in self.sources)

    @property
    def left_out(self) -> int:
        """Rows that could not be used."""
        return sum(source.left_out for source in self.sources)

    @property
    def num_kept(self) -> int:
        """Rows written into the splits."""
        return sum(self.kept.values()) + sum(self.preference.values())

    @property
    def shapes(self) -> Counter[str]:
        """Recognised shapes over all sources."""
        return sum((Counter(source.shapes) for source in self.sources), Counter[str]())

    def to_json(self) -> dict[str, Any]:
        """Return the outcome in the form of report.json."""
        totals = {
            "rows_read": self.rows_read,
            "rows_kept": self.num_kept,
            "rows_left_out": self.left_out,
        }
        details = asdict(self)
        del details["row_lengths"]
        return {
            **totals,
            "duplicates_removed": self.duplicates.removed,
            "shapes": dict(self.shapes),
            **details,
        }
