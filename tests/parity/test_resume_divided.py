"""Saved by ranks that divide the optimizer in one way or not at all, resumed by others: the same
run.

On the same number of ranks with the same division bit for bit, on others to the rounding of sums.
"""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_resume import options
from tiny import write_chat_data, write_model
from twins import run_ranks

from allhands.checkpoints import Checkpoint, checkpoints_in, open_checkpoint
from allhands.checkpoints.arrays import local_arrays
from allhands.checkpoints.format import OPTIMIZER_FILE, WEIGHTS_FILE
from allhands.config.schema import build_config
from allhands.distributed import shards
from allhands.distributed.mesh import Mesh
from allhands.run.session import RunContext, run_finetune

HALF, WHOLE = 4, 8
# Ranks, and their strategy.
WAYS = ((1, "data"), (2, "data"), (2, "zero1"), (3, "data"), (3, "zero1"))
Way = tuple[int, str]


@pytest.fixture(autouse=True)
def divide_small_arrays_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_LEAST", 64)


def train(flags: dict[str, Any], way: Way, directory: Path, *, shared: bool, **more: Any) -> Path:
    """One start on ranks that are threads, in one directory or each in its own."""
    size, divides = way
    config = build_config({**flags, "adapter_path": str(directory), "strategy": divides, **more})

    def work(communicator: Any) -> Path:
        rank = communicator.rank
        mesh = Mesh(rank, size, rank, size, (1.0,) * size)
        own = config
        if rank and not shared:
            own = config.model_copy(update={"adapter_path": f"{config.adapter_path}-{rank}"})
        return run_finetune(own, RunContext(mesh=mesh, connect=lambda: communicator)).adapter_path

    outcomes = run_ranks(size, work)
    assert all(isinstance(outcome, Path) for outcome in outcomes), outcomes
    return directory


def last(directory: Path) -> Checkpoint:
    return open_checkpoint(checkpoints_in(directory)[0])


def arrays(checkpoint: Checkpoint) -> dict[str, np.ndarray[Any, Any]]:
    return {
        f"{file} {name}": np.array(stored.read())
        for file in (WEIGHTS_FILE, OPTIMIZER_FILE)
        for name, stored in local_arrays(checkpoint, file).items()
    }


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("divided")
    data = write_chat_data(root / "data", train=11, valid=4, longest=30)
    more = {
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "compile": "on",
        "grad_accumulation_steps": 1,
    }
    more |= {
        "iters": WHOLE,
        "save_every": HALF,
        "optimizer_config": {"adamw": {"eps": 1e-6}},
        "val_batches": 0,
    }
    return options(write_model(root / "model", layers=2), data, root / "run") | more


@pytest.fixture(scope="module")
def undisturbed(flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[Way, Path]:
    """The whole run of every way, each with its checkpoint at half of it; only to be read."""
    root = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_LEAST", 64)
        return {way: train(flags, way, root / f"{way[0]}-{way[1]}", shared=True) for way in WAYS}


def pairs() -> list[Any]:
    """All of them; every day each way once as the saving one and once as the resumed one, and with
    itself.
    """
    daily = {(way, way) for way in WAYS} | set(zip(WAYS, WAYS[1:] + WAYS[:1], strict=True))
    daily |= {((3, "zero1"), (2, "zero1")), ((2, "zero1"), (3, "zero1"))}
    return [
        pytest.param(
            one, other, marks=[] if (one, other) in daily else pytest.mark.long, id=f"{one}-{other}"
        )
        for one, other in product(WAYS, WAYS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed"), pairs())
def test_saved_in_one_way_and_resumed_in_another(
    saved: Way, resumed: Way, flags: dict[str, Any], undisturbed: dict[Way, Path], tmp_path: Path
) -> None:
    half = shutil.copytree(
        checkpoints_in(undisturbed[saved])[1], tmp_path / "from" / "checkpoints" / "step-0000004"
    )
    manifest = json.loads((half / "manifest.json").read_text())
    of_ranks = {each["file"] for array in manifest["arrays"] for each in array["slices"]} - {
        WEIGHTS_FILE,
        OPTIMIZER_FILE,
    }
    assert len(of_ranks) == (saved[0] if saved[1] == "zero1" else 0)
    # Some in one directory, as those who saved, others each in its own.
    shared = saved[0] % 2 == 0
    run = train(flags, resumed, tmp_path / "run", shared=shared, resume=str(half))
    found, whole = arrays(last(run)), arrays(last(undisturbed[saved]))
    assert found.keys() == whole.keys()
    if saved == resumed:
        assert all(found[name].tobytes() == whole[name].tobytes() for name in whole)
    for name, array in whole.items():
        np.testing.assert_allclose(found[name], array, rtol=2e-4, atol=5e-6, err_msg=name)
    assert last(run).step == WHOLE
    before = arrays(open_checkpoint(half))
    assert any(not np.allclose(before[name], array, rtol=1e-3) for name, array in whole.items())
