"""Runs side by side: what is said where their validation losses are of different samples."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from written_runs import BEGAN, write_run, write_samples

from allhands.observe.charts import Chart
from allhands.observe.metrics import read_metrics
from allhands.observe.plots import plot_losses
from allhands.report import make_page, read_facts, to_html, to_markdown
from allhands.report.page import Page

USUAL = {
    "data": "data/pirate",
    "batch_size": 8,
    "val_batches": 25,
    "max_seq_length": 2048,
    "mask_prompt": False,
}


def page_of(*runs: Path) -> Page:
    return make_page([read_facts(run, now=BEGAN + 1e6) for run in runs])


def run_with(directory: Path, tokens: int = 900, **options: Any) -> Path:
    run = write_run(directory)
    file = run / "metrics.jsonl"
    file.write_text(file.read_text().replace('"num_tokens": 900', f'"num_tokens": {tokens}'))
    assert f'"num_tokens": {tokens}' in file.read_text()
    (run / "adapter_config.json").write_text(json.dumps({**USUAL, **options}))
    return run


def started(run: Path, **facts: Any) -> dict[str, Any]:
    """Change facts of the run's start; return all of them."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines()
    (at,) = (place for place, line in enumerate(lines) if '"event": "started"' in line)
    began: dict[str, Any] = json.loads(lines[at]) | facts
    lines[at] = json.dumps(began)
    file.write_text("\n".join(lines) + "\n")
    return began


@pytest.mark.parametrize(
    ("tokens", "options", "why"),
    [
        (700, {"val_batches": 10}, "they differ in --val-batches"),
        (700, {"batch_size": 4}, "they differ in --batch-size"),
        (900, {"max_seq_length": 128}, "they differ in --max-seq-length"),
        (900, {"data": "data/other", "packing": True}, "they differ in --data, --packing"),
        (300, {"mask_prompt": True}, "they differ in --mask-prompt"),
        (800, {}, "their validations are of 800 and 900 tokens"),
    ],
)
def test_other_samples_are_said_above_the_table(
    tmp_path: Path, tokens: int, options: dict[str, Any], why: str
) -> None:
    page = page_of(run_with(tmp_path / "a1"), run_with(tmp_path / "b1", tokens, **options))
    said = f"The runs were validated on different samples ({why}): their validation losses cannot be compared."
    assert page.sections[0].told == said
    assert said in re.sub("<[^>]*>", "", to_html(page))
    assert "The runs were validated on different samples" in to_markdown(page)


@pytest.mark.parametrize(
    ("examples", "options", "alike"),
    [
        # The same examples at another place, read by a longer name.
        (("a/9", "a/9"), {"data": "data/moved", "max_seq_length": 4096}, True),
        (("a/9", "a/9"), {"isolate_documents": True}, False),
        # The files have changed between the runs, under the same names.
        (("a/9", "b/9"), {}, False),
        (("a/9", None), {}, True),
    ],
)
def test_examples_are_compared_by_their_content(
    tmp_path: Path, examples: tuple[str | None, ...], options: dict[str, Any], alike: bool
) -> None:
    runs = [run_with(tmp_path / "a1"), run_with(tmp_path / "b1", **options)]
    for run, validated in zip(runs, examples, strict=True):
        started(run, validated=validated)
    assert (page_of(*runs).sections[0].told == "") is alike


def test_a_run_that_has_not_validated_its_new_examples_is_not_compared(tmp_path: Path) -> None:
    runs = [run_with(tmp_path / "a1"), run_with(tmp_path / "b1")]
    began = started(runs[1], validated="a/9")
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(began | {"validated": "b/9", "step": 60}) + "\n")
    history = read_metrics(runs[1])
    assert history.valid
    assert not history.comparable
    assert page_of(*runs).sections[0].told == ""


@pytest.mark.parametrize(("params", "unlike"), [(7_000_000, True), (None, False)])
def test_models_of_other_sizes_are_said_above_the_table(
    tmp_path: Path, params: int | None, unlike: bool
) -> None:
    one, other = run_with(tmp_path / "a1"), run_with(tmp_path / "b1")
    file = other / "metrics.jsonl"
    text = re.sub(r'"total_params": \d+', lambda it: f'"total_params": {params}', file.read_text())
    if params is not None:
        file.write_text(text)
    assert ("7 M parameters" in page_of(one, other).sections[0].told) is unlike


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"learning_rate": 1e-3},
        {"packing": None},
        {"val_batches": -1},
        {"batch_size": 4, "val_batches": 50},
    ],
)
def test_nothing_is_said_of_the_same_samples(tmp_path: Path, options: dict[str, Any]) -> None:
    page = page_of(run_with(tmp_path / "a1"), run_with(tmp_path / "b1", **options))
    assert page.sections[0].told == ""
    assert "different samples" not in to_html(page) + to_markdown(page)


@pytest.mark.parametrize(
    ("schedule", "steps", "told"),
    [({"warmup": 0}, 5, "5"), ({"warmup": 7}, 0, "7"), (None, 5, "5"), ({"warmup": 0}, 0, "0")],
)
def test_the_warm_up_is_told_once_and_as_it_was(
    tmp_path: Path, schedule: dict[str, int] | None, steps: int, told: str
) -> None:
    run = write_run(tmp_path / "run")
    file = run / "adapter_config.json"
    chosen = None if schedule is None else {"name": "cosine", "warmup_init": 0.0, **schedule}
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "lr_schedule": chosen, "warmup_steps": steps})
    )
    page = make_page([read_facts(run)])
    options = dict(
        next(section for section in page.sections if section.key == "options").grids[-1].rows
    )
    assert options["warmup_steps"] == told
    assert [name for name, text in options.items() if "warmup" in name or "warmup" in text] == [
        "warmup_steps"
    ]


def test_who_directs_the_ranks_stands_apart_from_what_they_need(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=2)
    write_samples(run)
    lines = (run / "logs" / "monitor-rank-0.jsonl").read_text().splitlines()
    director = {**json.loads(lines[0]), "role": "orchestrator", "pid": 99, "rss_bytes": 47_000_000}
    director |= {"pss_bytes": 40_000_000, "peak_rss_bytes": 47_000_000, "phases": {}}
    director = {
        name: value
        for name, value in director.items()
        if name not in ("rank", "step", "estimated_bytes")
    }
    (run / "logs" / "monitor-orchestrator.jsonl").write_text(json.dumps(director) + "\n")
    facts = read_facts(run)
    rows = (
        next(section for section in make_page([facts]).sections if section.key == "memory")
        .grids[0]
        .rows
    )
    names = [row[0] for row in rows]
    assert names == ["rank 0", "rank 1", "ranks together", "orchestrator", "all together"]
    assert (
        facts.together_bytes >= facts.ranks_bytes >= max(row.peak_rss_bytes for row in facts.rows)
    )
    kinds = {
        line.kind
        for section in make_page([facts]).sections
        for chart in section.charts
        for line in chart.lines
    }
    assert kinds == {"run", "rank", "director", "phase", "ink"}


def losses_of(*runs: Path) -> Chart:
    sections = make_page([read_facts(run) for run in runs]).sections
    return next(
        chart for section in sections for chart in section.charts if chart.key == "loss-steps"
    )


def test_a_ruined_run_leaves_the_others_their_height(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good")  # from 4.1 to 2.3
    other = write_run(
        tmp_path / "other", train=lambda step: 3 + 1 / (1 + step), valid=lambda step: 4.0
    )
    ruined = write_run(
        tmp_path / "ruined", train=lambda step: 4 + 10 * step, valid=lambda step: 4 + 10 * step
    )  # to 604
    always = write_run(tmp_path / "always", train=lambda step: 700.0, valid=None)
    pretrained = write_run(
        tmp_path / "new", train=lambda step: 3 + 7 / (1 + step / 10), valid=None
    )  # from 10
    assert losses_of(good, other).top is None
    assert losses_of(good, pretrained).top is None
    assert losses_of(ruined).top is None
    for bad in (ruined, always):
        for place in range(2):
            runs = [good, other]
            runs.insert(place, bad)
            drawn = losses_of(*runs)
            assert drawn.top is not None
            assert 4.1 < drawn.top < 12
            assert "cut off" in drawn.y_label
            assert any(
                "604" in cell or "700" in cell for row in drawn.table.rows for cell in row
            ), "all is in the table"
        histories = [read_metrics(run) for run in (good, bad)]
        assert plot_losses(histories, tmp_path / "plot.png").stat().st_size > 1000
