"""The phases of a step over a run: charts of reports and of samples, whose numbers are worked out
by hand.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from written_runs import BEGAN, write_run, write_samples

from allhands.observe.charts import Chart
from allhands.observe.metrics import read_metrics
from allhands.observe.monitor import Sample, read_samples
from allhands.observe.times import times_markdown
from allhands.report import make_page, read_facts, to_markdown
from allhands.report.charts import Bars, phase_charts

NAMES = ["data wait", "compute", "reduce", "update and rest", "whole step"]


def charts_of(run: Path, samples: list[Sample] | None = None) -> dict[str, Chart]:
    known = samples if samples is not None else read_samples(run)
    return {one.key: one for one in phase_charts("p", "run", read_metrics(run), known)}


def heights(chart: Chart) -> dict[str, list[float | None]]:
    return {line.label: list(line.y) for line in chart.lines}


@pytest.fixture
def pattern(tmp_path: Path) -> Sample:
    run = write_run(tmp_path / "pattern")
    write_samples(run, ranks=1, count=1)
    return read_samples(run)[0]


def sampled(
    pattern: Sample, *looks: tuple[int | None, dict[str, float]], rank: int = 0, pid: int = 7
) -> list[Sample]:
    return [
        replace(
            pattern,
            rank=rank,
            pid=pid + rank,
            time=BEGAN + place,
            step=step,
            phases=phases,
            ended=False,
        )
        for place, (step, phases) in enumerate(looks)
    ]


def test_reports_of_rank_0(tmp_path: Path) -> None:
    """0.5 s each: 70 % computing, 1 % waiting for data, the rest the update."""
    found = charts_of(write_run(tmp_path / "run", steps=15), [])
    assert list(found) == ["p"]
    chart = found["p"]
    assert [line.label for line in chart.lines] == NAMES
    assert chart.lines[0].x == (5.0, 10.0, 15.0)
    assert {name: y[0] for name, y in heights(chart).items()} == {
        name: pytest.approx(seconds)
        for name, seconds in zip(NAMES, (0.005, 0.35, 0.0, 0.145, 0.5), strict=True)
    }
    assert chart.top == pytest.approx(1.08 * 0.5)
    assert not chart.wide
    assert "compute: from 0.35 s at step 5 to 0.35 s at 15" in chart.described
    assert chart.table.rows[0] == ("5", "5 ms", "0.35 s", "0 s", "0.145 s", "0.5 s")


def test_samples_of_each_rank(tmp_path: Path, pattern: Sample) -> None:
    """What lies between two looks is divided by the steps between them."""
    work = {"load": 0.2, "compute": 1.0, "reduce": 0.4, "update": 0.4, "save": 5.0}
    first = [(None, {"start": 3.0}), (1, {"start": 0.5, "first": 2.0, "compute": 9.0})]
    zero = sampled(
        pattern, *first, (3, work), (3, {"compute": 0.5}), (4, {"compute": 0.5, "validate": 7.0})
    )
    one = sampled(pattern, *first, (3, {"compute": 0.4, "reduce": 1.6}), rank=1)
    found = charts_of(write_run(tmp_path / "run"), [*zero, *one])
    assert list(found) == ["p", "p-rank-0", "p-rank-1"]
    assert found["p"].wide
    chart = found["p-rank-0"]
    assert chart.lines[0].x == (3.0, 4.0)
    # Two steps in 2 s, then one that took two looks; saving and validating are none of a step.
    expected = ([0.1, 0.0], [0.5, 1.0], [0.2, 0.0], [0.2, 0.0], [1.0, 1.0])
    assert heights(chart) == {
        name: pytest.approx(y) for name, y in zip(NAMES, expected, strict=True)
    }
    assert heights(found["p-rank-1"])["reduce"] == [pytest.approx(0.8)]
    # Side by side on the same scale.
    assert chart.top == found["p-rank-1"].top == pytest.approx(1.08)


def test_a_new_start_is_no_step(tmp_path: Path, pattern: Sample) -> None:
    looks = [(4, {"compute": 1.0}), (6, {"compute": 1.0})]
    before, after = (
        sampled(pattern, *looks),
        sampled(pattern, (2, {"compute": 4.0}), (4, {"compute": 3.0}), pid=99),
    )
    later = [replace(one, time=one.time + 10) for one in after]
    other = sampled(pattern, *looks, rank=1)
    found = charts_of(write_run(tmp_path / "run"), [*before, *later, *other])
    # From 4 to 6 by the first process; from 2 to 4 by the second; nothing between the two.
    assert found["p-rank-0"].lines[0].x == (6.0, 4.0)
    assert heights(found["p-rank-0"])["compute"] == [pytest.approx(0.5), pytest.approx(1.5)]


def test_many_samples_and_many_ranks(tmp_path: Path, pattern: Sample) -> None:
    looks = [(step, {"compute": 0.25, "reduce": 0.75}) for step in range(601)]
    samples = [sample for rank in range(10) for sample in sampled(pattern, *looks, rank=rank)]
    found = charts_of(write_run(tmp_path / "run"), samples)
    assert list(found) == ["p", *(f"p-rank-{rank}" for rank in range(8))]
    assert "the first 8 of 10 ranks" in found["p-rank-7"].title
    line = found["p-rank-0"].lines[1]
    assert len(line.x) == 60
    assert line.x[:2] == (10.0, 20.0)
    assert set(line.y) == {0.25}


def test_damaged_numbers_are_gaps(tmp_path: Path, pattern: Sample) -> None:
    run = write_run(tmp_path / "run", steps=15)
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    for record in lines:
        if record["event"] == "train" and record["step"] == 10:
            record["comm_s"] = "NaN"
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    chart = charts_of(run, [])["p"]
    assert heights(chart)["reduce"] == [0.0, None, 0.0]
    assert heights(chart)["whole step"] == [0.5, 0.5, 0.5]
    json.dumps(chart.to_json(), allow_nan=False)
    infinite = sampled(pattern, (1, {}), (2, {"compute": float("inf")}), (3, {"compute": 1.0}))
    made = charts_of(run, [*infinite, *sampled(pattern, (1, {}), (2, {"compute": 1.0}), rank=1)])
    assert heights(made["p-rank-0"])["compute"] == [None, 1.0]
    json.dumps(made["p-rank-0"].to_json(), allow_nan=False)


def test_they_stand_on_the_page(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, ranks=2) for name in ("one", "two")]
    write_samples(runs[1])
    page = make_page([read_facts(run, now=BEGAN + 1e6) for run in runs])
    section = next(one for one in page.sections if one.key == "phases")
    assert [chart.key for chart in section.charts] == [
        "phases-0",
        "phases-1",
        "phases-1-rank-0",
        "phases-1-rank-1",
    ]
    assert "Phases of a step: rank 1 of two (2 ranks)" in to_markdown(page)
    old = write_run(tmp_path / "old", steps=0, valid=None)
    assert "phases" not in {one.key for one in make_page([read_facts(old)]).sections}


def resumed_alone(tmp_path: Path) -> Path:
    """Two ranks with two cores, at 900 MB where it was killed, then one with one from step 20 on,
    at 600 MB.
    """
    run = write_run(tmp_path / "run", steps=30, ranks=2, ended=None)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    later = write_run(tmp_path / "later", steps=40, ranks=1)
    started, *reports = [
        json.loads(line) for line in (later / "metrics.jsonl").read_text().splitlines()
    ][1:]
    for line in lines:
        if line.get("event") == "started":
            line["cores_per_rank"] = 2
        if line.get("step") == 30 and "peak_memory_bytes" in line:
            line["peak_memory_bytes"] = [900_000_000, 610_000_000]
    started |= {"step": 20, "elapsed_s": 5.0, "time": BEGAN + 1000}
    lines += [started, *(line for line in reports if line.get("step", 99) > 20)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


def test_all_starts_of_a_resumed_run_have_a_part_in_its_figures(tmp_path: Path) -> None:
    run = resumed_alone(tmp_path)
    history = read_metrics(run)
    assert [start.num_ranks for start in history.starts] == [2, 1]
    assert history.peaks == [900_000_000, 610_000_000], "in steps that were trained again, too"
    header, _, row = times_markdown([history]).splitlines()
    cells = dict(zip(header.split(" | "), row.split(" | "), strict=True))
    assert (cells["ranks"], cells["cores per rank"]) == ("2, 1", "2, 1")
    assert cells["peak memory per rank"] == "610 MB to 900 MB"
    text = to_markdown(make_page([read_facts(run)]))
    assert "| cores per rank | 2, 1 |" in text
    assert "| ranks | 2, 1 |" in text


def test_the_phases_of_earlier_starts_are_counted(tmp_path: Path) -> None:
    run = resumed_alone(tmp_path)
    write_samples(run, ranks=2, count=20)
    (page,) = [bars for bars in phases_of(run) if bars.title.startswith("Phases of each rank")]
    before = dict(page.rows)
    (run / "logs" / "earlier-1").mkdir()
    for file in (run / "logs").glob("monitor-*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.rename(run / "logs" / "earlier-1" / file.name)
        if "rank-0" in file.name:
            later = [
                line | {"time": line["time"] + 1000, "run": "second", "attempt": 1}
                for line in lines
            ]
            file.write_text("".join(f"{json.dumps(line)}\n" for line in later))
    (page,) = [bars for bars in phases_of(run) if bars.title.startswith("Phases of each rank")]
    after = dict(page.rows)
    assert "all starts together" in page.described
    assert dict(after["rank 0"])["compute"] == pytest.approx(2 * dict(before["rank 0"])["compute"])
    assert after["rank 1"] == before["rank 1"]
    # Those of another run, which was over before this one began, are not.
    for file in (run / "logs" / "earlier-1").iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text(
            "".join(f"{json.dumps(line | {'time': line['time'] - 5000})}\n" for line in lines)
        )
    (page,) = [bars for bars in phases_of(run) if bars.title.startswith("Phases of each rank")]
    assert "all starts together" not in page.described
    assert set(dict(page.rows)) == {"rank 0"}


def phases_of(run: Path) -> list[Bars]:
    return [bars for section in make_page([read_facts(run)]).sections for bars in section.bars]
