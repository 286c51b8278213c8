"""Comparison of a resumed run with its checkpoint: settings, model, data and versions."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, cast

from allhands.checkpoints import Checkpoint
from allhands.checkpoints.format import WEIGHTS_FILE
from allhands.config.pretrain_schema import NUMBERS, pretraining
from allhands.config.schema import TrainConfig
from allhands.data.templates import TEMPLATE_FILE
from allhands.errors import CheckpointError, ConfigError, DataError, ModelError
from allhands.model.shapes import find_shape

# Settings of what is trained, on which samples, in which order: another value makes another run.
FIXED: frozenset[str] = frozenset(
    {
        *("fine_tune_type", "lora_parameters", "num_layers", "optimizer", "optimizer_config"),
        *("seed", "batch_size", "grad_accumulation_steps", "max_seq_length"),
        *("mask_prompt", "train_on", "packing", "isolate_documents", "master_weights"),
    }
)
# Fixed settings of a model that is trained from scratch. Its tokenizer is compared by the tokens of
# the data.
_SHAPE = frozenset({*NUMBERS, "shape", "dtype", "router_aux_loss"})
# Settings that may change when a run is resumed; a note reports the change.
TOLD: frozenset[str] = frozenset(
    {
        *(
            "iters",
            "epochs",
            "learning_rate",
            "lr_schedule",
            "warmup_steps",
            "weight_decay",
            "weight_decay_on",
        ),
        *(
            "max_grad_norm",
            "compress",
            "sync_every",
            "outer_lr",
            "outer_momentum",
            "sync_fragments",
            "sync_delay",
        ),
        *("val_batches", "early_stopping_patience", "early_stopping_min_delta", "non_finite"),
    }
)
# Settings of how and where the run is computed, reported and kept: they change numbers by rounding
# only. Model and data are compared by their content, not by their names.
FREE: frozenset[str] = frozenset(TrainConfig.model_fields) - FIXED - TOLD

_FLOATING = "the learning rate follows it over the whole run, so the rest of the curve changes"


def check_settings(checkpoint: Checkpoint, config: TrainConfig) -> list[str]:
    """Return notes on settings that differ from the checkpoint's.

    Raises:
        ConfigError: a setting that must be the same differs.
        CheckpointError: the checkpoint does not record its settings.
    """
    before = _settings_of(checkpoint, config)
    now = config.model_dump(mode="json")
    _check_fixed(checkpoint, config, before, now)
    if (
        checkpoint.state.get("chat_template") is not None
        and config.chat_template is None
        and config.system == "template"
    ):
        raise ConfigError(
            "the checkpoint was trained with a chat template that is not the model's own",
            code="resume-chat-template-missing",
            where="--chat-template",
            hint=f"give it again: --chat-template {checkpoint.path / TEMPLATE_FILE}",
        )
    notes = [
        f"{key} changed from {_words(before[key])} to {_words(now[key])}"
        for key in sorted(TOLD)
        if before[key] != now[key]
    ]
    stretched = before["iters"] != now["iters"] or before["epochs"] != now["epochs"]
    by_name = config.lr_schedule is not None and config.lr_schedule.name in ("linear", "cosine")
    if stretched and by_name:
        notes.append(
            f"the {now['lr_schedule']['name']} schedule runs over the new length: {_FLOATING}"
        )
    return notes


def _check_fixed(
    checkpoint: Checkpoint, config: TrainConfig, before: dict[str, Any], now: dict[str, Any]
) -> None:
    fresh = pretraining(config) is not None
    was, this = (_with_shape(before), _with_shape(now)) if fresh else (before, now)
    differing = [key for key in sorted(FIXED | _SHAPE if fresh else FIXED) if was[key] != this[key]]
    if not differing:
        return
    # A setting that was given comes before settings that follow from it, as head_dim from heads.
    key = next((key for key in differing if before[key] != now[key]), differing[0])
    hint = f"begin a new run from these weights with --resume-adapter-file {checkpoint.path / WEIGHTS_FILE}"
    if key in (*NUMBERS, "shape"):
        hint = "begin a new run, whose model has another shape, in a directory of its own: --adapter-path"
    raise ConfigError(
        f"the checkpoint was made with {_words(was[key])}, this is {_words(this[key])}: it would not be the same run",
        code="resume-settings-changed",
        where=f"--{key.replace('_', '-')}",
        hint=f"{_as_it_was(key, was[key])}; or {hint}",
    )


def _as_it_was(key: str, value: Any) -> str:
    """Return advice on how to give a setting the checkpoint's value."""
    flag = f"--{key.replace('_', '-')}"
    if value is None:
        return f"leave {flag} out, as it was"
    if isinstance(value, bool):
        return "leave it as it was"
    return f"give it as it was: {flag} {shlex.quote(_words(value))}"


def _with_shape(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with all numbers of the shape, so that a default that is given explicitly
    is no change.

    The vocabulary is left out: it may be the tokenizer's, and is compared with the model.
    """
    numbers = {**{name: settings[name] for name in NUMBERS}, "vocabulary": 1}
    found = asdict(find_shape(settings["shape"], numbers))
    return {**settings, **{name: found[name] for name in NUMBERS}}


def check_contents(
    checkpoint: Checkpoint,
    config: TrainConfig,
    model: Callable[[str], bool],
    data: Mapping[str, str | None],
    template: str | None = None,
) -> list[str]:
    """Compare model and data with the checkpoint's by content; return notes for the user.

    Args:
        model: returns whether a fingerprint is that of the model's weights.
        data: fingerprint of each split.
        template: the chat template that was chosen; ``None``: the model's own.

    Raises:
        ModelError: the model is another.
        DataError: the training data or the chat template are others.
    """
    state = checkpoint.state
    fresh = pretraining(config) is not None
    if not model(state["model"]["fingerprint"]):
        if fresh:
            raise ModelError(
                "the model is not the checkpoint's: the tokenizer has another vocabulary or other special tokens than "
                f"{state['model']['path']}, or --vocabulary or --dtype is another",
                code="resume-tokenizer-changed",
                where="--tokenizer",
                hint="name the tokenizer that the run began with",
            )
        raise ModelError(
            f"these are not the weights of {state['model']['path']}, from which the checkpoint was trained",
            code="resume-model-changed",
            where="--model",
            hint="name the model that the run began with",
        )
    if state["data"].get("train") != data.get("train"):
        raise _other_data(checkpoint, fresh, template)
    before, now = state["data"].get("valid"), data.get("valid")
    if before is not None and now is not None and before != now:
        return [
            "the validation data have changed: losses before and after cannot be compared, "
            "and the best weights are chosen anew"
        ]
    return []


def _other_data(checkpoint: Checkpoint, fresh: bool, template: str | None) -> DataError:
    """Return the error for other training data; another chat template is a possible reason."""
    trained_with = checkpoint.state.get("chat_template")
    if trained_with != template:
        hint = "leave out --chat-template and --system: it was the model's own"
        if trained_with is not None:
            hint = f"give --chat-template {checkpoint.path / TEMPLATE_FILE}, which was used, and leave out --system"
        return DataError(
            "the chat template, or the place of system messages in it, is not the one of the checkpoint",
            code="resume-chat-template-changed",
            where="--chat-template",
            hint=hint,
        )
    return DataError(
        "the training data, or how they become tokens, are not those that the checkpoint was trained on",
        code="resume-data-changed",
        where="--data",
        hint=f"name the data{' and the tokenizer' if fresh else ''} that the run began with; or begin a new run from "
        f"these weights with --resume-adapter-file {checkpoint.path / WEIGHTS_FILE}",
    )


def check_versions(checkpoint: Checkpoint, versions: Mapping[str, str]) -> list[str]:
    """Return a note if versions of software differ from the checkpoint's."""
    before: dict[str, str] = checkpoint.state["versions"]
    names = [name for name in before if before[name] != versions.get(name)]
    if not names:
        return []
    changes = ", ".join(f"{name} {before[name]} -> {versions.get(name)}" for name in names)
    return [f"changed since the checkpoint: {changes}; results may differ by rounding"]


def _settings_of(checkpoint: Checkpoint, config: TrainConfig) -> dict[str, Any]:
    """Return all settings that the checkpoint was made with.

    A setting that the checkpoint does not know has its default.
    """
    saved = checkpoint.state.get("config")
    if not isinstance(saved, dict):
        raise CheckpointError(
            "it does not say which settings it was made with",
            code="checkpoint-incomplete",
            where=str(checkpoint.path),
            hint="give a checkpoint of allhands train",
        )
    defaults = type(config).model_construct().model_dump(mode="json")
    given = cast("dict[str, Any]", saved)
    known = {key: value for key, value in given.items() if key in defaults}
    return {**defaults, **known}


def _words(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)
