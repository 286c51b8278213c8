"""Ways of dividing a model that its architecture and the options of a training allow, by its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from allhands.config.combinations import refuse_combinations
from allhands.config.schema import TrainConfig
from allhands.model.context import CAN_DIVIDE_ROWS
from allhands.model.reading import module_of
from allhands.model.stages import CAN_BE_CUT
from allhands.parallel.matrices import CAN_BE_DIVIDED
from allhands.parallel.registry import STRATEGIES, TrainingNeeds
from allhands.run.training_memory import DecoderShape

Name = Literal["fsdp", "tensor", "context"]

# Tokens of a row for each rank, from which on dividing rows is looked at: a shorter piece takes about as long to hand
# out as to compute.
_LONG = 256
# Options that divide a model, as they are where nothing is divided, and the change for each way.
_UNPLANNED: Mapping[str, Any] = {
    "pp": None,
    "pp_schedule": "1f1b",
    "pp_split": "auto",
    "reshard": "auto",
    "dp_shard": None,
}
_WHOLE: Mapping[str, Any] = {**_UNPLANNED, "strategy": "auto", "tp": 1, "cp": 1}
_CHANGES: Mapping[Name, Mapping[str, Any]] = {"fsdp": {"strategy": "fsdp"}, "tensor": {"tp": 2}, "context": {"cp": 2}}


@dataclass(frozen=True)
class Dividing:
    """Ways of dividing a model among ranks, beside data parallel and pipeline.

    Attributes:
        ways: those that the architecture and the options allow for some number of ranks.
        divisible: numbers of heads, and of inner features that a last projection has as inputs: tensor parallel ranks
            divide them all.
        group: numbers of a group of quantised weights, which is not divided; 1: weights are dense.
    """

    ways: frozenset[Name] = frozenset()
    divisible: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()
    group: int = 1

    def among(self, ranks: int, row_tokens: int) -> tuple[Name, ...]:
        """Return the ways for so many ranks and rows of at most so many tokens, in a fixed order."""
        by_matrices = not any(number % ranks for number in self.divisible)
        by_matrices = by_matrices and not any(number % (ranks * self.group) for number in self.inner)
        able: dict[Name, bool] = {"fsdp": True, "tensor": by_matrices, "context": row_tokens >= _LONG * ranks}
        return tuple(name for name, possible in able.items() if possible and name in self.ways)


def dividing_of(values: Mapping[str, Any], blocks: DecoderShape | None, config: TrainConfig, group: int) -> Dividing:
    """Return the ways of a model with such a config.json.

    Args:
        blocks: its widths; ``None``: not known, and nothing can be planned.
        group: numbers of a group of quantised weights; 1: dense weights.
    """
    if blocks is None:
        return Dividing()
    kind = module_of(str(values.get("model_type")))
    heads = int(values["num_attention_heads"])
    scaling: Any = values.get("rope_scaling") or values.get("rope_parameters") or {}
    by_length = "dynamic" in (scaling.get("type"), scaling.get("rope_type"))
    # Routers that learn to keep experts equally busy look at whole rows.
    balanced = bool(getattr(config, "router_aux_loss", 0.0) and values.get("num_local_experts"))
    able: dict[Name, bool] = {
        "fsdp": kind in CAN_BE_CUT,
        "tensor": kind in CAN_BE_DIVIDED,
        "context": kind in CAN_DIVIDE_ROWS and not by_length and not balanced,
    }
    return Dividing(
        ways=frozenset(name for name, possible in able.items() if possible and _is_open(name, config)),
        divisible=(heads, int(values.get("num_key_value_heads") or heads), blocks.mlp_dims),
        inner=(blocks.queries, blocks.mlp_dims),
        group=group,
    )


def _is_open(name: Name, config: TrainConfig) -> bool:
    """Return whether the other options of a training allow a way."""
    entry = STRATEGIES.get(name)
    if entry is not None and entry.unfit(TrainingNeeds(config.optimizer, cpu_native=False)):
        return False
    try:
        refuse_combinations(config.model_copy(update={**_WHOLE, **_CHANGES[name]}))
    except ValueError:
        return False
    return True


def left_out(config: TrainConfig) -> list[str]:
    """Return a note on those options that divide a model in ways that are not planned; empty without any."""
    given = [
        f"--{name.replace('_', '-')} {getattr(config, name)}"
        for name, default in {**_UNPLANNED, "ep": 1}.items()
        if getattr(config, name) != default
    ]
    if not given:
        return []
    return [f"not planned: {', '.join(given)}; the plan divides a model in one way at a time, and blocks by itself"]
