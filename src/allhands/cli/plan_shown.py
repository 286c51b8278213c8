"""A plan as people read it: what it stands on, two tables, and the advice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from allhands.io.formatting import format_bytes, format_duration, format_size
from allhands.io.terminal import console_for, print_table
from allhands.plan.computers import largest
from allhands.plan.strategies import Way

if TYPE_CHECKING:
    from rich.console import Console

    from allhands.plan.job import Job
    from allhands.plan.outlook import Outlook

_FELT = 0.01  # of a training's time
_FITS = {True: "yes", False: "no", None: "?"}


def show(outlook: Outlook, notes: Sequence[str]) -> None:
    """Print the tables and the advice."""
    console = console_for(highlight=False)
    for note in notes:
        console.print(f"- {note}", markup=False)
    console.print()
    _show_time(console, outlook)
    _show_lighter(console, outlook)
    _show_memory(console, outlook)
    _show_pipelines(console, outlook)
    advice = outlook.advice
    console.print("Is distributing worth it?", style="bold")
    for question in advice.path:
        console.print(f"  {question.text} {question.answer} ({question.why})", markup=False)
    console.print(f"  -> {advice.title}", markup=False, style="bold")
    for reason in advice.reasons:
        console.print(f"     {reason}", markup=False)


def _show_time(console: Console, outlook: Outlook) -> None:
    job, step = outlook.job, outlook.job.step
    where = f"on {outlook.alone.name}" if job.whole_s is None else "by one process with its share of the cores"
    alone_s = outlook.lines[0].prediction.step_s
    console.print(
        f"{job.steps} steps; one of them {where}: {_milliseconds(alone_s)}, of which "
        f"{100 * step.serial_s / alone_s:.0f} % gets no shorter with more",
        markup=False,
    )
    if job.whole_s is not None:
        told = f"By one process with all cores: {_milliseconds(job.whole_s)}, {format_duration(outlook.alone_s)} in all"
        best = min(outlook.lines[1:], key=lambda line: line.training_s, default=None)
        if best is not None and not job.doubt:
            told += f"; {best.machines} {_unit(job)} are {outlook.alone_s / best.training_s:.2f} times as fast"
        console.print(told, markup=False)
    if job.doubt:
        console.print(f"Not to be relied on: {job.doubt}.", markup=False)
    _show_lines(console, outlook)
    for line in outlook.lines:
        costs = [] if line.kwh is None else [f"{line.kwh:.3g} kWh"]
        costs += [] if line.money is None else [f"costs {line.money:.2f}"]
        if costs:
            console.print(f"{line.machines}: {', '.join(costs)}", markup=False)
    _show_validations(console, outlook)
    if len(outlook.lines) > 1:
        alike = len({each.speed for each in job.computers}) == 1
        if not job.doubt and (alike or outlook.enough < outlook.lines[-1].machines):
            another = "process with as many cores" if job.together else "machine"
            most = outlook.line(outlook.enough).prediction.step_s if outlook.enough in outlook.laws else 0.0
            longer = [line for line in outlook.lines if line.machines > outlook.enough]
            what = "saves less than 5 % of a step"
            if longer and all(line.prediction.step_s > most > 0 for line in longer):
                what = "makes a step longer"
            console.print(f"Beyond {outlook.enough}, another {another} {what}.", markup=False)
        console.print("Amdahl and Gustafson: the same batch, or one for each machine, and nothing exchanged.")
    console.print()


def _show_lines(console: Console, outlook: Outlook) -> None:
    heads = ("a step", "waiting", "all of it", "faster", "efficient", "Amdahl", "Gustafson")
    table = _table([_unit(outlook.job), *heads])
    for line in outlook.lines:
        found, laws = line.prediction, outlook.laws[line.machines]
        speed_up = outlook.lines[0].training_s / line.training_s
        table.add_row(
            str(line.machines),
            _milliseconds(found.step_s),
            f"{100 * found.exposed_s / found.step_s:.0f} %",
            format_duration(line.training_s),
            f"{speed_up:.2f}" if speed_up >= 0.01 else f"{speed_up:.1g}",
            f"{100 * speed_up / found.capacity:.0f} %",
            f"{laws[0]:.2f}",
            f"{laws[1]:.2f}",
        )
    print_table(console, table, ("Gustafson", "Amdahl", "efficient"))
    if len({each.name for each in outlook.job.computers}) > 1:
        for line in outlook.lines:
            console.print(f"{line.machines}: {line.computers}", markup=False)
    if any(line.weights for line in outlook.lines):
        console.print("efficient: against the sum of their speeds, by which shares are cut (--rank-weights auto)")


def _show_lighter(console: Console, outlook: Outlook) -> None:
    """What sends less, where the link is slow."""
    if not outlook.lighter:
        return
    plain, (_, *others) = outlook.lighter[0], outlook.lighter
    unit = f"{outlook.lines[-1].machines} {_unit(outlook.job)}"
    part, alone_s = f"{100 * plain.exposed_s / plain.step_s:.0f} % of a step", outlook.lines[0].prediction.step_s
    console.print(
        f"On {unit} {part} is waiting for the link. With less to send a batch, which one of them computes in "
        f"{_milliseconds(alone_s)}, takes:",
        markup=False,
    )
    table = _table(["with", "a batch", "waiting", "sent", "loss"])
    for way in (plain, *others):
        waiting = f"{100 * way.exposed_s / way.step_s:.0f} %"
        price = "" if way is plain else "?" if way.price is None else f"{way.price:+.2%}"
        table.add_row(way.flags or "as it is", _milliseconds(way.step_s), waiting, format_size(way.sent_bytes), price)
    print_table(console, table, ("waiting",))
    console.print(
        "Each is another training, so that none is chosen by itself. loss: what it added to the validation loss of a "
        "small model after 2,000 steps (docs/slow-links.md); of yours it may be more or less, and ? was not measured",
        markup=False,
    )
    console.print()


def _show_validations(console: Console, outlook: Outlook) -> None:
    """Where they are felt."""
    line = max(outlook.lines, key=lambda line: line.validation_s / line.training_s)
    if line.validation_s < _FELT * line.training_s:
        return
    spent = ", ".join(f"{each.machines}: {format_duration(each.validation_s)}" for each in outlook.lines)
    console.print(
        f"In all of it are {outlook.job.validations} validations ({spent}), reckoned as forward passes at the speed of "
        "the steps: fewer with a larger --steps-per-eval, shorter with fewer --val-batches",
        markup=False,
    )


def _unit(job: Job) -> str:
    return "processes" if job.together else "machines"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def _table(heads: Sequence[str]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place, head in enumerate(heads):
        # On a narrow terminal names go on in a second line; numbers are never cut.
        table.add_column(head, justify="right" if place else "left", no_wrap=place > 0)
    return table


def _show_memory(console: Console, outlook: Outlook) -> None:
    if not outlook.memory:
        return
    job = outlook.job
    console.print("Memory of a rank at its peak" + _there_is(job), markup=False)
    kept = ("weights", "optimizer", "gradients", "activations", "logits")
    how: list[str] = []
    shown = (1, outlook.advised if outlook.advised > 1 else outlook.lines[-1].machines)
    ways = [each for each in zip(outlook.memory, outlook.fits, strict=True) if each[0].ranks in shown]
    sends = any(way.sent_bytes for way, _ in ways)
    heads = [f"{_unit(job)}: way", "weights", "optim.", "grads", "activ.", "logits", "peak", *["sent"] * sends, "fits"]
    table = _table(heads)
    # Ways that are not here are of interest where none that is here is enough.
    needed = not any(way.built and fits is not False for way, fits in ways)
    needed = needed and not any(each.fits is not False for each in outlook.pipelines)
    for way, fits in ways:
        if not way.built and not needed:
            continue
        name = f"{way.ranks}: {way.name}"
        parts = [format_bytes(way.parts[part]) for part in kept]
        table.add_row(
            name, *parts, format_bytes(way.rank_bytes), *[_sent(way)] * sends, _FITS[fits] if way.built else "-"
        )
        if way.flags:
            how.append(f"{name}: {way.flags}")
    print_table(console, table, ("grads", "logits", "optim.", "sent"))
    told = "optim.: what the optimizer keeps; activ.: what the passes keep"
    told += "; sent: by a rank in a step" * sends
    console.print(told, markup=False)
    if needed and any(not way.built for way, _ in ways):
        where = "" if job.kind == "metal" else ": torchtitan and DeepSpeed have them, for NVIDIA GPUs"
        how.append(f"-: allhands has no such way{where}")
    for number in sorted({way.ranks for way, _ in ways}):
        if short := outlook.line(number).short:
            console.print(f"{number}: data parallel: too little memory: {', '.join(short)}", markup=False)
    for line in how:
        console.print(line, markup=False)
    console.print()


def _show_pipelines(console: Console, outlook: Outlook) -> None:
    """Where the model fits no single computer: which of its blocks would be where."""
    if not outlook.pipelines:
        return
    console.print("In stages, each with some of the blocks (--strategy pipeline):", markup=False)
    for each in outlook.pipelines:
        waiting = f", {100 * each.messages_s / each.step_s:.0f} % of it messages" if each.fits is not False else ""
        console.print(f"{each.machines}: {each.told}{waiting}", markup=False)
    console.print()


def _sent(way: Way) -> str:
    return format_size(way.sent_bytes) if way.sent_bytes else "-"


def _there_is(job: Job) -> str:
    """Whose memory it is held to, and how much of it there is."""
    if len({each.usable_bytes for each in job.computers}) > 1:
        most = largest(job.computers)
        one = f"one machine is {most.name}, which has {most.memory_told}"
        return f"; {one}; of several each is held to its own, and the largest share is shown"
    usable = job.computers[0].usable_bytes
    if usable is None:
        return ""
    return f"; there are {job.computers[0].memory_told}{', for all of them' if job.shares else ''}"
