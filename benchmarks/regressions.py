"""What has become worse: the newest record of each benchmark's works against the one before, on the
same machine.

    python benchmarks/regressions.py

Compares ratios (allhands against a peer in the same run) and instruction counts, which do not
depend on what else a machine does, as wall times do. Ends with 1 if one is worse by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from records import (
    EFFORT,
    OURS,
    machine_of,
    not_measured_since,
    read_records,
    results_directory,
    rows_in,
)

LIMIT_PERCENT = 5.0
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """A figure in two records.

    Attributes:
        before, after: a ratio, or a count of instructions.
        percent: by how much it is worse; below 0 it is better.
    """

    what: str
    before: float
    after: float
    percent: float
    then: str


@dataclass(frozen=True)
class Comparison:
    """One record's figures against those before.

    Attributes:
        missing: figures that no earlier record has.
        notes: what else is different between the two.
    """

    record: Record
    changes: list[Change]
    missing: list[str]
    notes: list[str]


def subject(record: Record) -> str:
    """Equal for records whose figures may be compared: benchmark, machine and what was measured."""
    settings = {key: value for key, value in record["settings"].items() if key not in EFFORT}
    return json.dumps([record["name"], machine_of(record), settings], sort_keys=True)


def compare(records: Sequence[Record]) -> list[Comparison]:
    """The newest record of each subject's works; each of its figures with the last earlier record
    that has it.

    Args:
        records: the oldest first.
    """
    by_subject: dict[str, list[Record]] = {}
    for record in records:
        by_subject.setdefault(subject(record), []).append(record)
    return [
        _compared(newest, history[:place])
        for history in by_subject.values()
        for place, newest in not_measured_since(history)
    ]


def _compared(newest: Record, earlier: Sequence[Record]) -> Comparison:
    before: dict[tuple[str, ...], tuple[float, bool, Record]] = {}
    for record in earlier:
        before |= {key: (value, higher, record) for key, (value, higher) in figures(record).items()}
    changes: list[Change] = []
    missing: list[str] = []
    used: list[Record] = []
    for key, (value, higher) in figures(newest).items():
        what = title(key)
        if key not in before:
            missing.append(what)
            continue
        old, _, record = before[key]
        percent = 100.0 * (1.0 - value / old) if higher else 100.0 * (value / old - 1.0)
        changes.append(Change(what, old, value, percent, f"{record['date']}, {record['commit']}"))
        used.append(record)
    return Comparison(newest, changes, missing, _notes(newest, used))


def figures(record: Record) -> dict[tuple[str, ...], tuple[float, bool]]:
    """What is compared of a record, by a key, with whether higher is better."""
    found: dict[tuple[str, ...], tuple[float, bool]] = {}
    for row in rows_in(record):
        if row.who != OURS:
            continue
        # A ratio is above 1 where allhands is ahead, whichever way the figure itself is better.
        found |= {(*row.key, peer): (ratio, True) for peer, ratio in row.ratios.items()}
        if row.unit == "instructions":
            found[(*row.key, "")] = (row.median, row.better == "higher")
    return found


def title(key: Sequence[str]) -> str:
    """For people: the figure, and against whom."""
    return f"{key[0]}, against {key[-1]}" if key[-1] else f"{key[0]}, {key[2]}"


def _notes(newest: Record, used: Sequence[Record]) -> list[str]:
    """Versions that are not what they were: they may be the reason."""
    notes: dict[str, None] = {}
    for record in used:
        for name, now in newest["environment"]["versions"].items():
            then = record["environment"]["versions"].get(name, {})
            for package in now.keys() & then.keys():
                if now[package] != then[package]:
                    notes[
                        f"{name}: {package} {now[package]}, was {then[package]} on {record['date']}"
                    ] = None
    return sorted(notes)


def worse(comparison: Comparison, limit_percent: float) -> list[Change]:
    """Those beyond the limit, the worst first."""
    found = [change for change in comparison.changes if change.percent > limit_percent]
    return sorted(found, key=lambda change: -change.percent)


def report(comparisons: Sequence[Comparison], limit_percent: float) -> str:
    """A paragraph a benchmark and machine."""
    lines: list[str] = []
    for one in comparisons:
        record = one.record
        lines.append(
            f"{record['name']} of {record['date']} ({record['commit']}), {machine_of(record)}:"
        )
        bad = worse(one, limit_percent)
        for change in bad:
            figures = f"{change.after:,.4g}, was {change.before:,.4g} ({change.then})"
            lines.append(f"  WORSE by {change.percent:.1f} %: {change.what}: {figures}")
        if one.changes and not bad:
            lines.append(
                f"  {len(one.changes)} figures, none worse by more than {limit_percent:g} %"
            )
        if one.missing and not one.changes:
            lines.append("  nothing earlier to compare with")
        elif one.missing:
            lines.append(f"  not in any earlier record: {'; '.join(one.missing)}")
        if not one.changes and not one.missing:
            lines.append("  it has neither ratios nor instruction counts")
        lines += [f"  other versions: {'; '.join(one.notes)}"] if one.notes and bad else []
    return "\n".join(lines) or "no records"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What is worse than in the record before.")
    parser.add_argument(
        "--results", type=Path, help="directory of the records (benchmarks/results)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_PERCENT,
        help="per cent that are let pass (%(default)s)",
    )
    options = parser.parse_args(arguments)
    comparisons = compare(read_records(options.results or results_directory()))
    print(report(comparisons, options.limit))
    return 1 if any(worse(one, options.limit) for one in comparisons) else 0


if __name__ == "__main__":
    sys.exit(main())
