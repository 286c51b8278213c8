"""What the recovery benchmark and the soak read out of a run, on runs made up here."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from allhands.runtime.faults import FiredFault, PlannedFault, read_schedule

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def modules() -> Any:
    """Import by name as the scripts do."""
    before = list(sys.path)
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "scripts")]
    try:
        yield {name: importlib.import_module(name) for name in ("recovery", "soak")}
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def bench(modules: dict[str, Any]) -> Any:
    return modules["recovery"]


@pytest.fixture(scope="module")
def soak(modules: dict[str, Any]) -> Any:
    return modules["soak"]


def _lines(bench: Any, *entries: tuple[float, str, int]) -> list[Any]:
    return [bench.Line(time_s, {"event": kind, "step": step}) for time_s, kind, step in entries]


def _fault(kind: str, time_s: float, step: int) -> FiredFault:
    return FiredFault(0, time_s, kind, rank=1, step=step, pid=1)


def test_times_count_from_the_fault_and_steps_from_the_checkpoint(bench: Any) -> None:
    lines = _lines(
        bench,
        *((1.0, "started", 0), (1.2, "train", 6), (1.4, "train", 7)),
        # Fails at 1.5 with 7 done; rank 0 still reports what had been exchanged.
        *(
            (1.6, "train", 8),
            (9.0, "started", 5),
            (9.5, "train", 6),
            (9.7, "train", 7),
            (9.9, "train", 8),
        ),
        (10.1, "train", 9),
    )
    events = [
        {"kind": "launched", "time": 0.5},
        {"kind": "fault", "time": 2.5},
        {"kind": "restarting", "time": 2.6},
    ]
    found = bench.recovery("killed", _fault("kill", 1.5, 7), lines, events)
    assert (found.detected_s, found.working_s) == (1.0, 8.0)
    assert found.beyond_s == pytest.approx(8.6)
    assert found.lost_steps == 3


def test_what_a_run_goes_on_after_by_itself(bench: Any) -> None:
    lines = _lines(
        bench, (1.0, "started", 0), (1.2, "train", 7), (4.0, "train", 8), (4.2, "train", 9)
    )
    # A later fault is none of its doing.
    found = bench.recovery("slow", _fault("slow", 1.3, 7), lines, [{"kind": "fault", "time": 5.0}])
    assert found == bench.Recovery("slow", 1, 7, None, pytest.approx(2.7), pytest.approx(2.7), 0)


def test_a_launcher_that_was_killed_has_noticed_nothing(bench: Any) -> None:
    lines = _lines(
        bench, (1.0, "train", 7), (3.0, "started", 5), (4.0, "train", 6), (4.5, "train", 8)
    )
    found = bench.recovery("x", _fault("launcher", 1.5, 7), lines, [{"kind": "fault", "time": 5.0}])
    assert (found.detected_s, found.working_s, found.lost_steps) == (None, 2.5, 2)


def test_no_step_after_it(bench: Any) -> None:
    lines = _lines(bench, (1.0, "train", 7), (3.0, "started", 5), (4.0, "train", 6))
    assert bench.recovery("x", _fault("kill", 1.5, 7), lines, []) is None
    assert bench.recovery("x", _fault("kill", 3.5, 7), lines, []) is None


def test_the_table_has_medians_and_the_longest(bench: Any) -> None:
    found = [
        bench.Recovery("killed", 0, 1, time_s, 2 * time_s, 3 * time_s, 4)
        for time_s in (1.0, 2.0, 6.0)
    ]
    found.append(bench.Recovery("slow", 0, 1, None, 1.0, 1.0, 0))
    assert bench.recovery_table(found)[2:] == [
        "| killed | 3 | 2.0 s (6.0 s) | 4.0 s (12.0 s) | 6.0 s | 4 |",
        "| slow | 1 | - | 1.0 s (1.0 s) | 1.0 s | 0 |",
    ]


def test_lines_are_stamped_as_they_come(bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with bench.Follower(file) as follower:
        time.sleep(0.05)
        with file.open("a") as stream:
            for step in range(3):
                stream.write(json.dumps({"event": "train", "step": step}))
                stream.flush()
                time.sleep(0.05)
                stream.write("\n" if step < 2 else "")
                stream.flush()
        between = time.time()
    assert [line.record["step"] for line in follower.lines] == [0, 1]  # the last one is not whole
    assert between - 0.2 < follower.lines[0].time < follower.lines[1].time <= between


def test_every_kind_of_the_benchmark_can_be_planned(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text(json.dumps([{"rank": 0, "step": 1, **entry} for entry in bench.KINDS.values()]))
    assert len(read_schedule(path)) == len(bench.KINDS)


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_chooses_a_plan_that_can_be_followed(soak: Any, tmp_path: Path, seed: int) -> None:
    plan = soak.make_plan(seed, 100, 3)
    assert plan == soak.make_plan(seed, 100, 3)
    assert plan != soak.make_plan(seed + 1, 100, 3)
    path = tmp_path / "faults.json"
    path.write_text(json.dumps(plan.ranks))
    planned: tuple[PlannedFault, ...] = read_schedule(path)
    assert len(planned) + len(plan.launcher) == 100
    assert len(plan.names) == len(planned)
    steps = [fault.step for fault in planned]
    assert steps == sorted(set(steps))
    assert max(*steps, plan.launcher[-1].step) + 10 < plan.iters
    # Every rank has its share, and only rank 0 saves.
    assert min(Counter(fault.rank for fault in planned).values()) > 15
    assert {fault.rank for fault in planned if fault.at == "save"} == {0}
    # No two at the same save.
    saves = [fault.step for fault in planned if fault.at == "save"]
    assert all(later - earlier > soak.SAVE_EVERY for earlier, later in itertools.pairwise(saves))
    # Two exceptions alike would be taken for one that comes again and again.
    texts = [fault.text for fault in planned if fault.kind == "raise"]
    assert len(texts) == len(set(texts))
