"""The activations of a pipeline between two GPUs of one computer: by NCCL, by Open MPI, by the
ring.

    python benchmarks/activations_gpu.py --write python benchmarks/activations_gpu.py --parts
    pipelines --models DIRECTORY --write python benchmarks/activations_gpu.py --shape tiny --ways
    ring,mpi       # to try the script, on two cores too

- **messages** of several sizes in bfloat16, one way and both ways at once, alone and beside a GPU
  that computes. NCCL has no messages: a pipeline takes the sum of two ranks of which one has zeros
  (``nccl``), and the alternative is an all-gather of both ranks' arrays (``nccl-gather``).
- **pipelines**: QLoRA of a 70B shape by ``--strategy pipeline`` over each back-end.

Each way runs in processes of its own with a time limit: one that fails is a row of the table. See
README.md in this directory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_sharded import OURS, PACKAGES
from harness import (
    BenchmarkError,
    clean_environ,
    conditions,
    peer_list,
    positive,
    python_path,
    pythons,
    run_benchmark,
    say,
)
from records import Row, row_of
from sharded_cases import CASES, row_of_shape
from sharded_runs import (
    HERE,
    batch_of,
    failed,
    figures,
    launcher,
    make_model,
    python_of,
    run_until,
    train,
    words_of,
    write_data,
)

PARTS = ("messages", "pipelines")
# The back-end of each way, and whether it gathers.
WAYS = {
    "nccl": ("nccl", False),
    "nccl-gather": ("nccl", True),
    "mpi": ("mpi", False),
    "ring": ("ring", False),
}
WAYS |= {"mpi-gather": ("mpi", True), "ring-gather": ("ring", True)}
TITLES = {
    "nccl": "NCCL, sum with zeros",
    "nccl-gather": "NCCL, all-gather",
    "mpi": "Open MPI, message",
    "ring": "ring, message",
    "mpi-gather": "Open MPI, all-gather",
    "ring-gather": "ring, all-gather",
}
USUAL = ("nccl", "nccl-gather", "mpi", "ring")
CASE = "70b"
_HIDDEN = 0.95  # a message that takes more of a computation's time was not beside it all the time


def sizes(text: str) -> tuple[float, ...]:
    """An option's sizes in MB, ascending."""
    try:
        found = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        found = (0.0,)
    if found[0] <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give sizes in MB, as in 4,32,128")
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = "comma-separated, of: "
    parser.add_argument(
        "--parts",
        type=partial(peer_list, PARTS),
        default=PARTS,
        help=f"{listed}{', '.join(PARTS)} (both)",
    )
    parser.add_argument(
        "--ways",
        type=partial(peer_list, tuple(WAYS)),
        default=USUAL,
        help=f"{listed}{', '.join(WAYS)}",
    )
    parser.add_argument(
        "--sizes", type=sizes, default=(), help="of messages in MB (4,8,16,32,64,128)"
    )
    parser.add_argument(
        "--repeat", type=positive, default=10, help="times that each is measured (%(default)s)"
    )
    parser.add_argument(
        "--shape", choices=("full", "tiny"), default="full", help="tiny: to try it (%(default)s)"
    )
    parser.add_argument(
        "--rows", type=positive, help="of each GPU in a step of a pipeline; default: 4"
    )
    parser.add_argument(
        "--micro-batch-rows",
        type=positive,
        default=2,
        help="that a stage computes at once (%(default)s)",
    )
    parser.add_argument(
        "--warmup", type=positive, default=3, help="steps of a pipeline before (%(default)s)"
    )
    parser.add_argument("--steps", type=positive, default=8, help="that count (%(default)s)")
    parser.add_argument("--python", type=pythons, default={}, help="mlx=PATH; default: this one")
    parser.add_argument(
        "--timeout", type=float, default=150.0, help="seconds for a way (%(default)s)"
    )
    parser.add_argument(
        "--limit", type=float, default=225.0, help="seconds for a part (%(default)s)"
    )
    parser.add_argument(
        "--models",
        type=Path,
        help="where the model stays between runs; default: it goes with the run",
    )
    parser.add_argument("--scratch", type=Path, help="a directory for models, runs and logs")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    options = parser.parse_args(arguments)
    options.gpus = 2
    usual = (0.25, 1.0) if options.shape == "tiny" else (4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
    options.sizes = list(options.sizes or usual)
    return options


# --- what is measured -----------------------------------------------------------------------------


def messages(options: argparse.Namespace, work: Path, way: str, timeout_s: float) -> dict[str, Any]:
    """What two ranks have told of one way.

    Raises:
        BenchmarkError: they failed or took too long.
    """
    backend, gather = WAYS[way]
    out, tiny = work / f"messages-{way}.json", options.shape == "tiny"
    asked = {"gather": gather, "sizes_mb": options.sizes, "repeat": options.repeat, "out": str(out)}
    asked |= {"width": 256 if tiny else 8192, "least_s": 0.02}
    worker = [python_of(options, "mlx"), str(HERE / "activations_worker.py"), json.dumps(asked)]
    command = [*launcher(options, work, f"messages-{way}", backend), *worker]
    environ = clean_environ(PYTHONPATH=python_path())
    run_until(command, work / f"messages-{way}.log", environ, timeout_s, out.exists)
    return json.loads(out.read_text(encoding="utf-8"))


def pipeline(options: argparse.Namespace, work: Path, way: str, timeout_s: float) -> dict[str, Any]:
    """The figures of a pipeline over one back-end.

    Raises:
        BenchmarkError: it failed or took too long.
    """
    began, backend = time.monotonic(), WAYS[way][0]
    model, data = make_model(options, work, CASE, timeout_s), write_data(options, work, CASE)
    name = f"pipelines-{way}"
    words = words_of(options, CASE, model, data, work / name, OURS["pipeline"])
    left = max(1.0, min(options.timeout, timeout_s - (time.monotonic() - began)))
    reports = train(options, work, name, words, backend, left)
    return figures(reports, options.warmup, batch_of(options, CASE) * row_of_shape(options.shape))


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Both parts, each in its time."""
    found: dict[str, dict[str, Any]] = {part: {} for part in options.parts}
    for part in options.parts:
        deadline = time.monotonic() + options.limit
        # A pipeline over NCCL is one, however messages are measured.
        ways = [way for way in options.ways if part == "messages" or not WAYS[way][1]]
        for way in ways:
            say(f"{part}: {TITLES[way] if part == 'messages' else WAYS[way][0]}")
            left = deadline - time.monotonic()
            try:
                if left <= 0:
                    raise BenchmarkError("left out: the time of --limit is over")
                if part == "messages":
                    found[part][way] = messages(options, work, way, min(options.timeout, left))
                else:
                    found[part][way] = pipeline(options, work, way, left)
            except (BenchmarkError, OSError) as error:
                found[part][way] = failed(work, f"{part}-{way}", error)
    shutil.rmtree(work / "models", ignore_errors=True)
    kept = ("shape", "sizes", "repeat", "rows", "micro_batch_rows", "warmup", "steps")
    return {**conditions(options, kept, facts, PACKAGES), **found}


# --- what is told ---------------------------------------------------------------------------------


def speed(each: Mapping[str, Any], key: str) -> float:
    """GB that arrive in a second, those of both ways together; ``key``: ``alone_s`` or
    ``beside_s``.
    """
    return each["mb"] * (2 if each["both"] else 1) / 1e3 / each[key]


def stolen_s(each: Mapping[str, Any]) -> float | None:
    """By how much a computation takes longer with a message beside it; ``None`` where the message
    takes as long.
    """
    if each["beside_s"] > _HIDDEN * each["with_s"]:
        return None
    return each["with_s"] - each["without_s"]


def rows(found: Mapping[str, Any]) -> Iterable[Row]:
    """The figures to keep."""
    for way, told in found.get("messages", {}).items():
        for each in told.get("messages", ()):
            name = f"{each['mb']:g} MB, {_direction(each)}"
            yield row_of(f"{name}, alone", TITLES[way], "GB/s", [speed(each, "alone_s")], "higher")
            yield row_of(
                f"{name}, beside computation",
                TITLES[way],
                "GB/s",
                [speed(each, "beside_s")],
                "higher",
            )
            if (stolen := stolen_s(each)) is not None:
                yield row_of(
                    f"{name}, taken from computation", TITLES[way], "ms", [1e3 * stolen], "lower"
                )
    for way, each in found.get("pipelines", {}).items():
        if "error" not in each:
            name, who = f"{CASES[CASE].title}, two stages", f"allhands, --backend {WAYS[way][0]}"
            yield row_of(name, who, "tokens/s", [each["tokens_per_s"]], "higher")


def _direction(each: Mapping[str, Any]) -> str:
    return "both ways at once" if each["both"] else "one way"


def report(found: Mapping[str, Any]) -> str:
    """A table of messages, the cheapest way of each size, and a table of pipelines."""
    lines = list[str]()
    if told := found.get("messages"):
        lines += [
            "| | MB | | alone | beside computation | taken from computation |",
            "|---|---:|---|---:|---:|---:|",
        ]
        for way, each in told.items():
            if "error" in each:
                lines.append(f"| {TITLES[way]} | {each['error'][:160]} | | | | |")
            lines += [f"| {TITLES[way]} | {_cells(one)} |" for one in each.get("messages", ())]
        lines += ["", *cheapest(told), ""]
    if told := found.get("pipelines"):
        lines += [
            f"| {CASES[CASE].title} | tokens/s | step | peak of each rank | loss, first and last |"
        ]
        lines += ["|---|---:|---:|---:|---:|"]
        lines += [
            f"| --backend {WAYS[way][0]} | {_pipeline_cells(each)} |" for way, each in told.items()
        ]
    return "\n".join(lines)


def _cells(each: Mapping[str, Any]) -> str:
    stolen = stolen_s(each)
    cells = [
        f"{each['mb']:g}",
        _direction(each),
        *(
            f"{speed(each, key):.2f} GB/s ({1e3 * each[key]:.2f} ms)"
            for key in ("alone_s", "beside_s")
        ),
        "the message takes longer"
        if stolen is None
        else f"{1e3 * stolen:.2f} of {1e3 * each['without_s']:.1f} ms",
    ]
    return " | ".join(cells)


def _pipeline_cells(each: Mapping[str, Any]) -> str:
    if "error" in each:
        return f"{each['error'][:160]} | | | "
    memory = ", ".join(f"{peak / 1e9:.2f} GB" for peak in each["peak_bytes"])
    losses = f"{each['losses'][0]:.4f}, {each['losses'][-1]:.4f}"
    return f"{each['tokens_per_s']:,.0f} | {1e3 * each['step_s']:.0f} ms | {memory} | {losses}"


def cheapest(told: Mapping[str, Any]) -> list[str]:
    """For each size and direction the way that is fastest alone, and how many times as fast as the
    next one it is.
    """
    lines = list[str]()
    every = [(way, each) for way, one in told.items() for each in one.get("messages", ())]
    for mb, both in dict.fromkeys((each["mb"], each["both"]) for _, each in every):
        ranked = sorted(
            (each["alone_s"], way)
            for way, each in every
            if (each["mb"], each["both"]) == (mb, both)
        )
        (best_s, best), *others = ranked
        text = f"{mb:g} MB, {'both ways at once' if both else 'one way'}: {TITLES[best]}"
        lines.append(
            f"{text}, {others[0][0] / best_s:.2f} times as fast as {TITLES[others[0][1]]}"
            if others
            else text
        )
    return lines


if __name__ == "__main__":
    sys.exit(run_benchmark("activations_gpu", parse(), measure, report, rows))
