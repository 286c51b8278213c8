"""Loss and gradient of allhands against those of mlx_lm's unmodified models, for every architecture
that mlx_lm has.

    python benchmarks/gradients.py python benchmarks/gradients.py --only llama gemma3_text~window
    --ways lora full --forms graph --dtype bfloat16

mlx_lm computes in processes that never import allhands; allhands through its public API, short
rows, rows beyond every length in the configuration, and short rows again. Prints a table:
configuration by way of training, the largest difference as a share of the gradient's norm. See
README.md in this directory.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gradients_judge import BEYOND, LIMITS, REFUSED, Verdict, compared_with_judge, grouped
from gradients_workers import ANSWER_S, FORMS, WAYS, Settings, architectures, compare
from harness import (
    git_commit,
    machine,
    num_cores,
    positive,
    python_path,
    run_benchmark,
    say,
    versions,
)
from records import OURS, Row, row_of

PACKAGES = (
    "allhands",
    "mlx",
    "mlx-lm",
    "mlx-cpu",
    "mlx-cuda-12",
    "mlx-cuda-13",
    "transformers",
    "numpy",
)


def table(verdicts: Iterable[Verdict], *, judged: bool = False) -> str:
    """Configurations by ways of training; in each place the largest difference over forms and
    batches.

    With ``judged`` the largest of mlx_lm and of ours from float32 on the CPU.
    """
    found: dict[str, dict[str, list[Verdict]]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.name, {}).setdefault(verdict.run.column, []).append(verdict)
    columns = list(dict.fromkeys(column for one in found.values() for column in one))
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for name, one in found.items():
        cells = [(from_judge if judged else cell)(one.get(column, [])) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(verdicts: Sequence[Verdict]) -> str:
    """The worst of the forms."""
    if not verdicts:
        return ""
    bad = [v for v in verdicts if v.kind not in ("right", "wrong")]
    wholes = [v.whole for v in verdicts if v.whole is not None]
    words = [share(max(wholes))] if wholes else []
    if any(v.kind == "wrong" for v in verdicts):
        words = [f"**{words[0]}** {'/'.join(v.run.form for v in verdicts if v.kind == 'wrong')}"]
    words += dict.fromkeys(
        f"{v.kind} {v.run.form}" if len(bad) < len(verdicts) else v.kind for v in bad
    )
    return ", ".join(words)


def from_judge(verdicts: Sequence[Verdict]) -> str:
    """The worst of the forms, mlx_lm's and ours."""
    told = [verdict.from_judge for verdict in verdicts if verdict.from_judge]
    return " / ".join(share(max(each)) for each in zip(*told, strict=True)) if told else ""


def share(value: float) -> str:
    """In a table."""
    return f"{value:.0e}" if value else "0"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    gpu = bool(machine()["gpus"]) or sys.platform == "darwin"
    parser = argparse.ArgumentParser(
        description="Gradients of every architecture against mlx_lm's own."
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="modules of mlx_lm, or MODULE~VARIANT"
    )
    parser.add_argument("--sample", action="store_true", help="the eight most different ones")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=[], help="default: all, few for variants"
    )
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=list(FORMS), help="default: both"
    )
    parser.add_argument("--no-recompute", action="store_true", help="leave out --grad-checkpoint")
    parser.add_argument(
        "--dtype", choices=tuple(LIMITS), default="float32", help="of the weights (%(default)s)"
    )
    parser.add_argument(
        "--judge", choices=("cpu",), help="let mlx_lm compute in float32 on the CPU as well"
    )
    toggle = argparse.BooleanOptionalAction
    parser.add_argument(
        "--mlx-compile", action=toggle, default=gpu, help="whether MLX compiles (default: on a GPU)"
    )
    parser.add_argument(
        "--check", choices=("on", "off"), default="off", help="of ours, before its first step"
    )
    parser.add_argument(
        "--spoil",
        action="store_true",
        help="change one array by a thousandth: nothing may be right",
    )
    jobs = max(2, min(8, num_cores() // 2)) if gpu else 2
    parser.add_argument(
        "--jobs", type=positive, default=jobs, help="configurations at a time (%(default)s)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=ANSWER_S,
        help="seconds for one configuration (%(default)s)",
    )
    parser.add_argument(
        "--within",
        type=float,
        help="begin no configuration after so many seconds; variants come last",
    )
    parser.add_argument("--scratch", type=Path, help="a directory for models and logs")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    return parser.parse_args(arguments)


def measure(
    names: Sequence[str],
    verdicts: list[Verdict],
    options: argparse.Namespace,
    work: Path,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Compare the configurations with these ``names`` and add to ``verdicts``; returns what is kept
    of it.
    """
    settings = Settings(
        work=work,
        dtype=options.dtype,
        ways=tuple(options.ways),
        forms=tuple(options.forms),
        again=not options.no_recompute,
        judge=options.judge == "cpu",
        compiled=options.mlx_compile,
        spoil=options.spoil,
        timeout_s=options.timeout,
        check=options.check,
    )
    started = time.perf_counter()
    if options.within:
        # What matters most comes first.
        names = sorted(names, key=lambda name: architectures.architecture(name).is_variant)
    verdicts += compare(names, settings, options.jobs, say, options.within)
    python = Path(sys.executable)
    return {
        "benchmark": "gradients",
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": facts,
        "versions": versions(python, PACKAGES, PYTHONPATH=python_path()),
        "settings": {
            "dtype": options.dtype,
            "forms": list(options.forms),
            "mlx_compile": options.mlx_compile,
            "judge": options.judge or "",
            "only": options.only,
        },
        "seconds": round(time.perf_counter() - started),
        "left_out": sorted(set(names) - {verdict.name for verdict in verdicts}),
        "table": table(verdicts).splitlines(),
        "from_judge": table(verdicts, judged=True).splitlines() if options.judge else [],
        "said": grouped([verdict for verdict in verdicts if verdict.kind != "right"], named=True),
    }


def report(verdicts: Sequence[Verdict], found: dict[str, Any]) -> str:
    """The table, and what is to be said beside it."""
    bad = [verdict for verdict in verdicts if not verdict.is_good]
    lines = [
        table(verdicts),
        "",
        f"{len(verdicts)} comparisons, {len(bad)} not right, {found['seconds']} s",
    ]
    lines += [f"- {line}" for line in grouped(bad, named=True)]
    if found["left_out"]:
        lines.append(
            f"- {len(found['left_out'])} left out for want of time: {', '.join(found['left_out'])}"
        )
    for kind, title in (
        (BEYOND, "What mlx_lm itself cannot compute:"),
        (REFUSED, "What allhands refuses:"),
    ):
        if some := [verdict for verdict in verdicts if verdict.kind == kind]:
            lines += ["", title, "", *(f"- {line}" for line in grouped(some, named=True))]
    if any(verdict.from_judge for verdict in verdicts):
        lines += ["", compared_with_judge(verdicts), ""]
        lines += [
            f"- {line}"
            for line in grouped([v for v in verdicts if v.kind == "right" and v.text], named=True)
        ]
        lines += [
            "",
            "From float32 on the CPU (mlx_lm here / allhands here):",
            "",
            table(verdicts, judged=True),
        ]
    return "\n".join(lines)


def rows(verdicts: Sequence[Verdict], _: dict[str, Any]) -> list[Row]:
    """How many comparisons of each way are right, and the largest difference."""
    ways: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.kind not in (BEYOND, REFUSED):
            ways.setdefault(f"{verdict.run.column} {verdict.run.form}", []).append(verdict)
    made: list[Row] = []
    for way, members in ways.items():
        right = sum(verdict.is_good for verdict in members)
        made.append(row_of(f"{way}: right", OURS, f"of {len(members)}", [right], "higher"))
        wholes = [verdict.whole for verdict in members if verdict.whole is not None]
        made += (
            [row_of(f"{way}: difference", OURS, "of the norm", wholes, "lower")] if wholes else []
        )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print the table; 1 if anything is wrong."""
    options = parse(arguments)
    verdicts: list[Verdict] = []
    try:
        names = architectures.SAMPLE if options.sample else architectures.named(options.only)
    except ValueError as error:
        say(f"error: {error}")
        return 2
    measured = partial(measure, names, verdicts)
    code = run_benchmark(
        "gradients", options, measured, partial(report, verdicts), partial(rows, verdicts)
    )
    return code or int(not all(verdict.is_good for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
