"""Numbers for trackers, through stand-ins for their packages; and what ``verbose`` tells."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from allhands.config.schema import build_config
from allhands.errors import ConfigError
from allhands.kernels.selection import FORMS
from allhands.observe.metrics import RunEnded, SavedReport, TrainReport, ValidReport, read_metrics
from allhands.observe.trackers import TrackerSink, start_trackers, tracked_values, tracker_names
from allhands.run.session import RunContext, run_finetune

TRAIN = TrainReport(
    step=10,
    loss=2.5,
    learning_rate=1e-4,
    grad_norm=0.7,
    tokens_per_s=900.0,
    trained_tokens_per_s=600.0,
    trained_tokens=6000,
    step_time_s=0.25,
    data_wait_s=0.0,
    comm_s=0.0,
    elapsed_s=3.0,
    peak_memory_bytes=(500_000_000, 750_000_000),
    epoch=0.5,
    iteration=30,
    iterations_per_s=12.0,
)


@dataclass
class Service:
    """What a fake package was asked to do."""

    started: dict[str, Any] = field(default_factory=dict)
    logged: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    finished: int = 0
    fails: bool = False
    refusal: type[Exception] = ConnectionError
    in_main_thread: bool | None = None

    def init(self, **options: Any) -> Service:
        self.in_main_thread = threading.current_thread() is threading.main_thread()
        if self.fails:
            raise self.refusal("no API key\nrun login")
        self.started = options
        return self

    def log(self, data: dict[str, Any], step: int) -> None:
        if self.fails:
            raise ConnectionError("the network is down")
        self.logged.append((step, data))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> dict[str, Service]:
    """Both packages "installed"."""
    made: dict[str, Service] = {}
    for name in ("wandb", "swanlab"):
        service, module = Service(), ModuleType(name)
        for function in ("init", "log", "finish"):
            setattr(module, function, getattr(service, function))
        module.__spec__ = sys.__spec__
        monkeypatch.setitem(sys.modules, name, module)
        made[name] = service
    return made


def test_names_are_understood_as_people_write_them() -> None:
    assert tracker_names("wandb") == ["wandb"]
    assert tracker_names(" WandB, swanlab,wandb ,") == ["wandb", "swanlab"]
    assert tracker_names(None) == tracker_names("") == []


def test_the_numbers_have_mlx_lms_names_and_units() -> None:
    assert tracked_values(TRAIN) == {
        "iteration": 30,
        "train_loss": 2.5,
        "learning_rate": 1e-4,
        "iterations_per_second": 12.0,
        "tokens_per_second": 600.0,
        "trained_tokens": 6000,
        "peak_memory": 0.75,
        "grad_norm": 0.7,
    }
    valid = ValidReport(20, 1.5, 300, 9.0, 2.0, True, iteration=60)
    assert tracked_values(valid) == {"iteration": 60, "val_loss": 1.5, "val_time": 2.0}
    assert tracked_values(RunEnded(20, "finished", 9.0, test_loss=1.25)) == {"test_loss": 1.25}
    assert (
        tracked_values(RunEnded(20, "finished", 9.0)) == tracked_values(SavedReport(20, "x")) == {}
    )


def test_both_services_get_a_run_named_after_its_directory(
    services: dict[str, Service], tmp_path: Path
) -> None:
    directory = tmp_path / "tea-talk"
    sinks = start_trackers(["wandb", "swanlab"], "tests", directory, {"seed": 3})
    assert services["wandb"].started == {
        "project": "tests",
        "name": "tea-talk",
        "dir": str(directory),
        "config": {"seed": 3},
        "settings": {"init_timeout": 15.0},
    }
    assert services["swanlab"].started == {
        "project": "tests",
        "experiment_name": "tea-talk",
        "logdir": str(directory / "swanlog"),
        "config": {"seed": 3},
    }
    # SwanLab sets a handler of Ctrl-C where it is started in the main thread.
    assert services["swanlab"].in_main_thread is False
    for sink in sinks:
        sink.emit(TRAIN)
        sink.close()
    for service in services.values():
        assert [(step, data["train_loss"]) for step, data in service.logged] == [(10, 2.5)]
        assert service.finished == 1


def test_a_failing_service_is_warned_about_once_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = TrackerSink("wandb", Service(fails=True))
    for _ in range(3):
        sink.emit(TRAIN)
    sink.close()
    assert [record.getMessage() for record in caplog.records] == [
        "wandb takes no numbers (the network is down); the run goes on"
    ]


def test_a_service_that_died_is_told_of_when_it_does_and_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    died, back = threading.Event(), threading.Event()

    class Dies(Service):
        """As MLflow's client, which asks again and again."""

        def log(self, data: dict[str, Any], step: int) -> None:
            if died.is_set():
                back.wait(30)

        def finish(self) -> None:
            time.sleep(0.3)  # which is no sign of death: it sends what is left

    sink = TrackerSink("mlflow", Dies(), patience_s=5, slow_s=0.1)
    sink.emit(TRAIN)
    time.sleep(0.3)
    assert not caplog.records
    died.set()
    sink.emit(TRAIN)
    time.sleep(0.5)
    assert "mlflow takes no numbers (it has not answered for 0.1 s); the run goes on" in caplog.text
    back.set()
    sink.emit(TRAIN)
    sink.close()
    assert len(caplog.records) == 1


def test_a_service_that_hangs_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    never = threading.Event()

    class Hangs(Service):
        def log(self, data: dict[str, Any], step: int) -> None:
            never.wait(30)

    sink = TrackerSink("wandb", Hangs(), patience_s=0.2)
    begun = time.monotonic()
    for _ in range(3):
        sink.emit(TRAIN)
    assert time.monotonic() - begun < 0.1
    sink.close()
    assert time.monotonic() - begun < 2
    assert (
        "wandb takes no numbers (it does not answer, 3 reports are left); the run goes on"
        in caplog.text
    )
    never.set()


def test_tensorboard_gets_files_beside_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through a stand-in; with the real package where it is installed."""
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, logdir: str) -> None:
            assert logdir == str(tmp_path / "tensorboard")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def add_text(self, name: str, text: str) -> None:
            assert (name, text) == ("config", "    seed: 3")

        def flush(self) -> None:
            pass

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    module = ModuleType("tensorboardX")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    (sink,) = start_trackers(["tensorboard"], None, tmp_path, {"seed": 3})
    sink.emit(TRAIN)
    sink.close()
    assert written[0] == ("train_loss", 2.5, 10)
    assert [name for name, _, _ in written[-2:]] == ["grad_norm", "closed"]


def test_the_real_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (sink,) = start_trackers(["tensorboard"], None, tmp_path, {"seed": 3})
    sink.emit(TRAIN)
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train_loss")] == [(10, 2.5)]


def test_mlflow_and_trackio_get_runs_of_the_project(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    told: list[tuple[Any, ...]] = []

    class Client:
        def get_experiment_by_name(self, name: str) -> None:
            told.append(("look", name))

        def create_experiment(self, name: str, artifact_location: str) -> str:
            told.append(("experiment", name, artifact_location))
            return "7"

        def create_run(self, experiment: str, run_name: str) -> Any:
            told.append(("run", experiment, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        def log_param(self, run: str, name: str, value: str) -> None:
            told.append(("parameter", run, name, value))

        def log_metric(self, run: str, name: str, value: float, step: int) -> None:
            told.append(("metric", run, name, value, step))

        def set_terminated(self, run: str) -> None:
            told.append(("end", run))

    mlflow, trackio, service = ModuleType("mlflow"), ModuleType("trackio"), Service()
    mlflow.MlflowClient = Client  # type: ignore[attr-defined]
    mlflow.set_tracking_uri = lambda uri: told.append(("store", uri))  # type: ignore[attr-defined]
    trackio.init = service.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    for sink in start_trackers(["mlflow", "trackio"], None, tmp_path, {"seed": 3}):
        sink.emit(TRAIN)
        sink.close()
    assert told[:5] == [
        ("store", f"sqlite:///{tmp_path}/mlflow.db"),
        ("look", "allhands"),
        ("experiment", "allhands", f"file://{tmp_path}/mlruns"),
        ("run", "7", tmp_path.name),
        ("parameter", "r1", "seed", "3"),
    ]
    assert ("metric", "r1", "train_loss", 2.5, 10) in told
    assert told[-1] == ("end", "r1")
    assert service.started == {"project": "allhands", "name": tmp_path.name, "config": {"seed": 3}}
    assert (service.logged[0][0], service.finished) == (10, 1)


@pytest.mark.parametrize(
    ("name", "refusal"),
    [("wandb", "UsageError"), ("wandb", "AuthenticationError"), ("swanlab", "RuntimeError")],
)
def test_that_nobody_is_logged_in_is_said_before_training(
    services: dict[str, Service], tmp_path: Path, name: str, refusal: str
) -> None:
    services[name].fails, services[name].refusal = True, type(refusal, (Exception,), {})
    with pytest.raises(
        ConfigError, match=rf"{name} cannot be started: no API key\n  what"
    ) as caught:
        start_trackers([name], None, tmp_path, {})
    assert caught.value.where == "--report-to"
    assert f"{name} login" in str(caught.value.hint)


def test_a_service_that_is_down_does_not_keep_training_from_beginning(
    services: dict[str, Service], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    services["wandb"].fails = services["swanlab"].fails = True
    services["wandb"].refusal = type("CommError", (Exception,), {})
    # SwanLab says this both of a wrong key and of a server that is down.
    services["swanlab"].refusal = type("AuthenticationError", (Exception,), {})
    assert start_trackers(["wandb", "swanlab"], None, tmp_path, {}) == []
    for name in ("wandb", "swanlab"):
        assert f"{name} cannot be started (no API key): the run goes on without it" in caplog.text


def test_a_services_message_is_told_without_keys(
    services: dict[str, Service],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdefgh1234")
    monkeypatch.setenv("OTHER_TOKEN", "abcdefgh1234-longer")
    monkeypatch.setenv("HARMLESS", "wandb.example")
    monkeypatch.setenv("SHORT_KEY", "for")

    class UsageError(Exception):
        """As wandb's."""

    def refuse(**_: Any) -> None:
        raise UsageError("wandb.example has no user for abcdefgh1234-longer or abcdefgh1234")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(ConfigError) as caught:
        start_trackers(["wandb"], None, tmp_path, {})
    assert (
        caught.value.message == "wandb cannot be started: wandb.example has no user for *** or ***"
    )
    services["wandb"].log = lambda *_, **__: refuse()  # type: ignore[method-assign]
    sink = TrackerSink("wandb", services["wandb"])
    sink.emit(TRAIN)
    sink.close()
    assert "no user for *** or ***" in caplog.text
    assert "abcdefgh" not in caplog.text


def test_a_missing_package_is_found_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "swanlab", None)
    config = build_config({"train": True, "model": "/no/such/model", "report_to": "swanlab"})
    with pytest.raises(ConfigError, match="swanlab is not installed") as caught:
        run_finetune(config, RunContext())
    assert caught.value.where == "--report-to"
    assert "pip install swanlab" in str(caught.value.hint)


def test_a_project_without_a_service_is_refused() -> None:
    with pytest.raises(ConfigError, match="--project-name has an effect only with --report-to"):
        build_config({"project_name": "tea"})


def trained(model: Path, data: Path, out: Path, **options: Any) -> tuple[Path, str]:
    """Run directory and console text of a run of four steps."""
    screen = io.StringIO()
    values = {
        "train": True,
        "model": str(model),
        "data": str(data),
        "adapter_path": str(out),
        "iters": 4,
    }
    values |= {"steps_per_report": 2, "steps_per_eval": 4, "num_layers": 2, "val_batches": 1}
    config = build_config({**values, **options})
    run_finetune(config, RunContext(console=Console(file=screen, width=60)))
    return out, screen.getvalue()


def test_a_run_reports_what_its_own_record_says(
    services: dict[str, Service], tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    out, _ = trained(
        tiny_model, tiny_data, tmp_path / "run", report_to="wandb", project_name="tea", test=True
    )
    record, service = read_metrics(out), services["wandb"]
    assert service.started["config"]["project_name"] == "tea"
    losses = {step: data["train_loss"] for step, data in service.logged if "train_loss" in data}
    assert losses == {report.step: report.loss for report in record.train}
    assert list(losses) == [2, 4]
    validations = {step: data["val_loss"] for step, data in service.logged if "val_loss" in data}
    assert validations == {report.step: report.loss for report in record.valid}
    assert [data["test_loss"] for _, data in service.logged if "test_loss" in data] == [
        record.ended.test_loss
    ]
    assert service.finished == 1
    assert services["swanlab"].started == {}


def test_verbose_tells_each_choice_and_normal_none(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    _, quiet = trained(tiny_model, tiny_data, tmp_path / "quiet")
    assert "chosen:" not in quiet
    _, text = trained(
        tiny_model, tiny_data, tmp_path / "verbose", log_level="verbose", micro_batch_tokens=300
    )
    lines = dict(
        line.removeprefix("chosen: ").split(": ", 1)
        for line in text.splitlines()
        if "chosen: " in line
    )
    names = ["device", "matrix products", "micro-batches", "step", "loss"]
    # Of each operation's form tests/unit/test_kernel_forms.py has more.
    assert [name for name in lines if name not in FORMS] == names
    # Of passes tests/unit/test_passes.py has more.
    assert "pass: fused blocks: not applied" in text
    assert "pass:" not in quiet
    assert lines["micro-batches"].startswith("at most 300 tokens (asked for)")
    assert lines["loss"] == "chunked over the vocabulary, at the trained tokens only"
    assert re.search(r"shapes of micro-batches: [1-9]\d* computed, none of them compiled", text)
