"""Saved weights that do not fit what is trained here: what differs, and which option is to be another one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

_BLOCK = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_RANK = {"lora_a": -1, "lora_b": 0}  # axis of a leaf that is the adapter's rank
ANOTHER_MODEL = "use the model that the adapter was trained on (see adapter_config.json)"


def difference(wanted: Shapes, there: Shapes) -> tuple[str, str] | None:
    """The first difference and the name that it is about; ``None`` if there is none.

    Args:
        wanted: shapes of what is trained here, by name.
        there: shapes of what the file holds.
    """
    # Shapes first: where they differ, it is another model, whatever else is to be said.
    for name, shape in wanted.items():
        if there.get(name, shape) != shape:
            return f"{name} has shape {there[name]} in the file, {shape} here", name
    for name in wanted:
        if name not in there:
            return f"{name} is trained here but not in the file", name
    extra = sorted(set(there) - set(wanted))
    return (f"{extra[0]} is in the file but not trained here", extra[0]) if extra else None


def remedy(wanted: Shapes, there: Shapes, name: str) -> str:
    """What to give a fine-tuning so that it takes the file, where they differ in ``name``."""
    if _leaves(wanted) != _leaves(there):
        return "use the --fine-tune-type that the file was made with"
    here, saved = _blocks(wanted), _blocks(there)
    other = "use the --model that the file was trained on"
    if name in wanted and name in there:
        axis = _RANK.get(name.rpartition(".")[2])
        if axis is not None and _without(wanted[name], axis) == _without(there[name], axis):
            return f"use the rank that the file was made with: --lora-parameters '{{\"rank\": {there[name][axis]}}}'"
        return other
    # Blocks are counted from the last, which is the same in every run on the same model.
    if max(here, default=0) != max(saved, default=0):
        return other
    if here != saved:
        return f"use the --num-layers that the file was made with: {len(saved)}"
    return "use the keys of --lora-parameters that the file was made with"


def remedy_of_new(wanted: Shapes, there: Shapes, name: str) -> str:
    """What to give a pre-training so that it takes the file, where they differ in ``name``."""
    here, saved = _blocks(wanted), _blocks(there)
    if name in wanted and name in there:
        if not _BLOCK.search(name) and wanted[name][1:] == there[name][1:] and len(wanted[name]) == 2:
            rows = f"{there[name][0]} rows in the file"
            return f"use the --tokenizer that the file was made with, or its --vocabulary ({rows})"
        return "use the --shape that the file was made with, with its --dims, --mlp-dims, --heads and --kv-heads"
    if here != saved:
        return f"use the --layers that the file was made with: {len(saved)}"
    return "use the --shape that the file was made with, with its --experts and --tied"


def _leaves(names: Collection[str]) -> frozenset[str]:
    """Which of an adapter's leaves there are: none in full fine-tuning, "m" in DoRA alone."""
    return frozenset(leaf for name in names if (leaf := name.rpartition(".")[2]) in (*_RANK, "m"))


def _blocks(names: Collection[str]) -> set[int]:
    return {int(found[1]) for name in names if (found := _BLOCK.search(name))}


def _without(shape: Shape, axis: int) -> Shape:
    sizes = list(shape)
    del sizes[axis]
    return tuple(sizes)
