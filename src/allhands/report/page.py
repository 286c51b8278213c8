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
from allhands.observe.metrics import Sampled
from allhands.observe.monitor import BoardRow
from allhands.observe.times import of_starts, times_of
from allhands.plan.outgrown import Sign, signs_of
from allhands.report.charts import Bars, phase_bars, step_charts, step_parts
from allhands.report.compared import unlike_validations
from allhands.report.facts import ReportFacts, samples_of_starts
from allhands.report.phases import PHASES_TOLD, phase_charts
from allhands.report.planned import PLANNED_TOLD, comparison_of, plan_words, planned_grids

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
    for chart in charts:
        if chart.wide and beside:
            placed[-1] = replace(placed[-1], wide=True)
        beside = not chart.wide and not beside
        placed.append(chart)
    if beside:
        placed[-1] = replace(placed[-1], wide=True)
    return tuple(placed)


def _part(label: str, colour: int, run: ReportFacts) -> RunPart:
    history = run.history
    found = judge_run(history, is_over=run.status != "going on")
    found += [_judgement(sign) for sign in signs_of(history, run.samples)]
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


def _judgement(sign: Sign) -> Judgement:
    return Judgement("time", "note", f"{sign.seen[0].upper()}{sign.seen[1:]}. What to do: {sign.advice}.")


def _sections(
    labels: Sequence[str], measures: Sequence[tuple[str, list[str]]], runs: Sequence[ReportFacts]
) -> Iterator[Section]:
    histories = [run.history for run in runs]
    many = len(runs) > 1
    caption = "speed-up: tokens/s relative to the first run; medians over the reports" if many else "figures of the run"
    kept = [(name, cells) for name, cells in measures if many or name != "speed-up"]
    times = Grid(caption, ("", *labels), tuple((name, *cells) for name, cells in kept))
    yield Section("times", "Side by side" if many else "In figures", unlike_validations(runs), grids=(times,))
    yield Section("loss", "Loss", _LOSS, charts=_first_wide(tuple(loss_charts(labels, histories))))
    charts = {one.key: one for one in step_charts(labels, histories)}
    yield Section("optimizer", "Learning rate and gradient", charts=_some(charts, "learning-rate", "gradient-norm"))
    bars = [step_parts(labels, histories)]
    bars += [phase_bars(label, *samples_of_starts(run), _phase) for label, run in zip(labels, runs, strict=True)]
    speed = _some(charts, "throughput", "step-time", "sent")
    yield Section("time", "Speed and phases", charts=speed, bars=tuple(one for one in bars if one))
    phases = [
        chart
        for place, (label, run) in enumerate(zip(labels, runs, strict=True))
        for chart in phase_charts(f"phases-{place}", label, run.history, run.samples, place)
    ]
    yield Section("phases", "Phases of a step over the run", PHASES_TOLD, charts=tuple(phases))
    drawn = _some(charts, "rank-memory")
    for place, (label, run) in enumerate(zip(labels, runs, strict=True)):
        measured = process_memory(f"memory-{place}", label, run.samples)
        drawn += (*_some(charts, f"rank-memory-{place}"), *((measured,) if measured else ()))
    needs = tuple(grid for label, run in zip(labels, runs, strict=True) if (grid := _needs(label, run)))
    yield Section("memory", "Memory", charts=drawn, grids=needs)
    planned = [
        grid
        for label, run in zip(labels, runs, strict=True)
        if (found := comparison_of(run))
        for grid in planned_grids(label, found)
    ]
    yield Section("plan", "Planned and measured", PLANNED_TOLD, grids=tuple(planned))
    events = tuple(grid for label, run in zip(labels, runs, strict=True) if (grid := _events(label, run)))
    yield Section("restarts", "Starts, faults and restarts", grids=events)
    yield Section("machines", "Model and machines", grids=(_machines(labels, runs),))
    yield Section("data", "Data", grids=(_data(labels, runs),))
    samples = [grid for label, run in zip(labels, runs, strict=True) if (grid := _samples(label, run.history.sampled))]
    yield Section("samples", "Samples", "What the model wrote while it learnt.", grids=tuple(samples))
    yield Section("answers", "Answers before and after", grids=tuple(_answers(labels, runs)))
    yield Section("options", "Configuration", grids=tuple(_options(labels, runs)), folded=True)


_LOSS = (
    "Solid: training; dashed, with points: validation; a star: the best validation; a dotted line over the whole "
    "height: a restart. Drag over a chart to look closer, double-click to see all; with the keyboard, arrow keys read "
    "the values."
)


def _first_wide(charts: tuple[Chart, ...]) -> tuple[Chart, ...]:
    return tuple(
        replace(chart, wide=chart.wide or (place == 0 and len(charts) != 2)) for place, chart in enumerate(charts)
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
    if run.began_before:
        caption += "; since it was resumed last"
    if directing:
        caption += f"; training needs what the ranks need ({_names(directing)} only starts and watches them)"
    return Grid(caption, ("process", "computer", *told), tuple(rows))


def _names(rows: Sequence[BoardRow]) -> str:
    return ", ".join(row.last.name for row in rows)


def _need(run: ReportFacts, row: BoardRow) -> tuple[str, ...]:
    expected = row.last.estimated_bytes or row.last.mlx_estimated_bytes
    trained = _in_training(run, row.last.rank)
    return (
        row.last.name,
        row.last.host,
        form.format_bytes(expected) if expected else _NONE,
        form.format_bytes(trained) if trained else _NONE,
        f"{trained / expected:.0%}" if expected and trained else _NONE,
        form.format_bytes(row.peak_rss_bytes),
        form.format_bytes(row.peak_pss_bytes),
        form.format_bytes(row.peak_mlx_bytes) if row.peak_mlx_bytes else _NONE,
    )


def _sum(name: str, held_bytes: int) -> tuple[str, ...]:
    return (name, "", _NONE, _NONE, _NONE, _NONE, form.format_bytes(held_bytes), _NONE)


def _in_training(run: ReportFacts, rank: int | None) -> int:
    """The highest resident memory that a rank has reported, before what is written and drawn at the end.

    On an NVIDIA GPU it is what the rank needed there.
    """
    peaks = [one.needed_bytes or one.peak_rss_bytes for one in run.history.train]
    return 0 if rank is None else max((known[rank] for known in peaks if rank < len(known)), default=0)


def _events(label: str, run: ReportFacts) -> Grid | None:
    """Starts as the run wrote them down, and the supervisor's events."""
    begun = run.history.starts[0].time if run.history.starts else None
    rows: list[tuple[float, tuple[str, ...]]] = []
    for start in run.history.starts:
        place = f"from step {start.step}" if start.step else "from the beginning"
        text = (
            f"attempt {start.attempt}, {place}, {start.num_ranks} rank{'s' * (start.num_ranks > 1)} ({start.backend})"
        )
        rows.append(
            (
                start.time,
                (
                    _after(start.time, begun),
                    "start",
                    _NONE,
                    f"{text}{_from(start.resumed_from)}",
                    form.format_moment(start.time),
                ),
            )
        )
    for event in run.journal:
        where = ", ".join(f"{name} {event[name]}" for name in ("rank", "host", "step") if event.get(name) is not None)
        text = str(event.get("message", ""))
        if (error := str(event.get("error") or "")) and error not in text:
            text += f": {error}"
        time = float(event["time"])
        rows.append((time, (_after(time, begun), str(event["kind"]), where or _NONE, text, form.format_moment(time))))
    if len(rows) < 2:
        return None
    rows.sort(key=lambda row: row[0])
    left = f" (the last {_MOST_EVENTS} of {len(rows)})" if len(rows) > _MOST_EVENTS else ""
    head = ("after", "what", "where", "in words", "time (UTC)")
    return Grid(f"{label}{left}", head, tuple(cells for _, cells in rows[-_MOST_EVENTS:]))


def _from(checkpoint: str | None) -> str:
    return f", resumed from {checkpoint}" if checkpoint else ""


def _after(time: float, begun: float | None) -> str:
    if begun is None:
        return _NONE
    away = form.format_duration(abs(time - begun))
    return f"{'-' if time < begun and away != form.format_duration(0.0) else '+'}{away}"


def _columns(
    caption: str,
    labels: Sequence[str],
    rows: Sequence[tuple[str, Callable[[ReportFacts], str]]],
    runs: Sequence[ReportFacts],
) -> Grid:
    """One column a run; rows of which nothing is known are left out."""
    cells = [(name, *(tell(run) or _NONE for run in runs)) for name, tell in rows]
    return Grid(caption, ("", *labels), tuple(row for row in cells if set(row[1:]) != {_NONE}))


def _machines(labels: Sequence[str], runs: Sequence[ReportFacts]) -> Grid:
    def started(tell: Callable[[Any], object]) -> Callable[[ReportFacts], str]:
        return lambda run: of_starts(run.history, tell)

    def versions(run: ReportFacts) -> str:
        known = run.history.started.versions if run.history.started else {}
        return ", ".join(f"{name} {version}" for name, version in known.items())

    rows: list[tuple[str, Callable[[ReportFacts], str]]] = [
        ("model", started(lambda it: it.model)),
        ("method", started(lambda it: it.method)),
        ("trained parameters", started(_parameters)),
        ("batch size (all ranks)", started(lambda it: it.batch_size)),
        ("steps", lambda run: str(run.history.started.total_steps) if run.history.started else ""),
        ("iterations (batches)", lambda run: str((run.history.started and run.history.started.total_iterations) or "")),
        ("ranks", started(lambda it: it.num_ranks)),
        ("back-end", started(lambda it: it.backend if it.num_ranks > 1 else None)),
        ("cores per rank", started(lambda it: it.cores_per_rank)),
        ("computers", _computers),
        ("GPU memory", _gpus),
        ("versions", versions),
        ("directory", lambda run: str(run.path)),
    ]
    return _columns("model and machines", labels, rows, runs)


def _parameters(started: Any) -> str | None:
    if not started.total_params:
        return None
    share = 100 * started.trainable_params / started.total_params
    trained, total = form.format_count(started.trainable_params), form.format_count(started.total_params)
    return f"{trained} of {total} ({share:.3g} %)"


def _computers(run: ReportFacts) -> str:
    hosts: dict[str, list[str]] = {}
    for row in run.rows:
        hosts.setdefault(row.last.host, []).append(row.last.name)
    return "; ".join(f"{host}: {', '.join(names)}" for host, names in hosts.items())


def _gpus(run: ReportFacts) -> str:
    known = [row.last for row in run.rows if row.last.gpu_total_bytes]
    return "; ".join(f"{one.name}: {form.format_bytes(one.gpu_total_bytes or 0)}" for one in known)


def _data(labels: Sequence[str], runs: Sequence[ReportFacts]) -> Grid:
    def examples(run: ReportFacts) -> str:
        known = run.history.started.num_train_examples if run.history.started else 0
        return f"{known:,}" if known else ""

    def tokens(run: ReportFacts) -> str:
        known = run.history.train[-1].trained_tokens if run.history.train else 0
        return f"{known:,}" if known else ""

    def epochs(run: ReportFacts) -> str:
        known = run.history.train[-1].epoch if run.history.train else math.nan
        return f"{known:.2f}" if math.isfinite(known) else ""

    def validated(run: ReportFacts) -> str:
        known = max((one.num_tokens for one in run.history.valid), default=0)
        return f"{known:,}" if known else ""

    def tested(run: ReportFacts) -> str:
        known = run.history.ended.test_loss if run.history.ended else None
        return "" if known is None else f"{known:.4f}"

    def prepared(run: ReportFacts) -> str:
        names = ("rows_read", "rows_kept", "rows_left_out", "duplicates_removed")
        told = [f"{run.prepared[name]} {name.replace('_', ' ')}" for name in names if name in run.prepared]
        return ", ".join(told)

    rows: list[tuple[str, Callable[[ReportFacts], str]]] = [
        ("training examples", examples),
        ("trained tokens", tokens),
        ("epochs", epochs),
        ("tokens of a validation", validated),
        ("test loss", tested),
        ("bits per byte (last)", _bits),
        ("prepared from", prepared),
        *((name, lambda run, name=name: _option(run.config.get(name))) for name in _DATA),
    ]
    return _columns("data", labels, rows, runs)


def _bits(run: ReportFacts) -> str:
    known = [one.bits_per_byte for one in run.history.valid if one.bits_per_byte is not None]
    return f"{known[-1]:.3f}" if known else ""


def _samples(label: str, sampled: Sequence[Sampled]) -> Grid | None:
    """Of each prompt the first and the last text, and some between."""
    rows: list[tuple[str, ...]] = []
    for prompt in dict.fromkeys(one.prompt for one in sampled):
        texts = [one for one in sampled if one.prompt == prompt]
        if len(texts) > _MOST_SAMPLES:
            places = {round(place * (len(texts) - 1) / (_MOST_SAMPLES - 1)) for place in range(_MOST_SAMPLES)}
            texts = [texts[place] for place in sorted(places)]
        rows += [(str(one.step), prompt, one.text) for one in texts]
    return Grid(f"samples of {label}", ("step", "prompt", "text"), tuple(rows)) if rows else None


def _answers(labels: Sequence[str], runs: Sequence[ReportFacts]) -> Iterator[Grid]:
    for label, run in zip(labels, runs, strict=True):
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
