"""Meshes with named axes: places, groups, shares of rows; and what back-ends can do, asked before a
run starts.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from twins import ThreadCommunicator, run_ranks

from allhands.data.loader import Loader
from allhands.data.order import GlobalOrder
from allhands.data.tokens import TokenSet
from allhands.distributed import backend, capabilities
from allhands.distributed.backend import MlxGroup, SingleProcess, sum_scatter
from allhands.distributed.capabilities import CAPABILITIES, can, require_groups, require_neighbours
from allhands.distributed.groups import along
from allhands.distributed.mesh import AXES, Coordinates, Mesh
from allhands.errors import ConfigError, Interrupted
from allhands.parallel.base import Exchanging
from allhands.parallel.pipeline import pipeline
from allhands.parallel.piping import Piping
from allhands.runtime.sizing import Sizing
from allhands.train.evaluation import Evaluator

SIZES: list[dict[str, int]] = [
    {},
    {"tensor": 4},
    {"data": 3},
    {"data": 2, "shard": 3, "pipe": 2, "context": 2},
    {"shard": 2, "expert": 3},
    dict.fromkeys(AXES, 2),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_groups_along_an_axis_are_its_lines_in_the_grid_of_ranks(sizes: dict[str, int]) -> None:
    """Judged by numpy's own grid of as many dimensions."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    size = math.prod(shape)
    grid = np.arange(size).reshape(shape)
    for rank in range(size):
        mesh = Mesh(rank, size, **sizes)
        place = tuple(int(at) for at in np.argwhere(grid == rank)[0])
        assert mesh.coordinates() == Coordinates(*place)
        assert mesh.rank_at(Coordinates(*place)) == rank
        for dimension, axis in enumerate(AXES):
            line = np.moveaxis(grid, dimension, -1)[tuple(np.delete(place, dimension))]
            assert mesh.members(axis) == tuple(line.tolist())
            assert mesh.size_of(axis) == len(line)
            before, after = mesh.neighbours(axis)
            at = place[dimension]
            assert before == (None if at == 0 else line[at - 1])
            assert after == (None if at + 1 == len(line) else line[at + 1])
            assert sorted(sum(mesh.groups(axis), ())) == list(range(size))
            assert mesh.members(axis) in mesh.groups(axis)
        assert mesh.members(*AXES) == tuple(range(size))
        # Rows are divided over data, shard and expert.
        dividing = [AXES.index(axis) for axis in ("data", "shard", "expert")]
        shares = np.arange(math.prod(shape[at] for at in dividing))
        assert mesh.data_size == len(shares)
        shares = shares.reshape([shape[at] for at in dividing])
        assert mesh.data_rank == shares[tuple(place[at] for at in dividing)]
        assert mesh.weights == (1.0,) * mesh.data_size


def test_ranks_are_on_data_unless_they_are_said_to_be_elsewhere() -> None:
    mesh = Mesh(2, 6)
    assert (mesh.size_of("data"), mesh.data_rank, mesh.data_size, mesh.members("data")) == (
        6,
        2,
        6,
        tuple(range(6)),
    )
    assert Mesh(2, 6, tensor=3).size_of("data") == 2
    assert Mesh() == Mesh(0, 1, 0, 1, (1.0,))
    assert hash(Mesh(1, 2)) == hash(Mesh(1, 2, data=2))
    # The slowest link first: neighbours in number are neighbours on the last axis.
    assert Mesh(0, 8, data=2, tensor=4).members("tensor") == (0, 1, 2, 3)
    assert Mesh(0, 8, data=2, tensor=4).members("data") == (0, 4)
    # Of two computers with two ranks each, one has the first stage: what it fetches stays there.
    assert Mesh(0, 4, pipe=2, shard=2).members("shard") == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"size": 6, "tensor": 4}, "mesh"),
        ({"size": 6, "data": 2}, "mesh"),
        ({"size": 6, "data": 2, "tensor": 6}, "mesh"),
        ({"size": 4, "pipe": 0}, "mesh: pipe"),
        ({"size": 4, "data": -2, "pipe": -2}, "mesh: data"),
        ({"size": 4, "rank": 4}, "mesh"),
        ({"size": 4, "rank": -1}, "mesh"),
        ({"size": 0}, "mesh"),
        ({"local_rank": 2, "local_size": 2}, "mesh"),
        ({"size": 4, "weights": (1.0, 1.0)}, "--rank-weights"),
        ({"size": 4, "tensor": 2, "weights": (1.0,) * 4}, "--rank-weights"),
        ({"size": 2, "weights": (1.0, 0.0)}, "--rank-weights"),
        ({"size": 2, "weights": (1.0, math.nan)}, "--rank-weights"),
    ],
)
def test_what_is_no_mesh_is_refused(arguments: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Mesh(**arguments)
    assert refused.value.where == where


def test_an_axis_that_is_none_is_refused() -> None:
    for axes in ((), ("rows",)):
        with pytest.raises(ConfigError):
            Mesh().members(*axes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        Mesh(0, 2).coordinates(2)


# --- rows -----------------------------------------------------------------------------------------


def _windows() -> TokenSet:
    lengths = np.random.default_rng(0).integers(2, 30, 60)
    return TokenSet.of_examples([(np.full(n, n), np.arange(n) > 0) for n in lengths])


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "tensor": 2},
        {"shard": 2, "pipe": 2},
        {"data": 2, "shard": 2},
        {"data": 2, "expert": 2},
    ],
)
def test_rows_are_divided_among_data_ranks_and_shared_by_the_others(sizes: dict[str, int]) -> None:
    windows = _windows()
    order = GlobalOrder(windows.work, 8, seed=0)
    weights = (2.0, 1.0, 1.0, 1.0)[
        : math.prod(sizes.get(axis, 1) for axis in ("data", "shard", "expert"))
    ]
    meshes = [Mesh(rank, 4, weights=weights, **sizes) for rank in range(4)]
    loaders = [Loader(windows, order, Sizing(90), mesh.data_rank, mesh.weights) for mesh in meshes]
    for iteration in range(10):
        shares: dict[int, set[tuple[int, ...]]] = {}
        for mesh, loader in zip(meshes, loaders, strict=True):
            rows = tuple(int(row) for part in loader.load(iteration) for row in part.examples)
            shares.setdefault(mesh.data_rank, set()).add(rows)
        assert len(shares) == meshes[0].data_size
        assert {len(alike) for alike in shares.values()} == {1}
        # Each row of the batch is in one share, and in no other.
        every = [row for alike in shares.values() for rows in alike for row in rows]
        assert sorted(every) == sorted(order.batch(iteration).tolist())


class Shifted(nn.Module):
    """A model whose loss is another one for each row."""

    def __call__(self, inputs: mx.array) -> mx.array:
        return mx.sin(inputs[..., None] * mx.arange(1, 41) * 0.1)


@pytest.mark.parametrize(
    "sizes", [{"data": 2, "tensor": 2}, {"data": 4}, {"tensor": 4}, {"shard": 2, "expert": 2}]
)
def test_an_evaluation_counts_each_row_once_and_stops_everywhere(sizes: dict[str, int]) -> None:
    def evaluated(communicator: Any, mesh: Mesh, stops: int = -1) -> tuple[float, int]:
        asked = {
            "batch_size": 7,
            "num_batches": 4,
            "stop_requested": lambda: int(mesh.rank == stops),
        }
        return Evaluator(
            Shifted(), _windows(), communicator, mesh, Sizing(90), **asked, cpu_native=True
        )()[:2]

    loss, count = evaluated(SingleProcess(), Mesh())
    for found in run_ranks(4, lambda twin: evaluated(twin, Mesh(twin.rank, 4, **sizes))):
        assert not isinstance(found, BaseException), found
        assert found == (pytest.approx(loss, rel=1e-6), count)
    stopped = run_ranks(4, lambda twin: evaluated(twin, Mesh(twin.rank, 4, **sizes), stops=3))
    assert all(isinstance(one, Interrupted) for one in stopped), stopped


# --- what back-ends can do ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "there"),
    [
        *((version, True) for version in ("0.32.2", "0.32.4", "0.33.0.dev20261001+abc", "1.0")),
        *((version, False) for version in ("0.32.1", "0.32.2.dev20260801", "0.32", "?", None)),
    ],
)
def test_jaccl_scatters_sums_since_a_release_of_mlx(
    monkeypatch: pytest.MonkeyPatch, version: str | None, there: bool
) -> None:
    """Then a rank's part of a sum costs half the bytes of the whole."""
    monkeypatch.setattr(capabilities, "version_of", lambda name: {"mlx": version}[name])
    assert can("jaccl", "sum_scatter") == there
    assert can("nccl", "sum_scatter")
    calls: list[str] = []
    monkeypatch.setattr(
        MlxGroup, "sum_scatter", lambda _, array: calls.append("scatter") or array[:2]
    )
    monkeypatch.setattr(MlxGroup, "all_sum", lambda _, array: calls.append("sum") or array)
    assert sum_scatter(MlxGroup(_Group(), "jaccl"), mx.ones((4,))).shape == (2,)
    assert calls == ["scatter" if there else "sum"]


class _Group:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(("name", "apart"), [("nccl", True), ("ring", False), ("mpi", False)])
def test_a_group_keeps_its_stream_when_it_is_joined_again(
    monkeypatch: pytest.MonkeyPatch, name: str, apart: bool
) -> None:
    """As by a second training of one program; NCCL sends on a stream of its own, from any thread
    that joins.
    """
    for part in ("check_build", "check_first_sum", "check_first_gathering", "launch_directly"):
        monkeypatch.setattr(backend, part, lambda *_, **__: None)
    monkeypatch.setattr(backend, "initialise_group", lambda *_: _Group())
    monkeypatch.setattr(backend, "device_of", lambda name: "cpu")
    monkeypatch.setattr(backend, "exchange_stream", cache(backend.ExchangeStream))

    def joined() -> tuple[Any, Any]:
        group = backend.connect(name, 2, 0, tried=True)
        assert isinstance(group, MlxGroup)
        of_person = backend.of_group(group.group)
        assert isinstance(of_person, MlxGroup)
        assert group.exchange.take(group.stream) == of_person.exchange.take(of_person.stream)
        assert backend.on_stream(group, group.stream).rank == 0
        return group.stream, group.exchange.take(group.stream)

    first = joined()
    assert joined() == first
    assert (first[0] is not None) == apart
    assert (first[1] == mx.default_stream(mx.cpu)) != apart
    with ThreadPoolExecutor(1) as threads:
        elsewhere = threads.submit(joined).result()
    assert elsewhere[1] != first[1]


@pytest.mark.parametrize("apart", [True, False])
def test_messages_of_a_pipeline_travel_where_its_groups_exchange(
    monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """NCCL's groups have a stream of the GPU already; elsewhere the pipeline makes one, and all
    groups use it.
    """
    monkeypatch.setattr(backend, "exchange_stream", cache(backend.ExchangeStream))
    backend.exchange_stream("cpu").restart(apart=apart)
    world, pipe = MlxGroup(_Group(), "ring"), MlxGroup(_Group(), "ring")
    before = world.stream
    stages: Any = ()
    strategy = pipeline(
        Exchanging(world, piping=Piping(stages, pipe, SingleProcess())), overlap=False
    )
    moved = strategy.communicator
    assert isinstance(moved, MlxGroup)
    assert (
        pipe.exchange.take(pipe.stream)
        == moved.exchange.take(moved.stream)
        != mx.default_stream(mx.cpu)
    )
    assert (before is not None and moved.stream == before) == apart


def test_a_part_of_a_sum_is_as_large_as_the_others() -> None:
    def work(twin: ThreadCommunicator) -> list[Any]:
        with pytest.raises(ValueError, match="equal parts"):
            sum_scatter(twin, mx.ones((4, 2)))
        return sum_scatter(twin, mx.arange(6.0).reshape(6, 1) + twin.rank).tolist()

    assert run_ranks(3, work) == [[[3.0], [6.0]], [[9.0], [12.0]], [[15.0], [18.0]]]


@pytest.mark.parametrize("name", sorted(CAPABILITIES))
def test_a_mesh_that_a_backend_cannot_serve_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(capabilities, "version_of", lambda name: "0.32.4")

    def refused(ask: Any, *arguments: Any, **named: Any) -> bool:
        try:
            ask(name, *arguments, **named)
        except ConfigError as error:
            return error.where == f"--backend {name}" and bool(error.hint)
        return False

    has_groups, to_any = name in ("mpi", "nccl"), name in ("mpi", "jaccl")
    stages = Mesh(0, 4, data=2, pipe=2)
    # Stages of a pipeline exchange other shapes; of copies of one model all groups do the same.
    assert refused(require_groups, stages, "data") == (not has_groups)
    assert not refused(require_groups, stages, "data", alike=True)
    assert not refused(require_groups, stages, "pipe")
    for mesh, axis in product([Mesh(0, 4, data=2, tensor=2), Mesh(0, 4), Mesh(0, 1)], AXES):
        assert not refused(require_groups, mesh, axis)
    assert refused(require_groups, Mesh(0, 4, data=2, tensor=2), "data", alike=False) == (
        not has_groups
    )
    # In a ring who follows on the last axis is a neighbour, who follows on one before it is not.
    assert refused(require_neighbours, stages, "pipe") == (not (to_any or name == "ring"))
    assert refused(require_neighbours, Mesh(0, 8, pipe=2, tensor=4), "pipe") == (not to_any)
    if name == "jaccl":
        monkeypatch.setenv("MLX_JACCL_RING", "1")
        assert not refused(require_neighbours, stages, "pipe")
        assert refused(require_neighbours, Mesh(0, 8, pipe=2, tensor=4), "pipe")


def test_a_group_that_the_world_cannot_stand_in_for_is_refused_on_all_ranks() -> None:
    def work(twin: ThreadCommunicator) -> Any:
        twin.backend = "ring"
        mesh = Mesh(twin.rank, 4, data=2, pipe=2)
        assert along(twin, Mesh(twin.rank, 4), "data") is twin
        assert isinstance(along(twin, mesh, "tensor"), SingleProcess)
        return along(twin, mesh, "data")

    assert all(isinstance(found, ConfigError) for found in run_ranks(4, work))
    # Who tries by itself what a rank would do has no others to wait for.
    alone = SingleProcess()
    assert along(alone, Mesh(2, 4), "data") is alone
    assert along(alone, Mesh(2, 4, data=2, tensor=2), "data") is alone
