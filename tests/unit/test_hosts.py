"""Hostfiles: MLX's JSON and MPI's lines as people write them, and everything else refused with its
line.
"""

from __future__ import annotations

import json
import shlex
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from allhands.cluster import probe
from allhands.cluster.agent import enter_directory
from allhands.cluster.hosts import (
    Host,
    below_home,
    host_from_name,
    hostfile_backend,
    is_here,
    read_hostfile,
    write_hosts,
)
from allhands.config.schema import build_config
from allhands.errors import ConfigError


@pytest.fixture
def hosts_of(tmp_path: Path) -> Any:
    """Read a text, or JSON, as a hostfile."""

    def read(content: Any) -> tuple[Host, ...]:
        path = tmp_path / "hosts"
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
        return read_hostfile(path)

    return read


# --- MPI's lines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", [Host("node1", "node1")]),
        (
            "node1 slots=4\nnode2:2\n",
            [Host("node1", "node1", slots=4), Host("node2", "node2", slots=2)],
        ),
        (
            "# all\n\n  node1   slots=2 # two\nnode2\n",
            [Host("node1", "node1", slots=2), Host("node2", "node2")],
        ),
        ("a slots=2\nb\na:3\n", [Host("a", "a", slots=5), Host("b", "b")]),
        ("a slots=4 max-slots=2", [Host("a", "a", slots=2)]),
        ("a max_slots=3", [Host("a", "a", slots=3)]),
        ("me@10.0.0.7:2\r\n", [Host("me@10.0.0.7", "me@10.0.0.7", ("10.0.0.7",), 2)]),
        (
            "job-worker-0.job.ns.svc slots=1",
            [Host("job-worker-0.job.ns.svc", "job-worker-0.job.ns.svc")],
        ),
        ("2001:db8::7 slots=2", [Host("2001:db8::7", "2001:db8::7", ("2001:db8::7",), 2)]),
        ("[2001:db8::7]:2", [Host("2001:db8::7", "2001:db8::7", ("2001:db8::7",), 2)]),
        ("me@2001:db8::7", [Host("me@2001:db8::7", "me@2001:db8::7", ("2001:db8::7",))]),
        ("fe80::1%en0", [Host("fe80::1%en0", "fe80::1%en0", ("fe80::1%en0",))]),
        # A byte order mark, as editors on Windows write it.
        ("\ufeffnode1", [Host("node1", "node1")]),
    ],
)
def test_lines(hosts_of: Any, text: str, expected: list[Host]) -> None:
    assert list(hosts_of(text)) == expected


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a\nb slots=two", 2, "slots=two"),
        ("a slots=0", 1, "slots=0"),
        ("a slots=-1", 1, "slots=-1"),
        ("a slots=1000000000000", 1, "slots=1000000000000"),
        ("a slots=١", 1, "slots"),
        ("a slots=1 slots=2", 1, "slots=2"),
        ("a:2 slots=2", 1, "slots=2"),
        ("a:x", 1, "slots=x"),
        ("\n\na python=/x", 3, "python=/x"),
        ("a b", 1, "'b'"),
        ("-oProxyCommand=touch", 1, "-oProxyCommand"),
        ("me@-oProxyCommand=x", 1, "-oProxy"),
        ("-me@a", 1, "-me@a"),
        ("a;reboot", 1, "a;reboot"),
        ("$(reboot)", 1, "$(reboot)"),
        ("a`x`", 1, "a`x`"),
        ("a/b", 1, "a/b"),
        ("ssh://a", 1, "//a"),
        ("a@b@c", 1, "a@b@c"),
        ("@a", 1, "@a"),
        ("10.0.0.1%eth0", 1, "10.0.0.1%eth0"),
        ("a\x1b[31m", 1, "\\x1b"),
        ("büro", 1, "\\xfc"),
    ],
)
def test_lines_refused(hosts_of: Any, text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        hosts_of(text)
    assert refusal.value.where is not None
    assert refusal.value.where.endswith(f"hosts:{line}")
    assert words in refusal.value.message
    assert refusal.value.message.isascii()
    assert refusal.value.hint


# --- MLX's JSON -----------------------------------------------------------------------------------


def test_json_list(hosts_of: Any) -> None:
    entries = [
        {
            "ssh": "mac1",
            "ips": ["10.0.0.1", "10.0.1.1"],
            "rdma": [None, "rdma_en2", ["rdma_en3", "rdma_en4"]],
        },
        {
            "ssh": "me@mac2",
            "slots": 2,
            "python": "/opt/my python/bin/python",
            "cwd": "/a b",
            "envs": ["A=b=c", "D="],
        },
    ]
    assert hosts_of(entries) == (
        Host(
            "mac1",
            "mac1",
            ("10.0.0.1", "10.0.1.1"),
            rdma=(None, "rdma_en2", ("rdma_en3", "rdma_en4")),
        ),
        Host(
            "me@mac2", "me@mac2", (), 2, "/opt/my python/bin/python", "/a b", {"A": "b=c", "D": ""}
        ),
    )


def test_json_object_with_variables_for_all(hosts_of: Any, tmp_path: Path) -> None:
    content = {
        "backend": "ring",
        "envs": ["A=1", "B=2"],
        "hosts": [{"ssh": "x", "envs": {"B": "3"}}, {"ssh": "y"}],
    }
    first, second = hosts_of(content)
    assert first.envs == {"A": "1", "B": "3"}
    assert second.envs == {"A": "1", "B": "2"}
    assert hostfile_backend(tmp_path / "hosts") == "ring"
    hosts_of([{"ssh": "x"}])
    assert hostfile_backend(tmp_path / "hosts") is None
    hosts_of({"backend": "any", "hosts": [{"ssh": "x"}]})
    assert hostfile_backend(tmp_path / "hosts") is None


def test_json_hosts_named_twice_are_one(hosts_of: Any) -> None:
    found = hosts_of(
        [{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b"}, {"ssh": "a", "ips": ["10.0.0.2"]}]
    )
    assert [(host.ssh, host.slots, host.ips) for host in found] == [
        ("a", 2, ("10.0.0.1", "10.0.0.2")),
        ("b", 1, ()),
    ]


# MLX's reader leaves its file open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_reads_what_mlx_reads(hosts_of: Any, tmp_path: Path) -> None:
    """The same file, read by MLX's own reader."""
    from mlx._distributed_utils.common import Hostfile

    content = {
        "backend": "jaccl",
        "envs": ["A=1"],
        "hosts": [{"ssh": "a", "ips": ["10.0.0.1"], "rdma": [None, "r"]}],
    }
    ours = hosts_of(content)
    theirs = Hostfile.from_file(tmp_path / "hosts")
    pairs = [(host.ssh, list(host.ips), list(host.rdma)) for host in ours]
    assert pairs == [(host.ssh_hostname, host.ips, host.rdma) for host in theirs.hosts]
    assert hostfile_backend(tmp_path / "hosts") == theirs.backend
    assert [f"{name}={value}" for name, value in ours[0].envs.items()] == theirs.envs


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('[\n{"ssh": "a"},\n{"ssh" "b"}]', 3, "not JSON"),
        ('[{"ssh": "a"},\n{"ips": ["10.0.0.1"]}]', 2, '"ssh"'),
        ('[{"ssh": "a"},\n\n{"ssh": "b", "ip": "10.0.0.1"}]', 3, "'ip'"),
        ('{"hosts": [\n{"ssh": "{[\\"", "slots": 1}]}', 2, "not the name"),
        ('{"envs": {"A": "1"}, "hosts": [\n{"ssh": "-x"}]}', 2, "'-x'"),
        ('[{"ssh": "a", "ips": ["10.0.0.256"]}]', 1, "10.0.0.256"),
        ('[{"ssh": "a", "ips": ["10.0.0.1; x"]}]', 1, "10.0.0.1; x"),
        ('[{"ssh": "a", "ips": "10.0.0.1"}]', 1, '"ips" is not a list'),
        ('[{"ssh": "a", "slots": true}]', 1, "slots"),
        ('[{"ssh": "a", "slots": 1.5}]', 1, "slots"),
        ('[{"ssh": "a", "python": "-c"}]', 1, "python"),
        ('[{"ssh": "a", "python": "/a\\nb"}]', 1, "python"),
        ('[{"ssh": "a", "cwd": ""}]', 1, "cwd"),
        ('[{"ssh": "a", "envs": ["A"]}]', 1, "'A'"),
        ('[{"ssh": "a", "envs": ["A B=1"]}]', 1, "'A B'"),
        ('[{"ssh": "a", "envs": {"A": 1}}]', 1, "'A'"),
        ('[{"ssh": "a", "envs": {"A": "x\\u0000y"}}]', 1, "'A'"),
        ('[{"ssh": "a", "rdma": [7]}]', 1, "rdma"),
        ('["a"]', None, "not an object"),
        ('[{"ips": ["10.0.0.1"]}, 5]', None, "entry 2 of the list of hosts, 5, is not an object"),
        ('[{"ssh": "a"}, {"ips": ["10.0.0.1"]}]', 1, 'host 2 has no "ssh"'),
        ('{"hosts": {"ssh": "a"}}', None, "not a list"),
        ('{"host": []}', None, "'host'"),
        ('{"envs": []}', None, '"hosts" is missing'),
        ('[{"ssh": "a", "ssh": "b"}]', None, "twice"),
        ("[" * 100_000, None, "not a list of hosts"),
        ("[]", None, "no host"),
        ("# nothing\n", None, "no host"),
    ],
)
def test_json_refused(hosts_of: Any, text: str, line: int | None, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        hosts_of(text)
    assert refusal.value.where is not None
    assert refusal.value.where.endswith("hosts" if line is None else f"hosts:{line}")
    assert words in refusal.value.message
    assert refusal.value.hint


def test_a_value_that_may_be_a_secret_is_not_repeated(hosts_of: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        hosts_of([{"ssh": "a", "envs": ["MY TOKEN=hunter2"]}])
    assert "hunter2" not in str(refusal.value)


def test_unknown_backend(hosts_of: Any, tmp_path: Path) -> None:
    hosts_of({"backend": "gloo", "hosts": [{"ssh": "a"}]})
    with pytest.raises(ConfigError, match="gloo"):
        hostfile_backend(tmp_path / "hosts")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hostfile(tmp_path / "none")
    assert caught.value.code == "hostfile-unreadable"
    with pytest.raises(ConfigError) as caught:
        read_hostfile(tmp_path)
    assert caught.value.code == "hostfile-unreadable"
    (tmp_path / "latin").write_bytes(b"b\xfcro")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_hostfile(tmp_path / "latin")
    (tmp_path / "large").write_bytes(b"a\n" * 600_000)
    with pytest.raises(ConfigError) as caught:
        read_hostfile(tmp_path / "large")
    assert caught.value.code == "hostfile-invalid"


# --- this computer --------------------------------------------------------------------------------


def test_a_computer_without_the_directory_has_it_below_its_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for directory in (here / "a" / "work", there / "work", there / "a" / "work"):
        directory.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(here))
    names = [
        below_home(path) for path in (here / "a" / "work", tmp_path / "data" / "work", Path("/"))
    ]
    assert names == ["a/work", "work", ""]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(there))
    gone = str(tmp_path / "gone")
    for name, place in zip(names, ("a/work", "work", "."), strict=True):
        enter_directory(gone, name)
        assert Path.cwd() == there / place
        assert probe.facts({"cwd": gone, "below_home": name, "timeout_s": 0.0})["cwd"] == str(
            there / place
        )
    enter_directory(gone, "nowhere")
    assert Path.cwd() == there, "where it was"
    enter_directory(str(here), "work")
    assert Path.cwd() == here
    with pytest.raises(ConfigError) as caught:
        enter_directory(gone, None)
    assert caught.value.code == "directory-inaccessible"


def test_this_computer_needs_no_ssh(hosts_of: Any) -> None:
    own = socket.gethostname()
    address = next(
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    )
    found = hosts_of(f"localhost slots=2\n127.0.0.1\n{own}\n{address}\n[::1]:2\nother\n")
    assert [(host.name, host.ssh, host.slots) for host in found] == [
        ("localhost", None, 7),
        ("other", "other", 1),
    ]
    assert found[0].ips == (address,)
    assert not is_here("192.0.2.1")
    # Somebody else on this computer is not us.
    assert host_from_name("nobody@localhost").ssh == "nobody@localhost"


@given(st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=30))
@example("a -oProxyCommand=x")
@example("a\n")
@example("a%eth0")
def test_a_name_is_refused_or_harmless(text: str) -> None:
    try:
        host = host_from_name(text)
    except ConfigError:
        return
    for word in (host.name, host.ssh or "localhost"):
        assert not word.startswith("-")
        assert word.isascii()
        assert shlex.split(word) == [word]
        assert not set(word) & set("*?[]~=/ ")


@pytest.mark.parametrize(
    ("names", "content"),
    [
        ("node1", "node1\n"),
        ("node1,me@node2:3, 10.0.0.7:2", "node1\nme@node2 slots=3\n10.0.0.7 slots=2\n"),
        ("fd00::1,[fd00::2]:2", "fd00::1\n[fd00::2] slots=2\n"),
    ],
)
def test_names_become_a_hostfile_that_says_the_same(
    tmp_path: Path, names: str, content: str
) -> None:
    path = write_hosts(names, tmp_path / "run" / "hosts.txt")
    assert path.read_text() == content
    assert path.stat().st_mode & 0o777 == 0o600
    slots = [int(line.partition("slots=")[2] or 1) for line in content.splitlines()]
    assert [host.slots for host in read_hostfile(path)] == slots


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("", "no host"),
        (",,", "no host"),
        ("node1,node1", "twice"),
        ("node1,,node2", "missing beside a comma"),
        ("node1,", "missing beside a comma"),
        ("node1:0", "not a number of ranks"),
        ("node1;rm -rf /", "not the name of a host"),
        ("-oProxyCommand=x", "not the name of a host"),
        ("node1:2:3", "not the name of a host"),
    ],
)
def test_what_is_no_list_of_names_is_refused_and_nothing_is_written(
    tmp_path: Path, names: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        write_hosts(names, tmp_path / "hosts.txt")
    assert refused.value.where == "--hosts"
    assert list(tmp_path.iterdir()) == []


def test_where_slots_go_is_said_where_a_name_alone_is_wanted() -> None:
    with pytest.raises(ConfigError) as refused:
        host_from_name("node0:2", "--hosts")
    assert refused.value.code == "host-name-invalid"
    assert "the number of its ranks belongs in the hostfile (slots)" in (refused.value.hint or "")
    with pytest.raises(ConfigError) as refused:
        host_from_name("a;b", "--hosts")
    assert "slots" not in (refused.value.hint or "")


def test_no_names_at_all_is_told_in_words_of_its_own() -> None:
    with pytest.raises(ConfigError) as refused:
        build_config({"hosts": ""})
    assert "Computers to train on, by name" in str(refused.value)
    assert "same" not in str(refused.value)
