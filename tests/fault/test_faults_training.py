"""Training that is interrupted, killed, starved or poisoned: its code, its message, its processes,
what it keeps.
"""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest
from command_line import changed
from faulty import fill
from hostile import Job, history, run, until
from tiny import write_chat_data

from allhands.checkpoints import checkpoints_in, latest
from allhands.cluster.mpi import find_mpi
from allhands.report import read_facts

_needs_mpi = pytest.mark.skipif(find_mpi() is None, reason="there is no Open MPI")
BACKENDS = ["ring", pytest.param("mpi", marks=_needs_mpi)]
# Where the back-end makes little difference, and other tests here have both.
MOSTLY_RING = ["ring", pytest.param("mpi", marks=[_needs_mpi, pytest.mark.long])]
FOR_EVER = 1_000_000
# For a rank that Python starts but that comes to nothing; the guard and mpirun itself are spared.
_SITE = """
import os, signal, sys, time
rank = os.environ.get("ALLHANDS_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
if rank == "1" and sys.flags.isolated == 0:
    fault = os.environ["TEST_FAULT"]
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(100)
    if fault == "elsewhere":
        os.chdir("/")
"""


class Runs:
    """Starts trainings on the tiny model and ends what a failed test leaves."""

    def __init__(self, model: Path, data: Path, directory: Path) -> None:
        self.fixed: list[str | Path] = [
            "train",
            "--train",
            "--model",
            model,
            "--steps-per-report",
            "2",
        ]
        self.data, self.directory = data, directory
        self.jobs: list[Job] = []

    def arguments(
        self, *more: str | Path, iters: int = FOR_EVER, out: Path | None = None
    ) -> list[str | Path]:
        out = out or self.directory / "out"
        fixed = [*self.fixed, "--data", self.data, "--iters", str(iters), "--adapter-path", out]
        return changed(fixed, more)

    def start(
        self, *more: str | Path, iters: int = FOR_EVER, out: Path | None = None, **options: Any
    ) -> Job:
        self.jobs.append(Job(*self.arguments(*more, iters=iters, out=out), **options))
        return self.jobs[-1]


@pytest.fixture
def runs(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> Iterator[Runs]:
    found = Runs(tiny_model, tiny_data, tmp_path)
    yield found
    for job in found.jobs:
        job.kill()


def weights(file: Path) -> dict[str, mx.array]:
    """Trained weights, with a check that there are some and that none is NaN."""
    loaded = mx.load(str(file))
    assert isinstance(loaded, dict)
    assert loaded
    assert all(mx.isfinite(value).all().item() for value in loaded.values())
    return loaded


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(
        mx.array_equal(first[name], second[name]).item() for name in first
    )


# --- asked to stop --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "number"),
    [
        ([], signal.SIGINT),
        ([], signal.SIGTERM),
        pytest.param(["-n", "2", "--backend", "ring"], signal.SIGINT, marks=pytest.mark.long),
        pytest.param(["-n", "2", "--backend", "mpi"], signal.SIGTERM, marks=_needs_mpi),
    ],
)
def test_a_stopped_run_keeps_what_it_trained(
    runs: Runs, tmp_path: Path, more: list[str], number: int
) -> None:
    job, out = runs.start(*more), tmp_path / "out"
    job.wait_for("train", out)
    job.signal(number)
    assert job.finish() == 128 + number, job.err
    told = history(out)
    assert told.ended is not None
    assert told.ended.reason == "interrupted"
    step = told.ended.step
    assert job.err.count(f"stopped after step {step} of {FOR_EVER}") == 1
    assert f"the weights are saved in {out / 'adapters.safetensors'}" in job.err
    assert "to go on exactly from there: the same command with --resume\n" in job.err
    assert "error" not in job.err
    assert "starting again" not in job.out + job.err
    assert (out / "loss.png").stat().st_size > 1000
    assert same(out / "adapters.safetensors", out / f"{step:07d}_adapters.safetensors")
    newest = latest(out)
    assert newest is not None
    assert newest.step == step
    assert same(out / "adapters.safetensors", newest.path / "adapters.safetensors")
    if number == signal.SIGINT and not more:
        # The same weights as of a run that was meant to be so long.
        run(*runs.arguments(iters=step, out=tmp_path / "short"))
        assert same(out / "adapters.safetensors", tmp_path / "short/adapters.safetensors")


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_long_step_at_once(runs: Runs, tmp_path: Path) -> None:
    data = write_chat_data(tmp_path / "much", train=4000, longest=200)
    job = runs.start("--data", data, "--batch-size", "4000", "--val-batches", "0")
    job.wait_for("started", tmp_path / "out")
    job.signal(signal.SIGINT)
    assert job.process.poll() is None
    began = time.monotonic()
    job.signal(signal.SIGINT, pause_s=0)
    assert job.finish() == 130
    assert time.monotonic() - began < 2
    assert "stopping after this step" in job.out
    assert "press Ctrl-C again" in job.out
    assert "what was not saved is lost" in job.err
    assert read_facts(tmp_path / "out").status == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("delay_s", [0.2, 1.0])
def test_ctrl_c_while_starting(runs: Runs, tmp_path: Path, backend: str, delay_s: float) -> None:
    job = runs.start("-n", "2", "--backend", backend)
    until(
        lambda: _busy_s(job) > 0.2, 20.0, "it is not there"
    )  # of the processor, which others may have meanwhile
    time.sleep(delay_s - 0.2)
    job.signal(signal.SIGINT)
    # Before Python has set up anything, the signal itself ends it.
    assert job.finish() in (130, -signal.SIGINT), job.err


def _busy_s(job: Any) -> float:
    times = psutil.Process(job.process.pid).cpu_times()
    return times.user + times.system


@pytest.mark.slow
@pytest.mark.parametrize("backend", MOSTLY_RING)
def test_a_frozen_rank_and_two_ctrl_c(runs: Runs, tmp_path: Path, backend: str) -> None:
    job = runs.start("-n", "2", "--backend", backend)
    job.wait_for("train", tmp_path / "out")
    job.rank(1).send_signal(signal.SIGSTOP)
    job.signal(signal.SIGINT, signal.SIGINT)
    assert job.finish(20) == 130
    assert job.err.count("ended at once; what was not saved is lost") == 1
    assert history(tmp_path / "out").train
    assert read_facts(tmp_path / "out").status == "interrupted"


@pytest.mark.slow
@_needs_mpi
def test_usr1_to_a_plain_mpirun_keeps_the_adapter(runs: Runs, tmp_path: Path) -> None:
    """Which it passes on; after a SIGINT it kills ranks a quarter of a second later, whatever they
    do.
    """
    job, out = runs.start(prefix=_mpirun(2)), tmp_path / "out"
    job.wait_for("train", out)
    job.signal(signal.SIGUSR1)
    assert job.finish() == 143
    told = history(out)
    assert told.ended is not None
    assert told.ended.reason == "interrupted"
    assert same(out / "adapters.safetensors", out / f"{told.ended.step:07d}_adapters.safetensors")


@_needs_mpi
def test_plain_lines_under_mpirun(runs: Runs) -> None:
    """Open MPI gives rank 0 a terminal of its own: no reason to draw a progress board into a pipe."""
    job = run(*runs.arguments(iters=4), prefix=_mpirun(1))
    assert "step 4/4  loss" in job.out
    assert "peak memory per rank" not in job.out


def _mpirun(ranks: int) -> list[str]:
    found = find_mpi()
    assert found is not None
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [str(found.mpirun), *root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]


# --- killed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", MOSTLY_RING)
def test_a_killed_rank_ends_the_run_and_the_last_save_stays(
    runs: Runs, tmp_path: Path, backend: str
) -> None:
    more = ["-n", "2", "--backend", backend, "--save-every", "4", "--max-restarts", "0"]
    job, out = runs.start(*more), tmp_path / "out"
    job.wait_for("saved", out, count=2)
    job.rank(1).send_signal(signal.SIGKILL)
    message = job.fails(137, "rank 1 was killed by SIGKILL", "if memory was short", "--resume")
    assert str(out / "logs/rank-1.log") in message
    assert "press Ctrl-C" not in job.out
    assert "starting again" not in job.out + job.err
    last = max(out.glob("*_adapters.safetensors"))
    latest = int(last.name[:7])
    # The kill may have fallen between the two files of a save.
    assert any(
        same(out / "adapters.safetensors", out / f"{n:07d}_adapters.safetensors")
        for n in (latest, latest - 4)
    )
    assert json.loads((out / "adapter_config.json").read_text())["num_layers"] == 3
    assert {report.step for report in history(out).saved} >= {4, 8}


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_several_ranks_go_on_by_themselves(runs: Runs, tmp_path: Path, backend: str) -> None:
    job, out = runs.start("-n", "2", "--backend", backend, "--save-every", "4"), tmp_path / "out"
    job.wait_for("saved", out, count=2)
    job.rank(1).send_signal(signal.SIGKILL)
    job.wait_for("started", out, count=2)
    job.wait_for("saved", out, count=len(history(out).saved) + 1)
    job.signal(signal.SIGINT)
    assert job.finish() == 130, job.err
    text = job.out + job.err
    assert text.count("allhands: rank 1 was killed by SIGKILL") == 1
    assert text.count("starting again with 2 ranks") == 1
    assert "allhands: error: " not in text
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    begun = [record["step"] for record in records if record["event"] == "started"]
    assert begun[0] == 0
    assert begun[1] >= 4
    assert begun[1] % 4 == 0
    told = history(out)
    assert told.ended is not None
    assert same(out / "adapters.safetensors", out / f"{told.ended.step:07d}_adapters.safetensors")


@pytest.mark.parametrize("backend", MOSTLY_RING)
def test_a_killed_launcher_leaves_no_process(runs: Runs, tmp_path: Path, backend: str) -> None:
    job = runs.start("-n", "2", "--backend", backend)
    job.wait_for("train", tmp_path / "out")
    assert len(job.processes()) >= 3
    job.signal(signal.SIGKILL, pause_s=0)
    assert job.finish() == -signal.SIGKILL
    assert history(tmp_path / "out").train


@pytest.mark.parametrize(
    ("fault", "backend", "code", "words"),
    [
        ("kill", "ring", 137, ["rank 1 was killed by SIGKILL"]),
        ("elsewhere", "ring", 3, ["data: the data folder does not exist"]),
        pytest.param(
            "hang",
            "mpi",
            7,
            ["rank 1 did not finish starting within 10 s", "rank-1.log"],
            marks=[_needs_mpi, pytest.mark.long],
        ),
    ],
)
def test_a_rank_that_cannot_start(
    runs: Runs, tmp_path: Path, fault: str, backend: str, code: int, words: list[str]
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(_SITE)
    shutil.copytree(runs.data, tmp_path / "data")
    env = {"PYTHONPATH": str(tmp_path / "site"), "TEST_FAULT": fault}
    more = [
        "-n",
        "2",
        "--backend",
        backend,
        "--data",
        "data",
        "--start-timeout-s",
        "10" if fault == "hang" else "60",
    ]
    # Wrong input is no reason to start again.
    more += [] if fault == "elsewhere" else ["--max-restarts", "0"]
    job = runs.start(*more, env=env, cwd=tmp_path)
    job.fails(code, *words)
    assert "starting again" not in job.out + job.err
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.slow
def test_a_rank_that_can_never_start_is_not_tried_for_ever(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(_SITE)
    env = {"PYTHONPATH": str(tmp_path / "site"), "TEST_FAULT": "kill"}
    job = runs.start("-n", "2", "--backend", "ring", "--max-restarts", "100", env=env)
    assert job.finish() == 137
    text = job.out + job.err
    assert text.count("starting again with 2 ranks") == 2
    assert text.count("allhands: error: rank 1 was killed by SIGKILL") == 1
    assert "not started again: a process was killed before the first step, 3 times in a row" in text
    logs = {path.name for path in (tmp_path / "out/logs").glob("rank-1*")}
    assert logs == {"rank-1.attempt-1.log", "rank-1.attempt-2.log", "rank-1.log"}
    assert not list((tmp_path / "out").glob("*.safetensors"))


@_needs_mpi
@pytest.mark.parametrize("fault", ["--data nowhere", "--batch-size 0"])
def test_under_mpirun_one_rank_speaks(runs: Runs, fault: str) -> None:
    job = runs.start(*fault.split(), prefix=_mpirun(2))
    job.fails(2 if "batch" in fault else 3, fault.split()[1])


def test_a_taken_port_is_said(runs: Runs, tmp_path: Path) -> None:
    """As under ``mlx.launch`` with a host file of one's own."""
    with socket.socket() as taken, socket.socket() as free:
        for one in (taken, free):
            one.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [one.getsockname()[1] for one in (taken, free)]
        (tmp_path / "hosts.json").write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
        env = {"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "hosts.json")}
        runs.start(env=env).fails(7, "rank 0", "ring", "bind", "ports")


# --- starved and poisoned -------------------------------------------------------------------------


@pytest.mark.parametrize("iters", [4, 6])
def test_a_save_that_fails_leaves_the_one_before(runs: Runs, tmp_path: Path, iters: int) -> None:
    """The last one is an error; after any other the run goes on."""
    out = tmp_path / "out"
    blocked = out / "0000004_adapters.safetensors"
    blocked.mkdir(parents=True)
    job = runs.start("--save-every", "2", iters=iters)
    told = f"the checkpoint is there, but not its adapter ({blocked}: cannot be written"
    if iters == 4:
        job.fails(5, "0000004_adapters.safetensors", "cannot be written")
        assert "training goes on" not in job.out
    else:
        assert job.finish() == 0, job.err
        assert job.out.count(told) == 1
    run_of = history(out)
    saved = [report.step for report in run_of.saved if Path(report.path).parent == out]
    assert saved == [2, 6][: iters // 2 - 1]
    assert run_of.ended is not None
    assert (run_of.ended.reason, run_of.ended.step) == (
        "failed" if iters == 4 else "finished",
        iters,
    )
    assert same(out / "adapters.safetensors", out / f"{saved[-1]:07d}_adapters.safetensors")
    assert list(out.glob(".draft-*")) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB: room for one checkpoint and its adapters."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=440k", "tmpfs", str(place)]
    if (
        not sys.platform.startswith("linux")
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting a small file system needs Linux and root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.long
def test_a_disk_that_stays_full_is_an_error_at_the_end(
    runs: Runs, small_disk: Path, tmp_path: Path
) -> None:
    out, roomy = small_disk / "out", tmp_path / "roomy"
    job = runs.start("-n", "2", "--save-every", "2", iters=8, out=out)
    job.fails(
        5,
        "checkpoints/step-0000008",
        "No space left",
        "disk is full",
        str(out / "adapters.safetensors"),
    )
    text = job.out + job.err
    for step in (4, 6):
        assert (
            text.count(
                f"no checkpoint was written ({out}/checkpoints/step-{step:07d}: cannot be written: No"
            )
            == 1
        )
    assert "not started again: the storage would be the same after a restart" in text
    assert "starting again" not in text
    assert [path.name for path in checkpoints_in(out)] == ["step-0000002"]
    # What a checkpoint takes does not fit, but the adapter does.
    run(*runs.arguments("-n", "2", iters=8, out=roomy))
    assert same(out / "adapters.safetensors", roomy / "adapters.safetensors")
    assert [report.step for report in history(out).saved] == [2]
    # Once there is room, the run goes on from what was saved.
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    run(*runs.arguments("--resume", iters=3, out=out))
    assert [report.step for report in history(out).train] == [2, 3]
    newest = latest(out)
    assert newest is not None
    assert newest.step == 3


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_stopped_while_not_a_byte_can_be_written(
    runs: Runs, small_disk: Path, backend: str
) -> None:
    """Neither the logs nor the file that says why a rank has ended have room beside the adapter."""
    out = small_disk / "out"
    job = runs.start("-n", "2", "--backend", backend, "--save-every", "2", out=out)
    job.wait_for("saved", out)
    job.wait_for("warned", out)
    fill(small_disk)
    time.sleep(0.3)
    job.signal(signal.SIGINT)
    message = job.fails(
        5, str(out / "checkpoints"), "No space left", "the run was stopped after step", "not saved"
    )
    assert "the same command with --resume" in message
    assert [path.name for path in checkpoints_in(out)] == ["step-0000002"]
    assert list((out / "logs").glob("**/.*")) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="ulimit is a shell's")
def test_a_file_above_the_limit_of_the_shell(runs: Runs, tmp_path: Path) -> None:
    prefix = ["/bin/bash", "-c", 'ulimit -f 40; exec "$0" "$@"']
    job = runs.start("--save-every", "2", iters=4, prefix=prefix)
    job.fails(5, "checkpoints/step-0000004", "cannot be written: File too large", "ulimit -f")
    assert (
        job.out.count(
            "checkpoints/step-0000002: cannot be written: File too large); training goes on"
        )
        == 1
    )
    assert checkpoints_in(tmp_path / "out") == []
    assert [report.step for report in history(tmp_path / "out").train] == [2, 4]


@pytest.mark.long
def test_diverging_runs_spare_the_good_adapter(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(*runs.arguments(iters=2))
    before = (out / "adapters.safetensors").read_bytes()
    for more in ([], ["-n", "2"]):
        message = runs.start("--learning-rate", "1e30", *more).fails(
            6, "nan", "after step 1 of", "--learning-rate"
        )
        assert "0000001_adapters.safetensors" in message
    assert (out / "adapters.safetensors").read_bytes() == before
    assert (
        max(
            mx.abs(value).max().item()
            for value in weights(out / "0000001_adapters.safetensors").values()
        )
        > 1e20
    )
    told = history(out)
    assert told.ended is not None
    assert (told.ended.reason, told.ended.step) == ("failed", 1)


def test_a_save_that_fails_does_not_hide_nan(runs: Runs, tmp_path: Path) -> None:
    blocked = tmp_path / "out/0000001_adapters.safetensors"
    blocked.mkdir(parents=True)
    job = runs.start("--learning-rate", "1e30")
    job.fails(
        6,
        "nan",
        "after step 1 of",
        "--learning-rate",
        f"could not be kept ({blocked}: cannot be written",
    )
    assert list((tmp_path / "out").glob("*.safetensors")) == [blocked]


def test_two_runs_do_not_share_a_directory(runs: Runs, tmp_path: Path) -> None:
    first, out = runs.start(), tmp_path / "out"
    first.wait_for("train", out)
    runs.start().fails(5, str(out), "another run", "--adapter-path")
    runs.start("-n", "2").fails(5, str(out), "another run")
    first.signal(signal.SIGINT)
    assert first.finish() == 130
    told = history(out)
    assert told.ended is not None
    # The same run all the time: it did not start anew, and no other file of metrics was begun.
    assert [file.name for file in out.glob("metrics*")] == ["metrics.jsonl"]


# --- what a person sees ---------------------------------------------------------------------------


def test_ctrl_c_in_a_terminal_leaves_it_sane(runs: Runs) -> None:
    master, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    # A session with this terminal, so that the byte 3 is Ctrl-C to whatever runs in front.
    script = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-m", "allhands", *map(str, runs.arguments("-n", "2"))]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *command],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        env={
            **os.environ,
            "TERM": "xterm-256color",
            "COLUMNS": "100",
            "LINES": "30",
            "OPENBLAS_NUM_THREADS": "1",
        },
    )
    seen, asked, deadline = b"", False, time.monotonic() + 60
    try:
        while process.poll() is None or select.select([master], [], [], 0.1)[0]:
            assert time.monotonic() < deadline, seen[-2000:].decode()
            if select.select([master], [], [], 0.1)[0]:
                seen += os.read(master, 65536)
            if not asked and b"peak memory per rank" in seen:
                asked = bool(os.write(master, b"\x03"))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    # The terminal's own echo of Ctrl-C may cut a character in two.
    text = seen.decode(errors="replace")
    assert process.returncode == 130, text
    assert termios.tcgetattr(terminal) == before
    # The cursor, hidden while the board was drawn, is back; the last words stand alone on their
    # lines.
    assert text.count("\x1b[?25l") == 1
    assert text.rindex("\x1b[?25h") > text.index("\x1b[?25l")
    for words in ("validation loss", "tokens/s", "stopping after this step", f"/{FOR_EVER}"):
        assert words in text
    assert any(line.startswith("allhands: stopped after step") for line in text.splitlines())
    assert "Traceback" not in text
    os.close(master)
    os.close(terminal)
