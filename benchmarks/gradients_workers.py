"""Pairs of processes that compare gradients: mlx_lm's, which never imports allhands, and ours."""

from __future__ import annotations

import json
import math
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "support")]

import architectures  # noqa: E402
from gradients_judge import BEYOND, Run, Verdict, grouped, judge, pooled, unsteady  # noqa: E402
from gradients_rows import Lengths, save_data  # noqa: E402
from harness import clean_environ, python_path  # noqa: E402

WAYS = ("lora", "full", "dora", "4bit", "lora:last", "full:last")
# Of configurations that differ from another one in a few settings only.
FEW = ("lora", "full")
AGAIN = ("lora", "full", "4bit", "lora:last")
FORMS = ("cpu", "graph")
SEEDS = (1, 2, 3)  # of the weights
DRAWN = (4, 5, 6, 7, 8, 9)  # where rounding alone may have made a difference
REPEATS = 3  # of what is wrong
ANSWER_S = 400.0


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
        why = (
            f"no answer in {timeout_s:.0f} s"
            if reply is None
            else f"exit code {process.returncode}"
        )
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return {"died": f"{why}: {lines[-1][:200] if lines else ''}"}

    def _start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environ,
            )
        assert self._process.stdout is not None
        self._replies = queue.Queue()
        threading.Thread(
            target=_pass_on, args=(self._process.stdout, self._replies), daemon=True
        ).start()

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _pass_on(stream: IO[str], replies: queue.Queue[str]) -> None:
    with stream:
        for line in stream:
            replies.put(line)
    replies.put("")


@dataclass(frozen=True)
class Settings:
    """What is compared, and how.

    Attributes:
        ways: those to compare; none: all of them for a module's first configuration, few for its
            variants.
        judge: whether mlx_lm computes in float32 on the CPU, too, where ours and its own differ in
            half precision.
        compiled: whether MLX compiles what it can: on a CPU that takes seconds for each kernel.
        spoil: whether a thousandth of one array is added to it, so that the comparison must fail.
        timeout_s: for one configuration.
        check: of ours, before its first step: ``off``, or ``on`` to see that it finds nothing where
            nothing is wrong.
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
    check: str = "off"

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
        environ = settings.environ()
        self._theirs = Worker("gradients_theirs.py", environ, logs / f"theirs-{number}.log")
        self._ours = Worker("gradients_ours.py", environ, logs / f"ours-{number}.log")

    def compare(self, name: str) -> list[Verdict]:
        """The verdicts on all runs of a configuration; where its gradient jumps, those on the best
        of a few weights.
        """
        settled: dict[Run, Verdict] = {}
        runs = self._settings.runs(name)
        for seed in SEEDS if architectures.architecture(name).kinks else SEEDS[:1]:
            settled |= {verdict.run: verdict for verdict in self._compare(name, runs, seed)}
            runs = [run for run, verdict in settled.items() if verdict.kind == "wrong"]
            if not runs:
                break
        doubted = [run for run in runs if settled[run].by_rounding]
        drawn = {run: [settled[run]] for run in doubted}
        for seed in DRAWN if doubted else ():
            for verdict in self._compare(name, doubted, seed):
                drawn[verdict.run].append(verdict)
        settled |= {run: pooled(found, self._settings.dtype) for run, found in drawn.items()}
        wrong = [
            run
            for run, verdict in settled.items()
            if verdict.kind == "wrong" and not verdict.by_rounding
        ]
        times = REPEATS if wrong and not self._settings.spoil else 0
        repeated = [self._compare(name, wrong, seed) for _ in range(times)]
        return [
            unsteady(verdict, [v for found in repeated for v in found if v.run == verdict.run])
            for verdict in settled.values()
        ]

    def _compare(self, name: str, runs: list[Run], seed: int) -> list[Verdict]:
        settings, shape = self._settings, architectures.architecture(name)
        directory = settings.work / name.replace(" ", "_")
        directory.mkdir()
        request = {
            "directory": str(directory),
            "config": shape.config,
            "dtype": settings.dtype,
            "seed": seed,
            "lengths": shape.lengths,
            "keys": shape.keys,
            "data": str(data_directory(settings.work, shape.lengths)),
            "ways": list(dict.fromkeys(run.way for run in runs)),
            "judge": settings.judge,
            "check": settings.check,
        }
        try:
            theirs = self._theirs.ask(request, settings.timeout_s)
            if "died" in theirs:
                return [
                    Verdict(name, run, "unjudged", text=f"mlx_lm: {theirs['died']}") for run in runs
                ]
            if "made" in theirs:
                # One is enough to see what ours says of it.
                runs, ways = runs[:1], {runs[0].way: {"error": theirs["made"]}}
            else:
                ways = theirs["ways"]
                # A model that is quantised already has no other four bits.
                runs = [run for run in runs if run.way in ways]
            none = [
                Verdict(name, run, BEYOND, text=ways[run.way]["none"])
                for run in runs
                if "none" in ways[run.way]
            ]
            runs = [run for run in runs if "none" not in ways[run.way]]
            return none + list(self._verdicts(name, runs, request, ways))
        finally:
            if "GRADIENTS_KEEP" not in os.environ:
                shutil.rmtree(directory)

    def _verdicts(
        self, name: str, runs: list[Run], request: dict[str, Any], theirs: dict[str, Any]
    ) -> Iterator[Verdict]:
        told = [{"way": run.way, "recompute": run.recompute, "form": run.form} for run in runs]
        judged = {
            way: one["judge"]
            for way, one in theirs.items()
            if "error" not in one.get("judge", {"error": ""})
        }
        losses = {
            way: {batch: one["loss"] for batch, one in batches.items()}
            for way, batches in judged.items()
        }
        request = request | {"judge losses": losses}
        found = self._ours.ask(
            request | {"runs": told, "spoil": self._settings.spoil}, self._settings.timeout_s
        )
        if "died" in found and len(runs) > 1:
            # One by one, to find the one that ends the process.
            for run in runs:
                yield from self._verdicts(name, [run], request, theirs)
            return
        refused = architectures.architecture(name).refused
        for run, one in zip(runs, found.get("runs") or [found], strict=True):
            yield judge(name, run, theirs[run.way], one, self._settings.dtype, refused)

    def close(self) -> None:
        """End both."""
        self._theirs.close()
        self._ours.close()


def data_directory(work: Path, lengths: Lengths) -> Path:
    """Of rows of these lengths."""
    return work / "-".join(["data", *(str(length) for batch in lengths for length in batch)])


def compare(
    names: Sequence[str],
    settings: Settings,
    jobs: int,
    tell: Callable[[str], None] = lambda text: None,
    within_s: float | None = None,
) -> list[Verdict]:
    """The verdicts on all runs of these configurations, ``jobs`` at a time.

    Args:
        within_s: no configuration is begun after so many seconds.
    """
    until = math.inf if within_s is None else time.perf_counter() + within_s
    for lengths in {architectures.architecture(name).lengths for name in names}:
        save_data(data_directory(settings.work, lengths), lengths)
    pairs: queue.Queue[Pair] = queue.Queue()
    made = [Pair(settings, number) for number in range(jobs)]
    for pair in made:
        pairs.put(pair)

    def one(name: str) -> list[Verdict]:
        pair, started = pairs.get(), time.perf_counter()
        if started > until:
            pairs.put(pair)
            return []
        try:
            found = pair.compare(name)
        finally:
            pairs.put(pair)
        bad = [v for v in found if not v.is_good]
        tell(
            f"{name}: {len(found) - len(bad)} of {len(found)} right, {time.perf_counter() - started:.1f} s"
        )
        for line in grouped(bad):
            tell(f"  {line}")
        return found

    try:
        with ThreadPoolExecutor(jobs) as pool:
            return [verdict for found in pool.map(one, names) for verdict in found]
    finally:
        for pair in made:
            pair.close()
