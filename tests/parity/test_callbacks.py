"""People's own code beside the training: ours and mlx_lm's kinds of callbacks, and gradients that
are changed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import allhands

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.tuner.trainer import TrainingCallback

from allhands.errors import ConfigError, Interrupted
from allhands.observe.metrics import read_metrics

# In the eager step with native code, in one by hand, and as a graph.
FORMS: list[dict[str, Any]] = [
    {},
    {"optimizer": "sgd"},
    {"optimizer": "sgd", "compile": "on"},
    {"compile": "on", "fine_tune_type": "full", "num_layers": 1},
    {"optimizer": "adafactor"},
]


@pytest.fixture
def train(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> Any:
    def run(name: str, *callbacks: Any, **options: Any) -> dict[str, np.ndarray]:
        given: dict[str, Any] = {
            "iters": 3,
            "batch_size": 2,
            "val_batches": 1,
            "max_seq_length": 64,
            **options,
        }
        given |= {
            "model": str(tiny_model),
            "data": str(tiny_data),
            "adapter_path": str(tmp_path / name),
        }
        allhands.finetune(
            callbacks=list(callbacks), progress=False, steps_per_report=1, keep_last=0, **given
        )
        weights: Any = mx.load(str(tmp_path / name / "adapters.safetensors"))
        return {key: np.array(value) for key, value in weights.items()}

    return run


class Series(TrainingCallback):
    """As in a script for mlx_lm's trainer with gradients averaged by hand."""

    def __init__(self) -> None:
        self.train_losses: list[tuple[int, float]] = []
        self.val_losses: list[tuple[int, float]] = []
        self.steps: list[int] = []
        self.infos: list[dict[str, Any]] = []

    def on_after_backward(self, model: Any, grads: Any, step: int) -> Any:
        assert model.layers
        self.steps.append(step)
        return tree_map(lambda g: mx.distributed.all_sum(g) / mx.distributed.init().size(), grads)

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        self.infos.append(train_info)
        self.train_losses.append((train_info["iteration"], train_info["train_loss"]))

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        self.val_losses.append((val_info["iteration"], val_info["val_loss"]))


def test_mlx_lms_callbacks_are_told_in_its_words(train: Any, tmp_path: Path) -> None:
    theirs = Series()
    weights, plain = train("theirs", theirs), train("plain")
    assert all(np.allclose(weights[name], plain[name], rtol=1e-3, atol=1e-7) for name in plain)
    history = read_metrics(tmp_path / "theirs")
    assert theirs.train_losses == [(one.step, one.loss) for one in history.train]
    assert theirs.val_losses == [(one.step, one.loss) for one in history.valid]
    assert theirs.steps == [0, 1, 2]
    names = {
        "iteration",
        "train_loss",
        "learning_rate",
        "iterations_per_second",
        "tokens_per_second",
    }
    assert all(info.keys() == names | {"trained_tokens", "peak_memory"} for info in theirs.infos)
    assert theirs.infos[-1]["trained_tokens"] == history.train[-1].trained_tokens
    assert 0.01 < theirs.infos[-1]["peak_memory"] < 100  # GB


class Scaled(allhands.Callback):
    """Trains on a part of each gradient."""

    def __init__(self, by: float) -> None:
        self.by = by

    def after_backward(self, step: int, gradients: Any) -> Any:
        return tree_map(lambda g: self.by * g, gradients)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_returned_is_trained_on(train: Any, form: dict[str, Any]) -> None:
    shape = {**form, "learning_rate": 2.0**-6}
    usual = train("usual", **shape)
    # One step: what Adam makes of the rounding of a gradient that is next to nothing grows from
    # there.
    one, same = (
        train("one", **{**shape, "iters": 1}),
        train("same", Scaled(1.0), **{**shape, "iters": 1}),
    )
    assert all(np.mean(np.abs(same[name] - one[name])) < 1e-5 for name in one)
    if form.get("optimizer") == "sgd":
        half = train("half", Scaled(0.5), Scaled(0.5), **shape)
        slow = train("slow", **{**shape, "learning_rate": 2.0**-8})
        assert all((half[name] == slow[name]).all() for name in slow)
    nothing = train("nothing", Scaled(0.0), **{**shape, "iters": 1})
    again = train("again", Scaled(0.0), **{**shape, "iters": 2})
    assert all(np.allclose(nothing[name], again[name], atol=1e-5) for name in nothing)
    assert any(np.abs(nothing[name] - usual[name]).max() > 1e-4 for name in usual)


class Looking(allhands.Callback):
    """Changes nothing."""

    def after_backward(self, step: int, gradients: Any) -> None:
        mx.eval(gradients)


def test_who_only_looks_changes_nothing(train: Any) -> None:
    usual, seen = train("usual"), train("seen", Looking(), Looking())
    assert all((usual[name] == seen[name]).all() for name in usual)


class Misspelt(allhands.Callback):
    """Never called."""

    def on_train_reprot(self, report: Any) -> None: ...


class MisspeltOfMlxLm(TrainingCallback):
    """As mlx_lm would accept it, and never call it."""

    def on_validation_loss_report(self, info: Any) -> None: ...


class Mixed(allhands.Callback):
    """mlx_lm's method in a class of ours."""

    def on_val_loss_report(self, info: Any) -> None: ...


class Nothing:
    """No callback."""

    def report(self) -> None: ...


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([Misspelt()], "on_train_report"),
        ([MisspeltOfMlxLm()], "on_val_loss_report"),
        ([Mixed()], "on_valid_report"),
        ([Nothing()], "allhands.Callback"),
        ([Looking], "Looking()"),
        ([lambda report: None], "allhands.Callback"),
        (Looking(), "[MyCallback()]"),
        ([None], "allhands.Callback"),
    ],
)
def test_what_would_never_be_called_is_refused(
    tiny_model: Path, tmp_path: Path, given: Any, says: str
) -> None:
    with pytest.raises(ConfigError) as told:
        allhands.finetune(
            model=str(tiny_model),
            data="nowhere",
            adapter_path=str(tmp_path / "out"),
            callbacks=given,
        )
    assert told.value.where == "callbacks"
    assert says in (told.value.hint or "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [{}, [1], {"model": {"a": mx.zeros(3)}}, 5], ids=str)
def test_gradients_of_another_shape_are_refused(train: Any, wrong: Any) -> None:
    class Wrong(allhands.Callback):
        """Returns something else."""

        def after_backward(self, step: int, gradients: Any) -> Any:
            return wrong

    with pytest.raises(ConfigError) as told:
        train("wrong", Wrong())
    assert told.value.where == "after_backward"


class Stopper(allhands.Callback):
    """Sends signals to its own process, each after a step."""

    def __init__(self, signals: Sequence[tuple[int, int]], at: str) -> None:
        self.signals = signals
        self.at = at

    def _send(self, step: int, at: str) -> None:
        for after, number in self.signals:
            if (after, self.at) == (step, at):
                os.kill(os.getpid(), number)

    def on_train_report(self, report: Any) -> None:
        self._send(report.step, "report")

    def on_save(self, step: int, path: Path) -> None:
        self._send(step, "save")


@pytest.fixture
def own_run(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> Callable[..., Any]:
    def run(*signals: tuple[int, int], at: str = "report", **options: Any) -> Any:
        given: dict[str, Any] = {
            "iters": 4,
            "batch_size": 2,
            "val_batches": 0,
            "max_seq_length": 64,
            **options,
        }
        given |= {
            "model": str(tiny_model),
            "data": str(tiny_data),
            "adapter_path": str(tmp_path / "run"),
        }
        return allhands.finetune(
            callbacks=[Stopper(signals, at)], progress=False, steps_per_report=1, **given
        )

    return run


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """Those of a person's process: what runs the tests may have handlers of its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_in_a_persons_own_process_saves(
    own_run: Callable[..., Any], tmp_path: Path, number: int
) -> None:
    before = handlers()
    with pytest.raises(Interrupted, match="step 2 of 4"):
        own_run((2, number))
    assert handlers() == before
    assert read_metrics(tmp_path / "run").ended.reason == "interrupted"  # type: ignore[union-attr]
    assert own_run(resume="auto").ended.step == 4
    assert handlers() == before


def test_a_stop_after_the_last_step_is_for_what_follows(
    own_run: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        own_run((2, signal.SIGINT), iters=2, at="save")
    assert (tmp_path / "run" / "adapters.safetensors").is_file()


def test_the_second_stop_ends_at_once(own_run: Callable[..., Any], tmp_path: Path) -> None:
    before = handlers()
    with pytest.raises(KeyboardInterrupt):
        own_run((2, signal.SIGINT), (2, signal.SIGINT))
    assert handlers() == before
    assert read_metrics(tmp_path / "run").ended.reason == "interrupted"  # type: ignore[union-attr]


def test_an_echo_of_a_stop_is_no_second_one(own_run: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        own_run((2, signal.SIGTERM), (2, signal.SIGTERM))
    assert read_metrics(tmp_path / "run").ended.reason == "interrupted"  # type: ignore[union-attr]
    assert (tmp_path / "run" / "checkpoints" / "step-0000002").is_dir()


def test_a_persons_own_handler_stays(own_run: Callable[..., Any]) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        assert own_run((2, signal.SIGTERM)).ended.step == 4
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_script_that_is_stopped_ends_as_the_command(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, number: int, code: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import os
import allhands

class Stop(allhands.Callback):
    def on_train_report(self, report):
        if report.step == 2:
            os.kill(os.getpid(), {int(number)})

allhands.finetune(model={str(tiny_model)!r}, data={str(tiny_data)!r}, iters=50, batch_size=2, val_batches=0,
                  max_seq_length=64, steps_per_report=1, adapter_path="run", callbacks=[Stop()])
""")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run" / "adapters.safetensors").is_file()
