"""Check that a run may write into a directory: it must not be an input of the run, or hold files of
another program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from allhands.checkpoints.layout import RUN_NAME, best_in, checkpoints_in, entries
from allhands.config.pretrain_schema import pretraining
from allhands.config.schema import TrainConfig
from allhands.errors import CheckpointError, ConfigError
from allhands.io.names import (
    ANSWERS_FILE,
    BEST,
    CHECKPOINTS,
    CONFIG_FILE,
    MEMORY_FILE,
    METRICS_FILE,
    MODELS_OF_A_RUN,
    PLOT_FILE,
)

# Names that a run replaces or sets aside.
_REPLACED = (CHECKPOINTS, BEST, PLOT_FILE, MEMORY_FILE, ANSWERS_FILE)
_TRAINERS = (
    "trainer_state.json",
    "training_args.bin",
    "pytorch_model.bin",
    "adapter_model.safetensors",
)
_HINT = "choose a directory that is new, empty, or an earlier run's"


def require_place_of_run(config: TrainConfig) -> None:
    """Check that the run of ``config``, if it trains, may write into its directory.

    Raises:
        ConfigError: the directory is, or lies in, that of the model or the data; it holds the model
            under a name that the run replaces; or it holds files of another program.
    """
    if not config.train:
        return
    directory = Path(config.adapter_path)
    place = directory.resolve()
    for name, flag in (
        (None if pretraining(config) else config.model, "--model"),
        (config.data, "--data"),
    ):
        if name is None or not Path(name).is_dir():
            continue
        inputs = Path(name).resolve()
        if place.is_relative_to(inputs):
            raise _refused(
                directory,
                f"it is, or lies in, the directory of {flag} {name}, an input of the run",
                code="output-place-unsuitable",
            )
        if (
            flag == "--model"
            and inputs.is_relative_to(place)
            and inputs.relative_to(place).parts[0] in MODELS_OF_A_RUN
        ):
            raise _refused(
                directory,
                f"{flag} {name} lies in it, and would be set aside for the new run's",
                code="output-place-unsuitable",
            )
    try:
        foreign = next(_foreign(directory), None)
    except OSError:  # the first writer to the directory reports the error
        return
    if foreign is not None:
        raise _refused(
            directory,
            f"it holds {foreign}, which no run of allhands has written",
            code="place-taken",
        )


def _refused(directory: Path, problem: str, *, code: str) -> ConfigError:
    return ConfigError(problem, code=code, where=f"--adapter-path {directory}", hint=_HINT)


def _foreign(directory: Path) -> Iterator[str]:
    """Yield the names of files and folders that another program has written there."""
    names = {path.name for path in entries(directory)}
    yield from (name for name in _TRAINERS if name in names)
    signs: dict[str, Callable[[], bool]] = {
        "config.json": lambda: any(directory.glob("model*.safetensors")),
        CONFIG_FILE: lambda: "peft_type" in _json(directory / CONFIG_FILE),
        METRICS_FILE: lambda: not _is_ours(directory / METRICS_FILE),
    }
    yield from (name for name, is_foreign in signs.items() if name in names and is_foreign())
    if not (
        names & {RUN_NAME, METRICS_FILE, CONFIG_FILE}
        or best_in(directory)
        or _has_checkpoints(directory)
    ):
        yield from (name for name in _REPLACED if name in names)


def _json(path: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}


def _is_ours(metrics: Path) -> bool:
    """Return True if one of the first lines is an event of a run, or no line is whole."""
    from allhands.observe.metrics.events import OPENED, decode_event

    with metrics.open(encoding="utf-8", errors="replace") as lines:
        first = [line for _, line in zip(range(20), lines, strict=False) if line.endswith("\n")]
    ours = (line.strip() == OPENED or decode_event(line) is not None for line in first)
    return not first or any(ours)


def _has_checkpoints(directory: Path) -> bool:
    try:
        return bool(checkpoints_in(directory))
    except CheckpointError:
        return True
