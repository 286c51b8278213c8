"""Check of a written PEFT adapter: it is read back from its files and compared with its source.

:func:`from_peft` computes the factors as PEFT does. This module finds the modules to which PEFT
gives an adapter, by ``target_modules``, ``layers_to_transform`` and ``layers_pattern``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from allhands.errors import ModelError
from allhands.model.peft import PREFIX, Adapter
from allhands.model.peft_base import HEAD, PeftBase
from allhands.model.peft_import import from_peft


def check_peft(written: Adapter, ours: Adapter, base: PeftBase) -> None:
    """Compare ``written``, read from its files, with mlx_lm's adapter ``ours``.

    Raises:
        ModelError: the two differ in modules, scale or numbers.
    """
    try:
        back = from_peft(written, base, num_layers=1)
    except ModelError as error:
        raise _differs(error.message) from None
    adapted = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in written.weights}
    scales = (float(each.config["lora_parameters"]["scale"]) for each in (back, ours))
    if adapted != _targeted(written.config, base):
        raise _differs("target_modules name other modules than the weights")
    if base.tied and HEAD in adapted and not written.config.get("ensure_weight_tying"):
        raise _differs("the output layer does not follow the embedding")
    if back.weights.keys() != ours.weights.keys() or not math.isclose(*scales, rel_tol=1e-6):
        raise _differs("it adapts other modules, or with another scale")
    for name, value in ours.weights.items():
        if not mx.array_equal(back.weights[name], value):
            raise _differs(f"{name} has other numbers")


def _targeted(config: Mapping[str, Any], base: PeftBase) -> set[str]:
    """Return the modules to which PEFT gives an adapter."""
    targets, layers, pattern = (
        config[key] for key in ("target_modules", "layers_to_transform", "layers_pattern")
    )

    def is_target(name: str) -> bool:
        if name in targets:
            return True
        if not any(name.endswith(f".{target}") for target in targets):
            return False
        place = re.match(rf"(?:^|.*?\.){pattern or '[^.]*'}\.(?P<number>\d+)\.", name)
        return layers is None or (place is not None and int(place["number"]) in layers)

    return {name for name in base.modules_of_transformers if is_target(name)}


def _differs(what: str) -> ModelError:
    hint = "free disk space and try again; if it happens again this is a defect: report it"
    return ModelError(
        f"the files for PEFT differ from the adapter, and were not kept: {what}",
        code="written-files-differ",
        hint=hint,
    )
