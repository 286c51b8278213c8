"""A run that is stopped or killed and resumed is the run that never was: bit by bit on as many
ranks as before.

Everything runs in this process on a tiny model: a kill is an exception that nothing in the program
knows, after which only files are left. Real kills of real processes are in tests/fault.
"""

from __future__ import annotations

import json
import shutil
import signal
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from runs import distance, read_weights
from tiny import write_chat_data, write_model
from twins import run_ranks

from allhands.checkpoints.settings import FIXED, FREE, TOLD
from allhands.config.schema import TrainConfig, build_config
from allhands.distributed import shards
from allhands.distributed.mesh import Mesh
from allhands.errors import CheckpointError, ConfigError, DataError, Interrupted, ModelError
from allhands.observe.metrics import read_metrics
from allhands.run.session import RunContext, run_finetune
from allhands.train.callbacks import Callback

# Eleven examples in batches of four: three batches an epoch, the last of them small.
BATCHES = 11
STEPS = 6  # where two batches are accumulated


class Killed(Exception):
    """As if the process had been killed: nothing in the program expects it."""


class Kill(Callback):
    """Dies in the backward pass of the update after ``step`` others."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_backward(self, step: int, gradients: Any) -> None:
        if step == self.step:
            raise Killed


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("resume-models")
    return {
        "dense": write_model(root / "dense", layers=2),
        "quantised": write_model(root / "quantised", layers=2, hidden=64, bits=4),
        "other": write_model(root / "other", layers=2, seed=9),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_data(tmp_path_factory.mktemp("resume-data"), train=11, valid=4, longest=30)


@pytest.fixture
def flags(models: dict[str, Path], data: Path, tmp_path: Path) -> dict[str, Any]:
    return options(models["dense"], data, tmp_path / "run")


@pytest.fixture(scope="module")
def undisturbed(
    models: dict[str, Path], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run of ``flags`` as it is when nobody disturbs it; only to be read."""
    return train(options(models["dense"], data, tmp_path_factory.mktemp("undisturbed") / "whole"))


@pytest.fixture(scope="module")
def begun(models: dict[str, Path], data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six batches of the run of ``flags``: what others may not go on with stays as it is."""
    return train(options(models["dense"], data, tmp_path_factory.mktemp("begun") / "run"), iters=6)


def options(model: Path, data: Path, directory: Path) -> dict[str, Any]:
    """Eleven batches with accumulation over two, a warm-up, a schedule, clipping and dropout."""
    return {
        "model": str(model),
        "data": str(data),
        "adapter_path": str(directory),
        "train": True,
        "iters": BATCHES,
        "batch_size": 4,
        "grad_accumulation_steps": 2,
        "save_every": 3,
        "steps_per_report": 3,
        "steps_per_eval": 4,
        "val_batches": -1,
        "learning_rate": 1e-2,
        "lr_schedule": "cosine",
        "warmup_steps": 2,
        "max_grad_norm": 1.0,
        "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.3},
    }


def train(
    flags: dict[str, Any], kill_at: int | None = None, stop_at: int | None = None, **more: Any
) -> Path:
    """One start of a run in this process; its directory."""
    config = build_config(flags | more)
    callbacks = [] if kill_at is None else [Kill(kill_at)]
    done = {"step": 0}

    def beat(phase: str, step: int) -> None:
        done["step"] = step

    def stop() -> int:
        return signal.SIGTERM if stop_at is not None and done["step"] >= stop_at else 0

    return run_finetune(config, RunContext(beat=beat, stop_requested=stop), callbacks).adapter_path


def content(directory: Path, best: bool = True) -> dict[str, Any]:
    """All that must be equal: weights and optimizer state as bits, every logged loss, best scores."""
    last = sorted((directory / "checkpoints").glob("step-*"))[-1]
    state = json.loads((last / "state.json").read_text())
    history = read_metrics(directory)
    return {
        "weights": bits(directory / "adapters.safetensors"),
        "checkpoint": bits(last / "adapters.safetensors"),
        "optimizer": bits(last / "optimizer.safetensors"),
        "train": [
            (r.step, r.iteration, r.loss, r.learning_rate, r.grad_norm, r.trained_tokens, r.epoch)
            for r in history.train
        ],
        "valid": [(r.step, r.iteration, r.loss, r.best) for r in history.valid],
        "best": bits(directory / "best" / "adapters.safetensors") if best else None,
        "state": {
            k: state[k] for k in ("step", "iteration", "trained_tokens", "best_loss", "best_step")
        },
    }


def bits(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every array of a safetensors file, read without MLX."""
    from safetensors import safe_open

    text = file.read_bytes()
    size = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + size])
    header.pop("__metadata__", None)
    with safe_open(file, framework="np") as opened:
        assert set(opened.keys()) == set(header)
    body = text[8 + size :]
    return {
        n: (e["dtype"], tuple(e["shape"]), body[slice(*e["data_offsets"])])
        for n, e in header.items()
    }


METHODS = {
    "lora": {},
    "dora": {"fine_tune_type": "dora"},
    "qlora": {"model": "quantised"},
    "full": {"fine_tune_type": "full"},
}


OPTIMIZERS = ("adam", "adamw", "muon", "adafactor", "sgd")
# Each method and each optimizer; what a method trains has no say in how an optimizer's state is
# kept.
QUICK = (
    {("lora", name) for name in OPTIMIZERS}
    | {(name, "adamw") for name in METHODS}
    | {("full", "muon")}
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.long, id="-".join(pair))
        for pair in product(METHODS, OPTIMIZERS)
    ],
)
def test_killed_and_resumed_is_never_killed(
    method: str, optimizer: str, flags: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    """Killed within an epoch and within an accumulation, twice; the second time after the first
    resumed run's save.
    """
    flags |= METHODS[method] | {"optimizer": optimizer}
    flags["model"] = str(models.get(flags["model"], flags["model"]))
    whole = content(train(flags, adapter_path=str(tmp_path / "whole")))
    with pytest.raises(Killed):
        train(flags, kill_at=3)
    with pytest.raises(Killed):
        train(flags, kill_at=5, resume="auto")
    assert content(train(flags, resume="auto")) == whole
    assert whole["optimizer"]
    assert [at[:2] for at in whole["train"]] == [(2, 4), (3, 6), (5, 10), (6, 11)]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_stopped_and_resumed_is_never_stopped(
    at: int, flags: dict[str, Any], undisturbed: Path
) -> None:
    """A signal saves at once, also where a report or a validation would have been due next."""
    whole = content(undisturbed)
    with pytest.raises(Interrupted, match="--resume"):
        train(flags, stop_at=at)
    assert content(train(flags, resume="auto")) == whole


@pytest.mark.slow
@pytest.mark.parametrize("at", [5, 1])
def test_stopped_at_a_validation_that_decides(
    at: int, flags: dict[str, Any], tmp_path: Path
) -> None:
    """The last validation, which finds the best adapter, or the one at which patience ends, is made
    after all.
    """
    patience = {"early_stopping_patience": 1, "early_stopping_min_delta": 10.0} if at == 1 else {}
    whole = content(
        train(flags, adapter_path=str(tmp_path / "whole"), keep_best=not patience, **patience),
        best=not patience,
    )
    with pytest.raises(Interrupted):
        train(flags, stop_at=at, keep_best=not patience, **patience)
    resumed = train(flags, resume="auto", keep_best=not patience, **patience)
    assert content(resumed, best=not patience) == whole
    ended = read_metrics(resumed).ended
    assert ended is not None
    assert ended.reason == ("stopped early" if patience else "finished")


@pytest.mark.slow
def test_without_accumulation_and_with_a_constant_rate(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    flags |= {"grad_accumulation_steps": 1, "lr_schedule": None, "warmup_steps": 0, "save_every": 1}
    whole = content(train(flags, adapter_path=str(tmp_path / "whole")))
    for step in range(1, BATCHES):
        with pytest.raises(Killed):
            train(flags, kill_at=step, resume="auto")
    assert content(train(flags, resume="auto")) == whole


def test_compiled_steps_too(flags: dict[str, Any], tmp_path: Path) -> None:
    flags |= {"compile": "on", "save_every": 4}
    whole = content(train(flags, adapter_path=str(tmp_path / "whole")))
    with pytest.raises(Killed):
        train(flags, kill_at=3)
    assert content(train(flags, resume="auto")) == whole


def test_without_resume_it_is_another_run(
    flags: dict[str, Any], undisturbed: Path, tmp_path: Path
) -> None:
    """The comparison can fail: the old way, from the weights alone, loses optimizer, schedule and
    place.
    """
    whole = content(undisturbed)
    with pytest.raises(Killed):
        train(flags, kill_at=3)
    weights = Path(flags["adapter_path"]) / "adapters.safetensors"
    old_way = content(
        train(flags, resume_adapter_file=str(weights), adapter_path=str(tmp_path / "old"))
    )
    assert old_way["weights"] != whole["weights"]


def test_parts_of_an_optimizer_are_written_as_one(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks of which each keeps a third, then two of which each keeps half, then one that
    keeps everything.
    """
    monkeypatch.setattr(shards, "_LEAST", 64)
    flags |= {
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "lr_schedule": None,
        "warmup_steps": 1,
        "compile": "on",
        "strategy": "zero1",
    }
    flags |= {"optimizer_config": {"adamw": {"eps": 1e-6}}}
    whole = train(flags, adapter_path=str(tmp_path / "whole"))
    train(flags, iters=4)
    run = Path(flags["adapter_path"])
    for size, iters in ((3, 8), (2, 10)):
        outcomes = ranks(size, build_config(flags | {"resume": "auto", "iters": iters}), None)
        assert all(isinstance(outcome, Path) for outcome in outcomes), outcomes
        last = sorted((run / "checkpoints").glob("step-*"))[-1]
        assert len(list(last.glob("optimizer-*.safetensors"))) == size
    train(flags, resume="auto")
    ours, theirs = read_metrics(run), read_metrics(whole)
    losses = [{r.step: r.loss for r in history.valid} for history in (ours, theirs)]
    assert losses[0] == pytest.approx(
        {step: losses[1].get(step, loss) for step, loss in losses[0].items()}, abs=2e-6
    )
    assert len(losses[0].keys() & losses[1].keys()) >= 3
    files = [
        sorted((place / "checkpoints").glob("step-*"))[-1] / "optimizer.safetensors"
        for place in (run, whole)
    ]
    assert distance(*map(read_weights, files)) < 1e-5
    assert (
        distance(*(read_weights(place / "adapters.safetensors") for place in (run, whole))) < 5e-6
    )


def test_another_number_of_ranks_within_rounding(flags: dict[str, Any], tmp_path: Path) -> None:
    """One rank, then three, then two: dropout and order follow the samples, so only sums are
    rounded otherwise.
    """
    flags |= {"optimizer_config": {"adam": {"eps": 1e-6}}, "learning_rate": 1e-3}
    whole = train(flags, adapter_path=str(tmp_path / "whole"))
    with pytest.raises(Killed):
        train(flags, kill_at=2)
    for size, kill_at in ((3, 4), (2, None)):
        outcomes = ranks(size, build_config(flags | {"resume": "auto"}), kill_at)
        assert all(isinstance(outcome, Killed if kill_at else Path) for outcome in outcomes), (
            outcomes
        )
    run = Path(flags["adapter_path"])
    ours, theirs = read_metrics(run), read_metrics(whole)
    assert [r.step for r in ours.train] == [r.step for r in theirs.train]
    assert [r.loss for r in ours.train] == pytest.approx([r.loss for r in theirs.train], abs=2e-6)
    assert [r.loss for r in ours.valid] == pytest.approx([r.loss for r in theirs.valid], abs=2e-6)
    files = [directory / "adapters.safetensors" for directory in (run, whole)]
    assert distance(*map(read_weights, files)) < 5e-6
    start = read_weights(sorted(whole.glob("*_adapters.safetensors"))[0])
    assert distance(read_weights(files[1]), start) > 1e-3


def ranks(size: int, config: TrainConfig, kill_at: int | None) -> list[Any]:
    """One start on ``size`` ranks, which are threads; the others see no files of rank 0."""
    callbacks = [] if kill_at is None else [Kill(kill_at)]

    def work(communicator: Any) -> Path:
        rank = communicator.rank
        mesh = Mesh(rank, size, rank, size, (1.0,) * size)
        own = (
            config
            if rank == 0
            else config.model_copy(update={"adapter_path": f"{config.adapter_path}-{rank}"})
        )
        return run_finetune(
            own, RunContext(mesh=mesh, connect=lambda: communicator), callbacks
        ).adapter_path

    return run_ranks(size, work)


def test_into_another_directory_with_the_curve(
    flags: dict[str, Any], undisturbed: Path, tmp_path: Path
) -> None:
    whole = content(undisturbed)
    with pytest.raises(Killed):
        train(flags, kill_at=3)
    checkpoint = max(Path(flags["adapter_path"]).glob("checkpoints/step-*"))
    before = sorted(path.name for path in checkpoint.parent.iterdir())
    assert (
        content(train(flags, resume=str(checkpoint), adapter_path=str(tmp_path / "new"))) == whole
    )
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == before


def test_from_an_older_checkpoint_the_later_ones_are_set_aside(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    """Killed after it has gone back, it must not go on from the branch that was left."""
    flags |= {"grad_accumulation_steps": 1, "keep_last": 9, "lr_schedule": None, "warmup_steps": 0}
    directory = train(flags)
    changed = flags | {"learning_rate": 5e-3}
    old = directory / "checkpoints" / "step-0000003"
    expected = train(changed, resume=str(old), adapter_path=str(tmp_path / "elsewhere"))
    with pytest.raises(Killed):
        train(changed, resume=str(old), kill_at=8)
    assert content(train(changed, resume="auto"))["weights"] == content(expected)["weights"]
    aside = sorted(path.name for path in (directory / "checkpoints.1").iterdir())
    assert aside == ["best", "step-0000006", "step-0000009", "step-0000011"]


def test_the_best_checkpoint_can_be_resumed(
    flags: dict[str, Any], undisturbed: Path, tmp_path: Path
) -> None:
    whole = content(undisturbed)
    best = json.loads((undisturbed / "best" / "manifest.json").read_text())["step"]
    assert best == whole["state"]["best_step"] > 0
    resumed = train(flags, resume=str(undisturbed / "best"), adapter_path=str(tmp_path / "again"))
    assert content(resumed)["weights"] == whole["weights"]


def test_a_longer_run_goes_on(flags: dict[str, Any], tmp_path: Path) -> None:
    flags |= {"lr_schedule": None, "warmup_steps": 0, "grad_accumulation_steps": 1}
    whole = content(train(flags, adapter_path=str(tmp_path / "whole")))
    train(flags, iters=5)
    assert content(train(flags, resume="auto"))["weights"] == whole["weights"]


def test_a_run_that_is_past_its_end(
    flags: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(flags)
    before = bits(run / "adapters.safetensors")
    from rich.console import Console

    shorter = flags | {"resume": "auto", "iters": BATCHES // 2, "lr_schedule": None}
    run_finetune(build_config(shorter), RunContext(console=Console(width=400)))
    told = capsys.readouterr().out
    assert "nothing is left to train" in told
    assert f"({BATCHES // 2} iterations)" not in told
    assert bits(run / "adapters.safetensors") == before


def test_nothing_to_resume_is_a_start(flags: dict[str, Any], undisturbed: Path) -> None:
    whole = content(undisturbed)
    assert content(train(flags, resume="auto")) == whole


def test_a_damaged_checkpoint_is_passed_over(flags: dict[str, Any], tmp_path: Path) -> None:
    flags |= {"grad_accumulation_steps": 1}
    whole = content(train(flags, adapter_path=str(tmp_path / "whole")))
    with pytest.raises(Killed):
        train(flags, kill_at=8)
    newest = max(Path(flags["adapter_path"]).glob("checkpoints/step-*"))
    file = newest / "optimizer.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-3] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        train(flags, resume=str(newest))
    assert content(train(flags, resume="auto")) == whole


def test_a_new_run_sets_the_old_one_aside(flags: dict[str, Any]) -> None:
    directory = train(flags, iters=6)
    old = bits(directory / "checkpoints" / "step-0000003" / "adapters.safetensors")
    train(flags, iters=5, seed=5)
    assert bits(directory / "checkpoints.1" / "step-0000003" / "adapters.safetensors") == old
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == [
        "step-0000002",
        "step-0000003",
    ]


def test_an_older_run_is_no_match_for_a_new_one_that_dies_at_once(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt dies before it has set anything aside; the second must do so, the third
    must not.
    """
    flags |= {"grad_accumulation_steps": 1, "lr_schedule": None, "warmup_steps": 0, "save_every": 2}
    old = content(train(flags, seed=5))
    config = build_config(flags | {"iters": 6})

    def attempt(number: int, kill_at: int | None = None) -> Path:
        callbacks = [] if kill_at is None else [Kill(kill_at)]
        return run_finetune(
            config, RunContext(run_id="new", attempt=number), callbacks
        ).adapter_path

    with monkeypatch.context() as patch:
        patch.setattr("allhands.run.session.prepare", dying)
        with pytest.raises(Killed):
            attempt(1)
    with pytest.raises(Killed):
        attempt(2, kill_at=5)
    directory = attempt(3)
    assert [r.step for r in read_metrics(directory).train] == [3, 6]
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == [
        "step-0000004",
        "step-0000006",
    ]
    assert (
        bits(directory / "checkpoints.1" / "step-0000011" / "adapters.safetensors")
        == old["checkpoint"]
    )
    # As a note advises: the old run goes on, with its own curve and best adapter, and the new one
    # is set aside.
    back = train(flags, seed=5, iters=12, resume=str(directory / "checkpoints.1"))
    assert [r.step for r in read_metrics(back).train] == [3, 6, 9, 11, 12]
    assert bits(back / "best.1" / "adapters.safetensors")
    assert (back / "checkpoints.2" / "step-0000006").is_dir()
    assert (back / "checkpoints" / "step-0000012").is_dir()


def dying(*_: Any, **__: Any) -> Any:
    raise Killed


CHANGES: dict[str, Any] = {
    "batch_size": 2,
    "seed": 1,
    "grad_accumulation_steps": 1,
    "max_seq_length": 20,
    "mask_prompt": True,
    "fine_tune_type": "dora",
    "num_layers": 1,
    "lora_parameters": {"rank": 2, "scale": 2.0, "dropout": 0.3},
    "optimizer": "adamw",
    "optimizer_config": {"adam": {"eps": 1e-3}},
}


@pytest.mark.parametrize("key", CHANGES)
def test_a_setting_that_makes_another_run_is_refused(
    key: str, flags: dict[str, Any], begun: Path
) -> None:
    with pytest.raises(ConfigError, match="not be the same run") as caught:
        train(flags | {"adapter_path": str(begun)}, resume="auto", **{key: CHANGES[key]})
    assert caught.value.where == f"--{key.replace('_', '-')}"
    assert "--resume-adapter-file" in str(caught.value.hint)


def test_other_data_and_another_model_are_refused(
    flags: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    train(flags, iters=6)
    other = write_chat_data(tmp_path / "other", train=11, valid=4, longest=30, seed=3)
    with pytest.raises(DataError, match="training data"):
        train(flags, resume="auto", data=str(other))
    with pytest.raises(ModelError, match="not the weights"):
        train(flags, resume="auto", model=str(models["other"]))
    copied = shutil.copytree(flags["data"], tmp_path / "copied")
    train(flags, resume="auto", data=str(copied))


@pytest.mark.parametrize("changed", ["examples", "number"])
def test_other_validation_examples_are_not_compared(
    changed: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    """The best weights are those of the new examples, also where the earlier losses were lower."""
    data = Path(shutil.copytree(flags["data"], tmp_path / "data"))
    flags |= {"data": str(data), "batch_size": 2, "warmup_steps": 0}
    flags |= {"early_stopping_patience": 99, "early_stopping_min_delta": 9.0}
    train(flags, iters=4)
    run = Path(flags["adapter_path"])
    before = read_metrics(run).valid[-1]
    assert before.step == 2
    first = train(
        flags | {"adapter_path": str(shutil.copytree(run, tmp_path / "same"))}, resume="auto"
    )
    ended = read_metrics(first).ended
    assert ended is not None
    assert ended.best_step == 0  # no loss falls by 9
    more: dict[str, Any] = {"val_batches": 1}
    if changed == "examples":
        write_chat_data(tmp_path / "other", train=11, valid=4, longest=30, seed=3)
        shutil.copy(tmp_path / "other" / "valid.jsonl", data / "valid.jsonl")
        more = {}
    history = read_metrics(train(flags, resume="auto", **more))
    assert history.ended is not None
    assert history.ended.best_step == 2
    assert [one.step for one in history.comparable] == [one.step for one in history.valid][1:]
    assert history.comparable[0].loss != before.loss
    assert history.comparable[0].best
    assert bits(run / "best" / "adapters.safetensors") == bits(
        sorted((run / "checkpoints").glob("step-*"))[0] / "adapters.safetensors"
    )


def test_a_change_that_is_allowed_is_told(
    flags: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    train(flags, iters=6)
    config = build_config(flags | {"resume": "auto", "max_grad_norm": 0.5})
    run_finetune(config, RunContext(console=Console(width=400)))
    told = capsys.readouterr().out
    assert "max_grad_norm changed from 1.0 to 0.5" in told
    assert "iters changed from 6 to 11" in told
    assert "cosine schedule" in told


def test_every_setting_has_its_rule() -> None:
    assert set(TrainConfig.model_fields) == FIXED | TOLD | FREE
    assert not FIXED & TOLD
    assert not (FIXED | TOLD) & FREE
    # A new option is free unless somebody decides otherwise: whoever adds one must look here.
    assert len(FREE) == 60, sorted(FREE)


def test_retention(flags: dict[str, Any]) -> None:
    flags |= {
        "grad_accumulation_steps": 1,
        "save_every": 1,
        "keep_last": 2,
        "keep_every": 4,
        "keep_best": False,
    }
    directory = train(flags, val_batches=0)
    kept = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert kept == ["step-0000004", "step-0000008", "step-0000010", "step-0000011"]
    numbered = sorted(directory.glob("*_adapters.safetensors"))
    assert len(numbered) == BATCHES


def test_keep_last_0_writes_adapters_alone(flags: dict[str, Any]) -> None:
    directory = train(flags, keep_last=0)
    assert not (directory / "checkpoints").exists()
    assert (directory / "adapters.safetensors").exists()
    assert mx.load(str(directory / "0000011_adapters.safetensors"))
