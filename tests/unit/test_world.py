"""``allhands.init`` and ``allhands.average_gradients`` in place of MLX's, by ranks in memory and by
processes.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from ring_ranks import run_ring
from twins import ThreadCommunicator, run_ranks

import allhands
from allhands.cluster.environment import LaunchPlace, launch_here
from allhands.cluster.join import join_here
from allhands.cluster.processes import reserve_ports
from allhands.errors import ConfigError, DistributedError
from allhands.loops.world import World, world_of


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """This process has joined nothing yet, nor has it afterwards."""
    for known in (launch_here, join_here):
        known.cache_clear()
    yield
    for known in (launch_here, join_here):
        known.cache_clear()


class Wire:
    """A rank's end of the group that takes every type, and notes which travelled."""

    backend = "ring"

    def __init__(self, communicator: ThreadCommunicator) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self.types: list[mx.Dtype] = []
        self._communicator = communicator

    def all_sum(self, array: mx.array) -> mx.array:
        self.types.append(array.dtype)
        return self._communicator.all_sum(array.astype(mx.float32)).astype(array.dtype)

    def all_gather(self, array: mx.array) -> mx.array:
        return self._communicator.all_gather(array)


def world(communicator: ThreadCommunicator | Wire) -> World:
    return World(
        communicator.rank,
        communicator.size,
        communicator.rank,
        communicator.size,
        "ring",
        "x",
        communicator,
    )


def gradients(rank: int, dtype: str = "float32") -> dict[str, Any]:
    random = np.random.default_rng(rank)
    arrays = {
        "w": random.normal(size=(40, 3)),
        "b": random.normal(size=(3,)),
        "none": np.zeros((0, 2)),
    }
    return {
        "layers": [
            {name: mx.array(array, dtype=getattr(mx, dtype)) for name, array in arrays.items()}
        ]
    }


def test_a_process_without_a_launcher_is_alone_and_knows_it() -> None:
    found = allhands.init()
    assert (found.rank, found.size, found.backend, found.launcher) == (0, 1, "none", "single")
    assert found.is_main
    assert found.is_alone
    assert found.group is None
    assert found.all_sum(3.0).item() == 3.0
    assert found.all_gather(3.0).tolist() == [3.0]
    assert found.mean(mx.array([2.0, 4.0]), weight=7).tolist() == [2.0, 4.0]
    found.barrier()
    assert allhands.init(size=1) == found
    with pytest.raises(ConfigError, match="wants 2 processes, but there is 1"):
        allhands.init(size=2)


def test_numbers_of_ranks() -> None:
    def work(communicator: ThreadCommunicator) -> list[Any]:
        here = world(communicator)
        rank = communicator.rank
        value = mx.array(float("nan")) if rank == 2 else mx.array(10.0 + rank)
        alone = here.by_itself()
        return [
            here.all_sum(float(rank)).item(),
            here.all_gather(mx.array([rank, rank])).tolist(),
            here.mean(value, weight=[1, 3, 0][rank]).item(),
            here.mean(1.0, weight=0).item(),
            here.is_main,
            (alone.size, alone.all_sum(float(rank)).item()),
        ]

    for rank, result in enumerate(run_ranks(3, work)):
        assert result == [3.0, [0, 0, 1, 1, 2, 2], 10.75, 0.0, rank == 0, (1, float(rank))]


def test_a_group_of_another_size_than_promised_is_refused() -> None:
    launch = LaunchPlace("torchrun", 1, 4, 1, 4, "ring", "RANK=1")
    communicator: Any = ThreadCommunicator(0, 1, None)  # type: ignore[arg-type]
    with pytest.raises(
        DistributedError, match="torchrun promised 4 processes, but the group has 1"
    ):
        world_of(launch, communicator)


def test_a_promised_world_is_not_trained_in_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hostfile names two, and the other never comes: MLX itself would say so only if asked
    strictly.
    """
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "gone.json"))
    with pytest.raises(DistributedError, match="MLX_HOSTFILE"):
        allhands.average_gradients(gradients(0))


def test_it_takes_what_mlx_takes_in_the_same_places() -> None:
    theirs = inspect.signature(nn.average_gradients).parameters
    ours = inspect.signature(allhands.average_gradients).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [ours[name].default for name in theirs] == [one.default for one in theirs.values()]
    assert all(
        one.kind is inspect.Parameter.KEYWORD_ONLY for one in list(ours.values())[len(theirs) :]
    )
    given = gradients(0)
    assert allhands.average_gradients(given, None, 1 << 20, None) is given


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("size", "calls"), [(32 << 20, 1), (0, 2), (16, 2)])
def test_without_tokens_it_is_the_mean_of_ranks(dtype: str, size: int, calls: int) -> None:
    def work(communicator: ThreadCommunicator) -> tuple[list[np.ndarray], int]:
        wire = Wire(communicator)
        averaged = allhands.average_gradients(
            gradients(communicator.rank, dtype), world(wire), size
        )
        (layer,) = averaged["layers"]
        assert {one.dtype for one in layer.values()} == {getattr(mx, dtype)}
        assert layer["none"].shape == (0, 2)
        return [np.array(layer[name].astype(mx.float32)) for name in ("w", "b")], len(wire.types)

    every = [gradients(rank, dtype)["layers"][0] for rank in range(2)]
    for result in run_ranks(2, work):
        assert not isinstance(result, BaseException), result
        # Of two numbers the sum is rounded once, and halving is exact: the same bits in any order.
        expected = [
            np.array(((every[0][name] + every[1][name]) / 2).astype(mx.float32))
            for name in ("w", "b")
        ]
        assert all((ours == wanted).all() for ours, wanted in zip(result[0], expected, strict=True))
        assert result[1] == calls


@pytest.mark.parametrize("num_tokens", [None, [30000, 90000]])
@pytest.mark.parametrize("travels", ["bfloat16", "float16"])
def test_gradients_travel_as_they_are_told(travels: str, num_tokens: list[int] | None) -> None:
    def work(communicator: ThreadCommunicator) -> np.ndarray:
        wire = Wire(communicator)
        averaged = allhands.average_gradients(
            gradients(communicator.rank),
            world(wire),
            communication_type=getattr(mx, travels),
            num_tokens=None if num_tokens is None else num_tokens[communicator.rank],
        )["layers"][0]
        # Both gradients in one bucket; else counts alone.
        assert wire.types.count(getattr(mx, travels)) == 1
        assert averaged["w"].dtype == mx.float32
        return np.array(averaged["w"])

    every = [np.array(gradients(rank)["layers"][0]["w"]) for rank in range(2)]
    expected = np.average(every, axis=0, weights=num_tokens)
    for result in run_ranks(2, work):
        assert not isinstance(result, BaseException), result
        # 30000 tokens times a gradient would be infinite in float16.
        assert np.abs(result - expected).max() < {"bfloat16": 2e-2, "float16": 2e-3}[travels]
        assert np.abs(result - expected).max() > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"communication_stream": mx.float16}, "communication_stream is a dtype"),
        ({"communication_type": mx.int8}, "int8 cannot hold gradients"),
        ({"reduction": "sum"}, "needs their number"),
        ({"reduction": "max", "num_tokens": 3}, "reduction='max'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        allhands.average_gradients(gradients(0), **arguments)


PROGRAM = """
import allhands
import mlx.core as mx, mlx.nn as nn
world = allhands.init(size=2)
assert world is not None and allhands.init() == world and world.group.size() == 2
grads = {"w": mx.array([1.0, 2.0]) * (world.rank + 1), "b": mx.array([3.0 * world.rank])}
theirs, ours = nn.average_gradients(grads), allhands.average_gradients(grads)
assert all((theirs[name] == ours[name]).all().item() for name in grads)
stream = mx.new_stream(mx.cpu)
beside = allhands.average_gradients(grads, world.group, 0, stream)
print(world.launcher, world.backend, world.size, ours["w"].tolist(), beside["b"].tolist())
"""


def test_two_processes() -> None:
    done = run_ring([[sys.executable, "-c", PROGRAM]] * 2, timeout=60)
    assert [(one.returncode, one.stderr) for one in done] == [(0, ""), (0, "")]
    assert {one.stdout for one in done} == {"mlx.launch ring 2 [1.5, 3.0] [1.5]\n"}


def test_what_torchrun_starts_meets_and_stays_one_world() -> None:
    """To join sets variables of MLX's; what is asked for later must not take them for another
    launcher's.
    """
    sockets, (port,) = reserve_ports(1, shareable=False)
    sockets[0].close()
    text = "import allhands\nw = allhands.init()\nprint(allhands.progress(1), allhands.init() == w, w.launcher, w.size)"
    given = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", text],
            env={**os.environ, **given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=60) for rank in ranks] == [("False True torchrun 2\n", "")] * 2


def test_the_names_cost_nothing_until_they_are_used() -> None:
    text = "import sys, allhands; print([n for n in ('mlx.core', 'numpy', 'allhands.loops.world') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout == "[]\n"


def test_a_loop_that_imports_mlx_first_is_told_what_that_costs() -> None:
    program = "import mlx.core as mx, allhands; allhands.init(); allhands.init()"
    for order, said in (
        (program, 1),
        (program.replace("mlx.core as mx, allhands", "allhands, mlx.core as mx"), 0),
    ):
        done = subprocess.run(
            [sys.executable, "-c", order], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stderr.count("import allhands first") == said, done.stderr
