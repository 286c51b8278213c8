"""Ranks reach the first one at the port that NCCL or JACCL is going to use, before that waits in
vain.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import pytest
from test_ring_turns import Seen, silent

from allhands.distributed import backend, ring
from allhands.distributed.ring import BlockedError, PortTakenError, reach_first
from allhands.errors import DistributedError


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def ends(
    host: str, delays: Mapping[int, float], size: int, timeout_s: float = 20.0
) -> dict[int, float | Exception]:
    """When each of these ranks may go on, in seconds; or why it may not."""
    found: dict[int, float | Exception] = {}
    start = time.monotonic()

    def rank_of(rank: int) -> None:
        time.sleep(delays[rank])
        try:
            reach_first(host, rank, size, timeout_s)
            found[rank] = time.monotonic() - start
        except DistributedError as error:
            found[rank] = error

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in delays]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    return found


@pytest.mark.parametrize(
    "delays", [(0, 0), (0.3, 0), (0, 0.3), (0.3, 0, 0.1, 0.2), (0, 0.2, 0.4, 0)]
)
def test_all_go_on_when_all_are_there(delays: Sequence[float]) -> None:
    port = free_port()
    found = ends(f"127.0.0.1:{port}", dict(enumerate(delays)), len(delays))
    assert all(
        isinstance(each, float) and max(delays) <= each < max(delays) + 1.5
        for each in found.values()
    ), found
    with socket.socket() as next_user:
        next_user.bind(("127.0.0.1", port))  # without SO_REUSEADDR: nothing rests there


def test_who_goes_on_finds_nobody_of_the_trial_at_the_port() -> None:
    """As NCCL does: the first rank accepts, the others call again where they are refused, and read."""
    port, size, read = free_port(), 4, list[bytes]()

    def rank_of(rank: int) -> None:
        reach_first(f"127.0.0.1:{port}", rank, size, 20.0)
        if rank > 0:
            for _ in range(100):
                try:
                    call = socket.create_connection(("127.0.0.1", port), timeout=5.0)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
            with call:
                read.append(call.recv(10))
            return
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", port))
            server.listen(size - 1)
            for _ in range(size - 1):
                call, _ = server.accept()
                with call:
                    call.sendall(b"an id")

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
        assert not each.is_alive()
    assert read == [b"an id"] * (size - 1)


def test_strangers_are_seen_off() -> None:
    port = free_port()
    found: list[dict[int, float | Exception]] = []
    thread = threading.Thread(
        target=lambda: found.append(ends(f"127.0.0.1:{port}", {0: 0, 1: 0.5}, 2))
    )
    thread.start()
    for words in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 500,
        b"0" * 64 + b"\n" + b"x" * 90 + b"\n",
    ):
        for _ in range(200):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as call:
                    call.sendall(words)
                break
            except OSError:
                time.sleep(0.01)
    thread.join(20)
    assert all(isinstance(each, float) for each in found[0].values()), found


# On a busy computer a thread may not have its turn in three seconds.
@pytest.mark.flaky(reruns=1)
def test_ranks_that_do_not_come_are_named() -> None:
    found = ends(f"127.0.0.1:{free_port()}", {0: 0, 2: 0}, 4, timeout_s=3.0)
    assert isinstance(found[0], DistributedError)
    assert found[0].where == "ranks 1, 3"
    assert found[0].exit_code == 7


def test_a_port_that_is_taken_is_told_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortTakenError):
        reach_first(f"127.0.0.1:{taken.getsockname()[1]}", 0, 2, 5.0)


@pytest.mark.parametrize("kind", ["refused", "timed out"])
def test_a_first_rank_that_listens_and_cannot_be_called(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name, seconds in (("_CALL_S", 0.8), ("_BRIEF_CALL_S", 0.4), ("_REFUSED_S", 0.5)):
        monkeypatch.setattr(ring, name, seconds)
    port = free_port()
    with silent(("127.0.0.1", port)) if kind == "timed out" else nullcontext():
        with pytest.raises(DistributedError) as late:
            reach_first(f"127.0.0.1:{port}", 1, 2, 1.0, Seen(at_s=float("inf")))
        assert not isinstance(late.value, BlockedError)
        with pytest.raises(BlockedError, match=kind) as blocked:
            reach_first(f"127.0.0.1:{port}", 1, 2, 60.0, Seen(at_s=0.5))
    assert blocked.value.peer == 0
    assert "cluster check" in str(blocked.value)


@pytest.mark.slow
def test_without_a_supervisor_a_way_that_is_blocked_is_told_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in (("_CALL_S", 0.8), ("_BRIEF_CALL_S", 0.4)):
        monkeypatch.setattr(ring, name, seconds)
    port = free_port()
    with silent(("127.0.0.1", port)), pytest.raises(DistributedError, match="timed out"):
        reach_first(f"127.0.0.1:{port}", 1, 2, 2.0)
    (told,) = caplog.messages
    assert "firewall" in told
    caplog.clear()
    with pytest.raises(DistributedError) as caught:
        reach_first(f"127.0.0.1:{port}", 1, 2, 2.0)
    assert caught.value.code == "rank-absent"
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("name", "environ", "expected"),
    [
        ("nccl", {"NCCL_HOST_IP": "10.0.0.1", "NCCL_PORT": "4242"}, "10.0.0.1:4242"),
        (
            "nccl",
            {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": "4242"},
            None,
        ),  # no firewall is in between
        ("nccl", {}, None),
        ("jaccl", {"MLX_JACCL_COORDINATOR": "10.0.0.1:4242"}, "10.0.0.1:4242"),
        ("jaccl", {"MLX_JACCL_COORDINATOR": "10.0.0.1"}, None),
        ("ring", {"NCCL_HOST_IP": "10.0.0.1", "NCCL_PORT": "4242"}, None),
        ("mpi", {}, None),
    ],
)
def test_where_back_ends_call_the_first_rank(
    name: str, environ: dict[str, str], expected: str | None
) -> None:
    assert backend._first_rank(name, environ) == expected


@pytest.mark.parametrize("name", ["nccl", "jaccl"])
def test_connecting_begins_with_that(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And MLX is called only when all have been reached."""
    done = list[str]()

    class Began(Exception):
        """MLX has been called."""

    def initialise(*_: object) -> None:
        raise Began

    monkeypatch.setattr(backend, "check_build", lambda _: None)
    monkeypatch.setattr(backend, "reach_first", lambda host, *_: done.append(host))
    monkeypatch.setattr(backend, "initialise_group", initialise)
    # It would leave MLX's variables to the tests that follow.
    monkeypatch.setattr(backend, "launch_directly", lambda *_, **__: True)
    for variable, value in (
        ("NCCL_HOST_IP", "10.0.0.1"),
        ("NCCL_PORT", "5"),
        ("MLX_JACCL_COORDINATOR", "10.0.0.1:5"),
    ):
        monkeypatch.setenv(variable, value)
    with pytest.raises(Began):
        backend.connect(name, 2, 1)
    assert done == ["10.0.0.1:5"]
    with pytest.raises(Began):
        backend.connect(name, 2, 1, tried=True)  # at the meeting
    assert len(done) == 1
