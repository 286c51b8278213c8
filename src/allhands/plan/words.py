"""Lines of a printed plan about times, costs and memory."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from allhands.io.formatting import counted, format_duration
from allhands.plan.job import Job
from allhands.plan.outlook import Outlook, OutlookLine

_FELT = 0.01  # part of a training's time from which on validations are shown


def times_before(outlook: Outlook) -> Iterator[str]:
    """Yield lines about the time of a step on one computer."""
    job, alone_s = outlook.job, outlook.lines[0].prediction.step_s
    where = (
        f"on {outlook.alone.name}"
        if job.whole_s is None
        else "by one process with its share of the cores"
    )
    serial = (
        f"of which {100 * job.step.serial_s / alone_s:.0f} % gets no shorter with more {unit(job)}"
    )
    yield f"{counted(job.steps, 'step')}; one of them {where}: {milliseconds(alone_s)}, {serial}"
    if job.whole_s is not None:
        told = f"By one process with all cores: {milliseconds(job.whole_s)}, {format_duration(outlook.alone_s)} in all"
        best = min(outlook.lines[1:], key=lambda line: line.training_s, default=None)
        if best is not None and not job.doubt:
            told += f"; {best.machines} {unit(job)} are {outlook.alone_s / best.training_s:.2f} times as fast"
        yield told
    if job.doubt:
        yield f"Not reliable: {job.doubt}."


def times_after(outlook: Outlook) -> Iterator[str]:
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


def unit(job: Job) -> str:
    """Return the word for several ranks of a plan."""
    return "processes" if job.together else "machines"


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds in words."""
    return f"{1e3 * seconds:,.0f} ms"


def percent(part: float, whole: float) -> str:
    """Return a part of a whole as a percentage in words."""
    return f"{100 * part / whole:.0f} %"


def memory_limit(job: Job) -> str:
    """Return words about the memory limit of a rank; empty if it is not known."""
    if len({each.usable_bytes for each in job.computers}) > 1:
        return "; each of several machines has its own limit, a single one the largest"
    if job.computers[0].usable_bytes is None:
        return ""
    return f"; there are {job.computers[0].memory_told}{', for all of them' if job.shares else ''}"


def in_rows(flags: str, width: int) -> str:
    """Return flags in rows of at most ``width``; a flag and its value are in one row. Further rows
    are indented, so that they do not look like another way.
    """
    bound = re.sub(r" (?!--)", "\N{NO-BREAK SPACE}", flags)
    rows = textwrap.fill(bound, width, subsequent_indent="    ", break_on_hyphens=False)
    return rows.replace("\N{NO-BREAK SPACE}", " ")
