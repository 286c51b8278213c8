"""What every benchmark needs: peers' environments, children that are measured, and facts about the
machine.

Kept small and free of MLX and numpy on purpose: Linux counts the memory of the process that starts
a child into that child's peak (``ru_maxrss`` survives ``exec``), so a fat parent would spoil every
figure.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from records import Row, environment_lines, make_record, work_rows, write_record

ROOT = Path(__file__).resolve().parent.parent
# Settings of the person's shell that would change what a peer computes with.
_STRIPPED = (
    "PYTHONPATH",
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "ALLHANDS_BLAS",
    "LD_PRELOAD",
)
# And those with which OpenBLAS takes kernels of another processor than this one.
_STRIPPED += ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


class BenchmarkError(Exception):
    """The benchmark cannot go on; the text says why and where to look."""


def say(text: str) -> None:
    """What happens, beside the result on standard output."""
    print(text, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """An option's whole number above 0."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def peer_list(peers: Sequence[str], text: str) -> tuple[str, ...]:
    """Those of ``peers`` that a comma-separated option names, in the order in which they run."""
    asked = {part.strip() for part in text.split(",") if part.strip()}
    if unknown := sorted(asked - set(peers)):
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(peers)}")
    if not asked:
        raise argparse.ArgumentTypeError("no peer named")
    return tuple(peer for peer in peers if peer in asked)


def pythons(text: str) -> dict[str, str]:
    """An option that says which Python has MLX and allhands, and which has PyTorch:
    ``mlx=PATH,torch=PATH``.
    """
    found = dict(part.partition("=")[::2] for part in text.split(","))
    if not found.keys() <= {"mlx", "torch"} or not all(found.values()):
        raise argparse.ArgumentTypeError("give mlx=PATH,torch=PATH")
    return found


@dataclass(frozen=True)
class Measured:
    """A child that ended well.

    Attributes:
        wall_s: from start to exit.
        cpu_s: user and system time.
        peak_rss_bytes: the most memory it held at once (of the largest process, if it started
            others).
    """

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int


def run_measured(
    command: Sequence[str], log: Path, environ: Mapping[str, str], timeout_s: float
) -> Measured:
    """Run ``command`` to its end, its output into ``log``.

    Raises:
        BenchmarkError: it failed or took longer than ``timeout_s`` (it is killed then).
    """
    started = time.perf_counter()
    with log.open("w", encoding="utf-8") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
        )
        try:
            status, usage = _wait(child.pid, started + timeout_s)
        except BaseException:
            with suppress(ProcessLookupError, ChildProcessError):
                os.killpg(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
            raise
        finally:
            child.returncode = 0  # reaped here: Popen must not wait for it again
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise BenchmarkError(
            f"{Path(command[0]).name} ended with code {code}; the end of {log}:\n{tail}"
        )
    unit = 1 if sys.platform == "darwin" else 1024
    return Measured(
        time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit
    )


def _wait(pid: int, deadline: float) -> tuple[int, resource.struct_rusage]:
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return status, usage
        if time.perf_counter() > deadline:
            raise BenchmarkError(
                "a peer did not finish in time: raise --timeout, or ask for fewer steps"
            )
        time.sleep(0.1)


def clean_environ(**added: str) -> dict[str, str]:
    """This process's environment for a peer: nothing that steers its threads or imports, no
    network.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _STRIPPED}
    return {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **added}


def python_path() -> str:
    """This project's own source, and what the person's PYTHONPATH has."""
    own = str(Path(__file__).resolve().parent.parent / "src")
    return os.pathsep.join([own, *filter(None, [os.environ.get("PYTHONPATH")])])


def make_environment(directory: Path, attempts: Sequence[Sequence[str]]) -> Path:
    """Python of a virtual environment in ``directory``, made once with the first pip arguments that
    work.

    Args:
        attempts: arguments of ``pip install``, best first.

    Raises:
        BenchmarkError: none of them could be installed.
    """
    python = directory / "bin" / "python"
    wanted = hashlib.sha256(
        json.dumps([platform.python_version(), *map(list, attempts)]).encode()
    ).hexdigest()
    stamp = directory / "complete"
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True, env=clean_environ())
    errors: list[str] = []
    for arguments in attempts:
        print(f"pip install {' '.join(arguments)}", file=sys.stderr)
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *arguments,
        ]
        done = subprocess.run(
            command, env=clean_environ(), capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            stamp.write_text(wanted)
            return python
        errors.append(done.stderr.strip()[-500:])
    raise BenchmarkError("pip could not make an environment for a peer:\n" + "\n".join(errors))


def versions(python: Path, packages: Sequence[str], **environ: str) -> dict[str, str]:
    """Versions of ``packages``, those that are there, in the environment of ``python``; ``environ``
    is added to it.
    """
    code = (
        "import importlib.metadata as m, json, platform, sys\n"
        # What is imported is the first on the path.
        "found = {d.metadata['Name'].lower(): d.version for d in reversed(list(m.distributions()))}\n"
        "print(json.dumps({'python': platform.python_version(), **{n: found[n] for n in sys.argv[1:] if n in found}}))"
    )
    command = [str(python), "-c", code, *packages]
    done = subprocess.run(
        command, env=clean_environ(**environ), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def num_cores() -> int:
    """Processor cores that this process, and so each peer, may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "os": _os_name(),
        "gpus": _gpus(),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def quiet_machine() -> dict[str, Any]:
    """Facts about the machine, with a warning if it has other work."""
    facts = machine()
    if facts["load_at_start"] > 0.3 * facts["cores"]:
        say(
            f"warning: the machine is not quiet (load {facts['load_at_start']}): timings will not be comparable"
        )
    return facts


def run_benchmark(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Path, dict[str, Any]], dict[str, Any]],
    report: Callable[[dict[str, Any]], str],
    rows: Callable[[dict[str, Any]], Iterable[Row]] = work_rows,
) -> int:
    """Measure in a temporary directory below ``options.scratch``, print the report; with
    ``options.write`` record it.

    Args:
        rows: the figures to keep, in the shape of all benchmarks, of what ``measure`` has found.

    Returns:
        The exit code; also 1 if ``measure`` has found bars that are ``missed``.
    """
    facts = quiet_machine()
    try:
        if options.scratch is not None:
            options.scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f"allhands-{name}-", dir=options.scratch
        ) as directory:
            found = measure(options, Path(directory), facts)
    except BenchmarkError as error:
        say(f"error: {error}")
        return 1
    now = datetime.datetime.now(datetime.UTC).strftime("%H:%M:%S")
    record = make_record(name, found, rows(found), now)
    print("\n".join([*environment_lines(record), "", report(found)]))
    if options.write:
        say(f"written: {write_record(record)}")
    return 1 if found.get("missed") else 0


def conditions(
    options: argparse.Namespace, kept: Iterable[str], facts: dict[str, Any], packages: Sequence[str]
) -> dict[str, Any]:
    """What a benchmark of this project's source in this Python says of its run: when, of what,
    where and how.

    Args:
        kept: names of the options that tell how.
    """
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": facts,
        "versions": versions(Path(sys.executable), packages, PYTHONPATH=python_path()),
        "settings": {name: getattr(options, name) for name in kept},
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return platform.processor() or platform.machine()


def _os_name() -> str:
    """For people: the distribution, or the version of macOS."""
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def _gpus() -> list[str]:
    """Name and power limit of each NVIDIA GPU."""
    command = ["nvidia-smi", "--query-gpu=name,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )[:-1]
    except (OSError, subprocess.CalledProcessError):
        return []


def git_commit() -> str:
    """The commit of the tree, with ``+`` if it has changes; ``unknown`` outside of git.

    ``ALLHANDS_BENCHMARK_COMMIT`` says it for a copy of the tree that is no checkout.
    """
    if told := os.environ.get("ALLHANDS_BENCHMARK_COMMIT"):
        return told
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
