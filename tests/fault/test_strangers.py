"""Strangers at the port where ranks meet: rank 0 is a real process that trains, and stays to the
end.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ring_ranks import allhands_command
from runs import distance, read_run, read_weights
from strangers import (
    HANDED,
    in_between,
    inputs,
    loopback_sources,
    pestering,
    say,
    say_all,
    wait_for,
)

from allhands.cluster import processes
from allhands.cluster.processes import reserve_ports

ITERS = 2
_STRANGE = ("SLURM_", "OMPI_", "PMIX_", "PMI_", "MLX_", "ALLHANDS_MEETING", "TORCHELASTIC_")
# A rank that does no more than to join its group and to sum over it.
_SUM = """
import os
from allhands.cluster.environment import recognise
from allhands.cluster.join import join_group
launch = recognise(os.environ)
group = join_group(launch, 200.0)
import mlx.core as mx
print("sum", group.all_sum(mx.array([float(2 ** launch.rank)])).item())
"""
SUM = [sys.executable, "-c", _SUM]
Rank = subprocess.Popen[str]


class Job:
    """Two ranks as torchrun would start them on two computers, at different times if the test
    wants.
    """

    def __init__(self, command: Sequence[str] = SUM, key: str | None = None, port: int = 0) -> None:
        self._command, self._key = command, key
        self.port = port or free_port()
        self._ranks: list[Rank] = []

    @property
    def address(self) -> tuple[str, int]:
        """Where rank 0 is to be met."""
        return "127.0.0.1", self.port

    def start(self, rank: int, master: str = "127.0.0.1") -> Rank:
        """Start a rank, which looks for rank 0 at ``master``."""
        usual = {name: value for name, value in os.environ.items() if not name.startswith(_STRANGE)}
        numbers = {
            "RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "MASTER_PORT": self.port,
        }
        own = {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": master}
        own |= {"OPENBLAS_NUM_THREADS": "1", "ALLHANDS_PEERS_TIMEOUT_S": "200"}
        own |= {"ALLHANDS_MEETING_KEY": self._key} if self._key else {}
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=usual | own,
            start_new_session=True,
        )
        self._ranks.append(process)
        if rank == 0:
            wait_for(self.address)
        return process

    def finish(self, timeout: float = 90.0) -> None:
        """Wait for all ranks, which must succeed, and have the right sum."""
        try:
            texts = [rank.communicate(timeout=timeout)[0] for rank in self._ranks]
        finally:
            self.kill()
        for rank, text in zip(self._ranks, texts, strict=True):
            assert rank.returncode == 0, text
            assert "Traceback" not in text
            assert self._command is not SUM or text.endswith("sum 3.0\n"), text

    def kill(self) -> None:
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, 9)
            rank.communicate()


def free_port() -> int:
    (held,), (port,) = reserve_ports(1, shareable=False)
    held.close()
    return port


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs of a test; nothing of them is left afterwards."""
    made: list[Job] = []
    yield made
    for one in made:
        one.kill()


def training(model: Path, data: Path, out: Path) -> list[str]:
    """The command of a rank that trains."""
    paths = ["--model", model, "--data", data, "--adapter-path", out]
    options = f"--iters {ITERS} --batch-size 4 --steps-per-report 1 --val-batches 0 --num-layers 2".split()
    return allhands_command("train", "--train", *paths, *options)


@pytest.fixture(scope="module")
def undisturbed(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What two ranks make of it that nobody disturbs."""
    out = tmp_path_factory.mktemp("undisturbed")
    job = Job(training(tiny_model, tiny_data, out))
    for rank in range(2):
        job.start(rank)
    job.finish()
    return out


def assert_the_same(one: Path, other: Path) -> None:
    """Two runs have computed the same, bit by bit."""
    assert len(read_run(one).losses) == ITERS
    assert read_run(one).losses == read_run(other).losses
    weights = [read_weights(run / "adapters.safetensors") for run in (one, other)]
    assert distance(*weights) == 0.0


@pytest.mark.parametrize("key", [None, "our secret"])
def test_strangers_end_nothing(jobs: list[Job], key: str | None) -> None:
    job = Job(key=key)
    jobs.append(job)
    rank_0 = job.start(0)
    for words in HANDED:
        assert len(say(job.address, words)) <= 65
    sources = loopback_sources(5)
    with pestering(job.address, idle=1000, trickling=10) as still_there:
        assert (
            say_all(job.address, inputs(2000, seed=1), sources) <= 65
        )  # a random number for one that looks like one
        deadline = time.monotonic() + 20.0
        while still_there() > 200:  # they would use up the descriptors of rank 0
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert rank_0.poll() is None
        job.start(1)
        job.finish()


@pytest.mark.long
def test_a_hundred_thousand_inputs_twice(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, undisturbed: Path, jobs: list[Job]
) -> None:
    """At random, and as hypothesis likes; then the real rank 1 comes, and both train."""
    job = Job(training(tiny_model, tiny_data, tmp_path), "our secret")
    jobs.append(job)
    rank_0, sources = job.start(0), loopback_sources(40)
    most = say_all(job.address, inputs(100_000, seed=2), sources)
    number = st.binary(min_size=32, max_size=32).map(lambda raw: raw.hex().encode() + b"\n")
    letters = st.sampled_from(
        [b"[", b"{", b'"', b"\\", b"\n", b":", b",", b"1", b"null", b'"rank"', b'"body"', b"\0"]
    )
    words = st.one_of(st.binary(max_size=200), st.lists(letters, max_size=60).map(b"".join))

    @settings(max_examples=1000, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(st.one_of(words, st.tuples(number, words).map(b"".join)), min_size=1, max_size=20)
    )
    def many(some: list[bytes]) -> None:
        nonlocal most
        # Each alone, and with each other's ends: a hundred calls.
        both = [one[: len(one) // 2] + other for one in some for other in some]
        most = max(most, say_all(job.address, islice(cycle([*some, *both]), 100), sources))

    many()
    assert most <= 65
    assert rank_0.poll() is None
    with pestering(job.address, idle=1000, trickling=10):
        job.start(1)
        job.finish()
    assert_the_same(tmp_path, undisturbed)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has more than one loopback address")
@pytest.mark.parametrize("key", [None, "our secret"])
def test_a_recorded_hello_is_no_key(jobs: list[Job], key: str | None) -> None:
    """What rank 1 has said once gets nobody in at the next start with the same key, and keeps rank
    1 not out.
    """
    first = Job(key=key)
    again = Job(key=key, port=first.port)
    jobs += [first, again]
    with in_between(("127.0.0.7", first.port), first.address) as said:
        first.start(0)
        first.start(1, master="127.0.0.7")
        first.finish()
    assert b"rank" in said["there"]
    assert b"127.0.0" in said["back"]
    again.start(0)
    assert len(say(again.address, bytes(said["there"]))) <= 65
    assert len(say(again.address, bytes(said["back"]))) <= 65
    with socket.create_connection(again.address, 5.0) as waiting:  # one that stays
        waiting.sendall(said["there"])
        waiting.settimeout(20.0)
        heard = b""
        with suppress(ConnectionResetError):
            while more := waiting.recv(4096):
                heard += more
    assert len(heard) <= 65
    again.start(1)
    again.finish()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has more than one loopback address")
def test_a_false_rank_0_with_recorded_answers_is_left(jobs: list[Job]) -> None:
    """It says what rank 0 has said at the last start; rank 1 goes on looking, and finds the true
    one.
    """
    first = Job(key="our secret")
    again = Job(key="our secret", port=first.port)
    jobs += [first, again]
    with in_between(("127.0.0.7", first.port), first.address) as said:
        first.start(0)
        first.start(1, master="127.0.0.7")
        first.finish()
    came = threading.Event()

    def answer(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                with server.accept()[0] as caller, suppress(OSError):
                    caller.sendall(said["back"])
                    caller.settimeout(1.0)
                    while caller.recv(4096):
                        came.set()

    with socket.create_server(again.address) as false:
        thread = threading.Thread(target=answer, args=(false,))
        thread.start()
        rank_1 = again.start(1)
        assert came.wait(60.0)
        false.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert rank_1.poll() is None
    again.start(0)
    again.finish()


def test_a_rank_without_the_key_takes_nobodys_place(jobs: list[Job]) -> None:
    """A whole rank 1 of the same job that has all but the key: it is a stranger, whoever comes
    first.
    """
    job = Job(key="our secret")
    false = Job(key="another", port=job.port)
    jobs += [job, false]
    job.start(0)
    early = false.start(1)
    with suppress(subprocess.TimeoutExpired):
        early.wait(3.0)
    false.start(1)
    job.start(1)
    job.finish()


def test_whoever_asks_first_does_not_keep_the_output_from_rank_0(tmp_path: Path) -> None:
    """Under mpirun rank 0 fetches our own output at a socket: others may call there before it, and
    say nothing.
    """
    server = processes._offer_output(tmp_path / "output.socket")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
            silent.connect(str(tmp_path / "output.socket"))
            for _ in range(3):
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.settimeout(5.0)
                    connection.connect(str(tmp_path / "output.socket"))
                    _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
                assert len(descriptors) == 2
                for descriptor in descriptors:
                    os.close(descriptor)
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
