"""Make a training folder from files of many types: checked, deduplicated and split. Every lost row
is reported.

One pass reads every source and writes the usable rows to a spool file; only some 70 bytes of
numbers for each row stay in memory. Then duplicates are searched, splits are decided, and the rows
are copied from the spool into their files. All files are written in a hidden directory, which is
renamed to the output directory at the very end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, cast

import numpy as np

from allhands.data.arrays import Int8s
from allhands.data.intake import (
    BY_SOURCE,
    Intake,
    Measure,
    PrepareOptions,
    Progress,
    carried_splits,
)
from allhands.data.lengths import LengthSummary
from allhands.data.outcome import LeftOut, PrepareOutcome
from allhands.data.sources import LEFT_OUT, REPORT, Source
from allhands.data.splitting import (
    LARGE_PART,
    NONE,
    SPLITS,
    TEST,
    TRAIN,
    VALID,
    SplitShare,
    assign,
    check_fractions,
    keepers,
    shuffled,
    wanted_rows,
)
from allhands.data.spool import Spool
from allhands.data.twins import find_twins, report_duplicates
from allhands.errors import ConfigError, DataError
from allhands.io.staging import Seen, publish, require_place, staging

DEFAULT_SHARE = SplitShare(0.05, False)
PREFERENCE = "preference"
OUTPUT = (REPORT, *(f"{split}.jsonl" for split in SPLITS), LEFT_OUT, PREFERENCE)


class NothingLeft(DataError):
    """No row of any source can be used; ``outcome`` says why."""

    def __init__(self, outcome: PrepareOutcome) -> None:
        first = outcome.reasons[0] if outcome.reasons else None
        count = outcome.rows_read
        message = (
            f"none of the {count} rows can be used"
            if count > 1
            else "there is no row that can be used"
        )
        because = f"; most often: {first.message}" if first else ""
        where = first.places[0] if first and first.places else None
        super().__init__(
            message + because,
            code="rows-all-unusable",
            where=where,
            hint=first.hint if first else "name files that hold rows",
        )
        self.outcome = outcome


def prepare(
    sources: Sequence[Source],
    out: Path,
    options: PrepareOptions,
    *,
    measure: Measure | None = None,
    progress: Progress = lambda *_: None,
) -> PrepareOutcome:
    """Write ``out`` with the rows of ``sources``; it is whole, or the earlier directory is
    unchanged.

    Args:
        measure: renders a record, or raises DataError for a record that cannot be rendered; None:
            lengths are in characters.

    Raises:
        ConfigError: ``out`` is in use, or an option cannot take effect.
        DataError: the rest of a file could not be read; with ``strict``, the first bad row;
            :class:`NothingLeft`.
        StorageError: ``out`` cannot be written.
    """
    seen = check_output(out, [source.name for source in sources], options.force)
    sources, notes = _checked_splits(sources, options)
    with (
        staging(out) as staged,
        TemporaryFile(dir=staged) as file,
        (staged / LEFT_OUT).open("wb") as left_out_file,
    ):
        left_out = LeftOut(left_out_file)
        intake = Intake(sources, options, Spool(cast(BinaryIO, file)), left_out, measure, progress)
        intake.read()
        if intake.torn:  # the number of missing rows is unknown
            raise intake.torn[0].error()
        outcome = PrepareOutcome(
            intake.tallies, reasons=left_out.reasons.listed(), warnings=intake.warnings.listed()
        )
        outcome.options = options.to_json()
        if not len(intake.spool):
            raise NothingLeft(outcome)
        outcome.notes.extend(notes)
        _split_and_write(staged, intake, outcome, progress)
        # With a model lengths are in tokens, else in characters, which have no limit.
        limit, unit = (options.max_seq_length, "tokens") if measure else (None, "characters")
        outcome.lengths = LengthSummary.of(outcome.row_lengths, limit, unit)
        left_out_file.close()
        if (
            not outcome.left_out
            + outcome.duplicates.removed
            + sum(source.unread for source in outcome.sources)
        ):
            (staged / LEFT_OUT).unlink()
        text = json.dumps(outcome.to_json(), indent=1, default=str)
        (staged / REPORT).write_text(text + "\n", encoding="utf-8")
        publish(staged, out, seen)
    return outcome


def _checked_splits(
    sources: Sequence[Source], options: PrepareOptions
) -> tuple[Sequence[Source], list[str]]:
    """Return the sources, and notes.

    If the sources have held-out splits only, they lose these splits, and a note says so.

    Raises:
        ConfigError: a size is given for a split that the sources have, or the sizes are too large.
    """
    named, notes = {source.split for source in sources}, list[str]()
    if not options.resplit and named and not named & {None, "train"}:
        # If only a test.jsonl is named, it is meant for training.
        words = " and ".join(sorted(map(str, named)))
        notes = [
            f"the sources bring no train split, only {words}: all of their rows get new splits"
        ]
        sources = [replace(source, split=None) for source in sources]
    for split, share in (("valid", options.valid), ("test", options.test)):
        if share is not None and split in carried_splits(sources, options):
            name = next(source.name for source in sources if source.split == split)
            raise ConfigError(
                f"the sources have a {split} split of their own: {name}",
                code="split-in-sources",
                where=f"--{split}",
                hint=f"add --resplit to split all rows anew, or leave --{split} out to keep theirs",
            )
    check_fractions(options.valid, options.test)
    return sources, notes


def check_output(out: Path, names: Sequence[str], force: bool) -> Seen:
    """Refuse an output directory whose content would be lost; return what is there.

    Args:
        names: the sources, as they were named; they must not be in ``out``.

    Raises:
        ConfigError: ``out`` holds a source, is the current directory or a file, or is not empty;
            with ``force``, it holds anything but prepared data.
    """
    where, whole = f"--out {out}", out.resolve()
    for name in names:
        source = Path(os.path.expanduser(name)).resolve()
        if source.exists() and (source == whole or whole in source.parents):
            raise ConfigError(
                f"the source {name} is in it",
                code="output-place-unsuitable",
                where=where,
                hint="choose another directory: what is read is never replaced",
            )
    if whole == Path.cwd():
        raise ConfigError(
            "this is the directory that you are in",
            code="output-place-unsuitable",
            where=where,
            hint="name a new one in it: --out data",
        )
    return require_place(out, "prepared data", OUTPUT, force=force)


# --- duplicates and splits ------------------------------------------------------------------------


def _split_and_write(
    staged: Path, intake: Intake, outcome: PrepareOutcome, progress: Progress
) -> None:
    spool, options = intake.spool, intake.options
    keys, contents, splits_given = (spool.column(name) for name in ("key", "content", "given"))
    twins = find_twins(
        spool,
        options.near_threshold,
        lambda done, total: progress("looking for duplicates", done, total),
    )
    keep = np.ones(len(spool), dtype=np.bool_)
    if options.dedupe != "off":
        keeper = keepers(
            (twins.near if options.dedupe == "near" else twins.exact).labels(),
            splits_given,
            contents,
        )
        keep = keeper == np.arange(len(spool))
        for row in np.flatnonzero(~keep).tolist():
            entry = {
                "where": spool.where(row),
                "reason": f"duplicate of {spool.where(int(keeper[row]))}",
            }
            entry["hint"] = "--dedupe off keeps duplicates"
            intake.left_out.write(entry, json.loads(spool.row(row)))
    groups = twins.families
    if options.split_by is not None:
        groups.join_equal(keys)
    rows = np.flatnonzero(keep)
    labels, given = groups.labels()[rows], splits_given[rows]
    free = int(np.count_nonzero((given == NONE) | (given == TRAIN)))
    carried = carried_splits(intake.sources, options)
    default = SplitShare(0, True) if carried else DEFAULT_SHARE
    wanted = wanted_rows(options.valid, options.test, default, len(rows), free)
    split = np.full(len(spool), NONE, dtype=np.int8)
    split[rows] = assign(labels, keys[rows], given, wanted, options.seed)
    outcome.duplicates = report_duplicates(spool, twins, split)
    _write_splits(staged, spool, split, options, outcome)
    outcome.notes.extend(
        _notes(intake, split, carried, default, alone=np.unique(labels).size == len(rows))
    )
    assert outcome.rows_read == outcome.num_kept + outcome.left_out + outcome.duplicates.removed
    outcome.row_lengths = spool.column("length")[split != NONE]


def _write_splits(
    staged: Path, spool: Spool, split: Int8s, options: PrepareOptions, outcome: PrepareOutcome
) -> None:
    """Write one file for each split with rows, and for each with preference rows."""
    # The order depends on the contents and the seed, or is that of the sources.
    place = (
        shuffled(spool.column("content"), options.seed)
        if options.shuffle
        else np.arange(len(spool))
    )
    for number, name in enumerate(SPLITS):
        for is_preference, counts in ((False, outcome.kept), (True, outcome.preference)):
            chosen = np.flatnonzero(
                (split == number) & (spool.column("preference") == is_preference)
            )
            counts[name] = len(chosen)
            if len(chosen):
                folder = staged / PREFERENCE if is_preference else staged
                folder.mkdir(exist_ok=True)
                with (folder / f"{name}.jsonl").open("wb") as file:
                    file.writelines(
                        spool.row(row)
                        for row in chosen[np.argsort(place[chosen], kind="stable")].tolist()
                    )


def _notes(
    intake: Intake, split: Int8s, carried: set[str], default: SplitShare, *, alone: bool
) -> Iterator[str]:
    """Yield notes on decisions that may be unexpected.

    ``alone``: no two rows must stay in one split.
    """
    options = intake.options
    if carried:
        yield f"the sources bring {' and '.join(sorted(carried))}: kept as they are (--resplit splits all rows anew)"
    yield from _sizes(options, split, carried, default, alone)
    if options.split_by is not None:
        yield f"rows with the same {options.split_by} are in one split"
    if options.split_by == BY_SOURCE and BY_SOURCE in intake.columns:
        yield f'--split-by {BY_SOURCE} means the file; the column "{BY_SOURCE}" was not used'
    if not np.any(split == TRAIN):
        yield "there is no train.jsonl: all rows that are left are held out"


def _sizes(
    options: PrepareOptions, split: Int8s, carried: set[str], default: SplitShare, alone: bool
) -> Iterator[str]:
    """Yield notes on the wanted and real sizes of held-out splits, and on few training rows."""
    total, held = int(np.count_nonzero(split != NONE)), 0
    for name, number, share in (("valid", VALID, options.valid), ("test", TEST, options.test)):
        got, target = int(np.count_nonzero(split == number)), (share or default).rows(total)
        by_default = share is None and not carried
        if share is not None or (by_default and got):
            what = (
                f"{share}"
                if share is not None
                else f"{default.value:.0%} of the rows, at least one,"
            )
            yield f"{what} are kept for {name} (--{name}; seed {options.seed})"
        if name not in carried and got != target:
            why = "there are too few rows" if alone else "rows that belong together stay together"
            yield f"{name} has {got} rows where {target} were wanted: {why}"
        held += got * by_default
    if held >= LARGE_PART * total:
        yield (
            f"{held} of {total} rows are held out, and never trained on: --valid 0 --test 0 trains on all; "
            "of long texts, --documents blank-line makes a row of each paragraph"
        )
