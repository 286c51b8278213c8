"""The commands of pages run in order, with tiny models and few steps.

Tutorials begin in an empty directory. Other pages find what they talk about: a model, data, a
tokenizer and trained adapters.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
from command_line import call_allhands
from runs import read_run
from test_readme import ROOT, blocks, run_in_shell, shorten, small
from tiny import run_allhands, write_model, write_tokenizer

DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
# Pages with commands, and how many of these run here.
PAGES = {
    "coming-from-mlx-lm.md": 2,
    "data.md": 3,
    "kernels.md": 3,
    "larger-than-one.md": 7,
    "plan.md": 3,
    "pretraining.md": 5,
    "python.md": 3,
    "reliability.md": 6,
    "report.md": 4,
    "several-processes.md": 6,
    "slow-links.md": 6,
    "strategies.md": 2,
}
# Other tests run these: several computers, MPI, clusters, servers and benchmarks.
ELSEWHERE = re.compile(
    r"^#|^exec |\bmpirun\b|--hostfile|--hosts node1|\bdashboard\b|^python benchmarks/"
)
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
TINY_SHAPE = "--shape llama --layers 2 --dims 48 --mlp-dims 96 --heads 2 --block-size 64"

pytestmark = pytest.mark.long


def write_stories(directory: Path) -> None:
    """A data set with the splits of TinyStories."""
    names, things = ("Lily", "Tim", "Max"), ("ball", "cat", "tree")
    drawn = random.Random(1)
    directory.mkdir(parents=True)
    for split, count in (("train", 200), ("valid", 20)):
        stories = [
            " ".join(
                f"One day {drawn.choice(names)} saw a {drawn.choice(things)}." for _ in range(8)
            )
            for _ in range(count)
        ]
        lines = [json.dumps({"text": story}) + "\n" for story in stories]
        (directory / f"{split}.jsonl").write_text("".join(lines))


def shrunk(command: str, small_ones: Path) -> str:
    """The command with a tiny model, local stories and few steps."""
    model = small_ones / "model"
    command = command.replace("roneneldan/TinyStories", str(small_ones / "stories"))
    command = command.replace("mlx-community/Qwen3-30B-A3B-4bit", str(small_ones / "experts"))
    command = command.replace("--model MODEL", f"--model {model}")
    command = command.replace("model check demo", f"model check {model}")
    command = command.replace("--hosts one,two", "-n 2")
    command = command.replace("-n 3 --tp 3", "-n 2 --tp 2")
    command = command.replace("--num-prompts 4", "--num-prompts 1 --max-tokens 4")
    command = re.sub(r"--vocabulary \d+", "--vocabulary 300", command)
    command = re.sub(r"--shape llama\b.*?--block-size \d+|--shape llama-15m", TINY_SHAPE, command)
    command = command.replace("--sync-every 50", "--sync-every 2")
    command = command.replace("--sync-fragments 5 --sync-delay 10", "--sync-fragments 2")
    command = command.replace("--val-batches -1", "")
    if re.search(r"allhands (train|pretrain) ", command) and "--iters" not in command:
        command += " --iters 6"
    # A fault at step 45 needs so many steps.
    return (
        command.replace("--model demo", f"--model {model}")
        if "FAULTS" in command
        else small(command, model)
    )


def commands_of(page: Path) -> list[str]:
    """The lines of a page's shell blocks."""
    return [
        line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()
    ]


def run(lines: list[str], work: Path, small_ones: Path) -> None:
    """Run each line as a shell does; all of them must succeed."""
    for line in lines:
        run_in_shell(shrunk(line, small_ones), work)
        if line.startswith("allhands data demo"):
            shorten(work / "data" / "pirate")


@pytest.fixture(scope="module")
def small_ones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, one with experts, and stories."""
    place = tmp_path_factory.mktemp("small")
    write_model(place / "model", layers=2)
    write_model(place / "experts", layers=2, experts=2)
    write_stories(place / "stories")
    return place


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """An empty directory for the commands."""
    place = tmp_path / "work"
    place.mkdir()
    return place


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_commands_of_a_tutorial_run_in_order(page: Path, work: Path, small_ones: Path) -> None:
    lines = commands_of(page)
    assert len(lines) >= 5
    assert [line for line in lines if not line.startswith("allhands ")] == []
    run(lines, work, small_ones)
    assert [name for name in MADE[page.name] if not (work / name).is_file()] == []
    if page.name in SAME:
        one, other, tolerance = SAME[page.name]
        losses = [
            [report["loss"] for report in read_run(work / name).reports] for name in (one, other)
        ]
        assert len(losses[0]) == 6
        assert losses[1] == pytest.approx(losses[0], rel=tolerance)


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_run_in_order(name: str, work: Path, small_ones: Path) -> None:
    lines = [line for line in commands_of(DOCS / name) if not ELSEWHERE.search(line)]
    assert len(lines) == PAGES[name], lines
    prepare(work, small_ones, DOCS / name)
    run(lines, work, small_ones)


def prepare(work: Path, small_ones: Path, page: Path) -> None:
    """Write what pages talk about."""
    shutil.copytree(small_ones / "model", work / "models" / "smollm2")
    shutil.copytree(small_ones / "stories", work / "data" / "stories")
    done = call_allhands("data", "demo", "--out", work / "data" / "pirate")
    assert done.returncode == 0, done.stderr
    shorten(work / "data" / "pirate")
    (work / "examples").symlink_to(ROOT / "examples")
    (work / "my_script.py").write_text("import allhands\n\nprint(allhands.init().size)\n")
    for block in blocks(page, "json"):
        if '"kind"' in block:
            (work / "faults.json").write_text(block)
    for block in blocks(page, "python"):
        if "Checkpointer(" in block:
            (work / "loop.py").write_text(block)
    if page.name == "data.md":
        shutil.copyfile(work / "data" / "pirate" / "train.jsonl", work / "chats.jsonl")
        (work / "more.csv").write_text("prompt,completion\nWho are you?,A pirate.\n")
        (work / "texts").mkdir()
        (work / "texts" / "one.txt").write_text("Once upon a time there was a pirate.\n")
    if page.name == "slow-links.md":
        write_tokenizer(work / "tokenizer")
    if page.name in ("report.md", "plan.md"):
        options = ["--model", "models/smollm2", "--data", "data/pirate", "--val-batches", "1"]
        done = run_allhands("train", "--train", *options, "--iters", "6", "-n", "2", cwd=work)
        assert done.returncode == 0, done.stderr
        for copy in ("adapters-one", "adapters-two", "adapters-both"):
            shutil.copytree(work / "adapters", work / copy)
