"""Loading of a model into memory, and writing in another precision (``model get``).

mlx_lm reads and quantises. This module reports every fault of a model in one sentence, refuses
options that cannot take effect, and writes a directory whole or not at all.
"""

from __future__ import annotations

import io
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils as mlx_lm
import numpy as np
from mlx.utils import tree_map_with_path
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import NDArray

from allhands.errors import ConfigError, ModelError
from allhands.io.files import write_error
from allhands.io.formatting import counted
from allhands.io.names import BEST_MODEL, MODEL, MODELS_OF_A_RUN
from allhands.io.paths import require_directory_name
from allhands.io.staging import Seen, publish, same_files, staging
from allhands.io.trees import flatten, unflatten
from allhands.model.fingerprints import begin_fingerprint, earlier_fingerprint, fingerprint
from allhands.model.reading import classes_that_read, classes_without, worth_threads
from allhands.model.sources import Report, first_line, importing, quantising, resolve, silent
from allhands.model.tokenizer import (
    Json,
    LoadedTokenizer,
    load_bare_tokenizer,
    load_tokenizer,
    read_config,
    tokenizer_of,
)
from allhands.model.weight_files import INDEX_FILE, absent, indexed, present

__all__ = [
    "BEST_MODEL",
    "MODEL",
    "MODELS_OF_A_RUN",
    "Json",
    "LoadedTokenizer",
    "load_bare_tokenizer",
    "load_tokenizer",
    "read_config",
]

DTYPES = ("float16", "bfloat16", "float32")
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP_SIZE = 64

_KEPT_PATTERNS = (*mlx_lm.DEFAULT_ALLOW_PATTERNS, "README.md", "LICENSE*")
# A conversion writes these itself; the other files of the source are copied.
_REWRITTEN = ("config.json", "hf_quant_config.json", INDEX_FILE)


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, its tokenizer, and where both came from."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: Json
    path: Path

    hashing: Future[str] | None = (
        None  # the fingerprint, if its computation began while the weights were read
    )
    notes: tuple[str, ...] = ()  # notes for users of the model

    @cached_property
    def fingerprint(self) -> str:
        """The hash of the weight files, see :func:`fingerprint`; computed once, when first used."""
        return self.hashing.result() if self.hashing is not None else fingerprint(self.path)

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens that the model knows; ``None`` if it has no embedding."""
        return rows_of_embedding(self.model)

    def is_recorded(self, recorded: str) -> bool:
        """Return True if ``recorded`` is the model's fingerprint, of this version or an earlier
        one.
        """
        return recorded == self.fingerprint or recorded == earlier_fingerprint(self.path)


def rows_of_embedding(model: nn.Module) -> int | None:
    """Return the rows of the largest embedding; ``None`` if there is none."""
    tables = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    ]
    return max((int(table.weight.shape[0]) for table in tables), default=None)


# --- loading --------------------------------------------------------------------------------------


def load_model(
    path_or_repo: str,
    *,
    trust_remote_code: bool = False,
    dtype: str | None = None,
    tokenizer: TokenizerWrapper | None = None,
    hashed: bool = False,
    lazy: bool = False,
) -> LoadedModel:
    """Load a model and its tokenizer, the parameters evaluated, in evaluation mode.

    Args:
        path_or_repo: ``demo``, a directory or a Hub repository id.
        trust_remote_code: let the model run the Python files that it carries.
        dtype: type to which the floating-point parameters are cast (one of DTYPES); None keeps them
            as stored.
        tokenizer: the model's tokenizer, if it has been loaded already.
        hashed: compute the fingerprint in the background, because it will be needed soon.
        lazy: read parameters only when they are needed. Missing files are then no error, as long as
            the list of :mod:`allhands.model.weight_files` has them.

    Raises:
        ModelError: the model is missing, torn, incomplete or of an unknown type.
        ConfigError: the dtype is unknown.
    """
    check_dtype(dtype)
    path = resolve(path_or_repo)
    hashing = begin_fingerprint(path) if hashed else None
    model, config = build(path, trust_remote_code, wanted=not lazy, partly=lazy)
    if dtype is not None:
        cast_parameters(model, dtype, path)
    if not lazy:
        mx.eval(model.parameters())
    return LoadedModel(
        model, tokenizer or tokenizer_of(path, config, trust_remote_code), config, path, hashing
    )


def read_weights(model: nn.Module) -> None:
    """Evaluate the parameters of a lazily read model, one module after the other.

    So sources of other arrays, such as the dense weights for DoRA's magnitudes, are in memory for
    one module at a time.
    """
    for module in model.modules():
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])
    mx.eval(model.parameters())


def build(
    path: Path, trust_remote_code: bool, *, wanted: bool = False, partly: bool = False
) -> tuple[nn.Module, Json]:
    """Return the model of a directory and its config.

    Args:
        wanted: all parameters will be needed, so threads may read them now; else they are lazy.
        partly: files in the list of the model's files may be missing.

    Raises:
        ModelError: the model is incomplete, torn or cannot be built.
    """
    read_config(path)
    files = _check_weights(path, partly=partly)
    missing = absent(path)
    made: Json = (
        {"get_model_classes": classes_that_read(files)} if wanted and worth_threads(files) else {}
    )
    if missing:
        made = {"get_model_classes": classes_without(missing)}
    try:
        with importing(path), quantising(path):
            return mlx_lm.load_model(path, lazy=True, trust_remote_code=trust_remote_code, **made)
    except Exception as error:  # a config that no class can be built from fails in any of its lines
        if isinstance(error, ModelError):
            raise
        hint = "check config.json against the weights, or fetch the model again"
        if "trust_remote_code" in str(error):
            hint = "pass --trust-remote-code if you trust its author"
        elif "not supported" in str(error):
            hint = "mlx_lm has no such architecture; see its models folder for those it has"
        raise ModelError(
            f"the model cannot be built: {first_line(error)}",
            code="model-not-buildable",
            where=str(path),
            hint=hint,
        ) from error


def _check_weights(path: Path, *, partly: bool = False) -> list[Path]:
    """Return the files of weights; all must be there and as long as their headers say.

    Raises:
        ModelError: a file is missing, torn or cannot be read.
    """
    files = present(path)
    listed = set(absent(path))
    missing = (
        (indexed(path) | listed) - {file.name for file in files} - (listed if partly else set())
    )
    if missing or not files:
        part = (
            "these are the files of some stages. allhands cluster sync brings the others; train, eval, generate, "
            "compare and chat compute with the files of several computers: --strategy pipeline"
        )
        raise ModelError(
            f"weights are missing: {', '.join(sorted(missing)) or 'no model*.safetensors'}",
            code="weights-missing",
            where=str(path),
            hint=part if listed else "fetch the model again, or convert it to safetensors first",
        )
    for file in files:
        try:
            with file.open("rb"):  # MLX's own error has no reason
                pass
            mx.load(str(file))
        except OSError as error:
            raise ModelError(
                f"the file of weights cannot be read: {error.strerror or error}",
                code="weights-unreadable",
                where=str(file),
                hint="allow reading it (chmod u+r), or fetch the model again",
            ) from error
        except RuntimeError as error:
            if "unsupported dtype" in str(error):
                raise ModelError(
                    f"MLX cannot hold these weights: {first_line(error)}",
                    code="weights-unreadable",
                    where=str(file),
                    hint="convert them with PyTorch, to float32, float16 or bfloat16",
                ) from error
            raise ModelError(
                f"the file of weights is torn: {first_line(error)}",
                code="weights-torn",
                where=str(file),
                hint="fetch the model again",
            ) from error
    return files


# The advice where a model's outputs are not finite.
HARMED = "the training went wrong: take weights of an earlier step (RUN/best, RUN/checkpoints), or train again"


def require_numbers(logits: NDArray[Any], weights: Path) -> None:
    """Refuse weights whose outputs are not finite.

    Raises:
        ModelError: such outputs are among ``logits``.
    """
    if not np.isfinite(logits).all():
        raise ModelError(
            "their outputs are not finite numbers",
            code="weights-not-finite",
            where=str(weights),
            hint=HARMED,
        )


def require_in_vocabulary(loaded: LoadedModel, token: int) -> None:
    """Check that the model's embedding has a row for ``token``, the largest token id of the data.

    For ids beyond its table an embedding silently returns garbage.

    Raises:
        ModelError: the model has no such token.
    """
    known = loaded.vocabulary
    if known is not None and token >= known:
        raise ModelError(
            f"the tokenizer gives token {token}, but the model's vocabulary ends at {known - 1}",
            code="vocabulary-mismatch",
            where=str(loaded.path),
            hint="the tokenizer is another model's: copy this model's own tokenizer files there, or fetch it again",
        )


def cast_parameters(model: nn.Module, dtype: str, path: Path) -> None:
    """Cast the floating-point parameters to ``dtype`` where the model allows it.

    bfloat16 has 8 bits of precision, but scales made for float16 have 11: rounding them shifts all
    weights of a group together, and costs a 4-bit model far more than rounding its unpacked
    weights.

    Raises:
        ModelError: scales would be rounded to bfloat16, or a value is too large for float16.
    """
    target: mx.Dtype = getattr(mx, dtype)
    finer = any(
        name.endswith((".scales", ".biases")) and value.dtype in (mx.float16, mx.float32)
        for name, value in flatten(model.parameters())
    )
    if finer and target == mx.bfloat16:
        raise ModelError(
            "the quantization scales are finer than bfloat16: rounding them would change the answers",
            code="dtype-loses-precision",
            where=str(path),
            hint="take float16 or float32, or unpack it first (model get --dequantize --dtype bfloat16)",
        )
    allowed: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _: True)

    def cast(name: str, value: mx.array) -> mx.array:
        if not mx.issubdtype(value.dtype, mx.floating) or not allowed(name):
            return value
        made = value.astype(target)
        if target == mx.float16 and mx.any(mx.isinf(made) & ~mx.isinf(value)).item():
            raise overflow(name, str(path), "take --dtype bfloat16 or float32")
        return made

    model.update(tree_map_with_path(cast, model.parameters()))


def overflow(name: str, where: str, hint: str) -> ModelError:
    """Return the error for a weight that float16 cannot hold; ``hint`` names types that can."""
    largest = "its largest number is 65,504, which trained weights do not come near unless the training went wrong"
    return ModelError(
        f"{name} has values that float16 cannot hold: {largest}",
        code="dtype-overflow",
        where=where,
        hint=hint,
    )


def check_dtype(dtype: str | None) -> None:
    """Refuse a name that is not in DTYPES (ConfigError)."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(
            f"no dtype {dtype!r}",
            code="value-unknown",
            where="--dtype",
            hint=f"choose one of {', '.join(DTYPES)}",
        )


# --- writing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversion:
    """The changes to a model: unpack first, then cast, then quantize.

    Attributes:
        quantize_bits: bits of a weight (BITS); a model that is quantized already needs
            ``dequantize`` too.
        group_size: number of weights that share a scale (GROUP_SIZES); ``None`` is 64.
        dequantize: unpack quantized weights, in float32, rounded once to ``dtype``.
        dtype: type of the floating-point parameters (DTYPES); ``None`` keeps the source's.

    Raises:
        ConfigError: a value cannot work.
    """

    quantize_bits: int | None = None
    group_size: int | None = None
    dequantize: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if self.quantize_bits is not None and self.quantize_bits not in BITS:
            raise ConfigError(
                f"cannot quantize to {self.quantize_bits} bits",
                code="value-unknown",
                where="--quantize",
                hint=f"one of {BITS}",
            )
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise ConfigError(
                f"no group size {self.group_size}",
                code="value-unknown",
                where="--group-size",
                hint=f"one of {GROUP_SIZES}",
            )
        if self.group_size is not None and self.quantize_bits is None:
            raise ConfigError(
                "a group size without quantization has no effect",
                code="option-without-effect",
                where="--group-size",
                hint="add --quantize 4",
            )

    @property
    def changes_nothing(self) -> bool:
        return self == Conversion()


def get_model(
    source: str,
    out: Path,
    conversion: Conversion | None = None,
    *,
    force: bool = False,
    report: Report | None = None,
) -> Path:
    """Write the model ``source`` to the directory ``out``, whole or not at all; return its path.

    Args:
        source: ``demo``, a directory, or a Hub repository id.
        out: the directory to make. If it already holds exactly this model, it stays.
        conversion: changes to make; ``None``: none.
        force: replace another model in ``out`` (never a directory that holds something else).
        report: called with a line of text now and then.

    Raises:
        ModelError: the source is missing or broken, or cannot be converted in this way.
        ConfigError: ``out`` is taken.
        StorageError: ``out`` cannot be written.
    """
    conversion = conversion or Conversion()
    say = report or silent
    path = resolve(source, report=say).resolve()
    target = out.resolve()
    seen = check_target(target, path, force)
    with staging(target) as staged:
        model, config = build(path, False)
        tokenizer_of(path, config, False)
        copy_files(path, staged, weights=conversion.changes_nothing)
        if not conversion.changes_nothing:
            config = _convert(model, config, conversion, path, say)
            save_weights(model, config, staged)
        _check_weights(staged)
        if same_files(staged, target):
            say(f"{target} holds this model already")
        elif holds_files(target) and not force:
            raise ConfigError(
                "another model is there already",
                code="output-exists",
                where=str(out),
                hint="add --force to replace it",
            )
        else:
            publish(staged, target, seen)
    return target


def check_target(target: Path, source: Path, force: bool) -> Seen:
    """Refuse a target that overlaps the source or holds other things than a model (ConfigError);
    return what is there.

    ``force`` changes only the hint.
    """
    if target == source or target in source.parents or source in target.parents:
        raise ConfigError(
            "the output overlaps the source",
            code="output-place-unsuitable",
            where=str(target),
            hint="choose another output directory",
        )
    require_directory_name(target)
    seen = Seen.at(target)
    if target.exists() and not target.is_dir():
        raise ConfigError(
            "there is a file of that name",
            code="place-taken",
            where=str(target),
            hint="choose another output directory",
        )
    if holds_files(target) and not (target / "config.json").is_file():
        raise ConfigError(
            "the directory holds something that is not a model",
            code="place-taken",
            where=str(target),
            hint="choose another output directory"
            + (": --force replaces models only" if force else ""),
        )
    return seen


def holds_files(directory: Path) -> bool:
    """Return True if ``directory`` exists and is not empty."""
    return directory.is_dir() and any(directory.iterdir())


def copy_files(source: Path, target: Path, *, weights: bool) -> None:
    """Copy the files of a model; without ``weights``, only those that a conversion does not
    rewrite.
    """
    for file in {file for pattern in _KEPT_PATTERNS for file in source.glob(pattern)}:
        rewritten = file.suffix == ".safetensors" or file.name in _REWRITTEN
        if file.is_file() and (weights or not rewritten):
            shutil.copyfile(file, target / file.name)


def _convert(model: nn.Module, config: Json, wanted: Conversion, path: Path, say: Report) -> Json:
    """Change ``model`` in place, lazily; return its new config."""
    config = dict(config)
    dtype = wanted.dtype
    if wanted.dequantize:
        usual = unpack(model, path)
        dtype = dtype or usual
        config = {key: value for key, value in config.items() if not key.startswith("quantization")}
    if dtype is not None:
        cast_parameters(model, dtype, path)
        config["torch_dtype"] = dtype
    if wanted.quantize_bits is not None:
        config = _quantize(model, config, wanted, path, say)
    return config


def unpack(model: nn.Module, path: Path) -> str:
    """Dequantize ``model`` in float32; return the name of the dtype that most of its floating-point
    parameters had.

    Raises:
        ModelError: the model is not quantized.
    """
    floating = [
        (name, value)
        for name, value in flatten(model.parameters())
        if mx.issubdtype(value.dtype, mx.floating)
    ]
    if not _is_quantized(model):
        raise ModelError(
            "the model is not quantized",
            code="model-not-quantised",
            where=str(path),
            hint="leave --dequantize out",
        )
    model.update(unflatten([(name, value.astype(mx.float32)) for name, value in floating]))
    mlx_lm.dequantize_model(model)
    usual = Counter(str(value.dtype) for _, value in floating).most_common(1)[0][0]
    return usual.rpartition(".")[2]


def _quantize(model: nn.Module, config: Json, wanted: Conversion, path: Path, say: Report) -> Json:
    """Quantize the layers that the group size divides, report the others, and return the config.

    Raises:
        ModelError: the model is quantized already, or no layer can be quantized.
    """
    if _is_quantized(model):
        hint = "add --dequantize to unpack it first, or leave --quantize out"
        raise ModelError(
            "the model is quantized already", code="model-is-quantised", where=str(path), hint=hint
        )
    group_size = wanted.group_size or DEFAULT_GROUP_SIZE
    with quantising(path), redirect_stdout(io.StringIO()) as said:  # mlx_lm prints its result
        model, config = mlx_lm.quantize_model(model, config, group_size, wanted.quantize_bits)
    if not _is_quantized(model):
        hint = f"choose another of {GROUP_SIZES}"
        raise ModelError(
            f"no layer can be cut into groups of {group_size}",
            code="quantisation-unsupported",
            where="--group-size",
            hint=hint,
        )
    say(said.getvalue().strip().removeprefix("[INFO] "))
    dense = [name for name, module in model.named_modules() if hasattr(module, "to_quantized")]
    if dense:
        say(
            f"{counted(len(dense), 'layer')} left dense, as groups of {group_size} do not divide them: {dense[0]}, ..."
        )
    return config


def _is_quantized(model: nn.Module) -> bool:
    return any(name.endswith(".scales") for name, _ in flatten(model.parameters()))


def save_weights(model: nn.Module, config: Json, out: Path) -> None:
    """Write the weights, their index and ``config.json``; ``model`` is empty afterwards.

    Raises:
        StorageError: the weights cannot be written.
    """
    keep_vision = "vision_tower" in getattr(model, "model", {})
    try:
        mlx_lm.save_model(out, model, donate_model=True)
    except RuntimeError as error:  # how MLX reports a failed write
        raise write_error(out / "model.safetensors", error) from error
    mlx_lm.save_config(config, out / "config.json", keep_vision_config=keep_vision)
