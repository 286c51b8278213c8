"""``allhands dashboard``: runs in the browser while they go on."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Annotated
from urllib.parse import quote

import typer

from allhands.cli.options import Host, HostNames, Port, Token
from allhands.errors import DataError
from allhands.io.paths import meant
from allhands.io.terminal import tell


def dashboard(
    runs: Annotated[Path, typer.Argument(help="Directory below which the runs are.")] = Path(),
    host: Host = "127.0.0.1",
    port: Port = 8765,
    token: Token = None,
    name: HostNames = None,
) -> None:
    """Show runs in the browser while they go on.

    Loss, speed, memory and phases of several runs, their processes side by side, the end of their logs, and a button
    that asks a run to save and stop. Only this computer is answered, unless --host says otherwise. Ends with Ctrl-C.
    """
    if not runs.is_dir():
        there = "this is a file" if runs.exists() else "there is no such directory"
        raise DataError(there, where=str(runs), hint=meant(runs, "give the directory in which runs are"))
    from allhands.runtime.http_guard import listen

    listening = listen(host, port, token=token, names=name or ())
    from allhands.report.dashboard.app import Settings, make_app, run

    token = listening.guard.token
    known = f"?token={quote(token, safe='')}" if token else ""
    print(f"dashboard: {listening.address}/{known}", flush=True)
    if listening.is_open:
        tell("allhands: note: it is not encrypted: whoever listens on the way can read along")
    signal.signal(signal.SIGTERM, _stop)
    run(make_app(Settings(runs, listening.guard)), listening.listener)


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
