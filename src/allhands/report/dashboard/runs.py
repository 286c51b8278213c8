"""The runs below a directory: find and sum them up, read their logs, ask one to stop."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from allhands.errors import AllhandsError, DataError
from allhands.io.formatting import format_bytes
from allhands.io.names import BEST, CHECKPOINTS, LOGS, MODELS_OF_A_RUN
from allhands.observe.journal import EVENTS_FILE
from allhands.observe.judging import harm
from allhands.observe.metrics import METRICS_FILE
from allhands.observe.monitor.board import Board, BoardRow, gone_here
from allhands.report.facts import ReportFacts, read_facts

_DEPTH = 3  # of directories in which runs are looked for
_MOST = 200
_LOG = re.compile(r"(rank-\d+|mpirun)(\.attempt-\d+)?\.log")
_SAMPLES = re.compile(r"monitor-(orchestrator|rank-\d+)\.jsonl")
_TAIL_BYTES = 16_384
_NOT_LOOKED = {CHECKPOINTS, BEST, LOGS, *MODELS_OF_A_RUN}


@dataclass(frozen=True)
class Summary:
    """A run in one line, as plain values; ``None`` where something is not known.

    Attributes:
        trained_s: the training time of all its starts, without what was lost.
        harm: a fault of its curves, in a few words; empty if there is none.
    """

    name: str
    status: str
    ranks: int | None
    step: int
    total_steps: int | None
    loss: float | None
    valid_loss: float | None
    tokens_per_s: float | None
    trained_s: float | None
    memory_bytes: int
    can_stop: bool
    harm: str


def find_runs(root: Path) -> dict[str, Path]:
    """Return the directories of runs below ``root``, itself included, by their relative paths; the
    one written last comes first.

    ``root`` itself goes by its name, or by ``"."`` where a run in it has that name.
    """
    found: list[tuple[float, str, Path]] = []
    for directory in _below(root, _DEPTH):
        for file in (directory / METRICS_FILE, directory / EVENTS_FILE):
            if file.is_file():
                found.append((file.stat().st_mtime, str(directory.relative_to(root)), directory))
                break
    own = root.resolve().name
    if own not in (name for _, name, _ in found):
        found = [(time, own if name == "." else name, path) for time, name, path in found]
    return {name: directory for _, name, directory in sorted(found, reverse=True)[:_MOST]}


def _below(directory: Path, depth: int) -> Iterator[Path]:
    yield directory
    if depth == 0:
        return
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return
    for entry in entries:
        hidden = entry.name.startswith(".") or entry.name in _NOT_LOOKED
        if not hidden and entry.is_dir() and not entry.is_symlink():
            yield from _below(entry, depth - 1)


def summary_of(name: str, directory: Path) -> Summary | None:
    """Return the run in one line; ``None`` if it cannot be read at all."""
    try:
        facts = read_facts(directory)
    except AllhandsError:
        return None
    history = facts.history
    started, last, ended = history.started, history.last, history.ended
    bad = [one.text for one in harm(history) if one.level == "bad"]
    return Summary(
        name=name,
        status=facts.status,
        ranks=started.num_ranks if started else None,
        step=max(last.step if last else 0, ended.step if ended else 0),
        total_steps=started.total_steps if started else None,
        loss=last.loss if last else None,
        valid_loss=history.valid[-1].loss if history.valid else None,
        tokens_per_s=last.tokens_per_s if last else None,
        trained_s=history.trained_s,
        memory_bytes=facts.together_bytes,
        can_stop=facts.status == "going on" and head_of(facts) is not None,
        harm=bad[0].partition(":")[0] if bad else "",
    )


# --- processes ------------------------------------------------------------------------------------


def processes_of(facts: ReportFacts, now: float) -> list[dict[str, str]]:
    """Return a row of texts for each process of the run: the ranks first, then those that only
    direct them.
    """
    board = Board(facts.samples)
    gone = gone_here(board)
    return [
        _process(row, now, gone)
        for row in sorted(board.rows(), key=lambda row: row.last.role != "rank")
    ]


def _process(row: BoardRow, now: float, gone: Collection[tuple[str, int]]) -> dict[str, str]:
    sample, state = row.last, row.state(now, gone)
    gpu = "" if sample.gpu_used_bytes is None else format_bytes(sample.gpu_used_bytes)
    return {
        "process": sample.name,
        "computer": sample.host,
        "doing": row.doing(now, gone),
        "step": "" if sample.step is None else str(sample.step),
        "memory": format_bytes(sample.pss_bytes),
        "peak memory": format_bytes(row.peak_pss_bytes),
        "MLX's arrays": ""
        if sample.mlx_active_bytes is None
        else format_bytes(sample.mlx_active_bytes),
        "GPU's memory": gpu,
        "CPU": f"{sample.cpu_cores:.0%}" if state == "lives" else "",
    }


def head_of(facts: ReportFacts) -> psutil.Process | None:
    """Return the process that directs the run, or rank 0 where nobody does, if it lives on this
    computer.
    """
    here = socket.gethostname()
    rows = Board(facts.samples).rows()
    directors = [row for row in rows if row.last.role == "orchestrator"]
    for row in directors or [row for row in rows if row.last.role == "rank" and row.last.rank == 0]:
        if row.last.host != here or row.last.ended or row.last.pid == os.getpid():
            continue
        try:
            process = psutil.Process(row.last.pid)
            # Another process may have got its id since.
            if process.create_time() <= row.last.time and _writes_samples(process, facts.path):
                return process
        except (psutil.Error, OSError):
            continue
    return None


def _writes_samples(process: psutil.Process, directory: Path) -> bool:
    """Return whether a process belongs to the run: it has a file of samples there open for writing.

    A sample alone is no proof: others may have written it, and an old one may name another process.
    """
    logs = directory.resolve() / LOGS
    for held in process.open_files():
        path = Path(held.path)
        writes = getattr(held, "mode", "a") not in ("r", "")  # not known on macOS
        if path.parent == logs and _SAMPLES.fullmatch(path.name) and writes:
            return process.uids().effective in (os.geteuid(), path.stat().st_uid)
    return False


def ask_to_stop(directory: Path) -> str:
    """Ask a run to save and end, as a scheduler would; return what was done, in words.

    Raises:
        DataError: it does not go on, or not on this computer.
    """
    process, hint = head_of(read_facts(directory)), "stop it where it was started, with Ctrl-C"
    if process is None:
        raise DataError(
            "no process of this run lives on this computer",
            code="run-not-stoppable",
            where=str(directory),
            hint=hint,
        )
    try:
        process.send_signal(signal.SIGTERM)  # not to a process that has got its id by now
    except (psutil.Error, OSError) as error:
        raise DataError(
            f"it cannot be asked ({error}): it has just ended, or is another user's",
            code="run-not-stoppable",
            where=str(directory),
            hint=hint,
        ) from None
    return f"asked process {process.pid} to save and stop at {time.strftime('%H:%M:%S')}"


# --- logs -----------------------------------------------------------------------------------------


def logs_of(directory: Path) -> list[str]:
    """Return the names of the ranks' logs, current ones first; no links, as they lead anywhere."""
    try:
        entries = [entry for entry in (directory / LOGS).iterdir() if _LOG.fullmatch(entry.name)]
        names = [entry.name for entry in entries if entry.is_file() and not entry.is_symlink()]
    except OSError:
        return []
    return sorted(names, key=lambda name: ("attempt" in name, not name.startswith("rank-"), name))


def tail_of(directory: Path, name: str) -> str:
    """Return the end of a log.

    Raises:
        DataError: there is no such log.
    """
    if name not in logs_of(directory):
        raise DataError(
            "there is no such log", code="log-missing", where=name, hint="take one of the list"
        )
    with (directory / LOGS / name).open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        size = stream.tell()
        stream.seek(max(0, size - _TAIL_BYTES))
        text = stream.read().decode("utf-8", errors="replace")
    return text if size <= _TAIL_BYTES else text.partition("\n")[2]
