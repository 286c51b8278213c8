"""Options that do not go together, and what has no effect without another."""

from __future__ import annotations

from typing import Any

import pytest
from test_config import refused

from allhands.config.schema import build_config


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"sync_every": 20, "strategy": "zero1"}, "--strategy zero1"),
        ({"sync_every": 20, "strategy": "data"}, "--strategy data"),
        ({"outer_lr": 0.7}, "--outer-lr"),
        ({"outer_momentum": 0.9, "sync_every": 1}, "--outer-momentum"),
        ({"sync_fragments": 2}, "--sync-fragments"),
        ({"sync_delay": 1}, "--sync-delay"),
        ({"sync_every": 4, "sync_fragments": 5}, "--sync-fragments"),
        ({"sync_every": 4, "sync_delay": 5}, "--sync-delay"),
        ({"sync_every": 20, "sync_fragments": 3, "sync_delay": 7}, "--sync-delay"),
        ({"sync_every": 0}, "--sync-every"),
        ({"sync_every": 2, "outer_momentum": 1.0}, "--outer-momentum"),
        ({"diloco": True}, "sync_every"),
        ({"fragment_sync_delay": 5}, "sync_delay"),
    ],
)
def test_rounds_and_what_they_cannot_go_with(flags: dict[str, Any], named: str) -> None:
    assert named in str(refused(flags))
    kept = build_config({"sync_every": 20, "outer_lr": 0.7, "outer_momentum": 0.9})
    assert (kept.sync_every, kept.strategy) == (20, "auto")


@pytest.mark.parametrize(
    ("flags", "word"),
    [({"packing": True, "mask_prompt": True}, "--mask-prompt"), ({"isolate_documents": True}, "--packing: add it")],
)
def test_packing_that_cannot_take_effect_is_refused(flags: dict[str, Any], word: str) -> None:
    assert word in refused(flags).message
