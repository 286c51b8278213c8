"""Gradients by the names of the trained arrays, whether passes have them array by array or as few
flat ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from allhands.kernels.fused.flat_params import FlatParams
from allhands.parallel.sums import Named


def by_name(leaves: FlatParams | None, grads: Sequence[Named]) -> list[Named]:
    """Return gradients by name; ``leaves``: the places of the arrays in flat ones, ``None`` where
    there are none.
    """
    if leaves is None:
        return list(grads)
    return [
        (place.name, part)
        for chunk, (_, array) in zip(leaves.chunks, grads, strict=True)
        for place, part in zip(chunk.places, chunk.parts(array), strict=True)
    ]


def with_changed(
    leaves: FlatParams | None, grads: Sequence[Named], changed: Mapping[str, mx.array]
) -> list[mx.array]:
    """Return the arrays of ``grads``, some of whose named arrays have other values now."""
    if leaves is None:
        return [changed.get(name, array) for name, array in grads]
    return [
        chunk.joined(
            [
                changed.get(place.name, part)
                for place, part in zip(chunk.places, chunk.parts(array), strict=True)
            ]
        )
        if any(place.name in changed for place in chunk.places)
        else array
        for chunk, (_, array) in zip(leaves.chunks, grads, strict=True)
    ]
