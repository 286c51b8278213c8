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
import tempfile
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

WAYS = ("lora", "full", "dora", "4bit", "lora:last", "full:last")
# Of configurations that differ from another one in a few settings only.
FEW = ("lora", "full")
AGAIN = ("lora", "full", "4bit", "lora:last")
FORMS = ("cpu", "graph")
# Shares of the gradient's norm: as a whole, and of one array; and of the loss.
LIMITS = {"float32": (1e-4, 1e-3, 1e-5), "bfloat16": (0.05, 0.25, 0.02)}
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
        kind: ``right``, ``wrong``, ``refused`` (with a message), ``traceback``, ``died``, ``unjudged`` (there is nothing
            to compare with) or ``beyond mlx_lm`` (which cannot compute it itself; ours says so or computes it).
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

    def ask(self, request: dict[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """The answer; with ``died`` where there is none."""
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None
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
    """

    work: Path
    dtype: str = "float32"
    ways: tuple[str, ...] = ()
    forms: tuple[str, ...] = FORMS
    again: bool = True
    judge: bool = False
    compiled: bool = False
    spoil: bool = False

    def runs(self, name: str) -> list[Run]:
        """Those of a configuration."""
        few = architectures.architecture(name).is_variant
        ways = self.ways or (FEW if few else WAYS)
        runs = [Run(way, False, form) for form in self.forms for way in ways]
        if self.again:
            runs += [Run(way, True, form) for form in self.forms for way in ways if way in (("full",) if few and not self.ways else AGAIN)]
        return runs

    def environ(self) -> dict[str, str]:
        """Of a worker."""
        kept = {key: value for key, value in os.environ.items() if key not in ("ALLHANDS_BLAS", "MLX_DISABLE_COMPILE")}
        added = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "ALLHANDS_TOKEN_CACHE": str(self.work / "tokens"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")])),
        }
        if self.dtype == "float32":
            added["MLX_ENABLE_TF32"] = "0"
        if not self.compiled:
            added["MLX_DISABLE_COMPILE"] = "1"
        return kept | added


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
        """The verdicts on all runs of a configuration."""
        settings, shape = self._settings, architectures.architecture(name)
        directory = settings.work / name.replace(" ", "_")
        directory.mkdir()
        data = settings.work / f"data-{shape.long[0]}-{shape.long[1]}"
        runs = settings.runs(name)
        request = {"directory": str(directory), "config": shape.config, "long": shape.long, "data": str(data)}
        request["keys"] = shape.keys
        try:
            asked = {"dtype": settings.dtype, "ways": list(dict.fromkeys(run.way for run in runs))}
            theirs = self._theirs.ask(request | asked | {"judge": settings.judge})
            if problem := theirs.get("died") or theirs.get("made"):
                return [Verdict(name, run, "unjudged", text=f"mlx_lm: {problem}") for run in runs]
            # A model that is quantised already has no other four bits.
            runs = [run for run in runs if run.way in theirs["ways"]]
            return list(self._verdicts(name, runs, request, theirs["ways"]))
        finally:
            if "GRADIENTS_KEEP" not in os.environ:
                shutil.rmtree(directory)

    def _verdicts(self, name: str, runs: list[Run], request: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Verdict]:
        told = [{"way": run.way, "recompute": run.recompute, "form": run.form} for run in runs]
        found = self._ours.ask(request | {"runs": told, "spoil": self._settings.spoil})
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
    problems = [f"{batch}: {text}" for batch, one in ours.items() for text in complaints(one, theirs[batch.split()[0]], settings)]
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
    if not apart <= of_loss * max(1.0, abs(theirs["loss"])):
        yield f"loss {one['loss']:.6g} for {theirs['loss']:.6g}"
    # Where mlx_lm's own rounding is as large, ours must be no worse than twice that.
    rounding = one.get("theirs from judge")
    forgiven = rounding is not None and one["ours from judge"] <= max(limit, 2.0 * rounding)
    if one["whole"] > limit and not forgiven:
        yield f"gradient differs by {one['whole']:.2g}, {one['array']} by {one['worst']:.2g}"
    elif one["worst"] > of_array and rounding is None:
        yield f"{one['array']} differs by {one['worst']:.2g}"


def compare(names: Sequence[str], settings: Settings, jobs: int, tell: Callable[[str], None] = lambda text: None) -> list[Verdict]:
    """The verdicts on all runs of these configurations, ``jobs`` at a time."""
    for long in {architectures.architecture(name).long for name in names}:
        save_data(settings.work / f"data-{long[0]}-{long[1]}", long)
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
        for verdict in bad:
            tell(f"  {verdict.run.column} {verdict.run.form}: {verdict.kind}: {verdict.text}")
        return found

    try:
        with ThreadPoolExecutor(jobs) as pool:
            return [verdict for found in pool.map(one, names) for verdict in found]
    finally:
        for pair in made:
            pair.close()


def table(verdicts: Iterable[Verdict]) -> str:
    """Configurations by ways of training; in each place the largest difference over forms and batches."""
    found: dict[str, dict[str, list[Verdict]]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.name, {}).setdefault(verdict.run.column, []).append(verdict)
    columns = list(dict.fromkeys(column for one in found.values() for column in one))
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for name, one in found.items():
        lines.append(f"| {name} | {' | '.join(cell(one.get(column, [])) for column in columns)} |")
    return "\n".join(lines)


def cell(verdicts: Sequence[Verdict]) -> str:
    """Of the table: the worst of the forms."""
    if not verdicts:
        return ""
    bad = [v for v in verdicts if v.kind not in ("right", "wrong")]
    wholes = [v.whole for v in verdicts if v.whole is not None]
    words = [f"{max(wholes):.0e}" if max(wholes) > 0 else "0"] if wholes else []
    if any(v.kind == "wrong" for v in verdicts):
        words = [f"**{words[0]}** {'/'.join(v.run.form for v in verdicts if v.kind == 'wrong')}"]
    words += dict.fromkeys(f"{v.kind} {v.run.form}" if len(bad) < len(verdicts) else v.kind for v in bad)
    return ", ".join(words)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Gradients of every architecture against mlx_lm's own.")
    parser.add_argument("--only", nargs="+", default=[], help="modules of mlx_lm.models, or MODULE~VARIANT")
    parser.add_argument("--sample", action="store_true", help="the twelve most different ones")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[], help="default: all, few for variants")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=[], help="default: both; on a GPU graph")
    parser.add_argument("--no-recompute", action="store_true", help="leave out --grad-checkpoint")
    parser.add_argument("--dtype", choices=tuple(LIMITS), default="float32")
    parser.add_argument("--judge", choices=("cpu", "none"), default="none", help="let mlx_lm compute on the CPU, too")
    parser.add_argument("--compiled", action="store_true", help="let MLX compile (slow on a CPU)")
    parser.add_argument("--spoil", action="store_true", help="change one array by a thousandth: nothing may be right")
    parser.add_argument("--jobs", type=int, default=2, help="configurations at a time (%(default)s)")
    parser.add_argument("--scratch", type=Path, help="a directory for models and logs")
    parser.add_argument("--write", action="store_true", help="keep the figures in benchmarks/results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print the table; 1 if anything is wrong."""
    options = parse(arguments)
    names = architectures.named(options.only) if options.only else architectures.every()
    if options.sample:
        names = list(architectures.SAMPLE)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="allhands-gradients-", dir=options.scratch) as work:
        settings = Settings(
            work=Path(work),
            dtype=options.dtype,
            ways=tuple(options.ways),
            forms=tuple(options.forms) or FORMS,
            again=not options.no_recompute,
            judge=options.judge == "cpu",
            compiled=options.compiled,
            spoil=options.spoil,
        )
        verdicts = compare(names, settings, options.jobs, lambda text: print(text, file=sys.stderr, flush=True))
    print(table(verdicts))
    bad = [verdict for verdict in verdicts if not verdict.is_good]
    print(f"\n{len(verdicts)} comparisons, {len(bad)} not right, {time.perf_counter() - started:.0f} s")
    for verdict in bad:
        print(f"- {verdict.name}, {verdict.run.column}, {verdict.run.form}: {verdict.kind}: {verdict.text}")
    print("\n".join(beyond(verdicts)))
    return 1 if bad else 0


def beyond(verdicts: Iterable[Verdict]) -> list[str]:
    """What mlx_lm itself cannot compute, a line for each reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        if verdict.kind == "beyond mlx_lm":
            found.setdefault((verdict.name, verdict.text), []).append(f"{verdict.run.column} {verdict.run.form}")
    return [f"- {name}, {', '.join(runs)}: {text}" for (name, text), runs in found.items()]


if __name__ == "__main__":
    sys.exit(main())
