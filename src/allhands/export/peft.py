"""Adapters as files of Hugging Face PEFT: written, read back and imported."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from allhands.data.templates import TEMPLATE_FILE
from allhands.errors import ConfigError, ModelError
from allhands.infer.generate import put_on
from allhands.io.files import write_whole
from allhands.io.formatting import counted
from allhands.io.paths import meant
from allhands.io.staging import Seen, publish, require_place, staging
from allhands.io.trees import flatten
from allhands.model.adapters import adapter_config_text
from allhands.model.load import load_model
from allhands.model.peft import CONFIG_FILE, WEIGHTS_FILE, Adapter, to_peft
from allhands.model.peft_base import PeftBase
from allhands.model.peft_check import check_peft
from allhands.model.peft_import import from_peft
from allhands.run import adapter_files

_OURS = (adapter_files.WEIGHTS_FILE, CONFIG_FILE)
_THEIRS = (WEIGHTS_FILE, CONFIG_FILE)


@dataclass(frozen=True)
class Exchanged:
    """An adapter that was written in another format.

    Attributes:
        told: its rank, its scale and its number of layers, in words.
        base: name of the model below it.
        stop: token that ends its answers, but at which the model does not stop; ``None`` without
            one.
        notes: notes for the user.
    """

    told: str
    base: str
    stop: str | None = None
    notes: tuple[str, ...] = ()


def export_peft(
    adapter_path: Path,
    out: Path,
    model: str | None,
    base: str | None,
    *,
    force: bool,
    trust_remote_code: bool,
) -> Exchanged:
    """Write an adapter of a run as PEFT reads it, whole or not at all.

    Args:
        model: the model below it; ``None``: the one that it names.
        base: name under which PEFT loads that model; ``None``: the same.

    Raises:
        ConfigError: ``out`` is taken, or there is no name of a model.
        ModelError: a file is missing or torn, PEFT cannot hold the adapter, or the written files
            differ from it.
        StorageError: ``out`` cannot be written.
    """
    adapter = _read(adapter_path, _OURS)
    below = model or adapter_files.model_below(adapter_path, adapter.config)
    seen = require_place(out, "an adapter", (*_THEIRS, TEMPLATE_FILE), force=force)
    loaded = load_model(below, trust_remote_code=trust_remote_code)
    told = PeftBase.of(loaded, base or below)
    try:
        made = to_peft(adapter, told)
    except ModelError as error:
        error.where = str(adapter_path)
        raise

    def check(staged: Path) -> None:
        check_peft(_read(staged, _THEIRS), adapter, told)

    _write(made, (out, seen), _THEIRS, check, adapter_path / TEMPLATE_FILE)
    notes: list[str] = []
    if made.config.get("ensure_weight_tying"):
        notes.append(
            "the adapted embedding is also the output layer. PEFT computes it correctly, but on merging adds it "
            "twice to the shared weights: --to hf writes the merged model"
        )
    if any(name.rpartition(".")[0] in told.experts for name in adapter.weights):
        notes.append(
            "the adapter has parts for experts: with transformers 5 they need PEFT 0.19 or later"
        )
    if "quantization" in loaded.config and base is None:
        notes.append(
            f"{below} is quantised for MLX, which other programs cannot read: name the original with --base, "
            "or as the model in Python"
        )
    scale = f"rank {made.config['r']}, lora_alpha {made.config['lora_alpha']}"
    stops = adapter.config.get("stop_tokens") or (None,)
    return Exchanged(f"{scale}, {_layers(adapter)}", told.name, stops[0], tuple(notes))


def import_peft(
    source: Path, out: Path, model: str | None, *, force: bool, trust_remote_code: bool
) -> Exchanged:
    """Write an adapter of PEFT as a directory for ``--adapter-path``, whole or not at all.

    Args:
        model: the model below it; ``None``: the one that it names.

    Raises:
        ConfigError: ``out`` is taken, or there is no name of a model.
        ModelError: a file is missing or torn, mlx_lm cannot hold the adapter, or the written files
            differ from it.
        StorageError: ``out`` cannot be written.
    """
    if not (source / WEIGHTS_FILE).is_file() and (source / "adapter_model.bin").is_file():
        raise ModelError(
            "adapter_model.bin is a pickle, which may run code when it is read",
            code="adapter-is-pickle",
            where=str(source),
            hint="load the adapter in Python and save it again: save_pretrained(DIR, safe_serialization=True)",
        )
    adapter = _read(source, _THEIRS)
    below = model or adapter.config.get("base_model_name_or_path")
    if not isinstance(below, str) or not below:
        raise ConfigError(
            "the adapter names no model",
            code="adapter-without-model-name",
            where=str(source / CONFIG_FILE),
            hint="say which: --model",
        )
    seen = require_place(out, "an adapter", _OURS, force=force)
    loaded: Any = load_model(below, trust_remote_code=trust_remote_code)
    try:
        made = from_peft(adapter, PeftBase.of(loaded, below), num_layers=len(loaded.model.layers))
    except ModelError as error:
        # The error names a file; the directory is known here.
        error.where = str(source / (error.where or ""))
        raise
    made.config["model"] = below

    def check(staged: Path) -> None:
        try:
            put_on(loaded.model, staged)
        except ModelError as error:
            error.message = error.message.replace(str(staged), str(source))
            error.where = str(source)
            error.hint = "use the model that the adapter was trained on: --model"
            raise
        found = dict(flatten(loaded.model.parameters()))
        for name, value in made.weights.items():
            if name not in found or not mx.array_equal(found[name], value):
                raise ModelError(
                    f"the written files differ from the adapter, and were not kept: {name} has other values",
                    code="written-files-differ",
                    where=str(out),
                    hint="if your input is right, this is a defect: report it",
                )

    _write(made, (out, seen), _OURS, check)
    settings = made.config["lora_parameters"]
    scale = f"rank {settings['rank']}, scale {settings['scale']:g}"
    return Exchanged(f"{scale}, {_layers(made)}", below)


def _layers(adapter: Adapter) -> str:
    """Return the number of adapted modules, in words."""
    count = len({name.rpartition(".lora")[0] for name in adapter.weights if ".lora" in name})
    return counted(count, "layer")


def _read(directory: Path, files: tuple[str, str]) -> Adapter:
    """Return an adapter from its two files.

    Raises:
        ModelError: a file is missing or cannot be read.
    """
    weights, config = (directory / name for name in files)

    def holds_both(place: Path) -> bool:
        return all((place / name).is_file() for name in files)

    for file in (weights, config):
        if not file.is_file():
            there = "" if directory.is_dir() else "; there is no such directory"
            if directory.is_file():
                there = "; this is a file, not a directory"
            raise ModelError(
                f"{file.name} is missing{there}",
                code="adapter-missing",
                where=str(directory),
                hint=meant(directory, "give an adapter's directory", holds_both),
            )
    try:
        described = json.loads(config.read_bytes())
        if not isinstance(described, dict):
            raise ValueError("it is not an object")
        return Adapter(dict(mx.load(str(weights))), described)  # type: ignore[arg-type]
    except (ValueError, RuntimeError, OSError) as error:
        raise ModelError(
            f"the file is torn: {error}",
            code="adapter-torn",
            where=str(weights if isinstance(error, RuntimeError) else config),
            hint="fetch or write it again",
        ) from None


def _write(
    adapter: Adapter,
    place: tuple[Path, Seen],
    files: tuple[str, str],
    check: Callable[[Path], None],
    template: Path | None = None,
) -> None:
    """Write both files of an adapter, whole or not at all.

    Args:
        place: the directory, and what was there before.
        check: called with the directory of the draft; an exception keeps it from being published.
        template: place of the chat template, which may be missing.
    """
    out, seen = place
    private = files == _OURS  # as in a run
    metadata = {"format": "mlx" if private else "pt"}
    with staging(out, private=private) as staged:
        write_whole(
            staged / files[0],
            lambda temporary: mx.save_safetensors(str(temporary), adapter.weights, metadata),
            private=private,
        )
        (staged / files[1]).write_text(adapter_config_text(adapter.config), encoding="utf-8")
        if template is not None and template.is_file():
            (staged / TEMPLATE_FILE).write_bytes(template.read_bytes())
        check(staged)
        publish(staged, out, seen, private=private)
