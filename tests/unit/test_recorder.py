"""``allhands.Metrics``: what a loop says is in the file, and ``allhands plot`` draws it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from twins import ThreadCommunicator, run_ranks

from allhands.cli.main import main
from allhands.distributed.backend import SingleProcess
from allhands.errors import ConfigError
from allhands.loops.recorder import Metrics
from allhands.loops.world import World
from allhands.observe.metrics.history import read_metrics
from allhands.observe.monitor import Sample, encode_sample, monitor_file

ALONE = World(0, 1, 0, 1, "none", "single", SingleProcess())


def lines(place: Path, *kinds: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["event"] in kinds]


def test_what_is_logged_is_in_the_file(tmp_path: Path) -> None:
    shown: list[str] = []
    with Metrics(tmp_path, show=shown.append, world=ALONE) as metrics:
        metrics.log(1, {"loss": mx.array(2.5), "accuracy": 0.5, "learning_rate": 0.25})
        assert metrics.log(2, {"accuracy": mx.array([1], dtype=mx.int32)}) == {"accuracy": 1.0}
        metrics.log(2, {"valid_loss": 3.0})
        metrics.log(3, {"loss": math.inf, "step": 7})
    first, last = lines(tmp_path, "train")
    assert (first["step"], first["loss"], first["accuracy"], first["learning_rate"]) == (
        1,
        2.5,
        0.5,
        0.25,
    )
    assert (last["step"], last["loss"]) == (3, "Infinity")
    assert [(line["step"], line["accuracy"]) for line in lines(tmp_path, "logged")] == [(2, 1.0)]
    assert [(line["loss"], line["best"]) for line in lines(tmp_path, "valid")] == [(3.0, True)]
    assert [(line["step"], line["reason"]) for line in lines(tmp_path, "ended")] == [
        (3, "finished")
    ]
    assert shown[:2] == ["step 1: loss 2.5, accuracy 0.5, learning_rate 0.25", "step 2: accuracy 1"]
    history = read_metrics(tmp_path)
    assert [(report.step, report.loss) for report in history.train] == [(1, 2.5), (3, math.inf)]
    assert history.started is not None
    assert history.started.num_ranks == 1


def test_what_is_not_logged_is_not_in_the_file(tmp_path: Path) -> None:
    with Metrics(tmp_path, world=ALONE) as metrics:
        metrics.log(1, {"loss": 2.5})
        metrics.log(
            2, {"loss": math.nan, "grad_norm": 3, "trained_tokens": 64.0, "peak_memory_bytes": 9}
        )
    first, last = lines(tmp_path, "train")
    assert set(first) == {"event", "step", "loss", "step_time_s", "elapsed_s"}
    assert (last["loss"], last["grad_norm"], last["trained_tokens"]) == ("NaN", 3.0, 64)
    one, two = read_metrics(tmp_path).train
    assert math.isnan(one.learning_rate)
    assert math.isnan(one.tokens_per_s)
    assert (one.trained_tokens, one.comm_s, one.peak_memory_bytes) == (0, 0.0, ())
    assert (two.grad_norm, two.trained_tokens, two.peak_memory_bytes) == (3.0, 64, (9,))


def test_wrong_calls(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="step is -1"):
        Metrics(tmp_path / "none", first_step=-1, world=ALONE)
    assert not (tmp_path / "none").exists()
    with Metrics(tmp_path, first_step=2, world=ALONE) as metrics:
        for step, values, words in (
            ("a", {"loss": 1.0}, "step is 'a'"),
            (3.5, {"loss": 1.0}, "step is 3.5"),
            (4, 1.0, "1.0 are no values"),
            (4, [1.0], "are no values"),
            (1, {"loss": 1.0}, "step 1 comes after step 2"),
        ):
            with pytest.raises(ConfigError, match=words):
                metrics.log(step, values)  # type: ignore[arg-type]
        metrics.log(2, {"valid_loss": 1.0})
        metrics.log(4, {"loss": 1.0})
        metrics.log(4, {"valid_loss": 1.0})
        with pytest.raises(ConfigError, match="step 3 comes after step 4") as caught:
            metrics.log(3, {"loss": 1.0})
        assert "first_step=3" in (caught.value.hint or "")
    with pytest.raises(ConfigError) as caught:
        metrics.log(5, {"loss": 1.0})
    assert caught.value.code == "argument-invalid"
    assert [report.step for report in read_metrics(tmp_path).train] == [4]


@pytest.mark.parametrize(("reduce", "losses"), [("mean", 2.5), ("sum", 4.0), (None, 1.0)])
def test_over_ranks(tmp_path: Path, reduce: Any, losses: float) -> None:
    def work(communicator: ThreadCommunicator) -> dict[str, float]:
        rank = communicator.rank
        here = World(rank, 2, rank, 2, "ring", "x", communicator)
        with Metrics(tmp_path / str(rank), world=here) as metrics:
            return metrics.log(
                1, {"loss": mx.array(1.0 + 2 * rank), "x": 1.0}, reduce=reduce, weight=[1, 3][rank]
            )

    results = run_ranks(2, work)
    assert results[0] == {"loss": losses, "x": {"mean": 1.0, "sum": 2.0, None: 1.0}[reduce]}
    assert results[1] == (results[0] if reduce else {})
    assert [report.loss for report in read_metrics(tmp_path / "0").train] == [losses]
    assert not (tmp_path / "1").exists()


def test_a_run_that_goes_on_replaces_what_came_after(tmp_path: Path) -> None:
    with Metrics(tmp_path, world=ALONE) as metrics:
        for step in (1, 2, 3):
            metrics.log(step, {"loss": float(step)})
    with Metrics(tmp_path, first_step=2, world=ALONE) as metrics:
        metrics.log(3, {"loss": 30.0})
    assert [report.loss for report in read_metrics(tmp_path).train] == [1.0, 2.0, 30.0]


def test_how_the_block_was_left(tmp_path: Path) -> None:
    for error, reason in ((KeyboardInterrupt, "interrupted"), (ZeroDivisionError, "failed")):
        with pytest.raises(error), Metrics(tmp_path / reason, world=ALONE):
            raise error
        (ended,) = lines(tmp_path / reason, "ended")
        assert ended["reason"] == reason
        assert bool(ended["error"]) is (reason == "failed")


def test_it_can_be_plotted_beside_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        with Metrics(tmp_path / name, world=ALONE) as metrics:
            for step in range(1, 6):
                metrics.log(step, {"loss": 1.0 / step})
                metrics.log(step, {"valid_loss": 2.0 / step})
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "plot",
                str(tmp_path / "one"),
                str(tmp_path / "two"),
                "--out",
                str(tmp_path / "plot.png"),
            ]
        )
    assert ended.value.code == 0
    assert (tmp_path / "plot.png").stat().st_size > 1000
    told = capsys.readouterr().out
    assert "0.200" in told
    assert "0.400" in told


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_picture_is_drawn_again_but_nothing_else_is_drawn_over(
    tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Metrics(tmp_path / "run", world=ALONE) as metrics:
        for step in range(1, 6):
            metrics.log(step, {"loss": 1.0 / step})
    out = tmp_path / f"mine{suffix}"

    def plot(*more: str) -> object:
        with pytest.raises(SystemExit) as ended:
            main(["plot", str(tmp_path / "run"), "--out", str(out), *more])
        return ended.value.code

    assert plot() == 0
    assert plot() == 0
    out.write_bytes(b"precious")
    capsys.readouterr()
    assert plot() == 2
    assert out.read_bytes() == b"precious"
    told = capsys.readouterr().err
    assert f"{out}: a file is there already that is no picture of runs" in told
    assert "--force" in told
    assert plot("--force") == 0
    memory = (
        tmp_path / f"memory{suffix}"
    )  # what the second picture is called, for which the run was too short
    memory.write_bytes(b"mine, too")
    assert plot() == 0
    sample = Sample(0.0, "rank", 0, "here", 7, "one", 1, 1.0, 10**8, 10**8, "pss", 10**8, 1.0)
    samples = "".join(f"{encode_sample(replace(sample, time=time))}\n" for time in (1.0, 2.0, 3.0))
    monitor_file(tmp_path / "run", "rank", 0).write_text(samples)
    assert plot() == 2
    assert memory.read_bytes() == b"mine, too"
    assert plot("--force") == 0
    assert memory.stat().st_size > 1000


@pytest.mark.parametrize("value", ["2", None, mx.zeros((2,)), [1]])
def test_what_is_no_number(tmp_path: Path, value: Any) -> None:
    metrics = Metrics(tmp_path, world=ALONE)
    with pytest.raises(ConfigError) as caught:
        metrics.log(1, {"loss": value})
    assert caught.value.code == "argument-invalid"
    with pytest.raises(ConfigError, match="reduce='max'"):
        metrics.log(1, {"loss": 1.0}, reduce="max")  # type: ignore[arg-type]
    metrics.close()
    metrics.close()
    assert len(lines(tmp_path, "ended")) == 1
