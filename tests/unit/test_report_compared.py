"""Runs side by side: what is said where their validation losses are of different samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from written_runs import BEGAN, write_run

from allhands.report import make_page, read_facts, to_html, to_markdown
from allhands.report.page import Page

USUAL = {"data": "data/pirate", "batch_size": 8, "val_batches": 25, "max_seq_length": 2048, "mask_prompt": False}


def page_of(*runs: Path) -> Page:
    return make_page([read_facts(run, now=BEGAN + 1e6) for run in runs])


def run_with(directory: Path, tokens: int = 900, **options: Any) -> Path:
    run = write_run(directory)
    file = run / "metrics.jsonl"
    file.write_text(file.read_text().replace('"num_tokens": 900', f'"num_tokens": {tokens}'))
    assert f'"num_tokens": {tokens}' in file.read_text()
    (run / "adapter_config.json").write_text(json.dumps({**USUAL, **options}))
    return run


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
def test_other_samples_are_said_above_the_table(tmp_path: Path, tokens: int, options: dict[str, Any], why: str) -> None:
    page = page_of(run_with(tmp_path / "a1"), run_with(tmp_path / "b1", tokens, **options))
    said = f"The runs were validated on different samples ({why}): their validation losses cannot be compared."
    assert page.sections[0].told == said
    assert said in to_html(page)
    assert "The runs were validated on different samples" in to_markdown(page)


@pytest.mark.parametrize(
    "options",
    [{}, {"learning_rate": 1e-3}, {"packing": None}, {"val_batches": -1}, {"batch_size": 4, "val_batches": 50}],
)
def test_nothing_is_said_of_the_same_samples(tmp_path: Path, options: dict[str, Any]) -> None:
    page = page_of(run_with(tmp_path / "a1"), run_with(tmp_path / "b1", **options))
    assert page.sections[0].told == ""
    assert "different samples" not in to_html(page) + to_markdown(page)
