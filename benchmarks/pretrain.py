"""A small Llama from scratch on real text: allhands against the loop that everybody writes in
PyTorch.

    python benchmarks/pretrain.py --data STORIES

STORIES is a folder with train.jsonl and valid.jsonl, ``{"text": ...}`` a line. Both get one
tokenizer, one shape, as many tokens, one learning rate and schedule; the curve, the validation loss
at the end and tokens a second are compared. See README.md in this directory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import (
    BenchmarkError,
    clean_environ,
    git_commit,
    make_environment,
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
from records import Row, row_of, with_ratios

HERE = Path(__file__).resolve().parent
PACKAGES = ("allhands", "mlx", "mlx-cpu", "mlx-cuda-13", "mlx-lm", "torch", "transformers", "numpy")
PEERS = ("allhands", "torch", "torch-compiled")
TITLES = {"allhands": "allhands", "torch": "PyTorch", "torch-compiled": "PyTorch, torch.compile"}
ATTEMPTS = (
    (
        "torch",
        "transformers",
        "peft",
        "numpy",
        "--extra-index-url",
        "https://download.pytorch.org/whl/cpu",
    ),
    ("torch", "transformers", "peft", "numpy"),
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Pre-training: allhands against a PyTorch loop.")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with train.jsonl and valid.jsonl"
    )
    parser.add_argument("--shape", default="llama", help="as for allhands pretrain (%(default)s)")
    parser.add_argument(
        "--numbers",
        type=json.loads,
        default={},
        help="of the shape, as JSON; default: 2 M parameters",
    )
    parser.add_argument("--vocabulary", type=positive, default=2048)
    parser.add_argument("--block-size", type=positive, default=256)
    parser.add_argument("--batch-size", type=positive, default=16)
    parser.add_argument("--iters", type=positive, default=300)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument(
        "--ranks", type=positive, default=1, help="processes, or GPUs (%(default)s)"
    )
    parser.add_argument(
        "--validations",
        type=positive,
        default=10,
        help="of the whole split, on the way (%(default)s)",
    )
    parser.add_argument("--peers", type=partial(peer_list, PEERS), default=("allhands", "torch"))
    parser.add_argument(
        "--python",
        type=pythons,
        default={},
        help="mlx=PATH,torch=PATH; default: this one, and one made",
    )
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "allhands" / "benchmarks"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one peer")
    parser.add_argument("--scratch", type=Path, help="a directory for runs and logs")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    options = parser.parse_args(arguments)
    if options.shape == "llama" and not options.numbers:
        options.numbers = {"layers": 4, "dims": 192, "mlp_dims": 512, "heads": 6}
    return options


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer, then every peer."""
    ours = Path(options.python.get("mlx", sys.executable))
    tokenizer = work / "tokenizer"
    words = (
        f"tokenizer train --data {options.data} --vocabulary {options.vocabulary} --out {tokenizer}"
    )
    run_measured(
        [str(ours), "-m", "allhands", *words.split()], work / "log", environ(), options.timeout
    )
    found: dict[str, dict[str, Any]] = {}
    used = {"mlx": ours}
    run = work / "allhands"
    # Also where allhands is not asked for: the peer takes its config.json.
    say(TITLES["allhands"])
    measured = by_allhands(options, ours, work, run)
    tell(measured)
    if "allhands" in options.peers:
        found["allhands"] = measured
    for peer in options.peers:
        if peer == "allhands":
            continue
        say(TITLES[peer])
        used["torch"] = torch_python(options)
        try:
            found[peer] = by_torch(options, peer, used["torch"], work, run)
            tell(found[peer])
        except BenchmarkError as error:
            say(f"  {error}")
            found[peer] = {"error": str(error).splitlines()[-1]}
    ratio = measured["bits_per_byte"] / (measured["valid_loss"] / math.log(2))
    for peer in found.values():
        if "valid_loss" in peer:
            peer["bits_per_byte"] = peer["valid_loss"] / math.log(2) * ratio
            best = min(loss for _, loss in peer["valid_curve"])
            peer["least_bits_per_byte"] = best / math.log(2) * ratio
    kept = (
        "shape",
        "numbers",
        "vocabulary",
        "block_size",
        "batch_size",
        "iters",
        "learning_rate",
        "ranks",
    )
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": facts,
        "versions": {
            name: versions(python, PACKAGES, PYTHONPATH=python_path())
            for name, python in used.items()
        },
        "settings": {**{name: getattr(options, name) for name in kept}, "data": options.data.name},
        "found": found,
    }


def tell(one: dict[str, Any]) -> None:
    """What was measured, at once: somebody may end all of it before the tables."""
    curve = ", ".join(f"{step}: {loss:.3f}" for step, loss in one["valid_curve"])
    say(f"  {statistics.median(one['tokens_per_s']):,.0f} tokens/s; validation {curve}")


def environ(**added: str) -> dict[str, str]:
    """For both: this project's own source."""
    return clean_environ(PYTHONPATH=python_path(), **added)


def torch_python(options: argparse.Namespace) -> Path:
    """A Python with PyTorch: the one that was named, or the one that is made for ``cpu_lora.py``."""
    if "torch" in options.python:
        return Path(options.python["torch"])
    known = options.cache / "peft-env" / "bin" / "python"
    return known if known.exists() else make_environment(options.cache / "torch-env", ATTEMPTS)


def by_allhands(options: argparse.Namespace, python: Path, work: Path, run: Path) -> dict[str, Any]:
    """A run of ``allhands pretrain``."""
    report, validate = intervals(options)
    words = (
        f"pretrain --data {options.data} --tokenizer {work / 'tokenizer'} --shape {options.shape} --adapter-path {run} "
        f"--block-size {options.block_size} --batch-size {options.batch_size} --iters {options.iters} "
        f"-n {options.ranks} --learning-rate {options.learning_rate} --steps-per-report {report} "
        f"--steps-per-eval {validate} --val-batches -1 --save-every {options.iters} --sample-prompts []"
    ).split()
    for name, value in options.numbers.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    run_measured([str(python), "-m", "allhands", *words], work / "log", environ(), options.timeout)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    reports = [event for event in events if event["event"] == "train"]
    valid = [event for event in events if event["event"] == "valid" and event["step"]]
    last = valid[-1]
    return {
        "tokens_per_s": [event["tokens_per_s"] for event in reports[1:]]
        or [reports[0]["tokens_per_s"]],
        "trained_s": next(event["total_time_s"] for event in events if event["event"] == "ended"),
        "curve": [[event["step"], event["loss"]] for event in reports],
        "valid_curve": [[event["step"], event["loss"]] for event in valid],
        "valid_loss": last["loss"],
        "bits_per_byte": last["bits_per_byte"],
        "peak_bytes": max(reports[-1]["peak_memory_bytes"]),
        "parameters": next(
            event["total_params"] for event in events if event["event"] == "started"
        ),
    }


def intervals(options: argparse.Namespace) -> tuple[int, int]:
    """Steps from one report to the next, and from one validation to the next."""
    return max(1, options.iters // 30), max(1, options.iters // options.validations)


def by_torch(
    options: argparse.Namespace, peer: str, python: Path, work: Path, run: Path
) -> dict[str, Any]:
    """A run of ``pretrain_torch.py``."""
    out = work / f"{peer}.json"
    report, validate = intervals(options)
    words = (
        f"--model {run / 'model'} --data {options.data} --out {out} --scratch {work} --iters {options.iters} "
        f"--batch-size {options.batch_size} --block-size {options.block_size} --report {report} "
        f"--validate {validate} --seed 0 --threads {max(1, num_cores() // options.ranks)} "
        f"--learning-rate {options.learning_rate}"
    ).split()
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    command = [
        str(python),
        *(several if options.ranks > 1 else []),
        str(HERE / "pretrain_torch.py"),
        *words,
    ]
    if peer == "torch-compiled":
        command.append("--compile")
    run_measured(command, work / f"{peer}.log", environ(), options.timeout)
    found = json.loads(out.read_text())
    # The first twentieth warms up, and compiles.
    steps = found.pop("step_s")[max(1, options.iters // 20) :]
    tokens = options.batch_size * options.block_size
    return {**found, "tokens_per_s": [tokens / seconds for seconds in steps]}


def rows(found: dict[str, Any]) -> Iterable[Row]:
    """The figures to keep."""
    made: list[Row] = []
    for peer, one in found["found"].items():
        if "error" not in one:
            made.append(
                row_of("pre-training", TITLES[peer], "tokens/s", one["tokens_per_s"], "higher")
            )
            made.append(
                row_of("all of the training", TITLES[peer], "s", [one["trained_s"]], "lower")
            )
            made.append(
                row_of(
                    "loss at the end",
                    TITLES[peer],
                    "bits per byte",
                    [one["bits_per_byte"]],
                    "lower",
                )
            )
            made.append(
                row_of(
                    "lowest loss",
                    TITLES[peer],
                    "bits per byte",
                    [one["least_bits_per_byte"]],
                    "lower",
                )
            )
            made.append(row_of("memory", TITLES[peer], "bytes", [one["peak_bytes"]], "lower"))
    return with_ratios(made)


def report(found: dict[str, Any]) -> str:
    """The tables."""
    settings = found["settings"]
    tokens = settings["iters"] * settings["batch_size"] * settings["block_size"]
    batch = f"{settings['batch_size']} x {settings['block_size']} tokens"
    lines = [
        f"{settings['shape']} {json.dumps(settings['numbers'])}, {settings['iters']} batches of {batch} "
        f"({tokens / 1e6:.1f} M) of {settings['data']}, {settings['ranks']} process(es)",
        "",
        "| | tokens/s | all of it | validation loss at the end | bits per byte | at the lowest "
        "| peak memory of a process |",
        "|---|---|---|---|---|---|---|",
    ]
    for peer, one in found["found"].items():
        if "error" in one:
            lines.append(f"| {TITLES[peer]} | {one['error']} | | | | | |")
            continue
        speed = one["tokens_per_s"]
        lines.append(
            f"| {TITLES[peer]} | {statistics.median(speed):,.0f} ({min(speed):,.0f} to {max(speed):,.0f}) "
            f"| {one['trained_s']:.0f} s | {one['valid_loss']:.3f} | {one['bits_per_byte']:.3f} "
            f"| {one['least_bits_per_byte']:.3f} | {one['peak_bytes'] / 2**20:,.0f} MiB |"
        )
    for title, key in (("training", "curve"), ("validation", "valid_curve")):
        lines += ["", f"{title} loss by batch:"]
        for peer, one in found["found"].items():
            points = one.get(key, [])
            shown = points[:: max(1, len(points) // 10)]
            if shown:
                lines.append(
                    f"  {TITLES[peer]}: " + ", ".join(f"{step}: {loss:.2f}" for step, loss in shown)
                )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_benchmark("pretrain", parse(), measure, report, rows))
