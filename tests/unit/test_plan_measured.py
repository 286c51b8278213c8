"""What a plan makes of short trainings on a CPU: with all cores or a part, on a quiet computer or a
busy one.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from allhands.config.schema import TrainConfig
from allhands.observe.metrics import JsonlSink, RunStarted, TrainReport
from allhands.plan import calibration
from allhands.plan.calibration import Calibration, Calibrator
from allhands.plan.noise import LoadWatch

ROW = 100.0  # tokens


class Measured:
    """Short trainings that take the seconds that are told of (rows, cores for a rank), one after
    the other.

    Attributes:
        asked: rows and cores of each; ``said`` what a person was told.
        others: cores that other programs take during each; the last for all that follow.
    """

    def __init__(
        self, told: dict[tuple[int, int | None], list[float]], others: list[float]
    ) -> None:
        self.told, self.others = {key: list(each) for key, each in told.items()}, list(others)
        self.asked: list[tuple[int, int | None]] = []
        self.said: list[str] = []

    @contextmanager
    def watched(self) -> Generator[LoadWatch]:
        watch = LoadWatch()
        watch.others = self.others.pop(0) if len(self.others) > 1 else self.others[0]
        yield watch

    def train(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        values: dict[str, Any] = json.loads(Path(command[-1]).read_text())
        key = values["batch_size"], values.get("cores_per_rank")
        self.asked.append(key)
        seconds = self.told[key].pop(0) if len(self.told[key]) > 1 else self.told[key][0]
        run = Path(values["adapter_path"])
        run.mkdir()
        sink = JsonlSink(run / "metrics.jsonl")
        facts = {
            "name": "run",
            "model": "m",
            "method": "lora",
            "num_ranks": 1,
            "backend": "none",
            "batch_size": 8,
        }
        numbers = {
            "total_steps": 6,
            "trainable_params": 10,
            "total_params": 100,
            "num_train_examples": 500,
        }
        sink.emit(RunStarted(**facts, **numbers, cores_per_rank=key[1], versions={}, time=9e9))  # type: ignore[arg-type]
        zeros = dict.fromkeys(
            ("loss", "learning_rate", "grad_norm", "data_wait_s", "comm_s", "elapsed_s"), 0.0
        )
        tokens_per_s = ROW * key[0] / seconds
        for step in range(1, 4):
            shown = {
                "tokens_per_s": tokens_per_s,
                "trained_tokens_per_s": tokens_per_s,
                "trained_tokens": 0,
            }
            sink.emit(
                TrainReport(
                    step=step,
                    step_time_s=seconds,
                    peak_memory_bytes=(1,),
                    epoch=0.0,
                    **shown,
                    **zeros,
                )
            )  # type: ignore[arg-type]
        sink.close()
        return subprocess.CompletedProcess(command, 0, "", "")


def measured(
    monkeypatch: pytest.MonkeyPatch,
    told: dict[tuple[int, int | None], list[float]],
    *others: float,
    cores: int = 1,
) -> tuple[Calibration, Measured]:
    made = Measured(told, [*(others or (0.0,))])
    monkeypatch.setattr(calibration.subprocess, "run", made.train)
    monkeypatch.setattr(calibration, "watched", made.watched)
    config = TrainConfig(model="m", batch_size=8, cores_per_rank=cores, num_ranks=2)
    calibrator = Calibrator(60, on_gpu=False)
    return calibrator.calibrate(config, made.said.append, with_all_cores=True), made


def test_one_process_with_all_cores_has_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found, made = measured(monkeypatch, {(8, 1): [0.7], (4, 1): [0.36], (8, None): [0.39]})
    assert made.asked == [(4, 1), (8, 1), (8, None)], "whatever each of several ranks has"
    assert found.whole_s == pytest.approx(0.39)
    assert found.points == (pytest.approx((800, 0.7)), pytest.approx((400, 0.36)))
    assert (found.doubt, made.said) == ("", [])


def test_more_cores_slower_than_fewer_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, made = measured(monkeypatch, {(8, 1): [0.396], (4, 1): [0.2], (8, None): [0.708, 0.25]})
    assert len(made.asked) == 6
    assert len(made.said) == 1
    assert found.whole_s == pytest.approx(0.25)
    assert not found.doubt
    again, _ = measured(monkeypatch, {(8, 1): [0.396], (4, 1): [0.2], (8, None): [0.708]})
    assert again.doubt
    # Nobody has to give a process all cores.
    assert again.whole_s == pytest.approx(0.396)


def test_a_busy_computer_is_measured_again_and_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[tuple[int, int | None], list[float]] = {
        (8, 1): [1.4, 0.7],
        (4, 1): [0.36],
        (8, None): [0.39],
    }
    monkeypatch.setattr("allhands.plan.noise.allowed_cores", lambda: 2)
    monkeypatch.setattr("allhands.plan.noise.available_cores", lambda: 2)
    quiet, made = measured(monkeypatch, told, 1.0, 1.0, 1.0, 0.0)
    assert (quiet.doubt, len(made.asked)) == ("", 6)
    assert quiet.points[0] == pytest.approx((800, 0.7)), "the second time counts"
    busy, made = measured(monkeypatch, told, 1.0)
    assert busy.doubt
    assert len(made.asked) == len(made.said) * 6 == 6, "measured once more, not again and again"
    little, made = measured(monkeypatch, {**told, (8, 1): [0.7]}, 0.1)
    assert (little.doubt, len(made.asked)) == ("", 3)
