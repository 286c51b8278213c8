"""The supervisor with real processes that fail in every way we know; none may be left over.

Each test runs a supervisor as a program of its own; each rank follows a script such as ``"wait"``
or ``"exit 3"``. All processes of a test have its directory in their command lines, which is how
left-over ones are found.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rank_jobs import SOURCE, WORKER, Job, jobs, until

from allhands.cluster.attempt import describe_exit
from allhands.cluster.mpi import find_mpi, mpi_variables, prepare_mpi_environment
from allhands.cluster.processes import reserve_ports

_needs_mpi = pytest.mark.skipif(find_mpi() is None, reason="Open MPI is not installed")
_linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS has no such call")


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    with jobs() as begin:
        yield begin


BACKENDS = ["ring", pytest.param("mpi", marks=_needs_mpi)]


@_needs_mpi
@pytest.mark.parametrize(("code", "found"), [(0, 0), (5, 5)])
def test_a_stopped_guard_says_how_its_rank_has_ended(
    start: Callable[..., Job], code: int, found: int
) -> None:
    """It was waited for ten minutes."""
    job = start("pause 0.3 0", f"guard {code}", backend="mpi")
    assert job.finish(20) == found, job.err


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_clean_run(start: Callable[..., Job], backend: str) -> None:
    job = start("pause 0.3 0", "pause 0.3 0", backend=backend, cores_per_rank=1)
    assert job.finish() == 0
    assert "rank 0 does pause" in job.out
    assert "rank 1 does pause" not in job.out
    assert "rank 1 does pause" in (job.directory / "logs/rank-1.log").read_text()
    assert [len(job.events(kind)) for kind in ("launched", "started", "failed")] == [1, 1, 0]
    for rank in range(2):
        facts = job.facts(rank)
        assert [facts[n] for n in ("rank", "size", "local_rank", "local_size")] == [
            rank,
            2,
            rank,
            2,
        ]
        assert (facts["launcher"], facts["backend"], facts["tty"]) == ("allhands", backend, False)
        assert facts["OPENBLAS_NUM_THREADS"] == facts["OMP_NUM_THREADS"] == "1"
        assert stat.S_IMODE(facts["mode"]) == 0o700


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_0_keeps_the_terminal(start: Callable[..., Job], backend: str) -> None:
    ours, terminal = os.openpty()
    job = start("exit 0", "exit 0", backend=backend, output=terminal)
    os.close(terminal)
    assert job.finish() == 0
    assert [job.facts(rank)["tty"] for rank in range(2)] == [True, False]
    assert b"rank 0 does exit" in os.read(ours, 4096)
    os.close(ours)


def test_nccl_gives_each_rank_a_gpu(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    job = start("exit 0", "exit 0", backend="nccl")
    assert job.finish() == 0
    ranks = [job.facts(rank) for rank in range(2)]
    assert [(r["MLX_RANK"], r["CUDA_VISIBLE_DEVICES"]) for r in ranks] == [("0", "4"), ("1", "6")]
    assert ranks[0]["NCCL_PORT"] == ranks[1]["NCCL_PORT"]
    job = start("exit 0", "exit 0", "exit 0", backend="nccl")
    assert job.finish() == 7
    assert "3 processes for 2 GPUs" in job.err


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_of_other_back_ends_divide_the_gpus(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    job = start("exit 0", "exit 0", "exit 0", backend=backend)
    assert job.finish() == 0
    assert [job.facts(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(3)] == ["4", "6", "4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    job = start("exit 0", "exit 0", backend=backend)
    assert job.finish() == 0
    assert [job.facts(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["5", "5"]


def test_gpus_are_those_that_the_driver_names(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-1)'\necho 'GPU 1: H200 (UUID: GPU-2)'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job = start("exit 0", "exit 0", backend="ring")
    assert job.finish() == 0
    assert [job.facts(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["0", "1"]


@_linux
def test_each_rank_has_its_own_cores(start: Callable[..., Job]) -> None:
    job = start("exit 0", "exit 0", "exit 0", cores_per_rank=1)
    assert job.finish() == 0
    allowed = sorted(os.sched_getaffinity(0))
    assert [job.facts(r)["cores"] for r in range(3)] == [
        [allowed[r % len(allowed)]] for r in range(3)
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("exit 3", 3, "rank 1 exited with code 3"),
        ("kill", 137, "rank 1 was killed by SIGKILL"),
        ("data", 3, "DataError: no samples"),
    ],
)
def test_a_failing_rank_ends_the_job(
    start: Callable[..., Job], backend: str, script: str, code: int, words: str
) -> None:
    job = start("wait", script, backend=backend)
    assert job.finish() == code
    (failed,) = job.events("failed")
    assert (failed["rank"], failed["exit_code"]) == (1, code)
    assert words in failed["message"]
    assert f"rank 1 does {script.split()[0]}" in failed["log_tail"]


def test_the_consequence_does_not_hide_the_cause(start: Callable[..., Job]) -> None:
    job = start("lost", "pause 0.4 5", "lost")
    assert job.finish() == 5
    assert [event["rank"] for event in job.events("failed")] == [1]


def test_a_lost_peer_alone_is_reported_as_such(start: Callable[..., Job]) -> None:
    job = start("lost", "exit 0")
    assert job.finish() == 8
    assert "PeerLostError" in job.events("failed")[0]["message"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stopped_rank_is_ended_too(start: Callable[..., Job], backend: str) -> None:
    job = start("stop", "pause 0.3 4", backend=backend)
    assert job.finish() == 4


def test_ranks_that_go_on_alone_are_ended(start: Callable[..., Job]) -> None:
    job = start("exit 0", "wait", finish_grace_s=0.3)
    assert job.finish() == 7
    message = job.events("failed")[0]["message"]
    assert (found := re.search(r"had finished ([\d.]+) s before the others", message)), message
    assert 0.3 <= float(found[1]) < 5.0


def test_a_rank_that_does_not_start_is_named(start: Callable[..., Job]) -> None:
    job = start("silent", "pause 60 0", start_deadline_s=1.5)
    assert job.finish() == 7
    (failed,) = job.events("failed")
    assert (
        "rank 0 did not finish starting within 1.5 s" in failed["message"]
        or "rank 0, 1" in failed["message"]
    )
    assert "give it more time with --start-timeout-s" in failed["explanation"]
    assert job.err == ""


def test_a_rank_at_work_on_the_data_may_take_longer_to_start(start: Callable[..., Job]) -> None:
    # Twice the deadline at work, then done; the other rank waits for the first without a word.
    job = start("busy 3 0", "busy 0.2 2.8", start_deadline_s=1.5)
    assert job.finish() == 0


def test_a_rank_that_stops_working_on_the_data_is_named(start: Callable[..., Job]) -> None:
    job = start("busy 1 60", start_deadline_s=1.5)
    assert job.finish() == 7
    assert "rank 0 did not finish starting within 1.5 s" in job.events("failed")[0]["message"]


def test_a_command_that_does_not_exist(start: Callable[..., Job]) -> None:
    job = start("exit 0", "exit 0", command=["no-such-command"])
    assert job.finish() == 127
    assert "cannot start 'no-such-command'" in job.err


def test_taken_ports_are_tried_once_more(start: Callable[..., Job]) -> None:
    job = start("bind", "bind")
    assert job.finish() == 0
    assert len(job.events("retrying")) == 1
    assert job.events("failed") == []


@pytest.mark.parametrize(
    "error", ["Couldn't connect (error: 111)", "Couldn't bind socket (error: 99)"]
)
def test_no_port_is_said_to_be_taken_where_none_is(start: Callable[..., Job], error: str) -> None:
    """Not of who cannot connect to another, nor of who was given an address of nobody."""
    job = start(f"bind [ring] {error}", f"bind [ring] {error}")
    assert job.finish() == 7
    assert job.events("retrying") == []
    (failed,) = job.events("failed")
    assert error in failed["message"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_signal_lets_every_rank_save(
    start: Callable[..., Job], backend: str, number: int, code: int
) -> None:
    job = start("save 0", "save 1.2", backend=backend)
    job.wait_for("started")
    job.process.send_signal(number)
    assert job.finish() == code
    assert all((job.directory / f"saved-{rank}").exists() for rank in range(2))
    assert job.events("failed") == []


def test_a_stop_during_start_up_does_not_wait(start: Callable[..., Job]) -> None:
    """Rank 0 waits in MLX's init for a peer that is not coming, deaf to signals."""
    job = start("mlx ring", "silent")
    until(
        lambda: (
            (job.directory / "facts-1.json").exists() and (job.directory / "facts-0.json").exists()
        ),
        20.0,
    )
    job.process.send_signal(signal.SIGINT)
    assert job.finish(timeout=8) == 130


def test_the_second_stop_signal_does_not_wait(start: Callable[..., Job]) -> None:
    job = start("wait", "save 20")
    job.wait_for("started")
    job.process.send_signal(signal.SIGINT)
    job.wait_for("stopping")
    job.process.send_signal(signal.SIGINT)
    assert job.finish(timeout=5) == 130
    assert not (job.directory / "saved-1").exists()


def test_an_echo_of_a_stop_signal_does_not_end_the_save(start: Callable[..., Job]) -> None:
    job = start("save 1", "save 1")
    job.wait_for("started")
    job.process.send_signal(signal.SIGTERM)
    job.wait_for("stopping")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(timeout=10) == 143
    assert (job.directory / "saved-1").exists()


def test_ranks_that_do_not_stop_in_time_are_killed(start: Callable[..., Job]) -> None:
    job = start("stop", "save 20", stop_grace_s=0.5)
    job.wait_for("started")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(timeout=5) == 143


def test_a_rank_that_stands_still_is_not_waited_for_when_all_are_told_to_stop(
    start: Callable[..., Job],
) -> None:
    job = start("stop", "save 20")  # with a minute to save
    job.wait_for("started")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(timeout=10) == 143
    (event,) = job.events("cancelling")
    assert event["message"].startswith("rank 0 stands still")


def _alone(tmp_path: Path, script: str, **env: str) -> subprocess.Popen[str]:
    """A worker without supervisor and guard."""
    (tmp_path / "worker.py").write_text(WORKER)
    variables = {"PYTHONPATH": SOURCE, "ALLHANDS_RUN_DIR": str(tmp_path), **env}
    command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path), script]
    child = subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE, text=True)
    until((tmp_path / "rank-0.started").exists, 20.0)
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
    assert (error["type"], error["message"], error["where"]) == (
        "DataError",
        "no samples",
        "train.jsonl:12",
    )
    assert error["exit_code"] == child.returncode == 3
    assert abs(error["time"] - time.time()) < 60
    # The supervisor speaks for its ranks; a rank writes to its own log.
    assert err == ""
    assert (tmp_path / "rank-0.log").read_text() == "allhands: error: train.jsonl:12: no samples\n"


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_collectives(start: Callable[..., Job], backend: str) -> None:
    """Two jobs at once on this computer, each with its own ports."""
    jobs = [start(f"mlx {backend}", f"mlx {backend}", backend=backend) for _ in range(2)]
    for job in jobs:
        assert job.finish() == 0, job.err
        assert "sum 3.0" in job.out
        assert "sum 3.0" in (job.directory / "logs/rank-1.log").read_text()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("script", "code"), [("raise", 1), ("kill", 137)])
def test_a_failure_between_real_collectives(
    start: Callable[..., Job], backend: str, script: str, code: int
) -> None:
    """Rank 0 goes on calling all_sum: with MPI it would wait for ever."""
    job = start(f"mlx {backend} on", f"mlx {backend} {script}", backend=backend)
    assert job.finish() == code, job.err
    (failed,) = job.events("failed")
    assert failed["rank"] == 1
    assert script == "kill" or "ValueError: an exception of rank 1" in failed["message"]


@_needs_mpi
def test_ranks_may_leave_mpi_without_its_finalizer(start: Callable[..., Job]) -> None:
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


@_needs_mpi
def test_mpi_looks_at_no_fabric_on_one_computer_unless_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_mpi()
    assert found is not None
    monkeypatch.delenv("OMPI_MCA_btl", raising=False)
    assert mpi_variables(found, tmp_path)["OMPI_MCA_btl"] == "^ofi"
    monkeypatch.setenv("OMPI_MCA_btl", "self,tcp")
    assert mpi_variables(found, tmp_path)["OMPI_MCA_btl"] == "self,tcp"


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "exited with code 3"), (-11, "was killed by SIGSEGV"), (-250, "was killed by signal 250")],
)
def test_describe_exit(code: int, words: str) -> None:
    assert describe_exit(code) == words
