"""Delayed gradients that are killed, stopped and resumed: bit by bit on as many ranks, and on from
there on others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import allhands  # before MLX, for its BLAS

# isort: split
import numpy as np
import pytest
from runs import distance, read_weights
from test_resume import Killed
from test_resume_rounds import everything, finished, inputs, run_flags, saved_steps, start, whole

from allhands.config.schema import build_config
from allhands.errors import ConfigError, Interrupted
from allhands.observe.metrics import read_metrics
from allhands.run.session import RunContext, run_finetune
from allhands.train.callbacks import Callback

del allhands
__all__ = ["inputs"]  # a fixture
STEPS = 8


@pytest.fixture
def flags(inputs: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return run_flags(inputs, tmp_path, iters=STEPS, sync_delay=1, save_every=3, keep_last=9)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"compress": "int4"}, {"grad_accumulation_steps": 2}])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_killed_and_resumed_is_never_killed(
    size: int, more: dict[str, Any], flags: dict[str, Any], tmp_path: Path
) -> None:
    flags |= more
    undisturbed = whole(size, flags, tmp_path)
    assert undisturbed
    for at in (("update", 1), ("load", 2), ("compute", 3)):
        outcomes = start(size, flags | {"resume": "auto"}, kill=at)
        assert all(isinstance(each, Killed | Path) for each in outcomes), outcomes
    assert everything(finished(size, flags | {"resume": "auto"})) == undisturbed


@pytest.mark.parametrize("at", [1, 3, 4])
def test_a_stop_is_at_once_and_goes_on(at: int, flags: dict[str, Any], tmp_path: Path) -> None:
    """Bit by bit, also where no checkpoint and no validation was due."""
    undisturbed = whole(2, flags, tmp_path)
    outcomes = start(2, flags, stop_at=at)
    assert all(isinstance(each, Interrupted) for each in outcomes), outcomes
    assert saved_steps(Path(flags["adapter_path"]))[-1] in (at, at + 1)
    run = finished(2, flags | {"resume": "auto"})
    assert everything(run) == undisturbed
    assert [report.step for report in read_metrics(run).valid][-1] == STEPS


def test_checkpoints_and_validations_change_nothing(flags: dict[str, Any], tmp_path: Path) -> None:
    often = {"save_every": 1, "steps_per_eval": 2, "adapter_path": str(tmp_path / "often")}
    rarely = {"save_every": 100, "steps_per_eval": 100, "adapter_path": str(tmp_path / "rarely")}
    one, other = (finished(2, flags | more) / "adapters.safetensors" for more in (often, rarely))
    assert one.read_bytes() == other.read_bytes()


def test_another_number_of_ranks_goes_on(flags: dict[str, Any], tmp_path: Path) -> None:
    """The sums that are still to be applied are of all ranks; what a rank expects is of its own
    part.
    """
    one = finished(1, flags | {"adapter_path": str(tmp_path / "one")})
    for size, iters in ((3, 3), (2, 6), (1, STEPS)):
        # The schedule is of the whole run.
        finished(size, flags | {"iters": iters, "resume": "auto", "lr_schedule": None})
    alone = finished(1, flags | {"lr_schedule": None, "adapter_path": str(tmp_path / "constant")})
    run = Path(flags["adapter_path"])
    last_loss, alone_loss = (read_metrics(each).valid[-1].loss for each in (run, alone))
    assert last_loss == pytest.approx(alone_loss, rel=0.06)
    assert last_loss < 0.85 * read_metrics(run).valid[0].loss
    assert distance(*(read_weights(each / "adapters.safetensors") for each in (one, alone))) > 1e-4
    last = sorted(run.glob("checkpoints/*"))[-1]
    assert json.loads((last / "state.json").read_text())["step"] == STEPS
    late = {
        name
        for name in read_weights(last / "optimizer.safetensors")
        if name.startswith("outer/late/")
    }
    assert len(late) == 1 + len(read_weights(run / "adapters.safetensors"))
    own = {
        name
        for name in read_weights(last / "optimizer.safetensors")
        if name.startswith("outer/each-rank/late/")
    }
    assert len(own) == len(late) + 1  # and the last norm


def test_without_a_delay_again_and_back(flags: dict[str, Any]) -> None:
    for iters, delay in ((3, 1), (6, 0), (8, 1)):
        finished(
            2, flags | {"iters": iters, "resume": "auto", "sync_delay": delay, "lr_schedule": None}
        )
    losses = [report.loss for report in read_metrics(Path(flags["adapter_path"])).valid]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


def test_a_callback_that_wants_gradients_is_refused(flags: dict[str, Any]) -> None:
    class Looks(Callback):
        def after_backward(self, step: int, gradients: Any) -> None:
            pass

    with pytest.raises(ConfigError) as caught:
        run_finetune(build_config(flags), RunContext(), [Looks()])
    assert "--sync-delay" in str(caught.value.where)
