"""RDMA over Thunderbolt: which computers it can join, and what MLX's JACCL is told. No such
hardware is needed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from allhands.cluster.candidates import Facts, HostTraits, table_choice
from allhands.cluster.hosts import Host, hostfile_backend
from allhands.cluster.membership import HostfileMembers
from allhands.cluster.processes import Share, start
from allhands.cluster.ranks import LaunchSpec, Place
from allhands.cluster.reaper import Reaper
from allhands.cluster.remote import check_devices
from allhands.errors import ConfigError

# Of three Macs, each with a cable to each other one: named after both ends.
MESH = [[None, "en0-1", "en0-2"], ["en1-0", None, "en1-2"], ["en2-0", "en2-1", None]]
# Of four in a ring.
RING = [
    [None, "a", None, "b"],
    ["c", None, "d", None],
    [None, "e", None, "f"],
    ["g", None, "h", None],
]


def _places(rdma: list[list[Any]], ranks: int = 1) -> list[Place]:
    return [
        Place(f"mac{i}", ranks, Host(f"mac{i}", f"mac{i}", rdma=tuple(row)))
        for i, row in enumerate(rdma)
    ]


def _told(tmp_path: Path, rdma: list[list[Any]], first: int) -> Mapping[str, str]:
    """The environment of a rank that is started on one of the computers."""
    out = tmp_path / f"environment-{first}.json"
    program = f"import json, os; json.dump(dict(os.environ), open({str(out)!r}, 'w'))"
    (tmp_path / "run").mkdir()
    spec = LaunchSpec([sys.executable, "-c", program], len(rdma), "jaccl", tmp_path, rdma=rdma)
    share = Share(first, 1, ("10.0.0.1:4242",), f"mac{first}", output=(1, 2))
    with Reaper() as reaper:
        ranks = start(spec, tmp_path / "run", reaper, share)
        try:
            while not ranks.exits():
                pass
        finally:
            ranks.kill()
        found = json.loads(out.read_text())
        found["devices"] = json.loads(Path(found["MLX_IBV_DEVICES"]).read_text())
    return found


@pytest.mark.parametrize(("rdma", "in_ring"), [(MESH, None), (RING, "1")])
def test_every_rank_is_told_what_mlx_needs(
    tmp_path: Path, rdma: list[list[Any]], in_ring: str | None
) -> None:
    found = _told(tmp_path, rdma, 1)
    wanted = {
        "MLX_RANK": "1",
        "MLX_JACCL_COORDINATOR": "10.0.0.1:4242",
        "MLX_METAL_FAST_SYNCH": "1",
    }
    assert {name: found[name] for name in wanted} == wanted
    assert found["devices"] == rdma
    assert found.get("MLX_JACCL_RING") == in_ring
    assert found["ALLHANDS_BACKEND"] == "jaccl"
    assert "MLX_HOSTFILE" not in found


@pytest.mark.parametrize("rdma", [MESH, RING, [[None, "en5"], ["en5", None]]])
def test_whoever_has_a_cable_to_its_neighbours_can_take_part(rdma: list[list[Any]]) -> None:
    check_devices(_places(rdma))


@pytest.mark.parametrize(
    "places",
    [
        _places(MESH, ranks=2),
        _places([row[:2] for row in MESH]),
        _places([[None, None, "x"], *MESH[1:]]),
        [*_places(MESH)[:2], Place("here", 1)],
    ],
)
def test_others_are_refused_by_name(places: list[Place]) -> None:
    with pytest.raises(ConfigError) as refused:
        check_devices(places)
    assert refused.value.code == "hostfile-mismatch"
    assert refused.value.where == "--backend jaccl"
    assert "mlx.distributed_config" in (refused.value.hint or "")


def test_computers_that_are_left_know_their_devices_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps([{"ssh": f"mac{i}", "rdma": row} for i, row in enumerate(MESH)]))
    members = HostfileMembers(path, trouble=lambda name, seconds: None)
    assert [place.host.rdma for place in members.roster().places if place.host] == [
        tuple(row) for row in MESH
    ]
    members.leave_out(["mac1"])
    places = members.roster().places
    assert [(place.name, place.host.rdma if place.host else ()) for place in places] == [
        ("mac0", (None, "en0-2")),
        ("mac2", ("en2-0", None)),
    ]
    check_devices(places)


def test_it_is_taken_by_itself_where_it_is_there(tmp_path: Path) -> None:
    macs = tuple(
        HostTraits(f"mac{i}", 1, system="Darwin", gpus=0, mpi="", rdma=True) for i in range(3)
    )
    assert table_choice(Facts(macs)).backend == "jaccl"
    assert (
        table_choice(
            Facts((*macs, HostTraits("box", 1, system="Linux", gpus=0, mpi="", rdma=True)))
        ).backend
        == "ring"
    )
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"backend": "jaccl-ring", "hosts": [{"ssh": "mac0"}]}))
    assert hostfile_backend(path) == "jaccl"
