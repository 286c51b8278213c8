"""The printed plan: its basis, tables, and the advice."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from allhands.io.formatting import format_bytes, format_duration, format_size
from allhands.io.terminal import console_for, print_table
from allhands.plan.outlook import Outlook
from allhands.plan.strategies import Way
from allhands.plan.words import (
    in_rows,
    memory_limit,
    milliseconds,
    percent,
    times_after,
    times_before,
    unit,
)

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
            f", {percent(each.messages_s, each.step_s)} of it messages"
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
    for line in times_before(outlook):
        console.print(line)
    rows: list[dict[str, str]] = []
    for line in outlook.lines:
        found, speed_up = line.prediction, outlook.lines[0].training_s / line.training_s
        laws = outlook.laws[line.machines]
        rows.append(
            {
                unit(outlook.job): str(line.machines),
                "a step": milliseconds(found.step_s),
                "waiting": percent(found.exposed_s, found.step_s),
                "all of it": format_duration(line.training_s),
                "faster": f"{speed_up:.2f}" if speed_up >= 0.01 else f"{speed_up:.1g}",
                "efficient": percent(speed_up, found.capacity),
                "Amdahl": f"{laws['amdahl']:.2f}",
                "Gustafson": f"{laws['gustafson']:.2f}",
            }
        )
    _show_table(console, rows, "Gustafson", "Amdahl", "efficient")
    for line in times_after(outlook):
        console.print(line)
    console.print()


def _show_table(console: Console, rows: Sequence[dict[str, str]], *narrow: str) -> None:
    """Print a table of rows, whose keys are the heads of the columns. If it is too wide, columns of
    ``narrow`` are left out, in their order.
    """
    print_table(console, tuple(rows[0]), [tuple(row.values()) for row in rows], narrow)


def _show_lighter(console: Console, outlook: Outlook) -> None:
    """Print the ways to send less, if the link is slow."""
    if not outlook.lighter:
        return
    plain, *_ = outlook.lighter
    console.print(
        f"On {outlook.lines[-1].machines} {unit(outlook.job)} a step waits for the link "
        f"{percent(plain.exposed_s, plain.step_s)} of its time. A single one computes a batch in "
        f"{milliseconds(outlook.lines[0].prediction.step_s)}. With less to send, all together need:"
    )
    room = max(24, console.width - _OTHER_COLUMNS)
    rows = [
        {
            "with": in_rows(way.flags or "as it is", room),
            "a batch": milliseconds(way.step_s),
            "waiting": percent(way.exposed_s, way.step_s),
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


def _show_memory(console: Console, outlook: Outlook) -> None:
    if not outlook.memory:
        return
    job = outlook.job
    console.print(f"Memory of a rank at its peak{memory_limit(job)}")
    shown = (1, outlook.advised if outlook.advised > 1 else outlook.lines[-1].machines)
    ways = {f"{way.ranks}: {way.name}": way for way in outlook.memory if way.ranks in shown}
    sends = any(way.sent_bytes for way in ways.values())
    rows = [
        {f"{unit(job)}: way": name, **_memory_row(way, sends=sends)} for name, way in ways.items()
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
        row["a step"] = milliseconds(way.step_s) if way.step_s else ""
    return {**row, "fits": _FITS[way.fits]}
