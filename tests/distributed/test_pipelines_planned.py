"""A training over stages that was planned, then run: memory of each rank, and the time of a step.

All ranks are on this computer, with a core each; the plan is for computers of their own, of which
some have little memory, so that their stages are small. Where ranks share cores, their memory alone
is compared.
"""

from __future__ import annotations

import json
import os
import random
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tiny import run_allhands, write_chat_data, write_model

from allhands.cluster.planned import site_of
from allhands.config.schema import build_config
from allhands.observe.metrics import read_metrics
from allhands.observe.monitor import read_samples
from allhands.plan.calibration import Calibrator
from allhands.plan.computers import Computer
from allhands.plan.facts import facts_of
from allhands.plan.job import Job, Prices
from allhands.plan.pipelines import Pipelined, pipelined
from allhands.plan.site import AskedComputers
from allhands.runtime.accelerator import detect

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(detect().kind != "cpu", reason="compared with processes on a CPU"),
]
TIMES = bool(os.environ.get("ALLHANDS_TEST_TIMES"))  # on a quiet computer only
ROOMY = 100 * 10**9


@dataclass(frozen=True)
class Case:
    """A training; ``rooms`` are megabytes of each computer that has little, ``tokens`` 0: rows of
    all lengths.
    """

    tokens: int
    rows: int = 8
    layers: int = 8
    hidden: int = 384
    method: str = "lora"
    ranks: int = 2
    rooms: tuple[int, ...] = ()
    bits: int | None = None
    even: bool = True

    def config(self, place: Path) -> dict[str, Any]:
        """Options of the training."""
        return {
            **{
                "model": str(place / "model"),
                "data": str(place / "data"),
                "fine_tune_type": self.method,
                "seed": 1,
            },
            **{
                "num_layers": -1,
                "batch_size": self.rows,
                "max_seq_length": self.tokens or 512,
                "iters": 8,
            },
            **{"learning_rate": 1e-4, "gradient_check": "off", "val_batches": 2},
        }


CASES = {
    "long rows": Case(512),
    "short rows": Case(73),
    "full": Case(128, rows=16, method="full"),
    "unequal stages": Case(256, rooms=(ROOMY, 210), even=False),
    "three stages": Case(128, rows=12, layers=7, ranks=3),
    "three unequal stages": Case(
        73, rows=12, layers=9, method="full", ranks=3, rooms=(ROOMY, 220, ROOMY), even=False
    ),
    "unequal rows": Case(0, rows=16, hidden=256),
    "4 bits": Case(128, rows=16, bits=4),
}


def written(place: Path, case: Case) -> None:
    write_model(place / "model", layers=case.layers, hidden=case.hidden, tied=False, bits=case.bits)
    if not case.tokens:
        write_chat_data(place / "data", train=20 * case.rows, longest=500)
        return
    draw, data = random.Random(1), place / "data"
    data.mkdir()
    for name, count in (("train", 20 * case.rows), ("valid", case.rows)):
        texts = ("".join(draw.choices("abcdefgh ", k=case.tokens - 1)) for _ in range(count))
        (data / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )


def planned(place: Path, case: Case) -> tuple[Job, Pipelined]:
    own = {"train": True, "adapter_path": str(place / "planned"), "cores_per_rank": 1}
    config = build_config({**own, **case.config(place)})
    asked = AskedComputers(
        None, None, (), once=False, timeout_s=300.0, prices=Prices(), site=site_of(config)
    )
    job, _, measured = facts_of(config, asked, print)
    assert measured is not None
    if measured.doubt and TIMES:
        pytest.skip(measured.doubt)
    job = replace(
        job, small=Calibrator(300.0, on_gpu=False).small_passes(config, measured, case.ranks)
    )
    rooms = [room * 10**6 if room != ROOMY else room for room in case.rooms] or [ROOMY] * case.ranks
    found = pipelined(
        job, [Computer(f"c{place}", 1.0, room, room) for place, room in enumerate(rooms)]
    )
    assert found is not None
    return job, found


@pytest.mark.timeout(600)
# A case takes up to a minute; all of them are asked for together with their times.
@pytest.mark.parametrize("name", CASES if TIMES else list(CASES)[:4])
def test_stages_take_the_memory_and_the_time_that_were_planned(
    tmp_path: Path, name: str, record_property: pytest.RecordProperty
) -> None:
    case = CASES[name]
    written(tmp_path, case)
    job, found = planned(tmp_path, case)
    assert found.fits
    assert (max(found.sizes) - min(found.sizes) <= 2) == case.even, found.sizes
    words = [
        word
        for key, value in case.config(tmp_path).items()
        for word in (f"--{key.replace('_', '-')}", value)
    ]
    words += [
        "--adapter-path",
        tmp_path / "run",
        "--steps-per-report",
        1,
        "--keep-last",
        0,
        "--no-keep-best",
    ]
    words += ["-n", case.ranks, "--backend", "ring", "--strategy", "pipeline"]
    words += ["--pp-split", ",".join(map(str, found.sizes))]
    done = run_allhands("train", "--train", *map(str, words), timeout=300)
    assert done.returncode == 0, done.stderr
    reports = read_metrics(tmp_path / "run").train
    peaks = reports[-1].peak_rss_bytes
    # Steps have more or fewer tokens where rows are of all lengths.
    each = statistics.median(1 / report.tokens_per_s for report in reports[2:])
    seconds = each * job.step.tokens
    record_property("memory", (found.num_bytes, peaks))
    record_property("seconds", (found.step_s, seconds))
    own = [each for each in read_samples(tmp_path / "run") if each.role == "rank"]
    told = {each.rank: each.estimated_bytes for each in own if each.estimated_bytes}
    expected = [told[rank] for rank in range(case.ranks)]
    megabytes = [
        f"{peak / 1e6:.0f} ({is_to / 1e6:.0f}, {each_expected / 1e6:.0f})"
        for peak, is_to, each_expected in zip(peaks, found.num_bytes, expected, strict=True)
    ]
    print(f"{name}: {found.sizes}, {', '.join(megabytes)} MB; {seconds:.3f} ({found.step_s:.3f}) s")
    assert found.num_bytes == pytest.approx(peaks, rel=0.1)
    # So is what each rank expected before its first step.
    assert expected == pytest.approx(peaks, rel=0.1)
    if TIMES and case.ranks <= (os.cpu_count() or 1):
        assert found.step_s == pytest.approx(seconds, rel=0.15)
