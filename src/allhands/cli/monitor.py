"""``allhands monitor``: the processes of a run, live or afterwards, here and over ssh."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from allhands.cli.verbs_runs import Monitor
from allhands.cluster.hosts import hosts_named
from allhands.cluster.monitoring import NewSamples, run_samples
from allhands.errors import AllhandsError
from allhands.io.formatting import (
    format_bytes,
    format_duration,
    format_rate,
    format_shares,
    format_size,
)
from allhands.io.terminal import (
    broken,
    columns_within,
    console_for,
    is_read_live,
    is_screen,
    progress_console,
    table_of,
)
from allhands.observe.journal import read_events
from allhands.observe.metrics import RunHistory, read_metrics
from allhands.observe.monitor import Board, BoardRow, Sample, encode_sample, gone_here

if TYPE_CHECKING:
    from allhands.report.verdict import Verdict

_NONE = "-"
_WIDE = 200
# Columns that a narrow terminal leaves out, in this order.
_DISPENSABLE = (
    "pid",
    "received\n/s",
    "MLX\ncache",
    "peak\nPSS",
    "sent\n/s",
    "RSS",
    "MLX\nactive",
    "CPU",
    "GPU\nload",
    "esti-\nmated",
    "peak\nRSS",
    "GPU\nmemory",
)


def monitor(options: Monitor) -> None:
    """Run the verb."""
    hosts = hosts_named(options.hosts, options.hostfile)
    with run_samples(hosts, options.run, follow=not options.once) as (samples, new):
        board = Board(samples)
        rounds = _rounds(options, board, new)
        if options.as_json:
            latest = [sample for sample in samples if sample.run == board.run]
            for some in chain((latest,), rounds):
                for sample in some:
                    print(encode_sample(sample))
                sys.stdout.flush()
            return
        console = _console()
        shown = _view_now(options.run, board, console.width)
        if options.once or board.over(time.time(), gone_here(board)):
            console.print(shown)
            return
        with Live(shown, console=console, auto_refresh=False, transient=False) as live:
            for _ in rounds:
                live.update(_view_now(options.run, board, console.width), refresh=True)


def _rounds(options: Monitor, board: Board, new: NewSamples) -> Iterator[list[Sample]]:
    """Yield new samples, with which the board is brought up to date, until the run is over."""
    while not (options.once or board.over(time.time(), gone_here(board))):
        time.sleep(options.every)
        samples = new()
        for sample in samples:
            board.add(sample)
        yield samples


def _console() -> Console:
    """Return a console for standard output; if nobody reads it live, it has 200 columns."""
    if is_screen(sys.stdout):
        return progress_console(sys.stdout, highlight=False)
    return console_for(width=None if is_read_live(sys.stdout) else _WIDE)


def _view_now(run: Path, board: Board, width: int) -> Group:
    from allhands.report.verdict import verdict_of

    now, history, verdict, journal = time.time(), None, None, read_events(run)
    with suppress(AllhandsError):
        history = read_metrics(run)
    if history is not None or journal:
        # The state of the run as in reports.
        verdict = verdict_of(run, history or RunHistory(run.name), journal, board, now)
    return view(board, now, gone_here(board), history, width, verdict)


# --- the view -------------------------------------------------------------------------------------


def view(
    board: Board,
    now: float,
    gone: set[tuple[str, int]],
    history: RunHistory | None,
    width: int = 200,
    verdict: Verdict | None = None,
) -> Group:
    """Return a heading, a table with a row for each process, and the sums."""
    heading, together = _heading(board, now, gone, history, verdict), _together(board, now, gone)
    return Group(
        Text(broken(heading, width)),
        processes_table(board, now, gone, width),
        Text(broken(together, width)),
    )


def _heading(
    board: Board,
    now: float,
    gone: set[tuple[str, int]],
    history: RunHistory | None,
    verdict: Verdict | None,
) -> str:
    rows = board.rows()
    age = format_duration(max(0.0, now - max(row.last.time for row in rows)))
    state = f"running, seen {age} ago"
    if verdict is not None and verdict.status != "going on":
        state = f"{verdict.status}, last seen {age} ago"
    elif board.over(now, gone):
        # A process that ends normally writes so in its last sample. The process that started the
        # others is in the first row.
        state = (
            f"ended {age} ago"
            if rows[0].last.ended
            else f"broken off (it was killed), last seen {age} ago"
        )
    steps = [row.last.step for row in rows if row.last.step is not None]
    planned = (
        history.started.total_steps if history is not None and history.started is not None else 0
    )
    step = f"step {max(steps)}{f' of {planned}' if planned else ''}" if steps else ""
    name = "" if history is None else history.name
    return ", ".join(filter(None, [name, state, step, *_last_report(history)]))


def _last_report(history: RunHistory | None) -> Iterator[str]:
    """Yield the speed, shares and traffic of the last report."""
    if history is None or not history.train:
        return
    report = history.train[-1]
    if math.isfinite(report.tokens_per_s):
        yield f"{format_rate(report.tokens_per_s)} tokens/s over all ranks"
    if len(set(report.shares)) > 1:
        yield f"shares {format_shares(report.shares)}"
    if report.sent_bytes:
        yield f"{format_size(report.sent_bytes)} sent by a rank in a step"


def processes_table(
    board: Board, now: float, gone: set[tuple[str, int]], width: int = 200
) -> Table:
    """Return a table with one row for each process; unknown columns, and columns without room, are
    left out.
    """
    rows = board.rows()
    columns = columns_within(_columns(rows, now, gone), width, _DISPENSABLE)
    left = [place for place, name in enumerate(columns) if name in ("process", "host", "doing")]
    table = table_of([*columns], zip(*columns.values(), strict=True), left=left, ruled=True)
    for shown, row in zip(table.rows, rows, strict=True):
        shown.style = "dim" if row.state(now, gone) != "lives" else None
    return table


def _columns(
    rows: Sequence[BoardRow], now: float, gone: set[tuple[str, int]]
) -> dict[str, list[str]]:
    """Return the cells of each known column, in the order of the table."""
    kind = "/".join(sorted({row.last.pss_kind.upper() for row in rows}))
    living = [row for row in rows if row.state(now, gone) == "lives"]
    # The traffic of a computer is shown in the row of its first rank, if it has one.
    shows: dict[str, BoardRow] = {}
    for row in sorted(living, key=lambda row: row.last.role != "rank"):
        shows.setdefault(row.last.host, row)

    def rate(row: BoardRow, which: int) -> str:
        known = row.net_per_s() if shows.get(row.last.host) is row else None
        return _NONE if known is None else format_size(known[which])

    cells: dict[str, Callable[[BoardRow], str | float | None]] = {
        "process": lambda row: row.last.name,
        "host": lambda row: row.last.host,
        "pid": lambda row: str(row.last.pid),
        "doing": lambda row: row.doing(now, gone),
        "RSS": lambda row: row.last.rss_bytes,
        "peak\nRSS": lambda row: row.peak_rss_bytes,
        kind: lambda row: row.last.pss_bytes,
        f"peak\n{kind}": lambda row: row.peak_pss_bytes,
        "esti-\nmated": lambda row: row.last.estimated_bytes or None,
        "MLX\nactive": lambda row: row.last.mlx_active_bytes,
        "MLX\ncache": lambda row: row.last.mlx_cache_bytes,
        "MLX\npeak": lambda row: row.peak_mlx_bytes or None,
        "MLX\nneeds": lambda row: row.last.mlx_estimated_bytes or None,
        "GPU\nmemory": lambda row: row.last.gpu_used_bytes,
        "GPU\nload": lambda row: None if row.last.gpu_load is None else f"{row.last.gpu_load:.0%}",
        "CPU": lambda row: f"{row.last.cpu_cores:.0%}" if row in living else _NONE,
        "sent\n/s": lambda row: rate(row, 0),
        "received\n/s": lambda row: rate(row, 1),
    }
    if len({row.last.host for row in rows}) == 1:
        del cells["host"]
    found = {name: [cell(row) for row in rows] for name, cell in cells.items()}
    return {
        name: list(map(_shown, values)) for name, values in found.items() if set(values) != {None}
    }


def _shown(cell: str | float | None) -> str:
    return _NONE if cell is None else cell if isinstance(cell, str) else format_bytes(cell)


def _together(board: Board, now: float, gone: Collection[tuple[str, int]]) -> str:
    rows = board.rows()
    kind = (
        ""
        if all(row.last.pss_kind == "pss" for row in rows)
        else " (PSS is not known for all: shared pages may be missing)"
    )
    live = board.together_bytes(now, gone)
    text = f"{format_bytes(live)} now, " if live else ""
    most = f"{format_bytes(board.peak_together_bytes)} at most"
    if len({row.last.role for row in rows}) > 1:
        most += f" (the ranks alone {format_bytes(board.peak_ranks_bytes)})"
    return f"together, pages that are shared counted once: {text}{most}{kind}"
