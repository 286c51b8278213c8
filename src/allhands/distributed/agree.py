"""Do all ranks mean the same run? Asked before the first gradient is summed.

MLX's ring adds raw bytes: ranks that disagree about a shape or dtype get silently wrong sums. So each
rank states its facts (options, parameter names, shapes and dtypes, data, versions), their hash is compared
in a collective of fixed size, and only on a difference are the facts themselves exchanged and named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from allhands.distributed.backend import Communicator
from allhands.errors import DistributedError


def agree(communicator: Communicator, facts: Mapping[str, Any]) -> None:
    """Return if ``facts`` (JSON values) are the same on every rank.

    Raises:
        DistributedError: on every rank alike, naming the first differences.
    """
    if communicator.size == 1:
        return
    text = json.dumps(facts, sort_keys=True, default=str).encode()
    digest = np.frombuffer(hashlib.sha256(text).digest(), dtype=np.int32)
    digests = _gather(communicator, digest)
    if (digests == digests[0]).all():
        return
    # The lengths first, so that the texts travel in arrays of one size.
    lengths = _gather(communicator, np.array([len(text)], dtype=np.int32))[:, 0]
    words = -(-int(lengths.max()) // 4)
    padded = np.frombuffer(text.ljust(words * 4, b" "), dtype=np.int32)
    everyone = [json.loads(row.tobytes()) for row in _gather(communicator, padded)]
    raise DistributedError(
        "the ranks disagree: " + "; ".join(_differences(everyone)),
        hint="give every rank the same command, configuration, model, data and versions",
    )


def _gather(communicator: Communicator, row: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, Any]:
    gathered = communicator.all_gather(mx.array(row)[None])
    mx.eval(gathered)
    return np.array(gathered).reshape(communicator.size, -1)


def _differences(everyone: list[dict[str, Any]], limit: int = 3) -> list[str]:
    found: list[str] = []
    flat = [_flatten(facts) for facts in everyone]
    for key in sorted(set().union(*flat)):
        for rank, facts in enumerate(flat):
            if facts.get(key) != flat[0].get(key):
                found.append(
                    f"{key} is {_short(flat[0].get(key))} on rank 0 and {_short(facts.get(key))} on rank {rank}"
                )
                break
    more = len(found) - limit
    return found[:limit] + ([f"and {more} more"] if more > 0 else [])


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    result: dict[str, Any] = {}
    for key, inner in value.items():
        result |= _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return result


def _short(value: Any) -> str:
    text = "missing" if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
