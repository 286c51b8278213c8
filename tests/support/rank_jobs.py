"""Jobs of real processes for tests: a supervisor in a program of its own, ranks that follow a
script.

A script is such as ``"wait"`` or ``"exit 3"``. All processes of a job have its directory in their
command lines, which is how left-over ones are found.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import allhands

SOURCE = str(Path(allhands.__file__).parents[1])

SUPERVISOR = """
import json, sys
from pathlib import Path
from allhands.cluster.supervisor import LaunchSpec, supervise
from allhands.errors import AllhandsError
directory = Path(sys.argv[1])
fields = json.loads(sys.argv[2])
def note(event):
    with (directory / "events").open("a") as stream:
        print(json.dumps(vars(event), default=str), file=stream, flush=True)
try:
    sys.exit(supervise(LaunchSpec(log_dir=directory / "logs", **fields), note))
except AllhandsError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""

# One attempt alone, whose outcome is written down; ranks regroup when the test says so.
ATTEMPT = """
import contextlib, json, signal, sys
from collections import deque
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from allhands.cluster import runfiles
from allhands.cluster.attempt import Attempt
from allhands.cluster.ranks import LaunchSpec
directory, signals = Path(sys.argv[1]), deque()
fields = json.loads(sys.argv[2])
if (directory / "vmstat").exists():
    runfiles.oom_counters = lambda: [directory / "vmstat"]
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda caught, _: signals.append(caught))
def note(event):
    with (directory / "events").open("a") as stream:
        print(json.dumps(vars(event), default=str), file=stream, flush=True)
def poll():
    (directory / "polled").touch()
    if (directory / "regroup-now").exists():
        attempt.request_regroup()
(directory / "logs").mkdir()
with TemporaryDirectory(prefix="allhands-") as private:
    attempt = Attempt(LaunchSpec(log_dir=directory / "logs", **fields), Path(private, "1"), signals, note)
    outcome = attempt.run(poll)
(directory / "outcome").write_text(json.dumps(asdict(outcome), default=str))
"""

WORKER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from allhands.cluster import worker
from allhands.cluster.environment import recognise
from allhands.cluster.guard import write_whole
from allhands.errors import DataError, Interrupted
here, scripts = Path(sys.argv[1]), sys.argv[2].split(",")
launch = recognise(os.environ)
run_dir = Path(os.environ["ALLHANDS_RUN_DIR"])
def others_started():
    while len(list(run_dir.glob("*.started"))) < launch.size:
        time.sleep(0.01)
def facts():
    threads = {name: os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    mode = run_dir.parent.stat().st_mode
    more = {name: os.environ.get(name) for name in ("OMPI_MCA_btl_sm_backing_directory", "ALLHANDS_RANK_WEIGHTS")}
    nccl = {name: os.environ.get(name) for name in ("MLX_RANK", "NCCL_PORT", "CUDA_VISIBLE_DEVICES")}
    return {**vars(launch), **threads, **nccl, "cores": cores, "tty": os.isatty(1), "mode": mode, **more}
def save(context, seconds):
    while not context.stop_requested():
        time.sleep(0.01)
    time.sleep(seconds)
    (here / f"saved-{launch.rank}").touch()
    raise Interrupted("stopped", code="stopped")
def collectives(context, backend, script):
    import mlx.core as mx
    world = mx.distributed.init(strict=True, backend=backend)
    context.mark_started()
    for step in range(1000 if script else 3):
        total = mx.distributed.all_sum(mx.full((1000,), world.rank() + 1.0))
        mx.eval(total)
        if script in ("linger", "brief") and step == 2:
            break
        if step == 2 and (memory := os.environ.get("OMPI_MCA_btl_sm_backing_directory")):
            (here / f"segments-{launch.rank}").write_text(str(len(os.listdir(memory))))
        if script == "raise" and step == 3:
            raise ValueError("an exception of rank 1")
        if script == "kill" and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    if script == "linger":
        time.sleep(1)
    print("sum", total[0].item(), flush=True)
    if script in ("linger", "brief"):
        os._exit(0)
def steps(context, wound="", at="5", phase="compute"):
    # A training without MLX: beats as it has, and ranks that wait for each other.
    for step in range(10000):
        for now in ("load", "compute", "reduce"):
            context.beat(now, step)
            if wound and (step, now) == (int(at), phase):
                hurt(wound)
            time.sleep(0.01)
        meet(context, step + 1)
        context.beat("update", step + 1)
        if context.stop_requested():
            save(context, 0)
def meet(context, step):
    write_whole(run_dir / f"met-{launch.rank}", str(step))
    while min(reached(rank) for rank in range(launch.size)) < step:
        if context.regroup_requested():
            context.end_for_regroup()
        if context.stop_requested():
            save(context, 0)
        time.sleep(0.005)
def reached(rank):
    path = run_dir / f"met-{rank}"
    return int(path.read_text()) if path.exists() else 0
def hurt(wound):
    if wound == "oom":
        (here / "vmstat").write_text("pgfault 7\\noom_kill 4\\n")
        os.kill(os.getpid(), signal.SIGKILL)
    elif wound == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif wound == "spin":
        while True:
            pass
    elif wound == "deaf":
        time.sleep(60)
    elif wound == "child":
        nap = [sys.executable, "-c", "import time; time.sleep(60)", str(here)]
        subprocess.Popen(nap, process_group=0)
        (here / "has-child").touch()
    elif wound == "regroup":
        (here / "regroup-now").touch()
    elif wound == "code75":
        os._exit(75)
with worker.install(launch, os.environ) as context:
    (here / f"facts-{launch.rank}.json").write_text(json.dumps(facts(), default=str))
    script, *words = scripts[launch.rank].split()
    if script not in ("silent", "busy", "mlx", "bind"):
        context.mark_started()
        others_started()
    print(f"rank {launch.rank} does {script}")
    if script == "exit":
        sys.exit(int(words[0]))
    elif script == "code":
        os._exit(int(words[0]))
    elif script == "data":
        raise DataError("no samples", code="data-empty", where="train.jsonl:12")
    elif script == "lost":
        raise RuntimeError("[ring] connection to a peer was lost")
    elif script == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif script == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    elif script == "guard":
        os.kill(os.getppid(), signal.SIGSTOP)
        sys.exit(int(words[0]))
    elif script == "pause":
        time.sleep(float(words[0]))
        sys.exit(int(words[1]))
    elif script == "save":
        save(context, float(words[0]))
    elif script == "bind":
        if not (here / "tried").exists():
            (here / "tried").touch()
            raise RuntimeError(" ".join(words) or "[ring] Couldn't bind socket (error: 98)")
        context.mark_started()
    elif script == "mlx":
        collectives(context, words[0], words[1] if len(words) > 1 else "")
    elif script == "busy":
        end = time.monotonic() + float(words[0])
        while time.monotonic() < end:
            context.mark_busy()
            time.sleep(0.1)
        time.sleep(float(words[1]))
        context.mark_started()
    elif script == "steps":
        steps(context, *words)
    elif script in ("wait", "silent"):
        time.sleep(60)
"""


class Job:
    """A supervisor in a process of its own, in a short directory of its own."""

    def __init__(
        self,
        directory: Path,
        scripts: list[str],
        program: str = SUPERVISOR,
        output: int = subprocess.PIPE,
        files: dict[str, str] | None = None,
        **fields: Any,
    ) -> None:
        self.directory = directory
        (directory / "tmp").mkdir()
        for name, text in {"supervisor.py": program, "worker.py": WORKER, **(files or {})}.items():
            (directory / name).write_text(text)
        command = [sys.executable, str(directory / "worker.py"), str(directory), ",".join(scripts)]
        spec = {"command": command, "num_processes": len(scripts), "backend": "ring"} | fields
        self.process = subprocess.Popen(
            [sys.executable, str(directory / "supervisor.py"), str(directory), json.dumps(spec)],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": SOURCE, "TMPDIR": str(directory / "tmp")},
        )

    def finish(self, timeout: float = 30.0) -> int:
        """Wait, and check that nothing is left over."""
        self.out, self.err = self.process.communicate(timeout=timeout)
        assert self.left() == []
        assert list((self.directory / "tmp").iterdir()) == []
        return self.process.returncode

    def left(self) -> list[str]:
        lines: list[str] = []
        for process in psutil.process_iter(["cmdline", "status", "pid"]):
            line = " ".join(process.info["cmdline"] or [])
            if str(self.directory) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
                lines.append(f"{process.info['pid']} {process.info['status']} {line}")
        return lines

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.directory / "events"
        records = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        return [record for record in records if record["kind"] == kind]

    def wait_for(self, kind: str) -> None:
        until(lambda: bool(self.events(kind)), 20.0)

    def outcome(self) -> dict[str, Any]:
        """What became of a single attempt."""
        return json.loads((self.directory / "outcome").read_text())

    def facts(self, rank: int) -> dict[str, Any]:
        return json.loads((self.directory / f"facts-{rank}.json").read_text())


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@contextmanager
def jobs() -> Generator[Callable[..., Job]]:
    """Give a function that starts jobs; at the end, end whatever a failed test leaves."""
    started: list[Job] = []

    def begin(*scripts: str, **fields: Any) -> Job:
        started.append(
            Job(Path(tempfile.mkdtemp(prefix="ah-", dir="/tmp")), list(scripts), **fields)
        )
        return started[-1]

    try:
        yield begin
    finally:
        for job in started:
            job.process.kill()
            job.process.communicate()
            for line in job.left():
                os.kill(int(line.split()[0]), signal.SIGKILL)
            shutil.rmtree(job.directory)
