"""Data parallel training on several GPUs of this computer: allhands over NCCL beside PyTorch's DDP.

    python benchmarks/gpu_many.py --gpus 1,2,4 --python mlx=python3,torch=python3

The works of ``gpu.py``: weak scaling (the same batch for each GPU) and strong scaling (the same
batch for all of them together). Each peer's ranks are started by its own launcher. See README.md in
this directory.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu import PACKAGES, WORKS
from gpu_watch import Watch
from harness import (
    BenchmarkError,
    clean_environ,
    git_commit,
    num_cores,
    peer_list,
    positive,
    python_path,
    pythons,
    run_benchmark,
    run_measured,
    say,
    versions,
)
from records import Row, work_rows
from rounds import ROUND, rounds_of

if TYPE_CHECKING:
    import numpy as np

HERE = Path(__file__).resolve().parent
PEERS = ("allhands", "apart", "torch", "torch-compiled")
OURS = ("allhands", "apart")
TITLES = {
    "allhands": "allhands",
    # What the GPUs do when they all compute and nothing is exchanged: more than that no exchange
    # can reach.
    "apart": "allhands, nothing exchanged",
    "torch": "PyTorch DDP, eager",
    "torch-compiled": "PyTorch DDP, torch.compile",
}
NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
SCALINGS = ("weak", "strong")
BUCKET_MB = 128.0  # of `allhands train` over NCCL
PARTS = {"compute_s": "compute", "comm_s": "communication", "data_wait_s": "data wait"}
CONSTANTS = ("alone_bytes", "taper")
_LEAST_S = 20.0  # no peer is done in less


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        rows: examples of each rank in each step.
        bucket_mb: of allhands' all-reduces; 0: each array by itself.
        dtype: of weights and gradients.
        constants: of allhands' exchange that have another value, and that.
    """

    work: str
    gpus: int
    scaling: str
    peer: str
    rows: int
    bucket_mb: float = BUCKET_MB
    dtype: str = "bfloat16"
    constants: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        """What is measured, the same for every peer."""
        shared = ", the batch of one" if self.scaling == "strong" else ""
        return f"{self.work}, {self.gpus} GPU{'s' * (self.gpus > 1)}{shared}"

    @property
    def who(self) -> str:
        """The peer, with what is not usual of it."""
        told = [TITLES[self.peer]]
        if self.bucket_mb != BUCKET_MB:
            told.append(f"buckets of {self.bucket_mb:g} MB" if self.bucket_mb else "no buckets")
        return ", ".join([*told, *(f"{name} {value:g}" for name, value in self.constants)])

    @property
    def described(self) -> dict[str, Any]:
        """As :mod:`roofline` reads it: the batch is that of all GPUs."""
        several = {"batch": self.rows * self.gpus, "gpus": self.gpus, "scaling": self.scaling}
        return {**WORKS[self.work], "dtype": self.dtype, **several}


def batch_of(work: Mapping[str, Any], rows: int, rank: int) -> np.ndarray:
    """A rank's random tokens, int32 (rows, length + 1): its part of a batch that is the same
    however it is divided.
    """
    import numpy as np

    size, length = work["shape"]["vocab_size"], work["length"] + 1
    numbers = range(rank * rows, (rank + 1) * rows)
    return np.stack(
        [np.random.default_rng([1, n]).integers(0, size, length, dtype=np.int32) for n in numbers]
    )


# --- what is measured -----------------------------------------------------------------------------


def numbers(text: str) -> tuple[int, ...]:
    """An option's numbers of GPUs, ascending."""
    return tuple(sorted({positive(part.strip()) for part in text.split(",")}))


def buckets(text: str) -> tuple[float, ...]:
    """An option's sizes of buckets in MB; ``none`` is 0."""
    try:
        found = tuple(
            dict.fromkeys(
                0.0 if part.strip() == "none" else float(part) for part in text.split(",")
            )
        )
    except ValueError:
        found = (-1.0,)
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give sizes in MB, or none, as in 8,32,none")
    return found


def constants(text: str) -> tuple[tuple[str, float], ...]:
    """An option's constants of ``allhands.distributed.reduce``, by their names in small letters;
    ``none`` is none.
    """
    found = list[tuple[str, float]]()
    for part in () if text == "none" else text.split(","):
        name, equals, value = part.strip().partition("=")
        try:
            found.append((name, float(value)))
        except ValueError:
            equals = ""
        if name not in CONSTANTS or not equals:
            raise argparse.ArgumentTypeError(
                f"{part!r}: give {', '.join(f'{name}=NUMBER' for name in CONSTANTS)}"
            )
    return tuple(found)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = "comma-separated, of: "
    works = tuple(name for name in WORKS if name != "qlora")
    default = ("full", "smol", "lora")
    parser.add_argument(
        "--gpus", type=numbers, help="comma-separated; default: of 1,2,4,8 those that are here"
    )
    parser.add_argument(
        "--works",
        type=partial(peer_list, works),
        default=default,
        help=f"{listed}{', '.join(default)}, tiny",
    )
    parser.add_argument(
        "--peers", type=partial(peer_list, PEERS), default=PEERS, help=f"{listed}{', '.join(PEERS)}"
    )
    parser.add_argument(
        "--scaling",
        type=partial(peer_list, SCALINGS),
        default=SCALINGS,
        help=f"{listed}{', '.join(SCALINGS)}",
    )
    parser.add_argument(
        "--bucket-mb",
        type=buckets,
        default=(BUCKET_MB,),
        help="of allhands' all-reduces, as 8,32,none (128)",
    )
    parser.add_argument(
        "--strategy",
        choices=("auto", "data", "zero1"),
        default="auto",
        help="of allhands (%(default)s)",
    )
    parser.add_argument(
        "--set",
        type=constants,
        action="append",
        help="of allhands' exchange, as alone_bytes=16e6,taper=1: see allhands.distributed.reduce; again for "
        "another measurement, none for that as it is",
    )
    parser.add_argument(
        "--backend", default="auto", help="of allhands: auto, nccl, ring or mpi (%(default)s)"
    )
    parser.add_argument(
        "--python", type=pythons, default={}, help="mlx=PATH,torch=PATH; default: this one"
    )
    parser.add_argument("--steps", type=positive, default=30, help="that count (%(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds for one measurement (%(default)s)"
    )
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds for all of them; default: none"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="show what rank 0's GPU does in allhands' steps (needs PyTorch)",
    )
    parser.add_argument("--scratch", type=Path, help="a directory for logs")
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/gpu_many-DATE.json"
    )
    return parser.parse_args(arguments)


def cases(options: argparse.Namespace, dtype: str = "bfloat16") -> Iterator[Case]:
    """All measurements: of each work one GPU first, then weak and then strong scaling.

    On one GPU both kinds of scaling, and all sizes of buckets, are the same.
    """
    for work in options.works:
        batch = WORKS[work]["batch"]
        for scaling in options.scaling:
            for gpus in options.gpus:
                if gpus == 1 and scaling != options.scaling[0]:
                    continue
                rows = batch // gpus if scaling == "strong" else batch
                for peer in options.peers:
                    # On one GPU nothing is exchanged anyway.
                    if peer == "apart" and gpus == 1:
                        continue
                    varied = peer == "allhands" and gpus > 1
                    sizes = options.bucket_mb if varied else (BUCKET_MB,)
                    for size, some in itertools.product(
                        sizes, options.set or [()] if varied else [()]
                    ):
                        yield Case(
                            work,
                            gpus,
                            scaling if gpus > 1 else "weak",
                            peer,
                            rows,
                            size,
                            dtype,
                            some,
                        )


def command(case: Case, options: argparse.Namespace, out: Path) -> list[str]:
    """What starts the ranks: each peer's own launcher."""
    work = {**WORKS[case.work], "dtype": case.dtype}
    asked: dict[str, Any] = {
        "work": work,
        "rows": case.rows,
        "steps": options.steps,
        "out": str(out),
    }
    if case.peer in OURS:
        python = options.python.get("mlx", sys.executable)
        asked |= {"bucket_bytes": int(case.bucket_mb * 1e6), "strategy": options.strategy}
        asked |= {
            "apart": case.peer == "apart",
            "profile": options.profile,
            "set": dict(case.constants),
        }
        launch = [
            "-m",
            "allhands",
            "launch",
            "-n",
            str(case.gpus),
            "--backend",
            options.backend,
            "--no-tag-output",
        ]
        # A rank that fails ends the measurement.
        launch += ["--max-restarts", "0", "--log-dir", str(out.with_suffix("")), "--", python]
        return [python, *launch, str(HERE / "gpu_many_mlx.py"), json.dumps(asked)]
    python = options.python.get("torch", sys.executable)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.gpus)]
    return [
        python,
        *torchrun,
        str(HERE / "gpu_many_torch.py"),
        json.dumps({**asked, "peer": case.peer}),
    ]


def obstacle(case: Case, gpus: int, left_s: float) -> str:
    """Why it is not even tried; empty if nothing is in the way. Without any of the ``gpus`` CPUs
    are tried.
    """
    batch = WORKS[case.work]["batch"]
    if 0 < gpus < case.gpus:
        return f"left out: there {'are' if gpus > 1 else 'is'} {gpus} GPU{'s' * (gpus > 1)}"
    if case.scaling == "strong" and batch % case.gpus:
        return f"left out: a batch of {batch} cannot be divided by {case.gpus}"
    return "left out: the time of --limit is over" if left_s < _LEAST_S else ""


def measure_case(
    case: Case, options: argparse.Namespace, directory: Path, timeout_s: float
) -> dict[str, Any]:
    """The figures of one measurement, or the ``error``."""
    out = directory / f"{re.sub(r'[^a-z0-9]+', '-', f'{case.name}-{case.who}'.lower())}.json"
    log = out.with_suffix(".log")
    # As a person would set it: all cores, divided. torchrun alone gives one to each.
    threads = str(max(1, num_cores() // case.gpus))
    added = {"OMP_NUM_THREADS": threads} if case.peer not in OURS else {}
    try:
        environ = clean_environ(PYTHONPATH=python_path(), **added)
        with Watch() as watch:
            run_measured(command(case, options, out), log, environ, timeout_s)
        told = json.loads(out.read_text(encoding="utf-8"))
        for line in told.get("profile", ()):
            say(f"  {line}")
        return {**figures(case, told, rounds_of(options.steps)), **watch.between(*told["counted"])}
    except (BenchmarkError, OSError) as error:
        say(f"  {error}")
        return {
            "error": reason(
                log.read_text(encoding="utf-8", errors="replace") if log.exists() else "", error
            )
        }


def reason(log: str, error: Exception) -> str:
    """What went wrong, in one line: the first error in the log, since other ranks' come of it."""
    if "did not finish in time" in str(error):
        return "did not finish in time"
    told = re.findall(r"^(?:.*?\s)?([\w.]*(?:Error|Exception|error): .*\S)", log, re.MULTILINE)
    return next(
        (line for line in told if "ChildFailedError" not in line), str(error).splitlines()[-1]
    )[:200]


def figures(case: Case, told: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """What the ranks have told of a step in each of their last ``rounds`` rounds, times in seconds.

    ``step_s`` is of the slowest rank of each round, ``rank0_s`` of rank 0. ``parts`` has the
    medians of what rank 0's time goes into, as ``allhands train --profile`` shows it, and
    ``exchange_s`` the median of each round's shortest time in the exchange: of the rank that waits
    for no other.
    """
    ranks = [times[-rounds:] for times in told["times"]]
    slowest = [max(step) for step in zip(*ranks, strict=True)]
    median = statistics.median(slowest)
    found: dict[str, Any] = {
        "tokens_per_s": case.gpus * case.rows * WORKS[case.work]["length"] / median,
        "step_s": {"median": median, "best": min(slowest), "worst": max(slowest)},
        "repeats": rounds,
        "rank0_s": statistics.median(ranks[0]),
        "peak_bytes": max(told["peak_bytes"]),
        "first_step_s": max(times[0] for times in told["times"]),
        "losses": [told["losses"][0], told["losses"][-1]],
        "trained": told["trained"],
        "backend": told["backend"],
    }
    if "comm_s" in told:
        parts = {name: statistics.median(told[name][0][-rounds:]) for name in PARTS}
        parts["rest_s"] = max(0.0, found["rank0_s"] - sum(parts.values()))
        least = [
            min(step) for step in zip(*(times[-rounds:] for times in told["comm_s"]), strict=True)
        ]
        found |= {"parts": parts, "exchange_s": statistics.median(least)}
    return found


def measure(options: argparse.Namespace, directory: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """All works on all numbers of GPUs by all peers, each by itself."""
    began = time.monotonic()
    here = len(facts["gpus"])
    options.gpus = options.gpus or tuple(n for n in (1, 2, 4, 8) if n <= (here or 2))
    results: dict[str, dict[str, Any]] = {}
    works: dict[str, dict[str, Any]] = {}
    # allhands computes in float32 on a CPU.
    for case in cases(options, "bfloat16" if here else "float32"):
        say(f"{case.name}: {case.who}")
        works[case.name] = case.described
        left = options.limit - (time.monotonic() - began)
        if why := obstacle(case, here, left):
            one: dict[str, Any] = {"error": why}
        else:
            one = measure_case(case, options, directory, min(options.timeout, left))
        results.setdefault(case.name, {})[case.who] = one
    add_efficiency(results, works)
    kinds = {peer: "mlx" if peer in OURS else "torch" for peer in PEERS}
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": facts,
        "versions": {
            # With the path that the ranks have.
            kind: versions(
                Path(options.python.get(kind, sys.executable)),
                (*PACKAGES, *NCCL),
                PYTHONPATH=python_path(),
            )
            for kind in dict.fromkeys(kinds[peer] for peer in options.peers)
        },
        "settings": {
            **{
                name: list(getattr(options, name))
                for name in ("gpus", "works", "peers", "scaling", "bucket_mb")
            },
            "steps": options.steps,
            "backend": options.backend,
            "strategy": options.strategy,
            **({"set": [dict(some) for some in options.set]} if options.set else {}),
            # How NCCL was set from outside changes what is measured.
            "nccl": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith("NCCL_")
            },
        },
        "steps": options.steps,
        "works": works,
        "results": results,
    }


def add_efficiency(
    results: Mapping[str, Mapping[str, Any]], works: Mapping[str, Mapping[str, Any]]
) -> None:
    """To everybody's figures on several GPUs the part of N times the speed on one, where that was
    measured.
    """
    for name, peers in results.items():
        gpus = works[name]["gpus"]
        base = results.get(f"{name.partition(',')[0]}, 1 GPU", {})
        for who, found in peers.items():
            # Buckets make no difference on one GPU.
            alone = base.get("allhands" if who.startswith("allhands") else who, {}).get(
                "tokens_per_s"
            )
            if alone and "error" not in found:
                found["efficiency"] = found["tokens_per_s"] / (gpus * alone)


# --- what is told of it ---------------------------------------------------------------------------


def rows(found: Mapping[str, Any]) -> list[Row]:
    """Speeds, memory and first steps as of one GPU; then efficiency and, for ours, the exchange
    that is waited for.
    """
    told = work_rows(found)
    for name, peers in found["results"].items():
        about = found["works"][name]
        if about["gpus"] == 1:
            continue
        for who, one in peers.items():
            if "efficiency" in one:
                title = f"{name}: {about['scaling']} scaling"
                percent = 100.0 * one["efficiency"]
                told.append(
                    Row(
                        title,
                        who,
                        "% of N x one GPU",
                        percent,
                        percent,
                        percent,
                        1,
                        "higher",
                        work=about,
                    )
                )
            if "exchange_s" in one and who != TITLES["apart"]:
                spent = 1e3 * one["exchange_s"]
                told.append(
                    Row(f"{name}: exchange", who, "ms", spent, spent, spent, 1, "lower", work=about)
                )
    return told


def report(record: Mapping[str, Any]) -> str:
    """The table as Markdown, then how the time of allhands' steps is split."""
    settings = [
        f"{record['steps']} steps, median of rounds of {ROUND} (worst to best) of the slowest rank"
    ]
    if not record["machine"]["gpus"]:
        settings.append("there is no GPU: each stands for a process of the CPU, in float32")
    every = [
        one
        for peers in record["results"].values()
        for one in peers.items()
        if "error" not in one[1]
    ]
    over = {
        f"{who.partition(',')[0]} over {one['backend']}": None
        for who, one in every
        if one["backend"] != "none"
    }
    settings += [", ".join(over)] if over else []
    settings += [f"{name}={value}" for name, value in record["settings"]["nccl"].items()]
    lines = [
        "; ".join(settings),
        "",
        "| | who | tokens/s | of N x one | step, slowest rank | rank 0 | GPU | peak of a rank | first step | loss |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, peers in record["results"].items():
        lines += [f"| {name} | {who} | {_cells(one)} |" for who, one in peers.items()]
    parts = list(_split(record["results"]))
    if parts:
        lines += [
            "",
            "What the time of a step of allhands goes into on rank 0, and the exchange where nobody is late:",
        ]
        lines += [
            "",
            f"| | who | {' | '.join(PARTS.values())} | rest | exchange |",
            "|---|---|" + "---:|" * 5,
            *parts,
        ]
    return "\n".join(lines)


def _cells(one: Mapping[str, Any]) -> str:
    if "error" in one:
        return f"{one['error'].replace('|', '/')[:120]} | | | | | | | "
    step, tokens = one["step_s"], one["tokens_per_s"] * one["step_s"]["median"]
    cells = [
        f"{one['tokens_per_s']:,.0f} ({tokens / step['worst']:,.0f} to {tokens / step['best']:,.0f})",
        f"{100 * one['efficiency']:.1f} %" if "efficiency" in one else "-",
        f"{1e3 * step['median']:.1f} ms",
        f"{1e3 * one['rank0_s']:.1f} ms",
        f"{one['watts']:.0f} W, {one['mhz']:.0f} MHz" if "watts" in one else "-",
        f"{one['peak_bytes'] / 1e9:.1f} GB" if one["peak_bytes"] else "-",
        f"{one['first_step_s']:.1f} s",
        f"{one['losses'][0]:.3f}, {one['losses'][1]:.3f}",
    ]
    return " | ".join(cells)


def _split(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, peers in results.items():
        for who, one in peers.items():
            if "parts" in one:
                whole = one["rank0_s"]
                cells = [
                    f"{1e3 * value:.1f} ms ({100 * value / whole:.0f} %)"
                    for value in one["parts"].values()
                ]
                yield f"| {name} | {who} | {' | '.join(cells)} | {1e3 * one['exchange_s']:.1f} ms |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and record if asked to."""
    return run_benchmark("gpu_many", parse(arguments), measure, report, rows)


if __name__ == "__main__":
    sys.exit(main())
