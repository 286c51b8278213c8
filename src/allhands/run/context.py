"""Inputs that a rank's run gets from outside."""

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
    """Inputs that a run gets from outside: the other ranks, the outputs for text, and the requests
    to stop.

    Attributes:
        mesh: this rank's place among the ranks.
        connect: joins the group of ranks; called after data and model have been checked.
        started: called once when this rank is ready to train.
        busy: called now and then, by another thread, while the data are fetched and tokenised.
        beat: called with the activity of the training (phase, steps done), at every change.
        waits: called while the training waits for data (steps done, seconds since they were
            requested).
        stop_requested: the signal that asked this process to stop, or 0.
        regroup_requested: True if the run should end at a checkpoint, to be started again with
            other ranks.
        run_id: identifier of the run, the same for all its attempts.
        attempt: number of this start of the run, from 1.
        moment: time at which the run began, by the wall clock of the computer that started it.
        console: for rank 0's progress; ``None`` for silence.
        cores_per_rank: processor cores of each local process, if limited.
        log_file: file for this rank's own lines, besides the console.
        short_lines: True if each line gets a prefix and should still fit on a screen.
        computer: the name of this computer, as the launcher has it; empty: ranks are named by their
            numbers.
        given: who started the ranks and how, for messages about ranks that differ.
        attest: called by rank 0 with the facts on which the ranks agree; ``None``: not called.
        trial: True for a process that only finds out whether it could be a rank of the run;
            ``attest`` ends it.
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
