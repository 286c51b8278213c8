"""The printed plan: its basis, tables, and the advice."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console

from allhands.io.formatting import counted, format_bytes, format_duration, format_size
from allhands.io.terminal import console_for, print_table
from allhands.plan.job import Job
from allhands.plan.outlook import Outlook, OutlookLine
from allhands.plan.strategies import Way

_FELT = 0.01  # part of a training's time from which on validations are shown
_PARTS = {
    "weights": "weights",
    "optimizer": "optim.",
    "gradients": "grads",
    "activations": "activ.",
    "logits": "logits",
}
_OTHER_COLUMNS = 32  # the width of the columns beside the ways to send less
_FITS = {True: "yes", False: "no", None: "?"}


def show(outlook: Outlook, notes: Sequence[str]) -> None:
    """Print the tables and the advice."""
    console = console_for()
    for note in notes:
        console.print(f"- {note}")
    console.print()
    _show_time(console, outlook)
    _show_lighter(console, outlook)
    _show_memory(console, outlook)
    if outlook.pipelines:
        console.print("In stages, each with some of the blocks (--strategy pipeline):")
    for each in outlook.pipelines:
        waiting = (
            f", {_percent(each.messages_s, each.step_s)} of it messages"
            if each.fits is not False
            else ""
        )
        console.print(f"{each.machines}: {each.told}{waiting}")
    if outlook.pipelines:
        console.print()
    advice = outlook.advice
    console.print("Is distributing worth it?", style="bold")
    for question in advice.path:
        console.print(f"  {question.text} {question.answer} ({question.why})")
    console.print(f"  -> {advice.title}", style="bold")
    for reason in advice.reasons:
        console.print(f"     {reason}")


def _show_time(console: Console, outlook: Outlook) -> None:
    for line in _times_before(outlook):
        console.print(line)
    rows: list[dict[str, str]] = []
    for line in outlook.lines:
        found, speed_up = line.prediction, outlook.lines[0].training_s / line.training_s
        laws = outlook.laws[line.machines]
        rows.append(
            {
                _unit(outlook.job): str(line.machines),
                "a step": _milliseconds(found.step_s),
                "waiting": _percent(found.exposed_s, found.step_s),
                "all of it": format_duration(line.training_s),
                "faster": f"{speed_up:.2f}" if speed_up >= 0.01 else f"{speed_up:.1g}",
                "efficient": _percent(speed_up, found.capacity),
                "Amdahl": f"{laws['amdahl']:.2f}",
                "Gustafson": f"{laws['gustafson']:.2f}",
            }
        )
    _show_table(console, rows, "Gustafson", "Amdahl", "efficient")
    for line in _times_after(outlook):
        console.print(line)
    console.print()


def _show_table(console: Console, rows: Sequence[dict[str, str]], *narrow: str) -> None:
    """Print a table of rows, whose keys are the heads of the columns. If it is too wide, columns of
    ``narrow`` are left out, in their order.
    """
    print_table(console, tuple(rows[0]), [tuple(row.values()) for row in rows], narrow)


def _times_before(outlook: Outlook) -> Iterator[str]:
    """Yield lines about the time of a step on one computer."""
    job, alone_s = outlook.job, outlook.lines[0].prediction.step_s
    where = (
        f"on {outlook.alone.name}"
        if job.whole_s is None
        else "by one process with its share of the cores"
    )
    serial = (
        f"of which {100 * job.step.serial_s / alone_s:.0f} % gets no shorter with more {_unit(job)}"
    )
    yield f"{counted(job.steps, 'step')}; one of them {where}: {_milliseconds(alone_s)}, {serial}"
    if job.whole_s is not None:
        told = f"By one process with all cores: {_milliseconds(job.whole_s)}, {format_duration(outlook.alone_s)} in all"
        best = min(outlook.lines[1:], key=lambda line: line.training_s, default=None)
        if best is not None and not job.doubt:
            told += f"; {best.machines} {_unit(job)} are {outlook.alone_s / best.training_s:.2f} times as fast"
        yield told
    if job.doubt:
        yield f"Not reliable: {job.doubt}."


def _times_after(outlook: Outlook) -> Iterator[str]:
    """Yield lines after the table of times: computers, costs, validations, and the useful number of
    computers.
    """
    job, lines = outlook.job, outlook.lines
    if job.mixed:
        yield from (f"{line.machines}: {line.computers}" for line in lines)
    if any(line.weights for line in lines):
        yield "efficient: relative to the sum of their speeds, which shares follow (--rank-weights auto)"
    yield from (f"{line.machines}: {costs}" for line in lines if (costs := _costs(line)))
    yield from _validations(outlook)
    if len(lines) == 1:
        return
    alike = len({each.speed for each in job.computers}) == 1
    if not job.doubt and (alike or outlook.enough < lines[-1].machines):
        another = "process with as many cores" if job.together else "machine"
        yield f"Beyond {outlook.enough}, another {another} saves less than 5 % of a step, or makes it longer."
    yield "Amdahl and Gustafson: the same batch, or one for each machine, and nothing exchanged."


def _validations(outlook: Outlook) -> Iterator[str]:
    """Yield the time of all validations, unless it is very short."""
    lines = outlook.lines
    if any(line.validation_s and line.validation_s >= _FELT * line.training_s for line in lines):
        spent = ", ".join(
            f"{each.machines}: {format_duration(each.validation_s)}" for each in lines
        )
        yield (
            f"This includes {counted(outlook.job.validations, 'validation')} ({spent}), counted as forward passes at "
            "the speed of the steps: a larger --steps-per-eval makes fewer, and fewer --val-batches make shorter ones"
        )


def _costs(line: OutlookLine) -> str:
    costs = [] if line.kwh is None else [f"{line.kwh:.3g} kWh"]
    costs += [] if line.money is None else [f"costs {line.money:.2f}"]
    return ", ".join(costs)


def _show_lighter(console: Console, outlook: Outlook) -> None:
    """Print the ways to send less, if the link is slow."""
    if not outlook.lighter:
        return
    plain, *_ = outlook.lighter
    console.print(
        f"On {outlook.lines[-1].machines} {_unit(outlook.job)} a step waits for the link "
        f"{_percent(plain.exposed_s, plain.step_s)} of its time. A single one computes a batch in "
        f"{_milliseconds(outlook.lines[0].prediction.step_s)}. With less to send, all together need:"
    )
    room = max(24, console.width - _OTHER_COLUMNS)
    rows = [
        {
            "with": _in_rows(way.flags or "as it is", room),
            "a batch": _milliseconds(way.step_s),
            "waiting": _percent(way.exposed_s, way.step_s),
            "sent": format_size(way.sent_bytes),
            "loss": "" if way is plain else "?" if way.price is None else f"{way.price:+.2%}",
        }
        for way in outlook.lighter
    ]
    _show_table(console, rows, "waiting")
    console.print(
        "Each way changes the training, so none is chosen automatically. loss: increase of the validation loss of a "
        "small model after 2,000 steps (docs/slow-links.md); your model may differ, and ? was not measured\n"
    )


def _in_rows(flags: str, width: int) -> str:
    """Return flags in rows of at most ``width``; a flag and its value are in one row. Further rows
    are indented, so that they do not look like another way.
    """
    bound = re.sub(r" (?!--)", "\N{NO-BREAK SPACE}", flags)
    rows = textwrap.fill(bound, width, subsequent_indent="    ", break_on_hyphens=False)
    return rows.replace("\N{NO-BREAK SPACE}", " ")


def _show_memory(console: Console, outlook: Outlook) -> None:
    if not outlook.memory:
        return
    job = outlook.job
    console.print(f"Memory of a rank at its peak{_there_is(job)}")
    shown = (1, outlook.advised if outlook.advised > 1 else outlook.lines[-1].machines)
    ways = {f"{way.ranks}: {way.name}": way for way in outlook.memory if way.ranks in shown}
    sends = any(way.sent_bytes for way in ways.values())
    rows = [
        {f"{_unit(job)}: way": name, **_memory_row(way, sends=sends)} for name, way in ways.items()
    ]
    _show_table(console, rows, "grads", "logits", "optim.", "sent", "a step")
    sent = "; sent: by a rank in a step" * sends
    console.print(f"optim.: optimizer state; activ.: activations{sent}")
    for number in sorted({way.ranks for way in ways.values()}):
        if short := outlook.line(number).short:
            console.print(f"{number}: data parallel: too little memory: {', '.join(short)}")
    for name, way in ways.items():
        if way.flags:
            console.print(f"{name}: {way.flags}")
    console.print()


def _memory_row(way: Way, *, sends: bool) -> dict[str, str]:
    row = {head: format_bytes(way.parts[part]) for part, head in _PARTS.items()}
    row["peak"] = format_bytes(way.rank_bytes)
    if sends:
        row["sent"] = format_size(way.sent_bytes) if way.sent_bytes else "-"
        row["a step"] = _milliseconds(way.step_s) if way.step_s else ""
    return {**row, "fits": _FITS[way.fits]}


def _unit(job: Job) -> str:
    return "processes" if job.together else "machines"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def _there_is(job: Job) -> str:
    """Return words about the memory limit of a rank; empty if it is not known."""
    if len({each.usable_bytes for each in job.computers}) > 1:
        return "; each of several machines has its own limit, a single one the largest"
    if job.computers[0].usable_bytes is None:
        return ""
    return f"; there are {job.computers[0].memory_told}{', for all of them' if job.shares else ''}"
