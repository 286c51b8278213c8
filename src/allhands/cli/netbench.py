"""``allhands cluster bench``: measure how fast the computers exchange gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import typer
from rich.console import Console

from allhands.cli.verbs_cluster import ClusterBench
from allhands.cluster.figures import Failure, Figures, Measurement
from allhands.cluster.netbench import BenchOptions, measure_each, measured_hosts
from allhands.errors import DistributedError
from allhands.io.terminal import console_for, print_json, table_of

_WIDTH = 80
_TAIL = 5
_tell = partial(typer.echo, err=True)
_LEGEND = """\
median: of rounds, each as long as on its slowest rank
middle half: half of the rounds took as long
of the bus: what each link carries; compare it with the speed of the cable
"""


def bench(asked: ClusterBench) -> None:
    """Run the verb."""
    hosts = measured_hosts(asked.hostfile, asked.hosts, asked.num_ranks)
    options = BenchOptions(
        timeout_s=asked.timeout_s, links=asked.links, progress=None if asked.as_json else _tell
    )
    found = measure_each(hosts, asked.backend, options, _tell)
    if asked.as_json:
        print_json([result.as_json() for result in found])
    else:
        show(found)
    if not found or any(result.failures or result.whole is None for result in found):
        raise typer.Exit(DistributedError.exit_code)


# --- for people -----------------------------------------------------------------------------------


def show(results: Sequence[Measurement], console: Console | None = None) -> None:
    """Print tables of the results and of the failures."""
    console = console or console_for(width=_WIDTH)
    for result in results:
        if result.whole is not None:
            _show_whole(console, result.whole)
        if len(result.links) > 1:
            _show_links(console, result)
        for failure in result.failures:
            _show_failure(console, failure)
        for group in result.not_measured:
            console.print(
                f"not measured, because the time was over: {', '.join(group)} (--timeout-s)"
            )
        console.print()
    if any(result.whole or result.links for result in results):
        console.print(_LEGEND)
    if len(fastest := [result.whole for result in results if result.whole]) > 1:
        _show_comparison(console, fastest)


def _show_whole(console: Console, figures: Figures) -> None:
    where = ", ".join(figures.hosts)
    console.print(f"{figures.num_ranks} ranks on {where}, {figures.backend}")
    rows = [
        (
            size_text(timing.num_bytes),
            seconds_text(timing.median_s),
            f"{seconds_text(timing.low_s)} to {seconds_text(timing.high_s)}",
            rate_text(timing.bytes_per_s),
            rate_text(figures.bus_bytes_per_s(timing)),
        )
        for timing in figures.timings
    ]
    console.print(
        table_of(
            ("all-reduce of", "median", "middle half", "bandwidth", "of the bus"), rows, left=()
        )
    )
    small, large = (seconds_text(figures.seconds(size)) for size in (4 << 20, 1 << 30))
    console.print(
        f"a step's exchange takes {small} with 4 MiB (a LoRA adapter), {large} with 1 GiB",
        soft_wrap=True,
    )


def _show_links(console: Console, result: Measurement) -> None:
    console.print("\neach link by itself, one rank on each computer")
    rows = [
        (
            " - ".join(link.hosts),
            *(seconds_text(seconds) for seconds in (link.latency_s, link.seconds(4 << 20))),
            rate_text(link.bus_bytes_per_s()),
        )
        for link in result.links
    ]
    console.print(table_of(("link", "latency", "4 MiB", "of the bus"), rows))
    if slowest := result.slowest_link:
        console.print(f"slowest link: {' - '.join(slowest.hosts)}")
    if result.slow_host:
        console.print(f"every link of {result.slow_host} is slow: look at its cable, or its Wi-Fi")


def _show_failure(console: Console, failure: Failure) -> None:
    console.print(f"failed on {', '.join(failure.hosts)}: {failure.message}")
    for line in failure.log_tail[-_TAIL:]:
        console.print(f"  | {line}")
    if failure.hint:
        console.print(f"  what to do: {failure.hint}")


def _show_comparison(console: Console, groups: Sequence[Figures]) -> None:
    best = min(groups, key=lambda figures: figures.seconds(16 << 20))
    console.print(f"fastest for 16 MiB: {best.backend}")


def size_text(num_bytes: float) -> str:
    """``4 KiB``, ``64 MiB``."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """``13 us``, ``0.51 ms``, ``1.2 s``: with at least two digits."""
    return _in_units(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6}, 0.0995)


def rate_text(bytes_per_s: float) -> str:
    """``5.2 MB/s``, ``1.1 GB/s``, in powers of ten."""
    return _in_units(bytes_per_s, {"GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3}, 0.995)


def _in_units(number: float, units: Mapping[str, float], least: float) -> str:
    """Return the number in the first unit of which there are at least ``least``, or in the last."""
    name = next((name for name, unit in units.items() if number >= unit * least), [*units][-1])
    number /= units[name]
    digits = 2 if number < 9.95 else 1 if number < 99.5 else 0
    return f"{number:.{digits}f} {name}"
