"""Sends a run's numbers to wandb or swanlab, under the names that mlx_lm gives them."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from allhands.errors import ConfigError
from allhands.metrics import Event, RunEnded, TrainReport, ValidReport

_log = logging.getLogger(__name__)
# Names of environment variables that hold what must stay out of logs, and how long a value is that is worth hiding.
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)(_ID)?$", re.IGNORECASE)
_SECRET_LENGTH = 8


class Tracker(Protocol):
    """What is used of ``wandb``'s run and of the module ``swanlab``."""

    def log(self, data: dict[str, Any], *, step: int) -> Any: ...

    def finish(self) -> Any: ...


class TrackerSink:
    """A sink of training and validation reports; an error of the service is warned about once and ends nothing."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker = tracker
        self._warned = False

    def emit(self, event: Event) -> None:
        if values := tracked_values(event):
            try:
                self._tracker.log(values, step=getattr(event, "step", 0))
            except Exception as error:  # somebody else's client, and the network behind it
                self._warn(error)

    def close(self) -> None:
        try:
            self._tracker.finish()
        except Exception as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s takes no numbers (%s); the run goes on", self._name, without_secrets(str(error)))


def tracked_values(event: Event) -> dict[str, float]:
    """The numbers of ``event`` by mlx_lm's names; empty for events that have none. Memory is in GB."""
    if isinstance(event, TrainReport):
        return {
            "train_loss": event.loss,
            "learning_rate": event.learning_rate,
            "iterations_per_second": 1.0 / event.step_time_s if event.step_time_s else 0.0,
            "tokens_per_second": event.trained_tokens_per_s,
            "trained_tokens": event.trained_tokens,
            "peak_memory": max(event.peak_memory_bytes, default=0) / 1e9,
            "grad_norm": event.grad_norm,
        }
    if isinstance(event, ValidReport):
        return {"val_loss": event.loss, "val_time": event.duration_s}
    if isinstance(event, RunEnded) and event.test_loss is not None:
        return {"test_loss": event.test_loss}
    return {}


def without_secrets(text: str) -> str:
    """``text``, which somebody else's client wrote, less the keys and tokens of this process's environment."""
    secrets = {value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= _SECRET_LENGTH}
    for value in sorted(secrets, key=len, reverse=True):  # one may be a part of another
        text = text.replace(value, "***")
    return text


def tracker_names(report_to: str | None) -> list[str]:
    """``"wandb, swanlab"`` as a list, each once."""
    return list(dict.fromkeys(name.strip().lower() for name in (report_to or "").split(",") if name.strip()))


def require_trackers(names: Sequence[str]) -> None:
    """Find out before anything is loaded that a service's package is missing.

    Raises:
        ConfigError: it is not installed.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{name} is not installed", where="--report-to", hint=f"pip install {name}, or leave --report-to out"
            )


def start_trackers(
    names: Sequence[str], project: str | None, directory: Path, config: Mapping[str, Any]
) -> list[TrackerSink]:
    """Open a run named after ``directory`` with each service.

    Raises:
        ConfigError: a service refuses, most often because nobody is logged in.
    """
    return [TrackerSink(name, _start(name, project, directory, config)) for name in names]


def _start(name: str, project: str | None, directory: Path, config: Mapping[str, Any]) -> Tracker:
    module: Any = importlib.import_module(name)
    try:
        if name == "wandb":
            return module.init(project=project, name=directory.name, dir=str(directory), config=dict(config))
        log_directory = str(directory / "swanlog")
        module.init(project=project, experiment_name=directory.name, logdir=log_directory, config=dict(config))
        return module
    except Exception as error:  # their own classes, unknown here
        first = without_secrets(str(error)).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{name} cannot be started: {first}",
            where="--report-to",
            hint=f"log in first ({name} login), or leave --report-to out",
        ) from None
