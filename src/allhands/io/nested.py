"""Nested dictionaries, lists and tuples of arrays, taken apart into named arrays and JSON, and put
together again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from allhands.errors import ConfigError


def take_apart(tree: Any, where: str) -> tuple[Any, dict[str, mx.array]]:
    """Return the shape of ``tree`` as JSON, and its arrays by names that are unique.

    An array becomes its name in the shape, everything else an object of one key: ``dict`` with
    pairs, ``list``, ``tuple``, or ``value`` for a plain value. A module counts as the dictionary of
    its parameters.

    Args:
        where: the person's name for ``tree``, for messages.

    Raises:
        ConfigError: the tree holds a value of another type, or a key that is not a text.
    """
    arrays: dict[str, mx.array] = {}
    return _taken_apart(tree, where, arrays), arrays


def put_together(shape: Any, arrays: Mapping[str, mx.array]) -> Any:
    """Return the tree that :func:`take_apart` took apart."""
    if isinstance(shape, str):
        return arrays[shape]
    ((kind, inside),) = cast("dict[str, Any]", shape).items()
    if kind == "dict":
        return {key: put_together(inner, arrays) for key, inner in inside}
    if kind == "value":
        return inside
    members = [put_together(inner, arrays) for inner in inside]
    return tuple(members) if kind == "tuple" else members


def check_plain(value: Any, where: str) -> None:
    """Refuse a value that JSON cannot hold, or would change.

    Raises:
        ConfigError: ``value``, or a value in it, is not a dictionary with texts as keys, list,
            text, finite number, bool or ``None``.
    """
    if (
        value is None
        or type(value) in (str, bool, int)
        or (type(value) is float and math.isfinite(value))
    ):
        return
    if type(value) is float:
        raise ConfigError(
            f"there is no {value} in JSON",
            code="value-not-json",
            where=where,
            hint="use None, or an array: mx.array(value)",
        )
    if type(value) is dict:
        members = cast("dict[Any, Any]", value)
        _check_keys(members, where)
        for key, inner in members.items():
            check_plain(inner, f"{where}.{key}")
    elif type(value) is list:
        for number, inner in enumerate(cast("list[Any]", value)):
            check_plain(inner, f"{where}.{number}")
    else:
        raise ConfigError(
            f"a {type(value).__qualname__} of {type(value).__module__} cannot be kept",
            code="value-not-json",
            where=where,
            hint="give MLX arrays (mx.array(...)) as arrays; numbers, texts, lists and dictionaries as values",
        )


def _taken_apart(node: Any, where: str, arrays: dict[str, mx.array]) -> Any:
    if isinstance(node, mx.array):
        name = next(name for name in _names(where.partition(".")[2] or where) if name not in arrays)
        arrays[name] = node
        return name
    if isinstance(node, nn.Module):
        return _taken_apart(node.parameters(), where, arrays)
    if isinstance(node, dict):
        items = cast("dict[str, Any]", node)
        _check_keys(items, where)
        # Pairs, because JSON does not promise to keep the order of an object's keys, and MLX's
        # functions depend on it.
        return {
            "dict": [
                [key, _taken_apart(inner, f"{where}.{key}", arrays)] for key, inner in items.items()
            ]
        }
    if type(node) in (list, tuple):
        return {
            type(node).__name__: [
                _taken_apart(inner, f"{where}.{at}", arrays) for at, inner in enumerate(node)
            ]
        }
    check_plain(node, where)
    return {"value": node}


def _names(name: str) -> Iterator[str]:
    """Yield ``name``, then variants of it: keys with dots can give two arrays the same name."""
    yield name
    number = 2
    while True:
        yield f"{name}~{number}"
        number += 1


def _check_keys(node: Mapping[Any, Any], where: str) -> None:
    for key in node:
        if type(key) is not str:
            raise ConfigError(
                f"{key!r} is a key, and only texts can be keys",
                code="value-not-json",
                where=where,
                hint="use str(key)",
            )
