"""Processes that have left their rank's group and session are ended with the job, and nobody else's
are.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rank_jobs import SOURCE, Job, jobs, until

from allhands.cluster.mpi import find_mpi
from allhands.cluster.ranks import LaunchSpec, Place, RankProcesses
from allhands.cluster.reaper import MARK, end_processes
from allhands.cluster.remote import start_remote

needs_mpi = pytest.mark.skipif(find_mpi() is None, reason="Open MPI is not installed")
BACKENDS = ["ring", pytest.param("mpi", marks=needs_mpi)]
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# A rank that leaves a daemon (two forks, a session of its own) behind; what it does next is in its
# second word.
_RANK = """
import os, signal, sys, time
from pathlib import Path
from allhands.cluster import worker
from allhands.cluster.environment import recognise
here, then = Path(sys.argv[1]), sys.argv[2].split(",")
launch = recognise(os.environ)
with worker.install(launch, os.environ) as context:
    context.mark_started()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            draft = here / f"draft-{launch.rank}"
            draft.write_text(f"{os.getpid()} {os.getpgid(0)} {os.getsid(0)} {os.environ['ALLHANDS_RUN_DIR']}")
            draft.rename(here / f"daemon-{launch.rank}-{os.environ.get('ALLHANDS_ATTEMPT', '1')}")
            os.execvp(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", str(here)])
        os._exit(0)
    os.wait()
    while len(list(here.glob("daemon-*"))) < launch.size:
        time.sleep(0.01)
    match then[launch.rank]:
        case "fail":
            os._exit(3)
        case "wait":
            time.sleep(60)
"""

# Ends every 20 ms, having started its successor in a session of its own; ten seconds in all.
_CHAIN = """
import os, time
for _ in range(500):
    time.sleep(0.02)
    if os.fork():
        os._exit(0)
    os.setsid()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    with jobs() as begin:
        yield begin


def daemons(job: Job, count: int) -> list[psutil.Process]:
    """The daemons, once all are there, outside the sessions of all others and not our children."""
    until(lambda: len(list(job.directory.glob("daemon-*"))) == count, 20.0)
    facts = [path.read_text().split() for path in sorted(job.directory.glob("daemon-*"))]
    for pid, group, session, mark in facts:
        assert pid not in (group, session)
        assert Path(mark).is_relative_to(job.directory / "tmp")
    return [psutil.Process(int(pid)) for pid, *_ in facts if psutil.pid_exists(int(pid))]


def gone(*processes: psutil.Process) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("then", "code"), [("end,end", 0), ("wait,fail", 3)])
def test_daemons_end_with_the_job(
    start: Callable[..., Job], then: str, code: int, backend: str
) -> None:
    job = start(*then.split(","), files={"worker.py": _RANK}, backend=backend)
    assert job.finish() == code  # and nothing is left
    assert gone(*daemons(job, 2))


@pytest.mark.parametrize(
    ("number", "backend"),
    [
        (signal.SIGKILL, "ring"),
        (signal.SIGHUP, "ring"),
        pytest.param(signal.SIGKILL, "mpi", marks=needs_mpi),
    ],
)
def test_daemons_end_when_the_supervisor_is_killed(
    start: Callable[..., Job], number: int, backend: str
) -> None:
    """By ``kill -9``, or with its terminal."""
    job = start("wait", "wait", files={"worker.py": _RANK}, backend=backend, stop_grace_s=1.0)
    found = daemons(job, 2)
    assert len(found) == 2
    assert not gone(found[0])
    assert not gone(found[1])
    job.process.send_signal(number)
    job.process.wait()
    until(lambda: gone(*found), 10.0)
    until(lambda: job.left() == [] and list((job.directory / "tmp").iterdir()) == [], 10.0)


# --- on another computer --------------------------------------------------------------------------


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[tuple[RankProcesses, psutil.Process]]:
    """A rank started by an agent, as on another computer, and its daemon."""
    (tmp_path / "worker.py").write_text(_RANK)
    command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path), "wait"]
    places = (Place("here", 1),)
    spec = LaunchSpec(
        command, 1, "ring", tmp_path / "logs", places=places, env={"PYTHONPATH": SOURCE}
    )
    ranks = start_remote(spec, tmp_path / "run")
    try:
        until((tmp_path / "daemon-0-1").exists, 20.0)
        daemon = psutil.Process(int((tmp_path / "daemon-0-1").read_text().split()[0]))
        assert not gone(daemon)
        yield ranks, daemon
    finally:
        ranks.kill()
    if not gone(daemon):
        daemon.kill()


def test_an_agent_ends_daemons(remote: tuple[RankProcesses, psutil.Process]) -> None:
    ranks, daemon = remote
    ranks.kill()
    assert gone(daemon)


def test_daemons_end_when_their_agent_is_killed(
    remote: tuple[RankProcesses, psutil.Process],
) -> None:
    _, daemon = remote
    (agent,) = [p for p in psutil.Process().children() if "allhands.cluster.agent" in p.cmdline()]
    agent.kill()
    until(lambda: gone(daemon), 10.0)


# --- who bears a mark -----------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a process in a session of its own, with that mark if any."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(mark: str | None, *command: str, **more: Any) -> subprocess.Popen[bytes]:
        env = {name: value for name, value in os.environ.items() if name != MARK}
        env |= {} if mark is None else {MARK: mark}
        started.append(
            subprocess.Popen(command or ("sleep", "60"), env=env, start_new_session=True, **more)
        )
        return started[-1]

    yield begin
    for one in started:
        one.kill()
        one.wait()


@needs_proc
def test_only_the_attempt_itself_and_what_is_below_it(
    tmp_path: Path, sleeper: Callable[..., subprocess.Popen[bytes]]
) -> None:
    mark = str(tmp_path / "a b" / "1")
    ended = [sleeper(mark), sleeper(f"{mark}/nested/2")]
    os.kill(ended[0].pid, signal.SIGSTOP)
    spared = [
        sleeper(other)
        for other in (None, "", f"{mark}0", str(tmp_path / "a b"), str(tmp_path / "a b" / "2"))
    ]
    in_words = sleeper(None, sys.executable, "-c", "import time; time.sleep(60)", f"{MARK}={mark}")
    assert end_processes([], [mark])
    assert [one.wait(timeout=5) for one in ended] == [-signal.SIGKILL] * 2
    assert [one.poll() for one in (*spared, in_words)] == [None] * 6
    assert end_processes([], [mark])  # nothing is left to end


@needs_proc
@pytest.mark.skipif(os.geteuid() != 0, reason="starts a process as another user")
def test_processes_of_other_users_are_left_alone(
    tmp_path: Path, sleeper: Callable[..., subprocess.Popen[bytes]]
) -> None:
    other = sleeper(str(tmp_path), user=65534)
    assert end_processes([], [str(tmp_path)])
    assert other.poll() is None


@needs_proc
def test_a_process_that_starts_another_and_ends_again_and_again(
    tmp_path: Path, sleeper: Callable[..., subprocess.Popen[bytes]]
) -> None:
    sleeper(str(tmp_path), sys.executable, "-I", "-S", "-c", _CHAIN, str(tmp_path))
    # One look may come between the end of one and the beginning of the next.
    until(lambda: bool(alive(str(tmp_path))), 20.0)
    assert end_processes([], [str(tmp_path)])
    for _ in range(30):
        assert alive(str(tmp_path)) == []
        time.sleep(0.01)


def alive(word: str) -> list[int]:
    """Processes with ``word`` in their command lines."""
    found = psutil.process_iter(["cmdline", "status"])
    return [
        p.pid
        for p in found
        if word in (p.info["cmdline"] or ()) and p.info["status"] != psutil.STATUS_ZOMBIE
    ]


@needs_proc
def test_whoever_ends_them_is_spared_and_so_is_a_nested_jobs_helper(tmp_path: Path) -> None:
    """A supervisor within a rank is ended with it, and its helper then ends what it had started."""
    program = f"""
import os, subprocess, sys, time
from pathlib import Path
from allhands.cluster.reaper import Reaper, end_processes
inner = Path(sys.argv[1], "inner")
helper = Reaper()
helper.mark(inner)
quiet = dict(os.environ, {MARK}=str(inner))
child = subprocess.Popen(["sleep", "60"], env=quiet, start_new_session=True)
assert end_processes([], [os.environ["{MARK}"]])
Path(sys.argv[1], "draft").write_text(f"{{helper.pid}} {{child.pid}}")
Path(sys.argv[1], "draft").rename(Path(sys.argv[1], "pids"))
time.sleep(60)
"""
    outer = str(tmp_path / "outer")
    env = os.environ | {MARK: outer, "PYTHONPATH": SOURCE}
    nested = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], env=env, start_new_session=True
    )
    try:
        until((tmp_path / "pids").exists, 20.0)
        helper, child = (
            psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()
        )
        assert nested.poll() is None
        assert not gone(helper)
        assert not gone(child)
        assert end_processes([], [outer])
        assert nested.wait(timeout=5) == -signal.SIGKILL
        until(lambda: gone(helper, child), 10.0)
    finally:
        nested.kill()
        nested.wait()


@pytest.mark.parametrize("mark", ["", "/", "relative/path"])
def test_a_mark_that_could_be_anybodys_is_refused(mark: str) -> None:
    with pytest.raises(AssertionError):
        end_processes([], [mark])
