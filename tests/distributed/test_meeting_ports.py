"""Ranks of other launchers on several computers with a firewall between: told within seconds, only
where it is so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from namespaces import Cluster, namespaces
from tiny import write_chat_data, write_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

PATIENCE_S = 22.0
NEW = "-p tcp ! --dport 22 -m conntrack --ctstate NEW"
_STRANGE = ("SLURM_", "OMPI_", "PMIX_", "PMI_", "MLX_", "ALLHANDS_", "NCCL_")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if shutil.which("iptables", path="/usr/sbin:/sbin:/usr/bin") is None:
        pytest.skip("no iptables here: scripts/install_test_tools.sh")
    with namespaces(3, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("work")
    write_model(root / "model", layers=2)
    write_chat_data(root / "data", train=12, valid=3, test=3, longest=30)
    return root


@pytest.fixture
def job(cluster: Cluster, place: Path) -> Iterator[Job]:
    job = Job(cluster, place)
    yield job
    job.close()
    for name in cluster.names:
        cluster.run(name, ["iptables", "-F"])


def wall(cluster: Cluster, name: str, rule: str) -> None:
    """Add a rule for what comes to that computer."""
    cluster.run(name, ["iptables", "-A", "INPUT", *rule.split()])


@dataclass
class Rank:
    """A process on a computer, and when it has said something of a firewall."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - self.began, line))

    def end(self, timeout_s: float = 90.0) -> float:
        """When it has ended, in seconds."""
        try:
            self.process.wait(timeout_s)
        finally:
            self.process.kill()
        self._thread.join(5.0)
        return time.monotonic() - self.began

    @property
    def text(self) -> str:
        return "".join(line for _, line in self.lines)

    def suspected(self) -> float:
        """When it first spoke of a firewall; infinite: never."""
        return next((when for when, line in self.lines if "firewall" in line), float("inf"))


class Job:
    """What a test starts on the computers."""

    def __init__(self, cluster: Cluster, place: Path) -> None:
        self._cluster = cluster
        self._place = place
        self._ranks: list[Rank] = []

    def close(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
            rank.end()
            assert rank.process.stdout is not None
            rank.process.stdout.close()

    def start(self, name: str, command: Sequence[str], variables: dict[str, str]) -> Rank:
        usual = {key: value for key, value in os.environ.items() if not key.startswith(_STRANGE)}
        usual |= {
            "OPENBLAS_NUM_THREADS": "1",
            "ALLHANDS_PEERS_TIMEOUT_S": str(PATIENCE_S),
            **variables,
        }
        words = self._cluster.command(name, command)
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=usual
        )
        self._ranks.append(Rank(process))
        return self._ranks[-1]

    def torch(self, out: str, rank: int, size: int = 2) -> Rank:
        """``allhands train`` as torchrun's kin start it on computer number ``rank``."""
        paths = [
            "--model",
            self._place / "model",
            "--data",
            self._place / "data",
            "--adapter-path",
            self._place / out,
        ]
        text = (
            "--train --iters 2 --batch-size 4 --steps-per-report 1 --val-batches 1 --num-layers 2"
        )
        command = [sys.executable, "-m", "allhands", "train", *map(str, paths), *text.split()]
        address = self._cluster.nodes["node0"].address
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": address,
            "MASTER_PORT": "29500",
        }
        return self.start(f"node{rank}", command, variables)


_MEET = """
import sys
from allhands.cluster.meeting import Patience, meet
from allhands.cluster.place import MeetingPoint
from allhands.errors import AllhandsError
address, port, backend = sys.argv[1:4]
rank, size, patience = map(int, sys.argv[4:])
patience = Patience(patience, lambda text: print("told:", text))
try:
    print(*meet(MeetingPoint(address, (int(port),), "job"), rank, size, 5000 + rank, patience, backend))
except AllhandsError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_the_port_where_ranks_meet_is_blocked(cluster: Cluster, job: Job) -> None:
    wall(cluster, "node0", f"{NEW} -j DROP")
    first, other = ranks = [job.torch("meet", rank) for rank in (0, 1)]
    for rank in ranks:
        assert rank.end() < PATIENCE_S + 30.0
        assert rank.process.returncode == 7, rank.text
        assert "Traceback" not in rank.text
        assert "allhands cluster check" in rank.text
    # Most of it is what a process takes to start. Rank 0 cannot know, and says so only at the end.
    assert other.suspected() < 20.0, other.text
    assert f"--hosts localhost,{cluster.nodes['node0'].address}" in other.text
    assert "29500" in other.text
    assert first.suspected() > 20.0
    assert "nobody has called" in first.text


@pytest.mark.parametrize(
    ("kinds", "blocked"),
    [
        (["admin-prohibited", "host-unreachable", "net-unreachable"], True),
        (
            ["port-unreachable"],
            False,
        ),  # as where nobody listens yet; alone, because a kernel rations it
    ],
)
def test_a_port_that_is_rejected_is_told_by_what_the_network_says(
    cluster: Cluster, job: Job, kinds: list[str], blocked: bool
) -> None:
    for port, kind in enumerate(kinds, 4001):
        wall(cluster, "node0", f"-p tcp --dport {port} -j REJECT --reject-with icmp-{kind}")
    command = [sys.executable, "-c", _MEET, cluster.nodes["node0"].address]
    ports = map(str, range(4001, 4001 + len(kinds)))
    ranks = [job.start("node1", [*command, port, "ring", "1", "2", "12"], {}) for port in ports]
    for rank in ranks:
        rank.end()
        assert rank.process.returncode == 7
        assert (rank.suspected() < float("inf")) == blocked, rank.text
        assert ("told: " in rank.text) == blocked, rank.text


def test_the_way_after_the_meeting_is_blocked(cluster: Cluster, job: Job) -> None:
    """The port where ranks meet is open, as its documentation says; those of MLX are not."""
    wall(cluster, "node1", f"{NEW} -s {cluster.nodes['node0'].address} -j DROP")
    ranks = [job.torch("after", rank) for rank in (0, 1)]
    for rank in ranks:
        assert rank.end() < 25.0, rank.text  # nobody waits for a time-out
        assert rank.process.returncode == 7, rank.text
        assert "rank 1 listens at" in rank.text
        assert "connections from rank 0" in rank.text
        assert "firewall" in rank.text
        assert "allhands cluster check" in rank.text


@pytest.mark.parametrize("backend", ["ring", "nccl"])
def test_the_ways_that_are_tried_are_those_of_the_back_end(
    cluster: Cluster, job: Job, backend: str
) -> None:
    """From rank 1 to rank 0 goes no ring of three, and where they meet another port is open; NCCL
    calls the first.
    """
    wall(cluster, "node0", f"-p tcp --dport 5000 -s {cluster.nodes['node1'].address} -j DROP")
    address = cluster.nodes["node0"].address
    command = [sys.executable, "-c", _MEET, address, "29500", backend]
    ranks = [job.start(f"node{rank}", [*command, str(rank), "3", "20"], {}) for rank in range(3)]
    for rank in ranks:
        assert rank.end() < 20.0
        assert rank.process.returncode == (7 if backend == "nccl" else 0), rank.text
        assert ("connections from rank 1" in rank.text) == (backend == "nccl")


_FIRST = """
import sys, time
from pathlib import Path
from allhands.distributed.ring import reach_first
from allhands.errors import AllhandsError
class Seen:
    def listening(self): Path(sys.argv[4], "listens-" + sys.argv[2]).touch()
    def all_listen(self): return len(list(Path(sys.argv[4]).iterdir())) == int(sys.argv[3])
try:
    reach_first(sys.argv[1] + ":4000", int(sys.argv[2]), int(sys.argv[3]), 30.0, Seen())
except AllhandsError as error:
    print(type(error).__name__, error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("blocked", [False, True])
def test_the_first_rank_of_nccl_and_jaccl_under_our_supervisor(
    cluster: Cluster, job: Job, tmp_path: Path, blocked: bool
) -> None:
    if blocked:
        wall(cluster, "node0", f"{NEW} -s {cluster.nodes['node2'].address} -j DROP")
    command = [sys.executable, "-c", _FIRST, cluster.nodes["node0"].address]
    ranks = [
        job.start(f"node{rank}", [*command, str(rank), "3", str(tmp_path)], {}) for rank in range(3)
    ]
    if not blocked:
        for rank in ranks:
            assert rank.end() < 15.0
            assert rank.process.returncode == 0, rank.text
        return
    # The supervisor ends the others.
    assert ranks[2].end() < 15.0
    assert ranks[2].process.returncode == 7
    assert "BlockedError" in ranks[2].text
    for rank in ranks[:2]:
        assert rank.process.poll() is None


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_only_late_makes_nobody_think_of_a_firewall(job: Job, late: int) -> None:
    ranks = {1 - late: job.torch(f"late-{late}", 1 - late)}
    time.sleep(9.0)  # longer than it takes to suspect one
    ranks[late] = job.torch(f"late-{late}", late)
    for rank in ranks.values():
        rank.end()
        assert rank.process.returncode == 0, rank.text
        assert rank.suspected() == float("inf"), rank.text
        assert "cluster check" not in rank.text


def test_a_wall_that_is_taken_down_in_time_costs_nothing(cluster: Cluster, job: Job) -> None:
    """A computer that is not up yet looks the same: nobody gives up at once."""
    wall(cluster, "node0", f"{NEW} -j DROP")
    ranks = [job.torch("down", rank) for rank in (0, 1)]
    deadline = time.monotonic() + 20.0
    while ranks[1].suspected() == float("inf") and time.monotonic() < deadline:
        time.sleep(0.1)
    cluster.run("node0", ["iptables", "-F"])
    for rank in ranks:
        rank.end()
        assert rank.process.returncode == 0, rank.text
    assert ranks[1].text.count("cluster check") == 1
