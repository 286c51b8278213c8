"""Types and parsers of option values: paths on this computer, JSON, sizes, weights of ranks."""

from __future__ import annotations

import json
import math
import os
import re
from typing import Annotated, Any, cast

from pydantic import AfterValidator, PlainSerializer, WrapValidator

from allhands.errors import ConfigError
from allhands.io.paths import HomePath, expanded, written
from allhands.io.strict_json import without_repeats

_MOST_BATCHES = 10**9  # the limit of --iters


class RefusedOption(ValueError):
    """A validator's refusal, with the code of the error that it becomes."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


def _local_path(value: Any, handler: Any) -> Any:
    if isinstance(value, HomePath):
        return value
    path = cast("os.PathLike[str]", value)
    return expanded(handler(os.fspath(path) if isinstance(value, os.PathLike) else value))


# A path, or a name that may be a path, such as a model or a data set. In JSON, which the computers
# of a run compare, it is as the person wrote it.
LocalPath = Annotated[
    str, WrapValidator(_local_path), PlainSerializer(written, return_type=str, when_used="json")
]


def _split(value: str) -> str:
    if value != "auto" and not re.fullmatch(r"[0-9]+(,[0-9]+)*", value):
        raise ValueError("give numbers such as 20,12, or auto")
    return value


Split = Annotated[str, AfterValidator(_split)]


def batches_of(epochs: float, per_epoch: int) -> int:
    """Return the number of batches of ``epochs`` epochs.

    Raises:
        ConfigError: there are more batches than ``--iters`` allows.
    """
    # A part of a batch counts as a whole one, but a rounding error of the product does not.
    batches = max(1, math.ceil(round(epochs * per_epoch, 6)))
    if batches > _MOST_BATCHES:
        raise ConfigError(
            f"{epochs:g} epochs are {batches:,} batches, more than {_MOST_BATCHES:,}",
            code="value-out-of-range",
            where="--epochs",
            hint="give fewer epochs, or --iters",
        )
    return batches


def parse_json(value: Any) -> Any:
    """Parse the JSON of a structured flag; a plain word stays a word.

    Raises:
        ValueError: it is not valid JSON, or an object has a key twice.
    """
    if isinstance(value, str) and value.strip()[:1] in ("{", "["):
        try:
            return json.loads(value, object_pairs_hook=without_repeats)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"is not valid JSON ({error.msg} at character {error.pos + 1})"
            ) from None
    return value


def parse_size(value: Any) -> Any:
    """Return a size such as ``"2GB"`` or ``"2GiB"`` in bytes; other types than texts pass.

    Raises:
        ValueError: the text is no size.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?)(i?)b?\s*", value.lower())
    if not match:
        raise ValueError("is not a size such as 2GB or 500MB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " "))


def parse_weights(value: Any) -> Any:
    """Return ``auto``, ``equal``, ``None``, or a list with a number above 0 for each rank.

    Raises:
        ValueError: ``value`` is something else.
    """
    value = parse_json(value)
    if isinstance(value, list | tuple):
        weights = cast("list[Any]", value)
        numbers = [
            weight
            for weight in weights
            if isinstance(weight, int | float)
            and not isinstance(weight, bool)
            and 0 < weight <= 1e300
        ]
        if not weights or len(numbers) < len(weights):
            raise ValueError("each rank needs a weight above 0, for example [2, 1]")
    elif value not in (None, "auto", "equal"):
        raise ValueError("is auto, equal, or a number for each rank, for example [2, 1]")
    return cast("Any", value)


def expanded_in(value: Any) -> Any:
    """Return ``value`` with :func:`expanded` applied to each text in it.

    Raises:
        ValueError: a text cannot be a path.
    """
    if isinstance(value, str):
        return str(expanded(value))
    if isinstance(value, list):
        return [expanded_in(inner) for inner in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: expanded_in(inner) for key, inner in cast("dict[str, Any]", value).items()}
    return value
