"""``allhands bench kernels``: which form of each operation is fastest on this device, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from allhands.errors import ConfigError
from allhands.io.terminal import console_for, progress_console

if TYPE_CHECKING:
    from rich.console import Console

    from allhands.kernels.selection import FormTimes, SizedOperation
    from allhands.model.measurements import Facts
    from allhands.run.operations import ModelSizes
    from allhands.runtime.accelerator import Accelerator

_TOKENS = {"cpu": "512,2048"}
_GPU_TOKENS = "512,2048,8192"
_LEGEND = """\
chosen: the rule's form, unless another is 1.1 times as fast by the middle and by the best round
ms: forward and backward, median of rounds in which the forms take turns
difference: from the plain form, the largest, as a share of the largest value
"""


def kernels(
    model: Annotated[
        str | None, typer.Option("--model", help="Measure the sizes of this model: a directory, or 'demo'.")
    ] = None,
    shape: Annotated[str, typer.Option("--shape", metavar="small|1b|7b", help="Sizes without a model.")] = "small",
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="N,N", help="Tokens of a micro-batch. [512,2048; 8192 on GPUs]")
    ] = None,
    only: Annotated[str | None, typer.Option("--only", metavar="NAME", help="Measure one operation.")] = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Let training go by what is found.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Measure the forms of each operation on this device.

    Training takes the fastest that computes the same. Without a measurement it goes by rules.
    """
    from allhands.model.measurements import device_facts, save_table
    from allhands.run.operations import problems
    from allhands.runtime.accelerator import detect

    accelerator = detect()
    counts = _counts(tokens or _TOKENS.get(accelerator.kind, _GPU_TOKENS))
    found = problems(_sizes(model, shape, accelerator), accelerator.kind, counts)
    measured = _measure(_selected(found, only, accelerator), accelerator, quiet=as_json)
    facts = device_facts(accelerator)
    path = save_table(facts, measured) if save else None
    if as_json:
        typer.echo(_as_json(facts, measured))
        return
    show(measured, f"{facts['name']}, MLX {facts['mlx']}")
    typer.echo(f"written to {path}" if path else "not written (--no-save)")


def _counts(text: str) -> list[int]:
    words = [each.strip() for each in text.split(",")]
    if not all(each.isdecimal() and 1 <= int(each) <= 1 << 20 for each in words):
        raise ConfigError(
            f"{text!r} is not a list of numbers of tokens", where="--tokens", hint="write --tokens 512,2048"
        )
    return [int(each) for each in words]


def _sizes(model: str | None, shape: str, accelerator: Accelerator) -> ModelSizes:
    from allhands.model.load import read_config
    from allhands.model.sources import resolve
    from allhands.run.operations import SHAPES, sizes_named, sizes_of

    if model is not None:
        return sizes_of(read_config(resolve(model)), accelerator)
    if shape not in SHAPES:
        raise ConfigError(f"{shape!r} is not a shape", where="--shape", hint=f"use one of {', '.join(SHAPES)}")
    return sizes_named(shape, accelerator.kind)


def _selected(found: Sequence[SizedOperation], only: str | None, accelerator: Accelerator) -> list[SizedOperation]:
    names = dict.fromkeys(each.name for each in found)
    if only is not None and only not in names:
        raise ConfigError(
            f"{only!r} is not a choice on this device ({accelerator.kind})",
            where="--only",
            hint=f"use one of {', '.join(names)}",
        )
    return [each for each in found if only in (None, each.name)]


def _measure(found: Sequence[SizedOperation], accelerator: Accelerator, *, quiet: bool) -> list[FormTimes]:
    from rich.progress import track

    from allhands.run.measuring import measure

    shown = found if quiet else track(found, description="measuring", console=_progress(), transient=True)
    return [measure(each, accelerator.kind) for each in shown]


def _progress() -> Console:
    return progress_console()


def _as_json(facts: Facts, measured: Sequence[FormTimes]) -> str:
    from allhands.model.measurements import as_rows

    rows = [
        {**row, "best": each.best, "ratio": each.ratio} for row, each in zip(as_rows(measured), measured, strict=True)
    ]
    return json.dumps({"device": facts, "measured": rows}, indent=1)


def show(measured: Sequence[FormTimes], device: str, console: Console | None = None) -> None:
    """Print a row for each problem: every form's time, the one to take, and how far it is from the plain one."""
    from rich.table import Table

    from allhands.kernels.selection import reference

    console = console or console_for(highlight=False, width=110)
    table = Table(title=f"{device}: forms of operations", title_justify="left")
    for name in ("operation", "size", "ms", "chosen", "gain", "difference"):
        table.add_column(name, justify="right" if name == "gain" else "left")
    for each in measured:
        times = ", ".join(f"{form} {ms:.3g}{'' if each.right(form) else ' (wrong)'}" for form, ms in each.ms.items())
        first = reference(each.problem.name, each.kind)
        gain = f"{each.ratio:.2f} x {first}" if each.best != first else ""
        worst = max(each.difference.values(), default=0.0)
        table.add_row(each.problem.name, str(each.problem), times, each.best, gain, f"{worst:.1e}")
    console.print(table)
    console.print(_LEGEND, end="")
