"""Ranks join MLX's ring in an order in which nobody is called before it listens."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from strangers import inputs, loopback_sources, pestering, say, say_all, wait_for

from allhands.cluster.processes import reserve_ports
from allhands.distributed import ring
from allhands.distributed.ring import BlockedError, PortTakenError, take_turns
from allhands.errors import DistributedError


def hostfile(directory: Path, size: int, more: Sequence[str] = ("10.9.9.9:1",)) -> Path:
    sockets, ports = reserve_ports(size, shareable=True)
    for one in sockets:
        one.close()
    path = directory / "hosts.json"
    path.write_text(json.dumps([[f"127.0.0.1:{port}", *more] for port in ports]))
    return path


def port_of(path: Path, rank: int) -> tuple[str, int]:
    name, _, port = json.loads(path.read_text())[rank][0].rpartition(":")
    return name, int(port)


def returns(
    path: Path, delays: Sequence[float], timeout_s: float = 20.0
) -> dict[int, float | DistributedError]:
    """When each rank, which comes after its delay, may go on, in seconds; or why it may not."""
    found: dict[int, float | DistributedError] = {}
    start = time.monotonic()

    def rank_of(rank: int) -> None:
        time.sleep(delays[rank])
        try:
            take_turns(path, rank, timeout_s)
            found[rank] = time.monotonic() - start
        except DistributedError as error:
            found[rank] = error

    threads = [
        threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(len(delays))
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    return found


@pytest.mark.parametrize(
    "delays", [(0, 0), (0.3, 0), (0, 0.3), (0.3, 0, 0.1, 0.2), (0, 0.2, 0.4, 0)]
)
def test_the_last_rank_goes_when_all_others_have_gone(
    tmp_path: Path, delays: Sequence[float]
) -> None:
    found = returns(hostfile(tmp_path, len(delays)), delays)
    *others, last = (found[rank] for rank in range(len(delays)))
    assert all(isinstance(each, float) for each in (*others, last)), found
    assert last >= max(others) + 0.5 * ring._HEAD_START_S  # type: ignore[operator,type-var]
    assert max(delays) <= last < max(delays) + 1.0  # type: ignore[operator]


def test_strangers_and_other_jobs_change_nothing(tmp_path: Path) -> None:
    path = hostfile(tmp_path, 2)
    where = port_of(path, 1)
    waiting = threading.Thread(target=take_turns, args=(path, 1, 20.0))
    waiting.start()
    for words in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"allhands ring " + b"0" * 64 + b" 0\n",
        b"\xff" * 500,
    ):
        for _ in range(200):
            try:
                call = socket.create_connection(where, timeout=5)
                break
            except OSError:
                time.sleep(0.01)
        with call:
            call.sendall(words)
    assert waiting.is_alive()
    take_turns(path, 0, 20.0)
    waiting.join(10)
    assert not waiting.is_alive()


def test_who_says_nothing_holds_nobody_up_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "_TALK_S", 0.2)
    path = hostfile(tmp_path, 2)
    results: list[dict[int, float | DistributedError]] = []
    thread = threading.Thread(target=lambda: results.append(returns(path, (0.3, 0))))
    thread.start()
    for _ in range(200):
        try:
            silent = socket.create_connection(port_of(path, 1), timeout=5)
            break
        except OSError:
            time.sleep(0.01)
    with silent:
        thread.join(20)
    assert all(isinstance(each, float) and each < 2.0 for each in results[0].values()), results


_TURN = """
import sys
from pathlib import Path
from allhands.distributed.ring import take_turns
take_turns(Path(sys.argv[1]), int(sys.argv[2]), 600.0)
"""


@contextmanager
def turn_of(path: Path, rank: int) -> Iterator[subprocess.Popen[bytes]]:
    """A real process that waits for its turn."""
    with subprocess.Popen([sys.executable, "-c", _TURN, str(path), str(rank)]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.long)])
def test_strangers_end_nothing(tmp_path: Path, count: int) -> None:
    path = hostfile(tmp_path, 2)
    where = port_of(path, 1)
    with turn_of(path, 1) as last:
        wait_for(where)
        with pestering(where, idle=1000, trickling=10):
            assert say_all(where, inputs(count, seed=6), loopback_sources(20)) <= 65
            assert last.poll() is None
            with turn_of(path, 0) as first:
                assert first.wait(20.0) == 0
            assert last.wait(20.0) == 0


def test_a_byte_now_and_then_holds_nobody_up(tmp_path: Path) -> None:
    path = hostfile(tmp_path, 2)
    where = port_of(path, 1)
    with turn_of(path, 1) as last:
        wait_for(where)
        with pestering(where, idle=1, trickling=3):
            time.sleep(1.0)
            began = time.monotonic()
            take_turns(path, 0, 20.0)
            assert last.wait(20.0) == 0
            assert time.monotonic() - began < 5.0


def test_a_recorded_word_is_not_believed_again(tmp_path: Path) -> None:
    """What one start's rank 0 has said to rank 1 is a stranger's word at the next start with the
    same addresses.
    """
    path = hostfile(tmp_path, 2)
    where, heard = port_of(path, 1), bytearray()
    called_at = socket.socket.sendall

    def recorded(one: socket.socket, words: bytes) -> None:
        heard.extend(words)
        called_at(one, words)

    for start in range(2):
        with turn_of(path, 1) as last, pytest.MonkeyPatch.context() as patch:
            wait_for(where)
            if start == 0:
                patch.setattr(socket.socket, "sendall", recorded)
            else:
                assert len(heard) > 100
                assert len(say(where, bytes(heard))) <= 65
                assert last.poll() is None
            take_turns(path, 0, 20.0)
            assert last.wait(20.0) == 0


def test_a_start_with_another_secret_is_a_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even at the same addresses: each start of a supervisor has one of its own."""
    path = hostfile(tmp_path, 2)
    monkeypatch.setenv("ALLHANDS_RING_KEY", "this start's")
    with turn_of(path, 1) as last:
        wait_for(port_of(path, 1))
        monkeypatch.setenv("ALLHANDS_RING_KEY", "another start's")
        with pytest.raises(DistributedError, match="said nothing to rank 0"):
            take_turns(path, 0, 0.5)
        assert last.poll() is None
        monkeypatch.setenv("ALLHANDS_RING_KEY", "this start's")
        take_turns(path, 0, 20.0)
        assert last.wait(20.0) == 0


def test_a_neighbour_that_does_not_come_is_named(tmp_path: Path) -> None:
    path = hostfile(tmp_path, 3)
    hosts = [addresses[0] for addresses in json.loads(path.read_text())]
    for rank, before in ((0, 2), (1, 0)):
        with pytest.raises(DistributedError) as caught:
            take_turns(path, rank, 0.3)
        assert caught.value.where == f"rank {before} at {hosts[before]}"
        assert f"said nothing to rank {rank} at {hosts[rank]}" in str(caught.value)
    with pytest.raises(DistributedError) as caught:
        take_turns(path, 2, 0.3)
    assert caught.value.where == f"rank 0 at {hosts[0]}"
    assert "refused" in str(caught.value)


def test_somebody_else_at_the_neighbours_address_is_told_of(tmp_path: Path) -> None:
    path = hostfile(tmp_path, 2)
    with socket.create_server(port_of(path, 0)) as stranger:

        def answer() -> None:
            while True:
                call, _ = stranger.accept()
                with call:
                    call.recv(1000)
                    call.sendall(b"hello\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(DistributedError) as caught:
            take_turns(path, 1, 0.5, Seen(at_s=0.0))
        assert caught.value.code == "rank-absent"


@dataclass
class Seen:
    """A supervisor that knows after ``at_s`` that all ranks listen."""

    at_s: float
    heard: int = 0
    began: float = field(default_factory=time.monotonic)

    def listening(self) -> None:
        self.heard += 1

    def all_listen(self) -> bool:
        return time.monotonic() - self.began >= self.at_s


@contextmanager
def silent(where: tuple[str, int]) -> Iterator[None]:
    """A port that drops what comes: there is no place in its queue."""
    with socket.socket() as listener, ExitStack() as callers:
        listener.bind(where)
        listener.listen(0)
        for _ in range(4):
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(where)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["refused", "timed out"])
def test_a_neighbour_that_listens_and_cannot_be_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name, seconds in (("_CALL_S", 0.8), ("_BRIEF_CALL_S", 0.4), ("_REFUSED_S", 0.5)):
        monkeypatch.setattr(ring, name, seconds)
    path = hostfile(tmp_path, 2)
    with silent(port_of(path, 0)) if kind == "timed out" else nullcontext():
        # Nobody knows: it may be late.
        unknown = Seen(at_s=float("inf"))
        with pytest.raises(DistributedError) as caught:
            take_turns(path, 1, 2.5, unknown)
        assert not isinstance(caught.value, BlockedError)
        assert unknown.heard == 1
        began = time.monotonic()
        with pytest.raises(BlockedError, match=kind) as blocked:
            take_turns(path, 1, 60.0, Seen(at_s=1.0))
        assert 1.4 < time.monotonic() - began < 10
    assert blocked.value.peer == 0
    assert "cluster check" in str(blocked.value)


def test_a_neighbour_that_can_be_called_late_is_not_blocked(tmp_path: Path) -> None:
    path = hostfile(tmp_path, 2)
    seen, found = Seen(at_s=0.5), list[Exception]()

    def last() -> None:
        try:
            take_turns(path, 1, 20.0, seen)
        except DistributedError as error:
            found.append(error)

    thread = threading.Thread(target=last)
    thread.start()
    time.sleep(1.2)
    take_turns(path, 0, 20.0, seen)
    thread.join(20)
    assert found == []


@pytest.mark.parametrize("text", [None, "no JSON", "{}", "[[]]", "[1, 2]", "[" * 5000])
def test_what_mlx_cannot_read_is_left_to_mlx_to_tell(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "hosts.json"
    if text is not None:
        path.write_text(text)
    take_turns(path, 0, 60.0)
    take_turns(path, 1, 60.0)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_address_that_cannot_be_had_is_told_at_once(tmp_path: Path, rank: int) -> None:
    path = hostfile(tmp_path, 3)
    hosts = json.loads(path.read_text())

    def turn(address: str) -> None:
        hosts[rank] = [address]
        path.write_text(json.dumps(hosts))
        take_turns(path, rank, 60.0)

    for none in ("127.0.0.1:many", "127.0.0.1"):
        turn(none)  # for MLX to say
    with pytest.raises(
        DistributedError, match=r"192\.0\.2\.7 is no address of this computer"
    ) as caught:
        turn("192.0.2.7:5000")
    assert not isinstance(caught.value, PortTakenError)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(PortTakenError, match="listens there already"),
    ):
        turn(f"127.0.0.1:{taken.getsockname()[1]}")


_RANK = """
import sys, time
from allhands.distributed.backend import connect
time.sleep(0.4 * (sys.argv[1] == "0"))
start = time.monotonic()
connect("ring", 2, int(sys.argv[1]))
print(time.monotonic() - start)
"""


def test_a_last_rank_that_comes_first_costs_no_second(tmp_path: Path) -> None:
    # By itself MLX calls again after a second, of which the first waits for 0.6; a busy computer is
    # late now and then.
    assert any(_seconds_of_first(hostfile(tmp_path, 2, more=())) < 0.3 for _ in range(12))


def _seconds_of_first(path: Path) -> float:
    """How long the first of two ranks takes to join the last, which has come before it."""
    command = [sys.executable, "-c", _RANK]
    variables = {"PATH": "/usr/bin:/bin", "MLX_HOSTFILE": str(path)}
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], env={**variables, "MLX_RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    seconds = [float(each.communicate(timeout=60)[0]) for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0]
    return seconds[0]
