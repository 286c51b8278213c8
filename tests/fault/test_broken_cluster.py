"""Clusters broken on purpose, seen by ``allhands cluster check``: the way to the computers, shells
and Pythons.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from broken import Broken, broken_cluster
from pythons import make_old_python, make_python, make_python_off, write_index

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def computers(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path
) -> Iterator[Broken]:
    with broken_cluster(tmp_path_factory.mktemp("broken"), tiny_model, tiny_data) as found:
        yield found


@pytest.fixture
def sick(computers: Broken) -> Iterator[Broken]:
    yield computers
    computers.afresh()


def test_a_healthy_cluster(sick: Broken) -> None:
    answer = sick.check("--no-bench", *sick.trees)
    assert (answer.code, answer.content["stops"]) == (0, False)
    assert answer.told == sick.usual
    asked = {"ssh", "shell", "answers", "python", "allhands", "versions", "clock", "same-computer"}
    asked |= {
        "names",
        "directory",
        "variables",
        "model",
        "data",
        "address",
        "ports",
        "packets",
        "latency",
        "route",
        "mtu",
    }
    assert asked <= set(answer.content["well"])


def test_a_key_that_is_not_accepted(sick: Broken) -> None:
    (sick.files("node1") / "home/.ssh/authorized_keys").write_text(sick.other_key() + "\n")
    remedy, message = sick.finds(("stop", "ssh", ("node1",)))
    assert "it refuses the key" in message
    assert remedy == "ssh-copy-id node1"
    sick.type(remedy)
    sick.is_well()


def test_a_host_key_that_is_not_known(sick: Broken) -> None:
    sick.forget_key("node2")
    remedy, message = sick.finds(("stop", "ssh", ("node2",)))
    assert "not known" in message
    assert "fingerprint" in sick.type(remedy)
    sick.is_well()


def test_a_host_key_that_has_changed(sick: Broken) -> None:
    sick.forget_key("node2", sick.other_key())
    remedy, message = sick.finds(("stop", "ssh", ("node2",)))
    assert "its host key has changed" in message
    sick.type(remedy)
    sick.is_well()


def test_one_that_does_not_know_the_key_of_another(sick: Broken) -> None:
    known = sick.cluster.directory / "known_hosts-node0"
    address = sick.cluster.nodes["node1"].address
    lines = sick.known_hosts().read_text().splitlines()
    known.write_text("".join(f"{line}\n" for line in lines if not line.startswith(f"{address} ")))
    sick.on("node0", f"mount --bind {known} {sick.known_hosts()}")
    sick.undo.callback(sick.on, "node0", f"umount {sick.known_hosts()}")
    sick.is_well()  # nothing needs that
    mpi = ["--backend", "mpi"]
    remedy, message = sick.finds(("warn", "ssh-between", ("node0", "node1")), options=mpi)
    assert "from here ssh node1 fails: its host key is not known yet" in message
    assert "fingerprint" in sick.type(remedy)
    sick.is_well(options=mpi)


def test_a_name_that_does_not_resolve(sick: Broken) -> None:
    sick.entries["node1"]["ssh"] = "nowhere.invalid"
    remedy, message = sick.finds(("stop", "ssh", ("nowhere.invalid",)))
    assert "its name cannot be resolved" in message
    assert "did you mean" not in message
    assert remedy == "echo 'ADDRESS nowhere.invalid' | sudo tee -a /etc/hosts"


def test_a_name_that_does_not_resolve_without_a_hostfile(sick: Broken) -> None:
    _, message = sick.finds(
        ("stop", "ssh", ("nowhere.invalid",)), named=["--hosts", "node0,node1,nowhere.invalid"]
    )
    assert "its name cannot be resolved" in message


def test_a_name_that_is_mistyped(sick: Broken) -> None:
    remedy, message = sick.finds(
        ("stop", "ssh", ("me@ndoe1",)), named=["--hosts", "node0,me@ndoe1"]
    )
    assert "its name cannot be resolved" in message
    assert "; did you mean node1" in message
    assert remedy == "ssh me@node1 true   # and write node1 for ndoe1"


def test_no_ssh_server(sick: Broken) -> None:
    sick.firewall(
        "node1",
        f"INPUT -p tcp -s {sick.cluster.address} --dport 22 -j REJECT --reject-with tcp-reset",
    )
    remedy, message = sick.finds(("stop", "ssh", ("node1",)))
    assert "no ssh server listens" in message
    assert remedy.startswith(f"nc -vz {sick.cluster.nodes['node1'].address} 22")


def test_a_computer_that_is_switched_off(sick: Broken) -> None:
    sick.cluster.cut("node2")
    sick.undo.callback(sick.cluster.heal, "node2")
    remedy, message = sick.finds(("stop", "ssh", ("node2",)), options=["--timeout-s", "20"])
    assert "no answer" in message
    assert remedy == f"ping -c 3 {sick.cluster.nodes['node2'].address}"
    sick.cluster.heal("node2")
    sick.is_well()


def test_the_same_computer_twice(sick: Broken) -> None:
    sick.entries["again"] = {**sick.entries["node1"], "ssh": "root@node1"}
    remedy, message = sick.finds(("warn", "same-computer", ("root@node1", "node1")))
    assert "the same computer as node1" in message
    assert "node1" in sick.type(remedy)
    del sick.entries["again"]


# --- shells ---------------------------------------------------------------------------------------


def test_a_noisy_shell(sick: Broken) -> None:
    sick.profile("node2", "echo Welcome to node2; printf 'no mail'")
    remedy, message = sick.finds(("warn", "shell", ("node2",)))
    assert "Welcome to node2" in message
    # The files that there are not make grep fail, after it has shown the line.
    assert "echo Welcome to node2" in sick.type(remedy, succeeds=False).replace(
        "Welcome to node2\r\n", "", 1
    )
    (sick.files("node2") / "home/.bashrc").unlink()
    sick.is_well()


def test_few_open_files(sick: Broken) -> None:
    sick.profile("node0", "ulimit -S -n 128")
    remedy, message = sick.finds(("warn", "limits", ("node0",)))
    assert "128 files" in message
    sick.type(remedy)
    sick.is_well()


def test_few_open_files_that_only_an_administrator_may_raise(sick: Broken) -> None:
    sick.profile("node0", "ulimit -n 200")
    remedy, message = sick.finds(("warn", "limits", ("node0",)))
    assert "200 files" in message
    assert (
        remedy
        == """ssh node0 'echo '"'"'root - nofile 4096'"'"' | sudo tee -a /etc/security/limits.conf'"""
    )


def test_variables_of_another_launcher(sick: Broken) -> None:
    sick.profile("node1", "export OMPI_COMM_WORLD_RANK=3")
    remedy, message = sick.finds(("warn", "variables", ("node1",)))
    assert "OMPI_COMM_WORLD_RANK" in message
    assert "export OMPI_COMM_WORLD_RANK=3" in sick.type(remedy, succeeds=False)


@pytest.mark.parametrize(("seconds", "words"), [(-3600, "1h00m behind"), (3600, "1h00m ahead")])
def test_a_clock_off_by_an_hour(sick: Broken, tmp_path: Path, seconds: int, words: str) -> None:
    sick.entries["node2"]["python"] = str(make_python_off(tmp_path / "off", seconds))
    remedy, message = sick.finds(("warn", "clock", ("node2",)))
    assert f"its clock is {words}" in message
    assert remedy == "ssh -t node2 'sudo timedatectl set-ntp true'"


# --- Pythons --------------------------------------------------------------------------------------


def test_no_python(sick: Broken) -> None:
    sick.entries["node1"]["python"] = "/nowhere/bin/python"
    remedy, message = sick.finds(("stop", "python", ("node1",)))
    assert "there is no Python at /nowhere/bin/python" in message
    assert remedy == "allhands cluster init --hosts node1"


@pytest.mark.parametrize(("minor", "probed"), [(8, False), (10, True)])
def test_an_old_python(sick: Broken, tmp_path: Path, minor: int, probed: bool) -> None:
    python = make_old_python(tmp_path / "old", 3, minor)
    sick.entries["node1"]["python"] = str(python)
    remedy, message = sick.finds(("stop", "python", ("node1",)))
    assert f"{python} is Python 3.{minor}.4" in message
    assert ("3.11 is needed" in message) == probed
    assert remedy == "allhands cluster init --hosts node1"


def test_no_allhands(sick: Broken, tmp_path: Path) -> None:
    write_index(tmp_path / "index", sick.files("node2") / "home", {"allhands": version("allhands")})
    python = make_python(tmp_path / "bare", borrowing=False)
    sick.entries["node2"]["python"] = str(python)
    remedy, message = sick.finds(("stop", "allhands", ("node2",)))
    assert message == f"allhands is not installed in {python}"
    assert f"Successfully installed allhands-{version('allhands')}" in sick.type(remedy)
    sick.is_well()


@pytest.mark.parametrize(
    ("package", "other", "severity"),
    [("mlx", "0.31.0", "stop"), ("mlx-lm", "0.31.3", "stop")],
)
def test_another_release(
    sick: Broken, tmp_path: Path, package: str, other: str, severity: str
) -> None:
    write_index(tmp_path / "index", sick.files("node0") / "home", {package: version(package)})
    sick.entries["node0"]["python"] = str(make_python(tmp_path / "other", {package: other}))
    remedy, message = sick.finds((severity, "versions", ("node0",)))
    assert message == f"{package} {other}, but {version(package)} on node1, node2"
    assert f"Successfully uninstalled {package}-{other}" in sick.type(remedy)
    sick.is_well()
