"""The memory that a fully sharded rank expects to need, by the part of the model that it has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import write_model

from allhands.config.schema import build_config
from allhands.data.loader import Largest
from allhands.distributed.mesh import Mesh
from allhands.kernels import native
from allhands.model.adapters import make_trainable
from allhands.model.load import load_model
from allhands.parallel.sharding import BetweenPasses, Layout, shard
from allhands.run.expecting import Device, estimated_bytes
from allhands.run.model_sizes import all_weights
from allhands.run.training_memory import blocks_of
from allhands.runtime.accelerator import Accelerator

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler, or not a Linux CPU")
CPU = Accelerator("cpu", "a processor", 1 << 36, 2, True, None)


@dataclass
class Rank:
    """A rank that exchanges nothing."""

    rank: int
    size: int
    backend: str = "mpi"

    def all_sum(self, array: mx.array) -> mx.array:
        return array

    all_gather = all_sum


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("expected") / "model", layers=8, hidden=256, tied=False
    )


def expected(path: Path, rank: int, *, copies: int = 1, **how: Any) -> int:
    """Bytes that one of two ranks expects, whose parts are as ``how`` says."""
    loaded = load_model(str(path))
    config = build_config(
        {"train": True, "fine_tune_type": "full", "strategy": "fsdp", "optimizer": "adamw"}
    )
    make_trainable(loaded.model, config)
    ranks: Any = Rank(rank, 2), Rank(0, copies), Rank(rank, 2 * copies)
    sharding = shard(loaded.model, *ranks, **how)
    present = (
        100_000_000 + mx.get_active_memory() + mx.get_cache_memory()
    )  # of which arrays are no part of a need
    device = Device(CPU, Mesh(rank, 2 * copies, local_size=2 * copies, shard=2), present)
    found = estimated_bytes(config, loaded, Largest(256, 1), device, sharding=sharding)
    assert found is not None
    return found


def weights_of(path: Path) -> int:
    blocks = blocks_of(load_model(str(path)).config)
    assert blocks is not None
    return 4 * all_weights(blocks, tied=False)


def test_parts_that_follow_memory_count_as_they_are(path: Path) -> None:
    """Of 3 : 1 the first has three quarters of the weights, of two states and of the sums of
    gradients.
    """
    equal = [expected(path, rank) for rank in range(2)]
    more, less = (expected(path, rank, layout=Layout(shares=(3.0, 1.0))) for rank in range(2))
    assert equal[0] == pytest.approx(equal[1], rel=0.01)
    assert less < equal[0] < more
    assert more - less == pytest.approx(0.5 * 4 * weights_of(path), rel=0.15)


def test_weights_that_are_kept_until_a_step_ends_count_whole(path: Path) -> None:
    kept, dropped = (
        expected(path, 0, fetching=BetweenPasses(keeps=keeps)) for keeps in (True, False)
    )
    # All blocks in place of two, and all of them still when the sums of gradients are nearly whole.
    assert 6 / 8 * weights_of(path) < kept - dropped < 1.15 * weights_of(path)


def test_copies_of_the_model_add_up_their_parts_of_gradients(path: Path) -> None:
    assert expected(path, 0, copies=2) >= expected(path, 0)
