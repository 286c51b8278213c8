"""Kernel forms of a run's operations: the same request on all ranks, and notes for a resumed run.

Two forms may round differently. Forms follow from the kind of device and from ``ALLHANDS_KERNELS``
alone. So equal ranks, and a run that is resumed on the same kind of device, compute the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from allhands.distributed.backend import Communicator
from allhands.distributed.handout import hand_out_json
from allhands.io.trees import number
from allhands.kernels import native
from allhands.kernels.fused import kernels
from allhands.kernels.selection import VARIABLE, KernelSelection, Kind, parse_request
from allhands.runtime.accelerator import Accelerator


@dataclass(frozen=True)
class KernelForms:
    """The forms in which a run computes operations.

    Attributes:
        kind: kind of the device.
        request: the text of ``ALLHANDS_KERNELS``.
        selection: selection for the run's model.
        notes: notes for the user.
    """

    kind: Kind
    request: str
    selection: KernelSelection
    notes: tuple[str, ...] = ()

    def recorded(self) -> dict[str, Any]:
        """Return the entry for a checkpoint, as JSON values."""
        return {"device": {"kind": self.kind, "missing": self._missing}, "wishes": self.request}

    def check_resumed(self, state: Mapping[str, Any]) -> KernelForms:
        """Return the forms with notes on differences from the checkpoint's run.

        Runs on another kind of device are not compared.

        Args:
            state: state in the checkpoint.
        """
        before: Mapping[str, Any] = state.get("kernels") or {}
        device: Mapping[str, Any] = before.get("device") or {}
        if device.get("kind") != self.kind:
            return self
        found: list[str] = []
        missing = device.get("missing", "")
        if missing != self._missing:
            forms = missing or self._missing
            found.append(
                f"one of the checkpoint's run and this one computes without {forms} operations"
            )
        if before.get("wishes", "") != self.request:
            found.append(
                f"{VARIABLE} changed from {before.get('wishes', '')!r} to {self.request!r}"
            )
        return replace(
            self,
            notes=(*self.notes, *(f"{each}: results may differ by rounding" for each in found)),
        )

    def agreed(self, communicator: Communicator) -> KernelForms:
        """Return the forms with rank 0's request, on every rank; all ranks call this together.

        Forms that this device does not have are ignored. A note is added if some ranks lack forms
        that others of the same kind have.
        """
        if communicator.size == 1:
            return self
        first: dict[str, Any] = hand_out_json(
            communicator, {**self.recorded(), "wished": self.selection.requested}
        )
        self.selection.requested = first["wished"]
        device, notes = first["device"], self.notes
        unlike = device["kind"] == self.kind and device["missing"] != self._missing
        if number(communicator.all_sum(mx.array([unlike], dtype=mx.int32)).sum()):
            forms = "native" if device["kind"] == "cpu" else "fused"
            notes += (
                f"some ranks compute without {forms} operations: their results differ by rounding",
            )
        return replace(self, request=first["wishes"], notes=notes)

    @property
    def _missing(self) -> str:
        return " ".join(sorted(self.selection.missing))


def kernel_forms(
    accelerator: Accelerator, environ: Mapping[str, str] = os.environ, *, cpu_native: bool = True
) -> KernelForms:
    """Return the forms of this rank, for steps that are ``cpu_native`` or not.

    Raises:
        ConfigError: ``ALLHANDS_KERNELS`` names an unknown operation or form.
    """
    missing: frozenset[str] = frozenset()
    if accelerator.kind == "cpu" and not (cpu_native and native.available()):
        missing = frozenset({"native"})
    elif accelerator.kind == "cuda" and not kernels.available():
        missing = frozenset({"fused", "padded"})
    request = environ.get(VARIABLE, "")
    return KernelForms(
        accelerator.kind,
        request,
        KernelSelection(parse_request(request, accelerator.kind, missing), missing),
    )
