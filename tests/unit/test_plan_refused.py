"""What plans refuse: trainings that training refuses, in the same words; computers, links and prices that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import call_allhands

DEVICE = ("plan", "--device", "M1 Pro", "--iters", "9")


def test_a_training_that_is_refused_is_not_planned(tmp_path: Path, tiny_model: Path, tiny_data: Path) -> None:
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    values = json.loads((tiny_model / "config.json").read_text())
    values["quantization"] = {"group_size": 64, "bits": 4}
    (quantised / "config.json").write_text(json.dumps(values))
    for words in (DEVICE, ("plan", "--data", str(tiny_data))):  # before anything is trained here
        full = call_allhands(*words, "--model", str(quantised), "--fine-tune-type", "full", cwd=tmp_path)
        assert (full.returncode, full.stdout) == (2, "")
        assert "the model is quantised (4 bits): its weights cannot be trained in full" in full.stderr
        assert "what to do: use --fine-tune-type lora, or dequantise" in full.stderr
    many = call_allhands(*DEVICE, "--model", str(tiny_model), "--num-layers", "4", cwd=tmp_path)
    assert (many.returncode, many.stdout) == (2, "")
    assert "4 layers asked for, but the model has 3" in many.stderr


def test_a_directory_that_is_no_model_is_told_as_training_tells_it(tmp_path: Path, tiny_data: Path) -> None:
    done = call_allhands(*DEVICE, "--model", str(tiny_data), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (4, "")
    assert "no config.json: this is not a model directory" in done.stderr
    assert "what to do: give the directory that holds config.json, model*.safetensors" in done.stderr
