"""Check of options against a model's numbers of blocks, heads and experts, by its config.json
alone.

Launching commands check before any rank starts, so this module loads no MLX. Ranks check the
modules themselves, too, because these may differ from the numbers in config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allhands.config.combinations import ranks_of_stage
from allhands.config.pretrain_schema import pretraining
from allhands.config.schema import TrainConfig
from allhands.errors import ConfigError, ModelError
from allhands.io.formatting import counted
from allhands.model.shapes import find_shape, model_config

_ADAPTER_LAYERS = 16
# Number of stages of a rank with the interleaved schedule.
INTERLEAVED = 2
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_ANY_VOCABULARY = 256


def require_divisible(
    config: TrainConfig, num_ranks: int, values: Mapping[str, Any] | None = None
) -> None:
    """Refuse options that do not fit the numbers of the model.

    Numbers that are not known here are not checked.

    Args:
        values: the model's config.json; ``None``: it is read if the model's directory is here.

    Raises:
        ConfigError: the model has fewer blocks than requested, ``--pp-split`` does not divide
            them, or the number of ranks does not divide the heads or the experts.
        ModelError: experts are to be divided, but the model has none.
    """
    values = _values_here(config) if values is None else values
    blocks = _number(values, "num_hidden_layers")
    if blocks is not None:
        if config.train and pretraining(config) is None:
            resolve_layers(blocks, config)
        if config.strategy == "pipeline" and num_ranks > 1:
            stages = config.pp or num_ranks // ranks_of_stage(config)
            given = split_given(config, blocks, stages)
            stages_per_rank(config, len(given), blocks, stages)
    if config.tp > 1:
        _require_heads(values, config.tp)
    if config.ep > 1 and blocks is not None:
        _require_experts(values, config.ep)


def _require_heads(values: Mapping[str, Any], ranks: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = _number(values, name)
        if heads is not None and heads % ranks:
            raise ConfigError(
                f"the model has {counted(heads, 'head')} ({name})",
                code="heads-not-divisible",
                where=f"--tp {ranks}",
                hint="take a number of ranks that divides it, or leave --tp out",
            )


def _require_experts(values: Mapping[str, Any], ranks: int) -> None:
    counts = [count for name in _EXPERTS if (count := _number(values, name))]
    if not counts and any("expert" in name for name, value in values.items() if value):
        return  # the number has another key, which ranks understand
    if not counts:
        raise ModelError(
            "no block of this model has experts",
            code="model-without-experts",
            where=f"--ep {ranks}",
            hint="leave it out",
        )
    if counts[0] % ranks:
        raise ConfigError(
            f"a block of the model has {counted(counts[0], 'expert')}",
            code="experts-not-divisible",
            where=f"--ep {ranks}",
            hint="take a number of ranks that divides it, or leave --ep out",
        )


def _values_here(config: TrainConfig) -> Mapping[str, Any]:
    """Return the config.json of the model, or of a new model's shape; {} if it is not here."""
    new = pretraining(config)
    if new is not None:
        numbers = {"vocabulary": _ANY_VOCABULARY, **new.numbers()}
        return model_config(find_shape(new.shape, numbers))
    try:
        found: Any = json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # ranks fetch it, or say what is wrong with it
    return found if isinstance(found, dict) else {}


def _number(values: Mapping[str, Any], name: str) -> int | None:
    """Return a number of a config.json; ``None`` if it is missing."""
    found = values.get(name)
    return found if isinstance(found, int) else None


def resolve_layers(available: int, config: TrainConfig) -> int:
    """Return the number of blocks to train, counted from the last; -1 for all.

    Args:
        available: number of blocks of the model.

    Raises:
        ConfigError: more blocks are requested than the model has.
    """
    if config.num_layers is None:
        return -1 if config.fine_tune_type == "full" else min(_ADAPTER_LAYERS, available)
    if config.num_layers > available:
        raise ConfigError(
            f"{config.num_layers} layers asked for, but the model has {available}",
            code="value-out-of-range",
            where="--num-layers",
            hint=f"give at most {available}, or -1 for all",
        )
    return config.num_layers


def split_given(config: TrainConfig, num_blocks: int, num_ranks: int) -> list[int]:
    """Return the number of blocks of each stage from ``--pp-split``; empty for "auto".

    Raises:
        ConfigError: the numbers do not divide the model.
    """
    if config.pp_split == "auto":
        return []
    given = [int(each) for each in config.pp_split.split(",")]
    interleaved = config.pp_schedule == "interleaved" and len(given) % num_ranks == 0
    per_rank = max(INTERLEAVED, len(given) // num_ranks) if interleaved else 1
    check_split(given, num_blocks, num_ranks * per_rank)
    return given


def stages_per_rank(config: TrainConfig, num_given: int, num_blocks: int, num_ranks: int) -> int:
    """Return the number of stages of each rank.

    Args:
        num_given: number of stages in ``--pp-split``; 0: not given.

    Raises:
        ConfigError: the model has fewer blocks than stages.
    """
    per_rank = num_given // num_ranks or (INTERLEAVED if config.pp_schedule == "interleaved" else 1)
    if num_blocks < num_ranks * per_rank:
        raise ConfigError(
            f"{counted(num_blocks, 'block')}: too few for {num_ranks * per_rank} stages",
            code="stages-exceed-blocks",
            where="--strategy pipeline",
            hint="take fewer ranks"
            + ", or --pp-schedule 1f1b" * (per_rank > 1 and num_blocks >= num_ranks),
        )
    return per_rank


def check_split(split: Sequence[int], num_blocks: int, num_stages: int) -> None:
    """Require one number of blocks for each stage, with the model's blocks as their sum.

    Raises:
        ConfigError: the numbers are not so.
    """
    told = ",".join(map(str, split))
    if len(split) != num_stages or min(split) < 1 or sum(split) != num_blocks:
        raise ConfigError(
            f"{told} does not divide the model's {counted(num_blocks, 'block')} among {num_stages} stages",
            code="pp-split-mismatch",
            where="--pp-split",
            hint=f"give {num_stages} numbers above 0 whose sum is {num_blocks}, or auto",
        )
