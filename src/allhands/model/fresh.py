"""New models for training from scratch, made from a shape and a tokenizer, and their directories
after training.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from allhands.config.pretrain_schema import PretrainConfig
from allhands.data.templates import TEMPLATE_FILE
from allhands.data.tokenise import tokenizer_files_of, vocabulary_of
from allhands.errors import ConfigError
from allhands.io.staging import publish, staging
from allhands.io.tensors import Tensor, safetensors_pieces
from allhands.model.load import Json, LoadedModel, LoadedTokenizer
from allhands.model.passes import PassContext, apply_passes
from allhands.model.pretraining import build_model, portable_tensors
from allhands.model.shapes import Shape, TokenIds, find_shape, model_config, rows_for
from allhands.model.tokenizer import with_stop
from allhands.runtime.accelerator import Accelerator

MARK = "allhands.json"  # file in the directory of a model that allhands has trained
_ROW = 1024  # tokens


@dataclass(frozen=True)
class FreshModel(LoadedModel):
    """A model without files; ``path`` is its tokenizer's directory."""

    seed: int = 0

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the facts that determine the model's first weights."""
        return hashlib.sha256(
            json.dumps([self.config, self.seed], sort_keys=True).encode()
        ).hexdigest()

    def is_recorded(self, recorded: str) -> bool:
        """Return True if ``recorded`` is :attr:`fingerprint`."""
        return recorded == self.fingerprint


def fitted(config: PretrainConfig, tokenizer: LoadedTokenizer) -> PretrainConfig:
    """Return ``config`` with a length of rows, if none was given.

    It is ``--block-size``, or else the shape's block size, at most :data:`_ROW`.

    Raises:
        ConfigError: the vocabulary is too small for the tokenizer, or the shape is invalid.
    """
    if "max_seq_length" in config.model_fields_set:
        return config
    rows = config.block_size or min(_named_shape(config, tokenizer).block_size, _ROW)
    return config.model_copy(update={"max_seq_length": rows})


def new_model(
    config: PretrainConfig, tokenizer: LoadedTokenizer, accelerator: Accelerator
) -> FreshModel:
    """Return the model of ``config``, with first weights that follow from its seed.

    Raises:
        ConfigError: the shape's numbers do not match, the vocabulary is too small for the
            tokenizer, or the dtype does not suit the device.
    """
    shape = shape_of(config, tokenizer)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if accelerator.kind == "cpu" else "bfloat16"
    elif dtype != "float32" and accelerator.kind == "cpu":
        raise ConfigError(
            "a CPU computes in float32",
            code="option-unsuited-to-device",
            where=f"--dtype {dtype}",
            hint="leave it out",
        )
    wrapped: Any = tokenizer.tokenizer
    ids = TokenIds(
        wrapped.bos_token_id, wrapped.eos_token_id, getattr(wrapped, "pad_token_id", None)
    )
    values = model_config(shape, ids=ids, dtype=dtype)
    model = build_model(values, config.seed, dtype=getattr(mx, dtype))
    # Balanced routers belong to the model: the gradient check must compare with them.
    context = PassContext(accelerator, "train", router_aux_loss=config.router_aux_loss)
    apply_passes(model, context, "made")
    return FreshModel(model, tokenizer.tokenizer, values, tokenizer.path, seed=config.seed)


def shape_of(config: PretrainConfig, tokenizer: LoadedTokenizer) -> Shape:
    """Return the shape that ``config`` names, with room for the tokenizer's tokens and for the
    rows.

    Raises:
        ConfigError: the shape's numbers do not match, the vocabulary is too small for the
            tokenizer, or rows are longer than the block size.
    """
    shape = _named_shape(config, tokenizer)
    if config.max_seq_length > shape.block_size:
        raise ConfigError(
            f"rows of {config.max_seq_length} tokens do not fit the shape's block size of {shape.block_size}",
            code="value-out-of-range",
            where="--max-seq-length",
            hint="give --block-size alone: the rows are then as long",
        )
    return shape


def _named_shape(config: PretrainConfig, tokenizer: LoadedTokenizer) -> Shape:
    needed = vocabulary_of(tokenizer.tokenizer)
    if config.vocabulary is not None and config.vocabulary < needed:
        raise ConfigError(
            f"the tokenizer has {needed} tokens, the vocabulary {config.vocabulary}",
            code="value-out-of-range",
            where="--vocabulary",
            hint=f"leave it out, or give at least {needed}",
        )
    numbers = {"vocabulary": rows_for(needed), **config.numbers()}
    return find_shape(config.shape, numbers)


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model's directory that training does not change.

    Attributes:
        config: content of ``config.json``.
        tokenizer: the directory with the tokenizer.
        mark: content of :data:`MARK`: where the model comes from.
        template: the chat template, if one was chosen in place of the tokenizer's own.
    """

    config: Json
    tokenizer: Path
    mark: Json
    template: str | None = None

    @classmethod
    def of(
        cls, loaded: LoadedModel, mark: Json, template: str | None, stop_tokens: Sequence[str]
    ) -> ModelFiles:
        """Collect the files of a model; ``stop_tokens`` end its answers, and generation stops
        there.
        """
        tokenizer: Any = loaded.tokenizer
        config = loaded.config
        for token in stop_tokens:
            config = with_stop(config, tokenizer.get_vocab()[token], tokenizer.eos_token_id)
        return cls(config, loaded.path, mark, template)

    def write(self, target: Path, weights: Sequence[Sequence[Tensor]]) -> None:
        """Write the model with these weights to ``target``, which is replaced as a whole.

        Args:
            weights: tensors of each file of weights; several files get an index.

        Raises:
            StorageError: ``target`` cannot be written.
        """
        with staging(target, private=True) as staged:
            for name, content in (("config.json", self.config), (MARK, self.mark)):
                (staged / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            for file in tokenizer_files_of(self.tokenizer):
                shutil.copyfile(file, staged / file.name)
            if self.template is not None:
                (staged / TEMPLATE_FILE).write_text(self.template, encoding="utf-8")
            _write_weights(staged, [part for part in weights if part])
            publish(staged, target, private=True)


def _write_weights(directory: Path, weights: Sequence[Sequence[Tensor]]) -> None:
    """Write one ``model.safetensors``, or numbered parts and their index, as Hugging Face does."""
    places: dict[str, str] = {}
    size = 0
    for number, tensors in enumerate(weights, start=1):
        part = list(portable_tensors(tensors))
        several = f"-{number:05d}-of-{len(weights):05d}" if len(weights) > 1 else ""
        name = f"model{several}.safetensors"
        with (directory / name).open("wb") as stream:
            stream.writelines(safetensors_pieces(part))
        places |= {tensor.name: name for tensor in part}
        size += sum(tensor.num_bytes for tensor in part)
    if len(weights) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        (directory / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )
