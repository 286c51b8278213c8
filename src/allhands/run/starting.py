"""Choice of the weights that a run starts from, or tests."""

from __future__ import annotations

from pathlib import Path

from allhands.checkpoints import run_name
from allhands.checkpoints.rundir import kept_as
from allhands.config.pretrain_schema import pretraining
from allhands.config.schema import TrainConfig
from allhands.errors import ConfigError, ModelError
from allhands.io.paths import meant
from allhands.model.weight_files import is_weights
from allhands.run.context import RunContext


def starting_weights(config: TrainConfig, directory: Path, surroundings: RunContext) -> Path | None:
    """Return the existing file with the weights to start from or to test; ``None`` without any.

    Called before anything is loaded.

    Raises:
        ModelError: the file to start from does not exist.
        ConfigError: there is no adapter to test.
    """
    if config.resume_adapter_file:
        resumed = Path(config.resume_adapter_file)
        kept = kept_as(directory, resumed)
        if kept and surroundings.attempt > 1 and run_name(directory) == surroundings.run_id:
            return kept  # the first attempt has set it aside; the file there now is this run's own
        aside = (
            f"it was set aside when a new run began in {directory}: --resume-adapter-file {kept}"
        )
        require_weights(config, aside if kept else None)
        return resumed
    if config.test and not config.train:
        saved = directory / "adapters.safetensors"
        if not saved.exists():
            raise ConfigError(
                f"there is no adapter to test in {directory}",
                code="adapter-to-test-missing",
                where="--adapter-path",
                hint="train first (--train), or name the directory of an earlier run",
            )
        return saved
    return None


def require_weights(config: TrainConfig, hint: str | None = None) -> None:
    """Refuse a missing file of weights to start from; ``hint``: what to do, if it is known.

    Raises:
        ModelError: ``--resume-adapter-file`` is no file.
    """
    if not config.resume_adapter_file or (file := Path(config.resume_adapter_file)).is_file():
        return
    problem = (
        "this is a directory, not a file of weights" if file.is_dir() else "there is no such file"
    )
    weights = (
        "model.safetensors" if pretraining(config) else "adapters.safetensors, or a numbered one,"
    )
    raise ModelError(
        f"{problem} (--resume-adapter-file)",
        code="adapter-missing",
        where=str(file),
        hint=hint or meant(file, f"give the {weights} of an earlier run", is_weights),
    )
