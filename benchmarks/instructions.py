"""How many instructions pieces of allhands' own work take: figures that do not depend on what else
the machine does.

    python benchmarks/instructions.py

Counted by ``perf stat`` where the processor's counters can be read, else by callgrind. Beside the
wall times of the other benchmarks these show a piece that has become slower by a few per cent. See
README.md in this directory.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import (
    ROOT,
    BenchmarkError,
    clean_environ,
    git_commit,
    positive,
    run_benchmark,
    run_measured,
    say,
    versions,
)
from instructions_worker import PIECES
from records import OURS, Row, row_of

HERE = Path(__file__).resolve().parent
PACKAGES = (
    "allhands",
    "click",
    "mlx",
    "mlx-cpu",
    "mlx-lm",
    "numpy",
    "tokenizers",
    "transformers",
    "typer",
)
HELP = "allhands --help"
EVENT = "instructions:u"
_MLX_LM_FILES = 4096
NO_TOOL = (
    "instructions cannot be counted here: perf cannot read the processor's counters (virtual machines often hide them, "
    "kernel.perf_event_paranoid may forbid it), and valgrind is not installed (Debian: apt-get install valgrind)"
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Instructions that pieces of allhands' own work take."
    )
    parser.add_argument(
        "--repeat", type=positive, default=3, help="counts of each piece (%(default)s)"
    )
    parser.add_argument(
        "--tool", choices=("perf", "callgrind"), help="default: the first that works here"
    )
    parser.add_argument("--pieces", help="only those whose name has this in it")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one process")
    parser.add_argument("--scratch", type=Path, help="a directory for what is written")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Each piece in a process of its own."""
    tool = options.tool or tool_here()
    if tool is None:
        raise BenchmarkError(NO_TOOL)
    names = [name for name in (HELP, *PIECES) if (options.pieces or "") in name]
    room_for_files()
    # The demo's tokenizer, fetched outside of the measurement if need be.
    fetch = [sys.executable, "-c", "from allhands.model.sources import resolve; resolve('demo')"]
    run_measured(fetch, work / "fetch.log", environ(online=True), options.timeout)
    counts: dict[str, list[int]] = {}
    for name in names:
        say(f"{name}, by {tool}")
        counts[name] = COUNTERS[tool](name, options.repeat, options.timeout, work)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": facts,
        "versions": {**versions(Path(sys.executable), PACKAGES), **tool_version(tool)},
        # Counts of two tools, or of two processors' kernels, are not the same thing.
        "settings": {"tool": tool},
        "counts": counts,
    }


def room_for_files() -> None:
    """Children inherit it. Valgrind takes the limit in force for the highest, and lets nobody
    change that one.

    mlx_lm sets the highest to 4,096 when it is imported.
    """
    _, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if highest == resource.RLIM_INFINITY or highest > _MLX_LM_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_MLX_LM_FILES, highest))


def environ(*, online: bool = False) -> dict[str, str]:
    """What makes the work the same each time, and of this tree."""
    fixed = {
        "PYTHONHASHSEED": "0",
        "OPENBLAS_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "COLUMNS": "120",
    }
    if platform.machine() in ("x86_64", "AMD64"):
        # valgrind knows AVX2 and nothing wider.
        fixed["ALLHANDS_NATIVE"] = "x86-64-v3"
    values = clean_environ(PYTHONPATH=str(ROOT / "src"), **fixed)
    if online:
        del values["HF_HUB_OFFLINE"]
    return values


def tool_here() -> str | None:
    """The tool that can count instructions on this computer, if there is one."""
    if shutil.which("perf"):
        command = ["perf", "stat", "-x,", "-e", EVENT, sys.executable, "-c", "pass"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and count_in_perf(done.stderr) is not None:
            return "perf"
    return "callgrind" if shutil.which("valgrind") and shutil.which("vgdb") else None


def tool_version(tool: str) -> dict[str, str]:
    """As its ``--version`` says."""
    program = "valgrind" if tool == "callgrind" else tool
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return {
        program: done.stdout.strip().removeprefix(f"{program}-").removeprefix("perf version ")
        or "unknown"
    }


# --- counting -------------------------------------------------------------------------------------


def count_in_perf(text: str) -> int | None:
    """The count in what ``perf stat -x,`` writes; ``None`` if it could not count."""
    for line in text.splitlines():
        fields = line.split(",")
        if len(fields) > 2 and fields[2].startswith(EVENT.partition(":")[0]):
            return int(fields[0]) if fields[0].isdigit() else None
    return None


def count_in_callgrind(text: str) -> int:
    """The total of a file that callgrind has written."""
    totals = [line.split()[1] for line in text.splitlines() if line.startswith("totals:")]
    if len(totals) != 1:
        raise BenchmarkError("callgrind has written no total")
    return int(totals[0])


def program(tool: str, name: str, repeat: int, work: Path) -> list[str]:
    """What is counted: all of a command, or a worker that says itself what."""
    if name == HELP:
        return [sys.executable, "-m", "allhands", "--help"]
    return [
        sys.executable,
        str(HERE / "instructions_worker.py"),
        tool,
        name,
        str(repeat),
        str(work),
    ]


def by_callgrind(name: str, repeat: int, timeout_s: float, work: Path) -> list[int]:
    """A worker does all repeats in one process, with a dump after each; a command is run as often."""
    whole, found = name == HELP, list[int]()
    for _ in range(repeat if whole else 1):
        for old in work.glob("callgrind.out*"):
            old.unlink()
        # Fair: else one thread that waits takes the turns of the one that works.
        command = [
            "valgrind",
            "--fair-sched=yes",
            "--tool=callgrind",
            f"--instr-atstart={'yes' if whole else 'no'}",
        ]
        command += [
            f"--callgrind-out-file={work / 'callgrind.out'}",
            *program("callgrind", name, repeat, work),
        ]
        run_measured(command, work / "log", environ(), timeout_s)
        # Each dump has a number; the file without is what was counted after the last one.
        files = (
            [work / "callgrind.out"] if whole else sorted(work.glob("callgrind.out.*"), key=_number)
        )
        found += [count_in_callgrind(file.read_text(errors="replace")) for file in files]
    if len(found) != repeat:
        raise BenchmarkError(f"callgrind has counted {len(found)} of {repeat} times: {name}")
    return found


def _number(file: Path) -> int:
    return int(file.suffix[1:])


def by_perf(name: str, repeat: int, timeout_s: float, work: Path, event: str = EVENT) -> list[int]:
    """A process for each repeat; a worker says when to count."""
    found: list[int] = []
    for number in range(repeat):
        pipes = [work / f"{kind}-{number}-{abs(hash(name))}" for kind in ("control", "acknowledge")]
        out = work / "perf.out"
        command = ["perf", "stat", "-x,", "-e", event, "-o", str(out)]
        if name != HELP:
            for pipe in pipes:
                os.mkfifo(pipe, 0o600)
            command += ["--delay=-1", f"--control=fifo:{pipes[0]},{pipes[1]}"]
        command += ["--", *program(f"perf:{pipes[0]}:{pipes[1]}", name, 1, work)]
        run_measured(command, work / "log", environ(), timeout_s)
        count = count_in_perf(out.read_text())
        if count is None:
            raise BenchmarkError(f"perf could not count: {out.read_text()[-300:]}")
        found.append(count)
    return found


COUNTERS: Mapping[str, Callable[[str, int, float, Path], list[int]]] = {
    "perf": by_perf,
    "callgrind": by_callgrind,
}


# --- the table ------------------------------------------------------------------------------------


def rows(record: dict[str, Any]) -> list[Row]:
    """The figures that are kept."""
    make = partial(row_of, who=OURS, unit="instructions", better="lower")
    return [make(name, values=counts) for name, counts in record["counts"].items()]


def report(record: dict[str, Any]) -> str:
    """A line a piece."""
    lines = [
        f"instructions in user space, by {record['settings']['tool']}; median (fewest to most)",
        "",
        "| | millions |",
        "|---|---:|",
    ]
    for row in rows(record):
        figures = [f"{value / 1e6:,.1f}" for value in (row.median, row.least, row.most)]
        lines.append(f"| {row.name} | {figures[0]} ({figures[1]} to {figures[2]}) |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if platform.system() != "Linux":
        say("skipped: instructions are counted on Linux only")
        return 0
    if options.tool is None and tool_here() is None:
        say(f"skipped: {NO_TOOL}")
        return 0
    return run_benchmark("instructions", options, measure, report, rows)


if __name__ == "__main__":
    sys.exit(main())
