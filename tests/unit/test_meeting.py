"""Ranks that know only where rank 0 is find each other: over real sockets, with strangers among
them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from allhands.cluster import meeting
from allhands.cluster.environment import recognise, rendezvous
from allhands.cluster.meeting import Patience, meet
from allhands.cluster.place import MeetingPoint
from allhands.errors import DistributedError
from allhands.runtime.callers import CALLER, LISTENER, Call, Caller, Handshake, key_for

QUICK = Patience(20.0, first_pause_s=0.02, longest_pause_s=0.1)
SHORT = Patience(1.5, first_pause_s=0.02, longest_pause_s=0.1)


def _free_ports(count: int = 1) -> tuple[int, ...]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = tuple(one.getsockname()[1] for one in sockets)
    for one in sockets:
        one.close()
    return ports


def _point(host: str = "127.0.0.1", job: str = "job 1", count: int = 1) -> MeetingPoint:
    return MeetingPoint(host, _free_ports(count), job)


class Ranks:
    """Ranks in threads, each with what it got or what went wrong."""

    def __init__(self) -> None:
        self.got: dict[str, tuple[str, ...]] = {}
        self.errors: dict[str, DistributedError] = {}
        self._threads: list[threading.Thread] = []

    def start(
        self,
        point: MeetingPoint,
        rank: int,
        size: int,
        patience: Patience = QUICK,
        *,
        port: int = 0,
        name: str = "",
    ) -> None:
        def run() -> None:
            try:
                self.got[name or str(rank)] = meet(point, rank, size, port or 5000 + rank, patience)
            except DistributedError as error:
                self.errors[name or str(rank)] = error

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def end(self) -> Ranks:
        for thread in self._threads:
            thread.join(40.0)
            assert not thread.is_alive()
        return self


@contextmanager
def _listener(answer: Callable[[socket.socket], None]) -> Iterator[tuple[int, list[int]]]:
    """A stranger who listens; its port, and how often somebody came."""
    came: list[int] = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(16)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    came.append(1)
                    with connection, suppress(OSError):
                        answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1], came
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(5.0)


def _connect(port: int) -> socket.socket:
    """To rank 0, which may not listen yet."""
    for _ in range(200):
        with suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=5.0)
        time.sleep(0.01)
    raise AssertionError("rank 0 does not listen")


def test_eight_ranks_get_the_same_list() -> None:
    ranks, point = Ranks(), _point()
    for rank in (3, 1, 7, 0, 2, 6, 5, 4):
        ranks.start(point, rank, 8)
    ranks.end()
    assert ranks.errors == {}
    assert set(ranks.got.values()) == {tuple(f"127.0.0.1:{5000 + rank}" for rank in range(8))}
    assert len(ranks.got) == 8


def test_the_port_is_free_at_once_for_the_next_meeting() -> None:
    point = _point()
    for _ in range(3):
        ranks = Ranks()
        for rank in range(2):
            ranks.start(point, rank, 2)
        assert ranks.end().errors == {}


def _all_of(one: socket.socket) -> bytes:
    """What is said until the other end hangs up."""
    heard = b""
    with suppress(ConnectionResetError):
        while more := one.recv(100):
            heard += more
    return heard


def test_strangers_are_dropped_and_stop_nothing() -> None:
    ranks, point = Ranks(), _point()
    ranks.start(point, 0, 3)
    port = point.ports[0]
    with (
        _connect(port) as silent,
        _connect(port) as web,
        _connect(port) as garbage,
        _connect(port) as forged,
    ):
        _connect(port).close()  # a port scanner
        web.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        garbage.sendall(os.urandom(20000))
        forged.sendall(b'{"body": "{\\"rank\\": 1}", "mac": "00"}\n{"body": 1}\n')
        ranks.start(
            MeetingPoint(point.host, point.ports, "another job"), 1, 3, SHORT, name="other job"
        )
        for one in (web, forged):  # nothing is told but a number
            assert len(_all_of(one)) == 65
        for rank in (1, 2):
            ranks.start(point, rank, 3)
        ranks.end()
        assert len(_all_of(silent)) == 65
    assert set(ranks.got) == {"0", "1", "2"}
    assert len(set(ranks.got.values())) == 1
    told = ranks.errors["other job"].message  # it has not got in, during the meeting or after it
    assert "not rank 0 of this job" in told or "refused" in told


def test_a_flood_of_strangers_does_not_keep_ranks_out() -> None:
    ranks, point = Ranks(), _point()
    ranks.start(point, 0, 2)
    strangers = [_connect(point.ports[0]) for _ in range(100)]
    ranks.start(point, 1, 2)
    ranks.end()
    for one in strangers:
        one.close()
    assert set(ranks.got) == {"0", "1"}


def test_a_late_rank_0_is_waited_for() -> None:
    ranks, point = Ranks(), _point()
    for rank in (1, 2):
        ranks.start(point, rank, 3)
    time.sleep(0.5)
    assert ranks.got == {}
    ranks.start(point, 0, 3)
    assert ranks.end().errors == {}
    assert len(ranks.got) == 3


def test_a_name_that_is_not_known_yet_is_asked_for_again() -> None:
    asked, told = list[str](), list[str]()

    def lagging(name: str) -> str:
        asked.append(name)
        if len(asked) < 4:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return "127.0.0.1"

    ranks, point = Ranks(), _point("head.cluster.local")
    ranks.start(point, 0, 2)
    patient = Patience(20.0, told.append, 0.0, first_pause_s=0.02, resolve=lagging)
    ranks.start(point, 1, 2, patient)
    assert ranks.end().errors == {}
    assert asked == ["head.cluster.local"] * 4
    assert len(told) == 3
    assert "the name head.cluster.local has no address yet (Name or service not known)" in told[0]


def test_a_name_that_never_comes_is_named() -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    began = time.monotonic()
    with pytest.raises(DistributedError) as caught:
        meet(_point("head"), 1, 2, 5001, Patience(0.5, first_pause_s=0.02, resolve=unknown))
    assert 0.4 < time.monotonic() - began < 3.0
    assert caught.value.code == "rank-zero-unreachable"
    assert caught.value.where == "rank 1"


def test_ranks_that_do_not_come_are_named() -> None:
    ranks, point, told = Ranks(), _point(), list[str]()
    ranks.start(point, 0, 4, Patience(1.0, told.append, 0.3))
    ranks.start(point, 2, 4, Patience(3.0, first_pause_s=0.02))
    ranks.end()
    assert "ranks 1, 3 of 4 did not come within 1.0 s" in ranks.errors["0"].message
    assert "ALLHANDS_MEETING_KEY" not in ranks.errors["0"].message
    assert (
        ranks.errors["2"].message == ranks.errors["0"].message
    )  # who is there is told why, at once
    assert any(line.startswith("waiting for ranks 1, 3 of 4 (") for line in told)


def test_no_rank_0_is_told_with_the_command_to_look() -> None:
    point = _point()
    with pytest.raises(DistributedError) as caught:
        meet(point, 1, 2, 5001, Patience(0.3, first_pause_s=0.02))
    assert caught.value.code == "rank-zero-unreachable"
    assert f"nc -vz 127.0.0.1 {point.ports[0]}" in str(caught.value.hint)


def test_another_size_is_an_error_that_names_both() -> None:
    ranks, point = Ranks(), _point()
    ranks.start(point, 0, 4)
    ranks.start(point, 1, 4)
    time.sleep(0.3)
    ranks.start(point, 2, 8)
    ranks.end()
    expected = "rank 2 at 127.0.0.1 was started for 8 ranks, rank 0 for 4"
    assert {error.message for error in ranks.errors.values()} == {expected}
    assert set(ranks.errors) == {"0", "1", "2"}


def test_the_same_rank_twice_is_an_error() -> None:
    ranks, point = Ranks(), _point()
    ranks.start(point, 0, 3)
    ranks.start(point, 1, 3, name="one")
    ranks.start(point, 1, 3, name="again")
    ranks.end()
    assert {error.message for error in ranks.errors.values()} == {
        "there are two ranks 1: at 127.0.0.1 and at 127.0.0.1"
    }
    assert set(ranks.errors) == {"0", "one", "again"}


def test_two_ranks_0_are_an_error() -> None:
    ranks, point = Ranks(), _point(count=2)
    ranks.start(point, 0, 2, name="one")
    _connect(point.ports[0]).close()
    ranks.start(point, 0, 2, name="again")
    ranks.end()
    assert set(ranks.errors) == {"one", "again"}
    assert "there are two ranks 0" in ranks.errors["again"].message


def test_another_version_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, point = Ranks(), _point()
    ranks.start(point, 0, 2)
    _connect(point.ports[0]).close()  # rank 0 has taken its version
    old = meeting._VERSION
    monkeypatch.setattr(meeting, "_VERSION", 99)
    hello = meeting._Hello(old, 1, 2, "", 5001, "n")
    with pytest.raises(DistributedError) as caught:
        meeting._Guest(point, hello, _key(), meeting.Waiting(QUICK)).run()
    assert caught.value.code == "versions-differ"
    assert f"its meeting is of version {old}, rank 0's of 99" in ranks.end().errors["0"].message


def _key(secret: str = "") -> bytes:
    return key_for("meeting of job 1", {"ALLHANDS_MEETING_KEY": secret})


def _say_hello(call: Call, key: bytes, **changes: object) -> Handshake:
    """What rank 1 of 3 says, or what it should not."""
    until = time.monotonic() + 5.0
    conversation = call.begin(key, until)
    hello = {
        "version": 2,
        "rank": 1,
        "size": 3,
        "address": "127.0.0.1",
        "port": 5001,
        "nonce": "its nonce",
    } | changes
    call.say(conversation.sealed(CALLER, json.dumps(hello).encode()), until)
    return conversation


def test_a_rank_that_lost_its_connection_may_come_again() -> None:
    ranks, point = Ranks(), _point()
    ranks.start(point, 0, 3)
    _connect(point.ports[0]).close()
    with Call(("127.0.0.1", point.ports[0]), 5.0) as call:
        conversation = _say_hello(call, _key())
        words = conversation.opened(LISTENER, call.line(4096, time.monotonic() + 5.0))
        assert words is not None
        assert json.loads(words) == {"kind": "welcome"}
    ranks.start(point, 1, 3)
    ranks.start(point, 2, 3)
    assert ranks.end().errors == {}
    assert len(ranks.got) == 3


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"rank": value}
            for value in (True, -1, 3, 1.0, "1", None, float("nan"), 10**30, [1], {})
        ),
        *({"size": value} for value in (0, True, "3", 1 << 40)),
        *({"port": value} for value in (0, 65536, -1, True, "5001", float("inf"))),
        *(
            {"address": value}
            for value in ("", "node1", "::1", "1.2.3", "127.0.0.1:5", 7, None, "\ud800")
        ),
        *({"version": value} for value in (True, "2", None, 2.0, -1)),
        *({"nonce": value} for value in (None, 1, [])),
    ],
)
def test_a_hello_of_other_types_is_a_strangers(changes: dict[str, object]) -> None:
    """Even where its HMAC is right: without a key it is of what everybody may know."""
    ranks, point = Ranks(), _point()
    ranks.start(point, 0, 3)
    _connect(point.ports[0]).close()
    with Call(("127.0.0.1", point.ports[0]), 5.0) as call:
        _say_hello(call, _key(), **changes)
        assert call.line(100, time.monotonic() + 5.0) == b""
    for rank in (1, 2):
        ranks.start(point, rank, 3)
    assert ranks.end().errors == {}
    assert len(ranks.got) == 3


def test_a_port_that_is_taken_is_passed_over() -> None:
    def web_server(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with _listener(web_server) as (taken, came):
        point = MeetingPoint("127.0.0.1", (taken, *_free_ports()), "job 1")
        ranks = Ranks()
        for rank in range(3):
            ranks.start(point, rank, 3)
        assert ranks.end().errors == {}
        assert len(ranks.got) == 3
        assert len(came) >= 3


def test_no_port_at_all_is_told() -> None:
    with (
        _listener(lambda connection: None) as (taken, _),
        pytest.raises(DistributedError) as caught,
    ):
        meet(MeetingPoint("127.0.0.1", (taken,), "job 1"), 0, 2, 5000, SHORT)
    assert f"{taken}: Address already in use" in caught.value.message


@pytest.mark.parametrize(
    ("host", "address", "bound", "why"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", None),
        ("localhost", "127.0.0.1", "127.0.0.1", None),
        ("127.0.0.9", "127.0.0.9", "127.0.0.9", None),
        ("0.0.0.0", "0.0.0.0", "0.0.0.0", None),
        (
            "head",
            "127.0.1.1",
            "0.0.0.0",
            "head is 127.0.1.1 here, which no other computer can reach",
        ),
        ("head", "192.0.2.7", "0.0.0.0", "192.0.2.7, which is no address of this computer"),
        ("head", None, "0.0.0.0", "the name head has no address here"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has more than one loopback address")
def test_rank_0_listens_where_the_launcher_says(
    host: str, address: str | None, bound: str, why: str | None
) -> None:
    """And on all addresses only where that cannot be had, which is said at once."""

    def resolve(name: str) -> str:
        assert name == host
        if address is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return address

    ranks, point, told = Ranks(), _point(host), list[str]()
    ranks.start(point, 0, 2, Patience(20.0, told.append, 1000.0, resolve=resolve))
    own = psutil.Process()
    deadline = time.monotonic() + 10.0
    while not (
        found := [
            one.laddr.ip for one in own.net_connections("tcp") if one.laddr.port == point.ports[0]
        ]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert found == [bound]
    reached = address if address and bound != "0.0.0.0" else "127.0.0.1"
    ranks.start(point, 1, 2, replace(QUICK, resolve=lambda name: reached))
    assert ranks.end().errors == {}
    assert [why in line for line in told] == [True] if why else told == []


def test_an_ipv6_address_is_refused_at_once() -> None:
    """MLX's ring and its NCCL read no such addresses."""
    for rank in range(2):
        began = time.monotonic()
        with pytest.raises(DistributedError, match="IPv6 address ::1"):
            meet(_point("::1"), rank, 2, 5000, QUICK)
        assert time.monotonic() - began < 1.0


def test_a_secret_keeps_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, point, reading = Ranks(), _point(), threading.Event()

    def resolve(name: str) -> str:
        reading.set()  # it has read its environment
        return name

    ranks.start(point, 1, 2, replace(SHORT, resolve=resolve))
    assert reading.wait(10.0)
    monkeypatch.setenv("ALLHANDS_MEETING_KEY", "something else")
    ranks.start(point, 0, 2, SHORT)
    assert set(ranks.end().errors) == {"0", "1"}
    # Who has forgotten it on one computer is told where to look; where nobody has called there is
    # nothing to say.
    assert "from 127.0.0.1 did not prove" in ranks.errors["0"].message
    assert "ALLHANDS_MEETING_KEY" in ranks.errors["0"].message


def test_loopback_addresses_are_not_told_to_other_computers() -> None:
    """Ranks beside rank 0 are where rank 0 is, as the others see it."""
    call = meeting._RollCall(
        _point(), meeting._Hello(2, 0, 4, "", 5000, "n"), b"", meeting.Waiting(QUICK)
    )
    for rank, address in ((1, "127.0.0.1"), (2, "10.0.0.2"), (3, "10.0.0.2")):
        with socket.socket() as connection:
            caller = Caller(connection, address, "10.0.0.1", 0.0)
        hello = meeting._Hello(2, rank, 4, address, 5000 + rank, "n")
        call._present[rank] = meeting._Visitor(caller, hello, caller.conversation(b""))
    assert call._peers() == ("10.0.0.1:5000", "10.0.0.1:5001", "10.0.0.2:5002", "10.0.0.2:5003")


# --- with MLX -------------------------------------------------------------------------------------


def _torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_PORT": port,
    }
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "localhost"}


def test_what_mlx_reads_is_written_and_the_port_is_kept(tmp_path: Path) -> None:
    (port,) = _free_ports()
    found: dict[int, dict[str, str]] = {}

    def run(rank: int) -> None:
        with rendezvous(recognise(_torchrun(rank, 2, port)), tmp_path, QUICK) as variables:
            found[rank] = variables
            own = json.loads(Path(variables["MLX_HOSTFILE"]).read_text())[rank][0]
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind(("127.0.0.1", int(own.rpartition(":")[2])))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hostfiles = [Path(found[rank]["MLX_HOSTFILE"]).read_text() for rank in range(2)]
    assert hostfiles[0] == hostfiles[1]
    assert [found[rank]["MLX_RANK"] for rank in range(2)] == ["0", "1"]
    assert len({peer[0] for peer in json.loads(hostfiles[0])}) == 2


def test_nccl_is_told_the_address_of_rank_0(tmp_path: Path) -> None:
    (port,) = _free_ports()
    found: dict[int, dict[str, str]] = {}

    def run(rank: int) -> None:
        with rendezvous(
            recognise(_torchrun(rank, 2, port), has_cuda=True), tmp_path, QUICK
        ) as variables:
            found[rank] = variables

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0]["NCCL_HOST_IP"] == found[1]["NCCL_HOST_IP"] == "127.0.0.1"
    assert found[0]["NCCL_PORT"] == found[1]["NCCL_PORT"]
    assert [found[rank]["MLX_WORLD_SIZE"] for rank in range(2)] == ["2", "2"]
    assert [found[rank]["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["0", "1"]


_JOIN = """
import os
from allhands.cluster.environment import recognise
from allhands.cluster.join import join_group
launch = recognise(os.environ)
group = join_group(launch, 30.0)
import mlx.core as mx
total = group.all_sum(mx.array([float(2 ** launch.rank)]))
print(launch.launcher, group.backend, group.rank, group.size, total.item())
"""


def test_ranks_of_torchrun_form_a_ring() -> None:
    (port,) = _free_ports()
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ALLHANDS_", "MLX_"))
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _JOIN],
            env=environ | _torchrun(rank, 3, port),
            stdout=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    lines = [process.communicate(timeout=60)[0].decode().split() for process in processes]
    assert lines == [["torchrun", "ring", str(rank), "3", "7.0"] for rank in range(3)]
