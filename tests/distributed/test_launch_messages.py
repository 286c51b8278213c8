"""``allhands launch`` with real processes: what a person is told at the start, at a stop and
afterwards.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import run_allhands

from allhands.checkpoints import checkpoints_in
from allhands.cli.launch import _job
from allhands.cli.verbs_training import Launch
from allhands.cluster.programs import tell_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "supervised_training.py"
Err = Callable[[], str]
LOST = "allhands: ended at once; what was not saved is lost\n"


@pytest.fixture(autouse=True)
def no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALLHANDS_CHECKPOINT_DIR", raising=False)


# --- a directory for checkpoints ------------------------------------------------------------------


def test_without_a_directory_checkpoints_go_beside_the_logs(tmp_path: Path) -> None:
    def run(steps: int) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, EXAMPLE, "--steps", str(steps)]
        return run_allhands("launch", "--log-dir", "my logs", "--", *program, cwd=tmp_path)

    first = run(20)
    assert (first.returncode, first.stderr) == (0, "")
    assert [path.name for path in checkpoints_in(tmp_path / "my logs")] == ["step-0000020"]
    second = run(40)
    assert second.returncode == 0
    assert second.stdout.splitlines()[0].startswith("step 40: loss "), "it went on from step 20"
    note, hint = second.stderr.splitlines()
    assert note == (
        f"allhands: note: {tmp_path / 'my logs'} has a checkpoint of step 20, "
        "and a program that reads the last checkpoint goes on from it"
    )
    assert hint == "  to begin anew: --checkpoints with another directory"
    assert (tmp_path / "my logs" / "earlier-1" / "rank-0.log").exists()


def test_without_a_launcher_there_is_a_message_and_no_traceback(tmp_path: Path) -> None:
    program = "import allhands\nallhands.last_checkpoint()\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == (
        "allhands: error: ALLHANDS_CHECKPOINT_DIR: there is no directory for checkpoints\n"
        "  what to do: start the program with allhands launch, set ALLHANDS_CHECKPOINT_DIR, or give directory=...\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_example_runs_alone_and_goes_on(tmp_path: Path) -> None:
    def losses(steps: int) -> list[str]:
        command = [sys.executable, EXAMPLE, "--steps", str(steps), "--out", "mine"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        return [line for line in done.stdout.splitlines() if line.startswith("step ")]

    first, rest = losses(40), losses(80)
    assert [line.split(":")[0] for line in (*first, *rest)] == [
        f"step {step}" for step in range(20, 81, 20)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    (tmp_path / "mine").rename(tmp_path / "earlier")
    assert losses(80) == first + rest


def test_whose_directory_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs, named, chosen = (tmp_path / name for name in ("logs", "named", "chosen"))

    def directory(**options: Path) -> Path | None:
        job = _job(Launch(log_dir=logs, **options))
        assert job.env == {"ALLHANDS_CHECKPOINT_DIR": str(job.checkpoints)}
        return job.checkpoints

    assert directory() == logs
    monkeypatch.setenv("ALLHANDS_CHECKPOINT_DIR", str(named))
    assert directory() == named
    assert directory(checkpoints=chosen) == chosen


# --- stops ----------------------------------------------------------------------------------------

_PROGRAM = """
import time
import allhands
import mlx.core as mx
for step in range(1, 2000):
    if step == 5 and {saves}:
        allhands.save_checkpoint(5, [mx.array(1)])
    if allhands.progress(step, together=False):
        time.sleep({saving})
        break
    if step == 6:
        open("at work", "w").close()
    time.sleep(0.02)
"""


def stopped(
    place: Path, *numbers: int, saves: bool = True, saving: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """The program, signalled while it trains; ``saving`` seconds pass until it ends after the first
    signal.
    """
    (place / "program.py").write_text(_PROGRAM.format(saves=saves, saving=saving))
    command = [
        sys.executable,
        "-m",
        "allhands",
        "launch",
        "--stop-grace-s",
        "30",
        "--",
        sys.executable,
        "program.py",
    ]
    with subprocess.Popen(
        command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not (place / "at work").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.3)
        out, err = process.communicate(timeout=40)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize("saves", [True, False])
def test_a_second_ctrl_c_says_what_is_left(tmp_path: Path, saves: bool) -> None:
    done = stopped(tmp_path, signal.SIGINT, signal.SIGINT, saves=saves)
    assert done.returncode == 130
    assert done.stderr == LOST + ("  to go on from step 5: the same command\n" if saves else "")


def test_a_stop_that_is_heeded(tmp_path: Path) -> None:
    done = stopped(tmp_path, signal.SIGTERM, saving=0.0)
    assert (done.returncode, done.stderr) == (
        143,
        "allhands: stopped\n  to go on from step 5: the same command\n",
    )


# --- what cannot work -----------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
def test_a_host_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\nno-such-name.invalid\n")
    began = time.monotonic()
    options = ["--hostfile", "hosts", "-n", "9"]
    env = {"ALLHANDS_SSH": "ssh -F /dev/null"}
    done = run_allhands(
        "launch", *options, "--", sys.executable, "-c", "pass", cwd=tmp_path, env=env
    )
    assert time.monotonic() - began < 20, "it has waited for the name"
    assert done.returncode == 7
    slots, problem, hint = done.stderr.splitlines()
    assert (
        slots == "allhands: hosts has 3 slots: 3 ranks now, up to 9 when computers are added to it"
    )
    assert problem.startswith(
        "allhands: error: not started: 2 of at least 3 ranks are there, no-such-name.invalid does not answer "
        "(ssh: Could not resolve hostname no-such-name.invalid: "
    )
    assert hint == "  what to do: correct the name, or give its address in ~/.ssh/config"


@pytest.fixture
def err(capsys: pytest.CaptureFixture[str]) -> Err:
    return lambda: capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo mlx allhands", "has no mlx and no allhands\n"),
        ("echo allhands", "has no allhands\n"),
        ("echo", None),
        ("echo mlx; exit 1", None),
    ],
)
def test_another_python_without_allhands_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, err: Err, script: str, words: str | None
) -> None:
    other = tmp_path / "python"
    other.write_text(f"#!/bin/sh\n{script}\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    tell_python(["python", "x.py"])
    remedy = f"  what to do: if the program needs them, write {sys.executable} in place of python\n"
    note = f"allhands: note: python is {other}, which comes first on PATH and {words}"
    assert err() == (note + remedy if words else "")
    for command in ([str(other), "x.py"], ["sh", "x"], [sys.executable, "x.py"]):
        tell_python(command)
    assert err() == ""


def test_a_real_python_without_allhands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    env = {"PATH": f"{tmp_path / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    (tmp_path / "x.py").write_text("import sys; print(sys.prefix)")
    done = run_allhands("launch", "--", "python", "x.py", cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'env'}\n"), (
        "it is the one that comes first"
    )
    note = f"python is {tmp_path / 'env/bin/python'}, which comes first on PATH and has no mlx and no allhands\n"
    assert done.stderr.startswith(f"allhands: note: {note}")
    assert sys.executable in done.stderr
