"""Why a port cannot be listened at or connected to: what is said is true of the error that the
system gives.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from allhands.cluster import join, meeting
from allhands.cluster.meeting import Patience, meet
from allhands.cluster.place import LaunchPlace, MeetingPoint
from allhands.cluster.processes import reserve_ports
from allhands.distributed.ring import PortTakenError, take_turns
from allhands.errors import AllhandsError, ConfigError, DistributedError
from allhands.runtime import ports
from allhands.runtime.callers import CALLER, Call, key_for, listen_at
from allhands.runtime.http_guard import listen
from allhands.runtime.ports import PortSettings, cannot_listen, fate_of, is_blocked, kind_of

SETTINGS = PortSettings("--port", "--host")


def failed(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@contextmanager
def somebody() -> Iterator[int]:
    """A port at which this process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


# --- listening ------------------------------------------------------------------------------------


def test_who_uses_a_port_is_named() -> None:
    with somebody() as port:
        trouble = cannot_listen(failed(errno.EADDRINUSE), "127.0.0.1", port, SETTINGS)
    assert f"(process {os.getpid()})" in trouble.message
    assert "end it" in trouble.hint
    assert "--port" in trouble.hint


def test_a_user_that_cannot_be_seen_is_not_made_up() -> None:
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        trouble = cannot_listen(
            failed(errno.EADDRINUSE), "127.0.0.1", bound.getsockname()[1], SETTINGS
        )
    assert "process" not in trouble.message
    assert "ss -ltnp" in trouble.hint


_SAID: dict[str, tuple[Exception, int, str, str]] = {
    "no address of ours": (
        failed(errno.EADDRNOTAVAIL),
        80,
        "10.0.0.9 is no address of this computer",
        "--host",
    ),
    "an unknown name": (
        socket.gaierror(-2, "Name or service not known"),
        80,
        "no name or address",
        "--host",
    ),
    "forbidden": (failed(errno.EACCES), 8080, "the system forbids it", "sandbox"),
    "not permitted": (failed(errno.EPERM), 80, "the system forbids it", "sandbox"),
    "too many files": (failed(errno.EMFILE), 8080, "no room", "ulimit -n"),
    "no memory": (failed(errno.ENOBUFS), 8080, "no room", "ulimit -n"),
    "no such family": (failed(errno.EAFNOSUPPORT), 8080, "no IPv4", "--host"),
    "too large a port": (
        OverflowError("bind(): port must be 0-65535."),
        70000,
        "0 to 65535",
        "--port",
    ),
    "no port left": (failed(errno.EADDRINUSE), 0, "no port is free", "ss -s"),
    "something else": (failed(errno.EIO), 8080, os.strerror(errno.EIO), "--port"),
}


@pytest.mark.parametrize("case", _SAID)
def test_each_error_has_its_own_words(case: str) -> None:
    error, port, message, hint = _SAID[case]
    trouble = cannot_listen(error, "10.0.0.9", port, SETTINGS)
    assert message in trouble.message
    assert hint in trouble.hint
    # Nobody is told to end a program that is not there.
    assert "listens there" not in trouble.message
    assert "end it" not in trouble.hint


def test_privileged_ports_begin_where_the_system_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    monkeypatch.setattr(ports, "_FIRST_FREE", first)
    denied = failed(errno.EACCES)
    assert "below 1024 are for the administrator" in cannot_listen(denied, "", 1023).message
    assert "administrator" not in cannot_listen(denied, "", 1024).message
    first.write_text("90\n")
    assert "administrator" not in cannot_listen(denied, "", 443).message
    assert "below 90 are for the administrator" in cannot_listen(denied, "", 80).message


@contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """No socket can be bound, for this reason."""

    class Refused(socket.socket):
        def bind(self, address: object) -> None:
            raise failed(number)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Refused)
        yield


def _meeting(port: int) -> None:
    meet(MeetingPoint("127.0.0.1", (port,), "job"), 0, 2, 5000, Patience(1.0))


def _ring(port: int) -> None:
    hosts = Path(os.environ["RING_HOSTS"])
    hosts.write_text(f'[["127.0.0.1:{port}"], ["127.0.0.1:1"]]')
    take_turns(hosts, 0, 1.0)


def _web(port: int) -> None:
    listen("127.0.0.1", port)


def _agent(port: int) -> None:
    reserve_ports(2, shareable=False)


_LISTENERS: dict[str, tuple[Callable[[int], None], type[AllhandsError]]] = {
    "where ranks meet": (_meeting, DistributedError),
    "the ring": (_ring, DistributedError),
    "serve and dashboard": (_web, ConfigError),
    "ports of ranks": (_agent, DistributedError),
}


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EPERM, errno.EMFILE, errno.EADDRNOTAVAIL, errno.EADDRINUSE]
)
@pytest.mark.parametrize("listener", _LISTENERS)
def test_every_listener_says_what_is_true(
    listener: str, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RING_HOSTS", str(tmp_path / "hosts.json"))
    begin, kind = _LISTENERS[listener]
    with refusing(monkeypatch, number), pytest.raises(kind) as caught:
        begin(9)
    port = 0 if listener == "ports of ranks" else 9
    told = cannot_listen(failed(number), "127.0.0.1", port).message
    assert told in str(caught.value)
    assert ("listens there" in str(caught.value)) == (number == errno.EADDRINUSE and port != 0)
    assert isinstance(caught.value, PortTakenError) == (
        listener == "the ring" and number == errno.EADDRINUSE
    )


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="becomes another user")
def test_a_privileged_port_is_not_said_to_be_used() -> None:
    """With the system's own error."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            try:
                listen_at(socket.AF_INET, ("127.0.0.1", 81), ()).close()
                code = 2  # this system lets everybody
            except OSError as error:
                code = 0 if "administrator" in cannot_listen(error, "127.0.0.1", 81).message else 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, 2)


# --- connecting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("timed out"), "dropped"),
        (failed(errno.ETIMEDOUT), "dropped"),
        (failed(errno.EHOSTUNREACH), "rejected"),
        (failed(errno.ENETUNREACH), "rejected"),
        (failed(errno.EPERM), "forbidden"),
        (failed(errno.ECONNREFUSED), "refused"),
        (failed(errno.ECONNRESET), "refused"),
        (failed(errno.EMFILE), "failed"),
    ],
)
def test_a_firewall_is_suspected_where_one_may_be(error: OSError, kind: str) -> None:
    assert kind_of(error) == kind
    assert (
        ("firewall" in fate_of(error))
        == is_blocked(kind_of(error))
        == (kind not in ("refused", "failed"))
    )


# --- the suspicion --------------------------------------------------------------------------------


class _Ways:
    """What connections meet with, one after the other; the last for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: OSError) -> None:
        self.errors = list(errors)
        monkeypatch.setattr(meeting, "Call", self)

    def __call__(self, address: object, timeout_s: float) -> None:
        raise self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]


def _guest(told: list[str], total_s: float = 1.0, host: str = "127.0.0.1") -> DistributedError:
    point = MeetingPoint(host, (29500, 29501), "job")
    with pytest.raises(DistributedError) as caught:
        meet(
            point,
            1,
            2,
            5000,
            Patience(total_s, told.append, first_pause_s=0.02, longest_pause_s=0.02),
        )
    return caught.value


@pytest.mark.parametrize(
    "error", [TimeoutError("timed out"), failed(errno.EHOSTUNREACH), failed(errno.ENETUNREACH)]
)
def test_a_way_that_is_blocked_is_told_once_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    monkeypatch.setattr("allhands.cluster.ways._SUSPECT_S", 0.2)
    told = list[str]()
    _Ways(monkeypatch, error)
    end = _guest(told)
    assert end.exit_code == 7
    for text in (*told, str(end)):
        assert "firewall" in text
        assert "allhands cluster check --hosts localhost,127.0.0.1" in text
        assert "29500" in text
    assert len(told) == 1


def test_who_is_refused_or_blocked_for_a_moment_hears_nothing_of_a_firewall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("allhands.cluster.ways._SUSPECT_S", 0.2)
    told = list[str]()
    _Ways(monkeypatch, *[failed(errno.EHOSTUNREACH)] * 4, failed(errno.ECONNREFUSED))
    end = _guest(told, 0.8)
    assert told == []
    assert "firewall" not in str(end)
    assert "refused" in end.message


def test_rank_0_says_that_nobody_calls_and_only_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with somebody() as port:
        pass
    point = MeetingPoint("localhost", (port,), "job")
    for after_s, suspected in ((60.0, False), (0.3, True)):
        monkeypatch.setattr(meeting, "_UNHEARD_S", after_s)
        told = list[str]()
        with pytest.raises(DistributedError, match="rank 1 of 2 did not come") as caught:
            meet(point, 0, 2, 5000, Patience(0.8, told.append, 0.1))
        assert "firewall" not in told[0]
        assert ("firewall" in told[-1]) == ("firewall" in str(caught.value)) == suspected


def test_a_rank_that_has_come_is_not_barred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others of that network get through, the one that is missing is late."""
    monkeypatch.setattr(meeting, "_UNHEARD_S", 0.1)
    monkeypatch.setattr(meeting, "is_loopback", lambda address: False)
    with somebody() as port:
        pass
    point, told, errors = (
        MeetingPoint("localhost", (port,), "job"),
        list[str](),
        list[DistributedError](),
    )

    def rank(number: int) -> None:
        try:
            meet(
                point, number, 3, 5000 + number, Patience(1.0, told.append, 0.2, first_pause_s=0.02)
            )
        except DistributedError as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 2
    assert not any("firewall" in text for text in (*told[1:], *map(str, errors)))


# --- after the meeting ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("leaves", "rank 1 has left the meeting"),
        ("cannot listen", "rank 1: a reason"),
        ("says two things at once", "rank 1 has left the meeting"),
    ],
)
def test_a_rank_that_does_not_go_on_is_named_to_all(last: str, words: str) -> None:
    with somebody() as port:
        pass
    point, errors = MeetingPoint("127.0.0.1", (port,), "job"), list[DistributedError]()

    def rank(number: int) -> None:
        try:
            meet(
                point,
                number,
                3,
                5000 + number,
                Patience(20.0, first_pause_s=0.02, longest_pause_s=0.1),
            )
        except DistributedError as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 2)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20.0
    while time.monotonic() < until:
        try:
            call = Call(("127.0.0.1", port), 5.0)
            break
        except OSError:
            time.sleep(0.02)
    else:
        raise AssertionError("rank 0 does not listen")
    with call:
        conversation = call.begin(key_for("meeting of job", os.environ), until)
        hello = {
            "version": meeting._VERSION,
            "rank": 1,
            "size": 3,
            "address": "127.0.0.1",
            "port": 5001,
            "nonce": "n",
        }
        call.say(conversation.sealed(CALLER, json.dumps(hello).encode()), until)
        for _ in ("welcome", "list"):
            assert call.line(4096, until) != b""
        line = conversation.sealed(CALLER, b'{"kind": "listens", "problem": "rank 1: a reason"}')
        if last != "leaves":
            call.say(line * (1 + (last == "says two things at once")), until)
            call.line(4096, until)
    for thread in threads:
        thread.join(20.0)
    assert [words in error.message for error in errors] == [True, True], errors
    assert {error.exit_code for error in errors} == {7}


# --- a group that does not form -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local_size", "stays_s", "told"),
    [(1, 2.0, True), (2, 2.0, False), (1, 0.0, False)],
    ids=["far", "near", "forms"],
)
def test_a_group_over_several_computers_that_does_not_form_is_told_before_the_end(
    local_size: int,
    stays_s: float,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As with mpirun, whose own ports nobody can try beforehand."""
    monkeypatch.setattr(join, "_UNCONNECTED_S", 0.5)
    monkeypatch.delenv("ALLHANDS_SUPERVISOR_PID", raising=False)
    launch = LaunchPlace("openmpi", 1, 2, local_size - 1, local_size, "mpi", "a test")
    with join.connect_deadline(launch, 60.0):
        time.sleep(stays_s)
    err = capfd.readouterr().err
    assert ("allhands cluster check --backend mpi" in err) == ("firewall" in err) == told
    assert "error" not in err
