"""Ranks on several computers: an agent on each, started over ssh, starts and watches them.

The supervisor treats them like local ranks.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from allhands.cluster.addresses import addresses, interface_to
from allhands.cluster.connection import Connection, HostError, UnfitHosts
from allhands.cluster.frames import Frame, write_all
from allhands.cluster.hosts import Host, below_home
from allhands.cluster.ranks import (
    ATTEST_VARIABLE,
    Beat,
    LaunchSpec,
    Marks,
    Place,
    RankExit,
    RankProcesses,
)
from allhands.cluster.tails import for_screen
from allhands.distributed.blame import SOFTWARE, Statement, circumstances_in, init_command, judge
from allhands.errors import AllhandsError, ConfigError, DistributedError
from allhands.io.files import make_directory, private_opener
from allhands.io.formatting import counted
from allhands.observe.monitor.samples import decode_sample, relayed_file
from allhands.runtime.callers import RING_KEY
from allhands.runtime.threads import side_by_side
from allhands.runtime.versions import MUST_BE_EQUAL, described, required, software_here, unequal

READY_S = 40.0  # in which every agent must answer
_QUERY_S = 10.0
_CHECK_S = 0.2
_REPORT_S = 2.0
_KILL_S = 5.0
_LONGEST_GRACE_S = 1e9  # instead of infinity, which a frame cannot hold
_LOST_CODE = -9
_SPOKEN = ("allhands", "mlx")  # software that must be equal on the agents and the supervisor
# Variables of this computer that are meant for all ranks. Those that belong to another job are
# removed on the other computer.
_FORWARDED = ("ALLHANDS_", "MLX_", "NCCL_")

_log = logging.getLogger(__name__)


def start_remote(spec: LaunchSpec, run_dir: Path) -> RankProcesses:
    """Start the ranks of ``spec.places``, with an agent on each computer.

    The output of an agent, of ssh or of a login shell goes to ``log_dir/host-NAME.log``. Nothing is
    written to ``run_dir``.

    Raises:
        ConfigError: the back-end is MPI, the number of ranks differs from that of the places, or
            JACCL cannot connect the computers.
        HostError: computers cannot be reached or do not fit; it is a DistributedError.
        AllhandsError: a computer refuses; the error says why.
    """
    _check(spec)
    make_directory(spec.log_dir, private=True)
    spec = replace(spec, env={**spec.env, RING_KEY: secrets.token_hex(32)})
    ranks = RemoteRanks(spec, addresses(spec.places))
    try:
        ranks.start()
    except BaseException:
        ranks.kill()
        raise
    return ranks


def newest_checkpoint(
    hosts: Sequence[Host],
    adapter_path: str | Path,
    run_id: str | None,
    resume: str | Path | None = None,
) -> dict[str, int]:
    """Return the step of the newest checkpoint on each host that has one, by the host's name.

    All hosts are asked at the same time. A host that does not answer within ten seconds is left
    out.

    Args:
        adapter_path: the run's directory.
        run_id: id of the run; ``None``: checkpoints of any run count.
        resume: a run directory or a checkpoint from which the run resumes as long as no host has a
            checkpoint of the run itself.
    """
    question = {
        "adapter_path": _portable(adapter_path),
        "run_id": run_id,
        "resume": None if resume is None else _portable(resume),
    }
    answers = side_by_side(partial(_ask_step, question=question), hosts)
    found = {host.name: answer for host, answer in zip(hosts, answers, strict=True) if answer}
    own = any(answer["own"] for answer in found.values())
    return {name: answer["step"] for name, answer in found.items() if answer["own"] == own}


class RemoteRanks:
    """The ranks of one attempt on several computers; see
    :class:`allhands.cluster.ranks.RankProcesses`.

    Args:
        addresses: for each of ``spec.places`` the address by which the other computers reach it.
    """

    def __init__(self, spec: LaunchSpec, addresses: Sequence[str]) -> None:
        self._spec = spec
        self._addresses = addresses
        self._lock = threading.Condition()
        self._marks: dict[int, Marks] = {}
        self._exits: dict[int, RankExit] = {}
        self._reports: dict[int, Mapping[str, Any]] = {}
        self._connections: list[Connection] = []
        self._attested: Mapping[str, Any] | None = None
        self._homes = [
            index for index, place in enumerate(spec.places) for _ in range(place.num_ranks)
        ]
        self._firsts = [
            sum(place.num_ranks for place in spec.places[:i]) for i in range(len(spec.places))
        ]
        self._over = threading.Event()
        self._output = _Output()
        self._keeper = threading.Thread(target=self._keep, name="keep-agents", daemon=True)

    def start(self) -> None:
        """Start the agents, wait until they are ready, and let them start the ranks.

        Raises:
            AllhandsError: a computer cannot take part.
        """
        for index, place in enumerate(self._spec.places):
            self._connect(index, place)
        self._keeper.start()
        deadline = time.monotonic() + READY_S
        frames, failed = list[Frame](), list[AllhandsError]()
        for connection in self._connections:
            try:
                frames.append(connection.wait_until_ready(deadline))
            except AllhandsError as error:
                failed.append(error)
        if failed:
            raise _together(failed)
        _compare_versions(self._spec, frames)
        peers = [
            f"{address}:{port}"
            for address, frame in zip(self._addresses, frames, strict=True)
            for port in frame["ports"]
        ]
        for connection in self._connections:
            connection.send("start", peers=peers)

    def exits(self) -> list[RankExit]:
        """Return the ends of the ranks that have ended, in the order of their times."""
        with self._lock:
            return sorted(self._exits.values(), key=lambda end: end.time)

    def marks(self, rank: int) -> Marks:
        """Return the marks that the rank has set so far."""
        with self._lock:
            return self._marks.get(rank, Marks())

    def signal(self, rank: int, number: int) -> bool:
        """Send a signal to the rank through its agent; return false if it has ended."""
        with self._lock:
            if rank in self._exits:
                return False
        self._connection(rank).send("signal", rank=rank, number=int(number))
        return True

    def tell(self, word: str) -> None:
        """Tell all ranks ``word`` through their agents."""
        for connection in self._connections:
            connection.send("tell", word=word)

    def places(self) -> str:
        """Return the computers in words, each with its ranks, its address, and the interface by
        which it is reached from here.
        """
        found: list[str] = []
        for place, address in zip(self._spec.places, self._addresses, strict=True):
            ranks = "" if place.num_ranks == 1 else f"{place.num_ranks} ranks on "
            way = (
                "this computer"
                if place.host.ssh is None
                else f"over {interface_to(address) or 'an unknown interface'}"
            )
            found.append(f"{ranks}{place.name} {address} ({way})")
        return ", ".join(found)

    def attested(self) -> Mapping[str, Any] | None:
        """Return what the ranks have agreed on, as rank 0 reports it; ``None``: no report yet."""
        return self._attested

    def host(self, rank: int) -> str:
        """Return the name of the rank's computer."""
        return self._spec.places[self._homes[rank]].name

    def lost_hosts(self) -> list[str]:
        """Return the computers that no longer answer."""
        return [connection.name for connection in self._connections if connection.lost]

    def error(self, rank: int) -> dict[str, Any] | None:
        """Return the content of the error file that the rank has written, or ``None``."""
        return cast("dict[str, Any] | None", self._report(rank).get("error"))

    def log_path(self, rank: int) -> Path:
        """Return the path of the file with the rank's output, on the rank's computer."""
        with self._lock:
            known = self._reports.get(rank, {}).get("log_path")
        return Path(known) if known else self._spec.log_dir / f"rank-{rank}.log"

    def log_tail(self, rank: int) -> tuple[str, ...]:
        """Return the last lines of that file."""
        return tuple(self._report(rank).get("log_tail", ()))

    def out_of_memory(self, rank: int) -> bool:
        """Return whether the kernel of the rank's computer killed a process because memory was
        short, at the time when the rank ended.
        """
        return bool(self._report(rank).get("out_of_memory", False))

    def stopped(self, rank: int) -> bool:
        """Return whether the rank's command is stopped, as after SIGSTOP."""
        return bool(self._report(rank).get("stopped", False))

    def kill(self) -> None:
        """End every process that is left, and wait for the computers that still answer."""
        deadline = time.monotonic() + _KILL_S
        for connection in self._connections:
            connection.send("end")
        for connection in self._connections:
            connection.finish(deadline)
        self._over.set()
        if self._keeper.is_alive():
            self._keeper.join()
        self._end_ranks(range(len(self._homes)))
        self._output.close()

    # --- messages of agents -----------------------------------------------------------------------

    def _connect(self, index: int, place: Place) -> None:
        log = self._spec.log_dir / f"host-{re.sub(r'[^A-Za-z0-9._-]', '_', place.name)}.log"
        own = range(self._firsts[index], self._firsts[index] + place.num_ranks)
        # Rank 0 on this computer writes directly to our output, so that it still has a terminal.
        own_screen = index == 0 and place.host.ssh is None and not self._spec.tag_output
        descriptors = [os.dup(1), os.dup(2)] if own_screen else []
        hello = orders(self._spec, place, own, self._addresses[index]) | {
            "descriptors": descriptors
        }
        try:
            self._connections.append(
                Connection(place.host, place.name, hello, log, partial(self._listen, own))
            )
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _listen(self, own: range, frame: Frame | None) -> None:
        if frame is None:
            self._end_ranks(own)
        elif frame["kind"] == "output":
            self._output.write(frame["stream"], frame["data"].encode("latin-1"))
        elif frame["kind"] == "line" and frame["rank"] in own:
            rank = frame["rank"]
            self._output.write(
                1, for_screen(rank, frame["data"].encode("latin-1"), self.host(rank))
            )
        elif frame["kind"] == "refused":
            self._take_refusal(own, frame)
        elif frame["kind"] == "attested":
            self._attested = frame["content"]
        elif frame["kind"] == "sample":
            self._keep_sample(self.host(own.start), str(frame["line"]))
        elif frame.get("rank") in own:
            with self._lock:
                self._take(frame, frame["rank"], time.monotonic())
                self._lock.notify_all()

    def _keep_sample(self, host: str, line: str) -> None:
        """Write a sample of a process on another computer to a file, as for local processes."""
        if decode_sample(line) is None:
            return
        file = relayed_file(self._spec.log_dir, host)
        with suppress(OSError), open(file, "a", encoding="utf-8", opener=private_opener) as stream:
            stream.write(f"{line}\n")

    def _take(self, frame: Frame, rank: int, now: float) -> None:
        if frame["kind"] == "marks":
            busy, beat = frame["busy_age"], frame["beat"]
            last = None
            if beat is not None:
                waited_s = beat.get("waited_s", 0.0)
                last = Beat(beat["step"], beat["phase"], beat["count"], now - beat["age"], waited_s)
            busy_time = None if busy is None else now - busy
            self._marks[rank] = Marks(
                frame["ready"], frame["started"], busy_time, last, frame["listening"]
            )
        elif frame["kind"] in ("exit", "report"):
            self._reports[rank] = frame["report"]
        if frame["kind"] == "exit":
            self._exits.setdefault(rank, RankExit(rank, frame["code"], now - frame["age"]))

    def _take_refusal(self, own: range, frame: Frame) -> None:
        """Record an error for each rank of a computer whose agent refuses to start them."""
        text = ": ".join(part for part in (frame["where"], frame["message"]) if part)
        error = {
            **frame,
            "text": f"{text}\n  what to do: {frame['hint']}" if frame["hint"] else text,
        }
        with self._lock:
            for rank in own:
                if rank not in self._exits:
                    self._reports[rank] = {"error": error}
                    self._exits[rank] = RankExit(rank, DistributedError.exit_code, time.monotonic())
            self._lock.notify_all()

    def _end_ranks(self, ranks: range) -> None:
        now = time.monotonic()
        with self._lock:
            for rank in ranks:
                self._exits.setdefault(rank, RankExit(rank, _LOST_CODE, now))
            self._lock.notify_all()

    def _report(self, rank: int) -> Mapping[str, Any]:
        """Return what the agent reports about the rank: about its end or, if it runs, about now."""
        with self._lock:
            old = self._reports.get(rank)
            if rank in self._exits:
                return old or {}
            self._connection(rank).send("report", rank=rank)
            self._lock.wait_for(
                lambda: self._reports.get(rank) is not old or rank in self._exits, _REPORT_S
            )
            return self._reports.get(rank, {})

    def _connection(self, rank: int) -> Connection:
        return self._connections[self._homes[rank]]

    def _keep(self) -> None:
        while not self._over.wait(_CHECK_S):
            for connection in self._connections:
                connection.check()


class _Output:
    """Rank 0's output, written in another thread: a blocked terminal must not block the
    supervisor.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="rank-0-output", daemon=True)
        self._thread.start()

    def write(self, stream: int, data: bytes) -> None:
        """Write ``data`` to our standard output (1) or error (2)."""
        self._queue.put((2 if stream == 2 else 1, data))

    def close(self) -> None:
        """Wait, but only briefly, until the rest of the output is written."""
        self._queue.put(None)
        self._thread.join(1.0)

    def _work(self) -> None:
        while item := self._queue.get():
            write_all(*item)


# --- orders ---------------------------------------------------------------------------------------


def _check(spec: LaunchSpec) -> None:
    if spec.backend == "mpi":
        raise ConfigError(
            "MPI is for this computer alone; those of a hostfile are joined by the ring",
            code="backend-needs-one-computer",
            where="--backend mpi",
            hint="use --backend ring, or leave --backend out",
        )
    if spec.backend == "jaccl":
        check_devices(spec.places)
    total = sum(place.num_ranks for place in spec.places)
    if total != spec.num_processes or any(place.num_ranks < 1 for place in spec.places):
        raise ConfigError(
            f"{spec.num_processes} ranks, but places for {total}",
            code="hostfile-mismatch",
            where="--hostfile",
        )


def check_devices(places: Sequence[Place]) -> None:
    """Check that JACCL can connect the computers.

    Raises:
        ConfigError: a computer has not exactly one rank, or has no device to one of its neighbours.
    """
    count = len(places)
    for index, place in enumerate(places):
        devices = place.host.rdma
        neighbours = {(index - 1) % count, (index + 1) % count} - {index}
        if (
            place.num_ranks != 1
            or len(devices) != count
            or any(devices[other] is None for other in neighbours)
        ):
            raise ConfigError(
                f"host {place.name} cannot take part in RDMA: it needs one slot, and in the hostfile a list of "
                f"{counted(count, 'device')}, null for itself",
                code="hostfile-mismatch",
                where="--backend jaccl",
                hint="have the hostfile written by mlx.distributed_config --over thunderbolt --backend jaccl, "
                "or use --backend ring",
            )


def orders(spec: LaunchSpec, place: Place, own: range, address: str) -> Frame:
    """Return the ``hello`` for a computer's agent.

    It tells the agent to start the ranks ``own`` of the job, and to reserve their ports on
    ``address``.
    """
    host = place.host
    return {
        **_who(place.name, host),
        "command": list(spec.command),
        "num_processes": spec.num_processes,
        "first": own.start,
        "count": len(own),
        "backend": spec.backend,
        "log_dir": _portable(spec.log_dir) if spec.log_dir_there is None else spec.log_dir_there,
        "cores_per_rank": spec.cores_per_rank,
        # The supervisor's variables replace those of the hostfile.
        "env": {**host.envs, **spec.env},
        "stop_grace_s": min(spec.stop_grace_s, _LONGEST_GRACE_S),
        "weights": spec.weights,
        "tag_output": spec.tag_output,
        "keep_logs": spec.keep_logs or host.ssh is None,
        "relay": host.ssh is not None,
        "rdma": [place.host.rdma for place in spec.places] if spec.backend == "jaccl" else None,
        "address": address,
    }


def _who(name: str, host: Host) -> Frame:
    """Return the part of ``hello`` that every agent receives."""
    forwarded = (
        {}
        if host.ssh is None
        else {n: v for n, v in os.environ.items() if n.startswith(_FORWARDED)}
    )
    forwarded.pop("ALLHANDS_SSH", None)
    return {
        "name": name,
        "python": sys.executable,
        "cwd": host.cwd or os.getcwd(),
        "cwd_required": bool(host.cwd),
        "below_home": below_home(Path.cwd()),
        "forwarded": forwarded,
        "descriptors": [],
        "adapter_path": None,
        "run_id": None,
        "resume": None,
    }


def _ask_step(host: Host, question: Frame) -> Frame | None:
    """Return the host's answer if it has a checkpoint, otherwise ``None``."""
    no_ranks = {"first": 1, "count": 0, "backend": "ring", "address": "127.0.0.1"}
    hello = {**_who(host.name, host), **no_ranks, **question}
    connection: Connection | None = None
    try:
        connection = Connection(host, host.name, hello, None, lambda frame: None)
        answer = connection.wait_until_ready(time.monotonic() + _QUERY_S)
        return None if answer["step"] is None else answer
    except AllhandsError as error:
        _log.info("%s", error)
        return None
    finally:
        if connection is not None:
            connection.send("end")
            connection.finish(time.monotonic() + _REPORT_S)


def _portable(path: str | Path) -> str:
    """Return a path in the form in which it is valid on other computers.

    A path below the working directory becomes relative to it, because other computers may have
    another working directory. Any other path stays unchanged, also one that begins with ``~``.
    """
    with suppress(ValueError):
        return str(Path(path).absolute().relative_to(Path.cwd()))
    return str(path)


# --- versions ---------------------------------------------------------------------------


def _stated(computer: str, have: Mapping[str, str], names: Sequence[str]) -> Statement:
    return Statement(
        computer, {SOFTWARE: {name: required(have)[name] for name in names}}, software=have
    )


def _compare_versions(spec: LaunchSpec, frames: Sequence[Frame]) -> None:
    """Refuse computers whose software differs so that a common run would be wrong.

    In training more packages must be equal than for the ranks of a user's own program. If no rank
    runs on this computer, allhands and MLX must still be the same here.

    Raises:
        HostError: some computers do not fit.
    """
    places = spec.places
    names = MUST_BE_EQUAL if ATTEST_VARIABLE in spec.env else _SPOKEN
    statements = [
        _stated(place.name, frame["versions"], names)
        for place, frame in zip(places, frames, strict=True)
    ]
    here = next((place.name for place in places if place.host.ssh is None), "")
    given = circumstances_in(spec.env, here)
    own = software_here()
    verdict = judge(statements, given)
    like = frozenset(one.name for one in statements if not here and not unequal(own, one.software))
    if verdict and like:
        trusted = given.trusted if verdict.misfits else like
        given = replace(given, trusted=trusted, exemplary=not like <= set(verdict.misfits))
        verdict = judge(statements, given)
    if verdict:
        raise UnfitHosts(
            verdict.misfits, verdict.message, code="versions-differ", hint=verdict.hint
        )
    if not here:
        _compare_with_here(statements, own, given.option)


def _compare_with_here(there: Sequence[Statement], own: Mapping[str, str], option: str) -> None:
    """Refuse computers that agree with each other, but have another allhands or MLX than this one.

    Raises:
        HostError: they have.
    """
    have = there[0].software
    if different := set(unequal(own, have)) & set(_SPOKEN):
        name, computers = min(different), [one.name for one in there]
        mine = described(name, own).partition(" ")[2]
        raise HostError(
            computers,
            f"host {computers[0]} has {described(name, have)}, this computer {mine}",
            code="versions-differ",
            hint=init_command(computers, option),
        )


def _together(failed: Sequence[AllhandsError]) -> AllhandsError:
    """Return one error for all; an error that is not about computers comes first."""
    unreachable = [error for error in failed if isinstance(error, HostError)]
    if other := next((error for error in failed if error not in unreachable), None):
        return other
    names = [name for error in unreachable for name in error.hosts]
    first = unreachable[0]
    more = "".join(f"; {error.message}" for error in unreachable[1:])
    kind = UnfitHosts if all(isinstance(error, UnfitHosts) for error in unreachable) else HostError
    return kind(names, first.message + more, code=first.code, where=first.where, hint=first.hint)
