"""What becomes of a run does not depend on whether its words can be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

pytestmark = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="no device that is always full"
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("inputs")
    model, data = tiny.write_model(directory / "model"), tiny.write_chat_data(directory / "data")
    options = ["--model", str(model), "--data", str(data), "--iters", "4", "--batch-size", "2"]
    return [sys.executable, "-m", "allhands", "train", *options]


def _train(
    inputs: list[str], run: Path, redirected: str, *more: str
) -> subprocess.CompletedProcess[str]:
    words = [*inputs, "--adapter-path", str(run), *more]
    line = f'exec "$@" {redirected}'
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-c", line, "bash", *words],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "redirected", [">/dev/full", ">/dev/full 2>/dev/full", ">&- 2>&-", ">&-", "> >(head -0)"]
)
def test_a_run_whose_words_are_lost_has_finished(
    inputs: list[str], tmp_path: Path, redirected: str
) -> None:
    done = _train(inputs, tmp_path / "run", redirected)
    assert done.returncode == 0, done.stderr
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["reason"]) == ("ended", "finished")
    assert (tmp_path / "run/adapters.safetensors").is_file()
    # That words were lost is said, if there is a place for it; a reader who has gone need not be
    # told.
    assert ("note:" in done.stderr) == (redirected == ">/dev/full")


@pytest.mark.slow
@pytest.mark.parametrize("redirected", [">/dev/full", ">/dev/full 2>/dev/full"])
def test_so_has_one_of_several_ranks_and_its_supervisor_says_so(
    inputs: list[str], tmp_path: Path, redirected: str
) -> None:
    done = _train(inputs, tmp_path / "run", redirected, "-n", "2")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [events[-1][key] for key in ("kind", "exit_code")] == ["finished", 0]


def test_an_error_keeps_its_code_where_it_cannot_be_told(inputs: list[str], tmp_path: Path) -> None:
    done = _train([*inputs[:4], "--model", str(tmp_path / "none")], tmp_path / "run", "2>/dev/full")
    assert done.returncode == 4


def test_a_command_whose_result_is_its_words_fails_without_them(tmp_path: Path) -> None:
    line = f"exec {sys.executable} -m allhands version >/dev/full"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 5
    assert "standard output" in done.stderr


@pytest.mark.slow
def test_a_reader_who_has_read_enough_is_no_failure(inputs: list[str]) -> None:
    model, data = inputs[inputs.index("--model") + 1], inputs[inputs.index("--data") + 1]
    for words in (
        ["data", "check", data, "--model", model],
        ["plan", "--device", "M1", "--model", model],
    ):
        line = 'set -o pipefail; "$@" | head -1'
        command = ["bash", "-c", line, "bash", sys.executable, "-m", "allhands", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
