"""From whatever files people have to a training folder: checked, deduplicated, split, and nothing lost unsaid.

One pass reads every source and writes the rows that can be used to a spool file; of each row only some 70
bytes of numbers stay in memory. Then duplicates are searched, splits decided, and the rows copied from the
spool into their files. All of it happens in a hidden directory that takes its name at the very end.
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

from allhands.data.arrays import Bools, Int8s, Ints
from allhands.data.intake import BY_SOURCE, Intake, Measure, PrepareOptions, Progress, carried_splits
from allhands.data.lengths import LengthSummary
from allhands.data.outcome import LeftOut, PrepareOutcome
from allhands.data.sources import LEFT_OUT, LENGTHS, REPORT, Source
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
from allhands.io.staging import publish, publishing, require_place, staging

DEFAULT_SHARE = SplitShare(0.05, False)
PREFERENCE = "preference"
OUTPUT = (REPORT, *(f"{split}.jsonl" for split in SPLITS), LEFT_OUT, LENGTHS, PREFERENCE)


class NothingLeft(DataError):
    """No row of any source can be used; ``outcome`` says why."""

    def __init__(self, outcome: PrepareOutcome) -> None:
        first = outcome.reasons[0] if outcome.reasons else None
        count = outcome.rows_read
        message = f"none of the {count} rows can be used" if count > 1 else "there is no row that can be used"
        because = f"; most often: {first.message}" if first else ""
        where = first.places[0] if first and first.places else None
        super().__init__(message + because, where=where, hint=first.hint if first else "name files that hold rows")
        self.outcome = outcome


def no_progress(what: str, done: int, total: int | None) -> None:
    """A :data:`Progress` that shows nothing."""


def prepare(
    sources: Sequence[Source],
    out: Path,
    options: PrepareOptions,
    *,
    measure: Measure | None = None,
    progress: Progress = no_progress,
) -> PrepareOutcome:
    """Write ``out`` with the rows of ``sources``; it is whole, or what stood there before is untouched.

    Args:
        measure: gives the tokens of a record, or their number, and raises DataError for one that cannot be rendered;
            without it, lengths are in characters.

    Raises:
        ConfigError: ``out`` is in use, or an option cannot take effect.
        DataError: a file of which the rest could not be read; with ``strict``, the first bad row; :class:`NothingLeft`.
        StorageError: it cannot be written.
    """
    check_output(out, [source.name for source in sources], options.force)
    sources, ignored = _useful_splits(sources, options)
    _check_options(sources, options)
    with staging(out) as staged, TemporaryFile(dir=staged) as file, (staged / LEFT_OUT).open("wb") as left_out_file:
        left_out = LeftOut(left_out_file)
        intake = Intake(sources, options, Spool(cast(BinaryIO, file)), left_out, measure, progress)
        intake.read()
        if intake.torn:  # how much is missing, nobody knows
            raise intake.torn[0].error()
        outcome = PrepareOutcome(intake.tallies, reasons=left_out.reasons.listed(), warnings=intake.warnings.listed())
        outcome.options = options.to_json()
        if not len(intake.spool):
            raise NothingLeft(outcome)
        outcome.notes.extend(ignored)
        _split_and_write(staged, intake, outcome, progress)
        # With a model lengths are in tokens, else in characters, which have no limit.
        limit, unit = (options.max_seq_length, "tokens") if measure else (None, "characters")
        outcome.lengths = LengthSummary.of(outcome.row_lengths, limit, unit)
        left_out_file.close()
        if not outcome.left_out + outcome.duplicates.removed + sum(source.unread for source in outcome.sources):
            (staged / LEFT_OUT).unlink()
        text = json.dumps(outcome.to_json(), indent=1, default=str)
        (staged / REPORT).write_text(text + "\n", encoding="utf-8")
        with publishing(out):
            # Another run may have written there meanwhile.
            check_output(out, [source.name for source in sources], options.force)
            publish(staged, out)
    return outcome


def _useful_splits(sources: Sequence[Source], options: PrepareOptions) -> tuple[list[Source], list[str]]:
    """The sources, without their splits if those would leave nothing to train on; and what to say about it.

    Somebody who names nothing but a test.jsonl wants to train on it.
    """
    named = {source.split for source in sources}
    if options.resplit or not named or named & {None, "train"}:
        return list(sources), []
    words = " and ".join(sorted(str(name) for name in named))
    return [replace(source, split=None) for source in sources], [
        f"the sources bring no train split, only {words}: all of their rows are split anew"
    ]


def check_output(out: Path, names: Sequence[str], force: bool) -> None:
    """Refuse to overwrite what is at ``out``.

    Args:
        names: what is read, as it was named: it must not lie in ``out``.

    Raises:
        ConfigError: it is not an empty directory; or, with ``force``, not one that was prepared before.
    """
    where, whole = f"--out {out}", out.resolve()
    for name in names:
        source = Path(os.path.expanduser(name)).resolve()
        if source.exists() and (source == whole or whole in source.parents):
            hint = "choose another directory: what is read is never replaced"
            raise ConfigError(f"the source {name} is in it", where=where, hint=hint)
    if whole == Path.cwd():
        raise ConfigError("this is the directory that you are in", where=where, hint="name a new one in it: --out data")
    require_place(out, "prepared data", OUTPUT, force=force)


def _check_options(sources: Sequence[Source], options: PrepareOptions) -> None:
    for split, share in (("valid", options.valid), ("test", options.test)):
        if share is not None and split in carried_splits(sources, options):
            name = next(source.name for source in sources if source.split == split)
            raise ConfigError(
                f"the sources have a {split} split of their own: {name}",
                where=f"--{split}",
                hint=f"add --resplit to split all rows anew, or leave --{split} out to keep theirs",
            )
    check_fractions(options.valid, options.test)


# --- duplicates and splits --------------------------------------------------------------------------


def _split_and_write(staged: Path, intake: Intake, outcome: PrepareOutcome, progress: Progress) -> None:
    spool, options = intake.spool, intake.options
    keys = spool.hashes("key")
    twins = find_twins(
        spool, options.near_threshold, lambda done, total: progress("looking for duplicates", done, total)
    )
    keep = np.ones(len(spool), dtype=np.bool_)
    if options.dedupe != "off":
        labels = (twins.near if options.dedupe == "near" else twins.exact).labels()
        keeper = keepers(labels, spool.given, spool.hashes("content"))
        keep = keeper == np.arange(len(spool))
        _record_removed(intake, keeper, keep)
    groups = twins.families
    if options.split_by is not None:
        groups.join_equal(keys)
    rows = np.flatnonzero(keep)
    labels, given = groups.labels()[rows], spool.given[rows]
    free = int(np.count_nonzero((given == NONE) | (given == TRAIN)))
    wanted = wanted_rows(options.valid, options.test, _default(intake), len(rows), free)
    split = np.full(len(spool), NONE, dtype=np.int8)
    split[rows] = assign(labels, keys[rows], given, wanted, options.seed)
    outcome.duplicates = report_duplicates(spool, twins, split)
    _write_splits(staged, spool, split, options, outcome)
    outcome.notes.extend(_notes(intake, split, np.unique(labels).size == len(rows), outcome))
    assert outcome.rows_read == outcome.num_kept + outcome.left_out + outcome.duplicates.removed
    outcome.row_lengths = spool.lengths[split != NONE]


def _record_removed(intake: Intake, keeper: Ints, keep: Bools) -> None:
    spool = intake.spool
    for row in np.flatnonzero(~keep).tolist():
        reason = f"duplicate of {spool.where(int(keeper[row]))}"
        entry = {"where": spool.where(row), "reason": reason, "hint": "--dedupe off keeps duplicates"}
        intake.left_out.write(entry, json.loads(spool.row(row)))


def _default(intake: Intake) -> SplitShare:
    return SplitShare(0, True) if carried_splits(intake.sources, intake.options) else DEFAULT_SHARE


# --- writing ----------------------------------------------------------------------------------------


def _write_splits(staged: Path, spool: Spool, split: Int8s, options: PrepareOptions, outcome: PrepareOutcome) -> None:
    """One file a split that has rows. Their order depends on the contents and the seed, or is that of the sources."""
    place = shuffled(spool.hashes("content"), options.seed) if options.shuffle else np.arange(len(spool))
    for number, name in enumerate(SPLITS):
        for folder, is_preference, counts in (
            (staged, False, outcome.kept),
            (staged / PREFERENCE, True, outcome.preference),
        ):
            rows = np.flatnonzero((split == number) & (spool.preferences == is_preference))
            counts[name] = len(rows)
            if len(rows):
                folder.mkdir(exist_ok=True)
                with (folder / f"{name}.jsonl").open("wb") as file:
                    file.writelines(spool.row(row) for row in rows[np.argsort(place[rows], kind="stable")].tolist())


def _notes(intake: Intake, split: Int8s, alone: bool, outcome: PrepareOutcome) -> Iterator[str]:
    """What was decided, and what a person may not expect of it. ``alone``: no row belongs to another."""
    options = intake.options
    carried = carried_splits(intake.sources, options)
    if carried:
        yield f"the sources bring {' and '.join(sorted(carried))}: kept as they are (--resplit splits all rows anew)"
    yield from _sizes(options, split, bool(carried))
    if options.split_by is not None:
        yield f"rows with the same {options.split_by} are in one split"
    if options.split_by == BY_SOURCE and BY_SOURCE in intake.columns:
        yield f'--split-by {BY_SOURCE} means the file; the column "{BY_SOURCE}" was not used'
    if not carried and outcome.duplicates.exact + outcome.duplicates.near > outcome.duplicates.removed:
        yield "duplicates, near ones too, are in one split, so that no validation example was trained on"
    yield from _held_out_rows(intake, split, alone, carried)
    if not np.any(split == TRAIN):
        yield "there is no train.jsonl: all rows that are left are held out"


def _held_out_rows(intake: Intake, split: Int8s, alone: bool, carried: set[str]) -> Iterator[str]:
    """Where held-out splits are other than was asked for."""
    options, spool = intake.options, intake.spool
    for name, number, share in (("valid", VALID, options.valid), ("test", TEST, options.test)):
        got = int(np.count_nonzero(split == number))
        target = (share or _default(intake)).rows(int(np.count_nonzero(split != NONE)))
        if name not in carried and got != target:
            why = "there are too few rows" if alone else "rows that belong together stay so"
            counts = f"{got} row{'s' * (got != 1)}, {target} {'was' if target == 1 else 'were'} wanted"
            yield f"{name} has {counts}: {why}"
    torn = _torn_keys(spool, split) if options.split_by is not None else 0
    if torn:
        yield f"{torn} values of {options.split_by} are in several splits, because the sources have them there"
    for name, number in (("valid", VALID), ("test", TEST)):
        preferences = spool.preferences[split == number]
        for kind, members in (("ordinary", ~spool.preferences), ("preference", spool.preferences)):
            if len(preferences) and np.any(members & (split != NONE)) and not np.any(members & (split == number)):
                yield f"{name} has no {kind} rows: both kinds are split as one"


def _sizes(options: PrepareOptions, split: Int8s, carried: bool) -> Iterator[str]:
    """What was asked for, and what was taken where nothing was."""
    shares = (("valid", VALID, "validation", options.valid), ("test", TEST, "testing", options.test))
    asked = [f"{share} for {purpose}" for _, _, purpose, share in shares if share is not None]
    if asked:
        yield f"asked for: {' and '.join(asked)} (seed {options.seed})"
    # Of a split that got nothing another note says why.
    usual = [(name, purpose) for name, number, purpose, share in shares if share is None and np.any(split == number)]
    if usual and not carried:
        flags = ", ".join(f"--{name}" for name, _ in usual)
        purposes = " and as many for ".join(purpose for _, purpose in usual)
        share = f"{DEFAULT_SHARE.value:.0%} of the rows, at least one,"
        yield f"{share} are kept for {purposes} ({flags}; seed {options.seed})"
        own = [(name, number) for name, number, _, share in shares if share is None]
        held = sum(int(np.count_nonzero(split == number)) for _, number in own)
        yield from _held_out(held, int(np.count_nonzero(split != NONE)), [f"--{name} 0" for name, _ in own])


def _held_out(held: int, total: int, flags: Sequence[str]) -> Iterator[str]:
    """That few rows leave little to train on; ``flags`` hold nothing out."""
    if held >= LARGE_PART * total:
        part = "half" if 2 * held == total else f"{held} of {total}"
        yield (
            f"{part} of the rows are held out, and never trained on: "
            f"{' '.join(flags)} trains on all; of long texts, --documents blank-line makes a row of each paragraph"
        )


def _torn_keys(spool: Spool, split: Int8s) -> int:
    """Keys whose kept rows are in more than one split."""
    kept = split != NONE
    pairs = np.unique(np.stack([spool.hashes("key")[kept], split[kept].astype(np.uint64)]), axis=1)
    return int(np.count_nonzero(np.unique(pairs[0], return_counts=True)[1] > 1))
