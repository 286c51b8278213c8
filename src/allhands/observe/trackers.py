"""Trackers: a run's numbers are sent through the trackers' own libraries, under mlx_lm's names.

Another thread sends the numbers, so the training never waits for a tracker that is slow or down.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from allhands.config.schema import TRACKERS
from allhands.errors import ConfigError
from allhands.io.formatting import counted
from allhands.observe.metrics import Event, RunEnded, TrainReport, ValidReport

_log = logging.getLogger(__name__)
# Names of environment variables that hold what must stay out of logs, and how long a value is that
# is worth hiding.
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)(_ID)?$", re.IGNORECASE)
_SECRET_LENGTH = 8


# What waits for a tracker that does not take it; older numbers are left out then.
_WAITING = 10_000
_PATIENCE_S = 20.0  # at the end, for what is left
_SLOW_S = 10.0  # that a tracker takes for one report, before it is said that it may be dead


class Tracker(Protocol):
    """Interface of a tracker: a run of ``wandb`` has it, the others are adapted."""

    def log(self, data: dict[str, Any], *, step: int) -> Any: ...

    def finish(self) -> Any: ...


class TrackerSink:
    """A sink of training and validation reports. The first error of the service causes a warning,
    and ends nothing.

    A client that retries a dead server without an error causes the warning, too.

    Args:
        patience_s: seconds that :meth:`close` waits for the service.
        slow_s: seconds that one report may take without a warning.
    """

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        *,
        patience_s: float = _PATIENCE_S,
        slow_s: float = _SLOW_S,
    ) -> None:
        self._name, self._tracker = name, tracker
        self._patience_s, self._slow_s = patience_s, slow_s
        self._warned = False
        self._waiting: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(_WAITING)
        # A daemon: what hangs in somebody else's client does not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"allhands-{name}", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        if values := tracked_values(event):
            try:
                self._waiting.put_nowait((values, getattr(event, "step", 0)))
            except queue.Full:
                self._warn("it is too slow")

    def close(self) -> None:
        end = time.monotonic() + self._patience_s
        with suppress(queue.Full):
            self._waiting.put(None, timeout=self._patience_s)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            left = self._waiting.qsize()
            self._warn(
                f"it does not answer, {counted(left, 'report')} {'is' if left == 1 else 'are'} left"
            )

    def _work(self) -> None:
        while (one := self._waiting.get()) is not None:
            late = threading.Timer(
                self._slow_s, self._warn, [f"it has not answered for {self._slow_s:g} s"]
            )
            late.daemon = True
            late.start()
            self._try(partial(self._tracker.log, one[0], step=one[1]))
            late.cancel()
        self._try(self._tracker.finish)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # somebody else's client, and the network behind it
            self._warn(str(error) or type(error).__name__)

    def _warn(self, why: str) -> None:
        first, self._warned = not self._warned, True
        if first:
            _log.warning(
                "%s takes no numbers (%s); the run goes on", self._name, without_secrets(why)
            )


def tracked_values(event: Event) -> dict[str, float]:
    """Return the numbers of ``event`` by mlx_lm's names; empty for events that have none. Memory is
    in GB.

    They are sent under the number of steps, which are optimizer updates. An iteration is a batch,
    of which a step may take several.
    """
    count = getattr(event, "iteration", None)
    iteration = {} if count is None else {"iteration": count}
    if isinstance(event, TrainReport):
        return {
            "train_loss": event.loss,
            **iteration,
            "learning_rate": event.learning_rate,
            "iterations_per_second": event.iterations_per_s,
            "tokens_per_second": event.trained_tokens_per_s,
            "trained_tokens": event.trained_tokens,
            "peak_memory": max(event.peak_memory_bytes, default=0) / 1e9,
            "grad_norm": event.grad_norm,
            **{f"train_{name}": value for name, value in event.metrics.items()},
        }
    if isinstance(event, ValidReport):
        more = {f"val_{name}": value for name, value in event.metrics.items()}
        return {"val_loss": event.loss, **iteration, "val_time": event.duration_s, **more}
    if isinstance(event, RunEnded) and event.test_loss is not None:
        return {"test_loss": event.test_loss}
    return {}


def without_secrets(text: str) -> str:
    """``text``, which somebody else's client wrote, less the keys and tokens of this process's
    environment.
    """
    secrets = {
        value
        for name, value in os.environ.items()
        if _SECRET.search(name) and len(value) >= _SECRET_LENGTH
    }
    for value in sorted(secrets, key=len, reverse=True):  # one may be a part of another
        text = text.replace(value, "***")
    return text


def tracker_names(report_to: str | None) -> list[str]:
    """``"wandb, swanlab"`` as a list, each once."""
    return list(
        dict.fromkeys(name.strip().lower() for name in (report_to or "").split(",") if name.strip())
    )


def require_trackers(names: Sequence[str]) -> None:
    """Find out before anything is loaded that a service's package is missing.

    Raises:
        ConfigError: it is not installed.
    """
    for name in names:
        package = TRACKERS[name]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{package} is not installed",
                code="package-missing",
                where="--report-to",
                hint=f"pip install {package}, or leave {name} out",
            )


def start_trackers(
    names: Sequence[str], project: str | None, directory: Path, config: Mapping[str, Any]
) -> list[TrackerSink]:
    """Open a run named after ``directory`` with each service.

    A service that does not answer, or fails in any other way, is warned about and left out: the run
    goes on.

    Raises:
        ConfigError: nobody is logged in.
    """
    started = [(name, _start(name, project, directory, config)) for name in names]
    return [TrackerSink(name, one) for name, one in started if one is not None]


def _start(
    name: str, project: str | None, directory: Path, config: Mapping[str, Any]
) -> Tracker | None:
    module: Any = importlib.import_module(TRACKERS[name])
    try:
        # Their clients ask a server that is down again and again: wandb for 100 seconds, MLflow for
        # minutes.
        return _in_time(partial(_STARTERS[name], module, project, directory, dict(config)))
    except Exception as error:  # their own classes, unknown here
        why = without_secrets(str(error)).strip().partition("\n")[0] or type(error).__name__
        if type(error).__name__ in _NOT_LOGGED_IN.get(name, ()):
            raise ConfigError(
                f"{name} cannot be started: {why}",
                code="tracker-not-started",
                where="--report-to",
                hint=f"log in first ({name} login), or leave --report-to out",
            ) from None
    _log.warning("%s cannot be started (%s): the run goes on without it", name, why)
    return None


# What they raise where no key, or none of a key's form, is found, which a person mends at once.
# SwanLab's own AuthenticationError is not one of these: it is raised for a server that is down as
# well.
_NOT_LOGGED_IN = {"wandb": ("UsageError", "AuthenticationError"), "swanlab": ("RuntimeError",)}


def _in_time(start: Callable[[], Tracker]) -> Tracker:
    """The tracker; ``TimeoutError`` if that takes longer than patience does. Its thread is left to
    itself then.

    Not in the main thread for SwanLab's sake as well: there it would take Ctrl-C for itself, and
    could not give it back from the sink's thread.
    """
    found: Future[Tracker] = Future()

    def work() -> None:
        try:
            found.set_result(start())
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=work, name="allhands-tracker-start", daemon=True).start()
    try:
        return found.result(_PATIENCE_S)
    except TimeoutError:
        raise TimeoutError(f"it does not answer within {_PATIENCE_S:.0f} s") from None


def _wandb(module: Any, project: str | None, directory: Path, config: dict[str, Any]) -> Tracker:
    # Beyond it the process would wait for the rest of wandb's own 90 s when it ends.
    settings = {} if os.environ.get("WANDB_INIT_TIMEOUT") else {"init_timeout": 0.75 * _PATIENCE_S}
    return module.init(
        project=project, name=directory.name, dir=str(directory), config=config, settings=settings
    )


def _swanlab(module: Any, project: str | None, directory: Path, config: dict[str, Any]) -> Tracker:
    options = {
        "project": project,
        "experiment_name": directory.name,
        "logdir": str(directory / "swanlog"),
    }
    module.init(config=config, **options)
    return module


def _trackio(module: Any, project: str | None, directory: Path, config: dict[str, Any]) -> Tracker:
    return module.init(project=project or _PROJECT, name=directory.name, config=config)


@dataclass(frozen=True)
class _Numbers:
    """A :class:`Tracker` of a client that takes one number at a time."""

    add: Callable[..., object]
    finish: Callable[[], object]
    flush: Callable[[], object] = lambda: None

    def log(self, data: dict[str, Any], *, step: int) -> None:
        for name, value in data.items():
            self.add(name, value, step)
        self.flush()


def _tensorboard(
    module: Any, project: str | None, directory: Path, config: dict[str, Any]
) -> Tracker:
    writer = module.SummaryWriter(logdir=str(directory / "tensorboard"))
    writer.add_text("config", "\n".join(f"    {name}: {value}" for name, value in config.items()))
    return _Numbers(writer.add_scalar, writer.close, writer.flush)


def _mlflow(module: Any, project: str | None, directory: Path, config: dict[str, Any]) -> Tracker:
    place: str | None = None
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        place = (directory / "mlruns").resolve().as_uri()
        module.set_tracking_uri(f"sqlite:///{(directory / 'mlflow.db').resolve()}")
    # The client for one run: its fluent functions would be for one thread each.
    client, name = module.MlflowClient(), project or _PROJECT
    known = client.get_experiment_by_name(name)
    experiment = (
        client.create_experiment(name, artifact_location=place)
        if known is None
        else known.experiment_id
    )
    run = client.create_run(experiment, run_name=directory.name).info.run_id
    for key, value in config.items():
        client.log_param(run, key, str(value)[:_LONGEST_PARAMETER])
    return _Numbers(
        lambda key, value, step: client.log_metric(run, key, value, step=step),
        lambda: client.set_terminated(run),
    )


_LONGEST_PARAMETER = 500  # which every store of MLflow takes
_PROJECT = "allhands"
_STARTERS: dict[str, Callable[[Any, str | None, Path, dict[str, Any]], Tracker]] = {
    "wandb": _wandb,
    "swanlab": _swanlab,
    "trackio": _trackio,
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
}
