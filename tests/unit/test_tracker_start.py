"""A tracker whose server is down when training begins."""

from __future__ import annotations

import logging
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from allhands.observe import trackers


def test_a_server_that_does_not_answer_does_not_keep_training_from_beginning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()

    class Client:
        """As MLflow's, which asks again for minutes."""

        def get_experiment_by_name(self, _name: str) -> None:
            never.wait(60)

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(trackers, "_PATIENCE_S", 0.2)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert trackers.start_trackers(["mlflow"], None, tmp_path, {}) == []
    assert time.monotonic() - began < 5
    assert "mlflow cannot be started (it does not answer" in caplog.text
    assert "the run goes on without it" in caplog.text
    never.set()
