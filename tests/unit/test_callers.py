"""What strangers say at a port: nothing of it is believed, and nobody else is held up."""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strangers import HANDED, changed, hello, inputs, loopback_sources, pestering, say, say_all

from allhands.cluster.meeting import _Hello
from allhands.io.strict_json import read_object
from allhands.runtime import callers
from allhands.runtime.callers import (
    CALLER,
    LISTENER,
    Call,
    Caller,
    Callers,
    Handshake,
    Unproved,
    key_for,
    listen_at,
)

KEY = key_for("a test", {"ALLHANDS_MEETING_KEY": "our secret"})


@contextmanager
def listening(talk_s: float = 10.0) -> Iterator[tuple[str, int]]:
    """A port at which whoever knows the key is answered what it says, in capitals."""
    over = threading.Event()
    server = listen_at(socket.AF_INET, ("127.0.0.1", 0), ())
    address = "127.0.0.1", int(server.getsockname()[1])

    def serve() -> None:
        with Callers([server], 4096, talk_s) as all_:
            while not over.is_set():
                for caller, line in all_.wait(0.05):
                    conversation = caller.conversation(KEY)
                    words = None if line is None else conversation.opened(CALLER, line)
                    if words is None:
                        all_.drop(caller)
                    else:
                        caller.proved = True
                        caller.say(
                            conversation.sealed(LISTENER, words.upper()), time.monotonic() + 5.0
                        )

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield address
    finally:
        over.set()
        thread.join()


def ask(address: tuple[str, int], key: bytes = KEY) -> bytes | None:
    """What is answered to who knows the key; ``None``: nothing."""
    until = time.monotonic() + 5.0
    with suppress(Unproved, OSError), Call(address, 5.0) as call:
        conversation = call.begin(key, until)
        call.say(conversation.sealed(CALLER, b"hello"), until)
        return conversation.opened(LISTENER, call.line(4096, until))
    return None


def test_who_knows_the_key_is_believed_and_nobody_else() -> None:
    with listening() as address:
        assert ask(address) == b"HELLO"
        assert ask(address, key_for("a test", {"ALLHANDS_MEETING_KEY": "another"})) is None
        assert ask(address, key_for("a test", {})) is None
        assert (
            ask(address, key_for("another purpose", {"ALLHANDS_MEETING_KEY": "our secret"})) is None
        )
        assert ask(address) == b"HELLO"


def test_keys_of_different_secrets_differ() -> None:
    """Also where the parts run together, or are no text."""
    environments = [
        {},
        {"ALLHANDS_MEETING_KEY": "ab"},
        {"ALLHANDS_MEETING_KEY": "a", "ALLHANDS_RING_KEY": "b"},
        {"ALLHANDS_RING_KEY": "ab"},
        {"ALLHANDS_MEETING_KEY": "\udcff"},
    ]
    keys = [key_for(purpose, environ) for purpose in ("", "a", "ab") for environ in environments]
    assert len(set(keys)) == len(keys)


def test_a_line_proves_nothing_in_any_other_conversation_role_or_words() -> None:
    one = Handshake(KEY, b"1" * 64, b"2" * 64)
    line = one.sealed(CALLER, b"hello")
    assert one.opened(CALLER, line) == b"hello"
    assert one.opened(CALLER, line.rstrip(b"\n")) == b"hello"
    assert one.opened(LISTENER, line) is None  # sent back to who has said it
    for other in (
        replace(one, listener=b"3" * 64),
        replace(one, caller=b"3" * 64),
        replace(one, key=b""),
    ):
        assert other.opened(CALLER, line) is None
    assert Handshake(KEY, one.caller, one.listener).opened(CALLER, line) is None
    for index in range(len(line) - 1):
        assert (
            one.opened(CALLER, line[:index] + bytes([line[index] ^ 1]) + line[index + 1 :]) is None
        )
    assert one.opened(CALLER, b"") is None


def test_an_echo_proves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            with server.accept()[0] as caller, suppress(OSError):
                while heard := caller.recv(4096):
                    caller.sendall(heard)

        thread = threading.Thread(target=echo)
        thread.start()
        assert ask(("127.0.0.1", server.getsockname()[1])) is None
        thread.join()


def challenge(one: socket.socket) -> bytes:
    """The number that who is called sends before anybody has said a word."""
    line = b""
    while not line.endswith(b"\n") and (heard := one.recv(100)):
        line += heard
    return line.removesuffix(b"\n")


def rest(one: socket.socket) -> bytes:
    """What comes until the other end hangs up."""
    heard = b""
    with suppress(ConnectionError):
        while more := one.recv(4096):
            heard += more
    return heard


@pytest.mark.slow
def test_who_is_called_sends_a_new_number_first_and_nothing_else() -> None:
    with listening(talk_s=1.0) as address:
        found = set[bytes]()
        for _ in range(5):
            with socket.create_connection(address, 10.0) as silent:
                found.add(challenge(silent))
                assert rest(silent) == b""
        assert len(found) == 5
        assert all(len(number) == 64 for number in found)


def test_my_own_number_sent_back_to_me_is_refused() -> None:
    """By either end, and whatever is said with it."""
    with listening() as address:
        for key in (KEY, b""):
            with socket.create_connection(address, 5.0) as one:
                number = challenge(one)
                one.sendall(
                    number + b"\n" + Handshake(key, number, number).sealed(CALLER, b"hello")
                )
                assert rest(one) == b""
        assert ask(address) == b"HELLO"


def test_of_two_conversations_at_once_nothing_fits_the_other() -> None:
    """A stranger between them passes on what a caller has said to one of them."""
    with listening() as address:
        ends = [socket.create_connection(address, 5.0) for _ in range(4)]
        numbers = [challenge(one) for one in ends]
        own = b"1" * 64
        for one, theirs in zip(ends[:3], (own, own, numbers[0]), strict=True):
            one.sendall(theirs + b"\n")
        good = Handshake(KEY, numbers[0], own)
        ends[1].sendall(good.sealed(CALLER, b"hello"))
        assert rest(ends[1]) == b""
        ends[2].sendall(good.sealed(CALLER, b"hello"))  # with the other's number for its own
        assert rest(ends[2]) == b""
        ends[0].sendall(good.sealed(CALLER, b"hello"))
        answer = challenge(ends[0])
        assert good.opened(LISTENER, answer) == b"HELLO"
        ends[3].sendall(own + b"\n" + answer + b"\n")  # what who is called has said, said to it
        assert rest(ends[3]) == b""
        for one in ends:
            one.close()


def test_a_recorded_conversation_is_refused_in_either_direction() -> None:
    with listening() as address:
        with socket.create_connection(address, 5.0) as one:
            number, own = challenge(one), b"2" * 64
            said = own + b"\n" + Handshake(KEY, number, own).sealed(CALLER, b"hello")
            one.sendall(said)
            answered = number + b"\n" + challenge(one) + b"\n"
        with socket.create_connection(address, 5.0) as again:
            again.sendall(said)
            assert len(challenge(again)) == 64
            assert rest(again) == b""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def repeat() -> None:
            with server.accept()[0] as caller, suppress(OSError):
                caller.sendall(answered)
                while caller.recv(4096):
                    pass

        thread = threading.Thread(target=repeat)
        thread.start()
        assert ask(("127.0.0.1", server.getsockname()[1])) is None
        thread.join()


def test_a_thousand_callers_hold_up_nobody() -> None:
    with listening() as address, pestering(address, idle=1000, trickling=20) as still_there:
        began = time.monotonic()
        while still_there() > callers._MOST_UNPROVED:
            assert time.monotonic() < began + 10.0
            time.sleep(0.05)
        began = time.monotonic()
        assert ask(address) == b"HELLO"
        assert time.monotonic() - began < 4.0
        assert say_all(address, inputs(500), loopback_sources(3)) <= 65
        assert ask(address) == b"HELLO"


def test_others_with_a_number_wait_beside_a_flood_without() -> None:
    """A slow caller of the job is not turned out for a stranger's many calls."""
    with listening() as address:
        until = time.monotonic() + 20.0
        with Call(address, 5.0) as slow:
            conversation = slow.begin(KEY, until)
            with pestering(address, idle=500):
                slow.say(conversation.sealed(CALLER, b"hello"), until)
                assert conversation.opened(LISTENER, slow.line(4096, until)) == b"HELLO"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has more than one loopback address")
def test_of_too_many_those_go_whose_address_has_most() -> None:
    with listening() as address:
        until = time.monotonic() + 20.0
        with Call(address, 5.0) as slow:
            conversation = slow.begin(KEY, until)
            many = [socket.socket() for _ in range(200)]
            for one in many:
                one.bind(("127.0.0.9", 0))
                one.connect(address)
                one.sendall(b"0" * 64 + b"\n")
            slow.say(conversation.sealed(CALLER, b"hello"), until)
            assert conversation.opened(LISTENER, slow.line(4096, until)) == b"HELLO"
            for one in many:
                one.close()


@pytest.mark.parametrize("pause_s", [0.05, 10.0])
def test_time_is_for_all_that_is_said(pause_s: float) -> None:
    with listening(talk_s=1.0) as address, socket.create_connection(address, 5.0) as slow:
        began = time.monotonic()
        slow.setblocking(False)
        with suppress(ConnectionError):
            while time.monotonic() < began + 8.0:
                with suppress(BlockingIOError):
                    if slow.recv(100) == b"":
                        break
                if pause_s < 1.0:
                    slow.sendall(b"0")
                time.sleep(0.05)
        assert 0.8 < time.monotonic() - began < 5.0


def test_without_a_descriptor_left_strangers_go_and_ranks_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept, failed = socket.socket.accept, list[int]()

    def full(one: socket.socket) -> tuple[socket.socket, object]:
        if len(failed) < 3:
            failed.append(1)
            raise OSError(24, "Too many open files")
        return accept(one)

    with listening() as address:
        monkeypatch.setattr(socket.socket, "accept", full)
        assert ask(address) == b"HELLO"
    assert len(failed) == 3


def test_callers_who_leave_at_once_are_no_trouble() -> None:
    with listening() as address:
        for _ in range(300):
            say(address, b"0" * 65, listen=False)
            say(address, b"")
        assert ask(address) == b"HELLO"


def test_a_call_waits_no_longer_than_it_says() -> None:
    """Whoever is called may be a stranger, too."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def trickle() -> None:
            with server.accept()[0] as caller, suppress(OSError):
                while not over.wait(0.1):
                    caller.sendall(b"0")

        thread = threading.Thread(target=trickle)
        thread.start()
        began = time.monotonic()
        with (
            Call(("127.0.0.1", server.getsockname()[1]), 5.0) as call,
            pytest.raises(TimeoutError),
        ):
            call.begin(KEY, time.monotonic() + 1.0)
        assert 0.8 < time.monotonic() - began < 5.0
        over.set()
        thread.join()


# --- what is read ---------------------------------------------------------------------------------

ODD = [
    *HANDED[1:],
    *(
        b"",
        b"null",
        b"1",
        b'"x"',
        b"[]",
        b"{",
        b'{"a":}',
        b'{"a":1}x',
        b"\xff",
        b'{"a":"\xed\xa0\x80"}',
        b"\0",
    ),
    *(
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":' + b"9" * 21 + b"}",
    ),
    *(b'{"a":1,"a":2}', b'{"a":{"b":1,"b":1}}', b'{"a":"\\ud800"}', b'{"\\uDC00":1}'),
    *(b'{"a":' * 1000 + b"1" + b"}" * 1000, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
]


@pytest.mark.parametrize("content", ODD, ids=range(len(ODD)))
def test_odd_json_is_none(content: bytes) -> None:
    assert read_object(content) is None


def test_sound_json_is_read() -> None:
    for value in (
        {},
        {"a": [1, -2, 0.5, 1e300, True, None, "x", "\u00fc\U0001f600", {"b": []}]},
        {"a": 18446744073709551615, "b": "[" * 5000 + '"{\\' * 5000},
    ):
        assert read_object(json.dumps(value).encode()) == value
    assert read_object(b'{"a":"\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    assert read_object(b'{"a":"\\udcff"}', halves=True) == {"a": "\udcff"}
    assert read_object(b"[" * 3 + b"]" * 3) is None
    assert read_object(b'{"a":[[1]]}', most_depth=3) == {"a": [[1]]}
    assert read_object(b'{"a":[[1]]}', most_depth=2) is None


def test_odd_json_takes_no_time() -> None:
    began = time.monotonic()
    for content in (
        b'{"' + b'\\"' * 500_000,
        b'"' * 1_000_000,
        b'{"a":"' + b"[" * 1_000_000,
        b"\\" * 1_000_000,
    ):
        assert read_object(content) is None
    assert time.monotonic() - began < 2.0


_PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
_ANYTHING = st.recursive(
    _PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@settings(max_examples=200)
@given(_ANYTHING)
def test_what_is_read_is_what_was_written_or_nothing(value: object) -> None:
    found = read_object(json.dumps(value).encode())
    assert found is None or found == value


@pytest.mark.slow
def test_a_hundred_thousand_hellos_are_none() -> None:
    """No HMAC fits, and no words that a rank would not say are taken for a rank's."""
    conversation = Handshake(KEY, b"0" * 64, b"1" * 64)
    random_ = random.Random(3)
    for _ in range(100_000):
        line = changed(random_, hello(random_))
        assert conversation.opened(CALLER, line) is None
        said = _Hello.read(line[65:].rstrip(b"\n"))
        if said is not None and said.version == 2:
            assert type(said.rank) is type(said.size) is type(said.port) is int
            assert 0 <= said.rank < said.size
            assert 0 < said.port < 65536


def test_callers_are_closed_with_it() -> None:
    server = listen_at(socket.AF_INET, ("127.0.0.1", 0), ())
    with Callers([server], 100) as all_, socket.create_connection(server.getsockname()) as one:
        deadline = time.monotonic() + 5.0
        while not all_.all() and time.monotonic() < deadline:
            all_.wait(0.1)
        (caller,) = all_.all()
        assert isinstance(caller, Caller)
        assert caller.there == caller.here == "127.0.0.1"
        one.sendall(b"x")
    assert caller.connection.fileno() == -1
    assert server.fileno() == -1
