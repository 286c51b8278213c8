"""The contents of a report, in the order of its sections; HTML and Markdown are two ways to write
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from allhands.io import formatting as form
from allhands.observe.charts import NONE, Chart, Grid, loss_charts, process_memory
from allhands.observe.course import Judgement
from allhands.observe.judging import judge_run
from allhands.observe.metrics import RunStarted
from allhands.observe.monitor import BoardRow
from allhands.observe.times import of_starts, times_of
from allhands.plan.compared import Comparison
from allhands.plan.outgrown import signs_of
from allhands.report.charts import (
    PHASES_TOLD,
    Bars,
    phase_bars,
    phase_charts,
    rank_memory,
    step_bars,
    step_charts,
)
from allhands.report.compared import unlike_models, unlike_validations
from allhands.report.facts import ReportFacts, samples_of_starts
from allhands.report.planned import PLANNED_TOLD, comparison_of, plan_words, planned_grids
from allhands.report.verdict import words_of

_MOST_EVENTS = 100
_MOST_SAMPLES = 8  # of a prompt
_MOST_CHANGES = 10  # of shares, and of skipped steps
_DATA = (
    "data",
    "hf_dataset",
    "train_on",
    "mask_prompt",
    "max_seq_length",
    "packing",
    "isolate_documents",
    "val_batches",
    "test_batches",
)

# Up to so many runs, the charts of phases are not folded.
_FEW = 2


@dataclass(frozen=True)
class RunPart:
    """The judgement of one run at the top."""

    label: str
    path: str
    colour: int
    status: str
    reason: str
    judgements: tuple[Judgement, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """One part of the page: charts and bars, then tables; ``told`` stands above them.

    Attributes:
        short: the name in the bar that stays at the top of the page; empty: the title.
        folded: true if charts and tables are long, and only shown when asked for.
    """

    key: str
    title: str
    told: str = ""
    short: str = ""
    charts: tuple[Chart, ...] = ()
    bars: tuple[Bars, ...] = ()
    grids: tuple[Grid, ...] = ()
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    made: str
    runs: tuple[RunPart, ...]
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class _Run:
    """One run of the page, with its name and its comparison with its plan."""

    label: str
    facts: ReportFacts
    compared: Comparison | None


def make_page(
    runs: Sequence[ReportFacts], *, title: str | None = None, now: float | None = None
) -> Page:
    """Put a report of one run or several together.

    Args:
        runs: at least one; the first is what others are compared with.
        title: the heading; default: the names of the runs.
        now: Unix time in seconds at which it is made; default: not said.
    """
    labels, measures = times_of([run.history for run in runs])
    named = [_Run(label, run, comparison_of(run)) for label, run in zip(labels, runs, strict=True)]
    parts = tuple(_part(run, colour) for colour, run in enumerate(named))
    finished = map(_finished, _sections(named, measures))
    sections = [section for section in finished if section.charts or section.bars or section.grids]
    made = "" if now is None else f"{form.format_moment(now)[:-3]} UTC"
    return Page(title or _listed(labels), made, parts, tuple(sections))


def _listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _finished(section: Section) -> Section:
    """Return the section with its charts laid out, and without empty charts and bars."""
    return replace(
        section,
        short=section.short or section.title,
        charts=_laid_out([chart for chart in section.charts if chart.lines]),
        bars=tuple(bars for bars in section.bars if bars.rows),
    )


def _laid_out(charts: Sequence[Chart]) -> tuple[Chart, ...]:
    """Place two charts a row; one that would be alone in its row gets all of it."""
    placed: list[Chart] = []
    beside = False  # whether the last one has room beside it
    for chart in (*charts, None):
        if beside and (chart is None or chart.wide):
            placed[-1] = replace(placed[-1], wide=True)
        if chart is not None:
            placed.append(chart)
            beside = not chart.wide and not beside
    return tuple(placed)


def _part(run: _Run, colour: int) -> RunPart:
    facts, history = run.facts, run.facts.history
    found = judge_run(history, is_over=facts.status != "going on")
    for sign in signs_of(history, facts.samples, facts.config):
        found.append(
            Judgement(
                "time", "note", f"{sign.seen[0].upper()}{sign.seen[1:]}. What to do: {sign.advice}."
            )
        )
    notes = list(facts.notes)
    if run.compared:
        found += plan_words(run.compared)
        notes += run.compared.notes
    if skipped := history.skipped:
        steps = ", ".join(str(one.step) for one in skipped[:_MOST_CHANGES])
        more = "…" if len(skipped) > _MOST_CHANGES else ""
        notes.append(f"Steps that changed nothing ({skipped[0].reason}): {steps}{more}.")
    if changes := history.shares[-_MOST_CHANGES:]:
        told = [
            f"from step {one.from_step + 1} {form.format_shares(one.shares)}" for one in changes
        ]
        first = form.format_shares(changes[0].before)
        notes.append(
            f"Ranks' shares of a batch, which follow their speeds: {first}, {', '.join(told)}."
        )
    notes += [f"Warning at step {one.step}: {one.message}" for one in history.warned]
    return RunPart(
        run.label, str(facts.path), colour, facts.status, facts.reason, tuple(found), tuple(notes)
    )


def _figures(labels: Sequence[str], measures: Sequence[tuple[str, list[str]]]) -> Grid:
    """The measures of each run, those that compare runs only where there are several."""
    many = len(labels) > 1
    compared = "speed-up: tokens/s relative to the first run; medians over the reports"
    rows = ((name, *cells) for name, cells in measures if many or name != "speed-up")
    return Grid(compared if many else "figures of the run", ("", *labels), tuple(rows))


def _sections(runs: Sequence[_Run], measures: Sequence[tuple[str, list[str]]]) -> Iterator[Section]:
    labels, facts = [run.label for run in runs], [run.facts for run in runs]
    histories = [run.history for run in facts]
    many = len(runs) > 1

    def grids(make: Callable[[_Run], Iterator[Grid]]) -> tuple[Grid, ...]:
        return tuple(grid for run in runs for grid in make(run))

    title = "Comparison" if many else "Key figures"
    unlike = unlike_models(facts) or unlike_validations(facts)
    yield Section("times", title, unlike, "Figures", grids=(_figures(labels, measures),))
    losses = list(loss_charts(labels, histories))
    if len(losses) % 2:
        losses[0] = replace(losses[0], wide=True)
    yield Section("loss", "Loss", _LOSS, charts=tuple(losses))
    rate, norm, *speed = step_charts(labels, histories)
    yield Section(
        "optimizer", "Learning rate and gradient", "", "Learning rate", charts=(rate, norm)
    )
    ranks = [phase_bars(run.label, *samples_of_starts(run.facts)) for run in runs]
    bars = (step_bars(labels, histories), *ranks)
    yield Section("time", "Speed and phases", "", "Speed", charts=tuple(speed), bars=bars)
    phases: list[Chart] = []
    for place, run in enumerate(runs):
        phases += phase_charts(
            f"phases-{place}", run.label, run.facts.history, run.facts.samples, place
        )
    # Phases of many runs would fill most of the page; the bars above compare them.
    over, charts = "Phases of a step over the run", tuple(phases)
    yield Section("phases", over, PHASES_TOLD, "Phases", charts=charts, folded=len(runs) > _FEW)
    yield Section("memory", "Memory", charts=tuple(_memory_charts(runs)), grids=grids(_needs))
    planned = grids(lambda run: planned_grids(run.label, run.compared))
    yield Section("plan", "Planned and measured", PLANNED_TOLD, "Plan", grids=planned)
    yield Section("restarts", "Starts, faults and restarts", "", "Starts", grids=grids(_events))
    machines = _columns("model and machines", labels, [_machine(run) for run in facts])
    yield Section("machines", "Model and machines", "", "Machines", grids=(machines,))
    yield Section("data", "Data", grids=(_columns("data", labels, [_data(run) for run in facts]),))
    yield Section(
        "samples", "Samples", "Texts of the model during training.", grids=grids(_samples)
    )
    yield Section("answers", "Answers before and after", "", "Answers", grids=grids(_answers))
    yield Section("options", "Configuration", grids=tuple(_options(labels, facts)), folded=True)


def _memory_charts(runs: Sequence[_Run]) -> Iterator[Chart]:
    for place, run in enumerate(runs):
        key = f"rank-memory-{place}" if len(runs) > 1 else "rank-memory"
        yield rank_memory(key, run.label, run.facts.history)
        yield process_memory(f"memory-{place}", run.label, run.facts.samples)


_LOSS = (
    "Solid: training; dashed, with points: validation; a star: the best validation; a vertical dotted line: a "
    "restart. Drag over a chart to zoom, double-click to see all; with the keyboard, arrow keys read the values."
)


# --- tables ---------------------------------------------------------------------------------------


def _needs(run: _Run) -> Iterator[Grid]:
    """Yield a table of the highest memory of each process; for ranks, with the expected memory."""
    facts = run.facts
    if not facts.rows:
        return
    ranks = [row for row in facts.rows if row.last.role == "rank"]
    directing = [row for row in facts.rows if row.last.role != "rank"]
    rows = [_need(facts, row) for row in ranks]
    # Those that direct the ranks train nothing: they stand apart, below what training needs.
    if directing and len(ranks) > 1:
        rows.append(_sum("ranks together", facts.ranks_bytes))
    rows += [_need(facts, row) for row in directing]
    rows.append(_sum("all together" if directing else "together", facts.together_bytes))
    caption = f"highest memory of each process of {run.label}; sums count shared pages once"
    caption += "; since the last resume" if facts.began_before else ""
    if directing:
        names = ", ".join(row.last.name for row in directing)
        caption += f"; training needs the ranks' memory ({names} only starts and watches them)"
    measures = (
        "expected",
        "measured in training",
        "of expected",
        "highest resident",
        "proportional",
        "MLX's arrays",
    )
    yield Grid(caption, ("process", "computer", *measures), tuple(rows))


def _need(facts: ReportFacts, row: BoardRow) -> tuple[str, ...]:
    last = row.last
    expected = last.estimated_bytes or last.mlx_estimated_bytes or 0
    trained = _in_training(facts, last.rank)
    share = f"{trained / expected:.0%}" if expected and trained else NONE
    held = (row.peak_rss_bytes, row.peak_pss_bytes, row.peak_mlx_bytes)
    return (last.name, last.host, _bytes(expected), _bytes(trained), share, *map(_bytes, held))


def _sum(name: str, held_bytes: int) -> tuple[str, ...]:
    return (name, "", *[NONE] * 4, _bytes(held_bytes), NONE)


def _bytes(count: int) -> str:
    return form.format_bytes(count) if count else NONE


def _in_training(facts: ReportFacts, rank: int | None) -> int:
    """Return the highest memory that a rank reported in training: the needed memory on an NVIDIA
    GPU, else the resident memory.
    """
    peaks = [one.needed_bytes or one.peak_rss_bytes for one in facts.history.train]
    return (
        0 if rank is None else max((known[rank] for known in peaks if rank < len(known)), default=0)
    )


def _events(run: _Run) -> Iterator[Grid]:
    """Starts as the run wrote them down, and the supervisor's events."""
    starts = run.facts.history.starts
    rows: list[tuple[float, str, str, str]] = []
    for start in starts:
        text = f"attempt {start.attempt}, from {f'step {start.step}' if start.step else 'the beginning'}, "
        text += f"{form.counted(start.num_ranks, 'rank')} ({start.backend})"
        text += f", resumed from {start.resumed_from}" if start.resumed_from else ""
        rows.append((start.time, "start", "", text))
    rows += [
        (float(event["time"]), str(event["kind"]), *words_of(event)) for event in run.facts.journal
    ]
    if len(rows) < 2:
        return
    rows.sort(key=lambda row: row[0])
    left = f" (the last {_MOST_EVENTS} of {len(rows)})" if len(rows) > _MOST_EVENTS else ""
    begun = starts[0].time if starts else None
    cells = [
        (_after(time, begun), kind, where or NONE, text, form.format_moment(time))
        for time, kind, where, text in rows[-_MOST_EVENTS:]
    ]
    yield Grid(
        f"{run.label}{left}", ("after", "event", "where", "in words", "time (UTC)"), tuple(cells)
    )


def _after(time: float, begun: float | None) -> str:
    if begun is None:
        return NONE
    away = form.format_duration(abs(time - begun))
    return f"{'-' if time < begun and away != form.format_duration(0.0) else '+'}{away}"


def _columns(caption: str, labels: Sequence[str], columns: Sequence[Mapping[str, object]]) -> Grid:
    """Return a table with one column a run, without rows of which nothing is known."""
    names = dict.fromkeys(name for column in columns for name in column)
    rows = ((name, *(str(column.get(name) or "") or NONE for column in columns)) for name in names)
    return Grid(caption, ("", *labels), tuple(row for row in rows if set(row[1:]) != {NONE}))


def _machine(run: ReportFacts) -> dict[str, object]:
    """Model and machines of one run."""
    history, started = run.history, run.history.started
    hosts: dict[str, list[str]] = {}
    for row in run.rows:
        hosts.setdefault(row.last.host, []).append(row.last.name)
    gpus = [
        (row.last.name, row.last.gpu_total_bytes) for row in run.rows if row.last.gpu_total_bytes
    ]
    return {
        "model": of_starts(history, lambda it: it.model),
        "method": of_starts(history, lambda it: it.method),
        "trained parameters": of_starts(history, _parameters),
        "batch size (all ranks)": of_starts(history, lambda it: it.batch_size),
        "steps": started and str(started.total_steps),
        "iterations (batches)": started and started.total_iterations,
        "ranks": of_starts(history, lambda it: it.num_ranks),
        "back-end": of_starts(history, lambda it: it.backend if it.num_ranks > 1 else None),
        "cores per rank": of_starts(history, lambda it: it.cores_per_rank),
        "computers": "; ".join(f"{host}: {', '.join(names)}" for host, names in hosts.items()),
        "GPU memory": "; ".join(f"{name}: {form.format_bytes(held or 0)}" for name, held in gpus),
        "versions": started
        and ", ".join(f"{name} {version}" for name, version in started.versions.items()),
        "directory": run.path,
    }


def _parameters(started: RunStarted) -> str | None:
    if not started.total_params:
        return None
    share = 100 * started.trainable_params / started.total_params
    trained = form.format_count(started.trainable_params)
    total = form.format_count(started.total_params)
    return f"{trained} of {total} ({share:.3g} %)"


def _data(run: ReportFacts) -> dict[str, object]:
    """Data of one run."""
    history, last = run.history, run.history.last
    validated = max((one.num_tokens for one in history.comparable), default=0)
    bits = [one.bits_per_byte for one in history.valid if one.bits_per_byte is not None]
    test_loss = history.ended and history.ended.test_loss
    return {
        f"training {_rows(history.started)}": history.started
        and _count(history.started.num_train_examples),
        "trained tokens": last and _count(last.trained_tokens),
        "epochs": last and math.isfinite(last.epoch) and f"{last.epoch:.2f}",
        "tokens of a validation": _count(validated),
        "test loss": None if test_loss is None else f"{test_loss:.4f}",
        "bits per byte (last)": bits and f"{bits[-1]:.3f}",
        "prepared from": ", ".join(_prepared(run)),
        **{name: _option(run.config.get(name)) for name in _DATA},
    }


def _rows(started: RunStarted | None) -> str:
    """Return the word for a run's pieces of training data."""
    packed = started is not None and started.method == "pre-training"
    return "rows" if packed else "examples"


def _prepared(run: ReportFacts) -> Iterator[str]:
    """The numbers that `data prepare` has counted, each with its word."""
    for name in ("rows_read", "rows_kept", "rows_left_out", "duplicates_removed"):
        if name in run.prepared:
            value = run.prepared[name]  # of a file that anybody may have written
            shown = f"{value:,}" if isinstance(value, int) else str(value)
            yield f"{shown} {name.replace('_', ' ')}"


def _count(number: int) -> str:
    return f"{number:,}" if number else ""


def _samples(run: _Run) -> Iterator[Grid]:
    """The first and the last text for each prompt, and some between."""
    rows: list[tuple[str, ...]] = []
    sampled = run.facts.history.sampled
    for prompt in dict.fromkeys(one.prompt for one in sampled):
        texts = [one for one in sampled if one.prompt == prompt]
        count = min(len(texts), _MOST_SAMPLES)
        places = (round(place * (len(texts) - 1) / max(1, count - 1)) for place in range(count))
        rows += [(str(texts[place].step), prompt, texts[place].text) for place in places]
    if rows:
        yield Grid(f"samples of {run.label}", ("step", "prompt", "text"), tuple(rows))


def _answers(run: _Run) -> Iterator[Grid]:
    for one in run.facts.answers:
        rows = tuple(zip(one.prompts, one.before, one.after, strict=True))
        yield Grid(f"answers of {run.label} ({one.file})", ("prompt", "before", "after"), rows)


def _options(labels: Sequence[str], runs: Sequence[ReportFacts]) -> Iterator[Grid]:
    configs = [_in_effect(run.config) for run in runs]
    names = sorted({name for config in configs for name in config})
    if not names:
        return
    rows = tuple(
        (name, *(_option(config.get(name)) or NONE for config in configs)) for name in names
    )
    differ = tuple(row for row in rows if len(set(row[1:])) > 1)
    if differ:
        yield Grid("options in which the runs differ", ("option", *labels), differ)
    yield Grid(
        "all options that are set",
        ("option", *labels),
        tuple(row for row in rows if set(row[1:]) != {NONE}),
    )


def _in_effect(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the warm-up in one place: it may be given on its own or within the
    schedule.
    """
    given = config.get("lr_schedule")
    if not isinstance(given, Mapping):
        return dict(config)
    schedule = cast("Mapping[str, Any]", given)
    told = {name: value for name, value in schedule.items() if name != "warmup"}
    if not told.get("warmup_init"):
        told.pop("warmup_init", None)
    return {
        **config,
        "lr_schedule": told,
        "warmup_steps": schedule.get("warmup") or config.get("warmup_steps"),
    }


def _option(value: Any) -> str:
    if value is None or value in ("", {}, []):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        parts = cast("Mapping[str, Any]", value).items()
        return ", ".join(
            f"{key}: {_option(inner) or inner}" for key, inner in parts if inner is not None
        )
    return ", ".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else str(value)
