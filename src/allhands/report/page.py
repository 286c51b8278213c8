"""What stands on a report, in the order of its sections; HTML and Markdown are two ways to write it down."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from allhands.io import formatting as form
from allhands.io.pictures import PHASES
from allhands.observe.charts import Chart, Grid, loss_charts, process_memory
from allhands.observe.course import Judgement
from allhands.observe.judging import judge_run
from allhands.observe.metrics import RunStarted
from allhands.observe.monitor import BoardRow
from allhands.observe.times import of_starts, times_of
from allhands.plan.outgrown import signs_of
from allhands.report.charts import Bars, phase_bars, step_charts, step_parts
from allhands.report.compared import unlike_validations
from allhands.report.facts import ReportFacts, samples_of_starts
from allhands.report.phases import PHASES_TOLD, phase_charts
from allhands.report.planned import PLANNED_TOLD, comparison_of, plan_words, planned_grids
from allhands.report.verdict import words_of

_NONE = "–"
_MOST_EVENTS = 100
_MOST_SAMPLES = 8  # of a prompt
_SHORT = {
    "times": "Figures",
    "optimizer": "Learning rate",
    "time": "Speed",
    "phases": "Phases",
    "plan": "Plan",
    "restarts": "Starts",
    "machines": "Machines",
    "answers": "Answers",
}
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


@dataclass(frozen=True)
class RunPart:
    """What is said of one run at the top."""

    label: str
    path: str
    colour: int
    status: str
    reason: str
    judgements: tuple[Judgement, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """One part of the page: charts and bars, then tables; ``told`` stands above them."""

    key: str
    title: str
    told: str = ""
    charts: tuple[Chart, ...] = ()
    bars: tuple[Bars, ...] = ()
    grids: tuple[Grid, ...] = ()
    folded: bool = False  # whether the tables are long, and shown when asked for

    @property
    def short(self) -> str:
        """What it is called in the bar that stays at the top of the page."""
        return _SHORT.get(self.key, self.title)


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    made: str
    runs: tuple[RunPart, ...]
    sections: tuple[Section, ...]


def make_page(runs: Sequence[ReportFacts], *, title: str | None = None, now: float | None = None) -> Page:
    """Put a report of one run or several together.

    Args:
        runs: at least one; the first is what others are compared with.
        title: above it all; default: the names of the runs.
        now: Unix time in seconds at which it is made; default: not said.
    """
    labels, measures = times_of([run.history for run in runs])
    parts = tuple(_part(label, place, run) for place, (label, run) in enumerate(zip(labels, runs, strict=True)))
    sections = [
        replace(section, charts=_laid_out(section.charts))
        for section in _sections(labels, measures, runs)
        if section.charts or section.bars or section.grids
    ]
    made = "" if now is None else f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} UTC"
    return Page(title or " and ".join(labels), made, parts, tuple(sections))


def _laid_out(charts: Sequence[Chart]) -> tuple[Chart, ...]:
    """Two charts a row; one that would be alone in its row has all of it."""
    placed: list[Chart] = []
    beside = False  # whether the last one has room beside it
    for chart in (*charts, None):
        if beside and (chart is None or chart.wide):
            placed[-1] = replace(placed[-1], wide=True)
        if chart is not None:
            placed.append(chart)
            beside = not chart.wide and not beside
    return tuple(placed)


def _part(label: str, colour: int, run: ReportFacts) -> RunPart:
    history = run.history
    found = judge_run(history, is_over=run.status != "going on")
    for sign in signs_of(history, run.samples):
        found.append(Judgement("time", "note", f"{sign.seen[0].upper()}{sign.seen[1:]}. What to do: {sign.advice}."))
    planned = comparison_of(run)
    found += plan_words(planned) if planned else []
    notes = [*run.notes, *(planned.notes if planned else ())]
    if skipped := history.skipped:
        steps = ", ".join(str(one.step) for one in skipped[:10]) + ("…" if len(skipped) > 10 else "")
        notes.append(f"Steps that changed nothing ({skipped[0].reason}): {steps}.")
    if changes := history.shares[-10:]:
        told = [f"from step {one.from_step + 1} {form.format_shares(one.shares)}" for one in changes]
        first = form.format_shares(changes[0].before)
        notes.append(f"Ranks' shares of a batch, which follow their speeds: {first}, {', '.join(told)}.")
    notes += [f"Warning at step {one.step}: {one.message}" for one in history.warned]
    return RunPart(label, str(run.path), colour, run.status, run.reason, tuple(found), tuple(notes))


def _sections(
    labels: Sequence[str], measures: Sequence[tuple[str, list[str]]], runs: Sequence[ReportFacts]
) -> Iterator[Section]:
    histories, named = [run.history for run in runs], list(zip(labels, runs, strict=True))
    many = len(runs) > 1
    caption = "speed-up: tokens/s relative to the first run; medians over the reports" if many else "figures of the run"
    kept = ((name, *cells) for name, cells in measures if many or name != "speed-up")
    times = Grid(caption, ("", *labels), tuple(kept))
    yield Section("times", "Side by side" if many else "In figures", unlike_validations(runs), grids=(times,))
    losses = list(loss_charts(labels, histories))
    if losses and len(losses) != 2:
        losses[0] = replace(losses[0], wide=True)
    yield Section("loss", "Loss", _LOSS, charts=tuple(losses))
    charts = {one.key: one for one in step_charts(labels, histories)}
    yield Section("optimizer", "Learning rate and gradient", charts=_some(charts, "learning-rate", "gradient-norm"))
    bars = (
        step_parts(labels, histories),
        *(phase_bars(label, *samples_of_starts(run), _phase) for label, run in named),
    )
    speed = _some(charts, "throughput", "step-time", "sent")
    yield Section("time", "Speed and phases", charts=speed, bars=tuple(one for one in bars if one))
    phases, drawn = list[Chart](), list(_some(charts, "rank-memory"))
    for place, (label, run) in enumerate(named):
        phases += phase_charts(f"phases-{place}", label, run.history, run.samples, place)
        measured = process_memory(f"memory-{place}", label, run.samples)
        drawn += [*_some(charts, f"rank-memory-{place}"), *([measured] if measured else [])]
    yield Section("phases", "Phases of a step over the run", PHASES_TOLD, charts=tuple(phases))
    yield Section("memory", "Memory", charts=tuple(drawn), grids=_grids(_needs, named))
    yield Section("plan", "Planned and measured", PLANNED_TOLD, grids=_all_grids(_planned, named))
    yield Section("restarts", "Starts, faults and restarts", grids=_grids(_events, named))
    machines = _columns("model and machines", labels, [_machine(run) for run in runs])
    yield Section("machines", "Model and machines", grids=(machines,))
    yield Section("data", "Data", grids=(_columns("data", labels, [_data(run) for run in runs]),))
    yield Section("samples", "Samples", "What the model wrote while it learnt.", grids=_grids(_samples, named))
    yield Section("answers", "Answers before and after", grids=_all_grids(_answers, named))
    yield Section("options", "Configuration", grids=tuple(_options(labels, runs)), folded=True)


_Named = Sequence[tuple[str, ReportFacts]]


def _grids(make: Callable[[str, ReportFacts], Grid | None], named: _Named) -> tuple[Grid, ...]:
    return tuple(grid for each in named if (grid := make(*each)))


def _planned(label: str, run: ReportFacts) -> Iterator[Grid]:
    return planned_grids(label, comparison_of(run))


def _all_grids(make: Callable[[str, ReportFacts], Iterator[Grid]], named: _Named) -> tuple[Grid, ...]:
    return tuple(grid for each in named for grid in make(*each))


_LOSS = (
    "Solid: training; dashed, with points: validation; a star: the best validation; a dotted line over the whole "
    "height: a restart. Drag over a chart to look closer, double-click to see all; with the keyboard, arrow keys read "
    "the values."
)


def _some(charts: Mapping[str, Chart], *keys: str) -> tuple[Chart, ...]:
    return tuple(charts[key] for key in keys if key in charts)


def _phase(name: str) -> str:
    return PHASES[name][0] if name in PHASES else name


# --- tables ------------------------------------------------------------------------------------------


def _needs(label: str, run: ReportFacts) -> Grid | None:
    """The highest memory of each process; that of ranks in training beside what was expected of it."""
    if not run.rows:
        return None
    ranks = [row for row in run.rows if row.last.role == "rank"]
    directing = [row for row in run.rows if row.last.role != "rank"]
    rows = [_need(run, row) for row in ranks]
    # Those that direct the ranks train nothing: they stand apart, below what training needs.
    if directing:
        rows += [_sum("ranks together", run.ranks_bytes)] * (len(ranks) > 1)
        rows += [_need(run, row) for row in directing]
    rows.append(_sum("all together" if directing else "together", run.together_bytes))
    told = "expected", "measured in training", "of expected", "highest resident", "proportional", "MLX's arrays"
    caption = f"highest memory of the processes of {label}; together: pages that are shared counted once"
    caption += "; since it was resumed last" if run.began_before else ""
    if directing:
        names = ", ".join(row.last.name for row in directing)
        caption += f"; training needs what the ranks need ({names} only starts and watches them)"
    return Grid(caption, ("process", "computer", *told), tuple(rows))


def _need(run: ReportFacts, row: BoardRow) -> tuple[str, ...]:
    last = row.last
    expected = last.estimated_bytes or last.mlx_estimated_bytes or 0
    trained = _in_training(run, last.rank)
    share = f"{trained / expected:.0%}" if expected and trained else _NONE
    held = (row.peak_rss_bytes, row.peak_pss_bytes, row.peak_mlx_bytes)
    return (last.name, last.host, _bytes(expected), _bytes(trained), share, *map(_bytes, held))


def _sum(name: str, held_bytes: int) -> tuple[str, ...]:
    return (name, "", *[_NONE] * 4, _bytes(held_bytes), _NONE)


def _bytes(count: int) -> str:
    return form.format_bytes(count) if count else _NONE


def _in_training(run: ReportFacts, rank: int | None) -> int:
    """The highest resident memory that a rank has reported, before what is written and drawn at the end.

    On an NVIDIA GPU it is what the rank needed there.
    """
    peaks = [one.needed_bytes or one.peak_rss_bytes for one in run.history.train]
    return 0 if rank is None else max((known[rank] for known in peaks if rank < len(known)), default=0)


def _events(label: str, run: ReportFacts) -> Grid | None:
    """Starts as the run wrote them down, and the supervisor's events."""
    starts = run.history.starts
    begun = starts[0].time if starts else None
    rows: list[tuple[float, str, str, str]] = []
    for start in starts:
        text = f"attempt {start.attempt}, from {f'step {start.step}' if start.step else 'the beginning'}, "
        text += f"{start.num_ranks} rank{'s' * (start.num_ranks > 1)} ({start.backend})"
        text += f", resumed from {start.resumed_from}" if start.resumed_from else ""
        rows.append((start.time, "start", "", text))
    rows += [(float(event["time"]), str(event["kind"]), *words_of(event)) for event in run.journal]
    if len(rows) < 2:
        return None
    rows.sort(key=lambda row: row[0])
    left = f" (the last {_MOST_EVENTS} of {len(rows)})" if len(rows) > _MOST_EVENTS else ""
    head = ("after", "what", "where", "in words", "time (UTC)")
    cells = (
        (_after(time, begun), kind, where or _NONE, text, form.format_moment(time))
        for time, kind, where, text in rows[-_MOST_EVENTS:]
    )
    return Grid(f"{label}{left}", head, tuple(cells))


def _after(time: float, begun: float | None) -> str:
    if begun is None:
        return _NONE
    away = form.format_duration(abs(time - begun))
    return f"{'-' if time < begun and away != form.format_duration(0.0) else '+'}{away}"


def _columns(caption: str, labels: Sequence[str], columns: Sequence[Mapping[str, object]]) -> Grid:
    """One column a run; rows of which nothing is known are left out."""
    names = dict.fromkeys(name for column in columns for name in column)
    rows = ((name, *(str(column.get(name) or "") or _NONE for column in columns)) for name in names)
    return Grid(caption, ("", *labels), tuple(row for row in rows if set(row[1:]) != {_NONE}))


def _machine(run: ReportFacts) -> dict[str, object]:
    """Of one run its model and machines."""
    history, started = run.history, run.history.started
    hosts: dict[str, list[str]] = {}
    for row in run.rows:
        hosts.setdefault(row.last.host, []).append(row.last.name)
    gpus = [(row.last.name, row.last.gpu_total_bytes) for row in run.rows if row.last.gpu_total_bytes]
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
        "versions": started and ", ".join(f"{name} {version}" for name, version in started.versions.items()),
        "directory": run.path,
    }


def _parameters(started: RunStarted) -> str | None:
    if not started.total_params:
        return None
    share = 100 * started.trainable_params / started.total_params
    trained, total = form.format_count(started.trainable_params), form.format_count(started.total_params)
    return f"{trained} of {total} ({share:.3g} %)"


def _data(run: ReportFacts) -> dict[str, object]:
    """Of one run its data."""
    history, last = run.history, run.history.train[-1] if run.history.train else None
    validated = max((one.num_tokens for one in history.valid), default=0)
    bits = [one.bits_per_byte for one in history.valid if one.bits_per_byte is not None]
    test_loss = history.ended.test_loss if history.ended else None
    names = ("rows_read", "rows_kept", "rows_left_out", "duplicates_removed")
    prepared = [f"{run.prepared[name]} {name.replace('_', ' ')}" for name in names if name in run.prepared]
    examples = history.started.num_train_examples if history.started else 0
    return {
        "training examples": examples and f"{examples:,}",
        "trained tokens": last and last.trained_tokens and f"{last.trained_tokens:,}",
        "epochs": last and math.isfinite(last.epoch) and f"{last.epoch:.2f}",
        "tokens of a validation": validated and f"{validated:,}",
        "test loss": None if test_loss is None else f"{test_loss:.4f}",
        "bits per byte (last)": bits and f"{bits[-1]:.3f}",
        "prepared from": ", ".join(prepared),
        **{name: _option(run.config.get(name)) for name in _DATA},
    }


def _samples(label: str, run: ReportFacts) -> Grid | None:
    """Of each prompt the first and the last text, and some between."""
    rows: list[tuple[str, ...]] = []
    sampled = run.history.sampled
    for prompt in dict.fromkeys(one.prompt for one in sampled):
        texts = [one for one in sampled if one.prompt == prompt]
        count = min(len(texts), _MOST_SAMPLES)
        places = (round(place * (len(texts) - 1) / max(1, count - 1)) for place in range(count))
        rows += [(str(texts[place].step), prompt, texts[place].text) for place in places]
    return Grid(f"samples of {label}", ("step", "prompt", "text"), tuple(rows)) if rows else None


def _answers(label: str, run: ReportFacts) -> Iterator[Grid]:
    for one in run.answers:
        rows = tuple(zip(one.prompts, one.before, one.after, strict=True))
        yield Grid(f"answers of {label} ({one.file})", ("prompt", "before", "after"), rows)


def _options(labels: Sequence[str], runs: Sequence[ReportFacts]) -> Iterator[Grid]:
    configs = [_in_effect(run.config) for run in runs]
    names = sorted({name for config in configs for name in config})
    if not names:
        return
    rows = tuple((name, *(_option(config.get(name)) or _NONE for config in configs)) for name in names)
    differ = tuple(row for row in rows if len(set(row[1:])) > 1)
    if differ:
        yield Grid("options in which the runs differ", ("option", *labels), differ)
    yield Grid("all options that are set", ("option", *labels), tuple(row for row in rows if set(row[1:]) != {_NONE}))


def _in_effect(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the warm-up in one place: it may be given on its own or with the schedule, not as both."""
    schedule = config.get("lr_schedule")
    if not isinstance(schedule, Mapping):
        return dict(config)
    told = {str(name): value for name, value in schedule.items() if name != "warmup"}
    if not told.get("warmup_init"):
        told.pop("warmup_init", None)
    return {**config, "lr_schedule": told, "warmup_steps": schedule.get("warmup") or config.get("warmup_steps")}


def _option(value: Any) -> str:
    if value is None or value in ("", {}, []):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        known = {str(key): inner for key, inner in value.items() if inner is not None}
        return ", ".join(f"{key}: {_option(inner) or inner}" for key, inner in known.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
