"""Check of an adapter's two files before its model is loaded; errors have a remedy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from allhands.checkpoints import is_checkpoint, look_at, survey
from allhands.errors import AllhandsError, ConfigError, ModelError
from allhands.io.files import of_peft
from allhands.io.names import (
    BEST,
    BEST_MODEL,
    CHECKPOINTS,
    CONFIG_FILE,
    LOGS,
    MODEL,
    MODELS_OF_A_RUN,
)
from allhands.io.paths import meant
from allhands.model.weight_files import is_model
from allhands.observe.judging import harm
from allhands.observe.metrics import RunHistory, read_metrics

WEIGHTS_FILE = "adapters.safetensors"
_FILES = (CONFIG_FILE, WEIGHTS_FILE)
_ELSE = "give the directory that allhands train wrote (--adapter-path there)"
_OTHERWISE = (
    f"{_ELSE}, once it has saved (--save-every); a model is for --model, data is for --data"
)
_NUMBERED = f"[0-9]*_{WEIGHTS_FILE}"


def check_adapter(adapter_path: Path) -> None:
    """Check an adapter before a model is loaded for it.

    Raises:
        ModelError: one of the adapter's two files is missing, or cannot be read or used.
    """
    config, weights = adapter_path / CONFIG_FILE, adapter_path / WEIGHTS_FILE
    for file in (config, weights):
        if not file.is_file():
            found, hint = what_is(adapter_path)
            raise ModelError(
                f"{file.name} is missing: {found}",
                code="adapter-missing",
                where=str(adapter_path),
                hint=hint,
            )
    try:
        described: Any = json.loads(config.read_text(encoding="utf-8"))
        wrong = _wrong_in(described)
    except (ValueError, RecursionError, OSError) as error:
        raise _torn(config, f"the file is torn: {error}", code="adapter-torn") from None
    if wrong:
        raise _torn(config, f"this does not describe an adapter: {wrong}", code="adapter-invalid")
    if torn := _torn_by(weights):
        raise _torn(weights, f"the file is torn: {torn}", code="adapter-torn")


def _torn(file: Path, problem: str, *, code: str) -> ModelError:
    other = instead_of(file.parent)
    missing = "train again, or take the file from the run that the adapter came from"
    return ModelError(problem, code=code, where=str(file), hint=other or missing)


def _wrong_in(described: Any) -> str | None:
    """Return why mlx_lm cannot use an adapter with this configuration; None if it can."""
    if not isinstance(described, dict):
        return "it is not an object"
    content = cast("dict[str, Any]", described)
    settings = content.get("lora_parameters")
    if content.get("fine_tune_type", "lora") == "full":
        return None
    if not isinstance(settings, dict):
        return "there are no lora_parameters"
    found = {**content, **cast("dict[str, Any]", settings)}
    wrong = (
        name
        for name in ("num_layers", "rank", "scale")
        if not isinstance(found.get(name), int | float)
    )
    return next((f"{name} is no number" for name in wrong), None)


# --- other weights of the run ---------------------------------------------------------------------


def run_of(adapter_path: Path) -> Path:
    """Return the directory of the run that weights belong to.

    This is ``adapter_path``, or the directory above it for ``best``, ``model`` or a checkpoint.
    """
    path = adapter_path.absolute()
    if path.parent.name == CHECKPOINTS:
        return adapter_path.parent.parent
    within = path.name in (BEST, CHECKPOINTS, LOGS, *MODELS_OF_A_RUN)
    return adapter_path.parent if within else adapter_path


def model_below(adapter_path: Path, config: dict[str, Any]) -> str:
    """Return the model that an adapter is for, as its ``config`` says.

    A checkpoint of pre-training belongs to the model that its run has written.

    Raises:
        ConfigError: the config names no model, or the run has not written its model yet.
    """
    below, hint = config.get("model"), "say which model is below it: --model"
    if not {"shape", "tokenizer"} <= set(config):
        if isinstance(below, str):
            return below
        raise ConfigError(
            "adapter_config.json names no model",
            code="adapter-without-model-name",
            where=str(adapter_path),
            hint=hint,
        )
    written = run_of(adapter_path) / MODEL
    if (written / "config.json").is_file():
        return str(written)
    hint = "let the training end (with --resume if it was interrupted); then it writes its model"
    raise ConfigError(
        f"a checkpoint of pre-training, and {written} is not there",
        code="base-model-missing",
        where=str(adapter_path),
        hint=hint,
    )


def instead_of(adapter_path: Path) -> str | None:
    """Return a hint to whole weights of the same run that can be used instead; ``None`` without
    any.
    """
    run = run_of(adapter_path)
    try:
        found = survey(run)
    except AllhandsError:
        return None
    whole = [
        (one.checkpoint.step, one.path)
        for one in found
        if one.checkpoint is not None and one.error is None
    ]
    for step, path in whole:
        if path.resolve() != adapter_path.resolve() and _holds_adapter(path):
            return f"the checkpoint of step {step} is whole: --adapter-path {path}"
    numbered = [
        file.name for file in sorted(run.glob(_NUMBERED), reverse=True) if not _torn_by(file)
    ]
    if numbered and run.resolve() == adapter_path.resolve():
        return f"{numbered[0]} beside it can be read: copy it to {WEIGHTS_FILE}, with the {CONFIG_FILE} of the run"
    return None


def _torn_by(weights: Path) -> Exception | None:
    """Return the error with which MLX fails to read a file; ``None`` if the file can be read."""
    import mlx.core as mx

    try:
        mx.load(str(weights))
    except (ValueError, RuntimeError, OSError) as error:
        return error
    return None


def _holds_adapter(directory: Path) -> bool:
    return all((directory / name).is_file() for name in _FILES)


def what_is(directory: Path) -> tuple[str, str]:
    """Return the content of a place where an adapter was looked for, and a remedy, in words."""
    if not directory.exists():
        return "there is no such directory", meant(directory, _ELSE, _holds_adapter)
    if not directory.is_dir():
        hint = f"give the directory that it is in: --adapter-path {directory.parent}"
        return "this is a file, not a directory", hint
    names = sorted(path.name for path in directory.iterdir())
    shown = ", ".join(names[:5]) + ", ..." * (len(names) > 5)
    # A run of pre-training has models; they come before its checkpoints, which hold no adapter
    # either.
    inside = [
        f"--model {path}" for path in sorted(directory.glob("*/"), reverse=True) if is_model(path)
    ]
    inside += [
        f"--adapter-path {path}" for path in sorted(directory.glob("*/")) if _holds_adapter(path)
    ]
    if peft := of_peft(directory):
        hint = peft.partition(": ")[2]
    else:
        hint = (
            f"give one of those in it: {inside[0]}"
            if inside
            else instead_of(directory) or _OTHERWISE
        )
    return f"the directory holds {shown or 'nothing'}", hint


# --- the course of the run ------------------------------------------------------------------------


def warning_of(adapter_path: Path | None, model: str | None = None) -> str | None:
    """Return a warning about the run in which the weights were trained, if it went badly.

    The weights are an adapter, or else a model of pre-training. The run is judged up to their step:
    later steps did them no harm.
    """
    weights = adapter_path
    if weights is None and model is not None and Path(model).name in MODELS_OF_A_RUN:
        weights = Path(model)
    if weights is None:
        return None
    try:
        history = read_metrics(run_of(weights))
        found = harm(_until(history, _step_of(weights, history)))
    except (AllhandsError, OSError):
        return None
    return f"{weights}: {found[0].text}" if found else None


def _step_of(weights: Path, history: RunHistory) -> int | None:
    """Return the step after which weights were written; ``None`` for the last step."""
    if weights.name in (BEST, BEST_MODEL):
        validated = history.comparable
        return min(validated, key=lambda one: one.loss).step if validated else None
    if not is_checkpoint(weights):
        return None
    found = look_at(weights, verify=False)
    return found[0].checkpoint.step if found and found[0].checkpoint is not None else None


def _until(history: RunHistory, step: int | None) -> RunHistory:
    if step is None:
        return history
    kept: dict[str, Any] = {
        name: [one for one in getattr(history, name) if one.step <= step]
        for name in ("train", "valid", "skipped")
    }
    return replace(history, **kept)
