"""The commands of each tutorial run in order, with a tiny model and few steps."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import read_run
from test_readme import ROOT, blocks, shorten, small
from tiny import write_model

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
# What a page's commands must leave behind.
MADE = {
    "pirate.md": ("adapters/adapters.safetensors", "adapters/report.html", "loss.png"),
    "stories.md": ("tokenizer/tokenizer.json", "pretrained/model-best/model.safetensors"),
    "larger-model.md": ("adapters-pipeline/adapters.safetensors", "both.png"),
    "slow-link.md": ("adapters-rounds/adapters.safetensors", "links.html"),
}
# Runs of a page that compute the same, and how far their losses may differ.
SAME = {
    "larger-model.md": ("adapters-whole", "adapters-pipeline", 1e-4),
    "slow-link.md": ("adapters-plain", "adapters-int8", 1e-2),
}

pytestmark = pytest.mark.long


def write_stories(directory: Path) -> None:
    """A data set with the splits of TinyStories."""
    names, things = ("Lily", "Tim", "Max"), ("ball", "cat", "tree")
    drawn = random.Random(1)
    directory.mkdir()
    for split, count in (("train", 200), ("valid", 20)):
        stories = [
            " ".join(
                f"One day {drawn.choice(names)} saw a {drawn.choice(things)}." for _ in range(8)
            )
            for _ in range(count)
        ]
        (directory / f"{split}.txt").write_text("\n<|endoftext|>\n".join(stories))


def shrunk(command: str, model: Path, stories: Path) -> str:
    """The command with a tiny model, local stories and few steps."""
    command = command.replace("roneneldan/TinyStories", str(stories))
    command = re.sub(r"--vocabulary \d+", "--vocabulary 300", command)
    command = command.replace("--layers 4 --dims 192", "--layers 2 --dims 48")
    command = command.replace("--num-prompts 4", "--num-prompts 1 --max-tokens 4")
    return small(command, model)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_the_page_run_in_order(page: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "small", layers=2)
    write_stories(tmp_path / "tales")
    work = tmp_path / "work"
    work.mkdir()
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    lines = [
        line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()
    ]
    assert len(lines) >= 5
    for line in lines:
        assert line.startswith("allhands "), line
        command = shrunk(line, model, tmp_path / "tales")
        done = subprocess.run(
            command,
            shell=True,
            cwd=work,
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        if line.startswith("allhands data demo"):
            shorten(work / "data" / "pirate")
    assert [name for name in MADE[page.name] if not (work / name).is_file()] == []
    if page.name in SAME:
        one, other, tolerance = SAME[page.name]
        losses = [
            [report["loss"] for report in read_run(work / run).reports] for run in (one, other)
        ]
        assert len(losses[0]) == 6
        assert losses[1] == pytest.approx(losses[0], rel=tolerance)
