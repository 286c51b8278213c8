"""The contents of a run's directory: curves, samples of processes, options, answers, and what is
missing.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from allhands.checkpoints import BEST, checkpoints_in
from allhands.errors import AllhandsError, DataError
from allhands.io.names import CONFIG_FILE, LOGS, PLAN_FILE
from allhands.observe.journal import read_events
from allhands.observe.metrics import METRICS_FILE, RunHistory, read_metrics
from allhands.observe.monitor import Board, BoardRow, Sample, read_samples
from allhands.plan.kept import KeptPlan, plan_before
from allhands.report.verdict import Status, verdict_of

_PREPARED = "report.json"
_OF_AN_EARLIER_RUN = re.compile(r".+\.\d+\.json")  # set aside, under a number
_MOST_BYTES = 16_000_000  # of a JSON file that is looked at for answers


@dataclass(frozen=True)
class Answers:
    """Answers to the same prompts without and with the adapter, from ``allhands compare``."""

    file: str
    prompts: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass
class ReportFacts:
    """Everything that is known of one run.

    Attributes:
        path: the run's path as it was given.
        status: how it ended, or whether it goes on; ``reason`` says more, in words.
        journal: the supervisor's events, in their order.
        rows: the processes with their highest memory; ``samples`` are all their samples.
            ``together_bytes`` is the most that they had at the same time; ``ranks_bytes`` the same
            of the ranks alone.
        config: the options that the run was given, by name; empty if not known.
        prepared: the report of ``allhands data prepare`` on the data, if it is there.
        plan: the plan that was made before the run began, if it was kept.
        notes: what is missing, torn or damaged, in words.
    """

    path: Path
    history: RunHistory
    status: Status = "crashed or killed"
    reason: str = ""
    journal: Sequence[Mapping[str, Any]] = ()
    samples: Sequence[Sample] = ()
    rows: Sequence[BoardRow] = ()
    together_bytes: int = 0
    ranks_bytes: int = 0
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    prepared: Mapping[str, Any] = field(default_factory=dict[str, Any])
    answers: Sequence[Answers] = ()
    plan: KeptPlan | None = None
    notes: list[str] = field(default_factory=list[str])

    @property
    def began_before(self) -> bool:
        """Return whether the run was started before its first sampled process began."""
        first = next(iter(self.history.starts), None)
        return first is not None and bool(self.samples) and first.time < _began(self.samples)


def read_facts(
    path: Path, journal: Sequence[Mapping[str, Any]] | None = None, now: float | None = None
) -> ReportFacts:
    """Read all files of a run; what is damaged or missing becomes a note.

    Args:
        path: the run's directory, or its ``metrics.jsonl``.
        journal: the supervisor's events; ``None``: those of the run's directory.
        now: Unix time in seconds, to decide whether the run goes on.

    Raises:
        DataError: it is no run: there are neither metrics nor a supervisor's events.
    """
    now = time.time() if now is None else now
    directory = path if path.is_dir() else path.parent
    journal = read_events(directory) if journal is None else journal
    notes: list[str] = []
    missing = ""
    try:
        history = read_metrics(path)
    except DataError as error:
        if not journal or not path.is_dir():
            raise
        history = RunHistory(path.resolve().name)
        missing = error.message
    facts = ReportFacts(path, history, journal=journal, notes=notes)
    facts.samples = _samples(directory, notes)
    board = Board(facts.samples)
    facts.rows = board.rows()
    facts.together_bytes, facts.ranks_bytes = board.peak_together_bytes, board.peak_ranks_bytes
    verdict = verdict_of(path, history, journal, board, now)
    facts.status, facts.reason = verdict.status, verdict.reason
    facts.config = _config(directory, notes, goes_on=facts.status == "going on")
    facts.prepared = _prepared(facts.config)
    facts.answers = tuple(_answers(directory))
    facts.plan, amiss = plan_before(directory, history.starts[0].time if history.starts else None)
    notes += amiss
    if missing:
        how = (
            "has not reached its first step yet"
            if facts.status == "going on"
            else "ended before its first step"
        )
        notes.insert(0, f"There are no metrics ({missing}): the run {how}.")
    notes += _amiss(history)
    return facts


def samples_of_starts(run: ReportFacts) -> tuple[list[Sample], bool]:
    """Return the samples of all starts of a run, also those set aside by later starts, and whether
    they are complete.
    """
    samples = list(run.samples)
    if not run.began_before:
        return samples, True
    logs = (run.path if run.path.is_dir() else run.path.parent) / LOGS
    first = run.history.starts[0].time
    for place in logs.glob("earlier-*"):
        with suppress(DataError):
            earlier = read_samples(place)
            samples += earlier if earlier[-1].time > first else []  # else they are another run's
    samples.sort(key=lambda one: one.time)
    return samples, _began(samples) <= first


def _began(samples: Sequence[Sample]) -> float:
    """Return the start of the first process, in Unix time."""
    return min(one.began or one.time for one in samples)


def _samples(directory: Path, notes: list[str]) -> list[Sample]:
    try:
        return read_samples(directory)
    except DataError:
        notes.append("No process has left samples of its memory and phases.")
        return []


def _amiss(history: RunHistory) -> Iterator[str]:
    if places := history.unreadable:
        yield f"Lines of {METRICS_FILE} that cannot be read and are left out: {len(places)} (the first is {places[0]})."
    if history.started is None and history.train:
        yield f"{METRICS_FILE} does not say how the run began: model, ranks and number of steps are not known."
    if not history.train and history.started:
        yield "There is no report of training yet."


# --- files of JSON --------------------------------------------------------------------------------


def _object(file: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is none that can be read."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            return {}
        content: Any = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}


def _config(directory: Path, notes: list[str], *, goes_on: bool) -> dict[str, Any]:
    """Return the options, from the file beside the weights or from a checkpoint."""
    places = [directory, directory / BEST]
    try:
        places += checkpoints_in(directory)
    except AllhandsError as error:
        notes.append(f"Its checkpoints cannot be read: {error.message}.")
    for place in places:
        if found := _object(place / CONFIG_FILE):
            return found
        if found := _object(place / "state.json").get("config"):
            return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    if not goes_on:  # they are written with the first weights
        notes.append(
            "Its options are not known: they are written at the first save, and there was none."
        )
    return {}


def _prepared(config: Mapping[str, Any]) -> dict[str, Any]:
    data = config.get("data")
    found = _object(Path(data) / _PREPARED) if isinstance(data, str) and data else {}
    return found if "rows_read" in found else {}


def _answers(directory: Path) -> Iterator[Answers]:
    for file in sorted(directory.glob("*.json")):
        if file.name in (CONFIG_FILE, PLAN_FILE) or _OF_AN_EARLIER_RUN.fullmatch(file.name):
            continue
        with suppress(ValidationError):
            found = _ANSWERS.validate_python({**_object(file), "file": file.name})
            if len(found.prompts) == len(found.before) == len(found.after) > 0:
                yield found


_ANSWERS = TypeAdapter(Answers)
