"""The threads of MLX's ring sleep while nothing comes: its connections are changed, and no others."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Generator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from allhands.distributed.ring import receive_in_bulk, wait_asleep

Pair = tuple[socket.socket, socket.socket]


def connected(stack: ExitStack) -> Pair:
    """Two ends of a connection, on whose calls nobody waits."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = stack.enter_context(closing(socket.create_connection(server.getsockname())))
        other = stack.enter_context(closing(server.accept()[0]))
    for end in (one, other):
        os.set_blocking(end.fileno(), False)
    return one, other


@pytest.fixture
def pairs() -> Generator[tuple[Pair, Pair]]:
    with ExitStack() as stack:
        yield connected(stack), connected(stack)


def seconds_until_nothing_came(end: socket.socket) -> float:
    began = time.perf_counter()
    with pytest.raises(BlockingIOError):
        os.read(end.fileno(), 1)
    return time.perf_counter() - began


def test_calls_on_the_rings_connections_wait_a_moment(
    pairs: tuple[Pair, Pair], tmp_path: Path
) -> None:
    (one, other), strangers = pairs
    port = other.getsockname()[1]
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"], ["127.0.0.1:1"]]))
    assert sorted(wait_asleep(hosts)) == sorted([one.fileno(), other.fileno()])
    for end in (one, other):
        # A call that finds nothing ends as it did before, after a while in which the thread takes
        # no time.
        assert 0.0009 < seconds_until_nothing_came(end) < 1.0
    assert not any(os.get_blocking(end.fileno()) for end in strangers)
    os.write(other.fileno(), b"x")
    assert os.read(one.fileno(), 1) == b"x"


def test_what_is_large_wakes_seldom_and_what_is_short_comes_all_the_same(
    pairs: tuple[Pair, Pair], tmp_path: Path
) -> None:
    (one, other), _ = pairs
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{other.getsockname()[1]}"], ["127.0.0.1:1"]]))
    asleep = wait_asleep(hosts)
    receive_in_bulk(asleep, True)
    os.write(other.fileno(), bytes(1000))
    began = time.perf_counter()
    assert len(os.read(one.fileno(), 4000)) == 1000
    assert 0.0009 < time.perf_counter() - began < 1.0
    receive_in_bulk(asleep, False)
    os.write(other.fileno(), bytes(1000))
    assert len(os.read(one.fileno(), 4000)) == 1000
    receive_in_bulk([2**20], True)  # closed meanwhile


def test_without_a_ring_nothing_is_changed(pairs: tuple[Pair, Pair], tmp_path: Path) -> None:
    assert wait_asleep(tmp_path / "none.json") == []
    assert not any(os.get_blocking(end.fileno()) for pair in pairs for end in pair)
