"""Two one-core ranks of which one is held to a third of its core: equal shares, and shares that
follow the speeds.

    python benchmarks/uneven.py

A story model of 15 million parameters from scratch, batches of rows of 256 tokens. First each rank
trains by itself beside the other, with nothing exchanged: the sum of their speeds is what two such
ranks could do at best. Then both train together, with equal shares and with ``--rank-weights
auto``; in the middle of that the slow part is halved. See README.md in this directory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import (
    BenchmarkError,
    clean_environ,
    git_commit,
    positive,
    run_benchmark,
    run_measured,
    say,
)
from harness import versions as versions_of
from records import Row, row_of

PACKAGES = ("allhands", "mlx", "mlx-cpu", "mlx-lm", "scipy-openblas32")
LENGTH = 256
SETTINGS = ("part", "shape", "rows", "repeat", "steps", "seconds")
WARM_UP = 3  # steps that do not count
# At pretrain's own 0.001, unclipped, this model's gradient jumps (from 0.4 to 20 at step 49), which
# carries a rounding error of 1e-6 to some hundredths of the loss, and more: of one process with
# other micro-batches no less.
STEADY = "--learning-rate 1e-4 --max-grad-norm 1"
SETTLED, BACK = (
    100,
    30,
)  # steps until shares must have followed the speeds: from the start, and after a change
_PERIOD_S = 0.01  # a slower core goes on slowly; one that stands still for 30 ms is waited for in each message


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Two ranks of unequal speed, apart and together.")
    parser.add_argument(
        "--part",
        type=float,
        default=1 / 3,
        help="of its core that the slow rank has (%(default).2f)",
    )
    parser.add_argument("--repeat", type=positive, default=3, help="times everything (%(default)s)")
    parser.add_argument(
        "--shape", default="llama-15m", help="as for allhands pretrain (%(default)s)"
    )
    parser.add_argument(
        "--rows", type=positive, default=16, help="of 256 tokens in a batch (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=positive, default=45, help="that each rank trains apart (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=positive, default=60, help="with shares that have settled (%(default)s)"
    )
    parser.add_argument(
        "--weight",
        type=positive,
        default=1024,
        help="of both ranks beside other programs (%(default)s)",
    )
    parser.add_argument(
        "--duty",
        action="store_true",
        help="stop and continue the slow rank, also with control groups",
    )
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds that a run may take")
    parser.add_argument("--scratch", type=Path, help="a directory for runs and logs")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    return parser.parse_args(arguments)


# --- part of a core -------------------------------------------------------------------------------


class Slowed:
    """Processes that have a part of a core: by a control group, else by stopping them for the rest
    of the time.
    """

    def __init__(self, folder: Path | None, fast: Path | None = None) -> None:
        self.folder = folder  # of the control group; None: by signals
        self.fast = fast  # that of the other rank
        self.part = 1.0
        self.pid: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._stop_and_go, daemon=True)
        if folder is None:
            self._thread.start()

    def set(self, part: float) -> None:
        """Let them have so much of a core from now on."""
        self.part = part
        if self.folder is None:
            return
        period = int(_PERIOD_S * 1e6)
        if (quota := self.folder / "cpu.cfs_quota_us").exists():
            (self.folder / "cpu.cfs_period_us").write_text(str(period))
            quota.write_text(str(int(part * period)))
        else:
            (self.folder / "cpu.max").write_text(f"{int(part * period)} {period}")

    def command(self, rank: int, words: Sequence[str]) -> list[str]:
        """``words``, held to its part from the start."""
        folder = self.folder if rank else self.fast
        if folder is None:
            return list(words)
        return ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh", *words]

    def close(self) -> None:
        self._over.set()
        if self.folder is None:
            self._thread.join()
        for folder in (self.folder, self.fast):
            for _ in range(100):  # the last process leaves it some time after its end
                if folder is None or not folder.exists():
                    break
                with suppress(OSError):
                    folder.rmdir()
                time.sleep(0.05)

    def _stop_and_go(self) -> None:
        while not self._over.is_set():
            for kind, part in ((signal.SIGCONT, self.part), (signal.SIGSTOP, 1 - self.part)):
                if self.pid is not None and part > 0:
                    with suppress(ProcessLookupError):
                        os.kill(self.pid, kind)
                self._over.wait(part * _PERIOD_S)


@contextmanager
def slowed(options: argparse.Namespace) -> Generator[Slowed]:
    """Room for the slow rank."""
    root = (
        Path("/sys/fs/cgroup/cpu")
        if Path("/sys/fs/cgroup/cpu").is_dir()
        else Path("/sys/fs/cgroup")
    )
    folders = [root / f"allhands-uneven-{os.getpid()}-{rank}" for rank in range(2)]
    one = Slowed(folders[1], folders[0])
    try:
        if options.duty:
            raise OSError
        for folder in folders:
            folder.mkdir()
            for name, weight in (
                ("cpu.shares", options.weight),
                ("cpu.weight", max(1, options.weight * 100 // 1024)),
            ):
                if (folder / name).exists():
                    (folder / name).write_text(str(weight))
        one.set(options.part)
    except OSError:
        one.close()
        one = Slowed(None)
        one.set(options.part)
    try:
        yield one
    finally:
        one.close()


# --- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """What all runs have in common."""

    options: argparse.Namespace
    work: Path
    slow: Slowed

    def words(self, directory: Path, *more: str) -> list[str]:
        """A run in ``directory`` that reports each step and does nothing else."""
        text = (
            f"pretrain --data {self.work / 'data'} --tokenizer {self.work / 'tokenizer'} --shape {self.options.shape} "
            f"--batch-size {self.options.rows} --block-size {LENGTH} --packing --steps-per-report 1 --val-batches 0 "
            f"--seed 1 --sample-prompts [] --keep-last 0 --gradient-check off --adapter-path {directory} "
            f"--cores-per-rank 1 {STEADY}"
        )
        return [sys.executable, "-m", "allhands", *text.split(), *more]

    def start(self, rank: int, words: Sequence[str], **environ: str) -> subprocess.Popen[bytes]:
        """A rank on its core; the last one is the slow one."""
        pinned = ["taskset", "-c", str(rank), *words] if shutil.which("taskset") else list(words)
        log = (self.work / f"log-{rank}").open("ab")
        env = clean_environ(OPENBLAS_NUM_THREADS="1", PYTHONPATH=source(), **environ)
        started = subprocess.Popen(
            self.slow.command(rank, pinned), stdout=log, stderr=log, env=env, start_new_session=True
        )
        if rank:
            self.slow.pid = started.pid
        return started


def source() -> str:
    """This project's own source."""
    return str(Path(__file__).resolve().parent.parent / "src")


def reports(directory: Path) -> list[dict[str, Any]]:
    """The steps of a run so far."""
    with suppress(OSError, ValueError):
        events = [
            json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()
        ]
        return [event for event in events if event["event"] == "train"]
    return []


def rate(steps: Sequence[dict[str, Any]]) -> float:
    """Tokens a second of a typical step."""
    if not steps:
        raise BenchmarkError("too few steps: raise --seconds")
    return statistics.median(step["tokens_per_s"] for step in steps)


def apart(site: Site, name: str) -> tuple[float, float]:
    """Both ranks' speeds, each by itself beside the other, the fast one first."""
    places = [site.work / f"{name}-{rank}" for rank in range(2)]
    ranks = [
        site.start(rank, site.words(place, "--iters", "100000"))
        for rank, place in enumerate(places)
    ]
    try:
        begun, deadline = None, time.monotonic() + site.options.timeout
        while begun is None or time.monotonic() < begun + site.options.seconds:
            _alive(ranks, deadline)
            time.sleep(0.5)
            if begun is None and all(len(reports(place)) > WARM_UP for place in places):
                begun = time.monotonic()
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
    fast, slow = (rate(reports(place)[WARM_UP:]) for place in places)
    return fast, slow


def together(
    site: Site, name: str, weights: str, iters: int, cut_at: int | None = None
) -> list[dict[str, Any]]:
    """The steps of both; after ``cut_at`` of them the slow rank has half of what it had."""
    place = site.work / name
    ports = _free_ports(2)
    hostfile = site.work / f"{name}-hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    words = site.words(place, "--iters", str(iters), "--rank-weights", weights)
    variables = [{"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)} for rank in range(2)]
    ranks = [site.start(rank, words, **variables[rank]) for rank in range(2)]
    deadline = time.monotonic() + site.options.timeout
    try:
        while any(rank.poll() is None for rank in ranks):
            _alive(ranks, deadline)
            time.sleep(0.2)
            if cut_at is not None and len(reports(place)) >= cut_at:
                site.slow.set(site.options.part / 2)
                cut_at = None
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
    found = reports(place)
    if len(found) < iters:
        raise BenchmarkError(f"it ended after {len(found)} steps: see {site.work}/log-0")
    return found


def _alive(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    if any(rank.poll() for rank in ranks) or time.monotonic() > deadline:
        raise BenchmarkError(
            f"a rank has ended, or takes too long ({[rank.poll() for rank in ranks]})"
        )


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


# --- what is measured -----------------------------------------------------------------------------


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Everything once, then again; the losses of one rank once."""
    write_stories(work / "data")
    words = f"tokenizer train --data {work / 'data'} --vocabulary 4096 --out {work / 'tokenizer'}"
    environ = clean_environ(PYTHONPATH=source())
    run_measured(
        [sys.executable, "-m", "allhands", *words.split()], work / "log", environ, options.timeout
    )
    found: dict[str, list[float]] = {}
    with slowed(options) as slow:
        site = Site(options, work, slow)
        how = "stop and continue" if slow.folder is None else "a control group's quota"
        losses: list[float] = []
        for number in range(options.repeat):
            figures, losses = one_round(site, f"{number + 1}")
            for name, value in figures.items():
                found.setdefault(name, []).append(value)
        say("one rank, for its losses")
        alone = losses_alone(site, len(losses), iters_of(options))
    worst = max(abs(one - other) for one, other in zip(alone, losses, strict=True))
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": facts,
        "versions": versions_of(Path(sys.executable), PACKAGES),
        "settings": {
            **{
                n: getattr(options, n)
                for n in ("part", "shape", "rows", "repeat", "steps", "seconds")
            },
            "how": how,
        },
        "figures": found,
        "loss": {
            "steps": len(losses),
            "one_rank": alone[-1],
            "auto": losses[-1],
            "largest_difference": worst,
        },
    }


def one_round(site: Site, number: str) -> tuple[dict[str, float], list[float]]:
    """The figures of one turn, and the losses with shares that follow the speeds up to the change."""
    options, cut_at = site.options, SETTLED + site.options.steps
    site.slow.set(options.part)
    say(f"{number}: apart")
    fast, slow = apart(site, f"apart-{number}")
    say(f"   {fast:.0f} and {slow:.0f} tokens/s\n{number}: together, equal shares")
    equal = rate(together(site, f"equal-{number}", "equal", 20)[WARM_UP:])
    say(
        f"   {equal:.0f} tokens/s ({equal / (fast + slow):.1%} of the sum)\n{number}: together, by speed, then cut"
    )
    by_hand = json.dumps([round(fast / slow, 2), 1.0]).replace(" ", "")
    hand = rate(together(site, f"hand-{number}", by_hand, 20)[WARM_UP:])
    say(f"   {hand:.0f} tokens/s with {by_hand} by hand")
    auto = together(site, f"auto-{number}", "auto", iters_of(options), cut_at)
    settled, back = rate(auto[SETTLED:cut_at]), rate(auto[cut_at + BACK :])
    say(f"   {settled:.0f} tokens/s, {back:.0f} after the cut\n{number}: apart, after the cut")
    site.slow.set(options.part / 2)
    fast_then, slow_then = apart(site, f"cut-{number}")
    site.slow.set(options.part)
    say(f"   {fast_then:.0f} and {slow_then:.0f} tokens/s")
    figures = {
        "apart: fast": fast,
        "apart: slow": slow,
        "equal shares": equal,
        "shares by hand": hand,
        "auto": settled,
        "apart after the cut: fast": fast_then,
        "apart after the cut: slow": slow_then,
        "auto after the cut": back,
        "equal shares, of the sum": equal / (fast + slow),
        "shares by hand, of the sum": hand / (fast + slow),
        "auto, of the sum": settled / (fast + slow),
        "auto after the cut, of the sum": back / (fast_then + slow_then),
        "steps until auto is at 97 %": steps_until(auto[:cut_at], 0.97 * (fast + slow)),
        "steps until auto is back at 95 %": steps_until(
            auto[cut_at:], 0.95 * (fast_then + slow_then)
        ),
    }
    return figures, [step["loss"] for step in auto[:cut_at]]


def iters_of(options: argparse.Namespace) -> int:
    """Steps of the run with shares by speed."""
    return SETTLED + options.steps + BACK + options.steps


def steps_until(steps: Sequence[dict[str, Any]], wanted: float, window: int = 5) -> float:
    """After how many steps the median of the next few is at ``wanted`` tokens a second; all of them
    if never.
    """
    rates = [step["tokens_per_s"] for step in steps]
    for first in range(len(rates) - window + 1):
        if statistics.median(rates[first : first + window]) >= wanted:
            return first
    return len(rates)


def losses_alone(site: Site, steps: int, iters: int) -> list[float]:
    """Of one rank with the whole batches, for some steps of a run of ``iters``, by which the
    learning rate goes.
    """
    place, deadline = site.work / "alone", time.monotonic() + site.options.timeout
    rank = site.start(0, site.words(place, "--iters", str(iters)))
    try:
        while len(reports(place)) < steps:
            _alive([rank], deadline)
            time.sleep(0.5)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
    return [step["loss"] for step in reports(place)][:steps]


def write_stories(folder: Path) -> None:
    """Texts of made-up words, always the same."""
    draw = random.Random(1)
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(6000)]
    folder.mkdir()
    for name, count in (("train", 6000), ("valid", 60)):
        stories = (" ".join(draw.choices(words, k=120)) for _ in range(count))
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": story}) + "\n" for story in stories)
        )


def rows(found: dict[str, Any]) -> Iterable[Row]:
    """The figures to keep."""
    settings = found["settings"]
    work = f"pre-training of {settings['shape']}, {settings['rows']} rows a batch, one of two ranks slower"
    for name, values in found["figures"].items():
        if "of the sum" in name:
            yield row_of(f"{work}: {name}", "allhands", "of the sum of speeds", values, "higher")
        elif name.startswith("steps"):
            yield row_of(f"{work}: {name}", "allhands", "steps", values, "lower")
        else:
            yield row_of(f"{work}: {name}", "allhands", "tokens/s", values, "higher")
    loss = found["loss"]["largest_difference"]
    yield row_of(
        f"{work}: loss, largest difference from one rank", "allhands", "nats", [loss], "lower"
    )


def report(found: dict[str, Any]) -> str:
    """The table."""
    figures, loss = found["figures"], found["loss"]

    def cell(name: str, percent: bool = False) -> str:
        values = figures[name]
        form = "{:.1%}" if percent else "{:,.0f}"
        middle, least, most = (
            form.format(value) for value in (statistics.median(values), min(values), max(values))
        )
        return middle if len(values) == 1 else f"{middle} ({least} to {most})"

    def line(title: str, *cells: str) -> str:
        return f"| {title} | {' | '.join(cells)} |"

    return "\n".join(
        [
            line("", "tokens/s", "of the sum", "steps until there"),
            "|---|---:|---:|---:|",
            line("the fast rank apart", cell("apart: fast"), "", ""),
            line("the slow rank apart", cell("apart: slow"), "", ""),
            line(
                "together, equal shares",
                cell("equal shares"),
                cell("equal shares, of the sum", True),
                "",
            ),
            line(
                "together, by hand",
                cell("shares by hand"),
                cell("shares by hand, of the sum", True),
                "",
            ),
            line(
                "together, auto",
                cell("auto"),
                cell("auto, of the sum", True),
                cell("steps until auto is at 97 %"),
            ),
            line("the fast rank apart, after the cut", cell("apart after the cut: fast"), "", ""),
            line("the slow rank apart, after the cut", cell("apart after the cut: slow"), "", ""),
            line(
                "together, auto, after the cut",
                cell("auto after the cut"),
                cell("auto after the cut, of the sum", True),
                cell("steps until auto is back at 95 %"),
            ),
            "",
            f"Loss after {loss['steps']} steps: {loss['auto']:.6f}, of one rank {loss['one_rank']:.6f}; the largest "
            f"difference of a step {loss['largest_difference']:.1e}.",
        ]
    )


if __name__ == "__main__":
    sys.exit(run_benchmark("uneven", parse(), measure, report, rows))
