"""Meshes with named axes: places, groups, shares of rows; and what back-ends can do, asked before a run starts."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain
from typing import Any, get_args

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
from allhands.distributed.capabilities import CAPABILITIES, can, require_neighbours
from allhands.distributed.groups import along
from allhands.distributed.mesh import Axis, Mesh
from allhands.errors import ConfigError, Interrupted
from allhands.parallel.base import Exchanging
from allhands.parallel.pipeline import pipeline
from allhands.parallel.piping import Piping
from allhands.runtime.sizing import Sizing
from allhands.train.evaluation import Evaluator


@pytest.mark.parametrize(("size", "pipe"), [(4, 1), (3, 3), (12, 2), (12, 4)])
def test_groups_along_an_axis_are_its_lines_in_the_grid_of_ranks(size: int, pipe: int) -> None:
    """Judged by numpy's own grid; neighbours in number are neighbours in a pipeline."""
    grid = np.arange(size).reshape(-1, pipe)
    for rank in range(size):
        mesh = Mesh(rank, size, pipe=pipe)
        data, stage = (int(at) for at in np.argwhere(grid == rank)[0])
        assert (mesh.data_rank, mesh.stage, mesh.data_size) == (data, stage, len(grid))
        assert mesh.members("pipe") == grid[data].tolist()
        assert mesh.members("data") == grid[:, stage].tolist()
        for axis in get_args(Axis):
            assert sorted(chain(*mesh.groups(axis))) == list(range(size))
        assert mesh.weights == (1.0,) * mesh.data_size


def test_ranks_are_on_data_unless_they_are_said_to_be_elsewhere() -> None:
    mesh = Mesh(2, 6)
    assert (mesh.data_rank, mesh.data_size, mesh.members("data")) == (2, 6, [*range(6)])
    assert Mesh() == Mesh(0, 1, 0, 1, (1.0,))
    assert hash(Mesh(1, 2)) == hash(Mesh(1, 2, pipe=1))


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"size": 6, "pipe": 4}, "mesh"),
        ({"size": 4, "pipe": 0}, "mesh"),
        ({"size": 4, "pipe": -2}, "mesh"),
        ({"size": 4, "rank": 4}, "mesh"),
        ({"size": 4, "rank": -1}, "mesh"),
        ({"size": 0}, "mesh"),
        ({"local_rank": 2, "local_size": 2}, "mesh"),
        ({"size": 4, "weights": (1.0, 1.0)}, "--rank-weights"),
        ({"size": 4, "pipe": 2, "weights": (1.0,) * 4}, "--rank-weights"),
        ({"size": 2, "weights": (1.0, 0.0)}, "--rank-weights"),
        ({"size": 2, "weights": (1.0, math.nan)}, "--rank-weights"),
    ],
)
def test_what_is_no_mesh_is_refused(arguments: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Mesh(**arguments)
    assert refused.value.where == where


# --- rows ------------------------------------------------------------------------------------------------


def _windows() -> TokenSet:
    lengths = np.random.default_rng(0).integers(2, 30, 60)
    return TokenSet.of_examples([(np.full(n, n), np.arange(n) > 0) for n in lengths])


@pytest.mark.parametrize("pipe", [1, 2, 4])
def test_rows_are_divided_among_data_ranks_and_shared_by_the_others(pipe: int) -> None:
    windows = _windows()
    order = GlobalOrder(windows.work, 8, seed=0)
    weights = (2.0, 1.0, 1.0, 1.0)[: 4 // pipe]
    meshes = [Mesh(rank, 4, weights=weights, pipe=pipe) for rank in range(4)]
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


def test_an_evaluation_counts_each_row_once_and_stops_everywhere() -> None:
    def evaluated(communicator: Any, mesh: Mesh, stops: int = -1) -> tuple[float, int]:
        asked = {"batch_size": 7, "num_batches": 4, "stop_requested": lambda: int(mesh.rank == stops)}
        return Evaluator(Shifted(), _windows(), communicator, mesh, Sizing(90), **asked, cpu_native=True)()[:2]

    loss, count = evaluated(SingleProcess(), Mesh())
    for found in run_ranks(4, lambda twin: evaluated(twin, Mesh(twin.rank, 4))):
        assert not isinstance(found, BaseException), found
        assert found == (pytest.approx(loss, rel=1e-6), count)
    stopped = run_ranks(4, lambda twin: evaluated(twin, Mesh(twin.rank, 4), stops=3))
    assert all(isinstance(one, Interrupted) for one in stopped), stopped


# --- what back-ends can do ---------------------------------------------------------------------------------


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
    monkeypatch.setattr(MlxGroup, "sum_scatter", lambda _, array: calls.append("scatter") or array[:2])
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
    """As by a second training of one program; NCCL sends on a stream of its own, from any thread that joins."""
    for part in ("_check_build", "_check_first_sum", "_check_first_gathering", "launch_directly"):
        monkeypatch.setattr(backend, part, lambda *_, **__: None)
    monkeypatch.setattr(backend, "_initialise", lambda *_: _Group())
    monkeypatch.setattr(backend, "_device_of", lambda name: "cpu")
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
def test_messages_of_a_pipeline_travel_where_its_groups_exchange(monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    """NCCL's groups have a stream of the GPU already; elsewhere the pipeline makes one, and all groups use it."""
    monkeypatch.setattr(backend, "exchange_stream", cache(backend.ExchangeStream))
    backend.exchange_stream("cpu").restart(apart=apart)
    world, pipe = MlxGroup(_Group(), "ring"), MlxGroup(_Group(), "ring")
    before = world.stream
    stages: Any = ()
    strategy = pipeline(Exchanging(world, piping=Piping(stages, pipe, SingleProcess())), overlap=False)
    moved = strategy.communicator
    assert isinstance(moved, MlxGroup)
    assert pipe.exchange.take(pipe.stream) == moved.exchange.take(moved.stream) != mx.default_stream(mx.cpu)
    assert (before is not None and moved.stream == before) == apart


def test_a_part_of_a_sum_is_as_large_as_the_others() -> None:
    def work(twin: ThreadCommunicator) -> list[Any]:
        with pytest.raises(ValueError, match="equal parts"):
            sum_scatter(twin, mx.ones((4, 2)))
        return sum_scatter(twin, mx.arange(6.0).reshape(6, 1) + twin.rank).tolist()

    assert run_ranks(3, work) == [[[3.0], [6.0]], [[9.0], [12.0]], [[15.0], [18.0]]]


@pytest.mark.parametrize("name", sorted(CAPABILITIES))
def test_a_mesh_that_a_backend_cannot_serve_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(capabilities, "version_of", lambda name: "0.32.4")

    def refused(mesh: Mesh) -> bool:
        try:
            require_neighbours(name, mesh, "pipe")
        except ConfigError as error:
            return error.where == f"--backend {name}" and bool(error.hint)
        return False

    to_any = name in ("mpi", "jaccl")
    # In a ring who follows within a pipeline is a neighbour.
    assert refused(Mesh(0, 4, pipe=2)) == (not (to_any or name == "ring"))
    if name == "jaccl":
        monkeypatch.setenv("MLX_JACCL_RING", "1")
        assert not refused(Mesh(0, 4, pipe=2))


def test_a_group_of_some_ranks_that_the_backend_cannot_make_is_refused_on_all_ranks() -> None:
    def work(twin: ThreadCommunicator) -> Any:
        twin.backend = "ring"
        assert along(twin, Mesh(twin.rank, 4), "data") is twin
        assert isinstance(along(twin, Mesh(twin.rank, 4), "pipe"), SingleProcess)
        return along(twin, Mesh(twin.rank, 4, pipe=2), "data")

    assert all(isinstance(found, ConfigError) for found in run_ranks(4, work))
    # Who tries by itself what a rank would do has no others to wait for.
    alone = SingleProcess()
    assert along(alone, Mesh(2, 4), "data") is alone
    assert along(alone, Mesh(2, 4, pipe=2), "data") is alone
