"""What a run left in its directory, and how far two runs are apart."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class Run:
    """Training reports and validations as they were written, and the trained weights."""

    directory: Path
    reports: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    ended: dict[str, Any]
    weights: dict[str, mx.array]

    @property
    def losses(self) -> list[float]:
        return [report["loss"] for report in self.reports]

    @property
    def valid_losses(self) -> list[float]:
        return [report["loss"] for report in self.validations]


def read_weights(file: Path) -> dict[str, mx.array]:
    """Arrays of a safetensors file."""
    weights: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
    return weights


def read_run(directory: Path) -> Run:
    """The run in an adapter directory; a directory without metrics has weights only."""
    file = directory / "metrics.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return Run(
        directory,
        [event for event in events if "grad_norm" in event],
        [event for event in events if "duration_s" in event],
        next((event for event in events if "reason" in event), {}),
        read_weights(directory / "adapters.safetensors"),
    )


def distance(one: dict[str, mx.array], other: dict[str, mx.array]) -> float:
    """Largest difference of any weight."""
    assert one.keys() == other.keys()
    return max(mx.abs(one[name] - other[name]).max().item() for name in one)
