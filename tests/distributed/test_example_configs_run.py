"""Each configuration of ``examples/configs`` trains: the same file, with a tiny model and few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import run_allhands

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
# On this computer, in place of two or of eight.
HERE = ["--hostfile", "here"]
RUNS: dict[str, list[str]] = {
    "lora-one-mac": [],
    "qlora-two-macs": HERE,
    "pipeline-70b-two-macs": HERE,
    "full-eight-gpus": ["-n", "2"],
    "slurm": ["-n", "2"],
    "slow-links": HERE,
    "pretrain-stories": ["-n", "2"],
}
TINY_SHAPE = "--layers 2 --dims 32 --mlp-dims 64 --heads 4 --kv-heads 2 --block-size 32"
FEW_STEPS = "--iters 2 --batch-size 4 --grad-accumulation-steps 1 --warmup-steps 1"


def test_every_file_is_run() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_file_trains_at_demo_size(
    name: str, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "here").write_text("localhost slots=2\n")
    (tmp_path / "model").symlink_to(tiny_model)
    words = ["train", "--model", "model", "--data", str(tiny_data), "--num-layers", "2"]
    if name == "pretrain-stories":
        texts = tmp_path / "texts"
        texts.mkdir()
        for split in ("train", "valid"):
            (texts / f"{split}.txt").write_text("Once there was a ship.<|endoftext|>" * 40)
        words = ["pretrain", "--tokenizer", "model", "--data", "texts", *TINY_SHAPE.split()]
    words += ["-c", str(CONFIGS / f"{name}.yaml"), "--adapter-path", "run"]
    done = run_allhands(*words, *RUNS[name], *FEW_STEPS.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    written = (tmp_path / "run" / "metrics.jsonl").read_text()
    events = [json.loads(line) for line in written.splitlines()]
    started = next(event for event in events if event["event"] == "started")
    assert started["num_ranks"] == (1 if name == "lora-one-mac" else 2)
    steps = [event["step"] for event in events if event["event"] == "train"]
    assert steps[-1:] == [2]
