"""The network as training uses it: a real MLX group, all-reduces of growing sizes, then each link by itself.

:func:`measure` has a program of its own do it (:mod:`allhands.cluster.bench_groups`), so that whatever hangs can be
ended in time and nothing that ranks write gets between the caller's output.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from allhands.cluster import ssh
from allhands.cluster.candidates import facts_of, table_choice
from allhands.cluster.figures import SIZES, Failure, Figures, Measurement
from allhands.cluster.hosts import Host
from allhands.errors import ConfigError
from allhands.io.files import make_directory

_PROGRAM = ("-P", "-m", "allhands.cluster.bench_groups")
_LONGEST_LINE = 1 << 20
_EVERY_PAIR = 6  # hosts at most; of more only neighbours are measured
_GRACE_S = 5.0  # for the program to end by itself after the deadline
_REMOVE_S = 10.0
_RANGE = (4, 1 << 30)
_TAIL_BYTES, _TAIL_LINES = 8192, 20


@dataclass(frozen=True)
class BenchOptions:
    """How the network is measured.

    Attributes:
        ranks_per_host: in the group of all computers; ``None``: their slots. On a link there is one on each.
        sizes: bytes of the arrays, ascending; the largest are left out where they would take too long.
        timeout_s: for everything.
        links: whether each pair of computers is measured, too.
        seconds: of timed rounds for each size.
        connect_s: for a group to come together.
        cores_per_rank: as training gives them; ``None``: the cores of a computer divided among its ranks.
        progress: called with a line about each group that begins.
    """

    ranks_per_host: int | None = None
    sizes: Sequence[int] = SIZES
    timeout_s: float = 120.0
    links: bool = True
    seconds: float = 0.2
    connect_s: float = 20.0
    cores_per_rank: int | None = None
    progress: Callable[[str], None] | None = field(default=None, compare=False)


def measure(hosts: Sequence[Host], backend: str = "auto", options: BenchOptions | None = None) -> Measurement:
    """Form a real group on ``hosts``, time its all-reduces, then those of each pair; returns in ``timeout_s``.

    Computers that cannot be reached are named, and the others measured without them. A group that does not come
    together is a :class:`Failure`, not an exception; the pairs then show which link it is.

    Args:
        hosts: at least two ranks in all; one host gets several ranks and has no links.
        backend: ``"auto"``: what ``--backend auto`` would take without measuring.

    Raises:
        ConfigError: fewer than two ranks, or a size or back-end that cannot be.
        AllhandsError: what is needed for the back-end is not here, or this directory cannot be written.
    """
    options = options or BenchOptions()
    backend = _chosen(hosts, backend, options)
    _check(hosts, backend, options)
    began = time.monotonic()
    groups = _groups(hosts, options)
    with _places_for_logs(hosts) as logs:
        request = {
            "hosts": [asdict(host) for host in hosts],
            "groups": [{"members": members, "ranks": ranks} for members, ranks in groups],
            "backend": backend,
            "sizes": list(options.sizes),
            "seconds": options.seconds,
            "timeout_s": options.timeout_s,
            "connect_s": options.connect_s,
            "cores_per_rank": options.cores_per_rank,
            "log_dir": str(logs),
        }
        answers = _Answers(hosts, groups, options.progress)
        _ask(request, answers, began + options.timeout_s + _GRACE_S)
    return answers.measurement(backend, time.monotonic() - began)


def remote_ranks(hosts: Sequence[Host], ranks_per_host: int | None = None) -> list[int]:
    """How many ranks each host gets."""
    return [ranks_per_host or host.slots for host in hosts]


def _chosen(hosts: Sequence[Host], backend: str, options: BenchOptions) -> str:
    if backend != "auto":
        return backend
    return table_choice(facts_of(hosts, sum(remote_ranks(hosts, options.ranks_per_host)))).backend


def _check(hosts: Sequence[Host], backend: str, options: BenchOptions) -> None:
    if sum(remote_ranks(hosts, options.ranks_per_host)) < 2:
        raise ConfigError(
            "one rank has nobody to exchange with", where="-n", hint="give -n 2, or a hostfile with two computers"
        )
    sizes = list(options.sizes)
    if not sizes or sizes != sorted(set(sizes)) or not all(_RANGE[0] <= size <= _RANGE[1] for size in sizes):
        raise ConfigError(f"sizes must ascend from {_RANGE[0]} to {_RANGE[1]} bytes: {sizes}")
    if backend not in ("ring", "mpi", "nccl"):
        raise ConfigError(
            f"{backend} groups cannot be started by allhands", where="--backend", hint="use ring, mpi or nccl"
        )
    if backend == "mpi":
        from allhands.cluster.mpi import require_mpi

        require_mpi()
        if len(hosts) > 1 or hosts[0].ssh is not None:
            raise ConfigError(
                "MPI is for this computer alone; those of a hostfile are joined by the ring",
                where="--backend mpi",
                hint="use --backend ring, or leave --backend out",
            )


Group = tuple[list[int], list[int]]  # indices of hosts, and the ranks of each


def _groups(hosts: Sequence[Host], options: BenchOptions) -> list[Group]:
    """All, then pairs: every one of up to six computers, else neighbours in the ring."""
    ranks = remote_ranks(hosts, options.ranks_per_host)
    everybody: Group = (list(range(len(hosts))), ranks)
    if len(hosts) < 2 or not options.links:
        return [everybody]
    if len(hosts) <= _EVERY_PAIR:
        pairs = list(itertools.combinations(range(len(hosts)), 2))
    else:
        pairs = [tuple(sorted((i, (i + 1) % len(hosts)))) for i in range(len(hosts))]
    links: list[Group] = [([*pair], [1, 1]) for pair in pairs]
    return [everybody] + [link for link in links if link != everybody]


# --- the program that does it -------------------------------------------------------------------------


class _Answers:
    """Collects what the program says, a line of JSON at a time."""

    def __init__(
        self, hosts: Sequence[Host], groups: Sequence[Group], progress: Callable[[str], None] | None = None
    ) -> None:
        self._names = [tuple(hosts[i].name for i in members) for members, _ in groups]
        self._progress = progress
        self._left = set(range(len(groups)))
        self._figures: dict[int, Figures] = {}
        self._failures: list[Failure] = []

    def take(self, answer: Mapping[str, Any], noise: Callable[[], Sequence[str]] = tuple) -> None:
        """One of: a group begins, is measured, has failed, has been left out because a computer in it is missing.

        ``noise`` tells what has been said since the last call, for a failure without a log.
        """
        number, said = int(answer["group"]), noise()
        if answer["kind"] == "begins":
            if self._progress:
                self._progress(f"measuring {', '.join(self._names[number])}")
            return
        self._left.discard(number)
        if answer["kind"] == "measured":
            self._figures[number] = Figures.from_json(answer)
        elif answer["kind"] == "failed":
            names = self._names[number]
            hosts, tail = tuple(answer["hosts"]) or names, tuple(answer["log_tail"] or said)
            self._failures.append(Failure(hosts, names, answer["message"], answer["hint"], tail))

    def end(self, message: str, log_tail: Sequence[str]) -> None:
        """The program has ended before its time: what it had not begun cannot be known."""
        number = min(self._left, default=None)
        if number is not None:
            names = self._names[number]
            self._failures.append(Failure(names, names, message, None, tuple(log_tail)))
            self._left.discard(number)

    def measurement(self, backend: str, seconds: float) -> Measurement:
        """What is known now."""
        links = [self._figures[number] for number in sorted(self._figures) if number]
        whole = self._figures.get(0)
        # Of two computers with one rank each the group is the link.
        if whole and not links and len(whole.hosts) == 2 and whole.num_ranks == 2:
            links = [whole]
        left = tuple(self._names[number] for number in sorted(self._left))
        return Measurement(backend, whole, tuple(links), tuple(self._failures), left, seconds)


def _ask(request: Mapping[str, Any], answers: _Answers, deadline: float) -> None:
    """Run the program to its end, or to the deadline; nothing of it is left."""
    mark = secrets.token_hex(16)
    with tempfile.TemporaryFile() as errors:
        noise = _Noise(errors.fileno())
        program = subprocess.Popen(
            [sys.executable, *_PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        try:
            assert program.stdin is not None
            with suppress(BrokenPipeError):
                program.stdin.write(json.dumps({**request, "mark": mark}).encode())
                program.stdin.close()
            for line in _lines(program, deadline):
                if line.startswith(mark):
                    # A rank on another computer has written it; what makes no sense is as good as not said.
                    with suppress(ValueError, KeyError, TypeError, RecursionError):
                        answers.take(json.loads(line.removeprefix(mark)), noise.new)
            code = program.wait(timeout=_GRACE_S) if time.monotonic() < deadline else None
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(program)
        if code:
            answers.end(f"the measurement ended with code {code}", noise.new())


class _Noise:
    """What the program, and rank 0 before it has a log, write to standard error."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._read = 0

    def new(self) -> tuple[str, ...]:
        """The last lines since the last call."""
        # Not by seeking: the program writes where this file stands.
        size = os.fstat(self._descriptor).st_size
        text = os.pread(self._descriptor, _TAIL_BYTES, max(self._read, size - _TAIL_BYTES))
        self._read = size
        return tuple(text.decode(errors="replace").splitlines()[-_TAIL_LINES:])


def _lines(program: subprocess.Popen[bytes], deadline: float) -> Iterator[str]:
    """Whole lines of the program's output, until it ends or the deadline is over."""
    assert program.stdout is not None
    descriptor, pending = program.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                return
            data = os.read(descriptor, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            pending = pending if len(pending) < _LONGEST_LINE else b""
            yield from (line.decode(errors="replace") for line in lines)


def _end(program: subprocess.Popen[bytes]) -> None:
    """Its reaper, and the agents on other computers, see its end and end what it had started."""
    if program.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    for stream in (program.stdin, program.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()


# --- logs, which every computer keeps below its working directory ---------------------------------------


@contextmanager
def _places_for_logs(hosts: Sequence[Host]) -> Generator[Path]:
    """A directory of an unused name here and, below each computer's own working directory, there; removed at the end.

    Raises:
        StorageError: it cannot be made here.
    """
    others = [host for host in hosts if host.ssh is not None]
    # Where there are no others it need not have a name that is good on all computers.
    base = Path.cwd() if others and os.access(Path.cwd(), os.W_OK) else Path(tempfile.gettempdir())
    logs = make_directory(base / f".allhands-bench-{secrets.token_hex(8)}", private=True)
    try:
        yield logs
    finally:
        shutil.rmtree(logs, ignore_errors=True)
        if others:
            with ThreadPoolExecutor(len(others)) as pool:
                list(pool.map(lambda host: _remove(host, logs), others))


def _remove(host: Host, logs: Path) -> None:
    """Remove the directory on another computer, as far as it can be reached."""
    relative = logs.name if logs.parent == Path.cwd() else str(logs)
    script = 'cd -- "$1" 2>/dev/null; rm -rf -- "$2"'
    command = ["sh", "-c", script, "sh", host.cwd or os.getcwd(), relative]
    with suppress(OSError, subprocess.TimeoutExpired, ConfigError):
        subprocess.run(
            ssh.command(cast(str, host.ssh), command, ssh.SshOptions(connect_timeout_s=5)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_REMOVE_S,
            check=False,
            start_new_session=True,
        )
