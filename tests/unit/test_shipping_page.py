"""The commands of docs/shipping.md run in order, after a short training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import call_allhands
from test_readme import ROOT, blocks, shorten
from tiny import run_allhands, write_model


@pytest.mark.long
def test_the_commands_of_the_page_run_in_order(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "smollm2", layers=2)
    done = call_allhands("data", "demo", "--out", tmp_path / "data" / "pirate")
    assert done.returncode == 0, done.stderr
    shorten(tmp_path / "data" / "pirate")
    words = [
        "--model",
        "models/smollm2",
        "--data",
        "data/pirate",
        "--iters",
        "4",
        "--val-batches",
        "1",
    ]
    done = run_allhands("train", "--train", *words, "--learning-rate", "1e-2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran: list[str] = []
    for block in blocks(ROOT / "docs" / "shipping.md", "bash"):
        for line in block.splitlines():
            command = line if "chat" not in line else f"{line} --max-tokens 4"
            done = subprocess.run(
                command,
                shell=True,
                cwd=tmp_path,
                env=environ,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            ran.append(line.split("allhands ")[1].split()[0])
    assert ran.count("export") == 3
    assert {"chat", "eval", "fuse", "generate"} < set(ran)
    assert (tmp_path / "pirate-ollama" / "Modelfile").is_file()
