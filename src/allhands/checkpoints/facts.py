"""The run of a checkpoint in words, as far as the checkpoint records it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast

from allhands.checkpoints.reading import Checkpoint
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import TrainConfig
from allhands.data.dates import DATE_KEY
from allhands.io.formatting import format_count, format_duration, format_minute, format_size

ID_DIGITS = 8  # of a run or a SHA-256 sum


def facts_of(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the known facts of the run by name, the most important ones first."""
    state = checkpoint.state

    def told(key: str, words: Callable[[float], str]) -> str | None:
        value = state.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return words(value)

    at = told("best_step", " at step {:.0f}".format)
    model, content = _mapping(state.get("model")), dict(_mapping(state.get("data")))
    date = content.pop(DATE_KEY, None)
    facts = {
        "step": checkpoint.step,
        "iteration": checkpoint.iteration,
        "epoch": told("epoch", "{:.4g}".format),
        "trained tokens": told("trained_tokens", format_count),
        "best loss": told("best_loss", lambda loss: f"{loss:.4g}{at or ''}"),
        "written": format_minute(checkpoint.time),
        "run": checkpoint.run_id,
        "size": format_size(checkpoint.num_bytes),
        "trained for": told("elapsed_s", format_duration),
        "ranks": told("world_size", "{:.0f}".format),
        # A new model has only its tokenizer from another model.
        "tokenizer" if _schema_of(checkpoint) is PretrainConfig else "model": model.get("path"),
        "its fingerprint": str(model["fingerprint"])[:ID_DIGITS]
        if "fingerprint" in model
        else None,
        "data": _listed({name: str(sha)[:ID_DIGITS] for name, sha in content.items() if sha}),
        "date in its chats": str(date)[:10] if date else None,
        "versions": _listed(_mapping(state.get("versions"))),
    }
    return {name: value for name, value in facts.items() if value is not None}


def changed_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings of the run that are not the defaults, by name, sorted."""
    defaults = _schema_of(checkpoint).model_construct().model_dump(mode="json")
    settings = _mapping(checkpoint.state.get("config"))
    return {
        name: value
        for name, value in sorted(settings.items())
        if name not in defaults or value != defaults[name]
    }


def kinds_of_arrays(checkpoint: Checkpoint) -> dict[str, list[tuple[str, str, str]]]:
    """Return name, type with its count, and shape of the arrays, by group.

    Equal arrays of different layers are one kind; ``*`` stands for any number in their names.
    """
    groups: dict[str, Counter[tuple[str, str, str]]] = defaultdict(Counter)
    for it in checkpoint.arrays:
        group, _, name = it.name.partition(".")
        shape = "x".join(map(str, it.shape)) or "one number"
        groups[group][re.sub(r"\d+", "*", name), it.dtype, shape] += 1
    return {
        group: [
            (name, f"{count} of {dtype}", shape)
            for (name, dtype, shape), count in sorted(kinds.items())
        ]
        for group, kinds in groups.items()
    }


def _schema_of(checkpoint: Checkpoint) -> type[TrainConfig]:
    fresh = "tokenizer" in _mapping(checkpoint.state.get("config"))
    return PretrainConfig if fresh else TrainConfig


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _listed(values: Mapping[str, object]) -> str | None:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or None
