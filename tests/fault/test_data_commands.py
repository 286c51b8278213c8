"""Data commands that are stopped, run twice at once, or pointed at somebody's files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import tiny
from hostile import until

ALLHANDS = [sys.executable, "-m", "allhands"]


def write(path: Path, rows: int) -> Path:
    path.write_text(
        "".join(json.dumps({"text": f"row {n} " * 20}) + "\n" for n in range(rows)),
        encoding="utf-8",
    )
    return path


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*ALLHANDS, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_prepare_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    source = write(tmp_path / "rows.jsonl", 60_000)
    command = [*ALLHANDS, "data", "prepare", str(source), "--out", "out"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out.partial-*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    if number == signal.SIGINT:
        assert "interrupted" in err


def test_of_two_runs_into_one_directory_one_is_refused(tmp_path: Path) -> None:
    sources = [write(tmp_path / name, 3000) for name in ("one.jsonl", "two.jsonl")]
    commands = [[*ALLHANDS, "data", "prepare", str(source), "--out", "out"] for source in sources]
    started = [
        subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    errors = [process.communicate(timeout=100)[1] for process in started]
    assert sorted(process.returncode for process in started) == [0, 2]
    refused = [error for error in errors if "error: " in error]
    assert len(refused) == 1
    assert "out" in refused[0]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_demo_data_never_replace_other_data(tmp_path: Path) -> None:
    own = '{"prompt": "my own", "completion": "precious"}\n'
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "valid.jsonl").write_text(own)
    done = run("data", "demo", "--out", "own", cwd=tmp_path)
    assert done.returncode == 2
    assert "another valid.jsonl" in done.stderr
    assert (tmp_path / "own" / "valid.jsonl").read_text() == own
    assert not (tmp_path / "own" / "train.jsonl").exists()
    # Its own, it writes again.
    assert run("data", "demo", "--out", "demo", cwd=tmp_path).returncode == 0
    assert run("data", "demo", "--out", "demo", cwd=tmp_path).returncode == 0


def test_an_unusable_cache_is_named(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", 5)
    (tmp_path / "file").touch()
    monkeypatch.setenv("ALLHANDS_TOKEN_CACHE", str(tmp_path / "file"))
    done = run(
        "train", "--train", "--model", tiny_model, "--data", "data", "--iters", 1, cwd=tmp_path
    )
    assert done.returncode == 5
    assert "ALLHANDS_TOKEN_CACHE=" in done.stderr


def test_a_mistyped_path_is_not_looked_for_on_the_hub(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "data").mkdir()
    done = run(
        "train", "--train", "--model", tiny_model, "--data", "data/typo", "--iters", 1, cwd=tmp_path
    )
    assert done.returncode == 3
    assert "does not exist" in done.stderr
    assert "huggingface" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_a_training_of_a_tokenizer_at_once(tmp_path: Path) -> None:
    """The library that trains hears no signal until it is done, after 12 s on two idle cores."""
    rows = write(tmp_path / "rows.jsonl", 10_000).read_text()
    (tmp_path / "rows.jsonl").write_text(rows * 15)
    command = [*ALLHANDS, "tokenizer", "train", "rows.jsonl", "--out", "out"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: any(tmp_path.glob(".out.partial-*")), 60, "nothing was begun")
        time.sleep(2)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - begun < 4
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["eval", "generate", "fuse", "plan"])
def test_ctrl_c_says_what_is_true_of_the_verb(tmp_path: Path, verb: str) -> None:
    """None of them trains, so none of them stops before a step."""
    layers = 72 if verb == "fuse" else 24  # so that the files are written for longer than a second
    model, data = tiny.write_model(tmp_path / "model", layers=layers, hidden=256), tmp_path / "data"
    tiny.write_chat_data(data, test=4000)
    adapter = tiny.write_adapter(model, tmp_path / "adapter")
    words = {
        "eval": ["--data", str(data)],
        "generate": ["--prompt", "-", "--max-tokens", "100000"],
        "fuse": ["--adapter-path", str(adapter), "--save-path", "out"],
        "plan": ["--data", str(data)],
    }
    command = [*ALLHANDS, verb, "--model", str(model), *words[verb]]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        if verb == "fuse":  # seen by its files: a fast computer has fused after a second
            until(lambda: any(tmp_path.glob(".out.partial-*")), 60, "nothing was begun")
        else:
            _wait_until_at_work(psutil.Process(process.pid))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    # Python itself ends by the signal if that came while it ran a text as code, as dataclasses do.
    assert process.returncode in (130, -signal.SIGINT), err
    assert "Traceback" not in err
    assert "step" not in "".join(err.splitlines()[-1:])  # nothing, if Python itself ended
    assert err.rstrip().endswith(("result", "complete", "written", "kept")), err
    assert not (tmp_path / "out").exists()


def _wait_until_at_work(process: psutil.Process) -> None:
    """Wait until the process has had so much of the processor as starting takes, or waits for its
    input.
    """
    seen, since = 0.0, time.monotonic()

    def at_work() -> bool:
        nonlocal seen, since
        if (now := sum(process.cpu_times()[:2])) != seen:
            seen, since = now, time.monotonic()
        return now > 0.8 or (now > 0.3 and time.monotonic() - since > 3.0)

    until(at_work, 60, "it is not at work")
    time.sleep(0.7)
