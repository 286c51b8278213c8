"""Loss and gradient of allhands against those of mlx_lm's unmodified models, for every architecture that mlx_lm has.

    python benchmarks/gradients.py
    python benchmarks/gradients.py --only llama gemma3_text~window --ways lora full --forms graph --dtype bfloat16

mlx_lm computes in processes that never import allhands; allhands through its public API, short rows, rows beyond every
length in the configuration, and short rows again. Prints a table: configuration by way of training, the largest
difference as a share of the gradient's norm. See README.md in this directory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "support")]

import architectures  # noqa: E402
from gradients_rows import save_data  # noqa: E402
from harness import (  # noqa: E402
    clean_environ,
    git_commit,
    machine,
    num_cores,
    positive,
    python_path,
    run_benchmark,
    say,
    versions,
)

WAYS = ("lora", "full", "dora", "4bit", "lora:last", "full:last")
# Of configurations that differ from another one in a few settings only.
FEW = ("lora", "full")
AGAIN = ("lora", "full", "4bit", "lora:last")
FORMS = ("cpu", "graph")
# Shares of the gradient's norm: as a whole, and of one array; and of the loss.
LIMITS = {"float32": (1e-4, 1e-3, 1e-5), "bfloat16": (0.05, 0.25, 0.02)}
PACKAGES = ("allhands", "mlx", "mlx-lm", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "transformers", "numpy")
SEEDS = (1, 2, 3)  # of the weights
ANSWER_S = 400.0


@dataclass(frozen=True)
class Run:
    """One training of ours: what is trained, whether activations are recomputed, and in which form."""

    way: str
    recompute: bool
    form: str

    @property
    def column(self) -> str:
        """Of the table."""
        return self.way + ("+" if self.recompute else "")


@dataclass(frozen=True)
class Verdict:
    """What came of a run.

    Attributes:
        kind: ``right``, ``wrong``, ``refused`` (with a message), ``traceback``, ``died``, ``unjudged`` (there is
            nothing to compare with) or ``beyond mlx_lm`` (which cannot compute it itself; ours says so or computes it).
        whole: largest difference of a batch's gradient, as a share of its norm.
        text: what is to be said of it.
    """

    name: str
    run: Run
    kind: str
    whole: float | None = None
    text: str = ""
    batches: dict[str, Any] = field(default_factory=dict)

    @property
    def from_judge(self) -> tuple[float, float] | None:
        """How far mlx_lm's gradient and ours are from a float32 one on the CPU, at most."""
        told = [one for one in self.batches.values() if isinstance(one, dict) and "ours from judge" in one]
        if not told:
            return None
        theirs, ours = ([one[f"{who} from judge"] for one in told] for who in ("theirs", "ours"))
        return tuple(math.inf if None in each else max(each) for each in (theirs, ours))  # type: ignore[return-value]

    def plain(self) -> dict[str, Any]:
        """For a record."""
        told = {"name": self.name, "way": self.run.column, "form": self.run.form, "kind": self.kind}
        shares = {"difference": self.whole, "theirs_and_ours_from_judge": self.from_judge}
        return told | {key: value for key, value in (shares | {"text": self.text}).items() if value not in (None, "")}

    @property
    def is_good(self) -> bool:
        """Right, or what mlx_lm cannot compute refused in so many words."""
        return self.kind in ("right", "beyond mlx_lm")


class Worker:
    """A process that answers requests, started anew if it has died."""

    def __init__(self, script: str, environ: dict[str, str], log: Path) -> None:
        self._command = [sys.executable, str(HERE / script)]
        self._environ, self._log = environ, log
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.Queue[str] = queue.Queue()

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer; with ``died`` where there is none."""
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=process.stdin, flush=True)
        try:
            reply = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            reply = None
        if reply:
            return json.loads(reply)
        self.close()
        why = f"no answer in {timeout_s:.0f} s" if reply is None else f"exit code {process.returncode}"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return {"died": f"{why}: {lines[-1][:200] if lines else ''}"}

    def _start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environ
            )
        assert self._process.stdout is not None
        self._replies = queue.Queue()
        threading.Thread(target=_pass_on, args=(self._process.stdout, self._replies), daemon=True).start()

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _pass_on(stream: IO[str], replies: queue.Queue[str]) -> None:
    for line in stream:
        replies.put(line)
    replies.put("")


@dataclass(frozen=True)
class Settings:
    """What is compared, and how.

    Attributes:
        ways: those to compare; none: all of them for a module's first configuration, few for its variants.
        judge: whether mlx_lm computes in float32 on the CPU, too, where ours and its own differ in half precision.
        compiled: whether MLX compiles what it can: on a CPU that takes seconds for each kernel.
        spoil: whether a thousandth of one array is added to it, so that the comparison must fail.
        timeout_s: for one configuration.
    """

    work: Path
    dtype: str = "float32"
    ways: tuple[str, ...] = ()
    forms: tuple[str, ...] = FORMS
    again: bool = True
    judge: bool = False
    compiled: bool = False
    spoil: bool = False
    timeout_s: float = ANSWER_S

    def runs(self, name: str) -> list[Run]:
        """Those of a configuration."""
        few = architectures.architecture(name).is_variant
        ways = self.ways or (FEW if few else WAYS)
        again = () if not self.again else ("full",) if few and not self.ways else AGAIN
        runs = [Run(way, False, form) for form in self.forms for way in ways]
        runs += [Run(way, True, form) for form in self.forms for way in ways if way in again]
        return runs

    def environ(self) -> dict[str, str]:
        """Of a worker."""
        added = {"ALLHANDS_TOKEN_CACHE": str(self.work / "tokens"), "PYTHONPATH": python_path()}
        if self.dtype == "float32":
            added["MLX_ENABLE_TF32"] = "0"
        if not self.compiled:
            added["MLX_DISABLE_COMPILE"] = "1"
        return clean_environ(**added)


class Pair:
    """mlx_lm's process and ours."""

    def __init__(self, settings: Settings, number: int) -> None:
        self._settings = settings
        logs = settings.work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / f"ours-{number}.log"
        environ = settings.environ()
        self._theirs = Worker("gradients_theirs.py", environ, logs / f"theirs-{number}.log")
        self._ours = Worker("gradients_ours.py", environ, self._log)

    def compare(self, name: str) -> list[Verdict]:
        """The verdicts on all runs of a configuration; where its gradient jumps, those on the best of a few weights."""
        settled: dict[Run, Verdict] = {}
        runs = self._settings.runs(name)
        for seed in SEEDS if architectures.architecture(name).kinks else SEEDS[:1]:
            settled |= {verdict.run: verdict for verdict in self._compare(name, runs, seed)}
            runs = [run for run, verdict in settled.items() if verdict.kind == "wrong"]
            if not runs:
                break
        return list(settled.values())

    def _compare(self, name: str, runs: list[Run], seed: int) -> list[Verdict]:
        settings, shape = self._settings, architectures.architecture(name)
        directory = settings.work / name.replace(" ", "_")
        directory.mkdir()
        request = {
            "directory": str(directory),
            "config": shape.config,
            "dtype": settings.dtype,
            "seed": seed,
            "long": shape.long,
            "keys": shape.keys,
            "data": str(data_directory(settings.work, shape.long)),
            "ways": list(dict.fromkeys(run.way for run in runs)),
            "judge": settings.judge,
        }
        try:
            theirs = self._theirs.ask(request, settings.timeout_s)
            if "died" in theirs:
                return [Verdict(name, run, "unjudged", text=f"mlx_lm: {theirs['died']}") for run in runs]
            if "made" in theirs:
                # One is enough to see what ours says of it.
                runs, ways = runs[:1], {runs[0].way: {"error": theirs["made"]}}
            else:
                ways = theirs["ways"]
                # A model that is quantised already has no other four bits.
                runs = [run for run in runs if run.way in ways]
            return list(self._verdicts(name, runs, request, ways))
        finally:
            if "GRADIENTS_KEEP" not in os.environ:
                shutil.rmtree(directory)

    def _verdicts(
        self, name: str, runs: list[Run], request: dict[str, Any], theirs: dict[str, Any]
    ) -> Iterator[Verdict]:
        told = [{"way": run.way, "recompute": run.recompute, "form": run.form} for run in runs]
        judged = {way: one["judge"] for way, one in theirs.items() if "error" not in one.get("judge", {"error": ""})}
        losses = {way: {batch: one["loss"] for batch, one in batches.items()} for way, batches in judged.items()}
        request = request | {"judge losses": losses}
        found = self._ours.ask(request | {"runs": told, "spoil": self._settings.spoil}, self._settings.timeout_s)
        if "died" in found and len(runs) > 1:
            # One by one, to find the one that ends the process.
            for run in runs:
                yield from self._verdicts(name, [run], request, theirs)
            return
        for run, one in zip(runs, found.get("runs") or [found], strict=True):
            yield judge(name, run, theirs[run.way], one, self._settings)

    def close(self) -> None:
        """End both."""
        self._theirs.close()
        self._ours.close()


def data_directory(work: Path, long: Sequence[int]) -> Path:
    """Of the rows, the long ones of these lengths."""
    return work / f"data-{'-'.join(map(str, long))}"


def judge(name: str, run: Run, theirs: dict[str, Any], ours: dict[str, Any], settings: Settings) -> Verdict:
    """What to think of a run."""
    if "died" in ours:
        return Verdict(name, run, "died", text=ours["died"])
    if "error" in theirs:
        kind = "traceback" if "traceback" in ours else "beyond mlx_lm"
        said = ours.get("traceback") or ours.get("refused", "computes")
        return Verdict(name, run, kind, text=f"{said}; mlx_lm itself: {theirs['error']}", batches=ours)
    if "traceback" in ours:
        return Verdict(name, run, "traceback", text=ours["traceback"], batches=ours)
    if "refused" in ours:
        return Verdict(name, run, "refused", text=ours["refused"], batches=ours)
    problems = [
        f"{batch}: {text}"
        for batch, one in ours.items()
        for text in complaints(one, theirs[batch.split()[0]], settings)
    ]
    if missing := {"short", "long", "short again"} - ours.keys():
        problems.append(f"no {', '.join(sorted(missing))} rows")
    wholes = [one["whole"] for one in ours.values()]
    whole = math.inf if None in wholes else max(wholes, default=0.0)
    return Verdict(name, run, "wrong" if problems else "right", whole, "; ".join(problems), ours)


def complaints(one: dict[str, Any], theirs: dict[str, Any], settings: Settings) -> Iterator[str]:
    """What is wrong with a batch."""
    limit, of_array, of_loss = LIMITS[settings.dtype]
    if one["left"] or one["added"]:
        yield f"arrays without a gradient: {one['left'][:3]}, with one that mlx_lm has not: {one['added'][:3]}"
    if one["whole"] is None:
        yield "not finite"
        return
    apart = abs(one["loss"] - theirs["loss"])
    if "judge loss" in one:
        apart = min(apart, abs(one["loss"] - one["judge loss"]))
    if not apart <= of_loss * max(1.0, abs(theirs["loss"])):
        yield f"loss {one['loss']:.6g} for {theirs['loss']:.6g}"
    # Where mlx_lm's own rounding is as large, ours must be no worse than twice that.
    rounding = one.get("theirs from judge")
    forgiven = rounding is not None and one["ours from judge"] <= max(limit, 2.0 * rounding)
    if one["whole"] > limit and not forgiven:
        yield f"gradient differs by {one['whole']:.2g}, {one['array']} by {one['worst']:.2g}"
    elif one["worst"] > of_array and rounding is None:
        yield f"{one['array']} differs by {one['worst']:.2g}"


def compare(
    names: Sequence[str], settings: Settings, jobs: int, tell: Callable[[str], None] = lambda text: None
) -> list[Verdict]:
    """The verdicts on all runs of these configurations, ``jobs`` at a time."""
    for long in {architectures.architecture(name).long for name in names}:
        save_data(data_directory(settings.work, long), long)
    pairs: queue.Queue[Pair] = queue.Queue()
    made = [Pair(settings, number) for number in range(jobs)]
    for pair in made:
        pairs.put(pair)

    def one(name: str) -> list[Verdict]:
        pair, started = pairs.get(), time.perf_counter()
        try:
            found = pair.compare(name)
        finally:
            pairs.put(pair)
        bad = [v for v in found if not v.is_good]
        tell(f"{name}: {len(found) - len(bad)} of {len(found)} right, {time.perf_counter() - started:.1f} s")
        for line in grouped(bad):
            tell(f"  {line}")
        return found

    try:
        with ThreadPoolExecutor(jobs) as pool:
            return [verdict for found in pool.map(one, names) for verdict in found]
    finally:
        for pair in made:
            pair.close()


def table(verdicts: Iterable[Verdict], *, judged: bool = False) -> str:
    """Configurations by ways of training; in each place the largest difference over forms and batches.

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
    words += dict.fromkeys(f"{v.kind} {v.run.form}" if len(bad) < len(verdicts) else v.kind for v in bad)
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
    parser = argparse.ArgumentParser(description="Gradients of every architecture against mlx_lm's own.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="modules of mlx_lm, or MODULE~VARIANT")
    parser.add_argument("--sample", action="store_true", help="the twelve most different ones")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[], help="default: all, few for variants")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="default: both")
    parser.add_argument("--no-recompute", action="store_true", help="leave out --grad-checkpoint")
    parser.add_argument("--dtype", choices=tuple(LIMITS), default="float32", help="of the weights (%(default)s)")
    parser.add_argument("--judge", choices=("cpu",), help="let mlx_lm compute in float32 on the CPU as well")
    toggle = argparse.BooleanOptionalAction
    parser.add_argument("--mlx-compile", action=toggle, default=gpu, help="whether MLX compiles (default: on a GPU)")
    parser.add_argument("--spoil", action="store_true", help="change one array by a thousandth: nothing may be right")
    jobs = max(2, min(8, num_cores() // 2)) if gpu else 2
    parser.add_argument("--jobs", type=positive, default=jobs, help="configurations at a time (%(default)s)")
    parser.add_argument("--timeout", type=float, default=ANSWER_S, help="seconds for one configuration (%(default)s)")
    parser.add_argument("--scratch", type=Path, help="a directory for models and logs")
    parser.add_argument("--write", action="store_true", help="keep the figures in benchmarks/results")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Compare what is asked for."""
    names = list(architectures.SAMPLE) if options.sample else architectures.named(options.only)
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
    )
    started = time.perf_counter()
    verdicts = compare(names, settings, options.jobs, say)
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
        "verdicts": verdicts,
    }


def report(found: dict[str, Any]) -> str:
    """The table, and what is to be said beside it."""
    verdicts: list[Verdict] = found["verdicts"]
    bad = [verdict for verdict in verdicts if not verdict.is_good]
    lines = [table(verdicts), "", f"{len(verdicts)} comparisons, {len(bad)} not right, {found['seconds']} s"]
    lines += [f"- {line}" for line in grouped(bad, named=True)]
    if beyond := [verdict for verdict in verdicts if verdict.kind == "beyond mlx_lm"]:
        lines += ["", "What mlx_lm itself cannot compute:", "", *(f"- {line}" for line in grouped(beyond, named=True))]
    if any(verdict.from_judge for verdict in verdicts):
        lines += ["", "From float32 on the CPU (mlx_lm here / allhands here):", "", table(verdicts, judged=True)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print the table; 1 if anything is wrong."""
    options = parse(arguments)
    bad: list[Verdict] = []

    def told(found: dict[str, Any]) -> str:
        verdicts: list[Verdict] = found["verdicts"]
        bad.extend(verdict for verdict in verdicts if not verdict.is_good)
        text = report(found)
        # In the record.
        found["verdicts"] = [verdict.plain() for verdict in verdicts]
        return text

    return run_benchmark("gradients", options, measure, told, lambda found: []) or int(bool(bad))


def grouped(verdicts: Iterable[Verdict], *, named: bool = False) -> list[str]:
    """What is to be said, a line for each configuration and kind: which runs, and the text of the worst."""
    found: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in verdicts:
        # Errors of one kind come from many lines.
        key = verdict.text.partition(":")[0] if verdict.kind != "wrong" else ""
        found.setdefault((verdict.name, verdict.kind, key), []).append(verdict)
    lines: list[str] = []
    for (name, kind, _), members in found.items():
        worst = max(members, key=lambda verdict: verdict.whole or 0.0)
        lines.append(f"{name + ': ' if named else ''}{kind} ({_runs_of(members)}): {worst.text}")
    return lines


def _runs_of(verdicts: Iterable[Verdict]) -> str:
    """Which runs they are of, in the table's words; the form where it is one only."""
    forms: dict[str, list[str]] = {}
    for verdict in verdicts:
        forms.setdefault(verdict.run.column, []).append(verdict.run.form)
    return ", ".join(column if len(seen) > 1 else f"{column} {seen[0]}" for column, seen in forms.items())


if __name__ == "__main__":
    sys.exit(main())
