"""How long training stands still after a fault, and for a checkpoint.

    python benchmarks/recovery.py

Trains the demo model on several ranks of this computer. Failures are injected
(``allhands.runtime.faults``), each kind a few times at steps of its own, in one job that goes on by
itself to its end. See README.md in this directory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness import (
    BenchmarkError,
    clean_environ,
    git_commit,
    positive,
    run_benchmark,
    run_measured,
    say,
    versions,
)
from records import OURS, Row, row_of

HERE = Path(__file__).resolve().parent
PACKAGES = ("allhands", "mlx", "mlx-cpu", "mlx-lm", "numpy")
# Each kind of failure as an entry of a schedule, less its rank and step.
KINDS: dict[str, dict[str, Any]] = {
    "killed (kill -9)": {"kind": "kill"},
    "exception": {"kind": "raise"},
    "exits": {"kind": "exit", "code": 3},
    "stopped (SIGSTOP)": {"kind": "stop"},
    "hangs before the exchange": {"kind": "hang", "at": "reduce"},
    "hangs in its data": {"kind": "hang", "at": "load"},
    "computes for ever": {"kind": "spin"},
    "killed while it saves": {"kind": "kill", "at": "save"},
}
# What a run goes on after by itself.
PASSIVE = ("slow", "disk-full", "nan")
SAVE_EVERY = 5
STEPS_BETWEEN = 8  # enough to have got further, and not always as many beyond a checkpoint
FIRST_STEP = 7
METHODS = {"LoRA, 8 layers": ("lora", "8"), "full fine-tuning": ("full", "-1")}


# --- reading a run (the soak does so too) ---------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A record of ``metrics.jsonl``, with the time (Unix) at which it was there."""

    time: float
    record: dict[str, Any]


class Follower:
    """Stamps the lines of a growing file with the time at which they come; a context, with a thread
    of its own.
    """

    def __init__(self, file: Path, poll_s: float = 0.01) -> None:
        self.lines: list[Line] = []
        self._file = file
        self._poll_s = poll_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def _follow(self) -> None:
        place, rest = 0, b""
        while True:
            last = self._done.is_set()
            try:
                with self._file.open("rb") as stream:
                    stream.seek(place)
                    new = stream.read()
            except FileNotFoundError:
                new = b""
            place += len(new)
            *whole, rest = (rest + new).split(b"\n")
            self.lines += [
                Line(time.time(), record) for text in whole if (record := _record(text)) is not None
            ]
            if last:
                return
            self._done.wait(self._poll_s)


def _record(text: bytes) -> dict[str, Any] | None:
    """One line; ``None`` for one that a kill has cut off."""
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


@dataclass(frozen=True)
class Recovery:
    """What followed a fault, in seconds from the moment that it happened.

    Attributes:
        detected_s: to the supervisor's event, when the ranks have been ended; ``None`` if there was
            none.
        working_s: to the end of the first step after it.
        beyond_s: to the end of the first step that had not been done before.
        lost_steps: done before it and done again.
    """

    name: str
    rank: int
    step: int
    detected_s: float | None
    working_s: float
    beyond_s: float
    lost_steps: int


def recovery(
    name: str, fault: Any, lines: Sequence[Line], events: Sequence[dict[str, Any]]
) -> Recovery | None:
    """What followed ``fault`` (of ``allhands.runtime.faults.fired``); ``None`` if no step did.

    Args:
        lines: of ``metrics.jsonl``.
        events: of ``events.jsonl``.
    """
    restarts = fault.kind not in PASSIVE
    started = (
        line for line in lines if line.record["event"] == "started" and line.time > fault.time
    )
    since = next(started, None) if restarts else None
    if restarts and since is None:
        return None
    noticed = (
        e["time"]
        for e in events
        if e["kind"] == "fault" and since and fault.time < e["time"] < since.time
    )
    event = next(noticed, None)
    done = [line for line in lines if line.record["event"] == "train"]
    # Others may report a step that was exchanged before this rank failed.
    after = [line for line in done if line.time > (since.time if since else fault.time)]
    furthest = max(
        [line.record["step"] for line in done if after and line.time < after[0].time], default=0
    )
    beyond = next((line for line in after if line.record["step"] > furthest), None)
    if beyond is None:
        return None
    return Recovery(
        name,
        fault.rank,
        fault.step,
        None if event is None else event - fault.time,
        after[0].time - fault.time,
        beyond.time - fault.time,
        furthest - after[0].record["step"] + 1 if restarts else 0,
    )


def recovery_table(found: Sequence[Recovery]) -> list[str]:
    """Medians and the longest times, a line a kind."""
    lines = [
        "| fault | times | found after (longest) | training again after (longest) | beyond it after | steps again |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(one.name for one in found):
        ours = [one for one in found if one.name == name]
        detected = [one.detected_s for one in ours if one.detected_s is not None]
        cells = (
            name,
            str(len(ours)),
            _spread(detected) if detected else "-",
            _spread([one.working_s for one in ours]),
            f"{statistics.median(one.beyond_s for one in ours):.1f} s",
            f"{statistics.median(one.lost_steps for one in ours):.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} s ({max(values):.1f} s)"


# --- the benchmark --------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time from a fault to the next step, and the pause of a checkpoint."
    )
    parser.add_argument("--model", default="demo", help="as for allhands train")
    parser.add_argument(
        "--data", type=Path, help="a directory with a chat train.jsonl (the demo's)"
    )
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--repeat", type=positive, default=3, help="of each kind (%(default)s)")
    parser.add_argument("--kinds", help=f"comma-separated, of: {', '.join(KINDS)} (all)")
    parser.add_argument(
        "--saves", type=positive, default=4, help="checkpoints to time (%(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds that a job may take")
    parser.add_argument(
        "--scratch",
        type=Path,
        help="a directory with room for checkpoints of the whole model (5 GB)",
    )
    parser.add_argument(
        "--write", action="store_true", help="keep the figures in benchmarks/results"
    )
    options = parser.parse_args(arguments)
    options.kinds = (
        [kind.strip() for kind in options.kinds.split(",")] if options.kinds else list(KINDS)
    )
    if unknown := [kind for kind in options.kinds if kind not in KINDS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(KINDS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    return run_benchmark("recovery", options, measure, report, rows)


def measure(options: argparse.Namespace, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    data = options.data or demo_data(work)
    say("start and steps without a fault")
    plain = undisturbed(options, work, data)
    found, step_s = faults(options, work, data)
    saves = {name: checkpoint_pause(options, work, data, name) for name in METHODS}
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": facts,
        "versions": versions(Path(sys.executable), PACKAGES),
        "settings": {
            "model": Path(options.model).name,
            "ranks": options.ranks,
            "save_every": SAVE_EVERY,
        },
        "start_s": plain,
        "step_s": step_s,
        "faults": [asdict(one) for one in found],
        "checkpoints": saves,
    }


def demo_data(work: Path) -> Path:
    """The shipped chats."""
    folder = work / "data"
    run_measured(allhands("data", "demo", "--out", folder), work / "data.log", environ(), 600)
    return folder


def allhands(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "allhands", *map(str, arguments)]


def environ(**added: str) -> dict[str, str]:
    values = clean_environ(**added)
    if "HF_HUB_OFFLINE" not in os.environ:
        del values["HF_HUB_OFFLINE"]  # the demo model may have to be fetched
    return values


def train_command(
    model: str, data: Path, out: Path, ranks: int, iters: int, *more: str
) -> list[str]:
    """A run as a person would start it, with a line about every step."""
    return allhands(
        *(
            "train",
            "--train",
            "-n",
            str(ranks),
            "--backend",
            "ring",
            "--model",
            model,
            "--data",
            data,
        ),
        *(
            "--adapter-path",
            out,
            "--iters",
            str(iters),
            "--steps-per-report",
            "1",
            "--steps-per-eval",
            str(iters),
        ),
        *(
            "--val-batches",
            "0",
            "--batch-size",
            "4",
            "--max-seq-length",
            "256",
            "--max-restarts",
            "1000",
            *more,
        ),
    )


def undisturbed(options: argparse.Namespace, work: Path, data: Path) -> float:
    """Seconds from the command to the end of the first step: what every restart has to do again."""
    out = work / "undisturbed"
    begun = time.time()
    with Follower(out / "metrics.jsonl") as follower:
        command = train_command(options.model, data, out, options.ranks, 3, "--num-layers", "8")
        run_measured(command, work / "undisturbed.log", environ(), options.timeout)
    return next(line.time for line in follower.lines if line.record["event"] == "train") - begun


def faults(options: argparse.Namespace, work: Path, data: Path) -> tuple[list[Recovery], float]:
    """Each kind of failure, ``repeat`` times, and the median time of a step."""
    from allhands.observe.journal import read_events
    from allhands.runtime.faults import fired

    names = [name for _ in range(options.repeat) for name in options.kinds]
    schedule, out = work / "faults.json", work / "faulty"
    steps = [FIRST_STEP + STEPS_BETWEEN * place for place in range(len(names))]
    # Only rank 0 saves. Two failures never look the same: that would be taken for one that no
    # restart can cure.
    entries = [
        {
            "rank": 0 if KINDS[name].get("at") == "save" else place % options.ranks,
            "step": step,
            **KINDS[name],
        }
        | ({"text": f"on purpose, {place}"} if KINDS[name]["kind"] == "raise" else {})
        for place, (name, step) in enumerate(zip(names, steps, strict=True))
    ]
    schedule.write_text(json.dumps(entries))
    say(f"{len(entries)} faults in {steps[-1] + STEPS_BETWEEN} steps")
    command = train_command(
        options.model, data, out, options.ranks, steps[-1] + STEPS_BETWEEN, "--num-layers", "8"
    )
    command += ["--save-every", str(SAVE_EVERY)]
    with Follower(out / "metrics.jsonl") as follower:
        run_measured(
            command, work / "faulty.log", environ(ALLHANDS_FAULTS=str(schedule)), options.timeout
        )
    happened, events = fired(schedule), read_events(out)
    if len(happened) != len(entries):
        raise BenchmarkError(
            f"{len(happened)} of {len(entries)} faults have happened; see {work / 'faulty.log'}"
        )
    found = [recovery(names[fault.index], fault, follower.lines, events) for fault in happened]
    times = [
        line.record["step_time_s"] for line in follower.lines if line.record["event"] == "train"
    ]
    return [one for one in found if one is not None], statistics.median(times)


def checkpoint_pause(
    options: argparse.Namespace, work: Path, data: Path, name: str
) -> dict[str, Any]:
    """What a checkpoint costs: the pause of training, and the time to write it."""
    method, layers = METHODS[name]
    out, model = work / f"save-{method}", options.model
    say(f"checkpoints of {name}")
    if method == "full":
        model = str(work / "float")
        get = allhands(
            "model", "get", options.model, "--dequantize", "--dtype", "float32", "--out", model
        )
        run_measured(get, work / "model.log", environ(), options.timeout)
    more = ["--num-layers", layers, "--fine-tune-type", method, "--save-every", "2"]
    more += ["--no-keep-best"]
    command = train_command(model, data, out, options.ranks, 2 * options.saves, *more)
    run_measured(command, work / f"save-{method}.log", environ(), options.timeout)
    records = [_record(line) or {} for line in (out / "metrics.jsonl").read_bytes().splitlines()]
    saved = [record for record in records if record.get("event") == "saved"]
    newest = max((out / "checkpoints").iterdir())
    return {
        "bytes": sum(file.stat().st_size for file in newest.iterdir()),
        "pause_s": [record["pause_s"] for record in saved],
        "write_s": [record["write_s"] for record in saved],
        "step_s": statistics.median(
            record["step_time_s"] for record in records if record.get("event") == "train"
        ),
    }


def rows(record: dict[str, Any]) -> list[Row]:
    """The figures that are kept."""
    found: list[Row] = []
    for name in dict.fromkeys(one["name"] for one in record["faults"]):
        ours = [one for one in record["faults"] if one["name"] == name]
        detected = [one["detected_s"] for one in ours if one["detected_s"] is not None]
        if detected:
            found.append(row_of(f"{name}: found after", OURS, "s", detected, "lower"))
        found.append(
            row_of(
                f"{name}: training again after", OURS, "s", [o["working_s"] for o in ours], "lower"
            )
        )
    for name, figures in record["checkpoints"].items():
        for key, what in (("pause_s", "training pauses"), ("write_s", "written in")):
            times = [1e3 * value for value in figures[key]]
            found.append(row_of(f"checkpoint of {name}: {what}", OURS, "ms", times, "lower"))
    return found


def report(record: dict[str, Any]) -> str:
    """The figures as Markdown, with what one must know to read them."""
    settings = record["settings"]
    lines = [
        f"{settings['model']} on {settings['ranks']} ranks, a checkpoint every {settings['save_every']} steps",
        "",
        *recovery_table([Recovery(**one) for one in record["faults"]]),
        "",
        f"a step takes {record['step_s']:.2f} s; from the command to the end of the first step it is "
        f"{record['start_s']:.1f} s without any fault.",
        "",
        "| checkpoint of | size | training pauses (longest) | written in (longest) | a step takes |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, figures in record["checkpoints"].items():
        pauses, writes = (
            [1000 * value for value in figures[key]] for key in ("pause_s", "write_s")
        )
        cells = (
            name,
            f"{figures['bytes'] / 1e6:.1f} MB",
            f"{statistics.median(pauses):.1f} ms ({max(pauses):.1f} ms)",
            f"{statistics.median(writes):.0f} ms ({max(writes):.0f} ms)",
            f"{1000 * figures['step_s']:.0f} ms",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
