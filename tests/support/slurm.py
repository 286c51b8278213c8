"""A Slurm of one's own: munge, slurmctld and a slurmd a node, with state, key, sockets and ports
that nobody shares.

No service of the system is touched. The node is this computer, or each of the computers of
:mod:`namespaces`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hostile import until
from namespaces import Cluster

from allhands.cluster.processes import reserve_ports

KILL_WAIT_S = 7  # not the usual 30, so that it can be told from a guess
_TOOLS = (
    "munged",
    "mungekey",
    "slurmctld",
    "slurmd",
    "srun",
    "sbatch",
    "salloc",
    "scancel",
    "scontrol",
    "sinfo",
)
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_UP_S = 30.0


@dataclass
class Slurm:
    """A running workload manager.

    Attributes:
        directory: its configuration, state and logs; ``logs`` of the daemons are ``*.log``.
        nodes: the names of its nodes.
        env: what its commands need in their environment.
    """

    directory: Path
    nodes: tuple[str, ...]
    env: dict[str, str]

    def run(
        self,
        *argv: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm's and wait for its end."""
        variables = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **self.env, **(env or {})}
        return subprocess.run(
            [str(word) for word in argv],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=variables,
            cwd=cwd,
            timeout=timeout,
            check=False,
        )

    def ask(self, *argv: str) -> str:
        """What a command that must succeed says."""
        done = self.run(*argv)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(
        self, *argv: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> str:
        """``sbatch`` with these arguments; the number of the job."""
        done = self.run("sbatch", "--parsable", *argv, env=env, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def facts(self, job: str) -> dict[str, str]:
        """``JobState``, ``ExitCode``, ``Restarts`` and the like of a job."""
        words = self.ask("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, state: str, timeout: float) -> dict[str, str]:
        """Return the job's facts when it is in ``state``; fails if it ends otherwise."""
        found: dict[str, str] = {}

        def there() -> bool:
            found.update(self.facts(job))
            ended = found["JobState"] in (
                "COMPLETED",
                "FAILED",
                "CANCELLED",
                "TIMEOUT",
                "NODE_FAIL",
            )
            assert not ended or found["JobState"] == state, found
            return found["JobState"] == state

        until(there, timeout, f"job {job} is not {state}")
        return found

    def wait_until_idle(self) -> None:
        """Return when no job is left and every node is free."""

        def idle() -> bool:
            states = self.ask("sinfo", "--noheader", "--Node", "--format=%T").split()
            return states == ["idle"] * len(self.nodes) and not self.ask("squeue", "--noheader")

        until(idle, 15.0, "the nodes are not idle")

    def end_all(self) -> None:
        """Cancel what a failed test has left; steps, and what they have started, outlive slurmd."""
        if self.run("squeue", "--noheader").stdout:
            self.run("scancel", f"--user={_user()}")
        deadline = time.monotonic() + KILL_WAIT_S
        while left := _steps(str(self.directory)):
            if time.monotonic() > deadline:
                for process in left:
                    with suppress(psutil.Error):
                        process.kill()
                return
            time.sleep(0.05)

    def logs(self) -> str:
        """The last words of the daemons."""
        return "\n".join(
            f"{log.name}: {log.read_text()[-2000:]}" for log in sorted(self.directory.glob("*.log"))
        )


@contextmanager
def slurm(cluster: Cluster | None = None) -> Iterator[Slurm]:
    """Start a Slurm with one node on this computer, or with those of ``cluster``; end it, with its
    jobs, afterwards.

    Skips the test where Slurm is not installed.
    """
    require()
    with ExitStack() as stack:
        # A short path, and one that munge finds safe: for its socket all users must be able to
        # enter.
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="ahslurm-", dir="/tmp"))
        )
        directory.chmod(0o755)
        nodes = tuple(cluster.names) if cluster else ("alone",)
        made = Slurm(directory, nodes, {"SLURM_CONF": str(directory / "slurm.conf"), "PATH": _PATH})
        _start_munge(directory, stack)
        _write_configuration(made, cluster)
        daemon = ("-D", "-f", str(directory / "slurm.conf"))
        _start(["slurmctld", *daemon], directory / "slurmctld.log", stack)
        for name in nodes:
            inside = cluster.command(name, []) if cluster else []
            _start(
                [*inside, "slurmd", *daemon, "-N", name], directory / f"slurmd-{name}.log", stack
            )
        stack.callback(made.end_all)
        _wait_until_up(made)
        yield made


def require() -> None:
    """Skip the test where Slurm or munge is missing, or where its variables are another Slurm's."""
    if sys.platform != "linux":
        pytest.skip("Slurm runs on Linux")
    if "SLURM_JOB_ID" in os.environ:
        pytest.skip("this is a job of Slurm itself")
    if missing := [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (scripts/install_test_tools.sh)")


def _start_munge(directory: Path, stack: ExitStack) -> None:
    files = {name: directory / f"munge.{name}" for name in ("key", "socket", "pid", "seed")}
    subprocess.run(
        ["mungekey", "--create", f"--keyfile={files['key']}"],
        check=True,
        capture_output=True,
        env=_environment(),
    )
    options = [f"--{name}-file={files[name]}" for name in ("key", "pid", "seed")]
    log = directory / "munged.log"
    _start(
        ["munged", "--foreground", f"--socket={files['socket']}", f"--log-file={log}", *options],
        log,
        stack,
    )
    until(files["socket"].exists, 10.0, f"munge does not start: {log.read_text()}")


def _write_configuration(made: Slurm, cluster: Cluster | None) -> None:
    """Nodes are named as told; without control groups, so that no rights and no delegation are
    needed.
    """
    held, ports = reserve_ports(2, shareable=False)
    for one in held:
        one.close()
    directory = made.directory
    settings = {
        "ClusterName": "allhandstest",
        "SlurmctldHost": f"{socket.gethostname()}({cluster.address if cluster else '127.0.0.1'})",
        "SlurmctldPort": ports[0],
        "SlurmdPort": ports[1],
        "SlurmUser": _user(),
        "SlurmdUser": _user(),
        "AuthType": "auth/munge",
        # A job that is put back into the queue waits until its credential has expired: two minutes
        # by default.
        "AuthInfo": f"socket={directory / 'munge.socket'},cred_expire=5",
        "StateSaveLocation": directory / "state",
        "SlurmdSpoolDir": directory / "spool-%n",
        "SlurmctldPidFile": directory / "slurmctld.pid",
        "SlurmdPidFile": directory / "slurmd-%n.pid",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "MailProg": "/bin/true",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,bf_interval=2",
        "KillWait": KILL_WAIT_S,
        "ReturnToService": 2,
    }
    (directory / "state").mkdir()
    lines = [f"{name}={value}" for name, value in settings.items()]
    for name in made.nodes:
        (directory / f"spool-{name}").mkdir()
        place = (
            (name, cluster.nodes[name].address) if cluster else (socket.gethostname(), "127.0.0.1")
        )
        # More cores than there may be, for jobs that want them.
        lines.append(
            f"NodeName={name} NodeHostname={place[0]} NodeAddr={place[1]} CPUs=8 RealMemory=8000"
        )
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    lines.append("SlurmdParameters=config_overrides")
    (directory / "slurm.conf").write_text("\n".join(lines) + "\n")


def _wait_until_up(made: Slurm) -> None:
    deadline = time.monotonic() + _UP_S
    while True:
        done = made.run("sinfo", "--noheader", "--Node", "--format=%T")
        if done.returncode == 0 and done.stdout.split() == ["idle"] * len(made.nodes):
            return
        assert time.monotonic() < deadline, (
            f"Slurm does not come up: {done.stdout}{done.stderr}\n{made.logs()}"
        )
        time.sleep(0.1)


def _start(argv: Sequence[str], log: Path, stack: ExitStack) -> None:
    with log.open("ab") as stream:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=_environment(),
            start_new_session=True,
        )
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _steps(mark: str) -> list[psutil.Process]:
    """What the steps of this Slurm have started, and the daemons of the steps themselves."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environ, ended = process.environ(), process.status() == psutil.STATUS_ZOMBIE
            started = "SLURM_JOB_ID" in environ and environ.get("SLURM_CONF", "").startswith(mark)
            own = process.name() == "slurmstepd" and any(
                mark in file.path for file in process.open_files()
            )
            if not ended and (started or own):
                found.append(process)
    return found


def _user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _PATH}
