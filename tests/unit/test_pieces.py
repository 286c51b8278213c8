"""Pieces of rows: every trained position is computed by one rank of a context group, at its own
place.
"""

from __future__ import annotations

import numpy as np
import pytest

from allhands.config.schema import build_config
from allhands.data.loader import MicroBatch, pad_targets
from allhands.data.pieces import Pieces
from allhands.distributed.backend import SingleProcess
from allhands.distributed.groups import GroupWithinWorld
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError
from allhands.objectives.causal_lm import CausalLM
from allhands.run.piping import as_left, piped


def batch_of(width: int, *, padded: bool = False) -> MicroBatch:
    inputs = np.arange(2 * width, dtype=np.int32).reshape(2, width)
    positions = np.concatenate([np.arange(width - 1), [width]]).astype(np.int32)
    batch = MicroBatch(
        inputs, positions, inputs.ravel()[positions] + 1, 2 * width - 1, np.array([5, 9], np.int32)
    )
    return pad_targets(batch) if padded else batch


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("width", [1, 2, 5, 12, 13])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_a_batch(size: int, width: int, padded: bool) -> None:
    batch = batch_of(width, padded=padded)
    tokens, seen = 0, list[tuple[int, int]]()
    for rank in range(size):
        own = Pieces(rank, size).of_batch(batch)
        assert own.inputs.shape == (4, -(-width // (2 * size)))
        assert len(own.targets) == len(own.positions) >= 1
        counts = own.targets >= 0
        # Each token is followed by its number and one more, wherever it was.
        assert (own.inputs.ravel()[own.positions[counts]] + 1 == own.targets[counts]).all()
        seen += own.targets[counts].tolist()
        tokens += own.num_tokens
    assert sorted(seen) == sorted(batch.targets[batch.targets >= 0].tolist())
    assert tokens == batch.num_tokens


def test_pieces_are_one_near_the_head_and_one_near_the_tail() -> None:
    rows = np.arange(24).reshape(2, 12)
    assert Pieces(1, 3).of(rows).tolist() == [[2, 3], [14, 15], [8, 9], [20, 21]]
    ends = [sum(number + 1 for number in Pieces(rank, 4).numbers) for rank in range(4)]
    assert len(set(ends)) == 1, "what is before the pieces is as much for every rank"


@pytest.mark.parametrize(("ranks", "left"), [(4, 2), (3, 1), (2, 2), (1, 1)])
def test_fewer_ranks_divide_rows_among_whole_groups(ranks: int, left: int) -> None:
    config = build_config({"cp": 2, "min_ranks": 1})
    config = as_left(config, Mesh(0, ranks))
    mesh = piped(config, Mesh(0, ranks))
    assert (config.cp, mesh.context, mesh.data_size) == (left, left, ranks // left)
    assert bool(config.notes) == (left != 2)


def test_ranks_that_make_no_whole_group_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        piped(build_config({"cp": 2}), Mesh(0, 3))
    assert caught.value.where == "--cp 2"


def test_an_objective_of_others_is_not_divided() -> None:
    class Another(CausalLM):
        further = ("more",)

    assert isinstance(Another().across(SingleProcess()), Another)
    with pytest.raises(ConfigError, match="Another"):
        Another().across(GroupWithinWorld(SingleProcess(), ((0, 1),)))


@pytest.mark.parametrize("more", [{"sync_every": 2}, {"sync_delay": 1}, {"rank_weights": "[2, 1]"}])
def test_rows_are_not_divided_beside_other_divisions(more: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        build_config({"cp": 2, **more})
