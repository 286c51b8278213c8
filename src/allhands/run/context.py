"""The inputs that a rank's run gets from outside."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from allhands.distributed.backend import Communicator, SingleProcess
from allhands.distributed.blame import Circumstances
from allhands.distributed.mesh import Mesh
from allhands.io.terminal import print_line


@dataclass(frozen=True)
class RunContext:
    """The inputs that the recipe gets from outside: who the other ranks are, where text goes, who may stop it.

    Attributes:
        connect: joins the group; called after data and model are known to be good.
        started: called once when this rank is ready to train.
        busy: called now and then, by another thread, while the data are fetched and tokenised.
        beat: told what the training is doing (phase, steps done), at every change.
        waits: told that the training waits for data (steps done, seconds for which they have been on their way).
        stop_requested: the signal that asked this process to stop, or 0.
        regroup_requested: whether the run should end at a checkpoint, to be started again with other ranks.
        run_id: one for all attempts of a run.
        attempt: which start of the run this is, from 1.
        moment: when the run began, by the clock on the wall of whoever started it.
        console: for rank 0's progress; ``None`` for silence.
        cores_per_rank: processor cores of each local process, if limited.
        log_file: where this rank's own lines go besides the console.
        short_lines: whether something will stand before each line, which should fit on a screen nevertheless.
        computer: the name of this computer, as the launcher has it; empty: ranks are told apart by their numbers.
        given: who started the ranks, for the words about those that differ.
        attest: told by rank 0 what the ranks have agreed on; ``None``: nobody asks.
        trial: whether this is no rank yet, but shall only find out whether it would fit: ``attest`` ends it.
    """

    mesh: Mesh = field(default_factory=Mesh)
    connect: Callable[[], Communicator] = SingleProcess
    started: Callable[[], None] = lambda: None
    busy: Callable[[], None] = lambda: None
    beat: Callable[[str, int], None] = lambda phase, step: None
    waits: Callable[[int, float], None] = lambda step, seconds: None
    stop_requested: Callable[[], int] = lambda: 0
    regroup_requested: Callable[[], bool] = lambda: False
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    attempt: int = 1
    moment: datetime = field(default_factory=datetime.now)
    console: Console | None = None
    cores_per_rank: int | None = None
    log_file: Path | None = None
    short_lines: bool = False
    computer: str = ""
    given: Circumstances = field(default_factory=Circumstances)
    attest: Callable[[Mapping[str, Any]], None] | None = None
    trial: bool = False

    def say(self, *lines: str) -> None:
        """Print ``lines`` where this rank has a console."""
        if self.console is not None:
            for line in lines:
                print_line(self.console, line)
