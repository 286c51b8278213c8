"""Options of the verbs that answer on one process or on several; light, because every command's help needs them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from allhands.errors import ConfigError


class Divided(StrEnum):
    """How a model is divided among ranks."""

    pipeline = "pipeline"


# Of the verbs that answer, where each rank has a part of the model.
DividedBy = Annotated[
    Divided | None, typer.Option("--strategy", help="pipeline: each rank has some of the model's blocks.")
]
NumRanks = Annotated[
    int | None, typer.Option("--num-ranks", "-n", min=1, help="With --strategy: processes to start here.")
]
Hosts = Annotated[str | None, typer.Option("--hosts", help="With --strategy: computers, by name.")]
Hostfile = Annotated[str | None, typer.Option("--hostfile", help="With --strategy: file of computers.")]
BackendName = Annotated[str | None, typer.Option("--backend", help="With --strategy: who moves the bytes.")]
Split = Annotated[str | None, typer.Option("--pp-split", help="With --strategy: blocks of each rank, such as 20,12.")]


def ranks_asked(strategy: Divided | None, **given: Any) -> dict[str, Any] | None:
    """The options of a training that say where ranks are and what each has; ``None``: one process has all.

    Raises:
        ConfigError: some are given without ``strategy``.
    """
    ranks = {name: value for name, value in given.items() if value is not None}
    if strategy is not None:
        return {**ranks, "strategy": strategy.value}
    for name in ranks:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError("it has no effect without --strategy pipeline", where=flag, hint="add it, or leave it out")
    return None
