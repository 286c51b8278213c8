"""``allhands monitor``: the processes of a run, live or afterwards, here and over ssh."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from allhands.errors import AllhandsError, DataError
from allhands.io.formatting import format_bytes, format_duration, format_rate, format_shares, format_size
from allhands.io.names import LOGS
from allhands.io.paths import meant
from allhands.io.terminal import broken, console_for, is_read_live, is_screen, progress_console, tell
from allhands.observe.metrics import RunHistory, read_metrics
from allhands.observe.monitor import Board, BoardRow, Follower, Sample, encode_sample, gone_here
from allhands.observe.monitor.samples import in_order

if TYPE_CHECKING:
    from allhands.cluster.hosts import Host
    from allhands.cluster.monitoring import RemoteSamples
    from allhands.report.verdict import Verdict

_NONE = "-"
_WIDE = 200
_PATIENCE_S = 20.0  # for computers to answer
_LOOK_S = 0.1
# In the order in which they go where the terminal is narrow.
_DISPENSABLE = (
    *("pid", "received\n/s", "MLX\ncache", "peak\nPSS", "sent\n/s", "RSS", "MLX\nactive", "CPU"),
    *("GPU\nload", "esti-\nmated", "peak\nRSS", "GPU\nmemory"),
)


@dataclass(frozen=True)
class MonitorOptions:
    """What is to be shown, and how."""

    run: Path
    once: bool = False
    as_json: bool = False
    every_s: float = 2.0
    hosts: str | None = None
    hostfile: str | None = None


def run_monitor(options: MonitorOptions) -> None:
    """Show the run until it ends.

    Raises:
        DataError: there is no such run, or nothing is known of its processes.
        ConfigError: hosts are not understood.
    """
    with _sources(options) as (new, remote):
        samples = _first(options, new, remote)
        board = Board(samples)
        latest = [sample for sample in samples if sample.run == board.run]
        if options.as_json:
            _print_json(options, latest, board, new)
        elif options.once or board.over(time.time(), gone_here(board)):
            console = _console()
            console.print(_view_now(options.run, board, console.width))
        else:
            _live(options, board, new)


Read = Callable[[], list[Sample]]


@contextmanager
def _sources(options: MonitorOptions) -> Generator[tuple[Read, RemoteSamples], None, None]:
    """What returns the samples that are new, in order, and the other computers among those that tell them."""
    from allhands.cluster.monitoring import RemoteSamples

    follower = Follower(options.run)
    with RemoteSamples(_hosts(options), options.run, follow=not options.once) as remote:
        yield lambda: in_order([*follower.samples(), *remote.samples()]), remote


def _hosts(options: MonitorOptions) -> Sequence[Host]:
    from allhands.cli.netbench import chosen_hosts

    return chosen_hosts(options.hostfile, options.hosts, None) if options.hostfile or options.hosts else ()


def _first(options: MonitorOptions, new: Read, remote: RemoteSamples) -> list[Sample]:
    """What is known at first, once every computer has answered, or had time to."""
    if not options.hosts and not options.hostfile and not options.run.is_dir():
        raise DataError(
            "there is no such directory", where=str(options.run), hint=meant(options.run, "give the directory of a run")
        )
    samples = new()
    deadline = time.monotonic() + _PATIENCE_S
    while remote.pending() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        samples = in_order([*samples, *new()])
    samples = in_order([*samples, *new()])
    if not samples:
        reasons = "".join(f"; {reason}" for reason in remote.complaints())
        raise DataError(
            f"no process of a run has left samples of its memory here{reasons}",
            where=str(options.run),
            hint="give the directory of a run (its --adapter-path, or --log-dir of allhands launch); a run that has "
            "just been started has some in a few seconds",
        )
    for reason in remote.complaints():
        tell(f"allhands: warning: not asked: {reason}")
    return samples


def _print_json(options: MonitorOptions, samples: Sequence[Sample], board: Board, new: Read) -> None:
    while True:
        for sample in samples:
            print(encode_sample(sample))
        sys.stdout.flush()
        if options.once or board.over(time.time(), gone_here(board)):
            return
        time.sleep(options.every_s)
        samples = new()
        for sample in samples:
            board.add(sample)


def _live(options: MonitorOptions, board: Board, new: Read) -> None:
    console = _console()

    def show() -> Group:
        return _view_now(options.run, board, console.width)

    with Live(show(), console=console, auto_refresh=False, transient=False) as live:
        while not board.over(time.time(), gone_here(board)):
            time.sleep(options.every_s)
            for sample in new():
                board.add(sample)
            live.update(show(), refresh=True)


def _console() -> Console:
    """Nothing has to be left out where no terminal limits the width."""
    if is_screen(sys.stdout):
        return progress_console(sys.stdout, highlight=False)
    return console_for(highlight=False, width=None if is_read_live(sys.stdout) else _WIDE)


def _view_now(run: Path, board: Board, width: int) -> Group:
    now, history = time.time(), None
    with suppress(AllhandsError):
        history = read_metrics(run)
    return view(board, now, gone_here(board), history, width, _verdict(run, history, board, now))


def _verdict(run: Path, history: RunHistory | None, board: Board, now: float) -> Verdict | None:
    """How the run stands, in the report's words; ``None``: nothing but its processes tells."""
    from allhands.observe.journal import read_events
    from allhands.report.verdict import verdict_of

    journal = read_events(run) or read_events(run / LOGS)
    if history is None and not journal:
        return None
    return verdict_of(run, history or RunHistory(run.name), journal, board, now)


# --- what is shown ----------------------------------------------------------------------------------------


def view(
    board: Board,
    now: float,
    gone: set[tuple[str, int]],
    history: RunHistory | None,
    width: int = 200,
    verdict: Verdict | None = None,
) -> Group:
    """A heading, a row a process, and what they have together."""
    table = table_of(board, now, gone, width)
    return Group(
        _text(_heading(board, now, gone, history, verdict), width), table, _text(_together(board, now, gone), width)
    )


def _text(words: str, width: int) -> Text:
    return Text(broken(words, width))


def _heading(
    board: Board, now: float, gone: set[tuple[str, int]], history: RunHistory | None, verdict: Verdict | None
) -> str:
    rows = board.rows()
    age = format_duration(max(0.0, now - max(row.last.time for row in rows)))
    words = [f"running, seen {age} ago"]
    if verdict is not None and verdict.status != "going on":
        words = [f"{verdict.status}, last seen {age} ago"]
    elif board.over(now, gone):
        # Who ends by itself says so; first comes who started the others.
        words = [f"ended {age} ago" if rows[0].last.ended else f"broken off (it was killed), last seen {age} ago"]
    steps = [row.last.step for row in rows if row.last.step is not None]
    if history is not None:
        words.insert(0, history.name)
    planned = history.started.total_steps if history is not None and history.started is not None else 0
    total = f" of {planned}" if planned else ""
    if steps:
        words.append(f"step {max(steps)}{total}")
    rate = history.train[-1].tokens_per_s if history is not None and history.train else math.nan
    if math.isfinite(rate):
        words.append(f"{format_rate(rate)} tokens/s over all ranks")
    shares = history.train[-1].shares if history is not None and history.train else ()
    if len(set(shares)) > 1:
        words.append(f"shares {format_shares(shares)}")
    if history is not None and history.train and (sent := history.train[-1].sent_bytes):
        words.append(f"{format_size(sent)} sent by a rank in a step")
    return ", ".join(words)


def table_of(board: Board, now: float, gone: set[tuple[str, int]], width: int = 200) -> Table:
    """One row a process; columns of which nothing is known, or for which there is no room, are left out."""
    rows = board.rows()
    columns = _fitting(_columns(rows, now, gone), width)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("process", "host", "doing") else "right", no_wrap=True)
    for place, row in enumerate(rows):
        dim = row.state(now, gone) != "lives"
        table.add_row(*(cells[place] for cells in columns.values()), style="dim" if dim else None)
    return table


def _fitting(columns: dict[str, list[str]], width: int) -> dict[str, list[str]]:
    """Without those that matter least, as many as have to go."""

    def needed() -> int:
        texts = [[*name.split("\n"), *cells] for name, cells in columns.items()]
        return sum(max(map(len, words)) + 2 for words in texts)

    for name in _DISPENSABLE:
        if needed() > width:
            columns.pop(name, None)
    return columns


def _columns(rows: Sequence[BoardRow], now: float, gone: set[tuple[str, int]]) -> dict[str, list[str]]:
    kind = "/".join(sorted({row.last.pss_kind.upper() for row in rows}))
    lives = [row.state(now, gone) == "lives" for row in rows]
    rates = _rates(rows, lives)
    columns: dict[str, list[str]] = {"process": [row.last.name for row in rows]}
    if len({row.last.host for row in rows}) > 1:
        columns["host"] = [row.last.host for row in rows]
    columns["pid"] = [str(row.last.pid) for row in rows]
    columns["doing"] = [_doing(row, now, gone) for row in rows]
    columns["RSS"] = [format_bytes(row.last.rss_bytes) for row in rows]
    columns["peak\nRSS"] = [format_bytes(row.peak_rss_bytes) for row in rows]
    columns[kind] = [format_bytes(row.last.pss_bytes) for row in rows]
    columns[f"peak\n{kind}"] = [format_bytes(row.peak_pss_bytes) for row in rows]
    columns |= _estimates(rows) | _of_mlx(rows) | _of_gpus(rows)
    columns["CPU"] = [f"{row.last.cpu_cores:.0%}" if live else _NONE for row, live in zip(rows, lives, strict=True)]
    columns["sent\n/s"] = [sent for sent, _ in rates]
    columns["received\n/s"] = [received for _, received in rates]
    return columns


def _doing(row: BoardRow, now: float, gone: set[tuple[str, int]]) -> str:
    state = row.state(now, gone)
    if state != "lives":
        return state
    busiest = row.busiest_phase()
    if busiest is None:
        return row.last.phase or "watches"
    return f"{busiest[0]} {busiest[1]:.0%}"


def _estimates(rows: Sequence[BoardRow]) -> dict[str, list[str]]:
    estimates = [row.last.estimated_bytes for row in rows]
    return {"esti-\nmated": [_bytes(one) for one in estimates]} if any(estimates) else {}


def _of_mlx(rows: Sequence[BoardRow]) -> dict[str, list[str]]:
    if all(row.last.mlx_active_bytes is None for row in rows):
        return {}
    needs = [row.last.mlx_estimated_bytes for row in rows]
    return {
        "MLX\nactive": [_bytes(row.last.mlx_active_bytes) for row in rows],
        "MLX\ncache": [_bytes(row.last.mlx_cache_bytes) for row in rows],
        "MLX\npeak": [_bytes(row.peak_mlx_bytes or None) for row in rows],
        **({"MLX\nneeds": [_bytes(one) for one in needs]} if any(needs) else {}),
    }


def _of_gpus(rows: Sequence[BoardRow]) -> dict[str, list[str]]:
    if all(row.last.gpu_used_bytes is None for row in rows):
        return {}
    loads = [row.last.gpu_load for row in rows]
    return {
        "GPU\nmemory": [_bytes(row.last.gpu_used_bytes) for row in rows],
        "GPU\nload": [_NONE if load is None else f"{load:.0%}" for load in loads],
    }


def _rates(rows: Sequence[BoardRow], lives: Sequence[bool]) -> list[tuple[str, str]]:
    """Traffic, which is that of a whole computer: once for each, in the row of a rank if one lives there."""
    speakers: dict[str, int] = {}
    for place, (row, live) in enumerate(zip(rows, lives, strict=True)):
        before = speakers.get(row.last.host)
        if live and (before is None or (rows[before].last.role != "rank" and row.last.role == "rank")):
            speakers[row.last.host] = place
    told = set(speakers.values())
    return [_net(row) if place in told else (_NONE, _NONE) for place, row in enumerate(rows)]


def _net(row: BoardRow) -> tuple[str, str]:
    rates = row.net_per_s()
    return (_NONE, _NONE) if rates is None else (format_size(rates[0]), format_size(rates[1]))


def _bytes(number: int | None) -> str:
    return _NONE if number is None else format_bytes(number)


def _together(board: Board, now: float, gone: Collection[tuple[str, int]]) -> str:
    rows = board.rows()
    kind = (
        "" if all(row.last.pss_kind == "pss" for row in rows) else " (not all are PSS: what is shared may be missing)"
    )
    live = board.together_bytes(now, gone)
    text = f"{format_bytes(live)} now, " if live else ""
    most = f"{format_bytes(board.peak_together_bytes)} at most"
    if len({row.last.role for row in rows}) > 1:
        most += f" (the ranks alone {format_bytes(board.peak_ranks_bytes)})"
    return f"together, pages that are shared counted once: {text}{most}{kind}"
