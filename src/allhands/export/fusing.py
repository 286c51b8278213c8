"""Adapters merged into the model below them: an ordinary model directory, checked before it gets
its name.

mlx_lm merges (``LoRALinear.fuse``, ``DoRALinear.fuse``). This module unpacks weights in float32 and
rounds them once, keeps the type of each replaced layer, and reads the written files back: every
weight must be the merged one, bit for bit, and the outputs are compared with those of model and
adapter.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from huggingface_hub import ModelCardData
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear

from allhands.data.templates import TEMPLATE_FILE, ChatChoice
from allhands.data.token_roles import unstopped
from allhands.errors import ConfigError, ModelError
from allhands.infer.generate import put_on
from allhands.io.names import CONFIG_FILE
from allhands.io.staging import publish, staging
from allhands.io.trees import flatten, unflatten
from allhands.model.beyond import Use, limits_told
from allhands.model.load import (
    HARMED,
    Json,
    LoadedTokenizer,
    build,
    cast_parameters,
    check_dtype,
    check_target,
    copy_files,
    holds_files,
    load_tokenizer,
    require_numbers,
    rows_of_embedding,
    save_weights,
    unpack,
)
from allhands.model.reading import opened
from allhands.model.sources import is_path, name_of, resolve
from allhands.model.tokenizer import GENERATION_FILE, with_stop
from allhands.run.adapter_files import check_adapter, model_below

# Tokens of the text that both models are asked, drawn at random.
_PROBE_TOKENS = 16
# Largest permitted difference of the logits, as a part of their spread: rounding, with room to
# spare.
_LIMITS = {mx.float32: 1e-3, mx.float16: 0.05, mx.bfloat16: 0.2}

# Called with the staged directory and its config.json's content, before the directory is in its
# place.
Finish = Callable[[Path, Json], None]
Weights = dict[str, mx.array]
# Weights by mlx_lm's names and the config; the same weights as a file's reader knows them.
Layout = Callable[[Weights, Json], Weights]
# Shape, type and checksum of an array.
Digest = tuple[tuple[int, ...], str, int]


@dataclass(frozen=True)
class FuseOptions:
    """The options of :func:`fuse_model`.

    Attributes:
        source: the model below: ``demo``, a directory or a Hub repository; ``None``: the one that
            the adapter names.
        adapter_path: directory of a training run; ``None``: the model alone.
        dequantize: unpack quantised weights; without it layers with an adapter are quantised again.
        dtype: of the floating-point weights; ``None`` keeps the model's.
        force: replace a model that is in the output directory.
        library: library that loads the result, for its card.
    """

    source: str | None
    adapter_path: Path | None
    dequantize: bool = False
    dtype: str | None = None
    force: bool = False
    trust_remote_code: bool = False
    library: str = "mlx"


@dataclass(frozen=True)
class Fused:
    """The result of :func:`fuse_model`.

    Attributes:
        kind: lora, dora, full; ``none`` without an adapter.
        num_layers: layers into which an adapter was merged.
        difference: of the logits to those of model and adapter: root mean square, as a part of
            their spread.
        requantized: True if merged layers were quantised again, which loses some of the training.
        stop: the token that was added to those at which generation stops, because answers end with
            it.
    """

    path: Path
    source: str
    kind: str
    num_layers: int
    difference: float
    requantized: bool
    stop: str | None = None


def fuse_model(
    options: FuseOptions,
    out: Path,
    finish: Finish = lambda staged, config: None,
    layout: Layout | None = None,
) -> Fused:
    """Write the model with its adapter merged into the directory ``out``, whole or not at all.

    Args:
        layout: names and shapes to write in place of mlx_lm's own; mlx_lm has to read them as the
            same model.

    Raises:
        ConfigError: no such dtype, or ``out`` is taken.
        ModelError: model or adapter is missing, they do not match, or the written model
            computes other outputs.
        StorageError: ``out`` cannot be written.
    """
    check_dtype(options.dtype)
    kind, below = described(options)
    path = resolve(below).resolve()
    target = out.resolve()
    seen = check_target(target, path, options.force)
    if holds_files(target) and not options.force:
        raise ConfigError(
            "a model is there already",
            code="output-exists",
            where=str(out),
            hint="add --force to replace it",
        )
    chat = ChatChoice(kept=options.adapter_path)
    tokenizer = load_tokenizer(str(path), trust_remote_code=options.trust_remote_code, chat=chat)
    # First of all, so that an unwritable place is found before any computation.
    with (
        limits_told(Use(str(path), options.trust_remote_code, adapter=options.adapter_path)),
        staging(target) as staged,
    ):
        adapted = _adapted(options, path)
        wanted, kinds = _logits(adapted), _floating(adapted)
        del adapted
        require_numbers(wanted, options.adapter_path or path)
        copy_files(path, staged, weights=False)
        model, config, count, again = _merged(options, path)
        kinds |= _floating(model)
        stop = _stop(options.adapter_path, tokenizer)
        if stop is not None:
            config = with_stop(config, stop[1], tokenizer.tokenizer.eos_token_id)
        expected = _digests(dict(flatten(model.parameters())))
        save_weights(model if layout is None else _laid_out(model, config, layout), config, staged)
        del model
        _write_conversation(staged, tokenizer, stop)
        _write_card(staged, below, kind, options.library)
        limit = None if again else max(_LIMITS.get(kind, 0.2) for kind in kinds)
        read, _ = build(staged, options.trust_remote_code)
        # Another layout as mlx_lm reads it; its own from the files, since it changes values of a
        # few on reading.
        in_files = {name: value for arrays, _ in opened(staged) for name, value in arrays.items()}
        _require_same(expected, dict(flatten(read.parameters())) if layout else in_files, out)
        difference = _check(read, wanted, limit, out)
        finish(staged, config)
        publish(staged, target, seen)
    return Fused(target, below, kind, count, difference, again, None if stop is None else stop[0])


def _stop(adapter_path: Path | None, tokenizer: LoadedTokenizer) -> tuple[str, int] | None:
    """Return the token, with its id, that ends answers without stopping the model.

    Adapters of allhands say whether answers were trained.
    """
    found = unstopped(tokenizer.tokenizer)
    if adapter_path is not None and found is not None:
        found = found if _settings_of(adapter_path).get("stop_tokens", True) else None
    return found


def _write_conversation(
    staged: Path, tokenizer: LoadedTokenizer, stop: tuple[str, int] | None
) -> None:
    """Write the chat template of the training and the tokens that end answers."""
    generation = staged / GENERATION_FILE
    if stop is not None and generation.is_file():
        values = json.loads(generation.read_bytes())
        values = with_stop(values, stop[1], tokenizer.tokenizer.eos_token_id)
        generation.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if tokenizer.template is None:
        return
    (staged / TEMPLATE_FILE).write_text(tokenizer.template, encoding="utf-8")
    config = staged / "tokenizer_config.json"
    values = json.loads(config.read_bytes()) if config.is_file() else {}
    if "chat_template" in values:  # an earlier version of transformers looks only here
        text = (
            json.dumps(
                {**values, "chat_template": tokenizer.template}, indent=2, ensure_ascii=False
            )
            + "\n"
        )
        config.write_text(text, encoding="utf-8")


def described(options: FuseOptions) -> tuple[str, str]:
    """Check the adapter; return its kind and its base model: the source, or the one that it names.

    Raises:
        ModelError: the adapter is missing or torn.
        ConfigError: it names no model, and no source was given.
    """
    adapter_path, source = options.adapter_path, options.source
    if adapter_path is None:
        assert source is not None
        return "none", source
    check_adapter(adapter_path)
    config = _settings_of(adapter_path)
    return str(config.get("fine_tune_type", "lora")), source or model_below(adapter_path, config)


def _settings_of(adapter_path: Path) -> Json:
    return json.loads((adapter_path / CONFIG_FILE).read_bytes())


def _adapted(options: FuseOptions, path: Path) -> nn.Module:
    """Return the model with its adapter."""
    model, _ = build(path, options.trust_remote_code)
    if options.adapter_path is not None:
        put_on(model, options.adapter_path)
    return model


def _floating(model: nn.Module) -> set[mx.Dtype]:
    """The floating-point types of its parameters."""
    return {
        value.dtype
        for _, value in flatten(model.parameters())
        if mx.issubdtype(value.dtype, mx.floating)
    }


def _merged(options: FuseOptions, path: Path) -> tuple[nn.Module, Json, int, bool]:
    """The model with its adapter merged, its config, the layers merged, and whether any was
    quantised again.
    """
    model: Any
    model, config = build(path, options.trust_remote_code)
    config, dtype = dict(config), options.dtype
    if options.dequantize and "quantization" in config:
        usual = unpack(model, path)
        dtype = dtype or usual
        config = {key: value for key, value in config.items() if not key.startswith("quantization")}
    if options.adapter_path is not None:
        put_on(model, options.adapter_path)
    found = [(name, module) for name, module in model.named_modules() if hasattr(module, "fuse")]
    again = any(hasattr(_base(module), "bits") for _, module in found)
    for name, module in found:
        model.update_modules(unflatten([(name, _fused(module))]))
    if dtype is not None:
        cast_parameters(model, dtype, path)
        config["torch_dtype"] = dtype
    return model, config, len(found), again


def _base(module: Any) -> Any:
    return module["linear"] if "linear" in module else module["embedding"]


def _fused(module: Any) -> nn.Module:
    """One layer with its adapter merged, of the type that it had without."""
    base = _base(module)
    dense: Any
    if not isinstance(module, DoRALinear | DoRAEmbedding):
        return module.fuse()
    # DoRA's magnitudes are float32, and would make float32 of the layer.
    dense = module.fuse(dequantize=True)
    quantized = hasattr(base, "bits")
    dense.weight = dense.weight.astype(base.scales.dtype if quantized else base.weight.dtype)
    if not quantized:
        return dense
    return dense.to_quantized(group_size=base.group_size, bits=base.bits, mode=base.mode)


def _logits(model: Any) -> np.ndarray[Any, Any]:
    """(1, tokens, vocabulary) float32 for a text drawn at random, always the same."""
    size = rows_of_embedding(model) or 256
    model.eval()
    tokens = np.random.default_rng(0).integers(0, size, (1, _PROBE_TOKENS))
    return np.array(model(mx.array(tokens)).astype(mx.float32))


def _digests(weights: Weights) -> dict[str, Digest]:
    """A digest of each weight, one weight in memory after the other."""

    def digest(value: mx.array) -> Digest:
        raw = np.array(mx.contiguous(value).reshape(-1).view(mx.uint8))
        return tuple(value.shape), str(value.dtype), zlib.crc32(raw.data)

    return {name: digest(value) for name, value in weights.items()}


def _laid_out(model: nn.Module, config: Json, layout: Layout) -> nn.Module:
    """The weights of ``model``, which is empty afterwards, under the names of another reader."""
    weights = dict(flatten(model.parameters()))
    model.update(unflatten([(name, mx.array([])) for name in weights]))
    flat = nn.Module()
    dict.update(flat, layout(weights, config))
    return flat


def _require_same(expected: dict[str, Digest], weights: Weights, out: Path) -> None:
    """Refuse written weights that differ from the intended ones in any bit (ModelError)."""
    read = _digests(weights)
    for name in sorted(expected.keys() | read.keys()):
        if expected.get(name) != read.get(name):
            raise ModelError(
                f"the written files are not the model, and were not kept: shape, type and checksum of {name} are read "
                f"back as {read.get(name)}, not {expected.get(name)}",
                code="written-files-differ",
                where=str(out),
                hint="free disk space and try again; if it happens again, this is a defect: report it",
            )


def _check(model: nn.Module, wanted: np.ndarray[Any, Any], limit: float | None, out: Path) -> float:
    """Compare the logits of the written model; ``limit`` is ``None`` if a difference is expected."""
    found = _logits(model)
    difference = float(np.sqrt(np.mean((found - wanted) ** 2)) / max(float(np.std(wanted)), 1e-9))
    hint = (
        "try --dequantize or --dtype float32; without an error of yours this is a defect: report it"
    )
    if not np.isfinite(difference):
        told = "the outputs of the fused model are not finite, unlike those of model and adapter, and it was not kept"
        hint = "float16 cannot hold what they compute: --dtype bfloat16 or float32"
        raise ModelError(
            told,
            code="fused-model-not-finite",
            where=str(out),
            hint=hint if mx.float16 in _floating(model) else HARMED,
        )
    if limit is not None and difference > limit:
        raise ModelError(
            f"the outputs of the fused model are not those of model and adapter (logits differ by {difference:.2g} of their "
            "spread), and was not kept",
            code="fused-model-differs",
            where=str(out),
            hint=hint,
        )
    return difference


def _write_card(staged: Path, source: str, kind: str, library: str) -> None:
    """``README.md`` in place of the original's, which describes another model."""
    on_hub = "/" in source and not is_path(source) and not Path(source).exists()
    data = ModelCardData(
        base_model=source if on_hub else None,
        library_name=library,
        pipeline_tag="text-generation",
        tags=[library],
    )
    name = source if on_hub else name_of(source)
    how = {"none": "", "full": ", fine-tuned in full"}.get(
        kind, f", with a trained {kind} adapter merged"
    )
    (staged / "README.md").write_text(
        f"---\n{data.to_yaml()}\n---\n\nMade with allhands from {name}{how}.\n", encoding="utf-8"
    )
