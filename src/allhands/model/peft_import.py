"""Conversion of PEFT's adapters to mlx_lm's format; the reverse of :mod:`allhands.model.peft`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from allhands.errors import ModelError
from allhands.model.peft import CONFIG_FILE, LAYER, WEIGHTS_FILE, Adapter
from allhands.model.peft_base import HEAD, PeftBase

# Name of a tensor: A, B or DoRA's magnitudes; some versions put the adapter's name before "weight".
_TENSOR = re.compile(
    r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)"
    r"(?:\.(?!weight$)[^.]+)?(?:\.weight)?$"
)
# Weights of the model itself, which PEFT saves beside adapters of embeddings.
_BASE_WEIGHT = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.base_layer\.weight$")
# The names by which PEFT knows that embeddings are adapted.
_EMBEDDINGS = ("embed_tokens", HEAD)
_HOW = "give the directory that peft's save_pretrained wrote"


@dataclass(frozen=True)
class _Module:
    """An adapted module.

    Attributes:
        first: (in, rank) factor; stacked experts have one more axis in front, in both factors.
        second: (rank, out) factor.
        scale: number by which the update is multiplied.
        magnitudes: (out,) magnitudes of DoRA; ``None`` for LoRA.
    """

    first: mx.array
    second: mx.array
    scale: float
    magnitudes: mx.array | None

    @property
    def rank(self) -> int:
        return int(self.first.shape[-1])

    def widened(self, rank: int, scale: float) -> tuple[mx.array, mx.array]:
        """Return both factors, filled with zeros up to ``rank``, for an update with ``scale``.

        A difference between the scales goes into the second factor.
        """
        spare, stacked = rank - self.rank, [(0, 0)] * (self.first.ndim - 2)
        second = self.second if self.scale == scale else self.second * (self.scale / scale)
        return mx.pad(self.first, [*stacked, (0, 0), (0, spare)]), mx.pad(
            second, [*stacked, (0, spare), (0, 0)]
        )

    def require_shape(self, name: str, shape: tuple[int, int], *, embedding: bool) -> None:
        """Refuse an update of another shape than the weight's (ModelError)."""
        inputs, outputs = int(self.first.shape[0]), int(self.second.shape[1])
        found = (inputs, outputs) if embedding else (outputs, inputs)
        if found != shape:
            raise ModelError(
                f"the adapter does not fit the model: {name} is for a weight of {found}, the model's is {shape}",
                code="adapter-mismatch",
                hint="use the model that the adapter was trained on: --model",
            )

    def is_transpose_of(self, other: _Module) -> bool:
        """Return True if this update of an output layer equals that of its tied embedding."""
        return (
            self.scale == other.scale
            and self.magnitudes is None
            and other.magnitudes is None
            and bool(mx.array_equal(self.first.T, other.second))
            and bool(mx.array_equal(self.second.T, other.first))
        )


def from_peft(adapter: Adapter, base: PeftBase, *, num_layers: int) -> Adapter:
    """Convert an adapter of PEFT to the format of mlx_lm and ``allhands``.

    mlx_lm knows one rank and one scale. So factors of lower rank are filled up with zeros, and
    another scale is put into the second factor.

    Args:
        base: the model below the adapter.
        num_layers: number of blocks of that model.

    Raises:
        ModelError: mlx_lm's adapters cannot hold it, it is broken, or it does not fit the model.
    """
    _require_plain(adapter.config, base)
    tensors = _without_base_weights(adapter.weights, base)
    modules = _in_mlx(
        _without_tied_head(_modules(tensors, adapter.config), adapter.config, base), base
    )
    scale = Counter(each.scale for each in modules.values()).most_common(1)[0][0]
    rank = max(each.rank for each in modules.values())
    weights: dict[str, mx.array] = {}
    keys: set[str] = set()
    lowest = num_layers
    for name, each in modules.items():
        place = LAYER.match(name)
        keys.add(name if place is None else place["inside"])
        lowest = lowest if place is None else min(lowest, int(place["number"]))
        first, second = each.widened(rank, scale)
        if first.ndim > 2:  # mlx_lm keeps those of experts as PEFT does
            first, second = (mx.contiguous(value.swapaxes(-1, -2)) for value in (first, second))
        weights |= {f"{name}.lora_a": first, f"{name}.lora_b": second}
        if each.magnitudes is not None:
            weights[f"{name}.m"] = each.magnitudes
    settings = adapter.config
    config = {
        "fine_tune_type": "dora" if settings.get("use_dora") else "lora",
        # At least one block, counted from the end as in mlx_lm; modules outside the blocks have
        # their full names among the keys.
        "num_layers": max(num_layers - lowest, 1),
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": float(settings.get("lora_dropout") or 0.0),
            "keys": sorted(keys),
        },
    }
    return Adapter(weights, config)


# Settings that do not change the result of an adapter, or that are read by name below.
_HARMLESS = frozenset(
    """
    task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r lora_alpha
    lora_dropout rank_pattern alpha_pattern use_rslora use_dora target_modules exclude_modules layers_to_transform
    layers_pattern ensure_weight_tying fan_in_fan_out bias init_lora_weights eva_config loftq_config runtime_config
    megatron_core qalora_group_size
    """.split()  # noqa: SIM905
)
_REASONS = {
    "modules_to_save": "whole modules are saved with it",
    "trainable_token_indices": "rows of single tokens are trained",
    "target_parameters": "it adapts parameters that are no layers",
    "alora_invocation_tokens": "it is switched on by tokens",
    "megatron_config": "it is for Megatron's layers",
    "lora_bias": "its layers have biases",
    "layer_replication": "it repeats layers of the model",
}
# Initialisations that leave the model's own weights unchanged; others change them.
_BEGINNINGS = ("gaussian", "eva", "orthogonal")


def _merge(base: PeftBase, first: str = "") -> str | None:
    """Return advice to merge an adapter that mlx_lm cannot hold; ``None`` if mlx_lm could not read
    the merged model.

    ``first``: text of an earlier step, to put in front.
    """
    if base.architecture is None or base.architecture.modules:
        return None
    return f"{first}merge it in Python, merge_and_unload() and save_pretrained(DIR), and give DIR as --model alone"


_UNTIE = (
    "part them in Python, model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone()) "
    "and model.config.tie_word_embeddings = False, before PeftModel.from_pretrained; then "
)
_TIE = (
    "train it with ensure_weight_tying=True and lm_head among target_modules (PEFT 0.19 or later)"
)


def _require_plain(config: Mapping[str, Any], base: PeftBase) -> None:
    """Refuse settings beyond LoRA or DoRA beside frozen weights (ModelError)."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"it is of PEFT's type {kind}",
            code="peft-setting-unsupported",
            where=CONFIG_FILE,
            hint="LORA can be read, DoRA included",
        )
    for name, value in config.items():
        if value and name not in _HARMLESS:
            reason = _REASONS.get(name, "a setting that is not known here")
            raise ModelError(
                f"{reason} ({name}), which mlx_lm's adapters cannot hold",
                code="peft-setting-unsupported",
                where=CONFIG_FILE,
                hint=_merge(base),
            )
    begun = config.get("init_lora_weights")
    changed = isinstance(begun, str) and begun.lower() not in _BEGINNINGS
    for wrong, what in (
        (config.get("bias", "none") != "none", f"it trains biases (bias: {config.get('bias')})"),
        (
            changed,
            f"it was trained against changed weights of the model (init_lora_weights: {begun})",
        ),
    ):
        if wrong:
            message = f"{what}, which mlx_lm's adapters cannot hold"
            raise ModelError(
                message, code="peft-setting-unsupported", where=CONFIG_FILE, hint=_merge(base)
            )


def _without_base_weights(weights: Mapping[str, mx.array], base: PeftBase) -> dict[str, mx.array]:
    """Return the adapter's tensors without the model's embeddings, which PEFT also saves.

    Raises:
        ModelError: the saved embeddings are not the model's.
    """
    kept: dict[str, mx.array] = {}
    for name, value in weights.items():
        match = _BASE_WEIGHT.match(name)
        if match is None:
            kept[name] = value
            continue
        if not base.holds(match["module"], value):
            raise ModelError(
                f"{name}: the embeddings saved with it are not the model's, as after adding tokens",
                code="peft-embeddings-differ",
                where=WEIGHTS_FILE,
                hint=_merge(base),
            )
    return kept


def _without_tied_head(
    modules: dict[str, _Module], config: Mapping[str, Any], base: PeftBase
) -> dict[str, _Module]:
    """Return the modules without a tied output layer, if its adapter equals the embedding's.

    Raises:
        ModelError: embedding and output layer share their weights, but not the adapter.
    """
    if not base.tied:
        return modules
    head = modules.get(HEAD)
    ours = base.modules_of_transformers
    embedding = next(
        (each for name, each in modules.items() if ours.get(name) in base.embeddings), None
    )
    if embedding is None and head is None:
        return modules
    if embedding is None:
        is_shared, alone, other = False, "the output layer", "the embedding"
    elif head is None:
        is_shared, alone, other = _ties(config, embedding), "the embedding", "the output layer"
    else:
        is_shared, alone, other = (
            head.is_transpose_of(embedding),
            "embedding and output layer",
            "the other",
        )
    if is_shared:
        return {name: each for name, each in modules.items() if name != HEAD}
    raise ModelError(
        f"embedding and output layer of this model share their weights, and the adapter of {alone} leaves {other} "
        "alone (no ensure_weight_tying); in MLX one adapter reaches both",
        code="peft-weights-tied",
        where=CONFIG_FILE,
        hint=(_merge(base, _UNTIE) if base.can_untie else None) or _TIE,
    )


def _ties(config: Mapping[str, Any], embedding: _Module) -> bool:
    """Return True if PEFT, by its own rules, gives the output layer the embedding's adapter."""
    targets: Any = config.get("target_modules") or []
    named = (
        any(re.fullmatch(targets, name) for name in _EMBEDDINGS)
        if isinstance(targets, str)
        else any(str(name).rpartition(".")[2] in _EMBEDDINGS for name in targets)
    )
    same = _scale(HEAD, embedding.rank, config) == embedding.scale
    return bool(config.get("ensure_weight_tying")) and named and same


def _absent(name: str, base: PeftBase) -> ModelError:
    """Return the error for a module that the model does not have."""
    hint = "use the model that the adapter was trained on: --model"
    if base.architecture or base.proved:
        what = f"the model has no layer {name}"
        return ModelError(what, code="layer-missing", where=WEIGHTS_FILE, hint=hint)
    return ModelError(
        f"the names of the weights of {base.kind} in transformers are not known here",
        code="architecture-unsupported",
        where=WEIGHTS_FILE,
        hint=hint,
    )


def _in_mlx(modules: dict[str, _Module], base: PeftBase) -> dict[str, _Module]:
    """Return the modules by mlx_lm's names, with experts stacked.

    Raises:
        ModelError: the model does not have a module, or a module has another shape or a DoRA that
            mlx_lm lacks.
    """
    found: dict[str, _Module] = {}
    stacks: dict[str, dict[str, _Module]] = {}
    for name, each in modules.items():
        ours = base.modules_of_transformers.get(name)
        if not ours:
            raise _absent(name, base)
        if each.magnitudes is not None and (ours in base.embeddings or ours in base.experts):
            what = "an embedding" if ours in base.embeddings else "experts"
            raise ModelError(
                f"{name}: mlx_lm has no DoRA of {what} like PEFT's",
                code="peft-setting-unsupported",
                where=CONFIG_FILE,
                hint=_merge(base),
            )
        each.require_shape(name, base.shapes[ours], embedding=ours in base.embeddings)
        if ours in base.experts:
            stacks.setdefault(ours, {})[name] = each
        else:
            found[ours] = each
    for ours, parts in stacks.items():
        found[ours] = _stacked([parts.get(name) for name in base.names(ours)])
    return dict(sorted(found.items(), key=_in_order))


def _stacked(parts: list[_Module | None]) -> _Module:
    """Stack the adapters of experts into one module; an expert without an adapter gets zeros."""
    known = [each for each in parts if each is not None]
    rank, scale = max(each.rank for each in known), known[0].scale
    shapes = (known[0].first.shape[0], rank), (rank, known[0].second.shape[1])
    nothing = _Module(mx.zeros(shapes[0]), mx.zeros(shapes[1]), scale, None)
    factors = [(each or nothing).widened(rank, scale) for each in parts]
    first, second = (mx.stack([pair[place] for pair in factors]) for place in (0, 1))
    return _Module(first, second, scale, None)


def _modules(weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> dict[str, _Module]:
    """Return the adapted modules by PEFT's names.

    Raises:
        ModelError: the tensors or settings are not those of a LoRA adapter.
    """
    found: dict[str, dict[str, mx.array]] = {}
    for name, value in weights.items():
        match = _TENSOR.match(name)
        if match is None:
            raise ModelError(
                f"{name} is not a part of a LoRA adapter",
                code="adapter-invalid",
                where=WEIGHTS_FILE,
                hint=_HOW,
            )
        found.setdefault(match["module"], {})[match["part"].removeprefix("embedding_")] = value
    if not found:
        raise ModelError(
            "it holds no adapter", code="adapter-invalid", where=WEIGHTS_FILE, hint=_HOW
        )
    return {
        name: _module(name, parts, config) for name, parts in sorted(found.items(), key=_in_order)
    }


def _in_order(item: tuple[str, Any]) -> tuple[Any, ...]:
    """Sorting key that puts layer 2 before layer 10."""
    return tuple(int(part) if part.isdigit() else -1 for part in item[0].split(".")), item[0]


def _module(name: str, parts: Mapping[str, mx.array], config: Mapping[str, Any]) -> _Module:
    if missing := {"A", "B"} - parts.keys():
        raise ModelError(
            f"{name} has no lora_{missing.pop()}",
            code="adapter-invalid",
            where=WEIGHTS_FILE,
            hint=_HOW,
        )
    a, b, magnitudes = parts["A"], parts["B"], parts.get("magnitude_vector")
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ModelError(
            f"{name}: factors of shape {shapes} are none of a linear layer",
            code="adapter-invalid",
            where=WEIGHTS_FILE,
        )
    if bool(config.get("use_dora")) != (magnitudes is not None):
        raise ModelError(
            f"{name}: use_dora and lora_magnitude_vector contradict each other",
            code="adapter-invalid",
            where=CONFIG_FILE,
        )
    rank = _of_pattern(config.get("rank_pattern"), name, config.get("r", a.shape[0]))
    if rank != a.shape[0]:
        problem = (
            f"{name} is described as of rank {rank!r}, and its weights are of rank {a.shape[0]}"
        )
        raise ModelError(problem, code="adapter-rank-mismatch", where=CONFIG_FILE, hint=_HOW)
    flat = None if magnitudes is None else magnitudes.reshape(-1)
    scale = _scale(name, int(a.shape[0]), config)
    return _Module(mx.contiguous(a.T), mx.contiguous(b.T), scale, flat)


def _scale(name: str, rank: int, config: Mapping[str, Any]) -> float:
    """Return PEFT's scale of a module's update (ModelError if lora_alpha is not a number)."""
    alpha = _of_pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise ModelError(
            f"lora_alpha is not a number: {alpha!r}",
            code="adapter-invalid",
            where=CONFIG_FILE,
            hint=_HOW,
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_pattern(patterns: Mapping[str, Any] | None, name: str, otherwise: Any) -> Any:
    """Return the value whose pattern matches the end of a module's name, as PEFT does."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return otherwise
