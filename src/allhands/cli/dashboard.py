"""``allhands dashboard``: runs in the browser while they go on."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from urllib.parse import quote

from allhands.cli.verbs_runs import Dashboard
from allhands.errors import DataError
from allhands.io.paths import meant
from allhands.io.terminal import tell
from allhands.report.dashboard.app import Settings, make_app
from allhands.report.dashboard.serving import run
from allhands.runtime.http_guard import listen


def dashboard(asked: Dashboard) -> None:
    """Run the verb."""
    token = asked.token
    if not asked.runs.is_dir():
        there = "this is a file" if asked.runs.exists() else "there is no such directory"
        raise DataError(
            there,
            code="run-missing",
            where=str(asked.runs),
            hint=meant(asked.runs, "give a directory with runs", Path.is_dir),
        )

    listening = listen(asked.host, asked.port, token=token, names=asked.name or ())

    token = listening.guard.token
    known = f"?token={quote(token, safe='')}" if token else ""
    print(f"dashboard: {listening.address}/{known}", flush=True)
    if listening.is_open:
        tell("allhands: note: the connection is not encrypted: others on the network can read it")
    signal.signal(signal.SIGTERM, _stop)
    run(make_app(Settings(asked.runs, listening.guard)), listening.listener)


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
