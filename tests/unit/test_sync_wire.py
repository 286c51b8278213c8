"""Who is served, who is not, and what goes over the wire, with real sockets and real certificates."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from strangers import in_between, inputs, loopback_sources, pestering, say, say_all

from allhands.cluster.sync import relay, wire
from allhands.cluster.sync.blocks import BLOCK_BYTES, BlockEntry, HashCache, sha256
from allhands.cluster.sync.relay import Listener, ask, fetch, serve, wanted
from allhands.cluster.sync.shelf import Destination, Shelf, WrongBlock
from allhands.cluster.sync.source import SourceShelf, make_certificate
from allhands.cluster.sync.wire import BEAT, BLOCK, JSON, Broken, Channel, Security, of_block, of_json, over_pipes
from allhands.errors import ConfigError

CONTENT = os.urandom(2 * BLOCK_BYTES + 5)


def entry_of(content: bytes, name: str = "file") -> BlockEntry:
    pieces = [content[place : place + BLOCK_BYTES] for place in range(0, len(content), BLOCK_BYTES)]
    return BlockEntry(0, (name,), len(content), 0, 0o600, b"".join(map(sha256, pieces)))


@pytest.fixture(scope="module")
def certificates() -> tuple[str, str]:
    return make_certificate(), make_certificate()


@pytest.fixture
def source(tmp_path: Path) -> SourceShelf:
    (tmp_path / "source").write_bytes(CONTENT)
    return SourceShelf([tmp_path / "source"], [entry_of(CONTENT)], lambda file: None)


class Served:
    """A listener on this computer, closed at the end."""

    def __init__(self, security: Security) -> None:
        self.sent: list[int] = []
        self.listener = Listener(security, self.sent.append)
        port = self.listener.listen("127.0.0.1")
        assert port is not None
        self.address = ("127.0.0.1", port)


@pytest.fixture
def serving() -> Iterator[Callable[[Security], Served]]:
    made: list[Served] = []

    def make(security: Security) -> Served:
        made.append(Served(security))
        return made[-1]

    yield make
    for served in made:
        served.listener.close()
    deadline = time.monotonic() + 5
    while [thread for thread in threading.enumerate() if thread.name.startswith("sync-")]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def take(channel: Channel, found: Destination) -> list[int]:
    received: list[int] = []
    try:
        ask(channel, found.missing())
        fetch(channel.receive, found, received.append)
    finally:
        channel.close()
    return received


@pytest.mark.parametrize("transport", ["tls", "tcp"])
def test_a_host_of_the_run_gets_what_it_lacks(
    transport: str, certificates: tuple[str, str], source: Shelf, serving: Callable[[Security], Served], tmp_path: Path
) -> None:
    security = Security(transport, "secret", certificates[0])
    served = serving(security)
    served.listener.open(source)
    found = Destination([str(tmp_path / "there")], source.entries, HashCache(None))
    found.look(lambda count: None)
    found.begin()
    other = Security(transport, "secret", certificates[0])
    assert take(other.connect([served.address]), found) == [BLOCK_BYTES, BLOCK_BYTES, 5]
    found.settle()
    assert (tmp_path / "there" / "file").read_bytes() == CONTENT
    assert served.sent == [BLOCK_BYTES, BLOCK_BYTES, 5]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(("tls", 0), ("tls", 1)), (("tcp", 0), ("tcp", 1)), (("tls", 0), ("tcp", 0)), (("tcp", 0), ("tls", 0))],
)
def test_strangers_get_nothing(
    ours: tuple[str, int],
    theirs: tuple[str, int],
    certificates: tuple[str, str],
    source: Shelf,
    serving: Callable[[Security], Served],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "SILENCE_S", 1.0)
    secrets = ["secret", "another secret"]
    served = serving(Security(ours[0], secrets[ours[1]], certificates[ours[1]]))
    served.listener.open(source)
    found = Destination([str(tmp_path / "there")], source.entries, HashCache(None))
    found.look(lambda count: None)
    stranger = Security(theirs[0], secrets[theirs[1]], certificates[theirs[1]])
    with pytest.raises(Broken):
        take(stranger.connect([served.address]), found)
    assert served.sent == []


def test_a_client_without_a_certificate_gets_nothing(
    certificates: tuple[str, str], source: Shelf, serving: Callable[[Security], Served]
) -> None:
    served = serving(Security("tls", "", certificates[0]))
    served.listener.open(source)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(served.address) as plain, context.wrap_socket(plain) as stranger:
        stranger.settimeout(10)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            _exchange(stranger, b"\0\0\0\x0f\x01" + b'{"kind":"want"}')
    assert served.sent == []


def _exchange(stranger: socket.socket, said: bytes) -> None:
    stranger.send(said)
    if not stranger.recv(1):
        raise ConnectionError


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000, b"\xff\xff\xff\xff\x01", b""])
@pytest.mark.parametrize("transport", ["tls", "tcp"])
def test_noise_does_not_stop_the_service(
    said: bytes,
    transport: str,
    certificates: tuple[str, str],
    source: Shelf,
    serving: Callable[[Security], Served],
    tmp_path: Path,
) -> None:
    security = Security(transport, "secret", certificates[0])
    served = serving(security)
    served.listener.open(source)
    for _ in range(20):
        with socket.create_connection(served.address) as stranger:
            stranger.sendall(said)
    found = Destination([str(tmp_path / "there")], source.entries, HashCache(None))
    found.look(lambda count: None)
    found.begin()
    deadline = time.monotonic() + 10
    while True:  # strangers at the door are let go one after the other
        try:
            assert sum(take(security.connect([served.address]), found)) == len(CONTENT)
        except Broken:
            assert time.monotonic() < deadline
        else:
            break


@pytest.mark.parametrize("transport", ["tls", "tcp"])
def test_strangers_who_take_their_time_hold_up_nobody(
    transport: str,
    certificates: tuple[str, str],
    source: Shelf,
    serving: Callable[[Security], Served],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "SILENCE_S", 2.0)
    security = Security(transport, "secret", certificates[0])
    served = serving(security)
    served.listener.open(source)
    with pestering(served.address, idle=300, trickling=5):
        assert say_all(served.address, inputs(60)) < 200
        found = Destination([str(tmp_path / "there")], source.entries, HashCache(None))
        found.look(lambda count: None)
        found.begin()
        assert sum(take(security.connect([served.address]), found)) == len(CONTENT)  # at the first call
    # A byte now and then does not make it longer.
    with socket.create_connection(served.address) as slow:
        began = time.monotonic()
        with suppress(OSError):
            while time.monotonic() < began + 10.0:
                slow.sendall(b"\0")
                time.sleep(0.1)
        assert time.monotonic() - began < 7.0


_SERVES = """
import sys
from allhands.cluster.sync.relay import Listener
from allhands.cluster.sync.shelf import Shelf
from allhands.cluster.sync.source import make_certificate
from allhands.cluster.sync.wire import Security
listener = Listener(Security(sys.argv[1], "secret", open(sys.argv[2]).read()), lambda count: None)
listener.open(Shelf([]))
print(listener.listen("127.0.0.1"), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("transport", ["tls", "tcp"])
@pytest.mark.parametrize("count", [500, pytest.param(100_000, marks=pytest.mark.long)])
def test_strangers_end_nothing(transport: str, count: int, certificates: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "certificate").write_text(certificates[0])
    command = [sys.executable, "-c", _SERVES, transport, str(tmp_path / "certificate")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        address = "127.0.0.1", int(process.stdout.readline())
        say_all(address, inputs(count), loopback_sources(20))
        channel = Security(transport, "secret", certificates[0]).connect([address])
        ask(channel, [])
        assert of_json(channel.receive()[1])["kind"] == "served"
        channel.close()
        assert process.communicate("") == ("", "")
    assert process.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has more than one loopback address")
def test_a_recorded_proof_is_worth_nothing(
    source: Shelf, serving: Callable[[Security], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    security = Security("tcp", "secret", "")
    served = serving(security)
    served.listener.open(source)
    with in_between(("127.0.0.7", served.address[1]), served.address) as said:
        security.connect([("127.0.0.7", served.address[1])]).close()
        deadline = time.monotonic() + 5.0
        while len(said["there"]) < 74:  # a number and a proof
            assert time.monotonic() < deadline
            time.sleep(0.01)
    answered = say(served.address, bytes(said["there"]) + b"\0\0\0\x1c\x01" + b'{"kind":"want","rows":[[0,0,0]]}')
    assert len(answered) <= 74
    assert answered[-32:] not in said["back"]
    assert served.sent == []
    # Nor what has been said to its sayer.
    assert len(say(served.address, bytes(said["back"]))) <= 74
    assert served.sent == []


def test_what_cannot_be_connected_to_is_named_and_the_next_address_is_tried(
    certificates: tuple[str, str], serving: Callable[[Security], Served]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = free.getsockname()
    security = Security("tcp", "secret", certificates[0])
    with pytest.raises(Broken, match=r"127\.0\.0\.1: .*refused"):
        security.connect([closed])
    security.connect([closed, serving(security).address]).close()
    with pytest.raises(Broken, match="no address"):
        security.connect([])


def test_who_comes_early_waits_with_signs_of_life(
    certificates: tuple[str, str], source: Shelf, serving: Callable[[Security], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_BEAT_S", 0.05)
    security = Security("tcp", "secret", "")
    served = serving(security)
    channel = security.connect([served.address])
    ask(channel, [(0, 2, 2)])
    assert [channel.receive()[0] for _ in range(3)] == [BEAT] * 3
    served.listener.open(source)
    while (frame := channel.receive())[0] == BEAT:
        pass
    assert frame[0] == BLOCK
    assert of_block(frame[1]) == (0, 2, CONTENT[2 * BLOCK_BYTES :])
    assert of_json(channel.receive()[1]) == {"kind": "served", "withdrawn": []}
    channel.close()


def test_blocks_are_passed_on_while_they_come(tmp_path: Path) -> None:
    """The second host has the first block before the first host has the last one."""
    first, second = (Destination([str(tmp_path / n)], [entry_of(CONTENT)], HashCache(None)) for n in "ab")
    for found in (first, second):
        found.look(lambda count: None)
        found.begin()
    down, up = os.pipe(), os.pipe()
    sending, receiving = over_pipes(up[0], down[1]), over_pipes(down[0], up[1])
    thread = threading.Thread(target=serve, args=(sending, first, {(0, 0), (0, 1), (0, 2)}, lambda count: None))
    thread.start()
    fetching = threading.Thread(target=fetch, args=(receiving.receive, second, lambda count: None))
    fetching.start()
    for block in range(3):
        assert second.since(block, 0.0) == []
        first.write(0, block, CONTENT[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
        assert second.since(block, 10.0) == [(0, block)]
    fetching.join(10)
    thread.join(10)
    second.settle()
    assert (tmp_path / "b" / "file").read_bytes() == CONTENT
    for descriptor in (*down, *up):
        os.close(descriptor)


def test_a_changed_source_is_given_up_and_the_rest_is_sent(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    (tmp_path / "b").write_bytes(b"stays")
    told: list[int] = []
    shelf = SourceShelf(
        [tmp_path / "a", tmp_path / "b"], [entry_of(CONTENT, "a"), entry_of(b"stays", "b")], told.append
    )
    (tmp_path / "a").write_bytes(CONTENT[:BLOCK_BYTES] + b"changed")
    found = Destination([str(tmp_path / "there")], shelf.entries, HashCache(None))
    found.look(lambda count: None)
    found.begin()
    down = os.pipe()
    sending, receiving = over_pipes(down[0], down[1]), over_pipes(down[0], down[1])
    thread = threading.Thread(target=serve, args=(sending, shelf, {(0, 0), (0, 1), (0, 2), (1, 0)}, lambda count: None))
    thread.start()
    fetch(receiving.receive, found, lambda count: None)
    thread.join(10)
    assert (told, found.withdrawn, found.missing()) == ([0], {0}, [])
    found.settle()
    assert (tmp_path / "there" / "b").read_bytes() == b"stays"
    assert not (tmp_path / "there" / "a").exists()
    for descriptor in down:
        os.close(descriptor)


def answers(*frames: tuple[int, bytes]) -> Callable[[], tuple[int, bytearray]]:
    left = [(kind, bytearray(content)) for kind, content in frames]

    def receive() -> tuple[int, bytearray]:
        if not left:
            raise Broken("over")
        return left.pop(0)

    return receive


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([(BLOCK, bytes(8) + b"x" * BLOCK_BYTES)], WrongBlock),
        ([(BLOCK, b"\xff" * 8 + b"x")], WrongBlock),
        ([(BLOCK, bytes(3))], Broken),
        ([(JSON, b"[]")], Broken),
        ([(JSON, b"{")], Broken),
        ([(JSON, b'{"kind": "want"}')], Broken),
        ([(BEAT, b"")], Broken),
    ],
)
def test_a_parent_that_talks_nonsense_is_left(
    tmp_path: Path, frames: list[tuple[int, bytes]], error: type[Exception]
) -> None:
    found = Destination([str(tmp_path)], [entry_of(CONTENT)], HashCache(None))
    found.look(lambda count: None)
    with pytest.raises(error):
        fetch(answers(*frames), found, lambda count: None)
    assert found.missing() == [(0, 0, 2)]


@pytest.mark.parametrize(
    "rows",
    [
        *(None, {}, [1], [[0, 0]], [[0, 0, 3]], [[1, 0, 0]], [[-1, 0, 0]], [[0, 2, 1]], [[0, -1, 0]], [["0", 0, 0]]),
        *([[False, 0, 0]], [[0, 0.0, 0]], [[0, 0, 1], [0, 0, 2]], [[0, 0, 10**30]], [[0, 0, 0, 0]]),
    ],
)
def test_requests_that_make_no_sense_are_refused(rows: object) -> None:
    with pytest.raises(Broken):
        wanted(rows, Shelf([entry_of(CONTENT)]))


def test_the_certificate_is_of_this_run_and_its_key_stays_nowhere(
    tmp_path: Path, certificates: tuple[str, str]
) -> None:
    assert certificates[0] != certificates[1]
    place = tmp_path / "scratch"
    place.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(place))
        Security("tls", "", make_certificate())
    assert list(place.iterdir()) == []


def test_a_clock_that_is_wrong_does_not_stop_it(tmp_path: Path, certificates: tuple[str, str]) -> None:
    """A certificate that is not valid yet and one that is not any more are the run's own all the same."""
    (tmp_path / "pem").write_text(certificates[0])
    argv = ["openssl", "x509", "-in", str(tmp_path / "pem"), "-signkey", str(tmp_path / "pem"), "-days", "-1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this openssl makes no certificate that is over")
    key = certificates[0][: certificates[0].index("-----BEGIN CERT")]
    security = Security("tls", "", key + done.stdout)
    served = Served(security)
    channel = security.connect([served.address])
    channel.close()
    served.listener.close()


def test_no_openssl_is_told_with_the_way_round_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="openssl cannot be run") as caught:
        make_certificate()
    assert "--transport" in str(caught.value.hint)
