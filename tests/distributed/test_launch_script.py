"""``allhands launch`` with real processes: a person's own program is started, watched, and started
again.

The program is the one in examples/, with one line more where a test breaks something; what it ends
with is compared byte by byte with what it ends with undisturbed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny import run_allhands

from allhands.checkpoints import Checkpoint, checkpoints_in, open_checkpoint
from allhands.checkpoints.settings import FIXED, TOLD
from allhands.cli.launch import _job
from allhands.cli.main import main
from allhands.cli.verbs_training import Launch
from allhands.cluster.programs import resolved
from allhands.errors import ConfigError
from allhands.observe.journal import read_events

EXAMPLE = Path(__file__).parents[2] / "examples" / "supervised_training.py"
PLACE = "    stop = allhands.progress(step)\n"
# Faults are data, {"rank": 1, "step": 25, "signal": 9}; each fires once, in whatever attempt comes
# to it first.
INJECTED = """
    import json as _json, os as _os, pathlib as _pathlib, time as _time
    for _file in sorted(_pathlib.Path("faults").glob("*.json")):
        _fault = _json.loads(_file.read_text())
        if (group.rank(), step) == (_fault["rank"], _fault["step"]):
            _file.rename(_file.with_suffix(".fired"))
            _os.kill(_os.getpid(), _fault["signal"])
    if _pathlib.Path("slowly").exists():
        _time.sleep(0.05)
"""
STEPS = 40


class Place:
    """A directory in which the example is run, with the faults that are to happen there."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        text = EXAMPLE.read_text(encoding="utf-8")
        assert text.count(PLACE) == 1
        self.directory = directory
        (directory / "program.py").write_text(text.replace(PLACE, INJECTED + PLACE))
        (directory / "faults").mkdir()

    def inject(self, **fault: int) -> None:
        (self.directory / "faults" / f"{fault['step']}.json").write_text(json.dumps(fault))

    def command(self, *options: str) -> list[str]:
        program = [sys.executable, "program.py", "--steps", str(STEPS), "--save-every", "10"]
        chosen = ["-n", "2", "--backend", "ring", "--checkpoints", "kept", *options]
        return ["launch", *chosen, "--", *program]

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        return run_allhands(*self.command(*options), cwd=self.directory, timeout=90)

    def fired(self) -> list[str]:
        return [path.stem for path in sorted((self.directory / "faults").glob("*.fired"))]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.directory / "logs") if event["kind"] in kinds]

    def latest(self) -> Checkpoint:
        return open_checkpoint(checkpoints_in(self.directory / "kept")[0])

    def left(self) -> list[list[str]]:
        """Processes that still work in the directory."""
        found: list[list[str]] = []
        for process in psutil.process_iter(["cmdline", "status"]):
            try:
                here = Path(process.cwd()).is_relative_to(self.directory)
            except (psutil.Error, OSError):
                continue
            if here and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.info["cmdline"])
        return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "here")
    yield made
    assert made.left() == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The last checkpoint of a run to which nothing happened."""
    place = Place(tmp_path_factory.mktemp("launch") / "undisturbed")
    done = place.run()
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"step {STEPS}: loss " in done.stdout
    assert [event["kind"] for event in place.events("launched", "fault", "finished")] == [
        "launched",
        "finished",
    ]
    assert [path.name for path in checkpoints_in(place.directory / "kept")] == [
        "step-0000040",
        "step-0000030",
    ]
    return place.latest()


def weights(checkpoint: Checkpoint) -> str:
    """SHA-256 of the arrays: model and optimizer."""
    assert checkpoint.step == STEPS
    return checkpoint.files["arrays.safetensors"].sha256


def test_it_goes_on_after_kills_to_the_same_numbers(place: Place, undisturbed: Checkpoint) -> None:
    place.inject(rank=1, step=17, signal=signal.SIGKILL)
    place.inject(rank=0, step=33, signal=signal.SIGKILL)
    done = place.run()
    assert done.returncode == 0, done.stderr
    assert place.fired() == ["17", "33"]
    assert weights(place.latest()) == weights(undisturbed)
    faults = place.events("fault")
    assert [(event["rank"], event["exit_code"]) for event in faults] == [(1, 137), (0, 137)]
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert [event["step"] for event in place.events("restarting")] == [10, 30]
    assert "starting again with 2 ranks from step 10" in done.stderr
    assert "Traceback" not in done.stderr.replace("connection to a peer was lost", "")


def test_a_stopped_rank_is_noticed(place: Place, undisturbed: Checkpoint) -> None:
    place.inject(rank=1, step=25, signal=signal.SIGSTOP)
    done = place.run("--hang-timeout-s", "2")
    assert done.returncode == 0, done.stderr
    assert place.fired() == ["25"]
    assert weights(place.latest()) == weights(undisturbed)
    (fault,) = place.events("fault")
    assert fault["rank"] == 1
    assert 2 <= fault["detected_s"] < 8


def test_what_keeps_failing_is_given_up(place: Place) -> None:
    for step in (11, 12):
        place.inject(rank=0, step=step, signal=signal.SIGKILL)
    done = place.run("--max-restarts", "1")
    assert done.returncode == 137
    assert place.fired() == ["11", "12"]
    assert "allhands: error: rank 0 was killed by SIGKILL" in done.stderr
    assert place.latest().step == 10
    assert len(place.events("launched")) == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_saves_and_the_same_command_goes_on(
    place: Place, undisturbed: Checkpoint, number: int, code: int
) -> None:
    (place.directory / "slowly").touch()
    command = [sys.executable, "-m", "allhands", *place.command()]
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=place.directory,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        _until(lambda: bool(place.events("started")))
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    stopped = place.latest()
    assert 0 < stopped.step < STEPS
    assert stopped.step % 10, "it was saved because of the stop"
    (place.directory / "slowly").unlink()
    done = place.run()
    assert done.returncode == 0, done.stderr
    assert weights(place.latest()) == weights(undisturbed)


def _until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_a_program_without_the_api(tmp_path: Path) -> None:
    """No marks, no beats: only its ends are seen, and its arguments and environment are its own."""
    (tmp_path / "plain.py").write_text(
        "import os, sys\n"
        "import mlx.core as mx\n"
        "group = mx.distributed.init(strict=True)\n"
        "total = mx.distributed.all_sum(mx.array(group.rank() + 1))\n"
        "print(group.size(), total.item(), sys.argv[1:], 'allhands' in sys.modules, os.getcwd(), flush=True)\n"
    )
    options = ["-n", "2", "--backend", "ring", "--log-dir", "the logs"]
    program = [
        sys.executable,
        "plain.py",
        "-n",
        "7",
        "--log-dir",
        "x y",
        "--resume",
        "--",
        "--help",
    ]
    line = f"2 3 {program[2:]} False {tmp_path}\n"
    for separator in (["--"], []):
        done = run_allhands("launch", *options, *separator, *program, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines(keepends=True)) == [
            f"[rank {rank}] {line}" for rank in range(2)
        ]
        assert (tmp_path / "the logs" / "rank-1.log").read_text() == line


def test_a_program_that_always_fails(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import os, sys, time\n"
        "open(f'began-{os.environ[\"ALLHANDS_ATTEMPT\"]}-{os.environ[\"ALLHANDS_RANK\"]}', 'w')\n"
        "time.sleep(0 if os.environ['ALLHANDS_RANK'] == '1' else 20)\n"
        "sys.exit('no good')\n"
    )
    done = run_allhands(
        "launch", "-n", "2", "--backend", "ring", "--", sys.executable, "bad.py", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "rank 1 exited with code 1" in done.stderr
    # On the screen once, when it was said.
    assert "[rank 1] no good" in done.stdout.splitlines()
    assert "no good" not in done.stderr
    assert sorted(path.name for path in tmp_path.glob("began-*-1")) == ["began-1-1", "began-2-1"]
    assert "not started again: it has failed before the first step" in done.stderr


def test_a_stop_reaches_a_program_without_the_api(tmp_path: Path) -> None:
    """It gets the signal itself, and the time to act on it: no more than that is known of it."""
    (tmp_path / "patient.py").write_text(
        "import os, pathlib, time\n"
        "rank = os.environ['ALLHANDS_RANK']\n"
        "try:\n"
        "    pathlib.Path(f'began-{rank}').touch()\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(4)\n"
        "    pathlib.Path(f'saved-{rank}').touch()\n"
        "    raise SystemExit(130)\n"
    )
    command = [sys.executable, "-m", "allhands", "launch", "-n", "2", "--backend", "ring", "--"]
    with subprocess.Popen(
        [*command, sys.executable, "patient.py"], cwd=tmp_path, stderr=subprocess.PIPE
    ) as process:
        _until(lambda: len(list(tmp_path.glob("began-*"))) == 2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_one_rank_is_kept_going_too(tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text(
        "import os, pathlib, signal\n"
        "if not pathlib.Path('was here').exists():\n"
        "    pathlib.Path('was here').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "import mlx.core as mx\n"
        "print(mx.distributed.init().size())\n"
    )
    done = run_allhands("launch", "--", sys.executable, "once.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
    assert "was killed by SIGKILL" in done.stderr


# --- what is asked for ----------------------------------------------------------------------------

WRONG: dict[str, tuple[list[str], str]] = {
    "no command": ([], "there is no command to start"),
    "no program": (["-n", "2", "--", "no-such-program", "x"], "'no-such-program' is not a program"),
    "no script": (
        ["--", "python", "no-such-script.py"],
        "no-such-script.py: there is no such script",
    ),
    "a script alone": (["--", "script.py"], "python script.py"),
    "not executable": (["--", "./notes"], "chmod +x ./notes"),
    "back-end": (["--backend", "smoke", "--", "true"], "--backend: 'smoke' is not one of"),
    "time": (["--hang-timeout-s", "0", "--", "true"], "--hang-timeout-s: 0 is not a time to wait"),
    "not a number": (
        ["--stop-grace-s", "nan", "--", "true"],
        "--stop-grace-s: nan is not a time to wait",
    ),
    "ranks": (
        ["-n", "2", "--min-ranks", "3", "--", "true"],
        "--min-ranks: at least 3 ranks are asked for",
    ),
    "cores": (
        ["-n", "2", "--cores-per-rank", "4000", "--", "true"],
        "2 ranks with 4,000 cores each",
    ),
    "hostfile": (["--hostfile", "no-file", "--", "true"], "no-file: the hostfile cannot be read"),
    "MPI on hosts": (
        ["--hostfile", "hosts", "--backend", "mpi", "--", "true"],
        "mpi cannot be started on",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_message(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = WRONG[case]
    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    Path("notes").touch()
    Path("hosts").write_text("node1 slots=2\n")
    with pytest.raises(SystemExit) as caught:
        main(["launch", *arguments])
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("allhands: error: ")
    assert words in errors
    assert "what to do: " in errors
    assert not Path("logs").exists()


def test_inside_of_another_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"RANK": "2", "SIZE": "4", "LOCAL_RANK": "2", "LOCAL_SIZE": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(SystemExit) as caught:
        main(["launch", "--", "true"])
    assert caught.value.code == 2
    assert "openmpi has started 4 processes already" in capsys.readouterr().err


def test_python_is_this_python_unless_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resolved(["python", "x.py", "python"]) == [sys.executable, "x.py", "python"]
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert resolved(["python3", "-m", "no_module"]) == [sys.executable, "-m", "no_module"]
    other = tmp_path / "bin" / "python"
    other.parent.mkdir()
    # A link to the very same program: another environment all the same.
    other.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{other.parent}{os.pathsep}{Path(sys.executable).parent}")
    assert resolved(["python", "x.py"]) == ["python", "x.py"]
    with pytest.raises(ConfigError):
        resolved(["nothing", "y.py"])
    assert resolved(["nothing", "y.py"], anywhere=True) == ["nothing", "y.py"]


def test_only_who_promises_to_report_progress_has_a_deadline_for_it() -> None:
    assert _job(Launch()).start_deadline_s == float("inf")
    assert _job(Launch(start_timeout_s=7)).start_deadline_s == 7
    assert _job(Launch(checkpoints=Path("x"))).env == {
        "ALLHANDS_CHECKPOINT_DIR": str(Path("x").resolve())
    }


# --- the page -------------------------------------------------------------------------------------


def test_alone_the_example_keeps_what_it_writes_in_its_own_directory(tmp_path: Path) -> None:
    def run(steps: int, out: str) -> list[str]:
        words = [sys.executable, str(EXAMPLE), "--steps", str(steps), "--out", out]
        environment = {
            name: value for name, value in os.environ.items() if name != "ALLHANDS_CHECKPOINT_DIR"
        }
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    whole = run(40, "whole")
    assert [line.partition(":")[0] for line in whole] == ["step 20", "step 40"]
    assert [run(20, "parts"), run(40, "parts")] == [whole[:1], whole[1:]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "whole"]


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert f"```python\n{EXAMPLE.read_text(encoding='utf-8')}```\n" in page


def test_the_page_names_the_keys_that_a_resumed_run_may_not_change() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "reliability.md").read_text(encoding="utf-8")
    first_cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    rows = [set(re.findall(r"`(\w+)`", cell)) for cell in first_cells]
    for keys in (FIXED, TOLD):
        assert keys in rows
