"""A launcher killed with SIGKILL leaves no process, no directory and no shared memory, whatever
ranks were doing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rank_jobs import ATTEMPT, SOURCE, SUPERVISOR, Job, jobs, until

from allhands.cluster import reaper
from allhands.cluster.mpi import find_mpi
from allhands.cluster.reaper import Reaper, end_processes

BACKENDS = [
    "ring",
    pytest.param(
        "mpi", marks=pytest.mark.skipif(find_mpi() is None, reason="Open MPI is not installed")
    ),
]

# Starts a stopped process and one whose child has a group of its own, says who they are, and waits.
_OWNER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from allhands.cluster.reaper import Reaper
here = Path(sys.argv[1])
nap = [sys.executable, "-c", "import time; time.sleep(60)", str(here)]
parent = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], process_group=0); time.sleep(60)"
reaper = Reaper()
(here / "private").mkdir()
(here / "private" / "file").touch()
reaper.directory(here / "private")
children = [
    subprocess.Popen(nap, start_new_session=True),
    subprocess.Popen([sys.executable, "-c", parent, *nap], start_new_session=True),
    subprocess.Popen(nap, start_new_session=True),
]
for child in children:
    reaper.group(child.pid)
reaper.forget(children[2].pid)
os.kill(children[0].pid, signal.SIGSTOP)
(here / "draft").write_text(" ".join(str(number) for number in (reaper.pid, *(child.pid for child in children))))
(here / "draft").rename(here / "pids")
time.sleep(60)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    with jobs() as begin:
        yield begin


def _helper(job: Job) -> psutil.Process:
    (found,) = [
        p for p in psutil.Process(job.process.pid).children() if reaper.__file__ in p.cmdline()
    ]
    return found


def _gone(*processes: psutil.Process) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", [SUPERVISOR, ATTEMPT], ids=["job", "attempt"])
def test_a_killed_launcher_leaves_nothing(
    start: Callable[..., Job], backend: str, program: str
) -> None:
    """Rank 1 is stopped, and rank 2 has a child in a group of its own that nobody would end with
    it.
    """
    job = start("steps", "steps stop 5 reduce", "steps child 2", program=program, backend=backend)
    until((job.directory / "has-child").exists, 20.0)
    until(lambda: any(" stopped " in line for line in job.left()), 20.0)
    private, helper = list((job.directory / "tmp").iterdir()), _helper(job)
    memory = job.facts(0)["OMPI_MCA_btl_sm_backing_directory"]
    assert private
    job.process.kill()
    job.process.communicate()
    until(lambda: _gone(helper), 10.0)
    assert job.left() == []
    if program == SUPERVISOR:
        assert list((job.directory / "tmp").iterdir()) == []
    if backend == "mpi" and sys.platform == "linux":
        assert not Path(memory).exists()


@pytest.mark.skipif(
    find_mpi() is None or sys.platform != "linux", reason="Open MPI's memory on Linux"
)
def test_ranks_killed_in_mpi_leave_no_shared_memory(start: Callable[..., Job]) -> None:
    job = start("mlx mpi on", "mlx mpi kill", backend="mpi")
    assert job.finish() == 137
    memory = job.facts(0)["OMPI_MCA_btl_sm_backing_directory"]
    assert memory.startswith("/dev/shm/allhands-")
    assert int((job.directory / "segments-1").read_text()) > 0
    assert not Path(memory).exists()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """The program above, and: its helper, the stopped one, the parent, its child, the forgotten
    one.
    """
    (tmp_path / "owner.py").write_text(_OWNER)
    command = [sys.executable, str(tmp_path / "owner.py"), str(tmp_path)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": SOURCE})
    until((tmp_path / "pids").exists, 20.0)
    found = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
    until(lambda: any(os.getpgid(child.pid) == child.pid for child in found[2].children()), 10.0)
    found.insert(3, found[2].children()[0])
    yield process, found
    for one in (process, *found):
        if one.pid and psutil.pid_exists(one.pid):
            one.kill()
    process.wait()


def test_stopped_processes_and_children_are_ended(
    owner: tuple[subprocess.Popen[bytes], list[psutil.Process]], tmp_path: Path
) -> None:
    process, (helper, stopped, parent, child, forgotten) = owner
    assert stopped.status() == psutil.STATUS_STOPPED
    assert child.pid != parent.pid == os.getsid(child.pid) != os.getpgid(child.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        helper.send_signal(number)  # as to all processes of a computer that is shut down
    time.sleep(0.2)
    assert not _gone(helper)
    assert not _gone(stopped, parent, child)
    process.kill()
    process.wait()
    until(lambda: _gone(helper), 10.0)
    assert all(_gone(one) for one in (stopped, parent, child))
    assert not (tmp_path / "private").exists()
    assert not _gone(forgotten)


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], start_new_session=True)


def test_an_owner_that_is_done_has_nothing_ended(tmp_path: Path) -> None:
    child = _sleeper()
    with Reaper() as helper:
        helper.group(child.pid)
        helper.directory(tmp_path)
        process = psutil.Process(helper.pid)
    assert _gone(process)
    assert child.poll() is None
    assert tmp_path.exists()
    child.kill()
    child.wait()


def _fail_with(child: subprocess.Popen[bytes], directory: Path) -> None:
    with Reaper() as helper:
        helper.group(child.pid)
        helper.directory(directory)
        raise ValueError("an error of the owner")


def test_an_owner_that_fails_has_everything_ended(tmp_path: Path) -> None:
    child, directory = _sleeper(), tmp_path / 'with "quotes" and\na new line'
    directory.mkdir()
    with pytest.raises(ValueError, match="an error of the owner"):
        _fail_with(child, directory)
    assert child.wait(timeout=5) == -signal.SIGKILL
    assert not directory.exists()
    assert tmp_path.exists()


def test_lines_that_are_none_keep_no_others_from_being_heeded(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    lines = [
        b"group x",
        b"forget",
        b'mark "',
        b"directory [",
        b"\xff\xfe",
        b"",
        b"dance 3",
        b"directory 3",
        b'mark "x"',
        b'directory "/"',
    ]
    lines += [
        b"directory " + json.dumps(str(private)).encode(),
        b"group 1e5",
        b"directory " + b"[" * 9000,
    ]
    command = [sys.executable, "-I", reaper.__file__]
    done = subprocess.run(
        command, input=b"".join(line + b"\n" for line in lines), capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert not private.exists()


def test_a_helper_that_was_killed_is_not_missed(tmp_path: Path) -> None:
    with Reaper() as helper:
        os.kill(helper.pid, signal.SIGKILL)
        until(lambda: _gone(psutil.Process(helper.pid)), 5.0)
        helper.directory(tmp_path)
        helper.forget(1)
    assert tmp_path.exists()


def test_ending_processes_waits_for_them() -> None:
    child, other = _sleeper(), _sleeper()
    os.kill(child.pid, signal.SIGSTOP)
    assert end_processes([child.pid])
    assert child.wait(timeout=5) == -signal.SIGKILL
    assert other.poll() is None
    assert end_processes([child.pid])  # nothing is left to end
    other.kill()
    other.wait()
