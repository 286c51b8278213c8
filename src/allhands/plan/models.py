"""Facts of the model of a plan: sizes, forms of its weights, and trained parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import TrainConfig
from allhands.errors import ModelError
from allhands.model.adapters import full_of_quantised, no_such_keys
from allhands.model.divisible import resolve_layers
from allhands.model.load import read_config
from allhands.model.shapes import find_shape, model_config, num_parameters, rows_for
from allhands.model.sources import resolve
from allhands.model.weight_files import all_bytes
from allhands.run.model_sizes import adapter_weights, all_weights, forms_on_cpu, linears
from allhands.run.training_memory import DecoderShape, blocks_of


@dataclass(frozen=True)
class PlannedModel:
    """Facts of a model from its files, or from the options of pre-training.

    Attributes:
        blocks: widths of the model; ``None`` if it is not built of equal blocks.
        weights_bytes: bytes of the weights in training.
        word: bytes of a dense weight in memory.
        values: content of config.json.
        tied: True if the embedding is also the head.
        bits: bits of a quantised weight; 0 for dense weights.
        group: size of a group of quantised weights; 1 for dense weights.
        forms: forms of quantised weights on a CPU, see :func:`forms_on_cpu`.
    """

    blocks: DecoderShape | None
    weights_bytes: int
    word: int
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tied: bool = False
    bits: int = 0
    group: int = 1
    forms: tuple[tuple[float, float], ...] = ()


def model_facts(config: TrainConfig, kind: str) -> PlannedModel:
    """Return the facts of the model that ``config`` trains on a processor of this kind.

    Raises:
        ModelError: weights are missing, or quantised weights cannot be trained in full.
    """
    if isinstance(config, PretrainConfig):
        return _fresh(config, kind)
    place = resolve(config.model)
    values = read_config(place)
    bits, group = _quantisation(values)
    if bits and config.fine_tune_type == "full":
        raise full_of_quantised(f"{bits} bits")
    if not (size := all_bytes(place)):
        raise ModelError(
            "weights are missing: no model*.safetensors",
            code="weights-missing",
            where=str(place),
            hint="fetch the model again",
        )
    tied = bool(values.get("tie_word_embeddings", False))
    half = (values.get("torch_dtype") or values.get("dtype")) in ("bfloat16", "float16")
    blocks = blocks_of(values)
    facts: dict[str, Any] = {"values": values, "tied": tied, "bits": bits, "group": group}
    if kind != "cpu":
        return PlannedModel(blocks, size, 2 if half else 4, **facts)
    # A CPU computes in float32, and holds dense weights in float32.
    if not bits or blocks is None:
        return PlannedModel(blocks, size if bits or not half else 2 * size, 4, **facts)
    forms, size = _forms(blocks, bits, group, size, tied=tied)
    return PlannedModel(blocks, size, 4, forms=forms, **facts)


def _quantisation(values: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bits of quantised weights and the size of their groups; 0 and 1 for dense ones."""
    told = values.get("quantization") or values.get("quantization_config")
    found = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
    bits = int(found.get("bits", 0))
    return (bits, int(found.get("group_size", 64))) if bits else (0, 1)


def _forms(
    blocks: DecoderShape, bits: int, group: int, size: int, *, tied: bool
) -> tuple[tuple[tuple[float, float], ...], int]:
    """Return :func:`forms_on_cpu` of a model, and its bytes in the first form.

    The packed form is scaled to the ``size`` of the files in bytes, because scales may have any
    type.
    """
    codes, (of_block, of_table) = forms_on_cpu(blocks, bits, group)

    def whole(block: float, table: float) -> float:
        return blocks.layers * block + (2 - tied) * table

    scale = size / whole(of_block, of_table)
    return (codes, (scale * of_block, scale * of_table)), int(whole(*codes))


def _fresh(fresh: PretrainConfig, kind: str) -> PlannedModel:
    """Return the facts of a new model, from the options of pre-training."""
    numbers: dict[str, Any] = fresh.numbers()
    if (file := Path(fresh.tokenizer) / "tokenizer.json").is_file() and fresh.vocabulary is None:
        rows = rows_for(Tokenizer.from_file(str(file)).get_vocab_size())
        numbers = {"vocabulary": rows, **numbers}
    shape = find_shape(fresh.shape, numbers)
    word = 2 if fresh.dtype == "bfloat16" or (fresh.dtype == "auto" and kind != "cpu") else 4
    size = word * num_parameters(shape)
    values = model_config(shape)
    return PlannedModel(blocks_of(values), size, word, values, shape.tied)


def trained_layers(config: TrainConfig, blocks: DecoderShape) -> int:
    """Return the number of trained blocks."""
    asked = resolve_layers(blocks.layers, config)
    return blocks.layers if asked < 0 else asked


def trained_parameters(config: TrainConfig, blocks: DecoderShape, *, tied: bool) -> int:
    """Return the number of trained parameters of a model of these blocks.

    Raises:
        ConfigError: the adapters' keys name no layers.
    """
    layers, adapters = trained_layers(config, blocks), config.lora_parameters
    if config.fine_tune_type == "full":
        if layers == blocks.layers:
            return all_weights(blocks, tied=tied)
        inside = all_weights(blocks, tied=True) - blocks.vocabulary * blocks.dims
        return layers * inside // blocks.layers
    numbers = adapter_weights(blocks, layers, adapters.rank, adapters.keys)
    if not numbers:
        raise no_such_keys(config, linears(blocks), adapters.keys or ())
    return numbers
