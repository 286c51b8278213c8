"""A run goes by the table of its device, and a resumed one by that of the run that it goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import read_weights
from tiny import write_chat_data, write_model

from allhands.config.schema import TrainConfig, build_config
from allhands.kernels import native
from allhands.kernels.selection import FormTimes, SizedOperation
from allhands.run import choosing
from allhands.run.session import RunContext, run_finetune

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler, or not a Linux CPU")
TIMES = {"native": 3.0, "plain": 1.0}
TABLE = [FormTimes(SizedOperation("rms_norm", "float32", (32,), 64), "cpu", TIMES, TIMES, dict.fromkeys(TIMES, 0.0))]


def config(tmp_path: Path, name: str, **changes: Any) -> TrainConfig:
    model, data = tmp_path / "model", tmp_path / "data"
    if not model.exists():
        write_model(model, layers=2)
        write_chat_data(data, train=11, valid=4, longest=30)
    # The check of the gradient computes norms, too.
    flags = {
        "train": True,
        "gradient_check": "off",
        "model": str(model),
        "data": str(data),
        "adapter_path": str(tmp_path / name),
        "iters": 6,
    }
    return build_config({**flags, "batch_size": 4, "num_layers": 2, "val_batches": 0, "save_every": 3, **changes})


def test_a_table_is_gone_by_from_the_start_of_a_run_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real = native.rms_norm

    def counted(x: Any, *rest: Any, **named: Any) -> Any:
        if x.size // x.shape[-1] > 16:  # fewer are probes, for which the table does not speak
            calls.append("native")
        return real(x, *rest, **named)

    monkeypatch.setattr(native, "rms_norm", counted)
    table: list[FormTimes] = []
    monkeypatch.setattr(choosing, "load_table", lambda _facts: (table, None))

    def run(name: str, **changes: Any) -> int:
        """How often a norm was computed natively."""
        calls.clear()
        run_finetune(config(tmp_path, name, **changes), RunContext())
        return len(calls)

    whole, half = run("whole"), run("halves", iters=3)
    assert whole == 2 * half > 0
    table += TABLE
    assert run("halves", resume="auto") == half
    assert run("measured", iters=3) == 0
    table.clear()
    assert run("measured", resume="auto") == 0
    one, other = (read_weights(tmp_path / name / "adapters.safetensors") for name in ("whole", "halves"))
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)
