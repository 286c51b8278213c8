"""Training of models that one GPU has no room for: allhands, fully sharded and otherwise, beside
PyTorch's FSDP2.

    python benchmarks/gpu_sharded.py --cases 7b --write python benchmarks/gpu_sharded.py --shape
    tiny --steps 2 --gpus 2     # to try the script, on two cores too

Weights are random, tokens are random, every token is trained, AdamW keeps what it needs in
bfloat16. Each way runs in processes of its own with a time limit: one that fails is a row of the
table. The bar of a case with PyTorch in it is ``--least`` times the tokens a second of compiled
FSDP2 in the same run, at no more memory, by ``--strategy fsdp``; the exit code is 1 where it is
missed. See README.md in this directory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import (
    BenchmarkError,
    conditions,
    peer_list,
    positive,
    pythons,
    run_benchmark,
    say,
    versions,
)
from records import OURS as OURS_NAME
from records import Row, row_of
from sharded_cases import CASES, parameters, row_of_shape, shape_of
from sharded_runs import (
    batch_of,
    failed,
    figures,
    make_model,
    python_of,
    train,
    train_torch,
    words_of,
    write_data,
)

PACKAGES = ("allhands", "mlx", "mlx-cuda-13", "mlx-lm", "numpy")
TORCH_PACKAGES = ("torch", "transformers", "nvidia-nccl-cu13")
OURS: dict[str, tuple[str, ...]] = {
    "fsdp": ("--strategy", "fsdp"),
    "fsdp-checkpoint": ("--strategy", "fsdp", "--grad-checkpoint"),
    "fsdp-keep": ("--strategy", "fsdp", "--reshard", "off"),
    "zero1": ("--strategy", "zero1"),
    "data": ("--strategy", "data"),
    "tp": ("--strategy", "data", "--tp", "2"),
    "pipeline": ("--strategy", "pipeline"),
}
THEIRS: dict[str, dict[str, bool]] = {
    "torch-compiled": {"compiled": True, "checkpoint": False},
    "torch-compiled-checkpoint": {"compiled": True, "checkpoint": True},
    "torch": {"compiled": False, "checkpoint": False},
    "torch-checkpoint": {"compiled": False, "checkpoint": True},
}
TITLES = {
    "fsdp": "allhands, --strategy fsdp",
    "fsdp-checkpoint": "allhands, --strategy fsdp --grad-checkpoint",
    "fsdp-keep": "allhands, --strategy fsdp --reshard off",
    "zero1": "allhands, --strategy zero1",
    "data": "allhands, --strategy data",
    "tp": "allhands, --tp 2",
    "pipeline": "allhands, --strategy pipeline",
    "torch-compiled": "PyTorch FSDP2, blocks compiled",
    "torch-compiled-checkpoint": "PyTorch FSDP2, blocks compiled, checkpointing",
    "torch": "PyTorch FSDP2, eager",
    "torch-checkpoint": "PyTorch FSDP2, eager, checkpointing",
}
WAYS = (*THEIRS, *OURS)
_LEAST_S = 15.0  # no way is done in less


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = "comma-separated, of: "
    parser.add_argument(
        "--cases",
        type=partial(peer_list, tuple(CASES)),
        default=tuple(CASES),
        help=f"{listed}{', '.join(CASES)}",
    )
    parser.add_argument(
        "--ways",
        type=partial(peer_list, WAYS),
        default=(),
        help=f"{listed}{', '.join(WAYS)}; default: the case's own",
    )
    parser.add_argument(
        "--shape", choices=("full", "tiny"), default="full", help="tiny: to try it (%(default)s)"
    )
    parser.add_argument(
        "--gpus",
        type=positive,
        help="default: all that are here; processes, where there is none (2)",
    )
    parser.add_argument(
        "--rows", type=positive, help="of each GPU in a step; default: the case's own"
    )
    parser.add_argument(
        "--micro-batch-rows",
        type=positive,
        help="that allhands computes at once; default: its choice",
    )
    parser.add_argument(
        "--warmup", type=positive, default=3, help="steps that do not count (%(default)s)"
    )
    parser.add_argument("--steps", type=positive, default=10, help="that count (%(default)s)")
    parser.add_argument(
        "--least", type=float, default=1.05, help="times PyTorch's speed, for the bar (%(default)s)"
    )
    parser.add_argument(
        "--python", type=pythons, default={}, help="mlx=PATH,torch=PATH; default: this one"
    )
    parser.add_argument(
        "--timeout", type=float, default=150.0, help="seconds for a way (%(default)s)"
    )
    parser.add_argument(
        "--limit", type=float, default=225.0, help="seconds for a case (%(default)s)"
    )
    parser.add_argument(
        "--models", type=Path, help="where models stay between runs; default: they go with the run"
    )
    parser.add_argument("--scratch", type=Path, help="a directory for models, runs and logs")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    return parser.parse_args(arguments)


# --- what is measured -----------------------------------------------------------------------------


def run_case(options: argparse.Namespace, work: Path, case: str) -> dict[str, Any]:
    """What each way of a case has given: figures, or an ``error``."""
    deadline, found = time.monotonic() + options.limit, dict[str, Any]()
    for way in options.ways or CASES[case].ways:
        say(f"  {TITLES[way]}")
        name = f"{case}-{way}"
        try:
            found[way] = (
                theirs(options, work, case, way, deadline)
                if way in THEIRS
                else ours(options, work, case, way, deadline)
            )
            say(f"    {found[way]['tokens_per_s']:,.0f} tokens/s, {_memory(found[way])}")
        except (BenchmarkError, OSError) as error:
            found[way] = failed(work, name, error)
    shutil.rmtree(work / "models", ignore_errors=True)
    return found


def left_s(deadline: float) -> float:
    """Seconds until the time of a case is over.

    Raises:
        BenchmarkError: there are too few for another way.
    """
    left = deadline - time.monotonic()
    if left < _LEAST_S:
        raise BenchmarkError("left out: the time of --limit is over")
    return left


def ours(
    options: argparse.Namespace, work: Path, case: str, way: str, deadline: float
) -> dict[str, Any]:
    """The figures of a way of allhands.

    Raises:
        BenchmarkError: it failed, or there is no time for it.
    """
    model, data = make_model(options, work, case, left_s(deadline)), write_data(options, work, case)
    words = words_of(options, case, model, data, work / f"{case}-{way}", OURS[way])
    reports = train(
        options, work, f"{case}-{way}", words, "auto", min(options.timeout, left_s(deadline))
    )
    return figures(reports, options.warmup, batch_of(options, case) * row_of_shape(options.shape))


def theirs(
    options: argparse.Namespace, work: Path, case: str, way: str, deadline: float
) -> dict[str, Any]:
    """The figures of a way of PyTorch.

    Raises:
        BenchmarkError: it failed, there is no time for it, it has no such model, or one of another
            size.
    """
    if CASES[case].bits:
        raise BenchmarkError("left out: PyTorch cannot read 4 bits of MLX")
    shape, row, rows = (
        shape_of(case, options.shape),
        row_of_shape(options.shape),
        batch_of(options, case),
    )
    asked = {
        "shape": shape,
        "row": row,
        "rows": rows // options.gpus,
        "warmup": options.warmup,
        "steps": options.steps,
    }
    within = min(options.timeout, left_s(deadline))
    told = train_torch(options, work, f"{case}-{way}", {**asked, **THEIRS[way]}, within)
    if told["parameters"] != parameters(shape):
        raise BenchmarkError(
            f"PyTorch's model has {told['parameters']:,} numbers, and ours {parameters(shape):,}"
        )
    step_s = told["seconds"] / options.steps
    return {"tokens_per_s": rows * row / step_s, "step_s": step_s, **told}


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Every case, each in its time."""
    options.gpus = options.gpus or len(facts["gpus"]) or 2
    runs = dict[str, Any]()
    for case in options.cases:
        say(CASES[case].title)
        runs[case] = run_case(options, work, case)
    kept = ("gpus", "shape", "rows", "micro_batch_rows", "warmup", "steps", "least")
    found = conditions(options, kept, facts, PACKAGES)
    judged = (
        {}
        if options.shape == "tiny"
        else {case: verdicts(options.least, case, runs[case]) for case in runs}
    )
    return {
        **found,
        "versions": {"allhands": found["versions"], "torch": of_torch(options)},
        "results": {CASES[case].title: ways for case, ways in runs.items()},
        "met": [text for each in judged.values() for text in each["met"]],
        "missed": [text for each in judged.values() for text in each["missed"]],
    }


def of_torch(options: argparse.Namespace) -> dict[str, str]:
    """Versions in the Python of PyTorch's ranks, with the path that they have; empty where it does
    not run.
    """
    path = os.environ.get("PYTHONPATH", "")
    try:
        return versions(Path(python_of(options, "torch")), TORCH_PACKAGES, PYTHONPATH=path)
    except (OSError, subprocess.CalledProcessError):
        return {}


def verdicts(least: float, case: str, ways: Mapping[str, Any]) -> dict[str, list[str]]:
    """The bars of a case that are ``met`` and ``missed``, in words; a bar needs both who are
    compared.
    """
    told: dict[str, list[str]] = {"met": [], "missed": []}
    reference, judged = CASES[case].reference, CASES[case].judged
    if not reference or not {reference, judged} <= ways.keys():
        return told
    ours, theirs = ways[judged], ways[reference]
    if failures := [
        f"{case}: {TITLES[way]}: {ways[way]['error']}"
        for way in (judged, reference)
        if "error" in ways[way]
    ]:
        told["missed"] = failures
        return told
    speed = ours["tokens_per_s"] / theirs["tokens_per_s"]
    text = f"{case}: {speed:.3f} times the tokens/s of {TITLES[reference]}, at least {least:g}"
    told["met" if speed >= least else "missed"].append(text)
    held, may = (max(each["peak_bytes"]) / 1e9 for each in (ours, theirs))
    text = f"{case}: {held:.1f} GB, at most the {may:.1f} GB of {TITLES[reference]}"
    told["met" if held <= may else "missed"].append(text)
    return told


# --- what is told ---------------------------------------------------------------------------------


def rows(found: Mapping[str, Any]) -> Iterable[Row]:
    """The figures to keep; ``allhands`` without more is the way that the bar is about."""
    gpus, small = found["settings"]["gpus"], ", tiny" * (found["settings"]["shape"] == "tiny")
    for case, ways in _by_case(found):
        name = f"{CASES[case].title}{small}, {gpus} GPUs"
        for way, each in ways.items():
            if "error" in each:
                continue
            who = OURS_NAME if way == CASES[case].judged else TITLES[way]
            yield row_of(name, who, "tokens/s", [each["tokens_per_s"]], "higher")
            if any(each["peak_bytes"]):
                yield row_of(f"{name}, memory", who, "GB", [max(each["peak_bytes"]) / 1e9], "lower")


def report(found: Mapping[str, Any]) -> str:
    """A table for each case, and which bars are met."""
    settings, lines = found["settings"], list[str]()
    processes = "GPUs" if found["machine"]["gpus"] else "processes of the CPU, in float32"
    for case, ways in _by_case(found):
        apart = _apart(ways)
        shape = shape_of(case, settings["shape"])
        lines += [
            f"{CASES[case].title}: {parameters(shape) / 1e9:.2f} billion numbers, {settings['gpus']} {processes}, "
            f"{settings['rows'] or CASES[case].rows} x {row_of_shape(settings['shape']):,} tokens on each; "
            f"{settings['steps']} steps count, after {settings['warmup']}",
            "",
            "| | tokens/s, all together | of the reference | step | peak of each rank | losses |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        base = ways.get(CASES[case].reference, {}).get("tokens_per_s")
        lines += [
            f"| {TITLES[way]} | {_cells(each, base, settings['warmup'])} |"
            for way, each in ways.items()
        ]
        lines.append("")
        if apart is not None:
            lines += [f"Losses of allhands' ways differ by {apart:.1e} of them at most.", ""]
    lines.append(
        "Losses are those of the first step, of the last that does not count, and of the last."
    )
    lines += [f"MET: {each}" for each in found["met"]]
    lines += [f"MISSED: {each}" for each in found["missed"]]
    return "\n".join(lines)


def _by_case(found: Mapping[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Each case with what its ways have given."""
    cases = {case.title: name for name, case in CASES.items()}
    return ((cases[title], ways) for title, ways in found["results"].items())


def _apart(ways: Mapping[str, Any]) -> float | None:
    """By how much a step's loss differs between ways of allhands, at most; ``None`` where there are
    no two.
    """
    every = [each["losses"] for way, each in ways.items() if way in OURS and "error" not in each]
    return (
        max((max(step) / min(step) - 1 for step in zip(*every, strict=True)), default=None)
        if len(every) > 1
        else None
    )


def _cells(each: Mapping[str, Any], base: float | None, warmup: int) -> str:
    if "error" in each:
        return f"{each['error'][:160]} | | | | "
    losses = each["losses"]
    cells = [
        f"{each['tokens_per_s']:,.0f}",
        f"{each['tokens_per_s'] / base:.3f}" if base else "-",
        f"{1e3 * each['step_s']:.0f} ms",
        _memory(each),
        ", ".join(f"{losses[at]:.4f}" for at in (0, warmup - 1, -1)),
    ]
    return " | ".join(cells)


def _memory(each: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{peak / 1e9:.2f} GB" for peak in each["peak_bytes"])
        if any(each["peak_bytes"])
        else "-"
    )


if __name__ == "__main__":
    sys.exit(run_benchmark("gpu_sharded", parse(), measure, report, rows))
