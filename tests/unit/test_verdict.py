"""The state of a run, by what its supervisor wrote last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allhands.report import read_facts

STARTED = {"kind": "launched", "message": "2 processes"}
FAILED = {"kind": "failed", "message": "rank 0 exited with code 2", "error": "ConfigError: no optimizer"}  # fmt: skip
GIVEN_UP = {"kind": "given up", "message": "not started again: the settings would be the same"}


@pytest.mark.parametrize(
    ("events", "named"),
    [
        ([STARTED, FAILED], ["no optimizer"]),
        ([STARTED, FAILED, GIVEN_UP], ["no optimizer", "not started again"]),
        ([{"kind": "given up", "message": "not started: no ranks"}], ["no ranks"]),
        # An error that the last event repeats is told once.
        (
            [STARTED, FAILED, {**GIVEN_UP, "message": "twice the same: ConfigError: no optimizer"}],
            ["twice the same: ConfigError: no optimizer"],
        ),
    ],
)
def test_why_a_run_failed(events: list[dict[str, Any]], named: list[str], tmp_path: Path) -> None:
    lines = [json.dumps({"time": 1e9 + at, **event}) for at, event in enumerate(events)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    facts = read_facts(tmp_path)
    assert facts.status == "failed"
    assert all(word in facts.reason for word in named)
    assert facts.reason.count("no optimizer") <= 1
