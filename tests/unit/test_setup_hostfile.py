"""The hostfile that set-up writes, also beside an earlier one and with what MLX's Thunderbolt
configurator found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allhands.cluster.doctor.facts import HostFacts
from allhands.cluster.hosts import hostfile_backend, read_hostfile
from allhands.cluster.setup import thunderbolt
from allhands.cluster.setup.hostfile import check_output, compose, host_entry, read_old, write
from allhands.cluster.setup.thunderbolt import (
    Wiring,
    backend_of,
    configure_step,
    joined,
    read_wiring,
)
from allhands.errors import ConfigError

A = host_entry("a", ("10.0.0.1",), 1, "/env/bin/python", "/work")
B = host_entry("me@b", ("10.0.0.2",), 4, "/b/bin/python", "/home/me/work")


def hosts_of(text: str, directory: Path) -> Any:
    path = directory / "composed.json"
    path.write_text(text)
    return read_hostfile(path)


def test_it_says_what_was_found(tmp_path: Path) -> None:
    text = compose([A, B])
    first, second = hosts_of(text, tmp_path)
    assert (first.ssh, first.ips, first.slots, first.python, first.cwd) == (
        "a",
        ("10.0.0.1",),
        1,
        "/env/bin/python",
        "/work",
    )
    assert (second.ssh, second.slots, second.cwd) == ("me@b", 4, "/home/me/work")
    # MLX's own reader understands it.
    code = "import sys; from mlx._distributed_utils.common import Hostfile as H; h = H.from_file(sys.argv[1]);"
    code += "print([(x.ssh_hostname, x.ips, x.rdma) for x in h.hosts], repr(h.backend), h.envs)"
    argv = [sys.executable, "-c", code, tmp_path / "composed.json"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert said == "[('a', ['10.0.0.1'], []), ('me@b', ['10.0.0.2'], [])] '' []\n"


def test_what_a_person_has_chosen_stays(tmp_path: Path) -> None:
    old = {
        "backend": "ring",
        "envs": {"OLD": "1"},
        "hosts": [
            {"ssh": "z", "cwd": "/z"},
            {"ssh": "a", "ips": ["9.9.9.9"], "slots": 2, "envs": ["X=y"], "python": "p"},
        ],
    }
    text = compose([A, B], old=old)
    found = {host.name: host for host in hosts_of(text, tmp_path)}
    assert list(found) == ["z", "a", "me@b"]
    assert (found["a"].slots, found["a"].ips, found["a"].python) == (
        2,
        ("10.0.0.1",),
        "/env/bin/python",
    )
    assert dict(found["a"].envs) == {"OLD": "1", "X": "y"}
    assert found["z"].cwd == "/z"
    assert json.loads(text)["backend"] == "ring"
    # Once more with its own result: nothing is different.
    assert compose([A, B], old=json.loads(text)) == text


def test_the_configurators_addresses_and_order_win(tmp_path: Path) -> None:
    rdma = {"me@b": ((None, "rdma_en3")), "a": (("rdma_en2", "rdma_en4"), None)}
    wiring = Wiring(
        "jaccl",
        ("MLX_METAL_FAST_SYNCH=1",),
        {name: ((f"192.168.0.{i}",), rdma[name]) for i, name in enumerate(rdma)},
    )
    text = compose([A, B], wiring, old={"hosts": [{"ssh": "z"}]})
    (tmp_path / "hosts.json").write_text(text)
    found = read_hostfile(tmp_path / "hosts.json")
    # Devices are counted by the places of the hosts: another host in the file would shift them.
    assert [host.name for host in found] == ["me@b", "a"]
    assert [host.ips for host in found] == [("192.168.0.0",), ("192.168.0.1",)]
    assert found[1].rdma == (("rdma_en2", "rdma_en4"), None)
    assert hostfile_backend(tmp_path / "hosts.json") == "jaccl"
    assert dict(found[0].envs) == {"MLX_METAL_FAST_SYNCH": "1"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('[{"ssh": "a"}]', ["a"]),
        ('{"hosts": [{"ssh": "a"}, {"ssh": "b"}]}', ["a", "b"]),
        ("a slots=2\nb  # comment\n", ["a", "b"]),
    ],
)
def test_every_form_of_an_earlier_hostfile_is_read(
    tmp_path: Path, text: str, names: list[str]
) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    old = read_old(path)
    assert old is not None
    assert [entry["ssh"] for entry in old["hosts"]] == names


def test_what_is_no_hostfile_is_not_written_over(tmp_path: Path) -> None:
    assert read_old(tmp_path / "none") is None
    (tmp_path / "hosts.json").write_text('{"hosts": 3}')
    with pytest.raises(ConfigError):
        read_old(tmp_path / "hosts.json")
    with pytest.raises(ConfigError) as caught:
        check_output(tmp_path)
    assert caught.value.code == "place-taken"
    with pytest.raises(ConfigError) as caught:
        check_output(tmp_path / "none" / "hosts.json")
    assert caught.value.code == "path-missing"


def test_the_earlier_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    assert write(path, "1") is None
    assert write(path, "2") == tmp_path / "hosts.json.bak"
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "hosts.json": "2",
        "hosts.json.bak": "1",
    }


# --- Thunderbolt ----------------------------------------------------------------------------------


def mac(domain: str, *peers: str, devices: tuple[str, ...] = ()) -> HostFacts:
    """A Mac with one Thunderbolt port that leads to ``peers``."""
    port = {"receptacle": "1", "connected": bool(peers), "domain": domain, "peers": peers}
    return HostFacts.model_validate({"mac": {"thunderbolt": [port]}, "rdma": {"devices": devices}})


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ([mac("A", "B"), mac("B", "A")], True),
        ([mac("A", "B"), mac("B", "A", "C"), mac("C", "B")], True),
        ([mac("A", "B"), mac("B", "A"), mac("C")], False),
        ([mac("A", "X"), mac("B", "Y")], False),
        ([mac("A", "A"), mac("B", "B")], False),
        ([mac("A", "B")], False),
        ([mac("A", "B"), HostFacts()], False),
        ([HostFacts(), HostFacts()], False),
    ],
)
def test_macs_that_are_joined_by_cables(facts: list[HostFacts], expected: bool) -> None:
    assert joined(facts) is expected


def test_jaccl_needs_rdma_over_thunderbolt_everywhere() -> None:
    rdma = ("rdma_en2", "rdma_en3")
    assert backend_of([mac("A", devices=rdma), mac("B", devices=rdma)]) == "jaccl"
    assert backend_of([mac("A", devices=rdma), mac("B")]) == "ring"
    assert backend_of([mac("A", devices=rdma), mac("B", devices=("mlx5_0",))]) == "ring"


def test_the_configurator_knows_the_options(tmp_path: Path) -> None:
    step = configure_step(["a", "me@b"], "jaccl", tmp_path / "out.json")
    assert step.terminal
    assert step.changes
    # The installed one, with hosts that cannot be reached: it complains of these, not of its
    # options.
    argv = [
        sys.executable,
        "-c",
        "from mlx._distributed_utils.config import main; main()",
        *step.argv[1:],
    ]
    env = {**os.environ, "PATH": str(tmp_path)}
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n")
    (tmp_path / "ssh").chmod(0o700)
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    assert "Could not ssh to the following hosts" in done.stderr, done.stderr
    assert done.stderr.count(" - ") == 2


def test_what_the_configurator_writes(tmp_path: Path) -> None:
    """In the form of MLX's ``Hostfile.to_json``."""
    path = tmp_path / "out.json"
    hosts = [
        {
            "ssh": "b",
            "ips": ["192.168.0.1", "192.168.0.5"],
            "rdma": [None, ["rdma_en2", "rdma_en3"]],
        },
        {"ssh": "localhost", "ips": ["192.168.0.2"], "rdma": ["rdma_en4", None]},
    ]
    path.write_text(json.dumps({"backend": "jaccl", "envs": ["A=b"], "hosts": hosts}, indent=4))
    found = read_wiring(path)
    assert (found.backend, found.envs, list(found.hosts)) == ("jaccl", ("A=b",), ["b", "localhost"])
    assert found.hosts["b"] == (("192.168.0.1", "192.168.0.5"), (None, ("rdma_en2", "rdma_en3")))
    path.write_text(json.dumps({"hosts": [{"ssh": "a"}, {"ssh": "a"}]}))
    with pytest.raises(ConfigError) as caught:
        thunderbolt.read_wiring(path)
    assert caught.value.code == "host-given-twice"
