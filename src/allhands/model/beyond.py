"""Limits of mlx_lm with a model, distinguished from defects of allhands.

An error from inside a model does not help the user. So the pass is repeated with mlx_lm alone: its
loader, its adapters, one row, and nothing of allhands. If that fails as well, it is a limit of
mlx_lm.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils as mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.trainer import grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from allhands.config.pretrain_schema import pretraining
from allhands.config.schema import TrainConfig
from allhands.errors import AllhandsError, ModelError
from allhands.io.trees import flatten
from allhands.model.sources import first_line, resolve
from allhands.runtime.versions import version_of

_LENGTHS = (8, 512)  # tokens of the rows that are tried
_TRACED = "during function transformations"  # MLX's error if a compiled function asks for a value
# Parts of the errors of MLX when CUDA, Metal or the computer has no more memory.
_NO_MEMORY = "out of memory", "Unable to allocate", "Attempting to allocate", "Insufficient Memory"
_NOT_OURS = (
    AllhandsError,
    OSError,
    MemoryError,
)  # errors of the disk and the computer, which have their own messages


@dataclass(frozen=True)
class Use:
    """A use of a model, to repeat it with mlx_lm alone.

    Attributes:
        model: name that the user gave.
        fine_tune_type: method of training; ``None``: the model is not trained.
        num_layers: number of trained blocks, from the last; -1 is all.
        lora: shape of the adapters.
        adapter: directory of the adapter in use.
        cached: True if the model computes with a cache of keys and values, as for answers.
        longest: largest number of tokens of a row.
    """

    model: str
    trust_remote_code: bool = False
    fine_tune_type: str | None = None
    num_layers: int = -1
    lora: dict[str, Any] | None = None
    grad_checkpoint: bool = False
    adapter: Path | None = None
    cached: bool = False
    longest: int = _LENGTHS[-1]

    @property
    def words(self) -> str:
        """The use in words."""
        if self.fine_tune_type is None:
            return "compute"
        return {"full": "train in full", "lora": "train with LoRA", "dora": "train with DoRA"}[
            self.fine_tune_type
        ]


def use_of(config: TrainConfig) -> Use | None:
    """Return a run's use of its model; ``None`` if the run makes a new model."""
    if pretraining(config) is not None:
        return None
    use = Use(config.model, config.trust_remote_code, longest=config.max_seq_length)
    if not config.train:
        return replace(use, adapter=Path(config.adapter_path) if config.adapter_path else None)
    return replace(
        use,
        fine_tune_type=config.fine_tune_type,
        num_layers=config.num_layers or (-1 if config.fine_tune_type == "full" else 16),
        lora=config.lora_parameters.model_dump(),
        grad_checkpoint=config.grad_checkpoint,
    )


def answering(model: str, adapter: Path | None, *, trust_remote_code: bool = False) -> Use:
    """Return the use of a model that answers prompts, with or without an adapter."""
    return Use(model, trust_remote_code, adapter=adapter, cached=True)


@contextmanager
def limits_told(use: Use | None) -> Generator[None]:
    """Turn full memory, and errors that mlx_lm alone has too, into a :class:`ModelError`.

    Other errors pass unchanged.
    """
    try:
        yield
    except _NOT_OURS:
        raise
    except Exception as error:
        if any(
            each in str(error) for each in _NO_MEMORY
        ):  # no repetition: with the present arrays in memory any model would fail
            raise _memory_is_full(use, error) from error
        limit = None if use is None else limit_of(use, error)
        if limit is None:
            raise
        raise limit from error


def _memory_is_full(use: Use | None, error: Exception) -> ModelError:
    """Return the error for full memory, with its remedies."""
    hint = "close other programs that use this memory, take a model in fewer bits, or divide it: --strategy pipeline"
    if use is None or use.fine_tune_type is not None:
        hint = (
            "lower --batch-size or --max-seq-length, compute in parts (--micro-batch-tokens, --grad-checkpoint), or "
            "divide the model among computers (--strategy pipeline)"
        )
    return ModelError(
        f"there is not enough memory: {first_line(error)}",
        code="out-of-memory",
        where=use and use.model,
        hint=hint,
    )


def limit_of(use: Use, error: Exception) -> ModelError | None:
    """Return ``error`` as a limit of mlx_lm; ``None`` if mlx_lm's unmodified model does not fail.

    The unmodified model is tried in the same ``use``.
    """
    try:
        path = resolve(use.model)
    except AllhandsError:
        return None
    if _TRACED in str(error):  # in this process any model would fail again
        message = "a pass of this model cannot be compiled: it looks at numbers while it computes"
        return ModelError(
            message, code="model-not-compilable", where=use.model, hint="add --compile off"
        )
    found = _failure(use, path, error)
    if found is None:
        return None
    config = mlx_lm.load_config(path)
    return ModelError(
        f"mlx_lm {version_of('mlx-lm')} itself, without allhands, cannot {use.words} this model (of type "
        f"{config.get('model_type')}): {type(found).__name__}: {first_line(found)}",
        code="model-unsupported-by-mlx-lm",
        where=use.model,
        hint=_remedy(use, found),
    )


def fails(use: Use) -> bool:
    """Return True if mlx_lm's unmodified model fails in this use before anything is computed."""
    return _failure(use, resolve(use.model)) is not None


def _remedy(use: Use, found: Exception) -> str:
    if "No Metal back-end" in str(found):
        return "use a computer with Apple silicon: this model's kernels are for Metal alone"
    other = "take another model or way of training, or look for a newer mlx_lm"
    if use.fine_tune_type in ("lora", "dora"):
        other = f"name layers that can have adapters (--lora-parameters '{{\"keys\": [...]}}'), or {other}"
    return other


def _failure(use: Use, path: Path, error: Exception | None = None) -> Exception | None:
    """Return the error of mlx_lm alone; ``None`` without an error.

    Args:
        error: the error of our run. An error of mlx_lm that comes while arrays are evaluated counts
            only if it is of the same kind. ``None``: nothing is evaluated.
    """
    try:
        model: Any = mlx_lm.load_model(path, lazy=True, trust_remote_code=use.trust_remote_code)[0]
    except Exception:  # a trouble of another kind: the model could be loaded before
        return None
    lengths = sorted({min(length, use.longest) for length in _LENGTHS})
    try:
        if use.fine_tune_type is not None:
            _prepare(model, use)
            model.train()
        elif use.adapter is not None:
            load_adapters(model, str(use.adapter))
        with _recomputing(model) if use.grad_checkpoint else nullcontext():
            for length in lengths:
                _passed(model, use, length)
    except Exception as found:
        return found
    if error is None:
        return None
    computed = (_error_in_computing(model, use, length) for length in lengths)
    return next((found for found in computed if found and _kind(found) == _kind(error)), None)


@contextmanager
def _recomputing(model: Any) -> Generator[None]:
    """Recompute activations as mlx_lm does; the changed class of the blocks is restored after."""
    layer = type(model.layers[0])
    original = layer.__call__
    try:
        grad_checkpoint(model.layers[0])
        yield
    finally:
        layer.__call__ = original


def _error_in_computing(model: Any, use: Use, length: int) -> Exception | None:
    try:
        mx.eval(_passed(model, use, length))
    except Exception as error:
        return error
    return None


def _kind(error: Exception) -> str:
    """Return an error's first line without numbers and the name of a failed CUDA function."""
    return re.sub(
        r"\d+", "0", re.sub(r"^cu[A-Z]\w*\(.*\) failed", "CUDA failed", first_line(error))
    )


def _passed(model: Any, use: Use, length: int) -> Any:
    """Return the lazy result of one row's forward pass, in training with the backward pass."""
    rows = mx.arange(length)[None] % 8
    if use.fine_tune_type is not None:
        return nn.value_and_grad(model, _loss)(model, rows)
    return model(rows, cache=make_prompt_cache(model)) if use.cached else model(rows)


def _prepare(model: Any, use: Use) -> None:
    """Make the same parameters trainable as ``mlx_lm.lora`` does."""
    model.freeze()
    if use.fine_tune_type == "full":
        for block in model.layers[-max(use.num_layers, 0) :]:
            block.unfreeze()
    else:
        linear_to_lora_layers(
            model, use.num_layers, use.lora or {}, use_dora=use.fine_tune_type == "dora"
        )
    if not flatten(model.trainable_parameters()):
        raise ValueError("it finds no layer that it could train")


def _loss(model: Any, rows: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(rows[:, :-1]).astype(mx.float32), rows[:, 1:]).mean()
