"""The supervisor with real processes that fail in every way we know; none may be left over.

Each test runs a supervisor as a program of its own; each rank follows a script such as ``"wait"`` or
``"exit 3"``. All processes of a test have its directory in their command lines, which is how left-over ones
are found.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import allhands
from allhands.cluster.mpi import find_mpi, prepare_mpi_environment
from allhands.cluster.processes import reserve_ports
from allhands.cluster.supervisor import describe_exit

_SOURCE = str(Path(allhands.__file__).parents[1])
_needs_mpi = pytest.mark.skipif(find_mpi() is None, reason="Open MPI is not installed")
_linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS has no such call")

_SUPERVISOR = """
import json, sys
from pathlib import Path
from allhands.cluster.supervisor import LaunchSpec, supervise
from allhands.errors import AllhandsError
directory = Path(sys.argv[1])
fields = json.loads(sys.argv[2])
def note(event):
    with (directory / "events").open("a") as stream:
        record = vars(event) | {"log_path": str(event.log_path)}
        print(json.dumps(record), file=stream, flush=True)
try:
    sys.exit(supervise(LaunchSpec(log_dir=directory / "logs", **fields), note))
except AllhandsError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""

_WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from allhands.cluster import worker
from allhands.cluster.environment import recognise
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
    nccl = {name: os.environ.get(name) for name in ("MLX_RANK", "NCCL_PORT", "CUDA_VISIBLE_DEVICES")}
    return {**vars(launch), **threads, **nccl, "cores": cores, "tty": os.isatty(1), "mode": mode}
def save(context, seconds):
    while not context.stop_requested():
        time.sleep(0.01)
    time.sleep(seconds)
    (here / f"saved-{launch.rank}").touch()
    raise Interrupted("stopped")
def collectives(context, backend, script):
    import mlx.core as mx
    world = mx.distributed.init(strict=True, backend=backend)
    context.mark_started()
    for step in range(1000 if script else 3):
        total = mx.distributed.all_sum(mx.full((1000,), world.rank() + 1.0))
        mx.eval(total)
        if script in ("linger", "brief") and step == 2:
            break
        if script == "raise" and step == 3:
            raise ValueError("an exception of rank 1")
        if script == "kill" and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    if script == "linger":
        time.sleep(1)
    print("sum", total[0].item(), flush=True)
    if script in ("linger", "brief"):
        os._exit(0)
with worker.install(launch, os.environ) as context:
    (here / f"facts-{launch.rank}.json").write_text(json.dumps(facts()))
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
        raise DataError("no samples", where="train.jsonl:12")
    elif script == "lost":
        raise RuntimeError("[ring] connection to a peer was lost")
    elif script == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif script == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    elif script == "pause":
        time.sleep(float(words[0]))
        sys.exit(int(words[1]))
    elif script == "save":
        save(context, float(words[0]))
    elif script == "bind":
        if not (here / "tried").exists():
            (here / "tried").touch()
            raise RuntimeError("[ring] Couldn't bind socket (error: 98)")
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
    elif script in ("wait", "silent"):
        time.sleep(60)
"""


class _Job:
    """A supervisor in a process of its own, in a short directory of its own."""

    def __init__(self, directory: Path, scripts: list[str], output: int = subprocess.PIPE, **fields: Any) -> None:
        self.directory = directory
        (directory / "tmp").mkdir()
        for name, text in (("supervisor.py", _SUPERVISOR), ("worker.py", _WORKER)):
            (directory / name).write_text(text)
        command = [sys.executable, str(directory / "worker.py"), str(directory), ",".join(scripts)]
        spec = {"command": command, "num_processes": len(scripts), "backend": "ring"} | fields
        self.process = subprocess.Popen(
            [sys.executable, str(directory / "supervisor.py"), str(directory), json.dumps(spec)],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": _SOURCE, "TMPDIR": str(directory / "tmp")},
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
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [record for record in records if record["kind"] == kind]

    def wait_for(self, kind: str) -> None:
        _until(lambda: bool(self.events(kind)), 20.0)

    def facts(self, rank: int) -> dict[str, Any]:
        return json.loads((self.directory / f"facts-{rank}.json").read_text())


def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def start() -> Iterator[Callable[..., _Job]]:
    """Start jobs, and end whatever a failed test leaves."""
    jobs: list[_Job] = []

    def begin(*scripts: str, **fields: Any) -> _Job:
        jobs.append(_Job(Path(tempfile.mkdtemp(prefix="ah-", dir="/tmp")), list(scripts), **fields))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        job.process.communicate()
        for line in job.left():
            os.kill(int(line.split()[0]), signal.SIGKILL)
        shutil.rmtree(job.directory)


BACKENDS = ["ring", pytest.param("mpi", marks=_needs_mpi)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_clean_run(start: Callable[..., _Job], backend: str) -> None:
    job = start("pause 0.3 0", "pause 0.3 0", backend=backend, cores_per_rank=1)
    assert job.finish() == 0
    assert "rank 0 does pause" in job.out
    assert "rank 1 does pause" not in job.out
    assert "rank 1 does pause" in (job.directory / "logs/rank-1.log").read_text()
    assert [len(job.events(kind)) for kind in ("launched", "started", "failed")] == [1, 1, 0]
    for rank in range(2):
        facts = job.facts(rank)
        assert [facts[n] for n in ("rank", "size", "local_rank", "local_size")] == [rank, 2, rank, 2]
        assert (facts["launcher"], facts["backend"], facts["tty"]) == ("allhands", backend, False)
        assert facts["OPENBLAS_NUM_THREADS"] == facts["OMP_NUM_THREADS"] == "1"
        assert stat.S_IMODE(facts["mode"]) == 0o700


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_0_keeps_the_terminal(start: Callable[..., _Job], backend: str) -> None:
    ours, terminal = os.openpty()
    job = start("exit 0", "exit 0", backend=backend, output=terminal)
    os.close(terminal)
    assert job.finish() == 0
    assert [job.facts(rank)["tty"] for rank in range(2)] == [True, False]
    assert b"rank 0 does exit" in os.read(ours, 4096)
    os.close(ours)


def test_nccl_gives_each_rank_a_gpu(start: Callable[..., _Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    job = start("exit 0", "exit 0", backend="nccl")
    assert job.finish() == 0
    ranks = [job.facts(rank) for rank in range(2)]
    assert [(r["MLX_RANK"], r["CUDA_VISIBLE_DEVICES"]) for r in ranks] == [("0", "4"), ("1", "6")]
    assert ranks[0]["NCCL_PORT"] == ranks[1]["NCCL_PORT"]
    job = start("exit 0", "exit 0", "exit 0", backend="nccl")
    assert job.finish() == 7
    assert "3 processes for 2 GPUs" in job.err


@_linux
def test_each_rank_has_its_own_cores(start: Callable[..., _Job]) -> None:
    job = start("exit 0", "exit 0", "exit 0", cores_per_rank=1)
    assert job.finish() == 0
    allowed = sorted(os.sched_getaffinity(0))
    assert [job.facts(r)["cores"] for r in range(3)] == [[allowed[r % len(allowed)]] for r in range(3)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("exit 3", 3, "rank 1 exited with code 3"),
        ("kill", 137, "rank 1 was killed by SIGKILL (possibly out of memory)"),
        ("data", 3, "DataError: no samples"),
    ],
)
def test_a_failing_rank_ends_the_job(
    start: Callable[..., _Job], backend: str, script: str, code: int, words: str
) -> None:
    job = start("wait", script, backend=backend)
    assert job.finish() == code
    (failed,) = job.events("failed")
    assert (failed["rank"], failed["exit_code"]) == (1, code)
    assert words in failed["message"]
    assert f"rank 1 does {script.split()[0]}" in failed["log_tail"]


def test_the_consequence_does_not_hide_the_cause(start: Callable[..., _Job]) -> None:
    job = start("lost", "pause 0.4 5", "lost")
    assert job.finish() == 5
    assert [event["rank"] for event in job.events("failed")] == [1]


def test_a_lost_peer_alone_is_reported_as_such(start: Callable[..., _Job]) -> None:
    job = start("lost", "exit 0")
    assert job.finish() == 8
    assert "PeerLostError" in job.events("failed")[0]["message"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stopped_rank_is_ended_too(start: Callable[..., _Job], backend: str) -> None:
    job = start("stop", "pause 0.3 4", backend=backend)
    assert job.finish() == 4


def test_ranks_that_go_on_alone_are_ended(start: Callable[..., _Job]) -> None:
    job = start("exit 0", "wait", finish_grace_s=0.3)
    assert job.finish() == 7
    assert "had finished 0.3 s before the others" in job.events("failed")[0]["message"]


def test_a_rank_that_does_not_start_is_named(start: Callable[..., _Job]) -> None:
    job = start("silent", "pause 60 0", start_deadline_s=1.5)
    assert job.finish() == 7
    assert "rank 0 did not finish starting within 1.5 s" in job.err or "rank 0, 1" in job.err
    assert "Traceback" not in job.err


def test_a_rank_at_work_on_the_data_may_take_longer_to_start(start: Callable[..., _Job]) -> None:
    # Twice the deadline at work, then done; the other rank waits for the first without a word.
    job = start("busy 3 0", "busy 0.2 2.8", start_deadline_s=1.5)
    assert job.finish() == 0


def test_a_rank_that_stops_working_on_the_data_is_named(start: Callable[..., _Job]) -> None:
    job = start("busy 1 60", start_deadline_s=1.5)
    assert job.finish() == 7
    assert "rank 0 did not finish starting within 1.5 s" in job.err


def test_a_command_that_does_not_exist(start: Callable[..., _Job]) -> None:
    job = start("exit 0", "exit 0", command=["no-such-command"])
    assert job.finish() == 127
    assert "cannot start 'no-such-command'" in job.err


def test_taken_ports_are_tried_once_more(start: Callable[..., _Job]) -> None:
    job = start("bind", "bind")
    assert job.finish() == 0
    assert len(job.events("retrying")) == 1
    assert job.events("failed") == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_signal_lets_every_rank_save(start: Callable[..., _Job], backend: str, number: int, code: int) -> None:
    job = start("save 0", "save 1.2", backend=backend)
    job.wait_for("started")
    job.process.send_signal(number)
    assert job.finish() == code
    assert all((job.directory / f"saved-{rank}").exists() for rank in range(2))
    assert job.events("failed") == []


def test_a_stop_during_start_up_does_not_wait(start: Callable[..., _Job]) -> None:
    """Rank 0 waits in MLX's init for a peer that is not coming, deaf to signals."""
    job = start("mlx ring", "silent")
    _until(lambda: (job.directory / "facts-1.json").exists() and (job.directory / "facts-0.json").exists(), 20.0)
    job.process.send_signal(signal.SIGINT)
    assert job.finish(timeout=8) == 130


def test_the_second_stop_signal_does_not_wait(start: Callable[..., _Job]) -> None:
    job = start("wait", "save 20")
    job.wait_for("started")
    job.process.send_signal(signal.SIGINT)
    job.wait_for("stopping")
    job.process.send_signal(signal.SIGINT)
    assert job.finish(timeout=5) == 130
    assert not (job.directory / "saved-1").exists()


def test_ranks_that_do_not_stop_in_time_are_killed(start: Callable[..., _Job]) -> None:
    job = start("stop", "save 20", stop_grace_s=0.5)
    job.wait_for("started")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(timeout=5) == 143


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rank_outlives_a_killed_supervisor(start: Callable[..., _Job], backend: str) -> None:
    job = start("wait", "stop", backend=backend)
    job.wait_for("started")
    job.process.kill()
    job.process.communicate()
    _until(lambda: job.left() == [], 3.0)


def _alone(tmp_path: Path, script: str, **env: str) -> subprocess.Popen[str]:
    """A worker without supervisor and guard."""
    (tmp_path / "worker.py").write_text(_WORKER)
    variables = {"PYTHONPATH": _SOURCE, "ALLHANDS_RUN_DIR": str(tmp_path), **env}
    command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path), script]
    child = subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE, text=True)
    _until((tmp_path / "rank-0.started").exists, 20.0)
    return child


def test_the_watchdog_sees_the_supervisor_die_without_the_kernels_help(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(["sleep", "60"])
    child = _alone(tmp_path, "wait", ALLHANDS_SUPERVISOR_PID=str(supervisor.pid))
    supervisor.kill()  # not waited for: a zombie counts as dead
    child.communicate(timeout=3)
    assert child.returncode == 143
    supervisor.wait()


def test_a_stop_is_enforced_after_its_grace(tmp_path: Path) -> None:
    child = _alone(tmp_path, "wait", ALLHANDS_STOP_GRACE_S="0.3")
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=3)
    assert child.returncode == 143


def test_the_error_file_has_the_facts(tmp_path: Path) -> None:
    child = _alone(tmp_path, "data", ALLHANDS_LOG_DIR=str(tmp_path))
    _, err = child.communicate(timeout=10)
    error = json.loads((tmp_path / "error-rank-0.json").read_text())
    assert (error["type"], error["message"], error["where"]) == ("DataError", "no samples", "train.jsonl:12")
    assert error["exit_code"] == child.returncode == 3
    assert abs(error["time"] - time.time()) < 60
    # The supervisor speaks for its ranks; a rank writes to its own log.
    assert err == ""
    assert (tmp_path / "rank-0.log").read_text() == "allhands: error: train.jsonl:12: no samples\n"


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_collectives(start: Callable[..., _Job], backend: str) -> None:
    """Two jobs at once on this computer, each with its own ports."""
    jobs = [start(f"mlx {backend}", f"mlx {backend}", backend=backend) for _ in range(2)]
    for job in jobs:
        assert job.finish() == 0, job.err
        assert "sum 3.0" in job.out
        assert "sum 3.0" in (job.directory / "logs/rank-1.log").read_text()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("script", "code"), [("raise", 1), ("kill", 137)])
def test_a_failure_between_real_collectives(start: Callable[..., _Job], backend: str, script: str, code: int) -> None:
    """Rank 0 goes on calling all_sum: with MPI it would wait for ever."""
    job = start(f"mlx {backend} on", f"mlx {backend} {script}", backend=backend)
    assert job.finish() == code, job.err
    (failed,) = job.events("failed")
    assert failed["rank"] == 1
    assert script == "kill" or "ValueError: an exception of rank 1" in failed["message"]


@_needs_mpi
def test_ranks_may_leave_mpi_without_its_finalizer(start: Callable[..., _Job]) -> None:
    job = start("mlx mpi linger", "mlx mpi linger", "mlx mpi brief", backend="mpi")
    assert job.finish() == 0, job.err
    assert "sum 6.0" in job.out


def test_free_ports_are_free_and_distinct() -> None:
    sockets, ports = reserve_ports(8, shareable=False)
    more, other_ports = reserve_ports(8, shareable=True)
    assert len({*ports, *other_ports}) == 16
    for one in sockets + more:
        one.close()


@_needs_mpi
def test_mpi_is_found_whole() -> None:
    found = find_mpi()
    assert found is not None
    assert found.mpirun.parent.parent == found.library.parent.parent or found.library.exists()
    assert found.version >= (4, 0, 0)
    environ: dict[str, str] = {}
    prepare_mpi_environment(environ)
    assert environ == {"MLX_MPI_LIBNAME": str(found.library)}
    chosen = {"MLX_MPI_LIBNAME": "/opt/libmpi.so"}
    prepare_mpi_environment(chosen)
    assert chosen == {"MLX_MPI_LIBNAME": "/opt/libmpi.so"}


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "exited with code 3"), (-11, "was killed by SIGSEGV"), (-250, "was killed by signal 250")],
)
def test_describe_exit(code: int, words: str) -> None:
    assert describe_exit(code) == words
