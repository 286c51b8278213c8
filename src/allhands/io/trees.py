"""MLX's tree functions and conversions to Python numbers, with exact types for type checkers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import mlx.core as mx
from mlx import utils


def flatten(tree: Any) -> list[tuple[str, mx.array]]:
    """Return the arrays of a tree with their dotted names, in a fixed order."""
    return cast("list[tuple[str, mx.array]]", utils.tree_flatten(tree))


def unflatten(pairs: Iterable[tuple[str, Any]]) -> Any:
    """Return the tree that :func:`flatten` took apart; works for modules too."""
    return utils.tree_unflatten(list(pairs))


def with_arrays(tree: Any, named: Mapping[str, mx.array]) -> Any:
    """Return a tree like ``tree`` with the arrays that :func:`flatten` would name so.

    Unlike the tree of :func:`unflatten`, it also has the parts of ``tree`` without arrays.
    """

    def array_of(name: str, _: mx.array) -> mx.array:
        return named[name]

    return utils.tree_map_with_path(array_of, tree)


def part_of(tree: Any, name: str) -> Any:
    """Return the value in a tree under a dotted name, as :func:`flatten` makes them."""
    for part in name.split("."):
        key: Any = int(part) if isinstance(tree, list) else part
        tree = cast("Any", tree)[key]
    return tree


def number(array: mx.array) -> float:
    """Return the value of an array of one element."""
    return float(cast("float", array.item()))


def numbers(array: mx.array) -> list[float]:
    """Return the values of a one-dimensional array."""
    return cast("list[float]", array.tolist())
