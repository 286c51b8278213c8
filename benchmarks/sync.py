"""Time until every host has a model: from host to host, against one-to-all rsync and scp.

    python benchmarks/sync.py

Four network namespaces, each with an sshd, files of its own and a cable of limited speed; the first
one has the model and sends it. Needs root, sshd, ip, tc and rsync. See README.md in this directory.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import (
    ROOT,
    BenchmarkError,
    clean_environ,
    git_commit,
    peer_list,
    positive,
    run_benchmark,
    say,
    versions,
)
from records import OURS, Row, row_of

if TYPE_CHECKING:
    from namespaces import Cluster

OUR_METHODS = ("tree", "chain", "star")
METHODS = (*OUR_METHODS, "rsync", "scp")
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Site:
    """The computers: the first one sends, the others receive.

    Attributes:
        shown: where every computer sees its own files.
        hostfile: of those that receive.
    """

    cluster: Cluster
    shown: Path
    hostfile: Path

    @property
    def source(self) -> str:
        return self.cluster.names[0]

    @property
    def receivers(self) -> list[str]:
        return self.cluster.names[1:]

    def there(self, name: str) -> Path:
        """Where this process sees what that computer has at ``shown``."""
        return self.cluster.directory / f"files-{name}-0"

    def sent(self) -> int:
        """Bytes that have left the first computer by its cable, everything included."""
        port = self.cluster.nodes[self.source].port
        return int(Path(f"/sys/class/net/{port}/statistics/rx_bytes").read_text())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time until every host has the files, by several ways to send them."
    )
    parser.add_argument(
        "--megabytes", type=positive, default=128, help="size of the model (%(default)s)"
    )
    parser.add_argument(
        "--mbit", type=positive, default=200, help="speed of each cable, Mbit/s (%(default)s)"
    )
    parser.add_argument(
        "--hosts", type=positive, default=3, help="hosts that receive (%(default)s)"
    )
    parser.add_argument("--repeat", type=positive, default=3, help="of each way (%(default)s)")
    parser.add_argument(
        "--methods", type=partial(peer_list, METHODS), default=METHODS, help="comma-separated (all)"
    )
    parser.add_argument(
        "--scratch", type=Path, help="a directory with room for five times the model"
    )
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_benchmark("sync", parse(arguments), measure, report, rows)


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    if missing := [name for name in ("rsync", "scp") if shutil.which(name) is None]:
        raise BenchmarkError(f"{missing[0]} is not installed")
    with computers(options, work) as site:
        size = make_model(site.there(site.source) / "model", options.megabytes * 1_000_000)
        # In turns, so that what else the machine does befalls all alike.
        rounds = [
            {name: one_way(site, name) for name in options.methods} for _ in range(options.repeat)
        ]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": facts,
        "versions": versions(Path(sys.executable), ("allhands",)) | _program_versions(),
        "settings": {"bytes": size, "mbit": options.mbit, "hosts": options.hosts},
        "methods": {name: [turn[name] for turn in rounds] for name in options.methods},
    }


@contextmanager
def computers(options: argparse.Namespace, work: Path) -> Iterator[Site]:
    """The namespaces of the tests, with slow cables."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import pytest
    from namespaces import namespaces

    try:
        with namespaces(options.hosts + 1, work, [work / "own"]) as cluster:
            for name in cluster.names:
                cluster.slow(name, f"{options.mbit}mbit")
            hostfile = cluster.hostfile(work / "hosts.json", names=cluster.names[1:])
            yield Site(cluster, work / "own", hostfile)
    except pytest.skip.Exception as error:
        raise BenchmarkError(str(error)) from None


def make_model(directory: Path, size: int) -> int:
    """Files like a model's, of random bytes, which no compression helps; returns their size."""
    directory.mkdir()
    parts = {"model-1.safetensors": size * 6 // 10, "model-2.safetensors": size * 4 // 10}
    parts |= {"tokenizer.json": 2_000_000, "config.json": 1000, "README.md": 5000}
    for name, count in parts.items():
        (directory / name).write_bytes(os.urandom(count))
    old = time.time() - 3600
    for name in parts:
        os.utime(directory / name, (old, old))
    return sum(parts.values())


def one_way(site: Site, method: str) -> dict[str, Any]:
    """Send to hosts that have nothing, then once more to hosts that have everything."""
    say(method)
    for name in site.receivers:
        shutil.rmtree(site.there(name) / "model", ignore_errors=True)
    before = site.sent()
    first = timed(site, method)
    sent = site.sent() - before
    check(site)
    return {"first_s": first, "again_s": timed(site, method), "sent_bytes": sent}


def timed(site: Site, method: str) -> float:
    """Seconds until the last host has everything."""
    commands = (
        [ours(site, method)]
        if method in OUR_METHODS
        else [peer(site, method, name) for name in site.receivers]
    )
    log = site.cluster.directory / "log"
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as output:
        environ = clean_environ(
            ALLHANDS_SSH=site.cluster.ssh_command, ALLHANDS_CACHE=str(site.shown / "cache")
        )
        start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
        children = [
            start(
                site.cluster.command(site.source, argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
            )
            for argv in commands
        ]
        try:
            codes = [
                child.wait(max(1.0, began + _TIMEOUT_S - time.perf_counter())) for child in children
            ]
        except BaseException:
            for child in children:
                child.kill()
                child.wait()
            raise
    if any(codes):
        raise BenchmarkError(f"{method} ended with code {max(codes)}:\n{log.read_text()[-1500:]}")
    return time.perf_counter() - began


def ours(site: Site, method: str) -> list[str]:
    """As a person would type it on the first computer."""
    sync = [
        "cluster",
        "sync",
        "--hostfile",
        str(site.hostfile),
        "--model",
        str(site.shown / "model"),
    ]
    return [sys.executable, "-m", "allhands", *sync, f"--{method}"]


def peer(site: Site, method: str, name: str) -> list[str]:
    """One of the transfers that a person would start, one for each host, all at once."""
    words = shlex.split(site.cluster.ssh_command)
    source, target = f"{site.shown}/model", f"{name}:{site.shown}/"
    if method == "rsync":
        return ["rsync", "-a", "-e", site.cluster.ssh_command, source, target]
    # The older protocol: these servers have no subsystem for the newer one.
    return ["scp", "-O", "-q", "-r", "-p", *words[1:], source, target]


def check(site: Site) -> None:
    """What has arrived is what was sent."""
    for path in (site.there(site.source) / "model").iterdir():
        for name in site.receivers:
            if (site.there(name) / "model" / path.name).read_bytes() != path.read_bytes():
                raise BenchmarkError(f"{path.name} on {name} is not what was sent")


def _program_versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, argv in {"rsync": ["rsync", "--version"], "ssh": ["ssh", "-V"]}.items():
        if shutil.which(name):
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            found[name] = (done.stdout or done.stderr).splitlines()[0].strip()
    return found


def rows(record: dict[str, Any]) -> list[Row]:
    """The figures that are kept: ``tree`` is what allhands does unless it is told otherwise."""
    found: list[Row] = []
    for method, rounds in record["methods"].items():
        who = {"tree": OURS, "rsync": "rsync", "scp": "scp"}.get(method, f"{OURS}, {method}")
        for key, name in (
            ("first_s", "until every host has the model"),
            ("again_s", "once more, nothing to send"),
        ):
            found.append(row_of(name, who, "s", [turn[key] for turn in rounds], "lower"))
    return found


def report(record: dict[str, Any]) -> str:
    """The figures as Markdown, with what one must know to read them."""
    settings = record["settings"]
    repeat = len(next(iter(record["methods"].values())))
    one = settings["bytes"] * 8 / (settings["mbit"] * 1e6)
    lines = [
        f"{settings['bytes'] / 1e6:.0f} MB from one host to {settings['hosts']} others, each cable {settings['mbit']} "
        f"Mbit/s in both directions: one transfer takes {one:.1f} s at best. Median of {repeat}; all hosts share the "
        "cores of one computer",
        "",
        "| | until all have it (longest) | transfers' worth | sent by the first host | nothing to send |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, rounds in record["methods"].items():
        first, again = ([turn[key] for turn in rounds] for key in ("first_s", "again_s"))
        middle = statistics.median(first)
        sent = statistics.median(turn["sent_bytes"] for turn in rounds)
        cells = (
            name,
            f"{middle:.1f} s ({max(first):.1f} s)",
            f"{middle / one:.2f}",
            f"{sent / 1e6:.0f} MB",
            f"{statistics.median(again):.1f} s",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
