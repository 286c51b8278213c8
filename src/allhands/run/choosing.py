"""The choices of a run: the same on all ranks, and after a resumption as before it.

Another form may round otherwise. So rank 0's table is everybody's if all devices are of one kind and version, and
nobody's if they are not. A checkpoint holds the table of its run, which a resumed one keeps: what was measured in
between would make it another run in the last bits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from allhands.distributed.backend import Communicator
from allhands.distributed.handout import hand_out_json
from allhands.io.trees import numbers
from allhands.kernels.selection import VARIABLE, Choices, parse_wishes
from allhands.model.measurements import Facts, as_rows, device_facts, load_table, missing_forms, rows_of
from allhands.runtime.accelerator import Accelerator

_KEY = "kernels"


@dataclass(frozen=True)
class Settlement:
    """What a rank brings to the agreement, and what comes out of it.

    Attributes:
        facts: of its device.
        wishes: the text of ``ALLHANDS_KERNELS``.
        notes: what a person should know.
    """

    facts: Facts
    wishes: str
    choices: Choices
    notes: tuple[str, ...] = ()

    def recorded(self) -> dict[str, Any]:
        """For a checkpoint, as JSON values."""
        return {"device": self.facts, "wishes": self.wishes, "measured": as_rows(self.choices.measured)}


def own_choices(
    accelerator: Accelerator, environ: Mapping[str, str] = os.environ, *, cpu_native: bool = True
) -> Settlement:
    """What was measured on this device, and what a person wants, for steps that are ``cpu_native`` or not.

    Raises:
        ConfigError: ``ALLHANDS_KERNELS`` asks for what there is not.
    """
    facts, wishes = device_facts(accelerator), environ.get(VARIABLE, "")
    measured, notice = load_table(facts)
    missing = missing_forms(accelerator, cpu_native=cpu_native)
    wished = parse_wishes(wishes, accelerator.kind, missing)
    choices = Choices(tuple(measured), wished, str(facts["name"]), missing)
    return Settlement(facts, wishes, choices, (notice,) if notice else ())


def resumed(own: Settlement, state: Mapping[str, Any]) -> Settlement:
    """``own`` with the table that a checkpoint's run went by, if it was on such a device."""
    before = state.get(_KEY)
    if not isinstance(before, dict):
        return own
    notes = list(own.notes)
    if (device := before.get("device")) != own.facts:
        if isinstance(device, dict) and {**device, "missing": own.facts.get("missing")} == own.facts:
            forms = device.get("missing") or own.facts.get("missing")
            told = f"one of the checkpoint's run and this one computes without {forms} operations"
            notes.append(f"{told}: results may differ by rounding")
        return replace(own, notes=tuple(notes))
    try:
        measured = tuple(rows_of(before.get("measured")))
    except ValueError:
        return own
    if measured != own.choices.measured:
        notes.append("kernels are chosen as the checkpoint's run chose them, not by what was measured since")
    if before.get("wishes", "") != own.wishes:
        told = f"{VARIABLE} changed from {before.get('wishes', '')!r} to {own.wishes!r}"
        notes.append(f"{told}: results may differ by rounding")
    return replace(own, choices=replace(own.choices, measured=measured), notes=tuple(notes))


def agreed(own: Settlement, communicator: Communicator) -> Settlement:
    """The same choices for every rank: rank 0's, or the rules where devices or versions differ."""
    if communicator.size == 1:
        return own
    first: dict[str, Any] = hand_out_json(communicator, {**own.recorded(), "wished": dict(own.choices.wished)})
    device: Mapping[str, Any] = first["device"]
    lacking = device["kind"] == own.facts["kind"] and device.get("missing") != own.facts.get("missing")
    others, without = numbers(communicator.all_sum(mx.array([device != own.facts, lacking], dtype=mx.int32)))
    measured, notes = tuple(rows_of(first["measured"])), list(own.notes)
    if without:
        forms = "native" if device["kind"] == "cpu" else "fused"
        notes.append(f"some ranks compute without {forms} operations: what they compute differs by rounding")
    if others and measured:
        notes.append("the ranks' devices differ: kernels are chosen by rule, not by what was measured")
    # A form that this device does not have is passed over.
    choices = replace(own.choices, measured=() if others else measured, wished=first["wished"])
    return replace(own, wishes=first["wishes"], choices=choices, notes=tuple(notes))
