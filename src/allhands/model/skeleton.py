"""Modules of a model, made from its config.json alone, to find out what ranks could divide.

No weights are read or computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import mlx.nn as nn
import mlx_lm.utils as mlx_lm

from allhands.errors import ModelError


def skeleton(values: Mapping[str, Any]) -> nn.Module:
    """Return the model of a config.json; its arrays have the right shapes but no meaningful values.

    Raises:
        ModelError: no model can be built from the config.
    """
    usual: Any = signature(mlx_lm.load_model).parameters["get_model_classes"].default
    try:
        model_class, arguments = usual(config=dict(values))
        model: nn.Module = model_class(arguments.from_dict(dict(values)))
    except Exception as error:  # a config that no class can be built from fails in any of its lines
        hint = "check config.json, or fetch the model again"
        raise ModelError(
            f"the model cannot be built: {error}",
            code="model-not-buildable",
            where="config.json",
            hint=hint,
        ) from error
    quantised: Any = values.get("quantization") or values.get("quantization_config")
    if isinstance(quantised, dict) and "bits" in quantised:
        group, bits = int(quantised.get("group_size", 64)), int(quantised["bits"])
        nn.quantize(
            model,
            group,
            bits,
            class_predicate=lambda path, module: _can_be_quantised(module, group),
        )
    return model


def _can_be_quantised(module: Any, group: int) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % group == 0
