"""Ways of dividing a model that its config.json and the options of a training allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from allhands.config.combinations import refuse_combinations
from allhands.config.schema import TrainConfig
from allhands.model.context import CAN_DIVIDE_ROWS
from allhands.model.reading import module_of
from allhands.model.stages import CAN_BE_CUT
from allhands.parallel.experts import HAVE_EXPERTS
from allhands.parallel.matrices import CAN_BE_DIVIDED
from allhands.parallel.registry import STRATEGIES, TrainingNeeds
from allhands.run.training_memory import DecoderShape

Name = Literal["fsdp", "tensor", "expert", "context"]

_SHARDED = ("zero2", "zero3", "fsdp")
# Least tokens of a row for each rank with which dividing rows is planned: launching the operations
# of a shorter piece takes about as long as computing them.
_LONG = 256
# The options that divide a model, with values that divide nothing.
_WHOLE: Mapping[str, Any] = {
    "strategy": "auto",
    "pp": None,
    "pp_schedule": "1f1b",
    "pp_split": "auto",
    "reshard": "auto",
    "dp_shard": None,
    "tp": 1,
    "cp": 1,
    "ep": 1,
}


@dataclass(frozen=True)
class Dividing:
    """Ways of dividing a model among ranks, beside data parallel and pipeline.

    Attributes:
        ways: ways that the architecture and the options allow for some number of ranks.
        divisible: numbers that tensor parallel ranks must divide: heads of queries, heads of keys,
            and inner features of the MLP.
        inner: input widths of a block's last projections. A tensor parallel rank must have whole
            groups of quantised weights of them.
        group: size of a group of quantised weights; 1: weights are dense.
        experts: number of experts of a block; 0: there are none.
    """

    ways: frozenset[Name] = frozenset()
    divisible: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()
    group: int = 1
    experts: int = 0

    def among(self, ranks: int, row_tokens: int) -> tuple[Name, ...]:
        """Return the ways for ``ranks`` ranks and rows of up to ``row_tokens``, in fixed order."""
        by_matrices = not any(number % ranks for number in self.divisible)
        by_matrices = by_matrices and not any(
            number % (ranks * self.group) for number in self.inner
        )
        able: dict[Name, bool] = {
            "fsdp": True,
            "tensor": by_matrices,
            "expert": self.experts >= ranks and not self.experts % ranks,
            "context": row_tokens >= _LONG * ranks,
        }
        return tuple(name for name, possible in able.items() if possible and name in self.ways)


def dividing_of(
    values: Mapping[str, Any], blocks: DecoderShape | None, config: TrainConfig, group: int
) -> Dividing:
    """Return the ways of dividing a model.

    Args:
        values: the model's config.json.
        blocks: the model's widths; ``None``: not known, so that no way is planned.
        group: size of a group of quantised weights; 1: dense weights.
    """
    if blocks is None:
        return Dividing()
    kind = module_of(str(values.get("model_type")))
    heads = int(values["num_attention_heads"])
    scaling: Any = values.get("rope_scaling") or values.get("rope_parameters") or {}
    by_length = "dynamic" in (scaling.get("type"), scaling.get("rope_type"))
    # The loss that keeps experts equally busy needs whole rows.
    balanced = bool(getattr(config, "router_aux_loss", 0.0) and values.get("num_local_experts"))
    able: dict[Name, bool] = {
        "fsdp": kind in CAN_BE_CUT,
        "tensor": kind in CAN_BE_DIVIDED,
        "expert": kind in HAVE_EXPERTS and blocks.experts > 0,
        "context": kind in CAN_DIVIDE_ROWS and not by_length and not balanced,
    }
    return Dividing(
        ways=frozenset(
            name for name, possible in able.items() if possible and _is_open(name, config)
        ),
        divisible=(heads, int(values.get("num_key_value_heads") or heads), blocks.mlp_dims),
        inner=(blocks.queries, blocks.mlp_dims),
        group=group,
        experts=blocks.experts,
    )


def options_for(name: Name, ranks: int) -> dict[str, Any]:
    """Return the options with which ``ranks`` ranks divide a model in this way."""
    if name == "fsdp":
        return {"strategy": "fsdp"}
    return {{"tensor": "tp", "expert": "ep", "context": "cp"}[name]: ranks}


def strategy_name(option: Callable[[str], Any]) -> str:
    """Return the name of the requested way of dividing a model; empty if there is none.

    Names of combined ways are joined by ``+``. They are names of the registry, ``zero2`` if fetched
    weights are kept, and ``context``.

    Args:
        option: function that returns the value of an option.
    """
    strategy, piped = option("strategy"), option("strategy") == "pipeline"
    keeps = strategy == "zero2" or option("reshard") == "off"
    found = {
        "pipeline": piped,
        "zero2" if keeps and not piped else "fsdp": strategy in _SHARDED
        or (piped and option("dp_shard") is not None),
        "tensor": option("tp") > 1,
        "expert": option("ep") > 1,
        "context": option("cp") > 1,
    }
    names = [name for name, here in found.items() if here]
    return "+".join([*names, "zero1"] if names and strategy == "zero1" else names)


def _is_open(name: Name, config: TrainConfig) -> bool:
    """Return whether the other options of a training allow a way."""
    entry = STRATEGIES.get(name)
    if entry is not None and entry.unfit(TrainingNeeds(config.optimizer, cpu_native=False)):
        return False
    try:
        refuse_combinations(config.model_copy(update={**_WHOLE, **options_for(name, 2)}))
    except ValueError:
        return False
    return True


def left_out(config: TrainConfig) -> list[str]:
    """Return a note on a requested pipeline schedule that is not planned; empty if none is."""
    if config.pp_schedule == "1f1b":
        return []
    return [f"not planned: --pp-schedule {config.pp_schedule}; the plan counts with 1f1b"]
