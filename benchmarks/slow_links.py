"""Two computers with a slow link between them: what is sent in a step, how fast they train, and
what it costs in loss.

    python benchmarks/slow_links.py --data STORIES

Two network namespaces on one bridge, a core and a rank in each, and a cable of limited speed
between them. STORIES is a folder with train.jsonl and valid.jsonl, ``{"text": ...}`` a line, for
the pre-training. Needs root, sshd, ip, tc; or, with ``--gpus``, NVIDIA GPUs. See README.md in this
directory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any, Protocol

from harness import (
    ROOT,
    BenchmarkError,
    clean_environ,
    conditions,
    peer_list,
    positive,
    python_path,
    run_benchmark,
    run_measured,
    say,
)
from records import Row, row_of

if TYPE_CHECKING:
    from namespaces import Cluster

PACKAGES = ("allhands", "mlx", "mlx-cpu", "mlx-lm", "scipy-openblas32")
# What is compared, and what switches it on.
ROWS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "bf16": ("--compress", "bf16"),
    "int8": ("--compress", "int8"),
    "int4": ("--compress", "int4"),
    "every 20": ("--sync-every", "20"),
    "every 50": ("--sync-every", "50"),
    "every 50 + int4": ("--sync-every", "50", "--compress", "int4"),
    "int4 + delay 1": ("--compress", "int4", "--sync-delay", "1"),
    "every 50 + momentum": ("--sync-every", "50", "--outer-lr", "0.7", "--outer-momentum", "0.9"),
    # Each of two ranks updates by half of the batch, whose gradient is noisier: Adam's steps are
    # shorter for it.
    "every 3 + int4 + outer 1.4": ("--sync-every", "3", "--compress", "int4", "--outer-lr", "1.4"),
    "every 5 + int4 + outer 1.4": ("--sync-every", "5", "--compress", "int4", "--outer-lr", "1.4"),
    "every 10 + int4 + outer 1.4": (
        "--sync-every",
        "10",
        "--compress",
        "int4",
        "--outer-lr",
        "1.4",
    ),
    "every 20 + int4 + outer 1.4": (
        "--sync-every",
        "20",
        "--compress",
        "int4",
        "--outer-lr",
        "1.4",
    ),
    "every 50 + int4 + outer 1.4": (
        "--sync-every",
        "50",
        "--compress",
        "int4",
        "--outer-lr",
        "1.4",
    ),
    "pipeline": ("--strategy", "pipeline"),
    "overlapped": (
        "--sync-every",
        "50",
        "--sync-fragments",
        "5",
        "--sync-delay",
        "10",
        "--compress",
        "int4",
    ),
    "overlapped + outer 1.4": (
        *(
            "--sync-every",
            "50",
            "--sync-fragments",
            "5",
            "--sync-delay",
            "10",
            "--compress",
            "int4",
        ),
        *("--outer-lr", "1.4"),
    ),
}
WORKS = {"pretrain": "pre-training, llama-15m, 4,096 tokens", "lora": "LoRA on the demo"}
WARM_UP = 2  # steps that do not count
OF_GROUP = "MLX_RANK", "MLX_WORLD_SIZE", "MLX_HOSTFILE", "NCCL_HOST_IP", "NCCL_PORT"


@dataclass(frozen=True)
class Link:
    """A cable: its rate as ``tc`` has it, what it lets through at once, and how long a frame is on
    the way.

    With ``burst`` of 64 KB at 100 Mbit/s, ``tc`` cuts what Linux sends in pieces of 64 KB into
    single frames, each by a timer of the core that computes: 10 % of a core, which a real cable's
    adapter does not take.
    """

    rate: str = ""
    burst: str = "64kb"
    delay_s: float = 0.0


LINKS = {
    "none": Link(),
    "1gbit": Link("1gbit", "1mb"),
    "100mbit": Link("100mbit", "256kb"),
    "20mbit": Link("20mbit", "64kb", 0.020),
}
NCCL = "nccl"  # two GPUs of this computer
NAMES = {
    "none": "no limit",
    "1gbit": "1 Gbit/s",
    "100mbit": "100 Mbit/s",
    "20mbit": "20 Mbit/s, 20 ms",
    NCCL: "two GPUs over NCCL",
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Training over slow links: speed, bytes and loss.")
    parser.add_argument(
        "--data", type=Path, help="folder with train.jsonl and valid.jsonl, for the pre-training"
    )
    parser.add_argument("--works", type=partial(peer_list, tuple(WORKS)), default=tuple(WORKS))
    parser.add_argument("--links", type=partial(peer_list, tuple(LINKS)), default=tuple(LINKS))
    parser.add_argument("--rows", type=partial(peer_list, tuple(ROWS)), default=tuple(ROWS))
    parser.add_argument(
        "--steps",
        type=int,
        default=12,
        help="of a run over a link that are counted, or a round of steps; 0 for no such runs (%(default)s)",
    )
    parser.add_argument(
        "--repeat", type=positive, default=1, help="runs over each link, in turn (%(default)s)"
    )
    parser.add_argument(
        "--iters", type=int, default=2000, help="of a run for the loss; 0 for none (%(default)s)"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=0,
        help="number of GPUs: two over NCCL in place of cables, all for the losses",
    )
    parser.add_argument(
        "--at-once",
        type=positive,
        default=1,
        help="runs for the loss on a pair of GPUs (%(default)s)",
    )
    parser.add_argument("--batch-size", type=positive, default=16)
    parser.add_argument("--block-size", type=positive, default=256)
    parser.add_argument(
        "--learning-rate", type=float, default=1e-3, help="of the pre-training (%(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds that a run may take")
    parser.add_argument("--scratch", type=Path, help="a directory for runs and logs")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    options = parser.parse_args(arguments)
    if options.gpus:
        options.links = (NCCL,) if options.gpus > 1 else ()
    if not options.steps:
        options.links = ()
    if "pretrain" in options.works and options.data is None:
        parser.error("--data is needed for the pre-training; or leave it out: --works lora")
    return options


# --- two computers --------------------------------------------------------------------------------


class Computers(Protocol):
    """Where the two ranks of a run are."""

    def start(
        self, place: int, words: Sequence[str], hosts: Path
    ) -> tuple[list[str], dict[str, str]]:
        """Command and environment of a rank; ``hosts`` is a file to write for the ring."""
        ...

    def left(self) -> int:
        """Bytes that have left the second computer by its cable; 0 where there is none."""
        ...


@dataclass(frozen=True)
class Namespaces:
    """A network namespace and a core for each rank."""

    cluster: Cluster

    def start(
        self, place: int, words: Sequence[str], hosts: Path
    ) -> tuple[list[str], dict[str, str]]:
        nodes = list(self.cluster.nodes.values())
        hosts.write_text(
            json.dumps([[f"{node.address}:{32100 + number}"] for number, node in enumerate(nodes)])
        )
        pinned = ["taskset", "-c", str(place % (os.cpu_count() or 1)), *words]
        variables = {"MLX_HOSTFILE": str(hosts), "OPENBLAS_NUM_THREADS": "1"}
        return self.cluster.command(nodes[place].name, pinned), variables

    def left(self) -> int:
        return _left(list(self.cluster.nodes.values())[1].port)


@dataclass(frozen=True)
class Gpus:
    """Two GPUs over NCCL; or both ranks on one GPU, over a ring, where there is no second one."""

    port: int
    devices: tuple[int, int] = (0, 1)

    def start(
        self, place: int, words: Sequence[str], hosts: Path
    ) -> tuple[list[str], dict[str, str]]:
        # MLX writes a compiled kernel where another process may already read it.
        own = {
            "CUDA_VISIBLE_DEVICES": str(self.devices[place]),
            "MLX_PTX_CACHE_DIR": str(hosts.with_suffix(f".{place}")),
        }
        if len(set(self.devices)) > 1:
            variables = {
                "NCCL_HOST_IP": "127.0.0.1",
                "NCCL_PORT": str(self.port),
                "MLX_WORLD_SIZE": "2",
            }
            return list(words), {**variables, **own}
        hosts.write_text(json.dumps([[f"127.0.0.1:{self.port + number}"] for number in range(2)]))
        return list(words), {"MLX_HOSTFILE": str(hosts), **own}

    def left(self) -> int:
        return 0


@contextmanager
def computers(work: Path, link: str) -> Iterator[Computers]:
    """Two of the tests' namespaces, with this cable between them; or two GPUs."""
    if link == NCCL:
        yield Gpus(32300)
        return
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import pytest
    from namespaces import namespaces

    cable, place = LINKS[link], work / f"cluster-{time.monotonic_ns()}"
    place.mkdir()
    try:
        with namespaces(2, place) as cluster:
            if cable.delay_s:
                cluster.delay("node1", cable.delay_s)
            if cable.rate:
                cluster.slow("node1", cable.rate, burst=cable.burst)
            yield Namespaces(cluster)
    except pytest.skip.Exception as error:
        raise BenchmarkError(str(error)) from None


def train(
    options: argparse.Namespace,
    where: Computers,
    words: Sequence[str] | Sequence[Sequence[str]],
    work: Path,
    name: str,
) -> int:
    """One run, a rank on each computer; bytes that have left the second one by its cable.

    ``words`` are the command of both, or one for each rank that there is.

    Raises:
        BenchmarkError: a rank failed or takes too long.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    before, deadline = where.left(), time.monotonic() + options.timeout
    try:
        commands: Any = [words, words] if isinstance(words[0], str) else words
        for place, own in enumerate(commands):
            command, variables = where.start(place, own, work / f"{name}-hosts.json")
            log = (work / f"{name}-{place}.log").open("wb")
            how: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "stdout": log,
                "stderr": log,
                "start_new_session": True,
            }
            environ = clean_environ(PYTHONPATH=python_path(), MLX_RANK=str(place), **variables)
            if len(commands) == 1:
                for variable in OF_GROUP:
                    environ.pop(variable, None)
            ranks.append(subprocess.Popen(command, env=environ, **how))
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        tail = "\n".join((work / f"{name}-0.log").read_text(errors="replace").splitlines()[-15:])
        raise BenchmarkError(f"{name}: the ranks ended with {codes}, or took too long:\n{tail}")
    return where.left() - before


def _left(port: str) -> int:
    return int(Path(f"/sys/class/net/{port}/statistics/rx_bytes").read_text())


# --- what is trained ------------------------------------------------------------------------------


def words_of(
    options: argparse.Namespace, work: Path, kind: str, row: str, directory: Path, iters: int
) -> list[str]:
    """A run of so many batches."""
    if kind == "pretrain":
        text = (
            f"pretrain --data {options.data} --tokenizer {work / 'tokenizer'} --shape llama-15m "
            f"--block-size {options.block_size} --learning-rate {options.learning_rate} --sample-prompts []"
        )
    else:
        text = "train --model demo --data demo --train --mask-prompt --num-layers 8 --learning-rate 1e-4"
    text += (
        f" --batch-size {options.batch_size} --iters {iters} --seed 1 --keep-last 0 "
        f"--gradient-check off --no-keep-best --adapter-path {directory}"
    )
    # Steps between exchanges need float32 weights, which are not what a GPU takes by itself.
    text += (
        " --dtype float32"
        if options.gpus and kind == "pretrain"
        else ""
        if options.gpus
        else " --cores-per-rank 1"
    )
    return [sys.executable, "-m", "allhands", *text.split(), *ROWS[row]]


def events_of(directory: Path, kind: str) -> list[dict[str, Any]]:
    """What a run has reported."""
    events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == kind]


def round_of(row: str) -> int:
    """Steps from one exchange to the next."""
    words = ROWS[row]
    return int(words[words.index("--sync-every") + 1]) if "--sync-every" in words else 1


def over_link(
    options: argparse.Namespace, where: Computers, work: Path, kind: str, row: str
) -> dict[str, float]:
    """Tokens a second, bytes that rank 0 sends in a step, and bytes a step on the cable, all that
    is on it included.
    """
    name = f"{kind}-{_slug(row)}-{time.monotonic_ns()}"
    # Whole rounds, after the first, without the end, where all of it is exchanged at once.
    every = round_of(row)
    before, counted, after = (every, every, 1) if every > 1 else (0, options.steps, 0)
    steps = WARM_UP + before + counted + after
    words = words_of(options, work, kind, row, work / name, steps)
    left = train(
        options, where, [*words, "--steps-per-report", "1", "--val-batches", "0"], work, name
    )
    reports = events_of(work / name, "train")[WARM_UP + before : WARM_UP + before + counted]
    seconds = sum(each["step_time_s"] for each in reports)
    tokens = sum(each["tokens_per_s"] * each["step_time_s"] for each in reports)
    waited = sum(each["comm_s"] for each in reports) / seconds
    found = {"tokens_per_s": tokens / seconds, "waited": waited}
    found["sent_bytes"] = sum(each["sent_bytes"] for each in reports) / len(reports)
    say(f"    {row}: {found['tokens_per_s']:,.0f} tokens/s, {waited:.0%} of it waiting")
    return {**found, "cable_bytes": left / steps}


def loss(
    options: argparse.Namespace, where: Computers, work: Path, kind: str, row: str
) -> dict[str, Any]:
    """Validation losses on the way and at the end, at equal tokens."""
    name = f"{kind}-{_slug(row)}-loss"
    every, more = max(1, options.iters // 10), ["--val-batches", "-1" if kind == "lora" else "20"]
    words = words_of(options, work, kind, row, work / name, options.iters)
    train(
        options,
        where,
        [*words, "--steps-per-eval", str(every), "--steps-per-report", "10", *more],
        work,
        name,
    )
    curve = [
        (each["step"], each["loss"], each["elapsed_s"]) for each in events_of(work / name, "valid")
    ]
    say(f"    {row}: validation loss {curve[-1][1]:.4f} after {options.iters} steps")
    return {"curve": curve, "last": curve[-1][1]}


# --- what is told ---------------------------------------------------------------------------------


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Every row over every link, then each without a limit to its end."""
    if "pretrain" in options.works:
        words = (
            f"tokenizer train --data {options.data} --vocabulary 4096 --out {work / 'tokenizer'}"
        )
        environ = clean_environ(PYTHONPATH=python_path())
        run_measured(
            [sys.executable, "-m", "allhands", *words.split()],
            work / "log",
            environ,
            options.timeout,
        )
    speeds: dict[str, Any] = {
        kind: {link: {row: [] for row in options.rows} for link in options.links}
        for kind in options.works
    }
    for link in options.links:
        with computers(work, link) as where:
            for kind in options.works:
                say(f"{WORKS[kind]}, {NAMES[link]}")
                for _ in range(
                    options.repeat
                ):  # in turns, so that what else the machine does befalls all alike
                    for row in options.rows:
                        speeds[kind][link][row].append(over_link(options, where, work, kind, row))
    losses: dict[str, Any] = {}
    for kind in options.works if options.iters else ():
        say(f"{WORKS[kind]}, the loss")
        if options.gpus:  # rows at the same time, each on a pair of GPUs
            pairs = [
                (first, min(first + 1, options.gpus - 1)) for first in range(0, options.gpus, 2)
            ]
            pairs *= options.at_once
            free = Queue[Gpus]()
            for number, pair in enumerate(pairs):
                free.put(Gpus(32400 + 2 * number, pair))

            def on_a_pair(kind: str, row: str, free: Queue[Gpus] = free) -> dict[str, Any]:
                where = free.get()
                try:
                    return loss(options, where, work, kind, row)
                finally:
                    free.put(where)

            with ThreadPoolExecutor(len(pairs)) as at_once:
                runs = {row: at_once.submit(on_a_pair, kind, row) for row in options.rows}
                losses[kind] = {row: run.result() for row, run in runs.items()}
            continue
        with computers(work, "none") as where:
            losses[kind] = {row: loss(options, where, work, kind, row) for row in options.rows}
    kept = ("steps", "repeat", "iters", "batch_size", "block_size", "learning_rate")
    return {
        **conditions(options, kept, facts, PACKAGES),
        "speeds": speeds,
        "losses": losses,
    }


def rows(found: dict[str, Any]) -> Iterable[Row]:
    """The figures to keep."""
    for kind, links in found["speeds"].items():
        for link, by_row in links.items():
            for row, runs in by_row.items():
                name = f"{WORKS[kind]}, {NAMES[link]}"
                yield row_of(
                    name,
                    f"allhands, {row}",
                    "tokens/s",
                    [run["tokens_per_s"] for run in runs],
                    "higher",
                )
        for row, runs in next(iter(links.values()), {}).items():
            sent = [run["sent_bytes"] for run in runs]
            yield row_of(
                f"{WORKS[kind]}, sent in a step", f"allhands, {row}", "bytes", sent, "lower"
            )
    for kind, by_row in found["losses"].items():
        for row, run in by_row.items():
            yield row_of(
                f"{WORKS[kind]}, validation loss",
                f"allhands, {row}",
                "nats",
                [run["last"]],
                "lower",
            )


def report(found: dict[str, Any]) -> str:
    """A table for each work: speeds against what is not packed and has no limit, bytes, loss."""
    settings, lines = found["settings"], list[str]()
    for kind, links in found["speeds"].items():
        first = next(iter(links.values()), {})
        base = _middle(first[next(iter(first))], "tokens_per_s") if first else 0.0
        lines += [f"{WORKS[kind]}, batches of {settings['batch_size']}", ""]
        if first:
            lines[-1:] = [f"{base:,.0f} tokens/s are 100 %", ""]
        heads = [
            "",
            *(NAMES[link] for link in links),
            *(["sent in a step", "on the cable"] if first else []),
        ]
        heads.append("validation loss")
        lines += [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
        plain = found["losses"].get(kind, {}).get("plain", {}).get("last")
        for row in first or found["losses"].get(kind, {}):
            cells = [f"{_middle(links[link][row], 'tokens_per_s') / base:.0%}" for link in links]
            if first:
                cells += [
                    f"{_middle(first[row], key) / 1e6:.3g} MB"
                    for key in ("sent_bytes", "cable_bytes")
                ]
            last = found["losses"].get(kind, {}).get(row, {}).get("last")
            apart = (
                ""
                if plain is None or row == "plain" or last is None
                else f" ({last / plain - 1:+.2%})"
            )
            cells.append("-" if last is None else f"{last:.4f}{apart}")
            lines.append(f"| {row} | {' | '.join(cells)} |")
        lines.append("")
    if found["losses"]:
        lines.append(
            f"Validation losses after {settings['iters']} steps without a limit, at equal tokens."
        )
    return "\n".join(lines)


def _slug(row: str) -> str:
    return "-".join("".join(letter if letter.isalnum() else " " for letter in row).split())


def _middle(runs: Sequence[dict[str, float]], key: str) -> float:
    values = sorted(run[key] for run in runs)
    return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2


if __name__ == "__main__":
    sys.exit(run_benchmark("slow_links", parse(), measure, report, rows))
