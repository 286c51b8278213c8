"""Models in the forms of this computer, by the passes that a command applies."""

from __future__ import annotations

from typing import Any

from allhands.model.passes import PassContext, apply_passes
from allhands.runtime.accelerator import Accelerator, detect


def prepare_dense(model: Any) -> None:
    """As for generation: in float32 on a CPU, with vectorised SwiGLU."""
    apply_passes(model, PassContext(detect(), "generate"))


def prepare_quantized(
    model: Any, device: Accelerator, *, compact: bool, short: bool = False
) -> int:
    """As for generation, or with ``compact`` as for evaluation on a CPU; returns the quantised
    layers replaced.

    ``short``: as where memory is short.
    """
    purpose = "evaluate" if compact and device.kind == "cpu" else "generate"
    applied = apply_passes(
        model, PassContext(device, purpose, at_once=short and compact, short=short)
    )
    return next(each.changed for each in applied if each.name == "quantised weights")
