"""Rounds of local steps that are killed, stopped and resumed: bit by bit on as many ranks, and on
from there on others.

Ranks are threads; kills of real processes are in tests/fault.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import allhands  # before MLX, for its BLAS

# isort: split
import numpy as np
import pytest
from runs import distance, read_weights
from test_resume import Killed, bits, content
from tiny import write_chat_data, write_model
from twins import run_ranks

from allhands.config.schema import TrainConfig, build_config
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError, Interrupted
from allhands.observe.metrics import read_metrics
from allhands.run.session import RunContext, run_finetune
from allhands.train.callbacks import Callback

del allhands
STEPS = 11  # the last round is short


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("rounds")
    return {
        "model": str(write_model(root / "model", layers=2)),
        "data": str(write_chat_data(root / "data", train=11, valid=4, longest=30)),
    }


def run_flags(inputs: dict[str, Any], folder: Path, **own: Any) -> dict[str, Any]:
    """A short run, in which everything is due at some time."""
    return inputs | {
        "adapter_path": str(folder / "run"),
        "train": True,
        "iters": STEPS,
        "batch_size": 4,
        "steps_per_report": 2,
        "steps_per_eval": 4,
        "val_batches": -1,
        "learning_rate": 1e-2,
        "lr_schedule": "cosine",
        "max_grad_norm": 1.0,
        "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.3},
        **own,
    }


@pytest.fixture
def flags(inputs: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Rounds of three steps, and everything else due within them."""
    return run_flags(inputs, tmp_path, sync_every=3, save_every=2)


DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}


def start(
    size: int,
    flags: dict[str, Any],
    kill: tuple[str, int] | None = None,
    stop_at: int | None = None,
    slow_s: float = 0.0,
) -> list[Any]:
    """One start on ``size`` ranks: what came of each; all die at a beat, or are asked to stop after
    a step.
    """
    config = build_config(flags)

    def work(communicator: Any) -> Path:
        rank, done = communicator.rank, {"step": 0}

        def beat(phase: str, step: int) -> None:
            done["step"] = step
            if kill is not None and (phase, step) == kill:
                raise Killed

        def stop() -> int:
            return (
                signal.SIGTERM
                if stop_at is not None and done["step"] >= stop_at and rank == size - 1
                else 0
            )

        own = (
            config
            if rank == 0
            else config.model_copy(update={"adapter_path": f"{config.adapter_path}-{rank}"})
        )
        mesh = Mesh(rank, size, rank, size, (1.0,) * size)
        context = RunContext(
            mesh=mesh, connect=lambda: communicator, beat=beat, stop_requested=stop
        )
        return run_finetune(own, context).adapter_path

    return run_ranks(size, work)


def finished(size: int, flags: dict[str, Any]) -> Path:
    found = start(size, flags)
    assert all(isinstance(each, Path) for each in found), found
    return found[0]


def whole(size: int, flags: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return everything(finished(size, flags | {"adapter_path": str(tmp_path / "whole")}))


def everything(directory: Path) -> dict[str, Any]:
    last = sorted((directory / "checkpoints").glob("step-*"))[-1]
    return content(directory) | {path.name: bits(path) for path in sorted(last.glob("optimizer-*"))}


def saved_steps(directory: Path) -> list[int]:
    return [
        json.loads((path / "state.json").read_text())["step"]
        for path in sorted(directory.glob("checkpoints/*"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("outer", [{}, DILOCO], ids=["mean", "nesterov"])
@pytest.mark.parametrize("size", [2, 3])
def test_killed_and_resumed_is_never_killed(
    size: int, outer: dict[str, Any], flags: dict[str, Any], tmp_path: Path
) -> None:
    flags |= outer | {"keep_last": 9}
    undisturbed = whole(size, flags, tmp_path)
    assert saved_steps(tmp_path / "whole") == [
        3,
        6,
        9,
        11,
    ]  # at ends of rounds, and of the training
    valid = read_metrics(tmp_path / "whole").valid
    assert [report.step for report in valid] == [0, 6, 9, 11]
    for at in (("update", 4), ("load", 6), ("compute", 8)):
        outcomes = start(size, flags | {"resume": "auto"}, kill=at)
        assert all(isinstance(each, Killed) for each in outcomes), outcomes
    assert everything(finished(size, flags | {"resume": "auto"})) == undisturbed
    assert any(name.startswith("optimizer-1") for name in undisturbed)


FRAGMENTS: dict[str, Any] = {
    "sync_every": 4,
    "sync_fragments": 2,
    "sync_delay": 2,
    "save_every": 8,
    "steps_per_eval": 8,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{}, DILOCO, {"compress": "int8"}], ids=["mean", "nesterov", "packed"]
)
@pytest.mark.parametrize("size", [2, 3])
def test_fragments_that_are_killed_on_their_way_and_resumed_are_never_killed(
    size: int, more: dict[str, Any], flags: dict[str, Any], tmp_path: Path
) -> None:
    """They go on over the ends of rounds, but for those at which something is due."""
    flags |= FRAGMENTS | more | {"iters": 18, "keep_last": 9}
    undisturbed = whole(size, flags, tmp_path)
    assert saved_steps(tmp_path / "whole") == [8, 16, 18]
    assert [report.step for report in read_metrics(tmp_path / "whole").valid] == [0, 8, 16, 18]
    for at in (("update", 3), ("compute", 4), ("load", 7), ("compute", 13)):
        outcomes = start(size, flags | {"resume": "auto"}, kill=at)
        assert all(isinstance(each, Killed) for each in outcomes), outcomes
    assert everything(finished(size, flags | {"resume": "auto"})) == undisturbed


@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_a_stop_waits_for_the_end_of_a_round_of_fragments(at: int, flags: dict[str, Any]) -> None:
    flags |= FRAGMENTS
    outcomes = start(2, flags, stop_at=at)
    assert all(isinstance(each, Interrupted) for each in outcomes), outcomes
    assert saved_steps(Path(flags["adapter_path"])) == [4 if at < 4 else 8]
    finished(2, flags | {"resume": "auto"})
    losses = [report.loss for report in read_metrics(Path(flags["adapter_path"])).valid]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("at", [3, 4, 5])
def test_a_stop_waits_for_the_end_of_a_round_that_is_soon(
    at: int, flags: dict[str, Any], tmp_path: Path
) -> None:
    undisturbed = whole(2, flags, tmp_path)
    outcomes = start(2, flags, stop_at=at)
    assert all(isinstance(each, Interrupted) for each in outcomes), outcomes
    assert saved_steps(Path(flags["adapter_path"]))[-1] == 6
    assert everything(finished(2, flags | {"resume": "auto"})) == undisturbed


def test_a_stop_closes_a_round_that_is_long(flags: dict[str, Any]) -> None:
    flags |= {"stop_grace_s": 1e-9}
    outcomes = start(2, flags, stop_at=3)
    assert all(isinstance(each, Interrupted) for each in outcomes), outcomes
    run = Path(flags["adapter_path"])
    assert saved_steps(run)[-1] == 4
    finished(2, flags | {"resume": "auto"})
    assert saved_steps(run)[-1] == STEPS
    # Nothing is trained on twice, and nothing is left out.
    state = json.loads((sorted(run.glob("checkpoints/*"))[-1] / "state.json").read_text())
    assert state["trained_tokens"] == sum(
        report.trained_tokens for report in read_metrics(run).train[-1:]
    )


@pytest.mark.parametrize("outer", [{}, DILOCO, DILOCO | {"sync_fragments": 3, "sync_delay": 1}])
def test_another_number_of_ranks_goes_on(outer: dict[str, Any], flags: dict[str, Any]) -> None:
    """Three, two, one, and two again, which trains on; the optimizer's states are averaged."""
    flags |= outer
    finished(3, flags | {"iters": 3})
    run = Path(flags["adapter_path"])
    last = sorted(run.glob("checkpoints/*"))[-1]
    rows = [read_weights(path) for path in sorted(last.glob("optimizer-*"))]
    assert len(rows) == 3
    for number, (size, iters) in enumerate(((2, 6), (1, 8), (2, 9))):
        finished(size, flags | {"iters": iters, "resume": "auto"})
        last = sorted(run.glob("checkpoints/*"))[-1]
        assert json.loads((last / "state.json").read_text())["step"] == iters, number
        outers = [
            name
            for name in read_weights(last / "optimizer.safetensors")
            if name.startswith("outer/")
        ]
        assert bool(outers) == bool(outer)
    losses = [report.loss for report in read_metrics(run).valid]
    assert losses[-1] < losses[0]
    # A number of the optimizer's: the mean of what the three had, where two went on.
    name = next(key for key in rows[0] if key.endswith(".m"))
    assert not all((np.array(row[name]) == np.array(rows[0][name])).all() for row in rows)


def test_with_sums_again_after_rounds_and_back(flags: dict[str, Any]) -> None:
    finished(2, flags | {"iters": 3})
    finished(2, flags | {"iters": 6, "resume": "auto", "sync_every": 1})
    finished(2, flags | {"iters": 9, "resume": "auto", "sync_every": 3})
    run = Path(flags["adapter_path"])
    losses = [report.loss for report in read_metrics(run).valid]
    assert losses[-1] < losses[0]


def test_one_rank_averages_with_nobody(flags: dict[str, Any], tmp_path: Path) -> None:
    one = finished(1, flags)
    plain = finished(1, flags | {"sync_every": 1, "adapter_path": str(tmp_path / "plain")})
    files = [directory / "adapters.safetensors" for directory in (one, plain)]
    assert distance(*map(read_weights, files)) < 1e-6


def test_a_callback_that_wants_whole_gradients_is_refused(flags: dict[str, Any]) -> None:
    class Looks(Callback):
        def after_backward(self, step: int, gradients: Any) -> None:
            pass

    config: TrainConfig = build_config(flags)
    with pytest.raises(ConfigError) as caught:
        run_finetune(config, RunContext(), [Looks()])
    assert "--sync-every" in str(caught.value.where)
