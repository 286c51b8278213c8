"""The probe's parts that talk to other computers, read files, and read what Linux says of its
network.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from strangers import inputs, loopback_sources, pestering, say_all

from allhands.cluster.probes import network, reach, trees
from allhands.runtime.threads import side_by_side


@contextmanager
def listening(secret: str) -> Iterator[int]:
    listeners = reach.Listeners(secret)
    try:
        yield listeners.open(["127.0.0.1"])["ports"]["127.0.0.1"]
    finally:
        listeners.close()


def outcome(port: int, secret: str = "s", timeout_s: float = 2.0, ip: str = "127.0.0.1") -> str:
    return reach.reach_fact({"ip": ip, "port": port}, secret, timeout_s)["outcome"]


@contextmanager
def answering(answer: bytes, hold: bool, echo: bool = False) -> Iterator[int]:
    """A server that says ``answer`` to everybody, and then closes or says no more."""
    done = threading.Event()

    def serve() -> None:
        with server.accept()[0] as connection:
            heard = connection.recv(200)
            with suppress(OSError):
                connection.sendall(heard if echo else answer)
            if hold:
                done.wait(20)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        done.set()
        thread.join()


# --- TCP ------------------------------------------------------------------------------------------


def test_who_knows_the_secret_is_answered_and_sees_large_packets_pass() -> None:
    with listening("s") as port:
        fact = reach.reach_fact({"ip": "127.0.0.1", "port": port}, "s", 5.0)
        assert (fact["outcome"], fact["source"]) == ("ok", "127.0.0.1")
        assert 0 < fact["ms"] < 5000
        # Again, and from several at once.
        outcomes = side_by_side(lambda _: outcome(port, timeout_s=5.0), range(8))
        assert outcomes == ["ok"] * 8


def test_a_wrong_secret_gets_nothing() -> None:
    with listening("s") as port:
        assert outcome(port, "other") == "stranger"
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert len(everything(connection)) == 65  # a number


def test_strangers_at_the_other_end() -> None:
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n", hold=False) as port:
        assert outcome(port) == "stranger"
    with answering(b"", hold=True) as port:
        assert outcome(port, timeout_s=0.3) == "stranger"


def test_small_packets_pass_and_large_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    send = socket.socket.sendall
    with listening("s") as port:
        monkeypatch.setattr(socket.socket, "sendall", lambda one, data: send(one, data[:1000]))
        assert outcome(port, timeout_s=0.3) == "stalls"


def test_a_recorded_conversation_is_worth_nothing() -> None:
    """Neither end believes what has been said before, by either."""
    with listening("s") as port, recording(port) as (through, said):
        assert outcome(through) == "ok"
    asked, answered = bytes(said["there"]), bytes(said["back"])
    assert len(asked) == 65 + 66  # its number, and its proof
    with listening("s") as port, socket.create_connection(("127.0.0.1", port), 5) as again:
        again.sendall(asked)
        assert len(everything(again)) == 65  # its number, and nothing else
    with answering(answered, hold=False) as port:
        assert outcome(port, timeout_s=1.0) == "stranger"
    with answering(b"", hold=False, echo=True) as port:
        assert outcome(port, timeout_s=1.0) == "stranger"


def test_who_is_called_sends_a_new_number_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else to who says nothing, or says that number, too."""
    monkeypatch.setattr(reach, "_PROVE_S", 1.0)
    found = set[bytes]()
    with listening("s") as port:
        for reflects in (False, True, False):
            with socket.create_connection(("127.0.0.1", port), 5) as one:
                number = one.recv(100)
                if reflects:
                    one.sendall(number + b"0" * 64 + b"\n")
                assert everything(one) == b""
                found.add(number)
    assert len(found) == 3
    assert all(len(number) == 65 for number in found)


_LISTENS = """
import sys
from allhands.cluster.probes.reach import Listeners
print(Listeners("s").open(["127.0.0.1"])["ports"]["127.0.0.1"], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=pytest.mark.long)])
def test_strangers_end_nothing(count: int) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", _LISTENS], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with pestering(("127.0.0.1", port), idle=500, trickling=5):
            assert say_all(("127.0.0.1", port), inputs(count), loopback_sources(20)) <= 65
            assert outcome(port) == "ok"
        assert process.communicate("") == ("", "")
    assert process.returncode == 0


def test_callers_who_take_their_time_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_PROVE_S", 1.0)
    with listening("s") as port:
        idle = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(100)]
        try:
            began = time.monotonic()
            assert outcome(port) == "ok"
            assert time.monotonic() - began < 5.0
            # A byte now and then does not make it longer.
            slow, began = idle[-1], time.monotonic()
            with suppress(OSError):
                for _ in range(40):
                    slow.sendall(b"0")
                    time.sleep(0.2)
            assert time.monotonic() - began < 6.0
        finally:
            for one in idle:
                one.close()
        assert outcome(port) == "ok"


def everything(connection: socket.socket) -> bytes:
    """What the other side says until it hangs up."""
    connection.settimeout(15)
    said = b""
    with suppress(ConnectionResetError):
        while heard := connection.recv(4096):
            said += heard
    return said


@contextmanager
def recording(port: int) -> Iterator[tuple[int, dict[str, bytearray]]]:
    """Somebody in between, who passes on what both sides say, and keeps it."""
    said = {"there": bytearray(), "back": bytearray()}

    def pass_on(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        with suppress(OSError):
            while heard := source.recv(1 << 16):
                kept += heard
                target.sendall(heard)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with server.accept()[0] as caller, socket.create_connection(("127.0.0.1", port)) as called:
            back = threading.Thread(target=pass_on, args=(called, caller, said["back"]))
            back.start()
            pass_on(caller, called, said["there"])
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], said
        thread.join()


def test_a_port_on_which_nobody_listens_refuses() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert outcome(bound.getsockname()[1]) == "refused"


def test_a_listener_that_does_not_accept_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
            assert outcome(port, timeout_s=0.3) == "timeout"
        finally:
            for filler in fillers:
                filler.close()


def test_an_address_of_another_computer_cannot_be_listened_on() -> None:
    answer = reach.Listeners("s").open(["192.0.2.77"])
    assert answer["ports"] == {}
    assert set(answer["errors"]) == {"192.0.2.77"}


def test_a_closed_listener_is_closed() -> None:
    with listening("s") as port:
        assert outcome(port) == "ok"
    assert outcome(port) == "refused"


def test_logins() -> None:
    logins = [
        {"argv": ["sh", "-c", "exit 0"]},
        {"argv": ["sh", "-c", "echo oh no >&2; exit 255"]},
        {"argv": ["sleep", "30"]},
        {"argv": ["no-such-ssh"]},
    ]
    assert [
        (fact["code"], fact["said"]) for fact in (reach.login_fact(login, 1.0) for login in logins)
    ] == [
        (0, ""),
        (255, "oh no\n"),
        (None, ""),
        (127, "there is no ssh program"),
    ]


# --- files ----------------------------------------------------------------------------------------


def read(role: str, source: str, hashed: bool = True) -> dict[str, Any]:
    return trees.tree_fact(role, source, hashed, lambda done: None)


def test_files_with_their_sums(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    contents = {
        "config.json": b"{}",
        "model.safetensors": os.urandom(5 << 20),
        "sub/more.json": b"[]",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in ("README.md", ".hidden.json"):
        (tmp_path / name).write_text("left out")
    seen: list[int] = []
    fact = trees.tree_fact("model", str(tmp_path), True, seen.append)
    assert fact["path"] == str(tmp_path)
    assert {file["name"]: (file["size"], file["sha256"]) for file in fact["files"]} == {
        name: (len(content), hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    }
    assert seen == sorted(seen)
    assert seen[-1] == sum(map(len, contents.values()))
    assert all(
        file["sha256"] is None for file in read("model", str(tmp_path), hashed=False)["files"]
    )


def test_data_are_all_files_and_one_file_is_a_tree(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("x")
    (tmp_path / "notes.md").write_text("y")
    assert [file["name"] for file in read("data", str(tmp_path))["files"]] == [
        "notes.md",
        "train.jsonl",
    ]
    alone = read("data", str(tmp_path / "train.jsonl"))
    assert [(file["name"], file["sha256"]) for file in alone["files"]] == [
        ("", hashlib.sha256(b"x").hexdigest())
    ]


def test_what_is_not_here_and_what_cannot_be_read(tmp_path: Path) -> None:
    missing = read("model", str(tmp_path / "none"))
    assert (missing["path"], missing["error"], missing["files"]) == (None, None, [])
    (tmp_path / "config.json").symlink_to(tmp_path / "nowhere")
    assert (
        read("model", str(tmp_path))["error"]
        == f"{tmp_path}/config.json: No such file or directory"
    )


def test_a_repository_of_the_hub_is_found_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--name"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "refs").mkdir()
    blob = tmp_path / "blob"
    blob.write_text("{}")
    (repository / "snapshots" / "abc" / "config.json").symlink_to(blob)
    assert read("model", "owner/name")["path"] is None
    (repository / "refs" / "main").write_text("abc")
    assert [file["name"] for file in read("model", "owner/name")["files"]] == ["config.json"]
    (repository / "refs" / "main").write_text("../../..")  # does not lead out of the cache
    assert read("model", "owner/name")["path"] is None


def test_the_demo_model_is_the_one_that_training_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from allhands.model import sources

    monkeypatch.setenv("ALLHANDS_CACHE", str(tmp_path))
    assert read("model", "demo")["path"] is None
    name = sources._DEMO_NAME  # pyright: ignore[reportPrivateUsage]
    (tmp_path / name).mkdir()
    assert read("model", "demo")["path"] == str(tmp_path / name)


# --- Linux ----------------------------------------------------------------------------------------


def test_addresses_as_ip_prints_them() -> None:
    text = json.dumps(
        [
            {"ifname": "eth0", "flags": ["BROADCAST", "UP", "LOWER_UP"], "mtu": 9000, "operstate": "UP",
             "addr_info": [{"family": "inet", "local": "10.0.0.1", "prefixlen": 24},
                           {"family": "inet6", "local": "fe80::1", "prefixlen": 64}]},
            {"ifname": "wg0", "flags": ["POINTOPOINT", "UP"], "mtu": 1420, "operstate": "UNKNOWN",
             "linkinfo": {"info_kind": "wireguard"}, "addr_info": [{"local": "10.9.0.1", "prefixlen": 32}]},
            {"ifname": "eth1", "flags": ["UP"], "mtu": 1500, "operstate": "DOWN", "addr_info": []},
            {},
        ]
    )  # fmt: skip
    found = network.parse_ip_addr(text)
    assert [(one["name"], one["up"], one["mtu"], len(one["addresses"])) for one in found] == [
        ("eth0", True, 9000, 2),
        ("wg0", True, 1420, 1),
        ("eth1", False, 1500, 0),
    ]
    assert found[0]["addresses"][0] == {"ip": "10.0.0.1", "prefix": 24}


@pytest.mark.parametrize(
    ("name", "info", "kind"),
    [
        ("lo", "", "loopback"),
        ("docker0", "bridge", "virtual"),
        ("br-12ab", "bridge", "virtual"),
        ("veth12ab", "veth", "virtual"),
        ("br0x", "bridge", "bridge"),
        ("wlan7", "", "wifi"),
        ("wlp9s0", "", "wifi"),
        ("enp99s0", "", "ethernet"),
        ("eth77", "veth", "ethernet"),
        ("thunderbolt9", "", "thunderbolt"),
        ("tailscale0", "tun", "tunnel"),
        ("odd0", "wireguard", "tunnel"),
        ("dummy9", "dummy", "virtual"),
    ],
)
def test_kinds_of_interfaces(name: str, info: str, kind: str) -> None:
    assert network.linux_kind(name, info) == kind


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux's kernel")
def test_without_the_ip_program_the_kernel_is_asked() -> None:
    (loopback,) = [one for one in network.kernels_interfaces() if one["name"] == "lo"]
    assert loopback["addresses"] == [{"ip": "127.0.0.1", "prefix": 8}]
    assert loopback["mtu"] == 65536


def test_routes_as_ip_prints_them() -> None:
    text = '[{"dst":"10.0.0.2","gateway":"10.1.0.1","dev":"eth0","prefsrc":"10.1.0.5","flags":[],"uid":0,"cache":[]}]'
    assert network.parse_ip_route(text) == {"interface": "eth0", "gateway": "10.1.0.1"}
    assert network.parse_ip_route("") == {}


NFT = """table inet filter {
\tchain input {
\t\ttype filter hook input priority filter; policy accept;
\t\tct state established,related accept
%s\t}
\tchain forward {
\t\ttype filter hook forward priority filter; policy drop;
\t}
}
"""


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        ("-P INPUT ACCEPT\n-P FORWARD DROP\n-P OUTPUT ACCEPT\n", []),
        ("-P INPUT DROP\n-P FORWARD ACCEPT\n-P OUTPUT ACCEPT\n", ["in"]),
        ("-P INPUT ACCEPT\n-A INPUT -p tcp -m tcp ! --dport 22 -j DROP\n", ["in"]),
        (
            "-P INPUT ACCEPT\n-A INPUT -s 10.0.0.9/32 -j REJECT --reject-with icmp-port-unreachable\n",
            ["in"],
        ),
        ("-P INPUT ACCEPT\n-P OUTPUT DROP\n", ["out"]),
        ("-A INPUT -j DROP\n-A OUTPUT -j REJECT\n", ["in", "out"]),
        ("-A INPUT -p tcp -j ACCEPT\n", []),
        ("", []),
        (NFT % "", []),
        (NFT % "\t\ttcp dport 1024-65535 drop\n", ["in"]),
        (NFT.replace("input", "output") % "\t\treject with tcp reset\n", ["out"]),
        (NFT.replace("policy accept", "policy drop") % "", ["in"]),
    ],
)
def test_firewall_rules(text: str, ways: list[str]) -> None:
    assert network.shut_ways(text) == ways
