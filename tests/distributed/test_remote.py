"""Ranks on several computers: real sshd in network namespaces, real faults; nothing may be left
anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from namespaces import Cluster, namespaces
from strangers import AGENT_HELLO

from allhands.checkpoints import checkpoint_path, write_checkpoint
from allhands.cluster import remote
from allhands.cluster.connection import HostError
from allhands.cluster.hosts import Host, read_hostfile
from allhands.cluster.ranks import LaunchSpec, Marks, Place, RankProcesses
from allhands.cluster.remote import newest_checkpoint, start_remote
from allhands.errors import ConfigError, TakenError

RANK = Path(__file__).parents[1] / "support" / "remote_rank.py"
PRETENDED_SSH = '#!/bin/sh\nwhile [ "$1" != "--" ]; do shift; done\nshift 2\nexec /bin/sh -c "$*"\n'

Start = Callable[..., RankProcesses]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with namespaces(2, directory, [directory / "own files"]) as made:
        yield made


@pytest.fixture
def places(cluster: Cluster, tmp_path: Path) -> tuple[Place, ...]:
    """Two ranks on each of two computers."""
    hosts = read_hostfile(cluster.hostfile(tmp_path / "hosts.json", slots=2))
    return tuple(Place(host.name, host.slots, host) for host in hosts)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start ``remote_rank.py`` on places; whatever happens, it is ended, and nothing is left here."""
    started: list[RankProcesses] = []
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))

    def begin(
        places: Sequence[Place], kind: str = "plain", seconds: float = 60, *words: str, **more: Any
    ):
        command = [sys.executable, str(RANK), kind, str(seconds), *words]
        total = sum(place.num_ranks for place in places)
        spec = LaunchSpec(
            command,
            total,
            "ring",
            tmp_path / "logs",
            places=tuple(places),
            cores_per_rank=1,
            **more,
        )
        started.append(start_remote(spec, tmp_path / "run"))
        return started[-1]

    yield begin
    for ranks in started:
        ranks.kill()
    assert own_processes() == []
    assert list((tmp_path / "temporary").iterdir()) == []


def own_processes() -> list[list[str]]:
    """Command lines of what this process has started for a run: ssh, agents, ranks."""
    found: list[list[str]] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            said = process.cmdline()
            if process.name() == "ssh" or "allhands.cluster.agent" in said or str(RANK) in said:
                found.append(said)
    return found


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; nothing if it has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def assert_nothing_left(cluster: Cluster) -> None:
    """No process, and no temporary file, on any of the computers."""
    assert [cluster.processes(name) for name in cluster.names] == [[], []]
    assert [list(node.temporary.iterdir()) for node in cluster.nodes.values()] == [[], []]


def wait_for(what: Callable[[], Any], timeout_s: float = 20.0) -> float:
    """Wait until it holds; returns how long that took."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() < began + timeout_s, "it did not come to pass"
        time.sleep(0.02)
    return time.monotonic() - began


def wait_for_start(ranks: RankProcesses, count: int) -> None:
    wait_for(
        lambda: all(ranks.marks(rank).started and ranks.marks(rank).beat for rank in range(count))
    )


def facts_of(ranks: RankProcesses, rank: int) -> dict[str, Any]:
    (line,) = [line for line in ranks.log_tail(rank) if line.startswith("facts ")]
    return json.loads(line.removeprefix("facts "))


def codes(ranks: RankProcesses) -> list[int]:
    return [end.code for end in sorted(ranks.exits(), key=lambda end: end.rank)]


def ssh_of(name: str) -> psutil.Process:
    """The one ssh of ours that leads to that computer."""
    (found,) = [
        child
        for child in psutil.Process().children()
        if child.name() == "ssh" and name in child.cmdline()
    ]
    return found


# --- what a run needs -----------------------------------------------------------------------------


def test_a_ring_over_two_computers(
    cluster: Cluster, places: tuple[Place, ...], start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = start(places, "ring", 3.0, env={"ALLHANDS_RUN_ID": "abc"})
    wait_for_start(ranks, 4)
    first = ranks.marks(2)
    assert first.ready
    assert first.busy_time is not None
    assert first.beat is not None
    assert first.beat.phase == "compute"
    assert abs(time.monotonic() - first.beat.time) < 2.0
    wait_for(
        lambda: (later := ranks.marks(2).beat) and first.beat and later.count > first.beat.count
    )
    wait_for(lambda: len(ranks.exits()) == 4)
    assert codes(ranks) == [0, 3, 0, 0]
    assert ranks.lost_hosts() == []
    assert [ranks.host(rank) for rank in range(4)] == ["node0", "node0", "node1", "node1"]
    assert ranks.error(1) == {"type": "Boom", "message": "bang"}
    assert ranks.error(2) is None
    assert not ranks.out_of_memory(3)
    assert ranks.log_path(3).name == "rank-3.log"
    assert [tail[-1] for tail in map(ranks.log_tail, (1, 2, 3))] == ["sum 10.0"] * 3

    facts = facts_of(ranks, 3)
    assert facts["mode"] == 0o700
    addresses = [peer.rpartition(":")[0] for (peer,) in facts["peers"]]
    assert addresses == [node.address for node in cluster.nodes.values() for _ in range(2)]
    expected = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "2",
        "RUN_ID": "abc",
        "CORES": "1",
    }
    assert {name: facts["environment"][f"ALLHANDS_{name}"] for name in expected} == expected
    assert "ALLHANDS_SSH" not in facts["environment"]

    began = time.monotonic()
    ranks.kill()
    assert time.monotonic() - began < 4.0, "no agent confirmed the end"
    captured = capfd.readouterr()
    assert '"ALLHANDS_RANK": "0"' in captured.out
    assert captured.err == "sum 10.0\n"
    assert_nothing_left(cluster)
    assert not Path(facts["environment"]["ALLHANDS_RUN_DIR"]).exists()


def test_rank_0_here_and_another_there(
    cluster: Cluster, places: tuple[Place, ...], start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = start([Place("here", 1), Place("node0", 1, places[0].host)], "ring", 0.2)
    wait_for(lambda: len(ranks.exits()) == 2)
    assert codes(ranks) == [0, 3]
    peers = facts_of(ranks, 1)["peers"]
    # Not the loopback address, which the other computer could not reach.
    assert [peer.rpartition(":")[0] for (peer,) in peers] == [
        cluster.address,
        cluster.nodes["node0"].address,
    ]
    ranks.kill()
    assert capfd.readouterr().err == "sum 3.0\n"


def test_words_and_signals(places: tuple[Place, ...], start: Start) -> None:
    ranks = start(places)
    wait_for_start(ranks, 4)
    assert ranks.signal(3, signal.SIGTERM)
    wait_for(lambda: len(ranks.exits()) == 1)
    assert not ranks.signal(3, signal.SIGTERM)
    # Of a rank that still lives, too, one may want to know what it has said.
    assert facts_of(ranks, 2)["arguments"] == []
    ranks.tell("regroup")
    wait_for(lambda: len(ranks.exits()) == 4)
    assert codes(ranks) == [75, 75, 75, -signal.SIGTERM]


def test_the_log_of_the_last_attempt_is_set_aside(
    places: tuple[Place, ...], start: Start, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-2.log").write_text("old\n")
    (tmp_path / "logs" / "error-rank-2.json").write_text('{"type": "Old", "message": "old"}')
    ranks = start(places, "plain", 0.1)
    wait_for(lambda: len(ranks.exits()) == 4)
    assert ranks.error(2) is None
    assert "old" not in ranks.log_tail(2)
    assert (tmp_path / "logs" / "rank-2.previous.log").read_text() == "old\n"


def test_a_login_shell_that_talks(
    cluster: Cluster, places: tuple[Place, ...], start: Start, tmp_path: Path
) -> None:
    login = cluster.nodes["node1"].login
    usual = login.read_text()
    forged = json.dumps(
        {"secret": "0" * 64, "kind": "exit", "rank": 2, "code": 0, "age": 0, "report": {}}
    )
    login.write_text(
        f"echo Welcome; echo; printf '\\377\\0\\n'; echo {shlex.quote(forged)}; echo '{{\"kind\": \"ready\"}}'\n"
        f"echo '[1'; printf 'no end of line'; {usual}"
    )
    try:
        ranks = start(places, "plain", 0.3)
        wait_for(lambda: len(ranks.exits()) == 4)
    finally:
        login.write_text(usual)
    assert codes(ranks) == [0, 3, 0, 0]
    ranks.kill()
    log = (tmp_path / "logs" / "host-node1.log").read_bytes()
    assert b"Welcome\n\xff\0\n" in log
    assert log.endswith(b"no end of line\n")
    assert (tmp_path / "logs" / "host-node1.log").stat().st_mode & 0o777 == 0o600


# --- faults ---------------------------------------------------------------------------------------


def test_ssh_is_killed(cluster: Cluster, places: tuple[Place, ...], start: Start) -> None:
    ranks = start(places, "deaf")
    wait_for_start(ranks, 4)
    assert len(cluster.processes("node1")) > 2
    ssh_of("node1").kill()
    assert wait_for(lambda: len(ranks.exits()) == 2, 3.0) < 2.0
    assert [(end.rank, end.code) for end in ranks.exits()] == [(2, -9), (3, -9)]
    assert ranks.lost_hosts() == ["node1"]
    assert cluster.wait_for_none("node1", 5.0) < 5.0
    assert not ranks.signal(2, signal.SIGTERM)
    assert ranks.signal(0, signal.SIGKILL)
    wait_for(lambda: len(ranks.exits()) == 3)


@pytest.mark.long
def test_the_cable_is_pulled(cluster: Cluster, places: tuple[Place, ...], start: Start) -> None:
    ranks = start(places, "deaf")
    wait_for_start(ranks, 4)
    cluster.cut("node1")
    try:
        began = time.monotonic()
        lost_after = wait_for(lambda: ranks.lost_hosts() == ["node1"], 10.0)
        assert 3.0 < lost_after < 7.5
        assert [(end.rank, end.code) for end in ranks.exits()] == [(2, -9), (3, -9)]
        assert ranks.log_tail(2) == ()
        assert len(cluster.processes("node1")) > 2, "there was nothing to end"
        before = time.monotonic()
        ranks.kill()
        assert time.monotonic() - before < 6.0
        assert cluster.processes("node0") == []
        # Nobody can tell it: it ends by itself.
        cluster.wait_for_none("node1", 20.0)
        assert time.monotonic() - began < 20.0
        assert_nothing_left(cluster)
    finally:
        cluster.heal("node1")


def test_a_slow_network_is_not_a_lost_computer(
    cluster: Cluster, places: tuple[Place, ...], start: Start
) -> None:
    cluster.slow("node1", "400kbit", "50ms")
    try:
        ranks = start(places, "plain", 0.5)
        began = time.monotonic()
        words = [*shlex.split(cluster.ssh_command), "node1", "cat > /dev/null"]
        subprocess.run(words, input=os.urandom(200_000), check=True, timeout=60)
        assert time.monotonic() - began > 1.5, "the network is not slow"
        wait_for(lambda: len(ranks.exits()) == 4)
        assert codes(ranks) == [0, 3, 0, 0]
        assert ranks.lost_hosts() == []
        ranks.kill()
    finally:
        cluster.heal("node1")


def test_an_agent_is_killed(cluster: Cluster, places: tuple[Place, ...], start: Start) -> None:
    ranks = start(places, "child")
    wait_for_start(ranks, 4)
    run_dir = Path(facts_of(ranks, 2)["environment"]["ALLHANDS_RUN_DIR"])
    assert run_dir.exists()
    assert ranks.signal(3, signal.SIGSTOP)
    stopped = [psutil.STATUS_STOPPED]
    wait_for(lambda: [p for p in cluster.processes("node1") if p.status() in stopped])
    assert [p for p in cluster.processes("node1") if p.name() == "sleep"], "there is no child"
    (agent,) = [p for p in cluster.processes("node1") if "allhands.cluster.agent" in words_of(p)]
    agent.kill()
    wait_for(lambda: ranks.lost_hosts() == ["node1"], 3.0)
    cluster.wait_for_none("node1", 5.0)
    wait_for(lambda: not run_dir.exists(), 3.0)


def test_stopped_ranks_and_children_end_too(
    cluster: Cluster, places: tuple[Place, ...], start: Start
) -> None:
    ranks = start(places, "child")
    wait_for_start(ranks, 4)
    for rank in range(4):
        assert not ranks.stopped(rank)
        assert ranks.signal(rank, signal.SIGSTOP)
        wait_for(lambda rank=rank: ranks.stopped(rank))
    ranks.kill()
    assert_nothing_left(cluster)
    assert codes(ranks) == [-9] * 4
    ranks.kill()


def test_the_supervisor_is_killed(
    cluster: Cluster, places: tuple[Place, ...], tmp_path: Path
) -> None:
    script = (
        "import sys, time; from pathlib import Path; from allhands.cluster.hosts import read_hostfile\n"
        "from allhands.cluster.ranks import LaunchSpec, Place; from allhands.cluster.remote import start_remote\n"
        "hosts, logs, *command = sys.argv[1:]\n"
        "places = tuple(Place(h.name, h.slots, h) for h in read_hostfile(hosts)) + (Place('here', 1),)\n"
        "start_remote(LaunchSpec(command, 5, 'ring', Path(logs), places=places), Path(logs)); time.sleep(100)\n"
    )
    words = [tmp_path / "hosts.json", tmp_path / "logs", sys.executable, RANK, "deaf", "100"]
    supervisor = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, words)], stdout=subprocess.DEVNULL
    )
    try:
        for name in cluster.names:
            wait_for(
                lambda name=name: sum("deaf" in words_of(p) for p in cluster.processes(name)) == 2
            )
        own = psutil.Process(supervisor.pid).children(recursive=True)
        wait_for(
            lambda: any(
                "deaf" in words_of(p)
                for p in psutil.Process(supervisor.pid).children(recursive=True)
            )
        )
    finally:
        supervisor.kill()
        supervisor.wait()
    for name in cluster.names:
        cluster.wait_for_none(name, 5.0)
    wait_for(lambda: not any(p.is_running() for p in own), 5.0)
    assert_nothing_left(cluster)


# --- before the start -----------------------------------------------------------------------------


def test_computers_that_cannot_be_reached_are_named(
    cluster: Cluster, places: tuple[Place, ...], start: Start, tmp_path: Path
) -> None:
    gone = Host("gone", f"{cluster.address}", ("10.77.255.1",))  # no sshd there with our keys
    lame = Host("node1", "node1", (cluster.nodes["node1"].address,), python="/nowhere/python")
    with pytest.raises(HostError) as refusal:
        start([places[0], Place("gone", 1, gone), Place("node1", 1, lame)])
    assert refusal.value.hosts == ("gone", "node1")
    assert "gone cannot be reached" in refusal.value.message
    assert "/nowhere/python" in refusal.value.message
    assert "host-gone.log" in str(refusal.value.hint)
    assert cluster.processes("node0") == []


def test_an_address_of_somebody_else(places: tuple[Place, ...], start: Start) -> None:
    with pytest.raises(HostError, match=r"192\.0\.2\.1 is no address of this computer"):
        start(
            [
                Place("node0", 1, Host("node0", "node0", ("192.0.2.1",), python=sys.executable)),
                places[1],
            ]
        )


def test_other_versions(
    places: tuple[Place, ...], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {**remote.software_here(), "mlx": "0.0.1"}
    monkeypatch.setattr(remote, "software_here", lambda: changed)
    with pytest.raises(HostError, match=r"node0 has mlx .*, this computer 0\.0\.1"):
        start(places)


def test_what_cannot_be_asked_for(places: tuple[Place, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ring"):
        start_remote(LaunchSpec(["true"], 4, "mpi", tmp_path, places=places), tmp_path)
    with pytest.raises(ConfigError, match="3 ranks, but places for 4"):
        start_remote(LaunchSpec(["true"], 3, "ring", tmp_path, places=places), tmp_path)


def test_the_newest_checkpoint_of_each(
    cluster: Cluster, tmp_path: Path, places: tuple[Place, ...]
) -> None:
    own = cluster.directory / "own files"  # every computer sees another one
    for i, (step, run_id) in enumerate([(300, "ab" * 8), (200, "ab" * 8)]):
        write_checkpoint(checkpoint_path(tmp_path / f"{i}", step), step, run_id, {}, {})
        cluster.run(f"node{i}", ["cp", "-r", str(tmp_path / f"{i}"), str(own / "adapters")])
    write_checkpoint(checkpoint_path(tmp_path / "other", 900), 900, "cd" * 8, {}, {})
    cluster.run("node1", ["cp", "-r", f"{tmp_path / 'other'}/.", str(own / "adapters")])
    hosts = [place.host for place in places if place.host] + [
        Host("gone", cluster.address),
        Host("here"),
    ]
    assert newest_checkpoint(hosts, own / "adapters", "ab" * 8) == {"node0": 300, "node1": 200}
    assert newest_checkpoint([], own, "ab" * 8) == {}
    assert_nothing_left(cluster)


# --- without namespaces ---------------------------------------------------------------------------


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ssh that leads back here, and treats its words as ssh does."""
    path = tmp_path / "pretended ssh"
    path.write_text(PRETENDED_SSH)
    path.chmod(0o755)
    monkeypatch.setenv("ALLHANDS_SSH", shlex.quote(str(path)))


@pytest.mark.usefixtures("pretended")
def test_hostile_values_arrive_as_they_are(start: Start, tmp_path: Path) -> None:
    evil = "x'; touch pwned; $(touch pwned) `touch pwned` \"é"
    directory = tmp_path / evil
    directory.mkdir()
    (directory / "venv").symlink_to(sys.prefix)
    python = str(directory / "venv" / "bin" / Path(sys.executable).name)
    entry = {
        "ssh": "other",
        "ips": ["127.0.0.1"],
        "python": python,
        "cwd": str(directory),
        "envs": {"TEST_X": evil},
    }
    (tmp_path / "hosts.json").write_text(json.dumps([entry]))
    (host,) = read_hostfile(tmp_path / "hosts.json")
    places = [Place("here", 1, Host("here", None, ("127.0.0.1",))), Place("other", 1, host)]
    ranks = start(places, "plain", 0.1, evil, "-n\n", env={"TEST_Y": f"{evil}\n"})
    wait_for(lambda: len(ranks.exits()) == 2)
    facts = facts_of(ranks, 1)
    assert facts["arguments"] == [evil, "-n\n"]
    assert facts["environment"]["TEST_X"] == evil
    assert facts["environment"]["TEST_Y"] == f"{evil}\n"
    assert facts["directory"] == str(directory)
    assert facts["python"] == python
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.usefixtures("pretended")
def test_a_directory_that_cannot_be_used(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Host(
        "other", "other", ("127.0.0.1",), python=sys.executable, cwd=str(tmp_path / "none")
    )
    with pytest.raises(ConfigError, match=r"host other: .*none cannot be entered"):
        start([Place("other", 1, other)])
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work" / "logs").write_text("a file")
    ranks = start(
        [Place("other", 1, Host("other", "other", ("127.0.0.1",), cwd=str(tmp_path / "work")))]
    )
    wait_for(lambda: len(ranks.exits()) == 1)
    assert codes(ranks) == [7]
    error = ranks.error(0)
    assert error is not None
    assert error["type"] == TakenError.__name__
    assert "logs" in error["text"]


def agent(*lines: str) -> subprocess.CompletedProcess[str]:
    """What an agent answers to lines on its standard input, which then ends."""
    command = [sys.executable, "-P", "-m", "allhands.cluster.agent"]
    text = "".join(f"{line}\n" for line in lines)
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=30, check=False
    )


def frame(secret: str | None, kind: str, **fields: Any) -> str:
    return json.dumps({**({} if secret is None else {"secret": secret}), "kind": kind, **fields})


HELLO = {**AGENT_HELLO, "first": 1}


def test_who_does_not_know_the_secret_is_refused(tmp_path: Path) -> None:
    for first in (
        frame(None, "hello", **HELLO),
        frame("short", "hello", **HELLO),
        "GET / HTTP/1.1",
        frame("a" * 64, "end"),
    ):
        done = agent(first, frame("a" * 64, "hello", **HELLO))
        assert (done.returncode, done.stdout) == (2, "")
        assert "no message from a supervisor" in done.stderr
    own = frame("a" * 64, "ping", number=5)
    done = agent(
        frame("a" * 64, "hello", **HELLO),
        frame("b" * 64, "ping", number=4),
        frame(None, "end"),
        own,
    )
    frames = [json.loads(line) for line in done.stdout.splitlines() if line]
    assert done.returncode == 0
    assert {each["secret"] for each in frames} == {"a" * 64}
    assert [(each["kind"], each.get("number")) for each in frames] == [
        ("ready", None),
        ("pong", 5),
        ("ended", None),
    ]
    (port,) = frames[0]["ports"]
    assert 1024 < port < 65536
    assert "a" * 64 not in done.stderr


def test_marks_of_a_rank_that_has_said_nothing(start: Start) -> None:
    ranks = start([Place("here", 1)], "plain", 0)
    assert ranks.marks(0) in (Marks(), ranks.marks(0))
    wait_for(lambda: len(ranks.exits()) == 1)
