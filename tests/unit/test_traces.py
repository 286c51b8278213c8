"""Whether there was a run in a directory before, as far as is known on the supervisor's computer."""

from __future__ import annotations

from pathlib import Path

import pytest

from allhands.checkpoints import RUN_NAME
from allhands.cluster.job import job_of
from allhands.config.schema import build_config
from allhands.observe.journal import Journal, SupervisorEvent


@pytest.mark.parametrize(("kind", "begun"), [("started", True), ("given up", False)])
def test_a_run_has_begun_when_its_ranks_have(kind: str, begun: bool, tmp_path: Path) -> None:
    flags = {"train": True, "adapter_path": str(tmp_path), "hostfile": "hosts"}
    resumed = build_config({**flags, "resume": "auto"})
    assert not job_of(resumed).earlier
    journal = Journal(tmp_path / "events.jsonl")
    journal.write(SupervisorEvent(kind, "as it happened"), 1)
    journal.close()
    assert job_of(resumed).earlier == begun
    (tmp_path / RUN_NAME).write_text("a run")
    assert job_of(resumed).earlier
    # Who begins anew, or says from where, needs no traces.
    assert not job_of(build_config(flags)).earlier
    assert not job_of(build_config({**flags, "resume": "old"})).earlier
