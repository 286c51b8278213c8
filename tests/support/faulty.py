"""Runs that are made to fail on purpose: how they are started, what they leave, and what must not
be left of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from command_line import changed
from hostile import Job, until
from safetensors.numpy import load_file
from tiny import write_chat_data, write_model

from allhands.checkpoints import checkpoints_in
from allhands.observe.journal import read_events
from allhands.observe.metrics import read_metrics
from allhands.runtime.faults import FiredFault, fired

LORA = '{"rank": 4, "scale": 10.0, "dropout": 0.1}'
ITERS = 30
SAVE_EVERY = 5


def digest(file: Path) -> str:
    """SHA-256 over names, types, shapes and bits of the arrays of a safetensors file."""
    total = hashlib.sha256()
    for name, array in sorted(load_file(file).items()):
        total.update(f"{name} {array.dtype} {array.shape} ".encode())
        total.update(array.tobytes())
    return total.hexdigest()


@dataclass(frozen=True)
class Result:
    """What a run must have in common with one that was never disturbed, bit for bit."""

    weights: str
    optimizer: str
    losses: tuple[tuple[int, float], ...]
    valid_losses: tuple[tuple[int, float], ...]
    trained_tokens: int
    directory: Path = field(compare=False)


def result(directory: Path) -> Result:
    """The end of the run in ``directory``, with the history that a person sees of it."""
    told = read_metrics(directory)
    last = checkpoints_in(directory)[0]
    weights = digest(directory / "adapters.safetensors")
    assert digest(last / "adapters.safetensors") == weights
    return Result(
        weights,
        digest(last / "optimizer.safetensors"),
        tuple((report.step, report.loss) for report in told.train),
        tuple((report.step, report.loss) for report in told.valid),
        told.train[-1].trained_tokens,
        directory,
    )


@dataclass(frozen=True)
class Footprint:
    """What a running job holds: directories of its own, and ports that it listens on."""

    directories: frozenset[Path]
    ports: frozenset[int]
    processes: frozenset[int]

    @classmethod
    def of(cls, job: Job) -> Footprint:
        """What can be seen of it now."""
        directories, ports = set[Path](), set[int]()
        found = job.processes()
        for process in found.values():
            with contextlib.suppress(psutil.Error):
                run_dir = process.environ().get("ALLHANDS_RUN_DIR")
                directories |= {Path(run_dir), Path(run_dir).parent} if run_dir else set()
                ports |= {
                    c.laddr.port
                    for c in process.net_connections("inet")
                    if c.status == psutil.CONN_LISTEN
                }
        return cls(frozenset(directories), frozenset(ports), frozenset(found))

    def assert_gone(self) -> None:
        """Nothing of it may be left."""
        left = [path for path in self.directories if path.exists()]
        assert not left, left
        listening = {
            c.laddr.port for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN
        }
        assert not self.ports & listening, self.ports & listening


def share_compiled(temporary: Path) -> None:
    """Let runs with a directory for temporary files of their own find what MLX has compiled for
    others: seconds.
    """
    usual = Path(tempfile.gettempdir(), "mlx")
    usual.mkdir(exist_ok=True)
    (temporary / "mlx").symlink_to(usual)


def files_left(temporary: Path) -> list[str]:
    """What lies in a directory for temporary files, less what MLX keeps there."""
    return sorted(path.name for path in temporary.iterdir() if path.name != "mlx")


class Bench:
    """Starts runs on one tiny model; each in a directory of its own, which stands in all its
    command lines.

    Args:
        directory: for what should be kept; temporary files go elsewhere, under a short path.
        layers: blocks of the model.
        experts: of each block; 0: none.
    """

    def __init__(self, directory: Path, layers: int = 2, experts: int = 0) -> None:
        self.model = write_model(directory / "model", layers=layers, experts=experts)
        self.data = write_chat_data(directory / "data")
        self.directory = directory

    def trial(self, name: str) -> Trial:
        """A run of that name, not yet started."""
        return Trial(self, name)


class Trial:
    """One run, over all its starts; a context that ends what is left of it and checks that nothing
    was.
    """

    def __init__(self, bench: Bench, name: str) -> None:
        self._bench = bench
        self.token = f"{name}-{uuid.uuid4().hex[:12]}"
        self.out = bench.directory / self.token
        self.schedule = bench.directory / f"{self.token}.json"
        # The supervisor puts its files elsewhere if the path is long, where nobody would miss them.
        self.temporary = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
        share_compiled(self.temporary)
        self.jobs: list[Job] = []

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for job in self.jobs:
            job.kill()
        left = files_left(self.temporary)
        strays = self.strays()
        for stray in strays:
            with contextlib.suppress(psutil.Error):
                stray.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)
        if kind is None:
            assert not left, left
            assert not strays, strays

    def plan(self, *entries: Mapping[str, Any]) -> None:
        """The failures to come."""
        self.schedule.write_text(json.dumps(list(entries)))

    def arguments(self, *more: str | Path, ranks: int = 3, iters: int = ITERS) -> list[str | Path]:
        """The command line; ``more`` wins over what stands before it."""
        fixed = [
            *("train", "--train", "-n", str(ranks), "--backend", "ring"),
            *("--model", self._bench.model, "--data", self._bench.data, "--adapter-path", self.out),
            *("--iters", str(iters), "--save-every", str(SAVE_EVERY), "--steps-per-report", "1"),
            *(
                "--steps-per-eval",
                "10",
                "--val-batches",
                "1",
                "--learning-rate",
                "1e-3",
                "--lora-parameters",
                LORA,
            ),
            *("--max-restarts", "20"),
        ]
        return changed(fixed, more)

    def start(
        self,
        *more: str | Path,
        ranks: int = 3,
        iters: int = ITERS,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> Job:
        """Start the run, or start it again."""
        variables = {"TMPDIR": str(self.temporary), **(env or {})}
        if self.schedule.exists():
            variables["ALLHANDS_FAULTS"] = str(self.schedule)
        arguments = self.arguments(*more, ranks=ranks, iters=iters)
        self.jobs.append(Job(*arguments, env=variables, cwd=self._bench.directory, prefix=prefix))
        return self.jobs[-1]

    def run(self, *more: str | Path, code: int = 0, timeout: float = 120.0, **options: Any) -> Job:
        """Start the run and wait for its end with ``code``."""
        job = self.start(*more, **options)
        assert job.finish(timeout) == code, (job.process.returncode, job.out, job.err)
        return job

    def strays(self) -> list[psutil.Process]:
        """Living processes that know this run's directory, or its temporary one, by argument or
        variable.
        """
        marks = (self.token, str(self.temporary))
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                texts = [*process.cmdline(), *process.environ().values()]
                if process.status() != psutil.STATUS_ZOMBIE and any(
                    mark in text for text in texts for mark in marks
                ):
                    found.append(process)
        return found

    # --- what it has done -------------------------------------------------------------------------

    def fired(self) -> list[FiredFault]:
        """The failures that have happened."""
        return fired(self.schedule)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The supervisor's events of that kind, over all starts."""
        return [event for event in read_events(self.out) if event["kind"] == kind]

    def result(self) -> Result:
        """How it ended."""
        return result(self.out)

    def steps(self) -> list[int]:
        """Steps that were trained, repetitions included, in the order of the file."""
        lines = (
            (self.out / "metrics.jsonl").read_text().splitlines()
            if (self.out / "metrics.jsonl").exists()
            else []
        )
        records = [
            json.loads(line)
            for line in lines
            if line.startswith('{"event": "train"') and line.endswith("}")
        ]
        return [record["step"] for record in records]

    def wait_for_fired(self, count: int = 1, timeout: float = 60.0) -> None:
        """Return when so many failures have happened."""

        def happened() -> bool:
            assert self.jobs[-1].process.poll() is None, self.jobs[-1].process.communicate()
            with contextlib.suppress(ValueError):  # one is just being written
                return len(self.fired()) >= count
            return False

        until(happened, timeout, f"{count} failures have not happened")


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[list[str] | None]:
    """A command prefix that puts a job into a memory group of its own; ``None`` where none can be
    made.
    """
    name = f"allhands-test-{uuid.uuid4().hex[:8]}"
    for root, file in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup", root, name)
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(limit_bytes))
        except OSError:
            group.rmdir()
            continue
        script = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        try:
            yield ["sh", "-c", script, "sh"]
        finally:
            _remove_group(group)
        return
    yield None


def _remove_group(group: Path) -> None:
    """A group can be removed when its last process is gone."""
    deadline = time.monotonic() + 5
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            assert time.monotonic() < deadline, (
                f"{group} is not empty: {(group / 'cgroup.procs').read_text()}"
            )
            time.sleep(0.05)


@contextlib.contextmanager
def small_disk(directory: Path, megabytes: int) -> Iterator[Path | None]:
    """A file system of that size at ``directory``; ``None`` where none can be mounted (root,
    Linux).
    """
    directory.mkdir(parents=True)
    options = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "allhands-test", str(directory)]
    try:
        mounted = (
            os.geteuid() == 0
            and subprocess.run(options, capture_output=True, check=False).returncode == 0
        )
    except FileNotFoundError:
        mounted = False
    if not mounted:
        yield None
        return
    try:
        yield directory
    finally:
        # A process that ends just now may still hold it.
        until(lambda: _unmount(directory), 5.0, f"{directory} stays mounted")


def _unmount(directory: Path) -> bool:
    return (
        subprocess.run(["umount", str(directory)], capture_output=True, check=False).returncode == 0
    )


def fill(directory: Path) -> Path:
    """Write until nothing more fits, and return the file to remove."""
    filler = directory / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while stream.write(b"\1" * size) == size:
                    pass
    return filler
