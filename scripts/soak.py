"""Faults in a row, on a real training run: what ends must be bit by bit what was never disturbed.

    python scripts/soak.py [--faults 100] [--seed 0] [--ranks 3] [--model demo]

Ranks are killed, stopped, hung and starved at random steps; the disk is full; the launcher is
killed or asked to stop, a checkpoint is damaged, and it is told to go on. The seed chooses all of
it. With ``--work DIR`` a soak that was broken off goes on from where it was. The exit code is 0 if
every fault has happened, weights, optimizer state and losses are those of the undisturbed run, and
no process or temporary file is left.
"""

from __future__ import annotations

# ruff: noqa: E402 - what it shares with the tests and the benchmarks is not installed
import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]

from harness import git_commit, machine, say
from recovery import Follower, Recovery, recovery, recovery_table

from allhands.checkpoints import checkpoints_in
from allhands.errors import StorageError
from allhands.observe.journal import read_events
from allhands.observe.metrics import read_metrics
from allhands.runtime.faults import fired

SAVE_EVERY = 5
LAST_STEPS = 12  # after the last fault, for what it has broken to be seen
STOPPED_CODES = (130, 143)
MARK = "ALLHANDS_SOAK"
WEIGHTS, OPTIMIZER = "adapters.safetensors", "optimizer.safetensors"
# How likely, and what: entries of a schedule for ranks, and what happens to the launcher.
RANK_FAULTS: dict[str, tuple[int, dict[str, Any]]] = {
    "killed": (26, {"kind": "kill"}),
    "exception": (12, {"kind": "raise"}),
    "exits": (8, {"kind": "exit", "code": 9}),
    "SIGTERM to one rank": (4, {"kind": "term"}),
    "stopped": (10, {"kind": "stop"}),
    "hangs before the exchange": (5, {"kind": "hang", "at": "reduce"}),
    "hangs in its data": (4, {"kind": "hang", "at": "load"}),
    "computes for ever": (5, {"kind": "spin"}),
    "slow": (4, {"kind": "slow", "seconds": 2.0}),
    "killed while it saves": (6, {"kind": "kill", "at": "save"}),
    "disk full": (4, {"kind": "disk-full", "at": "save"}),
}
LAUNCHER_FAULTS = {
    "launcher killed": 5,
    "launcher told to stop": 4,
    "killed, newest checkpoint damaged": 3,
}
POINTS = ("step", "load", "reduce", "update")


@dataclass(frozen=True)
class LauncherFault:
    """Something that this program does, when ``step`` steps are done."""

    name: str
    step: int
    kind: str = "launcher"
    rank: int = -1
    time: float = 0.0


@dataclass(frozen=True)
class Plan:
    """All that will happen, as the seed has it."""

    ranks: list[dict[str, Any]]
    names: list[str]
    launcher: list[LauncherFault]
    iters: int


def make_plan(seed: int, count: int, num_ranks: int) -> Plan:
    """``count`` faults, each at a later step than the one before."""
    chance = random.Random(seed)
    weights = {**{name: weight for name, (weight, _) in RANK_FAULTS.items()}, **LAUNCHER_FAULTS}
    entries: list[dict[str, Any]] = []
    names: list[str] = []
    launcher: list[LauncherFault] = []
    step, last_save = 0, -SAVE_EVERY
    for number in range(count):
        step += chance.randint(1, 4)
        name = chance.choices(list(weights), list(weights.values()))[0]
        if name in LAUNCHER_FAULTS:
            launcher.append(LauncherFault(name, step))
            continue
        entry = {
            "rank": chance.randrange(num_ranks),
            "step": step,
            "at": chance.choice(POINTS),
            **RANK_FAULTS[name][1],
        }
        if entry["at"] == "save":
            if (
                step - last_save <= SAVE_EVERY
            ):  # at the same save: two failures alike are not tried again
                name, entry = "killed", {**entry, "kind": "kill", "at": "step"}
            else:
                last_save = step
                entry |= {"rank": 0, "write": chance.randint(1, 4)}
        if entry["kind"] == "raise":
            entry["text"] = f"on purpose, number {number}"
        entries.append(entry)
        names.append(name)
    return Plan(entries, names, launcher, step + LAST_STEPS)


# --- the run --------------------------------------------------------------------------------------


class Soak:
    """One run in ``work``, over all its starts."""

    def __init__(self, options: argparse.Namespace, work: Path, plan: Plan) -> None:
        self._options, self._work, self._plan = options, work, plan
        self.out = work / "disturbed"
        self.schedule = work / "faults.json"
        self.mark = uuid.uuid4().hex
        self.temporary = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
        (self.temporary / "mlx").symlink_to(
            tempfile.gettempdir() + "/mlx"
        )  # what MLX has compiled, kept for all
        self._note = work / "launcher.json"
        told = json.loads(self._note.read_text()) if self._note.exists() else []
        self.happened = [LauncherFault(**fault) for fault in told]
        self.began = time.time()
        self.lines: Follower | None = None

    def command(self, out: Path) -> list[str]:
        """The run as a person would start it, with a line about every step."""
        options = self._options
        return [
            *(
                sys.executable,
                "-m",
                "allhands",
                "train",
                "--train",
                "-n",
                str(options.ranks),
                "--backend",
                "ring",
            ),
            *(
                "--model",
                str(options.model_path),
                "--data",
                str(options.data_path),
                "--adapter-path",
                str(out),
            ),
            *(
                "--iters",
                str(self._plan.iters),
                "--save-every",
                str(SAVE_EVERY),
                "--steps-per-report",
                "1",
            ),
            *(
                "--val-batches",
                "0",
                "--batch-size",
                "3",
                "--max-seq-length",
                "64",
                "--num-layers",
                "4",
            ),
            *(
                "--learning-rate",
                "1e-4",
                "--lora-parameters",
                '{"rank": 4, "scale": 10.0, "dropout": 0.1}',
            ),
            *("--max-restarts", "100000"),
        ]

    def start(self, out: Path, *more: str, faults: bool = True) -> subprocess.Popen[bytes]:
        """Start the command; its output goes to a log."""
        environ = {**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary)}
        environ |= {"ALLHANDS_FAULTS": str(self.schedule)} if faults else {}
        with (self._work / f"{out.name}.log").open("ab") as log:
            return subprocess.Popen(
                [*self.command(out), *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )

    def undisturbed(self) -> Path:
        """The run that nothing happens to."""
        out = self._work / "undisturbed"
        if not _complete(out, self._plan.iters):
            shutil.rmtree(out, ignore_errors=True)
            if code := self.start(out, faults=False).wait():
                raise SystemExit(
                    f"the undisturbed run ended with code {code}; see {self._work}/undisturbed.log"
                )
        return out

    def disturbed(self) -> None:
        """Run to the end, doing to the launcher what is planned, and starting it again after it."""
        past = {fault.step for fault in self.happened}
        left = [fault for fault in self._plan.launcher if fault.step not in past]
        again = ["--resume"] if (self.out / "checkpoints").is_dir() else []
        with Follower(self.out / "metrics.jsonl") as self.lines:
            while not _complete(self.out, self._plan.iters):
                job = self.start(self.out, *again)
                fault = self._watch(job, left)
                if fault is not None:
                    left.remove(fault)
                    self.happened.append(self._mistreat(job, fault))
                    self._note.write_text(json.dumps([vars(one) for one in self.happened]))
                again = ["--resume"]

    def _watch(
        self, job: subprocess.Popen[bytes], left: list[LauncherFault]
    ) -> LauncherFault | None:
        """Wait for the end, or for the step at which something is to happen to the launcher."""
        told = 0
        while (code := job.poll()) is None:
            step = max((line.record["step"] for line in self._trained()), default=0)
            if left and step >= left[0].step:
                return left[0]
            count = len(fired_so_far(self.schedule)) + len(self.happened)
            if count >= told + 10:
                told = count
                say(f"step {step} of {self._plan.iters}, {count} faults")
            time.sleep(0.02)
        if code and code not in STOPPED_CODES:
            tail = (self._work / "disturbed.log").read_text(errors="replace")[-3000:]
            raise SystemExit(
                f"the run ended with code {code}:\n{tail}\nseed {self._options.seed}, {self._work}"
            )
        return None

    def _trained(self) -> list[Any]:
        assert self.lines is not None
        return [line for line in self.lines.lines if line.record["event"] == "train"]

    def _mistreat(self, job: subprocess.Popen[bytes], fault: LauncherFault) -> LauncherFault:
        now = time.time()
        stop = fault.name == "launcher told to stop"
        job.send_signal(signal.SIGTERM if stop else signal.SIGKILL)
        code = job.wait(timeout=120)
        # Python's own end if it has just begun; and the disk may be full just now.
        if stop and code not in (143, 0, -signal.SIGTERM, StorageError.exit_code):
            raise SystemExit(
                f"told to stop at step {fault.step}, it ended with code {code}; see {self._work}"
            )
        self.wait_until_gone()
        if "damaged" in fault.name:
            self._damage(fault.step)
        return LauncherFault(fault.name, fault.step, time=now)

    def wait_until_gone(self) -> None:
        """No process of the run may be left."""
        deadline = time.monotonic() + 10
        while left := self._processes():
            if time.monotonic() > deadline:
                raise SystemExit(f"processes are left: {left}")
            time.sleep(0.05)

    def _processes(self) -> list[int]:
        found: list[int] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get(MARK) == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process.pid)
        return found

    def _damage(self, step: int) -> None:
        """Change one byte of the newest checkpoint, if there is one."""
        chance = random.Random(step)
        for newest in checkpoints_in(self.out)[:1]:
            file = chance.choice(sorted(newest.iterdir()))
            content = bytearray(file.read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            file.write_bytes(content)

    def end(self) -> list[str]:
        """End what is left, and say what was."""
        wrong: list[str] = []
        if left := [path.name for path in self.temporary.iterdir() if path.name != "mlx"]:
            wrong.append(f"temporary files are left: {left}")
        for pid in self._processes():
            wrong.append(f"process {pid} is left")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.temporary, ignore_errors=True)
        return wrong


def fired_so_far(schedule: Path) -> list[Any]:
    """What has happened to ranks; a note may just be being written."""
    while True:
        with contextlib.suppress(ValueError):
            return fired(schedule)
        time.sleep(0.01)


def _complete(out: Path, iters: int) -> bool:
    """Whether the run has trained to its end."""
    if not (out / "metrics.jsonl").exists():
        return False
    ended = read_metrics(out).ended
    return ended is not None and ended.reason == "finished" and ended.step == iters


# --- the judgement --------------------------------------------------------------------------------


def differences(out: Path, other: Path) -> list[str]:
    """In what two runs differ."""
    from faulty import digest

    wrong: list[str] = []
    mine, theirs = (
        [(r.step, r.loss, r.trained_tokens) for r in read_metrics(path).train]
        for path in (out, other)
    )
    if mine != theirs:
        step = next(
            (a[0] for a, b in zip(mine, theirs, strict=False) if a != b),
            min(len(mine), len(theirs)) + 1,
        )
        wrong.append(f"the losses differ from step {step}")
    ends = (
        WEIGHTS,
        *(f"checkpoints/step-{mine[-1][0]:07d}/{name}" for name in (WEIGHTS, OPTIMIZER)),
    )
    return [
        *wrong,
        *(f"{name} differs" for name in ends if digest(out / name) != digest(other / name)),
    ]


def recoveries(soak: Soak, plan: Plan) -> list[Recovery]:
    """What followed each fault that has happened since this program was started."""
    assert soak.lines is not None
    events = read_events(soak.out)
    named = [(plan.names[fault.index], fault) for fault in fired(soak.schedule)]
    named += [(fault.name, fault) for fault in soak.happened]
    found = [
        recovery(name, fault, soak.lines.lines, events)
        for name, fault in named
        if fault.time > soak.began
    ]
    return sorted((one for one in found if one is not None), key=lambda one: one.name)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Random faults in a row, and the same weights at the end."
    )
    parser.add_argument("--faults", type=int, default=100, help="number of faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (%(default)s)")
    parser.add_argument("--ranks", type=int, default=3, help="number of ranks (%(default)s)")
    parser.add_argument(
        "--model",
        default="demo",
        help="'demo', 'tiny' (a generated model, for a quick test) or a directory",
    )
    parser.add_argument(
        "--data", type=Path, help="a directory with train.jsonl of chats (default: the demo data)"
    )
    parser.add_argument(
        "--work", type=Path, help="a directory for all files; a soak that is there already goes on"
    )
    return parser.parse_args(arguments)


def prepare(options: argparse.Namespace, work: Path) -> None:
    """Model and data; sets their paths in ``options``."""
    options.model_path, options.data_path = options.model, options.data or work / "data"
    if options.model == "tiny":
        from tiny import write_chat_data, write_model

        options.model_path = write_model(work / "model", layers=4)
        options.data_path = options.data or write_chat_data(work / "data")
    elif options.data is None:
        command = [
            sys.executable,
            "-m",
            "allhands",
            "data",
            "demo",
            "--out",
            str(options.data_path),
        ]
        if not options.data_path.is_dir():
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with contextlib.ExitStack() as stack:
        work = options.work or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="allhands-soak-"))
        )
        work = work.resolve()
        work.mkdir(parents=True, exist_ok=True)
        prepare(options, work)
        plan = make_plan(options.seed, options.faults, options.ranks)
        (work / "faults.json").write_text(json.dumps(plan.ranks, indent=1))
        return soak(options, work, plan)


def soak(options: argparse.Namespace, work: Path, plan: Plan) -> int:
    """Both runs, the table and the judgement."""
    run = Soak(options, work, plan)
    wrong: list[str] = []
    # So that whoever ends this ends the run, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        say(f"{plan.iters} steps on {options.ranks} ranks without a fault")
        other = run.undisturbed()
        say(f"the same with {options.faults} faults (seed {options.seed})")
        begun = time.monotonic()
        run.disturbed()
        took_s = time.monotonic() - begun
        happened = [plan.names[fault.index] for fault in fired(run.schedule)] + [
            fault.name for fault in run.happened
        ]
        missing = Counter([*plan.names, *(fault.name for fault in plan.launcher)]) - Counter(
            happened
        )
        wrong += [f"{count} times not happened: {name}" for name, count in missing.items()]
        wrong += differences(run.out, other)
    finally:
        wrong += run.end()
    facts = machine()
    print(
        f"{options.model} on {options.ranks} ranks, {facts['cpu']}, {facts['cores']} cores, {git_commit()}\n"
    )
    print("\n".join(recovery_table(recoveries(run, plan))))
    print(
        f"\n{len(happened)} faults in {plan.iters} steps, {took_s / 60:.1f} minutes, seed {options.seed}"
    )
    print("\n".join(wrong) or "bit by bit what was never disturbed; nothing is left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
