"""Trainable parameters: LoRA and DoRA adapters or the weights themselves, saved as mlx_lm reads
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.utils import linear_to_lora_layers

from allhands.config.schema import TrainConfig
from allhands.data.dates import DATE_KEY
from allhands.data.templates import TEMPLATE_FILE
from allhands.errors import AllhandsError, ConfigError, ModelError
from allhands.io.files import write_whole
from allhands.io.formatting import counted
from allhands.io.names import CONFIG_FILE
from allhands.io.paths import meant
from allhands.io.trees import flatten
from allhands.model.beyond import fails, use_of
from allhands.model.divisible import resolve_layers
from allhands.model.weight_files import is_weights

ADAPTER_LEAVES = frozenset({"lora_a", "lora_b", "m"})
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Trainable:
    """The choice of :func:`make_trainable`.

    Attributes:
        num_layers: number of trained blocks, counted from the last; -1 for all.
        parameters: number of trained parameters.
        total_parameters: number of parameters of the whole model; a quantised weight counts its
            values, not its packed words.
        unmatched: adapter keys that name no module.
    """

    num_layers: int
    parameters: int
    total_parameters: int
    unmatched: tuple[str, ...] = ()


def make_trainable(model: Any, config: TrainConfig) -> Trainable:
    """Freeze ``model`` and make the parameters of ``config``'s method trainable.

    Nothing is computed or read yet.

    Raises:
        ConfigError: the settings name more layers than the model has, or too large a rank; or
            quantised weights are to be trained in full; or adapter keys match nothing. In a resumed
            run, or for an adapter that is only tested, such keys are no error: ``unmatched`` has
            them.
        ModelError: no layer can have an adapter.
    """
    total = count_parameters(model)
    num_layers = resolve_layers(len(model.layers), config)
    names = _linear_names(model, num_layers)
    model.freeze()
    if config.fine_tune_type == "full":
        _unfreeze(model, num_layers)
    else:
        _require_rank(model, num_layers, config.lora_parameters.rank)
        # Every rank starts from the same adapters: they are drawn from the run's seed.
        mx.random.seed(config.seed)
        use_dora = config.fine_tune_type == "dora"
        try:
            linear_to_lora_layers(
                model, num_layers, config.lora_parameters.model_dump(), use_dora=use_dora
            )
        except ValueError as error:
            raise ConfigError(
                str(error),
                code="adapter-layer-unsupported",
                where="--lora-parameters",
                hint="choose other keys",
            ) from None
    trained = sum(value.size for _, value in flatten(model.trainable_parameters()))
    if trained == 0:
        raise no_such_keys(config, names, config.lora_parameters.keys or ())
    unmatched = unmatched_keys(model, num_layers, config)
    if unmatched and config.train and config.resume is None:
        raise no_such_keys(config, names, unmatched)
    return Trainable(num_layers, trained, total, unmatched)


def untrained(model: Any) -> Trainable:
    """Freeze a model that is not trained."""
    for _, module in model.named_modules():
        if "_no_grad" not in vars(
            module
        ):  # recurrent_gemma of mlx_lm leaves MLX's own initialisation out
            module._no_grad = set()
    model.freeze()
    return Trainable(0, 0, count_parameters(model))


def no_such_keys(
    config: TrainConfig, names: Iterable[str], unmatched: Sequence[str]
) -> AllhandsError:
    """Return the error for ``unmatched`` adapter keys; ``names`` are the linear layers of blocks."""
    if not config.lora_parameters.keys:
        problem = "mlx_lm finds no layer in this model that could have an adapter"
        full = use_of(config.model_copy(update={"fine_tune_type": "full"}))
        hint = (
            "take another model"
            if full is None or fails(full)
            else "train it in full: --fine-tune-type full"
        )
        return ModelError(problem, code="no-adaptable-layer", where=config.model, hint=hint)
    blocks = (
        "any block"
        if config.num_layers in (None, -1)
        else f"the last {counted(config.num_layers, 'block')}"
    )
    return ConfigError(
        f"adapter keys that name no layer of {blocks}: {', '.join(unmatched)}",
        code="adapter-keys-unmatched",
        where="--lora-parameters",
        hint=f"remove or correct them; linear layers of a block: {', '.join(names)}",
    )


def unmatched_keys(model: Any, num_layers: int, config: TrainConfig) -> tuple[str, ...]:
    """Return adapter keys that mlx_lm has found in no trained block, nor in the whole model."""
    keys = config.lora_parameters.keys if config.fine_tune_type != "full" else None
    if not keys:
        return ()
    known = {
        name
        for part in (*model.layers[-max(num_layers, 0) :], model)
        for name, _ in part.named_modules()
    }
    return tuple(key for key in keys if key not in known)


def count_parameters(model: nn.Module) -> int:
    """Count the values in the model's weights."""
    total = 0
    for _, module in model.named_modules():
        bits = getattr(module, "bits", None)
        for name, value in flatten({k: v for k, v in module.items() if isinstance(v, mx.array)}):
            if bits and name in ("scales", "biases"):
                continue
            total += value.size * 32 // bits if bits and name == "weight" else value.size
    return total


def full_of_quantised(what: str) -> ConfigError:
    """Return the error for full training of quantised weights; ``what`` describes some of them."""
    return ConfigError(
        f"the model is quantised ({what}): its weights cannot be trained in full",
        code="full-training-of-quantised",
        where="--fine-tune-type full",
        hint="use --fine-tune-type lora, or dequantise: allhands model get MODEL --dequantize --out DIR",
    )


def _unfreeze(model: Any, num_layers: int) -> None:
    parts = [model] if num_layers == -1 else model.layers[-num_layers:]
    for part in parts:
        for name, module in part.named_modules():
            if hasattr(module, "bits") and hasattr(module, "scales"):
                raise full_of_quantised(f"{name}: {module.bits} bits")
        part.unfreeze()


def _require_rank(model: Any, num_layers: int, rank: int) -> None:
    """Refuse a rank above the longest side of any matrix; a far larger rank would exhaust the
    memory.

    Raises:
        ConfigError: the rank is too large.
    """
    sides: list[int] = []
    for block in model.layers[-max(num_layers, 0) :]:
        for _, module in block.named_modules():
            if hasattr(module, "to_quantized") or hasattr(module, "bits"):
                sides += weight_shape(module)
    if rank > max(sides, default=rank):
        problem = f"the rank {rank} is more than the longest side of any layer, {max(sides)}"
        hint = (
            "give a smaller one: 4 to 64 are usual; --fine-tune-type full trains the whole matrices"
        )
        raise ConfigError(
            problem, code="adapter-rank-too-large", where="--lora-parameters", hint=hint
        )


def weight_shape(module: Any) -> tuple[int, int]:
    """Return the shape of a layer's dense weight, also for a quantised layer.

    It is (out, in) for a linear layer or one expert of a stack, (rows, dims) for an embedding.
    """
    rows, columns = module.weight.shape[-2:]
    return int(rows), int(columns) * 32 // module.bits if hasattr(module, "bits") else int(columns)


def _linear_names(model: Any, num_layers: int) -> list[str]:
    """Return the linear layers of all trained blocks, which may be of several kinds."""
    modules = [
        pair
        for block in reversed(model.layers[-max(num_layers, 0) :])
        for pair in block.named_modules()
    ]
    return list(
        dict.fromkeys(
            name for name, module in modules if isinstance(module, nn.Linear | nn.QuantizedLinear)
        )
    )


def trained_weights(model: nn.Module) -> dict[str, mx.array]:
    """Return the trained parameters by name."""
    return dict(flatten(model.trainable_parameters()))


def load_trained(model: nn.Module, path: Path, *, new: bool = False, tested: bool = False) -> None:
    """Load saved weights into the trainable parameters: all of them and no others.

    Args:
        new: True for a model that is trained from scratch; errors then name its options.
        tested: True for an adapter that is only tested, with the settings of its own directory;
            errors then name the adapter.

    Raises:
        ModelError: the file cannot be read, or its names or shapes do not fit.
    """
    try:
        loaded: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
    except (RuntimeError, ValueError, OSError) as error:
        reason = "no such file" if not path.exists() else f"it cannot be read ({error})"
        raise ModelError(
            f"adapter weights: {reason}",
            code="adapter-torn" if path.exists() else "adapter-missing",
            where=str(path),
            hint=meant(path, "check --resume-adapter-file", is_weights),
        ) from None
    trained = trained_weights(model)
    wanted, there = (
        {name: tuple(value.shape) for name, value in each.items()} for each in (trained, loaded)
    )
    if problem := _difference(wanted, there):
        if tested:
            raise unfit(problem, path.parent)
        options = "--model, --fine-tune-type, --num-layers and --lora-parameters (see adapter_config.json)"
        if new:
            options = "--tokenizer, --vocabulary, --shape and its numbers (--layers, --dims, ...)"
        hint = f"use the options that the file of --resume-adapter-file was made with: {options}"
        raise ModelError(problem, code="adapter-mismatch", where=str(path), hint=hint)
    model.load_weights([(n, v.astype(trained[n].dtype)) for n, v in loaded.items()], strict=False)


def _difference(wanted: Shapes, there: Shapes) -> str | None:
    """Return the first difference between the trained arrays and those of a file; ``None`` without
    any.
    """
    # Shapes come first: if they differ, the file belongs to another model in any case.
    for name, shape in wanted.items():
        if there.get(name, shape) != shape:
            return f"{name} has shape {there[name]} in the file, {shape} here"
    if missing := sorted(wanted.keys() - there.keys()):
        return f"{missing[0]} is trained here but not in the file"
    extra = sorted(there.keys() - wanted.keys())
    return f"{extra[0]} is in the file but not trained here" if extra else None


def unfit(problem: str, directory: Path) -> ModelError:
    """Return the error for an adapter in ``directory`` that belongs to another model."""
    hint = "use the model that the adapter was trained on (see adapter_config.json)"
    return ModelError(
        f"the adapter does not fit the model: {problem}",
        code="adapter-mismatch",
        where=str(directory),
        hint=hint,
    )


def adapter_config(
    config: TrainConfig,
    num_layers: int,
    model_path: str,
    dated: datetime | None = None,
    stop_tokens: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``: all options, with the three keys that mlx_lm
    reads resolved.

    Args:
        dated: the moment whose date the chat template wrote; ``None`` if it writes none.
        stop_tokens: tokens that end the trained answers, if the model itself does not stop there.
    """
    values = config.model_dump(mode="json") | (
        {} if dated is None else {DATE_KEY: dated.isoformat()}
    )
    values.update(num_layers=num_layers, model=model_path, stop_tokens=list(stop_tokens))
    if config.fine_tune_type == "full":
        values["lora_parameters"] = None
    return values


def as_written(config: TrainConfig, directory: Path) -> TrainConfig:
    """Return ``config`` with the method, layers and shape of the adapter in ``directory``.

    So an adapter can be tested without repeating its options. Without ``adapter_config.json`` the
    configuration is unchanged.

    Raises:
        ModelError: the file is unreadable or has impossible values.
    """
    file = directory / CONFIG_FILE
    if not file.is_file():
        return config
    try:
        content = dict(json.loads(file.read_text(encoding="utf-8")))
        made = {key: content[key] for key in _SHAPE_KEYS if content.get(key) is not None}
        return type(config).model_validate({**config.model_dump(), **made})
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"this does not describe an adapter: {str(error).splitlines()[0]}",
            code="adapter-invalid",
            where=str(file),
            hint="take the file from the run that the adapter came from",
        ) from None


def dated_as(directory: Path) -> datetime | None:
    """Return the moment whose date the chat template wrote in the training of an adapter.

    ``None`` if the adapter in ``directory`` does not record it.
    """
    try:
        said = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))[DATE_KEY]
        return datetime.fromisoformat(said).replace(tzinfo=None)
    except (OSError, ValueError, TypeError, KeyError):
        return None


_SHAPE_KEYS = ("fine_tune_type", "num_layers", "lora_parameters")


def adapter_config_text(values: dict[str, Any]) -> str:
    """Return the text of ``adapter_config.json``, equal for equal values."""
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def save_template(text: str | None, directory: Path) -> None:
    """Write an adapter's chat template beside it; ``None`` removes that of an earlier adapter."""
    file = directory / TEMPLATE_FILE
    if text is None:
        file.unlink(missing_ok=True)
    else:
        write_whole(
            file, lambda temporary: temporary.write_text(text, encoding="utf-8"), private=True
        )


def save_adapter_config(values: dict[str, Any], directory: Path) -> None:
    """Write ``adapter_config.json`` into ``directory``, whole or not at all."""
    text = adapter_config_text(values)
    write_whole(directory / CONFIG_FILE, lambda temporary: temporary.write_text(text), private=True)
